-- SPDX-License-Identifier: BSD-3-Clause
-- Reads whole files. If the disk fails, file:read "*a" returns nil and the reason, so each caller must check for nil.

--- Returns the contents of a file. On failure, returns nil, the reason with the path, and whether the file is missing.
---@param path string
---@return string? text
---@return string? why
---@return boolean? absent
return function(path)
  local file, why, code = io.open(path, "rb")
  if not file then return nil, why, code == 2 end          -- ENOENT
  local text, problem = file:read "*a"
  file:close()
  if not text then return nil, path .. ": " .. problem end
  return text
end
