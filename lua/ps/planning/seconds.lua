-- SPDX-License-Identifier: BSD-3-Clause
-- Computes the seconds of a step and of its parts, from the counts of a dry run and the speeds of a machine. For a
-- simulated machine, each time is a range. The range follows from the lowest and the highest fraction of the machine's
-- speeds that is assumed to be reached (`efficiency` in the machine's table).
--
-- Compute: for each op (ps_op_cost as counted in the dry run, with recomputation), the time is that of its operations
-- or that of its bytes, whichever is longer. Compute is the sum over all ops plus the updates. For a pipeline, it is
-- the simulated step of the stages, with the messages between them, plus the updates. Messages between ranks that share
-- layers count as compute, because compute waits for them. The function `beside` computes the time of rows that are
-- exchanged during products.
--
-- Transfer is the time for the bytes over each link. Communication is the time for the bytes between the ranks along
-- dp. The parts overlap as far as the plan allows. So a step takes at least the longest part, and at most the sum of
-- all parts.
local course = require "ps.planning.course"
local optimizers = require "ps.optimizers"

local seconds = {}

-- Returns the range {least, most} of seconds for an amount at a speed. `efficiency` is the range of the fraction of the
-- speed that is reached.
local function range(amount, speed, efficiency)
  return { amount / (speed * efficiency[2]), amount / (speed * efficiency[1]) }
end

local function add(a, b) return { a[1] + b[1], a[2] + b[2] } end
local ZERO = { 0, 0 }
-- The speeds of a disk that was not measured. They are 1 byte per second, so that the result shows that a speed is
-- missing.
local UNKNOWN = { read = 1, write = 1 }

-- Ops whose rows may be exchanged in pieces (src/tensor_parallel/linear.c).
local ROWS = { column_linear = true, row_linear = true, column_linear_grad = true }
local ADAM_NBYTES = 28                       -- bytes per parameter that Adam moves, assumed by a table's rates
                                             -- (rates.c)

-- Returns four results for the ops of a step. First, the seconds of all ops except updates and ops whose rows are
-- exchanged in pieces. Second, the number of operations. Third, the seconds of the ops whose rows are exchanged in
-- pieces. Fourth, the number of bytes of the updates. Returns nil if the table lacks a speed.
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

-- Returns the seconds of the updates, which move `nbytes` bytes. They are in proportion to Adam's rate and bytes. If
-- the plan splits the updates between host and device, returns the longer of the two times, because both work at the
-- same time.
local function of_updates(there, result, nbytes)
  local e = there.table.efficiency.memory
  local own = nbytes / ADAM_NBYTES
  local on_device = result.adam_split or (result.device == "cuda" and 0 or 1)
  local device = range(own * on_device, there.rates.device_adam, e)
  local host = range(own * (1 - on_device), there.rates.host_adam, e)
  return { math.max(device[1], host[1]), math.max(device[2], host[2]) }
end

-- Returns the time of products that take P seconds if their rows are exchanged in n pieces. The exchange takes X
-- seconds. The products of a piece begin after the piece has arrived. If the products compute the rows that are sent, a
-- piece is sent after its products have ended.
--
-- In both cases the exchange and the products are a pipeline of two stages, with n steps of X / n and n steps of P / n.
-- The first piece passes both stages in X / n + P / n, and each further piece takes the longer of the two. The total is
-- max(P, X) + min(P, X) / n. In reality, a rank's own rows, which are a fraction of P, need not wait, so the total is
-- smaller.
local function beside(P, X, n)
  local out = {}
  for i = 1, 2 do out[i] = math.max(P[i], X[i]) + math.min(P[i], X[i]) / n end
  return out
end

-- Returns the speed of messages between ranks. If the ranks are on several machines, it is the speed of the network.
-- Returns nil if the table lacks this speed.
local function speed_between(t, apart)
  if apart then return t.network end
  return t.gpu and t.gpu.between or math.huge
end

-- Returns whether the ranks of an axis are on several machines. Ranks are numbered along tp first, then along dp, then
-- along pp.
local function apart(result, axis, here)
  local tp, dp, stages = result.tp or 1, result.world or 1, result.cut and result.cut.stages or 1
  if axis == "tp" then return tp > here end
  return tp * dp * (axis == "dp" and 1 or stages) > here
end

-- Returns three results for a rank. First, the seconds of its ops, including its messages to ranks that share its
-- layers. Second, the number of operations. Third, the seconds of its updates. `run` has the rank's ops, axes and
-- pieces. Returns nil if the table lacks a speed.
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

-- Returns the compute time of a pipeline and its bubbles. The time is the range {least, most} of seconds of the
-- simulated step. It includes the messages within layers and the updates of the stages.
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

--- Returns the times of a step in seconds, as ranges. `result` is the step's dry run. Returns nil if the table lacks a
--- speed of the result's device.
---@param there ps.planning.Hardware
---@param result ps.planning.Result
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
