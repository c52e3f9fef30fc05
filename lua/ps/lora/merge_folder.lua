-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a model as a folder or a GGUF file, one tensor at a time. An adapter can be merged into the model's weights.
-- The needed memory does not depend on the size of the model. Memory is needed for two fp32 copies of the largest
-- adapted tensor, and for some buffers.
local create = require "ps.tensor.create"
local caller = require "ps.core.caller"
local file_id = require "ps.core.file_id"
local rectangles = require "ps.core.rectangles"
local resolved = require "ps.core.resolved"
local registry = require "ps.nn.registry"
local scope = require "ps.core.scope"
local files_of = require "ps.pretrained.files"
local folder = require "ps.pretrained.folder"
local gguf_save = require "ps.pretrained.gguf_save"
local io_gguf = require "ps.io.gguf"
local layers = require "ps.lora.layers"
local lora_files = require "ps.lora.files"
local pieces = require "ps.io.pieces"
local pretrained = require "ps.pretrained"
local save = require "ps.pretrained.save"
local weights = require "ps.pretrained.weights"
local lfs = require "lfs"
local error = caller.error

local merge = {}

-- Returns two functions that read a tensor of the base model. The first reads the whole tensor, and the second reads it
-- in parts.
local function readers(state, name)
  local shape, dtype = state:shape(name), state:dtype(name)
  local where = { dtype = dtype, device = "cpu" }
  return function()
    local made = create.empty(shape, where)
    state:read_into(name, made)
    return made
  end, function(put)
    scope.scope(function()
      local part
      rectangles.each(shape, pieces.elements(dtype), function(offset, size)
        if not part or not rectangles.same(part:shape(), size) then part = create.empty(size, where) end
        state:read_part(name, part, offset)
        put(part)
      end)
    end)
  end
end

-- Returns the adapter's tensors of a layer, as a list of {module, key, name}. module[key] is the tensor, and `name` is
-- the tensor's name in the adapter's file.
local function places(entry)
  local layer, list = entry.module, {}
  local function put(key, suffix)
    if not registry.kind(layer, key) then return end
    local holder = layer[key]
    if entry.kind.table and suffix == "" and key ~= "lora_magnitude_vector" then
      list[#list + 1] = { holder, "default", entry.name .. "." .. key }
    else
      list[#list + 1] = { holder.default, "weight", entry.name .. "." .. key .. suffix }
    end
  end
  put("lora_A", ".weight")
  put("lora_B", ".weight")
  put("lora_embedding_A", "")
  put("lora_embedding_B", "")
  put("lora_magnitude_vector", "")
  return list
end

-- Returns a function that computes a layer's weight with the adapter. The function is called when the weight is
-- written. The layer's tensors have data only during this call.
local function merged(entry, read, trained)
  return function()
    local layer, meta, list = entry.module, entry.module.weight, places(entry)
    local weight = read()
    for _, at in ipairs(list) do
      at[4] = at[1][at[2]]
      registry.put(at[1], at[2], trained[at[3]]())
    end
    registry.put(layer, "weight", weight)
    local ok, problem = pcall(layers.merge, layer)
    layer.lora_.merged, layer.lora_.factor = nil, nil
    registry.put(layer, "weight", meta)
    for _, at in ipairs(list) do registry.put(at[1], at[2], at[4]) end
    if not ok then error(problem, 0) end
    return weight
  end
end

-- If a head is tied to an embedding with an adapter, adds a separate weight for the head. This weight does not include
-- the adapter.
local function untie(model, adapters, entries, read_of)
  local tied = adapters:tied_table()
  if not tied then return end
  for head, own in pairs(model.ties or {}) do
    if own == tied .. ".weight" then
      for _, entry in ipairs(entries) do
        if entry.name == own then
          entries[#entries + 1] = { name = head, shape = entry.shape, dtype = entry.dtype, numel = entry.numel,
            owner = 0, tensor = read_of[own] }
        end
        if head:find "decoder%.weight$" and entry.name == head:gsub("decoder%.weight$", "bias") then
          entries[#entries + 1] = { name = (head:gsub("weight$", "bias")), shape = entry.shape, dtype = entry.dtype,
            numel = entry.numel, owner = 0, tensor = read_of[entry.name] }
        end
      end
    end
  end
  model.config.tie_word_embeddings = false
end

-- Returns the entries to write. Also returns a table that maps the name of each tensor of the base model to a function
-- that reads the tensor.
local function entries_of(adapters, state, trained)
  local layer_of, entries, read_of = {}, {}, {}
  for _, entry in ipairs(adapters and adapters.layers or {}) do layer_of[entry.name .. ".weight"] = entry end
  for _, name in ipairs(state.names()) do
    local dtype, other = state:dtype(name)
    if not dtype then error(("%s has type %s, which is not supported"):format(name, tostring(other)), 0) end
    local whole, parts = readers(state, name)
    read_of[name] = parts
    local tensor = trained[name] or parts
    if layer_of[name] then tensor = merged(layer_of[name], trained[name] or whole, trained) end
    entries[#entries + 1] = { name = name, shape = state:shape(name), dtype = dtype, owner = 0, tensor = tensor,
      numel = rectangles.numel(state:shape(name)) }
  end
  for name, tensor in pairs(trained) do                    -- for example, a head that the base files lack
    if not state:has(name) and not name:find "%.lora_" then
      local made = tensor()
      entries[#entries + 1] = { name = name, shape = made:shape(), dtype = made:dtype(), owner = 0, tensor = tensor,
        numel = made:numel() }
    end
  end
  table.sort(entries, function(a, b) return a.name < b.name end)
  return entries, read_of
end

-- Raises an error if the files lack a tensor of the model, or if a tensor's shape in the files differs from its shape
-- in the model.
local function check_whole(model, state, base)
  for name, tensor in pairs(model:state_dict { tied = false }) do
    local spare = false
    for _, pattern in ipairs(model.spare or {}) do
      spare = spare or (name:match("^" .. model.base .. "%.(.*)$") or name):find(pattern) ~= nil
    end
    if not state:has(name) and not spare then error(("%s has no tensor '%s'"):format(base, name), 0) end
    if state:has(name) and not rectangles.same(state:shape(name), tensor:shape()) then
      error(("%s: tensor '%s' has shape [%s], but its settings require [%s]"):format(base, name,
        rectangles.text(state:shape(name)), rectangles.text(tensor:shape())), 0)
    end
  end
end

-- Calls fn(model, entries), where the model is a base model without data, and `entries` are the entries to write. Each
-- entry is read when it is written. `adapter` is the folder or GGUF file of the adapter that is merged into the
-- entries, or nil.
local function stream(base, adapter, options, fn)
  local model = pretrained.from_config(base, { task = options.task, device = "meta", dtype = "fp32" })
  local whole, adapters, weights_file, trained = model:state_dict { tied = false }, nil, nil, {}
  if adapter then adapters, weights_file, trained = lora_files.open(model, adapter, options.other_base, base) end
  local ok, problem = pcall(function()
    local files = files_of.open(folder.files(base))
    local fine, why = pcall(scope.no_grad, scope.scope, function()
      local known = {}
      for name in pairs(whole) do known[name] = true end
      local own_name = weights.namer(model)
      local state = files:state(function(name)
        local own = own_name(name)
        return own and known[own] and own or nil
      end)
      local entries, read_of = entries_of(adapters, state, trained)
      if adapters then untie(model, adapters, entries, read_of) end
      fn(model, entries, state)
    end)
    files:close()
    if not fine then error(why, 0) end
  end)
  if weights_file then weights_file:close() end
  if not ok then error(problem, 0) end
end

-- Returns a link in the folder `out` that leads to a file of an input. Writing the output would replace this file.
local function link_to(out, inputs)
  local owner = {}
  for _, from in ipairs(inputs) do
    if lfs.attributes(from, "mode") == "directory" then
      for name in lfs.dir(from) do owner[file_id(from .. "/" .. name) or ""] = from .. "/" .. name end
    else owner[file_id(from) or ""] = from end
  end
  if lfs.attributes(out, "mode") ~= "directory" then return nil end
  for name in lfs.dir(out) do
    local path = out .. "/" .. name
    local is_link = name ~= "." and name ~= ".." and lfs.symlinkattributes(path, "mode") == "link"
    local id = is_link and file_id(path)
    if id and owner[id] then return path, owner[id] end
  end
end

-- Raises an error if the output is one of the inputs, or has links to files of an input, because it would replace an
-- input that is still being read.
local function check_apart(call, out, inputs)
  local link, file = link_to(out, inputs)
  if link then
    error(("%s: %s is a link to %s, which would be replaced while it is read; choose another folder or name to write")
      :format(call, link, file))
  end
  for _, from in ipairs(inputs) do
    local same = file_id(out) and file_id(out) == file_id(from)
    if same or resolved(out) == resolved(from) then
      error(("%s: %s would be replaced while it is read; choose another folder or name to write"):format(call, from))
    end
  end
end

local function write_folder(out, base, options)
  return function(model, entries)
    save.folder(out, entries, function(dtype)
      return model.family.settings:to_file(model.config, model.class_name, dtype)
    end, { max_shard_size = options.max_shard_size, source = base })
  end
end

local OPTIONS = { max_shard_size = "whole|string", other_base = "boolean", task = "string" }

--- Merges an adapter into a base model, and writes the result to a folder. Tensors keep the base model's dtypes.
---@param base string the folder or GGUF file of the base model
---@param adapter string the folder or GGUF file of the adapter
---@param out string the folder to write
---@param options? {max_shard_size?: integer|string, other_base?: boolean, task?: string}
function merge.folder(base, adapter, out, options)
  local given = caller.options(options, "lora.merge_folder", OPTIONS)
  for what, path in pairs { base = base, adapter = adapter, out = out } do
    caller.typed(path, "string", "lora.merge_folder: the folder " .. what)
  end
  base = folder.find(base)
  check_apart("lora.merge_folder", out, { base, adapter })
  stream(base, adapter, given, write_folder(out, base, given))
end

local CONVERT = { type = "string", name = "string", pre = "string", certified = "boolean", base = "string",
  adapter = "string", other_base = "boolean", task = "string" }

local function is_adapter(path)
  if folder.is_adapter(path) then return true end
  return io_gguf.is_path(path) and io_gguf.with(path, function(file)
    return file:meta "general.type" == "adapter"
  end)
end

--- Converts a model from a Hugging Face folder or a GGUF file to a folder or a GGUF file. At most one tensor is in
--- memory at a time. Can also convert an adapter from a PEFT folder to a GGUF file, or back.
---@param from string the folder or file of a model, or of an adapter
---@param out string NAME.gguf, or a folder
---@param options? {type?: string, name?: string, pre?: string, certified?: boolean, base?: string, adapter?: string,
--- other_base?: boolean, task?: string} type, name, pre, certified: options of save_gguf, if `out` is a GGUF file.
--- base: the folder or file of the base model, if `from` is an adapter. adapter: the folder or file of an adapter to
--- merge into the model.
function merge.convert(from, out, options)
  local given = caller.options(options, "gguf convert", CONVERT)
  if is_adapter(from) then
    if given.adapter or given.pre or given.certified then
      error(("gguf convert: %s is an adapter; pass --base, and --type and --name if needed"):format(from), 0)
    end
    local base = given.base or folder.is_adapter(from) and require("ps.lora.config").base_of(from)
    if not base then error(("gguf convert: %s is an adapter; pass its base model, --base DIR|FILE"):format(from), 0) end
    base = folder.find(base)
    check_apart("gguf convert", out, { from, base })
    local model = pretrained.from_config(base, { task = given.task, device = "meta", dtype = "fp32" })
    local _, file, trained, dtypes = lora_files.open(model, from, given.other_base, base)
    local ok, problem = pcall(scope.no_grad, scope.scope, lora_files.convert, model, trained, dtypes, out, given)
    file:close()
    if not ok then error(problem, 0) end
    return
  end
  if given.base then error(("gguf convert: --base is for an adapter, and %s is a model"):format(from), 0) end
  from = folder.find(from)
  check_apart("gguf convert", out, { from, given.adapter })
  stream(from, given.adapter, given, function(model, entries, state)
    if not given.adapter then check_whole(model, state, from) end
    if not io_gguf.is_path(out) then return write_folder(out, from, {})(model, entries) end
    gguf_save.write(model, entries, out, { type = given.type, name = given.name, pre = given.pre,
      certified = given.certified })
  end)
end

return merge
