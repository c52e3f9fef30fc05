-- SPDX-License-Identifier: BSD-3-Clause
-- Makes coroutine.create and coroutine.wrap start a coroutine with a Lua function that stays on its stack. If LuaJIT
-- gives up a trace, it looks for a Lua function from the running one downwards for its trace event, to which
-- ps/core/ffi.lua listens, and does not stop at the end of the stack. A coroutine whose first function ends in a tail
-- call of a C function would crash LuaJIT. The program does the same for scripts (on_floor in src/main.c).
local create, wrap = coroutine.create, coroutine.wrap

local coroutines = {}

local function all(...) return ... end
local function above(f) return function(...) return all(f(...)) end end

--- Lua's coroutine.create.
---@param f fun(...): ...
---@return thread
function coroutines.create(f) return create(type(f) == "function" and above(f) or f) end

--- Lua's coroutine.wrap.
---@param f fun(...): ...
---@return fun(...): ...
function coroutines.wrap(f) return wrap(type(f) == "function" and above(f) or f) end

rawset(coroutine, "create", coroutines.create)
rawset(coroutine, "wrap", coroutines.wrap)

return coroutines
