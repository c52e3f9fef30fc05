-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit tools/launch.lua --nproc-per-node N bench/gpu_ranks.lua [--mib M] [--device D]: collectives on the memory of
-- N GPUs. Sums are checked against those of host memory, bit for bit; then M MiB (256) of fp32 a rank are gathered and
-- all-reduced, by the engine and by the library's own calls, in turns. Rank 0 prints a JSON line: GB/s are bytes that a
-- rank has to send at least, over the median time. One rank alone (N = 1) sends nothing: it checks that NCCL loads,
-- connects and copies.
package.path = (arg[0]:match("^(.*)/bench/") or ".") .. "/?.lua;" .. package.path
local ps = require "ps"
local json = require "cjson"

local options = { mib = 256, device = "cuda" }
for i = 1, #arg, 2 do
  local key = arg[i]:gsub("^%-%-", "")
  if options[key] == nil or not arg[i + 1] then error("gpu_ranks takes --mib and --device, not " .. arg[i]) end
  options[key] = tonumber(arg[i + 1]) or arg[i + 1]
end

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
    times[name] = times[name] or {}
    if turn > 1 then table.insert(times[name], ps.now() - began) end     -- the first one connects
  end
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
  line.all_gather_ratio = line.all_gather_raw_ms / line.all_gather_ms
  line.all_reduce_ratio = line.all_reduce_raw_ms / line.all_reduce_ms
end
if rank == 0 then print(json.encode(line)) end
group:close()
