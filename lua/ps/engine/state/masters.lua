-- SPDX-License-Identifier: BSD-3-Clause
-- Updates the fp32 masters of bf16 and fp16 parameters if other code than the engine writes to a parameter. A module's
-- load_state_dict writes a value into the master and rounds it into the parameter, because the masters handle the hook
-- "load". Any other write (nn.init, copy_, a slice) changes the version of the parameter's bytes. The new value is then
-- copied into the master.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local hooks = require "ps.core.hooks"
local C = native.C

local masters = {}

local function drop(t) if t ~= nil then t:release() end end

--- Splits fp32 values into a bf16 parameter and its remainders (memory.master = "remainder").
---@param place ps.Tensor the parameter, as a tensor on the host
---@param low ps.Tensor uint8 [2 numel]
---@param values ps.Tensor fp32, on the host
function masters.split(place, low, values)
  scope.no_grad(function() native.ops.remainder_split_ { place, low, values } end)
end

--- Returns the fp32 values of a row of built.list, as a tensor on the host. Returns nil if another rank has the values.
--- If the row has remainders, the tensor is a copy. Otherwise it belongs to the engine.
---@param row table
---@return ps.Tensor?
function masters.values(row)
  if not row.remainder then return row.values end
  local place = row.place
  if place == nil then place = row.param end
  return scope.no_grad(function() return native.ops.remainder_join(place, row.master) end)
end

--- Returns the fp32 values of a row, as masters.values does. If the row has remainders, returns a description of the
--- values instead. The description contains a function that makes the tensor, so that a writer needs the memory of only
--- one tensor at a time.
---@param row table
---@return ps.Tensor|ps.LaterTensor|nil
function masters.values_later(row)
  if not row.remainder then return row.values end
  return { shape = row.param:shape(), dtype = "fp32", make = function() return masters.values(row) end }
end

-- Metatable of the entry for a parameter with remainders. When the field `to` is read, the parameter's fp32 tensor is
-- created. The function in the field `loaded` frees the tensor.
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
---@field to ps.Tensor the tensor into which loaded values are written
---@field place? ps.Tensor the parameter as a tensor on the host, if the parameter is on a device or ranks share it
---@field rounds boolean true if `to` is a master, so that loaded values must be rounded into the parameter
---@field seen integer version of the parameter's bytes when the parameter was last equal to its master
---@field elsewhere? integer if another rank owns the parameter, that rank; this rank then does not write the parameter

---@class ps.engine.Masters
---@field rows {param: ps.Tensor, held: ps.engine.Held}[]
---@field held table<ps.Tensor, ps.engine.Held> the `held` of all rows, and entries for parameters that other ranks own
---@field unlisten fun()
---@field shared boolean true if ranks share parameters
local Masters = {}
Masters.__index = Masters

local function copy_to_place(held, param)
  if not held.rounds then return end
  local place = held.place
  if place == nil then place = param end
  scope.no_grad(function() place:copy_(held.to) end)
  held.seen = C.ps_tensor_version(param)
end

--- Creates the masters of a layout. The lists of `built` contain rows {param, master, place}. `master` can be the
--- parameter itself. `place` is the parameter as a tensor on the host, if the parameter is on a device or ranks share
--- it. Parameters that other ranks own are marked, so that this rank does not load them.
---@param built {list: table[], frozen: table[]} ps.engine.Built
---@return ps.engine.Masters
function masters.new(built)
  local self = setmetatable({ rows = {}, held = {}, shared = false }, Masters)
  for _, list in ipairs { built.list, built.frozen } do
    for _, row in ipairs(list) do self.shared = self.shared or row.owner ~= nil end
  end
  -- The hooks have only a weak reference to the masters, because a script may drop a model in plain memory without
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

--- Copies values that were written to parameters since the last note() into the masters of these parameters. Must not
--- be called while the memory of a parameter may contain a gradient.
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

--- Records that all parameters are equal to their masters, so that sync() ignores earlier writes.
function Masters:note()
  for _, row in ipairs(self.rows) do row.held.seen = C.ps_tensor_version(row.param) end
end

-- Records that values were loaded. If ranks share parameters, they gather the parameters again at the next use.
function Masters:loaded()
  if self.shared then native.check(C.ps_engine_forget(native.ctx)) end
end

--- Removes the hooks. Called when the parameters are freed.
function Masters:close()
  self.unlisten()
  self.rows, self.held = {}, {}
end

return masters
