-- SPDX-License-Identifier: BSD-3-Clause
-- For specs of models cut into stages: tables of schedules, and engines that are one of a pipeline's ranks.
local pipe = require "ps.pipe"
local setup = require "ps.engine.setup"

local lib = {}

--- The table of a schedule, forwards and backwards alone.
---@param schedule string
---@param ranks integer
---@param virtual integer virtual stages of each
---@param micro integer micro-batches
---@return ps.pipe.Table
function lib.table_of(schedule, ranks, virtual, micro)
  return pipe.table { schedule = schedule, stages = ranks, virtual_stages = virtual, micro_batches = micro }
end

local configure = setup.configure

--- Engines that ps.initialize makes from now on are rank `rank` of a pipeline, whatever the configuration says.
---@param table_ ps.pipe.Table
---@param rank integer
function lib.play(table_, rank)
  function setup.configure(self, request, config) -- luacheck: ignore 122
    configure(self, request, { read = function(raw, options)
      options.later = true
      return config.read(raw, options)
    end })
    self.pipeline = { table = table_, rank = rank }
  end
end

--- They are not any more.
function lib.stop() setup.configure = configure end -- luacheck: ignore 122

--- In a rank's process: cuts the ranks along pp and plays this one's part.
---@param pp integer
function lib.join(pp)
  local mesh = require "ps.mesh"
  mesh.cut { pp = pp }
  if pp > 1 then lib.play(lib.table_of("1f1b", pp, 1, pp), mesh.group("pp"):rank()) end
end

return lib
