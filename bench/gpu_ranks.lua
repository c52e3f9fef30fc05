-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/launch.lua --nproc-per-node N bench/gpu_ranks.lua [--mib M] [--device D]: measures collectives on the
-- memory of N GPUs. First compares the sums with the sums of host memory, bit for bit. Then gathers and all-reduces M
-- MiB (default 256) of fp32 per rank. The engine's calls alternate with direct calls of the library (NCCL). Rank 0
-- prints a JSON line. A rate in GB/s is the smallest number of bytes that a rank must send, divided by the median time.
-- With N = 1, the rank sends nothing, and the run only checks that NCCL loads, connects and copies.
-- p2p: messages between devices, sent in the same way as between the stages of a pipeline. The figures are the rate in
-- GB/s for M MiB in MESSAGES consecutive messages, and the microseconds per message of one number if each message waits
-- for the previous one.
package.path = (arg[0]:match("^(.*)/bench/") or ".") .. "/?.lua;" .. package.path
local ps = require "ps"
local json = require "cjson"

local options = { mib = 256, device = "cuda" }
for i = 1, #arg, 2 do
  local key = arg[i]:gsub("^%-%-", "")
  if options[key] == nil or not arg[i + 1] then error("gpu_ranks takes --mib and --device, not " .. arg[i]) end
  options[key] = tonumber(arg[i + 1]) or arg[i + 1]
end

local MESSAGES = 16

local real = options.device == "cuda"
local group = ps.init_distributed { seed = 1, backend = real and "nccl" or nil }
local rank, size = ps.rank(), ps.world_size()
local carrier = group:connect(options.device)

for _, dtype in ipairs { "fp32", "bf16", "fp16" } do
  ps.manual_seed(rank + 1)
  for _, n in ipairs { 1, 1003, 3000001 } do
    local host = ps.randn({ n }):to(dtype)
    local there = host:to(options.device)
    group:all_reduce(host)
    group:all_reduce(there)
    local different = (host:to("fp32") - there:to("cpu"):to("fp32")):abs():sum():item()
    if different ~= 0 then
      error(("%d sums of %s differ from those of host memory by %g"):format(n, dtype, different))
    end
  end
end

local part = ps.ones({ math.floor(options.mib * 2 ^ 20 / 4 / size) }, { device = options.device })
local whole = ps.empty({ part:numel() * size }, { device = options.device })
local function raw(all_reduce, out, input) ps.check(ps.C.ps_group_raw(group.c, all_reduce, out, input)) end
local ways = {
  all_gather = function() group:all_gather(whole, part) end,
  all_gather_raw = function() raw(0, whole, part) end,
  all_reduce = function() group:all_reduce(whole) end,
  all_reduce_raw = function() raw(1, whole, whole) end,
}
local names, times = { "all_gather", "all_gather_raw", "all_reduce", "all_reduce_raw" }, {}
if carrier == "self" then names = { "all_gather", "all_reduce" } end
for turn = 1, 11 do
  for _, name in ipairs(names) do
    group:barrier()
    local began = ps.now()
    ways[name]()
    -- waits, because calls return before their bytes have arrived
    ps.check(ps.C.ps_groups_settle())
    times[name] = times[name] or {}
    if turn > 1 then table.insert(times[name], ps.now() - began) end     -- the first call also establishes the
                                                                         -- connection
  end
end

-- Returns the seconds of a forward without computation in a pipeline of all ranks. Each virtual stage sends `numel`
-- fp32 numbers to the next virtual stage. The result is the median over several forwards, on the slowest rank.
local function forwards(virtual_stages, micro_batches, numel)
  local C, ffi = ps.C, ps.ffi
  local rows = require("ps.parallel.pipeline.table").table { schedule = "looped_bfs", stages = size,
    virtual_stages = virtual_stages,
    micro_batches = micro_batches, forward_only = true }
  local opened, carry, event = ffi.new "ps_pipe *[1]", ffi.new "ps_pipe_tensor[1]", ffi.new "ps_pipe_event"
  ps.check(C.ps_pipe_open(ps.ctx, rows:lower().c, group.c, opened))
  local given = ffi.new "ps_tensor *[1]"
  local function new() return ps.empty({ numel }, { device = options.device }) end
  carry[0].dtype, carry[0].device, carry[0].ndim, carry[0].shape[0] = C.PS_F32, new().device_, 1, numel
  for vstage = 0, rows.vstages - 2 do
    for micro = 0, micro_batches - 1 do ps.check(C.ps_pipe_expect(opened[0], vstage, micro, 1, carry)) end
  end
  local taken = {}
  for turn = 1, 11 do
    group:barrier()
    local began = ps.now()
    ps.check(C.ps_pipe_begin(opened[0], nil, 0, 0))
    repeat
      ps.check(C.ps_pipe_next(opened[0], event))
      if event.kind == C.PS_ACT_FORWARD then
        local values = new()               -- a new tensor, because the executor frees the tensor after it was sent
        given[0] = values
        ps.check(C.ps_pipe_done(opened[0], event.vstage < rows.vstages - 1 and 1 or 0, given))
      elseif event.kind == C.PS_ACT_YIELD then
        ps.check(C.ps_pipe_done(opened[0], 0, nil))
      end
    until event.kind == C.PS_ACT_NONE
    if turn > 1 then table.insert(taken, ps.now() - began) end           -- the first call also establishes the
                                                                         -- connection
  end
  C.ps_pipe_close(opened[0])
  table.sort(taken)
  return group:all_reduce(ps.tensor { taken[math.floor(#taken / 2) + 1] }, "max"):item()
end

local sent = options.mib * 2 ^ 20 * (size - 1) / size
local line = { carrier = carrier, ranks = size, mib = options.mib }
for _, name in ipairs(names) do
  table.sort(times[name])
  local median = times[name][math.floor(#times[name] / 2) + 1]
  line[name .. "_ms"] = median * 1e3
  if size > 1 then line[name .. "_gb_per_s"] = sent * (name:find "reduce" and 2 or 1) / median / 1e9 end
end
if size > 1 then
  local chain, numel = 16, math.floor(options.mib * 2 ^ 20 / 4 / MESSAGES)
  line.p2p_gb_per_s = MESSAGES * numel * 4 / forwards(1, MESSAGES, numel) / 1e9
  line.p2p_us = forwards(chain, 1, 1) / (chain * size - 1) * 1e6
  line.all_gather_ratio = line.all_gather_raw_ms / line.all_gather_ms
  line.all_reduce_ratio = line.all_reduce_raw_ms / line.all_reduce_ms
end
if rank == 0 then print(json.encode(line)) end
group:close()
