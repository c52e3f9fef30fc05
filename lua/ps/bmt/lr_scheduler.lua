-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's schedules of the learning rate. The rate depends on the iteration number n. L is start_lr, w is
-- warmup_iter, and e is end_iter:
--   schedule     rate if n < w      rate if n >= w
--   NoDecay      L * n / w          L
--   Noam         L * n / w^1.5      L / sqrt(n)
--   Linear       L * n / w          L * (e - n) / (e - w), at least 0
--   Cosine       L * n / w          L * (1 + cos(pi * (n - w) / max(1, e - w))) / 2
--   Exponential  L * n / w          L * gamma^(n - w)
-- The formulas are from BMTrain 1.0.1 (bmtrain/lr_scheduler). A schedule sets the rate of every group when it is
-- created and at each step.
local caller = require "ps.core.caller"
local types = require "ps.core.types"
local error = caller.error

local lr_scheduler = {}

---@class ps.bmt.Scheduler
---@field name string
---@field optimizer table an optimizer with param_groups
---@field start_lr number
---@field warmup_iter integer
---@field end_iter integer
---@field num_iter integer
---@field current_lr number learning rate that was set last
local Scheduler = {}
lr_scheduler.Scheduler = Scheduler

local OPTIONS = { start_lr = "number", warmup_iter = "whole", end_iter = "whole", num_iter = "whole" }
local KEPT = { "start_lr", "warmup_iter", "end_iter", "num_iter" }

--- Sets the groups' learning rate for an iteration. OptimManager:step calls this function after each update.
---@param num_iter? integer the iteration (default: the next iteration)
function Scheduler:step(num_iter)
  self.num_iter = num_iter and caller.whole(num_iter, "scheduler:step: num_iter", 0) or self.num_iter + 1
  local n = self.num_iter
  local lr = n < self.warmup_iter and self:get_lr_warmup(n) or self:get_lr_decay(n)
  if not types.finite(lr) then
    error(("bmt.lr_scheduler.%s: the rate of iteration %d is %s, with warmup_iter = %d and end_iter = %d: the formula "
      .. "divides by 0 there%s"):format(self.name, n, tostring(lr), self.warmup_iter, self.end_iter, self.advice))
  end
  self.current_lr = lr
  for _, group in ipairs(self.optimizer.param_groups) do group.lr = self.current_lr end
end

--- Returns the learning rate for an iteration before warmup_iter.
---@param n integer
---@return number
function Scheduler:get_lr_warmup(n) return self.start_lr * n / self.warmup_iter end

--- Returns a table with start_lr, warmup_iter, end_iter and num_iter.
---@return table<string, number>
function Scheduler:state_dict()
  local state = {}
  for _, key in ipairs(KEPT) do state[key] = self[key] end
  return state
end

--- Restores a state that state_dict returned, and sets the learning rate.
---@param state table<string, number>
function Scheduler:load_state_dict(state)
  for _, key in ipairs(KEPT) do
    if type(state[key]) ~= "number" then error(("the saved schedule has no %s"):format(key)) end
    self[key] = state[key]
  end
  self:step(self.num_iter)
end

-- Defines a schedule. `decay` is the formula after the warmup. `rise` is the formula during the warmup, or nil for L *
-- n / w. `more` has additional options. `advice` names the option to change if a formula divides by 0.
local function schedule(name, decay, rise, more, advice)
  local class = setmetatable({ get_lr_decay = decay, get_lr_warmup = rise, name = name, advice = advice or "" },
    { __index = Scheduler })
  local keys = {}
  for _, from in ipairs { OPTIONS, more or {} } do for key, kind in pairs(from) do keys[key] = kind end end
  --- Creates BMTrain's schedule with this name. A table at the top of lua/ps/bmt/lr_scheduler.lua has the formulas.
  ---@param optimizer ps.bmt.Optimizer
  ---@param options {start_lr: number, warmup_iter: integer, end_iter: integer, num_iter?: integer, gamma?: number}
  --- num_iter: the first iteration (default 0). gamma: only for Exponential (default 0.95).
  ---@return ps.bmt.Scheduler
  return function(optimizer, options)
    local call = "bmt.lr_scheduler." .. name
    if type(optimizer) ~= "table" or type(optimizer.param_groups) ~= "table" then
      error(call .. " needs an optimizer of bmt.optim as its first argument")
    end
    options = caller.options(options, "bmt.lr_scheduler." .. name, keys)
    for _, key in ipairs { "start_lr", "warmup_iter", "end_iter" } do
      if options[key] == nil then error(("%s: %s is missing"):format(call, key)) end
    end
    local self = setmetatable({ optimizer = optimizer, start_lr = options.start_lr,
      warmup_iter = caller.whole(options.warmup_iter, call .. ": warmup_iter", 0),
      end_iter = caller.whole(options.end_iter, call .. ": end_iter", 0), gamma = options.gamma or 0.95,
      num_iter = 0 }, { __index = class })
    self:step(options.num_iter or 0)
    return self
  end
end

lr_scheduler.NoDecay = schedule("NoDecay", function(self) return self.start_lr end)

lr_scheduler.Noam = schedule("Noam", function(self, n) return self.start_lr / math.sqrt(n) end,
  function(self, n) return self.start_lr / math.sqrt(self.warmup_iter) * n / self.warmup_iter end, nil,
  "; use a warmup_iter of at least 1")

lr_scheduler.Linear = schedule("Linear", function(self, n)
  local left = self.start_lr * (self.end_iter - n) / (self.end_iter - self.warmup_iter)
  return left < 0 and 0 or left                      -- math.max could return 0 for a NaN
end, nil, nil, "; use an end_iter that differs from warmup_iter")

lr_scheduler.Cosine = schedule("Cosine", function(self, n)
  local progress = (n - self.warmup_iter) / math.max(1, self.end_iter - self.warmup_iter)
  return math.max(0, self.start_lr * 0.5 * (1 + math.cos(progress * math.pi)))
end)

lr_scheduler.Exponential = schedule("Exponential", function(self, n)
  return math.max(0, self.start_lr * self.gamma ^ (n - self.warmup_iter))
end, nil, { gamma = "number" })

return lr_scheduler
