/* SPDX-License-Identifier: BSD-3-Clause
 * Padding, resampling and max pooling. Each element of the result is computed by one thread. The thread finds all
 * elements that contribute to its element, so the order of every sum is fixed. */
#include "backend/cuda/device.h"
#include "backend/image.h"

/* -- padding ------------------------------------------------------------------------------------------------------- */
struct pad_call {
    const void *x;
    void *y;
    int ndim, dtype;
    int64_t numel, in[PS_MAX_DIMS], out[PS_MAX_DIMS], before[PS_MAX_DIMS];
    double value;
};

template <class U> static __global__ void pad_kernel(const __grid_constant__ pad_call p)
{
    for (int64_t e = FIRST_ELEMENT; e < p.numel; e += ALL_THREADS) {
        int64_t rest = e, at = 0, scale = 1;
        bool inside = true;
        for (int d = p.ndim - 1; d >= 0; d--) {
            int64_t i = rest % p.out[d] - p.before[d];
            rest /= p.out[d];
            inside = inside && i >= 0 && i < p.in[d];
            at += i * scale, scale *= p.in[d];
        }
        if (inside) ((U *)p.y)[e] = ((const U *)p.x)[at];
        else if (p.dtype <= PS_F64) store_d(p.y, p.dtype, e, p.value);
        else store_i(p.y, p.dtype, e, to_int(p.value, INT64_MIN, INT64_MAX));
    }
}

static int pad(ps_call *call)
{
    const ps_attrs_pad *a = (const ps_attrs_pad *)call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    int64_t size = ps_dtype_bytes(y->dtype);
    pad_call p;
    p.x = x->data, p.y = y->data, p.ndim = y->ndim, p.dtype = y->dtype, p.numel = y->numel, p.value = a->value;
    for (int d = 0; d < y->ndim; d++) p.in[d] = x->shape[d], p.out[d] = y->shape[d], p.before[d] = a->before[d];
    if (y->numel == 0) return 0;
    auto kernel = size == 8 ? pad_kernel<uint64_t> : size == 4 ? pad_kernel<uint32_t>
                  : size == 2 ? pad_kernel<uint16_t> : pad_kernel<uint8_t>;
    PS_LAUNCH(kernel, blocks_for(y->numel), THREADS, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

/* -- resampling ---------------------------------------------------------------------------------------------------- */
struct resample_call {
    ps_attrs_resample a;
    const void *x;
    void *y;
    int64_t numel, in[2], out[2];                    /* sizes of x and y */
};

/* Resampling computes `out` results from `in` elements. Sets [*first, *end) to a range that includes all results that
 * depend on element j. */
DEV void results_of(const ps_attrs_resample &a, int d, int64_t in, int64_t out, int64_t j, int64_t *first, int64_t *end)
{
    int64_t before = a.padding[d], after = a.padding[d + 2];
    *first = 0, *end = out;
    if (a.kind == PS_TAPS_WINDOWS) {
        int64_t last = (j + before) / a.stride[d], from = j + before - a.kernel[d];
        *first = from < 0 ? 0 : from / a.stride[d];
        *end = last + 1;
    } else if (a.kind <= PS_TAPS_LINEAR) {
        double scale = a.kind > PS_TAPS_ADAPTIVE && a.scale[d] > 0 ? a.scale[d] : (double)in / (double)out;
        if (a.kind == PS_TAPS_NEAREST && !a.flag && (out == in || out == 2 * in)) scale = (double)in / (double)out;
        if (a.kind == PS_TAPS_LINEAR && a.flag) scale = out > 1 ? (double)(in - 1) / (double)(out - 1) : 0;
        if (scale <= 0) return;
        if (j > 0) *first = (int64_t)((double)(j - 1) / scale) - 2;
        if (j < in - 1) *end = (int64_t)((double)(j + 2) / scale) + 3;
    } else if (a.kind == PS_TAPS_REFLECT ? j > before && j < in - 1 - after
               : a.kind == PS_TAPS_REPLICATE ? j > 0 && j < in - 1 : j >= after && j < in - before) {
        *first = j + before, *end = j + before + 1;
    }
    if (*first < 0) *first = 0;
    if (*end > out) *end = out;
}

/* Returns the weight of element j in the result that `t` describes. */
DEV double weight_in(const ps_tap &t, int64_t j)
{
    return j < t.first || j >= t.end ? 0 : j == t.end - 1 ? t.last : t.weight;
}

template <class T> static __global__ void resample_kernel(const __grid_constant__ resample_call p)
{
    typedef typename type_info<T>::acc A;
    for (int64_t e = FIRST_ELEMENT; e < p.numel; e += ALL_THREADS) {
        int64_t j = e % p.out[1], i = e / p.out[1] % p.out[0];
        const T *x = (const T *)p.x + e / (p.out[0] * p.out[1]) * p.in[0] * p.in[1];
        ps_tap r = ps_tap_of(&p.a, 0, p.in[0], p.out[0], i), c = ps_tap_of(&p.a, 1, p.in[1], p.out[1], j);
        A sum = 0;
        for (int64_t u = r.first; u < r.end; u++) {
            A row = 0;
            for (int64_t v = c.first; v < c.end; v++) row += (A)weight_in(c, v) * up(x[u * p.in[1] + v]);
            sum += (A)weight_in(r, u) * row;
        }
        ((T *)p.y)[e] = down<T>(sum);
    }
}

/* Computes the transpose of resampling, which maps results back to inputs. x has the size of the results of resampling,
 * and y has the size of its input. */
template <class T> static __global__ void resample_back_kernel(const __grid_constant__ resample_call p)
{
    typedef typename type_info<T>::acc A;
    for (int64_t e = FIRST_ELEMENT; e < p.numel; e += ALL_THREADS) {
        int64_t j = e % p.out[1], i = e / p.out[1] % p.out[0], first[2], end[2];
        const T *x = (const T *)p.x + e / (p.out[0] * p.out[1]) * p.in[0] * p.in[1];
        results_of(p.a, 0, p.out[0], p.in[0], i, &first[0], &end[0]);
        results_of(p.a, 1, p.out[1], p.in[1], j, &first[1], &end[1]);
        A sum = 0;
        for (int64_t u = first[0]; u < end[0]; u++) {
            double r = weight_in(ps_tap_of(&p.a, 0, p.out[0], p.in[0], u), i);
            A row = 0;
            if (r == 0) continue;
            for (int64_t v = first[1]; v < end[1]; v++) {
                double c = weight_in(ps_tap_of(&p.a, 1, p.out[1], p.in[1], v), j);
                if (c != 0) row += (A)c * up(x[u * p.in[1] + v]);
            }
            sum += (A)r * row;
        }
        ((T *)p.y)[e] = down<T>(sum);
    }
}

template <class T> static int run_resample(const resample_call &p)
{
    auto kernel = p.a.transpose ? resample_back_kernel<T> : resample_kernel<T>;
    PS_LAUNCH(kernel, blocks_for(p.numel), THREADS, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static int resample(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    resample_call p;
    p.a = *(const ps_attrs_resample *)call->attrs;
    p.x = x->data, p.y = y->data, p.numel = y->numel;
    for (int d = 0; d < 2; d++) p.in[d] = x->shape[2 + d], p.out[d] = y->shape[2 + d];
    if (y->numel == 0) return 0;
    return BY_FLOAT(x->dtype, run_resample, p);
}

/* -- max pooling --------------------------------------------------------------------------------------------------- */
struct pool_call {
    ps_attrs_max_pool a;                             /* in backward, `size` is the size of dx */
    const void *x;                                   /* in backward: dy */
    void *y;                                         /* in backward: dx */
    int64_t *index;
    int64_t numel, in[2], out[2];                    /* sizes of x and of the windows */
};

template <class T> static __global__ void max_pool_kernel(const __grid_constant__ pool_call p)
{
    typedef typename type_info<T>::acc A;
    for (int64_t e = FIRST_ELEMENT; e < p.numel; e += ALL_THREADS) {
        const T *x = (const T *)p.x + e / (p.out[0] * p.out[1]) * p.in[0] * p.in[1];
        ps_window r = ps_max_pool_window(&p.a, 0, e / p.out[1] % p.out[0], p.in[0]);
        ps_window c = ps_max_pool_window(&p.a, 1, e % p.out[1], p.in[1]);
        int64_t best = r.first * p.in[1] + c.first;
        A most = up(x[best]);
        for (int64_t u = r.first; u < r.end; u += r.step)
            for (int64_t v = c.first; v < c.end; v += c.step) {
                A value = up(x[u * p.in[1] + v]);
                if (value > most || value != value) most = value, best = u * p.in[1] + v;
            }
        ((T *)p.y)[e] = down<T>(most);
        if (p.index) p.index[e] = best;
    }
}

/* Sets [*first, *end) to a range of windows along dimension d. The range includes all windows that can contain element
 * `at`. */
DEV void windows_of(const pool_call &p, int d, int64_t at, int64_t *first, int64_t *end)
{
    if (p.a.adaptive) {
        *first = at * p.out[d] / p.in[d] - 1;
        *end = ((at + 1) * p.out[d] + p.in[d] - 1) / p.in[d] + 1;
    } else {
        int64_t from = at + p.a.padding[d] - (int64_t)(p.a.kernel[d] - 1) * p.a.dilation[d];
        *first = from < 0 ? 0 : from / p.a.stride[d];
        *end = (at + p.a.padding[d]) / p.a.stride[d] + 1;
    }
    if (*first < 0) *first = 0;
    if (*end > p.out[d]) *end = p.out[d];
}

template <class T> static __global__ void max_pool_back_kernel(const __grid_constant__ pool_call p)
{
    typedef typename type_info<T>::acc A;
    for (int64_t e = FIRST_ELEMENT; e < p.numel; e += ALL_THREADS) {
        int64_t place = e % (p.in[0] * p.in[1]), plane = e / (p.in[0] * p.in[1]), first[2], end[2];
        windows_of(p, 0, place / p.in[1], &first[0], &end[0]);
        windows_of(p, 1, place % p.in[1], &first[1], &end[1]);
        A sum = 0;
        for (int64_t i = first[0]; i < end[0]; i++)
            for (int64_t j = first[1]; j < end[1]; j++) {
                int64_t at = (plane * p.out[0] + i) * p.out[1] + j;
                if (p.index[at] == place) sum += up(((const T *)p.x)[at]);
            }
        ((T *)p.y)[e] = down<T>(sum);
    }
}

template <class T> static int run_pool(const pool_call &p, bool back)
{
    auto kernel = back ? max_pool_back_kernel<T> : max_pool_kernel<T>;
    if (p.numel == 0) return 0;
    PS_LAUNCH(kernel, blocks_for(p.numel), THREADS, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static int max_pool(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->out[0], *index = &call->out[1];
    pool_call p;
    p.a = *(const ps_attrs_max_pool *)call->attrs;
    p.x = x->data, p.y = y->data, p.index = ps_has(index) ? (int64_t *)index->data : NULL, p.numel = y->numel;
    for (int d = 0; d < 2; d++) p.in[d] = x->shape[2 + d], p.out[d] = y->shape[2 + d];
    return BY_FLOAT(x->dtype, run_pool, p, false);
}

static int max_pool_backward(ps_call *call)
{
    const ps_view *dy = &call->in[0], *dx = &call->out[0];
    pool_call p;
    memcpy(&p.a, call->attrs, sizeof p.a);           /* both structs have the same fields */
    p.x = dy->data, p.y = dx->data, p.index = (int64_t *)call->in[1].data, p.numel = dx->numel;
    for (int d = 0; d < 2; d++) p.in[d] = dx->shape[2 + d], p.out[d] = dy->shape[2 + d];
    return BY_FLOAT(dy->dtype, run_pool, p, true);
}

void ps_cuda_fill_image(ps_kernel *k)
{
    k[PS_OP_pad] = pad;
    k[PS_OP_resample] = resample;
    k[PS_OP_max_pool] = max_pool;
    k[PS_OP_max_pool_backward] = max_pool_backward;
}
