/* SPDX-License-Identifier: BSD-3-Clause
 * Dot products of packed weights with 8-bit activations. llama.cpp's kernels (ggml_vec_dot) use the same method, with
 * one difference: here activations have one fp32 scale for each 32 values, for all types of weights.
 * A part of 32 weights has 8 integer sums of 4 products each. The integer sums are exact. The 8 sums of part j of a row
 * are multiplied by the scales, and are added to 8 of 16 lanes, starting at lane j % 2 * 8. The parts are added in the
 * order of j. At the end, the upper half of the lanes is added to the lower half, and this step is repeated until one
 * lane is left. Hence the bits do not depend on the instruction set, on the number of threads, or on the number of rows
 * of
 * x. */
#define PS_ANY_LANES
#include "backend/cpu/simd/packed_blocks.h"

enum { PART = PS_INT8_PART };

/* -- activations --------------------------------------------------------------------------------------------------- */
/* Converts a part of x to integers q = x / d, rounded to nearest even, with |q| <= 127. sums[l] is the sum of the four
 * elements of q that start at q[4 l]. d is NaN if an element of x is not finite. */
static void round_part(const float *x, ps_int8_part *out)
{
    vf most = vf_zero(), odd = vf_zero();
#pragma GCC unroll 8
    for (int k = 0; k < PART; k += VL) {
        vf v = vf_load(x + k);
        most = vf_max(vf_abs(v), most);
        odd += v * vf_zero();                        /* NaN if an element is not finite */
    }
    float lanes[VL], strange[VL], largest = 0, nan = 0;
    vf_store(lanes, most);
    vf_store(strange, odd);
    for (int i = 0; i < VL; i++) largest = lanes[i] > largest ? lanes[i] : largest, nan += strange[i];
    if (nan != 0 || largest < 1e-36f) {              /* if `largest` were smaller, 127 / largest could be infinite */
        memset(out->q, 0, sizeof out->q);
        memset(out->sums, 0, sizeof out->sums);
        out->d = nan;                                /* d is NaN or 0 */
        return;
    }
    out->d = largest / 127;
    vf by = vf_set(127 / largest);
    for (int k = 0; k < PART; k += VL) {
        vf v = vf_round(vf_load(x + k) * by);
        vb q = __builtin_convertvector(__builtin_convertvector(v, vi), vb);
        memcpy(out->q + k, &q, sizeof q);
    }
    for (int l = 0; l < 8; l++)
        out->sums[l] = out->q[4 * l] + out->q[4 * l + 1] + out->q[4 * l + 2] + out->q[4 * l + 3];
}

void PS_ISA_FN(ps_cpu_round_int8)(const float *x, int64_t parts, ps_int8_part *out)
{
    for (int64_t i = 0; i < parts; i++) round_part(x + i * PART, out + i);
}

/* -- 32 weights ---------------------------------------------------------------------------------------------------- */
/* u8x32 contains 32 bytes. i32x8 contains 8 sums, each of the products of 4 adjacent bytes. */
#if defined(__AVX2__)
typedef __m256i u8x32;
typedef __m256i i32x8;
SIMD u8x32 u8_load(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
SIMD u8x32 u8_and(u8x32 a, int mask) { return _mm256_and_si256(a, _mm256_set1_epi8((char)mask)); }
SIMD u8x32 u8_or(u8x32 a, u8x32 b) { return _mm256_or_si256(a, b); }
#define u8_right(a, n) _mm256_srli_epi16(a, n)       /* each byte is also filled with bits of the next byte */
#define u8_left(a, n) _mm256_slli_epi16(a, n)
SIMD u8x32 u8_nibbles(const uint8_t *p)              /* returns the lower halves of 16 bytes, then their upper halves */
{
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return u8_and(_mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)), 15);
}
SIMD u8x32 u8_bits(uint32_t bits)                    /* byte k is 255 if bit k is set, otherwise 0 */
{
    const __m256i from = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3,
                                          3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    __m256i all = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), from), bit);
    return _mm256_cmpeq_epi8(all, bit);
}
SIMD i32x8 dot_unsigned(u8x32 w, const int8_t *x)    /* the elements of w must be at most 127 */
{
    __m256i pairs = _mm256_maddubs_epi16(w, _mm256_loadu_si256((const __m256i *)x));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
SIMD i32x8 dot_signed(u8x32 w, const int8_t *x)
{
    __m256i v = _mm256_loadu_si256((const __m256i *)x);
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
SIMD i32x8 sums_load(const int32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
SIMD i32x8 sums_less(i32x8 a, i32x8 b, int by)       /* returns a - by * b, where `by` is a power of two */
{
    return _mm256_sub_epi32(a, _mm256_slli_epi32(b, __builtin_ctz((unsigned)by)));
}
#else
typedef struct u8x32 { uint8_t v[32]; } u8x32;
typedef struct i32x8 { int32_t v[8]; } i32x8;
#define EACH_BYTE(k) for (int k = 0; k < 32; k++)
SIMD u8x32 u8_load(const uint8_t *p) { u8x32 a; memcpy(a.v, p, 32); return a; }
SIMD u8x32 u8_and(u8x32 a, int mask) { EACH_BYTE(k) a.v[k] &= (uint8_t)mask; return a; }
SIMD u8x32 u8_or(u8x32 a, u8x32 b) { EACH_BYTE(k) a.v[k] |= b.v[k]; return a; }
SIMD u8x32 u8_right(u8x32 a, int n) { EACH_BYTE(k) a.v[k] = (uint8_t)(a.v[k] >> n); return a; }
SIMD u8x32 u8_left(u8x32 a, int n) { EACH_BYTE(k) a.v[k] = (uint8_t)(a.v[k] << n); return a; }
SIMD u8x32 u8_nibbles(const uint8_t *p)
{
    u8x32 a;
    EACH_BYTE(k) a.v[k] = k < 16 ? p[k] & 15 : p[k - 16] >> 4;
    return a;
}
SIMD u8x32 u8_bits(uint32_t bits) { u8x32 a; EACH_BYTE(k) a.v[k] = bits >> k & 1 ? 255 : 0; return a; }
SIMD i32x8 dot_unsigned(u8x32 w, const int8_t *x)
{
    i32x8 s = { { 0 } };
    EACH_BYTE(k) s.v[k / 4] += w.v[k] * x[k];
    return s;
}
SIMD i32x8 dot_signed(u8x32 w, const int8_t *x)
{
    i32x8 s = { { 0 } };
    EACH_BYTE(k) s.v[k / 4] += (int8_t)w.v[k] * x[k];
    return s;
}
SIMD i32x8 sums_load(const int32_t *p) { i32x8 s; memcpy(s.v, p, 32); return s; }
SIMD i32x8 sums_less(i32x8 a, i32x8 b, int by) { for (int l = 0; l < 8; l++) a.v[l] -= by * b.v[l]; return a; }
#endif

/* Adds s times d to 8 lanes of acc, starting at lane `first`. `first` is the constant 0 or 8. */
SIMD void add_to(vf acc[W], int first, i32x8 s, float d)
{
#if defined(__AVX512F__)
    __m256 half = _mm256_cvtepi32_ps(s);
    __m512 both = _mm512_insertf32x8(_mm512_castps256_ps512(half), half, 1);
    acc[0] = (vf)_mm512_mask3_fmadd_ps(both, _mm512_set1_ps(d), (__m512)acc[0], first ? 0xff00 : 0x00ff);
#elif PS_LANES == 8
    acc[first / 8] = vf_fma((vf)_mm256_cvtepi32_ps(s), vf_set(d), acc[first / 8]);
#else
    for (int h = 0; h < 8 / VL; h++) {
        vi v;
        memcpy(&v, (const int32_t *)&s + h * VL, sizeof v);
        acc[first / VL + h] = vf_fma(vf_from_int(v), vf_set(d), acc[first / VL + h]);
    }
#endif
}
/* Like add_to, but the factor is d for the first four of the eight lanes, and e for the other four. */
SIMD void add_halves(vf acc[W], int first, i32x8 s, float d, float e)
{
#if defined(__AVX512F__)
    __m256 half = _mm256_cvtepi32_ps(s), by = _mm256_set_m128(_mm_set1_ps(e), _mm_set1_ps(d));
    __m512 both = _mm512_insertf32x8(_mm512_castps256_ps512(half), half, 1);
    __m512 scales = _mm512_insertf32x8(_mm512_castps256_ps512(by), by, 1);
    acc[0] = (vf)_mm512_mask3_fmadd_ps(both, scales, (__m512)acc[0], first ? 0xff00 : 0x00ff);
#elif PS_LANES == 8
    vf by = (vf)_mm256_set_m128(_mm_set1_ps(e), _mm_set1_ps(d));
    acc[first / 8] = vf_fma((vf)_mm256_cvtepi32_ps(s), by, acc[first / 8]);
#else
    for (int h = 0; h < 8 / VL; h++) {
        vi v;
        memcpy(&v, (const int32_t *)&s + h * VL, sizeof v);
        acc[first / VL + h] = vf_fma(vf_from_int(v), vf_set(h * VL < 4 ? d : e), acc[first / VL + h]);
    }
#endif
}

/* The weights of a part are d * (q - zero) + m. In Q6_K, the factor of the first 16 weights is d, and the factor of the
 * other 16 weights is e. */
typedef struct part { u8x32 q; float d, e, m; } part;

SIMD part part_of(const uint8_t *s, int p, int T)
{
    part r = { .m = 0 };
    uint32_t high;
    int scale, min;
    switch (T) {
    case PS_Q8_0: r.q = u8_load(s + 2), r.d = half_at(s); break;
    case PS_Q4_0: r.q = u8_nibbles(s + 2), r.d = half_at(s); break;
    case PS_Q4_1: r.q = u8_nibbles(s + 4), r.d = half_at(s), r.m = half_at(s + 2); break;
    case PS_Q5_0:
        memcpy(&high, s + 2, 4);
        r.q = u8_or(u8_nibbles(s + 6), u8_and(u8_bits(high), 16)), r.d = half_at(s);
        break;
    case PS_Q5_1:
        memcpy(&high, s + 4, 4);
        r.q = u8_or(u8_nibbles(s + 8), u8_and(u8_bits(high), 16)), r.d = half_at(s), r.m = half_at(s + 2);
        break;
    case PS_Q4_K: case PS_Q5_K:
        ps_blocks_scale(s + 4, p, &scale, &min);
        r.d = half_at(s) * (float)scale, r.m = -(half_at(s + 2) * (float)min);
        r.q = u8_load(s + (T == PS_Q4_K ? 16 : 48) + p / 2 * 32);
        r.q = u8_and(p % 2 ? u8_right(r.q, 4) : r.q, 15);
        if (T == PS_Q5_K) r.q = u8_or(r.q, u8_left(u8_and(u8_right(u8_load(s + 16), p), 1), 4));
        break;
    default:                                         /* Q6_K */
        r.q = u8_load(s + p / 4 * 64 + p % 2 * 32);
        r.q = u8_and(p % 4 / 2 ? u8_right(r.q, 4) : r.q, 15);
        r.q = u8_or(r.q, u8_left(u8_and(u8_right(u8_load(s + 128 + p / 4 * 32), p % 4 * 2), 3), 4));
        r.d = half_at(s + 208) * (float)(int8_t)s[192 + 2 * p];
        r.e = half_at(s + 208) * (float)(int8_t)s[193 + 2 * p];
    }
    return r;
}

SIMD void add_part(vf acc[W], int first, part r, const ps_int8_part *x, int T)
{
    i32x8 sums, dot = T == PS_Q8_0 ? dot_signed(r.q, x->q) : dot_unsigned(r.q, x->q);
    if (T != PS_Q8_0) sums = sums_load(x->sums);
    if (T == PS_Q4_0) dot = sums_less(dot, sums, 8);
    if (T == PS_Q5_0) dot = sums_less(dot, sums, 16);
    if (T == PS_Q6_K) add_halves(acc, first, sums_less(dot, sums, 32), r.d * x->d, r.e * x->d);
    else add_to(acc, first, dot, r.d * x->d);
    if (T == PS_Q4_1 || T == PS_Q5_1 || T == PS_Q4_K || T == PS_Q5_K) add_to(acc, first, sums, r.m * x->d);
}

/* -- rows ---------------------------------------------------------------------------------------------------------- */
/* For each of `lines` rows of w, multiplies one block of the row by the matching parts of x and adds the products to
 * acc. The rows are `apart` bytes apart. `first` is the lane of acc for the first part of the block. */
SIMD void block_of_lines(vf acc[LINES][W], int lines, const uint8_t *w, int64_t apart, int64_t next,
                         const ps_int8_part *x, int first, int T)
{
#pragma GCC unroll 8
    for (int p = 0; p < parts_of(T); p++) {
#pragma GCC unroll 4
        for (int i = 0; i < lines; i++) {
            __builtin_prefetch(w + i * apart + next + p * PART, 0, 3);
            add_part(acc[i], (first + p * 8) % 16, part_of(w + i * apart, p, T), x + p, T);
        }
    }
}

/* Multiplies x [K] by `lines` rows of w, and stores the products in out [lines]. */
SIMD void fused(float *out, int lines, const ps_int8_part *x, const uint8_t *w, int64_t apart, int64_t next,
                const ps_blocks *b, int64_t blocks, int T)
{
    vf acc[LINES][W];
    int64_t j = 0;
#pragma GCC unroll 4
    for (int i = 0; i < lines; i++)
#pragma GCC unroll 4
        for (int v = 0; v < W; v++) acc[i][v] = vf_zero();
    if (parts_of(T) == 1)
        for (; j + 1 < blocks; j += 2) {
            block_of_lines(acc, lines, w + j * b->bytes, apart, next, x + j, 0, T);
            block_of_lines(acc, lines, w + (j + 1) * b->bytes, apart, next, x + j + 1, 8, T);
        }
    for (; j < blocks; j++) block_of_lines(acc, lines, w + j * b->bytes, apart, next, x + j * parts_of(T), 0, T);
#pragma GCC unroll 4
    for (int i = 0; i < lines; i++) out[i] = sum_lanes(acc[i]);
}

/* Multiplies x by at most `most` rows of the matrix, starting at row n0. Divides these rows
 * into LINES groups of consecutive rows, and reads one row of each group at a time. */
SIMD void piece(const ps_packed_matrix *w, const ps_blocks *b, const ps_int8_part *x, int64_t M, float *c, int64_t n0,
                int64_t most, int T)
{
    int64_t count = w->rows - n0 < most ? w->rows - n0 : most, quarter = count / LINES;
    int64_t blocks = w->cols / b->block, parts = w->cols / PART, size = w->row_nbytes;
    const uint8_t *first = w->data + n0 * size;
    for (int64_t m = 0; m < M; m++, x += parts, c += w->rows) {
        for (int64_t t = 0; t < quarter; t++) {
            float out[LINES];
            fused(out, LINES, x, first + t * size, quarter * size, size, b, blocks, T);
            for (int i = 0; i < LINES; i++) c[n0 + i * quarter + t] = out[i];
        }
        for (int64_t n = quarter * LINES; n < count; n++)
            fused(c + n0 + n, 1, x, first + n * size, 0, 0, b, blocks, T);
    }
}

/* Runs body(.., T), where T is a constant for the type. ps_blocks_int8() must return true for the type. */
#define BY_TYPE(type, body, ...) \
    do { \
        switch (type) { PS_INT8_CASES(body, __VA_ARGS__) } \
    } while (0)

void PS_ISA_FN(ps_cpu_int8_dots)(const ps_packed_matrix *w, const ps_int8_part *x, int64_t M, float *c)
{
    const ps_blocks *b = ps_blocks_of(w->type);
    int64_t step = rows_of_piece(w, M);
#pragma omp parallel for schedule(static) if (w->rows * w->cols > PS_PAR_MIN)
    for (int64_t n0 = 0; n0 < w->rows; n0 += step) BY_TYPE(w->type, piece, w, b, x, M, c, n0, step);
}
