-- SPDX-License-Identifier: BSD-3-Clause
-- Optimizers: Adam, AdamW, SGD. State is fp32 (fp64 of fp64 parameters); a bf16 or fp16 parameter gets an fp32 master,
-- made at the first step.
-- A step is a few calls of one fused op, each over a batch of tensors; gradient clipping, the loss scale and the mean
-- over accumulated gradients are one factor in it, so gradients are read once more only for their norm.
--
--   local opt = optim.AdamW(optim.groups(model, 0.1), { lr = 3e-4, max_norm = 1 })
--   model(x, y):backward(); opt:step(); opt:zero_grad()
local create = require "ps.tensor.create"
local random = require "ps.core.random"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local sharded = require "ps.nn.sharded"
local check = require "ps.config.check"
local types = require "ps.core.types"
local error = caller.error
local groups = require "ps.optim.groups"
local loss_scaler = require "ps.optim.loss_scaler"
local text_of = require "ps.optim.text"
local nn_module = require "ps.nn.module"
local mesh = require "ps.dist.mesh"
local norms = require "ps.nn.norms"
local native = require "ps.core.ffi"
local optimizer_state = require "ps.optim.state"
local exact = require "ps.core.exact"

local optim = { give_back = norms.give_back, squares = norms.squares, global_norm = norms.global_norm }

local address = nn_module.address

--- Two parameter groups: tensors of two or more dimensions decay, biases and norms do not.
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
---@field groups table[] each with params and its settings (lr, weight_decay, ...), which may be changed between steps
---@field defaults table
---@field max_norm? number
---@field steps integer steps taken, skipped ones not counted
---@field trained table<number, true> addresses of its parameters
---@field lost? string a parameter of a module that is another tensor now (module:to)
---@field taken? {name: string, engine: table} ps.initialize took a parameter of that name, and not this optimizer
---@field per_rank? boolean in a group of several ranks, each updates by its own gradients
local Optimizer = {}
groups.fields(Optimizer, Optimizer)

function Optimizer:__tostring()
  return text_of({ kind = self.kind.name, steps = self.steps, max_norm = self.max_norm, groups = self.groups },
    function(number) return self.groups[number].params end)
end

-- A method was called as one.
local function called(self, name)
  if getmetatable(self) ~= Optimizer then error(("it is optimizer:%s(...), with a colon"):format(name)) end
end

local function in_range(settings, call, ranges)
  local problem = check.out_of_range(settings, ranges)
  if problem then error(("%s: %s"):format(call, problem)) end
  return settings
end

local OF_OPTIMIZER = { max_norm = "number", per_rank = "boolean" }
local OF_GROUP = { params = "any", param_names = "table" }

-- Settings of an optimizer, or of a group of its parameters, which has those of `also` besides.
local function checked_options(kind, options, call, also)
  local keys = {}
  for key, type_of in pairs(also) do keys[key] = type_of end
  for key, default in pairs(kind.defaults) do keys[key] = type(default) end
  return in_range(caller.options(options, call, keys), call, types.OPTIMIZER)
end

-- kind: {name, defaults, width = tensors a parameter takes in a call, state = names, apply = fn(list, group, t, scale)}
local function build(kind, params, options)
  options = checked_options(kind, options, kind.name, OF_OPTIMIZER)
  local self = setmetatable({ kind = kind, entries = {}, steps = 0, max_norm = options.max_norm,
    per_rank = options.per_rank }, Optimizer)
  self.defaults = {}
  for key, default in pairs(kind.defaults) do self.defaults[key] = default end
  for key, value in pairs(options) do
    if not OF_OPTIMIZER[key] then self.defaults[key] = value end
  end
  if nn_module.is_module(params) then
    local list = { params = {}, param_names = {} }
    for name, p in params:named_parameters() do
      table.insert(list.params, p)
      table.insert(list.param_names, name)
    end
    params = { list }
  end
  if type(params) ~= "table" then error(kind.name .. " takes a module, a list of parameters or a list of groups") end
  local is_groups = type(params[1]) == "table"
  self.groups = {}
  local seen = {}
  for number, given in ipairs(is_groups and params or { { params = params } }) do
    local group, what = {}, ("%s, group %d"):format(kind.name, number - 1)
    for key, default in pairs(self.defaults) do group[key] = default end
    for key, value in pairs(checked_options(kind, given, what, OF_GROUP)) do group[key] = value end
    local problem = groups.problem(group)
    if problem then error(("%s: %s"):format(what, problem)) end
    self.groups[number] = group
    for i, p in ipairs(caller.typed(group.params, "table", what .. ": params")) do
      groups.check_trainable(p, group.param_names and group.param_names[i], i, what)
      if seen[address(p)] then error(kind.name .. ": a parameter is listed twice") end
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

-- The type of a parameter's state, and of its master: a parameter of this type is its own.
local function state_dtype(param) return param:dtype() == "fp64" and "fp64" or "fp32" end

-- A parameter's state, made when it first has a gradient.
local function prepare(kind, entry)
  if entry.master == nil then
    local p = entry.param
    entry.master = p:dtype() == state_dtype(p) and p or p:to { dtype = "fp32" }
    if entry.master ~= p then entry.master:keep() end
  end
  for _, name in ipairs(kind.state(entry.group)) do
    if entry[name] == nil then
      entry[name] = create.zeros(entry.param:shape(), { dtype = state_dtype(entry.param),
        device = entry.param:device() })
      entry[name]:keep()
    end
  end
end

-- Entries with a gradient, and the gradients.
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

-- done: called with each entry that has had its update, or nil.
local function update(self, entries, grads, scale, done)
  local kind = self.kind
  for _, entry in ipairs(entries) do prepare(kind, entry) end      -- all memory first: a step is whole or not at all
  local most = math.floor(60 / kind.width)
  local first = 1
  while first <= #entries do
    local group, t, list, last = entries[first].group, entries[first].t, {}, first
    local factor = entries[first].scale
    while last <= #entries and last - first < most and entries[last].group == group and entries[last].t == t
      and entries[last].scale == factor do
      kind.fill(list, entries[last], grads[last])
      last = last + 1
    end
    kind.apply(list, group, t + 1, scale * (factor or 1))
    for i = first, last - 1 do
      entries[i].t = t + 1
      if done then done(entries[i]) end
    end
    first = last
  end
end

--- The norm of an optimizer's gradients: for who drives its steps otherwise than by step().
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

--- Updates the parameters that have a gradient: for who drives an optimizer's steps otherwise than by step(). Where it
--- fails, `done` has had the entries that were updated.
---@param optimizer ps.Optimizer
---@param scale number a factor on the gradients
---@param done fun(entry: table)
function optim.apply(optimizer, scale, done)
  scope.no_grad(function()
    local entries, grads = with_gradient(optimizer)
    update(optimizer, entries, grads, scale, done)
    optim.give_back(grads)
  end)
  optimizer.steps = optimizer.steps + 1
end

local function end_step()
  local rng = random.state()
  rng.step = rng.step + 1
  rng.op = 0
  scope.step_scope()
end

-- Each of several ranks would update by its own gradients, and their parameters would drift apart.
local function check_ranks(self)
  local group = not self.per_rank and mesh.group "dp"
  if not group then return end
  error(("%s: this is a group of %d ranks, and ps.optim does not add their gradients up: let ps.initialize make the "
    .. "model, or add them up in the script (group:all_reduce of each p:grad()) and say so by per_rank = true"):format(
    self.kind.name, group:size()))
end

-- Parameters of a model that ps.initialize took are updated by its optimizer.
local function check_taken(self)
  local taken = self.taken and not self.taken.engine.closed and self.taken.name
  for _, entry in ipairs(self.entries) do
    if taken then break end
    local by = not self.of_engine and nn_module.updated[nn_module.address(entry.param)]
    if by and not by.engine.closed then taken = by.name
    elseif entry.param.managed ~= nil then
      taken = "a parameter of shape [" .. table.concat(entry.param:shape(), ", ") .. "]"
    end
  end
  if not taken then return end
  error(("%s: ps.initialize took the model, with %s, and its optimizer updates it: use the one that it gave, or give "
    .. "it this one: ps.initialize { model = ..., optimizer = ..., config = ... }"):format(self.kind.name, taken))
end

local STEP = { max_norm = "number", scaler = "table", grad_scale = "number" }

--- One update from the gradients the parameters hold; a parameter without one stays, and where none has one the step is
--- skipped. It ends the implicit step scope.
---@param options? {max_norm?: number, scaler?: ps.LossScaler, grad_scale?: number} grad_scale: a factor
---  on all gradients, for instance 1 / (number of accumulated batches)
---@return {grad_norm?: number, skipped: boolean} info grad_norm: before clipping; nil when nothing asked for it
function Optimizer:step(options)
  native.check_running "optimizer:step()"
  options = in_range(caller.options(options, "optimizer:step", STEP), "optimizer:step", types.OPTIMIZER)
  check_ranks(self)
  groups.check(self.groups, self.kind.name)
  check_taken(self)
  if self.lost then
    error(("%s: module:to(...) made %s anew, and this optimizer has the tensor before it: convert first, and make the "
      .. "optimizer behind it"):format(self.kind.name, self.lost))
  end
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
        error(("%s: the gradient norm is %s; the parameters were left as they are"):format(self.kind.name,
          tostring(info.grad_norm)))
      end
      if max_norm and not info.skipped then scale = scale * math.min(1, max_norm / (info.grad_norm + 1e-6)) end
    end
    if not info.skipped then
      update(self, entries, grads, scale)
      self.steps = self.steps + 1
    end
    optim.give_back(grads)
  end)
  end_step()
  return info
end

--- Ends a step without an update: the next one has dropouts of its own, and the step's scope ends.
---@return {skipped: boolean} info
function Optimizer:skip()
  end_step()
  return { skipped = true }
end

--- Drops the gradients of all parameters.
---@param set_to_none? boolean PyTorch's: true, as without it
function Optimizer:zero_grad(set_to_none)
  exact.set_to_none(set_to_none, "optimizer:zero_grad")
  called(self, "zero_grad")
  native.check_running "optimizer:zero_grad()"
  for _, entry in ipairs(self.entries) do entry.param:set_grad(nil) end
end

--- Sets the learning rate; takes effect on the next step. A group that was given another rate than the optimizer keeps
--- its ratio to the optimizer's. Groups with unlike rates of an optimizer that was given none are refused: set
--- optimizer.groups[i].lr.
---@param lr number
function Optimizer:set_lr(lr)
  called(self, "set_lr")
  groups.set_lr(self, lr)
end

local function names_for(self, model)
  local names = {}
  if model then
    for name, p in model:named_parameters() do names[address(p)] = name end
  end
  for i, entry in ipairs(self.entries) do
    names[i] = names[address(entry.param)] or tostring(i - 1)
  end
  return names
end

-- The names of the parameters from the making of the optimizer on; nil: not all have one.
local function own_names(self)
  local names = {}
  for i, entry in ipairs(self.entries) do
    if not entry.name then return nil end
    names[i] = entry.name
  end
  return names
end

-- What a saved state calls the parameters. One that was saved without a model has numbers: if both sides know names,
-- a parameter takes the number that its name had.
local function saved_names(self, model, values)
  local names, own, saved = names_for(self, model), own_names(self), values.param_names
  if model ~= nil or not own or not saved then return names end
  local number = {}
  for i, name in ipairs(saved) do number[name] = tostring(i - 1) end
  for i, name in ipairs(own) do
    names[i] = number[name]
    if not names[i] then
      error(("the saved optimizer has no state for parameter %s; its parameter %d is %s"):format(name, i - 1,
        tostring(saved[i])))
    end
  end
  return names
end

--- The state: `tensors` by "<parameter>.<state>" (exp_avg, exp_avg_sq, momentum_buffer, master) and `values`, which
--- JSON can hold. Without a model parameters are called "0", "1", ...; `values` then has their names, if the optimizer
--- was made from a module or from optim.groups.
---@param model? ps.nn.Module
---@return {tensors: table<string, ps.Tensor>, values: table}
function Optimizer:state_dict(model)
  called(self, "state_dict")
  if model ~= nil and not nn_module.is_module(model) then
    error(("optimizer:state_dict takes a module, or nothing, not a %s"):format(type(model)))
  end
  local names, tensors = names_for(self, model), {}
  local values = { kind = self.kind.name, steps = self.steps, t = {}, groups = {} }
  for i, entry in ipairs(self.entries) do
    values.t[names[i]] = entry.t
    for _, state in ipairs(self.kind.state(entry.group)) do
      if entry[state] ~= nil then tensors[names[i] .. "." .. state] = entry[state] end
    end
    if entry.master ~= nil and entry.master ~= entry.param then tensors[names[i] .. ".master"] = entry.master end
  end
  local settings = {}
  for key in pairs(self.kind.defaults) do settings[#settings + 1] = key end
  for number, group in ipairs(self.groups) do values.groups[number] = groups.to_text(group, settings) end
  if model == nil then values.param_names = own_names(self) end
  return { tensors = tensors, values = values }
end

-- What a parameter's state may consist of, besides its master.
local STATES = { "exp_avg", "exp_avg_sq", "momentum_buffer" }

local function same_or_fail(name, tensor, param)
  local fit = sharded.fit(tensor:shape(), param)
  if tensor:dtype() ~= state_dtype(param) or not fit then
    error(("optimizer state '%s' is %s [%s], the parameter needs %s [%s]"):format(name, tensor:dtype(),
      table.concat(tensor:shape(), ", "), state_dtype(param), table.concat(sharded.shape(param), ", ")))
  end
  if fit == "own" or nn_module.same_shape(tensor:shape(), param:shape()) then return tensor:to(param:device()) end
  local own = create.zeros(param:shape(), { dtype = tensor:dtype(), device = param:device() })
  sharded.read({ state = tensor }, "state", own, param)
  return own
end

-- The optimizer as optim/state.lua sees one, which has PyTorch's form.
local function for_torch(self)
  local view = { named = own_names(self) ~= nil, kind = self.kind.name, steps = self.steps, groups = self.groups,
    group_of = {}, averages = {}, engine = { steps = self.steps, built = { list = {} } } }
  function view.engine.set_steps(of, steps) of.steps = steps end
  local number_of, names = {}, names_for(self)
  for number, group in ipairs(self.groups) do
    number_of[group] = number - 1
    if self.kind.state(group)[1] then view.averages = self.kind.state(group) end
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
    prepare(self.kind, entry)
    for k, name in ipairs(self.kind.state(entry.group)) do averages[k] = entry[name] end
    return { name = view.engine.built.list[i].name, param = entry.param,
      averages = #averages == #view.averages and averages or nil }
  end
  return view
end

--- PyTorch's form, as optimizer:state_dict() of an engine gives it: {state = {[n] = {step, exp_avg, ...}},
--- param_groups}. The load_state_dict of PyTorch's optimizer, and of this one, take it. Tensors are lent.
---@return {state: table<integer, table>, param_groups: table[]}
function Optimizer:torch_state_dict()
  called(self, "torch_state_dict")
  return optimizer_state.torch(for_torch(self), own_names(self) ~= nil)
end

-- Whether a state, or an open file of one, is in PyTorch's form.
local function is_torch(state)
  if type(state.holds) == "function" then return state:holds "param_groups" end
  return state.values == nil and state.param_groups ~= nil
end

-- Takes over a state in PyTorch's form. It has no masters, which begin anew as the parameters are.
local function load_torch(self, state)
  local view = for_torch(self)
  optimizer_state.load(view, state)
  self.steps = view.steps
  for _, entry in ipairs(self.entries) do entry.master = nil end
end

--- Takes over what state_dict gave: tensors that lie where their parameter does are adopted, not copied. Or PyTorch's
--- form (torch_state_dict), from tables or an open file, which is copied.
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
  if model ~= nil and not nn_module.is_module(model) then
    error("load_state_dict: the second argument must be a model")
  end
  local values, planned = state.values, {}
  local names = saved_names(self, model, values)
  if values.kind ~= self.kind.name then
    error(("the saved optimizer is %s, this one is %s"):format(tostring(values.kind), self.kind.name))
  end
  local problem = groups.mismatch(self.groups, values.groups)
  if problem then error(problem) end
  for i, entry in ipairs(self.entries) do
    local t = values.t[names[i]]
    if not t then error("the saved optimizer has no state for parameter " .. names[i]) end
    local found = { t = t }
    for _, name in ipairs(t > 0 and self.kind.state(entry.group) or {}) do
      local tensor = state.tensors[names[i] .. "." .. name]
      if tensor == nil then error(("the saved optimizer has no %s for parameter %s"):format(name, names[i])) end
      found[name] = same_or_fail(names[i] .. "." .. name, tensor, entry.param)
    end
    local master = entry.param:dtype() ~= state_dtype(entry.param) and state.tensors[names[i] .. ".master"] or nil
    if master ~= nil then found.master = same_or_fail(names[i] .. ".master", master, entry.param) end
    planned[i] = found
  end
  for i, entry in ipairs(self.entries) do
    entry.master = nil
    for _, name in ipairs(STATES) do entry[name] = nil end      -- what the state has none of begins anew
    for key, value in pairs(planned[i]) do
      if nn_module.is_tensor(value) then value:keep() end
      entry[key] = value
    end
  end
  groups.from_text(self.groups, values.groups)
  self.steps = values.steps
end

local function adam_apply(list, group, t, scale)
  local b1, b2 = group.betas[1], group.betas[2]
  native.ops.adam_(list, group.decoupled and 1 or 0, group.lr, b1, b2, group.eps, group.weight_decay, scale,
    1 - b1 ^ t, 1 - b2 ^ t)
end

local function adam_fill(list, entry, grad)
  local n = #list
  list[n + 1], list[n + 2], list[n + 3] = entry.param, entry.master, grad
  list[n + 4], list[n + 5] = entry.exp_avg, entry.exp_avg_sq
end

local function adam(name, weight_decay, decoupled)
  local states = { "exp_avg", "exp_avg_sq" }
  return {
    name = name, width = 5, fill = adam_fill, apply = adam_apply,
    defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = weight_decay, decoupled = decoupled },
    state = function() return states end,
  }
end
local ADAM, ADAMW = adam("Adam", 0, false), adam("AdamW", 0.01, true)

local NO_STATE, MOMENTUM = {}, { "momentum_buffer" }
local SGD = {
  name = "SGD", width = 4,
  defaults = { lr = 1e-3, momentum = 0, weight_decay = 0, dampening = 0, nesterov = false },
  state = function(group) return group.momentum ~= 0 and MOMENTUM or NO_STATE end,
  fill = function(list, entry, grad)
    local n = #list
    list[n + 1], list[n + 2], list[n + 3] = entry.param, entry.master, grad
    list[n + 4] = entry.group.momentum ~= 0 and entry.momentum_buffer or entry.master
  end,
  apply = function(list, group, t, scale)
    native.ops.sgd_(list, group.lr, group.momentum, group.weight_decay, group.dampening, group.nesterov and 1 or 0,
      t == 1 and 1 or 0, scale)
  end,
}

--- Adam; weight_decay is added to the gradient. params: a module, a list of parameters, or of groups {params=, ...}.
--- per_rank: in a group of several ranks each updates by the gradients it has, which the script has added up where it
--- wants that; without it step() is refused there.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, max_norm?: number,
---  per_rank?: boolean}
---@return ps.Optimizer
function optim.Adam(params, options) return build(ADAM, params, options) end

--- Adam with decoupled weight decay (default 0.01).
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, betas?: number[], eps?: number, weight_decay?: number, max_norm?: number,
---  per_rank?: boolean}
---@return ps.Optimizer
function optim.AdamW(params, options) return build(ADAMW, params, options) end

--- Stochastic gradient descent with PyTorch's momentum.
---@param params ps.nn.Module|ps.Tensor[]|table[]
---@param options? {lr?: number, momentum?: number, dampening?: number, nesterov?: boolean, weight_decay?: number,
---  max_norm?: number, per_rank?: boolean}
---@return ps.Optimizer
function optim.SGD(params, options) return build(SGD, params, options) end

optim.GradScaler = loss_scaler.pytorch

exact.all(Optimizer, "optimizer:", true)

return require("ps.core.foreign").stand(optim, "optim")
