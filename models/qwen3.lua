-- SPDX-License-Identifier: BSD-3-Clause
-- Qwen3: Llama (models/llama.lua) with an RMS norm on each head's queries and keys. Some layers may have a sliding
-- window.
local llama = require "models.llama"

return llama.of({
  brand = "Qwen3", norms = true,
  biases = function(c) return c.attention_bias, c.attention_bias, false end,
  window = llama.window_of,
}, require("models.llama_config").qwen3, {
  ["qwen3-0.6b"] = { hidden_size = 1024, intermediate_size = 3072, num_hidden_layers = 28, num_attention_heads = 16,
    num_key_value_heads = 8, max_position_embeddings = 40960, tie_word_embeddings = true,
    rope_parameters = { rope_theta = 1000000 } },
})
