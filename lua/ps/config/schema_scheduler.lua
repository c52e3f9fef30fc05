-- SPDX-License-Identifier: BSD-3-Clause
-- Keys of learning-rate schedules: a part of schema.lua, in its form.
jit.off(true, true)                    -- compiled traces would keep this file in memory after it is unloaded
local schedules = require "ps.config.schedules"
local H, SCHED = "honoured", "lua/ps/optim/sched.lua"

---@param T table ps.core.types
---@param one_of fun(names: string[], why: string): fun(value: string): string?
---@return table[] sections
return function(T, one_of)
  -- rows that several of Hugging Face's schedules share
  local warmup = { "num_warmup_steps", T.integer(0), 0, H, "steps of warm-up, from 0 to the optimizer's rate" }
  local total = { "num_training_steps", T.integer(1), nil, H, "steps until the end of the schedule", required = true }
  local first = { "last_epoch", T.integer(-1, 1000000), -1, H, "steps done before, minus 1; -1: the start" }
  local cycles = { "num_cycles", T.number(0, 1e6), 0.5, H, "waves of the cosine; 0.5: from the top to 0" }
  local least = { "min_lr", T.fp32, nil, H, "rate at the end; one of it and min_lr_rate is needed" }
  local least_share = { "min_lr_rate", T.ratio, nil, H, "the same as a share of the optimizer's rate" }

  return {
    { "scheduler", "Absent: the rate stays constant. With several groups WarmupLR, WarmupDecayLR, "
      .. "OneCycle and LRRangeTest set one rate for all groups, and WarmupCosineLR multiplies each group's own, as in "
      .. "DeepSpeed. Hugging Face's, OneCycleLR and LambdaLR compute each group's rate from its own. The other "
      .. "schedules set the optimizer's rate, and each group keeps its ratio to it; they refuse groups of different "
      .. "rates if optimizer.params.lr is absent.", optional = true, {
      { "type", T.string, nil, H, "DeepSpeed's, Hugging Face's (lr_scheduler_type) and two of PyTorch's, with their "
        .. "formulas, or warmup_cosine, warmup_linear, constant of ps.sched",
        required = true, check = one_of(schedules, "the schedules are "), acts = SCHED },
    } },
    { "scheduler.params", "", of = "WarmupLR", acts = SCHED, {
      { "warmup_min_lr", T.fp32, 0, H, "rate at the start" },
      { "warmup_max_lr", T.fp32, nil, H, "rate after warm-up; absent: the optimizer's" },
      { "warmup_num_steps", T.integer(0), 1000, H, "steps of warm-up, at least 2" },
      { "warmup_type", T.enum("log|linear"), "log", H, "how the rate rises" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "the first iteration; -1: the start" },
    } },
    { "scheduler.params", "", of = "WarmupDecayLR", acts = SCHED, {
      { "total_num_steps", T.integer(1), nil, H, "steps until the rate is back at warmup_min_lr", required = true },
      { "warmup_min_lr", T.fp32, 0, H, "rate at the start and at the end" },
      { "warmup_max_lr", T.fp32, 1e-3, H, "rate after warm-up" },
      { "warmup_num_steps", T.integer(0), 1000, H, "steps of warm-up, at least 2" },
      { "warmup_type", T.enum("log|linear"), "log", H, "how the rate rises" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "the first iteration; -1: the start" },
    } },
    { "scheduler.params", "Shares of the optimizer's rate.", of = "WarmupCosineLR", acts = SCHED, {
      { "total_num_steps", T.integer(1), nil, H, "steps until cos_min_ratio", required = true },
      { "warmup_min_ratio", T.ratio, 0, H, "share at the start" },
      { "warmup_num_steps", T.integer(0), 1000, H, "steps of warm-up, at least 2" },
      { "cos_min_ratio", T.ratio, 1e-4, H, "share at the end" },
      { "warmup_type", T.enum("log|linear"), "log", H, "how the rate rises" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "the first iteration; -1: the start" },
    } },
    { "scheduler.params", "", of = "OneCycle", acts = SCHED, {
      { "cycle_min_lr", T.fp32, nil, H, "rate at both ends of the cycle", required = true },
      { "cycle_max_lr", T.fp32, nil, H, "rate in the middle of the cycle", required = true },
      { "decay_lr_rate", T.fp32, 0, H, "after the cycle: min / (1 + rate x intervals)" },
      { "cycle_first_step_size", T.integer(1), 2000, H, "steps up" },
      { "cycle_second_step_size", T.integer(1), nil, H, "steps down; absent: the same number" },
      { "cycle_first_stair_count", T.integer(0), 0, H, "stairs on the way up; 0: none" },
      { "cycle_second_stair_count", T.integer(0), nil, H, "stairs on the way down; absent: the same number" },
      { "decay_step_size", T.integer(0), 0, H, "steps of a decay interval; 0: no decay" },
      { "cycle_momentum", T.boolean, true, H, "beta1 cycles in the opposite direction, and beta2 becomes 0.99, as in "
        .. "DeepSpeed" },
      { "cycle_min_mom", T.ratio, 0.8, H, "beta1 in the middle" },
      { "cycle_max_mom", T.ratio, 0.9, H, "beta1 at both ends" },
      { "decay_mom_rate", T.fp32, 0, H, "after the cycle: max x (1 + rate x intervals)" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "the first iteration; -1: the start" },
    } },
    { "scheduler.params", "", of = "LRRangeTest", acts = SCHED, {
      { "lr_range_test_min_lr", T.fp32, 1e-3, H, "rate at the start" },
      { "lr_range_test_step_size", T.integer(1), 2000, H, "steps of an interval" },
      { "lr_range_test_step_rate", T.fp32, 1.0, H, "growth per interval, in starting rates" },
      { "lr_range_test_staircase", T.boolean, false, H, "grow at the end of intervals only" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "the first iteration; -1: the start" },
    } },
    { "scheduler.params", "Half a cosine down to a minimum rate.", of = "warmup_cosine", acts = SCHED, {
      { "max_lr", T.fp32, nil, H, "rate after warm-up; absent: the optimizer's" },
      { "min_lr", T.fp32, 0, H, "rate from step `total` on" },
      { "warmup", T.integer(0), 0, H, "steps of warm-up" },
      { "total", T.integer(1), nil, H, "steps until min_lr", required = true },
    } },
    { "scheduler.params", "", of = "warmup_linear", acts = SCHED, {
      { "max_lr", T.fp32, nil, H, "rate after warm-up; absent: the optimizer's" },
      { "min_lr", T.fp32, 0, H, "rate from step `total` on" },
      { "warmup", T.integer(0), 0, H, "steps of warm-up" },
      { "total", T.integer(1), nil, H, "steps until min_lr", required = true },
    } },
    { "scheduler.params", "", of = "constant", acts = SCHED, {
      { "max_lr", T.fp32, nil, H, "rate after warm-up; absent: the optimizer's" },
      { "warmup", T.integer(0), 0, H, "steps of warm-up" },
    } },
    { "scheduler.params", "", of = "linear", acts = SCHED, { warmup, total, first } },
    { "scheduler.params", "", of = "cosine", acts = SCHED, { warmup, total, cycles, first } },
    { "scheduler.params", "", of = "cosine_with_restarts", acts = SCHED, { warmup, total,
      { "num_cycles", T.number(0, 1e6), 1, H, "times that the rate falls to 0" }, first } },
    { "scheduler.params", "", of = "polynomial", acts = SCHED, { warmup, total,
      { "lr_end", T.fp32, 1e-7, H, "rate at the end" },
      { "power", T.number(0, 1000), 1, H, "power of the remaining share of the steps" }, first } },
    { "scheduler.params", "", of = "constant_with_warmup", acts = SCHED, { warmup, first } },
    { "scheduler.params", "", of = "inverse_sqrt", acts = SCHED, { warmup,
      { "timescale", T.integer(1), nil, H, "3 times as many steps after the warm-up the rate is half; absent: "
        .. "num_warmup_steps, or 10,000 without warm-up" }, first } },
    { "scheduler.params", "", of = "cosine_with_min_lr", acts = SCHED, { warmup, total, cycles, least, least_share,
      first } },
    { "scheduler.params", "", of = "cosine_warmup_with_min_lr", acts = SCHED, { warmup, total, cycles, least,
      least_share, { "warmup_lr_rate", T.ratio, nil, H, "the first share of the optimizer's rate; absent: "
        .. "1 / num_warmup_steps" }, first } },
    { "scheduler.params", "", of = "warmup_stable_decay", acts = SCHED, { warmup,
      { "num_decay_steps", T.integer(0), nil, H, "steps of the last phase", required = true },
      { "num_training_steps", T.integer(1), nil, H, "steps of all three phases; it or num_stable_steps is needed" },
      { "num_stable_steps", T.integer(0), nil, H, "steps between the warm-up and the last phase" },
      { "warmup_type", T.enum "linear|cosine|1-sqrt", "linear", H, "how the rate rises" },
      { "decay_type", T.enum "linear|cosine|1-sqrt", "cosine", H, "how the rate falls" },
      { "min_lr_ratio", T.ratio, 0, H, "share of the optimizer's rate at the start and at the end" }, cycles, first } },
    { "scheduler.params", "The rate falls when evaluations get no better. ps.train.run passes the held-out loss; "
      .. "another loop calls ps.engine().scheduler:step(value).", of = "reduce_lr_on_plateau", acts = SCHED, {
      { "mode", T.enum "min|max", "min", H, "whether smaller or larger values are better" },
      { "factor", T.ratio, 0.1, H, "factor on the rate, less than 1" },
      { "patience", T.integer(0), 10, H, "evaluations that may get no better before the rate falls" },
      { "threshold", T.number(0), 1e-4, H, "how much better counts" },
      { "threshold_mode", T.enum "rel|abs", "rel", H, "whether the threshold is a share of the best value" },
      { "cooldown", T.integer(0), 0, H, "evaluations that do not count after the rate fell" },
      { "min_lr", T.fp32, 0, H, "the least rate" },
      { "eps", T.fp32, 1e-8, H, "smaller changes of the rate are not made" },
    } },
    { "scheduler.params", "", of = "OneCycleLR", acts = SCHED, {
      { "max_lr", T.fp32, nil, H, "the highest rate", required = true },
      { "total_steps", T.integer(1), nil, H, "steps; it, or epochs and steps_per_epoch are needed" },
      { "epochs", T.integer(1), nil, H, "epochs of the cycle" },
      { "steps_per_epoch", T.integer(1), nil, H, "steps of an epoch" },
      { "pct_start", T.ratio, 0.3, H, "share of the steps in which the rate rises" },
      { "anneal_strategy", T.enum "cos|linear", "cos", H, "the form of the rise and the fall" },
      { "cycle_momentum", T.boolean, true, H, "beta1, or SGD's momentum, goes the other way" },
      { "base_momentum", T.ratio, 0.85, H, "beta1 at the highest rate" },
      { "max_momentum", T.ratio, 0.95, H, "beta1 at both ends" },
      { "div_factor", T.above_zero, 25, H, "max_lr over the first rate" },
      { "final_div_factor", T.above_zero, 1e4, H, "the first rate over the last" },
      { "three_phase", T.boolean, false, H, "falls to the first rate as fast as it rose, and then on to the last" },
      first,
    } },
    { "scheduler.params", "A configuration in Lua may have a function.", of = "LambdaLR", acts = SCHED, {
      { "lr_lambda", T.callable, nil, H, "a function of the step (from 0): the factor on each group's rate, or a list "
        .. "with one function for each group", required = true }, first } },
  }
end
