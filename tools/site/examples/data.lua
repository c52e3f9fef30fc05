-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local shard = os.tmpname()
ps.data.write_tokens(shard, { 1, 2, 3, 4, 5, 6, 7, 8, 9 })
local loader = ps.data.loader { file = shard, batch = 2, seq = 2, vocab = 10, seed = 1 }
for x, y in loader:epoch() do assert(x:size(0) == 2 and y:size(1) == 2) end
os.remove(shard)
