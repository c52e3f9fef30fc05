-- SPDX-License-Identifier: BSD-3-Clause
-- Reads the source of a configuration. A source is a Lua table, a .lua file that returns a table, a JSON file, or JSON
-- as base64. A .lua file is run in an empty environment. The result is a copy that the caller may change.
local json = require "ps.config.json"
local without_bom = require "ps.core.bom"
local read_file = require "ps.core.read_file"
local lib_null = require("cjson").null                     -- a null in tables that a script decoded with cjson

local source = {}

local DEEPEST = 32

-- Returns a copy without metatables. Raises an error if the nesting is so deep that a table must contain itself.
local function copy(value, name, depth)
  if rawequal(value, lib_null) then return json.null end
  if type(value) ~= "table" or value == json.null then return value end
  if depth > DEEPEST then
    error(("%s: the table is nested more than %d levels deep; does it contain itself?"):format(name, DEEPEST), 0)
  end
  local out = {}
  for key, item in next, value do out[key] = copy(item, name, depth + 1) end
  return out
end

local ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
local SIXBITS = { ["+"] = 62, ["-"] = 62, ["/"] = 63, ["_"] = 63 }
for i = 1, #ALPHABET do SIXBITS[ALPHABET:sub(i, i)] = i - 1 end

-- Decodes base64 in either of its two alphabets. Returns nil for any other text.
local function base64(text)
  text = text:gsub("%s", "")
  local body, padding = text:match("^([%w%+/_%-]+)(=*)$")
  if not body or #text % 4 ~= 0 or #padding > 2 then return nil end
  local out, bits, n = {}, 0, 0
  for i = 1, #body do
    bits, n = bits * 64 + SIXBITS[body:sub(i, i)], n + 6
    if n >= 8 then
      n = n - 8
      out[#out + 1] = string.char(math.floor(bits / 2 ^ n))
      bits = bits % 2 ^ n
    end
  end
  return table.concat(out)
end

local function run_lua(text, path)
  if text:sub(1, 1) == "\27" then
    error(path .. ": this file is compiled Lua; a configuration must be Lua source text", 0)
  end
  local chunk, why = loadstring((text:gsub("^#[^\n]*", "")), "@" .. path)
  if not chunk then error(why, 0) end
  local ok, result = pcall(setfenv(chunk, {}))
  if not ok then
    error(("%s\n(a configuration runs without globals: it has no require, os or math)"):format(tostring(result)), 0)
  end
  if type(result) ~= "table" then
    error(("%s returns a %s; a configuration file must return a table"):format(path, type(result)), 0)
  end
  return result
end

local function from_json(text, name)
  local value = json.decode(text, name)
  if type(value) ~= "table" or value == json.null or #value > 0 then
    error(name .. ":1:1: a configuration must be a JSON object", 0)
  end
  return value
end

--- Returns the raw table of a source, and the source's name for errors.
---@param from table|string
---@return table raw
---@return string name
function source.read(from)
  if type(from) == "table" then return copy(from, "config", 1), "config" end
  if type(from) ~= "string" then
    error(("config: a %s was given; expected a table, a path (.lua, .json) or base64 of JSON"):format(type(from)), 0)
  end
  local text, why = read_file(from)
  if text then
    text = without_bom(text)
    if from:match("%.lua$") then return copy(run_lua(text, from), from, 1), from end
    return from_json(text, from), from
  end
  local decoded = not from:match("%.json$") and not from:match("%.lua$") and base64(from)
  if decoded and decoded:match("^%s*{") then return from_json(decoded, "base64 config"), "base64 config" end
  error(("config: cannot read %s: %s (nor is it base64 of a JSON object)")
    :format(#from > 80 and from:sub(1, 77) .. "..." or from, (tostring(why):gsub("^.*: ", ""))), 0)
end

return source
