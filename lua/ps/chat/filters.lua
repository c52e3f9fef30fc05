-- SPDX-License-Identifier: BSD-3-Clause
-- Jinja's filters. `tojson` is the variant that transformers defines. A filter is a function with four parameters: the
-- value, a list of the positional arguments, a table of the named arguments, and the scope.
local text = require "ps.chat.text"
local characters = require "ps.chat.characters"
local values = require "ps.chat.values"
local json = require "ps.chat.json"
local letters = require "ps.chat.letters"
local format = require "ps.chat.format"
local operators = require "ps.chat.operators"
local attributes = require "ps.chat.attributes"
local tests = require "ps.chat.tests"
local raise, argument, NONE = values.raise, values.argument, values.NONE
local string_argument, whole_argument = values.string_argument, values.whole_argument

local filters = {}

local function truth_argument(args, named, i, name, default)
  return values.truth(argument(args, named, i, name, default))
end

function filters.length(v) return values.length(v) end
filters.count = filters.length
function filters.string(v) return values.str(v) end
function filters.safe(v) return text.markup(values.str(v)) end
function filters.lower(v) return letters.lower(values.str(v)) end
function filters.upper(v) return letters.upper(values.str(v)) end
function filters.capitalize(v) return letters.capitalize(values.str(v)) end

function filters.title(v)
  local fresh = true                                       -- true at the start and after a space or one of ( [ { < -
  return text.map(values.str(v), function(s)
    return (s:gsub(characters.PATTERN, function(c)
      local was = fresh
      fresh = text.is_space(c) or c:find "^[-%(%[{<]$" ~= nil
      return text.flat(was and letters.capitalize(c) or letters.lower(c))
    end))
  end)
end

function filters.trim(v, args, named)
  return text.strip(values.str(v), string_argument(args, named, 1, "chars"), true, true)
end

function filters.default(v, args, named)
  local other = argument(args, named, 1, "default_value", "")
  if getmetatable(v) == values.Undefined then return other end
  if truth_argument(args, named, 2, "boolean", false) and not values.truth(v) then return other end
  return v
end
filters.d = filters.default

function filters.tojson(v, args, named)
  local indent = argument(args, named, 2, "indent", NONE)
  local separators = argument(args, named, 3, "separators", NONE)
  local level
  if type(indent) == "number" then level = format.padded("", indent, "<", " ")
  elseif text.is(indent) then level = text.flat(indent)
  elseif indent ~= NONE then raise("tojson: an indent of type %s", values.kind(indent)) end
  local comma, colon
  if separators ~= NONE then
    local pair = values.items(separators)
    if #pair ~= 2 then raise("tojson: %d separators, 2 expected", #pair) end
    comma, colon = string_argument(pair, {}, 1, "separators"), string_argument(pair, {}, 2, "separators")
  end
  return json.encode(v, { ensure_ascii = truth_argument(args, named, 1, "ensure_ascii", false), indent = level,
    comma = comma, colon = colon, sort_keys = truth_argument(args, named, 4, "sort_keys", false) })
end

-- Returns a function that looks up an item of a value. `attribute` is the path of the item, such as "a.b.0".
local function picker(attribute)
  if attribute == nil or attribute == NONE then return function(v) return v end end
  local path = {}
  if type(attribute) == "number" then path[1] = attribute
  elseif not text.is(attribute) then
    raise("expected a string for 'attribute', got %s", values.kind(values.defined(attribute)))
  else
    for part in (text.flat(attribute) .. "."):gmatch "(.-)%." do
      path[#path + 1] = part:find "^%d+$" and tonumber(part) or part
    end
  end
  return function(v)
    for _, part in ipairs(path) do v = attributes.item(v, part) end
    return v
  end
end

function filters.join(v, args, named)
  local separator, pick = argument(args, named, 1, "d", ""), picker(argument(args, named, 2, "attribute"))
  local pieces = {}
  for i, item in ipairs(values.items(v)) do pieces[i] = values.str(pick(item)) end
  return text.join(pieces, values.str(separator))
end

function filters.items(v)
  if getmetatable(v) == values.Undefined then return values.generator {} end
  if getmetatable(v) ~= values.Dict then raise "Can only get item pairs from a mapping." end
  return values.generator(values.copied(attributes.attribute(v, "items").call({}, {})))
end

function filters.list(v)
  local all = {}
  for i, item in ipairs(values.items(v)) do all[i] = item end
  return values.list(all)
end

function filters.first(v) return values.items(v)[1] or values.undefined "No first item, sequence was empty." end
function filters.last(v)
  local items = values.items(v)
  return items[#items] or values.undefined "No last item, sequence was empty."
end

function filters.reverse(v)
  local items, all = values.items(v), {}
  for i = #items, 1, -1 do all[#all + 1] = items[i] end
  if text.is(v) then return text.concat(all) end
  return values.generator(all)
end

function filters.replace(v, args, named)
  local old, new = argument(args, named, 1, "old"), argument(args, named, 2, "new")
  if old == nil or new == nil then raise "replace needs two strings" end
  return text.replace(values.str(v), text.flat(values.str(old)), values.str(new),
    whole_argument(args, named, 3, "count", -1))
end

function filters.indent(v, args, named)
  local width, first = argument(args, named, 1, "width", 4), truth_argument(args, named, 2, "first", false)
  local blank = truth_argument(args, named, 3, "blank", false)
  if not text.is(width) and type(width) ~= "number" then
    raise("can't multiply sequence by non-int of type '%s'", values.kind(values.defined(width)))
  end
  local by = text.is(width) and width or format.padded("", width, "<", " ")
  local all = {}
  for i, line in ipairs(attributes.attribute(text.concat { values.str(v), "\n" }, "splitlines").call({}, {})) do
    local add = i == 1 and first or i > 1 and (blank or text.flat(line) ~= "")
    all[i] = add and text.concat { by, line } or line
  end
  return text.join(all, "\n")
end

-- Sorts the items of a list by a key. Items with equal keys keep their order.
local function sorted(items, key, descending)
  local keyed = {}
  for i, item in ipairs(items) do
    text.work(4)
    keyed[i] = { key(item), i, item }
  end
  table.sort(keyed, function(a, b)
    if values.equal(a[1], b[1]) then return a[2] < b[2] end
    if descending then return values.less(b[1], a[1]) end
    return values.less(a[1], b[1])
  end)
  local all = {}
  for i, entry in ipairs(keyed) do all[i] = entry[3] end
  return values.list(all)
end

-- Returns a function that computes the key by which an item is sorted or grouped: the result of pick(item). A string
-- key is converted to lower case unless `with_case` is true.
local function folded(pick, with_case)
  return function(item)
    local v = pick(item)
    return not with_case and text.is(v) and text.flat(letters.lower(v)) or v
  end
end

function filters.sort(v, args, named)
  local pick = picker(argument(args, named, 3, "attribute"))
  return sorted(values.items(v), folded(pick, truth_argument(args, named, 2, "case_sensitive", false)),
    truth_argument(args, named, 1, "reverse", false))
end

function filters.dictsort(v, args, named)
  if getmetatable(v) ~= values.Dict then
    raise("'%s' object has no attribute 'items'", values.kind(values.defined(v)))
  end
  local by = string_argument(args, named, 2, "by", "key")
  if by ~= "key" and by ~= "value" then raise 'You can only sort by either "key" or "value"' end
  return sorted(filters.items(v), folded(function(pair) return pair[by == "key" and 1 or 2] end,
    truth_argument(args, named, 1, "case_sensitive", false)), truth_argument(args, named, 3, "reverse", false))
end

function filters.unique(v, args, named)
  local key = folded(picker(argument(args, named, 2, "attribute")),
    truth_argument(args, named, 1, "case_sensitive", false))
  local seen, all = values.dict(), {}
  for _, item in ipairs(values.items(v)) do
    local k = key(item)
    if values.get(seen, k) == nil then
      values.set(seen, k, true)
      all[#all + 1] = item
    end
  end
  return values.generator(all)
end

local function extreme(name, before)
  filters[name] = function(v, args, named)
    local key = folded(picker(argument(args, named, 2, "attribute")),
      truth_argument(args, named, 1, "case_sensitive", false))
    local best
    for _, item in ipairs(values.items(v)) do
      if best == nil or before(key(item), key(best)) then best = item end
    end
    return best == nil and values.undefined "No aggregated item, sequence was empty." or best
  end
end
extreme("min", function(a, b) return values.less(a, b) end)
extreme("max", function(a, b) return values.less(b, a) end)

function filters.sum(v, args, named)
  local pick, total = picker(argument(args, named, 1, "attribute")), argument(args, named, 2, "start", 0)
  for _, item in ipairs(values.items(v)) do total = operators["+"](total, pick(item)) end
  return total
end

function filters.map(v, args, named, scope)
  local all = {}
  if not values.truth(v) then return values.generator(all) end
  local fn
  if named.attribute ~= nil then
    local pick, default = picker(named.attribute), named.default
    fn = function(item)
      local found = pick(item)
      if default ~= nil and getmetatable(found) == values.Undefined then return default end
      return found
    end
  else
    local name = string_argument(args, {}, 1, "name") or raise "map requires a filter argument"
    local filter = filters[name] or raise("No filter named '%s'.", name)
    local rest = values.copied(args, 2)
    fn = function(item) return filter(item, rest, named, scope) end
  end
  for i, item in ipairs(values.items(v)) do
    text.charge(item)
    all[i] = fn(item)
  end
  return values.generator(all)
end

-- Returns one of four filters. If `wanted` is true, the filter is select, and reject otherwise. If `with_attribute` is
-- true, the filter is selectattr or rejectattr instead.
local function chooser(with_attribute, wanted)
  return function(v, args)
    local pick, first = picker(), 1
    if with_attribute then
      pick, first = picker(args[1] == nil and raise "Missing parameter for attribute name" or args[1]), 2
    end
    local test = values.truth
    if args[first] ~= nil then
      local name = string_argument(args, {}, first, "name", "None")
      local fn, rest = tests[name] or raise("No test named '%s'.", name), values.copied(args, first + 1)
      test = function(item) return fn(item, rest) end
    end
    local all = {}
    for _, item in ipairs(values.truth(v) and values.items(v) or {}) do
      text.work(1)
      if test(pick(item)) == wanted then all[#all + 1] = item end
    end
    return values.generator(all)
  end
end
filters.select, filters.reject = chooser(false, true), chooser(false, false)
filters.selectattr, filters.rejectattr = chooser(true, true), chooser(true, false)

function filters.groupby(v, args, named)
  local pick = picker(argument(args, named, 1, "attribute"))
  local groups = values.list {}
  for _, item in ipairs(sorted(values.items(v), folded(pick, false))) do
    local key, group = pick(item), groups[#groups]
    if not group or not values.equal(folded(pick, false)(group[2][1]), folded(pick, false)(item)) then
      groups[#groups + 1] = values.tuple { key, values.list { item } }
    else
      group[2][#group[2] + 1] = item
    end
  end
  return groups
end

function filters.batch(v, args, named)
  local n, fill = argument(args, named, 1, "linecount"), argument(args, named, 2, "fill_with", NONE)
  if type(n) ~= "number" or n < 1 then raise "batch needs a count of at least 1" end
  local all = values.generator {}
  for i, item in ipairs(values.items(v)) do
    if (i - 1) % n == 0 then all[#all + 1] = values.list {} end
    all[#all][(i - 1) % n + 1] = item
  end
  if fill ~= NONE and #all > 0 then for i = #all[#all] + 1, n do all[#all][i] = fill end end
  return all
end

function filters.abs(v)
  local x, float = values.number(v)
  if not x then raise("bad operand type for abs(): '%s'", values.kind(values.defined(v))) end
  return float and values.float(math.abs(x)) or math.abs(x)
end

function filters.int(v, args, named)
  local default, base = argument(args, named, 1, "default", 0), whole_argument(args, named, 2, "base", 10)
  if base ~= 0 and (base < 2 or base > 36) then return default end
  local x = values.number(v)
  if not x and text.is(v) then
    local s = text.flat(text.strip(v, nil, true, true))
    x = base == 10 and s:find "^[-+]?%d+$" and tonumber((s:gsub("^%+", ""))) or base ~= 10 and tonumber(s, base)
      or s:find "^[-+]?[%d.]+[eE]?[-+]?%d*$" and tonumber(s) or nil
  end
  if not x or x ~= x or math.abs(x) == math.huge then return default end
  return x < 0 and math.ceil(x) or math.floor(x)
end

function filters.float(v, args, named)
  local x = values.number(v)
  if not x and text.is(v) then x = tonumber(text.flat(text.strip(v, nil, true, true))) end
  if not x then return argument(args, named, 1, "default", values.float(0)) end
  return values.float(x)
end

function filters.round(v, args, named)
  local x = values.number(v) or raise("type %s doesn't define __round__ method", values.kind(values.defined(v)))
  local digits = whole_argument(args, named, 1, "precision", 0)
  local method = string_argument(args, named, 2, "method", "common")
  if math.abs(digits) > 300 then raise("round: a precision of %d; the limit is 300", digits) end
  local scale = 10 ^ digits
  if method == "ceil" then return values.float(math.ceil(x * scale) / scale) end
  if method == "floor" then return values.float(math.floor(x * scale) / scale) end
  if method ~= "common" then raise "method must be common, ceil or floor" end
  if digits < 0 then return values.float(math.floor(x * scale + 0.5) / scale) end
  return values.float(tonumber(("%." .. math.min(digits, 99) .. "f"):format(x)))
end

function filters.format(v, args, named)
  if next(named) then values.refuse "the filter format with named values" end
  return format.percent(values.str(v), values.tuple(args))
end

function filters.center(v, args, named)
  return format.padded(values.str(v), whole_argument(args, named, 1, "width", 80), "^", " ")
end

function filters.wordcount(v)
  local _, n = text.flat(values.str(v)):gsub("[%w_\128-\255]+", "")
  return n
end

function filters.escape(v) return text.markup(text.escaped(values.str(v))) end
filters.e = filters.escape

function filters.attr(v, args)
  return attributes.attribute(v, string_argument(args, {}, 1, "name") or raise "attr needs a name")
end

-- Filters that treat Markup like other strings. The filters that are not in this table would have to return Markup for
-- Markup, which is not supported. Therefore these filters raise an error for Markup.
local PLAIN = { safe = true, string = true, length = true, count = true, tojson = true, default = true, d = true,
  escape = true, e = true }
for name, filter in pairs(filters) do
  if not PLAIN[name] then
    filters[name] = function(v, args, named, scope)
      if text.is_markup(v) then
        values.refuse("the filter %s over a string of the filter safe", name)
      end
      return filter(v, args, named, scope)
    end
  end
end

return filters
