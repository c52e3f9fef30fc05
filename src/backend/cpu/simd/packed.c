/* SPDX-License-Identifier: BSD-3-Clause
 * Packed weights: conversion of packed numbers to floats, and dot products of packed weights with fp32 values. The
 * conversion computes the same bits as base/blocks.c. A sum has 16 lanes. The product with element n of a row is added
 * to lane n % 16, in the order of n. At the end, the upper half of the lanes is added to the lower half, and this step
 * is repeated until one lane is left. Hence the bits depend neither on the instruction set nor on the number of rows of
 * x. */
#define PS_ANY_LANES
#include "backend/cpu/simd/packed_blocks.h"

enum { PART = 32 };                                  /* number of values in a part of a block; a part has its own
                                                      * scales */

/* Load VL adjacent bytes as unsigned or signed integers. */
SIMD vi load_u8(const uint8_t *p)
{
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif PS_LANES == 8
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vb b;
    memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, vi);
#endif
}
SIMD vi load_i8(const uint8_t *p)
{
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif PS_LANES == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return (load_u8(p) ^ vi_set(128)) - vi_set(128);
#endif
}

/* The scales of 32 values. A value is d * q + m or d * q - m, where q is its integer. The first 16 values use d[0], and
 * the other 16 values use d[1]. */
typedef struct scales { float d[2], m; uint32_t high; } scales;

/* `of_weight` contains the scales of a whole weight with double quantization. `number` is the index of the block in
 * this weight. */
SIMD scales scales_of(const uint8_t *s, int p, const float *of_weight, int64_t number, int T)
{
    scales c = { { 0 }, 0, 0 };
    int scale, min;
    switch (T) {
    case PS_Q4_1: case PS_Q5_1: c.m = half_at(s + 2); /* fall through */
    case PS_Q4_0: case PS_Q5_0: case PS_Q8_0: c.d[0] = half_at(s); break;
    case PS_Q4_K: case PS_Q5_K:
        ps_blocks_scale(s + 4, p, &scale, &min);
        c.d[0] = half_at(s) * (float)scale, c.m = half_at(s + 2) * (float)min;
        break;
    case PS_Q6_K:
        c.d[0] = half_at(s + 208) * (float)(int8_t)s[192 + 2 * p];
        c.d[1] = half_at(s + 208) * (float)(int8_t)s[193 + 2 * p];
        break;
    case PS_NF4_DOUBLE: c.d[0] = ps_blocks_double_scale(s, of_weight, number); break;
    default: memcpy(c.d, s, 4);                      /* NF4 */
    }
    if (T == PS_Q5_0) memcpy(&c.high, s + 2, 4);
    if (T == PS_Q5_1) memcpy(&c.high, s + 4, 4);
    if (T != PS_Q6_K) c.d[1] = c.d[0];
    return c;
}

/* Returns the lower four bits of the integers [k, k + VL) of a block of type Q4_0, Q4_1, Q5_0 or Q5_1. s points to the
 * integers of the block. */
SIMD vi nibbles(const uint8_t *s, int k)
{
    vi q = load_u8(s + k % 16);
    return k < 16 ? q & vi_set(15) : q >> 4;
}
SIMD vi fifth_bits(uint32_t high, int k)
{
    vi lane = PS_LANE_NUMBERS;
    return (vi)(((vu)vi_set((int)high) >> (vu)(lane + vi_set(k))) & (vu)vi_set(1)) << 4;
}

SIMD vf nf4_values(const uint8_t *s)                 /* reads VL / 2 bytes; the first of a byte's two values is in its
                                                      * upper half */
{
#if defined(__AVX512F__)
    const vi by = { 4, 0, 12, 8, 20, 16, 28, 24, 4, 0, 12, 8, 20, 16, 28, 24 };
    uint32_t a, b;
    memcpy(&a, s, 4);
    memcpy(&b, s + 4, 4);
    __m512i two = _mm512_inserti64x4(_mm512_set1_epi32((int)a), _mm256_set1_epi32((int)b), 1);
    return (vf)_mm512_permutexvar_ps(_mm512_srlv_epi32(two, (__m512i)by), _mm512_loadu_ps(ps_nf4));
#elif PS_LANES == 8
    const vi by = { 4, 0, 12, 8, 20, 16, 28, 24 };
    uint32_t a;
    memcpy(&a, s, 4);
    __m256i at = _mm256_srlv_epi32(_mm256_set1_epi32((int)a), (__m256i)by);
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(ps_nf4), at);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(ps_nf4 + 8), at);
    return (vf)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
    vf v;
    for (int i = 0; i < VL; i++) v[i] = ps_nf4[i % 2 ? s[i / 2] & 15 : s[i / 2] >> 4];
    return v;
#endif
}

/* Returns the values [k, k + VL) of part p of a block. */
SIMD vf values(const uint8_t *s, scales c, int p, int k, int T)
{
    vf d = vf_set(c.d[k / 16]);
    vi q;
    switch (T) {
    case PS_Q8_0: return vf_from_int(load_i8(s + 2 + k)) * d;
    case PS_Q4_0: return d * vf_from_int(nibbles(s + 2, k) - vi_set(8));
    case PS_Q4_1: return d * vf_from_int(nibbles(s + 4, k)) + vf_set(c.m);
    case PS_Q5_0: return d * vf_from_int((nibbles(s + 6, k) | fifth_bits(c.high, k)) - vi_set(16));
    case PS_Q5_1: return d * vf_from_int(nibbles(s + 8, k) | fifth_bits(c.high, k)) + vf_set(c.m);
    case PS_Q4_K:
        q = load_u8(s + 16 + p / 2 * 32 + k);
        return d * vf_from_int((q >> (p % 2 * 4)) & vi_set(15)) - vf_set(c.m);
    case PS_Q5_K:
        q = (load_u8(s + 48 + p / 2 * 32 + k) >> (p % 2 * 4)) & vi_set(15);
        return d * vf_from_int(q | ((load_u8(s + 16 + k) >> p) & vi_set(1)) << 4) - vf_set(c.m);
    case PS_Q6_K:
        q = (load_u8(s + p / 4 * 64 + p % 2 * 32 + k) >> (p % 4 / 2 * 4)) & vi_set(15);
        q |= ((load_u8(s + 128 + p / 4 * 32 + k) >> (p % 4 * 2)) & vi_set(3)) << 4;
        return d * vf_from_int(q - vi_set(32));
    default: return nf4_values(s + (T == PS_NF4_DOUBLE ? 1 : 4) + (p * PART + k) / 2) * d;
    }
}

/* Runs body(.., T), where T is a constant for the type. T is -1 for the types whose blocks base/blocks.c unpacks. */
#define BY_TYPE(type, body, ...) \
    do { \
        switch (type) { \
        PS_INT8_CASES(body, __VA_ARGS__) \
        case PS_NF4: body(__VA_ARGS__, PS_NF4); break; \
        case PS_NF4_DOUBLE: body(__VA_ARGS__, PS_NF4_DOUBLE); break; \
        default: body(__VA_ARGS__, -1); \
        } \
    } while (0)

/* -- unpacking ----------------------------------------------------------------------------------------------------- */
SIMD void unpack_block(const ps_blocks *b, const uint8_t *s, const float *of_weight, int64_t number, float *out, int T)
{
    if (T < 0) {
        b->unpack(s, out);
        return;
    }
    int parts = b->block / PART;
    for (int p = 0; p < parts; p++) {
        scales c = scales_of(s, p, of_weight, number, T);
#pragma GCC unroll 8
        for (int k = 0; k < PART; k += VL) vf_store(out + p * PART + k, values(s, c, p, k, T));
    }
}

#if defined(__AVX512BW__)
/* Returns true if a block of this type has at most 16 different values. */
SIMD bool has_16_values(int T) { return T == PS_Q4_0 || T == PS_Q4_1 || T == PS_NF4 || T == PS_NF4_DOUBLE; }

/* Like unpack_block, but unpacks to bf16. It rounds the 16 values that a block can contain once per block, and then
 * looks up each number in the table of these values. */
SIMD void unpack_16_values(const ps_blocks *b, const uint8_t *s, const float *of_weight, int64_t number, uint16_t *out,
                           int T)
{
    scales c = scales_of(s, 0, of_weight, number, T);
    bool nf4 = T == PS_NF4 || T == PS_NF4_DOUBLE;
    const vi lane = PS_LANE_NUMBERS;
    vf d = vf_set(c.d[0]), all = nf4 ? vf_load(ps_nf4) * d : d * vf_from_int(T == PS_Q4_0 ? lane - vi_set(8) : lane);
    if (T == PS_Q4_1) all = all + vf_set(c.m);
    vh half = vf_to_bf16(all);
    __m256i rounded;
    memcpy(&rounded, &half, sizeof rounded);
    __m512i table = _mm512_castsi256_si512(rounded), at;
    for (int k = 0; k < b->block; k += 32) {
        __m128i q = _mm_loadu_si128((const __m128i *)(s + b->bytes - b->block / 2 + k / 2));
        if (nf4) {                                   /* the first of a byte's two values is in its upper half */
            __m512i wide = _mm512_cvtepu8_epi32(q);
            at = _mm512_or_si512(_mm512_srli_epi32(wide, 4), _mm512_slli_epi32(wide, 16));
            at = _mm512_and_si512(at, _mm512_set1_epi16(15));
        } else {
            __m128i mask = _mm_set1_epi8(15), high = _mm_and_si128(_mm_srli_epi16(q, 4), mask);
            at = _mm512_cvtepu8_epi16(_mm256_set_m128i(high, _mm_and_si128(q, mask)));
        }
        _mm512_storeu_si512(out + k, _mm512_permutexvar_epi16(at, table));
    }
}
#endif

SIMD void unpack_all(const ps_blocks *b, const uint8_t *s, int64_t n, const float *of_weight, int64_t number, void *out,
                     int dtype, int T)
{
    for (int64_t i = 0; i < n; i++, s += b->bytes) {
        float v[PS_BLOCKS_MOST];
        if (dtype == PS_F32) {
            unpack_block(b, s, of_weight, number + i, (float *)out + i * b->block, T);
            continue;
        }
#if defined(__AVX512BW__)
        if (dtype == PS_BF16 && has_16_values(T)) {
            unpack_16_values(b, s, of_weight, number + i, (uint16_t *)out + i * b->block, T);
            continue;
        }
#endif
        unpack_block(b, s, of_weight, number + i, v, T);
        for (int k = 0; k < b->block; k += VL) vf_put(out, i * b->block + k, dtype, vf_load(v + k));
    }
}

void PS_ISA_FN(ps_cpu_unpack)(int type, const uint8_t *blocks, int64_t n, const float *of_weight, int64_t number,
                              void *out, int dtype)
{
    const ps_blocks *b = ps_blocks_of(type);
    BY_TYPE(type, unpack_all, b, blocks, n, of_weight, number, out, dtype);
}

/* -- dot products -------------------------------------------------------------------------------------------------- */
/* Multiplies x [K] by LINES rows of the matrix, and stores the products in out [LINES]. The rows are n, n + apart, and
 * so on. */
SIMD void fused(float *out, const float *x, const ps_packed_matrix *m, int64_t n, int64_t apart, const ps_blocks *b,
                int64_t blocks, int T)
{
    vf s[LINES][W];
    int parts = parts_of(T);
#pragma GCC unroll 4
    for (int i = 0; i < LINES; i++)
#pragma GCC unroll 4
        for (int v = 0; v < W; v++) s[i][v] = vf_zero();
    for (int64_t j = 0; j < blocks; j++)
#pragma GCC unroll 8
        for (int p = 0; p < parts; p++, x += PART) {
#pragma GCC unroll 4
            for (int i = 0; i < LINES; i++) {
                int64_t row = n + i * apart;
                const uint8_t *at = m->data + row * m->row_nbytes + j * b->bytes;
                __builtin_prefetch(at + m->row_nbytes + p * PART, 0, 3);         /* the row that is read next */
                scales c = scales_of(at, p, m->scales, row * blocks + j, T);
#pragma GCC unroll 8
                for (int k = 0; k < PART; k += VL)
                    s[i][k / VL % W] = vf_fma(vf_load(x + k), values(at, c, p, k, T), s[i][k / VL % W]);
            }
        }
#pragma GCC unroll 4
    for (int i = 0; i < LINES; i++) out[i] = sum_lanes(s[i]);
}

/* Like fused, but multiplies row n of the matrix by M rows of x. Each block of the matrix row is unpacked only once. */
SIMD void several(float *out, const float *x, int64_t M, const ps_packed_matrix *m, int64_t n, const ps_blocks *b,
                  int64_t blocks, int T)
{
    float lanes[PS_PACKED_ROWS][16] = { { 0 } }, v[PS_BLOCKS_MOST];
    const uint8_t *w = m->data + n * m->row_nbytes;
    for (int64_t j = 0; j < blocks; j++, w += b->bytes, x += b->block) {
        unpack_block(b, w, m->scales, n * blocks + j, v, T);
        for (int64_t r = 0; r < M; r++) {
            vf s[W];
            for (int i = 0; i < W; i++) s[i] = vf_load(lanes[r] + i * VL);
            for (int k = 0; k < b->block; k += 16)
                for (int i = 0; i < W; i++)
                    s[i] = vf_fma(vf_load(x + r * m->cols + k + i * VL), vf_load(v + k + i * VL), s[i]);
            for (int i = 0; i < W; i++) vf_store(lanes[r] + i * VL, s[i]);
        }
    }
    for (int64_t r = 0; r < M; r++) {
        vf s[W];
        for (int i = 0; i < W; i++) s[i] = vf_load(lanes[r] + i * VL);
        out[r * m->rows] = sum_lanes(s);
    }
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Multiplies x by at most `most` rows of the matrix, starting at row n0. Divides these rows
 * into LINES groups of consecutive rows, and reads one row of each group at a time. */
SIMD void piece(const ps_packed_matrix *w, const ps_blocks *b, const float *x, int64_t M, float *c, int64_t n0,
                int64_t most, int T)
{
    int64_t count = least(most, w->rows - n0), quarter = count / LINES, blocks = w->cols / b->block;
    int64_t done = 0;
    if (M == 1 && T >= 0) {
        for (int64_t t = 0; t < quarter; t++) {
            float out[LINES];
            fused(out, x, w, n0 + t, quarter, b, blocks, T);
            for (int i = 0; i < LINES; i++) c[n0 + i * quarter + t] = out[i];
        }
        done = quarter * LINES;
    }
    for (int64_t n = done; n < count; n++)
        several(c + n0 + n, x, M, w, n0 + n, b, blocks, T);
}

void PS_ISA_FN(ps_cpu_packed_dots)(const ps_packed_matrix *w, const float *x, int64_t M, float *c)
{
    const ps_blocks *b = ps_blocks_of(w->type);
    int64_t step = rows_of_piece(w, M);
#pragma omp parallel for schedule(static) if (w->rows * w->cols > PS_PAR_MIN)
    for (int64_t n0 = 0; n0 < w->rows; n0 += step) BY_TYPE(w->type, piece, w, b, x, M, c, n0, step);
}
