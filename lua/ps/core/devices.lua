-- SPDX-License-Identifier: BSD-3-Clause
-- The devices that this process has opened: their names, their abilities, and the memory that tensors use on each
-- device.
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"

local devices = {}

--- Whether ops compute values. False in the dry run of a script (tools/plan.lua).
devices.computes = native.C.ps_machine_pretended() == 0

---@class ps.Device
---@field name string
---@field description string the instruction set, threads and libraries in use

--- Calls fn(...), which reads values of tensors. Returns nil in a dry run, because a dry run has no values.
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

--- Returns the type with which training is fastest on a device. The type is "bf16" if the device multiplies bf16 faster
--- than fp32, as GPUs do. Otherwise it is "fp32".
---@param device? string name of the device (default: "cpu")
---@return string
function devices.fast_dtype(device)
  return native.device_info(native.device_index(device or "cpu")).fast_bf16 ~= 0 and "bf16" or "fp32"
end

--- Returns whether fused ops (ops.mlp) are faster than separate ops on a device. This is the case on a GPU.
---@param device string
---@return boolean
function devices.prefers_fused(device) return native.device_info(native.device_index(device)).fuses ~= 0 end

--- Returns all open devices. The device cuda is opened by the first call that names it.
---@return ps.Device[]
function devices.all()
  local list = {}
  for i = 0, #native.device_name do list[i + 1] = devices.open(native.device_name[i]) end
  return list
end

--- Limits the number of bytes that tensors may use on a device. An allocation above the limit raises an error.
---@param nbytes integer the limit, or 0 for no limit
---@param device? string (default: the first device, "cpu")
function devices.set_limit(nbytes, device)
  caller.whole(nbytes, "ps.set_memory_limit: the limit in bytes")
  native.check(native.C.ps_memory_set_limit(native.ctx, device and native.device_index(device) or 0, nbytes))
end
--- Resets the peak that ps.memory reports. The new peak is the number of bytes in use now.
---@param device? string (default: the first device, "cpu")
function devices.reset_peak(device)
  native.C.ps_memory_reset_peak(native.ctx, device and native.device_index(device) or 0)
end

--- Returns the number of bytes that can still be allocated on a device.
---@param device? string (default: the first device, "cpu")
---@return integer bytes
function devices.available(device)
  return tonumber(native.C.ps_memory_available(native.ctx, device and native.device_index(device) or 0))
end

return devices
