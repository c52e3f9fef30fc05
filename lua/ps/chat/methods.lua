-- SPDX-License-Identifier: BSD-3-Clause
-- The methods of strings, lists and dicts in a chat template. The methods do the same as in Python. A method is a
-- function with three parameters: the value, a list of the positional arguments, and a table of the named arguments.
local text = require "ps.chat.text"
local characters = require "ps.chat.characters"
local values = require "ps.chat.values"
local letters = require "ps.chat.letters"
local format = require "ps.chat.format"
local raise, argument = values.raise, values.argument
local string_argument, whole_argument = values.string_argument, values.whole_argument

local methods = { str = {}, list = {}, dict = {} }
local str, list, dict = methods.str, methods.list, methods.dict

local function strip(left, right)
  return function(v, args, named)
    return text.strip(v, string_argument(args, named, 1, "chars"), left, right)
  end
end
str.strip, str.lstrip, str.rstrip = strip(true, true), strip(true, false), strip(false, true)

local function split(from_right)
  return function(v, args, named)
    local separator = string_argument(args, named, 1, "sep")
    if separator == "" then raise "empty separator" end
    return values.list(text.split(v, separator, whole_argument(args, named, 2, "maxsplit", -1), from_right))
  end
end
str.split, str.rsplit = split(false), split(true)

-- Line separators that consist of several bytes, and their sizes in bytes.
local WIDE = { ["\194\133"] = 2, ["\226\128\168"] = 3, ["\226\128\169"] = 3 }

function str.splitlines(v, args, named)
  local keep = values.truth(argument(args, named, 1, "keepends", false))
  local s, lines, from, at = text.flat(v), {}, 1, 1
  while true do
    local first = s:find("[\n\r\v\f\28\29\30\194\226]", at)
    if not first then break end
    local n = s:sub(first, first + 1) == "\r\n" and 2
      or WIDE[s:sub(first, first + 1)] or WIDE[s:sub(first, first + 2)] or 1
    at = first + n
    if n > 1 or s:byte(first) < 128 then
      lines[#lines + 1] = text.sub(v, from, keep and at - 1 or first - 1)
      from = at
    end
  end
  if from <= #s then lines[#lines + 1] = text.sub(v, from, #s) end
  return values.list(lines)
end

function str.replace(v, args, named)
  local old = string_argument(args, named, 1, "old") or raise "replace expected at least 2 arguments"
  local new = argument(args, named, 2, "new")
  if not text.is(new) then raise "replace() argument 2 must be str" end
  return text.replace(v, old, new, whole_argument(args, named, 3, "count", -1))
end

-- Implements startswith and endswith. The argument is a string or a tuple of strings.
local function affix(name, fits)
  return function(v, args)
    local s, what = text.flat(v), args[1]
    if args[2] ~= nil then values.refuse("%s with a start", name) end
    for _, piece in ipairs(getmetatable(what) == values.Tuple and what or { what }) do
      if not text.is(piece) then
        raise("%s first arg must be str or a tuple of str, not %s", name, values.kind(values.defined(piece)))
      end
      if fits(s, text.flat(piece)) then return true end
    end
    return false
  end
end
local function begins(s, piece) return s:sub(1, #piece) == piece end
local function ends(s, piece) return piece == "" or #piece <= #s and s:sub(-#piece) == piece end
str.startswith, str.endswith = affix("startswith", begins), affix("endswith", ends)

function str.removeprefix(v, args, named)
  local piece = string_argument(args, named, 1, "prefix") or raise "removeprefix() takes exactly one argument"
  return begins(text.flat(v), piece) and text.sub(v, #piece + 1, #text.flat(v)) or v
end
function str.removesuffix(v, args, named)
  local piece = string_argument(args, named, 1, "suffix") or raise "removesuffix() takes exactly one argument"
  return ends(text.flat(v), piece) and text.sub(v, 1, #text.flat(v) - #piece) or v
end

function str.lower(v) return letters.lower(v) end
str.casefold = str.lower
function str.upper(v) return letters.upper(v) end
function str.title(v) return letters.title(v) end
function str.capitalize(v) return letters.capitalize(v) end
function str.swapcase(v)
  return text.map(v, function(s)
    return (s:gsub(characters.PATTERN, function(c)
      return text.flat(letters.is_upper(c) and letters.lower(c) or letters.upper(c))
    end))
  end)
end

function str.isspace(v) return letters.all(v, text.is_space) end
function str.isalpha(v) return letters.all(v, letters.is_letter) end
function str.isdigit(v) return letters.all(v, letters.is_decimal) end
str.isdecimal = str.isdigit
function str.isnumeric(v) return letters.all(v, letters.is_number) end
function str.isalnum(v)
  return letters.all(v, function(c) return letters.is_letter(c) or letters.is_number(c) end)
end
function str.isascii(v) return not text.flat(v):find "[\128-\255]" end
function str.isidentifier(v) return text.flat(v):find "^[%a_][%w_]*$" ~= nil end
function str.isupper(v)
  local s = text.flat(v)
  return text.flat(letters.upper(s)) == s and text.flat(letters.lower(s)) ~= s
end
function str.islower(v)
  local s = text.flat(v)
  return text.flat(letters.lower(s)) == s and text.flat(letters.upper(s)) ~= s
end

-- Returns the position of a piece in the string v, counted in code points, or nil if v does not contain the piece.
local function find(v, args, from_right)
  local s, piece = text.flat(v), args[1]
  if not text.is(piece) then raise("must be str, not %s", values.kind(piece == nil and values.NONE or piece)) end
  if args[2] ~= nil then values.refuse "find with a start" end
  piece = text.flat(piece)
  local at = s:find(piece, 1, true)
  while at and from_right do
    local later = s:find(piece, at + 1, true)
    if not later then break end
    at = later
  end
  return at and text.length(s:sub(1, at - 1))
end
function str.find(v, args) return find(v, args, false) or -1 end
function str.rfind(v, args) return find(v, args, true) or -1 end
function str.index(v, args) return find(v, args, false) or raise "substring not found" end
function str.rindex(v, args) return find(v, args, true) or raise "substring not found" end

function str.count(v, args, named)
  local piece = string_argument(args, named, 1, "sub") or raise "count() takes at least 1 argument"
  if piece == "" then return text.length(v) + 1 end
  return #text.split(v, piece, -1) - 1
end

function str.join(v, args)
  local pieces = values.items(values.defined(args[1] == nil and values.NONE or args[1]))
  for i, piece in ipairs(pieces) do
    if not text.is(piece) then
      raise("sequence item %d: expected str instance, %s found", i - 1, values.kind(piece))
    end
  end
  return text.join(pieces, v)
end

local function partition(from_right)
  return function(v, args, named)
    local separator = string_argument(args, named, 1, "sep") or raise "partition() takes exactly one argument"
    if separator == "" then raise "empty separator" end
    local parts = text.split(v, separator, 1, from_right)
    if #parts == 2 then                                    -- the middle item is the separator as it is marked in v
      local n = #text.flat(parts[1])
      return values.tuple { parts[1], text.sub(v, n + 1, n + #separator), parts[2] }
    end
    return values.tuple(from_right and { "", "", v } or { v, "", "" })
  end
end
str.partition, str.rpartition = partition(false), partition(true)

local function justify(align)
  return function(v, args, named)
    local width, fill = whole_argument(args, named, 1, "width"), argument(args, named, 2, "fillchar", " ")
    if not width then raise "a width is missing" end
    if not text.is(fill) or text.length(fill) ~= 1 then
      raise "The fill character must be exactly one character long"
    end
    return format.padded(v, width, align, fill)
  end
end
str.ljust, str.rjust, str.center = justify "<", justify ">", justify "^"

function str.zfill(v, args, named)
  local n = #text.flat(v):match "^[-+]?"
  local width = whole_argument(args, named, 1, "width") or raise "a width is missing"
  return text.concat { text.sub(v, 1, n), format.padded(text.sub(v, n + 1, #text.flat(v)), width - n, ">", "0") }
end

function str.expandtabs(v, args, named)
  local size, column = whole_argument(args, named, 1, "tabsize", 8), 0
  if size > 1000 then raise("a tab of %d columns: the limit is 1000", size) end
  return text.map(v, function(s)
    return (s:gsub(characters.PATTERN, function(c)
      if c == "\t" then
        local n = size > 0 and size - column % size or 0
        column = column + n
        return (" "):rep(n)
      end
      column = (c == "\n" or c == "\r") and 0 or column + 1
      return c
    end))
  end)
end

function str.format(v, args, named) return format.braces(v, args, named) end

function list.index(v, args)
  for i, item in ipairs(v) do if values.equal(item, args[1]) then return i - 1 end end
  return raise("%s is not in list", text.flat(values.repr(args[1] == nil and values.NONE or args[1])))
end
function list.count(v, args)
  local n = 0
  for _, item in ipairs(v) do if values.equal(item, args[1]) then n = n + 1 end end
  return n
end
function list.copy(v) return setmetatable(values.copied(v), getmetatable(v)) end

function dict.get(v, args, named)
  if args[1] == nil then raise "get expected at least 1 argument, got 0" end
  local found = values.get(v, args[1])
  if found ~= nil then return found end
  return argument(args, named, 2, "default", values.NONE)
end
function dict.items(v)
  local pairs_ = {}
  for i, key in ipairs(v.keys) do pairs_[i] = values.tuple { key, values.get(v, key) } end
  return values.view(pairs_, "dict_items")
end
function dict.keys(v) return values.view(values.copied(v.keys), "dict_keys") end
function dict.values(v)
  local all = {}
  for i, key in ipairs(v.keys) do all[i] = values.get(v, key) end
  return values.view(all, "dict_values")
end
function dict.copy(v)
  local copy = values.dict()
  for _, key in ipairs(v.keys) do values.set(copy, key, values.get(v, key)) end
  return copy
end

-- Creates a method that would change a value in Python. Calling it raises an error, as in Jinja's immutable sandbox.
local function refused(name)
  return function()
    return raise("access to attribute '%s' is unsafe: values cannot be changed in a chat template", name)
  end
end
for name in ("append clear extend insert pop remove reverse sort"):gmatch "%a+" do list[name] = refused(name) end
for name in ("clear pop popitem setdefault update"):gmatch "%a+" do dict[name] = refused(name) end

return methods
