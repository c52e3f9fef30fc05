-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local t = ps.tensor { { 1, 2, 3 }, { 4, 5, 6 } }
assert(t:sum():item() == 21)
assert(t[{ ps.all, { 0, 2 } }]:size(1) == 2)               -- columns 0 and 1, because the end of a range is exclusive
assert(t:matmul(t:transpose(0, 1)):shape()[2] == 2)        -- the list of sizes itself begins at index 1
