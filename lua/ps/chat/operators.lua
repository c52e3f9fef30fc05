-- SPDX-License-Identifier: BSD-3-Clause
-- Python's operators for the values of a chat template. operators["+"](a, b) returns a + b.
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local format = require "ps.chat.format"
local raise, number, kind = values.raise, values.number, values.kind

local operators = {}

local LARGEST = 2 ^ 53

-- Converts the result of an arithmetic operator to a template value: a float if `is_float` is true, and otherwise a
-- whole number.
local function result(x, is_float)
  if is_float then return values.float(x) end
  if math.abs(x) > LARGEST then values.refuse "a whole number over 2^53" end
  return x == 0 and 0 or x
end

local function unsupported(op, a, b)
  values.defined(a)
  values.defined(b)
  return raise("unsupported operand type(s) for %s: '%s' and '%s'", op, kind(a), kind(b))
end

-- Creates a binary operator for numbers.
local function arithmetic(op, fn)
  return function(a, b)
    local x, xf = number(a)
    local y, yf = number(b)
    if not (x and y) then return unsupported(op, a, b) end
    return fn(x, y, xf or yf)
  end
end

local function divisor(y)
  if y == 0 then raise "division by zero" end
  return y
end

local add = arithmetic("+", function(x, y, float) return result(x + y, float) end)
operators["+"] = function(a, b)
  if text.is(a) then
    if not text.is(b) then
      raise('can only concatenate str (not "%s") to str', kind(values.defined(b)))
    end
    if text.is_markup(a) or text.is_markup(b) then
      return text.markup(text.concat { text.escaped(a), text.escaped(b) })
    end
    return text.concat { a, b }
  end
  local class = getmetatable(a)
  if (class == values.List or class == values.Tuple) and getmetatable(b) == class then
    if #a + #b > 1e6 then raise("a list of %.0f items: the limit is 1000000", #a + #b) end
    local all = {}
    for i = 1, #a do all[i] = a[i] end
    for i = 1, #b do all[#a + i] = b[i] end
    return setmetatable(all, class)
  end
  return add(a, b)
end

operators["-"] = arithmetic("-", function(x, y, float) return result(x - y, float) end)

local multiply = arithmetic("*", function(x, y, float) return result(x * y, float) end)
operators["*"] = function(a, b)
  if type(a) == "number" and (text.is(b) or getmetatable(b) == values.List) then a, b = b, a end
  if text.is(a) and type(b) == "number" then
    if text.is_markup(a) then values.refuse "a repeated string of the filter safe" end
    b = math.max(b, 0)
    if #text.flat(a) * b > text.LARGEST then
      raise("bytes of a string: %.0f; the limit is %d", #text.flat(a) * b, text.LARGEST)
    end
    return text.rep(a, b)
  end
  if getmetatable(a) == values.List and type(b) == "number" then
    if #a * b > 1e6 then raise("a list of %.0f items: the limit is 1000000", #a * b) end
    local all = {}
    for _ = 1, b do for _, item in ipairs(a) do all[#all + 1] = item end end
    return values.list(all)
  end
  return multiply(a, b)
end

operators["/"] = arithmetic("/", function(x, y) return values.float(x / divisor(y)) end)
operators["//"] = arithmetic("//", function(x, y, float) return result(math.floor(x / divisor(y)), float) end)
operators["**"] = arithmetic("**", function(x, y, float) return result(x ^ y, float or y < 0) end)

local modulo = arithmetic("%", function(x, y, float) return result(x % divisor(y), float) end)
operators["%"] = function(a, b)
  if text.is(a) then
    if text.is_markup(a) then values.refuse "% of a string of the filter safe" end
    return format.percent(a, b)
  end
  return modulo(a, b)
end

--- Implements the unary minus.
function operators.negative(v)
  local x, float = number(v)
  if not x then raise("bad operand type for unary -: '%s'", kind(values.defined(v))) end
  return result(-x, float)
end

--- Implements the unary plus.
function operators.positive(v)
  local x, float = number(v)
  if not x then raise("bad operand type for unary +: '%s'", kind(values.defined(v))) end
  return result(x, float)
end

operators["=="] = values.equal
operators["!="] = function(a, b) return not values.equal(a, b) end
operators["<"] = function(a, b) return values.less(a, b, "<") end
operators[">"] = function(a, b) return values.less(b, a, ">") end
operators["<="] = function(a, b) return values.equal(a, b) or values.less(a, b, "<=") end
operators[">="] = function(a, b) return values.equal(a, b) or values.less(b, a, ">=") end

operators["in"] = function(a, b)
  if text.is(b) then
    if not text.is(a) then raise("'in <string>' requires string as left operand, not %s", kind(a)) end
    return text.flat(b):find(text.flat(a), 1, true) ~= nil
  end
  local class = getmetatable(b)
  if class == values.Dict then return values.get(b, a) ~= nil end
  if class == values.List or class == values.Tuple or class == values.Iterator then
    for _, item in ipairs(b) do if values.equal(item, a) then return true end end
    return false
  end
  if class == values.Undefined then return false end
  return raise("argument of type '%s' is not iterable", kind(b))
end
operators["not in"] = function(a, b) return not operators["in"](a, b) end

return operators
