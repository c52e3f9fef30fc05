-- SPDX-License-Identifier: BSD-3-Clause
-- Mistakes of PyTorch users with optimizers of ps.optim: what the first argument is, groups and their settings, and
-- calls that PyTorch has. Errors count groups from 1, as scripts do.
local ps = require "ps"
local fails = require("spec.check_lib").fails
local nn, optim, sched = ps.nn, ps.optim, ps.sched

local function made(options)
  local module = nn.Linear(2, 2)
  return optim.SGD(module, options or { lr = 0.5, momentum = 0.9 }), module
end

describe("the parameters of an optimizer", function()
  local m = nn.Linear(2, 2)
  it("are not a module within a list", function()
    fails(function() optim.SGD({ m }, { lr = 1 }) end, "SGD: item 1 of the list is a module (Linear)",
      "params = module:parameters()")
    fails(function() optim.SGD({ m.weight, m }, { lr = 1 }) end, "item 2 of the list is a module (Linear)")
    fails(function() optim.SGD({ m:parameters() }, { lr = 1 }) end, "item 1 of the list is a list of parameters")
    fails(function() optim.SGD({ { params = { m.weight } }, { params = m } }, { lr = 1 }) end,
      "SGD, group 2: params is a module (Linear): write params = module:parameters()")
  end)
  it("are not a function, a tensor, one group or nil", function()
    fails(function() optim.SGD(m.parameters, { lr = 1 }) end, "not a function", "pass the list module:parameters()")
    fails(function() optim.SGD({ { params = m.parameters } }, { lr = 1 }) end, "SGD, group 1: params is a function")
    fails(function() optim.SGD(m.weight, { lr = 1 }) end, "not a tensor", "{ p }")
    fails(function() optim.SGD({ params = m:parameters() }, { lr = 1 }) end, "write { { params = ... } }")
    fails(function() optim.SGD(nil, { lr = 1 }) end, "not nil")
    fails(function() optim.SGD({ m.weight, 3 }, { lr = 1 }) end, "SGD, group 1, parameter 2 is a number, not a tensor")
  end)
  it("have no nil in between, and no names", function()
    local a, b = m.weight, m.bias
    fails(function() optim.SGD({ a, nil, b }, { lr = 1 }) end,
      "SGD: item 2 of the list of parameters or groups is nil, but item 3 is not")
    fails(function() optim.SGD({ a, x = b }, { lr = 1 }) end, "has the key \"x\"; a list has only the keys 1, 2, ...")
    for _, key in ipairs { 0, -1, 1.5 } do
      fails(function() optim.SGD({ a, [key] = b }, { lr = 1 }) end, "has the key " .. key)
    end
    local config = { optimizer = { type = "AdamW" } }
    local function make() return nn.Linear(2, 2) end
    fails(function() ps.initialize { model_func = make, config = config, param_groups = { { lr = 1 }, x = {} } } end,
      "ps.initialize: param_groups has the key \"x\"")
    local function never() return false end
    fails(function()
      ps.initialize { model_func = make, config = config, param_groups = { { match = never }, nil, { lr = 1 } } }
    end, "item 2 of param_groups is nil")
    fails(function() optim.SGD({ { params = { a } }, { params = { x = b } } }, { lr = 1 }) end,
      "SGD, group 2: params has the key \"x\"")
    fails(function() optim.SGD({ { params = { a, nil, b } } }, { lr = 1 }) end, "SGD, group 1: item 2 of params is nil")
  end)
  it("cannot be added to a group, but the script's own list may grow", function()
    local list = { m.weight }
    local optimizer = optim.SGD(list, { lr = 1 })
    list[2] = m.bias
    assert.is_true(optimizer:step().skipped)
    table.insert(optimizer.groups[1].params, m.bias)
    fails(function() optimizer:step() end, "SGD, group 1: params has 2 parameters, but the optimizer was made with 1")
  end)
  it("can be a module, a list or groups", function()
    for _, params in ipairs { m, m:parameters(), { { params = m:parameters() } } } do
      assert.equal(1, #optim.SGD(params, { lr = 1 }).groups)
    end
  end)
end)

describe("the groups of an optimizer", function()
  it("count from 1", function()
    local optimizer = made()
    fails(function() return optimizer.param_groups[0].lr end, "lists in Lua count from 1")
    assert.equal(0.5, optimizer.param_groups[1].lr)
    assert.is_nil(optimizer.param_groups[2])
    optimizer.param_groups[1].lr = -1
    fails(function() optimizer:step() end, "SGD, group 1: lr is -1")
  end)
  it("cannot be removed or replaced", function()
    local module = nn.Linear(2, 2)
    local optimizer = optim.AdamW { { params = { module.weight } }, { params = { module.bias } } }
    local second = table.remove(optimizer.groups)
    fails(function() optimizer:step() end, "AdamW, group 2 was removed after the optimizer was made")
    optimizer.groups[2] = {}
    for key, value in pairs(second) do optimizer.groups[2][key] = value end
    fails(function() optimizer:step() end, "AdamW, group 2 was replaced after the optimizer was made")
    optimizer.groups[2] = second
    optimizer:step()
    local list = optimizer.groups
    optimizer.groups = { list[2], list[1] }
    fails(function() optimizer:step() end, "AdamW, group 1 was replaced after the optimizer was made")
    optimizer.groups = list
    optimizer.groups[2].params = nil
    fails(function() optimizer:step() end, "AdamW, group 2: params")
    optimizer.groups[2].params = { module.bias }
    optimizer.groups[2].lr = nil
    fails(function() sched.StepLR(optimizer, 2) end, "sched.StepLR: lr of group 2")
    optimizer.groups[2].lr = 1
    for _, rates in ipairs { { 0.1, "x" }, { 0.1, -1 } } do
      fails(function() sched.OneCycleLR(optimizer, rates, 10) end, "sched.OneCycleLR: max_lr[2] is")
    end
    optimizer.groups[2].params[1] = nn.Linear(2, 2).bias
    fails(function() optimizer:step() end, "AdamW, group 2: parameter 1 of params was replaced")
  end)
  it("of schedule-free AdamW keep their counters", function()
    local optimizer = optim.AdamWScheduleFree(nn.Linear(2, 2))
    for _, case in ipairs { { "k", "x" }, { "k", 1.5 }, { "k", -1 }, { "k", math.huge }, { "weight_sum", 0 / 0 },
      { "weight_sum", -1 }, { "lr_max", math.huge }, { "lr_max", -2 }, { "scheduled_lr", -1 } } do
      local key, wrong = case[1], case[2]
      local old = optimizer.groups[1][key]
      optimizer.groups[1][key] = wrong
      fails(function() optimizer:step() end, "AdamWScheduleFree, group 1: " .. key .. " ")
      optimizer.groups[1][key] = old
    end
  end)
  it("keep the types of their settings, and their optimizer", function()
    local optimizer = made()
    local group = optimizer.groups[1]
    for key, wrong in pairs { lr = "0.1", nesterov = "no", momentum = true, kind = "Adam" } do
      local old = group[key]
      group[key] = wrong
      fails(function() optimizer:step() end, "SGD, group 1: " .. key .. " is")
      group[key] = old
    end
    group.weight_decay = nil
    fails(function() optimizer:step() end, "SGD, group 1: weight_decay is nil, not a number")
  end)
  it("are not updated with a factor that is no number", function()
    for _, factor in ipairs { 0 / 0, 1 / 0 } do
      fails(function() made():step { grad_scale = factor } end, "optimizer:step: grad_scale is")
    end
  end)
  it("cannot be added", function()
    local optimizer, module = made()
    table.insert(optimizer.param_groups, { params = module:parameters() })
    fails(function() optimizer:step() end, "SGD, group 2 was added after the optimizer was made")
  end)
  it("have no misspelt settings, but fields of the script", function()
    local optimizer = made()
    local group = optimizer.param_groups[1]
    for key, name in pairs { weight_deacy = "weight_decay", Lr = "lr", momentun = "momentum", LR = "lr" } do
      fails(function() group[key] = 0.1 end, ("no setting '%s'; write %s"):format(key, name))
    end
    for _, key in ipairs { "lr0", "lr_scale", "name", "best", "momentum_start" } do group[key] = 1 end
    for key, text in pairs { Lr = "write optimizer.lr", weight_deacy = "write optimizer.param_groups[1].weight_decay",
      max_nrom = "write optimizer.max_norm" } do
      fails(function() optimizer[key] = 0.1 end, text)
    end
    for _, key in ipairs { "best", "name", "last", "lr0", "max_norm" } do optimizer[key] = 3 end
    assert.equal(3, optimizer.best)
  end)
end)

describe("calls of PyTorch on an optimizer", function()
  it("step with a closure is an error", function()
    fails(function() made():step(function() end) end, "takes no closure", "then optimizer:step()")
  end)
  it("clip one tensor's gradient", function()
    local w = ps.tensor({ 3, 4 }, { requires_grad = true })
    w:set_grad(ps.tensor { 3, 4 })
    assert.equal(5, nn.clip_grad_norm_(w, 1))
    assert.truthy(math.abs(w:grad():norm():item() - 1) < 1e-6)
    nn.clip_grad_value_(w, 0.25)
    assert.same({ 0.25, 0.25 }, w:grad():tolist())
  end)
  it("read the last epoch of a schedule", function()
    local schedule = sched.StepLR(made(), 2)
    fails(function() return schedule.last_epoch + 1 end, "schedule.last_epoch does not exist", "write schedule.count")
    fails(function() schedule:get_lr() end, "write schedule:get_last_lr()")
    assert.matches("write schedule.count", tostring(schedule.last_epoch), 1, true)
    assert.is_nil(schedule.other)
  end)
end)
