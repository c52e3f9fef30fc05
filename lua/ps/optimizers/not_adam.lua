-- SPDX-License-Identifier: BSD-3-Clause
-- Adam's groups in saved states have the same settings as the groups of some other optimizers, and the same names of
-- averages. Each of those optimizers has a setting of its own, by which its groups are recognized.
local OTHERS = { grad_averaging = "LAMB", momentum_decay = "NAdam", weight_lr_power = "AdamWScheduleFree" }

--- Returns why a saved group with betas does not belong to a kind of Adam, or nil.
---@param group table
---@return string?
return function(group)
  for key, name in pairs(OTHERS) do
    if group[key] ~= nil then return ("has %s, so it is %s's"):format(key, name) end
  end
  if group.decoupled_weight_decay ~= nil and group.amsgrad == nil then return "has no amsgrad, so it is RAdam's" end
  if group.bias_correction == false then return "has bias_correction = False, which is not supported" end
end
