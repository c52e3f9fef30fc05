-- SPDX-License-Identifier: BSD-3-Clause
-- t[{ ... }] with index tensors, masks and new axes, read and written, compared with PyTorch's shapes and elements;
-- where, cumsum, dropout and item by PyTorch's rules.
local ps = require "ps"
local check = require "spec.check_lib"
local fails, is = check.fails, check.is
local tensor, all, new = ps.tensor, ps.all, ps.newaxis

describe("index tensors", function()
  local a = ps.arange(120):reshape(2, 3, 4, 5)
  local i, j, k = tensor({ 0, 1 }, "int64"), tensor({ 2, 0 }, "int32"), tensor({ { 3 }, { 1 } }, "int64")
  local m, wide = tensor { true, false, true }, a[{ 0, all, all, 0 }]:gt(20)

  -- Rows of a case's name, its key, PyTorch 2.15's shape, the sum of its elements, and the sum of n times the n-th
  -- element.
  local CASES = {
    { "two beside each other", { i, j }, { 2, 4, 5 }, 54120 },
    { "two with a slice between", { i, all, k }, { 2, 2, 3, 5 }, 126580 },
    { "two after a slice", { all, j, k }, { 2, 2, 2, 5 }, 59920 },
    { "a slice before and between", { all, j, all, i }, { 2, 2, 4 }, 7700 },
    { "a number before two", { 1, j, all, k }, { 2, 2, 4 }, 11568 },
    { "a number between two", { all, j, 2, i }, { 2, 2 }, 686 },
    { "a number, then two", { all, 1, k, j }, { 2, 2, 2 }, 2632 },
    { "one without dimensions", { tensor(1, "int64"), all, k }, { 3, 2, 1, 5 }, 46465 },
    { "a mask", { all, m }, { 2, 2, 4, 5 }, 259440 },
    { "a mask and one", { i, m }, { 2, 4, 5 }, 70120 },
    { "a mask of two dimensions", { all, wide }, { 2, 7, 5 }, 222810 },
    { "a mask of the first dimensions", a[{ all, all, 0, 0 }]:gt(30), { 4, 4, 5 }, 300240 },
    { "a new axis before one", { all, new, j }, { 2, 1, 2, 4, 5 }, 227440 },
    { "a new axis between two", { i, new, j }, { 2, 1, 4, 5 }, 54120 },
    { "a new axis in front", { new, i }, { 1, 2, 3, 4, 5 }, 575960 },
  }
  for _, case in ipairs(CASES) do
    it("name PyTorch's elements: " .. case[1], function()
      local y = a[case[2]]
      assert.same(case[3], y:shape())
      assert.equal(case[4], (y:reshape(-1) * ps.arange(1, y:numel() + 1)):sum():item())
    end)
  end

  it("select an element of each row", function()
    local x = ps.arange(12):reshape(3, 4)
    is({ 1, 6, 11 }, x[{ ps.arange(3), tensor({ 1, 2, 3 }, "int64") }])
    local p = ps.nn.Parameter(ps.zeros { 2, 3 })
    local at = tensor({ 1, 1, 0 }, "int64")
    p[{ at, tensor({ 2, 2, 0 }, "int64") }]:sum():backward()
    is({ { 1, 0, 0 }, { 0, 0, 2 } }, p:grad())
  end)

  it("out of range are an error", function()
    fails(function() return a[{ i, tensor({ 0, 3 }, "int64") }] end, "index 3 of dimension 1 with size 3")
    fails(function() return a[{ tensor({ -3, 0 }, "int64"), j }] end, "index -3 of dimension 0 with size 2")
    fails(function() return a[tensor({ -3 }, "int64")] end, "index -3 of dimension 0 with size 2")
    fails(function() a[{ all, tensor({ 3 }, "int64") }] = 0 end, "index 3 of dimension 1 with size 3")
    fails(function() return a[{ i, all, all, all, 0 }] end, "5 indices for a tensor with 4 dimensions")
    fails(function() return a[{ all, m, m }] end, "a bool index of shape [3] at dimension 2")
    fails(function() return a[{ i, tensor { 0.5 } }] end, "index 2 is a tensor of fp32")
  end)

  it("count from the end if they are negative", function()
    local x = ps.arange(12):reshape(3, 4)
    is({ { 8, 9, 10, 11 }, { 4, 5, 6, 7 } }, x[tensor({ -1, 1 }, "int32")])
    is({ 11, 5 }, x[{ tensor({ -1, 1 }, "int64"), tensor({ 3, -3 }, "int32") }])
    is({ 10, 2 }, x[{ tensor({ -1, 0 }, "int64"), tensor(-2, "int64") }])
  end)
end)

describe("writes through index tensors", function()
  local function at(...) return tensor({ ... }, "int64") end

  -- Expected values from PyTorch 2.15.
  it("accept a number, a value for each, or one that broadcasts", function()
    local x = ps.zeros { 3, 4 }
    x[{ at(0, -1), at(1, 2) }] = tensor { 5, 6 }
    is({ { 0, 5, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 6, 0 } }, x)
    x[at(1)] = 7
    is({ { 0, 5, 0, 0 }, { 7, 7, 7, 7 }, { 0, 0, 6, 0 } }, x)
    x[{ all, at(3, 0) }] = tensor { 1, 2 }
    is({ { 2, 5, 0, 1 }, { 2, 7, 7, 1 }, { 2, 0, 6, 1 } }, x)
    x[{ { 0, 2 }, at(1, 1) }] = tensor { { 8, 9 }, { 3, 4 } }          -- if indices are equal, the last one counts
    is({ { 2, 9, 0, 1 }, { 2, 4, 7, 1 }, { 2, 0, 6, 1 } }, x)
    x[{ tensor { true, false, true }, at(0) }] = 0
    is({ { 0, 9, 0, 1 }, { 2, 4, 7, 1 }, { 0, 0, 6, 1 } }, x)
    local transposed = x:t()
    transposed[{ at(0), at(2) }] = -1
    assert.equal(-1, x[{ 2, 0 }]:item())
    x[{ tensor(1, "int64"), at(0) }] = 11
    assert.equal(11, x[{ 1, 0 }]:item())
    x[ps.zeros({ 0 }, { dtype = "int64" })] = 3
    x[{ at(0), new, at(0) }] = ps.full({ 1, 1 }, 12)
    assert.equal(12, x[{ 0, 0 }]:item())
    fails(function() x[at(0, 1)] = tensor { 1, 2, 3 } end, "the value has shape [3]", "broadcast to [2, 4]")
    fails(function() x[at(0, 1)] = nil end, "the value is missing")
  end)

  it("have gradients by index_put, and are refused in place if a gradient is needed", function()
    local x, v = ps.nn.Parameter(ps.ones { 3, 2 }), ps.nn.Parameter(tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } })
    local y = x:index_put(at(2, 0, 2), v)
    is({ { 3, 4 }, { 1, 1 }, { 5, 6 } }, y);
    (y * tensor { { 1, 2 }, { 3, 4 }, { 5, 6 } }):sum():backward()
    is({ { 0, 0 }, { 3, 4 }, { 0, 0 } }, x:grad())
    is({ { 0, 0 }, { 1, 2 }, { 5, 6 } }, v:grad())                     -- the first value is overwritten
    x:set_grad(nil)
    v:set_grad(nil)
    y = x:index_put(at(2, 0, 2), v, true)
    is({ { 4, 5 }, { 1, 1 }, { 7, 9 } }, y)
    fails(function() x[at(0)] = 1 end, "t[key] = value writes in place", "the tensor needs a gradient", "index_put")
    fails(function() ps.zeros({ 3, 2 })[at(0)] = v[0] end, "the value needs a gradient")
    fails(function() x[0] = 1 end, "writes in place")
    local row = v[{ { 0, 1 } }]
    fails(function() x:index_add_(0, at(0), row) end, "index_add_ writes in place", "index_add(d, index, src)")
    fails(function() ps.zeros({ 3, 2 }):scatter_(0, at(0):reshape(1, 1), row) end, "scatter_ writes in place")
    ps.no_grad(function() x[at(0)] = 9 end)
    is({ { 9, 9 }, { 1, 1 }, { 1, 1 } }, x)
    fails(function() x:index_put(at(0), ps.zeros({ 1, 2 }, { dtype = "fp64" })) end, "the value is a tensor of fp64")
  end)

  it("by methods along a dimension", function()
    local x = ps.zeros { 2, 3 }
    is({ { 1, 0, 5 }, { 2, 0, 7 } }, x:index_add(1, at(2, 0, 2), tensor { { 2, 1, 3 }, { 3, 2, 4 } }))
    is({ { 4, 0, 0 }, { 4, 0, 0 } }, x:index_add(1, at(0, 0), ps.ones { 2, 2 }, 2))
    is({ { 1, 0, 3 }, { 2, 0, 4 } }, x:index_copy(1, at(2, 0, 2), tensor { { 2, 1, 3 }, { 3, 2, 4 } }))
    is({ { 0, 9, 0 }, { 0, 9, 0 } }, x:index_fill(1, at(1), 9))
    is({ { 0, 0, 0 }, { 7, 0, 0 } }, x:scatter(0, at(1):reshape(1, 1), 7))
    is({ { 3, 0, 0 }, { 0, 0, 0 } }, x:scatter_reduce(1, at(0, 0):reshape(1, 2), tensor { { 3, 2 } }, "amax"))
    is({ { -2, 0, 0 }, { 0, 0, 0 } },
      x:scatter_reduce(1, at(0, 0):reshape(1, 2), tensor { { -2, -3 } }, "amax", false))
    is({ { -2.5, 0, 0 }, { 0, 0, 0 } },
      x:scatter_reduce(1, at(0, 0):reshape(1, 2), tensor { { -2, -3 } }, "mean", false))
    is({ { 8, 9, 0 }, { 0, 0, 0 } }, x:masked_scatter(tensor { { true, true, false }, { false, false, false } },
      tensor { 8, 9, 10 }))
    x:masked_fill_(tensor { true, false, true }, 4):scatter_add_(0, at(1):reshape(1, 1), ps.ones { 1, 1 })
    is({ { 4, 0, 4 }, { 5, 0, 4 } }, x)
    fails(function() x:masked_scatter(x:eq(x), tensor { 1, 2 }) end, "the mask has 6 true elements", "only 2")
    fails(function() x:scatter(0, at(0):reshape(1, 1), ps.zeros({ 1, 1 }, { dtype = "fp64" })) end,
      "convert the source with :to")
    fails(function() x:scatter(0, at(0, 1):reshape(2, 1), ps.zeros { 1, 1 }) end, "smaller than the index")
    fails(function() x:scatter(0, at(0), 1) end, "must have the same number of dimensions")
    fails(function() x:scatter(0, at(0):reshape(1, 1), 1, "mean") end, "scatter: reduce is 'mean'")
    fails(function() x:index_add(1, at(0), ps.ones { 2, 2 }) end, "for 1 indices of dimension 1 it must be [2, 1]")
    fails(function() return x:masked_fill(x:long(), 1) end, "the mask is a tensor of int64")
    fails(function() return x:masked_fill(tensor { true, false }, 1) end, "a mask of shape [2] does not broadcast")
    local p = ps.nn.Parameter(ps.ones { 2, 2 })
    fails(function() return p:scatter_reduce(0, at(0):reshape(1, 1), 2, "prod") end, "a product has no gradient here")
  end)
end)

describe("writes through a mask", function()
  -- Expected values from PyTorch 2.15.
  it("accept a value for all, or one for each", function()
    local b = ps.zeros { 2, 2 }
    b[tensor { { true, false }, { true, true } }] = tensor { 1, 2, 3 }
    is({ { 1, 0 }, { 2, 3 } }, b)
    b[tensor { false, true }] = 7
    is({ { 1, 0 }, { 7, 7 } }, b)
    b[tensor { false, true }] = tensor { { 5, 6 } }
    is({ { 1, 0 }, { 5, 6 } }, b)
    b[tensor { true, true }] = tensor { 8, 9 }
    is({ { 8, 9 }, { 8, 9 } }, b)
    b[b:lt(0)] = ps.zeros({ 4 }):narrow(0, 0, 0)
    is({ { 8, 9 }, { 8, 9 } }, b)
    fails(function() b[b:eq(8)] = tensor { 1, 2, 3 } end, "has 2 true elements, but the value has 3")
    fails(function() b[tensor { true }] = 1 end, "a bool index of shape [1]")
  end)
end)

describe("ps.newaxis", function()
  it("adds a dimension of size 1", function()
    local x = ps.arange(6):reshape(2, 3)
    assert.same({ 2, 1, 3 }, x[{ all, new }]:shape())
    assert.same({ 2, 3, 1 }, x[{ all, all, new }]:shape())
    assert.same({ 1, 3 }, x[{ new, 1 }]:shape())
    assert.same({ 1, 2, 3 }, x[new]:shape())
    x[{ all, new, 0 }] = 9
    is({ { 9, 1, 2 }, { 9, 4, 5 } }, x)
  end)
end)

describe("an item", function()
  it("of a bool is a boolean", function()
    local done = tensor { false, true }
    assert.is_false(done:all():item())
    assert.is_true(done:any():item())
    assert.is_false(done[0]:item())
    assert.equal(1, tensor({ 1 }, "uint8"):item())
  end)
end)

describe("where", function()
  local v, mask = tensor { 3, 1, 2 }, tensor { true, false, true }
  it("keeps the tensor's elements if the condition is true", function()
    is({ 3, 0, 2 }, v:where(mask, 0))
    is({ 3, 7, 2 }, v:where(mask, ps.full({ 1 }, 7)))
    is({ 3, 0, 2 }, ps.where(mask, v, 0))
    is({ 1, 0, 1 }, ps.where(mask, 1, 0))
    is({ 3, -100, 2 }, v:long():where(mask, -100), "int64")
    local p = ps.nn.Parameter(tensor { 3, 1, 2 })
    p:where(mask, 0):sum():backward()
    is({ 1, 0, 1 }, p:grad())
  end)
  it("requires a condition of bool", function()
    fails(function() return mask:where(1, 0) end, "t:where(condition, other)", "ps.where(condition, a, b)")
    fails(function() return mask:where(v, v) end, "condition is a tensor of fp32")
    fails(function() return ps.where(tensor { 1, 0, 2 }, v, 0) end, "condition is a tensor of fp32", "ne(0)")
    fails(function() return ps.where(3, v, 0) end, "ps.where: the condition is a number; it takes a tensor")
    fails(function() return ps.where() end, "ps.where: the condition is missing")
  end)
end)

describe("defaults of PyTorch", function()
  it("cumsum needs a dimension", function()
    fails(function() return tensor({ { 1, 2 } }):cumsum() end, "cumsum needs a dimension")
    is({ { 1, 3 } }, tensor({ { 1, 2 } }):cumsum(-1))
  end)
  it("dropout without p drops half", function()
    ps.manual_seed(3)
    local x = ps.F.dropout(ps.ones { 4096 })
    local zero = x:eq(0):sum():item()
    assert(zero > 1900 and zero < 2200, zero)
    assert.equal(2, x:max():item())
    is({ 1, 1 }, ps.F.dropout(ps.ones { 2 }, nil, false))
  end)
end)
