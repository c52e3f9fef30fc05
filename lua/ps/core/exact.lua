-- SPDX-License-Identifier: BSD-3-Clause
-- Makes public functions reject surplus arguments. Lua would silently drop an argument that only PyTorch's function has
-- (dtype, norm_type, rounding_mode). A function with `...` checks its arguments itself.
local caller = require "ps.core.caller"

local exact = {}

-- The wrapped function of each wrapper. The keys are the wrappers.
local inner = setmetatable({}, { __mode = "k" })

--- Returns the function that a wrapper calls. Returns any other function unchanged.
---@param fn function
---@return function
function exact.inner(fn) return inner[fn] or fn end

-- Returns the names of a function's parameters. The self of a method is left out.
local function parameters(fn, first)
  local names = {}
  for i = first, debug.getinfo(fn, "u").nparams do names[#names + 1] = debug.getlocal(fn, i) end
  return table.concat(names, ", ")
end

local NONE = { set_to_none = "boolean" }
local EXTRA = 3                                            -- number of surplus arguments that are checked

-- Returns the code of a wrapper for a function of n parameters. The wrapper's parameters have names, because `...`
-- would add a trace. Each wrapper has its own code, so that LuaJIT compiles a trace for each function. The wrapper of a
-- method rejects a first argument that cannot be its self. A self is a tensor or another C object, or a table with a
-- metatable.
local codes = { [true] = {}, [false] = {} }
local SELF = "local kind = type(a1) "
  .. "if kind ~= 'cdata' and (kind ~= 'table' or getmetatable(a1) == nil) then alone() end"
local function code(n, method)
  local made = codes[method]
  if made[n] then return made[n] end
  local own, all, any = {}, {}, {}
  for i = 1, n + EXTRA do
    all[i] = "a" .. i
    if i <= n then own[i] = all[i] else any[#any + 1] = all[i] .. " ~= nil" end
  end
  local self = method and SELF or ""
  local text = ("local fn, refuse, alone, type, getmetatable = ... "
    .. "return function(%s) if %s then refuse(%s) end %s return fn(%s) end"):format(table.concat(all, ", "),
    table.concat(any, " or "), table.concat(all, ", ", n + 1), self, table.concat(own, ", "))
  made[n] = string.dump(loadstring(text, debug.getinfo(1, "S").source))
  return made[n]
end

--- Returns a wrapper of fn that raises an error if it gets more arguments than fn has parameters. Returns functions
--- with `...` and C functions unchanged.
---@param fn function
---@param call string how fn is called, such as "F.gelu" or "t:sum"
---@param method? boolean whether fn's first parameter is self
---@return function
function exact.of(fn, call, method)
  local info = debug.getinfo(fn, "uS")
  if info.isvararg or info.what == "C" or inner[fn] then return fn end
  local skip = method and 1 or 0
  local takes = math.max(info.nparams, skip)               -- a method may be declared without its self
  local function refuse(...)
    for i = 1, EXTRA do
      local value = select(i, ...)
      if value ~= nil then caller.more(call, parameters(fn, 1 + skip), value, takes + i - skip) end
    end
  end
  local wrapper = loadstring(code(takes, method == true))(fn, refuse, function() caller.no_self(call) end, type,
    getmetatable)
  inner[wrapper], caller.calls[fn] = fn, caller.calls[fn] or call
  return wrapper
end

-- The number of arguments that a function accepts. It is unlimited for a function with `...`.
local most = setmetatable({}, { __mode = "k", __index = function(self, fn)
  local info = debug.getinfo(exact.inner(fn), "uS")
  self[fn] = (info.isvararg or info.what == "C") and math.huge or info.nparams
  return self[fn]
end })

--- Makes a function with `...` accept as many arguments as the function that it calls.
---@param wrapper function
---@param fn function
---@return function wrapper
function exact.like(wrapper, fn)
  most[wrapper] = most[fn]
  return wrapper
end

--- Raises an error if `...` has more arguments than a method has parameters. `...` excludes self, and self is not
--- counted as a parameter.
---@param fn function the method
---@param describe fun(object: any): string, string? returns two texts for an error: the call, and what to write
--- instead
---@param object any argument of describe
---@param ... any
function exact.arguments(fn, describe, object, ...)
  local n = select("#", ...)
  local takes = math.max(0, most[fn] - 1)
  if n <= takes then return end
  for i = takes + 1, n do
    local value = select(i, ...)
    if value ~= nil then
      local call, hint = describe(object)
      caller.more(call, parameters(exact.inner(fn), 2), value, i, hint)
    end
  end
end

--- Checks the argument of PyTorch's zero_grad(set_to_none). Gradients are always dropped. PyTorch's default, true, also
--- drops them.
---@param value any true, { set_to_none = true } or nil; any other value raises an error
---@param call string
function exact.set_to_none(value, call)
  if type(value) == "table" then value = caller.options(value, call, NONE).set_to_none end
  if value ~= nil then caller.typed(value, "boolean", call .. ": set_to_none") end
  if value == false then caller.error(call .. ": set_to_none is false; gradients are always dropped, not set to 0") end
end

--- Returns a table with the functions of the table t. exact.of wraps each function when the function is first used.
---@param t table<any, any>
---@param prefix string "t:"
---@param method? boolean
---@return table<any, any>
function exact.view(t, prefix, method)
  return setmetatable({}, { __index = function(self, key)
    local value = t[key]
    if type(value) == "function" then value = exact.of(value, prefix .. tostring(key), method) end
    if value ~= nil then self[key] = value end
    return value
  end })
end

--- Replaces each function of a table by its wrapper from exact.of.
---@param t table<any, any>
---@param prefix string "F."
---@param method? boolean
---@return table<any, any> t
function exact.all(t, prefix, method)
  for key, value in pairs(t) do
    if type(value) == "function" and type(key) == "string" and not key:find "^__" then
      t[key] = exact.of(value, prefix .. key, method)
    end
  end
  return t
end

return exact
