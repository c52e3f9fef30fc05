-- SPDX-License-Identifier: BSD-3-Clause
-- Compares forward and backward of a convolution with PyTorch. The two programs run alternately, each in its own
-- process:
--   psluajit bench/conv.lua --peer PYTHON [--threads 1 2] [--rounds 15] [--channels 64 ...]
-- Prints medians for each number of threads. The last line of the output is JSON. A ratio below 1 means that psluajit
-- is faster. Without --peer, only psluajit is timed.
local cjson = require "cjson"
local argparse = require "argparse"
local process_lib = require "bench.process_lib"
local paths = require "ps.paths"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/conv.lua", "Compares forward and backward of a convolution with PyTorch.")
parser:option("--peer", "a Python that has PyTorch")
whole(parser:option("--threads", "numbers of threads", "1"):args "+", 1)
whole(parser:option("--rounds", "times that each process computes", "15"), 1)
whole(parser:option("--batch", "images", "32"), 1)
whole(parser:option("--channels", "channels of input and output", "64"), 1)
whole(parser:option("--size", "height and width", "32"), 1)
whole(parser:option("--kernel", "height and width of the kernel", "3"), 1)
parser:flag("--worker", "(for this script) answer the other process")
local args = command_line.parse(parser)

if args.worker then
  local ps = require "ps"
  local N, C, S, K = args.batch, args.channels, args.size, args.kernel
  local x, w = ps.randn({ N, C, S, S }):requires_grad(true), ps.randn({ C, C, K, K }):requires_grad(true)
  local b = ps.randn({ C }):requires_grad(true)
  local dy
  for word in io.lines() do
    if word == "quit" then break end
    local seconds = ps.scope(function()
      local begin = ps.now()
      local y = ps.F.conv2d(x, w, b, { padding = math.floor(K / 2) })
      dy = dy or ps.randn(y:shape()):keep()
      local middle = ps.now()
      y:backward(dy)
      for _, t in ipairs { x, w, b } do t:set_grad(nil) end
      return { forward_s = middle - begin, step_s = ps.now() - begin }
    end)
    print("@" .. cjson.encode(seconds))
    io.stdout:flush()
  end
  return
end

local function median(list)
  table.sort(list)
  return list[math.floor((#list + 1) / 2)]
end

local sizes = {}
for _, name in ipairs { "batch", "channels", "size", "kernel" } do
  sizes[#sizes + 1], sizes[#sizes + 2] = "--" .. name, args[name]
end

local function start(program, threads)
  for _, word in ipairs(sizes) do program[#program + 1] = word end
  return process_lib.start(program, { OMP_NUM_THREADS = threads })
end

local result = {}
for _, threads in ipairs(args.threads) do
  local runs = { { "psluajit", start({ paths.exe, paths.root .. "/bench/conv.lua", "--worker" }, threads) } }
  if args.peer then
    runs[2] = { "PyTorch", start({ args.peer, paths.root .. "/bench/peers/conv_torch.py" }, threads) }
  end
  local times = {}
  for round = 0, args.rounds do                                    -- round 0 is a warm-up
    for _, run in ipairs(runs) do
      local seconds = run[2]:ask "step"
      times[run[1]] = times[run[1]] or { forward_s = {}, step_s = {} }
      for key, value in pairs(round > 0 and seconds or {}) do table.insert(times[run[1]][key], value) end
    end
  end
  local line = { threads = threads }
  for _, run in ipairs(runs) do
    run[2]:close()
    local forward, step = median(times[run[1]].forward_s), median(times[run[1]].step_s)
    line[run[1]] = { forward_s = forward, step_s = step }
    print(("%d threads  %-9s forward %7.2f ms  forward and backward %7.2f ms"):format(threads, run[1], forward * 1e3,
      step * 1e3))
  end
  if args.peer then
    line.ratio = line.psluajit.step_s / line.PyTorch.step_s
    print(("%d threads  ratio %.2f"):format(threads, line.ratio))
  end
  result[#result + 1] = line
end
print(cjson.encode { runs = result })
