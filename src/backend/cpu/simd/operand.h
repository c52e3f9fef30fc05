/* SPDX-License-Identifier: BSD-3-Clause
 * Shared by the row-wise and flat kernels (norm, loss, table, optim), besides simd.h and loop.h: operands one element
 * at a time or in pairs of vectors, and the switch that makes a run-time type a constant. Only those include it. */
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
/* Size of the last dimension; 1 for a scalar. */
static inline int64_t ps_last_dim(const ps_view *v) { return v->ndim > 0 ? v->shape[v->ndim - 1] : 1; }

/* One element of a vector type, as vf_put would store it. */
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
/* Element i as an address. */
static inline void *ps_at(const void *p, int64_t i, int dtype)
{
    return (char *)(uintptr_t)p + i * (dtype == PS_F32 ? 4 : 2);
}

/* -- pairs of vectors: 32 elements ----------------------------------------------------------------------------------
 * bf16 is taken as 16 words, each of which holds two: `a` gets the even elements (the words' lower halves), `b` the odd
 * ones, at half the cost of widening in order. Of the other types `a` gets the first 16, `b` the next. Kernels that
 * treat all elements alike need not care; pair_place tells where element i of a row lies in an fp32 row of pairs. */
enum { PAIR = 2 * VL };
typedef struct vp { vf a, b; } vp;

SIMD int64_t pair_place(int64_t i, int dtype)
{
    return dtype == PS_BF16 ? i / PAIR * PAIR + i % 2 * VL + i % PAIR / 2 : i;
}
SIMD vp vp_get(const void *p, int64_t i, int dtype)
{
    if (dtype != PS_BF16) return (vp){ vf_get(p, i, dtype), vf_get(p, i + VL, dtype) };
    vu u;
    memcpy(&u, (const uint16_t *)p + i, sizeof u);
    return (vp){ (vf)(u << 16), (vf)(u & 0xffff0000u) };
}
/* bf16 rounds to nearest even and does not look for NaN of unusual bits: those with ones in all of the upper and some
 * of the lower bits, which arithmetic on bf16 and on canonical NaN never makes, would not stay NaN. */
SIMD void vp_put(void *p, int64_t i, int dtype, vp v)
{
    if (dtype != PS_BF16) {
        vf_put(p, i, dtype, v.a);
        vf_put(p, i + VL, dtype, v.b);
        return;
    }
    vu a = (vu)v.a, b = (vu)v.b;
    a = (a + 0x7fffu + ((a >> 16) & 1)) >> 16;
    b = (b + 0x7fffu + ((b >> 16) & 1)) & 0xffff0000u;
    a |= b;
    memcpy((uint16_t *)p + i, &a, sizeof a);
}
/* The first n < 32 elements; the others are `pad` on load, untouched in memory on store. */
SIMD vp vp_get_n(const void *p, int64_t i, int dtype, int64_t n, float pad)
{
    char buf[4 * PAIR];
    for (int k = 0; k < PAIR; k++) ps_put_one(buf, k, dtype, pad);
    memcpy(buf, ps_at(p, i, dtype), (size_t)(n * (dtype == PS_F32 ? 4 : 2)));
    return vp_get(buf, 0, dtype);
}
SIMD void vp_put_n(void *p, int64_t i, int dtype, int64_t n, vp v)
{
    char buf[4 * PAIR];
    vp_put(buf, 0, dtype, v);
    memcpy(ps_at(p, i, dtype), buf, (size_t)(n * (dtype == PS_F32 ? 4 : 2)));
}
/* Elements i .. i + 31 of a row of n; `pad` behind its end. */
SIMD vp vp_row_get(const void *p, int64_t i, int64_t n, float pad, int dtype)
{
    return i + PAIR <= n ? vp_get(p, i, dtype) : vp_get_n(p, i, dtype, n - i, pad);
}
SIMD void vp_row_put(void *p, int64_t i, int64_t n, vp v, int dtype)
{
    if (i + PAIR <= n) vp_put(p, i, dtype, v);
    else vp_put_n(p, i, dtype, n - i, v);
}
SIMD vp vp_load(const float *p) { return (vp){ vf_load(p), vf_load(p + VL) }; }
SIMD void vp_store(float *p, vp v) { vf_store(p, v.a); vf_store(p + VL, v.b); }

/* body(args..., PS_F32) and so on: bodies are always_inline, so the type is a constant inside of them. */
#define PS_BY_VEC(dtype, body, ...) \
    do { \
        if ((dtype) == PS_F32) body(__VA_ARGS__, PS_F32); \
        else if ((dtype) == PS_BF16) body(__VA_ARGS__, PS_BF16); \
        else body(__VA_ARGS__, PS_F16); \
    } while (0)
#endif
