/* SPDX-License-Identifier: BSD-3-Clause
 * Attention of bf16 and fp16 values by warpgroup products (wgmma.h), for devices of compute capability 9.0. The kernels
 * support heads of 64 and 128 columns with aligned rows, with or without causal order. They support no mask, no
 * segments and no dropout. The product of one tile overlaps the softmax of another tile, as in FlashAttention-3 (Shah
 * et al. 2024). attention_flash.cu computes all other cases. It also computes the forward for heads of 64 columns,
 * because its forward is faster for such heads. PS_CUDA_ATTENTION=wgmma selects the kernels of this file wherever they
 * are supported. PS_CUDA_ATTENTION=mma selects attention_flash.cu for all cases. This file is compiled only for sm_90a.
 *
 * Each warpgroup has 64 rows of the block's tile. Scores and outputs are accumulators in registers. Thread `lane` of
 * warp w has the columns 8 * n + lane % 4 * 2 and 8 * n + lane % 4 * 2 + 1 of two rows. x[4 * n] and x[4 * n + 1]
 * belong to row 16 * w + lane / 4. x[4 * n + 2] and x[4 * n + 3] belong to row 16 * w + lane / 4 + 8. Operand A has the
 * same layout, so the result of one product can be operand A of the next product. There are two buffers for keys and
 * two for values. A tile is copied asynchronously to one buffer while the other buffer is in use. */
#include "backend/cuda/attention.h"
#include "backend/cuda/wgmma.h"

#define LOG2_E 1.4426950408889634f

template <class T> DEV uint32_t two(float low, float high) { return two_down(T(), low, high); }

/* A tile [ROWS, D] consists of D / 64 consecutive panels. */
template <int D, int ROWS> struct tile { enum { PANEL = ROWS * PANEL_ROW, NBYTES = D / PANEL_COLS * PANEL }; };

/* Copies ROWS rows of a head to a tile, starting at row `first`. Rows at or after `limit` become zero. With FROM_LEAST,
 * rows before `least` become zero, too. The copies are asynchronous, and the caller commits them. */
template <int D, int ROWS, int BLOCK, bool FROM_LEAST = false>
DEV void load_tile(unsigned char *dst, const heads &x, int64_t b, int64_t h, int64_t first, int64_t limit,
                   int64_t least = 0)
{
    enum { PIECES = D / 8, STEP = BLOCK / PIECES };
    static_assert(STEP % 8 == 0, "a thread's rows differ by multiples of 8, so the swizzle is the same for all");
    int c = threadIdx.x % PIECES, r = threadIdx.x / PIECES;
    const uint16_t *base = (const uint16_t *)x.p + b * x.b + h * x.h, *from = base + (first + r) * x.row + c * 8;
    unsigned char *to = dst + c / 8 * tile<D, ROWS>::PANEL + r * PANEL_ROW + ((c ^ r) & 7) * 16;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        bool there = first + r + i < limit && (!FROM_LEAST || first + r + i >= least);
        if (ROWS % STEP == 0 || r + i < ROWS)
            async_copy16(to + i * PANEL_ROW, there ? from + i * x.row : base, there);
    }
}

/* Computes c [64, N] = a b^T. Each dot product runs over D columns. a is this warpgroup's part of a tile of A_ROWS
 * rows. b is a tile of N rows. */
template <class T, int D, int A_ROWS, int N> DEV void times_transposed(float *c, uint64_t a, uint64_t b)
{
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t within = k % PANEL_COLS * 2;
        wgmma_shared<T, N>(c, descriptor_at(a, k / PANEL_COLS * tile<D, A_ROWS>::PANEL + within),
                           descriptor_at(b, k / PANEL_COLS * tile<D, N>::PANEL + within), k > 0);
    }
}

/* Computes o [64, D] += p b. p [64, KEYS] is in registers, and b is a tile of KEYS rows. */
template <class T, int D, int KEYS> DEV void times(float *o, const uint32_t *p, uint64_t b)
{
#pragma unroll
    for (int k = 0; k < KEYS; k += 16) wgmma_registers<T, D>(o, p + k / 4, descriptor_at(b, k * PANEL_ROW), true);
}

/* Rounds x [64, N] to bf16 or fp16 values, in the layout that operand A of the next product needs. */
template <class T, int N> DEV void to_halves(uint32_t *p, const float *x)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) p[i] = two<T>(x[2 * i], x[2 * i + 1]);
}

template <int COUNT> DEV void clear(float *x)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = 0;
}

/* Stores the 64 rows of a warpgroup to a head, starting at row `first`. Rows at or after `limit` are not stored. Each
 * warp writes its 16 rows to `own` and reads them back 16 bytes at a time. `own` consists of 64 rows of a tile of
 * A_ROWS rows. The tile is no longer in use. */
template <class T, int D, int A_ROWS>
DEV void store_rows(unsigned char *own, const heads &x, int64_t b, int64_t h, int64_t first, int64_t limit,
                    const float *o, float by0, float by1)
{
    enum { PIECES = D / 8 };
    int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31, g = lane >> 2;
    unsigned char *mine = own + warp * 16 * PANEL_ROW;
#pragma unroll
    for (int n = 0; n < PIECES; n++) {
        unsigned char *to = mine + n / 8 * tile<D, A_ROWS>::PANEL + g * PANEL_ROW + ((n ^ g) & 7) * 16;
        to += (lane & 3) * 4;
        *(uint32_t *)to = two<T>(o[4 * n] * by0, o[4 * n + 1] * by0);
        *(uint32_t *)(to + 8 * PANEL_ROW) = two<T>(o[4 * n + 2] * by1, o[4 * n + 3] * by1);
    }
    __syncwarp();
    uint16_t *base = (uint16_t *)x.p + b * x.b + h * x.h;
#pragma unroll
    for (int i = 0; i < 16 * PIECES; i += 32) {
        int r = (i + lane) / PIECES, c = (i + lane) % PIECES;
        int64_t row = first + warp * 16 + r;
        const unsigned char *from = mine + c / 8 * tile<D, A_ROWS>::PANEL + r * PANEL_ROW + ((c ^ r) & 7) * 16;
        if (row < limit) *(uint4 *)(base + row * x.row + c * 8) = *(const uint4 *)from;
    }
}

/* -- forward ------------------------------------------------------------------------------------------------------- */
/* Describes which keys of a tile this thread's rows see. The tile's first key is `first`, and the warp's first row is
 * w0. last: for each row, the last column that the row sees. all: whether every row of the warp sees every column. */
template <int KEYS> struct sight {
    int last[2];
    bool all;
    DEV sight of(const attention &t, int64_t w0, int64_t first)
    {
        sight x;
        int64_t i = w0 + ((threadIdx.x & 31) >> 2), most = t.S - 1 - first, ahead = t.S - t.T - first;
        x.all = most >= KEYS - 1 && (!t.causal || w0 + ahead >= KEYS - 1);
        for (int r = 0; r < 2; r++) {
            int64_t last = t.causal ? min(most, i + 8 * r + ahead) : most;
            x.last[r] = (int)max(min(last, (int64_t)KEYS), (int64_t)-1);
        }
        return x;
    }
};

/* Turns a tile's scores into the weights 2^(scale * (s - top)). Updates top and sum for this thread's two rows. Sets
 * `shrink` to the factors by which the outputs of earlier tiles must be multiplied. `scale` must be above 0. */
template <int KEYS>
DEV void soften(float *s, float *top, float *sum, float *shrink, float scale, const sight<KEYS> &seen)
{
    if (!seen.all) {
        int c2 = (threadIdx.x & 3) * 2;
#pragma unroll
        for (int e = 0; e < KEYS / 2; e++)
            if ((e >> 2) * 8 + c2 + (e & 1) > seen.last[e >> 1 & 1]) s[e] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float most[2] = { top[r], -INFINITY }, part[2] = { 0, 0 };
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int k = 0; k < 2; k++) most[k] = fmaxf(most[k], s[4 * n + 2 * r + k]);
        float next = fmaxf(most[0], most[1]);
        next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
        next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
        float base = next == -INFINITY ? 0 : next * scale;
        shrink[r] = exp2_fast(top[r] * scale - base);
        top[r] = next;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float *x = &s[4 * n + 2 * r + k];
                *x = exp2_fast(__fmaf_rn(*x, scale, -base));
                part[k] += *x;
            }
        sum[r] = sum[r] * shrink[r] + (part[0] + part[1]);
    }
}

template <int D> DEV void shrink_rows(float *o, const float *shrink)
{
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] *= shrink[i >> 1 & 1];
}

/* GROUPS: warpgroups per block. KEYS: keys per tile. */
template <int D> struct shape;
template <> struct shape<64> { enum { GROUPS = 3, KEYS = 128 }; };
template <> struct shape<128> { enum { GROUPS = 2, KEYS = 128 }; };

/* Stores the outputs and the log-sum-exp of a warpgroup's rows, starting at row `first`. */
template <class T, int D, int ROWS>
DEV void put_out(const attention &t, unsigned char *own, int64_t b, int64_t h, int64_t first, const float *o,
                 const float *top, const float *sum)
{
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int64_t i = first + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2) + r * 8;
        float all = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
        all += __shfl_xor_sync(0xffffffffu, all, 2);
        by[r] = all == 0 ? 0 : 1 / all;
        if (t.lse && i < t.T && (threadIdx.x & 3) == 0)
            ((float *)t.lse)[lse_at(t, b, h) + i] = all == 0 ? -INFINITY : top[r] * t.scale + logf(all);
    }
    store_rows<T, D, ROWS>(own, t.y, b, h, first, t.T, o, by[0], by[1]);
}

template <int D> static size_t forward_nbytes(void)
{
    return tile<D, 64 * shape<D>::GROUPS>::NBYTES + 4 * tile<D, shape<D>::KEYS>::NBYTES + PANEL_ALIGN;
}

template <class T, int D>
KERNEL_UP_TO(128 * shape<D>::GROUPS, 1) forward_kernel(const __grid_constant__ attention t)
{
    enum { GROUPS = shape<D>::GROUPS, BLOCK = 128 * GROUPS, ROWS = 64 * GROUPS, KEYS = shape<D>::KEYS };
    typedef tile<D, KEYS> key_tile;
    PS_DYNAMIC_SHARED(raw);
    unsigned char *q = raw + (-shared_address(raw) & (PANEL_ALIGN - 1)), *k = q + tile<D, ROWS>::NBYTES;
    unsigned char *v = k + 2 * key_tile::NBYTES;                     /* there are two buffers for k and two for v, which
                                                                      * are used in turn */
    int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    int64_t q0 = (int64_t)(gridDim.x - 1 - blockIdx.x) * ROWS, b = blockIdx.z;            /* blocks start with the
                                                                                           * rows that see the most
                                                                                           * keys */
    int64_t h = blockIdx.y, kh = h / t.group;
    int64_t w0 = q0 + group * 64 + (threadIdx.x >> 5 & 3) * 16, end = t.causal ? min(t.S, q0 + ROWS + t.S - t.T) : t.S;
    int tiles = end > 0 ? (int)((end + KEYS - 1) / KEYS) : 0;
    float o[D / 2], s[KEYS / 2], top[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 }, shrink[2] = { 1, 1 };
    float scale = t.scale * LOG2_E;
    uint32_t p[KEYS / 4];
    clear<D / 2>(o);
    clear<KEYS / 2>(s);

    uint64_t own_q = descriptor_k_major(shared_address(q) + group * 64 * PANEL_ROW);
    uint64_t at_k = descriptor_k_major(shared_address(k));
    uint64_t at_v = descriptor_mn_major(shared_address(v), key_tile::PANEL);
    load_tile<D, ROWS, BLOCK>(q, t.q, b, h, q0, t.T);
    if (tiles > 0) load_tile<D, KEYS, BLOCK>(k, t.k, b, kh, 0, t.S);
    async_commit();
    if (tiles > 0) load_tile<D, KEYS, BLOCK>(v, t.v, b, kh, 0, t.S);
    if (tiles > 1) load_tile<D, KEYS, BLOCK>(k + key_tile::NBYTES, t.k, b, kh, KEYS, t.S);
    async_commit();
    if (tiles > 0) {
        async_wait<1>();                             /* waits for q and the first k */
        async_fence();
        __syncthreads();
        wgmma_fence();
        times_transposed<T, D, ROWS, KEYS>(s, own_q, at_k);
        wgmma_commit();
        wgmma_wait<0>();
        hold<KEYS / 2>(s);
        soften<KEYS>(s, top, sum, shrink, scale, sight<KEYS>::of(t, w0, 0));
    }
    /* s: the weights of tile j. o: the output of the earlier tiles; the product that adds to o still runs. The loop
     * body begins with the wait for this product. At any other place the wait would be in the same basic block as the
     * softmax, and ptxas would move the wait before the softmax. */
    for (int j = 0; j + 1 < tiles; j++) {
        int here = j & 1, there = here ^ 1;
        int64_t first = (int64_t)(j + 1) * KEYS;
        wgmma_wait<0>();
        hold<D / 2>(o);
        shrink_rows<D>(o, shrink);
        to_halves<T, KEYS>(p, s);
        async_wait<0>();                             /* the next tile's k and this tile's v are complete */
        async_fence();
        __syncthreads();                             /* no warp reads this tile's k or the previous tile's v any more */
        if (j + 2 < tiles) load_tile<D, KEYS, BLOCK>(k + here * key_tile::NBYTES, t.k, b, kh, first + KEYS, t.S);
        load_tile<D, KEYS, BLOCK>(v + there * key_tile::NBYTES, t.v, b, kh, first, t.S);
        async_commit();
        hold<KEYS / 2>(s);
        hold<D / 2>(o);
        wgmma_fence();
        times_transposed<T, D, ROWS, KEYS>(s, own_q, descriptor_at(at_k, there * key_tile::NBYTES));
        wgmma_commit();
        wgmma_fence();
        times<T, D, KEYS>(o, p, descriptor_at(at_v, here * key_tile::NBYTES));
        wgmma_commit();
        wgmma_wait<1>();
        hold<KEYS / 2>(s);
        soften<KEYS>(s, top, sum, shrink, scale, sight<KEYS>::of(t, w0, first));
    }
    wgmma_wait<0>();
    hold<D / 2>(o);
    async_wait<0>();
    async_fence();
    __syncthreads();
    if (tiles > 0) {
        shrink_rows<D>(o, shrink);
        to_halves<T, KEYS>(p, s);
        hold<D / 2>(o);
        wgmma_fence();
        times<T, D, KEYS>(o, p, descriptor_at(at_v, ((tiles - 1) & 1) * key_tile::NBYTES));
        wgmma_commit();
        wgmma_wait<0>();
        hold<D / 2>(o);
    }
    put_out<T, D, ROWS>(t, q + group * 64 * PANEL_ROW, b, h, q0 + group * 64, o, top, sum);
}

/* -- backward ------------------------------------------------------------------------------------------------------ */
/* Let w = 2^(scale * q.k - lse) and d = dy.v. Then:
 *   ds = w * (d - delta)
 *   dq = scale * (ds k)
 *   dk = scale * (ds^T q)
 *   dv = w^T dy
 * Rows after the end of a tensor are zero, have a log-sum-exp of 0, and add nothing. The weight of a hidden key can
 * have any value before it is set to 0, because the log-sum-exp of a query that sees no key is -infinity. As in
 * attention_flash_backward.cu, queries that see one key (sure_before) have a dq of 0, and their q and their log-sum-exp
 * are replaced by 0 for dk and dv. */

/* Reads delta and lse for this thread's two rows, and multiplies lse by log2 e. w0 is the warp's first query. */
DEV void read_figures(const attention &t, int64_t b, int64_t h, int64_t w0, float *lse, float *delta)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int64_t i = w0 + ((threadIdx.x & 31) >> 2) + r * 8;
        lse[r] = i < t.T ? ((const float *)t.lse)[lse_at(t, b, h) + i] * LOG2_E : 0;
        delta[r] = i < t.T ? ((const float *)t.delta)[(b * t.H + h) * t.T + i] : 0;
    }
}

/* Turns the scores s [64, KEYS] of a warpgroup's queries into their gradients ds. d contains the products dy.v. lse and
 * delta have been set by read_figures(). */
template <int KEYS>
DEV void slope_of_rows(float *s, const float *d, const float *lse, const float *delta, float scale,
                       const sight<KEYS> &seen)
{
#pragma unroll
    for (int e = 0; e < KEYS / 2; e++)
        s[e] = exp2_fast(__fmaf_rn(s[e], scale, -lse[e >> 1 & 1])) * (d[e] - delta[e >> 1 & 1]);
    if (seen.all) return;
    int c2 = (threadIdx.x & 3) * 2;
#pragma unroll
    for (int e = 0; e < KEYS / 2; e++)
        if ((e >> 2) * 8 + c2 + (e & 1) > seen.last[e >> 1 & 1]) s[e] = 0;
}

template <int D> struct dq_shape;
template <> struct dq_shape<64> { enum { GROUPS = 2, KEYS = 128 }; };
template <> struct dq_shape<128> { enum { GROUPS = 2, KEYS = 64 }; };

template <int D> static size_t dq_nbytes(void)
{
    return 2 * tile<D, 64 * dq_shape<D>::GROUPS>::NBYTES + 5 * tile<D, dq_shape<D>::KEYS>::NBYTES + PANEL_ALIGN;
}

/* Computes dq. Rows are queries. There are three buffers for keys, because each tile of keys is read twice. While a
 * tile is read for the second time, the next tile is read for the first time. */
template <class T, int D>
KERNEL_UP_TO(128 * dq_shape<D>::GROUPS, 1) dq_kernel(const __grid_constant__ attention t)
{
    enum { GROUPS = dq_shape<D>::GROUPS, BLOCK = 128 * GROUPS, ROWS = 64 * GROUPS, KEYS = dq_shape<D>::KEYS };
    typedef tile<D, KEYS> key_tile;
    PS_DYNAMIC_SHARED(raw);
    unsigned char *q = raw + (-shared_address(raw) & (PANEL_ALIGN - 1)), *dy = q + tile<D, ROWS>::NBYTES;
    unsigned char *k = dy + tile<D, ROWS>::NBYTES, *v = k + 3 * key_tile::NBYTES;
    int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    int64_t q0 = (int64_t)(gridDim.x - 1 - blockIdx.x) * ROWS, b = blockIdx.z;            /* blocks start with the
                                                                                           * rows that see the most
                                                                                           * keys */
    int64_t h = blockIdx.y, kh = h / t.group;
    int64_t w0 = q0 + group * 64 + (threadIdx.x >> 5 & 3) * 16, end = t.causal ? min(t.S, q0 + ROWS + t.S - t.T) : t.S;
    int tiles = end > 0 ? (int)((end + KEYS - 1) / KEYS) : 0;
    float dq[D / 2], s[KEYS / 2], d[KEYS / 2], lse[2], delta[2], scale = t.scale * LOG2_E;
    uint32_t ds[KEYS / 4];
    clear<D / 2>(dq);
    clear<KEYS / 2>(s);
    clear<KEYS / 2>(d);
    read_figures(t, b, h, w0, lse, delta);

    uint64_t own_q = descriptor_k_major(shared_address(q) + group * 64 * PANEL_ROW);
    uint64_t own_dy = descriptor_at(own_q, tile<D, ROWS>::NBYTES), at_v = descriptor_k_major(shared_address(v));
    uint64_t at_k = descriptor_k_major(shared_address(k));
    uint64_t k_down = descriptor_mn_major(shared_address(k), key_tile::PANEL);
    load_tile<D, ROWS, BLOCK>(q, t.q, b, h, q0, t.T);
    load_tile<D, ROWS, BLOCK>(dy, t.dy, b, h, q0, t.T);
    if (tiles > 0) load_tile<D, KEYS, BLOCK>(k, t.k, b, kh, 0, t.S);
    if (tiles > 0) load_tile<D, KEYS, BLOCK>(v, t.v, b, kh, 0, t.S);
    async_commit();
    if (tiles > 1) load_tile<D, KEYS, BLOCK>(k + key_tile::NBYTES, t.k, b, kh, KEYS, t.S);
    if (tiles > 1) load_tile<D, KEYS, BLOCK>(v + key_tile::NBYTES, t.v, b, kh, KEYS, t.S);
    async_commit();
    if (tiles > 0) {
        async_wait<1>();
        async_fence();
        __syncthreads();
        wgmma_fence();
        times_transposed<T, D, ROWS, KEYS>(s, own_q, at_k);
        times_transposed<T, D, ROWS, KEYS>(d, own_dy, at_v);
        wgmma_commit();
        wgmma_wait<0>();
        hold<KEYS / 2>(s);
        hold<KEYS / 2>(d);
        slope_of_rows<KEYS>(s, d, lse, delta, scale, sight<KEYS>::of(t, w0, 0));
    }
    /* s: the ds of tile j. dq: the sum over the earlier tiles. The product of tile j - 1, which adds to dq, still runs,
     * as in forward_kernel. */
    for (int j = 0; j + 1 < tiles; j++) {
        int64_t first = (int64_t)(j + 1) * KEYS;
        wgmma_wait<0>();
        hold<D / 2>(dq);
        to_halves<T, KEYS>(ds, s);
        async_wait<0>();                             /* the next tile is complete */
        async_fence();
        __syncthreads();                             /* no warp reads the previous tile's k or this tile's v any more */
        if (j + 2 < tiles) {
            load_tile<D, KEYS, BLOCK>(k + (j + 2) % 3 * key_tile::NBYTES, t.k, b, kh, first + KEYS, t.S);
            load_tile<D, KEYS, BLOCK>(v + (j & 1) * key_tile::NBYTES, t.v, b, kh, first + KEYS, t.S);
        }
        async_commit();
        hold<KEYS / 2>(s);
        hold<KEYS / 2>(d);
        wgmma_fence();
        times_transposed<T, D, ROWS, KEYS>(s, own_q, descriptor_at(at_k, (j + 1) % 3 * key_tile::NBYTES));
        times_transposed<T, D, ROWS, KEYS>(d, own_dy, descriptor_at(at_v, (~j & 1) * key_tile::NBYTES));
        wgmma_commit();
        wgmma_fence();
        times<T, D, KEYS>(dq, ds, descriptor_at(k_down, j % 3 * key_tile::NBYTES));
        wgmma_commit();
        wgmma_wait<1>();
        hold<KEYS / 2>(s);
        hold<KEYS / 2>(d);
        slope_of_rows<KEYS>(s, d, lse, delta, scale, sight<KEYS>::of(t, w0, first));
    }
    wgmma_wait<0>();
    hold<D / 2>(dq);
    async_wait<0>();
    if (tiles > 0) {
        to_halves<T, KEYS>(ds, s);
        wgmma_fence();
        times<T, D, KEYS>(dq, ds, descriptor_at(k_down, (tiles - 1) % 3 * key_tile::NBYTES));
        wgmma_commit();
        wgmma_wait<0>();
        hold<D / 2>(dq);
    }
    __syncthreads();                                 /* no product reads q any more */
    int64_t sure = t.sure - w0;
    if (sure > 0)
#pragma unroll
        for (int e = 0; e < D / 2; e++)
            if ((e >> 1 & 1) * 8 + ((threadIdx.x & 31) >> 2) < sure) dq[e] = 0;
    store_rows<T, D, ROWS>(q + group * 64 * PANEL_ROW, t.dq, b, h, q0 + group * 64, t.T, dq, t.scale, t.scale);
}

/* Turns s and d [64, QUERIES] into w and ds, and rounds both to bf16 or fp16. Rows are a warpgroup's keys. Columns are
 * queries, starting at query `first`. lse and delta [QUERIES] contain one value per column. w0 is the warp's first
 * key. */
template <class T, int QUERIES>
DEV void slope_of_columns(const attention &t, uint32_t *w, uint32_t *ds, float *s, const float *d, const float *lse,
                          const float *delta, float scale, int64_t w0, int64_t first)
{
    int64_t from = w0 + ((threadIdx.x & 31) >> 2) - (t.S - t.T) - first;     /* first query that sees this row */
    int c2 = (threadIdx.x & 3) * 2, least[2];
    bool all = !t.causal || w0 + 15 - (t.S - t.T) <= first;
    for (int r = 0; r < 2; r++) least[r] = (int)max((int64_t)0, min(from + 8 * r, (int64_t)QUERIES));
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++) {
        float2 l = *(const float2 *)(lse + 8 * n + c2), o = *(const float2 *)(delta + 8 * n + c2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int e = 4 * n + 2 * r, c = 8 * n + c2;
            float x = exp2_fast(__fmaf_rn(s[e], scale, -LOG2_E * l.x));
            float y = exp2_fast(__fmaf_rn(s[e + 1], scale, -LOG2_E * l.y));
            float dx = x * (d[e] - o.x), dy = y * (d[e + 1] - o.y);
            if (!all && c < least[r]) x = dx = 0;
            if (!all && c + 1 < least[r]) y = dy = 0;
            w[e / 2] = two<T>(x, y);
            ds[e / 2] = two<T>(dx, dy);
        }
    }
}

enum { DKV_GROUPS = 2, DKV_BLOCK = 128 * DKV_GROUPS, DKV_ROWS = 64 * DKV_GROUPS, QUERIES = 64 };
/* A tile of queries. It contains q and dy, followed by the log-sum-exp and delta of the queries. There are three
 * buffers: products read the first buffer, the second buffer contains the next tile, and the third buffer is being
 * loaded. */
template <int D> struct query_tile {
    enum { DY = tile<D, QUERIES>::NBYTES, LSE = 2 * DY, DELTA = LSE + QUERIES * 4, NBYTES = LSE + PANEL_ALIGN };
};

template <int D> static size_t dkv_nbytes(void)
{
    return 2 * tile<D, DKV_ROWS>::NBYTES + 3 * query_tile<D>::NBYTES + PANEL_ALIGN;
}

template <int D> DEV void load_queries(unsigned char *to, const attention &t, int64_t b, int64_t h, int64_t first)
{
    typedef query_tile<D> place;
    load_tile<D, QUERIES, DKV_BLOCK, true>(to, t.q, b, h, first, t.T, t.sure);
    load_tile<D, QUERIES, DKV_BLOCK>(to + place::DY, t.dy, b, h, first, t.T);
    int c = threadIdx.x % QUERIES;
    bool there = first + c < t.T && first + c >= t.sure;
    const float *lse = (const float *)t.lse + lse_at(t, b, h), *delta = (const float *)t.delta + (b * t.H + h) * t.T;
    if (threadIdx.x < QUERIES) async_copy4(to + place::LSE + 4 * c, there ? lse + first + c : lse, there);
    else if (threadIdx.x < 2 * QUERIES)
        async_copy4(to + place::DELTA + 4 * c, there ? delta + first + c : delta, there);
    async_commit();
}

/* Computes dk and dv. Rows are keys. If query heads share keys, dk and dv of each query head are stored separately
 * (run_grouped_backward). */
template <class T, int D>
KERNEL_UP_TO(DKV_BLOCK, 1) dkv_kernel(const __grid_constant__ attention t)
{
    typedef query_tile<D> place;
    PS_DYNAMIC_SHARED(raw);
    unsigned char *k = raw + (-shared_address(raw) & (PANEL_ALIGN - 1)), *v = k + tile<D, DKV_ROWS>::NBYTES;
    unsigned char *queries = v + tile<D, DKV_ROWS>::NBYTES;
    int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    int64_t k0 = (int64_t)blockIdx.x * DKV_ROWS, h = blockIdx.y, kh = h / t.group, b = blockIdx.z, begin = 0;
    int64_t w0 = k0 + group * 64 + (threadIdx.x >> 5 & 3) * 16;
    if (t.causal && k0 > t.S - t.T) begin = (k0 - (t.S - t.T)) / QUERIES * QUERIES;      /* earlier queries see none
                                                                                          * of these keys */
    int tiles = (int)((t.T - begin + QUERIES - 1) / QUERIES);        /* at least one tile, because the last query sees
                                                                      * all keys */
    float dk[D / 2], dv[D / 2], s[QUERIES / 2], d[QUERIES / 2], scale = t.scale * LOG2_E;
    uint32_t w[QUERIES / 4], ds[QUERIES / 4];
    clear<D / 2>(dk);
    clear<D / 2>(dv);
    clear<QUERIES / 2>(s);
    clear<QUERIES / 2>(d);

    uint64_t own_k = descriptor_k_major(shared_address(k) + group * 64 * PANEL_ROW);
    uint64_t own_v = descriptor_at(own_k, tile<D, DKV_ROWS>::NBYTES);
    uint64_t along = descriptor_k_major(shared_address(queries));
    uint64_t down = descriptor_mn_major(shared_address(queries), tile<D, QUERIES>::PANEL);
    load_tile<D, DKV_ROWS, DKV_BLOCK>(k, t.k, b, kh, k0, t.S);
    load_tile<D, DKV_ROWS, DKV_BLOCK>(v, t.v, b, kh, k0, t.S);
    load_queries<D>(queries, t, b, h, begin);
    for (int j = 0; j < tiles; j++) {
        int64_t first = begin + (int64_t)j * QUERIES;
        uint32_t at = j % 3 * place::NBYTES;
        async_wait<0>();                             /* this tile is complete */
        async_fence();
        __syncthreads();                             /* no warp reads tile j - 2 any more */
        if (j + 1 < tiles) load_queries<D>(queries + (j + 1) % 3 * place::NBYTES, t, b, h, first + QUERIES);
        wgmma_fence();
        times_transposed<T, D, DKV_ROWS, QUERIES>(s, own_k, descriptor_at(along, at));
        times_transposed<T, D, DKV_ROWS, QUERIES>(d, own_v, descriptor_at(along, at + place::DY));
        wgmma_commit();
        wgmma_wait<0>();
        hold<QUERIES / 2>(s);
        hold<QUERIES / 2>(d);
        hold<D / 2>(dk);
        hold<D / 2>(dv);
        slope_of_columns<T, QUERIES>(t, w, ds, s, d, (const float *)(queries + at + place::LSE),
                                     (const float *)(queries + at + place::DELTA), scale, w0, first);
        wgmma_fence();
        times<T, D, QUERIES>(dv, w, descriptor_at(down, at + place::DY));
        times<T, D, QUERIES>(dk, ds, descriptor_at(down, at));
        wgmma_commit();
    }
    wgmma_wait<0>();
    hold<D / 2>(dk);
    hold<D / 2>(dv);
    __syncthreads();                                 /* no product reads k or v any more */
    int64_t own = group * 64 * PANEL_ROW, row = k0 + group * 64;
    if (t.dk.p) store_rows<T, D, DKV_ROWS>(k + own, t.dk, b, h, row, t.S, dk, t.scale, t.scale);
    if (t.dv.p) store_rows<T, D, DKV_ROWS>(v + own, t.dv, b, h, row, t.S, dv, 1, 1);
}

/* -- launching ----------------------------------------------------------------------------------------------------- */
/* Launches a kernel for n rows. Each block has `groups` warpgroups. */
template <class F> static int start(F kernel, bool *allowed, int64_t n, int groups, size_t nbytes, const attention *t)
{
    if (!*allowed)                                   /* CUDA requires this call, once per kernel, for more than 48 KiB
                                                      * of shared memory */
        CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)nbytes));
    *allowed = true;
    PS_LAUNCH(kernel, dim3((unsigned)ps_cu_div_up(n, 64 * groups), (unsigned)t->H, (unsigned)t->B), 128 * groups,
              nbytes, ps_cu->compute, *t);
    return ps_cuda_launched();
}

template <class T, int D> static int run_forward(const attention *t)
{
    static bool allowed;
    return start(forward_kernel<T, D>, &allowed, t->T, shape<D>::GROUPS, forward_nbytes<D>(), t);
}

template <class T, int D> static int run_backward(const attention *t)
{
    static bool dq_allowed, dkv_allowed;
    if (t->dq.p) PS_TRY(start(dq_kernel<T, D>, &dq_allowed, t->T, dq_shape<D>::GROUPS, dq_nbytes<D>(), t));
    if (!t->dk.p && !t->dv.p) return 0;
    return start(dkv_kernel<T, D>, &dkv_allowed, t->S, DKV_GROUPS, dkv_nbytes<D>(), t);
}

static bool aligned_or_absent(const heads &x) { return !x.p || x.aligned; }

static bool takes(const attention *t, int dtype, bool faster)
{
    bool wanted = ps_cu->wgmma == WGMMA_ALWAYS || (ps_cu->wgmma == WGMMA_WHERE_FASTER && faster);
    return wanted && is_plain(t) && (dtype == PS_BF16 || dtype == PS_F16) && (t->D == 64 || t->D == 128) &&
           t->S > 0 && !t->mask && !t->begin && t->p == 0 &&
           t->scale > 0 && t->q.aligned && t->k.aligned && t->v.aligned;
}

int ps_cuda_hopper_forward(const attention *t, int dtype)
{
    if (!takes(t, dtype, t->D == 128) || !t->y.aligned) return PS_EUNSUP;
    if (dtype == PS_BF16) return t->D == 64 ? run_forward<bf16, 64>(t) : run_forward<bf16, 128>(t);
    return t->D == 64 ? run_forward<f16, 64>(t) : run_forward<f16, 128>(t);
}

int ps_cuda_hopper_backward(const attention *t, int dtype)
{
    if (!takes(t, dtype, true) || !t->dy.aligned || !aligned_or_absent(t->dq) || !aligned_or_absent(t->dk) ||
        !aligned_or_absent(t->dv))
        return PS_EUNSUP;
    if (dtype == PS_BF16) return t->D == 64 ? run_backward<bf16, 64>(t) : run_backward<bf16, 128>(t);
    return t->D == 64 ? run_backward<f16, 64>(t) : run_backward<f16, 128>(t);
}
