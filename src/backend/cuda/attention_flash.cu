/* SPDX-License-Identifier: BSD-3-Clause
 * Attention forward for bf16 and fp16 values on tensor cores, for heads of up to 256 columns. The algorithm is
 * FlashAttention-2 (Dao 2023) with the online softmax of Milakov and Gimelshein (2018).
 *
 * A block has four warps and computes 128 queries, 32 per warp. For heads of more than 128 columns, a block computes 64
 * queries, 16 per warp. The block iterates over tiles of keys. While it computes the current tile, the keys and values
 * of the next tile are copied, so there is only one barrier per tile. Scores are kept in registers. The running softmax
 * is computed in fp32.
 *
 * The scores of a row are reduced by a base before exp2. The base is raised to the row's largest score only if that
 * score exceeds the base by more than 8. A weight is therefore at most 2^8 instead of 1. This costs no precision, and y
 * rarely has to be scaled down. */
#include "backend/cuda/attention_tiles.h"

enum { WARPS = 4, BLOCK = 32 * WARPS };
template <int DP, bool LEAN> struct shape {
    enum { RT = DP == 256 ? 1 : 2, ROWS = 16 * RT * WARPS, KEYS = LEAN ? 64 : 32 };
};
#define STEP_UP 8.0f

/* Sets the scores of keys that a query does not see to -infinity. The warp's first query is i, and the tile's first key
 * is `first`. */
template <int RT, int N, bool LEAN> DEV void hide(const attention &t, float (*s)[N][4], int64_t b, int i, int first)
{
    int lane = threadIdx.x & 31, S = (int)t.S, off = (int)(t.S - t.T);
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = i + m * 16 + r * 8 + (lane >> 2), end = t.causal ? min(S, row + off + 1) : S, begin = 0;
            if (!LEAN && t.begin && row < (int)t.T) {
                begin = t.begin[b * t.T + row];
                end = min(end, t.end[b * t.T + row]);
            }
#pragma unroll
            for (int e = 0; e < 2 * N; e++) {
                int j = first + (e >> 1) * 8 + (lane & 3) * 2 + (e & 1);
                bool seen = j < end && (LEAN || j >= begin);
                if (!LEAN && seen && t.mask) seen = t.mask[b * t.mask_b + j * t.mask_j] != 0;
                if (!seen) s[m][e >> 1][2 * r + (e & 1)] = -INFINITY;
            }
        }
}

/* Turns the scores of 16 rows into weights. top: the base that is subtracted from each row's scores before exp2. sum:
 * this lane's part of the sum of weights. shrink: output, the factors by which the rows of o must be multiplied. */
template <int N, bool LEAN>
DEV void soften(const attention &t, float (*s)[4], float *top, float *sum, float *shrink, float scale, int64_t b,
                int64_t h, int i, int first)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most = -INFINITY, part = 0;
#pragma unroll
        for (int e = 0; e < 2 * N; e++) most = fmaxf(most, s[e >> 1][2 * r + (e & 1)]);
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)) * scale;
        bool step = most > top[r] + STEP_UP;
        shrink[r] = step ? exp2_fast(top[r] - most) : 1;
        top[r] = step ? most : top[r];
        float base = top[r] == -INFINITY ? 0 : top[r];
#pragma unroll
        for (int e = 0; e < 2 * N; e++) {
            float *x = &s[e >> 1][2 * r + (e & 1)];
            *x = exp2_fast(__fmaf_rn(*x, scale, -base));
            part += *x;
        }
        sum[r] = sum[r] * shrink[r] + part;
    }
    if (LEAN || t.p == 0) return;
    uint32_t bits = dropped_of<N, false>(t, b, h, i, first);
#pragma unroll
    for (int e = 0; e < 4 * N; e++) s[e >> 2][e & 3] = bits >> e & 1 ? 0 : s[e >> 2][e & 3] * t.keep;
}

template <class T, int DP, bool LEAN>
KERNEL_UP_TO(BLOCK, 2) forward_kernel(const __grid_constant__ attention t)
{
    enum { RT = shape<DP, LEAN>::RT, ROWS = shape<DP, LEAN>::ROWS, KEYS = shape<DP, LEAN>::KEYS, N = KEYS / 8,
           KEPT = DP == 64 };
    PS_DYNAMIC_SHARED(shared);
    uint16_t *q_tile = (uint16_t *)shared, *stages = q_tile + ROWS * DP;         /* two stages; each contains a tile of
                                                                                  * K and then a tile of V */
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, h = blockIdx.y, b = blockIdx.z;
    int q0 = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, w0 = q0 + warp * 16 * RT;  /* blocks start with the rows that
                                                                                   * see the most keys */
    int n_q = (int)t.T, n_k = (int)t.S, off = n_k - n_q, D = (int)t.D, end = t.causal ? min(n_k, q0 + ROWS + off) : n_k;
    int seen_by_all = t.causal ? min(n_k, w0 + off + 1) : n_k, seen_by_any = t.causal ? w0 + 16 * RT + off : n_k;
    int begin = 0, seen_from = 0;
    const uint8_t *mask = t.mask ? t.mask + b * t.mask_b : NULL;
    reader<DP, ROWS, BLOCK, LEAN> q_rows;
    key_tiles<DP, KEYS, BLOCK, LEAN> keys;
    uint16_t *own = q_tile + warp * 16 * RT * DP;
    float o[RT][DP / 8][4], top[RT][2], sum[RT][2], scale = t.scale * LOG2_E;
    typename kept_if<KEPT, DP, RT>::rows q;
    if (!KEPT) q.open(own);
    clear_all<RT, DP / 8>(o);
    for (int m = 0; m < RT; m++) top[m][0] = top[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;
    if (!LEAN && t.begin) {
        span all = span_of(t, b, q0, ROWS, n_k), of_warp = span_of(t, b, w0, 16 * RT, n_k);
        begin = all.begin / KEYS * KEYS, end = min(end, all.end);
        seen_from = of_warp.begin, seen_by_any = min(seen_by_any, of_warp.end);
    }
    q_rows.open(t.q, b, h, q0), keys.open(t, b, h, begin);
    q_rows.next(q_tile, t.q, q0, n_q, D, NULL, 0);
    keys.next(stages, t, begin, n_k, D, mask);
    for (int first = begin; first < end || first == begin; first += KEYS) {
        uint16_t *k = keys.place_of(stages, first), *v = k + KEYS * DP;
        async_wait<0>(); /* this tile is complete, and no warp reads the previous tile any more */
        __syncthreads();
        if (first + KEYS < end) keys.next(stages, t, first + KEYS, n_k, D, mask);
        if (KEPT && first == begin) q.open(own);
        if (first >= seen_by_any || w0 >= n_q || (!LEAN && first + KEYS <= seen_from)) continue;
        float s[RT][N][4], shrink[RT][2];
        times_transposed<T, DP, RT, N>(s, q, k);
        if (!LEAN)
#pragma unroll
            for (int e = 0; e < 4 * RT * N; e++) s[e / (4 * N)][e / 4 % N][e % 4] *= scale;
        if (first + KEYS > seen_by_all || (!LEAN && (mask || t.begin))) hide<RT, N, LEAN>(t, s, b, w0, first);
#pragma unroll
        for (int m = 0; m < RT; m++)
            soften<N, LEAN>(t, s[m], top[m], sum[m], shrink[m], LEAN ? scale : 1, b, h, w0 + m * 16, first);
        bool smaller = false;
#pragma unroll
        for (int m = 0; m < RT; m++) smaller = smaller || shrink[m][0] != 1 || shrink[m][1] != 1;
        if (__any_sync(0xffffffffu, smaller))
#pragma unroll
            for (int e = 0; e < RT * DP / 2; e++)
                o[e / (DP / 2)][e / 4 % (DP / 8)][e % 4] *= shrink[e / (DP / 2)][e / 2 % 2];
        times<T, DP, RT, N, DP>(o, s, v);
    }
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float all = sum[m][r];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            int i = w0 + m * 16 + r * 8 + (lane >> 2);
            if (t.lse && i < n_q && (lane & 3) == 0)
                ((float *)t.lse)[lse_at(t, b, h) + i] = all == 0 ? -INFINITY : top[m][r] * LN_2 + logf(all);
            float by = all == 0 ? 0 : 1 / all;
#pragma unroll
            for (int e = 0; e < DP / 4; e++) o[m][e >> 1][2 * r + (e & 1)] *= by;
        }
    store_rows<T, DP, RT, LEAN, DP>(t.y, b, h, w0, n_q, 0, D, o, 1, own);
}

/* -- launching ----------------------------------------------------------------------------------------------------- */
template <class T, int DP, bool LEAN> static int run(const attention *t)
{
    static bool allowed;
    auto kernel = forward_kernel<T, DP, LEAN>;
    enum { ROWS = shape<DP, LEAN>::ROWS };
    size_t nbytes = (size_t)(ROWS + 4 * shape<DP, LEAN>::KEYS) * DP * 2;
    PS_TRY(allow_shared(kernel, nbytes, &allowed));
    PS_LAUNCH(kernel, grid_over(t->T, ROWS, t), BLOCK, nbytes, ps_cu->compute, *t);
    return ps_cuda_launched();
}

template <class T> static int run_size(const attention *t)
{
    bool lean = is_lean(t) && t->y.aligned;
    if (t->D <= 64) return lean ? run<T, 64, true>(t) : run<T, 64, false>(t);
    if (t->D <= 128) return lean ? run<T, 128, true>(t) : run<T, 128, false>(t);
    return run<T, 256, false>(t);
}

int ps_cuda_flash_forward(const attention *t, int dtype)
{
    int rc = ps_cuda_hopper_forward(t, dtype);
    if (rc != PS_EUNSUP) return rc;
    if (!takes(t, dtype)) return PS_EUNSUP;
    return dtype == PS_BF16 ? run_size<bf16>(t) : run_size<f16>(t);
}
