-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local gpt2 = require "models.gpt2"
local shard, ids = os.tmpname(), {}
for i = 1, 400 do ids[i] = i % 7 end
ps.data.write_tokens(shard, ids)
local loader = ps.data.loader { file = shard, batch = 4, seq = 16, vocab = 256, seed = 1 }
local model = gpt2.new("tiny", { dropout = 0 })
local loss = ps.train.evaluate(model, loader:epoch())     -- the mean over all batches
assert(loss > 5)                                           -- log(256) = 5.5 before training
os.remove(shard)
