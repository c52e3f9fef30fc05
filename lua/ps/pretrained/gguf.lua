-- SPDX-License-Identifier: BSD-3-Clause
-- Models in GGUF files. A GGUF file is used like a Hugging Face folder. Its metadata becomes the fields of a
-- config.json. Its tensors get Hugging Face's names, layouts and row orders (gguf_names.lua).
local caller = require "ps.core.caller"
local companions = require "ps.pretrained.gguf_companions"
local ffi = require "ffi"
local io_gguf = require "ps.io.gguf"
local gguf_tokenizer = require "ps.pretrained.gguf_tokenizer"
local names = require "ps.pretrained.gguf_names"
local rope = require "ps.pretrained.rope"
local settings = require "ps.pretrained.settings"
local error = caller.error

local gguf = {}

--- Returns the shortest decimal number that rounds to an fp32 value: 1e-05 instead of 9.9999997473788e-06.
---@param value number
---@return number
function gguf.shortest(value)
  for digits = 6, 9 do
    local short = tonumber(("%." .. digits .. "g"):format(value))
    if tonumber(ffi.cast("float", short)) == value then return short end
  end
  return value
end

--- Returns whether a path is an existing GGUF file.
---@param path string
---@return boolean
function gguf.is(path) return io_gguf.is_path(path) and require("lfs").attributes(path, "mode") == "file" end

local function refuse(file, key, value, why) settings.refuse(file.path, key, value, why) end

--- Returns the architecture of an open file.
---@param file ps.Gguf
---@return ps.gguf.Architecture
---@return string name
function gguf.architecture(file)
  local name = file:get("general.architecture", "string", true)
  local arch = names.ARCHITECTURES[name]
  if not arch then
    refuse(file, "general.architecture", name, settings.supported(names.ARCHITECTURES))
  end
  local kind = file:get("general.type", "string")
  if kind and kind ~= "model" then
    refuse(file, "general.type", kind, kind == "adapter" and "load its base model, then ps.lora.load(model, file)"
      or "only models are read")
  end
  return arch, name
end

-- Raises an error for the architecture's metadata keys that psluajit does not support. These keys could change the
-- model's results.
local function check_keys(file, arch, name)
  for _, key in ipairs(file:keys()) do
    local own = key:match("^" .. name .. "%.(.*)$")
    if own and not arch.keys[own] and not arch.known[own] then
      local value = file:meta(key)
      refuse(file, key, value, "this setting is not supported")
    end
  end
  for key, value in pairs { expert_count = 0, ["attention.causal"] = arch.class ~= "BertModel" } do
    local given = file:meta(name .. "." .. key)
    if given ~= nil and given ~= value then
      refuse(file, name .. "." .. key, given, ("only %s is supported"):format(tostring(value)))
    end
  end
end

local function nearly(a, b)
  local same = #a == #b
  for i = 1, #a do same = same and math.abs(a[i] - b[i]) <= 1e-5 * math.abs(b[i]) end
  return same
end

-- Returns the rotary settings that correspond to the tensor rope_freqs.weight. The frequencies are divided by the
-- tensor's elements. If these elements are Llama 3's factors, rope_type is llama3. Otherwise rope_type is longrope, and
-- its lists short_factor and long_factor both contain the elements.
local function of_factors(file, fields, D)
  local list = file:tensor("rope_freqs.weight"):to("fp32"):tolist()
  if #list ~= D / 2 then
    refuse(file, "rope_freqs.weight", #list, ("a head of %d columns has %d pairs"):format(D, D / 2))
  end
  local largest = 1
  for _, one in ipairs(list) do largest = math.max(largest, one) end
  local p = { rope_type = "llama3", factor = largest, low_freq_factor = 1, high_freq_factor = 4,
    original_max_position_embeddings = 8192 }
  if largest > 1 and nearly(list, rope.llama3_factors(p, fields.rope_theta or 10000, D)) then return p end
  return { rope_type = "longrope", short_factor = list, long_factor = list, attention_factor = 1, factor = 1,
    original_max_position_embeddings = fields.max_position_embeddings }
end

-- Returns the rotary settings other than rope_theta, or nil if there are none.
local function rotary(file, name, fields, D)
  local function at(key, kind) return file:get(name .. ".rope.scaling." .. key, kind) end
  local kind, factor = at("type", "string"), at("factor", "number")
  if file:has "rope_freqs.weight" then
    if kind and kind ~= "none" then refuse(file, name .. ".rope.scaling.type", kind, "with rope_freqs.weight") end
    return of_factors(file, fields, D)
  end
  if not kind or kind == "none" then return nil end
  if kind ~= "linear" and kind ~= "yarn" then
    refuse(file, name .. ".rope.scaling.type", kind, "only linear, none and yarn are supported")
  end
  factor = gguf.shortest(factor or 1)
  if kind == "linear" then return { rope_type = "linear", factor = factor } end
  local function short(key) return at(key, "number") and gguf.shortest(at(key, "number")) end
  local extrapolation = short "yarn_ext_factor"
  if extrapolation and extrapolation ~= 1 and extrapolation ~= -1 then
    refuse(file, name .. ".rope.scaling.yarn_ext_factor", extrapolation, "only 1 is supported")
  end
  local attention = short "yarn_attn_factor"
  if attention and attention ~= 1 then
    refuse(file, name .. ".rope.scaling.yarn_attn_factor", attention, "only 1 is supported")
  end
  return { rope_type = "yarn", factor = factor, beta_fast = short "yarn_beta_fast", beta_slow = short "yarn_beta_slow",
    original_max_position_embeddings = at("original_context_length", "whole") }
end

local IDS = { bos = "bos_token_id", padding = "pad_token_id" }
-- Tokens that end a turn. Like llama.cpp, psluajit stops generation after these tokens, even if they are not in the
-- file's list of end tokens.
local TURNS = { ["<|eot_id|>"] = true, ["<|im_end|>"] = true, ["<|end|>"] = true, ["<end_of_turn>"] = true,
  ["<|endoftext|>"] = true, ["<|eom_id|>"] = true, ["<EOT>"] = true, ["_<EOT>"] = true }
local CONTROL = 3

-- Returns the ids that end a text: a number if there is one id, or a list if there are several ids. Returns nil if the
-- file defines no such id.
local function ends_of(file, vocabulary)
  local list, seen = {}, {}
  local function add(id)
    if id and id < vocabulary and not seen[id] then seen[id], list[#list + 1] = true, id end
  end
  for _, key in ipairs { "eos", "eot", "eom" } do add(file:get(("tokenizer.ggml.%s_token_id"):format(key), "whole")) end
  if file:get("tokenizer.ggml.model", "string") == "gpt2" then
    local tokens, types = file:get("tokenizer.ggml.tokens", "strings") or {},
      file:get("tokenizer.ggml.token_type", "numbers") or {}
    for i, kind in ipairs(types) do if kind == CONTROL and TURNS[tokens[i]] then add(i - 1) end end
  end
  return #list > 1 and list or list[1]
end

-- Adds the decoder settings that depend on more than one key.
local function of_decoder(file, arch, name, fields)
  local heads, width = fields.num_attention_heads, fields.hidden_size
  local D = file:get(name .. ".attention.key_length", "whole")
  local values, turned = file:get(name .. ".attention.value_length", "whole"),
    file:get(name .. ".rope.dimension_count", "whole")
  if D then fields.head_dim = D end
  D = D or width / heads
  if values and values ~= D then
    refuse(file, name .. ".attention.value_length", values, ("keys have %g columns"):format(D))
  end
  if turned and turned ~= D then
    refuse(file, name .. ".rope.dimension_count", turned,
      ("a head has %g columns, and rotary embedding of a part of a head is not supported"):format(D))
  end
  fields.rope_scaling = rotary(file, name, fields, D)
  local window = file:get(name .. ".attention.sliding_window", "whole")
  if window and window > 0 then
    if arch.model_type ~= "llama" then
      refuse(file, name .. ".attention.sliding_window", window, "this is supported only for llama")
    end
    fields.model_type, fields.sliding_window, fields.architectures = "mistral", window, { "MistralForCausalLM" }
  end
  local bias = file:has "blk.0.attn_q.bias"
  if arch.model_type ~= "qwen2" and fields.model_type ~= "mistral" then fields.attention_bias = bias end
  if arch.model_type == "llama" and fields.model_type == "llama" then
    fields.mlp_bias = file:has "blk.0.ffn_up.bias"
  end
end

-- Returns the fields of a config.json without eos_token_id, because that field depends on all tokens of the file.
local function model_fields(file)
  local arch, name = gguf.architecture(file)
  check_keys(file, arch, name)
  local fields = { model_type = arch.model_type, architectures = { arch.class } }
  for _, key in ipairs(caller.sorted_names(arch.keys)) do
    local setting = arch.keys[key]
    local value = file:get(name .. "." .. key, "number", not arch.optional[key])
    if value then fields[setting] = value % 1 == 0 and value or gguf.shortest(value) end
  end
  local table_name = "token_embd.weight"
  if not file:has(table_name) then error(("%s: it has no tensor '%s'"):format(file.path, table_name)) end
  fields.vocab_size = file:shape(table_name)[1]
  for key, setting in pairs(IDS) do
    local id = file:get(("tokenizer.ggml.%s_token_id"):format(key), "whole")
    if id and id < fields.vocab_size then fields[setting] = id end
  end
  if arch.class ~= "BertModel" then fields.tie_word_embeddings = not file:has "output.weight" end
  if arch.model_type == "gpt2" then
    fields.activation_function = "gelu_new"
  elseif arch.model_type == "bert" then
    local kind = gguf_tokenizer.kind(file)
    if kind and kind ~= "bert" then
      refuse(file, "tokenizer.ggml.model", kind, "architecture bert is supported only with the tokenizer bert")
    end
    fields.hidden_act = "gelu"
    if file:has "token_types.weight" then fields.type_vocab_size = file:shape("token_types.weight")[1] end
    if fields.pad_token_id == nil then fields.pad_token_id = 0 end
  else
    of_decoder(file, arch, name, fields)
  end
  return fields
end

--- Returns the contents of a config.json that describes an open file's model.
---@param file ps.Gguf
---@return table
function gguf.fields(file)
  local fields = model_fields(file)
  fields.eos_token_id = ends_of(file, fields.vocab_size)
  return fields
end

-- Renames the tensors to Hugging Face's names. Raises an error for an unknown tensor, because the model's results would
-- be wrong without this tensor.
local function present(file, arch, fields)
  for _, raw in ipairs(file:names()) do
    local own, rows = names.to_hf(arch, raw)
    local layout = rows and { transposed = rows == "swapped" or nil, heads = names.heads(fields, rows) }
    if not own and raw ~= "rope_freqs.weight" then
      refuse(file, "tensor", raw, "psluajit does not support this tensor in this architecture")
    end
    file:present(raw, own, layout)
  end
end

--- Returns the contents of a config.json that describes a file's model.
---@param path string
---@return table
function gguf.config(path) return io_gguf.with(path, gguf.fields) end

--- Opens a file whose tensors have the names, layouts and row orders of a Hugging Face folder.
---@param path string
---@param mmap? boolean the option mmap of ps.load
---@return ps.Gguf
function gguf.open(path, mmap)
  local file = io_gguf.open(path, { mmap = mmap or false })
  local ok, problem = pcall(function() present(file, (gguf.architecture(file)), model_fields(file)) end)
  if ok then return file end
  file:close()
  return error(problem, 0)
end

--- Writes a GGUF file's tokenizer and generation settings to a folder in Hugging Face's formats. Files that the folder
--- already has are kept.
---@param from string
---@param to string
function gguf.write_companions(from, to) companions.write(from, to, gguf.config(from)) end

return gguf
