-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local display = ps.progress.new { total = 3, quiet = true }           -- without quiet, a line shows the progress
for step = 1, 3 do display:update(step) end
display:finish()
assert(not pcall(ps.progress.new, { totl = 3 }))           -- unknown options are errors
