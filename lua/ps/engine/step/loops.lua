-- SPDX-License-Identifier: BSD-3-Clause
-- Runs loops over the micro-batches of a step. engine/micro.lua makes a loop and splits the loop's batch. The engine's
-- driver performs the iterations.
local batch = require "ps.data.batch"
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local ending = require "ps.engine.step.ending"
local forward = require "ps.engine.step.forward"
local state = require "ps.engine.step.state"

local loops = {}

---@class ps.engine.Loop
---@field count integer number of micro-batches
---@field rows integer|false number of rows of the batch that the loop splits, or false if the loop does not split a
---  batch
---@field training boolean the model's mode when the loop began
---@field gather boolean true if all ranks get the tensors of the output
---@field draws boolean true if the micro-batches are read from a loader
---@field given any[] the micro-batch of the current iteration
---@field targets ps.Targets|false|nil in a pipeline without gradients, the targets of the current iteration's loss
---@field score {hits: number, targets: number}|false|nil `targets` is the number of targets in the current iteration,
---  and `hits` is the number of targets that have the largest logit
---@field at integer index of the current iteration's micro-batch, from 1; 0 before the first iteration
---@field take fun(number: integer): any[] returns the micro-batch with this number, and sets the random state for it
---@field draw fun(self: ps.engine.Loop): any[] returns the micro-batch of the next iteration
---@field left fun(self: ps.engine.Loop) called after the loop has ended or has been abandoned

-- Begins a loop. The first micro-batch of the loop will begin a step.
local function enter(engine, s, loop)
  native.check_running "a loop over micro-batches"
  state.check_whole(engine)
  ending.check_no_loop(engine, "model:micro_batches(...)")
  local is = s.is
  if is.micro > 0 then
    caller.error(("a loop over micro-batches is a whole step, but backward has run for %d of %d micro-batches of "
      .. "another step: "
      .. "%s before it"):format(is.micro, is.n_micro, is.micro == is.n_micro and "call optimizer:step()"
      or "end that step"))
  end
  if is.open == 1 then ending.take_back(engine) end
  s.loop = loop
end

-- Returns true if the loop has another micro-batch. Raises an error if the loop was abandoned, or if the last
-- micro-batch had no backward.
local function goes_on(engine, s, loop)
  if s.loop ~= loop then caller.error "this loop over micro-batches was abandoned" end
  if engine.driver:backwards() < loop.at then
    ending.give_loop_up(engine, ("micro-batch %d of %d has had no backward: call model:backward(out.loss) in each turn "
      .. "of the loop, or run a loop of forwards in ps.no_grad; the step was abandoned"):format(loop.at,
      loop.count))
  end
  return loop.at < loop.count
end

local function turn(engine, s, loop)
  local out = engine.driver:turn(loop)
  local loss = batch.loss(out)
  if loss ~= nil then s.targets_of[loss] = s.targets end
  return (forward.named(engine, loop.at, out))
end

local function drain(engine, _, loop) engine.driver:drain(loop) end

--- Performs the next iteration of a step's loop. The first iteration begins the step. If an iteration fails, the step
--- is abandoned.
---@param engine ps.Engine
---@param loop ps.engine.Loop
---@return table? out nil after the last iteration
function loops.next(engine, loop)
  local s = state.of(engine)
  if loop.at == 0 then enter(engine, s, loop) end
  local more = goes_on(engine, s, loop)
  local ok, out = pcall(more and turn or drain, engine, s, loop)
  if not ok then ending.fail(engine, out) end
  if not more then ending.leave_loop(engine) end
  return out
end

--- Raises an error if the loss of a backward does not belong to the loop's current micro-batch, or if backward has
--- already been called for this loss.
---@param engine ps.Engine
---@param loss ps.Tensor
function loops.check_backward(engine, loss)
  local s = state.of(engine)
  local loop, of = s.loop, s.from[loss]
  local function refuse(text, ...)
    caller.error(("backward in a loop over micro-batches, at micro-batch %d of %d, "):format(loop.at, loop.count)
      .. text:format(...))
  end
  if of and of.loop ~= loop then refuse "of a loss from another loop" end
  if of and of.at < loop.at then refuse("of the loss of micro-batch %d", of.at) end
  if engine.driver:backwards() >= loop.at then refuse "a second time: each micro-batch has one backward" end
  if not of and not scope.made_from(loss, s.turn.outs) then refuse "of a loss that was not made from its output" end
end

return loops
