-- SPDX-License-Identifier: BSD-3-Clause
-- Recomputation in backward: recompute segments (ps.recompute) compared with the plain run bit for bit, their errors,
-- and cheap outputs that the tape does not keep.
local ps = require "ps"
local F, ops = ps.F, ps.ops

local function random(shape, dtype) return ps.randn(shape, { dtype = dtype, requires_grad = true }) end

local fails = require("spec.check_lib").fails

--- Returns the gradients of leaves as flat tables, and clears them.
local function take(leaves)
  local list = {}
  for i, t in ipairs(leaves) do
    list[i] = assert(t:grad(), "leaf " .. i .. " has no gradient"):flatten():tolist()
    t:set_grad(nil)
  end
  return list
end

--- Checks that two runs produce bit-identical gradients. Both start with the same random numbers.
local function same_bits(leaves, run_a, run_b)
  ps.manual_seed(3)
  run_a()
  local a, op = take(leaves), ps.rng().op
  ps.manual_seed(3)
  run_b()
  local b = take(leaves)
  assert.equal(op, ps.rng().op)
  for i in ipairs(a) do
    for at, x in ipairs(a[i]) do
      if x ~= b[i][at] then
        error(("leaf %d, element %d: the gradients are %.9g and %.9g"):format(i, at - 1, x, b[i][at]), 2)
      end
    end
  end
end

before_each(function() ps.manual_seed(1) end)

-- -- recompute segments ---------------------------------------------------------------------------------------------
describe("ps.recompute gives the bits of the plain run", function()
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
  --- Returns the loss of run(call), where call is either plain or ps.recompute.
  local function compare(run)
    same_bits(leaves, function() run(plain):backward() end, function() run(ps.recompute):backward() end)
  end

  it("with dropout", function()
    compare(function(call) return call(block, x):square():sum() end)
    compare(function(call) return call(block, call(block, call(block, x))):square():sum() end)
  end)

  it("with dropout, whatever seed is set before backward", function()
    compare(function(call)
      local loss = call(block, x):square():sum()
      ps.manual_seed(99)
      return loss
    end)
  end)

  it("for values too", function()
    ps.manual_seed(3)
    local a = block(x):tolist()
    ps.manual_seed(3)
    assert.same(a, ps.recompute(block, x):tolist())
    ps.manual_seed(3)
    assert.same(a, ps.no_grad(ps.recompute, block, x):tolist())
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
    leaves = { random({ 8, 24 }, "bf16"), random({ 40, 24 }, "bf16"), random({ 40 }, "bf16"),
      random({ 24, 40 }, "bf16"),
               random({ 24 }, "bf16") }
    for _, t in ipairs(leaves) do t:grad_in_fp32(true) end
    x, w1, b1, w2, g = unpack(leaves)
    local function twice(call)
      for _ = 1, 2 do call(block, call(block, x)):float():square():mean():backward() end
    end
    same_bits(leaves, function() twice(plain) end, function() twice(ps.recompute) end)
  end)

  it("for tensors that are large enough to be freed by scopes", function()
    x, w1, w2 = random { 256, 24 }, random { 512, 24 }, random { 24, 512 }
    b1 = random { 512 }
    leaves = { x, w1, b1, w2, g }
    compare(function(call)
      local h = call(block, call(block, x))
      return ps.scope(function() return call(block, h) end):square():sum()
    end)
  end)

  it("with arguments other than tensors", function()
    compare(function(call)
      return call(function(t, n, name, nothing, u)
        assert(n == 2 and name == "gelu" and nothing == nil)
        return F[name](F.linear(t, w1, b1)):sum(1, true) * n + u * g:sum() + w2:sum()
      end, x, 2, "gelu", nil, x):sum()
    end)
  end)
end)

describe("the old name ps.checkpoint", function()
  it("is an error that names both new ones", function()
    local script = "recompute_spec.lua:"
    fails(function() ps.checkpoint(function() end, 1) end, script, "ps.recompute(fn, ...)", "ps.checkpoints")
    fails(function() require "ps.checkpoint" end, script, "ps.recompute(fn, ...)", "ps.checkpoints")
  end)
end)

describe("a recompute segment", function()
  local x, w
  before_each(function() x, w = random { 4, 6 }, random { 6, 6 } end)

  it("must return tensors that it computed", function()
    fails(function() ps.recompute(function() return 1 end, x) end, "tensors only")
    fails(function() ps.recompute(function(t) return t end, x) end, "output 0 of a recompute segment")
    fails(function() ps.recompute(function() return w end, x) end, "output 0")
    fails(function() ps.recompute(function(t) local y = t * 1; return y, y end, x) end, "output 1")
    fails(function() ps.recompute(function(t) return t:argmax() end, x) end, "output 0")
    fails(function() ps.recompute(function() error("thrown in the forward") end, x) end, "thrown in the forward")
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
    local y = ps.recompute(moody, F.dropout(x, 0.5)):sum()
    local rng = ps.rng()
    local op = rng.op
    fails(function() y:backward() end, "thrown when run again")
    assert.same({ true, depth, op }, { ps.grad_enabled(), tonumber(ps.C.ps_scope_depth(ps.ctx)), rng.op })
    fails(function() y:backward() end, "second time")
    x:set_grad(nil)
    w:set_grad(nil)
    ps.recompute(function(t) return t:matmul(w) end, x):sum():backward()
    assert.same({ 4, 6 }, x:grad():shape())
    local function throws_table() if runs > 2 then error({ code = 5 }) end runs = 3 return x * 2 end
    runs = 2
    local err = fails(function() ps.recompute(throws_table, x):sum():backward() end)
    assert.same({ code = 5 }, err)
  end)

  it("that fails inside another leaves both", function()
    local fail = false
    local y = ps.recompute(function(t)
      return ps.recompute(function(u)
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
      ps.recompute(function(t) if again() then return t * 1, t * 2 end return t * 1 end, x):sum():backward()
    end, "1 tensors first, but 2 when it was run again")
    fails(function()
      ps.recompute(function(t) if again() then return t[0] * 1 end return t * 1 end, x):sum():backward()
    end, "changed its shape")
    fails(function()
      ps.recompute(function(t) if again() then return 5 end return t * 1 end, x):sum():backward()
    end, "must return tensors")
    local data = ps.randn { 4, 6 }
    local y = ps.recompute(function(t, d) return t * d end, x, data):sum()
    data:fill_(1)
    fails(function() y:backward() end, "a recompute segment", "changed in place")
  end)

  it("whose outputs are not used is released", function()
    local function grow()
      for _ = 1, 50 do ps.recompute(function(t) return t * 2 end, x) end
      collectgarbage()
      collectgarbage()
    end
    grow()
    local kept = setmetatable({}, { __mode = "v" })
    do
      local fn = function(t) return t * kept.n end
      kept.n, kept.fn = 3, fn
      ps.recompute(fn, x)
    end
    grow()
    grow()
    assert.is_nil(kept.fn)
  end)

  -- Returns whether a model is freed that holds an output of its last forward, after a backward of that output has
  -- failed and nothing else references the model. `last(h)` creates the output from that of two segments, and
  -- fails(model) makes the backward fail.
  local function goes(last, fail)
    ps.collect_all()
    local before, seen = ps.memory("cpu").used, setmetatable({}, { __mode = "v" })
    do
      local model = { weight = random { 64, 64 }, runs = 0 }
      seen.model = model
      local function part(t)
        model.runs = model.runs + 1
        if model.fails then error "this run was to fail" end
        return t:matmul(model.weight)
      end
      local h = ps.recompute(part, random { 64, 64 })
      model.output = last(ps.recompute(part, h * 2) + h)
      fail(model)
      model.fails = false
      fails(function() model.output:sum():backward() end, "second time")
    end
    ps.collect_all()
    assert.is_nil(seen.model)
    assert.equal(before, ps.memory("cpu").used)
  end

  it("is released when it fails, with those after it, although its model holds an output", function()
    goes(function(y) return y end, function(model)
      model.fails = true
      fails(function() model.output:sum():backward() end, "was to fail")
    end)
  end)

  it("that the walk had not reached when another failed can still be processed", function()
    local h = ps.recompute(function(t) return t * 3 end, x)
    local fail = false
    local y = ps.recompute(function(t)
      if fail then error "this run was to fail" end
      return t * 2
    end, h)
    fail = true
    fails(function() y:sum():backward() end, "was to fail")
    h:sum():backward()
    assert.same({ 3, 3, 3, 3, 3, 3 }, x:grad():tolist()[1])
  end)

  it("is released when backward fails before it, although its model holds an output", function()
    goes(function(y) return y:exp() end, function(model)
      ps.no_grad(function() model.output:mul_(2) end)
      fails(function() model.output:sum():backward() end, "backward of exp", "changed in place")
    end)
  end)

  it("is freed at once, with all before it, if there is no backward", function()
    local start = random { 64, 64 }
    ps.collect()
    local before = ps.memory("cpu").used
    ps.scope(function()
      local y = start
      for _ = 1, 100 do y = ps.recompute(function(t) return t + 1 end, y) end
    end)
    ps.collect()
    assert.equal(before, ps.memory("cpu").used)
  end)

  it("runs 2,000 times in a row", function()
    local y = x
    for _ = 1, 2000 do y = ps.recompute(function(t) return t + 1 end, y) end
    y:sum():backward()
    assert.same({ 1, 1, 1, 1, 1, 1 }, x:grad():tolist()[1])
  end)
end)

describe("an object whose state a segment needs", function()
  local scope = require "ps.core.scope"

  it("has the state of the segment's forward while it is recomputed, and its own state afterwards", function()
    local object, seen = { now = 0 }, {}
    function object:state() return { now = self.now } end
    function object:restore(state) self.now = state.now end
    scope.carry_state(object)
    local x, sum = random { 3 }, nil
    for i = 1, 3 do
      object.now = i
      local y = ps.recompute(function(t)
        seen[#seen + 1] = object.now
        return t * object.now
      end, x):sum()
      sum = sum and sum + y or y
    end
    object.now = 9
    sum:backward()
    assert.same({ 1, 2, 3, 3, 2, 1 }, seen)
    assert.equal(9, object.now)
    assert.same({ 6, 6, 6 }, x:grad():tolist())
  end)

  it("has its own state after a segment that failed", function()
    local object = { now = 1, state = function(self) return { now = self.now } end,
      restore = function(self, state) self.now = state.now end }
    scope.carry_state(object)
    local again = false
    local y = ps.recompute(function(t)
      if again then error("no more", 0) end
      return t * 2
    end, random { 3 }):sum()
    again, object.now = true, 2
    fails(function() y:backward() end, "no more")
    assert.equal(2, object.now)
  end)
end)

-- -- cheap outputs: from 1 MiB on they are computed again in backward -----------------------------------------------
describe("outputs that are recomputed instead of kept", function()
  -- The chain is recomputed by recursion in C. A chain of 20,000 ops overflowed the stack.
  it("form chains of at most 16 ops, so that memory and C's stack suffice for any number of ops", function()
    local function peak(n)
      local function chain(y)
        for _ = 1, n do y = ops.silu(y) end
        return y:sum()
      end
      local loss = chain(random { 512, 512 })            -- 1 MiB
      ps.collect()
      local before = ps.memory("cpu").used
      ps.reset_peak_memory "cpu"
      loss:backward()
      return (ps.memory("cpu").peak - before) / 2 ^ 20, before / 2 ^ 20
    end
    local few, kept_by_few = peak(16)
    local many, kept = peak(320)
    assert(many <= few + 2, ("%g and %g MiB"):format(few, many))
    assert(kept - kept_by_few <= 320 / 16 + 2, ("%g MiB are kept"):format(kept - kept_by_few))
  end)

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
      -- clone() is in between, so that its output is kept
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

  it("are kept if they were written to", function()
    local y = ps.no_grad(function() return F.gelu(x) end)
    local h = F.gelu(x)
    ps.no_grad(function() h:mul_(2) end)
    ops.mul(h, v[0]):sum():backward()
    local want = (y * 2):sum(0)
    assert((v:grad()[0] - want):abs():amax():item() <= 1e-5 * want:abs():amax():item())
  end)

  it("report that their inputs were changed, or that backward has passed", function()
    local h = F.gelu(x)
    local y, z = F.linear(h, v):sum(), F.linear(h, v):sum()
    y:backward()
    fails(function() z:backward() end, "second time")
    y = F.linear(F.gelu(x), v):sum()
    ps.no_grad(function() x:mul_(2) end)
    fails(function() y:backward() end, "backward of gelu", "changed in place")
  end)
end)
