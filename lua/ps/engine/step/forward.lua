-- SPDX-License-Identifier: BSD-3-Clause
-- Implements model(...), which runs the forward of a micro-batch. The first forward of a step begins the step.
local batch = require "ps.data.batch"
local caller = require "ps.core.caller"
local declared = require "ps.core.declared"
local hooks = require "ps.core.hooks"
local loss_weight = require "ps.core.loss_weight"
local scope = require "ps.core.scope"
local actions = require "ps.engine.step.actions"
local ending = require "ps.engine.step.ending"
local samples = require "ps.engine.step.samples"
local state = require "ps.engine.step.state"
local trained = require "ps.engine.step.trained"

local forward = {}

-- For an output, stores the targets with which its loss was computed. Returns all arguments after `s`.
local function output(s, result, ...)
  local loss = batch.loss(result)
  if loss ~= nil then s.targets_of[loss] = s.targets end
  return result, ...
end

-- Raises an error if gradients are disabled in an iteration of a loop, or if the mode has changed since the loop began.
local function check_loop(engine, loop)
  if not scope.grad_enabled() then
    caller.error "gradients are off within a loop over micro-batches that began with them"
  end
  if engine.module.training ~= loop.training then
    caller.error(("the model was set to %s mode within a loop over micro-batches: do it before or after the "
      .. "loop"):format(
      loop.training and "evaluation" or "training"))
  end
end

--- Begins a step.
---@param engine ps.Engine
---@param args any[] the model's arguments on the device
---@param given? any[] the script's arguments; ranks compare the rows of these arguments
function forward.begin_step(engine, args, given)
  hooks.tell "begins"
  trained.check(engine)
  if given and engine.ranks then engine.ranks:note_batch(given) end
  engine.begin_step(engine, args)
end

--- Runs the forward of a micro-batch. The first forward of a step begins the step. If a step began in evaluation mode
--- and has had no backward, the step is begun again.
---@param engine ps.Engine
---@param given any[] the arguments of the script
---@param args any[] the same arguments on the device
---@return any ... the module's results
function forward.train(engine, given, args)
  local s = state.of(engine)
  if s.loop then check_loop(engine, s.loop) end
  state.check_whole(engine)
  if s.is.micro == 0 and (s.cleared or s.evaluates) then ending.take_back(engine) end
  s.cleared = false
  if s.is.open == 0 then
    forward.begin_step(engine, args, given)
    s.evaluates = not engine.module.training
  elseif engine.ranks then
    engine.ranks:note_batch(given)
  end
  s.targets = batch.targets(engine.module, given) or false
  loss_weight.begin(given, args)
  if engine.ranks then engine.ranks:number_samples() end
  return output(s, actions.timed(engine, declared.PS_ACT_FORWARD, nil, args))
end

--- Stores a named output, because the script may later call backward on the loss of this output.
---@param engine ps.Engine
---@param at integer index of the output's micro-batch, from 1
---@param out table
---@param ... any
---@return table out
---@return any ... the remaining arguments
function forward.named(engine, at, out, ...)
  local s = state.of(engine)
  s.turn = { outs = batch.tensors(out), targets = s.targets }
  local loss = batch.loss(out)
  if loss ~= nil then s.from[loss] = { loop = s.loop, at = at } end
  return out, ...
end

local function same(...) return ... end

--- Performs model(...), in training mode or in evaluation mode. The first forward of a step begins the step. In
--- ps.no_grad, the forward is not part of a step.
---@param engine ps.Engine
---@return any ... the module's results
function forward.call(engine, ...)
  engine:check_open()
  local given = batch.spread(...)
  local is_named = batch.is_named(given)
  local turning = is_named and batch.turning or same
  local args = batch.on(given, engine.device, engine.device_name)
  if not scope.grad_enabled() then
    return turning(engine.apply(engine.module, unpack(args, 1, args.n)))
  end
  ending.check_no_loop(engine, "model(...) with gradients (use ps.no_grad for an evaluation)")
  samples.check(engine, given)
  local other = hooks.ask("batch", engine, given)
  if other then given, args = other, batch.on(other, engine.device, engine.device_name) end
  if is_named then return forward.named(engine, 1, turning(forward.train(engine, given, args))) end
  state.of(engine).turn = false
  return forward.train(engine, given, args)
end

--- Runs a forward without gradients and without a step.
---@param engine ps.Engine
---@param given any[] the model's arguments, and their number `n`
---@return table out
function forward.look(engine, given)
  local args = batch.on(given, engine.device, engine.device_name)
  return batch.output(scope.no_grad(engine.apply, engine.module, unpack(args, 1, args.n)))
end

return forward
