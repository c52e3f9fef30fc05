-- SPDX-License-Identifier: BSD-3-Clause
-- Manages the parameters of an optimizer in plain memory: the types and shapes of their states, and their names in
-- saved states. An entry describes one parameter: { param, group, name, t (number of updates so far), master, and a
-- tensor for each state }.
local create = require "ps.tensor.create"
local caller = require "ps.core.caller"
local sharded = require "ps.nn.sharded"
local nn_module = require "ps.nn.module"
local optimizers = require "ps.optimizers"
local error = caller.error

local entries = {}
local address = nn_module.address

--- Returns the dtype of the states and the master of a parameter. A parameter of this dtype is its own master.
---@param param ps.Tensor
---@return string
function entries.state_dtype(param) return param:dtype() == "fp64" and "fp64" or "fp32" end

-- Returns the type of a state tensor of a parameter.
local function dtype_of(state, param) return state.dtype == "fp32" and entries.state_dtype(param) or state.dtype end

--- Returns the states that a parameter can have.
---@param entry table
---@return table[]
function entries.all_states_of(entry)
  return optimizers.states_for(optimizers.of_group(entry.group).states, entry.param:shape())
end

--- Returns the states that a parameter needs with the settings of its group, and the states that it has.
---@param entry table
---@return table[]
function entries.states_of(entry)
  local needed, list = #optimizers.states_of(optimizers.of_group(entry.group), { entry.group }), {}
  for k, state in ipairs(optimizers.of_group(entry.group).states) do
    local fits = not state.shape or state.shape(entry.param:shape())
    if fits and (k <= needed or entry[state.name] ~= nil) then list[#list + 1] = state end
  end
  return list
end

--- Creates the state of a parameter when the parameter has a gradient for the first time. Returns the states that the
--- parameter then has.
---@param entry table
---@return table[]
function entries.prepare(entry)
  if entry.master == nil then
    local p = entry.param
    entry.master = p:dtype() == entries.state_dtype(p) and p or p:to { dtype = "fp32" }
    if entry.master ~= p then entry.master:keep() end
  end
  local shape, states = entry.param:shape(), entries.states_of(entry)
  for _, state in ipairs(states) do
    if entry[state.name] == nil then
      entry[state.name] = create.zeros(state.shape and state.shape(shape) or shape, { dtype = dtype_of(state,
        entry.param), device = entry.param:device() })
      entry[state.name]:keep()
    end
  end
  return states
end

--- Returns the names of the parameters in a saved state. If `model` is given, these are the parameters' names in the
--- model. Otherwise the names are "0", "1", ...
---@param self ps.Optimizer
---@param model? ps.nn.Module
---@return string[]
function entries.names_for(self, model)
  local names = {}
  if model then
    for name, p in model:named_parameters() do names[address(p)] = name end
  end
  for i, entry in ipairs(self.entries) do
    names[i] = names[address(entry.param)] or tostring(i - 1)
  end
  return names
end

--- Returns the names that the parameters had when the optimizer was created, or nil if a parameter had no name.
---@param self ps.Optimizer
---@return string[]?
function entries.own_names(self)
  local names = {}
  for i, entry in ipairs(self.entries) do
    if not entry.name then return nil end
    names[i] = entry.name
  end
  return names
end

--- Returns the names of this optimizer's parameters in a saved state. If the state was saved without a model, a
--- parameter's name there is an index. If both the state and this optimizer know the real names of the parameters, the
--- index is found by the real name.
---@param self ps.Optimizer
---@param model? ps.nn.Module
---@param values table the values of the saved state
---@return string[]
function entries.saved_names(self, model, values)
  local names, own, saved = entries.names_for(self, model), entries.own_names(self), values.param_names
  if model ~= nil or not own or not saved then return names end
  local number = {}
  for i, name in ipairs(saved) do number[name] = tostring(i - 1) end
  for i, name in ipairs(own) do
    names[i] = number[name]
    if not names[i] then
      error(("the saved optimizer has no state for parameter %s; parameter %d of this one, %s "
        .. "there"):format(name, i - 1,
        tostring(saved[i])))
    end
  end
  return names
end

--- Returns this rank's shard of a saved state tensor, on the parameter's device. Raises an error if the tensor does not
--- have the required type and shape.
---@param name string
---@param tensor ps.Tensor
---@param param ps.Tensor
---@param state? table description of the state, or nil for the master
---@return ps.Tensor
function entries.same_or_fail(name, tensor, param, state)
  local needed = state and state.shape and state.shape(param:shape())
  local dtype = state and dtype_of(state, param) or entries.state_dtype(param)
  if needed then
    if tensor:dtype() == dtype and nn_module.same_shape(tensor:shape(), needed) then
      return tensor:to(param:device())
    end
    error(("optimizer state '%s' is %s [%s], but the parameter needs %s [%s]"):format(name, tensor:dtype(),
      table.concat(tensor:shape(), ", "), dtype, table.concat(needed, ", ")))
  end
  local fit = sharded.fit(tensor:shape(), param)
  if tensor:dtype() ~= dtype or not fit then
    error(("optimizer state '%s' is %s [%s], but the parameter needs %s [%s]"):format(name, tensor:dtype(),
      table.concat(tensor:shape(), ", "), dtype, table.concat(sharded.shape(param), ", ")))
  end
  if fit == "own" or nn_module.same_shape(tensor:shape(), param:shape()) then return tensor:to(param:device()) end
  local own = create.zeros(param:shape(), { dtype = tensor:dtype(), device = param:device() })
  sharded.read({ state = tensor }, "state", own, param)
  return own
end

return entries
