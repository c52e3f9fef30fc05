-- SPDX-License-Identifier: BSD-3-Clause
-- Stochastic gradient descent with PyTorch's momentum. Without momentum it has no state.
return { SGD = {
  name = "SGD", op = "sgd_",
  states = { { name = "momentum_buffer", dtype = "fp32" } },
  needed = function(group) return group.momentum ~= 0 and 1 or 0 end,
  lacking = function(group) return ("momentum is %g"):format(group.momentum) end,
  settings = { "lr", "momentum", "weight_decay", "dampening", "nesterov" },
  defaults = { lr = 1e-3, momentum = 0, weight_decay = 0, dampening = 0, nesterov = false },
  problem = function(group)
    if group.nesterov and (group.momentum == 0 or group.dampening ~= 0) then
      return ("nesterov needs a momentum above 0 and a dampening of 0; here they are %g and %g"):format(group.momentum,
        group.dampening)
    end
  end,
  attrs = function(into, group)
    into.lr, into.momentum, into.weight_decay = group.lr, group.momentum, group.weight_decay
    into.dampening, into.nesterov = group.dampening, group.nesterov and 1 or 0
  end,
  -- PyTorch does not count SGD's updates. If a momentum buffer exists, there was at least one update.
  torch = { counts = false, belongs = function(group)
    if group.momentum == nil or group.betas or group.alpha or group.ns_steps then return "is not SGD's" end
  end },
} }
