-- SPDX-License-Identifier: BSD-3-Clause
-- The types that parameters in chunks may have (`nbytes`), and the types of optimizer states (`of_state`). The values
-- are sizes in bytes per element. This file does not call C, so that planners remain pure functions. ps_dtype_size
-- (src/ps.h) returns the size of any type. `of_weights` has the names of all types that a model's weights may have,
-- under psluajit's names and PyTorch's names. `weights` lists psluajit's names for messages.
local of_weights = {}
for name in ("fp32 bf16 fp16 fp64 float32 float bfloat16 float16 half float64 double"):gmatch "%S+" do
  of_weights[name] = true
end
return { nbytes = { bf16 = 2, fp16 = 2, fp32 = 4 }, of_state = { fp32 = 4, bf16 = 2, uint8 = 1 },
  of_weights = of_weights, weights = "fp32, bf16, fp16 or fp64" }
