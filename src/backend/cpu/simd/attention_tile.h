/* SPDX-License-Identifier: BSD-3-Clause
 * The arithmetic of attention.c: a register-blocked fp32 matrix product on small panels, 2^x and log2 of vectors,
 * transposition, and dropout bits. Every element of a product is a chain of fused multiply-adds, in the order of the
 * summed dimension. Every tile shape uses this order, so all instruction sets compute the same bits. Pointers need no
 * alignment. */
#ifndef PS_CPU_ATTENTION_TILE_H
#define PS_CPU_ATTENTION_TILE_H
#include "backend/cpu/simd.h"
#include "base/philox.h"

enum { ROWS = 8 };                /* the number of rows of every product is a multiple of ROWS */

/* The machine's own vector, with LANES floats. GCC would keep wider vectors in memory. */
#if defined(__AVX512F__)
enum { LANES = 16, TILE_VECTORS = 4 };
typedef vf vn;
typedef vi vni;
typedef vu vnu;
SIMD vn vn_fma(vn a, vn b, vn c) { return vf_fma(a, b, c); }
SIMD vn vn_set(float x) { return vf_set(x); }
#elif defined(__FMA__)
enum { LANES = 8, TILE_VECTORS = 1 };
typedef float vn __attribute__((vector_size(32)));
typedef int32_t vni __attribute__((vector_size(32)));
typedef uint32_t vnu __attribute__((vector_size(32)));
SIMD vn vn_fma(vn a, vn b, vn c) { return (vn)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
SIMD vn vn_set(float x) { return (vn){ x, x, x, x, x, x, x, x }; }
#else
enum { LANES = 4, TILE_VECTORS = 1 };
typedef float vn __attribute__((vector_size(16)));
typedef int32_t vni __attribute__((vector_size(16)));
typedef uint32_t vnu __attribute__((vector_size(16)));
SIMD vn vn_fma(vn a, vn b, vn c)
{
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}
SIMD vn vn_set(float x) { return (vn){ x, x, x, x }; }
#endif
SIMD vn vn_load(const float *p) { vn v; memcpy(&v, p, sizeof v); return v; }
SIMD void vn_store(float *p, vn v) { memcpy(p, &v, sizeof v); }
SIMD vn vn_and(vni mask, vn v) { return (vn)(mask & (vni)v); }
SIMD vn vn_select(vni mask, vn a, vn b) { return (vn)((mask & (vni)a) | (~mask & (vni)b)); }
SIMD vn vn_max(vn a, vn b)        /* returns the larger value, or b if either value is NaN */
{
#if defined(__AVX512F__)
    return vf_max(a, b);
#elif defined(__FMA__)
    return (vn)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (vn)_mm_max_ps((__m128)a, (__m128)b);
#else
    return vn_select(a > b, a, b);
#endif
}
/* Returns first, first + 1, and so on in the lanes. */
SIMD vni vn_lanes(int first)
{
    const vi lane = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    vni v;
    memcpy(&v, &lane, sizeof v);
    return v + first;
}

/* -- c [rows, 16 * vectors] (+)= a [rows, depth] b [depth, 16 * vectors] ------------------------------------------ */
/* Computes a tile of a product. Element (m, k) of a is a[m * a_row + k * a_col]. ldb is the distance between rows of b,
 * and ldc is the distance between rows of c, in elements. `rows` and `vectors` are constants, so that the rows *
 * vectors sums stay in registers. */
SIMD void tile(int rows, int vectors, int add, int64_t depth, const float *a, int64_t a_row, int64_t a_col,
               const float *b, int64_t ldb, float *c, int64_t ldc)
{
    const int n = vectors * VL / LANES;
    vn sum[ROWS][4];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) sum[m][v] = add ? vn_load(c + m * ldc + v * LANES) : vn_set(0);
    for (int64_t k = 0; k < depth; k++, a += a_col, b += ldb) {
        vn row[4];
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) row[v] = vn_load(b + v * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            vn x = vn_set(a[m * a_row]);
#pragma GCC unroll 4
            for (int v = 0; v < n; v++) sum[m][v] = vn_fma(x, row[v], sum[m][v]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int v = 0; v < n; v++) vn_store(c + m * ldc + v * LANES, sum[m][v]);
}

/* Computes a tile of eight rows and `vectors` vectors. If the sums of all eight rows fit into the registers, computes
 * all rows at once. Otherwise computes four rows at a time. */
#define PS_TILE(vectors, rows_at_once)                                                                                 \
    static __attribute__((noinline)) void tile_##vectors(int add, int64_t depth, const float *a, int64_t a_row,        \
                                                         int64_t a_col, const float *b, int64_t ldb, float *c,         \
                                                         int64_t ldc)                                                  \
    {                                                                                                                  \
        for (int m = 0; m < ROWS; m += rows_at_once)                                                                   \
            tile(rows_at_once, vectors, add, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc);            \
    }
#if defined(__AVX512F__)
PS_TILE(1, 8)
PS_TILE(2, 8)
PS_TILE(3, 4)
PS_TILE(4, 4)
#else
PS_TILE(1, 4)
#endif

/* Computes a product with ROWS rows and any number of vectors. */
SIMD void product(int add, int64_t vectors, int64_t depth, const float *a, int64_t a_row, int64_t a_col,
                  const float *b, int64_t ldb, float *c, int64_t ldc)
{
    for (int64_t left = vectors; left > 0; left -= TILE_VECTORS, b += TILE_VECTORS * VL, c += TILE_VECTORS * VL) {
        switch (left < TILE_VECTORS ? left : TILE_VECTORS) {
        case 1: tile_1(add, depth, a, a_row, a_col, b, ldb, c, ldc); break;
#if defined(__AVX512F__)
        case 2: tile_2(add, depth, a, a_row, a_col, b, ldb, c, ldc); break;
        case 3: tile_3(add, depth, a, a_row, a_col, b, ldb, c, ldc); break;
        default: tile_4(add, depth, a, a_row, a_col, b, ldb, c, ldc); break;
#endif
        }
    }
}

/* -- functions ---------------------------------------------------------------------------------------------------- */
/* Returns 2^x for softmax, where x is at most slightly above 0. The error is 1 or 2 ulp. The result is 0 if x is below
 * -125, and NaN if x is NaN. */
SIMD vn vn_exp2_neg(vn x)
{
    vn xc = vn_max(vn_set(-125.0f), x);
    vn shifted = xc + vn_set(12582912.0f);                                  /* the low bits contain x rounded to an
                                                                             * integer */
    vn f = xc - (shifted - vn_set(12582912.0f));                            /* exact, with |f| <= 1/2 */
    vn p = vn_set(1.54531629e-4f);
    p = vn_fma(p, f, vn_set(1.33908634e-3f));
    p = vn_fma(p, f, vn_set(9.61808256e-3f));
    p = vn_fma(p, f, vn_set(5.55035711e-2f));
    p = vn_fma(p, f, vn_set(2.40226508e-1f));
    p = vn_fma(p, f, vn_set(6.93147188e-1f));
    p = vn_fma(p, f, vn_set(1.0f));
    vni y = (vni)((vnu)p + ((vnu)shifted << 23));                               /* adds the integer part of x to the
                                                                                 * exponent */
    return vn_and(~(x < vn_set(-125.0f)), (vn)y);
}
/* Returns log2 x for normal x > 0. Splits x into 2^e m with m in [0.7, 1.42). With s = (m - 1) / (m + 1), log2 m is
 * computed as 2 / ln 2 atanh(s). */
SIMD vf vf_log2(vf x)
{
    vi e = ((vi)x - vi_set(0x3f3504f3)) >> 23;
    vf m = (vf)(vi)((vu)x - ((vu)e << 23));
    vf s = (m - vf_set(1.0f)) / (m + vf_set(1.0f)), z = s * s;
    vf p = vf_set(0.320598898f);
    p = vf_fma(p, z, vf_set(0.412198583f));
    p = vf_fma(p, z, vf_set(0.577078016f));
    p = vf_fma(p, z, vf_set(0.961796694f));
    p = vf_fma(p, z, vf_set(2.88539008f));
    vf y = vf_fma(p, s, __builtin_convertvector(e, vf));
    return vf_select(x != x, x, y);
}

/* Writes the transpose of src [16, 16] to dst [16, 16]. */
SIMD void transpose16(const float *src, int64_t ld_src, float *dst, int64_t ld_dst)
{
#if defined(__AVX512F__)
    const vi lane = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    vf r[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) r[i] = vf_load(src + i * ld_src);
#pragma GCC unroll 4
    for (int s = 1; s < VL; s *= 2) {            /* swaps the off-diagonal s x s blocks of each 2s x 2s block */
        const vi odd = (lane & s) != 0;
        const vi low = (odd & (lane - s + VL)) | (~odd & lane), high = (odd & (lane + VL)) | (~odd & (lane + s));
#pragma GCC unroll 16
        for (int i = 0; i < VL; i++) {
            if (i & s) continue;
            vf a = r[i], b = r[i + s];
            r[i] = __builtin_shuffle(a, b, low);
            r[i + s] = __builtin_shuffle(a, b, high);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) vf_store(dst + i * ld_dst, r[i]);
#else
    for (int i = 0; i < VL; i++)
        for (int j = 0; j < VL; j++) dst[j * ld_dst + i] = src[i * ld_src + j];
#endif
}

/* -- dropout bits ------------------------------------------------------------------------------------------------- */
typedef uint64_t vq __attribute__((vector_size(64)));
SIMD vq vq_mul32(vq a, vq b)                      /* multiplies the low halves of the lanes of a and b; the high halves
                                                   * are ignored */
{
#if defined(__AVX512F__)
    return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#else
    return a * b;
#endif
}
SIMD void vu_mul_wide(vu a, uint32_t by, vu *low, vu *high)
{
    const vq half = { UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX };
    const vq f = { by, by, by, by, by, by, by, by };
    vq even = vq_mul32((vq)a & half, f), odd = vq_mul32((vq)a >> 32, f);
    *low = (vu)((even & half) | (odd << 32));
    *high = (vu)((even >> 32) | (odd & ~half));
}

/* Computes Philox4x32-10 for the 16 counters (lo + lane, hi). The low half of lo must not wrap around. Writes word w of
 * a lane's result to word[w][lane]. */
SIMD void philox16(uint64_t key, uint64_t lo, uint64_t hi, vu word[4])
{
    const vu lane = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    vu c0 = (vu)vi_set((int32_t)(uint32_t)lo) + lane, c1 = (vu)vi_set((int32_t)(uint32_t)(lo >> 32));
    vu c2 = (vu)vi_set((int32_t)(uint32_t)hi), c3 = (vu)vi_set((int32_t)(uint32_t)(hi >> 32));
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        vu l0, h0, l1, h1;
        vu_mul_wide(c0, 0xD2511F53u, &l0, &h0);
        vu_mul_wide(c2, 0xCD9E8D57u, &l1, &h1);
        c0 = h1 ^ c1 ^ k0, c2 = h0 ^ c3 ^ k1;
        c1 = l1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

/* Returns one bit for each of the elements [first, first + 64) of a sample's stream (see dropout in ops.def). The bit
 * is set if the element is kept. An element is kept if the number that its 24 random bits form is at least `limit`. */
SIMD uint64_t keep_bits(uint64_t key, uint64_t stream, uint64_t hi, uint64_t first, int32_t limit)
{
    uint64_t counter = first / 4, bits = 0, next = 0;
    int skip = (int)(first % 4), n = 0;
    if ((uint32_t)counter <= UINT32_MAX - VL) {
        vu word[4];
        philox16(key, stream | counter, hi, word);
        vu nibble = { 0 };
        for (int w = 0; w < 4; w++) nibble |= (vu)((vi)(word[w] >> 8) >= vi_set(limit)) & (1u << w);
        nibble <<= (vu){ 0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28 };
        uint32_t part[VL], low = 0, high = 0;
        memcpy(part, &nibble, sizeof part);
        for (int i = 0; i < 8; i++) low |= part[i], high |= part[i + 8];
        bits = low | (uint64_t)high << 32;
        n = VL;
    }
    for (; n < VL + (skip > 0); n++) {
        ps_philox r = ps_philox4x32(key, stream | (counter + (uint64_t)n), hi);
        uint64_t four = 0;
        for (int w = 0; w < 4; w++) four |= (uint64_t)((int32_t)(r.v[w] >> 8) >= limit) << w;
        if (n < VL) bits |= four << (4 * n);
        else next = four;
    }
    return skip ? bits >> skip | next << (64 - skip) : bits;
}
#endif
