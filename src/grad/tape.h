/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of the tape: tape.c (nodes), segment.c (nodes without an op), call.c (functions of the script),
 * hook.c (hooks of tensors), rule.c (the calls of gradient rules), walk.c (backward), target.c (gradients of chosen
 * tensors), weights.c (deferred weight gradients). */
#ifndef PS_TAPE_H
#define PS_TAPE_H
#include "tensor/tensor.h"

/* Values of ps_node.op for nodes without an op: a recompute segment; the tensors that a pipeline stage received; the
 * delayed gradient of a parameter; a function of the script; a leaf with hooks, where its gradients are summed. */
enum { SEGMENT = -1, BOUNDARY = -2, RELAY = -3, CALL = -4, LEAF = -5 };

typedef struct edge {
    ps_node *node;                 /* node that computed this input, or NULL */
    ps_tensor *leaf;               /* the input itself, if it is a leaf; if `node` is NULL too, no gradient is wanted */
    int out;                       /* index of the input among the outputs of `node` */
} edge;

typedef struct saved {
    ps_tensor *t;                  /* held; NULL if the tensor is absent or cheap */
    uint32_t version;
    ps_node *cheap;                /* node of a cheap op that recomputes the tensor, its output 0, when needed; or
                                    * NULL */
} saved;

struct ps_node {
    int64_t refs, seq, segment;
    ps_ctx *ctx;
    int op, n_in, n_out;
    int n_args;                    /* for a CALL: number of inputs that get a gradient; the other inputs up to n_in
                                    * are saved tensors */
    int64_t hooks;                 /* id of the hooks on its outputs, 0 for none */
    int64_t seen, target;          /* id of the last walk that marked the node (target.c), and of the last walk that
                                    * wants an output's gradient */
    bool leads;                    /* valid if `seen` is the walk's id: the node leads to a wanted gradient */
    int32_t module;                /* module in which the op ran, and for which its gradient rule also runs */
    bool passed, queued;
    bool side;                     /* the node is computed only from parameters, like the cast of a weight */
    bool listed;                   /* the walk has passed the node, but its weight gradients were deferred */
    bool has_rule;                 /* the gradient rule must still compute these gradients; otherwise they are in din */
    bool claims;                   /* the node counts in `later` of the cheap nodes that it has saved */
    int32_t later;                 /* number of nodes that will need the node's output after the walk has passed it */
    int64_t walk;                  /* id of the walk that counts the node in `waits` of the storages that it reads, 0
                                    * for none */
    edge *edges;                   /* [n_in] */
    saved *saved_in, *saved_out;   /* [n_in], [n_out] */
    ps_meta *in_meta;              /* [n_in] */
    ps_tensor **dout;              /* [n_out], held */
    ps_tensor **din;               /* [n_in] deferred gradients, held */
    ps_tensor *kept;               /* tensor (held) that the rule's first phase has kept for the second
                                    * (ps_grad_keep) */
    ps_tensor *holder;             /* tensor that gets a copy of the gradient of output holder_out, or NULL */
    int holder_out;
    int64_t place;                 /* place of the call, recorded in anomaly mode */
    ps_tensor *again;              /* the recomputed output of this cheap op */
    ps_node *next_free;            /* next in a list of nodes to free, or to count */
    ps_storage **reads;            /* for a segment: [n_reads] parameters that its function read */
    int n_reads;
    union { char bytes[1]; double align; } attrs;
};

/* Nodes whose weight gradients a walk deferred, in the order of the walk. */
typedef struct weight_list {
    int32_t vstage, micro;
    bool used;
    ps_node **nodes;
    int32_t n, capacity;
    int32_t at;                    /* index of the node that is due */
} weight_list;

/* A tensor whose gradient a walk computes. With targets, the walk does not compute the gradients of all leaves. */
typedef struct target {
    ps_tensor *t;
    ps_tensor *sum;                /* its gradient so far, held, or NULL */
} target;

struct ps_walk {
    ps_node **heap;                /* ordered by seq, largest first */
    int n, capacity;
    ps_node *stopped;              /* node at which the caller has work to do: a segment, a function, or hooks */
    bool at_hooks, hooks_ran;      /* the caller's work is to run the hooks of `stopped`; the hooks have run */
    bool keeps;                    /* another walk can pass the nodes again */
    int64_t id;                    /* unique for each walk */
    bool active;
    bool managed;                  /* the walk can reach a leaf that an engine manages */
    int32_t put_off;               /* index of the list for deferred weight gradients, -1 if none are deferred */
    weight_list *lists;
    int32_t n_lists, lists_capacity;
    int32_t processed;             /* index of the list that ps_backward_weights processes, -1 for none */
    target *targets;               /* [n_targets]; without targets, the walk computes the gradients of all leaves */
    int32_t n_targets, targets_capacity;
    bool seeks;                    /* the walk under way has targets */
};

/* Returns true if the edge leads to a leaf, or to a node computed only from parameters. A gradient along such an
 * edge can be deferred. */
static inline bool tape_is_later(const edge *e) { return e->leaf || (e->node && e->node->side); }

/* Returns the node in which gradients along an edge are summed, and sets *out to the index of the node's output.
 * Returns NULL if the gradients are added to the leaf itself. */
static inline ps_node *tape_sum_node(const edge *e, int *out)
{
    *out = e->node ? e->out : 0;
    return e->node ? e->node : e->leaf ? e->leaf->hook : NULL;
}

/* Returns true if a walk stops for the caller at this node, which the caller identifies by its id. */
static inline bool tape_is_callers(const ps_node *node) { return node->op == SEGMENT || node->op == CALL; }

/* Returns the type of a leaf's gradient. */
static inline int tape_leaf_dtype(const ps_tensor *leaf)
{
    return leaf->flags & PS_T_GRAD_F32 ? PS_F32 : leaf->dtype_;
}

/* -- tape.c */
const char *tape_name(const ps_node *node);          /* name of the node's op, for errors */
int tape_passed_already(const ps_node *node);        /* raises the error of a second backward */
ps_node *tape_node_new(ps_ctx *ctx, int op, int n_in, int n_out, int attrs_nbytes);
void tape_add_edge(ps_node *node, int i, ps_tensor *t);      /* sets input i to t, or to absent if t is NULL */
void tape_give_up(ps_node *node);                    /* called when a walk failed at the node or before it; no walk
                                                      * may pass it afterwards */
void tape_count_from(ps_walk *w, ps_node *node);     /* counts the nodes that the walk reaches from this one */
void tape_count_listed(ps_walk *w, ps_node *node);   /* counts this node and the nodes that its weight gradients
                                                      * reach */
void tape_uncount(ps_node *node);
void tape_is_now(ps_tensor *t);                      /* ends PS_T_LATER, so that the header is an owner again; t can
                                                      * be NULL */
void tape_let_go(ps_tensor **t);                     /* releases a held tensor, or does nothing for NULL */
void tape_release_saved(ps_node *node);
void tape_release_all(ps_node *node);                /* releases saved tensors and gradients */
int tape_leaf_final(ps_ctx *ctx, ps_tensor *leaf);

/* -- segment.c */
void tape_release_reads(ps_storage **list, int n);
int tape_take_reads(ps_ctx *ctx, ps_node *node);     /* moves the reads that were recorded since ps_segment_begin to
                                                      * the node */
int reap_reserve(ps_ctx *ctx);                       /* makes room for an id, so that segment_reap cannot fail */
void segment_reap(ps_ctx *ctx, int64_t segment);     /* reports that the caller can drop the object with this id */

/* -- hook.c */
void hooks_end(ps_node *node);                       /* ends the hooks of a node that the walk has passed; they do
                                                      * not run again */
int leaf_pass(ps_ctx *ctx, ps_walk *w, ps_node *node);       /* passes the sum of a LEAF node to its leaf */
void leaf_let_go(ps_node *node);                     /* called when the walk has passed a LEAF node, or never will */

/* -- target.c */
/* Marks the nodes to which `node` leads, and marks which of these nodes lead to a target. */
int targets_mark(ps_walk *w, ps_node *node);
bool targets_want(const ps_walk *w, const edge *e);  /* returns true if a gradient along the edge is wanted */
int targets_take(ps_walk *w, ps_node *node);         /* records the gradients of a node's outputs that are targets */
target *targets_leaf(ps_walk *w, const ps_tensor *leaf);     /* NULL if the leaf is not a target */
void targets_close(ps_walk *w);                      /* ends the walk, so that the gradients of its targets can be
                                                      * returned */
void targets_drop(ps_walk *w);                       /* releases targets and gradients */

/* -- rule.c */
int tape_check_version(const ps_node *node, const saved *s);     /* returns PS_ESTALE if the tensor was changed after
                                                                  * it was saved */

/* -- walk.c */
/* Visits the node that is due. Returns 1 if the walk stopped there; *stopped is then the caller's id. */
int tape_visit(ps_ctx *ctx, ps_walk *w, int64_t *stopped);
int tape_stop(ps_walk *w, ps_node *node, int64_t number, int64_t *stopped);
bool tape_is_due(const ps_walk *w, int64_t seq);     /* returns true if a node with a number above seq is due */
/* Passes on or defers the gradients of a node's inputs (held; NULL if an input has none). `later` is true if some
 * gradients are deferred. `split` is true if the rule's second phase computes the deferred gradients. Afterwards the
 * walk has passed the node. */
int tape_hand_on(ps_ctx *ctx, ps_walk *w, ps_node *node, ps_tensor **din, bool later, bool split);
bool tape_puts_off(const ps_walk *w, const ps_node *node);   /* returns true if gradients of some of the node's
                                                              * inputs are deferred */
int tape_give_holder(ps_ctx *ctx, ps_node *node);
int tape_add_to_leaf(ps_ctx *ctx, ps_tensor *leaf, ps_tensor *grad);     /* takes over grad, a held reference */
void tape_watch(ps_ctx *ctx, const ps_node *node);
/* Passes grad to the node or leaf of input i, and takes over the caller's reference to grad. */
int tape_deliver(ps_ctx *ctx, ps_walk *w, ps_node *node, int i, ps_tensor *grad);

/* -- weights.c */
/* Called when a walk begins that has an action INPUT: opens the list of that action. */
int weights_open(ps_ctx *ctx, ps_walk *w);
/* Continues with the list that is being processed. Returns the result of ps_backward_weights. */
int weights_go_on(ps_ctx *ctx, ps_walk *w, int64_t *stopped);
void weights_close(ps_walk *w);                      /* empties the list that is being processed, if any */
/* Called when the walk has passed the node except for the deferred gradients, which are those of inputs with
 * tape_is_later. If din is NULL, the rule has not run yet. If `split` is true, the rule's second phase computes the
 * deferred gradients. Otherwise they are in din (held), and this function takes them from there. Releases tensors
 * that the deferred gradients do not need. */
int weights_put_off(ps_walk *w, ps_node *node, bool split, ps_tensor **din);
/* Defers the gradient (held) of `to`, which is a root of the walk or an output of a segment. `to` is a leaf, or was
 * computed only from parameters. `seq` is the number that the walk has reached. */
int weights_relay(ps_walk *w, ps_tensor *to, ps_tensor *grad, int64_t seq);
/* Called after `listed`, `later` or `passed` has changed. Releases saved tensors that are no longer needed. */
void weights_release(ps_node *node);
void weights_unclaim(ps_node *cheap);                /* records that one node fewer will need the output of `cheap` */
void weights_drop(ps_walk *w);                       /* empties all lists */
#endif
