-- SPDX-License-Identifier: BSD-3-Clause
-- The byte order mark that some editors write before UTF-8 text. Settings and vocabularies are read without the mark.

local MARK = "\239\187\191"

--- Returns a text without a byte order mark at its beginning.
---@param text string
---@return string
return function(text)
  if text:sub(1, #MARK) == MARK then return text:sub(#MARK + 1) end
  return text
end
