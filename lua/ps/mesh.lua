-- SPDX-License-Identifier: BSD-3-Clause
-- The mesh of ranks: who is together along an axis. Whoever talks to other ranks asks here, by the axis that is meant,
-- so that a model cut along further axes (stages, parts of a layer) changes this file and not its users:
--   world   all ranks: configurations, checkpoints, the end of a run, and whatever fails
--   dp      ranks that train the same parameters (copies of them, or, with ZeRO, shares), each with other rows of every
--           batch: loaders, gradients, losses
-- Today every rank trains the whole model, so both are all ranks. This file loads nothing.
local mesh = {}

local AXES = { world = true, dp = true }
local joined, env               -- what ps.init_distributed made, and where this process is
local wanted = {}               -- what its options say of configurations, by key: {value, where it was said}

--- By ps.init_distributed, when it has joined the other ranks.
---@param group ps.Group of one rank or more
---@param where ps.dist.Env
---@param asked? table<string, any[]>
function mesh.open(group, where, asked) joined, env, wanted = group, where, asked or {} end

--- What a configuration has to agree with.
---@return table<string, any[]>
function mesh.asked() return wanted end

--- When a group is closed.
---@param group ps.Group
function mesh.close(group) if joined == group then joined, env, wanted = nil, nil, {} end end

--- Whether ps.init_distributed was called, also where it found one process.
---@return boolean
function mesh.is_open() return joined ~= nil end

--- Where this process is among all ranks and on its machine; nil before ps.init_distributed.
---@return ps.dist.Env?
function mesh.env() return env end

--- The ranks along an axis; nil: this process is the only one.
---@param axis "world"|"dp"
---@return ps.Group?
function mesh.group(axis)
  if not AXES[axis] then error(("no axis '%s'; there are world and dp"):format(tostring(axis)), 2) end
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
