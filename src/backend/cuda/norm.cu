/* SPDX-License-Identifier: BSD-3-Clause
 * Layer norm and RMS norm over the last dimension C, in fp32 (fp64 for fp64 operands). The gradients of w and b are
 * sums over rows. The rows are divided into parts, whose number depends only on the shape. Each part is summed first.
 * The sums of the parts are then added in a fixed order. `dx` can share the memory of `add` or dy, because a thread
 * reads its elements of `add` and dy before it writes the same elements of dx.
 *
 * If rows are aligned, and w and b have the rows' type, a thread computes 16 bytes of columns (a "slice"). A block
 * processes up to four rows at a time. Inputs are read once and kept in registers. The sums for w and b are computed in
 * the same pass as dx. In all other cases, a block computes one row and reads it several times. */
#include "backend/cuda/device.h"

/* Sums each element of v[n] over a block of full warps. All threads get the sums. */
template <int N, class A> DEV void block_sums(A *v)
{
    __shared__ A part[32][N];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = warp_all<op_add>(v[n]);
    __syncthreads();                                 /* other threads may still read `part` of the previous call */
    if (lane == 0) {
#pragma unroll
        for (int n = 0; n < N; n++) part[warp][n] = v[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; n++) v[n] = 0;
    for (int k = 0; k < warps; k++) {
#pragma unroll
        for (int n = 0; n < N; n++) v[n] += part[k][n];
    }
}

/* A vector [C], or NULL. */
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

/* Kernels of slices are compiled for two block sizes. Blocks of at most FEW threads process FEW_ROWS rows at a time.
 * Blocks of at most MANY threads process MANY_ROWS rows at a time. The registers do not suffice for more rows. */
enum { FEW = 256, FEW_ROWS = 4, MANY = 512, MANY_ROWS = 2 };
/* has_slices() returns whether kernels of slices support rows of C elements: a row must consist of whole packs, at most
 * one for each thread of a block. fits() returns whether a vector is aligned and has the rows' type. */
template <class T> static bool has_slices(int64_t C) { return C % pack<T>::n == 0 && C / pack<T>::n <= MANY; }
template <class T> static bool fits(const weights &w)
{
    return !w.p || (w.dtype == (int)type_info<T>::dtype && aligned16(w.p));
}
template <class T> static int slice_threads(int64_t C) { return (int)ps_cu_div_up(C / pack<T>::n, 32) * 32; }
template <class T> DEV uint4 slice_of(const T *p, int64_t at, bool there)
{
    return there ? *(const uint4 *)(p + at) : make_uint4(0, 0, 0, 0);
}

/* -- forward ------------------------------------------------------------------------------------------------------- */
template <class T, bool RMS, int MOST, int ROWS>
KERNEL_UP_TO(MOST, 768 / MOST)
norm_slices_kernel(T *y, const T *x, const T *w, const T *b, void *mean_out, void *rstd_out, int64_t rows, int64_t C,
                   double eps)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n;
    int64_t c = (int64_t)threadIdx.x * W;
    bool own = c < C;
    uint4 scale = slice_of(w, c, own && w), shift = slice_of(b, c, own && b), next[ROWS];
    int64_t first = blockIdx.x * (int64_t)ROWS, jump = gridDim.x * (int64_t)ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; r++) next[r] = slice_of(x, (first + r) * C + c, own && first + r < rows);
    for (; first < rows; first += jump) {
        uint4 v[ROWS];
        A mean[ROWS], rstd[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {             /* loads the next rows while the current rows are computed */
            int64_t later = first + jump + r;
            v[r] = next[r];
            next[r] = slice_of(x, later * C + c, own && later < rows);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            mean[r] = rstd[r] = 0;
#pragma unroll
            for (int k = 0; k < (RMS ? 0 : W); k++) mean[r] += lane<T>(v[r], k);
        }
        if (!RMS) block_sums<ROWS>(mean);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            mean[r] = mean[r] / (A)C;
            if (!own) continue;
#pragma unroll
            for (int k = 0; k < W; k++) rstd[r] += (lane<T>(v[r], k) - mean[r]) * (lane<T>(v[r], k) - mean[r]);
        }
        block_sums<ROWS>(rstd);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            rstd[r] = 1 / sqrt(rstd[r] / (A)C + (A)eps);
            if (!own || first + r >= rows) continue;
            pack<T> out;
#pragma unroll
            for (int k = 0; k < W; k++) {
                A n = (lane<T>(v[r], k) - mean[r]) * rstd[r];
                out.v[k] = down<T>(n * (w ? lane<T>(scale, k) : (A)1) + lane<T>(shift, k));
            }
            store_pack(y + (first + r) * C + c, out);
            if (threadIdx.x == 0 && mean_out) ((A *)mean_out)[first + r] = mean[r];
            if (threadIdx.x == 0 && rstd_out) ((A *)rstd_out)[first + r] = rstd[r];
        }
    }
}

/* The kernel for rows of any alignment. With RMS, the mean is 0 and is not written. */
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
    if (has_slices<T>(C) && fits<T>(w) && fits<T>(b) && aligned16(x->data) && aligned16(call->out[0].data)) {
        int threads = slice_threads<T>(C), each = threads <= FEW ? FEW_ROWS : MANY_ROWS;
        auto slices = rms ? norm_slices_kernel<T, true, FEW, FEW_ROWS> : norm_slices_kernel<T, false, FEW, FEW_ROWS>;
        if (threads > FEW)
            slices = rms ? norm_slices_kernel<T, true, MANY, MANY_ROWS> : norm_slices_kernel<T, false, MANY, MANY_ROWS>;
        int64_t groups = ps_cu_div_up(rows, each), at_once = (int64_t)ps_cu->card.sm_count * (768 / threads);
        PS_LAUNCH(slices, (unsigned)(groups < at_once ? groups : at_once), threads, 0, ps_cu->compute,
                  (T *)call->out[0].data, (const T *)x->data, (const T *)w.p, (const T *)b.p,
                  mean && ps_has(mean) ? mean->data : NULL, ps_has(rstd) ? rstd->data : NULL, rows, C, eps);
        return 0;
    }
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
/* Let n = (x - mean) * rstd and g = dy * w. Then dx = rstd * (g - mean(g) - n * mean(g * n)) + add. For RMS norm, the
 * term mean(g) is omitted. */
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

/* Writes parts [2][P][C]. parts[0] contains the sums of dy * n for each of the P parts of the rows, and parts[1]
 * contains the sums of dy. A block has 32 columns and 8 rows of threads. */
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
    A sum = 0;                                       /* line 0 computes the sum for dw, and line 1 computes the sum for
                                                      * db */
    for (int k = 0; k < 8; k++) sum += shared[line][k][column];
    ((A *)parts)[(line * P + blockIdx.y) * C + c] = sum;
}

/* Computes dx and parts. `parts` has the same contents as in dw_kernel. dx, add and parts can be NULL. Block p
 * processes the rows p * step to (p + 1) * step - 1. */
template <class T, bool RMS, int MOST, int ROWS>
KERNEL_UP_TO(MOST, 512 / MOST) slices_backward_kernel(T *dx, const T *dy, const T *x, const T *w, const void *mean_in,
                                             const void *rstd_in, const T *add, void *parts, int64_t rows, int64_t C)
{
    typedef typename type_info<T>::acc A;
    const int W = pack<T>::n;
    int64_t c = (int64_t)threadIdx.x * W, P = gridDim.x, step = (rows + P - 1) / P;
    int64_t begin = blockIdx.x * step, end = min(begin + step, rows);
    bool own = c < C;
    uint4 scale = slice_of(w, c, own && w);
    A dw[W], db[W];
#pragma unroll
    for (int k = 0; k < W; k++) dw[k] = db[k] = 0;
    for (int64_t first = begin; first < end; first += ROWS) {
        uint4 v[ROWS], d[ROWS], more[ROWS];
        A mean[ROWS], rstd[ROWS], sums[2 * ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            bool there = own && first + r < end;
            int64_t at = (first + r) * C + c;
            v[r] = slice_of(x, at, there);
            d[r] = slice_of(dy, at, there);
            more[r] = slice_of(add, at, there && add);
            mean[r] = RMS || first + r >= end ? (A)0 : ((const A *)mean_in)[first + r];
            rstd[r] = first + r >= end ? (A)0 : ((const A *)rstd_in)[first + r];
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            sums[r] = sums[ROWS + r] = 0;
#pragma unroll
            for (int k = 0; k < W; k++) {            /* elements after the end have dy = 0, so they add 0 */
                A n = (lane<T>(v[r], k) - mean[r]) * rstd[r], g = lane<T>(d[r], k);
                dw[k] += g * n;
                db[k] += g;
                if (w) g *= lane<T>(scale, k);
                sums[r] += g * n;
                sums[ROWS + r] += g;
            }
        }
        if (!dx) continue;                           /* the condition is the same for all threads */
#pragma unroll
        for (int r = 0; r < ROWS; r++) stay_packed(v[r]), stay_packed(d[r]);
        if (RMS) block_sums<ROWS>(sums);
        else block_sums<2 * ROWS>(sums);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (!own || first + r >= end) continue;
            A mean_gn = sums[r] / (A)C, mean_g = RMS ? (A)0 : sums[ROWS + r] / (A)C;
            pack<T> out;
#pragma unroll
            for (int k = 0; k < W; k++) {
                A n = (lane<T>(v[r], k) - mean[r]) * rstd[r], g = lane<T>(d[r], k);
                if (w) g *= lane<T>(scale, k);
                out.v[k] = down<T>(rstd[r] * (g - mean_g - n * mean_gn) + lane<T>(more[r], k));
            }
            store_pack(dx + (first + r) * C + c, out);
        }
    }
    if (!parts || !own) return;
    A *out = (A *)parts + blockIdx.x * C + c;
    const int WA = pack<A>::n;
#pragma unroll
    for (int k = 0; k < W; k += WA) {
        pack<A> one, two;
#pragma unroll
        for (int e = 0; e < WA; e++) one.v[e] = dw[k + e], two.v[e] = db[k + e];
        store_pack(out + k, one);
        if (!RMS) store_pack(out + P * C + k, two);
    }
}

/* Sums `parts` [2, P, C] over P. A block writes the sums to dw if blockIdx.y is 0, and to db if blockIdx.y is 1. A
 * block has 32 columns and LINES lines of threads. Line l sums the parts l, l + LINES, l + 2 * LINES, ... */
enum { LINES = 32 };
template <class A>
KERNEL_UP_TO(32 * LINES, 1) dw_total_kernel(void *dw, int dw_type, void *db, int db_type, const A *parts, int64_t P,
                                            int64_t C)
{
    __shared__ A shared[LINES][33];
    int column = threadIdx.x & 31, line = threadIdx.x >> 5;
    int64_t c = (int64_t)blockIdx.x * 32 + column;
    const A *from = parts + blockIdx.y * P * C + c;
    A sum = 0;
#pragma unroll 8
    for (int64_t p = line; p < P; p += LINES)
        if (c < C) sum += from[p * C];
    shared[line][column] = sum;
    __syncthreads();
    sum = warp_all<op_add>(shared[column][line]);    /* this warp adds the sums of all lines for column `line`; each
                                                      * lane reads the sum of one line */
    c = (int64_t)blockIdx.x * 32 + line;
    if (column != 0 || c >= C) return;
    if (blockIdx.y == 0 && dw) access<A>::store(dw, dw_type, c, sum);
    if (blockIdx.y == 1 && db) access<A>::store(db, db_type, c, sum);
}

/* The operands of a norm's backward. */
struct problem {
    const ps_view *dy, *x, *mean, *rstd, *add, *dx, *dw, *db;
    weights w;
    int64_t C, rows;
    void *parts;                                     /* [2][P][C], or NULL */
    int64_t P;
};

template <class T, bool RMS> static void run_slices(const problem &p)
{
    int threads = slice_threads<T>(p.C);
    auto kernel = threads <= FEW ? slices_backward_kernel<T, RMS, FEW, FEW_ROWS>
        : slices_backward_kernel<T, RMS, MANY, MANY_ROWS>;
    PS_LAUNCH(kernel, (unsigned)p.P, threads, 0, ps_cu->compute, ps_has(p.dx) ? (T *)p.dx->data : NULL,
              (const T *)p.dy->data, (const T *)p.x->data, (const T *)p.w.p, RMS ? NULL : p.mean->data, p.rstd->data,
              ps_has(p.add) ? (const T *)p.add->data : NULL, p.parts, p.rows, p.C);
}

template <class T, bool RMS> static void run_apart(const problem &p)
{
    const void *mean = RMS ? NULL : p.mean->data;
    auto sums = dw_kernel<T, RMS>;
    auto kernel = dx_kernel<T, RMS>;
    if (p.parts)                                     /* must run before dx, which can overwrite dy */
        PS_LAUNCH(sums, dim3((unsigned)ps_cu_div_up(p.C, 32), (unsigned)p.P), 256, 0, ps_cu->compute, p.parts,
                  (const T *)p.dy->data, (const T *)p.x->data, mean, p.rstd->data, p.rows, p.C);
    if (ps_has(p.dx))
        PS_LAUNCH(kernel, row_blocks(p.rows), threads_for(p.C), 0, ps_cu->compute, (T *)p.dx->data,
                  (const T *)p.dy->data, (const T *)p.x->data, p.w, mean, p.rstd->data,
                  ps_has(p.add) ? (const T *)p.add->data : NULL, p.rows, p.C);
}

template <class T, bool RMS> static int backward(ps_call *call, bool want_w)
{
    typedef typename type_info<T>::acc A;
    problem p = { &call->in[0], &call->in[1], RMS ? NULL : &call->in[3], &call->in[RMS ? 3 : 4],
                  &call->in[RMS ? 4 : 5], &call->out[0], &call->out[1], RMS ? NULL : &call->out[2],
                  weights_of(&call->in[2]), ps_cu_last(&call->in[1]), 0, NULL, 0 };
    if (p.C == 0) return 0;
    p.rows = p.x->numel / p.C;
    p.P = ps_cu_norm_parts(p.rows);
    if (want_w) {
        p.parts = call->scratch(call, (size_t)(2 * p.P * p.C) * sizeof(A));
        if (!p.parts) return PS_ENOMEM;
    }
    bool slices = has_slices<T>(p.C) && fits<T>(p.w) && aligned16(p.dy->data) && aligned16(p.x->data) &&
                  (!ps_has(p.dx) || aligned16(p.dx->data)) && (!ps_has(p.add) || aligned16(p.add->data));
    if (p.rows == 0 && want_w) PS_TRY(ps_cuda_clear(p.parts, (size_t)(2 * p.P * p.C) * sizeof(A)));
    else if (p.rows > 0 && slices) run_slices<T, RMS>(p);
    else if (p.rows > 0) run_apart<T, RMS>(p);
    if (!want_w) return 0;
    bool want_db = p.db && ps_has(p.db);
    auto total = dw_total_kernel<A>;
    PS_LAUNCH(total, dim3((unsigned)ps_cu_div_up(p.C, 32), want_db ? 2 : 1), 32 * LINES, 0, ps_cu->compute,
              ps_has(p.dw) ? p.dw->data : NULL, p.dw->dtype, want_db ? p.db->data : NULL, want_db ? p.db->dtype : 0,
              (const A *)p.parts, p.P, p.C);
    return ps_cuda_launched();
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
