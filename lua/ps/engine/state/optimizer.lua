-- SPDX-License-Identifier: BSD-3-Clause
-- The optimizer of an engine, which ps.initialize returns together with the model. It is an optimizer of ps.optimizers
-- whose parameters and states are in chunks. Clipping, the loss scale and accumulation are set by the configuration.
-- Groups, set_lr, step and zero_grad work as in ps.optim.
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local average = require "ps.optim.average"
local exact = require "ps.core.exact"
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local state = require "ps.optim.state"
local step = require "ps.engine.step"
local groups = require "ps.optim.groups"
local engine_groups = require "ps.optim.engine_groups"
local saved_groups = require "ps.optim.saved_groups"
local optimizers = require "ps.optimizers"
local updates = require "ps.optimizers.update"
local scope = require "ps.core.scope"
local text_of = require "ps.optim.text"
local unused = require "ps.engine.step.unused"
local error = caller.error
local ffi, C = native.ffi, native.C

---@class ps.EngineOptimizer
---@field groups table[] groups of parameters, each with its optimizer (kind) and its settings; settings may be changed
---  between steps
---@field states ps.optimizers.State[][] for each group, the optimizer states that its parameters have in addition to
---  the fp32 values
---@field steps integer number of updates; skipped updates are not counted
---@field scaler? ps.LossScaler
---@field max_norm? number
---@field checks_overflow boolean true if a step is skipped when its gradients are not finite
---@field ranges {first: integer, n: integer}[] for each group, the range of its parameters' indices in the model
---  (row.order)
---@field grad_norm? number norm of the last step's gradients before clipping, or nil if the norm was not needed
local Optimizer = {}
local INSTANCE = groups.fields(Optimizer, {})

function INSTANCE:__tostring()
  return text_of(self, function(number)
    local params = {}
    for i, row in ipairs(self.built.list) do
      if self.group_of[i] == number - 1 then params[#params + 1] = row.param end
    end
    return params
  end)
end

local optimizer = { methods = Optimizer }

Optimizer.NO_BACKWARD = "optimizer:step(): there was no backward since the last step, so there are no gradients to "
  .. "update with: call model:backward(loss) first"

local double_out = ffi.new("double[1]")
local group_array = array "ps_update_group"
-- no options: the configuration contains the settings that ps.optim accepts as options of step()
local NONE = {}

-- Raises an error if the settings of a group need states that its parameters do not have.
local function check_states(self, number)
  local group = self.groups[number]
  if optimizers.needed(group) <= #self.states[number] then return end
  error(("%s, group %d: %s, but no group needed states when the model was made, so there are no buffers; set it in the "
    .. "configuration or in param_groups"):format(group.kind, number, optimizers.of_group(group).lacking(group)))
end

--- Copies the settings of all groups into the settings of an action.
---@param how ffi.cdata* ps_action_how
---@param factors? table<integer, number> by group from 1, the factor by which its gradients are multiplied (default 1)
function Optimizer:settings_into(how, factors)
  groups.check_same(self, self.kind)
  local n = #self.groups
  if not self.c_groups then self.c_groups = group_array(n) end
  for i, group in ipairs(self.groups) do
    check_states(self, i)
    local values = self.c_groups[i - 1]
    values.scale = factors and factors[i] or 1
    updates.settings_into(values, group)
  end
  how.groups, how.n_groups = self.c_groups, n
end

--- Checks the settings, and returns them as text. The caller compares this text with a later text to find changes.
--- Settings must not change from the beginning of an update to the end of step().
---@return string
function Optimizer:checked_settings()
  groups.check_same(self, self.kind)
  groups.check(self.groups)
  average.check_trains(self, self.kind)
  local parts = {}
  for i, group in ipairs(self.groups) do
    local keys = groups.settings(group)
    check_states(self, i)
    local text = saved_groups.to_text(group, keys)
    for k, key in ipairs(keys) do parts[#parts + 1] = (k == 1 and ";" or " ") .. tostring(text[key]) end
  end
  return table.concat(parts)
end

--- Returns the factor by which the update multiplies gradients. This factor undoes the loss scale and the sum over
--- micro-batches.
---@return number
function Optimizer:grad_scale() return step.weight_factor(self.engine) / (self.scaler and self.scaler.scale or 1) end

--- Increments the step counters of all groups. Called after each step that was not skipped.
function Optimizer:stepped() optimizers.stepped(self.groups) end

-- -- called by the step (the optimizer of plain memory overrides these: engine/state/plain.lua) -----------------------
--- Returns the norm of all gradients.
---@return number
function Optimizer:norm()
  native.check(C.ps_engine_sq_norm(native.ctx, double_out))
  return math.sqrt(double_out[0])
end

--- Returns the norm of the gradients of some groups. Must be called after norm() in the same step.
---@param numbers integer[] indices of the groups, from 1, in ascending order
---@return number
function Optimizer:norm_of(numbers)
  local sum, first, n = 0, 0, 0
  local function add()
    if n > 0 then
      native.check(C.ps_engine_sq_norm_of(native.ctx, first, n, double_out))
      sum = sum + double_out[0]
    end
  end
  for _, number in ipairs(numbers) do
    local range = self.ranges[number]
    if range.n == 0 or range.first == first + n then
      n = n + range.n                                        -- adjacent groups are summed in one pass, as in norm()
    else
      add()
      first, n = range.first, range.n
    end
  end
  add()
  return math.sqrt(sum)
end

--- For each parameter in `list`, returns the sum of squares of its gradient. Must be called after norm() in the same
--- step.
---@param list {row: table}[] row: an element of built.list (ps.engine.Built)
---@return number[]
function Optimizer:squares(list) -- luacheck: no self
  local squares = {}
  for i, at in ipairs(list) do
    native.check(C.ps_engine_sq_norm_of(native.ctx, at.row.order, 1, double_out))
    squares[i] = double_out[0]
  end
  return squares
end

--- Sets a factor for the gradient of a parameter. The next update multiplies the gradient by this factor.
---@param place integer index in built.list
---@param factor number
function Optimizer:set_factor(place, factor) -- luacheck: no self
  native.check(C.ps_engine_param_scale(native.ctx, place - 1, factor))
end

--- Multiplies all gradients by the factor of the action, and updates the parameters that this step has not updated yet.
function Optimizer:update() native.retry(C.ps_engine_update, native.ctx) end

--- Returns the number of parameters that this step has updated, and the number of all parameters.
---@return integer n
---@return integer all
function Optimizer:updated()
  local n, all = 0, self:count()
  for i = 1, all do n = n + C.ps_engine_param_updated(native.ctx, i - 1) end
  return n, all
end

--- Drops the gradients of all parameters.
function Optimizer:drop() native.check(C.ps_engine_drop_grads(native.ctx)) end
--- Raises an error if gradients exist before the first backward of a step. Only plain memory needs this check, because
--- in chunks, C allows no such gradients.
function Optimizer:check_no_gradients() end
--- Drops the gradients that C does not drop when it abandons a step. Such gradients exist only in plain memory.
function Optimizer:drop_own() end

-- -- called by scripts ------------------------------------------------------------------------------------------------
--- Updates the parameters. Does nothing before the backward of the step's last micro-batch. If gradients overflowed, or
--- if no target counts, the step is skipped, and no parameter is updated. If an update fails, another call updates the
--- remaining parameters, and uses the same factor for the gradients.
---@param options? table must be empty, because there are no options
---@return {grad_norm?: number, skipped: boolean, accumulating: boolean}
function Optimizer:step(options)
  groups.check_closure(options)
  caller.options(options, "optimizer:step of an engine", NONE)
  groups.tell_zero(self)
  local info = step.update(self.engine)
  if not info.accumulating then self.engine:finish_step(info) end
  return info
end

--- Drops the gradients. While micro-batches accumulate, this call does nothing. Therefore the usual loop of zero_grad,
--- forward, backward and step works with any gradient_accumulation_steps. After the last backward of a step, this call
--- abandons the step, unless parameters have already been updated.
---@param set_to_none? boolean as in PyTorch; only true, the default, is allowed
function Optimizer:zero_grad(set_to_none)
  exact.set_to_none(set_to_none, "optimizer:zero_grad")
  local engine = self.engine
  step.zero_grad(engine)
end

-- Moves the fp32 values of a parameter toward one of its states, if this rank has them.
local function move(self, i, toward, weight)
  local row, slot = self.engine.built.list[i], self:slot(i)
  if not slot.averages or self:updates(i) == 0 then return end
  local param, master = row.place, row.master
  if param == nil then param = row.param end
  if rawequal(master, row.param) then master = param end
  for k, of in ipairs(slot.states) do
    if of.name == toward then
      scope.no_grad(function() native.ops.master_lerp_({ param, master, slot.averages[k] }, weight) end)
    end
  end
end

local function switch(self, train, call)
  local engine = self.engine
  engine:check_open()
  step.check_whole(engine)
  if not average.of(self) then return end
  if step.is_open(engine) then
    if not step.evaluates(engine) then
      error(call .. ": a step has begun, and its gradients belong to the present values of the parameters: call it "
        .. "after optimizer:step()")
    end
    step.give_up(engine)
  end
  engine.masters:sync()
  average.switch(self, train, function(number)
    local list = {}
    for i = 1, self:count() do if self.group_of[i] == number - 1 then list[#list + 1] = i end end
    return list
  end, function(i, toward, weight) move(self, i, toward, weight) end)
  engine.masters:note()
  self:loaded()
end

--- Sets the parameters to their values for evaluation. For AdamWScheduleFree, these values are the averages x. For
--- other optimizers, this function does nothing. It is called by ps.train.run, ps.evaluate, save_pretrained and
--- generate. All ranks must call it, between steps.
function Optimizer:eval() switch(self, false, "optimizer:eval()") end

--- Sets the parameters to their values for training. Must be called after eval(). Because of rounding, the values can
--- differ from the values before eval(). For optimizers other than AdamWScheduleFree, this function does nothing. All
--- ranks must call it, between steps.
function Optimizer:train() switch(self, true, "optimizer:train()") end

--- Sets the learning rate for the next step. If a group has another rate than the optimizer, the ratio of the two rates
--- stays the same. Raises an error if the optimizer was created without a rate and its groups have different rates. In
--- this case, set optimizer.groups[i].lr instead.
---@param lr number
function Optimizer:set_lr(lr)
  step.check_settings(self.engine, "set_lr")
  groups.set_lr(self, lr)
end

-- The functions from here to set_updates are called by optim/state.lua. Parameters are numbered from 1 in the order of
-- registration. The result of slot() has a field `averages`, with one tensor per optimizer state of the group. This
-- field is nil if another rank has the states.
function Optimizer:count() return #self.built.list end
function Optimizer:order(i) return self.built.list[i].order end
function Optimizer:slot(i)
  local row = self.built.list[i]
  local states = optimizers.states_for(self.states[row.group + 1], row.param:shape())
  return { name = row.name, param = row.param, states = states, averages = row.averages,
    master = row.master ~= nil and not rawequal(row.master, row.param) and row.master or nil }
end
function Optimizer:updates(i) return tonumber(C.ps_engine_param_steps(native.ctx, i - 1)) end
function Optimizer:set_updates(i, t) native.check(C.ps_engine_set_param_steps(native.ctx, i - 1, t)) end

--- Returns the state in PyTorch's form: {state = {[n] = entry}, param_groups}. n is a parameter's index, from 0, in the
--- order of groups. An entry contains `step` and the states of the optimizer, such as exp_avg and exp_avg_sq of AdamW
--- (docs/optimizers.md). If `model` is given, returns the form of ps.checkpoints instead, which is {tensors by name,
--- values}. The tensors belong to the engine. The script must save them before the next step. Masters are part of
--- model:state_dict(), and not of this state.
---@param model? any
---@return table
function Optimizer:state_dict(model)
  step.check_whole(self.engine)
  if model ~= nil then return state.named(self) end
  return state.torch(self)
end

--- Loads a state that state_dict has returned, in either form. The state may also be an open file (ps.load with lazy =
--- true). Loads one tensor at a time. Abandons the current step.
---@param saved table|ps.TorchFile
---@param model? any allowed because ps.optim has it; ignored, because this optimizer knows its model
function Optimizer:load_state_dict(saved, model) -- luacheck: ignore 212/model
  self.engine:check_open()
  self.engine:end_step()
  self.engine:train_thawed()
  state.load(self, saved)
  self.moved = nil
  self:loaded()
  unused.begin(self.engine)
  step.mend(self.engine, "optimizer")
end

--- Records that values of the state, possibly of masters, were written.
function Optimizer:loaded() native.check(C.ps_engine_forget(native.ctx)) end

--- Assigns the trained parameters to groups. Sorts built.list by virtual stage, and within a virtual stage by group. As
--- in ps.optim and PyTorch, parameters are numbered group by group. Norms are summed in this order, whichever rank has
--- a parameter.
---@param self ps.EngineOptimizer
function optimizer.arrange(self)
  local engine, built, all = self.engine, self.built, copied(self.built.list)
  for _, row in ipairs(built.elsewhere) do all[#all + 1] = row end
  engine_groups.check_members(engine.param_groups, all, function(text) engine:note(text) end)
  for _, row in ipairs(all) do row.group = engine_groups.number_of(engine.param_groups, row.name, row.param) - 1 end
  table.sort(all, function(a, b)
    if a.group ~= b.group then return a.group < b.group end
    return a.number < b.number
  end)
  for i = 1, #self.groups do self.ranges[i] = { first = #all, n = 0 } end
  for i, row in ipairs(all) do
    local range = self.ranges[row.group + 1]
    row.order, range.first, range.n = i - 1, math.min(range.first, i - 1), range.n + 1
  end
  table.sort(built.list, function(a, b)
    if a.vstage ~= b.vstage then return a.vstage < b.vstage end
    return a.order < b.order
  end)
  for i, row in ipairs(built.list) do self.group_of[i] = row.group end
end

--- Creates the optimizer of an engine. Divides the trained parameters among the engine's param_groups (default: one
--- group). Sorts built.list by virtual stage, and within a virtual stage by group.
---@param engine ps.Engine
---@param built ps.engine.Built
---@param cfg ps.Config
---@return ps.EngineOptimizer
function optimizer.new(engine, built, cfg)
  local self = setmetatable({ engine = engine, built = built, kind = cfg.optimizer.type, steps = 0, group_of = {},
    ranges = {}, groups = engine_groups.configured(cfg.optimizer, engine.param_groups),
    max_norm = cfg.gradient_clipping > 0 and cfg.gradient_clipping or nil }, INSTANCE)
  self.states = engine_groups.states(self.groups)
  groups.begin_rates(self, cfg.rate_given and cfg.optimizer.params.lr or nil)
  optimizer.arrange(self)
  return self
end

for _, name in ipairs { "step", "zero_grad", "set_lr", "eval", "train", "state_dict", "load_state_dict" } do
  Optimizer[name] = exact.of(Optimizer[name], "optimizer:" .. name, true)
end

return optimizer
