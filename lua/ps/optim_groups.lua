-- SPDX-License-Identifier: BSD-3-Clause
-- What the optimizers of ps.optim and of engines do alike with their groups, whose settings scripts may change between
-- steps: a rate for all, and the ranges, beyond which an update would go uphill or leave NaN.
local caller = require "ps.caller"
local check = require "ps.config.check"
local types = require "ps.config.types"
local error = caller.error

local groups = {}

--- Refuses groups with a setting out of its range.
---@param list table[]
---@param kind string "AdamW"
function groups.check(list, kind)
  for number, group in ipairs(list) do
    local problem = check.out_of_range(group, types.OPTIMIZER)
    if problem then error(("%s, group %d: %s"):format(kind, number - 1, problem)) end
  end
end

--- Sets the rate that an optimizer's groups are scaled from; takes effect on the next step.
---@param optimizer {groups: table[], lr?: number}
---@param lr number
function groups.set_lr(optimizer, lr)
  local problem = check.problem(lr, types.OPTIMIZER.lr)
  if problem then error("optimizer:set_lr: the rate " .. problem) end
  for _, group in ipairs(optimizer.groups) do group.lr = lr * group.lr_scale end
  optimizer.lr = lr
end

return groups
