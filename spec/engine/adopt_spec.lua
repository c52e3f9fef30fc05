-- SPDX-License-Identifier: BSD-3-Clause
-- ps.initialize in the forms that users of OSLO and DeepSpeed know: the configuration as second argument, a model and
-- an optimizer that already exist; and optimizers that were not passed to it.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local gpt2 = require "models.gpt2"
local lib = require "spec.check_lib"
local fails = lib.fails
local nn, optim = ps.nn, ps.optim

local model

after_each(function()
  if model then model:close() end
  model = nil
end)

local function config(more)
  local wanted = { plan_print = false }
  for key, value in pairs(more or {}) do wanted[key] = value end
  return wanted
end

local function tiny()
  ps.manual_seed(5)
  return gpt2.new "tiny"
end

local function open(request)
  request.quiet = true
  local optimizer
  model, optimizer = ps.initialize(request)
  return optimizer
end

local x = ps.randint(0, 256, { 4, 16 }, { dtype = "int32" })

-- Runs two steps, and returns the bytes of all values.
local function train(optimizer)
  for _ = 1, 2 do
    optimizer:zero_grad()
    for out in model { input_ids = x, labels = x } do out.loss:backward() end
    optimizer:step()
  end
  local parts = {}
  for name, t in pairs(model:state_dict()) do parts[#parts + 1] = name .. " " .. lib.bytes(t) end
  table.sort(parts)
  model:close()
  return table.concat(parts, "\n")
end

describe("ps.initialize(model, config)", function()
  it("takes a table or a path as the second argument, for a module and for a function", function()
    local params = { type = "AdamW", params = { lr = 1e-2 } }
    local path = os.tmpname()
    local f = assert(io.open(path, "wb"))
    f:write('{"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "plan_print": false} // as in the table\n')
    f:close()
    local want = train(open { model_func = tiny, config = config { optimizer = params } })
    for _, first in ipairs { "module", "function" } do
      for _, second in ipairs { config { optimizer = params }, path } do
        local optimizer
        model, optimizer = ps.initialize(first == "module" and tiny() or tiny, second)
        assert(train(optimizer) == want, first)
      end
    end
    os.remove(path)
    fails(function() ps.initialize(tiny, config(), config()) end,
      "both the second and the third argument are a configuration")
    fails(function() ps.initialize(tiny()) end, "already exists", "ps.initialize(MODEL, CONFIG)")
  end)
end)

describe("ps.init_distributed", function()
  it("may have keys of the configuration as options, as in BMTrain", function()
    local group = ps.init_distributed { num_micro_batches = 3, quiet = true }
    finally(function() group:close() end)
    local optimizer = open { model_func = tiny, config = config() }
    assert.equal(3, inner(model).accumulate)
    local turns = 0
    for out in model:micro_batches { input_ids = x, labels = x } do
      turns = turns + 1
      out.loss:backward()
    end
    optimizer:step()
    assert.equal(3, turns)
    model:close()
    fails(function() open { model_func = tiny, config = config { gradient_accumulation_steps = 2 } } end,
      "gradient_accumulation_steps is 2", "ps.init_distributed's num_micro_batches is 3", "keep one")
    for _, name in ipairs { "pipe_size", "tp_size", "num_micro_batches" } do
      fails(function() ps.init_distributed { [name] = 0 } end, "ps.init_distributed: " .. name, "from 1 on")
    end
  end)
end)

describe("an optimizer that is passed to ps.initialize", function()
  local function groups(module)
    local list = optim.groups(module, 0.1)
    list[2].lr = 3e-3
    return list
  end

  for i, settings in ipairs { { memory = "plain" }, {}, { bf16 = { enabled = true } } } do
    local kind = i == 2 and "SGD" or "AdamW"
    local own = i == 2 and "momentum" or "betas"
    local value = i == 2 and 0.8 or { 0.8, 0.9 }
    it("trains like the configuration with the same settings: " .. kind, function()
      settings.plan_print, settings.gradient_clipping = false, nil
      local module = tiny()
      local decays = {}
      for name, p in module:named_parameters() do decays[name] = p:dim() >= 2 end
      local given = optim[kind](groups(module), { lr = 1e-2, [own] = value, max_norm = 0.5 })
      local optimizer = open { model = module, optimizer = given, config = settings }
      assert.equal(0.5, inner(model).cfg.gradient_clipping)
      assert.equal(2, #given.groups)
      given:set_lr(5e-3)
      assert.same({ 5e-3, 1.5e-3 }, { optimizer.groups[1].lr, optimizer.groups[2].lr })
      local adopted = train(given)
      assert.equal(2, optimizer.steps)
      settings.optimizer = { type = kind, params = { lr = 1e-2, [own] = value } }
      settings.gradient_clipping = 0.5
      local other = open { model_func = tiny, config = settings, param_groups = {
        { match = function(name) return decays[name] end, weight_decay = 0.1 }, { lr = 3e-3, weight_decay = 0 } } }
      other:set_lr(5e-3)
      assert(train(other) == adopted)
      settings.optimizer = nil
    end)
  end

  it("is refused if it is in use, of another kind, or contradicts the configuration", function()
    local module = nn.Linear(3, 3)
    local used = optim.AdamW(module, { lr = 1e-2 })
    module(ps.ones { 1, 3 }):sum():backward()
    used:step()
    fails(function() open { model = module, optimizer = used, config = config() } end, "has already made 1 step:")
    local function try(given, more, ...)
      fails(function() open { model = module, optimizer = given, config = config(more) } end, ...)
    end
    try({}, nil, "must be an optimizer of ps.optim")
    try(optim.Adam(module, { per_rank = true }), nil, "per_rank")
    try(optim.Adam(nn.Linear(2, 2)), nil, "does not have weight of the model")
    try(optim.Adam { module.weight }, nil, "does not have bias of the model", "requires_grad(false)")
    try(optim.Adam { module.weight, module.bias, nn.Linear(2, 2).weight }, nil, "that do not belong to the model")
    try(optim.Adam(module, { lr = 1e-2 }), { optimizer = { type = "Adam", params = { lr = 1e-3 } } },
      "optimizer.params.lr is 0.001", "the optimizer's lr is 0.01")
    try(optim.Adam(module), { optimizer = { type = "AdamW" } }, "the optimizer's type")
    try(optim.Adam(module), { optimizer = { type = "Adam", params = { adam_w_mode = true } } }, "adam_w_mode makes it")
    try(optim.Adam(module, { max_norm = 2 }), { gradient_clipping = 1 }, "gradient_clipping is 1",
      "the optimizer's max_norm is 2")
    fails(function()
      open { model = module, optimizer = optim.Adam(module), config = config(), param_groups = { {} } }
    end, "remove param_groups")
    -- none of these moved the module into an engine, so a plain optimizer can still step
    module(ps.ones { 1, 3 }):sum():backward()
    assert.is_false(used:step().skipped)
    open { model = module, optimizer = optim.AdamW(module, { lr = 1e-2 }), config = config { optimizer = {
      type = "AdamW", params = { lr = "auto", betas = { 0.9, 0.999 } } } } }
    assert.equal(1e-2, inner(model).cfg.optimizer.params.lr)
  end)
end)

describe("an optimizer that was not passed to ps.initialize", function()
  for _, settings in ipairs { { memory = "plain" }, {}, { bf16 = { enabled = true } },
    { memory = "plain", bf16 = { enabled = true } } } do
    it("over the model's parameters fails at step(), by name", function()
      local module = nn.Linear(3, 3)
      local before = optim.SGD(module, { lr = 0.1 })
      open { model = module, config = config(settings) }
      model:backward(model(ps.ones({ 1, 3 }):to(model.weight:dtype())):sum())
      fails(function() before:step() end, "adopt_spec.lua", "SGD: ps.initialize took over the model, with weight",
        "ps.initialize { model = ..., optimizer = ..., config = ... }")
      if settings.memory ~= "plain" then
        local behind = optim.SGD(model:parameters(), { lr = 0.1 })
        fails(function() behind:step() end, "SGD: ps.initialize took over the model, with ")
      end
      local other = nn.Linear(2, 2)
      local alone = optim.SGD(other, { lr = 0.1 })
      other(ps.ones { 1, 2 }):sum():backward()
      assert.is_false(alone:step().skipped)
    end)
  end
end)
