-- SPDX-License-Identifier: BSD-3-Clause
-- What a device reaches at most, measured once a process for reports: operations a second in a large product, by type,
-- and bytes a second read and written by a large copy.
local copied = require "ps.copied"
local speeds = require "ps.speeds"

local SIZES = { side = 1024, nbytes = 2 ^ 26 }
local known = {}

--- Limits of a device.
---@param device string
---@param dtypes string[] types of products; one that the device does not multiply has no limit
---@return {flops: table<string, number>, bytes: number} flops: by type
return function(device, dtypes)
  local limits, sizes = known[device], copied(SIZES)
  sizes.dtypes = {}
  for _, dtype in ipairs(dtypes) do
    if not (limits and limits.flops[dtype]) then table.insert(sizes.dtypes, dtype) end
  end
  if limits and #sizes.dtypes == 0 then return limits end
  local measured = speeds.of(device, sizes)
  limits = limits or { flops = {}, bytes = measured.bandwidth }
  for dtype, flops in pairs(measured.flops) do limits.flops[dtype] = flops end
  known[device] = limits
  return limits
end
