-- SPDX-License-Identifier: BSD-3-Clause
-- Declares ps.h. Only the few files that call C before a context exists load it directly (tools/plan.lua).
local ffi = require "ffi"

ffi.cdef(require("ps.cdef").text)

return ffi.C
