-- SPDX-License-Identifier: BSD-3-Clause
-- The types of configuration values. A type describes its values in words, for errors and for docs/config.md.
-- take(value) returns true and the value in the form that the engine needs. If the value does not have the type, take
-- returns false.
local types = {}

---@class ps.config.Type
---@field text string the expected values, as in "expected <text>"
---@field auto? boolean whether "auto" is a value of its own; otherwise "auto" means the default
---@field least? number smallest value of a whole number, or -math.huge if there is no smallest value
---@field take fun(value: any): boolean, any

---@return ps.config.Type
local function new(text, take, auto) return { text = text, take = take, auto = auto } end

--- Returns whether a value is a number, and neither NaN nor infinite.
---@param value any
---@return boolean
function types.finite(value) return type(value) == "number" and value == value and math.abs(value) ~= math.huge end
local finite = types.finite

local function bounds(noun, min, max)
  if min and max then return ("%s from %.10g to %.10g"):format(noun, min, max) end
  if min then return ("%s of at least %s"):format(noun, min) end
  if max then return ("%s of at most %s"):format(noun, max) end
  return noun
end

types.boolean = new("true or false", function(value) return type(value) == "boolean", value end)
types.string = new("a string", function(value) return type(value) == "string", value end)
types.path = new("a path", function(value) return type(value) == "string" and value ~= "", value end)
types.tree = new("a table", function(value) return type(value) == "table", value end)
types.callable = new("a function", function(value)
  if type(value) == "function" then return true, value end
  if type(value) ~= "table" or #value == 0 then return false end
  for _, each in ipairs(value) do if type(each) ~= "function" then return false end end
  return true, value
end)
types.any = new("any value", function(value) return true, value end)
types.list = new("a list", function(value)
  return type(value) == "table" and (next(value) == nil or #value > 0), value
end)

--- Accepts a whole number.
---@param min? number
---@param max? number
---@return ps.config.Type
function types.integer(min, max)
  local made = new(bounds("a whole number", min, max), function(value)
    return finite(value) and value == math.floor(value) and value >= (min or value) and value <= (max or value), value
  end)
  made.least = not max and (min or -math.huge) or nil
  return made
end

--- The largest number up to which doubles represent every whole number. Doubles are the numbers of JSON and Lua.
types.MOST = 2 ^ 53 - 1

--- Largest number of micro-batches in an optimizer step. A step is planned as a whole, so each micro-batch makes the
--- plan longer.
types.MICRO_BATCHES = 4096

--- Accepts a finite number.
---@param min? number
---@param max? number
---@return ps.config.Type
function types.number(min, max)
  return new(bounds("a number", min, max), function(value)
    return finite(value) and value >= (min or value) and value <= (max or value), value
  end)
end

types.above_zero = new("a number above 0", function(value) return finite(value) and value > 0, value end)
types.fp32 = new("a number of at least 0 that fp32 holds", function(value)
  return finite(value) and value >= 0 and value < 2 ^ 127, value
end)
--- Accepts a maximum norm for clipping gradients. If it is infinite, gradients are measured but not clipped.
types.norm = new("a number of at least 0", function(value) return type(value) == "number" and value >= 0, value end)
types.scale = new("a number above 0, up to 2^127", function(value)
  return finite(value) and value > 0 and value <= 2 ^ 127, value
end)
types.ratio = types.number(0, 1)
types.below_one = new("a number of at least 0 and below 1", function(value)
  return finite(value) and value >= 0 and value < 1, value
end)
types.share = new("a number above 0, up to 1", function(value)
  return finite(value) and value > 0 and value <= 1, value
end)
types.betas = new("a list of two numbers, each at least 0 and below 1", function(value)
  if type(value) ~= "table" or #value ~= 2 then return false end
  for _, beta in ipairs(value) do
    if not finite(beta) or beta < 0 or beta >= 1 then return false end
  end
  return true, { value[1], value[2] }
end)

--- Accepts a list of n finite numbers.
---@param n integer
---@return ps.config.Type
function types.numbers(n)
  return new(("a list of %d numbers"):format(n), function(value)
    if type(value) ~= "table" or #value ~= n then return false end
    for _, number in ipairs(value) do if not finite(number) then return false end end
    return true, { unpack(value) }
  end)
end

--- The accepted ranges of an optimizer's settings, in configurations, scripts and groups of parameters. With values
--- outside these ranges, an update would increase the loss or produce NaN.
types.OPTIMIZER = { lr = types.fp32, betas = types.betas, eps = types.fp32, weight_decay = types.fp32,
  momentum = types.fp32, dampening = types.fp32, max_norm = types.norm }

--- Accepts one of several words.
---@param words string "none|cpu|nvme"
---@return ps.config.Type
function types.enum(words)
  local known, quoted = {}, {}
  for word in words:gmatch("[^|]+") do
    known[word] = true
    quoted[#quoted + 1] = ('"%s"'):format(word)
  end
  local text = table.concat(quoted, ", ", 1, #quoted - 1) .. (#quoted > 1 and " or " or "") .. quoted[#quoted]
  return new(text, function(value) return known[value] == true, value end, known.auto)
end

--- Accepts a value of one of two types.
---@param a ps.config.Type
---@param b ps.config.Type
---@return ps.config.Type
function types.either(a, b)
  return new(a.text .. ", or " .. b.text, function(value)
    local ok, taken = a.take(value)
    if ok then return true, taken end
    return b.take(value)
  end, a.auto or b.auto)
end

local DTYPES = {
  fp32 = "fp32", float32 = "fp32", float = "fp32", fp16 = "fp16", float16 = "fp16", half = "fp16",
  bf16 = "bf16", bfloat16 = "bf16",
}
types.dtype = new('"fp32", "bf16" or "fp16"', function(value)
  return type(value) == "string" and DTYPES[value] ~= nil, DTYPES[value]
end)

local UNITS = { [""] = 1, b = 1 }
for power, letter in ipairs { "k", "m", "g", "t" } do
  UNITS[letter .. "b"] = 1000 ^ power
  UNITS[letter .. "ib"] = 1024 ^ power
end

-- Returns the number of bytes for a text such as "8GiB". Returns nil for any other text.
local function bytes_of(text)
  local digits, unit = text:match("^%s*([%d%.]+)%s*(%a*)%s*$")
  local factor, number = digits and UNITS[unit:lower()], digits and tonumber(digits)
  return factor and number and math.floor(number * factor)
end

--- Accepts a number of bytes above 0. It may be a number or a text with a unit.
types.bytes = new('bytes above 0: a number, or text such as "8GiB" or "500MB" (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)',
  function(value)
    if type(value) == "string" then value = bytes_of(value) end
    return finite(value) and value >= 1 and value <= types.MOST and value == math.floor(value), value
  end)

--- Accepts a number of bytes, or a share of the available memory. A share such as "80%" becomes { share = 0.8 }.
types.budget = new(types.bytes.text .. ', or a share such as "80%"', function(value)
  local percent = type(value) == "string" and tonumber(value:match("^%s*([%d%.]+)%s*%%%s*$") or "")
  if percent then return percent > 0 and percent <= 100, { share = percent / 100 } end
  return types.bytes.take(value)
end)

return types
