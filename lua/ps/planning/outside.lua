-- SPDX-License-Identifier: BSD-3-Clause
-- A dry run of a script writes no file. Files that the script opens for writing are /dev/null, and what changes folders
-- or starts programs does nothing. For the process of a dry run alone, which ends with it.
local lfs = require "lfs"
local caller = require "ps.caller"

local outside = {}

local function nothing() return true end

-- Whether a mode of io.open may write.
local function writes(mode) return type(mode) == "string" and mode:find "[wa+]" ~= nil end

--- Cuts this process off from files that it could write.
function outside.close()
  local open, output = io.open, io.output
  local null = function() return open("/dev/null", "w") end
  io.open = function(path, mode)                                                  -- luacheck: ignore 122
    if writes(mode) and path ~= "/dev/null" then return null() end
    return open(path, mode)
  end
  io.output = function(file)                                                      -- luacheck: ignore 122
    if type(file) == "string" then file = null() end
    return output(file)
  end
  io.popen = function(command, mode)                                              -- luacheck: ignore 122
    if writes(mode) then return null() end
    caller.error(("a dry run starts no program: io.popen(%q)"):format(command))
  end
  for _, name in ipairs { "remove", "rename", "execute" } do os[name] = nothing end   -- luacheck: ignore 122
  os.tmpname = function() return "/dev/null" end                                  -- luacheck: ignore 122
  for _, name in ipairs { "mkdir", "rmdir", "link", "touch" } do lfs[name] = nothing end
end

--- The same for what psluajit itself writes; called once `ps` is there.
function outside.close_ps()
  require("ps.serialize").save = nothing
  require("ps.safetensors").save = nothing
  require("ps.checkpoints").save = nothing
end

return outside
