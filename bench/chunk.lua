-- SPDX-License-Identifier: BSD-3-Clause
-- Measures the cost of chunks and the savings of the planner. There are five sections. Without --only, all sections
-- run. The names after -> are keys of the result:
--   state   bytes of state per parameter, including waste, in bf16 with one micro-batch per step ->
--           state_bytes_per_param. The value is measured for gpt2 in the engine and computed for gpt2-xl from its
--           layout. The figure is the larger of these two values.
--   moved   bytes that steps of gpt2-medium in bf16 moved between host and disk after the first steps, divided by the
--           smallest number of bytes that any policy must move (bench/bound_lib.lua, for the same trace and budget) ->
--           moved_over_optimum, lru_over_optimum, fifo_over_optimum. Each figure is the value for the worst budget of
--           the policy.
--   speed   the step time with plain memory divided by the step time with chunks, if everything fits ->
--           chunked_over_plain_speed (gpt2)
--   sim     a simulated device whose budget is smaller than the model. The bandwidth is chosen so that copies take as
--           long as the computation. The figures are the step time divided by max(compute, copies) ->
--           sim_step_over_bound (four micro-batches per step), sim_one_micro_step_over_bound (one micro-batch per
--           step).
--   exact   many small settings, compared with plain memory
-- The last line is one JSON object. `exact` is true only if every run of every section had the same losses and
-- parameters as plain memory, bit for bit.
--   psluajit bench/chunk.lua [--only moved,speed] [--disk DIR]
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole
local parser = argparse("bench/chunk.lua", "Measures chunked training against plain memory and against bounds.")
parser:option("--only", "sections, separated by commas: state, moved, speed, sim, exact")
parser:option("--disk", "folder for disk tiers", ".")
parser:option("--shares", "budgets of section moved, as shares of the state", "0.45,0.7")
parser:option("--moved-model", "model of section moved", "gpt2-medium")
parser:option("--policies", "policies of section moved", "plan,lru,fifo")
whole(parser:option("--rounds", "steps that section speed takes alternately", "9"), 1)
whole(parser:option("--batch", "rows per batch in section speed", "4"), 1)
whole(parser:option("--seq", "positions per row in section speed", "256"), 1)
whole(parser:option("--sim-steps", "steps that section sim times", "7"), 1)
parser:flag("--verbose", "print each step of sections moved and sim")
local args = command_line.parse(parser)

local ps = require "ps"
local cjson = require "cjson"
local gpt2 = require "models.gpt2"
local pack = require "ps.engine.layout.pack"
local bound = require "bench.bound_lib"
local lib = require "bench.chunk_lib"
local merged, median, pluck = lib.merged, lib.median, lib.pluck

local MIB = 2 ^ 20
local BASE = { optimizer = { type = "AdamW", params = { lr = 1e-4, weight_decay = 0.1 } } }
local BF16 = { bf16 = { enabled = true } }

local result = { exact = true, exact_settings = 0 }

local function say(text, ...) print(text:format(...)) end

--- Records the result of one setting for the figure `exact`.
local function check_exact(what, same)
  result.exact_settings = result.exact_settings + 1
  if same then return end
  result.exact = false
  say("  NOT EXACT: %s", what)
end

--- Returns a setting for bench/chunk_worker.lua: `run` with the additional configuration keys `config`.
local function with(run, config)
  return merged(run, { config = merged(BASE, run.config, config) })
end

local plain_prints = {}

--- Returns the losses and the hash of the parameters after `n` steps with plain memory. The result is computed only
--- once for each run and n.
local function plain_print(run, n)
  local key = cjson.encode { run.model, run.batch, run.seq, n, run.config or {}, run.options or {} }
  if not plain_prints[key] then
    local worker = lib.start(with(run, { memory = "plain" }))
    plain_prints[key] = lib.fingerprint(worker:steps(n), worker)
    worker:close()
  end
  return plain_prints[key]
end

local function sum(list)
  local total = 0
  for _, x in ipairs(list) do total = total + x end
  return total
end

local function line_of(step)
  return ("%.3f s, up %.1f MiB, down %.1f MiB, waiting %.3f s in %d waits, %d unplanned"):format(step.seconds,
    sum(step.up) / MIB, sum(step.down) / MIB, step.wait_s, step.waits, step.unplanned)
end

local sections = {}

-- -- state ----------------------------------------------------------------------------------------------------------
function sections.state()
  local run = { model = "gpt2", batch = 1, seq = 32, config = BF16 }
  local worker = lib.start(with(run, {}))
  local steps = worker:steps(1)
  local chunks = worker:ask "chunks"
  check_exact("gpt2, everything fits", lib.fingerprint(steps, worker) == plain_print(run, 1))
  worker:close()
  local here = chunks.nbytes / chunks.numel
  say("  gpt2, the engine's %d chunks: %.4f bytes per parameter, %.4f of them waste", chunks.count, here,
    (chunks.nbytes - chunks.used) / chunks.numel)
  local entries, numel = {}, 0
  for name, p in gpt2.new("gpt2-xl", { device = "meta", dtype = "bf16" }):named_parameters() do
    entries[#entries + 1] = { numel = p:numel(), dtype = "bf16", trains = true, name = name }
    numel = numel + p:numel()
  end
  local chosen = pack.search(entries, { capacity = 6 * 2 ^ 30, state_bytes = 14 }).chosen
  local xl = chosen.layout.numel * 14 / numel
  say("  gpt2-xl, laid out for a budget of 6 GiB: %d rows of chunks of %.1f Mi elements: %.4f bytes per parameter",
    #chosen.layout.chunks, chosen.size / MIB, xl)
  result.state_bytes_per_param = math.max(here, xl)
  result.gpt2_state_bytes_per_param, result.gpt2_xl_state_bytes_per_param = here, xl
end

-- -- moved ----------------------------------------------------------------------------------------------------------
local MOVED = { model = args.moved_model, batch = 1, seq = 64, config = BF16 }
local WARM, COUNTED = 2, 3

function sections.moved()
  local state = gpt2.new(MOVED.model, { device = "meta" }):num_parameters() * 14
  local n, worst = WARM + COUNTED, {}
  local wanted = plain_print(MOVED, n)
  for share in args.shares:gmatch("[^,]+") do
    local host = math.floor(state * tonumber(share))
    local least
    for policy in args.policies:gmatch("[^,]+") do
      local memory = { host = host, disk = { path = args.disk, limit = math.ceil(state * 1.4) } }
      local worker = lib.start(with(MOVED, { memory = memory, eviction = policy }))
      local steps = worker:steps(n)
      local traced = worker:ask "trace"
      local what = ("%s, host %.0f MiB, %s"):format(MOVED.model, host / MIB, policy)
      check_exact(what, lib.fingerprint(steps, worker) == wanted)
      worker:close()
      if not least then
        local reason
        least, reason = bound.solve(traced.trace, traced.capacity, 60)
        if not least then say("  no lower bound: %s", reason) end
        say("  host %.0f MiB of %.0f MiB of state, %.0f MiB for chunks: at least %.0f MiB per step", host / MIB,
          state / MIB, traced.capacity / MIB, (least or 0) / MIB)
      end
      local bytes, waits = 0, 0
      for i = WARM + 1, n do
        bytes = bytes + (sum(steps[i].up) + sum(steps[i].down)) / COUNTED
        waits = waits + steps[i].wait_s / COUNTED
      end
      local seconds = median(pluck(steps, "seconds"))
      say("    %-6s moves %.0f MiB per step%s; a step takes %.2f s, %.2f s of it waiting", policy, bytes / MIB,
        least and (", %.4f of the least"):format(bytes / least) or "", seconds, waits)
      if args.verbose then for _, step in ipairs(steps) do say("      %s", line_of(step)) end end
      if least then worst[policy] = math.max(worst[policy] or 0, bytes / least) end
    end
  end
  result.moved_over_optimum = worst.plan
  result.lru_over_optimum, result.fifo_over_optimum = worst.lru, worst.fifo
end

-- -- speed ----------------------------------------------------------------------------------------------------------
--- Returns the median step time with plain memory and the median step time with chunks. The steps of the two runs
--- alternate.
local function race(name, run, rounds)
  local runs = { plain = lib.start(with(run, { memory = "plain" })), chunk = lib.start(with(run, {})) }
  local steps, order = { plain = {}, chunk = {} }, { "plain", "chunk" }
  for round = 1, rounds + 2 do
    for _, kind in ipairs(order) do steps[kind][round] = runs[kind]:ask "step" end
    order[1], order[2] = order[2], order[1]                 -- the runs alternate in being first, because the first run
                                                            -- has colder caches
  end
  check_exact(name .. ", everything fits",
    lib.fingerprint(steps.plain, runs.plain) == lib.fingerprint(steps.chunk, runs.chunk))
  local seconds, pairs_ = {}, {}
  for kind, list in pairs(steps) do
    for _ = 1, 2 do table.remove(list, 1) end
    seconds[kind] = median(pluck(list, "seconds"))
    say("  %-22s %-5s %8.1f ms per step (forward %.1f, backward %.1f, the rest %.1f)", name, kind, seconds[kind] * 1e3,
      median(pluck(list, "forward_s")) * 1e3, median(pluck(list, "backward_s")) * 1e3,
      (seconds[kind] - median(pluck(list, "forward_s")) - median(pluck(list, "backward_s"))) * 1e3)
    runs[kind]:close()
  end
  for i in ipairs(steps.plain) do pairs_[i] = steps.plain[i].seconds / steps.chunk[i].seconds end
  local ratio = seconds.plain / seconds.chunk
  say("  %-22s plain over chunk %.4f, median of the rounds' own ratios %.4f", name, ratio, median(pairs_))
  return ratio
end

function sections.speed()
  result.small_chunked_over_plain_speed = race("6 layers of 256, fp32",
    { model = "small", batch = 8, seq = 256 }, 3 * args.rounds)
  result.chunked_over_plain_speed = race("gpt2, bf16",
    { model = "gpt2", batch = args.batch, seq = args.seq, config = BF16 }, args.rounds)
end

-- -- sim ------------------------------------------------------------------------------------------------------------
-- Runs one of two shapes. The first shape has several micro-batches per step, and copies are spread over the whole
-- step. The second shape has one micro-batch per step. In the second shape, gradients are evicted only during backward,
-- and parameters are fetched only after backward.
local function sim_shape(accumulate, share)
  return { share = share, model = "gpt2", batch = 2, seq = 256,
    config = merged(BF16, { gradient_accumulation_steps = accumulate, data_types = { grad_accum_dtype = "bf16" } }),
    options = { n_layer = 10, n_embd = 512, n_head = 8, vocab_size = 4096 } }
end
local ONE_THREAD = { OMP_NUM_THREADS = 1, PS_SIM_MEMORY = "8GiB" }     -- leaves the other core to the copy threads

local function timed(setting, environment, n)
  local worker = lib.start(setting, merged(ONE_THREAD, environment))
  local steps = worker:steps(n + 2)
  local traced, print_ = worker:ask "trace", lib.fingerprint(steps, worker)
  worker:close()
  for _ = 1, 2 do table.remove(steps, 1) end
  return steps, traced, print_
end

local function copies(step) return math.max(step.up[1], step.down[1]) end

local function sim(shape)
  local n = args.sim_steps
  local run = merged(shape, {})
  run.share = nil
  local wanted = plain_print(run, n + 2)
  local fitting, traced, print_ = timed(with(run, { device = "sim", memory = { device = "4GiB" } }), nil, n)
  check_exact("sim, everything fits", print_ == wanted)
  local compute = median(pluck(fitting, "seconds"))
  local numel = gpt2.new(run.model, merged(run.options, { device = "meta" })):num_parameters()
  local device = math.floor(traced.other + numel * 2 * shape.share)
  local setting = with(run, { device = "sim", memory = { device = device }, overlap_optimizer = true })
  local fast, _, fast_print = timed(setting, { PS_SIM_BANDWIDTH = 64 }, 2)
  check_exact("sim, part of the parameters fits", fast_print == plain_print(run, 4))
  local bandwidth = copies(fast[#fast]) / compute
  local steps, _, slow_print = timed(setting, { PS_SIM_BANDWIDTH = ("%.6f"):format(bandwidth / 1e9) }, n)
  check_exact("sim, with its bandwidth set", slow_print == wanted)
  if args.verbose then for _, step in ipairs(steps) do say("    %s", line_of(step)) end end
  local seconds, transfer = median(pluck(steps, "seconds")), median { copies(steps[1]), copies(steps[#steps]) }
  transfer = transfer / bandwidth
  say("  %.1f M parameters, %d micro-batches, device budget %.1f MiB: %.1f MiB of other tensors, %.1f MiB for chunks",
    numel / 1e6, run.config.gradient_accumulation_steps, device / MIB, traced.other / MIB,
    (device - traced.other) / MIB)
  say("  a step copies %.1f MiB in and %.1f MiB out at %.3f GB/s each way: %.1f ms; computing alone: %.1f ms",
    steps[#steps].up[1] / MIB, steps[#steps].down[1] / MIB, bandwidth / 1e9, transfer * 1e3, compute * 1e3)
  say("  with copies at 64 GB/s: %.1f ms per step, %.1f ms of it waiting", median(pluck(fast, "seconds")) * 1e3,
    median(pluck(fast, "wait_s")) * 1e3)
  say("  a step takes %.1f ms (forward %.1f, backward %.1f), %.1f ms of them waiting in %d waits, %d unplanned",
    seconds * 1e3, median(pluck(steps, "forward_s")) * 1e3, median(pluck(steps, "backward_s")) * 1e3,
    median(pluck(steps, "wait_s")) * 1e3, median(pluck(steps, "waits")), median(pluck(steps, "unplanned")))
  return seconds, compute, transfer
end

function sections.sim()
  local seconds, compute, transfer = sim(sim_shape(4, 0.8))
  result.sim_step_over_bound = seconds / math.max(compute, transfer)
  result.sim_step_s, result.sim_compute_s, result.sim_transfer_s = seconds, compute, transfer
  seconds, compute, transfer = sim(sim_shape(1, 0.5))
  result.sim_one_micro_step_over_bound = seconds / math.max(compute, transfer)
end

-- -- exact ----------------------------------------------------------------------------------------------------------
local CHAR = { model = "char", batch = 2, seq = 32 }

local function exact_settings()
  local disk = { path = args.disk, limit = "64MiB" }
  local tight, device = { host = "7MiB", disk = disk }, { device = "5MiB" }
  local three = { device = "5MiB", host = "8MiB", disk = disk }
  local accumulate = { gradient_accumulation_steps = 2 }
  return {
    { {}, { memory = tight } },
    { BF16, { memory = tight } },
    { BF16, { memory = tight, eviction = "belady" } },
    { BF16, { memory = tight, eviction = "lru", chunk_size = 16384 } },
    { BF16, { memory = tight, eviction = "fifo", prefetch = false } },
    { BF16, { memory = tight, chunk_size = 1024 }, recompute = true },
    { merged(BF16, { gradient_clipping = 0.5 }), { memory = tight, chunk_size = 50000 } },
    { merged(BF16, accumulate), { memory = tight } },
    { merged(accumulate, { gradient_clipping = 0.5 }), { memory = { host = "10MiB", disk = disk } } },
    { { fp16 = { enabled = true } }, { memory = tight } },
    { BF16, { device = "sim", memory = device } },
    { BF16, { device = "sim", memory = device, eviction = "lru", chunk_size = 16384 } },
    { BF16, { device = "sim", memory = three } },
    { {}, { device = "sim", memory = { device = "6MiB" }, chunk_size = 16384 } },
  }
end

function sections.exact()
  for _, row in ipairs(exact_settings()) do
    local run = merged(CHAR, { config = row[1] })
    local worker = lib.start(with(merged(run, { options = { recompute = row.recompute } }), row[2]))
    local steps = worker:steps(4)
    local same = lib.fingerprint(steps, worker) == plain_print(run, 4)
    worker:close()
    local what = cjson.encode { merged(row[1], row[2]), row.recompute and "recompute" or nil }
    local moved = sum(steps[4].up) + sum(steps[4].down)
    say("  %-9s %.2f MiB moved a step: %s", same and "same" or "DIFFERENT", moved / MIB, what)
    check_exact(what, same)
  end
end

-- -------------------------------------------------------------------------------------------------------------------
local function wanted(name)
  if not args.only then return true end
  for part in args.only:gmatch("[^,]+") do if part == name then return true end end
  return false
end

for part in (args.only or ""):gmatch("[^,]+") do
  if not sections[part] then parser:error("there is no section '" .. part .. "'") end
end
for _, name in ipairs { "state", "moved", "speed", "sim", "exact" } do
  if wanted(name) and not (name == "moved" and not bound.available() and args.only) then
    print(name)
    local t = ps.now()
    sections[name]()
    say("  (%.0f s)", ps.now() - t)
  end
end
print(cjson.encode(result))
