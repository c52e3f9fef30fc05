-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local Double = ps.autograd.Function "Double"
function Double.forward(_, x) return x * 2 end
function Double.backward(_, g) return g * 2 end

local x = ps.ones({ 3 }, { requires_grad = true })
Double(x):sum():backward()
assert(x:grad():sum():item() == 6)
