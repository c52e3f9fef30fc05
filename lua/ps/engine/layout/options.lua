-- SPDX-License-Identifier: BSD-3-Clause
-- The layout options that follow from an engine's configuration.
local optim_groups = require "ps.optim.groups"

--- Returns the options for build.place.
---@param engine ps.Engine
---@return table options of build.place
return function(engine)
  local grads = engine.adds_up or engine.precision == "fp32"
  local first = engine.device ~= engine.host and engine.cfg.memory.device or engine.cfg.memory.host
  local grad_dtype = engine.adds_up and engine.cfg.grad_accum_dtype or "param"
  local averages = optim_groups.averages(engine.cfg.optimizer, engine.param_groups)
  local state = 4 * #averages + (engine.precision == "fp32" and 4 or 6)
  if grads then state = state + ((grad_dtype == "fp32" or engine.precision == "fp32") and 4 or 2) end
  return { state_bytes = state, precision = engine.precision, chunk_size = engine.cfg.chunk_size, capacity = first,
    device = engine.device, lookups = engine.lookups, shards = engine.ranks and engine.ranks.shards,
    stages = engine.stages, stays = engine.stays,
    agree = engine.ranks and function(size) return engine.ranks:least(size) end,
    host = engine.host, grads = grads, grad_dtype = grad_dtype, averages = averages }
end

