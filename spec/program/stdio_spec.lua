-- SPDX-License-Identifier: BSD-3-Clause
-- Standard input, output and error that are closed or full: no file of the program gets their descriptors, and lost
-- output is a failure.
local lfs = require "lfs"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local folder

-- Runs a script in the folder with redirections. Returns its exit code and the shell's output.
local function run(script, redirections)
  check.write(folder .. "/script.lua", script)
  local p = assert(io.popen(("cd %s && (OMP_NUM_THREADS=1 timeout 300 %s script.lua %s; echo \"|$?\") 2>&1"):format(
    folder, paths.exe, redirections)))
  local text, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  return tonumber(code), text
end

-- Trains a few steps in chunks, some of them on a disk tier in memory, which accepts writes of any length, and prints
-- much output meanwhile. The losses are written to a file.
local TRAIN = [[
  local ps, gpt2 = require "ps", require "models.gpt2"
  local L = dofile "%s"
  %s
  local setting = { memory = { host = 100 * 1024, disk = { path = "%s" } } }
  local model, optimizer, loader
  local function open()
    ps.manual_seed(1)
    loader = ps.data.loader { file = "text.txt", batch = 4, seq = 32, vocab = 256, seed = 1 }
    model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
      config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-3 } },
        memory = setting.memory } }
  end
  local function step()
    optimizer:zero_grad()
    local loss = model(loader:next())
    model:backward(loss)
    optimizer:step()
    return loss:item()
  end
  L.fit(setting, function()
    L.used()
    open()
    local ok, problem = pcall(step)
    model:close()
    if not ok then error(problem, 0) end
  end)
  L.used()
  open()
  local out, held = io.open("losses", "w"), io.open("held", "w")
  for i = 1, 4 do
    local loss = step()
    for _ = 1, 200 do print(("step %%d loss is something or other, a chatty script "):rep(8)) end
    out:write(("%%d %%.9g\n"):format(i, loss))
  end
  out:close()
  for fd = 0, 2 do held:write(tostring(require("posix.unistd").readlink("/proc/self/fd/" .. fd)), "\n") end
  held:close()
]]

-- Returns the training script with `before` at its beginning, and the disk tier in a folder.
local function training(before, tier) return TRAIN:format(paths.root .. "/spec/chunks_lib.lua", before, tier) end

describe("standard input, output and error", function()
  local tier

  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
    check.write(folder .. "/text.txt", ("The quick brown fox jumps over the lazy dog. "):rep(100))
    tier = lfs.attributes("/dev/shm", "mode") == "directory" and "/dev/shm" or folder
  end)
  teardown(function() os.execute("rm -rf " .. folder) end)

  it("that are closed are not used for files", function()
    local code, text = run([[
      local files = {}
      for i = 1, 4 do files[i] = assert(io.open("f" .. i, "wb")) end
      print "stray"
      io.stderr:write "stray"
      assert(io.read() == nil)
      for i = 1, 4 do files[i]:write "mine" files[i]:close() end
    ]], "<&- >&- 2>&-")
    assert.same({ 0, "" }, { code, text })
    for i = 1, 4 do assert.equal("mine", check.read(folder .. "/f" .. i)) end
  end)

  it("that are closed do not affect training", function()
    assert.equal(0, (run(training("", tier), ">/dev/null")))
    local want = check.read(folder .. "/losses")
    assert.equal(4, select(2, want:gsub("\n", "")))
    os.remove(folder .. "/losses")
    assert.equal(0, (run(training("", tier), "<&- >&- 2>&-")))
    assert.equal(want, check.read(folder .. "/losses"))
    -- the script itself closes it after the program has started
    assert.equal(0, (run(training("require('posix.unistd').close(0)", tier), ">/dev/null")))
    assert.equal(want, check.read(folder .. "/losses"))
    local held = check.read(folder .. "/held")
    assert.truthy(select(2, held:gsub("\n", "")) == 3 and not held:find(tier, 1, true), held)
  end)

  it("that are full make the program fail", function()
    local code, text = run("print 'lost'", ">/dev/full")
    assert.equal(1, code)
    assert.truthy(text:find("not all of the output could be written to stdout: No space left on device", 1, true), text)
    code, text = run("print 'lost' io.flush() os.exit(0)", ">/dev/full")
    assert.equal(1, code)
    assert.truthy(text:find("not all of the output could be written to stdout", 1, true), text)
    assert.same({ 3, "" }, { run("os.exit(3)", ">/dev/full") })
    assert.equal(0, (run("io.stderr:write 'lost'", "2>/dev/full")))
  end)
end)
