-- SPDX-License-Identifier: BSD-3-Clause
-- Looks up attributes and items of the values in a chat template, like Jinja's sandbox. `a.b` returns the attribute b,
-- or the item "b" if a has no such attribute. `a["b"]` returns the item "b", or the attribute b if a has no such item.
-- Methods that would change a value raise an error.
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local methods = require "ps.chat.methods"
local raise = values.raise

local attributes = {}

---@class ps.chat.Loop the variable `loop`
---@field items any[]
---@field i integer number of the current iteration, counted from 1
local Loop = { kind = "loop" }
Loop.__index = Loop

--- Returns the variable `loop` for a loop over a list of items.
---@param items any[]
---@return ps.chat.Loop
function attributes.loop(items) return setmetatable({ items = items, i = 0 }, Loop) end

local LOOP = {
  index = function(loop) return loop.i end,
  index0 = function(loop) return loop.i - 1 end,
  revindex = function(loop) return #loop.items - loop.i + 1 end,
  revindex0 = function(loop) return #loop.items - loop.i end,
  first = function(loop) return loop.i == 1 end,
  last = function(loop) return loop.i == #loop.items end,
  length = function(loop) return #loop.items end,
  depth = function() return 1 end,
  depth0 = function() return 0 end,
  previtem = function(loop) return loop.items[loop.i - 1] or values.undefined "there is no previous item" end,
  nextitem = function(loop) return loop.items[loop.i + 1] or values.undefined "there is no next item" end,
  cycle = function(loop)
    return values.callable("loop.cycle", function(args)
      if #args == 0 then raise "no items for cycling given" end
      return args[(loop.i - 1) % #args + 1]
    end)
  end,
  changed = function(loop)
    return values.callable("loop.changed", function(args)
      local now, before = values.tuple(args), loop.before
      loop.before = now
      return not before or not values.equal(now, before)
    end)
  end,
}

-- Returns an attribute of a value, or nil if the value has no such attribute.
local function own(v, name)
  local class = getmetatable(v)
  if class == Loop then return LOOP[name] and LOOP[name](v) end
  if class == values.Namespace then return v.map[name] end
  local set = text.is(v) and methods.str or class == values.Dict and methods.dict
    or (class == values.List or class == values.Tuple) and methods.list
  local method = set and set[name]
  if not method then return nil end
  if text.is_markup(v) then values.refuse("the method %s of a string of the filter safe", name) end
  local bound = values.callable("method '" .. name .. "'", function(args, named) return method(v, args, named) end)
  bound.of = v
  return bound
end

-- Returns the item of a dict or a list that has the given key, or nil if there is no such item.
local function held(v, key)
  local class = getmetatable(v)
  if class == values.Dict then return values.get(v, key) end
  local x, is_float = values.number(key)
  if not x or is_float then return nil end
  if class == values.List or class == values.Tuple then
    return v[x < 0 and #v + x + 1 or x + 1]
  elseif text.is(v) then
    local n = text.length(v)
    if x < 0 then x = n + x end
    if x < 0 or x >= n then return nil end
    return text.slice(v, x, x + 1, 1)
  end
end

local NAMES = { str = "str object", dict = "dict object", list = "list object", tuple = "tuple object",
  int = "int object", float = "float object", bool = "bool object", NoneType = "None" }

-- Returns an undefined value for the missing attribute `name` of `v`. Using the undefined value raises an error. If `v`
-- is a message, the error contains the message's number.
local function missing(v, name)
  local what = NAMES[values.kind(v)] or values.kind(v) .. " object"
  local said = ("'%s' has no attribute '%s'"):format(what, name)
  local message = getmetatable(v) == values.Dict and v.message
  if message and v.nulls and v.nulls[name] then
    local advice = name == "content" and "a text: write \"\" instead of null" or "it: give it a value"
    return values.undefined(("messages[%d].%s is null, but the template needs %s"):format(message, name, advice))
  end
  return values.undefined(message and ("%s (messages[%d])"):format(said, message) or said)
end

--- Returns `v.name`.
---@param v any
---@param name string
---@return any
function attributes.attribute(v, name)
  values.defined(v)
  local found = own(v, name)
  if found == nil and getmetatable(v) == values.Dict then found = values.get(v, name) end
  if found == nil then return missing(v, name) end
  return found
end

--- Returns `v[key]`.
---@param v any
---@param key any
---@return any
function attributes.item(v, key)
  values.defined(v)
  if getmetatable(key) == values.Undefined then return missing(v, "Undefined") end
  local found = held(v, key)
  if found == nil and text.is(key) then found = own(v, text.flat(key)) end
  if found == nil then return missing(v, text.flat(values.str(key))) end
  return found
end

-- Returns a bound of a slice as a Lua number, or nil for None. Raises an error for any other value.
local function bound(v)
  if v == values.NONE then return nil end
  local x, is_float = values.number(v)
  if not x or is_float then
    raise "slice indices must be integers or None or have an __index__ method"
  end
  return x
end

--- Returns `v[first:last:step]` by Python's rules for slices.
---@param v any
---@param first any
---@param last any
---@param step any
---@return any
function attributes.slice(v, first, last, step)
  values.defined(v)
  local class = getmetatable(v)
  local listed = class == values.List or class == values.Tuple
  if not listed and not text.is(v) then return missing(v, "slice") end
  local n = values.length(v)
  first, last, step = bound(first), bound(last), bound(step) or 1
  if step == 0 then raise "slice step cannot be zero" end
  local low, high = step > 0 and 0 or -1, step > 0 and n or n - 1
  local function clipped(x, default)
    if not x then return default end
    if x < 0 then x = x + n end
    return math.max(low, math.min(high, x))
  end
  first = clipped(first, step > 0 and 0 or n - 1)
  last = clipped(last, step > 0 and n or -1)
  if text.is(v) then return text.slice(v, first, last, step) end
  local items = {}
  for i = first, last + (step > 0 and -1 or 1), step do items[#items + 1] = v[i + 1] end
  return setmetatable(items, class)
end

return attributes
