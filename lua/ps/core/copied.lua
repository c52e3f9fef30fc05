-- SPDX-License-Identifier: BSD-3-Clause
-- Copies of tables, one level deep. { unpack(t) } copies at most some 7,990 elements, as many as the stack takes.

--- A table with the same fields.
---@generic T: table
---@param t T
---@return T
return function(t)
  local copy = {}
  for key, value in pairs(t) do copy[key] = value end
  return copy
end
