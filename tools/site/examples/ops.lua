-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local x = ps.tensor { -1, 2 }
assert(ps.ops.relu(x):sum():item() == 2)                   -- scripts write x:relu()
