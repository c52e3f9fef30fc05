-- SPDX-License-Identifier: BSD-3-Clause
-- The settings of generate. A script's options take precedence over the generation_config.json of the model's folder.
-- Names and meanings are the same as in transformers. If a setting would change the tokens and is not supported, an
-- error names the setting.
local caller = require "ps.core.caller"
local folder = require "ps.pretrained.folder"
local json = require "cjson"
local lfs = require "lfs"
local random = require "ps.core.random"
local rules = require "ps.pretrained.settings"
local text = require "ps.pretrained.generate_text"
local error = caller.error

local settings = {}

local OPTIONS = { temperature = "number", top_k = "whole", top_p = "number", min_p = "number", seed = "whole",
  do_sample = "boolean", repetition_penalty = "number", no_repeat_ngram_size = "whole", min_new_tokens = "whole",
  eos_token_id = "whole|table|boolean", stop_strings = "string|table", tokenizer = "table", num_beams = "whole",
  length_penalty = "number", early_stopping = "boolean|string", num_return_sequences = "whole",
  max_new_tokens = "whole", max_length = "whole",
  logits_processor = "callable", on_token = "callable", on_text = "callable",
  skip_special_tokens = "boolean", kv_cache = "string" }

-- The supported settings of generation_config.json, and their kinds.
local FOLLOWED = { temperature = "number", top_k = "number", top_p = "number", min_p = "number", do_sample = "boolean",
  repetition_penalty = "number", no_repeat_ngram_size = "number", min_new_tokens = "number", eos_token_id = "any",
  stop_strings = "any", num_beams = "number", length_penalty = "number", early_stopping = "any",
  num_return_sequences = "number", max_new_tokens = "number", max_length = "number" }
-- The settings of generation_config.json that change the tokens and are not supported. Each has a list of the values
-- that have no effect.
local REFUSED = { typical_p = { 1 }, top_h = {}, epsilon_cutoff = { 0 }, eta_cutoff = { 0 }, penalty_alpha = { 0 },
  encoder_repetition_penalty = { 1 }, encoder_no_repeat_ngram_size = { 0 }, bad_words_ids = {}, sequence_bias = {},
  suppress_tokens = {}, begin_suppress_tokens = {}, forced_bos_token_id = {}, forced_eos_token_id = {},
  exponential_decay_length_penalty = {}, guidance_scale = { 1 }, diversity_penalty = { 0 }, num_beam_groups = { 1 },
  constraints = {}, force_words_ids = {}, renormalize_logits = { false }, remove_invalid_values = { false },
  watermarking_config = {}, token_healing = { false }, dola_layers = {}, max_time = {}, min_length = { 0 },
  use_mtp = { false }, cache_implementation = { "dynamic", "dynamic_full", "static", "offloaded", "offloaded_static",
    "offloaded_hybrid", "offloaded_hybrid_chunked", "hybrid", "hybrid_chunked", "sliding_window" } }

local function is_neutral(value, neutral)
  if value == json.null or type(value) == "table" and next(value) == nil then return true end
  for _, other in ipairs(neutral) do if value == other then return true end end
  return false
end

-- Reads and checks a model's generation_config.json. If the file does not exist, reads the same fields from
-- config.json, which contains these fields in older folders.
local function file_of(model)
  local known = rawget(model, "generation_config")
  if known then return known end
  local path, fields = model.source and model.source .. "/generation_config.json", nil
  if path and lfs.attributes(path, "mode") == "file" then fields = folder.read_json(path) end
  local given = { file = fields ~= nil }
  if not fields then path = (model.source and model.source .. "/" or "") .. "config.json" end
  for key, value in pairs(fields or model.config) do
    if REFUSED[key] and not is_neutral(value, REFUSED[key]) then
      rules.refuse(path, key, value, "generate does not support it; remove it from the file")
    end
    if FOLLOWED[key] and value ~= json.null then
      if FOLLOWED[key] ~= "any" then caller.typed(value, FOLLOWED[key], ("%s: %s"):format(path, key)) end
      given[key] = value
    end
  end
  rawset(model, "generation_config", given)
  return given
end

local function within(chosen, key, low, high, words)
  local value = chosen[key]
  if not (value >= low and value <= high) then
    error(("generate: %s is %.14g; it must be %s"):format(key, value, words))
  end
end

-- Returns the set of ids that end a sequence, and the number of these ids.
local function ends(value, vocabulary)
  local set, count = {}, 0
  if value == nil or value == false then return set, count end
  if value == true then error("generate: eos_token_id is true; it must be an id, a list of ids, or false") end
  for _, id in ipairs(type(value) == "table" and value or { value }) do
    caller.whole(id, "generate: eos_token_id", 0)
    if id >= vocabulary then
      error(("generate: eos_token_id is %d, but the vocabulary has %d tokens"):format(id, vocabulary))
    end
    if not set[id] then set[id], count = true, count + 1 end
  end
  return set, count
end

-- Sets the temperature. Temperature 0 selects the likeliest token. If the script sets no sampling option, do_sample in
-- generation_config.json decides whether to sample, as in transformers. Without this file, tokens are sampled, except
-- in beam search.
local function choose_temperature(chosen, given, file)
  local asked = given.temperature or given.top_k or given.top_p or given.min_p
  local sample = given.do_sample
  if sample == nil and not asked and (file.file or file.do_sample ~= nil) then sample = file.do_sample or false end
  if sample == nil and (chosen.num_beams > 1 and not given.temperature) then sample = false end
  if sample == false then
    if (given.temperature or 0) ~= 0 then
      error(("generate: temperature is %.14g, but do_sample is false"):format(given.temperature))
    end
    chosen.temperature = 0
  elseif file.do_sample and not given.top_k and not file.top_k then
    chosen.top_k = 50                                       -- transformers' default
  end
  if chosen.num_beams > 1 and chosen.temperature ~= 0 then
    rules.refuse("generate", "num_beams", chosen.num_beams, "beam search does not sample; set temperature = 0")
  end
end

local function stop_strings(chosen)
  local strings = chosen.stop_strings
  if type(strings) == "string" then strings = { strings } end
  if strings ~= nil then caller.typed(strings, "table", "generate: stop_strings") end
  for _, one in ipairs(strings or {}) do
    caller.typed(one, "string", "generate: a stop string")
    if one == "" then error("generate: a stop string is empty") end
  end
  if strings and #strings > 0 then
    if not chosen.tokenizer then error("generate: stop_strings need the tokenizer: pass { tokenizer = tok }") end
    chosen.stops, chosen.tail = text.stops(strings, chosen.tokenizer)
  end
  if chosen.on_text and not chosen.tokenizer then
    error("generate: on_text needs the tokenizer: pass { tokenizer = tok }")
  end
end

--- Returns all settings for a call of generate.
---@param model ps.pretrained.Model
---@param options? table see generate
---@return table chosen the settings; `eos` is a set of ids, and generate_text.lua describes `stops` and `tail`
---@return table file the contents of generation_config.json
function settings.of(model, options)
  local given = caller.options(options, "generate", OPTIONS)
  local file = file_of(model)
  local chosen = { temperature = 1, top_k = 0, top_p = 1, min_p = 0, repetition_penalty = 1, no_repeat_ngram_size = 0,
    min_new_tokens = 0, num_beams = 1, length_penalty = 1, early_stopping = false, num_return_sequences = 1 }
  for _, source in ipairs { file, given } do
    for key, value in pairs(source) do chosen[key] = value end
  end
  for _, key in ipairs { "top_k", "no_repeat_ngram_size", "min_new_tokens" } do
    caller.whole(chosen[key], "generate: " .. key, 0)
  end
  for _, key in ipairs { "num_beams", "num_return_sequences" } do caller.whole(chosen[key], "generate: " .. key, 1) end
  within(chosen, "temperature", 0, math.huge, "0 or more")
  within(chosen, "top_p", 1e-300, 1, "above 0 and at most 1")
  within(chosen, "min_p", 0, 1, "in [0, 1]")
  within(chosen, "repetition_penalty", 1e-300, math.huge, "above 0")
  within(chosen, "length_penalty", -math.huge, math.huge, "a number")
  if type(chosen.early_stopping) == "string" then
    caller.one_of(chosen.early_stopping, { never = "never" }, "generate: early_stopping")
  else caller.typed(chosen.early_stopping, "boolean", "generate: early_stopping") end
  if chosen.kv_cache then
    caller.one_of(chosen.kv_cache, { bf16 = "bf16", q8_0 = "q8_0" }, "generate: kv_cache")
  end
  choose_temperature(chosen, given, file)
  if chosen.num_beams > 1 and (chosen.on_token or chosen.on_text) then
    error("generate: on_token and on_text do not work with beam search, in which earlier tokens can change")
  end
  if chosen.num_beams > 1 and chosen.num_return_sequences > chosen.num_beams then
    error(("generate: num_return_sequences is %d, but there are %d beams; raise num_beams"):format(
      chosen.num_return_sequences, chosen.num_beams))
  end
  if given.seed then caller.seed(given.seed, "generate: seed") end
  chosen.eos, chosen.eos_count = ends(chosen.eos_token_id, model.config.vocab_size)
  stop_strings(chosen)
  return chosen, file
end

local function words(value)
  if type(value) == "function" then return "a function" end
  if type(value) == "number" then return ("%.17g"):format(value) end
  if type(value) ~= "table" then return (("%q"):format(tostring(value)):gsub("\n", "n")) end
  local list = {}
  for i, one in ipairs(value) do list[i] = words(one) end
  return "{ " .. table.concat(list, ", ") .. " }"
end

--- Returns the settings that determine the tokens, as pairs {name, value}. The ranks of a pipeline compare these pairs.
---@param request {prompts: integer[][], n: integer, chosen: table}
---@return string[][]
function settings.told(request)
  local chosen, rng = request.chosen, random.state()
  local list = { { "number of prompts", tostring(#request.prompts) } }
  for i, prompt in ipairs(request.prompts) do list[#list + 1] = { "prompt " .. i, table.concat(prompt, " ") } end
  list[#list + 1] = { "number of tokens", tostring(request.n) }
  local keys = {}
  for key in pairs(OPTIONS) do keys[#keys + 1] = key end
  table.sort(keys)
  for _, key in ipairs(keys) do                            -- these settings may differ between ranks
    local follows = key == "on_token" or key == "on_text" or key == "tokenizer" or key == "skip_special_tokens"
    if key ~= "seed" and not follows then list[#list + 1] = { key, words(chosen[key]) } end
  end
  list[#list + 1] = { "seed", chosen.seed and words(chosen.seed)
    or ("that of the random numbers, %s at %s,"):format(tostring(rng.seed), tostring(rng.offset)) }
  return list
end

--- Returns the seed for sampling. If the call does not set a seed, draws one from the engine's random numbers.
---@param chosen table
---@return integer
function settings.seed(chosen)
  if chosen.seed then return chosen.seed end
  local rng = random.state()
  local seed = rng.seed + rng.offset * 0x9E3779B97F4A7C15ULL
  rng.offset = rng.offset + 1
  return seed
end

return settings
