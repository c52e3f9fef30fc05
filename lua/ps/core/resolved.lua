-- SPDX-License-Identifier: BSD-3-Clause
-- Resolves paths of folders that may not exist yet.
local lfs = require "lfs"
local stdlib = require "posix.stdlib"

--- Returns the absolute path that a path will have after its missing folders have been created. Links, "." and ".." are
--- resolved. For example, `model/new/..` is `model` even before `new` exists, although the operating system cannot find
--- such a path.
---@param path string
---@return string
local function resolved(path)
  local at = path:sub(1, 1) == "/" and "" or stdlib.realpath(lfs.currentdir())
  for part in path:gmatch "[^/]+" do
    if part == ".." then at = at:match "^(.*)/[^/]*$" or ""
    elseif part ~= "." then
      at = (at == "/" and "" or at) .. "/" .. part
      at = stdlib.realpath(at) or at
    end
  end
  return at == "" and "/" or at
end

return resolved
