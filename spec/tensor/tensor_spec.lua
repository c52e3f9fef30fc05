-- SPDX-License-Identifier: BSD-3-Clause
-- ps.tensor as a PyTorch user expects: creation, types, views and indexing.
local ps = require "ps"
local check = require "spec.check_lib"
local count, fails, is = check.count, check.fails, check.is
local tensor = ps.tensor

describe("creation", function()
  it("fills", function()
    is({ { 0, 0 }, { 0, 0 } }, ps.zeros { 2, 2 }, "fp32")
    is({ 1, 1, 1 }, ps.ones({ 3 }, { dtype = "int64" }), "int64")
    is({ 2.5 }, ps.full({ 1 }, 2.5, { dtype = "bf16" }), "bf16")
    is({ false, false }, ps.zeros({ 2 }, { dtype = "bool" }), "bool")
    assert.same({ 4 }, ps.empty(4):shape())
    assert.same({ 0, 3 }, ps.zeros({ 0, 3 }):shape())
    is({}, ps.zeros { 0, 3 })
    assert.equal("fp64", ps.zeros_like(ps.ones({ 2 }, { dtype = "double" })):dtype())
    is({ 1, 1 }, ps.ones_like(tensor { 4, 5 }))
    assert.same({ 2, 3 }, ps.randn_like(ps.zeros { 2, 3 }):shape())
  end)

  it("accepts numbers and nested tables", function()
    is(5, tensor(5), "fp32")
    is({ { 1, 2, 3 }, { 4, 5, 6 } }, tensor { { 1, 2, 3 }, { 4, 5, 6 } }, "fp32")
    is({ true, false }, tensor { true, false }, "bool")
    is({ 1, 2 }, tensor({ 1, 2 }, "int32"), "int32")
    is({}, tensor {})
    assert.same({ 0 }, tensor({}):shape())
    assert.same({ 2, 1, 2 }, tensor({ { { 1, 2 } }, { { 3, 4 } } }):shape())
    fails(function() tensor { { 1, 2 }, { 3 } } end, "rows of different lengths")
    fails(function() tensor { { 1 }, 2 } end, "rows of different")
    fails(function() tensor { 1, { 2 } } end, "rows of different")
    fails(function() tensor { "1" } end, "a string among the numbers")
    local a = tensor { 1, 2 }
    local b = tensor(a)
    b:fill_(0)
    is({ 1, 2 }, a)
  end)

  it("counts", function()
    is({ 0, 1, 2 }, ps.arange(3), "int64")
    is({ 2, 4, 6 }, ps.arange(2, 8, 2), "int64")
    is({ 0, 0.25, 0.5, 0.75 }, ps.arange(0, 1, 0.25), "fp32")
    is({ 3, 2, 1 }, ps.arange(3, 0, -1))
    fails(function() ps.arange(3, 0) end, "has the wrong sign")
    is({}, ps.arange(3, 3))
    is({ 1, 2 }, ps.arange(1, 3, { dtype = "fp32" }), "fp32")
    is({ 0, 1 }, ps.arange(2, { dtype = "uint8" }), "uint8")
    fails(function() ps.arange(0, 5, 0) end, "step")
  end)

  it("draws the same numbers from the same seed", function()
    ps.manual_seed(7)
    local a, b = ps.randn { 100 }, ps.rand { 100 }
    ps.manual_seed(7)
    assert.same(a:tolist(), ps.randn({ 100 }):tolist())
    assert.same(b:tolist(), ps.rand({ 100 }):tolist())
    assert(b:amin():item() >= 0 and b:amax():item() < 1)
    local many = ps.randn { 10000 }
    assert(math.abs(many:mean():item()) < 0.05 and math.abs(many:std():item() - 1) < 0.05)
    assert(math.abs(many:tolist()[1] - many:tolist()[2]) > 0)
    local k = ps.randint(3, 6, { 1000 })
    assert.equal("int64", k:dtype())
    is(3, k:amin())
    is(5, k:amax())
  end)

  it("also accepts PyTorch's names of types", function()
    for alias, name in pairs { float32 = "fp32", bfloat16 = "bf16", half = "fp16", double = "fp64", long = "int64",
      byte = "uint8" } do
      assert.equal(name, ps.zeros({ 1 }, { dtype = alias }):dtype())
    end
    fails(function() ps.zeros({ 1 }, { dtype = "fp8" }) end, "fp8", "bf16")
    fails(function() ps.zeros({ 1 }, { device = "tpu" }) end, "tpu")
  end)

  it("refuses invalid shapes", function()
    fails(function() ps.zeros { 1, 1, 1, 1, 1, 1, 1, 1, 1 } end, "9 dimensions")
    fails(function() ps.zeros { 2, 1.5 } end, "must be a whole number, not 1.5")
    fails(function() ps.zeros { "a" } end, "must be a whole number, not 'a'")
    fails(function() ps.zeros { 2, -1 } end, "negative", "[2, -1]")
    fails(function() ps.zeros { 2 ^ 31, 2 ^ 31, 2 ^ 31 } end, "too many elements")
    fails(function() ps.zeros { 2 ^ 40, 2 ^ 10 } end, "bytes")
  end)
end)

describe("types", function()
  it("are promoted like in PyTorch", function()
    local function type_of(a, b) return (ps.ones({ 2 }, { dtype = a }) + ps.ones({ 2 }, { dtype = b })):dtype() end
    assert.equal("fp32", type_of("bf16", "fp16"))
    assert.equal("fp32", type_of("bf16", "fp32"))
    assert.equal("fp64", type_of("fp32", "fp64"))
    assert.equal("bf16", type_of("int64", "bf16"))
    assert.equal("int64", type_of("int32", "int64"))
    assert.equal("int32", type_of("uint8", "int32"))
    assert.equal("uint8", type_of("bool", "uint8"))
    -- for a tensor without dimensions, only the category matters
    assert.equal("bf16", (ps.ones({ 2 }, { dtype = "bf16" }) + tensor(1)):dtype())
    assert.equal("int32", (ps.ones({ 2 }, { dtype = "int32" }) * tensor(2, "int64")):dtype())
    assert.equal("fp32", (ps.ones({ 2 }, { dtype = "int32" }) * tensor(2)):dtype())
  end)

  it("of integers and scalars", function()
    local i = tensor({ 1, 2, 3 }, "int64")
    is({ 2, 3, 4 }, i + 1, "int64")
    is({ 9, 8, 7 }, 10 - i, "int64")
    is({ 2, 4, 6 }, i * 2, "int64")
    is({ 1.5, 2.5, 3.5 }, i + 0.5, "fp32")
    is({ 0.5, 1, 1.5 }, i / 2, "fp32")
    is({ -1, -2, -3 }, -i, "int64")
    is({ 1, 4, 9 }, i ^ 2, "int64")
    is({ 1, 32, 243 }, i ^ 5, "int64")
    is({ 1, 1, 1 }, tensor({ 1, 2, 3 }, "int32") ^ 0, "int32")
    is({ 16785409 }, tensor({ 4097 }, "int64") ^ 2, "int64")                     -- is not a number of fp32
    is({ 0 }, tensor({ 2 }, "int64") ^ 64, "int64")                              -- wraps around
    is({ 1, 0.5 }, tensor({ 1, 2 }, "int64") ^ -1, "fp32")
    is({ 254, 255, 0 }, tensor({ 253, 254, 255 }, "uint8") + 1, "uint8")
    is({ 9007199254740992 }, tensor({ 9007199254740991 }, "int64") + 1)
    is({ 2, 1 }, tensor { true, false } + 1, "int64")
    is({ 3, 0 }, tensor { true, false } * 3, "int64")
    is({ 0.5, 0 }, tensor { true, false } * 0.5, "fp32")
    assert.has_error(function() return -tensor { true } end,
      "a tensor of bool has no negative; write t:logical_not(), or -t:long()")
  end)

  it("of integers follows the default type if it is fp64", function()
    local i, was = tensor({ 3, 1 }, "int64"), ps.set_default_dtype "fp64"
    local ok, why = pcall(function()
      for name, x in pairs { ["i / 2"] = i / 2, ["i / i"] = i / i, ["2 / i"] = 2 / i, ["i * 0.5"] = i * 0.5,
                             ["i ^ 0.5"] = i ^ 0.5, ["i ^ i"] = i ^ i, ["0.5 ^ i"] = ps.pow(0.5, i),
                             mean = ps.nn.BatchNorm1d(4).running_mean } do
        assert.equal("fp64", x:dtype(), name)
      end
    end)
    ps.set_default_dtype(was)
    assert(ok, why)
  end)

  it("of floats and scalars stay", function()
    for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64" } do
      local x = tensor({ 1, 2, 4 }, dtype)
      is({ 3, 5, 9 }, x * 2 + 1, dtype)
      is({ 4, 2, 1 }, 4 / x, dtype)
      is({ 0.25, 0.5, 1 }, x / 4, dtype)
      is({ 1, 4, 16 }, x ^ 2, dtype)
      is({ 2, 4, 16 }, 2 ^ x, dtype)
      is({ 1, 0, -2 }, 2 - x, dtype)
    end
    -- the scalar is not rounded to bf16 before the division
    is({ 334 }, tensor({ 100 }, "bf16") / 0.3, "bf16")                  -- 332 otherwise
  end)

  it("are converted", function()
    local x = tensor { -1.7, 0, 1.2, 300 }
    is({ -1, 0, 1, 300 }, x:int(), "int32")
    is({ -1, 0, 1, 300 }, x:long(), "int64")
    is({ 0, 0, 1, 255 }, x:to("uint8"), "uint8")
    is({ true, false, true, true }, x:bool(), "bool")
    assert.equal("fp16", x:half():dtype())
    assert.equal("bf16", x:bfloat16():dtype())
    assert.equal("fp64", x:double():dtype())
    assert.equal(x, x:to("fp32"))
    assert.equal(x, x:to { device = "cpu" })
    local y = x:to { dtype = "fp64", device = "ref" }
    assert.same({ "fp64", "ref" }, { y:dtype(), y:device() })
    assert.same(x:tolist(), y:to("cpu"):float():tolist())
    assert.same(x:tolist(), x:to("ref"):tolist())
    fails(function() return x:to("tpu") end, "tpu")
  end)
end)

describe("views", function()
  it("share bytes", function()
    local x = count(2, 6)
    local views = { x:reshape(3, 4), x:view(12), x:t(), x:permute(1, 0), x:unsqueeze(0), x:slice(1, 2, 4), x[1],
      x:flatten(),
                    x:narrow(0, 0, 1), (x:split(2, 1)) }
    x:fill_(7)
    for _, v in ipairs(views) do
      is(7, v:amin())
      is(7, v:amax())
    end
    views[1]:zero_()
    is(0, x:amax())
    local copy = x:clone()
    copy:fill_(1)
    is(0, x:amax())
  end)

  it("reshape", function()
    local x = count(2, 3, 4)
    assert.same({ 6, 4 }, x:reshape(-1, 4):shape())
    assert.same({ 4, 6 }, x:reshape({ 4, -1 }):shape())
    assert.same({ 24 }, x:flatten():shape())
    assert.same({ 1 }, tensor(5):flatten():shape())
    assert.same({ 2, 12 }, x:flatten(1):shape())
    assert.same({ 6, 4 }, x:flatten(0, 1):shape())
    assert.same({}, tensor({ 1 }):reshape():shape())
    is({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, count(2, 3):t():reshape(3, 2))
    is({ 0, 3, 1, 4, 2, 5 }, count(2, 3):t():reshape(6))
    is({ 0, 12, 4, 16, 8, 20, 1, 13 }, x:transpose(0, 2):reshape(-1):slice(0, 0, 8))
    assert.same({ 0, 5 }, ps.zeros({ 5, 0 }):reshape(0, 5):shape())
    fails(function() x:reshape(5, 5) end, "reshape", "[5, 5]", "24")
    fails(function() x:reshape(-1, -1) end, "reshape")
    fails(function() x:reshape(5, -1) end, "reshape", "24")
    fails(function() count(2, 3):t():view(6) end, "reshape", "contiguous()", "[3, 2]")
  end)

  it("permute and transpose", function()
    local x = count(2, 3, 4)
    assert.same({ 4, 2, 3 }, x:permute(2, 0, 1):shape())
    assert.same({ 4, 2, 3 }, x:permute({ -1, 0, 1 }):shape())
    assert.same({ 2, 4, 3 }, x:transpose(1, 2):shape())
    assert.same({ 4, 3, 2 }, x:transpose(0, -1):shape())
    assert.same({ 4, 3, 2 }, ps.transpose(x, 0, 2):shape())
    is({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, count(2, 3):t())
    is({ 1, 2 }, tensor({ 1, 2 }):t())
    assert.is_false(count(2, 3):t():is_contiguous())
    assert.is_true(count(2, 3):t():contiguous():is_contiguous())
    assert.same({ 1, 3 }, count(2, 3):t():stride())
    assert.equal(3, count(2, 3):t():stride(-1))
    fails(function() x:permute(0, 1) end, "permute", "2 axes for 3")
    fails(function() x:permute(0, 0, 1) end, "permute", "twice")
    fails(function() x:transpose(0, 3) end, "dimension 3", "3")
  end)

  it("squeeze, unsqueeze and expand", function()
    local x = count(2, 1, 3)
    assert.same({ 2, 3 }, x:squeeze():shape())
    assert.same({ 2, 3 }, x:squeeze(1):shape())
    assert.same({ 2, 1, 3 }, x:squeeze(0):shape())
    assert.same({ 1, 2, 1, 3 }, x:unsqueeze(0):shape())
    assert.same({ 2, 1, 3, 1 }, x:unsqueeze(-1):shape())
    fails(function() x:unsqueeze(5) end, "unsqueeze")
    is({ { 1, 1, 1 }, { 2, 2, 2 } }, tensor({ { 1 }, { 2 } }):expand(2, 3))
    is({ { 1, 2 }, { 1, 2 } }, tensor({ 1, 2 }):expand(2, -1))
    fails(function() tensor({ 1, 2 }):expand(2, 3) end, "expand", "[2]")
  end)

  it("split and chunk", function()
    local a, b, c = ps.arange(5):split(2)
    is({ 0, 1 }, a)
    is({ 2, 3 }, b)
    is({ 4 }, c)
    a, b = count(2, 3):split({ 1, 2 }, -1)
    is({ { 0 }, { 3 } }, a)
    is({ { 1, 2 }, { 4, 5 } }, b)
    a, b, c = count(2, 6):chunk(3, 1)
    assert.same({ 2, 2 }, b:shape())
    is({ { 0, 1 }, { 6, 7 } }, a)
    is({ { 4, 5 }, { 10, 11 } }, c)
    assert.equal(2, select("#", ps.arange(5):chunk(2)))
    fails(function() ps.arange(5):split { 1, 2 } end, "split", "3", "5")
    fails(function() ps.arange(5):split(0) end, "split")
  end)

  it("cat and stack", function()
    is({ 0, 1, 5 }, ps.cat { ps.arange(2), tensor({ 5 }, "int64") })
    is({ { 1, 3 }, { 2, 4 } }, ps.cat({ tensor { { 1 }, { 2 } }, tensor { { 3 }, { 4 } } }, -1))
    is({ { 1, 2 }, { 3, 4 } }, ps.stack { tensor { 1, 2 }, tensor { 3, 4 } })
    is({ { 1, 3 }, { 2, 4 } }, ps.stack({ tensor { 1, 2 }, tensor { 3, 4 } }, -1))
    is({ 1, 2 }, ps.stack { tensor(1), tensor(2) })
    assert.equal("fp32", ps.cat({ ps.arange(2), tensor { 1 } }):dtype())
    local many = {}
    for i = 1, 150 do many[i] = tensor { i } end
    assert.same({ 150 }, ps.cat(many):shape())
    is(150 * 151 / 2, ps.cat(many):sum())
    fails(function() ps.cat { ps.zeros { 2, 3 }, ps.zeros { 3, 2 } } end, "concat", "[2, 3]", "[3, 2]")
    fails(function() ps.cat {} end, "empty")
  end)
end)

describe("indexing", function()
  local x
  before_each(function() x = count(3, 4) end)

  it("by number", function()
    is({ 0, 1, 2, 3 }, x[0])
    is({ 8, 9, 10, 11 }, x[-1])
    is(6, x[{ 1, 2 }])
    is(6, x[1][2])
    is(11, x[{ -1, -1 }])
    fails(function() return x[3] end, "index 3", "size 3")
    fails(function() return x[-4] end, "index -4", "size 3")
    fails(function() return x[{ 0, 4 }] end, "index 4", "size 4")
    fails(function() return x[{ 0, 0, 0 }] end, "dimension")
    fails(function() return tensor(1)[0] end, "dimension")
    fails(function() return x[0.5] end, "0.5")
    assert.equal(3, #x)
  end)

  it("by range", function()
    is({ { 4, 5 }, { 8, 9 } }, x[{ { 1, 3 }, { 0, 2 } }])
    is({ { 4, 5, 6, 7 }, { 8, 9, 10, 11 } }, x[{ { 1 } }])
    is({ { 0, 2 }, { 4, 6 }, { 8, 10 } }, x[{ {}, { 0, nil, 2 } }])
    is({ { 3 }, { 7 }, { 11 } }, x[{ ps.all, { -1 } }])
    is({ { 0, 1, 2 }, { 4, 5, 6 }, { 8, 9, 10 } }, x[{ {}, { 0, -1 } }])
    is({ 1, 5, 9 }, x[{ {}, 1 }])
    is({}, x[{ { 2, 1 } }])
    is({ { 8, 9, 10, 11 } }, x[{ { 2, 100 } }])
    is({ { 1, 3 }, { 9, 11 } }, x:slice(0, 0, 3, 2):slice(1, 1, nil, 2))
    is({ { 4, 5, 6, 7 } }, x:narrow(0, -2, 1))
    is({ 1, 5, 9 }, x:select(1, 1))
    fails(function() x:narrow(0, 2, 2) end, "slice", "[2, 4)", "size 3")
    fails(function() return x[{ { 0, 2, -1 } }] end, "step -1")
    fails(function() return x[{ "a" }] end, "string")
    fails(function() return x[{ {}, {}, {} }] end, "3 indices")
  end)

  it("by integer tensors", function()
    is({ { 8, 9, 10, 11 }, { 0, 1, 2, 3 }, { 8, 9, 10, 11 } }, x[tensor({ 2, 0, 2 }, "int64")])
    is({ { { 0, 1, 2, 3 } }, { { 4, 5, 6, 7 } } }, x[tensor({ { 0 }, { 1 } }, "int32")])
    is({ { 3, 0 }, { 7, 4 }, { 11, 8 } }, x[{ {}, tensor({ 3, 0 }, "int64") }])
    is({ { 3, 0 }, { 7, 4 }, { 11, 8 } }, x:index_select(1, tensor({ 3, 0 }, "int64")))
    is({ 5, 6 }, ps.arange(4, 8)[tensor({ 1, 2 }, "int64")])
    is({}, ps.arange(4, 8)[tensor({}, "int64")])
    assert.same({ 0, 3 }, ps.zeros({ 0, 3 })[tensor({}, "int64")]:shape())
    fails(function() return x[true] end, "boolean")
    is({ { 1 }, { 6 }, { 11 } }, x:gather(1, tensor({ { 1 }, { 2 }, { 3 } }, "int64")))
    fails(function() return x[tensor({ 3 }, "int64")] end, "index 3 of dimension 0 with size 3")
    fails(function() return x[tensor { 1.5 }] end, "an integer type or bool")
    fails(function() return x:gather(1, tensor({ { 4 } }, "int64")) end, "gather", "index 4")
  end)

  it("by masks", function()
    is({ 9, 10, 11 }, x[x:gt(8)])
    is({}, x[x:gt(100)])
    is({ 1, 3 }, tensor({ 1, 2, 3 }):masked_select(tensor { true, false, true }))
    is({ { 0, 2 }, { 1, 0 } }, tensor({ { 0, 0, 1 }, { 2, 0, 0 } }):nonzero())
    is({ { 0, 1, 2, 3 }, { 8, 9, 10, 11 } }, x[tensor { true, false, true }])
    fails(function() return x[tensor { true, false }] end, "bool index")
    is({ { 0, 1, 2, 3 }, { 4, 5, 6, 7 }, { -1, -1, -1, -1 } }, x:masked_fill(x:ge(8), -1))
    fails(function() return x[ps.ones({ 3, 5 }, { dtype = "bool" })] end, "[3, 5]", "[3, 4]")
  end)

  it("assigns", function()
    x[0] = 9
    is({ 9, 9, 9, 9 }, x[0])
    x[{ {}, 1 }] = tensor { 7, 8, 9 }
    is({ 7, 8, 9 }, x[{ {}, 1 }])
    x[{ { 1, 3 }, { 2, 4 } }] = 0
    is({ { 9, 7, 9, 9 }, { 4, 8, 0, 0 }, { 8, 9, 0, 0 } }, x)
    x[{ 2, -1 }] = 5
    is(5, x[2][3])
    x[-1] = tensor({ 1, 2, 3, 4 }, "int64")
    is({ 1, 2, 3, 4 }, x[2])
    x[x:eq(0)] = -3
    is({ { 9, 7, 9, 9 }, { 4, 8, -3, -3 }, { 1, 2, 3, 4 } }, x)
    x[x:lt(0)] = tensor(0.5)
    is({ 4, 8, 0.5, 0.5 }, x[1])
    fails(function() x[3] = 1 end, "index 3")
    fails(function() x[0] = tensor { 1, 2, 3 } end, "t[key] = value", "[3]", "[4]")
    fails(function() x[0] = "a" end, "t[key] = value: the value is a string")
    x[tensor({ 0 }, "int64")] = 1
    is({ 1, 1, 1, 1 }, x[0])
    x[{ tensor({ 0, 2 }, "int64"), 1 }] = 2
    is({ 1, 2, 1, 1 }, x[0])
    is({ 1, 2, 3, 4 }, x[2])
    fails(function() x.name = 1 end, "name")
    fails(function() return x.no_such_method end, "no_such_method")
  end)
end)

describe("bytes of a tensor", function()
  -- Several threads copy large tensors. Each thread's piece begins at the border of a huge page.
  it("are those that were written, for any number and alignment", function()
    local ffi = require "ffi"
    local MIB = 2 ^ 20
    local from = ffi.new("uint32_t[?]", 3 * MIB)
    for i = 0, 3 * MIB - 1 do from[i] = i end
    local all = ps.zeros({ 14 * MIB }, { dtype = "uint8", device = "cpu" })
    for _, n in ipairs { 4 * MIB - 1, 4 * MIB, 6 * MIB + 7, 11 * MIB + 3 } do
      for _, at in ipairs { 0, 5, 2 * MIB - 1 } do
        all:fill_(0)
        local part = all:narrow(0, at, n)
        local source = ffi.cast("const char *", from) + n % 13
        local back = ffi.new("char[?]", n + 1, 1)
        ps.check(ps.C.ps_tensor_write(part, source, n))
        ps.check(ps.C.ps_tensor_read(part, back, n))
        assert.truthy(ffi.string(back, n) == ffi.string(source, n), ("%d bytes at %d"):format(n, at))
        assert.equal(1, back[n])                              -- nothing after them is written
        assert.equal(0, all:narrow(0, at + n, 14 * MIB - at - n):ne(0):sum():item())
        if at > 0 then assert.equal(0, all:narrow(0, 0, at):ne(0):sum():item()) end
      end
    end
  end)

  -- The processor cannot access sim's memory, so bytes of a file are copied there through a buffer.
  it("are those of a file's tensor, and a truncated file is an error, whichever thread detects it", function()
    local MIB = 2 ^ 20
    local path = os.tmpname()
    local tensors = { few = ps.arange(0, 5, 1, { dtype = "int32", device = "cpu" }),
      some = ps.arange(0, MIB + 7, 1, { dtype = "int32", device = "cpu" }),
      z_many = ps.arange(0, 5 * MIB + 3, 1, { dtype = "int32", device = "cpu" }) }
    ps.safetensors.save(path, tensors)
    local file = ps.safetensors.open(path)
    for name, t in pairs(tensors) do
      for _, device in ipairs { "cpu", "ref", "sim" } do
        local n = t:numel()
        local all = ps.zeros({ n + 2 }, { dtype = "int32", device = "cpu" }):to(device)
        file:read_into(name, all:narrow(0, 1, n))
        all = all:to("cpu")
        assert.equal(0, all:narrow(0, 1, n):ne(t):sum():item(), name .. " on " .. device)
        assert.equal(0, all[0]:item())                        -- nothing before and after them is changed
        assert.equal(0, all[n + 1]:item())
      end
    end
    local length = io.open(path, "r+b"):seek("end")
    assert.equal(0, os.execute(("truncate -s %d '%s'"):format(length - 4 * MIB - 100, path)))
    for _, device in ipairs { "cpu", "ref", "sim" } do
      local t = ps.zeros({ 5 * MIB + 3 }, { dtype = "int32", device = "cpu" }):to(device)
      local ok, problem = pcall(file.read_into, file, "z_many", t)
      assert.falsy(ok)
      assert.equal("EIO", problem.name)
      assert.truthy(tostring(problem):find(("%s was truncated from %d to"):format(path, length), 1, true),
        tostring(problem))
      assert.equal(0, t:fill_(0):to("cpu"):sum():item())      -- it is still usable
    end
    file:close()
    os.remove(path)
  end)
end)

describe("a NaN", function()
  it("is a number in Lua, whatever its other bits", function()
    local ffi = require "ffi"
    -- as doubles, these would be a nil, a boolean, a string and so on
    for _, bits in ipairs { 0xffffffff, 0xffe00001, 0xfff80000, 0x7fc00001, 0xff800001 } do
      local t = ps.empty { 2 }
      ps.check(ps.C.ps_tensor_write(t, ffi.new("uint32_t[2]", bits, bits), 8))
      for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64" } do
        for _, value in ipairs { t:to(dtype)[0]:item(), t:to(dtype):tolist()[2] } do
          assert.equal("number", type(value))
          assert.is_true(value ~= value)
        end
      end
      assert.truthy(tostring(t):find("nan, nan", 1, true), tostring(t))
    end
    local wide = ps.empty({ 1 }, { dtype = "fp64" })
    ps.check(ps.C.ps_tensor_write(wide, ffi.new("uint32_t[2]", 0xffffffff, 0xffffffff), 8))
    assert.equal("number", type(wide:item()))
  end)
end)
