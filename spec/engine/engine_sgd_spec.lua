-- SPDX-License-Identifier: BSD-3-Clause
-- SGD of an engine: PyTorch's formula computed by hand, the state of a parameter, saved states in both forms, and
-- refusals. chunks_spec and shards_spec compare it with plain memory and with one rank, and the oracle compares it
-- with PyTorch.
local ps = require "ps"
local nn = require "ps.nn"
local check = require "spec.check_lib"
local config = require "ps.config"
local chunks = require "ps.memory.chunks"
local fails, optim = check.fails, ps.optim

local model
after_each(function() if model then model:close() end end)

local function open(params, more, groups)
  local settings = { plan_print = false, optimizer = { type = "SGD", params = params } }
  for key, value in pairs(more or {}) do settings[key] = value end
  if model then model:close() end
  ps.manual_seed(3)
  local optimizer
  model, optimizer = ps.initialize { quiet = true, config = settings, param_groups = groups,
    model_func = function() return nn.Linear(2, 1) end }
  return optimizer
end

-- The weight's gradient is the sum of x over rows, and the bias's gradient is the number of rows.
local function step(optimizer, number)
  optimizer:zero_grad()
  model:backward(model(ps.tensor { { number, -1 }, { 0.5, number } }):sum())
  return optimizer:step()
end

local function values() return model:state_dict().weight:reshape(-1):tolist() end

-- Computes two weights under torch.optim.SGD with the formula in its documentation.
local function by_hand(w, o, first, last, buffer)
  buffer = buffer or {}
  for number = first, last do
    for i, g in ipairs { number + 0.5, number - 1 } do
      g = g + (o.weight_decay or 0) * w[i]
      if o.momentum then
        buffer[i] = buffer[i] and o.momentum * buffer[i] + (1 - (o.dampening or 0)) * g or g
        g = o.nesterov and g + o.momentum * buffer[i] or buffer[i]
      end
      w[i] = w[i] - o.lr * g
    end
  end
  return w, buffer
end

local function near(want, got)
  for i, value in ipairs(want) do assert.near(value, got[i], 2e-6 * math.max(1, math.abs(value))) end
end

describe("SGD of an engine", function()
  for name, params in pairs { plain = { lr = 0.1 }, decay = { lr = 0.1, weight_decay = 0.2 },
    momentum = { lr = 0.1, momentum = 0.9, dampening = 0.3, weight_decay = 0.2 },
    nesterov = { lr = 0.1, momentum = 0.9, weight_decay = 0.2, nesterov = true } } do
    it("is PyTorch's: " .. name, function()
      for _, more in ipairs { {}, { memory = "plain" }, { device = "sim", memory = { device = "1MiB" } } } do
        local optimizer = open(params, more)
        local want, buffer = by_hand(values(), params, 1, 3)
        for number = 1, 3 do step(optimizer, number) end
        near(want, values())
        local kept = optimizer:state_dict(model).tensors
        assert.equal(params.momentum == nil, next(kept) == nil)
        if params.momentum then near(buffer, kept["weight.momentum_buffer"]:reshape(-1):tolist()) end
      end
    end)
  end

  it("keeps one buffer per parameter, or none, and no chunks of Adam", function()
    for _, case in ipairs { { nil, "grad param" }, { 0.9, "grad momentum_buffer param" } } do
      open { momentum = case[1] }
      local kinds = {}
      for i, chunk in ipairs(chunks.chunks()) do kinds[i] = chunk.kind end
      table.sort(kinds)
      assert.equal(case[2], table.concat(kinds, " "))
    end
    open({ momentum = 0 }, {}, { { match = function(name) return name == "bias" end, momentum = 0.5 }, {} })
    assert.equal(3, #chunks.chunks())
  end)

  it("continues from a state in both forms, and from PyTorch's, which counts no steps", function()
    local params = { lr = 0.1, momentum = 0.9, dampening = 0.3, weight_decay = 0.2 }
    local function after(change)
      local optimizer = open(params)
      for number = 1, 2 do step(optimizer, number) end
      local named, torch = optimizer:state_dict(model), optimizer:state_dict()
      local saved = change(named, torch)
      local weights = values()
      for _, t in pairs(saved.tensors or {}) do t:keep() end
      optimizer:load_state_dict(saved)
      local want = by_hand(weights, params, 3, 3, { unpack(torch.state[0].momentum_buffer:reshape(-1):tolist()) })
      step(optimizer, 3)
      near(want, values())
      return optimizer, torch
    end
    after(function(named) return named end)
    local optimizer, torch = after(function(_, form)
      for n in pairs(form.state) do form.state[n].step = nil end
      return form
    end)
    assert.same({ 0.1, 0.9, 0.3, 0.2, false }, { torch.param_groups[1].lr, torch.param_groups[1].momentum,
      torch.param_groups[1].dampening, torch.param_groups[1].weight_decay, torch.param_groups[1].nesterov })
    torch.param_groups[1].momentum = nil
    fails(function() optimizer:load_state_dict(torch) end, "is not SGD's")
    torch.param_groups[1].momentum = 0.9
    local saved = optimizer:state_dict(model)
    optimizer = open { lr = 0.1 }
    fails(function() optimizer:load_state_dict(torch) end, "momentum is 0.9", "made without")
    saved.values.groups[1].momentum = "0.9"
    fails(function() optimizer:load_state_dict(saved) end, "momentum is 0.9", "made without")
  end)

  it("refuses settings of other optimizers, and a momentum for which there are no buffers", function()
    local optimizer = open { lr = 0.1 }
    optimizer.groups[1].momentum = 0.9
    fails(function() step(optimizer, 1) end, "SGD, group 1: momentum is 0.9", "no buffers")
    optimizer.groups[1].momentum = 0
    assert.is_false(step(optimizer, 1).skipped)
    local function bad(optimizer_, ...)
      fails(function() config.read { optimizer = optimizer_ } end, ...)
    end
    bad({ type = "SGD", params = { betas = { 0.9, 0.99 } } }, "optimizer.params.betas", "is for Adam, AdamW,")
    bad({ type = "sgd", params = { eps = 1e-8 } }, "optimizer.params.eps")
    bad({ type = "Adam", params = { momentum = 0.9 } }, "optimizer.params.momentum", "the key is for SGD")
    bad({ params = { nesterov = true } }, "optimizer.params.nesterov")
    bad({ type = "SGD", params = { maximize = true } }, "optimizer.params.maximize")
    fails(function() open { nesterov = true } end, "nesterov needs a momentum above 0")
    fails(function() open({}, {}, { { betas = { 0.9, 0.99 } } }) end, "param_groups[1].betas", "SGD")
    fails(function() optim.SGD(nn.Linear(2, 2), { momentum = 0.9, dampening = 0.1, nesterov = true }) end,
      "nesterov needs", "0.9 and 0.1")
    local cycle = { type = "OneCycle", params = { cycle_min_lr = 0.1, cycle_max_lr = 0.2, cycle_momentum = true } }
    fails(function() config.read { optimizer = { type = "SGD" }, scheduler = cycle } end, "cycle_momentum", "SGD")
    cycle.params.cycle_momentum = nil
    local cfg, notes = config.read { optimizer = { type = "SGD" }, scheduler = cycle }
    assert.is_false(cfg.scheduler.params.cycle_momentum)
    assert.matches("cycle_momentum: off", table.concat(notes))
    fails(function()
      ps.sched.OneCycle { optimizer = optim.SGD(nn.Linear(2, 2)), cycle_min_lr = 0.1, cycle_max_lr = 0.2 }
    end, "cycle_momentum", "no betas")
  end)
end)
