-- SPDX-License-Identifier: BSD-3-Clause
-- Copies a table one level deep. { unpack(t) } could copy at most about 7,990 elements, because Lua's stack is limited.

--- Returns a new table with the same fields.
---@generic T: table
---@param t T
---@return T
return function(t)
  local copy = {}
  for key, value in pairs(t) do copy[key] = value end
  return copy
end
