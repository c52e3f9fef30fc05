-- SPDX-License-Identifier: BSD-3-Clause
-- Wrong shapes, types, ids and settings: each is a Lua error that names the op, the shapes and the remedy, and never a
-- crash. Files and training: bad_files_spec.lua.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local check_lib = require "spec.check_lib"
local fails, fails_with = check_lib.fails_saying, check_lib.fails_as

describe("ops with wrong tensors", function()
  local a, b

  setup(function() a, b = ps.ones { 2, 3 }, ps.ones { 4, 5 } end)
  teardown(function() a, b = nil, nil end)

  it("name themselves and the shapes", function()
    fails_with("EINVAL", { "add:", "do not broadcast", "fp32 [2, 3], fp32 [4, 5]" }, function() return a + b end)
    fails_with("EINVAL", { "matmul:", "[2, 3]", "[4, 5]" }, function() return a:matmul(b) end)
    fails_with("EINVAL", { "concat:", "[2, 3]", "[4, 5]" }, function() return ps.cat({ a, b }, 0) end)
    fails_with("EINVAL", { "linear:", "[2, 3]", "[4, 5]" }, function() return ps.F.linear(a, b) end)
    fails_with("EINVAL", { "reshape:", "[7, 2]", "6 elements" }, function() return a:reshape(7, 2) end)
    fails_with("EINVAL", { "reshape:", ":contiguous()" }, function() return a:t():view(6) end)
    fails_with("EINVAL", { "permute:", "twice" }, function() return a:permute(0, 0) end)
    fails_with("EINVAL", { "expand", "[2, 3]" }, function() return a:expand(2, 4) end)
    fails_with("EINVAL", { "layer_norm:", "[2, 3]", "[4, 5]" }, function() return ps.F.layer_norm(a, b) end)
    fails_with("EINVAL", { "attention_packed:", "[2, 3]" }, function() return ps.F.attention_packed(a, 2) end)
    fails_with("EINVAL", { "copy_", "[4, 5]" }, function() a:copy_(b) end)
  end)

  it("say which tensor to convert if types differ", function()
    local x, w = ps.ones { 2, 8 }, ps.ones({ 8, 8 }, { dtype = "bf16" })
    local heads = ps.ones { 1, 1, 2, 4 }
    for _, case in ipairs {
      { "linear: x is fp32, but w is bf16", 'x:to "bf16"', function()
        return ps.nn.Linear(8, 3, { dtype = "bf16" })(x)
      end },
      { "linear: x is bf16, but w is fp32", 'x:to "fp32"', function() return ps.nn.Linear(8, 3)(x:to "bf16") end },
      { "linear: x is int64", 'x:to "bf16"', function() return ps.F.linear(x:long(), w) end },
      { "mlp: x is fp32, but w1 is bf16", 'x:to "bf16"', function() return ps.F.mlp(x, w, nil, w) end },
      { "matmul: a is fp32, but b is bf16", 'a:to "bf16"', function() return x:matmul(w) end },
      { "matmul: a is fp32, but b is int64", 'b:to "fp32"', function() return x:matmul(w:long()) end },
      { "matmul: a is int64 and b is int64", ":float()", function() return x:long():matmul(w:long()) end },
      { "conv: x is fp32, but w is bf16", 'x:to "bf16"', function()
        return ps.nn.Conv1d(8, 3, 1, { dtype = "bf16" })(ps.ones { 1, 8, 4 })
      end },
      { "lm_loss: x is fp32, but w is bf16", 'x:to "bf16"', function()
        return ps.F.lm_loss(x, w, ps.tensor({ 0, 1 }, "int64"))
      end },
      { "all of one float type", "convert with :to", function()
        return ps.F.attention(heads, heads:to "bf16", heads:to "fp32")
      end } } do
      fails_with("EINVAL", { case[1], case[2] }, case[3])
    end
  end)

  it("name the types and devices", function()
    local i = ps.tensor({ 1, 2 }, "int64")
    fails_with("EINVAL", { "embedding", "int32 or int64" }, function() return ps.F.embedding(a, b) end)
    fails({ "F.cross_entropy:", "[2, 3]", "[4, 5]" }, function() return ps.F.cross_entropy(a, b) end)
    fails_with("EINVAL", { "mean", "int64 [2]" }, function() return i:mean() end)
    fails_with("EINVAL", { "different devices", "cpu", "ref", ":to(device)" }, function() return a + a:to "ref" end)
    fails({ "a shape must be a list of sizes, not 'a'" }, function() ps.randn("a") end)
    fails({ "a size in a shape must be a whole number, not 'a'" }, function() ps.randn { "a" } end)
    fails({ "no such type: fp12", "bf16" }, function() ps.zeros({ 1 }, { dtype = "fp12" }) end)
    fails_with("EUNSUP", { "gpu", "cpu" }, function() ps.zeros({ 1 }, { device = "gpu" }) end)
    fails_with("EUNSUP", { "meta" }, function() return ps.zeros({ 3 }, { device = "meta" }):tolist() end)
    fails_with("EINVAL", { "only float tensors", "int64" }, function() i:requires_grad(true) end)
    fails({ "rows of different lengths" }, function() return ps.tensor { { 1, 2 }, { 3 } } end)
    fails({ "a string among the numbers" }, function() return ps.tensor { "x" } end)
    fails({ "add: b is a table; it takes a tensor" }, function() return ps.ops.add(a, {}) end)
    fails({ "input b is missing" }, function() return ps.ops.add(a, nil) end)
  end)

  it("name indices out of range", function()
    local ids = ps.tensor({ 0, 2 }, "int64")
    fails({ "index 2", "size 2" }, function() return a[2] end)
    fails({ "dimension 5" }, function() return a:size(5) end)
    fails({ "dimension 2" }, function() return a:sum(2) end)
    fails({ "one element", "6" }, function() return a:item() end)
    fails_with("ERANGE", { "embedding", "2" }, function() return ps.F.embedding(ids, a) end)
    fails_with("ERANGE", { "cross_entropy", "3" }, function()
      return ps.F.cross_entropy(a, ps.tensor({ 0, 3 }, "int64"))
    end)
    fails_with("ERANGE", { "lm_loss", "4" }, function()
      return ps.F.lm_loss(ps.ones { 2, 5 }, b, ps.tensor({ 0, 4 }, "int32"))
    end)
    fails_with("ERANGE", { "gather", "-1" }, function()
      return a:gather(1, ps.tensor({ { 0, -1 }, { 0, 0 } }, "int64"))
    end)
    fails({ "8" }, function() return ps.zeros { 1, 1, 1, 1, 1, 1, 1, 1, 1 } end)
    fails({ "at most 8" }, function() return a:reshape(1, 1, 1, 1, 1, 1, 1, 1, 1, 6) end)
    fails({ "list of numbers" }, function() return ps.ops.permute(a) end)
    fails_with("EINVAL", { "negative", "-1" }, function() return ps.zeros { -1 } end)
    fails_with("EINVAL", { "addressed" }, function() return ps.empty { 2 ^ 40, 2 ^ 20 } end)
  end)

  it("name the requirements of gradients", function()
    local w = ps.ones({ 2, 3 }, { requires_grad = true })
    fails_with("EINVAL", { "depends on nothing that requires a gradient" }, function() a:sum():backward() end)
    fails_with("EINVAL", { "backward", "[2, 3]", "needs a gradient" }, function() (w * 2):backward() end)
    fails_with("EINVAL", { "fill_", "ps.no_grad" }, function() ps.ops.fill_(w, 1) end)
    local loss = (w * w):sum()
    loss:backward()
    fails_with("ESTATE", { "second time", "compute the loss again" }, function() loss:backward() end)
    local x = ps.ones { 2, 3 }
    local y = (w * x):sum()
    x:fill_(3)
    fails_with("ESTALE", { "changed in place", "mul" }, function() y:backward() end)
    fails_with("EINVAL", { "gradient" }, function() w:set_grad(b) end)
    w:set_grad(nil)
  end)

  it("report that a scope freed the bytes", function()
    local kept
    ps.scope(function() kept = ps.ones { 200, 200 } end)
    fails_with("ESTALE", { "[200, 200]", ":keep()", "ps.scope" }, function() return kept + 1 end)
    fails_with("ESTALE", { "[200, 200]" }, function() return kept:tolist() end)
  end)

  it("name a master that is not as large as its parameter", function()
    for _, n in ipairs { 0, 3, 12 } do
      fails({ "master_lerp_", "tensor 1 of group 0 has " .. n .. " elements, but the parameter has 6" }, function()
        ps.ops.master_lerp_({ a, ps.zeros { n }, a }, 0.5)
      end)
    end
  end)

  it("survive arbitrary invalid arguments", function()
    local tensors = { a, b, ps.zeros {}, ps.zeros { 0 }, ps.zeros { 3, 0 }, ps.ones({ 2, 3 }):t(), ps.ones { 6 },
      ps.randn { 2, 2, 3 }, ps.tensor({ -1, 7, 1 }, "int64"), ps.tensor({ { 0, 1, 1 }, { 1, 0, 9 } }, "int32"),
      ps.tensor({ true, false, true }), ps.ones({ 2, 3 }, { dtype = "bf16" }), ps.ones({ 3 }, { dtype = "fp64" }),
      ps.ones({ 3 }, { dtype = "uint8" }), ps.ones({ 1, 3 }):expand(2, 3), ps.randn { 1, 2, 12 },
      ps.randn { 1, 2, 4, 3 },
      ps.ones({ 2, 3 }, { requires_grad = true }), ps.ones({ 2, 3 }, { device = "ref" }) }
    local numbers = { 0, 1, 2, 3, -1, 4, 8, 100, -100, 1e6, -1e6, 2 ^ 31 - 1, -2 ^ 31, 2 ^ 40, 1e18, -1e18, 0.5, 1e-30,
      1 / 0, 0 / 0 }
    local state = 12345
    local function random(n)
      state = (state * 16807) % 2147483647
      return state % n + 1
    end
    local function number() return numbers[random(random(3) == 1 and #numbers or 6)] end
    local function value()
      local kind = random(8)
      if kind == 1 then return nil end
      if kind == 2 then return { number(), number(), number() } end
      return number()
    end
    ps.set_memory_limit(ps.memory().used + 2 ^ 26)
    local ran, refused = 0, 0
    for _, info in pairs(ps.op_info) do
      local n_in = info.ins:find("*", 1, true) and 1 or select(2, info.ins:gsub("%S+", ""))
      local params = debug.getinfo(ps.ops[info.name], "u").nparams - 1          -- the op rejects its last parameter
      for _ = 1, 150 do
        local args = {}
        for i = 1, params do
          if i > n_in then args[i] = value()
          elseif info.ins:find("*", 1, true) then
            args[i] = {}
            for k = 1, random(6) do args[i][k] = tensors[random(#tensors)] end
          elseif random(20) > 1 then args[i] = tensors[random(#tensors)] end
        end
        local ok, problem = pcall(function() return ps.ops[info.name](unpack(args, 1, params)) end)
        if ok then ran = ran + 1 else refused = refused + 1 end
        if not ok and type(problem) == "table" then
          assert.truthy(problem.msg:find(info.name, 1, true) or problem.op == info.name, problem.msg)
        end
      end
    end
    ps.set_memory_limit(0)
    assert.truthy(ran > 500 and refused > 2000, ran .. " ran, " .. refused .. " refused")
  end)
end)

describe("models and optimizers with wrong settings", function()
  it("name the value that does not fit", function()
    fails({ "no preset 'gpt3'", "gpt2-xl" }, function() gpt2.new "gpt3" end)
    fails({ "n_head = 3", "n_embd = 32" }, function() gpt2.new("tiny", { n_head = 3 }) end)
    fails({ "no option 'layers'" }, function() gpt2.new("tiny", { layers = 3 }) end)
    local model = gpt2.new "tiny"
    local x = ps.zeros({ 2, 40 }, { dtype = "int32" })
    fails({ "40 positions", "has 32" }, function() model(x, x) end)
    fails({ "[batch, positions]" }, function() model(x[0]) end)
    local small = x:narrow(1, 0, 8)
    fails({ "embedding", "256" }, function() model(small + 256, small) end)
    fails({ "lm_loss", "256" }, function() model(small, small + 256) end)
    fails({ "AdamW", "no option 'rate'" }, function() ps.optim.AdamW(model, { rate = 1 }) end)
    fails({ "no parameters" }, function() ps.optim.SGD({}, { lr = 1 }) end)
    fails({ "listed twice" }, function()
      local p = ps.ones({ 1 }, { requires_grad = true })
      ps.optim.SGD({ p, p }, { lr = 1 })
    end)
  end)

  it("do not step on gradients that are not numbers", function()
    local p = ps.ones({ 4 }, { requires_grad = true })
    local optimizer = ps.optim.AdamW({ p }, { lr = 0.1 })
    p:set_grad(ps.full({ 4 }, 0 / 0))
    fails({ "gradient norm is", "not changed" }, function() optimizer:step { max_norm = 1 } end)
    assert.same({ 1, 1, 1, 1 }, p:tolist())
  end)
end)

describe("seeds", function()
  it("are whole numbers", function()
    fails({ "bad_input_spec.lua", "takes a whole number, not a string" }, function() ps.manual_seed("x") end)
    fails({ "takes a whole number, not a nil" }, function() ps.manual_seed() end)
    fails({ "takes a whole number, not 0.5" }, function() ps.manual_seed(0.5) end)
  end)

  it("are numbers of 64 bits, each with a different stream", function()
    local seeds = { -1, -2, 2 ^ 60, 2 ^ 70, 0 / 0, math.huge }
    for _, seed in ipairs(seeds) do
      fails({ "bad_input_spec.lua", "from 0 to 2^53" }, function() ps.manual_seed(seed) end)
      fails({ "from 0 to 2^53" }, function() ps.init_distributed { seed = seed } end)
    end
    fails({ "ps.manual_seed takes a whole number" }, function() ps.manual_seed(ps.ones { 1 }) end)
    ps.manual_seed(18446744073709551615ULL)
    assert.equal(18446744073709551615ULL, ps.rng().seed)
    ps.manual_seed(2 ^ 53)
    assert.equal(9007199254740992ULL, ps.rng().seed)
  end)
end)

describe("groups of parameters of an engine", function()
  it("name the unknown key or type", function()
    local function groups(list)
      return function()
        ps.initialize { config = {}, quiet = true, param_groups = list, model_func = function()
          return ps.nn.Linear(4, 4)
        end }
      end
    end
    fails({ "param_groups must be a list of tables" }, groups {})
    fails({ "param_groups must be a list of tables" }, groups "bias")
    fails({ "param_groups[2] is a number, not a table" }, groups { {}, 3 })
    fails({ "param_groups[1].match is a string, not a function" }, groups { { match = "bias" }, {} })
    fails({ "param_groups[1] has an unknown key 'params'; a group may have match = function(name, parameter)" },
      groups { { params = { "bias" } } })
    fails({ "param_groups[2].weight_decay is a string" }, groups { {}, { weight_decay = "0" } })
    fails({ "param_groups[2].weight_decay is -1; expected a number" }, groups { {}, { weight_decay = -1 } })
    fails({ "param_groups[1].lr is ", "nan; expected a number" }, groups { { lr = 0 / 0 } })
    fails({ "param_groups[1].betas is a list (0.9, 1); expected" }, groups { { betas = { 0.9, 1 } } })
  end)
end)

describe("lists", function()
  local x

  setup(function() x = ps.arange(0, 6, 1, { dtype = "fp32" }):reshape(2, 3) end)
  teardown(function() x = nil end)

  it("have no names: an option in a shape, or a dimension by name, is refused", function()
    fails({ "bad_input_spec.lua", "ps.zeros: the shape has 'dtype' among its values", "a separate table after it" },
      function() local _ = ps.zeros { 2, 2, dtype = "bf16" } end)
    fails({ "ps.randn: the shape has 'dtype'" }, function() return ps.randn { 2, dtype = "bf16" } end)
    fails({ "ps.empty: the shape has 'device'" }, function() return ps.empty { 2, device = "cpu" } end)
    fails({ "ps.full: the shape has 'dtype'" }, function() return ps.full({ 2, dtype = "int32" }, 1) end)
    fails({ "ps.randint: the shape has 'dtype'" }, function() return ps.randint(0, 5, { 2, dtype = "int32" }) end)
    fails({ "ps.zeros: the shape has [0] among its values" }, function() return ps.zeros { [0] = 2, 3 } end)
    fails({ "ps.tensor: a list has 'dtype'" }, function() return ps.tensor { 1, 2, dtype = "fp16" } end)
    fails({ "ps.tensor: a list has [0] among its values" }, function() return ps.tensor { { [0] = 1, 2 } } end)
    fails({ "t:sum(dims, keepdim) takes its arguments in this order", "{ dims = ... }" },
      function() return x:sum { dims = 0 } end)
    fails({ "t:mean(dims, keepdim) takes its arguments in this order", "{ keepdim = ... }" },
      function() return x:mean { 0, keepdim = true } end)
  end)

  it("of dimensions name each once, as in PyTorch", function()
    fails({ "dimension 0 is named twice" }, function() return x:sum { 0, 0 } end)
    fails({ "dimension 1 is named twice" }, function() return x:amax { -1, 1 } end)
    assert.same({ 3, 5, 7 }, x:sum({ 0 }):tolist())
    assert.equal(15, x:sum({}):item())
  end)
end)

describe("bounds in reverse order", function()
  it("are errors, as in PyTorch", function()
    fails({ "bad_input_spec.lua", "ps.arange: from 0 to 5 the step -1 has the wrong sign" },
      function() ps.arange(0, 5, -1) end)
    fails({ "ps.arange: from 5 to 0 the step 1 has the wrong sign" }, function() ps.arange(5, 0) end)
    fails({ "from 0 to -3 the step 1" }, function() ps.arange(-3) end)
    assert.same({ 0 }, ps.arange(5, 5, -1):shape())
    assert.same({ 5, 4, 3, 2, 1 }, ps.arange(5, 0, -1):tolist())
    local x = ps.ones { 2, 3, 4 }
    fails({ "bad_input_spec.lua", "flatten: the first dimension, 1, is after the last, 0" },
      function() x:flatten(1, 0) end)
    fails({ "the first dimension, 2, is after the last, 1" }, function() x:flatten(-1, -2) end)
    assert.same({ 2, 3, 4 }, x:flatten(1, 1):shape())
    assert.same({ 2, 12 }, x:flatten(1):shape())
    assert.same({ 1 }, ps.tensor(3):flatten(0, -1):shape())
  end)
end)

describe("to", function()
  it("takes one argument: an argument after a device is refused", function()
    local x, model = ps.ones { 2 }, ps.nn.Linear(1, 1)
    for _, call in ipairs { function() x:to("cpu", "bf16") end, function() model:to("cpu", "bf16") end } do
      fails({ "bad_input_spec.lua", ":to takes a type, a device, or { dtype = , device = }, and no" }, call)
    end
    fails({ "tensor:to takes a type" }, function() x:to() end)
  end)
end)

describe("flags of reductions", function()
  it("are booleans: 0 would count as true", function()
    local x = ps.ones { 2, 3 }
    for _, name in ipairs { "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin" } do
      fails({ "bad_input_spec.lua", "keepdim is a number; it must be a boolean" }, function()
        local _ = x[name](x, 0, 0)
      end)
      fails({ "keepdim is a table" }, function() local _ = x[name](x, 0, { keepdim = true }) end)
    end
    for _, name in ipairs { "var", "std" } do
      fails({ "unbiased is a number; it must be a boolean" }, function() local _ = x[name](x, 0, 0) end)
      fails({ "unbiased is a table" }, function() local _ = x[name](x, 0, { correction = 0 }) end)
      fails({ "keepdim is a number" }, function() local _ = x[name](x, 0, false, 1) end)
    end
    assert.same({ 1, 3 }, x:sum(0, true):shape())
    assert.same({ 3 }, x:sum(0, false):shape())
  end)
end)

describe("ps.tensor", function()
  it("is bool if all values are booleans; among numbers true is 1, as in PyTorch", function()
    assert.equal("bool", ps.tensor({ true, false }):dtype())
    local mixed = ps.tensor { 2.5, true, false }
    assert.equal("fp32", mixed:dtype())
    assert.same({ 2.5, 1, 0 }, mixed:tolist())
    assert.same({ 1, 2.5 }, ps.tensor({ true, 2.5 }):tolist())
  end)
end)

describe("the default type", function()
  it("requires floats", function()
    for _, name in ipairs { "int32", "int64", "uint8", "bool" } do
      fails({ "bad_input_spec.lua", "ps.set_default_dtype: " .. name .. " is not a floating-point type" },
        function() ps.set_default_dtype(name) end)
    end
    assert.equal("fp32", ps.set_default_dtype "bf16")
    assert.equal("bf16", ps.set_default_dtype "fp32")
  end)
end)

describe("settings of optimizers", function()
  it("are in the valid range of the algorithm", function()
    local p = ps.ones({ 2 }, { requires_grad = true })
    local function refused(make, setting, value, expected)
      fails({ "bad_input_spec.lua", setting .. " is ", "expected " .. expected }, function()
        ps.optim[make]({ p }, { [setting] = value })
      end)
      if setting ~= "max_norm" then
        fails({ "group 1: " .. setting .. " is " }, function()
          ps.optim[make]({ { params = { p }, [setting] = value } })
        end)
      end
    end
    local least = "a number of at least 0"
    for _, make in ipairs { "Adam", "AdamW", "SGD" } do
      for _, bad in ipairs { -1, 0 / 0, math.huge } do
        refused(make, "lr", bad, least)
        refused(make, "weight_decay", bad, least)
      end
      refused(make, "max_norm", -1, least)
      refused(make, "max_norm", 0 / 0, least)
    end
    refused("SGD", "momentum", -0.5, least)
    refused("Adam", "eps", -1e-8, least)
    for _, bad in ipairs { { 0.9, 1 }, { -0.1, 0.9 }, { 0 / 0, 0.9 }, { 0.9 }, { 0.9, 0.99, 0.999 } } do
      refused("AdamW", "betas", bad, "a list of two numbers, each at least 0 and below 1")
    end
    local optimizer = ps.optim.SGD({ p }, { lr = 0, momentum = 0 })
    p:set_grad(ps.ones { 2 })
    fails({ "max_norm is -1", least }, function() optimizer:step { max_norm = -1 } end)
    for _, bad in ipairs { -1, 0 / 0, math.huge } do
      fails({ "bad_input_spec.lua", "optimizer:set_lr: the rate is ", least }, function() optimizer:set_lr(bad) end)
      assert.equal(0, optimizer.groups[1].lr)
      optimizer.groups[1].lr = bad
      fails({ "bad_input_spec.lua", "SGD, group 1: lr is ", least }, function() optimizer:step() end)
      optimizer.groups[1].lr = 0
    end
    assert.same({ { 1, 1 }, 0 }, { p:tolist(), optimizer.steps })
    assert.is_false(optimizer:step().skipped)
    fails({ "optim.GradScaler: scale is 0" }, function() ps.optim.GradScaler { scale = 0 } end)
    fails({ "optim.GradScaler: interval is 0" }, function() ps.optim.GradScaler { interval = 0 } end)
    fails({ "optim.GradScaler: growth is 0.5" }, function() ps.optim.GradScaler { growth = 0.5 } end)
    fails({ "optim.GradScaler: backoff is 2" }, function() ps.optim.GradScaler { backoff = 2 } end)
  end)
end)

describe("generate", function()
  it("requires whole ids and a valid number of tokens", function()
    local model = gpt2.new "tiny"
    fails({ "generate: a token id is 1.5", "whole number" }, function() model:generate({ 1.5 }, 1) end)
    fails({ "generate: a token id is a string" }, function() model:generate({ "a" }, 1) end)
    fails({ "generate: the number of tokens is -3" }, function() model:generate({ 1 }, -3) end)
    assert.same({ 1 }, model:generate({ 1 }, 0))
  end)
end)

describe("ps.train.run", function()
  it("requires valid numbers of steps, and a loader with next", function()
    local model = ps.nn.Linear(2, 2)
    local parts = { model = model, optimizer = ps.optim.SGD(model, { lr = 1 }), loader = {}, steps = 1 }
    fails({ "bad_input_spec.lua", "ps.train.run: loader.next takes a function, not nil" }, function()
      ps.train.run(parts)
    end)
    parts.loader, parts.steps = { next = function() end }, -1
    fails({ "ps.train.run: steps is -1" }, function() ps.train.run(parts) end)
    parts.steps, parts.start = 1, -1
    fails({ "ps.train.run: start is -1" }, function() ps.train.run(parts) end)
  end)
end)
