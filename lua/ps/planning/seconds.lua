-- SPDX-License-Identifier: BSD-3-Clause
-- The seconds of a step, by parts, from what a dry run counted and a machine's speeds. Of a machine that is not here
-- they are a range, between the least and the most of its speeds that are assumed to be reached (`efficiency` of its
-- table). Compute: of each op (ps_op_cost, as the dry run counted them, with what is computed again) the longer of its
-- operations and its bytes, and Adam. Transfer: the bytes over each link. Communication: bytes of the ranks. The parts
-- run side by side as far as the plan can; a step takes at least the longest part and at most their sum.
local seconds = {}

-- {least, most} seconds of an amount at a speed that is reached by a share.
local function range(amount, speed, efficiency)
  return { amount / (speed * efficiency[2]), amount / (speed * efficiency[1]) }
end

local function add(a, b) return { a[1] + b[1], a[2] + b[2] } end
local ZERO = { 0, 0 }
local UNKNOWN = { read = 1, write = 1 }              -- of a disk that the table lacks: a byte a second, to be seen

local BYTES = { fp32 = 4, bf16 = 2, fp16 = 2 }

-- Bytes that a rank gets from others in a step: gathers of parameters, and the sum of gradients (each rank gets all
-- others' parts of its own; with stage 0 it also gets the sums of the others').
local function exchanged(result)
  if result.world == 1 then return 0 end
  local gradients = result.parameters * BYTES[result.precision] * (result.world - 1) / result.world
  return result.gathered + gradients * (result.stage == 0 and 2 or 1)
end

-- Seconds of the ops besides Adam, and their operations; nil where the table lacks a speed.
local function of_ops(t, result)
  local place, e, sum, flops = result.device == "cuda" and t.gpu or t.host, t.efficiency, ZERO, 0
  local speed = place and place.flops and place.flops[result.precision]
  if not speed or not place.bandwidth then return nil end
  for _, op in ipairs(result.ops or {}) do
    flops = flops + op.flops
    if op.name ~= "adam" then
      local by_flops, by_bytes = range(op.flops, speed, e.compute), range(op.bytes, place.bandwidth, e.memory)
      sum = add(sum, { math.max(by_flops[1], by_bytes[1]), math.max(by_flops[2], by_bytes[2]) })
    end
  end
  return sum, flops
end

-- Seconds of Adam: where the plan splits it, the longer of both places, which work side by side.
local function of_adam(there, result)
  local e = there.table.efficiency.memory
  local own = result.parameters / (result.stage > 0 and result.world or 1)
  local on_device = result.adam_split or (result.device == "cuda" and 0 or 1)
  local device = range(own * on_device, there.rates.device_adam, e)
  local host = range(own * (1 - on_device), there.rates.host_adam, e)
  return { math.max(device[1], host[1]), math.max(device[2], host[2]) }
end

--- The seconds of a step of a result, as ranges; nil where the table lacks a speed of its device.
---@param there ps.planning.Hardware
---@param result ps.planning.Result
---@return {compute: number[], transfer: number[], communication: number[], step: number[], flops: number,
---  lines: string[]}?
function seconds.of(there, result)
  local t = there.table
  if t.memory_alone then return nil end
  local ops, flops = of_ops(t, result)
  if not ops then return nil end
  local e, compute = t.efficiency, add(ops, of_adam(there, result))
  local transfer, slowest = ZERO, nil
  for _, link in ipairs(result.links) do
    local to_disk = link.lower == "disk"
    local up, down = t.links.up, t.links.down
    if to_disk then up, down = (t.disk or UNKNOWN).read, (t.disk or UNKNOWN).write end
    local one = range(math.max(link.up / up, link.down / down), 1, to_disk and e.disk or e.links)
    if one[2] > transfer[2] then transfer, slowest = one, link end
  end
  local between = t.gpu and t.gpu.between or math.huge
  local communication = range(exchanged(result), between, e.between)
  local step = { math.max(compute[1], transfer[1], communication[1]),
    compute[2] + transfer[2] + communication[2] }
  local function text(r) return ("%.3g to %.3g"):format(r[1], r[2]) end
  local lines = { ("seconds a step: %s (compute %s, transfer %s%s, communication %s)"):format(text(step), text(compute),
    text(transfer), slowest and (" over %s - %s"):format(slowest.upper, slowest.lower) or "", text(communication)),
    ("  %.4g TFLOP a step and rank; of the table's speeds, %s: %d to %d %% of compute, %d to %d %% of memory, "
      .. "%d to %d %% of links"):format(flops / 1e12, t.measured and "which were measured" or "it is assumed",
      100 * e.compute[1], 100 * e.compute[2], 100 * e.memory[1], 100 * e.memory[2], 100 * e.links[1],
      100 * e.links[2]) }
  return { compute = compute, transfer = transfer, communication = communication, step = step, flops = flops,
    lines = lines }
end

return seconds
