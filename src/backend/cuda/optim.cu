/* SPDX-License-Identifier: BSD-3-Clause
 * Optimizers that update a list of tensors in one launch. This file also contains kernels that sum squares, and kernels
 * that store gradients and sum the squares of what they store. The formulas and their sources are in ref/optim.c.
 *
 * The update of an element depends only on this element. Results are bit-identical to the results of the cpu backend,
 * because the kernels use explicit fused multiply-adds, IEEE division and square root, and constants that the host
 * computes once. An element is read before it is written, so master or grad can share the memory of param. */
#include "backend/cuda/optim.h"

/* -- Adam ---------------------------------------------------------------------------------------------------------- */
struct adam_constants { float scale, l2, keep, b1, b2, omb1, omb2, inv, eps, step; bool has_l2; };

DEV void adam_step(const adam_constants &h, float g, float *p, float *m, float *v)
{
    g = __fmul_rn(g, h.scale);
    if (h.has_l2) g = __fmaf_rn(h.l2, *p, g);
    *p = __fmul_rn(*p, h.keep);                      /* without decoupled weight decay, keep is exactly 1 */
    *m = __fmaf_rn(h.b1, *m, __fmul_rn(h.omb1, g));
    *v = __fmaf_rn(h.b2, *v, __fmul_rn(__fmul_rn(h.omb2, g), g));
    float denominator = __fmaf_rn(__fsqrt_rn(*v), h.inv, h.eps);
    *p = __fmaf_rn(-h.step, __fdiv_rn(*m, denominator), *p);
}

/* Like adam_step(), for one element whose master is fp64. */
DEV void adam_double(const ps_attrs_adam_ &a, const item &it, int64_t i)
{
    double c1 = 1 - a.beta1, c2 = 1 - a.beta2, wd = a.weight_decay;
    double keep = __dadd_rn(1, -__dmul_rn(a.lr, wd)), step = __ddiv_rn(a.lr, a.bias1);
    double inv = __ddiv_rn(1, __dsqrt_rn(a.bias2));
    double p = load_d(it.master, it.master_type, i), g = __dmul_rn(load_d(it.grad, it.grad_type, i), a.grad_scale);
    double *m = (double *)it.state[0] + i, *v = (double *)it.state[1] + i;
    if (wd != 0 && !a.adamw) g = __fma_rn(wd, p, g);
    if (wd != 0 && a.adamw) p = __dmul_rn(p, keep);
    double m1 = __fma_rn(a.beta1, *m, __dmul_rn(c1, g));
    double v1 = __fma_rn(a.beta2, *v, __dmul_rn(__dmul_rn(c2, g), g));
    double denominator = __fma_rn(__dsqrt_rn(v1), inv, a.eps);
    p = __fma_rn(-step, __ddiv_rn(m1, denominator), p);
    *m = m1;
    *v = v1;
    store_d(it.master, it.master_type, i, p);
    store_d(it.param, it.param_type, i, p);
}

/* Adam for gradients of type G and masters of masters<P>. All operands must be aligned. */
template <class G, class P> KERNEL_UP_TO(THREADS) adam_kernel(adam_constants h, const __grid_constant__ work w)
{
    typedef typename four<G>::raw raw_g;
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        const item &it = item_of(w, unit);
        int64_t i = (unit - it.first_unit) * UNIT + threadIdx.x * 4;
        float *ms = (float *)it.state[0], *vs = (float *)it.state[1];
        const G *grad = (const G *)it.grad;
        if (i + 4 <= it.numel) {
            raw_g rg = *(const raw_g *)(grad + i);
            float4 rm = *(const float4 *)(ms + i), rv = *(const float4 *)(vs + i);
            float g[4], p[4], m[4], v[4];
            masters<P>::get(it, i, p);
            unpack(rg, G(), g), unpack(rm, 0.0f, m), unpack(rv, 0.0f, v);
#pragma unroll
            for (int k = 0; k < 4; k++) adam_step(h, g[k], &p[k], &m[k], &v[k]);
            *(float4 *)(ms + i) = pack_four(m, 0.0f);
            *(float4 *)(vs + i) = pack_four(v, 0.0f);
            masters<P>::put(it, i, p);
        } else {
            for (; i < it.numel; i++) {
                float p = master_get<float>(it, i);
                adam_step(h, up(grad[i]), &p, &ms[i], &vs[i]);
                master_put(it, i, p);
            }
        }
    }
}

/* Adam for any types and alignments. */
static __global__ void adam_any_kernel(adam_constants h, ps_attrs_adam_ a, const __grid_constant__ work w)
{
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        const item &it = item_of(w, unit);
        for (int k = 0; k < 4; k++) {
            int64_t i = (unit - it.first_unit) * UNIT + k * THREADS + threadIdx.x;
            if (i >= it.numel) break;
            if (it.master_type == PS_F64) {
                adam_double(a, it, i);
                continue;
            }
            float p = master_get<float>(it, i);
            adam_step(h, load_f(it.grad, it.grad_type, i), &p, (float *)it.state[0] + i, (float *)it.state[1] + i);
            master_put(it, i, p);
        }
    }
}

static int adam_(ps_call *call)
{
    const ps_attrs_adam_ *a = (const ps_attrs_adam_ *)call->attrs;
    work w = collect(call, 5, UNIT);
    float wd = (float)a->weight_decay;
    adam_constants h;
    h.scale = (float)a->grad_scale;
    h.has_l2 = wd != 0 && !a->adamw;
    h.l2 = wd;
    h.keep = wd != 0 && a->adamw ? (float)(1 - a->lr * a->weight_decay) : 1;
    h.b1 = (float)a->beta1, h.b2 = (float)a->beta2;
    h.omb1 = (float)(1 - a->beta1), h.omb2 = (float)(1 - a->beta2);
    h.inv = (float)(1 / sqrt(a->bias2)), h.eps = (float)a->eps, h.step = (float)(a->lr / a->bias1);
    if (w.units == 0) return 0;
    bool alike = true;                               /* whether adam_kernel supports the types of all tensors */
    for (int i = 0; i < w.n; i++)
        alike = alike && w.it[i].aligned && w.it[i].master_type == w.it[0].master_type &&
                w.it[i].param_type == w.it[0].param_type && w.it[i].grad_type == w.it[0].grad_type;
    int grad = w.it[0].grad_type, param = w.it[0].param_type, master = w.it[0].master_type;
    auto kernel = adam_kernel<float, float>;
    if (master == PS_U8 && grad == PS_F32) kernel = adam_kernel<float, remainders>;
    else if (master == PS_U8 && grad == PS_BF16) kernel = adam_kernel<bf16, remainders>;
    else if (master != PS_F32) alike = false;
    else if (grad == PS_F32 && param == PS_BF16) kernel = adam_kernel<float, bf16>;
    else if (grad == PS_F32 && param == PS_F16) kernel = adam_kernel<float, f16>;
    else if (grad == PS_BF16 && param == PS_BF16) kernel = adam_kernel<bf16, bf16>;
    else if (grad == PS_F16 && param == PS_F16) kernel = adam_kernel<f16, f16>;
    else if (grad != PS_F32 || param != PS_F32) alike = false;
    if (alike) PS_LAUNCH(kernel, unit_blocks(w.units), THREADS, 0, ps_cu->compute, h, w);
    else PS_LAUNCH(adam_any_kernel, unit_blocks(w.units), THREADS, 0, ps_cu->compute, h, *a, w);
    return 0;
}

/* -- SGD ----------------------------------------------------------------------------------------------------------- */
template <class A> DEV void sgd_step(const ps_attrs_sgd_ &a, const item &it, int64_t i)
{
    A lr = (A)a.lr, wd = (A)a.weight_decay, momentum = (A)a.momentum, take = (A)(1 - a.dampening);
    A p = master_get<A>(it, i);
    A g = exact<A>::mul(access<A>::load(it.grad, it.grad_type, i), (A)a.grad_scale);
    if (wd != 0) g = exact<A>::fma_(wd, p, g);
    if (momentum != 0) {
        A *buffer = (A *)it.state[0] + i;
        A b = a.first ? g : exact<A>::fma_(momentum, *buffer, exact<A>::mul(take, g));
        *buffer = b;
        g = a.nesterov ? exact<A>::fma_(momentum, b, g) : b;
    }
    master_put(it, i, exact<A>::fma_(-lr, g, p));
}

static __global__ void sgd_kernel(ps_attrs_sgd_ a, const __grid_constant__ work w)
{
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        const item &it = item_of(w, unit);
        for (int k = 0; k < 4; k++) {
            int64_t i = (unit - it.first_unit) * UNIT + k * THREADS + threadIdx.x;
            if (i >= it.numel) break;
            if (it.master_type == PS_F64) sgd_step<double>(a, it, i);
            else sgd_step<float>(a, it, i);
        }
    }
}

static int sgd_(ps_call *call)
{
    work w = collect(call, 4, UNIT);
    if (w.units == 0) return 0;
    PS_LAUNCH(sgd_kernel, unit_blocks(w.units), THREADS, 0, ps_cu->compute, *(const ps_attrs_sgd_ *)call->attrs, w);
    return 0;
}

/* -- sums of squares of gradients --------------------------------------------------------------------------------- */
/* Sums the squares of src [numel]. If dst is not NULL, src is also copied to dst, and the stored values are squared
 * instead. Each block sums one unit at a time. */
struct squares_item { const void *src; void *dst; int64_t numel, first_unit; int src_type, dst_type; };
struct squares_work {
    int n;
    int64_t units;
    squares_item it[PS_MAX_IN];
};

enum { SQUARES_UNIT = PS_CU_SQUARES_UNIT, SQUARES = SQUARES_UNIT / THREADS };       /* elements per block and
                                                                                     * elements per thread */

/* Returns the sum of the squares of this thread's elements. The elements form groups of four. The first group begins at
 * `first`, and the distance between two groups is 4 * THREADS elements. The order of additions does not depend on the
 * alignment. */
template <class T> DEV double squares_of(const squares_item &it, int64_t first)
{
    typedef typename four<T>::raw raw;
    const int N = SQUARES / 4;
    double sum = 0;
    if (it.dst_type == (int)type_info<T>::dtype && first + (N - 1) * 4 * THREADS + 4 <= it.numel &&
        aligned16(it.src) && aligned16(it.dst)) {
        raw v[N];
#pragma unroll
        for (int n = 0; n < N; n++) v[n] = *(const raw *)((const T *)it.src + first + n * 4 * THREADS);
#pragma unroll
        for (int n = 0; n < N; n++) {
            float x[4];
            unpack(v[n], T(), x);
            if (it.dst) *(raw *)((T *)it.dst + first + n * 4 * THREADS) = v[n];
#pragma unroll
            for (int k = 0; k < 4; k++) sum += (double)x[k] * (double)x[k];
        }
        return sum;
    }
    for (int e = 0; e < SQUARES; e++) {
        int64_t i = first + e / 4 * 4 * THREADS + e % 4;
        if (i >= it.numel) break;
        float x = up(((const T *)it.src)[i]);
        if (it.dst) {
            store_f(it.dst, it.dst_type, i, x);
            x = load_f(it.dst, it.dst_type, i);
        }
        sum += (double)x * (double)x;
    }
    return sum;
}
DEV double squares_of_doubles(const squares_item &it, int64_t first)
{
    double sum = 0;
    for (int e = 0; e < SQUARES; e++) {
        int64_t i = first + e / 4 * 4 * THREADS + e % 4;
        if (i >= it.numel) break;
        double x = ((const double *)it.src)[i];
        if (it.dst) ((double *)it.dst)[i] = x;
        sum += x * x;
    }
    return sum;
}

KERNEL_UP_TO(THREADS) squares_kernel(double *parts, const __grid_constant__ squares_work w)
{
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        int n = 0;
        while (n + 1 < w.n && unit >= w.it[n + 1].first_unit) n++;
        const squares_item &it = w.it[n];
        int64_t first = (unit - it.first_unit) * SQUARES_UNIT + threadIdx.x * 4;
        double sum = it.src_type == PS_BF16 ? squares_of<bf16>(it, first)
            : it.src_type == PS_F32 ? squares_of<float>(it, first)
            : it.src_type == PS_F16 ? squares_of<f16>(it, first) : squares_of_doubles(it, first);
        sum = block_sum(sum);
        if (threadIdx.x == 0) parts[unit] = sum;
    }
}

/* Each block adds up the partial sums of one tensor. */
static __global__ void squares_total_kernel(double *out, const double *parts, const __grid_constant__ squares_work w)
{
    int64_t first = w.it[blockIdx.x].first_unit;
    int64_t end = (int)blockIdx.x + 1 < w.n ? w.it[blockIdx.x + 1].first_unit : w.units;
    double sum = 0;
    for (int64_t u = first + threadIdx.x; u < end; u += blockDim.x) sum += parts[u];
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

static int run_squares(ps_call *call, const squares_work &w, double *out)
{
    double *parts = (double *)call->scratch(call, (size_t)ps_cu_squares_nbytes(w.units));
    if (!parts) return PS_ENOMEM;
    if (w.units > 0) PS_LAUNCH(squares_kernel, unit_blocks(w.units), THREADS, 0, ps_cu->compute, parts, w);
    PS_LAUNCH(squares_total_kernel, w.n, THREADS, 0, ps_cu->compute, out, (const double *)parts, w);
    return 0;
}

static int sq_norms(ps_call *call)
{
    squares_work w;
    w.n = call->n_in;
    w.units = 0;
    for (int i = 0; i < w.n; i++) {
        const ps_view *x = &call->in[i];
        squares_item it = { x->data, NULL, x->numel, w.units, x->dtype, x->dtype };
        w.units += ps_cu_div_up(x->numel, SQUARES_UNIT);
        w.it[i] = it;
    }
    return run_squares(call, w, (double *)call->out[0].data);
}

static int grad_store(ps_call *call)
{
    const ps_view *src = &call->in[0], *dst = &call->out[0], *sq = &call->out[1];
    const char *from = (const char *)src->data, *to = (const char *)dst->data;
    bool itself = from == to && src->dtype == dst->dtype;
    if (sq->dtype != PS_F64) return ps_fail(PS_EINVAL, "the output sq must be fp64");
    if ((src->dtype == PS_F64) != (dst->dtype == PS_F64))
        return ps_fail(PS_EINVAL, "fp64 gradients must be stored as fp64, and other gradients must not");
    if (!itself && from < to + dst->numel * ps_dtype_bytes(dst->dtype) &&
        to < from + src->numel * ps_dtype_bytes(src->dtype))
        return ps_fail(PS_EINVAL, "dst overlaps src; pass src itself as dst, or a tensor that does not overlap it");
    squares_work w;
    squares_item it = { src->data, itself ? NULL : dst->data, src->numel, 0, src->dtype, dst->dtype };
    w.n = 1;
    w.units = ps_cu_div_up(src->numel, SQUARES_UNIT);
    w.it[0] = it;
    return run_squares(call, w, (double *)sq->data);
}

void ps_cuda_fill_optim(ps_kernel *k)
{
    k[PS_OP_adam_] = adam_;
    k[PS_OP_sgd_] = sgd_;
    k[PS_OP_sq_norms] = sq_norms;
    k[PS_OP_grad_store] = grad_store;
}
