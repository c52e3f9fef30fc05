-- SPDX-License-Identifier: BSD-3-Clause
-- The types that parameters in chunks may have (`nbytes`), and the types of optimizer states (`of_state`). The values
-- are sizes in bytes per element. This file does not call C, so that planners remain pure functions. ps_dtype_size
-- (src/ps.h) returns the size of any type.
return { nbytes = { bf16 = 2, fp16 = 2, fp32 = 4 }, of_state = { fp32 = 4, bf16 = 2, uint8 = 1 } }
