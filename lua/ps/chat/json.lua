-- SPDX-License-Identifier: BSD-3-Clause
-- Converts JSON to values of a chat template and back. Unlike cjson, this module keeps the order of keys, distinguishes
-- 1 from 1.0 and {} from [], and keeps all digits of whole numbers. It writes the same text as Python's json.dumps.
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local characters = require "ps.chat.characters"
local utf8 = require "ps.core.utf8"

local json = {}

local DEPTH = 200                                          -- maximum nesting of lists and objects
local LARGEST = 2 ^ 53
local ESCAPES = { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }
local WORDS = { ["true"] = true, ["false"] = false, null = values.NONE }

-- Creates the error table for an error at byte `at` of a text. Its fields are:
--   json      a message that contains the line and the position in the line
--   in_line   a message that contains only the position in the line
--   repeated  true if the error is that an object has a key twice
local function problem_at(s, at, why, ...)
  local before = s:sub(1, at - 1)
  local _, n = before:gsub("\n", "")
  local in_line = ("byte %d: "):format(#before:match "[^\n]*$" + 1) .. why:format(...)
  return { json = ("line %d, "):format(n + 1) .. in_line, in_line = in_line }
end

-- Raises an error at byte `at` of a text.
local function fail(...) error(problem_at(...), 0) end

local read

local function read_string(s, at)
  local parts, from = {}, at + 1
  while true do
    local stop = s:find('["\\%z\1-\31]', from)
    if not stop then fail(s, at, "a string has no end") end
    parts[#parts + 1] = s:sub(from, stop - 1)
    local c = s:sub(stop, stop)
    if c == '"' then return table.concat(parts), stop + 1 end
    if c ~= "\\" then
      fail(s, stop, "a control character (%d) in a string; JSON writes it as \\u%04x", c:byte(), c:byte())
    end
    local e = s:sub(stop + 1, stop + 1)
    if e == "u" then
      local hex = s:match("^%x%x%x%x", stop + 2) or fail(s, stop, "\\u needs four hexadecimal digits")
      local point = tonumber(hex, 16)
      from = stop + 6
      if point >= 0xd800 and point <= 0xdbff then
        local low = s:match("^\\u([dD][c-fC-F]%x%x)", from)
        if not low then fail(s, stop, "\\u%s is half of a character: its other half does not follow", hex) end
        point, from = 0x10000 + (point - 0xd800) * 1024 + tonumber(low, 16) - 0xdc00, from + 6
      elseif point >= 0xdc00 and point <= 0xdfff then
        fail(s, stop, "\\u%s is half of a character: its other half does not precede it", hex)
      end
      parts[#parts + 1] = characters.utf8(point)
    else
      parts[#parts + 1] = ESCAPES[e] or fail(s, stop, "\\%s is not an escape of JSON", e)
      from = stop + 2
    end
  end
end

local function space(s, at) return s:find("[^ \t\r\n]", at) or #s + 1 end

local function read_list(s, at, depth)
  local items = {}
  at = space(s, at + 1)
  if s:sub(at, at) == "]" then return values.list(items), at + 1 end
  while true do
    items[#items + 1], at = read(s, at, depth + 1)
    at = space(s, at)
    local c = s:sub(at, at)
    if c == "]" then return values.list(items), at + 1 end
    if c ~= "," then fail(s, at, "',' or ']' expected") end
    at = space(s, at + 1)
  end
end

local function read_object(s, at, depth)
  local dict = values.dict()
  at = space(s, at + 1)
  if s:sub(at, at) == "}" then return dict, at + 1 end
  while true do
    if s:sub(at, at) ~= '"' then fail(s, at, "a key in quotes expected") end
    local start = at
    local key
    key, at = read_string(s, at)
    if values.get(dict, key) ~= nil then
      local problem = problem_at(s, start, "the key '%s' occurs twice in one object", key)
      problem.repeated = true
      error(problem, 0)
    end
    at = space(s, at)
    if s:sub(at, at) ~= ":" then fail(s, at, "':' expected after the key '%s'", key) end
    local value
    value, at = read(s, space(s, at + 1), depth + 1)
    values.set(dict, key, value)
    at = space(s, at)
    local c = s:sub(at, at)
    if c == "}" then return dict, at + 1 end
    if c ~= "," then fail(s, at, "',' or '}' expected") end
    at = space(s, at + 1)
  end
end

local function read_number(s, at)
  local digits = s:match("^-?%d+", at) or fail(s, at, "a value expected")
  local stop = at + #digits
  if digits:find "^-?0%d" then fail(s, at, "a number begins with 0") end
  local rest = (s:match("^%.%d+", stop) or "")
  rest = rest .. (s:match("^[eE][+-]?%d+", stop + #rest) or "")
  if rest ~= "" then return values.float(tonumber(digits .. rest)), stop + #rest end
  local x = tonumber(digits)
  if math.abs(x) >= LARGEST then return values.big(digits), stop end
  return x == 0 and 0 or x, stop
end

function read(s, at, depth)
  if depth > DEPTH then fail(s, at, "lists and objects are nested over %d levels deep", DEPTH) end
  local c = s:sub(at, at)
  if c == '"' then return read_string(s, at) end
  if c == "{" then return read_object(s, at, depth) end
  if c == "[" then return read_list(s, at, depth) end
  local word = s:match("^%a+", at)
  if word and WORDS[word] ~= nil then return WORDS[word], at + #word end
  return read_number(s, at)
end

--- Decodes a JSON text. If the text is not valid, raises a table whose field `json` is a message.
---@param s string
---@return any
function json.decode(s)
  if not utf8.valid(s) then error({ json = "it is not valid UTF-8" }, 0) end
  local value, at = read(s, space(s, 1), 1)
  at = space(s, at)
  if at <= #s then fail(s, at, "more text follows the value") end
  return value
end

local NAMES = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t", ["\b"] = "\\b",
  ["\f"] = "\\f" }
local function ascii(c)
  local point = characters.point(c)
  if point < 0x10000 then return ("\\u%04x"):format(point) end
  point = point - 0x10000
  return ("\\u%04x\\u%04x"):format(0xd800 + math.floor(point / 1024), 0xdc00 + point % 1024)
end

local function quoted(v, options)
  return text.concat { '"', text.map(v, function(part)
    part = part:gsub('[%z\1-\31"\\]', function(c) return NAMES[c] or ("\\u%04x"):format(c:byte()) end)
    if options.ensure_ascii then part = part:gsub("[\194-\244][\128-\191]+", ascii) end
    return part
  end), '"' }
end

local function number_text(v)
  local s = values.str(v)
  return s == "nan" and "NaN" or s == "inf" and "Infinity" or s == "-inf" and "-Infinity" or s
end

local function word_of(v)
  if type(v) == "boolean" then return v and "true" or "false" end
  if v == values.NONE then return "null" end
  local kind = values.kind(v)
  if kind == "int" or kind == "float" then return number_text(v) end
end

local function key_of(key, options)
  local word = not text.is(key) and (word_of(key)
    or values.raise("keys must be str, int, float, bool or None, not %s", values.kind(key)))
  return quoted(word or key, options)
end

local function write(v, options, pieces, depth)
  if depth > DEPTH then values.raise "maximum recursion depth exceeded: a list is nested over 200 levels deep" end
  text.work(1)
  local function add(piece) pieces[#pieces + 1] = piece end
  local function line(level) if options.indent then add("\n" .. options.indent:rep(level)) end end
  local kind = values.kind(v)
  if text.is(v) then add(quoted(v, options))
  elseif kind == "list" or kind == "tuple" then
    if #v == 0 then return add "[]" end
    add "["
    for i, item in ipairs(v) do
      if i > 1 then add(options.comma) end
      line(depth)
      write(item, options, pieces, depth + 1)
    end
    line(depth - 1)
    add "]"
  elseif kind == "dict" then
    if #v.keys == 0 then return add "{}" end
    local keys = v.keys
    if options.sort_keys then
      keys = values.copied(keys)
      table.sort(keys, values.less)
    end
    add "{"
    for i, key in ipairs(keys) do
      if i > 1 then add(options.comma) end
      line(depth)
      add(key_of(key, options))
      add(options.colon)
      write(values.get(v, key), options, pieces, depth + 1)
    end
    line(depth - 1)
    add "}"
  else
    add(word_of(v) or values.raise("Object of type %s is not JSON serializable",
      kind == "undefined" and "Undefined" or kind))
  end
end

--- Encodes a value as JSON. The text is the same as that of Python's json.dumps.
---@param v any
---@param options? {ensure_ascii?: boolean, indent?: string, comma?: string, colon?: string, sort_keys?: boolean}
--- indent: the text by which each level is indented; without `indent` the JSON is a single line
---@return string|ps.chat.Text
function json.encode(v, options)
  options = options or {}
  local pieces = {}
  write(v, { ensure_ascii = options.ensure_ascii, indent = options.indent, sort_keys = options.sort_keys,
    comma = options.comma or (options.indent and "," or ", "), colon = options.colon or ": " }, pieces, 1)
  return text.concat(pieces)
end

return json
