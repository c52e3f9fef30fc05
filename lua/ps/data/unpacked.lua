-- SPDX-License-Identifier: BSD-3-Clause
-- The cache folder for data files. Its path is $XDG_CACHE_HOME/psluajit, or ~/.cache/psluajit if XDG_CACHE_HOME is not
-- set. Files that are compressed by gzip are unpacked into this folder once.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local bit = require "bit"
local ffi = require "ffi"
local lfs = require "lfs"
local unistd = require "posix.unistd"
local error = caller.error
local C = native.C

local unpacked = {}

local function hash(text) return bit.tohex(C.ps_xxh3(text, #text)) end

local function absolute(path) return path:sub(1, 1) == "/" and path or lfs.currentdir() .. "/" .. path end

--- Returns the path of a subfolder of the cache folder. The subfolder is created if it does not exist. Returns nil if
--- the user has no home folder.
---@param purpose string name of the subfolder, such as "examples"
---@return string?
function unpacked.folder(purpose)
  local home, base = os.getenv "HOME", os.getenv "XDG_CACHE_HOME"
  home = base and base:sub(1, 1) == "/" and base or home and home .. "/.cache"  -- XDG: a relative path is ignored
  if not home then return nil end
  local folder, made = home .. "/psluajit/" .. purpose, ""
  for part in folder:gmatch "[^/]+" do
    made = made .. "/" .. part
    lfs.mkdir(made)
  end
  return folder
end

--- Returns a path in the cache folder for a file that is made from a data file, such as its index. Returns nil if the
--- user has no home folder.
---@param purpose string name of the subfolder
---@param path string path of the data file
---@param ending string ending of the returned path, such as ".rows"
---@return string?
function unpacked.place(purpose, path, ending)
  local folder = unpacked.folder(purpose)
  return folder and ("%s/%s%s"):format(folder, hash(absolute(path)), ending)
end

local function quoted(path) return "'" .. path:gsub("'", "'\\''") .. "'" end

-- Unpacks the file `path` to the file `target`. Returns true, or nil and the reason if gzip fails. The messages of the
-- shell and of gzip are written to a file outside the cache folder, because the disk of the cache folder may be full.
local function unpack_to(path, target)
  local errors = os.tmpname()
  local rc = os.execute(("(gzip -dc -- %s >%s) 2>%s"):format(quoted(path), quoted(target), quoted(errors)))
  local file = io.open(errors, "rb")
  local why = file and file:read "*a":gsub("^%s*gzip: ", ""):gsub("^sh: %d+: ", ""):gsub("%s+$", "") or ""
  if file then file:close() end
  os.remove(errors)
  if rc == 0 then return true end
  os.remove(target)
  return nil, why ~= "" and why or "gzip failed, or the disk is full"
end

-- Removes the files that were unpacked from earlier versions of a compressed file.
local function remove_older(folder, prefix, keep)
  for name in lfs.dir(folder) do
    if name:sub(1, #prefix) == prefix and name ~= keep and not name:find("%.part$") then
      os.remove(folder .. "/" .. name)
    end
  end
end

-- Creates and locks the file into which this process unpacks. The lock shows other processes that the file is in use,
-- including processes on other machines that share the folder. When this process ends, the system releases the lock.
-- Returns nil if the file cannot be created.
local function locked(part)
  local file = io.open(part, "wb")
  if file then lfs.lock(file, "w") end                     -- some file systems have no locks; see remove_stale
  return file
end

-- The age in seconds at which an unlocked file is removed. Newer files are kept, because a process creates its file
-- shortly before it locks the file.
local STALE_S = 60

-- Removes the incomplete files of processes that were killed while they unpacked. Such a file has not changed for
-- STALE_S seconds, and no process has locked it. If the file system does not support locks, no file is removed.
local function remove_stale(folder)
  if lfs.attributes(folder, "mode") ~= "directory" then return end
  for name in lfs.dir(folder) do
    local path = folder .. "/" .. name
    local changed = name:find "%.%d+%.part$" and lfs.attributes(path, "modification")
    local file = changed and os.time() - changed > STALE_S and io.open(path, "r+b")
    if file then
      if lfs.lock(file, "w") then os.remove(path) end
      file:close()
    end
  end
end

--- Returns the path of the unpacked contents of a .gz file. The file is unpacked into the cache folder once. It is
--- unpacked again if its contents change.
---@param path string
---@return string
function unpacked.gzip(path)
  local folder = unpacked.folder "unpacked"
  if not folder then error(path .. ": there is no cache folder to unpack it to: set XDG_CACHE_HOME") end
  local content, prefix = ffi.new "uint64_t[1]", hash(absolute(path))
  native.check(C.ps_file_hash(path, content))
  local ending = path:match "(%.[^./]*)%.gz$" or ""
  local name = ("%s-%s%s"):format(prefix, bit.tohex(content[0]), ending)
  local target = folder .. "/" .. name
  if lfs.attributes(target, "mode") == "file" then return target end
  local part = ("%s.%d.part"):format(target, unistd.getpid())
  remove_stale(folder)
  local lock = locked(part)
  local done, why = unpack_to(path, part)
  if lock then lock:close() end
  if not done then error(("%s: cannot be unpacked to %s: %s"):format(path, folder, why)) end
  local moved, problem = os.rename(part, target)           -- ranks that unpack at the same time replace equal files
  if not moved then
    os.remove(part)
    error(("%s: cannot be unpacked to %s: %s"):format(path, folder, problem))
  end
  remove_older(folder, prefix, name)
  return target
end

return unpacked
