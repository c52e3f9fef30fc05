-- SPDX-License-Identifier: BSD-3-Clause
-- Keeps the fp32 masters of half parameters equal to values that are written from outside the engine. A module's
-- load_state_dict writes a value into the master and rounds it into the parameter, because masters answer the hook
-- "load". Any other write (nn.init, copy_, a slice) changes the version of the parameter's bytes. The master then gets
-- the new value.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local hooks = require "ps.core.hooks"
local C = native.C

local masters = {}

local function drop(t) if t ~= nil then t:release() end end

--- Splits fp32 values into a bf16 parameter and its remainders (memory.master = "remainder").
---@param place ps.Tensor the parameter, as the host sees it
---@param low ps.Tensor uint8 [2 numel]
---@param values ps.Tensor fp32, on the host
function masters.split(place, low, values)
  scope.no_grad(function() native.ops.remainder_split_ { place, low, values } end)
end

--- Returns the fp32 values of a row of built.list, as the host sees them. Returns nil if another rank holds them. The
--- tensor belongs to the engine. But if the row has remainders, the tensor is a copy.
---@param row table
---@return ps.Tensor?
function masters.values(row)
  if not row.remainder then return row.values end
  local place = row.place
  if place == nil then place = row.param end
  return scope.no_grad(function() return native.ops.remainder_join(place, row.master) end)
end

--- Returns the fp32 values of a row, like masters.values. If the row has remainders, returns a description of the
--- values instead. The description has a function that makes the values, so that a writer needs the memory of only one
--- tensor.
---@param row table
---@return ps.Tensor|ps.LaterTensor|nil
function masters.values_later(row)
  if not row.remainder then return row.values end
  return { shape = row.param:shape(), dtype = "fp32", make = function() return masters.values(row) end }
end

-- Metatable of the entry for a parameter with remainders. A read of the field `to` creates the parameter's fp32 tensor,
-- and `loaded` frees the tensor.
local REMAINDERS = { __index = function(held, key)
  if key ~= "to" then return nil end
  held.to = scope.no_grad(function() return native.ops.remainder_join(held.at, held.low) end)
  return held.to
end }
local function split_into_place(held, param)
  masters.split(held.at, held.low, held.to)
  drop(held.to)
  held.to = nil
  held.seen = C.ps_tensor_version(param)
end

---@class ps.engine.Held the fp32 values of one parameter
---@field to ps.Tensor tensor into which loaded values are written
---@field place? ps.Tensor the parameter as the host sees it, if it is on a device or ranks share it
---@field rounds boolean whether `to` is a master
---@field seen integer version of the parameter's bytes when it last equalled its master
---@field elsewhere? integer the rank that owns the parameter, if it is another rank; this rank does not write the
--- parameter

---@class ps.engine.Masters
---@field rows {param: ps.Tensor, held: ps.engine.Held}[]
---@field held table<ps.Tensor, ps.engine.Held> the entries of `rows`, and entries for parameters that other ranks own
---@field unlisten fun()
---@field shared boolean whether ranks share parameters
local Masters = {}
Masters.__index = Masters

local function copy_to_place(held, param)
  if not held.rounds then return end
  local place = held.place
  if place == nil then place = param end
  scope.no_grad(function() place:copy_(held.to) end)
  held.seen = C.ps_tensor_version(param)
end

--- Creates the masters of a layout from the rows {param, master, place} of its lists. `master` can be the parameter
--- itself. `place` is the parameter as the host sees it, if it is on a device or ranks share it. Parameters that other
--- ranks own are marked, so that this rank does not load them.
---@param built {list: table[], frozen: table[]} ps.engine.Built
---@return ps.engine.Masters
function masters.new(built)
  local self = setmetatable({ rows = {}, held = {}, shared = false }, Masters)
  for _, list in ipairs { built.list, built.frozen } do
    for _, row in ipairs(list) do self.shared = self.shared or row.owner ~= nil end
  end
  -- The hooks hold only a weak reference to the masters, because a script may drop a model in plain memory without
  -- closing it.
  local weak = setmetatable({ self }, { __mode = "v" })
  self.unlisten = hooks.on("load", function(param)
    if weak[1] then return weak[1].held[param] end
  end)
  local offs = { self.unlisten, hooks.on("loaded", function() if weak[1] then weak[1]:loaded() end end),
    hooks.on("owner", function(param)
      local held = weak[1] and weak[1].held[param]
      return held and held.elsewhere
    end), hooks.on("sharded", function() return weak[1] and weak[1].shared end) }
  self.unlisten = function() for _, off in ipairs(offs) do off() end end
  local function elsewhere(row) self.held[row.param] = { elsewhere = row.owner } end
  for _, row in ipairs(built.frozen) do
    if row.owner and row.place == nil then elsewhere(row) end
  end
  for _, row in ipairs(built.list) do
    local rounds = not rawequal(row.master, row.param)
    if row.master == nil then
      elsewhere(row)
    elseif rounds or row.place ~= nil then
      local held = { to = rounds and row.master or row.place, place = row.place, rounds = rounds,
        loaded = copy_to_place, seen = C.ps_tensor_version(row.param) }
      if row.remainder then
        held.to, held.low, held.at, held.loaded = nil, row.master, row.place, split_into_place
        if held.at == nil then held.at = row.param end
        setmetatable(held, REMAINDERS)
      end
      self.held[row.param] = held
      self.rows[#self.rows + 1] = { param = row.param, held = held }
    end
  end
  return self
end

--- Copies values that were written to parameters since the last note() into their masters. Must not be called while a
--- gradient may be stored in a parameter's memory.
function Masters:sync()
  for _, row in ipairs(self.rows) do
    local held = row.held
    if held.rounds and C.ps_tensor_version(row.param) ~= held.seen then
      local place = held.place
      if place == nil then place = row.param end
      if held.low ~= nil then scope.no_grad(function() held.low:fill_(0) end)
      else scope.no_grad(function() held.to:copy_(place) end) end
      held.seen = C.ps_tensor_version(row.param)
    end
  end
end

--- Records that all parameters equal their masters, so that earlier writes are ignored.
function Masters:note()
  for _, row in ipairs(self.rows) do row.held.seen = C.ps_tensor_version(row.param) end
end

-- Records that values were loaded. Ranks that share parameters gather them again at the next use.
function Masters:loaded()
  if self.shared then native.check(C.ps_engine_forget(native.ctx)) end
end

--- Removes the hooks, because the parameters no longer exist.
function Masters:close()
  self.unlisten()
  self.rows, self.held = {}, {}
end

return masters
