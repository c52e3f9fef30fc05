-- SPDX-License-Identifier: BSD-3-Clause
-- Replaces several files of a folder as a group. Each file is first written completely under a temporary name,
-- NAME.new. Then all files are renamed to their final names. If an error occurs during writing, for example because
-- the disk is full, the older files are therefore unchanged.
--
-- The texts of a batch, such as config.json, say how to read its other files. Before any file is renamed to its final
-- name, the older texts that would not match the new files are renamed to NAME.old. The new texts are renamed last. If
-- the process ends between these two steps, the folder has no such text, and a reader refuses the folder. A reader
-- therefore never reads new weights with an older text.
local agree = require "ps.dist.agree"
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local read_file = require "ps.core.read_file"
local lfs = require "lfs"
local error = caller.error
local C = native.C

local batch = {}

local NEW, OLD = ".new", ".old"

---@class ps.pretrained.Batch
---@field private path string
---@field private names string[]  names of the files, in the order in which they are written
---@field private texts table<string, string>
local Batch = {}
Batch.__index = Batch

local path_out = native.ffi.new "char[4096]"

-- Returns the path of a file. If the file is a link, returns the path that the link points to, even if no file exists
-- at that path yet.
local function target(self, name)
  native.check(C.ps_file_target(self.path .. "/" .. name, path_out, native.ffi.sizeof(path_out)))
  return native.ffi.string(path_out)
end

local function write_text(path, text) native.check(C.ps_file_write_atomic(path, text, #text)) end

--- Adds a file, which the caller then writes.
---@param name string
---@return string path the path under which the caller writes it
function Batch:file(name)
  table.insert(self.names, name)
  return target(self, name) .. NEW
end

local function rename(from, to)
  local ok, why = os.rename(from, to)
  if not ok then error(("cannot rename %s to %s: %s"):format(from, to, why:match "([^ :][^:]*)$"), 0) end
end

-- Renames the older texts that differ from the new texts to NAME.old. If the batch contains several files that are not
-- texts, renames all older texts, because these files are renamed to their final names one after the other. Appends the
-- paths of the renamed texts to `aside`.
local function set_aside(self, order, aside)
  for _, name in ipairs(order) do
    local path = target(self, name)
    local old, _, absent = read_file(path)
    if not absent and (old ~= self.texts[name] or #self.names > 1) then
      rename(path, path .. OLD)
      aside[#aside + 1] = path
    end
  end
end

-- Renames all files to their final names. Calls remove_older once the folder has no text that refers to older files.
local function commit(self, texts, remove_older)
  local order, aside, folders, renamed = {}, {}, {}, 0
  self.texts = texts
  for name in pairs(texts) do order[#order + 1] = name end
  table.sort(order)
  for _, name in ipairs(order) do write_text(target(self, name) .. NEW, texts[name]) end
  local ok, problem = pcall(function()
    set_aside(self, order, aside)
    for _, list in ipairs { self.names, order } do
      if list == order and remove_older then remove_older() end
      for _, name in ipairs(list) do
        local path = target(self, name)
        rename(path .. NEW, path)
        folders[path:match "^(.*)/"], renamed = true, renamed + 1
      end
    end
  end)
  if not ok and renamed == 0 then
    for _, path in ipairs(aside) do os.rename(path .. OLD, path) end
    error(problem, 0)
  end
  for _, path in ipairs(aside) do os.remove(path .. OLD) end
  if not ok then
    error(("%s; %s now has files of two models, so save again"):format(tostring(problem), self.path), 0)
  end
  for folder in pairs(folders) do native.check(C.ps_file_fsync_dir(folder)) end
end

-- Removes the temporary files that were not renamed to their final names.
local function clean(self)
  local function remove(name)
    local path = target(self, name) .. NEW
    if lfs.symlinkattributes(path, "mode") then os.remove(path) end
  end
  for _, name in ipairs(self.names) do remove(name) end
  for name in pairs(self.texts) do remove(name) end
end

--- Writes files of a folder on the group's rank 0. All ranks of the group call this function. fn(batch) writes each
--- file to the path that batch:file(name) returns. fn returns a table that maps the names of the texts to the texts.
---@param path string the folder
---@param group? ps.Group
---@param fn fun(batch: ps.pretrained.Batch): table<string, string>
---@param remove_older? fun() removes other files that a reader might take for files of this batch
function batch.write(path, group, fn, remove_older)
  local rank = group and group:rank() or 0
  local self = setmetatable({ path = (path:gsub("(.)/+$", "%1")), names = {}, texts = {} }, Batch)
  local ok, problem = pcall(function()
    local texts = fn(self)
    agree.run(group, function() if rank == 0 then commit(self, texts, remove_older) end end)
  end)
  if rank == 0 then clean(self) end
  if not ok then error(problem, 0) end
end

return batch
