/* SPDX-License-Identifier: BSD-3-Clause
 * Attention backward for bf16 and fp16 values on tensor cores, for heads of up to 256 columns. The algorithm is
 * FlashAttention-2 (Dao 2023).
 *
 * Scores and weights are computed again, with the log-sum-exp that forward saved. One kernel computes them for dq, with
 * queries as rows. Another kernel computes them for dk and dv, with keys as rows. No atomics are needed, so the results
 * are bit-identical on every run. As in forward, the next tile is copied while the current tile is computed.
 *
 * Let w = exp2(scale * q.k - lse), m the dropout factor, and d = dy.v. Then:
 *   ds = w * (m * d - delta)
 *   dq = scale * (ds k)
 *   dk = scale * (ds^T q)
 *   dv = (w * m)^T dy
 * Rows after the end of a tensor are read as zeros, so they add zeros. The weight of a hidden key can have any value
 * before it is set to 0, because the log-sum-exp of a query that sees no key is -infinity.
 *
 * The dq of a query that sees one key (sure_before) is 0. For dk and dv, the query's q and log-sum-exp are replaced by
 * 0. Its weight is then 2^0, which is correct. The rounding error of its ds is multiplied by q = 0, so it does not
 * change dk. */
#include "backend/cuda/attention_tiles.h"

/* -- dq: rows are queries ------------------------------------------------------------------------------------------ */
template <int DP, bool LEAN> struct dq_shape {
    enum { RT = DP == 256 ? 1 : 2, BLOCK = 128, ROWS = BLOCK / 2 * RT, KEYS = (DP == 64 ? 64 : 32) / (LEAN ? 1 : 2) };
};

/* Turns the scores s [16 * RT, 8 * N] into their gradients ds. d contains the products dy.v. The first row is query i,
 * and the first column is key `first`. */
template <int RT, int N, bool LEAN>
DEV void slope_of_rows(const attention &t, float (*s)[N][4], float (*d)[N][4], float (*lse)[2], float (*delta)[2],
                       int64_t b, int64_t h, int i, int first, bool some_hidden)
{
    int lane = threadIdx.x & 31, n_k = (int)t.S, off = (int)(t.S - t.T);
    float scale = t.scale * LOG2_E;
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int e = 0; e < 4 * N; e++) {
            float *x = &s[m][e >> 2][e & 3];
            *x = exp2_fast(__fmaf_rn(*x, scale, -lse[m][e >> 1 & 1]));
        }
    if (!some_hidden && LEAN) {
#pragma unroll
        for (int m = 0; m < RT; m++)
#pragma unroll
            for (int e = 0; e < 4 * N; e++) s[m][e >> 2][e & 3] *= d[m][e >> 2][e & 3] - delta[m][e >> 1 & 1];
        return;
    }
#pragma unroll
    for (int m = 0; m < RT; m++) {
        bool drops = !LEAN && t.p > 0;
        uint32_t bits = drops ? dropped_of<N, false>(t, b, h, i + m * 16, first) : 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = i + m * 16 + r * 8 + (lane >> 2), end = t.causal ? min(n_k, row + off + 1) : n_k, begin = 0;
            if (!LEAN && t.begin && row < (int)t.T) {
                begin = t.begin[b * t.T + row];
                end = min(end, t.end[b * t.T + row]);
            }
#pragma unroll
            for (int e = 0; e < 2 * N; e++) {
                int j = first + (e >> 1) * 8 + (lane & 3) * 2 + (e & 1);
                float *x = &s[m][e >> 1][2 * r + (e & 1)], y = d[m][e >> 1][2 * r + (e & 1)];
                bool seen = j < end && (LEAN || j >= begin);
                if (!LEAN && seen && t.mask) seen = t.mask[b * t.mask_b + j * t.mask_j] != 0;
                if (drops) y = bits >> (e / 2 * 4 + 2 * r + e % 2) & 1 ? 0 : y * t.keep;
                *x = seen ? *x * (y - delta[m][r]) : 0;
            }
        }
    }
}

/* Sets dq to 0 for queries that see at most one key of their segment. The warp's first query is w0. */
template <int DP, int RT> DEV void clear_singles(const attention &t, float (*dq)[DP / 8][4], int64_t b, int w0)
{
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = w0 + m * 16 + r * 8 + ((threadIdx.x & 31) >> 2);
            if (row >= (int)t.T || !is_single(t, row, t.begin[b * t.T + row], t.end[b * t.T + row])) continue;
#pragma unroll
            for (int e = 0; e < DP / 4; e++) dq[m][e >> 1][2 * r + (e & 1)] = 0;
        }
}

template <class T, int DP, bool LEAN, class Shape = dq_shape<DP, LEAN>>
KERNEL_UP_TO(Shape::BLOCK, 2) dq_kernel(const __grid_constant__ attention t)
{
    enum { RT = Shape::RT, BLOCK = Shape::BLOCK, ROWS = Shape::ROWS, KEYS = Shape::KEYS, N = KEYS / 8 };
    PS_DYNAMIC_SHARED(shared);
    uint16_t *q_tile = (uint16_t *)shared, *dy_tile = q_tile + ROWS * DP, *stages = dy_tile + ROWS * DP;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z;
    int q0 = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, w0 = q0 + warp * 16 * RT;  /* blocks start with the rows that
                                                                                   * see the most keys */
    int n_q = (int)t.T, n_k = (int)t.S, off = n_k - n_q, D = (int)t.D, end = t.causal ? min(n_k, q0 + ROWS + off) : n_k;
    int seen_by_all = t.causal ? min(n_k, w0 + off + 1) : n_k, seen_by_any = t.causal ? w0 + 16 * RT + off : n_k;
    int begin = 0, seen_from = 0;
    const uint8_t *mask = t.mask ? t.mask + b * t.mask_b : NULL;
    reader<DP, ROWS, BLOCK, LEAN> q_rows, dy_rows;
    key_tiles<DP, KEYS, BLOCK, LEAN> keys;
    float dq[RT][DP / 8][4], lse[RT][2], delta[RT][2];
    rows_shared<DP, RT> q, dy;
    q.open(q_tile + warp * 16 * RT * DP);
    dy.open(q.p + ROWS * DP);
    clear_all<RT, DP / 8>(dq);
#pragma unroll
    for (int e = 0; e < 2 * RT; e++) {
        int i = w0 + e * 8 + (lane >> 2);
        lse[e >> 1][e & 1] = i < n_q ? ((const float *)t.lse)[lse_at(t, b, h) + i] * LOG2_E : 0;
        delta[e >> 1][e & 1] = i < n_q ? ((const float *)t.delta)[(b * t.H + h) * t.T + i] : 0;
    }
    if (!LEAN && t.begin) {
        span all = span_of(t, b, q0, ROWS, n_k), own = span_of(t, b, w0, 16 * RT, n_k);
        begin = all.begin / KEYS * KEYS, end = min(end, all.end);
        seen_from = own.begin, seen_by_any = min(seen_by_any, own.end);
    }
    q_rows.open(t.q, b, h, q0), dy_rows.open(t.dy, b, h, q0), keys.open(t, b, h, begin);
    q_rows.next(q_tile, t.q, q0, n_q, D, NULL, 0);
    dy_rows.next(dy_tile, t.dy, q0, n_q, D, NULL, 0);
    keys.next(stages, t, begin, n_k, D, mask);
    for (int first = begin; first < end || first == begin; first += KEYS) {
        uint16_t *k = keys.place_of(stages, first), *v = k + KEYS * DP;
        async_wait<0>(); /* this tile is complete, and no warp reads the previous tile any more */
        __syncthreads();
        if (first + KEYS < end) keys.next(stages, t, first + KEYS, n_k, D, mask);
        if (first >= seen_by_any || w0 >= n_q || (!LEAN && first + KEYS <= seen_from)) continue;
        float s[RT][N][4], d[RT][N][4];
        times_transposed<T, DP, RT, N>(s, q, k);
        times_transposed<T, DP, RT, N>(d, dy, v);
        slope_of_rows<RT, N, LEAN>(t, s, d, lse, delta, b, h, w0, first, first + KEYS > seen_by_all);
        times<T, DP, RT, N, DP>(dq, s, k);
    }
    int sure = (LEAN ? t.sure : sure_queries(t, b)) - w0;
    if (sure > 0)
#pragma unroll
        for (int m = 0; m < RT; m++)
#pragma unroll
            for (int e = 0; e < DP / 2; e++)
                if (m * 16 + (e >> 1 & 1) * 8 + (lane >> 2) < sure) dq[m][e >> 2][e & 3] = 0;
    if (!LEAN && t.begin) clear_singles<DP, RT>(t, dq, b, w0);
    store_rows<T, DP, RT, LEAN, DP>(t.dq, b, h, w0, n_q, 0, D, dq, t.scale, q_tile + warp * 16 * RT * DP);
}

/* -- dk, dv: rows are keys ----------------------------------------------------------------------------------------- */
/* The sizes that the kernel for dk and dv uses. The sums dk and dv fill the registers. A warp computes 32 keys for
 * heads of 64 columns, and 16 keys for larger heads. For heads of 128 columns, registers also hold k and v. For heads
 * of 256 columns, a block computes only W columns of dk and dv, so two blocks share the work of 64 keys. A tile of
 * queries is processed in parts of PART queries. */
template <int DP, bool LEAN> struct dkv_shape;
template <bool LEAN> struct dkv_shape<64, LEAN> {
    enum { RT = 2, BLOCK = 128, BLOCKS = 2, QUERIES = 64, PART = LEAN ? 32 : 16, W = 64 };
    typedef rows_shared<64, 2> rows;
};
template <bool LEAN> struct dkv_shape<128, LEAN> {
    enum { RT = 1, BLOCK = 256, BLOCKS = 1, QUERIES = 32, PART = 16, W = 128 };
    typedef typename kept_if<LEAN, 128, 1>::rows rows;
};
template <bool LEAN> struct dkv_shape<256, LEAN> {
    enum { RT = 1, BLOCK = 128, BLOCKS = 2, QUERIES = 16, PART = 16, W = 128 };
    typedef rows_shared<256, 1> rows;
};

/* Sets s [16 * RT, 8 * N] to 0 where key and query are in different segments. The first row is key j, and the first
 * column is query `first`. */
template <int RT, int N> DEV void hide_segments(const attention &t, float (*s)[N][4], int64_t b, int j, int first)
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = j + m * 16 + r * 8 + (lane >> 2), begin = 0, end = 0;
            if (row < (int)t.S) begin = t.begin[b * t.T + row], end = t.end[b * t.T + row];
#pragma unroll
            for (int e = 0; e < 2 * N; e++) {
                int i = first + (e >> 1) * 8 + (lane & 3) * 2 + (e & 1);
                if (i < begin || i >= end) s[m][e >> 1][2 * r + (e & 1)] = 0;
            }
        }
}

/* Sets d to 0 for queries that see at most one key of their segment. d has the same layout as s in hide_segments(). */
template <int RT, int N> DEV void clear_slopes(const attention &t, float (*d)[N][4], int64_t b, int j, int first)
{
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = j + m * 16 + r * 8 + (lane >> 2), begin = 0, end = 0;
            if (row < (int)t.S) begin = t.begin[b * t.T + row], end = t.end[b * t.T + row];
#pragma unroll
            for (int e = 0; e < 2 * N; e++)
                if (is_single(t, first + (e >> 1) * 8 + (lane & 3) * 2 + (e & 1), begin, end))
                    d[m][e >> 1][2 * r + (e & 1)] = 0;
        }
}

/* Turns s and d [16 * RT, 8 * N] into gradients: s becomes w * m, and d becomes ds. The first row is key j. The first
 * column is query `first`, and lse and delta begin with the values of that query. */
template <int RT, int N, bool LEAN>
DEV void slope_of_columns(const attention &t, float (*s)[N][4], float (*d)[N][4], const float *lse, const float *delta,
                          int64_t b, int64_t h, int j, int first, bool some_hidden)
{
    int lane = threadIdx.x & 31, n_k = (int)t.S, off = (int)(t.S - t.T), c2 = (lane & 3) * 2;
    float scale = t.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < N; n++) {
        float2 l = *(const float2 *)(lse + n * 8 + c2);
        l.x *= -LOG2_E, l.y *= -LOG2_E;
#pragma unroll
        for (int m = 0; m < RT; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[m][n][e] = exp2_fast(__fmaf_rn(s[m][n][e], scale, e & 1 ? l.y : l.x));
    }
    if (!LEAN && t.begin) hide_segments<RT, N>(t, s, b, j, first);
    if (some_hidden || !LEAN)
#pragma unroll
        for (int m = 0; m < RT; m++)
#pragma unroll
            for (int e = 0; e < 4 * N; e++) {
                int row = j + m * 16 + (e >> 1 & 1) * 8 + (lane >> 2), i = first + (e >> 2) * 8 + c2 + (e & 1);
                bool seen = !t.causal || row <= i + off;
                if (!LEAN) seen = seen && row < n_k && (!t.mask || t.mask[b * t.mask_b + row * t.mask_j] != 0);
                if (!seen) s[m][e >> 2][e & 3] = 0;
            }
#pragma unroll
    for (int m = 0; m < RT; m++) {
        bool drops = !LEAN && t.p > 0;
        uint32_t bits = drops ? dropped_of<N, true>(t, b, h, first, j + m * 16) : 0;
#pragma unroll
        for (int n = 0; n < N; n++) {
            float2 l = *(const float2 *)(delta + n * 8 + c2);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float *w = &s[m][n][e], *x = &d[m][n][e], mine = e & 1 ? l.y : l.x, factor = 1;
                if (drops) factor = bits >> (4 * n + e) & 1 ? 0 : t.keep;
                *x = *w * ((LEAN ? *x : *x * factor) - mine);
                if (!LEAN) *w *= factor;
            }
        }
    }
    if (!LEAN && t.begin) clear_slopes<RT, N>(t, d, b, j, first);
}

/* Loads the log-sum-exp and the delta of N queries, starting at query `first`. The functions work like those of
 * `reader`. */
template <int N> struct sums_reader {
    const float *from;
    __device__ __forceinline__ void open(const attention &t, int64_t b, int64_t h, int first)
    {
        const float *lse = (const float *)t.lse + lse_at(t, b, h), *delta = (const float *)t.delta;
        from = (threadIdx.x < N ? lse : delta + (b * t.H + h) * t.T) + first + threadIdx.x % N;
    }
    __device__ __forceinline__ void next(float *to, int first, int limit, int least)
    {
        int i = first + (int)threadIdx.x % N;
        if (threadIdx.x < 2 * N) async_copy4(to + threadIdx.x, from, i < limit && i >= least);
        from += N;
    }
};

template <class T, int DP, bool LEAN, class Shape = dkv_shape<DP, LEAN>>
KERNEL_UP_TO(Shape::BLOCK, Shape::BLOCKS) dkv_kernel(const __grid_constant__ attention t)
{
    enum { RT = Shape::RT, BLOCK = Shape::BLOCK, ROWS = BLOCK / 2 * RT, QUERIES = Shape::QUERIES };
    enum { PART = Shape::PART, N = PART / 8, W = Shape::W };
    PS_DYNAMIC_SHARED(shared);
    uint16_t *k_tile = (uint16_t *)shared, *v_tile = k_tile + ROWS * DP, *stages = v_tile + ROWS * DP;
    float *sums = (float *)(stages + 4 * QUERIES * DP);                          /* two buffers [2, QUERIES]; in each,
                                                                                  * lse is followed by delta */
    int warp = threadIdx.x >> 5, h = blockIdx.y, b = blockIdx.z, col = (int)blockIdx.x % (DP / W) * W;
    int k0 = (int)blockIdx.x / (DP / W) * ROWS, w0 = k0 + warp * 16 * RT;
    int n_q = (int)t.T, n_k = (int)t.S, off = n_k - n_q, D = (int)t.D, begin = 0, until = n_q, seen_from = 0;
    int sure = LEAN ? t.sure : sure_queries(t, b);   /* LEAN means that there is no mask */
    const uint8_t *mask = t.mask ? t.mask + b * t.mask_b : NULL;
    reader<DP, ROWS, BLOCK, LEAN> k_rows, v_rows;
    reader<DP, QUERIES, BLOCK, LEAN> q_rows, dy_rows;
    sums_reader<QUERIES> both_sums;
    uint16_t *own_k = k_tile + warp * 16 * RT * DP, *own_v = own_k + ROWS * DP;
    float dk[RT][W / 8][4], dv[RT][W / 8][4];
    typename Shape::rows k, v;
    clear_all<RT, W / 8>(dk);
    clear_all<RT, W / 8>(dv);
    if (t.causal && k0 > off) begin = (k0 - off) / QUERIES * QUERIES;            /* earlier queries see none of these
                                                                                  * keys */
    int seen_by_any = n_q;
    if (!LEAN && t.begin) {                          /* limits the loop to tiles that have queries in the keys'
                                                      * segments */
        span all = span_of(t, b, k0, ROWS, n_q), own = span_of(t, b, w0, 16 * RT, n_q);
        begin = max(begin, all.begin / QUERIES * QUERIES), until = all.end;
        seen_from = own.begin, seen_by_any = own.end;
    }
    k_rows.open(t.k, b, h / t.group, k0), v_rows.open(t.v, b, h / t.group, k0);
    q_rows.open(t.q, b, h, begin), dy_rows.open(t.dy, b, h, begin);
    both_sums.open(t, b, h, begin);
    k_rows.next(k_tile, t.k, k0, n_k, D, mask, t.mask_j);
    v_rows.next(v_tile, t.v, k0, n_k, D, mask, t.mask_j);
    async_commit();
    int stage = begin / QUERIES & 1;
    q_rows.template next<true>(stages + stage * 2 * QUERIES * DP, t.q, begin, n_q, D, NULL, 0, sure);
    dy_rows.next(stages + (stage * 2 + 1) * QUERIES * DP, t.dy, begin, n_q, D, NULL, 0);
    both_sums.next(sums + stage * 2 * QUERIES, begin, n_q, sure);
    async_commit();
    async_wait<1>();                                 /* k and v are complete */
    __syncthreads();
    k.open(own_k), v.open(own_v);
    for (int first = begin; first < until; first += QUERIES) { /* without segments, at least one query sees each key, so
                                                                * the loop body runs */
        stage = first / QUERIES & 1;
        uint16_t *q = stages + stage * 2 * QUERIES * DP, *dy = q + QUERIES * DP;
        const float *own_sums = sums + stage * 2 * QUERIES;
        async_wait<0>(); /* this tile is complete, and no warp reads the previous tile any more */
        __syncthreads();
        if (first + QUERIES < until) {
            uint16_t *next = stages + (stage ^ 1) * 2 * QUERIES * DP;
            q_rows.template next<true>(next, t.q, first + QUERIES, n_q, D, NULL, 0, sure);
            dy_rows.next(next + QUERIES * DP, t.dy, first + QUERIES, n_q, D, NULL, 0);
            both_sums.next(sums + (stage ^ 1) * 2 * QUERIES, first + QUERIES, n_q, sure);
            async_commit();
        }
#pragma unroll 1
        for (int part = 0; part < QUERIES; part += PART) {
            int i = first + part;
            if (t.causal && w0 > i + PART - 1 + off) continue;
            if (!LEAN && (i >= seen_by_any || i + PART <= seen_from)) continue;
            float s[RT][N][4], d[RT][N][4];
            times_transposed<T, DP, RT, N>(s, k, q + part * DP);
            times_transposed<T, DP, RT, N>(d, v, dy + part * DP);
            slope_of_columns<RT, N, LEAN>(t, s, d, own_sums + part, own_sums + QUERIES + part, b, h, w0, i,
                                          t.causal && w0 + 16 * RT - 1 > i + off);
            times<T, DP, RT, N, W>(dv, s, dy + part * DP + col);
            times<T, DP, RT, N, W>(dk, d, q + part * DP + col);
        }
    }
    if (!LEAN) async_wait<0>();                      /* if all positions are padding, the loop has not run and has not
                                                      * waited for the copies */
    if (t.dk.p) store_rows<T, DP, RT, LEAN, W>(t.dk, b, h, w0, n_k, col, D, dk, t.scale, own_k);
    if (t.dv.p) store_rows<T, DP, RT, LEAN, W>(t.dv, b, h, w0, n_k, col, D, dv, 1, own_v);
}

/* -- launching ----------------------------------------------------------------------------------------------------- */
template <class T, int DP, bool LEAN> static int run(const attention *t)
{
    static bool allowed_dq, allowed_dkv;
    typedef dq_shape<DP, LEAN> q_shape;
    typedef dkv_shape<DP, LEAN> k_shape;
    enum { Q_ROWS = q_shape::ROWS, K_ROWS = k_shape::BLOCK / 2 * k_shape::RT, PARTS = DP / k_shape::W };
    auto dq = dq_kernel<T, DP, LEAN>;
    auto dkv = dkv_kernel<T, DP, LEAN>;
    size_t dq_nbytes = (size_t)(2 * Q_ROWS + 4 * q_shape::KEYS) * DP * 2;
    size_t dkv_nbytes = (size_t)(2 * K_ROWS + 4 * k_shape::QUERIES) * DP * 2 + 4 * k_shape::QUERIES * sizeof(float);
    PS_TRY(allow_shared(dq, dq_nbytes, &allowed_dq));
    PS_TRY(allow_shared(dkv, dkv_nbytes, &allowed_dkv));
    dim3 keys = grid_over(t->S, K_ROWS, t);
    keys.x *= PARTS;
    if (t->dq.p) PS_LAUNCH(dq, grid_over(t->T, Q_ROWS, t), q_shape::BLOCK, dq_nbytes, ps_cu->compute, *t);
    if (t->dk.p || t->dv.p) PS_LAUNCH(dkv, keys, k_shape::BLOCK, dkv_nbytes, ps_cu->compute, *t);
    return ps_cuda_launched();
}

template <class T> static int run_size(const attention *t)
{
    bool lean = is_lean(t) && t->dy.aligned && (!t->dq.p || t->dq.aligned) && (!t->dk.p || t->dk.aligned) &&
                (!t->dv.p || t->dv.aligned);
    if (t->D <= 64) return lean ? run<T, 64, true>(t) : run<T, 64, false>(t);
    if (t->D <= 128) return lean ? run<T, 128, true>(t) : run<T, 128, false>(t);
    return run<T, 256, false>(t);
}

int ps_cuda_flash_backward(const attention *t, int dtype)
{
    int rc = ps_cuda_hopper_backward(t, dtype);
    if (rc != PS_EUNSUP) return rc;
    if (!takes(t, dtype)) return PS_EUNSUP;
    return dtype == PS_BF16 ? run_size<bf16>(t) : run_size<f16>(t);
}
