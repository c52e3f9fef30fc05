-- SPDX-License-Identifier: BSD-3-Clause
-- t:register_hook on plain tensors: when hooks run, what they replace, how they are removed, and the errors of wrong
-- hooks.
local ps = require "ps"
local fails = require("spec.check_lib").fails
local tensor = ps.tensor

local function leaf(value, dtype) return tensor(value, { dtype = dtype, requires_grad = true }) end

describe("a hook of a tensor", function()
  it("gets the whole gradient once, whatever was computed before its registration", function()
    local x = leaf { 1, 2 }
    local y = x * 2
    local early = y * 3
    local seen = {}
    y:register_hook(function(g) seen[#seen + 1] = g:tolist() end)
    local late = y * 4;
    (early + late + y):sum():backward()
    assert.same({ { 8, 8 } }, seen)
    assert.same({ 16, 16 }, x:grad():tolist())
  end)

  it("runs during the backward if an op computed its tensor, and after the backward if the tensor is a leaf", function()
    local a, b, order = leaf { 1 }, leaf { 1 }, {}
    local h = a * 2
    for name, t in pairs { leaf = b, computed = h } do t:register_hook(function() order[#order + 1] = name end) end
    (h * b):sum():backward()                                 -- b's gradient is complete before h's
    assert.same({ "computed", "leaf" }, order)
  end)

  it("replaces the gradient, one hook after another", function()
    local x = leaf { 1, 2 }
    local y = x * 2
    y:register_hook(function(g) return g * 10 end)
    y:register_hook(function(g) return g + 1 end)
    y:sum():backward()
    assert.same({ 22, 22 }, x:grad():tolist())
  end)

  it("of a leaf runs once per backward, with the sum of only that backward", function()
    local x, seen = leaf { 1, 2 }, {}
    local before = (x * 5):sum()                             -- created before the hook
    local handle = x:register_hook(function(g)
      seen[#seen + 1] = g:tolist()
      return g * 2
    end)
    before:backward();
    (x * x + x + ps.cat { x, x }:narrow(0, 0, 2)):sum():backward()
    assert.same({ { 5, 5 }, { 4, 6 } }, seen)
    assert.same({ 18, 22 }, x:grad():tolist())
    handle:remove()
    handle:remove()
    x:sum():backward()
    assert.same({ 19, 23 }, x:grad():tolist())
    assert.equal(2, #seen)
  end)

  it("of outputs of one op get their own gradients", function()
    local x = leaf { { 3, 1 }, { 2, 4 } }
    local values = x:topk(1, 1)
    local seen
    values:register_hook(function(g) seen = g:tolist() end)
    values:sum():backward()
    assert.same({ { 1 }, { 1 } }, seen)
  end)

  it("of a loss gets 1; hooks of the root and of a leaf both run", function()
    local x = leaf { 4 }
    local order = {}
    x:register_hook(function() order[#order + 1] = "x" end)
    local y = x * 3
    y:register_hook(function(g) order[#order + 1] = "y" .. g:item() end)
    y:backward()
    assert.same({ "y1", "x" }, order)
    x:backward()                                             -- a root that is a leaf
    assert.same({ "y1", "x", "x" }, order)
    assert.same({ 4 }, x:grad():tolist())
  end)

  it("of a recomputed function's tensor runs once, in the second run", function()
    local x, n = leaf { 1, 2 }, 0
    local out = ps.recompute(function(v)
      local h = v * 2
      h:register_hook(function(g)
        n = n + 1
        return g * 10
      end)
      return h * h
    end, x)
    out:register_hook(function(g) return g * 2 end)
    out:sum():backward()
    assert.equal(1, n)
    assert.same({ 160, 320 }, x:grad():tolist())
  end)

  it("stays with a leaf of fp16 and bf16, in the type of its sum", function()
    local x = leaf({ 1, 2 }, "bf16"):grad_in_fp32(true)
    local dtype
    x:register_hook(function(g)
      dtype = g:dtype()
      return g * 2
    end);
    (x * 3):sum():backward()
    assert.equal("fp32", dtype)
    assert.same({ 6, 6 }, x:grad():tolist())
  end)

  it("stays with a parameter that model:to replaces", function()
    local layer, n = ps.nn.Linear(2, 2), 0
    local handle = layer.weight:register_hook(function() n = n + 1 end)
    layer:to "bf16"
    layer(ps.ones({ 1, 2 }, { dtype = "bf16" })):sum():backward()
    assert.equal(1, n)
    handle:remove()
    layer(ps.ones({ 1, 2 }, { dtype = "bf16" })):sum():backward()
    assert.equal(1, n)
  end)

  it("is freed with its tensor", function()
    local waiting = require("ps.core.scope").waiting
    local function count()
      local n = 0
      for _ in pairs(waiting) do n = n + 1 end
      return n
    end
    ps.collect_all()
    local n = count()
    for _ = 1, 10 do leaf({ 1 }):register_hook(print) end
    ps.collect_all()
    assert.equal(n, count())
  end)
end)

describe("a wrong hook", function()
  local x = leaf { { 1, 2 } }
  local function with(fn)
    return function()
      local y = x * 2
      y:register_hook(fn);
      (y * y):sum():backward()
    end
  end
  after_each(function()
    x:set_grad(nil)
    x:sum():backward()
    assert.same({ { 1, 1 } }, x:grad():tolist())
    x:set_grad(nil)
  end)

  it("gets an error that names its wrong result", function()
    fails(with(function() return 3 end), "a hook of a tensor of shape [1, 2] returned a number", "a tensor like")
    fails(with(function() return true end), "returned a boolean")
    fails(with(function(g) return g:sum() end), "returned a tensor of fp32, shape []",
      "the gradient is of fp32, shape [1, 2]")
    fails(with(function(g) return g:to "fp64" end), "fp64")
    fails(with(function(g) return g:to "ref" end), "on ref", "on cpu")
    fails(with(function(g) g:mul_(2) end), "changed its gradient in place")
    fails(with(function() error "mine" end), "mine")
  end)

  it("is refused at once if it would never run", function()
    fails(function() tensor({ 1 }):register_hook(print) end, "requires no gradient")
    fails(function() x:register_hook(3) end, "register_hook")
    local y = x * 1
    y:sum():backward()
    fails(function() y:register_hook(print) end, "would never run")
  end)

  it("of a leaf leaves no gradient when it fails", function()
    local w = leaf { 1, 2 }
    local handle = w:register_hook(function() error "no" end)
    fails(function() (w * w):sum():backward() end, "no")
    assert.is_nil(w:grad())
    handle:remove();
    (w * w):sum():backward()
    assert.same({ 2, 4 }, w:grad():tolist())
  end)
end)
