-- SPDX-License-Identifier: BSD-3-Clause
-- Works around a crash of LuaJIT in coroutines. coroutine.create and coroutine.wrap start each coroutine with a Lua
-- function that stays on the coroutine's stack.
-- When LuaJIT gives up a trace, it calls the listener in ps/core/ffi.lua. For this call, LuaJIT searches the stack
-- downwards for a Lua function. The search does not stop at the end of the stack. If a coroutine's first function ended
-- in a tail call of a C function, LuaJIT would find no Lua function and crash. The program starts scripts in the same
-- way (on_floor in src/main.c).
local create, wrap = coroutine.create, coroutine.wrap

local coroutines = {}

local function all(...) return ... end
local function above(f) return function(...) return all(f(...)) end end

--- Creates a coroutine, like Lua's coroutine.create.
---@param f fun(...): ...
---@return thread
function coroutines.create(f) return create(type(f) == "function" and above(f) or f) end

--- Creates a coroutine and returns a function that resumes it, like Lua's coroutine.wrap.
---@param f fun(...): ...
---@return fun(...): ...
function coroutines.wrap(f) return wrap(type(f) == "function" and above(f) or f) end

rawset(coroutine, "create", coroutines.create)
rawset(coroutine, "wrap", coroutines.wrap)

return coroutines
