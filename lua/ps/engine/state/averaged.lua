-- SPDX-License-Identifier: BSD-3-Clause
-- Runs calls that evaluate or save a model. During a call, parameters have their values for evaluation. A schedule-free
-- optimizer trains with other values. Its parameters move to their averages before the call, and back after it.
local average = require "ps.optim.average"
local step = require "ps.engine.step"
local error = require("ps.core.caller").error

local averaged = {}

--- Calls fn while the parameters hold their values for evaluation. All ranks must call it.
---@param engine ps.Engine
---@param call string name of the call in messages
---@param fn fun(...: any): ...
---@param ... any arguments of fn
---@return any ... the results of fn
function averaged.run(engine, call, fn, ...)
  local optimizer = engine.optimizer
  if engine.closed or not optimizer or not select(2, average.of(optimizer)) then return fn(...) end
  if step.is_open(engine) and not step.evaluates(engine) then
    error(("%s: a step has begun, so the parameters cannot be moved to the averages of %s now: call it after "
      .. "optimizer:step()"):format(call, optimizer.kind))
  end
  optimizer:eval()
  local function back(ok, ...)
    optimizer:train()
    if not ok then error((...), 0) end
    return ...
  end
  return back(pcall(fn, ...))
end

return averaged
