-- SPDX-License-Identifier: BSD-3-Clause
-- Runs bench/chunk_worker.lua. Each run has a process of its own. Hence several runs can exist at the same time and
-- alternate their steps. In addition, each run has its own simulated device, and all memory of a run is freed when the
-- run ends.
local cjson = require "cjson"
local paths = require "ps.paths"
local process = require "bench.process_lib"

local lib = {}

--- Starts a run.
---@param setting {model: any, options?: table, config: table, batch: integer, seq: integer}
---@param environment? table<string, any> environment variables for the run's process
---@return bench.Process
function lib.start(setting, environment)
  local self = process.start({ paths.exe, paths.root .. "/bench/chunk_worker.lua" }, environment)
  self:ask(cjson.encode(setting))
  return self
end

---@param list number[]
---@return number
function lib.median(list)
  local sorted = {}
  for i, x in ipairs(list) do sorted[i] = x end
  table.sort(sorted)
  local middle = #sorted / 2
  return #sorted % 2 == 1 and sorted[middle + 0.5] or (sorted[middle] + sorted[middle + 1]) / 2
end

--- Returns the list of entry[key] for all entries of `list`.
function lib.pluck(list, key)
  local values = {}
  for i, entry in ipairs(list) do values[i] = entry[key] end
  return values
end

--- Returns a text that contains all losses of a run and the hash of its parameters.
---@param steps table[]
---@param worker bench.Process
---@return string
function lib.fingerprint(steps, worker)
  local parts = {}
  for i, step in ipairs(steps) do parts[i] = table.concat(step.losses, ",") end
  return table.concat(parts, " ") .. " " .. worker:ask("hash").hash
end

--- Merges tables. Later tables take precedence.
function lib.merged(...)
  local all = {}
  for i = 1, select("#", ...) do
    for key, value in pairs((select(i, ...)) or {}) do all[key] = value end
  end
  return all
end

return lib
