-- SPDX-License-Identifier: BSD-3-Clause
-- Numbers together with tensors that are not fp32: integers, bool and half types, and numbers that a type cannot hold;
-- norms, variances and running sums of them. The values expected are PyTorch 2.15's on the same input.
local ps = require "ps"
local check_lib = require "spec.check_lib"
local tensor = ps.tensor
local fails = check_lib.fails
local nan, inf = 0 / 0, 1 / 0

-- Checks that values are equal within a few roundings of fp32. NaN and infinities must be the same.
local function near(expected, t, dtype, tol)
  if dtype then assert.equal(dtype, t:dtype()) end
  local got = t:reshape(-1):double():tolist()
  assert.equal(#expected, #got)
  for i, want in ipairs(expected) do
    local x = got[i]
    assert(x == want or x ~= x and want ~= want or math.abs(x - want) <= (tol or 1e-6) * math.abs(want),
      ("element %d is %.9g, not %.9g"):format(i, x, want))
  end
end

describe("a number beside integers", function()
  it("divides and is divided with its own value", function()
    near({ 0.5, 0 }, tensor { true, false } / 2, "fp32")
    near({ 0.25, 0 }, tensor({ 1, 2 }):eq(tensor { 1, 3 }) / 4, "fp32")
    near({ 1 / 300, 2 / 300 }, tensor({ 1, 2 }, "uint8") / 300, "fp32")
    near({ -1, -2 }, tensor({ 1, 2 }, "uint8") / -1, "fp32")
    near({ 300 }, 300 / tensor({ 1 }, "uint8"), "fp32")
    near({ 2, inf }, 2 / tensor { true, false }, "fp32")
    near({ 2 ^ -33 }, tensor({ 1 }, "int32") / 2 ^ 33, "fp32")
    near({ 1e20 }, 1e20 / tensor({ 1 }, "int64"), "fp32")
    near({ inf, nan }, tensor({ 1, 0 }, "int64") / 0, "fp32")
    near({ 2.5 }, tensor(5, "int64") / 2, "fp32")
  end)

  it("is a base and an exponent with its own value", function()
    near({ 2, 1 }, ps.pow(2, tensor { true, false }), "fp32")
    near({ 300 }, ps.pow(300, tensor({ 1 }, "uint8")), "fp32")
    near({ 2 ^ -33 }, ps.pow(2 ^ -33, tensor({ 1 }, "int32")), "fp32")
  end)

  it("is compared with its own value, also outside the type's range", function()
    local x = tensor({ 2 ^ 53, -2 ^ 53 }, "int64")
    assert.same({ true, true }, x:lt(1e300):tolist())
    assert.same({ true, true }, x:gt(-inf):tolist())
    assert.same({ false, false }, x:ge(2 ^ 63):tolist())
  end)

  it("is refused if the integer type must hold it and cannot", function()
    local x, mask = tensor({ 1, 2 }, "uint8"), tensor { true, false }
    fails(function() return x:masked_fill(mask, 300) end, "300", "uint8", "0 to 255")
    fails(function() return ps.where(mask, x, 300) end, "300", "uint8")
    fails(function() return ps.where(mask, -1, x) end, "-1", "uint8")
    fails(function() x:fill_(300) end, "300", "uint8")
    fails(function() x:fill_(nan) end, "nan", "uint8")
    fails(function() x[0] = 256 end, "256", "uint8")
    fails(function() x[mask] = 256 end, "256", "uint8")
    fails(function() return ps.full({ 2 }, -1, { dtype = "uint8" }) end, "-1", "uint8")
    fails(function() return tensor({ 1, 300 }, "uint8") end, "300", "uint8")
    fails(function() return tensor({ nan }, "int32") end, "nan", "int32")
    fails(function() return tensor({ 2 ^ 31 }, "int32") end, "2147483648", "int32")
    fails(function() return tensor({ 2 ^ 63 }, "int64") end, "int64")
    fails(function() return ps.randint(0, 257, { 2 }, { dtype = "uint8" }) end, "[0, 257)", "uint8")
    fails(function() return ps.randint(-1, 3, { 2 }, { dtype = "uint8" }) end, "[-1, 3)", "uint8")
    fails(function() return ps.randint(0, 2 ^ 31 + 1, { 2 }, { dtype = "int32" }) end, "int32")
    assert.is_true(ps.randint(0, 256, { 2 }, { dtype = "uint8" }):ge(0):all():item())
    assert.same({ 1, 2 }, x:tolist())
    assert.same({ 255, 2 }, x:masked_fill(mask, 255):tolist())
    assert.same({ true, false }, tensor({ true, false }):masked_fill(mask, 2):tolist())
    assert.same({ 1, -1 }, tensor({ 1.7, -1.7 }, "int32"):tolist())
    assert.same({ true, true, false }, tensor({ 2, nan, 0 }, "bool"):tolist())
    assert.same({ -2 ^ 63 }, tensor({ -2 ^ 63 }, "int64"):tolist())
  end)

  it("becomes the nearest number when the engine writes doubles", function()
    for dtype, want in pairs { uint8 = { 0, 255, 0, 0, 255 }, int32 = { -2 ^ 31, 2 ^ 31 - 1, 0, -1, 300 },
                               int64 = { -2 ^ 63, 2 ^ 63, 0, -1, 300 }, bool = { true, true, true, true, true } } do
      local t = ps.zeros({ 5 }, { dtype = dtype })
      ps.check(ps.C.ps_tensor_write_f64(t, 0, 5, ps.ffi.new("double[5]", -1e300, inf, nan, -1.5, 300)))
      assert.same(want, t:tolist())
    end
  end)

  it("has its own type together with bool", function()
    local y = ps.where(tensor { true, false }, tensor { true, true }, 2)
    assert.equal("int64", y:dtype())
    assert.same({ 1, 2 }, y:tolist())
  end)
end)

describe("a number together with half types", function()
  it("divides and is divided without their rounding", function()
    near({ 10000 }, 1e5 / tensor({ 10 }, "fp16"), "fp16")
    near({ 0, 0 }, tensor({ 0, 1 }, "fp16") / 1e300, "fp16")
    near({ 0, inf }, tensor({ 0, 1 }, "bf16") / 1e-39, "bf16")
    near({ 0, inf }, tensor({ 0, 1 }, "fp32") / 2 ^ -140, "fp32")
    near({ 1e5 }, ps.pow(1e5, tensor({ 1 }, "bf16")), "bf16", 2 ^ -8)
  end)
end)

describe("running sums", function()
  it("of integers are printed exactly", function()
    local x = tensor({ 2 ^ 62, 2 ^ 62 + 1024, 7 }, "int64") * 2 - 1
    for _, t in ipairs { x, x:to "ref", x:reshape(3, 1):t() } do
      assert.matches("9223372036854775807, -9223372036854773761,                   13", tostring(t), 1, true)
    end
    assert.matches(": 9223372036854775807", tostring(x[0]), 1, true)
    assert.matches("[-9223372036854775808]", tostring(tensor({ -2 ^ 63 }, "int64")), 1, true)
    fails(function() return ps.zeros({ 2 }):size(3) end, "the tensor has 1 dimension")
  end)

  it("of integers are int64", function()
    local y = tensor({ true, true, false, true }):cumsum(0)
    assert.equal("int64", y:dtype())
    assert.same({ 1, 2, 2, 3 }, y:tolist())
    near({ 200, 300 }, tensor({ 200, 100 }, "uint8"):cumsum(0), "int64")
    near({ 2 ^ 31 - 1, 2 ^ 32 - 2 }, tensor({ 2 ^ 31 - 1, 2 ^ 31 - 1 }, "int32"):cumsum(0), "int64")
    near({ 1, 0, 2, 1 }, tensor({ { true, false }, { true, true } }):cumsum(0), "int64")
    near({ 3, 2, 2, 1 }, ps.ops.cumsum(tensor({ true, false, true, true }, { device = "ref" }), 0, 1), "int64")
  end)
end)

describe("random numbers in place", function()
  it("need a deviation and a range that are not negative, as in PyTorch", function()
    fails(function() ps.zeros({ 2 }):normal_(0, -1) end, "std is -1")
    fails(function() ps.zeros({ 2 }):normal_(0, 0 / 0) end, "it must be at least 0")
    fails(function() ps.nn.init.normal_(ps.zeros { 2 }, 0, -0.02) end, "std is -0.02")
    fails(function() ps.zeros({ 2 }):uniform_(2, 1) end, "[2, 1) is empty")
    assert.same({ 3, 3 }, ps.zeros({ 2 }):normal_(3, 0):tolist())
    assert.same({ 1, 1 }, ps.zeros({ 2 }):uniform_(1, 1):tolist())
  end)
end)

describe("norm, var and std", function()
  it("of half types are computed in fp32", function()
    near({ 600 }, tensor({ 300, 300, 300, 300 }, "fp16"):norm(), "fp16")
    near({ 1e-4 }, ps.full({ 100 }, 1e-5, { dtype = "fp16" }):norm(), "fp16", 2e-3)
    near({ 346.5 }, tensor({ 300, -300, 300, -300 }, "fp16"):std(), "fp16")
    near({ 1414 }, tensor({ 1000, -1000 }, "fp16"):std(), "fp16")
    near({ inf }, tensor({ 1000, -1000 }, "fp16"):var(), "fp16")
    near({ 0.005 }, tensor({ 1, 1.01, 1, 1.01 }, "bf16"):std(nil, false), "bf16", 0.6)   -- 1.01 is 1.0078125 in bf16
    near({ 0.00390625 }, tensor({ 1, 1.01, 1, 1.01 }, "bf16"):std(nil, false), "bf16")
  end)

  it("of nothing, and of one element without a bias, are NaN", function()
    near({ nan }, ps.zeros({ 0 }):var())
    near({ nan }, ps.zeros({ 0 }):std(nil, false))
    near({ nan }, tensor({ 5 }):var())
    near({ 0 }, tensor({ 5 }):var(nil, false))
    near({ nan, nan, nan }, ps.zeros({ 0, 3 }):var(0))
    near({ 0 }, ps.zeros({ 0 }):norm())
  end)

  it("have the gradient 0 if they are 0", function()
    local function gradient(values, fn)
      local x = tensor(values, { requires_grad = true })
      fn(x):backward()
      return x:grad()
    end
    near({ 0, 0 }, gradient({ 0, 0 }, function(x) return x:norm() end))
    near({ 0.6, 0.8 }, gradient({ 3, 4 }, function(x) return x:norm() end))
    near({ nan, 0 }, gradient({ inf, 1 }, function(x) return x:norm() end))
    near({ 0, 0 }, gradient({ 2, 2 }, function(x) return x:std() end))
    near({ 0 }, gradient({ 2 }, function(x) return x:std(nil, false) end))
    near({ nan }, gradient({ 2 }, function(x) return x:std() end))
    near({ 0, 0, -0.5, 0.5 }, gradient({ { 2, 2 }, { 1, 2 } }, function(x) return x:std(1, false):sum() end))
    local h = tensor({ 300, 400 }, { dtype = "fp16", requires_grad = true })
    h:norm():backward()
    near({ 0.6, 0.8 }, h:grad(), "fp16", 1e-3)
  end)

  it("of integers: the norm is fp32, the others are refused", function()
    near({ 5 }, tensor({ 3, 4 }, "int64"):norm(), "fp32")
    fails(function() return tensor({ 1, 2 }, "int64"):var() end, "float")
  end)
end)

describe("tensors that are written in place", function()
  it("keep their type: integers accept no fraction, float tensor or quotient", function()
    local t = tensor({ 7, 8 }, "int32")
    fails(function() t:add_(1.5) end, "add_: a fraction with a tensor of int32")
    fails(function() t:add_(2, 0.5) end, "add_: a fraction")
    fails(function() t:sub_(0.5) end, "a fraction")
    fails(function() t:mul_(0.5) end, "mul_: a fraction")
    fails(function() t:div_(2) end, "div_: a quotient with a tensor of int32")
    fails(function() t:div_(ps.ones { 1 }) end, "div_: a quotient with a tensor of int32")
    fails(function() t:add_(ps.ones { 2 }) end, "add_: a tensor of fp32 with a tensor of int32")
    fails(function() t:mul_(ps.ones { 2 }) end, "mul_: a tensor of fp32")
    near({ 7, 8 }, t, "int32")
    near({ 20, 22 }, t:add_(3):mul_(2), "int32")
    near({ 19, 21 }, t:sub_(tensor({ 1, 1 }, "int64")), "int32")
  end)
end)
