-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local gpt2 = require "models.gpt2"
local model, optimizer = ps.initialize {
  model_func = function() return gpt2.new("tiny", { dropout = 0 }) end,
  config = { optimizer = { type = "AdamW", params = { lr = 1e-3 } }, memory = { host = "64MiB" }, plan_print = false },
}
local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
local first, last
for _ = 1, 5 do
  optimizer:zero_grad()
  local loss = model(x, x)
  model:backward(loss)
  optimizer:step()
  last = loss:item()
  first = first or last
end
assert(last < first)
model:close()
