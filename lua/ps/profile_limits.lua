-- SPDX-License-Identifier: BSD-3-Clause
-- What a device reaches at most, measured once a process: operations a second in a large product, the better of fp32
-- and bf16, and bytes a second read and written by a large copy.
local ps = require "ps"
local C = ps.C

local SIDE = 1024              -- of the matrices of the product
local NBYTES = 2 ^ 26          -- of the copy, beyond the caches of most processors
local TRIES = 4

local function best(fn)
  local least = math.huge
  for _ = 1, TRIES do
    local began = C.ps_now()
    fn()
    least = math.min(least, C.ps_now() - began)
  end
  return least
end

local known = {}

--- Limits of a device.
---@param device string
---@return {flops: number, bytes: number}
return function(device)
  if known[device] then return known[device] end
  local limits = { flops = 0, bytes = 0 }
  ps.no_grad(ps.scope, function()
    local probe = ps.zeros({ 1 }, { device = device })
    for _, dtype in ipairs { "fp32", "bf16" } do
      local a = ps.ones({ SIDE, SIDE }, { device = device, dtype = dtype })
      local seconds = best(function()
        local _ = a:matmul(a)
        probe:sum():item()                                 -- waits for the device
      end)
      limits.flops = math.max(limits.flops, 2 * SIDE ^ 3 / seconds)
    end
    local from = ps.zeros({ NBYTES / 4 }, { device = device })
    local to = ps.zeros({ NBYTES / 4 }, { device = device })
    limits.bytes = 2 * NBYTES / best(function()
      to:copy_(from)
      probe:sum():item()
    end)
  end)
  known[device] = limits
  return limits
end
