-- SPDX-License-Identifier: BSD-3-Clause
-- Muon (Jordan et al. 2024) orthogonalizes the momentum of a matrix with the Newton-Schulz iteration. It updates only
-- the matrices inside the model. Other parameters belong to groups with another optimizer (`rest`).
local types = require "ps.core.types"

local ADJUST = { original = 0, match_rms_adamw = 1, spectral_unclamped = 2 }

return { Muon = {
  name = "Muon", op = "muon_", whole = true, matrices = true, rest = "AdamW",
  states = { { name = "momentum_buffer", dtype = "fp32" } },
  settings = { "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn" },
  defaults = { lr = 1e-3, weight_decay = 0.1, momentum = 0.95, nesterov = true,
    ns_coefficients = { 3.4445, -4.775, 2.0315 }, eps = 1e-7, ns_steps = 5, adjust_lr_fn = "original" },
  ranges = { ns_steps = types.integer(1, 99), adjust_lr_fn = types.enum "original|match_rms_adamw|spectral_unclamped",
    momentum = types.number(0, 1), ns_coefficients = types.numbers(3) },
  attrs = function(into, group)
    into.lr, into.momentum, into.weight_decay, into.eps = group.lr, group.momentum, group.weight_decay, group.eps
    into.a, into.b, into.c = unpack(group.ns_coefficients)
    into.nesterov, into.steps, into.adjust = group.nesterov and 1 or 0, group.ns_steps, ADJUST[group.adjust_lr_fn]
  end,
  torch = { counts = false, belongs = function(group)
    if group.ns_steps == nil then return "is not Muon's" end
  end },
} }
