-- SPDX-License-Identifier: BSD-3-Clause
-- Lists of modules under Lua's own functions: a script's use of them works, or an error says what to write.
local ps = require "ps"
local nn = ps.nn
local check = require "spec.check_lib"
local fails = check.fails
local bmt = require "ps.bmt"

local function three() return nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3) end

local function seen(iterate, list)
  local text = {}
  for i, module in iterate(list) do text[#text + 1] = ("%d=%s"):format(i, module.class_name) end
  return table.concat(text, " ")
end

local Blocks = nn.class("Blocks", nn.ModuleList)

for name, make in pairs { ModuleList = function(...) return nn.ModuleList { ... } end, Sequential = nn.Sequential,
                          derived = function(...) return Blocks { ... } end } do
  describe("a list of modules, " .. name .. ",", function()
    local a, b, c, list
    before_each(function()
      a, b, c = three()
      list = make(a, b, c)
    end)

    it("works with ipairs, pairs and each, from 0", function()
      for _, iterate in ipairs { ipairs, pairs, list.each } do
        assert.equal("0=Linear 1=ReLU 2=Linear", seen(iterate, list))
      end
      for i, module in ipairs(list) do assert.equal(list[i], module) end
      assert.equal("", seen(ipairs, nn.ModuleList()))
      assert.same({ a, b, c }, { unpack(list) })
      assert.same({ b }, { unpack(list, 1, 1) })
      assert.equal(3, list:size())
      assert.equal(3, list:len())
      assert.equal(3, table.getn(list)) -- luacheck: ignore 143
      assert.equal(c, list[-1])
    end)

    it("inserts and removes modules", function()
      local d, e = nn.Tanh(), nn.SiLU()
      table.insert(list, d)
      table.insert(list, 0, e)
      assert.equal("0=SiLU 1=Linear 2=ReLU 3=Linear 4=Tanh", seen(ipairs, list))
      assert.equal(d, table.remove(list))
      assert.equal(e, table.remove(list, 0))
      list:insert(1, d):extend { e, e }
      assert.equal("0=Linear 1=Tanh 2=ReLU 3=Linear 4=SiLU 5=SiLU", seen(ipairs, list))
      assert.equal(e, list:remove())
      list[1] = nil
      assert.equal("0=Linear 1=ReLU 2=Linear 3=SiLU", seen(ipairs, list))
      local names = {}
      for parameter in list:named_parameters() do names[#names + 1] = parameter end
      assert.same({ "0.weight", "0.bias", "2.weight", "2.bias" }, names)
    end)

    it("registers what is assigned to a place", function()
      list[0] = nn.Linear(2, 2, { bias = false })
      list[-1] = nn.Linear(2, 5)
      list[3] = nn.Linear(5, 1)                                     -- one after the last
      assert.equal(4, list:size())
      local names = {}
      for parameter in list:named_parameters() do names[#names + 1] = parameter end
      assert.same({ "0.weight", "2.weight", "2.bias", "3.weight", "3.bias" }, names)
      fails(function() list[6] = nn.ReLU() end, "no index 6 in a list of 4 modules", "append")
      fails(function() list[1.5] = nn.ReLU() end, "whole number")
      fails(function() list[0] = ps.ones { 2 } end, "takes a module")
      fails(function() list:insert(9, a) end, "no index 9")
      fails(function() list:remove(4) end, "no index 4")
    end)
  end)
end

describe("what makes a list", function()
  it("takes one Lua list, and other calls are refused with the right call", function()
    local a, b = three()
    fails(function() nn.ModuleList(a, b) end, "nn.ModuleList { a, b }")
    fails(function() nn.ModuleList(a) end, "nn.ModuleList { a, b }")
    fails(function() nn.ModuleList({ a }, b) end, "nn.ModuleList { a, b }")
    fails(function() nn.ModuleList { a, nil, b } end, "item 2 of the list is nil")
    fails(function() nn.ModuleList { first = a } end, "the key 'first'")
    fails(function() nn.ModuleList { a, 3 } end, "item 2 of the list is a number")
    fails(function() nn.ModuleList "a" end, "not a string")
    fails(function() nn.Sequential(a, nil, b) end, "argument 2 is nil")
    fails(function() nn.Sequential { a, b } end, "nn.Sequential takes modules, Sequential(a, b)")
    fails(function() bmt.TransformerBlockList(a, b) end, "TransformerBlockList { a, b }")
    local copy = nn.ModuleList(nn.ModuleList { a, b })
    assert.same({ a, b }, { unpack(copy) })
    assert.same({ b, a }, { unpack(nn.Sequential(b, a)) })
  end)

  it("must not be a plain table in a field, which would not be trained", function()
    local Net = nn.class "Net"
    function Net:init(how)
      self.head = nn.Linear(2, 2)
      if how == "at once" then self.layers = { nn.Linear(2, 2), nn.Linear(2, 2) } end
      if how == "one by one" then
        self.layers = {}
        for i = 1, 2 do self.layers[i] = nn.Linear(2, 2) end
      end
      if how == "deeper" then self.layers = { { up = nn.Linear(2, 2) } } end
      if how == "parameters" then self.scales = { nn.Parameter(ps.ones { 2 }) } end
      if how == "registered" then
        self.layers = { nn.Linear(2, 2), self.head }
        for i, layer in ipairs(self.layers) do self["layer" .. i] = layer end
      end
      if how == "on purpose" then rawset(self, "layers", { nn.Linear(2, 2) }) end
    end
    for _, how in ipairs { "at once", "one by one" } do
      fails(function() Net(how):parameters() end, "Net.layers[1] is a Linear in a plain Lua table", "ModuleList")
      fails(function() Net(how):state_dict() end, "Net.layers[1]")
      fails(function() ps.optim.SGD(Net(how), { lr = 1 }) end, "Net.layers[1]")
      fails(function() nn.Sequential(Net(how)):to "bf16" end, "Sequential.0.layers[1]")
      fails(function()
        ps.initialize { quiet = true, model_func = function() return Net(how) end, config = { plan_print = false } }
      end, "layers[1]")
    end
    fails(function() Net("deeper"):parameters() end, "Net.layers[1].up is a Linear")
    fails(function() Net("parameters"):parameters() end, "Net.scales[1] is a parameter")
    assert.equal(4, #Net("registered"):parameters())
    assert.equal(2, #Net("on purpose"):parameters())
  end)
end)

describe("Lua's functions on lists", function()
  it("are unchanged for other values", function()
    assert.same({ 1, 2, 3 }, { unpack { 1, 2, 3 } })
    assert.same({ 2, nil, 4 }, { unpack({ 1, 2, nil, 4 }, 2, 4) })
    local t = { 1, 3 }
    table.insert(t, 2, 2)
    table.insert(t, 4)
    assert.equal("1 2 3 4", table.concat(t, " "))
    assert.equal(4, table.remove(t))
    assert.equal(1, table.remove(t, 1))
    for _, call in ipairs { ipairs, pairs } do
      local ok, text = pcall(call)
      assert.falsy(ok)
      assert.truthy(text:find("bad argument #1", 1, true))
    end
  end)

  it("support lists of modules from a script's first line on", function()
    local out = check.run("", [[local ipairs, unpack = ipairs, unpack
      local nn = require("ps").nn
      local list = nn.ModuleList { nn.ReLU(), nn.Tanh() }
      for i, m in ipairs(list) do print(i, m.class_name) end
      print(select("#", unpack(list)))]])
    assert.equal("0\tReLU\n1\tTanh\n2\n", out)
  end)
end)

describe("a model of ps.initialize whose module is a list", function()
  it("works as the list in Lua's functions", function()
    local a, b = three()
    local model = ps.initialize { quiet = true, config = { plan_print = false },
      model_func = function() return nn.Sequential(a, b) end }
    finally(function() model:close() end)
    assert.equal("0=Linear 1=ReLU", seen(ipairs, model))
    assert.equal("0=Linear 1=ReLU", seen(pairs, model))
    assert.same({ a, b }, { unpack(model) })
    assert.equal(a, model[0])
  end)
end)

describe("BMTrain's loop over its blocks", function()
  it("trains to PyTorch's losses", function()
    local want = { 1.0313040, 0.5867662, 0.3151253, 0.1604348 }
    bmt.init_distributed { seed = 0, quiet = true, config = { plan_print = false } }
    finally(bmt.close)
    local Block = nn.class("Block", bmt.DistributedModule)
    function Block:init() self.fc = nn.Linear(64, 64) end
    function Block:forward(x, p, q, r) return x + self.fc(x) * (p / (q + r)) end
    local Net = nn.class("Net", bmt.DistributedModule)
    function Net:init()
      self.param = bmt.DistributedParameter(ps.ones { 64 })
      self.module_list = nn.ModuleList { bmt.CheckpointBlock(Block()), bmt.CheckpointBlock(Block()) }
    end
    function Net:forward()
      local x = self.param
      for _, module in ipairs(self.module_list) do x = module(x, 1, 2, 3) end
      return x
    end
    ps.manual_seed(1)
    local net = Net()
    local manager = bmt.optim.OptimManager()
    manager:add_optimizer(bmt.optim.AdamOptimizer(net:parameters(), { lr = 1e-2 }))
    for step = 1, 4 do
      manager:zero_grad()
      local loss = (net() ^ 2):mean()
      manager:backward(loss)
      manager:step()
      assert.is_true(math.abs(loss:item() - want[step]) < 2e-6, ("step %d: %.7f"):format(step, loss:item()))
    end
  end)
end)

describe("loops over pairs", function()
  -- This program fails in Debian 12's LuaJIT (its issue 827): a compiled loop ends after its first key.
  it("return every key after they have been compiled", function()
    local said = check.run("", [[
      local list = { 1, 2, 3, 4, 5 }
      local lists = { a = list, b = list, c = list, d = list, e = list }
      local function interpreted(...) for _ = 1, 100 do end end
      for _ = 1, 20000 do
        interpreted()
        local keys = 0
        for _, one in pairs(lists) do
          for _ in pairs(one) do end
          keys = keys + 1
        end
        assert(keys == 5, keys)
      end
      print "all keys"
    ]])
    assert.equal("all keys\n", said)
  end)

  it("are not compiled, and neither are calls of next", function()
    local said = check.run("", [[
      local this, from, loops = debug.getinfo(1, "f").func, nil, 0
      jit.attach(function(what, _, func)
        if what == "start" then from = func elseif what == "stop" and from == this then loops = loops + 1 end
      end, "trace")
      local values, sum = { a = 1, b = 2 }, 0
      for _ = 1, 2000 do
        for _, value in pairs(values) do sum = sum + value end
        for _, value in next, values do sum = sum + value end
        if next(values) then sum = sum + 1 end
      end
      print(sum, loops)
    ]])
    assert.equal("14000\t0\n", said)
  end)

  it("have Lua's errors", function()
    fails(function() return pairs(nil) end, "bad argument #1", "(table expected, got nil)")
    fails(function() return next(5) end, "bad argument #1", "(table expected, got number)")
    assert.is_nil(next {})
    assert.same({ 1, "x" }, { next { "x" } })
  end)
end)
