-- SPDX-License-Identifier: BSD-3-Clause
-- Situations from public bug reports in which training goes wrong without an error. Each prints one note.
local check = require "spec.check_lib"
local paths = require "ps.paths"

local folder
setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(os.execute("mkdir " .. folder) == 0)
end)
teardown(function() os.execute("rm -r " .. folder) end)

local HEAD = [[
  local ps = require "ps"
  local nn, F = ps.nn, ps.F
  ps.manual_seed(1)
  local Net = nn.class "Net"
  function Net:init() self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3) end
  function Net:forward(x, y) return F.cross_entropy(self.b(F.relu(self.a(x))), y) end
  local x, y = ps.randn { 6, 4 }, ps.tensor({ 0, 1, 2, 0, 1, 2 }, { dtype = "int64" })
]]

-- Returns the output of a script.
local function printed(script)
  check.write(folder .. "/script.lua", HEAD .. script)
  local p = assert(io.popen(("OMP_NUM_THREADS=1 timeout 300 %s %s/script.lua 2>&1"):format(paths.exe, folder)))
  local text = p:read "*a"
  p:close()
  return text
end

local function count(text, word) return select(2, text:gsub(word, "")) end

describe("a loss that is not finite", function()
  local LOOP = [[
    local model, optimizer = ps.initialize { model_func = function() return Net() end,
      config = { plan_print = false, memory = "%s", %s optimizer = { type = "AdamW" } } }
    for step = 1, 4 do
      model:backward(model(step == 3 and x / 0 or x, y))
      optimizer:step()
    end
  ]]

  it("is reported once, with the step", function()
    for _, memory in ipairs { "chunk", "plain" } do
      local text = printed(LOOP:format(memory, ""))
      assert.equal(1, count(text, "the loss of step 3 is nan"), text)
      assert.equal(1, count(text, "the loss of step"), text)
    end
  end)

  it("is handled by the loss scaler in fp16", function()
    assert.equal(0, count(printed(LOOP:format("chunk", "fp16 = { enabled = true },")), "the loss of step"))
  end)
end)

describe("a layer that is replaced after its optimizer was made", function()
  it("is reported at the next step", function()
    local text = printed [[
      local net = Net()
      local optimizer = ps.optim.AdamW(net, { lr = 0.1 })
      net.b = nn.Linear(8, 3)
      for _ = 1, 2 do
        net(x, y):backward()
        optimizer:step()
      end
    ]]
    assert.equal(1, count(text, "AdamW: b.weight, b.bias were replaced in the module after this optimizer was made"),
      text)
  end)

  it("may be wrapped, or moved within the module", function()
    assert.equal("", printed [[
      local net = Net()
      local optimizer = ps.optim.AdamW(net, { lr = 0.1 })
      net.b = nn.Sequential(net.b)
      net.first, net.a = net.a, nn.Identity()
      function net:forward(x, y) return F.cross_entropy(self.b(F.relu(self.first(x))), y) end
      net(x, y):backward()
      optimizer:step()
    ]])
  end)
end)
