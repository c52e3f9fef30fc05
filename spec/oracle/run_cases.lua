-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/run_cases.lua FOLDER
-- Computes what spec/oracle/oracle.py drew. FOLDER/in.safetensors has the tensors, FOLDER/cases.json is a list of
--   { id =, code =, inputs = [names], views = [lua text], wrt = [numbers], device =, single =, leaves = }
-- `code` is the body of a function of (ps, x, e): x are the inputs, seen through the views, e is { folder =, id =,
-- device = }. It gives tensors or numbers. Gradients are those of the inputs with the numbers `wrt` (from 0): of the
-- views where leaves is "views", else of what they are views of.
-- Writes FOLDER/out.safetensors ("ID.out.K", "ID.grad.K", K from 0) and FOLDER/out.json (by id: an error's text, or how
-- many outputs).
local ps = require "ps"
local json = require "cjson"

local folder = assert(arg[1], "run_cases.lua FOLDER")

local function read_all(path)
  local f = assert(io.open(path, "rb"))
  local text = f:read("*a")
  f:close()
  return text
end

local inputs = ps.safetensors.open(folder .. "/in.safetensors")
local cases = json.decode(read_all(folder .. "/cases.json"))
local found, results = {}, {}

local function pack(...) return { n = select("#", ...), ... } end

local function compile(text, what)
  return assert(loadstring("local ps, x, e = ... " .. text, "=" .. what))
end

local function keep(name, value)
  if type(value) == "number" then value = ps.tensor(value, { dtype = "fp64" }) end
  if not ps.is_tensor(value) then error(("%s is a %s, not a tensor or number"):format(name, type(value)), 0) end
  value = value:detach():to("cpu")
  found[name] = value:clone():keep()              -- a tensor that is returned twice is saved twice
end

local function run(case)
  local device = case.device or "cpu"
  local leaves, x = {}, {}
  for i, name in ipairs(case.inputs) do
    if name ~= "" then leaves[i] = inputs:tensor(name, device) end
  end
  local function view(i, t)
    if case.views[i] == "" then return t end
    return compile("local x = x[1] return " .. case.views[i], "a view")(ps, { t })
  end
  if case.leaves == "views" then
    for i = 1, #case.inputs do leaves[i] = leaves[i] and view(i, leaves[i]) end
  end
  for _, i in ipairs(case.wrt) do leaves[i + 1]:requires_grad(true) end
  for i = 1, #case.inputs do x[i] = case.leaves == "views" and leaves[i] or leaves[i] and view(i, leaves[i]) end
  local out = pack(compile(case.code, "case " .. case.id)(ps, x, { folder = folder, id = case.id, device = device }))
  local loss
  for k = 1, out.n do
    local name = ("%s.out.%d"):format(case.id, k - 1)
    if out[k] ~= nil then keep(name, out[k]) end
    local upstream = ("%s.up.%d"):format(case.id, k - 1)
    if inputs:has(upstream) and out[k] ~= nil and out[k]:needs_grad() then
      local up = inputs:tensor(upstream, device)
      if out[k]:dtype() ~= up:dtype() then
        error(("output %d is %s, PyTorch's is %s"):format(k - 1, out[k]:dtype(), up:dtype()), 0)
      end
      if case.single then
        out[k]:backward(up)
      else                                                            -- all outputs in one walk
        local part = (out[k]:double() * up:double()):sum()
        loss = loss and loss + part or part
      end
    end
  end
  if loss then loss:backward() end
  for _, i in ipairs(case.wrt) do
    local grad = leaves[i + 1]:grad()
    if grad ~= nil then keep(("%s.grad.%d"):format(case.id, i), grad) end
  end
  return { outputs = out.n }
end

for _, case in ipairs(cases) do
  local ok, result = pcall(ps.scope, function() return run(case) end)
  results[case.id] = ok and result or { error = tostring(result) }
end

-- An empty safetensors file cannot be written without a tensor.
found["none"] = ps.zeros({}, { dtype = "uint8" })
ps.safetensors.save(folder .. "/out.safetensors", found)
local f = assert(io.open(folder .. "/out.json", "wb"))
f:write(json.encode(results))
f:close()
