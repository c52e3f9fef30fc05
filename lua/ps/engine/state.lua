-- SPDX-License-Identifier: BSD-3-Clause
-- Saving and loading the state of an engine's optimizer, a tensor at a time. There are two forms: PyTorch's, with
-- parameters numbered in the order of groups, and the one by name that ps.checkpoints writes. Either may come from
-- tables, or from an open file (ps.load with lazy = true), which is then never read whole. A state is checked as a
-- whole before a value is written.
--
-- An optimizer has: kind, steps, groups, group_of (from 0, by parameter), and
--   count() parameters, in order of registration;  slot(i) {name, m, v, master or nil}, i from 1
--   order(i)    the place among the trained parameters of the whole model, group by group
--   updates(i), set_updates(i, t)
local ps = require "ps"
local cut = require "ps.nn.cut"
local optim_groups = require "ps.optim_groups"
local torch_pt = require "ps.torch_pt"
local error = require("ps.caller").error

local state = {}

local SETTINGS = { "lr", "betas", "eps", "weight_decay", "decoupled" }

-- -- sources (ps.nn.cut) ---------------------------------------------------------------------------------------------
local function is_file(value) return type(value) == "table" and type(value.read_into) == "function" end

local function has(source, key)
  if is_file(source) then return source:has(key) end
  return ps.is_tensor(source[key])
end

local function check_tensor(source, key, slot)
  if not has(source, key) then error("the saved optimizer has no " .. key .. " for parameter " .. slot.name, 0) end
  local shape = is_file(source) and source:shape(key) or source[key]:shape()
  local fit = cut.fit(shape, slot.param)
  if not fit or fit == "own" and source.whole == true then
    error(("the saved optimizer's %s of parameter %s is [%s], the parameter is [%s]"):format(key, slot.name,
      table.concat(shape, ", "), table.concat(cut.shape(slot.param), ", ")), 0)
  end
end

-- Sets a parameter's exp_avg and exp_avg_sq from a source, which has them as `prefix`exp_avg and `prefix`exp_avg_sq.
-- Without a source they become zeros, as if the parameter had never been updated.
local function set_moments(slot, source, prefix)
  if source then
    cut.read(source, prefix .. "exp_avg", slot.m, slot.param)
    cut.read(source, prefix .. "exp_avg_sq", slot.v, slot.param)
  elseif slot.m ~= nil then
    ps.no_grad(function()
      slot.m:fill_(0)
      slot.v:fill_(0)
    end)
  end
end

local function check_groups(saved, opt)
  local problem = optim_groups.mismatch(opt.groups, saved)
  if problem then error(problem, 0) end
end

-- -- by name ---------------------------------------------------------------------------------------------------------
--- {tensors, values}: tensors by "<parameter>.exp_avg" and "<parameter>.exp_avg_sq"; values as JSON can hold them.
--- Masters are not among the tensors, since the model's state_dict has them.
---@param opt ps.EngineOptimizer
---@return {tensors: table<string, ps.Tensor>, values: table}
function state.named(opt)
  local tensors = {}
  local values = { kind = opt.kind, steps = opt.steps, calls = opt.engine.steps, t = {}, groups = {} }
  for i = 1, opt:count() do
    local t, slot = opt:updates(i), opt:slot(i)
    local mine = slot.m ~= nil                     -- else another rank has this state
    if mine then values.t[slot.name] = t end
    if mine and t > 0 then tensors[slot.name .. ".exp_avg"], tensors[slot.name .. ".exp_avg_sq"] = slot.m, slot.v end
  end
  for number, group in ipairs(opt.groups) do values.groups[number] = optim_groups.to_text(group, SETTINGS) end
  return { tensors = tensors, values = values }
end

local function load_named(opt, source, values)
  if values.kind ~= opt.kind then
    error(("the saved optimizer is %s, this one is %s"):format(tostring(values.kind), opt.kind), 0)
  end
  check_groups(values.groups, opt)
  for i = 1, opt:count() do
    local slot = opt:slot(i)
    local t = values.t[slot.name]
    if not t and slot.m ~= nil then
      error("the saved optimizer has no state for parameter " .. slot.name, 0)
    end
    if slot.m ~= nil and t > 0 then
      check_tensor(source, slot.name .. ".exp_avg", slot)
      check_tensor(source, slot.name .. ".exp_avg_sq", slot)
    end
  end
  for i = 1, opt:count() do
    local slot = opt:slot(i)
    local t = values.t[slot.name] or 0
    set_moments(slot, slot.m ~= nil and t > 0 and source, slot.name .. ".")
    if slot.master ~= nil and has(source, slot.name .. ".master") then
      check_tensor(source, slot.name .. ".master", slot)
      cut.read(source, slot.name .. ".master", slot.master, slot.param)
      opt.engine.masters.held[slot.param]:settle(slot.param)
    end
    opt:set_updates(i, t)
  end
  optim_groups.from_text(opt.groups, values.groups)
  opt.steps = values.steps
  opt.engine.steps = values.calls or values.steps
end

-- -- PyTorch's form ---------------------------------------------------------------------------------------------------
-- Each group's parameters, in the order of the whole model: {name, i = slot's, or nil where another stage has it}.
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

--- {state = {[n] = {step, exp_avg, exp_avg_sq}}, param_groups}: the form that torch.optim.AdamW's load_state_dict
--- takes.
---@param opt ps.EngineOptimizer
---@return {state: table<integer, table>, param_groups: table[]}
function state.torch(opt)
  local all, groups, n = torch_pt.mark("dict", {}), {}, 0
  for number, list in ipairs(members(opt)) do
    local group, params = opt.groups[number], torch_pt.mark("list", {})
    for k, at in ipairs(list) do
      local t, slot = at.i and opt:updates(at.i), at.i and opt:slot(at.i)
      if slot and slot.m ~= nil and t > 0 then
        all[n] = { step = t, exp_avg = slot.m, exp_avg_sq = slot.v }
      end
      params[k], n = n, n + 1
    end
    groups[number] = { lr = group.lr, betas = { group.betas[1], group.betas[2] }, eps = group.eps,
      weight_decay = group.weight_decay, amsgrad = false, maximize = false, decoupled_weight_decay = group.decoupled,
      params = params }
  end
  return { state = all, param_groups = groups }
end

-- The entry of one parameter: a source and its `step`; nil when it has none.
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

local function whole_step(step, name)
  if ps.is_tensor(step) then step = step:item() end
  step = tonumber(step)
  if not step or step < 0 or step % 1 ~= 0 then
    error(("the saved optimizer's step of parameter %s is %s, no whole number"):format(name, tostring(step)), 0)
  end
  return step
end

local function number_of(value)
  if ps.is_tensor(value) then value = value:item() end
  return tonumber(value)
end

-- Refuses a group whose settings are of another algorithm than this optimizer's, which is Adam or AdamW.
local function check_torch_group(from, number, opt)
  local function refuse(text, ...)
    error(("param_groups[%d] of the saved optimizer " .. text):format(number - 1, ...), 0)
  end
  for _, key in ipairs { "amsgrad", "maximize" } do
    if from[key] then refuse("has %s = True, which %s here does not do", key, opt.kind) end
  end
  for _, key in ipairs { "momentum", "alpha", "rho" } do
    if from[key] ~= nil and not from.betas then refuse("has %s and no betas: it is not of Adam or AdamW", key) end
  end
  local decoupled, decays = from.decoupled_weight_decay, number_of(from.weight_decay) ~= 0
  if decoupled ~= nil and decays and decoupled ~= (opt.kind == "AdamW") then
    refuse("is of %s (decoupled_weight_decay = %s), this one is %s", decoupled and "AdamW" or "Adam",
      decoupled and "True" or "False", opt.kind)
  end
end

local function load_torch(opt, saved)
  local groups = is_file(saved) and saved:get("param_groups") or saved.param_groups
  if type(groups) ~= "table" then error("this is no optimizer's state: it has no param_groups", 0) end
  check_groups(groups, opt)
  local plan, most = {}, 0
  for number, list in ipairs(members(opt)) do
    local params = groups[number].params or {}
    check_torch_group(groups[number], number, opt)
    if #params ~= #list then
      error(("group %d of the saved optimizer has %d parameters, here it has %d"):format(number - 1, #params, #list), 0)
    end
    for k, at in ipairs(list) do
      local source, step = entry_of(saved, params[k])
      step = source and whole_step(step, at.name) or 0
      most = math.max(most, step)
      local slot = at.i and opt:slot(at.i)
      if slot and slot.m == nil then source, step = nil, 0 end   -- another rank has this state
      if slot and source then
        check_tensor(source, "exp_avg", slot)
        check_tensor(source, "exp_avg_sq", slot)
      end
      if slot then plan[#plan + 1] = { i = at.i, slot = slot, source = source, step = step } end
    end
  end
  for _, at in ipairs(plan) do
    set_moments(at.slot, at.source, "")
    opt:set_updates(at.i, at.step)
  end
  for number, group in ipairs(opt.groups) do
    local from = groups[number]
    for _, key in ipairs { "lr", "eps", "weight_decay" } do group[key] = number_of(from[key]) or group[key] end
    if from.betas then group.betas = { number_of(from.betas[1]), number_of(from.betas[2]) } end
  end
  opt.steps, opt.engine.steps = most, most
end

--- Takes over the result of state.named or state.torch, or a file of either. Values are copied.
---@param opt ps.EngineOptimizer
---@param saved table|ps.TorchFile
function state.load(opt, saved)
  if type(saved) ~= "table" then error("load_state_dict takes a table or an open file, not a " .. type(saved)) end
  if is_file(saved) then
    if not saved.holds then
      error(("%s holds tensors only, no settings of an optimizer: load { tensors = file, values = ... }, a .pt file, "
        .. "or a checkpoint by ps.checkpoints"):format(tostring(saved.path)))
    end
    if saved:holds("values") then return load_named(opt, saved:at("tensors"), saved:get("values")) end
    return load_torch(opt, saved)
  end
  if saved.values then return load_named(opt, saved.tensors, saved.values) end
  return load_torch(opt, saved)
end

return state
