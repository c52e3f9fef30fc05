-- SPDX-License-Identifier: BSD-3-Clause
-- LuaJIT can compile each function on the path of an op by itself. After about ten failed attempts it refuses the
-- function for good, and with it every loop and function that calls it, so that a script's small ops are interpreted.
local ps = require "ps"
local native = require "ps.core.ffi"
local jutil, vmdef = require "jit.util", require "jit.vmdef"

-- Returns the name of a function's first instruction: IFUNCF if LuaJIT refuses the function, JFUNCF if it has compiled
-- it, else FUNCF.
local function header(fn)
  local code = bit.band(jutil.funcbc(fn, 0), 0xff)
  return (vmdef.bcnames:sub(code * 6 + 1, code * 6 + 6):gsub(" ", ""))
end

-- Adds the functions that fn calls, as far as they are upvalues, to `list` with their places as keys.
local function gather(list, fn)
  local info = debug.getinfo(fn, "S")
  local place = ("%s:%d"):format(info.short_src:match "[^/]*$", info.linedefined)
  if info.what ~= "Lua" or list[place] then return end
  list[place] = fn
  for i = 1, 60 do
    local name, value = debug.getupvalue(fn, i)
    if not name then return end
    if type(value) == "function" then gather(list, value) end
  end
end

describe("functions on the path of an op", function()
  it("are compiled although no loop around them is", function()
    if not jit.status() then return pending("the compiler is off") end
    local x, y = ps.randn { 3, 4 }, ps.randn { 3, 4 }
    local function each() return ((x * 2 + y / 3):square():sum(-1) + x:mean(-1, true):reshape(-1) * x:size(0)):sum() end
    local function run() for _ = 1, 15000 do each() end end
    jit.off(run)                                           -- otherwise one trace of the loop would have all functions
    run()
    local list, refused = {}, {}
    gather(list, each)
    for _, name in ipairs { "add", "mul", "affine", "div", "sum", "mean", "reshape" } do
      gather(list, native.ops[name])
    end
    for _, name in ipairs { "add", "mul", "div", "square", "sum", "mean", "reshape", "size", "numel" } do
      gather(list, require("ps.tensor").T[name])
    end
    for place, fn in pairs(list) do if header(fn) == "IFUNCF" then refused[#refused + 1] = place end end
    table.sort(refused)
    assert.equal("", table.concat(refused, ", "))
    assert.equal("JFUNCF", header(native.own))             -- header() recognizes a compiled function
  end)
end)
