/* SPDX-License-Identifier: BSD-3-Clause
 * Attention of bf16 and fp16 on tensor cores, for heads of up to 128: tiles of queries meet tiles of keys in shared
 * memory, scores live in registers, softmax is kept running (fp32). A block has four warps, each with 16 rows of the
 * block's tile. Backward computes the scores again from the saved log-sum-exp, once for dq (rows are queries) and once
 * for dk and dv (rows are keys), so that nothing is added by atomics and the bits are the same each time.
 *
 * Tiles hold DP columns (64 or 128), zero from D on; a row is padded by 16 bytes, which keeps the eight rows that
 * ldmatrix reads at once in different banks. Rows of hidden keys are zero as well. */
#include "backend/cuda/attention.h"

enum { WARPS = 4, BLOCK = 32 * WARPS, ROWS = 16 * WARPS };
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

template <int DP> struct tile { enum { LD = DP + 8 }; };

template <class T> DEV uint32_t two(float low, float high) { return two_down(T(), low, high); }

/* Rows first .. first + N of a head into dst [N, LD]; rows from `limit` on, and those the mask hides, are zero. Makes
 * one group of asynchronous copies: to be waited for, and followed by a barrier, before anyone reads. */
template <int DP, int N>
DEV void load_tile(uint16_t *dst, const heads &x, int64_t b, int64_t h, int64_t first, int64_t limit, int64_t D,
                   const uint8_t *mask, int64_t mask_step)
{
    const uint16_t *base = (const uint16_t *)x.p + b * x.b + h * x.h;
    for (int at = threadIdx.x; at < N * (DP / 8); at += BLOCK) {
        int r = at / (DP / 8), c = at % (DP / 8) * 8;
        int64_t row = first + r;
        bool there = row < limit && c < D && (!mask || mask[row * mask_step] != 0);
        const uint16_t *from = there ? base + row * x.row + c : base;
        uint16_t *to = dst + r * tile<DP>::LD + c;
        if (x.aligned) {
            async_copy16(to, from, there);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++) to[k] = there && c + k < D ? from[k] : (uint16_t)0;
        }
    }
    async_commit();
}

/* c [16, 8 N] += a [16, DP] b^T, b [8 N, DP]; `a` points at this warp's first row. */
template <class T, int DP, int N> DEV void times_transposed(float (*c)[4], const uint16_t *a, const uint16_t *b)
{
    const int LD = tile<DP>::LD;
    int lane = threadIdx.x & 31, id = lane >> 3;
#pragma unroll
    for (int k = 0; k < DP; k += 16) {
        uint32_t fa[4], fb[4];
        ldmatrix<4, false>(fa, a + (lane & 15) * LD + k + (lane >> 4) * 8);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix<4, false>(fb, b + (n * 8 + (id >> 1) * 8 + (lane & 7)) * LD + k + (id & 1) * 8);
            mma<T>(c[n], fa, fb);
            mma<T>(c[n + 1], fa, fb + 2);
        }
    }
}

/* o [16, DP] += p [16, 8 N] b, b [8 N, DP]; p as the products above leave it. */
template <class T, int DP, int N> DEV void times(float (*o)[4], float (*p)[4], const uint16_t *b)
{
    const int LD = tile<DP>::LD;
    int lane = threadIdx.x & 31, id = lane >> 3;
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t fa[4] = { two<T>(p[k][0], p[k][1]), two<T>(p[k][2], p[k][3]), two<T>(p[k + 1][0], p[k + 1][1]),
                           two<T>(p[k + 1][2], p[k + 1][3]) }, fb[4];
#pragma unroll
        for (int n = 0; n < DP / 8; n += 2) {
            ldmatrix<4, true>(fb, b + (k * 8 + (id & 1) * 8 + (lane & 7)) * LD + n * 8 + (id >> 1) * 8);
            mma<T>(o[n], fa, fb);
            mma<T>(o[n + 1], fa, fb + 2);
        }
    }
}

template <int N> DEV void clear(float (*c)[4])
{
#pragma unroll
    for (int n = 0; n < N; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
}

/* The 16 rows of a warp, times `by` for its rows g and g + 8, to rows first .. of a head, as far as they exist. */
template <class T, int DP>
DEV void store_rows(const heads &x, int64_t b, int64_t h, int64_t first, int64_t limit, int64_t D, float (*o)[4],
                    float by0, float by1)
{
    int lane = threadIdx.x & 31, g = lane >> 2, c2 = (lane & 3) * 2;
    uint16_t *base = (uint16_t *)x.p + b * x.b + h * x.h;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int64_t row = first + g + half * 8;
        float by = half ? by1 : by0;
        if (row >= limit) continue;
#pragma unroll
        for (int n = 0; n < DP / 8; n++) {
            uint32_t v = two<T>(o[n][2 * half] * by, o[n][2 * half + 1] * by);
            int d = n * 8 + c2;
            uint16_t *to = base + row * x.row + d;
            if (x.aligned) {
                if (d < D) *(uint32_t *)to = v;
            } else {
                if (d < D) to[0] = (uint16_t)v;
                if (d + 1 < D) to[1] = (uint16_t)(v >> 16);
            }
        }
    }
}

/* All keys of [first, first + n) are seen by all queries from i on. */
DEV bool all_seen(const attention &t, int64_t i, int64_t first, int n)
{
    return !t.mask && first + n <= t.S && (!t.causal || first + n - 1 <= i + t.S - t.T);
}

/* -- forward ------------------------------------------------------------------------------------------------------- */
template <class T, int DP>
KERNEL_UP_TO(BLOCK) forward_kernel(const __grid_constant__ attention t)
{
    enum { LD = tile<DP>::LD, N = ROWS / 8 };
    PS_DYNAMIC_SHARED(shared);
    uint16_t *q = (uint16_t *)shared, *k = q + ROWS * LD, *v = k + ROWS * LD;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c2 = (lane & 3) * 2;
    int64_t q0 = (int64_t)(gridDim.x - 1 - blockIdx.x) * ROWS, h = blockIdx.y, b = blockIdx.z;   /* long ones first */
    int64_t w0 = q0 + warp * 16, end = t.S;
    const uint8_t *mask = t.mask ? t.mask + b * t.mask_b : NULL;
    float o[DP / 8][4], s[N][4], top[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 }, scale = t.scale * LOG2_E;
    draws drawn = no_draws();
    clear<DP / 8>(o);
    if (t.causal) end = min(end, q0 + ROWS + t.S - t.T);
    load_tile<DP, ROWS>(q, t.q, b, h, q0, t.T, t.D, NULL, 0);
    load_tile<DP, ROWS>(k, t.k, b, h, 0, t.S, t.D, mask, t.mask_j);
    for (int64_t first = 0; first < end; first += ROWS) {
        async_wait<0>();                             /* k is there, and nobody reads v any more */
        __syncthreads();
        load_tile<DP, ROWS>(v, t.v, b, h, first, t.S, t.D, mask, t.mask_j);
        clear<N>(s);
        times_transposed<T, DP, N>(s, q + warp * 16 * LD, k);
        async_wait<0>();                             /* v is there, and nobody reads k any more */
        __syncthreads();
        if (first + ROWS < end) load_tile<DP, ROWS>(k, t.k, b, h, first + ROWS, t.S, t.D, mask, t.mask_j);
        bool all = all_seen(t, w0, first, ROWS);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int64_t i = w0 + g + r * 8;
            float most = -INFINITY;
#pragma unroll
            for (int e = 0; e < 2 * N; e++) {
                float *x = &s[e >> 1][2 * r + (e & 1)];
                *x = all || visible(t, b, i, first + (e >> 1) * 8 + c2 + (e & 1)) ? *x * scale : -INFINITY;
                most = fmaxf(most, *x);
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            float new_top = fmaxf(top[r], most), base = new_top == -INFINITY ? 0 : new_top;
            float shrink = exp2f(top[r] - base), part = 0;
            top[r] = new_top;
#pragma unroll
            for (int e = 0; e < 2 * N; e++) {
                float *x = &s[e >> 1][2 * r + (e & 1)];
                *x = exp2f(*x - base);
                part += *x;
                if (t.p > 0 && *x != 0)
                    *x = dropped(t, &drawn, b, h, i, first + (e >> 1) * 8 + c2 + (e & 1)) ? 0 : *x * t.keep;
            }
            sum[r] = sum[r] * shrink + part;
#pragma unroll
            for (int n = 0; n < DP / 8; n++) o[n][2 * r] *= shrink, o[n][2 * r + 1] *= shrink;
        }
        times<T, DP, N>(o, s, v);
    }
    async_wait<0>();                                 /* without a key to see, the first copies are still under way */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
        int64_t i = w0 + g + r * 8;
        if (t.lse && i < t.T && c2 == 0)
            ((float *)t.lse)[lse_at(t, b, h) + i] = sum[r] == 0 ? -INFINITY : top[r] * LN_2 + logf(sum[r]);
    }
    store_rows<T, DP>(t.y, b, h, w0, t.T, t.D, o, sum[0] == 0 ? 0 : 1 / sum[0], sum[1] == 0 ? 0 : 1 / sum[1]);
}

/* -- backward ------------------------------------------------------------------------------------------------------ */
/* Rows are queries. */
template <class T, int DP>
KERNEL_UP_TO(BLOCK) dq_kernel(const __grid_constant__ attention t)
{
    enum { LD = tile<DP>::LD, COLS = DP == 64 ? 64 : 32, N = COLS / 8 };
    PS_DYNAMIC_SHARED(shared);
    uint16_t *q = (uint16_t *)shared, *dy = q + ROWS * LD, *k = dy + ROWS * LD, *v = k + COLS * LD;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c2 = (lane & 3) * 2;
    int64_t q0 = (int64_t)(gridDim.x - 1 - blockIdx.x) * ROWS, h = blockIdx.y, b = blockIdx.z;
    int64_t w0 = q0 + warp * 16, end = t.S, head = (b * t.H + h) * t.T;
    const uint8_t *mask = t.mask ? t.mask + b * t.mask_b : NULL;
    float dq[DP / 8][4], s[N][4], dp[N][4], lse[2], delta[2], scale = t.scale * LOG2_E;
    draws drawn = no_draws();
    clear<DP / 8>(dq);
#pragma unroll
    for (int r = 0; r < 2; r++) {                    /* of rows that do not exist every weight is 0 */
        int64_t i = w0 + g + r * 8;
        lse[r] = i < t.T ? ((const float *)t.lse)[lse_at(t, b, h) + i] * LOG2_E : INFINITY;
        delta[r] = i < t.T ? ((const float *)t.delta)[head + i] : 0;
    }
    if (t.causal) end = min(end, q0 + ROWS + t.S - t.T);
    load_tile<DP, ROWS>(q, t.q, b, h, q0, t.T, t.D, NULL, 0);
    load_tile<DP, ROWS>(dy, t.dy, b, h, q0, t.T, t.D, NULL, 0);
    load_tile<DP, COLS>(v, t.v, b, h, 0, t.S, t.D, mask, t.mask_j);
    load_tile<DP, COLS>(k, t.k, b, h, 0, t.S, t.D, mask, t.mask_j);
    for (int64_t first = 0; first < end; first += COLS) {
        async_wait<1>();                             /* all but k */
        __syncthreads();
        clear<N>(s);
        clear<N>(dp);
        times_transposed<T, DP, N>(dp, dy + warp * 16 * LD, v);
        async_wait<0>();                             /* k is there, and nobody reads v any more */
        __syncthreads();
        if (first + COLS < end) load_tile<DP, COLS>(v, t.v, b, h, first + COLS, t.S, t.D, mask, t.mask_j);
        times_transposed<T, DP, N>(s, q + warp * 16 * LD, k);
        bool all = all_seen(t, w0, first, COLS);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int64_t i = w0 + g + r * 8;
#pragma unroll
            for (int e = 0; e < 2 * N; e++) {
                float *x = &s[e >> 1][2 * r + (e & 1)], d = dp[e >> 1][2 * r + (e & 1)];
                int64_t j = first + (e >> 1) * 8 + c2 + (e & 1);
                float w = all || visible(t, b, i, j) ? exp2f(*x * scale - lse[r]) : 0;
                if (t.p > 0 && w != 0) d = dropped(t, &drawn, b, h, i, j) ? 0 : d * t.keep;
                *x = w != 0 ? w * (d - delta[r]) * t.scale : 0;
            }
        }
        times<T, DP, N>(dq, s, k);
        __syncthreads();                             /* nobody reads k any more */
        if (first + COLS < end) load_tile<DP, COLS>(k, t.k, b, h, first + COLS, t.S, t.D, mask, t.mask_j);
    }
    async_wait<0>();
    store_rows<T, DP>(t.dq, b, h, w0, t.T, t.D, dq, 1, 1);
}

/* Rows are keys. */
template <class T, int DP>
KERNEL_UP_TO(BLOCK) dkv_kernel(const __grid_constant__ attention t)
{
    enum { LD = tile<DP>::LD, COLS = DP == 64 ? 64 : 32, N = COLS / 8 };
    PS_DYNAMIC_SHARED(shared);
    uint16_t *k = (uint16_t *)shared, *v = k + ROWS * LD, *q = v + ROWS * LD, *dy = q + COLS * LD;
    float *lse = (float *)(dy + COLS * LD), *delta = lse + COLS;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c2 = (lane & 3) * 2;
    int64_t k0 = (int64_t)blockIdx.x * ROWS, h = blockIdx.y, b = blockIdx.z, w0 = k0 + warp * 16, begin = 0;
    int64_t head = (b * t.H + h) * t.T;
    const uint8_t *mask = t.mask ? t.mask + b * t.mask_b : NULL;
    float dk[DP / 8][4], dv[DP / 8][4], s[N][4], dp[N][4], scale = t.scale * LOG2_E;
    draws drawn = no_draws();
    clear<DP / 8>(dk);
    clear<DP / 8>(dv);
    if (t.causal && k0 > t.S - t.T) begin = (k0 - (t.S - t.T)) / COLS * COLS;   /* earlier queries see none of these */
    load_tile<DP, ROWS>(k, t.k, b, h, k0, t.S, t.D, mask, t.mask_j);
    load_tile<DP, ROWS>(v, t.v, b, h, k0, t.S, t.D, mask, t.mask_j);
    load_tile<DP, COLS>(dy, t.dy, b, h, begin, t.T, t.D, NULL, 0);
    load_tile<DP, COLS>(q, t.q, b, h, begin, t.T, t.D, NULL, 0);
    for (int64_t first = begin; first < t.T; first += COLS) {
        for (int c = threadIdx.x; c < COLS; c += BLOCK) {            /* the last reader was before a barrier */
            int64_t i = first + c;
            lse[c] = i < t.T ? ((const float *)t.lse)[lse_at(t, b, h) + i] * LOG2_E : INFINITY;
            delta[c] = i < t.T ? ((const float *)t.delta)[head + i] : 0;
        }
        async_wait<1>();                             /* all but q */
        __syncthreads();
        clear<N>(s);
        clear<N>(dp);
        times_transposed<T, DP, N>(dp, v + warp * 16 * LD, dy);
        async_wait<0>();
        __syncthreads();
        times_transposed<T, DP, N>(s, k + warp * 16 * LD, q);
        bool all = first + COLS <= t.T && all_seen(t, first, w0, 16);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int64_t j = w0 + g + r * 8;
#pragma unroll
            for (int e = 0; e < 2 * N; e++) {
                int c = (e >> 1) * 8 + c2 + (e & 1);
                int64_t i = first + c;
                float *x = &s[e >> 1][2 * r + (e & 1)], *d = &dp[e >> 1][2 * r + (e & 1)];
                float w = all || (i < t.T && visible(t, b, i, j)) ? exp2f(*x * scale - lse[c]) : 0, m = 1;
                if (t.p > 0 && w != 0) m = dropped(t, &drawn, b, h, i, j) ? 0 : t.keep;
                *x = w * m;
                *d = w != 0 ? w * (m * *d - delta[c]) * t.scale : 0;
            }
        }
        times<T, DP, N>(dv, s, dy);
        __syncthreads();                             /* nobody reads dy, lse and delta any more */
        if (first + COLS < t.T) load_tile<DP, COLS>(dy, t.dy, b, h, first + COLS, t.T, t.D, NULL, 0);
        times<T, DP, N>(dk, dp, q);
        __syncthreads();
        if (first + COLS < t.T) load_tile<DP, COLS>(q, t.q, b, h, first + COLS, t.T, t.D, NULL, 0);
    }
    async_wait<0>();
    if (t.dk.p) store_rows<T, DP>(t.dk, b, h, w0, t.S, t.D, dk, 1, 1);
    if (t.dv.p) store_rows<T, DP>(t.dv, b, h, w0, t.S, t.D, dv, 1, 1);
}

/* -- launching ----------------------------------------------------------------------------------------------------- */
/* More than 48 KiB of shared memory must be asked for, once for each kernel. */
template <class F> static int allow_shared(F kernel, size_t nbytes, bool *done)
{
    if (*done) return 0;
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)nbytes));
    *done = true;
    return 0;
}

static dim3 grid_over(int64_t rows, const attention *t)
{
    return dim3((unsigned)ps_cu_div_up(rows, ROWS), (unsigned)t->H, (unsigned)t->B);
}

template <class T, int DP> static int run_forward(const attention *t)
{
    static bool allowed;
    auto kernel = forward_kernel<T, DP>;
    size_t nbytes = (size_t)3 * ROWS * tile<DP>::LD * 2;
    PS_TRY(allow_shared(kernel, nbytes, &allowed));
    PS_LAUNCH(kernel, grid_over(t->T, t), BLOCK, nbytes, ps_cu->compute, *t);
    return ps_cuda_launched();
}

template <class T, int DP> static int run_backward(const attention *t)
{
    static bool allowed_dq, allowed_dkv;
    auto dq = dq_kernel<T, DP>;
    auto dkv = dkv_kernel<T, DP>;
    size_t cols = DP == 64 ? 64 : 32, nbytes = 2 * (ROWS + cols) * tile<DP>::LD * 2 + 2 * cols * sizeof(float);
    PS_TRY(allow_shared(dq, nbytes, &allowed_dq));
    PS_TRY(allow_shared(dkv, nbytes, &allowed_dkv));
    if (t->dq.p) PS_LAUNCH(dq, grid_over(t->T, t), BLOCK, nbytes, ps_cu->compute, *t);
    if (t->dk.p || t->dv.p) PS_LAUNCH(dkv, grid_over(t->S, t), BLOCK, nbytes, ps_cu->compute, *t);
    return ps_cuda_launched();
}

static bool takes(const attention *t, int dtype)
{
    return (dtype == PS_BF16 || dtype == PS_F16) && t->D <= 128 && t->S > 0;
}

int ps_cuda_flash_forward(const attention *t, int dtype)
{
    if (!takes(t, dtype)) return PS_EUNSUP;
    if (dtype == PS_BF16) return t->D <= 64 ? run_forward<bf16, 64>(t) : run_forward<bf16, 128>(t);
    return t->D <= 64 ? run_forward<f16, 64>(t) : run_forward<f16, 128>(t);
}

int ps_cuda_flash_backward(const attention *t, int dtype)
{
    if (!takes(t, dtype)) return PS_EUNSUP;
    if (dtype == PS_BF16) return t->D <= 64 ? run_backward<bf16, 64>(t) : run_backward<bf16, 128>(t);
    return t->D <= 64 ? run_backward<f16, 64>(t) : run_backward<f16, 128>(t);
}
