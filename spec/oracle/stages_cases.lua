-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/launch.lua --nproc-per-node N spec/oracle/stages_cases.lua JOB.json: trains the cases that
-- stages_oracle.py drew, in a pipeline of N ranks. Into a case's `out` go a checkpoint and result-RANK.json of each
-- rank ({losses, norms, skipped, scales}, or {error}).
local ps = require "ps"
local json = require "cjson"
local gpt2 = require "models.gpt2"

local function exact(x) return x and ("%.17g"):format(x) or json.null end

local function is_bias(name) return name:match("bias$") ~= nil end

local function run(case)
  local data, result = ps.safetensors.open(case.data), { losses = {}, norms = {}, skipped = {}, scales = {} }
  local model, optimizer = ps.initialize {
    model_func = function() return gpt2.from_pretrained(case.model) end,
    config = case.config, param_groups = case.groups and { { match = is_bias, weight_decay = 0 }, {} } or nil,
    quiet = true,
  }
  for step = 1, case.steps do
    local rate = case.rates[tostring(step)]
    if rate then optimizer:set_lr(rate) end
    optimizer:zero_grad()
    for out in model:micro_batches(data:tensor("x." .. step), data:tensor("y." .. step)) do
      result.losses[#result.losses + 1] = exact(out.loss:item())
      model:backward(out.loss)
    end
    local info = optimizer:step()
    result.skipped[step], result.norms[step] = info.skipped, exact(info.grad_norm)
    result.scales[step] = exact(optimizer.scaler and optimizer.scaler.scale or 1)
  end
  ps.checkpoints.save(case.out .. "/checkpoints", { model = model, optimizer = optimizer })
  model:close()
  return result
end

local f = assert(io.open(arg[1], "rb"))
local job = json.decode(f:read "*a")
f:close()
ps.init_distributed { seed = 1, quiet = true }
for _, case in ipairs(job) do
  for key, value in pairs(case) do if value == json.null then case[key] = nil end end
  local ok, result = pcall(run, case)
  f = assert(io.open(("%s/result-%d.json"):format(case.out, ps.rank()), "wb"))
  f:write(json.encode(ok and result or { error = tostring(result) }))
  f:close()
  if not ok then error(result, 0) end  -- the model is still open, so later cases would prove nothing
end
