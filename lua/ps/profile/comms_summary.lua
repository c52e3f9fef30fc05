-- SPDX-License-Identifier: BSD-3-Clause
-- Adds up the times of calls between ranks, such as all_reduce (src/comm/count.c), for the section comms_logger of a
-- configuration. The result has the form of DeepSpeed's table. ps.comms_logger.log_summary() prints the table, and
-- ps.comms_logger.log_rows() returns its rows.
local native = require "ps.core.ffi"
local call_names = require "ps.core.call_names"
local readable = require "ps.core.readable"
local dist = require "ps.dist"
local ffi, C = native.ffi, native.C

local comm = {}

---@class ps.comm.Row
---@field op string name of the call and the axis of its group, such as "all_reduce of tp"
---@field bytes number size in bytes of the whole tensor of one call
---@field ranks integer number of ranks of the group
---@field count integer
---@field seconds number total time of all calls. The time of a call begins when this rank starts the call, so it
---  includes the time in which this rank waits for other ranks
---@field algbw number bytes per second of all calls: bytes * count / seconds
---@field busbw number bytes per second over each link, as in NCCL's tests: algbw * 2 * (n - 1) / n for an all-reduce of
---  n ranks, algbw * (n - 1) / n for a gather or a reduce-scatter, and algbw for other calls

-- Returns a table from the name of each call that can be recorded to its index.
local function numbers()
  local list, number = {}, 0
  while C.ps_record_call_name(number) ~= nil do
    list[ffi.string(C.ps_record_call_name(number))], number = number, number + 1
  end
  return list
end

--- Begins to count the calls that a configuration's comms_logger selects.
---@param settings ps.config.CommsLogger
---@param prints boolean whether this rank prints each call when the call ends; if settings.verbose is false, no rank
---  prints calls
function comm.begin(settings, prints)
  local set, number = 0, numbers()
  for _, call in pairs(number) do set = settings.prof_all and bit.bor(set, bit.lshift(1, call)) or set end
  for _, name in ipairs(settings.prof_ops or {}) do
    for _, call in ipairs(call_names[name]) do set = bit.bor(set, bit.lshift(1, number[call])) end
  end
  C.ps_calls_count(set, settings.verbose and prints and 1 or 0)
end

--- Stops counting. The sums are kept until the next comm.begin.
function comm.stop() C.ps_calls_count(0, 0) end

local function gbps(bytes_a_second) return ("%.2f"):format(bytes_a_second * 8e-9) end

local Summary = {}
function Summary.__tostring(rows)
  if #rows == 0 then return "comms_logger: no call between ranks was counted" end
  local lines = {}
  for i, row in ipairs(rows) do
    lines[i] = { row.op, readable.bytes(row.bytes), tostring(row.count), ("%.2f"):format(row.seconds * 1e3),
      ("%.3f"):format(row.seconds * 1e3 / row.count), gbps(row.algbw), gbps(row.busbw) }
  end
  return table.concat(readable.lines({ { title = "Comm. Op", left = true }, { title = "Message Size" },
    { title = "Count" },
    { title = "Total Latency(ms)" }, { title = "Avg Latency(ms)" }, { title = "algbw (Gbps)" },
    { title = "busbw (Gbps)" } }, lines), "\n")
end

--- Returns the total times of calls between ranks so far. There is a row for each call and each size of its tensor. The
--- section comms_logger of the configuration selects the calls. Each rank counts only its own calls.
---@return ps.comm.Row[] rows that print as DeepSpeed's table
function comm.log_rows()
  local rows, sum = {}, ffi.new "ps_calls_total"
  while C.ps_calls_total_get(#rows, sum) == 0 do
    local axis, seconds = ffi.string(sum.axis), math.max(tonumber(sum.ns), 1) * 1e-9
    local rate = tonumber(sum.nbytes) * tonumber(sum.calls) / seconds
    rows[#rows + 1] = { op = ffi.string(C.ps_record_call_name(sum.name)) .. (axis ~= "" and " of " .. axis or ""),
      bytes = tonumber(sum.nbytes), ranks = sum.ranks, count = tonumber(sum.calls), seconds = seconds, algbw = rate,
      busbw = rate * C.ps_calls_bus(sum.name, sum.ranks) }
  end
  table.sort(rows, function(a, b)
    if a.op ~= b.op then return a.op < b.op end
    if a.bytes ~= b.bytes then return a.bytes < b.bytes end
    return a.ranks < b.ranks
  end)
  return setmetatable(rows, Summary)
end

--- Returns the rows of ps.comms_logger.log_rows. On rank 0, also prints the rows as DeepSpeed's table. Other ranks need
--- not call this function.
---@return ps.comm.Row[] rows that print as the table
function comm.log_summary()
  local rows = comm.log_rows()
  if dist.rank() == 0 then
    io.stdout:write(tostring(rows), "\n")
    io.stdout:flush()
  end
  return rows
end

return comm
