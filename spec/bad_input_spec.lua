-- SPDX-License-Identifier: BSD-3-Clause
-- Wrong shapes, types, ids, settings: each is a Lua error that names the op and the shapes and says what to do, never a
-- crash. Files and training: bad_files_spec.lua.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local check_lib = require "spec.check_lib"
local fails, fails_with = check_lib.fails_saying, check_lib.fails_as

describe("ops given wrong tensors", function()
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

  it("name the types and devices", function()
    local i = ps.tensor({ 1, 2 }, "int64")
    fails_with("EINVAL", { "embedding", "int32 or int64" }, function() return ps.F.embedding(a, b) end)
    fails_with("EINVAL", { "cross_entropy:", "fp32 [2, 3]" }, function() return ps.F.cross_entropy(a, a) end)
    fails_with("EINVAL", { "mean", "int64 [2]" }, function() return i:mean() end)
    fails_with("EINVAL", { "different devices", "cpu", "ref", ":to(device)" }, function() return a + a:to "ref" end)
    fails({ "no such type: fp12", "bf16" }, function() ps.zeros({ 1 }, { dtype = "fp12" }) end)
    fails_with("EUNSUP", { "gpu", "cpu" }, function() ps.zeros({ 1 }, { device = "gpu" }) end)
    fails_with("EUNSUP", { "meta" }, function() return ps.zeros({ 3 }, { device = "meta" }):tolist() end)
    fails_with("EINVAL", { "only float tensors", "int64" }, function() i:requires_grad() end)
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

  it("say what gradients need", function()
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

  it("say when a scope took the bytes", function()
    local kept
    ps.scope(function() kept = ps.ones { 200, 200 } end)
    fails_with("ESTALE", { "[200, 200]", ":keep()", "ps.scope" }, function() return kept + 1 end)
    fails_with("ESTALE", { "[200, 200]" }, function() return kept:tolist() end)
  end)

  it("take nonsense of any kind", function()
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
      local params = debug.getinfo(ps.ops[info.name], "u").nparams
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

describe("models and optimizers set up wrongly", function()
  it("say what does not fit", function()
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
    fails({ "gradient norm is", "left as they are" }, function() optimizer:step { max_norm = 1 } end)
    assert.same({ 1, 1, 1, 1 }, p:tolist())
  end)
end)

describe("seeds", function()
  it("are whole numbers", function()
    fails({ "bad_input_spec.lua", "takes a whole number, not a string" }, function() ps.manual_seed("x") end)
    fails({ "takes a whole number, not a nil" }, function() ps.manual_seed() end)
    fails({ "takes a whole number, not 0.5" }, function() ps.manual_seed(0.5) end)
  end)
end)

describe("groups of parameters of an engine", function()
  it("say which key, or type, is not one", function()
    local function groups(list)
      return function()
        ps.initialize { config = {}, quiet = true, param_groups = list, model_func = function()
          return ps.nn.Linear(4, 4)
        end }
      end
    end
    fails({ "param_groups is a list of tables" }, groups {})
    fails({ "param_groups is a list of tables" }, groups "bias")
    fails({ "param_groups[2] is a number, not a table" }, groups { {}, 3 })
    fails({ "param_groups[1].match is a string, not a function" }, groups { { match = "bias" }, {} })
    fails({ "param_groups[1] has 'params'; a group has match = function(name, parameter)" },
      groups { { params = { "bias" } } })
    fails({ "param_groups[2].weight_decay is a string" }, groups { {}, { weight_decay = "0" } })
  end)
end)
