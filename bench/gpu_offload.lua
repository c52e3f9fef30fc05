-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a GPT-2 in chunks whose state does not fit the device's budget, on random tokens, and says what a step took.
--   psluajit bench/gpu_offload.lua --model gpt2-xl --device-memory 24GiB --host 100GiB --batch 4 --seq 1024 --steps 6
-- The last line is one JSON object: step_s and tokens_per_s (median of the steps after the second), losses, bytes moved
-- a step and the rate that makes over the step.
local ps = require "ps"
local cjson = require "cjson"
local argparse = require "argparse"
local gpt2 = require "models.gpt2"

local parser = argparse("bench/gpu_offload.lua", "Measures training with host offload.")
parser:option("--model", "preset of models/gpt2.lua", "gpt2-xl")
parser:option("--layers", "other number of layers"):convert(tonumber)
parser:option("--device", "device", "cuda")
parser:option("--device-memory", "budget on the device", "24GiB")
parser:option("--host", "budget in host memory", "60%")
parser:option("--batch", "rows", "4"):convert(tonumber)
parser:option("--seq", "positions", "1024"):convert(tonumber)
parser:option("--steps", "steps", "6"):convert(tonumber)
parser:flag("--recompute", "recompute blocks in backward")
local args = parser:parse()

ps.manual_seed(0)
local model, optimizer = ps.initialize {
  model_func = function()
    return gpt2.new(args.model, { n_positions = args.seq, n_layer = args.layers, recompute = args.recompute })
  end,
  config = { device = args.device, bf16 = { enabled = true }, train_micro_batch_size_per_gpu = args.batch,
    memory = { device = args.device_memory, host = args.host },
    optimizer = { type = "AdamW", params = { lr = 1e-4 } } },
}
local vocab = model.config.vocab_size
local x = ps.randint(0, vocab, { args.batch, args.seq }, { dtype = "int32", device = args.device }):keep()
local y = ps.randint(0, vocab, { args.batch, args.seq }, { dtype = "int32", device = args.device }):keep()
local times, losses = {}, {}
for step = 1, args.steps do
  local t = ps.now()
  local loss = model(x, y)
  model:backward(loss)
  optimizer:step()
  losses[step] = loss:item()
  local s = ps.now() - t
  if step > 2 then times[#times + 1] = s end
  print(("step %d loss %.5f: %.1f ms"):format(step, losses[step], s * 1e3))
end
table.sort(times)
local step_s = times[math.floor(#times / 2) + 1]
print(ps.memory())
print(cjson.encode { what = "offload", model = args.model, layers = args.layers, device_memory = args.device_memory,
  batch = args.batch, seq = args.seq, step_s = step_s, tokens_per_s = args.batch * args.seq / step_s, losses = losses,
  parameters = model:num_parameters() })
model:close()
