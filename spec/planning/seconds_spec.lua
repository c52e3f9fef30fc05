-- SPDX-License-Identifier: BSD-3-Clause
-- The seconds of a plan (lua/ps/planning/seconds.lua), from given counts and speeds, compared with formulas.
local seconds = require "ps.planning.seconds"

-- Rates with an efficiency of 1: 1e12 operations, 1e9 bytes of memory, and 1e8 bytes of links between ranks per second.
local there = {
  table = { host = { flops = { fp32 = 1e12 }, bandwidth = 1e9 }, gpu = { between = 1e8 },
    links = { up = 1e9, down = 1e9 },
    efficiency = { compute = { 1, 1 }, memory = { 1, 1 }, links = { 1, 1 }, between = { 1, 1 }, disk = { 1, 1 } } },
  rates = { host_adam = 1e6, device_adam = 1e6 },
}

local function compute(result)
  local full = { device = "cpu", precision = "fp32", stage = 0, parameters = 1000, links = {}, tp = 2 }
  for key, value in pairs(result) do full[key] = value end
  local got = seconds.of(there, full, 4)              -- all ranks are on one machine
  assert.equal(got.compute[1], got.compute[2])
  return got.compute[1]
end

local function near(want, got) assert.truthy(math.abs(got / want - 1) < 1e-12, ("%.9g, not %.9g"):format(got, want)) end

describe("the seconds of a plan", function()
  it("have each update by the bytes that it moves, once", function()
    local product = { name = "linear", flops = 3e12, bytes = 1 }
    local function of(update) return compute { ops = { product, update } } end
    -- Per fp32 parameter, Adam reads and writes the value and two averages (24 bytes), and reads 4 bytes of the
    -- gradient.
    near(3 + 1000 / 1e6, of { name = "adam_", flops = 0, bytes = 28 * 1000 })
    near(3 + 1000 / 1e6 * 20 / 28, of { name = "sgd_", flops = 0, bytes = 20 * 1000 })          -- with momentum
    near(3 + 1000 / 1e6 * 12 / 28, of { name = "sgd_", flops = 0, bytes = 12 * 1000 })
  end)

  it("add the messages of ranks within layers, except for rows exchanged during products", function()
    local ops = { { name = "linear", flops = 1e12, bytes = 0 }, { name = "column_linear", flops = 2e12, bytes = 0 },
      { name = "row_linear", flops = 1e12, bytes = 0 }, { name = "column_linear_grad", flops = 3e12, bytes = 0 } }
    near(7 + 5, compute { ops = ops, axes = { tp = 5e8 } })
    -- Products of 6 seconds, rows of 4 and 8 seconds in pieces, and one second of other bytes.
    near(1 + 1 + 6 + 4 / 4, compute { ops = ops, axes = { tp = 5e8 }, pieces = { count = 4, nbytes = 4e8 } })
    near(1 + 1 + 8 + 6 / 3, compute { ops = ops, axes = { tp = 9e8 }, pieces = { count = 3, nbytes = 8e8 } })
  end)

  it("have the same for each stage of a pipeline", function()
    local vstage = { parts = 1, forward = 1, input = 1, weight = 1, numel = 1, held = 1, up = 0, down = 0 }
    local function stage(n)
      local copy = { stage = n }
      for key, value in pairs(vstage) do copy[key] = value end
      return copy
    end
    local cut = { stages = 2, stage = 0, schedule = "gpipe", virtual_stages = 1, micro_batches = 4, performed = 4,
      vstages = { stage(0), stage(1) }, sent = 0 }
    local function of(update, pieces)
      local runs = {}
      for n = 0, 1 do
        runs[n + 1] = { stands_for = { n }, axes = { tp = 2e8 }, parameters = 500, pieces = pieces, ops = {
          { name = "column_linear", flops = 3e12, bytes = 0 },
          { name = update[1], flops = 0, bytes = update[2] * 500 } } }
      end
      return compute { cut = cut, runs = runs, recompute = false }
    end
    local adam, sgd, beside = of { "adam_", 28 }, of { "sgd_", 12 }, of({ "adam_", 28 }, { count = 4, nbytes = 2e8 })
    near(500 / 1e6 * 16 / 28, adam - sgd)
    -- all 3 + 2 seconds of a stage belong to its micro-batches, each of which becomes equally shorter
    near((3 + 2 / 4) / (3 + 2), (beside - 500 / 1e6) / (adam - 500 / 1e6))
  end)
end)
