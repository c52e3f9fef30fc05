-- SPDX-License-Identifier: BSD-3-Clause
-- Reads whole files. file:read "*a" returns nil if the disk fails, so its callers must look at its second result.

--- Returns the bytes of a file. Otherwise returns nil, the reason with the path, and true if there is no such file.
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
