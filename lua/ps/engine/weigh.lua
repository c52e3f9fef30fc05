-- SPDX-License-Identifier: BSD-3-Clause
-- What a micro-batch counts for in a step of an engine, in chunks or in plain memory. With w_i its weight (its targets
-- that count), the step's gradient is that of sum(w_i loss_i) / sum(w_i), over micro-batches and ranks: cutting a batch
-- into micro-batches leaves the mean over its tokens what it is.
--
-- Backward runs from loss_i * scale * w_i / unit, and the update divides by scale * sum(w_i) / unit. In fp16 `unit` is
-- the power of two nearest to the sum that a step without ignored targets would have, so that gradients in between are
-- `scale` times those of the step's mean loss, as DeepSpeed's are, and no bit depends on it. Elsewhere it is 1.
--
-- A step whose weights add up to 0 is skipped: parameters, moments and the loss scale stay.
local ps = require "ps"
local caller = require "ps.caller"
local batch = require "ps.batch"

local weigh = {}

local NONE = { count = 1, places = 1 }      -- of a loss that nothing is known of

--- Losses are weighed by their targets: there are several to a step.
---@param engine table
---@return boolean
function weigh.several(engine) return engine.accumulate > 1 or engine.ranks ~= nil end

--- A step has no weight yet.
---@param engine table
function weigh.begin(engine) engine.weight_sum, engine.unit = 0, false end

--- Counts the targets of a batch that the model is about to be called with.
---@param engine table
---@param given any[] and n
function weigh.batch(engine, given) engine.targets = batch.targets(engine.module, given) or false end

--- Notes which batch a loss is of; gives what it is given.
---@param engine table
---@param output any what the model gave
function weigh.output(engine, output, ...)
  local loss = batch.loss(output)
  if loss ~= nil then engine.targets_of[loss] = engine.targets end
  return output, ...
end

--- What backward says to something that is no loss.
---@param value any
---@return string
function weigh.no_loss(value)
  local named = type(value) == "table" and ps.is_tensor(value.loss)
  return ("backward takes the loss tensor, not a %s%s"):format(type(value),
    named and ": model:backward(output.loss)" or "")
end

-- Of a loss made from what the model gave, those of the last batch.
local function of_loss(engine, loss)
  local found = engine.targets_of[loss]
  if found == nil then found = engine.targets end
  return found or NONE
end

local OPTIONS = { weight = "number" }

local function given(weight)
  if not (weight >= 0 and weight < math.huge) then
    caller.error(("model:backward: weight is %s; it takes a number from 0 on, how many targets the loss is the mean of")
      :format(tostring(weight)))
  end
  return { count = weight, places = weight }
end

--- What a loss counts for: its targets, or where there is one loss to a step 1, and 0 for none.
---@param engine table
---@param loss ps.Tensor
---@param options? {weight?: number}
---@return number weight
---@return number places what it would be without ignored targets
function weigh.loss(engine, loss, options)
  local weight = caller.options(options, "model:backward", OPTIONS).weight
  local found = weight ~= nil and given(weight) or of_loss(engine, loss)
  if not weigh.several(engine) then return found.count > 0 and 1 or 0, 1 end
  return found.count, found.places
end

-- The power of two nearest to x > 0, by its logarithm.
local function power_of_two(x) return 2 ^ math.floor(math.log(x) / math.log(2) + 0.5) end

--- Adds a micro-batch to the step and gives the factor on its loss. All ranks call it at once.
---@param engine table
---@param weight number
---@param places number
---@param last boolean the step has no more of them
---@return number
function weigh.add(engine, weight, places, last)
  local ranks, scaler = engine.ranks, engine.optimizer.scaler
  engine.weight_sum = engine.weight_sum + weight
  if ranks and last then engine.weight_sum = ranks:sum(engine.weight_sum) end
  if not scaler then return weight end
  if not engine.unit and weigh.several(engine) then
    local expected = (ranks and ranks:sum(places) or places) * engine.accumulate
    engine.unit = expected > 0 and power_of_two(expected)
  end
  return scaler.scale * weight / (engine.unit or 1)
end

--- The step has no target that counts.
---@param engine table
---@return boolean
function weigh.nothing(engine) return engine.weight_sum == 0 end

--- The factor on the step's gradients but for the loss scale; 0 for a step without targets.
---@param engine table
---@return number
function weigh.factor(engine) return weigh.nothing(engine) and 0 or (engine.unit or 1) / engine.weight_sum end

return weigh
