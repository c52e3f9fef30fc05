-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit sentences_cases.lua JOB.json OUT.safetensors: sentence vectors of the BERT in a folder, by its own
-- tokenizer: the mean of the last hidden states of a text's tokens, of length 1. Writes ids, mask and vectors.
local ps = require "ps"
local json = require "cjson"

local file = assert(io.open(arg[1], "rb"))
local job = json.decode(file:read("*a"))
file:close()

local tok = ps.tokenizer.from_pretrained(job.model)
local model = ps.from_pretrained(job.model, { quiet = true }):eval()
local batch = tok(job.texts, { padding = true, truncation = true, max_length = job.max_length })
local vectors = ps.no_grad(function()
  local x = model(batch).last_hidden_state                              -- shape [B, T, C]
  local mask = batch.attention_mask:float():unsqueeze(-1)               -- shape [B, T, 1]
  local mean = (x * mask):sum(1) / mask:sum(1)
  return mean / mean:norm(2, 1, true)
end)
ps.safetensors.save(arg[2], { ids = batch.input_ids, mask = batch.attention_mask, vectors = vectors })
