-- SPDX-License-Identifier: BSD-3-Clause
-- Values at the edges of types and functions, compared with known constants: signs of zero, subnormal results, tails
-- of gelu, types of integers, sums in fp64. spec/oracle has randomly drawn comparisons with PyTorch.
local ps = require "ps"

local DEVICES = { "cpu", "ref" }

local function at(fn, x, dtype, device)
  return fn(ps.tensor({ x }, { dtype = dtype, device = device })):to("cpu"):double():item()
end
local function negative_zero(x) return x == 0 and 1 / x == -math.huge end
local function near(want, got, relative)
  assert.is_true(math.abs(got - want) <= relative * math.abs(want), ("%.9g, not %.9g"):format(got, want))
end
-- Returns d fn / dx at x.
local function slope(fn, x, device)
  local t = ps.tensor({ x }, { device = device, requires_grad = true })
  fn(t):backward(ps.ones({ 1 }, { device = device }))
  return t:grad():item()
end

for _, device in ipairs(DEVICES) do
  describe("on " .. device, function()
    it("the sine of -0 is -0", function()
      for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64" } do
        assert.is_true(negative_zero(at(ps.sin, -0.0, dtype, device)), dtype)
      end
    end)

    it("a tensor that is scaled in place keeps the signs of its zeros", function()
      local x = ps.tensor({ 0, -0.0, 2 }, { device = device })
      x:mul_(-3)
      local y = x:tolist()
      assert.is_true(negative_zero(y[1]))
      assert.is_false(negative_zero(y[2]))
      ps.ops.scale_by_(x, ps.tensor(-1, { device = device }), 1)
      y = x:tolist()
      assert.is_false(negative_zero(y[1]))
      assert.is_true(negative_zero(y[2]))
    end)

    it("e^x has its subnormal values", function()
      near(8.194012623990515e-40, at(ps.exp, -90, "fp32", device), 1e-5)
      near(1.4012984643248171e-45, at(ps.exp, -103, "fp32", device), 1e-5)
      assert.equal(0, at(ps.exp, -105, "fp32", device))
    end)

    it("sigmoid and silu end in 0", function()
      assert.equal(0, at(ps.sigmoid, -math.huge, "fp32", device))
      assert.equal(1, at(ps.sigmoid, math.huge, "fp32", device))
      near(-88 * 6.054601895401186e-39, at(ps.silu, -88, "fp32", device), 1e-4)
      assert.equal(0, slope(ps.silu, -120, device))
      assert.equal(1, slope(ps.silu, 120, device))
    end)

    it("the tail of gelu and its slope are relatively exact", function()  -- values from mpmath with 50 digits
      near(-1.26684967e-04, at(ps.gelu, -4, "fp32", device), 5e-6)
      near(-5.03649661e-04, slope(ps.gelu, -4, device), 5e-6)
      near(-7.146946e-06, slope(ps.gelu, -5, device), 5e-6)
      near(-3.5468709453902e-08, slope(ps.gelu, -6, device), 2e-5)
      near(-1.5274556463254e-42, slope(ps.gelu, -14, device), 3e-2)
      assert.equal(0, slope(ps.gelu, -40, device))
    end)

    it("a gradient of a division overflows only if its value does", function()
      local a = ps.tensor({ 0 }, { device = device })
      local b = ps.tensor({ 1e-40 }, { device = device, requires_grad = true })
      a:div(b):backward(ps.tensor({ 3 }, { device = device }))
      assert.equal(0, b:grad():item())
    end)
  end)
end

it("layer_norm of a constant row is 0, whatever the rounding of its mean", function()
  ps.manual_seed(1)
  local y = ps.F.layer_norm((ps.rand { 200, 1 } * 30):expand(200, 44), nil, nil, 1e-3)
  assert.equal(0, y:abs():max():item())
end)

it("std of equal elements is 0, whatever the rounding of their mean", function()
  ps.manual_seed(1)
  assert.equal(0, (ps.rand { 1, 200 } * 30):expand(65, 200):std(0):max():item())
end)

it("sums down columns keep two ulp", function()
  ps.manual_seed(1)
  local x = ps.randn({ 64, 2000 }):square()
  local exact = x:double():sum(0)
  assert.is_true(((x:sum(0):double() - exact) / exact):abs():max():item() < 4 * 2 ^ -24)
end)

it("the gradient of a matrix that a batch is multiplied with is rounded once", function()
  ps.manual_seed(1)
  for _, shape in ipairs { { 16, 4 }, { 1, 16, 4 } } do
    local a, dy = ps.randn({ 64, 8, 16 }, { dtype = "bf16" }), ps.randn({ 64, 8, 4 }, { dtype = "bf16" })
    local b = ps.randn(shape, { dtype = "bf16", requires_grad = true })
    a:matmul(b):backward(dy)
    local exact = a:double():reshape(512, 16):t():matmul(dy:double():reshape(512, 4))
    local off = (b:grad():double():reshape(16, 4) - exact):abs() / (exact:abs() + 1e-3)
    assert.is_true(off:max():item() <= 2 ^ -8, off:max():item())
  end
end)

describe("integers", function()
  it("are unchanged by floor, ceil, round and relu", function()
    for _, dtype in ipairs { "int32", "int64" } do
      local x = ps.tensor({ -3, 0, 7 }, dtype)
      for _, name in ipairs { "floor", "ceil", "round" } do
        assert.equal(dtype, x[name](x):dtype())
        assert.same({ -3, 0, 7 }, x[name](x):tolist())
      end
      assert.equal(dtype, x:relu():dtype())
      assert.same({ 0, 0, 7 }, ps.F.relu(x):tolist())
    end
    assert.same({ 0, 200 }, ps.tensor({ 0, 200 }, "uint8"):relu():tolist())
  end)

  it("with a single fp64 number give fp64", function()
    local y = ps.tensor({ 1, 2 }, "int32") + ps.tensor(0.1, "fp64")
    assert.equal("fp64", y:dtype())
    assert.same({ 1 + 0.1, 2 + 0.1 }, y:tolist())
  end)

  it("are subtracted in place exactly", function()
    assert.same({ 3, 5 }, ps.tensor({ 10, 20 }, "uint8"):sub_(ps.tensor({ 7, 15 }, "uint8")):tolist())
  end)
end)

describe("add_ with a factor", function()
  it("does not round the product to the type of the addend", function()
    local x = ps.tensor({ 1 + 2 ^ -7 }, "bf16")
    assert.equal(100 + 100 / 128, ps.zeros({ 1 }, { dtype = "fp32" }):add_(x, 100):item())
    local third = ps.tensor({ 1 / 3 }, "fp32")
    assert.equal(1e10 * third:double():item(), ps.zeros({ 1 }, { dtype = "fp64" }):add_(third, 1e10):item())
  end)
  it("also applies it to numbers", function()
    assert.same({ 7 }, ps.tensor({ 1 }):add_(2, 3):tolist())
  end)
end)

it("sums of fp64 are good to the last bit", function()
  local n, ulp = 100000, 2 ^ -52
  local x = ps.full({ n }, 0.1, { dtype = "fp64" })
  near(n * 0.1, x:sum():item(), 2 * ulp)
  near(0.1, x:mean():item(), 2 * ulp)
  near(n * 0.1, x:cumsum(0)[n - 1]:item(), 2 * ulp)
end)
