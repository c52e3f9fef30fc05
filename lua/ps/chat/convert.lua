-- SPDX-License-Identifier: BSD-3-Clause
-- Converts Lua tables to values of a chat template and back. A Lua table does not keep the order of its keys, and does
-- not distinguish 1.0 from 1 or {} from []. Therefore `plain` stores this information separately for each table that it
-- makes. `value` uses the information when it converts such a table, even if a script has put the table into another
-- table.
local values = require "ps.chat.values"
local text = require "ps.chat.text"
local utf8 = require "ps.core.utf8"
local caller = require "ps.core.caller"
local cjson = require "cjson"
local ffi = require "ffi"
local error = caller.error

local convert = {}

local DEPTH = 200
local LARGEST = 2 ^ 53

---@class ps.chat.Shape the information about a JSON list or object that its Lua table does not contain
---@field list boolean
---@field keys? string[] the keys in the order of the JSON text
---@field numbers? table<any, {[1]: number, [2]: table}> by key: a Lua number, and the template value (a float or a
--- whole number over 2^53) that it was made from

---@type table<table, ps.chat.Shape>
local shapes = setmetatable({}, { __mode = "k" })

-- Converts a Lua number to a template value. Whole numbers become integers.
local function number_value(x)
  if x ~= x or math.abs(x) == math.huge or x ~= math.floor(x) then return values.float(x) end
  if math.abs(x) >= LARGEST then return values.big(("%.0f"):format(x)) end
  return x
end

local value_of

local function list_of(t, shape, where, depth)
  local list = {}
  for i = 1, #t do list[i] = value_of(t[i], ("%s[%d]"):format(where, i), depth + 1, shape and shape.numbers, i) end
  for key in pairs(t) do
    if type(key) ~= "number" or key < 1 or key > #t or key % 1 ~= 0 then
      error(("%s: a list with the key '%s'"):format(where, tostring(key)))
    end
  end
  return values.list(list)
end

-- Returns the keys of the table t. The keys in the JSON text that the table was made from come first, in the order of
-- the JSON text, if they are still in the table. The other keys follow in alphabetical order.
local function keys_of(t, shape, where)
  local keys, known, rest = {}, {}, {}
  for _, key in ipairs(shape and shape.keys or {}) do
    if t[key] ~= nil then keys[#keys + 1], known[key] = key, true end
  end
  for key in pairs(t) do
    if type(key) ~= "string" then error(("%s: the key %s is not text"):format(where, tostring(key))) end
    if not known[key] then rest[#rest + 1] = key end
  end
  table.sort(rest)
  for _, key in ipairs(rest) do keys[#keys + 1] = key end
  return keys
end

local function dict_of(t, shape, where, depth)
  local dict = values.dict()
  for _, key in ipairs(keys_of(t, shape, where)) do
    if not utf8.valid(key) then error(where .. ": a key is not valid UTF-8") end
    values.set(dict, key, value_of(t[key], where .. "." .. key, depth + 1, shape and shape.numbers, key))
  end
  return dict
end

function value_of(v, where, depth, numbers, key)
  if depth > DEPTH then error(("%s: tables are nested over %d levels deep"):format(where, DEPTH)) end
  local kind = type(v)
  if v == cjson.null then return values.NONE end
  if kind == "boolean" then return v end
  if kind == "string" then
    if not utf8.valid(v) then error(where .. ": a string is not valid UTF-8") end
    return v
  end
  if kind == "number" then
    local known = numbers and numbers[key]
    if known and (known[1] == v or getmetatable(known[2]) == values.Float) then
      return known[1] == v and known[2] or values.float(v)
    end
    return number_value(v)
  end
  if kind == "cdata" and (ffi.istype("int64_t", v) or ffi.istype("uint64_t", v)) then
    local digits = tostring(v):match "^-?%d+"
    return math.abs(tonumber(v)) < LARGEST and tonumber(v) or values.big(digits)
  end
  if kind ~= "table" then
    error(("%s: the value is a %s; it must be a table, text, number or boolean"):format(where, kind))
  end
  local class = getmetatable(v)
  if class == values.List or class == values.Dict or class == values.Float or class == values.Big or text.is(v) then
    return v
  end
  local shape = shapes[v]
  local list = #v > 0 or next(v) == nil and not (shape and not shape.list)
  return (list and list_of or dict_of)(v, shape, where, depth)
end

--- Converts a Lua value to a template value. If a table was made from JSON, its keys have the order of the JSON text.
--- The keys of other tables are sorted. An empty table becomes a list, unless it was made from an empty JSON object.
---@param v any
---@param where string name of the value, for errors
---@return any
function convert.value(v, where) return value_of(v, where, 1) end

--- Converts a template value to a Lua value. None becomes cjson.null. Passing the result to `value` returns a value
--- that is equal to v.
---@param v any
---@return any
function convert.plain(v)
  if v == values.NONE then return cjson.null end
  local class = getmetatable(v)
  if text.is(v) then return text.flat(v) end
  if class == values.Float then return v.x end
  if class == values.Big then return tonumber(v.digits) end
  if class ~= values.List and class ~= values.Dict then return v end
  local shape, t = { list = class == values.List }, {}
  local function put(key, item)
    t[key] = convert.plain(item)
    local kind = getmetatable(item)
    if kind == values.Float or kind == values.Big then
      shape.numbers = shape.numbers or {}
      shape.numbers[key] = { t[key], item }
    end
  end
  if shape.list then
    for i, item in ipairs(v) do put(i, item) end
  else
    shape.keys = {}
    for i, key in ipairs(v.keys) do
      shape.keys[i] = text.flat(key)
      put(text.flat(key), values.get(v, key))
    end
  end
  shapes[t] = shape
  return t
end

--- Returns a deep copy of a table, including the information that `plain` stored about the table.
---@param t table
---@return table
function convert.copied(t)
  local copies = {}
  local function copied(v)
    if type(v) ~= "table" or getmetatable(v) then return v end
    if copies[v] then return copies[v] end
    local copy = {}
    copies[v], shapes[copy] = copy, shapes[v]
    for key, item in pairs(v) do copy[key] = copied(item) end
    return copy
  end
  return copied(t)
end

return convert
