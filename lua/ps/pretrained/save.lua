-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a model's weights as Hugging Face reads them: one safetensors file, or several and their index. Of an engine
-- these are the fp32 values (masters), which rank 0 writes alone.
local ps = require "ps"
local caller = require "ps.caller"
local agree = require "ps.dist.agree"
local encode = require "ps.checkpoints.encode"
local make_folder = require("ps.checkpoints.folder").make
local folder = require "ps.pretrained.folder"
local lfs = require "lfs"
local mesh = require "ps.mesh"
local pieces = require "ps.pieces"
local safetensors = require "ps.safetensors"
local error = caller.error
local C = ps.C

local save = {}

local HALF = { bf16 = true, fp16 = true }
local HF_DTYPE = { fp32 = "float32", bf16 = "bfloat16", fp16 = "float16", fp64 = "float64" }

local function in_order(entries)
  for _, entry in ipairs(entries) do
    entry.numel = 1
    for _, size in ipairs(entry.shape) do entry.numel = entry.numel * size end
  end
  table.sort(entries, function(a, b) return a.name < b.name end)
  return entries
end

--- What the ranks that train the same parameters have to write, in order of name: {name, shape, dtype, numel, tensor =
--- where it is here, owner = the rank that has it, among those}. Of a model cut into stages: this one's.
---@param model ps.nn.Module|ps.Engine
---@return table[]
function save.entries(model)
  local here, entries, rows = model:state_dict(), {}, {}
  local stages = model.is_engine and model.stages or nil
  local function saves(name) return not stages or stages:saves(name) end
  local sharded = model.is_engine and model.ranks and model.zero_stage > 0
  if not sharded then
    for name, tensor in pairs(here) do
      if saves(name) then
        entries[#entries + 1] = { name = name, shape = tensor:shape(), dtype = tensor:dtype(), tensor = tensor,
          owner = 0 }
      end
    end
  else
    local address = require("ps.nn.module").address
    for _, list in ipairs { "list", "frozen" } do
      for _, row in ipairs(model.built[list]) do rows[address(row.param)] = { row.owner, list == "list" } end
    end
    for name, tensor in pairs(model.module:state_dict()) do
      local row, dtype = rows[address(tensor)] or { 0, false }, tensor:dtype()
      if saves(name) then
        entries[#entries + 1] = { name = name, shape = tensor:shape(), tensor = here[name], owner = row[1] or 0,
          dtype = row[2] and HALF[dtype] and "fp32" or dtype } -- trained ones have a master
      end
    end
  end
  return in_order(entries)
end

--- The same of all stages, with owners among all ranks. All ranks call it.
---@param model ps.nn.Module|ps.Engine
---@return table[]
function save.whole(model)
  local mine = save.entries(model)
  if not (model.is_engine and model.stages) then return mine end
  local peers, said, here, entries = mesh.group "dp", {}, {}, {}
  local world = mesh.group "world"
  for i, entry in ipairs(mine) do
    local owner = peers and peers:world_rank(entry.owner) or world:rank()
    said[i], here[entry.name] = ("%d %s %s"):format(owner, entry.dtype, entry.name), entry.tensor
  end
  local tensors = model.module:state_dict()                  -- those of other stages have their shapes
  local texts = agree.texts(world, (peers and peers:rank() or 0) == 0 and table.concat(said, "\n") or "")
  for _, text in ipairs(texts) do
    for owner, dtype, name in text:gmatch "(%d+) (%S+) ([^\n]+)" do
      entries[#entries + 1] = { name = name, shape = tensors[name]:shape(), dtype = dtype, owner = tonumber(owner),
        tensor = here[name] }
    end
  end
  return in_order(entries)
end

--- The widest type of floats, which is what config.json's one word for all of them says.
---@param entries table[]
---@return string
function save.dtype_of(entries)
  local found, size
  for _, entry in ipairs(entries) do
    local nbytes = HF_DTYPE[entry.dtype] and tonumber(C.ps_dtype_size(ps.dtype_code(entry.dtype)))
    if nbytes and nbytes > (size or 0) then found, size = entry.dtype, nbytes end
  end
  return HF_DTYPE[found] or "float32"
end

-- Tensors through which other ranks' entries come, by type: as many elements as a piece has, or the largest of them.
local function buffers_for(entries)
  local numel, buffers = {}, {}
  for _, entry in ipairs(entries) do
    if entry.owner > 0 then
      numel[entry.dtype] = math.min(pieces.elements(entry.dtype), math.max(numel[entry.dtype] or 1, entry.numel))
    end
  end
  for dtype, n in pairs(numel) do buffers[dtype] = ps.empty({ n }, { dtype = dtype, device = "cpu" }) end
  return buffers
end

-- Rank 0 writes all entries; from other ranks they come by pieces. Every piece is sent and taken whatever went wrong
-- meanwhile, so that nobody waits for what does not come. Gives the first problem of this rank.
local function exchange(entries, buffers, group, writer)
  local rank, largest, problem = group and group:rank() or 0, 1, nil
  for _, entry in ipairs(entries) do
    largest = math.max(largest, entry.numel * tonumber(C.ps_dtype_size(ps.dtype_code(entry.dtype))))
  end
  local bytes = pieces.buffer(largest)
  local function try(fn, ...)
    if problem then return end
    local ok, why = pcall(fn, ...)
    if not ok then problem = why end
  end
  local function append(entry, tensor)
    try(pieces.read, tensor, bytes, function(data, nbytes) writer:append(entry.name, data, nbytes) end)
  end
  local function pass(entry)
    local buffer, flat = buffers[entry.dtype], nil
    if rank > 0 then try(function() flat = entry.tensor:detach():contiguous():reshape(-1) end) end
    for first = 0, entry.numel - 1, buffer:numel() do
      local n = math.min(buffer:numel(), entry.numel - first)
      local part = buffer:narrow(0, 0, n)
      if rank > 0 then
        try(function() ps.no_grad(part.copy_, part, flat:narrow(0, first, n)) end)
        group:send(part, 0)
      else
        group:recv(part, entry.owner)
        append(entry, part)
      end
    end
  end
  for _, entry in ipairs(entries) do
    if entry.owner == 0 and rank == 0 then append(entry, entry.tensor)
    elseif entry.owner > 0 and (rank == 0 or rank == entry.owner) then ps.scope(pass, entry) end
  end
  return problem
end

--- Writes one file, by the group's rank 0. All its ranks call it; an error of one is an error of all, and no file.
---@param path string
---@param entries table[] what save.entries or save.whole gave, or some of it
---@param open fun(path: string, entries: table[]): table writer with append(name, data, nbytes), commit() and close()
---@param group? ps.Group
function save.write(path, entries, open, group)
  local rank, writer, buffers = group and group:rank() or 0, nil, nil
  local ok, problem = pcall(ps.scope, function()
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
local LARGEST = 5e10                                       -- bytes; transformers 5 writes files of up to 50 GB

-- Bytes of a size as Hugging Face has them: 5000000, "5GB", "200MiB".
local function nbytes_of(size)
  if size == nil then return LARGEST end
  local number, unit = size, "B"
  if type(size) == "string" then
    number, unit = size:match("^([%d.]+) *(%a+)$")
    number = tonumber(number)
  end
  if not number or not UNITS[unit] or number * UNITS[unit] < 1 then
    error(("save_pretrained: max_shard_size is %s; it is a number of bytes, or like \"5GB\""):format(tostring(size)))
  end
  return number * UNITS[unit]
end

-- Entries in files of up to so many bytes, one tensor at least in each.
local function split(entries, most)
  local files, filled = { {} }, 0
  for _, entry in ipairs(entries) do
    local nbytes = entry.numel * tonumber(C.ps_dtype_size(ps.dtype_code(entry.dtype)))
    if filled > 0 and filled + nbytes > most then
      files[#files + 1], filled = {}, 0
    end
    table.insert(files[#files], entry)
    filled = filled + nbytes
  end
  return files
end

-- What names the files of a model in several: { metadata, weight_map }.
local function index_of(files, names)
  local index = { metadata = { total_size = 0 }, weight_map = {} }
  for i, list in ipairs(files) do
    for _, entry in ipairs(list) do
      index.weight_map[entry.name] = names[i]
      local nbytes = entry.numel * tonumber(C.ps_dtype_size(ps.dtype_code(entry.dtype)))
      index.metadata.total_size = index.metadata.total_size + nbytes
    end
  end
  return index
end

local function write_text(path, text) ps.check(C.ps_file_write_atomic(path, text, #text)) end

-- Once the index is there, what an earlier save left would be read before it, or is nobody's.
local function remove_older(path, names)
  local now = {}
  for _, name in ipairs(names) do now[name] = true end
  for name in lfs.dir(path) do
    local is_shard = name:match("^model%-%d+%-of%-%d+%.safetensors$")
    if name == "model.safetensors" or is_shard and not now[name] then os.remove(path .. "/" .. name) end
  end
end

local function safetensors_file(path, entries) return safetensors.writer(path, entries, { format = "pt" }) end

local function write_all(path, files, group)
  local rank = group and group:rank() or 0
  if #files == 1 then return save.write(path .. "/model.safetensors", files[1], safetensors_file, group) end
  local names = {}
  for i, list in ipairs(files) do
    names[i] = ("model-%05d-of-%05d.safetensors"):format(i, #files)
    save.write(path .. "/" .. names[i], list, safetensors_file, group)
  end
  agree.run(group, function()
    if rank > 0 then return end
    write_text(path .. "/model.safetensors.index.json", encode(index_of(files, names), "the index of the weights"))
    remove_older(path, names)
  end)
end

--- The ranks that have a model together; nil: each has all of it.
---@param model ps.nn.Module|ps.Engine
---@return ps.Group?
function save.group_of(model)
  return model.is_engine and (model.ranks or model.stages) and mesh.group "world" or nil
end

--- Writes a model's weights and config.json to a folder, as Hugging Face and from_pretrained read them. Of an engine
--- these are the fp32 values (masters), which rank 0 writes alone, a piece at a time; all ranks call it, between two
--- steps, and an error of one is an error of all.
---@param model ps.nn.Module|ps.Engine
---@param path string
---@param config_of fun(dtype: string): table config.json's fields, given the type of the weights
---@param more? {max_shard_size?: integer|string, source?: string} bytes of a file at most (a tensor is not cut),
---  default 50 GB; source: the folder that the model came from, whose tokenizer and generation settings go along
function save.run(model, path, config_of, more)
  more = more or {}
  caller.typed(path, "string", "save_pretrained: the folder")
  local most = nbytes_of(more.max_shard_size)
  if model.is_engine and model.micro > 0 and not model.torn then
    error("save_pretrained writes the state between steps: call it after optimizer:step(), or optimizer:zero_grad()")
  end
  local group = save.group_of(model)
  local rank = group and group:rank() or 0
  agree.same(group, "save_pretrained", { { "folder", path }, { "max_shard_size", most } })
  agree.run(group, function()
    if rank == 0 then make_folder((path:gsub("(.)/+$", "%1"))) end
  end)
  local entries = agree.run(group, function() return save.entries(model) end)
  if model.is_engine and model.stages then entries = save.whole(model) end
  write_all(path, split(entries, most), group)
  agree.run(group, function()
    if rank > 0 then return end
    write_text(path .. "/config.json", encode(config_of(save.dtype_of(entries)), "config.json"))
    if more.source then folder.copy_companions(more.source, path) end
  end)
end

return save
