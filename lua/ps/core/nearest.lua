-- SPDX-License-Identifier: BSD-3-Clause
-- Finds the known word closest to a misspelt word, by edit distance.
local nearest = {}

--- Returns the number of edits that turn one word into the other, ignoring case. An edit is an insertion, deletion or
--- replacement of a letter, or a swap of two adjacent letters.
---@param a string
---@param b string
---@return integer
function nearest.distance(a, b)
  a, b = a:lower(), b:lower()
  local before, row = nil, {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local now = { [0] = i }
    for j = 1, #b do
      local same = a:byte(i) == b:byte(j)
      now[j] = math.min(row[j] + 1, now[j - 1] + 1, row[j - 1] + (same and 0 or 1))
      if before and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        now[j] = math.min(now[j], before[j - 2] + 1)
      end
    end
    before, row = row, now
  end
  return row[#b]
end

--- Returns the word closest to `word`, or nil if none is close enough to be a typing mistake.
---@param word string
---@param words string[]
---@return string?
function nearest.find(word, words)
  local best, least = nil, #word < 5 and math.min(#word, 2) or math.max(2, math.floor(#word / 3)) + 1
  for _, candidate in ipairs(words) do
    local d = nearest.distance(word, candidate)
    if d < least and d < math.max(#word, #candidate) then best, least = candidate, d end
  end
  return best
end

return nearest
