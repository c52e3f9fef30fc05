-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's optimizers and OptimManager. The manager controls the steps of an engine with zero_grad, backward,
-- clip_grad_norm and step. An optimizer here only has groups and settings. The model's engine has the optimizer state
-- and performs the updates.
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local check = require "ps.config.check"
local nn_module = require "ps.nn.module"
local dist = require "ps.dist"
local loss_scale = require "ps.bmt.loss_scale"
local mesh = require "ps.dist.mesh"
local optim_groups = require "ps.optim.groups"
local session = require "ps.bmt.session"
local step = require "ps.engine.step"
local types = require "ps.core.types"
local error = caller.error

local optim = {}

-- -- optimizers -------------------------------------------------------------------------------------------------------
---@class ps.bmt.Optimizer
---@field name string
---@field param_groups table[] the groups, with the fields params, lr, betas, eps and weight_decay. Settings can be
--- changed between steps
---@field hold_steps integer number of steps at the beginning of training in which the rate is 0
---@field offload boolean whether the state and its updates are on the host
local Optimizer = {}
Optimizer.__index = Optimizer

function Optimizer:__tostring()
  local lines = {}
  for i, group in ipairs(self.param_groups) do
    lines[i] = ("  group %d: %d parameters, lr %g, betas %g %g, eps %g, weight_decay %g"):format(i, #group.params,
      group.lr, group.betas[1], group.betas[2], group.eps, group.weight_decay)
  end
  return self.name .. "\n" .. table.concat(lines, "\n")
end

local SETTINGS = { lr = "number", betas = "table", eps = "number", weight_decay = "number", hold_steps = "whole" }
local DEFAULTS = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0 }
local GROUP = { params = "any", lr = "number", betas = "table", eps = "number", weight_decay = "number" }

local function tensors_of(value, call)
  if nn_module.is_module(value) then return value:parameters() end
  if scope.is_tensor(value) then value = { value } end
  if type(value) ~= "table" then error(("%s: parameters must be a list, not a %s"):format(call, type(value))) end
  for i, param in ipairs(value) do optim_groups.check_trainable(param, nil, i, call) end
  return value
end

-- Creates parameter groups. `params` is a list of parameters, a module, or a list of groups.
local function groups_of(params, defaults, call)
  local given = { { params = params } }
  if type(params) == "table" and not nn_module.is_module(params) and type(params[1]) == "table" then given = params end
  local list = {}
  for number, one in ipairs(given) do
    local group = { params = tensors_of(caller.options(one, "a group of bmt.optim", GROUP).params, call) }
    for key, default in pairs(DEFAULTS) do
      local value = one[key]
      if value == nil then value = defaults[key] end
      if value == nil then value = default end
      group[key] = value
    end
    group.betas = { group.betas[1], group.betas[2] }
    local problem = check.out_of_range(group, types.OPTIMIZER)
    if problem then error(("%s, group %d: %s"):format(call, number, problem)) end
    list[number] = group
  end
  return list
end

local function new(name, params, options, keys, offload)
  local call = "bmt.optim." .. name
  options = caller.options(options, "bmt.optim." .. name, keys)
  session.need(call)
  return setmetatable({ name = name, param_groups = groups_of(params, options, call), offload = offload,
    hold_steps = options.hold_steps and caller.whole(options.hold_steps, call .. ": hold_steps", 0) or 0 }, Optimizer)
end

-- Raises an error for a call that needs the difference between the parameters before and after an update. An update
-- overwrites the parameters, so the difference would need a copy of all parameters.
local function no_delta(call)
  error(call .. ": updates are not recorded, since that would need a copy of all parameters (record_delta); "
    .. "bmt.inspect.inspect_model has statistics of parameters, whose means before and after a step give the mean "
    .. "update")
end

--- Creates an Adam optimizer. As in BMTrain, the weight decay of fp32 parameters is added to the gradient. The weight
--- decay of bf16 and fp16 parameters is decoupled (AdamW).
---@param params ps.Tensor[]|table[]|ps.nn.Module the parameters, or groups { params =, lr =, ... }
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, hold_steps?: integer} lr:
--- default 1e-3. betas: default { 0.9, 0.999 }. eps: default 1e-8. weight_decay: default 0. hold_steps: the number of
--- steps at the beginning of training in which the rate is 0. For bf16 and fp16 parameters, there is one
--- such step fewer.
---@return ps.bmt.Optimizer
function optim.AdamOptimizer(params, options) return new("AdamOptimizer", params, options, SETTINGS, false) end

local OFFLOAD = { record_delta = "boolean" }
for key, kind in pairs(SETTINGS) do OFFLOAD[key] = kind end

--- Creates an Adam optimizer whose state and updates are on the host, even if a device computes the model.
---@param params ps.Tensor[]|table[]|ps.nn.Module
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, hold_steps?: integer}
---@return ps.bmt.Optimizer
function optim.AdamOffloadOptimizer(params, options)
  if type(options) == "table" and options.record_delta then no_delta "bmt.optim.AdamOffloadOptimizer: record_delta" end
  return new("AdamOffloadOptimizer", params, options, OFFLOAD, true)
end

local function of_manager(self, method)
  error(("%s:%s: the OptimManager does this for its optimizers: manager:add_optimizer(optimizer), manager:%s()"):format(
    self.name, method, method))
end

--- Always raises an error, because updates are not recorded.
function Optimizer:get_avg_delta() no_delta(self.name .. ":get_avg_delta") end
--- Always raises an error, because updates are not recorded.
function Optimizer:get_var_delta() no_delta(self.name .. ":get_var_delta") end
--- Always raises an error, because OptimManager:step performs the updates.
function Optimizer:step() of_manager(self, "step") end
--- Always raises an error, because OptimManager:zero_grad clears the gradients.
function Optimizer:zero_grad() of_manager(self, "zero_grad") end
--- Always raises an error, because OptimManager:state_dict returns the state.
function Optimizer:state_dict() of_manager(self, "state_dict") end
--- Always raises an error, because OptimManager:load_state_dict loads the state.
function Optimizer:load_state_dict() of_manager(self, "load_state_dict") end

-- -- OptimManager -----------------------------------------------------------------------------------------------------
---@class ps.bmt.OptimManager
---@field loss_scale number the loss scale, or 1 if losses are not scaled
---@field optimizers ps.bmt.Optimizer[]
---@field lr_schedulers (ps.bmt.Scheduler|false)[] the schedule of each optimizer, or false if it has none
---@field scaler ps.bmt.LossScale|false
---@field engine ps.Engine|false the engine, set when the model begins to train
---@field waiting table|false a state to load into the engine's optimizer when the model begins to train
---@field scale_before number the loss scale of the last backward; loss_scale may have decreased in clip_grad_norm since
--- then
local OptimManager = {}
optim.Manager = OptimManager
local MANAGER = { loss_scale = "number", loss_scale_factor = "number", loss_scale_steps = "whole",
  min_loss_scale = "number", max_loss_scale = "number", grad_scale = "number" }

local Manager = { __index = function(self, key)
  if key == "loss_scale" then
    local scaler = rawget(self, "scaler")
    return scaler and scaler.scale or 1
  end
  return OptimManager[key]
end, __tostring = function(self)
  return ("OptimManager of %d optimizers, loss scale %g"):format(#self.optimizers, self.loss_scale)
end }

--- Creates a manager that trains a model. The manager has the optimizers and their schedules, scales losses, and
--- performs the steps. After an overflow, the loss scale is divided by loss_scale_factor, and the step is skipped.
--- After loss_scale_steps good steps, the loss scale is multiplied by loss_scale_factor.
---@param options? {loss_scale?: number, loss_scale_factor?: number, loss_scale_steps?: integer, min_loss_scale?:
--- number, max_loss_scale?: number, grad_scale?: number} loss_scale: the initial scale. Without it, losses are not
--- scaled, and gradients that are not finite are an error. loss_scale_factor: default 2. loss_scale_steps: default
--- 1024. min_loss_scale: default 1. max_loss_scale: no bound by default. grad_scale: the number by which the sum of the
--- ranks' gradients is divided (default: the number of ranks with different rows).
---@return ps.bmt.OptimManager
function optim.OptimManager(options)
  local call = "bmt.optim.OptimManager"
  options = caller.options(options, "bmt.optim.OptimManager", MANAGER)
  session.need(call)
  if options.grad_scale and not (options.grad_scale > 0 and options.grad_scale < math.huge) then
    error(("%s: grad_scale is %s; it must be a number above 0"):format(call, tostring(options.grad_scale)))
  end
  return setmetatable({ optimizers = {}, lr_schedulers = {}, engine = false, waiting = false, scale_before = 1,
    grad_scale = options.grad_scale or false, scaler = options.loss_scale and loss_scale.new(options) or false },
    Manager)
end

-- Returns a list with the groups of all optimizers of a manager, in order.
local function groups_in(manager)
  local all = {}
  for _, optimizer in ipairs(manager.optimizers) do
    for _, group in ipairs(optimizer.param_groups) do all[#all + 1] = group end
  end
  return all
end

-- Prepares the engine's optimizer. It is called after the engine has received the model and the manager's groups.
local function taken(self, engine)
  local opt, cfg = engine.optimizer, engine.cfg
  self.engine = engine
  opt.scaler, opt.checks_overflow = self.scaler or nil, self.scaler ~= false
  opt.max_norm = math.huge                     -- each step computes the norm, because clip_grad_norm can need it
  for _, optimizer in ipairs(self.optimizers) do
    if optimizer.offload then cfg.zero_optimization.offload_optimizer = { device = "cpu", ratio = 1 } end
  end
  for _, scheduler in ipairs(self.lr_schedulers) do if scheduler then optim_groups.scheduled(opt) end end
  if self.waiting then opt:load_state_dict(self.waiting) end
  self.waiting = false
end

--- Adds an optimizer. All optimizers of a model must be added before training begins.
---@param optimizer ps.bmt.Optimizer
---@param lr_scheduler? ps.bmt.Scheduler a schedule, whose step is called after each update
function OptimManager:add_optimizer(optimizer, lr_scheduler)
  local call = "OptimManager:add_optimizer"
  if getmetatable(optimizer) ~= Optimizer then
    error(call .. " takes AdamOptimizer or AdamOffloadOptimizer of bmt.optim, not a " .. type(optimizer))
  end
  if lr_scheduler ~= nil and not (type(lr_scheduler) == "table" and type(lr_scheduler.step) == "function") then
    error(call .. ": the schedule is a " .. type(lr_scheduler) .. "; it must be one of bmt.lr_scheduler")
  end
  local run = session.need(call)
  if run.module then error(call .. ": the model has begun to train; add optimizers before its first call") end
  if run.manager and run.manager ~= self then error(call .. ": another OptimManager already has optimizers in "
    .. "this run") end
  run.manager, run.groups, run.taken = self, function() return groups_in(self) end,
    function(engine) taken(self, engine) end
  table.insert(self.optimizers, optimizer)
  table.insert(self.lr_schedulers, lr_scheduler or false)
end

local function begun(self, call)
  if not self.engine then
    error(("OptimManager:%s: no model trains yet: add an optimizer with the model's parameters, and call the model, "
      .. "whose class derives from bmt.DistributedModule, with gradients"):format(call))
  end
  optim_groups.check_same(self.engine.optimizer, "bmt.optim", groups_in(self))
  return self.engine
end

--- Clears the gradients.
function OptimManager:zero_grad()
  if self.engine then self.engine.optimizer:zero_grad() end
end

--- Always raises an error, because backward scales the loss.
function OptimManager:scale_loss() -- luacheck: ignore 212
  error "OptimManager:scale_loss: manager:backward(loss) scales the loss itself"
end

--- Computes the gradients of a loss. The gradients are summed over the ranks and divided by grad_scale. If a step has
--- several calls of backward (gradient_accumulation_steps in init_distributed's config), their gradients are
--- accumulated.
---@param loss ps.Tensor a tensor with one element
function OptimManager:backward(loss)
  local engine = begun(self, "backward")
  local factor = engine.accumulate * (self.grad_scale and mesh.size "dp" / self.grad_scale or 1 / mesh.size "pp")
  if factor ~= 1 and scope.is_tensor(loss) then loss = loss * factor end
  self.scale_before = self.loss_scale
  engine:backward(loss, { weight = 1 })
end

-- Returns the indices of some groups in the list of all groups of the manager, in ascending order.
local function numbers_of(self, groups, call)
  local number_of, numbers, seen = {}, {}, {}
  for number, group in ipairs(groups_in(self)) do number_of[group] = number end
  if type(groups) ~= "table" or #groups == 0 then
    error(call .. ": param_groups is a list of groups, as optimizer.param_groups is")
  end
  for i, group in ipairs(groups) do
    local number = number_of[group]
    if not number then error(("%s: group %d does not belong to this OptimManager's optimizers"):format(call, i)) end
    if seen[number] then error(("%s: group %d is in the list twice"):format(call, i)) end
    numbers[i], seen[number] = number, true
  end
  table.sort(numbers)
  return numbers
end

local CLIP = { norm_type = "any", eps = "number" }

--- Returns the norm of the gradients of some groups, or of all groups. If the factor max_norm / (norm + eps) is less
--- than 1, the next step multiplies these gradients by the factor. Call this function after the last backward of a
--- step, once for each group.
---@param param_groups table[] optimizer.param_groups, or a list with groups of several optimizers
---@param max_norm number
---@param options? {norm_type?: number, eps?: number} norm_type: must be 2 (default). eps: the number that is added to
--- the norm of the scaled gradients (default 1e-6).
---@return number norm the norm without the loss scale; it is not finite if the gradients of any group overflowed
function OptimManager:clip_grad_norm(param_groups, max_norm, options)
  local call = "OptimManager:clip_grad_norm"
  options = caller.options(options, "OptimManager:clip_grad_norm", CLIP)
  if (options.norm_type or 2) ~= 2 then
    error(("%s: norm_type is %s; only 2 is supported"):format(call, tostring(options.norm_type)))
  end
  caller.typed(max_norm, "number", call .. ": max_norm")
  if max_norm < 0 or max_norm ~= max_norm then
    error(("%s: max_norm is %s; it must be a number of at least 0"):format(call, max_norm))
  end
  local engine = begun(self, "clip_grad_norm")
  return step.clip(engine, numbers_of(self, param_groups, call), max_norm, (options.eps or 1e-6) / self.scale_before)
end

-- Runs fn. If fewer than hold_steps steps of an optimizer are done, the rate of its groups is 0 while fn runs.
local function holding(self, fn)
  local was, done = {}, self.engine.optimizer.steps
  local late = self.engine.precision == "fp32" and 0 or 1
  for _, optimizer in ipairs(self.optimizers) do
    if done + late < optimizer.hold_steps then
      for _, group in ipairs(optimizer.param_groups) do was[group], group.lr = group.lr, 0 end
    end
  end
  local ok, result = pcall(fn)
  for group, lr in pairs(was) do group.lr = lr end
  if not ok then error(result, 0) end
  return result
end

--- Updates the parameters, and advances the schedules by a step. If the scaled gradients overflowed, the parameters and
--- the schedules do not change. Instead, the loss scale is lowered, and rank 0 prints a note.
function OptimManager:step()
  local engine = begun(self, "step")
  if engine:accumulating() then
    error(("OptimManager:step: only %d of the %d backwards of a step (gradient_accumulation_steps) have run"):format(
      engine.micro, engine.accumulate))
  end
  local info = holding(self, function() return engine.optimizer:step() end)
  if info.skipped then
    dist.print_rank(("Gradient overflow, change scale from %f to %f"):format(self.scale_before,
      self.loss_scale))
    return
  end
  for _, scheduler in ipairs(self.lr_schedulers) do if scheduler then scheduler:step() end end
end

--- Returns the state, which has these fields: `optimizers`, lr_schedulers, loss_scale and loss_scale_enabled.
--- `optimizers` is this rank's part of the engine's optimizer:state_dict(), with the groups of all optimizers. The
--- tensors are not copied, so save the state before the next step.
---@param gather_opt? boolean true raises an error
---@return table
function OptimManager:state_dict(gather_opt)
  if gather_opt then
    error("OptimManager:state_dict: gather_opt is not supported: a state belongs to one rank; ps.checkpoints "
      .. "writes that of all ranks, "
      .. "with model and optimizer of ps.engine()")
  end
  local engine, schedules = begun(self, "state_dict"), {}
  for i, scheduler in ipairs(self.lr_schedulers) do schedules[i] = scheduler and scheduler:state_dict() or false end
  return { optimizers = { engine.optimizer:state_dict() }, lr_schedulers = schedules, loss_scale = self.loss_scale,
    loss_scale_enabled = self.scaler ~= false, loss_scale_good = self.scaler and self.scaler.good or 0 }
end

--- Loads a result of state_dict. If the model has not been called yet, the state is loaded at the model's first call.
---@param state table
function OptimManager:load_state_dict(state)
  local call = "OptimManager:load_state_dict"
  caller.typed(state, "table", call .. ": the state")
  if type(state.optimizers) ~= "table" or type(state.lr_schedulers) ~= "table" then
    error(call .. ": this is not a state of an OptimManager: it has no optimizers or lr_schedulers")
  end
  if #state.lr_schedulers ~= #self.lr_schedulers then
    error(("%s: the state has %d schedules, but this manager has %d"):format(
      call, #state.lr_schedulers, #self.lr_schedulers))
  end
  if (state.loss_scale_enabled == true) ~= (self.scaler ~= false) then
    error(("%s: losses were %s in the state's run, but are %s here"):format(call,
      state.loss_scale_enabled and "scaled" or "not scaled", self.scaler and "scaled" or "not scaled"))
  end
  if self.engine then self.engine.optimizer:load_state_dict(state.optimizers[1])
  else self.waiting = state.optimizers[1] end
  for i, scheduler in ipairs(self.lr_schedulers) do
    if scheduler and state.lr_schedulers[i] then scheduler:load_state_dict(state.lr_schedulers[i]) end
  end
  if self.scaler then self.scaler.scale, self.scaler.good = state.loss_scale, state.loss_scale_good or 0 end
end

return optim
