/* SPDX-License-Identifier: BSD-3-Clause
 * The rules of remainder, fmod and floor_divide, for all backends. They are the rules of PyTorch, except that
 * remainders of floats are exact. */
#ifndef PS_BASE_DIVIDE_H
#define PS_BASE_DIVIDE_H
#include <math.h>
#include "base/half.h"

enum { PS_REMAINDER, PS_FMOD, PS_FLOOR_DIVIDE };

/* Divides two floats of any type, which are passed as doubles. The caller must round the result to the type of the
 * floats. */
PS_BOTH double ps_divide(int kind, double a, double b)
{
    if (kind == PS_FLOOR_DIVIDE && b == 0) return a / b;
    double m = fmod(a, b);
    bool other_side = m != 0 && (b < 0) != (m < 0);
    if (kind == PS_FMOD) return m;
    if (kind == PS_REMAINDER) return other_side ? m + b : m;
    double q = (a - m) / b - other_side;
    if (q == 0) return copysign(0.0, a / b);
    return q - floor(q) > 0.5 ? floor(q) + 1 : floor(q);
}

/* Divides integers without a trap, also if the divisor is 0 or -1. For these divisors the remainder is 0. A quotient
 * by 0 is also 0. */
PS_BOTH int64_t ps_divide_ints(int kind, int64_t a, int64_t b)
{
    if (b == 0) return 0;
    if (b == -1) return kind == PS_FLOOR_DIVIDE ? (int64_t)(0 - (uint64_t)a) : 0;
    int64_t m = a % b;
    bool other_side = m != 0 && (b < 0) != (m < 0);
    if (kind == PS_FLOOR_DIVIDE) return a / b - other_side;
    return kind == PS_REMAINDER && other_side ? m + b : m;
}
#endif
