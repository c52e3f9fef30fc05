-- SPDX-License-Identifier: BSD-3-Clause
-- ps.dist.env: the meaning of the variables that launchers set.
local env = require "ps.dist.env"

local function read(variables, o)
  return env.read(function(name) return variables[name] end, o)
end

-- Returns an error's message, which must contain all of the given texts.
local function refused(variables, o, ...)
  local ok, why = pcall(read, variables, o)
  assert.is_false(ok)
  assert.equal("string", type(why))
  for _, text in ipairs { ... } do assert.matches(text, why, 1, true) end
end

local function with(base, changes)
  local t = {}
  for k, v in pairs(base) do t[k] = v end
  for k, v in pairs(changes) do t[k] = v or nil end
  return t
end

local TORCHRUN = { RANK = "5", WORLD_SIZE = "8", LOCAL_RANK = "1", LOCAL_WORLD_SIZE = "4", GROUP_RANK = "1",
  MASTER_ADDR = "node1", MASTER_PORT = "29400", TORCHELASTIC_RESTART_COUNT = "2" }
local OPENMPI = { OMPI_COMM_WORLD_RANK = "1", OMPI_COMM_WORLD_SIZE = "4", OMPI_COMM_WORLD_LOCAL_RANK = "1",
  OMPI_COMM_WORLD_LOCAL_SIZE = "4", PMIX_NAMESPACE = "1234", PMIX_RANK = "1" }
local MPICH = { PMI_RANK = "2", PMI_SIZE = "3", MPI_LOCALRANKID = "2", MPI_LOCALNRANKS = "3" }
local SLURM = { SLURM_PROCID = "3", SLURM_NTASKS = "5", SLURM_LOCALID = "1", SLURM_NODEID = "1", SLURM_NNODES = "3",
  SLURM_JOB_NODELIST = "gpu[07-08,12]", SLURM_TASKS_PER_NODE = "2(x2),1", SLURM_JOB_ID = "4711", SLURM_STEP_ID = "0",
  SLURM_RESTART_COUNT = "1" }

describe("the environment of a rank", function()
  it("is one process without variables", function()
    assert.same({ source = "one process", rank = 0, world_size = 1, local_rank = 0, local_world_size = 1, machines = 1,
      restart_count = 0 }, read {})
    assert.equal("one process", env.describe(read {}))
    assert.equal("one process", read({ WORLD_SIZE = "1" }).source)
    assert.equal("one process", read({ SLURM_NTASKS = "4", SLURM_JOB_ID = "7" }).source)       -- salloc's shell
    assert.equal("one process", read(with(SLURM, { ENVIRONMENT = "BATCH", SLURM_STEP_ID = false })).source)
    assert.equal("Slurm", read(with(SLURM, { ENVIRONMENT = "BATCH" })).source)
  end)

  it("reads torchrun's variables", function()
    local e = read(TORCHRUN)
    assert.same({ source = "torchrun", rank = 5, world_size = 8, local_rank = 1, local_world_size = 4,
      master_addr = "node1", master_port = 29400, rendezvous = "tcp://node1:29400", restart_count = 2,
      machines = 2 }, e)
    assert.equal("rank 5 of 8, local rank 1 of 4, from torchrun's variables; meeting at tcp://node1:29400; restart 2",
      env.describe(e))
  end)

  it("avoids the port of torchrun's agent", function()
    local held = with(TORCHRUN, { TORCHELASTIC_USE_AGENT_STORE = "True" })
    assert.equal(29401, read(held).master_port)
    assert.equal(29400, read(with(held, { TORCHELASTIC_USE_AGENT_STORE = "False" })).master_port)
    assert.equal(65534, read(with(held, { MASTER_PORT = "65535" })).master_port)
    assert.equal(31000, read(with(held, { PS_MASTER_PORT = "31000" })).master_port)
    -- torchrun --standalone draws a port from those of outgoing connections
    local alone = with(held, { LOCAL_WORLD_SIZE = "8", LOCAL_RANK = "5", MASTER_PORT = "45611" })
    local port = read(alone).master_port
    assert.truthy(port >= 10000 and port < 30000, port)
    assert.equal(port, read(with(alone, { RANK = "0", LOCAL_RANK = "0" })).master_port)
    assert.equal(45612, read(with(held, { MASTER_PORT = "45611" })).master_port)           -- several machines
    local moved = with(held, { PS_MASTER_PORT = "31000", PS_MASTER_ADDR = "other" })
    assert.equal("tcp://other:31000", read(moved).rendezvous)
  end)

  it("reads PyTorchJob's and DeepSpeed's variables", function()
    local job = { RANK = "1", WORLD_SIZE = "3", MASTER_ADDR = "job-master-0", MASTER_PORT = "23456", PET_NNODES = "3" }
    assert.same({ source = "torchrun", rank = 1, world_size = 3, local_rank = 0, local_world_size = 1,
      master_addr = "job-master-0", master_port = 23456, rendezvous = "tcp://job-master-0:23456", restart_count = 0,
      machines = 2 }, read(job))
    assert.equal(1, read(with(job, { PET_NPROC_PER_NODE = "auto" })).local_world_size)
    refused(with(job, { PET_NPROC_PER_NODE = "2", WORLD_SIZE = "6" }), nil, "PET_NPROC_PER_NODE is '2'",
      "LOCAL_RANK is not set", "tools/launch.lua in each pod")
    refused(with(job, { MASTER_ADDR = false }), nil, "MASTER_ADDR is not set", "torchrun's variables")
    refused(with(job, { MASTER_PORT = "http" }), nil, "MASTER_PORT is 'http'; expected a whole number from 1 to 65535")
    refused(with(job, { WORLD_SIZE = "1" }), nil, "RANK is '1'; expected a whole number from 0 to 0 (WORLD_SIZE is 1)")
    local deepspeed = { RANK = "3", WORLD_SIZE = "4", LOCAL_RANK = "1", LOCAL_SIZE = "2", MASTER_ADDR = "10.0.0.1" }
    local e = read(deepspeed)
    assert.same({ 1, 2, 29500 }, { e.local_rank, e.local_world_size, e.master_port })
  end)

  it("reads Open MPI's variables and finds a place to meet on one node", function()
    local e = read(OPENMPI)
    assert.same({ "OpenMPI", 1, 4, 1, 4, "127.0.0.1" },
      { e.source, e.rank, e.world_size, e.local_rank, e.local_world_size, e.master_addr })
    assert.is_true(e.master_port >= 10000 and e.master_port < 30000)
    assert.equal(e.master_port, read(with(OPENMPI, { OMPI_COMM_WORLD_RANK = "2" }), { ppid = 9 }).master_port)
    assert.not_equal(e.master_port, read(with(OPENMPI, { PMIX_NAMESPACE = "1235" })).master_port)
    local apart = with(OPENMPI, { OMPI_COMM_WORLD_LOCAL_SIZE = "2" })
    refused(apart, nil, "MASTER_ADDR is not set", "OpenMPI", "mpirun -x MASTER_ADDR=HOST", "PS_RENDEZVOUS")
    assert.equal("tcp://h:5", read(with(apart, { MASTER_ADDR = "h", MASTER_PORT = "5" })).rendezvous)
    e = read(with(apart, { SLURM_JOB_NODELIST = "b2,b1" }))                             -- mpirun in a Slurm job
    assert.equal("b2", e.master_addr)
  end)

  it("reads PMI's variables", function()
    local e = read(MPICH, { ppid = 4321 })
    assert.same({ "PMI", 2, 3, 2, 3, "127.0.0.1" },
      { e.source, e.rank, e.world_size, e.local_rank, e.local_world_size, e.master_addr })
    assert.equal(e.master_port, read(with(MPICH, { PMI_RANK = "0" }), { ppid = 4321 }).master_port)
    assert.not_equal(e.master_port, read(MPICH, { ppid = 4322 }).master_port)
    assert.equal(read(MPICH).master_port, read(MPICH).master_port)                      -- the real parent process
    refused(with(MPICH, { MPI_LOCALRANKID = false }), nil, "MPI_LOCALRANKID is not set")
    e = read(with(SLURM, { PMI_RANK = "3", PMI_SIZE = "5" }))                           -- srun --mpi=pmi2
    assert.same({ "PMI", 1, 2, "gpu07" }, { e.source, e.local_rank, e.local_world_size, e.master_addr })
  end)

  it("reads Slurm's variables", function()
    local e = read(SLURM)
    assert.same({ "Slurm", 3, 5, 1, 2, "gpu07", 1 }, { e.source, e.rank, e.world_size, e.local_rank,
      e.local_world_size, e.master_addr, e.restart_count })
    assert.equal(e.master_port, read(with(SLURM, { SLURM_PROCID = "4", SLURM_NODEID = "2", SLURM_LOCALID = "0" })).
      master_port)
    assert.equal(1, read(with(SLURM, { SLURM_NODEID = "2", SLURM_LOCALID = "0" })).local_world_size)
    assert.not_equal(e.master_port, read(with(SLURM, { SLURM_STEP_ID = "1" })).master_port)
    assert.equal("tcp://head:1234", read(with(SLURM, { MASTER_ADDR = "head", MASTER_PORT = "1234" })).rendezvous)
    e = read(with(SLURM, { SLURM_NNODES = "1", SLURM_NODEID = "0" }))
    assert.same({ "127.0.0.1", 5 }, { e.master_addr, e.local_world_size })
    e = read(with(SLURM, { SLURM_STEP_NUM_TASKS = "4", SLURM_STEP_NODELIST = "gpu12", SLURM_STEP_NUM_NODES = "2" }))
    assert.same({ 4, "gpu12" }, { e.world_size, e.master_addr })
  end)

  it("uses the first launcher whose variables are set", function()
    local all = {}
    for _, t in ipairs { SLURM, MPICH, OPENMPI, TORCHRUN } do all = with(all, t) end
    local seen = {}
    for i, name in ipairs { "none", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID" } do
      all[name] = nil
      if name == "RANK" then all.WORLD_SIZE = nil end
      if name == "OMPI_COMM_WORLD_RANK" then all.OMPI_COMM_WORLD_SIZE = nil end
      if name == "PMI_RANK" then all.PMI_SIZE, all.PMIX_RANK = nil, nil end
      seen[i] = read(all).source
    end
    assert.same({ "torchrun", "OpenMPI", "PMI", "Slurm", "one process" }, seen)
    local e = read(TORCHRUN, { rank = 0, world_size = 2, local_rank = 0 })
    assert.same({ "flags", 0, 2, 0 }, { e.source, e.rank, e.world_size, e.local_rank })
    assert.equal(3, read(TORCHRUN, { local_rank = 3 }).local_rank)
    assert.equal("file:///x/y", read(TORCHRUN, { rendezvous = "file:///x/y" }).rendezvous)
  end)

  it("meets at the address of PS_RENDEZVOUS", function()
    local e = read(with(TORCHRUN, { PS_RENDEZVOUS = "file:///shared/run7", MASTER_ADDR = false }))
    assert.same({ "file:///shared/run7", nil, nil }, { e.rendezvous, e.master_addr, e.master_port })
    e = read(with(TORCHRUN, { PS_RENDEZVOUS = "tcp://a:17" }))
    assert.same({ "tcp://a:17", "a", 17 }, { e.rendezvous, e.master_addr, e.master_port })
    e = read(with(TORCHRUN, { MASTER_ADDR = "fe80::1" }))
    assert.equal("tcp://[fe80::1]:29400", e.rendezvous)
    for _, bad in ipairs { "", "a:17", "tcp://a", "tcp://a:0", "tcp://a:70000", "file://", "file://x",
      "redis://a:1/x", "http://a:1/x" } do
      refused(with(TORCHRUN, { PS_RENDEZVOUS = bad }), nil,
        ("PS_RENDEZVOUS is '%s'; expected tcp://HOST:PORT or file:///PATH"):format(bad))
    end
  end)

  it("has the run's name, and the number of machines of its ranks", function()
    local function known(variables, o)
      local e = read(variables, o)
      return { e.run or "", e.machines, e.rendezvous }
    end
    assert.same({ "", 2, "tcp://node1:29400" }, known(TORCHRUN))
    assert.same({ "7", 2, "tcp://node1:29400" }, known(with(TORCHRUN, { TORCHELASTIC_RUN_ID = "7" })))
    assert.same({ "mine", 2, "tcp://node1:29400" }, known(with(TORCHRUN, { TORCHELASTIC_RUN_ID = "7",
      PS_RUN_ID = "mine" })))
    -- ranks on one machine meet on its loopback address, whatever the machine's other names
    assert.same({ "", 1, "tcp://127.0.0.1:29400" }, known(with(TORCHRUN, { WORLD_SIZE = "4", RANK = "1" })))
    local one = with(SLURM, { SLURM_NNODES = "1", SLURM_NODEID = "0", MASTER_ADDR = "10.1.2.3", MASTER_PORT = "17" })
    assert.same({ "4711.0", 1, "tcp://127.0.0.1:17" }, known(one))
    assert.same({ "4711.0", 2, "tcp://10.1.2.3:17" }, known(with(one, { SLURM_NNODES = "3" })))
    assert.same("1234", read(OPENMPI).run)
    -- An explicit address is used unchanged. With a file, it matters whether ranks are on other machines.
    assert.same({ "", 0, "tcp://a:17" }, known(with(TORCHRUN, { PS_RENDEZVOUS = "tcp://a:17" })))
    assert.same({ "", 2, "file:///a" }, known(with(TORCHRUN, { PS_RENDEZVOUS = "file:///a" })))
    assert.same({ "", 0, "file:///a" }, known({}, { rank = 0, world_size = 2, rendezvous = "file:///a" }))
    -- one process per pod implies nothing about the other pods
    assert.same({ "", 0, "tcp://127.0.0.1:5" }, known { RANK = "0", WORLD_SIZE = "2", MASTER_ADDR = "127.0.0.1",
      MASTER_PORT = "5" })
    assert.same({ "", 2, "tcp://localhost:5" }, known { RANK = "0", WORLD_SIZE = "2", MASTER_ADDR = "localhost",
      MASTER_PORT = "5", PET_NNODES = "2" })
  end)

  it("refuses malformed values by name", function()
    for _, bad in ipairs { "", "x", "-1", "1.5", "0x1", " 1", "1e1", "8", "99999999999999999999" } do
      refused(with(TORCHRUN, { RANK = bad }), nil, ("RANK is '%s'; expected a whole number from 0 to 7"):format(bad),
        "WORLD_SIZE is 8")
    end
    for name, bad in pairs { WORLD_SIZE = "0", LOCAL_RANK = "4", LOCAL_WORLD_SIZE = "9", MASTER_PORT = "65536",
      TORCHELASTIC_RESTART_COUNT = "no", MASTER_ADDR = "", PS_MASTER_PORT = "0" } do
      refused(with(TORCHRUN, { [name] = bad }), nil, ("%s is '%s'; expected "):format(name, bad))
    end
    for _, bad in ipairs { "host:29500", "tcp://host", "a b" } do
      refused(with(TORCHRUN, { MASTER_ADDR = bad }), nil, ("MASTER_ADDR is '%s'; expected"):format(bad))
    end
    refused(with(OPENMPI, { OMPI_COMM_WORLD_RANK = "4" }), nil, "OMPI_COMM_WORLD_RANK is '4'; expected")
    refused(with(MPICH, { MPI_LOCALNRANKS = "none" }), nil, "MPI_LOCALNRANKS is 'none'; expected")
    for name, bad in pairs { SLURM_PROCID = "5", SLURM_LOCALID = "2", SLURM_NODEID = "b", SLURM_NTASKS = "many",
      SLURM_TASKS_PER_NODE = "2(x2", SLURM_JOB_NODELIST = "gpu[1-", SLURM_RESTART_COUNT = "-" } do
      refused(with(SLURM, { [name] = bad }), nil, ("%s is '%s'; expected "):format(name, bad))
    end
  end)

  it("refuses values that contradict each other", function()
    refused({ RANK = "1" }, nil, "RANK is '1', but WORLD_SIZE is not set")
    refused({ WORLD_SIZE = "4" }, nil, "WORLD_SIZE is '4', but RANK is not set")
    refused({ PMI_SIZE = "4" }, nil, "PMI_SIZE is '4', but PMI_RANK is not set")
    refused({ PMIX_RANK = "0" }, nil, "PMIX_RANK is '0'", "set RANK and WORLD_SIZE")
    refused(with(SLURM, { WORLD_SIZE = "8" }), nil, "WORLD_SIZE is '8', but Slurm started 5 ranks")
    assert.equal("Slurm", read(with(SLURM, { WORLD_SIZE = "5" })).source)
    refused(with(TORCHRUN, { MASTER_ADDR = false }), nil, "MASTER_ADDR is not set", "expected")
    refused({}, { rank = 1 }, "rank is given (1), but world_size is not")
    refused({}, { rank = 2, world_size = 2 }, "rank is '2'; expected a whole number from 0 to 1")
    refused({}, { rank = 1, world_size = 2 }, "MASTER_ADDR is not set", "rank and world_size")
  end)

  it("expands Slurm's node lists", function()
    for text, list in pairs {
      ["a"] = "a", ["a,b"] = "a b", ["a[1-3,7]"] = "a1 a2 a3 a7", ["n[08-11]"] = "n08 n09 n10 n11",
      ["a[1,2]-x,b"] = "a1-x a2-x b", ["r[1-2]n[3-4]"] = "r1n3 r1n4 r2n3 r2n4", ["a.b-c_d[5]"] = "a.b-c_d5",
    } do assert.equal(list, table.concat(env.hosts(text), " ")) end
    for _, bad in ipairs { "", "a[", "a]", "a[]", "a[1-]", "a[3-1]", "a[x]", "a,,b", ",", "a[[1]]", "a b",
      "a[1-99999999]", "a[1-9999][1-9999]" } do
      local ok, why = pcall(env.hosts, bad, "SLURM_JOB_NODELIST")
      assert.is_false(ok)
      assert.matches("SLURM_JOB_NODELIST is '", why, 1, true)
    end
  end)
end)
