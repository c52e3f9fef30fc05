/* SPDX-License-Identifier: BSD-3-Clause
 * The two facts about element types that every layer needs. Types are ps.h's PS_F32 ... PS_BOOL. */
#ifndef PS_BASE_DTYPE_H
#define PS_BASE_DTYPE_H
#include <stdbool.h>
#include "ps.h"

static inline int64_t ps_dtype_bytes(int dtype)
{
    static const int8_t size[PS_DTYPE_COUNT] = { 4, 2, 2, 8, 4, 8, 1, 1 };
    return size[dtype];
}
static inline bool ps_dtype_is_float(int dtype) { return dtype <= PS_F64; }
#endif
