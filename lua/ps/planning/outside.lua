-- SPDX-License-Identifier: BSD-3-Clause
-- Protects the user's files from a dry run. When the script writes a file, the file is stored in a temporary folder.
-- The script can read the file under the original path (ps_file_divert). The temporary folder is removed after the run.
-- When the script makes a folder, the folder is recorded, but not made. The script can remove and rename only files
-- that it wrote, and it cannot start programs. This module is used only in the process of a dry run, which ends after
-- the run.
local ffi = require "ffi"
local fcntl = require "posix.fcntl"
local lfs = require "lfs"
local stat = require "posix.sys.stat"
local stdio = require "posix.stdio"
local stdlib = require "posix.stdlib"
local unistd = require "posix.unistd"
local caller = require "ps.core.caller"
local C = require "ps.core.declared"

local outside = {}

local COPIED = 2 ^ 20                      -- number of bytes per read when fill() copies a file
local there = ffi.new "char[4096]"         -- buffer for a path

local function nothing() return true end
local function zero() return 0 end

-- Returns the actual path of a file. If the script has written the file (or is going to, if `writes` is true), the
-- actual path is in the temporary folder. Otherwise it is `path`. The second result is true if the actual path is in
-- the temporary folder.
local function at(path, writes)
  if type(path) ~= "string" then return path, false end
  local moved = C.ps_file_diverted(path, writes and 1 or 0, there, ffi.sizeof(there))
  if moved <= 0 then return path, false end
  return ffi.string(there), true
end

-- Copies the user's file `path` to the temporary file `own`, before the script appends to the file or modifies it.
local function fill(open, path, own)
  local from = lfs.attributes(own) == nil and open(path, "rb")
  if not from then return end
  local to = assert(open(own, "wb"))
  for piece in function() return from:read(COPIED) end do to:write(piece) end
  from:close()
  to:close()
end

local function close_io()
  local open, output, lines, input = io.open, io.output, io.lines, io.input
  io.open = function(path, mode)                                                  -- luacheck: ignore 122
    local how = type(mode) == "string" and mode or "r"
    local writes = how:find "[wa+]" ~= nil
    local own, moved = at(path, writes)
    if moved and writes and not how:find "w" then
      fill(open, path, own)
      -- There is no such file. Opening the user's path returns the error with this path.
      if how:find "r" and lfs.attributes(own) == nil then own = path end
    end
    return open(own, mode)
  end
  io.output = function(file)                                                      -- luacheck: ignore 122
    if file == nil then return output() end
    return output((at(file, true)))
  end
  io.input = function(file)                                                       -- luacheck: ignore 122
    if file == nil then return input() end
    return input((at(file)))
  end
  io.lines = function(path, ...)                                                  -- luacheck: ignore 122
    if path == nil then return lines() end
    return lines((at(path)), ...)
  end
  io.popen = function(command, mode)                                              -- luacheck: ignore 122
    if mode == "w" then return open("/dev/null", "w") end
    caller.error(("a dry run does not start programs: io.popen(%q)"):format(command))
  end
end

local function close_os(folder)
  local remove_real, rename_real, numbered = os.remove, os.rename, 0
  os.remove = function(path)                                                      -- luacheck: ignore 122
    local own, moved = at(path)
    return moved and remove_real(own) or true
  end
  os.rename = function(from, to)                                                  -- luacheck: ignore 122
    local own, moved = at(from)
    return moved and rename_real(own, (at(to, true))) or true
  end
  os.execute = nothing                                                            -- luacheck: ignore 122
  os.tmpname = function()                                                         -- luacheck: ignore 122
    numbered = numbered + 1
    return ("%s/temporary%d"):format(folder, numbered)
  end
  unistd.unlink, stdio.rename = os.remove, os.rename
end

-- Makes the folders that the script has "made" (they were only recorded) look like empty folders.
local function close_folders()
  local made, attributes, dir, access = {}, lfs.attributes, lfs.dir, unistd.access
  local function name(path) return path:gsub("^%./", ""):gsub("/+$", "") end
  local function make(path) made[name(path)] = true end
  lfs.mkdir = function(path)
    make(path)
    return true
  end
  stat.mkdir = function(path)
    make(path)
    return 0
  end
  lfs.attributes = function(path, ...)
    if type(path) == "string" and made[name(path)] and not attributes(path) then return attributes("/", ...) end
    return attributes((at(path)), ...)
  end
  lfs.dir = function(path)
    if made[name(path)] and not attributes(path) then return function() return nil end end
    return dir(path)
  end
  unistd.access = function(path, ...)
    if type(path) == "string" and made[name(path)] and not attributes(path) then return 0 end
    return access((at(path)), ...)
  end
  for _, key in ipairs { "rmdir", "link", "touch", "setmode", "lock_dir" } do lfs[key] = nothing end
end

local function close_posix()
  local open = fcntl.open
  local writing = { fcntl.O_WRONLY, fcntl.O_RDWR, fcntl.O_CREAT, fcntl.O_TRUNC, fcntl.O_APPEND }
  fcntl.open = function(path, flags, mode)
    local writes = false
    for _, flag in ipairs(writing) do writes = writes or bit.band(flags, flag) ~= 0 end
    local own, moved = at(path, writes)
    if not moved then return open(path, flags, mode) end
    if writes and bit.band(flags, fcntl.O_TRUNC) == 0 then fill(io.open, path, own) end
    return open(own, writes and bit.bor(flags, fcntl.O_CREAT) or flags, mode or 384)
  end
  for _, key in ipairs { "rmdir", "link", "truncate", "chown" } do unistd[key] = zero end
  for _, key in ipairs { "chmod", "mkfifo", "mknod" } do stat[key] = zero end
  local function refuse(of, names, text)
    for _, key in ipairs(names) do of[key] = function() caller.error(text:format(key)) end end
  end
  refuse(stdlib, { "mkdtemp", "mkstemp" }, "a dry run does not make files: posix.stdlib.%s; os.tmpname() returns "
    .. "a name")
  refuse(unistd, { "fork", "exec", "execp", "execx" }, "a dry run does not start programs: posix.unistd.%s")
end

--- Returns the path of the temporary folder for a dry run. Its name contains the process id of the dry run. The parent
--- process removes the folder.
---@param pid integer
---@return string
function outside.folder(pid) return ("%s/psluajit-dry-%d"):format(os.getenv "TMPDIR" or "/tmp", pid) end

--- Removes the temporary folder of a dry run that has ended.
---@param pid integer
function outside.remove(pid)
  local folder = outside.folder(pid)
  if lfs.attributes(folder, "mode") ~= "directory" then return end
  for name in lfs.dir(folder) do
    if name ~= "." and name ~= ".." then os.remove(folder .. "/" .. name) end
  end
  lfs.rmdir(folder)
end

--- Begins the protection in this process: replaces the functions of Lua and of luaposix that change files.
function outside.close()
  local folder = outside.folder(unistd.getpid())
  assert(lfs.mkdir(folder))
  require "ps.core.command_line".try = function(_, fn, ...) return fn(...) end    -- an error is a result of the dry run
  if C.ps_file_divert(folder) < 0 then error(ffi.string(C.ps_error_message()), 0) end
  close_io()
  close_os(folder)
  close_folders()
  close_posix()
end

return outside
