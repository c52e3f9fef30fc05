-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a model's weights in the form that Hugging Face reads: one safetensors file, or several files with an index.
-- With an engine, the written values are the fp32 values (masters), and only rank 0 writes.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local handle = require "ps.nn.handle"
local caller = require "ps.core.caller"
local sharded = require "ps.nn.sharded"
local agree = require "ps.dist.agree"
local batch = require "ps.pretrained.batch"
local copied = require "ps.core.copied"
local encode = require "ps.core.encode"
local make_folder = require("ps.checkpoints.folder").make
local folder = require "ps.pretrained.folder"
local lfs = require "lfs"
local mesh = require "ps.dist.mesh"
local json = require("cjson").new()
local pieces = require "ps.io.pieces"
local rectangles = require "ps.core.rectangles"
local replaced = require "ps.core.replaced"
local safetensors = require "ps.io.safetensors"
local error = caller.error
local C = native.C

local save = {}

local HALF = { bf16 = true, fp16 = true }
local HF_DTYPE = { fp32 = "float32", bf16 = "bfloat16", fp16 = "float16", fp64 = "float64" }

local function in_order(entries)
  for _, entry in ipairs(entries) do entry.numel = rectangles.numel(entry.shape) end
  table.sort(entries, function(a, b) return a.name < b.name end)
  return entries
end

-- Returns this rank's shard of a tensor, without padding. If `tensor` is a function that makes the tensor, returns a
-- function that makes the shard.
local function own_values(tensor, at)
  if type(tensor) == "function" then return function() return sharded.own(tensor(), at) end end
  return tensor ~= nil and sharded.own(tensor, at) or nil
end

-- Changes the entries of tensor-parallel parameters so that they describe this rank's shards, without padding. The
-- field `whole` of such an entry is the shape of the whole tensor.
local function of_shards(entries, cuts)
  local list = {}
  for _, entry in ipairs(entries) do
    local at = cuts and cuts[entry.name]
    if at then
      entry.whole, entry.pieces, entry.shape = at.shape, at.pieces, sharded.own_shape(at)
      entry.tensor = own_values(entry.tensor, at)
    end
    if entry.shape then list[#list + 1] = entry end
  end
  return list
end

--- Returns the tensors that must be written, sorted by name. The list contains the tensors of all ranks that train the
--- same parameters as this rank. In a pipeline, it contains only the tensors of this stage. An entry is {name, shape,
--- dtype, numel, tensor, owner}:
---   owner    the rank that has the tensor, as its number in the group
---   tensor   on the owner: the tensor, or a function that makes the tensor. On other ranks: nil
--- If ranks along tp share layers, the entries describe this rank's shards and have two more fields:
---   whole    the shape of the whole tensor
---   pieces   the offsets of the shards in the whole tensor
---@param model ps.nn.Module|ps.Engine
---@return table[]
function save.entries(model)
  local engine, entries = handle.of(model), {}
  local here = engine and engine:values_later() or model:state_dict { tied = false }
  local function values(name)
    local value = here[name]
    return type(value) == "table" and value.make or value
  end
  local stages = engine and engine.stages
  local function saves(name) return not stages or stages:saves(name) end
  local shares = engine and engine.ranks and engine.zero_stage > 0
  if not shares then
    for name, tensor in pairs(here) do
      if saves(name) then
        local later = type(tensor) == "table"
        entries[#entries + 1] = { name = name, shape = later and tensor.shape or tensor:shape(), owner = 0,
          dtype = later and tensor.dtype or tensor:dtype(), tensor = values(name) }
      end
    end
  else
    local address, rows = require("ps.nn.module").address, {}
    for _, list in ipairs { "list", "frozen" } do
      for _, row in ipairs(engine.built[list]) do rows[address(row.param)] = { row.owner, list == "list" } end
    end
    for name, tensor in pairs(engine.module:state_dict { tied = false }) do
      local row, dtype = rows[address(tensor)] or { 0, false }, tensor:dtype()
      if saves(name) then
        entries[#entries + 1] = { name = name, shape = tensor:shape(), tensor = values(name), owner = row[1] or 0,
          -- Trained parameters have an fp32 master.
          dtype = row[2] and HALF[dtype] and "fp32" or dtype }
      end
    end
  end
  return in_order(of_shards(entries, sharded.of(model)))
end

--- Returns entries for whole tensors, from all stages and all tensor-parallel ranks. All ranks call this function. An
--- owner is its rank among all ranks. `tp` and `pp` are the owner's coordinates along these axes. If several ranks hold
--- pieces of a tensor, the entry has a list `parts`, whose owners replace the entry's owner. A part is {owner, offset,
--- shape, at}:
---   offset, shape   a rectangle of the whole tensor
---   at              the offset of this rectangle in the owner's tensor
---@param model ps.nn.Module|ps.Engine
---@return table[]
function save.whole(model)
  local mine, cuts, engine = save.entries(model), sharded.of(model), handle.of(model)
  if not (cuts or engine and engine.stages) then return mine end
  local peers, world = mesh.group "dp", mesh.group "world"
  local said, here, entries, by_name = {}, {}, {}, {}
  for _, entry in ipairs(mine) do
    here[entry.name] = entry.tensor
    if (peers and peers:rank() or 0) == 0 and (entry.whole or mesh.rank "tp" == 0) then
      said[#said + 1] = { name = entry.name, dtype = entry.dtype, shape = entry.whole or entry.shape,
        owner = peers and peers:world_rank(entry.owner) or world and world:rank() or 0, parts = entry.pieces,
        tp = mesh.rank "tp", pp = mesh.rank "pp" }
    end
  end
  for _, text in ipairs(agree.texts(world, encode(said, "the list of tensors"))) do
    for _, row in ipairs(json.decode(text)) do
      local entry = by_name[row.name]
      if not entry then
        entry = { name = row.name, dtype = row.dtype, shape = row.shape, owner = row.owner, tp = row.tp, pp = row.pp,
          tensor = here[row.name], parts = row.parts and {} }
        by_name[row.name], entries[#entries + 1] = entry, entry
      end
      for _, part in ipairs(row.parts or {}) do
        part.owner, part.tp, part.pp = row.owner, row.tp, row.pp
        table.insert(entry.parts, part)
      end
    end
  end
  for _, entry in ipairs(entries) do
    if entry.parts then
      rectangles.check(entry.name, entry.shape, entry.parts, function(part) return "rank " .. part.owner end)
    end
  end
  return in_order(entries)
end

--- Returns Hugging Face's name of the widest floating-point dtype among the entries, because config.json has a single
--- dtype. Entries with the field `side` are skipped, because they are tensors of a packed weight.
---@param entries table[]
---@return string
function save.dtype_of(entries)
  local found, size
  for _, entry in ipairs(entries) do
    local counts = HF_DTYPE[entry.dtype] and not entry.side
    local nbytes = counts and tonumber(C.ps_dtype_size(native.dtype_code(entry.dtype)))
    if nbytes and nbytes > (size or 0) then found, size = entry.dtype, nbytes end
  end
  return HF_DTYPE[found] or "float32"
end

-- Allocates one buffer per dtype for the entries of other ranks. A buffer has room for one piece, or for the largest
-- entry of its dtype if this entry is smaller than a piece. `slabs` are the buffers in which rank 0 assembles parts.
local function buffers_for(entries)
  local numel, buffers, slabs = {}, {}, {}
  for _, entry in ipairs(entries) do
    if entry.parts or entry.owner > 0 then
      numel[entry.dtype] = math.min(pieces.elements(entry.dtype), math.max(numel[entry.dtype] or 1, entry.numel))
    end
    if entry.parts then slabs[entry.dtype] = true end
  end
  for dtype, n in pairs(numel) do
    buffers[dtype] = create.empty({ n }, { dtype = dtype, device = "cpu" })
    slabs[dtype] = slabs[dtype] and create.empty({ n }, { dtype = dtype, device = "cpu" }) or nil
  end
  return { of = buffers, slabs = slabs }
end

local function tensor_of(entry)
  if type(entry.tensor) == "function" then return entry.tensor() end
  return entry.tensor
end

-- Writes all entries on rank 0. The other ranks send their entries in pieces. Every piece is sent and received even
-- after an error, so that no rank waits forever. Returns this rank's first error.
local function exchange(entries, buffers, group, writer)
  local rank, largest, problem = group and group:rank() or 0, 1, nil
  for _, entry in ipairs(entries) do
    largest = math.max(largest, entry.numel * tonumber(C.ps_dtype_size(native.dtype_code(entry.dtype))))
  end
  local bytes = pieces.buffer(largest)
  local function try(fn, ...)
    if problem then return end
    local ok, why = pcall(fn, ...)
    if not ok then problem = why end
  end
  local function append(entry, tensor)
    local function put(t)
      pieces.read(t, bytes, function(data, nbytes) writer:append(entry.name, data, nbytes) end)
    end
    try(scope.scope, function()
      if type(tensor) == "function" then tensor = tensor(put) end
      if tensor ~= nil then put(tensor) end
    end)
  end
  local function copy(to, from) try(function() scope.no_grad(to.copy_, to, from():to("cpu")) end) end
  -- Copies elements from the owner to rank 0. On the owner, from() returns the elements. Rank 0 copies them into `to`.
  local function bring(owner, buffer, from, to)
    if owner == 0 and rank == 0 then return copy(to, from) end
    if rank == owner then
      copy(buffer, from)
      group:send(buffer, 0)
    elseif rank == 0 then
      group:recv(buffer, owner)
      if not rawequal(to, buffer) then copy(to, function() return buffer end) end
    end
  end
  local function pass(entry)
    local buffer, flat = buffers.of[entry.dtype], nil
    if rank > 0 then try(function() flat = tensor_of(entry):detach():contiguous():reshape(-1) end) end
    for first = 0, entry.numel - 1, buffer:numel() do
      local n = math.min(buffer:numel(), entry.numel - first)
      local part = buffer:narrow(0, 0, n)
      bring(entry.owner, part, function() return flat:narrow(0, first, n) end, part)
      if rank == 0 then append(entry, part) end
    end
  end
  local function put_together(entry)
    local buffer, slab = buffers.of[entry.dtype], buffers.slabs[entry.dtype]
    local own
    try(function() own = tensor_of(entry) end)
    rectangles.each(entry.shape, buffer:numel(), function(offset, shape)
      scope.scope(function()
        local whole = slab:narrow(0, 0, rectangles.numel(shape)):reshape(shape)
        for _, part in ipairs(entry.parts) do
          local common = rectangles.common({ offset = offset, shape = shape }, part)
          if common and (rank == 0 or rank == part.owner) then
            bring(part.owner, buffer:narrow(0, 0, rectangles.numel(common.shape)):reshape(common.shape), function()
              return rectangles.view(own:detach(), rectangles.moved(common.offset, part.offset, part.at),
                common.shape)
            end, rectangles.view(whole, rectangles.moved(common.offset, offset), common.shape))
          end
        end
        if rank == 0 then append(entry, whole) end
      end)
    end)
  end
  for _, entry in ipairs(entries) do
    if entry.parts then scope.scope(put_together, entry)
    elseif entry.owner == 0 and rank == 0 then append(entry, entry.tensor)
    elseif entry.owner > 0 and (rank == 0 or rank == entry.owner) then scope.scope(pass, entry) end
  end
  return problem
end

--- Writes one file on the group's rank 0. All ranks of the group call this function. An error on one rank is raised on
--- all ranks, and no file remains.
---@param path string
---@param entries table[] some or all results of save.entries or save.whole
---@param open fun(path: string, entries: table[]): table returns a writer with append(name, data, nbytes), commit() and
--- close()
---@param group? ps.Group
function save.write(path, entries, open, group)
  local rank, writer, buffers = group and group:rank() or 0, nil, nil
  local ok, problem = pcall(scope.scope, function()
    agree.run(group, function()
      buffers = buffers_for(entries)
      if rank == 0 then writer = open(path, entries) end
    end)
    local why = exchange(entries, buffers, group, writer)
    agree.run(group, function() if why then error(why, 0) end end)
    agree.run(group, function() if rank == 0 then writer:commit() end end)
  end)
  if writer then writer:close() end
  if not ok then error(problem, 0) end
end

local UNITS = { B = 1, KB = 1e3, MB = 1e6, GB = 1e9, TB = 1e12, KiB = 2 ^ 10, MiB = 2 ^ 20, GiB = 2 ^ 30, TiB = 2 ^ 40 }
local LARGEST = 5e10  -- largest file in bytes; transformers 5 writes files of up to 50 GB

-- Converts a size in Hugging Face's form, such as 5000000, "5GB" or "200MiB", to a number of bytes.
local function nbytes_of(size)
  if size == nil then return LARGEST end
  local number, unit = size, "B"
  if type(size) == "string" then
    number, unit = size:match("^([%d.]+) *(%a+)$")
    number = tonumber(number)
  end
  if not number or not UNITS[unit] or number * UNITS[unit] < 1 then
    error(("save_pretrained: max_shard_size is %s; it must be a number of bytes, or a size such as \"5GB\""):format(
      tostring(size)))
  end
  return number * UNITS[unit]
end

-- Distributes entries over files of at most `most` bytes each. Each file has at least one tensor.
local function split(entries, most)
  local files, filled = { {} }, 0
  for _, entry in ipairs(entries) do
    local nbytes = entry.numel * tonumber(C.ps_dtype_size(native.dtype_code(entry.dtype)))
    if filled > 0 and filled + nbytes > most then
      files[#files + 1], filled = {}, 0
    end
    table.insert(files[#files], entry)
    filled = filled + nbytes
  end
  return files
end

-- Returns the index for a model in several files: { metadata, weight_map }.
local function index_of(files, names)
  local index = { metadata = { total_size = 0 }, weight_map = {} }
  for i, list in ipairs(files) do
    for _, entry in ipairs(list) do
      index.weight_map[entry.name] = names[i]
      local nbytes = entry.numel * tonumber(C.ps_dtype_size(native.dtype_code(entry.dtype)))
      index.metadata.total_size = index.metadata.total_size + nbytes
    end
  end
  return index
end

-- Patterns for the names of weight files and their indices.
local WEIGHTS = { "^model%.safetensors$", "^model%.safetensors%.index%.json$", "^model%-%d+%-of%-%d+%.safetensors$",
  "^pytorch_model%.bin$", "^pytorch_model%.bin%.index%.json$", "^pytorch_model%-%d+%-of%-%d+%.bin$",
  "^pytorch_model_tp_%d+_pp_%d+%.bin$", "^placement%.json$", "^adapter_config%.json$",
  "^adapter_model%.safetensors$", "^adapter_model%.bin$" }

-- Removes the weight files and the adapter that an earlier save left in the folder. Otherwise a reader might load these
-- files, because it follows an older index, prefers their format, or takes the folder for an adapter's. Indices and
-- adapter_config.json are removed first, because they refer to the other files.
local function remove_older(path, names)
  local now, indices, others = {}, {}, {}
  for _, name in ipairs(names) do now[name] = true end
  for name in lfs.dir(path) do
    for _, pattern in ipairs(now[name] and {} or WEIGHTS) do
      if name:match(pattern) then table.insert(name:match "json$" and indices or others, name) end
    end
  end
  for _, list in ipairs { indices, others } do
    for _, name in ipairs(list) do
      local ok, why = os.remove(path .. "/" .. name)
      if not ok then
        error(("save_pretrained: the older weights in the folder cannot be removed: %s; remove them, since a "
          .. "reader may "
          .. "load them for this model"):format(why), 0)
      end
    end
  end
end

--- Creates a safetensors file. Returns a writer for save.write.
---@param path string
---@param entries table[]
---@return table writer
function save.safetensors_file(path, entries) return safetensors.writer(path, entries, { format = "pt" }) end

local INDEX = "model.safetensors.index.json"

-- Writes the weights and config.json. If `replace` is set, the companion files of the folder's older model are removed
-- before the new config.json is in the folder, so that no reader combines them with the new weights.
local function write_all(path, files, config, group, replace)
  local names = {}
  for i in ipairs(files) do
    names[i] = #files == 1 and "model.safetensors" or ("model-%05d-of-%05d.safetensors"):format(i, #files)
  end
  local kept = copied(names)
  if #files > 1 then kept[#kept + 1] = INDEX end
  batch.write(path, group, function(made)
    for i, list in ipairs(files) do save.write(made:file(names[i]), list, save.safetensors_file, group) end
    local index = #files > 1 and encode(index_of(files, names), "the index of the weights")
    return { [INDEX] = index or nil, ["config.json"] = config }
  end, function()
    remove_older(path, kept)
    if replace then folder.remove_companions(path) end
  end)
end

--- Writes a folder from a single process: weights, config.json, and companion files that are copied from another
--- folder. The copied files replace the companion files of an older model.
---@param path string
---@param entries table[] entries in the form of save.entries, where `tensor` can be a function that creates the tensor
---@param config_of fun(dtype: string): string returns the text of config.json for a weight dtype
---@param more {max_shard_size?: integer|string, source?: string} the options of save.run
function save.folder(path, entries, config_of, more)
  local most = nbytes_of(more.max_shard_size)
  make_folder((path:gsub("(.)/+$", "%1")))
  table.sort(entries, function(a, b) return a.name < b.name end)
  write_all(path, split(entries, most), config_of(save.dtype_of(entries)), nil, more.source ~= nil)
  if more.source then folder.copy_companions(more.source, path) end
end

--- Returns the group of ranks that share a model. Returns nil if each rank has the whole model.
---@param model ps.nn.Module|ps.Engine
---@return ps.Group?
function save.group_of(model)
  local engine = handle.of(model)
  return (sharded.of(model) or engine and (engine.ranks or engine.stages)) and mesh.group "world" or nil
end

--- Raises an error if the engine that holds the model is inside a step.
---@param model ps.nn.Module|ps.Engine
---@param call string the called function, for the message
function save.check_between_steps(model, call)
  local engine = handle.of(model)
  if engine and engine.micro > 0 and not engine.torn then
    error(call .. " writes the state between steps: call it after optimizer:step(), or optimizer:zero_grad()")
  end
end

local told = {}                                            -- folders for which tell_kept has printed a note

-- Prints a note once per folder if companion files in the folder are not those of the written model.
local function tell_kept(path, source, names)
  if not names[1] or told[path] then return end
  told[path] = true
  io.stderr:write(("psluajit: save_pretrained: the folder %s keeps its own %s, different from %s; if they belong to "
    .. "another model, remove them and save again\n"):format(path, table.concat(names, ", "), source))
end

--- Writes a model's weights and config.json to a folder, in the format that Hugging Face and from_pretrained read. With
--- an engine, only rank 0 writes. It writes the fp32 values (masters) piece by piece. All ranks call this function
--- between two steps. An error on one rank is raised on all ranks.
---@param model ps.nn.Module|ps.Engine
---@param path string
---@param config_of fun(dtype: string): string returns the text of config.json for a weight dtype
---@param more? {max_shard_size?: integer|string, source?: string, entries?: fun(entries: table[]): table[]}
--- max_shard_size: the largest file size (default 50 GB); a tensor is not split. source: the folder from which the
--- model was loaded; its tokenizer and generation settings are copied. entries: changes the list of tensors to write.
--- In this list, `tensor` can be a function, which is called when the tensor is written. The function either returns
--- the tensor, or passes the tensor's parts in order to the function that is its argument.
function save.run(model, path, config_of, more)
  more = more or {}
  caller.typed(path, "string", "save_pretrained: the folder")
  local most = nbytes_of(more.max_shard_size)
  save.check_between_steps(model, "save_pretrained")
  local group = save.group_of(model)
  local rank = group and group:rank() or 0
  agree.same(group, "save_pretrained", { { "folder", path }, { "max_shard_size", most } })
  agree.run(group, function()
    if rank == 0 then make_folder((path:gsub("(.)/+$", "%1"))) end
  end)
  agree.run(group, function() return save.entries(model) end)          -- raises one rank's error on all ranks
  local entries = save.whole(model)
  if more.entries then entries = more.entries(entries) end
  local replace = more.source ~= nil and replaced.take(path)
  write_all(path, split(entries, most), config_of(save.dtype_of(entries)), group, replace)
  agree.run(group, function()
    if rank == 0 and more.source then tell_kept(path, more.source, folder.copy_companions(more.source, path)) end
  end)
end

return save
