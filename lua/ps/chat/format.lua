-- SPDX-License-Identifier: BSD-3-Clause
-- Implements Python's two ways to format values: "%s" % value and "{}".format(value).
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local raise = values.raise

local format = {}

local WIDEST = 10000                                       -- maximum width of a field

-- Pads a text with `fill` to the width of a field.
local function padded(piece, width, align, fill)
  if width > WIDEST then raise("a field of %d characters: the limit is %d", width, WIDEST) end
  local missing = width - text.length(piece)
  if missing <= 0 then return piece end
  local left = align == "<" and 0 or align == ">" and missing or math.floor(missing / 2)
  return text.concat { text.rep(fill, left), piece, text.rep(fill, missing - left) }
end
format.padded = padded

-- Formats a number by a conversion of C's printf, such as d, x, X, o, e, f or g.
local function converted(v, conversion, flags, precision)
  local x, is_float = values.number(v)
  if not x then raise("a number is required for format '%s', not %s", conversion, values.kind(v)) end
  if conversion == "d" or conversion == "i" or conversion == "u" then
    if is_float then x = x < 0 and math.ceil(x) or math.floor(x) end
    return (("%" .. flags .. "d"):format(x))
  end
  if conversion:find "[xXo]" then
    if is_float then raise("%%%s format: an integer is required, not float", conversion) end
    return ("%" .. flags .. conversion):format(x)
  end
  return ("%" .. flags .. "." .. (precision or 6) .. conversion):format(x)
end

--- Implements Python's operator % for strings: returns pattern % value.
---@param pattern string|ps.chat.Text
---@param value any one value, a tuple of values, or a dict of named values
---@return string|ps.chat.Text
function format.percent(pattern, value)
  local s, pieces, at, used = text.flat(pattern), {}, 1, 0
  local tuple = getmetatable(value) == values.Tuple
  local dict = getmetatable(value) == values.Dict
  local function argument()
    used = used + 1
    if tuple then return value[used] or raise "not enough arguments for format string" end
    if used > 1 then raise "not enough arguments for format string" end
    return value
  end
  while true do
    local first = s:find("%", at, true)
    if not first then break end
    pieces[#pieces + 1] = text.sub(pattern, at, first - 1)
    local name, flags, width, precision, conversion, after = s:match(
      "^%%(%b())([-+ 0#]*)(%d*)%.?(%d*)([%a%%])()", first)
    if not name then
      flags, width, precision, conversion, after = s:match("^%%([-+ 0#]*)(%d*)%.?(%d*)([%a%%])()", first)
    end
    if not conversion then raise "incomplete format" end
    if conversion == "%" then pieces[#pieces + 1] = "%"
    else
      local v
      if name then
        if not dict then raise "format requires a mapping" end
        v = values.get(value, name:sub(2, -2))
        if v == nil then raise("KeyError: '%s'", name:sub(2, -2)) end
      else
        v = argument()
      end
      local piece
      if conversion == "s" or conversion == "r" then
        piece = conversion == "s" and values.str(v) or values.repr(v)
        if precision ~= "" then piece = text.slice(piece, 0, math.min(tonumber(precision), text.length(piece)), 1) end
        flags = flags:gsub("0", "")
      elseif conversion:find "[diuxXoeEfFgG]" then
        local sign = flags:gsub("[-0]", "")
        piece = converted(v, conversion, sign, precision ~= "" and precision or nil)
      else
        raise("unsupported format character '%s'", conversion)
      end
      local wide = tonumber(width) or 0
      if flags:find("0", 1, true) and not flags:find("-", 1, true) then
        local n = #text.flat(piece):match "^[-+ ]?"
        piece = text.concat { text.sub(piece, 1, n),
          padded(text.sub(piece, n + 1, #text.flat(piece)), math.max(wide - n, 0), ">", "0") }
      else
        piece = padded(piece, wide, flags:find("-", 1, true) and "<" or ">", " ")
      end
      pieces[#pieces + 1] = piece
    end
    at = after
  end
  pieces[#pieces + 1] = text.sub(pattern, at, #s)
  if tuple and used < #value or not tuple and not dict and used == 0 then
    raise "not all arguments converted during string formatting"
  end
  return text.concat(pieces)
end

-- Inserts a separator between groups of three digits.
local function grouped(digits, separator)
  local whole, rest = digits:match "^([-+ ]?%d+)(.*)$"
  local n
  repeat whole, n = whole:gsub("^([-+ ]?%d+)(%d%d%d)", "%1" .. separator .. "%2") until n == 0
  return whole .. rest
end

-- Formats a value. `spec` is the text after the colon in a field, such as ">8.2f" in "{:>8.2f}".
local function specified(v, spec)
  if spec == "" then return values.str(v) end
  local fill, align, rest = spec:match "^([^\128-\191][\128-\191]*)([<>^=])(.*)$"
  if not fill then fill, align, rest = " ", spec:match "^([<>^=]?)(.*)$" end
  local sign, alternate, zero, width, separator, dot, precision, conversion = rest:match(
    "^([-+ ]?)(#?)(0?)(%d*)([,_]?)(%.?)(%d*)(%a?%%?)$")
  if not sign or alternate ~= "" then values.refuse("the format '%s'", spec) end
  local piece
  if values.number(v) and type(v) ~= "boolean" and conversion ~= "s" then
    local x, is_float = values.number(v)
    local flags = sign == "-" and "" or sign
    if conversion == "%" then
      piece = converted(values.float(x * 100), "f", flags, dot ~= "" and precision or nil) .. "%"
    elseif conversion == "" and dot == "" then piece = (flags ~= "" and x >= 0 and flags or "") .. values.str(v)
    elseif conversion == "" or conversion == "n" then piece = converted(v, is_float and "g" or "d", flags, precision)
    else piece = converted(v, conversion, flags, dot ~= "" and precision or nil) end
    if separator ~= "" then piece = grouped(piece, separator) end
    if zero ~= "" and align == "" then fill, align = "0", "=" end
    if align == "=" then
      local mark, digits = piece:match "^([-+ ]?)(.*)$"
      return mark .. text.flat(padded(digits, (tonumber(width) or 0) - #mark, ">", fill))
    end
    if align == "" then align = ">" end
  else
    if conversion ~= "" and conversion ~= "s" or sign ~= "" or separator ~= "" then
      raise("Unknown format code '%s' for object of type '%s'", conversion, values.kind(v))
    end
    piece = values.str(v)
    if dot ~= "" then piece = text.slice(piece, 0, math.min(tonumber(precision), text.length(piece)), 1) end
    if align == "" then align = "<" end
  end
  return padded(piece, tonumber(width) or 0, align, fill)
end

--- Implements Python's str.format. A field may be a number ("{0}"), a name ("{x}") or empty ("{}"). A field with an
--- attribute ("{x.y}") or a subscript ("{x[0]}") raises an error.
---@param pattern string|ps.chat.Text
---@param args any[]
---@param named table<string, any>
---@return string|ps.chat.Text
function format.braces(pattern, args, named)
  local s, pieces, at, auto, numbered = text.flat(pattern), {}, 1, 0, false
  while true do
    local first = s:find("[{}]", at)
    if not first then break end
    pieces[#pieces + 1] = text.sub(pattern, at, first - 1)
    local c = s:sub(first, first)
    if s:sub(first + 1, first + 1) == c then
      pieces[#pieces + 1], at = c, first + 2
    else
      if c == "}" then raise "Single '}' encountered in format string" end
      local field, conversion, spec, after = s:match("^{([^{}!:]*)!?(%a?):?([^{}]*)}()", first)
      if not field then raise "expected '}' before end of string" end
      local v
      numbered = numbered or field:find "^%d+$" ~= nil
      if numbered and (field == "" or auto > 0) then
        raise "cannot switch between automatic field numbering and manual field specification"
      end
      if field == "" then
        auto = auto + 1
        v = args[auto]
        if v == nil then raise("Replacement index %d out of range for positional args tuple", auto - 1) end
      elseif field:find "^%d+$" then
        v = args[tonumber(field) + 1]
        if v == nil then raise("Replacement index %s out of range for positional args tuple", field) end
      elseif field:find "^[%a_][%w_]*$" then
        v = named[field]
        if v == nil then raise("KeyError: '%s'", field) end
      else
        values.refuse("the field '{%s}' of str.format", field)
      end
      if conversion == "r" then v = values.repr(v) elseif conversion == "s" then v = values.str(v) end
      pieces[#pieces + 1], at = specified(v, spec), after
    end
  end
  pieces[#pieces + 1] = text.sub(pattern, at, #s)
  return text.concat(pieces)
end

--- Implements Python's datetime.strftime.
---@param pattern string
---@param when integer the time in seconds since 1970 (see chat.moment); it is formatted in local time, as by os.date
---@return string
function format.date(pattern, when)
  return (pattern:gsub("%%(-?)(%a)", function(bare, c)
    if not ("aAbBcdHIjmMpSUwWxXyYZeFTDRhntGVu"):find(c, 1, true) then
      values.refuse("strftime_now: the conversion '%%%s'", c)
    end
    local piece = os.date("%" .. c, when)
    return bare == "-" and piece:gsub("^0+(.)", "%1") or piece
  end))
end

return format
