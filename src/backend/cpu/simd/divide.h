/* SPDX-License-Identifier: BSD-3-Clause
 * Block functions of remainder, fmod and floor_divide. Remainders of floats are exact. Quotients below 2^28 are
 * divided in double, in loops without calls, and all others by the C library. */
#ifndef PS_CPU_DIVIDE_H
#define PS_CPU_DIVIDE_H
#include "backend/cpu/simd/loop.h"
#include <math.h>

enum { REMAINDER, FMOD, FLOOR_DIVIDE };

/* Divides two doubles of any size. */
static double divide_any(int kind, double a, double b)
{
    if (kind == FLOOR_DIVIDE && b == 0) return a / b;
    double m = fmod(a, b);
    bool other_side = m != 0 && (b < 0) != (m < 0);
    if (kind == FMOD) return m;
    if (kind == REMAINDER) return other_side ? m + b : m;
    double q = (a - m) / b - other_side;
    if (q == 0) return copysign(0, a / b);
    return q - floor(q) > 0.5 ? floor(q) + 1 : floor(q);
}

/* Divides two floats whose quotient is below 2^28. The quotient's integer part times b, and a minus this product, are
 * exact in double. */
SIMD float divide_near(int kind, double a, double b, double q)
{
    double whole = (double)(int32_t)q, m = copysign(a - whole * b, a);
    double other_side = m != 0 && (b < 0) != (m < 0) ? 1 : 0;
    if (kind == FMOD) return (float)m;
    if (kind == REMAINDER) return (float)(m + (other_side != 0 ? b : -0.0));
    whole -= other_side;
    return (float)(whole == 0 ? copysign(0, q) : whole);
}

SIMD vf divide_lanes(int kind, vf x, vf y)
{
    float a[VL], b[VL], out[VL];
    int far = 0;
    vf_store(a, x);
    vf_store(b, y);
    for (int i = 0; i < VL; i++) {
        double q = (double)a[i] / (double)b[i];
        bool near = fabs(q) < 0x1p28 && fabsf(b[i]) < INFINITY;
        far += !near;
        out[i] = divide_near(kind, a[i], b[i], near ? q : 0);
    }
    for (int i = 0; far && i < VL; i++) {
        double q = (double)a[i] / (double)b[i];
        if (!(fabs(q) < 0x1p28 && fabsf(b[i]) < INFINITY)) out[i] = (float)divide_any(kind, a[i], b[i]);
    }
    return vf_load(out);
}

/* Divides integers, also by 0 and -1, without a trap. The remainder is then 0, and so is a quotient by 0. */
SIMD int64_t divide_ints(int kind, int64_t a, int64_t b)
{
    if (b == 0) return 0;
    if (b == -1) return kind == FLOOR_DIVIDE ? (int64_t)(0 - (uint64_t)a) : 0;
    int64_t m = a % b;
    bool other_side = m != 0 && (b < 0) != (m < 0);
    if (kind == FLOOR_DIVIDE) return a / b - other_side;
    return kind == REMAINDER && other_side ? m + b : m;
}
#endif
