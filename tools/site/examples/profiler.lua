-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
ps.profiler.start()
local x = ps.randn({ 64, 64 })
for _ = 1, 10 do x = x:matmul(x) end
ps.profiler.stop()
local path = os.tmpname()
ps.profiler.save(path)                                     -- the file opens in Perfetto
assert(io.open(path):read "*a":find "matmul")
os.remove(path)
