-- SPDX-License-Identifier: BSD-3-Clause
-- Gradients: what is recorded, how gradients meet, recompute segments against the plain run bit for bit, outputs that are
-- computed again rather than kept, and what happens when something goes wrong in the middle.
local ps = require "ps"
local tensor, F, ops = ps.tensor, ps.F, ps.ops

local function leaf(value, dtype) return tensor(value, { dtype = dtype, requires_grad = true }) end
local function random(shape, dtype) return ps.randn(shape, { dtype = dtype, requires_grad = true }) end

local function fails(fn, ...)
  local ok, err = pcall(fn)
  assert(not ok, "no error was raised")
  for i = 1, select("#", ...) do
    local part = select(i, ...)
    assert(tostring(err):find(part, 1, true), ("the message lacks '%s': %s"):format(part, tostring(err)))
  end
  return err
end

--- The gradients of leaves as tables, cleared afterwards.
local function take(leaves)
  local list = {}
  for i, t in ipairs(leaves) do
    list[i] = assert(t:grad(), "leaf " .. i .. " has no gradient"):tolist()
    t:set_grad(nil)
  end
  return list
end

--- Two runs that must give the same gradients bit for bit; both start at the same random numbers.
local function same_bits(leaves, run_a, run_b)
  ps.manual_seed(3)
  run_a()
  local a, op = take(leaves), ps.rng().op
  ps.manual_seed(3)
  run_b()
  local b = take(leaves)
  assert.equal(op, ps.rng().op)
  for i in ipairs(a) do assert.same(a[i], b[i]) end
end

before_each(function() ps.manual_seed(1) end)

describe("backward", function()
  it("adds over all paths", function()
    local x = leaf { 1, 2, 3 }
    local y = x * x
    local z = (y + y * 2 + x):sum()                    -- 3 x^2 + x
    z:backward()
    assert.same({ 7, 13, 19 }, x:grad():tolist())
  end)

  it("adds up over calls, until the gradient is cleared", function()
    local x = leaf { 1, 2 }
    x:sum():backward();
    (x * 2):sum():backward()
    assert.same({ 3, 3 }, x:grad():tolist())
    x:set_grad(nil)
    assert.is_nil(x:grad())
    x:sum():backward()
    assert.same({ 1, 1 }, x:grad():tolist())
    x:set_grad(tensor { 10, 20 })
    x:sum():backward()
    assert.same({ 11, 21 }, x:grad():tolist())
    fails(function() x:set_grad(tensor { 1 }) end, "gradient")
  end)

  it("of a diamond visits each node once", function()
    local x = leaf(1.0001, "fp64")
    local y = x
    for _ = 1, 60 do y = y + y end                     -- 2^60 paths
    y:backward()
    assert.equal(2 ^ 60, x:grad():item())
  end)

  it("takes a gradient for what is no single value", function()
    local x = leaf { { 1, 2 }, { 3, 4 } }
    local y = x * x
    fails(function() y:backward() end, "backward", "[2, 2]")
    y:backward(tensor { { 1, 0 }, { 0, 1 } })
    assert.same({ { 2, 0 }, { 0, 8 } }, x:grad():tolist())
    fails(function() (x * x):backward(tensor { 1, 2 }) end, "[2]", "[2, 2]")
    local given = tensor { { 1, 1 }, { 1, 1 } }
    x:set_grad(nil);
    (x + 0):backward(given)
    x:grad():fill_(5)
    assert.same({ { 1, 1 }, { 1, 1 } }, given:tolist())            -- the caller's gradient is no one else's
  end)

  it("does not share bytes between gradients", function()
    local a, b = leaf { 1, 2 }, leaf { 3, 4 };
    (a + b):sum():backward()
    a:grad():fill_(9)
    assert.same({ 1, 1 }, b:grad():tolist())
    local c = leaf { 1, 2 }
    c:expand(3, 2):sum():backward()
    assert.same({ 3, 3 }, c:grad():tolist())
  end)

  it("runs once", function()
    local x = leaf { 1, 2 }
    local y = (x * x):sum()
    y:backward()
    fails(function() y:backward() end, "second time", "compute the loss again")
    local h = x * x
    h:sum():backward()
    fails(function() (h * 3):sum():backward() end, "second time")
    fails(function() tensor({ 1 }):backward() end, "requires a gradient")
  end)

  it("ends at leaves that want none, and at integers", function()
    local x, k = leaf { 1, 2 }, tensor { 5, 6 }
    local y = (x * k):sum()
    y:backward()
    assert.is_nil(k:grad())
    fails(function() tensor({ 1 }, "int64"):requires_grad() end, "only float", "int64")
    assert.is_false(x:gt(1):needs_grad())
    assert.is_false(x:long():needs_grad())
    assert.is_false(x:argmax():needs_grad())
    fails(function() (x * 2):requires_grad() end, "detach()")
    x:requires_grad(false)
    assert.is_false((x * 2):needs_grad())
  end)

  it("starts at a leaf, too", function()
    local x = leaf(3)
    x:backward()
    assert.equal(1, x:grad():item())
  end)

  it("shares the gradient of ties", function()
    local a, b = leaf { 1, 2, 3 }, leaf { 3, 2, 1 }
    a:maximum(b):sum():backward()
    assert.same({ 0, 0.5, 1 }, a:grad():tolist())
    assert.same({ 1, 0.5, 0 }, b:grad():tolist())
    local x = leaf { { 2, 2, 1 }, { 0, 0, 0 } }
    x:amax(1):sum():backward()
    assert.same({ 0.5, 0.5, 0 }, x:grad():tolist()[1])
    x = leaf { -1, 0, 1, 2 }
    x:relu():sum():backward()
    assert.same({ 0, 0, 1, 1 }, x:grad():tolist())
    x = leaf { -1, 0, 1, 2 }
    x:clamp(-1, 1):sum():backward()
    assert.same({ 1, 1, 1, 0 }, x:grad():tolist())
  end)

  it("keeps what was not chosen out", function()
    local x = leaf { 0, 4 }
    x:gt(0):where(x, 1):sqrt():sum():backward()
    assert.same({ 0, 0.25 }, x:grad():tolist())
  end)

  it("goes through indexing and views of a leaf", function()
    local w = leaf { { 1, 2, 3 }, { 4, 5, 6 } };
    (w[0] * 2 + w[{ {}, 1 }]:sum() + w:t()[2]:sum()):sum():backward()
    assert.same({ { 2, 5, 5 }, { 0, 3, 3 } }, w:grad():tolist())
    w:set_grad(nil)
    w[tensor({ 1, 1 }, "int64")]:sum():backward()
    assert.same({ { 0, 0, 0 }, { 2, 2, 2 } }, w:grad():tolist())
    w:set_grad(nil)
    w[w:gt(4)]:sum():backward()
    assert.same({ { 0, 0, 0 }, { 0, 1, 1 } }, w:grad():tolist())
  end)

  it("changes types and back", function()
    local x = leaf({ 1, 2 }, "bf16")
    local y = (x:float() * tensor { 1.5, 2.5 }):sum()
    y:backward()
    assert.equal("bf16", x:grad():dtype())
    assert.same({ 1.5, 2.5 }, x:grad():tolist())
    fails(function() (x * 2):to("ref") end, "detach()")
  end)

  it("sums in fp32 when a leaf asks for it", function()
    local narrow, wide = leaf({ 1 }, "bf16"), leaf({ 1 }, "bf16"):grad_in_fp32()
    for _ = 1, 300 do
      (narrow * 1):sum():backward();
      (wide * 1):sum():backward()
    end
    assert.equal(256, narrow:grad():item())             -- bf16 has 8 bits
    assert.equal(300, wide:grad():item())
    assert.equal("fp32", wide:grad():dtype())
    local w, b = random({ 5, 3 }, "bf16"):grad_in_fp32(), random({ 5 }, "bf16"):grad_in_fp32()
    local x = ps.randn({ 4, 3 }, { dtype = "bf16" })
    for _ = 1, 2 do F.linear(x, w, b):float():sum():backward() end
    assert.same({ "fp32", "fp32" }, { w:grad():dtype(), b:grad():dtype() })
    assert.same({ 8, 8, 8, 8, 8 }, b:grad():tolist())
  end)

  it("adds the uses of a tied weight", function()
    local w = random({ 6, 4 }, "fp64")
    local index = tensor({ 1, 3, 1 }, "int64")
    local function loss() return F.lm_loss(F.embedding(index, w):tanh(), w, index) end
    loss():backward()
    local g, w0 = w:grad():tolist(), w:detach():clone()
    local h = 1e-6
    for _, at in ipairs { { 1, 0 }, { 3, 2 }, { 5, 3 } } do
      local function shifted(by)
        return ps.no_grad(function()
          w:copy_(w0)
          w[at] = w0[at]:item() + by
          return loss():item()
        end)
      end
      local slope = (shifted(h) - shifted(-h)) / (2 * h)
      assert(math.abs(slope - g[at[1] + 1][at[2] + 1]) < 1e-8)
    end
  end)

  it("of 20,000 ops in a row needs no stack, forward or freed unused", function()
    local x = leaf { 1, 2 }
    local y = x
    for _ = 1, 20000 do y = y + 1 end
    y:sum():backward()
    assert.same({ 1, 1 }, x:grad():tolist())
    y = x
    for _ = 1, 20000 do y = y * x end
    y, x = nil, nil                                     -- luacheck: ignore
    collectgarbage()
    collectgarbage()
  end)
end)

describe("recording", function()
  it("is off inside no_grad, and back on after it, also after an error", function()
    local x = leaf { 1, 2 }
    local y = ps.no_grad(function()
      assert.is_false(ps.grad_enabled())
      assert.is_true(ps.enable_grad(function() return (x * 2):needs_grad() end))
      return x * 2
    end)
    assert.is_false(y:needs_grad())
    assert.is_false(pcall(ps.no_grad, function() error("no") end))
    assert.is_true(ps.grad_enabled())
    assert.is_true((x * 2):needs_grad())
    local a, b = ps.no_grad(function(...) return ... end, 1, nil)
    assert.same({ 1, nil }, { a, b })
  end)

  it("stops at detach", function()
    local x = leaf { 3 }
    local y = (x * x):detach()
    local z = y * x
    z:sum():backward()
    assert.same({ 9 }, x:grad():tolist())
    local d = x:detach()
    assert.is_false(d:needs_grad())
    ps.no_grad(function() d:fill_(5) end)
    assert.same({ 5 }, x:tolist())
  end)

  it("refuses to write over what needs a gradient", function()
    local x = leaf { 1, 2 }
    fails(function() x:add_(1) end, "in place", "no_grad")
    fails(function() x[0] = 1 end, "in place")
    fails(function() local y = x * 2; y:zero_() end, "fill_", "in place")
    fails(function() tensor({ 0, 0 }):copy_(x) end, "copy_", "its source needs")
    ps.no_grad(function() x:add_(1) end)
    assert.same({ 2, 3 }, x:tolist())
  end)

  it("notices that a saved tensor was changed", function()
    local x, w = leaf { 1, 2 }, leaf { 3, 4 }
    local y = (x * w):sum()
    ps.no_grad(function() w:add_(1) end)
    local err = fails(function() y:backward() end, "backward of mul", "[2]", "changed in place")
    assert.equal("ESTALE", err.name)
    y = (x * w):sum()
    ps.no_grad(function() w[0] = 9 end)                 -- through a view
    fails(function() y:backward() end, "changed in place")
    local e = x:exp()
    ps.no_grad(function() e:zero_() end)                -- an output
    fails(function() e:sum():backward() end, "backward of exp", "changed in place")
    x:set_grad(nil)
    w:set_grad(nil);
    (x * w):sum():backward()                            -- the next walk is not disturbed
    assert.same({ 9, 5 }, x:grad():tolist())
    y = (x + w):sum()                                   -- addition saved nothing
    ps.no_grad(function() w:add_(1) end)
    y:backward()
  end)
end)

-- -- recompute segments --------------------------------------------------------------------------------------------------
describe("ps.checkpoint gives the bits of the plain run", function()
  local x, w1, b1, w2, g, leaves
  before_each(function()
    x, w1, b1, w2, g = random { 8, 24 }, random { 40, 24 }, random { 40 }, random { 24, 40 }, random { 24 }
    leaves = { x, w1, b1, w2, g }
  end)
  local function plain(fn, ...) return fn(...) end
  local function block(t)
    local h = F.layer_norm(t, g)
    h = F.dropout(F.gelu(F.linear(h, w1, b1), "tanh"), 0.3)
    return F.linear(F.dropout(h, 0.1), w2, nil, { residual = t })
  end
  --- The loss of run(call), where call is either plain or ps.checkpoint.
  local function compare(run)
    same_bits(leaves, function() run(plain):backward() end, function() run(ps.checkpoint):backward() end)
  end

  it("with dropout", function()
    compare(function(call) return call(block, x):square():sum() end)
    compare(function(call) return call(block, call(block, call(block, x))):square():sum() end)
  end)

  it("for values too", function()
    ps.manual_seed(3)
    local a = block(x):tolist()
    ps.manual_seed(3)
    assert.same(a, ps.checkpoint(block, x):tolist())
    ps.manual_seed(3)
    assert.same(a, ps.no_grad(ps.checkpoint, block, x):tolist())
  end)

  it("nested", function()
    compare(function(call)
      return call(function(t) return call(block, call(block, t) * 0.5) + t end, x):square():sum()
    end)
    compare(function(call)
      return call(function(t)
        return call(function(u) return call(block, u) + call(block, u) end, t) + F.dropout(t, 0.5)
      end, x):square():sum()
    end)
  end)

  it("with several outputs, some unused, in any order", function()
    local function three(t)
      local h = F.dropout(t, 0.2)
      return F.linear(h, w1, b1), h * h, F.linear(t, w1)
    end
    compare(function(call)
      local a, b, c = call(three, x * g)
      return (F.linear(c * a, w2) + b):square():sum()
    end)
    compare(function(call)
      local a, b = call(three, x * g)
      return F.linear(F.linear(b, w1, b1), w2):sum() + a:sum()
    end)
    compare(function(call)
      local a = call(three, x * g)
      return F.linear(a, w2):square():sum()
    end)
  end)

  it("when an input is used inside and outside, before and after", function()
    compare(function(call)
      local t = F.layer_norm(x, g) * 1.7
      local before = F.linear(F.linear(t, w1, b1), w2)
      local inside = call(function(u) return F.linear(F.gelu(F.linear(u * u + u, w1, b1)), w2) + u end, t)
      local after = F.linear(t * 3, w1, b1)
      return (F.linear(after, w2) + inside + before * t):square():sum()
    end)
  end)

  it("when the function uses a tensor that is not among its arguments", function()
    compare(function(call)
      local t = x * 1.3
      local u = call(function(v) return F.linear(F.linear(v * t, w1, b1), w2) end, x * g)
      return (u * t):square():sum()
    end)
  end)

  it("with tied weights", function()
    compare(function(call)
      local h = F.linear(F.linear(x, w1, b1), w2)
      h = call(function(t) return F.linear(F.gelu(F.linear(t * g, w1, b1)), w2) end, h)
      return F.linear(F.linear(h, w1, b1), w2):square():sum()
    end)
  end)

  it("in bf16, summed in fp32 over micro-batches", function()
    leaves = { random({ 8, 24 }, "bf16"), random({ 40, 24 }, "bf16"), random({ 40 }, "bf16"), random({ 24, 40 }, "bf16"),
               random({ 24 }, "bf16") }
    for _, t in ipairs(leaves) do t:grad_in_fp32() end
    x, w1, b1, w2, g = unpack(leaves)
    local function twice(call)
      for _ = 1, 2 do call(block, call(block, x)):float():square():mean():backward() end
    end
    same_bits(leaves, function() twice(plain) end, function() twice(ps.checkpoint) end)
  end)

  it("for tensors large enough to be dropped by scopes", function()
    x, w1, w2 = random { 256, 24 }, random { 512, 24 }, random { 24, 512 }
    b1 = random { 512 }
    leaves = { x, w1, b1, w2, g }
    compare(function(call)
      local h = call(block, call(block, x))
      return ps.scope(function() return call(block, h) end):square():sum()
    end)
  end)

  it("with other arguments than tensors", function()
    compare(function(call)
      return call(function(t, n, name, nothing, u)
        assert(n == 2 and name == "gelu" and nothing == nil)
        return F[name](F.linear(t, w1, b1)):sum(1, true) * n + u * g:sum() + w2:sum()
      end, x, 2, "gelu", nil, x):sum()
    end)
  end)
end)

describe("a recompute segment", function()
  local x, w
  before_each(function() x, w = random { 4, 6 }, random { 6, 6 } end)

  it("must return tensors that it computed", function()
    fails(function() ps.checkpoint(function() return 1 end, x) end, "tensors only")
    fails(function() ps.checkpoint(function(t) return t end, x) end, "output 0 of a recompute segment")
    fails(function() ps.checkpoint(function() return w end, x) end, "output 0")
    fails(function() ps.checkpoint(function(t) local y = t * 1; return y, y end, x) end, "output 1")
    fails(function() ps.checkpoint(function(t) return t:argmax() end, x) end, "output 0")
    fails(function() ps.checkpoint(function() error("thrown in the forward") end, x) end, "thrown in the forward")
    assert.is_true(ps.grad_enabled())
    x:sum():backward()
  end)

  it("that fails when run again leaves the engine usable", function()
    local runs, depth = 0, tonumber(ps.C.ps_scope_depth(ps.ctx))
    local function moody(t)
      runs = runs + 1
      if runs == 2 then error("thrown when run again") end
      return t:matmul(w)
    end
    local y = ps.checkpoint(moody, F.dropout(x, 0.5)):sum()
    local rng = ps.rng()
    local op = rng.op
    fails(function() y:backward() end, "thrown when run again")
    assert.same({ true, depth, op }, { ps.grad_enabled(), tonumber(ps.C.ps_scope_depth(ps.ctx)), rng.op })
    fails(function() y:backward() end, "second time")
    x:set_grad(nil)
    w:set_grad(nil)
    ps.checkpoint(function(t) return t:matmul(w) end, x):sum():backward()
    assert.same({ 4, 6 }, x:grad():shape())
    local function throws_table() if runs > 2 then error({ code = 5 }) end runs = 3 return x * 2 end
    runs = 2
    local err = fails(function() ps.checkpoint(throws_table, x):sum():backward() end)
    assert.same({ code = 5 }, err)
  end)

  it("that fails inside another leaves both behind", function()
    local fail = false
    local y = ps.checkpoint(function(t)
      return ps.checkpoint(function(u)
        if fail then ps.ops.matmul(u, u, 0) end
        return u * 2
      end, t) * 3
    end, x):sum()
    fail = true
    fails(function() y:backward() end, "matmul", "[4, 6]")
    assert.is_nil(x:grad());
    (x * 2):sum():backward()
    assert.same({ 2, 2, 2, 2, 2, 2 }, x:grad():tolist()[1])
  end)

  it("must be the same function of the same inputs", function()
    local runs = 0
    local function again() runs = runs + 1 return runs % 2 == 0 end
    fails(function()
      ps.checkpoint(function(t) if again() then return t * 1, t * 2 end return t * 1 end, x):sum():backward()
    end, "1 tensors first, 2 when run again")
    fails(function()
      ps.checkpoint(function(t) if again() then return t[0] * 1 end return t * 1 end, x):sum():backward()
    end, "changed its shape")
    fails(function()
      ps.checkpoint(function(t) if again() then return 5 end return t * 1 end, x):sum():backward()
    end, "must return tensors")
    local data = ps.randn { 4, 6 }
    local y = ps.checkpoint(function(t, d) return t * d end, x, data):sum()
    data:fill_(1)
    fails(function() y:backward() end, "a recompute segment", "changed in place")
  end)

  it("whose outputs go unused is forgotten", function()
    local function grow()
      for _ = 1, 50 do ps.checkpoint(function(t) return t * 2 end, x) end
      collectgarbage()
      collectgarbage()
    end
    grow()
    local kept = setmetatable({}, { __mode = "v" })
    do
      local fn = function(t) return t * kept.n end
      kept.n, kept.fn = 3, fn
      ps.checkpoint(fn, x)
    end
    grow()
    grow()
    assert.is_nil(kept.fn)
  end)

  it("runs 2,000 times in a row", function()
    local y = x
    for _ = 1, 2000 do y = ps.checkpoint(function(t) return t + 1 end, y) end
    y:sum():backward()
    assert.same({ 1, 1, 1, 1, 1, 1 }, x:grad():tolist()[1])
  end)
end)

-- -- cheap outputs: from 1 MiB on they are computed again in backward -------------------------------------------------------
describe("outputs that are computed again rather than kept", function()
  local ROWS, C = 1024, 320                              -- fp32: 1.25 MiB
  local x, w, b, v
  before_each(function()
    x, v = random { ROWS, C }, random { 3, C }
    w, b = random { C }, random { C }
  end)
  local functions = {
    layer_norm = function() return F.layer_norm(x, w, b) end,
    ["layer_norm without weights"] = function() return F.layer_norm(x) + 0 * (w + b) end,
    rms_norm = function() return F.rms_norm(x, w) end,
    gelu = function() return F.gelu(x * w, "tanh") end,
    silu = function() return F.silu(x * w) end,
    ["gelu of layer_norm"] = function() return F.gelu(F.layer_norm(x, w, b)) end,
  }
  for name, fn in pairs(functions) do
    it("have the same gradients: " .. name, function()
      local list = { x, v, w }
      if name:find("layer_norm") then list[4] = b end
      -- clone() stands between, so that its output is kept
      same_bits(list, function() F.linear(fn():clone(), v):square():sum():backward() end,
                      function() F.linear(fn(), v):square():sum():backward() end)
      same_bits(list, function() local h = fn():clone(); (F.linear(h, v):sum() + (h * h):sum()):backward() end,
                      function() local h = fn(); (F.linear(h, v):sum() + (h * h):sum()):backward() end)
    end)
  end

  it("take less memory", function()
    local function used(keep)
      collectgarbage()
      collectgarbage()
      local before = ps.memory().used
      local loss = ps.scope(function()
        local h = F.gelu(x)
        return F.linear(keep and h:clone() or h, v):sum()
      end)
      local held = ps.memory().used - before
      loss:backward()
      return held
    end
    assert(used(true) >= ROWS * C * 4)
    assert(used(false) < ROWS * C * 2)
  end)

  it("are kept when someone wrote into them", function()
    local y = ps.no_grad(function() return F.gelu(x) end)
    local h = F.gelu(x)
    ps.no_grad(function() h:mul_(2) end)
    ops.mul(h, v[0]):sum():backward()
    local want = (y * 2):sum(0)
    assert((v:grad()[0] - want):abs():amax():item() <= 1e-5 * want:abs():amax():item())
  end)

  it("say so when their inputs were changed, or backward has passed", function()
    local h = F.gelu(x)
    local y, z = F.linear(h, v):sum(), F.linear(h, v):sum()
    y:backward()
    fails(function() z:backward() end, "second time")
    y = F.linear(F.gelu(x), v):sum()
    ps.no_grad(function() x:mul_(2) end)
    fails(function() y:backward() end, "backward of gelu", "changed in place")
  end)
end)
