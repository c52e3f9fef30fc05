-- SPDX-License-Identifier: BSD-3-Clause
-- The plan of load_state_dict: which tensor of a state goes to which tensor of a module, and what does not fit.
local sharded = require "ps.nn.sharded"
local hooks = require "ps.core.hooks"
local rectangles = require "ps.core.rectangles"
local registry = require "ps.nn.registry"
local shard = require "ps.tensor.shard"

local load_plan = {}

--- The first five names of a list, and how many more there are.
---@param list string[]
---@return string
function load_plan.some(list)
  local shown = {}
  for i = 1, math.min(#list, 5) do shown[i] = list[i] end
  if #list > 5 then shown[6] = ("and %d more"):format(#list - 5) end
  return table.concat(shown, ", ")
end

-- Notes whether a state has whole tensors or a rank's own shards (ps.nn.sharded), the names of the first of each: a
-- state has one kind. What says of itself that it is whole has no shards.
local function fits(shape, tensor, name, kinds, is_whole)
  local kind = sharded.fit(shape, tensor)
  if kind == "own" and is_whole then return false end
  if kind and not rectangles.same(sharded.shape(tensor), tensor:shape()) then
    kinds[kind] = kinds[kind] or name
    if kinds.own and kinds.whole then
      error(("load_state_dict: the state has the whole tensor '%s', and of '%s' a rank's part alone"):format(
        kinds.whole, kinds.own), 0)
    end
  end
  return kind ~= nil
end

-- The names of entries without a source. A source that has no tensor of another process is this process's own, and need
-- not have theirs.
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

--- Plans a load: entries {tensor =, name =, from = source name or nil}, one a distinct tensor, and lists of what is
--- missing, unexpected and of another shape. A tied tensor takes the first of its names that the source has.
---@param self ps.nn.Module
---@param source table<string, boolean> the names that the state has
---@param shape_of fun(name: string): integer[]
---@param elsewhere? fun(name: string): any whether another process has a tensor
---@param state table tensors by name, or an open file
---@return table[] entries
---@return string[] missing
---@return string[] unexpected
---@return string[] wrong
function load_plan.plan(self, source, shape_of, elsewhere, state)
  local entries, by_address, known, wrong, kinds = {}, {}, {}, {}, {}
  local of_file = state.read_into and (state.shards and state:shards() or {})
  local function shard_of(name)
    if of_file then return of_file[name] end
    return shard.of(state[name])
  end
  registry.walk(self, function(name, tensor, kind)
    if kind == "module" then return end
    known[name] = true
    local at = registry.address(tensor)
    local entry = by_address[at]
    if not entry then
      entry = { tensor = tensor, name = name }
      by_address[at] = entry
      entries[#entries + 1] = entry
    end
    if not source[name] then return end
    entry.from = entry.from or name
    local has = shape_of(name)
    sharded.check_rank(shard_of(name), tensor, name)
    if not fits(has, tensor, name, kinds, state.whole == true) then
      wrong[#wrong + 1] = ("%s is [%s] in the model, [%s] in the state"):format(name,
        table.concat(sharded.shape(tensor), ", "), table.concat(has, ", "))
    end
  end)
  local missing, unexpected = missing_of(entries, elsewhere), {}
  for name in pairs(source) do if not known[name] then unexpected[#unexpected + 1] = name end end
  table.sort(unexpected)
  return entries, missing, unexpected, wrong
end

return load_plan
