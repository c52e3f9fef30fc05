-- SPDX-License-Identifier: BSD-3-Clause
-- LAMB (You et al., ICLR 2020), with the settings of timm's class. timm's LAMB also clips gradients by the global norm.
-- This clipping is not included. Use gradient_clipping instead.
return { LAMB = {
  name = "LAMB", op = "lamb_", whole = true,
  states = { { name = "exp_avg", dtype = "fp32" }, { name = "exp_avg_sq", dtype = "fp32" } },
  settings = { "lr", "betas", "eps", "weight_decay", "grad_averaging", "always_adapt", "trust_clip" },
  defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-6, weight_decay = 0.01,
    grad_averaging = true, always_adapt = false, trust_clip = false },
  attrs = function(into, group)
    into.lr, into.beta1, into.beta2, into.eps = group.lr, group.betas[1], group.betas[2], group.eps
    into.weight_decay = group.weight_decay
    into.bias_correction, into.grad_averaging = 1, group.grad_averaging and 1 or 0
    into.always_adapt, into.trust_clip = group.always_adapt and 1 or 0, group.trust_clip and 1 or 0
  end,
  torch = { counts = false, belongs = function(group)
    if group.grad_averaging == nil then return "is not LAMB's" end
  end },
  aliases = { "FusedLamb" },
} }
