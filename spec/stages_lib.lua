-- SPDX-License-Identifier: BSD-3-Clause
-- For specs of models cut into stages: tables of schedules, and engines of one rank of a pipeline without the other
-- ranks.
local pipe_table = require "ps.parallel.pipeline.table"
local pipe_of = require "ps.engine.pipeline.row"
local row_driver = require "ps.engine.pipeline.driver"
local setup = require "ps.engine.setup"
local table_driver = require "ps.engine.step.table"

local lib = {}

--- Returns the table of a schedule that only has forwards and backwards.
---@param schedule string
---@param ranks integer
---@param virtual integer number of virtual stages per rank
---@param micro integer number of micro-batches
---@return ps.pipe.Table
function lib.table_of(schedule, ranks, virtual, micro)
  return pipe_table.table { schedule = schedule, stages = ranks, virtual_stages = virtual, micro_batches = micro }
end

local configure, join, new, drive = setup.configure, pipe_of.join, pipe_of.new, row_driver.new

--- Makes ps.initialize create engines of rank `rank` of a pipeline without other ranks. The model is laid out, but
--- cannot be trained.
---@param table_ ps.pipe.Table
---@param rank integer
function lib.play(table_, rank)
  function setup.configure(...) -- luacheck: ignore 122
    local fields = configure(...)
    return fields, { table = table_, rank = rank }
  end
  function pipe_of.join() end -- luacheck: ignore 122
  function pipe_of.new() return false end -- luacheck: ignore 122
  row_driver.new = table_driver.new -- luacheck: ignore 122
end

--- Restores ps.initialize.
function lib.stop()
  setup.configure, pipe_of.join, pipe_of.new, row_driver.new = configure, join, new, drive -- luacheck: ignore 122
end

return lib
