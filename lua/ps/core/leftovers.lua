-- SPDX-License-Identifier: BSD-3-Clause
-- Removes the temporary files NAME.tmp-PID-NUMBER that killed processes left. A process that runs removes its own
-- (src/io/file.c).
local native = require "ps.core.ffi"
local lfs = require "lfs"

local leftovers = {}

-- A process may run on another machine that shares the folder. Its file counts as in use if it was written recently.
local WRITING_S = 60

--- Removes temporary files of processes that do not exist.
---@param folder string
---@param pattern string Lua's pattern for NAME
---@param age_s? number the smallest age of files to remove, in seconds since they were last written (default 60)
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

--- Removes the temporary files that killed processes left while they wrote a file. If the path is a link, they are next
--- to the file to which it leads.
---@param path string the file
function leftovers.of(path)
  native.check(native.C.ps_file_target(path, target, native.ffi.sizeof(target)))
  path = native.ffi.string(target)
  local folder, name = path:match "^(.*/)([^/]+)$"
  leftovers.remove(folder or ".", ((name or path):gsub("%p", "%%%0")))
end

return leftovers
