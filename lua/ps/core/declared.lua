-- SPDX-License-Identifier: BSD-3-Clause
-- Declares ps.h. Loaded directly only by the few files that call C before a context exists (tools/plan.lua).
local ffi = require "ffi"

ffi.cdef(require("ps.cdef").text)

return ffi.C
