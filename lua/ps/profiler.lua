-- SPDX-License-Identifier: BSD-3-Clause
-- The record of events (src/base/record.h) for scripts: ops, modules, copies, disk, collectives, waits, chunks and the
-- bytes of tiers, each with its time, step and phase.
--   ps.profiler.start(); ...; ps.profiler.stop(); ps.profiler.save("profile.json"); ps.profiler.report()
local E = require "ps.ffi"
local caller = require "ps.caller"
local error = caller.error
local ffi, C = E.ffi, E.C

local profiler = {}

local EVENTS = 2 ^ 18           -- of 64 bytes; a step of a small GPT-2 has a few thousand

--- Begins to record, also before ps.initialize. What was recorded before goes.
---@param options? { events?: integer } events: how many the record holds, 64 bytes each (262144); later ones take the
---  place of the oldest
function profiler.start(options)
  options = caller.options(options, "ps.profiler.start", { events = "whole" })
  local events = tonumber(options.events or EVENTS)
  if events < 1 or events > C.PS_RECORD_MOST then
    error(("ps.profiler.start: events is %s; a record holds 1 to %d"):format(events, C.PS_RECORD_MOST))
  end
  E.check(C.ps_record_start(events))
end

--- Stops recording; what was recorded stays.
---@return { name: string, calls: integer, seconds: number, flops: number, bytes: number }[] all calls of each op since
---  the start, also those whose events were overwritten; largest time first
function profiler.stop()
  C.ps_record_stop()
  local total, rows = ffi.new("ps_record_total"), {}
  for op = 0, C.PS_OP_COUNT - 1 do
    E.check(C.ps_record_op_total(op, total))
    if total.calls > 0 then
      rows[#rows + 1] = { name = E.op_info[op].name, calls = tonumber(total.calls), seconds = tonumber(total.ns) * 1e-9,
        flops = tonumber(total.flops), bytes = tonumber(total.bytes) }
    end
  end
  table.sort(rows, function(a, b) return a.seconds > b.seconds end)
  return rows
end
profiler["end"] = profiler.stop

--- Writes what was recorded as a file in Chrome's trace format, which Perfetto opens (docs/profiling.md).
---@param path string
function profiler.save(path)
  if type(path) ~= "string" then error("ps.profiler.save takes the name of a file, not a " .. type(path)) end
  require("ps.profile_save")(path)
end

--- Stops and prints a table of ops.
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
