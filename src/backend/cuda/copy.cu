/* SPDX-License-Identifier: BSD-3-Clause
 * Copies between layouts and types, constants, and concatenation. A copy between equal types keeps all bits. */
#include "backend/cuda/device.h"

/* -- one type: elements of a size as unsigned integers ------------------------------------------------------------- */
template <class U> static __global__ void move_kernel(U *dst, const U *src, places<2> x)
{
    for (int64_t i = FIRST_ELEMENT; i < x.numel; i += ALL_THREADS) {
        int64_t at[2];
        locate(x, i, at);
        dst[at[0]] = src[at[1]];
    }
}

static void move(const ps_view *dst, const ps_view *src, const places<2> &x)
{
    dim3 blocks = blocks_for(x.numel);
    switch (ps_dtype_bytes(dst->dtype)) {
    case 1:
        PS_LAUNCH(move_kernel<uint8_t>, blocks, THREADS, 0, ps_cu->compute, (uint8_t *)dst->data,
                  (const uint8_t *)src->data, x);
        break;
    case 2:
        PS_LAUNCH(move_kernel<uint16_t>, blocks, THREADS, 0, ps_cu->compute, (uint16_t *)dst->data,
                  (const uint16_t *)src->data, x);
        break;
    case 4:
        PS_LAUNCH(move_kernel<uint32_t>, blocks, THREADS, 0, ps_cu->compute, (uint32_t *)dst->data,
                  (const uint32_t *)src->data, x);
        break;
    default:
        PS_LAUNCH(move_kernel<uint64_t>, blocks, THREADS, 0, ps_cu->compute, (uint64_t *)dst->data,
                  (const uint64_t *)src->data, x);
        break;
    }
}

/* -- between types ------------------------------------------------------------------------------------------------- */
static __global__ void convert_kernel(void *dst, int to, const void *src, int from, places<2> x)
{
    for (int64_t i = FIRST_ELEMENT; i < x.numel; i += ALL_THREADS) {
        int64_t at[2];
        locate(x, i, at);
        if (from > PS_F64) store_i(dst, to, at[0], load_i(src, from, at[1]));
        else if (to <= PS_F16 && from <= PS_F16) store_f(dst, to, at[0], load_f(src, from, at[1]));
        else store_d(dst, to, at[0], load_d(src, from, at[1]));
    }
}

/* Converts eight elements at a time between fp32, bf16 and fp16. Both operands are contiguous and 16-byte aligned. */
template <class D, class S> static __global__ void convert_flat(D *dst, const S *src, int64_t n)
{
    enum { W = 8, SN = pack<S>::n, DN = pack<D>::n };
    int64_t packs = n / W;
    for (int64_t i = FIRST_ELEMENT; i < packs; i += ALL_THREADS) {
        float v[W];
#pragma unroll
        for (int j = 0; j < W; j += SN) {
            pack<S> s = load_pack(src + i * W + j);
#pragma unroll
            for (int k = 0; k < SN; k++) v[j + k] = up(s.v[k]);
        }
#pragma unroll
        for (int j = 0; j < W; j += DN) {
            pack<D> d;
#pragma unroll
            for (int k = 0; k < DN; k++) d.v[k] = down<D>(v[j + k]);
            store_pack(dst + i * W + j, d);
        }
    }
    int64_t i = packs * W + FIRST_ELEMENT;
    if (i < n) dst[i] = down<D>(up(src[i]));
}

template <class D, class S> static void run_flat(const ps_view *dst, const ps_view *src)
{
    auto kernel = convert_flat<D, S>;
    PS_LAUNCH(kernel, blocks_for(ps_cu_div_up(dst->numel, 8)), THREADS, 0, ps_cu->compute, (D *)dst->data,
              (const S *)src->data, dst->numel);
}

static bool convert_fast(const ps_view *dst, const ps_view *src)
{
    int to = dst->dtype, from = src->dtype;
    if (to == PS_F32 && from == PS_BF16) run_flat<float, bf16>(dst, src);
    else if (to == PS_F32 && from == PS_F16) run_flat<float, f16>(dst, src);
    else if (to == PS_BF16 && from == PS_F32) run_flat<bf16, float>(dst, src);
    else if (to == PS_F16 && from == PS_F32) run_flat<f16, float>(dst, src);
    else return false;
    return true;
}

int ps_cuda_copy(const ps_view *dst, const ps_view *src)
{
    const ps_view *all[2] = { dst, src };
    places<2> x = make_places<2>(dst->ndim, dst->shape, all);
    if (x.numel == 0) return 0;
    bool flat = is_flat(x, 0) && is_flat(x, 1);
    if (dst->dtype == src->dtype && flat) {
        if (dst->data == src->data) return 0;
        return ps_cuda_move(dst->data, src->data, (size_t)(x.numel * ps_dtype_bytes(dst->dtype)));
    }
    if (dst->dtype == src->dtype) {
        move(dst, src, x);
        return ps_cuda_launched();
    }
    if (flat && aligned16(dst->data) && aligned16(src->data) && convert_fast(dst, src)) return ps_cuda_launched();
    PS_LAUNCH(convert_kernel, blocks_for(x.numel), THREADS, 0, ps_cu->compute, dst->data, dst->dtype, src->data,
              src->dtype, x);
    return ps_cuda_launched();
}

static int to_output(ps_call *call) { return ps_cuda_copy(&call->out[0], &call->in[0]); }
static int copy_(ps_call *call) { return ps_cuda_copy(&call->in[0], &call->in[1]); }

static int concat(ps_call *call)
{
    const ps_attrs_concat *a = (const ps_attrs_concat *)call->attrs;
    const ps_view *y = &call->out[0];
    int dim = a->dim < 0 ? a->dim + y->ndim : a->dim;
    int64_t first = 0;                               /* index along dim at which x begins in y */
    for (int n = 0; n < call->n_in; n++) {
        const ps_view *x = &call->in[n];
        ps_view part = *y;
        part.data = (char *)y->data + first * y->stride[dim] * ps_dtype_bytes(y->dtype);
        part.shape[dim] = x->shape[dim];
        part.numel = x->numel;
        PS_TRY(ps_cuda_copy(&part, x));
        first += x->shape[dim];
    }
    return 0;
}

/* -- order --------------------------------------------------------------------------------------------------------- */
struct order_call {
    const void *x;
    void *y;
    int ndim, upper;
    uint32_t dims;
    int64_t numel, shape[PS_MAX_DIMS], diagonal;
};

template <class U> static __global__ void flip_kernel(const __grid_constant__ order_call p)
{
    for (int64_t e = FIRST_ELEMENT; e < p.numel; e += ALL_THREADS) {
        int64_t rest = e, at = 0, scale = 1;
        for (int d = p.ndim - 1; d >= 0; d--) {
            int64_t n = p.shape[d], k = rest % n;
            at += (p.dims >> d & 1 ? n - 1 - k : k) * scale;
            rest /= n, scale *= n;
        }
        ((U *)p.y)[e] = ((const U *)p.x)[at];
    }
}

template <class U> static __global__ void triangle_kernel(const __grid_constant__ order_call p)
{
    int64_t rows = p.shape[p.ndim - 2], columns = p.shape[p.ndim - 1];
    for (int64_t e = FIRST_ELEMENT; e < p.numel; e += ALL_THREADS) {
        int64_t right = e % columns - e / columns % rows - p.diagonal;
        bool gone = p.upper ? right < 0 : right > 0;
        ((U *)p.y)[e] = gone ? (U)0 : ((const U *)p.x)[e];
    }
}

static order_call order_of(ps_call *call)
{
    const ps_view *x = &call->in[0];
    order_call p = {};
    p.x = x->data, p.y = call->out[0].data, p.ndim = x->ndim, p.numel = x->numel;
    for (int d = 0; d < x->ndim; d++) p.shape[d] = x->shape[d];
    return p;
}

static int flip(ps_call *call)
{
    order_call p = order_of(call);
    int64_t size = ps_dtype_bytes(call->in[0].dtype);
    p.dims = ((const ps_attrs_flip *)call->attrs)->dims;
    if (p.numel == 0) return 0;
    auto kernel = size == 8 ? flip_kernel<uint64_t> : size == 4 ? flip_kernel<uint32_t>
                  : size == 2 ? flip_kernel<uint16_t> : flip_kernel<uint8_t>;
    PS_LAUNCH(kernel, blocks_for(p.numel), THREADS, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

static int triangle(ps_call *call)
{
    const ps_attrs_triangle *a = (const ps_attrs_triangle *)call->attrs;
    order_call p = order_of(call);
    int64_t size = ps_dtype_bytes(call->in[0].dtype);
    if (p.numel == 0) return 0;
    p.upper = a->upper, p.diagonal = a->diagonal;
    auto kernel = size == 8 ? triangle_kernel<uint64_t> : size == 4 ? triangle_kernel<uint32_t>
                  : size == 2 ? triangle_kernel<uint16_t> : triangle_kernel<uint8_t>;
    PS_LAUNCH(kernel, blocks_for(p.numel), THREADS, 0, ps_cu->compute, p);
    return ps_cuda_launched();
}

/* -- constants ----------------------------------------------------------------------------------------------------- */
static __global__ void fill_kernel(void *p, int dtype, double value, places<1> x)
{
    for (int64_t i = FIRST_ELEMENT; i < x.numel; i += ALL_THREADS) {
        int64_t at[1];
        locate(x, i, at);
        store_d(p, dtype, at[0], value);
    }
}

static int fill_(ps_call *call)
{
    const ps_view *v = &call->in[0];
    double value = ((const ps_attrs_fill_ *)call->attrs)->value;
    places<1> x = make_places<1>(v->ndim, v->shape, &v);
    if (x.numel == 0) return 0;
    if (value == 0 && !signbit(value) && is_flat(x, 0))
        return ps_cuda_clear(v->data, (size_t)(x.numel * ps_dtype_bytes(v->dtype)));
    PS_LAUNCH(fill_kernel, blocks_for(x.numel), THREADS, 0, ps_cu->compute, v->data, v->dtype, value, x);
    return 0;
}

/* Sets element i to start + i * step. `exact` means that the tensor has an integer type and that start and step are
 * whole numbers. The kernel then uses integer arithmetic. */
static __global__ void arange_kernel(void *p, int dtype, int64_t n, double start, double step, bool exact)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        if (exact) store_i(p, dtype, i, (int64_t)((uint64_t)(int64_t)start + (uint64_t)i * (uint64_t)(int64_t)step));
        else store_d(p, dtype, i, __dadd_rn(start, __dmul_rn((double)i, step)));
    }
}

static bool whole(double x) { return x == trunc(x) && fabs(x) < 9223372036854775808.0; }

static int arange_(ps_call *call)
{
    const ps_attrs_arange_ *a = (const ps_attrs_arange_ *)call->attrs;
    const ps_view *x = &call->in[0];
    if (x->numel == 0) return 0;
    bool exact = !ps_dtype_is_float(x->dtype) && whole(a->start) && whole(a->step);
    PS_LAUNCH(arange_kernel, blocks_for(x->numel), THREADS, 0, ps_cu->compute, x->data, x->dtype, x->numel, a->start,
              a->step, exact);
    return 0;
}

void ps_cuda_fill_copy(ps_kernel *k)
{
    k[PS_OP_contiguous] = to_output;
    k[PS_OP_cast] = to_output;
    k[PS_OP_copy_] = copy_;
    k[PS_OP_concat] = concat;
    k[PS_OP_flip] = flip;
    k[PS_OP_triangle] = triangle;
    k[PS_OP_fill_] = fill_;
    k[PS_OP_arange_] = arange_;
}
