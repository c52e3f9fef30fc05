-- SPDX-License-Identifier: BSD-3-Clause
-- The runs of monitor_oracle.py: CASES OUT. Each case trains some steps, in one engine or in two that write into the
-- same folder; the values of each step go to OUT.
local json = require "cjson"
local ps = require "ps"
local nn = require "ps.nn"

local function train(case, from, steps, told)
  local model, optimizer = ps.initialize { quiet = true, model_func = function() return nn.Linear(8, 8) end,
    config = { train_batch_size = case.batch * case.accumulate, gradient_accumulation_steps = case.accumulate,
      plan_print = false, [case.type] = case.type ~= "fp32" and { enabled = true } or nil,
      wall_clock_breakdown = case.breakdown, optimizer = { type = "AdamW", params = { lr = case.lr } },
      tensorboard = { enabled = true, output_path = case.folder, job_name = case.job },
      csv_monitor = { enabled = true, output_path = case.folder, job_name = case.job .. "_csv" } } }
  if from > 0 then
    local state = optimizer:state_dict(model)
    state.values.steps, state.values.calls = from, from
    optimizer:load_state_dict(state)
  end
  for step = from + 1, from + steps do
    local sum = 0
    for _ = 1, case.accumulate do
      local loss = (model(ps.randn({ case.batch, 8 }, { dtype = model.weight:dtype() })) ^ 2):mean()
      sum = sum + loss:item()
      model:backward(loss)
      optimizer:step()
    end
    told[#told + 1] = { step * case.batch * case.accumulate, sum / case.accumulate, optimizer.groups[1].lr,
      optimizer.scaler and optimizer.scaler.scale }
  end
  model:close()
end

local given = assert(io.open(arg[1]))
local cases, out = json.decode(given:read "*a"), {}
given:close()
for i, case in ipairs(cases) do
  local ok, problem = pcall(function()
    ps.manual_seed(i)
    local first, again = {}, {}
    train(case, 0, case.steps, first)
    if case.resumed then train(case, case.resumed, case.steps, again) end
    out[i] = { first = first, again = again }
  end)
  if not ok then out[i] = { error = tostring(problem) } end
end
local file = assert(io.open(arg[2], "w"))
file:write(json.encode(out))
file:close()
