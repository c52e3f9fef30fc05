-- SPDX-License-Identifier: BSD-3-Clause
-- Performs the actions of a step. C owns the step's table of actions, and determines the next action (ps_step,
-- src/base/step.h). The functions of ps_step that begin a step, perform actions and end a step are called only by this
-- file. The engine's driver (engine/step/table.lua) defines the actions of a step and the work that Lua does in each
-- action.
local array = require "ps.core.array"
local collector = require "ps.core.collector"
local hooks = require "ps.core.hooks"
local native = require "ps.core.ffi"
local state = require "ps.engine.step.state"
local ffi, C = native.ffi, native.C

local actions = {}

local FORWARD, BACKWARD, REDUCE = C.PS_ACT_FORWARD, C.PS_ACT_BACKWARD, C.PS_ACT_REDUCE
local NORM, UPDATE = C.PS_ACT_NORM, C.PS_ACT_UPDATE
--- by the kind of an action: the number in the report's line to which the seconds of the action are added
actions.PART = { [FORWARD] = "forward", [BACKWARD] = "backward", [REDUCE] = "backward", [NORM] = "step",
  [UPDATE] = "step" }

local id_out = ffi.new("int32_t[1]")
local action_array = array "ps_action"

--- Creates the step of an engine.
---@param engine ps.Engine
---@return ffi.cdata* step the step, which ps_engine_open needs
function actions.new(engine)
  local out = ffi.new("ps_step *[1]")
  native.check(C.ps_step_new(native.ctx, out))
  local c = ffi.gc(out[0], C.ps_step_free)
  state.new(engine, c, C.ps_step_look(c))
  return c
end

-- -- beginning and ending ---------------------------------------------------------------------------------------------
-- Returns the actions of a step. They are the actions of the driver, the action for the norm if the step needs a norm,
-- and the action for the update.
local function table_of(engine, micros, measures)
  local list = engine.driver:actions(micros)
  if measures then list[#list + 1] = { NORM, 0, 0 } end
  list[#list + 1] = { UPDATE, 0, 0 }
  local out = action_array(#list)
  for i, action in ipairs(list) do out[i - 1].kind, out[i - 1].vstage, out[i - 1].micro = unpack(action) end
  return out, #list
end

-- Returns true if the update needs the norm of all gradients.
local function measures(engine)
  local opt = engine.optimizer
  return opt.max_norm ~= nil or opt.checks_overflow
end

--- Tries to begin a step.
---@param engine ps.Engine
---@param trace integer the trace that this step should repeat, or PS_TRACE_UNKNOWN or PS_TRACE_NONE
---@param dry? boolean
---@return integer rc 0, or the code of an error that is not raised
function actions.try(engine, trace, dry)
  local s = state.of(engine)
  local config, wants, micros = s.config, measures(engine), state.count(engine)
  if wants ~= s.config_measures or micros ~= s.config_micros then
    s.actions, config.n_actions = table_of(engine, micros, wants)
    config.actions, s.config_measures, s.config_micros = s.actions, wants, micros
  end
  config.dry, config.trace = dry and 1 or 0, trace
  local rc = C.ps_step_begin(s.c, config)
  if rc == 0 then s.measures = wants end
  if rc == 0 and not dry then hooks.tell("stepped", engine.module, "begins") end
  return rc
end

--- Tries to begin a step that should repeat the step of a trace. The trace of the new step is stored in
--- engine.traces[key].
---@param engine ps.Engine
---@param key string|false key of the new trace, or false if the trace is not kept
---@param trace? integer the trace, or nil if no trace of such a step is known
---@return integer rc 0, or the code of an error that is not raised
function actions.begin(engine, key, trace)
  local rc = actions.try(engine, trace or C.PS_TRACE_UNKNOWN)
  local s = state.of(engine)
  if rc == 0 then s.key, s.last_key = key, key or s.last_key end
  return rc
end

--- Ends a step that has performed all its actions.
---@param engine ps.Engine
---@return integer id the trace of the step, or a negative number if the step has no trace
function actions.finish(engine)
  native.check(C.ps_step_end(state.of(engine).c, id_out))
  hooks.tell("stepped", engine.module, "done")
  return id_out[0]
end

--- Ends a step without performing its remaining actions.
---@param engine ps.Engine
---@return boolean clean false if a gradient could not be dropped
function actions.drop(engine)
  local clean = C.ps_step_end(state.of(engine).c, nil) >= 0
  hooks.tell("stepped", engine.module, "given_up")
  return clean
end

--- Ends the step of a dry run.
---@param engine ps.Engine
---@param complete boolean true if all actions of the step were performed
---@return integer rc 0, or the code of an error that is not raised
---@return integer? id the step's trace
function actions.end_dry(engine, complete)
  local rc = C.ps_step_end(state.of(engine).c, complete and id_out or nil)
  return rc, id_out[0]
end

-- -- performing -------------------------------------------------------------------------------------------------------
--- Ends the current action with an error, and raises it.
---@param engine ps.Engine
---@param problem any
function actions.fail(engine, problem)
  local s = state.of(engine)
  local kind = s.is.now.kind
  C.ps_step_abandon(s.c)
  if engine.ranks then engine.ranks:explain(problem, kind == BACKWARD or kind == REDUCE) end
  error(problem, 0)
end

local function done(engine, s, ok, ...)
  if not ok then actions.fail(engine, (...)) end
  hooks.tell("action", s.is.now, false)
  local rc = C.ps_step_done(s.c)
  if rc < 0 then actions.fail(engine, select(2, pcall(native.raise, rc))) end
  return ...
end

--- Performs one action. All actions are performed by this function, except the actions in a pipeline's row that C
--- performs (engine/pipeline/driver.lua).
---@param engine ps.Engine
---@param kind integer
---@param how? ffi.cdata* ps_action_how
---@param ... any arguments of the driver's work
---@return any ... results of the driver's work
local function perform(engine, kind, how, ...)
  local s = state.of(engine)
  if kind == BACKWARD and C.ps_step_collects(s.c) ~= 0 then collector.before_walk() end
  native.check(C.ps_step_next(s.c, kind, how))
  hooks.tell("action", s.is.now, true)
  return done(engine, s, pcall(engine.driver.work[kind], engine, ...))
end
actions.perform = perform

--- Performs one action, and adds the seconds of the action to the report.
---@param engine ps.Engine
---@param kind integer
---@param ... any arguments of perform
---@return any ...
function actions.timed(engine, kind, ...)
  local report = engine.report
  if report then return report:timed(actions.PART[kind], perform, engine, kind, ...) end
  return perform(engine, kind, ...)
end

return actions
