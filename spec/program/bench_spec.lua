-- SPDX-License-Identifier: BSD-3-Clause
-- Benches with the smallest of models: they run, and their results are plausible.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"

describe("larger_than_memory.lua", function()
  -- Trains a family's smallest preset, and returns the result.
  local function trained(options)
    local folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    local text, code = check.shell(("OMP_NUM_THREADS=1 timeout 300 '%s' '%s/bench/larger_than_memory.lua' --model tiny "
      .. "--seq 32 --host 6MiB --limit 20000000 --disk '%s' --spare 0 --steps 1 %s"):format(paths.exe, paths.root,
      folder, options))
    local left = 0
    for name in lfs.dir(folder) do if name ~= "." and name ~= ".." then left = left + 1 end end
    os.execute("rm -r " .. folder)
    assert.equal(0, code, text)
    assert.equal(0, left)
    return require("cjson").decode(text:match("(%b{})\n$"))
  end

  it("measures the disk with bytes that fit small budgets", function()
    local result = trained ""
    assert.equal(6 * 2 ^ 20, result.probe_nbytes)
    assert.truthy(result.probe_read_gb_per_s > 0 and result.probe_write_gb_per_s > 0)
  end)

  it("takes a family, an optimizer and a kind of master", function()
    local adam = trained "--family llama"
    local small = trained "--family llama --optimizer AdamW8bit --master remainder"
    assert.same({ "llama", "AdamW8bit", "remainder" }, { small.family, small.optimizer, small.master })
    assert.equal(adam.parameters, small.parameters)
    assert.truthy(small.state_bytes < 0.6 * adam.state_bytes, small.state_bytes .. " of " .. adam.state_bytes)
  end)
end)

describe("bound_lib.lua", function()
  it("reads the trace of a step: uses in order, sizes of their chunks, and the bytes that chunks can use", function()
    local ps = require "ps"
    local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = 2 ^ 14,
      memory = { host = 2 ^ 21 }, optimizer = { type = "AdamW" } }, model_func = function()
      return require("models.gpt2").new("tiny", { n_layer = 1, vocab_size = 64, n_positions = 16 })
    end }
    for _ = 1, 2 do
      local x = ps.zeros({ 1, 8 }, { dtype = "int32" })
      model:backward(model(x, x))
      optimizer:step()
    end
    local trace, capacity, other = require("bench.bound_lib").trace_of(require("ps.nn.handle").of(model))
    assert.equal(2 ^ 21, capacity + other)
    assert.truthy(other > 0 and #trace.uses > #trace.sizes)
    local used, last = {}, 0
    for _, use in ipairs(trace.uses) do
      assert.truthy(use.moment >= last and use.moment < trace.moments)
      last, used[use.chunk] = use.moment, true
    end
    for _, chunk in ipairs(ps.chunks()) do
      assert.equal(chunk.nbytes, trace.sizes[chunk.id + 1])
      assert.truthy(used[chunk.id + 1])
    end
    model:close()
  end)
end)

describe("side_by_side.lua", function()
  it("ends with a line of JSON that has the medians and ratios, for bench/record.lua", function()
    local text, code = check.shell(([[cd '%s' && '%s' bench/side_by_side.lua 'echo "{\"x_per_s\": 6, \"y_mib\": 2}"' \
      'echo "{\"x_per_s\": 4, \"y_mib\": 8}"' false --key x_per_s y_mib --rounds 2]]):format(paths.root, paths.exe))
    assert.equal(0, code, text)
    local found = require("cjson").decode(text:match "\n(%[[^\n]*%])\n$")
    assert.same({ 6, 2, 1.5, 4 }, { found[1].x_per_s, found[1].y_mib, found[2].first_is_better_x_per_s,
      found[2].first_is_better_y_mib })
    assert.same({ command = "false", rounds = 2 }, found[3])
  end)
end)

describe("first_logits.lua", function()
  it("writes the folder, loads it in its own process, and prints seconds and memory", function()
    local folder = os.tmpname()
    os.remove(folder)
    local text, code = check.shell(("OMP_NUM_THREADS=1 timeout 300 '%s' '%s/bench/first_logits.lua' '%s' --make tiny "
      .. "--dtype fp32 --rounds 1 --cold --ids '7 1 2'"):format(paths.exe, paths.root, folder))
    local written = lfs.attributes(folder .. "/model.safetensors", "size")
    os.execute("rm -r " .. folder)
    assert.equal(0, code, text)
    local result = require("cjson").decode(text:match("(%b{})\n$"))
    assert.equal(written, result.file_bytes)
    assert.truthy(result.cold and result.seconds > 0, text)
    assert.near(result.peak_mib - written / 2 ^ 20, result.over_model_mib, 1e-6)
  end)
end)

describe("profiler_cost.lua", function()
  local instructions = require "bench.instructions_lib"

  -- Returns the last line of the benchmark's output for this number of counted steps.
  local function run(count)
    local text, code = check.shell(("OMP_NUM_THREADS=1 timeout 300 '%s' '%s/bench/profiler_cost.lua' --rounds 2 "
      .. "--steps 1 --count-steps %d"):format(paths.exe, paths.root, count))
    assert.equal(0, code, text)
    return require("cjson").decode(text:match("(%b{})\n$")), text
  end

  it("times an event, an op and a step, and names the figures that it did not count", function()
    local result, text = run(0)
    assert.truthy(result.event_ns > 1 and result.event_ns < 1e6, text)
    assert.truthy(math.abs(result.op_ns) < 1e6 and math.abs(result.on) < 10, text)
    assert.equal(require("cjson").null, result.off)
    assert.truthy(text:find("off: not counted", 1, true), text)
  end)

  if os.getenv "PS_FULL" and os.execute "command -v valgrind > /dev/null" == 0 then
    it("counts the record's instructions while it is off", function()
      local result, text = run(1)
      assert.truthy(result.instructions > 1e6 and result.of_record > 100, text)
      assert.truthy(result.off < 1e-3, text)
    end)
  end

  it("reads instructions by line", function()
    local at, plain
    local lines = 0
    for line in io.lines(paths.root .. "/src/tensor/dispatch.c") do
      lines = lines + 1
      if not at and line:find("= ps_record_begin()", 1, true) then at = lines end
      if not plain and line:find("scratch_free(a)", 1, true) then plain = lines end
    end
    local name = os.tmpname()
    check.write(name, ([[
# callgrind format
positions: line
events: Ir
fl=/usr/src/libc/math.c
fn=pow
12 1000
fl=/build/src/tensor/dispatch.c
fn=call_kernel
%d 7
fi=../src/base/record.h
31 20
fe=/build/src/tensor/dispatch.c
cfi=/build/src/base/record.c
cfn=ps_record_put
calls=3 180
%d 5000
%d 400
%d 1
]]):format(at, plain, plain, plain))
    local counts = instructions.read(name)
    os.remove(name)
    assert.equal(1428, counts.total)
    local taken, all = instructions.of(counts, function(file, text)
      return file == "base/record.h" or text:find("ps_record_", 1, true) ~= nil
    end)
    assert.same({ 27, 428 }, { taken, all })
  end)
end)

describe("gpu_table.lua", function()

  -- Returns the table of a part whose figures are these lines of "row|JSON".
  local function table_of(part, lines)
    local name = os.tmpname()
    check.write(name, (lines:gsub("|", "\t")))
    local p = assert(io.popen(("'%s' '%s/bench/gpu_table.lua' --part %s %s 2>&1"):format(paths.exe, paths.root, part,
      name)))
    local text = p:read("*a")
    p:close()
    os.remove(name)
    return text
  end

  local function has(text, pattern) assert.truthy(text:find(pattern), text) end

  it("compares the fastest of each side with the goals, and marks missing figures", function()
    local text = table_of("speed", [[
products|{"what":"matmul","n":8192,"tflops":700}
products, PyTorch|{"what":"matmul","n":8192,"tflops":800,"peer":"torch 2"}
gpt2-xl|{"model":"gpt2-xl","parameters":1e9,"tokens_per_s":60000,"mfu":0.5,"gemm_peak_gflops":750000}
gpt2-xl, attention by wgmma|{"model":"gpt2-xl","parameters":1e9,"tokens_per_s":90000}
gpt2-xl, PyTorch|{"what":"train","model":"gpt2-xl","tokens_per_s":70000,"peer":"torch 2","how":"blocks","batch":8}
gpt2-xl, PyTorch|{"what":"train","model":"gpt2-xl","tokens_per_s":75000,"peer":"torch 2","how":"whole","batch":8}
gpt2|{"model":"gpt2","parameters":1e8,"tokens_per_s":100000}
gpt2|{"model":"gpt2","tokens_per_s
attention|{"what":"attention","head":64,"forward_tflops":300,"both_tflops":200}
attention, PyTorch|{"what":"attention","kind":"flash","head":64,"forward_tflops":200,"both_tflops":250,"peer":"torch 2"}
]])
    has(text, "ceiling: 800 TFLOP/s")
    has(text, "gpt2%-xl, tokens/s +90000 +75000 +1%.200 +1%.1  reached\n    peer: torch 2, whole, batch 8")
    has(text, "gpt2%-xl, share of the ceiling .- 540 +800 +0%.675 +0%.6  reached")
    has(text, "gpt2, tokens/s +100000 +%- +%- +1%.1  NO FIGURE")
    has(text, "gpt2, share of the ceiling .- 60 +800 +0%.075 +0%.6  SHORT")
    has(text, "head 64, forward, TFLOP/s +300 +200 +1%.500 +0%.8  reached")
    has(text, "head 64, fwd %+ bwd, TFLOP/s +200 +250 +0%.800 +1%.0  SHORT")
    has(text, "head 128, forward, TFLOP/s +%- +%- +%- +0%.8  NO FIGURE")
  end)

  it("compares a step with its copies, also with a peer that has fewer layers", function()
    local ours = [[
state|{"what":"offload","parameters":4e9,"tokens_per_s":1000,"over_bound":%g,"link_share":%g,"step_s":1,]]
      .. [["compute_s":%g,"copies_s":0.9,"link_up_gb_per_s":20,"link_down_gb_per_s":20,"same_losses":true}
peer|{"what":"offload","parameters":2e9,"tokens_per_s":800,"peer":"torch 2"}
]]
    local text = table_of("offload", ours:format(1.1, 0.9, 0.5))
    has(text, "params/s +4000 +1600 +2%.500 +2  reached")
    has(text, "max%(compute, copies%) +1.000 s +0.900 s +1%.100 +<=1%.15  reached")
    has(text, "of the link +0.900 s +1.000 s +0%.900 +0%.85  reached")
    text = table_of("offload", ours:format(1.2, 0.7, 0.5))
    has(text, "<=1%.15  SHORT")
    has(text, "0%.700 +0%.85  SHORT")
    has(table_of("offload", ours:format(1.1, 0.3, 2)), "the computation is longer")
    has(table_of("largest", 'a|{"parameters":16e9}\n'), "16000000000 +6710886400 +2%.384 +2  reached")
    assert.equal("", table_of("correct", ""))
  end)
end)
