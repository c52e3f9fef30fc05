-- SPDX-License-Identifier: BSD-3-Clause
-- Hooks of modules: their arguments, the values that they replace, the time when they run, their removal, and the
-- errors of wrong hooks.
local ps = require "ps"
local fails = require("spec.check_lib").fails
local nn = ps.nn

local function double() -- Returns a module that computes y = 2 x, and also returns a table.
  local Double = nn.class "Double"
  function Double:forward(x, more) return x * 2, more end
  return Double()
end

describe("forward hooks of a module", function()
  it("run in the order of registration, and get and replace arguments and outputs", function()
    local m, seen = double(), {}
    m:register_forward_pre_hook(function(module, args)
      assert(rawequal(module, m))
      seen[#seen + 1] = args.n
      return { args[1] + 1, "b" }
    end)
    m:register_forward_pre_hook(function(_, args)
      seen[#seen + 1] = args[2]
      return args[1] * 10                                    -- a single tensor
    end)
    m:register_forward_hook(function(_, args, out)
      seen[#seen + 1] = args.n
      return { out[1] + 0.5, "more" }
    end)
    m:register_forward_hook(function(_, _, out) seen[#seen + 1] = out[2] end)
    local y, more = m(ps.tensor { 1 }, "a")
    assert.same({ 40.5, "more", { 2, "b", 1, "more" } }, { y:item(), more, seen })
  end)

  it("get the value itself if a module returns one value", function()
    local layer = nn.Linear(2, 3)
    layer:register_forward_hook(function(_, args, out)
      assert(args.n == 1 and ps.is_tensor(out))
      return out * 0
    end)
    assert.same({ 0, 0, 0 }, layer(ps.ones { 2 }):tolist())
  end)

  it("run only for calls, with and without gradients, until they are removed", function()
    local layer, n = nn.Linear(2, 2), 0
    local function count() n = n + 1 end
    local first, second = layer:register_forward_hook(count), layer:register_forward_hook(count)
    layer(ps.ones { 2 })
    ps.no_grad(function() layer(ps.ones { 2 }) end)
    layer:forward(ps.ones { 2 })
    assert.equal(4, n)
    first:remove()
    first:remove()
    layer(ps.ones { 2 })
    assert.equal(5, n)
    second:remove()
    layer(ps.ones { 2 })
    assert.equal(5, n)
  end)

  it("may remove themselves", function()
    local layer, n, handle = nn.Linear(2, 2), 0, nil
    handle = layer:register_forward_hook(function()
      n = n + 1
      handle:remove()
    end)
    layer:register_forward_hook(function() n = n + 10 end)
    layer(ps.ones { 2 })
    layer(ps.ones { 2 })
    assert.equal(21, n)
  end)

  it("are not parameters, and change no state", function()
    local layer = nn.Linear(2, 2)
    layer:register_forward_hook(print)
    local names = {}
    for name in layer:named_parameters() do names[#names + 1] = name end
    table.sort(names)
    assert.same({ "bias", "weight" }, names)
    assert.is_nil(layer:state_dict()._hooks)
  end)
end)

describe("backward hooks of a module", function()
  it("get the gradients of inputs and outputs, and replace those of inputs", function()
    local layer = nn.Linear(2, 2, { bias = false })
    ps.no_grad(function() layer.weight:copy_(ps.tensor { { 1, 2 }, { 3, 4 } }) end)
    local seen
    layer:register_full_backward_hook(function(module, into, out)
      assert(rawequal(module, layer))
      seen = { into.n, into[1]:tolist(), out.n, out[1]:tolist() }
      return { into[1] * 10 }
    end)
    layer:register_full_backward_hook(function(_, into) return into[1] + 1 end)
    local x = ps.tensor({ { 1, 1 } }, { requires_grad = true });
    (layer(x) * ps.tensor { { 1, 2 } }):sum():backward()
    assert.same({ 1, { { 7, 10 } }, 1, { { 1, 2 } } }, seen)
    assert.same({ { 71, 101 } }, x:grad():tolist())
    assert.same({ { 1, 1 }, { 2, 2 } }, layer.weight:grad():tolist())
  end)

  it("run if no input needs a gradient, and if inputs are not tensors", function()
    local embedding, seen = nn.Embedding(4, 2), nil
    embedding:register_full_backward_hook(function(_, into, out) seen = { into.n, into[1] == nil, out[1]:shape() } end)
    embedding(ps.tensor({ 1, 2 }, { dtype = "int64" })):sum():backward()
    assert.same({ 1, true, { 2, 2 } }, seen)
    local m = double()
    m:register_full_backward_hook(function(_, into, out) seen = { into.n, out.n } end)
    m(ps.tensor({ 1 }, { requires_grad = true }), "text"):sum():backward()
    assert.same({ 1, 1 }, seen)
  end)

  it("get outputs in a table, in alphabetical order, and nil for missing gradients", function()
    local Two = nn.class "Two"
    function Two:forward(x) return { loss = x:sum(), logits = x * 2, name = "two" } end
    local m, seen = Two(), nil
    m:register_full_backward_hook(function(_, _, out) seen = { out.n, out[1] == nil, out[2] and out[2]:item() } end)
    local x = ps.tensor({ 1, 2 }, { requires_grad = true })
    local out = m(x)
    assert.equal("two", out.name)
    out.loss:backward()
    assert.same({ 2, true, 1 }, seen)                        -- logits, loss
  end)

  it("run once in a recomputed model, with the bits of the plain one", function()
    local Net = nn.class "Net"
    function Net:init() self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4) end
    function Net:forward(x) return self.b(self.a(x):tanh()) end
    local grads, counts = {}, {}
    for i = 1, 2 do
      ps.manual_seed(3)
      local net, n = Net(), 0
      net.a:register_full_backward_hook(function(_, into) n = n + 1 return { into[1] and into[1] * 2 } end)
      net.b:register_full_backward_hook(function(_, into) n = n + 1 return { into[1] * 2 } end)
      local x = ps.ones({ 2, 4 }, { requires_grad = true })
      local y = i == 1 and net(x) or ps.recompute(function(v) return net(v) end, x)
      y:sum():backward()
      grads[i], counts[i] = { x:grad():tolist(), net.a.weight:grad():tolist() }, n
    end
    assert.same(grads[1], grads[2])
    assert.same({ 2, 2 }, counts)
  end)

  it("do not run without gradients", function()
    local layer = nn.Linear(2, 2)
    layer:register_full_backward_hook(function() error "no" end)
    assert.is_false(ps.no_grad(function() return layer(ps.ones { 2 }) end):needs_grad())
  end)
end)

describe("a wrong hook of a module", function()
  local x = ps.ones({ 1, 2 }, { requires_grad = true })
  local function back(fn)
    return function()
      local layer = nn.Linear(2, 2)
      layer:register_full_backward_hook(fn)
      layer(x):sum():backward()
    end
  end

  -- Calls a Linear layer, or a module that returns its arguments, with a hook that returns `result`.
  local function forward(kind, result, ...)
    local Same = nn.class "Same"
    function Same:forward(...) return ... end
    local layer = Same()
    layer[kind](layer, function() return result end)
    return layer(...)
  end

  it("that returns a value of another kind is reported", function()
    local pre, after = "register_forward_pre_hook", "register_forward_hook"
    for _, wrong in ipairs { "text", 3, true, print } do
      local type_ = type(wrong)
      local function refused(text, ...)
        local args = { ... }
        fails(function() forward(unpack(args)) end, text:format(type_))
      end
      refused("a forward hook of Same returned a %s for the output, which was a tensor", after, wrong, x)
      refused("a forward pre-hook of Same returned a %s; it must return nil, a tensor, or a list", pre, wrong, x)
      refused("returned a %s for argument 2, which was a tensor", pre, { x, wrong }, x, x)
      refused("returned a %s for output 2, which was a tensor", after, { x, wrong }, x, x)
      refused("returned a %s for field loss, which was a tensor", after, { loss = wrong }, { loss = x })
    end
    fails(function() forward(after, { x }, x) end, "returned a table for the output, which was a tensor")
    fails(function() forward(after, x, { loss = x }) end, "returned a tensor for the output, which was a table")
    fails(function() forward(after, { x, x, x }, x, x) end, "a list of 3 values; the module returned 2")
    fails(function() forward(after, { x }, x, x) end, "returned a nil for output 2, which was a tensor")
    fails(function() forward(pre, { ids = x }, { ids = x }) end, "a table with the field ids", "return { that_table }")
    fails(function() forward(pre, nn.Linear(2, 2), x) end, "a forward pre-hook of Same returned a table")
  end)

  it("is right if it changes shapes, types, and the number of arguments", function()
    assert.same({ 1 }, forward("register_forward_hook", ps.ones({ 1 }, { dtype = "int64" }), x):tolist())
    assert.same({ 1 }, forward("register_forward_pre_hook", { ps.ones { 1 } }, x, x):tolist())
    assert.same({ 1 }, forward("register_forward_pre_hook", { { ids = ps.ones { 1 } } }, { ids = x }).ids:tolist())
    assert.equal("b", select(2, forward("register_forward_hook", { x, "b" }, x, nil)))
    assert.equal(x, forward("register_forward_hook", { loss = x }, { loss = x, name = "two" }).loss)
  end)

  it("is reported", function()
    fails(back(function() return 3 end), "a backward hook of Linear returned a number", "a list of gradients")
    fails(back(function() return { ps.ones { 2 } } end), "a backward hook of Linear returned a tensor of fp32",
      "shape [2]", "shape [1, 2]")
    fails(back(function() return "text" end), "a backward hook of Linear returned a string")
    fails(back(function() return { "text" } end), "a backward hook of Linear returned a string", "shape [1, 2]")
    fails(back(function(_, into) return { into[1]:to "fp64" } end), "returned a tensor of fp64")
    fails(back(function() return {} end), "returned no gradient 1, and grad_input has one")
    fails(back(function(_, into) return { n = 2, into[1] } end), "a list of 2 gradients, and grad_input has 1")
    fails(back(function(_, into) return { grad = into[1] } end), "a backward hook of Linear returned")
    assert(pcall(back(function() return { n = 1 } end)))
    fails(back(function(_, into) return { into[1], into[1] } end), "returned gradient 2, but grad_input has none there")
    fails(back(function(_, into) into[1]:fill_(0) end), "changed its gradient in place")
    fails(back(function() error "mine" end), "mine")
    local layer = nn.Linear(2, 2)
    fails(function() layer:register_forward_hook(3) end, "register_forward_hook")
    fails(function() layer:register_forward_pre_hook() end, "register_forward_pre_hook")
    local m = double()
    m:register_forward_hook(function() return 3 end)
    fails(function() m(x, 1) end, "a forward hook of Double, which returns 2 values")
    fails(function() layer.register_backward_hook(layer, print) end, "register_full_backward_hook")
  end)
end)
