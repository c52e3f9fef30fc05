-- SPDX-License-Identifier: BSD-3-Clause
-- Implements model:backward. The driver either begins the backward walk from the loss at once, or stores the loss for a
-- later action of its row.
local caller = require "ps.core.caller"
local handle = require "ps.nn.handle"
local hooks = require "ps.core.hooks"
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local devices = require "ps.core.devices"
local mesh = require "ps.dist.mesh"
local actions = require "ps.engine.step.actions"
local ending = require "ps.engine.step.ending"
local loops = require "ps.engine.step.loops"
local state = require "ps.engine.step.state"
local weigh = require "ps.engine.step.weigh"

local step = {}

--- Returns the weight of a loss, which depends on the targets of the loss (weigh.loss). If the model has the method
--- count_targets, this method counts the targets. Otherwise the targets are counted by the ops of the loss
--- (core/loss_weight.lua). If no op has counted them, they are the targets of the last batch. In a pipeline, the last
--- stage has sent the weight to all ranks.
---@param engine ps.Engine
---@param loss ps.Tensor
---@param options? {weight?: number}
---@return number weight
---@return number places
function step.weight_of(engine, loss, options)
  local s = state.of(engine)
  local found = s.targets_of[loss]
  if found == nil then found = s.targets end
  if s.turn and s.from[loss] == nil then found = s.turn.targets end    -- an evaluation may have changed s.targets
  local known = type(options) == "table" and options.weight ~= nil or engine.driver.in_loops
    or found and found.explicit
  if not known and weigh.several(engine, state.count(engine)) then found = loss_weight.of(loss) or found end
  return weigh.loss(engine, state.count(engine), found, options)
end

--- Returns the number of targets of a loss that have the largest logit (hits), and the number of targets. The ops of
--- the loss have counted them. In a pipeline, the last stage has sent the numbers to all ranks.
---@param engine ps.Engine
---@param loss ps.Tensor
---@return number? hits nil if no op of the loss has counted targets
---@return number? targets
function step.score_of(engine, loss)
  if not engine.driver.in_loops then return loss_weight.score(loss) end
  local score = state.of(engine).score
  if score then return score.hits, score.targets end
end

-- Adds the weight of a micro-batch to the step's sum of weights, and returns the factor for the loss. All ranks must
-- call this function together.
local function add_weight(engine, s, weight, places, last)
  local ranks, scaler = engine.ranks, engine.optimizer.scaler
  s.total = engine.driver:weight(weight, last)
  if ranks and last then s.total = ranks:sum(s.total) end
  if ranks then ranks:note_weight(weight) end
  if not scaler then return weight end
  if not s.unit and weigh.several(engine, s.is.n_micro) then
    s.unit = weigh.unit((ranks and ranks:sum(places) or places) * s.is.n_micro)
  end
  return scaler.scale * weight / (s.unit or 1)
end

local function backward(engine, s, loss, weight, places)
  local driver = engine.driver
  local last = driver:is_last()
  local factor = add_weight(engine, s, weight, places, last)
  driver:backward(loss, weight, factor, last)
  s.turn = false
end

-- Raises an error if this backward is not allowed at this point of the step.
local function check_place(engine, s, loss)
  local is = s.is
  if s.loop then loops.check_backward(engine, loss)
  elseif engine.driver.in_loops then
    caller.error("call backward of a model in stages inside a loop that runs with gradients: for out in "
      .. "model:micro_batches(...) do model:backward(out.loss) end, not in ps.no_grad")
  elseif s.from[loss] and s.from[loss].loop then
    caller.error "backward of a loss from a loop over micro-batches that has ended: call it in the loop's turn"
  end
  if is.open == 1 and is.micro == is.n_micro then
    caller.error(("backward was called %d times since the last optimizer:step(), but gradient_accumulation_steps is "
      .. "%d, the number of backwards per step"):format(is.micro + 1, is.n_micro))
  end
end

-- Raises an error if retain_graph is set.
local function check_kept(options)
  if type(options) ~= "table" or not options.retain_graph then return end
  caller.error("backward of a model of ps.initialize with retain_graph = true: its backward updates parameters "
    .. "and frees the graph as it goes; ps.autograd.grad(loss, inputs, { retain_graph = true }) keeps both")
end

-- The engines that have printed a note about a loss that was not finite.
local told = setmetatable({}, { __mode = "k" })

-- Prints a note about the first loss that is not finite. The gradients of such a loss make all parameters NaN. If there
-- is a loss scaler, no note is printed, because the scaler skips the step. A loss on a device is not checked, because
-- reading it would wait for the device.
local function check_finite(engine, loss)
  if told[engine] or engine.quiet or engine.optimizer.scaler or not devices.computes then return end
  if loss.numel_ ~= 1 or loss:device() ~= "cpu" then return end
  local value, stages = loss:item(), mesh.group "pp"
  if value - value == 0 then return end
  told[engine] = true
  if stages and stages:rank() > 0 then return end                    -- rank 0 of the stages reports the loss
  engine:note(("the loss of step %d is %s, and its gradients make the parameters NaN; ps.set_detect_anomaly(true) "
    .. "before the forward names the first op that makes such a value"):format(engine.steps + 1,
    value ~= value and "nan" or tostring(value)))
end

--- Runs backward from a loss. Multiplies the loss by the loss scale if parameters are fp16, and accumulates the
--- gradients of micro-batches. With gradient_accumulation_steps > 1 or several ranks, each micro-batch has a weight,
--- which is the sum of the weights of its targets. Therefore the mean over the tokens of a batch does not depend on how
--- the batch is split into micro-batches. F.cross_entropy, F.lm_loss and F.nll_loss record this sum, in which
--- ignore_index and class weights are included. If the option `weight` is given, it is used instead of this sum. If no
--- target of a step counts, step() skips the step (engine/step/weigh.lua).
---@param engine ps.Engine
---@param loss ps.Tensor of one element
---@param options? {weight?: number}
function step.backward(engine, loss, options)
  engine = handle.own(engine, "backward")
  native.check_running "model:backward"
  state.check_whole(engine)
  if not scope.is_tensor(loss) then caller.error(weigh.no_loss(loss)) end
  check_kept(options)
  local s = state.of(engine)
  check_place(engine, s, loss)
  check_finite(engine, loss)
  local weight, places = step.weight_of(engine, loss, options)
  if engine.report and engine.report:scores() then
    local hits, scored = step.score_of(engine, loss)
    if hits then engine.report:take_score(hits, scored) end
  end
  loss_weight.used(loss)
  if s.is.micro == 0 then engine.optimizer:check_no_gradients() end
  if s.is.open == 0 then                                       -- the step has no forward
    engine.masters:sync()
    native.check(actions.try(engine, native.C.PS_TRACE_NONE))
  end
  s.evaluates = false
  hooks.tell("backwards", function(text) engine:note(text) end)
  local ok, problem = pcall(backward, engine, s, loss, weight, places)
  if not ok then ending.fail(engine, problem) end
end

-- If a script calls tensor:backward(), does the same as model:backward. This applies if the tensor is the loss of a
-- named output, or if it was computed from tensors of a named output.
hooks.on("backward", function(loss, gradient, options)
  for engine, s in state.engines() do
    if s.from[loss] or s.turn and scope.made_from(loss, s.turn.outs) then
      check_kept(options)
      if gradient ~= nil then
        caller.error "backward of a micro-batch's tensor accepts no gradient g: compute a loss, (t * g):sum()"
      end
      step.backward(engine, loss)
      return true
    end
  end
end)

return step
