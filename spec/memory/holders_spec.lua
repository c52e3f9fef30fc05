-- SPDX-License-Identifier: BSD-3-Clause
-- The holders of memory: ps.memory { at = "peak" }, and the list at the end of errors about memory.
local ps = require "ps"
local fails = require("spec.check_lib").fails
local nn = ps.nn

local MIB = 2 ^ 20
local HERE = "holders_spec.lua:"

local function line() return debug.getinfo(2, "l").currentline end

local Block = nn.class("Block")
function Block:init(width)
  self.up = nn.Linear(width, 4 * width)
  self.act = nn.GELU()
  self.down = nn.Linear(4 * width, width)
end
function Block:forward(x) return self.down(self.act(self.up(x))) end

local Net = nn.class("Net")
function Net:init(width) self.block = Block(width) end
function Net:forward(x) return self.block(x) end

describe("ps.memory { at = 'peak' }", function()
  it("lists the largest tensors at the peak, with line, op and module, and no later ones", function()
    collectgarbage()
    collectgarbage()
    ps.reset_peak_memory()
    local base, at = ps.memory().used
    ps.scope(function()
      local planted = ps.zeros { 3 * MIB }                              -- 12 MiB
      at = line() - 1
      local _ = planted * 2                                             -- 12 MiB more, which is the peak
      _ = planted:sum()
    end)
    local _ = ps.zeros { MIB }                                          -- 4 MiB, after the others were freed
    local list = ps.memory { at = "peak" }
    assert.truthy(list.used >= base + 24 * MIB)
    assert.same({ 12 * MIB, 12 * MIB }, { list[1].nbytes, list[2].nbytes })
    local by = { [list[1].op or "none"] = list[1], [list[2].op or "none"] = list[2] }
    assert.equal(HERE .. at, by.none.line:match("[^/]*$"))
    assert.equal(HERE .. at + 2, by.affine.line:match("[^/]*$"))
    assert.truthy(ps.memory { at = "now" }.used < list.used)
    assert.truthy(tostring(list):find("12.0 MiB  affine, ", 1, true))
    fails(function() ps.memory { at = "then" } end, "'peak' or 'now'")
  end)

  it("names the module of a forward and, for ops of backward, of their forward", function()
    local net, at = Net(256)
    collectgarbage()
    ps.reset_peak_memory()
    ps.scope(function()
      local x = ps.randn { 2048, 256 }
      local loss = net(x):sum()
      at = line() - 1
      loss:backward()
    end)
    local forward, backward
    for _, h in ipairs(ps.memory { at = "peak" }) do
      if h.nbytes == 8 * MIB and not h.backward and h.module == "block.up" then forward = h end
      if h.nbytes == 8 * MIB and h.backward and h.module then backward = h end
    end
    assert.equal("linear", forward.op)
    assert.truthy(forward.line:find(HERE, 1, true))
    assert.truthy(tonumber(forward.line:match("%d+$")) < at)            -- Block:forward calls self.up
    assert.truthy(backward.module == "block.act" or backward.module == "block.down")
    net:zero_grad()
  end)
end)

describe("an error of memory", function()
  it("ends with the largest tensors of that moment", function()
    local planted = ps.zeros { 5 * MIB }
    local at = line() - 1
    local room = ps.memory().used + 8 * MIB
    ps.set_memory_limit(room)
    local ok, problem = pcall(function() return planted * 3 end)
    ps.set_memory_limit(0)
    assert.falsy(ok)
    assert.equal(20 * MIB, problem.holders[1].nbytes)
    assert.truthy(problem.msg:find("\n    20.0 MiB  a tensor made without an op, ", 1, true), problem.msg)
    assert.truthy(problem.msg:find(HERE .. at, 1, true), problem.msg)
  end)

  it("names modules if a forward in chunks finds no room, also for work space", function()
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return Net(64) end,
      config = { optimizer = { type = "AdamW" }, memory = { host = "2MiB" }, chunk_size = 16384 } }
    local ok, problem = pcall(function()
      local loss = model(ps.randn { 4096, 64 }):sum()
      model:backward(loss)
      optimizer:step()
    end)
    model:close()
    assert.falsy(ok)
    assert.equal("ENOMEM", problem.name)
    assert.truthy(#problem.holders > 0)
    assert.truthy(problem.msg:find("the largest of ", 1, true), problem.msg)
  end)
end)
