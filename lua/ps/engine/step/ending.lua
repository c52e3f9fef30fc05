-- SPDX-License-Identifier: BSD-3-Clause
-- Ends a step after its update, or before its update if a call abandons the step.
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local actions = require "ps.engine.step.actions"
local overlap = require "ps.engine.step.overlap"
local state = require "ps.engine.step.state"

local ending = {}

--- Ends a step after its update, and stores its trace.
---@param engine ps.Engine
function ending.finish(engine)
  local s, id = state.of(engine), actions.finish(engine)
  if s.key and id >= 0 then engine.traces[s.key] = id end
  state.forget(s)
  s.torn = false
  engine.masters:note()
end

--- Records that a step failed during its updates, or during a backward that updates parameters. If this rank has
--- updated some of the parameters, but not all, the model holds values of two steps. With several ranks, this may also
--- be the case because other ranks have updated parameters.
---@param engine ps.Engine
---@param problem any
---@param again boolean true if another call of optimizer:step() can finish the update
function ending.note_torn(engine, problem, again)
  local n, all = engine.optimizer:updated()
  if n == 0 and not engine.ranks then return end
  local text = ("step %d failed in its update (%s), after %d of %d parameters had been updated%s: "):format(
    engine.steps + 1, tostring(problem):match("^[^\n]*"), n, all, engine.ranks and " on this rank" or "")
  local load = "load a checkpoint, or states of both model and optimizer, before you continue"
  state.of(engine).torn = { model = true, optimizer = true, again = again, given_up = text .. load,
    text = text .. (again and "call optimizer:step() again to update the others, or " or "") .. load }
end

--- Reverts a step that will begin again. Drops the gradients of the step, but does not end a loop over micro-batches.
---@param engine ps.Engine
---@param failed? any the error of a backward that updates parameters
function ending.take_back(engine, failed)
  native.check_running "abandoning the step"
  local s = state.of(engine)
  if failed == nil and overlap.of(s) then failed = "load_state_dict abandoned it after backward" end
  if failed ~= nil then ending.note_torn(engine, failed, false) end
  if s.torn and s.torn.again then s.torn.again, s.torn.text = false, s.torn.given_up end
  -- True if a gradient could not be dropped. zero_grad then tries again.
  s.half_restored = not actions.drop(engine)
  engine.optimizer:drop_own()
  state.forget(s)
  engine.masters:note()
end

--- If the script is in a loop over micro-batches, ends this loop.
---@param engine ps.Engine
function ending.leave_loop(engine)
  engine.driver:abandon "the step was abandoned"
  local s = state.of(engine)
  local loop = s.loop
  s.loop, s.turn = false, false
  if loop then loop:left() end
end

--- Abandons a step, its gradients and its loop over micro-batches. The parameters keep the values that they had before
--- the step, unless a backward that updates parameters has run or failed. In that case, the model is torn until a state
--- is loaded.
---@param engine ps.Engine
---@param failed? any the error of a backward that updates parameters
function ending.give_up(engine, failed)
  ending.take_back(engine, failed)
  ending.leave_loop(engine)
end

--- Abandons a step after an error. The driver also raises the error on other ranks. Updates of the step may have begun.
---@param engine ps.Engine
---@param problem any
function ending.fail(engine, problem)
  engine.driver:abandon(problem)
  ending.give_up(engine, state.of(engine).is.updating == 1 and problem or nil)
  error(problem, 0)
end

--- Ends the step because the script made a mistake in a loop over micro-batches. The error names the line of the
--- script. Ranks of other stages also get the error.
---@param engine ps.Engine
---@param text string
function ending.give_loop_up(engine, text)
  text = engine.driver:refuse(caller.position() .. text)
  ending.give_up(engine)
  caller.error(text, 0)
end

--- Raises an error if the script is in a loop over micro-batches, because a call is not allowed in such a loop. Also
--- abandons the step.
---@param engine ps.Engine
---@param what string the name of the call
function ending.check_no_loop(engine, what)
  local loop = state.of(engine).loop
  if not loop then return end
  ending.give_loop_up(engine, ("%s was called before the end of a loop over micro-batches, at micro-batch %d of "
    .. "%d: the loop "
    .. "was left early, or the call is inside the loop; call optimizer:step() after the loop; the step was abandoned"
    ):format(what, loop.at, loop.count))
end

return ending
