-- SPDX-License-Identifier: BSD-3-Clause
-- help: the annotations of values and of names; and a model's summary.
local ps = require "ps"
local help = require("ps.prompt.help").of(ps)
local nn = ps.nn
local fails = require("spec.check_lib").fails

local function has(text, ...)
  for _, part in ipairs { ... } do assert.truthy(text:find(part, 1, true), part .. " is not in\n" .. text) end
  for line in text:gmatch "[^\n]+" do assert.truthy(#line <= 100 or not line:find "%S%s%S", line) end
end

describe("help", function()
  it("prints a function's parameters, results and text, by value and by name", function()
    has(help.text(ps.F.gelu), "F.gelu(x, approximate?) -> ps.Tensor", "approximate?: \"none\"|\"tanh\"")
    assert.equal(help.text(ps.F.gelu), help.text "F.gelu")
    has(help.text "gelu", "F.gelu(", "t:gelu(", "ps.ops.gelu(")
    has(help.text(ps.initialize), "ps.initialize(model_func, local_rank?, cfg?, client?) -> ps.Engine")
    has(help.text(ps.exp), "t:exp(")
    has(help.text(ps.ops.matmul), "ps.ops.matmul(")
    has(help.text "micro_batches", "model:micro_batches(")
  end)

  it("describes classes, modules, tensors and tables", function()
    has(help.text(nn.Linear), "Linear(inputs, outputs, options?)", "y = x weight^T + bias")
    assert.equal(help.text(nn.Linear), help.text(nn.Linear(2, 3)))
    assert.equal(help.text(nn.Linear), help.text "Linear")
    has(help.text(ps.inspect), "inspect_model", "Returns statistics of a model's parameters and of their gradients.")
    has(help.text(ps.zeros { 2 }), "fp32 [2] on cpu", "softmax")
    local Own = nn.class("Own")
    function Own:forward(x) return x end
    has(help.text(Own()), "Own(", "module(x)")
    has(help.text(load "return 1"), "function(...)")
  end)

  it("has a text for every function of ps", function()
    for line in help.text(ps):gmatch "[^\n]+" do assert.truthy(line:find "^  [%w_]+ +%S", line) end
    has(help.text(ps), "world_size", "randn              Normally distributed", "ones               All elements 1.")
  end)

  it("suggests the nearest name if there is no such name", function()
    fails(function() help.text "gelo" end, "did you mean 'gelu'?")
    fails(function() help.text "nn.Linaer" end, "did you mean 'nn.Linear'?")
    fails(function() help.text "attn" end, "nothing with the name 'attn'; help \"ps\" lists")
    for name, part in pairs { logit = "write (x / (1 - x)):log()", ["F.unfold"] = "lacks this function of PyTorch",
      ["t:is_leaf"] = "leaves are", LazyConv2d = "lacks this class of PyTorch" } do
      assert.matches(part, help.text(name), 1, true)
    end
    fails(function() help.text "optin" end, "did you mean 'optim'?")
    fails(function() help.text "optim.AdmaW" end, "did you mean 'optim.AdamW'?")
    fails(function() help.text "zzzzzzzz" end, 'help "ps" lists')
    has(help.text "nn.LSTM", "nn.LSTM (does not exist here: recurrent layers")
    has(help.text "torch.nn.utils", "nn.clip_grad_norm_")
  end)

  it("shows how a class is called, what forward takes and returns, and the module's fields", function()
    for _, name in ipairs { "nn.Linear", "ps.nn.Linear", "Linear", "torch.nn.Linear" } do
      has(help.text(name), "Linear(inputs, outputs, options?)", "bias?: boolean", "(default true)",
        "module(x, residual?) -> ps.Tensor", "x: ps.Tensor [..., inputs]", "gives ps.Tensor [..., outputs]",
        "weight: ps.Tensor [out, in]")
    end
    has(help.text "nn.CrossEntropyLoss", "CrossEntropyLoss(options?)", "ignore_index?: integer",
      "calls F.cross_entropy", "F.cross_entropy(logits, target, options?)", "module(x, target) -> ps.Tensor")
    has(help.text "nn.LeakyReLU", "LeakyReLU(negative_slope?)", "negative_slope?: number (default 0.01)")
    has(help.text "nn.ReLU", "ReLU()\n", "F.relu(")
    has(help.text "nn.Linear:forward", "module:forward(x, residual?)")
    has(help.text "nn.Module", "nn.class derives", "module:parameters")
  end)

  it("lists what is in a table, each with a line", function()
    has(help.text "optim", "ps.optim: optimizers", "\n  AdamW              Creates an AdamW optimizer")
    has(help.text "nn", "\n  Linear             Creates a layer", "\n  ReLU               A module that calls F.relu.",
      '\n  init               initial values of parameters: help "nn.init"')
    has(help.text "ps", '\n  optim              optimizers: help "optim"')
    assert.equal(help.text "F", help.text "nn.functional")
  end)

  it("has a text for every public name", function()
    local count = 0
    local function check(name)
      count = count + 1
      local text = help.text(name)
      assert.falsy(text:find("has no description", 1, true), name .. ": " .. text)
      assert.truthy(text:find "%S%s+%S+%s+%S", name .. ": " .. text)
      for line in text:gmatch "[^\n]+" do assert.truthy(#line <= 100 or not line:find "%S%s%S", line) end
    end
    local internal = {}
    for name in ("C ffi ctx own Error op_info ops device_name serialize pretty"):gmatch "%S+" do
      internal[name] = true
    end
    local tables = { ["nn.init"] = ps.nn.init }
    for name, value in pairs(getmetatable(ps).all()) do
      if not internal[name] and not name:find "^_" then check("ps." .. name) end
      if type(value) == "table" then tables[name] = value end
    end
    for name in pairs(getmetatable(ps).__names()) do
      if not internal[name] then
        check(name)
        tables[name] = type(ps[name]) == "table" and ps[name] or nil
      end
    end
    for name, t in pairs(tables) do
      for key, value in pairs(internal[name] and {} or t) do
        local public = type(value) == "function" or type(value) == "table" and rawget(value, "instance")
        if public and type(key) == "string" and not key:find "^_" then check(name .. "." .. key) end
      end
    end
    for name in pairs(require("ps.tensor").methods()) do check("t:" .. name) end
    assert.truthy(count > 700, count)
  end)
end)

describe("tables at a terminal", function()
  it("have colours if requested, and the same text", function()
    local pretty, view = require "ps.tensor.pretty", require "ps.memory.view"
    local list = view.chunks { { id = 0, kind = "param", index = 0, nbytes = 4096, used_nbytes = 4096, state = "HOLD",
      pins = 0, tiers = { host = true }, tensors = { "w" } } }
    local text = pretty.format(list, { color = true })
    assert.truthy(text:find("^\27%[1mid "), text)
    assert.truthy(text:find("\27[33mhost\27[0m", 1, true), text)
    assert.equal(tostring(list), (text:gsub("\27%[%d+m", "")))
    assert.equal(tostring(list), pretty.format(list))
    assert.equal(pretty.format { 1 }, pretty.format({ 1 }, { color = true }))
  end)
end)

describe("ps.engine", function()
  it("describes the state of the open engine", function()
    assert.is_nil(ps.engine())
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return nn.Linear(40, 40) end,
      config = { train_batch_size = 2, plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
    assert.equal("an engine of 1 640 parameters on cpu, fp32, ZeRO stage 0; 0 steps done; between steps",
      tostring(ps.engine()))
    model:backward(model(ps.ones { 2, 40 }):mean())
    local state = ps.engine()
    assert.matches("in step 1, 1 of 1 micro-batches backward", tostring(state), 1, true)
    assert.equal(model, state.model)
    optimizer:step()
    assert.same({ 1, false }, { ps.engine().steps, ps.engine().in_step })
    model:close()
    assert.is_nil(ps.engine())
  end)
end)

describe("a model's summary", function()
  it("counts parameters by module, shared ones once", function()
    local net = nn.class("Net")()
    net.a = nn.Linear(4, 3)
    net.b = nn.Linear(4, 3, { bias = false })
    net.b.weight = net.a.weight
    net.a.bias:requires_grad(false)
    local rows = net:summary()
    assert.same({ "", "a", "b" }, { rows[1].name, rows[2].name, rows[3].name })
    assert.same({ 15, 15, 12 }, { rows[1].parameters, rows[2].parameters, rows[3].parameters })
    assert.same({ 12, 60 }, { rows[1].trained, rows[1].nbytes })
    has(tostring(rows), "(the model)", "Net", "trained")
    fails(function() ps.inspect.summary(3) end, "takes a model")
  end)
end)
