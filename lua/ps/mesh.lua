-- SPDX-License-Identifier: BSD-3-Clause
-- The mesh of ranks: who is together along an axis. Whoever talks to other ranks asks here, by the axis that is meant:
--   world   all ranks: configurations, checkpoints, the end of a run, and whatever fails
--   dp      ranks that train the same parameters (copies of them, or, with ZeRO, shares), each with other rows of every
--           batch: loaders, gradients, losses
--   pp      ranks that have a stage each of one model, in the order of the model
--   tp      ranks that have a part each of the same layers
-- Ranks are numbered with tp fastest, then dp, and pp slowest. Until somebody cuts the world, dp is all of it.
local mesh = {}

local AXES = { world = true, dp = true, pp = true, tp = true }
local RESERVED = { cp = "context parallelism", ep = "expert parallelism" }
local joined, env               -- what ps.init_distributed made, and where this process is
local wanted = {}               -- what its options say of configurations, by key: {value, where it was said}
local sizes                     -- of the axes, once the world is cut; nil before
local groups = {}               -- by axis; those of one rank are absent

--- By ps.init_distributed, when it has joined the other ranks.
---@param group ps.Group of one rank or more
---@param where ps.dist.Env
---@param asked? table<string, any[]>
function mesh.open(group, where, asked)
  joined, env, wanted, sizes, groups = group, where, asked or {}, nil, {}
end

--- What a configuration has to agree with.
---@return table<string, any[]>
function mesh.asked() return wanted end

--- When a group is closed.
---@param group ps.Group
function mesh.close(group)
  if joined == group then joined, env, wanted, sizes, groups = nil, nil, {}, nil, {} end
end

--- Whether ps.init_distributed was called, also where it found one process.
---@return boolean
function mesh.is_open() return joined ~= nil end

--- Where this process is among all ranks and on its machine; nil before ps.init_distributed.
---@return ps.dist.Env?
function mesh.env() return env end

-- Ranks that differ from this one along one axis alone, in order; at: this rank's place on each axis.
local function line(axis, at, all)
  local list = {}
  for i = 0, all[axis] - 1 do
    local place = { dp = at.dp, pp = at.pp, tp = at.tp, [axis] = i }
    list[#list + 1] = place.tp + all.tp * (place.dp + all.dp * place.pp)
  end
  return list
end

-- The sizes of all axes; those that are not given are 1, and dp is what is left of the world.
local function complete(given, world)
  local all = { pp = given.pp or 1, tp = given.tp or 1 }
  for axis, size in pairs(given) do
    if RESERVED[axis] then
      if size ~= 1 then
        error(("ps.mesh: %s = %s: %s does not exist yet"):format(axis, tostring(size), RESERVED[axis]), 0)
      end
    elseif not AXES[axis] or axis == "world" then
      error(("ps.mesh: no axis '%s'; there are dp, pp and tp"):format(tostring(axis)), 0)
    end
    if type(size) ~= "number" or size < 1 or size % 1 ~= 0 then
      error(("ps.mesh: %s is %s; it takes a whole number from 1 on"):format(axis, tostring(size)), 0)
    end
  end
  all.dp = given.dp or world / (all.pp * all.tp)
  if all.dp * all.pp * all.tp ~= world or all.dp % 1 ~= 0 then
    error(("ps.mesh: dp = %s, pp = %d, tp = %d do not fit %d processes: the product must be their number"):format(
      given.dp and tostring(given.dp) or "what is left", all.pp, all.tp, world), 0)
  end
  return all
end

--- Cuts the world along axes, { dp =, pp =, tp = }: numbers of ranks, whose product is the world; dp is by default what
--- is left. All ranks call it at the same time. Twice the same is fine. A loader is made behind it.
---@param given {dp?: integer, pp?: integer, tp?: integer}
---@return {dp: integer, pp: integer, tp: integer} sizes
function mesh.cut(given)
  local all = complete(given, joined and joined:size() or 1)
  local was = sizes or { dp = joined and joined:size() or 1, pp = 1, tp = 1 }
  if was.dp == all.dp and was.pp == all.pp and was.tp == all.tp then return all end
  if sizes then
    error(("the processes are cut into dp = %d, pp = %d, tp = %d already, and dp = %d, pp = %d, tp = %d is asked for")
      :format(was.dp, was.pp, was.tp, all.dp, all.pp, all.tp), 0)
  end
  local rank = joined:rank()
  local at = { tp = rank % all.tp, dp = math.floor(rank / all.tp) % all.dp, pp = math.floor(rank / (all.tp * all.dp)) }
  local made = {}
  for _, axis in ipairs { "pp", "dp", "tp" } do
    if all[axis] > 1 then made[axis] = joined:split(line(axis, at, all), axis) end
  end
  sizes, groups = all, made
  return all
end

--- The ranks along an axis; nil: this process is the only one.
---@param axis "world"|"dp"|"pp"|"tp"
---@return ps.Group?
function mesh.group(axis)
  if not AXES[axis] then error(("no axis '%s'; there are world, dp, pp and tp"):format(tostring(axis)), 2) end
  if axis ~= "world" and sizes then return groups[axis] end
  if axis == "pp" or axis == "tp" then return nil end
  return joined and joined:size() > 1 and joined or nil
end

--- An error where a launcher started several processes and the script has not joined them.
---@param what string what the script calls
function mesh.check_joined(what)
  if joined then return end
  local size = os.getenv "RANK" and os.getenv "WORLD_SIZE" or "1"
  if tonumber(size) ~= 1 then
    error(("WORLD_SIZE is %s: call ps.init_distributed() before %s, so that the processes find each other"):format(size,
      what), 0)
  end
end

return mesh
