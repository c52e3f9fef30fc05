-- SPDX-License-Identifier: BSD-3-Clause
-- Many micro-batches per step: the largest number, the time until such a step begins, the plan's bytes, and a signal in
-- the middle of it.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local gpt2 = require "models.gpt2"
local paths = require "ps.paths"
local check = require "spec.check_lib"
local fails = check.fails_saying

local L = dofile((arg[0]:match("^(.*)/[^/]*$") or ".") .. "/chunks_lib.lua")

local MOST = 4096
local folder

L.scratch({ setup = setup, teardown = teardown }, function(path) folder = path end)

local function engine(config)
  config.plan_print = false
  return ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end, config = config }
end

-- Runs a first forward. Returns the processor seconds that it took, and its plan.
local function begin(config)
  local model = engine(config)
  local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
  local began = os.clock()
  local ok, problem = pcall(model, x, x)
  local seconds, forecast = os.clock() - began, inner(model).plan.forecast
  model:close()
  if not ok then error(problem, 0) end
  return seconds, forecast
end

describe("gradient_accumulation_steps", function()
  -- This takes about a second of processor time. Eight times as many micro-batches must take about eight times as long;
  -- in quadratic time it would be 64 times as long.
  it("of up to 4096 begin a step in proportion to their number", function()
    for _, memory in ipairs { "chunk", { host = "3MiB", disk = { path = folder } } } do
      local function seconds(n)
        return (begin { gradient_accumulation_steps = n, bf16 = { enabled = true }, memory = memory })
      end
      local few, many = math.max(seconds(MOST / 8), seconds(MOST / 8)), seconds(MOST)
      assert.truthy(many < 24 * few, ("%g and %g"):format(few, many))
    end
  end)

  it("above that are refused by name, given or derived", function()
    for _, n in ipairs { MOST + 1, 1e6, 2 ^ 31, 2 ^ 53 + 2, 1e308 } do
      fails({ "gradient_accumulation_steps is", "from 1 to 4096" }, function()
        engine { gradient_accumulation_steps = n }
      end)
    end
    fails({ "gradient_accumulation_steps would be 5000", "train_batch_size", "at most 4096" }, function()
      engine { train_batch_size = 10000, train_micro_batch_size_per_gpu = 2 }
    end)
  end)

  it("need no more of a budget with a larger number: Lua's garbage is counted only for a few", function()
    local function other(n)
      local _, forecast = begin { gradient_accumulation_steps = n,
        memory = { host = "8MiB", disk = { path = folder } } }
      return forecast.tiers[1].other
    end
    assert.truthy(other(400) <= other(100) * 1.02)
  end)
end)

local function has(text, ...)
  for _, part in ipairs { ... } do assert.truthy(text:find(part, 1, true), text) end
end

describe("ps.train.run", function()
  it("takes 1 to 4096 batches per step", function()
    local model = gpt2.new "tiny"
    for _, n in ipairs { 0, -1, MOST + 1, 1e18 } do
      fails({ "accumulate is", "1 to 4096 batches" }, function()
        ps.train.run { model = model, optimizer = ps.optim.AdamW(model, { lr = 1e-3 }), loader = {}, steps = 1,
          accumulate = n, quiet = true }
      end)
    end
  end)

  it("reports after a signal that the step is finished first, and saves it", function()
    local said = check.run("OMP_NUM_THREADS=1", [[
      local ps, gpt2 = require "ps", require "models.gpt2"
      local model, batches = gpt2.new "tiny", 0
      local loader = { global_batch = 2, seq = 16 }
      function loader:next()
        batches = batches + 1
        if batches == 11 then os.execute("kill -TERM " .. require("posix.unistd").getpid()) end
        local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
        return x, x
      end
      local result = ps.train.run { model = model, optimizer = ps.optim.AdamW(model, { lr = 1e-3 }), loader = loader,
        steps = 9, accumulate = 8, quiet = true }
      print(result.interrupted, result.step, batches)
    ]])
    has(said, "interrupted after batch 3 of 8 in step 2: the step is finished first", "ends the run at once")
    has(said, "true\t2\t16")
    assert.is_nil(said:find("interrupted after.*interrupted after"))
  end)
end)

describe("train_gpt2.lua --accumulate", function()
  it("takes whole numbers from 1 to 4096", function()
    for _, text in ipairs { "0", "2.5", "-3", "4097", "1e18", "many" } do
      local said, code = check.shell(("%s %s/examples/train_gpt2.lua --out /nonexistent --accumulate=%s")
        :format(paths.exe, paths.root, text))
      assert.truthy(said:find("--accumulate " .. text .. ": it takes a whole number from 1 to 4096", 1, true), said)
      assert.truthy(code > 0, said)
    end
  end)
end)
