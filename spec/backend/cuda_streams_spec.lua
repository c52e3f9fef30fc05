-- SPDX-License-Identifier: BSD-3-Clause
-- Events order the work that the device cuda queues on its streams wherever an order is needed. The emulator either
-- does nothing until the host waits, and then only the work that the wait needs ("late"), or mixes pieces of other
-- streams in at random ("mixed=SEED"). Moves must not change any bit. PS_FULL=1 tries more seeds. On a GPU
-- (PS_CUDA_REAL=1) the same scripts run once. docs/cuda.md lists the orders that are proved in this way.
local lib = require "spec.cuda_lib"

local MODES = { "late", "mixed=1" }
if lib.FULL then
  for seed = 2, 20 do MODES[#MODES + 1] = "mixed=" .. seed end
end
if lib.REAL then MODES = { "as they are" } end

--- Returns a script that must reach its end in any order of the work.
local function always(name, script, env)
  for _, mode in ipairs(MODES) do
    it(("%s: %s"):format(mode, name), function()
      if lib.lacks_kernels() then return pending(lib.lacks_kernels()) end
      local vars = { PS_EMULATE_STREAMS = not lib.REAL and mode or nil }
      for key, value in pairs(env or {}) do vars[key] = value end
      local out, code = lib.child(script .. "\nprint 'fine'", vars)
      assert.truthy(code == 0 and out:find("fine\n", 1, true), ("exit code %d: %s"):format(code, out))
    end)
  end
end

-- For scripts: returns the losses and parameters after steps on equal batches.
local TRAIN = [[
  local gpt2, bytes = require "models.gpt2", require("spec.check_lib").bytes
  local function train(config, steps, micros)
    config.device, config.bf16, config.chunk_size = "cuda", { enabled = true }, 4096
    config.gradient_clipping, config.gradient_accumulation_steps, config.plan_print = 1, micros, false
    ps.manual_seed(11)
    jit.flush()
    for _ = 1, 2 do collectgarbage() end
    local model, opt = ps.initialize { quiet = true, config = config, model_func = function()
      return gpt2.new { vocab_size = 64, n_positions = 16, n_embd = 48, n_layer = 3, n_head = 2 }
    end }
    local seen = {}
    for step = 1, steps * (micros or 1) do
      local x = ps.randint(0, 64, { 2, 16 }, { dtype = "int32", device = "cpu" })
      local loss = model(x, x)
      model:backward(loss)
      opt:step()
      if step % 2 == 0 then seen[#seen + 1] = ("%.17g"):format(loss:item()) end
    end
    local state, names = model:state_dict(), {}
    for name in pairs(state) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do seen[#seen + 1] = bytes(state[name]) end
    model:close()
    return table.concat(seen, ";")
  end
]]

describe("streams of the device cuda, " .. (lib.REAL and "on a GPU" or "emulated") .. ",", function()
  always("chunks of state that move to the device and back train to plain training's bits", TRAIN .. [[
    local want = train({ memory = "plain" }, 4, 1)
    local rates = { host_adam = 1e6, device_adam = 1e9, up = 1e10, down = 1e10 }
    assert(train({ memory = { device = "700KiB", host = "64MiB" } }, 4, 1) == want)
    assert(train({ memory = { device = "560KiB", host = "64MiB" }, rates = rates }, 4, 1) == want)
  ]])

  always("micro-batches, Adam on both sides and chunks on disk, too", TRAIN .. [[
    local want = train({ memory = "plain" }, 2, 2)
    local folder = os.tmpname()
    os.remove(folder)
    assert(require("lfs").mkdir(folder))
    local disk = { path = folder, limit = "64MiB" }
    local ok, why = pcall(function()
      assert(train({ memory = { device = "600KiB", host = "700KiB", disk = disk } }, 2, 2) == want)
    end)
    os.execute(("rm -rf '%s'"):format(folder))
    assert(ok, why)
  ]])

  always("activations that leave come back with their bits", [[
    local F, bytes = ps.F, require("spec.check_lib").bytes
    local weights = {}
    for i = 1, 6 do weights[i] = ps.randn({ 48, 48 }, { device = "cuda" }):mul(0.1):keep():requires_grad(true) end
    local x = ps.randn({ 365, 48 }, { device = "cuda" }):keep()
    local function block(t, w) return F.dropout(F.gelu(F.linear(t, w), "tanh"), 0.1) + t end
    local function forward()
      local h = x
      for _, w in ipairs(weights) do h = ps.scope(block, h, w) end
      return h:square():mean()
    end
    local function step(mode)
      ps.manual_seed(3)
      mode(ps.scope, forward):backward()
      local sums = {}
      for i, w in ipairs(weights) do
        sums[i] = w:grad()
        w:set_grad(nil)
      end
      for i, grad in ipairs(sums) do sums[i] = bytes(grad) end
      return table.concat(sums)
    end
    local want = step(function(fn, ...) return fn(...) end)
    for _ = 1, 3 do assert(step(ps.offload_activations) == want) end
  ]])

  always("a script's copies may be followed by writing what was copied, and are there when they return", [[
    local big = ps.empty({ 1500000 }, { device = "cpu" })              -- more than the pinned slots can hold
    local there = {}
    for i = 1, 3 do
      big:fill_(i)
      there[i] = big:to("cuda") * 2
      big:fill_(-1)
    end
    for i = 1, 3 do
      local back = there[i]:to("cpu")
      assert(back:min():item() == 2 * i and back:max():item() == 2 * i)
    end
    for i = 1, 40 do                                                   -- small copies through one slot
      local t = ps.full({ 5 }, i):to("cuda")
      assert((t + t):to("cpu"):sum():item() == 10 * i)
    end
  ]])

  -- The host memory of large activations is pinned. Small activations are then located before the pages that are
  -- returned to the system.
  always("host memory that goes back to the system is not unpinned under a copy beside it", [[
    local F, bytes = ps.F, require("spec.check_lib").bytes
    local w = ps.randn({ 48, 48 }, { device = "cuda" }):mul(0.1):keep():requires_grad(true)
    local function block(t) return F.gelu(F.linear(t, w), "tanh") + t end
    local function step(rows, mode, between)
      local x = ps.ones({ rows, 48 }, { device = "cuda" })
      mode(ps.scope, function()
        for i = 1, 6 do
          x = ps.scope(block, x)
          if i == 5 and between then between() end
        end
        return x:square():mean()
      end):backward()
      local grad = w:grad()
      w:set_grad(nil)
      return bytes(grad)
    end
    local function make_room()
      ps.initialize { quiet = true, model_func = function() return ps.nn.Linear(4, 4) end,
        config = { device = "cuda", memory = { device = "1MiB", host = "1MiB" },
          rates = { host_adam = 1e6, device_adam = 1e9, up = 1e10, down = 1e10 } } }:close()
    end
    make_room()                                            -- from here on, the device's rates are known
    step(3650, ps.offload_activations)
    local want = step(1001, function(fn, ...) return fn(...) end)
    assert(step(1001, ps.offload_activations, make_room) == want)
  ]])

  always("a process may end with work queued", [[
    for _ = 1, 3 do
      local t = ps.ones({ 300000 }, { device = "cpu" }):to("cuda")
      for _ = 1, 50 do t = t * 1.5 end
    end
    local last = ps.full({ 900000 }, 2, { device = "cpu" }):to("cuda") + 1
  ]])

  always("an index out of range is told once, and what follows is right", [[
    local w = ps.ones({ 5, 4 }, { device = "cuda" })
    for turn = 1, 3 do
      local y = ps.ops.embedding(w, ps.tensor({ 1, 7 + turn, 2 }, "int64"):to("cuda"))
      local ok, err = pcall(function() return y:to("cpu") end)
      assert(not ok and tostring(err):find(("index %d at position 1 is outside [0, 5)"):format(7 + turn), 1, true),
             tostring(err))
      local fine = ps.ops.embedding(w, ps.tensor({ 1, 4 }, "int64"):to("cuda"))
      assert(fine:to("cpu"):sum():item() == 8)
    end
  ]])
end)
