-- SPDX-License-Identifier: BSD-3-Clause
-- Public functions, methods and modules refuse an argument after their last one: each of them is called in this way.
-- Functions that take any number of arguments are listed here, and check them themselves.
local ps = require "ps"
local exact = require "ps.core.exact"
local annotations = require "ps.prompt.annotations"
local check = require "spec.check_lib"
local fails, is = check.fails, check.is
local nn, F = ps.nn, ps.F

-- Functions that accept any number of arguments, or pass all of them on.
local MANY = {}
for name in ([[
    t:expand t:permute t:reshape t:tile t:to t:view
    ps.empty ps.ones ps.zeros ps.rand ps.randn ps.einsum
    ps.scope ps.autocast ps.no_grad ps.enable_grad ps.recompute ps.offload_activations ps.scope_end ps.detect_anomaly
    ps.retry ps.C module:to module:new dist.print_rank
    sched.LambdaLR sched.StepLR sched.MultiStepLR sched.ExponentialLR sched.CosineAnnealingLR sched.WarmupLR
    sched.WarmupDecayLR sched.WarmupCosineLR sched.OneCycle sched.LRRangeTest sched.warmup_cosine sched.warmup_linear
    sched.constant sched.ConstantLR sched.LinearLR sched.PolynomialLR sched.CosineAnnealingWarmRestarts
    sched.MultiplicativeLR sched.SequentialLR sched.OneCycleLR sched.ReduceLROnPlateau sched.linear sched.cosine
    sched.cosine_with_restarts sched.polynomial sched.constant_with_warmup sched.inverse_sqrt sched.cosine_with_min_lr
    sched.cosine_warmup_with_min_lr sched.warmup_stable_decay sched.reduce_lr_on_plateau
    ]]):gmatch "%S+" do MANY[name] = true end

-- Functions that call another function, which checks the arguments.
local LEADS = {}
for name in pairs(annotations.own()) do LEADS["ps." .. name] = true end
for name in pairs(require("ps.tensor").methods()) do LEADS["ps." .. name] = true end

local function one_too_many(call, fn, takes)
  local args = { n = takes + 1 }
  args[args.n] = 12345
  local ok, problem = pcall(fn, unpack(args, 1, args.n))
  assert(not ok, call .. " took an argument too many")
  assert(tostring(problem):find("has no", 1, true) and tostring(problem):find("it was given 12345", 1, true),
    call .. ": " .. tostring(problem))
end

local function walk(prefix, t, seen)
  local n = 0
  for name, fn in pairs(t) do
    local call = prefix .. tostring(name)
    if type(fn) == "function" and type(name) == "string" and not name:find "^_" and not (seen and seen[name]) then
      local info = debug.getinfo(exact.inner(fn), "uS")
      if info.what ~= "C" and not info.isvararg then
        one_too_many(call, fn, info.nparams)
        n = n + 1
      elseif not MANY[call] and not LEADS[call] and info.what ~= "C" then
        error(call .. " takes any number of arguments; if it looks at them, name it in MANY", 0)
      end
    end
  end
  return n
end

describe("a surplus argument is an error", function()
  it("of methods of tensors", function()
    local methods = {}
    for name in pairs(require("ps.tensor").methods()) do methods[name] = ps.zeros({ 1 })[name] end
    assert(walk("t:", methods) > 80)
  end)

  it("of functions of ps and its tables", function()
    local n = walk("ps.", getmetatable(ps).all())
    for _, name in ipairs { "functional", "nn", "optim", "sched", "data", "tokenizer", "train", "checkpoints",
      "safetensors", "profiler", "progress", "inspect", "serialize", "dist" } do
      n = n + walk(name .. ".", ps[name])
    end
    assert(n > 150, n)
  end)

  it("of functions that call others", function()
    for name, fn in pairs(annotations.own()) do
      local info = debug.getinfo(exact.inner(fn), "u")
      if not info.isvararg then one_too_many("ps." .. name, ps[name], info.nparams) end
    end
    local x = ps.ones { 2 }
    for _, name in ipairs { "exp", "sum", "add", "clamp", "topk", "softmax", "sort", "where" } do
      local takes = debug.getinfo(exact.inner(x[name]), "u").nparams
      local args = { x, [takes + 1] = 12345 }
      if name == "add" then args[2] = x end
      fails(function() ps[name](unpack(args, 1, takes + 1)) end, "it was given 12345")
    end
  end)

  it("of ops", function()
    for _, info in pairs(ps.op_info) do
      local args, n = {}, debug.getinfo(ps.ops[info.name], "u").nparams
      args[n] = 12345
      fails(function() ps.ops[info.name](unpack(args, 1, n)) end, "it was given 12345")
    end
  end)

  it("of modules, their classes and their methods", function()
    for name, class in pairs(nn) do
      if type(class) == "table" and rawget(class, "instance") then
        local init = debug.getinfo(class.init, "u")
        if not init.isvararg then one_too_many("nn." .. name, class, init.nparams - 1) end
      end
    end
    assert(walk("module:", nn.Module, { init = true, forward = true, extra_repr = true }) > 10)
    local x = ps.ones { 1, 3 }
    fails(function() nn.Linear(3, 3)(x, nil, 5) end, "Linear(x, residual) has no third argument; it was given 5")
    fails(function() nn.Sequential(nn.ReLU())(x, x) end, "Sequential(x) has no second argument; it was given a tensor")
    local Net = nn.class "Net"
    function Net:forward(y) return y end
    fails(function() Net(3) end, "Net() has no first argument; it was given 3")
    fails(function() Net()(x, 1, 2) end, "Net(y) has no second argument; it was given 1")
    assert.truthy(Net()(x, nil, nil))
  end)

  it("of optimizers, schedules, loaders and groups", function()
    local optimizer = ps.optim.SGD(nn.Linear(2, 2), { lr = 1 })
    walk("optimizer:", select(2, getmetatable(optimizer).__names(optimizer)))
    walk("schedule:", getmetatable(ps.sched.constant { optimizer = optimizer, max_lr = 1 }).__index)
    local group = ps.dist.self()
    walk("group:", getmetatable(group).__index)
    group:close()
    optimizer:zero_grad(true)
    optimizer:zero_grad { set_to_none = true }
    fails(function() optimizer:zero_grad(false) end, "set_to_none is false")
  end)

  it("of engines", function()
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return nn.Linear(2, 2) end,
      config = { plan_print = false, optimizer = { type = "SGD" } } }
    local x = ps.ones { 1, 2 }
    fails(function() model(x, nil, 7) end, "Linear(x, residual) has no third argument; it was given 7")
    fails(function() model:backward(model(x):sum(), nil, true) end, "model:backward", "it was given true")
    fails(function() model:eval(1) end, "model:eval() has no first argument")
    fails(function() optimizer:step(nil, 1) end, "optimizer:step(options) has no second argument")
    fails(function() model:to "cuda" end, "device")
    fails(function() optimizer:set_lr(1, 2) end, "optimizer:set_lr(lr) has no second argument")
    fails(function() model.eval() end, "model:eval is a method, which is called with a colon")
    fails(function() model.parameters() end, "module:parameters is a method, which is called with a colon")
    fails(function() optimizer.step() end, "optimizer:step is a method, which is called with a colon")
    fails(function() optimizer.set_lr(1) end, "optimizer:set_lr is a method, which is called with a colon")
    optimizer:zero_grad(true)
    model:close()
  end)

  it("of models from folders, with the names of the inputs", function()
    local gpt2 = require("models.gpt2").new { n_layer = 1, n_embd = 8, n_head = 2, vocab_size = 16, n_positions = 8 }
    local x = ps.zeros({ 1, 4 }, { dtype = "int64" })
    fails(function() gpt2(x, x, x) end, "GPT2LMHeadModel(idx, targets) has no third argument; it was given a tensor",
      "other inputs go by name", "attention_mask =")
  end)
end)

describe("a method without its self", function()
  it("is an error, for each method of tensors and of schedules", function()
    local names = 0
    for name, method in pairs(require("ps.tensor").methods()) do
      local x = ps.ones { 2, 2 }
      if type(method) == "function" and not name:find "^_" then
        assert.False(pcall(x[name]), name)
        names = names + 1
      end
    end
    assert.truthy(names > 200)
    fails(function() ps.ones({ 2 }).detach() end, "t:detach is a method, which is called with a colon")
    local schedule = ps.sched.StepLR(ps.optim.SGD(nn.Linear(2, 2), { lr = 1 }), 2)
    fails(function() schedule.step() end, "schedule:step is a method")
  end)

  -- Calls each function of a table without an argument and with one that is not its self.
  local function refuse(prefix, methods, except)
    local n = 0
    for name, method in pairs(methods) do
      if type(method) == "function" and type(name) == "string" and not name:find "^_" and not (except or {})[name] then
        for _, first in ipairs { false, 2, "bf16", {}, { a = 1 } } do
          fails(function() method(first or nil) end, prefix .. name .. " is a method, which is called with a colon")
        end
        n = n + 1
      end
    end
    assert.truthy(n > 2, prefix)
  end

  it("is an error if the first argument is not an object", function()
    local module = nn.Linear(2, 2)
    local optimizer, methods, x = ps.optim.SGD(module, { lr = 1 }), {}, ps.ones { 1 }
    for name in pairs(require("ps.tensor").methods()) do methods[name] = x[name] end
    refuse("t:", methods)
    refuse("module:", nn.Module, { init = true, forward = true, extra_repr = true, new = true })
    refuse("optimizer:", select(2, getmetatable(optimizer).__names(optimizer)))
    refuse("schedule:", getmetatable(ps.sched.constant { optimizer = optimizer, max_lr = 1 }).__index)
    refuse("scaler:", getmetatable(ps.optim.GradScaler()).__index)
    refuse("tokenizer:", getmetatable(ps.tokenizer.bytes()).__index)
  end)

  it("is an error of a forward, which a script may define itself", function()
    local Net = nn.class "Net"
    function Net:init() self.fc = nn.Linear(2, 2) end
    function Net:forward(x) return self.fc(x) end
    function Net:loss(x) return self(x):sum() end
    local net, x = Net(), ps.ones { 1, 2 }
    fails(function() net.forward(x) end, "no method or field 'fc'", "called with a colon, model:forward(x)")
    fails(function() nn.Linear(2, 2).forward(x) end, "called with a colon, model:forward(x)")
    local problem = fails(function() return x.weight end, "no method or field 'weight'")
    assert.is_nil(tostring(problem):find("colon", 1, true))
    assert.same({ 1, 2 }, ps.add(1, x):shape())                   -- a function of ps may begin with a number
  end)
end)

describe("arguments of PyTorch's", function()
  local a, b, m = ps.tensor { 5, 7 }, ps.tensor { 2, 2 }, ps.tensor { { 1, 9 }, { 5, 2 }, { 3, 4 } }
  -- Expected values from PyTorch 2.15.
  it("that have the same meaning", function()
    is({ 9, 11 }, a:add(b, 2))
    is({ 9, 11 }, a:add(b, { alpha = 2 }))
    is({ 1, 3 }, ps.sub(a, b, 2))
    is({ 9, 11 }, a:add(2, 2))
    is({ 1, 3 }, a:clone():sub_(b, 2))
    is({ 9, 11 }, a:long():add(b:long(), 2), "int64")
    is({ { 5, 9 } }, (m:topk(1, 0)))
    is({ { 1, 0 } }, select(2, m:topk(1, 0)))
    is({ { 1 }, { 2 }, { 3 } }, (m:topk(1, -1, false)))
    is({ { 0 }, { 1 }, { 0 } }, select(2, m:topk(1, { largest = false })))
    is({ { 1, 2 }, { 3, 4 } }, (m:topk(2, 0, false)))
    assert.same({ 3, 2 }, m:reshape(1, 3, 1, 2):squeeze({ 0, 2 }):shape())
    assert.same({ 1, 1 }, m:argmax(nil, true):shape())
    is({ 2, 2 }, a:clone():copy_(b, true))
    -- the product is not rounded to the half type
    is({ 1 + 2 ^ -7 }, ps.tensor({ 1 }, "bf16"):add(ps.tensor({ 1.0078125 }, "bf16"), 2 ^ -7 / 1.0078125), "bf16")
  end)
  it("that have no meaning here", function()
    fails(function() a:div(b, "floor") end, "div has no rounding_mode", "floor()")
    fails(function() a:div(b, { rounding_mode = "trunc" }) end, "div has no rounding_mode")
    fails(function() a:round(2) end, "decimals", "10 ^ n")
    fails(function() a:long():add(b:long(), 0.5) end,
      "add: alpha is 0.5; for tensors of integers it must be a whole number")
    fails(function() a:clamp(b) end, "clamp takes numbers as bounds", "x:maximum(low):minimum(high)")
    fails(function() m:softmax(1, "fp64") end, "t:softmax(d) has no second argument; it was given 'fp64'")
    fails(function() m:squeeze(0, 1) end, "t:squeeze(dims) has no second argument; it was given 1")
    fails(function() nn.clip_grad_norm({ a }, 1, 1) end, "it was given 1")
    fails(function() nn.clip_grad_norm({ w = a }, 1) end, "the list of parameters has 'w' among its values")
    fails(function() nn.clip_grad_norm(ps.optim.SGD({ m:requires_grad_(true) }, { lr = 1 }), 1) end, "among its values")
    fails(function() nn.clip_grad_value({ w = a }, 1) end, "the list of parameters has 'w' among its values")
    fails(function() nn.clip_grad_norm({ a }, 0 / 0) end, "max_norm is NaN")
    fails(function() F.relu(m:max(1)) end, "it was given a tensor", "parentheses around it keep only the first")
    fails(function() ps.randn({ 2 }, {}, 3) end, "ps.randn(shape, options) has no third argument; it was given 3")
    fails(function() m:reshape({ 6 }, 1) end, "reshape: pass the numbers as one list")
    fails(function() m:max(nil, true) end, "keepdim needs a dimension")
    fails(function() a:clamp() end, "neither a lower nor an upper bound")
    fails(function() a:fill_() end, "needs a number")
    for call, fn in pairs { ["t:sort(d, descending)"] = function() m:sort { dim = 1 } end,
      ["(low, high)"] = function() m:clamp { min = 0 } end,
      ["t:std(dims, unbiased, keepdim)"] = function() m:std { unbiased = false } end,
      ["t:sum(dims, keepdim)"] = function() m:sum { dim = 1, keepdim = true } end,
      ["t:mean(dims, keepdim)"] = function() m:mean { 0, keepdim = true } end } do
      fails(fn, call .. " takes its arguments in this order, without names, but it was given { ")
    end
    fails(function() m:sum { dim = 1, keepdim = true } end, "{ dim = ..., keepdim = ... }")
    for _, fn in ipairs { function() m:softmax { dim = 1 } end, function() m:reshape { shape = { 6 } } end,
      function() m:flip { dims = { 0 } } end, function() m:argmax { dim = 1 } end, function() m:max { dim = 1 } end,
      function() m:cumsum { dim = 0 } end } do
      fails(fn, "names", "order")
    end
    assert.same({ 1, 2 }, m:sum({ 0 }, true):shape())
  end)
end)
