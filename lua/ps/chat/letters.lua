-- SPDX-License-Identifier: BSD-3-Clause
-- Converts strings to upper and lower case and classifies characters, by the rules of Python's string methods. All
-- scripts of Unicode are supported.
local text = require "ps.chat.text"
local characters = require "ps.chat.characters"

local letters = {}

local CHARACTER, utf8, category = characters.PATTERN, characters.utf8, characters.category

-- Characters whose upper-case form consists of several characters. Each row lists the code point of a character,
-- followed by the code points of its upper-case form.
local LONG = {}
for _, row in ipairs { { 0xdf, 0x53, 0x53 }, { 0x149, 0x2bc, 0x4e }, { 0x1f0, 0x4a, 0x30c }, { 0x390, 0x3aa, 0x301 },
  { 0x3b0, 0x3ab, 0x301 }, { 0x587, 0x535, 0x552 }, { 0xfb00, 0x46, 0x46 }, { 0xfb01, 0x46, 0x49 },
  { 0xfb02, 0x46, 0x4c }, { 0xfb03, 0x46, 0x46, 0x49 }, { 0xfb04, 0x46, 0x46, 0x4c }, { 0xfb05, 0x53, 0x54 },
  { 0xfb06, 0x53, 0x54 } } do
  local capitals = {}
  for i = 2, #row do capitals[i - 1] = utf8(row[i]) end
  LONG[utf8(row[1])] = table.concat(capitals)
end
local LONG_I = utf8(0x130)                            -- its lower-case form has two characters: i and a dot above
local SIGMA, SMALL_SIGMA, LAST_SIGMA = utf8(0x3a3), utf8(0x3c3), utf8(0x3c2)

local function upper_of(c) return LONG[c] or characters.upper(c) end
local function title_of(c)
  local long = LONG[c]
  if long then return (long:gsub("^(.)(.*)$", function(a, b) return a .. b:lower() end)) end
  return characters.title(c)
end
local function lower_of(c) return c == LONG_I and "i" .. utf8(0x307) or characters.lower(c) end

-- utf8proc's categories.
local UPPER, LOWER, TITLE, OTHER = 1, 2, 3, 5
local DECIMAL, NUMERAL, NUMBER = 9, 10, 11

---@param c string one character
---@return boolean
function letters.is_letter(c)
  local k = category(c)
  return k >= UPPER and k <= OTHER
end
---@param c string one character
---@return boolean
function letters.is_decimal(c) return category(c) == DECIMAL end
---@param c string one character
---@return boolean
function letters.is_number(c)
  local k = category(c)
  return k == DECIMAL or k == NUMERAL or k == NUMBER
end
---@param c string one character
---@return boolean
function letters.is_upper(c) return category(c) == UPPER end
---@param c string one character
---@return boolean
function letters.is_lower(c) return category(c) == LOWER end
---@param c string one character
---@return boolean
function letters.is_cased(c)
  local k = category(c)
  return k == UPPER or k == LOWER or k == TITLE
end

--- Implements Python's str.upper.
---@param v string|ps.chat.Text
---@return string|ps.chat.Text
function letters.upper(v)
  return text.map(v, function(s)
    if not s:find "[\128-\255]" then return s:upper() end
    return (s:gsub(CHARACTER, upper_of))
  end)
end

--- Implements Python's str.lower. A sigma at the end of a word becomes a final sigma.
---@param v string|ps.chat.Text
---@return string|ps.chat.Text
function letters.lower(v)
  return text.map(v, function(s)
    if not s:find "[\128-\255]" then return s:lower() end
    s = s:gsub("()(" .. CHARACTER .. ")", function(at, c)
      if c ~= SIGMA then return lower_of(c) end
      local before = s:sub(1, at - 1):match "([^\128-\191][\128-\191]*)$"
      local after = s:match("^" .. CHARACTER, at + #c)
      local ends = before and letters.is_letter(before) and not (after and letters.is_letter(after))
      return ends and LAST_SIGMA or SMALL_SIGMA
    end)
    return s
  end)
end

--- Implements Python's str.capitalize.
---@param v string|ps.chat.Text
---@return string|ps.chat.Text
function letters.capitalize(v)
  local first = text.flat(v):match("^" .. CHARACTER) or ""
  return text.concat { text.map(text.sub(v, 1, #first), function(s) return (s:gsub(CHARACTER, title_of)) end),
    letters.lower(text.sub(v, #first + 1, #text.flat(v))) }
end

--- Implements Python's str.title: capitalizes the first letter of each word. Each character that is neither an
--- upper-case nor a lower-case letter ends a word.
---@param v string|ps.chat.Text
---@return string|ps.chat.Text
function letters.title(v)
  local within = false
  return text.map(v, function(s)
    return (s:gsub(CHARACTER, function(c)
      local letter = letters.is_cased(c)
      local new = not letter and c or within and lower_of(c) or title_of(c)
      within = letter
      return new
    end))
  end)
end

--- Returns whether a string is not empty and all its characters pass a test.
---@param v string|ps.chat.Text
---@param passes fun(c: string): boolean
---@return boolean
function letters.all(v, passes)
  local s = text.flat(v)
  if s == "" then return false end
  for c in s:gmatch(CHARACTER) do if not passes(c) then return false end end
  return true
end

return letters
