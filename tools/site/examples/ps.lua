-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
ps.manual_seed(1)
local x = ps.randn({ 2, 3 }, { requires_grad = true })
local y = (x * x):sum()
y:backward()
assert(ps.cat({ x, x }, 0):size(0) == 4)
assert(math.abs(x:grad()[0][0]:item() - 2 * x[0][0]:item()) < 1e-6)
