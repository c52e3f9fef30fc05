-- SPDX-License-Identifier: BSD-3-Clause
-- Scopes: which tensors survive their end in ps.scope, module calls and training steps; memory is freed without the
-- collector; and the error of using a freed tensor.
local ps = require "ps"
local paths = require "ps.paths"
local nn, F, C = ps.nn, ps.F, ps.C

local BIG, NBYTES = { 128, 256 }, 128 * 256 * 4            -- tensors smaller than 64 KiB survive all scopes

local function used()
  collectgarbage()
  collectgarbage()
  return ps.memory().used
end
local function depth() return tonumber(C.ps_scope_depth(ps.ctx)) end

local fails = require("spec.check_lib").fails

describe("ps.scope", function()
  it("frees the bytes of inner tensors at once", function()
    local before, made = used(), {}
    ps.scope(function()
      for i = 1, 10 do made[i] = ps.ones(BIG) end
      assert.equal(before + 10 * NBYTES, ps.memory().used)
    end)
    assert.equal(before, ps.memory().used)  -- nothing was collected, since `made` still holds the headers
    for _, t in ipairs(made) do assert.is_false(t:alive()) end
    assert.same(BIG, made[1]:shape())
  end)

  it("keeps returned tensors, also in nested tables", function()
    local before = used()
    local a, list, n, none, e = ps.scope(function(arg)
      local x = ps.ones(BIG) * arg
      local _ = x + 1
      return x, { deep = { { ps.ones(BIG) } }, view = (x + 2)[1], 7 }, 5, nil, "s"
    end, 3)
    assert.equal(3, a[0][0]:item())
    assert.equal(1, list.deep[1][1][0][0]:item())
    assert.equal(5, list.view[0]:item())
    assert.same({ 7, 5, nil, "s" }, { list[1], n, none, e })
    assert.equal(before + 3 * NBYTES, used())
    a, list = nil, nil                                     -- luacheck: ignore 311
    assert.equal(before, used())
  end)

  it("passes results to the outer scope, which frees them in turn", function()
    local before, inner, outer = used(), nil, nil
    ps.scope(function()
      outer = ps.ones(BIG)
      inner = ps.scope(function()
        local _ = ps.ones(BIG)
        return ps.scope(function() return outer + 1 end)
      end)
      assert.equal(2, inner[0][0]:item())
      assert.equal(before + 2 * NBYTES, ps.memory().used)
    end)
    assert.same({ false, false }, { inner:alive(), outer:alive() })
    assert.equal(before, ps.memory().used)
  end)

  -- 64 MiB each. A collection is due if one more is in use than before.
  it("collects garbage for tensors that wait for it, and not for tensors that a backward makes and frees", function()
    local function collected(fn)
      local weak = setmetatable({ {} }, { __mode = "v" })
      collectgarbage "stop"
      local ok, problem = pcall(fn)
      local _ = ps.zeros { 1 } + 1                           -- an op checks whether a collection is due
      local running = collectgarbage "isrunning"
      collectgarbage "restart"
      assert.truthy(ok, problem)
      assert.is_false(running)                               -- the collector stays stopped after a collection
      return weak[1] == nil
    end
    ps.collect_all()
    local x = ps.zeros({ 2 ^ 24 }):requires_grad(true)
    local function step()
      local loss = ps.scope(function()
        local y = x
        for _ = 1, 4 do y = y:exp() end                      -- the tape holds each of them
        return y:sum()
      end)
      loss:backward()
      x:set_grad(nil)
    end
    for _ = 1, 3 do step() end                               -- the largest number of bytes in use at once becomes known
    assert.is_false(collected(function() for _ = 1, 5 do step() end end))
    assert.is_true(collected(function() for _ = 1, 8 do ps.empty { 2 ^ 24 } end end))
  end)

  it("collects no garbage for tensors without data, which need no memory", function()
    ps.collect_all()
    collectgarbage "stop"
    local weak, left = setmetatable({}, { __mode = "v" }), 0
    local function plant() for i = 1, 10 do weak[i] = { i } end end
    plant()
    for _ = 1, 2 do ps.empty({ 2 ^ 20, 2 ^ 20 }, { device = "meta" }):keep() end
    for i = 1, 10 do left = left + (weak[i] and 1 or 0) end
    collectgarbage "restart"
    assert.equal(10, left)
  end)

  it("keeps small tensors and those marked by keep", function()
    local before, small, kept, view = used(), nil, nil, nil
    ps.scope(function()
      small = ps.ones { 128, 127 }
      kept = ps.ones(BIG):keep()
      view = (ps.ones(BIG) * 4)[3]:keep()                  -- keeps all the bytes that it shares
    end)
    assert.same({ 1, 1, 4 }, { small[0][0]:item(), kept[0][0]:item(), view[0]:item() })
    ps.scope(function() assert.equal(NBYTES / 4, kept:sum():item()) end)
    small, kept, view = nil, nil, nil                      -- luacheck: ignore 311
    assert.equal(before, used())
  end)

  it("does not free tensors that were made outside", function()
    local x = ps.ones(BIG)
    ps.scope(function() x:add_(1) end)
    assert.equal(2, x[0][0]:item())
  end)

  it("ends when the function fails", function()
    local before, level, lost = used(), depth(), nil
    local err = fails(function()
      ps.scope(function()
        ps.scope_begin()
        lost = ps.ones(BIG)
        error({ code = 42 })
      end)
    end)
    assert.same({ code = 42 }, err)
    assert.same({ level, false }, { depth(), lost:alive() })
    assert.equal(before, ps.memory().used)
    local deep = fails(function() ps.scope(function() return ps.ones { 2 }:matmul(ps.ones { 3 }) end) end, "matmul")
    assert.matches("traceback", deep.traceback)
  end)

  it("can be begun and ended by hand", function()
    local level = depth()
    local id = ps.scope_begin()
    local a, b = ps.ones(BIG), ps.ones(BIG)
    local c = ps.ones(BIG)
    ps.scope_begin()
    local d = ps.ones(BIG)
    ps.scope_end(id, a, { { c } })
    assert.same({ true, false, true, false }, { a:alive(), b:alive(), c:alive(), d:alive() })
    assert.equal(level, depth())
    fails(function() ps.scope_end(id) end, "not open")
  end)
end)

describe("a dropped tensor", function()
  local t
  before_each(function() ps.scope(function() t = ps.ones(BIG) end) end)

  it("is an error with name, shape and remedy", function()
    local err = fails(function() return t + 1 end, "fp32", "[128, 256]", "scope", ":keep()")
    assert.equal("ESTALE", err.name)
    fails(function() return t:sum() end, "[128, 256]")
    fails(function() t:zero_() end, "[128, 256]")
    fails(function() t:tolist() end, "[128, 256]")
    fails(function() t:keep() end, "[128, 256]")
    fails(function() t:to("ref") end, "[128, 256]")
    fails(function() ps.zeros { 256 }:copy_(t[0]) end, "[")
    fails(function() t:backward() end, "[128, 256]")
    fails(function() ps.ones(BIG):set_grad(t) end, "[128, 256]")
  end)

  it("can still be printed", function()
    assert.matches("tensor %[128, 256%] fp32", tostring(t))
    assert.same({ BIG, "fp32", false }, { t:shape(), t:dtype(), t:alive() })
  end)
end)

describe("the tape", function()
  it("keeps tensors that backward needs beyond the scope, and then frees them", function()
    local x = ps.ones(BIG, { requires_grad = true })
    local before = used()
    local h
    local loss = ps.scope(function()
      h = x:exp()                                          -- saved by exp and mul
      return (h * h):sum()
    end)
    assert(ps.memory().used > before)
    loss:backward()
    assert(math.abs(x:grad()[0][0]:item() - 2 * math.exp(2)) < 1e-4)
    x:set_grad(nil)
    assert.is_false(h:alive())
    assert(used() < before + NBYTES)
  end)

  it("frees graphs that are never walked", function()
    local x = ps.ones(BIG, { requires_grad = true })
    local before = used()
    for _ = 1, 3 do
      local loss = ps.scope(function() return x:exp():square():sum() end)
      assert(loss:needs_grad())
    end
    assert(used() < before + NBYTES)
  end)

  it("leaves gradients that outlive the scope", function()
    local x = ps.ones(BIG, { requires_grad = true })
    ps.scope(function() (x * 3):sum():backward() end)
    assert.equal(3, x:grad()[0][0]:item())
    ps.scope(function() (x * 3):sum():backward() end)
    assert.equal(6, x:grad()[0][0]:item())
    ps.scope(function() x:set_grad(ps.ones(BIG) * 5) end)
    assert.equal(5, x:grad()[0][0]:item())
  end)

  it("keeps only the inputs of a recompute segment", function()
    local x, w = ps.ones(BIG, { requires_grad = true }), ps.ones { 256, 256 }
    local before = used()
    local y = ps.scope(function()
      return ps.recompute(function(t) return t:matmul(w):exp():square():matmul(w):tanh() end, x)
    end)
    assert.equal(before + NBYTES, used())
    y:sum():backward()
    y = nil                                                -- luacheck: ignore 311
    assert.equal(before + NBYTES, used())                  -- the gradient
  end)
end)

-- -- modules and steps ----------------------------------------------------------------------------------------------
local Net = nn.class("Net")
function Net:init()
  self.a, self.b = nn.Linear(64, 1024), nn.Linear(1024, 64)
end
local passed                                               -- a tensor from the last call
function Net:forward(x)
  passed = F.gelu(self.a(x))
  return self.b(passed)
end

describe("a module's call", function()
  it("is a scope", function()
    local net = Net()
    local x = ps.randn { 1024, 64 }
    local before = used()
    local y = ps.no_grad(function() return net(x) end)
    assert.is_false(passed:alive())
    assert.is_true(y:alive())
    assert.equal(before + y:nbytes(), used())
    y = net(x)                                             -- the tape holds the activations ...
    local held = ps.memory().used
    assert(held > before + 2 * y:nbytes())
    y:sum():backward()
    net:zero_grad()
    y = nil                                                -- luacheck: ignore 311
    assert(used() <= before)                               -- ... as long as it needs them
  end)
end)

describe("a module's field", function()
  local Fields = nn.class("Fields")
  function Fields:init() self.inner = nn.Linear(64, 256) end
  function Fields:forward(x)
    local y = self.inner(x)
    self.last, self.list, self.other = y + 1, { y + 2, named = { deep = y + 3 } }, { y + 4 }
    self.other = nil
    return y:sum()
  end

  it("has tensors of every size after the call, as long as it refers to them", function()
    for _, rows in ipairs { 1, 4096 } do                    -- 1 KiB and 4 MiB
      local net, x = Fields(), ps.ones { rows, 64 }
      local before = used()
      ps.no_grad(function() for _ = 1, 3 do net(x) end end)
      local y = net.inner(x)
      for i, t in ipairs { net.last, net.list[1], net.list.named.deep } do
        assert.is_true(t:alive())
        assert.is_true((t - y):allclose(ps.full(t:shape(), i)))
      end
      y:release()
      assert(used() <= before + 4 * net.last:nbytes() + 4096)
      net.last, net.list = nil, nil
      assert(used() <= before + 4096)
    end
  end)

  it("has tensors that recomputed and recorded forwards assign", function()
    local net, x = Fields(), ps.ones({ 4096, 64 }, { requires_grad = true })
    local first = ps.recompute(function(t) return net(t) end, x)
    assert.is_true(net.last:alive())
    first:backward()
    assert.is_true(net.last:alive())
    assert.is_true(x:grad():alive())
    net(x):backward()
    assert.equal(4096 * 256, net.last:numel())
    assert.is_true((net.last - net.inner(x)):allclose(ps.ones { 4096, 256 }))
  end)
end)

describe("a training step", function()
  local function training(mode)
    ps.manual_seed(1)
    local net = Net()
    if mode == "bf16" then net:to("bf16") end
    local optimizer = ps.optim.AdamW(net:parameters(), { lr = 1e-3 })
    local x = ps.randn({ 512, 64 }, { dtype = mode == "bf16" and "bf16" or "fp32" }):keep()
    local function step()
      local h = mode == "checkpoint" and ps.recompute(net, x) or net(x)
      local loss = h:float():square():mean()
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      return loss, h
    end
    return step, net, x
  end

  it("leaves tensors of the loop alone, whatever their size", function()
    local step, net, x = training()
    step()
    local average = ps.ones(BIG)
    local first = ps.ones(BIG)
    for i = 1, 4 do
      local loss, h = step()
      average = average * 0.5 + i
      assert.same({ true, true, true }, { h:alive(), x:alive(), loss:item() > 0 })
    end
    assert.equal(1, first[{ 0, 0 }]:item())
    assert.equal(1 / 16 + 1 / 8 + 2 / 4 + 3 / 2 + 4, average[{ 0, 0 }]:item())
    for _, p in net:named_parameters() do assert.is_true(p:alive()) end
  end)

  it("may lie in a scope of the script, which then ends what was made", function()
    local step = training()
    step()
    for _ = 1, 2 do
      local inside
      ps.scope(function()
        step()
        inside = ps.ones(BIG)
        step()
        assert.is_true(inside:alive())
      end)
      assert.is_false(inside:alive())
    end
    local outside = ps.ones(BIG)
    step()
    assert.is_true(outside:alive())
  end)

  for _, mode in ipairs { "fp32", "bf16", "checkpoint" } do
    it("in a scope takes no more memory the 50th time, even when nothing is collected: " .. mode, function()
      local step = training(mode)
      local losses, after, peak = {}, nil, nil
      collectgarbage()
      collectgarbage("stop")
      local ok, err = pcall(function()
        for i = 1, 50 do
          -- Holds a header of each step. A scope's results outlive it, so it returns only the loss.
          losses[i] = ps.scope(function() return (step()) end)
          if i == 5 then
            after = ps.memory().used
            ps.reset_peak_memory()
          elseif i == 6 then
            peak = ps.memory().peak
          elseif i > 6 then
            local now = ps.memory()
            -- The number of small tensors whose headers wait for the collector can vary a little.
            assert(now.used <= after + 512 * 1024, ("step %d: %d bytes, %d after step 5"):format(i, now.used, after))
            assert(now.peak <= peak + 512 * 1024, ("step %d: peak %d, %d in step 6"):format(i, now.peak, peak))
          end
        end
      end)
      collectgarbage("restart")
      assert(ok, tostring(err))
      assert(losses[50]:item() < losses[1]:item())
    end)
  end

  -- The loop has neither an optimizer nor a loader, so only the growth of tensors makes Lua collect. A separate process
  -- has the Lua heap of a script.
  it("outside all scopes takes at most 1.3 times the memory that it takes in a scope", function()
    local script = [[
      local ps = require "ps"
      local w1 = ps.nn.Parameter(ps.randn { 512, 2048 } * 0.02)
      local w2 = ps.nn.Parameter(ps.randn { 2048, 512 } * 0.02)
      local x = ps.randn { 1024, 512 }
      local function step()
        local y = ps.F.gelu(x:matmul(w1)):matmul(w2)
        local loss = (y - x):square():mean()
        loss:backward()
        ps.no_grad(function()
          for _, p in ipairs { w1, w2 } do
            p:sub_(p:grad() * 0.1)
            p:set_grad(nil)
          end
        end)
      end
      local function peak(fn)
        ps.collect_all()
        for i = 1, 12 do
          if i == 3 then ps.reset_peak_memory() end
          fn()
        end
        return ps.memory().peak
      end
      local plain, scoped = peak(step), peak(function() ps.scope(step) end)
      print(plain <= 1.3 * scoped and "held" or ("%.1f MiB, in a scope %.1f MiB"):format(plain / 2 ^ 20,
        scoped / 2 ^ 20))
    ]]
    local p = assert(io.popen(("'%s' -e '%s'"):format(paths.exe, script)))
    local out = p:read("*a")
    p:close()
    assert.equal("held\n", out)
  end)
end)

-- -- memory outside scopes and its limit ----------------------------------------------------------------------------
describe("memory", function()
  it("give a tensor's bytes back at once, however it was made", function()
    for _, name in ipairs { "empty", "zeros", "ones", "randn", "rand" } do
      local t = ps[name] { 300, 300 }
      t:release()
      assert.is_false(t:alive(), name)
    end
    for _, t in ipairs { ps.full({ 300, 300 }, 2), ps.randint(0, 5, { 300, 300 }), ps.arange(90000) } do
      t:release()
      assert.is_false(t:alive())
    end
  end)

  it("is counted", function()
    local before = used()
    local t = ps.empty { 1000, 1000 }
    assert.equal(before + t:nbytes(), ps.memory().used)
    assert(ps.memory().peak >= before + t:nbytes() and ps.memory().reserved >= ps.memory().used)
    t:release()
    t:release()
    assert.equal(before, ps.memory().used)
    assert.error_matches(function() return t:sum() end, "was used after")
    ps.reset_peak_memory()
    assert.equal(before, ps.memory().peak)
  end)

  it("has a limit, and what waits for the collector is given up first", function()
    local before = used()
    ps.set_memory_limit(before + 10 * 2 ^ 20)
    local ok, err = pcall(function()
      for _ = 1, 20 do local _ = ps.ones { 2 ^ 20 } end    -- 4 MiB each, which become garbage immediately
      local held = { ps.ones { 2 ^ 20 } }
      local problem = fails(function() held[2] = ps.ones { 2 ^ 21 } end, "limit")
      assert.equal("ENOMEM", problem.name)
      held[2] = ps.ones { 2 ^ 19 }
      assert.equal(2, #held)
    end)
    ps.set_memory_limit(0)
    assert(ok, tostring(err))
  end)

  it("of garbage outside all scopes is bounded", function()
    local script = [[
      local ps, most = require "ps", 0
      for _ = 1, 300 do
        local _ = ps.empty { 2 ^ 21 }           -- 8 MiB that only the collector can free
        most = math.max(most, ps.memory().used)
      end
      print(most <= 2 ^ 30)
    ]]
    local p = assert(io.popen(("'%s' -e '%s'"):format(paths.exe, script)))
    local out = p:read("*a")
    p:close()
    assert.equal("true\n", out)
  end)
end)
