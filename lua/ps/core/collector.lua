-- SPDX-License-Identifier: BSD-3-Clause
-- The pace of Lua's garbage collector. The bytes of small tensors and of tensor headers become free only when the
-- collector runs. If nothing controls it, the collector runs at different times in each run, and the peaks of two runs
-- differ by these bytes. Each function of this file is called at one of the times at which the library collects.
-- core/ffi.lua, which runs every full collection, also collects when tensors have grown and when memory is short.
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local C = native.C

local collector = {}

-- number of forwards between two collections in the first step of a planned script, approximately as often as the
-- collector would run by itself; an engine's dry run uses PS_UNCOLLECTED
local UNCOLLECTED = 32

--- Collects after a model, its layout or one of its blocks was created, and frees temporary tensors of the creation.
function collector.after_making() native.collect() end

--- Collects after a call has failed. Frees the tensors of the call and the ops that it recorded.
function collector.after_failure() native.collect() end

--- Collects twice. The finalizers of the first collection drop references to tensors, which the second collection
--- frees.
function collector.thoroughly()
  native.collect()
  native.collect()
end

--- Collects before a backward walk. In a planned script the collector is then stopped until the next such point.
function collector.before_walk()
  native.collect()
  if not devices.computes then collectgarbage "stop" end
end

--- Collects before some of the forwards of an engine's dry run, and leaves the collector stopped.
---@param number integer index of the forward, from 1
---@return boolean collected
function collector.in_dry_run(number)
  if number % C.PS_UNCOLLECTED ~= 0 then return false end
  native.collect()
  collectgarbage "stop"
  return true
end

--- Collects between two consecutive dry runs of an engine, and leaves the collector stopped.
function collector.between_dry_runs()
  scope.collect()
  collectgarbage "stop"
end

--- Collects everything, and calls fn(...) with the collector stopped.
---@param fn function
---@param ... any arguments of fn
---@return boolean ok false if fn raised an error
---@return any ... results of fn, or its error
function collector.without(fn, ...)
  scope.collect_all()
  local running = collectgarbage "isrunning"
  collectgarbage "stop"
  local function restored(...)
    if running then collectgarbage "restart" end
    return ...
  end
  return restored(pcall(fn, ...))
end

local forwards = 0                  -- number of forwards that the step of the planned script has performed so far

--- Paces the collector in a planned script, at the begin and the end of each action of a step. The collector runs after
--- a fixed number of forwards, so that the peak of a plan is the same in each run.
---@param action ffi.cdata* ps_action
---@param begins boolean
function collector.pace_script(action, begins)
  if not begins then return end
  if action.kind == C.PS_ACT_FORWARD then
    forwards = action.micro == 0 and action.vstage == 0 and 1 or forwards + 1
    if forwards % UNCOLLECTED == 0 then native.collect() end
  end
  collectgarbage "stop"
end

return collector
