-- SPDX-License-Identifier: BSD-3-Clause
-- The types that parameters in chunks may have, and the bytes of an element. This file asks no engine, so that planners
-- stay functions of their arguments; ps_dtype_size (src/ps.h) has the sizes of all types.
return { nbytes = { bf16 = 2, fp16 = 2, fp32 = 4 } }
