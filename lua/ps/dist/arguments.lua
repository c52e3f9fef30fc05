-- SPDX-License-Identifier: BSD-3-Clause
-- Checks the arguments of a group's methods: that the group is open, and that an argument is a tensor or a rank. Errors
-- begin with the script's line.
local ffi = require "ffi"
local error = require("ps.core.caller").error

local arguments = {}

--- Returns the C group of an open group. Raises an error if the group is closed.
---@param self ps.Group
---@return ffi.cdata* group
function arguments.open(self)
  if not self.c then error("this group is closed") end
  return self.c
end

--- Checks that an argument of a method is a tensor, and returns the tensor. An error names the method.
---@param t any
---@param name string name of the argument
---@param call string the method
---@return ps.Tensor
function arguments.tensor(t, name, call)
  if not ffi.istype("ps_tensor", t) then
    error(("group:%s: %s is a %s; it takes a tensor"):format(call, name, type(t)))
  end
  return t
end

--- Checks that an argument of a method is a whole number, and returns the number. An error names the method.
---@param n any
---@param name string name of the argument
---@param call string the method
---@return integer
function arguments.whole(n, name, call)
  if type(n) ~= "number" or n ~= math.floor(n) or math.abs(n) >= 2 ^ 31 then
    error(("group:%s: %s is %s; it takes the number of a rank"):format(call, name, tostring(n)))
  end
  return n
end

return arguments
