-- SPDX-License-Identifier: BSD-3-Clause
-- Creates C arrays whose length is known only at run time, and checks the length. LuaJIT's own constructor converts the
-- length to int32 and silently drops the high bits of an int64_t, so the array would be too short. Only this file
-- creates arrays of variable length (spec/source/lint_spec.lua).
local ffi = require "ffi"
local caller = require "ps.core.caller"

local MOST = 2 ^ 31 - 1  -- largest size in bytes; callers process larger data in pieces

--- Returns a function that creates zeroed arrays of a C type. For example, array "int32_t" returns a function f, and
--- f(n, { first, ... }) creates an array of n int32_t that begins with the values of the list. The garbage collector
--- frees the arrays. An array of more than 2 GiB is an error.
---@param element string
---@return fun(n: integer, values?: number[]): ffi.cdata*
local function array(element)
  local ctype, size = ffi.typeof(element .. "[?]"), ffi.sizeof(element)
  return function(n, values)
    n = tonumber(n)
    if not (n >= 0 and n * size <= MOST) then
      caller.error(("cannot allocate an array of %.0f elements of %d bytes: the limit is %.0f bytes; process the "
        .. "data in pieces"):format(n, size, MOST))
    end
    if values then return ctype(n, values) end
    return ctype(n)
  end
end

return array
