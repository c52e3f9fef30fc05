/* SPDX-License-Identifier: BSD-3-Clause
 * Attention of bf16 and fp16 by warpgroup products (wgmma.h), for compute capability 9.0: heads of 64 and 128, aligned
 * rows, causal or not, without mask and dropout. Everything else, and everything unless PS_CUDA_ATTENTION=wgmma, is
 * attention_flash.cu's. This file is compiled for sm_90a alone.
 *
 * A warpgroup has 64 rows of the block's tile. Scores and outputs are accumulators in registers: thread `lane` of warp
 * w has of row 16 w + lane / 4 the columns 8 n + lane % 4 * 2 and the next in x[4 n] and x[4 n + 1], of the row 8 below
 * in x[4 n + 2] and x[4 n + 3]. That is also how A lies in registers, so weights go from one product into the next.
 * Tiles of keys come by asynchronous copies into two places each; one tile's product runs beside another's softmax. */
#include "backend/cuda/attention.h"
#include "backend/cuda/wgmma.h"

#define LOG2_E 1.4426950408889634f

template <class T> DEV uint32_t two(float low, float high) { return two_down(T(), low, high); }

/* A tile [ROWS, D] is D / 64 panels beside each other. */
template <int D, int ROWS> struct tile { enum { PANEL = ROWS * PANEL_ROW, NBYTES = D / PANEL_COLS * PANEL }; };

/* Rows first .. first + ROWS of a head into a tile; rows from `limit` on are zero. Asynchronous, without a commit. */
template <int D, int ROWS, int BLOCK>
DEV void load_tile(unsigned char *dst, const heads &x, int64_t b, int64_t h, int64_t first, int64_t limit)
{
    enum { PIECES = D / 8, STEP = BLOCK / PIECES };
    static_assert(STEP % 8 == 0, "a thread's rows differ by multiples of 8, so the swizzle is the same for all");
    int c = threadIdx.x % PIECES, r = threadIdx.x / PIECES;
    const uint16_t *base = (const uint16_t *)x.p + b * x.b + h * x.h, *from = base + (first + r) * x.row + c * 8;
    unsigned char *to = dst + c / 8 * tile<D, ROWS>::PANEL + r * PANEL_ROW + ((c ^ r) & 7) * 16;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP) {
        bool there = first + r + i < limit;
        if (ROWS % STEP == 0 || r + i < ROWS)
            async_copy16(to + i * PANEL_ROW, there ? from + i * x.row : base, there);
    }
}

/* c [64, N] = a b^T over D columns; a: of this warpgroup's rows in a tile of A_ROWS, b: a tile of N rows. */
template <class T, int D, int A_ROWS, int N> DEV void times_transposed(float *c, uint64_t a, uint64_t b)
{
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t within = k % PANEL_COLS * 2;
        wgmma_shared<T, N>(c, descriptor_at(a, k / PANEL_COLS * tile<D, A_ROWS>::PANEL + within),
                           descriptor_at(b, k / PANEL_COLS * tile<D, N>::PANEL + within), k > 0);
    }
}

/* o [64, D] += p b; p [64, KEYS] in registers, b a tile of KEYS rows. */
template <class T, int D, int KEYS> DEV void times(float *o, const uint32_t *p, uint64_t b)
{
#pragma unroll
    for (int k = 0; k < KEYS; k += 16) wgmma_registers<T, D>(o, p + k / 4, descriptor_at(b, k * PANEL_ROW), true);
}

/* x [64, N] to halves, as A of the next product. */
template <class T, int N> DEV void to_halves(uint32_t *p, const float *x)
{
#pragma unroll
    for (int i = 0; i < N / 4; i++) p[i] = two<T>(x[2 * i], x[2 * i + 1]);
}

/* 64 rows of a warpgroup to rows first .. of a head, as far as they exist: each warp lays its 16 rows into `own`, 64
 * rows of a tile of A_ROWS that nobody else uses any more, and reads them in pieces of 16 bytes. */
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
/* What this thread's rows see of the tile of keys from `first` on: each up to column `last`; all: every row of the warp
 * sees every column. w0: the warp's first row. */
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

/* Scores of a tile become weights 2^(scale (s - top)); the running top and sum of this thread's two rows go on, and
 * `shrink` is what sums so far are to be multiplied with. scale > 0. */
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

/* Warpgroups of a block, keys of a tile. */
template <int D> struct shape;
template <> struct shape<64> { enum { GROUPS = 3, KEYS = 128 }; };
template <> struct shape<128> { enum { GROUPS = 2, KEYS = 128 }; };

/* Outputs of a warpgroup's rows from `first` on, and their log-sum-exp. */
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
    unsigned char *v = k + 2 * key_tile::NBYTES;                     /* two places each, taken in turn */
    int group = __shfl_sync(0xffffffffu, threadIdx.x >> 7, 0);
    int64_t q0 = (int64_t)(gridDim.x - 1 - blockIdx.x) * ROWS, h = blockIdx.y, b = blockIdx.z;   /* long ones first */
    int64_t w0 = q0 + group * 64 + (threadIdx.x >> 5 & 3) * 16, end = t.causal ? min(t.S, q0 + ROWS + t.S - t.T) : t.S;
    int tiles = end > 0 ? (int)((end + KEYS - 1) / KEYS) : 0;
    float o[D / 2], s[KEYS / 2], top[2] = { -INFINITY, -INFINITY }, sum[2] = { 0, 0 }, shrink[2] = { 1, 1 };
    float scale = t.scale * LOG2_E;
    uint32_t p[KEYS / 4];
#pragma unroll
    for (int i = 0; i < D / 2; i++) o[i] = 0;
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) s[i] = 0;

    uint64_t own_q = descriptor_k_major(shared_address(q) + group * 64 * PANEL_ROW);
    uint64_t at_k = descriptor_k_major(shared_address(k));
    uint64_t at_v = descriptor_mn_major(shared_address(v), key_tile::PANEL);
    load_tile<D, ROWS, BLOCK>(q, t.q, b, h, q0, t.T);
    if (tiles > 0) load_tile<D, KEYS, BLOCK>(k, t.k, b, h, 0, t.S);
    async_commit();
    if (tiles > 0) load_tile<D, KEYS, BLOCK>(v, t.v, b, h, 0, t.S);
    if (tiles > 1) load_tile<D, KEYS, BLOCK>(k + key_tile::NBYTES, t.k, b, h, KEYS, t.S);
    async_commit();
    if (tiles > 0) {
        async_wait<1>();                             /* q and the first k */
        async_fence();
        __syncthreads();
        wgmma_fence();
        times_transposed<T, D, ROWS, KEYS>(s, own_q, at_k);
        wgmma_commit();
        wgmma_wait<0>();
        hold<KEYS / 2>(s);
        soften<KEYS>(s, top, sum, shrink, scale, sight<KEYS>::of(t, w0, 0));
    }
    /* s: weights of tile j; o: of the tiles before it, its product still under way: that wait stands at the loop's head
     * because ptxas moves it before the softmax where both are in one block. */
    for (int j = 0; j + 1 < tiles; j++) {
        int here = j & 1, there = here ^ 1;
        int64_t first = (int64_t)(j + 1) * KEYS;
        wgmma_wait<0>();
        hold<D / 2>(o);
        shrink_rows<D>(o, shrink);
        to_halves<T, KEYS>(p, s);
        async_wait<0>();                             /* k of the next tile and v of this one are there; behind the */
        async_fence();                               /* barrier nobody reads this k and the last v any more */
        __syncthreads();
        if (j + 2 < tiles) load_tile<D, KEYS, BLOCK>(k + here * key_tile::NBYTES, t.k, b, h, first + KEYS, t.S);
        load_tile<D, KEYS, BLOCK>(v + there * key_tile::NBYTES, t.v, b, h, first, t.S);
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

/* -- launching ----------------------------------------------------------------------------------------------------- */
template <class T, int D> static int run_forward(const attention *t)
{
    static bool allowed;                             /* more than 48 KiB of shared memory, once for each kernel */
    auto kernel = forward_kernel<T, D>;
    int nbytes = (int)forward_nbytes<D>(), rows = 64 * shape<D>::GROUPS;
    if (!allowed) CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, nbytes));
    allowed = true;
    PS_LAUNCH(kernel, dim3((unsigned)ps_cu_div_up(t->T, rows), (unsigned)t->H, (unsigned)t->B), 2 * rows, nbytes,
              ps_cu->compute, *t);
    return ps_cuda_launched();
}

static bool takes(const attention *t, int dtype)
{
    return ps_cu->wgmma && (dtype == PS_BF16 || dtype == PS_F16) && (t->D == 64 || t->D == 128) && t->S > 0 &&
           !t->mask && t->p == 0 && t->scale > 0 && t->q.aligned && t->k.aligned && t->v.aligned && t->y.aligned;
}

int ps_cuda_hopper_forward(const attention *t, int dtype)
{
    if (!takes(t, dtype)) return PS_EUNSUP;
    if (dtype == PS_BF16) return t->D == 64 ? run_forward<bf16, 64>(t) : run_forward<bf16, 128>(t);
    return t->D == 64 ? run_forward<f16, 64>(t) : run_forward<f16, 128>(t);
}
