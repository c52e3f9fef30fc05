/* SPDX-License-Identifier: BSD-3-Clause
 * Elementwise ops: shapes and gradients. */
#include <math.h>
#include "base/error.h"
#include "tensor/optable.h"

#define RULES(X)                                                                                                       \
    X(add)                                                                                                             \
    X(sub) X(mul) X(div) X(pow) X(maximum) X(minimum) X(where) X(affine) X(pow_scalar) X(clamp) X(exp) X(log) X(sqrt)  \
        X(rsqrt) X(reciprocal) X(abs) X(zero) X(sin) X(cos) X(erf) X(tanh) X(sigmoid) X(relu) X(silu) X(gelu)          \
            X(dropout) X(act_mul) X(log1p) X(expm1) X(leaky_relu) X(elu) X(softplus) X(remainder) X(fmod) X(lerp)      \
                X(prelu) X(logit_entropy) X(nan_to_num) X(hardsigmoid) X(hardswish) X(mish) X(logsigmoid) X(huber)
#define DECLARE(name) int grad_##name(ps_grad *g);
RULES(DECLARE)
int infer_binary(ps_infer *f);
int infer_binary_float(ps_infer *f);
int infer_binary_same(ps_infer *f);
int infer_compare(ps_infer *f);
int infer_where(ps_infer *f);
int infer_unary(ps_infer *f);
int infer_dropout(ps_infer *f);
int infer_bernoulli(ps_infer *f);
int infer_unary_any(ps_infer *f);
int infer_unary_backward(ps_infer *f);
int infer_predicate(ps_infer *f);
int infer_slope(ps_infer *f);
int infer_act_mul(ps_infer *f);
int infer_act_mul_backward(ps_infer *f);

/* -- shapes -------------------------------------------------------------------------------------------------------- */
int infer_binary(ps_infer *f)
{
    f->out[0].dtype = f->in[0]->dtype_;
    return ps_rule_broadcast(f, f->in[0], f->in[1], &f->out[0]);
}

int infer_binary_float(ps_infer *f)
{
    f->out[0].dtype = ps_dtype_is_float(f->in[0]->dtype_) ? f->in[0]->dtype_ : PS_F32;
    return ps_rule_broadcast(f, f->in[0], f->in[1], &f->out[0]);
}

int infer_binary_same(ps_infer *f)
{
    if (!ps_dtype_is_float(f->in[0]->dtype_)) return ps_rule_fail(f, "the inputs must be float tensors");
    return infer_binary(f);
}

int infer_compare(ps_infer *f)
{
    f->out[0].dtype = PS_BOOL;
    return ps_rule_broadcast(f, f->in[0], f->in[1], &f->out[0]);
}

int infer_where(ps_infer *f)
{
    ps_meta ab = { .dtype = f->in[1]->dtype_ };
    PS_TRY(ps_rule_broadcast(f, f->in[1], f->in[2], &ab));
    ps_tensor both = { .dtype_ = ab.dtype, .ndim = ab.ndim };
    for (int i = 0; i < ab.ndim; i++) both.shape_[i] = ab.shape[i];
    f->out[0].dtype = ab.dtype;
    return ps_rule_broadcast(f, f->in[0], &both, &f->out[0]);
}

int infer_unary(ps_infer *f)
{
    f->out[0] = ps_meta_like(f->in[0]);
    if (!ps_dtype_is_float(f->in[0]->dtype_)) f->out[0].dtype = PS_F32;
    if ((f->op == PS_OP_softmax || f->op == PS_OP_log_softmax) &&
        (f->in[0]->ndim == 0 || !ps_dtype_is_float(f->in[0]->dtype_)))
        return ps_rule_fail(f, "x must be a float tensor with a last dimension");
    return 0;
}

int infer_bernoulli(ps_infer *f)
{
    double p = ((const ps_attrs_bernoulli *)f->attrs)->p;
    if (p == -1 && !ps_dtype_is_float(f->in[0]->dtype_)) return ps_rule_fail(f, "the probabilities must be floats");
    if (p != -1 && !(p >= 0 && p <= 1)) return ps_rule_fail(f, "p is %g; it must be in [0, 1]", p);
    f->out[0] = ps_meta_like(f->in[0]);
    return 0;
}

/* The maximum number of elements of a sample. Each value of a 32-bit counter generates four random words of the
 * sample. */
static const int64_t MOST_OF_SAMPLE = (int64_t)1 << 34;

/* Checks the rows of x. `rows` contains the indices of these rows in the whole tensor. Each sample of the whole tensor
 * must consist of whole rows. */
static int check_dropout_rows(const ps_infer *f, const ps_attrs_dropout *at)
{
    const ps_tensor *x = f->in[0], *rows = f->in[1];
    if ((rows->dtype_ != PS_I32 && rows->dtype_ != PS_I64) || rows->ndim != 1)
        return ps_rule_fail(f, "rows must be int32 or int64 [R]");
    int64_t R = rows->shape_[0];
    if (R == 0 ? x->numel_ != 0 : x->numel_ % R != 0)
        return ps_rule_fail(f, "%lld elements cannot be divided into %lld equal rows", (long long)x->numel_,
                            (long long)R);
    if (at->first == 0 && at->per_sample > 0 && (x->numel_ == 0 || at->per_sample % (x->numel_ / R) == 0)) return 0;
    return ps_rule_fail(f, "with rows, first must be 0, and per_sample must be a multiple of a row's elements; they "
                        "are %lld and %lld", (long long)at->first, (long long)at->per_sample);
}

/* x contains the elements `first` to first + numel - 1 of a larger tensor. If the input `rows` is given, x contains
 * these rows of the larger tensor instead. The indices of all elements must fit into 64 bits. */
int infer_dropout(ps_infer *f)
{
    ps_attrs_dropout *at = f->attrs;
    const ps_tensor *x = f->in[0];
    int64_t end;
    f->out[0] = ps_meta_like(x);
    if (!(at->p >= 0 && at->p < 1)) return ps_rule_fail(f, "p = %g is not in [0, 1)", at->p);
    if (!ps_dtype_is_float(x->dtype_)) return ps_rule_fail(f, "x must be a float tensor");
    if (at->first < 0 || at->per_sample < 0 || __builtin_add_overflow(at->first, x->numel_, &end))
        return ps_rule_fail(f, "first = %lld and per_sample = %lld are negative or too large",
                            (long long)at->first, (long long)at->per_sample);
    if (f->in[1]) PS_TRY(check_dropout_rows(f, at));
    if (at->per_sample == 0) at->per_sample = x->ndim > 0 && x->numel_ > 0 ? x->numel_ / x->shape_[0] : 1;
    if (at->per_sample > MOST_OF_SAMPLE)
        return ps_rule_fail(f, "a sample has %lld elements, but random numbers are counted only up to %lld",
                            (long long)at->per_sample, (long long)MOST_OF_SAMPLE);
    return 0;
}

int infer_unary_any(ps_infer *f)
{
    f->out[0] = ps_meta_like(f->in[0]);
    return 0;
}

int infer_unary_backward(ps_infer *f)
{
    const ps_tensor *x = f->in[0];
    bool rows = f->op == PS_OP_softmax_backward || f->op == PS_OP_log_softmax_backward;
    if (!ps_same_shape(x, f->in[1]) || !ps_dtype_is_float(x->dtype_) || x->dtype_ != f->in[1]->dtype_)
        return ps_rule_fail(f, "the inputs must be float tensors of the same shape and type");
    if (rows && x->ndim == 0) return ps_rule_fail(f, "the inputs must have a last dimension");
    f->out[0] = ps_meta_like(f->in[0]);
    return 0;
}

int infer_predicate(ps_infer *f)
{
    f->out[0] = ps_meta_like(f->in[0]);
    f->out[0].dtype = PS_BOOL;
    return 0;
}

static int check_act_mul(const ps_infer *f, int act)
{
    for (int i = 0; i < f->n_in; i++)
        if (!ps_same_shape(f->in[0], f->in[i]) || !ps_dtype_is_float(f->in[0]->dtype_) ||
            f->in[i]->dtype_ != f->in[0]->dtype_)
            return ps_rule_fail(f, "the inputs must be float tensors of the same shape and type");
    return act >= 0 && act <= 2 ? 0 : ps_rule_fail(f, "there is no activation %d; 0 is silu, 1 is gelu, and 2 is the "
                                                   "tanh form of gelu", act);
}

int infer_slope(ps_infer *f)
{
    int of = ((const ps_attrs_slope *)f->attrs)->of;
    if (of < 0 || of > 4)
        return ps_rule_fail(f, "there is no function %d; they are 0 to 4 (hardsigmoid, hardswish, mish, logsigmoid, "
                            "huber)", of);
    return infer_unary_backward(f);
}

int infer_act_mul(ps_infer *f)
{
    f->out[0] = ps_meta_like(f->in[0]);
    return check_act_mul(f, ((const ps_attrs_act_mul *)f->attrs)->act);
}

int infer_act_mul_backward(ps_infer *f)
{
    f->out[0] = f->out[1] = ps_meta_like(f->in[0]);
    return check_act_mul(f, ((const ps_attrs_act_mul_backward *)f->attrs)->act);
}

/* -- gradients: two inputs ----------------------------------------------------------------------------------------- */
static int give_summed(ps_grad *g, int i, ps_tensor *t)
{
    ps_tensor *sum;
    PS_TRY(ps_sum_to(g, &sum, t, ps_grad_in_meta(g, i)));
    ps_grad_give(g, i, sum);
    return 0;
}

int grad_add(ps_grad *g)
{
    for (int i = 0; i < 2; i++)
        if (ps_grad_wants(g, i)) PS_TRY(give_summed(g, i, g->dout[0]));
    return 0;
}

int grad_sub(ps_grad *g)
{
    if (ps_grad_wants(g, 0)) PS_TRY(give_summed(g, 0, g->dout[0]));
    if (!ps_grad_wants(g, 1)) return 0;
    ps_tensor *neg;
    PS_TRY(ps_scaled(g, &neg, g->dout[0], -1));
    return give_summed(g, 1, neg);
}

int grad_mul(ps_grad *g)
{
    for (int i = 0; i < 2; i++) {
        if (!ps_grad_wants(g, i)) continue;
        ps_tensor *other, *t;
        PS_TRY(ps_grad_in(g, 1 - i, &other));
        PS_TRY(ps_run1(g, PS_OP_mul, &t, g->dout[0], other));
        PS_TRY(give_summed(g, i, t));
    }
    return 0;
}

/* d(a/b): da = dy / b, db = -dy * ((a / b) / b). With this order of divisions, an intermediate value overflows only if
 * db itself overflows. */
int grad_div(ps_grad *g)
{
    ps_tensor *a, *b, *t;
    PS_TRY(ps_grad_in(g, 0, &a));
    PS_TRY(ps_grad_in(g, 1, &b));
    if (ps_grad_wants(g, 0)) {
        PS_TRY(ps_run1(g, PS_OP_div, &t, g->dout[0], b));
        PS_TRY(give_summed(g, 0, t));
    }
    if (!ps_grad_wants(g, 1)) return 0;
    PS_TRY(ps_run1(g, PS_OP_div, &t, a, b));
    PS_TRY(ps_run1(g, PS_OP_div, &t, t, b));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, t, g->dout[0]));
    PS_TRY(ps_scaled(g, &t, t, -1));
    return give_summed(g, 1, t);
}

/* Returns a tensor with the values of t where cond equals where_true, and 0 elsewhere. */
static int keep_where(ps_grad *g, ps_tensor **out, ps_tensor *cond, bool where_true, ps_tensor *t)
{
    static const char none[PS_MAX_ATTRS];
    ps_tensor *zero, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_scalar_like(g, &zero, t, 0));
    PS_TRY(ps_run(g, PS_OP_where, none, all, 3, cond, where_true ? t : zero, where_true ? zero : t));
    *out = all[0];
    return 0;
}
static int select_dy(ps_grad *g, ps_tensor **out, ps_tensor *cond, bool where_true)
{
    return keep_where(g, out, cond, where_true, g->dout[0]);
}

/* d(a^b): da = dy * b * a^(b-1). Where b is 0, da is set to 0, because a can be 0 or NaN. db = dy * y * log(a). Where a
 * is 0 and b >= 0, db is set to 0. */
int grad_pow(ps_grad *g)
{
    ps_tensor *a, *b, *y, *zero, *t, *u;
    PS_TRY(ps_grad_in(g, 0, &a));
    PS_TRY(ps_grad_in(g, 1, &b));
    PS_TRY(ps_scalar_like(g, &zero, b, 0));
    if (ps_grad_wants(g, 0)) {
        PS_TRY(ps_affine(g, &t, b, 1, -1));
        PS_TRY(ps_run1(g, PS_OP_pow, &t, a, t));
        PS_TRY(ps_run1(g, PS_OP_mul, &t, t, b));
        PS_TRY(ps_run1(g, PS_OP_mul, &t, t, g->dout[0]));
        PS_TRY(ps_run1(g, PS_OP_eq, &u, b, zero));
        PS_TRY(keep_where(g, &t, u, false, t));
        PS_TRY(give_summed(g, 0, t));
    }
    if (!ps_grad_wants(g, 1)) return 0;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_run1(g, PS_OP_log, &t, a, NULL));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, t, y));
    PS_TRY(ps_run1(g, PS_OP_ge, &u, b, zero));
    PS_TRY(ps_scalar_like(g, &zero, a, 0));
    PS_TRY(ps_run1(g, PS_OP_eq, &y, a, zero));
    PS_TRY(ps_run1(g, PS_OP_logical_and, &u, u, y));
    PS_TRY(keep_where(g, &t, u, false, t));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, t, g->dout[0]));
    return give_summed(g, 1, t);
}

/* The gradient of the maximum or minimum of two inputs. For each element, dy is passed to the input that was chosen,
 * and the other input gets 0. If the two inputs are equal, each gets half of dy. If an input is NaN, both get dy. */
static int pick(ps_grad *g, int weaker)
{
    ps_tensor *a, *b, *tied, *half, *lost, *t, *all[PS_MAX_OUT];
    static const char none[PS_MAX_ATTRS];
    PS_TRY(ps_grad_in(g, 0, &a));
    PS_TRY(ps_grad_in(g, 1, &b));
    PS_TRY(ps_run1(g, PS_OP_eq, &tied, a, b));
    PS_TRY(ps_scaled(g, &half, g->dout[0], 0.5));
    for (int i = 0; i < 2; i++) {
        if (!ps_grad_wants(g, i)) continue;
        all[0] = NULL;
        PS_TRY(ps_run(g, PS_OP_where, none, all, 3, tied, half, g->dout[0]));
        PS_TRY(ps_run1(g, weaker, &lost, i ? b : a, i ? a : b));
        PS_TRY(keep_where(g, &t, lost, false, all[0]));
        PS_TRY(give_summed(g, i, t));
    }
    return 0;
}
int grad_maximum(ps_grad *g) { return pick(g, PS_OP_lt); }
int grad_minimum(ps_grad *g) { return pick(g, PS_OP_gt); }

/* Passes -dy * quotient to the divisor as its gradient. */
static int give_quotient(ps_grad *g, ps_tensor *quotient)
{
    ps_tensor *t;
    PS_TRY(ps_run1(g, PS_OP_mul, &t, quotient, g->dout[0]));
    PS_TRY(ps_scaled(g, &t, t, -1));
    return give_summed(g, 1, t);
}

int grad_remainder(ps_grad *g)
{
    ps_tensor *a, *b, *t;
    if (ps_grad_wants(g, 0)) PS_TRY(give_summed(g, 0, g->dout[0]));
    if (!ps_grad_wants(g, 1)) return 0;
    PS_TRY(ps_grad_in(g, 0, &a));
    PS_TRY(ps_grad_in(g, 1, &b));
    PS_TRY(ps_run1(g, PS_OP_floor_divide, &t, a, b));
    return give_quotient(g, t);
}

int grad_fmod(ps_grad *g)
{
    ps_tensor *a, *b, *t;
    if (ps_grad_wants(g, 0)) PS_TRY(give_summed(g, 0, g->dout[0]));
    if (!ps_grad_wants(g, 1)) return 0;
    PS_TRY(ps_grad_in(g, 0, &a));
    PS_TRY(ps_grad_in(g, 1, &b));
    PS_TRY(ps_run1(g, PS_OP_fmod, &t, a, b));
    PS_TRY(ps_run1(g, PS_OP_sub, &t, a, t));
    PS_TRY(ps_run1(g, PS_OP_div, &t, t, b));
    PS_TRY(ps_run1(g, PS_OP_round, &t, t, NULL));
    return give_quotient(g, t);
}

int grad_lerp(ps_grad *g)
{
    double w = ((const ps_attrs_lerp *)g->attrs)->weight;
    for (int i = 0; i < 2; i++) {
        ps_tensor *t;
        if (!ps_grad_wants(g, i)) continue;
        PS_TRY(ps_scaled(g, &t, g->dout[0], i ? w : 1 - w));
        PS_TRY(give_summed(g, i, t));
    }
    return 0;
}

/* Where x is above 0, dx = dy and dw = 0. Elsewhere, dx = w * dy and dw = x * dy. */
int grad_prelu(ps_grad *g)
{
    ps_tensor *in[2], *above, *zero, *t, *all[PS_MAX_OUT];
    static const char none[PS_MAX_ATTRS];
    PS_TRY(ps_grad_in(g, 0, &in[0]));
    PS_TRY(ps_grad_in(g, 1, &in[1]));
    PS_TRY(ps_scalar_like(g, &zero, in[0], 0));
    PS_TRY(ps_run1(g, PS_OP_gt, &above, in[0], zero));
    for (int i = 0; i < 2; i++) {
        if (!ps_grad_wants(g, i)) continue;
        PS_TRY(ps_run1(g, PS_OP_mul, &t, g->dout[0], in[1 - i]));
        all[0] = NULL;
        PS_TRY(ps_run(g, PS_OP_where, none, all, 3, above, i ? zero : g->dout[0], t));
        PS_TRY(give_summed(g, i, all[0]));
    }
    return 0;
}

/* dx = dy * (sigmoid(x) - t), dt = -dy * x. */
int grad_logit_entropy(ps_grad *g)
{
    ps_tensor *x, *target, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    if (ps_grad_wants(g, 0)) {
        PS_TRY(ps_grad_in(g, 1, &target));
        PS_TRY(ps_run1(g, PS_OP_sigmoid, &t, x, NULL));
        PS_TRY(ps_run1(g, PS_OP_sub, &t, t, target));
        PS_TRY(ps_run1(g, PS_OP_mul, &t, t, g->dout[0]));
        PS_TRY(give_summed(g, 0, t));
    }
    if (!ps_grad_wants(g, 1)) return 0;
    PS_TRY(ps_run1(g, PS_OP_mul, &t, x, g->dout[0]));
    PS_TRY(ps_scaled(g, &t, t, -1));
    return give_summed(g, 1, t);
}

int grad_where(ps_grad *g)
{
    ps_tensor *cond, *t;
    PS_TRY(ps_grad_in(g, 0, &cond));
    for (int i = 1; i < 3; i++) {
        if (!ps_grad_wants(g, i)) continue;
        PS_TRY(select_dy(g, &t, cond, i == 1));
        PS_TRY(give_summed(g, i, t));
    }
    return 0;
}

/* -- gradients: one input ------------------------------------------------------------------------------------------ */
static int give_times_dy(ps_grad *g, ps_tensor *factor)
{
    ps_tensor *t;
    PS_TRY(ps_run1(g, PS_OP_mul, &t, g->dout[0], factor));
    ps_grad_give(g, 0, t);
    return 0;
}

int grad_affine(ps_grad *g)
{
    ps_tensor *t;
    PS_TRY(ps_scaled(g, &t, g->dout[0], ((const ps_attrs_affine *)g->attrs)->alpha));
    ps_grad_give(g, 0, t);
    return 0;
}

int grad_pow_scalar(ps_grad *g)
{
    double p = ((const ps_attrs_pow_scalar *)g->attrs)->exponent;
    ps_attrs_pow_scalar attrs = { .exponent = p - 1 };
    ps_tensor *x, *t, *all[PS_MAX_OUT] = { NULL };
    if (p == 0) return grad_zero(g);                          /* the formula below has the factor x^-1, so it would be
                                                               * NaN where x is 0 */
    PS_TRY(ps_grad_in(g, 0, &x));
    if (p == 2) all[0] = x;                                   /* x^1 */
    else PS_TRY(ps_run(g, PS_OP_pow_scalar, &attrs, all, 1, x));
    PS_TRY(ps_scaled(g, &t, all[0], p));
    return give_times_dy(g, t);
}

/* Passes on dy where x is strictly between the bounds, as in PyTorch. An infinite bound has no effect. */
int grad_clamp(ps_grad *g)
{
    const ps_attrs_clamp *at = g->attrs;
    bool below = isfinite(at->low), above = isfinite(at->high);
    ps_tensor *x, *bound, *high, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_scalar_like(g, &bound, x, at->high));
    PS_TRY(ps_run1(g, PS_OP_lt, &high, x, bound));
    PS_TRY(ps_scalar_like(g, &bound, x, at->low));
    PS_TRY(ps_run1(g, PS_OP_gt, &t, x, bound));
    if (above && !below) t = high;
    else if (above == below) PS_TRY(ps_run1(g, PS_OP_logical_and, &t, t, high));
    PS_TRY(select_dy(g, &t, t, true));
    ps_grad_give(g, 0, t);
    return 0;
}

int grad_exp(ps_grad *g)
{
    ps_tensor *y;
    PS_TRY(ps_grad_out(g, 0, &y));
    return give_times_dy(g, y);
}

int grad_log(ps_grad *g)
{
    ps_tensor *x, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_run1(g, PS_OP_div, &t, g->dout[0], x));
    ps_grad_give(g, 0, t);
    return 0;
}

int grad_log1p(ps_grad *g)
{
    ps_tensor *x, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_affine(g, &t, x, 1, 1));
    PS_TRY(ps_run1(g, PS_OP_div, &t, g->dout[0], t));
    ps_grad_give(g, 0, t);
    return 0;
}

int grad_expm1(ps_grad *g)
{
    ps_tensor *y, *t;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_affine(g, &t, y, 1, 1));
    return give_times_dy(g, t);
}

int grad_sqrt(ps_grad *g)
{
    ps_tensor *y, *t;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_run1(g, PS_OP_div, &t, g->dout[0], y));
    PS_TRY(ps_scaled(g, &t, t, 0.5));
    ps_grad_give(g, 0, t);
    return 0;
}

/* dx = -dy / 2 * y^3. dy is halved, and not y^3, because y^3 is close to the smallest number of fp16 if x is large. */
int grad_rsqrt(ps_grad *g)
{
    ps_tensor *y, *t, *half;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, y, y));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, t, y));
    PS_TRY(ps_scaled(g, &half, g->dout[0], -0.5));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, t, half));
    ps_grad_give(g, 0, t);
    return 0;
}

int grad_reciprocal(ps_grad *g)
{
    ps_tensor *y, *t;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, y, y));
    PS_TRY(ps_scaled(g, &t, t, -1));
    return give_times_dy(g, t);
}

static int times_function(ps_grad *g, int op, double alpha)
{
    ps_tensor *x, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_run1(g, op, &t, x, NULL));
    if (alpha != 1) PS_TRY(ps_scaled(g, &t, t, alpha));
    return give_times_dy(g, t);
}
int grad_abs(ps_grad *g) { return times_function(g, PS_OP_sign, 1); }
int grad_sin(ps_grad *g) { return times_function(g, PS_OP_cos, 1); }
int grad_cos(ps_grad *g) { return times_function(g, PS_OP_sin, -1); }

/* The gradient of sign, floor, ceil and round is 0, because these functions are constant almost everywhere. */
int grad_zero(ps_grad *g)
{
    ps_tensor *t;
    PS_TRY(ps_filled(g, &t, g->dout[0]->device_, ps_grad_in_meta(g, 0), 0));
    ps_grad_give(g, 0, t);
    return 0;
}

int grad_erf(ps_grad *g)
{
    ps_tensor *x, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, x, x));
    PS_TRY(ps_scaled(g, &t, t, -1));
    PS_TRY(ps_run1(g, PS_OP_exp, &t, t, NULL));
    PS_TRY(ps_scaled(g, &t, t, 1.1283791670955126 /* 2 / sqrt(pi) */));
    return give_times_dy(g, t);
}

int grad_tanh(ps_grad *g)
{
    ps_tensor *y, *t;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, y, y));
    PS_TRY(ps_affine(g, &t, t, -1, 1));
    return give_times_dy(g, t);
}

int grad_sigmoid(ps_grad *g)
{
    ps_tensor *y, *t;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_affine(g, &t, y, -1, 1));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, t, y));
    return give_times_dy(g, t);
}

int grad_relu(ps_grad *g)
{
    ps_tensor *y, *t;
    PS_TRY(ps_grad_out(g, 0, &y));
    PS_TRY(ps_scalar_like(g, &t, y, 0));
    PS_TRY(ps_run1(g, PS_OP_le, &t, y, t));
    PS_TRY(select_dy(g, &t, t, false));                       /* where y is NaN, dy is passed on, as forward passes on
                                                               * the NaN */
    ps_grad_give(g, 0, t);
    return 0;
}

static int fused(ps_grad *g, int op)
{
    ps_tensor *x, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_run(g, op, g->attrs, all, 2, x, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}
int grad_silu(ps_grad *g) { return fused(g, PS_OP_silu_backward); }
int grad_gelu(ps_grad *g) { return fused(g, PS_OP_gelu_backward); }

static int slope_of(ps_grad *g, int of, double delta)
{
    ps_attrs_slope attrs = { .of = of, .delta = delta };
    ps_tensor *x, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_run(g, PS_OP_slope, &attrs, all, 2, x, g->dout[0]));
    ps_grad_give(g, 0, all[0]);
    return 0;
}
int grad_hardsigmoid(ps_grad *g) { return slope_of(g, 0, 0); }
int grad_hardswish(ps_grad *g) { return slope_of(g, 1, 0); }
int grad_mish(ps_grad *g) { return slope_of(g, 2, 0); }
int grad_logsigmoid(ps_grad *g) { return slope_of(g, 3, 0); }
int grad_huber(ps_grad *g) { return slope_of(g, 4, ((const ps_attrs_huber *)g->attrs)->delta); }

int grad_nan_to_num(ps_grad *g)
{
    ps_tensor *x, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_run1(g, PS_OP_isfinite, &t, x, NULL));
    PS_TRY(select_dy(g, &t, t, true));
    ps_grad_give(g, 0, t);
    return 0;
}

/* Passes on dy where x is above `from`, and `other` elsewhere. */
static int give_above(ps_grad *g, ps_tensor *x, double from, ps_tensor *other)
{
    ps_tensor *t, *all[PS_MAX_OUT] = { NULL };
    static const char none[PS_MAX_ATTRS];
    PS_TRY(ps_scalar_like(g, &t, x, from));
    PS_TRY(ps_run1(g, PS_OP_gt, &t, x, t));
    PS_TRY(ps_run(g, PS_OP_where, none, all, 3, t, g->dout[0], other));
    ps_grad_give(g, 0, all[0]);
    return 0;
}

int grad_leaky_relu(ps_grad *g)
{
    ps_tensor *x, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_scaled(g, &t, g->dout[0], ((const ps_attrs_leaky_relu *)g->attrs)->slope));
    return give_above(g, x, 0, t);
}

int grad_elu(ps_grad *g)
{
    ps_tensor *x, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_run1(g, PS_OP_exp, &t, x, NULL));
    PS_TRY(ps_scaled(g, &t, t, ((const ps_attrs_elu *)g->attrs)->alpha));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, t, g->dout[0]));
    return give_above(g, x, 0, t);
}

int grad_softplus(ps_grad *g)
{
    const ps_attrs_softplus *at = g->attrs;
    ps_tensor *x, *t;
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_scaled(g, &x, x, at->beta));
    PS_TRY(ps_run1(g, PS_OP_sigmoid, &t, x, NULL));
    PS_TRY(ps_run1(g, PS_OP_mul, &t, t, g->dout[0]));
    return give_above(g, x, at->threshold, t);
}

int grad_act_mul(ps_grad *g)
{
    ps_tensor *x, *up, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 0, &x));
    PS_TRY(ps_grad_in(g, 1, &up));
    PS_TRY(ps_run(g, PS_OP_act_mul_backward, g->attrs, all, 3, x, up, g->dout[0]));
    for (int i = 0; i < 2; i++) if (ps_grad_wants(g, i)) ps_grad_give(g, i, all[i]);
    return 0;
}

/* Drops the elements of dy at the positions at which forward dropped elements of x. */
int grad_dropout(ps_grad *g)
{
    ps_tensor *rows, *all[PS_MAX_OUT] = { NULL };
    PS_TRY(ps_grad_in(g, 1, &rows));
    PS_TRY(ps_run(g, PS_OP_dropout, g->attrs, all, 2, g->dout[0], rows));
    ps_grad_give(g, 0, all[0]);
    return 0;
}
