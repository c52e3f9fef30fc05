-- SPDX-License-Identifier: BSD-3-Clause
-- AdamW with averages that need less memory than fp32. AdamW8bit stores averages with 8 bits per element. AdamWBF16
-- stores averages in bf16, and rounds the values up or down at random, so that small changes are not lost.
local in_8_bits = require "ps.optimizers.blocks"
local not_adam = require "ps.optimizers.not_adam"

local DEFAULTS = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0.01 }
local SETTINGS = { "lr", "betas", "eps", "weight_decay" }

local function attrs(into, group)
  into.lr, into.beta1, into.beta2, into.eps = group.lr, group.betas[1], group.betas[2], group.eps
  into.weight_decay = group.weight_decay
end

local function belongs(group)
  if not group.betas or not group.eps then return "is not AdamW's" end
  return not_adam(group)
end

return {
  AdamW8bit = {
    name = "AdamW8bit", op = "adam8bit_", blocks = true, settings = SETTINGS, defaults = DEFAULTS, attrs = attrs,
    states = in_8_bits("exp_avg", "exp_avg_sq"),
    torch = { belongs = belongs },
    aliases = { "adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit" },
  },
  AdamWBF16 = {
    name = "AdamWBF16", op = "adam_bf16_", settings = SETTINGS, defaults = DEFAULTS, attrs = attrs,
    states = { { name = "exp_avg", dtype = "bf16" }, { name = "exp_avg_sq", dtype = "bf16" } },
    torch = { belongs = belongs },
  },
}
