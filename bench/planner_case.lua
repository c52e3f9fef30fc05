-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/planner_case.lua JSON: trains a GPT-2 whose sizes are in the JSON object, for bench/planner.lua and
-- its dry runs. Prints one JSON line with the last loss, the seconds per step, and the peak memory in bytes.
local ps = require "ps"
local cjson = require "cjson"
local gpt2 = require "models.gpt2"

local case = cjson.decode(arg[1])
local device, steps = case.device, case.steps or 1
local on_cpu = device == "cpu"

local function statm()
  local f = assert(io.open("/proc/self/statm"))
  local resident = tonumber(f:read("*a"):match "^%d+ (%d+)") * 4096
  f:close()
  return resident
end

if case.ranks then ps.init_distributed { quiet = true } end
local memory
if case.device_nbytes or case.host_nbytes or case.disk then
  memory = { device = not on_cpu and case.device_nbytes or nil, host = case.host_nbytes,
    disk = case.disk and { path = case.disk } or nil }
end
local config = { device = device, seed = 5, plan_print = false, memory = memory, recompute = case.recompute or nil,
  bf16 = case.precision == "bf16" and { enabled = true } or nil,
  fp16 = case.precision == "fp16" and { enabled = true } or nil, rates = case.rates,
  zero_optimization = case.stage and { stage = case.stage } or nil,
  pipeline = case.stages and { stages = case.stages } or nil,
  tensor_parallel = case.tp and { size = case.tp } or nil, gradient_accumulation_steps = case.micros,
  optimizer = { type = "AdamW", params = { lr = 1e-4 } } }
local base = statm()
local made, model, optimizer = pcall(ps.initialize, { quiet = true, config = config, model_func = function()
  return gpt2.new { n_layer = case.layers, n_embd = case.width, n_head = case.heads, n_positions = case.positions,
    vocab_size = case.vocab, resid_pdrop = 0, embd_pdrop = 0, attn_pdrop = 0 }
end })
-- Raises the error as a table, so that a dry run can read from the table which tier was too small.
if not made then
  local why = "refused while the model was made: " .. tostring(model)
  if type(model) == "table" then model.msg = why else model = why end
  error(model, 0)
end
local x = ps.randint(0, case.vocab, { case.rows * (case.micros or 1), case.positions }, { dtype = "int32" })
local loss, times = nil, {}
if case.record then ps.profiler.start { events = 16 } end
for step = 1, steps do
  local began = ps.now()
  optimizer:zero_grad()
  if case.micros then
    for out in model:micro_batches(x, x) do
      loss = out.loss
      model:backward(loss)
    end
  else
    loss = model(x, x)
    model:backward(loss)
  end
  optimizer:step()
  local _ = loss:item()                                     -- waits until the device is idle
  times[step] = ps.now() - began
  if case.record and step == 1 and steps > 1 then ps.profiler.start { events = 16 } end
end
local totals = case.record and ps.profiler.stop() or nil
table.sort(times, function(a, b) return a < b end)
local tiers = require("ps.memory.chunks").tiers()
print(cjson.encode { loss = ("%.17g"):format(loss:item()), seconds = times[math.ceil(#times / 2)], least = times[1],
  base = base, rss = ps.peak_rss(), tiers = tiers, device_peak = ps.memory(device).peak, totals = totals,
  recorded = math.max(1, steps - 1) })
