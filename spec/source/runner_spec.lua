-- SPDX-License-Identifier: BSD-3-Clause
-- spec/run.lua counts every given file, alone and with others at the same time: files that pass, fail, skip or crash.
-- tools/test.sh lists the skipped tests.
local paths = require "ps.paths"
local check = require "spec.check_lib"
local ranks = require "spec.ranks_lib"

local FILES = {
  passes = 'it("a", function() end) it("b", function() end)',
  fails = 'it("c", function() error "a word of its own" end) it("d", function() end)',
  skips = 'it("e", function() pending "not here" end)',
  skips_more = 'for i = 1, 3 do it("h" .. i, function() pending(i < 3 and "no such program" or "not here") end) end',
  crashes = 'it("f", function() require("posix.signal").kill(require("posix.unistd").getpid(), 9) end)',
  ["it's long"] = 'it("g", function() error(("y"):rep(200000)) end)',
}

describe("the runner of specs", function()
  local folder
  setup(function()
    folder = ranks.folder()
    for name, text in pairs(FILES) do check.write(("%s/%s_spec.lua"):format(folder, name), text) end
  end)
  teardown(function() ranks.remove(folder) end)

  for jobs = 1, 3 do
    it("counts the results of each file, " .. jobs .. " at a time", function()
      local files = {}
      for name in pairs(FILES) do files[#files + 1] = ('"%s/%s_spec.lua"'):format(folder, name) end
      local p = assert(io.popen(("'%s' '%s/spec/run.lua' --jobs %d %s 2>&1; echo \"|$?\""):format(paths.exe, paths.root,
        jobs, table.concat(files, " "))))
      local text = p:read "*a"
      p:close()
      assert.truthy(text:find("busted: 3 passed, 3 failed, 4 skipped\n|1\n", 1, true), text:sub(-500))
      assert.truthy(text:find("a word of its own", 1, true))
      assert.truthy(text:find(("FAILED: %s/crashes_spec.lua did not run to its end"):format(folder), 1, true))
    end)
  end

  it("ends a file that runs longer than PS_TEST_LIMIT_S seconds", function()
    check.write(folder .. "/hangs_spec.lua", 'it("i", function() while true do end end)')
    local out, code = check.shell(("cd '%s' && PS_TEST_LIMIT_S=2 '%s' '%s/spec/run.lua' hangs_spec.lua passes_spec.lua "
      .. "2>&1"):format(folder, paths.exe, paths.root))
    assert.equal(1, code, out)
    assert.matches("FAILED: hangs_spec.lua did not run to its end", out, 1, true)
    assert.matches("busted: 2 passed, 1 failed, 0 skipped", out, 1, true)
  end)

  it("gives the specs an empty cache folder of their own, and removes it", function()
    check.write(folder .. "/caches_spec.lua", [[it("h", function()
      local ps, mine = require "ps", os.getenv "XDG_CACHE_HOME"
      assert.is_nil((require("lfs").attributes(mine .. "/psluajit")))
      local p = assert(io.popen("cd FOLDER && printf '{\"text\": 1}\\n' | gzip >t.jsonl.gz"))
      p:close()
      assert.equal(1, #ps.data.table "FOLDER/t.jsonl.gz")
      assert.equal("directory", require("lfs").attributes(mine .. "/psluajit/unpacked", "mode"))
      local f = assert(io.open("FOLDER/cache", "w"))
      f:write(mine)
      f:close()
    end)]])
    local path = folder .. "/caches_spec.lua"
    check.write(path, (check.read(path):gsub("FOLDER", folder)))
    local out, code = check.shell(("'%s' '%s/spec/run.lua' '%s' 2>&1"):format(paths.exe, paths.root, path))
    assert.equal(0, code, out)
    local cache = check.read(folder .. "/cache")
    assert.is_nil(require("lfs").attributes(cache))
    assert.are_not.equal(os.getenv "XDG_CACHE_HOME", cache)
  end)

  it("runs the tests whose names have the words of --only", function()
    local function run(arguments)
      local p = assert(io.popen(("cd '%s' && '%s' '%s/spec/run.lua' %s 2>&1; echo \"|$?\""):format(folder, paths.exe,
        paths.root, arguments)))
      local text = p:read "*a"
      p:close()
      return text
    end
    assert.matches("busted: 1 passed, 0 failed, 0 skipped\n|0\n$", run "--only a passes_spec.lua")
    assert.matches("busted: 0 passed, 1 failed, 0 skipped\n|1\n$", run "--only c passes_spec.lua fails_spec.lua")
    for _, files in ipairs { "passes_spec.lua", "passes_spec.lua fails_spec.lua" } do
      local text = run("--only nowhere " .. files)
      assert.matches("no test of these specs has 'nowhere' in its name\n", text)
      assert.matches("|1\n$", text)
    end
    assert.matches("%-%-only needs words", run "passes_spec.lua --only")
  end)

  it("has specs that README.md lists, each in its folder, and check.txt names one in every folder", function()
    local listed, missing, folder_of, checked = {}, {}, {}, {}
    local at
    for line in check.read(paths.root .. "/spec/README.md"):gmatch "[^\n]+" do
      local in_folder, name = line:match "^| (%l*) ?| `([%w_]+)` |"
      if name then
        if in_folder ~= "" then at = in_folder end
        listed[at .. "/" .. name] = true
      end
    end
    local p = assert(io.popen(("'%s' '%s/spec/run.lua' --list"):format(paths.exe, paths.root)))
    for path in p:lines() do
      local in_folder, name = path:match "spec/(%l+)/([%w_]+)_spec%.lua$"
      if not listed[in_folder .. "/" .. name] then missing[#missing + 1] = path end
      listed[in_folder .. "/" .. name] = nil
      folder_of[name], checked[in_folder] = in_folder, checked[in_folder] or false
    end
    p:close()
    assert.same({}, missing)
    assert.is_nil(next(listed))
    for name in check.read(paths.root .. "/spec/check.txt"):gsub("#[^\n]*", ""):gmatch "[%w_]+" do
      checked[folder_of[name]] = true
    end
    for name, has in pairs(checked) do assert.truthy(has, name) end
    for _, list in ipairs { "check", "one_thread", "waits" } do
      for name in check.read(("%s/spec/c/%s.txt"):format(paths.root, list)):gsub("#[^\n]*", ""):gmatch "[%w_]+" do
        assert(io.open(("%s/spec/c/%s.c"):format(paths.root, name)), name):close()
      end
    end
  end)

  it("refuses a list with a name that is not a spec", function()
    local tree = folder .. "/lists"
    assert(os.execute(("mkdir -p '%s/spec/a' && cp '%s/spec/run.lua' '%s/spec/'"):format(tree, paths.root, tree)) == 0)
    check.write(tree .. "/spec/a/there_spec.lua", 'it("a", function() end)')
    for _, list in ipairs { "waits.txt", "computing.txt", "check.txt" } do
      check.write(tree .. "/spec/" .. list, "there\n")
    end
    local function run()
      local p = assert(io.popen(("'%s' '%s/spec/run.lua' --list 2>&1"):format(paths.exe, tree)))
      local text = p:read "*a"
      p:close()
      return text
    end
    assert.matches("spec/a/there_spec.lua\n$", run())
    check.write(tree .. "/spec/computing.txt", "# moved\ngone far\n")
    assert.matches("computing.txt names 'gone', and there is no such spec", run())
  end)

  it("runs specs of waits.txt beside the others, one by one", function()
    local tree = folder .. "/lanes"
    assert(os.execute(("mkdir -p '%s/spec/a' && cp '%s/spec/run.lua' '%s/spec/'"):format(tree, paths.root, tree)) == 0)
    local begin = ([[
      local function is(name) return (io.open("%s/" .. name)) ~= nil end
      local function begin(name) io.open("%s/" .. name, "w"):close() end
      local function wait(name)
        for _ = 1, 6000 do if is(name) then return end os.execute "sleep 0.01" end
        error(name .. " did not begin at the same time")
      end
    ]]):format(tree, tree)
    local function spec(name, body)
      check.write(("%s/spec/a/%s_spec.lua"):format(tree, name), ("%s it(%q, function() %s end)"):format(begin, name,
        body))
    end
    spec("other", 'begin "other" wait "first"')
    spec("first", 'begin "first" wait "other" assert(not is "second")')
    spec("second", 'begin "second"')
    check.write(tree .. "/spec/waits.txt", "# comment\nfirst\nsecond\n")
    for _, list in ipairs { "computing.txt", "check.txt" } do check.write(tree .. "/spec/" .. list, "") end
    local p = assert(io.popen(("'%s' '%s/spec/run.lua' --jobs 2 2>&1"):format(paths.exe, tree)))
    local text = p:read "*a"
    p:close()
    assert.matches("busted: 3 passed, 0 failed, 0 skipped\n$", text)
  end)

  it("lists the skipped tests, by reason, in the lines before the last", function()
    local build = paths.exe:match "^(.*)/"
    local p = assert(io.popen(("cd '%s' && CI= PS_TEST_ISA=none tools/test.sh '%s' '%s/skips_spec.lua' "
      .. "'%s/passes_spec.lua' '%s/skips_more_spec.lua' 2>&1"):format(paths.root, build, folder, folder, folder)))
    local text = p:read "*a"
    p:close()
    assert.matches("\n4 skipped:\n +2 not here\n +2 no such program\n2 passed, 0 failed\n$", text)
    p = assert(io.popen(("cd '%s' && CI= PS_TEST_ISA=none tools/test.sh '%s' '%s/passes_spec.lua' 2>&1"):format(
      paths.root, build, folder)))
    text = p:read "*a"
    p:close()
    assert.not_matches("skipped:", text)
    assert.matches("\n2 passed, 0 failed\n$", text)
  end)

  it("repeats the failures in the lines before the last", function()
    check.write(folder .. "/breaks_spec.lua",
      'it("holds", function() end) it("breaks", function() error "on purpose" end)')
    local p = assert(io.popen(("cd '%s' && CI= PS_TEST_ISA=none tools/test.sh '%s' '%s/breaks_spec.lua' "
      .. "'%s/passes_spec.lua' test_nowhere 2>&1"):format(paths.root, paths.exe:match "^(.*)/", folder, folder)))
    local text = p:read "*a"
    p:close()
    local repeated = text:match "\n%-%- failures:\n(.*)\n3 passed, 2 failed\n$"
    assert.matches("FAIL test_nowhere: it is not built\n", repeated)
    assert.matches("ERROR: breaks\n  [^\n]*on purpose", repeated)
    assert.not_matches("passes_spec", repeated)
  end)
end)
