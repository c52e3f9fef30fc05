-- SPDX-License-Identifier: BSD-3-Clause
-- Parameter groups, for the optimizers of ps.optim and of engines. Scripts may change a group's settings between steps.
-- This file sets the learning rates of groups, and records the lists of groups that have schedules or loaded rates. It
-- also checks groups and settings, because settings out of range can increase the loss or produce NaN.
local caller = require "ps.core.caller"
local check = require "ps.config.check"
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
    local able = {}
    for _, other in ipairs(optimizers.names) do
      local of = optimizers.of(other)
      if not of.whole and not of.blocks then able[#able + 1] = other end
    end
    error(("%s needs the whole of %s, but each tensor-parallel rank has only a part (here [%s]): with tensor_parallel "
      .. "use %s; or use ZeRO or pipelines"):format(made.name, name, shape, table.concat(able, ", ")), 0)
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
  for _, fields in ipairs { made.defaults, made.counters } do
    for key, value in pairs(fields) do
      if type(group[key]) ~= type(value) then
        return ("%s is %s, not a %s"):format(key, check.show(group[key]), type(value))
      end
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

--- Raises an error if a list has items that ipairs does not reach: items after a nil, and items with names.
---@param list table
---@param kind string the optimizer or the call, for the error
---@param what string the list, for the error
function groups.check_whole(list, kind, what)
  for key in pairs(list) do
    if type(key) ~= "number" or key < 1 or key % 1 ~= 0 then
      error(("%s: %s has the key %s; a list has only the keys 1, 2, ..."):format(kind, what, check.show(key)))
    elseif key > 1 and list[key - 1] == nil then
      error(("%s: item %d of %s is nil, but item %.14g is not; leave no nil in the list"):format(kind, key - 1, what,
        key))
    end
  end
end

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
  groups.check_whole(params, kind, "the list of parameters or groups")
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

--- Raises an error if a script has added, removed or replaced a group, or has changed its optimizer.
---@param optimizer {groups: table[], made_with: {[1]: table, [2]: string}[]}
---@param kind string name of the optimizer, such as "AdamW"
---@param list? table[] the script's list of groups (default: optimizer.groups)
function groups.check_same(optimizer, kind, list)
  local made = optimizer.made_with
  list = list or optimizer.groups
  for number = 1, math.max(#list, #made) do
    local group, of = list[number], made[number]
    if not (of and rawequal(group, of[1])) then
      error(("%s, group %d was %s after the optimizer was made, and only the groups with which it was made have "
        .. "states: make the optimizer with all its groups"):format(kind, number,
        not of and "added" or group == nil and "removed" or "replaced"))
    elseif group.kind ~= of[2] then
      error(("%s, group %d: kind is %s, but the group was made with %s, and its states are those of %s: make another "
        .. "optimizer"):format(kind, number, check.show(group.kind), of[2], of[2]))
    end
  end
end

--- Raises an error if a group has a setting that is out of range.
---@param list table[]
function groups.check(list)
  for number, group in ipairs(list) do
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

-- Maps a list of groups to "rates" if it has a schedule, or to "beta1" or "betas" if the schedule also changes these.
local schedules = setmetatable({}, { __mode = "k" })

--- Records that the rates have a schedule. A schedule may begin with a rate of 0.
---@param optimizer {groups?: table[]}
---@param changes? "beta1"|"betas" the settings that the schedule changes in addition to the rates
function groups.scheduled(optimizer, changes)
  local list = optimizer.groups
  if not list then return end
  told_zero[list], schedules[list] = true, changes or schedules[list] or "rates"
  for _, group in ipairs(list) do group.first_rate = nil end
end

--- Records that an optimizer has the schedule of another one, whose place it takes. The schedule continues from the
--- initial rates of the other one.
---@param optimizer {groups: table[]}
---@param old {groups: table[]}
function groups.take_schedule(optimizer, old)
  local changes, list = schedules[old.groups], optimizer.groups
  if not changes then return end
  told_zero[list], schedules[list] = true, schedules[list] or changes
  for number, group in ipairs(list) do
    local from = old.groups[number]
    group.initial_lr, group.known_lr = from.initial_lr, from.known_lr
  end
  optimizer.given_lr, optimizer.base_lr = old.given_lr, old.base_lr
end

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

--- Records the groups with which an optimizer is made, and their kinds.
---@param optimizer {groups: table[]}
function groups.record(optimizer)
  local made = {}
  for number, group in ipairs(optimizer.groups) do made[number] = { group, group.kind } end
  optimizer.made_with = made
end

--- Makes the groups' current rates their initial rates, and records the groups.
---@param optimizer {groups: table[]}
---@param given? number the optimizer's own rate, or nil if it was created without a rate
function groups.begin_rates(optimizer, given)
  groups.record(optimizer)
  for _, group in ipairs(optimizer.groups) do
    group.initial_lr = group.lr
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

-- The lists of groups whose settings were loaded, until a rate is set.
local loaded = setmetatable({}, { __mode = "k" })

--- Sets the rate of each group to rate_of(group).
---@param optimizer {groups: table[]}
---@param rate_of fun(group: table): number
function groups.each_rate(optimizer, rate_of)
  loaded[optimizer.groups] = nil
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

--- Records that settings were loaded. Their rates do not count as assignments by the script.
---@param list table[]
---@param same? boolean whether the saved groups began with the rates of these groups. The same schedule, whose state is
--- loaded next, then does not replace the loaded rates
function groups.loaded(list, same)
  note_rates(list)
  loaded[list] = same or nil
end

--- Returns whether the rates of groups are those of a loaded state, and began with the rates of these groups.
---@param list table[]
---@return boolean
function groups.was_loaded(list)
  for _, group in ipairs(list) do if group.lr ~= group.known_lr then return false end end
  return loaded[list] == true
end

--- Returns "rates" if the schedules of an optimizer change only rates. Returns "beta1" if they also change beta1 or
--- momentum, "betas" if they also change beta2, and nil if the optimizer has no schedule.
---@param list table[]
---@return "rates"|"beta1"|"betas"|nil
function groups.changes(list) return schedules[list] end

return groups
