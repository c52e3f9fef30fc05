-- SPDX-License-Identifier: BSD-3-Clause
-- Architectures of GGUF files. For each architecture, tables map llama.cpp's metadata keys to Hugging Face's settings,
-- and llama.cpp's tensor names to Hugging Face's names. N in a name is the index of a layer.
local names = {}

---@class ps.gguf.Architecture
---@field model_types table<string, boolean> the model_types that are written as this architecture
---@field model_type string the model_type that files of this architecture get when they are read
---@field class string the class name for config.json's architectures
---@field prefix string the prefix of the body's parameter names in this class; a body without a head has no prefix
---@field keys table<string, string> maps a metadata key without the architecture's name to a setting
---@field tensors string[][] { GGUF's name, Hugging Face's name, row order: "heads", "groups" or "swapped" }
---@field optional table<string, boolean> keys that may be absent
---@field known table<string, boolean> keys that psluajit ignores because they have no effect

-- Metadata keys that every decoder has. DECODER has the keys that become settings. KNOWN has the keys without an
-- effect.
local DECODER = { context_length = "max_position_embeddings", embedding_length = "hidden_size",
  block_count = "num_hidden_layers", feed_forward_length = "intermediate_size",
  ["attention.head_count"] = "num_attention_heads", ["attention.head_count_kv"] = "num_key_value_heads",
  ["attention.layer_norm_rms_epsilon"] = "rms_norm_eps", ["rope.freq_base"] = "rope_theta" }
local DECODER_OPTIONAL = { ["attention.head_count_kv"] = true, ["rope.freq_base"] = true }
local DECODER_KNOWN = { vocab_size = true, ["rope.dimension_count"] = true, ["attention.key_length"] = true,
  ["attention.value_length"] = true, ["attention.sliding_window"] = true, ["rope.scaling.type"] = true,
  ["rope.scaling.factor"] = true, ["rope.scaling.original_context_length"] = true, ["rope.scaling.finetuned"] = true,
  ["rope.scaling.yarn_ext_factor"] = true, ["rope.scaling.yarn_attn_factor"] = true,
  ["rope.scaling.yarn_beta_fast"] = true, ["rope.scaling.yarn_beta_slow"] = true, ["rope.scaling.attn_factor"] = true,
  ["attention.causal"] = true, expert_count = true, expert_used_count = true }

local function decoder(rows)
  local list = {
    { "token_embd.weight", "model.embed_tokens.weight" }, { "output_norm.weight", "model.norm.weight" },
    { "output.weight", "lm_head.weight" },
    { "blk.N.attn_norm.weight", "model.layers.N.input_layernorm.weight" },
    { "blk.N.ffn_norm.weight", "model.layers.N.post_attention_layernorm.weight" },
  }
  for _, row in ipairs { { "attn_q", "self_attn.q_proj", rows and "heads" },
    { "attn_k", "self_attn.k_proj", rows and "groups" }, { "attn_v", "self_attn.v_proj" },
    { "attn_output", "self_attn.o_proj" }, { "ffn_gate", "mlp.gate_proj" }, { "ffn_up", "mlp.up_proj" },
    { "ffn_down", "mlp.down_proj" } } do
    for _, kind in ipairs { "weight", "bias" } do
      list[#list + 1] = { ("blk.N.%s.%s"):format(row[1], kind), ("model.layers.N.%s.%s"):format(row[2], kind), row[3] }
    end
  end
  list[#list + 1] = { "blk.N.attn_q_norm.weight", "model.layers.N.self_attn.q_norm.weight" }
  list[#list + 1] = { "blk.N.attn_k_norm.weight", "model.layers.N.self_attn.k_norm.weight" }
  return list
end

local function of_decoder(model_type, class, rows, more)
  local types = { [model_type] = true }
  for _, other in ipairs(more or {}) do types[other] = true end
  return { model_type = model_type, model_types = types, class = class, prefix = "model.", keys = DECODER,
    optional = DECODER_OPTIONAL, known = DECODER_KNOWN, tensors = decoder(rows) }
end

local function both(list, here, there, rows)
  list[#list + 1] = { here .. ".weight", there .. ".weight", rows }
  list[#list + 1] = { here .. ".bias", there .. ".bias" }
end

local GPT2 = { { "token_embd.weight", "transformer.wte.weight" },
  { "position_embd.weight", "transformer.wpe.weight" }, { "output.weight", "lm_head.weight" } }
both(GPT2, "output_norm", "transformer.ln_f")
both(GPT2, "blk.N.attn_norm", "transformer.h.N.ln_1")
both(GPT2, "blk.N.attn_qkv", "transformer.h.N.attn.c_attn", "swapped")
both(GPT2, "blk.N.attn_output", "transformer.h.N.attn.c_proj", "swapped")
both(GPT2, "blk.N.ffn_norm", "transformer.h.N.ln_2")
both(GPT2, "blk.N.ffn_up", "transformer.h.N.mlp.c_fc", "swapped")
both(GPT2, "blk.N.ffn_down", "transformer.h.N.mlp.c_proj", "swapped")

local BERT = { { "token_embd.weight", "bert.embeddings.word_embeddings.weight" },
  { "token_types.weight", "bert.embeddings.token_type_embeddings.weight" },
  { "position_embd.weight", "bert.embeddings.position_embeddings.weight" } }
both(BERT, "token_embd_norm", "bert.embeddings.LayerNorm")
for _, one in ipairs { "query", "key", "value" } do
  both(BERT, "blk.N.attn_" .. one:sub(1, 1), "bert.encoder.layer.N.attention.self." .. one)
end
both(BERT, "blk.N.attn_output", "bert.encoder.layer.N.attention.output.dense")
both(BERT, "blk.N.attn_output_norm", "bert.encoder.layer.N.attention.output.LayerNorm")
both(BERT, "blk.N.ffn_up", "bert.encoder.layer.N.intermediate.dense")
both(BERT, "blk.N.ffn_down", "bert.encoder.layer.N.output.dense")
both(BERT, "blk.N.layer_output_norm", "bert.encoder.layer.N.output.LayerNorm")

---@type table<string, ps.gguf.Architecture>
names.ARCHITECTURES = {
  llama = of_decoder("llama", "LlamaForCausalLM", true, { "mistral" }),
  qwen2 = of_decoder("qwen2", "Qwen2ForCausalLM", false),
  qwen3 = of_decoder("qwen3", "Qwen3ForCausalLM", false),
  gpt2 = { model_type = "gpt2", model_types = { gpt2 = true }, class = "GPT2LMHeadModel", prefix = "transformer.",
    keys = { context_length = "n_positions", embedding_length = "n_embd", block_count = "n_layer",
      feed_forward_length = "n_inner", ["attention.head_count"] = "n_head",
      ["attention.layer_norm_epsilon"] = "layer_norm_epsilon" }, optional = {},
    known = { vocab_size = true, ["attention.causal"] = true }, tensors = GPT2 },
  bert = { model_type = "bert", model_types = { bert = true }, class = "BertModel", prefix = "bert.",
    keys = { context_length = "max_position_embeddings", embedding_length = "hidden_size",
      block_count = "num_hidden_layers", feed_forward_length = "intermediate_size",
      ["attention.head_count"] = "num_attention_heads", ["attention.layer_norm_epsilon"] = "layer_norm_eps" },
    optional = {}, known = { vocab_size = true, ["attention.causal"] = true, pooling_type = true }, tensors = BERT },
}

--- Returns the architecture in which models with a given model_type are written.
---@param model_type string
---@return string? name
---@return ps.gguf.Architecture?
function names.of_model_type(model_type)
  for name, one in pairs(names.ARCHITECTURES) do
    if one.model_types[model_type] then return name, one end
  end
end

-- Returns the rows of an architecture's table `tensors`, indexed by GGUF's name (column 1) or by Hugging Face's name
-- (column 2). N replaces the layer's index in these names.
local function by_column(arch, column)
  arch.by = arch.by or {}
  if not arch.by[column] then
    local found = {}
    for _, row in ipairs(arch.tensors) do found[row[column]] = row end
    arch.by[column] = found
  end
  return arch.by[column]
end

local function translate(arch, name, from, to)
  local layer = from == 1 and name:match "^blk%.(%d+)%." or name:match "%.(%d+)%."
  local row = by_column(arch, from)[layer and name:gsub("%." .. layer .. "%.", ".N.", 1) or name]
  if not row then return nil end
  return layer and row[to]:gsub("%.N%.", "." .. layer .. ".", 1) or row[to], row[3], layer and tonumber(layer)
end

--- Returns Hugging Face's name for a GGUF tensor, or nil if the architecture has no such tensor.
---@param arch ps.gguf.Architecture
---@param name string
---@return string?
---@return "heads"|"groups"|"swapped"|nil rows
---@return integer? layer
function names.to_hf(arch, name) return translate(arch, name, 1, 2) end

--- If llama.cpp reorders the rows of a tensor within each head, returns the number of heads. Returns nil if llama.cpp
--- keeps the row order.
---@param settings table Hugging Face's settings of the model
---@param rows "heads"|"groups"|"swapped"|nil the row order that to_hf or to_gguf returned
---@return integer?
function names.heads(settings, rows)
  if rows == "heads" then return settings.num_attention_heads end
  if rows == "groups" then return settings.num_key_value_heads or settings.num_attention_heads end
end

--- Returns GGUF's name for a Hugging Face tensor, or nil if the architecture has no such tensor. `name` may lack the
--- body's prefix.
---@param arch ps.gguf.Architecture
---@param name string
---@return string?
---@return "heads"|"groups"|"swapped"|nil rows
---@return integer? layer
function names.to_gguf(arch, name)
  local found, rows, layer = translate(arch, name, 2, 1)
  if found then return found, rows, layer end
  return translate(arch, arch.prefix .. name, 2, 1)
end

return names
