-- SPDX-License-Identifier: BSD-3-Clause
-- Converts code points to UTF-8 and back, and finds their Unicode categories with the library utf8proc.
local ffi = require "ffi"

ffi.cdef [[
int32_t utf8proc_tolower(int32_t c);
int32_t utf8proc_toupper(int32_t c);
int32_t utf8proc_totitle(int32_t c);
int utf8proc_category(int32_t c);
]]
local C = ffi.C

local characters = {}

characters.PATTERN = "[^\128-\191][\128-\191]*"            -- matches one character of valid UTF-8

--- Returns the code point of a character.
---@param c string one character in valid UTF-8
---@return integer
function characters.point(c)
  local b1, b2, b3, b4 = c:byte(1, 4)
  if not b2 then return b1 end
  if not b3 then return (b1 - 192) * 64 + b2 - 128 end
  if not b4 then return (b1 - 224) * 4096 + (b2 - 128) * 64 + b3 - 128 end
  return (b1 - 240) * 262144 + (b2 - 128) * 4096 + (b3 - 128) * 64 + b4 - 128
end

--- Encodes a code point in UTF-8.
---@param c integer
---@return string
function characters.utf8(c)
  local char, floor = string.char, math.floor
  if c < 0x80 then return char(c) end
  if c < 0x800 then return char(0xc0 + floor(c / 64), 0x80 + c % 64) end
  if c < 0x10000 then return char(0xe0 + floor(c / 4096), 0x80 + floor(c / 64) % 64, 0x80 + c % 64) end
  return char(0xf0 + floor(c / 262144), 0x80 + floor(c / 4096) % 64, 0x80 + floor(c / 64) % 64, 0x80 + c % 64)
end

--- Returns the Unicode category of a character as a number of utf8proc: 1 Lu, 2 Ll, 3 Lt, 4 Lm, 5 Lo, 9 Nd, 10 Nl,
--- 11 No, 23 Zs, 24 Zl, 25 Zp, 26 Cc, 27 Cf, 28 Cs, 29 Co. The number 0 means that the code point is unassigned.
---@param c string
---@return integer
function characters.category(c) return C.utf8proc_category(characters.point(c)) end

--- Returns whether Python's repr prints a character without an escape sequence.
---@param c string
---@return boolean
function characters.is_printable(c)
  local k = characters.category(c)
  return c == " " or k > 0 and k < 23
end

---@param c string
---@return string
function characters.upper(c) return characters.utf8(C.utf8proc_toupper(characters.point(c))) end
---@param c string
---@return string
function characters.lower(c) return characters.utf8(C.utf8proc_tolower(characters.point(c))) end
---@param c string
---@return string
function characters.title(c) return characters.utf8(C.utf8proc_totitle(characters.point(c))) end

return characters
