/* SPDX-License-Identifier: BSD-3-Clause
 * Converts optimizer states to 8-bit codes and back, with vectors. The formulas and the order of operations are those
 * of base/update.h. A file that defines PS_ANY_LANES includes this header after optim_list.h. */
#ifndef PS_CPU_SIMD_CODES_H
#define PS_CPU_SIMD_CODES_H
#include "base/update.h"

enum { CODES_RUN = 32 };              /* number of elements that are quantised together; a multiple of VL */

/* Returns row[index % 8] in each lane. `row` is one of the arrays of ps_codes, whose second half equals its first
 * half. */
SIMD vf codes_row(const float *row, vi index)
{
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(row));
#elif PS_LANES == 8
    return (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(row), (__m256i)index);
#else
    vf x;
    for (int i = 0; i < VL; i++) x[i] = row[index[i] & 7];
    return x;
#endif
}
/* Returns the values that VL codes represent. */
SIMD vf codes_load(const ps_codes *c, const uint8_t *codes, bool has_sign)
{
#if defined(__AVX512F__)
    vi n = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
#elif PS_LANES == 8
    vi n = (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
#else
    vb b;
    memcpy(&b, codes, sizeof b);
    vi n = __builtin_convertvector(b, vi);
#endif
    vf q = vf_from_int(has_sign ? n + n - vi_set(254) : n + vi_set(1));
    vi index = (vi)((vu)q >> 23);
    vf base = codes_row(c->base, index);
    if (has_sign) base = (vf)((vi)base ^ ((vi)q & vi_set(INT32_MIN)));
    return vf_fma(codes_row(c->slope, index), q, base);
}
/* Returns the index of the value that is nearest to the magnitude, in each lane. */
SIMD vi codes_number(const ps_codes *c, vf magnitude)
{
    vi high = (vi)((vu)magnitude >> 16);
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m256i above = _mm256_subs_epu16((__m256i)high, _mm256_set1_epi32(PS_CODES_LEAST));
    vi j = (vi)_mm256_mulhi_epu16(above, _mm256_set1_epi32(PS_CODES_SPREAD));
#else
    vi j = high - vi_set(PS_CODES_LEAST);
    j = (j & (j > vi_set(0))) * PS_CODES_SPREAD >> 16;
#endif
    j -= magnitude >= codes_row(c->bound, j);
    vf k = vf_min(vf_fma(magnitude, codes_row(c->rate, j), codes_row(c->shift, j)), codes_row(c->limit, j));
    return __builtin_convertvector(k, vi) + (vi)codes_row((const float *)(const void *)c->first, j);
}
SIMD vi codes_nearest(const ps_codes *c, vf x, bool has_sign)
{
    if (!has_sign) return codes_number(c, x);
    vi number = codes_number(c, vf_abs(x)), sign = (vi)x >> 31;
    return ((number ^ sign) - sign) + vi_set(127);
}
/* Multiplies the CODES_RUN numbers x by `factor`, and stores their codes. Stores a code of -1 as 0. */
SIMD void codes_store(const ps_codes *c, uint8_t *codes, const float *x, float factor, bool has_sign)
{
#if PS_LANES == 8 && defined(__AVX2__)
    __m256i part[4];
    _Pragma("GCC unroll 4")
    for (int k = 0; k < 4; k++) part[k] = (__m256i)codes_nearest(c, vf_load(x + 8 * k) * factor, has_sign);
    __m256i low = _mm256_packs_epi32(part[0], part[1]), high = _mm256_packs_epi32(part[2], part[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    low = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    _mm256_storeu_si256((__m256i *)codes, low);
#else
    for (int k = 0; k < CODES_RUN; k += VL) {
        vi code = codes_nearest(c, vf_load(x + k) * factor, has_sign);
        if (has_sign) code = code & ~(code >> 31);
#if defined(__AVX512F__)
        _mm_storeu_si128((__m128i *)(codes + k), _mm512_cvtepi32_epi8((__m512i)code));
#else
        vb b = __builtin_convertvector(code, vb);
        memcpy(codes + k, &b, sizeof b);
#endif
    }
#endif
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */
/* Returns the larger of `most` and the magnitude of x in each lane. Magnitudes are compared as integers that have the
 * same bits. In this order, a NaN is larger than every number. */
SIMD vi codes_most(vi most, vf x)
{
    vi bits = (vi)x & vi_set(0x7fffffff), larger = bits > most;
    return (larger & bits) | (~larger & most);
}
/* Quantises a block of n <= PS_STATE_BLOCK numbers. x has PS_STATE_BLOCK + CODES_RUN elements, and the elements after
 * the first n are overwritten. `most` contains the largest magnitude of each lane. */
SIMD void codes_store_block(const ps_codes *c, float *x, int64_t n, vi most, uint8_t *codes, float *scale,
                            bool has_sign)
{
    int32_t of_lane[VL], largest = 0;
    memcpy(of_lane, &most, sizeof of_lane);
    for (int i = 0; i < VL; i++) largest = of_lane[i] > largest ? of_lane[i] : largest;
    *scale = ps_bits_f32((uint32_t)largest);
    if (largest >= 0x7f800000) {
        memset(codes, 0, (size_t)n);
        return;
    }
    float factor = ps_codes_factor(*scale);
    int64_t i = 0;
    for (; i + CODES_RUN <= n; i += CODES_RUN) codes_store(c, codes + i, x + i, factor, has_sign);
    if (i == n) return;
    uint8_t rest[CODES_RUN];
    memset(x + n, 0, CODES_RUN * sizeof *x);
    codes_store(c, rest, x + i, factor, has_sign);
    memcpy(codes + i, rest, (size_t)(n - i));
}
#endif
