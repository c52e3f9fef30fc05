-- SPDX-License-Identifier: BSD-3-Clause
-- Modules that compute nothing. ModuleDict, ParameterList and ParameterDict hold other modules or parameters by name or
-- number. Identity returns its input. In a state, members have PyTorch's names ("layers.conv.weight", "0").
local nn_module = require "ps.nn.module"
local registry = require "ps.nn.registry"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local lists = require "ps.core.lists"
local error = caller.error

---@class ps.nn.Identity: ps.nn.Module
local Identity = nn_module.class("Identity")
Identity.unscoped = true

--- Creates a module that returns its input. Its arguments are ignored, as in PyTorch.
---@param ... any
function Identity:init(...) end -- luacheck: no unused
--- Returns x itself.
---@param x any
---@return any x
function Identity:forward(x) return x end -- luacheck: no self

local function shown(value) return value == nil and "nil" or scope.is_tensor(value) and "a tensor"
  or "a " .. type(value) end

-- -- by name --------------------------------------------------------------------------------------------------------
-- Returns the entries of the table that was passed to a constructor, as a list of { name, value }. The entries of a
-- table { a = x } are sorted by name, because a Lua table has no order. If the table is { { "a", x }, { "b", y } }, the
-- entries keep their order.
local function entries_of(call, given)
  if given == nil then return {} end
  if type(given) ~= "table" or nn_module.is_module(given) then
    error(("%s takes a table of names, { name = value }, not %s"):format(call, shown(given)))
  end
  local list = {}
  if given[1] ~= nil then
    for i, pair in ipairs(caller.list(given, call .. ": the list")) do
      if type(pair) ~= "table" or type(pair[1]) ~= "string" then
        error(("%s: number %d of its list is not a pair { name, value }"):format(call, i))
      end
      list[i] = { pair[1], pair[2] }
    end
    return list
  end
  for name, value in pairs(given) do list[#list + 1] = { name, value } end
  table.sort(list, function(a, b) return tostring(a[1]) < tostring(b[1]) end)
  return list
end

-- Checks a name. It must be a string without a dot, and it must not hide a method of the class.
local function check_name(self, name, call)
  if type(name) ~= "string" or name == "" or name:find(".", 1, true) then
    error(("%s: a name is %s; it must be a string without a dot"):format(call,
      type(name) == "string" and "'" .. name .. "'" or shown(name)))
  end
  local read = getmetatable(self).__index
  if registry.kind(self, name) == nil and read(self, name) ~= nil then
    error(("%s: '%s' is the name of a method or field of %s; choose another"):format(call, name, self.class_name))
  end
end

-- Creates the class of a dictionary of modules or parameters. `kind` is "module" or "param".
local function dictionary(name, kind, what, check)
  local class = nn_module.class(name)

  local function put(self, key, value, call)
    check_name(self, key, call)
    check(value, call, key)
    if kind == "param" then value = nn_module.Parameter(value) end
    nn_module.register(self, key, kind, value)
  end

  --- Creates a dictionary.
  ---@param entries? table { name = value } for alphabetical order, or { { name, value }, ... } for the given order
  function class:init(entries) self:update(entries) end
  --- Adds values. If a name exists, the new value replaces the old one.
  ---@param entries? table in the constructor's form
  ---@return ps.nn.Module self
  function class:update(entries)
    local call = ("nn.%s"):format(name)
    for _, entry in ipairs(entries_of(call, entries)) do put(self, entry[1], entry[2], call) end
    return self
  end
  --- Sets the value for a name.
  ---@param key string
  ---@param value any
  ---@return ps.nn.Module self
  function class:set(key, value)
    put(self, key, value, name .. ":set")
    return self
  end
  --- Returns the value for a name, or nil if the dictionary does not contain the name.
  ---@param key string
  ---@return any
  function class:get(key) return registry.kind(self, key) == kind and self[key] or nil end
  --- Returns whether the dictionary contains a name.
  ---@param key string
  ---@return boolean
  function class:contains(key) return registry.kind(self, key) == kind end
  --- Returns the names, in order.
  ---@return string[]
  function class:keys()
    local keys = {}
    for key, _, of in registry.members(self) do if of == kind then keys[#keys + 1] = key end end
    return keys
  end
  --- Returns the values, in order.
  ---@return any[]
  function class:values()
    local values = {}
    for _, value, of in registry.members(self) do if of == kind then values[#values + 1] = value end end
    return values
  end
  --- Returns an iterator for `for name, value in dict:items() do`. It produces the entries in order.
  ---@return fun(): string?, any
  function class:items()
    local keys, i = self:keys(), 0
    return function()
      i = i + 1
      if keys[i] ~= nil then return keys[i], self[keys[i]] end
    end
  end
  --- Removes a value and returns it.
  ---@param key string
  ---@return any value
  function class:pop(key)
    if not self:contains(key) then
      error(("%s:pop: there is no %s '%s' (there are %s)"):format(name, what, tostring(key),
        table.concat(self:keys(), ", ")))
    end
    local value = self[key]
    self[key] = nil
    return value
  end
  --- Returns the number of values.
  ---@return integer
  function class:size() return #self:keys() end
  --- Returns the number of values.
  ---@return integer
  function class:len() return #self:keys() end
  return class
end

local function check_module(value, call, key)
  if not nn_module.is_module(value) then error(("%s: '%s' is %s, not a module"):format(call, key, shown(value))) end
end
local function check_tensor(value, call, key)
  if not scope.is_tensor(value) then error(("%s: '%s' is %s, not a tensor"):format(call, key, shown(value))) end
end

-- -- by number ------------------------------------------------------------------------------------------------------
---@class ps.nn.ParameterList: ps.nn.Module
---@field length integer
local ParameterList = nn_module.class("ParameterList")
ParameterList.length = 0

nn_module.adapt(ParameterList, function(class)
  local read = class.instance.__index
  function class.instance.__index(self, key)
    if type(key) == "number" and key < 0 then key = self.length + key end
    return read(self, key)
  end
  class.instance.ps_list = { each = function(self) return self:each() end, size = function(self) return self.length end,
    get = function(self, i) return self[i] end,
    insert = function(self, index, tensor)
      if index ~= self.length then error(("%s: only append adds a parameter"):format(self.class_name)) end
      self:append(tensor)
    end,
    remove = function(self) error(("%s: a parameter cannot be removed from it"):format(self.class_name)) end }
end)

--- Creates a list of parameters. Indices begin at 0, and list[-1] is the last parameter. `for i, p in ipairs(list) do`
--- iterates over the parameters.
---@param tensors? ps.Tensor[] a Lua list of float tensors, which become parameters
---@param ... any rejected
function ParameterList:init(tensors, ...)
  if select("#", ...) > 0 or scope.is_tensor(tensors) then
    error("nn.ParameterList takes one list of tensors: nn.ParameterList { a, b }")
  end
  self:extend(tensors or {})
end
--- Appends a parameter.
---@param tensor ps.Tensor
---@return ps.nn.Module self
function ParameterList:append(tensor)
  check_tensor(tensor, self.class_name .. ":append", self.length)
  nn_module.register(self, self.length, "param", nn_module.Parameter(tensor))
  self.length = self.length + 1
  return self
end
--- Appends several parameters.
---@param tensors ps.Tensor[]|ps.nn.ParameterList
---@return ps.nn.Module self
function ParameterList:extend(tensors)
  if lists.is_list(tensors) then
    for i = 0, tensors.length - 1 do self:append(tensors[i]) end
    return self
  end
  caller.typed(tensors, "table", self.class_name .. ": the list of tensors")
  for _, tensor in ipairs(caller.list(tensors, self.class_name .. ": the list of tensors")) do self:append(tensor) end
  return self
end
--- Returns the number of parameters.
---@return integer
function ParameterList:size() return self.length end
--- Returns the number of parameters.
---@return integer
function ParameterList:len() return self.length end
--- Returns an iterator for `for i, p in list:each() do`. It produces the same values as `ipairs(list)`: the parameters
--- and their indices, which begin at 0.
---@return fun(): integer?, ps.Tensor?
function ParameterList:each()
  local i = -1
  return function()
    i = i + 1
    if i < self.length then return i, self[i] end
  end
end

return { Identity = Identity, ModuleDict = dictionary("ModuleDict", "module", "module", check_module),
  ParameterDict = dictionary("ParameterDict", "param", "parameter", check_tensor), ParameterList = ParameterList }
