-- SPDX-License-Identifier: BSD-3-Clause
-- Loads the state of a model on several ranks. The state of a rank contains either all tensors, or only the tensors
-- that the rank owns, as does the result of model:state_dict(). The buffers that all ranks share can be missing in all
-- states except the first rank's state. Therefore the first rank sends these buffers to the other ranks.
local scope = require "ps.core.scope"
local hooks = require "ps.core.hooks"
local agree = require "ps.dist.agree"
local mesh = require "ps.dist.mesh"
local origin = require "ps.nn.origin"
local step = require "ps.engine.step"

local own_state = {}

-- Returns the groups of ranks in which only the first rank's state contains buffers. There is a group for the ranks
-- that share the state, and a group for the stages of a pipeline. If a group has the field `everywhere`, its ranks
-- exchange only buffers that all stages have.
local function groups(engine)
  local list = {}
  if engine.ranks and engine.zero_stage > 0 then list[1] = { group = engine.ranks.dp } end
  if engine.stages then list[#list + 1] = { group = mesh.group "pp", everywhere = true } end
  return list
end

-- Returns the buffers of this rank's layers, in the order of the model. With `everywhere`, returns only buffers that
-- all stages have.
local function buffers(engine, everywhere)
  local stages, list = engine.stages, {}
  for name, tensor in engine.module:named_buffers() do
    local all = not stages or not stages.vstages_of[name]
    if all or not everywhere and not stages:elsewhere(name) then list[#list + 1] = { name = name, tensor = tensor } end
  end
  return list
end

-- Returns the names of the buffers that this rank gets from the first ranks of its groups.
local function sent(engine)
  local names = {}
  for _, at in ipairs(groups(engine)) do
    if at.group and at.group:rank() > 0 then
      for _, buffer in ipairs(buffers(engine, at.everywhere)) do names[buffer.name] = true end
    end
  end
  return names
end

-- In each group, the first rank sends the buffers to all ranks if any rank's state lacks a buffer.
local function share(engine, has)
  for _, at in ipairs(groups(engine)) do
    local list = at.group and buffers(engine, at.everywhere) or {}
    local complete = #list == 0 or agree.all(at.group, function()
      for _, buffer in ipairs(list) do if not has(buffer.name) then return false end end
      return true
    end)
    for _, buffer in ipairs(complete and {} or list) do
      local host = buffer.tensor:to("cpu"):contiguous()
      at.group:broadcast(host, 0)
      scope.no_grad(function() buffer.tensor:copy_(host) end)
    end
  end
end

local function merged(options, elsewhere)
  local more = { elsewhere = elsewhere }
  for key, value in pairs(options or {}) do more[key] = value end
  return more
end

-- Returns a function that returns true if a state contains a given name. The state is a table or an open file.
local function holder(state)
  if not state.read_into then return function(name) return state[name] ~= nil end end
  local set = {}
  for _, name in ipairs(state:names()) do set[name] = true end
  return function(name) return set[name] end
end

--- Loads a state into the module of an engine. All ranks must call this function. If a rank has an error, all ranks
--- raise it, unless the state has the field `whole`. In that case, the reader of the state compares the ranks itself.
---@param engine ps.Engine
---@param state table<string, ps.Tensor>|table a table of tensors or an open file
---@param options? {strict?: boolean, check_only?: boolean}
---@return {missing: string[], unexpected: string[]}
function own_state.load(engine, state, options)
  local stages, group, given = engine.stages, mesh.group "world", options
  local together = group and type(state) == "table" and not state.whole
  if together and (options == nil or type(options) == "table") then
    local names, own = sent(engine), stages and stages:is_own(state)
    options = merged(options, function(name) return names[name] or own and stages:elsewhere(name) end)
  end
  if type(options) == "table" and options.check_only then return engine.module:load_state_dict(state, options) end
  engine:end_step()
  engine:train_thawed()
  local function load() return engine.module:load_state_dict(state, options) end
  local result = together and agree.run(group, load) or not together and load()
  if together then share(engine, holder(state)) end
  origin.loaded(engine.module, result.missing, type(given) == "table" and given.elsewhere or nil)
  step.mend(engine, "model")
  return result
end

-- -- saving -----------------------------------------------------------------------------------------------------------
---@type table<table, {engine: ps.Engine, have: integer, all: integer}> The key is a partial state. `have` is the number
---  of tensors in the partial state, and `all` is the number of tensors in the whole state
local parts = setmetatable({}, { __mode = "k" })

local function count(state)
  local n = 0
  for _ in pairs(state) do n = n + 1 end
  return n
end

--- Removes the tensors of other ranks from a state. If tensors were removed, records that the state is partial.
---@param engine ps.Engine
---@param state table<string, ps.Tensor> the state of the module
function own_state.keep(engine, state)
  local all = count(state)
  if engine.zero_stage > 0 then engine.ranks:keep_own(state) end
  if engine.stages then engine.stages:keep_own(state) end
  local have = count(state)
  if have < all then parts[state] = { engine = engine, have = have, all = all } end
end

-- Returns the entry of `parts` for `value` or for one of its fields. Returns nil if there is no such entry.
local function part_in(value)
  if type(value) ~= "table" then return nil end
  if parts[value] then return parts[value] end
  for _, field in pairs(value) do
    if type(field) == "table" and parts[field] then return parts[field] end
  end
end

-- Rank 0 prints a note if ranks save partial states to a file whose name contains no rank. Such a script either wants
-- to save the whole model, or its ranks overwrite the same file.
hooks.on("saves", function(value, path)
  local part, rank = part_in(value), mesh.env() and mesh.env().rank or 0
  if not part or rank > 0 or path:match("[^/]*$"):find "0" then return end
  part.engine:note(("ps.save: '%s' contains only rank 0's %d of the model's %d tensors, because model:state_dict() "
    .. "returns the tensors that a rank owns. Save on all ranks, with the rank in the file's name (docs/zero.md), or "
    .. "save the whole model with model:save_pretrained or ps.checkpoints.save"):format(path, part.have, part.all))
end)

return own_state
