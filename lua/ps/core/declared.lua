-- SPDX-License-Identifier: BSD-3-Clause
-- Declares ps.h. By itself it is for the few who call C before there is a context (tools/plan.lua).
local ffi = require "ffi"

ffi.cdef(require("ps.cdef").text)

return ffi.C
