-- SPDX-License-Identifier: BSD-3-Clause
-- The names of the eviction policies, in the order of the rows in src/chunk/policy.c.
local native = require "ps.core.ffi"
local C = native.C

local names = {}
while C.ps_policy_name(#names) ~= nil do names[#names + 1] = native.ffi.string(C.ps_policy_name(#names)) end

return names
