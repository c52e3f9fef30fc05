-- SPDX-License-Identifier: BSD-3-Clause
-- The engine over plain memory (memory = "plain"): the same configuration, model and optimizer calls, with parameters
-- where they were made and the optimizer of ps.optim. It is what chunks are compared with, bit for bit, and what a
-- model with parameters of unusual types uses.
local ps = require "ps"
local core = require "ps.nn.module"
local optim = require "ps.optim"

local plain = {}

local PlainOptimizer = {}

--- One update, when the step's last micro-batch has been backward; before that it does nothing.
function PlainOptimizer:step()
  local engine = self.engine
  local info = { skipped = false, accumulating = engine.micro ~= engine.accumulate }
  if info.accumulating then return info end
  local ok, done = pcall(self.inner.step, self.inner, { max_norm = self.max_norm, scaler = self.scaler,
    grad_scale = 1 / engine.weight_sum })
  engine.micro, engine.weight_sum = 0, 0
  self.inner:zero_grad()
  if not ok then error(done, 0) end
  done.accumulating = false
  self.steps, self.grad_norm = self.inner.steps, done.grad_norm
  engine.steps = engine.steps + 1
  if engine.scheduler and not done.skipped then engine.scheduler:step() end
  return done
end

function PlainOptimizer:zero_grad()
  if self.engine.micro > 0 and self.engine.micro < self.engine.accumulate then return end
  self.inner:zero_grad()
end

function PlainOptimizer:set_lr(lr)
  self.lr = lr
  return self.inner:set_lr(lr)
end
function PlainOptimizer:state_dict(model) return self.inner:state_dict(model or self.engine.module) end
function PlainOptimizer:load_state_dict(state, model)
  self.inner:load_state_dict(state, model or self.engine.module)
  self.steps = self.inner.steps
end

local PlainEngine = {}

local function bound(self, name, fn)
  local wrapper = function(first, ...)
    if rawequal(first, self) then return fn(self.module, ...) end
    return fn(first, ...)
  end
  rawget(self, "_bound")[name] = wrapper
  return wrapper
end

local instance = {
  __index = function(self, key)
    local own = PlainEngine[key]
    if own ~= nil then return own end
    local cached = rawget(self, "_bound")[key]
    if cached then return cached end
    local module = rawget(self, "module")
    local value = module and module[key]
    if type(value) == "function" then return bound(self, key, value) end
    return value
  end,
  __call = function(self, ...)
    local args = self.arguments(self, ...)
    local training = self.module.training and ps.grad_enabled() and self.accumulate > 1
    self.tokens = training and self.count_tokens(args) or nil
    return self.module(unpack(args, 1, args.n))
  end,
}

--- As Engine:backward.
function PlainEngine:backward(loss, options)
  if self.micro == self.accumulate then
    error(("backward was called %d times since the last optimizer:step(), gradient_accumulation_steps is %d"):format(
      self.micro + 1, self.accumulate), 2)
  end
  local weight = self.accumulate > 1 and (options and options.weight or self.tokens or 1) or 1
  self.weight_sum = self.weight_sum + weight
  local factor = (self.optimizer.scaler and self.optimizer.scaler.scale or 1) * weight
  local ok, problem = pcall(ps.backward, factor ~= 1 and loss * factor or loss)
  if not ok then
    self.micro, self.weight_sum = 0, 0
    self.optimizer.inner:zero_grad()
    error(problem, 0)
  end
  self.micro = self.micro + 1
end

--- Name -> tensor: fp32 masters where the parameter is of a half type, else the parameter; and buffers.
function PlainEngine:state_dict()
  local state, names = self.module:state_dict(), {}
  for name, p in self.module:named_parameters() do names[core.address(p)] = name end
  for _, entry in ipairs(self.optimizer.inner.entries) do
    if entry.master ~= nil then state[names[core.address(entry.param)]] = entry.master end
  end
  return state
end

function PlainEngine:load_state_dict(state, options)
  local masters, all = {}, {}
  for key, value in pairs(options or {}) do all[key] = value end
  for _, entry in ipairs(self.optimizer.inner.entries) do masters[core.address(entry.param)] = entry.master end
  all.into = function(tensor)
    local master = masters[core.address(tensor)]
    if master == nil then return tensor end
    return master
  end
  local result = self.module:load_state_dict(state, all)
  ps.no_grad(function()
    for _, entry in ipairs(self.optimizer.inner.entries) do
      if not rawequal(entry.master, entry.param) then entry.param:copy_(entry.master) end
    end
  end)
  return result
end

function PlainEngine:train(mode)
  self.module:train(mode)
  return self
end
function PlainEngine:eval() return self:train(false) end
function PlainEngine:close() self.closed = true end

-- Parameters of fp32 become the configuration's type; their fp32 values go on as masters.
local function convert(module, precision)
  local masters, replaced = {}, {}
  local function walk(at)
    for _, key in ipairs(at._names) do
      local value, kind = rawget(at, key), at._kind[key]
      if kind == "module" then
        walk(value)
      elseif kind == "param" and value ~= nil and value:dtype() == "fp32" and precision ~= "fp32" then
        local from = core.address(value)
        if not replaced[from] then
          local trains = value:needs_grad()
          local copy = core.Parameter(ps.no_grad(function() return value:detach():to(precision) end))
          copy:requires_grad(trains)
          value:requires_grad(false)
          replaced[from] = copy
          masters[core.address(copy)] = value
        end
        rawset(at, key, replaced[from])
      end
    end
  end
  walk(module)
  return masters
end

-- Optimizer groups by name, as the engine's.
local function groups_of(module, cfg, param_groups)
  local params, chosen, groups = cfg.optimizer.params, param_groups or { {} }, {}
  for number, given in ipairs(chosen) do
    groups[number] = { params = {}, lr = params.lr, betas = { params.betas[1], params.betas[2] }, eps = params.eps,
      weight_decay = params.weight_decay, decoupled = cfg.optimizer.type == "AdamW" }
    for key, value in pairs(given) do if key ~= "match" then groups[number][key] = value end end
  end
  for name, p in module:named_parameters() do
    if p:needs_grad() then
      local at = #chosen
      for number, given in ipairs(chosen) do
        if given.match and given.match(name, p) then
          at = number
          break
        end
      end
      table.insert(groups[at].params, p)
    end
  end
  return groups
end

--- Makes the engine from a request and a configuration that engine/setup.lua has read.
---@param self table with cfg, accumulate, precision, device_name and so on
---@param request table
---@param helpers {arguments: function, count_tokens: function}
function plain.initialize(self, request, helpers)
  local was = ps.set_default_device(self.device_name)
  local ok, module = pcall(request.module and function() return request.module end or request.model_func)
  ps.set_default_device(was)
  if not ok then error(module, 0) end
  if not core.is_module(module) then error("ps.initialize: model_func gave a " .. type(module) .. ", no module", 0) end
  local cfg = self.cfg
  self.module, self.arguments, self.count_tokens = module, helpers.arguments, helpers.count_tokens
  local masters = convert(module, self.precision)
  if self.accumulate > 1 and cfg.grad_accum_dtype == "fp32" then
    for _, p in ipairs(module:parameters()) do p:grad_in_fp32() end
  end
  local groups = groups_of(module, cfg, request.param_groups)
  local inner = optim[cfg.optimizer.type](groups, { lr = cfg.optimizer.params.lr })
  for _, entry in ipairs(inner.entries) do entry.master = masters[core.address(entry.param)] end
  self.optimizer = setmetatable({ engine = self, inner = inner, groups = inner.groups, steps = 0, lr = inner.lr,
    max_norm = cfg.gradient_clipping > 0 and cfg.gradient_clipping or nil }, { __index = PlainOptimizer })
  return setmetatable(self, instance)
end

return plain
