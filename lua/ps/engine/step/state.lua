-- SPDX-License-Identifier: BSD-3-Clause
-- Stores Lua's state of a step, and answers questions of other files about it. Only the files in engine/step/ and the
-- pipeline's driver (engine/pipeline/driver.lua) read the record itself (state.of).
local caller = require "ps.core.caller"
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local ffi, C = native.ffi, native.C

local state = {}

---@class ps.engine.StepState
---@field c ffi.cdata* the ps_step
---@field is ffi.cdata* C's own fields (ps_step_state): open, micro, n_micro, now, due, updating
---@field backward_how ffi.cdata* settings of the last backward
---@field overlaps boolean whether a backward of the step updates parameters
---@field update_how ffi.cdata*
---@field config ffi.cdata* ps_step_config; contains the table of actions of the last step
---@field actions ffi.cdata* the table of actions to which `config` refers
---@field config_measures boolean? whether `actions` contains a norm
---@field config_micros integer? number of micro-batches in `actions`
---@field loop ps.engine.Loop|false the loop over micro-batches that the script is in
---@field turn false|{outs: ps.Tensor[], targets: ps.Targets|false} the last forward's named output, until its backward
---@field from table<ps.Tensor, {loop: ps.engine.Loop|false, at: integer}> by the loss of a named output: the loop and
---  the index of its micro-batch
---@field key string|false key of the trace in engine.traces, or false if the trace is not kept there
---@field last_key string|false key of the last step that had a key
---@field measures boolean whether the step has a norm
---@field evaluates boolean whether the step began in evaluation mode and has had no backward yet
---@field cleared boolean whether zero_grad was called between the step's first forward and its first backward. If so,
---  the next forward restarts the step
---@field scale number|false|nil the factor on gradients that optimizer:step() computed, or false if it skips the step
---@field kept table[]|nil copies of the optimizer's groups, made at the beginning of a backward that updates parameters
---@field settings string|nil the optimizer's settings at the beginning of the backward or of the update
---@field factors table<integer, number> factors on gradients, by group of the optimizer (update.clip)
---@field norm number|nil norm of all gradients without the loss scale, or nil before it was computed
---@field clipped table<table, number> factors on gradients by row of engine.built (engine/step/clip.lua)
---@field versions table<table, integer>|nil by row of engine.built: how often the gradient was written when a script
---  had the norm computed
---@field total number sum of the weights of the micro-batches so far. After the last micro-batch, it is the sum over
---  all ranks
---@field unit number|false a power of two by which losses are divided (engine/step/weigh.lua)
---@field targets ps.Targets|false targets of the last batch with which the model was called
---@field targets_of table<ps.Tensor, ps.Targets|false> by loss: the targets of the loss's batch
---@field score {hits: number, targets: number}|false in a pipeline: `hits` is the number of `targets` in the last
---  iteration whose logit is the largest
---@field unwatch fun() stops recording losses (core/loss_weight.lua)
---@field half_restored boolean true if the value of a parameter could not be restored. zero_grad then tries again
---@field torn false|{model: boolean, optimizer: boolean, text: string, given_up: string, again: boolean} set when an
---  update failed in the middle. `model` and `optimizer` say which of them hold values of two steps. `text` is the
---  error that is raised if they are used, and `given_up` is this error after the step was abandoned. `again` says
---  whether another optimizer:step() can finish the update

---@type table<ps.Engine, ps.engine.StepState>
local states = setmetatable({}, { __mode = "k" })

--- Resets all fields that belong to one step.
---@param s ps.engine.StepState
function state.forget(s)
  s.key, s.measures, s.cleared, s.scale, s.settings, s.overlaps = false, false, false, nil, nil, false
  s.evaluates = false
  s.total, s.unit, s.factors, s.norm, s.clipped, s.versions = 0, false, {}, nil, {}, nil
  loss_weight.forget()
end

--- Creates the state of an engine's steps.
---@param engine ps.Engine
---@param c ffi.cdata* the ps_step
---@param is ffi.cdata* C's fields of the step
function state.new(engine, c, is)
  local s = { c = c, is = is, backward_how = ffi.new("ps_action_how"),
    update_how = ffi.new("ps_action_how"), config = ffi.new("ps_step_config"), targets = false,
    targets_of = setmetatable({}, { __mode = "k" }), from = setmetatable({}, { __mode = "k" }), loop = false,
    turn = false, score = false, half_restored = false, torn = false, last_key = false }
  state.forget(s)
  s.unwatch = loss_weight.watch()
  states[engine] = s
end

--- Stops recording losses, because the engine is closed.
---@param engine ps.Engine
function state.closed(engine)
  if states[engine] then states[engine].unwatch() end
end

--- Returns the state of an engine's steps.
---@param engine ps.Engine
---@return ps.engine.StepState
function state.of(engine) return states[engine] end

--- Returns an iterator over the engines of the process, including closed ones.
---@return fun(): ps.Engine?, ps.engine.StepState
function state.engines() return pairs(states) end

-- -- questions --------------------------------------------------------------------------------------------------------
--- Fields of an engine that describe its step. Scripts cannot set them.
---@type table<string, fun(engine: ps.Engine): any>
state.fields = {
  micro = function(engine) return states[engine].is.micro end,        -- number of micro-batches whose backward has run
  torn = function(engine) return states[engine].torn end,
}

--- Returns the number of micro-batches of the current step. Before a step begins, returns the number of the loop.
--- Without a loop, returns the configured number.
---@param engine ps.Engine
---@return integer
function state.count(engine)
  local s = states[engine]
  return s.is.open == 1 and s.is.n_micro or s.loop and s.loop.count or engine.accumulate
end

--- Returns a text for the division of the batch into micro-batches. Steps with equal texts share a plan.
---@param engine ps.Engine
---@return string
function state.batch_text(engine)
  local loop = states[engine].loop
  return ("%d %s"):format(state.count(engine), loop and loop.rows or "")
end

--- Returns whether a step has begun and has not yet ended.
---@param engine ps.Engine
---@return boolean
function state.is_open(engine) return states[engine].is.open == 1 end

--- Returns whether all forwards of the current step ran in evaluation mode and the step has had no backward. In this
--- case, the step ends without a trace unless the next call is a backward.
---@param engine ps.Engine
---@return boolean
function state.evaluates(engine) return states[engine].evaluates end

--- Returns whether an action of the step is running: the model's forward, or a backward or an update that calls Lua.
---@param engine ps.Engine
---@return boolean
function state.acts(engine) return states[engine].is.now.kind ~= C.PS_ACT_NONE end

--- Returns the trace of the current step. If there is none, returns the trace of the last step, or nil.
---@param engine ps.Engine
---@return integer? id
function state.trace(engine)
  local key = states[engine].last_key
  return key and engine.traces[key] or nil
end

--- Returns the factor on the step's gradients, excluding the loss scale. It is 0 for a step without targets.
---@param engine ps.Engine
---@return number
function state.weight_factor(engine)
  local s = states[engine]
  return s.total == 0 and 0 or (s.unit or 1) / s.total
end

--- Returns the factors on the gradients of this step, by row of engine.built (engine/step/clip.lua).
---@param engine ps.Engine
---@return table<table, number>
function state.factors(engine) return states[engine].clipped end

-- -- torn models ------------------------------------------------------------------------------------------------------
--- Raises an error if the model is torn: a step failed in the middle of its update.
---@param engine ps.Engine
function state.check_whole(engine)
  engine:check_open()
  local torn = states[engine].torn
  if torn then caller.error(torn.text) end
end

--- Records that load_state_dict wrote all values of the model or of the optimizer, so that it is no longer torn.
---@param engine ps.Engine
---@param part "model"|"optimizer"
function state.mend(engine, part)
  local s = states[engine]
  if not s.torn then return end
  s.torn[part] = false
  if not (s.torn.model or s.torn.optimizer) then s.torn = false end
end

return state
