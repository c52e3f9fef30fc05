-- SPDX-License-Identifier: BSD-3-Clause
-- Folders whose model a run replaces (ps.checkpoints.new_run with force). The first model that is then written to such
-- a folder also replaces the older model's tokenizer and settings.
local lfs = require "lfs"

local replaced = {}

local folders = {}                                         -- by id

-- Returns a text that is the same for all paths of a folder.
local function id_of(path)
  local at = lfs.attributes(path)
  return at and ("%d:%d"):format(at.dev, at.ino) or ""
end

--- Records that the model in a folder is to be replaced.
---@param path string
function replaced.later(path) folders[id_of(path)] = true end

--- Returns whether replaced.later was called for a folder since replaced.take was last called for it.
---@param path string
---@return boolean
function replaced.take(path)
  local id = id_of(path)
  local found = folders[id] == true
  folders[id] = nil
  return found
end

return replaced
