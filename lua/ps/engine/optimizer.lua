-- SPDX-License-Identifier: BSD-3-Clause
-- The optimizer of an engine: what ps.initialize gives beside the model. Adam or AdamW on chunks, with the clipping,
-- loss scale and accumulation of the configuration. Groups, set_lr, step and zero_grad are those of ps.optim.
local ps = require "ps"
local core = require "ps.nn.module"
local ffi, C = ps.ffi, ps.C

---@class ps.EngineOptimizer
---@field groups table[] each with lr, betas, eps, weight_decay, which may be changed between steps
---@field steps integer updates done; skipped ones not counted
---@field scaler? ps.LossScaler
---@field max_norm? number
---@field checks_overflow boolean a step whose gradients are not finite is skipped
---@field grad_norm? number of the last step, before clipping; nil when nothing asked for it
local Optimizer = {}
Optimizer.__index = Optimizer

local double_out = ffi.new("double[1]")

local function finite(x) return x == x and x ~= math.huge and x ~= -math.huge end

--- Hands the groups' settings to the engine.
function Optimizer:push_groups()
  local values = ffi.new("ps_adam_group")
  for i, group in ipairs(self.groups) do
    values.lr, values.beta1, values.beta2 = group.lr, group.betas[1], group.betas[2]
    values.eps, values.weight_decay = group.eps, group.weight_decay
    values.adamw = group.decoupled and 1 or 0
    ps.check(C.ps_engine_set_group(ps.ctx, i - 1, values))
  end
end

-- What an update in backward went by; it may not change before step() has told the user.
local function settings_text(self)
  local parts = {}
  for i, g in ipairs(self.groups) do
    parts[i] = ("%.17g %.17g %.17g %.17g %.17g"):format(g.lr, g.betas[1], g.betas[2], g.eps, g.weight_decay)
  end
  return table.concat(parts, ";")
end

--- Called by the engine before the backward that finishes a step.
function Optimizer:before_last_backward()
  self:push_groups()
  self.pushed = settings_text(self)
end

local function scale_of(self) return self.scaler and self.scaler.scale or 1 end

--- The factor on gradients in the update: undoes the loss scale and the sum over micro-batches.
---@return number
function Optimizer:grad_scale() return 1 / (scale_of(self) * self.engine.weight_sum) end

-- Norm, overflow, clipping: gives the scale, and whether the step is skipped.
local function measure(self)
  local scale = self:grad_scale()
  self.grad_norm = nil
  if not self.engine:measures() then return scale, false end
  ps.check(C.ps_engine_sq_norm(ps.ctx, double_out))
  local norm = math.sqrt(double_out[0]) * scale
  self.grad_norm = norm
  if not finite(norm) then
    if self.checks_overflow then return scale, true end
    error(("%s: the gradient norm is %s; the parameters were left as they are"):format(self.kind, tostring(norm)), 0)
  end
  if self.max_norm then scale = scale * math.min(1, self.max_norm / (norm + 1e-6)) end
  return scale, false
end

--- One update, when the step's last micro-batch has been backward; before that it does nothing. Ends the step's scope.
---@return {grad_norm?: number, skipped: boolean, accumulating: boolean}
function Optimizer:step()
  local engine = self.engine
  local info = { skipped = false, accumulating = not engine:at_boundary() }
  if info.accumulating then return info end
  if engine.overlapped and settings_text(self) ~= self.pushed then
    error("the optimizer's settings were changed between backward and step(), but backward has updated parameters "
      .. "already: change them after step(), or set overlap_optimizer = false", 2)
  end
  local ok, problem = pcall(function()
    local scale
    scale, info.skipped = measure(self)
    if self.scaler then self.scaler:update(info.skipped) end
    if info.skipped then
      ps.check(C.ps_engine_drop_grads(ps.ctx))
    else
      self:push_groups()
      ps.retry(C.ps_engine_update, ps.ctx, scale)
      self.steps = self.steps + 1
    end
  end)
  if not ok then
    engine:abandon()
    error(problem, 0)
  end
  info.grad_norm = self.grad_norm
  engine:finish_step(info)
  return info
end

--- Drops the gradients. While micro-batches are being accumulated it does nothing, so that the usual loop of zero_grad,
--- forward, backward and step works with any gradient_accumulation_steps.
function Optimizer:zero_grad()
  if self.engine:accumulating() then return end
  ps.check(C.ps_engine_drop_grads(ps.ctx))
end

--- Sets the learning rate that groups are scaled from; takes effect on the next step.
---@param lr number
function Optimizer:set_lr(lr)
  for _, group in ipairs(self.groups) do group.lr = lr * group.lr_scale end
  self.lr = lr
end

-- The state of parameter i (from 1) by PyTorch's names.
local function state_of(self, i)
  local row = self.built.list[i]
  return { exp_avg = row.m, exp_avg_sq = row.v }, tonumber(C.ps_engine_param_steps(ps.ctx, i - 1))
end

--- PyTorch's form: {state = {[i] = {step, exp_avg, exp_avg_sq}}, param_groups}, i from 0; with a model, the form that
--- ps.checkpoint writes: {tensors by name, values}. Tensors are lent: save them before the next step.
---@param model? any
---@return table
function Optimizer:state_dict(model)
  if model ~= nil then return self:named_state() end
  local state, groups = {}, {}
  for i in ipairs(self.built.list) do
    local tensors, t = state_of(self, i)
    if t > 0 then
      tensors.step = t
      state[i - 1] = tensors
    end
  end
  for number, group in ipairs(self.groups) do
    local params = {}
    for i, of in ipairs(self.group_of) do if of == number - 1 then params[#params + 1] = i - 1 end end
    groups[number] = { lr = group.lr, betas = { group.betas[1], group.betas[2] }, eps = group.eps,
      weight_decay = group.weight_decay, params = params }
  end
  return { state = state, param_groups = groups }
end

--- As ps.Optimizer:state_dict(model).
function Optimizer:named_state()
  local tensors = {}
  local values = { kind = self.kind, steps = self.steps, t = {}, groups = {} }
  for i, row in ipairs(self.built.list) do
    local state, t = state_of(self, i)
    values.t[row.name] = t
    if t > 0 then
      tensors[row.name .. ".exp_avg"], tensors[row.name .. ".exp_avg_sq"] = state.exp_avg, state.exp_avg_sq
    end
    if not rawequal(row.master, row.param) then tensors[row.name .. ".master"] = row.master end
  end
  for number, group in ipairs(self.groups) do
    local kept = {}
    for _, key in ipairs { "lr", "eps", "weight_decay" } do kept[key] = ("%.17g"):format(group[key]) end
    kept.betas = ("%.17g %.17g"):format(group.betas[1], group.betas[2])
    kept.decoupled = group.decoupled
    values.groups[number] = kept
  end
  return { tensors = tensors, values = values }
end

local function copy_state(to, from, name)
  if from == nil then error("the saved optimizer has no state for parameter " .. name, 0) end
  if not core.same_shape(from:shape(), to:shape()) then
    error(("optimizer state of %s is [%s], the parameter is [%s]"):format(name, table.concat(from:shape(), ", "),
      table.concat(to:shape(), ", ")), 0)
  end
  ps.no_grad(function() to:copy_(from) end)
end

local function load_named(self, saved)
  local values, tensors = saved.values, saved.tensors
  if values.kind ~= self.kind then
    error(("the saved optimizer is %s, this one is %s"):format(tostring(values.kind), self.kind), 0)
  end
  for i, row in ipairs(self.built.list) do
    local t = values.t[row.name]
    if not t then error("the saved optimizer has no state for parameter " .. row.name, 0) end
    if t > 0 then
      copy_state(row.m, tensors[row.name .. ".exp_avg"], row.name)
      copy_state(row.v, tensors[row.name .. ".exp_avg_sq"], row.name)
    end
    if not rawequal(row.master, row.param) and tensors[row.name .. ".master"] ~= nil then
      copy_state(row.master, tensors[row.name .. ".master"], row.name)
    end
    ps.check(C.ps_engine_set_param_steps(ps.ctx, i - 1, t))
  end
  for number, group in ipairs(self.groups) do
    for key, value in pairs(values.groups[number] or {}) do
      local a, b = tostring(value):match("^(%S+) (%S+)$")
      if a then value = { tonumber(a), tonumber(b) } end
      group[key] = type(value) == "string" and tonumber(value) or value
    end
  end
  self.steps = values.steps
end

local function load_torch(self, saved)
  local most = 0
  if #saved.param_groups ~= #self.groups then
    error(("the saved optimizer has %d groups, this one has %d"):format(#saved.param_groups, #self.groups), 0)
  end
  for i, row in ipairs(self.built.list) do
    local state = saved.state[i - 1]
    local t = state and state.step or 0
    if type(t) == "cdata" then t = t:item() end
    if state then
      copy_state(row.m, state.exp_avg, row.name)
      copy_state(row.v, state.exp_avg_sq, row.name)
    end
    ps.check(C.ps_engine_set_param_steps(ps.ctx, i - 1, t))
    most = math.max(most, t)
  end
  for number, group in ipairs(self.groups) do
    local from = saved.param_groups[number]
    for _, key in ipairs { "lr", "eps", "weight_decay" } do group[key] = from[key] or group[key] end
    if from.betas then group.betas = { from.betas[1], from.betas[2] } end
  end
  self.steps = most
end

--- Takes over what state_dict gave, in either form. Values are copied into the chunks.
---@param saved table
function Optimizer:load_state_dict(saved)
  if saved.values then load_named(self, saved) else load_torch(self, saved) end
end

local optimizer = {}

--- Splits the trained parameters into groups as `groups_of` says (default: one) and hands all to the engine.
---@param engine ps.Engine
---@param built ps.engine.Built
---@param cfg ps.Config
---@return ps.EngineOptimizer
function optimizer.new(engine, built, cfg)
  local params = cfg.optimizer.params
  local self = setmetatable({ engine = engine, built = built, kind = cfg.optimizer.type, steps = 0, group_of = {},
    groups = {}, max_norm = cfg.gradient_clipping > 0 and cfg.gradient_clipping or nil }, Optimizer)
  local chosen = engine.param_groups or { {} }
  for number, given in ipairs(chosen) do
    local group = { lr = params.lr, betas = { params.betas[1], params.betas[2] }, eps = params.eps,
      weight_decay = params.weight_decay, decoupled = cfg.optimizer.type == "AdamW" }
    for key, value in pairs(given) do if key ~= "match" then group[key] = value end end
    group.lr_scale = params.lr ~= 0 and group.lr / params.lr or 1
    self.groups[number] = group
  end
  for _, row in ipairs(built.list) do
    row.group = #chosen - 1
    for number, given in ipairs(chosen) do
      if given.match and given.match(row.name, row.param) then
        row.group = number - 1
        break
      end
    end
  end
  -- In the order of ps.optim and PyTorch, group by group: that of norms, too.
  table.sort(built.list, function(a, b)
    if a.group ~= b.group then return a.group < b.group end
    return a.index < b.index
  end)
  for i, row in ipairs(built.list) do self.group_of[i] = row.group end
  self.lr = params.lr
  return self
end

return optimizer
