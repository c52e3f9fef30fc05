/* SPDX-License-Identifier: BSD-3-Clause
 * Ops that gather rows and elements by index, and ops that add to rows and elements by index. Values are not added by
 * atomics, so sums are bit-identical on every run. If an index is outside its range, the kernel sets a trap, and reads
 * and writes nothing for the index. The host reports the error at its next check. */
#include "backend/cuda/device.h"

/* -- embedding ----------------------------------------------------------------------------------------------------- */
/* The indices into an embedding of `total` rows. If the rows are split over ranks, this rank has some rows, starting at
 * row `first`. */
struct indices {
    const void *p;
    int dtype;
    int64_t first, total;
    __device__ int64_t operator[](int64_t i) const { return load_i(p, dtype, i) - first; }
};
static indices indices_of(const ps_view *index, int64_t first, int64_t total)
{
    indices x = { index->data, index->dtype, first, total };
    return x;
}
/* Returns whether row k is outside the whole embedding. k is counted from this rank's first row. */
DEV bool is_none(const indices &x, int64_t k) { return k < -x.first || k >= x.total - x.first; }

/* Copies rows in units of type U. Each block copies the row of one position. */
template <class U> DEV void clear_unit(U *y) { *y = 0; }
DEV void clear_unit(uint4 *y) { *y = make_uint4(0, 0, 0, 0); }
template <class U>
static __global__ void embedding_kernel(trap_to t, U *y, const U *w, indices index, int64_t n, int64_t V, int64_t units)
{
    for (int64_t r = blockIdx.x; r < n; r += gridDim.x) {
        int64_t k = index[r];
        if (is_none(index, k)) {
            if (threadIdx.x == 0) trap(t, TRAP_INDEX, PS_OP_embedding, k + index.first, r, index.total, 0);
            continue;
        }
        bool own = k >= 0 && k < V;
        for (int64_t i = threadIdx.x; i < units; i += blockDim.x) {
            if (own) y[r * units + i] = w[k * units + i];
            else clear_unit(&y[r * units + i]);
        }
    }
}

template <class U>
static int run_embedding(const ps_view *w, const ps_view *index, const ps_view *y, int64_t units,
                         const ps_attrs_embedding *a)
{
    indices x = indices_of(index, a->first, a->total > 0 ? a->total : w->shape[0]);
    int64_t n = index->numel, most = (int64_t)1 << 30;
    auto kernel = embedding_kernel<U>;
    PS_LAUNCH(kernel, (unsigned)(n < most ? n : most), 128, 0, ps_cu->compute, traps(), (U *)y->data,
              (const U *)w->data, x, n, w->shape[0], units);
    return 0;
}

static int embedding(ps_call *call)
{
    const ps_attrs_embedding *a = (const ps_attrs_embedding *)call->attrs;
    const ps_view *w = &call->in[0], *index = &call->in[1], *y = &call->out[0];
    int64_t nbytes = w->shape[1] * ps_dtype_bytes(w->dtype);
    if (y->numel == 0) return 0;
    if (nbytes % 16 == 0 && aligned16(w->data) && aligned16(y->data))
        return run_embedding<uint4>(w, index, y, nbytes / 16, a);
    int64_t even = nbytes | (int64_t)(uintptr_t)w->data | (int64_t)(uintptr_t)y->data;
    if (even % 4 == 0) return run_embedding<uint32_t>(w, index, y, nbytes / 4, a);
    if (even % 2 == 0) return run_embedding<uint16_t>(w, index, y, nbytes / 2, a);
    return run_embedding<uint8_t>(w, index, y, nbytes, a);
}

/* -- gradient of embedding: positions are sorted by index, and each row of dw is one sum in their order ------------ */
static __global__ void histogram_kernel(trap_to t, int *count, indices index, int64_t n, int64_t V, int64_t padding)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        int64_t k = index[i];
        if (is_none(index, k)) trap(t, TRAP_INDEX, PS_OP_embedding_backward, k + index.first, i, index.total, 0);
        else if (k >= 0 && k < V && k != padding) atomicAdd(&count[k], 1);
    }
}

/* Sets begin[v] and cursor[v] to the sum of count[0] to count[v - 1], and begin[V] to the sum of all counts. Writes the
 * indices of the rows with more than HOT positions to `hot`, and their number to *n_hot. The kernel has only one
 * block. */
enum { HOT = PS_CU_HOT };
KERNEL_UP_TO(1024, 1) scan_kernel(int *begin, int *cursor, int *hot, int *n_hot, const int *count, int64_t V)
{
    __shared__ int part[1024], hot_part[1024];
    int64_t each = (V + blockDim.x - 1) / blockDim.x, first = threadIdx.x * each, end = min(first + each, V);
    int own = 0, own_hot = 0;
#pragma unroll 8
    for (int64_t v = first; v < end; v++) {
        int n = count[v];
        own += n;
        own_hot += n > HOT;
    }
    part[threadIdx.x] = own;
    hot_part[threadIdx.x] = own_hot;
    for (unsigned step = 1; step < blockDim.x; step *= 2) {
        __syncthreads();
        int add = threadIdx.x >= step ? part[threadIdx.x - step] : 0;
        int add_hot = threadIdx.x >= step ? hot_part[threadIdx.x - step] : 0;
        __syncthreads();
        part[threadIdx.x] += add;
        hot_part[threadIdx.x] += add_hot;
    }
    __syncthreads();
    int sum = part[threadIdx.x] - own, at = hot_part[threadIdx.x] - own_hot;
#pragma unroll 8
    for (int64_t v = first; v < end; v++) {
        int n = count[v];
        begin[v] = cursor[v] = sum;
        sum += n;
        if (n > HOT) hot[at++] = (int)v;
    }
    if (threadIdx.x != blockDim.x - 1) return;
    begin[V] = part[threadIdx.x];
    *n_hot = hot_part[threadIdx.x];
}

/* Writes each position into the range of its row. The order of the positions within a range is arbitrary; sort_kernel
 * sorts them. */
static __global__ void place_kernel(int *mixed, int *cursor, indices index, int64_t n, int64_t V, int64_t padding)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        int64_t k = index[i];
        if (k >= 0 && k < V && k != padding) mixed[atomicAdd(&cursor[k], 1)] = (int)i;
    }
}

/* Writes to `out`, in ascending order, the positions whose index is v. The block reads all positions. Each thread reads
 * consecutive positions. */
enum { SORT_THREADS = 128, LOOKS = 8, FEW = 512 };
DEV void find_positions(int *out, const indices &index, int64_t n, int64_t v)
{
    __shared__ int found[SORT_THREADS / 32];
    int lane_id = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int64_t first = 0; first < n; first += SORT_THREADS * LOOKS) {
        int64_t own = first + threadIdx.x * LOOKS;
        unsigned here = 0;                           /* one bit for each of this thread's positions */
#pragma unroll
        for (int k = 0; k < LOOKS; k++)
            if (own + k < n && index[own + k] == v) here |= 1u << k;
        int count = 0, before = 0, all = 0;
#pragma unroll
        for (int k = 0; k < LOOKS; k++) count += here >> k & 1;
        int upto = count;                            /* number of positions that this thread and the lower threads of
                                                      * its warp have found */
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_sync(0xffffffffu, upto, lane_id >= step ? lane_id - step : 0);
            if (lane_id >= step) upto += other;
        }
        __syncthreads();                             /* other threads may still read the values of `found` from the
                                                      * previous round */
        if (lane_id == 31) found[warp] = upto;
        __syncthreads();
        for (int w = 0; w < SORT_THREADS / 32; w++) {
            before += w < warp ? found[w] : 0;
            all += found[w];
        }
        int at = before + upto - count;
#pragma unroll
        for (int k = 0; k < LOOKS; k++)
            if (here >> k & 1) out[at++] = (int)(own + k);
        out += all;
    }
}

/* Each block sorts the positions of one row. If a row has few positions, the place of a position in the sorted list is
 * the number of smaller positions. */
KERNEL_UP_TO(SORT_THREADS)
sort_kernel(int *sorted, const int *mixed, const int *begin, indices index, int64_t N, int64_t V)
{
    for (int64_t v = blockIdx.x; v < V; v += gridDim.x) {
        int first = begin[v], n = begin[v + 1] - first;
        if (n > FEW) find_positions(sorted + first, index, N, v);
        for (int i = threadIdx.x; i < n && n <= FEW; i += SORT_THREADS) {
            int own = mixed[first + i], place = 0;
            for (int j = 0; j < n; j++) place += mixed[first + j] < own;
            sorted[first + place] = own;
        }
    }
}

/* The operands of the kernels that sum dw [V, C]. dy is [n, C]. A thread computes W columns: either 16 bytes of
 * columns, or one column. */
struct sums_of {
    void *dw;
    int dw_type;
    const void *dy;
    const int *sorted, *begin, *hot, *n_hot;
    int64_t V, C;
    bool add;
};

template <class T, int W> struct columns {
    uint4 raw;
    DEV columns of(const T *p) { columns x = { *(const uint4 *)p }; return x; }
    __device__ typename type_info<T>::acc at(int w) const { return lane<T>(raw, w); }
};
template <class T> struct columns<T, 1> {
    T one;
    DEV columns of(const T *p) { columns x = { *p }; return x; }
    __device__ typename type_info<T>::acc at(int) const { return up(one); }
};

/* Computes sum[w] += dy[sorted[k]][c + w] for k = first, first + step, first + 2 * step and so on, while k < end, in
 * this order. */
template <class T, int W> DEV void add_rows(const sums_of &s, int first, int end, int step, int64_t c,
                                            typename type_info<T>::acc *sum)
{
    enum { AT_ONCE = 4 };
    const T *dy = (const T *)s.dy + c;
    int k = first;
    for (; k + (AT_ONCE - 1) * step < end; k += AT_ONCE * step) {
        columns<T, W> x[AT_ONCE];
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) x[q] = columns<T, W>::of(dy + s.sorted[k + q * step] * s.C);
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
#pragma unroll
            for (int w = 0; w < W; w++) sum[w] += x[q].at(w);
        }
    }
    for (; k < end; k += step) {
        columns<T, W> x = columns<T, W>::of(dy + s.sorted[k] * s.C);
#pragma unroll
        for (int w = 0; w < W; w++) sum[w] += x.at(w);
    }
}

template <class T, int W> DEV void store_sums(const sums_of &s, int64_t v, int64_t c, typename type_info<T>::acc *sum)
{
    typedef typename type_info<T>::acc A;
    int64_t at = v * s.C + c;
    if (W > 1 && s.dw_type == (int)type_info<T>::dtype) {
        T *dw = (T *)s.dw + at;
        pack<T> out;
        uint4 was = s.add ? *(const uint4 *)dw : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < pack<T>::n; w++) out.v[w] = down<T>(s.add ? sum[w] + lane<T>(was, w) : sum[w]);
        store_pack(dw, out);
        return;
    }
#pragma unroll
    for (int w = 0; w < W; w++) {
        A x = sum[w];
        if (s.add) x += access<A>::load(s.dw, s.dw_type, at + w);
        access<A>::store(s.dw, s.dw_type, at + w, x);
    }
}

/* Each warp computes a row that is not hot. */
template <class T, int W> KERNEL_UP_TO(THREADS) embedding_sum_kernel(sums_of s)
{
    typedef typename type_info<T>::acc A;
    for (int64_t v = FIRST_ELEMENT / 32; v < s.V; v += ALL_THREADS / 32) {
        int first = s.begin[v], end = s.begin[v + 1];
        if ((s.add && first == end) || end - first > HOT) continue;
        for (int64_t c = (threadIdx.x & 31) * W; c < s.C; c += 32 * W) {
            A sum[W];
#pragma unroll
            for (int w = 0; w < W; w++) sum[w] = 0;
            add_rows<T, W>(s, first, end, 1, c, sum);
            store_sums<T, W>(s, v, c, sum);
        }
    }
}

/* Each block computes 32 * W columns of a hot row. Line l of the block sums the positions l, l + LINES, l + 2 * LINES,
 * ... Then line 0 adds up the sums of all lines. */
enum { LINES = 16 };
template <class T, int W> KERNEL_UP_TO(32 * LINES) embedding_hot_kernel(sums_of s)
{
    typedef typename type_info<T>::acc A;
    __shared__ A part[LINES][32 * W];
    int column = (threadIdx.x & 31) * W, line = threadIdx.x >> 5, n_hot = *s.n_hot;
    int64_t c = (int64_t)blockIdx.y * 32 * W + column;
    for (int h = blockIdx.x; h < n_hot; h += gridDim.x) {
        int v = s.hot[h];
        A sum[W];
#pragma unroll
        for (int w = 0; w < W; w++) sum[w] = 0;
        if (c < s.C) add_rows<T, W>(s, s.begin[v] + line, s.begin[v + 1], LINES, c, sum);
        __syncthreads();
#pragma unroll
        for (int w = 0; w < W; w++) part[line][column + w] = sum[w];
        __syncthreads();
        if (line > 0 || c >= s.C) continue;
        for (int l = 1; l < LINES; l++) {
#pragma unroll
            for (int w = 0; w < W; w++) sum[w] += part[l][column + w];
        }
        store_sums<T, W>(s, v, c, sum);
    }
}

template <class T, int W> static void run_sums(const sums_of &s, int64_t n)
{
    auto sum = embedding_sum_kernel<T, W>;
    auto hot = embedding_hot_kernel<T, W>;
    int64_t rows = n / (HOT + 1), most = ps_cu->card.sm_count * (int64_t)8;
    PS_LAUNCH(sum, blocks_for(s.V * 32), THREADS, 0, ps_cu->compute, s);
    if (rows > 0)
        PS_LAUNCH(hot, dim3((unsigned)(rows < most ? rows : most), (unsigned)ps_cu_div_up(s.C, 32 * W)), 32 * LINES, 0,
                  ps_cu->compute, s);
}

template <class T> static int run_sums_of(const sums_of &s, int64_t n)
{
    bool whole = s.C % pack<T>::n == 0 && aligned16(s.dy) && aligned16(s.dw);
    if (whole) run_sums<T, pack<T>::n>(s, n);
    else run_sums<T, 1>(s, n);
    return ps_cuda_launched();
}

static int embedding_backward(ps_call *call)
{
    const ps_attrs_embedding_backward *a = (const ps_attrs_embedding_backward *)call->attrs;
    const ps_view *index = &call->in[0], *dy = &call->in[1], *dw = &call->out[0];
    int64_t V = a->rows, n = index->numel, C = ps_cu_last(dy);
    if (n > INT32_MAX) return ps_fail(PS_EUNSUP, "cannot process %lld positions on cuda: at most 2^31 - 1 are "
                                      "supported", (long long)n);
    if (dw->numel == 0) return 0;
    if (C > (int64_t)65535 * 32)
        return ps_fail(PS_EUNSUP, "cannot process rows of %lld elements on cuda: at most 2097120 are supported",
                       (long long)C);
    int *room = (int *)call->scratch(call, (size_t)ps_cu_embedding_nbytes(V, n));
    if (!room) return PS_ENOMEM;
    int *count = room, *begin = count + V + 1, *cursor = begin + V + 1, *mixed = cursor + V + 1, *sorted = mixed + n;
    int *hot = sorted + n, *hot_count = count + V;
    indices x = indices_of(index, a->first, a->total > 0 ? a->total : V);
    int64_t padding = a->padding_idx - a->first;     /* negative if another rank has the padding row */
    PS_TRY(ps_cuda_clear(count, (size_t)V * sizeof *count));
    PS_LAUNCH(histogram_kernel, blocks_for(n), THREADS, 0, ps_cu->compute, traps(), count, x, n, V, padding);
    PS_LAUNCH(scan_kernel, 1, 1024, 0, ps_cu->compute, begin, cursor, hot, hot_count, (const int *)count, V);
    PS_LAUNCH(place_kernel, blocks_for(n), THREADS, 0, ps_cu->compute, mixed, cursor, x, n, V, padding);
    int64_t most = (int64_t)1 << 30;
    PS_LAUNCH(sort_kernel, (unsigned)(V < most ? V : most), SORT_THREADS, 0, ps_cu->compute, sorted, (const int *)mixed,
              (const int *)begin, x, n, V);
    sums_of s = { dw->data, dw->dtype, dy->data, sorted, begin, hot, hot_count, V, C, a->accumulate != 0 };
    return BY_FLOAT(dy->dtype, run_sums_of, s, n);
}

/* -- several indices as one ---------------------------------------------------------------------------------------- */
struct coordinates {
    int n, ndim, dtype[PS_MAX_DIMS];
    const void *p[PS_MAX_DIMS];
    int64_t shape[PS_MAX_DIMS], stride[PS_MAX_DIMS][PS_MAX_DIMS], size[PS_MAX_DIMS];
};

static __global__ void flat_index_kernel(trap_to t, int64_t *y, int64_t n, coordinates c)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        int64_t all = 0;
        for (int k = 0; k < c.n; k++) {
            int64_t at = 0, rest = i;
            for (int d = c.ndim - 1; d >= 0; d--) {
                at += rest % c.shape[d] * c.stride[k][d];
                rest /= c.shape[d];
            }
            int64_t v = c.dtype[k] == PS_U8 ? ((const uint8_t *)c.p[k])[at] : load_i(c.p[k], c.dtype[k], at);
            if (v < -c.size[k] || v >= c.size[k]) trap(t, TRAP_INDEX, PS_OP_flat_index, v, i, c.size[k], 0);
            all = all * c.size[k] + (v < 0 ? v + c.size[k] : v);
        }
        y[i] = all;
    }
}

static int flat_index(ps_call *call)
{
    const ps_attrs_flat_index *a = (const ps_attrs_flat_index *)call->attrs;
    const ps_view *y = &call->out[0];
    coordinates c;
    if (y->numel == 0) return 0;
    memset(&c, 0, sizeof c);
    c.n = call->n_in, c.ndim = y->ndim;
    for (int d = 0; d < y->ndim; d++) c.shape[d] = y->shape[d];
    for (int k = 0; k < c.n; k++) {
        const ps_view *v = &call->in[k];
        c.p[k] = v->data, c.dtype[k] = v->dtype, c.size[k] = a->size[k];
        for (int e = v->ndim - 1, d = y->ndim - 1; e >= 0; e--, d--)
            c.stride[k][d] = v->shape[e] == 1 ? 0 : v->stride[e];
    }
    PS_LAUNCH(flat_index_kernel, blocks_for(y->numel), THREADS, 0, ps_cu->compute, traps(), (int64_t *)y->data,
              y->numel, c);
    return 0;
}

/* -- gather and scatter -------------------------------------------------------------------------------------------- */
/* The elements of x that an index tensor selects, as a tensor with `ndim` dimensions. `stride` contains the strides in
 * x. Each index selects `width` elements. */
struct shape { int ndim, dim; int64_t width, size[PS_MAX_DIMS], stride[PS_MAX_DIMS]; };

/* Returns the position in x of selected element i if its coordinate along `dim` were k. */
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

/* Returns the shape of the elements that `index` selects. The shape has the sizes of `index`, followed by the sizes of
 * x after the last dimension of `index`. */
static shape shape_of(const ps_view *x, const ps_view *index, int dim)
{
    shape s;
    memset(&s, 0, sizeof s);
    s.ndim = x->ndim;
    s.dim = dim < 0 ? dim + x->ndim : dim;
    s.width = 1;
    for (int d = 0; d < s.ndim; d++) {
        s.size[d] = d < index->ndim ? index->shape[d] : x->shape[d], s.stride[d] = x->stride[d];
        if (d >= index->ndim) s.width *= x->shape[d];
    }
    return s;
}

template <class U>
static __global__ void gather_kernel(trap_to t, U *y, const U *x, const void *index, int dtype, int64_t n,
                                     int64_t limit, shape s)
{
    for (int64_t i = FIRST_ELEMENT; i < n; i += ALL_THREADS) {
        int64_t k = load_i(index, dtype, i / s.width);
        if (k < 0 || k >= limit) trap(t, TRAP_INDEX, PS_OP_gather, k, i / s.width, limit, 0);
        else y[i] = x[picked(s, i, k)];
    }
}

template <class U> static int run_gather(ps_call *call, int dim)
{
    const ps_view *x = &call->in[0], *index = &call->in[1], *y = &call->out[0];
    shape s = shape_of(x, index, dim);
    auto kernel = gather_kernel<U>;
    PS_LAUNCH(kernel, blocks_for(y->numel), THREADS, 0, ps_cu->compute, traps(), (U *)y->data, (const U *)x->data,
              index->data, index->dtype, y->numel, x->ndim > 0 ? x->shape[s.dim] : 1, s);
    return 0;
}

static int gather(ps_call *call)
{
    int dim = ((const ps_attrs_gather *)call->attrs)->dim;
    if (call->out[0].numel == 0) return 0;
    switch (ps_dtype_bytes(call->in[0].dtype)) {
    case 1: return run_gather<uint8_t>(call, dim);
    case 2: return run_gather<uint16_t>(call, dim);
    case 4: return run_gather<uint32_t>(call, dim);
    default: return run_gather<uint64_t>(call, dim);
    }
}

/* Calls fn(i, k) for each element i of src; k is the index of that element. The elements along dimension s.dim form a
 * lane. One thread processes a lane in order, or in reverse order if `back` is set. All elements with the same
 * destination are in the same lane. */
template <class F>
DEV void for_lanes(trap_to t, int op, const void *index, int dtype, int64_t lanes, int64_t limit, const shape &s,
                   bool back, F fn)
{
    int64_t inner = 1, n = s.size[s.dim];
    for (int d = s.dim + 1; d < s.ndim; d++) inner *= s.size[d];
    for (int64_t lane = FIRST_ELEMENT; lane < lanes; lane += ALL_THREADS) {
        int64_t first = lane / inner * n * inner + lane % inner;
        for (int64_t j = 0; j < n; j++) {
            int64_t i = first + (back ? n - 1 - j : j) * inner, k = load_i(index, dtype, i / s.width);
            if (k < 0 || k >= limit) trap(t, TRAP_INDEX, op, k, i / s.width, limit, 0);
            else fn(i, k);
        }
    }
}

/* sum: a copy of x with elements of type A. */
template <class A>
static __global__ void scatter_add_kernel(trap_to t, A *sum, const void *src, int src_type, const void *index,
                                          int dtype, int64_t lanes, int64_t limit, shape s)
{
    for_lanes(t, PS_OP_scatter_add, index, dtype, lanes, limit, s, false, [&](int64_t i, int64_t k) {
        sum[picked(s, i, k)] += access<A>::load(src, src_type, i);
    });
}

template <class A> DEV A joined(A a, A b, int reduce)
{
    if (reduce == 2) return a * b;
    if (a != a || b != b) return a != a ? a : b;
    return (reduce == 0) == (a > b) ? a : b;
}

template <class A>
static __global__ void scatter_reduce_kernel(trap_to t, A *all, const void *src, int src_type, const void *index,
                                             int dtype, int64_t lanes, int64_t limit, shape s, int reduce)
{
    for_lanes(t, PS_OP_scatter_reduce, index, dtype, lanes, limit, s, false, [&](int64_t i, int64_t k) {
        A &to = all[picked(s, i, k)];
        to = joined<A>(to, access<A>::load(src, src_type, i), reduce);
    });
}

template <class U>
static __global__ void scatter_kernel(trap_to t, U *y, const U *src, const void *index, int dtype, int64_t lanes,
                                      int64_t limit, shape s, int op)
{
    for_lanes(t, op, index, dtype, lanes, limit, s, false, [&](int64_t i, int64_t k) { y[picked(s, i, k)] = src[i]; });
}

template <class U>
static __global__ void scatter_backward_kernel(trap_to t, U *dx, U *dsrc, const void *index, int dtype, int64_t lanes,
                                               int64_t limit, shape s)
{
    for_lanes(t, PS_OP_scatter_backward, index, dtype, lanes, limit, s, true, [&](int64_t i, int64_t k) {
        U &from = dx[picked(s, i, k)];
        dsrc[i] = from;
        from = 0;
    });
}

/* Returns the number of lanes of the selected elements, or 0 if no elements are selected. */
static int64_t lanes_of(const ps_view *index, const shape &s)
{
    return index->numel == 0 ? 0 : index->numel * s.width / s.size[s.dim];
}

/* Copies x to workspace as fp64 or int64, combines the copy with src, and stores the result to y. reduce: the operation
 * of scatter_reduce, or -1 for the sum. */
static int joined_in_scratch(ps_call *call, int dim, int reduce)
{
    const ps_view *x = &call->in[0], *index = &call->in[1], *src = &call->in[2], *y = &call->out[0];
    bool floats = ps_dtype_is_float(x->dtype);
    if (x->numel == 0) return 0;
    ps_view all = *x;
    all.dtype = floats ? PS_F64 : PS_I64;
    all.data = call->scratch(call, (size_t)x->numel * 8);
    if (!all.data) return PS_ENOMEM;
    PS_TRY(ps_cuda_copy(&all, x));
    shape s = shape_of(x, index, dim);
    int64_t lanes = lanes_of(index, s), limit = x->shape[s.dim];
    if (lanes > 0 && reduce >= 0 && floats)
        PS_LAUNCH(scatter_reduce_kernel<double>, blocks_for(lanes), THREADS, 0, ps_cu->compute, traps(),
                  (double *)all.data, src->data, src->dtype, index->data, index->dtype, lanes, limit, s, reduce);
    else if (lanes > 0 && reduce >= 0)
        PS_LAUNCH(scatter_reduce_kernel<int64_t>, blocks_for(lanes), THREADS, 0, ps_cu->compute, traps(),
                  (int64_t *)all.data, src->data, src->dtype, index->data, index->dtype, lanes, limit, s, reduce);
    else if (lanes > 0 && floats)
        PS_LAUNCH(scatter_add_kernel<double>, blocks_for(lanes), THREADS, 0, ps_cu->compute, traps(),
                  (double *)all.data, src->data, src->dtype, index->data, index->dtype, lanes, limit, s);
    else if (lanes > 0)
        PS_LAUNCH(scatter_add_kernel<int64_t>, blocks_for(lanes), THREADS, 0, ps_cu->compute, traps(),
                  (int64_t *)all.data, src->data, src->dtype, index->data, index->dtype, lanes, limit, s);
    return ps_cuda_copy(y, &all);
}

static int scatter_add(ps_call *call)
{
    return joined_in_scratch(call, ((const ps_attrs_scatter_add *)call->attrs)->dim, -1);
}

static int scatter_reduce(ps_call *call)
{
    const ps_attrs_scatter_reduce *a = (const ps_attrs_scatter_reduce *)call->attrs;
    return joined_in_scratch(call, a->dim, a->reduce);
}

template <class U> static int put(const ps_view *y, const ps_view *index, const ps_view *src, int dim, int op)
{
    shape s = shape_of(y, index, dim);
    int64_t lanes = lanes_of(index, s);
    auto kernel = scatter_kernel<U>;
    if (lanes > 0)
        PS_LAUNCH(kernel, blocks_for(lanes), THREADS, 0, ps_cu->compute, traps(), (U *)y->data, (const U *)src->data,
                  index->data, index->dtype, lanes, y->shape[s.dim], s, op);
    return 0;
}

static int put_any(const ps_view *y, const ps_view *index, const ps_view *src, int dim, int op)
{
    switch (ps_dtype_bytes(y->dtype)) {
    case 1: return put<uint8_t>(y, index, src, dim, op);
    case 2: return put<uint16_t>(y, index, src, dim, op);
    case 4: return put<uint32_t>(y, index, src, dim, op);
    default: return put<uint64_t>(y, index, src, dim, op);
    }
}

static int scatter(ps_call *call)
{
    PS_TRY(ps_cuda_copy(&call->out[0], &call->in[0]));
    int dim = ((const ps_attrs_scatter *)call->attrs)->dim;
    return put_any(&call->out[0], &call->in[1], &call->in[2], dim, PS_OP_scatter);
}

static int scatter_(ps_call *call)
{
    int dim = ((const ps_attrs_scatter_ *)call->attrs)->dim;
    return put_any(&call->in[0], &call->in[1], &call->in[2], dim, PS_OP_scatter_);
}

template <class U> static int take(const ps_view *dx, const ps_view *index, const ps_view *dsrc, int dim)
{
    shape s = shape_of(dx, index, dim);
    int64_t lanes = lanes_of(index, s);
    auto kernel = scatter_backward_kernel<U>;
    if (lanes > 0)
        PS_LAUNCH(kernel, blocks_for(lanes), THREADS, 0, ps_cu->compute, traps(), (U *)dx->data, (U *)dsrc->data,
                  index->data, index->dtype, lanes, dx->shape[s.dim], s);
    return 0;
}

static int scatter_backward(ps_call *call)
{
    const ps_view *dy = &call->in[0], *index = &call->in[1], *dx = &call->out[0], *dsrc = &call->out[1];
    int dim = ((const ps_attrs_scatter_backward *)call->attrs)->dim;
    PS_TRY(ps_cuda_copy(dx, dy));
    switch (ps_dtype_bytes(dy->dtype)) {
    case 1: return take<uint8_t>(dx, index, dsrc, dim);
    case 2: return take<uint16_t>(dx, index, dsrc, dim);
    case 4: return take<uint32_t>(dx, index, dsrc, dim);
    default: return take<uint64_t>(dx, index, dsrc, dim);
    }
}

/* -- search: one thread per value ---------------------------------------------------------------------------------- */
template <class A>
static __global__ void search_kernel(int64_t *y, const void *seq, const void *values, int dtype, int64_t n,
                                     int64_t each, int64_t count, bool right)
{
    for (int64_t i = FIRST_ELEMENT; i < count; i += ALL_THREADS) {
        int64_t row = i / each * n, first = 0, last = n;
        A v = access<A>::load(values, dtype, i);
        while (first < last) {
            int64_t middle = first + (last - first) / 2;
            A element = access<A>::load(seq, dtype, row + middle);
            if (right ? element > v : element >= v) last = middle;
            else first = middle + 1;
        }
        y[i] = first;
    }
}

static int searchsorted(ps_call *call)
{
    const ps_view *seq = &call->in[0], *values = &call->in[1];
    if (values->numel == 0) return 0;
    int64_t each = seq->ndim > 1 ? values->shape[values->ndim - 1] : values->numel;
    auto kernel = ps_dtype_is_float(seq->dtype) ? search_kernel<double> : search_kernel<int64_t>;
    PS_LAUNCH(kernel, blocks_for(values->numel), THREADS, 0, ps_cu->compute, (int64_t *)call->out[0].data, seq->data,
              values->data, seq->dtype, seq->shape[seq->ndim - 1], each, values->numel,
              ((const ps_attrs_searchsorted *)call->attrs)->right != 0);
    return 0;
}

void ps_cuda_fill_table(ps_kernel *k)
{
    k[PS_OP_embedding] = embedding;
    k[PS_OP_embedding_backward] = embedding_backward;
    k[PS_OP_flat_index] = flat_index;
    k[PS_OP_gather] = gather;
    k[PS_OP_scatter_add] = scatter_add;
    k[PS_OP_scatter_reduce] = scatter_reduce;
    k[PS_OP_scatter] = scatter;
    k[PS_OP_scatter_] = scatter_;
    k[PS_OP_scatter_backward] = scatter_backward;
    k[PS_OP_searchsorted] = searchsorted;
}
