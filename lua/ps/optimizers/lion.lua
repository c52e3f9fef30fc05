-- SPDX-License-Identifier: BSD-3-Clause
-- Lion (Chen et al. 2023), with the settings of lion-pytorch. The class of lion-pytorch does not count updates.
-- Lion8bit stores its average with 8 bits per element.
local in_8_bits = require "ps.optimizers.blocks"
local types = require "ps.core.types"

local function made(name, op, states, aliases)
  return {
    name = name, op = op, states = states,
    settings = { "lr", "betas", "weight_decay" },
    defaults = { lr = 1e-4, betas = { 0.9, 0.99 }, weight_decay = 0 },
    ranges = { betas = types.betas },
    attrs = function(into, group)
      into.lr, into.beta1, into.beta2, into.weight_decay = group.lr, group.betas[1], group.betas[2], group.weight_decay
    end,
    torch = { counts = false, belongs = function(group)
      if not group.betas or group.eps then return "is not Lion's" end
    end },
    aliases = aliases,
  }
end

local Small = made("Lion8bit", "lion8bit_", in_8_bits "exp_avg", { "lion_8bit" })
Small.blocks = true

return {
  Lion = made("Lion", "lion_", { { name = "exp_avg", dtype = "fp32" } },
    { "lion_32bit", "FusedLion", "DeepSpeedCPULion" }),
  Lion8bit = Small,
}
