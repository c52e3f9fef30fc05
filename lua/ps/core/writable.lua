-- SPDX-License-Identifier: BSD-3-Clause
-- Checks that a program will be able to write its results. Programs check this when they begin, so that they do not
-- compute for an hour before they fail. The check writes nothing.
local lfs = require "lfs"
local statvfs = require "posix.sys.statvfs"
local unistd = require "posix.unistd"
local readable = require "ps.core.readable"

local writable = {}

local LEAST = 65536  -- least number of free bytes; a disk with fewer free bytes counts as full

-- Returns the reason why no file can be created in a folder, or nil.
local function closed(path)
  local ok, why = unistd.access(path, "wx")
  if not ok then return (why:gsub("^.*: ", "")) end
  local disk = statvfs.statvfs(path)
  local free = disk and disk.f_bavail * disk.f_frsize
  return free and free < LEAST and ("its disk is full (%s free)"):format(readable.bytes(free)) or nil
end

local function above(path) return path:match "^(.*[^/])/+[^/]+$" or (path:sub(1, 1) == "/" and "/" or ".") end

--- Returns the reason why files cannot be written into a folder, or nil if they can be written. The folder need not
--- exist yet.
---@param path string
---@return string? problem
function writable.folder(path)
  if path == "" then return "the name of the folder is empty" end
  path = path:gsub("(.)/+$", "%1")
  local mode = lfs.attributes(path, "mode")
  if mode and mode ~= "directory" then return ("%s is a %s, not a folder"):format(path, mode) end
  if mode then
    local why = closed(path)
    return why and ("files cannot be written into the folder %s: %s"):format(path, why)
  end
  local at = path
  repeat at = above(at) until at == "/" or at == "." or lfs.attributes(at, "mode")
  local kind = lfs.attributes(at, "mode")
  local why = kind ~= "directory" and ("%s is a %s"):format(at, kind or "missing folder") or closed(at)
  if not why and lfs.symlinkattributes(path, "mode") == "link" then why = "it is a link to a missing folder" end
  return why and ("the folder %s cannot be made: %s%s"):format(path, kind == "directory" and at ~= "." and
    at ~= path and at .. ": " or "", why)
end

--- Returns the reason why a file cannot be written, or nil if it can be written. An existing file counts as writable if
--- it can be replaced.
---@param path string
---@return string? problem
function writable.file(path)
  if path == "" or path:sub(-1) == "/" then return ("%s is not the name of a file"):format(path) end
  local mode, at = lfs.attributes(path, "mode"), above(path)
  if mode == "directory" then return ("%s is a folder, not a file"):format(path) end
  if mode and mode ~= "file" then return nil end           -- a device or a pipe
  local kind = lfs.attributes(at, "mode")
  local why = kind ~= "directory" and (kind and ("%s is a %s, not a folder"):format(at, kind)
    or ("there is no folder %s"):format(at)) or closed(at)
  return why and ("the file %s cannot be written: %s"):format(path, why)
end

return writable
