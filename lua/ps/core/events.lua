-- SPDX-License-Identifier: BSD-3-Clause
-- Reads the record of events, sorts the events by the time when they begin, and names their numeric fields.
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local ffi, C = native.ffi, native.C
local event_array = array "ps_record_event"

local events = {}

--- The names of the kinds of events. The keys are constants of ps.h.
events.kinds = { [C.PS_REC_OP] = "op", [C.PS_REC_MODULE] = "module", [C.PS_REC_STEP] = "step",
  [C.PS_REC_ACTION] = "action", [C.PS_REC_COPY] = "copy", [C.PS_REC_DISK] = "disk",
  [C.PS_REC_COLLECTIVE] = "collective", [C.PS_REC_WAIT] = "wait", [C.PS_REC_CHUNK] = "chunk",
  [C.PS_REC_TIER] = "memory", [C.PS_REC_DEVICE] = "memory", [C.PS_REC_PART] = "part" }
events.actions = { [C.PS_ACT_FORWARD] = "forward", [C.PS_ACT_BACKWARD] = "backward", [C.PS_ACT_INPUT] = "input",
  [C.PS_ACT_WEIGHT] = "weight", [C.PS_ACT_REDUCE] = "reduce", [C.PS_ACT_NORM] = "norm", [C.PS_ACT_UPDATE] = "update" }
events.waits = { [C.PS_WAIT_COPY] = "copy", [C.PS_WAIT_COLLECTIVE] = "collective", [C.PS_WAIT_MESSAGE] = "message" }
events.chunks = { [C.PS_CHUNK_ALLOCATE] = "allocate", [C.PS_CHUNK_MOVE] = "move", [C.PS_CHUNK_RELEASE] = "release",
  [C.PS_CHUNK_THERE] = "there" }

--- Returns a copy of the recorded events, and their order by the time when they begin. If two events begin at the same
--- time, the longer event is first.
---@return ffi.cdata* list ps_record_event[n]
---@return integer n
---@return integer[] order indices into the list, from 0
---@return integer dropped number of events that were recorded but lost
function events.read()
  C.ps_record_settle(native.ctx)
  local dropped = ffi.new("int64_t[1]")
  local most = tonumber(C.ps_record_count(dropped))
  local list, n = event_array(math.max(most, 1)), 0
  for i = 0, most - 1 do
    local rc = C.ps_record_get(i, list[n])
    native.check(rc)
    if rc == 0 then n = n + 1 end
  end
  local order = {}
  for i = 1, n do order[i] = i - 1 end
  table.sort(order, function(a, b)
    local x, y = list[a], list[b]
    if x.begin_ns ~= y.begin_ns then return x.begin_ns < y.begin_ns end
    if x.end_ns ~= y.end_ns then return x.end_ns > y.end_ns end
    return x.number < y.number
  end)
  return list, n, order, tonumber(dropped[0]) + most - n
end

return events
