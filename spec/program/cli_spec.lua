-- SPDX-License-Identifier: BSD-3-Clause
-- The program's command line: options, arg, exit codes, script lookup. Spawns the running binary.
local paths = require "ps.paths"

---@param s string
---@return string
local function shell_quote(s) return "'" .. s:gsub("'", "'\\''") .. "'" end

local scratch

--- Runs psluajit with these arguments in the scratch folder. Returns standard output, standard error and the exit code.
---@param args string[]
---@param o? { input?: string, env?: string, cwd?: string }
local function run(args, o)
  o = o or {}
  local words = {}
  for i, a in ipairs(args) do words[i] = shell_quote(a) end
  local input = scratch .. "/input"
  local f = assert(io.open(input, "wb"))
  f:write(o.input or "")
  f:close()
  local command = ("cd %s && env -u LUA_INIT -u LUA_PATH %s %s %s <%s 2>%s/stderr; echo \"|$?\""):format(
    shell_quote(o.cwd or scratch), o.env or "", shell_quote(paths.exe), table.concat(words, " "), input, scratch)
  local p = assert(io.popen(command))
  local out, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  f = assert(io.open(scratch .. "/stderr", "rb"))
  local err = f:read("*a")
  f:close()
  return out, err, tonumber(code)
end

---@param name string
---@param text string
local function write(name, text)
  local f = assert(io.open(scratch .. "/" .. name, "wb"))
  f:write(text)
  f:close()
end

describe("psluajit's command line", function()
  setup(function()
    scratch = os.tmpname()
    os.remove(scratch)
    assert(os.execute("mkdir " .. scratch) == 0)
  end)

  teardown(function() os.execute("rm -rf " .. scratch) end)

  it("runs chunks and requires libraries in their order", function()
    assert.same({ "1\ntable\n", "", 0 }, { run { "-e", "x = 1", "-e", "print(x)", "-l", "ps.paths", "-e",
      "print(type(package.loaded['ps.paths']))" } })
    assert.same({ "2\n", "", 0 }, { run { "-eprint(2)" } })
    assert.same({ "table\n", "", 0 }, { run { "-lps.paths", "-e", "print(type(package.loaded['ps.paths']))" } })
  end)

  it("passes scripts their arguments and the options before them", function()
    write("args.lua", "for i = -3, 3 do io.write(tostring(arg[i]), ' ') end print(...)")
    local out = run { "-e", "x = 1", "args.lua", "a", "-b" }
    assert.equal(paths.exe .. " -e x = 1 args.lua a -b nil a\t-b\n", out)
    out = run { "--", "args.lua", "-e" }
    assert.equal(("nil %s -- args.lua -e nil nil -e\n"):format(paths.exe), out)
  end)

  it("reads the script from standard input", function()
    assert.same({ "7\n", "", 0 }, { run({}, { input = "print(7)" }) })
    assert.same({ "-\ta\n", "", 0 }, { run({ "-", "a" }, { input = "print(arg[0], ...)" }) })
    local _, err, code = run({}, { input = "print(" })
    assert.equal(1, code)
    assert.matches("stdin:1: unexpected symbol near '<eof>'", err, 1, true)
  end)

  it("skips a first line that starts with #", function()
    write("bang.lua", "#!/usr/bin/env psluajit\nprint('bang')")
    assert.equal("bang\n", (run { "bang.lua" }))
  end)

  it("reports an error with a traceback and exit code 1", function()
    write("bad.lua", "local function inner() error('boom') end\ninner()")
    local out, err, code = run { "bad.lua" }
    assert.same({ "", 1 }, { out, code })
    assert.matches("psluajit: bad.lua:1: boom\nstack traceback:\n", err, 1, true)
    assert.matches("bad.lua:1: in function 'inner'", err, 1, true)
    assert.matches("bad.lua:2: in main chunk", err, 1, true)
  end)

  it("shows the script's functions in a traceback, not psluajit's own", function()
    write("wrong.lua", 'local ps = require "ps"\nlocal function train()\n  local x = ps.ones { 1, 2 }\n'
      .. '  x:matmul(ps.ones { 3, 3 })\n  return x\nend\nlocal function config()\n'
      .. '  local model = ps.initialize { model_func = print, config = { bf17 = 1 } }\n  return model\nend\n'
      .. 'if arg[1] then config() else train() end\n')
    local _, err, code = run { "wrong.lua" }
    assert.equal(1, code)
    assert.matches("matmul: the inner sizes differ.*\nstack traceback:\n\t%S*wrong.lua:4: in function 'train'\n"
      .. "\t%S*wrong.lua:11: in main chunk\n\t%[C%]: at 0x%x+\n$", err)
    _, err = run { "wrong.lua", "config" }
    assert.matches("unknown key bf17.*\nstack traceback:\n\t%S*wrong.lua:8: in function 'config'\n"
      .. "\t%S*wrong.lua:11: in main chunk\n\t%[C%]: at 0x%x+\n$", err)
    _, err = run({ "wrong.lua" }, { env = "PS_TRACEBACK=all" })
    assert.matches("\n\t%[C%]: in function 'error'\n\t%S*lua/ps/%S+: in function", err)
    _, err = run { "-e", "local function f() error 'mine' end pcall(print) f()" }
    assert.matches("mine\nstack traceback:\n\t%[C%]: in function 'error'\n\t%(command line%):1: in function 'f'", err)
  end)

  it("prints error objects through __tostring", function()
    local _, err, code = run { "-e", "error(setmetatable({}, { __tostring = function() return 'told' end }))" }
    assert.equal(1, code)
    assert.matches("psluajit: told\nstack traceback", err, 1, true)
    _, err, code = run { "-e", "error({})" }
    assert.equal(1, code)
    assert.matches("psluajit: the error is a table, not a string: {}\nstack traceback", err, 1, true)
  end)

  it("stops at the first failing option", function()
    local out, _, code = run { "-e", "error('no')", "-e", "print('not reached')" }
    assert.same({ "", 1 }, { out, code })
  end)

  it("exits with the script's code and closes the state first", function()
    local gc = "p = newproxy(true) getmetatable(p).__gc = function() io.write('closed') end "
    assert.same({ "closed", "", 0 }, { run { "-e", gc } })
    assert.same({ "closed", "", 3 }, { run { "-e", gc .. "os.exit(3)" } })
    assert.same({ "closed", "", 1 }, { run { "-e", gc .. "os.exit(false)" } })
    assert.same({ "closed", "", 0 }, { run { "-e", gc .. "os.exit()" } })
    assert.same({ "closed", "", 4 }, { run { "-e", gc .. "coroutine.wrap(function() os.exit(4) end)()" } })
    assert.same({ "", "", 5 }, { run { "-e", gc .. "os.exit(5, false)" } })
    local out, _, code = run { "-e", gc .. "error('x')" }
    assert.same({ "closed", 1 }, { out, code })
  end)

  it("counts signals if a script requests that, and otherwise ends by them", function()
    local raise = 'local s, u = require "posix.signal", require "posix.unistd" '
      .. 'local function raise(n) s.kill(u.getpid(), s[n]) end '
    local catch = 'local ps = require "ps" ps.catch_interrupts() '
    local show = 'print(ps.interrupts()) io.stdout:flush() '
    for name, code in pairs { SIGHUP = 129, SIGTERM = 143, SIGINT = 130 } do
      local line = ("raise '%s' "):format(name)
      if name ~= "SIGINT" then               -- an error at the script's line unless it is caught
        local out, _, status = run { "-e", raise .. line .. "print 'on'" }
        assert.equal("", out)
        assert.equal(code, status)
      end
      local out, _, status = run { "-e", raise .. catch .. line .. show }
      assert.equal("1\n", out)
      assert.equal(0, status)
      out, _, status = run { "-e", raise .. catch .. line .. show .. line .. show }
      assert.equal(name == "SIGHUP" and "1\n1\n" or "1\n", out)        -- a lost terminal sends the signal twice
      assert.equal(name == "SIGHUP" and 0 or code, status)
    end
  end)

  it("honours LUA_INIT and LUA_PATH unless told not to", function()
    write("init.lua", "print('from file')")
    assert.equal("init\n1\n", (run({ "-e", "print(1)" }, { env = "LUA_INIT='print(\"init\")'" })))
    assert.equal("from file\n1\n", (run({ "-e", "print(1)" }, { env = "LUA_INIT=@init.lua" })))
    assert.equal("1\n", (run({ "-E", "-e", "print(1)" }, { env = "LUA_INIT='print(\"init\")'" })))
    local show = { "-e", "print(package.path:find('/somewhere', 1, true) ~= nil)" }
    assert.equal("true\n", (run(show, { env = "LUA_PATH='/somewhere/?.lua;;'" })))
    assert.equal("false\n", (run({ "-E", show[1], show[2] }, { env = "LUA_PATH='/somewhere/?.lua;;'" })))
    local _, err, code = run({ "-e", "print(1)" }, { env = "LUA_INIT='error(\"x\")'" })
    assert.equal(1, code)
    assert.matches("LUA_INIT:1: x", err, 1, true)
  end)

  it("passes -j and -O on to LuaJIT", function()
    assert.equal("false\n", (run { "-joff", "-e", "print((jit.status()))" }))
    assert.equal("true\n", (run { "-j", "on", "-e", "print((jit.status()))" }))
    assert.equal("false\n", (run { "-O0", "-e", "local s = {jit.status()} print(s[#s] == 'fuse')" }))
    local _, err, code = run { "-Onosuch" }
    assert.equal(1, code)
    assert.matches("psluajit: unknown or malformed optimization flag 'nosuch'", err, 1, true)
    _, err, code = run { "-jnosuch" }
    assert.equal(1, code)
    assert.matches("unknown luaJIT command or jit.* modules not installed", err, 1, true)
  end)

  it("lists and saves bytecode", function()
    if not pcall(require, "jit.bcsave") then
      pending("jit.bcsave is not installed")
      return
    end
    write("twice.lua", "print(... * 2)")
    assert.matches("BYTECODE", (run { "-bl", "twice.lua" }))
    local _, _, code = run { "-b", "twice.lua", "twice.raw" }
    assert.equal(0, code)
    assert.equal("42\n", (run { "twice.raw", "21" }))
  end)

  it("tells its version and its usage", function()
    assert.matches("^psluajit %d+%.%d+%.%d+ %-%- LuaJIT 2%.1", (run { "-v" }))
    assert.matches("^psluajit %d", (run { "--version" }))
    local out, err, code = run { "--help" }
    assert.same({ "", 0 }, { err, code })
    assert.matches("-e chunk", out, 1, true)
  end)

  it("prints the usage and exits with 1 for wrong options", function()
    for _, args in ipairs { { "-q" }, { "-e" }, { "-l" }, { "-vE" }, { "-e", "x=1", "-b" }, { "--nosuch" } } do
      local out, err, code = run(args)
      assert.same({ "", 1 }, { out, code })
      assert.matches("^usage: ", err)
      local wrong = #args > 1 and "'-b' must be the first option" or args[1]:find "^%-[el]" and "needs a value"
        or ("'%s' does not exist"):format(args[1])
      assert.truthy(err:find(wrong, 1, true), err)
    end
  end)

  it("shows no line of its own in the error of a script's last call", function()
    local in_forward = "local ps = require 'ps' local Net = ps.nn.class 'Net' function Net:init() self.l = "
      .. "ps.nn.Linear(4, 4) end function Net:forward(x) local y = ps.ones { 3, 7 } + x return y end ps.initialize { "
      .. "quiet = true, model_func = function() return Net() end }(ps.randn { 2, 4 })"
    for _, code in ipairs { "return require('ps').zeros('a')", "return require('ps').checkpoints.load('x', 3)",
      in_forward } do
      local _, err, code_of = run { "-e", code }
      assert.equal(1, code_of)
      assert.is_nil(err:find("(psluajit)", 1, true), err)
    end
    local path = os.tmpname()
    require("spec.check_lib").write(path, "return require('ps').zeros('a')\n")
    local _, err = run { path }
    os.remove(path)
    assert.matches("psluajit: a shape must be a list of sizes", err, 1, true)
  end)

  it("suggests the option that was probably meant", function()
    for option, meant in pairs { ["--verison"] = "does not exist; did you mean '--version'?",
      ["--hlep"] = "does not exist; did you mean '--help'?", ["--dryrun"] = "does not exist; did you mean '--dry-run'?",
      ["--hardware"] = "does not exist without --dry-run before it" } do
      local _, err, code = run { option }
      assert.equal(1, code)
      assert.matches(("'%s' %s\n"):format(option, meant), err, 1, true)
    end
  end)

  it("has the engine's modules without any path set", function()
    assert.equal("table\n", (run { "-e", "print(type(require 'ps.tensor.pretty'))" }))
    assert.equal("string\t16\n", (run { "-e", "local c = require 'ps.cdef' print(type(c.text), #c.hash)" }))
    assert.equal("string\n", (run { "-e", "print(type(require 'ps.ops_generated'))" }))
    local out = run { "-e", "local p = require 'ps.paths' print(p.root, p.exe)" }
    assert.equal(paths.root .. "\t" .. paths.exe .. "\n", out)
  end)

  it("runs the Lua of its own tree, also of a copied one, else of the one it was built from", function()
    local build = paths.exe:match("^(.*)/")
    local rooted = io.open(build .. "/psluajit.root")
    if not rooted then return pending("this psluajit is installed") end
    local relative = rooted:read("*l")
    rooted:close()
    if relative ~= "../" then return pending("the build folder is not in the tree: " .. relative) end
    local function shell(text, ...) assert.equal(0, os.execute(text:format(...))) end
    shell("mkdir -p %s/copy/build %s/alone", scratch, scratch)
    shell("cp -r '%s/lua' '%s/models' %s/copy", paths.root, paths.root, scratch)
    shell("cp -r '%s' '%s/psluajit.root' '%s/gen' %s/copy/build", paths.exe, build, build, scratch)
    shell("cp -r '%s' '%s/psluajit.root' '%s/gen' %s/alone", paths.exe, build, build, scratch)
    local show = [[ -e 'local ps = require "ps"
      print(require("ps.paths").root, debug.getinfo(require("ps.core.nearest").find).source)']]
    local function says(folder)
      local p = assert(io.popen(("env -u LUA_PATH -u LUA_INIT %s/%s/psluajit%s 2>&1"):format(scratch, folder, show)))
      local text = p:read("*a")
      p:close()
      return text
    end
    assert.equal(("%s/copy\t@%s/copy/lua/ps/core/nearest.lua\n"):format(scratch, scratch), says("copy/build"))
    assert.equal(("%s\t@%s/lua/ps/core/nearest.lua\n"):format(paths.root, paths.root), says("alone"))
  end)

  it("prefers its own modules to those of the current folder, and the user's models to its own", function()
    assert(os.execute("mkdir -p " .. scratch .. "/ps/tensor " .. scratch .. "/models") == 0)
    write("ps/tensor/pretty.lua", "return 'not ours'")
    write("models/mine.lua", "return 'mine'")
    assert.equal("table\n", (run { "-e", "print(type(require 'ps.tensor.pretty'))" }))
    assert.equal("mine\n", (run { "-e", "print(require 'models.mine')" }))
  end)

  describe("looking up scripts", function()
    local tree

    setup(function()
      -- A tree next to a copy of the program, as in an installation.
      tree = scratch .. "/tree"
      assert(os.execute(("mkdir -p %s/bin %s/share/psluajit/lua/ps %s/share/psluajit/examples %s/share/psluajit/tools")
        :gsub("%%s", tree)) == 0)
      assert(os.execute(("cp %s %s/bin/psluajit"):format(shell_quote(paths.exe), tree)) == 0)
      write("tree/share/psluajit/lua/ps/init.lua", "return {}")
      write("tree/share/psluajit/lua/ps/ops.lua", "installed ops")
      write("tree/share/psluajit/examples/hello.lua", "print('example', arg[0])")
      write("tree/share/psluajit/tools/tool.lua", "print('tool', ...)")
    end)

    local function run_installed(args)
      local exe = paths.exe
      paths.exe = tree .. "/bin/psluajit"
      local ok, out, err, code = pcall(run, args)
      paths.exe = exe
      assert(ok, out)
      return out, err, code
    end

    it("finds the installed tree relative to itself", function()
      local out = run_installed { "-e", "local p = require 'ps.paths' print(p.installed, p.root, p.gen)" }
      assert.equal(("true\t%s/share/psluajit\tnil\n"):format(tree), out)
      assert.equal("installed ops\n", (run_installed { "-e", "print(io.open(require 'ps.ops_generated'):read())" }))
    end)

    it("finds examples and tools from any folder", function()
      assert.equal(("example\t%s/share/psluajit/examples/hello.lua\n"):format(tree), (run_installed { "hello.lua" }))
      assert.equal("tool\tx\n", (run_installed { "tool.lua", "x" }))
      assert.equal("tool\tx\n", (run_installed { "tools/tool.lua", "x" }))
    end)

    it("prefers a script of the current folder", function()
      write("hello.lua", "print('mine')")
      assert.equal("mine\n", (run_installed { "hello.lua" }))
    end)

    it("names the places that it searched", function()
      local out, err, code = run_installed { "missing.lua" }
      assert.same({ "", 1 }, { out, code })
      assert.matches("cannot open missing.lua: No such file or directory", err, 1, true)
      for _, place in ipairs { "/examples/missing.lua", "/tools/missing.lua", "/missing.lua" } do
        assert.matches(tree .. "/share/psluajit" .. place, err, 1, true)
      end
      local _, other = run_installed { "./hello2.lua" }
      assert.is_nil(other:find("looked for", 1, true))
    end)

    it("does not run a folder as a script", function()
      local _, err, code = run_installed { "./tree" }
      assert.equal(1, code)
      assert.matches("cannot open ./tree: Is a directory", err, 1, true)
    end)
  end)
end)
