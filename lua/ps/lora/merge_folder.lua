-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a model's folder with an adapter in its weights, one tensor at a time: the memory is that of two copies of the
-- largest adapted tensor in fp32 and some buffers, whatever the model's size.
local create = require "ps.tensor.create"
local caller = require "ps.core.caller"
local rectangles = require "ps.core.rectangles"
local registry = require "ps.nn.registry"
local scope = require "ps.core.scope"
local adapters_of = require "ps.lora.adapters"
local config = require "ps.lora.config"
local files_of = require "ps.pretrained.files"
local folder = require "ps.pretrained.folder"
local layers = require "ps.lora.layers"
local lora_files = require "ps.lora.files"
local pieces = require "ps.io.pieces"
local pretrained = require "ps.pretrained"
local save = require "ps.pretrained.save"
local weights = require "ps.pretrained.weights"
local lfs = require "lfs"
local error = caller.error

-- The base model and the adapter, both without data.
local function skeleton(base, adapter, options)
  local spec = config.read(adapter)
  local model = pretrained.from_config(base, { task = options.task, device = "meta", dtype = "fp32" })
  return model, adapters_of.add(model, "default", spec)
end

-- Functions that read a tensor of the base model: whole, and part by part.
local function readers(state, name)
  local shape, dtype = state:shape(name), state:dtype(name)
  local where = { dtype = dtype, device = "cpu" }
  return function()
    local made = create.empty(shape, where)
    state:read_into(name, made)
    return made
  end, function(put)
    rectangles.each(shape, pieces.elements(dtype), function(offset, size)
      scope.scope(function()
        local part = create.empty(size, where)
        state:read_part(name, part, offset)
        put(part)
      end)
    end)
  end
end

-- The modules and keys of an adapter's tensors in a layer, and their names in its file.
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

-- The weight of a layer with the adapter, made when it is written. The layer has data only during the call.
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

-- A table that is tied to the head and has an adapter: the head gets a weight of its own, which has none.
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

-- The tensors to write, and for each tensor of the base model the function that reads it.
local function entries_of(adapters, state, trained)
  local layer_of, entries, read_of = {}, {}, {}
  for _, entry in ipairs(adapters.layers) do layer_of[entry.name .. ".weight"] = entry end
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
  for name, tensor in pairs(trained) do                    -- such as a head that the base model's files lack
    if not state:has(name) and not name:find "%.lora_" then
      local made = tensor()
      entries[#entries + 1] = { name = name, shape = made:shape(), dtype = made:dtype(), owner = 0, tensor = tensor,
        numel = made:numel() }
    end
  end
  return entries, read_of
end

local OPTIONS = { max_shard_size = "whole|string", other_base = "boolean", task = "string" }

--- Writes a folder with the base model of a folder and an adapter merged into it. Types of tensors are the base
--- model's.
---@param base string the folder of the base model
---@param adapter string the folder of the adapter
---@param out string the folder to write
---@param options? {max_shard_size?: integer|string, other_base?: boolean, task?: string}
return function(base, adapter, out, options)
  local given = caller.options(options, "lora.merge_folder", OPTIONS)
  for what, path in pairs { base = base, adapter = adapter, out = out } do
    caller.typed(path, "string", "lora.merge_folder: the folder " .. what)
  end
  base = folder.find(base)
  for _, from in ipairs { base, adapter } do
    if lfs.symlinkattributes(out, "ino") and lfs.attributes(out, "ino") == lfs.attributes(from, "ino") then
      error(("lora.merge_folder: %s would be replaced while it is read; choose another folder to write"):format(from))
    end
  end
  local model, adapters = skeleton(base, adapter, given)
  local weights_file, trained = lora_files.open(model, adapters, adapter, given.other_base, base)
  local files = files_of.open(folder.files(base))
  local ok, problem = pcall(scope.no_grad, scope.scope, function()
    local own_name = weights.namer(model)
    local state = files:state(own_name)
    local entries, read_of = entries_of(adapters, state, trained)
    untie(model, adapters, entries, read_of)
    save.folder(out, entries, function(dtype)
      return model.family.settings:to_file(model.config, model.class_name, dtype)
    end, { max_shard_size = given.max_shard_size, source = base })
  end)
  files:close()
  weights_file:close()
  if not ok then error(problem, 0) end
end
