-- SPDX-License-Identifier: BSD-3-Clause
-- Aligns the clocks of ranks, for ps.profiler.save. Computes the offset between this rank's clock and rank 0's clock.
-- The sum of the offset and a time of this rank's clock is the same time by rank 0's clock.
--
-- The algorithm is from Cristian 1989, "Probabilistic clock synchronization". A rank sends a question to rank 0, and
-- rank 0 answers with the time of its clock. Rank 0 reads its clock at some time between the sending of the question
-- and the arrival of the answer. The asking rank assumes that this time is the midpoint, so the error is at most half
-- of the round trip. Each rank asks several times and uses the answer with the shortest round trip. Ranks ask one after
-- the other.
local native = require "ps.core.ffi"
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local C = native.C

local clock = {}

local TRIPS = 16  -- number of questions per rank; before the first answer, rank 0 may still be answering another rank
local SECOND = 1000000000LL

-- Returns a time as a tensor [2] of whole seconds and nanoseconds. A single fp64 number does not have enough digits for
-- a time in nanoseconds.
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

-- Each rank passes a time of rank 0's clock, or nil. Returns the earliest of these times, or nil if all ranks passed
-- nil.
local function least(group, ns)
  local origin = group:broadcast(told(C.ps_record_clock()), 0)
  local zero = time_of(origin)
  local since = create.tensor({ ns and tonumber(ns - zero) or math.huge }, { dtype = "fp64", device = "cpu" })
  group:all_reduce(since, "min")
  local first = since:item()
  return first < math.huge and zero + first or nil
end

--- Aligns this rank's clock with rank 0's clock. All ranks must call this function. All times are int64_t, in
--- nanoseconds.
---@param group ps.Group
---@param first? ffi.cdata* time of this rank's first event by its own clock, or nil if this rank has no events
---@return ffi.cdata* offset the number to add to a time of this rank's clock
---@return ffi.cdata* wrong the largest possible error of the offset
---@return ffi.cdata* zero time of the first event of all ranks by rank 0's clock, or 0 if there are no events
function clock.align(group, first)
  return scope.no_grad(scope.scope, function()
    local offset, wrong = (group:rank() == 0 and tell or ask)(group)
    return offset, wrong, least(group, first and first + offset) or 0LL
  end)
end

return clock
