-- SPDX-License-Identifier: BSD-3-Clause
-- The optimizer of an engine: what ps.initialize gives beside the model. Adam or AdamW on chunks, with the clipping,
-- loss scale and accumulation of the configuration. Groups, set_lr, step and zero_grad are those of ps.optim.
local ps = require "ps"
local caller = require "ps.caller"
local state = require "ps.engine.state"
local weigh = require "ps.engine.weigh"
local groups = require "ps.optim_groups"
local text_of = require "ps.optim_text"
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

function Optimizer:__tostring()
  return text_of(self, function(number)
    local params = {}
    for i, row in ipairs(self.built.list) do
      if self.group_of[i] == number - 1 then params[#params + 1] = row.param end
    end
    return params
  end)
end

local optimizer = { methods = Optimizer }

optimizer.NO_BACKWARD = "optimizer:step(): there was no backward since the last step, so there is nothing to update "
  .. "with; call model:backward(loss) first"

local double_out = ffi.new("double[1]")
local NONE = {}                     -- options of step: what those of ps.optim say is in the configuration

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
  groups.check(self.groups, self.kind)
  self:push_groups()
  self.pushed = settings_text(self)
end

--- The factor on gradients in the update: undoes the loss scale and the sum over micro-batches.
---@return number
function Optimizer:grad_scale() return weigh.factor(self.engine) / (self.scaler and self.scaler.scale or 1) end

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
--- A step whose gradients overflowed is skipped, and one in which no target counts: nothing is updated.
---@return {grad_norm?: number, skipped: boolean, accumulating: boolean}
function Optimizer:step(options)
  caller.options(options, "optimizer:step of an engine", NONE)
  local engine, updating = self.engine, false
  engine:check_whole()
  if engine.micro == 0 then error(optimizer.NO_BACKWARD, 2) end
  local info = { skipped = false, accumulating = not engine:at_boundary() }
  if info.accumulating then return info end
  if engine.overlapped and settings_text(self) ~= self.pushed then
    error("the optimizer's settings were changed between backward and step(), but backward has updated parameters "
      .. "already: change them after step(), or set overlap_optimizer = false", 2)
  end
  groups.check(self.groups, self.kind)
  local function update()
    local scale
    if weigh.nothing(engine) then
      info.skipped, self.grad_norm = true, nil
    else
      scale, info.skipped = measure(self)
      if self.scaler then self.scaler:update(info.skipped) end
    end
    if info.skipped then
      ps.check(C.ps_engine_drop_grads(ps.ctx))
    else
      self:push_groups()
      updating = true
      ps.retry(C.ps_engine_update, ps.ctx, scale)
      self.steps = self.steps + 1
    end
  end
  local report = engine.report
  local ok, problem = pcall(report and report.timed or update, report, "step", update)
  if not ok then
    engine:abandon(updating and problem or nil)
    error(problem, 0)
  end
  info.grad_norm = self.grad_norm
  engine:finish_step(info)
  return info
end

--- Drops the gradients. While micro-batches are being accumulated it does nothing, so that the usual loop of zero_grad,
--- forward, backward and step works with any gradient_accumulation_steps. After the step's last backward it gives the
--- step up, but not where backward has updated the parameters (overlap_optimizer).
function Optimizer:zero_grad()
  local engine = self.engine
  engine:check_open()
  if engine:accumulating() then return end
  if engine:at_boundary() and engine.overlapped then
    error("the step cannot be given up any more: backward has updated the parameters already; call optimizer:step(), "
      .. "or set overlap_optimizer = false", 2)
  end
  if engine:at_boundary() then return engine:abandon() end
  ps.check(C.ps_engine_drop_grads(ps.ctx))
  if engine.half_restored then
    engine.half_restored = false
    engine.masters:note()
  end
  engine.cleared = engine.in_step                 -- a forward that follows begins the step again
end

--- Sets the learning rate that groups are scaled from; takes effect on the next step.
---@param lr number
function Optimizer:set_lr(lr)
  groups.set_lr(self, lr)
end

-- What state.lua asks of an optimizer: parameters in order of registration, from 1; m and v are nil where another rank
-- has them.
function Optimizer:count() return #self.built.list end
function Optimizer:slot(i)
  local row = self.built.list[i]
  return { name = row.name, param = row.param, m = row.m, v = row.v,
    master = row.master ~= nil and not rawequal(row.master, row.param) and row.master or nil }
end
function Optimizer:updates(i) return tonumber(C.ps_engine_param_steps(ps.ctx, i - 1)) end
function Optimizer:set_updates(i, t) ps.check(C.ps_engine_set_param_steps(ps.ctx, i - 1, t)) end

--- PyTorch's form: {state = {[n] = {step, exp_avg, exp_avg_sq}}, param_groups}, n from 0 in the order of groups; with a
--- model, the form that ps.checkpoints writes: {tensors by name, values}. Tensors are lent: save them before the next
--- step. Masters are the model's: model:state_dict() has them.
---@param model? any
---@return table
function Optimizer:state_dict(model)
  self.engine:check_whole()
  if model ~= nil then return state.named(self) end
  return state.torch(self)
end

--- Takes over what state_dict gave, in either form, or an open file of it (ps.load with lazy = true). Values are copied
--- into the chunks, a tensor at a time; a step under way is given up.
---@param saved table|ps.TorchFile
function Optimizer:load_state_dict(saved)
  self.engine:check_open()
  self.engine:settle()
  state.load(self, saved)
  ps.check(C.ps_engine_forget(ps.ctx))            -- it may have had masters
  self.engine:mend "optimizer"
end

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
