/* SPDX-License-Identifier: BSD-3-Clause
 * Layer norm and RMS norm over the last dimension C: a block for each row, in fp32 (fp64 for fp64). The gradients of w
 * and b are summed over rows in parts whose number depends on the shape alone, then over the parts in order. `dx` may
 * lie in the memory of `add`: each element of add is read just before the same element of dx is written. */
#include "backend/cuda/device.h"

/* A vector [C] or nothing. */
struct weights { const void *p; int dtype; };
static weights weights_of(const ps_view *v)
{
    weights w = { ps_has(v) ? v->data : NULL, v->dtype };
    return w;
}
template <class A> DEV A weight(const weights &w, int64_t c, A otherwise)
{
    return w.p ? access<A>::load(w.p, w.dtype, c) : otherwise;
}

/* rms: mean is 0 and not written. */
template <class T, bool RMS>
KERNEL_UP_TO(1024, 1) norm_kernel(T *y, const T *x, weights w, weights b, void *mean_out, void *rstd_out, int64_t rows,
                                   int64_t C, double eps)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const T *row = x + r * C;
        A sum = 0, mean = 0, squares = 0;
        if (!RMS) {
            each(row, C, [&](int64_t, A v) { sum += v; });
            mean = block_sum(sum) / (A)C;
        }
        each(row, C, [&](int64_t, A v) { squares += (v - mean) * (v - mean); });
        A rstd = 1 / sqrt(block_sum(squares) / (A)C + (A)eps);
        map_row(y + r * C, row, C, [&](int64_t c, A v) {
            return (v - mean) * rstd * weight(w, c, (A)1) + weight(b, c, (A)0);
        });
        if (threadIdx.x == 0) {
            if (mean_out) ((A *)mean_out)[r] = mean;
            if (rstd_out) ((A *)rstd_out)[r] = rstd;
        }
    }
}

template <class T> static int run_norm(ps_call *call, bool rms, double eps)
{
    const ps_view *x = &call->in[0], *mean = rms ? NULL : &call->out[1], *rstd = &call->out[rms ? 1 : 2];
    int64_t C = ps_cu_last(x), rows = x->numel / C;
    weights none = { NULL, 0 }, w = weights_of(&call->in[1]), b = rms ? none : weights_of(&call->in[2]);
    auto kernel = rms ? norm_kernel<T, true> : norm_kernel<T, false>;
    PS_LAUNCH(kernel, row_blocks(rows), threads_for(C), 0, ps_cu->compute, (T *)call->out[0].data, (const T *)x->data,
              w, b, mean && ps_has(mean) ? mean->data : NULL, ps_has(rstd) ? rstd->data : NULL, rows, C, eps);
    return 0;
}

static int layer_norm(ps_call *call)
{
    if (call->in[0].numel == 0) return 0;
    return BY_FLOAT(call->in[0].dtype, run_norm, call, false, ((const ps_attrs_layer_norm *)call->attrs)->eps);
}
static int rms_norm(ps_call *call)
{
    if (call->in[0].numel == 0) return 0;
    return BY_FLOAT(call->in[0].dtype, run_norm, call, true, ((const ps_attrs_rms_norm *)call->attrs)->eps);
}

/* -- backward ------------------------------------------------------------------------------------------------------ */
/* With n = (x - mean) * rstd and g = dy * w:  dx = rstd * (g - mean(g) - n * mean(g * n)) + add; RMS: no mean(g). */
template <class T, bool RMS>
KERNEL_UP_TO(1024, 1) dx_kernel(T *dx, const T *dy, const T *x, weights w, const void *mean_in, const void *rstd_in,
                                 const T *add, int64_t rows, int64_t C)
{
    typedef typename type_info<T>::acc A;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        A mean = RMS ? (A)0 : ((const A *)mean_in)[r], rstd = ((const A *)rstd_in)[r], sum_g = 0, sum_gn = 0;
        const T *x_r = x + r * C, *dy_r = dy + r * C, *add_r = add ? add + r * C : NULL;
        each(x_r, C, [&](int64_t c, A v) {
            A n = (v - mean) * rstd, g = up(dy_r[c]) * weight(w, c, (A)1);
            sum_g += g;
            sum_gn += g * n;
        });
        A mean_g = RMS ? (A)0 : block_sum(sum_g) / (A)C, mean_gn = block_sum(sum_gn) / (A)C;
        map_row(dx + r * C, x_r, C, [&](int64_t c, A v) {
            A n = (v - mean) * rstd, g = up(dy_r[c]) * weight(w, c, (A)1);
            A d = rstd * (g - mean_g - n * mean_gn);
            return add_r ? d + up(add_r[c]) : d;
        });
    }
}

/* parts [2][P][C]: sums over each part's rows of dy * n and of dy. Blocks of 32 columns by 8 rows. */
template <class T, bool RMS>
static __global__ void dw_kernel(void *parts, const T *dy, const T *x, const void *mean_in, const void *rstd_in,
                                 int64_t rows, int64_t C)
{
    typedef typename type_info<T>::acc A;
    __shared__ A shared[2][8][32];
    int column = threadIdx.x & 31, line = threadIdx.x >> 5;
    int64_t c = (int64_t)blockIdx.x * 32 + column, P = gridDim.y, step = (rows + P - 1) / P;
    int64_t first = blockIdx.y * step, end = min(first + step, rows);
    A dw = 0, db = 0;
    for (int64_t r = first + line; c < C && r < end; r += 8) {
        A mean = RMS ? (A)0 : ((const A *)mean_in)[r], rstd = ((const A *)rstd_in)[r], g = up(dy[r * C + c]);
        dw += g * ((up(x[r * C + c]) - mean) * rstd);
        db += g;
    }
    shared[0][line][column] = dw;
    shared[1][line][column] = db;
    __syncthreads();
    if (line > 1 || c >= C) return;
    A sum = 0;                                       /* line 0 adds up dw, line 1 db */
    for (int k = 0; k < 8; k++) sum += shared[line][k][column];
    ((A *)parts)[(line * P + blockIdx.y) * C + c] = sum;
}

template <class A> static __global__ void dw_total_kernel(void *out, int dtype, const A *parts, int64_t P, int64_t C)
{
    for (int64_t c = FIRST_ELEMENT; c < C; c += ALL_THREADS) {
        A sum = 0;
        for (int64_t p = 0; p < P; p++) sum += parts[p * C + c];
        access<A>::store(out, dtype, c, sum);
    }
}

template <class T, bool RMS> static int run_dw(ps_call *call, const ps_view *mean, const ps_view *rstd)
{
    typedef typename type_info<T>::acc A;
    const ps_view *dy = &call->in[0], *x = &call->in[1], *dw = &call->out[1], *db = RMS ? NULL : &call->out[2];
    int64_t C = ps_cu_last(x), rows = x->numel / C, P = ps_cu_div_up(rows, 64);
    P = P < 1 ? 1 : P > 256 ? 256 : P;
    A *parts = (A *)call->scratch(call, (size_t)(2 * P * C) * sizeof(A));
    if (!parts) return PS_ENOMEM;
    auto kernel = dw_kernel<T, RMS>;
    PS_LAUNCH(kernel, dim3((unsigned)ps_cu_div_up(C, 32), (unsigned)P), 256, 0, ps_cu->compute, (void *)parts,
              (const T *)dy->data, (const T *)x->data, mean ? mean->data : NULL, rstd->data, rows, C);
    auto total = dw_total_kernel<A>;
    if (ps_has(dw))
        PS_LAUNCH(total, blocks_for(C), THREADS, 0, ps_cu->compute, dw->data, dw->dtype, (const A *)parts, P, C);
    if (db && ps_has(db))
        PS_LAUNCH(total, blocks_for(C), THREADS, 0, ps_cu->compute, db->data, db->dtype, (const A *)parts + P * C, P,
                  C);
    return ps_cuda_launched();
}

template <class T, bool RMS> static int backward(ps_call *call, bool want_w)
{
    const ps_view *dy = &call->in[0], *x = &call->in[1], *mean = RMS ? NULL : &call->in[3];
    const ps_view *rstd = &call->in[RMS ? 3 : 4], *add = &call->in[RMS ? 4 : 5], *dx = &call->out[0];
    int64_t C = ps_cu_last(x), rows = x->numel / C;
    if (want_w) PS_TRY((run_dw<T, RMS>(call, mean, rstd)));        /* before dx, which may lie in dy's stead */
    if (!ps_has(dx) || rows == 0) return 0;
    auto kernel = dx_kernel<T, RMS>;
    PS_LAUNCH(kernel, row_blocks(rows), threads_for(C), 0, ps_cu->compute, (T *)dx->data, (const T *)dy->data,
              (const T *)x->data, weights_of(&call->in[2]), mean ? mean->data : NULL, rstd->data,
              ps_has(add) ? (const T *)add->data : NULL, rows, C);
    return 0;
}
template <class T> static int layer_norm_as(ps_call *call, bool want_w) { return backward<T, false>(call, want_w); }
template <class T> static int rms_norm_as(ps_call *call, bool want_w) { return backward<T, true>(call, want_w); }

static int layer_norm_backward(ps_call *call)
{
    bool want_w = ((const ps_attrs_layer_norm_backward *)call->attrs)->want_w != 0;
    return BY_FLOAT(call->in[1].dtype, layer_norm_as, call, want_w);
}
static int rms_norm_backward(ps_call *call)
{
    bool want_w = ((const ps_attrs_rms_norm_backward *)call->attrs)->want_w != 0;
    return BY_FLOAT(call->in[1].dtype, rms_norm_as, call, want_w);
}

void ps_cuda_fill_norm(ps_kernel *k)
{
    k[PS_OP_layer_norm] = layer_norm;
    k[PS_OP_rms_norm] = rms_norm;
    k[PS_OP_layer_norm_backward] = layer_norm_backward;
    k[PS_OP_rms_norm_backward] = rms_norm_backward;
}
