-- SPDX-License-Identifier: BSD-3-Clause
-- Assignments to an engine. model.name = value goes to the module, where reading finds it, except for the engine's own
-- fields. The engine does not train a parameter or module that is assigned so, and its next step says so.
local error = require("ps.caller").error

local step = require "ps.engine.step"

local assign = {}

--- The engine's own fields are those that it has now. Called once it is made.
---@param engine ps.Engine
function assign.begin(engine)
  local own = { own_fields = true }
  for name in pairs(engine) do own[name] = true end
  engine.own_fields = own
end

--- The __newindex of engines.
---@param methods table<string, any> the engine's methods by name
---@return fun(self: ps.Engine, name: any, value: any)
function assign.with(methods)
  return function(self, name, value)
    local own = rawget(self, "own_fields")
    if not own or own[name] then return rawset(self, name, value) end
    if methods[name] ~= nil or step.fields[name] then
      error(("model.%s is the engine's; what the module has by this name is model.module.%s"):format(name, name))
    end
    rawget(self, "_bound")[name] = nil
    self.module[name] = value
  end
end

return assign
