-- SPDX-License-Identifier: BSD-3-Clause
-- PyTorch's schedules, under PyTorch's names (ps.optim.sched). Each schedule computes a group's rate from the group's
-- initial rate. ReduceLROnPlateau instead changes the current rates after evaluations. As in PyTorch, some schedules
-- can also continue from a rate that the script or another schedule has set (`follow`), so they can be chained. With
-- last_epoch = n, a schedule begins as if n + 1 steps were done. The default, -1, begins at the start.
local caller = require "ps.core.caller"
local optim_groups = require "ps.optim.groups"
local schedule = require "ps.optim.schedule"
local error = caller.error
local checked, per_group, order = schedule.checked, schedule.per_group, schedule.order

local torch = {}

order.LambdaLR = "lr_lambda last_epoch"
order.StepLR = "step_size gamma last_epoch"
order.MultiStepLR = "milestones gamma last_epoch"
order.ExponentialLR = "gamma last_epoch"
order.CosineAnnealingLR = "T_max eta_min last_epoch"
order.CosineAnnealingWarmRestarts = "T_0 T_mult eta_min last_epoch"
order.ConstantLR = "factor total_iters last_epoch"
order.LinearLR = "start_factor end_factor total_iters last_epoch"
order.PolynomialLR = "total_iters power last_epoch"
order.MultiplicativeLR = "lr_lambda last_epoch"
order.SequentialLR = "schedulers milestones last_epoch"
order.OneCycleLR = "max_lr total_steps epochs steps_per_epoch pct_start anneal_strategy cycle_momentum base_momentum "
  .. "max_momentum div_factor final_div_factor three_phase last_epoch"
order.ReduceLROnPlateau = "mode factor patience threshold threshold_mode cooldown min_lr eps"

local LAMBDA = { optimizer = "table", lr_lambda = "callable|table", last_epoch = "number" }

-- Returns a function that computes a group's factor at a step by calling lr_lambda.
local function factor_of(name, options)
  local fns, call = options.lr_lambda, "sched." .. name
  if type(fns) == "table" and getmetatable(fns) == nil then
    if #fns ~= #(options.optimizer.groups or {}) then
      error(("%s: %d functions for %d groups"):format(call, #fns, #(options.optimizer.groups or {})))
    end
    for i, fn in ipairs(fns) do caller.callable(fn, ("%s: lr_lambda[%d]"):format(call, i)) end
  else fns = nil end
  return function(count, group)
    local factor = (fns and fns[group] or options.lr_lambda)(count)
    return caller.typed(factor, "number", call .. ": the result of lr_lambda")
  end
end

--- Returns PyTorch's LambdaLR, which multiplies each group's initial rate by a function of the step, counted from 0.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, lr_lambda: function|function[], last_epoch?: integer} if
---  lr_lambda is a list, it has one function for each group
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.LambdaLR(options, ...)
  options = checked("LambdaLR", LAMBDA, "lr_lambda", options, ...)
  local factor = factor_of("LambdaLR", options)
  return per_group("LambdaLR", options, function(count, base, group) return base * factor(count, group) end)
end

-- Returns a function that multiplies a rate by the factors of the steps `first`, `first` + 1, ..., `count`. If it has
-- multiplied the same rate for an earlier step, it continues from there: a run of n steps computes n factors.
local function product(factor, first)
  local last = {}                   -- last[group]: the last result
  return function(count, base, group)
    local from = last[group]
    if not from or from.base ~= base or from.count > count then from = { count = first - 1, lr = base } end
    local lr = from.lr
    for at = from.count + 1, count do lr = lr * factor(at, group) end
    last[group] = { base = base, count = count, lr = lr }
    return lr
  end
end

--- Returns PyTorch's MultiplicativeLR, which multiplies each group's rate by a function of the step at each step, from
--- step 1 on. If the schedule is not the first schedule of a SequentialLR, it continues from the rate of the previous
--- schedule, and also multiplies this rate by the function's value for step 0.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, lr_lambda: function|function[], last_epoch?: integer} if
---  lr_lambda is a list, it has one function for each group
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.MultiplicativeLR(options, ...)
  options = checked("MultiplicativeLR", LAMBDA, "lr_lambda", options, ...)
  local factor = factor_of("MultiplicativeLR", options)
  local later = product(factor, 0)
  return per_group("MultiplicativeLR", options, product(factor, 1), {
    follow = function(count, lr, _, group) return count == 0 and lr or lr * factor(count, group) end,
    later = function(count, lr, _, group) return later(count, lr, group) end })
end

local STEP = { optimizer = "table", step_size = "whole", gamma = "number", last_epoch = "number" }

--- Returns PyTorch's StepLR, which multiplies each group's rate by gamma after every step_size steps.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, step_size: integer, gamma?: number, last_epoch?: integer}
---  gamma: default 0.1
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.StepLR(options, ...)
  options = checked("StepLR", STEP, "step_size", options, ...)
  caller.whole(options.step_size, "sched.StepLR: step_size", 1)
  local gamma = options.gamma or 0.1
  return per_group("StepLR", options, function(count, base)
    return base * gamma ^ math.floor(count / options.step_size)
  end, { follow = function(count, lr)
    return count > 0 and count % options.step_size == 0 and lr * gamma or lr
  end })
end

local MULTI = { optimizer = "table", milestones = "table", gamma = "number", last_epoch = "number" }

--- Returns PyTorch's MultiStepLR, which multiplies each group's rate by gamma at each milestone. A milestone is a step.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, milestones: integer[], gamma?: number, last_epoch?: integer}
---  gamma: default 0.1. A milestone that is listed twice counts twice
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.MultiStepLR(options, ...)
  options = checked("MultiStepLR", MULTI, "milestones", options, ...)
  local gamma = options.gamma or 0.1
  for _, at in ipairs(caller.list(options.milestones, "sched.MultiStepLR: the milestones")) do
    caller.whole(at, "sched.MultiStepLR: a milestone", 0)
  end
  return per_group("MultiStepLR", options, function(count, base)
    local passed = 0
    for _, at in ipairs(options.milestones) do if at <= count then passed = passed + 1 end end
    return base * gamma ^ passed
  end, { follow = function(count, lr)
    local passed = 0
    for _, at in ipairs(options.milestones) do if at == count then passed = passed + 1 end end
    return lr * gamma ^ passed
  end })
end

local EXPONENTIAL = { optimizer = "table", gamma = "number", last_epoch = "number" }

--- Returns PyTorch's ExponentialLR, which multiplies each group's rate by gamma after every step.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, gamma: number, last_epoch?: integer}
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.ExponentialLR(options, ...)
  options = checked("ExponentialLR", EXPONENTIAL, "gamma", options, ...)
  return per_group("ExponentialLR", options, function(count, base) return base * options.gamma ^ count end,
    { follow = function(count, lr) return count == 0 and lr or lr * options.gamma end })
end

local ANNEALING = { optimizer = "table", T_max = "whole", eta_min = "number", last_epoch = "number" }

--- Returns PyTorch's CosineAnnealingLR (Loshchilov and Hutter 2017). The rate starts at each group's initial rate. It
--- falls along half a cosine, reaches eta_min at step T_max, and then rises again.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, T_max: integer, eta_min?: number, last_epoch?: integer}
---  eta_min: default 0
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.CosineAnnealingLR(options, ...)
  options = checked("CosineAnnealingLR", ANNEALING, "T_max", options, ...)
  caller.whole(options.T_max, "sched.CosineAnnealingLR: T_max", 1)
  local low, steps = options.eta_min or 0, options.T_max
  local function height(count) return 1 + math.cos(math.pi * count / steps) end
  return per_group("CosineAnnealingLR", options, function(count, base)
    return low + (base - low) * height(count) / 2
  end, { follow = function(count, lr, base)
    if count == 0 then return lr end
    -- At the lowest point, the ratio to the previous step's rate does not exist.
    if (count - 1 - steps) % (2 * steps) == 0 then return lr + (base - low) * (1 - math.cos(math.pi / steps)) / 2 end
    return height(count) / height(count - 1) * (lr - low) + low
  end })
end

local RESTARTS = { optimizer = "table", T_0 = "whole", T_mult = "whole", eta_min = "number", last_epoch = "number" }

--- Returns PyTorch's CosineAnnealingWarmRestarts (Loshchilov and Hutter 2017). During T_0 steps, the rate falls along
--- half a cosine from each group's initial rate to eta_min. Then the cycle begins again. Each cycle has T_mult times as
--- many steps as the previous cycle.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, T_0: integer, T_mult?: integer, eta_min?: number, last_epoch?:
--- integer} T_mult: default 1. eta_min: default 0
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.CosineAnnealingWarmRestarts(options, ...)
  local call = "CosineAnnealingWarmRestarts"
  options = checked(call, RESTARTS, "T_0", options, ...)
  caller.whole(options.T_0, "sched.CosineAnnealingWarmRestarts: T_0", 1)
  caller.whole(options.T_mult or 1, "sched.CosineAnnealingWarmRestarts: T_mult", 1)
  local low, factor = options.eta_min or 0, options.T_mult or 1
  return per_group(call, options, function(count, base)
    local length = options.T_0
    if factor == 1 then count = count % length end
    while count >= length do count, length = count - length, length * factor end
    return low + (base - low) * (1 + math.cos(math.pi * count / length)) / 2
  end)
end

local FACTOR = { optimizer = "table", factor = "number", total_iters = "whole", last_epoch = "number" }

-- Raises an error if a factor for a rate is not between 0 and 1.
local function check_share(value, what)
  if value < 0 or value > 1 then error(("%s is %.14g; it must be from 0 to 1"):format(what, value)) end
  return value
end

--- Returns PyTorch's ConstantLR. For total_iters steps (default 5), the rate is each group's initial rate times factor
--- (default 1/3). After that, it is the initial rate. As in PyTorch, if total_iters is 0, the rate is always the
--- initial rate times factor.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, factor?: number, total_iters?: integer, last_epoch?: integer}
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.ConstantLR(options, ...)
  options = checked("ConstantLR", FACTOR, "", options, ...)
  local factor = check_share(options.factor or 1 / 3, "sched.ConstantLR: factor")
  local total = caller.whole(options.total_iters or 5, "sched.ConstantLR: total_iters", 0)
  local function later(count, _, base) return count < total and base * factor or base end
  return per_group("ConstantLR", options, function(count, base)
    return total == 0 and base * factor or later(count, nil, base)
  end, { later = later, follow = function(count, lr, base)
    if count == 0 then return lr * factor end
    if count ~= total then return lr end
    return factor == 0 and base or lr / factor
  end })
end

local LINEAR = { optimizer = "table", start_factor = "number", end_factor = "number", total_iters = "whole",
  last_epoch = "number" }

--- Returns PyTorch's LinearLR. The rate is each group's initial rate times a factor. During total_iters steps (default
--- 5), this factor changes linearly from start_factor (default 1/3) to end_factor (default 1).
---@param options ps.Optimizer|{optimizer: ps.Optimizer, start_factor?: number, end_factor?: number, total_iters?:
--- integer, last_epoch?: integer}
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.LinearLR(options, ...)
  options = checked("LinearLR", LINEAR, "", options, ...)
  local first = check_share(options.start_factor or 1 / 3, "sched.LinearLR: start_factor")
  local last = check_share(options.end_factor or 1, "sched.LinearLR: end_factor")
  if first == 0 then error "sched.LinearLR: start_factor is 0; it must be above 0, as in PyTorch" end
  local total = caller.whole(options.total_iters or 5, "sched.LinearLR: total_iters", 1)
  return per_group("LinearLR", options, function(count, base)
    return base * (first + (last - first) * math.min(total, count) / total)
  end, { follow = function(count, lr)
    if count == 0 then return lr * first end
    if count > total then return lr end
    return lr * (1 + (last - first) / (total * first + (count - 1) * (last - first)))
  end })
end

local POLYNOMIAL = { optimizer = "table", total_iters = "whole", power = "number", last_epoch = "number" }

--- Returns PyTorch's PolynomialLR. The rate is each group's initial rate times (1 - step / total_iters) ^ power. From
--- step total_iters on, the rate is 0.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, total_iters?: integer, power?: number, last_epoch?: integer}
---  total_iters: default 5. power: default 1
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.PolynomialLR(options, ...)
  options = checked("PolynomialLR", POLYNOMIAL, "", options, ...)
  local total = caller.whole(options.total_iters or 5, "sched.PolynomialLR: total_iters", 1)
  local power = options.power or 1
  return per_group("PolynomialLR", options, function(count, base)
    return base * (1 - math.min(count, total) / total) ^ power
  end, { total = total, follow = function(count, lr)
    if count == 0 or count > total then return lr end
    return lr * ((1 - count / total) / (1 - (count - 1) / total)) ^ power
  end })
end

local SEQUENCE = { optimizer = "table", schedulers = "table", milestones = "table", last_epoch = "number" }

--- Returns PyTorch's SequentialLR, which runs schedules one after another. The first schedule runs until step
--- milestones[1], the second schedule runs until step milestones[2], and so on. All schedules must be schedules of
--- PyTorch or Hugging Face, and must have the same optimizer.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, schedulers: ps.Schedule[], milestones: integer[], last_epoch?:
--- integer}
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.SequentialLR(options, ...)
  options = checked("SequentialLR", SEQUENCE, "schedulers milestones", options, ...)
  local parts = caller.list(options.schedulers, "sched.SequentialLR: schedulers")
  local marks = caller.list(options.milestones, "sched.SequentialLR: milestones")
  if #parts ~= #marks + 1 then
    error(("sched.SequentialLR: %d schedules need %d milestones, not %d"):format(#parts, #parts - 1, #marks))
  end
  for i, at in ipairs(marks) do
    caller.whole(at, "sched.SequentialLR: a milestone", i > 1 and marks[i - 1] or 0)
  end
  for i, part in ipairs(parts) do
    if type(part) ~= "table" or part.how ~= schedule.OWN or part.beta1 or part.optimizer ~= options.optimizer then
      error(("sched.SequentialLR: schedulers[%d] must be a schedule of PyTorch or Hugging Face that has the same "
        .. "optimizer and sets only rates"):format(i))
    end
  end
  local total = parts[#parts].total
  local function part_of(count)
    local at, began = 1, 0
    while marks[at] and count >= marks[at] do at, began = at + 1, marks[at] end
    return parts[at], began
  end
  local function rate(count, base, group)
    local part, began = part_of(count)
    if not part.later or began == 0 then return part.rate(count - began, base, group) end
    return part.later(count - began, rate(began - 1, base, group), base, group)
  end
  return per_group("SequentialLR", options, rate, { total = total and total + (marks[#marks] or 0),
    follow = function(count, lr, base, group)
      local part, began = part_of(count)
      if count == began and count > 0 and part.later then return part.later(0, lr, base, group) end
      return count > began and part.follow and part.follow(count - began, lr, base, group) or nil
    end })
end

local CHAINED = { schedulers = "table", optimizer = "table" }

--- Returns PyTorch's ChainedScheduler, which combines several schedules for the same optimizer. A call of its step()
--- advances every schedule, in order. Each schedule continues from the rates that the previous schedule in the
--- list has set.
---@param schedulers ps.Schedule[]|{schedulers: ps.Schedule[], optimizer?: ps.Optimizer}
---@param optimizer? ps.Optimizer default: the optimizer of the schedules
---@return ps.Schedule
function torch.ChainedScheduler(schedulers, optimizer)
  local given = schedulers
  if type(schedulers) ~= "table" or not schedulers.schedulers then
    given = { schedulers = schedulers, optimizer = optimizer }
  elseif optimizer ~= nil then error "sched.ChainedScheduler: the optimizer is an option and the second argument" end
  given = caller.options(given, "sched.ChainedScheduler", CHAINED)
  local parts = caller.list(given.schedulers, "sched.ChainedScheduler: schedulers")
  local owner = given.optimizer or type(parts[1]) == "table" and parts[1].optimizer
  for i, part in ipairs(parts) do
    if type(part) ~= "table" or not part.how or part.judge or part.optimizer ~= owner then
      error(("sched.ChainedScheduler: schedulers[%d] must be a schedule of PyTorch, Hugging Face or DeepSpeed for the "
        .. "same optimizer, other than ReduceLROnPlateau, whose step needs a value"):format(i))
    end
  end
  if not parts[1] then error "sched.ChainedScheduler: schedulers is empty; it needs at least one schedule" end
  local self = schedule.build("ChainedScheduler", { optimizer = owner }, nil, schedule.HELD)
  self.parts, self.began = parts, parts[1].began
  for i, part in ipairs(parts) do
    if part.began ~= self.began then
      error(("sched.ChainedScheduler: schedulers[1] begins at step %d, but schedulers[%d] at step %d: give all the "
        .. "same last_epoch"):format(self.began or 0, i, part.began or 0))
    end
  end
  if self.began then schedule.repeat_steps(self, self.began) end
  return self
end

local ONE_CYCLE = { optimizer = "table", max_lr = "number|table", total_steps = "whole", epochs = "whole",
  steps_per_epoch = "whole", pct_start = "number", anneal_strategy = "string", cycle_momentum = "boolean",
  base_momentum = "number", max_momentum = "number", div_factor = "number", final_div_factor = "number",
  three_phase = "boolean", last_epoch = "number" }
local ANNEAL = {
  cos = function(from, to, done) return to + (from - to) / 2 * (1 + math.cos(math.pi * done)) end,
  linear = function(from, to, done) return (to - from) * done + from end,
}

-- Returns the number of steps of a cycle, computed from total_steps or from epochs and steps_per_epoch.
local function cycle_steps(options)
  local total = options.total_steps
  if not total and options.epochs and options.steps_per_epoch then total = options.epochs * options.steps_per_epoch end
  if not total then error "sched.OneCycleLR needs total_steps, or epochs and steps_per_epoch" end
  return caller.whole(total, "sched.OneCycleLR: total_steps", 1)
end

-- Returns the phases of a cycle. A phase has its last step, and the names of the values at its two ends.
local function cycle_phases(options, total)
  local up, down = (options.pct_start or 0.3) * total - 1, { last = total - 1, "max", "least", "base", "max" }
  if not options.three_phase then return { { last = up, "first", "max", "max", "base" }, down } end
  return { { last = up, "first", "max", "max", "base" },
    { last = 2 * (options.pct_start or 0.3) * total - 2, "max", "first", "base", "max" },
    { last = total - 1, "first", "least", "max", "max" } }
end

--- Returns PyTorch's OneCycleLR (Smith and Topin 2018), except that the rate keeps its last value after total_steps.
--- The first rate is max_lr / div_factor. During the fraction pct_start of the steps, the rate rises to max_lr. Then
--- the rate falls to the first rate divided by final_div_factor. With three_phase, the rate falls in two phases. In the
--- first of these phases, it falls to the first rate, in as many steps as it rose. With cycle_momentum, beta1, or
--- the momentum of groups without betas, moves in the opposite direction.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, max_lr: number|number[], total_steps?: integer, epochs?:
--- integer, steps_per_epoch?: integer, pct_start?: number, anneal_strategy?: "cos"|"linear", cycle_momentum?: boolean,
--- base_momentum?: number, max_momentum?: number, div_factor?: number, final_div_factor?: number, three_phase?:
--- boolean, last_epoch?: integer} if max_lr is a list, it has one rate for each group
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.OneCycleLR(options, ...)
  options = checked("OneCycleLR", ONE_CYCLE, "max_lr", options, ...)
  local total = cycle_steps(options)
  local pct, div, last_div = options.pct_start or 0.3, options.div_factor or 25, options.final_div_factor or 1e4
  check_share(pct, "sched.OneCycleLR: pct_start")
  if div <= 0 or last_div <= 0 then
    error(("sched.OneCycleLR: div_factor is %.14g and final_div_factor %.14g; both must be above 0"):format(div,
      last_div))
  end
  local anneal = caller.one_of(options.anneal_strategy or "cos", ANNEAL, "sched.OneCycleLR: anneal_strategy")
  local highs, phases = options.max_lr, cycle_phases(options, total)
  for i, high in ipairs(type(highs) == "table" and highs or { highs }) do
    if type(high) ~= "number" or high ~= high or high < 0 then
      error(("sched.OneCycleLR: max_lr%s is %s; it must be a number of at least 0"):format(type(highs) == "table"
        and ("[%d]"):format(i) or "", tostring(high)))
    end
  end
  if type(highs) == "table" and #highs ~= #(options.optimizer.groups or {}) then
    error(("sched.OneCycleLR: max_lr has %d rates for %d groups"):format(#highs, #(options.optimizer.groups or {})))
  end
  local function at(count, values, from, to)
    count = math.min(count, total - 1)
    local began, phase = 0, nil
    for i, each in ipairs(phases) do
      phase = each
      if count <= each.last or i == #phases then break end
      began = each.last
    end
    local length = phase.last - began
    return anneal(values[phase[from]], values[phase[to]], length > 0 and (count - began) / length or 1)
  end
  local moves = { base = options.base_momentum or 0.85, max = options.max_momentum or 0.95 }
  local function momentum(count) return at(count, moves, 3, 4) end
  return per_group("OneCycleLR", options, function(count, _, group)
    local high = type(highs) == "table" and highs[group] or highs
    return at(count, { first = high / div, max = high, least = high / div / last_div }, 1, 2)
  end, { total = total, beta1 = options.cycle_momentum ~= false and momentum or nil })
end

local PLATEAU = { optimizer = "table", mode = "string", factor = "number", patience = "whole", threshold = "number",
  threshold_mode = "string", cooldown = "whole", min_lr = "number|table", eps = "number" }
local MODES = { min = true, max = true }
local THRESHOLDS = { rel = true, abs = true }

-- Returns whether a value is better than the best value so far by more than the threshold.
local function is_better(self, value)
  local best, by = self.best, self.threshold
  if self.larger then return value > (self.relative and best * (by + 1) or best + by) end
  return value < (self.relative and best * (1 - by) or best - by)
end

-- Multiplies the rates of all groups by the factor. A rate that would change by eps or less stays the same.
local function reduce(self)
  local number = 0
  optim_groups.each_rate(self.optimizer, function(group)
    number = number + 1
    local least = type(self.min_lr) == "table" and self.min_lr[number] or self.min_lr
    local lr = math.max(group.lr * self.factor, least)
    return group.lr - lr > self.eps and lr or group.lr
  end)
end

local function judge(self, value)
  if is_better(self, value) then self.best, self.num_bad_epochs = value, 0
  else self.num_bad_epochs = self.num_bad_epochs + 1 end
  if self.cooldown_counter > 0 then self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0 end
  if self.num_bad_epochs <= self.patience then return end
  reduce(self)
  self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
end

--- Returns a schedule with the rule of PyTorch's ReduceLROnPlateau. `name` is the schedule's name in PyTorch
--- or Hugging Face.
---@param name string
---@param options any
---@param ... any
---@return ps.Schedule
function schedule.plateau(name, options, ...)
  options = checked(name, PLATEAU, "", options, ...)
  local call = "sched." .. name
  caller.one_of(options.mode or "min", MODES, call .. ": mode")
  caller.one_of(options.threshold_mode or "rel", THRESHOLDS, call .. ": threshold_mode")
  local factor, least = options.factor or 0.1, options.min_lr or 0
  if factor < 0 or factor >= 1 then
    error(("%s: factor is %.14g; it must be at least 0 and less than 1"):format(call, factor))
  end
  if type(least) == "table" and #least ~= #(options.optimizer.groups or {}) then
    error(("%s: min_lr has %d rates for %d groups"):format(call, #least, #(options.optimizer.groups or {})))
  end
  local self = schedule.build(name, options, nil, schedule.HELD)
  self.larger = options.mode == "max"                       -- whether larger values are better
  self.relative, self.threshold = options.threshold_mode ~= "abs", options.threshold or 1e-4
  self.factor, self.min_lr, self.eps = factor, least, options.eps or 1e-8
  self.patience = caller.whole(options.patience or 10, call .. ": patience", 0)
  self.cooldown = caller.whole(options.cooldown or 0, call .. ": cooldown", 0)
  self.best, self.num_bad_epochs, self.cooldown_counter = self.larger and -math.huge or math.huge, 0, 0
  self.kept, self.judge = { "best", "num_bad_epochs", "cooldown_counter" }, judge
  return self
end

--- Returns PyTorch's ReduceLROnPlateau, which multiplies the rates by `factor` if a value has not improved for more
--- than `patience` evaluations. The value is the argument of schedule:step(value). ps.train.run passes the held-out
--- loss.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, mode?: "min"|"max", factor?: number, patience?: integer,
--- threshold?: number, threshold_mode?: "rel"|"abs", cooldown?: integer, min_lr?: number|number[], eps?: number}
--- mode: default "min". factor: 0.1. patience: 10. threshold: 1e-4. threshold_mode: "rel". cooldown: 0. min_lr: 0.
--- eps: 1e-8
---@param ... any the other options in PyTorch's order, or in a table, if the first argument is an optimizer
---@return ps.Schedule
function torch.ReduceLROnPlateau(options, ...) return schedule.plateau("ReduceLROnPlateau", options, ...) end

return torch
