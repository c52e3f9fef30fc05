-- SPDX-License-Identifier: BSD-3-Clause
-- An engine in faulty scripts: errors in the user's code, calls in the wrong order, wrong arguments. Each is an error
-- that names what and where, nothing leaks, no file stays, and training that was interrupted before an update
-- continues with the same bits.
local lfs = require "lfs"
local ps = require "ps"
local engine_of = require("ps.nn.handle").of
local nn = require "ps.nn"
local gpt2 = require "models.gpt2"
local L = dofile((arg[0]:match("^(.*)/[^/]*$") or ".") .. "/chunks_lib.lua")
local fails = require("spec.check_lib").fails_saying
local C, ctx = ps.C, ps.ctx

local KIB, MIB = 2 ^ 10, 2 ^ 20
local folder
local small = L.small

local function disk(limit) return { path = folder, limit = limit or 2 * MIB } end

L.scratch({ setup = setup, teardown = teardown }, function(path) folder = path end)
after_each(function()
  L.close_engine()
  assert.equal(0, L.entries(folder))
end)

describe("an error in the user's code", function()
  local Faulty = nn.class("Faulty")
  local trouble                                            -- where the failure is: "forward", "late" or "again"

  function Faulty:init()
    self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
    self.drop = nn.Dropout(0.3)
  end
  function Faulty:forward(x, y)
    if trouble == "forward" then error "trouble in forward" end
    x = self.drop(ps.F.gelu(self.a(x:to(self.a.weight:dtype()))))
    local runs = 0
    x = ps.recompute(function(h)
      runs = runs + 1
      if trouble == "again" and runs == 2 then error "trouble in recompute" end
      return self.drop(ps.F.gelu(self.b(h)))
    end, x)
    if trouble == "late" then error "trouble after dropout" end
    return ps.F.cross_entropy(self.c(x):to("fp32"), y)
  end

  local function train(places, config)
    ps.manual_seed(11)
    local wanted = { optimizer = { type = "AdamW", params = { lr = 1e-2 } }, plan_print = false, chunk_size = 1024,
      overlap_optimizer = false, memory = { host = 150 * KIB, disk = disk() } }
    for key, value in pairs(config or {}) do wanted[key] = value end
    local model, optimizer = ps.initialize { model_func = function() return Faulty() end, config = wanted,
      quiet = true }
    local accumulate, losses = wanted.gradient_accumulation_steps or 1, {}
    for step = 1, 4 do
      local data = {}
      for micro = 1, accumulate do
        data[micro] = { ps.randn { 6, 16 }, ps.randint(0, 8, { 6 }, { dtype = "int32" }) }
      end
      local micro, tries = 1, 0
      optimizer:zero_grad()
      while micro <= accumulate do
        tries = tries + 1
        trouble = places[step] and places[step][1] == micro and places[step][2] or nil
        if trouble then places[step] = nil end
        local here, message = trouble, nil
        local ok, problem = pcall(function()
          local loss = model(data[micro][1], data[micro][2])
          if here == "loss" then error "trouble with the loss" end
          losses[#losses + 1] = ("%.17g"):format(loss:item())
          message = "backward"
          model:backward(loss)
          optimizer:step()
        end)
        trouble = nil
        if tries > 10 then error("no way on: " .. tostring(problem)) end
        if ok then
          assert.is_nil(here)
          micro = micro + 1
        elseif message then                                -- in backward, the step begins again
          for _ = 1, micro do losses[#losses] = nil end
          micro = 1
          optimizer:zero_grad()
        elseif here == "loss" and micro > 1 then           -- zero_grad does not change the accumulated gradients
          for _ = 1, micro - 1 do losses[#losses] = nil end
          micro = 1
          engine_of(model):abandon()
        else
          optimizer:zero_grad()
        end
      end
    end
    local state = L.state(model, optimizer)
    model:close()
    return { out = losses, state = state }
  end

  for name, config in pairs {
    fp32 = {}, bf16 = { bf16 = { enabled = true } }, clipped = { bf16 = { enabled = true }, gradient_clipping = 0.1 },
    accumulated = { gradient_accumulation_steps = 2 }, ["no limits"] = { memory = "chunk" },
    ["on sim"] = { device = "sim", bf16 = { enabled = true }, memory = { device = 150 * KIB, host = 250 * KIB } },
  } do
    it("leaves no trace: " .. name, function()
      local plain = train({}, config)
      for _, place in ipairs { "forward", "late", "loss", "again" } do
        local micro = config.gradient_accumulation_steps or 1
        local result = train({ { micro, place }, nil, { 1, place } }, config)
        local problem = L.difference(plain, result)
        if problem then error(place .. ": " .. problem) end
      end
    end)
  end

  it("in model_func leaves no engine behind", function()
    fails({ "no such model" }, function()
      ps.initialize { model_func = function()
        nn.Linear(64, 64)
        error "no such model"
      end, config = { memory = { host = MIB, disk = disk() } }, quiet = true }
    end)
    assert.equal(0, C.ps_engine_is_open(ctx))
    fails({ "returned a number" }, function()
      ps.initialize { model_func = function() return 7 end, config = {}, quiet = true }
    end)
  end)
end)

describe("wrong use", function()
  local x, y

  local function open(config, model_func)
    ps.manual_seed(2)
    local wanted = { plan_print = false, chunk_size = 1024 }
    for key, value in pairs(config or {}) do wanted[key] = value end
    return ps.initialize { model_func = model_func or L.model_func(small()), config = wanted, quiet = true }
  end

  setup(function() x, y = ps.randn { 4, 16 }, ps.randint(0, 8, { 4 }, { dtype = "int32" }) end)
  teardown(function() x, y = nil, nil end)

  it("of a second engine is refused, and use of a closed one, whether or not another is open", function()
    local model, optimizer = open()
    local other
    fails({ "another engine is open", "model:close()" }, open)
    model:backward(model(x, y))                                -- the first part is complete
    optimizer:step()
    model:close()
    model:close()
    for _ = 1, 2 do
      fails({ "closed" }, function() model(x, y) end)
      fails({ "closed" }, function() model:backward(ps.ones { 1 }) end)
      fails({ "closed" }, function() optimizer:step() end)
      fails({ "closed" }, function() optimizer:zero_grad() end)
      fails({ "closed" }, function() model:state_dict() end)
      fails({ "closed" }, function() optimizer:state_dict() end)
      fails({ "closed" }, function() optimizer:load_state_dict {} end)
      fails({ "scope" }, function() return model.module.first.weight:sum() end)
      other = other or open()
    end
    other:close()
  end)

  it("of backward and step in the wrong order is refused", function()
    local model, optimizer = open { overlap_optimizer = false }
    local before = L.state(model, optimizer)
    fails({ "no backward since the last step" }, function() optimizer:step() end)
    assert.is_nil(L.difference({ out = {}, state = before }, { out = {}, state = L.state(model, optimizer) }))
    fails({ "backward takes the loss tensor" }, function() model:backward(3) end)
    local loss = model(x, y)
    model:backward(loss)
    fails({ "gradient_accumulation_steps is 1" }, function() model:backward(loss) end)
    optimizer:step()
    assert.equal(1, optimizer.steps)
    fails({ "second time" }, function() model:backward(loss) end)
    model:backward(model(x, y))
    optimizer:step()
    model:close()
  end)

  for _, memory in ipairs { "plain", "chunks" } do
    it("of loss:backward() is refused before it affects a step: " .. memory, function()
      local model, optimizer = open { memory = memory == "plain" and "plain" or nil }
      local function by_loss()
        model(x, y):backward()
        model:backward(model(x, y))
      end
      fails({ "call model:backward(loss) instead of loss:backward()" }, by_loss)
      optimizer:zero_grad()
      model:backward(model(x, y))
      optimizer:step()
      local once = L.state(model, optimizer)
      model:close()
      model, optimizer = open { memory = "plain" }
      model:backward(model(x, y))
      optimizer:step()
      assert.is_nil(L.difference({ out = {}, state = once }, { out = {}, state = L.state(model, optimizer) }))
      model:close()
    end)
  end

  it("of tensors without elements works as without an engine", function()
    local model = open {}
    assert.same({ 0, 16 }, ps.zeros({ 0, 16 }):fill_(2):shape())
    assert.equal(0, ps.randint(0, 9, { 0, 16 }, { dtype = "int32" }):numel())
    model:close()
  end)

  it("of load_state_dict inside the model's forward is refused", function()
    local model, optimizer
    local Loads = nn.class("Loads")
    function Loads:init() self.a = nn.Linear(16, 8) end
    function Loads:forward(given, wanted)
      if self.what then self.what() end
      return ps.F.cross_entropy(self.a(given), wanted)
    end
    local inner = Loads()
    model, optimizer = open({ memory = "plain" }, function() return inner end)
    local state, moments = model:state_dict(), optimizer:state_dict()
    for _, what in ipairs { function() model:load_state_dict(state) end,
      function() optimizer:load_state_dict(moments) end } do
      rawset(inner, "what", what)
      fails({ "cannot be loaded inside the model's forward" }, function() model(x, y) end)
    end
    rawset(inner, "what", nil)
    model:backward(model(x, y))
    optimizer:step()
    model:close()
  end)

  it("of a parameter whose memory a gradient has taken is refused", function()
    local model, optimizer = open { bf16 = { enabled = true }, overlap_optimizer = false }
    local weight = model.module.first.weight
    local before = L.bytes(weight)
    model:backward(model(x, y))
    fails({ "between backward and optimizer:step()", "zero_grad" }, function() return weight:sum() end)
    fails({ "expects its update (optimizer:step())", "forward (model(...) with gradients" }, function()
      model(x, y)
    end)
    model:eval()
    fails({ "use ps.no_grad for an evaluation" }, function() model(x, y) end)
    fails({ "between backward and optimizer:step()" }, function() ps.no_grad(model, x, y) end)
    model:train()
    optimizer:zero_grad()
    assert.truthy(before == L.bytes(weight))
    model:backward(model(x, y))
    optimizer:step()
    assert.falsy(before == L.bytes(weight))
    model:close()
  end)

  it("of a rate that changes after backward has updated parameters is refused", function()
    local model, optimizer = open { overlap_optimizer = true }
    model:backward(model(x, y))
    fails({ "overlap_optimizer = false" }, function() optimizer:set_lr(0.5) end)
    optimizer:step()
    optimizer:set_lr(0.5)
    model:backward(model(x, y))
    optimizer:step()
    model:close()
  end)

  it("of an invalid rate is refused before anything changes", function()
    for _, settings in ipairs { { memory = "plain" }, { overlap_optimizer = true }, { overlap_optimizer = false } } do
      local model, optimizer = open(settings)
      local before = L.state(model, optimizer)
      for _, bad in ipairs { -1, 0 / 0, math.huge } do
        fails({ "engine_misuse_spec.lua", "optimizer:set_lr: the rate is ", "expected a number of at least 0" },
          function() optimizer:set_lr(bad) end)
        local was = optimizer.groups[1].lr
        optimizer.groups[1].lr = bad
        fails({ "engine_misuse_spec.lua", "group 1: lr is ", "expected a number of at least 0" }, function()
          model:backward(model(x, y))
          optimizer:step()
        end)
        optimizer:zero_grad()
        optimizer.groups[1].lr = was
      end
      assert.is_nil(L.difference({ out = {}, state = before }, { out = {}, state = L.state(model, optimizer) }))
      model:backward(model(x, y))
      optimizer:step()
      model:close()
    end
  end)

  it("of invalid arguments and configurations is refused, and no engine is left", function()
    for words, fn in pairs {
      ["'modl'"] = function() ps.initialize { modl = 1 } end,
      ["already exists"] = function() ps.initialize(gpt2.new "tiny") end,
      ["single process"] = function() ps.initialize { model_func = gpt2.new, local_rank = 2 } end,
      ["contradict"] = function() open { fp16 = { enabled = true }, bf16 = { enabled = true },
        optimizer = { type = "AdamW", params = { adam_w_mode = false } } } end,
      ["parameters have one type"] = function() open { fp16 = { enabled = true }, bf16 = { enabled = true } } end,
      ["plain memory has no budgets"] = function() open { memory = { kind = "plain", host = MIB } } end,
      ["did you mean"] = function() open { gradient_cliping = 1 } end,
      ["memory.disk.path"] = function() open { memory = { disk = { limit = MIB } } } end,
      ["no parameter of the model requires a gradient"] = function() open({}, function() return nn.GELU() end) end,
      ["fp64"] = function() open({}, function() return nn.Linear(4, 4, { dtype = "fp64" }) end) end,
      ["is on cpu, but the engine computes on sim"] = function()
        open({ device = "sim" }, function() return nn.Linear(4, 4, { device = "cpu" }) end)
      end,
    } do
      fails({ words }, fn)
      assert.equal(0, C.ps_engine_is_open(ctx), words)
    end
  end)
end)

describe("a step that fails in the middle of its update", function()
  local EIO = 5
  local x, y

  teardown(function() x, y = nil, nil end)
  after_each(function() C.ps_test_fail_io(-1, 0, 0) end)

  local memory

  -- Runs `body` under approximately the smallest budgets with which it succeeds. They are found from the engine's own
  -- errors, since a state is loaded while the failed step still holds memory, and its small tensors use a varying
  -- number of pages.
  local function fitted(body)
    memory = { host = 120 * KIB, disk = disk() }
    L.fit({ memory = memory }, function()
      local ok, problem = pcall(body)
      os.execute(("rm -f '%s'/*.safetensors"):format(folder))
      if ok then return end
      pcall(L.close_engine)                                -- an engine that is open in the middle of it
      error(problem, 0)
    end)
  end

  local function open(overlap)
    ps.manual_seed(2)
    local model, optimizer = ps.initialize { quiet = true, model_func = function()
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
          nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
      end, config = { plan_print = false, chunk_size = 1024, overlap_optimizer = overlap, prefetch = false,
        memory = memory } }
    local function loss() return ps.F.cross_entropy(model(x), y) end
    local function step()
      optimizer:zero_grad()
      model:backward(loss())
      optimizer:step()
    end
    local ok, problem = pcall(function() for _ = 1, 2 do step() end end)
    if not ok then
      model:close()
      error(problem, 0)
    end
    return model, optimizer, step, loss
  end

  local function files(name) return folder .. "/" .. name .. ".safetensors" end

  local function save(model, optimizer)
    ps.save(model:state_dict(), files "model")
    ps.save(optimizer:state_dict(model).tensors, files "optimizer")
    ps.checkpoints.save(files "whole", { model = model, optimizer = optimizer })
    return optimizer:state_dict(model).values
  end

  -- Loads a saved state in two halves, in both orders. `between` is called after the first half.
  local function load_parts(model, optimizer, values, between)
    local saved = ps.load(files "model", { lazy = true })
    model:load_state_dict(saved)
    saved:close()
    between()
    optimizer:load_state_dict { tensors = ps.load(files "optimizer"), values = values }
  end
  local function load_whole(model, optimizer)
    ps.checkpoints.load(files "whole", { model = model, optimizer = optimizer })
  end

  setup(function() x, y = ps.randn { 4, 16 }, ps.randint(0, 8, { 4 }, { dtype = "int32" }) end)

  for _, overlap in ipairs { false, true } do
    local where = overlap and "backward" or "optimizer:step()"
    local ends = overlap and "a state is loaded" or "a state is loaded or step() called again"
    it("is refused until " .. ends .. ", and cannot be saved: in " .. where, function()
      fitted(function()
        local model, optimizer, step = open(overlap)
        local before = L.state(model, optimizer)
        local values = save(model, optimizer)
        step()
        local after = L.state(model, optimizer)
        model:close()
        local torn, whole, again, ended = 0, 0, 0, false
        for nth = 0, 400 do
          local loss
          model, optimizer, step, loss = open(overlap)
          optimizer:zero_grad()
          local root = loss()
          if overlap then C.ps_test_fail_io(nth, 1e9, EIO) end
          local ok, problem = pcall(function()
            model:backward(root)
            if not overlap then
              -- Parameters that are read use the room that the first update needs, so the update has to fetch its
              -- chunks.
              for _, p in ipairs(model:parameters()) do p:norm():item() end
              C.ps_test_fail_io(nth, 1e9, EIO)
            end
            optimizer:step()
          end)
          C.ps_test_fail_io(-1, 0, 0)
          while C.ps_engine_settle(ctx) < 0 do end           -- errors of writes that were in progress
          if not ok and problem.name == "ENOMEM" then error(problem, 0) end
          ended = ok
          if ok then break end
          if not ok and not overlap and nth % 3 == 2 then      -- a second call updates the rest
            if engine_of(model).torn then again = again + 1 end
            assert.is_false(optimizer:step().skipped)
            assert.is_false(engine_of(model).torn)
            assert.is_nil(L.difference({ out = {}, state = after }, { out = {}, state = L.state(model, optimizer) }))
          elseif not engine_of(model).torn then
            whole = whole + 1
            assert.is_nil(L.difference({ out = {}, state = before }, { out = {}, state = L.state(model, optimizer) }))
          else
            torn = torn + 1
            local function refused(step_too)
              for _, use in ipairs {
                loss, function() model:backward(root) end, step_too and function() optimizer:step() end or loss,
                function() model:state_dict() end, function() optimizer:state_dict() end,
                function() ps.checkpoints.save(files "torn", { model = model, optimizer = optimizer }) end,
              } do
                fails({ "step 3 failed in its update (", tostring(problem):match("^[^\n]*"), "had been updated",
                  "load a checkpoint" }, use)
              end
            end
            refused(overlap)
            if not overlap then fails({ "call optimizer:step() again" }, function() optimizer:zero_grad() end) end
            if torn % 2 == 0 then
              load_whole(model, optimizer)
            else
              load_parts(model, optimizer, values, function() refused(true) end)
            end
            assert.is_nil(L.difference({ out = {}, state = before }, { out = {}, state = L.state(model, optimizer) }))
            step()
            assert.is_nil(L.difference({ out = {}, state = after }, { out = {}, state = L.state(model, optimizer) }))
          end
          model:close()
        end
        model:close()
        assert(ended and torn >= 2 and whole > 0 and (overlap or again >= 2),
          ("torn %d times, whole %d times, updated again %d times"):format(torn, whole, again))
      end)
    end)
  end

  it("cannot be abandoned after backward has updated", function()
    fitted(function()
      local model, optimizer, _, loss = open(true)
      model:backward(loss())
      fails({ "can no longer be abandoned", "call optimizer:step()", "overlap_optimizer = false" }, function()
        optimizer:zero_grad()
      end)
      optimizer:step()
      optimizer:zero_grad()
      model:close()
    end)
  end)

  it("leaves a torn model if a load abandons it after backward has updated, until both halves are loaded", function()
    fitted(function()
      local model, optimizer, _, loss = open(true)
      local halves = { model = {}, optimizer = optimizer:state_dict() }
      for name, t in pairs(model:state_dict()) do halves.model[name] = t:clone() end
      for _, first in ipairs { "model", "optimizer" } do
        local one, other = first == "model" and model or optimizer, first == "model" and optimizer or model
        model:backward(loss())
        one:load_state_dict(halves[first])
        fails({ "load a checkpoint, or states of both model and optimizer" }, function() model:backward(loss()) end)
        other:load_state_dict(halves[first == "model" and "optimizer" or "model"])
      end
      model:backward(loss())
      optimizer:step()
      model:close()
    end)
  end)
end)

describe("an assignment to an engine's field", function()
  for _, memory in ipairs { "plain", { host = MIB } } do
    it("assigns to its module, with memory = " .. tostring(type(memory) == "table" and "chunks" or memory), function()
      local Scaled = nn.class("Scaled", nn.Sequential)
      function Scaled:forward(x) return nn.Sequential.forward(self, x) * self.factor end
      local function open(factor)
        local model, optimizer = ps.initialize { quiet = true, model_func = function()
          local made = Scaled(nn.Linear(4, 4), nn.Linear(4, 4))
          made.factor = factor
          return made
        end, config = { optimizer = { type = "AdamW" }, plan_print = false, memory = memory, seed = 3 } }
        return model, function()
          optimizer:zero_grad()
          local loss = model(ps.ones { 2, 4 }):sum()
          model:backward(loss)
          optimizer:step()
          return loss:item()
        end
      end
      local model, step = open(2)
      local twice = step()
      model:close()
      model, step = open(1)
      model.factor = 2
      assert.same({ 2, 2, twice }, { model.factor, model.module.factor, step() })
      local function plus(self, n) return self.factor + n end
      model.plus = plus
      assert.equal(5, model:plus(3))
      model.plus = function(self, n) return self.factor - n end
      assert.equal(-1, model:plus(3))
      fails({ "engine_misuse_spec.lua", "model.backward belongs to the engine" }, function() model.backward = plus end)
      fails({ "takes a module, not a number" }, function() model[0] = 3 end)
      model[0] = nn.Linear(4, 4)
      assert.truthy(rawequal(model[0], model.module[0]))
      fails({ "0.weight is not a parameter of the engine" }, step)
      model:close()
    end)
  end
end)

describe("parameters that an engine does not train", function()
  for _, memory in ipairs { "plain", { host = MIB } } do
    it("are refused by name, with memory = " .. tostring(type(memory) == "table" and "chunks" or memory), function()
      local model, optimizer
      local function open()
        model, optimizer = ps.initialize { quiet = true, model_func = function()
          return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        end, config = { optimizer = { type = "AdamW" }, plan_print = false, memory = memory } }
      end
      local function step()
        optimizer:zero_grad()
        model:backward(model(ps.ones { 2, 4 }):sum())
        optimizer:step()
      end
      open()
      step()
      local before = model[0].weight:tolist()
      for _, target in ipairs { "bf16", "cpu", { dtype = "fp32" } } do
        fails({ "engine_misuse_spec.lua", "keep the dtype and the device of its configuration" }, function()
          model:to(target)
        end)
      end
      assert.equal("fp32", model[0].weight:dtype())
      nn.Linear(3, 3)                                      -- another module is not affected
      step()
      assert.not_same(before, model[0].weight:tolist())
      model[1].bias = nn.Parameter(ps.zeros { 4 })
      fails({ "1.bias is not a parameter of the engine", "would not be trained" }, step)
      fails({ "1.bias is not a parameter of the engine" }, step)
      model:close()
      open()
      model.module[0] = nn.Linear(4, 4)
      fails({ "0.weight is not a parameter of the engine" }, step)
      model:close()
      open()
      model.module:to("bf16")
      fails({ "0.weight is not a parameter of the engine" }, step)
      model:close()
      open()
      local frozen = nn.Parameter(ps.zeros { 4 })          -- parameters that are not trained are exempt
      frozen:requires_grad(false)
      model[1].bias = frozen
      step()
      model:close()
    end)

    it("train once they are thawed, with memory = " .. (type(memory) == "table" and "chunks" or memory), function()
      local model, optimizer = ps.initialize { quiet = true, model_func = function()
        local made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        made[0].weight:requires_grad(false)
        return made
      end, config = { optimizer = { type = "AdamW" }, plan_print = false, memory = memory } }
      local function step()
        optimizer:zero_grad()
        model:backward(model(ps.ones { 2, 4 }):sum())
        optimizer:step()
      end
      step()
      local at_first = model[0].weight:tolist()
      step()
      assert.same(at_first, model[0].weight:tolist())
      model[0].weight:requires_grad(true)
      step()
      assert.not_same(at_first, model[0].weight:tolist())
      model[0].weight:requires_grad(false)
      model[1].weight:requires_grad(false)                 -- frozen after ps.initialize, so it can be trained later
      step()
      local before = model[1].weight:tolist()
      model[1].weight:requires_grad(true)
      step()
      assert.not_same(before, model[1].weight:tolist())
      model:close()
    end)
  end
end)

describe("Ctrl-C", function()
  it("while the model is counted ends ps.initialize", function()
    local calls, path = 0, os.tmpname()
    os.remove(path)
    lfs.mkdir(path)
    local ok, problem = pcall(ps.initialize, { quiet = true, model_func = function()
      calls = calls + 1
      if calls == 1 then error("interrupted!", 0) end
      return nn.Linear(4, 4)
    end, config = { memory = { host = "64MiB", disk = { path = path } } } })
    lfs.rmdir(path)
    assert.is_false(ok)
    assert.matches("interrupted!", tostring(problem), 1, true)
    assert.equal(1, calls)
  end)
end)
