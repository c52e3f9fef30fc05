-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local F = ps.F
local logits = ps.tensor { { 2, 0, 0 }, { 0, 2, 0 } }
local loss = F.cross_entropy(logits, ps.tensor({ 0, 1 }, { dtype = "int64" }))
assert(math.abs(loss:item() + math.log(math.exp(2) / (math.exp(2) + 2))) < 1e-6)
