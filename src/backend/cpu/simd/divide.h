/* SPDX-License-Identifier: BSD-3-Clause
 * The rules of base/divide.h for vectors of fp32 lanes. The results have the same bits. */
#ifndef PS_CPU_DIVIDE_H
#define PS_CPU_DIVIDE_H
#include "backend/cpu/simd.h"
#include "base/divide.h"

/* Returns a mask of the lanes that divide_lanes() computes with vectors. The mask is 0 for lanes that contain NaN. */
SIMD vi is_near(vf q, vf b) { return (vf_abs(q) < vf_set(0x1p23f)) & (vf_abs(b) < vf_set(INFINITY)); }

/* Computes the lanes for which is_near() is false, one by one, with the C library. */
static __attribute__((noinline)) void far_lanes(int kind, vf *y, const vf *a, const vf *b)
{
    vi near = is_near(*a / *b, *b);
    for (int i = 0; i < VL; i++)
        if (!near[i]) (*y)[i] = (float)ps_divide(kind, (*a)[i], (*b)[i]);
}

/* Divides lanes. q is the rounded quotient, and k is the integer part of q. Rounding can raise a quotient to the next
 * integer. Hence k can be too large by 1, but it is never too small. An fma computes the difference a - k * b exactly,
 * because the difference is smaller than b and a multiple of the last bit of a or of b. If the sign of the difference
 * differs from the sign of a, then k is too large. */
SIMD vf divide_lanes(int kind, vf a, vf b)
{
    vf q = a / b, zero = vf_zero(), one = vf_set(1.0f);
    vi near = is_near(q, b);
    vf k = vf_from_int(__builtin_convertvector(vf_select(near, q, zero), vi));
    vf m = vf_fma(-k, b, a);
    vi large = (m != zero) & ((vi)((vi)m ^ (vi)a) < 0);
    m = vf_copysign(vf_select(large, m + vf_copysign(b, a), m), a);
    vi other_side = (m != zero) & ((vi)((vi)m ^ (vi)b) < 0);
    vf y = m;
    if (kind == PS_REMAINDER) y = m + vf_select(other_side, b, vf_set(-0.0f));
    if (kind == PS_FLOOR_DIVIDE) {
        k = vf_select(large, k - vf_copysign(one, q), k);
        k = vf_select(other_side, k - one, k);
        y = vf_select(k == zero, vf_copysign(zero, q), k);
    }
    if (vi_any(~near)) far_lanes(kind, &y, &a, &b);
    return y;
}
#endif
