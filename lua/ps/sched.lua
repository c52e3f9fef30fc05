-- SPDX-License-Identifier: BSD-3-Clause
-- Learning-rate schedules. A schedule sets the rate of the optimizer's next step when it is made and at every :step();
-- the loop is  loss:backward(); opt:step(); sched:step().  Groups with a rate of their own keep their proportion to it.
local sched = {}

---@class ps.Schedule
---@field count integer optimizer steps behind us
local Schedule = {}
Schedule.__index = Schedule

local function build(name, options, rate)
  if type(options) ~= "table" or not options.optimizer then
    error("sched." .. name .. " takes a table with an optimizer", 3)
  end
  local self = setmetatable({ name = name, optimizer = options.optimizer, rate = rate, count = 0 }, Schedule)
  self.optimizer:set_lr(self:lr())
  return self
end

--- The rate of optimizer step number `count` (from 0; default: the next one).
---@param count? integer
---@return number
function Schedule:lr(count) return self.rate(count or self.count) end

--- One optimizer step has passed.
function Schedule:step()
  self.count = self.count + 1
  self.optimizer:set_lr(self:lr())
end

function Schedule:state_dict() return { name = self.name, count = self.count } end

function Schedule:load_state_dict(state)
  if state.name ~= self.name then
    error(("the saved schedule is %s, this one is %s"):format(tostring(state.name), self.name), 2)
  end
  self.count = state.count
  self.optimizer:set_lr(self:lr())
end

-- Share of the way from the end of warm-up (0) to the last step (1).
local function way(options, count)
  local warmup = options.warmup or 0
  return math.min(1, (count - warmup) / math.max(1, options.total - warmup))
end

local function warming(options, count)
  local warmup = options.warmup or 0
  if count < warmup then return options.max_lr * (count + 1) / warmup end
end

--- max_lr is reached in `warmup` steps, then falls along half a cosine to min_lr at step `total`.
---@param options {optimizer: ps.Optimizer, max_lr: number, min_lr?: number, warmup?: integer, total: integer}
---@return ps.Schedule
function sched.warmup_cosine(options)
  local min_lr = options.min_lr or 0
  return build("warmup_cosine", options, function(count)
    return warming(options, count)
      or min_lr + 0.5 * (options.max_lr - min_lr) * (1 + math.cos(math.pi * way(options, count)))
  end)
end

--- The same along a straight line.
---@param options {optimizer: ps.Optimizer, max_lr: number, min_lr?: number, warmup?: integer, total: integer}
---@return ps.Schedule
function sched.warmup_linear(options)
  local min_lr = options.min_lr or 0
  return build("warmup_linear", options, function(count)
    return warming(options, count) or options.max_lr + (min_lr - options.max_lr) * way(options, count)
  end)
end

--- max_lr after an optional warm-up.
---@param options {optimizer: ps.Optimizer, max_lr: number, warmup?: integer}
---@return ps.Schedule
function sched.constant(options)
  return build("constant", options, function(count) return warming(options, count) or options.max_lr end)
end

return sched
