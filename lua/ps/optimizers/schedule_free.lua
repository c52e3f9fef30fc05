-- SPDX-License-Identifier: BSD-3-Clause
-- Schedule-free AdamW (Defazio et al. 2024), with the settings of the package schedulefree. A parameter
-- has three values:
--   z   the result of plain updates
--   x   the average of z, at which the model is evaluated
--   y   (1 - beta1) * z + beta1 * x, at which steps compute gradients
-- The parameters hold y. eval() computes x from y and z.
local types = require "ps.core.types"

-- Returns values for the next update of a group: the rate, the weight of z in the new average, and the new counters.
local function next_update(group)
  local k, warmup = group.k, group.warmup_steps
  local lr = group.lr * (k < warmup and (k + 1) / warmup or 1)
  local lr_max = math.max(lr, group.lr_max)
  local weight = (k + 1) ^ group.r * lr_max ^ group.weight_lr_power
  local sum = group.weight_sum + weight
  return lr, sum ~= 0 and weight / sum or 0, { k = k + 1, lr_max = lr_max, weight_sum = sum, scheduled_lr = lr }
end

local NAMES = { "k", "weight_sum", "lr_max", "scheduled_lr", "train_mode" }

return { AdamWScheduleFree = {
  name = "AdamWScheduleFree", op = "adam_schedule_free_",
  states = { { name = "z", dtype = "fp32" }, { name = "exp_avg_sq", dtype = "fp32" } },
  settings = { "lr", "betas", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power" },
  defaults = { lr = 2.5e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0, warmup_steps = 0, r = 0,
    weight_lr_power = 2 },
  counters = { k = 0, weight_sum = 0, lr_max = -1, scheduled_lr = 0, train_mode = true },
  ranges = { warmup_steps = types.integer(0, 2 ^ 53), r = types.number(0, 1e3), weight_lr_power = types.number(0, 1e3),
    k = types.integer(0, types.MOST), weight_sum = types.number(0), lr_max = types.number(-1),
    scheduled_lr = types.number(0) },
  problem = function(group)
    if group.betas[1] == 0 then
      return "betas[1] is 0, but the average x is computed by dividing by it; use a number above 0"
    end
  end,
  attrs = function(into, group)
    local lr, average = next_update(group)
    into.lr, into.average = lr, average
    into.beta1, into.beta2, into.eps = group.betas[1], group.betas[2], group.eps
    into.weight_decay, into.bias2 = group.weight_decay, 1 - group.betas[2] ^ (group.k + 1)
  end,
  stepped = function(group)
    local _, _, counters = next_update(group)
    for key, value in pairs(counters) do group[key] = value end
  end,
  average = { state = "z", to = function(group) return 1 - 1 / group.betas[1] end,
    from = function(group) return 1 - group.betas[1] end },
  torch = {
    counts = false, extra = { foreach = true },
    belongs = function(group)
      for _, name in ipairs(NAMES) do
        if group[name] == nil then return ("has no %s: it is not AdamWScheduleFree's"):format(name) end
      end
    end,
  },
  aliases = { "schedule_free_adamw" },
} }
