/* SPDX-License-Identifier: BSD-3-Clause
 * Batch norm and group norm. A set is a group of elements with a common mean and variance. Each block computes the
 * statistics of one set, or the weight gradients of one channel. The order of every sum is fixed. */
#include "backend/cuda/device.h"

struct norm_call {
    const void *x, *dy, *w, *b, *mean, *var;         /* mean, var: moments that the caller has passed; in backward, the
                                                      * moments that forward used */
    void *y, *mean_out, *var_out, *dx, *dw, *db;
    int64_t N, C, S, sets, count;                    /* count: number of elements per set */
    int groups, given, w_dtype, b_dtype, dw_dtype;
    double eps;
};

/* Returns the position of element i of a set. Sets *channel to the channel of that element. */
DEV int64_t element_of(const norm_call &p, int64_t set, int64_t i, int64_t *channel)
{
    if (p.groups) {
        *channel = set % p.groups * (p.C / p.groups) + i / p.S;
        return set * p.count + i;
    }
    *channel = set;
    return (i / p.S * p.C + set) * p.S + i % p.S;
}

template <class A> DEV A weight_of(const void *w, int dtype, int64_t c, A without)
{
    return w ? access<A>::load(w, dtype, c) : without;
}

template <class T> static __global__ void channel_norm_kernel(const __grid_constant__ norm_call p)
{
    typedef typename type_info<T>::acc A;
    int64_t c;
    for (int64_t set = blockIdx.x; set < p.sets; set += gridDim.x) {
        A mean = 0, var = 0;
        if (p.given) {
            mean = ((const A *)p.mean)[set], var = ((const A *)p.var)[set];
        } else {
            for (int64_t i = threadIdx.x; i < p.count; i += blockDim.x)
                mean += up(((const T *)p.x)[element_of(p, set, i, &c)]);
            mean = block_sum(mean) / (A)p.count;
            for (int64_t i = threadIdx.x; i < p.count; i += blockDim.x) {
                A d = up(((const T *)p.x)[element_of(p, set, i, &c)]) - mean;
                var += d * d;
            }
            var = block_sum(var) / (A)p.count;
            if (threadIdx.x == 0 && p.mean_out) ((A *)p.mean_out)[set] = mean;
            if (threadIdx.x == 0 && p.var_out) ((A *)p.var_out)[set] = var;
        }
        A rstd = (A)(1.0 / sqrt((double)var + p.eps));
        for (int64_t i = threadIdx.x; i < p.count; i += blockDim.x) {
            int64_t at = element_of(p, set, i, &c);
            A v = (up(((const T *)p.x)[at]) - mean) * rstd * weight_of<A>(p.w, p.w_dtype, c, (A)1);
            ((T *)p.y)[at] = down<T>(v + weight_of<A>(p.b, p.b_dtype, c, (A)0));
        }
    }
}

template <class T> static __global__ void channel_norm_dx_kernel(const __grid_constant__ norm_call p)
{
    typedef typename type_info<T>::acc A;
    int64_t c;
    for (int64_t set = blockIdx.x; set < p.sets; set += gridDim.x) {
        A mean = ((const A *)p.mean)[set], rstd = (A)(1.0 / sqrt((double)((const A *)p.var)[set] + p.eps));
        A mean_g = 0, mean_gn = 0;
        if (!p.given) {
            for (int64_t i = threadIdx.x; i < p.count; i += blockDim.x) {
                int64_t at = element_of(p, set, i, &c);
                A g = up(((const T *)p.dy)[at]) * weight_of<A>(p.w, p.w_dtype, c, (A)1);
                mean_g += g, mean_gn += g * (up(((const T *)p.x)[at]) - mean) * rstd;
            }
            mean_g = block_sum(mean_g) / (A)p.count;
            mean_gn = block_sum(mean_gn) / (A)p.count;
        }
        for (int64_t i = threadIdx.x; i < p.count; i += blockDim.x) {
            int64_t at = element_of(p, set, i, &c);
            A g = up(((const T *)p.dy)[at]) * weight_of<A>(p.w, p.w_dtype, c, (A)1);
            A n = (up(((const T *)p.x)[at]) - mean) * rstd;
            ((T *)p.dx)[at] = down<T>(rstd * (g - mean_g - n * mean_gn));
        }
    }
}

/* Each block computes the weight gradients of one channel. */
template <class T> static __global__ void channel_norm_dw_kernel(const __grid_constant__ norm_call p)
{
    typedef typename type_info<T>::acc A;
    for (int64_t c = blockIdx.x; c < p.C; c += gridDim.x) {
        A dw = 0, db = 0;
        for (int64_t i = threadIdx.x; i < p.N * p.S; i += blockDim.x) {
            int64_t sample = i / p.S, at = (sample * p.C + c) * p.S + i % p.S;
            int64_t set = p.groups ? sample * p.groups + c / (p.C / p.groups) : c;
            A rstd = (A)(1.0 / sqrt((double)((const A *)p.var)[set] + p.eps)), dy = up(((const T *)p.dy)[at]);
            dw += dy * (up(((const T *)p.x)[at]) - ((const A *)p.mean)[set]) * rstd;
            db += dy;
        }
        dw = block_sum(dw), db = block_sum(db);
        if (threadIdx.x != 0) continue;
        if (p.dw) access<A>::store(p.dw, p.dw_dtype, c, dw);
        if (p.db) access<A>::store(p.db, p.dw_dtype, c, db);
    }
}

static norm_call call_of(const ps_view *x, const ps_view *w, int groups, double eps)
{
    norm_call p;
    memset(&p, 0, sizeof p);
    p.x = x->data, p.N = x->shape[0], p.C = x->shape[1], p.groups = groups, p.eps = eps;
    p.S = x->numel > 0 ? x->numel / p.N / p.C : 0;
    p.sets = groups ? p.N * groups : p.C;
    p.count = p.sets > 0 ? x->numel / p.sets : 0;
    if (ps_has(w)) p.w = w->data, p.w_dtype = w->dtype;
    return p;
}

template <class T> static int run_forward(const norm_call &p)
{
    auto kernel = channel_norm_kernel<T>;
    if (p.count == 0) return 0;
    PS_LAUNCH(kernel, row_blocks(p.sets), threads_for(p.count), 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static int channel_norm(ps_call *call)
{
    const ps_attrs_channel_norm *a = (const ps_attrs_channel_norm *)call->attrs;
    const ps_view *x = &call->in[0], *b = &call->in[2], *mean = &call->in[3], *out = call->out;
    norm_call p = call_of(x, &call->in[1], a->groups, a->eps);
    p.y = out[0].data, p.given = ps_has(mean);
    if (ps_has(b)) p.b = b->data, p.b_dtype = b->dtype;
    if (ps_has(mean)) p.mean = mean->data, p.var = call->in[4].data;
    if (ps_has(&out[1])) p.mean_out = out[1].data;
    if (ps_has(&out[2])) p.var_out = out[2].data;
    return BY_FLOAT(x->dtype, run_forward, p);
}

template <class T> static int run_backward(const norm_call &p)
{
    auto dx_kernel = channel_norm_dx_kernel<T>, dw_kernel = channel_norm_dw_kernel<T>;
    if (p.dx && p.count > 0) PS_LAUNCH(dx_kernel, row_blocks(p.sets), threads_for(p.count), 0, ps_cu->compute, p);
    if (p.dw || p.db) PS_LAUNCH(dw_kernel, row_blocks(p.C), threads_for(p.N * p.S), 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static int channel_norm_backward(ps_call *call)
{
    const ps_attrs_channel_norm_backward *a = (const ps_attrs_channel_norm_backward *)call->attrs;
    const ps_view *x = &call->in[1], *out = call->out;
    norm_call p = call_of(x, &call->in[2], a->groups, a->eps);
    p.dy = call->in[0].data, p.mean = call->in[3].data, p.var = call->in[4].data, p.given = a->given;
    if (ps_has(&out[0])) p.dx = out[0].data;
    if (ps_has(&out[1])) p.dw = out[1].data, p.dw_dtype = out[1].dtype;
    if (ps_has(&out[2])) p.db = out[2].data, p.dw_dtype = out[2].dtype;
    return BY_FLOAT(x->dtype, run_backward, p);
}

void ps_cuda_fill_channel_norm(ps_kernel *k)
{
    k[PS_OP_channel_norm] = channel_norm;
    k[PS_OP_channel_norm_backward] = channel_norm_backward;
}
