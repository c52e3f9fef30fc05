-- SPDX-License-Identifier: BSD-3-Clause
-- Performs all actions of a step without computing anything (dry runs).
local collector = require "ps.core.collector"
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local actions = require "ps.engine.step.actions"
local state = require "ps.engine.step.state"
local C = native.C

local dry = {}

local function perform_all(engine, args)
  local s = state.of(engine)
  engine.driver:dry_run(args)
  if s.is.due.kind == C.PS_ACT_NORM then actions.perform(engine, C.PS_ACT_NORM, nil, true) end
  s.update_how.scale = 1
  engine.optimizer:settings_into(s.update_how)
  actions.perform(engine, C.PS_ACT_UPDATE, s.update_how, 1)
end

--- Performs all actions of a step without computing anything.
---@param engine ps.Engine
---@param args any[] the model's arguments, and their number `n`
---@param like? integer an earlier trace of this step; gathers from other ranks begin as early as in the earlier trace
---@return integer? id the trace of the step, or nil if an action failed
---@return any problem the error of the failed action
function dry.run(engine, args, like)
  native.check(actions.try(engine, like or C.PS_TRACE_UNKNOWN, true))
  local ok, problem = loss_weight.without(scope.scope, function()
    scope.enable_grad(perform_all, engine, args)
  end)
  local again = engine.driver:end_dry()
  local rc, id = actions.end_dry(engine, ok)
  state.forget(state.of(engine))
  if again then
    collector.between_dry_runs()
    return dry.run(engine, args, like)
  end
  if not ok then return nil, problem end
  native.check(rc)
  return id
end

return dry
