-- SPDX-License-Identifier: BSD-3-Clause
-- Moves between devices with gradients, and activations that wait on the host (ps.offload_activations): the bits of the
-- plain run. Engines: offload_engine_spec.lua.
local ps = require "ps"
local ffi = require "ffi"
local F, C = ps.F, ps.C

local check = require "spec.check_lib"
local fails, bytes = check.fails, check.bytes

local info = ffi.new("ps_memory_info")
local function memory(device)
  ps.check(C.ps_memory_get(ps.ctx, ps.device_index(device), info))
  return { used = tonumber(info.used), peak = tonumber(info.peak) }
end

-- Each segment of an abandoned graph is released when a scope begins, and its inputs are freed at the next collection.
local function collect()
  for _ = 1, 10 do
    collectgarbage()
    ps.scope(function() end)
  end
end

before_each(function() ps.manual_seed(1) end)

-- -- moves ----------------------------------------------------------------------------------------------------------
describe("a move between devices", function()
  it("returns its gradient", function()
    for _, pair in ipairs { { "cpu", "sim" }, { "sim", "cpu" }, { "cpu", "ref" }, { "ref", "sim" } } do
      local here, there = pair[1], pair[2]
      local values = ps.randn { 5, 7 }
      local x = values:to(here):clone():requires_grad(true)
      local y = (x * 3):to(there)
      assert.equal(there, y:device())
      assert(y:needs_grad());
      (y * y):sum():backward()
      assert.equal(here, x:grad():device())
      local plain = values:to(here):clone():requires_grad(true);
      ((plain * 3) * (plain * 3)):sum():backward()
      assert(bytes(plain:grad()) == bytes(x:grad()), here .. " to " .. there)
    end
  end)

  it("works for leaves, views, and tensors used on both sides", function()
    local x, w = ps.randn({ 6, 8 }, { requires_grad = true }), ps.randn({ 8, 8 }, { requires_grad = true })
    local function loss(there)
      local a = F.linear(x, w)
      local b = (a:t():to(there) * x:to(there):t()):to("cpu")
      return (b * a:t()):sum() + w:narrow(0, 2, 3):to(there):square():sum():to("cpu")
    end
    loss("cpu"):backward()
    local want = { bytes(x:grad()), bytes(w:grad()) }
    x:set_grad(nil)
    w:set_grad(nil)
    loss("sim"):backward()
    assert(want[1] == bytes(x:grad()) and want[2] == bytes(w:grad()))
    assert.same({ "cpu", "cpu" }, { x:grad():device(), w:grad():device() })
  end)

  it("is not recorded without gradients, nor for integers and values that are read", function()
    local x = ps.randn({ 4 }, { device = "sim", requires_grad = true })
    assert.falsy(ps.no_grad(function() return x:to("cpu") end):needs_grad())
    assert.falsy(ps.tensor({ 1, 2 }, "int32"):to("sim"):needs_grad())
    local y = (x * 2):sum()
    y:item()
    y:backward()
    assert.same({ 2, 2, 2, 2 }, x:grad():tolist())
  end)

  it("has the same bits within a recompute segment", function()
    local x, w = ps.randn({ 6, 8 }, { requires_grad = true }), ps.randn({ 8, 8 }, { requires_grad = true })
    local function part(t) return F.gelu(F.linear(t:to("sim"), w:to("sim"))):to("cpu") end
    part(part(x)):sum():backward()
    local want = { bytes(x:grad()), bytes(w:grad()) }
    x:set_grad(nil)
    w:set_grad(nil)
    ps.recompute(part, ps.recompute(part, x)):sum():backward()
    assert(want[1] == bytes(x:grad()) and want[2] == bytes(w:grad()))
  end)
end)

-- -- activations on the host ----------------------------------------------------------------------------------------
describe("activations on the host", function()
  local ROWS, WIDTH = 512, 64                            -- 128 KiB in fp32
  local weights, x
  before_each(function()
    weights, x = {}, nil
    collect()
    for i = 1, 6 do weights[i] = ps.randn({ WIDTH, WIDTH }, { device = "sim" }):mul(0.1):keep():requires_grad(true) end
    x = ps.randn({ ROWS, WIDTH }, { device = "sim" }):keep()
  end)

  local function block(t, w) return F.dropout(F.gelu(F.linear(t, w), "tanh"), 0.1) + t end
  local function layers(call)
    local h = x
    for _, w in ipairs(weights) do h = call(block, h, w) end
    return h:square():mean()
  end
  local function plain(fn, ...) return fn(...) end

  -- Returns the loss and gradients of a forward under `mode`, with `call` for each block, and the memory that it used.
  local function run(mode, call)
    ps.manual_seed(3)
    collect()
    C.ps_memory_reset_peak(ps.ctx, ps.device_index("sim"))
    local before, host = memory("sim").used, memory("cpu").used
    local loss = mode(ps.scope, layers, call)
    local waiting = memory("cpu").used - host
    local list = { bytes(loss) }
    loss:backward()
    for i, w in ipairs(weights) do
      list[i + 1] = bytes(w:grad())
      w:set_grad(nil)
    end
    local peak = memory("sim").peak - before
    loss = nil -- luacheck: ignore 311
    collect()
    assert.equal(before, memory("sim").used)
    assert.equal(host, memory("cpu").used)
    return list, peak, waiting
  end

  it("give the same bits and need less of the device", function()
    for _, call in ipairs { function(fn, ...) return ps.scope(fn, ...) end, ps.recompute } do
      local want, much, none = run(plain, call)
      local got, less, waiting = run(ps.offload_activations, call)
      assert.same(want, got)
      assert.equal(0, none)
      assert(waiting >= 4 * ROWS * WIDTH * 4, waiting)
      assert(less <= much - ROWS * WIDTH * 4, ("%d, without %d"):format(less, much))
    end
  end)

  it("return if the forward still uses them, and then stay", function()
    local function twice(mode)
      local first = x * 1.5
      local loss = mode(function()
        local h = first
        for _, w in ipairs(weights) do h = ps.recompute(block, h, w) + first end
        return (h + first):square():mean()
      end)
      loss:backward()
      local list = {}
      for i, w in ipairs(weights) do
        list[i] = bytes(w:grad())
        w:set_grad(nil)
      end
      return list
    end
    ps.manual_seed(5)
    local want = twice(plain)
    ps.manual_seed(5)
    assert.same(want, twice(ps.offload_activations))
  end)

  it("are read and written like any tensor", function()
    local h, y
    ps.offload_activations(function()
      h = x * 2
      y = ps.recompute(F.linear, h, weights[1])
      y = ps.recompute(F.linear, y, weights[2])
    end)
    local n = h:nbytes()
    local buffer = ffi.new("uint8_t[?]", n)
    ps.check(C.ps_tensor_read(h, buffer, n))
    assert(ffi.string(buffer, n) == bytes(x * 2))
    ps.check(C.ps_tensor_write(h, buffer, n))
    fails(function() y:sum():backward() end, "changed in place")
  end)

  it("are freed with a graph without a backward", function()
    collect()
    local before, host = memory("sim").used, memory("cpu").used
    local loss = ps.offload_activations(ps.scope, layers, ps.recompute)
    assert(loss:alive() and memory("cpu").used > host)
    loss = nil -- luacheck: ignore 311
    collect()
    assert.equal(before, memory("sim").used)
    assert.equal(host, memory("cpu").used)
  end)

  it("stay on the device if the host has no room", function()
    local want = run(plain, ps.recompute)
    ps.check(C.ps_memory_set_limit(ps.ctx, 0, memory("cpu").used + 200 * 1024))
    local ok, got, _, waiting = pcall(run, ps.offload_activations, ps.recompute)
    ps.check(C.ps_memory_set_limit(ps.ctx, 0, 0))
    assert(ok, got)
    assert.same(want, got)
    assert(waiting <= 200 * 1024)
  end)

  it("are an error if the device has no room for their return", function()
    local loss = ps.offload_activations(ps.scope, layers, ps.recompute)
    ps.check(C.ps_memory_set_limit(ps.ctx, ps.device_index("sim"), memory("sim").used))
    local ok, err = pcall(loss.backward, loss)
    ps.check(C.ps_memory_set_limit(ps.ctx, ps.device_index("sim"), 0))
    assert.falsy(ok)
    assert.equal("ENOMEM", err.name)
    loss = nil -- luacheck: ignore 311
    for _, w in ipairs(weights) do w:set_grad(nil) end
    collect()
    assert.same(run(plain, ps.recompute), (run(ps.offload_activations, ps.recompute)))
  end)

  if not check.lower_set then it("survive failures of memory anywhere", function()
    local want = run(plain, ps.recompute)
    for nth = 0, math.huge do
      ps.manual_seed(3)
      C.ps_test_fail_alloc(nth, 1)
      local ok, err = pcall(function() ps.offload_activations(ps.scope, layers, ps.recompute):backward() end)
      local failed = C.ps_test_fail_alloc_left() < 0
      C.ps_test_fail_alloc(-1, 0)
      assert(ok or err.name == "ENOMEM" or tostring(err):find("memory", 1, true), tostring(err))
      for _, w in ipairs(weights) do w:set_grad(nil) end
      if nth % 20 == 0 then assert.same(want, (run(ps.offload_activations, ps.recompute))) end
      if not failed then
        assert(ok and nth > 50, nth)
        break
      end
    end
  end) end

  it("change nothing on the cpu, and the switch is reset after an error", function()
    local w = ps.randn({ 64, 64 }, { requires_grad = true })
    local t = ps.randn { 512, 64 }
    ps.offload_activations(function() return ps.recompute(F.linear, t, w):sum() end):backward()
    assert.equal(64, w:grad():size(0))
    fails(function() ps.offload_activations(error, "no", 0) end, "no")
    assert.equal(0, C.ps_set_offload(ps.ctx, 0))
  end)
end)
