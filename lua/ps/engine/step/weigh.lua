-- SPDX-License-Identifier: BSD-3-Clause
-- Weights the micro-batches of a step, in chunks or in plain memory. The weight w_i of micro-batch i is the sum of the
-- weights of its targets (core/loss_weight.lua). The gradient of the step is the gradient of sum(w_i * loss_i) /
-- sum(w_i). The sums are over all micro-batches of all ranks. Therefore the mean over the tokens of a batch does not
-- depend on how the batch is divided.
--
-- Backward starts from loss_i * scale * w_i / unit, and the update divides by scale * sum(w_i) / unit. In fp16, `unit`
-- is the power of two that is nearest to the value of sum(w_i) in a step without ignored targets. Before the update,
-- gradients are then about `scale` times as large as the gradients of the step's mean loss, as in DeepSpeed. `unit`
-- does not affect any bit of the result. In other dtypes, `unit` is 1.
--
-- A step whose weights sum to 0 is skipped: parameters, optimizer state and the loss scale do not change.
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"

local weigh = {}

local NONE = { count = 1, places = 1 }      -- used for a loss whose targets are unknown

--- Returns true if losses are weighted by their targets. This is the case if a step has several losses.
---@param engine table
---@param micros integer number of micro-batches of the step
---@return boolean
function weigh.several(engine, micros) return micros > 1 or engine.adds_up or engine.ranks ~= nil end

--- Returns the text of an error about a backward from a value that is not a loss.
---@param value any
---@return string
function weigh.no_loss(value)
  local named = type(value) == "table" and scope.is_tensor(value.loss)
  return ("backward takes the loss tensor, not a %s%s"):format(type(value),
    named and ": model:backward(output.loss)" or "")
end

local OPTIONS = { weight = "number" }

local function given(weight)
  if not (weight >= 0 and weight < math.huge) then
    caller.error(("model:backward: weight is %s; it must be a number of at least 0, the number of targets in the mean")
      :format(tostring(weight)))
  end
  return { count = weight, places = weight }
end

--- Returns the weight of a loss, which is the sum of the weights of its targets. If a step has only one loss, the
--- weight is 1, or 0 if there are no targets.
---@param engine table
---@param micros integer number of micro-batches of the step
---@param found ps.Targets|false the targets of the loss's batch
---@param options? {weight?: number}
---@return number weight
---@return number places the weight that the loss would have without ignored targets
function weigh.loss(engine, micros, found, options)
  local weight = caller.options(options, "model:backward", OPTIONS).weight
  found = weight ~= nil and given(weight) or found or NONE
  if not weigh.several(engine, micros) then return found.count > 0 and 1 or 0, 1 end
  return found.count, found.places
end

--- Returns the tensor at which the backward walk begins. This tensor is the loss times `factor`. Passes the loss to the
--- report. With a loss scale, every rank performs the multiplication, even if the factor is 1. This is necessary
--- because anomaly mode tolerates an infinity only in the op that follows the hook "scaled".
---@param engine ps.Engine
---@param loss ps.Tensor
---@param weight number
---@param factor number
---@return ps.Tensor
function weigh.root(engine, loss, weight, factor)
  local scaler = engine.optimizer.scaler
  if scaler then hooks.tell "scaled" end
  local root = (scaler or factor ~= 1) and loss * factor or loss
  if engine.report then engine.report:take_loss(loss, weight) end
  return root
end

--- Returns the factor for the walks of a dry run, in which losses have no weights. The factor is 1 only if the factor
--- of every real walk is 1.
---@param engine ps.Engine
---@param micros integer
---@return number
function weigh.dry_factor(engine, micros)
  return (engine.optimizer.scaler or weigh.several(engine, micros)) and 2 or 1
end

--- Returns the power of two that is nearest to `expected` on a logarithmic scale. `expected` is the weight of a step
--- without ignored targets. Returns false if this weight is 0.
---@param expected number
---@return number|false
function weigh.unit(expected) return expected > 0 and 2 ^ math.floor(math.log(expected) / math.log(2) + 0.5) end

return weigh
