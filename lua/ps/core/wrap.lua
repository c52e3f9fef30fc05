-- SPDX-License-Identifier: BSD-3-Clause
-- Wraps texts to a width, for help at the prompt and for documents that tools write.

-- Returns whether a word at the beginning of a line would be read by Markdown as a list, a heading or a table.
local function is_sign(word) return word:find "^[-+*#>=|]+$" or word:find "^%d+[.)]$" end

--- Appends a text to a list of lines. The text is broken at blanks, so that lines have at most `width` columns. A word
--- longer than a line is not split.
---@param lines string[]
---@param text string
---@param width integer number of columns
---@param indent string prefix of each line
---@param first? string prefix of the first line, instead of `indent`
return function(lines, text, width, indent, first)
  local units = {}
  for word in text:gmatch "%S+" do
    if is_sign(word) and #units > 0 then units[#units] = units[#units] .. " " .. word else units[#units + 1] = word end
  end
  local line, empty = first or indent, true
  for _, unit in ipairs(units) do
    if not empty and #line + 1 + #unit > width then
      lines[#lines + 1] = line
      line, empty = indent, true
    end
    line, empty = line .. (empty and "" or " ") .. unit, false
  end
  if not empty then lines[#lines + 1] = line end
end
