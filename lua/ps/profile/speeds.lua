-- SPDX-License-Identifier: BSD-3-Clause
-- Measures the highest speeds of a device: the operations per second of a large matrix product for each dtype, and the
-- bytes per second that a large copy reads and writes. Each speed is the best of a few tries. Reports of profiles and
-- plans use these speeds.
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local C = native.C

local speeds = {}

local TRIES = 4

--- Calls fn() a few times. Returns the duration of the shortest call in seconds.
---@param fn function
---@return number
function speeds.least(fn)
  local seconds = math.huge
  for _ = 1, TRIES do
    local began = C.ps_now()
    fn()
    seconds = math.min(seconds, C.ps_now() - began)
  end
  return seconds
end

--- Returns the speeds of a device. If the device cannot multiply matrices of a dtype, the result does not contain the
--- dtype.
---@param device string
---@param sizes {side: integer, nbytes: integer, dtypes: string[]} side: number of rows and columns of the matrices.
---  nbytes: size of the copy in bytes, which must be larger than the processor's caches
---@return {flops: table<string, number>, bandwidth: number} flops by dtype
function speeds.of(device, sizes)
  local flops, bandwidth, side, nbytes = {}, nil, sizes.side, sizes.nbytes
  scope.no_grad(scope.scope, function()
    local one = create.zeros({ 1 }, { device = device })
    local function wait() return one:sum():item() end       -- waits until the device has finished all its work
    for _, dtype in ipairs(sizes.dtypes) do
      local a = create.ones({ side, side }, { device = device, dtype = dtype })
      local ok, seconds = pcall(speeds.least, function()
        local _ = a:matmul(a)
        wait()
      end)
      if ok then flops[dtype] = 2 * side ^ 3 / seconds
      elseif type(seconds) ~= "table" or seconds.name ~= "EUNSUP" then error(seconds, 0) end
    end
    local from, to = create.zeros({ nbytes / 4 }, { device = device }), create.zeros({ nbytes / 4 },
      { device = device })
    bandwidth = 2 * nbytes / speeds.least(function()
      to:copy_(from)
      wait()
    end)
  end)
  return { flops = flops, bandwidth = bandwidth }
end

-- SIZES contains the sizes of the first product and the first copy. A GPU completes such a small product or copy before
-- the call returns. So the sizes are doubled, at most DOUBLINGS times, until a product and a copy take at least ENOUGH
-- seconds.
local SIZES, ENOUGH, DOUBLINGS = { side = 1024, nbytes = 2 ^ 26 }, 5e-4, 3
local known = {}                                           -- the limits that were already measured, by device

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
    if not ok and caller.is_interrupt(more) then error(more, 0) end
    if not ok then break end                              -- larger sizes do not fit into memory
    measured.bandwidth = math.max(measured.bandwidth, more.bandwidth)
    for dtype, flops in pairs(more.flops) do measured.flops[dtype] = math.max(measured.flops[dtype] or 0, flops) end
  end
  return measured
end

--- Returns the limits of a device. Each limit is measured only once per process.
---@param device string
---@param dtypes string[] dtypes of products. If the device cannot multiply a dtype, the result has no limit for it
---@return {flops: table<string, number>, bytes: number} flops by dtype
function speeds.limits(device, dtypes)
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

return speeds
