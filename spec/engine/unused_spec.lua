-- SPDX-License-Identifier: BSD-3-Clause
-- The report about parameters that get no gradient in the first step: printed once, by names, or raised as an error.
local ps = require "ps"
local nn = ps.nn
local check = require "spec.check_lib"
local inner = require("ps.nn.handle").of
local ranks_lib = require "spec.ranks_lib"
local fails = check.fails

local Net = nn.class "Net"

-- `uses` has the names of the parts that forward uses.
function Net:init(uses, freezes)
  self.scale = nn.Parameter(ps.ones { 4 })
  self.blocks = nn.ModuleList { nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()) }
  self.pair = nn.Linear(4, 4)
  self.out = nn.Linear(4, 1)
  for _, p in ipairs(freezes and self[freezes]:parameters() or {}) do p:requires_grad(false) end
  rawset(self, "uses", uses)
end

function Net:forward(x)
  local uses = self.uses
  if uses.scale then x = x * self.scale end
  if uses.blocks then for _, block in ipairs(self.blocks) do x = block(x) end end
  if uses.weight then x = ps.F.linear(x, self.pair.weight) end
  if uses.detached then x = x + self.pair(x):detach() end
  return self.out(x):sum()
end

local model
after_each(function()
  if model then model:close() end
  model = nil
end)

local function open(uses, more)
  local settings = { plan_print = false }
  for key, value in pairs(more or {}) do settings[key] = value end
  local freezes = settings.freezes
  settings.freezes = nil
  local optimizer
  model, optimizer = ps.initialize { quiet = true, config = settings, model_func = function()
    return Net(uses, freezes)
  end }
  return optimizer
end

local function step(optimizer)
  optimizer:zero_grad()
  model:backward(model(ps.ones { 2, 4 }))
  return optimizer:step()
end

local function said()
  local texts = {}
  for text in pairs(inner(model).said) do
    if text:find("gave no gradient", 1, true) then texts[#texts + 1] = text end
  end
  return table.concat(texts, "\n")
end

local ALL = { scale = true, blocks = true, weight = true }

for _, memory in ipairs { "chunks", "plain" } do
  describe("the first step of an engine, in " .. memory .. ",", function()
    local function with(more)
      more = more or {}
      if memory == "plain" then more.memory = "plain" end
      return more
    end

    it("names the parameters without a gradient, once", function()
      local optimizer = open({ scale = true }, with())
      assert.equal("", said())
      step(optimizer)
      local text = said()
      assert.truthy(text:find("6 of 9 trained parameters: blocks (ModuleList, 4 parameters, never called), "
        .. "pair (Linear, 2 parameters, never called). ", 1, true), text)
      assert.truthy(text:find("#list is always 0", 1, true), text)
      step(optimizer)
      assert.equal(text, said())
    end)

    it("names a single parameter, and a module whose result was not used", function()
      step(open(ALL, with()))
      assert.truthy(said():find("1 of 9 trained parameters: pair.bias. ", 1, true), said())
      model:close()
      step(open({ scale = true, blocks = true, detached = true }, with()))
      assert.truthy(said():find(": pair (Linear, 2 parameters). ", 1, true), said())
    end)

    it("skips frozen ones, and prints nothing if all have gradients", function()
      step(open({ scale = true, blocks = true }, with { freezes = "pair" }))
      assert.equal("", said())
    end)

    it("is an error with strict_gradients", function()
      local optimizer = open({ scale = true }, with { strict_gradients = true })
      fails(function() step(optimizer) end, "strict_gradients", "blocks (ModuleList, 4 parameters",
        "requires_grad(false)")
      model:close()
      optimizer = open({ scale = true, blocks = true }, with { strict_gradients = true, freezes = "pair" })
      for _ = 1, 2 do step(optimizer) end
    end)

    it("uses this run's gradients after a state was loaded", function()
      local optimizer = open({ scale = true, blocks = true }, with { freezes = "pair" })
      for _ = 1, 3 do step(optimizer) end
      local state = optimizer:state_dict()
      ps.save(state, "unused_spec.pt")
      finally(function() os.remove "unused_spec.pt" end)
      model:close()
      optimizer = open({ scale = true }, with { freezes = "pair" })
      optimizer:load_state_dict(ps.load "unused_spec.pt")
      step(optimizer)
      assert.truthy(said():find("4 of 7 trained parameters: blocks (", 1, true), said())
    end)
  end)
end

describe("a step that is skipped", function()
  it("prints nothing; the next one does", function()
    local optimizer = open({ scale = true }, { fp16 = { enabled = true, initial_scale_power = 4 } })
    local x = ps.ones({ 2, 4 }, { dtype = "fp16" })
    model:backward(model(x) * math.huge)
    assert.is_true(optimizer:step().skipped)
    assert.equal("", said())
    optimizer:zero_grad()
    model:backward(model(x))
    optimizer:step()
    assert.truthy(said():find("6 of 9", 1, true))
  end)
end)

describe("ps.train.run with ps.optim", function()
  it("also prints the line", function()
    local text = check.run("", [[
      local ps = require "ps"
      local nn = ps.nn
      local Net = nn.class "Net"
      function Net:init() self.used, self.other = nn.Embedding(8, 8), nn.Linear(8, 8) end
      function Net:forward(x, y) return ps.F.cross_entropy(self.used(x), y) end
      local net = Net()
      local loader = ps.data.tokens and { global_batch = 1, batch = 1, seq = 4, next = function()
        local x = ps.zeros({ 1, 4 }, { dtype = "int32" })
        return x, x
      end }
      ps.train.run { model = net, optimizer = ps.optim.AdamW(net), loader = loader, steps = 2, quiet = true }
    ]])
    local _, n = text:gsub("gave no gradient", "")
    assert.equal(1, n, text)
    assert.truthy(text:find("other (Linear, 2 parameters, never called)", 1, true), text)
  end)
end)

describe("several ranks", function()
  local folder
  setup(function() folder = ranks_lib.folder() end)
  teardown(function() ranks_lib.remove(folder) end)

  it("print one line for all, whoever owns the state", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local all = ranks_lib.run(folder, 2, ranks_lib.begin(folder) .. [[
      local Net = nn.class "Net"
      function Net:init()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.d = nn.Linear(64, 64)
      end
      function Net:forward(x) return self.c(self.b(self.a(x))):sum() end
      for _, stage in ipairs { 0, 1, 2, 3 } do
        for _, strict in ipairs { false, true } do
          local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, chunk_size = 4160,
            strict_gradients = strict, zero_optimization = { stage = stage } },
            model_func = function() return Net() end }
          local ok, problem = pcall(function()
            model:backward(model(ps.ones { 2, 64 }))
            optimizer:step()
          end)
          local text = strict and not ok and tostring(problem) or ""
          for said in pairs(require("ps.nn.handle").of(model).said) do
            if said:find("no gradient", 1, true) then text = text .. said end
          end
          print(stage, strict, text:match "to (%d of %d) trained", text:match "parameters: ([^.]*)")
          model:close()
        end
      end
    ]])
    for rank = 0, 1 do
      for stage = 0, 3 do
        local line = "2 of 8\td (Linear, 2 parameters, never called)"
        assert.truthy(all[rank].text:find(("%d\ttrue\t%s"):format(stage, line), 1, true), all[rank].text)
        local want = rank == 0 and line or "nil\tnil"
        assert.truthy(all[rank].text:find(("%d\tfalse\t%s"):format(stage, want), 1, true), all[rank].text)
      end
    end
  end)
end)
