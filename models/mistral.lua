-- SPDX-License-Identifier: BSD-3-Clause
-- Mistral: Llama (models/llama.lua) without biases. A query sees only the last `sliding_window` keys.
local llama = require "models.llama"

return llama.of({
  brand = "Mistral",
  biases = function() return false, false, false end,
  window = function(c) return c.sliding_window or nil end,
}, require("models.llama_config").mistral, {
  ["mistral-7b"] = { max_position_embeddings = 32768, rms_norm_eps = 1e-5 },
})
