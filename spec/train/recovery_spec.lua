-- SPDX-License-Identifier: BSD-3-Clause
-- examples/train_chunked.lua under the launcher: killed and restarted, with the same number of ranks or fewer,
-- interrupted by a signal, and resumed. The last checkpoint equals that of an undisturbed run, byte for byte if the
-- number of ranks is the same.
local ps = require "ps"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local no_gloo = require("spec.ranks_lib").no_gloo()
local folder

local function write(name, text) check.write(folder .. "/" .. name, text) end

local function read(name) return check.read(folder .. "/" .. name) end

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(os.execute("mkdir " .. folder) == 0)
  local words = {}
  for i = 1, 3000 do words[i] = ("%d and %d. "):format(i % 17, i % 5) end
  write("text", table.concat(words))
  write("config.json", [[{ "train_batch_size": 8, "optimizer": { "type": "AdamW", "params": { "lr": 1e-3 } } }]])
  -- The example, with a fault of one rank in the first attempt after a checkpoint was written.
  write("hurt.lua", ([[
    local checkpoints, signal = require "ps.checkpoints", require "posix.signal"
    local unistd = require "posix.unistd"
    local save, saves = checkpoints.save, 0
    local what, after = arg[1]:match("^(%%a+)(%%d)$")
    table.remove(arg, 1)
    local function happen()
      if os.getenv "TORCHELASTIC_RESTART_COUNT" ~= "0" or saves ~= tonumber(after) then return end
      if what == "kill" and os.getenv "RANK" == "1" then signal.kill(unistd.getpid(), signal.SIGKILL) end
      if what == "term" and os.getenv "RANK" == "0" then
        signal.kill(unistd.getppid(), signal.SIGTERM)
        while require("ps").interrupts() == 0 do           -- the launcher forwards it when it runs
          require("posix.time").nanosleep { tv_sec = 0, tv_nsec = 1e6 }
        end
      end
    end
    checkpoints.save = function(...)
      local file = save(...)
      saves = saves + 1
      happen()
      return file
    end
    local initialize = require("ps").initialize
    require("ps").initialize = function(...)
      happen()
      return initialize(...)
    end
    dofile "%s/examples/train_chunked.lua"
  ]]):format(paths.root))
end)
teardown(function() os.execute("rm -r " .. folder) end)

-- Runs twelve steps with a checkpoint after every fourth. Returns the launcher's output, its exit code, and the last
-- checkpoint merged into one file, since the ranks' files contain the index of the save.
local function train(out, options, what, more)
  local text, code = check.shell(("cd %s && env -u LUA_INIT -u RANK -u WORLD_SIZE OMP_NUM_THREADS=1 timeout -k 1 3000 "
    .. "'%s' '%s/tools/launch.lua' %s hurt.lua %s --data text --config config.json --model tiny --seq 16 --steps 12 "
    .. "--save 4 --out %s %s"):format(folder, paths.exe, paths.root, options, what or "none0", out,
    more or ""))
  os.execute(("cd %s && rm -f last.safetensors && '%s' '%s/tools/merge.lua' %s/step-00000012 --out last.safetensors "
    .. ">/dev/null 2>&1"):format(folder, paths.exe, paths.root, out))
  return text, code, read "last.safetensors"
end

describe("a failure that other ranks report", function()
  -- Runs a script as two ranks. Returns the launcher's output and exit code.
  local function run(script, options)
    write("fails.lua", script)
    return check.shell(("cd %s && env -u LUA_INIT -u RANK -u WORLD_SIZE OMP_NUM_THREADS=1 timeout -k 1 300 "
      .. "'%s' '%s/tools/launch.lua' --nproc-per-node 2 %s fails.lua"):format(folder,
      paths.exe, paths.root, options or ""))
  end

  -- Rank 0 fails with the error `what`, like its watch, and ends. Rank 1 runs `rank_1` after the launcher has seen
  -- this, when no process with rank 0's id remains.
  local function told(what, rank_1, options, rank_0)
    os.remove(folder .. "/ready")
    os.remove(folder .. "/seen")
    return run(([[
      local time, signal, unistd = require "posix.time", require "posix.signal", require "posix.unistd"
      local function nap() time.nanosleep { tv_sec = 0, tv_nsec = 1e6 } end
      if os.getenv "RANK" == "0" then
        local file = io.open("ready.new", "w")
        file:write(unistd.getpid())
        file:close()
        os.rename("ready.new", "ready")
        while not io.open "seen" do nap() end
        unistd.write(tonumber(os.getenv("PS_LAUNCHER_PIPE"):match "^%%d+"), "%s\n")
        %s
        os.exit(1)
      end
      while not io.open "ready" do nap() end
      local rank_0 = io.open("ready"):read "*n"
      io.open("seen", "w"):close()
      while signal.kill(rank_0, 0) do nap() end
      %s]]):format(what, rank_0 or "", rank_1), options)
  end

  local function count(text, words)
    local n, at = 0, 1
    while true do
      local first, last = text:find(words, at, true)
      if not first then return n end
      n, at = n + 1, last + 1
    end
  end

  it("is shown once", function()
    if no_gloo then return pending(no_gloo) end
    local begin = "local ps = require 'ps' ps.init_distributed { quiet = true } "
    -- the error of the rank that failed, and not of the rank that reports it
    local text, code = run(begin .. "if ps.rank() == 1 then error 'of one rank' end "
      .. "ps.mesh.group 'world':all_reduce(ps.ones { 2 })", "--log-dir logs")
    assert.equal(1, code, text)
    assert.matches("rank 1 .* failed first, [^\n]*: exit code 1; its last lines:\n", text)
    assert.equal(1, count(text, "of one rank"), text)
    for rank = 0, 1 do
      local f = assert(io.open(("%s/logs/attempt_0/rank_%d.log"):format(folder, rank)))
      local times = count(f:read "*a", "of one rank")
      assert.is_true(times == 1 or rank == 0 and times == 0, times)     -- rank 0 may be ended before it hears of it
      f:close()
    end
    -- an error that all ranks have
    text, code = run(begin .. "error 'of all ranks'")
    assert.equal(1, code, text)
    assert.equal(1, count(text, "of all ranks"), text)
    -- both of two different errors
    os.remove(folder .. "/ignores")
    text = run [[
      local time, signal = require "posix.time", require "posix.signal"
      if os.getenv "RANK" == "1" then
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        io.open("ignores", "w"):close()
        time.nanosleep { tv_sec = 0, tv_nsec = 3e8 }
        error "of rank 1 alone"
      end
      while not io.open "ignores" do time.nanosleep { tv_sec = 0, tv_nsec = 1e6 } end
      error "of rank 0 alone"]]
    assert.equal(1, count(text, "of rank 0 alone"), text)
    assert.equal(1, count(text, "of rank 1 alone"), text)
    -- the error of a process that a rank starts, while the rank continues to run
    text, code = run(("if os.getenv 'RANK' == '0' then os.execute(%q) require('posix.time').nanosleep { tv_sec = 4, "
      .. "tv_nsec = 0 } print 'later' end"):format(("'%s' -e \"error 'of a child'\""):format(paths.exe)))
    assert.equal(0, code, text)
    assert.equal(1, count(text, "of a child"), text)
    assert.is_true(text:find("of a child", 1, true) < text:find("later", 1, true), text)
    assert.is_nil(text:find "\30")
  end)

  it("is that of the rank that failed, although another one ended before it", function()
    for _, what in ipairs { "1 EIO", "1 ETIME", "7 EIO\\n1 EINVAL" } do
      local text, code = told(what, "os.exit(3)")
      assert.equal(3, code, text)
      assert.matches("launch: rank 1 .* failed first, [^\n]*: exit code 3; it wrote nothing\n", text)
      assert.is_nil(text:find("launch: rank 0", 1, true))
    end
  end)

  it("is that of the rank that failed, although it takes a while to end", function()
    local text, code = told("1 EIO", "time.nanosleep { tv_sec = 1, tv_nsec = 5e8 } os.exit(3)")
    assert.equal(3, code, text)
    assert.matches("launch: rank 1 .* failed first, [^\n]*: exit code 3; it wrote nothing\n", text)
  end)

  it("is that of the first rank if no other one fails, or if it reported itself", function()
    for _, rank_1 in ipairs { "os.exit(0)", "time.nanosleep { tv_sec = 20, tv_nsec = 0 }" } do
      local text, code = told("1 EIO", rank_1, "--grace 1")
      assert.equal(1, code, text)
      assert.matches("launch: rank 0 .* failed first, [^\n]*: exit code 1; it wrote nothing\n", text)
    end
  end)

  it("is that of the first rank if it reports itself", function()
    local text, code = told("0 EIO", "os.exit(3)")
    assert.equal(1, code, text)
    assert.matches("launch: rank 0 .* failed first", text)
  end)

  it("comes from the watch, not from the output of a script", function()
    local text, code = told("", [[os.exit(3)]], nil, 'io.stderr:write("psluajit: rank 1 (h) failed: x\\n")')
    assert.equal(1, code, text)
    assert.matches("launch: rank 0 .* failed first, [^\n]*: exit code 1; its last lines:\n", text)
  end)

  it("is found among real ranks", function()
    if no_gloo then return pending(no_gloo) end
    local late = 'ps.C.ps_groups_end "boo" require("posix.time").nanosleep { tv_sec = 0, tv_nsec = 8e8 } os.exit(3)'
    for _, case in ipairs { { "os.exit(3)", 3 }, { "error('boo')", 1 }, { late, 3 } } do
      local text, code = run(([[
        local ps = require "ps"
        local group = ps.init_distributed()
        group:barrier()
        if group:rank() == 1 then %s end
        group:barrier()]]):format(case[1]))
      assert.equal(case[2], code, text)
      assert.matches(("launch: rank 1 .* failed first, [^\n]*: exit code %d"):format(case[2]), text)
      assert.is_nil(text:find("launch: rank 0", 1, true))
    end
  end)
end)

describe("a disturbed training", function()
  if no_gloo then return pending(no_gloo) end
  local whole, whole_text

  setup(function()
    local code
    whole_text, code, whole = train("whole", "--nproc-per-node 2")
    assert.equal(0, code, whole_text)
    assert.truthy(whole)
  end)

  it("continues from its last checkpoint after a rank was killed", function()
    local text, code, last = train("killed", "--nproc-per-node 2 --max-restarts 1", "kill2")
    assert.equal(0, code, text)
    assert.matches("launch: rank 1 .* failed first, .*killed by signal 9", text)
    assert.matches("launch: restart 1 of 1\n", text, 1, true)
    assert.matches("resumed from killed/step-00000008, step 8\n", text, 1, true)
    assert.is_true(last == whole)
    assert.equal(whole_text:match("held%-out loss [^\n]*"), text:match("held%-out loss [^\n]*"))
  end)

  it("continues with fewer ranks and the same batches", function()
    local text, code = train("fewer", "--nproc-per-node 1:2 --max-restarts 1", "kill1")
    assert.equal(0, code, text)
    assert.matches("launch: restart 1 of 1, with 1 of 2 ranks\n", text, 1, true)
    assert.matches("[0] resumed from fewer/step-00000004, step 4\n", text, 1, true)
    assert.is_nil(text:find("[1] resumed", 1, true))
    local loss = tonumber(text:match("held%-out loss ([%d.]+)"))
    assert.near(tonumber(whole_text:match("held%-out loss ([%d.]+)")), loss, 1e-4)
  end)

  -- Creates a folder with the files of an earlier run after eight steps.
  local function left_by_another(name)
    assert(os.execute(("cp -r %s/killed %s/%s && cd %s/%s && rm -r step-00000012 && echo step-00000008 >latest"):format(
      folder, folder, name, folder, name)) == 0)
  end

  it("starts again without a checkpoint, and does not use an earlier run's", function()
    left_by_another "again"
    local text, code, last = train("again", "--nproc-per-node 2 --max-restarts 1", "kill0", "--force")
    assert.equal(0, code, text)
    assert.matches("launch: restart 1 of 1\n", text, 1, true)
    assert.is_nil(text:find("resumed", 1, true))
    assert.is_true(last == whole)
  end)

  it("is refused if a folder holds a run, also when it is restarted", function()
    left_by_another "refused"
    local text, code = train("refused", "--nproc-per-node 2 --max-restarts 1")
    assert.equal(1, code, text)
    assert.matches("launch: restart 1 of 1\n", text, 1, true)
    local before, after = text:match("^(.-)launch: restart 1 of 1(.*)$")
    for _, said in ipairs { before, after } do
      assert.matches("train_chunked.lua: refused has a run, at refused/step-00000008: --resume", said, 1, true)
    end
    assert.is_nil(text:find("resumed", 1, true))
    assert.equal("step-00000008", read("refused/latest"):match("%S+"))
  end)

  it("ends all ranks if another program has the port", function()
    local fd, port = assert(require("ps.launch.port").bound())
    assert(require("posix.sys.socket").listen(fd, 8))
    local start = ps.now()
    local text, code = train("port", "--nproc-per-node 2 --grace 2 --master-port " .. port)
    require("posix.unistd").close(fd)
    assert.equal(1, code, text)
    assert.matches(("launch: rank 0 .* failed first, .*port %d of this machine is in use"):format(port), text)
    assert.is_true(ps.now() - start < check.PROMPT_S)
  end)

  it("saves and ends after a signal, is not restarted, and resumes", function()
    local text, code, last = train("told", "--nproc-per-node 2 --max-restarts 1 --grace 20", "term1")
    assert.equal(0, code, text)
    assert.matches("launch: SIGTERM: passed on to the ranks", text, 1, true)
    assert.matches("interrupted; --resume continues", text, 1, true)
    assert.is_nil(text:find("restart 1", 1, true))
    assert.is_nil(last)
    text, code, last = train("told", "--nproc-per-node 2", nil, "--resume")
    assert.equal(0, code, text)
    assert.matches("resumed from told/step%-0000000%d, step %d\n", text)
    assert.is_true(last == whole)
  end)
end)
