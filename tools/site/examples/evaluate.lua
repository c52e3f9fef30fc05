-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
assert(ps.evaluate.accuracy({ "a", "b", "c" }, { "a", "x", "c" }) == 2 / 3)
