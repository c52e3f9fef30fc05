-- SPDX-License-Identifier: BSD-3-Clause
-- Optimizers of ps.optim that were made before ps.initialize. An optimizer that ps.initialize gets is adopted: its
-- settings and groups become the engine's, and the script goes on with it as with the engine's own. Any other optimizer
-- over the same parameters would update beside the engine, so its step() is refused.
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local optim_groups = require "ps.optim.groups"

local adopt = {}

local function refuse(text, ...) caller.error(("ps.initialize: the optimizer " .. text):format(...)) end

--- Refuses what cannot be adopted: a value that is no optimizer of ps.optim, or an optimizer that has made steps.
---@param optimizer any
function adopt.check(optimizer)
  if type(optimizer) ~= "table" or not nn_module.optimizers[optimizer] then
    refuse "is one of ps.optim that is in use nowhere else; leave it out, and write `optimizer` into the configuration"
  end
  if optimizer.per_rank then refuse "has per_rank, but gradients of all ranks are added up here" end
  for _, entry in ipairs(optimizer.entries) do
    if entry.t > 0 or optimizer.steps > 0 then
      refuse("has made %d steps already: give it before its first, or load its state behind ps.initialize",
        math.max(entry.t, optimizer.steps))
    end
  end
end

--- The optimizer's settings by keys of the configuration: {value, its name in messages}.
---@param optimizer ps.Optimizer
---@return table<string, any[]>
function adopt.settings(optimizer)
  local said = { ["optimizer.type"] = { optimizer.kind.name, "the optimizer's type" } }
  for _, name in ipairs(optim_groups.SETTINGS[optimizer.kind.name]) do
    local value = optimizer.defaults[name]
    if name == "lr" then value = optimizer.given_lr end           -- without one the groups have theirs
    if value ~= nil then said["optimizer.params." .. name] = { value, "the optimizer's " .. name } end
  end
  if optimizer.max_norm then said.gradient_clipping = { optimizer.max_norm, "the optimizer's max_norm" } end
  return said
end

--- The optimizer's groups as param_groups of an engine, which knows parameters by name.
---@param optimizer ps.Optimizer
---@param module ps.nn.Module
---@return table[] param_groups
function adopt.groups(optimizer, module)
  local number_of, list, by_name, left = {}, {}, {}, {}
  for number, group in ipairs(optimizer.groups) do
    list[number] = { match = function(name) return by_name[name] == number end }
    for _, key in ipairs(optim_groups.SETTINGS[optimizer.kind.name]) do list[number][key] = group[key] end
    for _, param in ipairs(group.params) do
      local address = nn_module.address(param)
      number_of[address], left[address] = number, true
    end
  end
  for name, param in module:named_parameters() do
    local at = nn_module.address(param)
    by_name[name] = number_of[at]
    if param:needs_grad() and not number_of[at] then
      refuse("does not have %s of the model: give it all parameters that train, or call requires_grad(false) of this "
        .. "one", name)
    end
    left[at] = nil
  end
  if next(left) then refuse "has parameters that are not the model's" end
  return list
end

--- Makes other optimizers with parameters of this module refuse to step as long as the engine is open.
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

--- Turns the script's optimizer into another name of the engine's.
---@param given table
---@param own ps.EngineOptimizer
function adopt.become(given, own)
  nn_module.optimizers[given] = nil
  for key in pairs(given) do given[key] = nil end
  setmetatable(given, { __index = own, __newindex = own, __tostring = function() return tostring(own) end })
end

return adopt
