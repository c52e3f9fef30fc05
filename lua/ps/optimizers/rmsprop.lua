-- SPDX-License-Identifier: BSD-3-Clause
-- RMSprop (Tieleman and Hinton 2012) with PyTorch's momentum and without PyTorch's option `centered`.
local types = require "ps.core.types"

return { RMSprop = {
  name = "RMSprop", op = "rmsprop_",
  states = { { name = "square_avg", dtype = "fp32" }, { name = "momentum_buffer", dtype = "fp32" } },
  needed = function(group) return group.momentum ~= 0 and 2 or 1 end,
  lacking = function(group) return ("momentum is %g"):format(group.momentum) end,
  settings = { "lr", "momentum", "alpha", "eps", "weight_decay" },
  defaults = { lr = 1e-2, momentum = 0, alpha = 0.99, eps = 1e-8, weight_decay = 0 },
  ranges = { alpha = types.ratio },
  attrs = function(into, group)
    into.lr, into.alpha, into.eps, into.weight_decay = group.lr, group.alpha, group.eps, group.weight_decay
    into.momentum = group.momentum
  end,
  torch = {
    extra = { centered = false },
    belongs = function(group)
      if group.alpha == nil or group.betas then return "is not RMSprop's" end
      if group.centered then return "is of a centered RMSprop, which keeps grad_avg, too; this one is not centered" end
    end,
  },
} }
