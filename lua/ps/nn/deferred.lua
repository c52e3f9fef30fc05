-- SPDX-License-Identifier: BSD-3-Clause
-- ps.deferred and ps.materialize: models that are created without data and get their data later. In this way each
-- process allocates only the data of its own tensors:
--
--   local model = ps.deferred(function() return gpt2.new("gpt2-xl") end)       -- on meta: names and shapes
--   ps.materialize(model, { elsewhere = function(name) return not mine[name] and "rank 1 (stage 1)" end })
--
-- While the function runs, each op on meta is recorded. The record has the op's tensors and attributes. The attributes
-- contain the seed and the offset of random numbers. The offsets (Philox) advance as they would with data.
-- ps.materialize repeats the ops that compute a parameter's values. The values therefore equal, bit for bit, the values
-- that the function would compute with data. An op that cannot be repeated is an error that names the parameter. The
-- idea is from torchdistx's deferred_init.
local create = require "ps.tensor.create"
local devices = require "ps.core.devices"
local scope = require "ps.core.scope"
local serialize = require "ps.io.serialize"
local tensors = require "ps.tensor"
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local nn_module = require "ps.nn.module"
local array = require "ps.core.array"
local packed = require "ps.nn.packed"
local registry = require "ps.nn.registry"
local rectangles = require "ps.core.rectangles"
local shard = require "ps.tensor.shard"
local ffi, C, own = native.ffi, native.C, native.own
local error = caller.error

local deferred = {}

-- LuaJIT does not compile this file. Compiled code would keep the closures of a record alive, and the closures hold the
-- model's tensors. The code of this file runs only briefly, so compiling would save little time.
jit.off(true, true)

local META = native.device_index "meta"
local pointer_array = array "ps_tensor *"
local outs = ffi.new "ps_tensor *[PS_MAX_OUT]"
local address = nn_module.address

local function storage_of(t) return tonumber(ffi.cast("uintptr_t", t.storage)) end

-- Returns another Lua object for a tensor's header. The object has its own reference to the tensor.
local function held(t)
  C.ps_tensor_retain(t)
  return own(ffi.cast("ps_tensor *", t))
end

-- -- recording ------------------------------------------------------------------------------------------------------
-- Records everything that is computed on meta, in order. A node of the record is an op, or another source of a tensor's
-- values (with a function `run`). The record keeps all headers alive, so that no address is reused. The tables below
-- are indexed by the address of a header or of a storage.
---@class ps.deferred.Record
---@field nodes table[]
---@field maker table<integer, table> by header: the node that created the header, or EMPTY if the tensor was created
--- without values
---@field storage table<integer, integer> by header: the address of the header's storage on meta
---@field writers table<integer, table[]> by storage: the nodes that wrote into the storage
---@field versions table<integer, integer> by storage: the storage's version after the last recorded write
---@field whole table<integer, ps.Tensor> by header of a shard: the whole tensor
local Record = {}
Record.__index = Record

local EMPTY = {}                                  -- maker of tensors that were created without values

local function new_record()
  return setmetatable({ nodes = {}, maker = {}, storage = {}, writers = {}, versions = {}, held = {}, whole = {} },
    Record)
end

-- Returns a function that raises an error if the tensor has been written to since this call.
local function unchanged(t)
  local version = C.ps_tensor_version(t)
  return function()
    if C.ps_tensor_version(t) ~= version then error("the tensor from which it was copied has changed since", 0) end
  end
end

function Record:add(node)
  self.nodes[#self.nodes + 1] = node
  node.number = #self.nodes
end

function Record:wrote(storage, node)
  self.writers[storage] = self.writers[storage] or {}
  table.insert(self.writers[storage], node)
end

-- Checks an input t after an op has run. If the op wrote into t's storage, records the op's node as a writer.
function Record:touched(node, t)
  local storage, version = storage_of(t), C.ps_tensor_version(t)
  local before = node.before[storage]
  if version == before then return end
  -- The two versions are different if an earlier write was not recorded.
  if self.versions[storage] == before then self.versions[storage] = version end
  self:wrote(storage, node)
end

-- Records the node that created a header. The node is EMPTY if the tensor was created without values.
function Record:makes(header, node)
  local storage = storage_of(header)
  self.maker[address(header)], self.storage[address(header)] = node, storage
  if not self.versions[storage] then self.versions[storage] = C.ps_tensor_version(header) end
end

--- Begins the record of an op before the op runs. native.recorder is the record.
---@return table node
function Record:begin(op, n_in, ins, attrs, nbytes)
  -- These references keep Lua from collecting the inputs.
  for i = 0, n_in - 1 do if ins[i] ~= nil then C.ps_tensor_retain(ins[i]) end end
  local node = { op = op, n_in = n_in, ins = {}, attrs = ffi.string(attrs, nbytes), nbytes = nbytes, before = {} }
  for i = 0, n_in - 1 do
    if ins[i] ~= nil then
      node.ins[i] = own(ins[i])
      node.before[storage_of(node.ins[i])] = C.ps_tensor_version(node.ins[i])
    end
  end
  return node
end

--- Finishes the record of an op that has run. An op is not recorded if its results have data.
function Record:finish(node, results)
  node.outs = {}
  for i = 0, 3 do if results[i] ~= nil then node.outs[i] = held(results[i]) end end
  local first = node.outs[0]
  if first == nil or first.device_ ~= META then return end
  self:add(node)
  for i = 0, node.n_in - 1 do if node.ins[i] ~= nil then self:touched(node, node.ins[i]) end end
  for i = 0, 3 do
    local out = node.outs[i]
    if out ~= nil and not self.maker[address(out)] then self:makes(out, node) end
  end
end

--- Records a tensor that was created without values.
function Record:empty(t)
  if t.device_ ~= META then return end
  self:makes(t, EMPTY)
  self.held[#self.held + 1] = held(t)
end

--- Records a tensor `to` on meta that is a copy of `from`, or another header of the same storage.
function Record:copied(from, to)
  if to.device_ ~= META then return end
  from = held(from)
  local node = { ins = { [0] = from }, n_in = 1, outs = { [0] = held(to) } }
  if from.device_ == META then
    function node.run(env) return env[address(from)]:detach() end
  else
    from:keep()
    local check = unchanged(from)
    function node.run(_, _, device)
      check()
      local there = from:to(native.device_name[device])
      return tensors.same(there, from) and from:clone() or there
    end
  end
  self:add(node)
  self:makes(to, node)
end

-- Records that all values of t are from a file or from a table of tensors.
function Record:loads(t, state, name)
  local node = { ins = { [0] = held(t) }, n_in = 1, outs = {}, whole = true }
  local path, own_name, open = deferred.origin(state, name)
  if path then
    local function opened(files)
      files[path] = files[path] or (open and open() or serialize.load(path, { lazy = true }))
      return files[path]
    end
    function node.run(env, files) opened(files):read_into(own_name, env[address(t)]) end
    function node.part(files, part, offset) opened(files):read_part(own_name, part, offset) end
  elseif state[name].device_ == META then  -- the tensor belongs to another module that has no data yet
    local from = held(state[name])
    node.n_in, node.ins[1] = 2, from
    function node.run(env) env[address(t)]:copy_(env[address(from)]) end
  else
    local value = held(state[name])
    local check = unchanged(value)
    function node.run(env)
      check()
      env[address(t)]:copy_(value:to(env[address(t)]:device()))
    end
  end
  self:add(node)
  self:wrote(storage_of(t), node)
end

--- Returns the file of a tensor in an open state, and the tensor's name in this file. Returns nil if the state is a
--- table of tensors.
---@param state table
---@param name string
---@return string? path
---@return string? name
---@return function? open returns the open file; nil if ps.load opens it
function deferred.origin(state, name)
  if not state.read_into then return nil end
  if state.origin then return state:origin(name) end
  return state.path, name
end

-- -- repeating ------------------------------------------------------------------------------------------------------
-- Returns the nodes that computed the values of t, in the order in which they ran.
local function nodes_for(record, t)
  local chosen, seen, list = {}, {}, {}
  local need_header
  local function include(node)
    if chosen[node] then return end
    chosen[node], list[#list + 1] = true, node
    for i = 0, node.n_in - 1 do if node.ins[i] ~= nil then need_header(node.ins[i]) end end
  end
  function need_header(header)
    local at = address(header)
    local maker, storage = record.maker[at], record.storage[at]
    if seen[at] or not maker and header.device_ ~= META then return end
    seen[at] = true
    if not maker then error("it was made in a way that cannot be repeated", 0) end
    if maker ~= EMPTY then include(maker) end
    if header.device_ == META and C.ps_tensor_version(header) ~= record.versions[storage] then
      error("it was written in a way that cannot be repeated", 0)
    end
    local writers, from = record.writers[storage] or {}, 1
    for i, node in ipairs(writers) do if node.whole then from = i end end  -- the node overwrote all earlier values
    for i = from, #writers do include(writers[i]) end
  end
  need_header(t)
  table.sort(list, function(a, b) return a.number < b.number end)
  return list
end

-- Returns the tensor with data that replaces the tensor of a header while ops are repeated. The first call creates this
-- tensor without values. The header's own tensor is not used, because it may already have its final values. Other
-- tensors were computed from its earlier values.
local function real(record, env, header, device)
  local at = address(header)
  if not record.maker[at] then return header end
  if not env[at] then env[at] = create.empty(header:shape(), { dtype = header:dtype(),
    device = native.device_name[device] }) end
  return env[at]
end

local function run_node(record, env, node, device, files)
  for i = 0, node.n_in - 1 do if node.ins[i] ~= nil then real(record, env, node.ins[i], device) end end
  if node.run then
    local made = node.run(env, files, device)
    if made ~= nil then env[address(node.outs[0])] = made end
    return
  end
  local ins = pointer_array(math.max(1, node.n_in))
  for i = 0, node.n_in - 1 do if node.ins[i] ~= nil then ins[i] = real(record, env, node.ins[i], device) end end
  for i = 0, 3 do outs[i] = nil end
  native.retry(C.ps_apply, native.ctx, node.op, node.n_in, ins, node.attrs, node.nbytes, outs)
  local made = {}
  for i = 0, 3 do if outs[i] ~= nil then made[i] = own(outs[i]) end end
  for i = 0, 3 do if made[i] ~= nil and node.outs[i] ~= nil then env[address(node.outs[i])] = made[i] end end
end

-- Runs the nodes of `list`, and returns the values of a tensor on a device.
local function compute(record, list, env, t, device, files)
  for _, node in ipairs(list) do run_node(record, env, node, device, files) end
  return real(record, env, t, device)
end

-- Ops that fill a tensor in place, by op code. `attributes` is the type of the op's attributes. If `numbered` is true,
-- the attributes contain `offset`, the counter of the first element's random number. The counter of element i is then
-- offset + i.
local FILLS = {
  [C.PS_OP_normal_] = { attributes = ffi.typeof "ps_attrs_normal_", numbered = true },
  [C.PS_OP_uniform_] = { attributes = ffi.typeof "ps_attrs_uniform_", numbered = true },
  [C.PS_OP_fill_] = { attributes = ffi.typeof "ps_attrs_fill_" },
}

-- Returns whether all values of a tensor were written by ops that fill the whole tensor. A part of such a tensor can be
-- filled without the rest.
local function is_filled(record, list, t)
  if record.maker[address(t)] ~= EMPTY or not t:is_contiguous() then return false end
  for _, node in ipairs(list) do
    if node.run or not FILLS[node.op] or address(node.ins[0]) ~= address(t) then return false end
  end
  return true
end

-- Fills `numel` elements of t, beginning with element `at`. Element at + i of t gets the value of element first + i of
-- the whole tensor.
local function fill_run(t, at, numel, node, first)
  local how, ins = FILLS[node.op], pointer_array(1)
  local attributes = how.attributes()
  ffi.copy(attributes, node.attrs, node.nbytes)
  if how.numbered then attributes.offset = attributes.offset + first end
  local part = t:narrow(0, at, numel)
  ins[0] = part
  for i = 0, 3 do outs[i] = nil end
  native.retry(C.ps_apply, native.ctx, node.op, 1, ins, attributes, node.nbytes, outs)
  native.give_back(own(outs[0]))
  native.give_back(part)
end

-- Returns the values of a shard. Repeats the ops that fill the whole tensor, but only for the shard's elements. If each
-- row of the whole tensor is divided between shards, the shard is filled row by row.
local function fill_shard(list, whole, desc, device)
  local t = create.zeros(shard.shape(desc), { dtype = whole:dtype(), device = native.device_name[device] })
  if not devices.computes then return t end                             -- the dry run of a script has no values
  local flat, d, shape = t:reshape(-1), desc.dim + 1, desc.full_shape
  -- The shard is treated as a tensor of shape [rows, wide, inner], where `wide` is the shard's size in the cut
  -- dimension.
  local rows, inner, wide = 1, 1, t:shape()[d]
  for i = 1, d - 1 do rows = rows * shape[i] end
  for i = d + 1, #shape do inner = inner * shape[i] end
  for _, node in ipairs(list) do
    for _, piece in ipairs(shard.pieces(desc)) do
      for row = 0, rows - 1 do
        fill_run(flat, (row * wide + piece.at[d]) * inner, piece.shape[d] * inner, node,
          (row * shape[d] + piece.offset[d]) * inner)
      end
    end
  end
  native.give_back(flat)
  return t
end

-- Reads the values of one shard from a file. `node` is the recorded load of the whole tensor.
local function read_shard(node, whole, desc, device, files)
  local t = create.zeros(shard.shape(desc), { dtype = whole:dtype(), device = native.device_name[device] })
  for _, piece in ipairs(shard.pieces(desc)) do
    node.part(files, rectangles.view(t, piece.at, piece.shape), piece.offset)
  end
  return t
end

-- Sets the values of t on a device. If t is a shard of another tensor, t gets only the values of the shard.
local function fill(record, t, device, files)
  local whole, desc = record.whole[address(t)], nil
  if whole then desc = shard.of(t) else whole = t end
  local list = nodes_for(record, whole)
  scope.no_grad(scope.scope, function()
    local env, value = {}
    if desc and is_filled(record, list, whole) then value = fill_shard(list, whole, desc, device)
    elseif desc and #list == 1 and list[1].part then value = read_shard(list[1], whole, desc, device, files)
    else
      value = compute(record, list, env, whole, device, files)
      if desc then value = shard.of_whole(desc, value) end
    end
    if not value:is_contiguous() or value.offset ~= 0 then value = value:clone() end
    native.check(C.ps_tensor_set_data(t, value:keep()))
    for _, made in pairs(env) do native.give_back(made) end     -- freed at once, so that only t holds memory
    if desc then native.give_back(value) end
  end)
end

-- -- models ---------------------------------------------------------------------------------------------------------
local records = setmetatable({}, { __mode = "k" })          -- { record, device } by model
-- The keys are the parameters that are on other processes. The values say where the values of these parameters are.
local absent = setmetatable({}, { __mode = "k" })

-- If an input of a failed op is on another process, adds the location of the input to the error.
hooks.on("op_failed", function(n_in, ins)
  for i = 0, n_in - 1 do
    for t, text in pairs(absent) do
      if ins[i] ~= nil and address(ins[i]) == address(t) and t.device_ == META then return text end
    end
  end
end)

-- Prevents loading the values of a tensor that is on another process.
hooks.on("load", function(t) return absent[t] and t.device_ == META and { elsewhere = true } or nil end)

--- Runs a function that creates a model, but creates the tensors without data. Tensors are created on meta unless the
--- function names a device. Random numbers advance as they would with data. ps.materialize computes the values later.
--- These values equal, bit for bit, the values that fn() would compute with data.
---@param fn fun(...): ps.nn.Module
---@param ... any arguments of fn
---@return ps.nn.Module model
function deferred.make(fn, ...)
  caller.callable(fn, "ps.deferred")
  if native.recorder then error("ps.deferred cannot be called inside ps.deferred") end
  local record = new_record()
  local device = create.set_default_device("meta")
  local off = hooks.on("load", function(t, state, name)
    if t.device_ ~= META then return nil end
    record:loads(t, state, name)
    return { elsewhere = true }
  end)
  native.recorder = record
  local ok, model = pcall(fn, ...)
  native.recorder = nil
  off()
  create.set_default_device(device)
  if not ok then error(model, 0) end
  if not nn_module.is_module(model) then error("ps.deferred: it returned a " .. type(model) .. ", not a module") end
  records[model] = { record = record, device = device }
  return model
end

local OPTIONS = { device = "string", elsewhere = "callable" }

-- Returns all tensors of a model as a list of {name =, tensor =, kind =}, in which each tensor occurs once. The list
-- begins with the parameters in their order, under their first names. Buffers and tensors in plain fields follow. A
-- packed weight has the kind "packed".
local function tensors_of(model)
  local list, seen = {}, {}
  for name, p in model:named_parameters() do
    seen[address(p)], list[#list + 1] = true, { name = name, tensor = p, kind = "param" }
  end
  local rest = {}
  for path, module in model:named_modules() do
    for key, value, kind in registry.tensors(module) do
      if not seen[address(value)] then
        seen[address(value)] = true
        rest[#rest + 1] = { name = (path == "" and "" or path .. ".") .. tostring(key), tensor = value,
          kind = key == "weight" and packed.of(module) and "packed" or kind }
      end
    end
  end
  table.sort(rest, function(a, b) return a.name < b.name end)
  for _, entry in ipairs(rest) do list[#list + 1] = entry end
  return list
end

-- Computes the values of one tensor of the model. An error names the tensor.
local function give_values(record, entry, device, files)
  local ok, why = pcall(fill, record, entry.tensor, device, files)
  if not ok then
    if getmetatable(why) ~= native.Error then
      error(("ps.materialize: %s: %s; make it on a device with data, { device = \"cpu\" }, or in the model's "
        .. "forward"):format(entry.name, tostring(why)), 0)
    end
    why.msg = ("%s: %s"):format(entry.name, why.msg)
    error(why, 0)
  end
  if entry.kind == "param" then hooks.tell("parameter", entry.tensor) end
  if entry.kind == "packed" then hooks.tell("packed", entry.tensor, entry.name) end
end

--- Creates a parameter that is a shard of one of the model's parameters. The caller must replace the whole parameter by
--- the shard in the modules. ps.materialize sets the shard's values.
---@param model ps.nn.Module made by ps.deferred
---@param parameter ps.Tensor the whole parameter, which has no values yet
---@param desc ps.nn.Shard
---@return ps.Tensor
function deferred.cut(model, parameter, desc)
  local record = records[model] and records[model].record
  if not record or parameter.device_ ~= META then
    error("a parameter can be cut only before it has values, and this parameter of a " .. model.class_name
      .. " has values: make the model within the function, model_func = function() return MODEL_CLASS(...) end, "
      .. "without a device", 0)
  end
  local part = create.empty(shard.shape(desc), { dtype = parameter:dtype(), device = "meta" })
  nn_module.Parameter(part)
  if not parameter:needs_grad() then part:requires_grad(false) end
  record.whole[address(part)] = held(parameter)
  return shard.set(part, desc)
end

-- Frees the data of a tensor that is on another process.
local function leave(t)
  if t.device_ == META then return end
  native.check(C.ps_tensor_set_data(t, create.empty(t:shape(), { dtype = t:dtype(), device = "meta" })))
end

--- Frees the data of a parameter that is on another process. The parameter keeps its shape and type.
---@param parameter ps.Tensor
---@param text string text for errors about the parameter's use, which says what the parameter is and where its values
--- are
function deferred.leave(parameter, text)
  absent[parameter] = text
  leave(parameter)
end

--- Computes the values of a model that ps.deferred created, one tensor at a time. The option `elsewhere` is called with
--- each tensor's name and the tensor. A tied tensor has its first name. If `elsewhere` returns nil or false, the tensor
--- gets values. Otherwise it returns the place of the values, such as "rank 1 (stage 1)". The tensor then keeps only
--- its shape and type, and an op that uses it raises an error with this text.
---@param model ps.nn.Module
---@param options? {device?: string, elsewhere?: fun(name: string, tensor: ps.Tensor): string|false?} device (default:
--- the device of new tensors at the time of ps.deferred)
---@return ps.nn.Module model
function deferred.materialize(model, options)
  options = caller.options(options, "ps.materialize", OPTIONS)
  local made = nn_module.is_module(model) and records[model]
  if not made then error("ps.materialize takes a model that ps.deferred made") end
  local device, files, left = native.device_index(options.device or made.device), {}, false
  local ok, problem = pcall(function()
    for _, entry in ipairs(tensors_of(model)) do
      local name, t = entry.name, entry.tensor
      local where = options.elsewhere and options.elsewhere(name, t)
      absent[t] = where and ("%s is on %s; only its shape and type are known here"):format(name, where) or nil
      if where then
        left = true
        leave(t)
      elseif t.device_ == META then
        give_values(made.record, entry, device, files)
      end
    end
  end)
  for _, file in pairs(files) do file:close() end
  if not ok then error(problem, 0) end
  if not left then records[model] = nil end
  return model
end

return deferred
