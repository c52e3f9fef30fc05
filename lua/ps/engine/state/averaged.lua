-- SPDX-License-Identifier: BSD-3-Clause
-- Runs calls that evaluate or save a model. During such a call, parameters have their values for evaluation. With a
-- schedule-free optimizer, these values are the averages of the parameters, which differ from the training values.
-- Before the call, the parameters are set to their averages. After the call, they are set to the training values again.
local average = require "ps.optim.average"
local step = require "ps.engine.step"
local error = require("ps.core.caller").error

local averaged = {}

--- Calls fn while the parameters have their values for evaluation. All ranks must call this function.
---@param engine ps.Engine
---@param call string name of the calling function, for messages
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
