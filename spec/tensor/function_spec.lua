-- SPDX-License-Identifier: BSD-3-Clause
-- ps.autograd.Function on plain tensors: the arguments of forward and backward, the state that C keeps of a call, and
-- the errors of wrong functions.
local ps = require "ps"
local fails = require("spec.check_lib").fails
local tensor, Function = ps.tensor, ps.autograd.Function

local function leaf(value, dtype) return tensor(value, { dtype = dtype, requires_grad = true }) end
local function random(shape, dtype) return ps.randn(shape, { dtype = dtype, requires_grad = true }) end

before_each(function() ps.manual_seed(1) end)

local Exp = Function "Exp"
function Exp.forward(ctx, x)
  local y = x:exp()
  ctx:save_for_backward(y)
  return y
end
function Exp.backward(ctx, dy)
  local y = ctx:saved_tensors()
  return dy * y
end

-- a * x + y * scale, with two outputs: the sum, and a constant with its shape
local Mix = Function "Mix"
function Mix.forward(ctx, x, scale, y)
  ctx:save_for_backward(x, nil, y)
  ctx.scale = scale
  return x * y * scale, x + y
end
function Mix.backward(ctx, da, db)
  local x, none, y = ctx:saved_tensors()
  assert(none == nil)
  return da * y * ctx.scale + db, nil, da * x * ctx.scale + db
end

describe("a function of a script", function()
  it("has its own backward, between ops", function()
    local x, same = leaf { 0.5, -1, 2 }, leaf { 0.5, -1, 2 };
    (Exp(x * 2) * 3):sum():backward();
    ((same * 2):exp() * 3):sum():backward()
    assert.same(same:grad():tolist(), x:grad():tolist())
    assert.same(Exp.apply(x):tolist(), x:exp():tolist())
  end)

  it("has several inputs and outputs, and values that are not tensors", function()
    assert.truthy(ps.autograd.gradcheck(function(x, y)
      local a, b = Mix(x, 1.5, y)
      return a, b * b
    end, { random({ 2, 3 }, "fp64"), random({ 2, 3 }, "fp64") }))
    local x, y = leaf { 1, 2 }, leaf { 3, 4 }
    local _, b = Mix(x, 2, y)                                -- the first output gets no gradient
    b:sum():backward()
    assert.same({ 1, 1 }, x:grad():tolist())
  end)

  it("knows which inputs need a gradient, and may return none for the others", function()
    local needs
    local F = Function { name = "F", forward = function(ctx, a, b, n)
      needs = ctx.needs_input_grad
      return a * b * n
    end, backward = function(_, dy) return nil, dy * 7, nil end }
    local a, b = tensor { 1, 2 }, leaf { 3, 4 }
    F(a, b, 2):sum():backward()
    assert.same({ false, true, false }, needs)
    assert.same({ 7, 7 }, b:grad():tolist())
    assert.is_nil(a:grad())
    local c = leaf { 1, 1 }
    F(c, b, 1):sum():backward()  -- backward returns nil for an input that needs a gradient, which then gets none
    assert.is_nil(c:grad())
  end)

  it("gets zeros for outputs without a gradient, or nil if requested", function()
    local got
    local function make(materialize)
      local F = Function "F"
      function F.forward(ctx, x)
        ctx:set_materialize_grads(materialize)
        local i = x:argmax()
        local plain = x * 2
        ctx:mark_non_differentiable(plain)
        return x * 1, x * 2, i, plain
      end
      function F.backward(_, ...)
        got = { n = select("#", ...), ... }
        return (...)
      end
      return F
    end
    local x = leaf { 1, 2 }
    local a, b, i, plain = make(true)(x)
    assert.same({ true, true, false, false }, { a:needs_grad(), b:needs_grad(), i:needs_grad(), plain:needs_grad() })
    a:sum():backward()
    assert.equal(4, got.n)
    assert.same({ { 1, 1 }, { 0, 0 } }, { got[1]:tolist(), got[2]:tolist() })
    assert.same({ 0, { 0, 0 } }, { got[3]:item(), got[4]:tolist() })
    a = make(false)(x)
    a:sum():backward()
    assert.same({ 4, true, true, true }, { got.n, got[2] == nil, got[3] == nil, got[4] == nil })
  end)

  it("records nothing inside, and needs no node if nothing requires a gradient", function()
    local inside
    local F = Function { name = "F", forward = function(_, x)
      inside = x * x
      return inside
    end, backward = function(_, dy) return dy end }
    local x = leaf { 2 }
    local y = F(x)
    assert.is_false(ps.no_grad(function() return F(x) end):needs_grad())
    assert.is_false(F(tensor { 1 }):needs_grad())
    y:backward()
    assert.same({ 1 }, x:grad():tolist())
    assert.is_false((inside * 1):needs_grad() and inside.node == nil)
  end)

  it("may return an input, the same tensor twice, or one that it closes over", function()
    local kept = leaf { 5 }
    local F = Function { name = "F", forward = function(_, x)
      local y = x * 2
      return x, y, y, kept
    end, backward = function(_, a, b, c, d) return a * 1 + b * 10 + c * 100 + d * 1000 end }
    local x = leaf { 1 }
    local a, b, c, d = F(x);
    (a + b + c + d):backward()
    assert.same({ 1111 }, x:grad():tolist())
    assert.is_nil(kept:grad())
    assert.same({ 1 }, a:tolist())
  end)

  it("draws the random numbers of forward again in backward", function()
    local F = Function { name = "F", forward = function(_, x)
      return x * ps.rand(x:shape())
    end, backward = function(_, dy) return dy * ps.rand(dy:shape()) end }
    local x = random { 64 }
    local y = F(x)
    local before = ps.rand { 3 }
    y:sum():backward()
    local after = ps.rand { 3 }
    ps.manual_seed(1)
    assert.same((y / x):tolist()[1] > 0, true)
    local masks = (x:grad() * x:detach() - y:detach()):abs():amax():item()
    assert.truthy(masks < 1e-6, masks)
    assert.is_false(before:tolist()[1] == after:tolist()[1])         -- backward used no numbers of later draws
  end)

  it("runs again in each recomputation, and its backward once", function()
    local forwards, backwards = 0, 0
    local F = Function { name = "F", forward = function(ctx, x)
      forwards = forwards + 1
      ctx:save_for_backward(x)
      return x * x
    end, backward = function(ctx, dy)
      backwards = backwards + 1
      return dy * ctx:saved_tensors() * 2
    end }
    local x = leaf { 3, 4 }
    ps.recompute(function(v) return F(v * 2) end, x):sum():backward()
    assert.same({ 2, 1 }, { forwards, backwards })
    assert.same({ 24, 32 }, x:grad():tolist())
  end)

  it("gets saved tensors unchanged, or raises an error if they were changed in place", function()
    local x = random { 300, 300 }                            -- large enough for scopes
    local y = ps.scope(function() return Exp(x * 1) end)
    collectgarbage()
    y:sum():backward()
    assert.truthy((x:grad() - x:exp()):abs():amax():item() < 1e-4)
    local z = Exp(x * 1)
    ps.no_grad(function() z:fill_(0) end)
    fails(function() z:sum():backward() end, "Exp", "changed in place")
  end)

  it("keeps tensors in fields of ctx past scopes", function()
    local F = Function { name = "F", forward = function(ctx, x)
      ctx.mask = x:gt(0):to "fp32"
      return x * ctx.mask
    end, backward = function(ctx, dy) return dy * ctx.mask end }
    local x = random { 300, 300 }
    local y = ps.scope(function() return F(x) end)
    y:sum():backward()
    assert.same(x:gt(0):to("fp32"):sum():item(), x:grad():sum():item())
  end)

  it("may read values in both directions", function()
    local F = Function { name = "F", forward = function(ctx, x)
      ctx.factor = x:amax():item()
      return x * ctx.factor
    end, backward = function(ctx, dy) return dy * ctx.factor * dy:sum():item() end }
    local x = leaf { 1, 4 }
    F(x):sum():backward()
    assert.same({ 8, 8 }, x:grad():tolist())
  end)

  it("sums gradients of half types that arrive in fp32", function()
    local F = Function { name = "F", forward = function(_, x) return x * 2 end,
      backward = function(_, dy) return dy:to "fp32" * 2 end }
    local x = leaf({ 1, 2 }, "bf16")
    F(x):sum():backward()
    assert.equal("bf16", x:grad():dtype())
    assert.same({ 2, 2 }, x:grad():tolist())
  end)
end)

describe("the C functions of functions and hooks", function()
  local C, ctx = ps.C, ps.ctx
  local none = ps.ffi.new("ps_tensor *[1]")

  it("refuses calls at the wrong time", function()
    local function refused(rc) assert.equal(C.PS_ESTATE, rc) end
    refused(C.ps_call_done(ctx, 0, nil, nil))
    refused(C.ps_call_saved(ctx, 0, none))
    refused(C.ps_stop_gradient(ctx, 0, none))
    refused(C.ps_hook_replace(ctx, 0, ps.ones { 1 }))
    refused(C.ps_hooks_done(ctx))
    refused(C.ps_backward_weights(ctx, nil))
    local x = leaf { 1, 2 }
    local id, n = ps.ffi.new "int64_t[1]", 0
    local F = Function { name = "F", forward = function(context, v)
      context:save_for_backward(v)
      return v * 1
    end, backward = function(_, dy)
      n = n + 1
      refused(C.ps_hooks_done(ctx))
      refused(C.ps_hook_replace(ctx, 0, dy))
      refused(C.ps_backward_next(ctx, id))
      refused(C.ps_backward_splice(ctx, 0, nil))
      refused(C.ps_backward_taken(ctx, 0, nil))
      assert.equal(C.PS_ERANGE, C.ps_call_saved(ctx, 1, none))
      assert.equal(C.PS_ERANGE, C.ps_stop_gradient(ctx, 1, none))
      assert.equal(C.PS_EINVAL, C.ps_call_done(ctx, 2, none, nil))
      return dy
    end }
    local y = F(x)
    y:register_hook(function()
      n = n + 1
      refused(C.ps_call_done(ctx, 1, none, nil))
      refused(C.ps_backward_next(ctx, id))
      assert.equal(C.PS_EINVAL, C.ps_hook_replace(ctx, 0, ps.ones { 3 }))
    end)
    y:sum():backward()
    assert.equal(2, n)
    assert.same({ 1, 1 }, x:grad():tolist())
  end)

  it("refuses functions without what a node needs", function()
    local one, out, id = ps.ffi.new("ps_tensor *[1]", { leaf { 1 } }), ps.ones { 1 }, ps.ffi.new "int64_t[1]"
    local function new(n_in, n_out, t) return C.ps_call_new(ctx, "F", n_in, one, n_out, t, 0, nil, id) end
    assert.equal(C.PS_EINVAL, new(0, 1, one))
    assert.equal(C.PS_EINVAL, new(1, 0, one))
    assert.equal(C.PS_EINVAL, new(1, 1, one))                -- a leaf as an output
    assert.equal(C.PS_EINVAL, new(1, 1, none))
    assert.equal(C.PS_EINVAL, new(1, 1, ps.ffi.new("ps_tensor *[1]", { out:long() })))
    assert.is_nil(out.node ~= nil or nil)
  end)

  it("gives a recorded tensor its gradient", function()
    local x = leaf { 1, 2 }
    local inspector = ps.inspect.inspect_tensor(function()
      ps.inspect.record_tensor(Exp(x * 0), "y"):sum():backward()
    end)
    assert.same({ 1, 1 }, select(2, inspector:get_tensor "y"):tolist())
  end)
end)

describe("a wrong function", function()
  local x = leaf { { 1, 2, 3 }, { 4, 5, 6 } }
  local function with(backward, forward)
    local F = Function { name = "F", backward = backward, forward = forward or function(_, a) return a * 2 end }
    return function() F(x):sum():backward() end
  end
  local function works()
    x:set_grad(nil)
    Exp(x):sum():backward()
    assert.truthy(x:grad())
    x:set_grad(nil)
  end
  after_each(works)                                          -- the tape is unchanged

  it("is an error with another number of gradients", function()
    fails(with(function(_, dy) return dy, dy end), "backward of F returned 2 gradients", "has 1 inputs")
    fails(with(function() end), "backward of F returned 0 gradients", "has 1 inputs")
    local F = Function { name = "F", forward = function(_, a, b) return a * b end,
      backward = function(_, dy) return dy end }
    fails(function() F(x, x):sum():backward() end, "returned 1 gradients", "has 2 inputs")
  end)

  it("is an error with another shape, type or device", function()
    fails(with(function(_, dy) return dy:sum() end), "backward of F returned gradient 1 of shape []", "of shape [2, 3]")
    fails(with(function(_, dy) return dy:to "fp64" end), "gradient 1 of type fp64", "type fp32")
    fails(with(function(_, dy) return dy:to "int32" end), "gradient 1 of type int32", "type fp32")
    fails(with(function(_, dy) return dy:to "ref" end), "gradient 1", "on device ref", "on cpu")
  end)

  it("is an error with values that are not gradients", function()
    fails(with(function() return 1 end), "backward of F returned a number as gradient 1")
    local F = Function { name = "F", forward = function(_, a, n) return a * n end,
      backward = function(_, dy) return dy, dy end }
    fails(function() F(x, 2):sum():backward() end, "returned gradient 2, but input 2 is not a tensor")
    fails(with(function(_, dy)
      dy:fill_(0)
      return dy
    end), "backward of F changed its gradient in place")
  end)

  it("has the script's line in errors inside it", function()
    fails(with(function() error "own problem" end), "function_spec.lua", "own problem")
    fails(with(function() return ps.ones { 2 } + ps.ones { 3 } end), "[2]", "[3]")
    fails(with(nil), "F has no backward")
    fails(function() Function "G" (x) end, "G has no forward")
    fails(function() Exp:apply(x) end, "called with a dot", "Exp.apply(x)")
    fails(with(print, function() error "in forward" end), "in forward")
    fails(with(print, function() return 1 end), "forward of F returned a number as result 1")
    fails(with(print, function() end), "forward of F returned nothing")
  end)

  it("gets an error for ctx's methods in the wrong place", function()
    local held
    with(function(ctx, dy)
      held = ctx
      fails(function() ctx:save_for_backward(dy) end, "call it in forward")
      fails(function() ctx:mark_non_differentiable(dy) end, "call it in forward")
      return dy
    end)()
    fails(function() held:saved_tensors() end, "call it in backward")
    fails(with(print, function(ctx, a) ctx:save_for_backward(3) return a end),
      "takes tensors, but argument 1 is a number")
    fails(with(print, function(ctx, a) ctx:mark_dirty(a) return a end), "cannot change an input in place")
    fails(with(print, function(ctx, a) ctx.saved_tensors = 1 return a end), "ctx.saved_tensors is a method")
    fails(with(print, function(ctx, a) ctx:mark_non_differentiable(2) return a end), "takes outputs")
    fails(function() Function(3) end, "ps.autograd.Function: the name")
    fails(function() Function { fwd = print } end, "fwd")
  end)

  it("gets an error for a second backward, and for one inside a backward", function()
    local y = Exp(x):sum()
    y:backward()
    fails(function() y:backward() end, "a second time")
    fails(with(function(_, dy)
      ps.enable_grad(function() ps.autograd.grad((x * x):sum(), x) end)
      return dy
    end), "a backward is in progress")
    fails(with(function(_, dy)
      ps.enable_grad(function() x:sum():backward() end)
      return dy
    end), "a backward is in progress")
  end)
end)

describe("1,000 calls", function()
  local function used() return ps.memory "cpu" end

  -- Runs fn 100 times, then 1,000 times. Returns the additional bytes in use and in Lua at the end.
  local function grown(fn)
    for _ = 1, 100 do fn() end
    ps.collect_all()
    local bytes, lua = used().used, collectgarbage "count"
    for _ = 1, 1000 do fn() end
    ps.collect_all()
    local waiting = 0
    for _ in pairs(require("ps.core.scope").waiting) do waiting = waiting + 1 end
    return used().used - bytes, collectgarbage "count" - lua, waiting
  end

  it("leak no tensor, no entry and no Lua memory", function()
    local x = random { 64, 64 }
    local bytes, lua, waiting = grown(function()
      local y = Exp(x * 0.1)
      local a = Mix(y, 2, y)
      local handle = y:register_hook(function(g) return g * 1 end)
      a:register_hook(function() end)
      a:sum():backward()
      handle:remove()
      x:set_grad(nil)
      Exp(x):register_hook(print)                            -- this one gets no backward
      pcall(function()
        local bad = Function { name = "bad", forward = function(_, v) return v * 1 end, backward = function() end }
        bad(x):sum():backward()
      end)
    end)
    assert.same({ 0, 0 }, { bytes, waiting })
    assert.truthy(lua < 64, lua)                             -- KiB
  end)
end)
