-- SPDX-License-Identifier: BSD-3-Clause
-- Saves and loads the state of an engine's optimizer, one tensor at a time. The state has one of two forms. In
-- PyTorch's form, parameters are numbered in the order of the groups. In the other form, which ps.checkpoints writes,
-- states are stored by parameter name. Either form may be in tables, or in an open file (ps.load with lazy = true). A
-- file is never read as a whole. The whole state is checked before the first value is written.
--
-- The optimizer `opt` has the fields kind, steps, groups and group_of. The field `kind` of a group is the name of the
-- group's optimizer. group_of maps a parameter to its group, counted from 0. The optimizer also has these fields and
-- methods, where groups and parameters are counted from 1:
--   states      for each group, the states that its parameters have in addition to their fp32 values
--               (ps.optimizers.State)
--   count()     the number of parameters, which are in the order of registration
--   slot(i)     {name, param, states, averages or nil, master or nil} of parameter i. averages has a tensor for each
--               state, and is nil if another rank has the tensors
--   order(i)    the index of parameter i among the trained parameters of the whole model, group by group
--   updates(i), set_updates(i, t)   get and set the number of updates of parameter i
--   named       false if parameters have no names
local scope = require "ps.core.scope"
local sharded = require "ps.nn.sharded"
local average = require "ps.optim.average"
local optim_groups = require "ps.optim.groups"
local saved_groups = require "ps.optim.saved_groups"
local optimizers = require "ps.optimizers"
local copied = require "ps.core.copied"
local torch_pt = require "ps.io.torch_pt"
local rectangles = require "ps.core.rectangles"
local caller = require "ps.core.caller"
local error = caller.error

local state = {}

-- -- sources (ps.nn.sharded) ------------------------------------------------------------------------------------------
local function is_file(value) return type(value) == "table" and type(value.read_into) == "function" end

local function has(source, key)
  if is_file(source) then return source:has(key) end
  return scope.is_tensor(source[key])
end

-- Checks a tensor of a source. `state_of` describes the state. If the tensor is a master, state_of is nil, and the
-- tensor must have the parameter's shape.
local function check_tensor(source, key, slot, state_of)
  if not has(source, key) then error("the saved optimizer has no " .. key .. " for parameter " .. slot.name, 0) end
  local shape = is_file(source) and source:shape(key) or source[key]:shape()
  if state_of and state_of.shape then
    local own = state_of.shape(slot.param:shape())
    if rectangles.same(shape, own) then return end
    error(("the saved optimizer's %s of parameter %s is [%s], but it needs [%s]"):format(key, slot.name,
      table.concat(shape, ", "), table.concat(own, ", ")), 0)
  end
  local fit = sharded.fit(shape, slot.param)
  if not fit or fit == "own" and source.whole == true then
    error(("the saved optimizer's %s of parameter %s is [%s], but the parameter is [%s]"):format(key, slot.name,
      table.concat(shape, ", "), table.concat(sharded.shape(slot.param), ", ")), 0)
  end
end

-- Checks a parameter's averages in a source. The first `needed` states must be there.
local function check_averages(source, prefix, slot, needed)
  for k, of in ipairs(slot.states) do
    if k <= needed or has(source, prefix .. of.name) then check_tensor(source, prefix .. of.name, slot, of) end
  end
end

-- Sets a parameter's averages from a source. The names in the source are `prefix` followed by exp_avg and so on.
-- Averages that the source does not have become zero, as before the first update.
local function set_averages(slot, source, prefix)
  for k, to in ipairs(slot.averages or {}) do
    local of = slot.states[k]
    local name = prefix .. of.name
    if not source or not has(source, name) then scope.no_grad(function() to:fill_(0) end)
    elseif of.shape then sharded.read_plain(source, name, to)
    else sharded.read(source, name, to, slot.param) end
  end
end

local function number_of(value)
  if scope.is_tensor(value) then value = value:item() end
  return tonumber(value)
end

-- Returns the number of states that a saved group needs with its settings. Raises an error if this optimizer does not
-- have these states.
local function needed_by(saved, number, opt)
  local group, made = {}, optimizers.of_group(opt.groups[number])
  if not made.needed or made.takes then return #made.states end
  for key, value in pairs(opt.groups[number]) do group[key] = value end
  for _, key in ipairs(made.settings) do
    if type(group[key]) == "number" then group[key] = number_of(saved[key]) or group[key] end
  end
  local needed = made.needed(group)
  if needed <= #opt.states[number] then return needed end
  error(("param_groups[%d] of the saved optimizer: %s, but this one was made without the states that it needs; make it "
    .. "with this setting"):format(number, made.lacking(group)), 0)
end

--- Describes why the values of a saved state are not those of an optimizer with these groups. Returns nil if they are.
---@param values table
---@param kind string
---@param list table[]
---@return string?
function state.problem(values, kind, list)
  if values.kind ~= kind then
    return ("the saved optimizer is %s, but this one is %s"):format(tostring(values.kind), kind)
  end
  if type(values.t) ~= "table" then return "the saved optimizer has no table t of the parameters' updates" end
  for name, t in pairs(values.t) do
    if type(t) ~= "number" or t < 0 or t % 1 ~= 0 then
      return ("the saved optimizer's number of updates of parameter %s is %s, not a whole number"):format(
        tostring(name), tostring(t))
    end
  end
  if type(values.steps) ~= "number" then
    return ("the saved optimizer's number of steps is %s, not a number"):format(tostring(values.steps))
  end
  return saved_groups.mismatch(list, values.groups, kind) or
    saved_groups.problem(list, saved_groups.to_load(list, values))
end

-- Returns, for each group, its parameters in the order of the whole model. Each is {name, i}, where i is the index of
-- the slot. i is nil if another stage has the parameter.
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

-- -- by name ---------------------------------------------------------------------------------------------------------
--- Returns the state by parameter name. `tensors` has keys such as "<parameter>.exp_avg", and `values` has values that
--- JSON can store. Masters are not included, because they are part of the model's state_dict.
---@param opt ps.EngineOptimizer
---@return {tensors: table<string, ps.Tensor>, values: table}
function state.named(opt)
  optim_groups.check_same(opt, opt.kind)
  local tensors = {}
  local values = { kind = opt.kind, steps = opt.steps, calls = opt.engine.steps, t = {}, groups = {} }
  for i = 1, opt:count() do
    local t, slot = opt:updates(i), opt:slot(i)
    if slot.averages then                           -- nil if another rank has this state
      values.t[slot.name] = t
      for k, of in ipairs(t > 0 and slot.states or {}) do tensors[slot.name .. "." .. of.name] = slot.averages[k] end
    end
  end
  for number, group in ipairs(opt.groups) do
    values.groups[number] = saved_groups.saved(group)
    if group.kind ~= opt.kind then values.groups[number].kind = group.kind end
  end
  local entries, names = {}, {}
  for number, list in ipairs(members(opt)) do
    for _, at in ipairs(list) do entries[#entries + 1], names[#names + 1] = { group = opt.groups[number] }, at.name end
  end
  values.averages, values.changes = average.saved(entries, names), optim_groups.changes(opt.groups)
  return { tensors = tensors, values = values }
end

-- Prints a note if the saved optimizer has the state of parameters that are frozen here. This state is not loaded.
local function note_frozen(opt, updates)
  local names, seen = {}, {}
  for _, key in ipairs { "frozen", "untrained" } do
    for _, row in ipairs(opt.engine.built[key] or {}) do
      if (updates[row.name] or 0) > 0 and not seen[row.name] then
        names[#names + 1], seen[row.name] = row.name, true
      end
    end
  end
  if #names == 0 then return end
  opt.engine:note(("the saved optimizer has state of parameters that are frozen here (%d, the first is %s); this "
    .. "state is not loaded. To keep it, thaw them before loading and freeze them afterwards"):format(#names, names[1]))
end

-- Prints a note if saved settings replace other settings of this run.
local function note_settings(opt, saved)
  local texts = saved_groups.differences(opt.groups, saved)
  if not texts[1] or not opt.engine.note or not optim_groups.prints(opt) then return end
  opt.engine:note(("the settings of the saved optimizer replace those of this run (%s); to change one, assign it to "
    .. "optimizer.param_groups[i] after loading"):format(table.concat(texts, "; ", 1, math.min(#texts, 4))
    .. (#texts > 4 and ("; and %d more"):format(#texts - 4) or "")))
end

local function load_named(opt, source, values)
  local problem = state.problem(values, opt.kind, opt.groups)
  if problem then error(problem, 0) end
  local needed, theirs = {}, saved_groups.to_load(opt.groups, values)
  for number, group in ipairs(theirs) do needed[number] = needed_by(group, number, opt) end
  for i = 1, opt:count() do
    local slot = opt:slot(i)
    local t = values.t[slot.name]
    if not t and slot.averages then
      error("the saved optimizer has no state for parameter " .. slot.name, 0)
    end
    if slot.averages and t > 0 then
      check_averages(source, slot.name .. ".", slot, needed[opt.group_of[i] + 1])
    end
  end
  for i = 1, opt:count() do
    local slot = opt:slot(i)
    local t = values.t[slot.name] or 0
    set_averages(slot, slot.averages and t > 0 and source, slot.name .. ".")
    if slot.master ~= nil and has(source, slot.name .. ".master") then
      check_tensor(source, slot.name .. ".master", slot)
      sharded.read(source, slot.name .. ".master", slot.master, slot.param)
      opt.engine.masters.held[slot.param]:loaded(slot.param)
    end
    opt:set_updates(i, t)
  end
  note_frozen(opt, values.t)
  note_settings(opt, theirs)
  saved_groups.from_text(opt.groups, theirs)
  opt.steps = values.steps
  opt.engine:set_steps(values.calls or values.steps)
end

-- -- PyTorch's form ---------------------------------------------------------------------------------------------------
-- Returns a group in PyTorch's form. `names` has the names of its parameters, which PyTorch writes for named
-- parameters.
local function torch_group(group, params, names)
  local out, made = { maximize = false, params = params, param_names = names }, optimizers.of_group(group)
  for _, key in ipairs(optim_groups.read_keys(group)) do
    local value = group[key]
    if type(value) == "table" then value = copied(value) end
    out[key] = value
  end
  for key, value in pairs(made.torch.extra or {}) do out[key] = value end
  for _, key in ipairs(made.torch.nones or {}) do out[key] = torch_pt.none end
  if made.torch.write then made.torch.write(group, out) end
  return out
end

--- Returns the state in PyTorch's form, {state = {[n] = {step, exp_avg, exp_avg_sq}}, param_groups}. torch.optim.AdamW
--- can load it with load_state_dict. For SGD, an entry has momentum_buffer and a `step`, which PyTorch ignores. Groups
--- have param_names, which PyTorch keeps.
---@param opt ps.EngineOptimizer
---@param named? boolean whether groups have param_names (default true)
---@return {state: table<integer, table>, param_groups: table[]}
function state.torch(opt, named)
  local all, groups, n = torch_pt.mark("dict", {}), {}, 0
  for number, list in ipairs(members(opt)) do
    local group, params, names = opt.groups[number], torch_pt.mark("list", {}), torch_pt.mark("list", {})
    for k, at in ipairs(list) do
      local t, slot = at.i and opt:updates(at.i), at.i and opt:slot(at.i)
      if slot and slot.averages and slot.states[1] and t > 0 then
        all[n] = { step = t }
        for j, of in ipairs(slot.states) do all[n][of.name] = slot.averages[j] end
      end
      params[k], names[k], n = n, at.name, n + 1
    end
    groups[number] = torch_group(group, params, named ~= false and names or nil)
  end
  return { state = all, param_groups = groups }
end

-- Returns the entry of one parameter as a source, and its `step`. Returns nil if the parameter has no entry.
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

-- Returns the number of updates of an entry. If PyTorch's optimizer does not count updates, returns 1 if the first
-- state exists, and 0 otherwise. The op only needs to know whether this number is 0.
local function whole_step(made, source, step, name)
  if step == nil and made.torch.counts == false then return has(source, made.states[1].name) and 1 or 0 end
  local count = number_of(step)
  if not count or count < 0 or count % 1 ~= 0 then
    error(("the saved optimizer's step of parameter %s is %s, not a whole number"):format(name, tostring(step)), 0)
  end
  return count
end

-- Returns the settings of a saved group, and the number of states that it needs. Raises an error if the settings do not
-- belong to this optimizer's algorithm, or are out of range.
local function check_torch_group(from, number, opt)
  local function refuse(text, ...)
    error(("param_groups[%d] of the saved optimizer " .. text):format(number, ...), 0)
  end
  for _, key in ipairs { "amsgrad", "maximize" } do
    if from[key] then refuse("has %s = True, which %s does not support here", key, opt.groups[number].kind) end
  end
  local plain = {}
  for key, value in pairs(from) do
    if scope.is_tensor(value) then value = value:item() end
    if value ~= torch_pt.none then plain[key] = value end
  end
  local group = opt.groups[number]
  local problem = optimizers.of_group(group).torch.belongs(plain)
  if problem then refuse("%s", problem) end
  local read, values = optimizers.of_group(group).torch.read, {}
  local renamed = read and read(from) or {}
  for _, key in ipairs(optim_groups.read_keys(group)) do
    local value = renamed[key]
    if value == nil then value = plain[key] end
    if value == torch_pt.none then value = nil end
    if type(value) == "table" then
      local list = {}
      for k, item in ipairs(value) do list[k] = number_of(item) or item end
      value = list
    end
    values[key] = value
  end
  problem = optim_groups.problem(saved_groups.with(group, values))
  if problem then refuse("is refused: %s", problem) end
  return values, needed_by(from, number, opt)
end

-- Returns the indices that the parameters in `list` have in a saved group. If the group has param_names and `named` is
-- true, parameters are found by their names. Otherwise they are in the order of the model. `named` says whether the
-- parameters have names.
local function numbers_of(group, number, list, named)
  local params, names = group.params or {}, named and group.param_names
  if #params ~= #list then
    error(("the number of parameters in group %d is %d in the saved optimizer, but %d here"):format(number, #params,
      #list), 0)
  end
  if not names then return params end
  local by_name, numbers = {}, {}
  for k, name in ipairs(names) do by_name[name] = params[k] end
  for k, at in ipairs(list) do
    numbers[k] = by_name[at.name]
    if not numbers[k] then
      error(("param_names of group %d of the saved optimizer has no '%s' (its number %d is '%s'): it was saved with "
        .. "another model; correct the names there, or remove param_names to match parameters by their order"):format(
        number, at.name, k, tostring(names[k])), 0)
    end
  end
  return numbers
end

local function load_torch(opt, saved)
  local groups = is_file(saved) and saved:get("param_groups") or saved.param_groups
  if type(groups) ~= "table" then error("this is not an optimizer's state: it has no param_groups", 0) end
  local problem = saved_groups.mismatch(opt.groups, groups)
  if problem then error(problem, 0) end
  if not is_file(saved) and type(saved.state) ~= "table" then
    error("this is not an optimizer's state: it has no table state", 0)
  end
  local plan, most, settings = {}, 0, {}
  for number, list in ipairs(members(opt)) do
    local values, needed = check_torch_group(groups[number], number, opt)
    settings[number] = values
    local params, made = numbers_of(groups[number], number, list, opt.named ~= false),
      optimizers.of_group(opt.groups[number])
    for k, at in ipairs(list) do
      local source, step = entry_of(saved, params[k])
      step = source and whole_step(made, source, step, at.name) or 0
      if made.torch.counts == false and step == 0 then source = nil end
      most = math.max(most, step)
      local slot = at.i and opt:slot(at.i)
      if slot and not slot.averages then source, step = nil, 0 end   -- another rank has this state
      if slot and source then check_averages(source, "", slot, needed) end
      if slot then plan[#plan + 1] = { i = at.i, slot = slot, source = source, step = step } end
    end
  end
  for _, at in ipairs(plan) do
    set_averages(at.slot, at.source, "")
    opt:set_updates(at.i, at.step)
  end
  local texts = {}
  for number, values in ipairs(settings) do
    texts[number] = saved_groups.to_text(values, caller.sorted_names(values))
  end
  note_settings(opt, texts)
  for number, group in ipairs(opt.groups) do
    for key, value in pairs(settings[number]) do group[key] = value end
  end
  optim_groups.loaded(opt.groups)
  opt.steps = most
  opt.engine:set_steps(most)
end

--- Loads a result of state.named or state.torch, or a file that contains such a result. The values are copied.
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
  if saved.values then
    if type(saved.tensors) ~= "table" then error("this is not an optimizer's state: it has no tensors", 0) end
    return load_named(opt, saved.tensors, saved.values)
  end
  return load_torch(opt, saved)
end

return state
