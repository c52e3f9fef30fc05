-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local group = ps.init_distributed { seed = 1 }             -- without a launcher, the group has one process
local x = ps.ones { 3 }
group:all_reduce(x)
assert(x:sum():item() == 3 * group:size())
