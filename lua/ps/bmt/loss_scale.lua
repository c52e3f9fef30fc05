-- SPDX-License-Identifier: BSD-3-Clause
-- The loss scale of BMTrain's OptimManager (1.0.1). The optimizer of an engine uses it instead of ps.optim.loss_scaler.
-- An overflow divides the scale by a factor, down to a minimum. After enough good steps, the scale is multiplied by the
-- factor, up to a maximum.
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"

local loss_scale = {}

---@class ps.bmt.LossScale
---@field scale number
---@field factor number greater than 1; the scale is multiplied or divided by this factor
---@field every integer number of good steps after which the scale increases, counted from the last change of the scale
---@field least number smallest scale
---@field most number largest scale
---@field good integer number of good steps since the last change of the scale
local LossScale = {}
LossScale.__index = LossScale

local POSITIVE = { "loss_scale", "loss_scale_factor", "loss_scale_steps", "min_loss_scale", "max_loss_scale" }

---@param given {loss_scale: number, loss_scale_factor?: number, loss_scale_steps?: integer, min_loss_scale?: number,
---  max_loss_scale?: number}
---@return ps.bmt.LossScale
function loss_scale.new(given)
  for _, key in ipairs(POSITIVE) do
    local value = given[key]
    if value and not (value > 0 and (value < math.huge or key == "max_loss_scale")) then
      caller.error(("bmt.optim.OptimManager: %s is %s; it must be a number above 0"):format(key, tostring(value)))
    end
  end
  local factor = given.loss_scale_factor or 2
  return setmetatable({ scale = given.loss_scale, factor = factor > 1 and factor or 1 / factor,
    every = given.loss_scale_steps or 1024, least = given.min_loss_scale or 1,
    most = given.max_loss_scale or math.huge, good = 0 }, LossScale)
end

--- Returns the loss times the scale.
---@param loss ps.Tensor
---@return ps.Tensor
function LossScale:scale_loss(loss)
  hooks.tell "scaled"
  return loss * self.scale
end

--- Updates the scale. It is called once per step.
---@param overflowed boolean whether the step's gradients overflowed
function LossScale:update(overflowed)
  local to = self.scale
  if not overflowed then
    self.good = self.good + 1
    if self.good >= self.every and self.scale < self.most then to = self.scale * self.factor end
  elseif self.scale > self.least then
    to = self.scale / self.factor
  end
  if to ~= self.scale then self.scale, self.good = to, 0 end
end

--- Returns the state from which a run can resume, as text that preserves all bits.
---@return table<string, string>
function LossScale:state_dict() return { scale = ("%.17g"):format(self.scale), good = ("%d"):format(self.good) } end

--- Restores a state that state_dict returned.
---@param state table<string, string|number>
function LossScale:load_state_dict(state)
  local scale, good = tonumber(state.scale), tonumber(state.good)
  if not (scale and good) then caller.error "the saved loss scale has no scale or no good steps" end
  self.scale, self.good = scale, good
end

return loss_scale
