-- SPDX-License-Identifier: BSD-3-Clause
-- Aligns the clocks of ranks, for ps.profiler.save. Computes the offset between the clock of this rank and that of rank
-- 0. Adding the offset to this rank's time gives rank 0's time.
--
-- The algorithm is that of Cristian 1989, "Probabilistic clock synchronization". A rank sends a question to rank 0, and
-- rank 0 answers with its time. Rank 0 has read this time between the question and the arrival of the answer. The rank
-- assumes that this happened at the midpoint, so the error is at most half of the round trip. Each rank asks several
-- times, one rank after the other. The shortest round trip is used.
local native = require "ps.core.ffi"
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local C = native.C

local clock = {}

local TRIPS = 16  -- number of round trips; the first one also waits for the previous ranks
local SECOND = 1000000000LL

-- Returns a time as a tensor [2] of whole seconds and nanoseconds. A single fp64 number could not represent a time to
-- the nanosecond.
local function told(ns)
  return create.tensor({ tonumber(ns / SECOND), tonumber(ns % SECOND) }, { dtype = "fp64", device = "cpu" })
end

local function time_of(t) return SECOND * t[0]:item() + t[1]:item() end

local function tell(group)
  for rank = 1, group:size() - 1 do
    local question = told(0LL)
    for _ = 1, TRIPS do
      group:recv(question, rank)
      group:send(told(C.ps_record_clock()), rank)
    end
  end
  return 0LL, 0LL
end

local function ask(group)
  local question, answer = told(0LL), told(0LL)
  local offset, shortest
  for _ = 1, TRIPS do
    local began = C.ps_record_clock()
    group:send(question, 0)
    group:recv(answer, 0)
    local took = C.ps_record_clock() - began
    if not shortest or took < shortest then offset, shortest = time_of(answer) - (began + took / 2), took end
  end
  return offset, (shortest + 1) / 2
end

-- Returns the earliest of the times of all ranks, by rank 0's clock. Returns nil if no rank has a time.
local function least(group, ns)
  local origin = group:broadcast(told(C.ps_record_clock()), 0)
  local zero = time_of(origin)
  local since = create.tensor({ ns and tonumber(ns - zero) or math.huge }, { dtype = "fp64", device = "cpu" })
  group:all_reduce(since, "min")
  local first = since:item()
  return first < math.huge and zero + first or nil
end

--- Aligns this rank's clock with that of rank 0. All ranks must call this function.
---@param group ps.Group
---@param first? ffi.cdata* int64_t with this rank's first event in nanoseconds of its own clock, or nil if it has none
---@return ffi.cdata* offset int64_t with the nanoseconds to add to this rank's clock
---@return ffi.cdata* wrong int64_t with the largest error of the offset in nanoseconds
---@return ffi.cdata* zero int64_t with the first event of all ranks in nanoseconds of rank 0's clock, or 0
function clock.align(group, first)
  return scope.no_grad(scope.scope, function()
    local offset, wrong = (group:rank() == 0 and tell or ask)(group)
    return offset, wrong, least(group, first and first + offset) or 0LL
  end)
end

return clock
