-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local nn = ps.nn
local model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
local rows = ps.inspect.inspect_model(model, "*weight")    -- one row of statistics per parameter
assert(#rows == 2)
print(ps.inspect.format_summary(rows))
