-- SPDX-License-Identifier: BSD-3-Clause
-- Folders of adapters in PEFT's format. A folder has an adapter_config.json, and an adapter_model.safetensors with the
-- tensors of one adapter. The name of a tensor in the file is "base_model.model.", followed by the tensor's name in the
-- model without the adapter's name.
local native = require "ps.core.ffi"
local agree = require "ps.dist.agree"
local create = require "ps.tensor.create"
local caller = require "ps.core.caller"
local file_id = require "ps.core.file_id"
local handle = require "ps.nn.handle"
local hooks = require "ps.core.hooks"
local rectangles = require "ps.core.rectangles"
local scope = require "ps.core.scope"
local sharded = require "ps.nn.sharded"
local serialize = require "ps.io.serialize"
local batch = require "ps.pretrained.batch"
local folder = require "ps.pretrained.folder"
local pretrained_save = require "ps.pretrained.save"
local safetensors = require "ps.io.safetensors"
local make_folder = require("ps.checkpoints.folder").make
local address = require("ps.nn.registry").address
local adapters_of = require "ps.lora.adapters"
local layers = require "ps.lora.layers"
local config = require "ps.lora.config"
local gguf = require "ps.lora.gguf"
local gguf_file = require "ps.io.gguf"
local origin = require "ps.nn.origin"
local packed = require "ps.nn.packed"
local lfs = require "lfs"
local ffi, C = native.ffi, native.C
local error = caller.error

local files = {}

local PREFIX = "base_model.model."
files.PREFIX = PREFIX
local WEIGHTS, OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
local BASE_KEY = "psluajit_base"                           -- metadata key for the fingerprint of the base model
local SAMPLE = 64                                          -- number of bytes of each tensor that are hashed
local LINE = "%s %s [%s] %s"

-- Adds a line of text for each tensor of a safetensors file: its name, type and shape, and bytes from its middle.
local function add_safetensors(lines, name)
  local file = safetensors.open(name)
  for i, tensor in ipairs(file:names()) do
    local n = file:nbytes(tensor)
    local data = ffi.cast("const char *", C.ps_st_data(file.st, i - 1))
    local first = math.floor(math.max(0, n - SAMPLE) / 2)
    lines[#lines + 1] = LINE:format(tensor, tostring((file:dtype(tensor))), rectangles.text(file:shape(tensor)),
      ffi.string(data + first, math.min(n, SAMPLE)))
    C.ps_st_drop(file.st, i - 1)                          -- release the pages around the sample
  end
  file:close()
end

local function hash(lines)
  if #lines == 0 then return nil end
  table.sort(lines)
  local text = table.concat(lines, "\n")
  return bit.tohex(C.ps_xxh3(text, #text))
end

--- Returns a fingerprint that differs between models with different weights. The fingerprint is a hash, as text, of the
--- names, types and shapes of all tensors in a folder, and of 64 bytes of each tensor. Returns nil if the folder has no
--- safetensors files.
---@param path? string the folder
---@return string?
function files.fingerprint(path)
  if not path or not lfs.attributes(path .. "/config.json", "mode") then return nil end
  local ok, list = pcall(folder.files, path)
  local lines = {}
  for _, name in ipairs(ok and list or {}) do
    if not name:find "%.safetensors$" then return nil end
    add_safetensors(lines, name)
  end
  return hash(lines)
end

-- Returns the fingerprint of a GGUF file. An adapter's file does not store this fingerprint, because the adapter may be
-- used with a folder that has the same model.
local function gguf_fingerprint(path)
  local lines, file = {}, gguf_file.open(path)
  for _, tensor in ipairs(file:names()) do
    lines[#lines + 1] = LINE:format(tensor, file:type(tensor), rectangles.text(file:shape(tensor)),
      file:middle(tensor, SAMPLE))
  end
  file:close()
  return hash(lines)
end

--- Returns a fingerprint of the weights in a folder or GGUF file. Returns nil if the folder has no fingerprint.
---@param path? string
---@return string?
function files.weights_fingerprint(path)
  if path and gguf_file.is_path(path) then return gguf_fingerprint(path) end
  return files.fingerprint(path)
end

-- -- reading ----------------------------------------------------------------------------------------------------------
local function open_weights(path)
  for _, name in ipairs { WEIGHTS, OLD_WEIGHTS } do
    local file = path .. "/" .. name
    if lfs.attributes(file, "mode") then return serialize.load(file, { lazy = true }), file end
  end
  return error(("no adapter: %s has neither %s nor %s"):format(path, WEIGHTS, OLD_WEIGHTS))
end

---@class ps.lora.Opened the open files of an adapter, in PEFT's or llama.cpp's format
---@field spec ps.lora.Spec
---@field file table the adapter's tensors, by PEFT's names
---@field at string the path of the file
---@field base? string the fingerprint of the base model

-- Opens an adapter's files for a model.
local function open(path, model)
  if gguf.is_path(path) then
    local spec, file, base = gguf.open(path, model, PREFIX)
    return { spec = spec, file = file, at = path, base = base }
  end
  local spec = config.read(path)
  local file, at = open_weights(path)
  return { spec = spec, file = file, at = at, base = file.metadata and file.metadata[BASE_KEY] }
end

-- Converts a tensor's name in the file. If the tensor belongs to the adapter, returns the name that Adapters:tensors
-- uses. If the tensor belongs to the base model, returns its name in the base model.
local function own_name(name)
  local bare = name:match("^" .. PREFIX:gsub("%.", "%%.") .. "(.*)$") or name
  bare = bare:gsub("%.lora_magnitude_vector%.weight$", ".lora_magnitude_vector")
  return (bare:gsub("%.modules_to_save%.default%.", "."):gsub("%.modules_to_save%.", "."))
end

local function some(list)
  table.sort(list)
  local shown = { unpack(list, 1, math.min(5, #list)) }
  if #list > 5 then shown[6] = ("and %d more"):format(#list - 5) end
  return table.concat(shown, ", ")
end

-- A file may contain a tensor that is tied in the model. If PEFT trained this tensor separately, because its module is
-- in modules_to_save, returns the entry of modules_to_save. Returns nil if the tensor is only a copy of
-- the token embedding.
local function trained_apart(spec, own)
  for _, wanted in ipairs(not spec.ensure_weight_tying and spec.modules_to_save or {}) do
    for dot in own:gmatch "()%." do                        -- PEFT compares the ends of modules' names
      if own:sub(1, dot - 1):sub(-#wanted) == wanted then return wanted end
    end
  end
end

-- Returns the tensors to load, as a list of {from = name in the file, tensor = destination}. The file must contain
-- every tensor of the adapter. If a tensor in the file does not belong to the adapter, it is loaded into the base
-- model's tensor of the same name. Copies of tensors of the base model are skipped. Any other tensor is an error.
local function plan(model, adapters, name, file, path)
  local wanted, base, missing, unknown, wrong, list = {}, model:state_dict { tied = false }, {}, {}, {}, {}
  for own, tensor in adapters:tensors(name) do wanted[own] = tensor end
  local from = {}
  for _, given in ipairs(file:names()) do
    local own = own_name(given)
    local table_of_base = base[own] or base[(own:gsub("%.base_layer%.", "."))]
    local tied = model.config and model.config.tie_word_embeddings and model.ties and model.ties[own]
    local tensor = wanted[own] or table_of_base or nil
    local apart = tied and trained_apart(adapters.specs[name], own)
    if apart then
      error(("%s: the adapter trains %s (modules_to_save has '%s') apart from the token embedding, but the model "
        .. "shares their weight; train with ensure_weight_tying = true, or over a base model with "
        .. "tie_word_embeddings = false"):format(path, own, apart), 0)
    elseif tensor ~= nil then
      from[own] = given
      if not rectangles.same(file:shape(given), sharded.shape(tensor)) then
        wrong[#wrong + 1] = ("%s is [%s], but this model needs [%s]"):format(given, rectangles.text(file:shape(given)),
          rectangles.text(sharded.shape(tensor)))
      else
        list[#list + 1] = { from = given, tensor = tensor }
      end
    elseif not tied and not own:find "%.original_module%." then  -- skips PEFT's copies of base model biases
      unknown[#unknown + 1] = given
    end
  end
  for own in pairs(wanted) do
    if not from[own] then missing[#missing + 1] = PREFIX .. own end
  end
  local who = ("%s: the adapter does not fit %s"):format(path, model.class_name)
  if #wrong > 0 then error(("%s: %s; it was made for another base model"):format(who, some(wrong)), 0) end
  if #missing > 0 then
    error(("%s: the file lacks %s: %s"):format(who, caller.counted(#missing, "tensor"), some(missing)), 0)
  end
  if #unknown > 0 then
    error(("%s: the model has no parameters for %s of the file: %s"):format(who, caller.counted(#unknown, "tensor"),
      some(unknown)), 0)
  end
  return list
end

local function check_base(base, wanted, path, other_base)
  if not wanted or other_base then return end
  local has = files.fingerprint(base)
  if not has or has == wanted then return end
  error(("%s: the adapter was trained on other weights than those of %s (fingerprint %s, not %s); load its base model, "
    .. "or pass other_base = true to use it with this one"):format(path, base, wanted, has), 0)
end

--- Adds the adapter of a folder or GGUF file to a model whose tensors have no data. The adapter's tensors have
--- no data either.
---@param model ps.nn.Module
---@param path string the adapter's folder or file
---@param other_base? boolean
---@param base string the folder of the base model
---@return ps.lora.Adapters
---@return table file The caller must close the file after the last call of a function in `trained`.
---@return table<string, fun(): ps.Tensor> trained functions that read the tensors of the file. The key is PEFT's name
--- without its prefix. If the adapter trains a parameter of the base model, the key is the model's name for it.
---@return table<string, string> dtypes the dtypes of these tensors
function files.open(model, path, other_base, base)
  local opened = open(path, model)
  local file, at, trained, dtypes, adapters = opened.file, opened.at, {}, {}, nil
  local ok, problem = pcall(function()
    check_base(base, opened.base, path, other_base)
    adapters = adapters_of.add(model, "default", opened.spec)
    adapters.specs.default.base = base
    for _, entry in ipairs(plan(model, adapters, "default", file, at)) do
      file:check(entry.from)
      local own, dtype = own_name(entry.from):gsub("%.base_layer%.", "."), (file:dtype(entry.from))
      dtypes[own] = dtype
      trained[own] = function()
        local made = create.empty(file:shape(entry.from), { dtype = dtype, device = "cpu" })
        file:read_into(entry.from, made)
        return made
      end
    end
  end)
  if not ok then
    file:close()
    error(problem, 0)
  end
  return adapters, file, trained, dtypes
end

-- Reads a tensor of the file, as load_state_dict does. On device meta (ps.deferred), only records the read for later.
local function read_into(file, name, tensor)
  local held = hooks.ask("load", tensor, file, name)
  local to = held and held.to or tensor
  if held and held.elsewhere then return end
  scope.no_grad(sharded.read, file, name, to, tensor)
  if held then held:loaded(tensor) end
end

local LOAD = { name = "string", trainable = "boolean", other_base = "boolean", dropout = "number" }

--- Loads an adapter that PEFT or psluajit wrote. Adds it to a model, and activates it.
---@param model ps.nn.Module
---@param path string the adapter's folder or GGUF file
---@param options? {name?: string, trainable?: boolean, other_base?: boolean, dropout?: number}
---@return ps.nn.Module model
function files.load(model, path, options)
  local given = caller.options(options, "lora.load", LOAD)
  caller.typed(path, "string", "lora.load: the folder")
  local name = given.name or "default"
  local opened = open(path, model)
  local spec, file, at = opened.spec, opened.file, opened.at
  spec.dropout = given.dropout or spec.dropout
  local ok, adapters = pcall(adapters_of.undone_on_error, model, name, function()
    check_base(rawget(model, "source"), opened.base, path, given.other_base)
    local made = adapters_of.add(model, name, spec)
    for _, entry in ipairs(plan(model, made, name, file, at)) do read_into(file, entry.from, entry.tensor) end
    return made
  end)
  file:close()
  if not ok then error(adapters, 0) end
  adapters.specs[name].base = rawget(model, "source") or spec.base
  if given.trainable == false then adapters:train_only(nil) end
  return model
end

--- Copies values into tensors of the active adapter. Keys are PEFT's names.
---@param model ps.nn.Module
---@param state table<string, ps.Tensor>
function files.set(model, state)
  local adapters = adapters_of.own(model, "lora.set_tensors")
  local name, own, has = adapters.active, {}, {}
  for path, tensor in adapters:tensors(name) do own[path] = tensor end
  for given, values in pairs(state) do
    local path = own_name(given)
    local tensor = own[path]
    if not tensor then error(("lora.set_tensors: the adapter has no tensor %s"):format(given)) end
    if not rectangles.same(tensor:shape(), values:shape()) then
      error(("lora.set_tensors: %s is [%s], not [%s]"):format(given, rectangles.text(tensor:shape()),
        rectangles.text(values:shape())))
    end
    has[path] = true
    scope.no_grad(function() tensor:copy_(values) end)
  end
  for _, entry in ipairs(adapters.layers) do
    local adapter = entry.module.lora_.adapters[name]
    if adapter and adapter.dora and not has[entry.name .. ".lora_magnitude_vector"] then
      layers.reset_magnitude(entry.module, name)
    end
  end
end

-- -- writing ----------------------------------------------------------------------------------------------------------
-- Returns a function that maps a tensor's name in the model to its name in PEFT's file. The function returns nil for a
-- tensor that does not belong to the adapter.
local function namer(adapters, name)
  local spec, adapted, whole = adapters.specs[name], {}, {}
  for _, entry in ipairs(adapters.layers) do adapted[entry.name] = true end
  for _, entry in ipairs(adapters.saved) do
    if entry.module.saved_.names[name] then whole[#whole + 1] = entry.name .. "." end
  end
  local escaped = name:gsub("%-", "%%-")
  local ours = { ["^(.*%.lora_[AB])%." .. escaped .. "(%.weight)$"] = true,
    ["^(.*%.lora_embedding_[AB])%." .. escaped .. "()$"] = true,
    ["^(.*%.lora_magnitude_vector)%." .. escaped .. "()%.weight$"] = true }
  return function(own)
    for pattern in pairs(ours) do
      local front, back = own:match(pattern)
      if front then return PREFIX .. front .. (type(back) == "string" and back or "") end
    end
    if own:find "%.lora_" or own:find "%.original_module%." or own:find "%.modules_to_save%." then return nil end
    for _, prefix in ipairs(whole) do if own:sub(1, #prefix) == prefix then return PREFIX .. own end end
    local layer = own:match "^(.*)%.bias$"
    if spec.bias ~= "none" and layer and adapted[layer] then return PREFIX .. layer .. ".base_layer.bias" end
    if spec.bias == "all" and layer then return PREFIX .. own end
  end
end

-- Writes PEFT's two files. `entries` is sorted and has PEFT's names.
local function write_folder(path, adapters, name, entries, base, group)
  local rank = group and group:rank() or 0
  agree.run(group, function() if rank == 0 then make_folder((path:gsub("(.)/+$", "%1"))) end end)
  batch.write(path, group, function(made)
    pretrained_save.write(made:file(WEIGHTS), entries, function(file, list)
      return safetensors.writer(file, list, { format = "pt", [BASE_KEY] = base })
    end, group)
    return { [config.FILE] = config.text(adapters, name) }
  end)
end

-- Returns the entries of an adapter of a model or engine, sorted and with PEFT's names.
local function entries_of(model, adapters, name)
  local name_of, entries = namer(adapters, name), {}
  for _, entry in ipairs(pretrained_save.whole(model)) do
    entry.name = name_of(entry.name)
    if entry.name then entries[#entries + 1] = entry end
  end
  table.sort(entries, function(a, b) return a.name < b.name end)
  return entries
end

-- Removes the prefix from PEFT's names.
local function bare(entries)
  for _, entry in ipairs(entries) do entry.name = entry.name:sub(#PREFIX + 1) end
  return entries
end

-- Returns whether a name in a model with adapters belongs to a tensor of the base model.
local function is_base(own)
  return not (own:find "%.lora_[%w_]+%." or own:find "%.original_module%." or own:find "%.modules_to_save%.")
end

-- Returns a set of the names of weights that the files of a model lack.
local function lacking(model)
  local names = {}
  for _, name in ipairs((model.loaded or {}).missing or {}) do names[name] = true end
  return names
end

-- Returns a text that says why the weights of a model with adapters are not those of the files from which it was
-- loaded. Returns nil if they are, except for trained weights.
local function difference(model)
  local path, adapters = rawget(model, "source"), adapters_of.of(model)
  local before = adapters and adapters.merged and adapters.unmerged or {}     -- unchanged until the adapter was merged
  local file = origin.changed_file(model)
  if file then return file .. " has changed since the model was loaded from it" end
  local lacks = lacking(model)
  local name = origin.changed(model, function(own, p)
    return is_base(own) and not p:needs_grad() and not lacks[own] and not before[own]
  end)
  if name == "" then return ("the weights of the model were not loaded from %s"):format(path) end
  return name and ("%s has not the value that %s has"):format(name, path)
end

local hash_out = ffi.new("uint64_t[2]")

--- Returns a text that identifies the weights of a model without its adapters. The text is the fingerprint of the files
--- from which the model was loaded, or a hash of all weights if they are not those of the files. Returns nil and the
--- reason if the weights must be hashed, but ranks share them.
---@param model ps.nn.Module
---@param shared boolean whether the model is that of an engine on several ranks
---@return string? id
---@return string? why
function files.base_id(model, shared)
  local adapters = adapters_of.of(model)
  local path = rawget(model, "source")
  local different = path and difference(model)
  if path and not different then
    local fingerprint = files.weights_fingerprint(path)
    if fingerprint then return fingerprint end
  end
  if shared then return nil, different or "the base model was not loaded from safetensors files or a GGUF file" end
  local lines = {}
  for name, p in model:named_parameters() do
    if is_base(name) and not (adapters and p:needs_grad()) then
      native.check(C.ps_tensor_hash(p:detach():contiguous(), hash_out))
      lines[#lines + 1] = ("%s %s %s"):format(name, tostring(hash_out[0]), tostring(hash_out[1]))
    end
  end
  return hash(lines) or ""
end

-- Returns the fingerprint of the base model's files. If the base model's weights are not those of the files, prints a
-- note and returns nil: the adapter alone does not give this model.
local function base_fingerprint(model, path, call)
  if not path then return nil end
  local different = difference(model)
  if not different then return files.fingerprint(path) end
  io.stderr:write(("psluajit: %s: the adapter is written without its base model, whose weights differ from its files: "
    .. "%s; to keep this model, write it whole with the adapter merged (merged = true), or write the base model before "
    .. "ps.lora.wrap\n"):format(call, different))
end

-- Calls fn(adapters, name, group, base) while the adapter `name` is active. `base` is the fingerprint of the base model
-- on rank 0, and nil on other ranks.
local function with_adapter(model, name, call, fn)
  local module = handle.module(model)
  local adapters = adapters_of.own(module, call)
  name = name or adapters.active or adapters.merged
  if not name then error(("%s: no adapter is active; pass a name: { adapter = name }"):format(call)) end
  if not adapters.specs[name] then error(("%s: the model has no adapter '%s'"):format(call, name)) end
  local was = adapters.active
  adapters:activate(name)
  local ok, problem = pcall(function()
    local group = pretrained_save.group_of(model)
    local first = (group and group:rank() or 0) == 0
    local base = first and base_fingerprint(module, adapters.specs[name].base, call) or nil
    fn(adapters, name, group, base)
  end)
  adapters:activate(was)
  if not ok then error(problem, 0) end
end

--- Writes an adapter as a folder that PEFT and ps.lora.load can read. With an engine, all ranks call this function, and
--- the files contain the fp32 values (masters).
---@param model ps.nn.Module|ps.Engine
---@param path string the folder
---@param name? string the adapter (default: the active adapter)
function files.save(model, path, name)
  caller.typed(path, "string", "save_pretrained: the folder")
  local source = rawget(handle.module(model), "source")
  if source and file_id(path) and file_id(path) == file_id(source) then
    error(("save_pretrained: %s is the folder of the base model; an adapter needs its own folder, as a folder with "
      .. "adapter_config.json is read as an adapter"):format(path))
  end
  with_adapter(model, name, "save_pretrained", function(adapters, own, group, base)
    write_folder(path, adapters, own, entries_of(model, adapters, own), base, group)
  end)
end

--- Converts an adapter from an open PEFT folder to a GGUF file, or from an open GGUF file to a PEFT folder.
---@param model ps.pretrained.Model the base model without data, with the adapter "default"
---@param trained table<string, fun(): ps.Tensor> the functions that files.open returns
---@param dtypes table<string, string> the dtypes that files.open returns
---@param path string NAME.gguf or a folder
---@param options {type?: string, name?: string}
function files.convert(model, trained, dtypes, path, options)
  local adapters, entries = adapters_of.of(model), {}
  for own, tensor in adapters:tensors "default" do
    entries[#entries + 1] = { name = PREFIX .. own, shape = tensor:shape(), dtype = dtypes[own], owner = 0,
      numel = tensor:numel(), tensor = trained[own] }
  end
  local base = files.fingerprint(adapters.specs.default.base)
  if not gguf.is_path(path) then return write_folder(path, adapters, "default", entries, base) end
  gguf.write(path, model, adapters, "default", bare(entries), { type = options.type, name = options.name, base = base })
end

-- Returns a function that changes a list of the whole model's entries. It replaces adapted weights with weights that
-- include the adapter, and removes the adapter's own tensors.
local function merging(adapters, model, call)
  local module, name = adapters.model, adapters.active or adapters.merged
  if pretrained_save.group_of(model) then
    error(("%s: merged = true is for one process that has the whole model; save the adapter, then run "
      .. "tools/merge_adapter.lua BASE ADAPTER --out DIR"):format(call))
  end
  local tied = adapters:tied_table()
  if tied then
    error(("%s: %s has an adapter, and its weight is also the head's; tools/merge_adapter.lua writes a "
      .. "folder whose head has a separate weight"):format(call, tied))
  end
  local layer_of, values = {}, {}
  for _, entry in ipairs(adapters.layers) do layer_of[entry.name .. ".weight"] = entry.module end
  if handle.of(model) then
    local state = model:state_dict()
    for own, tensor in pairs(module:state_dict { tied = false }) do values[address(tensor)] = state[own] end
  end
  local function value_of(tensor) return values[address(tensor)] or tensor end
  return function(entries)
    local list = {}
    for _, entry in ipairs(entries) do
      local layer = layer_of[entry.name]
      if layer and layer.lora_.adapters[name] and not layer.lora_.merged then
        entry.tensor = function() return layers.merged_weight(layer, name, value_of) end
      end
      if is_base(entry.name) then list[#list + 1] = entry end
    end
    return list
  end
end

-- Writes the whole model with an adapter merged into its weights.
local function save_merged(adapters, model, path, options)
  local module = adapters.model
  pretrained_save.run(model, path, function(dtype)
    return module.family.settings:to_file(module.config, module.class_name, dtype)
  end, { max_shard_size = options.max_shard_size, source = module.source,
    entries = merging(adapters, model, "save_pretrained") })
end

local ADAPTER = { type = "string", name = "string", adapter = "string|boolean" }

--- Implements save_gguf for a model with adapters. Writes either the whole model, with the active adapter merged into
--- its weights, or only an adapter.
---@param model ps.nn.Module|ps.Engine
---@param path string
---@param options table
---@param save_model fun(options: table, change: fun(entries: table[]): table[])
function adapters_of.Adapters:save_gguf(model, path, options, save_model)
  options = options or {}
  if options.merged == true and not options.adapter then
    for _, entry in ipairs(self.layers) do layers.check_mergeable(entry.module, "save_gguf: merged = true") end
    local rest = {}
    for key, value in pairs(options) do if key ~= "merged" then rest[key] = value end end
    return save_model(rest, merging(self, model, "save_gguf"))
  end
  if not options.adapter or options.merged then
    error("save_gguf: the model has adapters; pass merged = true to write the model with the active one in its "
      .. "weights, or adapter = true to write the active one alone")
  end
  caller.typed(path, "string", "save_gguf: the path")
  options = caller.options(options, "save_gguf", ADAPTER)
  local name = options.adapter ~= true and options.adapter or nil
  with_adapter(model, name, "save_gguf", function(adapters, own, group, base)
    gguf.write(path, handle.module(model), adapters, own, bare(entries_of(model, adapters, own)),
      { type = options.type, name = options.name, base = base }, group)
  end)
end

--- Returns the base model for a checkpoint that stores only trained values. Returns nil if a checkpoint must store all
--- values, because an adapter is merged, because the model was not loaded from a folder of safetensors files or from a
--- GGUF file, or because its weights have changed since then.
---@return {path: string, fingerprint: string, names: table<string, boolean>}? base `names` has the frozen parameters
--- and the packed weights that the folder or file contains.
function adapters_of.Adapters:frozen_base()
  local path = rawget(self.model, "source")
  if self.merged or not path or difference(self.model) then return nil end
  local fingerprint = files.weights_fingerprint(path)
  if not fingerprint then return nil end
  local lacks, names = lacking(self.model), {}
  for name, p in self.model:named_parameters() do
    if is_base(name) and not p:needs_grad() and not lacks[name] then names[name] = true end
  end
  packed.each(self.model, function(_, name, of_file)
    if of_file then names[name], names[name .. "_scales"] = true, true end
  end)
  return { path = path, fingerprint = fingerprint, names = names }
end

--- Implements save_pretrained for a model with adapters.
---@param model ps.nn.Module|ps.Engine
---@param path string
---@param options {adapter?: string, merged?: boolean, max_shard_size?: integer|string}
function adapters_of.Adapters:save_pretrained(model, path, options)
  if not options.merged then return files.save(model, path, options.adapter) end
  if options.adapter and options.adapter ~= self.active then
    error "save_pretrained: merged = true writes the active adapter; call model:set_adapter(name) first"
  end
  save_merged(self, model, path, options)
end

return files
