-- SPDX-License-Identifier: BSD-3-Clause
-- Removes the byte order mark that some editors write before UTF-8 text.

local MARK = "\239\187\191"

--- Returns a text without a leading byte order mark.
---@param text string
---@return string
return function(text)
  if text:sub(1, #MARK) == MARK then return text:sub(#MARK + 1) end
  return text
end
