-- SPDX-License-Identifier: BSD-3-Clause
-- C arrays whose length is known only when they are made. LuaJIT takes such a length as an int32: an int64_t is cut to
-- its low bits without a word, so that the array is shorter than what is then written into it. This is the one place
-- that makes them (spec/source/lint_spec.lua), and the one that looks.
local ffi = require "ffi"
local caller = require "ps.core.caller"

local MOST = 2 ^ 31 - 1                                    -- bytes; more memory goes by pieces

--- A function that makes arrays of a C type, zeroed, which the collector frees: array "int32_t" (n, { first, ... }).
--- More than 2 GiB are an error.
---@param element string
---@return fun(n: integer, values?: number[]): ffi.cdata*
local function array(element)
  local ctype, size = ffi.typeof(element .. "[?]"), ffi.sizeof(element)
  return function(n, values)
    n = tonumber(n)
    if not (n >= 0 and n * size <= MOST) then
      caller.error(("an array of %.0f x %d bytes is wanted, one can have %.0f; take it in pieces"):format(n, size,
        MOST))
    end
    if values then return ctype(n, values) end
    return ctype(n)
  end
end

return array
