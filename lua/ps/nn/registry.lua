-- SPDX-License-Identifier: BSD-3-Clause
-- Orders the members of a module like PyTorch's named_parameters. The module's own parameters are first, then its
-- buffers, then its modules. The members of each kind are in the order in which a script assigned them.
--
-- Lua evaluates the right side of `self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)` from left to right, but it
-- assigns from right to left. It assigns b before a. If one statement assigns several members, these members are
-- therefore in the order in which they were made. Assignments belong to one statement if they are on the same line, and
-- no module or parameter is made between them.
--
-- Files outside of lua/ps/nn/ access the members of a module only with registry.walk, members, tensors, kind and put.
local ffi = require "ffi"
local is_tensor = require("ps.core.scope").is_tensor

local registry = {}

---@class ps.nn.Registered the fields of a module that this file uses
---@field _names any[] registered names, in order
---@field _kind table<any, string> "module", "param" or "buffer"
---@field _fields table<any, any>
---@field _transient? table<any, true> names of buffers that are not part of the module's state
---@field _typed? table<any, true> names of buffers whose type does not change

local RANK = { param = 1, buffer = 2, module = 3 }

local count = 0                                             -- number of modules and parameters made so far
local numbers = setmetatable({}, { __mode = "k" })  -- index of each module or parameter in the order of creation
local owned = setmetatable({}, { __mode = "k" })            -- modules and parameters that a module has registered

-- The statement of the last assignment: the module, the assigning function, the current line of this function, the
-- current line of its caller, the number of members made by then, and the assigned names.
local statement = setmetatable({}, { __mode = "v" })
local statement_names

--- Records that a module or a parameter was made.
---@param value ps.nn.Module|ps.Tensor
function registry.made(value)
  count = count + 1
  if not numbers[value] then numbers[value] = count end
end

local DEPTH = 4                                             -- number of levels of nested tables that are searched

-- Finds the first module or parameter in a plain table that no module has registered. Returns the module or parameter,
-- and its path in the table, such as "[2].up".
local function find_unowned(list, depth, seen)
  seen[list] = true
  for key, value in next, list do
    local place = type(key) == "string" and "." .. key or ("[%s]"):format(tostring(key))
    if numbers[value] then
      if not owned[value] then return value, place end
    elseif type(value) == "table" and getmetatable(value) == nil and depth < DEPTH and not seen[value] then
      local found, below = find_unowned(value, depth + 1, seen)
      if found ~= nil then return found, place .. below end
    end
  end
end

--- Finds a module or parameter that is in a plain Lua table, if the table is a field of this module and no module has
--- registered the value. Such a module or parameter would not be trained, saved or moved.
---@param self ps.nn.Registered
---@return any field nil if there is no such value
---@return string? place path in the table, such as "[2].up"
---@return any found
function registry.unowned(self)
  for key, value in next, self._fields do
    if type(value) == "table" and not self._kind[key] and getmetatable(value) == nil then
      local found, place = find_unowned(value, 1, {})
      if found ~= nil then return key, place, found end
    end
  end
end

-- Begins a new statement, unless this assignment belongs to the statement of the previous assignment. Returns false if
-- the line of the assigning function is not known. `level` is the stack level of the assigning function.
local function continues(self, level)
  local info, above = debug.getinfo(level + 1, "lf"), debug.getinfo(level + 2, "l")
  if not info or info.currentline <= 0 then return false end
  local line, from = info.currentline, above and above.currentline or 0
  local same = statement.module == self and statement.func == info.func and statement.line == line
    and statement.from == from and statement.count == count
  statement.module, statement.func, statement.line = self, info.func, line
  statement.from, statement.count = from, count
  if not same then statement_names = {} end
  return true
end

local function number_of(self, name) return numbers[self._fields[name]] or math.huge end

--- Removes a name.
---@param self ps.nn.Registered
---@param name any
function registry.remove(self, name)
  self._kind[name] = nil
  for i, known in ipairs(self._names) do
    if known == name then return table.remove(self._names, i) end
  end
end

--- Registers a value under a name. If the name is already registered with the same kind, the name keeps its position.
---@param self ps.nn.Registered
---@param name any
---@param kind "module"|"param"|"buffer"
---@param value ps.nn.Module|ps.Tensor
---@param level? integer stack level of the assigning function; nil if a method call registers the value, which is not
--- part of an assignment statement
function registry.add(self, name, kind, value, level)
  self._fields[name] = value
  owned[value] = true
  if self._kind[name] == kind then return end
  if self._kind[name] then registry.remove(self, name) end
  local names, kinds = self._names, self._kind
  local at = #names + 1
  while at > 1 and RANK[kinds[names[at - 1]]] > RANK[kind] do at = at - 1 end
  kinds[name] = kind
  if level and type(name) == "string" and continues(self, level + 1) then
    local mine = number_of(self, name)
    while at > 1 and kinds[names[at - 1]] == kind and statement_names[names[at - 1]]
      and number_of(self, names[at - 1]) >= mine do at = at - 1 end
    statement_names[name] = true
  else
    statement.module = nil
  end
  table.insert(names, at, name)
end

--- Returns an iterator for `for key, value, kind in registry.members(module) do`. It produces the module's own members,
--- in order.
---@param module ps.nn.Registered
---@return fun(): any, ps.nn.Module|ps.Tensor|nil, string?
function registry.members(module)
  local i = 0
  return function()
    local key, value
    repeat
      i = i + 1
      key = module._names[i]
      value = module._fields[key]
    until key == nil or value ~= nil
    return key, value, module._kind[key]
  end
end

--- Calls fn(full name, value, kind, owner, key) for every value that is registered in a module or in a module inside
--- it. A module comes before its members, and members are in order.
---@param module ps.nn.Registered
---@param fn fun(name: string, value: ps.nn.Module|ps.Tensor, kind: string, owner: ps.nn.Module, key: any)
---@param prefix? string text before each name
function registry.walk(module, fn, prefix)
  prefix = prefix or ""
  for key, value, kind in registry.members(module) do
    local name = prefix .. tostring(key)
    fn(name, value, kind, module, key)
    if kind == "module" then registry.walk(value, fn, name .. ".") end
  end
end

--- Returns an iterator for `for key, tensor, kind in registry.tensors(module) do`. It produces the module's own tensors
--- in an undefined order: parameters, buffers, and tensors in plain fields. The kind of a tensor in a plain field is
--- nil.
---@param module ps.nn.Registered
---@return fun(): any, ps.Tensor?, string?
function registry.tensors(module)
  local key, value
  return function()
    repeat key, value = next(module._fields, key) until key == nil or is_tensor(value)
    return key, value, module._kind[key]
  end
end

-- Sets or removes a mark of a member.
local function mark(module, field, key, on)
  local list = rawget(module, field)
  if not list and on then
    list = {}
    rawset(module, field, list)
  end
  if list then list[key] = on or nil end
end

--- Sets whether a buffer is part of the module's state.
---@param module ps.nn.Registered
---@param key any
---@param is_part boolean
function registry.set_persistent(module, key, is_part) mark(module, "_transient", key, not is_part) end

--- Sets whether a buffer keeps its type when the module is converted.
---@param module ps.nn.Registered
---@param key any
---@param keeps boolean
function registry.set_keeps_dtype(module, key, keeps) mark(module, "_typed", key, keeps) end

--- Returns whether a member is a buffer that keeps its type when the module is converted.
---@param module ps.nn.Registered
---@param key any
---@return boolean
function registry.keeps_dtype(module, key)
  local list = rawget(module, "_typed")
  return list ~= nil and list[key] == true and module._kind[key] == "buffer"
end

--- Returns whether a member is part of the module's state.
---@param module ps.nn.Registered
---@param key any
---@return boolean
function registry.is_persistent(module, key)
  local list = rawget(module, "_transient")
  return not (list and list[key] and module._kind[key] == "buffer")
end

--- Returns the kind of a registered name: "module", "param" or "buffer". Returns nil if the name is not registered.
---@param module ps.nn.Registered
---@param key any
---@return string?
function registry.kind(module, key) return module._kind[key] end

--- Replaces a registered tensor by another tensor.
---@param module ps.nn.Registered
---@param key any
---@param tensor ps.Tensor
function registry.put(module, key, tensor) module._fields[key] = tensor end

--- Returns the address of a tensor. Two references to the same tensor have equal addresses.
---@param tensor ps.Tensor
---@return integer
function registry.address(tensor) return tonumber(ffi.cast("uintptr_t", ffi.cast("ps_tensor *", tensor))) end

return registry
