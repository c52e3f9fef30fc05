-- SPDX-License-Identifier: BSD-3-Clause
-- Handles optimizers of ps.optim that were created before ps.initialize. If an optimizer is passed to ps.initialize,
-- the engine adopts the optimizer's settings and groups. The script then uses this optimizer as the engine's optimizer.
-- If another optimizer has some of the same parameters, its step() raises an error, because it would update these
-- parameters twice.
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local optim_groups = require "ps.optim.groups"
local optimizers = require "ps.optimizers"

local adopt = {}

local function refuse(text, ...) caller.error(("ps.initialize: the optimizer " .. text):format(...)) end

--- Raises an error unless the value is an optimizer of ps.optim that has made no step.
---@param optimizer any
function adopt.check(optimizer)
  if type(optimizer) ~= "table" or not nn_module.optimizers[optimizer] then
    refuse("must be an optimizer of ps.optim that no other engine uses; or omit it, and set `optimizer` in the "
      .. "configuration")
  end
  if optimizer.per_rank then refuse "has per_rank, but an engine sums the gradients of all ranks" end
  for _, entry in ipairs(optimizer.entries) do
    if entry.t > 0 or optimizer.steps > 0 then
      refuse("has already made %s: pass it before its first step, or load its state after ps.initialize",
        caller.counted(math.max(entry.t, optimizer.steps), "step"))
    end
  end
end

--- Returns the optimizer's settings by keys of the configuration. Each setting is a list {value, name of the setting in
--- messages}.
---@param optimizer ps.Optimizer
---@return table<string, any[]>
function adopt.settings(optimizer)
  local said = { ["optimizer.type"] = { optimizer.kind.name, "the optimizer's type" } }
  for _, name in ipairs(optimizers.of(optimizer.kind.name).settings) do
    local value = optimizer.defaults[name]
    -- if no lr was given, it is nil, and each group has its own lr
    if name == "lr" then value = optimizer.given_lr end
    if value ~= nil then said["optimizer.params." .. name] = { value, "the optimizer's " .. name } end
  end
  if optimizer.max_norm then said.gradient_clipping = { optimizer.max_norm, "the optimizer's max_norm" } end
  return said
end

--- Returns the optimizer's groups as param_groups of an engine. An engine identifies parameters by name.
---@param optimizer ps.Optimizer
---@param module ps.nn.Module
---@return table[] param_groups with the additional field `adopted`, a function that returns true if the optimizer has
---  the parameter with a given name
function adopt.groups(optimizer, module)
  local number_of, list, by_name, left = {}, {}, {}, {}
  for number, group in ipairs(optimizer.groups) do
    -- The kind is nil if it is equal to the optimizer's own kind, because optimizer.type of the configuration names
    -- that kind. Groups of ps.bmt name no kinds.
    local kind = group.kind ~= optimizer.kind.name and group.kind or nil
    list[number] = { match = function(name) return by_name[name] == number end, optimizer = kind }
    for _, key in ipairs(optimizers.of(kind or optimizer.kind.name).settings) do list[number][key] = group[key] end
    for _, param in ipairs(group.params) do
      local address = nn_module.address(param)
      number_of[address], left[address] = number, true
    end
  end
  for name, param in module:named_parameters() do
    local at = nn_module.address(param)
    by_name[name] = number_of[at]
    if param:needs_grad() and not number_of[at] then
      refuse("does not have %s of the model: pass it all parameters that train, or call requires_grad(false) on this "
        .. "one", name)
    end
    left[at] = nil
  end
  if next(left) then refuse "has parameters that do not belong to the model" end
  list.adopted = function(name) return by_name[name] ~= nil end
  return list
end

--- Raises an error if the adopted optimizer does not have the parameter `name`, which was thawed.
---@param engine ps.Engine
---@param name string the parameter's name
function adopt.check_thawed(engine, name)
  local list = engine.param_groups
  if not (list and list.adopted) or list.adopted(name) then return end
  caller.error(("%s was thawed, but the optimizer that was passed to ps.initialize does not have this parameter, so "
    .. "the parameter would not be trained; first create the optimizer with all parameters, then freeze some"):format(
    name))
end

--- Finds all other optimizers that have parameters of this module. Makes their step() raise an error while the engine
--- is open.
---@param engine ps.Engine
---@param module ps.nn.Module
function adopt.take(engine, module)
  for name, param in module:named_parameters() do
    local at = nn_module.address(param)
    engine.updates[at] = { engine = engine, name = name }
    nn_module.updated[at] = engine.updates[at]
    for optimizer in pairs(nn_module.optimizers) do
      if optimizer.trained[at] and not optimizer.taken then optimizer.taken = { name = name, engine = engine } end
    end
  end
end

--- Turns the script's optimizer `given` into an alias of the engine's optimizer `own`.
---@param given table
---@param own ps.EngineOptimizer
function adopt.become(given, own)
  nn_module.optimizers[given] = nil
  optim_groups.take_schedule(own, given)
  for key in pairs(given) do given[key] = nil end
  setmetatable(given, { __index = own, __newindex = own, __tostring = function() return tostring(own) end })
end

return adopt
