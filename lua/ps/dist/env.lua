-- SPDX-License-Identifier: BSD-3-Clause
-- Finds this process's rank and the number of ranks in the variables that a launcher set. The first of these sources
-- that has values is used:
--   1. explicit values
--   2. torchrun's variables, RANK and WORLD_SIZE, which launch.lua and PyTorchJob also set
--   3. the variables of Open MPI
--   4. the variables of PMI (MPICH, Intel MPI)
--   5. the variables of Slurm
-- If no source has values, there is one process. Nothing is guessed. A malformed or missing value is an error that
-- names the variable, its value and the expected form. docs/distributed.md describes this for users.
local env = {}

---@class ps.dist.Env
---@field rank integer
---@field world_size integer
---@field local_rank integer
---@field local_world_size integer?    nil if no variable sets it
---@field master_addr string?          host of rank 0's store; nil if there is none (one process, or a file)
---@field master_port integer?
---@field source string                "flags", "torchrun", "OpenMPI", "PMI", "Slurm" or "one process"
---@field restart_count integer        how often the launcher has restarted these ranks
---@field run string?                  the run's name, which no other run has
---@field machines integer             1 if all ranks are on this machine, 2 if they are on several machines, 0 if this
---  is unknown
---@field rendezvous string?           "tcp://host:port" or "file:///path"; nil for one process

local FIRST_PORT, PORTS = 10000, 20000       -- ports derived from a job's id, below SYSTEM_PORT: first port, count
local SYSTEM_PORT = 32768                    -- Linux uses the ports from this number for outgoing connections
local USUAL_PORT = 29500                     -- port if only MASTER_ADDR is set, as in DeepSpeed
local MOST_HOSTS = 65536

local function fail(text, ...) error(text:format(...), 0) end

---@param name string
---@param value string|number
---@param expected string
local function wrong(name, value, expected) fail("%s is '%s'; expected %s", name, tostring(value), expected) end

-- -- reading values ---------------------------------------------------------------------------------------------------

-- Returns a value as a number in a range. The value's text must have only digits ("1e3", "0x1" and " 1" are rejected).
local function whole(name, value, low, high, note)
  local n = tostring(value):match("^%d+$") and tonumber(value)
  if not n or n < low or n > high then
    wrong(name, value, ("a whole number %s%s"):format(high >= 2 ^ 31 - 1 and ("of at least %d"):format(low)
      or ("from %d to %d"):format(low, high), note or ""))
  end
  return n
end

local function number(get, name, low, high, note)
  local value = get(name)
  return value and whole(name, value, low, high or 2 ^ 31 - 1, note)
end

-- Returns the rank and the size from the variables with these names. Returns nil unless both variables are set.
local function pair(get, rank_name, size_name)
  if not (get(rank_name) and get(size_name)) then return nil end
  local size = number(get, size_name, 1)
  return number(get, rank_name, 0, size - 1, (" (%s is %d)"):format(size_name, size)), size
end

-- Returns a process's rank within its node, and the number of processes on the node. Either variable may be missing.
local function local_pair(get, rank_name, size_name, world_size)
  local size = number(get, size_name, 1, world_size, (" (there are %d ranks)"):format(world_size))
  local high = (size or world_size) - 1
  return number(get, rank_name, 0, high, size and (" (%s is %d)"):format(size_name, size)
    or (" (there are %d ranks)"):format(world_size)), size
end

-- -- Slurm's lists ----------------------------------------------------------------------------------------------------

-- Appends the names that an element of a list denotes. The element is a text with any number of groups such as
-- [1-3,07].
local function expand(list, head, rest, bad)
  local plain, ranges, tail = rest:match("^([^%[%]]*)%[([^%[%]]+)%](.*)$")
  if not plain then
    if rest:find("[%[%]]") or head .. rest == "" then bad() end
    if #list >= MOST_HOSTS then bad() end
    list[#list + 1] = head .. rest
    return
  end
  for range in (ranges .. ","):gmatch("([^,]*),") do
    local from, to = range:match("^(%d+)%-(%d+)$")
    if not from then from, to = range:match("^%d+$"), range end
    if not from or #from > 9 or #to > 9 then bad() end
    if tonumber(to) < tonumber(from) or tonumber(to) - tonumber(from) >= MOST_HOSTS then bad() end
    for i = tonumber(from), tonumber(to) do
      expand(list, head .. plain .. ("%0" .. #from .. "d"):format(i), tail, bad)
    end
  end
end

--- Returns the hosts of a node list in Slurm's form: "a[1-3,7],b" means a1, a2, a3, a7, b.
---@param text string
---@param name? string  the variable that contains the text, for errors
---@return string[]
function env.hosts(text, name)
  local function bad()
    wrong(name or "the node list", text, ("hosts in Slurm's form, such as node[1-3,7],big1, at most %d")
      :format(MOST_HOSTS))
  end
  if not text:match("^[%w%.%-_%[%],]+$") then bad() end
  local list, depth, first = {}, 0, 1
  local all = text .. ","
  for i = 1, #all do
    local c = all:sub(i, i)
    if c == "[" then depth = depth + 1 elseif c == "]" then depth = depth - 1 end
    if c == "," and depth == 0 then
      expand(list, "", all:sub(first, i - 1), bad)
      first = i + 1
    end
  end
  if depth ~= 0 then bad() end
  return list
end

-- Returns the number of tasks on node `index` (from 0), given a text such as "2(x3),1". Returns nil if the text lists
-- fewer nodes.
local function tasks_on(text, index, name)
  local seen = 0
  for part in (text .. ","):gmatch("([^,]*),") do
    local tasks, times = part:match("^(%d+)%(x(%d+)%)$")
    if not tasks then tasks, times = part:match("^%d+$"), "1" end
    if not tasks then wrong(name, text, "counts in Slurm's form, such as 2(x3),1") end
    seen = seen + tonumber(times)
    if index < seen then return tonumber(tasks) end
  end
end

local function first_set(get, ...)
  for _, name in ipairs { ... } do
    if get(name) then return name, get(name) end
  end
end

-- Returns this task's local rank and the number of tasks on its node, from Slurm's variables.
local function slurm_local(get, world_size)
  local node = number(get, "SLURM_NODEID", 0) or 0
  local name, text = first_set(get, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
  local size = name and tasks_on(text, node, name)
  local nodes_name = first_set(get, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
  local nodes = nodes_name and number(get, nodes_name, 1)
  if nodes == 1 then size = world_size end
  if size and size > world_size then size = nil end  -- the count is for the whole job; this step has fewer tasks
  local high = (size or world_size) - 1
  return number(get, "SLURM_LOCALID", 0, high, (" (there are %d tasks here)"):format(high + 1)), size
end

-- Returns an id of one run of srun.
local function slurm_step(get)
  return get("SLURM_JOB_ID") and get("SLURM_JOB_ID") .. "." .. (get("SLURM_STEP_ID") or "")
end

-- -- the launchers ----------------------------------------------------------------------------------------------------

-- functions that read a launcher's variables, or return nil if they are not set
local sources = {}

function sources.torchrun(get)
  local rank, size = pair(get, "RANK", "WORLD_SIZE")
  if not rank then return nil end
  local local_rank, local_size = local_pair(get, "LOCAL_RANK", get("LOCAL_WORLD_SIZE") and "LOCAL_WORLD_SIZE"
    or "LOCAL_SIZE", size)
  local assumed = not local_rank
  if assumed then
    -- LOCAL_RANK is missing if each pod has one process (PyTorchJob). If a pod has several processes, a launcher should
    -- have started this process. Without the launcher, this process would wait for ranks that are never started.
    local a_pod = tonumber((get("PET_NPROC_PER_NODE") or ""):match("^%d+$"))
    if a_pod and a_pod > 1 then
      fail("PET_NPROC_PER_NODE is '%d', but LOCAL_RANK is not set; start the script with tools/launch.lua in each pod, "
        .. "or set one process per pod in the job", a_pod)
    end
    local_rank, local_size = 0, local_size or 1
  end
  local agent = (get("TORCHELASTIC_USE_AGENT_STORE") or ""):lower()
  return { source = "torchrun", rank = rank, world_size = size, local_rank = local_rank, local_world_size = local_size,
    local_assumed = assumed, nodes = tonumber((get("PET_NNODES") or ""):match("^%d+$")),
    id = get("TORCHELASTIC_RUN_ID"), restart_count = number(get, "TORCHELASTIC_RESTART_COUNT", 0),
    agent_port = agent == "true" or agent == "1" }
end

function sources.OpenMPI(get)
  local rank, size = pair(get, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
  if not rank then return nil end
  local local_rank, local_size = local_pair(get, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", size)
  local _, id = first_set(get, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")
  return { source = "OpenMPI", rank = rank, world_size = size, local_rank = local_rank, local_world_size = local_size,
    local_name = "OMPI_COMM_WORLD_LOCAL_RANK", id = id, how = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT" }
end

function sources.PMI(get)
  local rank, size = pair(get, "PMI_RANK", "PMI_SIZE")
  if not rank then return nil end
  local local_rank, local_size = local_pair(get, "MPI_LOCALRANKID", "MPI_LOCALNRANKS", size)
  local id = get("SLURM_JOB_ID")
  if not local_rank and get("SLURM_LOCALID") then                  -- set by srun --mpi=pmi2
    local_rank, local_size = slurm_local(get, size)
    id = slurm_step(get)
  end
  return { source = "PMI", rank = rank, world_size = size, local_rank = local_rank, local_world_size = local_size,
    local_name = "MPI_LOCALRANKID", id = id, how = "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT" }
end

function sources.Slurm(get)
  -- A batch script also has SLURM_PROCID, but the script is a single process. Only srun starts ranks.
  if get("ENVIRONMENT") == "BATCH" and not get("SLURM_STEP_ID") then return nil end
  local size_name = first_set(get, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or "SLURM_NTASKS"
  local rank, size = pair(get, "SLURM_PROCID", size_name)
  if not rank then return nil end
  local local_rank, local_size = slurm_local(get, size)
  return { source = "Slurm", rank = rank, world_size = size, local_rank = local_rank, local_world_size = local_size,
    restart_count = number(get, "SLURM_RESTART_COUNT", 0), local_name = "SLURM_LOCALID",
    id = slurm_step(get) }
end

local ORDER = { "torchrun", "OpenMPI", "PMI", "Slurm" }

-- Raises an error if only one of a pair of variables is set. N processes that are started like this would be N runs of
-- one rank each, not one run of N ranks.
local function check_halves(get, found)
  if get("RANK") and get("WORLD_SIZE") then return end
  local size = number(get, "WORLD_SIZE", 1)
  if found then                                  -- scripts for Slurm often export only WORLD_SIZE
    if size and size ~= found.world_size then
      fail("WORLD_SIZE is '%d', but %s started %d ranks; unset WORLD_SIZE, or set RANK as well", size, found.source,
        found.world_size)
    end
    return
  end
  for _, names in ipairs { { "RANK", "WORLD_SIZE" }, { "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE" },
    { "PMI_RANK", "PMI_SIZE" } } do
    for i, name in ipairs(names) do
      local other = names[3 - i]
      if get(name) and not (name == "WORLD_SIZE" and size == 1) then
        fail("%s is '%s', but %s is not set; set both or neither", name, get(name), other)
      end
    end
  end
  if get("PMIX_RANK") then
    fail("PMIX_RANK is '%s', but no variable has the number of ranks; set RANK and WORLD_SIZE", get("PMIX_RANK"))
  end
end

local function from_flags(get, o)
  local given, other = o.rank and "rank" or "world_size", o.rank and "world_size" or "rank"
  if not (o.rank and o.world_size) then
    fail("%s is given (%s), but %s is not; give both or neither", given, tostring(o[given]), other)
  end
  local size = whole("world_size", o.world_size, 1, 2 ^ 31 - 1)
  local rank = whole("rank", o.rank, 0, size - 1, (" (world_size is %d)"):format(size))
  local note = (" (world_size is %d)"):format(size)
  local local_rank = not o.local_rank and number(get, "LOCAL_RANK", 0, size - 1, note) or 0
  return { source = "flags", rank = rank, world_size = size, local_rank = local_rank,
    local_world_size = size == 1 and 1 or nil }
end

-- -- where the ranks meet ---------------------------------------------------------------------------------------------

-- Returns the id of the process that started all ranks of this node. This is the nearest ancestor that belongs to MPI.
-- Shells may be between the ancestor and this process. If there is no such ancestor, returns the id of the parent.
local function starter()
  local parent = require("posix.unistd").getppid()
  local pid = parent
  for _ = 1, 8 do
    local f = io.open(("/proc/%d/stat"):format(pid), "rb")
    if not f then break end
    local name, up = f:read("*a"):match("%((.*)%) %a (%d+)")
    f:close()
    if not name or tonumber(up) < 1 then break end
    if name:match("^hydra_") or name:match("^mpi") or name:match("^orte") or name:match("^prte") then return pid end
    pid = tonumber(up)
  end
  return parent
end

-- Returns 1 if the variables show that all ranks are on one machine, 2 if they show that the ranks are on several
-- machines, or 0 if this is unknown. With one process per pod, it is unknown where the other pods run.
local function machines_of(found)
  if found.world_size == 1 then return 1 end
  if found.nodes and found.nodes > 1 then return 2 end
  if not found.local_world_size or found.local_assumed then return 0 end
  return found.local_world_size == found.world_size and 1 or 2
end

local function port_from(id)
  local sum = 0
  for i = 1, #id do sum = (sum * 31 + id:byte(i)) % 2 ^ 31 end
  return FIRST_PORT + sum % PORTS
end

local HOST = "the name or the address of rank 0's host, without a port"

local function host(get, name)
  local value = get(name)
  if not value then return nil end
  local _, colons = value:gsub(":", "")                          -- an IPv6 address has several colons
  if not value:match("^[%w%.%-_:%%]+$") or colons == 1 then wrong(name, value, HOST) end
  return value
end

local function slurm_first_host(get)
  local name, text = first_set(get, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
  return name and env.hosts(text, name)[1]
end

local function check_rendezvous(name, value)
  local kind, rest = tostring(value):match("^(%a+)://(.*)$")
  local a_host = "^[%w%.%-_%[%]:%%]+"
  local port = kind == "tcp" and tonumber(rest:match(a_host .. ":(%d+)$"))
  if not (kind == "file" and rest:match("^/.") or port and port >= 1 and port <= 65535) then
    wrong(name, value, "tcp://HOST:PORT or file:///PATH")
  end
  return value
end

-- Returns the port for rank 0 if torchrun's agent uses `port` itself. torchrun --standalone draws `port` from the range
-- of ports for outgoing connections, so the port after it may be in use.
local function port_by_agent(port, one_node)
  if one_node and port >= SYSTEM_PORT then return port_from(tostring(port)) end
  return port < 65535 and port + 1 or port - 1
end

-- Derives master_addr, master_port and rendezvous from the values found.
local function meet(get, found, ppid)
  local addr = host(get, "PS_MASTER_ADDR") or host(get, "MASTER_ADDR")
  local addr_given = addr ~= nil
  local own = number(get, "PS_MASTER_PORT", 1, 65535)
  local port = number(get, "MASTER_PORT", 1, 65535)
  local one_node = machines_of(found) == 1
  if port and found.agent_port then port = port_by_agent(port, one_node) end
  port = own or port
  if found.world_size == 1 then return addr, port, nil end
  if not addr and one_node then addr = "127.0.0.1" end
  if not addr and found.source ~= "torchrun" and found.source ~= "flags" then addr = slurm_first_host(get) end
  if not addr then
    fail("MASTER_ADDR is not set, and %s do not tell where rank 0 runs; expected %s%s, or "
      .. "PS_RENDEZVOUS=file:///PATH on a file system that all ranks share", found.source == "flags"
      and "rank and world_size" or found.source .. "'s variables", HOST, found.how and (" (" .. found.how .. ")") or "")
  end
  if not port and found.id and found.source ~= "torchrun" then port = port_from(found.id) end
  if not port and found.source ~= "torchrun" and found.source ~= "flags" and one_node then
    port = port_from(tostring(ppid or starter()))
  end
  if not port and addr_given then port = USUAL_PORT end
  if not port then
    fail("MASTER_PORT is not set; expected a free port from 1 to 65535 on %s, the same for all ranks", addr)
  end
  local at = one_node and "127.0.0.1" or addr  -- with one node, no other machine needs the address
  return addr, port, ("tcp://%s:%d"):format(at:find(":", 1, true) and "[" .. at .. "]" or at, port)
end

--- Returns this process's rank and the properties of its run. Raises a string if the variables contradict each other or
--- a value is missing.
---@param getenv? fun(name: string): string?
---@param o? { rank?: integer, world_size?: integer, local_rank?: integer, rendezvous?: string, ppid?: integer }
--- explicit values, which override variables; `ppid` replaces the id of the process that started the ranks
---@return ps.dist.Env
function env.read(getenv, o)
  local get = getenv or os.getenv
  o = o or {}
  local found
  if o.rank or o.world_size then found = from_flags(get, o) end
  for _, name in ipairs(ORDER) do
    if found then break end
    found = sources[name](get)
  end
  if not (found and found.source == "flags") then check_halves(get, found) end
  found = found or { source = "one process", rank = 0, world_size = 1, local_rank = 0, local_world_size = 1 }
  if o.local_rank then
    local size = found.local_world_size or found.world_size
    found.local_rank = whole("local_rank", o.local_rank, 0, size - 1, (" (there are %d ranks here)"):format(size))
  end
  if not found.local_rank then
    if found.world_size > 1 then
      fail("%s is not set, so rank %d's place on its node is unknown; set it, or RANK, LOCAL_RANK and WORLD_SIZE",
        found.local_name, found.rank)
    end
    found.local_rank, found.local_world_size = 0, 1
  end
  local rendezvous = o.rendezvous and check_rendezvous("rendezvous", o.rendezvous)
    or get("PS_RENDEZVOUS") and check_rendezvous("PS_RENDEZVOUS", get("PS_RENDEZVOUS"))
  local addr, port
  local machines = machines_of(found)
  if rendezvous then
    addr, port = rendezvous:match("^tcp://%[?(.-)%]?:(%d+)$")
    port = tonumber(port)
    if addr then machines = 0 end                                    -- other machines may use an explicit address
  else
    addr, port, rendezvous = meet(get, found, o.ppid)
  end
  return { source = found.source, rank = found.rank, world_size = found.world_size, local_rank = found.local_rank,
    local_world_size = found.local_world_size, master_addr = addr, master_port = port, rendezvous = rendezvous,
    restart_count = found.restart_count or 0, run = get("PS_RUN_ID") or found.id, machines = machines }
end

--- Returns a line about the values found, for logs.
---@param e ps.dist.Env
---@return string
function env.describe(e)
  if e.source == "one process" then return "one process" end
  return ("rank %d of %d, local rank %d%s, from %s%s%s"):format(e.rank, e.world_size, e.local_rank,
    e.local_world_size and " of " .. e.local_world_size or "", e.source == "flags" and "explicit values"
    or e.source .. "'s variables", e.rendezvous and "; meeting at " .. e.rendezvous or "",
    e.restart_count > 0 and ("; restart %d"):format(e.restart_count) or "")
end

return env
