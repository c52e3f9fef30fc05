-- SPDX-License-Identifier: BSD-3-Clause
-- Tables of pipelines (src/pipe, docs/pipeline.md). A table has the actions of each rank in a step of a model that is
-- split into virtual stages. Ranks, virtual stages and micro-batches are counted from 0. In a Lua list, the item with
-- number 0 has index 1.
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local ffi, C = native.ffi, native.C

local pipe = {}

---@class ps.pipe.Table
---@field c ffi.cdata* ps_pipe_table
---@field schedule string
---@field stages integer number of ranks
---@field virtual_stages integer number of virtual stages on each rank
---@field vstages integer number of virtual stages of the whole model
---@field micro_batches integer number of micro-batches of a step
---@field forward_only boolean
local Table = {}
Table.__index = Table

---@class ps.pipe.Spec
---@field schedule string
---@field stages integer
---@field virtual_stages? integer number of virtual stages on each rank (default 1, and 2 for zb_v)
---@field micro_batches integer
---@field forward_only? boolean whether the table is for an evaluation

---@class ps.pipe.Action
---@field kind string "F", "B", "I" or "W". Lowered tables also have "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE"
--- and "YIELD"
---@field vstage integer
---@field micro integer

---@class ps.pipe.Cost costs of a virtual stage, or of a part of a model, for one micro-batch
---@field forward? number time of a forward
---@field input? number time of the gradient of the input
---@field weight? number time of the gradients of the weights
---@field reduce? number time to reduce the gradients of the stage or part, once per step, in a lowered table
---@field nbytes? integer size in bytes of the stage's or part's output, and of the output's gradient
---@field held? integer number of bytes that are kept from forward to backward
---@field waiting? integer number of bytes that are kept from I to W

---@class ps.pipe.CutTimes
---@field makespan number simulated time of a step with this cut
---@field equal number simulated time of a step whose virtual stages have equal numbers of parts
---@field bound number lower bound of the time over all possible cuts
---@field bound_part integer? index, counted from 1, of the part that determines the bound; nil if all parts together
--- determine it

---@class ps.pipe.Link
---@field latency? number latency of a message, in the unit of time that the costs have
---@field rate? number number of bytes per unit of time; 0 if transfers take no time
---@field depth? integer number of messages that a link can queue; 0 if there is no limit

---@class ps.pipe.Course
---@field makespan number time of the whole step
---@field bubble number fraction of the ranks' time in which they are idle
---@field ranks {first: number, last: number, busy: number, peak: integer}[]
---@field spans {begin: number, finish: number}[][] for each rank, the times of its actions

local KINDS = { [C.PS_ACT_FORWARD] = "F", [C.PS_ACT_BACKWARD] = "B", [C.PS_ACT_INPUT] = "I", [C.PS_ACT_WEIGHT] = "W",
  [C.PS_ACT_SEND_F] = "SEND_F", [C.PS_ACT_RECV_F] = "RECV_F", [C.PS_ACT_SEND_B] = "SEND_B",
  [C.PS_ACT_RECV_B] = "RECV_B", [C.PS_ACT_REDUCE] = "REDUCE", [C.PS_ACT_YIELD] = "YIELD" }
local SPEC = { schedule = "string", stages = "whole", virtual_stages = "whole", micro_batches = "whole",
  forward_only = "boolean" }
local COST = { forward = "number", input = "number", weight = "number", reduce = "number", nbytes = "whole",
  held = "whole", waiting = "whole" }
local LINK = { latency = "number", rate = "number", depth = "whole" }

local cost_array, count_array, text_array = array "ps_pipe_cost", array "int32_t", array "char"
local times_array, span_array = array "ps_pipe_rank_times", array "ps_pipe_span"
local list_array = array "ps_pipe_span *"
local table_out, row_out, int_out = ffi.new "ps_pipe_table *[1]", ffi.new "const ps_action *[1]", ffi.new "int32_t[2]"

local function adopt(c)
  local spec = C.ps_pipe_table_spec(c)
  return setmetatable({ c = ffi.gc(c, C.ps_pipe_table_free),
    schedule = ffi.string(C.ps_pipe_schedule_name(spec.schedule)), stages = spec.stages,
    virtual_stages = spec.virtual_stages, vstages = spec.vstages, micro_batches = spec.micro_batches,
    forward_only = spec.forward_only == 1 }, Table)
end

--- Returns the table of a schedule. The schedules are gpipe, 1f1b, interleaved, looped_bfs, zb_h1 and zb_v.
---@param options ps.pipe.Spec
---@return ps.pipe.Table
function pipe.table(options)
  options = caller.options(options, "pipe.table", SPEC)
  native.check(C.ps_pipe_schedule_find(caller.typed(options.schedule, "string", "pipe.table: schedule"), int_out))
  local spec = ffi.new("ps_pipe_spec")
  spec.schedule = int_out[0]
  spec.stages = caller.typed(options.stages, "number", "pipe.table: stages")
  spec.virtual_stages = options.virtual_stages or (options.schedule == "zb_v" and 2 or 1)
  spec.micro_batches = caller.typed(options.micro_batches, "number", "pipe.table: micro_batches")
  spec.forward_only = options.forward_only and 1 or 0
  native.check(C.ps_pipe_table_new(spec, table_out))
  return adopt(table_out[0])
end

--- Reads a table from a text in PyTorch's form.
---@param text string
---@param name? string name of the file, for messages
---@return ps.pipe.Table
function pipe.read(text, name)
  caller.typed(text, "string", "pipe.read: the text")
  native.check(C.ps_pipe_table_read(text, #text, name or "the table", table_out))
  return adopt(table_out[0])
end

--- Returns the table as a text in PyTorch's form.
---@param all? boolean whether to include the transfers, reductions and yields of a lowered table
---@return string
function Table:text(all)
  local plain = all and 0 or 1
  local n = tonumber(C.ps_pipe_table_write(self.c, plain, nil, 0))
  local out = text_array(n)
  C.ps_pipe_table_write(self.c, plain, out, n)
  return ffi.string(out)
end

--- Returns the actions of a rank, in order.
---@param rank integer
---@return ps.pipe.Action[]
function Table:row(rank)
  native.check(C.ps_pipe_table_row(self.c, rank, row_out, int_out))
  local list, row = {}, row_out[0]
  for i = 0, int_out[0] - 1 do
    list[i + 1] = { kind = KINDS[row[i].kind], vstage = row[i].vstage, micro = row[i].micro }
  end
  return list
end

--- Returns the rank that runs a virtual stage, and the stage's index among that rank's virtual stages.
---@param vstage integer
---@return integer rank
---@return integer index
function Table:place(vstage)
  native.check(C.ps_pipe_table_place(self.c, vstage, int_out, int_out + 1))
  return int_out[0], int_out[1]
end

--- Returns the largest number of (virtual stage, micro-batch) pairs that a rank holds at the same time. The first
--- result counts the pairs between their forward and their backward. The second result counts the pairs between
--- I and W.
---@param rank integer
---@return integer in_flight
---@return integer waiting
function Table:held(rank)
  local held = ffi.new("ps_pipe_held")
  native.check(C.ps_pipe_table_held(self.c, rank, held))
  return held.in_flight, held.waiting
end

--- Inserts transfers, reductions and yields between the actions.
---@return ps.pipe.Table self
function Table:lower()
  native.check(C.ps_pipe_table_lower(self.c))
  return self
end

-- Converts costs to C structs. `costs` is one cost for all n virtual stages or parts, or a list of n costs.
local function costs_of(costs, n, call)
  if costs == nil then return nil end
  local out = cost_array(n)
  for i = 1, n do
    local cost = caller.options(costs[1] == nil and costs or costs[i], call, COST)
    for name, value in pairs(cost) do out[i - 1][name] = value end
  end
  return out
end

local function link_of(link, call)
  if link == nil then return nil end
  local out = ffi.new("ps_pipe_link")
  for name, value in pairs(caller.options(link, call, LINK)) do out[name] = value end
  return out
end

--- Simulates a step. The times of the actions are computed from costs.
---@param costs? ps.pipe.Cost|ps.pipe.Cost[] one cost for all virtual stages, or a list with one cost for each virtual
--- stage (default: F, I and W each take 1)
---@param link? ps.pipe.Link (default: transfers take no time)
---@return ps.pipe.Course
function Table:simulate(costs, link)
  local times, ranks, lists, spans = ffi.new("ps_pipe_times"), times_array(self.stages), list_array(self.stages), {}
  for rank = 0, self.stages - 1 do
    native.check(C.ps_pipe_table_row(self.c, rank, row_out, int_out))
    spans[rank] = span_array(int_out[0])
    lists[rank] = spans[rank]
  end
  native.check(C.ps_pipe_simulate(self.c, costs_of(costs, self.vstages, "Table:simulate"),
    link_of(link, "Table:simulate"), times, ranks, lists))
  local course = { makespan = times.makespan, bubble = times.bubble, ranks = {}, spans = {} }
  for rank = 0, self.stages - 1 do
    local r, list = ranks[rank], {}
    course.ranks[rank + 1] = { first = r.first, last = r.last, busy = r.busy, peak = tonumber(r.peak) }
    native.check(C.ps_pipe_table_row(self.c, rank, row_out, int_out))
    for i = 0, int_out[0] - 1 do list[i + 1] = { begin = spans[rank][i].begin, finish = spans[rank][i]["end"] } end
    course.spans[rank + 1] = list
  end
  return course
end

--- Splits a model into the virtual stages of a table such that the simulated time of a step is as short as possible.
---@param t ps.pipe.Table
---@param parts ps.pipe.Cost[] the costs of the model's parts, in order
---@param link? ps.pipe.Link
---@return integer[] counts number of parts in each virtual stage
---@return ps.pipe.CutTimes times
function pipe.cut(t, parts, link)
  local n, times = #caller.typed(parts, "table", "pipe.cut: the parts"), ffi.new("ps_pipe_cut_times")
  local counts, list = count_array(t.vstages), {}
  native.check(C.ps_pipe_cut(t.c, costs_of(parts, n, "pipe.cut"), n, link_of(link, "pipe.cut"), counts, times))
  for v = 0, t.vstages - 1 do list[v + 1] = counts[v] end
  return list, { makespan = times.makespan, equal = times.equal, bound = times.bound,
    bound_part = times.bound_part >= 0 and times.bound_part + 1 or nil }
end

--- Reads a cut in the form of Megatron's layout. An example is pipe.layout("Et*3|(tt|)*29,m|L", kinds, 32).
---@param layout string
---@param kinds string one letter for each part of the model
---@param vstages integer
---@return integer[] counts number of parts in each virtual stage
function pipe.layout(layout, kinds, vstages)
  caller.typed(layout, "string", "pipe.layout: the layout")
  caller.typed(kinds, "string", "pipe.layout: the parts' letters")
  caller.typed(vstages, "number", "pipe.layout: the virtual stages")
  local counts, list = count_array(math.max(vstages, 1)), {}
  native.check(C.ps_pipe_layout(layout, kinds, vstages, counts))
  for v = 0, vstages - 1 do list[v + 1] = counts[v] end
  return list
end

return pipe
