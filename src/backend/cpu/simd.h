/* SPDX-License-Identifier: BSD-3-Clause
 * Vectors of sixteen float lanes on every machine, as a GCC vector type. Such a vector takes one register with AVX-512,
 * two registers with AVX2, and four registers with SSE. Every kernel is compiled once per instruction set (PS_ISA) from
 * the same source. All sets compute the same bits, because they use the same lanes, the same order of sums and explicit
 * fused multiply-adds. No kernel may rely on contraction, because the build sets -ffp-contract=off. If a row does not
 * end with a whole vector, its last elements are loaded with padding and computed in the same order.
 *
 * GCC generates slow code for vectors that are wider than a register. It keeps them in memory and often computes lane
 * by lane. A file that never combines different lanes can define PS_ANY_LANES before it includes this header. In such a
 * file, vectors have eight lanes with AVX2 and four lanes with lower sets, and the file must use VL instead of 16. */
#ifndef PS_CPU_SIMD_H
#define PS_CPU_SIMD_H
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif
#include "base/half.h"

#define PS_CAT2(a, b) a##_##b
#define PS_CAT(a, b) PS_CAT2(a, b)
#define PS_ISA_FN(name) PS_CAT(name, PS_ISA)      /* name_sse2, name_avx2, name_avx512 */

#if !defined(PS_ANY_LANES) || defined(__AVX512F__)
#define PS_LANES 16
#elif defined(__AVX2__)
#define PS_LANES 8
#else
#define PS_LANES 4
#endif
enum { VL = PS_LANES };
typedef float vf __attribute__((vector_size(PS_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(PS_LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(PS_LANES * 4)));
typedef uint64_t vw __attribute__((vector_size(PS_LANES * 4)));    /* vector of 64-bit lanes, half as many as the lanes
                                                                    * of a vf */
typedef uint16_t vh __attribute__((vector_size(PS_LANES * 2)));
typedef uint8_t vb __attribute__((vector_size(PS_LANES)));

#define SIMD static inline __attribute__((always_inline))

#if PS_LANES == 16
#define PS_EACH_LANE(x) { x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x }
#define PS_LANE_NUMBERS { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 }
#elif PS_LANES == 8
#define PS_EACH_LANE(x) { x, x, x, x, x, x, x, x }
#define PS_LANE_NUMBERS { 0, 1, 2, 3, 4, 5, 6, 7 }
#else
#define PS_EACH_LANE(x) { x, x, x, x }
#define PS_LANE_NUMBERS { 0, 1, 2, 3 }
#endif
#if PS_LANES == 4 && defined(__SSE2__)
#define PS_SSE2                                    /* a vector is one SSE register, and no instruction of a newer set is
                                                    * available */
#endif
SIMD vf vf_set(float x) { return (vf)PS_EACH_LANE(x); }
SIMD vf vf_zero(void) { return (vf){ 0 }; }
SIMD vi vi_set(int32_t x) { return (vi)PS_EACH_LANE(x); }

#if defined(__SSE2__) && !defined(__FMA__)
/* Computes a * b + c in fp64. If the result is rounded again to fp32, the value is the same as that of the exact sum
 * rounded to fp32 directly. The product of two floats is exact in fp64. If the sum is inexact, it is rounded to odd
 * (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
 * Knuth's TwoSum computes the error of the sum. */
SIMD __m128d vf_fma_odd(__m128d a, __m128d b, __m128d c)
{
    const __m128i one = _mm_set1_epi64x(1);
    __m128d p = _mm_mul_pd(a, b), s = _mm_add_pd(p, c), t = _mm_sub_pd(s, p);
    __m128d rest = _mm_add_pd(_mm_sub_pd(p, _mm_sub_pd(s, t)), _mm_sub_pd(c, t));
    __m128i inexact = _mm_castpd_si128(_mm_and_pd(_mm_cmpneq_pd(rest, _mm_setzero_pd()), _mm_cmpord_pd(rest, rest)));
    __m128i bits = _mm_castpd_si128(s), even = _mm_andnot_si128(bits, one);
    /* 1 if the step must be towards zero, otherwise 0 */
    __m128i apart = _mm_srli_epi64(_mm_xor_si128(bits, _mm_castpd_si128(rest)), 63);
    /* 1 or -1 if the sum is even, otherwise 0 */
    __m128i step = _mm_sub_epi64(even, _mm_add_epi64(apart, apart));
    step = _mm_and_si128(step, _mm_sub_epi64(_mm_setzero_si128(), even));
    return _mm_castsi128_pd(_mm_add_epi64(bits, _mm_and_si128(step, inexact)));
}
static __attribute__((noinline, unused)) __m128 vf_fma_sse2(__m128 a, __m128 b, __m128 c)
{
    __m128 low = _mm_cvtpd_ps(vf_fma_odd(_mm_cvtps_pd(a), _mm_cvtps_pd(b), _mm_cvtps_pd(c)));
    a = _mm_movehl_ps(a, a), b = _mm_movehl_ps(b, b), c = _mm_movehl_ps(c, c);
    return _mm_movelh_ps(low, _mm_cvtpd_ps(vf_fma_odd(_mm_cvtps_pd(a), _mm_cvtps_pd(b), _mm_cvtps_pd(c))));
}
#endif
#if !defined(__AVX512F__) && !defined(__FMA__)
#define VF_FMA static __attribute__((noinline, unused))
#else
#define VF_FMA SIMD
#endif
VF_FMA vf vf_fma(vf a, vf b, vf c)                 /* returns a * b + c, rounded once */
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif PS_LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)
    union { vf v; __m256 h[2]; } x = { a }, y = { b }, z = { c };
    z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
    z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
    return z.v;
#elif defined(PS_SSE2)
    return (vf)vf_fma_sse2((__m128)a, (__m128)b, (__m128)c);
#elif defined(__SSE2__)
    union { vf v; __m128 q[4]; } x = { a }, y = { b }, z = { c };
    for (int i = 0; i < 4; i++) z.q[i] = vf_fma_sse2(x.q[i], y.q[i], z.q[i]);
    return z.v;
#else
    for (int i = 0; i < VL; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}
SIMD vf vf_sqrt(vf a)
{
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)a);
#elif PS_LANES == 8
    return (vf)_mm256_sqrt_ps((__m256)a);
#elif defined(__AVX__)
    union { vf v; __m256 h[2]; } x = { a };
    x.h[0] = _mm256_sqrt_ps(x.h[0]);
    x.h[1] = _mm256_sqrt_ps(x.h[1]);
    return x.v;
#elif defined(PS_SSE2)
    return (vf)_mm_sqrt_ps((__m128)a);
#else
    for (int i = 0; i < VL; i++) a[i] = sqrtf(a[i]);
    return a;
#endif
}
SIMD vf vf_select(vi mask, vf a, vf b)             /* returns a in lanes where all bits of mask are set, and b in lanes
                                                    * where mask is 0 */
{
    return (vf)((mask & (vi)a) | (~mask & (vi)b));
}
/* vf_max returns the larger of two values, and vf_min the smaller. If one of the values is NaN, or if both are zeros,
 * the functions return b. Hence vf_max(vf_set(c), x) returns NaN if x is NaN. */
SIMD vf vf_max(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif PS_LANES == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(PS_SSE2)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return vf_select(a > b, a, b);
#endif
}
SIMD vf vf_min(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif PS_LANES == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(PS_SSE2)
    return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
    return vf_select(a < b, a, b);
#endif
}
SIMD vf vf_abs(vf a) { return (vf)((vi)a & vi_set(0x7fffffff)); }

SIMD vf vf_copysign(vf a, vf sign)                 /* returns the magnitude of a with the sign of `sign` */
{
    return (vf)(((vi)a & vi_set(0x7fffffff)) | ((vi)sign & vi_set(INT32_MIN)));
}
SIMD vf vf_from_int(vi a) { return __builtin_convertvector(a, vf); }
SIMD int vi_any(vi mask)                           /* true if the mask of any lane is set */
{
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif PS_LANES == 8
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif PS_LANES == 4
    vw w = (vw)mask;
    return (w[0] | w[1]) != 0;
#else
    vw w = (vw)mask;
    return (w[0] | w[1] | w[2] | w[3] | w[4] | w[5] | w[6] | w[7]) != 0;
#endif
}
/* Returns one byte per lane. The byte is 1 if the lane's mask is set, otherwise 0. */
SIMD vb vi_to_bool(vi mask) { return __builtin_convertvector(mask & 1, vb); }

/* Round each lane to an integer. vf_round rounds to the nearest integer, and ties to even. vf_floor rounds down.
 * vf_ceil rounds up. */
#if defined(__AVX512F__)
#define PS_VF_ROUND(name, mode, scalar) \
    SIMD vf name(vf a) { return (vf)_mm512_roundscale_ps((__m512)a, (mode) | _MM_FROUND_NO_EXC); }
#elif PS_LANES == 8
#define PS_VF_ROUND(name, mode, scalar) \
    SIMD vf name(vf a) { return (vf)_mm256_round_ps((__m256)a, (mode) | _MM_FROUND_NO_EXC); }
#elif defined(__AVX__)
#define PS_VF_ROUND(name, mode, scalar) \
    SIMD vf name(vf a) \
    { \
        union { vf v; __m256 h[2]; } x = { a }; \
        x.h[0] = _mm256_round_ps(x.h[0], (mode) | _MM_FROUND_NO_EXC); \
        x.h[1] = _mm256_round_ps(x.h[1], (mode) | _MM_FROUND_NO_EXC); \
        return x.v; \
    }
#else
#define PS_VF_ROUND(name, mode, scalar) \
    SIMD vf name(vf a) \
    { \
        for (int i = 0; i < VL; i++) a[i] = scalar(a[i]); \
        return a; \
    }
#endif
PS_VF_ROUND(vf_round, _MM_FROUND_TO_NEAREST_INT, rintf)
PS_VF_ROUND(vf_floor, _MM_FROUND_TO_NEG_INF, floorf)
PS_VF_ROUND(vf_ceil, _MM_FROUND_TO_POS_INF, ceilf)

#if PS_LANES == 16
/* vf_hsum returns the sum of all lanes, and vf_hmax the maximum. The functions combine the upper half of the lanes with
 * the lower half, and repeat this until one lane is left. All reductions use this order. */
SIMD float vf_hsum(vf a)
{
    float x[VL];
    memcpy(x, &a, sizeof x);
    for (int w = VL / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] += x[i + w];
    return x[0];
}
SIMD float vf_hmax(vf a)
{
    float x[VL];
    memcpy(x, &a, sizeof x);
    for (int w = VL / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] = x[i] > x[i + w] ? x[i] : x[i + w];
    return x[0];
}
#endif

/* -- loads and stores of VL elements, any alignment ---------------------------------------------------------------- */
SIMD vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
SIMD void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
#if defined(PS_SSE2)
/* Returns the lower half of each lane. SSE2 can pack only signed numbers. */
SIMD vh vu_narrow(vu u)
{
    __m128i w = _mm_srai_epi32(_mm_slli_epi32((__m128i)u, 16), 16);
    vh h;
    w = _mm_packs_epi32(w, w);
    memcpy(&h, &w, sizeof h);
    return h;
}
#endif
SIMD vf vf_load_bf16(const uint16_t *p)
{
#if defined(__AVX512F__)
    return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)) << 16);
#elif PS_LANES == 8
    return (vf)((vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)) << 16);
#elif defined(__AVX2__)
    union { vu v; __m256i h[2]; } x;
    x.h[0] = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    x.h[1] = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
    return (vf)(x.v << 16);
#elif defined(PS_SSE2)
    return (vf)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
#else
    vh h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}
SIMD vh vf_to_bf16(vf v)
{
#if defined(__AVX512BW__)
    const vh odd = { 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 };
    __m512i bits = (__m512i)v, one = _mm512_set1_epi32(1);
    __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    __m512i up = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    up = _mm512_mask_add_epi32(up, is_odd, up, one);
    up = _mm512_mask_or_epi32(up, is_nan, bits, _mm512_set1_epi32(0x400000));
    return (vh)_mm512_castsi512_si256(_mm512_permutexvar_epi16(_mm512_castsi256_si512((__m256i)odd), up));
#else
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    vu nan = (u >> 16) | 0x40;
    vu is_nan = (vu)((vi)(u & 0x7fffffffu) > vi_set(0x7f800000));
    vu r = (is_nan & nan) | (~is_nan & rounded);
#if PS_LANES == 8
    __m256i packed = _mm256_packus_epi32((__m256i)r, (__m256i)r);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8));
#elif defined(__AVX2__)
    union { vu v; __m256i h[2]; } x = { r };
    return (vh)_mm256_permute4x64_epi64(_mm256_packus_epi32(x.h[0], x.h[1]), 0xd8);
#elif defined(PS_SSE2)
    return vu_narrow(r);
#else
    return __builtin_convertvector(r, vh);
#endif
#endif
}
SIMD void vf_store_bf16(uint16_t *p, vf v) { vh h = vf_to_bf16(v); memcpy(p, &h, sizeof h); }
SIMD vf vf_load_f16(const uint16_t *p)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif PS_LANES == 8
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__F16C__)
    union { vf v; __m256 h[2]; } x;
    x.h[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    x.h[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
    return x.v;
#elif defined(PS_SSE2)                             /* ps_f16_to_f32 */
    vu h = (vu)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)p), _mm_setzero_si128());
    vu sign = (h & 0x8000u) << 16, man = h & 0x3ffu, a = (h & 0x7fffu) << 13;
    vu quiet = (vu)((vi)man != 0) & 0x400000u;
    vu large = (vu)((vi)a >= vi_set(0x0f800000)), small = (vu)((vi)a < vi_set(0x00800000));
    vu tiny = (vu)(vf_from_int((vi)man) * vf_set(0x1p-24f));
    vu normal = (a + 0x38000000u + (large & 0x38000000u)) | (large & quiet);
    return (vf)(sign | (small & tiny) | (~small & normal));
#else
    vf v;
    for (int i = 0; i < VL; i++) v[i] = ps_f16_to_f32(p[i]);
    return v;
#endif
}
SIMD void vf_store_f16(uint16_t *p, vf v)
{
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif PS_LANES == 8
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    union { vf v; __m256 h[2]; } x = { v };
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.h[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.h[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(PS_SSE2)                             /* ps_f32_to_f16 */
    vu u = (vu)v, sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    vu nan = (vu)((vi)a > vi_set(0x7f800000)), over = (vu)((vi)a >= vi_set(0x477ff000));
    vu small = (vu)((vi)a < vi_set(0x38800000)), tiny = (vu)((vf)a + vf_set(0.5f)) - 0x3f000000u;
    vu r = (a + 0xc8000fffu + ((a >> 13) & 1)) >> 13;
    r = (small & tiny) | (~small & r);
    r = (over & 0x7c00u) | (~over & r);
    r |= nan & (0x200u | ((a >> 13) & 0x3ffu));
    vh h = vu_narrow(sign | r);
    memcpy(p, &h, sizeof h);
#else
    for (int i = 0; i < VL; i++) p[i] = ps_f32_to_f16(v[i]);
#endif
}
/* Load and store VL elements of a type (PS_F32, PS_BF16 or PS_F16). If dtype is a constant, the functions have no
 * branch. i is counted in elements, not in bytes. */
SIMD vf vf_get(const void *p, int64_t i, int dtype)
{
    if (dtype == 0) return vf_load((const float *)p + i);
    if (dtype == 1) return vf_load_bf16((const uint16_t *)p + i);
    return vf_load_f16((const uint16_t *)p + i);
}
SIMD void vf_put(void *p, int64_t i, int dtype, vf v)
{
    if (dtype == 0) vf_store((float *)p + i, v);
    else if (dtype == 1) vf_store_bf16((uint16_t *)p + i, v);
    else vf_store_f16((uint16_t *)p + i, v);
}
/* Load and store the first n elements, with n <= VL. A load sets the remaining lanes to `pad`. A store writes only n
 * elements. */
SIMD vf vf_get_n(const void *p, int64_t i, int dtype, int n, float pad)
{
    if (n == VL) return vf_get(p, i, dtype);
    int64_t size = dtype == 0 ? 4 : 2;
    char buf[64] = { 0 };
    memcpy(buf, (const char *)p + i * size, (size_t)(n * size));
    vf v = vf_get(buf, 0, dtype);
    vi lane = PS_LANE_NUMBERS;
    return vf_select(lane < vi_set(n), v, vf_set(pad));
}
SIMD void vf_put_n(void *p, int64_t i, int dtype, int n, vf v)
{
    if (n == VL) {
        vf_put(p, i, dtype, v);
        return;
    }
    int64_t size = dtype == 0 ? 4 : 2;
    char buf[64];
    vf_put(buf, 0, dtype, v);
    memcpy((char *)p + i * size, buf, (size_t)(n * size));
}

/* -- functions ----------------------------------------------------------------------------------------------------- */
/* Splits x into n ln2 + r with |r| <= ln2 / 2 (Cody and Waite's reduction). Returns e^r, computed by a polynomial, and
 * stores the integer n. */
SIMD vf vf_exp_parts(vf x, vi *n)
{
    vf shifted = vf_fma(x, vf_set(1.44269504f), vf_set(12582912.0f));       /* the rounded integer is in the low bits */
    vf t = shifted - vf_set(12582912.0f);
    vf r = vf_fma(t, vf_set(-0.693147182f), x);
    r = vf_fma(t, vf_set(1.90465421e-9f), r);
    vf p = vf_set(0.00138145604f);
    p = vf_fma(p, r, vf_set(0.0083687352f));
    p = vf_fma(p, r, vf_set(0.041668389f));
    p = vf_fma(p, r, vf_set(0.166665211f));
    p = vf_fma(p, r, vf_set(0.49999994f));
    *n = (vi)((vu)shifted - 0x4b400000u);
    return vf_fma(p * r, r, r) + vf_set(1.0f);
}
/* Returns e^x with an error of about 1 ulp, also for subnormal results. Returns infinity if x is above 88.7, and NaN if
 * x is NaN. */
SIMD vf vf_exp(vf x)
{
    vi n;
    vf p = vf_exp_parts(vf_max(vf_min(x, vf_set(88.8f)), vf_set(-104.0f)), &n);
    vi h1 = n >> 1, h2 = n - h1;                    /* the product has two factors, because 2^n itself could overflow */
    vf y = p * (vf)((vu)(h1 + 127) << 23) * (vf)((vu)(h2 + 127) << 23);
    y = vf_select(x > vf_set(88.72283f), vf_set(INFINITY), y);
    return vf_select(x != x, x, y);
}
/* Like vf_exp, but without special cases. x must be NaN, or |x| must be at most 87. Returns NaN if x is NaN. */
SIMD vf vf_exp_core(vf x)
{
    vi n;
    vf p = vf_exp_parts(x, &n);
    return p * (vf)((vu)(n + 127) << 23);
}
/* Returns 1 / (1 + e^-x). Returns 0 if x is below -88.7. */
SIMD vf vf_sigmoid(vf x) { return vf_set(1.0f) / (vf_set(1.0f) + vf_exp(-x)); }
/* Returns the hyperbolic tangent with an error of at most 2 ulp. Uses an odd polynomial if |x| is below 0.62, otherwise
 * 1 - 2 / (e^2x + 1). */
SIMD vf vf_tanh(vf x)
{
    vf a = vf_min(vf_set(10.0f), vf_abs(x)), z = x * x;
    vf big = vf_set(1.0f) - vf_set(2.0f) / (vf_exp_core(a + a) + vf_set(1.0f));
    vf p = vf_set(-0.00574301137f);
    p = vf_fma(p, z, vf_set(0.0206714869f));
    p = vf_fma(p, z, vf_set(-0.0537491217f));
    p = vf_fma(p, z, vf_set(0.133315489f));
    p = vf_fma(p, z, vf_set(-0.333332866f));
    return vf_copysign(vf_select(a < vf_set(0.62f), vf_fma(p * z, a, a), big), x);
}
/* Computes erf by two formulas. The returned value is an odd polynomial, which is accurate for |x| < 1. For larger |x|,
 * |erf(x)| is 1 - *tail, where *tail is e^Q(|x|) and Q is within 2e-6 of log(erfc(|x|)). If |x| >= 4, *tail is 0. */
SIMD vf vf_erf_parts(vf x, vf *tail)
{
    vf a = vf_min(vf_set(4.0f), vf_abs(x)), z = x * x;
    vf q = vf_set(1.62527749e-06f);
    q = vf_fma(q, a, vf_set(-4.58254326e-05f));
    q = vf_fma(q, a, vf_set(0.000594866695f));
    q = vf_fma(q, a, vf_set(-0.00475063268f));
    q = vf_fma(q, a, vf_set(0.0263960473f));
    q = vf_fma(q, a, vf_set(-0.110036612f));
    q = vf_fma(q, a, vf_set(-0.631871522f));
    q = vf_fma(q, a, vf_set(-1.13020718f));
    q = vf_fma(q, a, vf_set(0.000313712662f));
    *tail = vf_select(a < vf_set(4.0f), vf_exp_core(q), vf_zero());
    vf p = vf_set(7.85386146e-05f);
    p = vf_fma(p, z, vf_set(-0.000801019371f));
    p = vf_fma(p, z, vf_set(0.00518832775f));
    p = vf_fma(p, z, vf_set(-0.0268538129f));
    p = vf_fma(p, z, vf_set(0.112835854f));
    p = vf_fma(p, z, vf_set(-0.37612626f));
    p = vf_fma(p, z, vf_set(0.128379166f));
    return vf_fma(p, x, x);
}
/* Returns erf(x) with an error of at most 2 ulp. */
SIMD vf vf_erf(vf x)
{
    vf tail, small = vf_erf_parts(x, &tail), big = vf_copysign(vf_set(1.0f) - tail, x);
    return vf_select(vf_abs(x) < vf_set(1.0f), small, vf_select(x != x, x, big));
}
/* Returns the normal distribution function (1 + erf(x / sqrt(2))) / 2, without cancellation for x >= -5.65. Returns 0
 * for smaller x. */
SIMD vf vf_normal_cdf(vf x)
{
    vf half = vf_set(0.5f), t = x * vf_set(0.707106781f), tail, small = vf_erf_parts(t, &tail);
    vf far = vf_select(t < vf_zero(), half * tail, vf_fma(vf_set(-0.5f), tail, vf_set(1.0f)));
    return vf_select(vf_abs(t) < vf_set(1.0f), vf_fma(half, small, half), vf_select(x != x, x, far));
}
/* Returns the natural logarithm with an error of about 1 ulp, also for subnormal x. Splits x into 2^e m with m in
 * [sqrt(1/2), sqrt(2)), and uses a polynomial in m - 1. */
SIMD vf vf_log(vf x)
{
    vi tiny = x < vf_set(0x1p-126f);
    vf s = vf_select(tiny, x * vf_set(0x1p23f), x);
    vi e = (vi)((vu)s - 0x3f3504f3u) >> 23;
    vf f = (vf)((vu)s - ((vu)e << 23)) - vf_set(1.0f);
    vf n = vf_from_int(e - (tiny & 23)), z = f * f;
    vf p = vf_set(-0.0763565674f);
    p = vf_fma(p, f, vf_set(0.127633274f));
    p = vf_fma(p, f, vf_set(-0.131605819f));
    p = vf_fma(p, f, vf_set(0.142015532f));
    p = vf_fma(p, f, vf_set(-0.166232988f));
    p = vf_fma(p, f, vf_set(0.200012341f));
    p = vf_fma(p, f, vf_set(-0.250008225f));
    p = vf_fma(p, f, vf_set(0.333333313f));
    vf y = vf_fma(f * z, p, n * vf_set(-2.12194440e-4f));
    y = vf_fma(z, vf_set(-0.5f), y) + f;
    y = vf_fma(n, vf_set(0.693359375f), y);
    y = vf_select(x == vf_zero(), vf_set(-INFINITY), y);
    y = vf_select(x < vf_zero(), vf_set(NAN), y);
    return vf_select((x != x) | (x == vf_set(INFINITY)), x, y);
}
/* Returns sin(x + quarters * pi / 2). This is the sine for quarters = 0, and the cosine for quarters = 1. |x| must be
 * at most 1e5. The error of a result y is at most 2 ulp of max(|y|, 2^-20). */
SIMD vf vf_sin_quarters(vf x, int quarters)
{
    vf shifted = vf_fma(x, vf_set(0.636619772f), vf_set(12582912.0f));
    vf n = shifted - vf_set(12582912.0f);
    vf r = vf_fma(n, vf_set(-1.57079637f), x);
    r = vf_fma(n, vf_set(4.37113883e-8f), r);
    r = vf_fma(n, vf_set(1.71512449e-15f), r);
    vi q = (vi)((vu)shifted + (uint32_t)quarters);
    vf z = r * r;
    vf s = vf_fma(vf_set(-0.000195108398f), z, vf_set(0.00833213143f));
    s = vf_fma(s, z, vf_set(-0.166666538f));
    s = vf_fma(s * z, r, r);
    vf c = vf_fma(vf_set(2.44256807e-05f), z, vf_set(-0.00138872513f));
    c = vf_fma(c, z, vf_set(0.0416666456f));
    c = vf_fma(c, z, vf_set(-0.5f));
    c = vf_fma(c, z, vf_set(1.0f));
    vf y = vf_select((q & 1) != 0, c, s);
    return (vf)((vu)y ^ ((vu)(q & 2) << 30));
}
/* The sine of -0 is -0. */
SIMD vf vf_sin(vf x) { return vf_select(x == vf_zero(), x, vf_sin_quarters(x, 0)); }
SIMD vf vf_cos(vf x) { return vf_sin_quarters(x, 1); }

/* -- random numbers: base/philox.h in VL lanes --------------------------------------------------------------------- */
typedef struct vu4 { vu v[4]; } vu4;
SIMD vu vu_set(uint32_t x) { return (vu)vi_set((int32_t)x); }
SIMD vu vu_mulhi(vu a, uint32_t k)                 /* returns the upper halves of the 64-bit products */
{
    const vw low = (vw){ 0 } + 0xffffffffu;
#if defined(__AVX512F__)
    vw even = (vw)_mm512_mul_epu32((__m512i)a, (__m512i)vu_set(k));
    vw odd = (vw)_mm512_mul_epu32((__m512i)((vw)a >> 32), (__m512i)vu_set(k));
#elif PS_LANES == 8
    vw even = (vw)_mm256_mul_epu32((__m256i)a, (__m256i)vu_set(k));
    vw odd = (vw)_mm256_mul_epu32((__m256i)((vw)a >> 32), (__m256i)vu_set(k));
#elif defined(__AVX2__)
    union { vw v; __m256i h[2]; } e = { (vw)a }, o = { (vw)a >> 32 };
    __m256i kk = _mm256_set1_epi32((int)k);
    for (int i = 0; i < 2; i++) e.h[i] = _mm256_mul_epu32(e.h[i], kk), o.h[i] = _mm256_mul_epu32(o.h[i], kk);
    vw even = e.v, odd = o.v;
#elif defined(PS_SSE2)
    vw even = (vw)_mm_mul_epu32((__m128i)a, (__m128i)vu_set(k));
    vw odd = (vw)_mm_mul_epu32((__m128i)((vw)a >> 32), (__m128i)vu_set(k));
#else
    vw even = ((vw)a & low) * (uint64_t)k, odd = ((vw)a >> 32) * (uint64_t)k;
#endif
    return (vu)((even >> 32) | (odd & ~low));
}
/* Computes ps_philox4x32(key, c0 | c1 << 32, c2 | c3 << 32) in each lane. */
SIMD vu4 vu_philox(uint64_t key, vu c0, vu c1, vu c2, vu c3)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        vu h0 = vu_mulhi(c0, 0xD2511F53u), h1 = vu_mulhi(c2, 0xCD9E8D57u);
        vu l0 = c0 * 0xD2511F53u, l1 = c2 * 0xCD9E8D57u;
        c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return (vu4){ { c0, c1, c2, c3 } };
}
/* Like vu_philox, for VL consecutive counters, one per lane. The lower 64 bits of the first counter are `first`. A
 * carry out of the lowest 32 bits is added to the next 32 bits. The upper 64 bits of all counters are `hi`. */
SIMD vu4 vu_philox_run(uint64_t key, uint64_t first, uint64_t hi)
{
    vu lane = PS_LANE_NUMBERS;
    vu c0 = lane + (uint32_t)first;
    vu c1 = (uint32_t)(first >> 32) - (vu)(c0 < lane);
    return vu_philox(key, c0, c1, vu_set((uint32_t)hi), vu_set((uint32_t)(hi >> 32)));
}
SIMD vf vu_unit(vu u) { return __builtin_convertvector((vi)(u >> 8), vf) * vf_set(0x1p-24f); }     /* in [0, 1) */
#endif
