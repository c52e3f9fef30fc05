-- SPDX-License-Identifier: BSD-3-Clause
-- C arrays whose length is known only at run time. LuaJIT converts such a length to an int32: the conversion silently
-- drops the high bits of an int64_t, and the array would be too short for its data. Only this file makes such arrays
-- (spec/source/lint_spec.lua), and it checks their length.
local ffi = require "ffi"
local caller = require "ps.core.caller"

local MOST = 2 ^ 31 - 1  -- largest size in bytes; callers process larger data in pieces

--- Returns a function that creates arrays of a C type: array "int32_t" (n, { first, ... }). The arrays are zeroed, and
--- the garbage collector frees them. The function raises an error for an array of more than 2 GiB.
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
