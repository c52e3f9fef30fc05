-- SPDX-License-Identifier: BSD-3-Clause
-- spec/run.lua counts every file it is given, alone and side by side: files that pass, fail, skip or crash.
-- tools/test.sh sums up what was skipped.
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
    it("counts what each file did, " .. jobs .. " at a time", function()
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

  it("sums up what was skipped, by reason, in the lines before the last", function()
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
end)
