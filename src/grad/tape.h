/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the files of the tape: tape.c (nodes), segment.c (nodes without an op), call.c (functions of the script),
 * hook.c (hooks of tensors), rule.c (the calls of gradient rules), walk.c (backward), target.c (gradients of chosen
 * tensors), weights.c (weight gradients that are put off). */
#ifndef PS_TAPE_H
#define PS_TAPE_H
#include "tensor/tensor.h"

/* ps_node.op of nodes without an op: a recompute segment; the tensors that a stage of a pipeline received; the delayed
 * gradient of a parameter; a function of the script; a leaf with hooks, where its gradients are summed. */
enum { SEGMENT = -1, BOUNDARY = -2, RELAY = -3, CALL = -4, LEAF = -5 };

typedef struct edge {
    ps_node *node;                 /* the node that computed this input, or NULL */
    ps_tensor *leaf;               /* or the input itself, if it is a leaf. If both are NULL, no gradient is wanted */
    int out;                       /* which output of node */
} edge;

typedef struct saved {
    ps_tensor *t;                  /* held; NULL when absent or cheap */
    uint32_t version;
    ps_node *cheap;                /* its output 0 is the tensor and is computed again when needed; or NULL */
} saved;

struct ps_node {
    int64_t refs, seq, segment;
    ps_ctx *ctx;
    int op, n_in, n_out;
    int n_args;                    /* of a CALL: number of inputs that get a gradient; the rest of n_in are saved
                                    * tensors */
    int64_t hooks;                 /* number of the hooks of its outputs; 0: none */
    int64_t seen, target;          /* id of the last walk that marked it (target.c); id of the last walk that wants an
                                    * output's gradient */
    bool leads;                    /* seen: the node leads to a wanted gradient */
    int32_t module;                /* the module in which the op ran. Its gradient rule also runs for this module */
    bool passed, queued;
    bool side;                     /* it is computed only from parameters, as the cast of a weight is */
    bool listed;                   /* the walk has passed it, but its weight gradients were put off */
    bool has_rule;                 /* the gradient rule must still compute these gradients; else they are in din */
    bool claims;                   /* it counts in `later` of the cheap nodes that it has saved */
    int32_t later;                 /* number of nodes that will need its output after it has passed */
    int64_t walk;                  /* id of the walk that counts it in `waits` of the storages that it reads; 0: none */
    edge *edges;                   /* [n_in] */
    saved *saved_in, *saved_out;   /* [n_in], [n_out] */
    ps_meta *in_meta;              /* [n_in] */
    ps_tensor **dout;              /* [n_out], held */
    ps_tensor **din;               /* [n_in], held: gradients that were put off */
    ps_tensor *kept;               /* held: a tensor of the rule's first phase for the second (ps_grad_keep) */
    ps_tensor *holder;             /* the tensor that gets a copy of the gradient of output holder_out, or NULL */
    int holder_out;
    int64_t place;                 /* place of the call, recorded in anomaly mode */
    ps_tensor *again;              /* the output of this cheap op, computed again */
    ps_node *next_free;            /* link in a list of nodes to free, or to count */
    ps_storage **reads;            /* [n_reads] of a segment: the parameters that its function read */
    int n_reads;
    union { char bytes[1]; double align; } attrs;
};

/* Nodes whose weight gradients a walk put off, in the order of the walk. */
typedef struct weight_list {
    int32_t vstage, micro;
    bool used;
    ps_node **nodes;
    int32_t n, capacity;
    int32_t at;                    /* place of the node that is due */
} weight_list;

/* A tensor whose gradient a walk wants, instead of those of all leaves. */
typedef struct target {
    ps_tensor *t;
    ps_tensor *sum;                /* held: its gradient so far; NULL: none */
} target;

struct ps_walk {
    ps_node **heap;                /* ordered by seq, largest first */
    int n, capacity;
    ps_node *stopped;              /* the node at which the caller has work to do: a segment, a function, hooks */
    bool at_hooks, hooks_ran;      /* the caller's work is to run the hooks of `stopped`; the hooks have run */
    bool keeps;                    /* another walk can pass the nodes again */
    int64_t id;                    /* unique for each walk */
    bool active;
    bool managed;                  /* the walk can reach a leaf of an engine */
    int32_t put_off;               /* index of the list to which weight gradients are put off; -1: none are put off */
    weight_list *lists;
    int32_t n_lists, lists_capacity;
    int32_t processed;             /* index of the list that ps_backward_weights processes; -1: none */
    target *targets;               /* [n_targets]; if there are none, the gradients of all leaves are wanted */
    int32_t n_targets, targets_capacity;
    bool seeks;                    /* the walk under way has targets */
};

/* True if the edge leads to a leaf, or to a node computed only from parameters. A gradient along such an edge can be
 * put off. */
static inline bool tape_is_later(const edge *e) { return e->leaf || (e->node && e->node->side); }

/* Returns the node where gradients along an edge are summed, and its output. NULL: they are added to the leaf
 * itself. */
static inline ps_node *tape_sum_node(const edge *e, int *out)
{
    *out = e->node ? e->out : 0;
    return e->node ? e->node : e->leaf ? e->leaf->hook : NULL;
}

/* True if a walk stops for the caller at this node. The caller knows the node by its number. */
static inline bool tape_is_callers(const ps_node *node) { return node->op == SEGMENT || node->op == CALL; }

/* The type of a leaf's gradient. */
static inline int tape_leaf_dtype(const ps_tensor *leaf)
{
    return leaf->flags & PS_T_GRAD_F32 ? PS_F32 : leaf->dtype_;
}

/* -- tape.c */
const char *tape_name(const ps_node *node);          /* the name of its op, for errors */
int tape_passed_already(const ps_node *node);        /* raises the error of a second backward */
ps_node *tape_node_new(ps_ctx *ctx, int op, int n_in, int n_out, int attrs_nbytes);
void tape_add_edge(ps_node *node, int i, ps_tensor *t);      /* input i is t. t NULL: the input is absent */
void tape_give_up(ps_node *node);                    /* a walk failed at the node or before it, so no walk may pass
                                                      * it */
void tape_count_from(ps_walk *w, ps_node *node);     /* counts the nodes that the walk reaches from this one */
void tape_count_listed(ps_walk *w, ps_node *node);   /* counts this node, and those that its weight gradients reach */
void tape_uncount(ps_node *node);
void tape_is_now(ps_tensor *t);                      /* ends PS_T_LATER: the header is an owner again; t may be NULL */
void tape_let_go(ps_tensor **t);                     /* releases a held tensor, or NULL */
void tape_release_saved(ps_node *node);
void tape_release_all(ps_node *node);                /* saved tensors and gradients */
int tape_leaf_final(ps_ctx *ctx, ps_tensor *leaf);

/* -- segment.c */
void tape_release_reads(ps_storage **list, int n);
int tape_take_reads(ps_ctx *ctx, ps_node *node);     /* the reads that were recorded since ps_segment_begin become the
                                                      * node's */
int reap_reserve(ps_ctx *ctx);                       /* makes room for a number, so that segment_reap cannot fail */
void segment_reap(ps_ctx *ctx, int64_t segment);     /* the caller may forget the object that it knows by this number */

/* -- hook.c */
void hooks_end(ps_node *node);                       /* the hooks of a node that the walk has passed do not run again */
int leaf_pass(ps_ctx *ctx, ps_walk *w, ps_node *node);       /* passes the sum of a LEAF to its leaf */
void leaf_let_go(ps_node *node);                     /* the walk has passed a LEAF, or it is known that it never will */

/* -- target.c */
/* Marks the nodes that `node` leads to, and those of them that lead to a target. */
int targets_mark(ps_walk *w, ps_node *node);
bool targets_want(const ps_walk *w, const edge *e);  /* a gradient along the edge is wanted */
int targets_take(ps_walk *w, ps_node *node);         /* notes the gradients of a node's outputs that are targets */
target *targets_leaf(ps_walk *w, const ps_tensor *leaf);     /* NULL: the leaf is no target */
void targets_close(ps_walk *w);                      /* the walk is over, so the gradients of its targets can be
                                                      * taken */
void targets_drop(ps_walk *w);                       /* releases targets and gradients */

/* -- rule.c */
int tape_check_version(const ps_node *node, const saved *s);     /* PS_ESTALE: the tensor was changed since it was
                                                                  * saved */

/* -- walk.c */
/* Visits the node that is due. 1: the walk stopped there, and *stopped is the number that the caller knows. */
int tape_visit(ps_ctx *ctx, ps_walk *w, int64_t *stopped);
int tape_stop(ps_walk *w, ps_node *node, int64_t number, int64_t *stopped);
bool tape_is_due(const ps_walk *w, int64_t seq);     /* a node with a number above seq is due */
/* Passes on the gradients of a node's inputs (held; NULL: none), or puts them off. later: some of them are put off;
 * split: the rule's second phase computes them. Afterwards the walk has passed the node. */
int tape_hand_on(ps_ctx *ctx, ps_walk *w, ps_node *node, ps_tensor **din, bool later, bool split);
bool tape_puts_off(const ps_walk *w, const ps_node *node);   /* true if gradients of some of the node's inputs are put
                                                              * off */
int tape_give_holder(ps_ctx *ctx, ps_node *node);
int tape_add_to_leaf(ps_ctx *ctx, ps_tensor *leaf, ps_tensor *grad);     /* owns grad, a held reference, from now on */
void tape_watch(ps_ctx *ctx, const ps_node *node);
/* Passes a gradient, a held reference, to the node or leaf of input i. */
int tape_deliver(ps_ctx *ctx, ps_walk *w, ps_node *node, int i, ps_tensor *grad);

/* -- weights.c */
/* The walk that begins has an action INPUT: opens the list of that action. */
int weights_open(ps_ctx *ctx, ps_walk *w);
/* Continues with the list that is being processed. Returns the same as ps_backward_weights. */
int weights_go_on(ps_ctx *ctx, ps_walk *w, int64_t *stopped);
void weights_close(ps_walk *w);                      /* empties the list that is being processed, if there is one */
/* The walk has passed the node, except for the gradients of inputs with tape_is_later, which are put off. din NULL: the
 * rule has not run yet. split: the rule's second phase computes these gradients. Otherwise they are already in din
 * (held), and this function takes them from there. Releases tensors that the gradients do not need. */
int weights_put_off(ps_walk *w, ps_node *node, bool split, ps_tensor **din);
/* Puts off the gradient (held) of `to`: a root of the walk or an output of a segment that is a leaf or was computed
 * only from parameters. seq: the number that the walk has reached. */
int weights_relay(ps_walk *w, ps_tensor *to, ps_tensor *grad, int64_t seq);
/* Call this after `listed`, `later` or `passed` changed. Releases saved tensors that are no longer needed. */
void weights_release(ps_node *node);
void weights_unclaim(ps_node *cheap);                /* one node fewer will need its output */
void weights_drop(ps_walk *w);                       /* empties all lists */
#endif
