-- SPDX-License-Identifier: BSD-3-Clause
-- Replaces the layout of the model by a layout with smaller chunks. This happens if a step does not fit and the
-- configuration does not set the chunk size. The search for a chunk size (layout/pack.lua) knows the model and the
-- budgets, but not the other tensors of a step. A dry run shows whether the chunks of an op and these tensors fit
-- together. The layout changes between two steps. The values of the parameters do not depend on the layout. All ranks
-- use the same chunk size, even if only one rank lacks room.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local pack = require "ps.engine.layout.pack"
local optimizers = require "ps.optimizers"
local kinds = require "ps.core.kinds"
local split = require "ps.engine.layout.split"
local share = require "ps.engine.layout.share"
local build = require "ps.engine.layout.build"
local masters = require "ps.engine.state.masters"
local place_options = require "ps.engine.layout.options"
local human = require("ps.core.readable").bytes

local ffi, C = native.ffi, native.C

local finer = {}

local info = ffi.new("ps_tier_info")
local pieces = build.pieces

-- Moves a parameter and its state into the chunks of a row. The parameter must have no gradient. Its next gradient is
-- stored at the new position.
local function move_param(made, group, ids, at, where)
  local offset = at.offset
  local apart = made.master ~= nil and not rawequal(made.master, made.param)
  pieces.adopt_param(made.param, group.dtype, where, ids, offset, made.name)
  if made.remainder then pieces.adopt_remainder(made.master, ids, offset, made.name)
  elseif apart then pieces.adopt(made.master, "fp32", ids, "param_fp32", offset, made.name) end
  for k, average in ipairs(made.averages or {}) do
    pieces.adopt_state(average, group.states[k], ids, offset, at.index, made.name)
  end
  if made.grad ~= nil then made.grad = pieces.new_grad(made.param, group, where, ids, offset, made.name) end
end

-- Returns a table from each row of a layout to its unit. A row that does not train has unit 0.
local function units_of(made)
  local units, count = {}, 0
  for _, row in ipairs(made.chunks) do
    local trains = made.groups[row.group].trains
    count = count + (trains and 1 or 0)
    units[row] = trains and count or 0
  end
  return units
end

-- Moves parameters into the rows of `plan`. A parameter whose row is unchanged does not move. All ranks must call this
-- function. The caller must first drop the host's views of the parameters that this rank owns (row.place).
local function move(built, plan, options)
  local shards, rows, kept, fresh, owners = options.shards, {}, units_of(built.layout), {}, {}
  local old_bytes, old_numel, old_rows = built.unit_bytes, built.unit_numel, built.unit_rows
  local old_states, shapes = built.unit_states, {}
  for _, list in ipairs { built.list, built.frozen } do for _, made in ipairs(list) do rows[made.index] = made end end
  for index, made in pairs(rows) do shapes[index] = made.param:shape() end
  local stays = {}
  for _, row in ipairs(plan.chunks) do stays[row] = true end
  for _, row in ipairs(shards and built.layout.chunks or {}) do
    for _, part in ipairs(stays[row] and {} or row.parts) do shards:drop(part) end
  end
  for _, row in ipairs(plan.chunks) do
    if not kept[row] then
      fresh[#fresh + 1] = row
      owners[#fresh] = row.owner
      for _, at in ipairs(row.tensors) do rows[at.index].place, rows[at.index].values = nil, nil end
    end
  end
  scope.collect()
  if shards then pieces.number_stripes(fresh, shards, options.grads, share.stripes(fresh, owners)) end
  built.layout, built.units, built.unit_bytes, built.unit_numel, built.unit_rows = plan, 0, {}, {}, {}
  built.unit_states = {}
  for _, row in ipairs(plan.chunks) do
    local group, unit = plan.groups[row.group], kept[row]
    local ids = not unit and pieces.chunks_for(row, group, options, shapes) or nil
    if group.trains and ids then
      pieces.add_unit(built, row, group, ids)
    elseif group.trains then
      built.units = built.units + 1
      built.unit_bytes[built.units], built.unit_numel[built.units] = old_bytes[unit], old_numel[unit]
      built.unit_states[built.units] = old_states[unit]
      built.unit_rows[built.units] = old_rows[unit]
    end
    for _, at in ipairs(row.tensors) do
      local made = rows[at.index]
      if group.trains then made.unit = built.units - 1 end
      if ids then
        local moves = group.trains and not made.states and pieces.thaw_param or move_param
        moves(made, group, ids, at, options)
        pieces.finish_row(made, options)
      end
    end
  end
  built.state_bytes = pieces.state_bytes()
end

-- Finds the parameter that is largest together with its optimizer state. Returns the size in bytes of the parameter and
-- the state together, and the parameter's name. An update needs this many bytes on the host at once, whatever the chunk
-- size is.
local function least_set(engine, options)
  local most, name = 0, nil
  for _, row in ipairs(engine.built.list) do
    local bytes = row.averages and row.numel * options.other_bytes
      + optimizers.states_nbytes(row.states, row.param:shape()) or 0
    if bytes > most then most, name = bytes, row.name end
  end
  return most, name
end

-- Returns the maximum size in bytes of an fp32 chunk with `numel` elements. In chunks of some kinds, the data begin at
-- an offset. The result includes the largest of these offsets.
local function chunk_bytes(numel) return 4 * numel + kinds.most_extra(numel) end

-- Returns the number of elements of the largest chunk that holds several tensors.
local function largest_shared(engine)
  local most = 0
  for _, row in ipairs(#engine.built.list > 0 and engine.built.layout.chunks or {}) do
    if #row.tensors > 1 then most = math.max(most, row.numel) end
  end
  return most
end

--- Returns the largest new chunk size for which there is room, as a fraction of the size of the largest chunk that
--- holds several tensors. Returns 0 if there is no room. While tensors move, the host holds an old chunk and a new
--- chunk at the same time, and the tiers hold all chunks of a row twice.
---@param engine ps.Engine
---@return number
function finer.limit(engine)
  local most, largest, free, room = largest_shared(engine), 0, 0, math.huge
  for _, list in ipairs { engine.built.list, engine.built.frozen } do
    for _, made in ipairs(list) do if made.numel <= most then largest = math.max(largest, made.numel) end end
  end
  for t = 0, C.ps_engine_tier_count(native.ctx) - 1 do
    native.check(C.ps_engine_tier_get(native.ctx, t, info))
    local limited = info.budget > 0
    free = free + (limited and tonumber(info.free) or math.huge)
    if limited and info.device == engine.host then room = tonumber(info.budget - info.other) end
  end
  room = room - chunk_bytes(most)
  if room < chunk_bytes(math.max(largest, pack.UNIT)) or free < 5 * chunk_bytes(most) then return 0 end
  return math.min(1, (room - kinds.most_extra(math.huge)) / 4 / most)
end

-- The errors after which smaller chunks may help, by the field `sub` of the error. A step that does not fit raises
-- them.
local ROOM = { OP_CHUNKS = true, OP_BESIDE_RESIDENTS = true, RESIDENTS = true, HOMELESS = true }

--- Handles the error of a step that cannot be planned. If smaller chunks may help, returns the fraction of an op's
--- chunks for which there is room. If they do not help, or if the configuration sets chunk_size, returns nil and
--- appends the reason to the error.
---@param engine ps.Engine
---@param problem any
---@return number?
function finer.share(engine, problem)
  local sub = type(problem) == "table" and problem.sub
  if not ROOM[sub] then return nil end
  -- HOMELESS: the last tier lacks room. The plan needs room in the last tier for two of the largest chunks, in addition
  -- to its other needs. Smaller chunks reduce only the room for these two chunks (src/chunk/resident.c).
  if sub == "HOMELESS" and problem.lacking > 2 * chunk_bytes(largest_shared(engine)) then return nil end
  if engine.cfg.chunk_size then
    problem.msg = problem.msg .. "; a smaller chunk_size may also help"
    return nil
  end
  local function hopeless(why) problem.msg = ("%s (smaller chunks do not help: %s)"):format(problem.msg, why) end
  local resident, of_op = sub ~= "OP_CHUNKS", sub == "OP_CHUNKS" or sub == "OP_BESIDE_RESIDENTS"
  local left = of_op and problem.left or 0
  if engine.plan.no_finer then return hopeless("another process has no room to move parameters between chunks") end
  if not split.next_size(engine.built.layout, 1) then
    return hopeless("each chunk already holds only one tensor")
  end
    -- Chunks that other ranks own are gathered into buffers. Smaller chunks need smaller buffers.
  if left <= 0 and engine.zero_stage < 3 and not resident then return hopeless("there is room for no chunk at all") end
  local least, name = least_set(engine, place_options(engine))
  if problem.tier == "host" and left > 0 and least > left then
    return hopeless(("%s with its optimizer state needs %s"):format(name, human(least)))
  end
  local limit = finer.limit(engine)
  if limit <= 0 then return hopeless("there is no room to move parameters between chunks") end
  return math.min(left > 0 and left / problem.wanted or 0.5, 0.9, limit)
end

--- Replaces the model's layout. Chunks that are in both layouts do not move, and all values and states are kept. All
--- ranks must call this function with the same layout, between steps, while there are no gradients. If this function
--- fails, it closes the engine.
---@param engine ps.Engine
---@param plan ps.layout.Layout
---@param told fun(problem: string): string returns the text of the error that is raised if this function fails;
---  `problem` is the text of the original error
---@param turn? fun() called after the parameters have moved; may change the rows of built.list
function finer.replace(engine, plan, told, turn)
  local built, optimizer, updates = engine.built, engine.optimizer, {}
  for i, row in ipairs(built.list) do updates[row] = optimizer:updates(i) end
  engine.masters:close()
  local ok, problem = pcall(function()
    move(built, plan, place_options(engine))
    if turn then turn() end
    build.register(built, optimizer.group_of, #optimizer.groups, engine)
    for i, row in ipairs(built.list) do optimizer:set_updates(i, updates[row] or 0) end
    engine:laid_out(masters.new(built))
  end)
  if ok then return end
  engine:close()
  local coded = type(problem) == "table" and problem.msg
  local text = told(coded or tostring(problem))
  if coded then problem.msg = text end
  error(coded and problem or text, 0)
end

--- Replaces the model's layout by a layout with smaller chunks. All ranks must call this function with the same `part`,
--- between steps, while there are no gradients.
---@param engine ps.Engine
---@param part number the fraction of an op's chunks for which there is room
function finer.split(engine, part)
  local built, numel = engine.built, {}
  local was, size = built.layout.chunk_size, split.next_size(built.layout, part)
  for _, list in ipairs { built.list, built.frozen } do
    for _, row in ipairs(list) do numel[row.index] = row.numel end
  end
  finer.replace(engine, split.chunks(built.layout, numel, size), function(problem)
    return ("the step did not fit in chunks of %d elements, and the new layout of the model failed in chunks of "
      .. "%d: %s; the engine is closed; set chunk_size = %d"):format(was, size, problem, size)
  end)
end

return finer
