-- SPDX-License-Identifier: BSD-3-Clause
-- Batches as models take them, and the outputs of models. A batch is positional (inputs x and targets y, where y[i] is
-- the target of x[i]), or one table with names: { input_ids =, labels =, ... }. A named output has its loss as `loss`.
local ps = require "ps"
local core = require "ps.nn.module"
local caller = require "ps.caller"

local batch = {}

--- Targets that do not count have this value, as in PyTorch and transformers.
batch.IGNORED = -100

local DEPTH = 6                    -- of tables in tables that are looked into

-- A table of a script, which may hold tensors: no module, nor any other object.
local function is_plain_table(value) return type(value) == "table" and getmetatable(value) == nil end

--- The arguments of a model's call, and their number n: a list of tensors in one table is spread.
---@return any[] given
function batch.spread(...)
  local given = { n = select("#", ...), ... }
  local only = given[1]
  if given.n == 1 and type(only) == "table" and not core.is_module(only) and #only > 0 then
    return { n = #only, unpack(only) }
  end
  return given
end

local function moved(value, device, name, depth)
  if ps.is_tensor(value) then return value.device_ ~= device and value:to(name) or value end
  if depth == 0 or not is_plain_table(value) then return value end
  local copy
  for key, part in pairs(value) do
    local there = moved(part, device, name, depth - 1)
    if not rawequal(there, part) then
      copy = copy or {}
      copy[key] = there
    end
  end
  if not copy then return value end
  for key, part in pairs(value) do if copy[key] == nil then copy[key] = part end end
  return copy
end

--- The same arguments with tensors on a device, also those in tables. A tensor that lies there already is not copied.
---@param given any[] and n
---@param device integer
---@param name string
---@return any[]
function batch.on(given, device, name)
  local args = { n = given.n }
  for i = 1, given.n do args[i] = moved(given[i], device, name, DEPTH) end
  return args
end

local function sorted_keys(value)
  local keys = {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  return keys
end

local function describe(parts, value, depth)
  if ps.is_tensor(value) then
    parts[#parts + 1] = value:dtype() .. "[" .. table.concat(value:shape(), ",") .. "]"
  elseif depth > 0 and is_plain_table(value) then
    parts[#parts + 1] = "{"
    for _, key in ipairs(sorted_keys(value)) do
      parts[#parts + 1] = tostring(key) .. "="
      describe(parts, value[key], depth - 1)
    end
    parts[#parts + 1] = "}"
  else
    parts[#parts + 1] = type(value) == "table" and "table" or tostring(value)
  end
end

--- Names, shapes and types of the tensors, and the other values: together they decide which ops run.
---@param given any[] and n
---@return string
function batch.signature(given)
  local parts = {}
  for i = 1, given.n do describe(parts, given[i], DEPTH) end
  return table.concat(parts, " ")
end

-- -- targets --------------------------------------------------------------------------------------------------------
local function are_classes(t)
  if not ps.is_tensor(t) then return false end
  local dtype = t:dtype()
  return dtype == "int32" or dtype == "int64"
end

-- The targets: y of (x, y), which has the shape of x, or the labels of a named batch; nil where there are none.
local function find(given)
  local x, y = given[1], given[2]
  if is_plain_table(x) then return are_classes(x.labels) and x.labels or nil end
  if are_classes(y) and ps.is_tensor(x) and core.same_shape(x:shape(), y:shape()) then return y end
end

---@class ps.Targets
---@field count number targets that count
---@field places number all of them, ignored ones too

--- The targets of a batch: how many are not -100. A model whose loss is the mean of other targets has a method
--- count_targets(...). It takes the model's arguments and gives the number of these targets, or nil for the rule above.
--- Models of transformers need it: they shift their labels, so that a row's first does not count. The result is nil
--- where there are no targets to count. The host waits for targets that lie on a device.
---@param model ps.nn.Module
---@param given any[] and n
---@return ps.Targets?
function batch.targets(model, given)
  local labels = find(given)
  local count
  if type(model.count_targets) == "function" then
    count = ps.no_grad(model.count_targets, model, unpack(given, 1, given.n))
    if count ~= nil and not (type(count) == "number" and count >= 0 and count < math.huge) then
      caller.error(("the model's count_targets gave %s, not a number of targets"):format(tostring(count)))
    end
  end
  if labels == nil and count == nil then return nil end
  count = count or ps.no_grad(function() return labels:ne(batch.IGNORED):sum():item() end)
  return { count = count, places = labels ~= nil and labels:numel() or count }
end

-- -- outputs --------------------------------------------------------------------------------------------------------
--- The tensor that backward starts from: the model's output itself, its `loss`, or the first of a list. Of other tables
--- it is the first tensor in the order of names, which is the same on all ranks. Nil where there is none.
---@param output any
---@return ps.Tensor?
function batch.loss(output)
  if ps.is_tensor(output) then return output end
  if type(output) ~= "table" then return nil end
  if ps.is_tensor(output.loss) then return output.loss end
  for _, key in ipairs(sorted_keys(output)) do
    local found = batch.loss(output[key])
    if found ~= nil then return found end
  end
end

return batch
