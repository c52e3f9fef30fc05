-- SPDX-License-Identifier: BSD-3-Clause
-- Errors of a script's mistakes begin with the script's position or with none, never with one in psluajit's own files
-- (lua/ps/core/caller.lua). The spec tries wrong arguments of all public parts, each as a line of a script.
local ps = require "ps"
local caller = require "ps.core.caller"
local check_lib = require "spec.check_lib"
local paths = require "ps.paths"
local lfs = require "lfs"
local wrong = require "spec.wrong_calls"

-- Runs a line as a script. Returns its error.
local function try(line, names)
  local fn = assert(loadstring("local ps, gpt2, x, F, nn, optim, sched, TEXT = ...\n" .. line, "@wrong.lua"))
  local ok, problem = xpcall(function() return fn(unpack(names, 1, 8)) end, function(problem) return problem end)
  assert(not ok, "no error was raised by: " .. line)
  return tostring(problem)
end

-- Returns whether a message begins with a position in a file other than the script.
local function misplaced(text)
  local file = text:match("^([^\n:]*):%d+: ")
  return file ~= nil and file ~= "wrong.lua"
end

describe("a traceback", function()
  it("has no C function whose caller Lua omits", function()
    local own = "\t" .. paths.root .. "/lua/ps/batch.lua:3: in function 'f'\n"
    assert.equal("x\nstack traceback:\n\ta.lua:1: in main chunk\n\t[C]: at 0x1", caller.trace(
      "x\nstack traceback:\n" .. own .. "\t[C]: in function 'pcall'\n\t...\n" .. own
      .. "\ta.lua:1: in main chunk\n\t[C]: at 0x1"))
  end)
end)

describe("errors of a script's mistakes", function()
  local text, names

  setup(function()
    text = os.tmpname()
    local f = assert(io.open(text, "wb"))
    f:write(("some text to read\n"):rep(40))
    f:close()
    names = { ps, require "models.gpt2", ps.randn { 2, 3 }, ps.F, ps.nn, ps.optim, ps.sched, text }
  end)

  teardown(function()
    os.remove(text)
    os.remove(text .. ".bin")
  end)

  it("begin with the script's position or with none", function()
    local count = 0
    for line in wrong.calls:gmatch("[^\n]+") do
      local said = try(line, names)
      assert.falsy(misplaced(said), line .. "\n" .. said)
      count = count + 1
    end
    assert.truthy(count > 200)
  end)

  it("name the call and the argument if Lua itself would fail, hang or round a number", function()
    for row in wrong.named:gmatch("[^\n]+") do
      local line, words = row:match("^(.-) | (.*)$")
      local said = try(line, names)
      assert.truthy(said:find("^wrong%.lua:2: "), line .. "\n" .. said)
      for word in (words .. " | "):gmatch("(.-) | ") do
        assert.truthy(said:find(word, 1, true), ("%s: '%s' is missing in: %s"):format(line, word, said))
      end
    end
  end)

  it("do so for wrong configurations", function()
    for settings in wrong.settings:gmatch("[^\n]+") do
      local said = try("ps.initialize { model_func = function() return nn.Linear(3, 4) end, quiet = true, "
        .. settings .. " }", names)
      assert.falsy(misplaced(said), settings .. "\n" .. said)
    end
  end)

  it("name the calling line, at any depth", function()
    local said = try("local function mine()\n  local l = ps.nn.Linear(3, 4, { dtype = 'nope' })\n  return l\n"
      .. "end\nlocal y = mine()\nreturn y", names)
    assert.equal("wrong.lua:3: no such type: nope (there are fp32, bf16, fp16, fp64, int32, int64, uint8, bool)", said)
  end)

  it("keep the position of errors that a script raises", function()
    assert.equal("wrong.lua:3: mine", try("ps.scope(function()\n  error('mine')\nend)", names))
    assert.equal("mine", try("ps.no_grad(function() error('mine', 0) end)", names))
  end)

  it("keep tables and other values", function()
    local thrown = {}
    local ok, problem = pcall(caller.error, thrown)
    assert.falsy(ok)
    assert.equal(thrown, problem)
    assert.equal(thrown, caller.at(thrown))
    assert.equal("no place: x", caller.at("no place: x"))
    assert.equal("mine.lua:3: x", caller.at("mine.lua:3: x"))
  end)

  it("are moved to the script if Lua itself raised them in psluajit's files", function()
    for _, file in ipairs { paths.root .. "/lua/ps/tensor.lua", paths.root .. "/models/gpt2.lua",
      "...a/long/name/lua/ps/tensor.lua" } do
      local said = caller.at(file .. ":12: attempt to index a nil value")
      assert.matches("^%.*[^:]*caller_spec.lua:%d+: attempt to index a nil value$", said)
    end
  end)

  it("are moved in a program and at the prompt, which show the traceback on demand", function()
    local script = "local ps = require 'ps'\nps.data.windows { shards = { 3 }, batch = 1, seq = 2 }\n"
    local said = check_lib.run("", script)
    assert.matches("lua_%w+:2: a shard must be a path", said)
    assert.is_nil(said:find("in function", 1, true), said)
    assert.matches("in function 'windows'", check_lib.run("PS_TRACEBACK=all", script), 1, true)
    script = "local ps = require 'ps'\nps.train.evaluate({}, function() end)\n"                 -- calls a nil
    said = check_lib.run("PS_TRACEBACK=all", script)
    assert.matches("lua_%w+:2: attempt to call method 'apply'", said)
    assert.matches("lua/ps/train/init.lua", said, 1, true)
    local p = assert(io.popen(("echo 'x = ps.train.evaluate({}, print)' | timeout 300 '%s' -i 2>&1"):format(paths.exe)))
    said = p:read("*a")
    p:close()
    assert.matches("> stdin:1: attempt to call method 'apply'", said, 1, true)
  end)

  it("do not affect valid calls", function()
    assert.truthy(lfs.attributes(text))
    assert.same({ 2 }, ps.tensor({ 1, 2 }):shape())
    assert.equal(3, ps.add(ps.tensor(1), 2):item())
  end)
end)
