-- SPDX-License-Identifier: BSD-3-Clause
-- Settings of Llama, Mistral, Qwen2 and Qwen3 by Hugging Face's names, for the checks of ps/pretrained/settings.lua.
-- The list contains all settings that configuration_*.py, modeling_*.py and modeling_rope_utils.py read in transformers
-- 5.23. In versions before 5, the rotary settings have the names rope_theta and rope_scaling.
local settings = require "ps.pretrained.settings"
local rope = require "ps.pretrained.rope"
local error = require("ps.caller").error

local LAYERS = { full_attention = true, sliding_attention = true }

-- Checks the kind of each layer. layer_types can have more entries than the model has layers, because a script can
-- request fewer layers.
local function check_layers(who, c)
  if not c.layer_types then return end
  local kept = {}
  for i = 1, c.num_hidden_layers do
    local kind = c.layer_types[i]
    if kind == nil then
      error(("%s: layer_types has %d entries, num_hidden_layers is %d: each layer needs one")
        :format(who, #c.layer_types, c.num_hidden_layers))
    end
    if not LAYERS[kind] then
      settings.refuse(who, "layer_types", kind, "use full_attention or sliding_attention")
    end
    if kind == "sliding_attention" and not (c.use_sliding_window and c.sliding_window) then
      settings.refuse(who, "layer_types", kind, "use_sliding_window and sliding_window turn the window off")
    end
    kept[i] = kind
  end
  c.layer_types = kept
end

-- Makes a script's rotary settings override the file's rotary settings. Both the script and the file can use the new or
-- the old names. A table of the script replaces the file's table. A rope_theta of the script replaces the file's
-- rope_theta. If the script's table has no rope_theta, the file's rope_theta is kept.
local function change(who)
  return function(given, changes)
    local kind, theta = changes.rope_scaling or changes.rope_parameters, changes.rope_theta
    if not kind and not theta then return changes end
    if changes.rope_scaling and changes.rope_parameters then
      error(who .. ": rope_scaling and rope_parameters are two names of one setting; give one of them")
    end
    if kind and kind.rope_theta and theta and theta ~= kind.rope_theta then
      error(("%s: rope_theta = %s, but %s in the table of rotary settings; give one of them"):format(who, theta,
        tostring(kind.rope_theta)))
    end
    local old, merged, all = given.rope_scaling or given.rope_parameters or {}, {}, {}
    for key, value in pairs(kind or old) do merged[key] = value end
    for key, value in pairs(changes) do all[key] = value end
    theta = theta or merged.rope_theta or type(old.rope_theta) == "number" and old.rope_theta or given.rope_theta
    local is_new = given.rope_parameters or changes.rope_parameters
    given.rope_scaling, given.rope_theta, merged.rope_theta = nil, nil, is_new and theta or nil
    all.rope_theta, all.rope_scaling, all.rope_parameters = nil, nil, nil
    if is_new then all.rope_parameters = merged else all.rope_theta, all.rope_scaling = theta, merged end
    return all
  end
end

local function check(who)
  return function(c)
    local groups = c.num_key_value_heads or c.num_attention_heads
    c.num_key_value_heads = groups  -- set explicitly, because the default in Qwen's files is 32
    if c.num_attention_heads % groups ~= 0 then
      error(("%s: num_key_value_heads = %d does not divide num_attention_heads = %d"):format(who, groups,
        c.num_attention_heads))
    end
    local D = c.head_dim or c.hidden_size / c.num_attention_heads
    if D % 2 ~= 0 then error(("%s: a head has %g columns; rotary embedding needs an even number"):format(who, D)) end
    if c.sliding_window and c.sliding_window < 1 then
      error(("%s: sliding_window = %g: use 1 or more"):format(who, c.sliding_window))
    end
    rope.parameters(who, c)
    check_layers(who, c)
  end
end

local function rules(model_type, defaults, optional, nullable, file_defaults)
  local all = {
    vocab_size = 32000, hidden_size = 4096, intermediate_size = 11008, num_hidden_layers = 32,
    num_attention_heads = 32, hidden_act = "silu", max_position_embeddings = 2048, initializer_range = 0.02,
    rms_norm_eps = 1e-6, tie_word_embeddings = false, attention_dropout = 0,
  }
  for key, value in pairs(defaults) do all[key] = value end
  local kinds = { num_key_value_heads = "whole", head_dim = "whole", pad_token_id = "whole", rope_theta = "number",
    rope_scaling = "table", rope_parameters = "table", partial_rotary_factor = "number",
    original_max_position_embeddings = "whole", classifier_dropout = "number", hidden_dropout = "number",
    token_classification_bias = "boolean" }
  for key, kind in pairs(optional or {}) do kinds[key] = kind end
  return settings.new {
    model_type = model_type, defaults = all, optional = kinds, nullable = nullable, file_defaults = file_defaults,
    sizes = { "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
      "max_position_embeddings", "num_key_value_heads", "head_dim" },
    shares = { "attention_dropout", "classifier_dropout", "hidden_dropout" },
    positive = { "rms_norm_eps", "initializer_range" },
    fixed = { model_type = { model_type, "another model" }, is_encoder_decoder = { false, "a model with an encoder" },
      add_cross_attention = { false, "attention to an encoder" },
      is_causal = { true, "attention to later positions" } },
    measures = {
      { "vocab_size", "embed_tokens.weight", 1 }, { "hidden_size", "embed_tokens.weight", 2 },
      { "intermediate_size", "layers.0.mlp.gate_proj.weight", 1 },
    },
    layer = "^layers%.(%d+)%.", check = check(model_type), change = change(model_type),
    activation = "hidden_act", width = "hidden_size", heads = "num_attention_heads", layers = "num_hidden_layers",
  }
end

local QWEN = { vocab_size = 151936, intermediate_size = 22016, max_position_embeddings = 32768,
  use_sliding_window = false, sliding_window = 4096, max_window_layers = 28 }
local QWEN3 = { head_dim = 128, attention_bias = false }
for key, value in pairs(QWEN) do QWEN3[key] = value end
local NULLABLE = { sliding_window = true, num_key_value_heads = true }
local QWEN_FILE = { num_key_value_heads = 32 }

return {
  llama = rules("llama", { attention_bias = false, mlp_bias = false }),
  mistral = rules("mistral", { intermediate_size = 14336, max_position_embeddings = 131072, num_key_value_heads = 8,
    sliding_window = 4096 }, nil, NULLABLE),
  qwen2 = rules("qwen2", QWEN, { layer_types = "table" }, NULLABLE, QWEN_FILE),
  qwen3 = rules("qwen3", QWEN3, { layer_types = "table" }, NULLABLE, QWEN_FILE),
}
