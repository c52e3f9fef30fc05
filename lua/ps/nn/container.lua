-- SPDX-License-Identifier: BSD-3-Clause
-- ModuleList and Sequential. Their items count from 0, as names and PyTorch do; list[-1] is the last.
local core = require "ps.nn.module"
local caller = require "ps.caller"
local error = caller.error

---@class ps.nn.ModuleList: ps.nn.Module
local ModuleList = core.class("ModuleList")

-- Negative indices reach back from the end; everything else is a field or method.
local function from_end(class)
  class.instance.__index = function(self, key)
    local fields = rawget(self, "_fields")
    if type(key) == "number" then return fields[key < 0 and fields.length + key or key] end
    local value = fields[key]
    if value ~= nil then return value end
    return class[key]
  end
end
from_end(ModuleList)

--- A list of modules, which count from 0; list[-1] is the last.
---@param modules? ps.nn.Module[] a plain Lua list; its first module becomes number 0
function ModuleList:init(modules)
  self.length = 0
  if modules ~= nil then caller.typed(modules, "table", self.class_name .. ": its list of modules") end
  for _, module in ipairs(modules or {}) do self:append(module) end
end

--- Adds a module at the end.
---@param module ps.nn.Module
---@return ps.nn.Module self
function ModuleList:append(module)
  if not core.is_module(module) then error(self.class_name .. ":append takes a module") end
  self[self.length] = module
  self.length = self.length + 1
  return self
end

--- Whether Module:recompute_blocks takes an element for a block: always.
---@return boolean
function ModuleList:holds_blocks() return true end

--- The number of modules in it.
---@return integer
function ModuleList:size() return self.length end

--- `for i, module in list:each() do`, i from 0.
---@return fun(): integer?, ps.nn.Module?
function ModuleList:each()
  local i = -1
  return function()
    i = i + 1
    if i < self.length then return i, self._fields[i] end
  end
end

---@class ps.nn.Sequential: ps.nn.ModuleList
local Sequential = core.class("Sequential", ModuleList)
from_end(Sequential)

--- A chain of modules.
---@param ... ps.nn.Module each is applied to the result of the one before
function Sequential:init(...)
  ModuleList.init(self, { ... })
end

--- Whether Module:recompute_blocks takes an element for a block: one that has modules of its own.
---@param element ps.nn.Module
---@return boolean
function Sequential:holds_blocks(element) -- luacheck: ignore 212/self
  for _, key in ipairs(element._names) do
    if element._kind[key] == "module" then return true end
  end
  return false
end

--- Applies the modules one after the other.
---@param x any the input of the first
---@return any the result of the last
function Sequential:forward(x)
  for i = 0, self.length - 1 do x = self._fields[i](x) end
  return x
end

return { ModuleList = ModuleList, Sequential = Sequential }
