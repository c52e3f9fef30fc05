-- SPDX-License-Identifier: BSD-3-Clause
-- Validates UTF-8 text, which JSON, pickles and safetensors headers require.
local utf8 = {}

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

return utf8
