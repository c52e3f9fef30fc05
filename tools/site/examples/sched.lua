-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local optimizer = ps.optim.SGD(ps.nn.Linear(2, 2), { lr = 1 })
local schedule = ps.sched.warmup_cosine { optimizer = optimizer, max_lr = 1, min_lr = 0.1, warmup = 2, total = 10 }
for _ = 1, 10 do
  optimizer:step()
  schedule:step()
end
assert(math.abs(schedule:lr() - 0.1) < 1e-6)
