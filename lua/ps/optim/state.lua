-- SPDX-License-Identifier: BSD-3-Clause
-- Saves and loads the state of an engine's optimizer, a tensor at a time. There are two forms: PyTorch's, with
-- parameters numbered in the order of groups, and the form by name that ps.checkpoints writes. Either may be in tables
-- or in an open file (ps.load with lazy = true), which is never read as a whole. The whole state is checked before the
-- first value is written.
--
-- The optimizer of this file has: kind, steps, groups, group_of (from 0, by parameter), and
--   averages: a parameter's tensors in addition to its fp32 value, {"exp_avg", "exp_avg_sq"}, {"momentum_buffer"} or {}
--   count() parameters, in order of registration;  slot(i) {name, param, averages or nil, master or nil}, i from 1;
--     averages: a tensor for each of the optimizer's; nil if another rank has them
--   order(i)    the place among the trained parameters of the whole model, group by group
--   updates(i), set_updates(i, t)
--   named: false if parameters have no names
local scope = require "ps.core.scope"
local sharded = require "ps.nn.sharded"
local optim_groups = require "ps.optim.groups"
local torch_pt = require "ps.io.torch_pt"
local error = require("ps.core.caller").error

local state = {}

-- Settings that are saved. Each kind of optimizer has some of them.
local SETTINGS = { "lr", "betas", "eps", "weight_decay", "decoupled", "momentum", "dampening", "nesterov" }

-- -- sources (ps.nn.sharded) ------------------------------------------------------------------------------------------
local function is_file(value) return type(value) == "table" and type(value.read_into) == "function" end

local function has(source, key)
  if is_file(source) then return source:has(key) end
  return scope.is_tensor(source[key])
end

local function check_tensor(source, key, slot)
  if not has(source, key) then error("the saved optimizer has no " .. key .. " for parameter " .. slot.name, 0) end
  local shape = is_file(source) and source:shape(key) or source[key]:shape()
  local fit = sharded.fit(shape, slot.param)
  if not fit or fit == "own" and source.whole == true then
    error(("the saved optimizer's %s of parameter %s is [%s], but the parameter is [%s]"):format(key, slot.name,
      table.concat(shape, ", "), table.concat(sharded.shape(slot.param), ", ")), 0)
  end
end

local function check_averages(opt, source, prefix, slot)
  for _, name in ipairs(opt.averages) do check_tensor(source, prefix .. name, slot) end
end

-- Sets a parameter's averages from a source, in which they are `prefix`exp_avg and so on. Without a source they become
-- zeros, as if the parameter had never been updated.
local function set_averages(opt, slot, source, prefix)
  for k, average in ipairs(slot.averages or {}) do
    if source then sharded.read(source, prefix .. opt.averages[k], average, slot.param)
    else scope.no_grad(function() average:fill_(0) end) end
  end
end

-- Refuses a saved group with momentum if this optimizer has no momentum buffers.
local function check_momentum(momentum, number, opt)
  if opt.kind ~= "SGD" or #opt.averages > 0 or not momentum or momentum == 0 then return end
  error(("param_groups[%d] of the saved optimizer has momentum %g, but this one was made without; set momentum in the "
    .. "configuration"):format(number - 1, momentum), 0)
end

local function check_groups(saved, opt)
  local problem = optim_groups.mismatch(opt.groups, saved)
  if problem then error(problem, 0) end
end

-- -- by name ---------------------------------------------------------------------------------------------------------
--- The state by name, {tensors, values}: tensors by "<parameter>.exp_avg" and so on; values in a form that JSON holds.
--- Masters are not among the tensors, since the model's state_dict has them.
---@param opt ps.EngineOptimizer
---@return {tensors: table<string, ps.Tensor>, values: table}
function state.named(opt)
  local tensors = {}
  local values = { kind = opt.kind, steps = opt.steps, calls = opt.engine.steps, t = {}, groups = {} }
  for i = 1, opt:count() do
    local t, slot = opt:updates(i), opt:slot(i)
    if slot.averages then                           -- nil: another rank has this state
      values.t[slot.name] = t
      for k, name in ipairs(t > 0 and opt.averages or {}) do tensors[slot.name .. "." .. name] = slot.averages[k] end
    end
  end
  for number, group in ipairs(opt.groups) do values.groups[number] = optim_groups.to_text(group, SETTINGS) end
  return { tensors = tensors, values = values }
end

local function load_named(opt, source, values)
  if values.kind ~= opt.kind then
    error(("the saved optimizer is %s, but this one is %s"):format(tostring(values.kind), opt.kind), 0)
  end
  check_groups(values.groups, opt)
  for number, group in ipairs(values.groups) do check_momentum(tonumber(group.momentum), number, opt) end
  for i = 1, opt:count() do
    local slot = opt:slot(i)
    local t = values.t[slot.name]
    if not t and slot.averages then
      error("the saved optimizer has no state for parameter " .. slot.name, 0)
    end
    if slot.averages and t > 0 then check_averages(opt, source, slot.name .. ".", slot) end
  end
  for i = 1, opt:count() do
    local slot = opt:slot(i)
    local t = values.t[slot.name] or 0
    set_averages(opt, slot, slot.averages and t > 0 and source, slot.name .. ".")
    if slot.master ~= nil and has(source, slot.name .. ".master") then
      check_tensor(source, slot.name .. ".master", slot)
      sharded.read(source, slot.name .. ".master", slot.master, slot.param)
      opt.engine.masters.held[slot.param]:loaded(slot.param)
    end
    opt:set_updates(i, t)
  end
  optim_groups.from_text(opt.groups, values.groups)
  opt.steps = values.steps
  opt.engine:set_steps(values.calls or values.steps)
end

-- -- PyTorch's form ---------------------------------------------------------------------------------------------------
-- Each group's parameters, in the order of the whole model: {name, i = slot's, or nil if another stage has it}.
local function members(opt)
  local all, lists = {}, {}
  for i = 1, opt:count() do
    all[i] = { i = i, name = opt.engine.built.list[i].name, group = opt.group_of[i], order = opt:order(i) }
  end
  for _, row in ipairs(opt.engine.built.elsewhere or {}) do
    all[#all + 1] = { name = row.name, group = row.group, order = row.order }
  end
  table.sort(all, function(a, b) return a.order < b.order end)
  for number in ipairs(opt.groups) do lists[number] = {} end
  for _, at in ipairs(all) do table.insert(lists[at.group + 1], at) end
  return lists
end

-- A group in PyTorch's form. names: its parameters' names, which PyTorch writes for named parameters.
local function torch_group(group, params, names)
  local out = { lr = group.lr, weight_decay = group.weight_decay, maximize = false, params = params,
    param_names = names }
  if group.betas then
    out.betas, out.eps = { group.betas[1], group.betas[2] }, group.eps
    out.amsgrad, out.decoupled_weight_decay = false, group.decoupled
  else
    out.momentum, out.dampening, out.nesterov = group.momentum, group.dampening, group.nesterov
  end
  return out
end

--- The state in PyTorch's form, {state = {[n] = {step, exp_avg, exp_avg_sq}}, param_groups}, which load_state_dict of
--- torch.optim.AdamW accepts. SGD's has momentum_buffer; PyTorch ignores its `step`. Groups have param_names, which
--- PyTorch keeps.
---@param opt ps.EngineOptimizer
---@param named? boolean default true: groups have param_names
---@return {state: table<integer, table>, param_groups: table[]}
function state.torch(opt, named)
  local all, groups, n = torch_pt.mark("dict", {}), {}, 0
  for number, list in ipairs(members(opt)) do
    local group, params, names = opt.groups[number], torch_pt.mark("list", {}), torch_pt.mark("list", {})
    for k, at in ipairs(list) do
      local t, slot = at.i and opt:updates(at.i), at.i and opt:slot(at.i)
      if slot and slot.averages and t > 0 then
        all[n] = { step = t }
        for j, name in ipairs(opt.averages) do all[n][name] = slot.averages[j] end
      end
      params[k], names[k], n = n, at.name, n + 1
    end
    groups[number] = torch_group(group, params, named ~= false and names or nil)
  end
  return { state = all, param_groups = groups }
end

-- The entry of one parameter: a source and its `step`; nil if it has none.
local function entry_of(saved, number)
  if is_file(saved) then
    local all = saved:at("state")
    if not all:holds(number) then return nil end
    local entry = all:at(number)
    return entry, entry:get("step")
  end
  local entry = saved.state[number]
  if entry then return entry, entry.step end
end

-- The number of updates of an entry. PyTorch's SGD does not count them. Then the existence of the buffer says whether
-- there was an update, and the op needs only this.
local function whole_step(opt, source, step, name)
  if step == nil and opt.kind == "SGD" then return has(source, "momentum_buffer") and 1 or 0 end
  if scope.is_tensor(step) then step = step:item() end
  step = tonumber(step)
  if not step or step < 0 or step % 1 ~= 0 then
    error(("the saved optimizer's step of parameter %s is %s, not a whole number"):format(name, tostring(step)), 0)
  end
  return step
end

local function number_of(value)
  if scope.is_tensor(value) then value = value:item() end
  return tonumber(value)
end

-- Refuses a group whose settings belong to another algorithm than this optimizer's.
local function check_torch_group(from, number, opt)
  local function refuse(text, ...)
    error(("param_groups[%d] of the saved optimizer " .. text):format(number - 1, ...), 0)
  end
  for _, key in ipairs { "amsgrad", "maximize" } do
    if from[key] then refuse("has %s = True, which %s does not support here", key, opt.kind) end
  end
  if opt.kind == "SGD" then
    if from.momentum == nil or from.betas or from.alpha then refuse "is not SGD's" end
    return check_momentum(number_of(from.momentum), number, opt)
  end
  for _, key in ipairs { "momentum", "alpha", "rho" } do
    if from[key] ~= nil and not from.betas then refuse("has %s and no betas: it is not Adam's or AdamW's", key) end
  end
  local decoupled, decays = from.decoupled_weight_decay, number_of(from.weight_decay) ~= 0
  if decoupled ~= nil and decays and decoupled ~= (opt.kind == "AdamW") then
    refuse("is %s's (decoupled_weight_decay = %s), but this one is %s", decoupled and "AdamW" or "Adam",
      decoupled and "True" or "False", opt.kind)
  end
end

-- The numbers in a saved group for `list`, its parameters here. If the group has param_names, its numbers are in the
-- order of those names; else they are in the order of the model. named: the parameters here have names.
local function numbers_of(group, number, list, named)
  local params, names = group.params or {}, named and group.param_names
  if #params ~= #list then
    error(("group %d of the saved optimizer has %d parameters, but here it has "
      .. "%d"):format(number - 1, #params, #list), 0)
  end
  if not names then return params end
  local by_name, numbers = {}, {}
  for k, name in ipairs(names) do by_name[name] = params[k] end
  for k, at in ipairs(list) do
    numbers[k] = by_name[at.name]
    if not numbers[k] then
      error(("param_names of group %d of the saved optimizer has no '%s' (its number %d is '%s'): it was saved with "
        .. "another model; correct the names there, or remove param_names to match parameters by their order"):format(
        number - 1, at.name, k - 1, tostring(names[k])), 0)
    end
  end
  return numbers
end

local function load_torch(opt, saved)
  local groups = is_file(saved) and saved:get("param_groups") or saved.param_groups
  if type(groups) ~= "table" then error("this is not an optimizer's state: it has no param_groups", 0) end
  check_groups(groups, opt)
  local plan, most = {}, 0
  for number, list in ipairs(members(opt)) do
    check_torch_group(groups[number], number, opt)
    local params = numbers_of(groups[number], number, list, opt.named ~= false)
    for k, at in ipairs(list) do
      local source, step = entry_of(saved, params[k])
      step = source and whole_step(opt, source, step, at.name) or 0
      if opt.kind == "SGD" and step == 0 then source = nil end
      most = math.max(most, step)
      local slot = at.i and opt:slot(at.i)
      if slot and not slot.averages then source, step = nil, 0 end   -- another rank has this state
      if slot and source then check_averages(opt, source, "", slot) end
      if slot then plan[#plan + 1] = { i = at.i, slot = slot, source = source, step = step } end
    end
  end
  for _, at in ipairs(plan) do
    set_averages(opt, at.slot, at.source, "")
    opt:set_updates(at.i, at.step)
  end
  for number, group in ipairs(opt.groups) do
    local from = groups[number]
    for _, key in ipairs(optim_groups.SETTINGS[opt.kind]) do
      if type(group[key]) == "number" then group[key] = number_of(from[key]) or group[key] end
    end
    optim_groups.loaded { group }
    if from.nesterov ~= nil and opt.kind == "SGD" then group.nesterov = from.nesterov end
    if from.betas then group.betas = { number_of(from.betas[1]), number_of(from.betas[2]) } end
  end
  opt.steps = most
  opt.engine:set_steps(most)
end

--- Loads the result of state.named or state.torch, or a file with either. Values are copied.
---@param opt ps.EngineOptimizer
---@param saved table|ps.TorchFile
function state.load(opt, saved)
  if type(saved) ~= "table" then error("load_state_dict takes a table or an open file, not a " .. type(saved)) end
  if is_file(saved) then
    if not saved.holds then
      error(("%s has only tensors and no settings of an optimizer: load { tensors = file, values = ... }, a .pt file, "
        .. "or a checkpoint with ps.checkpoints"):format(tostring(saved.path)))
    end
    if saved:holds("values") then return load_named(opt, saved:at("tensors"), saved:get("values")) end
    return load_torch(opt, saved)
  end
  if saved.values then return load_named(opt, saved.tensors, saved.values) end
  return load_torch(opt, saved)
end

return state
