-- SPDX-License-Identifier: BSD-3-Clause
-- Moves a module's parameters into chunks. When a parameter is created, it first moves into a chunk of its own, so that
-- a model larger than memory can be built. When the module is complete, all tensors move to the final layout, in the
-- order of registration.
local native = require "ps.core.ffi"
local collector = require "ps.core.collector"
local scope = require "ps.core.scope"
local nn_module = require "ps.nn.module"
local registry = require "ps.nn.registry"
local shard = require "ps.tensor.shard"
local tensor_hooks = require "ps.tensor.hooks"
local pack = require "ps.engine.layout.pack"
local packed = require "ps.nn.packed"
local kinds = require "ps.core.kinds"
local optimizers = require "ps.optimizers"
require "ps.optimizers.update"                                  -- registers the chunk kinds of optimizer states
local share = require "ps.engine.layout.share"
local embed = require "ps.engine.layout.embed"
local masters = require "ps.engine.state.masters"
local array = require "ps.core.array"
local ffi, C = native.ffi, native.C

local build = {}

local id_out, tensor_out = ffi.new("int32_t[1]"), ffi.new("ps_tensor *[1]")
local param_array = array "ps_param"
local sizes = ffi.new("int64_t[8]")
local address = nn_module.address
local PAGE = 4096
local META = native.device_index "meta"  -- the device "meta", on which parameters have no bytes yet (ps.deferred)
local REMAINDER = { name = "remainder", dtype = "uint8" }
kinds.add_state(REMAINDER.name, 1, "param_fp32")
local dtypes = require "ps.core.dtype"
local BYTES, STATE = dtypes.nbytes, dtypes.of_state

local function new_chunk(kind, group, index, dtype, nbytes)
  native.check(C.ps_engine_chunk_new(native.ctx, kinds.number[kind], group, index, native.dtype_code(dtype), nbytes,
    id_out))
  return id_out[0]
end

-- Creates a tensor with the shape of `like` in the chunk ids[kind]. `ids` are the chunks of a row of the layout (the
-- result of chunks_for). `offset` is the position of the tensor in the chunk, in elements.
local function new_tensor(like, dtype, device, ids, kind, offset, name)
  local at = kinds.start(kind, ids.numel, dtype) + offset * BYTES[dtype]
  native.retry(C.ps_engine_tensor_new, native.ctx, like, native.dtype_code(dtype), device, ids[kind], at, name,
    tensor_out)
  return native.own(tensor_out[0])
end

-- Returns true if a state needs its own offset in the chunk, and cannot use the offset of its parameter. This is
-- necessary if the state has another shape than the parameter, or if its elements are so small that the parameter's
-- offset would not be aligned.
local function is_packed(state) return state.shape ~= nil or STATE[state.dtype] < 2 end

-- Returns the offset in bytes of an optimizer state in its chunk. `offset` is the parameter's offset in elements.
-- `index` is the parameter's index in the layout.
local function state_at(state, ids, offset, index)
  if not is_packed(state) then return kinds.start(state.name, ids.numel, state.dtype) + offset * STATE[state.dtype] end
  return kinds.start(state.name, ids.state_numel[state.name], state.dtype)
    + ids.state_offset[state.name][index] * STATE[state.dtype]
end

-- Creates a tensor at the offset `at` (in bytes) in the chunk `id`.
local function new_shaped(shape, dtype, host, id, at, name)
  for i, size in ipairs(shape) do sizes[i - 1] = size end
  native.retry(C.ps_engine_tensor_shaped, native.ctx, #shape, sizes, native.dtype_code(dtype), host, id, at, name,
    tensor_out)
  return native.own(tensor_out[0])
end

-- Creates the tensor of one optimizer state.
local function new_state(like, state, host, ids, offset, index, name)
  local shape = state.shape and state.shape(like:shape()) or like:shape()
  return new_shaped(shape, state.dtype, host, ids[state.name], state_at(state, ids, offset, index), name)
end

local function adopt_state(tensor, state, ids, offset, index, name)
  native.retry(C.ps_engine_adopt, native.ctx, tensor, ids[state.name], state_at(state, ids, offset, index), name)
end

local function adopt(tensor, dtype, ids, kind, offset, name)
  local at = kinds.start(kind, ids.numel, dtype) + offset * BYTES[dtype]
  native.retry(C.ps_engine_adopt, native.ctx, tensor, ids[kind], at, name)
end

-- Creates the tensor of a parameter, in the same way as new_tensor. If ranks share the optimizer state, the tensor is
-- in a part (ids.param_part) instead of a chunk. All ranks use the part, and one rank owns it.
local function new_param(like, dtype, where, ids, offset, name)
  local shards = where.shards
  if not (shards and shards:state()) then return new_tensor(like, dtype, where.device, ids, "param", offset, name) end
  local at = kinds.start("param", ids.numel, dtype) + offset * BYTES[dtype]
  return shards:tensor(like, dtype, where.device, ids.param_part, at, name)
end

local function adopt_param(tensor, dtype, where, ids, offset, name)
  local shards = where.shards
  if not (shards and shards:state()) then return adopt(tensor, dtype, ids, "param", offset, name) end
  shards:adopt(tensor, ids.param_part, kinds.start("param", ids.numel, dtype) + offset * BYTES[dtype], name)
end

local function seen_from(tensor, device)
  native.retry(C.ps_engine_tensor_at, native.ctx, tensor, device, tensor_out)
  return native.own(tensor_out[0])
end

-- Returns the size of a tensor in bytes. Returns nil if the tensor has no bytes, or if it is already in a chunk.
local function bytes_to_move(tensor)
  local nbytes = tonumber(C.ps_tensor_nbytes(tensor))
  if nbytes == 0 or tensor.device_ == META or C.ps_engine_holds(native.ctx, tensor) ~= 0 then return nil end
  return nbytes
end

-- Creates a chunk for one tensor of `nbytes` bytes.
local function own_chunk(dtype, nbytes) return new_chunk("param", -1, 0, dtype, math.ceil(nbytes / PAGE) * PAGE) end

--- Moves a tensor into a chunk of its own, on every rank. Does nothing if the tensor has no bytes, or if it is already
--- in a chunk.
---@param tensor ps.Tensor
---@param name? string
function build.to_own_chunk(tensor, name)
  local nbytes = bytes_to_move(tensor)
  if not nbytes then return end
  native.retry(C.ps_engine_adopt, native.ctx, tensor, own_chunk(tensor:dtype(), nbytes), 0, name)
end

--- Moves a new parameter from plain memory into a chunk of its own. The parameter stays there until the layout is made.
--- Does nothing if the tensor has no bytes, or if it is already in a chunk. If ranks share parameters, only the owner
--- keeps the bytes.
---@param tensor ps.Tensor
---@param shards? ps.engine.Sharding
function build.to_chunk(tensor, shards)
  local nbytes = bytes_to_move(tensor)
  if not nbytes or C.ps_tensor_is_lent(tensor) ~= 0 then return end      -- lent: every rank has the bytes in a file
  if not (shards and shards:parameters()) then return build.to_own_chunk(tensor) end
  local whole, owner = math.ceil(nbytes / PAGE) * PAGE, shards:stage_owner(nbytes)
  local part = shards:part { owner = owner, stripe = shards:take_stripes(1), dtype = tensor:dtype(), nbytes = whole,
    chunk = owner == shards.rank and own_chunk(tensor:dtype(), nbytes) or nil, device = tensor.device_, reads = true }
  shards:adopt(tensor, part, 0, nil)
end

-- Returns the module's parameters as a list of {name, tensor, number, places = {{module, key}...}}. `number` is the
-- parameter's index in the model, from 0. A tied parameter appears once.
local function parameters(module)
  local list, by_address = {}, {}
  registry.walk(module, function(name, value, kind, owner, key)
    if kind ~= "param" then return end
    local entry = by_address[address(value)]
    if not entry then
      entry = { name = name, tensor = value, number = #list, places = {} }
      by_address[address(value)] = entry
      list[#list + 1] = entry
    end
    entry.places[#entry.places + 1] = { owner, key }
  end)
  return list
end

-- Divides the parameters of a model that is cut into stages. Returns three lists: the parameters of this process with
-- their virtual stages, rows for the trained parameters of other ranks, and rows for the frozen parameters of other
-- ranks.
local function own_parameters(entries, stages)
  local mine, elsewhere, frozen = {}, {}, {}
  for _, entry in ipairs(entries) do
    entry.vstage = stages:own(entry.name)
    if entry.vstage then
      mine[#mine + 1] = entry
    elseif entry.tensor:needs_grad() then
      elsewhere[#elsewhere + 1] = { name = entry.name, param = entry.tensor, numel = entry.tensor:numel(),
        number = entry.number }
    else
      frozen[#frozen + 1] = { name = entry.name, param = entry.tensor, numel = entry.tensor:numel(),
        number = entry.number }
    end
  end
  return mine, elsewhere, frozen
end

local function check_parameter(entry, device)
  local dtype = entry.tensor:dtype()
  if not BYTES[dtype] then
    error(("parameter %s is %s; parameters of an engine must be fp32, bf16 or fp16 (memory = \"plain\" accepts others)")
      :format(entry.name, dtype), 0)
  end
  if entry.tensor:numel() == 0 then
    error(("parameter %s [%s] has no elements, so no chunk can hold it: remove it from the model (memory = \"plain\" "
      .. "accepts it)"):format(entry.name, table.concat(entry.tensor:shape(), ", ")), 0)
  end
  if entry.tensor.device_ ~= device then
    error(("parameter %s is on %s, but the engine computes on %s; make it on the default device"):format(entry.name,
      entry.tensor:device(), native.device_name[device]), 0)
  end
end

-- Returns the dtype in which a parameter trains. For an fp32 parameter, this is `precision`, the dtype of the
-- configuration. Any other parameter keeps its own dtype.
local function target_dtype(entry, precision)
  local dtype = entry.tensor:dtype()
  return dtype == "fp32" and precision or dtype
end

-- Returns the offset in bytes of a bf16 parameter's remainders in their chunk. If memory.master is "remainder", the
-- parameter has remainders instead of a master. A remainder is the lower two bytes of an fp32 value.
local function remainder_at(ids, offset)
  return kinds.start(REMAINDER.name, 2 * ids.numel, REMAINDER.dtype) + 2 * offset
end

local function new_remainder(like, where, ids, offset, name)
  return new_shaped({ 2 * like:numel() }, REMAINDER.dtype, where.host, ids[REMAINDER.name], remainder_at(ids, offset),
    name)
end

local function adopt_remainder(tensor, ids, offset, name)
  native.retry(C.ps_engine_adopt, native.ctx, tensor, ids[REMAINDER.name], remainder_at(ids, offset), name)
end

-- Moves one parameter into its chunk. Returns the tensor that trains, and its fp32 master. The master is nil if it is
-- on another rank.
local function place_param(entry, ids, offset, where)
  local old, dtype = entry.tensor, entry.dtype
  local name, trains, apart = entry.name, entry.trains, where.device ~= where.host
  local remainder = trains and where.remainder and dtype == "bf16"
  if old:dtype() == dtype then
    adopt_param(old, dtype, where, ids, offset, name)
    if not ids.mine then return old, nil end
    if not trains or dtype == "fp32" then return old, old end
    if remainder then return old, new_remainder(old, where, ids, offset, name) end
    local master = new_tensor(old, "fp32", where.host, ids, "param_fp32", offset, name)
    local from = where.shards and where.shards:own(old, where.host) or apart and seen_from(old, where.host) or old
    scope.no_grad(function() master:copy_(from) end)
    return old, master
  end
  local param = new_param(old, dtype, where, ids, offset, name)
  scope.no_grad(function() param:copy_(old) end)
  nn_module.Parameter(param)
  shard.move(old, param)
  tensor_hooks.move(old, param)
  if not trains then param:requires_grad(false) end
  for _, at in ipairs(entry.places) do registry.put(at[1], at[2], param) end
  if remainder and ids.mine then
    local low, place = new_remainder(param, where, ids, offset, name), param
    if where.shards and where.shards:state() then place = where.shards:own(param, where.host)
    elseif apart then place = seen_from(param, where.host) end
    masters.split(place, low, apart and old:to(native.device_name[where.host]) or old)
    old:release()
    return param, low
  end
  if trains and ids.mine then
    adopt(old, "fp32", ids, "param_fp32", offset, name)
    old:requires_grad(false)
    return param, apart and seen_from(old, where.host) or old
  end
  old:release()
  return param, nil
end

local STATE_ALIGN = 256                 -- alignment in bytes of the offset of a packed state

-- Creates the chunks of a row's optimizer states. A packed state (is_packed) is stored after the previous packed state.
-- Any other state has the same offset as its parameter. shapes[i] is the shape of the parameter with the index i in the
-- layout.
local function state_chunks(row, group, ids, shapes)
  ids.state_offset, ids.state_numel = {}, {}
  for _, state in ipairs(group.states) do
    local numel, each = row.numel, STATE[state.dtype]
    if is_packed(state) then
      local offsets = {}
      numel = 0
      for _, at in ipairs(row.tensors) do
        offsets[at.index] = numel
        local nbytes = optimizers.state_numel(state, shapes[at.index]) * each
        numel = numel + math.ceil(math.max(nbytes, 1) / STATE_ALIGN) * STATE_ALIGN / each
      end
      ids.state_offset[state.name], ids.state_numel[state.name] = offsets, numel
    end
    local nbytes = kinds.bytes(state.name, numel, state.dtype)
    ids.state_nbytes = (ids.state_nbytes or 0) + numel * each
    if ids.mine then ids[state.name] = new_chunk(state.name, row.group - 1, row.index, state.dtype, nbytes) end
  end
end

-- Creates the chunks of one row of the layout, one chunk per kind. Kinds that are stored on other ranks get no chunk
-- here. shapes[i] is the shape of the parameter with the index i in the layout.
local function chunks_for(row, group, where, shapes)
  local shards, number, stays = where.shards, row.group - 1, group.stays
  if stays == nil then stays = shards and shards.stays end
  local ids = { numel = row.numel, mine = not (shards and shards:state()) or row.owner == shards.rank }
  local grad_dtype = where.grad_dtype == "param" and group.dtype or where.grad_dtype
  local function one(kind, dtype, here)
    if here then ids[kind] = new_chunk(kind, number, row.index, dtype, kinds.bytes(kind, row.numel, dtype)) end
  end
  local function part(kind, dtype, stripe, reads)
    return shards:part { owner = row.owner, stripe = stripe, dtype = dtype,
      nbytes = kinds.bytes(kind, row.numel, dtype),
      chunk = ids[kind], device = where.device, reads = reads, keeps = stays }
  end
  one("param", group.dtype, ids.mine or not shards:parameters())
  if shards then ids.param_part = part("param", group.dtype, row.stripe, shards:state()) end
  row.parts = { ids.param_part }
  if not group.trains then return ids end
  if group.dtype == "bf16" and where.remainder then
    local bytes = kinds.bytes(REMAINDER.name, 2 * row.numel, REMAINDER.dtype)
    if ids.mine then ids[REMAINDER.name] = new_chunk(REMAINDER.name, number, row.index, REMAINDER.dtype, bytes) end
  elseif group.dtype ~= "fp32" then
    one("param_fp32", "fp32", ids.mine)
  end
  state_chunks(row, group, ids, shapes)
  if where.grads then
    one("grad", grad_dtype, ids.mine or not shards:gradients())
    if shards then ids.grad_part = part("grad", grad_dtype, row.grad_stripe, false) end
  end
  row.parts = { ids.param_part, ids.grad_part }
  return ids
end

-- Creates the tensor of a gradient that is stored in a chunk of kind "grad". If ranks share gradients, the tensor is in
-- a part. Otherwise it is in this rank's own chunk.
local function new_grad(like, group, where, ids, offset, name)
  local dtype = where.grad_dtype == "param" and group.dtype or where.grad_dtype
  if ids.grad then return new_tensor(like, dtype, where.device, ids, "grad", offset, name) end
  local at = kinds.start("grad", ids.numel, dtype) + offset * BYTES[dtype]
  return where.shards:tensor(like, dtype, where.device, ids.grad_part, at, name)
end

-- A parameter can be used in several virtual stages of this rank. Creates a gradient for each use other than the first
-- (PS_TIE_USE). Each of these gradients has its own chunk. The chunk is not sharded, because ranks reduce only the sum
-- over all uses.
local function other_uses(made, group, where)
  if not (group.trains and where.stages) then return nil end
  local dtype, uses = where.grad_dtype == "param" and group.dtype or where.grad_dtype, {}
  for i, vstage in ipairs(where.stages:other_uses(made.name)) do
    local chunk = new_chunk("grad", -1, i - 1, dtype, kinds.bytes("grad", made.numel, dtype))
    uses[i] = { vstage = vstage,
      grad = new_tensor(made.param, dtype, where.device, { numel = made.numel, grad = chunk }, "grad", 0, made.name) }
  end
  return uses
end

-- Assigns stripes to rows. rows[i] gets the stripe with the index stripe[i], counted from 0 among `count` new stripes.
local function number_stripes(rows, shards, grads, stripe, count)
  local first, second = shards:take_stripes(count), grads and shards:take_stripes(count) or 0
  for i, row in ipairs(rows) do row.stripe, row.grad_stripe = first + stripe[i], second + stripe[i] end
end

-- Assigns owners and stripes to the rows of the layout.
local function share_out(plan, where)
  local shards = where.shards
  if not shards then return end
  local made = share.out(plan.chunks, shards.size, function(row)
    return row.numel * pack.state_bytes(plan.groups[row.group], where.state_bytes)
  end)
  for i, row in ipairs(plan.chunks) do row.owner = made.owner[i] end
  number_stripes(plan.chunks, shards, where.grads, made.stripe, made.stripes)
end

-- Sets the tensors through which other files access a parameter. made.place is for the parameter's bytes, and
-- made.values is for its fp32 values.
local function finish_row(made, where)
  if where.shards and where.shards:state() then made.place = where.shards:own(made.param, where.host)
  elseif where.device ~= where.host then made.place = seen_from(made.param, where.host) end
  made.remainder = made.master ~= nil and made.master:dtype() == REMAINDER.dtype
  if not made.remainder then made.values = made.master end
  if made.master ~= nil and rawequal(made.master, made.param) and made.place ~= nil then made.values = made.place end
  for _, t in pairs { place = made.place, values = made.values } do
    if not rawequal(t, made.param) then shard.move(made.param, t) end
  end
end

-- Adds the optimizer states, the gradient and the gradients of other uses to the row `made` of a parameter that trains.
-- `at` is the parameter's position in the layout.
local function train_row(made, group, ids, at, where)
  made.states, made.averages = group.states, ids.mine and {} or nil
  for k, state in ipairs(ids.mine and group.states or {}) do
    made.averages[k] = new_state(made.param, state, where.host, ids, at.offset, at.index, made.name)
  end
  if where.grads then made.grad = new_grad(made.param, group, where, ids, at.offset, made.name) end
  made.uses = other_uses(made, group, where)
end

-- Moves a parameter that was frozen into the chunks of a row that trains. The master is initialized with the
-- parameter's value, and the optimizer state with zeros.
local function thaw_param(made, group, ids, at, where)
  local _, master = place_param({ tensor = made.param, dtype = group.dtype, trains = true, name = made.name }, ids,
    at.offset, where)
  made.master = master
  train_row(made, group, ids, at, where)
end

-- Adds a unit for a row whose tensors train. The unit consists of all chunks of this row.
local function add_unit(built, row, group, ids)
  built.units = built.units + 1
  built.unit_states[built.units] = ids.mine and ids.state_nbytes or 0
  built.unit_bytes[built.units] = ids.mine and built.unit_states[built.units]
    + (group.dtype == "fp32" and 0 or ids[REMAINDER.name] and 2 * row.numel or 4 * row.numel) or 0
  built.unit_numel[built.units] = ids.mine and row.numel or 0
  built.unit_rows[built.units] = { stripe = row.stripe, param = ids.param_part, grad = ids.grad_part }
end

local function state_bytes()
  local info, sum = ffi.new("ps_chunk_info"), 0
  for i = 0, C.ps_engine_chunk_count(native.ctx) - 1 do
    native.check(C.ps_engine_chunk_get(native.ctx, i, info))
    sum = sum + tonumber(info.nbytes)
  end
  return sum
end

---@class ps.engine.Built
---@field list table[] one row for each trained parameter of this process, with these fields:
---  name, param, master, grad, unit, numel
---  averages: one tensor per optimizer state
---  number: the parameter's index in the model
---  vstage: the parameter's virtual stage on this rank
---  uses: a table {vstage, grad} for each other virtual stage of this process that uses the parameter
---  place: the parameter as a tensor on the host, if the parameter is on a device or sharded
---  values: the parameter's fp32 values as a tensor on the host
---  owner: the rank that owns the parameter, if ranks share the state. On the other ranks, the row has no master,
---  averages, place and values
---@field frozen table[] a row for each frozen parameter: name, param, owner, place
---@field untrained table[] all rows of `frozen`, and in addition one row {name, param, numel, number} for each frozen
---  parameter of other pipeline ranks
---@field elsewhere table[] one row {name, param, numel, number} for each trained parameter of other pipeline ranks;
---  param has no data
---@field tables ps.engine.Table[] embedding matrices that have their own chunks
---@field units integer
---@field unit_bytes integer[] by unit from 1, the size in bytes of the unit's masters and averages in this process
---@field unit_states integer[] by unit from 1, the size in bytes of the unit's averages in this process
---@field unit_numel integer[] by unit from 1, the number of parameter elements of the unit that this process updates
---@field layout ps.layout.Layout
---@field numel integer number of elements of all parameters in this process, including frozen parameters
---@field state_bytes integer total size in bytes of all chunks

--- Moves the module's parameters into chunks.
---@param module ps.nn.Module
---@param options {precision: string, chunk_size?: integer, capacity?: integer, device: integer, host: integer, grads:
---  boolean, grad_dtype: string, states_for: (fun(name: string, parameter: ps.Tensor): ps.optimizers.State[]),
---  state_bytes: number, other_bytes: number, lookups?: boolean, shards?: ps.engine.Sharding, stages?:
---  ps.engine.Stages, stays?: fun(parameter: ps.Tensor): boolean?, agree?: fun(chunk_size: integer): integer} lookups:
---  true if embedding matrices may move to the host. grads: true if gradients have their own chunks. stages: the stages
---  of this process, if the model is cut into stages. stays: returns true if a sharded parameter stays on this rank
---  from its first gather to the end of the step, false if it does not, or nil to use the setting of the configuration.
---  agree: returns the chunk size that all ranks use
---@return ps.engine.Built
function build.place(module, options)
  local entries, elsewhere, untrained = parameters(module), {}, {}
  if #entries == 0 then
    error("no parameter of the model requires a gradient, so there is nothing to train; thaw some (model:thaw)", 0)
  end
  if options.stages then entries, elsewhere, untrained = own_parameters(entries, options.stages) end
  local entry_sizes, shapes, numel = {}, {}, 0
  for i, entry in ipairs(entries) do
    check_parameter(entry, options.device)
    entry.dtype, entry.trains = target_dtype(entry, options.precision), entry.tensor:needs_grad()
    entry_sizes[i] = { numel = entry.tensor:numel(), dtype = entry.dtype, trains = entry.trains, name = entry.name,
      vstage = entry.vstage, apart = options.lookups and embed.is_table(entry) or nil,
      lent = not entry.trains and C.ps_tensor_is_lent(entry.tensor) ~= 0 or nil }
    shapes[i] = entry.tensor:shape()
    if entry.trains then
      options.check_parameter(entry.name, entry.tensor)
      entry_sizes[i].states = options.states_for(entry.name, entry.tensor)
      entry_sizes[i].bytes = options.other_bytes + optimizers.states_nbytes(entry_sizes[i].states, shapes[i])
        / math.max(1, entry_sizes[i].numel)
    end
    if options.stays and options.shards and options.shards:parameters() then
      entry_sizes[i].stays = options.stays(entry.tensor)
    end
    numel = numel + entry_sizes[i].numel
  end
  local plan
  if options.chunk_size then
    plan = pack.pack(entry_sizes, math.max(pack.SMALLEST, options.chunk_size))
  else
    plan = pack.search(entry_sizes, { capacity = options.capacity, state_bytes = options.state_bytes,
      ranks = options.shards and options.shards:state() and options.shards.size or 1 }).chosen.layout
    local agreed = options.agree and options.agree(plan.chunk_size) or plan.chunk_size
    if agreed ~= plan.chunk_size then plan = pack.pack(entry_sizes, agreed) end
  end
  share_out(plan, options)
  local sharded = options.shards and options.shards:state()
  local built = { list = {}, frozen = {}, elsewhere = elsewhere, untrained = untrained, tables = {}, units = 0,
    unit_bytes = {}, unit_states = {}, unit_numel = {}, unit_rows = {}, layout = plan, numel = numel, state_bytes = 0 }
  local rows = {}
  for _, row in ipairs(plan.chunks) do
    local group = plan.groups[row.group]
    local ids = chunks_for(row, group, options, shapes)
    if group.trains then add_unit(built, row, group, ids) end
    for _, at in ipairs(row.tensors) do
      local entry = entries[at.index]
      local param, master = place_param(entry, ids, at.offset, options)
      entry.tensor = nil
      if entry_sizes[at.index].apart then embed.add(built.tables, entry, param) end
      local made = { name = entry.name, param = param, master = group.trains and master or nil, index = at.index,
        number = entry.number, vstage = group.vstage, numel = entry_sizes[at.index].numel,
        owner = sharded and row.owner or nil }
      finish_row(made, options)
      if group.trains then
        made.unit = built.units - 1
        train_row(made, group, ids, at, options)
        rows[#rows + 1] = made
      else
        built.frozen[#built.frozen + 1] = made
        untrained[#untrained + 1] = made
      end
    end
  end
  table.sort(rows, function(a, b) return a.index < b.index end)
  built.list = rows
  packed.each(module, build.to_own_chunk)
  built.state_bytes = state_bytes()
  collector.after_making()
  return built
end

--- Registers the trained parameters with the engine. built.list[i] belongs to the optimizer group group_of[i], counted
--- from 0. The list is sorted by virtual stage. Within a virtual stage, it is sorted by `order`, the parameter's index
--- among all trained parameters of the model. Norms are summed in this order.
---@param built ps.engine.Built
---@param group_of integer[]
---@param n_groups integer
---@param where {device: integer, host: integer, ranks?: ps.engine.Ranks, stages?: ps.engine.Stages}
function build.register(built, group_of, n_groups, where)
  local n, uses = #built.list, {}
  for _, entry in ipairs(built.list) do
    for _, use in ipairs(entry.uses or {}) do uses[#uses + 1] = { entry = entry, use = use } end
  end
  table.sort(uses, function(a, b)
    if a.use.vstage ~= b.use.vstage then return a.use.vstage < b.use.vstage end
    return a.entry.order < b.entry.order
  end)
  local rows = param_array(math.max(1, n + #uses))
  -- keeps the headers of tensors alive until the engine has retained the tensors
  local anchors = {}
  local function ptr(t)
    anchors[#anchors + 1] = t
    return ffi.cast("ps_tensor *", t)
  end
  for i, entry in ipairs(built.list) do
    local row = rows[i - 1]
    local apart = where.device ~= where.host
    local averages = entry.averages or {}
    -- Returns the tensor for the compute device. If this is not the host, also stores a view of the tensor for the host
    -- in row.host[k].
    local function both(t, k)
      if apart then row.host[k] = ptr(seen_from(t, where.host)) end
      return ptr(apart and k > 0 and seen_from(t, where.device) or t)
    end
    row.param = both(entry.param, 0)
    if entry.master ~= nil then row.master = both(entry.master, 1) end      -- nil if the master is on another rank
    for k, t in ipairs(averages) do row.state[k - 1] = both(t, k + 1) end
    row.n_states = #averages
    if apart and entry.master ~= nil and rawequal(entry.master, entry.param) then
      row.master, row.host[1] = row.param, row.host[0]
    end
    if entry.grad ~= nil then row.grad = ptr(entry.grad) end
    row.group, row.unit = group_of[i], entry.unit
    row.vstage, row.number = entry.vstage, entry.order
    if where.stages and #where.stages:sharers(entry.name) > 0 then row.tie = C.PS_TIE_COPY end
    row.tp = shard.of(entry.param) and C.PS_TP_SPLIT or shard.is_partial(entry.param) and C.PS_TP_PARTIAL
      or C.PS_TP_WHOLE
  end
  for i, other in ipairs(uses) do
    local row = rows[n + i - 1]
    row.param, row.grad, row.tie = ptr(other.entry.param), ptr(other.use.grad), C.PS_TIE_USE
    row.vstage, row.number = other.use.vstage, other.entry.order
  end
  native.check(C.ps_engine_params(native.ctx, n + #uses, rows, built.units, n_groups))
  local numbers, count = {}, 0
  for unit, row in ipairs(where.ranks and built.unit_rows or {}) do
    if not numbers[row.stripe] then
      numbers[row.stripe] = count
      count = count + 1
    end
    native.check(C.ps_engine_unit_parts(native.ctx, unit - 1, numbers[row.stripe], row.param, row.grad or -1))
  end
end

-- engine/layout/rechunk.lua uses these functions.
build.pieces = { adopt = adopt, adopt_state = adopt_state, adopt_remainder = adopt_remainder, adopt_param = adopt_param,
  new_grad = new_grad, thaw_param = thaw_param,
  chunks_for = chunks_for,
  number_stripes = number_stripes, finish_row = finish_row, add_unit = add_unit, state_bytes = state_bytes }

return build
