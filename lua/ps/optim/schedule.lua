-- SPDX-License-Identifier: BSD-3-Clause
-- Code that all learning-rate schedules share: the class of schedules, the setting of several groups, the options of a
-- call, and the state of a schedule. The schedules are in ps.optim.sched.
local caller = require "ps.core.caller"
local exact = require "ps.core.exact"
local optim_groups = require "ps.optim.groups"
local saved_groups = require "ps.optim.saved_groups"
local scope = require "ps.core.scope"
local error = caller.error

local schedule = {}

---@class ps.Schedule
---@field count integer number of optimizer steps so far
---@field total? integer number of steps after which the rate is constant; nil if the rate never becomes constant
---@field follows table<integer, true?> the groups, by number, whose rate a script or another schedule has changed. As
--- in PyTorch, their rates are computed from the rate of the previous step (`follow`) instead of the number of steps
---@field began? integer the first step, if the schedule was created with last_epoch or last_batch_iteration
---@field rates number[] the rate that the schedule has last set in each group
---@field parts? ps.Schedule[] the chained schedules (only in ChainedScheduler)
---@field judge? fun(self: ps.Schedule, value: number) changes the rates after an evaluation (only in ReduceLROnPlateau)
local Schedule = require("ps.core.foreign").stand({}, "schedule")
Schedule.__index = Schedule

function Schedule:__tostring()
  return ("%s, %s, lr %g"):format(self.name, caller.counted(self.count, "step"), self:lr())
end

-- Ways in which a schedule sets the rates of several groups:
--   ALIKE   all groups get the schedule's rate
--   SHARE   the schedule's rate is a factor that multiplies each group's rate
--   OWN     the schedule's rate is a function of each group's rate and index
--   HELD    the schedule changes the groups' rates itself
--   nil     the schedule sets the optimizer's rate
local ALIKE, SHARE, OWN, HELD = "alike", "share", "own", "held"
schedule.ALIKE, schedule.SHARE, schedule.OWN, schedule.HELD = ALIKE, SHARE, OWN, HELD

-- Returns whether an optimizer's groups have initial rates. An optimizer without initial rates needs only
-- the method set_lr.
local function has_rates(optimizer)
  local group = (optimizer.groups or {})[1]
  return group ~= nil and group.initial_lr ~= nil
end
schedule.has_rates = has_rates

-- Sets a group's beta1, or its momentum if it has no betas.
local function set_momentum(group, value, beta2)
  if group.betas then group.betas = { value, beta2 or group.betas[2] } else group.momentum = value end
end

-- Returns a group's rate at step `count` if no script or other schedule changes rates. `group` is nil if the optimizer
-- has no groups.
local function rate_at(self, count, group, number)
  if self.how == OWN then return self.rate(count, group.initial_lr, number) end
  local value = self.rate(count)
  return self.how == SHARE and group.initial_lr * value or value
end

-- Returns a group's rate for the next step.
local function next_rate(self, group, number)
  local lr = self.follows[number] and self.follow(self.count, group.lr, group.initial_lr, number)
  if lr then return lr end
  self.follows[number] = nil
  return rate_at(self, self.count, group, number)
end

-- Records the rates that the schedule has set, so that changes by a script or another schedule can be detected.
local function record_rates(self)
  for number, group in ipairs(has_rates(self.optimizer) and self.optimizer.groups or {}) do
    self.rates[number] = group.lr
  end
end

-- Sets the rate and the momentum of the optimizer's next step. `loaded` is true if a state was loaded. In this case,
-- the groups in `follows` keep the rates of the optimizer's state.
local function apply(self, loaded)
  local optimizer = self.optimizer
  if self.how == HELD then return end
  if not self.how or not has_rates(optimizer) then optimizer:set_lr(self:lr())
  else
    local number = 0
    optim_groups.each_rate(optimizer, function(group)
      number = number + 1
      return loaded and self.follows[number] and group.lr or next_rate(self, group, number)
    end)
  end
  record_rates(self)
  if not self.beta1 then return end
  local beta1 = self.beta1(self.count)
  for _, group in ipairs(self.optimizer.groups or {}) do set_momentum(group, beta1, self.beta2) end
end

-- Sets the rates of the first step.
local function start(self)
  self.follows = {}
  for number, group in ipairs(self.follow and self.count == 0 and self.optimizer.groups or {}) do
    self.follows[number] = group.lr ~= group.initial_lr or nil
  end
  apply(self)
end

-- Begins a schedule, which may be a chain, again.
local function restart(self)
  for _, part in ipairs(self.parts or {}) do restart(part) end
  self.count, self.rates = 0, {}
  start(self)
end

-- Sets the rates of a chain of schedules after `count` steps. Each rate depends on the previous one, so the function
-- repeats all steps from the initial rates on.
local function repeat_steps(self, count)
  if has_rates(self.optimizer) then
    optim_groups.each_rate(self.optimizer, function(group) return group.initial_lr end)
  end
  restart(self)
  for _ = 1, count do
    for _, part in ipairs(self.parts) do part:step() end
  end
  self.count = count
end
schedule.repeat_steps = repeat_steps

-- Finds the rates that a script or another schedule has changed since this schedule set them. As in PyTorch, a schedule
-- with `follow` computes its next rates from the changed rates. Other schedules replace the changed rates, and print a
-- note once.
local function find_changes(self)
  if self.how == HELD or not has_rates(self.optimizer) then return end
  for number, group in ipairs(self.optimizer.groups) do
    local set = self.rates[number]
    if set and group.lr ~= set then
      if self.follow then self.follows[number] = true
      elseif not self.told and optim_groups.prints(self.optimizer) then
        self.told = true
        io.stderr:write(("psluajit: sched.%s computes each rate from the number of steps, so it replaces the rate "
          .. "%.6g, which the script or another schedule set, at every step; sched.SequentialLR runs one schedule "
          .. "after another\n"):format(self.name, group.lr))
      end
    end
  end
end

local told = setmetatable({}, { __mode = "k" })

-- Prints a note once, on the first rank, if groups have different initial rates. The note says how the schedule sets
-- their rates.
local function tell_groups(name, optimizer, how)
  local text, alike = optim_groups.rates(optimizer.groups, "initial_lr")
  if alike or told[optimizer] or not optim_groups.prints(optimizer) then return end
  told[optimizer] = true
  local what = "keeps the ratios of the rates of %d groups: %s"
  if how == ALIKE then what = "sets one rate for all %d groups and replaces their own rates (%s)"
  elseif how == SHARE or how == OWN then what = "multiplies the rate of each of %d groups: %s" end
  io.stderr:write("psluajit: sched.", name, " ", what:format(#optimizer.groups, text), "\n")
end

-- Options that are not compared with the options of a saved schedule. options_text converts all other options to text.
local FIRST = { optimizer = true, last_batch_iteration = true, last_epoch = true }

local function text_of(value) return tostring(saved_groups.text_of(value)) end

local function options_text(options)
  local out = {}
  for key, value in pairs(options) do
    if not FIRST[key] and type(value) ~= "function" and not (type(value) == "table" and type(value[1]) ~= "number") then
      out[key] = text_of(value)
    end
  end
  return out
end

-- Raises an error if the engine's configuration already has a schedule. The engine advances that schedule after each
-- step.
local function check_configured(name, optimizer)
  local configured = optimizer.engine and optimizer.engine.scheduler
  if not configured then return end
  error(("sched.%s: this engine's configuration already has the schedule %s, which the engine advances after each "
    .. "step: remove scheduler from the configuration, or create no other schedule for its optimizer"):format(name,
    configured.name))
end

---@alias ps.Follow fun(count: integer, lr: number, base: number, group: integer): number?
---  returns a group's rate at step `count`, computed from its rate at the previous step. Returns nil if the rate does
---  not depend on the previous rate

--- Creates a schedule.
---@param name string
---@param options table options of the call
---@param rate fun(count: integer, base?: number, group?: integer): number returns the rate at step `count`, or a factor
---  that multiplies each group's rate
---@param how? string ALIKE, SHARE, OWN or HELD
---@param more? {beta1?: fun(count: integer): number, beta2?: number, total?: integer, follow?: ps.Follow, later?:
---  ps.Follow} beta1 and beta2: the values for groups with betas. For other groups, beta1 is the momentum. follow: is
---  given for schedules that can continue from changed rates. later: is given for schedules that differ if they are not
---  the first of a SequentialLR. It returns the rate, computed from the rate of the last step before the schedule began
---@return ps.Schedule
function schedule.build(name, options, rate, how, more)
  more = more or {}
  local beta1, beta2 = more.beta1, more.beta2
  if not options.optimizer.set_lr then error(("sched.%s: optimizer is a table without set_lr"):format(name)) end
  for number, group in ipairs(beta1 and options.optimizer.groups or {}) do
    if not group.betas and (beta2 or not group.momentum) then
      error(("sched.%s: cycle_momentum changes %s, but group %d of the optimizer has no %s; set cycle_momentum = false")
        :format(name, beta2 and "Adam's beta1" or "beta1 or momentum", number, beta2 and "betas"
        or "betas and no momentum"))
    end
  end
  local key = options.last_epoch and "last_epoch" or "last_batch_iteration"
  local last = options[key] or -1
  if last < -1 or last % 1 ~= 0 then
    error(("sched.%s: %s is %.14g; it must be a whole number of at least -1"):format(name, key, last))
  end
  check_configured(name, options.optimizer)
  if has_rates(options.optimizer) then
    for number, group in ipairs(options.optimizer.groups) do
      caller.typed(group.lr, "number", ("sched.%s: lr of group %d"):format(name, number))
    end
    optim_groups.renew_rates(options.optimizer)
    tell_groups(name, options.optimizer, how)
  end
  local self = setmetatable({ name = name, optimizer = options.optimizer, rate = rate, how = how, beta1 = beta1,
    beta2 = beta2, count = last + 1, total = more.total, options = options_text(options), follow = more.follow,
    later = more.later, follows = {}, rates = {} }, Schedule)
  self.began = last >= 0 and self.count or nil
  optim_groups.scheduled(options.optimizer, beta1 and (beta2 and "betas" or "beta1") or nil)
  start(self)
  return self
end

--- Returns the rate of optimizer step `count`, counted from 0 (default: the next step). For WarmupCosineLR and the
--- schedules of PyTorch and Hugging Face, returns the rate of the first group.
---@param count? integer
---@return number
function Schedule:lr(count)
  if self.how == HELD then return self:get_last_lr()[1] end
  local group = (self.optimizer.groups or {})[1]
  if not self.follows[1] then return rate_at(self, count or self.count, group, 1) end
  local lr = group.lr
  for at = self.count + 1, count or self.count do
    lr = self.follow(at, lr, group.initial_lr, 1) or rate_at(self, at, group, 1)
  end
  return lr
end

--- Returns a list with the rates of the optimizer's groups for the next step, like PyTorch's get_last_lr.
---@return number[]
function Schedule:get_last_lr()
  local list = {}
  for i, group in ipairs(self.optimizer.groups or { self.optimizer }) do list[i] = group.lr end
  return list
end

--- Counts an optimizer step and sets the rate for the next step. For ReduceLROnPlateau, this function is called after
--- an evaluation instead.
---@param metric? number|ps.Tensor value of an evaluation, for ReduceLROnPlateau
function Schedule:step(metric)
  if scope.is_tensor(metric) then metric = metric:item() end
  if self.judge then
    caller.typed(metric, "number", ("schedule:step of %s: the value of an evaluation, which it needs,"):format(
      self.name))
    self:judge(metric)
    return
  end
  if metric ~= nil then
    error(("schedule:step(value) is only for ReduceLROnPlateau, but this schedule is %s"):format(self.name))
  end
  find_changes(self)
  self.count = self.count + 1
  for _, part in ipairs(self.parts or {}) do part:step() end
  apply(self)
end

--- Counts an optimizer step. Works for a schedule, and for a script's own object with a method `step`.
---@param self ps.Schedule
function schedule.advance(self)
  if self.judge then self.count = self.count + 1 else self:step() end
end

--- Returns the schedule's kind, step count and options, for load_state_dict.
---@return {name: string, count: integer, options: table<string, string>, follows?: integer[], rates?: string[],
---  schedulers?: table[]} rates: the rates that the schedule has set
function Schedule:state_dict()
  local state = { name = self.name, count = self.count, options = self.options }
  for _, key in ipairs(self.kept or {}) do state[key] = text_of(self[key]) end
  if self.follow then
    state.rates = {}
    for number = 1, #self.rates do state.rates[number] = text_of(self.rates[number]) end
  end
  for i, part in ipairs(self.parts or {}) do
    state.schedulers = state.schedulers or {}
    state.schedulers[i] = part:state_dict()
  end
  if next(self.follows) then state.follows = caller.sorted_names(self.follows) end
  return state
end

local function described(name, options, schedulers)
  if schedulers then
    local names = {}
    for i, part in ipairs(schedulers) do names[i] = part.name end
    return ("%s of %s"):format(name, table.concat(names, ", "))
  end
  local keys, parts = caller.sorted_names(options), {}
  for i, key in ipairs(keys) do
    local number = tonumber(options[key])
    parts[i] = ("%s = %s"):format(key, number and ("%.6g"):format(number) or options[key])
  end
  return name .. (parts[1] and " { " .. table.concat(parts, ", ") .. " }" or "")
end

-- Returns whether a saved schedule has the name and the options of this one, and so have its parts.
local function is_same(self, state)
  local options, parts = state.options or {}, self.parts or {}
  if state.name ~= self.name or #(state.schedulers or {}) ~= #parts then return false end
  for key, value in pairs(options) do if self.options[key] ~= value then return false end end
  for key in pairs(state.options and self.options or {}) do if options[key] == nil then return false end end
  for i, part in ipairs(parts) do
    if type(state.schedulers[i]) ~= "table" or not is_same(part, state.schedulers[i]) then return false end
  end
  return true
end

-- Prints a note that a run continues with a schedule which differs from the saved schedule.
local function tell_change(self, state)
  if not optim_groups.prints(self.optimizer) then return end
  io.stderr:write(("psluajit: the saved schedule is %s, and this run's is %s: it continues at its step %d, with the "
    .. "rate %.6g\n"):format(described(state.name, state.options or {}, state.schedulers),
    described(self.name, self.options, self.parts), self.count, self:lr()))
end

-- Continues exactly where a saved schedule with the same name and options was. If the optimizer's state was loaded, its
-- rates are kept.
local function continue(self, state)
  for i, part in ipairs(self.parts or {}) do continue(part, state.schedulers[i]) end
  self.count, self.follows = state.count, {}
  for _, key in ipairs(self.kept or {}) do self[key] = tonumber(state[key]) end
  for _, number in ipairs(self.follow and state.follows or {}) do self.follows[number] = true end
  local kept = has_rates(self.optimizer) and optim_groups.was_loaded(self.optimizer.groups)
  if not kept then return apply(self, true) end
  self.rates = {}
  for number, text in ipairs(state.rates or {}) do self.rates[number] = tonumber(text) end
end

-- Checks the state of a schedule and the states of its parts.
local function check_state(state)
  caller.typed(state, "table", "schedule:load_state_dict: the state")
  if type(state.name) ~= "string" or type(state.count) ~= "number" then
    error("schedule:load_state_dict: the state has no name and count; it is not that of a schedule")
  end
  caller.whole(state.count, "schedule:load_state_dict: count", 0)
  for _, key in ipairs { "follows", "rates", "schedulers" } do
    caller.list(state[key] or {}, "schedule:load_state_dict: " .. key)
  end
  for _, number in ipairs(state.follows or {}) do
    caller.whole(number, "schedule:load_state_dict: a number in follows", 1)
  end
  for _, part in ipairs(state.schedulers or {}) do check_state(part) end
end

--- Continues at the step of a saved schedule. Prints a note if the kind or the options of the saved schedule differ
--- from the kind or the options of this schedule.
---@param state {name: string, count: integer, options?: table<string, string>, follows?: integer[], rates?: string[],
---  schedulers?: table[]}
function Schedule:load_state_dict(state)
  check_state(state)
  if is_same(self, state) then
    continue(self, state)
    return
  end
  if self.parts or state.name ~= self.name then self:continue_at(state.count)
  else
    -- A schedule of the same kind keeps the best loss and its counters, and the rates that a script has changed.
    for _, key in ipairs(self.kept or {}) do self[key] = tonumber(state[key]) or self[key] end
    self.count, self.follows = state.count, {}
    for _, number in ipairs(self.follow and state.follows or {}) do self.follows[number] = true end
    apply(self, true)
  end
  tell_change(self, state)
end

--- Continues after a number of optimizer steps for which no state of a schedule was saved.
---@param count integer number of optimizer steps so far
function Schedule:continue_at(count)
  self.count, self.follows = caller.whole(count, "schedule:continue_at: count", 0), {}
  if self.parts then repeat_steps(self, count) else apply(self, true) end
end

--- Returns a text that describes a schedule which ends before or after the run. Returns nil if the schedule ends with
--- the run, or has no end.
---@param self ps.Schedule
---@param steps integer number of remaining steps of the run
---@return string?
function schedule.mismatch(self, steps)
  local total = self.total
  local last = total and self.count + steps
  if not total or last == total or steps == 0 then return nil end
  if last > total then
    return ("sched.%s ends at step %d, but the run at step %d, %s later, and its last step has the rate %.4g"):format(
      self.name, total, last, caller.counted(last - total, "step"), self:lr(last - 1))
  end
  return ("sched.%s ends at step %d, but the run at step %d: the rate of its last step is %.4g, not %.4g"):format(
    self.name, total, last, self:lr(last - 1), self:lr(total))
end

-- Maps a schedule to the names of its parameters after the optimizer, in the order of PyTorch and DeepSpeed. Each file
-- with schedules adds the parameters of its schedules. psluajit's own schedules have only named parameters.
local ORDER = {}
schedule.order = ORDER

-- Returns whether a value is a table of options. Lists and objects are not tables of options.
local function is_options(value, kinds)
  if type(value) ~= "table" or getmetatable(value) then return false end
  local key = next(value)
  return type(key) == "string" or key == nil and not kinds:find "table"
end

-- Returns the options of a call in PyTorch's form. Options may be given by position, StepLR(optimizer, 10, 0.5), in a
-- table, StepLR(optimizer, { step_size = 10 }), or in both ways.
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

--- Checks the options of a schedule. The options are given as a table or as PyTorch's arguments.
---@param name string
---@param keys table<string, string> the kind of each option
---@param required string required keys, separated by spaces
---@param options any
---@param ... any the arguments after the optimizer, if `options` is an optimizer
---@return table options
function schedule.checked(name, keys, required, options, ...)
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

--- Returns the rate that was given when the optimizer was created. Schedules and loaded states change only the current
--- rate.
---@param name string
---@param options table options of the call
---@param key string the option that the error suggests if there is no such rate
---@return number
function schedule.own_rate(name, options, key)
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

--- Creates a schedule that computes the rate of a group from the group's initial rate.
---@param name string
---@param options table options of the call
---@param rate fun(count: integer, base: number, group: integer): number
---@param more? table the argument `more` of schedule.build
---@return ps.Schedule
function schedule.per_group(name, options, rate, more)
  if not has_rates(options.optimizer) then
    error(("sched.%s needs an optimizer whose groups have initial rates"):format(name))
  end
  return schedule.build(name, options, rate, OWN, more)
end

exact.all(Schedule, "schedule:", true)

return schedule
