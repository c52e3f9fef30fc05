-- SPDX-License-Identifier: BSD-3-Clause
-- Reads and writes adapters in llama.cpp's GGUF files. Each adapted weight has two tensors, whose names are the
-- weight's name with a suffix:
--   .lora_a   [r, in], or [rows, r] for the token table
--   .lora_b   [out, r], with the row order of the base model's file
-- The file has a single alpha, and llama.cpp scales each layer by alpha / r. If the adapter scales a layer by another
-- number, the layer's .lora_b is multiplied by this number divided by alpha / r.
local create = require "ps.tensor.create"
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local io_gguf = require "ps.io.gguf"
local names = require "ps.pretrained.gguf_names"
local floats = require "ps.core.array" "float"
local pretrained_save = require "ps.pretrained.save"
local scope = require "ps.core.scope"
local settings = require "ps.pretrained.settings"
local writing = require "ps.io.gguf_write"
local C = native.C
local error = caller.error

local gguf = {}

local TYPES = { f32 = "F32", f16 = "F16", bf16 = "BF16" }
local BASE_KEY = "psluajit.base"                           -- metadata key for the fingerprint of the base model

local function refuse(key, value, why) settings.refuse("a GGUF adapter", key, value, why) end

-- Returns the architecture of a model.
local function arch_of(model)
  local model_type = model.family and model.family.model_type
  local name, arch = names.of_model_type(model_type)
  if not arch then refuse("model_type", model_type or model.class_name, "GGUF has no architecture for it") end
  return arch, name
end

-- -- writing ----------------------------------------------------------------------------------------------------------
-- Raises an error for adapters that llama.cpp cannot apply.
local function check_spec(adapters, spec)
  if spec.use_dora then refuse("use_dora", "true", "llama.cpp has no DoRA; write the merged model instead") end
  if spec.bias ~= "none" then refuse("bias", spec.bias, "llama.cpp has no trained biases; write the merged model") end
  for _, entry in ipairs(adapters.saved) do
    refuse("modules_to_save", entry.name, "llama.cpp has no modules that are trained in full; write the merged "
      .. "model")
  end
end

-- Returns the file's alpha, and for each layer the factor by which the layer's B is multiplied.
local function scales(adapters, name, spec)
  local alpha, factors = nil, {}
  for _, entry in ipairs(adapters.layers) do
    local one = entry.module.lora_.adapters[name]
    if one then
      local own = one.scale * one.r
      if not alpha then alpha = own ~= 0 and own or spec.r end
      factors[entry.name] = math.abs(own - alpha) < 1e-9 * math.abs(alpha) and 1 or own / alpha
    end
  end
  return alpha, factors
end

-- Describes how the tensor `name` (PEFT's name without its prefix) is stored in the file. Returns a table:
--   name         the tensor's name in the file
--   layer        the name of the tensor's layer
--   is_b         whether the tensor is B
--   heads        the number of heads if the file reorders the rows of each head, otherwise nil
--   transposed   whether the tensor is transposed in the file
local function place(arch, config, name)
  local layer, table_part = name:match "^(.*)%.lora_embedding_([AB])$", name:match "%.lora_embedding_([AB])$"
  if not layer then layer = name:match "^(.*)%.lora_[AB]%.weight$" end
  local part = table_part or name:match "%.lora_([AB])%.weight$"
  local own, rows = names.to_gguf(arch, layer .. ".weight")
  if not own or table_part and own ~= "token_embd.weight" then
    refuse("target_modules", layer, "llama.cpp applies no adapter to it")
  end
  if table_part and config.tie_word_embeddings then
    refuse("target_modules", layer, "its weight is also the head's, and llama.cpp would apply the adapter to both")
  end
  return { name = own .. (part == "A" and ".lora_a" or ".lora_b"), layer = layer, is_b = part == "B",
    heads = part == "B" and names.heads(config, rows) or nil, transposed = table_part == "A" }
end

-- Returns n values multiplied by a factor, as an fp32 buffer.
local function times(dtype, data, n, factor)
  return scope.no_grad(scope.scope, function()
    local t = create.empty({ n }, { dtype = dtype, device = "cpu" })
    native.check(C.ps_tensor_write(t, data, t:nbytes()))
    t = t:to("fp32") * factor
    local buffer = floats(n)
    native.check(C.ps_tensor_read(t, buffer, t:nbytes()))
    return buffer
  end)
end

--- Writes an adapter. All ranks of the group call this function.
---@param path string
---@param model ps.pretrained.Model
---@param adapters ps.lora.Adapters
---@param name string the adapter's name
---@param entries table[] entries in the form of ps.pretrained.save, with PEFT's names without their prefix, sorted by
--- name
---@param options {type?: string, name?: string, base?: string} type: the type of the matrices, "f32" (default), "f16"
--- or "bf16"; name: the value of general.name; base: the fingerprint of the base model
---@param group? ps.Group
function gguf.write(path, model, adapters, name, entries, options, group)
  io_gguf.check_whole(path, "save_gguf")
  local kind = caller.one_of(options.type or "f32", TYPES, "save_gguf: type of an adapter")         -- "F32", ...
  local spec, arch, arch_name = adapters.specs[name], arch_of(model)
  check_spec(adapters, spec)
  local alpha, factors = scales(adapters, name, spec)
  local meta = { { "general.architecture", "string", arch_name }, { "general.type", "string", "adapter" },
    { "adapter.type", "string", "lora" },
    { "general.name", "string", options.name or path:match "[^/]*$":gsub("%.gguf$", "") },
    { "adapter.lora.alpha", "float32", alpha }, { "general.quantization_version", "uint32", 2 } }
  if options.base then meta[#meta + 1] = { BASE_KEY, "string", options.base } end
  local list, places, dtypes = {}, {}, {}
  for i, entry in ipairs(entries) do
    local at = place(arch, model.config, entry.name)
    places[entry.name], dtypes[entry.name] = at, entry.dtype
    list[i] = { name = at.name, type = kind, shape = entry.shape, heads = at.heads, transposed = at.transposed }
  end
  pretrained_save.write(path, entries, function()
    local writer = writing.open(path, meta, list)
    local function append(_, own, data, nbytes)
      local at, dtype = places[own], dtypes[own]
      local factor = at.is_b and factors[at.layer] or 1
      local n = tonumber(nbytes) / tonumber(C.ps_dtype_size(native.dtype_code(dtype)))
      if factor == 1 then return writer:append(at.name, dtype, data, n) end
      writer:append(at.name, "fp32", times(dtype, data, n, factor), n)
    end
    return { append = append, commit = function() writer:commit() end, close = function() writer:close() end }
  end, group)
end

-- -- reading ----------------------------------------------------------------------------------------------------------
local function check_kind(file, model)
  local arch, name = arch_of(model)
  local given = file:get("general.architecture", "string", true)
  for _, row in ipairs { { "general.type", "adapter" }, { "adapter.type", "lora" } } do
    local has = file:get(row[1], "string", true)
    if has ~= row[2] then settings.refuse(file.path, row[1], has, ("it must be %s"):format(row[2])) end
  end
  if given ~= name then
    settings.refuse(file.path, "general.architecture", given, ("the model is %s; load the adapter's base model")
      :format(name))
  end
  for _, key in ipairs(file:keys()) do
    if key:match "^adapter%." and key ~= "adapter.type" and key ~= "adapter.lora.alpha" then
      settings.refuse(file.path, key, tostring(file:meta(key)), "it is not supported")
    end
  end
  return arch
end

-- Renames the tensors to PEFT's names. Returns the rank of each layer, by the layer's name.
local function present(file, model, arch, prefix)
  local ranks = {}
  for _, raw in ipairs(file:names()) do
    local weight, part = raw:match "^(.*)%.lora_([ab])$"
    local own, rows = names.to_hf(arch, weight or raw)
    if not weight or not own or not own:find "%.weight$" then
      settings.refuse(file.path, "tensor", raw, "the model has no such tensor")
    end
    local layer, is_table = own:gsub("%.weight$", ""), weight == "token_embd.weight"
    local shape, is_b = file:shape(raw), part == "b"
    if #shape ~= 2 then settings.refuse(file.path, "tensor", raw, "it must be a matrix") end
    if is_b then ranks[layer] = shape[2] end
    file:present(raw, prefix .. layer .. (is_table and ".lora_embedding_" or ".lora_") .. part:upper()
      .. (is_table and "" or ".weight"),
      { heads = is_b and names.heads(model.config, rows) or nil, transposed = is_table and not is_b })
  end
  return ranks
end

--- Opens a file as an adapter of a model. Returns the adapter's settings, and the file with its tensors under PEFT's
--- names.
---@param path string
---@param model ps.pretrained.Model
---@param prefix string the prefix of PEFT's names
---@return ps.lora.Spec spec
---@return ps.Gguf file
---@return string? base the fingerprint of the base model
function gguf.open(path, model, prefix)
  local file = io_gguf.open(path)
  local ok, spec, base = pcall(function()
    local ranks = present(file, model, check_kind(file, model), prefix)
    local layers = caller.sorted_names(ranks)
    if #layers == 0 then error(("%s: it has no tensor that ends with .lora_b"):format(path), 0) end
    local alpha, r = file:get("adapter.lora.alpha", "number") or 0, ranks[layers[1]]
    local patterns, alphas = {}, nil
    for _, layer in ipairs(layers) do
      if ranks[layer] ~= r then patterns[layer:gsub("%.", "\\.")] = ranks[layer] end
    end
    if alpha == 0 then alpha, alphas = r, patterns end     -- as in llama.cpp, alpha 0 means a scale of 1
    return { r = r, alpha = alpha, dropout = 0, targets = layers, use_rslora = false, use_dora = false, bias = "none",
      init = true, rank_pattern = patterns, alpha_pattern = alphas, from_file = true, whole_names = true },
      file:get(BASE_KEY, "string")
  end)
  if ok then return spec, file, base end
  file:close()
  error(spec, 0)
end

--- Returns whether a path is the path of a GGUF file.
gguf.is_path = io_gguf.is_path

return gguf
