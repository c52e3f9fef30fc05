-- SPDX-License-Identifier: BSD-3-Clause
-- The schedules of Hugging Face's Trainer. Their names are the values of the Trainer's option lr_scheduler_type. Each
-- schedule multiplies every group's initial rate by a factor that depends on the step. The factors are those of
-- transformers 5 (optimization.py).
local caller = require "ps.core.caller"
local schedule = require "ps.optim.schedule"
local error = caller.error
local checked, per_group, order = schedule.checked, schedule.per_group, schedule.order

local hugging_face = {}

local STEPS = "num_warmup_steps num_training_steps "
order.constant_with_warmup = "num_warmup_steps last_epoch"
order.linear = STEPS .. "last_epoch"
order.cosine = STEPS .. "num_cycles last_epoch"
order.cosine_with_restarts = STEPS .. "num_cycles last_epoch"
order.polynomial = STEPS .. "lr_end power last_epoch"
order.inverse_sqrt = "num_warmup_steps timescale last_epoch"
order.cosine_with_min_lr = STEPS .. "num_cycles last_epoch min_lr min_lr_rate"
order.cosine_warmup_with_min_lr = STEPS .. "num_cycles last_epoch min_lr min_lr_rate warmup_lr_rate"
order.warmup_stable_decay = "num_warmup_steps num_decay_steps num_training_steps num_stable_steps warmup_type "
  .. "decay_type min_lr_ratio num_cycles last_epoch"
order.reduce_lr_on_plateau = order.ReduceLROnPlateau

local function keys_of(more)
  local keys = { optimizer = "table", num_warmup_steps = "whole", last_epoch = "number" }
  for key, kind in pairs(more) do keys[key] = kind end
  return keys
end
local TO_END = keys_of { num_training_steps = "whole" }

-- Checks the options of a call. Returns the options, the number of warm-up steps, and the number of all steps.
local function steps_of(name, keys, required, options, ...)
  options = checked(name, keys, required, options, ...)
  local what = "sched." .. name .. ": "
  local warmup = caller.whole(options.num_warmup_steps or 0, what .. "num_warmup_steps", 0)
  local total = options.num_training_steps
  if total and warmup > caller.whole(total, what .. "num_training_steps", 1) then
    error(("%snum_warmup_steps is %d; it must be at most num_training_steps, which is %d"):format(
      what, warmup, total))
  end
  return options, warmup, total
end

-- Returns the factor during the warm-up, or nil after the warm-up.
local function warming(count, warmup) if count < warmup then return count / warmup end end

-- Returns the progress after the warm-up: 0 at the end of the warm-up, 1 at step `total`, and more than 1 after it.
local function progress(count, warmup, total) return (count - warmup) / math.max(1, total - warmup) end

local function cosine(cycles, done) return 0.5 * (1 + math.cos(math.pi * cycles * 2 * done)) end

local function by_factor(name, options, factor, total)
  return per_group(name, options, function(count, base) return base * factor(count) end, { total = total })
end

--- Returns a schedule in which the rate rises from 0 to each group's initial rate during num_warmup_steps steps. Then
--- the rate stays constant.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, last_epoch?: integer}
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.constant_with_warmup(options, ...)
  local warmup
  options, warmup = steps_of("constant_with_warmup", keys_of {}, "", options, ...)
  return by_factor("constant_with_warmup", options, function(count) return warming(count, warmup) or 1 end)
end

--- Returns a schedule in which the rate rises from 0 to each group's initial rate during num_warmup_steps steps. Then
--- the rate falls linearly and reaches 0 at step num_training_steps.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, num_training_steps: integer,
--- last_epoch?: integer}
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.linear(options, ...)
  local warmup, total
  options, warmup, total = steps_of("linear", TO_END, "num_training_steps", options, ...)
  return by_factor("linear", options, function(count)
    return warming(count, warmup) or math.max(0, (total - count) / math.max(1, total - warmup))
  end, total)
end

local CYCLES = keys_of { num_training_steps = "whole", num_cycles = "number" }

--- Returns a schedule in which the rate rises from 0 to each group's initial rate during num_warmup_steps steps. Then
--- the rate follows num_cycles periods of a cosine until step num_training_steps. The default, 0.5, is half a period
--- from the initial rate to 0.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, num_training_steps: integer,
--- num_cycles?: number, last_epoch?: integer}
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.cosine(options, ...)
  local warmup, total
  options, warmup, total = steps_of("cosine", CYCLES, "num_training_steps", options, ...)
  local cycles = options.num_cycles or 0.5
  return by_factor("cosine", options, function(count)
    return warming(count, warmup) or math.max(0, cosine(cycles, progress(count, warmup, total)))
  end, total)
end

--- Returns a schedule like `cosine`, but with num_cycles cycles (default 1). Each cycle begins at each group's initial
--- rate, and the rate falls to 0.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, num_training_steps: integer,
--- num_cycles?: number, last_epoch?: integer}
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.cosine_with_restarts(options, ...)
  local warmup, total
  options, warmup, total = steps_of("cosine_with_restarts", CYCLES, "num_training_steps", options, ...)
  local cycles = options.num_cycles or 1
  return by_factor("cosine_with_restarts", options, function(count)
    if count < warmup then return count / warmup end
    local done = progress(count, warmup, total)
    return done >= 1 and 0 or math.max(0, cosine(0.5, cycles * done % 1))
  end, total)
end

local POLYNOMIAL = keys_of { num_training_steps = "whole", lr_end = "number", power = "number" }

--- Returns a schedule in which the rate rises from 0 to each group's initial rate during num_warmup_steps steps. Then
--- the rate falls to lr_end (default 1e-7), which it reaches at step num_training_steps. The difference between the
--- rate and lr_end is proportional to a power (default 1) of the number of remaining steps. lr_end is the last rate of
--- a group whose initial rate is the optimizer's own rate. The last rate of every group is the same fraction of the
--- group's initial rate.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, num_training_steps: integer,
--- lr_end?: number, power?: number, last_epoch?: integer}
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.polynomial(options, ...)
  local warmup, total
  options, warmup, total = steps_of("polynomial", POLYNOMIAL, "num_training_steps", options, ...)
  local last, power = options.lr_end or 1e-7, options.power or 1
  local first = schedule.own_rate("polynomial", options, "an lr to the optimizer, of which lr_end is a part")
  if first <= last then
    error(("sched.polynomial: lr_end is %.6g; it must be less than the optimizer's rate, %.6g"):format(last, first))
  end
  return by_factor("polynomial", options, function(count)
    if count < warmup then return count / warmup end
    if count >= total then return last / first end
    return ((first - last) * (1 - (count - warmup) / (total - warmup)) ^ power + last) / first
  end, total)
end

local INVERSE = keys_of { timescale = "whole" }

--- Returns a schedule in which the rate rises from 0 to each group's initial rate during num_warmup_steps steps. Then
--- the rate is the initial rate times sqrt(timescale / (step - num_warmup_steps + timescale)). At step num_warmup_steps
--- + 3 * timescale, it is half of the initial rate. timescale defaults to num_warmup_steps, or to 10,000 if
--- num_warmup_steps is 0.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, timescale?: integer, last_epoch?:
--- integer}
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.inverse_sqrt(options, ...)
  local warmup
  options, warmup = steps_of("inverse_sqrt", INVERSE, "", options, ...)
  local scale = caller.whole(options.timescale or warmup > 0 and warmup or 10000, "sched.inverse_sqrt: timescale", 1)
  return by_factor("inverse_sqrt", options, function(count)
    return warming(count, warmup) or 1 / math.sqrt((count + scale - warmup) / scale)
  end)
end

-- Returns the smallest factor, which the option min_lr or min_lr_rate sets.
local function least_of(name, options)
  if (options.min_lr ~= nil) == (options.min_lr_rate ~= nil) then
    error(("sched.%s needs min_lr or min_lr_rate, and not both"):format(name))
  end
  if options.min_lr_rate then return options.min_lr_rate end
  return options.min_lr / schedule.own_rate(name, options, "min_lr_rate instead of min_lr")
end

local LEAST = keys_of { num_training_steps = "whole", num_cycles = "number", min_lr = "number", min_lr_rate = "number" }

--- Returns a schedule like `cosine`, except that the rate falls to min_lr. If min_lr_rate is given, the rate falls to
--- this fraction of each group's initial rate.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, num_training_steps: integer,
--- num_cycles?: number, min_lr?: number, min_lr_rate?: number, last_epoch?: integer}
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.cosine_with_min_lr(options, ...)
  local warmup, total
  options, warmup, total = steps_of("cosine_with_min_lr", LEAST, "num_training_steps", options, ...)
  local cycles, least = options.num_cycles or 0.5, least_of("cosine_with_min_lr", options)
  return by_factor("cosine_with_min_lr", options, function(count)
    return warming(count, warmup)
      or math.max(0, cosine(cycles, progress(count, warmup, total)) * (1 - least) + least)
  end, total)
end

local WARM_LEAST = keys_of { num_training_steps = "whole", num_cycles = "number", min_lr = "number",
  min_lr_rate = "number", warmup_lr_rate = "number" }

--- Returns a schedule like `cosine_with_min_lr`, except that step n has the rate that `cosine_with_min_lr` has at step
--- n + 1. The first rate is therefore not 0. The warm-up begins at the fraction warmup_lr_rate of the initial rate
--- (default 1 / num_warmup_steps).
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, num_training_steps: integer,
--- num_cycles?: number, min_lr?: number, min_lr_rate?: number, warmup_lr_rate?: number, last_epoch?: integer}
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.cosine_warmup_with_min_lr(options, ...)
  local warmup, total
  options, warmup, total = steps_of("cosine_warmup_with_min_lr", WARM_LEAST, "num_training_steps", options, ...)
  local cycles, least = options.num_cycles or 0.5, least_of("cosine_warmup_with_min_lr", options)
  local first = options.warmup_lr_rate
  return by_factor("cosine_warmup_with_min_lr", options, function(count)
    if count < warmup and not first then return (count + 1) / warmup end
    if count < warmup then return first + (1 - first) * count / math.max(1, warmup - 1) end
    return math.max(0, cosine(cycles, progress(count + 1, warmup, total)) * (1 - least) + least)
  end, total)
end

local STABLE = keys_of { num_training_steps = "whole", num_decay_steps = "whole", num_stable_steps = "whole",
  warmup_type = "string", decay_type = "string", min_lr_ratio = "number", num_cycles = "number" }
-- Functions for warmup_type and decay_type. Each function maps the completed fraction of a phase to a factor.
local RISE = { linear = function(done) return done end, cosine = function(done) return 1 - cosine(0.5, done) end,
  ["1-sqrt"] = function(done) return 1 - math.sqrt(1 - done) end }
local FALL = { linear = function(done) return 1 - done end, cosine = function(done, cycles) return cosine(cycles, done)
  end, ["1-sqrt"] = function(done) return 1 - math.sqrt(done) end }

--- Returns a schedule with three phases. First, the rate rises to each group's initial rate during num_warmup_steps
--- steps. It starts at the fraction min_lr_ratio (default 0) of the initial rate. Then it stays constant for
--- num_stable_steps steps. Last, it falls back to the starting rate during num_decay_steps steps. Instead of
--- num_stable_steps, num_training_steps can be given. It is the sum of the numbers of steps in the three phases.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, num_warmup_steps?: integer, num_decay_steps: integer,
--- num_training_steps?: integer, num_stable_steps?: integer, warmup_type?: "linear"|"cosine"|"1-sqrt", decay_type?:
--- "linear"|"cosine"|"1-sqrt", min_lr_ratio?: number, num_cycles?: number, last_epoch?: integer} warmup_type: default
--- "linear". decay_type: default "cosine". min_lr_ratio: default 0. num_cycles: default 0.5
---@param ... any the other options in the order of transformers, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.warmup_stable_decay(options, ...)
  local warmup, total
  local name = "warmup_stable_decay"
  options, warmup, total = steps_of(name, STABLE, "num_decay_steps", options, ...)
  local what = "sched.warmup_stable_decay: "
  local decay = caller.whole(options.num_decay_steps, what .. "num_decay_steps", 0)
  local stable = options.num_stable_steps
  if not stable and not total then error "sched.warmup_stable_decay needs num_training_steps or num_stable_steps" end
  if total and (stable and warmup + stable + decay ~= total or warmup + decay > total) then
    error(("%snum_warmup_steps %d%s and num_decay_steps %d are %d steps, and num_training_steps is %d; the sums must "
      .. "agree"):format(what, warmup, stable and (", num_stable_steps %d"):format(stable) or "", decay,
      warmup + (stable or 0) + decay, total))
  end
  stable = caller.whole(stable or total - warmup - decay, what .. "num_stable_steps", 0)
  local rise = caller.one_of(options.warmup_type or "linear", RISE, what .. "warmup_type")
  local fall = caller.one_of(options.decay_type or "cosine", FALL, what .. "decay_type")
  local least, cycles = options.min_lr_ratio or 0, options.num_cycles or 0.5
  return by_factor(name, options, function(count)
    if count < warmup then return math.max(0, rise(count / warmup) * (1 - least) + least) end
    if count < warmup + stable then return 1 end
    if count >= warmup + stable + decay then return least end
    return math.max(0, fall((count - warmup - stable) / decay, cycles) * (1 - least) + least)
  end, warmup + stable + decay)
end

--- Returns PyTorch's ReduceLROnPlateau, under the name that the Trainer uses.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, mode?: "min"|"max", factor?: number, patience?: integer,
---  threshold?: number, threshold_mode?: "rel"|"abs", cooldown?: integer, min_lr?: number|number[], eps?: number}
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function hugging_face.reduce_lr_on_plateau(options, ...)
  return schedule.plateau("reduce_lr_on_plateau", options, ...)
end

return hugging_face
