-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a GPT-2 in chunks on random tokens, and prints the time of a step. The state of the model does not fit into
-- the device's budget.
--   psluajit bench/gpu_offload.lua --width 4096 --heads 32 --layers 25 --device-memory 24GiB --host 100GiB
--     --resident 110GiB --recompute
--   psluajit bench/gpu_offload.lua --width 4096 --heads 32 --layers 79 --largest --device-memory 110GiB --host 100GiB
--     --batch 1 --recompute
-- The last line is one JSON object with step_s and tokens_per_s (medians over all steps except the first two), the
-- losses, and the bytes that moved per step in each direction.
--   --resident  before the measured run, runs the same model with this budget, in which nothing moves. compute_s is the
--               step time of this first run. over_bound is step_s divided by the larger of compute_s and the time of
--               the copies at the link's rates.
--   --largest   begins with --layers layers, and removes 3 % of the layers until the model fits. Each step also prints
--               a JSON object.
local ps = require "ps"
local cjson = require "cjson"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole
local gpt2 = require "models.gpt2"
local C = ps.C

io.stdout:setvbuf "line"                                -- if this process is killed, the output up to then is not lost
local parser = argparse("bench/gpu_offload.lua", "Measures training with host offload.")
parser:option("--model", "preset of models/gpt2.lua", "gpt2-xl")
whole(parser:option("--layers", "number of layers, instead of the preset's"), 1)
whole(parser:option("--width", "other width"), 1)
whole(parser:option("--heads", "number of heads, instead of the preset's"), 1)
parser:option("--device", "device", "cuda")
parser:option("--device-memory", "budget on the device", "24GiB")
parser:option("--host", "budget in host memory", "60%")
parser:option("--resident", "budget on the device in which everything fits, to measure the computation alone")
whole(parser:option("--batch", "rows", "4"), 1)
whole(parser:option("--seq", "positions", "1024"), 1)
whole(parser:option("--steps", "steps", "6"), 1)
parser:flag("--recompute", "recompute blocks in backward")
parser:flag("--largest", "search the largest number of layers that fits")
local args = command_line.parse(parser)

local function median(list)
  table.sort(list)
  return list[math.floor(#list / 2) + 1]
end

--- Returns the numbers of bytes that have been copied to the device and from the device.
local function moved()
  local info = ps.ffi.new("ps_tier_info")
  ps.check(C.ps_engine_tier_get(ps.ctx, 1, info))
  return tonumber(info.bytes_up), tonumber(info.bytes_down)
end

local function make(layers, device_memory)
  ps.manual_seed(0)
  return ps.initialize {
    model_func = function()
      return gpt2.new(args.model, { n_positions = args.seq, n_layer = layers, n_embd = args.width,
        n_head = args.heads, recompute = args.recompute })
    end,
    config = { device = args.device, bf16 = { enabled = true }, train_micro_batch_size_per_gpu = args.batch,
      memory = { device = device_memory, host = args.host },
      optimizer = { type = "AdamW", params = { lr = 1e-4 } } },
  }
end

--- Runs steps. Appends the figures of each step to `all`.
local function run(all, model, optimizer, steps)
  local vocab = model.config.vocab_size
  local where = { dtype = "int32", device = args.device }
  local x = ps.randint(0, vocab, { args.batch, args.seq }, where):keep()
  local y = ps.randint(0, vocab, { args.batch, args.seq }, where):keep()
  for step = 1, steps do
    local up, down = moved()
    local t = ps.now()
    optimizer:zero_grad()
    local loss = model(x, y)
    model:backward(loss)
    optimizer:step()
    all.losses[step] = loss:item()
    local s = ps.now() - t
    local up_now, down_now = moved()
    if step > 2 then
      all.times[#all.times + 1] = s
      all.ups[#all.ups + 1], all.downs[#all.downs + 1] = up_now - up, down_now - down
    end
    print(("step %d loss %.5f: %.1f ms, %.3g GB up, %.3g GB down"):format(step, all.losses[step], s * 1e3,
      (up_now - up) / 1e9, (down_now - down) / 1e9))
    if all.losses[step] ~= all.losses[step] then error("the loss is not a number") end
    if args.largest then  -- printed after each step, because the process can be killed before the search ends
      print(cjson.encode { what = "step", layers = all.layers, parameters = all.parameters, step_s = s })
    end
  end
  print(ps.memory())
end

--- Trains a model with `layers` layers within a budget. Returns the figures of its steps. If it fails, returns nil and
--- the reason.
local function train(layers, device_memory, steps)
  local made, model, optimizer = pcall(make, layers, device_memory)
  if not made then return nil, tostring(model) end
  local all = { times = {}, ups = {}, downs = {}, losses = {}, parameters = model:num_parameters(),
    layers = model.config.n_layer }
  local ok, problem = pcall(run, all, model, optimizer, steps)
  model:close()
  ps.collect()
  if not ok then return nil, tostring(problem) end
  all.step_s, all.up, all.down = median(all.times), median(all.ups), median(all.downs)
  return all
end

local layers, largest = args.layers, nil
if args.largest and not layers then parser:error "--largest begins its search at --layers" end
local compute = args.resident and assert(train(layers, args.resident, args.steps))
while not largest do
  local problem
  largest, problem = train(layers, args.device_memory, args.steps)
  if not largest then
    if not args.largest or layers <= 1 or not (problem:find "fit" or problem:find "budget"
      or problem:find "memory") then error(problem, 0) end
    print(("%d layers: %s"):format(layers, problem))
    layers = math.floor(layers * 0.97)
  end
end
local rates = ps.device_rates(args.device)
local out = { what = "offload", model = args.model, layers = largest.layers, device_memory = args.device_memory,
  host = args.host, batch = args.batch, seq = args.seq, step_s = largest.step_s,
  tokens_per_s = args.batch * args.seq / largest.step_s, losses = largest.losses, parameters = largest.parameters,
  gb_up = largest.up / 1e9, gb_down = largest.down / 1e9 }
if compute then
  out.compute_s = compute.step_s
  out.same_losses = table.concat(compute.losses, " ") == table.concat(largest.losses, " ")
  out.link_up_gb_per_s, out.link_down_gb_per_s = rates.up / 1e9, rates.down / 1e9
  local copies = math.max(largest.up / rates.up, largest.down / rates.down)
  out.copies_s = copies
  out.over_bound = largest.step_s / math.max(compute.step_s, copies)
  out.link_share = copies / largest.step_s
end
print(cjson.encode(out))
