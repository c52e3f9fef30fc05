-- SPDX-License-Identifier: BSD-3-Clause
-- Compares two numbers for a step that is repeated: the bytes that each of the planner's policies moves, and a lower
-- bound for the same trace and budget (bench/bound_lib.lua). The traces are shaped like training steps. Only plans are
-- made. There are no tensors.
--   psluajit bench/plan_bound.lua --chunks 64 --ahead 2
-- The last line is one JSON object. plan_over_bound, belady_over_bound, lru_over_bound and fifo_over_bound are the
-- values for the worst case of each policy. plan_ms is the median time in which the policy `plan` makes a plan, in the
-- slowest case.
local ffi = require "ffi"
local ps = require "ps"
local cjson = require "cjson"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole
local bound = require "bench.bound_lib"
local C = ps.C

local parser = argparse("bench/plan_bound.lua", "Compares eviction policies with a lower bound.")
whole(parser:option("--chunks", "chunks of parameters", "64"), 1)
whole(parser:option("--ahead", "read-ahead, in chunks of parameters", "2"), 0)
parser:option("--shape", "only this trace")
command_line.number(parser:option("--seconds", "seconds that the solver may take for one case", "120"), 0)
local args = command_line.parse(parser)

local MIB = 2 ^ 20
local WARM_UP, ROUNDS = 8, 60
local POLICIES = require "ps.config.policies"

--- Returns a recorder of a trace. chunk(bytes) creates a chunk. op{...} adds a moment that uses chunks. In op, a chunk
--- that is written is passed as { write = chunk }.
local function recorder()
  local trace = { sizes = {}, uses = {}, moments = 0 }
  function trace.chunk(nbytes)
    trace.sizes[#trace.sizes + 1] = nbytes
    return #trace.sizes
  end
  function trace.op(list)
    for _, entry in ipairs(list) do
      local write = type(entry) == "table"
      table.insert(trace.uses, { moment = trace.moments, chunk = write and entry.write or entry, write = write })
    end
    trace.moments = trace.moments + 1
  end
  return trace
end

--- Returns the trace of a step of a model with options.n chunks of parameters. The model's tied embedding is
--- options.embedding times as large as a chunk.
---@param options { n: integer, embedding: number, half: boolean, adam: string, micro: integer }
local function step(options)
  local trace = recorder()
  local size = 32 * MIB
  local half, units = options.half, {}
  for i = 0, options.n do
    local nbytes = i == 0 and options.embedding * size or size
    local unit = { param = trace.chunk(nbytes), state = {} }
    for k = 1, half and 3 or 2 do unit.state[k] = trace.chunk(half and 2 * nbytes or nbytes) end
    unit.grad = options.micro > 1 and trace.chunk(half and 2 * nbytes or nbytes) or nil
    units[i] = unit
  end
  local function adam(unit)
    local list = { { write = unit.param } }
    for _, chunk in ipairs(unit.state) do list[#list + 1] = { write = chunk } end
    list[#list + 1] = unit.grad
    trace.op(list)
  end
  for micro = 1, options.micro do
    trace.op { units[0].param }
    for i = 1, options.n do
      for _ = 1, 3 do trace.op { units[i].param } end
      if i < options.n then trace.op { units[i].param, units[i + 1].param } end      -- for a layer that spans two
                                                                                     -- chunks
    end
    trace.op { units[0].param }
    local function backward(unit)
      trace.op { unit.param, unit.grad and { write = unit.grad } }
    end
    backward(units[0])
    for i = options.n, 1, -1 do
      for _ = 1, 3 do backward(units[i]) end
      if not units[i].grad then trace.op { { write = units[i].param } } end  -- the gradient replaces the parameter
      if options.adam == "overlapped" and micro == options.micro then adam(units[i]) end
    end
    if units[0].grad then backward(units[0]) else trace.op { { write = units[0].param } } end
  end
  if options.adam == "overlapped" then
    adam(units[0])
  else
    local first, last, by = 0, options.n, 1
    if options.adam == "backward" then first, last, by = last, first, -1 end
    for i = first, last, by do adam(units[i]) end
  end
  return trace
end

local n = args.chunks
local SHAPES = {
  { "Adam afterwards, in order", step { n = n, embedding = 4, half = true, adam = "forward", micro = 1 } },
  { "adam after, reversed", step { n = n, embedding = 4, half = true, adam = "backward", micro = 1 } },
  { "adam overlapped", step { n = n, embedding = 4, half = true, adam = "overlapped", micro = 1 } },
  { "two micro-batches", step { n = n, embedding = 2, half = true, adam = "forward", micro = 2 } },
  { "fp32", step { n = n, embedding = 3, half = false, adam = "overlapped", micro = 1 } },
}

--- Returns the number of bytes that a step moves after the first steps, and the median milliseconds for planning. The
--- number of bytes is the mean over many steps, because the resident chunks can differ between steps. Each step is
--- planned from the tiers on which the chunks are at the end of the previous step.
local function moved(trace, capacity, policy)
  local count = #trace.sizes
  local chunks = ffi.new("ps_plan_chunk[?]", count)
  for i, nbytes in ipairs(trace.sizes) do chunks[i - 1].nbytes, chunks[i - 1].valid = nbytes, 2 end
  local uses = ffi.new("ps_use[?]", #trace.uses)
  for i, use in ipairs(trace.uses) do
    uses[i - 1].moment, uses[i - 1].chunk, uses[i - 1].write = use.moment, use.chunk - 1, use.write and 1 or 0
  end
  local number, bad = ffi.new("int[1]"), ffi.new("int32_t[1]")
  assert(C.ps_policy_find(policy, number) == 0)
  local input = ffi.new("ps_plan_input", { n_tiers = 2, n_chunks = count, n_uses = #trace.uses,
    n_moments = trace.moments, chunks = chunks, uses = uses, policy = number[0], cyclic = 1 })
  input.capacity[0], input.ahead[0] = capacity, args.ahead * 32 * MIB
  local plan, bytes, seconds = ffi.new("ps_plan"), 0, {}
  for round = 1, WARM_UP + ROUNDS do
    local t = ps.now()
    if C.ps_plan_make(input, plan, bad) ~= 0 then error(ffi.string(C.ps_error_message()), 0) end
    seconds[round] = ps.now() - t
    if round > WARM_UP then bytes = bytes + tonumber(plan.fetched[0] + plan.evicted[0]) end
    for c = 0, count - 1 do chunks[c].valid = plan.valid_after[c] end
    C.ps_plan_clear(plan)
  end
  table.sort(seconds)
  return bytes / ROUNDS, seconds[math.floor(#seconds / 2)] * 1000
end

local solver = bound.available()
if not solver then print("no glpsol (Debian: glpk-utils): no lower bound") end
local worst, longest = {}, 0
print(("%-22s %8s %10s  %s"):format("step", "budget", "bound", "bytes moved over the bound: " ..
  table.concat(POLICIES, ", ")))
for _, shape in ipairs(SHAPES) do
  local name, trace = shape[1], shape[2]
  local total = 0
  for _, nbytes in ipairs(trace.sizes) do total = total + nbytes end
  for _, part in ipairs(args.shape and args.shape ~= name and {} or { 0.2, 0.35, 0.5, 0.7, 0.85 }) do
    local capacity = math.floor(total * part)
    local least = solver and bound.solve(trace, capacity, args.seconds)
    local line = {}
    for i, policy in ipairs(POLICIES) do
      local bytes, ms = moved(trace, capacity, policy)
      if policy == "plan" then longest = math.max(longest, ms) end
      if least then worst[policy] = math.max(worst[policy] or 0, bytes / least) end
      line[i] = least and ("%.4f"):format(bytes / least) or ("%.0f MiB"):format(bytes / MIB)
    end
    print(("%-22s %7.0fM %9s  %s"):format(name, capacity / MIB, least and ("%.0fM"):format(least / MIB) or "-",
      table.concat(line, "  ")))
  end
end
local result = { plan_ms = longest }
for policy, ratio in pairs(worst) do result[policy .. "_over_bound"] = ratio end
print(cjson.encode(result))
