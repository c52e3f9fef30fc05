-- SPDX-License-Identifier: BSD-3-Clause
-- Many processes. ps.init_distributed makes the group of all ranks from a launcher's environment (ps/dist/env.lua) or
-- from explicit values. Groups carry tensors between ranks (see "groups of ranks" in ps.h): those in host memory over
-- Gloo, those of NVIDIA GPUs over NCCL.
local native = require "ps.core.ffi"
local environment = require "ps.core.environment"
local array = require "ps.core.array"
local caller = require "ps.core.caller"
local env = require "ps.dist.env"
local create = require "ps.tensor.create"
local random = require "ps.core.random"
local mesh = require "ps.dist.mesh"
local secret = require "ps.dist.secret"
local exact = require "ps.core.exact"
local C, ffi, check = native.C, native.ffi, native.check
local error = caller.error

local dist = {}

local rank_array = array "int32_t"

local OPTIONS = { seed = "number", backend = "string", rendezvous = "string", rank = "number", world_size = "number",
                  local_rank = "number", timeout = "number", heartbeat = "number", quiet = "boolean",
                  pipe_size = "whole", tp_size = "whole", num_micro_batches = "whole" }
-- Options that are keys of a configuration, as BMTrain has them.
local ASKED = { pipe_size = "pipeline.stages", tp_size = "tensor_parallel.size",
  num_micro_batches = "gradient_accumulation_steps" }
-- Backends: whether device memory may not, or must, go from device to device. "cpu:gloo,cuda:nccl" is PyTorch's word.
local BACKENDS = { gloo = { never = true }, nccl = { must = true }, ["cpu:gloo,cuda:nccl"] = { must = true } }
local REDUCTIONS = { sum = C.PS_REDUCE_SUM, max = C.PS_REDUCE_MAX, min = C.PS_REDUCE_MIN }
local DEFAULT_TIMEOUT_S = 600
local DEFAULT_HEARTBEAT_S = 7                -- beats are 1 s apart: all ranks know of a silent one in less than 10 s

---@class ps.dist.Options
---@field seed? integer
---@field backend? string "nccl": memory of GPUs goes over NCCL, or it is an error; "gloo": it never does (and even one
--- process gets a group of Gloo's); absent: it does where all ranks have NCCL
---@field pipe_size? integer as pipeline.stages of a configuration
---@field tp_size? integer as tensor_parallel.size
---@field num_micro_batches? integer as gradient_accumulation_steps
---@field rendezvous? string "tcp://host:port" or "file:///path"
---@field rank? integer
---@field world_size? integer
---@field local_rank? integer
---@field timeout? number seconds that making the group, and each call, may wait; 600 when absent
---@field heartbeat? number seconds after which a silent rank is given up; 7 when absent; the same on all ranks
---@field quiet? boolean

---@class ps.Group
---@field backend string "gloo" or "self"
---@field devices {never?: boolean, must?: boolean} whether memory of devices may, or must, be connected
---@field private parts table<ps.Group, true> the groups that were cut from it
---@field private c ffi.cdata*|nil ps_group *, nil once closed
local Group = {}
Group.__index = Group

local function open(self)
  if not self.c then error("this group is closed") end
  return self.c
end

-- An error about an argument begins with the place in the script and the call's name.
local function tensor(t, name, call)
  if not ffi.istype("ps_tensor", t) then
    error(("group:%s: %s is a %s; it takes a tensor"):format(call, name, type(t)))
  end
  return t
end

local function whole(n, name, call)
  if type(n) ~= "number" or n ~= math.floor(n) or math.abs(n) >= 2 ^ 31 then
    error(("group:%s: %s is %s; it takes the number of a rank"):format(call, name, tostring(n)))
  end
  return n
end

--- This process's number in the group, from 0.
---@return integer
function Group:rank() return C.ps_group_rank(open(self)) end
--- The number of ranks in the group.
---@return integer
function Group:size() return C.ps_group_size(open(self)) end
--- Bytes of tensors that this rank has sent to others since the group was made.
---@return integer
function Group:bytes_sent() return tonumber(C.ps_group_bytes_sent(open(self))) end

--- Of `bytes_sent` those of rows that travelled in pieces beside products.
---@return integer
function Group:bytes_in_pieces() return tonumber(C.ps_group_bytes_in_pieces(open(self))) end

--- Connects the ranks' devices of this name, so that the calls below take tensors there. All ranks call it. The first
--- collective below with such tensors connects the devices by itself. An error named EUNSUP: some rank cannot connect,
--- and the group goes on with host memory.
---@param device string
---@return string carrier the library that carries the bytes: "nccl", "gloo" ("self" in a world of one)
function Group:connect(device)
  check(C.ps_group_connect(open(self), native.ctx, native.device_index(device)))
  return self:carrier()
end

--- The library that carries devices' memory: "nccl", ...; nil: no devices are connected.
---@return string?
function Group:carrier()
  local name = ffi.string(C.ps_group_carrier(open(self)))
  return name ~= "" and name or nil
end

--- The sum of all ranks' tensors, in place, in fp32 (fp64: in fp64) and in the order of ranks; or the greatest or least
--- of their elements. max and min, and sums of int32 and int64, take tensors in host memory alone.
---@param t ps.Tensor of one shape and type on all ranks
---@param reduce? "sum"|"max"|"min" default "sum"; in max and min a NaN of any rank stays NaN
---@return ps.Tensor t
function Group:all_reduce(t, reduce)
  local number = REDUCTIONS[reduce or "sum"]
  if not number then
    error(("group:all_reduce: no reduction '%s'; there are sum, max and min"):format(tostring(reduce)))
  end
  check(C.ps_group_all_reduce(open(self), tensor(t, "t", "all_reduce"), number))
  return t
end

--- This rank's part of the sum of all ranks' `input`, which has as many equal parts as there are ranks.
---@param out ps.Tensor [n, ...], overwritten
---@param input ps.Tensor [size n, ...]
---@return ps.Tensor out
function Group:reduce_scatter(out, input)
  check(C.ps_group_reduce_scatter(open(self), tensor(out, "out", "reduce_scatter"),
    tensor(input, "in", "reduce_scatter")))
  return out
end

--- All ranks' `input`, one after the other in the order of ranks.
---@param out ps.Tensor [size n, ...], overwritten
---@param input ps.Tensor [n, ...]
---@return ps.Tensor out
function Group:all_gather(out, input)
  check(C.ps_group_all_gather(open(self), tensor(out, "out", "all_gather"), tensor(input, "in", "all_gather")))
  return out
end

--- Overwrites each rank's tensor with that of rank `root`.
---@param t ps.Tensor of one shape and type on all ranks
---@param root? integer default 0
---@return ps.Tensor t
function Group:broadcast(t, root)
  check(C.ps_group_broadcast(open(self), tensor(t, "t", "broadcast"), whole(root or 0, "root", "broadcast")))
  return t
end

--- Returns when all ranks have called it.
function Group:barrier() check(C.ps_group_barrier(open(self))) end

--- Sends a tensor to one rank, which calls recv at the same time.
---@param t ps.Tensor
---@param peer integer the rank that receives
function Group:send(t, peer)
  check(C.ps_group_send(open(self), tensor(t, "t", "send"), whole(peer, "peer", "send")))
end

--- Receives a tensor from one rank, which calls send at the same time.
---@param t ps.Tensor of the sent one's shape and type, overwritten
---@param peer integer the rank that sends
---@return ps.Tensor t
function Group:recv(t, peer)
  check(C.ps_group_recv(open(self), tensor(t, "t", "recv"), whole(peer, "peer", "recv")))
  return t
end

-- -- collectives as ops: a new tensor, with a gradient -------------------------------------------------------------
local ops = native.ops
local PRODUCT = {
  gathered_linear = { out_in = "boolean", pieces = "whole", keep = "boolean" },
  gathered_linears = { out_in = "boolean", pieces = "whole", keep = "boolean" },
  linear_scattered = { out_in = "boolean", pieces = "whole", flat = "boolean" },
}

local function attributes(self, call, t)
  local c = open(self)
  tensor(t, "x", call)
  local number = C.ps_group_number(c)
  if number < 0 then error(("group:%s: at most 64 groups at a time have ops"):format(call)) end
  return number, C.ps_group_size(c), C.ps_group_rank(c)
end

--- The sum of all ranks' tensors. Gradient: the sum of all ranks' gradients, since every rank's loss counts.
---@param x ps.Tensor
---@return ps.Tensor
function Group:sum(x) return ops.all_reduce(x, attributes(self, "sum", x)) end

--- The ranks' tensors [n, ...] one after the other, [size n, ...]. Gradient [n, ...]: this rank's part of the sum of
--- all ranks' gradients.
---@param x ps.Tensor
---@return ps.Tensor
function Group:gathered(x) return ops.all_gather(x, attributes(self, "gathered", x)) end

--- This rank's part [n, ...] of the sum of all ranks' x [size n, ...]. Gradient [size n, ...]: all ranks' gradients,
--- one after the other.
---@param x ps.Tensor
---@return ps.Tensor
function Group:scattered(x) return ops.reduce_scatter(x, attributes(self, "scattered", x)) end

--- As `gathered`. Of a result of 1 MiB and more backward keeps x alone, and gathers again what it needs.
---@param x ps.Tensor
---@return ps.Tensor
function Group:gathered_again(x) return ops.all_gather_again(x, attributes(self, "gathered_again", x)) end

-- What a product of several ranks takes.
local function of_product(self, call, x, w, how)
  local number, size, rank = attributes(self, call, x)
  tensor(w, "w", call)
  how = caller.options(how, "group:" .. call, PRODUCT[call])
  if x:dim() < 2 then error(("group:%s: x has no rows: it has %d dimensions"):format(call, x:dim())) end
  local pieces = how.pieces or 1
  if pieces < 1 or pieces > mesh.MOST_PIECES then
    error(("group:%s: pieces is %d; rows travel in 1 to %d"):format(call, pieces, mesh.MOST_PIECES))
  end
  return how, pieces, how.out_in == false and 0 or 1, number, size, rank
end

-- The rows y [size n ..., O] of an x of `shape`, [n, ..., I], with x's other dimensions.
local function with_dims(y, shape)
  local rows, to = 1, { unpack(shape) }
  for i = 2, #shape - 1 do rows = rows * shape[i] end
  to[1], to[#to] = rows > 0 and y:size(0) / rows or 0, y:size(1)
  return y:reshape(to)
end

-- `gathered(x)` times the w of each layer, plus its b, as several results. `call`: the function that a script called.
local function gathered_linears(self, call, x, layers, how)
  local shape, given, pieces, out_in, number, size, rank
  for _, layer in ipairs(layers) do
    given, pieces, out_in, number, size, rank = of_product(self, call, x, layer[1], how)
  end
  if pieces == 1 then
    local all, y = given.keep and self:gathered(x) or self:gathered_again(x), {}
    for i, layer in ipairs(layers) do y[i] = ops.linear(all, layer[1], layer[2], nil, out_in) end
    return unpack(y, 1, #layers)
  end
  shape = x:shape()
  local one, two, three = layers[1], layers[2] or {}, layers[3] or {}
  local y = { ops.column_linear(#shape == 2 and x or x:reshape(-1, shape[#shape]), one[1], one[2], two[1], two[2],
    three[1], three[2], number, size, rank, 0, out_in, pieces, given.keep and 1 or 0) }
  for i = 1, #shape > 2 and #layers or 0 do y[i] = with_dims(y[i], shape) end
  return unpack(y, 1, #layers)
end

--- `gathered(x)` times w, plus b. In pieces it is one op: rows travel beside the products of others, and in backward
--- those of x's gradient, and x, which is gathered again.
---@param x ps.Tensor [n, ..., I], this rank's rows
---@param w ps.Tensor [O, I], or [I, O]
---@param b? ps.Tensor [O]
---@param how? {out_in?: boolean, pieces?: integer, keep?: boolean} out_in: false: w is [I, O]; pieces: 1 to 8, default
---  1: all rows are gathered before the product begins; keep: backward keeps the rows that were gathered, as it does
---  below 1 MiB
---@return ps.Tensor [size n, ..., O]
function Group:gathered_linear(x, w, b, how)
  return (gathered_linears(self, "gathered_linear", x, { { w, b } }, how))
end

--- As `gathered_linear` with up to three weights, for which the rows are gathered once. What the products add to x's
--- gradient is added up from the last to the first.
---@param x ps.Tensor [n, ..., I], this rank's rows
---@param layers {[1]: ps.Tensor, [2]?: ps.Tensor}[] 1 to 3 pairs {w, b}, or {w}
---@param how? {out_in?: boolean, pieces?: integer, keep?: boolean}
---@return ps.Tensor ... [size n, ..., O], one of each pair
function Group:gathered_linears(x, layers, how)
  local call = "gathered_linears"
  if type(layers) ~= "table" or #layers < 1 or #layers > C.PS_MAX_COLUMNS then
    error(("group:%s takes a list of 1 to %d pairs {w, b}"):format(call, C.PS_MAX_COLUMNS))
  end
  for i, layer in ipairs(layers) do
    if type(layer) ~= "table" then
      error(("group:%s: layer %d is a %s, no pair {w, b}"):format(call, i, type(layer)))
    end
  end
  return gathered_linears(self, call, x, layers, how)
end

--- `scattered(x times w)`. In pieces it is one op: rows of the product travel beside the products of others, and in
--- backward those that it gathers.
---@param x ps.Tensor [size n, ..., I]
---@param w ps.Tensor [O, I], or [I, O]
---@param how? {out_in?: boolean, pieces?: integer, flat?: boolean} as in gathered_linear; 1: the whole product comes
---  first. flat: rows are those of all dimensions of x but the last
---@return ps.Tensor [n, ..., O]; with flat [rows / size, O]
function Group:linear_scattered(x, w, how)
  local pieces, out_in, number, size, rank
  how, pieces, out_in, number, size, rank = of_product(self, "linear_scattered", x, w, how)
  if pieces == 1 then
    local y = ops.linear(x, w, nil, nil, out_in)
    return self:scattered(how.flat and y:reshape(-1, y:size(-1)) or y)
  end
  local shape = x:shape()
  if not how.flat and shape[1] % size ~= 0 then
    error(("group:linear_scattered: the first dimension of x, %d, cannot be cut into %d equal parts"):format(shape[1],
      size))
  end
  -- x as it comes: what backward can make again, as gelu's output, is not kept behind a reshape.
  local y = ops.row_linear(x, w, number, size, rank, 0, out_in, pieces)                -- [rows / size, O]
  if how.flat or #shape == 2 then return y end
  shape[1], shape[#shape] = shape[1] / size, y:size(1)
  return y:reshape(shape)
end

local LM_LOSS = { bias = "tensor", mass = "tensor", words = "whole", parted = "boolean", dloss = "number" }

--- The cross entropy of logits x w^T + bias, of which each rank has those of its V words. The logits exist in panels of
--- rows, in which the ranks tell each other three numbers a row, or four with `mass`; gradients are made with them, as
--- in F.lm_loss. With lse the log-sum-exp of a row's logits over all words, its loss is
--- share[0] lse - share[1] logit(target) - share[2] sum(mass logit). The result is the sum over the rows, the same on
--- all ranks, and one loss for all of them. Gradients: of w and bias those of this rank's words, of x the sum over the
--- ranks.
---@param x ps.Tensor [N, C], the same on all ranks; `parted`: [N / size, C], this rank's rows
---@param w ps.Tensor [V, C], this rank's words
---@param targets ps.Tensor integers [N], the same on all ranks, as `share` is
---@param share ps.Tensor fp32 (fp64 where x is) [3, N]; 0 of rows that do not count
---@param options {words: integer, parted?: boolean, bias?: ps.Tensor, mass?: ps.Tensor, dloss?: number} words: those of
---  all ranks, which have ceil(words / size) each; what lies behind the last one is padding. bias [V]. mass: [V], of
---  share's type. dloss: gradients are made for a loss whose own gradient is this power of two, and divided by it:
---  against underflow of fp16; default 1
---@return ps.Tensor of 0 dimensions
function Group:lm_loss(x, w, targets, share, options)
  local number, size, rank = attributes(self, "lm_loss", x)
  local given = caller.options(options, "group:lm_loss", LM_LOSS)
  return ops.parallel_lm_loss(x, tensor(w, "w", "lm_loss"), tensor(targets, "targets", "lm_loss"),
    tensor(share, "share", "lm_loss"), given.bias, given.mass, number, size, rank, 0, given.parted and 1 or 0, 0,
    whole(given.words, "words", "lm_loss"), given.dloss)
end

--- The root's tensor, on all ranks; the x of other ranks has the same shape. Gradient: the sum of all ranks' gradients
--- at the root, zeros elsewhere.
---@param x ps.Tensor
---@param root? integer 0 when absent
---@return ps.Tensor
function Group:copied(x, root)
  local number, size, rank = attributes(self, "copied", x)
  return ops.broadcast(x, number, size, rank, whole(root or 0, "root", "copied"))
end

-- -- for layers of which each rank has a part -----------------------------------------------------------------------
-- One loss, which all ranks compute alike: outside of such a layer every tensor and its gradient is the same on all.

--- x itself, where products with a part of the outputs on each rank begin. Gradient: the sum of all ranks', since each
--- has that of its part.
---@param x ps.Tensor the same on all ranks
---@return ps.Tensor
function Group:copy_to(x) return ops.copy_to_tp(x, attributes(self, "copy_to", x)) end

--- The sum of all ranks' tensors, behind products with a part of the inputs on each rank. Gradient: as given.
---@param x ps.Tensor
---@return ps.Tensor the same on all ranks
function Group:reduce_from(x) return ops.reduce_from_tp(x, attributes(self, "reduce_from", x)) end

--- x itself. Gradient: as given on rank 0, zeros elsewhere: the sum over the ranks of what all computed alike.
---@param x ps.Tensor the same on all ranks
---@return ps.Tensor
function Group:counted_once(x) return ops.counted_once(x, attributes(self, "counted_once", x)) end

local function dimension(x, dim, call)
  local n = x:dim()
  if dim == nil then dim = -1 end
  if type(dim) ~= "number" or dim % 1 ~= 0 or dim < -n or dim >= n then
    error(("group:%s: dim is %s; x has %d dimensions"):format(call, tostring(dim), n))
  end
  return dim < 0 and dim + n or dim
end

-- The dimensions of n from 0 on, with `from` at place `to`.
local function moved(n, from, to)
  local axes = {}
  for i = 0, n - 1 do if i ~= from then axes[#axes + 1] = i end end
  table.insert(axes, to + 1, from)
  return axes
end

--- This rank's part of x along a dimension, which it cuts into as many equal parts as there are ranks. Gradient: all
--- ranks' parts, one after the other.
---@param x ps.Tensor the same on all ranks
---@param dim? integer default -1, the last
---@return ps.Tensor a view of x
function Group:scatter_to(x, dim)
  local number, size, rank = attributes(self, "scatter_to", x)
  dim = dimension(x, dim, "scatter_to")
  if dim == 0 then return ops.scatter_to_tp(x, number, size, rank) end
  local shape = x:shape()
  if shape[dim + 1] % size ~= 0 then
    error(("group:scatter_to: dimension %d of x, %d, cannot be cut into %d equal parts"):format(dim, shape[dim + 1],
      size))
  end
  shape[dim + 1] = shape[dim + 1] / size
  table.insert(shape, dim + 1, size)
  return ops.scatter_to_tp(x:reshape(shape):permute(moved(#shape, dim, 0)), number, size, rank):squeeze(0)
end

--- The ranks' tensors one after the other along a dimension. Gradient: this rank's part.
---@param x ps.Tensor
---@param dim? integer default -1, the last
---@return ps.Tensor the same on all ranks
function Group:gather_from(x, dim)
  local number, size, rank = attributes(self, "gather_from", x)
  dim = dimension(x, dim, "gather_from")
  if dim == 0 then return ops.gather_from_tp(x, number, size, rank) end
  local shape, all = x:shape(), ops.gather_from_tp(x:unsqueeze(0), number, size, rank)
  shape[dim + 1] = shape[dim + 1] * size
  return all:permute(moved(#shape + 1, 0, dim)):reshape(shape)
end

--- Closes the group and the groups that were cut from it, which cannot be used any more. Closing twice does nothing.
--- Waits for bytes that calls on memory of a GPU still move, in all groups of the process; if they do not come, that is
--- an error, once the group is closed.
function Group:close()
  if not self.c then return end
  local settled, why = pcall(check, C.ps_groups_settle())
  for part in pairs(self.parts) do
    local ok, problem = pcall(part.close, part)
    if settled and not ok then settled, why = false, problem end
  end
  C.ps_group_close(ffi.gc(self.c, nil))
  self.c = nil
  mesh.close(self)
  if not settled then error(why, 0) end
end

local out = ffi.new("ps_group *[1]")

local function own(backend)
  return setmetatable({ c = ffi.gc(out[0], C.ps_group_close), backend = backend, devices = {},
                        parts = setmetatable({}, { __mode = "k" }) }, Group)
end

--- A group of some of these ranks, over the same connections. A failure in one group ends all that share them. All
--- ranks of this group call it at the same time, each with the list of the new group that it is in.
---@param ranks integer[] numbers in this group, in the order that they have in the new one
---@param axis string the new group's name in errors: 1 to 15 letters, digits and "_"
---@return ps.Group
function Group:split(ranks, axis)
  local c = open(self)
  if type(ranks) ~= "table" then error(("group:split: ranks is a %s; it takes a list"):format(type(ranks))) end
  if type(axis) ~= "string" then error(("group:split: axis is a %s; it takes a name"):format(type(axis))) end
  local list = rank_array(#ranks + 1)
  for i, rank in ipairs(ranks) do list[i - 1] = whole(rank, ("ranks[%d]"):format(i), "split") end
  check(C.ps_group_split(c, #ranks, list, axis, out))
  local group = own(self.backend)
  group.devices = self.devices
  self.parts[group] = true
  return group
end

--- The group's name in errors: the axis along which it was cut; nil: the group of all ranks.
---@return string?
function Group:axis()
  local axis = ffi.string(C.ps_group_axis(open(self)))
  return axis ~= "" and axis or nil
end

--- The number that one of this group's ranks has among all ranks.
---@param rank? integer default this one
---@return integer
function Group:world_rank(rank)
  local c = open(self)
  return check(C.ps_group_world_rank(c, whole(rank or C.ps_group_rank(c), "rank", "world_rank")))
end

--- A group of this process alone, for scripts that run with and without others.
---@return ps.Group
function dist.self()
  if C.ps_machine_pretended() ~= 0 then                     -- memory of devices that are not here has no bytes to move
    check(C.ps_group_pretend(native.ctx, 0, 1, out))
    return own "nobody"
  end
  check(C.ps_group_self(native.ctx, out))
  return own "self"
end

-- Whether all ranks are certain to be on this machine.
local function all_here(rendezvous, machines)
  local host = rendezvous:match("^tcp://%[?(.-)%]?:%d+$")
  if not host then return machines == 1 end
  return C.ps_host_is_loopback(host) == 1
end

--- The group of ranks that meet at `rendezvous` ("tcp://host:port" or "file:///path"), over Gloo. They prove to each
--- other that they know the secret that ps.dist.secret finds.
---@param rendezvous string
---@param rank integer
---@param size integer
---@param timeout? number seconds that making the group, and each call, may wait
---@param heartbeat? number seconds after which a silent rank is given up
---@param run? string the run's name; PS_RUN_ID when absent
---@param machines? integer 1: all ranks are on this machine; 2: on several; 0 or absent: nobody knows
---@return ps.Group
function dist.gloo(rendezvous, rank, size, timeout, heartbeat, run, machines)
  if C.ps_machine_pretended() ~= 0 then                     -- a dry run opens no port
    check(C.ps_group_pretend(native.ctx, rank, size, out))
    return own "nobody"
  end
  local known = secret.find(os.getenv, rendezvous, all_here(rendezvous, machines))
  if not known and rank == 0 and size > 1 and rendezvous:match("^tcp:") then
    io.stderr:write(("psluajit: this run has no secret (PS_SECRET): whoever reaches %s can take the place of a rank "
      .. "that has not come yet; docs/distributed.md tells how to keep others out\n"):format(rendezvous))
  end
  run = run or environment.get "PS_RUN_ID"
  local meeting = ffi.new("ps_meeting", { rendezvous = rendezvous, run = run, secret = known, rank = rank, size = size,
    machines = machines or 0, timeout_s = timeout or DEFAULT_TIMEOUT_S,
    heartbeat_s = heartbeat or DEFAULT_HEARTBEAT_S })
  check(C.ps_group_gloo(native.ctx, meeting, out))
  return own "gloo"
end

local function check_options(o)
  if o.seed then caller.seed(o.seed, "ps.init_distributed: seed") end
  if o.backend and not BACKENDS[o.backend] then
    error(("ps.init_distributed: no backend '%s'; there are gloo and nccl (Gloo for host memory, NCCL for GPUs)")
      :format(o.backend))
  end
  for name in pairs(ASKED) do
    if o[name] then caller.whole(o[name], "ps.init_distributed: " .. name, 1) end
  end
end

-- The options that are settings of a configuration, by its keys: {value, its name in messages}.
local function asked(o)
  local keys = {}
  for name, path in pairs(ASKED) do
    if o[name] then keys[path] = { o[name], "ps.init_distributed's " .. name } end
  end
  return keys
end

--- Joins the other ranks. A process that no launcher started, and that is given no values, is a world of one. Rank 0
--- prints once where the ranks came from, unless quiet.
---@param options? ps.dist.Options seed: for ps.manual_seed, the same on all ranks
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
      error("ps.init_distributed: nothing says where the ranks meet; give rendezvous = \"tcp://HOST:PORT\", or set "
        .. "MASTER_ADDR and MASTER_PORT")
    end
    group = dist.gloo(rendezvous, e.rank, e.world_size, o.timeout, o.heartbeat, e.run, e.machines)
  end
  C.ps_group_devices(group.c, devices.never and 1 or 0, devices.must and 1 or 0)
  group.devices = devices
  mesh.open(group, e, asked(o))
  if e.rank == 0 and e.world_size > 1 and not o.quiet then
    io.stderr:write(("psluajit: %s, %s\n"):format(env.describe(e), group.backend))
  end
  if devices.must then                            -- an error here rather than in the first step
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

--- This process's number among all ranks; 0 while there is no group.
---@return integer
function dist.rank() return mesh.env() and mesh.env().rank or 0 end
--- The number of ranks; 1 without ps.init_distributed.
---@return integer
function dist.world_size() return mesh.env() and mesh.env().world_size or 1 end
--- This process's number among those on its machine; 0 while there is no group.
---@return integer
function dist.local_rank() return mesh.env() and mesh.env().local_rank or 0 end

--- Prints on one rank only (0 when absent).
---@param text any
---@param rank? integer
function dist.print_rank(text, rank)
  if dist.rank() ~= (rank or 0) then return end
  print(text)
  io.stdout:flush()
end

--- Whether `flag` is true on any rank. All ranks call it and get the same answer.
---@param flag boolean
---@return boolean
function dist.any_rank(flag)
  local group = mesh.group "world"
  if not group then return flag end
  local sum = group:all_reduce(create.tensor({ flag and 1 or 0 }, { dtype = "fp32" }))
  return sum:item() > 0
end

--- Returns when all ranks have called it.
function dist.synchronize()
  local group = mesh.group "world"
  if group then group:barrier() end
end

exact.all(Group, "group:", true)

return dist
