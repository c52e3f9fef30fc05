-- SPDX-License-Identifier: BSD-3-Clause
-- Statistics of parameters and of tensors inside a model, like those of BMTrain's inspect.
--
--   print(ps.inspect.format_summary(ps.inspect.inspect_model(model, "h.*.attn.*")))
--
--   local inspector = ps.inspect.inspect_tensor(function() model:backward(model(x, y)) end)
--   print(ps.inspect.format_summary(inspector:get_summary()))     -- the tensors passed to ps.inspect.record_tensor
--
-- All numbers are computed in fp64 (ps_tensor_stats). As in PyTorch, the standard deviation divides by the number of
-- elements minus one, and is NaN for a single element. The parameters and records of all ranks are combined, so all
-- ranks must make the same calls.
local native = require "ps.core.ffi"
local handle = require "ps.nn.handle"
local exact = require "ps.core.exact"
local caller = require "ps.core.caller"
local summary = require "ps.nn.summary"
local scope = require "ps.core.scope"
local ffi, C = native.ffi, native.C
local error = caller.error

local inspect = {}

---@class ps.inspect.Row
---@field name string
---@field group? string group of a record
---@field index? integer index of a record among the records of the same name and group, counted from 0
---@field shape integer[]
---@field mean number
---@field std number
---@field min number
---@field max number
---@field grad_mean? number nil if there is no gradient
---@field grad_std? number

local stats_out, no_values = ffi.new("ps_stats"), ffi.new("double[1]")

-- Returns the statistics {numel, mean, squares, min, max} of a tensor. `squares` is the sum of the squared differences
-- between the elements and the mean.
local function stats_of(t)
  return scope.no_grad(scope.scope, function()
    native.check(C.ps_tensor_stats(t:to("cpu"), stats_out))
    return { tonumber(stats_out.numel), stats_out.mean, stats_out.squares, stats_out.min, stats_out.max }
  end)
end

local function std(s) return s[1] > 1 and math.sqrt(s[3] / (s[1] - 1)) or 0 / 0 end

-- Returns the statistics of the union of two sets of elements from the statistics of each set (Chan, Golub, LeVeque
-- 1979).
local function join(a, b)
  if a[1] == 0 then return b end
  if b[1] == 0 then return a end
  local n, delta = a[1] + b[1], b[2] - a[2]
  local function pick(x, y, first)
    if x ~= x or y ~= y then return 0 / 0 end
    return first and x or y
  end
  return { n, a[2] + delta * b[1] / n, a[3] + b[3] + delta * delta * a[1] * b[1] / n,
    pick(a[4], b[4], a[4] <= b[4]), pick(a[5], b[5], a[5] >= b[5]) }
end

-- -- entries as text, which ranks send to each other ------------------------------------------------------------------
-- An entry describes a tensor of one rank. It has the fields name, group, index, shape, value and grad. `value` and
-- `grad` are statistics. If the tensor is a part of a larger tensor, and several ranks may have copies of this part,
-- the field `part` is the index of the part.
local function write_numbers(list)
  local parts = {}
  for i, x in ipairs(list or {}) do parts[i] = ("%.17g"):format(x) end
  return table.concat(parts, " ")
end

local SPECIAL = { nan = 0 / 0, ["-nan"] = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }

local function read_numbers(text)
  local list = {}
  for word in text:gmatch "%S+" do list[#list + 1] = SPECIAL[word] or tonumber(word) end
  return list
end

local function escaped(text) return (text:gsub("[%%\t\n]", function(c) return ("%%%02x"):format(c:byte()) end)) end
local function plain(text) return (text:gsub("%%(%x%x)", function(h) return string.char(tonumber(h, 16)) end)) end

local function write(entries)
  local lines = {}
  for i, e in ipairs(entries) do
    lines[i] = table.concat({ escaped(e.name), e.group and "=" .. escaped(e.group) or "", e.index or "",
      write_numbers(e.shape), write_numbers(e.value), write_numbers(e.grad), e.part or "" }, "\t")
  end
  return table.concat(lines, "\n")
end

local function read(text)
  local entries = {}
  for line in text:gmatch "[^\n]+" do
    local name, group, index, shape, value, grad, part = line:match(
      "^(.-)\t(.-)\t(.-)\t(.-)\t(.-)\t(.-)\t(.*)$")
    grad = read_numbers(grad)
    entries[#entries + 1] = { name = plain(name), group = group ~= "" and plain(group:sub(2)) or nil,
      index = tonumber(index), shape = read_numbers(shape), value = read_numbers(value),
      grad = grad[1] and grad or nil, part = tonumber(part) }
  end
  return entries
end

-- Returns a list with the entries of each rank. fn() returns the entries of this rank. If fn raises an error on one
-- rank, the error is raised on all ranks.
local function of_ranks(fn)
  local group = require("ps.dist.mesh").group "world"
  if not group then return { fn() } end
  local agree = require "ps.dist.agree"
  local mine, all = agree.run(group, fn), {}
  for rank, text in ipairs(agree.texts(group, write(mine))) do all[rank] = read(text) end
  return all
end

---@return ps.inspect.Row
local function row_of(e)
  return { name = e.name, group = e.group, index = e.index, shape = e.shape, mean = e.value[2], std = std(e.value),
    min = e.value[4], max = e.value[5], grad_mean = e.grad and e.grad[2], grad_std = e.grad and std(e.grad) }
end

-- -- parameters -------------------------------------------------------------------------------------------------------
-- Converts a pattern of Python's fnmatch to a Lua pattern. The pattern may contain *, ?, [abc], [a-z] and [!a].
local function matcher(pattern)
  local out, at = { "^" }, 1
  while at <= #pattern do
    local c = pattern:sub(at, at)
    local close = c == "[" and pattern:find("]", at + (pattern:sub(at + 1, at + 1) == "!" and 3 or 2), true)
    if c == "*" then out[#out + 1] = ".*"
    elseif c == "?" then out[#out + 1] = "."
    elseif close then
      local set = pattern:sub(at + 1, close - 1):gsub("^!", "^"):gsub("[%%%[%]]", "%%%0")
      out[#out + 1], at = "[" .. set .. "]", close
    else out[#out + 1] = c:gsub("[%^%$%(%)%%%.%[%]%*%+%-%?]", "%%%0") end
    at = at + 1
  end
  return table.concat(out) .. "$"
end

-- Returns the parameters of a module that has no engine.
local function of_module(module)
  local list = {}
  for name, param in module:named_parameters() do
    list[#list + 1] = { name = name, value = param, grad = param:grad(), factor = 1 }
  end
  return list
end

-- Returns the entry of a parameter. If this rank has a shard of the parameter, `at` describes the shard
-- (ps.nn.sharded), and the entry's index is the index of the shard.
local function entry_of(it, at)
  local cut, value, own_grad = require "ps.nn.sharded", it.value, it.grad
  if at then
    value = cut.own(value, at)
    own_grad = own_grad ~= nil and value ~= nil and cut.own(own_grad, at) or nil
  end
  local grad = own_grad ~= nil and stats_of(own_grad) or nil
  if grad then grad[2], grad[3] = grad[2] * it.factor, grad[3] * it.factor ^ 2 end
  return { name = it.name, shape = at and at.shape or value:shape(), index = at and at.index,
    value = value ~= nil and stats_of(value) or { 0, 0, 0, 0, 0 }, grad = grad }
end

-- Takes the entries of all ranks and returns a table with one entry for each parameter, by name. The parts of a
-- parameter are combined. If several ranks have a copy of a part, only the first copy is used.
local function put_together(all)
  local found, parts = {}, {}
  for _, entries in ipairs(all) do
    for _, e in ipairs(entries) do
      local key, other = ("%d\t%s"):format(e.index or 0, e.name), found[e.name]
      if not other then found[e.name] = e
      elseif not parts[key] then
        other.value = join(other.value, e.value)
        other.grad = other.grad and e.grad and join(other.grad, e.grad) or other.grad or e.grad
      end
      parts[key] = true
    end
  end
  for _, e in pairs(found) do e.index = nil end
  return found
end

--- Returns statistics of a model's parameters and of their gradients.
---
--- If the model has an engine, the values are fp32: for a parameter of a half type, the values of its master are used.
--- This is possible even while gradients are stored in the memory of parameters. The gradients are the gradients of the
--- current step, without the loss scale. If backward has already used a gradient for an update, the gradient was freed,
--- and the row has no grad_mean and grad_std.
---
--- All ranks must call this function. On each rank, the result contains all parameters of the model, including the
--- parameters of other stages.
---@param model ps.nn.Module|ps.Engine
---@param pattern? string selects parameters whose names match the pattern; as in Python's fnmatch, the pattern may
--- contain *, ?, [abc] and [!abc] (default: all parameters)
---@param prefix? string a text that precedes each name in the result
---@return ps.inspect.Row[]
function inspect.inspect_model(model, pattern, prefix)
  local engine = handle.of(model)
  if not engine and not require("ps.nn.module").is_module(model) then
    error("ps.inspect.inspect_model takes a model, not a " .. type(model))
  end
  caller.typed(pattern or "*", "string", "ps.inspect.inspect_model: the pattern")
  caller.typed(prefix or "", "string", "ps.inspect.inspect_model: the prefix")
  local wanted, cuts = matcher(pattern or "*"), require("ps.nn.sharded").of(model)
  local function mine()
    local list = {}
    for _, it in ipairs(engine and require("ps.engine.state.values").parameters(engine) or of_module(model)) do
      if it.name:match(wanted) then list[#list + 1] = entry_of(it, cuts and cuts[it.name]) end
    end
    return list
  end
  local several = cuts or engine and engine.ranks
  local found, rows = put_together(several and of_ranks(mine) or { mine() }), {}
  for name in handle.module(model):named_parameters() do
    local e = found[name]
    if e then
      e.name = (prefix or "") .. name
      rows[#rows + 1] = row_of(e)
    end
  end
  return rows
end

--- Returns a list of a model's modules with their numbers of parameters. The list prints as a table. If several modules
--- share a parameter, it is counted in each of these modules, but only once in the whole model. model:summary() returns
--- the same list.
---@param model ps.nn.Module|ps.Engine
---@return {name: string, class: string, parameters: integer, trained: integer, nbytes: integer}[] rows the modules,
---  beginning with the model; nbytes: size of the parameters in bytes, without gradients and optimizer states
function inspect.summary(model)
  local module = handle.module(model)
  if not require("ps.nn.module").is_module(module) then
    error("ps.inspect.summary takes a model, not a " .. type(model))
  end
  return summary(module)
end

-- -- records ----------------------------------------------------------------------------------------------------------
---@class ps.inspect.Inspector
---@field records {name: string, group?: string, index: integer, tensor: ps.Tensor, leaf?: ps.Tensor, holder?:
---  ps.Tensor}[] records in the order of the calls; `holder` is the tensor of another record, which receives the
---  gradient for both records
local Inspector = {}
Inspector.__index = Inspector

local open = {}                                    -- the inspectors that are recording, innermost last

-- By recompute segment: the records that record_tensor made in the segment's first run. The second run computes the
-- same tensors again.
local made_in = setmetatable({}, { __mode = "k" })

-- Maps a recorded tensor x to the tensor of a record, which receives the gradient of x. For each x, there is at most
-- one such tensor.
local keeps = setmetatable({}, { __mode = "k" })

-- Makes backward store the gradient of x in a record. Returns 0 or an error code.
local function keep(x, record)
  local other = keeps[x]
  if other ~= nil then
    record.holder = other
    return 0
  end
  local rc = C.ps_tensor_keep_grad(x, record.tensor)
  if rc == 0 then keeps[x] = record.tensor end
  return rc
end

-- In the second run of a recompute segment, finds the records that the first run made for x, and makes backward store
-- the gradient of x in these records.
local function again(x)
  local run = scope.segment
  while run and not run.again do run = run.outer end
  if not run then return nil end
  local list = made_in[run.segment]
  if not list then return {} end                   -- no inspector was recording during the first run
  run.at = (run.at or 0) + 1
  local records = list[run.at] or {}
  for _, record in ipairs(records) do
    if scope.grad_enabled() then keep(x, record) end
  end
  return records
end

local function note(inspector, x, name, group)
  local tensor, index = scope.no_grad(function() return x:detach():clone() end), 0
  tensor:keep()
  for _, other in ipairs(inspector.records) do
    if other.name == name and other.group == group then index = index + 1 end
  end
  local record = { name = name, group = group, index = index, tensor = tensor }
  if x.node == nil then record.leaf = x:needs_grad() and x or nil
  else native.check(keep(x, record)) end
  table.insert(inspector.records, record)
  return record
end

--- Records a tensor inside a model under a name. All inspectors whose scope is open get the record. If no scope is
--- open, this function does nothing. A record contains a copy of the tensor's values, and later a copy of its gradient,
--- when backward computes the gradient. In a recomputed block, the first run makes the record, and the second run adds
--- the gradient to it.
---@param x ps.Tensor
---@param name string
---@param group? string a text that distinguishes records of the same name
---@return ps.Tensor x
function inspect.record_tensor(x, name, group)
  if not open[1] then return x end
  caller.tensor(x, "ps.inspect.record_tensor", "the tensor")
  caller.typed(name, "string", "ps.inspect.record_tensor: the name")
  if group ~= nil then caller.typed(group, "string", "ps.inspect.record_tensor: the group") end
  if C.ps_tensor_read_f64(x, 0, 0, no_values) == C.PS_EDRY then return x end
  local records = again(x)
  if not records then
    records = {}
    for i, inspector in ipairs(open) do records[i] = note(inspector, x, name, group) end
  end
  local run = scope.segment
  while run do
    if not run.again then
      made_in[run.segment] = made_in[run.segment] or {}
      table.insert(made_in[run.segment], records)
    end
    run = run.outer
  end
  return x
end

--- Opens a scope in which ps.inspect.record_tensor records tensors. If a function is given, the scope ends when the
--- function returns or fails. Otherwise it ends at inspector:close().
---@param fn? fun() runs the model's forward, and its backward if gradients are needed
---@return ps.inspect.Inspector
function inspect.inspect_tensor(fn)
  if fn ~= nil then caller.callable(fn, "ps.inspect.inspect_tensor") end
  local self = setmetatable({ records = {} }, Inspector)
  open[#open + 1] = self
  if fn then
    local ok, problem = xpcall(fn, scope.trace)
    self:close()
    if not ok then error(problem, 0) end
  end
  return self
end

--- Ends the scope. Tensors are not recorded any more, but the gradients of tensors that were already recorded are.
function Inspector:close()
  for i = #open, 1, -1 do if open[i] == self then table.remove(open, i) end end
end

-- Returns the open engine and the parameter's name if the record is a parameter of that engine. Otherwise returns nil.
local function engine_of(record)
  local engine = record.leaf and require("ps.engine.setup").current()
  local name = engine and not engine.closed and require("ps.engine.state.values").name_of(engine, record.leaf)
  if name then return engine, name end
end

-- Returns the gradient of a record, and the factor by which this gradient must be multiplied.
local function grad_of(record)
  local engine = engine_of(record)
  if engine then return require("ps.engine.state.values").gradient(engine, record.leaf) end
  return scope.grad_of(record.leaf or record.holder or record.tensor), 1
end

local function record_entry(record)
  local engine, name = engine_of(record)
  local grad, factor = grad_of(record)
  if not engine then
    return { name = record.name, group = record.group, index = record.index, shape = record.tensor:shape(),
      value = stats_of(record.tensor), grad = grad ~= nil and stats_of(grad) or nil }
  end
  local cuts = require("ps.nn.sharded").of(engine)
  local at = cuts and cuts[name]
  local e = entry_of({ value = record.tensor, grad = grad, factor = factor }, at)
  e.name, e.group, e.index, e.part = record.name, record.group, record.index, at and at.index or 0
  return e
end

--- Returns statistics of the records. The result contains a row for each record, in the order of the calls of
--- record_tensor. Records of several ranks with the same name, group and index are combined as if they were one tensor.
--- All ranks must call this function. Gradients are as backward computed them, including the loss scale and the weight
--- of the micro-batch.
---
--- A parameter of an engine is an exception: it is counted once and not once per rank, and its gradient is the gradient
--- of the current step as in inspect_model.
---@return ps.inspect.Row[]
function Inspector:get_summary()
  local rows, found, parts = {}, {}, {}
  local all = of_ranks(function()
    local list = {}
    for i, record in ipairs(self.records) do list[i] = record_entry(record) end
    return list
  end)
  for _, entries in ipairs(all) do
    for _, e in ipairs(entries) do
      local key = ("%d\t%s\t%s"):format(e.index, e.name, e.group or "")
      local other, part = found[key], e.part and ("%s\t%d"):format(key, e.part)
      if part and parts[part] then  -- e is a copy of a part that was already counted, but may have its gradient
        other.grad = other.grad or e.grad
      elseif other then
        other.value = join(other.value, e.value)
        other.grad = other.grad and e.grad and join(other.grad, e.grad) or other.grad or e.grad
      else
        found[key], rows[#rows + 1] = e, e
      end
      if part then parts[part] = true end
    end
  end
  for i, e in ipairs(rows) do rows[i] = row_of(e) end
  return rows
end

--- Returns a recorded tensor of this rank, and its gradient. For a parameter of an engine, the gradient is the mean of
--- the current step's gradients over micro-batches and ranks, without the loss scale, or nil if another rank owns it.
---@param name string
---@param group? string the group of the record (default: any group)
---@param index? integer index among the records of the name and group, counted from 0 (default: the last record)
---@return ps.Tensor? tensor nil if there is no such record
---@return ps.Tensor? grad nil if backward did not compute it
function Inspector:get_tensor(name, group, index)
  caller.typed(name, "string", "inspector:get_tensor: the name")
  if index ~= nil then caller.whole(index, "inspector:get_tensor: the index", 0) end
  local found, n
  for _, record in ipairs(self.records) do
    if record.name == name and (group == nil or record.group == group) then
      n = (n or -1) + 1
      if index == nil or index == n then found = record end
    end
  end
  if not found then return nil end
  local grad, factor = grad_of(found)
  if grad == nil or factor == 1 then return found.tensor, grad end
  return found.tensor, scope.no_grad(function() return grad * factor end)
end

-- -- the table --------------------------------------------------------------------------------------------------------
local function number(x)
  if not x then return "-" end
  if x ~= x then return "nan" end
  return ("%.4g"):format(x)
end

--- Returns a table of the rows as text.
---@param rows ps.inspect.Row[] the result of inspect_model or get_summary
---@return string
function inspect.format_summary(rows)
  caller.typed(rows, "table", "ps.inspect.format_summary: the rows")
  local readable, lines = require "ps.core.readable", {}
  for i, row in ipairs(rows) do
    if type(row) ~= "table" or type(row.name) ~= "string" or type(row.shape) ~= "table" then
      caller.error(("ps.inspect.format_summary: row %d is not a row of inspect_model or get_summary"):format(i))
    end
    local name = row.group and row.group .. "." .. row.name or row.name
    if (row.index or 0) > 0 then name = ("%s[%d]"):format(name, row.index) end
    lines[i] = { name, "[" .. table.concat(row.shape, ", ") .. "]", number(row.mean), number(row.std), number(row.min),
      number(row.max), number(row.grad_mean), number(row.grad_std) }
  end
  return table.concat(readable.lines({ { title = "name", left = true }, { title = "shape", left = true },
    { title = "mean" }, { title = "std" }, { title = "min" }, { title = "max" }, { title = "grad mean" },
    { title = "grad std" } }, lines), "\n")
end

inspect.Inspector = Inspector

exact.all(Inspector, "inspector:", true)

return inspect
