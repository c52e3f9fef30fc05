-- SPDX-License-Identifier: BSD-3-Clause
-- Helper functions for batches (the arguments of a model) and for the outputs of models. There are two kinds of
-- batches. A positional batch consists of inputs x and targets y, where y[i] is the target of x[i]. A named batch is
-- one table: { input_ids =, labels =, ... }. The output for a named batch contains the loss in the field `loss`.
local create = require "ps.tensor.create"
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local nn_module = require "ps.nn.module"
local caller = require "ps.core.caller"

local batch = {}

--- A target with this label is ignored, as in PyTorch and transformers.
batch.IGNORED = -100

local DEPTH = 6                    -- tensors are searched for in tables that are nested up to 6 levels deep

-- The metatable of a model's output for a named batch. The output can be called as an iterator that returns it once:
-- `for out in model(batch) do`.
local turned = setmetatable({}, { __mode = "k" })
local Output = { __call = function(out)
  turned[out] = not turned[out] or nil
  if turned[out] then return out end
end }

-- The metatable of a pipeline's output for a named batch, on a rank that does not hold the output tensors.
local Partial = { __call = Output.__call, __index = function(_, name)
  if type(name) ~= "string" then return nil end
  caller.error(("out.%s: in a pipeline only the last stage has more than out.loss; { gather = true } sends the tensors "
    .. "to all ranks, as in model:micro_batches(batch, { gather = true })"):format(name))
end }

-- The metatable of the output of a call without targets. The loss is computed when a script reads the field `loss`.
local pending = setmetatable({}, { __mode = "k" })
local Later = { __call = Output.__call, __index = function(out, name)
  local make = name == "loss" and pending[out]
  if not make then return nil end
  local value = scope.no_grad(make)
  rawset(out, "loss", value)
  pending[out] = nil
  return value
end }

-- Returns whether a value is a plain table, in which tensors are searched for. Modules and other objects are not plain
-- tables.
local function is_plain_table(value)
  local mt = type(value) == "table" and getmetatable(value)
  return mt == nil or mt == Output or mt == Partial or mt == Later
end

--- Returns a table of the arguments of a call, with their number in the field n. If the only argument is a list, the
--- items of the list become the arguments. A second argument nil is ignored: in `for x, y in loader do`, y is nil if
--- the loader returns one table per batch.
---@return any[] given
function batch.spread(...)
  local given = { n = select("#", ...), ... }
  local only = given[1]
  local alone = given.n == 1 or given.n == 2 and rawequal(given[2], nil)
  if alone and type(only) == "table" and not nn_module.is_module(only) and #only > 0 then
    return { n = #only, unpack(only) }
  end
  return given
end

local function moved(value, device, name, depth)
  if scope.is_tensor(value) then return value.device_ ~= device and value:to(name) or value end
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

--- Returns a copy of the arguments in which all tensors are on the given device, including tensors in tables. A tensor
--- that is already on the device is not copied.
---@param given any[] the arguments and their number n
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
  if scope.is_tensor(value) then
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

--- Returns a text that describes the arguments: the names, shapes and dtypes of the tensors, and all other values. If
--- two calls of a model have the same text, they run the same ops.
---@param given any[] the arguments and their number n
---@return string
function batch.signature(given)
  local parts = {}
  for i = 1, given.n do describe(parts, given[i], DEPTH) end
  return table.concat(parts, " ")
end

local hash_out = native.ffi.new("uint64_t[1]")

--- Appends the hashes of all tensors in a value to `said`. Ranks compare the hashes to check that they have the same
--- batch. If a tensor is on a device, the host waits for it.
---@param said string[]
---@param value any
function batch.add_hashes(said, value)
  if not devices.computes then return end  -- in a script's dry run the other ranks have no rows
  if scope.is_tensor(value) then
    native.check(native.C.ps_tensor_hash(value:to("cpu"):contiguous(), hash_out))
    said[#said + 1] = tostring(hash_out[0])
  elseif type(value) == "table" then
    for _, key in ipairs(sorted_keys(value)) do batch.add_hashes(said, value[key]) end
  end
end

-- -- targets --------------------------------------------------------------------------------------------------------
local function are_classes(t)
  if not scope.is_tensor(t) then return false end
  local dtype = t:dtype()
  return dtype == "int32" or dtype == "int64"
end

-- Returns the targets of a batch, or nil if the batch has none. In a named batch, the targets are `labels`. In a
-- positional batch, they are y, but only if y has the same shape as x.
local function find(given)
  local x, y = given[1], given[2]
  if is_plain_table(x) then return are_classes(x.labels) and x.labels or nil end
  if are_classes(y) and scope.is_tensor(x) and nn_module.same_shape(x:shape(), y:shape()) then return y end
end

---@class ps.Targets
---@field count number number of targets that are not ignored
---@field places number number of all targets, including the ignored ones
---@field explicit? boolean true if the model's count_targets returned the count

-- Calls fn(...) without gradients and returns its result. Returns nil in a script's dry run if fn reads the values of a
-- tensor, because a dry run does not compute them.
local function known(fn, ...) return devices.known(scope.no_grad, fn, ...) end

-- Returns a metatable for targets. The targets are counted when the field `count` is read for the first time.
local function later(counted)
  return { __index = function(found, name)
    if name ~= "count" then return nil end
    found.count = counted()
    return found.count
  end }
end

--- Counts the targets of a batch whose label is not -100. Returns nil if the batch has no targets.
---
--- If the loss of a model is the mean over fewer or other targets, the model must have a method count_targets(...). The
--- method is called with the model's arguments. It returns the number of targets in the mean, or nil for the default
--- count. The models of transformers need this method: they shift their labels, so the first label of a row does not
--- count.
---
--- If the targets are on a device, they are counted when the field `count` is read, and the host waits for the device.
--- If the targets were computed by ops in a script's dry run, all of them are counted.
---@param model ps.nn.Module
---@param given any[] the arguments and their number n
---@return ps.Targets?
function batch.targets(model, given)
  local labels = find(given)
  local count
  if type(model.count_targets) == "function" then
    count = known(model.count_targets, model, unpack(given, 1, given.n))
    if count ~= nil and not (type(count) == "number" and count >= 0 and count < math.huge) then
      caller.error(("the model's count_targets returned %s, not a number of targets"):format(tostring(count)))
    end
  end
  if labels == nil and count == nil then return nil end
  local found = { count = count, places = labels ~= nil and labels:numel() or count, explicit = count ~= nil }
  if count ~= nil then return found end
  local function counted()
    return known(function() return labels:ne(batch.IGNORED):sum():item() end) or labels:numel()
  end
  if not native.on_host(labels) then return setmetatable(found, later(counted)) end
  found.count = counted()
  return found
end

-- -- rows -----------------------------------------------------------------------------------------------------------
-- Returns whether a batch is one table of named tensors.
local function is_named(given) return given.n == 1 and is_plain_table(given[1]) end
batch.is_named = is_named

-- Returns a copy of a value in which each tensor is replaced by fn(tensor, rule, name). `rule` says how the rows of the
-- tensor belong to samples:
--   "rows"         each sample has one row
--   "rows or one"  each sample has one row, or all samples share one row
--   nil            the tensor has no rows
local function with_tensors(value, rule, name, fn, depth)
  if scope.is_tensor(value) then return fn(value, rule, name) end
  if depth == 0 or not is_plain_table(value) then return value end
  local copy = {}
  for _, key in ipairs(sorted_keys(value)) do copy[key] = with_tensors(value[key], rule, name, fn, depth - 1) end
  return copy
end

-- Applies with_tensors to a batch and returns the copy. In a named batch, the rule for a name is
-- model.split_inputs[name]. If the model has no table split_inputs, or if the batch is positional, the rule for all
-- tensors is "rows".
local function with_rules(model, given, fn)
  if not is_named(given) then
    local copy = { n = given.n }
    for i = 1, given.n do copy[i] = with_tensors(given[i], "rows", "argument " .. i, fn, DEPTH) end
    return copy
  end
  local rules, copy = model.split_inputs, {}
  for _, key in ipairs(sorted_keys(given[1])) do
    local rule = "rows"
    if rules then rule = rules[key] end
    copy[key] = with_tensors(given[1][key], rule, tostring(key), fn, DEPTH)
  end
  return { n = 1, copy }
end

--- Returns the number of rows of a batch. A row is a sample. The number is the size of the first dimension of all
--- tensors that have one row per sample. Raises an error if these tensors have different numbers of rows.
---@param model ps.nn.Module
---@param given any[] the arguments and their number n
---@return integer rows
function batch.rows(model, given)
  local rows, of
  with_rules(model, given, function(t, rule, name)
    if rule ~= "rows" then return end
    local n = t:dim() > 0 and t:size(0) or nil
    if not n or rows and n ~= rows then
      caller.error(("a batch is split along the first dimension of its tensors, but %s has shape [%s]%s; the model's "
        .. "table "
        .. "split_inputs says which inputs have a row for each sample"):format(name, table.concat(t:shape(), ", "),
        rows and (", %s has %d rows"):format(of, rows) or ""))
    end
    rows, of = n, of or name
  end)
  if not rows then caller.error "a batch without a tensor that has a row for each sample cannot be split" end
  return rows
end

--- Returns `count` rows of a batch that has `rows` rows. The result begins at row `first`, counted from 0. Its tensors
--- are views of the batch's tensors.
---@param model ps.nn.Module
---@param given any[] the arguments and their number n
---@param rows integer
---@param first integer
---@param count integer
---@return any[]
function batch.narrow(model, given, rows, first, count)
  if count == rows then return given end
  return with_rules(model, given, function(t, rule)
    local has = rule == "rows" or rule == "rows or one" and t:dim() > 1 and t:size(0) == rows
    return has and t:narrow(0, first, count) or t
  end)
end

--- Returns a copy of a batch that has `rows` rows. The values of its tensors are undefined. Dry runs use such a batch,
--- because they need only the shapes.
---@param model ps.nn.Module
---@param given any[] the arguments and their number n
---@param rows integer
---@return any[]
function batch.resized(model, given, rows)
  local before = batch.rows(model, given)
  return with_rules(model, given, function(t, rule)
    local has = rule == "rows" or rule == "rows or one" and t:dim() > 1 and t:size(0) == before
    if not has then return t end
    local shape = t:shape()
    shape[1] = rows
    return create.empty(shape, { dtype = t:dtype(), device = t:device() })
  end)
end

-- -- outputs --------------------------------------------------------------------------------------------------------
--- Returns the tensor at which backward starts, or nil if the output contains no tensor. If the output is a tensor, it
--- is returned. If the output is a table, its field `loss` is returned. A table without a tensor `loss` is searched in
--- the order of its keys, which is the same on all ranks, and the first tensor is returned.
---@param output any
---@return ps.Tensor?
function batch.loss(output)
  if scope.is_tensor(output) then return output end
  if type(output) ~= "table" then return nil end
  if scope.is_tensor(output.loss) then return output.loss end
  for _, key in ipairs(sorted_keys(output)) do
    local found = batch.loss(output[key])
    if found ~= nil then return found end
  end
end

--- If `result` is a plain table, makes it callable as an iterator that returns it once. Does not change other values.
---@param result any
---@param ... any
---@return any ... all arguments
function batch.turning(result, ...)
  if is_plain_table(result) and getmetatable(result) ~= Later then setmetatable(result, Output) end
  return result, ...
end

--- Returns a table of the results of a model. The results are at the indices 1, 2, ... The first result also has a
--- name: `loss` if it has one element, and `logits` otherwise. If the first result is not a tensor, returns it
--- unchanged.
---@param result any
---@param ... any the other results of the model
---@return table
function batch.output(result, ...)
  if not scope.is_tensor(result) then return (batch.turning(result)) end
  local out = { result, ... }
  out[result:numel() == 1 and "loss" or "logits"] = result
  return setmetatable(out, Output)
end

--- Marks an output as incomplete: only some of its tensors are on this rank. Reading any other field raises an error.
---@param out table<string, ps.Tensor>
---@return table out
function batch.partial(out) return setmetatable(out, Partial) end

--- Makes an output compute its loss when a script reads the field `loss`. make() returns the loss and runs without
--- gradients.
---@param out table
---@param make fun(): ps.Tensor
---@return table out
function batch.later(out, make)
  out.loss = nil
  pending[out] = make
  return setmetatable(out, Later)
end

--- Returns whether a batch has targets. The targets of a named batch are `labels`. The targets of a positional batch
--- are the second argument.
---@param given any[] the arguments and their number n
---@return boolean
function batch.has_targets(given)
  if batch.is_named(given) then return given[1].labels ~= nil end
  return given.n > 1
end

--- Returns a list of all tensors in an output.
---@param output any
---@return ps.Tensor[]
function batch.tensors(output)
  local list = {}
  with_tensors(output, nil, nil, function(t) list[#list + 1] = t end, DEPTH)
  return list
end

return batch
