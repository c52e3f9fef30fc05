-- SPDX-License-Identifier: BSD-3-Clause
-- Declares the C functions of ps.h. Only the few files that call C before a context exists load this file directly
-- (tools/plan.lua, for example).
local ffi = require "ffi"

ffi.cdef(require("ps.cdef").text)

return ffi.C
