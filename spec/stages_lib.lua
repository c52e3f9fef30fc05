-- SPDX-License-Identifier: BSD-3-Clause
-- For specs of models cut into stages: tables of schedules, and engines that are one of a pipeline's ranks.
local ps = require "ps"
local setup = require "ps.engine.setup"
local ffi, C = ps.ffi, ps.C

local lib = {}

--- The table of a schedule, forwards and backwards alone.
---@param schedule string
---@param ranks integer
---@param virtual integer virtual stages of each
---@param micro integer micro-batches
---@return ffi.cdata* ps_pipe_table
function lib.table_of(schedule, ranks, virtual, micro)
  local spec, out, number = ffi.new("ps_pipe_spec"), ffi.new("ps_pipe_table *[1]"), ffi.new("int[1]")
  ps.check(C.ps_pipe_schedule_find(schedule, number))
  spec.schedule, spec.stages, spec.virtual_stages, spec.micro_batches = number[0], ranks, virtual, micro
  ps.check(C.ps_pipe_table_new(spec, out))
  return ffi.gc(out[0], C.ps_pipe_table_free)
end

local configure = setup.configure

--- Engines that ps.initialize makes from now on are rank `rank` of a pipeline, whatever the configuration says.
---@param table_ ffi.cdata* ps_pipe_table
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
