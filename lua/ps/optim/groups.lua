-- SPDX-License-Identifier: BSD-3-Clause
-- Parameter groups, for the optimizers of ps.optim and of engines. Scripts may change a group's settings between steps.
-- This file sets the learning rates of groups, converts settings to text for saved states, and finds the group of an
-- engine's parameter. It also checks settings, because settings out of range can increase the loss or produce NaN.
local caller = require "ps.core.caller"
local check = require "ps.config.check"
local copied = require "ps.core.copied"
local types = require "ps.core.types"
local optimizers = require "ps.optimizers"
local mesh = require "ps.dist.mesh"
local nearest = require "ps.core.nearest"
local is_tensor = require("ps.core.scope").is_tensor
local foreign = require "ps.core.foreign"
local error = caller.error

local groups = {}

-- Parts of the names of matrices that are outside a model's layers. These matrices are embeddings and heads.
local OUTSIDE = { "emb", "wte", "wpe", "head", "classifier", "score", "pooler" }

--- Returns the default groups of an optimizer that updates only matrices. The first group has the matrices inside the
--- model. The second group has all other parameters and uses another optimizer.
---@param kind string
---@return table[]? nil if one group has all parameters
function groups.split(kind)
  local made = optimizers.of(kind)
  if not made.matrices then return nil end
  local function inside(name, param)
    if param:dim() ~= 2 then return false end
    for _, part in ipairs(OUTSIDE) do if name:lower():find(part, 1, true) then return false end end
    return true
  end
  return { { match = inside, optimizer = kind }, { optimizer = made.rest } }
end

--- Returns the groups of a module's parameters for an optimizer of this kind: a single group, or the groups that
--- groups.split defines.
---@param kind ps.optimizers.Description
---@param module ps.nn.Module
---@return table[]
function groups.of_module(kind, module)
  local rows, list = groups.split(kind.name) or { {} }, {}
  for i, row in ipairs(rows) do list[i] = { params = {}, param_names = {}, optimizer = row.optimizer } end
  for name, p in module:named_parameters() do
    local into = list[rows[1].match and not rows[1].match(name, p) and 2 or 1]
    table.insert(into.params, p)
    table.insert(into.param_names, name)
  end
  for i = #list, 2, -1 do if #list[i].params == 0 then table.remove(list, i) end end
  return list
end

--- Raises an error if a group's optimizer cannot update a parameter.
---@param group table
---@param name string
---@param param ps.Tensor
---@param cut? boolean whether each tensor-parallel rank has only a part of the parameter
function groups.check_parameter(group, name, param, cut)
  local made, shape = optimizers.of_group(group), table.concat(param:shape(), ", ")
  if made.matrices and param:dim() ~= 2 then
    error(("%s updates only matrices, but %s is [%s]: put it into a group with another optimizer (param_groups, "
      .. "optimizer = \"%s\")"):format(made.name, name, shape, made.rest), 0)
  end
  if cut and (made.whole or made.blocks) then
    error(("%s needs the whole of %s, but each tensor-parallel rank has only a part (here [%s]): use AdamW, Adam, " ..
      "SGD or Lion with "
      .. "tensor_parallel, or ZeRO or pipelines with %s"):format(made.name, name, shape, made.name), 0)
  end
end

--- Returns the names of a group's settings. The names are the same as in PyTorch.
---@param group table
---@return string[]
function groups.settings(group) return optimizers.of_group(group).settings end

--- Returns the names of the group's fields in PyTorch's form: the settings and the counters of its optimizer.
---@param group table
---@return string[]
function groups.read_keys(group)
  local made, keys = optimizers.of_group(group), {}
  for _, key in ipairs(made.settings) do keys[#keys + 1] = key end
  for key in pairs(made.counters or {}) do keys[#keys + 1] = key end
  return keys
end

--- Describes the error in a group's settings. Returns nil if there is no error.
---@param group table
---@return string?
function groups.problem(group)
  local made = optimizers.of_group(group)
  for _, key in ipairs(made.settings) do
    local kind = type(made.defaults[key])
    if type(group[key]) ~= kind then
      return ("%s is %s, not a %s"):format(key, check.show(group[key]), kind)
    end
  end
  return check.out_of_range(group, types.OPTIMIZER) or made.ranges and check.out_of_range(group, made.ranges)
    or made.problem and made.problem(group) or nil
end

-- Returns a text that describes the type of a value.
local function kind_of(value)
  local meta = type(value) == "table" and getmetatable(value)
  local class = type(meta) == "table" and meta.ps_class
  if class then return "a module (" .. class.class_name .. ")" end
  return is_tensor(value) and "a tensor" or value == nil and "nil" or "a " .. type(value)
end

-- Raises an error if a list has items that ipairs does not reach: items after a nil, and items with names.
local function check_whole(list, kind, what)
  for key in pairs(list) do
    if type(key) ~= "number" then
      error(("%s: %s has the key %s; a list has only the keys 1, 2, ..."):format(kind, what, check.show(key)))
    elseif key > 1 and list[key - 1] == nil then
      error(("%s: item %d of %s is nil, but item %.14g is not; leave no nil in the list"):format(kind, key - 1, what,
        key))
    end
  end
end
groups.check_whole = check_whole

--- Checks the first argument of an optimizer when it is not a module.
---@param params any
---@param kind string name of the optimizer
function groups.check_given(params, kind)
  local hint
  if type(params) == "function" then hint = "pass the list module:parameters(), or the module"
  elseif is_tensor(params) then hint = "a list of one parameter is { p }"
  elseif type(params) == "table" and params.params ~= nil and params[1] == nil then
    error(("%s got one group where a list of groups belongs: write { { params = ... } }"):format(kind))
  end
  if type(params) ~= "table" then
    error(("%s takes a module, a list of parameters or a list of groups, not %s%s"):format(kind, kind_of(params),
      hint and ": " .. hint or ""))
  end
  check_whole(params, kind, "the list of parameters or groups")
  for number, given in ipairs(params) do
    local is_module = kind_of(given):find("module", 1, true)
    if is_module or type(given) == "table" and is_tensor(given[1]) then
      error(("%s: item %d of the list is %s: pass a module or a list of parameters itself, or groups, { { params = "
        .. "module:parameters(), lr = 0.1 }, ... }"):format(kind, number, is_module and kind_of(given)
        or "a list of parameters"))
    end
    if type(given) == "table" and kind_of(given.params):find("module", 1, true) then
      error(("%s, group %d: params is %s: write params = module:parameters()"):format(kind, number,
        kind_of(given.params)))
    end
    if type(given) == "table" and type(given.params) == "function" then
      error(("%s, group %d: params is a function: call the method with a colon, module:parameters()"):format(kind,
        number))
    end
  end
end

--- Raises an error if the argument of optimizer:step is a function. PyTorch would call it.
---@param given any
function groups.check_closure(given)
  if type(given) ~= "function" then return end
  error "optimizer:step takes no closure: compute the loss and call loss:backward(), then optimizer:step()"
end

local LIST = { __index = function(_, key)
  if key == 0 then error("optimizer.param_groups[0]: lists in Lua count from 1: optimizer.param_groups[1]") end
end }

--- Raises an error for a value that cannot have a gradient. An optimizer needs floating-point tensors that are not
--- results of ops. A frozen parameter is accepted, because it may be trained later.
---@param p any
---@param name? string
---@param i integer index in the list, counted from 1
---@param what string the optimizer and the group, such as "AdamW, group 1"
function groups.check_trainable(p, name, i, what)
  local which = ("%s, %s"):format(what, name or "parameter " .. i)
  if not is_tensor(p) then error(("%s is %s, not a tensor"):format(which, kind_of(p))) end
  local shape = table.concat(p:shape(), ", ")
  if not p:is_float() then
    error(("%s [%s] is %s: an optimizer updates only floats, since only they have gradients"):format(which, shape,
      p:dtype()))
  end
  if p.node ~= nil then
    error(("%s [%s] is the output of an op, so it would never get a gradient: give the optimizer the tensors from "
      .. "which it was computed, or tensor:detach():requires_grad(true)"):format(which, shape))
  end
end

-- Maps a group to the name of the optimizer that it was made with.
local kinds = setmetatable({}, { __mode = "k" })

--- Raises an error if a group has a setting that is out of range.
---@param list table[]
---@param kind string name of the optimizer, such as "AdamW"
function groups.check(list, kind)
  for number, group in ipairs(list) do
    if not group.kind then
      error(("%s, group %d was added after the optimizer was made, so it has neither settings nor states: make the "
        .. "optimizer with all its groups"):format(kind, number))
    end
    if group.kind ~= (kinds[group] or group.kind) then
      error(("%s, group %d: kind is %s, but the group was made with %s, and its states are those of %s: make another "
        .. "optimizer"):format(kind, number, check.show(group.kind), kinds[group], kinds[group]))
    end
    local problem = groups.problem(group)
    if problem then error(("%s, group %d: %s"):format(group.kind, number, problem)) end
  end
end

-- -- rates -----------------------------------------------------------------------------------------------------------
-- Returns the optimizer's own rate (base_lr). This is the rate that was given when the optimizer was created. If no
-- rate was given, base_lr is the initial rate of all groups, or false if the groups' initial rates differ. If the given
-- rate is 0 but an initial rate is not 0, base_lr is also false. Schedules and set_lr start from each group's initial
-- rate (initial_lr).
local function base_of(list, given)
  local alike = true
  for _, group in ipairs(list) do alike = alike and group.initial_lr == list[1].initial_lr end
  if given == nil then return alike and list[1].initial_lr end
  if given == 0 and not (alike and list[1].initial_lr == 0) then return false end
  return given
end

local told_zero = setmetatable({}, { __mode = "k" })        -- maps a list of groups to whether the note was printed

--- Returns whether this process prints notes about an optimizer.
---@param optimizer {engine?: ps.Engine}
---@return boolean
function groups.prints(optimizer)
  local world, engine = mesh.group "world", optimizer.engine
  return not (world and world:rank() > 0 or engine and engine.quiet)
end

--- Called at the first step. Prints a note if all rates are 0, were 0 from the start, and have no schedule.
---@param optimizer {groups: table[], engine?: ps.Engine}
function groups.tell_zero(optimizer)
  if told_zero[optimizer.groups] then return end
  told_zero[optimizer.groups] = true
  for _, group in ipairs(optimizer.groups) do if group.lr ~= 0 or group.initial_lr ~= 0 then return end end
  if not groups.prints(optimizer) then return end
  io.stderr:write(("psluajit: %s: the learning rate (lr) is 0%s, so steps change no parameter until a script or a "
    .. "schedule sets another rate\n"):format(optimizer.groups[1].kind,
    #optimizer.groups > 1 and " in all groups" or ""))
end

--- Records that the rates have a schedule. A schedule may begin with a rate of 0.
---@param optimizer {groups: table[]}
function groups.scheduled(optimizer) told_zero[optimizer.groups] = true end

-- Records the rates that psluajit itself has set, so that assignments by a script can be detected.
local function note_rates(list)
  for _, group in ipairs(list) do group.known_lr = group.lr end
end

-- Other names for settings. A field with such a name would have no effect on an optimizer or a group.
local ALIAS = { learning_rate = "lr", rate = "lr", beta = "betas", beta1 = "betas", beta2 = "betas", epsilon = "eps",
  wd = "weight_decay", decay = "weight_decay" }

-- If a key is a misspelling of a setting, returns the setting. Otherwise returns nil. A name that begins with the name
-- of a setting, such as "lr0" or "momentum_start", is not a misspelling.
local function misspelt(key, settings)
  if type(key) ~= "string" then return nil end
  local near = nearest.find(key, settings)
  if not near or near == key or key:sub(1, #near) == near then return nil end
  return nearest.distance(key, near) <= (#key < 5 and 0 or math.max(1, math.floor(#key / 6))) and near or nil
end

local GROUP = { __newindex = function(group, key, value)
  local meant = ALIAS[key] or misspelt(key, groups.settings(group))
  if meant then error(("a group has no setting '%s'; write %s"):format(key, meant)) end
  rawset(group, key, value)
end }

--- Makes the groups' current rates their initial rates.
---@param optimizer {groups: table[]}
---@param given? number the optimizer's own rate, or nil if it was created without a rate
function groups.begin_rates(optimizer, given)
  for _, group in ipairs(optimizer.groups) do
    group.initial_lr, kinds[group] = group.lr, group.kind
    if getmetatable(group) == nil then setmetatable(group, GROUP) end
  end
  if getmetatable(optimizer.groups) == nil then setmetatable(optimizer.groups, LIST) end
  note_rates(optimizer.groups)
  optimizer.given_lr, optimizer.base_lr = given, base_of(optimizer.groups, given)
end

--- Called when a schedule begins. If a script has assigned rates to groups, these rates become the initial rates.
---@param optimizer {groups: table[]}
function groups.renew_rates(optimizer)
  groups.scheduled(optimizer)
  for _, group in ipairs(optimizer.groups) do
    if group.lr ~= group.known_lr then group.initial_lr = group.lr end
  end
  optimizer.base_lr = base_of(optimizer.groups, optimizer.given_lr)
end

--- Returns the groups' rates as text, and whether all rates are equal.
---@param list table[]
---@param key? string "lr" (default) or "initial_lr"
---@return string text
---@return boolean alike whether all rates are equal
function groups.rates(list, key)
  local texts, alike = {}, true
  for i, group in ipairs(list) do
    texts[i] = ("%.14g"):format(group[key or "lr"])
    alike = alike and group[key or "lr"] == list[1][key or "lr"]
  end
  return table.concat(texts, ", ", 1, math.min(#texts, 6)) .. (#texts > 6 and ", ..." or ""), alike
end

local function check_lr(lr, call)
  local problem = check.problem(lr, types.OPTIMIZER.lr)
  if problem then error(call .. ": the rate " .. problem) end
end

--- Sets the rate of each group to rate_of(group).
---@param optimizer {groups: table[]}
---@param rate_of fun(group: table): number
function groups.each_rate(optimizer, rate_of)
  for _, group in ipairs(optimizer.groups) do group.lr = rate_of(group) end
  note_rates(optimizer.groups)
end

--- Sets the optimizer's rate for the next and all later steps. The rate of a group becomes lr * initial_lr / base_lr,
--- so the ratios between the groups' rates do not change. If base_lr is 0, it becomes lr. Raises an error if the
--- groups' rates differ and the optimizer was created without a rate.
---@param optimizer {groups: table[], base_lr: number|false}
---@param lr number
---@param call? string name of the call in messages (default "optimizer:set_lr")
function groups.set_lr(optimizer, lr, call)
  call = call or "optimizer:set_lr"
  check_lr(lr, call)
  local base = optimizer.base_lr
  if base == false then
    error(("%s: the groups have the rates %s, but the optimizer was made without a rate, so their ratios to %.14g "
      .. "are unknown: make the optimizer with an lr, to which groups keep their ratio, or set optimizer.groups[i].lr")
      :format(call, groups.rates(optimizer.groups, "initial_lr"), lr))
  end
  groups.each_rate(optimizer, function(group) return base == 0 and lr or lr * (group.initial_lr / base) end)
end

-- Implements the assignment optimizer.lr = lr.
local function assign_lr(optimizer, lr)
  check_lr(lr, "optimizer.lr")
  local text, alike = groups.rates(optimizer.groups)
  if not alike then
    error(("optimizer.lr = %.14g: the groups have the rates %s; set optimizer.groups[i].lr of each, or call "
      .. "optimizer:set_lr(lr), which keeps their ratios"):format(lr, text))
  end
  groups.each_rate(optimizer, function() return lr end)
end

-- Returns the value of optimizer.lr.
local function read_lr(optimizer)
  local list = rawget(optimizer, "groups")
  if not list or not list[1] then return nil end
  local text, alike = groups.rates(list)
  if alike then return list[1].lr end
  error(("optimizer.lr: the groups have the rates %s; read optimizer.groups[i].lr"):format(text))
end

local SETTINGS = caller.sorted_names(types.OPTIMIZER)

-- Raises an error if a script assigns a setting to an optimizer. Settings belong to the optimizer's groups.
local function refuse_setting(optimizer, key)
  local name = ALIAS[key] or misspelt(key, SETTINGS) or key
  if not types.OPTIMIZER[name] then return end
  if name == "max_norm" and name == key then return end
  if name == "lr" or name == "max_norm" then
    error(("optimizer.%s does not exist; write optimizer.%s"):format(key, name))
  end
  for number, group in ipairs(rawget(optimizer, "groups") or {}) do
    for _, setting in ipairs(groups.settings(group)) do
      if setting == name then
        error(("optimizer.%s does not exist, since settings belong to groups; write "
          .. "optimizer.param_groups[%d].%s"):format(key, number, name))
      end
    end
  end
end

--- Sets __index and __newindex of optimizers. The field param_groups is PyTorch's name for groups. The field lr is the
--- rate of all groups.
---@param methods table
---@param instance table the metatable to change
---@return table instance
function groups.fields(methods, instance)
  function instance.__index(self, key)
    if key == "param_groups" then return rawget(self, "groups") end
    if key == "lr" then return read_lr(self) end
    local method = methods[key]
    if method ~= nil then return method end
    return foreign.find("optimizer", key)
  end
  function instance.__newindex(self, key, value)
    if key == "lr" then return assign_lr(self, value) end
    if key == "param_groups" then
      error "optimizer.param_groups is the list of groups; change a group's settings, optimizer.param_groups[1].lr = 1"
    end
    refuse_setting(self, key)
    rawset(self, key, value)
  end
  function instance.__names(self) return { param_groups = rawget(self, "groups") }, methods end
  return instance
end

-- -- saved -----------------------------------------------------------------------------------------------------------
-- Returns a setting in a form that JSON stores without loss.
local function text_of(value)
  if type(value) == "number" then return ("%.17g"):format(value) end
  if type(value) ~= "table" then return value end
  local parts = {}
  for i, number in ipairs(value) do parts[i] = ("%.17g"):format(number) end
  return table.concat(parts, " ")
end

--- Converts settings to a form that JSON stores without loss. Numbers become text. A list of numbers, such as betas,
--- becomes a text with blanks between the numbers.
---@param group table
---@param keys string[]
---@return table<string, string|boolean>
function groups.to_text(group, keys)
  local kept = {}
  for _, key in ipairs(keys) do kept[key] = text_of(group[key]) end
  return kept
end

--- Returns the fields of a group that are saved, as text: its settings, the fields that scripts cannot set, and the
--- rate with which it was made. The last is not loaded, but compared (groups.differences).
---@param group table
---@return table<string, string|boolean>
function groups.saved(group)
  local keys = groups.read_keys(group)
  for key in pairs(optimizers.of_group(group).fixed or {}) do keys[#keys + 1] = key end
  local kept = groups.to_text(group, keys)
  kept.initial_lr = text_of(group.initial_lr)
  return kept
end

local function readable(value) return (tostring(value):gsub("%S+", function(part)
  return tonumber(part) and ("%.6g"):format(part) or part
end)) end

--- Describes the settings that saved groups have and that differ from the settings with which these groups were made.
---@param list table[]
---@param saved table[] saved settings of each group
---@param skip table<string, true?> settings that a schedule sets
---@return string[] texts such as "group 1: weight_decay is 0.1, not 0.01"
function groups.differences(list, saved, skip)
  local texts = {}
  for number, group in ipairs(list) do
    for _, key in ipairs(groups.settings(group)) do
      local theirs, ours = saved[number][key], text_of(group[key])
      -- A run may have changed the rate since it began, so the rates with which the runs began are compared.
      local same = theirs == ours
      if key == "lr" then same = same or saved[number].initial_lr == text_of(group.initial_lr) end
      if not same and theirs ~= nil and not skip[key] then
        texts[#texts + 1] = ("group %d: %s is %s, not %s"):format(number, key, readable(theirs), readable(ours))
      end
    end
  end
  return texts
end

--- Describes why saved groups do not match a list of groups. Returns nil if they match.
---@param list table[]
---@param saved table[]
---@return string?
function groups.mismatch(list, saved)
  if #saved == #list then return nil end
  return ("the saved optimizer has %d groups, but this one has %d"):format(#saved, #list)
end

--- Loads settings that to_text has converted.
---@param list table[]
---@param saved table[] saved settings of each group
function groups.from_text(list, saved)
  for number, group in ipairs(list) do
    for key, value in pairs(saved[number]) do
      if tostring(value):find " " then
        local numbers = {}
        for part in value:gmatch "%S+" do numbers[#numbers + 1] = tonumber(part) end
        value = numbers
      end
      if key ~= "initial_lr" then group[key] = type(value) == "string" and tonumber(value) or value end
    end
  end
  note_rates(list)
end

--- Records the rates that were loaded, so that they do not count as assignments by the script.
---@param list table[]
function groups.loaded(list) note_rates(list) end

-- -- of engines ------------------------------------------------------------------------------------------------------
--- Returns the groups that a configuration defines. The groups have the settings of the configuration's optimizer,
--- except for the settings that the script's param_groups change.
---@param optimizer {type: string, params: table} the configuration's section "optimizer"
---@param param_groups? table[] nil for one group
---@return table[] groups
function groups.configured(optimizer, param_groups)
  local params, list = optimizer.params, {}
  for number, given in ipairs(param_groups or { {} }) do
    local kind = given.optimizer or optimizer.type
    local made, group = optimizers.of(kind), { kind = kind }
    for _, key in ipairs(made.settings) do
      local value = made.defaults[key]
      if (key == "lr" or kind == optimizer.type) and params[key] ~= nil then value = params[key] end
      if key == "lr" and made.matrices then value = params.muon_lr or value
      elseif key == "lr" and kind ~= optimizer.type then value = params.adam_lr or value end
      group[key] = type(value) == "table" and copied(value) or value
    end
    optimizers.complete(group, made)
    for key, value in pairs(given) do if key ~= "match" and key ~= "optimizer" then group[key] = value end end
    if group.momentum and not group.betas then group.momentum = optimizer.first_momentum or group.momentum end
    list[number] = group
  end
  return list
end

--- Returns the states that an engine keeps for a parameter of each group in addition to its fp32 value. Groups are
--- counted from 1.
---@param list table[] groups, from groups.configured
---@return ps.optimizers.State[][]
function groups.states(list)
  local states = {}
  for number, group in ipairs(list) do states[number] = optimizers.states_of(optimizers.of_group(group), list) end
  return states
end

-- Returns the indices of the groups whose function `match` returns true for a parameter. If there is no such group, and
-- the last group has no function `match`, returns the index of the last group.
local function matches(param_groups, name, param)
  local list = {}
  for number, given in ipairs(param_groups) do
    if given.match and given.match(name, param) then list[#list + 1] = number end
  end
  local last = #param_groups
  if not list[1] and not param_groups[last].match then list[1] = last end
  return list
end

--- Raises an error if a trained parameter belongs to no group. Prints a note about parameters that several groups
--- match, and about groups that have a function `match` but get no parameter.
---@param param_groups? table[]
---@param rows {name: string, param: ps.Tensor}[] all trained parameters
---@param note fun(text: string)
function groups.check_members(param_groups, rows, note)
  if not param_groups or not rows[1] then return end
  local has, shared, first = {}, 0, nil
  for _, row in ipairs(rows) do
    local list = matches(param_groups, row.name, row.param)
    if not list[1] then
      error(("ps.initialize: no group of param_groups has %s [%s]: every group has a match, and each returns false for "
        .. "it; leave match out of the last group, which then gets all other parameters, or freeze the parameter with "
        .. "requires_grad(false)"):format(row.name, table.concat(row.param:shape(), ", ")))
    end
    has[list[1]] = true
    if list[2] then
      shared = shared + 1
      first = first or ("%s: param_groups[%s]"):format(row.name, table.concat(list, "] and ["))
    end
  end
  if first then
    note(("param_groups: several groups match %d parameter%s (%s); each is in the first group that "
      .. "matches"):format(shared, shared == 1 and "" or "s", first))
  end
  for number, given in ipairs(param_groups) do
    if given.match and not has[number] then
      note(("param_groups[%d] has no parameter: its match returns false for all parameters that no earlier group "
        .. "has"):format(number))
    end
  end
end

--- Returns the index of a parameter's group, counted from 1. The group is the first group whose function `match`
--- returns true. If there is no such group, it is the last group.
---@param param_groups? table[]
---@param name string
---@param param ps.Tensor
---@return integer
function groups.number_of(param_groups, name, param)
  for number, given in ipairs(param_groups or {}) do
    if given.match and given.match(name, param) then return number end
  end
  return param_groups and #param_groups or 1
end

return groups
