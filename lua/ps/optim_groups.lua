-- SPDX-License-Identifier: BSD-3-Clause
-- What the optimizers of ps.optim and of engines do alike with their groups, whose settings scripts may change between
-- steps: a rate for all, the ranges, beyond which an update would go uphill or leave NaN, the text form in which they
-- are saved, and which group a parameter of an engine belongs to.
local caller = require "ps.caller"
local check = require "ps.config.check"
local copied = require "ps.copied"
local types = require "ps.config.types"
local is_tensor = require("ps.scope").is_tensor
local error = caller.error

local groups = {}

local OF_ADAM = { "lr", "betas", "eps", "weight_decay" }
--- The settings of a group, by the optimizer's kind, in PyTorch's words.
groups.SETTINGS = { Adam = OF_ADAM, AdamW = OF_ADAM,
  SGD = { "lr", "momentum", "weight_decay", "dampening", "nesterov" } }

--- What is wrong with the settings of a group; nil: nothing.
---@param group table
---@return string?
function groups.problem(group)
  local problem = check.out_of_range(group, types.OPTIMIZER)
  if not problem and group.nesterov and (group.momentum == 0 or group.dampening ~= 0) then
    return ("nesterov needs a momentum above 0 and a dampening of 0; here they are %g and %g"):format(group.momentum,
      group.dampening)
  end
  return problem
end

--- Refuses what no gradient comes to: optimizers take floats that are no op's output. A frozen parameter may thaw.
---@param p any
---@param name? string
---@param i integer its place in the list, from 1
---@param what string "AdamW, group 0"
function groups.check_trainable(p, name, i, what)
  local which = ("%s, %s"):format(what, name or "parameter " .. (i - 1))
  if not is_tensor(p) then error(("%s is a %s, not a tensor"):format(which, type(p))) end
  local shape = table.concat(p:shape(), ", ")
  if not p:is_float() then
    error(("%s [%s] is %s: an optimizer updates floats, which alone have gradients"):format(which, shape, p:dtype()))
  end
  if p.node ~= nil then
    error(("%s [%s] is the output of an op, so no gradient would come to it: give the optimizer the tensors that it "
      .. "was computed from, or tensor:detach():requires_grad(true)"):format(which, shape))
  end
end

--- Refuses groups with a setting out of its range.
---@param list table[]
---@param kind string "AdamW"
function groups.check(list, kind)
  for number, group in ipairs(list) do
    local problem = groups.problem(group)
    if problem then error(("%s, group %d: %s"):format(kind, number - 1, problem)) end
  end
end

--- Sets the rate that an optimizer's groups are scaled from; takes effect on the next step.
---@param optimizer {groups: table[], lr?: number}
---@param lr number
function groups.set_lr(optimizer, lr)
  local problem = check.problem(lr, types.OPTIMIZER.lr)
  if problem then error("optimizer:set_lr: the rate " .. problem) end
  for _, group in ipairs(optimizer.groups) do group.lr = lr * group.lr_scale end
  optimizer.lr = lr
end

-- -- saved -----------------------------------------------------------------------------------------------------------
--- Settings as JSON can hold them, with every bit: a number as text, a pair of numbers (betas) as both with a blank.
---@param group table
---@param keys string[]
---@return table<string, string|boolean>
function groups.to_text(group, keys)
  local kept = {}
  for _, key in ipairs(keys) do
    local value = group[key]
    if type(value) == "table" then value = ("%.17g %.17g"):format(value[1], value[2])
    elseif type(value) == "number" then value = ("%.17g"):format(value) end
    kept[key] = value
  end
  return kept
end

--- Why saved groups are not those of a list; nil where they may be.
---@param list table[]
---@param saved table[]
---@return string?
function groups.mismatch(list, saved)
  if #saved == #list then return nil end
  return ("the saved optimizer has %d groups, this one has %d"):format(#saved, #list)
end

--- Takes settings over from what to_text gave.
---@param list table[]
---@param saved table[] as many
function groups.from_text(list, saved)
  for number, group in ipairs(list) do
    for key, value in pairs(saved[number]) do
      local a, b = tostring(value):match("^(%S+) (%S+)$")
      if a then value = { tonumber(a), tonumber(b) } end
      group[key] = type(value) == "string" and tonumber(value) or value
    end
  end
end

-- -- of engines ------------------------------------------------------------------------------------------------------
--- The groups of a configuration: its optimizer's settings, and what the script's param_groups change of them.
---@param optimizer {type: string, params: table} block "optimizer" of the configuration
---@param param_groups? table[] nil: one group
---@return table[] groups
function groups.configured(optimizer, param_groups)
  local params, list = optimizer.params, {}
  for number, given in ipairs(param_groups or { {} }) do
    local group = {}
    for _, key in ipairs(groups.SETTINGS[optimizer.type]) do group[key] = params[key] end
    if group.betas then group.betas, group.decoupled = copied(group.betas), optimizer.type == "AdamW" end
    for key, value in pairs(given) do if key ~= "match" then group[key] = value end end
    list[number] = group
  end
  return list
end

--- What an engine keeps of a parameter beside its fp32 value: names of fp32 tensors, as PyTorch calls them. SGD without
--- momentum keeps nothing.
---@param optimizer {type: string, params: table} block "optimizer" of the configuration
---@param param_groups? table[]
---@return string[]
function groups.averages(optimizer, param_groups)
  if optimizer.type ~= "SGD" then return { "exp_avg", "exp_avg_sq" } end
  for _, group in ipairs(groups.configured(optimizer, param_groups)) do
    if group.momentum ~= 0 then return { "momentum_buffer" } end
  end
  return {}
end

--- The number, from 1, of the group that a parameter belongs to: the first whose match says so, else the last.
---@param param_groups? table[]
---@param name string
---@param param ps.Tensor
---@return integer
function groups.number_of(param_groups, name, param)
  for number, given in ipairs(param_groups or {}) do
    if given.match and given.match(name, param) then return number end
  end
  return param_groups and #param_groups or 1
end

return groups
