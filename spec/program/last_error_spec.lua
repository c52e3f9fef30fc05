-- SPDX-License-Identifier: BSD-3-Clause
-- The error that ends the ranks of a job is printed once on a machine (src/last_error.c). A shell stands in for
-- mpiexec: it starts processes with MPICH's variables, and waits for them. spec/cluster has real launchers.
local paths = require "ps.paths"
local check = require "spec.check_lib"

describe("the error that ends the ranks of a job", function()
  local folder
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(os.execute("mkdir " .. folder) == 0)
  end)
  teardown(function() os.execute("rm -r " .. folder) end)

  local function write(name, text) check.write(folder .. "/" .. name, text) end
  local function slurp(name) return assert(check.read(folder .. "/" .. name)) end

  -- Runs a shell script that has `rank N EXPRESSION [SIZE]`, which runs a Lua statement as rank N of SIZE (default 2).
  -- Returns its output on standard error.
  local function run(script)
    write("job.sh", ([[
      cd %s
      unset PS_LAUNCHER_STDERR RANK WORLD_SIZE TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK SLURM_PROCID
      rank() { env PMI_RANK=$1 PMI_SIZE=${3:-2} MPI_LOCALNRANKS=${3:-2} %s -e "$2"; }
    ]]):format(folder, paths.exe) .. script)
    local p = assert(io.popen(("timeout -k 1 100 sh %s/job.sh 2>&1"):format(folder)))
    local text = p:read("*a")
    p:close()
    return text
  end

  local function count(text, word) return select(2, text:gsub(word, "")) end

  it("is printed by one of them, ignoring addresses", function()
    local text = run [[ rank 0 'error "no disk at 0x1f"'; rank 1 'error "no disk at 0x2f"'; echo "ends $?" ]]
    assert.equal(1, count(text, "no disk"), text)
    assert.matches("ends 1", text, 1, true)
    text = run(([[ for r in 0 1 2 3; do
      env PMI_RANK=$r PMI_SIZE=4 MPI_LOCALNRANKS=4 %s -e 'error "no disk"' & done; wait ]]):format(paths.exe))
    assert.equal(1, count(text, "no disk"), text)
  end)

  it("is printed by all ranks with a different error", function()
    local text = run [[ rank 0 'error "no disk 1"'; rank 1 'error "no disk 2"' ]]
    assert.equal(1, count(text, "no disk 1"), text)
    assert.equal(1, count(text, "no disk 2"), text)
  end)

  it("is printed by a single rank", function()
    assert.equal(1, count(run [[ rank 1 'error "no disk"' ]], "no disk"))
  end)

  it("is printed again by another job, and by each command of one", function()
    local text = run [[ rank 0 'error "no disk"' ]]
      .. run [[ rank 0 'error "no disk"'; rank 0 'error "no disk"'; rank 1 'error "no disk"' ]]
    assert.equal(3, count(text, "no disk"), text)
  end)

  it("is found across the shells of ranks", function()
    write("rank.sh", ("%s -e 'error \"no disk\"'; true\n"):format(paths.exe))
    local text = run [[ for r in 0 1; do env PMI_RANK=$r PMI_SIZE=2 sh rank.sh; done ]]
    assert.equal(1, count(text, "no disk"), text)
  end)

  it("is printed into each rank's own file", function()
    run [[ for r in 0 1; do rank $r 'error "no disk"' 2>err.$r; done ]]
    assert.equal(1, count(slurp "err.0", "no disk"))
    assert.equal(1, count(slurp "err.1", "no disk"))
    run [[ for r in 0 1; do rank $r 'error "no disk"' 2>>both; done ]]
    assert.equal(1, count(slurp "both", "no disk"))
  end)

  it("is printed by processes that no launcher has started", function()
    local text = run(([[ for i in 1 2; do %s -e 'error "no disk"'; done ]]):format(paths.exe))
    assert.equal(2, count(text, "no disk"), text)
    text = run(([[ for r in 0 1; do RANK=$r WORLD_SIZE=2 %s -e 'error "no disk"'; done ]]):format(paths.exe))
    assert.equal(2, count(text, "no disk"), text)
  end)

  it("is printed without waiting for a rank that cannot write it", function()
    -- Rank 0 blocks on a full pipe that no process reads, with the record locked, until rank 1 has ended.
    local long = [[error(("no disk "):rep(40000), 0)]]
    local text = run(([[
      mkfifo full
      sleep 100 <full & reader=$!
      records() { ls /tmp | grep -c psluajit-error-; }
      before=$(records)
      env PMI_RANK=0 PMI_SIZE=2 %s -e '%s' 2>full & blocked=$!
      until [ $(records) -gt $before ]; do sleep 0.05; done
      sleep 0.2
      rank 1 '%s' 2>err
      echo "ends $?"
      kill $reader
      wait $blocked
    ]]):format(paths.exe, long, long))
    assert.matches("ends 1", text, 1, true)
    assert.equal(40000, count(slurp "err", "no disk "))
  end)

  it("leaves no record after all ranks have failed", function()
    local before = io.popen("ls /tmp/psluajit-error-* 2>/dev/null | sort"):read("*a")
    run [[ rank 0 'error "no disk here"'; rank 1 'error "no disk here"' ]]
    assert.equal(before, io.popen("ls /tmp/psluajit-error-* 2>/dev/null | sort"):read("*a"))
  end)
end)
