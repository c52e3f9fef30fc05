-- SPDX-License-Identifier: BSD-3-Clause
-- The optimizers, by name. Each optimizer has a description in a file of this folder: its states, its update, its
-- settings, and its names in other software. All other parts of the engine (layouts, plans, forecasts, ZeRO, pipelines,
-- checkpoints, files of PyTorch) use these descriptions. CONTRIBUTING.md says how to add an optimizer. Only update.lua
-- loads the C engine. This file does not.
local dtypes = require "ps.core.dtype"

---@class ps.optimizers.State a tensor that an optimizer keeps for a parameter
---@field name string name of the state in PyTorch, if PyTorch has this state; also the name of its kind of chunk
---@field dtype "fp32"|"bf16"|"uint8" dtype of the state; for fp64 parameters, "fp32" means fp64
---@field shape? fun(shape: integer[]): integer[]? returns the state's shape for a parameter of the given shape, or nil
--- if such a parameter does not have the state; without this field, the state has the parameter's shape
---@field most? number with `shape`, the largest size of the state in bytes per element of the parameter

---@class ps.optimizers.Description
---@field name string
---@field op string name of the op in ops.def that updates parameters
---@field settings string[] names of a group's settings, with the names and the order of PyTorch
---@field defaults table<string, any> default settings in ps.optim, which are the same as in PyTorch
---@field fixed? table<string, any> fields that every group has and scripts cannot set
---@field counters? table<string, any> fields that every group has and steps change, with their first values; they are
--- saved. Numbers have ranges
---@field stepped? fun(group: table) with `counters`: is called after each step that was not skipped
---@field average? {state: string, to: fun(group: table): number, from: fun(group: table): number} is set if evaluation
--- uses other values than training. The parameters move toward a state by the fraction to(group), and back by
--- from(group). The counter train_mode says which values the parameters hold
---@field ranges? table<string, ps.config.Type> ranges of counters, and of settings that types.OPTIMIZER does not
--- contain
---@field states ps.optimizers.State[] the states, in the order of the op's inputs
---@field takes? integer number of state tensors that the op needs for each parameter (default: the number of states)
---@field needed? fun(group: table): integer returns the number of states that an update with these settings needs
--- (default: all)
---@field lacking? fun(group: table): string with `needed`: returns the setting that needs states, for errors
---@field problem? fun(group: table): string? returns an error for settings that are each in range but not allowed
--- together
---@field attrs fun(into: ffi.cdata*, group: table) writes settings into the op's attributes
---@field torch table description of PyTorch's class. `extra`: additional settings of its groups. belongs(group):
--- returns why a saved group belongs to another class, or nil. `counts`: false if its states have no `step`. `nones`:
--- settings of its groups that are always None. write(group, out) and read(saved): convert settings whose names differ
---@field aliases? string[] names in DeepSpeed's JSON and Hugging Face's Trainer, matched without regard to case
---@field exact_aliases? string[] more of these names, which are matched only in the given case
---@field whole? boolean whether an update needs the whole parameter instead of a tensor-parallel rank's part
---@field blocks? boolean whether states have blocks that must not be split between ranks
---@field matrices? boolean whether the optimizer only updates parameters of two dimensions
---@field rest? string with `matrices`: the name of the optimizer for all other parameters

local optimizers = {}

optimizers.names = { "Adam", "AdamW", "SGD", "Lion", "Muon", "Adafactor", "HuggingFaceAdafactor", "LAMB", "AdamW8bit",
  "AdamWBF16", "RMSprop", "AdamWScheduleFree", "Lion8bit" }
local FILES = { Adam = "adam", AdamW = "adam", SGD = "sgd", Lion = "lion", Muon = "muon", Adafactor = "adafactor",
  HuggingFaceAdafactor = "adafactor", LAMB = "lamb", AdamW8bit = "adam_small", AdamWBF16 = "adam_small",
  RMSprop = "rmsprop", AdamWScheduleFree = "schedule_free", Lion8bit = "lion" }
local by_name, by_any, by_exact, updates = {}, {}, {}, {}

for _, name in ipairs(optimizers.names) do
  local made = require("ps.optimizers." .. FILES[name])[name]
  by_name[name], by_any[name:lower()], updates[made.op] = made, name, true
  for _, alias in ipairs(made.aliases or {}) do by_any[alias:lower()] = name end
  for _, alias in ipairs(made.exact_aliases or {}) do by_exact[alias] = name end
end

--- Returns the description of an optimizer by its own name.
---@param name string
---@return ps.optimizers.Description
function optimizers.of(name) return by_name[name] end

--- Returns the name of an optimizer, given its name or an alias. Returns nil if there is no such optimizer.
---@param name string
---@return string?
function optimizers.find(name) return by_exact[name] or by_any[name:lower()] end

--- Returns the description of a group's optimizer.
---@param group {kind: string}
---@return ps.optimizers.Description
function optimizers.of_group(group) return by_name[group.kind] end

--- Adds to a group the fields that scripts cannot set: constants, and counters with their first values.
---@param group table
---@param made ps.optimizers.Description
---@return table group
function optimizers.complete(group, made)
  for key, value in pairs(made.fixed or {}) do group[key] = value end
  for key, value in pairs(made.counters or {}) do group[key] = value end
  return group
end

--- Advances the counters of groups after a step that was not skipped.
---@param groups table[]
function optimizers.stepped(groups)
  for _, group in ipairs(groups) do
    local made = by_name[group.kind]
    if made and made.stepped then made.stepped(group) end
  end
end

--- Returns whether an op updates parameters.
---@param op string
---@return boolean
function optimizers.is_update(op) return updates[op] == true end

--- Returns the names of all states, in the order of optimizers.names.
---@return string[]
function optimizers.state_names()
  local list, seen = {}, {}
  for _, name in ipairs(optimizers.names) do
    for _, state in ipairs(by_name[name].states) do
      if not seen[state.name] then list[#list + 1] = state.name end
      seen[state.name] = true
    end
  end
  return list
end

--- Returns a state's number of elements for a parameter of the given shape.
---@param state ps.optimizers.State
---@param shape integer[]
---@return integer
function optimizers.state_numel(state, shape)
  local numel = 1
  for _, size in ipairs(state.shape and state.shape(shape) or shape) do numel = numel * size end
  return numel
end

--- Returns the size in bytes of all states for a parameter of the given shape.
---@param states ps.optimizers.State[]
---@param shape integer[]
---@return integer
function optimizers.states_nbytes(states, shape)
  local sum = 0
  for _, state in ipairs(states) do
    sum = sum + optimizers.state_numel(state, shape) * dtypes.of_state[state.dtype]
  end
  return sum
end

--- Returns an estimate of the size of the states, in bytes per element of a parameter. Only the states of matrices with
--- one row or column, and the states of tensors with one element, can be larger than the estimate.
---@param states ps.optimizers.State[]
---@return number
function optimizers.states_most(states)
  local sum, factored = 0, 0
  for _, state in ipairs(states) do
    if state.most == 4 then factored = 4 else sum = sum + dtypes.of_state[state.dtype] end
  end
  return sum + factored
end

--- Returns the states that an optimizer's parameters have with the settings of these groups. All parameters have the
--- states of the group that needs the most states.
---@param made ps.optimizers.Description
---@param groups table[]
---@return ps.optimizers.State[]
function optimizers.states_of(made, groups)
  if not made.needed or made.takes then return made.states end
  local most, list = 0, {}
  for _, group in ipairs(groups) do
    if group.kind == made.name then most = math.max(most, made.needed(group)) end
  end
  for i = 1, most do list[i] = made.states[i] end
  return list
end

--- Returns the states that a parameter of the given shape has, in the order of the list.
---@param states ps.optimizers.State[]
---@param shape integer[]
---@return ps.optimizers.State[]
function optimizers.states_for(states, shape)
  local list = {}
  for _, state in ipairs(states) do
    if not state.shape or state.shape(shape) then list[#list + 1] = state end
  end
  return list
end

--- Returns the number of state tensors that an update reads for each parameter.
---@param made ps.optimizers.Description
---@return integer
function optimizers.takes(made) return made.takes or #made.states end

--- Returns the number of states that an update with a group's settings needs.
---@param group table
---@return integer
function optimizers.needed(group)
  local made = by_name[group.kind]
  return made.needed and made.needed(group) or optimizers.takes(made)
end

return optimizers
