-- SPDX-License-Identifier: BSD-3-Clause
-- What a device reaches at most, measured: operations a second in a large product, by type, and bytes a second read and
-- written by a large copy. The best of a few tries counts.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local C = native.C

local speeds = {}

local TRIES = 4

--- The least seconds of a few calls.
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

--- The speeds of a device. A type that it does not multiply is absent.
---@param device string
---@param sizes {side: integer, nbytes: integer, dtypes: string[]} side: of the square matrices of the product; nbytes:
---  of the copy, beyond the caches of a processor
---@return {flops: table<string, number>, bandwidth: number} flops: by type
function speeds.of(device, sizes)
  local flops, bandwidth, side, nbytes = {}, nil, sizes.side, sizes.nbytes
  scope.no_grad(scope.scope, function()
    local one = create.zeros({ 1 }, { device = device })
    local function wait() return one:sum():item() end       -- until the device has done what it was given
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

return speeds
