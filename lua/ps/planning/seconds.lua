-- SPDX-License-Identifier: BSD-3-Clause
-- Computes how long a step takes on a machine, from the counts of a dry run and the speeds in the machine's table. Each
-- time is a range {least, most} of seconds. It is computed from the highest and the lowest fraction of a speed that is
-- assumed to be reached (`efficiency` in the machine's table). A step has three parts:
--
--   compute        The time of an op is the time for its operations or the time for its bytes, whichever is longer (the
--                  dry run counts both by ps_op_cost, including recomputation). Compute is the sum over all ops, plus
--                  the updates. For a pipeline, it is the duration of the simulated step, which includes the messages
--                  between stages, plus the updates. Messages between ranks that share layers are added to compute,
--                  because ops wait for these messages. The function `beside` computes the time of products whose rows
--                  are exchanged at the same time.
--   transfer       The time for the bytes over the slowest link between two tiers.
--   communication  The time for the bytes between the ranks along dp.
--
-- The parts overlap as far as the plan allows. So a step takes at least as long as the longest part, and at most as
-- long as the sum of all parts.
local course = require "ps.planning.course"
local optimizers = require "ps.optimizers"

local seconds = {}

-- Returns the seconds for an amount (of bytes or operations) at a speed, as a range {least, most}. `efficiency`
-- contains the lowest and the highest fraction of the speed that is reached.
local function range(amount, speed, efficiency)
  return { amount / (speed * efficiency[2]), amount / (speed * efficiency[1]) }
end

local function add(a, b) return { a[1] + b[1], a[2] + b[2] } end
local ZERO = { 0, 0 }
-- The speeds of a disk that was not measured. With 1 byte per second, the result is obviously wrong, which shows that
-- the speeds are missing.
local UNKNOWN = { read = 1, write = 1 }

-- Ops that may exchange the rows of their tensors with other ranks in pieces (src/tensor_parallel/linear.c).
local ROWS = { column_linear = true, row_linear = true, column_linear_grad = true }
local ADAM_NBYTES = 28                       -- number of bytes per parameter that Adam moves; the rates of Adam in a
                                             -- machine's table assume this number (rates.c)

-- Returns four results for the ops of a step:
-- 1. the seconds of all ops, except updates and ops that exchange rows in pieces
-- 2. the number of operations
-- 3. the seconds of the ops that exchange rows in pieces
-- 4. the number of bytes that the updates move
-- Returns nil if the machine's table does not contain a speed that is needed.
local function of_ops(t, result, list, pieces)
  local place, e = result.device == "cuda" and t.gpu or t.host, t.efficiency
  local sum, rows, flops, updates = ZERO, ZERO, 0, 0
  local speed = place and place.flops and place.flops[result.precision]
  if not speed or not place.bandwidth then return nil end
  for _, op in ipairs(list or {}) do
    flops = flops + op.flops
    local by_flops, by_bytes = range(op.flops, speed, e.compute), range(op.bytes, place.bandwidth, e.memory)
    local own = { math.max(by_flops[1], by_bytes[1]), math.max(by_flops[2], by_bytes[2]) }
    if optimizers.is_update(op.name) then updates = updates + op.bytes
    elseif pieces and ROWS[op.name] then rows = add(rows, own)
    else sum = add(sum, own) end
  end
  return sum, flops, rows, updates
end

-- Returns the seconds of updates that move `nbytes` bytes. They are assumed to take as long as updates of Adam that
-- move the same number of bytes. If the plan splits the updates between host and device, which work at the same time,
-- returns the longer of their two times.
local function of_updates(there, result, nbytes)
  local e = there.table.efficiency.memory
  local own = nbytes / ADAM_NBYTES
  local on_device = result.adam_split or (result.device == "cuda" and 0 or 1)
  local device = range(own * on_device, there.rates.device_adam, e)
  local host = range(own * (1 - on_device), there.rates.host_adam, e)
  return { math.max(device[1], host[1]), math.max(device[2], host[2]) }
end

-- Returns the total time of products and of an exchange of their rows in n pieces. The products alone take P seconds,
-- and the exchange alone takes X seconds. There are two cases. If the products read the exchanged rows, the products of
-- a piece begin after the piece has arrived. If the products compute the exchanged rows, a piece is sent after its
-- products have ended.
--
-- In both cases the exchange and the products form a pipeline of two stages. One stage takes X / n per piece, and the
-- other takes P / n per piece. The first piece passes both stages in X / n + P / n, and each further piece adds the
-- longer of the two times. The total is max(P, X) + min(P, X) / n. In reality the total is smaller, because the
-- products of a rank's own rows need not wait for the exchange.
local function beside(P, X, n)
  local out = {}
  for i = 1, 2 do out[i] = math.max(P[i], X[i]) + math.min(P[i], X[i]) / n end
  return out
end

-- Returns the speed of messages between ranks. If the ranks are on several machines (`apart`), this is the speed of the
-- network, or nil if the machine's table does not contain the speed of the network.
local function speed_between(t, apart)
  if apart then return t.network end
  return t.gpu and t.gpu.between or math.huge
end

-- Returns whether the ranks along an axis are on several machines of `here` ranks each. Ranks are numbered along tp
-- first, then along dp, then along pp.
local function apart(result, axis, here)
  local tp, dp, stages = result.tp or 1, result.world or 1, result.cut and result.cut.stages or 1
  if axis == "tp" then return tp > here end
  return tp * dp * (axis == "dp" and 1 or stages) > here
end

-- Returns three results for a rank. `run` contains the rank's ops, axes and pieces.
-- 1. the seconds of its ops, including messages to ranks that share its layers
-- 2. the number of operations
-- 3. the seconds of its updates
-- Returns nil if the machine's table does not contain a speed that is needed.
local function of_rank(there, result, run, here)
  local t, pieces = there.table, run.pieces
  local ops, flops, rows, updates = of_ops(t, result, run.ops, pieces)
  local nbytes = run.axes and run.axes.tp or 0
  local between = nbytes == 0 and math.huge or speed_between(t, apart(result, "tp", here))
  if not ops or not between then return nil end
  local in_pieces = pieces and pieces.nbytes or 0
  ops = add(ops, range(nbytes - in_pieces, between, t.efficiency.between))
  if pieces then ops = add(ops, beside(rows, range(in_pieces, between, t.efficiency.between), pieces.count)) end
  return ops, flops, of_updates(there, result, updates)
end

-- Returns three results for a pipeline. Returns nil if the machine's table does not contain a speed that is needed.
-- 1. the compute time, which is the duration of the simulated step with all messages, plus the updates of the stages
-- 2. the largest number of operations of a rank
-- 3. the bubble, as a range {least, most}
local function of_stages(there, result, here)
  local t, cut, least, most, flops, updates = there.table, result.cut, {}, {}, 0, ZERO
  for _, run in ipairs(result.runs) do
    local ops, done, own = of_rank(there, result, run, here)
    if not ops then return nil end
    updates, flops = { math.max(updates[1], own[1]), math.max(updates[2], own[2]) }, math.max(flops, done)
    for _, stage in ipairs(run.stands_for) do least[stage + 1], most[stage + 1] = ops[1], ops[2] end
  end
  local between, e = speed_between(t, apart(result, "pp", here)), t.efficiency.between
  if not between then return nil end
  local function rate(share) return between < math.huge and between * share or 0 end
  local fast = course.seconds(cut, least, result.recompute, rate(e[2]))
  local slow = course.seconds(cut, most, result.recompute, rate(e[1]))
  return add({ fast.makespan, slow.makespan }, updates), flops,
    { math.min(fast.bubble, slow.bubble), math.max(fast.bubble, slow.bubble) }
end

local function compute_of(there, result, here)
  if result.cut then return of_stages(there, result, here) end
  local ops, flops, updates = of_rank(there, result, result, here)
  if not ops then return nil end
  return add(ops, updates), flops
end

--- Returns the times of a step in seconds, as ranges {least, most}. Returns nil if the machine's table does not contain
--- a speed that is needed.
---@param there ps.planning.Hardware
---@param result ps.planning.Result the result of the step's dry run
---@param here integer number of ranks on one machine
---@return {compute: number[], transfer: number[], communication: number[], step: number[], bubble?: number[], flops:
---  number, lines: string[]}?
function seconds.of(there, result, here)
  local t = there.table
  if t.memory_alone then return nil end
  local compute, flops, bubble = compute_of(there, result, here)
  local between = speed_between(t, apart(result, "dp", here))
  if not compute or not between then return nil end
  local e, transfer, slowest = t.efficiency, ZERO, nil
  for _, link in ipairs(result.links) do
    local to_disk = link.lower == "disk"
    local up, down = t.links.up, t.links.down
    if to_disk then up, down = (t.disk or UNKNOWN).read, (t.disk or UNKNOWN).write end
    local one = range(math.max(link.up / up, link.down / down), 1, to_disk and e.disk or e.links)
    if one[2] > transfer[2] then transfer, slowest = one, link end
  end
  local communication = range(result.axes and result.axes.dp or 0, between, e.between)
  local step = { math.max(compute[1], transfer[1], communication[1]),
    compute[2] + transfer[2] + communication[2] }
  local function text(r) return ("%.3g to %.3g"):format(r[1], r[2]) end
  local lines = { ("seconds per step: %s (compute %s, transfer %s%s, communication %s)"):format(
    text(step), text(compute),
    text(transfer), slowest and (" over %s - %s"):format(slowest.upper, slowest.lower) or "", text(communication)),
    ("  %.4g TFLOP per step and rank; reached speeds, %s: %d to %d %% of compute, %d to %d %% of memory, "
      .. "%d to %d %% of links"):format(flops / 1e12, t.measured and "measured" or "assumed",
      100 * e.compute[1], 100 * e.compute[2], 100 * e.memory[1], 100 * e.memory[2], 100 * e.links[1],
      100 * e.links[2]) }
  return { compute = compute, transfer = transfer, communication = communication, step = step, flops = flops,
    bubble = bubble, lines = lines }
end

return seconds
