-- SPDX-License-Identifier: BSD-3-Clause
-- Runs an engine in plain memory (memory = "plain"). Parameters stay in the memory in which they were created, and the
-- optimizer is an optimizer of ps.optim. The configuration and the calls are the same as with chunks. Specs compare the
-- results of plain memory and of chunks, bit for bit. Plain memory also accepts models with dtypes that chunks cannot
-- hold.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local registry = require "ps.nn.registry"
local optim = require "ps.optim"
local optim_groups = require "ps.optim.groups"
local engine_groups = require "ps.optim.engine_groups"
local optimizers = require "ps.optimizers"
local adopt = require "ps.engine.state.adopt"
local masters = require "ps.engine.state.masters"
local optimizer = require "ps.engine.state.optimizer"
local step = require "ps.engine.step"
local training = require "ps.engine.step.trained"

local plain = {}

---@class ps.engine.PlainOptimizer: ps.EngineOptimizer computes with an optimizer of ps.optim
---@field inner ps.Optimizer
local PlainOptimizer = setmetatable({}, { __index = optimizer.methods })
PlainOptimizer.instance = optim_groups.fields(PlainOptimizer, { __tostring = function(self)
  return tostring(self.inner)
end })

-- -- called by the step -----------------------------------------------------------------------------------------------
function PlainOptimizer:settings_into(how) how.groups = nil end
function PlainOptimizer:norm() return optim.norm_of(self.inner) end

function PlainOptimizer:squares(list) -- luacheck: no self
  local grads, of, squares = {}, {}, {}
  for i, at in ipairs(list) do
    local grad = at.row.param:grad()
    squares[i] = 0
    if grad ~= nil then grads[#grads + 1], of[#of + 1] = grad, i end
  end
  for k, square in ipairs(scope.no_grad(optim.squares, grads)) do squares[of[k]] = square end
  optim.give_back(grads)
  return squares
end

function PlainOptimizer:set_factor(place, factor) self.engine.built.list[place].entry.scale = factor end

-- Drops the factors for gradients, because they are valid for only one step.
local function forget_factors(self)
  for _, row in ipairs(self.engine.built.list) do row.entry.scale = nil end
end

-- Updates the parameters. Drops the gradient of each parameter after its update. If an update fails, a second call
-- therefore updates only the remaining parameters.
function PlainOptimizer:update(scale)
  optim.apply(self.inner, scale, function(entry)
    entry.param:set_grad(nil)
    self.n_updated = self.n_updated + 1
  end)
  self.n_updated = 0
  forget_factors(self)
end

-- Raises an error if the script has called loss:backward() and this has made gradients. With chunks, the backward walk
-- itself raises an error unless model:backward has started it.
function PlainOptimizer:check_no_gradients()
  for _, row in ipairs(self.engine.built.list) do
    if row.param:grad() ~= nil then
      caller.error(("%s has a gradient before the step's first backward: call model:backward(loss) instead of "
        .. "loss:backward(), or optimizer:zero_grad() first"):format(row.name))
    end
  end
end

function PlainOptimizer:updated() return self.n_updated, self:count() end

function PlainOptimizer:drop()
  self.inner:zero_grad()
  self.n_updated = 0
  forget_factors(self)
end
PlainOptimizer.drop_own = PlainOptimizer.drop
function PlainOptimizer:loaded() self.inner.steps = self.steps end

-- The functions from here to set_updates are called by optim/state.lua.
function PlainOptimizer:count() return #self.engine.built.list end
function PlainOptimizer:order(i) return i end -- luacheck: no self
function PlainOptimizer:slot(i)
  local row = self.engine.built.list[i]
  local entry, param = row.entry, row.param
  local averages, shape = {}, param:shape()
  local states = optimizers.states_for(self.states[self.group_of[i] + 1], shape)
  for k, state in ipairs(states) do
    if entry[state.name] == nil then
      local dtype = state.dtype == "fp32" and param:dtype() == "fp64" and "fp64" or state.dtype
      entry[state.name] = create.zeros(state.shape and state.shape(shape) or shape, { dtype = dtype,
        device = param:device() }):keep()
    end
    averages[k] = entry[state.name]
  end
  return { name = row.name, param = param, states = states, averages = averages,
    master = not rawequal(entry.master, param) and entry.master or nil }
end
function PlainOptimizer:updates(i) return self.engine.built.list[i].entry.t end
function PlainOptimizer:set_updates(i, t) self.engine.built.list[i].entry.t = t end

-- Converts fp32 parameters to the dtype of the configuration. The fp32 values of the parameters become their masters.
local function convert(module, precision)
  local made, replaced = {}, {}
  registry.walk(module, function(_, value, kind, owner, key)
    if kind ~= "param" or value:dtype() ~= "fp32" or precision == "fp32" then return end
    local from = nn_module.address(value)
    if not replaced[from] then
      local trains = value:needs_grad()
      local copy = nn_module.Parameter(scope.no_grad(function() return value:detach():to(precision) end))
      copy:requires_grad(trains)
      value:requires_grad(false)
      replaced[from] = copy
      made[nn_module.address(copy)] = value
    end
    registry.put(owner, key, replaced[from])
  end)
  return made
end

-- Returns the entries of the optimizer, with names, in the order of the module. Each entry already has its master.
local function named_rows(module, inner, made)
  local entries, rows = {}, {}
  local orders = {}
  for i, entry in ipairs(inner.entries) do entries[nn_module.address(entry.param)], orders[entry] = entry, i - 1 end
  for name, param in module:named_parameters() do
    local entry = entries[nn_module.address(param)]
    if entry then
      local half = param:dtype() == "bf16" or param:dtype() == "fp16"
      local master = made[nn_module.address(param)]
      if master == nil and half then master = scope.no_grad(function() return param:detach():to("fp32") end):keep() end
      if master == nil then master = param end
      entry.master = master
      rows[#rows + 1] = { name = name, param = param, entry = entry, order = orders[entry], master = master,
        values = master }
    end
  end
  return rows
end

-- Returns the groups of the optimizer with their parameters, in the form that ps.optim accepts.
local function groups_of(engine, module)
  local param_groups, trained = engine.param_groups, {}
  local list = engine_groups.configured(engine.cfg.optimizer, param_groups)
  for _, group in ipairs(list) do group.params = {} end
  for name, p in module:named_parameters() do
    if p:needs_grad() then trained[#trained + 1] = { name = name, param = p } end
  end
  engine_groups.check_members(param_groups, trained, function(text) engine:note(text) end)
  for name, p in module:named_parameters() do
    if p:needs_grad() then
      local group = list[engine_groups.number_of(param_groups, name, p)]
      optim_groups.check_parameter(group, name, p, false)
      table.insert(group.params, p)
    end
  end
  return list
end

-- Returns two results: the field `built` of the engine, and a list with the group (from 0) of each row of built.list.
local function rows_of(module, inner, made)
  local rows, trains, untrained, group_of, numbers = named_rows(module, inner, made), {}, {}, {}, {}
  for _, row in ipairs(rows) do trains[nn_module.address(row.param)] = true end
  for name, param in module:named_parameters() do
    if not trains[nn_module.address(param)] then untrained[#untrained + 1] = { name = name, param = param } end
  end
  for number, group in ipairs(inner.groups) do numbers[group] = number - 1 end
  for i, row in ipairs(rows) do group_of[i] = numbers[row.entry.group] end
  return { list = rows, frozen = {}, untrained = untrained }, group_of
end

--- Adds the parameters that were thawed since the last step to the optimizer. Their optimizer states are initialized
--- with zeros.
---@param engine ps.Engine
function plain.train_thawed(engine)
  local list = training.thawed(engine)
  if #list == 0 then return end
  local inner, made, entry_of = engine.optimizer.inner, {}, {}
  local param_groups, number_of = engine.param_groups, {}
  engine.masters:sync()
  for _, entry in ipairs(inner.entries) do
    local at = nn_module.address(entry.param)
    entry_of[at] = entry
    if not rawequal(entry.master, entry.param) then made[at] = entry.master end
  end
  for number, group in ipairs(inner.groups) do number_of[group] = number end
  for _, row in ipairs(list) do
    adopt.check_thawed(engine, row.name)
    local group = inner.groups[engine_groups.number_of(param_groups, row.name, row.param)]
    optim_groups.check_parameter(group, row.name, row.param, false)
    row.param:set_grad(nil)
    entry_of[nn_module.address(row.param)] = { param = row.param, group = group, t = 0 }
  end
  local members, entries = {}, {}
  for i in ipairs(inner.groups) do members[i] = {} end
  for _, p in ipairs(engine.module:parameters()) do
    local entry = entry_of[nn_module.address(p)]
    if entry then table.insert(members[number_of[entry.group]], entry) end
  end
  for i, group in ipairs(inner.groups) do
    group.params = {}
    for k, entry in ipairs(members[i]) do
      group.params[k], entries[#entries + 1] = entry.param, entry
      inner.trained[nn_module.address(entry.param)] = true
    end
  end
  inner.entries = entries
  for i, own in ipairs(members) do inner.counts[i] = #own end
  local built, group_of = rows_of(engine.module, inner, made)
  for key, value in pairs(built) do engine.built[key] = value end
  engine.optimizer.group_of = group_of
  engine.masters:close()
  engine:laid_out(masters.new(engine.built))
end

-- Begins a step. In plain memory, a step needs no plan.
local function begin_step(engine)
  plain.train_thawed(engine)
  engine.masters:sync()
  native.check(step.begin(engine, false))
end

--- Creates the module, and an optimizer of ps.optim. engine/setup.lua must have read the configuration before.
---@param engine ps.Engine with the fields cfg, accumulate, precision, device_name and others
---@param request table
---@return table fields of the engine
function plain.initialize(engine, request)
  local was = create.set_default_device(engine.device_name)
  local ok, module = pcall(request.module and function() return request.module end or request.model_func)
  create.set_default_device(was)
  if not ok then error(module, 0) end
  if not nn_module.is_module(module) then
    error("ps.initialize: model_func returned a " .. type(module) .. ", no "
    .. "module", 0)
  end
  local cfg = engine.cfg
  adopt.take(engine, module)
  local made = convert(module, engine.precision)
  adopt.take(engine, module)                                      -- registers the parameters of the module
  if engine.accumulate > 1 and cfg.grad_accum_dtype == "fp32" then
    for _, p in ipairs(module:parameters()) do p:grad_in_fp32(true) end
  end
  local inner = optim[cfg.optimizer.type](groups_of(engine, module),
    { lr = cfg.rate_given and cfg.optimizer.params.lr or nil })
  inner.of_engine = true
  local built, group_of = rows_of(module, inner, made)
  local own = setmetatable({ engine = engine, inner = inner, groups = inner.groups, group_of = group_of,
    kind = cfg.optimizer.type, states = engine_groups.states(inner.groups), steps = 0, n_updated = 0,
    max_norm = cfg.gradient_clipping > 0 and cfg.gradient_clipping or nil }, PlainOptimizer.instance)
  optim_groups.begin_rates(own, cfg.rate_given and cfg.optimizer.params.lr or nil)
  return { plain = true, module = module, begin_step = begin_step, built = built, masters = masters.new(built),
    optimizer = own }
end

return plain
