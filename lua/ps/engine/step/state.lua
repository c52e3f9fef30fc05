-- SPDX-License-Identifier: BSD-3-Clause
-- Stores the part of a step's state that belongs to Lua, and answers questions of other files about this state. The
-- record itself (state.of) is read only by the files in engine/step/ and by the pipeline's driver
-- (engine/pipeline/driver.lua).
local caller = require "ps.core.caller"
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local ffi, C = native.ffi, native.C

local state = {}

---@class ps.engine.StepState
---@field c ffi.cdata* the ps_step
---@field is ffi.cdata* the fields that C changes (ps_step_state): open, micro, n_micro, now, due, updating
---@field backward_how ffi.cdata* settings of the last backward
---@field overlaps boolean true if a backward of the step updates parameters
---@field update_how ffi.cdata*
---@field config ffi.cdata* ps_step_config; contains the table of actions of the last step
---@field actions ffi.cdata* the table of actions to which `config` refers
---@field config_measures boolean? true if `actions` contains the action for the norm
---@field config_micros integer? number of micro-batches in `actions`
---@field loop ps.engine.Loop|false the loop over micro-batches that the script is in
---@field turn false|{outs: ps.Tensor[], targets: ps.Targets|false} the named output of the last forward; false after
---  its backward
---@field from table<ps.Tensor, {loop: ps.engine.Loop|false, at: integer}> by the loss of a named output, the loop and
---  the index of the output's micro-batch
---@field key string|false key of the trace in engine.traces, or false if the trace is not kept there
---@field last_key string|false key of the last step that had a key
---@field measures boolean true if the step has the action for the norm
---@field evaluates boolean true if the step began in evaluation mode and has had no backward yet
---@field cleared boolean true if zero_grad was called after the step's first forward and before its first backward. The
---  next forward then begins the step again
---@field scale number|false|nil the factor for gradients that optimizer:step() has computed, or false if
---  optimizer:step() skips the step
---@field kept table[]|nil copies of the optimizer's groups, made at the beginning of a backward that updates parameters
---@field settings string|nil the optimizer's settings at the beginning of the backward or of the update
---@field factors table<integer, number> factors for gradients, by group of the optimizer (update.clip)
---@field norm number|nil norm of all gradients without the loss scale, or nil if it has not been computed yet
---@field clipped table<table, number> factors for gradients, by row of engine.built (engine/step/clip.lua)
---@field versions table<table, integer>|nil by row of engine.built, how often the gradient had been written when a call
---  of the script computed the norm
---@field total number sum of the weights of the micro-batches so far. After the last micro-batch, the weights of all
---  ranks are included
---@field unit number|false a power of two by which losses are divided (engine/step/weigh.lua)
---@field targets ps.Targets|false targets of the last batch with which the model was called
---@field targets_of table<ps.Tensor, ps.Targets|false> by loss, the targets of the batch for which the loss was
---  computed
---@field score {hits: number, targets: number}|false in a pipeline, the score of the last iteration: `targets` is the
---  number of targets, and `hits` is the number of targets that have the largest logit
---@field unwatch fun() stops recording losses (core/loss_weight.lua)
---@field half_restored boolean true if a gradient could not be dropped, so that the value of its parameter was not
---  restored; zero_grad then tries again
---@field torn false|{model: boolean, optimizer: boolean, text: string, given_up: string, again: boolean} set when an
---  update failed in the middle. `model` and `optimizer` are true if the model or the optimizer holds values of two
---  steps. `text` is the error that is raised if the model or the optimizer is used. After the step has been abandoned,
---  `given_up` is raised instead. `again` is true if another call of optimizer:step() can finish the update

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

--- Returns an iterator over the engines of this process. Closed engines are included.
---@return fun(): ps.Engine?, ps.engine.StepState
function state.engines() return pairs(states) end

-- -- questions --------------------------------------------------------------------------------------------------------
--- Fields of an engine that describe its step. Scripts cannot set them.
---@type table<string, fun(engine: ps.Engine): any>
state.fields = {
  micro = function(engine) return states[engine].is.micro end,        -- number of micro-batches that have run backward
  torn = function(engine) return states[engine].torn end,
}

--- Returns the number of micro-batches of the current step. Before the step begins, returns the number of micro-batches
--- of the loop. If there is no loop, returns the configured number.
---@param engine ps.Engine
---@return integer
function state.count(engine)
  local s = states[engine]
  return s.is.open == 1 and s.is.n_micro or s.loop and s.loop.count or engine.accumulate
end

--- Returns a text that describes how the batch is divided into micro-batches. Steps with equal texts use the same plan.
---@param engine ps.Engine
---@return string
function state.batch_text(engine)
  local loop = states[engine].loop
  return ("%d %s"):format(state.count(engine), loop and loop.rows or "")
end

--- Returns true if a step has begun and has not ended yet.
---@param engine ps.Engine
---@return boolean
function state.is_open(engine) return states[engine].is.open == 1 end

--- Returns true if all forwards of the current step ran in evaluation mode and the step has had no backward yet. If the
--- next call is not a backward, such a step ends without a trace.
---@param engine ps.Engine
---@return boolean
function state.evaluates(engine) return states[engine].evaluates end

--- Returns true while an action of the step is running. The action is the model's forward, or a backward or an update
--- that calls Lua.
---@param engine ps.Engine
---@return boolean
function state.acts(engine) return states[engine].is.now.kind ~= C.PS_ACT_NONE end

--- Returns the trace of the current step. If the current step has no trace, returns the trace of the last step. Returns
--- nil if neither has a trace.
---@param engine ps.Engine
---@return integer? id
function state.trace(engine)
  local key = states[engine].last_key
  return key and engine.traces[key] or nil
end

--- Returns the factor by which the gradients of the step are multiplied. The loss scale is not included. The factor is
--- 0 for a step without targets.
---@param engine ps.Engine
---@return number
function state.weight_factor(engine)
  local s = states[engine]
  return s.total == 0 and 0 or (s.unit or 1) / s.total
end

--- Returns the factors for the gradients of this step, by row of engine.built (engine/step/clip.lua).
---@param engine ps.Engine
---@return table<table, number>
function state.factors(engine) return states[engine].clipped end

-- -- torn models ------------------------------------------------------------------------------------------------------
--- Raises an error if the model is torn. A model is torn if a step has failed in the middle of its update.
---@param engine ps.Engine
function state.check_whole(engine)
  engine:check_open()
  local torn = states[engine].torn
  if torn then caller.error(torn.text) end
end

--- Records that load_state_dict has written all values of the model or of the optimizer. This part is then no longer
--- torn.
---@param engine ps.Engine
---@param part "model"|"optimizer"
function state.mend(engine, part)
  local s = states[engine]
  if not s.torn then return end
  s.torn[part] = false
  if not (s.torn.model or s.torn.optimizer) then s.torn = false end
end

return state
