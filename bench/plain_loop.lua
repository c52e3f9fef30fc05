-- SPDX-License-Identifier: BSD-3-Clause
-- Compares two training loops over plain tensors. The second loop has a ps.scope around each iteration, and the first
-- loop has no scope. Neither loop uses an optimizer or a loader. Prints a Markdown table with the milliseconds of
-- processor time per step and the peak memory:
--   psluajit bench/plain_loop.lua [--rounds 3]
-- Each loop runs in a process of its own. In each round, all loops run one after another. A time is the best of the
-- rounds.
local argparse = require "argparse"
local cjson = require "cjson"
local paths = require "ps.paths"
local command_line = require "ps.core.command_line"

local parser = argparse("bench/plain_loop.lua", "A plain loop with and without ps.scope.")
parser:option("--own", "measures one loop and prints its figures as JSON"):args(4)
command_line.whole(parser:option("--rounds", "times that each loop runs", "3"), 1)
local args = command_line.parse(parser)

-- width, rows, steps
local SIZES = { { 64, 256, 300 }, { 128, 512, 100 }, { 256, 1024, 30 }, { 256, 4096, 8 } }

local function measure(width, rows, steps, scoped)
  local ps = require "ps"
  ps.manual_seed(1)
  local w1 = ps.nn.Parameter(ps.randn { width, 4 * width } * 0.02)
  local w2 = ps.nn.Parameter(ps.randn { 4 * width, width } * 0.02)
  local x = ps.randn { rows, width }
  local function step()
    local y = ps.F.gelu(x:matmul(w1)):matmul(w2)
    local loss = (y - x):square():mean()
    loss:backward()
    ps.no_grad(function()
      for _, p in ipairs { w1, w2 } do
        p:sub_(p:grad() * 0.1)
        p:set_grad(nil)
      end
    end)
  end
  local turn = scoped and function() ps.scope(step) end or step
  for _ = 1, 3 do turn() end
  ps.reset_peak_memory()
  local began = os.clock()
  for _ = 1, steps do turn() end
  return { ms = (os.clock() - began) / steps * 1e3, mib = ps.memory().peak / 2 ^ 20 }
end

if args.own then
  local width, rows, steps, how = unpack(args.own)
  print(cjson.encode(measure(tonumber(width), tonumber(rows), tonumber(steps), how == "scope")))
  return
end

local function run(size, how)
  local p = assert(io.popen(("OMP_NUM_THREADS=1 '%s' '%s/bench/plain_loop.lua' --own %d %d %d %s"):format(paths.exe,
    paths.root, size[1], size[2], size[3], how)))
  local text = p:read "*a"
  p:close()
  return cjson.decode(text:match "{.*}" or error("no figures: " .. text))
end

print("| width | rows | plain, ms | scope, ms | time | plain, MiB | scope, MiB | memory |\n" .. ("|---"):rep(8) .. "|")
for _, size in ipairs(SIZES) do
  local best = { plain = { ms = math.huge }, scope = { ms = math.huge } }
  for _ = 1, args.rounds do
    for how, found in pairs(best) do
      local now = run(size, how)
      found.ms, found.mib = math.min(found.ms, now.ms), now.mib
    end
  end
  local a, b = best.plain, best.scope
  print(("| %d | %d | %.2f | %.2f | %.2fx | %.1f | %.1f | %.2fx |"):format(size[1], size[2], a.ms, b.ms, a.ms / b.ms,
    a.mib, b.mib, a.mib / b.mib))
end
