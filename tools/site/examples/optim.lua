-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local model = ps.nn.Linear(4, 1)
local optimizer = ps.optim.AdamW(ps.optim.groups(model, 0.1), { lr = 1e-2, max_norm = 1 })
local x, y = ps.randn { 16, 4 }, ps.randn { 16, 1 }
local first, last
for _ = 1, 50 do
  optimizer:zero_grad()
  local loss = ps.F.mse_loss(model(x), y)
  loss:backward()
  optimizer:step()
  last = loss:item()
  first = first or last
end
assert(last < first)
