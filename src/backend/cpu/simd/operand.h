/* SPDX-License-Identifier: BSD-3-Clause
 * Access to operands for the kernels that process rows or flat arrays (norm, dropout, loss, reduce, table, optim). The
 * functions read and write one element or pairs of sixteen lanes. The macros turn a run-time type into a constant. */
#ifndef PS_CPU_SIMD_OPERAND_H
#define PS_CPU_SIMD_OPERAND_H
#include <stdbool.h>
#include "backend/cpu/simd/loop.h"
#include "base/error.h"

static inline bool ps_is_index(const ps_view *v) { return v->dtype == PS_I32 || v->dtype == PS_I64; }
static inline int64_t ps_index_at(const ps_view *v, int64_t i)
{
    return v->dtype == PS_I32 ? ((const int32_t *)v->data)[i] : ((const int64_t *)v->data)[i];
}
/* Returns PS_ERANGE if an index is outside [0, n). The error message contains the first such index. */
static inline int ps_check_indices(const ps_view *index, int64_t n)
{
    uint64_t bad = 0;
    if (index->dtype == PS_I32) {
        const int32_t *p = index->data;
        for (int64_t i = 0; i < index->numel; i++) bad |= p[i] < 0 || p[i] >= n;
    } else {
        const uint64_t *p = index->data;           /* the top bit of a | b is set if a or b is negative */
        _Pragma("omp simd reduction(| : bad)")
        for (int64_t i = 0; i < index->numel; i++) bad |= p[i] | ((uint64_t)n - 1 - p[i]);
        bad >>= 63;
    }
    for (int64_t i = 0; bad && i < index->numel; i++) {
        int64_t v = ps_index_at(index, i);
        if (v < 0 || v >= n)
            return ps_fail(PS_ERANGE, "index %lld at position %lld is outside [0, %lld)", (long long)v, (long long)i,
                           (long long)n);
    }
    return 0;
}
/* Returns the size of the last dimension, or 1 for a scalar. */
static inline int64_t ps_last_dim(const ps_view *v) { return v->ndim > 0 ? v->shape[v->ndim - 1] : 1; }

/* Like vf_put and vf_get, for one element of a lane type. */
static inline void ps_put_one(void *p, int64_t i, int dtype, float v)
{
    if (dtype == PS_F32) ((float *)p)[i] = v;
    else if (dtype == PS_BF16) ((uint16_t *)p)[i] = ps_f32_to_bf16(v);
    else ((uint16_t *)p)[i] = ps_f32_to_f16(v);
}
static inline float ps_get_one(const void *p, int64_t i, int dtype)
{
    if (dtype == PS_F32) return ((const float *)p)[i];
    if (dtype == PS_BF16) return ps_bf16_to_f32(((const uint16_t *)p)[i]);
    return ps_f16_to_f32(((const uint16_t *)p)[i]);
}
/* Returns the address of element i. */
static inline void *ps_at(const void *p, int64_t i, int dtype)
{
    return (char *)(uintptr_t)p + i * (dtype == PS_F32 ? 4 : 2);
}

/* -- pairs of sixteen lanes: 32 elements ----------------------------------------------------------------------------
 * Rows are processed in blocks of PAIR elements. A block has two vectors `a` and `b` of sixteen lanes each, whatever
 * the machine's vector size is. A block consists of PARTS parts. Part j has the VL lanes of `a` and the VL lanes of `b`
 * that start at lane j * VL.
 * A bf16 block is read as 16 words of two elements. `a` gets the even elements, which are the lower halves of the
 * words. `b` gets the odd elements. This takes half of the time of widening the elements in order. For other types, `a`
 * gets the first 16 elements and `b` the next 16 elements. The order does not matter to kernels that treat all elements
 * in the same way.
 * pair_place returns the position of element i of a row in an fp32 row of pairs. A sum has one accumulator for each
 * lane of `a` and of `b`, so the order of additions does not depend on the vector size. */
enum { PAIR = 32, PARTS = 16 / VL };
typedef struct vp { vf a, b; } vp;
#define EACH_PART(j) _Pragma("GCC unroll 4") for (int j = 0; j < PARTS; j++)

SIMD int64_t pair_place(int64_t i, int dtype)
{
    return dtype == PS_BF16 ? i / PAIR * PAIR + i % 2 * 16 + i % PAIR / 2 : i;
}
/* Loads part j of the block that begins with element i. */
SIMD vp vp_get(const void *p, int64_t i, int j, int dtype)
{
    if (dtype != PS_BF16) return (vp){ vf_get(p, i + j * VL, dtype), vf_get(p, i + 16 + j * VL, dtype) };
    vu u;
    memcpy(&u, (const uint16_t *)p + i + 2 * VL * j, sizeof u);
    return (vp){ (vf)(u << 16), (vf)(u & 0xffff0000u) };
}
/* Stores part j. bf16 values are rounded to nearest even without a check for NaN. The rounding would turn a NaN into a
 * number if the upper bits of the NaN are all ones and the lower bits are not all zeros. Arithmetic on bf16 values and
 * on canonical NaNs never produces such a NaN. */
SIMD void vp_put(void *p, int64_t i, int j, int dtype, vp v)
{
    if (dtype != PS_BF16) {
        vf_put(p, i + j * VL, dtype, v.a);
        vf_put(p, i + 16 + j * VL, dtype, v.b);
        return;
    }
    vu a = (vu)v.a, b = (vu)v.b;
    a = (a + 0x7fffu + ((a >> 16) & 1)) >> 16;
    b = (b + 0x7fffu + ((b >> 16) & 1)) & 0xffff0000u;
    a |= b;
    memcpy((uint16_t *)p + i + 2 * VL * j, &a, sizeof a);
}
/* Load and store the last n < 32 elements of a row. Element i is the first of these elements. A load sets the elements
 * after the end of the row to `pad`. A store does not change memory after the row. The functions are not inlined,
 * because they run at most once per row. */
static __attribute__((noinline, unused)) void vp_tail_get(vp *v, const void *p, int64_t i, int j, int dtype, int64_t n,
                                                          float pad)
{
    char buf[4 * PAIR];
    for (int k = 0; k < PAIR; k++) ps_put_one(buf, k, dtype, pad);
    memcpy(buf, ps_at(p, i, dtype), (size_t)(n * (dtype == PS_F32 ? 4 : 2)));
    *v = vp_get(buf, 0, j, dtype);
}
static __attribute__((noinline, unused)) void vp_tail_put(void *p, int64_t i, int dtype, int64_t n, const vp *v)
{
    char buf[4 * PAIR];
    EACH_PART(j) vp_put(buf, 0, j, dtype, v[j]);
    memcpy(ps_at(p, i, dtype), buf, (size_t)(n * (dtype == PS_F32 ? 4 : 2)));
}
/* Returns part j of the elements [i, i + 32) of a row of n elements. Elements after the end of the row are `pad`. */
SIMD vp vp_row_get(const void *p, int64_t i, int64_t n, int j, float pad, int dtype)
{
    if (i + PAIR <= n) return vp_get(p, i, j, dtype);
#if defined(__AVX512F__)
    if (dtype == PS_F32) {
        const float *x = (const float *)p + i;
        uint32_t inside = (1u << (n - i)) - 1;
        __m512 rest = _mm512_set1_ps(pad);
        return (vp){ (vf)_mm512_mask_loadu_ps(rest, (__mmask16)inside, x),
                     (vf)_mm512_mask_loadu_ps(rest, (__mmask16)(inside >> 16), x + 16) };
    }
#endif
    vp v;
    vp_tail_get(&v, p, i, j, dtype, n - i, pad);
    return v;
}
/* Stores all parts. */
SIMD void vp_row_put(void *p, int64_t i, int64_t n, const vp *v, int dtype)
{
    if (i + PAIR <= n) {
        EACH_PART(j) vp_put(p, i, j, dtype, v[j]);
        return;
    }
#if defined(__AVX512F__)
    if (dtype == PS_F32) {
        uint32_t inside = (1u << (n - i)) - 1;
        _mm512_mask_storeu_ps((float *)p + i, (__mmask16)inside, (__m512)v[0].a);
        _mm512_mask_storeu_ps((float *)p + i + 16, (__mmask16)(inside >> 16), (__m512)v[0].b);
        return;
    }
#endif
    vp tail[PARTS];
    EACH_PART(j) tail[j] = v[j];
    vp_tail_put(p, i, dtype, n - i, tail);
}
SIMD vp vp_load(const float *p, int j) { return (vp){ vf_load(p + j * VL), vf_load(p + 16 + j * VL) }; }
SIMD void vp_store(float *p, int j, vp v) { vf_store(p + j * VL, v.a), vf_store(p + 16 + j * VL, v.b); }

/* Returns the sum of sixteen lanes. The function adds the upper half of the lanes to the lower half, and repeats this
 * until one lane is left. All sums use this order. */
SIMD float sum_lanes(const vf *given)
{
    vf s[PARTS];
    EACH_PART(j) s[j] = given[j];
    if (PARTS == 4) s[0] += s[PARTS / 2], s[PARTS / 4] += s[PARTS - 1];
    if (PARTS >= 2) s[0] += s[PARTS == 4 ? 1 : PARTS - 1];
#if defined(__SSE2__)                          /* written with intrinsics, because GCC with -O2 would add one lane at a
                                                * time, through memory */
#if defined(__AVX512F__)
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256((__m512)s[0]), _mm512_extractf32x8_ps((__m512)s[0], 1));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
#elif PS_LANES == 8
    __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)s[0]), _mm256_extractf128_ps((__m256)s[0], 1));
#else
    __m128 x = (__m128)s[0];
#endif
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
#else
    float x[VL];
    memcpy(x, &s[0], sizeof x);
    for (int w = VL / 2; w > 0; w /= 2)
        for (int i = 0; i < w; i++) x[i] += x[i + w];
    return x[0];
#endif
}

/* Calls body(args..., T), where T is a constant for a lane type. Bodies are always_inline. */
#define PS_BY_VEC(dtype, body, ...) \
    do { \
        if ((dtype) == PS_F32) body(__VA_ARGS__, PS_F32); \
        else if ((dtype) == PS_BF16) body(__VA_ARGS__, PS_BF16); \
        else body(__VA_ARGS__, PS_F16); \
    } while (0)
#endif
