-- SPDX-License-Identifier: BSD-3-Clause
-- A step has one owner: its actions follow the order of its table, each call out of turn is refused by name, other
-- valid calls of a script change no bit, and no other file can write a step's state.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local nn = ps.nn
local lib = require "spec.check_lib"
local fails = lib.fails
local ffi, C, ctx = ps.ffi, ps.C, ps.ctx

local F, B, R, N, U = C.PS_ACT_FORWARD, C.PS_ACT_BACKWARD, C.PS_ACT_REDUCE, C.PS_ACT_NORM, C.PS_ACT_UPDATE
local model

after_each(function()
  C.ps_test_fail_alloc(-1, 0)
  if model then model:close() end
  model = nil
end)

-- Returns the error that C returns for a call, or nil.
local function said(rc, code)
  assert.equal(code or C.PS_ESTATE, rc)
  return ffi.string(C.ps_error_message())
end

describe("the calls of a step", function()
  local step

  local function begin(kinds, micros)
    local actions = ffi.new("ps_action[?]", #kinds)
    for i, kind in ipairs(kinds) do actions[i - 1].kind, actions[i - 1].micro = kind, micros and micros[i] or 0 end
    return C.ps_step_begin(step, ffi.new("ps_step_config", { actions = actions, n_actions = #kinds, trace = -1 }))
  end
  local function act(kind)
    assert.equal(0, C.ps_step_next(step, kind, nil))
    assert.equal(0, C.ps_step_done(step))
  end

  before_each(function()
    local out = ffi.new("ps_step *[1]")
    ps.check(C.ps_step_new(ctx, out))
    step = ffi.gc(out[0], C.ps_step_free)
  end)

  it("begin: not within a step, and with a valid table", function()
    assert.matches("has no backward", said(begin({ F, U }), C.PS_EINVAL))
    assert.matches("after the norm", said(begin({ F, B, N, F, B, U }), C.PS_EINVAL))
    assert.matches("has kind 9", said(begin({ F, B, 9 }), C.PS_EINVAL))
    assert.equal(0, begin { F, B, U })
    assert.matches("a step is already under way", said(begin { F, B, U }))
  end)

  it("next: the action that is due, or a valid replacement", function()
    assert.matches("forward was called, but no step is under way", said(C.ps_step_next(step, F, nil)))
    assert.equal(0, begin({ F, B, F, B, N, U }, { 0, 0, 1, 1 }))
    assert.matches("expects the forward of micro%-batch 1 .* but got update", said(C.ps_step_next(step, U, nil)))
    act(F)
    act(F)                                                      -- once more
    assert.equal(0, C.ps_step_next(step, F, nil))
    C.ps_step_abandon(step)                                     -- given up
    assert.matches("expects the backward of micro%-batch 1 .* but got norm", said(C.ps_step_next(step, N, nil)))
    act(B)
    assert.equal(1, C.ps_step_look(step).micro)
    act(B)                                                      -- a backward without its forward
    assert.matches("expects its norm .* but got forward", said(C.ps_step_next(step, F, nil)))
    assert.matches("expects its norm .* but got backward", said(C.ps_step_next(step, B, nil)))
    act(N)
    assert.matches("expects its update .* but got norm", said(C.ps_step_next(step, N, nil)))
    act(U)
    assert.matches("expects its end, but got reduce", said(C.ps_step_next(step, R, nil)))
  end)

  it("next: one action at a time; updates in a backward: only in the last one, without a norm", function()
    local how = ffi.new("ps_action_how", { overlap = 1 })
    assert.equal(0, begin({ F, B, F, B, U }, { 0, 0, 1, 1 }))
    assert.equal(0, C.ps_step_next(step, F, nil))
    assert.matches("backward was called within the step's forward", said(C.ps_step_next(step, B, nil)))
    assert.equal(0, C.ps_step_done(step))
    assert.matches("last backward", said(C.ps_step_next(step, B, how), C.PS_EINVAL))
    assert.equal(0, C.ps_step_end(step, nil))
    assert.equal(0, begin { F, B, N, U })
    assert.matches("updates cannot overlap", said(C.ps_step_next(step, B, how), C.PS_EINVAL))
  end)

  it("done and end: only of begun actions, and not before all are done", function()
    local id = ffi.new "int32_t[1]"
    assert.matches("no action", said(C.ps_step_done(step)))
    assert.matches("no step is under way", said(C.ps_step_end(step, id)))
    assert.equal(0, begin { F, B, U })
    assert.matches("no action", said(C.ps_step_done(step)))
    act(F)
    assert.matches("cannot end before its backward", said(C.ps_step_end(step, id)))
    assert.equal(0, C.ps_step_next(step, B, nil))
    assert.matches("cannot end before its backward", said(C.ps_step_end(step, id)))
    assert.equal(0, C.ps_step_done(step))
    act(U)
    assert.equal(0, C.ps_step_end(step, id))
    assert.equal(0, C.ps_step_look(step).open)
  end)

  it("a norm and an update: within their action", function()
    model = ps.initialize { quiet = true, model_func = function() return nn.Linear(4, 4) end, config = {} }
    assert.matches("the norm of gradients is not due", said(C.ps_engine_sq_norm(ctx, ffi.new "double[1]")))
    assert.matches("an update is not due", said(C.ps_engine_update(ctx)))
  end)

  it("an abandoned forward uses no random numbers, nor does an abandoned step", function()
    local rng = ps.rng()
    local op = rng.op
    assert.equal(0, begin { F, B, U })
    rng.op = op + 1
    assert.equal(0, C.ps_step_next(step, F, nil))
    rng.op = op + 5
    C.ps_step_abandon(step)
    assert.equal(op + 1, rng.op)
    assert.equal(0, C.ps_step_end(step, nil))
    assert.equal(op, rng.op)
  end)
end)

-- -- scripts ----------------------------------------------------------------------------------------------------------
local Net = nn.class "Net"
local trouble = false
function Net:init()
  self.a, self.b, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.3)
end
function Net:forward(x, y)
  local h = self.drop(ps.F.gelu(self.a(x:to(self.a.weight:dtype()))))
  if trouble then error "trouble" end
  return ps.F.cross_entropy(self.b(h):to("fp32"), y)
end

local CASES = {
  ["in chunks"] = { overlap_optimizer = false },
  ["in chunks, bf16, clipped"] = { bf16 = { enabled = true }, gradient_clipping = 0.05 },
  ["in chunks, over a small tier"] = { device = "sim", chunk_size = 1024, memory = { device = "192KiB" } },
  ["in plain memory"] = { memory = "plain", gradient_clipping = 0.05 },
}

local function open(config, micros)
  ps.manual_seed(3)
  local wanted = { plan_print = false, gradient_accumulation_steps = micros,
    optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
  for key, value in pairs(config) do wanted[key] = value end
  local optimizer
  model, optimizer = ps.initialize { quiet = true, model_func = function() return Net() end, config = wanted }
  return optimizer
end

local function bytes(optimizer)
  local parts = {}
  for name, t in pairs(model:state_dict()) do parts[#parts + 1] = name .. lib.bytes(t:to("cpu")) end
  for name, t in pairs(optimizer:state_dict(model).tensors) do parts[#parts + 1] = name .. lib.bytes(t:to("cpu")) end
  table.sort(parts)
  return table.concat(parts)
end

local x, y = {}, {}
setup(function()
  ps.manual_seed(8)
  for i = 1, 2 do x[i], y[i] = ps.randn { 6, 8 }, ps.randint(0, 4, { 6 }, { dtype = "int32" }) end
end)
teardown(function() x, y = nil, nil end)

-- Trains two steps of two micro-batches. `besides[place]` is called at that point of the second step.
local function train(config, besides)
  local optimizer = open(config, 2)
  local function at(step, place, ...)
    if step == 2 and besides[place] then besides[place](optimizer, ...) end
  end
  for step = 1, 2 do
    for micro = 1, 2 do
      at(step, "before forward", micro)
      local loss = model(x[micro], y[micro])
      at(step, "before backward", micro)
      model:backward(loss)
      at(step, "after backward", micro)
    end
    optimizer:step()
    optimizer:zero_grad()
  end
  local all = bytes(optimizer)
  model:close()
  model = nil
  return all
end

local function evaluate()
  model:eval()
  ps.no_grad(function() model(x[1], y[1]) end)
  model:train()
  ps.no_grad(function() model.module.a(x[2]:to(inner(model).device_name):to(model.module.a.weight:dtype())) end)
end

-- The dropout of a forward depends on the forward's number in the step. A repeated forward uses the same number.
local function again(fn)
  local rng = ps.rng()
  local op = rng.op
  fn()
  rng.op = op
end

local LEGAL = {
  ["several forwards in a micro-batch"] = { ["before forward"] = function(_, micro)
    again(function() for _ = 1, 2 do model(x[micro], y[micro]) end end)
  end },
  ["evaluation at any point"] = { ["before forward"] = evaluate, ["before backward"] = evaluate },
  ["a forward that is given up"] = { ["before forward"] = function(_, micro)
    trouble = true
    fails(function() model(x[micro], y[micro]) end, "trouble")
    trouble = false
  end },
  ["reading the state, which is what a save does"] = { ["before forward"] = function(optimizer, micro)
    if micro == 1 then bytes(optimizer) end
  end },
}

describe("a script's steps", function()
  for name, config in pairs(CASES) do
    it("have the same bits whatever happens in between: " .. name, function()
      local plain = train(config, {})
      for what, besides in pairs(LEGAL) do assert(train(config, besides) == plain, what) end
    end)

    it("may have a forward in evaluation mode: " .. name, function()
      local function run(eval)
        local optimizer = open(config, 2)
        model.module.drop.p = 0
        for micro = 1, 2 do
          if eval == micro then model:eval() end
          local loss = model(x[micro], y[micro])
          model:train()
          model:backward(loss)
        end
        optimizer:step()
        local all = bytes(optimizer)
        model:close()
        model = nil
        return all
      end
      local plain = run()
      for micro = 1, 2 do assert(run(micro) == plain, "micro-batch " .. micro) end
    end)

    it("are refused out of turn: " .. name, function()
      local optimizer = open(config, 1)
      local loss = model(x[1], y[1])
      fails(function() optimizer:step() end, "no backward since the last step")
      model:backward(loss)
      fails(function() model:backward(loss) end, "gradient_accumulation_steps is 1")
      fails(function() model(x[1], y[1]) end, "the step expects its", "(optimizer:step())",
        "but got forward (model(...) with gradients; use ps.no_grad for an evaluation)")
      assert.is_false(optimizer:step().skipped)
      fails(function() optimizer:step() end, "no backward since the last step")
    end)
  end

  it("have state that only the step's file writes", function()
    open({}, 2)
    model:backward(model(x[1], y[1]))
    assert.equal(1, inner(model).micro)
    for _, name in ipairs { "micro", "torn" } do
      fails(function() inner(model)[name] = 2 end, "engine." .. name, "read-only: the step sets it")
    end
  end)
end)

local function used(collect)
  local info = ffi.new "ps_memory_info"
  for _ = 1, 3 do (collect or ps.collect)() end
  ps.check(C.ps_memory_get(ctx, 0, info))
  return tonumber(info.used)
end

it("the bytes of a model in plain memory that compiled code references are freed when it is closed", function()
  local before = used()
  local function run()
    open({ memory = "plain" }, 1)
    local held = model
    local function steps() return held.config_name end
    local sum = 0
    for _ = 1, 1000 do sum = sum + (steps() or 0) end  -- compiles a trace that holds the closure, and thus the model
    assert.equal(0, sum)
    model:close()
    model = nil
  end
  for _ = 1, 3 do run() end
  assert.equal(before, used())
end)

it("the bytes of an unreferenced model in plain memory are freed, whether it is closed or not", function()
  local function run()
    local optimizer = open({ memory = "plain", bf16 = { enabled = true } }, 1)
    model:backward(model(x[1], y[1]))
    optimizer:step()
    model = nil
  end
  run()
  local before = used(ps.collect_all)
  for _ = 1, 3 do run() end
  assert.equal(before, used(ps.collect_all))
end)

describe("an update that fails", function()
  for name, config in pairs { chunks = CASES["in chunks"], clipped = CASES["in chunks, bf16, clipped"],
    sim = CASES["in chunks, over a small tier"], plain = CASES["in plain memory"] } do
    it("is completed by a second call, with the same factor on gradients: " .. name, function()
      local function run(nth)
        local optimizer = open(config, 1)
        model:backward(model(x[1], y[1]))
        if nth then C.ps_test_fail_alloc(nth, 1e9) end         -- the chunks of Adam's states have no memory yet
        local ok = pcall(optimizer.step, optimizer)
        local hit = nth and C.ps_test_fail_alloc_left() < 0
        C.ps_test_fail_alloc(-1, 0)
        local opens = not ok and inner(model).micro == 1
        if opens then assert.is_false(optimizer:step().skipped) end
        if ok or opens then
          model:backward(model(x[2], y[2]))
          optimizer:step()
        end
        local steps, all = optimizer.steps, (ok or opens) and bytes(optimizer) or nil
        model:close()
        model = nil
        return all, opens, hit, steps
      end
      local plain = run()
      local tried = 0
      for nth = 0, 60 do
        local all, opens, hit, steps = run(nth)
        if all then
          assert(all == plain, "allocation " .. nth)
          assert.equal(2, steps)
        end
        if opens then tried = tried + 1 end
        if not hit then break end
      end
      assert(tried > 0, "no update failed")
    end)
  end
end)

describe("gradients with chunks of their own", function()
  it("have no contents after their update: none of their bytes moves to the next step", function()
    local disk = os.tmpname()
    os.remove(disk)
    assert(require("lfs").mkdir(disk))
    local optimizer
    model, optimizer = ps.initialize { quiet = true, model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)),
      config = { gradient_accumulation_steps = 2, optimizer = { type = "AdamW", params = { lr = 1e-3 } },
        chunk_size = 4096, plan_print = false, memory = { host = "1MiB", disk = { path = disk, limit = "4MiB" } } } }
    local function with_contents()
      local n, all = 0, 0
      for _, c in ipairs(ps.chunks()) do
        if c.kind == "grad" then
          all = all + 1
          if next(c.tiers) then n = n + 1 end
        end
      end
      assert(all >= 2)
      return n, all
    end
    for _ = 1, 2 do
      for micro = 1, 2 do
        model:backward(model(ps.ones { 2, 64 }):mean())
        local n, all = with_contents()
        assert.equal(all, n, "micro-batch " .. micro)
      end
      optimizer:step()
      assert.equal(0, (with_contents()))
    end
    model:close()
    model = nil
    os.execute("rm -r " .. disk)
  end)
end)
