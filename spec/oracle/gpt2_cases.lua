-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/gpt2_cases.lua JOB.json: GPT-2's logits, loss and gradients for each folder of gpt2_oracle.py's
-- job (out.safetensors), and the folder written again (back). A refusal is written as text (out.error).
local ps = require "ps"
local json = require "cjson"
local gpt2 = require "models.gpt2"

local f = assert(io.open(arg[1], "rb"))
local job = json.decode(f:read("*a"))
f:close()

local function run(case)
  local model = gpt2.from_pretrained(case.model, case.recompute and { recompute = true } or nil)
  model:eval()
  local data = ps.safetensors.open(case.data)
  local x, y = data:tensor "x", data:tensor "y"
  local out = { logits = ps.no_grad(function() return model(x):keep() end) }
  local loss = model(x, y)
  loss:backward()
  out.loss = loss:detach():clone()
  for name, p in model:named_parameters() do
    local g = p:grad()
    if g then out["grad." .. name] = g end
  end
  ps.save(out, case.out .. "/out.safetensors")
  model:save_pretrained(case.out .. "/back")
end

for _, case in ipairs(job) do
  local ok, problem = pcall(run, case)
  if not ok then
    local error_file = assert(io.open(case.out .. "/out.error", "wb"))
    error_file:write(tostring(problem))
    error_file:close()
  end
  collectgarbage()
end
