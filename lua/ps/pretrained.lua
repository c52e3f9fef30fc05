-- SPDX-License-Identifier: BSD-3-Clause
-- Folders as Hugging Face's save_pretrained writes them: config.json and weights. What a model's own file needs for its
-- from_pretrained and save_pretrained.
local ps = require "ps"
local caller = require "ps.caller"
local agree = require "ps.dist.agree"
local encode = require "ps.checkpoints.encode"
local folder = require "ps.checkpoints.folder"
local json = require "cjson"
local lfs = require "lfs"
local pieces = require "ps.pieces"
local safetensors = require "ps.safetensors"
local tree = require "ps.merge.tree"
local error = caller.error
local C = ps.C

local pretrained = {}

-- -- reading --------------------------------------------------------------------------------------------------------
--- A JSON file that holds an object.
---@param path string
---@return table
function pretrained.read_json(path)
  local file, why = io.open(path, "rb")
  if not file then error("no model file: " .. why) end
  local text = file:read("*a") or ""                       -- of a folder: nothing
  file:close()
  local ok, value = pcall(json.decode, text)
  if not ok or type(value) ~= "table" then
    error(("%s: %s"):format(path, ok and "it holds no JSON object" or tostring(value)))
  end
  return value
end

-- The files that an index names, each once, in order of name.
local function indexed(path, from)
  local map = pretrained.read_json(from).weight_map
  if type(map) ~= "table" then error(from .. ": it has no weight_map, which says what is in which file") end
  local paths, seen = {}, {}
  for name, file in pairs(map) do
    if type(file) ~= "string" then error(("%s: the weight_map names no file for '%s'"):format(from, tostring(name))) end
    if not seen[file] then paths[#paths + 1] = path .. "/" .. file end
    seen[file] = true
  end
  table.sort(paths)
  return paths
end

--- The files with a folder's weights, safetensors before PyTorch's, whole ones before indexed ones, as Hugging Face
--- looks for them.
---@param path string the folder
---@return string[]
function pretrained.files(path)
  for _, name in ipairs { "model.safetensors", "pytorch_model.bin" } do
    local whole, index = path .. "/" .. name, path .. "/" .. name .. ".index.json"
    if lfs.attributes(whole, "mode") then return { whole } end
    if lfs.attributes(index, "mode") then return indexed(path, index) end
  end
  return error(("no model file: %s has neither model.safetensors nor pytorch_model.bin, nor an index of either"):format(
    path))
end

--- Open files as one state for load_state_dict, their tensors under the names that own_name gives; nil leaves one out.
--- Close it when it was read.
---@param paths string[]
---@param own_name fun(name: string): string?
---@return table state
function pretrained.open(paths, own_name)
  local home, files, state = {}, {}, {}                    -- home: our name -> {file, its name}
  function state.close() for _, file in ipairs(files) do file:close() end end
  local ok, problem = pcall(function()
    for i, path in ipairs(paths) do
      files[i] = ps.load(path, { lazy = true })
      for _, name in ipairs(files[i]:names()) do
        local own = own_name(name)
        if own and home[own] then
          error(("tensor '%s' is in %s and in %s"):format(own, home[own][1].path, path), 0)
        end
        if own then home[own] = { files[i], name } end
      end
    end
  end)
  if not ok then
    state.close()
    error(problem, 0)
  end
  function state.names()
    local names = {}
    for name in pairs(home) do names[#names + 1] = name end
    return names
  end
  function state.has(_, name) return home[name] ~= nil end
  --- Gives a tensor another name, or leaves it out.
  function state.rename(_, from, to)
    local found = home[from]
    home[from] = nil
    if to then home[to] = found end
  end
  --- Whether two tensors have the same type, shape and bytes. A piece of them is in memory at a time.
  function state.same(_, a, b)
    local nodes, opened, same = {}, {}, nil
    local done, why = pcall(function()
      for i, name in ipairs { a, b } do
        opened[i] = tree.open(home[name][1].path)
        nodes[i] = opened[i].root.entries[tree.KIND.STRING .. ":" .. home[name][2]].value
      end
      same = tree.shape_text(nodes[1]) == tree.shape_text(nodes[2]) and tree.same(nodes[1], nodes[2], a)
    end)
    for _, file in ipairs(opened) do tree.close(file) end
    if not done then error(why, 0) end
    return same
  end
  for _, method in ipairs { "shape", "check", "read_into", "tensor" } do
    state[method] = function(_, name, ...)
      local file = home[name][1]
      return file[method](file, home[name][2], ...)
    end
  end
  return state
end

-- -- writing --------------------------------------------------------------------------------------------------------
local HALF = { bf16 = true, fp16 = true }
local HF_DTYPE = { fp32 = "float32", bf16 = "bfloat16", fp16 = "float16", fp64 = "float64" }

--- The type that Hugging Face's name means: "bfloat16", or "torch.bfloat16". Nil of what is none of ours.
---@param word any
---@return string?
function pretrained.own_dtype(word)
  for dtype, name in pairs(HF_DTYPE) do
    if name == word or "torch." .. name == word then return dtype end
  end
end

-- What is to be written, in order of name: {name, shape, dtype, numel, tensor = where it is here, owner = the rank that
-- has it}.
local function entries_of(model)
  local here, entries, rows = model:state_dict(), {}, {}
  local sharded = model.is_engine and model.ranks and model.zero_stage > 0
  if not sharded then
    for name, tensor in pairs(here) do
      entries[#entries + 1] = { name = name, shape = tensor:shape(), dtype = tensor:dtype(), tensor = tensor,
        owner = 0 }
    end
  else
    local address = require("ps.nn.module").address
    for _, list in ipairs { "list", "frozen" } do
      for _, row in ipairs(model.built[list]) do rows[address(row.param)] = { row.owner, list == "list" } end
    end
    for name, tensor in pairs(model.module:state_dict()) do
      local row, dtype = rows[address(tensor)] or { 0, false }, tensor:dtype()
      entries[#entries + 1] = { name = name, shape = tensor:shape(), tensor = here[name], owner = row[1] or 0,
        dtype = row[2] and HALF[dtype] and "fp32" or dtype } -- trained ones have a master
    end
  end
  for _, entry in ipairs(entries) do
    entry.numel = 1
    for _, size in ipairs(entry.shape) do entry.numel = entry.numel * size end
  end
  table.sort(entries, function(a, b) return a.name < b.name end)
  return entries
end

-- The widest type of floats, which is what config.json's one word for all of them says.
local function dtype_of(entries)
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

-- All ranks call it; an error of one is an error of all, and no file.
local function write(path, entries, metadata, group)
  local rank, writer, buffers = group and group:rank() or 0, nil, nil
  local ok, problem = pcall(ps.scope, function()
    agree.run(group, function()
      buffers = buffers_for(entries)
      if rank == 0 then writer = safetensors.writer(path, entries, metadata) end
    end)
    local why = exchange(entries, buffers, group, writer)
    agree.run(group, function() if why then error(why, 0) end end)
    agree.run(group, function() if rank == 0 then writer:commit() end end)
  end)
  if writer then writer:close() end
  if not ok then error(problem, 0) end
end

--- Writes a model's weights and config.json to a folder, as Hugging Face and from_pretrained read them. Of an engine
--- these are the fp32 values (masters), which rank 0 writes alone, a piece at a time; all ranks call it, between two
--- steps, and an error of one is an error of all.
---@param model ps.nn.Module|ps.Engine
---@param path string
---@param config_of fun(dtype: string): table config.json's fields, given the type of the weights
function pretrained.save(model, path, config_of)
  caller.typed(path, "string", "save_pretrained: the folder")
  if model.is_engine and model.micro > 0 and not model.torn then
    error("save_pretrained writes the state between steps: call it after optimizer:step(), or optimizer:zero_grad()")
  end
  local group = model.is_engine and model.ranks and model.ranks.world or nil
  local rank = group and group:rank() or 0
  agree.same(group, "save_pretrained", { { "folder", path } })
  local entries = agree.run(group, function()
    if rank == 0 then folder.make((path:gsub("(.)/+$", "%1"))) end
    return entries_of(model)
  end)
  write(path .. "/model.safetensors", entries, { format = "pt" }, group)
  agree.run(group, function()
    if rank > 0 then return end
    local text = encode(config_of(dtype_of(entries)), "config.json")
    ps.check(C.ps_file_write_atomic(path .. "/config.json", text, #text))
  end)
end

return pretrained
