-- SPDX-License-Identifier: BSD-3-Clause
-- The state of the process's random numbers. Every op that draws random numbers gets its stream from this state
-- (Philox, src/base).
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"

local random = {}

--- Returns the state of all random numbers: seed, offset, step, sample and op (struct ps_rng of ps.h). A script may set
--- the fields.
---@return ffi.cdata* ps_rng
function random.state() return native.C.ps_rng_get(native.ctx) end

--- Restarts all streams of random numbers from a seed.
---@param seed integer from 0 to 2^53, or a 64-bit integer (1ULL)
function random.seed(seed)
  local rng = random.state()
  caller.seed(seed, "ps.manual_seed")
  rng.seed, rng.offset, rng.step, rng.sample, rng.op = seed, 0, 0, 0, 0
end

return random
