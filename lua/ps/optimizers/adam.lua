-- SPDX-License-Identifier: BSD-3-Clause
-- Adam (Kingma and Ba, ICLR 2015), and AdamW, which has decoupled weight decay (Loshchilov and Hutter, ICLR 2019).
local not_adam = require "ps.optimizers.not_adam"

local STATES = { { name = "exp_avg", dtype = "fp32" }, { name = "exp_avg_sq", dtype = "fp32" } }

local function attrs(into, group)
  into.adamw, into.lr, into.beta1, into.beta2 = group.decoupled and 1 or 0, group.lr, group.betas[1], group.betas[2]
  into.eps, into.weight_decay = group.eps, group.weight_decay
end

local function made(name, weight_decay, decoupled)
  return {
    name = name, op = "adam_", states = STATES, attrs = attrs,
    settings = { "lr", "betas", "eps", "weight_decay" },
    defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = weight_decay },
    fixed = { decoupled = decoupled },
    torch = {
      extra = { amsgrad = false, decoupled_weight_decay = decoupled },
      belongs = function(group)
        for _, key in ipairs { "momentum", "alpha", "rho" } do
          if group[key] ~= nil and not group.betas then
            return ("has %s and no betas: it is not Adam's or AdamW's"):format(key)
          end
        end
        local other = group.decoupled_weight_decay
        if other ~= nil and group.weight_decay ~= 0 and other ~= decoupled then
          return ("is %s's (decoupled_weight_decay = %s), but this one is %s"):format(other and "AdamW" or "Adam",
            other and "True" or "False", name)
        end
        return not_adam(group)
      end,
    },
  }
end

local W = made("AdamW", 0.01, true)
W.aliases = { "adamw_torch", "adamw_torch_fused", "adamw_hf" }

return { Adam = made("Adam", 0, false), AdamW = W }
