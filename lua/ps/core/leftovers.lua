-- SPDX-License-Identifier: BSD-3-Clause
-- Removes temporary files that remained when processes were killed. Their names are NAME.tmp-PID-NUMBER. A process that
-- is not killed removes its own temporary files (src/io/file.c).
local native = require "ps.core.ffi"
local lfs = require "lfs"

local leftovers = {}

-- A process on another machine may share the folder. A temporary file of that process counts as in use if it was
-- written to in the last WRITING_S seconds.
local WRITING_S = 60

--- Removes the temporary files of processes that no longer exist.
---@param folder string
---@param pattern string Lua pattern for NAME
---@param age_s? number only files that were last written more than this number of seconds ago are removed (default 60)
function leftovers.remove(folder, pattern, age_s)
  if lfs.attributes(folder, "mode") ~= "directory" then return end
  for name in lfs.dir(folder) do
    local pid = name:match("^" .. pattern .. "%.tmp%-(%d+)%-%d+$")
    local path = folder .. "/" .. name
    local written = pid and lfs.attributes(path, "modification")
    if written and os.time() - written > (age_s or WRITING_S) and not lfs.attributes("/proc/" .. pid, "mode") then
      os.remove(path)
    end
  end
end

local target = native.ffi.new "char[4096]"

--- Removes the temporary files that killed processes left while they wrote the file `path`. If the path is a link, the
--- temporary files are next to the file that the link leads to.
---@param path string the file
function leftovers.of(path)
  native.check(native.C.ps_file_target(path, target, native.ffi.sizeof(target)))
  path = native.ffi.string(target)
  local folder, name = path:match "^(.*/)([^/]+)$"
  leftovers.remove(folder or ".", ((name or path):gsub("%p", "%%%0")))
end

return leftovers
