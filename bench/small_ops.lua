-- SPDX-License-Identifier: BSD-3-Clause
-- Measures the ops of docs/pytorch.md, forward and backward, in psluajit and PyTorch on one thread. Prints a table in
-- Markdown:
--   PYTHON=$(tools/oracle.sh python) psluajit bench/small_ops.lua [--only NAME] [--rounds 3] [--json FILE] [--above 2]
-- The two programs run alternately, each in its own process (bench/peers/small_ops_torch.py). A figure is the processor
-- time of a call, the best of the rounds. Each op has three sizes. bench/small_ops_lib.lua has the calls. A row of
-- docs/pytorch.md must have a call or a reason there, otherwise the benchmark raises an error.
-- psluajit's calls run in scopes, as in a training step. A scope ends after 65,536 elements or 256 calls, and its time
-- is part of the figure. PyTorch frees each result at once. The last line is a JSON object with the summary, and with
-- the calls that take over 3 times as long as PyTorch.
local cjson = require "cjson"
local argparse = require "argparse"
local paths = require "ps.paths"
local command_line = require "ps.core.command_line"
local ops_table = require "bench.small_ops_lib"

local parser = argparse("bench/small_ops.lua", "Compares the ops of docs/pytorch.md with PyTorch on one thread.")
parser:flag("--own", "print psluajit's figures as JSON, and run no peer")
parser:option("--only", "only calls that contain this, as printed")
parser:option("--json", "also write all figures to this file")
command_line.number(parser:option("--above", "print only rows above this ratio", "0"), 0)
command_line.whole(parser:option("--rounds", "number of runs of each side", "3"), 1)
local args = command_line.parse(parser)

local SIZES = { 16, 1024, 65536 }                           -- approximate numbers of elements

-- Returns a table of functions by kind of input. Each function creates an input of n elements. The peer has the same
-- kinds.
local function kinds(ps)
  local function square(n) return math.floor(math.sqrt(n)) end
  local function ints(shape, below) return ps.randint(0, below, shape) end
  local function rows(n) return math.ceil(n / 16) end
  return {
    v = function(n) return ps.randn { n } end, u = function(n) return ps.rand { n } + 0.5 end,
    p = function(n) return ps.rand { n } * 0.8 + 0.1 end, i = function(n) return ints({ n }, 99) end,
    b = function(n) return ps.randn({ n }):gt(0) end, m = function(n) return ps.randn { square(n), square(n) } end,
    mu = function(n) return ps.rand { square(n), square(n) } + 0.5 end,
    c = function(n) return ps.randn { square(n), 1 } end, w = function(n) return ps.randn { square(n) } end,
    r = function(n) return ps.randn { rows(n), 16 } end, k = function(n) return ints({ rows(n) }, rows(n)) end,
    kk = function(n) return ints({ rows(n) }, rows(n)):unsqueeze(1):expand(rows(n), 16) end,
    perm = function(n) return ps.randperm(rows(n)) end, h = function(n) return ints({ rows(n) }, 16) end,
    g = function(n) return ints({ square(n), square(n) }, square(n)) end,
    j = function(n) return ints({ square(n) }, square(n)) end,
    bag = function(n) return ints({ rows(n), 4 }, rows(n)) end,
    img = function(n) local q = square(n / 4) return ps.randn { 1, 4, q, q } end,
    f = function() return ps.randn { 4, 4, 3, 3 } end, f1 = function() return ps.randn { 4, 4, 3 } end,
    c4 = function() return ps.randn { 4 } end, sig = function(n) return ps.randn { 1, 4, n / 4 } end,
    sg = function(n) return ps.randn({ square(n) }):sign() end,
    a = function(n) return ps.randn { 1, 2, rows(n), 8 } end, one = function() return ps.randn { 1 } end,
    four = function(n) return ps.randn { 4, n / 4 } end, d16 = function(n) return ps.randn { square(n), 16 } end,
  }
end

-- Creates the inputs of a case. Returns a function without arguments that makes the call of the case with these inputs.
local function call_of(ps, case, n, backward)
  local make, names, values, grads = kinds(ps), {}, {}, {}
  for name, kind in case.inputs:gmatch "(%w+)=(%w+)" do
    names[#names + 1], values[#values + 1] = name, make[kind](n)
    if backward and (case.grads .. ","):find(name .. ",", 1, true) then
      grads[#grads + 1] = ps.nn.Parameter(values[#values])
      values[#values] = grads[#grads]
    end
  end
  local text = ("local ps, F, %s = ...  return function() return %s end"):format(table.concat(names, ", "), case.ours)
  local forward = assert(loadstring(text, case.ours))(ps, ps.F, unpack(values))
  if not backward then return forward end
  return function()
    ps.sum((forward())):backward()
    for _, p in ipairs(grads) do p:set_grad(nil) end
  end
end

-- Returns the processor time of a call in seconds. Several runs take about 1 ms each, and the best run counts. LuaJIT
-- compiles a loop for the first function that the loop calls, so each call has its own loop, as in a script.
local function seconds_of(call, ps, elements)
  local per_scope = math.min(256, SIZES[#SIZES] / elements)
  local calls = loadstring "local call, n = ... return function() for _ = 1, n do call() end end" (call, per_scope)
  local loop = loadstring "local scope, calls, n = ... for _ = 1, n do scope(calls) end"
  local function run(n)
    local began = os.clock()
    loop(ps.scope, calls, n)
    return os.clock() - began
  end
  local n, warm = 1, 0
  for _ = 1, 100 do                                         -- a warm-up, which loads files, compiles traces and fills
                                                            -- caches
    warm = warm + run(1)
    if warm > 10e-3 then break end
  end
  while run(n) < 1e-3 and n < 1e5 do n = n * 2 end
  local best = math.huge
  for _ = 1, 5 do best = math.min(best, run(n) / (n * per_scope)) end
  ps.collect()
  return best
end

-- Returns the measurements as { case, backward, name }, in the order of the table.
local function measurements()
  local list = {}
  for _, case in ipairs(ops_table.cases) do
    for backward = 0, case.grads ~= "" and 1 or 0 do
      local name = ("%s  [%s]%s"):format(case.ours, case.inputs, backward == 1 and ", backward" or "")
      if not args.only or name:find(args.only, 1, true) then
        list[#list + 1] = { case, backward == 1, name }
      end
    end
  end
  return list
end

if args.own then
  local ps, found = require "ps", {}
  for _, one in ipairs(measurements()) do
    for _, n in ipairs(SIZES) do
      local ok, call = pcall(call_of, ps, one[1], n, one[2])
      local done, seconds = pcall(seconds_of, call, ps, n)
      if not (ok and done) then error(("%s, %d elements: %s"):format(one[3], n, tostring(ok and seconds or call))) end
      found[("%s|%d"):format(one[3], n)] = seconds
    end
  end
  print(cjson.encode(found))
  return
end

-- Raises an error if a row of docs/pytorch.md has neither a call nor a reason.
local function check_table()
  local known, missing = {}, {}
  for _, case in ipairs(ops_table.cases) do known[case.op] = true end
  local function is_left_out(op)
    for _, patterns in pairs(ops_table.left_out) do
      for _, pattern in ipairs(patterns) do if op:find(pattern) then return true end end
    end
  end
  for line in io.lines(paths.root .. "/docs/pytorch.md") do
    local op, second, third = line:match "^| `([^`]+)` | ([^|]*)| ([^|]*)|"
    local composed = op and not line:match "^|[^|]*|[^|]*|[^|]*|[^|]*|"
    local computes = composed or op and second:match "%S" and third:match "%S"
    if op and computes and not known[op] and not is_left_out(op) then missing[#missing + 1] = op end
  end
  if #missing > 0 then
    error("bench/small_ops_lib.lua has no calls of rows of docs/pytorch.md: " .. table.concat(missing, ", "))
  end
end
check_table()

local list = measurements()
local tasks = os.tmpname()
local file = assert(io.open(tasks, "w"))
local rows = {}
for i, one in ipairs(list) do
  rows[i] = { name = one[3], inputs = one[1].inputs, call = one[1].theirs, grads = one[2] and one[1].grads or "" }
end
file:write(cjson.encode(rows))
file:close()

local only = args.only and (" --only '%s'"):format(args.only) or ""
local here = paths.root .. "/bench/"
local sides = {
  ("OMP_NUM_THREADS=1 '%s' '%ssmall_ops.lua' --own%s"):format(paths.exe, here, only),
  ("OMP_NUM_THREADS=1 '%s' '%speers/small_ops_torch.py' '%s'"):format(os.getenv "PYTHON" or "python3", here, tasks),
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
os.remove(tasks)

print("| call | elements | psluajit, us | PyTorch, us | of PyTorch's time |\n|---|---|---|---|---|")
local ratios, small, figures, slow = {}, {}, {}, {}
for _, one in ipairs(list) do
  for _, n in ipairs(SIZES) do
    local key = ("%s|%d"):format(one[3], n)
    local ours, theirs = best[1][key], best[2][key]
    local ratio = ours / theirs
    ratios[#ratios + 1] = ratio
    if ratio > 3 then slow[#slow + 1] = { call = one[3], elements = n, ratio = ratio } end
    if n == SIZES[1] then small[#small + 1] = ratio end
    figures[#figures + 1] = { op = one[1].op, call = one[3], elements = n, psluajit = ours, pytorch = theirs,
      ratio = ratio }
    if ratio > args.above then
      print(("| %s | %d | %.2f | %.2f | %.2fx |"):format(one[3]:gsub("|", "\\|"), n, ours * 1e6, theirs * 1e6, ratio))
    end
  end
end
if args.json then
  local out = assert(io.open(args.json, "w"))
  out:write(cjson.encode(figures), "\n")
  out:close()
end
table.sort(ratios)
table.sort(small)
local summary = { measurements = #ratios, median = ratios[math.ceil(#ratios / 2)], largest = ratios[#ratios],
  above_3 = #slow, slow = slow, median_16 = small[math.ceil(#small / 2)], largest_16 = small[#small] }
print(("\nmedian %.2fx, largest %.2fx, %d of %d above 3x; %d elements: median %.2fx, largest %.2fx"):format(
  summary.median, summary.largest, #slow, #ratios, SIZES[1], summary.median_16, summary.largest_16))
print(cjson.encode(summary))
