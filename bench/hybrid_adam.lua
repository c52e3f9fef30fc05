-- SPDX-License-Identifier: BSD-3-Clause
-- Times the steps of a model whose optimizer state does not fit on the device. The device is the simulated device
-- `sim`, with several rates of its link. Updates are divided between host and device in several ways:
--   - all on the host
--   - on the device only for units that stay on the device (margin)
--   - on the device for given shares of the units
--   - all on the device
--   - as planned
-- The runs for one link rate alternate their steps, so that other load on the machine affects all runs equally. Adam on
-- the host is slowed down (PS_CPU_ISA=sse2), because a real accelerator updates faster than its host.
--   psluajit bench/hybrid_adam.lua --links 0.25,0.5,1,2,4
-- Prints a row for each link rate. The row contains the milliseconds of the shortest step of each run, because other
-- load on the machine only makes steps longer. For the planned division, the row also contains the number of units that
-- the device updates. The last line is one JSON object:
--   planned_over_best   the step time of the planned division divided by the shortest step time of the other divisions,
--                       at the worst link rate
--   exact               true if, for each link rate, all runs ended with the same bits
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole
local cjson = require "cjson"
local lib = require "bench.chunk_lib"
local merged, pluck = lib.merged, lib.pluck

local parser = argparse("bench/hybrid_adam.lua", "Measures on which device Adam runs best.")
parser:option("--links", "rates of the link, GB/s each way", "0.25,0.5,1,2,4")
parser:option("--shares", "shares of the units on the device", "0.25,0.5,0.75")
whole(parser:option("--layers", "layers of 256", "16"), 1)
parser:option("--device-memory", "budget on the device", "72MiB")
whole(parser:option("--chunk-size", "elements", "262144"), 1)
whole(parser:option("--steps", "number of measured steps of each run", "9"), 1)
parser:option("--host-isa", "instruction set of Adam on the host", "sse2")
parser:flag("--verbose", "print the plans")
local args = command_line.parse(parser)

local WARM = 3

--- Two extreme sets of rates. With SHUT, the planner sends no update over the link. With OPEN, it sends all updates
--- over the link.
local SHUT, OPEN = { up = 1, down = 1, at_once = 0 }, { host_adam = 1, device_adam = 1e15, up = 1e15, down = 1e15 }

local function least(list) return math.min(unpack(list)) end

local function settings()
  local list = {
    { name = "host", config = { zero_optimization = { offload_optimizer = { device = "cpu", ratio = 1 } } } },
    { name = "margin", config = { rates = merged(SHUT, { host_adam = 1, device_adam = 1 }) } },
  }
  for share in args.shares:gmatch("[^,]+") do
    list[#list + 1] = { name = ("%g %%"):format(share * 100), config = { rates = merged(OPEN, { at_once = 1 }),
      zero_optimization = { offload_optimizer = { device = "cpu", ratio = 1 - share } } } }
  end
  list[#list + 1] = { name = "device", config = { rates = merged(OPEN, { at_once = 1 }) } }
  list[#list + 1] = { name = "planned", config = {} }
  return list
end

local run = { model = "gpt2", batch = 1, seq = 32,
  options = { n_layer = args.layers, n_embd = 256, n_head = 4, vocab_size = 2048 },
  config = { bf16 = { enabled = true }, device = "sim", chunk_size = args.chunk_size, use_cpu_embedding = false,
    optimizer = { type = "AdamW", params = { lr = 1e-4 } }, memory = { device = args.device_memory } } }

local function measure(link)
  local environment = { OMP_NUM_THREADS = 1, PS_CPU_ISA = args.host_isa, PS_SIM_ISA = "best", PS_SIM_MEMORY = "4GiB",
    PS_SIM_BANDWIDTH = link }
  local rows = settings()
  for _, row in ipairs(rows) do
    local planned = row.name == "planned"
    row.worker = lib.start(merged(run, { config = merged(run.config, row.config, { plan_print = planned
      and args.verbose }) }), environment)
    row.steps = {}
  end
  for step = 1, WARM + args.steps do
    for _, row in ipairs(rows) do
      local seen = row.worker:ask "step"
      if step > WARM then row.steps[step - WARM] = seen end
    end
  end
  local exact, first = true, nil
  for _, row in ipairs(rows) do
    row.ms = least(pluck(row.steps, "seconds")) * 1e3
    row.update_ms = row.ms - least(pluck(row.steps, "forward_s")) * 1e3 - least(pluck(row.steps, "backward_s")) * 1e3
    row.split = row.worker:ask "split"
    local hash = row.worker:ask("hash").hash
    first = first or hash
    exact = exact and hash == first
    row.worker:close()
    row.worker = nil
  end
  return rows, exact
end

local result = { planned_over_best = 0, exact = true, links = {} }
for link in args.links:gmatch("[^,]+") do
  local rows, exact = measure(tonumber(link))
  local line, best, planned = {}, math.huge, rows[#rows]
  for _, row in ipairs(rows) do
    line[#line + 1] = ("%s %.0f"):format(row.name, row.ms)
    if row ~= planned then best = math.min(best, row.ms) end
  end
  print(("%5s GB/s  %s (%d of %d units on the device)"):format(link, table.concat(line, "  "), planned.split.count,
    planned.split.units))
  if args.verbose then
    for _, row in ipairs(rows) do
      local p = row.split
      print(("    %-8s %2d on the device: after backward %.1f ms, waits %.1f, up %.1f MiB; predicted %.1f: copies "
        .. "%.1f, host %.1f"):format(row.name, p.count, row.update_ms, least(pluck(row.steps, "wait_s")) * 1e3,
        row.steps[#row.steps].up[1] / 2 ^ 20, (p.seconds or 0) * 1e3, (p.link or 0) * 1e3, (p.host or 0) * 1e3))
    end
  end
  local ms = {}
  for _, row in ipairs(rows) do ms[row.name] = row.ms end
  result.links[#result.links + 1] = { gb_per_s = tonumber(link), ms = ms, on_device = planned.split.count,
    units = planned.split.units, predicted_ms = planned.split.seconds * 1e3 }
  result.planned_over_best = math.max(result.planned_over_best, planned.ms / best)
  result.exact = result.exact and exact
end
print(cjson.encode(result))
