-- SPDX-License-Identifier: BSD-3-Clause
-- Facts that the dry run of one pipeline rank finds out, and that hold for all ranks: the costs of the model's parts,
-- and the cut of the model into stages. The dry runs of other ranks use these facts through hooks (ps/core/hooks.lua)
-- and do not count the costs again.
local hooks = require "ps.core.hooks"

local known = {}

-- The fields of a cost that are numbers. They are converted to text for JSON, because JSON numbers would lose digits.
local NUMBERS = { "forward", "input", "weight", "numel", "nbytes", "activations", "dropouts", "first_dropout",
  "carry_nbytes" }

local function with_numbers(costs, convert)
  local list = {}
  for i, cost in ipairs(costs) do
    list[i] = {}
    for key, value in pairs(cost) do list[i][key] = value end
    for _, key in ipairs(NUMBERS) do list[i][key] = convert(cost[key]) end
  end
  return list
end

local function as_text(number) return ("%.17g"):format(number) end

--- Returns the facts that an engine knows after the dry run of its step. Returns nil if the engine's model is not cut
--- into stages.
---@param engine ps.Engine
---@return table? value of the facts, which can be encoded as JSON
function known.of(engine)
  local pipe = engine.driver.pipe
  if not pipe then return nil end
  local value = { first = engine.stages.first, costs = with_numbers(engine.stages.costs, as_text), counts = {} }
  for key, costs in pairs(pipe.counts) do value.counts[key] = with_numbers(costs, as_text) end
  return value
end

--- Makes the engine of this process use the facts from the dry run of another rank of the same mesh.
---@param value? table
function known.tell(value)
  if not value then return end
  local costs = with_numbers(value.costs, tonumber)
  hooks.on("before_cut", function() return { costs = costs, first = value.first } end)
  hooks.on("part_costs", function(key)
    return value.counts[key] and with_numbers(value.counts[key], tonumber)
  end)
end

return known
