-- SPDX-License-Identifier: BSD-3-Clause
-- ps.autograd.grad, retain_graph and gradcheck on plain tensors.
local ps = require "ps"
local fails = require("spec.check_lib").fails
local tensor, grad = ps.tensor, ps.autograd.grad

local function leaf(value, dtype) return tensor(value, { dtype = dtype, requires_grad = true }) end

describe("ps.autograd.grad", function()
  it("returns gradients of leaves and of intermediate tensors, and does not change a leaf's own", function()
    local x, w = leaf { 1, 2 }, leaf { 3, 4 }
    local h = x * w
    local y = (h * h + x):sum()
    local gx, gh = grad(y, { x, h })
    assert.same({ { 2 * 3 * 3 + 1, 2 * 8 * 4 + 1 }, { 6, 16 } }, { gx:tolist(), gh:tolist() })
    assert.is_nil(x:grad())
    assert.is_nil(w:grad())
    fails(function() y:backward() end, "a second time")
  end)

  it("does not add to a leaf's existing gradient", function()
    local x = leaf { 1, 2 };
    (x * 3):sum():backward()
    assert.same({ 2, 4 }, grad((x * x):sum(), x):tolist())
    assert.same({ 3, 3 }, x:grad():tolist())
  end)

  it("stops at the inputs, and keeps the rest of the graph", function()
    local calls = 0
    local F = ps.autograd.Function { name = "F", forward = function(_, v) return v * 2 end,
      backward = function(_, dy)
        calls = calls + 1
        return dy * 2
      end }
    local x = leaf { 1, 2 }
    local h = F(x)
    local side = F(x)
    local g = grad((h * h * side):sum(), h)
    assert.same({ 2 * 2 * 2, 2 * 4 * 4 }, g:tolist())
    assert.equal(0, calls)                                   -- no function is between y and h
    h:sum():backward()
    assert.same({ 2, 2 }, x:grad():tolist())
  end)

  it("accepts gradients of its outputs, and several outputs", function()
    local x = leaf { 1, 2 }
    local a, b = x * 2, x * x
    assert.same({ 2 + 3 * 2, 20 + 4 * 4 }, grad({ a, b }, x, { grad_outputs = { tensor { 1, 10 }, tensor { 3, 4 } } })
      :tolist())
    assert.same({ 5 }, grad((x * 5):narrow(0, 0, 1), x, { grad_outputs = tensor { 1 } }):narrow(0, 0, 1):tolist())
    local y = x * 1
    assert.same({ 7, 8 }, grad(y, y, { grad_outputs = tensor { 7, 8 } }):tolist())
  end)

  it("runs hooks, and recomputed functions", function()
    local x, w = leaf { 1, 2 }, leaf { 3, 4 }
    w:register_hook(function(g) return g * 100 end)
    local out = ps.recompute(function(v) return v * w * w end, x)
    local gw, gx = grad(out:sum(), { w, x })
    assert.same({ { 600, 1600 }, { 9, 16 } }, { gw:tolist(), gx:tolist() })
    assert.is_nil(w:grad())
  end)

  it("names inputs that no output depends on, or returns nil", function()
    local x, z = leaf { 1 }, leaf { 2 }
    fails(function() grad(x * 2, { x, z }) end, "no output depends on input 2", "allow_unused")
    local gx, gz, n = grad(x * 2, { x, z }, { allow_unused = true })
    assert.same({ { 2 }, true, true }, { gx:tolist(), gz == nil, n == nil })
  end)

  it("refuses invalid arguments", function()
    local x = leaf { 1, 2 }
    fails(function() grad((x * x):sum(), x, { create_graph = true }) end, "create_graph", "gradients of gradients")
    fails(function() (x * x):sum():backward { create_graph = true } end, "create_graph")
    fails(function() grad(x * x, x) end, "needs a gradient of that shape")
    fails(function() grad((x * x):sum(), tensor { 1 }) end, "input 1 requires no gradient")
    fails(function() grad((x * x):sum(), { x, x }) end, "inputs 1 and 2 are the same tensor")
    fails(function() grad((x * x):sum(), {}) end, "the list of inputs is empty")
    fails(function() grad(3, x) end, "the outputs")
    fails(function() grad((x * x):sum(), { 3 }) end, "inputs 1")
    fails(function() grad((x * x):sum(), x, { retain = true }) end, "retain_graph")
    fails(function() grad(x * x, x, { grad_outputs = tensor { 1 } }) end, "[1]", "[2]")
    fails(function() grad(x * x, x, { grad_outputs = { [3] = tensor { 1 } } }) end, "gradient 3; there are 1 outputs")
    x:sum():backward()
    assert.same({ 1, 1 }, x:grad():tolist())
  end)
end)

describe("retain_graph", function()
  it("keeps the graph for another backward, through functions, hooks and recomputation", function()
    local calls = 0
    local F = ps.autograd.Function { name = "F", forward = function(ctx, v)
      ctx:save_for_backward(v)
      return v * v
    end, backward = function(ctx, dy)
      calls = calls + 1
      return dy * ctx:saved_tensors() * 2
    end }
    local x = leaf { 1, 2 }
    local h = F(x)
    h:register_hook(function(g) return g * 10 end)
    local y = ps.recompute(function(v) return F(v) end, h):sum()
    y:backward { retain_graph = true }
    local first = x:grad():tolist()
    assert.same({ 10 * 2 * 2, 10 * 2 * 4 * 2 * 2 }, first)
    y:backward(nil, { retain_graph = true })
    y:backward()
    assert.same({ 3 * first[1], 3 * first[2] }, x:grad():tolist())
    assert.equal(6, calls)
    fails(function() y:backward() end, "a second time", "retain_graph = true")
    ps.collect_all()
    assert.is_nil(next(require("ps.core.scope").waiting))
  end)

  it("computes several gradients of one graph", function()
    local x = leaf { 1, 2 }
    local h = x * x
    local y = h:exp():sum()
    local first = grad(y, x, { retain_graph = true })
    assert.same(first:tolist(), grad(y, x, { retain_graph = true }):tolist())
    y:backward()
    assert.same(first:tolist(), x:grad():tolist())
  end)

  it("is true or false", function()
    fails(function() leaf({ 1 }):backward { retain_graph = 1 } end, "retain_graph")
    fails(function() leaf({ 1 }):backward { keep = true } end, "keep")
  end)
end)

describe("ps.autograd.gradcheck", function()
  it("detects a wrong backward", function()
    local Wrong = ps.autograd.Function { name = "Wrong", forward = function(_, x) return x * x end,
      backward = function(_, dy) return dy * 2 end }
    local x = ps.randn({ 3 }, { dtype = "fp64", requires_grad = true })
    fails(function() ps.autograd.gradcheck(Wrong, x) end, "of the gradient of input 1 is", "finite differences give")
    assert.is_false(ps.autograd.gradcheck(Wrong, x, { raise_exception = false }))
    assert.is_true(ps.autograd.gradcheck(function(v) return v * v, v:exp() end, x))
    assert.is_nil(x:grad())
  end)

  it("uses no random numbers of the script, and requires fp64", function()
    ps.manual_seed(3)
    local want = ps.rand({ 2 }):tolist()
    ps.manual_seed(3)
    ps.autograd.gradcheck(function(v) return v * 2 end, tensor({ 1 }, { dtype = "fp64", requires_grad = true }))
    assert.same(want, ps.rand({ 2 }):tolist())
    fails(function() ps.autograd.gradcheck(function(v) return v end, leaf { 1 }) end, "fp32", "use fp64")
    fails(function() ps.autograd.gradcheck(function(v) return v end, tensor({ 1 }, { dtype = "fp64" })) end,
      "no input requires a gradient")
  end)
end)
