/* SPDX-License-Identifier: BSD-3-Clause
 * Sizes and names of the element types of ps.h. */
#include "base/dtype.h"

int64_t ps_dtype_size(int dtype) { return dtype >= 0 && dtype < PS_DTYPE_COUNT ? ps_dtype_bytes(dtype) : 0; }

const char *ps_dtype_name(int dtype)
{
    static const char *const names[PS_DTYPE_COUNT] = {
        "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8", "bool"
    };
    return dtype >= 0 && dtype < PS_DTYPE_COUNT ? names[dtype] : "?";
}
