-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/dist.lua zero [--model gpt2-medium] [--ranks 4] [--stage 3] [--tokens 64] [--steps 3] [--dtype bf16]
-- Measures the savings and costs of sharding on this machine. It trains for a few steps in one process and in N
-- processes, and prints one JSON line about both runs:
--   sent_over_theory     bytes of tensors that a rank sent in a step (mean over the ranks), divided by 3 * 2 *
--                        parameters * (N - 1) / N. The 2 is the size of a bf16 value in bytes. The 3 is for stage 3,
--                        which gathers the parameters in forward and in backward and reduces the gradients. For the
--                        other stages, the 3 is replaced by 2.
--   state_share          size of the model state in bytes (all chunks that stay) on the rank with the largest state,
--                        divided by the size in one process
--   peak_share           peak memory of the rank with the largest state, including gathered chunks and activations,
--                        divided by the peak of the run with one process
--   step_s, one_step_s   median seconds of a step with N processes and with one process
--   ranks_wait_s         the part of step_s that ranks spend waiting for other ranks
local ps = require "ps"
local inner = require("ps.nn.handle").of
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local whole = command_line.whole
local paths = require "ps.paths"

local parser = argparse("bench/dist.lua zero", "Measures the savings and costs of sharding.")
parser:option("--model", "a preset of models/gpt2.lua", "gpt2-medium")
whole(parser:option("--ranks", "processes", "4"), 1)
whole(parser:option("--stage", "zero_optimization.stage", "3"), 0)
whole(parser:option("--tokens", "tokens of a row; a rank's batch is one row", "64"), 1)
whole(parser:option("--steps", "steps that are counted", "3"), 1)
parser:option("--dtype", "bf16 or fp32", "bf16"):choices { "bf16", "fp32" }
parser:option("--out", "(for this script) the file to which rank 0 writes the figures")
local args = command_line.parse(parser)

local function rank_main()
  local group = ps.init_distributed { seed = 1, quiet = true }
  local config = { plan_print = false, zero_optimization = { stage = args.stage } }
  if args.dtype == "bf16" then config.bf16 = { enabled = true } end
  local began = ps.now()
  local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
    return require("models.gpt2").new(args.model, { dropout = 0 })
  end }
  local build_s = ps.now() - began
  local stats, tier, seconds, sent = ps.ffi.new("ps_engine_stats"), ps.ffi.new("ps_tier_info"), {}, 0
  for step = 0, args.steps do                    -- step 0 is a warm-up
    local x = ps.randint(0, model.config.vocab_size, { 1, args.tokens }, { dtype = "int32" })
    group:barrier()
    local before, start = group:bytes_sent(), ps.now()
    if step == 1 then ps.check(ps.C.ps_engine_stats_get(ps.ctx, stats)) end
    model:backward(model(x, x))
    optimizer:step()
    if step > 0 then
      seconds[step] = ps.now() - start
      sent = group:bytes_sent() - before
    end
  end
  local waited = stats.ranks_wait_s
  ps.check(ps.C.ps_engine_stats_get(ps.ctx, stats))
  ps.check(ps.C.ps_engine_tier_get(ps.ctx, 0, tier))
  table.sort(seconds)
  local mine = { tonumber(sent), tonumber(inner(model).built.state_bytes), tonumber(tier.peak),
    seconds[math.ceil(#seconds / 2)], (stats.ranks_wait_s - waited) / args.steps, build_s, inner(model).built.numel }
  local all = ps.empty({ group:size(), #mine }, { dtype = "fp64" })
  group:all_gather(all, ps.tensor(mine, { dtype = "fp64" }))
  if group:rank() == 0 then
    local f = assert(io.open(args.out, "w"))
    for _, row in ipairs(all:tolist()) do
      for i, value in ipairs(row) do row[i] = ("%.9g"):format(value) end
      f:write(table.concat(row, " "), "\n")
    end
    f:close()
  end
  model:close()
end

-- Returns figures for each rank: {sent, state, peak, step_s, wait_s, build_s, numel}.
local function run(ranks)
  local out = os.tmpname()
  local command = ("'%s' '%s/tools/launch.lua' --nproc-per-node %d '%s' --model %s --stage %d --tokens %d --steps %d "
    .. "--dtype %s --out %s 1>&2"):format(paths.exe, paths.root, ranks, paths.root .. "/bench/dist_zero.lua",
    args.model, args.stage, args.tokens, args.steps, args.dtype, out)
  if os.execute(command) ~= 0 then
    io.stderr:write("bench/dist.lua zero: the ranks failed; their output says why\n")
    os.exit(1)
  end
  local rows = {}
  for line in io.lines(out) do
    local row = {}
    for word in line:gmatch("%S+") do row[#row + 1] = tonumber(word) end
    rows[#rows + 1] = row
  end
  os.remove(out)
  return rows
end

if args.out then return rank_main() end

local function mean(rows, i)
  local sum = 0
  for _, row in ipairs(rows) do sum = sum + row[i] end
  return sum / #rows
end

local function most(rows, i)
  local value = 0
  for _, row in ipairs(rows) do value = math.max(value, row[i]) end
  return value
end

local one, all = run(1)[1], run(args.ranks)
local n, bytes = args.ranks, args.dtype == "bf16" and 2 or 4
local passes = args.stage == 3 and 3 or 2
print(("{\"bench\": \"zero\", \"model\": \"%s\", \"parameters\": %d, \"ranks\": %d, \"stage\": %d, \"dtype\": \"%s\", "
  .. "\"sent_over_theory\": %.4f, \"sent_most_over_theory\": %.4f, \"state_share\": %.4f, \"peak_share\": %.4f, "
  .. "\"state_mib\": %.1f, \"one_state_mib\": %.1f, \"peak_mib\": %.1f, \"one_peak_mib\": %.1f, \"step_s\": %.3f, "
  .. "\"one_step_s\": %.3f, \"ranks_wait_s\": %.3f, \"build_s\": %.2f}"):format(args.model, one[7], n, args.stage,
  args.dtype, mean(all, 1) / (passes * bytes * one[7] * (n - 1) / n), most(all, 1) / (passes * bytes * one[7] * (n - 1)
  / n), most(all, 2) / one[2], most(all, 3) / one[3], most(all, 2) / 2 ^ 20, one[2] / 2 ^ 20, most(all, 3) / 2 ^ 20,
  one[3] / 2 ^ 20, mean(all, 4), one[4], mean(all, 5), mean(all, 6)))
