-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/engine_cases.lua JOB.json: trains the cases that engine_oracle.py drew and writes down what came
-- of them. A case names its folders; into its `out` go trained.pt ({model, optimizer} in PyTorch's form) and
-- result.json ({losses, norms, skipped, scales}, or {error}).
local ps = require "ps"
local json = require "cjson"
local gpt2 = require "models.gpt2"

local function read_json(path)
  local f = assert(io.open(path, "rb"))
  local value = json.decode(f:read("*a"))
  f:close()
  return value
end

local function write_json(path, value)
  local f = assert(io.open(path, "wb"))
  f:write(json.encode(value))
  f:close()
end

local function is_bias(name) return name:match("bias$") ~= nil end

local function open(case, config)
  local groups
  if case.groups then groups = { { match = is_bias, weight_decay = 0 }, {} } end
  return ps.initialize {
    model_func = function()
      local module = gpt2.from_pretrained(case.model)
      return case.thaw and module:freeze(case.thaw.names) or module
    end,
    config = config, param_groups = groups, quiet = true,
  }
end

-- Opens an engine whose initial budget can be too small. The error names the key, and that budget is raised.
local function open_fitting(case, config, body)
  for _ = 1, 40 do
    local model, optimizer
    local ok, problem = pcall(function()
      model, optimizer = open(case, config)
      body(model, optimizer)
    end)
    if model then model:close() end
    if ok then return end
    local tier = tostring(problem):match("raise memory%.(%a+)") or tostring(problem):match("set memory%.(%a+)")
    if not tier or type(config.memory) ~= "table" then error(problem, 0) end
    if tier == "disk" then config.memory.disk.limit = math.floor(config.memory.disk.limit * 1.3)
    else config.memory[tier] = math.floor(config.memory[tier] * 1.3) end
  end
  error("no budget that fits was found", 0)
end

-- Converts a number to text that keeps every bit, NaN and infinities.
local function exact(x) return x and ("%.17g"):format(x) or json.null end

-- Returns all micro-batches of a step as one batch, which model:micro_batches splits.
local function whole(case, data, name, step)
  local list = {}
  for micro = 1, case.accumulate do list[micro] = data:tensor(("%s.%d.%d"):format(name, step, micro)) end
  return case.accumulate > 1 and ps.cat(list, 0) or list[1]
end

local function train(case, data, from, to, model, optimizer, result)
  for step = from, to do
    if case.thaw and case.thaw.step == step then model:thaw(case.thaw.names) end
    if case.freeze and case.freeze.step == step then model:freeze(case.freeze.names) end
    local rate = case.rates[tostring(step)]
    if rate then optimizer:set_lr(rate) end
    optimizer:zero_grad()
    local info
    if case.loop == "micro_batches" then
      for out in model:micro_batches(whole(case, data, "x", step), whole(case, data, "y", step)) do
        result.losses[#result.losses + 1] = exact(out.loss:item())
        out.loss:backward()
      end
      info = optimizer:step()
    end
    for micro = 1, case.loop == "hand" and case.accumulate or 0 do
      local key = step .. "." .. micro
      local x, y = data:tensor("x." .. key), data:tensor("y." .. key)
      local loss = model(x, y)
      result.losses[#result.losses + 1] = exact(loss:item())
      model:backward(loss)
      info = optimizer:step()
    end
    result.skipped[#result.skipped + 1] = info.skipped
    result.norms[#result.norms + 1] = exact(info.grad_norm)
    result.scales[#result.scales + 1] = exact(optimizer.scaler and optimizer.scaler.scale or 1)
  end
end

-- Saves the run, and records in `result` the report of ps.inspect about the saved parameters.
local function save(model, optimizer, path, result)
  ps.save({ model = model:state_dict(), optimizer = optimizer:state_dict() }, path)
  result.inspected = {}
  for _, row in ipairs(ps.inspect.inspect_model(model, "*")) do
    result.inspected[row.name] = { exact(row.mean), exact(row.std), exact(row.min), exact(row.max) }
  end
end

local function fresh() return { losses = {}, skipped = {}, norms = {}, scales = {} } end

local function run(case)
  local data = ps.safetensors.open(case.data)
  local result, cut = nil, case.resume_at
  if case.first == "torch" then  -- continues from the state that PyTorch saved after `cut` steps
    open_fitting(case, case.config, function(model, optimizer)
      result = fresh()
      local saved = ps.load(case.started, { lazy = true })
      model:load_state_dict(saved:at "model")
      optimizer:load_state_dict(saved:at "optimizer")
      train(case, data, cut + 1, case.steps, model, optimizer, result)
      save(model, optimizer, case.out .. "/trained.pt", result)
    end)
    return result
  end
  local last = cut or case.steps
  open_fitting(case, case.config, function(model, optimizer)
    result = fresh()
    train(case, data, 1, last, model, optimizer, result)
    if case.second == "ours" then
      ps.checkpoints.save(case.out .. "/checkpoints", { model = model, optimizer = optimizer })
    else
      save(model, optimizer, case.out .. "/trained.pt", result)
    end
  end)
  if case.second == "ours" then                             -- another engine with other budgets in the same run
    local before = result
    open_fitting(case, case.second_config, function(model, optimizer)
      result = fresh()
      for key, list in pairs(before) do
        for i, value in ipairs(list) do result[key][i] = value end
      end
      if case.thaw and case.thaw.step <= cut then model:thaw(case.thaw.names) end
      ps.checkpoints.load(case.out .. "/checkpoints", { model = model, optimizer = optimizer })
      if case.freeze and case.freeze.step <= cut then model:freeze(case.freeze.names) end  -- keeps the loaded state
      train(case, data, cut + 1, case.steps, model, optimizer, result)
      save(model, optimizer, case.out .. "/trained.pt", result)
    end)
  end
  return result
end

local job = read_json(arg[1])
for _, case in ipairs(job) do
  for key, value in pairs(case) do
    if value == json.null then case[key] = nil end
  end
  local ok, result = pcall(run, case)
  if not ok then result = { error = tostring(result) } end
  write_json(case.out .. "/result.json", result)
end
