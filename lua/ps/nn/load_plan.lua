-- SPDX-License-Identifier: BSD-3-Clause
-- Plans a load_state_dict. A plan says which tensor of a state is read into which tensor of a module, and which names
-- or shapes do not match.
local caller = require "ps.core.caller"
local create = require "ps.tensor.create"
local sharded = require "ps.nn.sharded"
local hooks = require "ps.core.hooks"
local rectangles = require "ps.core.rectangles"
local registry = require "ps.nn.registry"
local scope = require "ps.core.scope"
local tied = require "ps.nn.tied"
local shard = require "ps.tensor.shard"

local error = caller.error

local load_plan = {}

--- Returns a text with the first five names of a list and the number of the other names.
---@param list string[]
---@return string
function load_plan.some(list)
  local shown = {}
  for i = 1, math.min(#list, 5) do shown[i] = list[i] end
  if #list > 5 then shown[6] = ("and %d more"):format(#list - 5) end
  return table.concat(shown, ", ")
end

-- Returns whether a tensor of a state fits a parameter. A state must not contain both whole tensors and a rank's shards
-- (ps.nn.sharded). To check this, `kinds` stores the first name of a whole tensor and the first name of a shard.
-- `is_whole` says that the state is marked as a state without shards.
local function fits(shape, tensor, name, kinds, is_whole)
  local kind = sharded.fit(shape, tensor)
  if kind == "own" and is_whole then return false end
  if kind and not rectangles.same(sharded.shape(tensor), tensor:shape()) then
    kinds[kind] = kinds[kind] or name
    if kinds.own and kinds.whole then
      error(("load_state_dict: the state has the whole tensor '%s', but only a rank's shard of '%s'; use a state " ..
        "with either whole tensors or shards"):format(
        kinds.whole, kinds.own), 0)
    end
  end
  return kind ~= nil
end

-- Returns the names of entries that have no source in the state. If the state has no tensor of another process, it is
-- this process's own state. In that case the tensors of other processes are not missing.
local function missing_of(entries, elsewhere)
  local missing, absent = {}, {}
  local own = true
  for _, entry in ipairs(entries) do
    absent[entry] = hooks.ask("owner", entry.tensor)
    if absent[entry] and entry.from then own = false end
  end
  for _, entry in ipairs(entries) do
    local has = entry.from or own and absent[entry] or elsewhere and elsewhere(entry.name)
    if not has then missing[#missing + 1] = entry.name end
  end
  return missing
end

--- Plans a load. Returns a list of entries {tensor =, name =, from =, again =}, one for each distinct tensor. `from` is
--- the name in the source, or nil if the source does not have the tensor. A tied tensor is read from the first of its
--- names in the source, and `again` lists its other names in the source. Also returns the lists of missing names, of
--- unexpected names, and of shapes that do not match.
---@param self ps.nn.Module
---@param source table<string, boolean> the names that the state has
---@param shape_of fun(name: string): integer[]
---@param elsewhere? fun(name: string): any returns whether another process has a tensor
---@param state table tensors by name, or an open file
---@return table[] entries
---@return string[] missing
---@return string[] unexpected
---@return string[] wrong
function load_plan.plan(self, source, shape_of, elsewhere, state)
  local entries, by_address, by_name, known, wrong, kinds = {}, {}, {}, {}, {}, {}
  local of_file = state.read_into and (state.shards and state:shards() or {})
  local function shard_of(name)
    if of_file then return of_file[name] end
    return shard.of(state[name])
  end
  local function note(name, entry)
    if known[name] then return end
    known[name] = true
    if not source[name] then return end
    if entry.from then table.insert(entry.again, name) end
    entry.from = entry.from or name
    local has, tensor = shape_of(name), entry.tensor
    sharded.check_rank(shard_of(name), tensor, name)
    if not fits(has, tensor, name, kinds, state.whole == true) then
      wrong[#wrong + 1] = ("%s is [%s] in the model, [%s] in the state"):format(name,
        table.concat(sharded.shape(tensor), ", "), table.concat(has, ", "))
    end
  end
  registry.walk(self, function(name, tensor, kind, owner, key)
    if kind == "module" or not registry.is_persistent(owner, key) then return end
    local at = registry.address(tensor)
    local entry = by_address[at]
    if not entry then
      entry = { tensor = tensor, name = name, again = {} }
      by_address[at], by_name[name] = entry, entry
      entries[#entries + 1] = entry
    end
    note(name, entry)
  end)
  for name, first in pairs(tied.names(self, true)) do note(name, by_name[first]) end
  local missing, unexpected = missing_of(entries, elsewhere), {}
  for name in pairs(source) do if not known[name] then unexpected[#unexpected + 1] = name end end
  table.sort(unexpected)
  return entries, missing, unexpected, wrong
end

-- Returns whether two tensors of a state have the same values. Tensors of a file are first read into memory and
-- converted to the type of `tensor`.
local function alike(state, one, other, tensor)
  if not state.read_into then
    return rawequal(state[one], state[other]) or state[one]:equal(state[other])
  end
  return scope.no_grad(scope.scope, function()
    local list = {}
    for i, name in ipairs { one, other } do
      list[i] = create.empty(state:shape(name), { dtype = tensor:dtype(), device = "cpu" })
      state:read_into(name, list[i])
    end
    return list[1]:equal(list[2])
  end)
end

--- Raises an error if a tied tensor has several names in a state, and the state has different values for them.
---@param entries table[] returned by load_plan.plan
---@param state table tensors by name, or an open file
function load_plan.check_tied(entries, state)
  for _, entry in ipairs(entries) do
    for _, name in ipairs(entry.again) do
      if not alike(state, entry.from, name, entry.tensor) then
        error(("load_state_dict: '%s' and '%s' are one tied parameter, but the state has different values for them; "
          .. "remove one of the two, or untie the model"):format(entry.from, name))
      end
    end
  end
end

return load_plan
