-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a model and measures its errors against golden values, for bench/golden.lua and spec/engine/golden_spec.lua.
-- Golden values are float64 losses, the gradients of the first step, and the parameters after the last step. Golden
-- values are in a file of spec/golden, or in a folder with golden.json and model.safetensors. A file of spec/golden
-- contains a seed instead of the initial weights (spec/oracle/make_golden.py).
-- The error of a tensor is the larger of |l2 - l2*| / l2* and max |first8 - first8*| / rms, where * marks golden
-- values. The error of `c_attn.bias` is reported separately: the true gradient of its key part is zero, so Adam moves
-- this part by rounding noise.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local cjson = require "cjson"
local gpt2 = require "models.gpt2"
local shard = require "ps.tensor.shard"

local golden = {}

local function read_json(path)
  local f, why = io.open(path, "rb")
  if not f then error("no golden values: " .. tostring(why), 0) end
  local text = f:read("*a")
  f:close()
  return cjson.decode(text)
end

-- Returns a function that returns random numbers from 0 to 1, by Park and Miller's generator.
-- spec/oracle/make_golden.py uses the same generator.
local function draw(seed)
  local x = seed * 7919 % 2147483647
  local function next_number()
    x = x * 48271 % 2147483647
    return x / 2147483647
  end
  for _ = 1, 10 do next_number() end
  return next_number
end

-- Writes a file with the initial weights that the seed data.seed determines. make_golden.py uses the same rule.
local function write_weights(path, data)
  local names, tensors, number = {}, {}, draw(data.seed)
  for name in pairs(data.final_params) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local values, shape, numel = {}, data.final_params[name].shape, 1
    for _, size in ipairs(shape) do numel = numel * size end
    local norm, bias = name:find("ln_", 1, true), name:match "%.bias$"
    local scale, shift = (norm or bias) and 0.1 or 0.125, norm and not bias and 1 or 0
    for i = 1, numel do values[i] = shift + scale * (2 * number() - 1) end
    tensors[name] = ps.tensor(values, { dtype = "fp64" }):to("fp32"):reshape(shape)
  end
  ps.safetensors.save(path, tensors)
end

-- Returns the error of one tensor. Returns NaN if the tensor contains a NaN, because math.max would ignore it.
local function tensor_error(t, want)
  t = t:to { dtype = "fp32", device = "cpu" }:detach():to("fp64")
  local l2 = t:norm():item()
  local flat, worst = t:reshape(-1), math.abs(l2 - want.l2) / want.l2
  local rms = want.l2 / math.sqrt(t:numel())
  if l2 ~= l2 then return l2 end                         -- a NaN in any element makes the sum of squares NaN
  for i, x in ipairs(want.first8) do
    worst = math.max(worst, math.abs(flat[i - 1]:item() - x) / rms)
  end
  return worst
end

--- Returns the largest error of the named tensors, the error of c_attn.bias, and the name of the tensor with the
--- largest error.
local function compare(tensors, wanted)
  local worst, apart, worst_name = 0, 0, ""
  for name, t in pairs(tensors) do
    local want = wanted[name] or wanted[(name:gsub("^transformer%.", ""))]
    if not want then error("the golden values have no " .. name, 0) end
    local err = ps.scope(tensor_error, t, want)          -- ps.scope frees the tensors of tensor_error at once, because
                                                         -- budgets are tight
    if err ~= err then err = math.huge end
    if name:match("c_attn%.bias$") then apart = math.max(apart, err)
    elseif err >= worst then worst, worst_name = err, name end
  end
  return worst, apart, worst_name
end
golden.compare = compare

-- Checks that each tensor was compared by at least one of the processes, however the tensors are divided among the
-- processes.
local function must_cover(tensors, wanted, group)
  local mine, all = {}, {}
  for name in pairs(tensors) do mine[(name:gsub("^transformer%.", ""))] = 1 end
  for name in pairs(wanted) do all[#all + 1] = name end
  table.sort(all)
  for i, name in ipairs(all) do all[i] = mine[(name:gsub("^transformer%.", ""))] or 0 end
  local there = ps.tensor(all, { dtype = "fp32" })
  if group then group:all_reduce(there) end
  if there:min():item() < 1 then error("some golden values were not compared with any tensor", 0) end
end

-- Gathers a whole tensor from the shards of the ranks along tp. All ranks along tp must call this function.
local function joined(p, t)
  local desc, group = shard.of(p), ps.mesh.group "tp"
  if not desc then return t end
  local shape = t:shape()
  table.insert(shape, 1, group:size())
  local all = ps.empty(shape, { dtype = t:dtype() })
  group:all_gather(all, t:to("cpu"):detach():contiguous():unsqueeze(0))
  local parts = {}
  for i = 1, shape[1] do parts[i] = all:select(0, i - 1) end
  return shard.join(desc, parts)
end

-- Gathers whole tensors. Returns a table of the whole tensors, by the names of parameters.
local function all_joined(module, tensors)
  local list = {}
  for name, p in module:named_parameters() do
    local t = tensors[name]
    if t ~= nil then list[name] = joined(p, t) end
  end
  return list
end

-- Returns a run with plain memory. Runs have the same interface for each kind of memory. `module` is the model.
-- train(x, y) runs forward and backward, and returns the loss. zero_grad() and step() are those of the optimizer.
-- masters() returns the fp32 masters by name. close() ends the run.
local function plain_run(data, weights, options)
  local model = gpt2.new(data.config, { dtype = options.dtype, device = options.device, recompute = options.recompute })
  model:load_weights(weights)
  local optimizer = ps.optim.AdamW(model, data.settings)
  local run = { train = function(x, y)
    local loss = model(x, y)
    loss:backward()
    return loss:item()
  end, module = model,
    zero_grad = function() optimizer:zero_grad() end, step = function() optimizer:step() end, close = function() end }
  function run.masters()
    local params = {}
    for name, p in model:named_parameters() do
      for _, entry in ipairs(optimizer.entries) do
        if ps.same(p, entry.param) then params[name] = entry.master end
      end
    end
    return params
  end
  return run
end

local function chunk_run(data, weights, options)
  local config = {
    device = options.device, chunk_size = options.chunk_size, eviction = options.eviction, plan_print = false,
    overlap_optimizer = false,                         -- because gradients are read before the update
    gradient_accumulation_steps = options.micro_batches, pipeline = options.pipeline,
    tensor_parallel = options.tensor and { size = options.tensor } or nil,
    optimizer = { type = "AdamW", params = data.settings },
    memory = { device = options.device_memory, host = options.host,
      disk = options.disk and { path = options.disk, limit = "256MiB" } or nil },
  }
  if options.zero_stage then config.zero_optimization = { stage = options.zero_stage } end
  if options.dtype ~= "fp32" then config[options.dtype] = { enabled = true } end
  if options.dtype == "fp16" then config.fp16.loss_scale = 1 end         -- the plain run has no loss scale either
  local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
    return gpt2.new(data.config, { dtype = options.dtype, recompute = options.recompute }):load_weights(weights)
  end }
  local function train(x, y)
    local sum, n = 0, 0
    for out in model:micro_batches(x, y) do
      local rows = math.floor(x:size(0) / options.micro_batches) + (n < x:size(0) % options.micro_batches and 1 or 0)
      sum, n = sum + out.loss:item() * rows, n + 1
      model:backward(out.loss)
    end
    return sum / x:size(0)
  end
  return { train = train, module = model.module, stages = inner(model).stages, adds_up = options.micro_batches > 1,
    zero_grad = function() optimizer:zero_grad() end, step = function() optimizer:step() end,
    grad_scale = function() return optimizer:grad_scale() end,
    masters = function() return model:state_dict() end, close = function() model:close() end }
end

-- Returns the gradient of a tied parameter of which several stages have copies. It is the sum of the gradients of all
-- copies. A step computes this sum only before the gradient norm or before the update. `grad` and the result are nil if
-- this rank does not have the parameter. All ranks of a pipeline must call this function for each parameter.
local function whole_gradient(run, name, p, grad)
  local users, ranks = run.stages.vstages_of[name], {}
  -- A step sums a gradient along tp only after it has summed the tied copies.
  if grad ~= nil and run.stages:copies() and shard.is_partial(p) then
    grad = ps.mesh.group "tp":all_reduce(grad:to("fp32"):to("cpu"):clone())
  end
  for _, v in ipairs(users or {}) do ranks[run.stages.ranks[v + 1]] = true end
  if not users or next(ranks, next(ranks)) == nil then return grad end
  local mine = ranks[run.stages.rank] and grad ~= nil
  local sum = mine and grad:to("fp32"):to("cpu"):clone() or ps.zeros(p:shape(), { dtype = "fp32" })
  ps.mesh.group "pp":all_reduce(sum)
  return mine and sum or nil
end

-- Returns this process's rows of a batch. The rows are divided among the ranks as evenly as possible, in the order of
-- the ranks.
local function my_rows(rows, group)
  if not group then return rows end
  local size, rank, mine = group:size(), group:rank(), {}
  if #rows < size then error(("a batch of %d rows cannot be split over %d processes"):format(#rows, size), 0) end
  for i = math.floor(rank * #rows / size) + 1, math.floor((rank + 1) * #rows / size) do mine[#mine + 1] = rows[i] end
  return mine
end

-- Returns the loss over the rows of all processes.
local function whole_loss(value, rows, group)
  if not group then return value end
  local all = ps.empty({ group:size(), 2 }, { dtype = "fp64" })
  group:all_gather(all, ps.tensor({ value * rows, rows }, { dtype = "fp64" }))
  local sums = all:sum(0):tolist()
  return sums[1] / sums[2]
end

local function train(data, run, device, result, note, group)
  for step, all_rows in ipairs(data.tokens) do
    local rows = my_rows(all_rows, group and ps.mesh.group "dp")
    local tokens = ps.tensor(rows, { dtype = "int64", device = device })
    local n = tokens:size(1)
    run.zero_grad()
    local mine = run.train(tokens:narrow(1, 0, n - 1), tokens:narrow(1, 1, n - 1))
    local value = whole_loss(mine, #rows, group and ps.mesh.group "dp")
    local err = math.abs(value - data.losses[step]) / data.losses[step]
    note(("step %d loss %.9f golden %.9f relative error %.2e"):format(step, value, data.losses[step], err))
    result.max_rel_loss_error = math.max(result.max_rel_loss_error, err == err and err or math.huge)
    if step == 1 and run.stages and ps.mesh.group "dp" then
      note("gradients are not compared: those of a tied parameter are summed only within the update")
    elseif step == 1 then
      local grads, worst = {}
      local scaled = group or run.adds_up            -- otherwise the factor is 1, and the gradients are not copied,
                                                     -- because the budgets are too small for copies
      for name, p in run.module:named_parameters() do
        local grad = p:grad()                              -- nil if another rank has the parameter
        if run.stages then grad = whole_gradient(run, name, p, grad) end
        if grad ~= nil then grads[name] = scaled and grad:to("fp32") * run.grad_scale() or grad end
      end
      grads = all_joined(run.module, grads)
      must_cover(grads, data.first_step_grads, group)
      result.max_rel_grad_error, result.c_attn_bias_grad_error, worst = compare(grads, data.first_step_grads)
      note("largest gradient error in " .. worst)
    end
    run.step()
    -- The budgets are so small that even the headers of tensors matter.
    collectgarbage()
  end
end

-- Returns the largest of the numbers that the processes pass, or NaN if one of the numbers is NaN.
local function largest(value, group)
  if not group then return value end
  local all = ps.empty({ group:size() }, { dtype = "fp64" })
  group:all_gather(all, ps.tensor({ value }, { dtype = "fp64" }))
  return all:amax():item()                               -- NaN if any number is NaN
end

---@class golden.Options
---@field device? string
---@field dtype? string
---@field recompute? boolean
---@field memory? "plain"|"chunk" "chunk" uses ps.initialize with the settings below
---@field host? string|integer budget of the host
---@field device_memory? string|integer budget of a device that is not the cpu
---@field disk? string folder of the disk tier
---@field chunk_size? integer number of elements
---@field eviction? string
---@field group? ps.Group the processes that share each batch (memory chunk only)
---@field zero_stage? integer
---@field pipeline? {stages: integer, schedule?: string, virtual_stages?: integer}
---@field tensor? integer number of ranks that share each layer
---@field micro_batches? integer number of micro-batches in a step
---@field note? fun(line: string)

--- Repeats the training run that produced golden values.
---@param path string a file of spec/golden, or a folder with golden.json and model.safetensors
---@param options? golden.Options
---@return {device: string, dtype: string, memory: string, max_rel_loss_error: number, max_rel_grad_error: number,
--- max_rel_param_error: number, c_attn_bias_grad_error: number, c_attn_bias_param_error: number} The errors of
--- gradients are absent in a pipeline whose stages have several ranks each.
function golden.run(path, options)
  local all = { device = "cpu", dtype = "fp32", memory = "plain", micro_batches = 1 }
  for key, value in pairs(options or {}) do all[key] = value end
  local drawn = path:match "%.json$" and os.tmpname() or nil
  local data = read_json(drawn and path or path .. "/golden.json")
  if drawn then ps.scope(write_weights, drawn, data) end
  local o = data.optimizer
  data.settings = { lr = o.lr, betas = o.betas, eps = o.eps, weight_decay = o.weight_decay }
  local start = all.memory == "chunk" and chunk_run or plain_run
  -- Frees the tensors of earlier runs. Otherwise these tensors would use up the budgets.
  if all.memory == "chunk" then
    jit.flush()                                           -- discards compiled loops, which hold references to tensors
    for _ = 1, 2 do collectgarbage() end
  end
  local started, run = pcall(start, data, drawn or path .. "/model.safetensors", all)
  if drawn then os.remove(drawn) end
  if not started then error(run, 0) end
  local result = { device = all.device, dtype = all.dtype, memory = all.memory, max_rel_loss_error = 0 }
  local ok, problem = pcall(function()
    train(data, run, all.device, result, all.note or function() end, all.group)
    local masters = all_joined(run.module, run.masters())
    must_cover(masters, data.final_params, all.group)
    result.max_rel_param_error, result.c_attn_bias_param_error = compare(masters, data.final_params)
    for _, key in ipairs { "max_rel_grad_error", "c_attn_bias_grad_error", "max_rel_param_error",
      "c_attn_bias_param_error" } do result[key] = result[key] and largest(result[key], all.group) end
  end)
  run.close()
  if not ok then error(problem, 0) end
  return result
end

return golden
