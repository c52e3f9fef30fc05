-- SPDX-License-Identifier: BSD-3-Clause
-- Identifies files and folders whatever paths name them.
local lfs = require "lfs"

--- Returns a text that is the same for all paths of a file or folder, also for links to it. Returns nil if there is no
--- such file or folder.
---@param path string
---@return string?
return function(path)
  local at = lfs.attributes(path)
  return at and ("%d:%d"):format(at.dev, at.ino)
end
