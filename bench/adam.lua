-- SPDX-License-Identifier: BSD-3-Clause
-- Compares the speed of the fused AdamW op on the CPU with the memory bandwidth, and with the AdamW of PyTorch and of
-- DeepSpeed.
--   psluajit bench/adam.lua --params 50e6 --rounds 9
-- The last line is one JSON object. All figures are medians:
--   gparams_per_s, gb_per_s   fp32, with 28 bytes per parameter. The op reads the parameter, the gradient and two
--                             averages, and writes all of them except the gradient.
--   probe_gb_per_s            the engine's walk over four streams, with almost no arithmetic. Three of the streams are
--                             written in place. The probe and the op are measured alternately.
--   bandwidth_ratio           the op's rate divided by the probe's rate
--   triad_gb_per_s            a = b + c * s on three arrays, with 12 bytes per element. The processor also reads each
--                             cache line of a before it writes the line. These reads are not counted.
--   mixed_*                   the parameter is bf16, the gradient is bf16 and uses the parameter's memory, and the
--                             master and the averages are fp32; also 28 bytes
--   grad_bf16_*               a bf16 gradient of an fp32 parameter, 26 bytes
--   torch_*, deepspeed_*      bench/peers/adam_torch.py with the Python of PS_TORCH_PYTHON or python3. The figures are
--                             absent if Python or its packages are missing.
local ps = require "ps"
local ffi = require "ffi"
local cjson = require "cjson"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/adam.lua", "Measures the CPU's AdamW against memory bandwidth.")
whole(parser:option("--params", "parameters", "50e6"), 1)
whole(parser:option("--tensors", "number of tensors among which they are divided", "12"), 1)
whole(parser:option("--rounds", "rounds in which op and probe alternate", "9"), 1)
whole(parser:option("--passes", "steps a round", "3"), 1)
parser:flag("--no-peers", "run neither PyTorch nor DeepSpeed")
local args = command_line.parse(parser)

local function median(list)
  table.sort(list)
  return list[math.floor(#list / 2) + 1]
end

--- Returns the rate of the engine's probe in GB/s.
local function probe(nbytes, reads, writes, in_place)
  local out = ffi.new("double[1]")
  ps.check(ps.C.ps_probe_bandwidth(nbytes, reads, writes, in_place and 1 or 0, args.passes, out))
  return out[0] / 1e9
end

local KINDS = {
  fp32 = { bytes = 28, param = "fp32", grad = "fp32" },
  grad_bf16 = { bytes = 26, param = "fp32", grad = "bf16" },
  mixed = { bytes = 28, param = "bf16", grad = "param" },
}

--- Returns the list of tensors for adam_. For each parameter, the list contains param, master, grad, m and v. As in a
--- model, parameters have different sizes.
local function state(kind)
  local list, left = {}, args.params
  for i = 1, args.tensors do
    local n = i == args.tensors and left or math.floor(args.params / args.tensors * (i % 2 == 0 and 0.63 or 1.37))
    left = left - n
    local param = ps.randn({ n }, { dtype = kind.param }):keep()
    local master = kind.param == "fp32" and param or param:to { dtype = "fp32" }:keep()
    local grad = kind.grad == "param" and param or ps.randn({ n }, { dtype = kind.grad }):keep()
    for _, t in ipairs { param, master, grad, ps.zeros { n }:keep(), ps.zeros({ n }):keep() } do list[#list + 1] = t end
  end
  return list
end

--- Frees the tensors. Each tensor is counted only once, because a master or a gradient can be the same tensor as the
--- parameter.
local function release(list)
  local seen = {}
  for _, t in ipairs(list) do
    local address = tostring(ffi.cast("void *", t))
    if not seen[address] then t:release() end
    seen[address] = true
  end
end

--- Runs n steps. Returns the time of each step in seconds.
local function steps(list, n)
  local times = {}
  for i = 1, n do
    local t = ps.now()
    ps.ops.adam_(list, 1, 1e-4, 0.9, 0.999, 1e-8, 0.01, 1, 1 - 0.9 ^ i, 1 - 0.999 ^ i)
    times[i] = ps.now() - t
  end
  return times
end

--- Returns three medians over the rounds: the seconds per step, the probe's rate in GB/s, and the op's rate divided by
--- the probe's rate.
local function measure(name)
  local kind = KINDS[name]
  local list = state(kind)
  steps(list, 2)
  local seconds, probes, ratios = {}, {}, {}
  for round = 1, args.rounds do
    seconds[round] = median(steps(list, args.passes))
    probes[round] = probe(args.params * 16, 4, 3, true)
    ratios[round] = args.params * kind.bytes / 1e9 / seconds[round] / probes[round]
  end
  release(list)
  return median(seconds), median(probes), median(ratios)
end

local function peers(result)
  local python = os.getenv("PS_TORCH_PYTHON") or "python3"
  local script = (arg[0]:match("^(.*)/[^/]*$") or ".") .. "/peers/adam_torch.py"
  local p = assert(io.popen(("OMP_NUM_THREADS=%d timeout 300 '%s' '%s' --params %d --passes %d"):format(ps.threads(),
    python, script, args.params, args.rounds * args.passes)))
  local last
  for line in p:lines() do
    if line:match("^{.*}$") then last = line else print(line) end
  end
  p:close()
  for key, value in pairs(last and cjson.decode(last) or {}) do result[key] = value end
end

print(ps.device("cpu").description)
ps.manual_seed(0)
local result = { params = args.params, threads = ps.threads() }
ps.no_grad(function()
  for _, name in ipairs { "fp32", "grad_bf16", "mixed" } do
    local kind = KINDS[name]
    local seconds, probed, ratio = measure(name)
    local prefix = name == "fp32" and "" or name .. "_"
    result[prefix .. "gparams_per_s"] = args.params / seconds / 1e9
    result[prefix .. "gb_per_s"] = args.params * kind.bytes / seconds / 1e9
    result[prefix .. "probe_gb_per_s"] = probed
    result[prefix .. "bandwidth_ratio"] = ratio
  end
end)
local triads = {}
for round = 1, args.rounds do triads[round] = probe(args.params * 12, 2, 1, false) end
result.triad_gb_per_s = median(triads)
if not args.no_peers then peers(result) end
print(cjson.encode(result))
