-- SPDX-License-Identifier: BSD-3-Clause
-- Validates UTF-8 text, which JSON, pickles and safetensors headers require.
local bit = require "bit"
local ffi = require "ffi"

local utf8 = {}
local bytes_of, words_of = ffi.typeof "const uint8_t *", ffi.typeof "const int32_t *"
local ASCII = bit.tobit(0x80808080)                        -- the bits that are 0 in four bytes of ASCII

--- Returns whether a text is valid UTF-8. Valid text has no stray or missing continuation byte, no overlong form, no
--- surrogate, and no code point above U+10FFFF.
---@param text string
---@return boolean
function utf8.valid(text)
  if not text:find("[\128-\255]") then return true end
  local at, n = 1, #text
  while at <= n do
    local a, b = text:byte(at, at + 1)
    local more = a < 128 and 0 or a >= 0xc2 and a <= 0xdf and 1 or a >= 0xe0 and a <= 0xef and 2
      or a >= 0xf0 and a <= 0xf4 and 3
    if not more or not text:find("^" .. ("[\128-\191]"):rep(more), at + 1) then return false end
    if (a == 0xe0 and b < 0xa0) or (a == 0xed and b > 0x9f) or (a == 0xf0 and b < 0x90) or (a == 0xf4 and b > 0x8f)
    then return false end
    at = at + 1 + more
  end
  return true
end

--- Returns a function that validates a text of any size, which it gets in pieces. A piece may end within a character.
--- The function returns the position of the first invalid character in the whole text, from 0. It returns nil if all
--- characters so far are valid. A call without a piece ends the text.
---@return fun(piece?: string): integer? at
function utf8.checker()
  local passed, begin = 0, 0                               -- bytes of earlier pieces; position of the last character
  local more, least, most = 0, 0x80, 0xbf                  -- bytes that its character lacks; range of the next byte
  return function(piece)
    if not piece then return more > 0 and begin or nil end
    local s, n, i = ffi.cast(bytes_of, piece), #piece, 0
    while i < n do
      local byte = s[i]
      if more > 0 then
        if byte < least or byte > most then return begin end
        more, least, most = more - 1, 0x80, 0xbf
        i = i + 1
      elseif byte < 0x80 then
        i = i + 1
        while i + 4 <= n and bit.band(ffi.cast(words_of, s + i)[0], ASCII) == 0 do i = i + 4 end
      else
        begin = passed + i
        if byte < 0xc2 or byte > 0xf4 then return begin end
        more = byte < 0xe0 and 1 or byte < 0xf0 and 2 or 3
        if byte == 0xe0 then least = 0xa0 elseif byte == 0xf0 then least = 0x90 end
        if byte == 0xed then most = 0x9f elseif byte == 0xf4 then most = 0x8f end
        i = i + 1
      end
    end
    passed = passed + n
  end
end

return utf8
