/* SPDX-License-Identifier: BSD-3-Clause
 * Rows and elements picked by index, and sums back into them. Nothing is added by atomics, so sums have the same bits
 * each time. An index outside its range traps: nothing is read or written for it, and the host raises the error when it
 * next looks. */
#include "backend/cuda/device.h"

/* -- embedding ----------------------------------------------------------------------------------------------------- */
/* Rows of nbytes as units of U; a block for each position. */
template <class U>
static __global__ void embedding_kernel(trap_to t, U *y, const U *w, const void *index, int dtype, int64_t n, int64_t V,
                                        int64_t units)
{
    for (int64_t r = blockIdx.x; r < n; r += gridDim.x) {
        int64_t k = load_i(index, dtype, r);
        if (k < 0 || k >= V) {
            if (threadIdx.x == 0) trap(t, TRAP_INDEX, PS_OP_embedding, k, r, V, 0);
            continue;
        }
        for (int64_t i = threadIdx.x; i < units; i += blockDim.x) y[r * units + i] = w[k * units + i];
    }
}

template <class U> static int run_embedding(const ps_view *w, const ps_view *index, const ps_view *y, int64_t units)
{
    int64_t n = index->numel, most = (int64_t)1 << 30;
    auto kernel = embedding_kernel<U>;
    PS_LAUNCH(kernel, (unsigned)(n < most ? n : most), 128, 0, ps_cu->compute, traps(), (U *)y->data,
              (const U *)w->data, index->data, index->dtype, n, w->shape[0], units);
    return 0;
}

static int embedding(ps_call *call)
{
    const ps_view *w = &call->in[0], *index = &call->in[1], *y = &call->out[0];
    int64_t nbytes = w->shape[1] * ps_dtype_bytes(w->dtype);
    if (y->numel == 0) return 0;
    if (nbytes % 16 == 0 && aligned16(w->data) && aligned16(y->data))
        return run_embedding<uint4>(w, index, y, nbytes / 16);
    int64_t even = nbytes | (int64_t)(uintptr_t)w->data | (int64_t)(uintptr_t)y->data;
    if (even % 4 == 0) return run_embedding<uint32_t>(w, index, y, nbytes / 4);
    if (even % 2 == 0) return run_embedding<uint16_t>(w, index, y, nbytes / 2);
    return run_embedding<uint8_t>(w, index, y, nbytes);
}

/* -- its gradient: positions are sorted by index, then each row of dw is one sum in the order of positions --------- */
static __global__ void histogram_kernel(trap_to t, int *count, const void *index, int dtype, int64_t n, int64_t V)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        int64_t k = load_i(index, dtype, i);
        if (k < 0 || k >= V) trap(t, TRAP_INDEX, PS_OP_embedding_backward, k, i, V, 0);
        else atomicAdd(&count[k], 1);
    }
}

/* begin[v] = cursor[v] = sum of count[0 .. v), begin[V] the sum of all; one block. */
KERNEL_UP_TO(1024, 1) scan_kernel(int *begin, int *cursor, const int *count, int64_t V)
{
    __shared__ int part[1024];
    int64_t each = (V + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each, end = min(first + each, V);
    int own = 0;
    for (int64_t v = first; v < end; v++) own += count[v];
    part[threadIdx.x] = own;
    for (unsigned step = 1; step < blockDim.x; step *= 2) {
        __syncthreads();
        int add = threadIdx.x >= step ? part[threadIdx.x - step] : 0;
        __syncthreads();
        part[threadIdx.x] += add;
    }
    __syncthreads();
    int sum = part[threadIdx.x] - own;
    for (int64_t v = first; v < end; v++) {
        begin[v] = cursor[v] = sum;
        sum += count[v];
    }
    if (threadIdx.x == blockDim.x - 1) begin[V] = part[threadIdx.x];
}

/* Positions into their row's range, in any order: sort_kernel orders them. */
static __global__ void place_kernel(int *mixed, int *cursor, const void *index, int dtype, int64_t n, int64_t V)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        int64_t k = load_i(index, dtype, i);
        if (k >= 0 && k < V) mixed[atomicAdd(&cursor[k], 1)] = (int)i;
    }
}

/* A position's place in its range is the number of smaller ones there. A block for each row. */
static __global__ void sort_kernel(int *sorted, const int *mixed, const int *begin, int64_t V)
{
    for (int64_t v = blockIdx.x; v < V; v += gridDim.x) {
        int first = begin[v], n = begin[v + 1] - first;
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            int own = mixed[first + i], place = 0;
            for (int j = 0; j < n; j++) place += mixed[first + j] < own;
            sorted[first + place] = own;
        }
    }
}

template <class A>
static __global__ void embedding_sum_kernel(void *dw, int dw_type, const void *dy, int dy_type, const int *sorted,
                                            const int *begin, int64_t V, int64_t C, bool accumulate)
{
    for (int64_t v = blockIdx.x; v < V; v += gridDim.x) {
        int first = begin[v], end = begin[v + 1];
        if (accumulate && first == end) continue;
        for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
            A sum = 0;
            for (int k = first; k < end; k++) sum += access<A>::load(dy, dy_type, sorted[k] * C + c);
            if (accumulate) sum += access<A>::load(dw, dw_type, v * C + c);
            access<A>::store(dw, dw_type, v * C + c, sum);
        }
    }
}

static int embedding_backward(ps_call *call)
{
    const ps_attrs_embedding_backward *a = (const ps_attrs_embedding_backward *)call->attrs;
    const ps_view *index = &call->in[0], *dy = &call->in[1], *dw = &call->out[0];
    int64_t V = a->rows, n = index->numel, C = ps_cu_last(dy);
    if (n > INT32_MAX) return ps_fail(PS_EUNSUP, "%lld positions, cuda takes up to 2^31", (long long)n);
    if (dw->numel == 0) return 0;
    int *room = (int *)call->scratch(call, (size_t)(3 * (V + 1) + 2 * n) * sizeof *room);
    if (!room) return PS_ENOMEM;
    int *count = room, *begin = count + V + 1, *cursor = begin + V + 1, *mixed = cursor + V + 1, *sorted = mixed + n;
    PS_TRY(ps_cuda_clear(count, (size_t)V * sizeof *count));
    PS_LAUNCH(histogram_kernel, blocks_for(n), THREADS, 0, ps_cu->compute, traps(), count, index->data, index->dtype, n,
              V);
    PS_LAUNCH(scan_kernel, 1, 1024, 0, ps_cu->compute, begin, cursor, (const int *)count, V);
    PS_LAUNCH(place_kernel, blocks_for(n), THREADS, 0, ps_cu->compute, mixed, cursor, index->data, index->dtype, n, V);
    int64_t most = (int64_t)1 << 30;
    unsigned blocks = (unsigned)(V < most ? V : most);
    PS_LAUNCH(sort_kernel, blocks, 128, 0, ps_cu->compute, sorted, (const int *)mixed, (const int *)begin, V);
    auto sum = dw->dtype == PS_F64 || dy->dtype == PS_F64 ? embedding_sum_kernel<double> : embedding_sum_kernel<float>;
    PS_LAUNCH(sum, blocks, 128, 0, ps_cu->compute, dw->data, dw->dtype, (const void *)dy->data, dy->dtype,
              (const int *)sorted, (const int *)begin, V, C, a->accumulate != 0);
    return 0;
}

/* -- gather and scatter_add ---------------------------------------------------------------------------------------- */
struct shape { int ndim, dim; int64_t size[PS_MAX_DIMS], stride[PS_MAX_DIMS], src_stride[PS_MAX_DIMS]; };

/* Where x, indexed by the coordinates of element i of `index` with coordinate dim replaced by k, lies. */
DEV int64_t picked(const shape &s, int64_t i, int64_t k)
{
    int64_t at = 0;
    for (int d = s.ndim - 1; d >= 0; d--) {
        int64_t q = i / s.size[d], coordinate = i - q * s.size[d];
        at += (d == s.dim ? k : coordinate) * s.stride[d];
        i = q;
    }
    return at;
}

/* Of x with the sizes of index. */
static shape shape_of(const ps_view *x, const ps_view *index, int dim)
{
    shape s;
    memset(&s, 0, sizeof s);
    s.ndim = index->ndim;
    s.dim = dim < 0 ? dim + x->ndim : dim;
    for (int d = 0; d < s.ndim; d++) s.size[d] = index->shape[d], s.stride[d] = x->stride[d];
    return s;
}

template <class U>
static __global__ void gather_kernel(trap_to t, U *y, const U *x, const void *index, int dtype, int64_t n,
                                     int64_t limit, shape s)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        int64_t k = load_i(index, dtype, i);
        if (k < 0 || k >= limit) trap(t, TRAP_INDEX, PS_OP_gather, k, i, limit, 0);
        else y[i] = x[picked(s, i, k)];
    }
}

template <class U> static int run_gather(ps_call *call, int dim)
{
    const ps_view *x = &call->in[0], *index = &call->in[1], *y = &call->out[0];
    shape s = shape_of(x, index, dim);
    auto kernel = gather_kernel<U>;
    PS_LAUNCH(kernel, blocks_for(index->numel), THREADS, 0, ps_cu->compute, traps(), (U *)y->data, (const U *)x->data,
              index->data, index->dtype, index->numel, x->ndim > 0 ? x->shape[s.dim] : 1, s);
    return 0;
}

static int gather(ps_call *call)
{
    int dim = ((const ps_attrs_gather *)call->attrs)->dim;
    if (call->in[1].numel == 0) return 0;
    switch (ps_dtype_bytes(call->in[0].dtype)) {
    case 1: return run_gather<uint8_t>(call, dim);
    case 2: return run_gather<uint16_t>(call, dim);
    case 4: return run_gather<uint32_t>(call, dim);
    default: return run_gather<uint64_t>(call, dim);
    }
}

/* A thread for each lane along dim of `index`: elements of src that meet do so in one lane, in its order. `sum` is all
 * of x, in A. */
template <class A>
static __global__ void scatter_kernel(trap_to t, A *sum, const void *src, int src_type, const void *index, int dtype,
                                      int64_t lanes, int64_t limit, shape s)
{
    int64_t inner = 1, n = s.ndim > 0 ? s.size[s.dim] : 1;
    for (int d = s.dim + 1; d < s.ndim; d++) inner *= s.size[d];
    for (int64_t lane = FIRST_ELEMENT; lane < lanes; lane += ALL_THREADS) {
        int64_t first = lane / inner * n * inner + lane % inner;
        for (int64_t j = 0; j < n; j++) {
            int64_t i = first + j * inner, k = load_i(index, dtype, i), rest = i, from = 0;
            if (k < 0 || k >= limit) {
                trap(t, TRAP_INDEX, PS_OP_scatter_add, k, i, limit, 0);
                continue;
            }
            for (int d = s.ndim - 1; d >= 0; d--) {
                from += rest % s.size[d] * s.src_stride[d];
                rest /= s.size[d];
            }
            sum[picked(s, i, k)] += access<A>::load(src, src_type, from);
        }
    }
}

static int scatter_add(ps_call *call)
{
    const ps_view *x = &call->in[0], *index = &call->in[1], *src = &call->in[2], *y = &call->out[0];
    bool floats = ps_dtype_is_float(x->dtype);
    if (x->numel == 0) return 0;
    ps_view sum = *x;                                /* in fp64 or int64, the same shape */
    sum.dtype = floats ? PS_F64 : PS_I64;
    sum.data = call->scratch(call, (size_t)x->numel * 8);
    if (!sum.data) return PS_ENOMEM;
    PS_TRY(ps_cuda_copy(&sum, x));
    if (index->numel > 0) {
        shape s = shape_of(x, index, ((const ps_attrs_scatter_add *)call->attrs)->dim);
        for (int d = 0; d < src->ndim; d++) s.src_stride[d] = src->stride[d];
        int64_t lanes = s.ndim > 0 ? index->numel / s.size[s.dim] : 1, limit = x->ndim > 0 ? x->shape[s.dim] : 1;
        if (floats)
            PS_LAUNCH(scatter_kernel<double>, blocks_for(lanes), THREADS, 0, ps_cu->compute, traps(),
                      (double *)sum.data, src->data, src->dtype, index->data, index->dtype, lanes, limit, s);
        else
            PS_LAUNCH(scatter_kernel<int64_t>, blocks_for(lanes), THREADS, 0, ps_cu->compute, traps(),
                      (int64_t *)sum.data, src->data, src->dtype, index->data, index->dtype, lanes, limit, s);
    }
    return ps_cuda_copy(y, &sum);
}

void ps_cuda_fill_table(ps_kernel *k)
{
    k[PS_OP_embedding] = embedding;
    k[PS_OP_embedding_backward] = embedding_backward;
    k[PS_OP_gather] = gather;
    k[PS_OP_scatter_add] = scatter_add;
}
