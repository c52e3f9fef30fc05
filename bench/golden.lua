-- SPDX-License-Identifier: BSD-3-Clause
-- Repeats the training that produced golden values, and prints the errors. bench/golden_lib.lua defines the errors.
-- GOLDEN is a file of spec/golden, or a folder with golden.json and model.safetensors.
--   psluajit bench/golden.lua GOLDEN [--device D] [--dtype T] [--recompute]
--   psluajit tools/launch.lua --nproc-per-node N bench/golden.lua GOLDEN    each batch is split over N processes
--     [--pipeline P [--micro-batches M] [--schedule S] [--virtual-stages V]]   each of P processes has a stage
--     [--tensor T]                                            each of T processes has a part of every layer
--     [--memory chunk --host 2MiB --disk DIR --device-memory 2MiB --chunk-size N --eviction P]
-- With --memory chunk, training uses ps.initialize. The errors are equal to the errors with --memory plain to the last
-- digit. The last line is one JSON object: max_rel_loss_error, max_rel_grad_error, max_rel_param_error, and separately
-- c_attn_bias_grad_error, c_attn_bias_param_error.
local cjson = require "cjson"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/golden.lua", "Compares training with golden float64 values.")
parser:argument("golden", "a file of spec/golden, or a folder with golden.json and model.safetensors")
parser:option("--device", "cpu, ref, sim", "cpu")
parser:option("--dtype", "fp32, bf16, fp16", "fp32")
parser:flag("--recompute", "recompute blocks in backward")
parser:option("--memory", "plain or chunk", "plain"):choices { "plain", "chunk" }
parser:option("--host", "budget of host memory, as 2MiB (chunk)")
parser:option("--disk", "folder of the disk tier (chunk)")
parser:option("--device-memory", "budget of a device that is not the cpu (chunk)")
whole(parser:option("--chunk-size", "elements of a chunk (chunk; default: search)"), 1)
parser:option("--eviction", table.concat(require "ps.config.policies", ", ") .. " (chunk)")
whole(parser:option("--zero-stage", "zero_optimization.stage (several processes)"), 0)
whole(parser:option("--pipeline", "pipeline.stages: number of processes that each have a stage of the model"), 1)
whole(parser:option("--tensor", "tensor_parallel.size: number of processes that each have a part of every layer"), 1)
whole(parser:option("--micro-batches", "gradient_accumulation_steps", 1), 1)
parser:option("--schedule", "pipeline.schedule")
whole(parser:option("--virtual-stages", "pipeline.virtual_stages"), 1)
local args = command_line.parse(parser)
local group
if tonumber(os.getenv "WORLD_SIZE" or 1) > 1 then
  group = require("ps").init_distributed {}
  args.memory = "chunk"
end
if (args.pipeline or 1) > 1 and not group then
  parser:error("--pipeline needs several processes: psluajit tools/launch.lua --nproc-per-node N bench/golden.lua ...")
end
if (args.tensor or 1) > 1 and not group then
  parser:error("--tensor needs several processes: psluajit tools/launch.lua --nproc-per-node N bench/golden.lua ...")
end
if args.micro_batches > 1 then args.memory = "chunk" end
local note = (not group or group:rank() == 0) and print or function() end
if args.memory == "plain" then
  for _, name in ipairs { "host", "disk", "device_memory", "chunk_size", "eviction" } do
    if args[name] then parser:error("--" .. name:gsub("_", "-") .. " is a setting of --memory chunk") end
  end
end

local golden = require "bench.golden_lib"
local result = golden.run(args.golden, { device = args.device, dtype = args.dtype, note = note,
  group = group, zero_stage = args.zero_stage, tensor = args.tensor, micro_batches = args.micro_batches,
  pipeline = args.pipeline and { stages = args.pipeline, schedule = args.schedule,
    virtual_stages = args.virtual_stages },
  recompute = args.recompute or nil, memory = args.memory, host = args.host, disk = args.disk,
  device_memory = args.device_memory, chunk_size = args.chunk_size, eviction = args.eviction })
note(cjson.encode(result))
