-- SPDX-License-Identifier: BSD-3-Clause
-- Runs the cases of order_oracle.py, one for each folder: reads the model and PyTorch's state of its optimizer, and
-- writes result.json (the parameters' names in order), the state by names (by_name.safetensors) and the state in
-- PyTorch's form (ours.pt).
local cjson = require "cjson"
local ps = require "ps"

local function text_of(path)
  local f = assert(io.open(path))
  local text = f:read "*a"
  f:close()
  return text
end

local function is_bias(name) return name:match "bias$" ~= nil end

local model

-- Returns the state of an engine's optimizer that was loaded from PyTorch and saved again.
local function run_engine(folder, case)
  local config = { optimizer = { type = case.kind, params = case.params }, plan_print = false }
  if case.memory == "plain" then config.memory = "plain" end
  local optimizer
  model, optimizer = ps.initialize { quiet = true, config = config,
    param_groups = case.groups and { { match = is_bias }, {} } or nil,
    model_func = function() return ps.from_pretrained(case.model, { quiet = true }) end }
  optimizer:load_state_dict(ps.load(folder .. "/torch.pt"))
  ps.save(optimizer:state_dict(model).tensors, folder .. "/by_name.safetensors")
  ps.save(optimizer:state_dict(), folder .. "/ours.pt")
  model:close()
  model = nil
end

-- Returns the matrices of a model with their names.
local function matrices(module)
  local group = { params = {}, param_names = {} }
  for name, p in module:named_parameters() do
    if p:dim() == 2 then
      table.insert(group.params, p)
      table.insert(group.param_names, name)
    end
  end
  return { group }
end

local function run(folder)
  local case = cjson.decode(text_of(folder .. "/case.json"))
  if case.kind ~= "Muon" then run_engine(folder, case) end
  local names = {}
  local module, groups = ps.from_pretrained(case.model, { quiet = true }), nil
  if case.groups then
    groups = { { params = {}, param_names = {} }, { params = {}, param_names = {} } }
    for name, p in module:named_parameters() do
      local group = groups[is_bias(name) and 1 or 2]
      table.insert(group.params, p)
      table.insert(group.param_names, name)
    end
  end
  for name in module:named_parameters() do names[#names + 1] = name end
  if case.kind == "Muon" then groups = matrices(module) end
  local params = {}
  for key, value in pairs(case.params) do params[key] = value end
  local plain = ps.optim[case.kind](groups or module, params)
  plain:load_state_dict(ps.load(folder .. "/torch.pt"))
  ps.save(plain:state_dict(module).tensors, folder .. "/plain_by_name.safetensors")
  ps.save(plain:torch_state_dict(), folder .. "/plain_ours.pt")
  return { names = names }
end

for _, folder in ipairs(arg) do
  local ok, result = pcall(run, folder)
  if model then model:close() end
  model = nil
  local f = assert(io.open(folder .. "/result.json", "w"))
  f:write(cjson.encode(ok and result or { error = tostring(result) }))
  f:close()
end
