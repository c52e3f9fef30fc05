/* SPDX-License-Identifier: BSD-3-Clause
 * Optimizer steps over lists of tensors, and the op that stores gradients. The order of operations of each step is a
 * contract: other backends use the same order and the same explicit fused multiply-adds, so they compute the same
 * bits. */
#include "ref.h"
#include "base/error.h"

/* Adam (Kingma and Ba, ICLR 2015), or AdamW with decoupled decay (Loshchilov and Hutter, ICLR 2019), for one tensor
 * whose master is not fp64. The step is computed in fp32. m is exp_avg and v is exp_avg_sq. Every constant is computed
 * in double and rounded once. The formulas are:
 *     c1 = 1 - beta1, c2 = 1 - beta2, keep = 1 - lr * wd, step = lr / bias1, inv = 1 / sqrt(bias2)
 *     g = grad * grad_scale
 *     not adamw and wd != 0:  g = fma(wd, p, g)
 *     adamw and wd != 0:      p = p * keep
 *     m = fma(beta1, m, c1 * g)
 *     v = fma(beta2, v, (c2 * g) * g)
 *     denom = fma(sqrt(v), inv, eps)
 *     p = fma(-step, m / denom, p)
 * p is the master. The parameter is p rounded to the type of the parameter. */
static void adam_float(const ps_attrs_adam_ *a, const ps_view *in)
{
    const ps_view *param = &in[0], *grad = &in[2], *m_view = &in[3], *v_view = &in[4];
    float beta1 = (float)a->beta1, beta2 = (float)a->beta2, c1 = (float)(1 - a->beta1), c2 = (float)(1 - a->beta2);
    float wd = (float)a->weight_decay, keep = (float)(1 - a->lr * a->weight_decay), scale = (float)a->grad_scale;
    float step = (float)(a->lr / a->bias1), inv = (float)(1 / sqrt(a->bias2)), eps = (float)a->eps;
    for (int64_t i = 0; i < param->numel; i++) {
        float p = (float)ref_master_get(in, i), g = (float)ref_load(grad, i) * scale;
        float m = (float)ref_load(m_view, i), v = (float)ref_load(v_view, i);
        if (wd != 0 && !a->adamw) g = fmaf(wd, p, g);
        if (wd != 0 && a->adamw) p = p * keep;
        m = fmaf(beta1, m, c1 * g);
        v = fmaf(beta2, v, (c2 * g) * g);
        float denom = fmaf(sqrtf(v), inv, eps);
        p = fmaf(-step, m / denom, p);
        ref_store(m_view, i, m);
        ref_store(v_view, i, v);
        ref_master_put(in, i, p);
    }
}

/* Like adam_float, but computed in double, for fp64 masters. */
static void adam_double(const ps_attrs_adam_ *a, const ps_view *in)
{
    const ps_view *param = &in[0], *master = &in[1], *grad = &in[2], *m_view = &in[3], *v_view = &in[4];
    double c1 = 1 - a->beta1, c2 = 1 - a->beta2, wd = a->weight_decay, keep = 1 - a->lr * wd;
    double step = a->lr / a->bias1, inv = 1 / sqrt(a->bias2);
    for (int64_t i = 0; i < param->numel; i++) {
        double p = ref_load(master, i), g = ref_load(grad, i) * a->grad_scale;
        double m = ref_load(m_view, i), v = ref_load(v_view, i);
        if (wd != 0 && !a->adamw) g = fma(wd, p, g);
        if (wd != 0 && a->adamw) p = p * keep;
        m = fma(a->beta1, m, c1 * g);
        v = fma(a->beta2, v, (c2 * g) * g);
        double denom = fma(sqrt(v), inv, a->eps);
        p = fma(-step, m / denom, p);
        ref_store(m_view, i, m);
        ref_store(v_view, i, v);
        ref_store(master, i, p);
        ref_store(param, i, p);
    }
}

int ref_adam_(ps_call *call)
{
    for (int n = 0; n + 5 <= call->n_in; n += 5) {
        if (call->in[n + 1].dtype == PS_F64)
            adam_double(call->attrs, &call->in[n]);
        else
            adam_float(call->attrs, &call->in[n]);
    }
    return 0;
}

/* Schedule-free AdamW (Defazio et al. 2024, "The Road Less Scheduled") for one tensor. It is computed in fp32 like
 * Adam, or in double for an fp64 master. The master p is the paper's y. The first update (t = 1) begins by setting z to
 * p. All updates then compute
 *     toward = lr * (beta1 * (1 - average) - 1), inv = 1 / sqrt(bias2)
 *     g = grad * grad_scale
 *     v = fma(beta2, v, (c2 * g) * g)
 *     u = g / fma(sqrt(v), inv, eps);  wd != 0: u = fma(wd, p, u)
 *     p = fma(toward, u, fma(average, z - p, p))
 *     z = fma(-lr, u, z) */
#define SCHEDULE_FREE(name, R, FMA, SQRT)                                                                  \
    static void name(const ps_attrs_adam_schedule_free_ *a, const ps_view *in)                             \
    {                                                                                                      \
        R lr = (R)a->lr, wd = (R)a->weight_decay, beta2 = (R)a->beta2, c2 = (R)(1 - a->beta2);             \
        R average = (R)a->average, toward = (R)(a->lr * (a->beta1 * (1 - a->average) - 1));                \
        R inv = (R)(1 / sqrt(a->bias2)), eps = (R)a->eps, scale = (R)a->grad_scale;                        \
        for (int64_t i = 0; i < in->numel; i++) {                                                          \
            R p = (R)ref_master_get(in, i), g = (R)ref_load(&in[2], i) * scale;                            \
            R z = a->t == 1 ? p : (R)ref_load(&in[3], i);                                                  \
            R v = FMA(beta2, (R)ref_load(&in[4], i), (c2 * g) * g), u = g / FMA(SQRT(v), inv, eps);        \
            if (wd != 0) u = FMA(wd, p, u);                                                                \
            ref_store(&in[3], i, FMA(-lr, u, z));                                                          \
            ref_store(&in[4], i, v);                                                                       \
            ref_master_put(in, i, FMA(toward, u, FMA(average, z - p, p)));                                 \
        }                                                                                                  \
    }
SCHEDULE_FREE(schedule_free_float, float, fmaf, sqrtf)
SCHEDULE_FREE(schedule_free_double, double, fma, sqrt)

int ref_adam_schedule_free_(ps_call *call)
{
    for (int n = 0; n + 5 <= call->n_in; n += 5)
        (call->in[n + 1].dtype == PS_F64 ? schedule_free_double : schedule_free_float)(call->attrs, &call->in[n]);
    return 0;
}

/* Moves masters toward `end`. The result is computed in fp32, or in double for fp64 masters. As in PyTorch's lerp, the
 * formula starts from p or from `end`, whichever is nearer to the result:
 *     |weight| < 0.5:  p = fma(weight, end - p, p);  otherwise:  p = fma(weight - 1, end - p, end) */
int ref_master_lerp_(ps_call *call)
{
    const ps_attrs_master_lerp_ *a = call->attrs;
    bool near = fabs(a->weight) < 0.5;
    double w = near ? a->weight : a->weight - 1;
    for (int n = 0; n + 3 <= call->n_in; n += 3) {
        const ps_view *in = &call->in[n];
        for (int64_t i = 0; i < in->numel; i++) {
            double p = ref_master_get(in, i), end = ref_load(&in[2], i), from = near ? p : end;
            ref_master_put(in, i, in[1].dtype == PS_F64 ? fma(w, end - p, from)
                                                        : fmaf((float)w, (float)end - (float)p, (float)from));
        }
    }
    return 0;
}

/* SGD for one tensor. The step is computed in the type R, which is fp32 as for Adam, or double for an fp64 master. FMA
 * is the fused multiply-add of R:
 *     g = grad * grad_scale;  wd != 0: g = fma(wd, p, g)
 *     momentum != 0:  buf = first ? g : fma(momentum, buf, (1 - dampening) * g)
 *                     g = nesterov ? fma(momentum, buf, g) : buf
 *     p = fma(-lr, g, p) */
#define SGD(name, R, FMA)                                                                                  \
    static void name(const ps_attrs_sgd_ *a, const ps_view *in)                                            \
    {                                                                                                      \
        const ps_view *param = &in[0], *grad = &in[2], *buf_view = &in[3];                                 \
        R lr = (R)a->lr, wd = (R)a->weight_decay, momentum = (R)a->momentum, damp = (R)(1 - a->dampening); \
        for (int64_t i = 0; i < param->numel; i++) {                                                       \
            R p = (R)ref_master_get(in, i), g = (R)ref_load(grad, i) * (R)a->grad_scale;                     \
            if (wd != 0) g = FMA(wd, p, g);                                                                \
            if (momentum != 0) {                                                                           \
                R buf = a->first ? g : FMA(momentum, (R)ref_load(buf_view, i), damp * g);                  \
                ref_store(buf_view, i, buf);                                                               \
                g = a->nesterov ? FMA(momentum, buf, g) : buf;                                             \
            }                                                                                              \
            p = FMA(-lr, g, p);                                                                            \
            ref_master_put(in, i, p);                                                                      \
        }                                                                                                  \
    }
SGD(sgd_float, float, fmaf)
SGD(sgd_double, double, fma)

int ref_sgd_(ps_call *call)
{
    for (int n = 0; n + 4 <= call->n_in; n += 4) {
        if (call->in[n + 1].dtype == PS_F64)
            sgd_double(call->attrs, &call->in[n]);
        else
            sgd_float(call->attrs, &call->in[n]);
    }
    return 0;
}

/* Stores a gradient. The cpu backend calls this function in all cases that it does not handle. Hence this function
 * decides for every backend which types and memory the op supports. */
int ref_grad_store(ps_call *call)
{
    const ps_view *src = &call->in[0], *dst = &call->out[0], *sq = &call->out[1];
    uintptr_t from = (uintptr_t)src->data, to = (uintptr_t)dst->data;
    uintptr_t from_end = from + (uintptr_t)(src->numel * ps_dtype_bytes(src->dtype));
    uintptr_t to_end = to + (uintptr_t)(dst->numel * ps_dtype_bytes(dst->dtype));
    bool itself = from == to && src->dtype == dst->dtype;
    if (sq->dtype != PS_F64)
        return ps_fail(PS_EINVAL, "the output sq must be fp64, but it is %s", ps_dtype_name(sq->dtype));
    if ((src->dtype == PS_F64) != (dst->dtype == PS_F64))
        return ps_fail(PS_EINVAL, "a gradient in %s cannot be stored as %s: fp64 can only be stored as fp64, and other "
                       "types cannot be stored as fp64", ps_dtype_name(src->dtype), ps_dtype_name(dst->dtype));
    if (!itself && from < to_end && to < from_end)
        return ps_fail(PS_EINVAL, "dst (%s) overlaps src (%s); pass src itself as dst, or a tensor that does not "
                       "overlap it", ps_dtype_name(dst->dtype), ps_dtype_name(src->dtype));
    long double sum = 0;                                                /* added in the same order as in ref_sq_norms */
    for (int64_t i = 0; i < src->numel; i++) {
        if (!itself) ref_store(dst, i, ref_load(src, i));
        double x = ref_load(dst, i);
        sum += (long double)x * x;
    }
    ref_store(sq, 0, (double)sum);
    return 0;
}
