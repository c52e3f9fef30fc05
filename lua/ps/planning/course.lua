-- SPDX-License-Identifier: BSD-3-Clause
-- Simulates a step of a pipeline from the costs of its stages (src/pipe/simulate.c). The simulation runs in a child
-- process, because it loads psluajit, and this process must not load psluajit (see planning/child.lua).
local child = require "ps.planning.child"

local course = {}

-- Simulates a step of a model that is cut into stages. `cut` is a ps.planning.Pipeline. `costs` lists the costs of the
-- virtual stages (ps.pipe.Cost).
local function simulated(cut, costs, link)
  local got = child.run(function(give)
    local c = require("ps.parallel.pipeline.table").table({ schedule = cut.schedule, stages = cut.stages,
      virtual_stages = cut.virtual_stages, micro_batches = cut.micro_batches }):simulate(costs, link)
    local held = {}
    for stage, row in ipairs(c.ranks) do held[stage] = row.peak end
    give { makespan = c.makespan, bubble = c.bubble, held = held }
  end, true)
  if got.error then error(got.error.message, 0) end
  return got
end

--- Returns, for each stage, the largest size in bytes of the activations that the stage keeps at the same time. The
--- order of forwards and backwards in the pipeline schedule determines this size.
---@param cut ps.planning.Pipeline
---@return number[] by stage, counted from 1
function course.held(cut)
  local costs = {}
  for v, row in ipairs(cut.vstages) do costs[v] = { held = row.held } end
  return simulated(cut, costs).held
end

--- Returns the bubble: the fraction of the step in which ranks are idle. Assumes that the time of an action is
--- proportional to its number of operations, and that transfers take no time.
---@param cut ps.planning.Pipeline
---@return number
function course.bubble(cut)
  local costs = {}
  for v, row in ipairs(cut.vstages) do costs[v] = { forward = row.forward, input = row.input, weight = row.weight } end
  return simulated(cut, costs).bubble
end

--- Simulates a step and returns its duration in seconds (makespan) and its bubble.
---@param cut ps.planning.Pipeline
---@param by_stage number[] seconds per step that each stage computes, by stage, counted from 1. The seconds of a stage
---  are divided among its actions in proportion to the actions' numbers of operations
---@param recompute boolean whether backward repeats the forward
---@param rate number speed in bytes per second at which a stage sends to the next stage
---@return {makespan: number, bubble: number}
function course.seconds(cut, by_stage, recompute, rate)
  local sums, costs = {}, {}
  local function input(row) return row.input + (recompute and row.forward or 0) end
  for stage = 1, cut.stages do sums[stage] = 0 end
  for _, row in ipairs(cut.vstages) do
    sums[row.stage + 1] = sums[row.stage + 1] + row.forward + input(row) + row.weight
  end
  for v, row in ipairs(cut.vstages) do
    local unit = by_stage[row.stage + 1] / cut.micro_batches / math.max(1, sums[row.stage + 1])
    costs[v] = { forward = row.forward * unit, input = input(row) * unit, weight = row.weight * unit, nbytes = row.up }
  end
  return simulated(cut, costs, { rate = rate })
end

return course
