-- SPDX-License-Identifier: BSD-3-Clause
-- ps.autograd: gradients that a script defines or requests itself (docs/autograd.md).
local functions = require "ps.autograd.function"
local grads = require "ps.autograd.grad"
local gradcheck = require "ps.autograd.gradcheck"

return { Function = functions.Function, grad = grads.grad, gradcheck = gradcheck.gradcheck }
