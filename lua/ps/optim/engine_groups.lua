-- SPDX-License-Identifier: BSD-3-Clause
-- The parameter groups of engines: the groups that a configuration and param_groups define, and the group of each
-- parameter.
local copied = require "ps.core.copied"
local optimizers = require "ps.optimizers"
local error = require("ps.core.caller").error

local engine_groups = {}

--- Returns the groups that a configuration defines. The groups have the settings of the configuration's optimizer,
--- except for the settings that the script's param_groups change. Groups with another optimizer have its defaults, and
--- the configuration's rate. With type "Muon", groups with AdamW have the configuration's other settings of AdamW, too.
---@param optimizer ps.config.Optimizer
---@param param_groups? table[] nil for one group
---@return table[] groups
function engine_groups.configured(optimizer, param_groups)
  local params, rest, list = optimizer.params, optimizers.of(optimizer.type).rest, {}
  for number, given in ipairs(param_groups or { {} }) do
    local kind = given.optimizer or optimizer.type
    local made, group = optimizers.of(kind), { kind = kind }
    for _, key in ipairs(made.settings) do
      local value = made.defaults[key]
      if (key == "lr" or kind == optimizer.type) and params[key] ~= nil then value = params[key] end
      if kind == rest and optimizer.rest[key] ~= nil then value = optimizer.rest[key] end
      if key == "lr" and made.matrices then value = params.muon_lr or value
      elseif key == "lr" and kind ~= optimizer.type then value = params.adam_lr or value end
      group[key] = type(value) == "table" and copied(value) or value
    end
    optimizers.complete(group, made)
    for key, value in pairs(given) do if key ~= "match" and key ~= "optimizer" then group[key] = value end end
    if group.momentum and not group.betas then group.momentum = optimizer.first_momentum or group.momentum end
    list[number] = group
  end
  return list
end

--- Returns the states that an engine keeps for a parameter of each group in addition to its fp32 value. Groups are
--- counted from 1.
---@param list table[] groups, from engine_groups.configured
---@return ps.optimizers.State[][]
function engine_groups.states(list)
  local states = {}
  for number, group in ipairs(list) do states[number] = optimizers.states_of(optimizers.of_group(group), list) end
  return states
end

-- Returns the indices of the groups whose function `match` returns true for a parameter. If there is no such group, and
-- the last group has no function `match`, returns the index of the last group.
local function matches(param_groups, name, param)
  local list = {}
  for number, given in ipairs(param_groups) do
    if given.match and given.match(name, param) then list[#list + 1] = number end
  end
  local last = #param_groups
  if not list[1] and not param_groups[last].match then list[1] = last end
  return list
end

--- Raises an error if a trained parameter belongs to no group. Prints a note about parameters that several groups
--- match, and about groups that have a function `match` but get no parameter.
---@param param_groups? table[]
---@param rows {name: string, param: ps.Tensor}[] all trained parameters
---@param note fun(text: string)
function engine_groups.check_members(param_groups, rows, note)
  if not param_groups or not rows[1] then return end
  local has, shared, first = {}, 0, nil
  for _, row in ipairs(rows) do
    local list = matches(param_groups, row.name, row.param)
    if not list[1] then
      error(("ps.initialize: no group of param_groups has %s [%s]: every group has a match, and each returns false for "
        .. "it; leave match out of the last group, which then gets all other parameters, or freeze the parameter with "
        .. "requires_grad(false)"):format(row.name, table.concat(row.param:shape(), ", ")))
    end
    has[list[1]] = true
    if list[2] then
      shared = shared + 1
      first = first or ("%s: param_groups[%s]"):format(row.name, table.concat(list, "] and ["))
    end
  end
  if first then
    note(("param_groups: several groups match %d parameter%s (%s); each is in the first group that "
      .. "matches"):format(shared, shared == 1 and "" or "s", first))
  end
  for number, given in ipairs(param_groups) do
    if given.match and not has[number] then
      note(("param_groups[%d] has no parameter: its match returns false for all parameters that no earlier group "
        .. "has"):format(number))
    end
  end
end

--- Returns the index of a parameter's group, counted from 1. The group is the first group whose function `match`
--- returns true. If there is no such group, it is the last group.
---@param param_groups? table[]
---@param name string
---@param param ps.Tensor
---@return integer
function engine_groups.number_of(param_groups, name, param)
  for number, given in ipairs(param_groups or {}) do
    if given.match and given.match(name, param) then return number end
  end
  return param_groups and #param_groups or 1
end

return engine_groups
