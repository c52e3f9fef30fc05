-- SPDX-License-Identifier: BSD-3-Clause
-- What an engine's configuration asks of the layout of its chunks.
local optim_groups = require "ps.optim.groups"

--- The options of build.place.
---@param self ps.Engine
---@return table options of build.place
return function(self)
  local grads = self.adds_up or self.precision == "fp32"
  local first = self.device ~= self.host and self.cfg.memory.device or self.cfg.memory.host
  local grad_dtype = self.adds_up and self.cfg.grad_accum_dtype or "param"
  local averages = optim_groups.averages(self.cfg.optimizer, self.param_groups)
  local state = 4 * #averages + (self.precision == "fp32" and 4 or 6)
  if grads then state = state + ((grad_dtype == "fp32" or self.precision == "fp32") and 4 or 2) end
  return { state_bytes = state, precision = self.precision, chunk_size = self.cfg.chunk_size, capacity = first,
    device = self.device, lookups = self.lookups, shards = self.ranks and self.ranks.shards, stages = self.stages,
    stays = self.stays,
    agree = self.ranks and function(size) return self.ranks:least(size) end,
    host = self.host, grads = grads, grad_dtype = grad_dtype, averages = averages }
end

