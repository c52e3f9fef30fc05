-- SPDX-License-Identifier: BSD-3-Clause
-- The order of parameters, which is that of PyTorch's named_parameters, and the optimizer states in PyTorch's form,
-- which use it. spec/oracle/order_oracle.py has transformers' models and PyTorch's optimizers themselves.
local ps = require "ps"
local nn, optim = ps.nn, ps.optim
local fails = require("spec.check_lib").fails

local function names(module)
  local list = {}
  for name in module:named_parameters() do list[#list + 1] = name end
  return table.concat(list, " ")
end

-- Returns a class whose init is fn.
local function class(fn)
  local made = nn.class "Net"
  made.init = fn
  return made
end

local function linear() return nn.Linear(2, 2, { bias = false }) end
local function parameter() return nn.Parameter(ps.ones { 2 }) end

describe("the order of parameters", function()
  it("has a module's own parameters before those of its modules", function()
    -- in PyTorch: self.fc = Linear; self.scale = Parameter; register_buffer; self.out = Linear
    local Net = class(function(self)
      self.fc = linear()
      self.scale = parameter()
      self:buffer("seen", ps.zeros { 1 })
      self.out = linear()
      self:param("shift", ps.zeros { 2 })
    end)
    assert.equal("scale shift fc.weight out.weight", names(Net()))
    local Outer = class(function(self)
      self.inner = Net()
      self.last = parameter()
    end)
    assert.equal("last inner.scale inner.shift inner.fc.weight inner.out.weight", names(Outer()))
  end)

  it("follows a statement with several targets, which Lua assigns from the right", function()
    assert.equal("a.weight b.weight", names(class(function(self) self.a, self.b = linear(), linear() end)()))
    assert.equal("a.weight b.weight c.weight d.weight", names(class(function(self)
      self.a, self.b = linear(), linear()
      self.c,
      self.d = linear(),
        linear()
    end)()))
    assert.equal("a b c.weight d.weight", names(class(function(self)
      self.c, self.a, self.d, self.b = linear(), parameter(), linear(), parameter()
    end)()))
    assert.equal("a.weight b.weight", names(class(function(self) self.a = linear() self.b = linear() end)()))
  end)

  it("of a shared weight is that of the first name", function()
    local Net = class(function(self)
      self.a, self.b = linear(), linear()
      self.b.weight = self.a.weight
      local shared = linear()
      self.c, self.d = shared, shared
    end)
    assert.equal("a.weight c.weight", names(Net()))
  end)

  it("follows the script for modules that were made before", function()
    local first, second = linear(), linear()
    assert.equal("b.weight a.weight", names(class(function(self)
      self.b = second
      self.a = first
    end)()))
    local list = nn.ModuleList()
    list:append(second):append(first)
    assert.equal(second, list[0])
    local Outer = class(function(self)
      local function add(name, module) self[name] = module end
      add("b", second)
      add("a", first)
    end)
    assert.equal("b.weight a.weight", names(Outer()))
  end)

  it("does not change if a module or parameter replaces another one", function()
    local net = class(function(self) self.a, self.b = linear(), linear() end)()
    net.a, net.b = net.b, net.a
    assert.equal("a.weight b.weight", names(net))
    net.a = linear()
    assert.equal("a.weight b.weight", names(net))
    net.a = nil
    net.a = linear()
    assert.equal("b.weight a.weight", names(net))
  end)
end)

-- -- states ---------------------------------------------------------------------------------------------------------
local Two = class(function(self) self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3) end)
function Two:forward(x) return self.second(self.first(x):tanh()) end

local model
after_each(function()
  if model then model:close() end
  model = nil
end)

local function engine(kind, more)
  ps.manual_seed(1)
  local config = { plan_print = false, optimizer = { type = kind, params = { lr = 0.1 } } }
  if kind == "SGD" then config.optimizer.params.momentum = 0.9 end
  for key, value in pairs(more or {}) do config[key] = value end
  local optimizer
  model, optimizer = ps.initialize { quiet = true, config = config, model_func = function() return Two() end }
  return optimizer
end

-- Returns the state of a PyTorch optimizer for the four parameters. Their averages are filled with 1, 2, 3 and 4, in
-- the order in which `order` lists them.
local function torch_state(keys, order)
  local shapes = { ["first.weight"] = { 3, 3 }, ["first.bias"] = { 3 }, ["second.weight"] = { 3, 3 },
    ["second.bias"] = { 3 } }
  local state, params = {}, {}
  for i, name in ipairs(order) do
    local entry = { step = 1 }
    for _, key in ipairs(keys) do entry[key] = ps.full(shapes[name], i) end
    state[i - 1], params[i] = entry, i - 1
  end
  local group = { lr = 0.1, weight_decay = 0, params = params }
  if keys[1] == "momentum_buffer" then group.momentum, group.dampening, group.nesterov = 0.9, 0, false
  else group.betas, group.eps = { 0.9, 0.999 }, 1e-8 end
  return { state = state, param_groups = { group } }
end

local ORDER = { "first.weight", "first.bias", "second.weight", "second.bias" }
local OTHER = { "second.bias", "second.weight", "first.bias", "first.weight" }

for kind, keys in pairs { AdamW = { "exp_avg", "exp_avg_sq" }, Adam = { "exp_avg", "exp_avg_sq" },
                          SGD = { "momentum_buffer" } } do
  for _, memory in ipairs { "chunks", "plain" } do
    describe(("a state of %s in PyTorch's form, in %s,"):format(kind, memory), function()
      local more = { memory = memory == "plain" and "plain" or nil }
      local function values(optimizer)
        local got = optimizer:state_dict(model).tensors
        local list = {}
        for i, name in ipairs(ORDER) do list[i] = got[name .. "." .. keys[1]]:reshape(-1):tolist()[1] end
        return list
      end

      it("is matched by order, or by names if it has them", function()
        local optimizer = engine(kind, more)
        optimizer:load_state_dict(torch_state(keys, ORDER))
        assert.same({ 1, 2, 3, 4 }, values(optimizer))
        local named = torch_state(keys, OTHER)
        named.param_groups[1].param_names = OTHER
        optimizer:load_state_dict(named)
        assert.same({ 4, 3, 2, 1 }, values(optimizer))
        local given = optimizer:state_dict()
        assert.same(ORDER, { unpack(given.param_groups[1].param_names) })
        assert.same({ 0, 1, 2, 3 }, { unpack(given.param_groups[1].params) })
      end)

      it("is refused by the name of the parameter that does not fit", function()
        local optimizer = engine(kind, more)
        fails(function() optimizer:load_state_dict(torch_state(keys, OTHER)) end, "first.weight", "[3]", "[3, 3]")
        local named = torch_state(keys, ORDER)
        named.param_groups[1].param_names = { "first.weight", "first.bias", "third.weight", "second.bias" }
        fails(function() optimizer:load_state_dict(named) end, "second.weight", "param_names", "third.weight")
        assert.equal(0, optimizer.steps)
      end)
    end)
  end
end

describe("a state of ps.optim without a model", function()
  local function made(order)
    ps.manual_seed(2)
    local net = class(function(self)
      for _, name in ipairs(order) do self[name] = nn.Linear(3, 3) end
    end)()
    net.forward = nil
    local optimizer = optim.AdamW(net, { lr = 0.1 })
    for i, p in ipairs(net:parameters()) do p:set_grad(ps.full(p:shape(), i)) end
    optimizer:step()
    return net, optimizer
  end

  it("is matched by names, which modules and optim.groups provide", function()
    local net, saved = made { "a", "b" }
    local other, optimizer = made { "b", "a" }
    optimizer:load_state_dict(saved:state_dict())
    local want, got = saved:state_dict(net).tensors, optimizer:state_dict(other).tensors
    for name, tensor in pairs(want) do assert.truthy(ps.same(tensor, got[name]), name) end
    local third, third_optimizer = made { "a", "c" }
    assert.truthy(third)
    fails(function() third_optimizer:load_state_dict(saved:state_dict()) end, "no state for parameter c.weight")
    local grouped = optim.AdamW(optim.groups(net, 0.1))
    assert.same({ "a.weight", "b.weight", "a.bias", "b.bias" }, grouped:state_dict().values.param_names)
  end)
end)

describe("a state of ps.optim in PyTorch's form", function()
  it("survives a round trip, also for groups without momentum, and is refused if it does not fit", function()
    local p, q = nn.Parameter(ps.ones { 2 }), nn.Parameter(ps.ones { 3 })
    local function make(a, b)
      return optim.SGD({ { params = { a }, momentum = 0.9, lr = 0.5 }, { params = { b } } }, { lr = 0.1 })
    end
    local one = make(p, q)
    p:set_grad(ps.full({ 2 }, 4))
    q:set_grad(ps.full({ 3 }, 4))
    one:step()
    local state = one:torch_state_dict()
    assert.same({ 4, 4 }, state.state[0].momentum_buffer:tolist())
    assert.is_nil(state.state[1])
    assert.is_nil(state.param_groups[1].param_names)
    local a, b = nn.Parameter(ps.zeros { 2 }), nn.Parameter(ps.zeros { 3 })
    local other = make(a, b)
    other:set_lr(7)
    other:load_state_dict(state)
    assert.equal(0.5, other.groups[1].lr)
    a:set_grad(ps.ones { 2 })
    other:step()
    assert.near(-0.5 * (0.9 * 4 + 1), a:tolist()[1], 1e-6)
    fails(function() make(b, a):load_state_dict(state) end, "momentum_buffer of parameter 0 is [2]", "[3]")
    fails(function() optim.AdamW({ a, b }):load_state_dict(state) end, "2 groups, but this one has 1")
    fails(function() optim.AdamW({ { params = { a } }, { params = { b } } }):load_state_dict(state) end, "momentum")
    local rms = optim.RMSprop({ a, b }, { momentum = 0.5 })
    rms:step()
    state = rms:torch_state_dict()
    state.param_groups[1].centered = true
    fails(function() rms:load_state_dict(state) end, "a centered RMSprop", "grad_avg")
  end)
end)

describe("an optimizer", function()
  it("refuses tensors that get no gradient, by name", function()
    local p = nn.Parameter(ps.ones { 2 })
    for _, kind in ipairs { "Adam", "AdamW", "SGD", "RMSprop" } do
      local make = optim[kind]
      fails(function() make { p * 2 } end, kind .. ", group 1, parameter 1 [2]", "output of an op", "detach")
      fails(function() make { p, ps.tensor({ 1, 2 }, "int64") } end, "parameter 2 [2] is int64", "floats")
      fails(function() make { { params = { p } }, { params = { p * 2 } } } end, "group 2, parameter 1")
      fails(function() make { { params = { p, 3 } } } end, "parameter 2 is a number")
      assert.truthy(make { p, ps.ones { 2 } })
    end
    local bmt = require "ps.bmt"
    bmt.init_distributed { quiet = true, config = { plan_print = false } }
    finally(bmt.close)
    fails(function() bmt.optim.AdamOptimizer { p, p * 2 } end, "parameter 2 [2]", "output of an op")
    fails(function() bmt.optim.AdamOptimizer { ps.tensor({ 1 }, "int32") } end, "parameter 1 [1] is int32")
  end)
end)
