-- SPDX-License-Identifier: BSD-3-Clause
-- The device cuda in scripts. Tensors print as on any device, models and batches move there by name, and an error
-- about a tensor on the wrong device says how to correct it. Scripts run in processes of their own, as in cuda_spec.
local lfs = require "lfs"
local paths = require "ps.paths"
local cuda = require "spec.cuda_lib"

local function runs(script, env)
  local why = cuda.lacks_kernels()
  if why then return pending(why) end
  local out, code = cuda.child(script .. "\nprint 'fine'", env)
  assert.truthy(code == 0 and out:find("fine\n", 1, true), out)
  return out
end

describe("on the device cuda", function()
  it("tensors print their values, as on the cpu", function()
    runs [[
      local function same(t)
        local here, there = tostring(t), tostring(t:to("cuda"))
        assert(there == here:gsub(" cpu", " cuda", 1), there)
      end
      for _, shape in ipairs { {}, { 1 }, { 3 }, { 7 }, { 100 }, { 2, 3 }, { 50, 40 }, { 9, 1, 8 }, { 5, 9, 2, 7 } } do
        same(ps.randn(shape))
        same(ps.randn(shape):to("bf16"))
      end
      same(ps.arange(0, 5000):reshape(50, 100))
      same(ps.tensor { true, false, true })
      same(ps.zeros { 0, 3 })
      local w = ps.arange(0, 600):reshape(20, 30):to("fp32")
      assert(tostring(w:to("cuda"):t()) == tostring(w:t()):gsub(" cpu", " cuda"))
      assert(tostring(w:to("sim")) == tostring(w):gsub(" cpu", " sim"))
      local leaf = w:to("cuda"):detach():requires_grad(true)
      assert(tostring(leaf):find("fp32 cuda requires_grad\n[[", 1, true), tostring(leaf))
      leaf:sum():backward()
      assert(leaf:grad():to("cpu"):sum():item() == 600)
    ]]
  end)

  it("it may be opened for the first time while an engine of the cpu is open", function()
    runs [[
      local model, optimizer = ps.initialize { quiet = true, model_func = function() return ps.nn.Linear(8, 8) end,
        config = { device = "cpu", plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
      local x = ps.randn { 4, 8 }
      for step = 1, 3 do
        model:backward(model(x):square():mean())
        if step == 2 then
          local there = x:to("cuda")
          assert((there * 2):to("cpu"):sub(x * 2):abs():max():item() == 0)
          assert(ps.memory_available("cuda") > 0)
        end
        optimizer:step()
      end
      model:close()
      local w = ps.randn({ 64, 64 }, { device = "cuda" })
      assert(math.abs((w * 3):to("cpu"):sum():item() - 3 * w:to("cpu"):sum():item()) < 1e-2)
    ]]
  end)

  it("a profile has the times of kernels and copies by the device's clock, and adds no waits", function()
    if cuda.REAL then return pending "needs the emulated streams" end
    runs([[
      local ffi, C, json = require "ffi", ps.C, require "cjson"
      local a = ps.randn({ 96, 96 }, { device = "cuda" })
      a:to "cpu"
      ps.profiler.start()
      local b = ps.no_grad(function() return a:matmul(a) end)      -- aligns the clocks
      local began = C.ps_record_clock()
      ps.no_grad(function() for _ = 1, 5 do b = a:matmul(b) end end)
      local asked = C.ps_record_clock()
      local file = os.tmpname()
      require("posix.time").nanosleep { tv_sec = 0, tv_nsec = 3e7 }
      b:to "cpu"
      local over = C.ps_record_clock()
      ps.profiler.save(file)
      local profile = json.decode(io.open(file):read "*a")
      os.remove(file)
      local kernels, origin = {}, nil
      local event, dropped = ffi.new "ps_record_event", ffi.new "int64_t[1]"
      for i = 0, tonumber(C.ps_record_count(dropped)) - 1 do
        assert(C.ps_record_get(i, event) == 0)
        if event.kind == C.PS_REC_OP and event.name == C.PS_OP_matmul then
          kernels[#kernels + 1] = { tonumber(event.begin_ns - began), tonumber(event.end_ns - began) }
          assert(event.on == 1)
        end
      end
      assert(#kernels == 6, #kernels)
      local late = tonumber(asked - began) + 3e7                 -- no work runs before the host waits for it
      for i, k in ipairs(kernels) do
        assert(k[2] > k[1], "a kernel takes time")
        assert(i == 1 or k[1] >= kernels[i - 1][2] - 2000, "kernels of a stream do not overlap")
        assert(k[1] >= late - 1e5, ("kernel %d began %g ms after the calls"):format(i, (k[1] - late) * 1e-6))
        assert(k[2] <= tonumber(over - began) + 1e5)
      end
      local named = {}
      for _, e in ipairs(profile.traceEvents) do
        if e.ph == "M" and e.name == "thread_name" then named[e.tid] = e.args.name end
      end
      local on_track = 0
      for _, e in ipairs(profile.traceEvents) do
        if e.cat == "op" and e.name == "matmul" and named[e.tid] == "kernels" then on_track = on_track + 1 end
      end
      assert(on_track == 6)
    ]], { PS_EMULATE_STREAMS = "late" })
  end)

  it("a profile has the durations of copies of chunks without their waits", function()
    if cuda.REAL then return pending "needs the emulated streams" end
    runs([[
      local gpt2 = require "models.gpt2"
      local json = require "cjson"
      ps.manual_seed(3)
      local model, optimizer = ps.initialize { quiet = true, config = { device = "cuda", plan_print = false,
        chunk_size = 16384, memory = { device = "1MiB" } },
        model_func = function() return gpt2.new("tiny", { n_layer = 4 }) end }
      local x = ps.randint(0, 256, { 1, 16 }, { dtype = "int32" })
      local function step()
        model:backward(model(x, x))
        optimizer:step()
        optimizer:zero_grad()
      end
      step()
      ps.profiler.start()
      step()
      step()
      ps.profiler.stop()
      local file = os.tmpname()
      ps.profiler.save(file)
      local profile = json.decode(io.open(file):read "*a")
      os.remove(file)
      local copies, ops, before = 0, 0, {}
      for _, e in ipairs(profile.traceEvents) do
        if e.cat == "copy" then copies = copies + 1 end
        -- A stream runs its work in order, so each direction of copies has one track, and kernels have one.
        if e.cat == "copy" or (e.cat == "op" and e.tid ~= 0) then
          ops = ops + 1
          local name = e.cat == "op" and "op" or e.name
          assert(e.ts >= (before[name] or 0) - 5, name)
          before[name] = e.ts + e.dur
        end
      end
      assert(copies > 0 and ops > copies)
    ]], { PS_EMULATE_STREAMS = "late" })
  end)

  it("a model moves by module:to(name), and learns from a loader's batches there", function()
    local name = os.tmpname()
    local f = assert(io.open(name, "wb"))
    f:write(("a text to learn from. "):rep(40))
    f:close()
    runs(([[
      local gpt2, text = require "models.gpt2", %q
      local function loss_on(device)
        ps.manual_seed(3)
        local model = gpt2.new("tiny"):to(device)
        local loader = ps.data.loader { file = text, batch = 2, seq = 16, vocab = 256, seed = 1, device = device }
        local x, y = loader:next()
        assert(x:device() == device and y:device() == device and model.transformer.wte.weight:device() == device)
        local loss = model(x, y)
        loss:backward()
        local windows = ps.data.windows { file = text, batch = 2, seq = 16, limit = 2, device = device }
        return loss:item(), require("ps.train").evaluate(model, windows)
      end
      local a, b = loss_on "cuda"
      local c, d = loss_on "cpu"
      assert(math.abs(a - c) < 1e-4 and math.abs(b - d) < 1e-4, a .. " " .. c .. " " .. b .. " " .. d)
      assert(ps.fast_dtype("cuda") == "bf16" and ps.prefers_fused "cuda" and not ps.prefers_fused "cpu")

      local function unpadded(device)  -- dropout draws the same numbers, which depend on the row index
        ps.manual_seed(3)
        local bert = require("models.bert").new("tiny", { task = "masked_lm", dropout = 0.2, unpad = true }):to(device)
        local seen = ps.tensor({ { 1, 1, 1, 1, 1, 1, 1, 1, 1 }, { 1, 1, 0, 0, 0, 0, 0, 0, 0 },
          { 0, 0, 1, 1, 1, 0, 0, 0, 0 } }, "int32")
        local ids = ps.randint(1, 256, { 3, 9 }, { dtype = "int32" })
        local batch = { input_ids = ids:to(device), attention_mask = seen:to(device),
          labels = ps.where(seen:eq(1), ids, ps.full({ 1 }, -100, { dtype = "int32" })):to(device) }
        assert(bert:batch_of(batch).rows:numel() == 16)     -- 15 needed rows, and 1 row that fills the tile
        local loss = bert(batch).loss
        loss:backward()
        return loss:item(), bert.bert.embeddings.word_embeddings.weight:grad():to "cpu"
      end
      local e, f = unpadded "cuda"
      local g, h = unpadded "cpu"
      assert(math.abs(e - g) < 1e-4 and (f - h):abs():amax():item() < 1e-5 * (1 + h:abs():amax():item()), e - g)
    ]]):format(name))
    os.remove(name)
  end)

  it("states can be moved from the cpu to cuda and back", function()
    runs [[
      local gpt2 = require "models.gpt2"
      local here, there = gpt2.new("tiny"), gpt2.new("tiny", { device = "cuda" })
      local x = ps.zeros({ 1, 4 }, { dtype = "int32" })
      local function near(a, b, bound)
        for name, t in pairs(a) do
          assert(b[name]:device() == "cuda" and (b[name]:to("cpu") - t):abs():max():item() <= bound, name)
        end
      end
      for _, kind in ipairs { "AdamW", "SGD" } do
        local settings = { lr = 1e-3, momentum = kind == "SGD" and 0.9 or nil }
        local a, b = ps.optim[kind](here, settings), ps.optim[kind](there, settings)
        here(x, x):backward()
        a:step()
        there:load_state_dict(here:state_dict())
        b:load_state_dict(a:state_dict(here), there)
        near(here:state_dict(), there:state_dict(), 0)
        near(a:state_dict(here).tensors, b:state_dict(there).tensors, 0)
        a:zero_grad()
        here(x, x):backward()
        there(x:to("cuda"), x:to("cuda")):backward()
        a:step()
        b:step()
        near(here:state_dict(), there:state_dict(), 2e-3)     -- Adam amplifies the rounding error of a zero gradient
        near(a:state_dict(here).tensors, b:state_dict(there).tensors, 1e-5)
        here:load_state_dict(there:state_dict())
        a:zero_grad()
        b:zero_grad()
      end
      local t = ps.zeros({ 4 }, { device = "cuda" })
      t[1] = ps.tensor(3.5)
      assert(t:copy_(t:to("cpu") * 2):sum():item() == 7)
    ]]
  end)

  it("errors about tensors on other devices and unknown names say what to write", function()
    runs [[
      local function says(fn, text)
        local ok, err = pcall(fn)
        assert(not ok and tostring(err):find(text, 1, true), tostring(err))
      end
      local model = require("models.gpt2").new("tiny", { device = "cuda" })
      says(function() return model(ps.zeros({ 1, 4 }, { dtype = "int32" })) end,
        "gpt2: the token ids are on cpu, but the model is on cuda: set the loader's device = \"cuda\", or use "
          .. "ids:to(\"cuda\")")
      says(function() return ps.ones { 2 }:to("cuda:1") end, "CUDA_VISIBLE_DEVICES says which")
      says(function() return ps.ones { 2 }:cuda() end, 't:to("cuda")')
      says(function() return model:to("cdua") end, "no device called 'cdua'")
      says(function() return ps.data.loader { file = "x", batch = 1, seq = 1, device = "gpu" } end,
        "no device called 'gpu'")
      says(function() return ps.ones({ 2 }, { device = "cuda" }) + ps.ones { 2 } end,
        "inputs are on different devices: cuda and cpu (input b); move one with :to(device)")
    ]]
  end)

  it("errors distinguish memory that cannot be returned from memory in use", function()
    if cuda.REAL then return pending("the emulator decides how much memory is requested at once") end
    runs [[
      local large = ps.empty({ 700 * 2 ^ 18 }, { device = "cuda" })
      local kept = ps.empty({ 16 }, { device = "cuda" })
      large:release()
      local function open()
        return ps.initialize { model_func = function() return require("models.gpt2").new "tiny" end, config = {
          device = "cuda", plan_print = false, memory = { device = "4MiB", host = "20MiB" } } }
      end
      local ok, err = pcall(open)
      assert(not ok and tostring(err):find("other tensors 700.0 MiB, of which 700.0 MiB are free and cannot be given "
        .. "back while tensors made earlier lie among them", 1, true), tostring(err))
      kept:release()
      open():close()
    ]]
  end)

  it("PS_CUDA_SYNC=trace names each op before it begins, in order", function()
    local out = runs([[
      local x = ps.ones({ 4, 4 }, { device = "cuda" })
      x:matmul(x):exp()
    ]], { PS_CUDA_SYNC = "trace" })
    if out then assert.truthy(out:find("cuda op fill_\ncuda op matmul\ncuda op exp\n", 1, true), out) end
  end)

  it("examples train, and continue from a checkpoint of the cpu", function()
    local why = cuda.lacks_kernels()
    if why then return pending(why) end
    local folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    local ids = {}
    for i = 1, 1500 do ids[i] = i * i % 251 end
    require("ps.data").write_tokens(folder .. "/tokens.bin", ids)       -- a shard has no text, so no sample is written
    local examples = paths.root .. "/examples/"
    local function train(script, ...)
      local out, code = cuda.child { examples .. script, "--data", folder .. "/tokens.bin --vocab 256", ... }
      assert.equal(0, code, out)
      return out
    end
    local common = { "--model tiny --seq 16 --out", folder .. "/run" }
    local gpt2 = "--batch 2 --dtype fp32"
    train("train_gpt2.lua", common[1], common[2], gpt2, "--steps 1")
    local out = train("train_gpt2.lua", common[1], common[2], gpt2, "--steps 2 --resume --device cuda")
    assert.truthy(out:find("compute capability", 1, true) and out:find("resumed from", 1, true), out)
    assert.truthy(out:find("done: 2 steps", 1, true), out)
    train("train_chunked.lua", common[1], folder .. "/chunked", "--steps 1")
    out = train("train_chunked.lua", common[1], folder .. "/chunked", "--steps 2 --resume --device cuda")
    assert.truthy(out:find("step 1", 1, true) and out:find("held-out loss", 1, true), out)
    os.execute("rm -rf " .. folder)
  end)
end)
