-- SPDX-License-Identifier: BSD-3-Clause
-- The comparison behind bench/golden.lua and spec/golden_spec.lua: trains on a folder of golden values
-- (model.safetensors + golden.json: float64 losses, gradients of the first step, parameters after the last) and
-- measures the errors. A tensor's error is the larger of |l2 - l2*| / l2* and max |first8 - first8*| / rms.
-- `c_attn.bias` is kept apart: its key part has no true gradient, so Adam moves it by rounding noise.
local ps = require "ps"
local cjson = require "cjson"
local gpt2 = require "models.gpt2"

local golden = {}

local function read_json(path)
  local f, why = io.open(path, "rb")
  if not f then error("no golden values: " .. tostring(why), 0) end
  local text = f:read("*a")
  f:close()
  return cjson.decode(text)
end

local function tensor_error(t, want)
  t = t:to { dtype = "fp32", device = "cpu" }:detach():to("fp64")
  local l2 = t:norm():item()
  local flat, worst = t:reshape(-1), math.abs(l2 - want.l2) / want.l2
  local rms = want.l2 / math.sqrt(t:numel())
  for i, x in ipairs(want.first8) do
    worst = math.max(worst, math.abs(flat[i - 1]:item() - x) / rms)
  end
  return worst
end

--- Largest error over named tensors, that of c_attn.bias, and where the first is.
local function compare(tensors, wanted)
  local worst, apart, worst_name = 0, 0, ""
  for name, t in pairs(tensors) do
    local want = wanted[name] or wanted[(name:gsub("^transformer%.", ""))]
    if not want then error("the golden values have no " .. name, 0) end
    local err = tensor_error(t, want)
    if err ~= err then err = math.huge end
    if name:match("c_attn%.bias$") then apart = math.max(apart, err)
    elseif err >= worst then worst, worst_name = err, name end
  end
  return worst, apart, worst_name
end

-- fp32 values of the parameters by name: masters where there are any.
local function masters(model, optimizer)
  local params = {}
  for name, p in model:named_parameters() do
    for _, entry in ipairs(optimizer.entries) do
      if ps.same(p, entry.param) then params[name] = entry.master end
    end
  end
  return params
end

local function train(data, model, optimizer, device, result, note)
  for step, rows in ipairs(data.tokens) do
    local tokens = ps.tensor(rows, { dtype = "int64", device = device })
    local n = tokens:size(1)
    optimizer:zero_grad()
    local loss = model(tokens:narrow(1, 0, n - 1), tokens:narrow(1, 1, n - 1))
    loss:backward()
    local value = loss:item()
    local err = math.abs(value - data.losses[step]) / data.losses[step]
    note(("step %d loss %.9f golden %.9f relative error %.2e"):format(step, value, data.losses[step], err))
    result.max_rel_loss_error = math.max(result.max_rel_loss_error, err == err and err or math.huge)
    if step == 1 then
      local grads, worst = {}
      for name, p in model:named_parameters() do grads[name] = p:grad() end
      result.max_rel_grad_error, result.c_attn_bias_grad_error, worst = compare(grads, data.first_step_grads)
      note("largest gradient error in " .. worst)
    end
    optimizer:step()
  end
end

--- Runs a folder.
---@param folder string
---@param options? {device?: string, dtype?: string, recompute?: boolean, note?: fun(line: string)}
---@return {device: string, dtype: string, max_rel_loss_error: number, max_rel_grad_error: number,
---  max_rel_param_error: number, c_attn_bias_grad_error: number, c_attn_bias_param_error: number}
function golden.run(folder, options)
  options = options or {}
  local device, dtype = options.device or "cpu", options.dtype or "fp32"
  local data = read_json(folder .. "/golden.json")
  local model = gpt2.new(data.config, { dtype = dtype, device = device, recompute = options.recompute })
  model:load_weights(folder .. "/model.safetensors")
  local o = data.optimizer
  local optimizer = ps.optim.AdamW(model, { lr = o.lr, betas = o.betas, eps = o.eps, weight_decay = o.weight_decay })
  local result = { device = device, dtype = dtype, max_rel_loss_error = 0 }
  train(data, model, optimizer, device, result, options.note or function() end)
  local params = masters(model, optimizer)
  result.max_rel_param_error, result.c_attn_bias_param_error = compare(params, data.final_params)
  return result
end

return golden
