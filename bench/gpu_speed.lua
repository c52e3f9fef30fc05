-- SPDX-License-Identifier: BSD-3-Clause
-- Measures the rates of single operations on a device: matrix products, attention and copies. Prints one JSON object
-- per line.
--   psluajit bench/gpu_speed.lua --part matmul|attention|copies [--device cuda] [--dtype bf16] [--small]
-- A rate is the best of a few runs. A run starts a large number of operations, and ends when it has read one element of
-- the last result.
local ps = require "ps"
local cjson = require "cjson"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

io.stdout:setvbuf "line"                                -- if this process is killed, the output up to then is not lost
local parser = argparse("bench/gpu_speed.lua", "Measures rates of single operations.")
parser:option("--part", "matmul, attention or copies"):count(1)
parser:option("--device", "device", "cuda")
parser:option("--dtype", "bf16, fp16 or fp32", "bf16")
whole(parser:option("--seq", "positions of attention", "2048"), 1)
parser:flag("--small", "small sizes, to test that it runs")
local args = command_line.parse(parser)
local on = { dtype = args.dtype, device = args.device }

local function wait(t) return t:reshape(-1)[0]:item() end

--- Returns the seconds that one call of fn takes, in the best of three runs of `n` calls. fn must return a tensor.
local function seconds(n, fn)
  local best = math.huge
  wait(fn())
  for _ = 1, 3 do
    local t, last = ps.now(), nil
    ps.scope(function()
      for _ = 1, n do last = fn() end
      wait(last)
    end)
    best = math.min(best, (ps.now() - t) / n)
  end
  return best
end

local parts = {}

function parts.matmul()
  for _, n in ipairs(args.small and { 64 } or { 2048, 4096, 8192 }) do
    local a, b = ps.randn({ n, n }, on), ps.randn({ n, n }, on)
    local s = seconds(args.small and 2 or 20, function() return a:matmul(b) end)
    print(cjson.encode { what = "matmul", n = n, dtype = args.dtype, tflops = 2 * n ^ 3 / s / 1e12 })
  end
end

--- Measures causal attention, forward and backward. Forward has 4 T^2 D operations per head, and backward has 10 T^2 D.
--- The mask halves both numbers.
function parts.attention()
  for _, D in ipairs { 64, 128 } do
    local B, H, T = 8192 / args.seq, 2048 / D, args.seq
    if args.small then B, H, T = 1, 1, 70 end
    local function make() return ps.randn({ B, H, T, D }, on):requires_grad(true) end
    local q, k, v = make(), make(), make()
    local flops = 4 * B * H * T * T * D / 2
    local forward = seconds(args.small and 1 or 10, function()
      return ps.no_grad(function() return ps.ops.attention(q, k, v, nil, D ^ -0.5, 1) end)
    end)
    local dy = ps.randn({ B, T, H, D }, on):permute(0, 2, 1, 3)
    local both = seconds(args.small and 1 or 10, function()
      local y = ps.ops.attention(q, k, v, nil, D ^ -0.5, 1)
      y:backward(dy)
      local g = q:grad()
      for _, t in ipairs { q, k, v } do t:set_grad(nil) end
      return g
    end)
    print(cjson.encode { what = "attention", head = D, seq = T, dtype = args.dtype, forward_ms = forward * 1e3,
      both_ms = both * 1e3, forward_tflops = flops / forward / 1e12, both_tflops = 3.5 * flops / both / 1e12 })
  end
end

--- Measures copies between pageable host memory and the device, like the copies that :to() makes in a script. The
--- engine's chunks are in pinned memory instead. The offload part of gpu_check.sh measures copies of chunks.
function parts.copies()
  local n = args.small and 2 ^ 16 or 2 ^ 28
  local host, there = ps.zeros { n }, ps.zeros({ n }, { device = args.device })
  for _, way in ipairs { { "to_device", host, args.device }, { "from_device", there, "cpu" } } do
    local s = seconds(1, function() return way[2]:to(way[3]) end)
    print(cjson.encode { what = "copy", way = way[1], gb_per_s = n * 4 / s / 1e9 })
  end
end

if not parts[args.part] then parser:error("there is no part " .. args.part) end
io.stderr:write(ps.device(args.device).description, "\n")
parts[args.part]()
