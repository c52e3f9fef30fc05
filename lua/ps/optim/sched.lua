-- SPDX-License-Identifier: BSD-3-Clause
-- Learning-rate schedules. A schedule sets the rate of the optimizer's next step when it is made and at every :step();
-- the loop is  loss:backward(); opt:step(); sched:step().
-- With several groups, DeepSpeed's schedules act as in DeepSpeed: WarmupLR, WarmupDecayLR, OneCycle and LRRangeTest set
-- one rate for all groups, and WarmupCosineLR multiplies each group's own rate. The other schedules set the optimizer's
-- own rate, and groups with another rate keep their ratio to it (optimizer:set_lr).
-- A skipped step (its gradients overflowed) does not count: call :step() only after real ones.
local caller = require "ps.core.caller"
local exact = require "ps.core.exact"
local foreign = require "ps.core.foreign"
local mesh = require "ps.dist.mesh"
local optim_groups = require "ps.optim.groups"
local error = caller.error

local sched = {}

---@class ps.Schedule
---@field count integer optimizer steps so far
local Schedule = {}
Schedule.__index = Schedule

function Schedule:__tostring() return ("%s, %d steps, lr %g"):format(self.name, self.count, self:lr()) end

-- How a schedule sets several groups: all get its rate (ALIKE); it is a factor on each group's rate (SHARE); or it is a
-- function of each group's rate and number (OWN). With none of these it sets the optimizer's rate.
local ALIKE, SHARE, OWN = "alike", "share", "own"

-- Whether an optimizer's groups have initial rates. Other tables only need set_lr.
local function has_rates(optimizer)
  local group = (optimizer.groups or {})[1]
  return group ~= nil and group.initial_lr ~= nil
end

-- Sets rate and momentum of the optimizer's next step.
local function apply(self)
  local optimizer = self.optimizer
  local value = self.how ~= OWN and self.rate(self.count)
  if not self.how or not has_rates(optimizer) then optimizer:set_lr(self:lr())
  else
    local number = 0
    optim_groups.each_rate(optimizer, function(group)
      number = number + 1
      if self.how == OWN then return self.rate(self.count, group.initial_lr, number) end
      return self.how == ALIKE and value or group.initial_lr * value
    end)
  end
  if not self.beta1 then return end
  local beta1 = self.beta1(self.count)
  for _, group in ipairs(self.optimizer.groups or {}) do group.betas = { beta1, self.beta2 } end
end

local told = setmetatable({}, { __mode = "k" })

-- Prints once, on the first rank, how the schedule sets groups with different rates.
local function tell_groups(name, optimizer, how)
  local text, alike = optim_groups.rates(optimizer.groups, "initial_lr")
  local world, engine = mesh.group "world", optimizer.engine
  if alike or told[optimizer] or world and world:rank() > 0 or engine and engine.quiet then return end
  told[optimizer] = true
  local what = "keeps the ratios of the rates of %d groups: %s"
  if how == ALIKE then what = "sets one rate for all %d groups and replaces their own rates (%s)"
  elseif how == SHARE or how == OWN then what = "multiplies the rate of each of %d groups: %s" end
  io.stderr:write("psluajit: sched.", name, " ", what:format(#optimizer.groups, text), "\n")
end

-- rate(count) is the rate of step `count`, or the factor on each group's; beta1(count) and beta2, if any, are Adam's.
local function build(name, options, rate, how, beta1, beta2)
  if not options.optimizer.set_lr then error(("sched.%s: optimizer is a table without set_lr"):format(name)) end
  for number, group in ipairs(beta1 and options.optimizer.groups or {}) do
    if not group.betas then
      error(("sched.%s: cycle_momentum changes Adam's beta1, but group %d of the optimizer has no betas; set "
        .. "cycle_momentum = false"):format(name, number - 1))
    end
  end
  local last = options.last_batch_iteration or -1
  if last < -1 or last % 1 ~= 0 then
    error(("sched.%s: last_batch_iteration is %.14g; it must be a whole number of at least -1"):format(name, last))
  end
  if has_rates(options.optimizer) then
    optim_groups.renew_rates(options.optimizer)
    tell_groups(name, options.optimizer, how)
  end
  local self = setmetatable({ name = name, optimizer = options.optimizer, rate = rate, how = how, beta1 = beta1,
    beta2 = beta2, count = last + 1 }, Schedule)
  apply(self)
  return self
end

--- The rate of optimizer step `count` (from 0; default: the next one). For WarmupCosineLR and PyTorch's schedules it is
--- the first group's.
---@param count? integer
---@return number
function Schedule:lr(count)
  if self.how == OWN then
    local group = (self.optimizer.groups or {})[1]
    return self.rate(count or self.count, group and group.initial_lr or self.optimizer.lr, 1)
  end
  local value = self.rate(count or self.count)
  return self.how == SHARE and self.optimizer.groups[1].initial_lr * value or value
end

--- The rates of the optimizer's groups for its next step, like PyTorch's get_last_lr: a list with one number per group.
---@return number[]
function Schedule:get_last_lr()
  local list = {}
  for i, group in ipairs(self.optimizer.groups or { self.optimizer }) do list[i] = group.lr end
  return list
end

--- Counts an optimizer step, and sets the optimizer's rate for the next one.
function Schedule:step()
  self.count = self.count + 1
  apply(self)
end

--- The schedule's kind and step, for load_state_dict.
---@return {name: string, count: integer}
function Schedule:state_dict() return { name = self.name, count = self.count } end

--- Continues at the step of a saved schedule of the same kind.
---@param state {name: string, count: integer}
function Schedule:load_state_dict(state)
  if state.name ~= self.name then
    error(("the saved schedule is %s, but this one is %s"):format(tostring(state.name), self.name))
  end
  self.count = state.count
  apply(self)
end

-- The parameters after the optimizer, in the order of PyTorch and DeepSpeed. Our own schedules have no such order.
local ORDER = {
  LambdaLR = "lr_lambda last_epoch", StepLR = "step_size gamma last_epoch", MultiStepLR = "milestones gamma last_epoch",
  ExponentialLR = "gamma last_epoch", CosineAnnealingLR = "T_max eta_min last_epoch",
  WarmupLR = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
  WarmupDecayLR = "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
  WarmupCosineLR = "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type last_batch_iteration",
  OneCycle = "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
    .. "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom "
    .. "decay_mom_rate last_batch_iteration",
  LRRangeTest = "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase "
    .. "last_batch_iteration",
}

-- Whether a value is a table of options, as opposed to a list or an object.
local function is_options(value, kinds)
  if type(value) ~= "table" or getmetatable(value) then return false end
  local key = next(value)
  return type(key) == "string" or key == nil and not kinds:find "table"
end

-- The options of a call in PyTorch's form, StepLR(optimizer, 10, 0.5), StepLR(optimizer, { step_size = 10 }) or both.
local function in_order(name, keys, optimizer, ...)
  local call, options, names, n = "sched." .. name, {}, {}, select("#", ...)
  for key in (ORDER[name] or ""):gmatch "%S+" do names[#names + 1] = key end
  for at = 1, n do
    local value, key = (select(at, ...)), names[at]
    if at == n and is_options(value, key and keys[key] or "") then
      if value.optimizer ~= nil then error(call .. ": the optimizer is the first argument and an option") end
      for option, given in pairs(value) do
        if options[option] ~= nil then error(("%s: %s is given twice"):format(call, option)) end
        options[option] = given
      end
    elseif value ~= nil and not ORDER[name] then
      error(("%s takes its numbers by name, as in %s { optimizer = optimizer, max_lr = 5e-4%s }"):format(call, call,
        keys.total and ", total = 1000" or ""))
    elseif value ~= nil and not key then
      caller.more(call, "optimizer, " .. table.concat(names, ", "), value, at + 1)
    elseif value ~= nil then options[key] = value end
  end
  options.optimizer = optimizer
  return options
end

-- Checks the options of a schedule, a table or PyTorch's arguments. required: keys, separated by spaces.
local function checked(name, keys, required, options, ...)
  if type(options) == "table" and type(options.set_lr) == "function" then options = in_order(name, keys, options, ...)
  elseif select("#", ...) > 0 or type(options) == "table" and getmetatable(options) then
    error(("sched.%s: the first argument is not an optimizer of ps.optim or ps.initialize; write "
      .. "sched.%s(optimizer, ...) or sched.%s { optimizer = optimizer, ... }"):format(name, name, name))
  end
  options = caller.options(options, "sched." .. name, keys)
  for key in ("optimizer " .. required):gmatch "%S+" do
    if options[key] == nil then error(("sched.%s needs %s, a %s"):format(name, key, keys[key])) end
  end
  return options
end

-- Checks that the warm-up ends within the schedule.
local function check_warmup(name, warmup, total, options, default)
  local steps = options[warmup] or default
  if steps <= options[total] then return end
  error(("sched.%s: %s is %.14g%s, more than %s, %.14g; lower the first or raise the "
    .. "second"):format(name, warmup, steps,
    options[warmup] and "" or " (its default)", total, options[total]))
end

local WARMUP_TO = { optimizer = "table", max_lr = "number", min_lr = "number", warmup = "number", total = "number" }

-- The progress from the end of warm-up (0) to the last step (1).
local function way(options, count)
  local warmup = options.warmup or 0
  return math.min(1, (count - warmup) / math.max(1, options.total - warmup))
end

local function warming(options, count)
  local warmup = options.warmup or 0
  if count < warmup then return options.max_lr * (count + 1) / warmup end
end

--- The rate reaches max_lr in `warmup` steps, then falls along half a cosine to min_lr at step `total` (Loshchilov and
--- Hutter 2017).
---@param options ps.Optimizer|{optimizer: ps.Optimizer, max_lr: number, min_lr?: number, warmup?: integer, total:
---  integer}
---@param ... any after an optimizer: a table with the other options
---@return ps.Schedule
function sched.warmup_cosine(options, ...)
  options = checked("warmup_cosine", WARMUP_TO, "max_lr total", options, ...)
  check_warmup("warmup_cosine", "warmup", "total", options, 0)
  local min_lr = options.min_lr or 0
  return build("warmup_cosine", options, function(count)
    return warming(options, count)
      or min_lr + 0.5 * (options.max_lr - min_lr) * (1 + math.cos(math.pi * way(options, count)))
  end)
end

--- The rate reaches max_lr in `warmup` steps, then falls linearly to min_lr at step `total`.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, max_lr: number, min_lr?: number, warmup?: integer, total:
---  integer}
---@param ... any after an optimizer: a table with the other options
---@return ps.Schedule
function sched.warmup_linear(options, ...)
  options = checked("warmup_linear", WARMUP_TO, "max_lr total", options, ...)
  check_warmup("warmup_linear", "warmup", "total", options, 0)
  local min_lr = options.min_lr or 0
  return build("warmup_linear", options, function(count)
    return warming(options, count) or options.max_lr + (min_lr - options.max_lr) * way(options, count)
  end)
end

local CONSTANT = { optimizer = "table", max_lr = "number", warmup = "number" }

--- The rate rises to max_lr in `warmup` steps (default 0) and stays there.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, max_lr: number, warmup?: integer}
---@param ... any after an optimizer: a table with the other options
---@return ps.Schedule
function sched.constant(options, ...)
  options = checked("constant", CONSTANT, "max_lr", options, ...)
  return build("constant", options, function(count) return warming(options, count) or options.max_lr end)
end

-- DeepSpeed's schedules. Their count lags by one step: the first step runs at the starting rate, and the second at
-- the rate for 0 warm-up steps, which is the same. Options have DeepSpeed's names; docs/config.md lists all of them.

-- The rate with which the optimizer was made. A schedule or a loaded state changes only the current one.
local function own_rate(name, options, key)
  local optimizer = options.optimizer
  if not has_rates(optimizer) then
    local rate = (optimizer.defaults or {}).lr or optimizer.lr
    if not rate then error(("sched.%s: the optimizer has no rate; make it with an lr"):format(name)) end
    return rate
  end
  optim_groups.renew_rates(optimizer)
  if optimizer.base_lr then return optimizer.base_lr end
  error(("sched.%s: the groups have rates (%s), but the optimizer has none of its own: pass %s"):format(name,
    optim_groups.rates(optimizer.groups, "initial_lr"), key))
end

-- The completed share of the warm-up, as a function of the step (from 0), and its number of steps.
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

-- The rate rises from warmup_min_lr to warmup_max_lr. After the warm-up it lies between them, at the fraction that
-- after(step, warmup steps) returns.
local function warmup_then(name, options, high, after)
  local low, share, steps = options.warmup_min_lr or 0, warmup_share(name, options)
  return build(name, options, function(count)
    if count == 0 then return low end
    local step = count - 1
    return low + (high - low) * (step < steps and share(step) or after(step, steps))
  end, ALIKE)
end

local WARMUP = { optimizer = "table", warmup_min_lr = "number", warmup_max_lr = "number", warmup_num_steps = "number",
  warmup_type = "string", last_batch_iteration = "number" }

--- The rate rises to warmup_max_lr (default: the optimizer's rate) in warmup_num_steps and stays there, for all groups
--- alike. last_batch_iteration = n: the schedule begins at the rate of iteration n (default -1: at its start).
---@param options ps.Optimizer|{optimizer: ps.Optimizer, warmup_min_lr?: number, warmup_max_lr?: number,
---  warmup_num_steps?: integer,
---  warmup_type?: "log"|"linear", last_batch_iteration?: integer}
---@param ... any after an optimizer: the other options in the order of DeepSpeed, or in a table
---@return ps.Schedule
function sched.WarmupLR(options, ...)
  options = checked("WarmupLR", WARMUP, "", options, ...)
  local high = options.warmup_max_lr or own_rate("WarmupLR", options, "warmup_max_lr")
  return warmup_then("WarmupLR", options, high, function() return 1 end)
end

local DECAY = { optimizer = "table", total_num_steps = "number", warmup_min_lr = "number", warmup_max_lr = "number",
  warmup_num_steps = "number", warmup_type = "string", last_batch_iteration = "number" }

--- The rate rises to warmup_max_lr in warmup_num_steps, then falls linearly to warmup_min_lr at total_num_steps. All
--- groups get this rate.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, total_num_steps: integer, warmup_min_lr?: number,
---  warmup_max_lr?: number,
---  warmup_num_steps?: integer, warmup_type?: "log"|"linear", last_batch_iteration?: integer}
---@param ... any after an optimizer: the other options in the order of DeepSpeed, or in a table
---@return ps.Schedule
function sched.WarmupDecayLR(options, ...)
  options = checked("WarmupDecayLR", DECAY, "total_num_steps", options, ...)
  check_warmup("WarmupDecayLR", "warmup_num_steps", "total_num_steps", options, WARMUP_STEPS)
  local total = options.total_num_steps
  return warmup_then("WarmupDecayLR", options, options.warmup_max_lr or 1e-3, function(step, warmup)
    return math.max(0, (total - step) / math.max(1, total - warmup))
  end)
end

local COSINE = { optimizer = "table", total_num_steps = "number", lr = "number", warmup_min_ratio = "number",
  warmup_num_steps = "number", cos_min_ratio = "number", warmup_type = "string", last_batch_iteration = "number" }

--- Factors on each group's own rate: from warmup_min_ratio to 1, then half a cosine to cos_min_ratio. With `lr` they
--- are factors on lr, and the schedule calls optimizer:set_lr.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, total_num_steps: integer, lr?: number, warmup_min_ratio?:
---  number,
---  warmup_num_steps?: integer, cos_min_ratio?: number, warmup_type?: "log"|"linear", last_batch_iteration?: integer}
---@param ... any after an optimizer: the other options in the order of DeepSpeed, or in a table
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
  if not options.lr and has_rates(options.optimizer) then return build("WarmupCosineLR", options, factor, SHARE) end
  local rate = options.lr or own_rate("WarmupCosineLR", options, "lr")
  return build("WarmupCosineLR", options, function(count) return rate * factor(count) end)
end

-- The height of step `count` in the cycle, from 0 at its ends to 1 in the middle.
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
    -- The position on the stairs is a product of whole numbers and one division, so it reaches each stair exactly.
    return math.floor(at <= up and at * stairs / up or (total - at) * stairs / down) / stairs
  end, total
end

local CYCLE = { optimizer = "table", cycle_min_lr = "number", cycle_max_lr = "number", decay_lr_rate = "number",
  cycle_first_step_size = "number", cycle_second_step_size = "number", cycle_first_stair_count = "number",
  cycle_second_stair_count = "number", decay_step_size = "number", cycle_momentum = "boolean", cycle_min_mom = "number",
  cycle_max_mom = "number", decay_mom_rate = "number", last_batch_iteration = "number" }

--- One cycle of the rate from cycle_min_lr to cycle_max_lr and back, then decay. With cycle_momentum (the default)
--- beta1 cycles in the opposite direction and beta2 becomes 0.99; the very first step has the smallest beta1, as in
--- DeepSpeed. The schedule is Smith's (2018, "A disciplined approach to neural network hyper-parameters").
---@param options ps.Optimizer|{optimizer: ps.Optimizer, cycle_min_lr: number, cycle_max_lr: number, decay_lr_rate?:
---  number,
---  cycle_first_step_size?: integer, cycle_second_step_size?: integer, cycle_first_stair_count?: integer,
---  cycle_second_stair_count?: integer, decay_step_size?: integer, cycle_momentum?: boolean, cycle_min_mom?: number,
---  cycle_max_mom?: number, decay_mom_rate?: number, last_batch_iteration?: integer}
---@param ... any after an optimizer: the other options in the order of DeepSpeed, or in a table
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
  return build("OneCycle", options, rate, ALIKE, function(count)
    if count == 0 then return low_mom end
    if count <= total then return high_mom - (high_mom - low_mom) * height(count) end
    return high_mom * decay(count, options.decay_mom_rate)
  end, 0.99)
end

local RANGE = { optimizer = "table", lr_range_test_min_lr = "number", lr_range_test_step_size = "number",
  lr_range_test_step_rate = "number", lr_range_test_staircase = "boolean", last_batch_iteration = "number" }

--- A rate that only grows, to find where training diverges (Smith 2017): min x (1 + step_rate x steps / step_size).
---@param options ps.Optimizer|{optimizer: ps.Optimizer, lr_range_test_min_lr?: number, lr_range_test_step_size?:
---  integer,
---  lr_range_test_step_rate?: number, lr_range_test_staircase?: boolean, last_batch_iteration?: integer}
---@param ... any after an optimizer: the other options in the order of DeepSpeed, or in a table
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

-- PyTorch's schedules, under its names. Each computes the rate of a group from the group's initial rate.
-- last_epoch = n: the schedule starts after n + 1 steps (default -1: at its start).
local function per_group(name, options, rate)
  if not has_rates(options.optimizer) then
    error(("sched.%s needs an optimizer whose groups have initial rates"):format(name))
  end
  return build(name, { optimizer = options.optimizer, last_batch_iteration = options.last_epoch }, rate, OWN)
end

local LAMBDA = { optimizer = "table", lr_lambda = "callable|table", last_epoch = "number" }

--- Each group's initial rate times a function of the step (from 0): PyTorch's LambdaLR.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, lr_lambda: function|function[], last_epoch?: integer} a list
---  has one
---  function for each group
---@param ... any after an optimizer: the other options in the order of PyTorch, or in a table
---@return ps.Schedule
function sched.LambdaLR(options, ...)
  options = checked("LambdaLR", LAMBDA, "lr_lambda", options, ...)
  local fns = options.lr_lambda
  if type(fns) == "table" and getmetatable(fns) == nil then
    if #fns ~= #(options.optimizer.groups or {}) then
      error(("sched.LambdaLR: %d functions for %d groups"):format(#fns, #(options.optimizer.groups or {})))
    end
    for i, fn in ipairs(fns) do caller.callable(fn, ("sched.LambdaLR: lr_lambda[%d]"):format(i)) end
  else fns = nil end
  return per_group("LambdaLR", options, function(count, base, group)
    local share = (fns and fns[group] or options.lr_lambda)(count)
    return base * caller.typed(share, "number", "sched.LambdaLR: the result of lr_lambda")
  end)
end

local STEP = { optimizer = "table", step_size = "whole", gamma = "number", last_epoch = "number" }

--- Each group's initial rate, multiplied by gamma after every step_size steps: PyTorch's StepLR.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, step_size: integer, gamma?: number, last_epoch?: integer}
---  gamma default 0.1
---@param ... any after an optimizer: the other options in the order of PyTorch, or in a table
---@return ps.Schedule
function sched.StepLR(options, ...)
  options = checked("StepLR", STEP, "step_size", options, ...)
  caller.whole(options.step_size, "sched.StepLR: step_size", 1)
  local gamma = options.gamma or 0.1
  return per_group("StepLR", options, function(count, base)
    return base * gamma ^ math.floor(count / options.step_size)
  end)
end

local MULTI = { optimizer = "table", milestones = "table", gamma = "number", last_epoch = "number" }

--- Each group's initial rate, multiplied by gamma at each milestone (a step): PyTorch's MultiStepLR.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, milestones: integer[], gamma?: number, last_epoch?: integer}
---  gamma default 0.1; a milestone that is listed twice counts twice
---@param ... any after an optimizer: the other options in the order of PyTorch, or in a table
---@return ps.Schedule
function sched.MultiStepLR(options, ...)
  options = checked("MultiStepLR", MULTI, "milestones", options, ...)
  local gamma = options.gamma or 0.1
  for _, at in ipairs(caller.list(options.milestones, "sched.MultiStepLR: the milestones")) do
    caller.whole(at, "sched.MultiStepLR: a milestone", 0)
  end
  return per_group("MultiStepLR", options, function(count, base)
    local passed = 0
    for _, at in ipairs(options.milestones) do if at <= count then passed = passed + 1 end end
    return base * gamma ^ passed
  end)
end

local EXPONENTIAL = { optimizer = "table", gamma = "number", last_epoch = "number" }

--- Each group's initial rate, multiplied by gamma after every step: PyTorch's ExponentialLR.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, gamma: number, last_epoch?: integer}
---@param ... any after an optimizer: the other options in the order of PyTorch, or in a table
---@return ps.Schedule
function sched.ExponentialLR(options, ...)
  options = checked("ExponentialLR", EXPONENTIAL, "gamma", options, ...)
  return per_group("ExponentialLR", options, function(count, base) return base * options.gamma ^ count end)
end

local ANNEALING = { optimizer = "table", T_max = "whole", eta_min = "number", last_epoch = "number" }

--- From each group's initial rate along half a cosine to eta_min at step T_max, and back (Loshchilov and Hutter 2017):
--- PyTorch's CosineAnnealingLR.
---@param options ps.Optimizer|{optimizer: ps.Optimizer, T_max: integer, eta_min?: number, last_epoch?: integer}
---  eta_min default 0
---@param ... any after an optimizer: the other options in the order of PyTorch, or in a table
---@return ps.Schedule
function sched.CosineAnnealingLR(options, ...)
  options = checked("CosineAnnealingLR", ANNEALING, "T_max", options, ...)
  caller.whole(options.T_max, "sched.CosineAnnealingLR: T_max", 1)
  local low = options.eta_min or 0
  return per_group("CosineAnnealingLR", options, function(count, base)
    return low + (base - low) * (1 + math.cos(math.pi * count / options.T_max)) / 2
  end)
end

local NAMED = {}
for _, name in ipairs { "warmup_cosine", "warmup_linear", "constant", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR",
  "OneCycle", "LRRangeTest" } do
  NAMED[name] = sched[name]
end

--- The schedule of a configuration (cfg.scheduler of ps.config).
---@param scheduler {type: string, params: table}
---@param optimizer ps.Optimizer
---@return ps.Schedule
function sched.from_config(scheduler, optimizer)
  caller.typed(scheduler, "table", "sched.from_config: the configuration, { type =, params = },")
  local options = { optimizer = optimizer }
  for key, value in pairs(scheduler.params or {}) do options[key] = value end
  local make = NAMED[scheduler.type]
  if not make then error("there is no schedule " .. tostring(scheduler.type)) end
  if scheduler.type:find "^warmup_" or scheduler.type == "constant" then
    options.max_lr = options.max_lr or own_rate(scheduler.type, options, "max_lr")
  end
  return make(options)
end

exact.all(Schedule, "schedule:", true)

return foreign.stand(sched, "sched")
