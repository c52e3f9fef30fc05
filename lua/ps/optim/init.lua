-- SPDX-License-Identifier: BSD-3-Clause
-- ps.optim: optimizers for parameters in plain memory (ps.optimizers). Optimizer states are fp32, or fp64 for fp64
-- parameters. Some optimizers have states of a smaller type instead, such as bf16. A bf16 or fp16 parameter has an fp32
-- master, which is created at the first step. A step calls a fused op a few times, each time for a batch of tensors. A
-- single factor in this op implements gradient clipping, the loss scale, and the mean over accumulated gradients. Only
-- the norm for gradient clipping needs a second pass over the gradients.
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local check = require "ps.config.check"
local copied = require "ps.core.copied"
local types = require "ps.core.types"
local error = caller.error
local average = require "ps.optim.average"
local entries_of = require "ps.optim.entries"
local groups = require "ps.optim.groups"
local saved_groups = require "ps.optim.saved_groups"
local loss_scaler = require "ps.optim.loss_scaler"
local text_of = require "ps.optim.text"
local nn_module = require "ps.nn.module"
local mesh = require "ps.dist.mesh"
local norms = require "ps.nn.norms"
local native = require "ps.core.ffi"
local optimizer_state = require "ps.optim.state"
local optimizers = require "ps.optimizers"
local updates = require "ps.optimizers.update"
local exact = require "ps.core.exact"

local optim = { give_back = norms.give_back, squares = norms.squares, global_norm = norms.global_norm }

local address = nn_module.address

--- Returns two parameter groups. The first has the tensors of two or more dimensions, with weight decay. The second has
--- biases and the weights of norms, without weight decay.
---@param model ps.nn.Module
---@param weight_decay number
---@return table[] groups
function optim.groups(model, weight_decay)
  local decay = { params = {}, param_names = {}, weight_decay = weight_decay }
  local plain = { params = {}, param_names = {}, weight_decay = 0 }
  if not nn_module.is_module(model) then error("optim.groups takes a module, not " .. tostring(model)) end
  caller.typed(weight_decay, "number", "optim.groups: the weight decay")
  for name, p in model:named_parameters() do
    local group = p:dim() >= 2 and decay or plain
    table.insert(group.params, p)
    table.insert(group.param_names, name)
  end
  return { decay, plain }
end

---@class ps.Optimizer
---@field groups table[] groups with params and settings (lr, weight_decay, ...), which may be changed between steps
---@field defaults table
---@field counts integer[] for each group, the number of its parameters
---@field made_with {[1]: table, [2]: string}[] the groups with which the optimizer was made, and their kinds
---@field max_norm? number
---@field steps integer number of steps, excluding skipped ones
---@field trained table<number, true> addresses of the optimizer's parameters
---@field lost? string a text that says which call replaced a parameter with another tensor, and which parameter
---@field gone? {tensor: ps.Tensor, name: string}[] parameters whose fields in modules a script has set to other tensors
---@field taken? {name: string, engine: table} is set if ps.initialize adopted a parameter of this optimizer, but not
--- the optimizer. name: the parameter's name
---@field per_rank? boolean in a group of several ranks, whether each rank updates from its own gradients
local Optimizer = {}
groups.fields(Optimizer, Optimizer)

function Optimizer:__tostring()
  return text_of({ kind = self.kind.name, steps = self.steps, max_norm = self.max_norm, groups = self.groups },
    function(number) return self.groups[number].params end)
end

-- Raises an error if a method was not called with a colon.
local function called(self, name)
  if getmetatable(self) ~= Optimizer then error(("call optimizer:%s(...) with a colon"):format(name)) end
end

local function in_range(settings, call, ranges)
  local problem = check.out_of_range(settings, ranges)
  if problem then error(("%s: %s"):format(call, problem)) end
  return settings
end

local OF_OPTIMIZER = { max_norm = "number", per_rank = "boolean" }
local OF_GROUP = { params = "any", param_names = "table", optimizer = "string", kind = "string" }

-- Checks the settings of an optimizer or of a group. `also` contains the keys that are allowed but are not settings.
local function checked_options(kind, options, call, also)
  local keys = {}
  for key, type_of in pairs(also) do keys[key] = type_of end
  for key, default in pairs(kind.defaults) do keys[key] = type(default) end
  for key, value in pairs(also == OF_GROUP and optimizers.complete({}, kind) or {}) do keys[key] = type(value) end
  options = in_range(caller.options(options, call, keys), call, types.OPTIMIZER)
  return kind.ranges and in_range(options, call, kind.ranges) or options
end

local function defaults_of(made, lr)
  local defaults = {}
  for key, default in pairs(made.defaults) do defaults[key] = default end
  defaults.lr = lr or defaults.lr
  return optimizers.complete(defaults, made)
end

-- Returns the optimizer of a group. This is the optimizer that the group's options name. If they name no optimizer,
-- this is `kind`.
local function kind_of_group(kind, given, what)
  local name = type(given) == "table" and (given.optimizer or given.kind)
  if not name then return kind end
  local found = type(name) == "string" and optimizers.find(name)
  if not found then
    error(("%s: optimizer is '%s'; the optimizers are %s"):format(what, tostring(name),
      table.concat(optimizers.names, ", ")))
  end
  return optimizers.of(found)
end

-- Creates an optimizer. `kind` is a ps.optimizers.Description.
local function build(kind, params, options)
  options = checked_options(kind, options, kind.name, OF_OPTIMIZER)
  local self = setmetatable({ kind = kind, entries = {}, counts = {}, steps = 0, max_norm = options.max_norm,
    per_rank = options.per_rank }, Optimizer)
  self.defaults = defaults_of(kind)
  for key, value in pairs(options) do
    if not OF_OPTIMIZER[key] then self.defaults[key] = value end
  end
  if nn_module.is_module(params) then params = groups.of_module(kind, params) end
  groups.check_given(params, kind.name)
  local is_groups = type(params[1]) == "table"
  self.groups = {}
  local seen = {}
  for number, given in ipairs(is_groups and params or { { params = params } }) do
    local what = ("%s, group %d"):format(kind.name, number)
    local made = kind_of_group(kind, given, what)
    local group = { kind = made.name }
    for key, default in pairs(made == kind and self.defaults or defaults_of(made, self.defaults.lr)) do
      group[key] = default
    end
    for key, value in pairs(checked_options(made, given, what, OF_GROUP)) do group[key] = value end
    group.kind, group.optimizer = made.name, nil
    local problem = groups.problem(group)
    if problem then error(("%s: %s"):format(what, problem)) end
    self.groups[number] = group
    caller.typed(group.params, "table", what .. ": params")
    groups.check_whole(group.params, what, "params")
    group.params = copied(group.params)          -- later changes of the script's list have no effect, as in PyTorch
    self.counts[number] = #group.params
    for i, p in ipairs(group.params) do
      local name = group.param_names and group.param_names[i]
      groups.check_trainable(p, name, i, what)
      groups.check_parameter(group, name or ("parameter %d of group %d"):format(i, number), p)
      if seen[address(p)] then error(kind.name .. ": a parameter is listed twice; list each once") end
      seen[address(p)] = true
      self.entries[#self.entries + 1] = { param = p, group = group, t = 0,
        name = group.param_names and group.param_names[i] }
    end
  end
  if #self.entries == 0 then error(kind.name .. ": there are no parameters") end
  groups.begin_rates(self, options.lr)
  self.trained = seen
  nn_module.optimizers[self] = true
  return self
end

-- Returns the entries of parameters that have a gradient, and their gradients.
local function with_gradient(self)
  local entries, grads = {}, {}
  for _, entry in ipairs(self.entries) do
    local grad = entry.param:grad()
    if grad ~= nil then
      entries[#entries + 1], grads[#grads + 1] = entry, grad
    end
  end
  return entries, grads
end

-- Appends the tensors for a parameter's update to the inputs of the op. If the parameter does not have a state, the
-- master is passed in its place.
local function fill(list, kind, entry, grad, states)
  local n = #list
  list[n + 1], list[n + 2], list[n + 3] = entry.param, entry.master, grad
  for k = 1, optimizers.takes(kind) do list[n + 3 + k] = states[k] and entry[states[k].name] or entry.master end
end

-- Updates the parameters of entries. If `done` is given, it is called with each entry after its update.
local function update(entries, grads, scale, done)
  local first, states = 1, {}
  -- All memory is allocated before the first update.
  for i, entry in ipairs(entries) do states[i] = entries_of.prepare(entry) end
  while first <= #entries do
    local group, t, list, last = entries[first].group, entries[first].t, {}, first
    local factor, kind = entries[first].scale, optimizers.of_group(group)
    local most = math.floor(native.C.PS_MAX_IN / (3 + optimizers.takes(kind)))
    while last <= #entries and last - first < most and entries[last].group == group and entries[last].t == t
      and entries[last].scale == factor do
      fill(list, kind, entries[last], grads[last], states[last])
      last = last + 1
    end
    updates.run(list, group, t + 1, scale * (factor or 1))
    for i = first, last - 1 do
      entries[i].t = t + 1
      if done then done(entries[i]) end
    end
    first = last
  end
end

--- Returns the norm of an optimizer's gradients. This is for code that updates parameters without step().
---@param optimizer ps.Optimizer
---@return number
function optim.norm_of(optimizer)
  return scope.no_grad(function()
    local _, grads = with_gradient(optimizer)
    local norm = optim.global_norm(grads)
    optim.give_back(grads)
    return norm
  end)
end

--- Updates the parameters that have a gradient. This is for code that updates parameters without step(). If an update
--- fails, `done` has already been called with each entry whose update succeeded.
---@param optimizer ps.Optimizer
---@param scale number a factor on the gradients
---@param done fun(entry: table)
function optim.apply(optimizer, scale, done)
  scope.no_grad(function()
    local entries, grads = with_gradient(optimizer)
    update(entries, grads, scale, done)
    optim.give_back(grads)
  end)
  optimizer.steps = optimizer.steps + 1
end

local function end_step()
  local rng = random.state()
  rng.step = rng.step + 1
  rng.op = 0
  scope.end_step()
end

-- Raises an error if there are several ranks. Each rank would update from its own gradients, so the ranks' parameters
-- would diverge.
local function check_ranks(self)
  local group = not self.per_rank and mesh.group "dp"
  if not group then return end
  error(("%s: this is a group of %d ranks, but ps.optim does not sum their gradients: let ps.initialize make the "
    .. "model, or sum them in the script (group:all_reduce of each p:grad()) and set per_rank = true"):format(
    self.kind.name, group:size()))
end

-- Raises an error if ps.initialize has adopted a model with parameters of this optimizer, because the model's own
-- optimizer updates these parameters.
local function check_taken(self)
  local taken = self.taken and not self.taken.engine.closed and self.taken.name
  for _, entry in ipairs(self.entries) do
    if taken then break end
    local by = not self.of_engine and nn_module.updated_by(entry.param)
    if by then taken = by.name
    elseif entry.param.managed ~= nil then
      taken = "a parameter of shape [" .. table.concat(entry.param:shape(), ", ") .. "]"
    end
  end
  if not taken then return end
  error(("%s: ps.initialize took over the model, with %s, and its optimizer updates it: use the optimizer that it "
    .. "returned, or pass this one: ps.initialize { model = ..., optimizer = ..., config = ... "
    .. "}"):format(self.kind.name,
    taken))
end

-- Prints a note about the parameters that a script has replaced in their modules and that have no gradient, because
-- they are no longer trained. If another layer wraps a layer, the inner layer's parameters still get gradients, so they
-- are not listed.
local function tell_gone(self)
  local names = {}
  for _, entry in ipairs(self.gone) do
    if entry.tensor:grad() == nil then names[#names + 1] = entry.name end
  end
  self.gone = nil
  if not names[1] then return end
  io.stderr:write(("psluajit: %s: %s replaced in the module after this optimizer was made, so the optimizer trains the "
    .. "old %s and not the new; make the optimizer after such changes\n"):format(self.kind.name,
    table.concat(names, ", ", 1, math.min(#names, 5)) .. (#names > 5 and (" and %d more"):format(#names - 5) or "")
    .. (#names == 1 and " was" or " were"), #names == 1 and "one" or "ones"))
end

-- Raises an error if a script has added parameters to a group, or removed some.
local function check_members(self)
  local at = 0
  for number, group in ipairs(self.groups) do
    caller.typed(group.params, "table", ("%s, group %d: params"):format(group.kind, number))
    if #group.params ~= self.counts[number] then
      error(("%s, group %d: params has %s, but the optimizer was made with %d in this group: make the optimizer with "
        .. "all its parameters"):format(group.kind, number, caller.counted(#group.params, "parameter"),
        self.counts[number]))
    end
    for i, param in ipairs(group.params) do
      at = at + 1
      if not rawequal(param, self.entries[at].param) then
        error(("%s, group %d: parameter %d of params was replaced after the optimizer was made, and the old one is "
          .. "trained: make the optimizer anew"):format(group.kind, number, i))
      end
    end
  end
end

local STEP = { max_norm = "number", scaler = "table", grad_scale = "number" }
local OF_STEP = { max_norm = types.norm, grad_scale = types.number() }         -- ranges

--- Updates the parameters from their gradients. A parameter without a gradient does not change. If no parameter has a
--- gradient, the step is skipped. The call also ends the implicit scope of the step.
---@param options? {max_norm?: number, scaler?: ps.LossScaler, grad_scale?: number} grad_scale: a factor on all
--- gradients, for example 1 / (number of accumulated batches)
---@return {grad_norm?: number, skipped: boolean} info grad_norm is the norm before clipping, or nil if neither max_norm
--- nor scaler is used.
function Optimizer:step(options)
  native.check_running "optimizer:step()"
  groups.check_closure(options)
  options = in_range(caller.options(options, "optimizer:step", STEP), "optimizer:step", OF_STEP)
  check_ranks(self)
  groups.check_same(self, self.kind.name)
  groups.check(self.groups)
  check_members(self)
  groups.tell_zero(self)
  check_taken(self)
  average.check_trains(self, self.kind.name)
  if self.lost then
    error(("%s: %s, and this optimizer has the old tensor: make the optimizer after this call"):format(
      self.kind.name, self.lost))
  end
  if self.gone then tell_gone(self) end
  local max_norm, scaler = options.max_norm or self.max_norm, options.scaler
  local scale = options.grad_scale or 1
  if scaler then scale = scale / scaler.scale end
  local info = { skipped = false }
  scope.no_grad(function()
    local entries, grads = with_gradient(self)
    if not entries[1] then
      info.skipped = true
      return
    end
    if max_norm or scaler then
      info.grad_norm = optim.global_norm(grads) * scale
      if scaler then
        info.skipped = not types.finite(info.grad_norm)
        scaler:update(info.skipped)
      elseif not types.finite(info.grad_norm) then
        error(("%s: the gradient norm is %s; the parameters were not changed"):format(self.kind.name,
          tostring(info.grad_norm)))
      end
      if max_norm and not info.skipped then scale = scale * math.min(1, max_norm / (info.grad_norm + 1e-6)) end
    end
    if not info.skipped then
      update(entries, grads, scale)
      self.steps = self.steps + 1
      optimizers.stepped(self.groups)
    end
    optim.give_back(grads)
  end)
  end_step()
  return info
end

--- Ends a step and its scope without an update. The next step gets new dropout masks.
---@return {skipped: boolean} info
function Optimizer:skip()
  end_step()
  return { skipped = true }
end

--- Moves the parameters to the averages at which AdamWScheduleFree evaluates the model. Call it before the model is
--- evaluated or saved. For other optimizers, this function does nothing.
function Optimizer:eval()
  called(self, "eval")
  average.switch_plain(self, false)
end

--- After eval(), moves the parameters back to the values at which gradients are computed. These can differ from the
--- values before eval() by rounding. For other optimizers, this function does nothing.
function Optimizer:train()
  called(self, "train")
  average.switch_plain(self, true)
end

--- Frees the gradients of all parameters.
---@param set_to_none? boolean as in PyTorch; only true, the default, is supported
function Optimizer:zero_grad(set_to_none)
  exact.set_to_none(set_to_none, "optimizer:zero_grad")
  called(self, "zero_grad")
  native.check_running "optimizer:zero_grad()"
  for _, entry in ipairs(self.entries) do entry.param:set_grad(nil) end
end

--- Sets the learning rate for the next and all later steps. If a group was created with a rate that differs from the
--- optimizer's rate, the ratio between the two rates does not change. If the groups' rates differ and the optimizer was
--- created without a rate, raises an error. In this case, set optimizer.groups[i].lr instead.
---@param lr number
function Optimizer:set_lr(lr)
  called(self, "set_lr")
  groups.set_lr(self, lr)
end

--- Returns the optimizer's state. `tensors` maps "<parameter>.<kind>" to a tensor. The kinds are exp_avg, exp_avg_sq,
--- momentum_buffer, master and so on. `values` has values that JSON can store. Without a model, parameters are named
--- "0", "1", ... In this case `values` also has the real names of the parameters, if the optimizer was created from a
--- module or from optim.groups.
---@param model? ps.nn.Module
---@return {tensors: table<string, ps.Tensor>, values: table}
function Optimizer:state_dict(model)
  called(self, "state_dict")
  if model ~= nil and not nn_module.is_module(model) then
    error(("optimizer:state_dict takes a module, or nothing, not a %s"):format(type(model)))
  end
  local names, tensors = entries_of.names_for(self, model), {}
  local values = { kind = self.kind.name, steps = self.steps, t = {}, groups = {} }
  for i, entry in ipairs(self.entries) do
    values.t[names[i]] = entry.t
    for _, state in ipairs(entries_of.states_of(entry)) do
      if entry[state.name] ~= nil then tensors[names[i] .. "." .. state.name] = entry[state.name] end
    end
    if entry.master ~= nil and entry.master ~= entry.param then tensors[names[i] .. ".master"] = entry.master end
  end
  for number, group in ipairs(self.groups) do
    values.groups[number] = saved_groups.saved(group)
    if group.kind ~= self.kind.name then values.groups[number].kind = group.kind end
  end
  if model == nil then values.param_names = entries_of.own_names(self) end
  values.averages, values.changes = average.saved(self.entries, names), groups.changes(self.groups)
  return { tensors = tensors, values = values }
end

-- Returns the optimizer in the form that optim/state.lua expects. That file implements PyTorch's form of states.
local function for_torch(self)
  local view = { named = entries_of.own_names(self) ~= nil, kind = self.kind.name, steps = self.steps,
    groups = self.groups,
    group_of = {}, states = {}, engine = { steps = self.steps, built = { list = {} } } }
  function view.engine.set_steps(of, steps) of.steps = steps end
  local number_of, names = {}, entries_of.names_for(self)
  for number, group in ipairs(self.groups) do
    number_of[group] = number - 1
    view.states[number] = optimizers.states_of(optimizers.of_group(group), self.groups)
  end
  for i, entry in ipairs(self.entries) do
    view.group_of[i] = number_of[entry.group]
    view.engine.built.list[i] = { name = entry.name or names[i] }
  end
  function view.count() return #self.entries end
  function view.order(_, i) return i end
  function view.updates(_, i) return self.entries[i].t end
  function view.set_updates(_, i, t) self.entries[i].t = t end
  function view.slot(_, i)
    local entry, averages = self.entries[i], {}
    local states = entries_of.prepare(entry)
    for k, state in ipairs(states) do averages[k] = entry[state.name] end
    return { name = view.engine.built.list[i].name, param = entry.param, states = states, averages = averages }
  end
  return view
end

--- Returns the state in PyTorch's form, {state = {[n] = {step, exp_avg, ...}}, param_groups}. An engine's
--- optimizer:state_dict() has the same form. PyTorch's optimizer and this optimizer can load the result with
--- load_state_dict. The tensors are not copied.
---@return {state: table<integer, table>, param_groups: table[]}
function Optimizer:torch_state_dict()
  called(self, "torch_state_dict")
  return optimizer_state.torch(for_torch(self), entries_of.own_names(self) ~= nil)
end

-- Returns whether a state is in PyTorch's form. The state is a table or an open file.
local function is_torch(state)
  if type(state.holds) == "function" then return state:holds "param_groups" end
  return state.values == nil and state.param_groups ~= nil
end

-- Loads a state in PyTorch's form. This form has no masters, so masters get the values of the parameters.
local function load_torch(self, state)
  local view = for_torch(self)
  optimizer_state.load(view, state)
  self.steps, self.moved = view.steps, nil
  for _, entry in ipairs(self.entries) do entry.master = nil end
end

--- Loads a result of state_dict. Tensors that are on the device of their parameter are used without a copy. Can also
--- load a state in PyTorch's form (torch_state_dict), from tables or from an open file. The tensors of such a
--- state are copied.
---@param state table|ps.TorchFile
---@param model? ps.nn.Module as in state_dict
function Optimizer:load_state_dict(state, model)
  native.check_running "optimizer:load_state_dict"
  caller.typed(state, "table", "load_state_dict: the state")
  if is_torch(state) then
    load_torch(self, state)
    return
  end
  caller.typed(state.values, "table", "load_state_dict: its values")
  caller.typed(state.tensors, "table", "load_state_dict: its tensors")
  if model ~= nil and not nn_module.is_module(model) then
    error("load_state_dict: the second argument must be a model")
  end
  local values, planned = state.values, {}
  local names = entries_of.saved_names(self, model, values)
  local problem = optimizer_state.problem(values, self.kind.name, self.groups)
  if problem then error(problem) end
  local saved_of, theirs = {}, saved_groups.to_load(self.groups, values)
  for number, group in ipairs(self.groups) do saved_of[group] = saved_groups.with_saved(group, theirs[number]) end
  for i, entry in ipairs(self.entries) do
    local t = values.t[names[i]]
    if not t then error("the saved optimizer has no state for parameter " .. names[i]) end
    local found = { t = t }
    local needed = #optimizers.states_of(optimizers.of_group(entry.group), { saved_of[entry.group] })
    for k, of in ipairs(t > 0 and entries_of.all_states_of(entry) or {}) do
      local name = of.name
      local tensor = state.tensors[names[i] .. "." .. name]
      if tensor ~= nil then
        found[name] = entries_of.same_or_fail(names[i] .. "." .. name, tensor, entry.param, of)
      elseif k <= needed then
        error(("the saved optimizer has no %s for parameter %s"):format(name, names[i]))
      end
    end
    local half = entry.param:dtype() ~= entries_of.state_dtype(entry.param)
    local master = half and state.tensors[names[i] .. ".master"] or nil
    if master ~= nil then found.master = entries_of.same_or_fail(names[i] .. ".master", master, entry.param) end
    planned[i] = found
  end
  for i, entry in ipairs(self.entries) do
    entry.master = nil
    -- States that are missing start with zeros.
    for _, of in ipairs(optimizers.of_group(entry.group).states) do entry[of.name] = nil end
    for key, value in pairs(planned[i]) do
      if nn_module.is_tensor(value) then value:keep() end
      entry[key] = value
    end
  end
  saved_groups.from_text(self.groups, theirs)
  self.steps, self.moved = values.steps, nil
end

--- Creates an Adam optimizer, which adds weight_decay times the parameter to the gradient. In a group of several ranks,
--- step() is an error unless per_rank is true. With per_rank, each rank updates from its own gradients, which the
--- script may have summed.
---@param params ps.nn.Module|ps.Tensor[]|table[] a module, a list of parameters, or a list of groups {params=, ...}
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, max_norm?: number, per_rank?:
--- boolean}
---@return ps.Optimizer
function optim.Adam(params, options) return build(optimizers.of "Adam", params, options) end

--- Creates an AdamW optimizer, which is Adam with decoupled weight decay (default 0.01).
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, max_norm?: number, per_rank?:
---  boolean}
---@return ps.Optimizer
function optim.AdamW(params, options) return build(optimizers.of "AdamW", params, options) end

--- Creates an optimizer for stochastic gradient descent with PyTorch's momentum.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, momentum?: number, dampening?: number, nesterov?: boolean, weight_decay?: number,
--- max_norm?: number, per_rank?: boolean}
---@return ps.Optimizer
function optim.SGD(params, options) return build(optimizers.of "SGD", params, options) end

--- Creates an RMSprop optimizer (Tieleman and Hinton 2012). It is PyTorch's RMSprop without the option `centered`.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, momentum?: number, alpha?: number, eps?: number, weight_decay?: number, max_norm?:
---  number, per_rank?: boolean}
---@return ps.Optimizer
function optim.RMSprop(params, options) return build(optimizers.of "RMSprop", params, options) end

--- Creates a Lion optimizer (Chen et al. 2023), with the updates of lion-pytorch.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], weight_decay?: number, max_norm?: number, per_rank?: boolean}
---@return ps.Optimizer
function optim.Lion(params, options) return build(optimizers.of "Lion", params, options) end

--- Creates a Lion optimizer whose average is stored with 8 bits per element, in the format of AdamW8bit.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], weight_decay?: number, max_norm?: number, per_rank?: boolean}
---@return ps.Optimizer
function optim.Lion8bit(params, options) return build(optimizers.of "Lion8bit", params, options) end

--- Creates a Muon optimizer for matrices (Jordan et al. 2024), with the updates of PyTorch's Muon. Pass other
--- parameters in groups that have another optimizer: { params = list, optimizer = "AdamW" }. If `params` is a module,
--- group 1 has the matrices inside the model and uses Muon, and group 2 has all other parameters and uses AdamW.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, weight_decay?: number, momentum?: number, nesterov?: boolean, ns_coefficients?:
---  number[], eps?: number, ns_steps?: integer, adjust_lr_fn?: "original"|"match_rms_adamw"|"spectral_unclamped",
---  max_norm?: number, per_rank?: boolean}
---@return ps.Optimizer
function optim.Muon(params, options) return build(optimizers.of "Muon", params, options) end

--- Creates an Adafactor optimizer (Shazeer and Stern 2018), with the updates of PyTorch's Adafactor. eps1 and eps2 are
--- the two numbers of PyTorch's option eps.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, beta2_decay?: number, eps1?: number, eps2?: number, d?: number, weight_decay?: number,
---  max_norm?: number, per_rank?: boolean}
---@return ps.Optimizer
function optim.Adafactor(params, options) return build(optimizers.of "Adafactor", params, options) end

--- Creates the Adafactor optimizer of transformers, with the defaults of the Trainer. eps1 and eps2 are the two numbers
--- of the option eps in transformers.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, decay_rate?: number, eps1?: number, eps2?: number, clip_threshold?: number,
---  weight_decay?: number, scale_parameter?: boolean, relative_step?: boolean, warmup_init?: boolean, max_norm?:
---  number, per_rank?: boolean}
---@return ps.Optimizer
function optim.HuggingFaceAdafactor(params, options)
  return build(optimizers.of "HuggingFaceAdafactor", params, options)
end

--- Creates a LAMB optimizer (You et al. 2020), with the updates of timm's LAMB. timm's gradient clipping is not
--- included; use max_norm instead.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, grad_averaging?: boolean,
--- always_adapt?: boolean, trust_clip?: boolean, max_norm?: number, per_rank?: boolean}
---@return ps.Optimizer
function optim.LAMB(params, options) return build(optimizers.of "LAMB", params, options) end

--- Creates an AdamW optimizer whose averages are stored with 8 bits per element. Each block of 256 elements has one
--- scale (Dettmers et al. 2022).
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, max_norm?: number, per_rank?:
---  boolean}
---@return ps.Optimizer
function optim.AdamW8bit(params, options) return build(optimizers.of "AdamW8bit", params, options) end

--- Creates the schedule-free AdamW optimizer (Defazio et al. 2024) of the package schedulefree. Call optimizer:eval()
--- before the model is evaluated or saved, and optimizer:train() before the next step. ps.train.run makes these calls.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, warmup_steps?: integer, r?:
--- number, weight_lr_power?: number, max_norm?: number, per_rank?: boolean}
---@return ps.Optimizer
function optim.AdamWScheduleFree(params, options) return build(optimizers.of "AdamWScheduleFree", params, options) end

--- Creates an AdamW optimizer whose averages are stored in bf16 with stochastic rounding.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, max_norm?: number, per_rank?:
---  boolean}
---@return ps.Optimizer
function optim.AdamWBF16(params, options) return build(optimizers.of "AdamWBF16", params, options) end

optim.GradScaler = loss_scaler.pytorch

exact.all(Optimizer, "optimizer:", true)

return require("ps.core.foreign").public(optim, "optim")
