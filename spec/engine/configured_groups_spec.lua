-- SPDX-License-Identifier: BSD-3-Clause
-- Optimizers that a configuration and param_groups describe: aliases, schedules that change momentum, parameters
-- without elements, and settings that change between steps or with a checkpoint.
local ps = require "ps"
local check = require "spec.check_lib"
local config = require "ps.config"
local nn = ps.nn
local fails = check.fails

local function close()
  local state = ps.engine()
  if state then state.model:close() end
end

local function model_func() return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) end

local function open(optimizer, more)
  ps.manual_seed(3)
  local given = { quiet = true, model_func = model_func, config = { optimizer = optimizer, plan_print = false } }
  for key, value in pairs(more or {}) do
    if key == "scheduler" or key == "memory" then given.config[key] = value else given[key] = value end
  end
  if given.model then given.model_func = nil end
  return ps.initialize(given)
end

-- Returns the path of a folder that exists while the tests of the present `describe` run.
local function new_folder()
  local folder = os.tmpname() .. "d"
  setup(function() os.execute("mkdir -p " .. folder) end)
  teardown(function() os.execute("rm -rf " .. folder) end)
  return folder
end

local function step(model, opt, seed)
  ps.manual_seed(seed)
  model:backward(model(ps.randn { 4, 6 }):pow(2):mean())
  return opt:step()
end

describe("the optimizer of a group", function()
  after_each(close)

  it("may be an alias, as in optimizer.type", function()
    for alias, name in pairs { adafactor = "HuggingFaceAdafactor", sgd = "SGD", adamw_torch = "AdamW",
      FusedLamb = "LAMB", adamw_bnb_8bit = "AdamW8bit", lion_32bit = "Lion" } do
      for _, memory in ipairs { "plain", "chunk" } do
        local function is_matrix(_, p) return p:dim() == 2 end
        local groups = { { match = is_matrix, optimizer = alias, lr = 0.01 }, { lr = 0.02 } }
        local model, opt = open({ type = "Adam" }, { param_groups = groups, memory = memory == "plain" and memory
          or nil })
        assert.equal(name, opt.groups[1].kind)
        assert.equal("Adam", opt.groups[2].kind)
        assert.is_false(step(model, opt, 1).skipped)
        assert.equal(alias, groups[1].optimizer)
        model:close()
      end
    end
  end)
  it("is named together with its settings if a key is unknown", function()
    fails(function() open({ type = "AdamW" }, { param_groups = { { optimizer = "lion_32bit", epsilon = 1 } } }) end,
      "param_groups[1] has an unknown key 'epsilon'", "Lion: lr, betas, weight_decay")
    fails(function() open({ type = "AdamW" }, { param_groups = { { optimizer = "adamax" } } }) end,
      "param_groups[1].optimizer is 'adamax'; the optimizers are Adam, AdamW")
  end)
  it("is named if a setting changes between steps to a value that it cannot have", function()
    local model, opt = open({ type = "Muon", params = { lr = 0.01 } })
    step(model, opt, 1)
    local second = opt.groups[2]
    for key, value in pairs { lr = -1, weight_decay = "0.1", betas = { 0.9 } } do
      local old = second[key]
      second[key] = value
      fails(function() step(model, opt, 2) end, "AdamW, group 2: " .. key)
      second[key] = old
    end
    second.lr = nil
    fails(function() step(model, opt, 2) end, "AdamW, group 2: lr is nil")
    second.lr, opt.groups[1].kind = 0.01, "AdamW"
    fails(function() step(model, opt, 2) end, "group 1: kind is \"AdamW\", but the group was made with Muon")
    opt.groups[1].kind, opt.groups[1].nesterov = "Muon", "no"
    fails(function() step(model, opt, 2) end, "Muon, group 1: nesterov is \"no\", not a boolean")
    opt.groups[1].nesterov = false
    assert.is_false(step(model, opt, 2).skipped)
  end)
end)

describe("settings of Muon", function()
  local function settings(params, more)
    local model, opt = open({ type = "Muon", params = params }, more)
    local list = {}
    for i, group in ipairs(opt.groups) do
      list[i] = { group.kind, group.lr, group.weight_decay, group.eps, group.betas and group.betas[1] }
    end
    model:close()
    return list
  end

  -- DeepSpeed gives its groups with Adam lr, betas, eps and weight_decay of the configuration, and adam_lr as lr.
  it("are also those of its groups with AdamW, as in DeepSpeed", function()
    assert.same({ { "Muon", 0.01, 0.05, 1e-6 }, { "AdamW", 0.01, 0.05, 1e-6, 0.8 } },
      settings { lr = 0.01, weight_decay = 0.05, eps = 1e-6, betas = { 0.8, 0.9 } })
    assert.same({ { "Muon", 0.02, 0, 1e-7 }, { "AdamW", 0.003, 0, 1e-8, 0.9 } },
      settings { muon_lr = 0.02, adam_lr = 0.003 })
    local groups = { { match = function(_, p) return p:dim() == 2 end }, { optimizer = "AdamW", weight_decay = 0.3 } }
    assert.same({ { "Muon", 0.01, 0.05, 1e-7 }, { "AdamW", 0.01, 0.3, 1e-8, 0.8 } },
      settings({ lr = 0.01, weight_decay = 0.05, betas = { 0.8, 0.9 } }, { param_groups = groups }))
    groups[2] = { optimizer = "Lion" }
    assert.same({ { "Muon", 0.01, 0.05, 1e-7 }, { "Lion", 0.01, 0, nil, 0.9 } },
      settings({ lr = 0.01, weight_decay = 0.05, betas = { 0.8, 0.9 } }, { param_groups = groups }))
  end)

  it("have three coefficients that are finite numbers", function()
    for _, wrong in ipairs { { 1, 2 }, { 1, 2, 3, 4 }, { 1, 2, "3" }, { 1, 0 / 0, 3 }, {} } do
      fails(function() config.read { optimizer = { type = "Muon", params = { ns_coefficients = wrong } } } end,
        "optimizer.params.ns_coefficients", "a list of 3 numbers")
      fails(function() ps.optim.Muon(nn.Linear(2, 2, { bias = false }), { ns_coefficients = wrong }) end,
        "Muon: ns_coefficients", "a list of 3 numbers")
    end
    local opt = ps.optim.Muon(nn.Linear(2, 2, { bias = false }))
    opt.groups[1].ns_coefficients = { 1, 2 }
    fails(function() opt:step() end, "Muon, group 1: ns_coefficients")
  end)
end)

-- Returns the momentum or beta1 of each group before each of n steps.
local function momenta(optimizer, schedule, n, more)
  more = more or {}
  more.scheduler = schedule
  local model, opt = open(optimizer, more)
  local list = {}
  for i = 1, n do
    list[i] = {}
    for number, group in ipairs(opt.groups) do list[i][number] = group.betas and group.betas[1] or group.momentum end
    step(model, opt, i)
  end
  model:close()
  return list
end

describe("a configured schedule", function()
  after_each(close)
  local CYCLE = { max_lr = 0.1, total_steps = 10, pct_start = 0.4, anneal_strategy = "linear" }
  local function cycle(more)
    local params = {}
    for key, value in pairs(CYCLE) do params[key] = value end
    for key, value in pairs(more or {}) do params[key] = value end
    return { type = "OneCycleLR", params = params }
  end
  -- torch.optim.lr_scheduler.OneCycleLR with the options CYCLE, before steps 1 to 5: from 0.95 to 0.85 in 3 steps
  -- (0.4 * 10 - 1), and back in 6 steps.
  local WANT = { 0.95, 0.95 - 0.1 / 3, 0.95 - 0.2 / 3, 0.85, 0.85 + 0.1 / 6 }

  it("OneCycleLR changes the momentum of SGD, RMSprop and Muon, and beta1 of AdamW, as in PyTorch", function()
    for _, memory in ipairs { "chunk", "plain" } do
      for kind, groups in pairs { SGD = 1, RMSprop = 1, Muon = 2, AdamW = 1, Lion = 1 } do
        local got = momenta({ type = kind }, cycle(), 5, { memory = memory == "plain" and memory or nil })
        for i, want in ipairs(WANT) do
          assert.equal(groups, #got[i])
          for _, value in ipairs(got[i]) do assert.near(want, value, 1e-12, kind .. " before step " .. i) end
        end
      end
    end
    -- Groups with a momentum of 0, which have no buffer without the schedule.
    local got = momenta({ type = "SGD" }, cycle(), 5, { param_groups = { { momentum = 0, lr = 0.1 } } })
    for i, want in ipairs(WANT) do assert.near(want, got[i][1], 1e-12) end
    -- Groups of other optimizers, whatever the type of the configuration.
    local function is_bias(name) return name:find "bias" ~= nil end
    local two = { { match = is_bias, optimizer = "SGD" }, { optimizer = "AdamW" } }
    for _, kind in ipairs { "AdamW", "Adafactor" } do
      for _, memory in ipairs { "chunk", "plain" } do
        got = momenta({ type = kind }, cycle(), 5, { param_groups = two, memory = memory == "plain" and memory or nil })
        for i, want in ipairs(WANT) do
          assert.near(want, got[i][1], 1e-12)
          assert.near(want, got[i][2], 1e-12)
        end
      end
    end
    ps.manual_seed(3)
    local module = model_func()
    got = momenta(nil, cycle(), 5, { model = module, optimizer = ps.optim.SGD(module, { lr = 0.1 }) })
    for i, want in ipairs(WANT) do assert.near(want, got[i][1], 1e-12) end
  end)
  it("OneCycleLR refuses an optimizer with neither betas nor momentum, and says what has no effect", function()
    for _, given in ipairs { {}, { cycle_momentum = true } } do
      fails(function() open({ type = "Adafactor" }, { scheduler = cycle(given) }) end,
        "cycle_momentum", "Adafactor (group 1) has neither betas nor momentum; write false")
    end
    assert.is_truthy(config.read { optimizer = { type = "Adafactor" }, scheduler = cycle { cycle_momentum = false } })
    assert.is_truthy(config.read { optimizer = { type = "SGD" }, scheduler = cycle { cycle_momentum = true } })
    local _, notes = config.read { optimizer = { type = "AdamW" }, scheduler = cycle() }
    assert.equal("", table.concat(notes):match "cycle_momentum.*" or "")
    _, notes = config.read { optimizer = { type = "AdamW", params = { betas = { 0.8, 0.9 } } }, scheduler = cycle() }
    assert.matches("beta1 follows the cycle, between 0.85 and 0.95; the first number of optimizer.params.betas has no "
      .. "effect", table.concat(notes), 1, true)
    _, notes = config.read { optimizer = { type = "SGD", params = { momentum = 0.5 } }, scheduler = cycle() }
    assert.matches("the momentum follows the cycle, between 0.85 and 0.95; optimizer.params.momentum has no effect",
      table.concat(notes), 1, true)
  end)

  local folder = new_folder()

  it("begins at the step of a checkpoint that has no schedule, and says so", function()
    local path = folder .. "/without"
    local model, opt = open { type = "AdamW", params = { lr = 0.1 } }
    for i = 1, 3 do step(model, opt, i) end
    ps.checkpoints.save(path, { model = model, optimizer = opt, step = 3 })
    model:close()
    model, opt = open({ type = "AdamW", params = { lr = 0.1 } }, { scheduler = { type = "linear",
      params = { num_warmup_steps = 0, num_training_steps = 10 } } })
    local said = check.printed(function() ps.checkpoints.load(path, { model = model, optimizer = opt }) end)
    assert.matches("was saved without a schedule: sched.linear begins at its step 3, with the rate 0.07", said, 1, true)
    assert.near(0.07, opt.groups[1].lr, 1e-12)
    step(model, opt, 4)
    assert.near(0.06, opt.groups[1].lr, 1e-12)
  end)
  it("that does not change momentum sets it back after one that does", function()
    for kind, key in pairs { AdamW = "betas", SGD = "momentum" } do
      local path, params = folder .. "/" .. kind, { lr = 0.1 }
      local model, opt = open({ type = kind, params = params }, { scheduler = cycle() })
      for i = 1, 3 do step(model, opt, i) end
      ps.checkpoints.save(path, { model = model, optimizer = opt, step = 3 })
      model:close()
      for _, momentum in ipairs(kind == "SGD" and { 0, 0.9 } or { 0.9 }) do
        if kind == "SGD" then params.momentum = momentum end
        model, opt = open({ type = kind, params = params }, { quiet = false, scheduler = { type = "cosine",
          params = { num_warmup_steps = 0, num_training_steps = 10 } } })
        local said = check.printed(function() ps.checkpoints.load(path, { model = model, optimizer = opt }) end)
        assert.equal(momentum, key == "betas" and opt.groups[1].betas[1] or opt.groups[1].momentum)
        assert.not_matches("replace those of this run", said, 1, true)
        step(model, opt, 4)
        model:close()
      end
    end
    -- DeepSpeed's OneCycle also changes beta2.
    local path, params = folder .. "/both", { lr = 0.1, betas = { 0.8, 0.95 } }
    local model, opt = open({ type = "AdamW", params = params }, { scheduler = { type = "OneCycle", params = {
      cycle_min_lr = 0.01, cycle_max_lr = 0.1, cycle_first_step_size = 5 } } })
    step(model, opt, 1)
    assert.equal(0.99, opt.groups[1].betas[2])
    ps.checkpoints.save(path, { model = model, optimizer = opt, step = 1 })
    model:close()
    model, opt = open({ type = "AdamW", params = params }, { scheduler = { type = "constant" } })
    check.printed(function() ps.checkpoints.load(path, { model = model, optimizer = opt }) end)
    assert.same({ 0.8, 0.95 }, opt.groups[1].betas)
    -- OneCycleLR within a chain; beta2 is the checkpoint's.
    path = folder .. "/chain"
    model = model_func()
    opt = ps.optim.AdamW(model, { lr = 0.1, betas = { 0.9, 0.95 } })
    local chain = ps.sched.ChainedScheduler { ps.sched.OneCycleLR(opt, CYCLE) }
    for _ = 1, 3 do chain:step() end
    ps.checkpoints.save(path, { model = model, optimizer = opt, sched = chain, step = 3 })
    opt = ps.optim.AdamW(model, { lr = 0.1 })
    check.printed(function()
      ps.checkpoints.load(path, { model = model, optimizer = opt, sched = ps.sched.StepLR(opt, 5) })
    end)
    assert.same({ 0.9, 0.95 }, opt.groups[1].betas)
  end)
  it("of the script begins where it would be, in a chain, too, or where last_epoch says", function()
    local path, sched = folder .. "/script", ps.sched
    local model = model_func()
    local opt = ps.optim.AdamW(model, { lr = 0.1 })
    for i = 1, 3 do
      ps.manual_seed(i)
      model(ps.randn { 4, 6 }):pow(2):mean():backward()
      opt:step()
    end
    ps.checkpoints.save(path, { model = model, optimizer = opt, step = 3 })
    ps.checkpoints.save(path .. "s", { model = model, optimizer = opt, step = 3,
      sched = sched.StepLR(ps.optim.AdamW(model, { lr = 0.1 }), 1) })
    local function rates(make, from, load)
      opt = ps.optim.AdamW(model, { lr = 0.1 })
      local schedule, list = make(opt), {}
      if load then check.printed(ps.checkpoints.load, load, { model = model, optimizer = opt, sched = schedule })
      else for _ = 1, from do schedule:step() end end
      for i = 1, 4 do
        list[i] = ("%.12g"):format(opt.lr)
        schedule:step()
      end
      return list
    end
    local chains = {
      function(o) return sched.ChainedScheduler { sched.StepLR(o, 2, 0.5), sched.ExponentialLR(o, 0.9) } end,
      function(o) return sched.ChainedScheduler { sched.ConstantLR(o, 0.1, 5), sched.ExponentialLR(o, 0.9) } end,
      function(o) return sched.SequentialLR(o, { sched.ConstantLR(o, 0.1, 5), sched.ExponentialLR(o, 0.9) }, { 4 }) end,
    }
    for _, make in ipairs(chains) do
      assert.same(rates(make, 3), rates(make, nil, path))
      assert.same(rates(make, 3)[1], rates(function(o)
        local schedule = make(o)
        schedule:continue_at(3)
        return schedule
      end, 0)[1])
    end
    -- A checkpoint with another schedule, whose state has 0 steps.
    for _, make in ipairs(chains) do assert.same(rates(make, 0), rates(make, nil, path .. "s")) end
    opt = ps.optim.AdamW(model, { lr = 0.1 })
    local warm = sched.WarmupLR { optimizer = opt, warmup_num_steps = 100, last_batch_iteration = 49 }
    local want = opt.lr
    assert.matches("begins at its step 50", check.printed(ps.checkpoints.load, path, { model = model, optimizer = opt,
      sched = warm }), 1, true)
    assert.equal(want, opt.lr)
  end)
  it("in a chain continues from its own state with the same rates and bits", function()
    local sched = ps.sched
    local function made(make)
      local opt = ps.optim.SGD(nn.Linear(3, 3), { lr = 0.1 })
      return opt, make(opt)
    end
    local function rates(opt, schedule, n)
      local list = {}
      for i = 1, n do
        list[i] = ("%.17g"):format(opt.lr)
        schedule:step()
      end
      return list
    end
    local function half(n) return 1 / (n + 1) end
    local chains = {
      function(o) return sched.ChainedScheduler { sched.cosine(o, 2, 12), sched.ExponentialLR(o, 0.9) } end,
      function(o) return sched.ChainedScheduler { sched.LambdaLR(o, half), sched.ExponentialLR(o, 0.9) } end,
      function(o) return sched.ChainedScheduler { sched.LinearLR(o), sched.ExponentialLR(o, 0.9) } end,
      function(o) return sched.ChainedScheduler { sched.CosineAnnealingLR(o, 9), sched.MultiplicativeLR(o, half) } end,
      function(o) return sched.ChainedScheduler { sched.ChainedScheduler { sched.ExponentialLR(o, 0.9),
        sched.StepLR(o, 2) }, sched.LinearLR(o) } end,
    }
    check.printed(function()
      for k, make in ipairs(chains) do
        for steps = 0, 6 do
          local first, chain = made(make)
          for _ = 1, steps do chain:step() end
          local second, other = made(make)
          second:load_state_dict(first:state_dict())
          other:load_state_dict(chain:state_dict())
          assert.same(rates(first, chain, 5), rates(second, other, 5), k .. " after " .. steps)
          -- continue_at repeats the steps, also of a chain that has made some.
          first, chain = made(make)
          for _ = 1, steps do chain:step() end
          other:continue_at(steps)
          assert.same(rates(first, chain, 3), rates(second, other, 3), k .. " again at " .. steps)
        end
      end
    end)
    -- Two schedules of one optimizer that are loaded one after the other.
    local function two(o) return { sched.LambdaLR(o, half), sched.ExponentialLR(o, 0.9) } end
    local first, list = made(two)
    check.printed(function()
      for _ = 1, 3 do for _, schedule in ipairs(list) do schedule:step() end end
      local second, others = made(two)
      second:load_state_dict(first:state_dict())
      for i, schedule in ipairs(others) do schedule:load_state_dict(list[i]:state_dict()) end
      for _ = 1, 3 do
        assert.equal(first.lr, second.lr)
        for i = 1, 2 do
          list[i]:step()
          others[i]:step()
        end
      end
    end)
    local second, others
    -- Chains of other parts, and parts with last_epoch.
    local function chain_of(...)
      local names = { ... }
      return function(o)
        local parts = {}
        for i, name in ipairs(names) do parts[i] = sched[name](o, name == "StepLR" and 2 or 0.9) end
        return sched.ChainedScheduler(parts)
      end
    end
    for _, names in ipairs { { "StepLR", "ExponentialLR" }, { "ExponentialLR" } } do
      first, list = made(chain_of("ExponentialLR", "StepLR"))
      for _ = 1, 3 do list:step() end
      local want, reference = made(chain_of(unpack(names)))
      for _ = 1, 3 do reference:step() end
      second, others = made(chain_of(unpack(names)))
      second:load_state_dict(first:state_dict())
      check.printed(others.load_state_dict, others, list:state_dict())
      assert.same(rates(want, reference, 3), rates(second, others, 3))
    end
    local _, late = made(function(o)
      return sched.ChainedScheduler { sched.StepLR { optimizer = o, step_size = 2, gamma = 0.5, last_epoch = 4 },
        sched.ExponentialLR { optimizer = o, gamma = 0.9, last_epoch = 4 } }
    end)
    assert.near(0.1 * 0.5 ^ 2 * 0.9 ^ 5, late:get_last_lr()[1], 1e-15)
    late:step()
    assert.near(0.1 * 0.5 ^ 3 * 0.9 ^ 6, late:get_last_lr()[1], 1e-15)
    fails(function()
      made(function(o) return sched.ChainedScheduler { sched.StepLR { optimizer = o, step_size = 2, last_epoch = 4 },
        sched.ExponentialLR(o, 0.9) } end)
    end, "schedulers[1] begins at step 5, but schedulers[2] at step 0")
  end)
  it("sets betas back over several runs, with a run without a schedule in between", function()
    local path = folder .. "/several"
    local function run(kind, params, scheduler, load)
      local model, opt = open({ type = kind, params = params }, { scheduler = scheduler, quiet = false })
      local said = load and check.printed(ps.checkpoints.load, path, { model = model, optimizer = opt }) or ""
      for i = 1, 2 do step(model, opt, i) end
      local group = opt.groups[1]
      ps.checkpoints.save(path, { model = model, optimizer = opt, step = 2 })
      model:close()
      return group, said
    end
    local cosine = { type = "cosine", params = { num_warmup_steps = 0, num_training_steps = 10 } }
    local cycle_2 = { type = "OneCycle", params = { cycle_min_lr = 0.01, cycle_max_lr = 0.1,
      cycle_first_step_size = 5 } }
    local params = { lr = 0.1, betas = { 0.8, 0.95 } }
    run("AdamW", params, cycle_2)
    local group = run("AdamW", params, cycle(), true)
    assert.equal(0.95, group.betas[2])
    local again, said = run("AdamW", params, nil, true)
    assert.same({ 0.8, 0.95 }, again.betas)
    assert.not_matches("betas", said:gsub("the saved schedule[^\n]*", ""), 1, true)
    group = run("AdamW", params, cosine, true)
    assert.same({ 0.8, 0.95 }, group.betas)
    run("SGD", { lr = 0.1 }, cycle())
    group = run("SGD", { lr = 0.1 }, nil, true)
    assert.equal(0, group.momentum)
    -- The saved settings are checked together with those that the run keeps.
    run("SGD", { lr = 0.1, momentum = 0.9, nesterov = true }, cycle())
    fails(function() run("SGD", { lr = 0.1 }, nil, true) end,
      "group 1 of the saved optimizer: nesterov needs a momentum above 0")
  end)
  it("of an optimizer that ps.initialize adopts continues from its initial rate", function()
    for _, memory in ipairs { "chunk", "plain" } do
      for _, make in ipairs { function(o) return ps.sched.LambdaLR(o, function(n) return n / 4 end) end,
        function(o) return ps.sched.LinearLR(o, 0.25, 1, 3) end } do
        local alone = ps.optim.SGD(nn.Linear(3, 3), { lr = 0.1 })
        local want = make(alone)
        local module = model_func()
        local opt = ps.optim.SGD(module, { lr = 0.1 })
        local schedule = make(opt)
        local model = open(nil, { model = module, optimizer = opt, memory = memory == "plain" and memory or nil })
        assert.equal("", check.printed(function()
          for i = 1, 5 do
            assert.equal(alone.lr, opt.lr)
            step(model, opt, i)
            schedule:step()
            want:step()
          end
        end))
        model:close()
      end
    end
  end)
  it("is refused if the given optimizer already has one", function()
    local module = model_func()
    local optimizer = ps.optim.AdamW(module, { lr = 0.1 })
    ps.sched.StepLR(optimizer, 5)
    fails(function() open(nil, { model = module, optimizer = optimizer, scheduler = cycle() }) end,
      "the optimizer already has a schedule of ps.sched, and the configuration has the schedule OneCycleLR")
  end)
end)

describe("settings of a checkpoint", function()
  after_each(close)
  local folder = new_folder()

  local function saved(params, scheduler)
    local path = folder .. "/run"
    local model, opt = open({ type = "AdamW", params = params }, { scheduler = scheduler })
    step(model, opt, 1)
    opt.groups[1].lr = opt.groups[1].lr / 2
    ps.checkpoints.save(path, { model = model, optimizer = opt, step = 1 })
    model:close()
    return path
  end
  local function loaded(path, params, scheduler)
    local model, opt = open({ type = "AdamW", params = params }, { scheduler = scheduler, quiet = false })
    local said = check.printed(function() ps.checkpoints.load(path, { model = model, optimizer = opt }) end)
    local group = opt.groups[1]
    model:close()
    return group, said
  end

  it("replace those of the run, and a note says so", function()
    local group, said = loaded(saved { lr = 0.1, weight_decay = 0.3 }, { lr = 0.2, weight_decay = 0.01 })
    assert.same({ 0.05, 0.3 }, { group.lr, group.weight_decay })
    assert.matches("the settings of the saved optimizer replace those of this run (group 1: lr is 0.05, not 0.2; "
      .. "group 1: weight_decay is 0.3, not 0.01)", said, 1, true)
  end)
  it("are noted again by later runs, and beta2 next to a schedule of beta1", function()
    local path = saved { lr = 0.1 }
    local model, opt = open { type = "AdamW", params = { lr = 0.2 } }
    check.printed(ps.checkpoints.load, path, { model = model, optimizer = opt })
    ps.checkpoints.save(path, { model = model, optimizer = opt, step = 2 })
    model:close()
    local _, said = loaded(path, { lr = 0.2 })
    assert.matches("(group 1: lr is 0.05, not 0.2)", said, 1, true)
    local cycle = { type = "OneCycleLR", params = { max_lr = 0.1, total_steps = 10 } }
    local group
    group, said = loaded(saved({ lr = 0.1, betas = { 0.9, 0.95 } }, cycle), { lr = 0.1, betas = { 0.9, 0.999 } }, cycle)
    assert.equal(0.95, group.betas[2])
    assert.matches("group 1: betas is ", said, 1, true)
  end)
  it("are not noted for an adopted optimizer with a configured schedule, and noted in PyTorch's form", function()
    local path = folder .. "/adopted"
    local linear = { type = "linear", params = { num_warmup_steps = 2, num_training_steps = 20 } }
    local cycle = { type = "OneCycleLR", params = { max_lr = 0.1, total_steps = 10 } }
    for _, scheduler in ipairs { linear, cycle } do
      for run = 1, 3 do
        local module = model_func()
        local opt = ps.optim.AdamW(module, { lr = 0.1 })
        local model = open(nil, { model = module, optimizer = opt, scheduler = scheduler, quiet = false })
        local said = run > 1 and check.printed(ps.checkpoints.load, path, { model = model, optimizer = opt }) or ""
        assert.equal("", said)
        step(model, opt, run)
        ps.checkpoints.save(path, { model = model, optimizer = opt, step = run })
        model:close()
      end
    end
    local other = ps.optim.AdamW(model_func(), { lr = 0.3, weight_decay = 0.2 }):torch_state_dict()
    local model, opt = open({ type = "AdamW", params = { lr = 0.1 } }, { quiet = false })
    local said = check.printed(opt.load_state_dict, opt, other)
    assert.matches("group 1: lr is 0.3, not 0.1; group 1: weight_decay is 0.2, not 0", said, 1, true)
    model:close()
  end)
  it("are not noted for a schedule of the script", function()
    for _, adopted in ipairs { false, true } do
      local path, texts = folder .. "/own", {}
      for run = 1, 2 do
        local module = model_func()
        local model, opt, schedule
        if adopted then
          opt = ps.optim.AdamW(module, { lr = 0.1 })
          schedule = ps.sched.OneCycleLR(opt, { max_lr = 0.1, total_steps = 10 })
          model = ps.initialize { model = module, optimizer = opt, config = { plan_print = false } }
        else
          model, opt = open({ type = "AdamW", params = { lr = 0.1 } }, { quiet = false })
          schedule = ps.sched.OneCycleLR(opt, { max_lr = 0.1, total_steps = 10 })
        end
        local parts = { model = model, optimizer = opt, sched = schedule, step = 3 }
        if run == 2 then texts[2] = check.printed(ps.checkpoints.load, path, parts) end
        for i = 1, 3 do
          step(model, opt, i)
          schedule:step()
        end
        if run == 1 then ps.checkpoints.save(path, parts) end
        model:close()
      end
      assert.equal("", texts[2])
    end
  end)
  it("are not noted if the run was made with the same, or if a schedule sets the rate", function()
    local group, said = loaded(saved { lr = 0.1, weight_decay = 0.3 }, { lr = 0.1, weight_decay = 0.3 })
    assert.equal(0.05, group.lr)
    assert.equal("", said)
    local linear = { type = "linear", params = { num_warmup_steps = 0, num_training_steps = 10 } }
    group, said = loaded(saved({ lr = 0.1 }, linear), { lr = 0.2 }, linear)
    assert.near(0.18, group.lr, 1e-12)
    assert.equal("", said)
  end)
end)

describe("a momentum of 0", function()
  after_each(close)
  local path = new_folder() .. "/run"

  it("in a checkpoint continues without the buffer, and with it if it is there", function()
    for _, memory in ipairs { "chunk", "plain" } do
      local function run(momentum)
        return open({ type = "SGD", params = { lr = 0.1, momentum = momentum } },
          { memory = memory == "plain" and memory or nil })
      end
      local model, opt = run(0)
      step(model, opt, 1)
      ps.checkpoints.save(path, { model = model, optimizer = opt, step = 1 })
      model:close()
      model, opt = run(0.9)
      ps.checkpoints.load(path, { model = model, optimizer = opt })
      assert.equal(0, opt.groups[1].momentum)
      step(model, opt, 2)
      model:close()
    end
    local module = model_func()
    local opt = ps.optim.SGD(module, { lr = 0.1, momentum = 0.9 })
    local function one(seed)
      ps.manual_seed(seed)
      module(ps.randn { 4, 6 }):pow(2):mean():backward()
      opt:step()
      opt:zero_grad()
    end
    one(1)
    opt.groups[1].momentum = 0
    local saved = opt:state_dict(module)
    assert.is_truthy(saved.tensors["0.weight.momentum_buffer"])
    opt:load_state_dict(saved, module)
    assert.equal(1, opt:torch_state_dict().state[0].step)
    assert.is_truthy(opt:torch_state_dict().state[0].momentum_buffer)
    opt = ps.optim.SGD(module, { lr = 0.1 })
    one(2)
    saved = opt:state_dict(module)
    opt = ps.optim.SGD(module, { lr = 0.1, momentum = 0.9 })
    opt:load_state_dict(saved, module)
    assert.equal(0, opt.groups[1].momentum)
    saved.values.groups[1].momentum = "0.9"
    fails(function() opt:load_state_dict(saved, module) end, "has no momentum_buffer for parameter 0.weight")
  end)
  it("that a script changes needs buffers, also with clipping and accumulation", function()
    local model, opt = ps.initialize { quiet = true, model_func = model_func, config = { optimizer = { type = "SGD" },
      gradient_clipping = 1, gradient_accumulation_steps = 2, plan_print = false } }
    opt.groups[1].momentum = 0.9
    fails(function()
      for _ = 1, 2 do model:backward(model(ps.randn { 4, 6 }):pow(2):mean()) end
      opt:step()
    end, "SGD, group 1: momentum is 0.9, but no group needed states")
  end)
end)

describe("a parameter without elements", function()
  after_each(close)
  local function make()
    local model = model_func()
    model.empty = nn.Parameter(ps.zeros { 0, 4 })
    return model
  end
  it("is refused by name in chunks, and accepted in plain memory", function()
    fails(function() open({ type = "AdamW" }, { model_func = make }) end, "parameter empty [0, 4] has no elements",
      'memory = "plain"')
    local model, opt = open({ type = "AdamW" }, { model_func = make, memory = "plain" })
    assert.is_false(step(model, opt, 1).skipped)
  end)
end)
