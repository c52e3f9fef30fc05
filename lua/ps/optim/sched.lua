-- SPDX-License-Identifier: BSD-3-Clause
-- Learning-rate schedules. A schedule sets the rate of the optimizer's next step when it is created, and at each call
-- of step(). The loop is  loss:backward(); opt:step(); sched:step().  Call sched:step() only after a step that was not
-- skipped. A step is skipped if its gradients overflowed.
--
-- Schedules differ in how they set the rates of several groups:
--   WarmupLR, WarmupDecayLR, OneCycle and LRRangeTest set one rate for all groups, as in DeepSpeed.
--   WarmupCosineLR multiplies each group's own rate, as in DeepSpeed.
--   The schedules of PyTorch (sched_torch.lua) and of Hugging Face (sched_hugging_face.lua) compute the rate of each
--     group from the group's initial rate.
--   warmup_cosine, warmup_linear and constant call optimizer:set_lr, which keeps the ratios between the groups' rates.
local caller = require "ps.core.caller"
local foreign = require "ps.core.foreign"
local schedule = require "ps.optim.schedule"
local error = caller.error
local build, checked, own_rate, has_rates = schedule.build, schedule.checked, schedule.own_rate, schedule.has_rates
local ALIKE, SHARE = schedule.ALIKE, schedule.SHARE
local order = schedule.order

local sched = {}
for _, file in ipairs { "ps.optim.sched_torch", "ps.optim.sched_hugging_face" } do
  for name, make in pairs(require(file)) do sched[name] = make end
end

-- Checks that the warm-up ends within the schedule.
local function check_warmup(name, warmup, total, options, default)
  local steps = options[warmup] or default
  if steps <= options[total] then return end
  error(("sched.%s: %s is %.14g%s; it must be at most %s, which is %.14g"):format(name, warmup, steps,
    options[warmup] and "" or " (the default)", total, options[total]))
end

local WARMUP_TO = { optimizer = "table", max_lr = "number", min_lr = "number", warmup = "number", total = "number" }

-- Returns the progress at step `count`: 0 at the end of the warm-up, and 1 at step `total` and after it.
local function way(options, count)
  local warmup = options.warmup or 0
  return math.min(1, (count - warmup) / math.max(1, options.total - warmup))
end

local function warming(options, count)
  local warmup = options.warmup or 0
  if count < warmup then return options.max_lr * (count + 1) / warmup end
end

--- Returns a schedule in which the rate rises to max_lr during the first `warmup` steps (Loshchilov and Hutter 2017).
--- Then the rate falls along half a cosine and reaches min_lr at step `total`.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, max_lr: number, min_lr?: number, warmup?: integer, total:
--- integer}
---@param ... any a table with the other options, if the first argument is an optimizer
---@return ps.Schedule
function sched.warmup_cosine(options, ...)
  options = checked("warmup_cosine", WARMUP_TO, "max_lr total", options, ...)
  check_warmup("warmup_cosine", "warmup", "total", options, 0)
  local min_lr = options.min_lr or 0
  return build("warmup_cosine", options, function(count)
    return warming(options, count)
      or min_lr + 0.5 * (options.max_lr - min_lr) * (1 + math.cos(math.pi * way(options, count)))
  end, nil, { total = options.total })
end

--- Returns a schedule in which the rate rises to max_lr during the first `warmup` steps. Then the rate falls linearly
--- and reaches min_lr at step `total`.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, max_lr: number, min_lr?: number, warmup?: integer, total:
---  integer}
---@param ... any a table with the other options, if the first argument is an optimizer
---@return ps.Schedule
function sched.warmup_linear(options, ...)
  options = checked("warmup_linear", WARMUP_TO, "max_lr total", options, ...)
  check_warmup("warmup_linear", "warmup", "total", options, 0)
  local min_lr = options.min_lr or 0
  return build("warmup_linear", options, function(count)
    return warming(options, count) or options.max_lr + (min_lr - options.max_lr) * way(options, count)
  end, nil, { total = options.total })
end

local CONSTANT = { optimizer = "table", max_lr = "number", warmup = "number" }

--- Returns a schedule in which the rate rises to max_lr during the first `warmup` steps (default 0). Then the rate
--- stays constant.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, max_lr: number, warmup?: integer}
---@param ... any a table with the other options, if the first argument is an optimizer
---@return ps.Schedule
function sched.constant(options, ...)
  options = checked("constant", CONSTANT, "max_lr", options, ...)
  return build("constant", options, function(count) return warming(options, count) or options.max_lr end)
end

order.WarmupLR = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
order.WarmupDecayLR = "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration"
order.WarmupCosineLR = "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type "
  .. "last_batch_iteration"
order.OneCycle = "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
  .. "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
  .. "decay_mom_rate last_batch_iteration"
order.LRRangeTest = "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
  .. "last_batch_iteration"

-- DeepSpeed's schedules. Their step count is one step late. The first step has the starting rate. The second step has
-- the rate for 0 completed warm-up steps, which is the starting rate again. The options have DeepSpeed's names, and
-- docs/config.md lists the options.

-- warmup_share returns two results: a function that maps a step, counted from 0, to the completed fraction of the
-- warm-up, and the number of warm-up steps.
local WARMUPS = { log = true, linear = true }
local WARMUP_STEPS = 1000                                  -- DeepSpeed's default

local function warmup_share(name, options)
  local steps = math.max(2, options.warmup_num_steps or WARMUP_STEPS)
  local kind = options.warmup_type or "log"
  if kind == "linear" then return function(step) return step / steps end, steps end
  caller.one_of(kind, WARMUPS, ("sched.%s: warmup_type"):format(name))
  local scale = 1 / math.log(steps)
  return function(step) return scale * math.log(step + 1) end, steps
end

-- Returns a schedule in which the rate rises from warmup_min_lr to `high`. After the warm-up, the rate is warmup_min_lr
-- + f * (high - warmup_min_lr), where f is the result of after(step, number of warm-up steps).
local function warmup_then(name, options, high, after, total)
  local low, share, steps = options.warmup_min_lr or 0, warmup_share(name, options)
  return build(name, options, function(count)
    if count == 0 then return low end
    local step = count - 1
    return low + (high - low) * (step < steps and share(step) or after(step, steps))
  end, ALIKE, { total = total })
end

local WARMUP = { optimizer = "table", warmup_min_lr = "number", warmup_max_lr = "number", warmup_num_steps = "number",
  warmup_type = "string", last_batch_iteration = "number" }

--- Returns a schedule in which the rate of all groups rises to warmup_max_lr during warmup_num_steps steps, and then
--- stays constant. The default of warmup_max_lr is the optimizer's rate. With last_batch_iteration = n, the schedule
--- begins at the rate of iteration n. The default, -1, begins at the start.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, warmup_min_lr?: number, warmup_max_lr?: number,
--- warmup_num_steps?: integer, warmup_type?: "log"|"linear", last_batch_iteration?: integer}
---@param ... any the other options in DeepSpeed's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function sched.WarmupLR(options, ...)
  options = checked("WarmupLR", WARMUP, "", options, ...)
  local high = options.warmup_max_lr or own_rate("WarmupLR", options, "warmup_max_lr")
  return warmup_then("WarmupLR", options, high, function() return 1 end)
end

local DECAY = { optimizer = "table", total_num_steps = "number", warmup_min_lr = "number", warmup_max_lr = "number",
  warmup_num_steps = "number", warmup_type = "string", last_batch_iteration = "number" }

--- Returns a schedule in which the rate of all groups rises to warmup_max_lr during warmup_num_steps steps. Then the
--- rate falls linearly and reaches warmup_min_lr at step total_num_steps.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, total_num_steps: integer, warmup_min_lr?: number,
---  warmup_max_lr?: number, warmup_num_steps?: integer, warmup_type?: "log"|"linear", last_batch_iteration?: integer}
---@param ... any the other options in DeepSpeed's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function sched.WarmupDecayLR(options, ...)
  options = checked("WarmupDecayLR", DECAY, "total_num_steps", options, ...)
  check_warmup("WarmupDecayLR", "warmup_num_steps", "total_num_steps", options, WARMUP_STEPS)
  local total = options.total_num_steps
  return warmup_then("WarmupDecayLR", options, options.warmup_max_lr or 1e-3, function(step, warmup)
    return math.max(0, (total - step) / math.max(1, total - warmup))
  end, total)
end

local COSINE = { optimizer = "table", total_num_steps = "number", lr = "number", warmup_min_ratio = "number",
  warmup_num_steps = "number", cos_min_ratio = "number", warmup_type = "string", last_batch_iteration = "number" }

--- Returns a schedule that multiplies each group's own rate by a factor. The factor rises from warmup_min_ratio to 1.
--- Then the factor falls along half a cosine to cos_min_ratio. If the option `lr` is given, the schedule instead
--- multiplies lr by the factor, and calls optimizer:set_lr with the product.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, total_num_steps: integer, lr?: number, warmup_min_ratio?:
--- number, warmup_num_steps?: integer, cos_min_ratio?: number, warmup_type?: "log"|"linear", last_batch_iteration?:
--- integer}
---@param ... any the other options in DeepSpeed's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function sched.WarmupCosineLR(options, ...)
  options = checked("WarmupCosineLR", COSINE, "total_num_steps", options, ...)
  check_warmup("WarmupCosineLR", "warmup_num_steps", "total_num_steps", options, WARMUP_STEPS)
  local total = options.total_num_steps
  local share, warmup = warmup_share("WarmupCosineLR", options)
  local first, last = options.warmup_min_ratio or 0, options.cos_min_ratio or 1e-4
  local function factor(count)
    if count == 0 then return 0 end
    local step = count - 1
    if step < warmup then return first + share(step) * (1 - first) end
    local done = math.min(1, (step - warmup + 1) / math.max(1, total - warmup))
    return math.max(0, last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)
  end
  if not options.lr and has_rates(options.optimizer) then
    return build("WarmupCosineLR", options, factor, SHARE, { total = total })
  end
  local rate = options.lr or own_rate("WarmupCosineLR", options, "lr")
  return build("WarmupCosineLR", options, function(count) return rate * factor(count) end, nil, { total = total })
end

-- Returns a function that computes the height of step `count` in the cycle. The height is 0 at both ends of the cycle
-- and 1 in the middle. Also returns the cycle's number of steps.
local function cycle_height(options)
  local up = options.cycle_first_step_size or 2000
  local down = options.cycle_second_step_size or up
  local total, up_stairs = up + down, options.cycle_first_stair_count or 0
  local down_stairs = options.cycle_second_stair_count or up_stairs
  return function(count)
    local at = count % total
    local stairs = at <= up and up_stairs or down_stairs
    local height = at <= up and at / up or (total - at) / down
    if stairs == 0 then return height end
    -- A product of whole numbers is divided once. The result is therefore exact at each stair.
    return math.floor(at <= up and at * stairs / up or (total - at) * stairs / down) / stairs
  end, total
end

local CYCLE = { optimizer = "table", cycle_min_lr = "number", cycle_max_lr = "number", decay_lr_rate = "number",
  cycle_first_step_size = "number", cycle_second_step_size = "number", cycle_first_stair_count = "number",
  cycle_second_stair_count = "number", decay_step_size = "number", cycle_momentum = "boolean", cycle_min_mom = "number",
  cycle_max_mom = "number", decay_mom_rate = "number", last_batch_iteration = "number" }

--- Returns a schedule in which the rate completes one cycle, from cycle_min_lr to cycle_max_lr and back, and then
--- decays (Smith 2018, "A disciplined approach to neural network hyper-parameters"). With cycle_momentum (the default),
--- beta1 moves in the opposite direction, and beta2 becomes 0.99. As in DeepSpeed, the very first step has the smallest
--- beta1.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, cycle_min_lr: number, cycle_max_lr: number, decay_lr_rate?:
--- number, cycle_first_step_size?: integer, cycle_second_step_size?: integer, cycle_first_stair_count?: integer,
--- cycle_second_stair_count?: integer, decay_step_size?: integer, cycle_momentum?: boolean, cycle_min_mom?: number,
--- cycle_max_mom?: number, decay_mom_rate?: number, last_batch_iteration?: integer}
---@param ... any the other options in DeepSpeed's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function sched.OneCycle(options, ...)
  options = checked("OneCycle", CYCLE, "cycle_min_lr cycle_max_lr", options, ...)
  local low, high = options.cycle_min_lr, options.cycle_max_lr
  local height, total = cycle_height(options)
  local interval, low_mom, high_mom = options.decay_step_size or 0, options.cycle_min_mom or 0.8,
    options.cycle_max_mom or 0.9
  local function decay(count, rate) return interval == 0 and 1 or 1 + (rate or 0) * (count - total) / interval end
  local function rate(count)
    if count <= total then return low + (high - low) * height(count) end
    return low / decay(count, options.decay_lr_rate)
  end
  if options.cycle_momentum == false then return build("OneCycle", options, rate, ALIKE) end
  return build("OneCycle", options, rate, ALIKE, { beta2 = 0.99, beta1 = function(count)
    if count == 0 then return low_mom end
    if count <= total then return high_mom - (high_mom - low_mom) * height(count) end
    return high_mom * decay(count, options.decay_mom_rate)
  end })
end

local RANGE = { optimizer = "table", lr_range_test_min_lr = "number", lr_range_test_step_size = "number",
  lr_range_test_step_rate = "number", lr_range_test_staircase = "boolean", last_batch_iteration = "number" }

--- Returns a schedule whose rate only increases. It is used to find the rate at which training diverges (Smith 2017).
--- The rate of step n, counted from 0, is lr_range_test_min_lr * (1 + lr_range_test_step_rate *
--- n / lr_range_test_step_size).
---@param options ps.Optimizer|{optimizer: ps.Optimizer, lr_range_test_min_lr?: number, lr_range_test_step_size?:
--- integer, lr_range_test_step_rate?: number, lr_range_test_staircase?: boolean, last_batch_iteration?: integer}
---@param ... any the other options in DeepSpeed's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function sched.LRRangeTest(options, ...)
  options = checked("LRRangeTest", RANGE, "", options, ...)
  local low, size = options.lr_range_test_min_lr or 1e-3, options.lr_range_test_step_size or 2000
  local growth = options.lr_range_test_step_rate or 1
  return build("LRRangeTest", options, function(count)
    local intervals = count / size
    return low * (1 + growth * (options.lr_range_test_staircase and math.floor(intervals) or intervals))
  end, ALIKE)
end

local NAMED = {}
for _, name in ipairs(require "ps.config.schedules") do NAMED[name] = sched[name] end

-- Schedules whose option max_lr has the optimizer's rate as its default.
local RISES = { warmup_cosine = true, warmup_linear = true, constant = true }

local SPECIFIC = { name = "string", optimizer = "table", num_warmup_steps = "whole", num_training_steps = "whole",
  scheduler_specific_kwargs = "table" }
-- The step counts that get_scheduler passes to each schedule.
local ASKS = { constant = {}, reduce_lr_on_plateau = {}, constant_with_warmup = { "num_warmup_steps" },
  inverse_sqrt = { "num_warmup_steps" } }
for _, name in ipairs { "linear", "cosine", "cosine_with_restarts", "polynomial", "cosine_with_min_lr",
  "cosine_warmup_with_min_lr", "warmup_stable_decay" } do
  ASKS[name] = { "num_warmup_steps", "num_training_steps" }
end

--- Returns one of Hugging Face's schedules by its name, like transformers' get_scheduler: "linear", "cosine",
--- "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt", "cosine_with_min_lr",
--- "cosine_warmup_with_min_lr", "warmup_stable_decay" or "reduce_lr_on_plateau".
---@param name string|{name: string, optimizer: ps.Optimizer, num_warmup_steps?: integer, num_training_steps?: integer,
---  scheduler_specific_kwargs?: table}
---@param optimizer? ps.Optimizer
---@param num_warmup_steps? integer
---@param num_training_steps? integer
---@param scheduler_specific_kwargs? table other options of the schedule
---@return ps.Schedule
function sched.get_scheduler(name, optimizer, num_warmup_steps, num_training_steps, scheduler_specific_kwargs)
  local given = type(name) == "table" and name or { name = name, optimizer = optimizer,
    num_warmup_steps = num_warmup_steps, num_training_steps = num_training_steps,
    scheduler_specific_kwargs = scheduler_specific_kwargs }
  given = caller.options(given, "sched.get_scheduler", SPECIFIC)
  local asks = caller.one_of(given.name, ASKS, "sched.get_scheduler: the name")
  local options = { optimizer = given.optimizer }
  for key, value in pairs(given.scheduler_specific_kwargs or {}) do options[key] = value end
  for _, key in ipairs(asks) do
    if given[key] == nil and options[key] == nil and given.name ~= "warmup_stable_decay" then
      error(("sched.get_scheduler: \"%s\" needs %s"):format(given.name, key))
    end
    if options[key] == nil then options[key] = given[key] end
  end
  if given.name == "constant" then options.max_lr = own_rate("constant", options, "max_lr") end
  return sched[given.name](options)
end

--- Returns the schedule that a configuration defines (cfg.scheduler of ps.config).
---@param scheduler {type: string, params: table}
---@param optimizer ps.Optimizer
---@return ps.Schedule
function sched.from_config(scheduler, optimizer)
  caller.typed(scheduler, "table", "sched.from_config: the configuration, { type =, params = },")
  local options = { optimizer = optimizer }
  for key, value in pairs(scheduler.params or {}) do options[key] = value end
  local make = NAMED[scheduler.type]
  if not make then error("there is no schedule " .. tostring(scheduler.type)) end
  if RISES[scheduler.type] then options.max_lr = options.max_lr or own_rate(scheduler.type, options, "max_lr") end
  return make(options)
end

return foreign.public(sched, "sched")
