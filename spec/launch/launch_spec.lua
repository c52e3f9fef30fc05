-- SPDX-License-Identifier: BSD-3-Clause
-- The launcher, tools/launch.lua: its options, and runs with real ranks (tiny scripts that need no engine). Every run
-- is under `timeout` and must leave no process, which the specs check.
local check = require "spec.check_lib"
local options = require "ps.launch.options"
local paths = require "ps.paths"

-- -- the launcher's options -------------------------------------------------------------------------------------------

describe("the launcher's options", function()
  local function parse(text, variables)
    local words = {}
    for word in text:gmatch("%S+") do words[#words + 1] = word end
    return options.read(words, function(name) return (variables or {})[name] end)
  end

  local function bad(text, why, variables)
    local ok, message = pcall(parse, text, variables)
    assert.is_false(ok)
    assert.matches(why, message, 1, true)
  end

  it("are torchrun's, with dashes or underscores, values in either place", function()
    for _, text in ipairs { "--nproc-per-node 4", "--nproc_per_node 4", "--nproc-per-node=4", "--nproc_per_node=4",
      "--num_gpus 4", "--num-gpus=4" } do
      local o = parse(text .. " s.lua --nproc-per-node 7 -x")
      assert.same({ 4, "s.lua", { "--nproc-per-node", "7", "-x" } }, { o.nproc, o.script, o.args })
    end
    local o = parse "--nnodes=2 --node_rank 1 --master_addr h --master-port 77 --max-restarts 3 -- s.lua"
    assert.same({ 2, 1, "h", 77, 3 }, { o.nnodes, o.node_rank, o.master_addr, o.master_port, o.max_restarts })
    o = parse "--nnodes 2:2 --node-rank 0 --rdzv-backend c10d --rdzv-endpoint h:78 --rdzv_id job s.lua"
    assert.same({ 2, "h", 78, "job" }, { o.nnodes, o.master_addr, o.master_port, o.run_id })
    o = parse "--nnodes 2 --node-rank 0 --rdzv-endpoint=h s.lua"
    assert.same({ "h", 29500 }, { o.master_addr, o.master_port })
    o = parse "--standalone --monitor-interval 5 s.lua"
    assert.same({ 1, "127.0.0.1", nil }, { o.nproc, o.master_addr, o.master_port })
    assert.equal(options.cores(), parse("--nproc-per-node cpu s.lua").nproc)
    o = parse "--nproc-per-node 2:5 s.lua"
    assert.same({ 5, 2 }, { o.nproc, o.min_nproc })
    o = parse "--nproc-per-node 5 s.lua"
    assert.same({ 5, 5 }, { o.nproc, o.min_nproc })
  end)

  it("come from PET_ variables if they are not given", function()
    local job = { PET_NNODES = "3", PET_NPROC_PER_NODE = "2", PET_NODE_RANK = "2", PET_MASTER_ADDR = "m",
      PET_MASTER_PORT = "23456", PET_MAX_RESTARTS = "1" }
    local o = parse("s.lua", job)
    assert.same({ 3, 2, 2, "m", 23456, 1 }, { o.nnodes, o.nproc, o.node_rank, o.master_addr, o.master_port,
      o.max_restarts })
    assert.equal(5, parse("--nproc-per-node 5 s.lua", job).nproc)
    bad("s.lua", "PET_NNODES is '1:3'; expected one number of nodes", { PET_NNODES = "1:3" })
  end)

  it("are refused by name if they are wrong", function()
    bad("--nproc-per-nod 2 s.lua", "there is no option --nproc-per-nod; did you mean --nproc-per-node?")
    bad("--nproc 2 s.lua", "there is no option --nproc; did you mean --nproc-per-node?")
    bad("--max_restart=2 s.lua", "did you mean --max-restarts?")
    bad("--nproc-per-node 0 s.lua", "--nproc-per-node is '0'; expected a whole number from 1 to 4096")
    bad("--nproc-per-node two s.lua", "--nproc-per-node is 'two'; expected")
    bad("--nproc-per-node 3:2 s.lua", "--nproc-per-node's minimum is '3'; expected a whole number from 1 to 2")
    bad("--nproc-per-node 2: s.lua", "--nproc-per-node is '2:'; expected a whole number from 1 to 4096, MIN:MAX, cpu")
    bad("--nnodes 2 --node-rank 0 --master-addr h --nproc-per-node 1:2 s.lua",
      "--nproc-per-node is '1:2', but --nnodes is '2'; expected a single number of ranks")
    bad("--elastic_training s.lua", "--elastic_training is not supported: use --nproc-per-node MIN:MAX")
    bad("--nproc-per-node", "--nproc-per-node needs a value")
    bad("--no-prefix=1 s.lua", "--no-prefix takes no value")
    bad("--nnodes 2 s.lua", "--master-addr is missing")
    bad("--nnodes 2 --master-addr h s.lua", "--node-rank is missing")
    bad("--nnodes 2 --rdzv-backend static --rdzv-endpoint h s.lua", "or --rdzv-backend c10d, which numbers the nodes")
    assert.is_nil(parse("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h s.lua").node_rank)
    bad("--nnodes 2 --node-rank 2 --master-addr h s.lua", "--node-rank is '2'; expected less than --nnodes")
    bad("--nnodes 2 --node-rank 0 --standalone s.lua", "--standalone is for one node")
    bad("--nnodes 1:2 s.lua", "--nnodes is '1:2'; expected one number")
    bad("--master-port 65536 s.lua", "--master-port is '65536'; expected")
    bad("--master-addr a --rdzv-endpoint b:1 s.lua", "--rdzv-endpoint has 'b'")
    bad("--rdzv-backend etcd s.lua", "--rdzv-backend is 'etcd'; expected static or c10d")
    bad("--rdzv-conf rank=0 s.lua", "--rdzv-conf is not supported: set the node's number by --node-rank")
    bad("-m module", "-m is not supported")
    bad("--tee=3 s.lua", "--tee is not supported")
    bad("--hostfile hosts s.lua", "--hostfile is not supported")
    bad("", "a script is missing")
    bad("-", "the script is '-'")
  end)
end)

-- -- the launcher with ranks ------------------------------------------------------------------------------------------

describe("the launcher", function()
  local scratch, pids

  setup(function()
    scratch = os.tmpname()
    os.remove(scratch)
    assert(os.execute("mkdir " .. scratch) == 0)
  end)

  teardown(function() os.execute("rm -rf " .. scratch) end)

  local function slurp(name)
    local f = io.open(scratch .. "/" .. name, "rb")
    local text = f and f:read("*a")
    if f then f:close() end
    return text
  end

  -- The beginning of the ranks' scripts. `note` writes a process id to a file, so that the spec can check later that
  -- the process has ended.
  local PRELUDE = [[
    local unistd, signal, time = require "posix.unistd", require "posix.signal", require "posix.time"
    local rank, attempt = tonumber(os.getenv "RANK"), tonumber(os.getenv "TORCHELASTIC_RESTART_COUNT")
    local launcher = unistd.getppid()
    local function note(pid)
      local f = io.open("pids", "ab") f:write(pid, "\n") f:close()
    end
    local function sleep(s) time.nanosleep { tv_sec = math.floor(s), tv_nsec = (s % 1) * 1e9 } end
    local function wait_for(name)
      for _ = 1, 10000 do
        local f = io.open(name, "rb") if f then f:close() return end
        sleep(0.01)
      end
      error("waited for " .. name)
    end
    local function mark(name) io.open(name, "wb"):close() end
    note(unistd.getpid())
  ]]

  --- Runs the launcher with this script. Returns standard output and error, the exit code and the seconds.
  local function launch(args, script, o)
    os.execute(("cd %s && rm -rf ./*"):format(scratch))
    local f = assert(io.open(scratch .. "/script.lua", "wb"))
    f:write((PRELUDE:gsub("\n", " ")) .. script)
    f:close()
    local started = require("ps.launch.supervisor").now()
    local p = assert(io.popen(("cd %s && %s timeout -k 1 300 env --default-signal=INT,TERM,HUP -u LUA_INIT -u RANK " ..
      "-u WORLD_SIZE '%s' '%s/tools/launch.lua' %s 2>stderr; echo \"|$?\""):format(scratch, o or "", paths.exe,
      paths.root, args)))
    local out, code = p:read("*a"):match("^(.*)|(%d+)\n$")
    p:close()
    pids = {}
    for pid in (slurp "pids" or ""):gmatch("%d+") do pids[#pids + 1] = pid end
    return out, slurp "stderr", tonumber(code), require("ps.launch.supervisor").now() - started
  end

  local function running()
    local list = {}
    for _, pid in ipairs(pids) do
      local f = io.open(("/proc/%s/stat"):format(pid), "rb")
      local state = f and f:read("*a"):match("%) (%a)")
      if f then f:close() end
      if state and state ~= "Z" then list[#list + 1] = pid end     -- the system reaps an orphan's zombie
    end
    return list
  end

  local function assert_gone(n)
    assert.equal(n, #pids)
    for _ = 1, 10000 do                                      -- processes that end with the launcher need a moment
      if #running() == 0 then return end
      require("posix.time").nanosleep { tv_sec = 0, tv_nsec = 1e7 }
    end
    assert.same({}, running())
  end

  local function sorted(text)
    local lines = {}
    for line in text:gmatch("[^\n]*\n") do lines[#lines + 1] = line end
    table.sort(lines)
    return table.concat(lines)
  end

  it("gives each rank its variables and the script's arguments", function()
    local show = [[
      local t = {}
      for _, n in ipairs { "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
        "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS",
        "TORCHELASTIC_USE_AGENT_STORE" } do t[#t + 1] = os.getenv(n) or "-" end
      local port = tonumber(os.getenv "MASTER_PORT")
      print(table.concat(t, " "), port > 1023 and port < 65536, arg[-1]:match "[^/]*$", arg[-2], arg[0], ...)]]
    local out, err, code = launch("--nproc-per-node 2 --max-restarts 5 script.lua a 'b c' --x", show,
      "TORCHELASTIC_USE_AGENT_STORE=True OMP_NUM_THREADS=7")
    local line = "[%d] %d %d 2 2 0 127.0.0.1 0 5 7 -\ttrue\tpsluajit\tnil\tscript.lua\ta\tb c\t--x\n"
    assert.same({ line:format(0, 0, 0) .. line:format(1, 1, 1), "", 0 }, { sorted(out), err, code })
    assert_gone(2)
    out = launch("--nproc_per_node=2 --nnodes=3 --node_rank=1 --master_addr=h --master_port=99 --no-prefix " ..
      "--pass-local-rank script.lua y", "print(rank, os.getenv 'WORLD_SIZE', os.getenv 'MASTER_ADDR', " ..
      "os.getenv 'MASTER_PORT', os.getenv 'GROUP_RANK', ...)", "OMP_NUM_THREADS=")
    assert.equal("2\t6\th\t99\t1\t--local_rank=0\ty\n3\t6\th\t99\t1\t--local_rank=1\ty\n", sorted(out))
    out = launch("--nproc-per-node=1 script.lua", "print(os.getenv 'OMP_NUM_THREADS')", "env -u OMP_NUM_THREADS")
    assert.equal(("[0] %d\n"):format(options.cores()), out)
  end)

  it("gives every attempt its own name and secret, unless they are set", function()
    local show = "print(attempt, os.getenv 'PS_RUN_ID' or '-', os.getenv 'PS_SECRET' or '-') "
    local once = show .. "os.exit(attempt == 0 and 1)"
    local seen = {}
    for _ = 1, 2 do
      local out = launch("--nproc-per-node 1 --max-restarts 1 script.lua", once, "env -u PS_RUN_ID PS_SECRET=required")
      for attempt = 0, 1 do
        local id, secret = out:match(("%d\t(%%x+)%%.%d\t(%%x+)\n"):format(attempt, attempt))
        assert.is_true(id and #id == 16 and #secret == 64 and not seen[secret], out)
        seen[secret] = true
      end
    end
    local out = launch("--rdzv-id job7 script.lua", show, "env -u PS_RUN_ID PS_SECRET=mine")
    assert.equal("[0] 0\tjob7.0\tmine\n", out)
    out = launch("--nnodes 2 --node-rank 0 --master-addr h script.lua", show,
      "env -u PS_SECRET PS_RUN_ID=both")
    assert.equal("[0] 0\tboth\t-\n", out)
  end)

  it("gives ranks the variables that ps.dist.env reads", function()
    local out = launch("--nproc-per-node 2 --master-port 4242 script.lua",
      "local env = require 'ps.dist.env' print(env.describe(env.read()))")
    assert.equal("[0] rank 0 of 2, local rank 0 of 2, from torchrun's variables; meeting at tcp://127.0.0.1:4242\n" ..
      "[1] rank 1 of 2, local rank 1 of 2, from torchrun's variables; meeting at tcp://127.0.0.1:4242\n", sorted(out))
  end)

  it("forwards all output by lines, including the last partial line and zero bytes", function()
    local out, err, code = launch("--nproc-per-node 2 script.lua", [[
      for i = 1, 20000 do print(rank, i) end
      io.stderr:write("to stderr")
      io.write("long ", ("x"):rep(200000), "\0 end\n\nlast")]])
    assert.equal(0, code)
    local seen = { [0] = 0, [1] = 0 }
    for line in out:gmatch("[^\n]*\n") do
      local who, i = line:match("^%[(%d)%] (%d+\t%d+)\n$")
      if who then
        seen[tonumber(who)] = seen[tonumber(who)] + 1
        assert(i == ("%d\t%d"):format(who, seen[tonumber(who)]), line)
      end
    end
    assert.same({ [0] = 20000, 20000 }, seen)
    for r = 0, 1 do
      assert.matches(("[%d] long "):format(r) .. ("x"):rep(200000) .. "\0 end\n", out, 1, true)
      assert.matches(("[%d] \n"):format(r), out, 1, true)
      assert.matches(("[%d] last\n"):format(r), out, 1, true)
      assert.matches(("[%d] to stderr\n"):format(r), err, 1, true)
    end
    assert_gone(2)
  end)

  it("shows a line at once", function()
    -- Rank 0 prints and waits. A reader of the launcher's output lets it continue.
    local out, _, code = launch("--nproc-per-node 1 script.lua | while read -r line; do echo \"$line\"; " ..
      "touch seen; done; true", "print('now') wait_for 'seen'")
    assert.same({ "[0] now\n", 0 }, { out, code })
  end)

  it("writes a log for each rank and attempt", function()
    local _, _, code = launch("--nproc-per-node 2 --max-restarts 1 --log-dir logs/deep script.lua",
      "print('out', rank, attempt) io.stderr:write('err\\n') if rank == 1 then wait_for('go' .. attempt) " ..
      "os.exit(attempt == 0 and 3 or 0) end mark('go' .. attempt)")
    assert.equal(0, code)
    for attempt = 0, 1 do
      for r = 0, 1 do
        assert.equal(sorted(("err\nout\t%d\t%d\n"):format(r, attempt)),
          sorted(slurp(("logs/deep/attempt_%d/rank_%d.log"):format(attempt, r))))
      end
    end
  end)

  it("reports once a log that cannot be written, and runs on", function()
    local out, err, code = launch("--nproc-per-node 1 --log-dir full script.lua",
      "for i = 1, 20000 do print(('x'):rep(50)) end print 'last'",
      "mkdir -p full/attempt_0 && ln -s /dev/full full/attempt_0/rank_0.log &&")
    assert.equal(0, code)
    assert.matches("[0] last\n", out, 1, true)
    assert.matches("launch: the log of rank 0 (--log-dir) cannot be written and is incomplete: No space left on device",
      err, 1, true)
    assert.equal(1, select(2, err:gsub("is incomplete", "")))
  end)

  it("names the rank that failed first, ends the others and returns its exit code", function()
    local _, err, code, seconds = launch("--nproc-per-node 3 script.lua", [[
      if rank == 1 then wait_for "0" wait_for "2" print "about to" io.write "fail" os.exit(7) end
      mark(rank) sleep(200)]])
    assert.equal(7, code)
    assert.matches("launch: rank 1 %(local rank 1, pid %d+%) failed first, after %d+%.%d s, at %d%d%d%d%-", err)
    assert.matches("exit code 7; its last lines:\n  | about to\n  | fail\n", err, 1, true)
    assert.is_true(seconds < check.PROMPT_S)
    assert_gone(3)
    _, err, code = launch("--nproc-per-node 2 script.lua", "if rank == 1 then error 'boom' end sleep(200)")
    assert.equal(1, code)
    assert.matches("  | psluajit: script.lua:", err:gsub("| %S*psluajit:", "| psluajit:"), 1, true)
    assert.matches("boom", err, 1, true)
  end)

  it("reports a rank that a signal ended", function()
    local _, err, code = launch("--nproc-per-node 2 script.lua",
      "if rank == 0 then wait_for '1' signal.kill(unistd.getpid(), 9) end mark '1' sleep(200)")
    assert.equal(137, code)
    assert.matches("launch: rank 0 .* failed first, .*killed by signal 9 %(SIGKILL%); it wrote nothing", err)
    assert_gone(2)
  end)

  it("kills ranks that do not end in time, also stopped ones", function()
    local _, err, code, seconds = launch("--nproc-per-node 3 --grace 1 script.lua", [[
      if rank == 0 then wait_for "1" wait_for "2" sleep(0.1) os.exit(5) end
      if rank == 1 then signal.signal(signal.SIGTERM, signal.SIG_IGN) end
      mark(rank)
      if rank == 2 then signal.kill(unistd.getpid(), signal.SIGSTOP) end
      sleep(200)]])
    assert.equal(5, code)
    assert.matches("launch: 1 of the ranks did not end within 1 s after the signal and were killed", err, 1, true)
    assert.is_true(seconds >= 1 and seconds < check.PROMPT_S)
    assert_gone(3)
  end)

  it("restarts all ranks, and gives up in the end", function()
    local script = "print('attempt', attempt, rank) if rank == 1 then wait_for('go' .. attempt) " ..
      "if attempt < tonumber(arg[1]) then os.exit(4) end end mark('go' .. attempt)"
    local out, err, code = launch("--nproc-per-node 2 --max-restarts 2 script.lua 2", script)
    assert.equal(0, code)
    assert.matches("launch: restart 1 of 2\n", err, 1, true)
    assert.matches("launch: restart 2 of 2\n", err, 1, true)
    assert.equal("[0] attempt\t0\t0\n[0] attempt\t1\t0\n[0] attempt\t2\t0\n" ..
      "[1] attempt\t0\t1\n[1] attempt\t1\t1\n[1] attempt\t2\t1\n", sorted(out))
    assert_gone(6)
    out, err, code = launch("--nproc-per-node 2 --max-restarts 1 script.lua 9", script)
    assert.equal(4, code)
    assert.is_nil(out:find("attempt\t2", 1, true))
    assert.is_nil(err:find("restart 2", 1, true))
    assert_gone(4)
  end)

  it("restarts with fewer ranks if allowed, down to the minimum", function()
    local out, err, code = launch("--nproc-per-node 2:4 --max-restarts 4 script.lua", [[
      print(attempt, rank, os.getenv "WORLD_SIZE", os.getenv "LOCAL_WORLD_SIZE")
      local size = tonumber(os.getenv "WORLD_SIZE")
      if rank < size - 1 then mark(attempt .. "-" .. rank) sleep(200) end
      for r = 0, size - 2 do wait_for(attempt .. "-" .. r) end
      os.exit(3)]])
    assert.equal(3, code)
    local expected = {}
    for attempt, size in ipairs { 4, 3, 2, 2, 2 } do
      for r = 0, size - 1 do
        expected[#expected + 1] = ("[%d] %d\t%d\t%d\t%d\n"):format(r, attempt - 1, r, size, size)
      end
    end
    assert.equal(sorted(table.concat(expected)), sorted(out))
    assert.matches("launch: restart 1 of 4, with 3 of 4 ranks\n", err, 1, true)
    assert.matches("launch: restart 4 of 4, with 2 of 4 ranks\n", err, 1, true)
    assert_gone(13)
  end)

  it("passes signals on, and does not restart after them", function()
    for name, number in pairs { SIGINT = 2, SIGTERM = 15, SIGHUP = 1 } do
      local _, err, code = launch("--nproc-per-node 2 --max-restarts 3 script.lua",
        ("if rank == 0 then wait_for '1' signal.kill(launcher, signal.%s) end mark '1' sleep(200)"):format(name))
      assert.equal(128 + number, code)
      assert.matches(("launch: %s: passed on to the ranks"):format(name), err, 1, true)
      assert.is_nil(err:find("failed first", 1, true))
      assert_gone(2)
    end
    -- Ranks that save and end by themselves after the signal have not failed. SIGUSR1 is only forwarded.
    for _, name in ipairs { "SIGTERM", "SIGUSR1" } do
      local out, _, code = launch("--nproc-per-node 2 script.lua", ([[
        local told
        signal.signal(signal.%s, function() told = true end)
        mark(rank) wait_for "0" wait_for "1"
        if rank == 0 then signal.kill(launcher, signal.%s) end
        jit.off()
        for _ = 1, 10000 do if told then print "saved" os.exit(0) end pcall(sleep, 0.01) end
        os.exit(9)]]):format(name, name))
      assert.same({ "[0] saved\n[1] saved\n", 0 }, { sorted(out), code })
    end
    -- A second signal ends the grace period.
    local _, err, code, seconds = launch("--nproc-per-node 1 script.lua", [[
      signal.signal(signal.SIGTERM, signal.SIG_IGN)
      signal.kill(launcher, signal.SIGTERM) sleep(0.2) signal.kill(launcher, signal.SIGTERM) sleep(200)]])
    assert.equal(128 + 15, code)
    assert.matches("SIGTERM again: killing the ranks\nlaunch: 1 of the ranks were killed\n", err, 1, true)
    assert.is_true(seconds < check.PROMPT_S)
    assert_gone(1)
  end)

  it("leaves nothing behind: children of ranks, and ranks of a killed launcher", function()
    local child = "local pid = unistd.fork() if pid == 0 then sleep(200) unistd._exit(0) end note(pid) "
    for _, ending in ipairs { "", "os.exit(3)", "signal.kill(unistd.getpid(), 9)",
      "signal.kill(launcher, 15) sleep(200)" } do
      local _, _, _, seconds = launch("--nproc-per-node 2 script.lua", child ..
        "mark(rank) wait_for '0' wait_for '1' " .. ending)
      assert.is_true(seconds < check.PROMPT_S)
      assert_gone(4)
    end
    -- If the launcher is killed by a signal that no process can handle, the ranks, their children and the warden end,
    -- too.
    local _, _, code = launch("--nproc-per-node 2 script.lua", child .. [[
      if rank == 0 then
        wait_for '1'
        local all = io.open(("/proc/%d/task/%d/children"):format(launcher, launcher)):read "*a"
        for one in all:gmatch "%d+" do note(one) end
        signal.kill(launcher, 9)
      end mark '1' sleep(200)]])
    assert.equal(137, code)
    assert_gone(7)  -- 2 ranks are recorded twice, then 2 children and the warden
    launch("--nproc-per-node 2 script.lua 2>told | head -n 1; true",
      "mark(rank) wait_for '0' wait_for '1' while true do print 'more' end")
    assert.matches("launch: cannot write output; all ranks were ended", slurp "told", 1, true)
    assert_gone(2)
  end)

  it("reaps ended processes while others run", function()
    local out, _, code = launch("--nproc-per-node 2 script.lua", [[
      if rank == 1 then os.exit(0) end
      sleep(0.5)
      local children = io.open(("/proc/%d/task/%d/children"):format(launcher, launcher)):read "*a"
      print(select(2, children:gsub("%d+", "")))]])
    assert.same({ "[0] 2\n", 0 }, { out, code })                       -- the children are this rank and the warden
  end)

  it("finds scripts like psluajit, and starts other programs with --no-python", function()
    local _, err, code = launch("--nproc-per-node 3 nosuch.lua", "")
    assert.equal(1, code)
    local _, times = err:gsub("cannot open nosuch.lua", "")
    assert.equal(1, times)
    assert.matches(("and %s/tools/nosuch.lua"):format(paths.root), err, 1, true)
    _, err = launch("--nproc-per-node 3 train", "")
    assert.matches("\n  did you mean train_char, train_chunked or train_gpt2?\n", err, 1, true)
    local out
    out, _, code = launch("--nproc-per-node 1 train_char --help", "")      -- a name without .lua
    assert.equal(0, code)
    assert.matches("Usage: psluajit train_char.lua ", out, 1, true)
    out, _, code = launch("check_layers.lua " .. paths.root, "")            -- found in tools/
    assert.is_not_nil(out)
    assert.is_true(code <= 1)
    out, _, code = launch("--num_gpus 2 --no-python sh -c 'echo $RANK of $WORLD_SIZE'", "")
    assert.same({ "[0] 0 of 2\n[1] 1 of 2\n", 0 }, { sorted(out), code })
    _, err, code = launch("--no-python ./nosuch", "")
    assert.equal(127, code)
    assert.matches("cannot start ./nosuch: ", err, 1, true)
    out, _, code = launch("--help", "")
    assert.equal(0, code)
    assert.matches("--max-restarts N", out, 1, true)
    _, err, code = launch("--nproc-per-nod 2 script.lua", "")
    assert.equal(1, code)
    assert.matches("launch: there is no option --nproc-per-nod; did you mean --nproc-per-node?", err, 1, true)
  end)
end)
