-- SPDX-License-Identifier: BSD-3-Clause
-- PatrickStar's benchmark. Trains a model of a named size on random data. Like the original, prints the time, the rate
-- in TFLOP/s and the number of samples per second for each step.
--
--   psluajit train.lua --model Bert --batch 4
--   psluajit --dry-run --hardware a100-40x8 train.lua --model GPT3_15B      plans it for another machine
--   psluajit launch.lua --nproc-per-node 2 train.lua --model GPT2small      several processes, with ZeRO 3
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.command_line"
local json = require "cjson"
local here = arg[0]:match "^(.*)/" or "."
local sizes = dofile(here .. "/models.lua")
local whole = command_line.whole

local FLOPS = 2 * 4  -- FLOPs per parameter and token as PatrickStar counts them: 2 in forward, 2 in recompute, 4 in
                     -- backward

local parser = argparse("psluajit benchmark/train.lua", "Trains a model of PatrickStar's benchmark on random data.",
  "Models: " .. table.concat(sizes.names(), ", ") .. ", and WIDTH/SEQ/LAYERS/HEADS.")
parser:option("--model", "The size of the model.", "GPT2small")
whole(parser:option("--batch", "Rows per process and step.", "16"), 1)
whole(parser:option("--steps", "Optimizer steps.", "5"), 1)
parser:option("--precision", "fp16, bf16 or fp32.", "fp16"):choices { "fp16", "bf16", "fp32" }
parser:option("--device", "Device that computes: cpu or cuda.", "auto")
parser:option("--device-memory", "Memory budget on the device, such as 30GiB.")
parser:option("--host", "Memory budget on the host, such as 6GiB or 50%.")
parser:option("--disk", "Folder for the disk tier. Default: no disk tier.")
parser:flag("--no-recompute", "Keep activations instead of computing them again in backward.")
whole(parser:option("--seed", "Random seed.", "1"), 0)
whole(parser:option("--local_rank --local-rank", "Number of this process on its machine (some launchers pass it)."), 0)
parser:flag("--json", "Print one JSON line at the end.")
local args = command_line.parse(parser)
local size = command_line.try("train.lua", sizes.of, args.model)

local function make()
  local recompute = not args.no_recompute
  if size.kind == "bert" then
    return require("models.bert").new({ vocab_size = size.vocabulary, max_position_embeddings = size.seq,
      num_hidden_layers = size.layers, num_attention_heads = size.heads, hidden_size = size.width,
      intermediate_size = 4 * size.width }, { task = "sequence_classification", num_labels = 2,
      recompute = recompute })
  end
  return require("models.gpt2").new({ vocab_size = size.vocabulary, n_positions = size.seq, n_layer = size.layers,
    n_head = size.heads, n_embd = size.width }, { recompute = recompute })
end

ps.init_distributed { seed = args.seed }
local config = {
  optimizer = { type = "Adam", params = { lr = 1e-4 } },
  zero_optimization = { stage = ps.world_size() > 1 and 3 or 0 },
  device = args.device,
}
if args.precision ~= "fp32" then config[args.precision] = { enabled = true } end
if args.device_memory or args.host or args.disk then
  config.memory = { device = args.device_memory, host = args.host, disk = args.disk and { path = args.disk } or nil }
end
local model, optimizer = ps.initialize { model_func = make, config = config }
local parameters = 0
for _, p in ipairs(model:parameters()) do parameters = parameters + p:numel() end

local ids = ps.randint(0, size.vocabulary, { args.batch, size.seq }, { dtype = "int32" })
local labels = ps.randint(0, 2, { args.batch }, { dtype = "int64" })
local function loss_of()
  if size.kind == "bert" then return model({ input_ids = ids, labels = labels }).loss end
  return model(ids, ids)
end

local clock = ps.now
local flops = parameters * args.batch * size.seq * FLOPS
local steps = {}
for step = 1, args.steps do
  local begin = clock()
  optimizer:zero_grad()
  local loss = loss_of()
  model:backward(loss)
  optimizer:step()
  local value, elapsed = loss:item(), clock() - begin
  steps[step] = { seconds = elapsed, tflops = flops / elapsed / 1e12, samples_per_s = args.batch / elapsed,
    loss = value }
  ps.print_rank(("Step %d elapse %.3f s, %.4f Tflops per process, %.3f samples per second, loss %.4f"):format(step,
    elapsed, steps[step].tflops, steps[step].samples_per_s * ps.world_size(), value))
end
if args.json and ps.rank() == 0 then
  print(json.encode { model = size.name, parameters = parameters, batch = args.batch, seq = size.seq,
    ranks = ps.world_size(), precision = args.precision, steps = steps })
end
