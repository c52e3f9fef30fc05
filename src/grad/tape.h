/* SPDX-License-Identifier: BSD-3-Clause
 * Declarations that the files of the tape share: tape.c (nodes), segment.c (nodes without an op), call.c (functions of
 * the script), hook.c (hooks of tensors), rule.c (functions for gradient rules), walk.c (backward), target.c (gradients
 * of chosen tensors) and weights.c (deferred weight gradients). */
#ifndef PS_TAPE_H
#define PS_TAPE_H
#include "tensor/tensor.h"

/* Values of ps_node.op for nodes without an op.
 * SEGMENT: a recompute segment.
 * BOUNDARY: tensors that a pipeline stage received.
 * RELAY: the deferred gradient of a parameter.
 * CALL: a function of the script.
 * LEAF: a leaf with hooks. */
enum { SEGMENT = -1, BOUNDARY = -2, RELAY = -3, CALL = -4, LEAF = -5 };

typedef struct edge {
    ps_node *node;                 /* node that computed this input, or NULL */
    ps_tensor *leaf;               /* the input itself if it is a leaf, otherwise NULL. If no gradient is wanted, node
                                    * and leaf are NULL */
    int out;                       /* index of the input among the outputs of `node` */
} edge;

typedef struct saved {
    ps_tensor *t;                  /* held; NULL if the tensor is absent or cheap */
    uint32_t version;
    ps_node *cheap;                /* node of the cheap op that recomputes the tensor as its output 0, or NULL */
} saved;

struct ps_node {
    int64_t refs, seq, segment;
    ps_ctx *ctx;
    int op, n_in, n_out;
    int n_args;                    /* CALL: number of inputs that get a gradient; the other inputs are saved tensors */
    int64_t hooks;                 /* id of the hooks on the node's outputs, 0 for none */
    int64_t seen, target;          /* seen: id of the last walk that marked the node. target: id of the last walk that
                                    * wants the gradient of one of its outputs (target.c) */
    bool leads;                    /* whether the node leads to a wanted gradient; valid if `seen` is the walk's id */
    int32_t module;                /* module in which the op and its gradient rule run */
    bool passed, queued;
    bool side;                     /* whether the output is computed only from parameters, like the cast of a weight */
    bool listed;                   /* whether the walk has passed the node and deferred its weight gradients */
    /* Whether the rule must still compute the deferred gradients. Otherwise din contains these gradients. */
    bool has_rule;
    bool claims;                   /* whether this node is counted in `later` of the cheap nodes that it has saved */
    int32_t later;                 /* number of nodes that will need this node's output after the walk has passed this
                                    * node */
    /* Id of the walk that counts this node in `waits` of the storages that the node reads, or 0. */
    int64_t walk;
    edge *edges;                   /* [n_in] */
    saved *saved_in, *saved_out;   /* [n_in], [n_out] */
    ps_meta *in_meta;              /* [n_in] */
    ps_tensor **dout;              /* [n_out], held */
    ps_tensor **din;               /* [n_in] deferred gradients, which are held */
    ps_tensor *kept;               /* tensor that the rule's first phase keeps for the second phase (ps_grad_keep),
                                    * held */
    ps_tensor *holder;             /* tensor that gets a copy of the gradient of output holder_out, or NULL */
    int holder_out;
    int64_t place;                 /* place of the call, recorded in anomaly mode */
    ps_tensor *again;              /* the recomputed output of a node with a cheap op, or NULL */
    int cheap_depth;               /* length of the longest chain of cheap ops that must run again before this node's
                                    * rule can read its inputs */
    ps_node *next_free;            /* next node in a list of nodes to free or to count */
    ps_storage **reads;            /* segment: [n_reads] parameters that the segment's function read */
    int n_reads;
    union { char bytes[1]; double align; } attrs;
};

/* The nodes whose weight gradients a walk has deferred, in the order in which the walk visited them. */
typedef struct weight_list {
    int32_t vstage, micro;
    bool used;
    ps_node **nodes;
    int32_t n, capacity;
    int32_t at;                    /* index of the node that is next */
} weight_list;

/* A tensor whose gradient was requested. A walk with targets computes only the targets' gradients, and does not compute
 * the gradients of all leaves. */
typedef struct target {
    ps_tensor *t;
    ps_tensor *sum;                /* the sum of its gradients so far, held, or NULL */
} target;

struct ps_walk {
    ps_node **heap;                /* ordered by seq, largest first */
    int n, capacity;
    ps_node *stopped;              /* the node at which the caller has work: a segment, a function or hooks */
    bool at_hooks, hooks_ran;      /* at_hooks: the caller must run the hooks of `stopped`. hooks_ran: the hooks of
                                    * `stopped` have run */
    bool keeps;                    /* whether another walk can pass the nodes again */
    int64_t id;                    /* unique for each walk */
    bool active;
    bool managed;                  /* whether the walk can reach a leaf that an engine manages */
    int32_t put_off;               /* index of the list for deferred weight gradients, -1 if none are deferred */
    weight_list *lists;
    int32_t n_lists, lists_capacity;
    int32_t processed;             /* index of the list that ps_backward_weights processes, -1 for none */
    target *targets;               /* [n_targets]; if empty, all leaves get their gradients */
    int32_t n_targets, targets_capacity;
    bool seeks;                    /* whether the current walk has targets */
};

/* Returns true if gradients along this edge can be deferred. They can if the edge leads to a leaf, or to a node that is
 * computed only from parameters. */
static inline bool tape_is_later(const edge *e) { return e->leaf || (e->node && e->node->side); }

/* Finds the node in which gradients along an edge are summed. Returns the node, and sets *out to the index of its
 * output. Returns NULL if the gradients are added directly to the leaf. */
static inline ps_node *tape_sum_node(const edge *e, int *out)
{
    *out = e->node ? e->out : 0;
    return e->node ? e->node : e->leaf ? e->leaf->hook : NULL;
}

/* Returns true if a walk stops at this node because its caller must run a function of the script. */
static inline bool tape_is_callers(const ps_node *node) { return node->op == SEGMENT || node->op == CALL; }

/* Returns the type of a leaf's gradient. */
static inline int tape_leaf_dtype(const ps_tensor *leaf)
{
    return leaf->flags & PS_T_GRAD_F32 ? PS_F32 : leaf->dtype_;
}

/* -- tape.c */
const char *tape_name(const ps_node *node);          /* name of the node's op, for errors */
int tape_passed_already(const ps_node *node);        /* sets and returns the error for a second backward through the
                                                      * node */
ps_node *tape_node_new(ps_ctx *ctx, int op, int n_in, int n_out, int attrs_nbytes);
void tape_add_edge(ps_node *node, int i, ps_tensor *t);      /* sets input i of the node to t; NULL means that the
                                                              * input is absent */
void tape_give_up(ps_node *node);                    /* called if a walk failed before it passed the node; no walk may
                                                      * pass the node any more */
void tape_count_from(ps_walk *w, ps_node *node);     /* counts the nodes that the walk reaches from this node */
void tape_count_listed(ps_walk *w, ps_node *node);   /* counts this node, and the nodes to which its weight gradients
                                                      * are passed */
void tape_uncount(ps_node *node);
void tape_is_now(ps_tensor *t);                      /* ends PS_T_LATER: the header counts as an owner again; t can
                                                      * be NULL */
void tape_let_go(ps_tensor **t);                     /* releases a held tensor; *t can be NULL */
void tape_release_saved(ps_node *node);
void tape_release_all(ps_node *node);                /* releases saved tensors and gradients */
int tape_leaf_final(ps_ctx *ctx, ps_tensor *leaf);

/* -- segment.c */
void tape_release_reads(ps_storage **list, int n);
int tape_take_reads(ps_ctx *ctx, ps_node *node);     /* stores in the node the reads that were recorded since
                                                      * ps_segment_begin() */
int reap_reserve(ps_ctx *ctx);                       /* reserves memory for an id, so that segment_reap cannot fail */
void segment_reap(ps_ctx *ctx, int64_t segment);     /* reports that the caller can drop the object with this id */

/* -- hook.c */
void hooks_end(ps_node *node);                       /* ends the hooks of a node, so that they do not run again */
int leaf_pass(ps_ctx *ctx, ps_walk *w, ps_node *node);       /* passes the sum in a LEAF node to its leaf */
void leaf_let_go(ps_node *node);                     /* called when the walk has passed a LEAF node, or when it will
                                                      * never pass the node */

/* -- target.c */
/* Marks all nodes to which `node` leads (seen), and sets `leads` of the nodes that lead to a target. */
int targets_mark(ps_walk *w, ps_node *node);
bool targets_want(const ps_walk *w, const edge *e);  /* returns whether a gradient along this edge is wanted */
int targets_take(ps_walk *w, ps_node *node);         /* keeps the gradients of the node's outputs that are targets */
target *targets_leaf(ps_walk *w, const ps_tensor *leaf);     /* returns NULL if the leaf is not a target */
void targets_close(ps_walk *w);                      /* ends the walk; after this call, the gradients of the targets can
                                                      * be returned */
void targets_drop(ps_walk *w);                       /* releases targets and gradients */

/* -- rule.c */
int tape_check_version(const ps_node *node, const saved *s);     /* returns PS_ESTALE if the tensor has changed since it
                                                                  * was saved */

/* -- walk.c */
/* Visits the next node. Returns 1 if the walk stopped at the node, and sets *stopped to the id that tells the caller
 * which work to do. */
int tape_visit(ps_ctx *ctx, ps_walk *w, int64_t *stopped);
int tape_stop(ps_walk *w, ps_node *node, int64_t number, int64_t *stopped);
bool tape_is_due(const ps_walk *w, int64_t seq);     /* returns whether a node with a number above seq is next */
/* Passes on the gradients of a node's inputs, or defers them. After this call, the walk has passed the node. din: the
 * gradients, which are held; NULL for inputs without a gradient. later: whether some gradients are deferred. split:
 * whether the second phase of the rule will compute the deferred gradients. */
int tape_hand_on(ps_ctx *ctx, ps_walk *w, ps_node *node, ps_tensor **din, bool later, bool split);
bool tape_puts_off(const ps_walk *w, const ps_node *node);   /* returns whether gradients of some inputs of the node are
                                                              * deferred */
int tape_give_holder(ps_ctx *ctx, ps_node *node);
int tape_add_to_leaf(ps_ctx *ctx, ps_tensor *leaf, ps_tensor *grad);     /* grad is a held reference, which the
                                                                          * function owns */
void tape_watch(ps_ctx *ctx, const ps_node *node);
/* Passes grad to the node or the leaf of input i. grad is a held reference, which the function owns. */
int tape_deliver(ps_ctx *ctx, ps_walk *w, ps_node *node, int i, ps_tensor *grad);

/* -- weights.c */
/* Opens a list of deferred weight gradients. Called when the walk of an INPUT action begins. */
int weights_open(ps_ctx *ctx, ps_walk *w);
/* Continues to process the current list. Returns the same values as ps_backward_weights. */
int weights_go_on(ps_ctx *ctx, ps_walk *w, int64_t *stopped);
void weights_close(ps_walk *w);                      /* empties the list that is being processed, if there is one */
/* Adds a node to the list of nodes with deferred gradients. The walk has passed the node. The gradients of inputs for
 * which tape_is_later() is true are deferred. If din is NULL, the rule has not run yet, and it will compute them later.
 * If split is set, the second phase of the rule will compute them. Otherwise they are in din (held), and this function
 * takes ownership of them. Releases tensors that the deferred gradients do not need. */
int weights_put_off(ps_walk *w, ps_node *node, bool split, ps_tensor **din);
/* Defers grad (held), the gradient of `to`. `to` is a root of the walk or an output of a segment. It is a leaf, or is
 * computed only from parameters. `seq` is the number of the node that the walk has reached. */
int weights_relay(ps_walk *w, ps_tensor *to, ps_tensor *grad, int64_t seq);
/* Releases saved tensors that are no longer needed. Called after `listed`, `later` or `passed` has changed. */
void weights_release(ps_node *node);
void weights_unclaim(ps_node *cheap);                /* decrements the number of nodes that will need the output of
                                                      * `cheap` */
void weights_drop(ps_walk *w);                       /* empties all lists */
/* Fails with PS_ESTATE, because a walk is active. */
static inline int ps_fail_walking(void)
{
    return ps_fail(PS_ESTATE, "a backward is in progress: hooks and backward functions cannot start another one");
}

#endif
