-- SPDX-License-Identifier: BSD-3-Clause
-- Rates of optimizers with several groups: optimizer.lr, optimizer.param_groups, set_lr, and what each schedule does to
-- groups. DeepSpeed's schedules give all groups one rate, except for WarmupCosineLR, which multiplies each group's own
-- (deepspeed/runtime/lr_schedules.py); psluajit's keep ratios.
local ps = require "ps"
local lib = require "spec.check_lib"
local nn, fails = ps.nn, lib.fails

local function near(want, got)
  assert(#want == #got, #got)
  for i = 1, #want do
    assert(math.abs(want[i] - got[i]) <= 1e-12, ("rate %d is %.9g, not %.9g"):format(i, got[i], want[i]))
  end
end

local function rates(optimizer)
  local list = {}
  for i, group in ipairs(optimizer.param_groups) do list[i] = group.lr end
  return list
end

local Two = nn.class "Two"
function Two:init()
  self.a = nn.Linear(2, 2)
  self.b = nn.Linear(2, 2)
end
function Two:forward(x) return self.b(self.a(x)):sum() end

local model
after_each(function()
  if model then model:close() end
  model = nil
end)

-- Optimizers with two groups, created in every possible way. `first` and `second` are the groups' learning rates, and
-- `own` is the optimizer's, or nil.
local makers = {
  ["ps.optim"] = function(first, second, own)
    local m = Two()
    return ps.optim.AdamW({ { params = m.a:parameters(), lr = first }, { params = m.b:parameters(), lr = second } },
      { lr = own })
  end,
}
for _, memory in ipairs { "chunk", "plain" } do
  makers["an engine, memory " .. memory] = function(first, second, own)
    local optimizer
    model, optimizer = ps.initialize { quiet = true, model_func = function() return Two() end,
      param_groups = { { match = function(name) return name:match "^a" end, lr = first }, { lr = second } },
      config = { memory = memory, plan_print = false, optimizer = { type = "AdamW", params = { lr = own } } } }
    return optimizer
  end
  makers["an adopted optimizer, memory " .. memory] = function(first, second, own)
    local m = Two()
    local optimizer = ps.optim.AdamW({ { params = m.a:parameters(), lr = first },
      { params = m.b:parameters(), lr = second } }, { lr = own })
    model = ps.initialize { quiet = true, model = m, optimizer = optimizer,
      config = { memory = memory, plan_print = false } }
    return optimizer
  end
end

for name, make in pairs(makers) do
  describe("the rates of two groups of " .. name, function()
    it("are read and written by optimizer.param_groups, and by optimizer.lr if they are equal", function()
      local optimizer = make(3e-4, 3e-4)
      assert.equal(optimizer.groups, optimizer.param_groups)
      assert.equal(3e-4, optimizer.lr)
      optimizer.lr = 0
      near({ 0, 0 }, rates(optimizer))
      optimizer.param_groups[2].lr = 0.5
      near({ 0, 0.5 }, rates(optimizer))
      fails(function() return optimizer.lr end, "0, 0.5", "groups[i].lr")
      fails(function() optimizer.lr = 1 end, "0, 0.5", "set_lr")
      fails(function() optimizer.lr = -1 end, "optimizer.lr")
      fails(function() optimizer.param_groups = {} end, "change a group's settings")
    end)

    it("are not written by names without an effect, and settings belong to groups", function()
      local optimizer = make(3e-4, 3e-4)
      fails(function() optimizer.learning_rate = 0 end, "optimizer.learning_rate does not exist; write optimizer.lr")
      for key, setting in pairs { weight_decay = "weight_decay", wd = "weight_decay", betas = "betas", beta1 = "betas",
        eps = "eps" } do
        fails(function() optimizer[key] = 0 end, "optimizer." .. key, "write optimizer.param_groups[1]." .. setting)
      end
      fails(function() optimizer.param_groups[2].learning_rate = 0 end, "no setting 'learning_rate'; write lr")
      optimizer.own, optimizer.param_groups[1].own = 3, 4
      assert.same({ 3, 4 }, { optimizer.own, optimizer.param_groups[1].own })
      assert.is_nil(optimizer.learning_rate)
      near({ 3e-4, 3e-4 }, rates(optimizer))
    end)

    it("follow set_lr together if they were equal, by their ratios to the optimizer's, or not at all", function()
      local optimizer = make(0.1, 0.1)
      optimizer:set_lr(0.05)
      near({ 0.05, 0.05 }, rates(optimizer))
      if model then model:close() end
      optimizer = make(3e-4, 3e-5, 3e-4)
      optimizer:set_lr(1e-4)
      near({ 1e-4, 1e-5 }, rates(optimizer))
      if model then model:close() end
      optimizer = make(3e-4, 3e-5)
      fails(function() optimizer:set_lr(1e-4) end, "0.0003, 3e-05", "make the optimizer with an lr", "groups[i].lr")
      near({ 3e-4, 3e-5 }, rates(optimizer))
    end)

    it("are those of DeepSpeed's schedules", function()
      local optimizer = make(3e-4, 3e-5)
      local schedule = ps.sched.WarmupLR { optimizer = optimizer, warmup_max_lr = 3e-4, warmup_num_steps = 2,
        warmup_type = "linear" }
      near({ 0, 0 }, rates(optimizer))
      for _ = 1, 2 do schedule:step() end
      near({ 1.5e-4, 1.5e-4 }, rates(optimizer))
      schedule:step()
      near({ 3e-4, 3e-4 }, rates(optimizer))
      schedule = ps.sched.WarmupDecayLR { optimizer = optimizer, warmup_max_lr = 1e-3, warmup_num_steps = 2,
        total_num_steps = 10, warmup_type = "linear", last_batch_iteration = 5 }
      near({ 1e-3 * 5 / 8, 1e-3 * 5 / 8 }, rates(optimizer))
      assert.equal(1e-3 * 5 / 8, schedule:lr())
      ps.sched.OneCycle { optimizer = optimizer, cycle_min_lr = 0.1, cycle_max_lr = 0.2 }
      near({ 0.1, 0.1 }, rates(optimizer))
      ps.sched.LRRangeTest { optimizer = optimizer, lr_range_test_min_lr = 0.3 }
      near({ 0.3, 0.3 }, rates(optimizer))
      schedule = ps.sched.WarmupCosineLR { optimizer = optimizer, warmup_num_steps = 2, total_num_steps = 10,
        warmup_type = "linear" }
      near({ 0, 0 }, rates(optimizer))
      for _ = 1, 2 do schedule:step() end
      near({ 1.5e-4, 1.5e-5 }, rates(optimizer))
      for _ = 1, 5 do schedule:step() end                      -- iteration 6 is 5 of 8 steps along the cosine
      local share = 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * 5 / 8)) / 2
      near({ 3e-4 * share, 3e-5 * share }, rates(optimizer))
      fails(function() ps.sched.WarmupLR { optimizer = optimizer } end, "0.0003, 3e-05", "warmup_max_lr")
      fails(function() ps.sched.constant { optimizer = optimizer, max_lr = 1 } end, "0.0003, 3e-05")
    end)

    it("keep their ratios in psluajit's schedules", function()
      local optimizer = make(3e-4, 3e-4)
      ps.sched.constant { optimizer = optimizer, max_lr = 3e-4 }
      near({ 3e-4, 3e-4 }, rates(optimizer))
      ps.sched.WarmupLR { optimizer = optimizer, warmup_num_steps = 0, last_batch_iteration = 2 }
      near({ 3e-4, 3e-4 }, rates(optimizer))
      if model then model:close() end
      optimizer = make(3e-4, 3e-5, 3e-4)
      local schedule = ps.sched.warmup_linear { optimizer = optimizer, max_lr = 1e-3, total = 4 }
      near({ 1e-3, 1e-4 }, rates(optimizer))
      schedule:step()
      near({ 7.5e-4, 7.5e-5 }, rates(optimizer))
    end)
  end)
end

describe("a schedule of a configuration", function()
  it("does not scale groups by a rate that was not given", function()
    for _, lr in ipairs { false, 3e-4 } do
      local optimizer
      model, optimizer = ps.initialize { quiet = true, model_func = function() return Two() end,
        param_groups = { { match = function(name) return name:match "^a" end, lr = 3e-4 }, { lr = 3e-4 } },
        config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = lr or nil } },
          scheduler = { type = "WarmupLR", params = { warmup_max_lr = 3e-4, warmup_num_steps = 2,
            last_batch_iteration = 9 } } } }
      near({ 3e-4, 3e-4 }, rates(optimizer))
      model:close()
      model = nil
    end
  end)

  it("begins from rates that the script assigned to groups", function()
    local m = Two()
    local optimizer = ps.optim.AdamW(m, { lr = 1e-3 })
    optimizer.param_groups[1].lr = 2e-3
    ps.sched.WarmupCosineLR { optimizer = optimizer, warmup_num_steps = 0, total_num_steps = 10,
      last_batch_iteration = 1 }
    assert(math.abs(optimizer.lr - 2e-3 * (1e-4 + (1 - 1e-4) * (1 + math.cos(0)) / 2)) < 1e-12 or optimizer.lr <= 2e-3)
    assert(optimizer.lr > 1e-3)
  end)
end)
