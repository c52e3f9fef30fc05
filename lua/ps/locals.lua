-- SPDX-License-Identifier: BSD-3-Clause
-- The variables of a script at its error, by name, for the prompt that `psluajit -i script.lua` then opens. The error
-- handler of the program calls keep() while the frames are there.
local caller = require "ps.caller"

local locals = {}

local kept = {}

-- The variables of the function at a level, with those that it has from functions around it. Of two locals of one name
-- the inner one counts.
local function variables(level, info)
  local found, i = {}, 1
  while true do
    local name, value = debug.getlocal(level + 1, i)
    if not name then break end
    if name:match "^[%a_]" then found[name] = { value } end
    i = i + 1
  end
  for at = 1, info.nups do
    local name, value = debug.getupvalue(info.func, at)
    if name and name ~= "" and not found[name] then found[name] = { value } end
  end
  return found
end

--- Notes the variables of all functions of the script that are running. A name that several have is the innermost's.
function locals.keep()
  kept = {}
  local seen, level = {}, 2
  while true do
    local info = debug.getinfo(level, "Suf")
    if not info then return end
    if info.what ~= "C" and not caller.is_own(info.source) then
      for name, box in pairs(variables(level, info)) do
        if not seen[name] then seen[name], kept[name] = true, box[1] end
      end
    end
    level = level + 1
  end
end

--- The environment of statements at the prompt: the variables that keep() noted before the globals. Prints their names.
---@return table
function locals.environment()
  local names = {}
  for name in pairs(kept) do names[#names + 1] = name end
  table.sort(names)
  if names[1] then print("variables of the script at its error: " .. table.concat(names, ", ")) end
  return setmetatable(kept, { __index = _G, __newindex = _G })
end

return locals
