-- SPDX-License-Identifier: BSD-3-Clause
-- ModuleList and Sequential. As in PyTorch and in the names of parameters, items count from 0. list[-1] is the last
-- item. ipairs, pairs, unpack, table.insert and table.remove work on these lists (ps.core.lists). list:size() returns
-- the number of modules. #list is always 0, because LuaJIT calls no metamethod for the length of a table.
local nn_module = require "ps.nn.module"
local registry = require "ps.nn.registry"
local caller = require "ps.core.caller"
local lists = require "ps.core.lists"
local error = caller.error

---@class ps.nn.ModuleList: ps.nn.Module
---@field length integer
local ModuleList = nn_module.class("ModuleList")
ModuleList.length = 0                                      -- length of an empty list

local function shown(value) return value == nil and "nil" or "a " .. type(value) end

local function check_module(value, call)
  if not nn_module.is_module(value) then error(("%s takes a module, not %s"):format(call, shown(value))) end
end

-- Returns the modules as a Lua list, whose indices begin at 1.
local function items_of(self)
  local items = {}
  for i = 0, self.length - 1 do items[i + 1] = self._fields[i] end
  return items
end

-- Replaces all modules of the list by the given modules. The first given module gets the index 0.
local function set_items(self, items)
  for i = 0, self.length - 1 do
    registry.remove(self, i)
    self._fields[i] = nil
  end
  for i, module in ipairs(items) do nn_module.register(self, i - 1, "module", module) end
  self.length = #items
end

-- Checks an index and returns it as an index counted from 0. A negative index counts from the end. `last` is the
-- largest valid index.
local function place(self, index, last, call)
  caller.whole(index, call .. ": the index")
  local at = index < 0 and self.length + index or index
  if at >= 0 and at <= last then return at end
  error(("%s: there is no index %d in a list of %d modules, which count from 0; list:append(module) adds one"):format(
    call, index, self.length))
end

-- Performs list[index] = value. A module replaces the module at the index or is appended. nil removes the module.
local function set(self, index, value)
  local call = ("%s[%s] = value"):format(self.class_name, tostring(index))
  if rawequal(value, nil) then return self:remove(index) end
  check_module(value, call)
  local at = place(self, index, self.length, call)
  nn_module.register(self, at, "module", value)
  if at == self.length then self.length = at + 1 end
end

-- Makes the objects of ModuleList, and of each class derived from ModuleList, act as lists.
nn_module.adapt(ModuleList, function(class)
  local instance = class.instance
  local assign = instance.__newindex
  function instance.__index(self, key)
    local fields = rawget(self, "_fields")
    if type(key) == "number" then return fields[key < 0 and (fields.length or 0) + key or key] end
    local value = fields[key]
    if value ~= nil then return value end
    return class[key]
  end
  function instance.__newindex(self, key, value)
    if type(key) == "number" then return set(self, key, value) end
    return assign(self, key, value)                        -- a tail call, because assign() reads its caller's line
  end
  instance.ps_list = { each = function(self) return self:each() end, size = function(self) return self.length end,
    get = function(self, i) return self._fields[i] end,
    insert = function(self, index, module) self:insert(index, module) end,
    remove = function(self, index) return self:remove(index) end }
end)

-- Returns the modules of the list that was passed to a constructor. Surplus arguments `...` are rejected.
local function given_modules(call, modules, ...)
  if select("#", ...) > 0 or nn_module.is_module(modules) and not lists.is_list(modules) then
    error(("%s takes one list of modules: %s { a, b }, not %s(a, b)"):format(call, call, call))
  end
  if modules == nil then return {} end
  if type(modules) ~= "table" then
    error(("%s takes a list of modules, { a, b }, not %s"):format(call, shown(modules)))
  end
  local n, list = 0, {}
  if lists.is_list(modules) then return items_of(modules) end
  for key in pairs(modules) do
    if type(key) ~= "number" then
      error(("%s takes a list of modules, but this one has the key '%s'; assign modules with names to a module's "
        .. "fields")
        :format(call, tostring(key)))
    end
    n = math.max(n, key)
  end
  for i = 1, n do
    if not nn_module.is_module(modules[i]) then
      error(("%s: item %d of the list is %s, not a module"):format(call, i, shown(modules[i])))
    end
    list[i] = modules[i]
  end
  return list
end

--- Creates a list of modules. Indices begin at 0, and list[-1] is the last module. `for i, module in ipairs(list) do`
--- iterates over the modules, and list:size() returns their number.
---@param modules? ps.nn.Module[] a Lua list, whose first module gets the index 0, or another nn.ModuleList
---@param ... any rejected
function ModuleList:init(modules, ...)
  self:extend(given_modules("nn." .. self.class_name, modules, ...))
end

--- Appends a module.
---@param module ps.nn.Module
---@return ps.nn.Module self
function ModuleList:append(module)
  check_module(module, self.class_name .. ":append")
  nn_module.register(self, self.length, "module", module)
  self.length = self.length + 1
  return self
end

--- Appends several modules.
---@param modules ps.nn.Module[]|ps.nn.ModuleList
---@return ps.nn.Module self
function ModuleList:extend(modules)
  for _, module in ipairs(given_modules(self.class_name .. ":extend", modules)) do self:append(module) end
  return self
end

--- Inserts a module before the module at `index`. The indices of that module and of all later modules increase by one.
---@param index integer counted from 0; if it is the number of modules, the new module is appended
---@param module ps.nn.Module
---@return ps.nn.Module self
function ModuleList:insert(index, module)
  local call = self.class_name .. ":insert"
  local at = place(self, index, self.length, call)
  check_module(module, call)
  local items = items_of(self)
  table.insert(items, at + 1, module)
  set_items(self, items)
  return self
end

--- Removes a module and returns it. The indices of all later modules decrease by one.
---@param index? integer (default -1, the last module)
---@return ps.nn.Module module
function ModuleList:remove(index)
  local at, items = place(self, index or -1, self.length - 1, self.class_name .. ":remove"), items_of(self)
  local module = table.remove(items, at + 1)
  set_items(self, items)
  return module
end

--- Returns true, because each element is a block for Module:recompute_blocks.
---@return boolean
function ModuleList:holds_blocks() return true end

--- Returns the number of modules in the list.
---@return integer
function ModuleList:size() return self.length end
--- Returns the number of modules in the list.
---@return integer
function ModuleList:len() return self.length end

--- Returns an iterator for `for i, module in list:each() do`. It produces the same values as `ipairs(list)`: the
--- modules and their indices, which begin at 0.
---@return fun(): integer?, ps.nn.Module?
function ModuleList:each()
  local i = -1
  return function()
    i = i + 1
    if i < self.length then return i, self._fields[i] end
  end
end

---@class ps.nn.Sequential: ps.nn.ModuleList
local Sequential = nn_module.class("Sequential", ModuleList)

--- Creates a chain of modules.
---@param ... ps.nn.Module the modules, each of which is applied to the result of the previous module
function Sequential:init(...)
  for i = 1, select("#", ...) do
    local module = select(i, ...)
    if not nn_module.is_module(module) then
      error(("nn.%s takes modules, %s(a, b), but argument %d is %s"):format(self.class_name, self.class_name, i,
        shown(module)))
    end
    self:append(module)
  end
end

--- Returns whether an element is a block for Module:recompute_blocks. An element is a block if it contains modules.
---@param element ps.nn.Module
---@return boolean
function Sequential:holds_blocks(element) -- luacheck: ignore 212/self
  for _, _, kind in registry.members(element) do
    if kind == "module" then return true end
  end
  return false
end

--- Applies the modules one after the other.
---@param x any the input of the first module
---@return any the result of the last module
function Sequential:forward(x)
  for i = 0, self.length - 1 do x = self._fields[i](x) end
  return x
end

return { ModuleList = ModuleList, Sequential = Sequential }
