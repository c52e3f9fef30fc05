-- SPDX-License-Identifier: BSD-3-Clause
-- The devices that this process has opened: their names, their abilities, and the memory that tensors use on them.
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"

local devices = {}

--- whether ops compute values; false in a script's dry run (tools/plan.lua)
devices.computes = native.C.ps_machine_pretended() == 0

---@class ps.Device
---@field name string
---@field description string the instruction set, threads and libraries in use

--- Calls fn(...), which reads values of tensors. Returns nil in a dry run, which has no values.
---@param fn function
---@param ... any
---@return any value the result of fn, or nil in a dry run of a step or script
function devices.known(fn, ...)
  local ok, value = pcall(fn, ...)
  if ok then return value end
  if type(value) ~= "table" or value.name ~= "EDRY" then error(value, 0) end
  return nil
end

--- Opens a device by name: ps.device("cpu").
---@param name string name of the device; the error about an unknown name lists the devices that exist
---@return ps.Device
function devices.open(name)
  local i = native.device_index(name)
  return { name = native.device_name[i], description = native.ffi.string(native.C.ps_device_describe(native.ctx, i)) }
end

--- Returns the type that trains fastest on a device (default cpu): "bf16" if it is a GPU or has bf16 products, else
--- "fp32".
---@param device? string
---@return string
function devices.fast_dtype(device)
  return native.device_info(native.device_index(device or "cpu")).fast_bf16 ~= 0 and "bf16" or "fp32"
end

--- Returns whether fused ops (ops.mlp) are faster on a device than separate ops, as on a GPU.
---@param device string
---@return boolean
function devices.prefers_fused(device) return native.device_info(native.device_index(device)).fuses ~= 0 end

--- Returns all open devices. The first call that names cuda opens it.
---@return ps.Device[]
function devices.all()
  local list = {}
  for i = 0, #native.device_name do list[i + 1] = devices.open(native.device_name[i]) end
  return list
end

--- Limits the bytes that tensors may use on a device. An allocation above the limit raises an error.
---@param nbytes integer the limit, or 0 for no limit
---@param device? string (default: the first device, "cpu")
function devices.set_limit(nbytes, device)
  caller.whole(nbytes, "ps.set_memory_limit: the limit in bytes")
  native.check(native.C.ps_memory_set_limit(native.ctx, device and native.device_index(device) or 0, nbytes))
end
--- Resets the peak that ps.memory reports to the bytes in use now.
---@param device? string (default: the first device, "cpu")
function devices.reset_peak(device)
  native.C.ps_memory_reset_peak(native.ctx, device and native.device_index(device) or 0)
end

--- Returns the bytes of a device's memory that can still be allocated.
---@param device? string (default: the first device, "cpu")
---@return integer bytes
function devices.available(device)
  return tonumber(native.C.ps_memory_available(native.ctx, device and native.device_index(device) or 0))
end

return devices
