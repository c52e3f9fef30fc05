-- SPDX-License-Identifier: BSD-3-Clause
-- The doors of psluajit_faults (src/faults): failing, short, interrupted, slow and flipped calls, ends of the process
-- and losses of power happen at the call that the plan names, and nowhere else. Actions of sockets, clocks and waits
-- are only in the seeds (seeds_spec.lua). The program psluajit has none of it.
local lfs = require "lfs"
local check = require "spec.check_lib"
local paths = require "ps.paths"
local lib = require "spec.ranks_lib"

local exe, missing = require("tools.faults.run").program()

local folder = lib.folder()
teardown(function() lib.remove(folder) end)

-- Runs a script under a plan. Returns its output, how it ended, and the faults that happened.
local function run(plan, script)
  os.execute(("rm -rf '%s/run' '%s/log'; mkdir '%s/run'"):format(folder, folder, folder))
  check.write(folder .. "/script.lua", "local ps, folder = require 'ps', arg[1]\n" .. script)
  local p = assert(io.popen(("PS_FAULT_FOLDER='%s/run' PS_FAULT_LOG='%s/log' PS_FAULT_PLAN='%s' OMP_NUM_THREADS=1 "
    .. "timeout 60 '%s' '%s/script.lua' '%s/run' 2>&1; echo \"|$?\""):format(folder, folder, plan, exe, folder,
    folder)))
  local text, code = p:read("*a"):match "^(.*)|(%d+)\n$"
  p:close()
  local events = {}
  for event in (check.read(folder .. "/log") or ""):gmatch "event (%S+)" do events[#events + 1] = event end
  return text, tonumber(code), events
end

local SAVE = [[
  ps.manual_seed(1)
  local path = folder .. "/t.safetensors"
  local ok, problem = pcall(ps.safetensors.save, path, { a = ps.randn { 1000, 10 } })
  print(ok, problem)
  if ok then
    local file = ps.safetensors.open(path)
    print(("%.9g"):format(file:tensor("a"):sum():item()))
    file:close()
  end
]]

describe("a door", function()
  local usual
  setup(function() if not missing then usual = run("", SAVE) end end)

  for _, row in ipairs {
    { "sync@0=EIO", "to its disk: Input/output error" }, { "rename@0=EIO", "cannot replace .*Input/output error" },
    { "space@0=ENOSPC", "No space left on device" }, { "write@0=EDQUOT", "Disk quota exceeded" },
    { "open@1=EMFILE", "Too many open files" }, { "sync@1=EIO", "cannot sync the folder .*Input/output error" },
    { "any@1=EACCES", "Permission denied" }, { "alloc@7+1000000=ENOMEM", "memory" },
  } do
    it("fails at " .. row[1], function()
      if missing then return pending(missing) end
      local text, code, events = run("0:" .. row[1], SAVE)
      assert.truthy(text:match("^false.*" .. row[2]) or row[1]:match "^alloc" and text:match(row[2]), text)
      assert.truthy(code == 0 or row[1]:match "^alloc", text)
      assert.truthy(#events > 0 and events[1]:match("^" .. row[1]:match "^%l+@%d+"), events[1])
    end)
  end

  for _, plan in ipairs { "write@0=short", "write@0+3=EINTR", "sync@0=delay:0.2", "read@0=short",
    "lock@5+20=delay:0.01" } do
    it("changes no result at " .. plan, function()
      if missing then return pending(missing) end
      local text, _, events = run("0:" .. plan, SAVE)
      assert.equal(usual, text)
      assert.equal(tonumber(plan:match "%+(%d+)=") or 1, #events)
    end)
  end

  it("is of one rank, and of one folder", function()
    if missing then return pending(missing) end
    local text, _, events = run("1:sync@0=EIO", SAVE)
    assert.equal(usual, text)
    assert.same({}, events)
    text, _, events = run("0:any@0=kill", "local f = io.open('/tmp/psluajit-no-such', 'r') print(f)")
    assert.equal("nil\n", text)
    assert.same({}, events)
  end)

  it("logs what is made outside the folder", function()
    if missing then return pending(missing) end
    local text = run("", ([[
      local ffi = require "ffi"
      ffi.cdef "int open(const char *, int, ...); int mkdir(const char *, unsigned);"
      io.open("%s/made", "w"):close()
      print(ffi.C.mkdir("%s/made2", 448), ffi.C.open("%s/made3", 64, ffi.cast("int", 384)) >= 0)
      io.open("%s/made"):close()
      io.open("/dev/null", "w"):close()
    ]]):gsub("%%s", folder))
    assert.equal("0\ttrue\n", text)
    local made = {}
    for path in check.read(folder .. "/log"):gmatch "outside ([^\n]*)" do made[#made + 1] = path end
    assert.same({ folder .. "/made", folder .. "/made2", folder .. "/made3" }, made)
  end)

  it("flips one bit", function()
    if missing then return pending(missing) end
    local text = run("0:read@0=flip:9", "local f = io.open(folder .. '/a', 'w') f:write 'abc' f:close() "
      .. "print(io.open(folder .. '/a'):read '*a')")
    assert.equal("a`c\n", text)
  end)

  it("flips a bit of a tensor after its checksum was compared", function()
    if missing then return pending(missing) end
    local text = run("0:read@0=flip:77777", [[
      local path = folder .. "/t.safetensors"
      ps.safetensors.save(path, { a = ps.ones { 1000, 10 } }, nil, { checksums = true })
      local file = ps.safetensors.open(path)
      print(file:verify "a", pcall(file.tensor, file, "a"))
    ]])
    assert.truthy(text:match "^true\tfalse\t.*tensor 'a' is damaged: the checksum of the bytes that were read", text)
  end)

  it("compares bytes of a large tensor that changed after its checksum was compared", function()
    if missing then return pending(missing) end
    local text = run("", [[
      local path = folder .. "/t.safetensors"
      ps.safetensors.save(path, { a = ps.ones { 3000, 500 } }, nil, { checksums = true })      -- 6 MB
      local file = ps.safetensors.open(path)
      print(file:verify "a")
      local f = io.open(path, "r+b")
      f:seek("end", -1000000) f:write "x" f:close()
      print(pcall(file.tensor, file, "a"))
      local four = ps.ffi.new "char[4]"
      print(ps.C.ps_st_read(file.st, 6000000 - 1000000 + 8, four, 4) < 0, ps.C.ps_st_read(file.st, 28, four, 4))
    ]])
    assert.truthy(text:match "^true\nfalse\t.*tensor 'a' is damaged: the checksum of the bytes that were read", text)
    assert.truthy(text:find("true\t0\n", 1, true), text)   -- another part of the damaged block, and another block
  end)

  it("fails a read of a file that is copied, and no empty copy is made", function()
    if missing then return pending(missing) end
    local text = run("0:read@0=EIO", [[
      require("lfs").mkdir(folder .. "/to")
      local f = io.open(folder .. "/generation_config.json", "w") f:write '{"top_k":3}' f:close()
      print(pcall(require("ps.pretrained.folder").copy_companions, folder, folder .. "/to"))
      print(io.open(folder .. "/to/generation_config.json"))
    ]])
    assert.truthy(text:find("/run/generation_config.json: Input/output error", 1, true), text)
    assert.truthy(text:match "^false" and text:match "\nnil\t", text)
  end)

  it("has no room only for calls that need room", function()
    if missing then return pending(missing) end
    local text, _, events = run("0:any@0+1000=ENOSPC", "print(os.remove(folder .. '/a'), io.open(folder .. '/a', 'w'))")
    assert.truthy(text:find("/run/a: No space left on device", 1, true), text)
    assert.truthy(text:find "nil", text)
    assert.equal(1, #events)
  end)

  it("counts the calls of one class of files", function()
    if missing then return pending(missing) end
    local text, _, events = run("0:write/save@0=EIO", SAVE)
    assert.truthy(text:match "^false.*Input/output error" and events[1] == "write/save@0=EIO:0", text)
    text, _, events = run("0:write/latest@0=EIO", SAVE)
    assert.equal(usual, text)
    assert.same({}, events)
  end)

  it("takes the pages of a map", function()
    if missing then return pending(missing) end
    local text, code = run("0:map@0=cut:0", SAVE)
    assert.equal(135, code)                                -- SIGBUS
    assert.truthy(text:match "cannot read [^\n]*/run/t%.safetensors from about byte %d+ of its map on: the file was ",
      text)
  end)

  it("ends the process", function()
    if missing then return pending(missing) end
    assert.equal(137, select(2, run("0:any@3=kill", SAVE)))
    assert.equal(143, select(2, run("0:any@3=signal:15", SAVE)))
  end)

  it("refuses a plan that it cannot read", function()
    if missing then return pending(missing) end
    for _, plan in ipairs { "0:write", "0:nothing@1=EIO", "0:write@1=ENOTHING", "write@1=EIO", "0:write@-1=EIO" } do
      local text, code = run(plan, SAVE)
      assert.equal(2, code)
      assert.truthy(text:find(("PS_FAULT_PLAN has '%s'"):format(plan), 1, true), text)
    end
  end)
end)

describe("a loss of power", function()
  -- Writes a file of three blocks over an older one, and cuts the power at the first call after `synced` of the calls
  -- that make the file durable.
  local function contents(seed, how)
    local script = ([[
      local ffi = require "ffi"
      ffi.cdef "int open(const char *, int, ...); long write(int, const void *, size_t); int fsync(int);"
      local function write(name, letter, sync)
        local f = ffi.C.open(folder .. name, 577, ffi.cast("int", 420))
        local text = letter:rep(3 * 4096)
        ffi.C.write(f, text, #text)
        if sync then ffi.C.fsync(f) end
      end
      write("/old", "a", true)
      local at = ffi.C.open(folder, 65536)
      ffi.C.fsync(at)
      %s
      os.remove(folder .. "/nothing")
    ]]):format(how)
    run(("0:remove@0=power:%d"):format(seed), script)
    return check.read(folder .. "/run/old"), check.read(folder .. "/run/new")
  end

  it("takes what was not synced, and nothing else", function()
    if missing then return pending(missing) end
    local kept, dropped, torn = 0, 0, 0
    for seed = 1, 20 do
      local old = contents(seed, 'write("/old", "b", false)')
      assert.equal(3 * 4096, #old)
      for i = 0, 2 do
        local block = old:sub(i * 4096 + 1, i * 4096 + 4096)
        if block == ("b"):rep(4096) then kept = kept + 1
        elseif block == ("a"):rep(4096) then dropped = dropped + 1
        else
          assert.truthy(block:match "^b+a+$", seed)
          torn = torn + 1
        end
      end
    end
    assert.truthy(kept > 3 and dropped > 3 and torn > 3, ("%d %d %d"):format(kept, dropped, torn))
    for seed = 1, 4 do
      assert.equal(("b"):rep(3 * 4096), (contents(seed, 'write("/old", "b", true)')))
    end
  end)

  it("is what an fsync that fails does to its file", function()
    if missing then return pending(missing) end
    local lost = 0
    for seed = 1, 8 do
      run(("0:sync@1=EIO:%d"):format(seed), [[
        local ffi = require "ffi"
        ffi.cdef "int open(const char *, int, ...); long write(int, const void *, size_t); int fsync(int);"
        for _, letter in ipairs { "a", "b" } do
          local f = ffi.C.open(folder .. "/old", 577, ffi.cast("int", 420))
          ffi.C.write(f, letter:rep(3 * 4096), 3 * 4096)
          ffi.C.fsync(f)
        end
      ]])
      if check.read(folder .. "/run/old") ~= ("b"):rep(3 * 4096) then lost = lost + 1 end
    end
    assert.truthy(lost > 4, lost)
  end)

  it("takes names whose folder was not synced", function()
    if missing then return pending(missing) end
    local there, gone = 0, 0
    for seed = 1, 20 do
      local old, new = contents(seed, 'os.rename(folder .. "/old", folder .. "/new")')
      assert.truthy((old == nil) ~= (new == nil))
      if new then there = there + 1 else gone = gone + 1 end
    end
    assert.truthy(there > 2 and gone > 2, there)
    for seed = 1, 4 do
      local old, new = contents(seed, 'os.rename(folder .. "/old", folder .. "/new") ffi.C.fsync(at)')
      assert.truthy(old == nil and new == ("a"):rep(3 * 4096))
    end
  end)

  it("takes a new folder whose own folder was not synced, also if its path ends with a slash", function()
    if missing then return pending(missing) end
    local function there(seed, path, synced)
      contents(seed, ([[
        require("lfs").mkdir(folder .. "%s")
        ffi.C.fsync(ffi.C.open(folder .. "%s", 65536))
      ]]):format(path, synced))
      return lfs.attributes(folder .. "/run/made", "mode") == "directory"
    end
    for _, path in ipairs { "/made", "/made/" } do
      local lost = 0
      for seed = 1, 12 do lost = lost + (there(seed, path, "/made") and 0 or 1) end
      assert.truthy(lost > 2 and lost < 12, path .. lost)
      for seed = 1, 4 do assert.truthy(there(seed, path, ""), path) end
    end
  end)
end)

describe("psluajit", function()
  it("has no door", function()
    local p = assert(io.popen(("nm -D --defined-only '%s' | grep -cE ' (faults_pass|pwrite|fsync|writev)$'"):format(
      paths.exe)))
    assert.equal("0", p:read "*l")
    p:close()
  end)
end)
