-- SPDX-License-Identifier: BSD-3-Clause
-- Provides the variables of a script by name, in two cases. First, `psluajit -i script.lua` opens a prompt after
-- an error of the script. For this, the program's error handler calls keep_at_error() while the stack frames still
-- exist. Second, a script can be paused (ps/prompt/pause.lua).
local caller = require "ps.core.caller"

local locals = {}

---@class ps.Variable
---@field value any
---@field level integer the stack level of the function, for debug.setlocal
---@field index integer the index of the local variable or of the upvalue
---@field func function? the function that has the upvalue; nil for a local variable
---@field changed boolean? whether a statement at the prompt has changed the value

---@type table<string, ps.Variable>
local kept = {}
local noted                                              -- the variables where psluajit first caught an error

-- Returns the locals and upvalues of the function at a stack level. If several locals have the same name, returns the
-- innermost one.
local function variables(level, info)
  local found, i = {}, 1
  while true do
    local name, value = debug.getlocal(level + 1, i)
    if not name then break end
    if name:match "^[%a_]" then found[name] = { value = value, level = level, index = i } end
    i = i + 1
  end
  for at = 1, info.nups do
    local name, value = debug.getupvalue(info.func, at)
    if name and name ~= "" and not found[name] then
      found[name] = { value = value, level = level, index = at, func = info.func }
    end
  end
  return found
end

-- Returns the variables of all functions of the script that are on the stack. If several variables have the same name,
-- returns the variable of the innermost function. Levels are relative to the caller.
local function all_variables(each)
  local found, level = {}, 3
  while true do
    local info = debug.getinfo(level, "Suf")
    if not info then return found end
    if info.what ~= "C" and not caller.is_own(info.source) then
      for name, variable in pairs(variables(level, info)) do
        variable.level = level - 1
        found[name] = found[name] or variable
      end
      if each then each(info.func) end
    end
    level = level + 1
  end
end

--- Records the variables of all functions of the script that are on the stack.
---@param each? fun(func: function) is called with each of these functions
function locals.keep(each) kept = all_variables(each) end

--- Records the variables at the place where psluajit catches an error of the script.
function locals.note() noted = all_variables() end

--- Records the variables at the error that ends the script. If psluajit caught this error earlier, records the
--- variables at the place where it was first caught. The program's error handler calls this function.
---@param e any the error
function locals.keep_at_error(e) kept = caller.was_noted(e) and noted or all_variables() end

--- Writes the values that statements at the prompt have assigned since keep() to the script's variables. The stack must
--- have the same depth as at the call of keep().
function locals.write()
  for _, variable in pairs(kept) do
    if variable.changed and variable.func then
      debug.setupvalue(variable.func, variable.index, variable.value)
    elseif variable.changed then
      debug.setlocal(variable.level, variable.index, variable.value)
    end
  end
end

--- Returns the values that statements at the prompt have assigned to the script's variables since keep().
---@return any[]
function locals.changed()
  local list = {}
  for _, variable in pairs(kept) do if variable.changed then list[#list + 1] = variable.value end end
  return list
end

--- Returns the sorted names of the variables.
---@return string[]
function locals.names()
  local names = {}
  for name in pairs(kept) do names[#names + 1] = name end
  table.sort(names)
  return names
end

--- Returns a table that looks up a name first in the recorded variables, and then in `beneath`. New names are stored in
--- `beneath`. TAB completes the names of the variables and of `beneath`.
---@param beneath table
---@return table
function locals.over(beneath)
  return setmetatable({}, {
    __names = function()
      local values = {}
      for name, variable in pairs(kept) do values[name] = variable.value end
      return values, beneath
    end,
    __index = function(_, name)
      local variable = kept[name]
      if variable then return variable.value end
      return beneath[name]
    end,
    __newindex = function(_, name, value)
      local variable = kept[name]
      if variable then variable.value, variable.changed = value, true else beneath[name] = value end
    end,
  })
end

--- Returns the environment for statements at the prompt. It contains the variables that keep() recorded, and the
--- globals. Prints the names of the variables.
---@return table
function locals.environment()
  local names = locals.names()
  if names[1] then print("variables of the script at its error: " .. table.concat(names, ", ")) end
  return locals.over(_G)
end

return locals
