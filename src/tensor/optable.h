/* SPDX-License-Identifier: BSD-3-Clause
 * The table of ops, which is made from ops.def, and the signatures of the ops' rules for shapes and gradients. Rules
 * work with shapes and tensors. They never see memory or a device. */
#ifndef PS_OPTABLE_H
#define PS_OPTABLE_H
#include <stdbool.h>
#include "base/dtype.h"

typedef struct ps_meta {
    int32_t dtype, ndim;                      /* ndim: -1 if the output is not wanted */
    int64_t shape[PS_MAX_DIMS], stride[PS_MAX_DIMS], offset;   /* stride, offset: used only for views, or if `permuted`
                                                                * is set */
    bool permuted;                            /* whether the output is dense, but not in row-major order */
} ps_meta;

/* The arguments of a shape rule. The rule sets out[i] from `in`, in which absent inputs are NULL. The rule can
 * normalise `attrs`, such as negative dimensions. After the rule has run, outputs that the caller passed are compared
 * with out[i]. */
typedef struct ps_infer {
    int op, n_in;
    const ps_tensor *const *in;
    void *attrs;
    uint32_t needs;                           /* bit set of inputs whose gradient will be needed */
    uint32_t given;                           /* bit set of outputs that the caller passed */
    uint64_t copied;                          /* bit set of inputs that are copies made for this call */
    /* Whether the step runs ahead (ps_step_runs_ahead): gradients of embeddings [V, C] are computed in backward instead
     * of in forward. */
    bool ahead;
    ps_meta *out;
} ps_infer;
typedef int (*ps_infer_rule)(ps_infer *f);

/* The arguments of a gradient rule. The rule computes the gradients of an op's inputs from dout, the gradients of the
 * op's outputs. dout[i] is NULL if output i got no gradient, but at least one entry is not NULL. For every input i for
 * which ps_grad_wants(g, i) is true, the rule passes a tensor to ps_grad_give(). Tensors that ps_run() makes exist
 * until the rule returns.
 *
 * If weight gradients are deferred, a rule with the flag SPLIT runs in two phases. The first phase computes the
 * gradients of inputs through which the walk continues. The second phase runs later. It computes the gradients of
 * parameters, and of tensors that were computed only from parameters. In each phase, ps_grad_wants() returns whether
 * this phase needs a gradient. */
typedef enum ps_grad_phase { PS_GRAD_WHOLE, PS_GRAD_INPUTS, PS_GRAD_WEIGHTS } ps_grad_phase;
typedef struct ps_grad {
    ps_ctx *ctx;
    ps_node *node;
    const void *attrs;
    int n_in, n_out, n_temps;
    ps_grad_phase phase;
    bool puts_off;                            /* weight gradients are deferred, so the rule must not add to sums now */
    ps_tensor **dout, **din;
    ps_tensor *temps[32];
} ps_grad;
typedef int (*ps_grad_rule)(ps_grad *g);

/* Functions for gradient rules (grad/rule.c). */
bool ps_grad_wants(const ps_grad *g, int i);
bool ps_grad_wants_ever(const ps_grad *g, int i);            /* true if the gradient is wanted in this phase or in the
                                                              * other phase */
/* ps_grad_keep() keeps a tensor from a rule's first phase for the second phase. It does nothing if the rule runs in one
 * phase. ps_grad_kept() returns the kept tensor (lent), or NULL. */
int ps_grad_keep(ps_grad *g, ps_tensor *t);
ps_tensor *ps_grad_kept(const ps_grad *g);
int ps_grad_in(ps_grad *g, int i, ps_tensor **out);          /* a saved input, lent; NULL if it was absent */
int ps_grad_out(ps_grad *g, int i, ps_tensor **out);         /* a saved output, lent */
/* Called before a rule changes the saved tensor *t. If another walk can still use the graph, replaces *t by a copy. */
int ps_grad_own(ps_grad *g, ps_tensor **t);
const ps_meta *ps_grad_in_meta(const ps_grad *g, int i);
void ps_grad_give(ps_grad *g, int i, ps_tensor *t);          /* passes t (lent) as the gradient of input i */
/* Run an op on n_in inputs. The inputs are the last arguments of ps_run(). If out[i] is not NULL, the op writes output
 * i to that tensor; `out` has PS_MAX_OUT entries. */
int ps_run(ps_grad *g, int op, const void *attrs, ps_tensor **out, int n_in, ...);
int ps_run_list(ps_grad *g, int op, const void *attrs, ps_tensor **out, int n_in, ps_tensor *const *in);
/* Sets *out to the destination (lent) of the gradient of input i. The rule passes *out as the output of the op that
 * computes the gradient. If *accumulate is 1, the op must add to *out. If *accumulate is 0, the op must overwrite *out,
 * or make a tensor if *out is NULL, and the rule must pass the op's result to ps_grad_give(). */
int ps_grad_dest(ps_grad *g, int i, ps_tensor **out, int32_t *accumulate);
/* Makes a contiguous tensor with the type and shape of meta and with undefined contents. The tensor exists until the
 * rule returns. */
int ps_grad_new(ps_grad *g, int device, const ps_meta *meta, ps_tensor **out);
/* For ops with an `add` input. ps_grad_pending() returns the sum of the gradients that input i has received so far, or
 * NULL. It sets *out to the same tensor if the new sum may overwrite the tensor, and to NULL otherwise. The op then
 * makes a tensor for the new sum. ps_grad_replace() stores the new sum. */
ps_tensor *ps_grad_pending(ps_grad *g, int i, ps_tensor **out);
void ps_grad_replace(ps_grad *g, int i, ps_tensor *sum);

/* The arguments of a cost rule. The rule adds to flops and bytes (ps_op_cost). It uses the types and shapes of `in` and
 * `out`, in which absent tensors are NULL. */
typedef struct ps_cost {
    int n_in, n_out;
    ps_tensor *const *in, *const *out;
    const void *attrs;
    int64_t flops, bytes;
} ps_cost;
typedef void (*ps_cost_rule)(ps_cost *c);

enum {
    PS_OPF_VIEW = 1,
    PS_OPF_STRIDED = 2,
    PS_OPF_PROMOTE = 4,
    PS_OPF_CHEAP = 8,
    PS_OPF_INPLACE = 16,
    PS_OPF_ACCUM = 32,
    PS_OPF_ROWS = 64,
    PS_OPF_MOVE = 128,
    PS_OPF_RANKS = 256,
    PS_OPF_SPLIT = 512,
    PS_OPF_PRODUCT = 1024
};

enum { PS_CHEAP_MIN_NBYTES = 1 << 20 };        /* cheap outputs of at least this size in bytes are recomputed in
                                                * backward */

typedef struct ps_opinfo {
    const char *name, *ins, *outs, *saved;
    int attrs_nbytes;
    ps_infer_rule infer;
    ps_grad_rule grad;                        /* NULL if the op has no gradient */
    ps_cost_rule cost;
    unsigned flags;
    /* The following fields are computed at start from the strings above. */
    int n_in, n_out;                          /* n_in is -1 if the op accepts any number of inputs */
    uint64_t optional_in, saved_in, ahead_in;  /* bit sets; ahead_in: inputs that are saved only if the step runs
                                                * ahead */
    uint32_t saved_out, hidden_out;
    int8_t saved_for[8];                      /* input i is saved only if input saved_for[i] wants a gradient; -1: input
                                               * i is always saved */
    const char *in_name[8];                   /* pointers into `ins`; a name ends at a space, ?, * or 0 */
} ps_opinfo;
const ps_opinfo *ps_op(int op);               /* `op` must be the index of an op */

/* -- helpers for rules (ops/rules.c) ------------------------------------------------------------------------------ */
/* Fails with a message that contains the op's name, the text, and the shapes and types of all inputs. */
int ps_rule_fail(const ps_infer *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
ps_meta ps_meta_like(const ps_tensor *t);                    /* dtype and shape of t */
ps_meta ps_tensor_meta(const ps_tensor *t);                  /* dtype, shape, strides and offset of t */
void ps_meta_set_contiguous(ps_meta *m);                     /* sets strides from shape, and offset to 0 */
const char *ps_shape_text(int ndim, const int64_t *shape, char *buf, size_t size);   /* "[2, 3]" */
int ps_rule_dim(const ps_infer *f, int ndim, int32_t *dim);  /* checks a dimension; negative dimensions are counted
                                                              * from the end */
int ps_rule_broadcast(const ps_infer *f, const ps_tensor *a, const ps_tensor *b, ps_meta *out);   /* infers only the
                                                                                                   * shape */
bool ps_same_shape(const ps_tensor *a, const ps_tensor *b);
int ps_rule_ranks(const ps_infer *f);        /* checks the size, rank and root of an op of several ranks
                                              * (ops/ranks.c) */
/* Checks that two inputs have the same float type. The error uses name_a and name_b to say which input must be
 * converted. */
int ps_rule_one_type(const ps_infer *f, const ps_tensor *a, const char *name_a, const ps_tensor *b, const char *name_b);
/* Checks the type and shape of an input `t`. `name` is the name of `t` in the error. */
int ps_rule_like(const ps_infer *f, const ps_tensor *t, const char *name, int dtype, int ndim, const int64_t *shape);
/* For gradient rules: each function runs an op with one output. */
int ps_run1(ps_grad *g, int op, ps_tensor **out, ps_tensor *a, ps_tensor *b);   /* without attributes; b may be NULL */
int ps_affine(ps_grad *g, ps_tensor **out, ps_tensor *x, double alpha, double beta);
int ps_scaled(ps_grad *g, ps_tensor **out, ps_tensor *x, double alpha);         /* alpha * x, which keeps the sign of
                                                                                 * zeros */
int ps_cast(ps_grad *g, ps_tensor **out, ps_tensor *x, int dtype);
int ps_filled(ps_grad *g, ps_tensor **out, int device, const ps_meta *meta, double value);
int ps_scalar_like(ps_grad *g, ps_tensor **out, const ps_tensor *like,
                   double value); /* a tensor with 0 dimensions, and with the type and device of `like` */
int ps_tensor_read_scalar(const ps_tensor *t, double *out);  /* waits for the device */
int ps_sum_to(ps_grad *g, ps_tensor **out, ps_tensor *x, const ps_meta *like);  /* undoes broadcasting */
int ps_reshape_to(ps_grad *g, ps_tensor **out, ps_tensor *x, int ndim, const int64_t *shape);
/* For a product x w + b, computes the gradients of w (input iw) and b (input ib) by one op. If an input already has a
 * gradient, the new gradient is added to it directly. ib is -1 if b gets no gradient. x and dy are [..., features]
 * (ops/matmul.c). */
int ps_give_weights(ps_grad *g, int iw, int ib, bool out_in, ps_tensor *x, ps_tensor *dy);
#endif
