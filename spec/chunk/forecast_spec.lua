-- SPDX-License-Identifier: BSD-3-Clause
-- The plan's "other tensors" compared with the memory that a step holds in addition to its chunks: never less, and
-- little more. The dry run also counts the work space of kernels, which is most of it with a large vocabulary
-- (lm_loss).
local ps = require "ps"
local inner = require("ps.nn.handle").of
local gpt2 = require "models.gpt2"

-- Trains two steps. Returns the plan's forecast for the tier that computes, and the largest number of bytes that the
-- tier held in addition to chunks.
local function peaks(options, config, rows)
  ps.collect()
  ps.manual_seed(3)
  config.optimizer, config.plan_print = { type = "AdamW", params = { lr = 1e-3 } }, false
  local model, optimizer = ps.initialize { model_func = function() return gpt2.new("tiny", options) end,
    config = config, quiet = true }
  local ok, said, held = pcall(function()
    local x = ps.randint(0, options.vocab_size or 256, { rows, 32 }, { dtype = "int32" })
    local before = ps.memory(config.device).used
    local most = 0
    for _ = 1, 2 do
      ps.reset_peak_memory(config.device)
      optimizer:zero_grad()
      model:backward(model(x, x))
      optimizer:step()
      most = math.max(most, ps.memory(config.device).peak)
    end
    assert(before > 0)
    local chunks = 0
    for _, chunk in ipairs(ps.chunks()) do
      if config.device ~= "sim" or chunk.tiers.device then chunks = chunks + chunk.nbytes end
    end
    return inner(model).plan.forecast.tiers[1].other, most - chunks
  end)
  model:close()
  if not ok then error(said, 0) end
  return said, held
end

describe("the forecast of other tensors in a plan", function()
  local BIG = { vocab_size = 6000 }
  for name, case in pairs {
    ["fp32"] = { {}, {} }, ["bf16"] = { {}, { bf16 = { enabled = true } } },
    ["a large vocabulary"] = { BIG, {} }, ["a large vocabulary in bf16"] = { BIG, { bf16 = { enabled = true } } },
    ["a large vocabulary in fp16"] = { BIG, { fp16 = { enabled = true } } },
    ["recompute"] = { { vocab_size = 6000, recompute = true }, { bf16 = { enabled = true } } },
  } do
    it("is the memory that a step holds: " .. name, function()
      case[2].memory = { host = "60MiB" }                  -- the plan must not use 120 KiB of it
      local said, held = peaks(case[1], case[2], 8)
      assert.truthy(said >= held, ("%d said, %d held"):format(said, held))
      assert.truthy(said <= held * 1.01 + 2 ^ 18, ("%d said, %d held"):format(said, held))
    end)
  end
end)

-- Memory that a script used before the first step, and freed, belongs to no tensor.
describe("a plan of a step after large tensors were freed", function()
  local function fetched(before)
    ps.collect()
    local model, optimizer = ps.initialize { quiet = true,
      model_func = function() return gpt2.new("tiny", { n_embd = 128, vocab_size = 4096 }) end,
      config = { plan_print = false, bf16 = { enabled = true }, optimizer = { type = "AdamW" },
        memory = { host = "12MiB", disk = { path = "/tmp", limit = "64MiB" } } } }
    local ok, got = pcall(function()
      before()
      local x = ps.randint(0, 256, { 1, 16 }, { dtype = "int32" })
      model:backward(model(x, x))
      optimizer:step()
      return inner(model).plan.forecast.fetched[1]
    end)
    model:close()
    if not ok then error(got, 0) end
    return got
  end

  it("prints that a disk is not used if nothing moves", function()
    local lines = {}
    for _, host in ipairs { "64MiB", "12MiB" } do
      local model = ps.initialize {
        model_func = function() return gpt2.new("tiny", { n_embd = 128, vocab_size = 4096 }) end,
        config = { plan_print = false, optimizer = { type = "AdamW" },
          memory = { host = host, disk = { path = "/tmp", limit = "64MiB" } } } }
      local x = ps.randint(0, 256, { 1, 16 }, { dtype = "int32" })
      model:backward(model(x, x))
      local engine = inner(model)
      lines[host] = table.concat(require("ps.engine.plan.forecast").lines(engine, engine.plan.forecast), "\n")
      model:close()
    end
    assert.matches("nothing moves: all of it fits\n  disk    64.0 MiB set aside, not used", lines["64MiB"], 1, true)
    assert.matches("a step fetches [^\n]*\n  disk    64%.0 MiB set aside, at most [%d.]+ MiB used", lines["12MiB"])
  end)

  it("has the whole budget", function()
    local without = fetched(function() end)
    local with = fetched(function() ps.zeros({ 5 * 2 ^ 20 }, { dtype = "uint8" }):release() end)
    assert.is_true(without > 0)
    assert.equal(without, with)
  end)
end)
