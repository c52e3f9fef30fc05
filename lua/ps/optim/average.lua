-- SPDX-License-Identifier: BSD-3-Clause
-- Switches the parameters of schedule-free optimizers between their values for training and for evaluation. eval()
-- moves each parameter to its average, and train() moves the parameter back. As in the package schedulefree, the field
-- train_mode of a group says which values the group's parameters hold. If a call fails halfway, another call moves the
-- remaining parameters.
local entries_of = require "ps.optim.entries"
local native = require "ps.core.ffi"
local optimizers = require "ps.optimizers"
local scope = require "ps.core.scope"
local error = require("ps.core.caller").error

local average = {}

-- Returns the field `average` of a group's optimizer, which describes how eval() and train() move parameters. Returns
-- nil if training and evaluation use the same values.
local function how_of(group)
  local made = optimizers.of_group(group)
  return made and made.average
end

--- Returns whether an optimizer has groups whose values for training and evaluation differ. Also returns whether one of
--- these groups now has its values for training.
---@param optimizer {groups: table[]}
---@return boolean differs
---@return boolean trains
function average.of(optimizer)
  local differs, trains = false, optimizer.moved ~= nil
  for _, group in ipairs(optimizer.groups) do
    if how_of(group) then differs, trains = true, trains or group.train_mode end
  end
  return differs, trains
end

--- Raises an error if parameters hold averages, because a step cannot update averages.
---@param optimizer {groups: table[]}
---@param kind string name of the optimizer
function average.check_trains(optimizer, kind)
  if optimizer.moved then
    error(kind .. ": optimizer:eval() or optimizer:train() has failed, and some parameters hold averages: call "
      .. "optimizer:train() again")
  end
  for number, group in ipairs(optimizer.groups) do
    if how_of(group) and not group.train_mode then
      error(("%s, group %d: the parameters hold the averages, because optimizer:eval() was called: call "
        .. "optimizer:train() before the next step's forward"):format(kind, number))
    end
  end
end

--- Moves the parameters to their averages, or back to their values for training.
---@param optimizer {groups: table[]}
---@param train boolean true to move the parameters back to their values for training
---@param items_of fun(number: integer): any[] returns the parameters of group `number`, counted from 1, in the
--- optimizer's own form
---@param move fun(item: any, state: string, weight: number) moves a parameter toward a state, by the fraction `weight`
--- of their difference
function average.switch(optimizer, train, items_of, move)
  for number, group in ipairs(optimizer.groups) do
    local how, moved = how_of(group), optimizer.moved and optimizer.moved[number]
    if how and (group.train_mode ~= train or moved) then
      local weight = (train and how.from or how.to)(group)
      moved, optimizer.moved = moved or {}, optimizer.moved or {}
      optimizer.moved[number] = moved
      for _, item in ipairs(items_of(number)) do
        local is = moved[item]
        if is == nil then is = group.train_mode end
        if is ~= train then
          move(item, how.state, weight)
          moved[item] = train
        end
      end
      group.train_mode, optimizer.moved[number] = train, nil
    end
  end
  optimizer.moved = nil
end

--- Moves the parameters of an optimizer of ps.optim.
---@param optimizer ps.Optimizer
---@param train boolean
function average.switch_plain(optimizer, train)
  native.check_running("optimizer:" .. (train and "train" or "eval") .. "()")
  average.switch(optimizer, train, function(number)
    local list = {}
    for _, entry in ipairs(optimizer.entries) do
      if entry.group == optimizer.groups[number] and entry.t > 0 then list[#list + 1] = entry end
    end
    return list
  end, function(entry, state, weight)
    entries_of.prepare(entry)
    scope.no_grad(function() native.ops.master_lerp_({ entry.param, entry.master, entry[state] }, weight) end)
  end)
end

--- Returns how to compute the averages of a model that is loaded without its optimizer. Maps each parameter's name to a
--- text with the name of a state, and the fraction by which the parameter moves toward this state.
---@param entries {group: table}[] the parameters
---@param names string[]
---@return table<string, string>? nil if the parameters hold the values for evaluation
function average.saved(entries, names)
  local saved
  for i, entry in ipairs(entries) do
    local how = how_of(entry.group)
    if how and entry.group.train_mode then
      saved = saved or {}
      saved[names[i]] = ("%s %.17g"):format(how.state, how.to(entry.group))
    end
  end
  return saved
end

return average
