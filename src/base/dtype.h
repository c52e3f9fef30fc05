/* SPDX-License-Identifier: BSD-3-Clause
 * Properties of element types (PS_F32 to PS_BOOL in ps.h) that every layer needs. */
#ifndef PS_BASE_DTYPE_H
#define PS_BASE_DTYPE_H
#include <math.h>
#include <stdbool.h>
#include "ps.h"

static inline int64_t ps_dtype_bytes(int dtype)
{
    static const int8_t size[PS_DTYPE_COUNT] = { 4, 2, 2, 8, 4, 8, 1, 1 };
    return size[dtype];
}
static inline bool ps_dtype_is_float(int dtype) { return dtype <= PS_F64; }

/* Makes a number safe to pass to Lua. Every NaN becomes the canonical NaN, because Lua reads other NaN bits as a nil,
 * a string or a pointer. */
static inline double ps_lua_number(double x) { return x == x ? x : (double)NAN; }
#endif
