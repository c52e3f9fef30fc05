/* SPDX-License-Identifier: BSD-3-Clause
 * Optimizers over lists of tensors in one launch, sums of squares, and gradients stored together with theirs. The
 * update of an element depends on nothing else and is written with explicit fused multiply-adds, IEEE division and
 * square root, from constants computed once on the host: its bits are those of the cpu backend. An element is read
 * before it is written, so operands may share memory (master or grad with param). */
#include "backend/cuda/device.h"

enum { UNIT = 4 * THREADS, MOST_ITEMS = PS_MAX_IN / 4 };

/* One tensor of a list. m and v are NULL where an operand does not exist. */
struct item {
    void *param, *master, *grad, *m, *v;
    int64_t numel, first_unit;
    int param_type, grad_type, master_type;
    bool aligned;                                    /* four elements at once */
};
struct work {
    int n;
    int64_t units;
    item it[MOST_ITEMS];
};

/* Groups of `each` inputs: param, master, grad[, m[, v]]. */
static work collect(const ps_call *call, int each)
{
    work w;
    w.n = 0;
    w.units = 0;
    for (int i = 0; i + each <= call->n_in; i += each) {
        const ps_view *g = call->in + i;
        if (g[0].numel == 0) continue;
        item it = { g[0].data, g[1].data, g[2].data, each > 3 ? g[3].data : NULL, each > 4 ? g[4].data : NULL,
                    g[0].numel, w.units, g[0].dtype, g[2].dtype, g[1].dtype, true };
        for (int k = 0; k < each; k++) it.aligned = it.aligned && aligned16(g[k].data);
        w.units += ps_cu_div_up(it.numel, UNIT);
        w.it[w.n++] = it;
    }
    return w;
}

/* Four elements of an operand, of which `n` exist. */
DEV void load4(const void *p, int dtype, int64_t i, int n, bool aligned, float *x)
{
    if (aligned && n == 4 && dtype == PS_F32) {
        float4 v = *(const float4 *)((const float *)p + i);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else if (aligned && n == 4 && (dtype == PS_BF16 || dtype == PS_F16)) {
        uint2 v = *(const uint2 *)((const uint16_t *)p + i);
        uint16_t h[4] = { (uint16_t)v.x, (uint16_t)(v.x >> 16), (uint16_t)v.y, (uint16_t)(v.y >> 16) };
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = dtype == PS_BF16 ? bf16_up(h[k]) : f16_up(h[k]);
    } else {
        for (int k = 0; k < n; k++) x[k] = load_f(p, dtype, i + k);
    }
}
DEV void store4(void *p, int dtype, int64_t i, int n, bool aligned, const float *x)
{
    if (aligned && n == 4 && dtype == PS_F32) {
        float4 v = { x[0], x[1], x[2], x[3] };
        *(float4 *)((float *)p + i) = v;
    } else if (aligned && n == 4 && (dtype == PS_BF16 || dtype == PS_F16)) {
        uint16_t h[4];
#pragma unroll
        for (int k = 0; k < 4; k++) h[k] = dtype == PS_BF16 ? bf16_down(x[k]) : f16_down(x[k]);
        uint2 v = { (unsigned)h[0] | (unsigned)h[1] << 16, (unsigned)h[2] | (unsigned)h[3] << 16 };
        *(uint2 *)((uint16_t *)p + i) = v;
    } else {
        for (int k = 0; k < n; k++) store_f(p, dtype, i + k, x[k]);
    }
}

/* The item of a unit. */
DEV const item &item_of(const work &w, int64_t unit)
{
    int i = 0;
    while (i + 1 < w.n && unit >= w.it[i + 1].first_unit) i++;
    return w.it[i];
}

/* -- Adam ---------------------------------------------------------------------------------------------------------- */
struct adam_constants { float scale, l2, keep, b1, b2, omb1, omb2, inv, eps, step; bool has_l2; };

DEV void adam_step(const adam_constants &h, float g, float *p, float *m, float *v)
{
    g = __fmul_rn(g, h.scale);
    if (h.has_l2) g = __fmaf_rn(h.l2, *p, g);
    *p = __fmul_rn(*p, h.keep);                      /* 1 unless decoupled decay: exact then */
    *m = __fmaf_rn(h.b1, *m, __fmul_rn(h.omb1, g));
    *v = __fmaf_rn(h.b2, *v, __fmul_rn(__fmul_rn(h.omb2, g), g));
    float denominator = __fmaf_rn(__fsqrt_rn(*v), h.inv, h.eps);
    *p = __fmaf_rn(-h.step, __fdiv_rn(*m, denominator), *p);
}

/* The same for fp64 masters. */
DEV void adam_double(const ps_attrs_adam_ &a, const item &it, int64_t i)
{
    double c1 = 1 - a.beta1, c2 = 1 - a.beta2, wd = a.weight_decay;
    double keep = __dadd_rn(1, -__dmul_rn(a.lr, wd)), step = __ddiv_rn(a.lr, a.bias1);
    double inv = __ddiv_rn(1, __dsqrt_rn(a.bias2));
    double p = load_d(it.master, it.master_type, i), g = __dmul_rn(load_d(it.grad, it.grad_type, i), a.grad_scale);
    double *m = (double *)it.m + i, *v = (double *)it.v + i;
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

static __global__ void adam_kernel(adam_constants h, ps_attrs_adam_ a, const __grid_constant__ work w)
{
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        const item &it = item_of(w, unit);
        int64_t i = (unit - it.first_unit) * UNIT + threadIdx.x * 4;
        if (i >= it.numel) continue;
        int n = it.numel - i < 4 ? (int)(it.numel - i) : 4;
        if (it.master_type == PS_F64) {
            for (int k = 0; k < n; k++) adam_double(a, it, i + k);
            continue;
        }
        float g[4], p[4], m[4], v[4];
        load4(it.grad, it.grad_type, i, n, it.aligned, g);
        load4(it.master, it.master_type, i, n, it.aligned, p);
        load4(it.m, PS_F32, i, n, it.aligned, m);
        load4(it.v, PS_F32, i, n, it.aligned, v);
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (k < n) adam_step(h, g[k], &p[k], &m[k], &v[k]);
        store4(it.m, PS_F32, i, n, it.aligned, m);
        store4(it.v, PS_F32, i, n, it.aligned, v);
        store4(it.master, it.master_type, i, n, it.aligned, p);
        if (it.param != it.master) store4(it.param, it.param_type, i, n, it.aligned, p);
    }
}

static unsigned unit_blocks(int64_t units)
{
    int64_t most = (int64_t)ps_cu->sm_count * 32;
    return (unsigned)(units < most ? units : most);
}

static int adam_(ps_call *call)
{
    const ps_attrs_adam_ *a = (const ps_attrs_adam_ *)call->attrs;
    work w = collect(call, 5);
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
    PS_LAUNCH(adam_kernel, unit_blocks(w.units), THREADS, 0, ps_cu->compute, h, *a, w);
    return 0;
}

/* -- SGD ----------------------------------------------------------------------------------------------------------- */
template <class A> struct exact;
template <> struct exact<float> {
    DEV float mul(float a, float b) { return __fmul_rn(a, b); }
    DEV float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
};
template <> struct exact<double> {
    DEV double mul(double a, double b) { return __dmul_rn(a, b); }
    DEV double fma_(double a, double b, double c) { return __fma_rn(a, b, c); }
};

template <class A> DEV void sgd_step(const ps_attrs_sgd_ &a, const item &it, int64_t i)
{
    A lr = (A)a.lr, wd = (A)a.weight_decay, momentum = (A)a.momentum, take = (A)(1 - a.dampening);
    A p = access<A>::load(it.master, it.master_type, i);
    A g = exact<A>::mul(access<A>::load(it.grad, it.grad_type, i), (A)a.grad_scale);
    if (wd != 0) g = exact<A>::fma_(wd, p, g);
    if (momentum != 0) {
        A *buffer = (A *)it.m + i;
        A b = a.first ? g : exact<A>::fma_(momentum, *buffer, exact<A>::mul(take, g));
        *buffer = b;
        g = a.nesterov ? exact<A>::fma_(momentum, b, g) : b;
    }
    p = exact<A>::fma_(-lr, g, p);
    access<A>::store(it.master, it.master_type, i, p);
    access<A>::store(it.param, it.param_type, i, p);
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
    work w = collect(call, 4);
    if (w.units == 0) return 0;
    PS_LAUNCH(sgd_kernel, unit_blocks(w.units), THREADS, 0, ps_cu->compute, *(const ps_attrs_sgd_ *)call->attrs, w);
    return 0;
}

/* -- sums of squares, and gradients as they are stored ------------------------------------------------------------- */
/* src [numel] to dst (NULL: it stays) and the sum of squares of what is there then, in units. */
struct squares_item { const void *src; void *dst; int64_t numel, first_unit; int src_type, dst_type; };
struct squares_work {
    int n;
    int64_t units;
    squares_item it[PS_MAX_IN];
};

static __global__ void squares_kernel(double *parts, const __grid_constant__ squares_work w)
{
    for (int64_t unit = blockIdx.x; unit < w.units; unit += gridDim.x) {
        int n = 0;
        while (n + 1 < w.n && unit >= w.it[n + 1].first_unit) n++;
        const squares_item &it = w.it[n];
        double sum = 0;
        for (int k = 0; k < 4; k++) {
            int64_t i = (unit - it.first_unit) * UNIT + k * THREADS + threadIdx.x;
            if (i >= it.numel) break;
            double x = load_d(it.src, it.src_type, i);
            if (it.dst) {
                store_d(it.dst, it.dst_type, i, x);
                x = load_d(it.dst, it.dst_type, i);
            }
            sum += x * x;
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) parts[unit] = sum;
    }
}

/* A block for each tensor. */
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
    double *parts = (double *)call->scratch(call, (size_t)(w.units + 1) * sizeof *parts);
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
        w.units += ps_cu_div_up(x->numel, UNIT);
        w.it[i] = it;
    }
    return run_squares(call, w, (double *)call->out[0].data);
}

static int grad_store(ps_call *call)
{
    const ps_view *src = &call->in[0], *dst = &call->out[0], *sq = &call->out[1];
    const char *from = (const char *)src->data, *to = (const char *)dst->data;
    bool itself = from == to && src->dtype == dst->dtype;
    if (sq->dtype != PS_F64) return ps_fail(PS_EINVAL, "sq must be fp64");
    if ((src->dtype == PS_F64) != (dst->dtype == PS_F64))
        return ps_fail(PS_EINVAL, "fp64 gradients are stored as fp64, and only they");
    if (!itself && from < to + dst->numel * ps_dtype_bytes(dst->dtype) &&
        to < from + src->numel * ps_dtype_bytes(src->dtype))
        return ps_fail(PS_EINVAL, "dst overlaps src; give src itself or memory of its own");
    squares_work w;
    squares_item it = { src->data, itself ? NULL : dst->data, src->numel, 0, src->dtype, dst->dtype };
    w.n = 1;
    w.units = ps_cu_div_up(src->numel, UNIT);
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
