-- SPDX-License-Identifier: BSD-3-Clause
-- Anomaly mode, like PyTorch's detect_anomaly. The first op that produces a NaN or an infinity raises an error. The
-- error contains the name of the op, the line of the script that called the op, and the module. src/tensor/anomaly.c
-- checks the values. This file stores the lines of the script.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local ffi, C, ctx = native.ffi, native.C, native.ctx

local anomaly = {}

local places, numbers = {}, {}                      -- places: index -> line that called an op; numbers: line -> index
local found = ffi.new("ps_anomaly_info")

-- Called before each op. Passes the current line of the script to C, as an index into `places`.
local function here()
  local line = caller.position()
  local number = numbers[line]
  if not number then
    number = #places + 1
    places[number], numbers[line] = line, number
  end
  C.ps_anomaly_at(ctx, number)
end

local function op_name(op) return native.op_info[op].name end

local function text()
  C.ps_anomaly_get(ctx, found)
  local module = found.module > 0 and require("ps.nn.calls")()[found.module]
  local line = places[tonumber(found.place)]
  local words = { line and line:gsub(": $", "") or "at an unknown line: anomaly mode was off at the call" }
  if module then
    words[2] = ("in %s"):format(module.path ~= "" and ("%s (%s)"):format(module.path, module.class) or module.class)
  end
  local where = table.concat(words, ", ")
  local what = found.nan == 1 and "a NaN" or "an infinity"
  if line then where = "at " .. where end
  if found.of >= 0 then
    return ("%s made %s in the backward of %s, called %s; its inputs have none"):format(op_name(found.op),
      what, op_name(found.of), where)
  end
  return ("%s made %s, called %s; its inputs have none"):format(op_name(found.op), what, where)
end

hooks.on("anomaly", text)
hooks.on("scaled", function() C.ps_anomaly_scaled(ctx, 1) end)
hooks.on("step", function() C.ps_anomaly_scaled(ctx, 0) end)

--- Switches anomaly mode on or off. In anomaly mode, the first op of forward, backward or update that produces a NaN or
--- an infinity raises an error. The error contains the name of the op, the line of the script and the module. For an op
--- of backward, it contains the line and the module of the forward op whose gradient the op computes.
---
--- There are two exceptions. Infinities that the script itself writes, for example to a mask, do not raise an error. An
--- overflow in the backward of a scaled loss does not raise an error, because the step is skipped.
---
--- Training is several times slower in anomaly mode, because the outputs of all ops are read.
---@param on boolean
---@return boolean the previous setting
function anomaly.set_detect_anomaly(on)
  caller.typed(on, "boolean", "ps.set_detect_anomaly: the setting")
  native.placer = on and here or nil
  return C.ps_detect_anomaly(ctx, on and 1 or 0) ~= 0
end

local function restore(was, depth, ok, ...)
  anomaly.set_detect_anomaly(was)
  C.ps_module_leave(depth)                          -- leaves the modules that were still running at an error
  if not ok then error((...), 0) end
  return ...
end

--- Runs fn(...) in anomaly mode (ps.set_detect_anomaly). All ops of forward and backward that fn runs are checked.
---@param fn function
---@param ... any arguments of fn
---@return any ... the results of fn
function anomaly.detect_anomaly(fn, ...)
  caller.callable(fn, "ps.detect_anomaly")
  return restore(anomaly.set_detect_anomaly(true), C.ps_module_enter(C.ps_module_now()), xpcall(fn,
    require("ps.core.scope").trace, ...))
end

return anomaly
