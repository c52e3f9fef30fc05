-- SPDX-License-Identifier: BSD-3-Clause
-- The base class of models of Hugging Face's kinds: a configuration; names of parameters in files (older ones, with and
-- without the body's prefix, tied ones); loading that reports the tensors it used and those it skipped; saving;
-- resizing of vocabularies; costs.
--
-- A family's file (models/bert.lua) derives its classes from this one and sets these fields on each class:
--   family      the result of ps.pretrained.family: model_type, settings, ...
--   base        the prefix of the body's names in files of models with a head ("bert")
--   prefix      the field that holds the body; nil: the class is the body itself
--   body        the first parts of the body's names, { embeddings = true, ... }
--   spare       patterns of body names that a file or a class may lack, such as a pooler's
--   inputs      the allowed names of a named batch: name -> "tensor"
--   ties        file name -> name here, for tensors that are shared while tie_word_embeddings holds
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local handle = require "ps.nn.handle"
local caller = require "ps.core.caller"
local copied = require "ps.core.copied"
local nn_module = require "ps.nn.module"
local packed = require "ps.nn.packed"
local sharded = require "ps.nn.sharded"
local init = require "ps.nn.weights"
local registry = require "ps.nn.registry"
local files_of = require "ps.pretrained.files"
local folder = require "ps.pretrained.folder"
local parallel = require "ps.pretrained.parallel"
local save = require "ps.pretrained.save"
local weights = require "ps.pretrained.weights"
local error = caller.error

---@class ps.pretrained.Model: ps.nn.Module
---@field config table
---@field source? string the folder from which it was loaded
---@field loaded? {missing: string[], left: string[], names: table<string, string>} parameters that the files lack,
---  tensors of the files that are not used, and for the others the parameter's name by the file's name
local Model = nn_module.class("PretrainedModel")

-- Inputs that have a row for each sample, by which a batch is cut into micro-batches; "rows or one": all samples may
-- share one row (ps/data/batch.lua). Each micro-batch gets the whole of any other input.
Model.split_inputs = { input_ids = "rows", attention_mask = "rows", labels = "rows", start_positions = "rows",
  end_positions = "rows", segment_ids = "rows", loss_weights = "rows",
  token_type_ids = "rows or one", position_ids = "rows or one" }

-- The names and shapes of all saved tensors, "h.0.attn.c_attn.weight" -> "96, 288"; whole shapes if ranks share a
-- tensor.
local function layout_of(self)
  local layout = {}
  for name, tensor in pairs(self:state_dict { tied = false }) do
    layout[name] = table.concat(sharded.shape(tensor), ", ")
  end
  return layout
end

-- Notes the layout that a class makes from its configuration, which is the one that transformers makes from
-- config.json.
local function note_layout(self) rawset(self, "_layout", layout_of(self)) end
nn_module.adapt(Model, function(class) class.instance.ps_made = note_layout end)

local WHERE = { dtype = "string", device = "string", recompute = "boolean" }
local UNPADS = { dtype = "string", device = "string", recompute = "boolean", unpad = "boolean" }

--- Begins a class's init: checks and completes the configuration.
---@param config table config.json's fields; missing ones have the family's defaults
---@param given? {dtype?: string, device?: string, recompute?: boolean, unpad?: boolean} unpad: only for families with
---  unpads = true
---@return table full
---@return {dtype: string?, device: string?, std: number} where for layers
function Model:begin(config, given)
  local who = self.family.model_type
  given = caller.options(given, who, self.family.unpads and UNPADS or WHERE)
  caller.typed(config, "table", who .. ": the configuration")
  local full = self.family.settings:complete(config)
  self.config = full
  return full, { dtype = given.dtype, device = given.device, std = full.initializer_range }
end

-- -- loading --------------------------------------------------------------------------------------------------------
--- Loads weights from files (safetensors, or PyTorch's pytorch_model.bin), with or without the body's prefix before
--- names, one tensor at a time. A tensor of the body that is missing, or has another shape, is an error. Parameters of
--- a head that the files lack keep their values, and a note names them and the files' unused tensors of other heads.
---@param ... string paths
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
-- The arguments of save_pretrained or save_parallelized: the folder, the options, and the engine that holds the model,
-- if one passed itself. The folder may be in the options, as save_directory.
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

-- Refuses to save a model whose layers were replaced by others: config.json would describe tensors that do not exist,
-- and readers would initialize them.
local function check_layout(self, call)
  for _, module in self:named_modules() do
    packed.refuse(module, call, "load the model without keep_quantized, or convert its file (tools/gguf.lua convert)")
  end
  if not self._layout then return end                        -- not made by its class: there is nothing to compare with
  local layout, lost, new, other = layout_of(self), {}, {}, {}
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

--- Writes config.json and the weights in the form that from_pretrained and Hugging Face read, with the tokenizer's
--- files and generation_config.json of the folder from which the model was loaded. With an engine, rank 0 writes the
--- fp32 values (masters), and all ranks call it. Of a model with adapters (ps.lora) it writes the active adapter, as
--- PEFT does.
---@param path string|{save_directory: string} the folder, also by name among the options
---@param options? {max_shard_size?: integer|string, adapter?: string, merged?: boolean}|ps.Engine the most bytes per
---  file ("5GB"), default 50 GB; adapter: another adapter than the active one; merged: the whole model with the active
---  adapter in its weights; the engine that holds this model passes itself, followed by options
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
  check_layout(self, "save_pretrained")
  save.run(engine or self, path, function(dtype)
    return self.family.settings:to_file(self.config, self.class_name, dtype)
  end, { max_shard_size = options.max_shard_size, source = self.source })
end

--- Writes the model as a GGUF file for llama.cpp, with the tokenizer and chat template of the folder or file from
--- which it was loaded (docs/gguf.md). One tensor is in memory at a time. With an engine, these are the fp32 values
--- (masters), and all ranks call it.
---@param path string
---@param options? {type?: string, name?: string, pre?: string, merged?: boolean, adapter?: boolean|string}|ps.Engine
---  type: "f32", "f16" (default), "bf16", "q8_0", "q6_k", "q4_k_m" or "q4_0"; name: general.name, default that of the
---  model's folder; pre: llama.cpp's name of the rule by which the tokenizer cuts texts; merged: of a model with
---  adapters (ps.lora), the model with the active adapter in its weights; adapter: true or a name, that adapter alone,
---  as "f32" (default), "f16" or "bf16"; the engine that holds this model passes itself, followed by options
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

--- Like OSLO's: writes the folder of a model that several ranks share, with a file pytorch_model_tp_I_pp_J.bin for each
--- rank I of tensor parallelism and each stage J; all ranks call it. With an engine, these are the fp32 values
--- (masters). It may be called between backward and step; gradients are kept.
---@param path string|{save_directory: string} a folder, which is replaced as a whole; also by name among the options
---@param options? {merge_checkpoints?: boolean}|ps.Engine merge_checkpoints: writes one file, pytorch_model.bin,
---  instead; the engine that holds this model passes itself, followed by options
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

--- Loads the weights of a folder from save_parallelized, on any number of ranks and with any cut of the model; or those
--- of OSLO's folder, if its model was cut only into stages.
---@param path string
---@return ps.pretrained.Model self
function Model:from_parallelized(path)
  caller.typed(path, "string", "from_parallelized: the folder")
  return self:load_weights(unpack(folder.files(path)))
end

-- -- vocabulary -----------------------------------------------------------------------------------------------------
-- Replaces a tensor by one of n rows: copies the existing rows, as far as they fit, and initializes new rows by
-- `fill`.
local function resize(owner, key, n, fill)
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
  nn_module.replaced(old, key)
  owner:param(key, new)
  if not trains then new:requires_grad(false) end
end

--- Changes the token table, and a head over the vocabulary, to n rows: existing rows stay, new ones are normal with
--- initializer_range, new biases are 0. Make the engine or optimizer afterwards.
---@param n integer words
---@return ps.pretrained.Model self
function Model:resize_token_embeddings(n)
  caller.whole(n, "resize_token_embeddings: the number of words", 1)
  local config, std = {}, self.config.initializer_range
  for key, value in pairs(self.config) do config[key] = value end
  config.vocab_size = n
  config = self.family.settings:complete(config)
  local function normal(t) init.normal_(t, 0, std) end
  for _, entry in ipairs(self:vocabulary()) do
    local owner, key = entry[1], entry[2]
    resize(owner, key, n, key == "bias" and init.zeros_ or normal)
    if owner.class_name == "Embedding" then owner.rows = n elseif owner.outputs then owner.outputs = n end
  end
  local head = rawget(self, "tied_head")                   -- a head tied to the token table has its weight
  if head then head.outputs = n end
  for _, module in self:named_modules() do if module.config then module.config = config end end
  note_layout(self)
  return self
end

--- The arguments of a call, as tensors without data, with which the costs of parts are counted.
---@param rows integer
---@param positions integer the number of positions; at most those of the model
---@return {input_ids: ps.Tensor} batch
function Model:example(rows, positions)
  local shape = { rows, math.min(positions, self:costs().positions) }
  return { input_ids = create.empty(shape, { dtype = "int64", device = "meta" }) }
end

-- -- costs ----------------------------------------------------------------------------------------------------------
--- Floating-point operations of training per token: 6 for each weight that multiplies (tables only look up; a token
--- table that is also the head counts once) plus 12 L C T for attention over T positions.
---@param seq? integer T, default the model's positions
---@return number
function Model:flops_per_token(seq)
  if seq ~= nil then caller.typed(seq, "number", self.family.model_type .. ": flops_per_token: the positions") end
  local cost = self:costs()
  return 6 * (self:num_parameters() - cost.looked_up) + 12 * cost.layers * cost.width * (seq or cost.positions)
end

return Model
