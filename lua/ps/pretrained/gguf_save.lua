-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a model as a GGUF file. Names, row orders, metadata and general types are the same as in llama.cpp's
-- converter. Each tensor has the type that llama-quantize chooses for it. At most one tensor is in memory at a time.
local caller = require "ps.core.caller"
local agree = require "ps.dist.agree"
local native = require "ps.core.ffi"
local io_gguf = require "ps.io.gguf"
local names = require "ps.pretrained.gguf_names"
local packed = require "ps.nn.packed"
local rope = require "ps.pretrained.rope"
local save = require "ps.pretrained.save"
local settings = require "ps.pretrained.settings"
local verify = require "ps.pretrained.gguf_verify"
local vocabulary = require "ps.pretrained.gguf_vocabulary"
local writing = require "ps.io.gguf_write"
local floats = require "ps.core.array" "float"
local error = caller.error
local C = native.C

local gguf = {}

-- Maps each value of the option `type` to the type of most tensors in the file, and to llama.cpp's number for
-- the file type.
local TYPES = { f32 = { "F32", 0 }, f16 = { "F16", 1 }, bf16 = { "BF16", 32 }, q8_0 = { "Q8_0", 7 },
  q4_0 = { "Q4_0", 2 }, q4_k_m = { "Q4_K", 15 }, q6_k = { "Q6_K", 18 } }
local BLOCK = { Q8_0 = 32, Q4_0 = 32, Q5_0 = 32, Q4_K = 256, Q6_K = 256 }
local ALWAYS_F32 = { ["position_embd.weight"] = true, ["token_types.weight"] = true }

-- Returns whether llama-quantize's mixture of types uses more bits for this layer than for most layers. The layers with
-- more bits are the first eighth and the last eighth of the layers, and every third layer between these two groups.
local function more_bits(layer, layers)
  local eighth = math.floor(layers / 8)
  return layer < eighth or layer >= math.floor(7 * layers / 8) or (layer - eighth) % 3 == 2
end

-- Returns the type of one tensor in a file of type `kind`. `shape` is the tensor's shape in the file.
local function type_of(kind, name, shape, layer, layers, tied)
  local base = TYPES[kind][1]
  if #shape < 2 or name:match "_norm%.weight$" or not name:match "%.weight$" or ALWAYS_F32[name] then return "F32" end
  local block, row = BLOCK[base], shape[#shape]
  if not block then return base end
  if kind ~= "q8_0" then
    if name == "output.weight" or tied and name == "token_embd.weight" then
      base = row % block ~= 0 and "Q8_0" or "Q6_K"
    elseif kind == "q4_k_m" and (name:match "attn_v%.weight$" or name:match "attn_qkv%.weight$"
      or name:match "ffn_down%.weight$") and more_bits(layer, layers) then
      base = "Q6_K"
    end
  end
  if row % BLOCK[base] ~= 0 then base = packed.SMALLER[base] or "F16" end
  if BLOCK[base] and row % BLOCK[base] ~= 0 then base = "F16" end
  return base
end

-- Returns a parameter count as text for general.size_label, rounded as in llama.cpp, for example 135M or 1.2B.
local function size_label(n)
  local scale, suffix = 1e3, "K"
  if n > 1e12 then scale, suffix = 1e12, "T"
  elseif n > 1e9 then scale, suffix = 1e9, "B"
  elseif n > 1e6 then scale, suffix = 1e6, "M"
  end
  local whole = ("%.0f"):format(n / scale):gsub("^0+", "")
  return ("%." .. math.max(2 - #whole, 0) .. "f"):format(n / scale) .. suffix
end

local function decoder_entries(add, config, is_qwen2)
  local p = rope.parameters("save_gguf", config)
  local D = config.head_dim or config.hidden_size / config.num_attention_heads
  add("block_count", "uint32", config.num_hidden_layers)
  add("context_length", "uint32", config.max_position_embeddings)
  add("embedding_length", "uint32", config.hidden_size)
  add("feed_forward_length", "uint32", config.intermediate_size)
  add("attention.head_count", "uint32", config.num_attention_heads)
  add("attention.head_count_kv", "uint32", config.num_key_value_heads or config.num_attention_heads)
  if p.rope_type == "linear" or p.rope_type == "yarn" then
    add("rope.scaling.type", "string", p.rope_type)
    add("rope.scaling.factor", "float32", p.factor)
  end
  if p.rope_type == "yarn" then
    if p.attention_factor or p.mscale or p.mscale_all_dim or p.truncate == false then
      settings.refuse("save_gguf", "attention_factor", tostring(p.attention_factor or p.mscale), "llama.cpp's yarn has "
        .. "no such setting")
    end
    add("rope.scaling.original_context_length", "uint32", p.original_max_position_embeddings)
    if p.beta_fast then add("rope.scaling.yarn_beta_fast", "float32", p.beta_fast) end
    if p.beta_slow then add("rope.scaling.yarn_beta_slow", "float32", p.beta_slow) end
  elseif p.rope_type == "dynamic" then
    settings.refuse("save_gguf", "rope_type", "dynamic", "llama.cpp has no such rotary embedding")
  end
  add("rope.freq_base", "float32", p.rope_theta)
  add("attention.layer_norm_rms_epsilon", "float32", config.rms_norm_eps)
  if config.head_dim or not is_qwen2 then                  -- transformers' settings for Qwen 2 have no head_dim
    add("attention.key_length", "uint32", D)
    add("attention.value_length", "uint32", D)
  end
  return p, D
end

-- Returns the values of the tensor rope_freqs.weight, which divide the rotary frequencies. Returns nil if the model
-- needs no such tensor.
local function factors(p, D)
  if p.rope_type == "longrope" then
    if p.attention_factor ~= 1 then
      settings.refuse("save_gguf", "attention_factor", p.attention_factor, "llama.cpp has no such setting here")
    end
    return p.short_factor
  end
  return p.rope_type == "llama3" and rope.llama3_factors(p, p.rope_theta, D) or nil
end

-- Returns all metadata entries except the tokenizer's entries. Also returns the factors by which the rotary frequencies
-- are divided.
local function entries_of(model, arch_name, arch, kind, parameters, name)
  local config, entries = model.config, {}
  local function general(key, type, value) entries[#entries + 1] = { key, type, value } end
  local function add(key, type, value) general(arch_name .. "." .. key, type, value) end
  general("general.architecture", "string", arch_name)
  general("general.type", "string", "model")
  general("general.name", "string", name)
  general("general.size_label", "string", size_label(parameters))
  local list
  if arch.model_type == "gpt2" then
    add("block_count", "uint32", config.n_layer)
    add("context_length", "uint32", config.n_positions)
    add("embedding_length", "uint32", config.n_embd)
    add("feed_forward_length", "uint32", config.n_inner or 4 * config.n_embd)
    add("attention.head_count", "uint32", config.n_head)
    add("attention.layer_norm_epsilon", "float32", config.layer_norm_epsilon)
  elseif arch.model_type == "bert" then
    add("block_count", "uint32", config.num_hidden_layers)
    add("context_length", "uint32", config.max_position_embeddings)
    add("embedding_length", "uint32", config.hidden_size)
    add("feed_forward_length", "uint32", config.intermediate_size)
    add("attention.head_count", "uint32", config.num_attention_heads)
    add("attention.layer_norm_epsilon", "float32", config.layer_norm_eps)
    add("attention.causal", "bool", false)
  else
    local p, D = decoder_entries(add, config, arch_name == "qwen2")
    list = factors(p, D)
    if config.sliding_window and model.family.model_type == "mistral" then
      add("attention.sliding_window", "uint32", config.sliding_window)
    end
  end
  general("general.file_type", "uint32", TYPES[kind][2])
  if arch_name == "llama" then
    add("vocab_size", "uint32", config.vocab_size)
    add("rope.dimension_count", "uint32", config.head_dim or config.hidden_size / config.num_attention_heads)
  end
  general("general.quantization_version", "uint32", 2)
  return entries, list
end

-- Raises an error for settings that a GGUF file cannot represent.
local function check_model(model, arch)
  local config, fine = model.config, { llama = "silu", gpt2 = "gelu_new", bert = "gelu" }
  local key = arch.model_type == "gpt2" and "activation_function" or "hidden_act"
  local want = fine[arch.model_type] or "silu"
  local same = { gelu_new = { gelu_pytorch_tanh = true, gelu_fast = true } }
  if config[key] ~= want and not (same[want] and same[want][config[key]]) and not (want == "silu"
    and config[key] == "swish") then
    settings.refuse("save_gguf", key, config[key], ("llama.cpp has only %s in this architecture"):format(want))
  end
  if arch.model_type ~= "bert" and not model.generate then
    settings.refuse("save_gguf", "class", model.class_name, "only language models can be written")
  end
  if arch.model_type == "bert" and model.class_name ~= "BertModel" then
    settings.refuse("save_gguf", "class", model.class_name, "only BertModel can be written")
  end
end

-- Converts the entries of save.whole to tensors of the file: {name, type, shape, heads, transposed}. Returns a list of
-- these tensors, the same tensors indexed by the model's names, and the number of parameters.
local function declared(model, arch, entries, kind)
  local config, list, by_name, parameters = model.config, {}, {}, 0
  local layers = config.num_hidden_layers or config.n_layer
  local tied = true
  for _, entry in ipairs(entries) do tied = tied and names.to_gguf(arch, entry.name) ~= "output.weight" end
  for _, entry in ipairs(entries) do
    local own, rows, layer = names.to_gguf(arch, entry.name)
    if not own and not (arch.model_type == "bert" and entry.name:match "pooler%.") then
      error(("save_gguf: GGUF's architecture of %s has no tensor for '%s'"):format(model.class_name, entry.name))
    end
    if own then
      local shape = { unpack(entry.shape) }
      local one = { name = own, shape = shape, transposed = rows == "swapped", heads = names.heads(config, rows) }
      one.type = type_of(kind, own, one.transposed and { shape[2], shape[1] } or shape, layer, layers, tied)
      list[#list + 1], by_name[entry.name] = one, one
      parameters = parameters + entry.numel
    end
  end
  return list, by_name, parameters
end

-- Returns a name for general.name, made from the name of the model's folder or file. Words in lower case are
-- capitalized.
local function name_of(model, path)
  local words = {}
  for word in (model.source or path):gsub("/+$", ""):match "[^/]*$":gsub("%.gguf$", ""):gsub("%-", " "):gmatch "%S+" do
    if word:lower() == word and word:match "%l" and not word:match "^v?%d" then
      word = word:gsub("%a+", function(run) return run:sub(1, 1):upper() .. run:sub(2) end)
    end
    words[#words + 1] = word
  end
  return table.concat(words, " ")
end

-- Metadata keys that describe the file instead of its model, or that save_gguf computes.
local OF_FILE = {}
for _, key in ipairs { "architecture", "type", "size_label", "file_type", "quantization_version", "alignment" } do
  OF_FILE["general." .. key] = true
end

-- Returns the model's name in its GGUF file, or nil. Also returns the file's other general.* entries, such as the
-- license. The list is empty if the model was not loaded from a GGUF file.
local function described(model)
  local name, entries = nil, {}
  if not model.source or not io_gguf.is_path(model.source) then return name, entries end
  for _, one in ipairs(io_gguf.with(model.source, function(file) return io_gguf.entries(file, "^general%.") end)) do
    if one[1] == "general.name" then name = one[3]
    elseif not OF_FILE[one[1]] then entries[#entries + 1] = one
    end
  end
  return name, entries
end

local OPTIONS = { type = "string", name = "string", pre = "string", certified = "boolean" }

-- Checks the options and the model. Returns the options, the type, the architecture's name and the architecture.
local function begin(model, path, options)
  io_gguf.check_whole(caller.typed(path, "string", "save_gguf: the path"), "save_gguf")
  options = caller.options(options, "save_gguf", OPTIONS)
  local kind = options.type or "f16"
  caller.one_of(kind, TYPES, "save_gguf: type")
  local arch_name, arch = names.of_model_type(model.family.model_type)
  if not arch then
    settings.refuse("save_gguf", "model_type", model.family.model_type, "psluajit knows no GGUF architecture for it")
  end
  check_model(model, arch)
  return options, kind, arch_name, arch
end

--- Writes a model's tensors. All ranks call this function. An error on one rank is raised on all ranks, and no file
--- remains.
---@param model ps.pretrained.Model provides the settings and the tokenizer; its tensors may have no data
---@param all table[] the tensors, in the form of save.whole or save.folder
---@param path string
---@param given? table see gguf.save
---@param group? ps.Group
function gguf.write(model, all, path, given, group)
  local options, kind, arch_name, arch = begin(model, path, given)
  local list, by_name, parameters = declared(model, arch, all, kind)
  local title, more
  agree.run(group, function() title, more = described(model) end)
  local meta, stretched = entries_of(model, arch_name, arch, kind, parameters,
    options.name or title or name_of(model, path))
  for _, one in ipairs(more) do meta[#meta + 1] = one end
  local plain = #meta
  agree.run(group, function()
    local adds
    for _, one in ipairs(vocabulary.entries(model.source, model.config, options.pre)) do
      adds = adds or one[1] == "tokenizer.ggml.add_bos_token"
      meta[#meta + 1] = one
    end
    if arch_name == "llama" and #meta > plain and not adds and model.config.vocab_size == 49152 then
      meta[#meta + 1] = { "tokenizer.ggml.add_bos_token", "bool", false }
    end
  end)
  local found = #meta > plain
  for _, one in ipairs(options.certified and verify.entries() or {}) do meta[#meta + 1] = one end
  if not found then                                     -- llama.cpp's converter uses this name if there is no tokenizer
    meta[#meta + 1] = { "tokenizer.ggml.model", "string", "none" }
    if arch_name ~= "llama" then
      meta[#meta + 1] = { arch_name .. ".vocab_size", "uint32", model.config.vocab_size }
    end
    if not model.quiet and (not group or group:rank() == 0) then
      io.stderr:write(("save_gguf: %s has no tokenizer, so programs can run the file on token ids only\n"):format(
        model.source or "the model"))
    end
  end
  local kept = {}
  for _, entry in ipairs(all) do if by_name[entry.name] then kept[#kept + 1] = entry end end
  if stretched then
    table.insert(list, 1, { name = "rope_freqs.weight", type = "F32", shape = { #stretched } })
  end
  local dtypes = {}
  for _, entry in ipairs(kept) do dtypes[entry.name] = entry.dtype end
  save.write(path, kept, function()
    local writer = writing.open(path, meta, list)
    if stretched then
      writer:append("rope_freqs.weight", "fp32", floats(#stretched, stretched), #stretched)
    end
    local function append(_, name, data, nbytes)
      local dtype = dtypes[name]
      local each = tonumber(C.ps_dtype_size(native.dtype_code(dtype)))
      writer:append(by_name[name].name, dtype, data, tonumber(nbytes) / each)
    end
    return { append = append, commit = function() writer:commit() end, close = function() writer:close() end }
  end, group)
end

--- Writes a model. All ranks call this function. An error on one rank is raised on all ranks, and no file remains.
---@param model ps.pretrained.Model
---@param engine ps.Engine? the engine that holds the model
---@param path string
---@param given? {type?: string, name?: string, pre?: string, certified?: boolean} type: "f32", "f16", "bf16", "q8_0",
--- "q4_0", "q4_k_m" or "q6_k" (default "f16"). name: the value of general.name (default: made from the name of the
--- model's folder). pre: llama.cpp's name for the tokenizer's pre-tokenization rule. certified: whether to reserve the
--- metadata entries psluajit.verify.* for a certificate (ps/pretrained/gguf_verify.lua)
---@param change? fun(entries: table[]): table[] changes the list of tensors to write
function gguf.save(model, engine, path, given, change)
  local _, kind = begin(model, path, given)
  local whole = engine or model
  save.check_between_steps(whole, "save_gguf")
  local group = save.group_of(whole)
  agree.same(group, "save_gguf", { { "file", path }, { "type", kind } })
  agree.run(group, function() return save.entries(whole) end)          -- raises one rank's error on all ranks
  local all = save.whole(whole)
  gguf.write(model, change and change(all) or all, path, given, group)
end

return gguf
