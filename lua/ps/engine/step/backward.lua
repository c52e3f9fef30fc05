-- SPDX-License-Identifier: BSD-3-Clause
-- model:backward. The driver walks back from the loss now, or notes the loss for its row.
local caller = require "ps.core.caller"
local handle = require "ps.nn.handle"
local hooks = require "ps.core.hooks"
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local actions = require "ps.engine.step.actions"
local ending = require "ps.engine.step.ending"
local loops = require "ps.engine.step.loops"
local state = require "ps.engine.step.state"
local weigh = require "ps.engine.step.weigh"

local step = {}

--- The weight of a loss (weigh.loss), as the model's count_targets says, or else the ops of the loss
--- (core/loss_weight.lua). A loss of other ops has the targets of the last batch. In a pipeline the last stage has told
--- all ranks the weight of the loss.
---@param engine ps.Engine
---@param loss ps.Tensor
---@param options? {weight?: number}
---@return number weight
---@return number places
function step.weight_of(engine, loss, options)
  local s = state.of(engine)
  local found = s.targets_of[loss]
  if found == nil then found = s.targets end
  if s.turn and s.from[loss] == nil then found = s.turn.targets end     -- s.targets may be of an evaluation since
  local known = type(options) == "table" and options.weight ~= nil or engine.driver.in_loops
    or found and found.explicit
  if not known and weigh.several(engine, state.count(engine)) then found = loss_weight.of(loss) or found end
  return weigh.loss(engine, state.count(engine), found, options)
end

--- How many targets of a loss its logits hit, by the ops that made it. In a pipeline the last stage has told all ranks.
---@param engine ps.Engine
---@param loss ps.Tensor
---@return number? hits nil: no op of the loss counted them
---@return number? targets
function step.score_of(engine, loss)
  if not engine.driver.in_loops then return loss_weight.score(loss) end
  local score = state.of(engine).score
  if score then return score.hits, score.targets end
end

-- Adds a micro-batch's weight to the step's, and returns the factor on its loss. All ranks call it together.
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

-- Rejects a backward that the step has no place for.
local function check_place(engine, s, loss)
  local is = s.is
  if s.loop then loops.check_backward(engine, loss)
  elseif engine.driver.in_loops then
    caller.error("backward of a model in stages belongs into a loop that ran with gradients, for out in "
      .. "model:micro_batches(...) do model:backward(out.loss) end, not within ps.no_grad")
  elseif s.from[loss] and s.from[loss].loop then
    caller.error "backward of a loss of a loop over micro-batches that has ended: it belongs into the loop's turn"
  end
  if is.open == 1 and is.micro == is.n_micro then
    caller.error(("backward was called %d times since the last optimizer:step(), gradient_accumulation_steps is %d, "
      .. "which says how many backwards a step has"):format(is.micro + 1, is.n_micro))
  end
end

--- Backward from a loss: scales it for fp16, and adds micro-batches up. With gradient_accumulation_steps > 1 or several
--- ranks, a micro-batch weighs as much as the targets of its loss count: F.cross_entropy, F.lm_loss and F.nll_loss note
--- it, with ignore_index and class weights, so that the mean over a batch's tokens does not depend on the cut into
--- micro-batches. `weight` says it instead. Where no target of a step counts, step() skips the step
--- (engine/step/weigh.lua).
---@param engine ps.Engine
---@param loss ps.Tensor of one element
---@param options? {weight?: number}
function step.backward(engine, loss, options)
  engine = handle.own(engine, "backward")
  native.check_running "model:backward"
  state.check_whole(engine)
  if not scope.is_tensor(loss) then caller.error(weigh.no_loss(loss)) end
  local s = state.of(engine)
  check_place(engine, s, loss)
  local weight, places = step.weight_of(engine, loss, options)
  if engine.report and engine.report:scores() then
    local hits, scored = step.score_of(engine, loss)
    if hits then engine.report:take_score(hits, scored) end
  end
  loss_weight.used(loss)
  if s.is.micro == 0 then engine.optimizer:check_no_gradients() end
  if s.is.open == 0 then                                       -- a step without a forward of its own
    engine.masters:sync()
    native.check(actions.try(engine, native.C.PS_TRACE_NONE))
  end
  s.evaluates = false
  hooks.tell("backwards", function(text) engine:note(text) end)
  local ok, problem = pcall(backward, engine, s, loss, weight, places)
  if not ok then ending.fail(engine, problem) end
end

-- tensor:backward() of a script is model:backward for the loss of an output by names, and for a loss made of such an
-- output.
hooks.on("backward", function(loss, gradient, options)
  for engine, s in state.engines() do
    if s.from[loss] or s.turn and scope.made_from(loss, s.turn.outs) then
      if options.retain_graph then
        caller.error("backward of a model of ps.initialize with retain_graph = true: its backward updates parameters "
          .. "and frees the graph as it goes; ps.autograd.grad(loss, inputs, { retain_graph = true }) keeps both")
      end
      if gradient ~= nil then
        caller.error "backward of a tensor of a micro-batch with a gradient of its own: make it a loss, (t * g):sum()"
      end
      step.backward(engine, loss)
      return true
    end
  end
end)

return step
