-- SPDX-License-Identifier: BSD-3-Clause
-- Makes reading or writing an undeclared global variable an error, so that misspelt names are found. A script enables
-- this with require "ps.core.strict". Existing globals remain allowed, and strict.declare("name", ...) adds names.
-- Loading the file twice is harmless.
local strict = {}

local declared = {}

--- Allows global variables with these names.
---@param ... string
function strict.declare(...)
  for i = 1, select("#", ...) do declared[(select(i, ...))] = true end
end

--- Returns whether C code makes the access (the prompt or a C module). Such an access is not checked.
---@return boolean
local function from_c()
  local info = debug.getinfo(3, "S")
  return not info or info.what == "C"
end

local mt = getmetatable(_G)
if mt == nil then
  mt = {}
  setmetatable(_G, mt)
end

if not mt.ps_strict then
  mt.ps_strict = strict

  function mt.__newindex(t, name, value)
    if not declared[name] and not from_c() then
      error(("global '%s' is assigned but was not declared; write 'local', or strict.declare first")
        :format(tostring(name)), 2)
    end
    rawset(t, name, value)
  end

  function mt.__index(_, name)
    if not declared[name] and not from_c() then
      error(("global '%s' is not defined"):format(tostring(name)), 2)
    end
    return nil
  end
end

return mt.ps_strict
