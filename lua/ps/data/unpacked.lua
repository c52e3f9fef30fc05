-- SPDX-License-Identifier: BSD-3-Clause
-- The cache folder of data files ($XDG_CACHE_HOME/psluajit, else ~/.cache/psluajit), and packed files, which are
-- unpacked there once.
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

--- Returns the subfolder of the cache folder for a purpose. Creates it if it is missing. Returns nil if the user has no
--- home folder.
---@param purpose string
---@return string?
function unpacked.folder(purpose)
  local home, base = os.getenv "HOME", os.getenv "XDG_CACHE_HOME"
  home = base and base:sub(1, 1) == "/" and base or home and home .. "/.cache"  -- XDG: relative paths are ignored
  if not home then return nil end
  local folder, made = home .. "/psluajit/" .. purpose, ""
  for part in folder:gmatch "[^/]+" do
    made = made .. "/" .. part
    lfs.mkdir(made)
  end
  return folder
end

--- Returns the path of a data file's companion in the cache folder, or nil if the user has no home folder.
---@param purpose string
---@param path string
---@param ending string
---@return string?
function unpacked.place(purpose, path, ending)
  local folder = unpacked.folder(purpose)
  return folder and ("%s/%s%s"):format(folder, hash(absolute(path)), ending)
end

local function quoted(path) return "'" .. path:gsub("'", "'\\''") .. "'" end

-- Unpacks a file to another file. Returns true, or nil and the reason of a failure. The shell's and gzip's messages go
-- to a file outside the cache, whose disk may be full.
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

-- Removes the files to which earlier versions of a compressed file were unpacked.
local function remove_older(folder, prefix, keep)
  for name in lfs.dir(folder) do
    if name:sub(1, #prefix) == prefix and name ~= keep and not name:find("%.part$") then
      os.remove(folder .. "/" .. name)
    end
  end
end

-- Opens and locks a file to which this process unpacks. The lock shows other processes, also those of other machines
-- that share the folder, that the file is in use. It ends with this process. Returns nil if the file cannot be created.
local function locked(part)
  local file = io.open(part, "wb")
  if file then lfs.lock(file, "w") end                     -- some file systems have no locks; see remove_stale
  return file
end

local STALE_S = 60                 -- age from which an unlocked file is stale; a new file is not locked yet

-- Removes files of processes that were killed while they unpacked: files that have not changed for a while, and whose
-- lock is free. If the file system has no locks, nothing is removed.
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

--- Returns the path of a .gz file's unpacked content. The file is unpacked into the cache folder once, and again if its
--- bytes change.
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
  local moved, problem = os.rename(part, target)           -- ranks that unpack at the same time replace equal bytes
  if not moved then
    os.remove(part)
    error(("%s: cannot be unpacked to %s: %s"):format(path, folder, problem))
  end
  remove_older(folder, prefix, name)
  return target
end

return unpacked
