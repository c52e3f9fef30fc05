-- SPDX-License-Identifier: BSD-3-Clause
-- Folders whose model a run replaces (ps.checkpoints.new_run with force). The first model that is then written to such
-- a folder also replaces the older model's tokenizer and settings.
local file_id = require "ps.core.file_id"

local replaced = {}

local folders = {}                                         -- by file_id

--- Records that the model in a folder is to be replaced.
---@param path string
function replaced.later(path) folders[file_id(path) or ""] = true end

--- Returns whether replaced.later was called for a folder since replaced.take was last called for it.
---@param path string
---@return boolean
function replaced.take(path)
  local id = file_id(path) or ""
  local found = folders[id] == true
  folders[id] = nil
  return found
end

return replaced
