-- SPDX-License-Identifier: BSD-3-Clause
-- What a device reaches at most, measured once a process for reports: operations a second in a large product, by type,
-- and bytes a second read and written by a large copy.
local copied = require "ps.core.copied"
local speeds = require "ps.profile.speeds"

-- A GPU is through with the first sizes before the call returns: they are doubled until a product and a copy take
-- ENOUGH seconds, at most DOUBLINGS times.
local SIZES, ENOUGH, DOUBLINGS = { side = 1024, nbytes = 2 ^ 26 }, 5e-4, 3
local known = {}

---@param device string
---@param sizes {side: integer, nbytes: integer, dtypes: string[]}
---@return {flops: table<string, number>, bandwidth: number}
local function measure(device, sizes)
  local measured = speeds.of(device, sizes)
  for _ = 1, DOUBLINGS do
    local short = 2 * sizes.nbytes / measured.bandwidth < ENOUGH
    for _, flops in pairs(measured.flops) do short = short or 2 * sizes.side ^ 3 / flops < ENOUGH end
    if not short then break end
    sizes.side, sizes.nbytes = sizes.side * 2, sizes.nbytes * 2
    local ok, more = pcall(speeds.of, device, sizes)
    if not ok then break end                              -- no memory for more
    measured.bandwidth = math.max(measured.bandwidth, more.bandwidth)
    for dtype, flops in pairs(more.flops) do measured.flops[dtype] = math.max(measured.flops[dtype] or 0, flops) end
  end
  return measured
end

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
  local measured = measure(device, sizes)
  limits = limits or { flops = {}, bytes = measured.bandwidth }
  for dtype, flops in pairs(measured.flops) do limits.flops[dtype] = flops end
  known[device] = limits
  return limits
end
