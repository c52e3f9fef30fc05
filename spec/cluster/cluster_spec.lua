-- SPDX-License-Identifier: BSD-3-Clause
-- `make test-cluster`: a small training (train.lua) under the real launchers, and on two hosts in network namespaces,
-- has one process's losses; a cut link, a killed rank and invalid settings end every rank in bounded time. Tests for
-- which this machine lacks something are skipped by name. Each run has a process namespace of its own, if that can be
-- had, and a time limit.
local paths = require "ps.paths"

local no_gloo = require("spec.ranks_lib").no_gloo()
local here = paths.root .. "/spec/cluster"
local ABSENT = 77  -- exit code of a script in this folder that cannot start its program on this machine
local LIMIT_S = 100                       -- seconds after which a run that hangs is ended
-- time-out of groups that must end for another reason before it is reached
local FAR_S = 10 * LIMIT_S
local folder

local function sh(command) return os.execute(command .. " >/dev/null 2>&1") == 0 end
local function has(program) return sh("command -v " .. program) end

-- Starts a process namespace, as root or as a user who can be root in a new namespace. All processes of a run end with
-- it.
local contained = ""
for _, user in ipairs { "", "--map-root-user " } do
  local command = ("unshare %s--pid --fork --mount-proc --kill-child "):format(user)
  if contained == "" and sh(command .. "true") then contained = command end
end

local function write(name, text)
  local f = assert(io.open(folder .. "/" .. name, "wb"))
  f:write(text)
  f:close()
  return folder .. "/" .. name
end

-- Functions and variables for every script.
local FUNCTIONS = [[
  free_port() { $PSLUAJIT -e 'print((assert(require("ps.launch.port").free())))'; }
]]

--- Runs a shell script. The command `before` precedes its shell. Returns its output and exit code.
---@param script string
---@param before? string
local function run(script, before)
  local path = write("case.sh", FUNCTIONS .. script)
  local p = assert(io.popen(("cd %s && timeout -k 1 %d %s env -i PATH=\"$PATH\" HOME=%s OMP_NUM_THREADS=1 "
    .. "OMP_WAIT_POLICY=passive TRAIN=%s/train.lua PSLUAJIT=%s LAUNCH='%s %s/tools/launch.lua' HERE=%s MARKS=%s %s "
    .. "sh %s 2>&1 </dev/null; echo \"|$?\""):format(folder, LIMIT_S, contained, folder, here, paths.exe, paths.exe,
    paths.root, here, folder, before or "", path)))
  local text, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  return text, tonumber(code)
end

local function losses(text)
  local list = {}
  for step, loss in text:gmatch("loss (%d+) ([%d.]+)") do
    assert.equal(#list + 1, tonumber(step), text)
    list[#list + 1] = tonumber(loss)
  end
  return list
end

local one                                  -- the losses of a run with one process

local function as_one(text, source, size)
  local got = losses(text)
  assert.equal(5, #got, text)
  for i, loss in ipairs(one) do assert.near(loss, got[i], 1e-6) end
  assert.matches(("source %s, %d ranks\n"):format(source, size), text, 1, true)
end

--- Tests training that is started with `command`, which needs `program`.
local function trains(name, program, source, command)
  it(name, function()
    if not has(program) then
      pending(program .. " is not installed")
      return
    end
    local text, code = run(command)
    if code == ABSENT then
      pending(text)
      return
    end
    assert.equal(0, code, text)
    as_one(text, source, 2)
  end)
end

describe("a training", function()
  if no_gloo then return pending(no_gloo) end

  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(sh("mkdir " .. folder))
    local text, code = run("$PSLUAJIT $TRAIN")
    assert.equal(0, code, text)
    one = losses(text)
    assert.equal(5, #one, text)
  end)
  teardown(function() os.execute("rm -r " .. folder) end)

  describe("as with one process:", function()
    trains("psluajit's launcher", "sh", "torchrun", "$LAUNCH --nproc-per-node 2 $TRAIN")
    trains("Open MPI's mpirun", "mpirun.openmpi", "OpenMPI", [[
      export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
      mpirun.openmpi --oversubscribe -n 2 $PSLUAJIT $TRAIN]])
    trains("MPICH's mpiexec", "mpiexec.mpich", "PMI", "mpiexec.mpich -n 2 $PSLUAJIT $TRAIN")
    trains("Slurm's srun", "slurmctld", "Slurm", "$HERE/one_node_slurm.sh srun -n 2 --overcommit $PSLUAJIT $TRAIN")
    trains("Slurm's srun with PMI-2", "slurmctld", "PMI",
      "$HERE/one_node_slurm.sh srun --mpi=pmi2 -n 2 --overcommit $PSLUAJIT $TRAIN")
    -- Output is redirected to files. Otherwise Debian's torchrun 1.13 fails under its own Python 3.11.
    local TORCHRUN = "torchrun --no_python --nproc_per_node 2 --monitor_interval 1 -r 1 -t 1 --log_dir $MARKS/logs "
    trains("torchrun", "torchrun", "torchrun", TORCHRUN .. "--standalone $PSLUAJIT $TRAIN")
    trains("torchrun with an address", "torchrun", "torchrun",
      TORCHRUN .. "--master_addr 127.0.0.1 --master_port $(free_port) $PSLUAJIT $TRAIN")
  end)

  -- Both ranks raise the same error, then only one of them does. A shell keeps each rank alive for a while, since
  -- launchers end the other ranks at once.
  describe("whose script fails prints the error once:", function()
    setup(function()
      write("fail.lua", [[
        local ps = require "ps"
        local rank = ps.init_distributed { timeout = 40, quiet = true }:rank()
        if arg[1] == "before" then ps.synchronize() error "the same on all ranks" end
        if rank == 1 then error "on one rank alone" end
        ps.synchronize()
      ]])
      write("fail.sh", [[
        $PSLUAJIT fail.lua $1
        code=$?
        touch ended.$1.$2
        for _ in $(seq 200); do [ $(ls ended.$1.* | wc -l) = 2 ] && break; sleep 0.05; done
        sleep 0.5
        exit $code
      ]])
    end)

    local function fails(name, program, command)
      it(name, function()
        if not has(program) then
          pending(program .. " is not installed")
          return
        end
        local text, code = run("rm -f ended.*\n" .. command:format "before")
        assert.is_true(code ~= 0, text)
        assert.equal(1, select(2, text:gsub("the same on all ranks", "")), text)
        text, code = run("rm -f ended.*\n" .. command:format "alone")
        assert.is_true(code ~= 0, text)
        assert.equal(1, select(2, text:gsub("on one rank alone", "")), text)
      end)
    end

    fails("Open MPI's mpirun", "mpirun.openmpi", [[
      export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
      mpirun.openmpi --oversubscribe -n 2 sh -c 'sh fail.sh %s $OMPI_COMM_WORLD_RANK']])
    fails("MPICH's mpiexec", "mpiexec.mpich", "mpiexec.mpich -n 2 sh -c 'sh fail.sh %s $PMI_RANK'")
    fails("Slurm's srun", "slurmctld",
      "$HERE/one_node_slurm.sh srun -n 2 --overcommit sh -c 'sh fail.sh %s $SLURM_PROCID'")
    local torchrun = (os.getenv "PS_TORCH_PYTHON" or ""):gsub("[^/]*$", "") .. "torchrun"
    fails("torchrun", torchrun, torchrun .. [[ --no_python --nproc_per_node 2 --monitor_interval 1 --standalone \
      sh -c 'sh fail.sh %s $RANK']])
  end)

  describe("on two hosts", function()
    local why = not has "ip" and "ip (iproute2) is not installed"
      or not sh(here .. "/two_hosts.sh true") and "no network namespaces, neither as root nor in a user's own"
    if why then
      it("is not tried", function() pending(why) end)
      return
    end

    --- Runs `alpha` and `beta` at the same time, each on its host, and `middle` afterwards. Returns the output and exit
    --- code of each, and the number of bytes that alpha received over the link.
    local function two(alpha, beta, middle)
      write("alpha.sh", alpha)
      write("beta.sh", beta)
      local text, code = run(([[
        cd $MARKS && rm -f rank.*
        sh alpha.sh >alpha.out 2>&1 & alpha=$!
        $ON_BETA sh beta.sh >beta.out 2>&1 & beta=$!
        %s
        wait $alpha; a=$?
        wait $beta; b=$?
        cat alpha.out; echo "|"; cat beta.out; echo "|$a $b"
        sed -n 's/^ *ps0: *\([0-9]*\).*/received \1/p' /proc/net/dev
      ]]):format(middle or ""), here .. "/two_hosts.sh")
      local said_a, said_b, a, b, bytes = text:match("^(.*)|\n(.*)|(%d+) (%d+)\nreceived (%d+)\n$")
      if code ~= 0 or not bytes then error(("exit code %d: %s"):format(code, text), 2) end
      return { text = said_a, code = tonumber(a) }, { text = said_b, code = tonumber(b) }, tonumber(bytes)
    end

    local function launchers(options, middle, variables)
      local command = "%s $LAUNCH --nnodes 2 --master-addr 10.77.0.1 --master-port 29500 --grace 3 --node-rank %d %s "
        .. "$TRAIN"
      variables = variables or middle and "PS_CLUSTER_MARKS=$MARKS PS_CLUSTER_TIMEOUT=" .. FAR_S or ""
      return two(command:format(variables, 0, options), command:format(variables, 1, options), middle)
    end

    -- Waits until both ranks have trained for some steps.
    local TRAINING = "for r in 0 1; do for _ in $(seq 400); do [ -e rank.$r ] && break; sleep 0.05; done; done; "

    for stage = 0, 3 do
      it(("has one process's losses over the link, stage %d"):format(stage), function()
        local alpha, beta, bytes = launchers("--nproc-per-node 2", nil, "PS_CLUSTER_STAGE=" .. stage)
        assert.same({ 0, 0 }, { alpha.code, beta.code }, alpha.text .. beta.text)
        as_one(alpha.text, "torchrun", 4)
        assert.equal("", beta.text)
        assert.is_true(bytes > 1e5)
      end)
    end

    it("warns if there is no secret, and refuses secrets that differ", function()
      local warning = "this run has no secret (PS_SECRET): any process that can connect to tcp://10.77.0.1:29500"
      local command = "$LAUNCH --nnodes 2 --master-addr 10.77.0.1 --nproc-per-node 1 --grace 3 --node-rank %d $TRAIN"
      local alpha, beta = launchers("--nproc-per-node 1")
      assert.matches(warning, alpha.text, 1, true)
      assert.equal("", beta.text)
      local given = "PS_SECRET=abc " .. command
      alpha, beta = two(given:format(0), given:format(1))
      assert.same({ 0, 0 }, { alpha.code, beta.code }, alpha.text .. beta.text)
      as_one(alpha.text, "torchrun", 2)
      assert.is_nil(alpha.text:find("no secret", 1, true))
      alpha, beta = two("PS_CLUSTER_TIMEOUT=8 PS_SECRET=abc " .. command:format(0),
        "PS_CLUSTER_TIMEOUT=8 PS_SECRET=abd " .. command:format(1))
      assert.same({ 1, 1 }, { alpha.code, beta.code }, alpha.text .. beta.text)
      assert.matches("one that came from 10.77.0.2 was turned away: it has another secret", alpha.text, 1, true)
      assert.matches("has another secret; give all ranks the same PS_SECRET", beta.text, 1, true)
      alpha = two("PS_SECRET=required " .. command:format(0), "true")
      assert.matches("PS_SECRET is 'required', but there is no secret", alpha.text, 1, true)
      local loopback = "$LAUNCH --nnodes 2 --master-addr 127.0.0.1 --nproc-per-node 1 --grace 3 --node-rank 0 $TRAIN"
      alpha = two(loopback, "true")
      assert.matches("ranks are on several machines, but 127.0.0.1 is a loopback address", alpha.text, 1, true)
    end)

    it("listens only on the link's address", function()
      local alpha = two(("PS_CLUSTER_TIMEOUT=4 $LAUNCH --nnodes 2 --master-addr 10.77.0.1 --nproc-per-node 1 "
        .. "--node-rank 0 $TRAIN & for _ in $(seq 100); do grep -q ' 0A ' /proc/net/tcp && break; sleep 0.05; done; "
        .. "grep -h ' 0A ' /proc/net/tcp /proc/net/tcp6 | sed 's/^ *[0-9]*: /listens /'; wait"), "true")
      assert.matches("listens 01004D0A:733C", alpha.text, 1, true)
      assert.equal(1, select(2, alpha.text:gsub("listens ", "")), alpha.text)
    end)

    it("has the same losses in pods of a PyTorchJob, with one rank in each or several", function()
      local job = "export WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 MASTER_PORT=23456 PET_NNODES=2 PET_NPROC_PER_NODE=%s "
        .. "PET_MASTER_ADDR=10.77.0.1 PET_MASTER_PORT=23456 RANK=%d PET_NODE_RANK=%d\n%s $TRAIN"
      for size, how in pairs { [2] = { "auto", "$PSLUAJIT" }, [4] = { "2", "$LAUNCH" } } do
        local alpha, beta = two(job:format(how[1], 0, 0, how[2]), job:format(how[1], 1, 1, how[2]))
        assert.same({ 0, 0 }, { alpha.code, beta.code }, alpha.text .. beta.text)
        as_one(alpha.text, "torchrun", size)
      end
    end)

    it("ends on both when a rank is killed", function()
      local alpha, beta = launchers("--nproc-per-node 1", TRAINING .. "kill -9 $(cat rank.1)")
      assert.equal(1, alpha.code, alpha.text)
      assert.equal(128 + 9, beta.code, beta.text)
      assert.matches("\n%[0%] [^\n]*psluajit: [^\n]*rank 1 %(beta%) died", alpha.text)
      assert.matches("rank 1 .* failed first, .*killed by signal 9", beta.text)
    end)

    it("ends on both when the link is cut", function()
      local alpha, beta = launchers("--nproc-per-node 1", TRAINING .. "ip link set ps0 down")
      assert.equal(1, alpha.code, alpha.text)
      assert.equal(1, beta.code, beta.text)
      assert.matches("\n%[0%] [^\n]*psluajit: [^\n]*rank 1 %(beta%) is silent", alpha.text)
      assert.matches("^%[1%] [^\n]*psluajit: [^\n]*rank 0 %(alpha%) is silent", beta.text)
    end)

    it("continues after a killed rank if both launchers restart their ranks", function()
      local alpha, beta = launchers("--nproc-per-node 1 --max-restarts 1", TRAINING .. "kill -9 $(cat rank.1)")
      assert.same({ 0, 0 }, { alpha.code, beta.code }, alpha.text .. beta.text)
      assert.matches("launch: restart 1 of 1", alpha.text, 1, true)
      assert.matches("launch: restart 1 of 1", beta.text, 1, true)
      as_one(alpha.text:match("launch: restart 1 of 1\n(.*)$"), "torchrun", 2)
    end)

    it("ends on both if the nodes disagree on the number of ranks", function()
      local command = "PS_CLUSTER_TIMEOUT=%d $LAUNCH --nnodes 2 --master-addr 10.77.0.1 --grace 3 --node-rank %d "
        .. "--nproc-per-node %d $TRAIN"
      local alpha, beta = two(command:format(FAR_S, 0, 1), command:format(FAR_S, 1, 2))
      assert.same({ 1, 1 }, { alpha.code, beta.code }, alpha.text .. beta.text)
      for _, said in ipairs { alpha.text, beta.text } do
        assert.matches("a process %(rank [23]%) says that there are 4 ranks, rank 0 says 2", said)
      end
    end)
  end)
end)
