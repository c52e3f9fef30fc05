/* SPDX-License-Identifier: BSD-3-Clause
 * Softmax and losses: shapes and gradients. */
#include <string.h>
#include "base/error.h"
#include "tensor/optable.h"

int infer_cross_entropy(ps_infer *f);
int infer_cross_entropy_backward(ps_infer *f);
int infer_nll_loss(ps_infer *f);
int infer_nll_loss_backward(ps_infer *f);
int infer_lm_loss(ps_infer *f);
int infer_logit_stats(ps_infer *f);
int infer_logit_loss(ps_infer *f);
int infer_parallel_lm_loss(ps_infer *f);
int grad_softmax(ps_grad *g);
int grad_log_softmax(ps_grad *g);
int grad_cross_entropy(ps_grad *g);
int grad_nll_loss(ps_grad *g);
int grad_lm_loss(ps_grad *g);
int grad_parallel_lm_loss(ps_grad *g);

static int softmax_like(ps_grad *g, int op)
{
    ps_tensor *y, *dx;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_run1(g, op, &dx, y, g->dout[0]));
    ps_grad_give(g, 0, dx);
    return 0;
}
int grad_softmax(ps_grad *g) { return softmax_like(g, PS_OP_softmax_backward); }
int grad_log_softmax(ps_grad *g) { return softmax_like(g, PS_OP_log_softmax_backward); }

/* Checks the targets. There must be one integer for each row of `rows` [..., last]. */
static int check_targets(const ps_infer *f, const ps_tensor *rows, const ps_tensor *target)
{
    if (rows->ndim < 1 || !ps_dtype_is_float(rows->dtype_)) return ps_rule_fail(f, "x must have float rows");
    if (target->dtype_ != PS_I32 && target->dtype_ != PS_I64) return ps_rule_fail(f, "targets must be int32 or int64");
    if (target->ndim != rows->ndim - 1 || memcmp(target->shape_, rows->shape_, sizeof(int64_t) * (size_t)target->ndim))
        return ps_rule_fail(f, "targets must have the shape of x without its last dimension: one target per row");
    return 0;
}

static int check_reduction(const ps_infer *f, int reduction)
{
    return reduction >= 0 && reduction <= 2 ? 0 : ps_rule_fail(f, "reduction is %d; it must be 0, 1 or 2", reduction);
}

/* Returns the meta of the output `hits`. It contains the number of hits and the number of rows whose target is not
 * ignored. */
static ps_meta hits_of(int want)
{
    return want ? (ps_meta){ .dtype = PS_I64, .ndim = 1, .shape = { 2 } } : (ps_meta){ .ndim = -1 };
}

int infer_cross_entropy(ps_infer *f)
{
    const ps_attrs_cross_entropy *at = f->attrs;
    PS_TRY(check_targets(f, f->in[0], f->in[1]));
    PS_TRY(check_reduction(f, at->reduction));
    f->out[1] = ps_meta_like(f->in[1]);
    f->out[1].dtype = f->in[0]->dtype_ == PS_F64 ? PS_F64 : PS_F32;
    f->out[0] = f->out[1];
    if (at->reduction != 0) f->out[0].ndim = 0;
    f->out[2] = hits_of(at->want_hits);
    return 0;
}

int infer_cross_entropy_backward(ps_infer *f)
{
    const ps_attrs_cross_entropy_backward *at = f->attrs;
    const ps_tensor *target = f->in[1];
    int dtype = f->in[0]->dtype_ == PS_F64 ? PS_F64 : PS_F32;
    PS_TRY(check_targets(f, f->in[0], target));
    PS_TRY(check_reduction(f, at->reduction));
    PS_TRY(ps_rule_like(f, f->in[2], "lse", dtype, target->ndim, target->shape_));
    PS_TRY(ps_rule_like(f, f->in[3], "dloss", dtype, at->reduction == 0 ? target->ndim : 0, target->shape_));
    f->out[0] = ps_meta_like(f->in[0]);
    return 0;
}

int grad_cross_entropy(ps_grad *g)
{
    ps_tensor *logits, *target, *lse, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &logits));
    PS_TRY(ps_grad_in(g, 1, &target));
    PS_TRY(ps_grad_out(g, 1, &lse));
    PS_TRY(ps_run(g, PS_OP_cross_entropy_backward, g->attrs, all, 4, logits, target, lse, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

/* Checks the weights of the V classes. `weight` can be NULL. */
static int check_weight(const ps_infer *f, const ps_tensor *weight, int dtype, int64_t V)
{
    return weight ? ps_rule_like(f, weight, "weight", dtype, 1, &V) : 0;
}

int infer_nll_loss(ps_infer *f)
{
    const ps_attrs_nll_loss *at = f->attrs;
    const ps_tensor *logp = f->in[0], *target = f->in[1];
    PS_TRY(check_targets(f, logp, target));
    PS_TRY(check_reduction(f, at->reduction));
    PS_TRY(check_weight(f, f->in[2], logp->dtype_, logp->shape_[logp->ndim - 1]));
    f->out[0] = ps_meta_like(target);
    f->out[0].dtype = logp->dtype_;
    if (at->reduction != 0) f->out[0].ndim = 0;
    return 0;
}

int infer_nll_loss_backward(ps_infer *f)
{
    const ps_attrs_nll_loss_backward *at = f->attrs;
    const ps_tensor *target = f->in[0], *dloss = f->in[1];
    PS_TRY(check_reduction(f, at->reduction));
    if (target->dtype_ != PS_I32 && target->dtype_ != PS_I64) return ps_rule_fail(f, "targets must be int32 or int64");
    if (target->ndim >= PS_MAX_DIMS || at->classes < 0 || !ps_dtype_is_float(dloss->dtype_))
        return ps_rule_fail(f, "dloss must be a float tensor, and targets have less than %d dimensions", PS_MAX_DIMS);
    PS_TRY(ps_rule_like(f, dloss, "dloss", dloss->dtype_, at->reduction == 0 ? target->ndim : 0, target->shape_));
    PS_TRY(check_weight(f, f->in[2], dloss->dtype_, at->classes));
    f->out[0] = ps_meta_like(target);
    f->out[0].dtype = dloss->dtype_;
    f->out[0].shape[f->out[0].ndim++] = at->classes;
    return 0;
}

int grad_nll_loss(ps_grad *g)
{
    const ps_attrs_nll_loss *at = g->attrs;
    const ps_meta *logp = ps_grad_in_meta(g, 0);
    ps_attrs_nll_loss_backward attrs = { .ignore_index = at->ignore_index, .classes = logp->shape[logp->ndim - 1],
                                         .reduction = at->reduction };
    ps_tensor *target, *weight, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 1, &target));
    PS_TRY(ps_grad_in(g, 2, &weight));
    PS_TRY(ps_run(g, PS_OP_nll_loss_backward, &attrs, all, 3, target, g->dout[0], weight));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int infer_lm_loss(ps_infer *f)
{
    ps_attrs_lm_loss *at = f->attrs;
    const ps_tensor *x = f->in[0], *w = f->in[1];
    PS_TRY(check_targets(f, x, f->in[2]));
    PS_TRY(ps_rule_one_type(f, x, "x", w, "w"));
    if (w->ndim != 2 || w->shape_[1] != x->shape_[x->ndim - 1])
        return ps_rule_fail(f, "x must be [..., C] and w [V, C]");
    if (at->reduction != 1 && at->reduction != 2)
        return ps_rule_fail(f, "reduction %d is not 1 (mean) or 2 (sum)", at->reduction);
    if (f->in[3]) PS_TRY(ps_rule_like(f, f->in[3], "bias", x->dtype_, 1, w->shape_));
    if (f->needs) at->want_grad = (int32_t)((f->needs & 3) | (f->needs >> 1 & 4));  /* otherwise grad_lm_loss sets
                                                                                     * want_grad */
    if (f->needs && f->ahead) at->want_grad &= 1;
    at->dloss = 1;
    /* The gradient of a mean over many rows would underflow in fp16, so the gradient is scaled. The scale is a power of
     * two, so that scaling is exact. */
    if (x->dtype_ == PS_F16 && at->reduction == 1)
        while (at->dloss * 2 <= (double)f->in[2]->numel_) at->dloss *= 2;
    f->out[0] = (ps_meta){ .dtype = x->dtype_ == PS_F64 ? PS_F64 : PS_F32 };
    f->out[1] = ps_meta_like(x);
    f->out[2] = ps_meta_like(w);
    f->out[3] = (ps_meta){ .dtype = w->dtype_, .ndim = 1, .shape = { w->shape_[0] } };
    f->out[4] = hits_of(at->want_hits);
    if (!(at->want_grad & 1)) f->out[1].ndim = -1;
    if (!(at->want_grad & 2)) f->out[2].ndim = -1;
    if (!(at->want_grad & 4)) f->out[3].ndim = -1;
    return 0;
}

/* -- losses of a product, which compute their gradients in the same op --------------------------------------------- */
/* Runs the op again to compute the gradients that forward did not compute. The panels are the same, so these gradients
 * are bit-identical to those that forward would have computed. inputs: the indices of the inputs x, w and bias. want:
 * the field of attrs that says which gradients forward has computed. attrs must not request hits, because forward has
 * counted them. */
static int panels_again(ps_grad *g, int op, const int inputs[3], void *attrs, int32_t *want, ps_tensor **all)
{
    ps_tensor *in[8] = { NULL };
    int32_t lacks = 0;
    for (int i = 0; i < 3; i++) if (ps_grad_wants(g, inputs[i]) && !(*want >> i & 1)) lacks |= 1 << i;
    *want = lacks;
    if (!lacks) return 0;
    for (int i = 0; i < g->n_in; i++) PS_TRY(ps_grad_in(g, i, &in[i]));
    return ps_run_list(g, op, attrs, all, g->n_in, in);
}

/* Passes on the gradients that were computed together with the loss. They were computed as if the loss's gradient were
 * 1 / alpha, a power of two. Here they are multiplied in place by alpha and by the loss's gradient, which stays on the
 * device. `again` contains the results of panels_again(). */
static int give_panels(ps_grad *g, const int inputs[3], double alpha, ps_tensor *const *again)
{
    ps_attrs_scale_by_ attrs = { .alpha = alpha };
    for (int i = 0; i < 3; i++) {
        if (!ps_grad_wants(g, inputs[i])) continue;
        ps_tensor *t = again[1 + i], *all[PS_MAX_OUT] = { NULL };
        if (!t) {
            PS_TRY(ps_grad_out(g, 1 + i, &t));
            PS_TRY(ps_grad_own(g, &t));
        }
        PS_TRY(ps_run(g, PS_OP_scale_by_, &attrs, all, 2, t, g->dout[0]));
        ps_grad_give(g, inputs[i], t);
    }
    return 0;
}

int grad_lm_loss(ps_grad *g)
{
    static const int inputs[3] = { 0, 1, 3 };
    ps_attrs_lm_loss attrs = *(const ps_attrs_lm_loss *)g->attrs;
    attrs.want_hits = 0;
    ps_tensor *again[PS_MAX_OUT] = { NULL };
    PS_TRY(panels_again(g, PS_OP_lm_loss, inputs, &attrs, &attrs.want_grad, again));
    return give_panels(g, inputs, 1 / attrs.dloss, again);
}

int grad_parallel_lm_loss(ps_grad *g)
{
    static const int inputs[3] = { 0, 1, 4 };
    ps_attrs_parallel_lm_loss attrs = *(const ps_attrs_parallel_lm_loss *)g->attrs;
    attrs.want_hits = 0;
    ps_tensor *again[PS_MAX_OUT] = { NULL };
    PS_TRY(panels_again(g, PS_OP_parallel_lm_loss, inputs, &attrs, &attrs.want_grad, again));
    return give_panels(g, inputs, 1 / attrs.dloss, again);
}

/* -- losses of a vocabulary that ranks share ----------------------------------------------------------------------- */
static int wide(const ps_tensor *x) { return x->dtype_ == PS_F64 ? PS_F64 : PS_F32; }

/* Checks logits [N, V], target [N] and mass [V]. */
static int check_logits(const ps_infer *f, const ps_tensor *mass, int64_t words)
{
    const ps_tensor *x = f->in[0];
    PS_TRY(check_targets(f, x, f->in[1]));
    if (x->ndim != 2) return ps_rule_fail(f, "logits must be [N, V]");
    if (words < 0 || words > x->shape_[1])
        return ps_rule_fail(f, "there are %lld words, but only %lld columns of logits", (long long)words,
                            (long long)x->shape_[1]);
    return mass ? ps_rule_like(f, mass, "mass", wide(x), 1, &x->shape_[1]) : 0;
}

int infer_logit_stats(ps_infer *f)
{
    const ps_attrs_logit_stats *at = f->attrs;
    PS_TRY(check_logits(f, f->in[2], at->words));
    f->out[0] = (ps_meta){ .dtype = wide(f->in[0]), .ndim = 2, .shape = { f->in[2] ? 4 : 3, f->in[0]->shape_[0] } };
    return 0;
}

int infer_logit_loss(ps_infer *f)
{
    const ps_attrs_logit_loss *at = f->attrs;
    const ps_tensor *x = f->in[0], *stats = f->in[2];
    PS_TRY(check_logits(f, f->in[4], at->words));
    int64_t N = x->shape_[0], said[3] = { stats->shape_[0], f->in[4] ? 4 : 3, N }, coefficients[2] = { 3, N };
    if (stats->ndim != 3 || said[0] < 1) return ps_rule_fail(f, "stats must be [ranks, 3 or 4, N]");
    PS_TRY(ps_rule_like(f, stats, "stats", wide(x), 3, said));
    PS_TRY(ps_rule_like(f, f->in[3], "share", wide(x), 2, coefficients));
    f->out[0] = (ps_meta){ .dtype = wide(x), .ndim = 1, .shape = { N } };
    f->out[1] = ps_meta_like(x);
    if (!at->want_grad) f->out[1].ndim = -1;
    f->out[2] = (ps_meta){ .dtype = PS_I32, .ndim = at->want_hits ? 2 : -1, .shape = { 2, N } };
    return 0;
}

int infer_parallel_lm_loss(ps_infer *f)
{
    ps_attrs_parallel_lm_loss *at = f->attrs;
    const ps_tensor *x = f->in[0], *w = f->in[1], *target = f->in[2];
    PS_TRY(ps_rule_ranks(f));
    PS_TRY(ps_rule_one_type(f, x, "x", w, "w"));
    if (x->ndim != 2 || w->ndim != 2 || w->shape_[1] != x->shape_[1] || w->shape_[0] < 1)
        return ps_rule_fail(f, "x must be [N, C] and w [V, C]");
    int64_t N, coefficients[2];
    if (__builtin_mul_overflow(x->shape_[0], at->parted ? at->size : 1, &N))
        return ps_rule_fail(f, "x is too large to gather: the gathered size overflows 64 bits");
    if ((target->dtype_ != PS_I32 && target->dtype_ != PS_I64) || target->ndim != 1 || target->shape_[0] != N)
        return ps_rule_fail(f, "targets must be int32 or int64 [%lld]", (long long)N);
    if (at->words < 1 || (at->words + at->size - 1) / at->size != w->shape_[0])
        return ps_rule_fail(f, "%lld words on %d ranks do not match %lld words per rank", (long long)at->words,
                            at->size, (long long)w->shape_[0]);
    coefficients[0] = 3, coefficients[1] = N;
    PS_TRY(ps_rule_like(f, f->in[3], "share", wide(x), 2, coefficients));
    if (f->in[4]) PS_TRY(ps_rule_like(f, f->in[4], "bias", x->dtype_, 1, w->shape_));
    if (f->in[5]) PS_TRY(ps_rule_like(f, f->in[5], "mass", wide(x), 1, w->shape_));
    if (f->needs) at->want_grad = (int32_t)((f->needs & 3) | (f->needs >> 2 & 4));     /* otherwise the op's gradient
                                                                                        * rule sets want_grad */
    if (f->needs && f->ahead) at->want_grad &= 1;
    f->out[0] = (ps_meta){ .dtype = wide(x) };
    f->out[1] = ps_meta_like(x);
    f->out[2] = ps_meta_like(w);
    f->out[3] = (ps_meta){ .dtype = x->dtype_, .ndim = 1, .shape = { w->shape_[0] } };
    for (int i = 0; i < 3; i++) if (!(at->want_grad >> i & 1)) f->out[1 + i].ndim = -1;
    f->out[4] = hits_of(at->want_hits);
    return 0;
}
