-- SPDX-License-Identifier: BSD-3-Clause
-- Settings of BERT and RoBERTa by Hugging Face's names, for the checks of ps/pretrained/settings.lua. BERT and RoBERTa
-- differ only in defaults. The list contains all settings that configuration_bert.py, configuration_roberta.py and
-- their modeling files read in transformers 5.23. Older versions also read position_embedding_type, which could differ
-- from "absolute".
local settings = require "ps.pretrained.settings"

local function rules(model_type, defaults)
  local all = {
    hidden_size = 768, num_hidden_layers = 12, num_attention_heads = 12, intermediate_size = 3072, hidden_act = "gelu",
    hidden_dropout_prob = 0.1, attention_probs_dropout_prob = 0.1, max_position_embeddings = 512, type_vocab_size = 2,
    initializer_range = 0.02, layer_norm_eps = 1e-12, tie_word_embeddings = true,
  }
  for key, value in pairs(defaults) do all[key] = value end
  return settings.new {
    model_type = model_type, defaults = all, nullable = { pad_token_id = true },
    optional = { classifier_dropout = "number" },
    sizes = { "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
      "max_position_embeddings", "type_vocab_size" },
    shares = { "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout" },
    positive = { "layer_norm_eps", "initializer_range" },
    fixed = { model_type = { model_type, "another model" }, is_decoder = { false, "causal attention" },
      add_cross_attention = { false, "attention to an encoder" },
      is_encoder_decoder = { false, "a model with an encoder" }, is_causal = { false, "causal attention" },
      position_embedding_type = { "absolute", "another kind of position" } },
    measures = {
      { "vocab_size", "embeddings.word_embeddings.weight", 1 },
      { "hidden_size", "embeddings.word_embeddings.weight", 2 },
      { "max_position_embeddings", "embeddings.position_embeddings.weight", 1 },
      { "type_vocab_size", "embeddings.token_type_embeddings.weight", 1 },
      { "intermediate_size", "encoder.layer.0.intermediate.dense.weight", 1 },
    },
    layer = "^encoder%.layer%.(%d+)%.",
    activation = "hidden_act", width = "hidden_size", heads = "num_attention_heads", layers = "num_hidden_layers",
  }
end

return {
  bert = rules("bert", { vocab_size = 30522, pad_token_id = 0 }),
  roberta = rules("roberta", { vocab_size = 50265, pad_token_id = 1 }),
}
