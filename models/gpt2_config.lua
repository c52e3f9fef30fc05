-- SPDX-License-Identifier: BSD-3-Clause
-- GPT-2's settings by Hugging Face's names, for the checks of ps/pretrained/settings.lua. The list contains all
-- settings that configuration_gpt2.py and modeling_gpt2.py read in transformers 5.23.
local settings = require "ps.pretrained.settings"

return settings.new {
  model_type = "gpt2",
  defaults = {
    vocab_size = 50257, n_positions = 1024, n_layer = 12, n_head = 12, n_embd = 768, layer_norm_epsilon = 1e-5,
    embd_pdrop = 0, attn_pdrop = 0, resid_pdrop = 0, activation_function = "gelu_new", initializer_range = 0.02,
    tie_word_embeddings = true, scale_attn_weights = true, scale_attn_by_inverse_layer_idx = false,
    -- This setting changes the order of operations but not the formula.
    reorder_and_upcast_attn = false,
  },
  assumed_ids = { bos_token_id = 50256, eos_token_id = 50256 },
  file_defaults = { embd_pdrop = 0.1, attn_pdrop = 0.1, resid_pdrop = 0.1 },
  optional = { n_inner = "whole", pad_token_id = "whole", classifier_dropout = "number", hidden_dropout = "number" },
  sizes = { "vocab_size", "n_positions", "n_layer", "n_head", "n_embd", "n_inner" },
  shares = { "embd_pdrop", "attn_pdrop", "resid_pdrop", "classifier_dropout", "hidden_dropout" },
  positive = { "layer_norm_epsilon", "initializer_range" },
  -- GPT2Config accepts these other names for the same fields.
  aliases = { num_attention_heads = "n_head", hidden_size = "n_embd", num_hidden_layers = "n_layer",
    max_position_embeddings = "n_positions" },
  fixed = { model_type = { "gpt2", "another model" }, add_cross_attention = { false, "attention to an encoder" },
    is_encoder_decoder = { false, "a model with an encoder" }, is_causal = { true, "attention to later positions" } },
  any_pad = true,  -- the padding id is only compared with ids, so it needs no embedding row
  measures = {
    { "vocab_size", "wte.weight", 1 }, { "n_embd", "wte.weight", 2 }, { "n_positions", "wpe.weight", 1 },
    { "n_inner", "h.0.mlp.c_fc.weight", 2, default = function(c) return 4 * c.n_embd end },
  },
  layer = "^h%.(%d+)%.",
  activation = "activation_function", width = "n_embd", heads = "n_head", layers = "n_layer",
}
