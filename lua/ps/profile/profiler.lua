-- SPDX-License-Identifier: BSD-3-Clause
-- ps.profiler: lets a script record events (src/base/record.h). Events are ops, modules, copies, disk accesses,
-- collectives, waits, moves of chunks, and changes of the memory use of tiers. Each event contains its time, step and
-- phase.
--   ps.profiler.start(); ...; ps.profiler.stop(); ps.profiler.save("profile.json"); ps.profiler.report()
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local json = require("cjson").new()
local mesh = require "ps.dist.mesh"
local report = require "ps.profile.report"
local error = caller.error
local ffi, C = native.ffi, native.C

local profiler = {}

local EVENTS = 2 ^ 18           -- default capacity; an event needs 64 bytes; a small GPT-2 has thousands per step

--- Begins to record. This function can be called before ps.initialize. An earlier record is discarded.
---@param options? { events?: integer } events: maximum number of events in the record, which needs 64 bytes per event
---  (default 262144); if the record is full, each new event overwrites the oldest event
function profiler.start(options)
  options = caller.options(options, "ps.profiler.start", { events = "whole" })
  local events = tonumber(options.events or EVENTS)
  if events < 1 or events > C.PS_RECORD_MOST then
    error(("ps.profiler.start: events is %s; it must be 1 to %d"):format(events, C.PS_RECORD_MOST))
  end
  native.check(C.ps_record_start(events))
end

--- Stops recording and keeps the record.
---@return { name: string, calls: integer, seconds: number, flops: number, bytes: number }[] a row for each op with the
---  sums over all calls since the start, including calls whose events were overwritten; sorted by time, longest first
function profiler.stop()
  C.ps_record_settle(native.ctx)
  C.ps_record_stop()
  local total, rows = ffi.new("ps_record_total"), {}
  for op = 0, C.PS_OP_COUNT - 1 do
    native.check(C.ps_record_op_total(op, total))
    if total.calls > 0 then
      rows[#rows + 1] = { name = native.op_info[op].name, calls = tonumber(total.calls),
        seconds = tonumber(total.ns) * 1e-9,
        flops = tonumber(total.flops), bytes = tonumber(total.bytes) }
    end
  end
  table.sort(rows, function(a, b) return a.seconds > b.seconds end)
  return rows
end
profiler["end"] = profiler.stop                              -- PatrickStar calls it end, a reserved word in Lua

--- Writes the record to a file in Chrome's trace format, which Perfetto can open (docs/profiling.md). If there are
--- several ranks, each rank that calls this function writes its own file. The name of the file contains the rank:
--- profile.rank1.json. Not all ranks need to call this function, unless `align` is set.
---@param path string
---@param options? { align?: boolean } align = true: all ranks must call this function, and the times in all files are
---  by rank 0's clock. Otherwise the times are by the clock of each rank's machine
---@return string path the file that this rank wrote
function profiler.save(path, options)
  if type(path) ~= "string" then error("ps.profiler.save takes the name of a file, not a " .. type(path)) end
  options = caller.options(options, "ps.profiler.save", { align = "boolean" })
  local group = mesh.group "world"
  if group then
    local name, kind = path:match "^(.*[^/])(%.[^./]+)$"
    path = ("%s.rank%d%s"):format(name or path, group:rank(), kind or "")
  end
  local text = require "ps.profile.save"(options.align and group or nil)
  native.check(C.ps_file_write_atomic(path, text, #text))
  return path
end

---@class ps.profiler.Limits
---@field flops number|table<string, number> operations per second that a device reaches in matrix products: one number
---  for all dtypes, or a number for each dtype
---@field bytes number bytes per second that the device reads and writes

-- Checks the limits that a script has passed. Returns them with the names of dtypes that profiles use.
local function given(limits)
  local function above_0(x) return type(x) == "number" and x > 0 end
  local flops, ok = limits.flops, above_0(limits.bytes)
  if type(flops) == "table" then
    flops = {}
    for dtype, rate in pairs(limits.flops) do
      flops[native.dtype_name[native.dtype_code(dtype)]], ok = rate, ok and above_0(rate)
    end
  elseif not above_0(flops) then ok = false end
  if not ok then
    error("ps.profiler.report: limits needs flops (a number, or one for each type) and bytes, both per second and "
      .. "above 0")
  end
  return { flops = flops, bytes = limits.bytes }
end

-- Measures the limits of `device`. If `device` is nil, measures the device that computed the products in the profile.
-- If the limits cannot be measured, raises an error if the script asked for them, and otherwise returns nil and the
-- reason.
local function measured(profile, device, asked)
  local products = report.products(profile)
  asked = asked or device ~= nil
  device = device or products.device or native.device_name[0]
  if not (asked or pcall(native.device_index, device)) then return nil, "this machine has no device " .. device end
  local ok, found = pcall(require("ps.profile.speeds").limits, device, products.dtypes)
  if ok then return found end
  if asked or type(found) ~= "table" or found.name ~= "ENOMEM" then error(found, 0) end
  return nil, "no memory for it: " .. found.msg:match "^[^(;\n]*"
end

local OPTIONS = { by = "string", file = "string", against = "string", limits = "table boolean", device = "string",
  quiet = "boolean" }

--- Prints a table with a row for each op or module. The columns are, per step: time, operations per second, bytes per
--- second, the reached fraction of the machine's limit, waits and idle time. If a recording is running, it is stopped.
---@param options? { by?: "op"|"module", file?: string, against?: string, limits?: ps.profiler.Limits|boolean, device?:
---  string, quiet?: boolean } by: the rows are ops (default) or modules. file: a saved profile that is read in place of
---  the record. against: a saved profile with which the times are compared. limits: the limits of the machine, such as
---  `{ flops = { fp32 = 1e11, bf16 = 1e12 }, bytes = 1e11 }`. limits = true: measures the limits now, on `device`
---  (default: the device of the profile), for each dtype of the products in the profile; this needs 140 MiB. limits =
---  false: uses no limits. By default, the limits are measured if there is enough memory. quiet = true: prints nothing
---@return ps.profiler.Row[] rows that print as the table
function profiler.report(options)
  options = caller.options(options, "ps.profiler.report", OPTIONS)
  local by, limits = options.by or "op", options.limits
  if by ~= "op" and by ~= "module" then
    error(("ps.profiler.report: by is '%s'; it must be 'op' or 'module'"):format(by))
  end
  C.ps_record_settle(native.ctx)
  C.ps_record_stop()
  local profile = options.file and report.read(options.file) or json.decode(require "ps.profile.save"())
  local against = options.against and report.read(options.against)
  local lacking
  if (limits == nil or limits == true) and profile.psluajit.events ~= 0 then
    limits, lacking = measured(profile, options.device, limits)
  elseif type(limits) == "table" then limits = given(limits) end
  local rows = report.of(profile, by, type(limits) == "table" and limits or nil, against)
  if not options.quiet then
    print(tostring(rows))
    if lacking then print("the rows have no share of the machine's limit, since its speed was not measured: "
      .. lacking:gsub("%s+$", "") .. "; pass limits = { flops = ..., bytes = ... }, or limits = false") end
  end
  return rows
end

return profiler
