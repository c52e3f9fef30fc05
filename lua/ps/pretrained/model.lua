-- SPDX-License-Identifier: BSD-3-Clause
-- The base class of models in Hugging Face's format. It has the following parts:
--   a configuration
--   the names of parameters in files, such as older names, names with or without the body's prefix, and tied names
--   loading, which reports the tensors that were used and the tensors that were skipped
--   saving, resizing of the vocabulary, and the computation of costs
--
-- The file of a family, such as models/bert.lua, derives classes from this class. It sets these fields on each class:
--   family      the result of ps.pretrained.family, with the fields model_type, settings, ...
--   base        the prefix of the body's names in files of models with a head ("bert")
--   prefix      the field of the model that contains the body; nil if the class is the body itself
--   body        the first components of the body's parameter names: { embeddings = true, ... }
--   spare       patterns for names of the body that a file or a class may lack, such as names of a pooler
--   inputs      the allowed names of a named batch: name -> "tensor"
--   ties        maps a name in files to a name of the model, for tensors that are shared if tie_word_embeddings is set
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local handle = require "ps.nn.handle"
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local exact = require "ps.core.exact"
local nn_module = require "ps.nn.module"
local packed = require "ps.nn.packed"
local sharded = require "ps.nn.sharded"
local init = require "ps.nn.weights"
local registry = require "ps.nn.registry"
local bitsandbytes_save = require "ps.pretrained.bitsandbytes_save"
local files_of = require "ps.pretrained.files"
local folder = require "ps.pretrained.folder"
local parallel = require "ps.pretrained.parallel"
local save = require "ps.pretrained.save"
local weights = require "ps.pretrained.weights"
local error = caller.error

---@class ps.pretrained.Model: ps.nn.Module
---@field config table
---@field source? string the folder from which the model was loaded
---@field loaded? {missing: string[], left: string[], names: table<string, string>} missing: parameters that the files
--- lack; left: tensors of the files that were not used; names: maps a name in the files to a parameter's name
local Model = nn_module.class("PretrainedModel")

-- Inputs with one row per sample. These inputs are split into micro-batches. An input with the value "rows or one" may
-- instead have a single row for all samples (ps/data/batch.lua). Inputs that are not in this table are not split: every
-- micro-batch gets the whole tensor.
Model.split_inputs = { input_ids = "rows", attention_mask = "rows", labels = "rows", start_positions = "rows",
  end_positions = "rows", segment_ids = "rows", loss_weights = "rows",
  token_type_ids = "rows or one", position_ids = "rows or one" }

-- Returns the names and shapes of all saved tensors, such as "h.0.attn.c_attn.weight" -> "96, 288". If several ranks
-- share a tensor, the shape is the whole tensor's shape. For a layer in `nf4`, the shape is the
-- unpacked weight's shape.
local function layout_of(self, nf4)
  local layout, layers, scales = {}, nf4 and nf4.layers or {}, nf4 and nf4.scales or {}
  for name, tensor in pairs(self:state_dict { tied = false }) do
    if not scales[name] then
      layout[name] = table.concat(layers[name] and layers[name].shape or sharded.shape(tensor), ", ")
    end
  end
  return layout
end

-- Records the layout that a class builds from its configuration. transformers builds the same layout from config.json.
local function note_layout(self) rawset(self, "_layout", layout_of(self)) end
nn_module.adapt(Model, function(class) class.instance.ps_made = note_layout end)

local WHERE = { dtype = "string", device = "string", recompute = "boolean" }
local UNPADS = { dtype = "string", device = "string", recompute = "boolean", unpad = "boolean" }

--- Begins the init of a class: checks the configuration, and sets missing fields to their defaults.
---@param config table config.json's fields; the family's defaults replace missing fields
---@param given? {dtype?: string, device?: string, recompute?: boolean, unpad?: boolean} only families with
--- unpads = true accept unpad
---@return table full
---@return {dtype: string?, device: string?, std: number} where options for the layers' constructors
function Model:begin(config, given)
  local who = self.family.model_type
  given = caller.options(given, who, self.family.unpads and UNPADS or WHERE)
  caller.typed(config, "table", who .. ": the configuration")
  local full = self.family.settings:complete(config)
  self.config = full
  return full, { dtype = given.dtype, device = given.device, std = full.initializer_range }
end

-- -- loading --------------------------------------------------------------------------------------------------------
--- Loads weights from files (safetensors, or PyTorch's pytorch_model.bin), one tensor at a time. Names may have or lack
--- the body's prefix. Raises an error if a tensor of the body is missing, or if its shape differs from the model's
--- shape. Parameters of the head that the files lack keep their values. A note lists these parameters. It also lists
--- the tensors in the files that the model does not use, such as the tensors of other heads.
---@param ... string paths of the files
---@return ps.pretrained.Model self
function Model:load_weights(...)
  local list = { ... }
  if #list == 0 then error("load_weights needs the paths of files") end
  for _, path in ipairs(list) do caller.typed(path, "string", "load_weights: a path") end
  local files = files_of.open(list)
  local ok, problem = pcall(weights.load, self, files)
  files:close()
  if not ok then error(problem, 0) end
  return self
end

-- -- saving ---------------------------------------------------------------------------------------------------------
-- Returns the arguments of save_pretrained or save_parallelized: the folder, the options, and the engine if the call
-- was made by an engine. The folder may also be given as the option save_directory.
local function asked(path, options, more)
  local engine = handle.of(options)
  if engine then options = more end
  if type(path) == "table" and options == nil then
    options = copied(path)
    path, options.save_directory = options.save_directory, nil
  end
  return path, options, engine
end

local function first_of(names)
  table.sort(names)
  if #names == 0 then return "no tensors" end
  return ("%d %s (%s)"):format(#names, #names == 1 and "tensor" or "tensors", weights.some(names))
end

-- Raises an error if layers of the model were replaced, because config.json would then describe tensors that do not
-- exist, and readers would initialize these tensors. Also raises an error for packed weights outside the
-- layers in `nf4`.
local function check_layout(self, call, nf4)
  for _, module in self:named_modules() do
    if not (nf4 and bitsandbytes_save.can(module)) then
      packed.refuse(module, call, "load the model without keep_quantized, or convert its file (tools/gguf.lua convert)")
    end
  end
  -- The model was not made by its class, so there is no layout to compare with.
  if not self._layout then return end
  local layout, lost, new, other = layout_of(self, nf4), {}, {}, {}
  for name, shape in pairs(self._layout) do
    if not layout[name] then lost[#lost + 1] = name
    elseif layout[name] ~= shape then
      other[#other + 1] = ("%s is [%s], not [%s]"):format(name, layout[name], shape)
    end
  end
  for name in pairs(layout) do if not self._layout[name] then new[#new + 1] = name end end
  if not (lost[1] or new[1] or other[1]) then return end
  error(("%s: config.json describes %s as it was made, but layers have been replaced since: %s%s. A reader would "
    .. "initialize them, or refuse the folder: use layers with the same names and shapes (merge adapters into "
    .. "them; make the model with the final sizes, such as num_labels), or use ps.save(model:state_dict(), "
    .. "file)"):format(
    call, self.class_name, other[1] and weights.some(other) .. "; " or "",
    ("it lacks %s and additionally has %s"):format(first_of(lost), first_of(new))))
end

local SAVE_PARALLELIZED = { merge_checkpoints = "boolean" }
local SAVE = { max_shard_size = "whole|string", adapter = "string", merged = "boolean" }

--- Writes config.json and the weights in the format that from_pretrained and Hugging Face read. Also copies the
--- tokenizer's files and generation_config.json from the folder from which the model was loaded. With an engine, all
--- ranks call this function, and rank 0 writes the fp32 values (masters). Layers that are packed as NF4 are written in
--- the format of bitsandbytes and transformers (docs/pretrained.md). For a model with adapters (ps.lora), writes only
--- the active adapter, in the format of PEFT.
---@param path string|{save_directory: string} the folder, which can also be an option
---@param options? {max_shard_size?: integer|string, adapter?: string, merged?: boolean}|ps.Engine max_shard_size: the
--- largest file size, in bytes or as text such as "5GB" (default 50 GB). adapter: the name of the adapter to write
--- instead of the active one. merged: writes the whole model, with the active adapter merged into its weights. If an
--- engine holds this model, the engine is this argument, and the options follow in `more`.
---@param more? {max_shard_size?: integer|string, adapter?: string, merged?: boolean}
function Model:save_pretrained(path, options, more)
  local engine
  path, options, engine = asked(path, options, more)
  options = caller.options(options, "save_pretrained", SAVE)
  if rawget(self, "adapters_") then
    self.adapters_:save_pretrained(engine or self, path, options)
    return
  end
  if options.adapter or options.merged then
    error "save_pretrained: adapter and merged are for models with an adapter (ps.lora)"
  end
  local nf4 = bitsandbytes_save.of(self)
  check_layout(self, "save_pretrained", nf4)
  save.run(engine or self, path, function(dtype)
    return self.family.settings:to_file(nf4 and nf4:config(self.config, dtype) or self.config, self.class_name, dtype)
  end, { max_shard_size = options.max_shard_size, source = self.source,
    entries = nf4 and function(entries) return nf4:entries(entries) end })
end

--- Writes the model as a GGUF file for llama.cpp. The file also contains the tokenizer and the chat template of the
--- folder or file from which the model was loaded (docs/gguf.md). At most one tensor is in memory at a time. With an
--- engine, all ranks call this function, and the file contains the fp32 values (masters).
---@param path string
---@param options? {type?: string, name?: string, pre?: string, merged?: boolean, adapter?: boolean|string}|ps.Engine
--- type: "f32", "f16" (default), "bf16", "q8_0", "q6_k", "q4_k_m" or "q4_0". name: the value of general.name (default:
--- made from the name of the model's folder). pre: llama.cpp's name for the tokenizer's pre-tokenization rule. merged:
--- for a model with adapters (ps.lora), writes the model with the active adapter merged into its weights. adapter:
--- writes only an adapter, as "f32" (default), "f16" or "bf16". true selects the active adapter, and a string selects
--- an adapter by name. If an engine holds this model, the engine is this argument, and the options follow in `more`.
---@param more? {type?: string, name?: string, pre?: string, merged?: boolean, adapter?: boolean|string}
function Model:save_gguf(path, options, more)
  local engine
  path, options, engine = asked(path, options, more)
  local gguf = require "ps.pretrained.gguf_save"
  if rawget(self, "adapters_") then
    self.adapters_:save_gguf(engine or self, path, options, function(rest, change)
      gguf.save(self, engine, path, rest, change)
    end)
    return
  end
  check_layout(self, "save_gguf")
  gguf.save(self, engine, path, options)
end

--- Writes a folder with the weights of a model that several ranks share, like OSLO's save_parallelized. The folder has
--- one file pytorch_model_tp_I_pp_J.bin for each combination of tensor-parallel rank I and stage J. All ranks call this
--- function. With an engine, the files contain the fp32 values (masters). The call is allowed between backward and
--- step, and does not change the gradients.
---@param path string|{save_directory: string} the folder, which is replaced as a whole; it can also be an option
---@param options? {merge_checkpoints?: boolean}|ps.Engine merge_checkpoints: writes a single file, pytorch_model.bin,
--- instead. If an engine holds this model, the engine is this argument, and the options follow in `more`.
---@param more? {merge_checkpoints?: boolean}
function Model:save_parallelized(path, options, more)
  local engine
  path, options, engine = asked(path, options, more)
  options = caller.options(options, "save_parallelized", SAVE_PARALLELIZED)
  check_layout(self, "save_parallelized")
  parallel.save(engine or self, path, function(dtype)
    return self.family.settings:to_file(self.config, self.class_name, dtype)
  end, options.merge_checkpoints or false, self.source)
end

--- Loads the weights from a folder that save_parallelized wrote. This run may have a different number of ranks than the
--- run that saved the folder, and may split the model in a different way. A folder that OSLO wrote can also be loaded
--- if OSLO split the model only into pipeline stages.
---@param path string
---@return ps.pretrained.Model self
function Model:from_parallelized(path)
  caller.typed(path, "string", "from_parallelized: the folder")
  return self:load_weights(unpack(folder.files(path)))
end

-- -- vocabulary -----------------------------------------------------------------------------------------------------
-- Replaces a tensor with a tensor that has n rows. Copies existing rows as far as they fit, and initializes new rows
-- with `fill`. `name` is the tensor's full name, for errors.
local function resize(owner, key, n, fill, name)
  local old = owner[key]
  local shape = old:shape()
  if not nn_module.same_shape(shape, sharded.shape(old)) then
    error(("resize_token_embeddings: ranks share '%s', and this rank has a part; resize the model before it is "
      .. "cut, in model_func"):format(key))
  end
  local kept = math.min(n, shape[1])
  shape[1] = n
  local is_buffer = registry.kind(owner, key) == "buffer"
  local new = create.empty(shape, { dtype = old:dtype(), device = old:device() })
  scope.no_grad(function()
    new:narrow(0, 0, kept):copy_(old:detach():narrow(0, 0, kept))
    if n > kept then fill(new:narrow(0, kept, n - kept)) end
  end)
  local trains = old:needs_grad()
  if is_buffer then return owner:buffer(key, new) end
  nn_module.replaced(old, name, "model:resize_token_embeddings(...)")
  owner:param(key, new)
  if not trains then new:requires_grad(false) end
end

--- Resizes the token embedding to n rows. If the model has a head over the vocabulary, resizes the head, too. Existing
--- rows keep their values. New rows are normally distributed with standard deviation initializer_range, and new biases
--- are 0. Create the engine or optimizer after this call.
---@param n integer number of tokens
---@return ps.pretrained.Model self
function Model:resize_token_embeddings(n)
  caller.whole(n, "resize_token_embeddings: the number of words", 1)
  local config, std = {}, self.config.initializer_range
  for key, value in pairs(self.config) do config[key] = value end
  config.vocab_size = n
  config = self.family.settings:complete(config)
  local function normal(t) init.normal_(t, 0, std) end
  local names = {}
  for name, module in self:named_modules() do names[module] = name == "" and "" or name .. "." end
  for _, entry in ipairs(self:vocabulary()) do
    local owner, key = entry[1], entry[2]
    resize(owner, key, n, key == "bias" and init.zeros_ or normal, (names[owner] or "") .. key)
    if owner.class_name == "Embedding" then owner.rows = n elseif owner.outputs then owner.outputs = n end
  end
  local head = rawget(self, "tied_head")                   -- this head shares the weight of the token embedding
  if head then head.outputs = n end
  for _, module in self:named_modules() do if module.config then module.config = config end end
  note_layout(self)
  return self
end

--- Returns example arguments for a call of the model, as tensors without data. These arguments are used to compute the
--- costs of the model's parts.
---@param rows integer
---@param positions integer the number of positions; if it exceeds the model's number, the model's number is used
---@return {input_ids: ps.Tensor} batch
function Model:example(rows, positions)
  local shape = { rows, math.min(positions, self:costs().positions) }
  return { input_ids = create.empty(shape, { dtype = "int64", device = "meta" }) }
end

-- -- costs ----------------------------------------------------------------------------------------------------------
--- Returns the number of floating-point operations per token in training: 6 for each weight that takes part in a matrix
--- product, plus 12 L C T for attention over T positions. Embeddings only look up rows and are not counted. A token
--- embedding that is also the head is counted once.
---@param seq? integer T (default: the model's positions)
---@return number
function Model:flops_per_token(seq)
  if seq ~= nil then caller.typed(seq, "number", self.family.model_type .. ": flops_per_token: the positions") end
  local cost = self:costs()
  return 6 * (self:num_parameters() - cost.looked_up) + 12 * cost.layers * cost.width * (seq or cost.positions)
end

exact.all(Model, "model:", true)

return Model
