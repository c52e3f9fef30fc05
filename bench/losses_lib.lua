-- SPDX-License-Identifier: BSD-3-Clause
-- A training loop and a comparison of losses, for benchmarks that compare psluajit's losses with the losses of another
-- program.
local ps = require "ps"

local lib = {}

--- Trains with AdamW at a constant learning rate without weight decay. Returns the loss of each step.
---@param model ps.nn.Module
---@param steps integer
---@param lr number
---@param loss_of fun(step: integer): ps.Tensor
---@return number[]
function lib.train(model, steps, lr, loss_of)
  local optimizer = ps.optim.AdamW(model, { lr = lr, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0 })
  local losses = {}
  for step = 1, steps do
    ps.scope(function()
      local loss = loss_of(step)
      loss:backward()
      losses[step] = loss:item()
    end)
    optimizer:step()
    optimizer:zero_grad()
  end
  return losses
end

--- Returns the largest relative difference between two lists of losses, and the step at which it occurs. The difference
--- is NaN if a loss is NaN.
---@param ours number[]
---@param theirs number[]
---@return number largest
---@return integer at
function lib.largest(ours, theirs)
  local largest, at = -1, 0
  for i, loss in ipairs(ours) do
    local off = math.abs(loss - theirs[i]) / math.abs(theirs[i])
    if off > largest or off ~= off then largest, at = off, i end
  end
  return largest, at
end

return lib
