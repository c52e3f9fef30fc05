-- SPDX-License-Identifier: BSD-3-Clause
-- Resolves the batch sizes. train_batch_size is the product of train_micro_batch_size_per_gpu,
-- gradient_accumulation_steps and the number of data-parallel processes. If a size is missing, it is computed from the
-- sizes that are given.
-- Processes that share a model's stages or layers get the same rows.
local hooks = require "ps.core.hooks"
local types = require "ps.core.types"

local batch = {}

local TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

--- Returns the number of data-parallel groups. Each group has its own rows of a batch.
---@param state ps.config.State
---@param cfg ps.Config
---@param world? integer number of processes; nil means the processes of one model replica
---@return integer
function batch.data_parallel(state, cfg, world)
  local stages, parts = cfg.pipeline.stages, cfg.tensor_parallel.size
  local ranks = stages * parts
  local dp = (world or ranks) / ranks
  if dp % 1 ~= 0 then
    state:fail("%s x %s is %d x %d = %d, which does not divide the number of processes, %d; %s",
      state:shown "pipeline.stages", state:shown "tensor_parallel.size", stages, parts, ranks, world,
      hooks.ask("ranks_wanted",
        ranks) or ("start a multiple of %d: psluajit tools/launch.lua --nproc-per-node %d SCRIPT, which "
      .. "calls ps.init_distributed() before ps.initialize"):format(ranks, ranks))
  end
  return dp
end

---@param state ps.config.State
---@param cfg ps.Config
---@param dp integer number of data-parallel processes
function batch.resolve(state, cfg, dp)
  local total, micro, steps = cfg[TOTAL], cfg[MICRO], cfg[STEPS]
  cfg.counts_micro_batches = steps ~= nil or total ~= nil and micro ~= nil
  if not total and not micro then
    cfg[STEPS] = steps or 1
    return
  end
  if not total then
    steps = steps or 1
    total = micro * steps * dp
  elseif micro then
    steps = steps or math.floor(math.floor(total / micro) / dp)
  else
    steps = steps or 1
    micro = math.floor(math.floor(total / dp) / steps)
  end
  if total <= 0 or micro <= 0 or steps <= 0 or total ~= micro * steps * dp then
    state:fail("batch sizes do not agree: %s %d is not %s %d x %s %d x %d data-parallel process%s (= %d)%s", TOTAL,
      total, MICRO, micro, STEPS, steps, dp, dp == 1 and "" or "es", micro * steps * dp,
      (cfg[MICRO] and cfg[STEPS]) and "" or "; missing sizes were computed, rounding down")
  end
  if steps > types.MICRO_BATCHES then
    state:fail("%s would be %.17g, from %s and %s; a step has at most %d micro-batches", STEPS, steps, TOTAL, MICRO,
      types.MICRO_BATCHES)
  end
  if total > types.MOST then
    state:fail("%s x %s x processes is %.17g samples per step; the limit is %.0f", MICRO, STEPS, total,
      types.MOST)
  end
  cfg[TOTAL], cfg[MICRO], cfg[STEPS] = total, micro, steps
end

return batch
