/* SPDX-License-Identifier: BSD-3-Clause
 * Reductions over any dimensions, the positions of the largest and the smallest elements, running sums and products,
 * and the k largest elements. Floats are added in fp64, and integers in int64. The order of every sum is fixed, so
 * results are bit-identical on every run.
 *
 * A reduction treats its input as [kept, reduced], with any strides. It computes one result per kept element. If there
 * are few kept elements, or if the reduced elements are adjacent in memory, a whole block computes one result
 * (together_kernel). If kept elements are adjacent, each thread computes one result (apart_kernel). If there are too
 * few blocks for the whole device, the reduced dimension is split into parts, and another kernel combines the results
 * of the parts. */
#include "backend/cuda/columns.h"

/* Returns whether a is preferred to b. NaN is preferred to every number. MAX prefers the larger number, and MIN prefers
 * the smaller number. */
DEV bool beats(int op, double a, double b)
{
    if (a != a) return b == b;
    return op == MAX ? a > b : a < b;
}
DEV bool beats(int op, int64_t a, int64_t b) { return op == MAX ? a > b : a < b; }

template <class A> DEV A combine(int op, A a, A b)
{
    if (op == SUM) return a + b;
    return beats(op, b, a) ? b : a;
}
DEV int64_t combine(int op, int64_t a, int64_t b)
{
    if (op == SUM) return (int64_t)((uint64_t)a + (uint64_t)b);
    return beats(op, b, a) ? b : a;
}
/* Sets *v to the result of a reduction of zero elements. */
DEV void nothing(int op, double *v) { *v = op == SUM ? 0 : op == MAX ? -(double)INFINITY : (double)INFINITY; }
DEV void nothing(int op, int64_t *v) { *v = op == SUM ? 0 : op == MAX ? INT64_MIN : INT64_MAX; }

/* Each block computes the result of one part for one kept element. */
template <class A>
static __global__ void together_kernel(target t, const void *x, int dtype, places<1> kept, places<1> reduced)
{
    int part = blockIdx.y, parts = gridDim.y;
    int64_t step = (reduced.numel + parts - 1) / parts, end = min((part + 1) * step, reduced.numel);
    for (int64_t i = blockIdx.x; i < kept.numel; i += gridDim.x) {
        int64_t base[1], at[1];
        A v;
        nothing(t.op, &v);
        locate(kept, i, base);
        for (int64_t j = part * step + threadIdx.x; j < end; j += blockDim.x) {
            locate(reduced, j, at);
            v = combine(t.op, v, access<A>::load(x, dtype, base[0] + at[0]));
        }
        __shared__ A shared[THREADS];
        __syncthreads();
        shared[threadIdx.x] = v;
        for (int half = (int)blockDim.x / 2; half > 0; half >>= 1) {
            __syncthreads();
            if ((int)threadIdx.x < half)
                shared[threadIdx.x] = combine(t.op, shared[threadIdx.x], shared[threadIdx.x + half]);
        }
        if (threadIdx.x == 0) deliver(t, kept.numel, i, part, parts, shared[0]);
    }
}

/* Each thread computes the result of one part for one kept element. */
template <class A>
static __global__ void apart_kernel(target t, const void *x, int dtype, places<1> kept, places<1> reduced)
{
    int part = blockIdx.y, parts = gridDim.y;
    int64_t step = (reduced.numel + parts - 1) / parts, end = min((part + 1) * step, reduced.numel);
    for (int64_t i = FIRST_ELEMENT; i < kept.numel; i += ALL_THREADS) {
        int64_t base[1], at[1];
        A v;
        nothing(t.op, &v);
        locate(kept, i, base);
        for (int64_t j = part * step; j < end; j++) {
            locate(reduced, j, at);
            v = combine(t.op, v, access<A>::load(x, dtype, base[0] + at[0]));
        }
        deliver(t, kept.numel, i, part, parts, v);
    }
}

/* The input of sum_columns_of(): a matrix [rows, kept] with aligned rows and the row stride ld. */
template <class T> struct plain_rows {
    const T *x;
    int64_t ld;
    __device__ __forceinline__ pack<T> load(int64_t i, int64_t j) const
    {
        return load_pack(x + j * ld + i * pack<T>::n);
    }
    __device__ __forceinline__ pack<T> finish(int64_t, int64_t, const pack<T> &loaded) const { return loaded; }
};
template <class T>
KERNEL_UP_TO(COLUMN_THREADS * ROW_GROUPS, 2)
columns_kernel(target t, const T *x, int64_t kept, int64_t rows, int64_t ld)
{
    sum_columns_of<T, 4>(t, kept, rows, plain_rows<T>{ x, ld });
}

template <class A> static __global__ void combine_kernel(target t, int64_t kept, int parts)
{
    for (int64_t i = FIRST_ELEMENT; i < kept; i += ALL_THREADS) {
        A v = ((const A *)t.parts)[i];
        for (int part = 1; part < parts; part++) v = combine(t.op, v, ((const A *)t.parts)[part * kept + i]);
        finish(t, i, v);
    }
}

int ps_cuda_combine_sums(const target *t, int64_t kept, int64_t parts)
{
    auto kernel = combine_kernel<double>;
    PS_LAUNCH(kernel, blocks_for(kept), THREADS, 0, ps_cu->compute, *t, kept, (int)parts);
    return ps_cuda_launched();
}

/* Returns the places of the reduced dimensions of x. If `reduced` is false, returns the places of the other
 * dimensions. */
static places<1> some_dims(const ps_view *x, uint32_t dims, bool reduced)
{
    ps_view v = *x;
    v.ndim = 0;
    for (int d = 0; d < x->ndim; d++) {
        if ((dims == 0 || (dims >> d & 1)) != reduced) continue;
        v.shape[v.ndim] = x->shape[d];
        v.stride[v.ndim++] = x->stride[d];
    }
    const ps_view *p = &v;
    return make_places<1>(v.ndim, v.shape, &p);
}

/* Launches columns_kernel. Returns false if it does not support the sum. */
template <class T>
static bool sum_columns(const target &t, const ps_view *x, const ps_cu_reduction &r, const places<1> &kept,
                        const places<1> &reduced)
{
    const int W = pack<T>::n;
    if (t.op != SUM || r.together || !is_flat(kept, 0) || reduced.ndim != 1 || kept.numel % W != 0 ||
        reduced.stride[0][0] % W != 0 || !aligned16(x->data))
        return false;
    auto kernel = columns_kernel<T>;
    PS_LAUNCH(kernel, column_blocks(kept.numel / W, r.parts), COLUMN_THREADS * ROW_GROUPS, 0, ps_cu->compute, t,
              (const T *)x->data, kept.numel, reduced.numel, reduced.stride[0][0]);
    return true;
}

static bool sum_columns(const target &t, const ps_view *x, const ps_cu_reduction &r, const places<1> &kept,
                        const places<1> &reduced)
{
    switch (x->dtype) {
    case PS_F32: return sum_columns<float>(t, x, r, kept, reduced);
    case PS_BF16: return sum_columns<bf16>(t, x, r, kept, reduced);
    case PS_F16: return sum_columns<f16>(t, x, r, kept, reduced);
    default: return false;
    }
}

template <class A>
static int run(ps_call *call, target t, const ps_view *x, const ps_cu_reduction &r, places<1> kept, places<1> reduced)
{
    static_assert((int)THREADS == (int)PS_CU_REDUCE_THREADS && sizeof(A) == 8, "the rules of reductions");
    if (r.parts > 1) {
        t.parts = call->scratch(call, (size_t)ps_cu_reduce_nbytes(&r));
        if (!t.parts) return PS_ENOMEM;
    }
    auto kernel = r.together ? together_kernel<A> : apart_kernel<A>;
    int64_t most = (int64_t)1 << 30;
    int threads = r.together && r.reduced <= THREADS ? 32 : THREADS;
    if (!sum_columns(t, x, r, kept, reduced))
        PS_LAUNCH(kernel, dim3((unsigned)(r.blocks < most ? r.blocks : most), (unsigned)r.parts), threads, 0,
                  ps_cu->compute, t, x->data, x->dtype, kept, reduced);
    if (r.parts > 1) {
        auto second = combine_kernel<A>;
        PS_LAUNCH(second, blocks_for(r.kept), THREADS, 0, ps_cu->compute, t, r.kept, (int)r.parts);
    }
    return 0;
}

static int reduce(ps_call *call, int op, uint32_t dims, bool accumulate, bool mean)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    places<1> kept = some_dims(x, dims, false), reduced = some_dims(x, dims, true);
    target t = { NULL, y->data, y->dtype, op, accumulate, 1 };
    if (mean) t.divide = (double)reduced.numel;
    if (kept.numel == 0) return 0;
    if (op != SUM && reduced.numel == 0)
        return ps_fail(PS_EINVAL, "the maximum or minimum of no elements does not exist; reduce a dimension that has "
                       "elements");
    ps_cu_reduction r = ps_cu_reduce(&ps_cu->card, x, dims);
    return ps_dtype_is_float(x->dtype) ? run<double>(call, t, x, r, kept, reduced)
                                       : run<int64_t>(call, t, x, r, kept, reduced);
}

static int sum(ps_call *call)
{
    const ps_attrs_sum *a = (const ps_attrs_sum *)call->attrs;
    return reduce(call, SUM, a->dims, a->accumulate != 0, false);
}
static int mean(ps_call *call)
{
    return reduce(call, SUM, ((const ps_attrs_mean *)call->attrs)->dims, false, true);
}
static int amax(ps_call *call) { return reduce(call, MAX, ((const ps_attrs_amax *)call->attrs)->dims, false, false); }
static int amin(ps_call *call) { return reduce(call, MIN, ((const ps_attrs_amin *)call->attrs)->dims, false, false); }

/* -- the place of the first largest or smallest -------------------------------------------------------------------- */
template <class A>
static __global__ void arg_kernel(int op, int64_t *y, const void *x, int dtype, places<1> lanes, int64_t n,
                                  int64_t stride)
{
    __shared__ A value[THREADS];
    __shared__ int64_t place[THREADS];
    for (int64_t i = blockIdx.x; i < lanes.numel; i += gridDim.x) {
        int64_t base[1], best = -1;
        A v = 0;
        locate(lanes, i, base);
        for (int64_t j = threadIdx.x; j < n; j += THREADS) {
            A w = access<A>::load(x, dtype, base[0] + j * stride);
            if (best < 0 || beats(op, w, v)) v = w, best = j;
        }
        __syncthreads();
        value[threadIdx.x] = v;
        place[threadIdx.x] = best;
        for (int half = THREADS / 2; half > 0; half >>= 1) {
            __syncthreads();
            int k = threadIdx.x, o = k + half;
            if (k < half && place[o] >= 0 &&
                (place[k] < 0 || beats(op, value[o], value[k]) ||
                 (!beats(op, value[k], value[o]) && place[o] < place[k]))) {
                value[k] = value[o];
                place[k] = place[o];
            }
        }
        if (threadIdx.x == 0) y[i] = place[0];
    }
}

static int arg_extreme(ps_call *call, int op, int dim)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (dim < 0) dim += x->ndim;
    int64_t n = x->ndim > 0 ? x->shape[dim] : 1, stride = x->ndim > 0 ? x->stride[dim] : 0;
    if (y->numel == 0) return 0;
    if (n == 0) return ps_fail(PS_EINVAL, "the maximum or minimum of no elements does not exist; reduce a dimension "
                               "that has elements");
    places<1> lanes = some_dims(x, x->ndim > 0 ? 1u << dim : 0, false);
    int64_t most = (int64_t)1 << 30;
    auto kernel = ps_dtype_is_float(x->dtype) ? arg_kernel<double> : arg_kernel<int64_t>;
    PS_LAUNCH(kernel, (unsigned)(lanes.numel < most ? lanes.numel : most), THREADS, 0, ps_cu->compute, op,
              (int64_t *)y->data, x->data, x->dtype, lanes, n, stride);
    return 0;
}
static int argmax(ps_call *call) { return arg_extreme(call, MAX, ((const ps_attrs_argmax *)call->attrs)->dim); }
static int argmin(ps_call *call) { return arg_extreme(call, MIN, ((const ps_attrs_argmin *)call->attrs)->dim); }

/* -- running sums: one thread per lane ----------------------------------------------------------------------------- */
template <class A>
static __global__ void cumsum_kernel(void *y, int y_type, const void *x, int x_type, places<2> lanes, int64_t n,
                                     int64_t y_stride, int64_t x_stride, bool reverse)
{
    for (int64_t i = FIRST_ELEMENT; i < lanes.numel; i += ALL_THREADS) {
        int64_t at[2];
        A s = 0;
        locate(lanes, i, at);
        for (int64_t k = 0; k < n; k++) {
            int64_t j = reverse ? n - 1 - k : k;
            s = combine(SUM, s, access<A>::load(x, x_type, at[1] + j * x_stride));
            access<A>::store(y, y_type, at[0] + j * y_stride, s);
        }
    }
}

static int cumsum(ps_call *call)
{
    const ps_attrs_cumsum *a = (const ps_attrs_cumsum *)call->attrs;
    const ps_view *x = &call->in[0], *y = &call->out[0];
    if (x->numel == 0) return 0;
    if (x->ndim == 0) return ps_cuda_copy(y, x);
    int dim = a->dim < 0 ? a->dim + x->ndim : a->dim, nd = 0;
    ps_view from = *x, to = *y;
    for (int d = 0; d < x->ndim; d++) {
        if (d == dim) continue;
        from.shape[nd] = to.shape[nd] = x->shape[d];
        from.stride[nd] = x->stride[d];
        to.stride[nd++] = y->stride[d];
    }
    from.ndim = to.ndim = nd;
    const ps_view *all[2] = { &to, &from };
    places<2> lanes = make_places<2>(nd, from.shape, all);
    auto kernel = ps_dtype_is_float(x->dtype) ? cumsum_kernel<double> : cumsum_kernel<int64_t>;
    PS_LAUNCH(kernel, blocks_for(lanes.numel), THREADS, 0, ps_cu->compute, y->data, y->dtype, x->data, x->dtype,
              lanes, x->shape[dim], y->stride[dim], x->stride[dim], a->reverse != 0);
    return 0;
}

/* -- running products: one thread per lane of [outer, n, inner] ---------------------------------------------------- */
DEV double times(double a, double b) { return a * b; }
DEV int64_t times(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

template <class A>
static __global__ void cumprod_kernel(void *y, int y_type, const void *x, int x_type, int64_t lanes, int64_t n,
                                      int64_t inner)
{
    for (int64_t i = FIRST_ELEMENT; i < lanes; i += ALL_THREADS) {
        int64_t at = i / inner * n * inner + i % inner;
        A product = 1;
        for (int64_t k = 0; k < n; k++, at += inner) {
            product = times(product, access<A>::load(x, x_type, at));
            access<A>::store(y, y_type, at, product);
        }
    }
}

/* later: scratch memory that has the shape of dx */
static __global__ void cumprod_backward_kernel(void *dx, const void *x, const void *dy, double *later, int dtype,
                                               int64_t lanes, int64_t n, int64_t inner)
{
    for (int64_t i = FIRST_ELEMENT; i < lanes; i += ALL_THREADS) {
        int64_t first = i / inner * n * inner + i % inner;
        double s = 0, factor = 0, before = 1;
        for (int64_t k = n - 1; k >= 0; k--) {
            int64_t at = first + k * inner;
            s = load_d(dy, dtype, at) + (k < n - 1 ? factor * s : 0);
            factor = load_d(x, dtype, at);
            later[at] = s;
        }
        for (int64_t k = 0; k < n; k++) {
            int64_t at = first + k * inner;
            factor = load_d(x, dtype, at);
            store_d(dx, dtype, at, before * later[at]);
            before *= factor;
        }
    }
}

/* Returns the sizes of x as [outer, n, inner]. n is the size of dimension `dim`. */
struct in_lanes { int64_t lanes, n, inner; };
static in_lanes lanes_along(const ps_view *x, int dim)
{
    in_lanes s = { 0, 1, 1 };
    if (dim < 0) dim += x->ndim;
    if (x->ndim > 0) s.n = x->shape[dim];
    for (int d = dim + 1; d < x->ndim; d++) s.inner *= x->shape[d];
    s.lanes = s.n > 0 ? x->numel / s.n : 0;
    return s;
}

static int cumprod(ps_call *call)
{
    const ps_view *x = &call->in[0], *y = &call->out[0];
    in_lanes s = lanes_along(x, ((const ps_attrs_cumprod *)call->attrs)->dim);
    auto kernel = ps_dtype_is_float(x->dtype) ? cumprod_kernel<double> : cumprod_kernel<int64_t>;
    if (x->numel > 0)
        PS_LAUNCH(kernel, blocks_for(s.lanes), THREADS, 0, ps_cu->compute, y->data, y->dtype, x->data, x->dtype,
                  s.lanes, s.n, s.inner);
    return 0;
}

static int cumprod_backward(ps_call *call)
{
    const ps_view *x = &call->in[0], *dx = &call->out[0];
    in_lanes s = lanes_along(x, ((const ps_attrs_cumprod_backward *)call->attrs)->dim);
    if (x->numel == 0) return 0;
    double *later = (double *)call->scratch(call, (size_t)x->numel * sizeof *later);
    if (!later) return PS_ENOMEM;
    PS_LAUNCH(cumprod_backward_kernel, blocks_for(s.lanes), THREADS, 0, ps_cu->compute, dx->data, x->data,
              call->in[1].data, later, x->dtype, s.lanes, s.n, s.inner);
    return 0;
}

/* -- the k largest of each lane: k searches, each for the best element after the previous one ---------------------- */
/* Returns whether a precedes b in the results. NaN precedes all numbers, and larger values precede smaller values.
 * Equal values are ordered by position. */
template <class A> DEV bool ahead(A a, int64_t at_a, A b, int64_t at_b)
{
    if (beats(MAX, a, b)) return true;
    return !beats(MAX, b, a) && at_a < at_b;
}

template <class A>
static __global__ void topk_kernel(void *values, int64_t *indices, const void *x, int dtype, places<1> all,
                                   int64_t rows, int64_t n, int64_t k)
{
    __shared__ A value[THREADS];
    __shared__ int64_t place[THREADS];
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        A last = 0;
        int64_t last_at = -1;
        for (int64_t t = 0; t < k; t++) {
            A v = 0;
            int64_t best = -1, at[1];
            for (int64_t j = threadIdx.x; j < n; j += THREADS) {
                locate(all, r * n + j, at);
                A w = access<A>::load(x, dtype, at[0]);
                if (t > 0 && !ahead(last, last_at, w, j)) continue;
                if (best < 0 || ahead(w, j, v, best)) v = w, best = j;
            }
            __syncthreads();
            value[threadIdx.x] = v;
            place[threadIdx.x] = best;
            for (int half = THREADS / 2; half > 0; half >>= 1) {
                __syncthreads();
                int c = threadIdx.x, o = c + half;
                if (c < half && place[o] >= 0 && (place[c] < 0 || ahead(value[o], place[o], value[c], place[c]))) {
                    value[c] = value[o];
                    place[c] = place[o];
                }
            }
            __syncthreads();
            last = value[0];
            last_at = place[0];
            if (threadIdx.x == 0) {
                access<A>::store(values, dtype, r * k + t, last);
                indices[r * k + t] = last_at;
            }
        }
    }
}

static int topk(ps_call *call)
{
    int64_t k = ((const ps_attrs_topk *)call->attrs)->k;
    const ps_view *x = &call->in[0];
    int64_t n = ps_cu_last(x);
    if (k < 0 || k > n)
        return ps_fail(PS_EINVAL, "k is %lld; the last dimension has %lld elements", (long long)k, (long long)n);
    if (x->numel == 0 || k == 0) return 0;
    places<1> all = make_places<1>(x->ndim, x->shape, &x);
    int64_t rows = x->numel / n, most = (int64_t)1 << 30;
    auto kernel = ps_dtype_is_float(x->dtype) ? topk_kernel<double> : topk_kernel<int64_t>;
    PS_LAUNCH(kernel, (unsigned)(rows < most ? rows : most), THREADS, 0, ps_cu->compute, call->out[0].data,
              (int64_t *)call->out[1].data, x->data, x->dtype, all, rows, n, k);
    return 0;
}

void ps_cuda_fill_reduce(ps_kernel *k)
{
    k[PS_OP_sum] = sum;
    k[PS_OP_mean] = mean;
    k[PS_OP_amax] = amax;
    k[PS_OP_amin] = amin;
    k[PS_OP_argmax] = argmax;
    k[PS_OP_argmin] = argmin;
    k[PS_OP_cumsum] = cumsum;
    k[PS_OP_cumprod] = cumprod;
    k[PS_OP_cumprod_backward] = cumprod_backward;
    k[PS_OP_topk] = topk;
}
