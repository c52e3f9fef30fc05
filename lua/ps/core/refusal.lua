-- SPDX-License-Identifier: BSD-3-Clause
-- Raises the error that says that psluajit does not support something in a user's file.
local native = require "ps.core.ffi"
local error = native.caller.error

--- Raises a ps.Error with the script's line and the text "WHO: refused: WHY". Its field `refused` is WHY.
---@param who string the file or the family that is the reason
---@param why string
local function refuse(who, why)
  local _, text = pcall(error, ("%s: refused: %s"):format(who, why))
  _G.error(setmetatable({ code = native.C.PS_EUNSUP, name = "EUNSUP", msg = text, where = "", refused = why },
    native.Error), 0)
end

return refuse
