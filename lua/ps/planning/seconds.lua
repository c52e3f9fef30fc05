-- SPDX-License-Identifier: BSD-3-Clause
-- The seconds of a step, by parts, from the counts of a dry run and a machine's speeds. For a simulated machine each
-- time is a range, between the lowest and the highest fraction of the machine's speeds that is assumed to be reached
-- (`efficiency` in its table). Compute is the sum over ops (ps_op_cost as counted in the dry run, with recomputation)
-- of the longer of the times for operations and for bytes, plus the updates. For a pipeline, compute is the simulated
-- step of its stages, with the messages between them, plus the updates. Messages between ranks that share layers count
-- as compute, since compute waits for them; `beside` has the rows that are exchanged during products. Transfer is the
-- time for the bytes over each link, and communication the time for the bytes of the ranks along dp. The parts overlap
-- as far as the plan allows, so a step takes at least the longest part and at most the sum of all parts.
local course = require "ps.planning.course"
local optimizers = require "ps.optimizers"

local seconds = {}

-- Returns {least, most} seconds for an amount at a speed. `efficiency` is the range of the fraction of the speed that
-- is reached.
local function range(amount, speed, efficiency)
  return { amount / (speed * efficiency[2]), amount / (speed * efficiency[1]) }
end

local function add(a, b) return { a[1] + b[1], a[2] + b[2] } end
local ZERO = { 0, 0 }
-- speeds of a disk without measured speeds: 1 byte per second, so that the missing speed is visible in the result
local UNKNOWN = { read = 1, write = 1 }

-- ops whose rows may be exchanged in pieces (src/tensor_parallel/linear.c)
local ROWS = { column_linear = true, row_linear = true, column_linear_grad = true }
local ADAM_NBYTES = 28                       -- bytes per parameter that Adam moves, for a table's rates (rates.c)

-- Returns, for the ops of a step, the seconds of all ops except updates and ops whose rows are exchanged in pieces; the
-- number of operations; the seconds of the ops whose rows are exchanged in pieces; and the bytes of the updates.
-- Returns nil if the table lacks a speed.
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

-- Returns the seconds of the updates, which move `nbytes` bytes, in proportion to Adam's rate and bytes. If the plan
-- splits the updates, returns the longer of the host's and the device's time, since they work at the same time.
local function of_updates(there, result, nbytes)
  local e = there.table.efficiency.memory
  local own = nbytes / ADAM_NBYTES
  local on_device = result.adam_split or (result.device == "cuda" and 0 or 1)
  local device = range(own * on_device, there.rates.device_adam, e)
  local host = range(own * (1 - on_device), there.rates.host_adam, e)
  return { math.max(device[1], host[1]), math.max(device[2], host[2]) }
end

-- Returns the time of products of P seconds whose rows are exchanged in X seconds, in n pieces. The products of a piece
-- begin after it has arrived (or the piece is sent after they have ended). This is a pipeline of two stages with n
-- steps of P / n and n steps of X / n: the first piece passes both stages in X / n + P / n, and each further piece
-- takes the longer of the two. The total is max(P, X) + min(P, X) / n. (A rank's own rows, a share of P, need not wait,
-- which shortens the total.)
local function beside(P, X, n)
  local out = {}
  for i = 1, 2 do out[i] = math.max(P[i], X[i]) + math.min(P[i], X[i]) / n end
  return out
end

-- Returns the speed between ranks. If the ranks are on several machines, this is the speed of the network. Returns nil
-- if the table lacks the speed.
local function speed_between(t, apart)
  if apart then return t.network end
  return t.gpu and t.gpu.between or math.huge
end

-- Returns whether the ranks of an axis are on several machines. Ranks count along tp first, then dp, then pp.
local function apart(result, axis, here)
  local tp, dp, stages = result.tp or 1, result.world or 1, result.cut and result.cut.stages or 1
  if axis == "tp" then return tp > here end
  return tp * dp * (axis == "dp" and 1 or stages) > here
end

-- Returns the seconds of a rank's ops, including its messages to ranks that share its layers; the number of operations;
-- and the seconds of its updates. `run` has the rank's ops, axes and pieces. Returns nil if the table lacks a speed.
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

-- Returns the compute of a pipeline: {least, most} seconds of the simulated step, including the messages within layers
-- and the stages' updates, and the bubbles.
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

--- Returns the times of a result's step in seconds, as ranges. Returns nil if the table lacks a speed of its device.
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
