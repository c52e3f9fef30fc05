-- SPDX-License-Identifier: BSD-3-Clause
-- Controls when Lua's garbage collector runs. Each function of this file is for one occasion. The memory of small
-- tensors and of tensor headers becomes free only when the collector runs. If LuaJIT decided when to collect, the
-- collector would run at different times in each run, and the memory peaks would differ. core/ffi.lua runs every full
-- collection. It also collects when the memory of tensors has grown and when memory is short.
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local C = native.C

local collector = {}

-- The number of forwards between two collections in the first step of a planned script. With Lua's default settings,
-- the collector would run about as often. An engine's dry run uses PS_UNCOLLECTED instead.
local UNCOLLECTED = 32

--- Collects after a model, a model's layout or one of a model's blocks has been created, to free temporary tensors.
function collector.after_making() native.collect() end

--- Collects after a call has failed, to free the call's tensors and recorded ops.
function collector.after_failure() native.collect() end

--- Collects twice. The finalizers of the first collection drop references to tensors, and the second collection frees
--- these tensors.
function collector.thoroughly()
  native.collect()
  native.collect()
end

--- Collects before a backward walk. In a planned script the collector then stays stopped until the next collection at a
--- fixed point of the script.
function collector.before_walk()
  native.collect()
  if not devices.computes then collectgarbage "stop" end
end

--- Collects before every PS_UNCOLLECTED-th forward of an engine's dry run, and leaves the collector stopped.
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

--- Runs a full collection and then calls fn(...) with the collector stopped.
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

local forwards = 0                  -- number of forwards in the planned script's step so far

--- Collects after a fixed number of forwards of a planned script, so that the peak of a plan is the same in each run.
--- Called when an action of a step begins and when the action ends.
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
