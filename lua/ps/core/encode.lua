-- SPDX-License-Identifier: BSD-3-Clause
-- Encodes values as JSON with sorted keys, so that equal values have equal JSON texts. Decoding returns the same value,
-- with every number bit for bit the same. If JSON would change a value, an error names the value's place. A table with
-- the keys 1 .. n becomes an array. Any other table, including an empty table, becomes an object. JSON's null is
-- cjson.null.
local json = require("cjson").new()
local utf8 = require "ps.core.utf8"

local MAX_DEPTH = 200                                      -- nesting depth of tables; cjson reads at most 1,000

local function refuse(place, what) error(("%s is %s"):format(place, what), 0) end

local function number(x)
  local text = ("%.14g"):format(x)
  return tonumber(text) == x and text or ("%.17g"):format(x)
end

-- Returns n for a table with the keys 1 .. n, or 0 if all keys are strings. Any other table is an error.
local function length(value, place)
  local n, names, odd = #value, false, nil
  for key in pairs(value) do
    if type(key) == "string" then names = true
    elseif type(key) ~= "number" or key % 1 ~= 0 or key < 1 or key > n then odd = key end
  end
  if names and (n > 0 or odd ~= nil) then
    refuse(place, "a table with string keys and other keys; JSON has either names or the keys 1 .. n")
  elseif odd ~= nil then
    refuse(place, ("a table with the key %s; keys must be strings, or 1 .. n without a gap"):format(tostring(odd)))
  end
  for i = 1, n do                                          -- #value may return n even if there are gaps
    if value[i] == nil then refuse(place, ("a list whose place %d is empty"):format(i)) end
  end
  return n
end

local function text(value, place)
  if not utf8.valid(value) then refuse(place, "text that is not UTF-8") end
  return json.encode(value)
end

local encode

local function encode_table(value, place, depth, open)
  if open[value] then refuse(place, "a table that contains itself") end
  if depth > MAX_DEPTH then refuse(place, ("inside more than %d tables"):format(MAX_DEPTH)) end
  open[value] = true
  local n, parts = length(value, place), {}
  if n > 0 then
    for i = 1, n do parts[i] = encode(value[i], ("%s[%d]"):format(place, i), depth + 1, open) end
  else
    local keys = {}
    for key in pairs(value) do keys[#keys + 1] = key end
    table.sort(keys)
    for i, key in ipairs(keys) do
      parts[i] = text(key, "a name in " .. place) .. ":" .. encode(value[key], place .. "." .. key, depth + 1, open)
    end
  end
  open[value] = nil
  return (n > 0 and "[%s]" or "{%s}"):format(table.concat(parts, ","))
end

function encode(value, place, depth, open)
  local kind = type(value)
  if kind == "table" then return encode_table(value, place, depth, open) end
  if kind == "number" then
    if value ~= value or value == math.huge or value == -math.huge then
      refuse(place, tostring(value) .. ", which JSON cannot represent")
    end
    return number(value)
  end
  if kind == "string" then return text(value, place) end
  if kind == "boolean" or value == json.null then return json.encode(value) end
  return refuse(place, "a " .. kind)
end

--- Returns a value as JSON.
---@param value any a number, string or boolean, or a table of such values
---@param place? string the value's name in errors
---@return string
return function(value, place) return encode(value, place or "it", 1, {}) end
