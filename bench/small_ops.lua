-- SPDX-License-Identifier: BSD-3-Clause
-- Measures small ops, indexing and movement of elements in psluajit and PyTorch on one thread, and prints a table in
-- Markdown:
--   PYTHON=$(tools/oracle.sh python) psluajit bench/small_ops.lua [--only NAME] [--rounds 3]
-- Both run alternately, each in its own process (bench/peers/small_ops_torch.py). A figure is the best of the rounds,
-- each of which takes some milliseconds. Each op has three sizes.
local cjson = require "cjson"
local argparse = require "argparse"
local paths = require "ps.paths"
local command_line = require "ps.core.command_line"

local parser = argparse("bench/small_ops.lua", "Compares small ops with PyTorch on one thread.")
parser:flag("--own", "print psluajit's figures as JSON, and run no peer")
parser:option("--only", "only ops whose name contains this")
command_line.whole(parser:option("--rounds", "number of runs of each side", "3"), 1)
local args = command_line.parse(parser)

local SIZES = { 16, 1024, 65536 }                           -- elements, about

-- Returns the cases: name -> function that gets a number of elements and returns the call to measure. The peer has the
-- same names.
local function cases(ps)
  local F = ps.F
  local function square(n) return math.floor(math.sqrt(n)) end
  local function ints(n, below) return ps.randint(0, below, { n }) end
  local with_gradient = function(fn)
    return function(n)
      local call, p = fn(n)
      return function()
        call():backward()
        p:set_grad(nil)
      end
    end
  end
  return {
    { "add", function(n) local a, b = ps.randn { n }, ps.randn { n } return function() return a + b end end },
    { "add a number", function(n) local a = ps.randn { n } return function() return a + 1.5 end end },
    { "add int64", function(n) local a, b = ints(n, 99), ints(n, 99) return function() return a + b end end },
    { "mul a column", function(n)
      local a, b = ps.randn { square(n), square(n) }, ps.randn { square(n), 1 }
      return function() return a * b end
    end },
    { "add a row", function(n)
      local a, b = ps.randn { square(n), square(n) }, ps.randn { square(n) }
      return function() return a + b end
    end },
    { "relu", function(n) local a = ps.randn { n } return function() return F.relu(a) end end },
    { "softplus", function(n) local a = ps.randn { n } return function() return F.softplus(a) end end },
    { "sum", function(n) local a = ps.randn { n } return function() return a:sum() end end },
    { "norm", function(n) local a = ps.randn { n } return function() return a:norm() end end },
    { "item", function() local a = ps.randn { 1 } return function() return a:item() end end },
    { "one_hot", function(n) local a = ints(math.ceil(n / 16), 16) return function() return ps.one_hot(a, 16) end end },
    { "flip", function(n) local a = ps.randn { square(n), square(n) } return function() return a:flip(1) end end },
    { "roll", function(n) local a = ps.randn { square(n), square(n) } return function() return a:roll(1, 0) end end },
    { "tril", function(n) local a = ps.randn { square(n), square(n) } return function() return a:tril() end end },
    { "cat, last dimension", function(n)
      local a, b = ps.randn { square(n), square(n) }, ps.randn { square(n), square(n) }
      return function() return ps.cat({ a, b }, -1) end
    end },
    { "gather", function(n)
      local a, i = ps.randn { square(n), square(n) }, ps.randint(0, square(n), { square(n), square(n) })
      return function() return a:gather(1, i) end
    end },
    { "scatter_add of rows", function(n)
      local m = math.ceil(n / 16)
      local a, i, b = ps.zeros { m, 16 }, ints(m, m):unsqueeze(1):expand(m, 16), ps.randn { m, 16 }
      return function() return a:scatter_add(0, i, b) end
    end },
    { "index_add", function(n)
      local m = math.ceil(n / 16)
      local a, i, b = ps.zeros { m, 16 }, ints(m, m), ps.randn { m, 16 }
      return function() return a:index_add(0, i, b) end
    end },
    { "x[i]", function(n)
      local m = math.ceil(n / 16)
      local a, i = ps.randn { m, 16 }, ints(m, m)
      return function() return a[i] end
    end },
    { "x[i, j]", function(n)
      local m = square(n)
      local a, i, j = ps.randn { m, m }, ints(m, m), ints(m, m)
      return function() return a[{ i, j }] end
    end },
    { "x[i] = v", function(n)
      local m = math.ceil(n / 16)
      local a, i, b = ps.randn { m, 16 }, ints(m, m), ps.randn { m, 16 }
      return function() a[i] = b end
    end },
    { "x[mask]", function(n)
      local a = ps.randn { n }
      local mask = a:gt(0)
      return function() return a[mask] end
    end },
    { "nonzero", function(n) local a = ps.randn({ n }):gt(0) return function() return a:nonzero() end end },
    { "sort", function(n) local a = ps.randn { n } return function() return a:sort() end end },
    { "dropout", function(n) local a = ps.randn { n } return function() return F.dropout(a, 0.1) end end },
    { "prod", function(n) local a = ps.rand { n } return function() return a:prod() end end },
    { "x[i], backward", with_gradient(function(n)
      local m = math.ceil(n / 16)
      local p, i = ps.nn.Parameter(ps.randn { m, 16 }), ints(m, m)
      return function() return p[i]:sum() end, p
    end) },
    { "softplus, backward", with_gradient(function(n)
      local p = ps.nn.Parameter(ps.randn { n })
      return function() return F.softplus(p):sum() end, p
    end) },
  }
end

-- Returns the seconds of a call in processor time, as the best of several runs, each of which takes about 5 ms. Each
-- call has a loop of its own, as in a script, because LuaJIT compiles a loop for the first function that it calls.
local function seconds_of(call, ps)
  local loop = loadstring "local call, n = ... for _ = 1, n do call() end"
  local function run(n)
    local began = os.clock()
    loop(call, n)
    return os.clock() - began
  end
  local n = 1
  while run(n) < 2e-3 and n < 1e5 do n = n * 2 end
  local best = math.huge
  for _ = 1, 5 do
    best = math.min(best, run(n) / n)
    ps.collect()
  end
  return best
end

if args.own then
  local ps, found = require "ps", {}
  for _, case in ipairs(cases(ps)) do
    if not args.only or case[1]:find(args.only, 1, true) then
      for _, n in ipairs(SIZES) do found[("%s|%d"):format(case[1], n)] = seconds_of(case[2](n), ps) end
    end
  end
  print(cjson.encode(found))
  return
end

local only = args.only and (" --only '%s'"):format(args.only) or ""
local here = paths.root .. "/bench/"
local sides = {
  ("OMP_NUM_THREADS=1 '%s' '%ssmall_ops.lua' --own%s"):format(paths.exe, here, only),
  ("OMP_NUM_THREADS=1 '%s' '%speers/small_ops_torch.py'%s"):format(os.getenv "PYTHON" or "python3", here, only),
}

local best = { {}, {} }
for _ = 1, args.rounds do
  for side, command in ipairs(sides) do
    local p = assert(io.popen(command))
    local text = p:read "*a"
    p:close()
    local line = text:match "({.*})"
    if not line then error("no figures from: " .. command) end
    for key, value in pairs(cjson.decode(line)) do best[side][key] = math.min(best[side][key] or math.huge, value) end
  end
end

print("| op | elements | psluajit, us | PyTorch, us | of PyTorch's time |\n|---|---|---|---|---|")
local ratios = {}
for _, case in ipairs(cases(require "ps")) do
  for _, n in ipairs(SIZES) do
    local key = ("%s|%d"):format(case[1], n)
    local ours, theirs = best[1][key], best[2][key]
    if ours and theirs then
      ratios[#ratios + 1] = ours / theirs
      print(("| %s | %d | %.2f | %.2f | %.2fx |"):format(case[1], n, ours * 1e6, theirs * 1e6, ours / theirs))
    end
  end
end
table.sort(ratios)
print(("\nmedian %.2fx, largest %.2fx, of %d"):format(ratios[math.ceil(#ratios / 2)], ratios[#ratios], #ratios))
