-- SPDX-License-Identifier: BSD-3-Clause
-- Runs with several processes. ps.init_distributed makes the group of all ranks, from a launcher's environment
-- (ps/dist/env.lua) or from explicit values. Groups send tensors between ranks (see "groups of ranks" in ps.h). Gloo
-- sends from host memory, and NCCL from NVIDIA GPUs. group_ops.lua has the collectives with gradients.
local native = require "ps.core.ffi"
local environment = require "ps.core.environment"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local env = require "ps.dist.env"
local group_ops = require "ps.dist.group_ops"
local arguments = require "ps.dist.arguments"
local create = require "ps.tensor.create"
local random = require "ps.core.random"
local mesh = require "ps.dist.mesh"
local secret = require "ps.dist.secret"
local exact = require "ps.core.exact"
local C, ffi, check = native.C, native.ffi, native.check
local open, tensor, whole = arguments.open, arguments.tensor, arguments.whole
local error = caller.error

local dist = {}

local rank_array = array "int32_t"

local OPTIONS = { seed = "number", backend = "string", rendezvous = "string", rank = "number", world_size = "number",
                  local_rank = "number", timeout = "number", heartbeat = "number", quiet = "boolean",
                  pipe_size = "whole", tp_size = "whole", num_micro_batches = "whole" }
-- options that are keys of a configuration, under BMTrain's names
local ASKED = { pipe_size = "pipeline.stages", tp_size = "tensor_parallel.size",
  num_micro_batches = "gradient_accumulation_steps" }
-- For each backend: whether it forbids or requires direct transfers between devices. "cpu:gloo,cuda:nccl" is PyTorch's
-- name for a backend.
local BACKENDS = { gloo = { never = true }, nccl = { must = true }, ["cpu:gloo,cuda:nccl"] = { must = true } }
local REDUCTIONS = { sum = C.PS_REDUCE_SUM, max = C.PS_REDUCE_MAX, min = C.PS_REDUCE_MIN }
local DEFAULT_TIMEOUT_S = 600
local DEFAULT_HEARTBEAT_S = 7  -- with heartbeats every second, all ranks detect a silent rank in less than 10 s

---@class ps.dist.Options
---@field seed? integer
---@field backend? string "nccl" sends GPU memory over NCCL, or raises an error. "gloo" never uses NCCL. With "gloo", a
---  single process also gets a Gloo group. By default, NCCL is used if all ranks have it
---@field pipe_size? integer the configuration's pipeline.stages
---@field tp_size? integer the configuration's tensor_parallel.size
---@field num_micro_batches? integer the configuration's gradient_accumulation_steps
---@field rendezvous? string "tcp://host:port" or "file:///path"
---@field rank? integer
---@field world_size? integer
---@field local_rank? integer
---@field timeout? number largest waiting time in seconds, for creating the group and for each call (default 600)
---@field heartbeat? number seconds after which a silent rank counts as dead (default 7); must be equal on all ranks
---@field quiet? boolean

---@class ps.Group
---@field backend string "gloo" or "self"
---@field devices {never?: boolean, must?: boolean} whether devices must not be connected, or must be connected
---@field private parts table<ps.Group, true> the groups that were split from this group
---@field private c ffi.cdata*|nil ps_group *; nil after the group was closed
local Group = {}
Group.__index = Group
for name, method in pairs(group_ops) do Group[name] = method end

--- Returns this process's rank in the group, from 0.
---@return integer
function Group:rank() return C.ps_group_rank(open(self)) end
--- Returns the number of ranks in the group.
---@return integer
function Group:size() return C.ps_group_size(open(self)) end
--- Returns the number of bytes of tensors that this rank has sent to other ranks since the group was created.
---@return integer
function Group:bytes_sent() return tonumber(C.ps_group_bytes_sent(open(self))) end

--- Returns the number of bytes that were sent in pieces while products ran. `bytes_sent` also counts these bytes.
---@return integer
function Group:bytes_in_pieces() return tonumber(C.ps_group_bytes_in_pieces(open(self))) end

--- Connects the ranks' devices of this name, so that the calls below accept tensors on these devices. All ranks must
--- call this function. The first collective with such tensors also connects the devices. The error EUNSUP means that
--- some rank cannot connect. The group then continues to send through host memory.
---@param device string
---@return string carrier the library that sends the bytes: "nccl", "gloo" ("self" in a world of one process)
function Group:connect(device)
  check(C.ps_group_connect(open(self), native.ctx, native.device_index(device)))
  return self:carrier()
end

--- Returns the library that sends the devices' memory, such as "nccl", or nil if no devices are connected.
---@return string?
function Group:carrier()
  local name = ffi.string(C.ps_group_carrier(open(self)))
  return name ~= "" and name or nil
end

--- Replaces a tensor on all ranks by the elementwise sum, maximum or minimum of all ranks' tensors. Sums are computed
--- in the order of ranks, in fp32, or in fp64 for fp64 tensors. For max and min, and for sums of int32 and int64, the
--- tensors must be in host memory.
---@param t ps.Tensor of the same shape and type on all ranks
---@param reduce? "sum"|"max"|"min" (default "sum"); in max and min, a NaN on any rank results in NaN
---@return ps.Tensor t
function Group:all_reduce(t, reduce)
  local number = REDUCTIONS[reduce or "sum"]
  if not number then
    error(("group:all_reduce: there is no reduction '%s'; the reductions are sum, max and min")
      :format(tostring(reduce)))
  end
  check(C.ps_group_all_reduce(open(self), tensor(t, "t", "all_reduce"), number))
  return t
end

--- Sums all ranks' `input`, and writes this rank's part of the sum to `out`. The sum is divided into equal parts, one
--- per rank.
---@param out ps.Tensor [n, ...], overwritten
---@param input ps.Tensor [size * n, ...]
---@return ps.Tensor out
function Group:reduce_scatter(out, input)
  check(C.ps_group_reduce_scatter(open(self), tensor(out, "out", "reduce_scatter"),
    tensor(input, "in", "reduce_scatter")))
  return out
end

--- Concatenates all ranks' `input` in the order of ranks, and writes the result to `out`.
---@param out ps.Tensor [size * n, ...], overwritten
---@param input ps.Tensor [n, ...]
---@return ps.Tensor out
function Group:all_gather(out, input)
  check(C.ps_group_all_gather(open(self), tensor(out, "out", "all_gather"), tensor(input, "in", "all_gather")))
  return out
end

--- Overwrites each rank's tensor with the tensor of rank `root`.
---@param t ps.Tensor of the same shape and type on all ranks
---@param root? integer (default 0)
---@return ps.Tensor t
function Group:broadcast(t, root)
  check(C.ps_group_broadcast(open(self), tensor(t, "t", "broadcast"), whole(root or 0, "root", "broadcast")))
  return t
end

--- Waits until all ranks have called barrier.
function Group:barrier() check(C.ps_group_barrier(open(self))) end

--- Sends a tensor to another rank, which must call recv at the same time.
---@param t ps.Tensor
---@param peer integer the rank that receives
function Group:send(t, peer)
  check(C.ps_group_send(open(self), tensor(t, "t", "send"), whole(peer, "peer", "send")))
end

--- Receives a tensor from another rank, which must call send at the same time.
---@param t ps.Tensor overwritten; must have the shape and dtype of the sent tensor
---@param peer integer the rank that sends
---@return ps.Tensor t
function Group:recv(t, peer)
  check(C.ps_group_recv(open(self), tensor(t, "t", "recv"), whole(peer, "peer", "recv")))
  return t
end

--- Closes the group and the groups that were split from it. Closed groups cannot be used. A second call does nothing.
--- First waits for all transfers of GPU memory that are still running in any group of the process. If a transfer does
--- not complete, raises an error after the group is closed.
function Group:close()
  if not self.c then return end
  local ended, why = pcall(check, C.ps_groups_settle())
  for part in pairs(self.parts) do
    local ok, problem = pcall(part.close, part)
    if ended and not ok then ended, why = false, problem end
  end
  C.ps_group_close(ffi.gc(self.c, nil))
  self.c = nil
  mesh.close(self)
  if not ended then error(why, 0) end
end

local out = ffi.new("ps_group *[1]")

local function own(backend)
  return setmetatable({ c = ffi.gc(out[0], C.ps_group_close), backend = backend, devices = {},
                        parts = setmetatable({}, { __mode = "k" }) }, Group)
end

--- Returns a group of some ranks of this group. The new group uses the same connections. A failure in one group ends
--- all groups that share the connections. All ranks of this group must call this function at the same time. Each rank
--- passes the list of the new group that it joins.
---@param ranks integer[] ranks in this group, in the order of the new group
---@param axis string the new group's name in errors: 1 to 15 letters, digits and "_"
---@return ps.Group
function Group:split(ranks, axis)
  local c = open(self)
  if type(ranks) ~= "table" then error(("group:split: ranks is a %s; it must be a list"):format(type(ranks))) end
  if type(axis) ~= "string" then error(("group:split: axis is a %s; it must be a name"):format(type(axis))) end
  local list = rank_array(#ranks + 1)
  for i, rank in ipairs(ranks) do list[i - 1] = whole(rank, ("ranks[%d]"):format(i), "split") end
  check(C.ps_group_split(c, #ranks, list, axis, out))
  local group = own(self.backend)
  group.devices = self.devices
  self.parts[group] = true
  return group
end

--- Returns the group's name in errors. The name is the axis along which the group was cut. Returns nil for the group of
--- all ranks.
---@return string?
function Group:axis()
  local axis = ffi.string(C.ps_group_axis(open(self)))
  return axis ~= "" and axis or nil
end

--- Returns the global rank of one of this group's ranks.
---@param rank? integer rank in this group (default: this process)
---@return integer
function Group:world_rank(rank)
  local c = open(self)
  return check(C.ps_group_world_rank(c, whole(rank or C.ps_group_rank(c), "rank", "world_rank")))
end

--- Returns a group of only this process, for scripts that can also run alone.
---@return ps.Group
function dist.self()
  if C.ps_machine_pretended() ~= 0 then                     -- simulated devices have no bytes to send
    check(C.ps_group_pretend(native.ctx, 0, 1, out))
    return own "nobody"
  end
  check(C.ps_group_self(native.ctx, out))
  return own "self"
end

-- Returns whether all ranks are known to be on this machine.
local function all_here(rendezvous, machines)
  local host = rendezvous:match("^tcp://%[?(.-)%]?:%d+$")
  if not host then return machines == 1 end
  return C.ps_host_is_loopback(host) == 1
end

-- Prints a note if rank 0's host name does not resolve to an address. The ranks meet nevertheless if the name resolves
-- later, before the time-out.
local function tell_unresolved(rendezvous, rank, size, timeout)
  local host = rank > 0 and rendezvous:match "^tcp://%[?(.-)%]?:%d+$"
  local name = host and "." .. host:lower():gsub("%.$", "")
  if not name or name == ".localhost" or name:find "^%..+%.localhost$" then return end     -- as in src/rendezvous/net.c
  local found, why = require("posix.sys.socket").getaddrinfo(host, "0", {})
  if found then return end
  io.stderr:write(("psluajit: rank %d of %d: the name of rank 0's host, %s (MASTER_ADDR), does not resolve to an "
    .. "address (%s); this rank looks it up again for up to %g s\n"):format(rank, size, host, why, timeout))
end

--- Returns the group of the ranks that meet at `rendezvous` ("tcp://host:port" or "file:///path"). The group uses Gloo.
--- The ranks prove to each other that they know the secret (ps.dist.secret).
---@param rendezvous string
---@param rank integer
---@param size integer
---@param timeout? number largest waiting time in seconds, for creating the group and for each call
---@param heartbeat? number seconds after which a silent rank counts as dead
---@param run? string the run's name (default PS_RUN_ID)
---@param machines? integer 1 if all ranks are on this machine, 2 if they are on several machines, 0 or nil if this is
--- unknown
---@return ps.Group
function dist.gloo(rendezvous, rank, size, timeout, heartbeat, run, machines)
  if C.ps_machine_pretended() ~= 0 then                     -- a dry run opens no port
    check(C.ps_group_pretend(native.ctx, rank, size, out))
    return own "nobody"
  end
  local known = secret.find(os.getenv, rendezvous, all_here(rendezvous, machines))
  if not known and rank == 0 and size > 1 and rendezvous:match("^tcp:") then
    io.stderr:write(("psluajit: this run has no secret (PS_SECRET): any process that can connect to %s can take the "
      .. "place of a rank that has not joined yet; docs/distributed.md says how to prevent that\n"):format(rendezvous))
  end
  run = run or environment.get "PS_RUN_ID"
  tell_unresolved(rendezvous, rank, size, timeout or DEFAULT_TIMEOUT_S)
  local meeting = ffi.new("ps_meeting", { rendezvous = rendezvous, run = run, secret = known, rank = rank, size = size,
    machines = machines or 0, timeout_s = timeout or DEFAULT_TIMEOUT_S,
    heartbeat_s = heartbeat or DEFAULT_HEARTBEAT_S })
  check(C.ps_group_gloo(native.ctx, meeting, out))
  return own "gloo"
end

local function check_options(o)
  if o.seed then caller.seed(o.seed, "ps.init_distributed: seed") end
  if o.backend and not BACKENDS[o.backend] then
    error(("ps.init_distributed: there is no backend '%s'; the backends are gloo and nccl (Gloo for host memory, NCCL "
      .. "for GPUs)"):format(o.backend))
  end
  for name in pairs(ASKED) do
    if o[name] then caller.whole(o[name], "ps.init_distributed: " .. name, 1) end
  end
end

-- Returns the options that are settings of a configuration, by configuration key, as {value, name in messages}.
local function asked(o)
  local keys = {}
  for name, path in pairs(ASKED) do
    if o[name] then keys[path] = { o[name], "ps.init_distributed's " .. name } end
  end
  return keys
end

--- Joins the other ranks. Without a launcher and explicit values, the process is a world of one rank. Unless `quiet` is
--- set, rank 0 prints once which source its rank was read from.
---@param options? ps.dist.Options seed: argument of ps.manual_seed, equal on all ranks
---@return ps.Group
function dist.init_distributed(options)
  local o = caller.options(options, "ps.init_distributed", OPTIONS)
  check_options(o)
  if mesh.is_open() then error("ps.init_distributed was called before; close that group first (group:close())") end
  local e = env.read(os.getenv, { rank = o.rank, world_size = o.world_size, local_rank = o.local_rank,
                                  rendezvous = o.rendezvous })
  C.ps_local_rank_set(e.local_rank)
  local group
  local devices = BACKENDS[o.backend] or {}
  if e.world_size == 1 and not devices.never then group = dist.self()
  else
    local rendezvous = o.rendezvous or e.rendezvous
      or e.master_addr and ("tcp://%s:%d"):format(e.master_addr, e.master_port)
    if not rendezvous then
      error("ps.init_distributed: the meeting point of the ranks is unknown; pass rendezvous = \"tcp://HOST:PORT\", or "
        .. "set MASTER_ADDR and MASTER_PORT")
    end
    group = dist.gloo(rendezvous, e.rank, e.world_size, o.timeout, o.heartbeat, e.run, e.machines)
  end
  C.ps_group_devices(group.c, devices.never and 1 or 0, devices.must and 1 or 0)
  group.devices = devices
  mesh.open(group, e, asked(o))
  if e.rank == 0 and e.world_size > 1 and not o.quiet then
    io.stderr:write(("psluajit: %s, %s\n"):format(env.describe(e), group.backend))
  end
  if devices.must then                            -- a failure is raised here and not in the first step
    local ok, problem = pcall(group.connect, group, "cuda")
    if not ok then
      group:close()
      error(('ps.init_distributed with backend = "%s": %s'):format(o.backend,
        type(problem) == "table" and problem.msg or tostring(problem)))
    end
  end
  if o.seed then random.seed(o.seed) end
  return group
end

--- Returns this process's global rank, which is 0 before ps.init_distributed.
---@return integer
function dist.rank() return mesh.env() and mesh.env().rank or 0 end
--- Returns the number of ranks, which is 1 without ps.init_distributed.
---@return integer
function dist.world_size() return mesh.env() and mesh.env().world_size or 1 end
--- Returns this process's rank among the processes on its machine, which is 0 before ps.init_distributed.
---@return integer
function dist.local_rank() return mesh.env() and mesh.env().local_rank or 0 end

--- Prints values on only one rank, like print. By default, rank 0 prints. A table { rank = n } after the values chooses
--- another rank. If there are two arguments and the second is a number, it is the rank: print_rank(text, 1).
---@param ... any the values, and the rank
function dist.print_rank(...)
  local given, rank = { n = select("#", ...), ... }, nil
  local last = given[given.n]
  if type(last) == "table" and getmetatable(last) == nil and type(last.rank) == "number" then rank = last.rank
  elseif given.n == 2 and type(last) == "number" then rank = last end
  if rank then
    given.n = given.n - 1
    if rank % 1 ~= 0 or rank < 0 or rank >= dist.world_size() then
      error(("ps.print_rank: there is no rank %.14g, only 0 to %d; to print a number after a text, pass the rank, too: "
        .. "{ rank = 0 }"):format(rank, dist.world_size() - 1))
    end
  end
  if dist.rank() ~= (rank or 0) then return end
  print(unpack(given, 1, given.n))
  io.stdout:flush()
end

--- Returns whether `flag` is true on any rank. The result is the same on all ranks. All ranks must call this function.
---@param flag boolean
---@return boolean
function dist.any_rank(flag)
  local group = mesh.group "world"
  if not group then return flag end
  local sum = group:all_reduce(create.tensor({ flag and 1 or 0 }, { dtype = "fp32" }))
  return sum:item() > 0
end

--- Waits until all ranks have called synchronize.
function dist.synchronize()
  local group = mesh.group "world"
  if group then group:barrier() end
end

exact.all(Group, "group:", true)

return dist
