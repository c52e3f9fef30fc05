-- SPDX-License-Identifier: BSD-3-Clause
-- The types that parameters in chunks may have, and the bytes per element. This file does not call C, so planners
-- remain pure functions of their arguments. ps_dtype_size (src/ps.h) has the sizes of all types. of_state has
-- the sizes of the dtypes of optimizer states.
return { nbytes = { bf16 = 2, fp16 = 2, fp32 = 4 }, of_state = { fp32 = 4, bf16 = 2, uint8 = 1 } }
