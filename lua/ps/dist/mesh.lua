-- SPDX-License-Identifier: BSD-3-Clause
-- The mesh of ranks (ps.mesh). It says which ranks form a group along each axis. Code that communicates finds its group
-- here:
--   world   all ranks. Used for configurations, checkpoints, the end of a run, and failures
--   dp      the ranks that train the same parameters (replicas, or shards with ZeRO) on different rows of every batch.
--           Used by loaders, and for gradients and losses
--   pp      the ranks of a pipeline. Each has one stage of a model, in the order of the model
--   tp      the ranks that share the same layers. Each has one part of every layer
-- Ranks are numbered along tp first, then along dp, then along pp. Until the world is split into groups, dp has all
-- ranks.
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local error = caller.error

local mesh = {}

mesh.MOST_PIECES = 8            -- PS_MAX_PIECES: largest number of pieces in which rows are sent while products run
local PIECES = 4                -- number of pieces for tp_overlap_comm = true

--- Returns the number of pieces that tensor_parallel.tp_overlap_comm selects.
---@param overlap? boolean|integer
---@return integer number of pieces; 1 if communication and products do not overlap
function mesh.pieces(overlap)
  if type(overlap) == "number" then return overlap end
  return overlap and PIECES or 1
end

local AXES = { world = true, dp = true, pp = true, tp = true, cp = true, ep = true }
local CUTS = { "tp", "dp", "pp" }  -- axes in the order in which ranks are numbered, fastest first
local KEYS = { pp = "pipeline.stages", tp = "tensor_parallel.size" }        -- configuration keys of the axes' sizes
local RESERVED = { cp = "context parallelism", ep = "expert parallelism" }
local joined, env               -- the group of ps.init_distributed, and this process's ranks (ps.dist.Env)
local wanted = {}               -- settings that scripts made, by configuration key: {value, name in messages}
local sizes                     -- sizes of the axes, or nil before the world is cut
local groups = {}               -- groups by axis, without groups of one rank

--- Sets the group of all ranks. ps.init_distributed calls this function after the ranks have joined.
---@param group ps.Group of one rank or more
---@param where ps.dist.Env
---@param asked? table<string, any[]>
function mesh.open(group, where, asked)
  joined, env, wanted, sizes, groups = group, where, asked or {}, nil, {}
end

--- Returns the settings with which a configuration must agree, by configuration key.
---@return table<string, any[]>
function mesh.asked() return wanted end

--- Forgets a group. Called when the group is closed.
---@param group ps.Group
function mesh.close(group)
  if joined == group then joined, env, wanted, sizes, groups = nil, nil, {}, nil, {} end
end

--- Returns whether ps.init_distributed was called, even if it found only one process.
---@return boolean
function mesh.is_open() return joined ~= nil end

--- Returns this process's rank among all ranks and its rank on its machine. Returns nil before ps.init_distributed.
---@return ps.dist.Env?
function mesh.env() return env end

local function world_size() return joined and joined:size() or 1 end

local function check_axis(axis)
  if not AXES[axis] then
    error(("there is no axis '%s'; the axes are world, dp, pp, tp, cp and ep"):format(tostring(axis)))
  end
end

-- Returns the first of the ranks that differ from `rank` only along one axis. Also returns the distance between two
-- neighbours of these ranks.
local function first_of_line(axis, all, rank)
  local stride = 1
  for _, cut in ipairs(CUTS) do
    if cut == axis then break end
    stride = stride * all[cut]
  end
  return rank - math.floor(rank / stride) % all[axis] * stride, stride
end

-- Returns the ranks that differ from this rank only along one axis, including this rank, in order.
local function line(axis, all)
  local first, stride = first_of_line(axis, all, joined:rank())
  local list = {}
  for i = 0, all[axis] - 1 do list[#list + 1] = first + i * stride end
  return list
end

-- Returns the sizes of all axes. pp and tp default to 1. dp defaults to the world's size divided by pp and tp.
local function complete(given, world)
  local all = { pp = given.pp or 1, tp = given.tp or 1 }
  for axis, size in pairs(given) do
    if RESERVED[axis] then
      if size ~= 1 then
        error(("ps.mesh: %s = %s: %s does not exist yet"):format(axis, tostring(size), RESERVED[axis]))
      end
    elseif not AXES[axis] or axis == "world" then
      error(("ps.mesh: there is no axis '%s'; the axes are dp, pp and tp"):format(tostring(axis)))
    end
    if type(size) ~= "number" or size < 1 or size % 1 ~= 0 then
      error(("ps.mesh: %s is %s; it must be a whole number of at least 1"):format(axis, tostring(size)))
    end
  end
  for axis, key in pairs(KEYS) do
    local said = wanted[key]
    if said and given[axis] and said[1] ~= given[axis] and not said.of_mesh then
      error(("ps.mesh: %s is %d and %s is %d; they mean the same, keep one"):format(axis, given[axis], said[2],
        said[1]))
    end
  end
  all.dp = given.dp or world / (all.pp * all.tp)
  if all.dp * all.pp * all.tp ~= world or all.dp % 1 ~= 0 then
    local ranks = (given.dp or 1) * all.pp * all.tp
    error(("ps.mesh: dp = %s, pp = %d, tp = %d do not fit %d processes; dp * pp * tp must be this number; %s"):format(
      given.dp and tostring(given.dp) or "the rest", all.pp, all.tp, world, hooks.ask("ranks_wanted", ranks)
      or ("start them with psluajit tools/launch.lua --nproc-per-node %d SCRIPT, which calls ps.init_distributed() "
      .. "first"):format(ranks)))
  end
  return all
end

--- Cuts the world along axes. { dp =, pp =, tp = } contains the number of ranks along each axis. The product of these
--- numbers is the world's size. dp defaults to the world's size divided by pp and tp. All ranks must call this function
--- at the same time. A second call with the same sizes does nothing. Create loaders after this call.
---@param given {dp?: integer, pp?: integer, tp?: integer, cp?: integer, ep?: integer} cp and ep must be 1
---@return {dp: integer, pp: integer, tp: integer} sizes
function mesh.cut(given)
  if type(given) ~= "table" then error(("ps.mesh takes a table of sizes, not a %s"):format(type(given))) end
  mesh.check_joined "ps.mesh"
  local all = complete(given, world_size())
  local was = sizes or { dp = world_size(), pp = 1, tp = 1 }
  if was.dp == all.dp and was.pp == all.pp and was.tp == all.tp then return all end
  if sizes then
    error(("the processes are already cut into dp = %d, pp = %d, tp = %d; they cannot be cut into dp = %d, pp = %d, "
      .. "tp = %d")
      :format(was.dp, was.pp, was.tp, all.dp, all.pp, all.tp))
  end
  local made = {}
  for _, axis in ipairs { "pp", "dp", "tp" } do
    if all[axis] > 1 then made[axis] = joined:split(line(axis, all), axis) end
  end
  sizes, groups = all, made
  for axis, key in pairs(KEYS) do wanted[key] = wanted[key] or { all[axis], "ps.mesh's " .. axis, of_mesh = true } end
  return all
end

--- Returns the number of ranks along an axis.
---@param axis "world"|"dp"|"pp"|"tp"|"cp"|"ep"
---@return integer
function mesh.size(axis)
  check_axis(axis)
  if axis == "world" or axis == "dp" and not sizes then return world_size() end
  return sizes and sizes[axis] or 1
end

--- Returns this rank's index along an axis, from 0.
---@param axis "world"|"dp"|"pp"|"tp"|"cp"|"ep"
---@return integer
function mesh.rank(axis)
  if mesh.size(axis) == 1 then return 0 end
  local rest = joined:rank()
  for _, cut in ipairs(axis ~= "world" and sizes and CUTS or {}) do
    if cut == axis then return rest % sizes[cut] end
    rest = math.floor(rest / sizes[cut])
  end
  return rest
end

--- Returns the first rank of the group to which a rank belongs along an axis. Returns the rank itself if the axis has
--- size 1.
---@param axis "dp"|"pp"|"tp"
---@param rank integer global rank
---@return integer
function mesh.line_of(axis, rank)
  if mesh.size(axis) == 1 then return rank end
  return sizes and (first_of_line(axis, sizes, rank)) or 0
end

--- Returns this rank's group along an axis, or nil if this process is its only member.
---@param axis "world"|"dp"|"pp"|"tp"|"cp"|"ep"
---@return ps.Group?
function mesh.group(axis)
  if mesh.size(axis) == 1 then return nil end
  return axis ~= "world" and groups[axis] or joined
end

--- Raises an error if a launcher started several processes but the script has not joined them.
---@param what string the call of the script
function mesh.check_joined(what)
  if joined then return end
  local size = os.getenv "RANK" and os.getenv "WORLD_SIZE" or "1"
  if tonumber(size) ~= 1 then
    error(hooks.ask("unjoined", what) or ("WORLD_SIZE is %s: call ps.init_distributed() before %s, so that the "
      .. "processes find each other"):format(size, what), 0)
  end
end

--- Performs ps.mesh { pp = 2 }, which cuts the world and returns the mesh.
return setmetatable(mesh, { __call = function(_, given)
  mesh.cut(given)
  return mesh
end })
