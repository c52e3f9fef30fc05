-- SPDX-License-Identifier: BSD-3-Clause
-- The keys of learning-rate schedules. This file is a part of schema.lua and has the same form.
jit.off(true, true)                    -- compiled traces would keep this file in memory after it is unloaded
local schedules = require "ps.config.schedules"
local H, SCHED = "honoured", "lua/ps/optim/sched.lua"

---@param T table ps.core.types
---@param one_of fun(names: string[], why: string): fun(value: string): string?
---@return table[] sections
return function(T, one_of)
  -- Rows that several of Hugging Face's schedules share.
  local warmup = { "num_warmup_steps", T.integer(0), 0, H, "number of warm-up steps, from 0 to the optimizer's rate" }
  local total = { "num_training_steps", T.integer(1), nil, H, "number of steps until the end of the "
    .. "schedule", required = true }
  local first = { "last_epoch", T.integer(-1, 1000000), -1, H, "number of earlier steps minus 1, so that -1 is the "
    .. "start" }
  local cycles = { "num_cycles", T.number(0, 1e6), 0.5, H, "number of waves of the cosine; 0.5 is from the maximum to "
    .. "0" }
  local least = { "min_lr", T.fp32, nil, H, "rate at the end; either min_lr or min_lr_rate is required" }
  local least_share = { "min_lr_rate", T.ratio, nil, H, "rate at the end as a share of the optimizer's rate" }

  return {
    { "scheduler", "Without this section, the rate is constant. With several groups, WarmupLR, WarmupDecayLR, OneCycle "
      .. "and LRRangeTest set one rate for all groups, and WarmupCosineLR multiplies each group's own rate, as in "
      .. "DeepSpeed. Hugging Face's schedules, OneCycleLR and LambdaLR compute each group's rate from the group's "
      .. "initial rate. The other schedules set the optimizer's rate, and each group keeps its ratio to that rate. "
      .. "They refuse groups with different rates if optimizer.params.lr is absent.", optional = true, {
      { "type", T.string, nil, H, "DeepSpeed's, Hugging Face's (lr_scheduler_type) and two of PyTorch's, with their "
        .. "formulas, or warmup_cosine, warmup_linear, constant of ps.sched",
        required = true, check = one_of(schedules, "the schedules are "), acts = SCHED },
    } },
    { "scheduler.params", "", of = "WarmupLR", acts = SCHED, {
      { "warmup_min_lr", T.fp32, 0, H, "rate at the start" },
      { "warmup_max_lr", T.fp32, nil, H, "rate after the warm-up (default: the optimizer's rate)" },
      { "warmup_num_steps", T.integer(0), 1000, H, "number of warm-up steps, at least 2" },
      { "warmup_type", T.enum("log|linear"), "log", H, "curve along which the rate rises" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "iteration at which the schedule begins; -1 is the "
        .. "start" },
    } },
    { "scheduler.params", "", of = "WarmupDecayLR", acts = SCHED, {
      { "total_num_steps", T.integer(1), nil, H, "number of steps until the rate is back at "
        .. "warmup_min_lr", required = true },
      { "warmup_min_lr", T.fp32, 0, H, "rate at the start and at the end" },
      { "warmup_max_lr", T.fp32, 1e-3, H, "rate after the warm-up" },
      { "warmup_num_steps", T.integer(0), 1000, H, "number of warm-up steps, at least 2" },
      { "warmup_type", T.enum("log|linear"), "log", H, "curve along which the rate rises" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "iteration at which the schedule begins; -1 is the "
        .. "start" },
    } },
    { "scheduler.params", "The schedule consists of shares of the optimizer's rate.", of =
      "WarmupCosineLR", acts = SCHED, {
      { "total_num_steps", T.integer(1), nil, H, "number of steps until cos_min_ratio is reached", required = true },
      { "warmup_min_ratio", T.ratio, 0, H, "share of the optimizer's rate at the start" },
      { "warmup_num_steps", T.integer(0), 1000, H, "number of warm-up steps, at least 2" },
      { "cos_min_ratio", T.ratio, 1e-4, H, "share of the optimizer's rate at the end" },
      { "warmup_type", T.enum("log|linear"), "log", H, "curve along which the rate rises" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "iteration at which the schedule begins; -1 is the "
        .. "start" },
    } },
    { "scheduler.params", "", of = "OneCycle", acts = SCHED, {
      { "cycle_min_lr", T.fp32, nil, H, "rate at both ends of the cycle", required = true },
      { "cycle_max_lr", T.fp32, nil, H, "rate in the middle of the cycle", required = true },
      { "decay_lr_rate", T.fp32, 0, H, "decay after the cycle, in which the rate is min / (1 + decay_lr_rate x "
        .. "intervals)" },
      { "cycle_first_step_size", T.integer(1), 2000, H, "number of steps in which the rate rises" },
      { "cycle_second_step_size", T.integer(1), nil, H, "number of steps in which the rate falls (default: "
        .. "cycle_first_step_size)" },
      { "cycle_first_stair_count", T.integer(0), 0, H, "number of stairs while the rate rises, or 0 for none" },
      { "cycle_second_stair_count", T.integer(0), nil, H, "number of stairs while the rate falls (default: "
        .. "cycle_first_stair_count)" },
      { "decay_step_size", T.integer(0), 0, H, "number of steps per decay interval, or 0 for no decay" },
      { "cycle_momentum", T.boolean, true, H, "whether beta1 cycles in the opposite direction and beta2 is 0.99, as in "
        .. "DeepSpeed" },
      { "cycle_min_mom", T.ratio, 0.8, H, "beta1 in the middle of the cycle" },
      { "cycle_max_mom", T.ratio, 0.9, H, "beta1 at both ends of the cycle" },
      { "decay_mom_rate", T.fp32, 0, H, "growth after the cycle, in which beta1 is max x (1 + decay_mom_rate x "
        .. "intervals)" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "iteration at which the schedule begins; -1 is the "
        .. "start" },
    } },
    { "scheduler.params", "", of = "LRRangeTest", acts = SCHED, {
      { "lr_range_test_min_lr", T.fp32, 1e-3, H, "rate at the start" },
      { "lr_range_test_step_size", T.integer(1), 2000, H, "number of steps per interval" },
      { "lr_range_test_step_rate", T.fp32, 1.0, H, "growth per interval, as a multiple of the initial rate" },
      { "lr_range_test_staircase", T.boolean, false, H, "whether the rate grows only at the end of an interval" },
      { "last_batch_iteration", T.integer(-1, 1000000), -1, H, "iteration at which the schedule begins; -1 is the "
        .. "start" },
    } },
    { "scheduler.params", "The rate falls along half a cosine to a minimum.", of = "warmup_cosine", acts = SCHED, {
      { "max_lr", T.fp32, nil, H, "rate after the warm-up (default: the optimizer's rate)" },
      { "min_lr", T.fp32, 0, H, "rate from step `total` on" },
      { "warmup", T.integer(0), 0, H, "number of warm-up steps" },
      { "total", T.integer(1), nil, H, "number of steps until min_lr is reached", required = true },
    } },
    { "scheduler.params", "", of = "warmup_linear", acts = SCHED, {
      { "max_lr", T.fp32, nil, H, "rate after the warm-up (default: the optimizer's rate)" },
      { "min_lr", T.fp32, 0, H, "rate from step `total` on" },
      { "warmup", T.integer(0), 0, H, "number of warm-up steps" },
      { "total", T.integer(1), nil, H, "number of steps until min_lr is reached", required = true },
    } },
    { "scheduler.params", "", of = "constant", acts = SCHED, {
      { "max_lr", T.fp32, nil, H, "rate after the warm-up (default: the optimizer's rate)" },
      { "warmup", T.integer(0), 0, H, "number of warm-up steps" },
    } },
    { "scheduler.params", "", of = "linear", acts = SCHED, { warmup, total, first } },
    { "scheduler.params", "", of = "cosine", acts = SCHED, { warmup, total, cycles, first } },
    { "scheduler.params", "", of = "cosine_with_restarts", acts = SCHED, { warmup, total,
      { "num_cycles", T.number(0, 1e6), 1, H, "number of times that the rate falls to 0" }, first } },
    { "scheduler.params", "", of = "polynomial", acts = SCHED, { warmup, total,
      { "lr_end", T.fp32, 1e-7, H, "rate at the end" },
      { "power", T.number(0, 1000), 1, H, "power to which the remaining share of the steps is raised" }, first } },
    { "scheduler.params", "", of = "constant_with_warmup", acts = SCHED, { warmup, first } },
    { "scheduler.params", "", of = "inverse_sqrt", acts = SCHED, { warmup,
      { "timescale", T.integer(1), nil, H, "the rate has fallen to half at 3 times as many steps after the warm-up "
        .. "(default: num_warmup_steps, or 10,000 without warm-up)" }, first } },
    { "scheduler.params", "", of = "cosine_with_min_lr", acts = SCHED, { warmup, total, cycles, least, least_share,
      first } },
    { "scheduler.params", "", of = "cosine_warmup_with_min_lr", acts = SCHED, { warmup, total, cycles, least,
      least_share, { "warmup_lr_rate", T.ratio, nil, H, "the first share of the optimizer's rate (default "
        .. "1 / num_warmup_steps)" }, first } },
    { "scheduler.params", "", of = "warmup_stable_decay", acts = SCHED, { warmup,
      { "num_decay_steps", T.integer(0), nil, H, "number of steps in the last phase", required = true },
      { "num_training_steps", T.integer(1), nil, H, "number of steps in all three phases; either this or "
        .. "num_stable_steps is required" },
      { "num_stable_steps", T.integer(0), nil, H, "number of steps between the warm-up and the last phase" },
      { "warmup_type", T.enum "linear|cosine|1-sqrt", "linear", H, "curve along which the rate rises" },
      { "decay_type", T.enum "linear|cosine|1-sqrt", "cosine", H, "curve along which the rate falls" },
      { "min_lr_ratio", T.ratio, 0, H, "share of the optimizer's rate at the start and at the end" }, cycles, first } },
    { "scheduler.params", "The rate falls if evaluations do not improve. ps.train.run passes the held-out loss; "
      .. "another loop calls ps.engine().scheduler:step(value).", of = "reduce_lr_on_plateau", acts = SCHED, {
      { "mode", T.enum "min|max", "min", H, "whether smaller or larger values are better" },
      { "factor", T.ratio, 0.1, H, "factor on the rate, less than 1" },
      { "patience", T.integer(0), 10, H, "number of evaluations without an improvement before the rate falls" },
      { "threshold", T.number(0), 1e-4, H, "smallest change that counts as an improvement" },
      { "threshold_mode", T.enum "rel|abs", "rel", H, "whether the threshold is a share of the best value" },
      { "cooldown", T.integer(0), 0, H, "number of evaluations that do not count after the rate has fallen" },
      { "min_lr", T.fp32, 0, H, "the smallest rate" },
      { "eps", T.fp32, 1e-8, H, "smallest change of the rate that is made" },
    } },
    { "scheduler.params", "", of = "OneCycleLR", acts = SCHED, {
      { "max_lr", T.fp32, nil, H, "the highest rate", required = true },
      { "total_steps", T.integer(1), nil, H, "number of steps; either this, or epochs and steps_per_epoch are "
        .. "required" },
      { "epochs", T.integer(1), nil, H, "number of epochs of the cycle" },
      { "steps_per_epoch", T.integer(1), nil, H, "number of steps per epoch" },
      { "pct_start", T.ratio, 0.3, H, "share of the steps in which the rate rises" },
      { "anneal_strategy", T.enum "cos|linear", "cos", H, "curve along which the rate rises and falls" },
      { "cycle_momentum", T.boolean, true, H, "whether beta1, or the momentum of SGD, RMSprop and Muon, moves in the "
        .. "opposite direction" },
      { "base_momentum", T.below_one, 0.85, H, "beta1, or momentum, at the highest rate" },
      { "max_momentum", T.below_one, 0.95, H, "beta1, or momentum, at both ends of the cycle" },
      { "div_factor", T.above_zero, 25, H, "max_lr divided by the first rate" },
      { "final_div_factor", T.above_zero, 1e4, H, "the first rate divided by the last rate" },
      { "three_phase", T.boolean, false, H, "whether the rate first falls to the first rate as fast as it rose, and "
        .. "then to the last rate" },
      first,
    } },
    { "scheduler.params", "Only a configuration in Lua can contain a function.", of = "LambdaLR", acts = SCHED, {
      { "lr_lambda", T.callable, nil, H, "a function from the step (from 0) to the factor on each group's rate, or a "
        .. "list with one function for each group", required = true }, first } },
  }
end
