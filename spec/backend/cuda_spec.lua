-- SPDX-License-Identifier: BSD-3-Clause
-- The device cuda on machines without a GPU: its errors when something is missing, and its kernels, compiled for
-- the processor (spec/emulate), against ref, in training and in chunks. bench/gpu_check.sh runs the same on a GPU.
-- PS_FULL=1 runs all types; fp16 differs from bf16 only in its conversions. PS_CUDA_REAL=1 tests the real plug-in on
-- this machine's GPU instead of the emulated one.
-- Each test runs in its own processes: a process opens the device once, and finds the driver by its environment.
local check = require "spec.check_lib"
local lfs = require "lfs"
local paths = require "ps.paths"
local cuda = require "spec.cuda_lib"

local BUILD, DRIVER, PLUGIN, REAL, FULL = cuda.BUILD, cuda.DRIVER, cuda.PLUGIN, cuda.REAL, cuda.FULL
local HAS_DRIVER, child = cuda.HAS_DRIVER, cuda.child
local it = it
if REAL and not HAS_DRIVER then                -- all devices are listed, and each is excluded
  local listed = it
  it = function(name) listed(name, function() pending(cuda.lacks_kernels()) end) end
end

local function needs_emulated(kernels)
  if REAL and not kernels then
    pending("this test needs a missing part, and nothing is missing")
    return true
  end
  local why = cuda.lacks_kernels()
  if why then pending(why) end
  return why ~= nil
end

--- Checks that opening the device fails with a message that contains all of these texts.
local function says(env, ...)
  local out, code = child("local ok, err = pcall(ps.device, 'cuda') assert(not ok) print(tostring(err))", env)
  assert.equal(0, code, out)
  for _, part in ipairs { "no device cuda: ", ... } do
    assert.truthy(out:find(part, 1, true), ("'%s' is not in: %s"):format(part, out))
  end
end

describe("the device cuda names the missing part:", function()
  it("a driver", function()
    if HAS_DRIVER then return pending("this machine has a driver") end
    says({ LD_LIBRARY_PATH = false }, "no NVIDIA driver on this machine", "libcuda.so.1")
  end)
  it("a driver that starts", function()
    if needs_emulated() then return end
    says({ PS_EMULATE_INIT = "803" }, "the NVIDIA driver does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)")
    says({ PS_EMULATE_VERSION = "11040" }, "the NVIDIA driver is too old: it supports CUDA 11.4, but 12.0 is needed")
  end)
  it("a device", function()
    if needs_emulated() then return end
    says({ PS_EMULATE_DEVICES = "0" }, "the NVIDIA driver shows no device")
    says({ PS_EMULATE_INIT = "100", CUDA_VISIBLE_DEVICES = "7" }, "shows no device (CUDA_VISIBLE_DEVICES is '7')")
    says({ PS_EMULATE_CAPABILITY = "7" }, "no device: emulated on the processor has compute capability 7.0",
         "but at least 8.0 is needed")
  end)
  it("a library", function()
    if needs_emulated() then return end
    says({ PS_CUDA_PLUGIN = "/nowhere/libps_cuda.so" }, "no library: PS_CUDA_PLUGIN is '/nowhere/libps_cuda.so'",
         "No such file")
    says({ PS_CUDA_PLUGIN = DRIVER .. "/libcuda.so.1" }, "no library: ", "has no function ps_cuda_plugin_open")
    local broken = os.tmpname()
    says({ PS_CUDA_PLUGIN = broken }, "no library: ", broken)
    os.remove(broken)
    if lfs.attributes(BUILD .. "/libps_cuda.so", "mode") then return end
    says({ PS_CUDA_PLUGIN = false }, "no library: libps_cuda.so is not in " .. BUILD, "package psluajit-cuda",
         "-DPS_CUDA=ON")
  end)
  it("a library that the plug-in needs", function()
    if needs_emulated() then return end
    local bytes, n = check.read(PLUGIN):gsub("%zlibc%.so%.6%z", "\0libQ.so.6\0")
    assert.equal(1, n)
    local other = os.tmpname()
    check.write(other, bytes)
    says({ PS_CUDA_PLUGIN = other }, "no library: libQ.so.6: cannot open shared object file", "the plug-in " .. other
         .. " needs it; install it, and add its folder to LD_LIBRARY_PATH")
    os.remove(other)
  end)
  it("a library of the same build", function()
    if needs_emulated() then return end
    local hash = require("ps.cdef").hash
    local f = assert(io.open(PLUGIN, "rb"))
    local bytes, n = f:read("*a"):gsub(hash, (("0123456789abcdef"):sub(1, #hash)))
    f:close()
    assert.truthy(n > 0)
    local other = os.tmpname()
    f = assert(io.open(other, "wb"))
    f:write(bytes)
    f:close()
    says({ PS_CUDA_PLUGIN = other }, "was built from other sources than psluajit (0123456789abcdef", "not " .. hash)
    os.remove(other)
  end)
  it("memory", function()
    if needs_emulated() then return end
    says({ PS_EMULATE_MEMORY = tostring(300 * 2 ^ 20) }, "no memory: emulated on the processor has 300 MiB",
         "300 MiB are free and at least 512 MiB are needed")
  end)
  it("and a configuration falls back to the cpu only with auto", function()
    if HAS_DRIVER then return pending("this machine has a driver") end
    local out, code = child([[
      local nn = require "ps.nn"
      local function open(device)
        return pcall(ps.initialize, { model_func = function() return nn.Linear(4, 4) end,
          config = { device = device } })
      end
      local ok, err = open("cuda")
      assert(not ok and tostring(err):find("no NVIDIA driver", 1, true), tostring(err))
      local model
      ok, model = open("auto")
      assert(ok, tostring(model))
      print(ps.devices()[5] and "cuda" or "cpu")
    ]], { LD_LIBRARY_PATH = false })
    assert.equal(0, code, out)
    assert.truthy(out:find("cpu", 1, true), out)
  end)
end)

it("a GPU that cannot be used is noted if the configuration says auto", function()
  if needs_emulated() then return end
  for device, count in pairs { auto = 1, cpu = 0 } do
    local out, code = child(([[
      local nn = require "ps.nn"
      ps.initialize { model_func = function() return nn.Linear(4, 4) end, config = { device = %q } }
    ]]):format(device), { PS_CUDA_PLUGIN = "/nowhere" })
    local _, notes = out:gsub('device: "auto" is the cpu here: no device cuda: no library', "")
    assert.equal(0, code, out)
    assert.equal(count, notes, out)
  end
end)

--- Runs a script that must print "fine" at its end.
local function runs(script, env)
  if needs_emulated(true) then return end
  local out, code = child(cuda.NEAR .. script .. "\nall_near() print 'fine'", env)
  assert.truthy(code == 0 and out:find("fine\n", 1, true), out)
end

describe("the kernels of the device cuda" .. (REAL and "" or ", on the processor,"), function()
  it("agree with ref over the case table", function()
    if needs_emulated(true) then return end
    if os.getenv("PS_CUDA_OPS") == "0" then return pending("the table runs in processes of its own") end
    local out, code = child({ "spec/run.lua", "ops" }, { PS_TEST_DEVICE = "cuda", PS_TEST_SKIP = not FULL and "fp16" })
    assert.truthy(code == 0 and out:find(" 0 failed, 0 skipped", 1, true), out)
  end)

  it("exist for every op except updates on the host and ops that move nothing or join ranks", function()
    local without = { "copy_to_tp", "counted_once", "expand", "permute", "reshape", "scatter_to_tp", "slice",
      "to_device" }
    for name in pairs(cuda.HOST) do without[#without + 1] = name end
    table.sort(without)
    runs(([[
      local cuda, missing = ps.device("cuda") and 4, {}
      for code = 0, ps.C.PS_OP_COUNT - 1 do
        local row = ps.op_info[code]
        local none = ps.C.ps_op_kernel_device(ps.ctx, cuda, code) < 0
        if none and not row.flags:find("RANKS") then missing[#missing + 1] = row.name end
      end
      table.sort(missing)
      missing = table.concat(missing, " ")
      assert(missing == %q, missing)
    ]]):format(table.concat(without, " ")))
  end)

  it("compute attention with wide heads, over several tiles, with every combination of options", function()
    runs [[
      local ops = ps.ops
      for _, case in ipairs { { 128, 70, 130, 1, 0, false }, { 96, 65, 65, 1, 0.2, true }, { 72, 130, 66, 0, 0, true },
                              { 128, 33, 200, 0, 0.1, false }, { 258, 20, 40, 1, 0, false },
                              { 64, 140, 200, 1, 0, false }, { 128, 140, 140, 1, 0, false }, { 40, 150, 100, 1, 0,
                              false }, { 64, 130, 70, 0, 0, false }, { 64, 130, 132, 1, 0.3, true },
                              { 256, 70, 70, 1, 0, false }, { 144, 40, 66, 1, 0.1, true },
                              { 190, 70, 40, 0, 0, false } } do
        local D, T, S, causal, p, masked = unpack(case)
        for _, dtype in ipairs { "bf16", "fp16", "fp32" } do
          local function make(n) return ps.randn({ 2, 2, n, D }, { dtype = dtype, device = "ref" }) end
          local q, k, v, dy = make(T), make(S), make(S), make(T)
          local mask = masked and ps.rand({ 2, S }, { device = "ref" }):gt(0.3) or nil
          local results = {}
          for _, device in ipairs { "ref", "cuda" } do
            local function there(t) return t and t:to(device) or nil end
            local function leaf(t) return there(t):clone():detach():requires_grad(true) end
            local a, b, c = leaf(q), leaf(k), leaf(v)
            local y = ops.attention(a, b, c, there(mask), D ^ -0.5, causal, p, 5, 6, 7, 8)
            ;(y * there(dy)):sum():backward()
            results[device] = { y, a:grad(), b:grad(), c:grad() }
          end
          for i, what in ipairs { "y", "dq", "dk", "dv" } do
            near(results.cuda[i], results.ref[i], dtype == "fp32" and 1e-4 or dtype == "fp16" and 0.02 or 0.12,
                 ("%s of D %d in %s"):format(what, D, dtype), true)
          end
        end
      end
    ]]
  end)

  it("compute a GELU, its gradient and sums for biases within products, with ref's gradients", function()
    runs [[
      -- Rows, features, hidden features (cuBLASLt needs multiples of 8, and its stand-in rejects 23), biases, out_in.
      for _, case in ipairs { { 33, 16, 32, true, 0 }, { 40, 24, 64, true, 1 }, { 20, 8, 48, false, 0 },
                              { 9, 12, 23, true, 0 }, { 17, 16, 30, true, 1 } } do
        local N, C, H, biases, out_in = unpack(case)
        for _, dtype in ipairs { "fp32", "bf16" } do
          local function make(...) return ps.randn({ ... }, { dtype = dtype, device = "ref" }) * 0.5 end
          local function weight(a, b) if out_in == 1 then return make(b, a) end return make(a, b) end
          local inputs = { make(N, C), weight(C, H), biases and make(H), weight(H, C), biases and make(C), make(N, C) }
          local dy, results = make(N, C), {}
          for _, device in ipairs { "ref", "cuda" } do
            local list = {}
            for i = 1, 6 do list[i] = inputs[i] and inputs[i]:to(device):clone():detach():requires_grad(true) or nil end
            for _ = 1, 2 do                                    -- the second run adds to existing gradients
              local y = ps.ops.mlp(list[1], list[2], list[3], list[4], list[5], list[6], out_in)
              results[device] = { y }
              ;(y * dy:to(device)):sum():backward()
            end
            for i = 1, 6 do results[device][i + 1] = list[i] and list[i]:grad() end
          end
          for i = 1, 7 do
            local want = results.ref[i]
            if want then
              near(results.cuda[i], want, dtype == "fp32" and 1e-5 or 0.1, ("%d of %d x %d x %d in %s"):format(i, N, C,
                H, dtype), true)
            end
          end
        end
      end
    ]]
  end)

  it("draw the same tokens as the cpu, and name a logit that is NaN", function()
    runs [[
      local V = 1000
      local logits = (ps.randn({ 3, V }, { device = "cpu" }) * 3):round()             -- many of the logits are equal
      for _, dtype in ipairs { "fp32", "bf16", "fp64" } do
        for number, how in ipairs { { 1, 1, 0 }, { 0.5, 0.8, 0 }, { 2, 1, 40 }, { 0.7, 0.3, 200 }, { 0, 1, 0 },
                                   { 3, 0.9, 500, 0.3 } } do
          local want = ps.ops.sample(logits:to(dtype), how[1], how[2], how[3], 5, number, how[4])
          local got = ps.ops.sample(logits:to(dtype):to("cuda"), how[1], how[2], how[3], 5, number, how[4])
          local a, b = table.concat(want:tolist(), " "), table.concat(got:tolist(), " ")
          assert(a == b, ("%s, case %d: %s, not %s"):format(dtype, number, b, a))
        end
      end
      for _, case in ipairs { { 0 / 0, "logit 2 of row 0 is NaN" }, { math.huge, "logit of row 0 is inf" } } do
        local ok, err = pcall(function()
          return ps.ops.sample(ps.tensor({ { 1, 2, case[1] } }):to("cuda"), 1, 1, 0, 1, 0):tolist()
        end)
        assert(not ok and tostring(err):find(case[2], 1, true), tostring(err))
      end
      local gpt2 = require "models.gpt2"
      ps.manual_seed(4)
      local model = gpt2.new { vocab_size = 64, n_positions = 16, n_embd = 32, n_layer = 1, n_head = 2 }
      local want = table.concat(model:generate({ 1, 2, 3 }, 12, { seed = 7, top_k = 20 }), " ")
      model:to { device = "cuda" }
      assert(want == table.concat(model:generate({ 1, 2, 3 }, 12, { seed = 7, top_k = 20 }), " "))
    ]]
  end)

  it("report an index out of range at the next check, and continue", function()
    runs [[
      local w = ps.ones({ 5, 4 }, { device = "cuda" })
      local y = ps.ops.embedding(w, ps.tensor({ 1, 7, 2 }, "int64"):to("cuda"))
      local ok, err = pcall(function() return y:to("cpu") end)
      assert(not ok and tostring(err):find("embedding, on cuda: index 7 at position 1 is outside [0, 5)", 1, true),
             tostring(err))
      assert(w:to("cpu"):sum():item() == 20)
      local logits, target = ps.zeros({ 2, 3 }, { device = "cuda" }), ps.tensor({ 2, -5 }, "int64"):to("cuda")
      ok, err = pcall(function() return ps.ops.cross_entropy(logits, target):item() end)
      assert(not ok and tostring(err):find("target -5 at position 1 is outside [0, 3) and is not ignore_index -100", 1,
                                           true), tostring(err))
      assert(w:to("cpu"):sum():item() == 20)
    ]]
    runs([[
      local ok, err = pcall(ps.ops.embedding, ps.ones({ 5, 4 }, { device = "cuda" }),
                            ps.tensor({ 9 }, "int64"):to("cuda"))
      assert(not ok and tostring(err):find("index 9 at position 0", 1, true), tostring(err))
    ]], { PS_CUDA_SYNC = "1" })
  end)

  it("stop the device when one fails, and name the op", function()
    if REAL then return pending("a real GPU cannot be made to fail") end
    runs([[
      local a = ps.ones({ 4 }, { device = "cuda" })
      local ok, err = pcall(function() return (a + a):to("cpu") end)     -- the host gets the error when it waits
      local text = tostring(err)
      assert(not ok and text:find("an illegal memory access was encountered (cudaErrorIllegalAddress)", 1, true)
             and text:find("the last op begun was add, the cause may be one before it", 1, true), text)
      for _, use in ipairs { function() return a:mul(a) end, function() return a:to("cpu") end } do
        ok, err = pcall(use)
        assert(not ok and tostring(err):find("device cuda cannot be used any more in this process", 1, true),
               tostring(err))
      end
      assert((ps.ones({ 4 }) + 1):sum():item() == 8)
    ]], { PS_EMULATE_FAIL = "2" })
  end)

  it("refuse requests for too much memory, like other devices", function()
    runs([[
      local much = os.getenv("PS_CUDA_REAL") and 4096 or 1
      local ok, err = pcall(ps.zeros, { 300 * much, 1024, 1024 }, { device = "cuda" })
      assert(not ok and tostring(err):find("cuda has no [%d.]+ MiB of memory in one piece, [%d.]+ MiB are free")
             and tostring(err):find("use a smaller batch, a smaller model or recompute", 1, true), tostring(err))
      assert(ps.ones({ 8 }, { device = "cuda" }):sum():item() == 8)
    ]], { PS_EMULATE_MEMORY = tostring(2 ^ 30) })
  end)

  it("train to the golden values, and in chunks with the same bits", function()
    runs(([[
      local golden, file = require "bench.golden_lib", %q
      for dtype, bound in pairs { fp32 = 2e-6, bf16 = %s } do
        local plain = golden.run(file, { dtype = dtype, device = "cuda" })
        assert(plain.max_rel_loss_error <= bound, dtype .. ": loss error " .. plain.max_rel_loss_error)
        if dtype == "fp32" then
          assert(plain.max_rel_grad_error <= 1e-5, "gradient error " .. plain.max_rel_grad_error)
          assert(plain.max_rel_param_error <= 1e-5, "parameter error " .. plain.max_rel_param_error)
        end
        local chunked = golden.run(file, { dtype = dtype, device = "cuda", memory = "chunk",
          device_memory = "1500KiB", chunk_size = 8192 })
        for _, figure in ipairs { "max_rel_loss_error", "max_rel_grad_error", "max_rel_param_error" } do
          assert(plain[figure] == chunked[figure], dtype .. " in chunks: " .. figure)
        end
      end
    ]]):format(paths.root .. "/spec/golden/gpt2_tiny.json", FULL and "5e-3" or "nil"))
  end)
end)

-- For scripts: counts(fn) runs fn and returns the emulator's counts during the call: how often the host waited, the
-- copies with memory that is not pinned, allocations, frees, and all copies.
local COUNTS = ([[
  local ffi = require "ffi"
  ffi.cdef "void ps_emu_take_counts(int64_t *out, int n);"
  ps.device("cuda")
  local plugin, seen = ffi.load(%q), ffi.new("int64_t[5]")
  local function counts(fn)
    plugin.ps_emu_take_counts(seen, 5)
    fn()
    plugin.ps_emu_take_counts(seen, 5)
    local result = {}
    for i, name in ipairs { "waits", "pageable", "taken", "given_back", "copies" } do
      result[name] = tonumber(seen[i - 1])
    end
    return result
  end
]]):format(PLUGIN)

describe("a training step on cuda after the first one", function()
  it("makes the host wait only for a norm that decides about the update, and allocates no memory", function()
    if REAL then return pending("the emulator counts; a GPU does not") end
    runs(COUNTS .. [[
      local gpt2, optim = require "models.gpt2", require "ps.optim"
      local SIZES = { vocab_size = 64, n_positions = 8, n_embd = 16, n_layer = 2, n_head = 2 }
      local function check(what, step, waits, copies)
        step()
        step()
        ps.ones({ 1 }, { device = "cuda" }):item()           -- waits for the copies of the first step
        local got = counts(step)
        local want = { waits = waits, pageable = 0, taken = 0, given_back = 0, copies = copies }
        for name, n in pairs(want) do
          assert(got[name] == n, ("%s: %s is %d, not %d"):format(what, name, got[name], n))
        end
      end
      local function batch() return ps.randint(0, 64, { 2, 8 }, { dtype = "int32", device = "cpu" }) end

      for _, dtype in ipairs { "fp32", "bf16" } do
        for clip = 0, 1 do
          local was = ps.set_default_device("cuda")
          local model = gpt2.new(SIZES):to(dtype)
          ps.set_default_device(was)
          local opt = optim.AdamW(model, { lr = 1e-3, max_norm = clip == 1 and 0.5 or nil })
          local function step()
            local x = batch():to("cuda")
            model(x, x):backward()
            opt:step()
            opt:zero_grad()
          end
          check(dtype .. (clip == 1 and ", clipped" or ""), step, clip, 1 + clip)
        end
      end

      for _, case in ipairs { { waits = 0 }, { bf16 = true, waits = 0 }, { bf16 = true, clip = 0.5, waits = 1 },
                              { fp16 = true, waits = 1 }, { bf16 = true, clip = 0.5, accumulate = 3, waits = 1 },
                              { bf16 = true, clip = 0.5, accumulate = 3, memory = "plain", waits = 1 } } do
        local accumulate = case.accumulate or 1
        local model, opt = ps.initialize { model_func = function() return gpt2.new(SIZES) end, quiet = true,
          config = { device = "cuda", bf16 = case.bf16 and { enabled = true }, gradient_clipping = case.clip,
            fp16 = case.fp16 and { enabled = true, initial_scale_power = 8 }, memory = case.memory,
            gradient_accumulation_steps = accumulate, use_cpu_embedding = false } }
        local function step()
          for _ = 1, accumulate do
            local x = batch()
            model:backward(model(x, x))
            opt:step()
          end
        end
        local what = ("an engine in %s, %d micro-batches%s"):format(case.bf16 and "bf16" or case.fp16 and "fp16"
          or "fp32", accumulate, case.memory and ", plain" or "")
        check(what, step, case.waits, 2 * accumulate + case.waits)
        model:close()
      end
    ]])
  end)

  it("sends activations to the host and back during the computation, all through pinned memory", function()
    if REAL then return pending("the emulator counts; a GPU does not") end
    runs(COUNTS .. [[
      local F, ROWS, WIDTH = ps.F, 365, 48
      local weights, x = {}, ps.randn({ ROWS, WIDTH }, { device = "cuda" }):keep()
      for i = 1, 6 do
        weights[i] = ps.randn({ WIDTH, WIDTH }, { device = "cuda" }):mul(0.1):keep():requires_grad(true)
      end
      local function block(t, w) return F.dropout(F.gelu(F.linear(t, w), "tanh"), 0.1) + t end
      local function forward()
        local h = x
        for _, w in ipairs(weights) do h = ps.scope(block, h, w) end
        return h:square():mean()
      end
      local sums = {}
      local function step(mode)
        ps.manual_seed(3)
        mode(ps.scope, forward):backward()
        for i, w in ipairs(weights) do
          sums[i] = w:grad()
          w:set_grad(nil)
        end
      end
      local function read()
        for i, grad in ipairs(sums) do sums[i] = table.concat(grad:reshape(-1):tolist(), " ") end
        return table.concat(sums, ";")
      end
      step(function(fn, ...) return fn(...) end)
      local want = read()
      for _ = 1, 3 do
        step(ps.offload_activations)
        assert(read() == want)
      end
      local got = counts(function() step(ps.offload_activations) end)
      assert(got.copies >= 12 and got.pageable == 0, got.pageable .. " of " .. got.copies .. " copies not pinned")
      assert(got.taken == 0 and got.given_back == 0, got.taken .. " taken")
      assert(read() == want)
    ]])
  end)

  it("can copy large tensors into host memory of which a part is pinned", function()
    runs [[
      local F, w = ps.F, ps.randn({ 48, 48 }, { device = "cuda" }):requires_grad(true)
      local function block(t) return F.gelu(F.linear(t, w), "tanh") + t end
      ps.offload_activations(ps.scope, function()
        local h = ps.randn({ 365, 48 }, { device = "cuda" })
        for _ = 1, 6 do h = ps.scope(block, h) end
        return h:square():mean()
      end):backward()
      for n = 70000, 1000000, 77777 do
        assert(ps.ones({ n }, { device = "cuda" }):to("cpu"):sum():item() == n)
      end
    ]]
  end)

  it("moves chunks through pinned memory, and allocates none for that", function()
    if REAL then return pending("the emulator counts; a GPU does not") end
    runs(COUNTS .. [[
      local gpt2 = require "models.gpt2"
      -- With the second setting, state is copied to the device for its update, so that chunks of two sizes replace each
      -- other.
      local rates = { host_adam = 1e6, device_adam = 1e9, up = 1e10, down = 1e10 }
      for budget, speeds in pairs { ["700KiB"] = {}, ["560KiB"] = rates } do
        local model, opt = ps.initialize { quiet = true, config = { device = "cuda", bf16 = { enabled = true },
          gradient_clipping = 1, chunk_size = 4096, rates = speeds, memory = { device = budget, host = "64MiB" } },
          model_func = function()
            return gpt2.new { vocab_size = 64, n_positions = 16, n_embd = 48, n_layer = 3, n_head = 2 }
          end }
        local function step()
          local x = ps.randint(0, 64, { 2, 16 }, { dtype = "int32", device = "cpu" })
          model:backward(model(x, x))
          opt:step()
        end
        for _ = 1, 4 do step() end
        local got = counts(step)
        assert(got.copies > 6 and got.pageable == 0, got.pageable .. " of " .. got.copies .. " copies not pinned")
        assert(got.taken == 0 and got.given_back == 0, budget .. ": " .. got.taken .. " taken")
        model:close()
      end
    ]])
  end)
end)
