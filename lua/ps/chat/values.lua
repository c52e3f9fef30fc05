-- SPDX-License-Identifier: BSD-3-Clause
-- The values of a chat template. They behave like the values of Python. A boolean is a Lua boolean, a whole number is a
-- Lua number, and a string is a string of text.lua. This file defines a class for every other kind of value. A whole
-- number over 2^53 is an object of the class Big, which keeps all digits. It can be printed and compared, but not used
-- in arithmetic.
local text = require "ps.chat.text"
local characters = require "ps.chat.characters"

local values = {}

local NONE = setmetatable({}, { __tostring = function() return "None" end })
values.NONE = NONE

---@class ps.chat.List items at the indices 1, 2, ...
local List = { kind = "list" }
---@class ps.chat.Tuple items at the indices 1, 2, ...
local Tuple = { kind = "tuple" }
---@class ps.chat.Iterator items at the indices 1, 2, ...; a template can loop over them, but cannot use subscripts
---@field kind string name of the iterator's class in Python
---@field sized boolean true if the iterator has a length
local Iterator = {}
---@class ps.chat.Dict keys and their values
---@field keys any[] the keys in the order of insertion
---@field map table<string|number|boolean, any>
local Dict = { kind = "dict" }
---@class ps.chat.Float
---@field x number
local Float = { kind = "float" }
---@class ps.chat.Big a whole number over 2^53
---@field digits string
local Big = { kind = "int" }
---@class ps.chat.Undefined
---@field message string text of the error that is raised when the template uses the value
local Undefined = { kind = "undefined" }
---@class ps.chat.Namespace
---@field map table<string, any>
local Namespace = { kind = "namespace" }
---@class ps.chat.Callable
---@field call fun(args: any[], named: table<string, any>, state: table): any
local Callable = { kind = "callable" }
for _, class in ipairs { List, Tuple, Iterator, Dict, Float, Big, Undefined, Namespace, Callable } do
  class.__index = class
end
values.List, values.Tuple, values.Iterator, values.Dict, values.Float = List, Tuple, Iterator, Dict, Float
values.Big, values.Undefined, values.Namespace, values.Callable = Big, Undefined, Namespace, Callable

---@param items any[]
---@return ps.chat.List
function values.list(items) return setmetatable(items, List) end
---@param items any[]
---@return ps.chat.Tuple
function values.tuple(items) return setmetatable(items, Tuple) end
--- Creates the iterator that a filter such as `map` returns.
---@param items any[]
---@return ps.chat.Iterator
function values.generator(items)
  items.kind = "generator"
  return setmetatable(items, Iterator)
end
--- Creates a view of the keys, values or items of a dict.
---@param items any[]
---@param kind string
---@return ps.chat.Iterator
function values.view(items, kind)
  items.kind, items.sized = kind, true
  return setmetatable(items, Iterator)
end
---@param x number
---@return ps.chat.Float
function values.float(x) return setmetatable({ x = x }, Float) end
---@param digits string
---@return ps.chat.Big
function values.big(digits) return setmetatable({ digits = digits }, Big) end
---@return ps.chat.Dict
function values.dict() return setmetatable({ keys = {}, map = {} }, Dict) end
---@return ps.chat.Namespace
function values.namespace() return setmetatable({ map = {} }, Namespace) end
---@param message string text of the error that is raised when the template uses the value
---@return ps.chat.Undefined
function values.undefined(message) return setmetatable({ message = message }, Undefined) end
---@param name string
---@param call fun(args: any[], named: table<string, any>, state: table): any
---@return ps.chat.Callable
function values.callable(name, call) return setmetatable({ name = name, call = call }, Callable) end

--- Raises an error of a template, usually with the message that Python has for it. A template cannot catch this error.
---@param message string
---@param ... any arguments for the format in `message`
function values.raise(message, ...)
  if select("#", ...) > 0 then message = message:format(...) end
  error({ chat_template = message }, 0)
end
local raise = values.raise

--- Raises an error for a feature of Jinja or Python that is not supported.
---@param message string
---@param ... any arguments for the format in `message`
function values.refuse(message, ...)
  if select("#", ...) > 0 then message = message:format(...) end
  error({ unsupported = message }, 0)
end

--- Returns its argument. Raises an error if the argument is an undefined value.
---@generic V
---@param v V
---@return V
function values.defined(v)
  if getmetatable(v) == Undefined then raise("%s", v.message) end
  return v
end

--- Returns the name of a value's Python class.
---@param v any
---@return string
function values.kind(v)
  local t = type(v)
  if t == "number" then return "int" end
  if t == "boolean" then return "bool" end
  if text.is(v) then return "str" end
  if v == NONE then return "NoneType" end
  return v.kind
end
local kind = values.kind

--- Returns a new Lua table with items `first` to `last` of a list. The list may have any length, unlike with unpack.
---@param items any[]
---@param first? integer the first item (default 1)
---@param last? integer the last item (default: the number of items)
---@return any[]
function values.copied(items, first, last)
  local copy = {}
  for i = first or 1, last or #items do copy[#copy + 1] = items[i] end
  return copy
end

--- Returns an argument of a filter or method. The template may pass the argument by position or by name.
---@param args any[] the positional arguments
---@param named table<string, any> the named arguments
---@param i integer position of the argument
---@param name string name of the argument
---@param default any the result if the template does not pass the argument
---@return any
function values.argument(args, named, i, name, default)
  local v = args[i]
  if v == nil then v = named[name] end
  if v == nil then return default end
  return v
end

--- Returns an argument of a filter or method as a Lua string. Raises an error if the argument is not a string.
---@param args any[]
---@param named table<string, any>
---@param i integer
---@param name string
---@param default? string
---@return string? s `default` if the argument is missing or None
function values.string_argument(args, named, i, name, default)
  local v = values.argument(args, named, i, name, default)
  if v == nil or v == NONE then return default end
  if not text.is(v) then raise("expected a string for '%s', got %s", name, kind(values.defined(v))) end
  return text.flat(v)
end

--- Returns an argument of a filter or method. Raises an error if the argument is not a whole number.
---@param args any[]
---@param named table<string, any>
---@param i integer
---@param name string
---@param default? integer
---@return integer? x `default` if the argument is missing or None
function values.whole_argument(args, named, i, name, default)
  local v = values.argument(args, named, i, name, default)
  if v == nil or v == NONE then return default end
  if type(v) == "boolean" then return v and 1 or 0 end
  if type(v) ~= "number" then
    raise("'%s' object cannot be interpreted as an integer", kind(values.defined(v)))
  end
  return v
end

--- Converts a value to a Lua number. A boolean becomes 0 or 1. Returns nil for a value that cannot be used in
--- arithmetic.
---@param v any
---@return number? x
---@return boolean is_float
function values.number(v)
  if type(v) == "number" then return v, false end
  if type(v) == "boolean" then return v and 1 or 0, false end
  if getmetatable(v) == Float then return v.x, true end
  return nil, false
end

--- Returns the key of Dict.map for a key of a dict. For a string, this is "s" followed by the string's bytes, so that
--- marks have no effect. For a number, it is the number. For None and tuples, it is a text that does not begin with
--- "s".
---@param key any
---@return string|number
local function place(key)
  if text.is(key) then return "s" .. text.flat(key) end
  local x = values.number(key)
  if x then return x end
  if key == NONE then return "none" end
  if getmetatable(key) == Tuple then
    local parts = {}
    for i, item in ipairs(key) do parts[i] = tostring(place(item)) end
    return "t" .. table.concat(parts, "\0")
  end
  if kind(key) == "int" then return "b" .. key.digits end
  return raise("unhashable type: '%s'", kind(key))
end

---@param dict ps.chat.Dict
---@param key any
---@return any? value nil if the dict has no such key
function values.get(dict, key) return dict.map[place(key)] end

---@param dict ps.chat.Dict
---@param key any
---@param value any
function values.set(dict, key, value)
  local at = place(key)
  if dict.map[at] == nil then dict.keys[#dict.keys + 1] = key end
  dict.map[at] = value
end

--- Returns whether a value is true as a condition in Python.
---@param v any
---@return boolean
function values.truth(v)
  if type(v) == "boolean" then return v end
  if type(v) == "number" then return v ~= 0 end
  if type(v) == "string" then return v ~= "" end
  if v == NONE then return false end
  local class = getmetatable(v)
  if class == List or class == Tuple or class == Iterator and v.sized then return #v > 0 end
  if class == Dict then return #v.keys > 0 end
  if class == Float then return v.x ~= 0 end
  return class ~= Undefined
end

--- Implements Python's ==.
---@param a any
---@param b any
---@return boolean
function values.equal(a, b)
  text.work(1)
  if rawequal(a, b) then return true end
  if text.is(a) then return text.is(b) and text.flat(a) == text.flat(b) end
  local x, y = values.number(a), values.number(b)
  if x or y then return x == y end
  local class = getmetatable(a)
  if class ~= getmetatable(b) then return false end
  if class == List or class == Tuple then
    if #a ~= #b then return false end
    for i = 1, #a do if not values.equal(a[i], b[i]) then return false end end
    return true
  end
  if class == Dict then
    if #a.keys ~= #b.keys then return false end
    for _, key in ipairs(a.keys) do
      local other = values.get(b, key)
      if other == nil or not values.equal(values.get(a, key), other) then return false end
    end
    return true
  end
  if class == Undefined then return true end
  return class == Big and a.digits == b.digits
end

-- Returns whether a < b, where a or b is a whole number over 2^53. Compares the signs, then the lengths, then the
-- digits.
local function big_less(a, b)
  local function parts(v)
    local digits = type(v) == "number" and ("%d"):format(v) or v.digits
    local negative = digits:sub(1, 1) == "-"
    return negative, negative and digits:sub(2) or digits
  end
  local na, da = parts(a)
  local nb, db = parts(b)
  if na ~= nb then return na end
  if #da ~= #db then return (#da < #db) ~= na end
  return da ~= db and (da < db) ~= na
end

--- Implements Python's < for numbers, strings and lists. `operator` is the sign that an error contains, such as ">".
---@param a any
---@param b any
---@param operator? string
---@return boolean
function values.less(a, b, operator)
  text.work(1)
  local x, y = values.number(a), values.number(b)
  if x and y then return x < y end
  if text.is(a) and text.is(b) then return text.flat(a) < text.flat(b) end
  local class = getmetatable(a)
  if kind(a) == "int" and kind(b) == "int" then return big_less(a, b) end
  if class == getmetatable(b) and (class == List or class == Tuple) then
    for i = 1, math.min(#a, #b) do
      if not values.equal(a[i], b[i]) then return values.less(a[i], b[i], operator) end
    end
    return #a < #b
  end
  values.defined(a)
  values.defined(b)
  return raise("'%s' not supported between instances of '%s' and '%s'", operator or "<", kind(a), kind(b))
end

-- Implements Python's repr for a float. The result has as few digits as possible, but enough that reading it returns
-- the same float.
local function float_text(x)
  if x ~= x then return "nan" end
  if x == math.huge then return "inf" elseif x == -math.huge then return "-inf" end
  local s
  for digits = 1, 17 do
    s = ("%." .. digits .. "g"):format(x)
    if tonumber(s) == x then
      s = ("%." .. (digits - 1) .. "e"):format(x)
      break
    end
  end
  local sign, mantissa, exponent = s:match "^(%-?)([%d.]+)e([+-]%d+)$"
  local whole, e = mantissa:gsub("%.", ""), tonumber(exponent)
  if e < -4 or e >= 16 then
    local rest = whole:sub(2)
    return ("%s%s%se%s%02d"):format(sign, whole:sub(1, 1), rest ~= "" and "." .. rest or "", e < 0 and "-" or "+",
      math.abs(e))
  end
  if e < 0 then return sign .. "0." .. ("0"):rep(-e - 1) .. whole end
  if #whole <= e + 1 then return sign .. whole .. ("0"):rep(e + 1 - #whole) .. ".0" end
  return sign .. whole:sub(1, e + 1) .. "." .. whole:sub(e + 2)
end
values.float_text = float_text

local SHORT = { ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\\"] = "\\\\" }
-- Returns the escape sequence that Python's repr writes for a character. Returns nil if repr prints the character
-- itself.
local function escape_of(c)
  if characters.is_printable(c) then return nil end
  local point = characters.point(c)
  return point < 0x100 and ("\\x%02x"):format(point) or point < 0x10000 and ("\\u%04x"):format(point)
    or ("\\U%08x"):format(point)
end

-- Implements Python's repr for a string.
local function quoted(v)
  local s = text.flat(v)
  local quote = s:find("'", 1, true) and not s:find('"', 1, true) and '"' or "'"
  return text.concat { quote, text.map(v, function(part)
    part = part:gsub("[%z\1-\31\127\\]", function(c) return SHORT[c] or ("\\x%02x"):format(c:byte()) end)
    part = part:gsub("[\194-\244][\128-\191]+", escape_of)
    if quote == "'" then part = part:gsub("'", "\\'") end
    return part
  end), quote }
end

local DEPTH = 200                                          -- maximum nesting of lists and dicts in repr

local function repr(v, pieces, depth)
  if depth > DEPTH then raise "maximum recursion depth exceeded: a list is nested over 200 levels deep" end
  text.work(1)
  local class = getmetatable(v)
  if text.is(v) then pieces[#pieces + 1] = quoted(v)
  elseif class == List or class == Tuple then
    pieces[#pieces + 1] = class == List and "[" or "("
    for i, item in ipairs(v) do
      if i > 1 then pieces[#pieces + 1] = ", " end
      repr(item, pieces, depth + 1)
    end
    pieces[#pieces + 1] = class == List and "]" or #v == 1 and ",)" or ")"
  elseif class == Dict then
    pieces[#pieces + 1] = "{"
    for i, key in ipairs(v.keys) do
      if i > 1 then pieces[#pieces + 1] = ", " end
      repr(key, pieces, depth + 1)
      pieces[#pieces + 1] = ": "
      repr(values.get(v, key), pieces, depth + 1)
    end
    pieces[#pieces + 1] = "}"
  elseif class == Undefined then pieces[#pieces + 1] = "Undefined"
  elseif class == Iterator and not v.sized then values.refuse "a generator is printed: `| list` is missing"
  elseif class == Iterator then
    pieces[#pieces + 1] = v.kind .. "("
    repr(values.list(values.copied(v)), pieces, depth + 1)
    pieces[#pieces + 1] = ")"
  else pieces[#pieces + 1] = values.str(v) end
end

--- Implements Python's repr.
---@param v any
---@return string|ps.chat.Text
function values.repr(v)
  local pieces = {}
  repr(v, pieces, 1)
  return text.concat(pieces)
end

--- Implements Python's str: returns the text that a template prints for a value.
---@param v any
---@return string|ps.chat.Text
function values.str(v)
  if text.is(v) then return v end
  if type(v) == "number" then return ("%d"):format(v) end
  if type(v) == "boolean" then return v and "True" or "False" end
  if v == NONE then return "None" end
  local class = getmetatable(v)
  if class == Float then return float_text(v.x) end
  if class == Big then return v.digits end
  if class == Undefined then return "" end
  if class == Namespace then return "<Namespace>" end
  if class == Callable then return "<" .. v.name .. ">" end
  return values.repr(v)
end

--- Returns the items that a loop iterates over.
---@param v any
---@return any[] items the items, with the indices 1, 2, ...
function values.items(v)
  local class = getmetatable(v)
  if class == List or class == Tuple or class == Iterator then return v end
  if class == Dict then return v.keys end
  if class == Undefined then return {} end
  if text.is(v) then
    local at, all = text.points(text.flat(v)), {}
    for i = 1, #at - 1 do all[i] = text.sub(v, at[i], at[i + 1] - 1) end
    return all
  end
  return raise("'%s' object is not iterable", kind(v))
end

--- Implements Python's len.
---@param v any
---@return integer
function values.length(v)
  local class = getmetatable(v)
  if text.is(v) then return text.length(v) end
  if class == List or class == Tuple or class == Iterator and v.sized then return #v end
  if class == Dict then return #v.keys end
  if class == Undefined then return 0 end
  return raise("object of type '%s' has no len()", kind(v))
end

return values
