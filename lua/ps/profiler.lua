-- SPDX-License-Identifier: BSD-3-Clause
-- Where the kernels' time goes, by op, counted in the engine's op path.
--   ps.profiler.start(); ...; ps.profiler.report()
local E = require "ps.ffi"
local ffi, C, ctx = E.ffi, E.C, E.ctx

local profiler = {}

--- Clears the counters and begins to count.
function profiler.start() E.check(C.ps_profile(ctx, 1)) end

--- Stops counting.
---@return { name: string, calls: integer, seconds: number }[] largest first
function profiler.stop()
  C.ps_profile(ctx, 0)
  local calls, seconds, rows = ffi.new("int64_t[1]"), ffi.new("double[1]"), {}
  for op = 0, C.PS_OP_COUNT - 1 do
    E.check(C.ps_profile_get(ctx, op, calls, seconds))
    if calls[0] > 0 then
      rows[#rows + 1] = { name = E.op_info[op].name, calls = tonumber(calls[0]), seconds = seconds[0] }
    end
  end
  table.sort(rows, function(a, b) return a.seconds > b.seconds end)
  return rows
end

--- Stops and prints a table.
---@param n? number divide by this (steps, say)
---@param unit? string the name of one of n
function profiler.report(n, unit)
  n = n or 1
  local rows, total = profiler.stop(), 0
  for _, row in ipairs(rows) do total = total + row.seconds end
  print(("%-28s %10s %12s %7s"):format("op", "calls", "ms" .. (unit and " a " .. unit or ""), "share"))
  for _, row in ipairs(rows) do
    print(("%-28s %10.1f %12.3f %6.1f%%"):format(row.name, row.calls / n, row.seconds * 1e3 / n,
      row.seconds / total * 100))
  end
  print(("%-28s %10s %12.3f"):format("all kernels", "", total * 1e3 / n))
end

return profiler
