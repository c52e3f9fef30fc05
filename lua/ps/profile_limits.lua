-- SPDX-License-Identifier: BSD-3-Clause
-- What a device reaches at most, measured once a process for reports: operations a second in a large product, the
-- better of fp32 and bf16, and bytes a second read and written by a large copy.
local speeds = require "ps.speeds"

local SIZES = { side = 1024, nbytes = 2 ^ 26, dtypes = { "fp32", "bf16" } }
local known = {}

--- Limits of a device.
---@param device string
---@return {flops: number, bytes: number}
return function(device)
  if known[device] then return known[device] end
  local measured, most = speeds.of(device, SIZES), 0
  for _, flops in pairs(measured.flops) do most = math.max(most, flops) end
  known[device] = { flops = most, bytes = measured.bandwidth }
  return known[device]
end
