-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/planner.lua [--seed N] [--settings N] [--rank-settings N] [--light] [--no-published]: compares plans
-- (tools/plan.lua) with training. It draws random settings of a GPT-2 and trains with each setting. It prints a line
-- for each setting, and at the end one JSON line:
--   settings           for each setting: peak_error, time_error and counter_error. peak_error is the predicted peak
--                      divided by the measured peak, minus 1, without tight budgets. On sim, whose device has 8 GiB,
--                      the measured peak is the device's counter. On cpu, the measured peak is the high-water mark of
--                      the process minus base_mib. base_mib is the plan's line `process` without tiers: the memory of
--                      the dry run and of its products. time_error is ln(predicted / measured) of the seconds of a
--                      step. counter_error is like peak_error, but on both devices the measured peak is from the
--                      engine's own counter.
--   ranks              time_error and counter_error for settings of two ranks with one thread each. The model is cut
--                      into stages (pp) or layers (tp).
--   least_budget_right number of settings whose predicted least budget is right. It is right if ten steps in this
--                      budget end with the same bits as a run without tight budgets, and if the engine, given 0.97 of
--                      this budget, refuses it before step 1.
--   median_time_error, worst_time_error         median and maximum of the absolute values of time_error
--   pairs_ordered      share of the pairs of settings that the plan orders correctly. Only pairs whose times differ by
--                      more than 20 % count.
--   dry_175b_s, dry_175b_mib                    a dry run of GPT-3's sizes on eight H200 with 2 TB
--   plan_175b_s, plan_175b_mib                  a plan of the same sizes on 32 of these machines with dp 4 x pp 8 x tp
--                                               8, with one dry run per kind of stage: the seconds of the whole plan,
--                                               and the peak memory in MiB of the largest of its processes
--   profiler_cost      the cost of recording events: event_ns, on and off of bench/profiler_cost.lua
--   published          for each system, the size of the largest model that its authors published, and the size of the
--                      largest model of psluajit on the same machine, in billions of parameters. Also the bytes that a
--                      rank holds (sums), and the tier that has no room for one more layer (full_first).
-- Seconds are predicted from a probe in the same run. The probe is a GPT-2 of fixed sizes, whose ops are timed to get
-- the seconds per operation or per byte. No number is fitted to the settings. --light draws small settings, to test the
-- benchmark itself.
local argparse = require "argparse"
local cjson = require "cjson"
local C = require "ps.core.declared"
local command_line = require "ps.core.command_line"
local course = require "ps.planning.course"
local pages = require "ps.planning.pages"
local paths = require "ps.paths"
local plan_lib = require "bench.plan_lib"
local process_lib = require "bench.process_lib"
local search = require "ps.planning.search"
local trial = require "ps.planning.trial"

local parser = argparse("bench/planner.lua", "Compares plans with training.")
command_line.whole(parser:option("--seed", "of the settings", "1"), 0)
command_line.whole(parser:option("--settings", "how many", "8"), 0)
command_line.whole(parser:option("--rank-settings", "number of settings with pipelines, and of settings with " ..
  "tensor parallelism", "1"), 0)
parser:flag("--light", "small settings")
parser:flag("--no-published", "leave out the published models")
local args = command_line.parse(parser)

local CASE, with, on_hardware = plan_lib.CASE, plan_lib.with, plan_lib.on_hardware
local STEPS, BELOW, APART = 10, 0.97, 1.2
local DISK = os.getenv "TMPDIR" or "/tmp"

-- The simulated device gets more memory than its default of 1 GiB, so that its memory does not limit any setting.
require("posix.stdlib").setenv("PS_SIM_MEMORY", "8GiB")

local random = args.seed * 2654435761 % 2 ^ 31 + 1
local function draw(list)
  random = (random * 16807) % (2 ^ 31 - 1)
  return list[1 + random % #list]
end

-- Runs a command. Returns the text of its standard output and standard error.
local function output(command)
  local errors = os.tmpname()
  local p = assert(io.popen(("%s 2>'%s'"):format(command, errors)))
  local text = p:read "*a"
  p:close()
  local f = assert(io.open(errors))
  local why = f:read "*a"
  f:close()
  os.remove(errors)
  return text, why
end

-- Trains the case. Returns the output of the run, or nil and its error.
local function train(case)
  local text, why = output(("'%s' '%s' '%s'"):format(paths.exe, CASE, cjson.encode(case)))
  local ok, result = pcall(cjson.decode, text)
  if ok then return result end
  return nil, why
end

-- Runs the case on several ranks with one thread each. Returns the outputs of the ranks, in rank order.
local function train_ranks(case)
  local text, why = output(("OMP_NUM_THREADS=1 '%s' '%s/tools/launch.lua' --nproc-per-node %d '%s' '%s'"):format(
    paths.exe, paths.root, case.ranks, CASE, cjson.encode(case)))
  local got = {}
  for rank, line in text:gmatch "%[(%d+)%] ({[^\n]*})" do got[tonumber(rank) + 1] = cjson.decode(line) end
  if #got < case.ranks then error(why, 0) end
  return got
end

local RATES = { host_adam = 1e9, device_adam = 1e9, up = 8e9, down = 8e9, at_once = 0 }

local function request_of(case)
  return { script = CASE, args = { cjson.encode(case) }, quiet = true, rates = RATES,
    machine = { host_nbytes = 0, device_nbytes = 0 } }
end

local function draw_case()
  local light = args.light
  local case = { device = draw { "cpu", "sim" }, precision = draw { "bf16", "fp32" },
    width = draw(light and { 128, 256 } or { 512, 768, 1024 }), layers = draw(light and { 2, 4 } or { 4, 6, 8, 12 }),
    positions = draw(light and { 64, 128 } or { 128, 256, 512 }), rows = draw { 2, 4, 8 },
    recompute = draw { false, true }, vocab = draw(light and { 1024 } or { 8192, 50257 }), disk = DISK }
  case.heads = case.width / 64
  case.rates = case.device == "sim" and RATES or nil
  return case
end

-- Returns the unit cost of each op, computed from the records of the ranks: seconds per operation if the op counts
-- operations, otherwise seconds per byte.
local function units_of(ranks)
  local sums, units, all = {}, {}, { flops = { 0, 0 }, bytes = { 0, 0 } }
  for _, got in ipairs(ranks) do
    for _, op in ipairs(got.totals) do
      local by = op.flops > 0 and "flops" or "bytes"
      sums[op.name] = sums[op.name] or { 0, 0 }
      for _, sum in ipairs { sums[op.name], all[by] } do sum[1], sum[2] = sum[1] + op.seconds, sum[2] + op[by] end
    end
  end
  for name, sum in pairs(sums) do units[name] = sum[2] > 0 and sum[1] / sum[2] or nil end
  return { units = units, flops = all.flops[1] / all.flops[2], bytes = all.bytes[1] / all.bytes[2] }
end

-- Runs the probe, a GPT-2 of fixed size, and returns the unit costs of its ops. The probe runs before and after each
-- setting, because other programs can slow down the machine.
local function probe(device, precision)
  local light = args.light
  local case = { device = device, precision = precision, layers = 3, width = light and 192 or 640, heads = light and 3
    or 10, positions = light and 96 or 320, rows = 3, vocab = light and 2048 or 16384, steps = 4, record = true,
    rates = device == "sim" and RATES or nil }
  local got, why = train(case)
  if not got then error("the probe failed: " .. why, 0) end
  return units_of { got }
end

-- Returns the predicted seconds of ops. The prediction is the mean over the given probes.
local function predicted_seconds(ops, probes)
  local sum = 0
  for _, op in ipairs(ops) do
    local by = op.flops > 0 and "flops" or "bytes"
    for _, p in ipairs(probes) do sum = sum + op[by] * (p.units[op.name] or p[by]) / #probes end
  end
  return sum
end

-- Runs one setting. Returns the errors of the predicted peak and of the predicted time. Also returns whether the
-- predicted least budget is right.
local function look_at(case)
  local row = { name = ("%s %s L%d C%d T%d B%d V%d%s"):format(case.device, case.precision, case.layers, case.width,
    case.positions, case.rows, case.vocab, case.recompute and " recompute" or "") }
  local free = with(case, { disk = nil })
  free.disk = nil
  local said = trial.run(with(request_of(free), { pages = pages.of_files() }))
  if not said.fits then error(said.error.message, 0) end
  local before = probe(case.device, case.precision)
  local roomy, why = train(with(free, { steps = STEPS }))
  if not roomy then error(why, 0) end
  local probes = { before, probe(case.device, case.precision) }
  local base = said.rss + assert(said.kept, "the memory that products keep was not measured")
  local measured = case.device == "sim" and roomy.tiers[1].peak or roomy.rss - base
  row.base_mib = base / 2 ^ 20
  row.peak_error = said.tiers[1].peak / measured - 1
  row.counter_error = said.tiers[1].peak / roomy.tiers[1].peak - 1
  row.predicted_s, row.measured_s = predicted_seconds(said.ops, probes), roomy.seconds
  row.time_error = math.log(row.predicted_s / row.measured_s)
  local tier = case.device == "sim" and "device" or "host"
  local field = tier .. "_nbytes"
  local roomier = case.device == "sim" and { host_nbytes = 2 ^ 32 } or {}
  local tight = with(case, roomier)
  tight[field] = said.tiers[1].peak
  local least = search.least_budget(request_of(tight), tier, said.tiers[1].peak)
  tight[field], tight.steps = least, STEPS
  local got, problem = train(tight)
  tight[field], tight.steps = math.floor(least * BELOW), 1
  local below, refusal = train(tight)
  row.least_budget = least
  row.least_budget_right = got ~= nil and got.loss == roomy.loss and below == nil
    and (refusal:find("does not fit", 1, true) or refusal:find("refused while the model was made", 1, true)) ~= nil
  if not row.least_budget_right then
    row.why = not got and problem or below and "0.97 of it trained" or got.loss ~= roomy.loss and "other bits"
      or refusal
  end
  return row
end

-- -- two ranks --------------------------------------------------------------------------------------------------------
local RANKS, MICROS = 2, 4

local function draw_ranks(axis)
  local light = args.light
  local case = { device = "cpu", ranks = RANKS, precision = draw { "bf16", "fp32" },
    width = draw(light and { 128, 256 } or { 256, 512 }), layers = draw { 4, 6, 8 },
    positions = draw(light and { 32, 64 } or { 128, 256 }), rows = draw { 2, 4 }, vocab = light and 1024 or 8192 }
  case.heads = case.width / 64
  if axis == "pp" then case.stages, case.micros = RANKS, MICROS else case.tp = RANKS end
  return case
end

local function probe_ranks(case)
  local light = args.light
  return units_of(train_ranks(with(case, { layers = 4, width = light and 192 or 384, heads = light and 4 or 6,
    positions = light and 48 or 160, rows = 3, vocab = light and 2048 or 4096, steps = 4, record = true })))
end

local function without_adam(ops)
  local rest, adam = {}, {}
  for _, op in ipairs(ops) do table.insert(op.name == "adam_" and adam or rest, op) end
  return rest, adam
end

-- Returns the predicted seconds of a step. If the model is cut into stages, the prediction is the simulated time of the
-- schedule plus the time of Adam. In the simulation, messages overlap with computation.
local function predicted_of_ranks(said, probes)
  if not said.cut then return predicted_seconds(said.ops, probes) end
  local by_stage, update = {}, 0
  for _, run in ipairs(said.runs) do
    local rest, adam = without_adam(run.ops)
    update = math.max(update, predicted_seconds(adam, probes))
    for _, stage in ipairs(run.stands_for) do by_stage[stage + 1] = predicted_seconds(rest, probes) end
  end
  return course.seconds(said.cut, by_stage, false, 0).makespan + update
end

-- Runs one setting on two ranks with one thread each. Returns the error of the predicted seconds, and the error of the
-- predicted peak compared with the engine's counter.
local function look_at_ranks(axis)
  local case = draw_ranks(axis)
  local row = { name = ("%s 2 %s L%d C%d T%d B%d V%d"):format(axis, case.precision, case.layers, case.width,
    case.positions, case.rows, case.vocab) }
  local request = request_of(case)
  request.ranks, request.ranks_a_machine = RANKS, RANKS
  local said = trial.run(request)
  if not said.fits then error(said.error.message, 0) end
  local before = probe_ranks(case)
  local got = train_ranks(with(case, { steps = STEPS }))
  local probes = { before, probe_ranks(case) }
  row.predicted_s, row.measured_s = predicted_of_ranks(said, probes), got[1].seconds
  row.time_error = math.log(row.predicted_s / row.measured_s)
  for rank, real in ipairs(got) do
    local run = said.cut and said.runs[rank] or said.runs[1]
    local off = run.tiers[1].peak / real.tiers[1].peak - 1
    if math.abs(off) >= math.abs(row.counter_error or 0) then row.counter_error = off end
  end
  return row
end

local function pairs_ordered(rows)
  local right, all = 0, 0
  for i = 1, #rows do
    for j = i + 1, #rows do
      local a, b = rows[i], rows[j]
      local ratio = a.measured_s / b.measured_s
      if ratio > APART or ratio < 1 / APART then
        all = all + 1
        if (ratio > 1) == (a.predicted_s > b.predicted_s) then right = right + 1 end
      end
    end
  end
  return all > 0 and right / all or nil
end

-- -- models that others published -------------------------------------------------------------------------------------
local PUBLISHED = {
  { system = "PatrickStar", hardware = "v100-32x8", host = 240e9, theirs_b = 18, width = 4096, precision = "fp16" },
  { system = "PatrickStar", hardware = "a100-40x8", host = 1e12, theirs_b = 68, width = 8192, precision = "fp16" },
  { system = "PatrickStar", hardware = "v100-32", host = 240e9, theirs_b = 12, width = 4096, precision = "fp16" },
  { system = "PatrickStar", hardware = "a100-40", host = 1e12, theirs_b = 50, width = 8192, precision = "fp16" },
  { system = "DeepSpeed", hardware = "v100-32", host = 240e9, theirs_b = 8, width = 3072, precision = "fp16" },
  { system = "DeepSpeed", hardware = "v100-32x8", host = 240e9, theirs_b = 30, width = 4096, precision = "fp16" },
}

local function gib(nbytes) return nbytes / 2 ^ 30 end

-- Returns a text about the bytes that a rank holds for the largest model: the size of its state, and the peak of each
-- tier.
local function sums(result)
  local parts = { ("%.1f GiB of state per rank (%.2f bytes per parameter over all ranks)"):format(
    gib(result.state_bytes),
    result.state_bytes * result.world / result.parameters) }
  for _, tier in ipairs(result.tiers) do
    parts[#parts + 1] = ("%s %.1f of %.1f GiB"):format(tier.name, gib(tier.peak), gib(tier.budget))
  end
  return table.concat(parts, ", ")
end

local function published(row)
  local case = { layers = 8, width = row.width, heads = row.width / 128, positions = 1024, vocab = 50304, rows = 4,
    precision = row.precision, recompute = true }
  local request = on_hardware(row.hardware, row.host, case)
  local result = trial.run(request)
  if not result.fits then error(result.error.message, 0) end
  local blocks = search.largest_model(request, result)
  local function with_layers(n)
    return trial.run(on_hardware(row.hardware, row.host, with(case, { layers = n })))
  end
  local full, more = with_layers(blocks), with_layers(blocks + 1)
  if not full.fits then error(full.error.message, 0) end
  if more.fits then error(("%d layers fit, but the plan said at most %d"):format(blocks + 1, blocks), 0) end
  return { system = row.system, hardware = row.hardware, host_gb = row.host / 1e9, theirs_b = row.theirs_b,
    ours_b = full.parameters / 1e9, layers = blocks, width = row.width, sums = sums(full),
    full_first = more.error.tier }
end

local function round(x) return x and tonumber(("%.4g"):format(x)) end

local function main()
  local rows, right, errors = {}, 0, {}
  for i = 1, args.settings do
    local row = look_at(draw_case())
    rows[i], errors[i] = row, math.abs(row.time_error)
    if row.least_budget_right then right = right + 1 end
    print(("%-48s peak %+.2f %% (base %.0f MiB; counter %+.2f %%), %.3g s for %.3g s (ln %+.2f), least budget "
      .. "%.1f MiB %s"):format(row.name, 100 * row.peak_error, row.base_mib, 100 * row.counter_error, row.predicted_s,
      row.measured_s, row.time_error, row.least_budget / 2 ^ 20,
      row.least_budget_right and "right" or "WRONG: " .. row.why))
    io.stdout:flush()
  end
  table.sort(errors)
  local out = { settings = {}, least_budget_right = right, of = #rows, median_time_error = round(errors[math.ceil(
    #errors / 2)]), worst_time_error = round(errors[#errors]), pairs_ordered = round(pairs_ordered(rows)),
    ranks = {}, published = {} }
  for i, row in ipairs(rows) do
    out.settings[i] = { name = row.name, peak_error = round(row.peak_error),
      counter_error = round(row.counter_error), time_error = round(row.time_error), base_mib = round(row.base_mib) }
  end
  for _ = 1, args.rank_settings do
    for _, axis in ipairs { "pp", "tp" } do
      local row = look_at_ranks(axis)
      print(("%-48s peak (counter) %+.2f %%, %.3g s for %.3g s (ln %+.2f)"):format(row.name, 100 * row.counter_error,
        row.predicted_s, row.measured_s, row.time_error))
      io.stdout:flush()
      table.insert(out.ranks, { name = row.name, counter_error = round(row.counter_error),
        time_error = round(row.time_error) })
    end
  end
  local began = C.ps_now()
  local dry = trial.run(on_hardware("h200x8", 2e12, plan_lib.GPT3))
  out.dry_175b_s, out.dry_175b_mib = round(C.ps_now() - began), dry.rss and round(dry.rss / 2 ^ 20)
  print(("175 B on 8 H200: %s, %.3g s, %s MiB"):format(dry.fits and "fits" or dry.error.message, out.dry_175b_s,
    tostring(out.dry_175b_mib)))
  local mesh = plan_lib.plan_175b()
  dry, out.plan_175b_s, out.plan_175b_mib = mesh.result, round(mesh.seconds), round(mesh.mib)
  print(("175 B on dp 4 x pp 8 x tp 8: %s, %.3g s, %s MiB"):format(dry.fits and "fits" or dry.error.message,
    out.plan_175b_s, tostring(out.plan_175b_mib)))
  -- bench/profiler_cost.lua runs in a process of its own, because plans fork, and this process must not have a psluajit
  -- context.
  local cost = process_lib.last_json(("'%s' '%s/bench/profiler_cost.lua'"):format(paths.exe, paths.root))
  if not cost then error("bench/profiler_cost.lua printed no figures", 0) end
  out.profiler_cost = { event_ns = cost.event_ns, on = cost.on, off = cost.off }
  print(("the record of events: %.1f ns per event, on %+.2f %% of a step, off %s"):format(cost.event_ns, 100 * cost.on,
    cost.off == cjson.null and "not counted" or ("%.4f %% of its instructions"):format(100 * cost.off)))
  for _, row in ipairs(args.no_published and {} or PUBLISHED) do
    local got = published(row)
    table.insert(out.published, got)
    print(("%s on %s with %.0f GB: theirs %.3g B, ours %.3g B (%d layers of width %d), full first: %s\n  %s"):format(
      got.system, got.hardware, got.host_gb, got.theirs_b, got.ours_b, got.layers, got.width, got.full_first,
      got.sums))
    got.ours_b = round(got.ours_b)
  end
  print(cjson.encode(out))
end

command_line.try("planner.lua", main)
