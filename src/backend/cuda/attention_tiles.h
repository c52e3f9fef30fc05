/* SPDX-License-Identifier: BSD-3-Clause
 * Tiles for attention on tensor cores (mma.sync), used by attention_flash.cu and attention_flash_backward.cu. A tile
 * has rows of a head in shared memory. This file loads tiles, reads fragments from them, and multiplies a warp's rows
 * by a tile.
 *
 * A tile has DP columns (64, 128 or 256). Columns at or after D are zero. A chunk is 16 bytes of a row. Chunks are
 * swizzled: chunk c of row r is stored at chunk position c ^ (r & 7) of the row. The eight rows that ldmatrix reads at
 * once are thus in different banks, without padding. A warp has 16 * RT rows, so RT products use each fragment of the
 * other operand that the warp reads.
 *
 * LEAN kernels are for the common case: operands that can be read 16 bytes at a time (heads.aligned), no mask, no
 * dropout, and a scale above zero. The other kernels support all cases. Indices of rows and keys have the type int. */
#ifndef PS_CUDA_ATTENTION_TILES_H
#define PS_CUDA_ATTENTION_TILES_H
#include "backend/cuda/attention.h"

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
enum { MOST_ROWS = 1 << 29 };

template <class T> DEV uint32_t two(float low, float high) { return two_down(T(), low, high); }

/* Returns the offset, in elements, of chunk c of row r in a tile. */
template <int DP> DEV int place(int r, int c) { return r * DP + ((c ^ (r & 7)) << 3); }

DEV const uint16_t *head_of(const heads &x, int64_t b, int64_t h)
{
    return (const uint16_t *)x.p + b * x.b + h * x.h;
}

/* Loads consecutive tiles of N rows of a head, starting at row `first`. All THREADS threads of the block take part. The
 * chunks of one thread are STEP rows apart.
 *
 * Zeros replace columns at or after D, rows at or after `limit`, rows that the mask hides and, with FROM_LEAST, rows
 * before `least`. The copies are asynchronous: commit them, wait for them, and then use a barrier. */
template <int DP, int N, int THREADS, bool LEAN> struct reader {
    enum { CHUNKS = DP / 8, STEP = THREADS / CHUNKS };
    static_assert(N % STEP == 0, "each thread has as many chunks");
    const uint16_t *from;                            /* this thread's first address in the next tile to load, which
                                                      * begins with row `first` */
    __device__ __forceinline__ void open(const heads &x, int64_t b, int64_t h, int first)
    {
        int c = threadIdx.x % CHUNKS * 8, r = threadIdx.x / CHUNKS;
        from = head_of(x, b, h) + (first + r) * x.row + c;
    }
    template <bool FROM_LEAST = false>
    __device__ __forceinline__ void next(uint16_t *tile, const heads &x, int first, int limit, int D,
                                         const uint8_t *mask, int64_t mask_step, int least = 0)
    {
        int c = threadIdx.x % CHUNKS, r = threadIdx.x / CHUNKS;
        if (c * 8 >= D) limit = 0;
#pragma unroll
        for (int i = 0; i < N; i += STEP, from += STEP * x.row) {
            bool there = first + r + i < limit && (!FROM_LEAST || first + r + i >= least);
            uint16_t *to = tile + (STEP % 8 == 0 ? place<DP>(r, c) + i * DP : place<DP>(r + i, c));
            if (!LEAN && there && mask) there = mask[(first + r + i) * mask_step] != 0;
            if (LEAN || x.aligned) {
                async_copy16(to, from, there);
            } else {
#pragma unroll
                for (int k = 0; k < 8; k++) to[k] = there && c * 8 + k < D ? from[k] : (uint16_t)0;
            }
        }
    }
};

/* Tiles of keys and tiles of values. In shared memory, a tile of values follows the tile of its keys. There are two
 * such buffers, so that the next tile is loaded while the current tile is read. */
template <int DP, int KEYS, int THREADS, bool LEAN> struct key_tiles {
    reader<DP, KEYS, THREADS, LEAN> k_rows, v_rows;
    __device__ __forceinline__ void open(const attention &t, int64_t b, int64_t h, int first)
    {
        k_rows.open(t.k, b, h / t.group, first), v_rows.open(t.v, b, h / t.group, first);
    }
    static __device__ __forceinline__ uint16_t *place_of(uint16_t *stages, int first)
    {
        return stages + (first / KEYS & 1) * 2 * KEYS * DP;
    }
    /* Starts to copy the tile whose first key is `first`. Call this function once per tile, in ascending order of
     * keys. */
    __device__ __forceinline__ void next(uint16_t *stages, const attention &t, int first, int n_k, int D,
                                         const uint8_t *mask)
    {
        uint16_t *k = place_of(stages, first);
        k_rows.next(k, t.k, first, n_k, D, mask, t.mask_j);
        v_rows.next(k + KEYS * DP, t.v, first, n_k, D, mask, t.mask_j);
        async_commit();
    }
};

/* -- fragments ---------------------------------------------------------------------------------------------------- */
/* Addresses for ldmatrix. Each lane loads one row of a matrix [16, 16] from a tile.
 *   lane_of_a() returns the row's offset in the tile, in bytes. It is for A, and for B if ldmatrix transposes B.
 *   lane_of_bt() returns the row's offset for B^T.
 *   across() returns the address of column k of the row at such an offset. For other rows, the caller adds whole rows
 *   to the address. */
template <int DP> DEV int lane_of_a(void)
{
    int lane = threadIdx.x & 31;
    return place<DP>(lane & 15, lane >> 4) * 2;
}
template <int DP> DEV int lane_of_bt(void)
{
    int lane = threadIdx.x & 31;
    return place<DP>((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1) * 2;
}
DEV const uint16_t *across(const uint16_t *tile, int lane, int k)
{
    return (const uint16_t *)((const char *)tile + (lane ^ (k % 64 * 2))) + k / 64 * 64;
}

/* The fragments of a warp's rows [16 * RT, DP]. rows_shared reads the fragments from shared memory for each use.
 * rows_kept keeps the fragments in registers. */
template <int DP, int RT> struct rows_shared {
    const uint16_t *p;
    __device__ __forceinline__ void open(const uint16_t *rows) { p = rows; }
    __device__ __forceinline__ void get(uint32_t (*f)[4], int k) const
    {
#pragma unroll
        for (int m = 0; m < RT; m++) ldmatrix<4, false>(f[m], across(p, lane_of_a<DP>(), k) + m * 16 * DP);
    }
};
template <int DP, int RT> struct rows_kept {
    uint32_t kept[DP / 16][RT][4];
    __device__ __forceinline__ void open(const uint16_t *rows)
    {
        rows_shared<DP, RT> from = { rows };
#pragma unroll
        for (int k = 0; k < DP; k += 16) from.get(kept[k / 16], k);
    }
    __device__ __forceinline__ void get(uint32_t (*f)[4], int k) const
    {
#pragma unroll
        for (int e = 0; e < 4 * RT; e++) f[e / 4][e % 4] = kept[k / 16][e / 4][e % 4];
    }
};
template <bool KEPT, int DP, int RT> struct kept_if { typedef rows_shared<DP, RT> rows; };
template <int DP, int RT> struct kept_if<true, DP, RT> { typedef rows_kept<DP, RT> rows; };

/* -- dropout ------------------------------------------------------------------------------------------------------- */
/* Computes random words for four consecutive keys of a query, by one call of Philox. If the tile's first key is a
 * multiple of four, each lane calls draw() once per fragment, and the lanes exchange the words. */
DEV void draw(const attention &t, uint32_t *w, int64_t b, int64_t h, int i, int j)
{
    uint64_t block = (uint64_t)(((t.first_head + h) * t.T + i) * t.S + j) / 4;
    ps_philox r = ps_philox4x32(t.seed, (t.sample + (uint64_t)b) << 32 | block, t.step << 32 | t.op);
    for (int k = 0; k < 4; k++) w[k] = r.v[k];
}
/* Draws the random words for the elements of a fragment. Rows are queries starting at query i, and columns are keys
 * starting at key j. Each pair of lanes holds four keys for each of two rows. */
DEV void draw_rows(const attention &t, uint32_t *w, int64_t b, int64_t h, int i, int j)
{
    int lane = threadIdx.x & 31, odd = lane & 1;
    uint32_t own[4];
    draw(t, own, b, h, i + (lane >> 2) + odd * 8, j + (lane & 2) * 2);
    uint32_t x = __shfl_xor_sync(0xffffffffu, odd ? own[0] : own[2], 1);
    uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? own[1] : own[3], 1);
    w[0] = odd ? x : own[0], w[1] = odd ? y : own[1], w[2] = odd ? own[2] : x, w[3] = odd ? own[3] : y;
}
/* Draws the random words for the elements of a fragment. Rows are keys starting at key j, and columns are queries
 * starting at query i. Four lanes with consecutive rows draw the words for four queries and four keys. The four lanes
 * then transpose their words among themselves. */
DEV void draw_columns(const attention &t, uint32_t *w, int64_t b, int64_t h, int i, int j)
{
    int lane = threadIdx.x & 31, low = lane >> 2 & 1, high = lane >> 3 & 1;
    uint32_t v[4], a[4];
    draw(t, v, b, h, i + (lane & 3) * 2 + low, j + (lane >> 4) * 4 + high * 8);
    uint32_t x = __shfl_xor_sync(0xffffffffu, low ? v[0] : v[1], 4);
    uint32_t y = __shfl_xor_sync(0xffffffffu, low ? v[2] : v[3], 4);
    a[0] = low ? x : v[0], a[1] = low ? v[1] : x, a[2] = low ? y : v[2], a[3] = low ? v[3] : y;
    x = __shfl_xor_sync(0xffffffffu, high ? a[0] : a[2], 8);
    y = __shfl_xor_sync(0xffffffffu, high ? a[1] : a[3], 8);
    w[0] = high ? x : a[0], w[1] = high ? y : a[1], w[2] = high ? a[2] : x, w[3] = high ? a[3] : y;
}
/* Returns which elements of [16, 8 * N] are dropped: bit 4 * n + e of the result is set if element e of fragment n is
 * dropped. Rows are keys if KEYS_DOWN is set, otherwise queries. */
template <int N, bool KEYS_DOWN> DEV uint32_t dropped_of(const attention &t, int64_t b, int64_t h, int i, int j)
{
    static_assert(N <= 8, "bits");
    int g = (threadIdx.x & 31) >> 2, c2 = (threadIdx.x & 3) * 2;
    uint32_t bits = 0;
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        int row = KEYS_DOWN ? i + n * 8 : i, col = KEYS_DOWN ? j : j + n * 8;
        if (t.S % 4 == 0 && !t.begin) {
            uint32_t w[4];
            if (KEYS_DOWN) draw_columns(t, w, b, h, row, col);
            else draw_rows(t, w, b, h, row, col);
#pragma unroll
            for (int e = 0; e < 4; e++) bits |= (uint32_t)(ps_unit_f32(w[e]) < t.p) << (4 * n + e);
            continue;
        }
#pragma unroll 1
        for (int e = 0; e < 4; e++) {
            draws d = no_draws();
            int down = g + (e >> 1) * 8, right = c2 + (e & 1);
            bool is = dropped(t, &d, b, h, row + (KEYS_DOWN ? right : down), col + (KEYS_DOWN ? down : right));
            bits |= (uint32_t)is << (4 * n + e);
        }
    }
    return bits;
}

/* -- products ------------------------------------------------------------------------------------------------------ */
template <int N> DEV void clear(float (*c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) c[0][n][0] = c[0][n][1] = c[0][n][2] = c[0][n][3] = 0;
}
template <int RT, int N> DEV void clear_all(float (*c)[N][4])
{
#pragma unroll
    for (int m = 0; m < RT; m++) clear<N>(c + m);
}

/* Computes c [16 * RT, 8 * N] = a b^T. a is [16 * RT, DP], and b [8 * N, DP] is a tile. */
template <class T, int DP, int RT, int N, class A>
DEV void times_transposed(float (*c)[N][4], const A &a, const uint16_t *b)
{
    clear_all<RT, N>(c);
#pragma unroll
    for (int k = 0; k < DP; k += 16) {
        uint32_t fa[RT][4], fb[4];
        a.get(fa, k);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix<4, false>(fb, across(b, lane_of_bt<DP>(), k) + n * 8 * DP);
#pragma unroll
            for (int m = 0; m < RT; m++) {
                mma<T>(c[m][n], fa[m], fb);
                mma<T>(c[m][n + 1], fa[m], fb + 2);
            }
        }
    }
}

/* Computes o [16 * RT, W] += p b. p [16 * RT, 8 * N] has the layout of c in times_transposed. b [8 * N, W] consists of
 * W columns of a tile with DP columns. */
template <class T, int DP, int RT, int N, int W>
DEV void times(float (*o)[W / 8][4], float (*p)[N][4], const uint16_t *b)
{
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t fa[RT][4], fb[4];
#pragma unroll
        for (int m = 0; m < RT; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                fa[m][e] = two<T>(p[m][k + e / 2][e % 2 * 2], p[m][k + e / 2][e % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < W / 8; n += 2) {
            ldmatrix<4, true>(fb, across(b, lane_of_a<DP>(), n * 8) + k * 8 * DP);
#pragma unroll
            for (int m = 0; m < RT; m++) {
                mma<T>(o[m][n], fa[m], fb);
                mma<T>(o[m][n + 1], fa[m], fb + 2);
            }
        }
    }
}

/* -- results ------------------------------------------------------------------------------------------------------- */
/* Multiplies a warp's o [16 * RT, W] by `by` and stores it to a head. Row 0 of o is row `first` of the head, and column
 * 0 is column `col`. Rows at or after `limit` are not stored. With LEAN, the rows are first written to `own`, so that
 * they can be stored 16 bytes at a time. `own` consists of rows of a tile in shared memory. The tile is no longer in
 * use. */
template <class T, int DP, int RT, bool LEAN, int W>
DEV void store_rows(const heads &x, int64_t b, int64_t h, int first, int limit, int col, int D, float (*o)[W / 8][4],
                    float by, uint16_t *own)
{
    int lane = threadIdx.x & 31, g = lane >> 2, c2 = (lane & 3) * 2;
    uint16_t *base = (uint16_t *)head_of(x, b, h) + col;
    D -= col;
    if (LEAN) __syncwarp();                          /* other lanes of the warp may still read `own` */
#pragma unroll
    for (int m = 0; m < RT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = m * 16 + half * 8 + g;
#pragma unroll
            for (int n = 0; n < W / 8; n++) {
                uint32_t v = two<T>(o[m][n][2 * half] * by, o[m][n][2 * half + 1] * by);
                if (LEAN) {
                    *(uint32_t *)(own + place<DP>(r, n) + c2) = v;
                } else if (first + r < limit) {
                    uint16_t *to = base + (first + r) * x.row + n * 8 + c2;
                    if (n * 8 + c2 < D) to[0] = (uint16_t)v;
                    if (n * 8 + c2 + 1 < D) to[1] = (uint16_t)(v >> 16);
                }
            }
        }
    if (!LEAN) return;
    __syncwarp();
    const int CHUNKS = W / 8, STEP = 32 / CHUNKS;
    int c = lane % CHUNKS;
#pragma unroll
    for (int i = 0; i < 16 * RT; i += STEP) {
        int r = i + lane / CHUNKS;
        if (first + r < limit && c * 8 < D)
            *(uint4 *)(base + (first + r) * x.row + c * 8) = *(const uint4 *)(own + place<DP>(r, c));
    }
}

/* -- segments ------------------------------------------------------------------------------------------------------ */
/* Returns the union of the segments of rows first to first + n - 1. Rows at or after T do not count. Without segments,
 * the result is [0, limit). The rows see no key outside the result. */
struct span { int begin, end; };
DEV span span_of(const attention &t, int64_t b, int first, int n, int limit)
{
    span x = { 0, limit };
    if (!t.begin || first >= (int)t.T) return x;
    x.begin = t.begin[b * t.T + first];
    x.end = t.end[b * t.T + min(first + n, (int)t.T) - 1];
    return x;
}

/* -- launching ----------------------------------------------------------------------------------------------------- */
/* Requests shared memory above 48 KiB. CUDA requires this request once per kernel. */
template <class F> static int allow_shared(F kernel, size_t nbytes, bool *done)
{
    if (*done) return 0;
    CU_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)nbytes));
    *done = true;
    return 0;
}

static inline dim3 grid_over(int64_t rows, int per_block, const attention *t)
{
    return dim3((unsigned)ps_cu_div_up(rows, per_block), (unsigned)t->H, (unsigned)t->B);
}

static inline bool takes(const attention *t, int dtype)
{
    return is_plain(t) && (dtype == PS_BF16 || dtype == PS_F16) && t->D <= 256 && t->S > 0 &&
           t->T < MOST_ROWS && t->S < MOST_ROWS;
}

static inline bool is_lean(const attention *t)
{
    return !t->mask && !t->begin && t->p == 0 && t->scale > 0 && t->q.aligned && t->k.aligned && t->v.aligned;
}
#endif
