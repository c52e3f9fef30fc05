-- SPDX-License-Identifier: BSD-3-Clause
-- Checks that a micro-batch has as many samples as configured. The configured number is train_micro_batch_size_per_gpu,
-- which is set or derived from train_batch_size. If a micro-batch had another number of samples, the step's global
-- batch would differ from the configured global batch.
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"

local samples = {}

-- Returns the number of samples in a batch. This is the first dimension of the first tensor that has at least one
-- dimension. Returns nil if there is no such tensor. The tensors of a table are searched in the order of their names.
local function count(value)
  if scope.is_tensor(value) then return value:dim() > 0 and value:size(0) or nil end
  if type(value) ~= "table" then return nil end
  local names = {}
  for name in pairs(value) do if type(name) == "string" then names[#names + 1] = name end end
  table.sort(names)
  for _, name in ipairs(names) do
    local n = count(value[name])
    if n then return n end
  end
end

--- Raises an error if the number of samples of a batch differs from the configured number.
---@param engine table with cfg
---@param batch any[] the arguments with which the model is called, and their number `n`
function samples.check(engine, batch)
  local wanted = engine.cfg.train_micro_batch_size_per_gpu
  for i = 1, wanted and batch.n or 0 do
    local n = count(batch[i])
    if n == wanted then return end
    if n then
      caller.error(("the batch has %d samples (the first dimension of its first tensor), but the configuration's "
        .. "train_micro_batch_size_per_gpu is %d: use batches of that size, or set only gradient_accumulation_steps "
        .. "if sizes differ"):format(n, wanted))
    end
  end
end

return samples
