-- SPDX-License-Identifier: BSD-3-Clause
-- Handles gradients after the last backward of a step, until the step ends. Computes the norm of the gradients, and
-- performs optimizer:step() and optimizer:zero_grad().
local agree = require "ps.dist.agree"
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local native = require "ps.core.ffi"
local types = require "ps.core.types"
local actions = require "ps.engine.step.actions"
local ending = require "ps.engine.step.ending"
local overlap = require "ps.engine.step.overlap"
local state = require "ps.engine.step.state"

local step = {}

local C = native.C
local NORM, UPDATE = C.PS_ACT_NORM, C.PS_ACT_UPDATE
--- a number that is added to the norm before max_norm is divided by it, as in torch.nn.utils.clip_grad_norm_
step.CLIP_EPS = 1e-6

--- Returns the norm of all gradients of the step, without the loss scale. Returns 0 if no target counts. The first call
--- in a step performs the step's action for the norm, so all ranks must make this call together.
---@param engine ps.Engine
---@return number
function step.norm(engine)
  local s = state.of(engine)
  if s.total == 0 then return 0 end
  if s.norm == nil then s.norm = actions.timed(engine, NORM, nil, true) * engine.optimizer:grad_scale() end
  return s.norm
end

--- Records how often each gradient has been written. Called when a script computes the norm before optimizer:step().
---@param engine ps.Engine
function step.remember(engine)
  local versions = {}
  for _, row in ipairs(engine.built.list) do
    local grad = C.ps_tensor_get_grad(row.param)
    if grad ~= nil then versions[row] = C.ps_tensor_version(grad) end
  end
  state.of(engine).versions = versions
end

-- Raises an error on all ranks if a script has written a gradient after the norm was computed. The update would
-- multiply the written gradient by a factor that was computed from the old gradient.
local function check_unchanged(engine, s)
  local max_norm, mine = engine.optimizer.max_norm, ""
  local clips = next(s.clipped) or next(s.factors) or max_norm and max_norm < math.huge
  if not (clips and s.versions) then return end
  for _, row in ipairs(engine.built.list) do
    local grad = C.ps_tensor_get_grad(row.param)
    if grad ~= nil and s.versions[row] ~= C.ps_tensor_version(grad) then
      mine = row.name
      break
    end
  end
  for _, name in ipairs(engine.ranks and agree.texts(engine.ranks.world, mine) or { mine }) do
    if name ~= "" then
      error(("optimizer:step(): the gradient of %s was written after its norm was computed, but clipping multiplies "
        .. "gradients in optimizer:step(): write it before the norm is computed; or clip it in the script: measure "
        .. "with nn.clip_grad_norm(model, math.huge), without gradient_clipping, and call p:grad():mul_(factor)")
        :format(name), 0)
    end
  end
end

--- Returns the factor by which the update multiplies gradients. This factor undoes the loss scale and the sum over
--- micro-batches and ranks.
---@param engine ps.Engine
---@return number
function step.unscale(engine) return engine.optimizer:grad_scale() end

--- Checks that a call can use the gradients of a whole step. Raises an error if the step's last backward has not run
--- yet, or if optimizer:step() has begun.
---@param engine ps.Engine
---@param call string name of the calling function, for messages
function step.check_gradients(engine, call)
  native.check_running(call)
  state.check_whole(engine)
  local s = state.of(engine)
  local is = s.is
  if s.loop then
    caller.error(call .. " was called within a loop over micro-batches: call it after the loop, before "
      .. "optimizer:step()")
  end
  if is.micro == 0 then
    caller.error(call .. ": there was no backward since the last step, so there are no gradients: call it between "
      .. "model:backward(loss) and optimizer:step()")
  end
  if is.micro < is.n_micro then
    caller.error(("%s was called after %d of %d micro-batches (gradient_accumulation_steps): call it after the last "
      .. "backward of the step"):format(call, is.micro, is.n_micro))
  end
  if overlap.of(s) then caller.error(call .. ": " .. overlap.GONE) end
  if s.scale ~= nil then caller.error(call .. ": optimizer:step() has begun to update the parameters") end
end

-- Computes the norm, checks for overflow, and clips. Returns the factor by which the update multiplies gradients.
-- Returns false if the step is skipped.
local function measure(engine, s)
  local opt, skipped = engine.optimizer, false
  opt.grad_norm = nil
  if s.total == 0 then
    if s.measures then actions.timed(engine, NORM, nil, false) end
    return false
  end
  local scale = opt:grad_scale()
  if s.measures or s.norm then
    local norm = step.norm(engine)
    opt.grad_norm = norm
    if not types.finite(norm) then
      skipped = opt.checks_overflow
      if not skipped and (s.measures or next(s.clipped)) then
        error(("%s: the gradient norm is %s; the parameters were not updated"):format(opt.kind, tostring(norm)), 0)
      end
    elseif opt.max_norm then
      scale = scale * math.min(1, opt.max_norm / (norm + step.CLIP_EPS))
    end
  end
  if opt.scaler then opt.scaler:update(skipped) end
  return not skipped and scale
end

local function update(engine, s)
  if s.is.updating == 0 then check_unchanged(engine, s) end
  if s.scale == nil then
    -- Finds a rank that makes another call than optimizer:step(). The exchanges of the update itself would not always
    -- find such a rank, because sums of tied gradients, norms and owners use different groups of ranks.
    engine.driver:compare "optimizer:step()"
    s.scale = measure(engine, s)
  end
  local how = s.update_how
  how.scale = s.scale or 1
  if s.scale then engine.optimizer:settings_into(how, s.factors) else how.groups = nil end
  actions.timed(engine, UPDATE, how, s.scale)
end

--- Clips the gradients of some groups of the optimizer, and returns the norm of these gradients. If max_norm / (norm +
--- eps) is below 1, the update multiplies the gradients by this ratio. Must be called after the last backward of a
--- step. optimizer.max_norm must have been math.huge when the step began. With this value, the step computes a norm but
--- does not clip.
---@param engine ps.Engine
---@param numbers integer[] indices of the groups, from 1, in ascending order; each group may be clipped only once per
---  step
---@param max_norm number
---@param eps number
---@return number norm the norm without the loss scale; not finite if the gradients of any group overflowed
function step.clip(engine, numbers, max_norm, eps)
  state.check_whole(engine)
  local s, opt = state.of(engine), engine.optimizer
  local is = s.is
  if is.micro == 0 then caller.error(opt.NO_BACKWARD) end
  if is.micro < is.n_micro then
    caller.error(("the norm of gradients was requested after %d of %d micro-batches "
      .. "(gradient_accumulation_steps): call it after "
      .. "the last backward"):format(is.micro, is.n_micro))
  end
  for _, number in ipairs(numbers) do
    if s.factors[number] then
      caller.error(("the norm of the gradients of group %d was already computed: call it once per step"):format(number))
    end
  end
  assert(s.measures and opt.max_norm == math.huge, "the step's table has a norm")
  if s.scale == nil then
    local ok, scale = pcall(measure, engine, s)
    if not ok then
      ending.give_up(engine)
      error(scale, 0)
    end
    s.scale = scale
  end
  local norm = s.scale and opt:norm_of(numbers) * s.scale or opt.grad_norm
  step.remember(engine)
  for _, number in ipairs(numbers) do s.factors[number] = s.scale and math.min(1, max_norm / (norm + eps)) or 1 end
  return norm
end

--- Updates the parameters. Does nothing before the backward of the step's last micro-batch. If gradients overflowed, or
--- if no target counts, the step is skipped, and no parameter is updated. If an update fails, another call updates the
--- remaining parameters, and uses the same factor for the gradients.
---@param engine ps.Engine
---@return {grad_norm?: number, skipped: boolean, accumulating: boolean}
function step.update(engine)
  native.check_running "optimizer:step()"
  local s = state.of(engine)
  ending.check_no_loop(engine, "optimizer:step()")
  if not (s.torn and s.torn.again) then state.check_whole(engine) end
  local is, opt = s.is, engine.optimizer
  if is.micro == 0 then caller.error(opt.NO_BACKWARD) end
  local info = { skipped = false, accumulating = is.micro < is.n_micro }
  if info.accumulating then return info end
  local settings = opt:checked_settings()
  if is.updating == 1 and settings ~= s.settings then
    caller.error("the optimizer's settings were changed between backward and step(), but backward has already updated "
      .. "parameters: change them after step(), or set overlap_optimizer = false")
  end
  s.settings = settings
  local ok, problem = pcall(update, engine, s)
  if not ok then
    if is.updating == 1 and s.scale then ending.note_torn(engine, problem, true) else ending.give_up(engine) end
    error(problem, 0)
  end
  info.skipped, info.grad_norm = s.scale == false, opt.grad_norm
  if info.skipped then hooks.tell("stepped", engine.module, "given_up") end
  if not info.skipped then
    opt.steps = opt.steps + 1
    opt:stepped()
  end
  ending.finish(engine)
  return info
end

--- Drops the gradients. While micro-batches accumulate, this call does nothing. Therefore the usual loop of zero_grad,
--- forward, backward and step works with any gradient_accumulation_steps. After the last backward of a step, this call
--- abandons the step, unless parameters have already been updated.
---@param engine ps.Engine
---@param call? string name of the calling function, for messages (default "optimizer:zero_grad()")
function step.zero_grad(engine, call)
  call = call or "optimizer:zero_grad()"
  native.check_running(call)
  engine:check_open()
  ending.check_no_loop(engine, call)
  local s = state.of(engine)
  local is = s.is
  if is.micro > 0 and is.micro < is.n_micro then return end
  if s.torn and s.torn.again then caller.error(s.torn.text) end
  if overlap.of(s) then
    caller.error(call .. ": the step can no longer be abandoned: backward has already updated the parameters; call "
      .. "optimizer:step(), or set overlap_optimizer = false")
  end
  if is.micro > 0 then return ending.give_up(engine) end
  engine.optimizer:drop()
  if s.half_restored then
    s.half_restored = false
    engine.masters:note()
  end
  s.cleared = is.open == 1                                      -- the next forward restarts the step
end

return step
