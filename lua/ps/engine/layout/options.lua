-- SPDX-License-Identifier: BSD-3-Clause
-- Derives the options of the layout from an engine's configuration.
local optim_groups = require "ps.optim.groups"
local engine_groups = require "ps.optim.engine_groups"
local optimizers = require "ps.optimizers"
local shard = require "ps.tensor.shard"

--- Returns the options for build.place.
---@param engine ps.Engine
---@return table options of build.place
return function(engine)
  local remainder = engine.remainder
  local grads = engine.adds_up or engine.precision == "fp32" or remainder and not engine.updates_inside
  local first = engine.device ~= engine.host and engine.cfg.memory.device or engine.cfg.memory.host
  local grad_dtype = engine.adds_up and engine.cfg.grad_accum_dtype or "param"
  local list = engine_groups.configured(engine.cfg.optimizer, engine.param_groups)
  local by_group, most = engine_groups.states(list), 0
  local other = (engine.precision == "fp32" or remainder) and 4 or 6
  if grads then other = other + ((grad_dtype == "fp32" or engine.precision == "fp32") and 4 or 2) end
  for _, states in ipairs(by_group) do most = math.max(most, optimizers.states_most(states)) end
  local function states_for(name, param)
    return optimizers.states_for(by_group[engine_groups.number_of(engine.param_groups, name, param)], param:shape())
  end
  local function check_parameter(name, param)
    local group = list[engine_groups.number_of(engine.param_groups, name, param)]
    optim_groups.check_parameter(group, name, param, shard.of(param) ~= nil)
  end
  return { check_parameter = check_parameter, state_bytes = other + most, other_bytes = other, states_for = states_for,
    precision = engine.precision,
    chunk_size = engine.cfg.chunk_size, capacity = first,
    device = engine.device, lookups = engine.lookups, shards = engine.ranks and engine.ranks.shards,
    stages = engine.stages, stays = engine.stays,
    agree = engine.ranks and function(size) return engine.ranks:least(size) end,
    host = engine.host, grads = grads, grad_dtype = grad_dtype, remainder = remainder }
end

