-- SPDX-License-Identifier: BSD-3-Clause
-- The loss scale of fp16 training (Micikevicius et al., "Mixed precision training", ICLR 2018). A scale is either fixed
-- or dynamic. An overflow lowers a dynamic scale, and a window of steps without an overflow raises it. If the factors
-- are powers of 2, scaling and unscaling are exact. There are two rules for dynamic scales.
--
-- `new` has the settings and the rule of DeepSpeed's fp16 section. Overflows first use up the hysteresis. After that,
-- each overflow halves the scale. After `loss_scale_window` good steps, the next good step doubles the scale and
-- restores the hysteresis. The same happens after every further window of good steps. Source:
-- DynamicLossScaler.update_scale in deepspeed/runtime/fp16/loss_scaler.py of DeepSpeed 0.19.6.
-- FP16_Optimizer._update_scale has the same window, but no hysteresis.
--
-- `pytorch` has the rule of torch.amp.GradScaler. The last step of a window raises the scale, and the next window
-- begins after this step.
--
--   local scaler = require("ps.optim.loss_scaler").new { hysteresis = 2 }
--   scaler:scale_loss(loss):backward(); optimizer:step { scaler = scaler }
local caller = require "ps.core.caller"
local exact = require "ps.core.exact"
local hooks = require "ps.core.hooks"
local range = require "ps.config.check"
local types = require "ps.core.types"

local M = {}

---@class ps.LossScaler
---@field scale number factor that currently multiplies losses
---@field dynamic boolean whether the scale changes
---@field steps integer number of steps, including steps that overflowed
---@field last_overflow integer index, counted from 0, of the last step that overflowed, or -1. With PyTorch's rule, a
---  step that raised the scale also counts
---@field growth number factor by which the scale is raised
---@field backoff number factor that multiplies the scale after an overflow
---@field restarts boolean whether a new window begins when the scale is raised, as in PyTorch
---@field hysteresis_left integer number of overflows until the scale is lowered, including the overflow that
--- lowers the scale
local LossScaler = require("ps.core.foreign").stand({}, "scaler")
LossScaler.__index = LossScaler

local DEFAULTS = { loss_scale = 0, initial_scale_power = 16, initial_scale = 2 ^ 16, loss_scale_window = 1000,
                   hysteresis = 2, consecutive_hysteresis = false, min_loss_scale = 1,
                   raise_error_at_min_scale = true }
local WHOLE, POSITIVE = { "a whole number of at least 1", function(x) return x >= 1 and x % 1 == 0 end },
  { "a number above 0", function(x) return x > 0 end }
local NUMBERS = {
  loss_scale = { "0 (dynamic) or a number above it", function(x) return x >= 0 end },
  initial_scale_power = { "a number", function() return true end },
  initial_scale = POSITIVE, min_loss_scale = POSITIVE, loss_scale_window = WHOLE, hysteresis = WHOLE,
}

local KEYS = {}
for key, default in pairs(DEFAULTS) do KEYS[key] = type(default) end

local function check(key, value)
  local number = NUMBERS[key]
  if number and not (math.abs(value) < math.huge and number[2](value)) then
    caller.error(("loss scaler: %s = %s; it must be %s"):format(key, tostring(value), number[1]))
  end
end

--- Creates a loss scaler with DeepSpeed's rule. If loss_scale is 0, the scale is dynamic. Otherwise the scale is fixed,
--- and overflows do not change it. A step that overflows is skipped. A dynamic scale starts at initial_scale, or at 2 ^
--- initial_scale_power. Overflows halve the scale, but not below min_loss_scale. consecutive_hysteresis: if true, every
--- good step restores the hysteresis. If false, only a window of good steps restores the hysteresis.
--- raise_error_at_min_scale: whether an overflow at the smallest scale is an error.
---@param options? {loss_scale?: number, initial_scale_power?: number, initial_scale?: number, loss_scale_window?:
--- integer, hysteresis?: integer, consecutive_hysteresis?: boolean, min_loss_scale?: number, raise_error_at_min_scale?:
--- boolean}
---@return ps.LossScaler
function M.new(options)
  local self = setmetatable({}, LossScaler)
  for key, value in pairs(caller.options(options, "a loss scaler", KEYS)) do check(key, value) end
  for key, default in pairs(DEFAULTS) do
    local given = options and options[key]
    if given == nil then given = default end
    self[key] = given
  end
  self.dynamic = self.loss_scale == 0
  local first = options and options.initial_scale or 2 ^ self.initial_scale_power
  self.scale = self.dynamic and first or self.loss_scale
  self.steps, self.last_overflow, self.hysteresis_left = 0, -1, self.hysteresis
  self.growth, self.backoff, self.restarts = 2, 0.5, false
  return self
end

local PYTORCH = { scale = "number", interval = "whole", growth = "number", backoff = "number" }
local RANGES = { scale = types.scale, interval = types.integer(1), growth = types.number(1), backoff = types.share }

--- Creates a dynamic loss scale for fp16 with PyTorch's rule. If a gradient overflows, the step is skipped and the
--- scale is halved. After `interval` good steps, the scale is doubled.
---   scaler:scale_loss(loss):backward(); opt:step { scaler = scaler }
---@param options? {scale?: number, interval?: integer, growth?: number, backoff?: number} scale: the initial scale
--- (default 65536); interval: number of good steps (default 2000); growth: the factor after these steps (default 2);
--- backoff: the factor after an overflow (default 0.5)
---@return ps.LossScaler
function M.pytorch(options)
  options = caller.options(options, "optim.GradScaler", PYTORCH)
  local problem = range.out_of_range(options, RANGES)
  if problem then caller.error("optim.GradScaler: " .. problem) end
  return setmetatable({ dynamic = true, scale = options.scale or 2 ^ 16, growth = options.growth or 2,
    backoff = options.backoff or 0.5, loss_scale_window = options.interval or 2000, restarts = true, hysteresis = 1,
    hysteresis_left = 1, consecutive_hysteresis = false, min_loss_scale = 2 ^ -24, raise_error_at_min_scale = false,
    steps = 0, last_overflow = -1 }, LossScaler)
end

--- Returns the loss times the scale. Call backward on the result.
---@param loss ps.Tensor
---@return ps.Tensor
function LossScaler:scale_loss(loss)
  hooks.tell "scaled"
  return loss * self.scale
end

local function overflow(self)
  if self.hysteresis_left > 1 then
    self.hysteresis_left = self.hysteresis_left - 1
  elseif self.scale == self.min_loss_scale and self.raise_error_at_min_scale then
    caller.error(("step %d overflowed at the smallest loss scale, %g: the loss is not finite, or the gradients are too "
      .. "large for fp16 at any scale. Check the data and the learning rate, lower min_loss_scale, or train in bf16")
      :format(self.steps, self.scale))
  else
    self.scale = math.max(self.scale * self.backoff, self.min_loss_scale)
  end
  self.last_overflow = self.steps
end

-- Returns whether the current step, which is good, ends a window.
local function window_ends(self)
  local good = self.steps - self.last_overflow                       -- number of good steps, including this one
  if self.restarts then return good >= self.loss_scale_window end
  return good > 1 and (good - 1) % self.loss_scale_window == 0
end

local MANY = 5                                                    -- number of consecutive skipped steps before the note

-- Counts consecutive skipped steps. If several steps in a row were skipped and the scale cannot be lowered, prints a
-- note once.
local function count_skipped(self, overflowed)
  self.skipped = overflowed and (self.skipped or 0) + 1 or 0
  if self.skipped < MANY or self.told then return end
  self.told = true
  local group = require("ps.dist.mesh").group "world"
  if group and group:rank() > 0 then return end
  io.stderr:write(("psluajit: the last %d steps were all skipped, and the model has not changed: their gradients "
    .. "overflow at the loss scale %.6g, which %s, and the largest number in fp16 is 65504; "
    .. "%s\n"):format(MANY, self.scale,
    self.dynamic and "is the smallest" or "is fixed", self.dynamic and "lower min_loss_scale, check the data and the "
    .. "learning rate, or train in bf16" or "set loss_scale = 0, which adapts the scale, or a smaller one"))
end

--- Updates the scale after a step. Optimizer:step calls this function.
---@param overflowed boolean whether the step's gradients overflowed
function LossScaler:update(overflowed)
  count_skipped(self, overflowed and (not self.dynamic or self.scale == self.min_loss_scale))
  if not self.dynamic then return end
  if overflowed then
    overflow(self)
  else
    local window = window_ends(self)
    if self.consecutive_hysteresis or window then self.hysteresis_left = self.hysteresis end
    if window then self.scale = self.scale * self.growth end
    if window and self.restarts then self.last_overflow = self.steps end
  end
  self.steps = self.steps + 1
end

local KEPT = { "scale", "steps", "last_overflow", "hysteresis_left" }

--- Returns the state from which a run can resume, as text that preserves all bits.
---@return table<string, string>
function LossScaler:state_dict()
  local state = {}
  for _, key in ipairs(KEPT) do state[key] = ("%.17g"):format(self[key]) end
  return state
end

--- Loads a result of state_dict. A fixed scale keeps the value from the options.
---@param state table<string, string|number>
function LossScaler:load_state_dict(state)
  if state.good then                               -- the form in which older versions of optim.GradScaler saved
    state = { scale = state.scale, steps = state.good, last_overflow = -1, hysteresis_left = self.hysteresis }
  end
  local numbers = {}
  for _, key in ipairs(KEPT) do
    numbers[key] = tonumber(state[key])
    if not numbers[key] then
      caller.error(("the saved loss scaler has %s = %s, which should be a number"):format(key,
        tostring(state[key])))
    end
  end
  if not self.dynamic then return end
  for key, value in pairs(numbers) do self[key] = value end
end

exact.all(LossScaler, "scaler:", true)

return M
