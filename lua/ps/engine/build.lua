-- SPDX-License-Identifier: BSD-3-Clause
-- From a module to parameters in chunks: parameters are staged as they are made, so that a model larger than memory can
-- be built; then the layout is made in the order of registration, and every tensor moves to its place in it.
local ps = require "ps"
local core = require "ps.nn.module"
local layout = require "ps.chunk_layout"
local embed = require "ps.engine.embed"
local ffi, C = ps.ffi, ps.C

local build = {}

local id_out, tensor_out = ffi.new("int32_t[1]"), ffi.new("ps_tensor *[1]")
local address = core.address
local PAGE = 4096
local KINDS = { param = C.PS_KIND_PARAM, param_fp32 = C.PS_KIND_PARAM_FP32, momentum = C.PS_KIND_MOMENTUM,
  variance = C.PS_KIND_VARIANCE, grad = C.PS_KIND_GRAD }
local BYTES = { fp32 = 4, bf16 = 2, fp16 = 2 }

-- Where a chunk's tensors begin, by kind. Adam reads and writes a place of all lists at once; were these at equal
-- distances from page boundaries, the processor would take a write of one for a read of another and slow down.
local START = { param = 0, param_fp32 = 4864, momentum = 2 * 4864, variance = 3 * 4864, grad = 4 * 4864 }
local SHIFTED_FROM = 2 ^ 20             -- bytes; in a smaller chunk it would be waste

-- Bytes before the tensors of a chunk that holds `numel` elements of a type.
local function start_of(kind, numel, dtype)
  return numel * BYTES[dtype] >= SHIFTED_FROM and START[kind] or 0
end

local function new_chunk(kind, group, index, dtype, nbytes)
  ps.check(C.ps_engine_chunk_new(ps.ctx, KINDS[kind], group, index, ps.dtype_code(dtype), nbytes, id_out))
  return id_out[0]
end

-- A tensor like another, `offset` elements into the chunk of a kind; ids: those of a row of the layout.
local function new_tensor(like, dtype, device, ids, kind, offset, name)
  local at = start_of(kind, ids.numel, dtype) + offset * BYTES[dtype]
  ps.retry(C.ps_engine_tensor_new, ps.ctx, like, ps.dtype_code(dtype), device, ids[kind], at, name, tensor_out)
  return ps.own(tensor_out[0])
end

local function adopt(tensor, dtype, ids, kind, offset, name)
  local at = start_of(kind, ids.numel, dtype) + offset * BYTES[dtype]
  ps.retry(C.ps_engine_adopt, ps.ctx, tensor, ids[kind], at, name)
end

local function seen_from(tensor, device)
  ps.retry(C.ps_engine_tensor_at, ps.ctx, tensor, device, tensor_out)
  return ps.own(tensor_out[0])
end

--- Takes a parameter, when it has just been made, out of plain memory into a chunk of its own. A tensor that shares its
--- bytes with others, or holds none, stays where it is until the layout.
---@param tensor ps.Tensor
function build.stage(tensor)
  local nbytes = tonumber(C.ps_tensor_nbytes(tensor))
  if nbytes == 0 or C.ps_engine_tensor_chunk(ps.ctx, tensor) >= 0 then return end
  local chunk = new_chunk("param", -1, 0, tensor:dtype(), math.ceil(nbytes / PAGE) * PAGE)
  ps.retry(C.ps_engine_adopt, ps.ctx, tensor, chunk, 0, nil)
end

-- Parameters of the module: {name, tensor, places = {{owner, key}...}}, tied ones once.
local function parameters(module)
  local list, by_address = {}, {}
  local function walk(at, prefix)
    for _, key in ipairs(at._names) do
      local value, kind = rawget(at, key), at._kind[key]
      if kind == "module" then
        walk(value, prefix .. tostring(key) .. ".")
      elseif kind == "param" and value ~= nil then
        local entry = by_address[address(value)]
        if not entry then
          entry = { name = prefix .. tostring(key), tensor = value, places = {} }
          by_address[address(value)] = entry
          list[#list + 1] = entry
        end
        entry.places[#entry.places + 1] = { at, key }
      end
    end
  end
  walk(module, "")
  return list
end

local function check_parameter(entry, device)
  local dtype = entry.tensor:dtype()
  if not BYTES[dtype] then
    error(("parameter %s is %s; parameters of an engine are fp32, bf16 or fp16 (memory = \"plain\" takes others)")
      :format(entry.name, dtype), 0)
  end
  if entry.tensor.device_ ~= device then
    error(("parameter %s lies on %s, the engine computes on %s; make it on the default device"):format(entry.name,
      entry.tensor:device(), ps.device_name[device]), 0)
  end
end

-- The type a parameter trains in: fp32 ones become the configuration's; others keep theirs.
local function target_dtype(entry, precision)
  local dtype = entry.tensor:dtype()
  return dtype == "fp32" and precision or dtype
end

-- Puts one parameter into its chunk; gives the tensor that trains and its fp32 master.
local function place_param(entry, ids, offset, where)
  local old, dtype = entry.tensor, entry.dtype
  local name, trains = entry.name, entry.trains
  if old:dtype() == dtype then
    adopt(old, dtype, ids, "param", offset, name)
    if not trains or dtype == "fp32" then return old, old end
    local master = new_tensor(old, "fp32", where.host, ids, "param_fp32", offset, name)
    local from = where.device ~= where.host and seen_from(old, where.host) or old
    ps.no_grad(function() master:copy_(from) end)
    return old, master
  end
  local param = new_tensor(old, dtype, where.device, ids, "param", offset, name)
  ps.no_grad(function() param:copy_(old) end)
  core.Parameter(param)
  if not trains then param:requires_grad(false) end
  for _, at in ipairs(entry.places) do rawset(at[1], at[2], param) end
  if trains then
    adopt(old, "fp32", ids, "param_fp32", offset, name)
    old:requires_grad(false)
    if where.device ~= where.host then old = seen_from(old, where.host) end
  end
  return param, old
end

-- The chunks of one row of the layout, a list of each kind.
local function chunks_for(row, group, number, with_grad, grad_dtype)
  local ids, index = { numel = row.numel }, row.index
  local function one(kind, dtype)
    local nbytes = row.numel * BYTES[dtype] + start_of(kind, row.numel, dtype)
    ids[kind] = new_chunk(kind, number, index, dtype, math.ceil(nbytes / PAGE) * PAGE)
  end
  one("param", group.dtype)
  if not group.trains then return ids end
  if group.dtype ~= "fp32" then one("param_fp32", "fp32") end
  one("momentum", "fp32")
  one("variance", "fp32")
  if with_grad then one("grad", grad_dtype == "param" and group.dtype or grad_dtype) end
  return ids
end

---@class ps.engine.Built
---@field list table[] a row for each trained parameter: name, param, master, m, v, grad, unit, numel, and place: the
---  parameter as the host sees it, where it lies on a device
---@field tables ps.engine.Table[] embeddings whose tables have chunks of their own
---@field units integer
---@field unit_bytes integer[] bytes of master, momentum and variance of a unit, from 1
---@field layout ps.layout.Layout
---@field numel integer parameters, frozen ones too
---@field state_bytes integer bytes of all chunks

--- Lays the module's parameters out in chunks.
---@param module ps.nn.Module
---@param options {precision: string, chunk_size?: integer, capacity?: integer, device: integer, host: integer,
---  grads: boolean, grad_dtype: string, state_bytes: integer, lookups?: boolean} lookups: tables of embeddings may
---  go to the host; grads: gradients have chunks of their own
---@return ps.engine.Built
function build.place(module, options)
  local entries = parameters(module)
  if #entries == 0 then error("the model has no parameters to train", 0) end
  local sizes, numel = {}, 0
  for i, entry in ipairs(entries) do
    check_parameter(entry, options.device)
    entry.dtype, entry.trains = target_dtype(entry, options.precision), entry.tensor:needs_grad()
    sizes[i] = { numel = entry.tensor:numel(), dtype = entry.dtype, trains = entry.trains, name = entry.name,
      apart = options.lookups and embed.is_table(entry) or nil }
    numel = numel + sizes[i].numel
  end
  local plan
  if options.chunk_size then
    plan = layout.pack(sizes, math.max(layout.SMALLEST, options.chunk_size))
  else
    plan = layout.search(sizes, { capacity = options.capacity, state_bytes = options.state_bytes }).chosen.layout
  end
  local built = { list = {}, tables = {}, units = 0, unit_bytes = {}, layout = plan, numel = numel, state_bytes = 0 }
  local rows = {}
  for _, row in ipairs(plan.chunks) do
    local group = plan.groups[row.group]
    local with_grad = options.grads
    local ids = chunks_for(row, group, row.group - 1, with_grad, options.grad_dtype)
    if group.trains then
      built.units = built.units + 1
      built.unit_bytes[built.units] = row.numel * (group.dtype == "fp32" and 8 or 12)
    end
    for _, at in ipairs(row.tensors) do
      local entry = entries[at.index]
      local param, master = place_param(entry, ids, at.offset, options)
      entry.tensor = nil
      if sizes[at.index].apart then embed.add(built.tables, entry, param) end
      if group.trains then
        local made = { name = entry.name, param = param, unit = built.units - 1, index = at.index,
          numel = sizes[at.index].numel }
        made.m = new_tensor(param, "fp32", options.host, ids, "momentum", at.offset, entry.name)
        made.v = new_tensor(param, "fp32", options.host, ids, "variance", at.offset, entry.name)
        made.master = master
        if options.device ~= options.host then made.place = seen_from(param, options.host) end
        if with_grad then
          local dtype = options.grad_dtype == "param" and group.dtype or options.grad_dtype
          made.grad = new_tensor(param, dtype, options.device, ids, "grad", at.offset, entry.name)
        end
        rows[#rows + 1] = made
      end
    end
  end
  table.sort(rows, function(a, b) return a.index < b.index end)
  built.list = rows
  local info = ffi.new("ps_chunk_info")
  for i = 0, C.ps_engine_chunk_count(ps.ctx) - 1 do
    ps.check(C.ps_engine_chunk_get(ps.ctx, i, info))
    built.state_bytes = built.state_bytes + tonumber(info.nbytes)
  end
  collectgarbage()
  return built
end

--- Hands the trained parameters to the engine. group_of[i] is the optimizer group, from 0, of built.list[i].
---@param built ps.engine.Built
---@param group_of integer[]
---@param n_groups integer
---@param where {device: integer, host: integer}
function build.register(built, group_of, n_groups, where)
  local n = #built.list
  local rows = ffi.new("ps_param[?]", math.max(1, n))
  local anchors = {}                                  -- headers stay alive until the engine has retained them
  local function ptr(t)
    anchors[#anchors + 1] = t
    return ffi.cast("ps_tensor *", t)
  end
  for i, entry in ipairs(built.list) do
    local row = rows[i - 1]
    local apart = where.device ~= where.host
    local names = { entry.param, entry.master, entry.m, entry.v }
    row.param = ptr(entry.param)
    for k, field in ipairs { "param", "master", "m", "v" } do
      local t = names[k]
      if apart then
        local own_device = rawequal(entry.master, entry.param) and k == 2 and entry.param or t
        row[field] = ptr(k == 1 and entry.param or seen_from(own_device, where.device))
        row.host[k - 1] = ptr(seen_from(t, where.host))
      else
        row[field] = ptr(t)
      end
    end
    if apart and rawequal(entry.master, entry.param) then
      row.master, row.host[1] = row.param, row.host[0]
    end
    if entry.grad ~= nil then row.grad = ptr(entry.grad) end
    row.group, row.unit = group_of[i], entry.unit
  end
  ps.check(C.ps_engine_params(ps.ctx, n, rows, built.units, n_groups))
end

return build
