-- SPDX-License-Identifier: BSD-3-Clause
-- Converts the settings of parameter groups to text for saved states, and loads them. Compares saved groups with the
-- groups of an optimizer.
local copied = require "ps.core.copied"
local groups = require "ps.optim.groups"
local optimizers = require "ps.optimizers"

local saved_groups = {}

--- Returns a setting in a form that JSON stores without loss: text for a number or a list of numbers.
---@param value any
---@return any
function saved_groups.text_of(value)
  if type(value) == "number" then return ("%.17g"):format(value) end
  if type(value) ~= "table" then return value end
  local parts = {}
  for i, number in ipairs(value) do parts[i] = ("%.17g"):format(number) end
  return table.concat(parts, " ")
end
local text_of = saved_groups.text_of

--- Converts settings to a form that JSON stores without loss. Numbers become text. A list of numbers, such as betas,
--- becomes a text with blanks between the numbers.
---@param group table
---@param keys string[]
---@return table<string, string|boolean>
function saved_groups.to_text(group, keys)
  local kept = {}
  for _, key in ipairs(keys) do kept[key] = text_of(group[key]) end
  return kept
end

-- Returns the names of the fields that are saved and loaded: the settings, and the fields that scripts cannot set.
local function saved_keys(group)
  local keys = groups.read_keys(group)
  for key in pairs(optimizers.of_group(group).fixed or {}) do keys[#keys + 1] = key end
  return keys
end

--- Returns the fields of a group that are saved, as text: its settings, the fields that scripts cannot set, and the
--- rate with which the run began. The last is not loaded, but compared (saved_groups.differences).
---@param group table
---@return table<string, string|boolean>
function saved_groups.saved(group)
  local kept = saved_groups.to_text(group, saved_keys(group))
  -- first_rate: the initial rate, as text, of the run whose state was loaded; nil if the group has a schedule
  kept.initial_lr = group.first_rate or text_of(group.initial_lr)
  return kept
end

local function readable(value) return (tostring(value):gsub("%S+", function(part)
  return tonumber(part) and ("%.6g"):format(part) or part
end)) end

-- Returns whether a saved setting is that of this run, or is set by a schedule of this run.
local function is_same(key, saved, group, changes)
  local theirs, ours = saved[key], text_of(group[key])
  if theirs == nil or theirs == ours then return true end
  -- A run may have changed the rate since it began, so the rates with which the runs began are compared.
  if key == "lr" then return changes ~= nil or saved.initial_lr == text_of(group.initial_lr) end
  if changes == nil or changes == "rates" then return false end
  if key ~= "betas" then return key == "momentum" end
  return changes == "betas" or theirs:match "%S+$" == ours:match "%S+$"
end

--- Describes the settings that saved groups have and that differ from the settings with which these groups were made.
--- Settings that a schedule sets are not compared.
---@param list table[]
---@param saved table[] saved settings of each group
---@return string[] texts such as "group 1: weight_decay is 0.1, not 0.01"
function saved_groups.differences(list, saved)
  local texts, changes = {}, groups.changes(list)
  for number, group in ipairs(list) do
    for _, key in ipairs(groups.settings(group)) do
      if not is_same(key, saved[number], group, changes) then
        texts[#texts + 1] = ("group %d: %s is %s, not %s"):format(number, key, readable(saved[number][key]),
          readable(text_of(group[key])))
      end
    end
  end
  return texts
end

-- Returns a setting that text_of has converted.
local function value_of(text)
  if type(text) ~= "string" or not text:find " " then return type(text) == "string" and tonumber(text) or text end
  local numbers = {}
  for part in text:gmatch "%S+" do numbers[#numbers + 1] = tonumber(part) end
  return numbers
end

--- Returns a copy of a group with other settings.
---@param group table
---@param values table<string, any>
---@return table
function saved_groups.with(group, values)
  local copy = copied(group)
  for key, value in pairs(values) do copy[key] = value end
  return copy
end

--- Returns a copy of a group with the settings of a saved group.
---@param group table
---@param saved table<string, string|boolean> from saved_groups.saved
---@return table
function saved_groups.with_saved(group, saved)
  local values = {}
  for _, key in ipairs(groups.read_keys(group)) do values[key] = value_of(saved[key]) end
  return saved_groups.with(group, values)
end

--- Describes why saved groups do not match a list of groups. Returns nil if they match.
---@param list table[]
---@param saved any groups that saved_groups.saved has returned, or groups in PyTorch's form
---@param kind? string name of the saved optimizer; nil for PyTorch's form, whose groups name no optimizer
---@return string?
function saved_groups.mismatch(list, saved, kind)
  if type(saved) ~= "table" then return "the saved optimizer has no list of groups" end
  if #saved ~= #list then
    return ("the saved optimizer has %d groups, but this one has %d"):format(#saved, #list)
  end
  for number, group in ipairs(list) do
    local theirs = saved[number]
    if type(theirs) ~= "table" then return ("group %d of the saved optimizer is not a table"):format(number) end
    if kind then
      local name = theirs.kind or kind
      if name ~= group.kind then
        return ("the saved optimizer is %s, but this one is %s%s"):format(tostring(name), group.kind,
          #list > 1 and (" (group %d)"):format(number) or "")
      end
    end
  end
end

--- Returns the saved groups that are to be loaded. If a schedule of the saved optimizer changed beta1, momentum or
--- beta2, and no schedule of this optimizer does, these groups lack the values, so that this optimizer keeps its own.
---@param list table[]
---@param values table the field `values` of a saved state
---@return table[]
function saved_groups.to_load(list, values)
  local now, was, all = groups.changes(list), values.changes, {}
  if was ~= "beta1" and was ~= "betas" or now == "betas" or now == was then return values.groups end
  for number, group in ipairs(list) do
    local saved = copied(values.groups[number])
    local beta2 = was == "beta1" and type(saved.betas) == "string" and saved.betas:match " (%S+)$"
    if not saved.betas then saved.momentum = nil end
    saved.betas = beta2 and group.betas and ("%.17g %s"):format(group.betas[1], beta2) or nil
    all[number] = saved
  end
  return all
end

--- Describes the error in settings that are to be loaded. Returns nil if there is no error.
---@param list table[]
---@param saved table[] result of to_load
---@return string?
function saved_groups.problem(list, saved)
  for number, group in ipairs(list) do
    local problem = groups.problem(saved_groups.with_saved(group, saved[number]))
    if problem then return ("group %d of the saved optimizer: %s"):format(number, problem) end
  end
end

--- Loads settings that saved_groups.saved has converted.
---@param list table[]
---@param saved table[] saved settings of each group
function saved_groups.from_text(list, saved)
  local same = true
  for number, group in ipairs(list) do
    for _, key in ipairs(saved_keys(group)) do
      if saved[number][key] ~= nil then group[key] = value_of(saved[number][key]) end
    end
    group.first_rate = not groups.changes(list) and saved[number].initial_lr or nil
    same = same and saved[number].initial_lr == text_of(group.initial_lr)
  end
  groups.loaded(list, same)
end

return saved_groups
