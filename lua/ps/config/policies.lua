-- SPDX-License-Identifier: BSD-3-Clause
-- The names of the eviction policies, as the rows of src/chunk/policy.c have them.
local E = require "ps.ffi"

local names = {}
while E.C.ps_policy_name(#names) ~= nil do names[#names + 1] = E.ffi.string(E.C.ps_policy_name(#names)) end

return names
