-- SPDX-License-Identifier: BSD-3-Clause
-- Hints in errors for habits of Python users: syntax that Lua lacks, undefined names, tensors used as numbers, and
-- misspelt fields of modules.
local check = require "spec.check_lib"
local habits = require "ps.prompt.habits"
local paths = require "ps.paths"
local ps = require "ps"
local nn, fails = ps.nn, check.fails

-- Returns what psluajit prints for a script on standard error.
local function said(text)
  local script = os.tmpname()
  check.write(script, text)
  local p = assert(io.popen(("env -u LUA_INIT '%s' %s 2>&1 >/dev/null"):format(paths.exe, script)))
  local out = p:read "*a"
  p:close()
  os.remove(script)
  return out
end

describe("a syntax error", function()
  local function hint(text)
    local _, message = loadstring(text, "=s")
    assert.is_string(message)
    return habits.hinted(message, text):match "\n  (.*)$"
  end

  it("says what to write instead of another language's syntax", function()
    local rows = { { "if x != 1 then end", "~=" }, { "import torch", 'require "ps"' },
      { "from ps import nn", 'require "ps"' }, { "x += 1", "x = x + y" }, { "x *= 2", "x = x * y" },
      { "x++", "x = x +" }, { "if a then\nelif b then\nend", "elseif" },
      { "if a then\n x=1\nelse if b then\n x=2\nend\n", "line 3 has else if" },
      { "x = 1 # comment", "begin with --" }, { "y = x ** 2", "^" }, { "y = x // 2", "math.floor" },
      { "def f(x):\n  return x", "local function" }, { "class Net(nn.Module):\n pass", "ps.nn.class" },
      { "for i in range(10):\n  print(i)", "line 1: Lua has no blocks" }, { "f = lambda x: x", "function(x)" },
      { "y = a if b else c", "c and a or b" }, { "if a && b then end", "write and" },
      { "if a is None then end", "== nil" },
      { "y = x[1:2]", "t[{ { 1, 3 }" }, { 'd = {"a": 1}', "{ a = 1" }, { "f(x, a=1)", "named arguments" },
      { "l = [1, 2]", "{ 1, 2, 3 }" }, { "while x do\n continue\nend", "line 2: Lua has no continue" },
      { "while x do\n\n pass\n\n -- note\nend", "line 3: Lua needs no pass" }, { "const x = 1", "local x" },
      { "c = a @ b", "a:matmul(b)" }, { "a @ b", "a:matmul(b)" }, { "print(x, end='')", "io.write" },
      { "help ps", "write help(x)" },
      { "if x = 1 then end", "==" }, { "raise ValueError('x')", "error(" }, { "function f(x) { return x }", "braces" } }
    for _, row in ipairs(rows) do
      local found = hint(row[1])
      assert.truthy(found and found:find(row[2], 1, true), row[1] .. ": " .. tostring(found))
    end
  end)

  it("has no hint for texts in strings and comments, and for plain mistakes", function()
    for _, text in ipairs { "x = 'a != b' y z", "x y -- a != b", "local a = { 1, 2", "x = #t y z", "end",
      "x = y and z or" } do
      assert.is_nil(hint(text), text)
    end
  end)

  it("has a hint in scripts, in -e, in modules and at the prompt", function()
    local script = "local x = 1\nif x != 2 then\nend\n"
    assert.matches(":2: 'then' expected near '!'\n  the operator for inequality is ~=\n", said(script), 1, true)
    local base = os.tmpname()
    check.write(base .. "_bad.lua", script)
    local folder, name = base:match "^(.*)/([^/]*)$"
    local out = said(("package.path = '%s/?.lua;' .. package.path\nrequire '%s_bad'\n"):format(folder, name))
    os.remove(base)
    os.remove(base .. "_bad.lua")
    assert.matches("near '!'\n  the operator for inequality is ~=\nstack traceback:", out, 1, true)
    local p = assert(io.popen(("echo 'x += 1' | env -u LUA_INIT '%s' -i 2>&1"):format(paths.exe)))
    assert.matches("near '+'\n  Lua has no +=", p:read "*a", 1, true)
    p:close()
    p = assert(io.popen(("env -u LUA_INIT '%s' -e 'x += 1' 2>&1"):format(paths.exe)))
    assert.matches("near '+'\n  Lua has no +=", p:read "*a", 1, true)
    p:close()
  end)
end)

describe("an undefined name", function()
  it("has a hint before the traceback", function()
    local hint = "\n  write local ps = require \"ps\" at the beginning of the script\nstack traceback:"
    assert.matches(hint, said "local x = ps.ones { 1 }\n", 1, true)
    for text, part in pairs { ["len {}"] = "write #x", ["local t = {} t:append(1)"] = "table.insert(list, x)",
      ["pirnt(1)"] = "did you mean print?", ["print(f'{x}')"] = ":format(x)", ["math.max({})"] = "expected, got table",
      ["local ps = require 'ps' nn.Linear(2, 2)"] = "local nn = ps.nn",
      ["local ps = require 'ps' local N = ps.nn.class 'N' function N:f() return self.x end N().f()"] = "with a colon",
      ["local x = 'a' + 'b'"] = "joined by ..", ["local x, y = 'a' print(x + 1, y)"] = "joined by ..",
      ["local ps = require 'ps' print(ps.ones({ 1 }).shape[1])"] = "call it, as in x:shape()",
      ["local ps = require 'ps' local t = { f = print } return t.f + 1"] = "f is a function or a method",
      ["for x in { 1 } do print(x) end"] = "for i, x in ipairs(list) do",
      ["local ps = require 'ps' math.max(ps.ones { 1 }, 2)"] = "if it is a tensor, t:item()" } do
      assert.matches(part, said(text), 1, true)
    end
    local unknown = said "modell()"
    assert.is_nil(unknown:find("\n  %S"), unknown)
  end)

  it("is not searched for in long messages", function()
    local long = ("x"):rep(1e6)
    local began = os.clock()
    assert.equal(long, habits.hinted(long))
    assert.truthy(os.clock() - began < 1)
  end)

  it("is an error if it is True or False, unless the script defines it", function()
    local globals = getmetatable(_G)
    assert.is_table(globals)
    assert.matches(":2: True is undefined, so it would be nil: write true", said "require 'ps'\nif True then end", 1,
      true)
    assert.equal("", said "require 'ps'\nFalse = 1\nassert(False == 1 and None == nil and Other == nil)")
    assert.equal("", said "setmetatable(_G, { __index = { True = 3 } })\nrequire 'ps'\nassert(True == 3)")
  end)
end)

describe("a tensor used as a number", function()
  it("is an error that names t:item()", function()
    local t = ps.ones { 1 }
    for _, fn in ipairs { function() return t < 1 end, function() return 1 < t end, function() return t <= 1 end,
      function() return t >= 1 end, function() return t < t end, function() return "loss " .. t end,
      function() return t .. 1 end } do
      fails(fn, "t:item() is the number of its only element")
    end
    assert.is_false(t == 1)
    assert.equal(t, t)
  end)
end)

describe("a misspelt field of a module", function()
  it("gets a suggestion in the error, but no error of its own", function()
    local text = [[
local ps = require "ps"
local Net = ps.nn.class("Net")
function Net:init() self.fc1 = ps.nn.Linear(2, 2) end
function Net:forward(x)
  if self.bias then return x end
  return %s
end
local net = Net()
%s
]]
    local out = said(text:format("self.fcl(x)", "net(ps.ones { 1, 2 })"))
    assert.matches("attempt to call field 'fcl' (a nil value); did you mean self.fc1?\nstack", out, 1, true)
    out = said(text:format("self.fcl.weight", "net(ps.ones { 1, 2 })"))
    assert.matches("attempt to index field 'fcl' (a nil value); did you mean self.fc1?\nstack", out, 1, true)
    out = said(text:format("x", "net:parmeters()"))
    assert.matches("call method 'parmeters' (a nil value); did you mean net:parameters?\nstack", out, 1, true)
    out = said(text:format("self.unlike_any(x)", "net(ps.ones { 1, 2 })"))
    assert.matches("(a nil value)\nstack", out, 1, true)
    assert.is_nil(nn.Linear(2, 2).bais)
  end)
end)
