-- SPDX-License-Identifier: BSD-3-Clause
-- Reads JSON in configuration files strictly. A duplicate key is an error, while cjson silently uses the last value.
-- Every error names its line and column. null becomes json.null, so a key with the value null can be found. Comments
-- are allowed. They begin with // and end at the end of the line.
local json = { null = setmetatable({}, { __tostring = function() return "null" end }) }

local DEEPEST = 100
local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }
local WORDS = { { "true", true }, { "false", false }, { "null", json.null } }

local function fail(reader, at, message)
  local line, start = 1, 1
  for newline in reader.text:sub(1, at - 1):gmatch("()\n") do line, start = line + 1, newline + 1 end
  error(("%s:%d:%d: %s"):format(reader.name, line, at - start + 1, message), 0)
end

-- Returns the text at a position, for error messages.
local function found(reader, at)
  if at > #reader.text then return "the end of the file" end
  return ("'%s'"):format(reader.text:match("^[%w_%-%.]+", at) or reader.text:sub(at, at))
end

local function skip(reader)
  local text = reader.text
  reader.at = text:find("[^ \t\r\n]", reader.at) or #text + 1
  while text:sub(reader.at, reader.at + 1) == "//" do
    reader.at = text:find("\n", reader.at, true) or #text + 1
    reader.at = text:find("[^ \t\r\n]", reader.at) or #text + 1
  end
end

local function utf8(code)
  if code < 0x80 then return string.char(code) end
  if code < 0x800 then return string.char(0xC0 + math.floor(code / 0x40), 0x80 + code % 0x40) end
  local low = string.char(0x80 + math.floor(code / 0x40) % 0x40, 0x80 + code % 0x40)
  if code < 0x10000 then return string.char(0xE0 + math.floor(code / 0x1000)) .. low end
  return string.char(0xF0 + math.floor(code / 0x40000), 0x80 + math.floor(code / 0x1000) % 0x40) .. low
end

-- Returns the character of the \u escape at the position `at`, and the position after the escape. Two escapes that are
-- surrogates form one character.
local function unicode(reader, at)
  local code = tonumber(reader.text:match("^\\u(%x%x%x%x)", at) or "", 16)
  if not code then fail(reader, at, "\\u needs four hexadecimal digits") end
  if code < 0xD800 or code > 0xDFFF then return utf8(code), at + 6 end
  local low = tonumber(reader.text:match("^\\u(%x%x%x%x)", at + 6) or "", 16)
  if code > 0xDBFF or not low or low < 0xDC00 or low > 0xDFFF then
    fail(reader, at, "this \\u escape is only half of a surrogate pair")
  end
  return utf8(0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00), at + 12
end

local function string_at(reader)
  local text, parts, start = reader.text, {}, reader.at
  local at = start + 1
  while true do
    local stop = text:find('["\\%c]', at)
    if not stop then fail(reader, start, "this string does not end; close it with a quote") end
    parts[#parts + 1] = text:sub(at, stop - 1)
    local c = text:sub(stop, stop)
    if c == '"' then
      reader.at = stop + 1
      return table.concat(parts)
    elseif c ~= "\\" then
      if c:byte() ~= 127 then
        fail(reader, stop, "a string contains a control character (write \\n, \\t or \\u00XX)")
      end
      parts[#parts + 1], at = c, stop + 1
    else
      local escape = text:sub(stop + 1, stop + 1)
      if escape == "u" then
        parts[#parts + 1], at = unicode(reader, stop)
      else
        if not ESCAPES[escape] then fail(reader, stop, "unknown escape \\" .. escape) end
        parts[#parts + 1], at = ESCAPES[escape], stop + 2
      end
    end
  end
end

local function number_at(reader)
  local text = reader.text:match("^%-?[%w%.%+%-]+", reader.at)
  local whole, rest = (text or ""):match("^%-?(%d+)(.*)$")
  local fraction, exponent = (rest or ""):match("^(%.?%d*)(.*)$")
  local good = whole and (whole == "0" or whole:sub(1, 1) ~= "0") and (fraction == "" or fraction:match("^%.%d+$"))
    and (exponent == "" or exponent:match("^[eE][%+%-]?%d+$"))
  if not good then fail(reader, reader.at, found(reader, reader.at) .. " is not a JSON value") end
  reader.at = reader.at + #text
  return tonumber(text)
end

local value_at

-- Reads the items of a list or the members of an object until the character `close`. one(n) reads a single item.
local function sequence(reader, close, one)
  local open = reader.at
  reader.depth = reader.depth + 1
  if reader.depth > DEEPEST then
    fail(reader, open, ("the value is nested more than %d levels deep"):format(DEEPEST))
  end
  reader.at = open + 1
  skip(reader)
  local n = 0
  while reader.text:sub(reader.at, reader.at) ~= close or n > 0 do
    n = n + 1
    one(n)
    skip(reader)
    local c = reader.text:sub(reader.at, reader.at)
    if c == close then break end
    if c ~= "," then
      fail(reader, reader.at, ("expected ',' or '%s', found %s"):format(close, found(reader, reader.at)))
    end
    reader.at = reader.at + 1
    skip(reader)
  end
  reader.at, reader.depth = reader.at + 1, reader.depth - 1
end

local function object_at(reader)
  local object, places = {}, {}
  sequence(reader, "}", function()
    local at = reader.at
    if reader.text:sub(at, at) ~= '"' then fail(reader, at, "expected a key in quotes, found " .. found(reader, at)) end
    local key = string_at(reader)
    if places[key] then fail(reader, at, ("the key \"%s\" occurs twice in this object"):format(key)) end
    places[key] = at
    skip(reader)
    if reader.text:sub(reader.at, reader.at) ~= ":" then
      fail(reader, reader.at, ("expected ':' after the key \"%s\", found %s"):format(key, found(reader, reader.at)))
    end
    reader.at = reader.at + 1
    object[key] = value_at(reader)
  end)
  return object
end

local function array_at(reader)
  local array = {}
  sequence(reader, "]", function(n) array[n] = value_at(reader) end)
  return array
end

function value_at(reader)
  skip(reader)
  local c = reader.text:sub(reader.at, reader.at)
  if c == "{" then return object_at(reader) end
  if c == "[" then return array_at(reader) end
  if c == '"' then return string_at(reader) end
  for _, word in ipairs(WORDS) do
    if reader.text:match("^[%w_]+", reader.at) == word[1] then
      reader.at = reader.at + #word[1]
      return word[2]
    end
  end
  if c == "" then fail(reader, reader.at, "a value is missing: the file ends here") end
  return number_at(reader)
end

--- Returns the value of a JSON text. Errors name the file, the line and the column.
---@param text string
---@param name string
---@return any
function json.decode(text, name)
  local reader = { text = text, name = name, at = 1, depth = 0 }
  local value = value_at(reader)
  skip(reader)
  if reader.at <= #text then fail(reader, reader.at, "the JSON value ended before " .. found(reader, reader.at)) end
  return value
end

return json
