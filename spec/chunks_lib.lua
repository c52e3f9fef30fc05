-- SPDX-License-Identifier: BSD-3-Clause
-- Models and runs for the specs of the engine: a case defines the training, and a setting its memory. The same
-- case gives the same losses, parameters and optimizer state, bit for bit, under every setting. Loaded with dofile;
-- both are plain tables, so that a case can be printed, and run in another process (M.child).
local ps = require "ps"
local inner = require("ps.nn.handle").of
local nn = require "ps.nn"
local lfs = require "lfs"
local gpt2 = require "models.gpt2"
local engine_setup = require "ps.engine.setup"
local ranks_lib = require "spec.ranks_lib"
local paths = require "ps.paths"
local ffi = require "ffi"
local C, F = ps.C, ps.functional

local M = {}

-- -- numbers and text ----------------------------------------------------------------------------------------------
--- Returns a random generator with separate state. It returns the same numbers on every machine, and no other code uses
--- it.
---@param seed integer
---@return {int: fun(low: integer, high: integer): integer, pick: fun(list: any[]), chance: fun(p: number): boolean}
function M.random(seed)
  local state = (seed * 7919 + 12345) % 2147483647
  local function next_number()
    state = state * 48271 % 2147483647
    return state / 2147483647
  end
  for _ = 1, 8 do next_number() end
  local r = { next = next_number }
  function r.int(low, high) return low + math.floor(next_number() * (high - low + 1)) end
  function r.pick(list) return list[r.int(1, #list)] end
  function r.chance(p) return next_number() < p end
  return r
end

--- Converts a table of plain values to Lua text.
---@param value any
---@return string
function M.text(value)
  if type(value) == "string" then return ("%q"):format(value) end
  if type(value) ~= "table" then return tostring(value) end
  local keys, parts = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  for _, key in ipairs(keys) do
    local name = type(key) == "number" and "[" .. key .. "]" or key
    parts[#parts + 1] = name .. " = " .. M.text(value[key])
  end
  return "{ " .. table.concat(parts, ", ") .. " }"
end

-- -- models ----------------------------------------------------------------------------------------------------------
-- A multilayer perceptron [B, 16] -> [B, 8]. `case.model` has its special properties.
local MLP = nn.class("TestMLP")

function MLP:init(case)
  local kind = case.model
  self.kind, self.depth, self.recompute = kind, kind == "deep" and 24 or 3, case.recompute
  local width = kind == "large" and 96 or 24
  local where = { dtype = case.dtype }
  self.first = nn.Linear(16, width, where)
  self.layers = nn.ModuleList()
  for i = 1, self.depth do
    local layer = nn.Linear(width, width, where)
    if kind == "tied" and i > 1 then layer.weight = self.layers[0].weight end
    if kind == "frozen" and i ~= 2 then
      layer.weight:requires_grad(false)
      if i == 1 then layer.bias:requires_grad(false) end
    end
    if kind == "unused" and i == 2 then self:param("nobody", ps.ones({ 300 }, where)) end
    self.layers:append(layer)
  end
  self.norm = nn.LayerNorm(width, where)
  self.drop = nn.Dropout(case.dropout or 0)
  self.last = nn.Linear(width, 8, { dtype = case.dtype, bias = kind ~= "tied" })
  if kind == "unused" then self.spare = nn.Linear(40, 40, where) end
  self:buffer("scale", ps.full({ 1 }, 0.5))
end

-- Returns the layers that run, which are all layers or those that the step's number selects.
local function runs(self, i)
  if self.kind ~= "changing" or not self.training then return true end
  return (tonumber(ps.rng().step) * 5 + i * 3) % 4 ~= 0
end

function MLP:forward(x, y)
  x = F.gelu(self.first(x:to(self.first.weight:dtype())))
  for i, layer in self.layers:each() do
    if runs(self, i) then
      local function block(h) return self.drop(F.gelu(layer(h), "tanh")) + h end
      if self.recompute and self.training and ps.grad_enabled() then x = ps.recompute(block, x) else x = block(x) end
    end
  end
  x = self.norm(x)
  if self.kind == "asking" and x:to("fp32"):abs():mean():item() > 0.5 then x = x * 0.5 end
  local logits = self.last(x) * self.scale:to(x:dtype())
  if y == nil then return logits end
  return F.cross_entropy(logits:to("fp32"), y)
end

M.MODELS = { "gpt2", "gpt2", "tied", "frozen", "unused", "large", "changing", "asking" }

--- Returns a function that creates the case's model.
---@param case table
---@return fun(): ps.nn.Module
function M.model_func(case)
  if case.model ~= "gpt2" then return function() return MLP(case) end end
  return function()
    return gpt2.new("tiny", { n_layer = case.n_layer, n_embd = case.n_embd, n_head = 2, n_positions = 16,
      vocab_size = case.vocab, dropout = case.dropout, recompute = case.recompute, dtype = case.dtype })
  end
end

-- Returns a case's batches on the host: [step][micro] = {x, y}.
local function batches(case)
  local all = {}
  for step = 1, case.steps do
    local rows = case.rows[(step - 1) % #case.rows + 1]
    all[step] = {}
    for micro = 1, case.accumulate do
      local x, y
      if case.model == "gpt2" then
        local T = case.lengths[(step - 1) % #case.lengths + 1]
        x = ps.randint(0, case.vocab, { rows, T }, { dtype = "int32" })
        y = ps.randint(0, case.vocab, { rows, T }, { dtype = "int32" })
        if case.masked then y[{ 0, micro - 1 }] = -100 end
      else
        x, y = ps.randn({ rows, 16 }), ps.randint(0, 8, { rows }, { dtype = "int32" })
      end
      all[step][micro] = { x:keep(), y:keep() }
    end
  end
  return all
end

-- -- a run -----------------------------------------------------------------------------------------------------------
local GROUPS = {
  none = nil,
  norms = { { match = function(name) return name:match("bias$") or name:match("ln_") end, weight_decay = 0 },
    { weight_decay = 0.1 } },
  rates = { { match = function(name) return name:match("^first") or name:match("wte") end, lr = 3e-3 },
    { match = function(_, p) return p:dim() >= 2 end, weight_decay = 0.2, betas = { 0.8, 0.95 } }, {} },
  sgd_rates = { { match = function(name) return name:match("^first") or name:match("wte") end, momentum = 0,
      nesterov = false },
    { match = function(_, p) return p:dim() >= 2 end, weight_decay = 0.2, momentum = 0.8, dampening = 0.1,
      nesterov = false }, {} },
}

-- Rates for planning Adam's split: a fast link, a slow link, and one in between. With measured rates, budgets and moves
-- would depend on the machine's load.
local RATES = {
  { up = 1e15, down = 1e15, host_adam = 1e6, device_adam = 1e12, at_once = 1 },
  { up = 1e6, down = 1e6, host_adam = 1e12, device_adam = 1e12, at_once = 1 },
  { up = 12e9, down = 12e9, host_adam = 1e9, device_adam = 1e12, at_once = 1 },
}

--- Returns the arguments of ps.initialize for a case under a setting.
---@param case table
---@param setting table
---@return table
function M.request(case, setting)
  local config = {
    optimizer = { type = case.optimizer, params = { lr = 2e-3, weight_decay = case.weight_decay,
      use_hybrid_adam = setting.hybrid, momentum = case.momentum, nesterov = case.nesterov } },
    gradient_accumulation_steps = case.accumulate, gradient_clipping = case.clip, memory = setting.memory,
    eviction = setting.eviction, chunk_size = setting.chunk_size, prefetch = setting.prefetch,
    overlap_optimizer = setting.overlap, device = setting.device or "cpu", plan_print = false,
    rates = RATES[case.seed % #RATES + 1],
  }
  if case.precision == "bf16" then config.bf16 = { enabled = true, check_grad_overflow = case.checked } end
  if case.precision == "fp16" then
    config.fp16 = { enabled = true, loss_scale = case.loss_scale, initial_scale_power = case.scale_power,
      loss_scale_window = 2, hysteresis = 1 }
  end
  if case.sum_dtype then config.data_types = { grad_accum_dtype = case.sum_dtype } end
  if setting.margin then config.client = { mem_tracer = { margin_use_ratio = setting.margin } } end
  return { model_func = M.model_func(case), config = config, param_groups = GROUPS[case.groups], quiet = true }
end

--- Returns a tensor's contents as a string of bytes.
---@param t ps.Tensor
---@return string
function M.bytes(t)
  local n = tonumber(C.ps_tensor_nbytes(t))
  local buffer = ffi.new("uint8_t[?]", math.max(1, n))
  ps.retry(C.ps_tensor_read, t, buffer, n)
  return ffi.string(buffer, n)
end

--- Returns everything that training changes: masters, parameters, averages, counts, and the states of the scaler and
--- the random numbers.
---@param model ps.Engine
---@param optimizer ps.EngineOptimizer
---@return table<string, string>
function M.state(model, optimizer)
  local all = {}
  for name, t in pairs(model:state_dict()) do all["state " .. name] = M.bytes(t) end
  for name, t in pairs(model.module:state_dict()) do all["param " .. name] = M.bytes(t) end
  local named = optimizer:state_dict(model)
  for name, t in pairs(named.tensors) do
    if not name:match("%.master$") then all["optimizer " .. name] = M.bytes(t) end
  end
  for name, t in pairs(named.values.t) do all["updates " .. name] = tostring(t) end
  local rng = ps.rng()
  all.rng = ("%s %s %s %s %s"):format(rng.seed, rng.offset, rng.step, rng.sample, rng.op)
  all.steps = tostring(optimizer.steps)
  if optimizer.scaler then all.scale = ("%.17g"):format(optimizer.scaler.scale) end
  return all
end

local function look_at(model, case, batch, out)
  model:eval()
  ps.no_grad(function() out[#out + 1] = ("eval %.17g"):format(model(batch[1], batch[2]):item()) end)
  model:train()
  if case.model == "gpt2" then
    out[#out + 1] = "text " .. table.concat(model:generate({ 1, 2, 3 }, 4, { temperature = 1, seed = 5 }), " ")
  end
end

--- Trains `case` on an open engine. `out` collects losses and norms as text.
---@param case table
---@param data table
---@param model ps.Engine
---@param optimizer ps.EngineOptimizer
---@param out string[]
function M.train(case, data, model, optimizer, out)
  if case.look == "before" or case.look == "always" then look_at(model, case, data[1][1], out) end
  for step = 1, case.steps do
    local info
    optimizer:zero_grad()
    for micro = 1, case.accumulate do
      local batch = data[step][micro]
      local loss = model(batch[1], batch[2])
      out[#out + 1] = ("%.17g"):format(loss:item())
      model:backward(loss)
      info = optimizer:step()
    end
    out[#out + 1] = (info.skipped and "skipped " or "norm ") .. (info.grad_norm and case.clip
      and ("%.17g"):format(info.grad_norm) or "")
    if case.look == "between" or case.look == "always" then look_at(model, case, data[step][1], out) end
  end
end

--- Compares the peaks of the tiers with their budgets.
---@param setting table the setting, for the error
function M.check_tiers(setting)
  local info = ffi.new("ps_tier_info")
  for t = 0, C.ps_engine_tier_count(ps.ctx) - 1 do
    ps.check(C.ps_engine_tier_get(ps.ctx, t, info))
    if info.budget > 0 and info.peak > info.budget then
      error(("tier %s held %d bytes, its budget is %d; setting %s"):format(ffi.string(info.name),
        tonumber(info.peak), tonumber(info.budget), M.text(setting)), 0)
    end
  end
end

-- Returns the bytes in use on cpu and sim after all garbage is freed. The JIT's traces hold references to constants,
-- and a checkpointed segment is released only when a scope begins.
---@return integer cpu
---@return integer sim
function M.used()
  jit.flush()
  for _ = 1, 3 do
    collectgarbage()
    ps.scope(function() end)
  end
  collectgarbage()
  return ps.memory("cpu").used, ps.memory("sim").used
end

--- Runs a case under a setting and closes the engine. Returns {out, state}. Checks the budgets.
---@param case table
---@param setting table
---@return {out: string[], state: table<string, string>, moved: integer, resident: integer}
function M.run(case, setting)
  ps.manual_seed(case.seed)
  local data = batches(case)
  local result = { out = {}, moved = 0, resident = 0 }
  local model, optimizer = ps.initialize(M.request(case, setting))
  local ok, problem = pcall(function()
    M.train(case, data, model, optimizer, result.out)
    result.state = M.state(model, optimizer)
    if setting.memory ~= "plain" then M.check_tiers(setting) end
    result.forecast = inner(model).plan.forecast
    result.resident = inner(model).plan.forecast and inner(model).plan.forecast.resident or 0
    local info = ffi.new("ps_tier_info")
    for t = 1, C.ps_engine_tier_count(ps.ctx) - 1 do
      ps.check(C.ps_engine_tier_get(ps.ctx, t, info))
      result.moved = result.moved + tonumber(info.bytes_up + info.bytes_down)
    end
  end)
  model:close()
  if not ok then error(problem, 0) end
  return result
end

--- Returns the first difference between two results, or nil if there is none.
---@param a table
---@param b table
---@return string?
function M.difference(a, b)
  for i = 1, math.max(#a.out, #b.out) do
    if a.out[i] ~= b.out[i] then return ("output %d: %s, not %s"):format(i, tostring(b.out[i]), tostring(a.out[i])) end
  end
  for name, value in pairs(a.state) do
    if b.state[name] ~= value then
      local there = b.state[name]
      if there and #value < 100 and name:match("^[usr]") then return ("%s: %s, not %s"):format(name, there, value) end
      return name .. (there and " differs" or " is not there")
    end
  end
end

-- -- drawing ---------------------------------------------------------------------------------------------------------
--- Draws a case from its seed.
---@param seed integer
---@return table
function M.case(seed)
  local r = M.random(seed)
  local case = { seed = seed, model = M.MODELS[seed % #M.MODELS + 1], steps = 4 }
  case.precision = r.pick { "fp32", "bf16", "fp16" }
  case.accumulate = r.pick { 1, 1, 2, 3 }
  case.clip = r.chance(0.4) and r.pick { 0.05, 1, 100 } or nil
  case.optimizer, case.weight_decay = r.pick { "Adam", "AdamW" }, r.pick { 0, 0.1 }
  case.groups = r.pick { "none", "norms", "rates" }
  if seed < 400 and seed % 6 == 5 then              -- the other seeds draw the same cases as before SGD was added
    case.optimizer, case.momentum, case.nesterov = "SGD", seed % 12 == 5 and 0.9 or nil, seed % 24 == 5 or nil
    if case.groups == "rates" then case.groups = "sgd_rates" end
  end
  case.dropout, case.recompute = r.pick { 0, 0, 0.2 }, r.chance(0.4)
  case.look = r.pick { "never", "before", "between", "always" }
  case.rows = r.chance(0.4) and { 3, 2, 5 } or { 3 }
  if case.accumulate > 1 and case.precision ~= "fp32" then case.sum_dtype = r.pick { "fp32", case.precision } end
  if case.precision == "bf16" then case.checked = r.chance(0.3) end
  if case.precision == "fp16" then
    if r.chance(0.3) then case.loss_scale = r.pick { 64, 2 ^ 24 } else case.loss_scale = 0 end
    case.scale_power = r.pick { 8, 26, 30 }
  end
  if r.chance(0.15) then case.dtype = "bf16" end           -- parameters that are made in bf16
  if case.model == "gpt2" then
    case.n_layer, case.n_embd, case.vocab = r.int(1, 3), r.pick { 16, 32, 40 }, r.pick { 65, 130, 256 }
    case.lengths = r.chance(0.4) and { 16, 8 } or { 12 }
    case.masked = r.chance(0.4)
  end
  return case
end

-- Returns the approximate number of bytes in a case's chunks: 10 to 18 per parameter, plus the waste at their ends.
local function state_bytes(case)
  local numel = 0
  local was = ps.set_default_device("meta")
  for _, p in ipairs(M.model_func(case)():parameters()) do numel = numel + math.ceil(p:numel() / 128) * 128 end
  ps.set_default_device(was)
  return numel * (case.optimizer ~= "SGD" and 18 or (case.momentum or case.groups == "sgd_rates") and 14 or 10)
end

--- Draws a setting for a case. Its budgets can be slightly too small.
---@param case table
---@param r table the random generator
---@param folder string the folder for disk files
---@return table
function M.setting(case, r, folder)
  local bytes, KIB = state_bytes(case), 1024
  local function size(factor) return math.floor(bytes * factor / KIB + 96) * KIB end
  local setting = { memory = {}, hybrid = r.chance(0.7) }
  setting.eviction = r.pick(require "ps.config.policies")
  setting.chunk_size = r.pick { nil, 1024, 1024, 2048, 3000, 8192, 70000 }
  setting.prefetch = r.pick { true, true, false, 65536 }
  setting.overlap = r.pick { "auto", true, false }
  setting.margin = r.pick { 0, 0.5, 1 }
  setting.device = r.pick { "cpu", "cpu", "sim" }
  if setting.device == "sim" and r.chance(0.9) then
    setting.memory.device = size(r.pick { 0.2, 0.3, 0.5, 1, 2 }) .. ""
  end
  if r.chance(0.6) then
    setting.memory.disk = { path = folder, limit = size(2.5) .. "" }
    setting.memory.host = size(r.pick { 0.1, 0.25, 0.5, 0.8, 2 }) .. ""
  elseif r.chance(0.7) then
    setting.memory.host = size(r.pick { 1.1, 1.6, 3 }) .. ""
  end
  for key, value in pairs(setting.memory) do
    if type(value) == "string" then setting.memory[key] = tonumber(value) end
  end
  if setting.memory.disk then setting.memory.disk.limit = tonumber(setting.memory.disk.limit) end
  return setting
end

--- Draws a setting whose budgets are too small together: the last tier has no room for all chunks, so some are resident
--- on the first tier.
---@param case table
---@param r table the random generator
---@param folder string the folder for disk files
---@return table
function M.scarce(case, r, folder)
  local setting = M.setting(case, r, folder)
  local bytes, KIB, share = state_bytes(case), 1024, r.pick { 0.3, 0.5, 0.7, 0.9 }
  local function size(factor) return math.floor(bytes * factor / KIB + 96) * KIB end
  setting.hybrid, setting.margin = true, r.pick { 0.1, 0.8 }
  local first, kind = size(1.15 - share), r.pick { "device and host", "device and host", "host and disk", "all" }
  setting.device = kind == "host and disk" and "cpu" or "sim"
  if kind == "device and host" then setting.memory = { device = first, host = size(share) }
  elseif kind == "host and disk" then setting.memory = { host = first, disk = { path = folder, limit = size(share) } }
  else setting.memory = { device = first, host = size(0.2), disk = { path = folder, limit = size(share) } } end
  return setting
end

--- Raises the budget that an error reports as too small. Returns the error's text, or nil for another error.
---@param problem any
---@param setting? table the setting to change (default: problem.setting)
---@return string?
function M.grow(problem, setting)
  if type(problem) ~= "table" or (problem.name ~= "ENOMEM" and problem.name ~= "ENOSPC") then return end
  setting = setting or problem.setting
  local memory, text = setting.memory, problem.msg
  local tier = text:match("raise memory%.(%a+)") or text:match("set memory%.(%a+)")
  if tier == "disk" and memory.disk then memory.disk.limit = math.floor(memory.disk.limit * 1.2 / 4096) * 4096
  elseif tier and tier ~= "disk" and memory[tier] then memory[tier] = math.floor(memory[tier] * 1.15 / 1024) * 1024
  else error("no setting of " .. M.text(setting) .. " is named by: " .. text, 0) end
  return text
end

--- Raises a setting's budgets to approximately the smallest ones under which `run` succeeds: by the number of missing
--- bytes in a failed step's error, if it has one, or else like M.grow. Fixed numbers would be right on only one
--- machine, since the workspace of a matrix product depends on the processor's instructions.
---@param setting table the setting whose budgets are raised
---@param run fun() runs one or more steps under the setting, and leaves no engine open
---@param anyone? fun(yes: boolean): boolean for several ranks, which all call it; returns whether `yes` is true on any
--- of them
---@return integer refused How often `run` failed.
function M.fit(setting, run, anyone)
  anyone = anyone or function(yes) return yes end
  local function raise(problem)
    local of_op = type(problem) == "table" and (problem.sub == "OP_CHUNKS" or problem.sub == "OP_BESIDE_RESIDENTS")
    local budget = of_op and setting.memory[problem.tier]
    if not budget or problem.lacking == 0 then return M.grow(problem, setting) end
    setting.memory[problem.tier] = budget + math.ceil(problem.lacking / 1024) * 1024
    return true
  end
  for refused = 0, 60 do
    local ok, problem = pcall(run)
    if not anyone(not ok) then return refused end
    local raised = not ok and raise(problem) and true or false
    if not anyone(raised) then error(problem, 0) end
  end
  error("no budgets were found that fit: " .. M.text(setting), 0)
end

--- Runs a case under a setting, and raises budgets that are too small.
---@param case table
---@param setting table the setting whose budgets are raised
---@return table result
---@return string[] refusals the errors about budgets
function M.run_fitting(case, setting)
  local refusals = {}
  for _ = 1, 30 do
    local ok, result = pcall(M.run, case, setting)
    if ok then return result, refusals end
    local text = M.grow(result, setting)
    if not text then
      error(("%s\n%s"):format(tostring(result), type(result) == "table" and result.traceback or ""), 0)
    end
    refusals[#refusals + 1] = text
  end
  error("budgets that fit were not found: " .. refusals[#refusals], 0)
end

--- Sets up the specs of a file: one thread, since there are thousands of tiny steps, and a folder that is removed at
--- the end.
---@param busted {setup: function, teardown: function}
---@param take fun(folder: string) receives the folder before the first spec
function M.scratch(busted, take)
  local folder, threads
  busted.setup(function()
    folder, threads = ranks_lib.folder(), ps.threads()
    ps.set_threads(1)
    take(folder)
  end)
  busted.teardown(function()
    ps.set_threads(threads)
    ranks_lib.remove(folder)
  end)
end

--- Counts the files and folders in a folder.
---@param folder string
---@return integer
function M.entries(folder)
  local n = -2
  for _ in lfs.dir(folder) do n = n + 1 end
  return n
end

--- Closes the open engine if there is one.
function M.close_engine()
  local open = engine_setup.current()
  if open then open:close() end
  assert(not open, "an engine was left open")
end

--- Returns a small case.
---@param changes? table
---@return table
function M.small(changes)
  local case = { seed = 5, model = "large", steps = 2, precision = "bf16", accumulate = 1, optimizer = "AdamW",
    weight_decay = 0.1, groups = "none", dropout = 0.2, look = "never", rows = { 4 } }
  for key, value in pairs(changes or {}) do case[key] = value end
  return case
end

--- Runs Lua text in another psluajit process, in which `L` is M. Returns its output and exit code.
---@param script string
---@param environment? string
---@return string output
---@return integer code
function M.child(script, environment)
  local name = os.tmpname()
  local f = assert(io.open(name, "wb"))
  f:write(("local L = dofile(%q)\n"):format(M.path), script)
  f:close()
  local command = ("env -u LUA_INIT %s '%s' %s 2>&1; echo \"|$?\""):format(environment or "", paths.exe, name)
  local p = assert(io.popen(command))
  local out, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  os.remove(name)
  return out, tonumber(code)
end

M.path = debug.getinfo(1, "S").source:sub(2)

return M
