-- SPDX-License-Identifier: BSD-3-Clause
-- Gradients: recording, accumulation in leaves, and the errors of wrong use.
local ps = require "ps"
local tensor, F = ps.tensor, ps.F

local function leaf(value, dtype) return tensor(value, { dtype = dtype, requires_grad = true }) end
local function random(shape, dtype) return ps.randn(shape, { dtype = dtype, requires_grad = true }) end

local fails = require("spec.check_lib").fails

before_each(function() ps.manual_seed(1) end)

describe("backward", function()
  it("sums over all paths", function()
    local x = leaf { 1, 2, 3 }
    local y = x * x
    local z = (y + y * 2 + x):sum()                    -- 3 x^2 + x
    z:backward()
    assert.same({ 7, 13, 19 }, x:grad():tolist())
  end)

  it("accumulates over calls until the gradient is cleared", function()
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

  it("takes a gradient for a tensor of several values", function()
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
    assert.same({ { 1, 1 }, { 1, 1 } }, given:tolist())            -- the caller's gradient is not shared
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

  it("ends at leaves that require none, and at integers", function()
    local x, k = leaf { 1, 2 }, tensor { 5, 6 }
    local y = (x * k):sum()
    y:backward()
    assert.is_nil(k:grad())
    fails(function() tensor({ 1 }, "int64"):requires_grad(true) end, "only float", "int64")
    assert.is_false(x:gt(1):needs_grad())
    assert.is_false(x:long():needs_grad())
    assert.is_false(x:argmax():needs_grad())
    fails(function() (x * 2):requires_grad(true) end, "detach()")
    x:requires_grad(false)
    assert.is_false((x * 2):needs_grad())
  end)

  it("can also start at a leaf", function()
    local x = leaf(3)
    x:backward()
    assert.equal(1, x:grad():item())
  end)

  it("shares the gradient of tied tensors", function()
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
    assert.same({ 0, 1, 0, 0 }, x:grad():tolist())
  end)

  it("gives no gradient to elements that were not selected", function()
    local x = leaf { 0, 4 }
    ps.where(x:gt(0), x, 1):sqrt():sum():backward()
    assert.same({ 0, 0.25 }, x:grad():tolist())
  end)

  it("passes through indexing and views of a leaf", function()
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
    x:set_grad(nil);
    (x * 2):to("ref"):sum():backward()
    assert.equal("cpu", x:grad():device())
    assert.same({ 2, 2 }, x:grad():tolist())
  end)

  it("sums in fp32 if a leaf requests it", function()
    local narrow, wide = leaf({ 1 }, "bf16"), leaf({ 1 }, "bf16"):grad_in_fp32(true)
    for _ = 1, 300 do
      (narrow * 1):sum():backward();
      (wide * 1):sum():backward()
    end
    assert.equal(256, narrow:grad():item())             -- bf16 has 8 significant bits
    assert.equal(300, wide:grad():item())
    assert.equal("fp32", wide:grad():dtype())
    local w, b = random({ 5, 3 }, "bf16"):grad_in_fp32(true), random({ 5 }, "bf16"):grad_in_fp32(true)
    local x = ps.randn({ 4, 3 }, { dtype = "bf16" })
    for _ = 1, 2 do F.linear(x, w, b):float():sum():backward() end
    assert.same({ "fp32", "fp32" }, { w:grad():dtype(), b:grad():dtype() })
    assert.same({ 8, 8, 8, 8, 8 }, b:grad():tolist())
  end)

  it("sums over the uses of a tied weight", function()
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

  it("refuses to overwrite tensors that need a gradient", function()
    local x = leaf { 1, 2 }
    fails(function() x:add_(1) end, "in place", "no_grad")
    fails(function() x[0] = 1 end, "in place")
    fails(function() local y = x * 2; y:zero_() end, "zero_", "in place")
    fails(function() tensor({ 0, 0 }):copy_(x) end, "copy_", "its source needs")
    ps.no_grad(function() x:add_(1) end)
    assert.same({ 2, 3 }, x:tolist())
  end)

  it("detects that a saved tensor was changed", function()
    local x, w = leaf { 1, 2 }, leaf { 3, 4 }
    local y = (x * w):sum()
    ps.no_grad(function() w:add_(1) end)
    local err = fails(function() y:backward() end, "backward of mul", "[2]", "changed in place")
    assert.equal("ESTALE", err.name)
    y = (x * w):sum()
    ps.no_grad(function() w[0] = 9 end)                 -- changed through a view
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

  it("reports whether a tensor was made from others", function()
    local from = require("ps.core.scope").made_from
    local x, w = leaf { 1, 2 }, leaf { 3, 4 }
    local y, z = x * w, w:exp()
    local sum = y:sum()
    assert.is_true(from(sum, { y }) and from(sum, { z, y }) and from(sum, { x }) and from(y, { y }))
    assert.is_false(from(sum, { z }) or from(y, { sum }) or from(z, { x }) or from(sum, {}))
    assert.is_false(from(ps.ones { 2 }, { x }) or from(y:detach(), { y }))
    local long = sum
    for _ = 1, 200 do long = long + long * 2 end        -- 2^200 paths
    assert.is_true(from(long, { sum }) and from(long, { w }))
    assert.is_false(from(long, { z }))
    assert.is_true(from(ps.recompute(function(t) return t * 2 end, sum), { y }))
  end)

  it("reports the ops that made a tensor, and does not search past them", function()
    local native = require "ps.core.ffi"
    local C, ffi = native.C, native.ffi
    local function number(t) return tonumber(C.ps_tensor_op_number(t)) end
    local function by(t, ...)
      local n, found, list = select("#", ...), ffi.new("int8_t[4]"), {}
      native.check(C.ps_tensor_made_by(t, n, ffi.new("int64_t[4]", { ... }), found))
      for i = 1, n do list[i] = found[i - 1] end
      return list
    end
    local x, w = leaf { 1, 2 }, leaf { 3, 4 }
    local y, z = x * w, w:exp()
    local of_y, of_z = number(y), number(z)
    local sum = y:sum()
    assert.truthy(of_y >= 0 and of_z > of_y and number(sum) > of_z)
    assert.same({ -1, -1 }, { number(x), number(sum:detach()) })
    assert.same({ 1, 0 }, by(sum, of_y, of_z))
    assert.same({ 1, 1 }, by(sum + z:sum(), of_y, of_z))
    assert.same({ 1, 0 }, by(sum * 2, number(sum), of_y))
    assert.same({ 0, 0 }, by(x, of_y, of_z))
    y = nil -- luacheck: ignore
    collectgarbage()
    collectgarbage()
    assert.same({ 1, 0 }, by(sum / 2, of_y, of_z))                  -- the number outlives the tensor
    local long = sum
    for _ = 1, 200 do long = long + long * 2 end                    -- 2^200 paths
    assert.same({ 1, 0 }, by(long, of_y, of_z))
  end)
end)
