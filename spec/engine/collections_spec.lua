-- SPDX-License-Identifier: BSD-3-Clause
-- What a step costs besides its ops: collections of Lua's garbage. One of them takes as long as the ops of a very small
-- model, so their number is counted.
local ps = require "ps"
local gpt2 = require "models.gpt2"

local function engine(recompute)
  ps.manual_seed(1)
  return ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" } },
    model_func = function() return gpt2.new("tiny", { dropout = 0, recompute = recompute }) end }
end

-- Returns the number of collections in each of several steps. At the end of a step, a local variable of the loop still
-- holds the step's loss.
local function counted(model, optimizer)
  local x, y = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" }), ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
  local own, n, list = collectgarbage, 0, {}
  _G.collectgarbage = function(what, ...)
    if what == nil or what == "collect" then n = n + 1 end
    return own(what, ...)
  end
  local ok, problem = pcall(function()
    for i = 1, 8 do
      n = 0
      optimizer:zero_grad()
      local loss = model(x, y)
      model:backward(loss)
      optimizer:step()
      list[i] = n
    end
  end)
  _G.collectgarbage = own
  assert(ok, problem)
  return list
end

describe("a step in chunks", function()
  it("collects Lua's garbage at most once if it is already planned", function()
    local model, optimizer = engine()
    local list = counted(model, optimizer)
    for i = 4, #list do assert.is_true(list[i] <= 1, ("step %d collects %d times"):format(i, list[i])) end
    model:close()
  end)

  it("also frees the memory that recompute keeps for functions", function()
    local model, optimizer = engine(true)
    counted(model, optimizer)
    collectgarbage()
    collectgarbage()
    local before = ps.memory("cpu").used
    counted(model, optimizer)
    collectgarbage()
    collectgarbage()
    assert.is_true(ps.memory("cpu").used <= before + 65536)
    model:close()
  end)

  it("frees a configuration's schema, and loads it again for the next one", function()
    engine():close()
    jit.flush()                              -- discards traces, which do not depend on a configuration
    collectgarbage()
    local before = collectgarbage "count"
    for _ = 1, 2 do
      require("ps.config").read { optimizer = { type = "AdamW" } }
      jit.flush()
      collectgarbage()
      collectgarbage()
      local grown = collectgarbage "count" - before
      assert.is_true(grown < 64, ("%.0f KiB of a configuration stay"):format(grown))
    end
  end)
end)
