-- SPDX-License-Identifier: BSD-3-Clause
-- Writes whole files. On a full disk, file:write returns nil and the reason, and drops bytes; a later file:close can
-- then succeed. So both results must be checked.

--- Writes a text to a file, whose earlier contents are lost. On failure, returns nil, and the reason with the path.
---@param path string
---@param text string
---@return true? done
---@return string? why
return function(path, text)
  local file, why = io.open(path, "wb")
  if not file then return nil, why end
  local written, problem = file:write(text)
  local closed, late = file:close()
  if written and closed then return true end
  return nil, ("%s: %s"):format(path, problem or late)
end
