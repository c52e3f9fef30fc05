-- SPDX-License-Identifier: BSD-3-Clause
-- The optimizers, by name. Each is a description in a file of this folder: its states, its update, its settings and its
-- names elsewhere. The rest of the engine (layouts, plans, forecasts, ZeRO, pipelines, checkpoints, files of PyTorch)
-- follows from it. CONTRIBUTING.md says how to add one. This file does not load the C engine; only update.lua does.
local dtypes = require "ps.core.dtype"

---@class ps.optimizers.State a tensor that an optimizer keeps for a parameter
---@field name string name of the state in PyTorch, if PyTorch has it; also the name of its kind of chunks
---@field dtype "fp32"|"bf16"|"uint8" dtype of the state; fp32 becomes fp64 for fp64 parameters
---@field shape? fun(shape: integer[]): integer[]? returns the state's shape for a parameter of this shape, or nil if
--- such a parameter lacks the state; without this field, the state has the parameter's shape
---@field most? number with `shape`, the largest number of bytes per element of the parameter

---@class ps.optimizers.Description
---@field name string
---@field op string name of the op in ops.def that updates parameters
---@field settings string[] names of a group's settings, as in PyTorch and in PyTorch's order
---@field defaults table<string, any> defaults in ps.optim, which are PyTorch's
---@field fixed? table<string, any> fields of every group that cannot be set
---@field counters? table<string, any> fields of every group that steps change, with their first values; they are saved
---@field stepped? fun(group: table) with `counters`, is called after each step that was not skipped
---@field average? {state: string, to: fun(group: table): number, from: fun(group: table): number} if evaluation uses
--- other values: parameters are moved toward a state by to(group), and back by from(group); the counter train_mode
--- tells which values they hold
---@field ranges? table<string, ps.config.Type> ranges of settings that types.OPTIMIZER does not contain
---@field states ps.optimizers.State[] in the order of the op's inputs
---@field takes? integer number of state tensors that the op takes for each parameter (default: the number of states)
---@field needed? fun(group: table): integer returns how many of the states an update with these settings needs
--- (default: all)
---@field lacking? fun(group: table): string with `needed`, returns the setting that needs states, for errors
---@field problem? fun(group: table): string? returns an error about settings that are in range but do not fit together
---@field attrs fun(into: ffi.cdata*, group: table) writes settings into the op's attributes
---@field torch table description of PyTorch's class. `extra`: more settings of its groups. belongs(group): returns why
--- a saved group belongs to another class, or nil. `counts`: false if its states have no `step`. write(group, out) and
--- read(saved): convert settings with other names
---@field aliases? string[] names in DeepSpeed's JSON and Hugging Face's Trainer, which are matched in any case
---@field exact_aliases? string[] names of this kind that are matched only in the given case
---@field whole? boolean whether an update needs the whole parameter, not a tensor-parallel rank's part
---@field blocks? boolean whether states have blocks that no cut may divide
---@field matrices? boolean whether it only updates parameters of two dimensions
---@field rest? string with `matrices`, the optimizer of all other parameters

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

--- Returns the optimizer's name for a name or alias, in any case, or nil.
---@param name string
---@return string?
function optimizers.find(name) return by_exact[name] or by_any[name:lower()] end

--- Returns the description of a group's optimizer.
---@param group {kind: string}
---@return ps.optimizers.Description
function optimizers.of_group(group) return by_name[group.kind] end

--- Adds the fields to a group that cannot be set: constants, and counters with their first values.
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

--- Returns a state's number of elements for a parameter of this shape.
---@param state ps.optimizers.State
---@param shape integer[]
---@return integer
function optimizers.state_numel(state, shape)
  local numel = 1
  for _, size in ipairs(state.shape and state.shape(shape) or shape) do numel = numel * size end
  return numel
end

--- Returns the bytes of all states for a parameter of this shape.
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

--- Returns an estimate of the bytes of states per element of a parameter. Only matrices with one row or column, and
--- tensors of one element, can have more.
---@param states ps.optimizers.State[]
---@return number
function optimizers.states_most(states)
  local sum, factored = 0, 0
  for _, state in ipairs(states) do
    if state.most == 4 then factored = 4 else sum = sum + dtypes.of_state[state.dtype] end
  end
  return sum + factored
end

--- Returns the states that an optimizer's parameters have under these groups' settings. The group that needs the most
--- states decides.
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

--- Returns the states that a parameter of this shape has, in the order of the list.
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

--- Returns the number of state tensors per parameter that the update reads.
---@param made ps.optimizers.Description
---@return integer
function optimizers.takes(made) return made.takes or #made.states end

--- Returns how many states an update with a group's settings needs.
---@param group table
---@return integer
function optimizers.needed(group)
  local made = by_name[group.kind]
  return made.needed and made.needed(group) or optimizers.takes(made)
end

return optimizers
