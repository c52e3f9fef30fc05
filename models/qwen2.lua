-- SPDX-License-Identifier: BSD-3-Clause
-- Qwen2: Llama (models/llama.lua) with biases for queries, keys and values. Some layers may have a sliding window.
local llama = require "models.llama"

return llama.of({
  brand = "Qwen2",
  biases = function() return true, false, false end,
  window = llama.window_of,
}, require("models.llama_config").qwen2, {
  ["qwen2-0.5b"] = { hidden_size = 896, intermediate_size = 4864, num_hidden_layers = 24, num_attention_heads = 14,
    num_key_value_heads = 2, max_position_embeddings = 131072, tie_word_embeddings = true,
    rope_parameters = { rope_theta = 1000000 } },
})
