-- SPDX-License-Identifier: BSD-3-Clause
-- Schedules, compared with numbers of DeepSpeed's own (commit edaa72212, one value per step, the first before any
-- step).
local config = require "ps.config"
local sched = require "ps.optim.sched"

-- Returns the fields of an optimizer that a schedule needs.
local function optimizer(lr)
  return { defaults = { lr = lr }, groups = { { betas = { 0.9, 0.999 } } }, set_lr = function(self, value)
    self.lr = value
  end }
end

local function close(want, got, what)
  assert(math.abs(want - got) <= 1e-12 * math.max(1e-3, math.abs(want)),
    ("%s: %.17g, DeepSpeed has %.17g"):format(what, got, want))
end

-- DeepSpeed's rates for each case: name, optimizer's rate, params, rates, beta1s.
local CASES = {
  { "WarmupLR", 0.01, { warmup_num_steps = 4 },
    { 0, 0, 0.005, 0.0079248125036057819, 0.01, 0.01, 0.01, 0.01 } },
  { "WarmupLR", 0.01, { warmup_num_steps = 4, warmup_min_lr = 0.001, warmup_max_lr = 0.002, warmup_type = "linear" },
    { 0.001, 0.001, 0.00125, 0.0015, 0.00175, 0.002, 0.002 } },
  { "WarmupLR", 0.01, { warmup_num_steps = 1 }, { 0, 0, 0.01, 0.01 } },
  { "WarmupDecayLR", 0.01, { total_num_steps = 10, warmup_num_steps = 4, warmup_min_lr = 0.0005 },
    { 0.0005, 0.0005, 0.00075, 0.00089624062518028902, 0.001, 0.001, 0.00091666666666666676, 0.00083333333333333328,
      0.00075, 0.00066666666666666664, 0.00058333333333333338, 0.0005, 0.0005, 0.0005 } },
  { "WarmupDecayLR", 0.01, { total_num_steps = 5, warmup_num_steps = 5, warmup_type = "linear" },
    { 0, 0, 0.0002, 0.0004, 0.0006, 0.0008, 0, 0, 0 } },
  { "WarmupCosineLR", 0.02, { total_num_steps = 10, warmup_num_steps = 4, warmup_min_ratio = 0.1 },
    { 0, 0.002, 0.011, 0.016264662506490408, 0.02, 0.018660388012440604, 0.0150005, 0.010001, 0.0050015,
      0.0013416119875593975, 2e-06, 2e-06, 2e-06 } },
  { "WarmupCosineLR", 0.02, { total_num_steps = 10, warmup_num_steps = 4, cos_min_ratio = 0.2, warmup_type = "linear" },
    { 0, 0, 0.005, 0.01, 0.015, 0.018928203230275515, 0.016, 0.012, 0.008, 0.0050717967697244907, 0.004, 0.004 } },
  { "OneCycle", 0.01, { cycle_min_lr = 0.001, cycle_max_lr = 0.01, cycle_first_step_size = 4,
    cycle_second_step_size = 5, decay_step_size = 2, decay_lr_rate = 0.5, decay_mom_rate = 0.01 },
    { 0.001, 0.00325, 0.0055, 0.00775, 0.01, 0.0082, 0.0064, 0.0046, 0.0028, 0.001, 0.0008, 0.00066666666666666664,
      0.00057142857142857147, 0.0005 },
    { 0.8, 0.875, 0.85, 0.825, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.9045, 0.909, 0.9135, 0.918 } },
  { "OneCycle", 0.01, { cycle_min_lr = 0.001, cycle_max_lr = 0.01, cycle_first_step_size = 6,
    cycle_first_stair_count = 3 },
    { 0.001, 0.001, 0.004, 0.004, 0.007, 0.007, 0.01, 0.007, 0.007, 0.004, 0.004, 0.001, 0.001, 0.001 } },
  { "OneCycle", 0.01, { cycle_min_lr = 0.001, cycle_max_lr = 0.01, cycle_first_step_size = 3,
    cycle_second_step_size = 6, cycle_second_stair_count = 2, cycle_momentum = false },
    { 0.001, 0.004, 0.007, 0.01, 0.0055, 0.0055, 0.0055, 0.001, 0.001, 0.001, 0.001, 0.001 } },
  { "LRRangeTest", 0.01, { lr_range_test_step_size = 3, lr_range_test_step_rate = 2 },
    { 0.001, 0.0016666666666666666, 0.0023333333333333331, 0.003, 0.0036666666666666666, 0.004333333333333334 } },
  { "LRRangeTest", 0.01, { lr_range_test_step_size = 3, lr_range_test_staircase = true },
    { 0.001, 0.001, 0.001, 0.002, 0.002, 0.002, 0.003, 0.003 } },
}

describe("DeepSpeed's schedules", function()
  it("have DeepSpeed's rates and momentum, read from a configuration", function()
    for _, case in ipairs(CASES) do
      local name, lr, params, rates, beta1s = unpack(case)
      local cfg = config.read { optimizer = { params = { lr = lr } }, scheduler = { type = name, params = params } }
      local opt = optimizer(lr)
      local schedule = sched.from_config(cfg.scheduler, opt)
      for i, rate in ipairs(rates) do
        close(rate, opt.lr, ("%s, step %d"):format(name, i - 1))
        if beta1s then close(beta1s[i], opt.groups[1].betas[1], ("%s, beta1 of step %d"):format(name, i - 1)) end
        schedule:step()
      end
      local free = params.cycle_momentum == false or name ~= "OneCycle"
      assert.equal(free and 0.999 or 0.99, opt.groups[1].betas[2])
    end
  end)

  it("continue from their state", function()
    for _, case in ipairs(CASES) do
      local name, lr, params, rates = unpack(case)
      local function make(opt)
        local options = { optimizer = opt }
        for key, value in pairs(params) do options[key] = value end
        return sched[name](options)
      end
      local first = make(optimizer(lr))
      for _ = 1, 3 do first:step() end
      local saved = first:state_dict()
      local opt = optimizer(lr)
      opt.lr = 7                                       -- a loaded optimizer's current rate is not the base rate
      local second = make(opt)
      second:load_state_dict(saved)
      close(rates[4], opt.lr, name)
      second:step()
      if rates[5] then close(rates[5], opt.lr, name) end
    end
  end)

  it("refuse invalid arguments", function()
    assert.has_error(function() sched.WarmupDecayLR { optimizer = optimizer(1) } end,
      "sched.WarmupDecayLR needs total_num_steps, a number")
    assert.has_error(function() sched.WarmupLR { optimizer = optimizer(1), warmup_type = "cubic" } end)
    assert.has_error(function() sched.WarmupLR {} end)
    assert.has_error(function() sched.WarmupLR() end)
    assert.has_error(function() sched.OneCycle() end)
    assert.has_error(function() sched.LRRangeTest() end)
    assert.has_error(function() sched.WarmupLR { optimizer = optimizer(1) }:load_state_dict { name = "OneCycle" } end)
    assert.has_error(function() sched.from_config({ type = "Other", params = {} }, optimizer(1)) end)
  end)

  it("end after their warm-up", function()
    for name, keys in pairs { WarmupDecayLR = { "warmup_num_steps", "total_num_steps" },
      WarmupCosineLR = { "warmup_num_steps", "total_num_steps" }, warmup_cosine = { "warmup", "total" },
      warmup_linear = { "warmup", "total" } } do
      local opt = optimizer(0.5)
      local options = { optimizer = opt, [keys[1]] = 9, [keys[2]] = 8, max_lr = keys[1] == "warmup" and 1 or nil }
      assert.has_error(function() sched[name](options) end,
        ("sched.%s: %s is 9; it must be at most %s, which is 8"):format(name, keys[1], keys[2]))
      options[keys[2]] = 9
      sched[name](options)
    end
    assert.has_error(function() sched.WarmupDecayLR { optimizer = optimizer(1), total_num_steps = 8 } end,
      "sched.WarmupDecayLR: warmup_num_steps is 1000 (the default); it must be at most total_num_steps, which is 8")
  end)

  it("exist in addition to psluajit's own", function()
    local cfg = config.read { scheduler = { type = "warmup_cosine", params = { total = 10, warmup = 2 } } }
    local opt = optimizer(1e-3)
    sched.from_config(cfg.scheduler, opt)
    close(5e-4, opt.lr, "warmup_cosine")
    cfg = config.read { scheduler = { type = "constant" } }
    sched.from_config(cfg.scheduler, opt)
    close(1e-3, opt.lr, "constant")
  end)
end)

describe("PyTorch's form of a schedule's call", function()
  local nn, optim = require "ps.nn", require "ps.optim"
  local adam
  before_each(function() adam = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 }) end)

  -- Name -> the positional arguments, and the same arguments as options.
  local FORMS = {
    StepLR = { { 2, 0.25, 0 }, { step_size = 2, gamma = 0.25, last_epoch = 0 } },
    MultiStepLR = { { { 1, 3 }, 0.5 }, { milestones = { 1, 3 }, gamma = 0.5 } },
    ExponentialLR = { { 0.75 }, { gamma = 0.75 } },
    CosineAnnealingLR = { { 4, 0.125 }, { T_max = 4, eta_min = 0.125 } },
    LambdaLR = { { function(n) return 1 / (n + 1) end }, { lr_lambda = function(n) return 1 / (n + 1) end } },
    WarmupLR = { { 0.1, 0.4, 4, "linear" },
      { warmup_min_lr = 0.1, warmup_max_lr = 0.4, warmup_num_steps = 4, warmup_type = "linear" } },
    WarmupDecayLR = { { 6, 0.1, 0.4, 3, "linear", 0 }, { total_num_steps = 6, warmup_min_lr = 0.1, warmup_max_lr = 0.4,
      warmup_num_steps = 3, warmup_type = "linear", last_batch_iteration = 0 } },
    WarmupCosineLR = { { 6, 0.5, 3, 0.25, "linear" }, { total_num_steps = 6, warmup_min_ratio = 0.5,
      warmup_num_steps = 3, cos_min_ratio = 0.25, warmup_type = "linear" } },
    OneCycle = { { 0.1, 0.5, 0.5, 3, 2, 0, 0, 1, true, 0.7, 0.8, 0.1 }, { cycle_min_lr = 0.1, cycle_max_lr = 0.5,
      decay_lr_rate = 0.5, cycle_first_step_size = 3, cycle_second_step_size = 2, cycle_first_stair_count = 0,
      cycle_second_stair_count = 0, decay_step_size = 1, cycle_momentum = true, cycle_min_mom = 0.7,
      cycle_max_mom = 0.8, decay_mom_rate = 0.1 } },
    CosineAnnealingWarmRestarts = { { 2, 2, 0.125 }, { T_0 = 2, T_mult = 2, eta_min = 0.125 } },
    ConstantLR = { { 0.5, 3 }, { factor = 0.5, total_iters = 3 } },
    LinearLR = { { 0.5, 0.75, 3 }, { start_factor = 0.5, end_factor = 0.75, total_iters = 3 } },
    PolynomialLR = { { 6, 2 }, { total_iters = 6, power = 2 } },
    OneCycleLR = { { 0.5, 8, nil, nil, 0.5, "linear", true, 0.7, 0.8, 10, 20, true }, { max_lr = 0.5, total_steps = 8,
      pct_start = 0.5, anneal_strategy = "linear", base_momentum = 0.7, max_momentum = 0.8, div_factor = 10,
      final_div_factor = 20, three_phase = true } },
    constant_with_warmup = { { 3 }, { num_warmup_steps = 3 } },
    linear = { { 2, 6 }, { num_warmup_steps = 2, num_training_steps = 6 } },
    cosine = { { 2, 6, 1.5 }, { num_warmup_steps = 2, num_training_steps = 6, num_cycles = 1.5 } },
    cosine_with_restarts = { { 1, 7, 2 }, { num_warmup_steps = 1, num_training_steps = 7, num_cycles = 2 } },
    polynomial = { { 1, 6, 0.1, 2 }, { num_warmup_steps = 1, num_training_steps = 6, lr_end = 0.1, power = 2 } },
    inverse_sqrt = { { 2, 3 }, { num_warmup_steps = 2, timescale = 3 } },
    cosine_with_min_lr = { { 1, 6, 0.5, -1, nil, 0.25 }, { num_warmup_steps = 1, num_training_steps = 6,
      num_cycles = 0.5, min_lr_rate = 0.25 } },
    cosine_warmup_with_min_lr = { { 3, 6, 0.5, -1, 0.125, nil, 0.5 }, { num_warmup_steps = 3, num_training_steps = 6,
      min_lr = 0.125, warmup_lr_rate = 0.5 } },
    warmup_stable_decay = { { 2, 3, 7, nil, "cosine", "1-sqrt", 0.25 }, { num_warmup_steps = 2, num_decay_steps = 3,
      num_training_steps = 7, warmup_type = "cosine", decay_type = "1-sqrt", min_lr_ratio = 0.25 } },
    LRRangeTest = { { 0.125, 2, 3, true }, { lr_range_test_min_lr = 0.125, lr_range_test_step_size = 2,
      lr_range_test_step_rate = 3, lr_range_test_staircase = true } },
  }

  -- Functions that are tested elsewhere.
  local ELSEWHERE = { from_config = true, get_scheduler = true, ReduceLROnPlateau = true, reduce_lr_on_plateau = true,
    SequentialLR = true, MultiplicativeLR = true, ChainedScheduler = true }

  -- Returns the rates and beta1 of some steps.
  local function course(schedule)
    local list = {}
    for n = 1, 8 do
      list[n] = ("%.17g %.17g"):format(adam.lr, adam.groups[1].betas[1])
      schedule:step()
    end
    return list
  end

  it("has the rates of the same options by name", function()
    for name, form in pairs(FORMS) do
      local options = { optimizer = adam }
      for key, value in pairs(form[2]) do options[key] = value end
      local want = course(sched[name](options))
      adam = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
      assert.same(want, course(sched[name](adam, unpack(form[1], 1, table.maxn(form[1])))), name)
      adam = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
      assert.same(want, course(sched[name](adam, form[2])), name)
      adam = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
    end
    local want = course(sched.StepLR(adam, 2, 0.25))
    adam = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
    assert.same(want, course(sched.StepLR(adam, 2, { gamma = 0.25 })))
  end)

  it("exists for every schedule of PyTorch and DeepSpeed, and by name for psluajit's", function()
    for name, make in pairs(sched) do
      if not FORMS[name] and not ELSEWHERE[name] then
        make(adam, { max_lr = 0.5, total = name ~= "constant" and 4 or nil })
        local ok, e = pcall(make, adam, 0.5, 4)
        assert.False(ok)
        assert.matches(("sched.%s takes its numbers by name, as in sched.%s { optimizer = optimizer, max_lr"):format(
          name, name), tostring(e), 1, true)
      end
    end
  end)

  it("refuses other calls", function()
    local function refused(text, fn)
      local ok, e = pcall(fn)
      assert.False(ok, text)
      assert.matches(text, tostring(e), 1, true)
    end
    refused("sched.StepLR needs step_size, a whole", function() sched.StepLR(adam) end)
    refused("sched.StepLR(optimizer, step_size, gamma, last_epoch) has no 5th argument; it was given true",
      function() sched.StepLR(adam, 1, 0.5, -1, true) end)
    refused("sched.StepLR: gamma is given twice", function() sched.StepLR(adam, 1, 0.5, { gamma = 0.5 }) end)
    refused("sched.StepLR: the optimizer is the first argument and an option",
      function() sched.StepLR(adam, { optimizer = adam, step_size = 1 }) end)
    refused("sched.StepLR: gamma", function() sched.StepLR(adam, 1, "half") end)
    refused("sched.StepLR: the first argument is not an optimizer", function() sched.StepLR(nn.Linear(2, 2), 1) end)
    refused("sched.StepLR: the first argument is not an optimizer",
      function() sched.StepLR({ optimizer = adam, step_size = 1 }, 0.5) end)
    refused("sched.LRRangeTest: lr_range_test_staircase", function() sched.LRRangeTest(adam, 1, 2, 3, 4) end)
  end)
end)

describe("a schedule", function()
  local nn, optim = require "ps.nn", require "ps.optim"
  local adam
  before_each(function() adam = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 }) end)

  local function problem(fn, ...)
    local ok, why = pcall(fn, ...)
    assert.False(ok)
    return tostring(why)
  end

  local printed = require("spec.check_lib").printed

  it("that begins later in a SequentialLR starts as in PyTorch", function()
    local function half() return 0.5 end
    for want, make in pairs {
      ["0.5 0.25 0.125 0.0625 0.03125"] = function(o)
        return { sched.LinearLR(o, 0.5, 1, 2), sched.MultiplicativeLR(o, half) }, { 1 }
      end,
      ["1 0.333333 0.0833333 0.0416667 0.0277778"] = function(o)
        return { sched.MultiplicativeLR(o, function(n) return 1 / (n + 2) end),
          sched.MultiplicativeLR(o, function(n) return 1 - 1 / (n + 2) end) }, { 3 }
      end,
      ["1 0.5 1 1 0.1 0.05 0.025"] = function(o)
        return { sched.MultiplicativeLR(o, half), sched.StepLR(o, 2), sched.MultiplicativeLR(o, half) }, { 2, 5 }
      end,
      ["1 0.5 0.25"] = function(o) return { sched.StepLR(o, 2), sched.MultiplicativeLR(o, half) }, { 0 } end,
      ["1 1 0.1 1 1"] = function(o) return { sched.StepLR(o, 2), sched.ConstantLR(o, 0.5, 0) }, { 3 } end,
      ["0.5 0.5 0.5"] = function(o) return { sched.ConstantLR(o, 0.5, 0) }, {} end,
    } do
      local o, rates = optim.SGD(nn.Linear(2, 2), { lr = 1 }), {}
      local s = sched.SequentialLR(o, make(o))
      for _ in want:gmatch "%S+" do
        rates[#rates + 1] = ("%.6g"):format(o.groups[1].lr)
        s:step()
      end
      assert.equal(want, table.concat(rates, " "))
    end
  end)

  it("that multiplies rates calls its function once per step and group", function()
    local calls = 0
    local function factor()
      calls = calls + 1
      return 0.99
    end
    for _, make in ipairs {
      function(o) return sched.MultiplicativeLR(o, factor) end,
      function(o)
        return sched.SequentialLR(o, { sched.ConstantLR(o, 1, 0), sched.MultiplicativeLR(o, factor) }, { 1 })
      end,
    } do
      local o = optim.SGD(nn.Linear(2, 2), { lr = 1 })
      local s = make(o)
      calls = 0
      for _ = 1, 200 do s:step() end
      assert(calls >= 200 and calls <= 202, calls)
      local lr = 1
      for _ = 1, 200 do lr = lr * 0.99 end
      assert.equal(lr, o.groups[1].lr)
      s:continue_at(3)
      assert.equal(0.99 * 0.99 * 0.99, o.groups[1].lr)
      s:continue_at(4)
      assert.equal(0.99 * 0.99 * 0.99 * 0.99, o.groups[1].lr)
    end
  end)

  it("of Hugging Face is found by its name", function()
    for _, name in ipairs { "linear", "cosine", "cosine_with_restarts", "polynomial" } do
      local a = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
      local named = sched.get_scheduler(name, a, 2, 9)
      local own = sched[name](adam, 2, 9)
      for _ = 1, 9 do
        assert.equal(adam.lr, a.lr)
        named:step()
        own:step()
      end
    end
    assert.equal(0.5, sched.get_scheduler("constant", adam):lr())
    assert.equal(0, sched.get_scheduler("constant_with_warmup", adam, 4):lr())
    local stable = sched.get_scheduler { name = "warmup_stable_decay", optimizer = adam, num_warmup_steps = 2,
      scheduler_specific_kwargs = { num_decay_steps = 4, num_stable_steps = 3 } }
    assert.equal(0.5, stable:lr(4))
    assert.equal(9, stable.total)
    assert.equal("reduce_lr_on_plateau", sched.get_scheduler("reduce_lr_on_plateau", adam, nil, nil,
      { patience = 1 }).name)
    assert.matches('sched.get_scheduler: "linear" needs num_training_steps',
      problem(sched.get_scheduler, "linear", adam, 2), 1, true)
    assert.matches("sched.get_scheduler: the name", problem(sched.get_scheduler, "linaer", adam, 2, 9), 1, true)
    assert.matches("sched.linear: num_warmup_steps is 9; it must be at most num_training_steps, which is 8",
      problem(sched.linear, adam, 9, 8), 1, true)
    assert.matches("sched.polynomial: lr_end is 0.5; it must be less than the optimizer's rate, 0.5",
      problem(sched.polynomial, adam, 1, 8, 0.5), 1, true)
    assert.matches("needs min_lr or min_lr_rate, and not both", problem(sched.cosine_with_min_lr, adam, 1, 8), 1, true)
    assert.matches("the sums must agree", problem(sched.warmup_stable_decay, adam, { num_warmup_steps = 2,
      num_decay_steps = 4, num_stable_steps = 3, num_training_steps = 8 }), 1, true)
  end)

  it("that follows a value lowers the rate after evaluations that are no better, and goes on from its state", function()
    local function make(o) return sched.ReduceLROnPlateau(o, { factor = 0.5, patience = 1, cooldown = 1 }) end
    local one, rates = make(adam), {}
    local values = { 3, 2, 2, 2, 1.9, 1.9, 1.9, 1.9, 1.9, 1.0 }
    for i, value in ipairs(values) do
      one:step(value)
      rates[i] = adam.lr
    end
    assert.same({ 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125 }, rates)
    for cut = 1, #values - 1 do
      local first = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
      local schedule = make(first)
      for i = 1, cut do schedule:step(values[i]) end
      local second = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
      second.lr = first.lr                              -- the optimizer's state
      local later = make(second)
      later:load_state_dict(schedule:state_dict())
      for i = cut + 1, #values do later:step(values[i]) end
      assert.equal(rates[#rates], second.lr, "after " .. cut)
    end
    assert.matches("schedule:step of ReduceLROnPlateau: the value of an evaluation, which it needs,",
      problem(one.step, one), 1, true)
    assert.matches("factor is 1; it must be at least 0 and less than 1",
      problem(sched.ReduceLROnPlateau, adam, "min", 1), 1, true)
    local up = sched.ReduceLROnPlateau(adam, { mode = "max", patience = 0, factor = 0.5, min_lr = 0.1 })
    for _, value in ipairs { 1, 2, 3, 2 } do up:step(value) end
    assert.equal(0.1, adam.lr)
  end)

  it("may be one after another", function()
    local warm = sched.LinearLR(adam, 0.25, 1, 3)
    local fall = sched.CosineAnnealingLR(adam, 4)
    local all = sched.SequentialLR(adam, { warm, fall }, { 3 })
    local rates = {}
    for i = 1, 8 do
      rates[i] = adam.lr / 0.5
      all:step()
    end
    for i, want in ipairs { 0.25, 0.5, 0.75, 1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0 } do
      assert.near(want, rates[i], 1e-12, "step " .. i)
    end
    assert.matches("2 schedules need 1 milestones, not 2", problem(sched.SequentialLR, adam, { warm, fall }, { 1, 2 }),
      1, true)
    assert.matches("schedulers[2] must be a schedule of PyTorch", problem(sched.SequentialLR, adam, { warm,
      sched.constant { optimizer = adam, max_lr = 1 } }, { 1 }), 1, true)
  end)

  it("go on from the rates of other schedules and of the script", function()
    -- the rates of PyTorch 2.15
    local warm, fall = sched.LinearLR(adam, 0.1, 1, 4), sched.ExponentialLR(adam, 0.9)
    for i, want in ipairs { 0.2925, 0.4455, 0.56498, 0.6561, 0.59049, 0.531441 } do
      warm:step()
      fall:step()
      assert.near(want, adam.lr / 0.5, 1e-5, "step " .. i)
    end
    assert.near(0.531441 * 0.9 ^ 2 * 0.5, fall:lr(8), 1e-12)
    adam = optim.AdamW(nn.Linear(2, 2), { lr = 1 })
    local stairs = sched.StepLR(adam, 2, 0.1)
    for i, want in ipairs { 1, 0.1, 0.5, 0.05, 0.05, 0.005 } do
      if i == 3 then adam.param_groups[1].lr = 0.5 end
      stairs:step()
      assert.near(want, adam.lr, 1e-12, "step " .. i)
    end
  end)

  it("keep the rates of the script after a state is loaded", function()
    local first = sched.StepLR(adam, 2, 0.1)
    first:step()
    adam.param_groups[1].lr = 3
    first:step()
    assert.near(0.3, adam.lr, 1e-12)
    local other = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
    local second = sched.StepLR(other, 2, 0.1)
    second:load_state_dict(first:state_dict())
    other:load_state_dict(adam:state_dict())
    for _ = 1, 2 do second:step() end
    assert.near(0.03, other.lr, 1e-12)
    assert.matches("follows", problem(second.load_state_dict, second, { name = "StepLR", count = 1, follows = 3 }), 1,
      true)
  end)

  it("print once that they replace a rate", function()
    local inverse = sched.LambdaLR(adam, function(n) return 1 / (n + 1) end)
    adam.lr = 0.125
    assert.equal("psluajit: sched.LambdaLR computes each rate from the number of steps, so it replaces the rate 0.125, "
      .. "which the script or another schedule set, at every step; sched.SequentialLR runs one schedule after "
      .. "another\n", printed(inverse.step, inverse))
    assert.equal(0.25, adam.lr)
    adam.lr = 0.125
    assert.equal("", printed(inverse.step, inverse))
    local plateau = sched.ReduceLROnPlateau(adam, { patience = 0, factor = 0.5 })
    plateau:step(1)
    adam.lr = 0.5
    assert.equal("", printed(plateau.step, plateau, 1))
    assert.equal(0.25, adam.lr)
  end)

  it("may step together", function()
    local all = sched.ChainedScheduler { sched.LinearLR(adam, 0.1, 1, 4), sched.ExponentialLR(adam, 0.9) }
    for _ = 1, 3 do all:step() end
    assert.near(0.564975 * 0.5, all:get_last_lr()[1], 1e-12)
    local state, rates = all:state_dict(), adam:state_dict()
    all:step()
    local want = adam.lr
    adam = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
    all = sched.ChainedScheduler { sched.LinearLR(adam, 0.1, 1, 4), sched.ExponentialLR(adam, 0.9) }
    all:load_state_dict(state)
    adam:load_state_dict(rates)
    all:step()
    assert.equal(want, adam.lr)
    local one = sched.ChainedScheduler { sched.StepLR(adam, 2) }
    assert.matches("the saved schedule is ChainedScheduler of LinearLR, ExponentialLR, and this run's is "
      .. "ChainedScheduler of StepLR", printed(one.load_state_dict, one, state), 1, true)
    assert.matches("schedulers[1] must be a schedule", problem(sched.ChainedScheduler,
      { sched.ReduceLROnPlateau(adam) }), 1, true)
    assert.matches("schedulers is empty", problem(sched.ChainedScheduler, {}), 1, true)
  end)

  it("are refused in addition to the schedule of an engine's configuration", function()
    local engine, given = require("ps").initialize { model = nn.Linear(2, 2), config = { train_batch_size = 1,
      optimizer = { type = "AdamW", params = { lr = 0.5 } },
      scheduler = { type = "WarmupLR", params = { warmup_num_steps = 4 } } } }
    assert.matches("sched.ExponentialLR: this engine's configuration already has the schedule WarmupLR",
      problem(sched.ExponentialLR, given, 0.9), 1, true)
    engine:close()
  end)

  it("may be changed when a state is loaded, which is printed", function()
    local saved = sched.linear(adam, 2, 10)
    for _ = 1, 5 do saved:step() end
    local state = saved:state_dict()
    local same = optim.AdamW(nn.Linear(2, 2), { lr = 0.5 })
    local schedule = sched.linear(same, 2, 10)
    assert.equal("", printed(schedule.load_state_dict, schedule, state))
    assert.equal(adam.lr, same.lr)
    schedule = sched.linear(same, 2, 20)
    assert.equal("psluajit: the saved schedule is linear { num_training_steps = 10, num_warmup_steps = 2 }, and this "
      .. "run's is linear { num_training_steps = 20, num_warmup_steps = 2 }: it continues at its step 5, with the rate "
      .. "0.416667\n", printed(schedule.load_state_dict, schedule, state))
    schedule = sched.StepLR(same, 2, 0.5)
    assert.matches("and this run's is StepLR { gamma = 0.5, step_size = 2 }: it continues at its step 5, with the rate "
      .. "0.125", printed(schedule.load_state_dict, schedule, state), 1, true)
    assert.equal(0.125, same.lr)
    schedule = sched.ReduceLROnPlateau(same)
    assert.matches("with the rate 0.125", printed(schedule.load_state_dict, schedule, state), 1, true)
    assert.equal(5, schedule.count)
    assert.matches("it is not that of a schedule", problem(schedule.load_state_dict, schedule, { count = 1 }), 1, true)
  end)

  it("that ends before or after its run is named before the run's first step", function()
    local train = require "ps.train"
    local function run(steps, total, more)
      local model = nn.Linear(2, 2)
      local opt = optim.AdamW(model, { lr = 0.5 })
      local calls = 0
      local options = { model = model, optimizer = opt, steps = steps, sched = sched.linear(opt, 0, total),
        loader = { next = function() return require("ps").ones { 1, 2 } end },
        loss = function(m, x)
          calls = calls + 1
          return m(x):sum()
        end }
      for key, value in pairs(more or {}) do options[key] = value end
      local text = printed(function()
        local out = io.stdout
        rawset(io, "stdout", { write = function() end, flush = function() end })
        local ok, why = pcall(train.run, options)
        rawset(io, "stdout", out)
        assert(ok, why)
      end)
      assert.equal(steps, calls)
      return text
    end
    assert.matches("psluajit: sched.linear ends at step 2, but the run at step 4, 2 steps later, and its "
      .. "last step has the rate 0\n", run(4, 2), 1, true)
    assert.matches("psluajit: sched.linear ends at step 8, but the run at step 4: the rate of its last step is 0.3125, "
      .. "not 0\n", run(4, 8), 1, true)
    assert.not_matches("sched.linear", run(4, 4), 1, true)
    assert.not_matches("sched.linear", run(4, 8, { quiet = true }), 1, true)
    local model = nn.Linear(2, 2)
    local opt = optim.AdamW(model, { lr = 0.5 })
    assert.matches("the schedule ReduceLROnPlateau follows the held-out loss, and the run has no eval",
      problem(train.run, { model = model, optimizer = opt, steps = 1, sched = sched.ReduceLROnPlateau(opt),
        loader = { next = function() end } }), 1, true)
  end)

  it("that follows the held-out loss gets it from ps.train.run", function()
    local ps = require "ps"
    local model = nn.Linear(2, 2)
    local opt = optim.SGD(model, { lr = 0.5 })
    local schedule = sched.ReduceLROnPlateau(opt, { patience = 0, factor = 0.5, threshold = 0.5 })
    local function batches()
      local done
      return function()
        if done then return nil end
        done = true
        return ps.ones { 1, 2 }
      end
    end
    printed(function()
      ps.train.run { model = model, optimizer = opt, steps = 3, sched = schedule, quiet = true,
        loader = { next = function() return ps.ones { 1, 2 } end }, eval = { every = 1, data = batches },
        loss = function(m, x) return m(x):sum() * 0 + 1 end }
    end)
    assert.equal(0.125, opt.lr)
    assert.equal(3, schedule.count)
  end)
end)
