-- SPDX-License-Identifier: BSD-3-Clause
-- Lua's state of a step, and the questions that other files ask about it. Only files of engine/step/ and the pipeline's
-- driver (engine/pipeline/driver.lua) get the record itself, by state.of.
local caller = require "ps.core.caller"
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local ffi, C = native.ffi, native.C

local state = {}

---@class ps.engine.StepState
---@field c ffi.cdata* the ps_step
---@field is ffi.cdata* C's own fields (ps_step_state): open, micro, n_micro, now, due, updating
---@field backward_how ffi.cdata* settings of the last backward
---@field overlaps boolean a backward of the step updates parameters
---@field update_how ffi.cdata*
---@field config ffi.cdata* ps_step_config, with the table of actions of the last step
---@field actions ffi.cdata* that table
---@field config_measures boolean? the table has a norm
---@field config_micros integer? the table's micro-batches
---@field loop ps.engine.Loop|false the loop over micro-batches that the script is in
---@field turn false|{outs: ps.Tensor[], targets: ps.Targets|false} the last forward's output by names, until its
---  backward
---@field from table<ps.Tensor, {loop: ps.engine.Loop|false, at: integer}> by loss of an output by names: its loop and
---  the number of its micro-batch
---@field key string|false of the trace in engine.traces; false: the trace is not kept there
---@field last_key string|false that key, of the last step that began with one
---@field measures boolean the step has a norm
---@field evaluates boolean the step began in evaluation mode, and has had no backward yet
---@field cleared boolean zero_grad came between the step's first forward and its first backward: a forward begins the
---  step again
---@field scale number|false|nil the factor on gradients that optimizer:step() found; false: it skips the step
---@field kept table[]|nil the optimizer's groups as a backward that updates found them
---@field settings string|nil the optimizer's settings that backward or the update began with
---@field factors table<integer, number> by group of the optimizer: a factor on its gradients (update.clip)
---@field norm number|nil of all gradients, without the loss scale, once the step's norm was taken
---@field clipped table<table, number> by row of engine.built: a factor on its gradient (engine/step/clip.lua)
---@field total number sum of the weights of the micro-batches so far, with the last one's over all ranks
---@field unit number|false a power of two that losses are divided by (engine/step/weigh.lua)
---@field targets ps.Targets|false of the batch that the model was called with last
---@field targets_of table<ps.Tensor, ps.Targets|false> by loss: the targets of its batch
---@field score {hits: number, targets: number}|false of a pipeline: how many targets the last turn's loss hit
---@field unwatch fun() ends the notes of losses (core/loss_weight.lua)
---@field half_restored boolean a parameter's value could not be restored: zero_grad tries again
---@field torn false|{model: boolean, optimizer: boolean, text: string, given_up: string, again: boolean} an update
---  failed in the middle: the parts whose values are of two steps, and the error of using them; given_up: that error
---  once the step was given up; again: another optimizer:step() can finish the update

---@type table<ps.Engine, ps.engine.StepState>
local states = setmetatable({}, { __mode = "k" })

--- Forgets everything that belongs to one step.
---@param s ps.engine.StepState
function state.forget(s)
  s.key, s.measures, s.cleared, s.scale, s.settings, s.overlaps = false, false, false, nil, nil, false
  s.evaluates = false
  s.total, s.unit, s.factors, s.norm, s.clipped = 0, false, {}, nil, {}
  loss_weight.forget()
end

--- Gives an engine the state of its steps.
---@param engine ps.Engine
---@param c ffi.cdata* the ps_step
---@param is ffi.cdata* its own fields
function state.new(engine, c, is)
  local s = { c = c, is = is, backward_how = ffi.new("ps_action_how"),
    update_how = ffi.new("ps_action_how"), config = ffi.new("ps_step_config"), targets = false,
    targets_of = setmetatable({}, { __mode = "k" }), from = setmetatable({}, { __mode = "k" }), loop = false,
    turn = false, score = false, half_restored = false, torn = false, last_key = false }
  state.forget(s)
  s.unwatch = loss_weight.watch()
  states[engine] = s
end

--- Ends the notes of losses: the engine is closed.
---@param engine ps.Engine
function state.closed(engine)
  if states[engine] then states[engine].unwatch() end
end

--- The state of an engine's steps.
---@param engine ps.Engine
---@return ps.engine.StepState
function state.of(engine) return states[engine] end

--- `for engine in`: the engines of the process, closed ones too.
---@return fun(): ps.Engine?, ps.engine.StepState
function state.engines() return pairs(states) end

-- -- questions --------------------------------------------------------------------------------------------------------
--- Fields of an engine that describe its step. Nobody can set them.
---@type table<string, fun(engine: ps.Engine): any>
state.fields = {
  micro = function(engine) return states[engine].is.micro end,        -- micro-batches whose backward has run
  torn = function(engine) return states[engine].torn end,
}

--- Micro-batches of the step under way; before a step begins, those of the loop, or of the configuration.
---@param engine ps.Engine
---@return integer
function state.count(engine)
  local s = states[engine]
  return s.is.open == 1 and s.is.n_micro or s.loop and s.loop.count or engine.accumulate
end

--- A text for how the next step divides its batch into micro-batches. Steps with the same text share a plan.
---@param engine ps.Engine
---@return string
function state.batch_text(engine)
  local loop = states[engine].loop
  return ("%d %s"):format(state.count(engine), loop and loop.rows or "")
end

--- Whether a step has begun and not ended.
---@param engine ps.Engine
---@return boolean
function state.is_open(engine) return states[engine].is.open == 1 end

--- Whether the step has only forwards in evaluation mode so far. Such a step ends without a trace if the next call is
--- not a backward.
---@param engine ps.Engine
---@return boolean
function state.evaluates(engine) return states[engine].evaluates end

--- Whether an action of the step is under way: the model's forward, or a backward or an update that calls Lua.
---@param engine ps.Engine
---@return boolean
function state.acts(engine) return states[engine].is.now.kind ~= C.PS_ACT_NONE end

--- The trace of the step under way, or else of the last one; nil: there is none.
---@param engine ps.Engine
---@return integer? id
function state.trace(engine)
  local key = states[engine].last_key
  return key and engine.traces[key] or nil
end

--- The factor on the step's gradients, without the loss scale; 0 for a step without targets.
---@param engine ps.Engine
---@return number
function state.weight_factor(engine)
  local s = states[engine]
  return s.total == 0 and 0 or (s.unit or 1) / s.total
end

--- The factors on gradients of this step, by row of engine.built (engine/step/clip.lua).
---@param engine ps.Engine
---@return table<table, number>
function state.factors(engine) return states[engine].clipped end

-- -- torn models ------------------------------------------------------------------------------------------------------
--- Rejects a torn model: a step failed in the middle of its update.
---@param engine ps.Engine
function state.check_whole(engine)
  engine:check_open()
  local torn = states[engine].torn
  if torn then caller.error(torn.text) end
end

--- Notes that load_state_dict wrote all values of a part, so that the part is whole again.
---@param engine ps.Engine
---@param part "model"|"optimizer"
function state.mend(engine, part)
  local s = states[engine]
  if not s.torn then return end
  s.torn[part] = false
  if not (s.torn.model or s.torn.optimizer) then s.torn = false end
end

return state
