-- SPDX-License-Identifier: BSD-3-Clause
-- Reproduces a folder of golden values (model.safetensors + golden.json: float64 losses, first gradients, parameters after
-- the last step) and prints the errors.
--   psluajit bench/golden.lua DIR [--device D] [--dtype T]
-- The last line is one JSON object: max_rel_loss_error, max_rel_grad_error, max_rel_param_error. For each tensor the error
-- is the larger of |l2 - l2*| / l2* and max |first8 - first8*| / rms; `c_attn.bias` is reported apart (its key part has no
-- true gradient, so Adam moves it by rounding noise).
local ps = require "ps"
local cjson = require "cjson"
local argparse = require "argparse"
local gpt2 = require "models.gpt2"

local parser = argparse("bench/golden.lua", "Compares training with golden float64 values.")
parser:argument("dir", "folder with golden.json and model.safetensors")
parser:option("--device", "cpu, ref", "cpu")
parser:option("--dtype", "fp32, bf16, fp16", "fp32")
local args = parser:parse()

local function read_json(path)
  local f, err = io.open(path, "rb")
  if not f then error("cannot open " .. tostring(err), 0) end
  local text = f:read("*a")
  f:close()
  return cjson.decode(text)
end

local golden = read_json(args.dir .. "/golden.json")
ps.set_default_device(args.device)
local model = gpt2.new(golden.config, { dtype = args.dtype, device = args.device })
model:load_weights(args.dir .. "/model.safetensors")
local o = golden.optimizer
local optimizer = ps.optim.AdamW(model, { lr = o.lr, betas = o.betas, eps = o.eps, weight_decay = o.weight_decay })

--- The larger of the two errors of a tensor against its golden summary.
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

local function compare(tensors, wanted)
  local worst, apart, worst_name = 0, 0, ""
  for name, t in pairs(tensors) do
    local want = wanted[name] or wanted[(name:gsub("^transformer%.", ""))]
    local err = tensor_error(t, want)
    if name:match("c_attn%.bias$") then apart = math.max(apart, err)
    elseif err > worst then worst, worst_name = err, name end
  end
  return worst, apart, worst_name
end

local result = { device = args.device, dtype = args.dtype, max_rel_loss_error = 0 }
for step, rows in ipairs(golden.tokens) do
  local tokens = ps.tensor(rows, { dtype = "int64", device = args.device })
  local n = tokens:size(1)
  optimizer:zero_grad()
  local loss = model(tokens:narrow(1, 0, n - 1), tokens:narrow(1, 1, n - 1))
  loss:backward()
  local value = loss:item()
  local err = math.abs(value - golden.losses[step]) / golden.losses[step]
  print(("step %d loss %.9f golden %.9f relative error %.2e"):format(step, value, golden.losses[step], err))
  result.max_rel_loss_error = math.max(result.max_rel_loss_error, err)
  if step == 1 then
    local grads = {}
    for name, p in model:named_parameters() do grads[name] = p:grad() end
    local worst
    result.max_rel_grad_error, result.c_attn_bias_grad_error, worst = compare(grads, golden.first_step_grads)
    print("largest gradient error in", worst)
  end
  optimizer:step()
end
local params = {}
for i, entry in ipairs(optimizer.entries) do
  local name
  for n, p in model:named_parameters() do if ps.same(p, entry.param) then name = n end end
  params[name or tostring(i)] = entry.master
end
result.max_rel_param_error, result.c_attn_bias_param_error = compare(params, golden.final_params)
print(cjson.encode(result))
