-- SPDX-License-Identifier: BSD-3-Clause
-- The model that ps.initialize returns: its own names; all other names belong to the module.
local ps = require "ps"
local handle = require "ps.nn.handle"
local Engine = require("ps.engine").Engine
local step = require "ps.engine.step"
local fails = require("spec.check_lib").fails
local nn = ps.nn

local model, optimizer
after_each(function() if handle.of(model) then model:close() end end)

local MEMORY = { "chunk", "plain" }

local function open(memory, made, config)
  local cfg = { plan_print = false, memory = memory ~= "chunk" and memory or nil,
    optimizer = { type = "SGD", params = { lr = 1 } } }
  for key, value in pairs(config or {}) do cfg[key] = value end
  model, optimizer = ps.initialize { quiet = true, config = cfg, model_func = function() return made end }
  return model, optimizer
end

local One = nn.class("One")
function One:init() self.w = nn.Parameter(ps.ones { 2 }) end
function One:forward(x) return (self.w * x):sum() end

-- Trains two steps. The correct w is -1, since the gradient is 1 and the rate is 1.
local function trained(between)
  for number = 1, 2 do
    if between then between(number) end
    optimizer:zero_grad()
    model:backward(model(ps.ones { 2 }))
    optimizer:step()
  end
  return model:state_dict().w:tolist()
end

-- Returns every name of an engine: its fields, its methods, and the fields of its step.
local function names_of(engine)
  local names, public = {}, { module = true }
  for _, name in ipairs(Engine.PUBLIC) do public[name] = true end
  for _, list in ipairs { engine, Engine, step.fields } do
    for name in pairs(list) do
      if type(name) == "string" and not public[name] and nn.Module[name] == nil then names[name] = true end
    end
  end
  return names
end

describe("a name of the engine", function()
  for _, memory in ipairs(MEMORY) do
    it("belongs to the module in scripts, in " .. memory .. " memory: fields, methods and assignments", function()
      open(memory, One())
      local names = names_of(handle.of(model))
      assert.truthy(names.steps and names.device and names.note and names.take and names.quiet and names.micro)
      model:close()
      local with_fields = One()
      for name in pairs(names) do with_fields[name] = "the script's " .. name end
      open(memory, with_fields)
      for name in pairs(names) do assert.equal("the script's " .. name, model[name]) end
      assert.same({ -1, -1 }, trained())
      model:close()
      open(memory, One())
      assert.same({ -1, -1 }, trained(function(number)
        for name in pairs(names) do model[name] = number end
      end))
      for name in pairs(names) do assert.same({ 2, 2 }, { model[name], model.module[name] }) end
      model:close()
    end)
  end

  it("does not reach the engine if it is a method of the module", function()
    open("chunk", One())
    local names = names_of(handle.of(model))
    model:close()
    local Methods = nn.class("Methods")
    function Methods:init() self.w = nn.Parameter(ps.ones { 2 }) end
    function Methods:forward(x) return (self.w * x):sum() end
    local taken = {}
    for name in pairs(names) do
      taken[name] = true
      Methods[name] = function(_, x) return name .. " of the module", x end
    end
    assert.truthy(taken.note and taken.take and taken.run and taken.end_step)
    open("chunk", Methods())
    for name in pairs(taken) do assert.same({ name .. " of the module", 3 }, { model[name](model, 3) }) end
    assert.same({ -1, -1 }, trained())
  end)

  it("that nn.Module also has belongs to nn.Module: apply", function()
    open("chunk", nn.Sequential(nn.Linear(2, 2), nn.GELU()))
    local seen = 0
    model:apply(function() seen = seen + 1 end)
    assert.equal(3, seen)
  end)
end)

describe("settings that the engine reads", function()
  it("come from its configuration and the call, not from fields of the module", function()
    local made = One()
    made.param_groups, made.quiet, made.accumulate, made.own_loss = { { lr = 5 } }, true, 7, function() end
    local lines = {}
    local stderr = io.stderr
    io.stderr = { write = function(_, ...) lines[#lines + 1] = table.concat { ... } end } -- luacheck: ignore 122
    local ok, problem = pcall(function()
      model, optimizer = ps.initialize { model_func = function() return made end, config = { plan_print = false,
        recompute = true, optimizer = { type = "SGD", params = { lr = 1 } } } }
    end)
    io.stderr = stderr -- luacheck: ignore 122
    assert(ok, tostring(problem))
    assert.truthy(table.concat(lines):find("recompute has no effect: the model has no nn.ModuleList", 1, true))
    assert.same({ -1, -1 }, trained())
  end)
end)

describe("a model of ps.initialize", function()
  it("is returned by methods of the module that return the module", function()
    local Chained = nn.class("Chained", One)
    function Chained:load_weights() return self, "more" end
    function Chained:other() return 1, self end
    open("chunk", Chained())
    local same, more = model:load_weights()
    assert.truthy(rawequal(model, same))
    assert.equal("more", more)
    assert.equal(1, (model:other()))
    assert.truthy(rawequal(model, model:train()) and rawequal(model, model:eval()))
    assert.truthy(rawequal(model, ps.engine().model))
    assert.truthy(rawequal(model.module, model.module:load_weights()))
  end)

  it("continues training after from_parallelized and load_weights, with the folder's values", function()
    local folder = os.tmpname()
    os.remove(folder)
    local gpt2 = require "models.gpt2"
    ps.manual_seed(1)
    local made = gpt2.new("tiny", { dropout = 0 })
    made:save_pretrained(folder)
    made:save_parallelized(folder .. "/parallel")
    for _, call in ipairs { { "load_weights", folder .. "/model.safetensors" },
      { "from_parallelized", folder .. "/parallel" } } do
      ps.manual_seed(2)
      open("chunk", gpt2.new("tiny", { dropout = 0 }))
      model = model[call[1]](model, call[2])
      local x = ps.randint(0, 200, { 2, 8 }, { dtype = "int32" })
      local loss = model(x, x)
      assert.equal(ps.no_grad(function() return made(x, x):item() end), loss:item())
      model:backward(loss)
      optimizer:step()
      model:close()
    end
    os.execute("rm -rf " .. folder)
  end)

  it("refuses assignments to its own names, and says how to reach the module's", function()
    open("chunk", One())
    for _, name in ipairs { "module", "backward", "close", "micro_batches", "state_dict" } do
      fails(function() model[name] = 1 end, "model." .. name .. " belongs to the engine", "model.module." .. name)
    end
  end)

  it("sees later changes of the script", function()
    open("chunk", One())
    model.count = 1
    assert.same({ 1, 1 }, { model.count, model.module.count })
    function model.module.tell() return "first" end
    assert.equal("first", model:tell())
    function model.module.tell() return "second" end
    assert.equal("second", model:tell())
    model.count = nil
    assert.is_nil(model.module.count)
    assert.is_nil(model.generate)
  end)

  it("names a method that was called on another value", function()
    open("chunk", One())
    fails(function() model.backward(ps.ones { 1 }) end, "backward is a method of a model that ps.initialize made")
    fails(function() model.close() end, "model:close(...)")
  end)

  it("is described by help with its module's functions", function()
    open("chunk", require("models.gpt2").new "tiny")
    assert.truthy(require("ps.prompt.help").of(ps).text(model.num_parameters):find("parameters", 1, true))
    assert.falsy(require("ps.prompt.help").of(ps).text(model.generate):find("no description", 1, true))
  end)
end)
