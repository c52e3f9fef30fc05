-- SPDX-License-Identifier: BSD-3-Clause
-- Reproduces a folder of golden values and prints the errors (how they are measured: bench/golden_lib.lua).
--   psluajit bench/golden.lua DIR [--device D] [--dtype T]
-- The last line is one JSON object: max_rel_loss_error, max_rel_grad_error, max_rel_param_error, and apart from them
-- c_attn_bias_grad_error, c_attn_bias_param_error.
local cjson = require "cjson"
local argparse = require "argparse"

local parser = argparse("bench/golden.lua", "Compares training with golden float64 values.")
parser:argument("dir", "folder with golden.json and model.safetensors")
parser:option("--device", "cpu, ref", "cpu")
parser:option("--dtype", "fp32, bf16, fp16", "fp32")
local args = parser:parse()

local golden = require "bench.golden_lib"
local result = golden.run(args.dir, { device = args.device, dtype = args.dtype, note = print })
print(cjson.encode(result))
