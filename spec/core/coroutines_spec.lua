-- SPDX-License-Identifier: BSD-3-Clause
-- Coroutines and scripts whose first function ends in a tail call of a C function (ps/core/coroutines.lua, on_floor in
-- src/main.c). LuaJIT crashes if it gives up a trace there and a function listens to its trace events.
local check = require "spec.check_lib"
local paths = require "ps.paths"

local function run(text, options)
  local name = os.tmpname()
  check.write(name, text)
  local p = assert(io.popen(("env -u LUA_INIT '%s' %s '%s' 2>&1; echo \"|$?\""):format(paths.exe, options or "", name)))
  local said, code = p:read("*a"):match "^(.*)|(%d+)\n$"
  p:close()
  os.remove(name)
  return said, tonumber(code), name
end

local TAIL = [[
local ffi = require "ffi"
require "ps"
local made, finalizer = ffi.typeof "struct { int a; }", function() end
function made_with_finalizer() return ffi.gc(made(), finalizer) end
]]

describe("a tail call of a C function at the bottom of a stack", function()
  it("does not crash a coroutine in which LuaJIT gives up a trace", function()
    for _, start in ipairs { "coroutine.wrap(made_with_finalizer)()",
      "assert(coroutine.resume(coroutine.create(made_with_finalizer)))" } do
      local said, code = run(("%sfor _ = 1, 300 do %s end\nprint 'whole'"):format(TAIL, start))
      assert.equal("whole\n0", said .. code)
    end
  end)

  it("does not crash statements of the prompt", function()
    local name = os.tmpname()
    check.write(name, TAIL:gsub("\n", " ") .. "\n" .. ("made_with_finalizer()\n"):rep(300) .. "'who' .. 'le'\n")
    local said = run("", ("-i <'%s'"):format(name))
    os.remove(name)
    assert.truthy(said:find("\"whole\"\n", 1, true), said:sub(-200))
  end)

  it("shows no function of the program in tracebacks", function()
    for _, first in ipairs { "", "require 'ps'\n" } do
      local said, code = run(first .. "local function f() error 'here' end\nf()\n")
      assert.equal(1, code)
      assert.truthy(said:find("in function 'f'", 1, true), said)
      assert.falsy(said:find("(psluajit)", 1, true), said)
      assert.falsy(said:find("coroutines.lua", 1, true), said)
    end
  end)
end)

describe("coroutine.create and coroutine.wrap", function()
  it("pass arguments, results and errors", function()
    local co = coroutine.create(function(...)
      local n = select("#", ...)
      local got = { coroutine.yield(n, nil) }
      return #got, nil, nil
    end)
    assert.same({ n = 3, true, 3 }, { n = select("#", coroutine.resume(co, nil, 1, nil)), true, 3 })
    local function counted(...) return select("#", ...), ... end
    assert.same({ 4, true, 2 }, { counted(coroutine.resume(co, 7, 8)) })
    assert.equal("dead", coroutine.status(co))
    local next_one = coroutine.wrap(function() coroutine.yield(1) error({ "mine" }, 0) end)
    assert.equal(1, next_one())
    local ok, why = pcall(next_one)
    assert.same({ false, { "mine" } }, { ok, why })
    assert.falsy(pcall(coroutine.wrap, 3))
    assert.falsy(pcall(coroutine.create))
  end)
end)
