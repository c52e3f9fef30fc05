-- SPDX-License-Identifier: BSD-3-Clause
-- Extends Lua's functions on lists to lists of modules (ps.nn.ModuleList), whose items count from 0. ipairs and pairs
-- return 0 and the first module, then 1 and the second, and so on. unpack returns the modules. table.insert and
-- table.remove call the list's methods. Without this file, Lua's functions would read the table that represents the
-- list, which is empty. For all other values, Lua's own functions are called. The program loads this file before the
-- script.
--
-- The metatable of a list has the list's functions in its field `ps_list`: each, get, size, insert and remove. The
-- operator # cannot be changed. It returns 0 for every list (ps.nn.container).
local ffi = require "ffi"
local raw_ipairs, raw_pairs, raw_next, raw_unpack = ipairs, pairs, next, unpack
local raw_insert, raw_remove, raw_getn = table.insert, table.remove, table.getn
local getmetatable, type, select = getmetatable, type, select

local lists = {}

-- Returns the functions of a list of modules and the list, or nil for any other value. A model of ps.initialize may
-- have such a list as its module. For such a model, returns the module's functions and the module (ps_module_of).
local function list_of(value)
  if type(value) ~= "table" then return nil end
  local meta = getmetatable(value)
  if type(meta) ~= "table" then return nil end
  if meta.ps_module_of then return list_of(meta.ps_module_of(value)) end
  return meta.ps_list, value
end

-- The iterators for values of C types. Each entry is { type, function }.
local cdata = {}

--- Makes ipairs and pairs iterate over values of a C type.
---@param ctype ffi.ctype*
---@param each fun(value: ffi.cdata*): function, any, integer returns an iterator as ipairs does
function lists.of_cdata(ctype, each) cdata[#cdata + 1] = { ctype, each } end

local function each_of(value)
  for _, row in raw_ipairs(cdata) do if ffi.istype(row[1], value) then return row[2] end end
end

--- Returns whether a value is a list of modules.
---@param value any
---@return boolean
function lists.is_list(value) return list_of(value) ~= nil end

--- Lua's next, which is never compiled. The LuaJIT of Debian 12 compiles next wrongly: loops over it end early (issues
--- 827 and 1510 of LuaJIT). A compiled call can also lose the upper half of the address of a key or value (issue 829).
--- The key or value is then wrong, or the program crashes.
---@param t table
---@param key? any
---@return any key
---@return any value
function lists.next(t, key) return raw_next(t, key) end
jit.off(lists.next)

function lists.ipairs(t)
  local list, it = list_of(t)
  if list then return list.each(it) end
  local each = type(t) == "cdata" and each_of(t)
  if each then return each(t) end
  return raw_ipairs(t)
end

function lists.pairs(t)
  local list, it = list_of(t)
  if list then return list.each(it) end
  local each = type(t) == "cdata" and each_of(t)
  if each then return each(t) end
  local meta = type(t) == "table" and getmetatable(t)
  local all = type(meta) == "table" and rawget(meta, "__pairs")      -- Lua 5.2's __pairs
  if all then return all(t) end
  if type(t) ~= "table" then return raw_pairs(t) end                  -- raises Lua's error
  return lists.next, t, nil
end

function lists.unpack(t, ...)
  local list, it = list_of(t)
  if not list then return raw_unpack(t, ...) end
  local first, last = ...
  first, last = first or 0, last or list.size(it) - 1
  local items = {}
  for i = first, last do items[i - first + 1] = list.get(it, i) end
  return raw_unpack(items, 1, last - first + 1)
end

function lists.insert(t, ...)
  local list, it = list_of(t)
  if not list then return raw_insert(t, ...) end
  if select("#", ...) == 1 then return list.insert(it, list.size(it), (...)) end
  return list.insert(it, ...)
end

function lists.remove(t, ...)
  local list, it = list_of(t)
  if list then return list.remove(it, ...) end
  return raw_remove(t, ...)
end

function lists.getn(t)
  local list, it = list_of(t)
  if list then return list.size(it) end
  return raw_getn(t)
end

-- luacheck: push ignore 122 142
_G.ipairs, _G.pairs, _G.next, _G.unpack = lists.ipairs, lists.pairs, lists.next, lists.unpack
table.insert, table.remove, table.getn = lists.insert, lists.remove, lists.getn
-- luacheck: pop

return lists
