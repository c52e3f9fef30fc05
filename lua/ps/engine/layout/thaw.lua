-- SPDX-License-Identifier: BSD-3-Clause
-- Replaces the layout of the model after frozen parameters were thawed. This happens before the next step
-- (engine/plan/begin.lua), or before a checkpoint is saved or loaded. If a chunk contains thawed parameters, these
-- parameters move into new chunks that train. Its other parameters stay frozen and move into another new chunk. Other
-- chunks do not move. The master of a thawed parameter is initialized with the parameter's value, and its optimizer
-- state with zeros. All ranks make the same layout, because it depends only on the old layout and on the parameters.
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local native = require "ps.core.ffi"
local nn_module = require "ps.nn.module"
local optimizers = require "ps.optimizers"
local adopt = require "ps.engine.state.adopt"
local optimizer = require "ps.engine.state.optimizer"
local pack = require "ps.engine.layout.pack"
local place_options = require "ps.engine.layout.options"
local rechunk = require "ps.engine.layout.rechunk"
local share = require "ps.engine.layout.share"
local split = require "ps.engine.layout.split"
local trained = require "ps.engine.step.trained"
local unused = require "ps.engine.step.unused"
local human = require("ps.core.readable").bytes

local ffi, C = native.ffi, native.C
local ELEMENT = require("ps.core.dtype").nbytes

local thaw = {}

local info = ffi.new("ps_tier_info")

-- Returns two lists about this rank's thawed parameters, in the order of the layout. The first list contains their
-- entries for pack.pack. The second list contains their rows.
local function entries_of(engine, thawed, where)
  local built, group_of, tables, entries, rows = engine.built, {}, {}, {}, {}
  for _, chunk in ipairs(built.layout.chunks) do
    for _, at in ipairs(chunk.tensors) do group_of[at.index] = built.layout.groups[chunk.group] end
  end
  for _, t in ipairs(built.tables) do tables[nn_module.address(t.param)] = true end
  for _, row in ipairs(built.frozen) do if thawed[row.index] then rows[#rows + 1] = row end end
  table.sort(rows, function(a, b) return a.index < b.index end)
  for i, row in ipairs(rows) do
    local group, states = group_of[row.index], where.states_for(row.name, row.param)
    entries[i] = { numel = row.numel, dtype = group.dtype, trains = true, name = row.name, vstage = group.vstage,
      stays = group.stays, apart = tables[nn_module.address(row.param)], states = states,
      bytes = where.other_bytes + optimizers.states_nbytes(states, row.param:shape()) / math.max(1, row.numel) }
  end
  return entries, rows
end

-- Chooses the owners of the new chunks that train. Each chunk is assigned to the rank whose trained chunks have the
-- fewest bytes so far.
local function share_out(plan, fresh, shards, state_bytes)
  if not shards then return end
  local bytes = {}
  for rank = 1, shards.size do bytes[rank] = 0 end
  local function weight(chunk) return chunk.numel * pack.state_bytes(plan.groups[chunk.group], state_bytes) end
  for _, chunk in ipairs(plan.chunks) do
    if plan.groups[chunk.group].trains and chunk.owner then            -- new chunks have no owner yet
      bytes[chunk.owner + 1] = bytes[chunk.owner + 1] + weight(chunk)
    end
  end
  local made = share.out(fresh, shards.size, weight, bytes)
  for i, chunk in ipairs(fresh) do chunk.owner = made.owner[i] end
end

-- Returns chunks for the parameters of `chunk` that are still frozen. The first of these chunks keeps the index of
-- `chunk`.
local function still_frozen(chunk, group, thawed, numel, size)
  local frozen = {}
  for _, at in ipairs(chunk.tensors) do if not thawed[at.index] then frozen[#frozen + 1] = at end end
  if #frozen == #chunk.tensors then return { chunk } end
  return split.pieces(chunk, group, frozen, numel, size)
end

-- Returns the new layout, and the new chunks of the thawed parameters. `entries` and `rows` are the results of
-- entries_of.
local function layout_of(built, thawed, entries, rows)
  local was, numel = built.layout, {}
  local new = { chunk_size = was.chunk_size, groups = {}, chunks = {}, numel = 0, used = 0 }
  for _, list in ipairs { built.list, built.frozen } do
    for _, row in ipairs(list) do numel[row.index] = row.numel end
  end
  for i, group in ipairs(was.groups) do
    new.groups[i] = copied(group)
    new.groups[i].numel, new.groups[i].used = 0, 0
  end
  for _, chunk in ipairs(was.chunks) do
    for _, piece in ipairs(still_frozen(chunk, new.groups[chunk.group], thawed, numel, was.chunk_size)) do
      new.chunks[#new.chunks + 1] = piece
    end
  end
  local made, first_group = pack.pack(entries, was.chunk_size), #new.groups
  for _, group in ipairs(made.groups) do
    group.numel, group.used = 0, 0
    new.groups[#new.groups + 1] = group
  end
  for _, chunk in ipairs(made.chunks) do
    chunk.group = first_group + chunk.group
    for _, at in ipairs(chunk.tensors) do at.index = rows[at.index].index end
    local at = #new.chunks + 1                                 -- position of the first chunk that is used after `chunk`
    for i, other in ipairs(new.chunks) do
      if other.tensors[1].index > chunk.tensors[1].index then
        at = i
        break
      end
    end
    table.insert(new.chunks, at, chunk)
  end
  for _, chunk in ipairs(new.chunks) do
    local group = new.groups[chunk.group]
    group.numel, group.used = group.numel + chunk.numel, group.used + chunk.used
    new.numel, new.used = new.numel + chunk.numel, new.used + chunk.used
  end
  new.waste = new.numel - new.used
  new.waste_share = new.used > 0 and new.waste / new.used or 0
  return new, made.chunks
end

-- Raises an error if the tiers have no room for the masters, gradients and optimizer states of the new chunks.
local function check_room(plan, fresh, where)
  local shards, free, needed, gone = where.shards, 0, 0, 0
  for _, chunk in ipairs(fresh) do
    local group = plan.groups[chunk.group]
    if not (shards and shards:state()) or chunk.owner == shards.rank then
      needed = needed + chunk.numel * pack.state_bytes(group, where.state_bytes)
      gone = gone + chunk.used * ELEMENT[group.dtype]
    end
  end
  for t = 0, C.ps_engine_tier_count(native.ctx) - 1 do
    native.check(C.ps_engine_tier_get(native.ctx, t, info))
    free = free + (info.budget > 0 and tonumber(info.free) or math.huge)
  end
  if needed - gone <= free then return end
  caller.error(("the thawed parameters need %s more for their masters, gradients and optimizer state, but only %s of "
    .. "the budgets is free: raise memory.host or memory.disk, or thaw fewer parameters"):format(human(needed - gone),
    human(free)))
end

--- Prepares a layout in which the thawed parameters train. Raises an error if they cannot train or if there is no room.
---@param engine ps.Engine
---@return string? names the names of the thawed parameters, one per line, or nil if there are none
---@return fun()? replace replaces the present layout; all ranks must call it between steps, while there are no
---  gradients
function thaw.prepare(engine)
  local list, built = trained.thawed(engine), engine.built
  if #list == 0 then return nil end
  local options, thawed, names = place_options(engine), {}, {}
  for i, row in ipairs(list) do
    adopt.check_thawed(engine, row.name)
    if row.index then
      options.check_parameter(row.name, row.param)
      thawed[row.index] = true                                 -- the key is the index in the layout
    end
    names[i] = row.name
  end
  local entries, rows = entries_of(engine, thawed, options)
  local plan, fresh = layout_of(built, thawed, entries, rows)
  share_out(plan, fresh, options.shards, options.state_bytes)
  check_room(plan, fresh, options)
  return table.concat(names, "\n"), function()
    for _, row in ipairs(list) do row.param:set_grad(nil) end
    rechunk.replace(engine, plan, function(problem)
      return ("the new layout of the model with %s thawed failed: %s; the engine is closed"):format(list[1].name,
        problem)
    end, function()
      local is_thawed = {}
      for _, row in ipairs(list) do
        is_thawed[row] = true
        table.insert(row.index and built.list or built.elsewhere, row)
      end
      for _, key in ipairs { "frozen", "untrained" } do
        local kept = {}
        for _, row in ipairs(built[key]) do if not is_thawed[row] then kept[#kept + 1] = row end end
        built[key] = kept
      end
      optimizer.arrange(engine.optimizer)
    end)
    unused.begin(engine)
  end
end

return thaw
