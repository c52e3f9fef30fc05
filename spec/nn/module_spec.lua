-- SPDX-License-Identifier: BSD-3-Clause
-- Registration by assignment to a module's fields, by PyTorch's rules: the field of a parameter accepts only
-- parameters and nil, so that no parameter is removed from training by accident.
local ps = require "ps"
local nn = ps.nn
local complete = require "ps.prompt.complete"
local fails = require("spec.check_lib").fails

local function names(module)
  local list = {}
  for name in module:named_parameters() do list[#list + 1] = name end
  return table.concat(list, " ")
end

local Net = nn.class "Net"
function Net:init()
  self.fc = nn.Linear(2, 3)
  self.scale = nn.Parameter(ps.ones { 3 })
  self:buffer("seen", ps.zeros { 1 })
  self.note = "plain"
end
function Net:forward(x) return self.fc(x) * self.scale end

describe("a module that has two names", function()
  it("is listed and visited once", function()
    local shared, calls = ps.nn.Linear(2, 2), 0
    local model = ps.nn.Sequential(shared, ps.nn.ReLU(), shared)
    assert.equal(3, #model:modules())
    assert.equal(2, #model:children())
    model:apply(function() calls = calls + 1 end)
    assert.equal(3, calls)
  end)
end)

describe("a class without forward", function()
  it("is named by a call, whatever its arguments", function()
    local None = nn.class "None"
    fails(function() None()(ps.ones { 1 }) end, "None has no forward method: define function None:forward(...)")
    fails(function() None()() end, "None has no forward method")
  end)
end)

describe("a copy of a module", function()
  it("is made by load_state_dict, as the error of PyTorch's calls says", function()
    fails(function() Net():clone() end, "other:load_state_dict(model:state_dict())")
    fails(function() ps.deepcopy(Net()) end, "other:load_state_dict(model:state_dict())")
  end)
end)

describe("assigning to a module's field", function()
  local net
  before_each(function() net = Net() end)

  it("registers modules and parameters, also in place of other values", function()
    assert.equal("scale fc.weight fc.bias", names(net))
    net.note = nn.Parameter(ps.ones { 1 })
    net.flag = false
    net.flag = nn.Linear(1, 1)
    assert.equal("scale note fc.weight fc.bias flag.weight flag.bias", names(net))
  end)

  it("refuses values that would remove a parameter from training", function()
    local before = net.fc.weight
    fails(function() net.fc.weight = ps.zeros { 3, 2 } end, "Linear.weight is a parameter", "a tensor", "copy_",
      "ps.nn.Parameter", "nil")
    fails(function() net.scale = net.scale * 2 end, "Net.scale is a parameter")
    fails(function() net.scale = 3 end, "Net.scale is a parameter", "a number")
    fails(function() net.fc = ps.zeros { 3 } end, "Net.fc is a module", "a tensor")
    fails(function() net.seen = 4 end, "Net.seen is a buffer", "a number")
    assert.truthy(ps.same(before, net.fc.weight))
    assert.equal("scale fc.weight fc.bias", names(net))
    ps.no_grad(function() net.scale:copy_(ps.full({ 3 }, 2)) end)
    assert.same({ 2, 2, 2 }, net.scale:tolist())
  end)

  it("accepts another parameter, module or buffer in its place", function()
    net.scale = nn.Parameter(ps.full({ 3 }, 5))
    net.fc.bias = nil
    net.fc = nn.Linear(2, 3, { bias = false })
    assert.equal("scale fc.weight", names(net))
    assert.same({ 5, 5, 5 }, net:state_dict().scale:tolist())
    ps.scope(function() net.seen = net.seen + 1 end)              -- outlives the scope in which it was created
    assert.same({ 1 }, net.seen:tolist())
    assert.same({ 1 }, net:state_dict().seen:tolist())
    local optimizer = ps.optim.SGD(net, { lr = 1 })
    net(ps.ones { 1, 2 }):sum():backward()
    optimizer:step()
    assert.is_false(net.scale:eq(5):all():item())
  end)

  it("removes with nil, and may register again", function()
    net.scale = nil
    net.fc = nil
    assert.equal("", names(net))
    assert.is_nil(net.scale)
    assert.is_nil(net:state_dict()["fc.weight"])
    net.scale = 7                                                 -- a plain field from now on
    assert.equal(7, net.scale)
    net.fc = nn.Linear(1, 1)
    assert.equal("fc.weight fc.bias", names(net))
  end)

  it("does not affect conversions, tied weights and lists", function()
    net.tied = net.fc.weight                                     -- the first name in PyTorch's order owns the parameter
    assert.equal("scale tied fc.bias", names(net))
    net:to "bf16"
    assert.equal("bf16", net.fc.weight:dtype())
    assert.truthy(ps.same(net.tied, net.fc.weight))
    local list = nn.ModuleList { nn.Linear(1, 1), nn.Linear(1, 1) }
    assert.truthy(rawequal(list[1], list[-1]))
    assert.is_nil(list[2])
    list[0] = nn.Linear(1, 2)
    assert.same({ 2, 1 }, list[0].weight:shape())
    assert.equal("0.weight 0.bias 1.weight 1.bias", names(list))
  end)

  it("keeps the completions of TAB", function()
    rawset(_G, "completion_target", net)
    local fields, methods = complete.candidates("completion_target.f"), complete.candidates("completion_target:named_p")
    rawset(_G, "completion_target", nil)
    assert.same({ "fc(", "float(", "forward(", "freeze(" }, fields)
    assert.same({ "named_parameters(" }, methods)
  end)
end)

describe("a module's state", function()
  it("leaves out buffers with persistent = false", function()
    local Made = nn.class "Made"
    function Made:init()
      self.fc = nn.Linear(2, 2)
      self:buffer("kept", ps.ones { 2 })
      self:buffer("made", ps.ones { 3 }, { persistent = false })
    end
    local net, list = Made(), {}
    for name in net:named_buffers() do list[#list + 1] = name end
    assert.same({ "kept", "made" }, list)
    local state = net:state_dict()
    assert.is_nil(state.made)
    assert.truthy(state.kept)
    Made():load_state_dict(state)
    state.made = ps.zeros { 3 }
    assert.truthy(tostring(select(2, pcall(net.load_state_dict, net, state))):find("1 unexpected: made", 1, true))
    net:buffer("made", ps.ones { 3 })                        -- registered again, and now part of the state
    assert.truthy(net:state_dict().made)
    assert.truthy(tostring(select(2, pcall(net.buffer, net, "x", ps.ones { 1 }, { persist = false }))):find(
      "no option 'persist'", 1, true))
  end)

  local Tied = nn.class "Tied"
  function Tied:init()
    self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, { bias = false })
    self.head.weight = self.embed.weight
  end

  local function keys(state)
    local list = {}
    for name in pairs(state) do list[#list + 1] = name end
    table.sort(list)
    return list
  end

  local unlike = "'embed.weight' and 'head.weight' are one tied parameter, but the state has different values"

  it("may have both names of a tied weight, with one value", function()
    local tied, w = Tied(), ps.randn { 3, 2 }
    tied:load_state_dict { ["embed.weight"] = w, ["head.weight"] = w:clone() }
    tied:load_state_dict { ["embed.weight"] = w, ["head.weight"] = w }
    tied:load_state_dict { ["head.weight"] = w }
    assert.same(w:tolist(), tied.embed.weight:tolist())
    fails(function() tied:load_state_dict { ["embed.weight"] = w, ["head.weight"] = w + 1 } end, unlike)
    assert.same(w:tolist(), tied.embed.weight:tolist())
  end)

  it("has both names of a tied weight; a file has one, and is loaded under either", function()
    local tied = Tied()
    local state = tied:state_dict()
    assert.same({ "embed.weight", "head.weight" }, keys(state))
    assert.truthy(ps.same(state["embed.weight"], state["head.weight"]))
    assert.same({ "embed.weight" }, keys(tied:state_dict { tied = false }))
    assert.equal("embed.weight", names(tied))
    fails(function() tied:state_dict { ties = false } end, "no option 'ties'")
    local path = os.tmpname()
    local function loads(values)
      local other = Tied()
      local file = ps.safetensors.open(path)
      other:load_state_dict(file)
      file:close()
      assert.same(values:tolist(), other.embed.weight:tolist())
      other = Tied()
      other:load_state_dict(ps.load(path))
      assert.same(values:tolist(), other.head.weight:tolist())
    end
    ps.safetensors.save(path, state, { format = "pt" })
    local file = ps.safetensors.open(path)
    assert.same({ "embed.weight" }, file:names())
    assert.same({ format = "pt", ["head.weight"] = "embed.weight" }, file.metadata)
    file:close()
    loads(tied.embed.weight)
    local both = ps.load(path)
    assert.same({ "embed.weight", "head.weight" }, keys(both))
    assert.truthy(ps.same(both["embed.weight"], both["head.weight"]))
    local w = ps.randn { 3, 2 }
    ps.safetensors.save(path, { ["head.weight"] = w })
    loads(w)
    ps.safetensors.save(path, { ["head.weight"] = w, ["embed.weight"] = w:clone() })
    loads(w)
    ps.safetensors.save(path, { ["head.weight"] = w, ["embed.weight"] = w + 1 })
    file = ps.safetensors.open(path)
    fails(function() Tied():load_state_dict(file) end, unlike)
    file:close()
    os.remove(path)
    assert.same({ "embed.weight", "head.weight" }, keys(state))
  end)

  it("has the name of a head that reads a table", function()
    local Model = nn.class "Model"
    function Model:init()
      self.tokens = nn.Embedding(5, 4)
      self.head = nn.LMHead(4, 5, { tied = self.tokens })
    end
    local model, w = Model(), ps.randn { 5, 4 }
    assert.same({ "head.weight", "tokens.weight" }, keys(model:state_dict()))
    assert.equal("tokens.weight", names(model))
    model:load_state_dict { ["head.weight"] = w }
    assert.same(w:tolist(), model.tokens.weight:tolist())
    model:load_state_dict(model:state_dict())
    fails(function() model:load_state_dict { ["head.weight"] = w, ["tokens.weight"] = w + 1 } end, "different values")
  end)
end)
