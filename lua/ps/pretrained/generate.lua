-- SPDX-License-Identifier: BSD-3-Clause
-- Continues token sequences with a causal model, and caches the model's keys and values. generate_rows.lua describes
-- the functions that a model needs for this.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local beams = require "ps.pretrained.generate_beams"
local caller = require "ps.core.caller"
local generate_choose = require "ps.pretrained.generate_choose"
local copied = require "ps.core.copied"
local nn_module = require "ps.nn.module"
local replay = require "ps.pretrained.generate_replay"
local rows_of = require "ps.pretrained.generate_rows"
local generate_settings = require "ps.pretrained.generate_settings"
local text = require "ps.pretrained.generate_text"
local error = caller.error

-- Returns the last n items of a list.
local function last(list, n)
  local tail = {}
  for i = math.max(1, #list - n + 1), #list do tail[#tail + 1] = list[i] end
  return tail
end

-- Draws a token for each row, appends it, and returns the tokens as a list.
local function draw(rows, chosen, offset)
  local logits = generate_choose.process(rows:logits(), rows, chosen, rows.model.together)
  local ids = native.ops.sample(logits, chosen.temperature, chosen.top_p, chosen.top_k, chosen.seed, offset,
    chosen.min_p)
  rows:append(ids)
  return ids:tolist()
end

-- Calls the script's on_token, and calls on_text for the rows that have not ended. Returns false if one of these
-- functions stops the generation.
local function tell_here(chosen, streams, ids, ended, i)
  local go_on = true
  if chosen.on_text then
    for r, stream in ipairs(streams) do
      local piece = ids[r] >= 0 and stream:add(ids[r])
      if piece and chosen.on_text(piece, r) == false then go_on = false end
      local rest = ended[r] and stream:finish()
      if rest and chosen.on_text(rest, r) == false then go_on = false end
    end
  end
  if chosen.on_token and chosen.on_token(#ids == 1 and ids[1] or ids, i) == false then go_on = false end
  return go_on
end

-- Calls tell_here, and returns its result. If several ranks share the model, all ranks stop when one rank stops.
local function tell(model, chosen, ...)
  if not chosen.followed then return true end
  if not model.together then return tell_here(chosen, ...) end
  local given = { ... }
  return model.together(function() return tell_here(chosen, unpack(given)) end)
end

local function continue(model, rows, prompts, n, copies, chosen)
  if chosen.num_beams > 1 then return beams.run(rows, prompts, n, chosen) end
  local results, ended, streams, left = {}, {}, {}, rows.count
  for r = 1, rows.count do
    results[r] = copied(prompts[math.floor((r - 1) / copies) + 1])
    if chosen.on_text then streams[r] = text.stream(chosen.tokenizer, results[r], chosen.skip_special_tokens) end
  end
  for i = 1, n do
    rows:ready()
    local ids = scope.scope(draw, rows, chosen, (i - 1) * rows.count)
    for r, id in ipairs(ids) do
      if ended[r] then ids[r] = -1
      else
        table.insert(results[r], id)
        ended[r] = i == n or chosen.eos[id] or chosen.stops and chosen.stops(last(results[r], chosen.tail))
        if ended[r] then left = left - 1 end
      end
    end
    if not tell(model, chosen, streams, ids, ended, i) or left == 0 then break end
  end
  return results
end

local function run(model, prompts, n, chosen)
  local copies = chosen.num_beams > 1 and chosen.num_beams or chosen.num_return_sequences
  local rows = rows_of.new(model, prompts, n, copies, chosen.kv_cache)
  local repeated = rows.parts and replay.attach(model, rows.parts)
  local ok, results = xpcall(continue, scope.trace, model, rows, prompts, n, copies, chosen)
  if repeated then repeated:close() end
  if not ok then error(results, 0) end
  return results
end

-- Returns the prompts as lists of ids, and whether the argument was a single prompt instead of a list of prompts.
local function prompts_of(prompt)
  local mask
  if type(prompt) == "table" and prompt.input_ids ~= nil then
    mask, prompt = prompt.attention_mask, prompt.input_ids
    mask = scope.is_tensor(mask) and mask:tolist() or mask
    if mask ~= nil then caller.typed(mask, "table", "generate: attention_mask") end
  end
  if type(prompt) ~= "table" and not scope.is_tensor(prompt) then
    error("generate: the prompt must be a list of token ids or a tensor, not " .. tostring(prompt))
  end
  if type(prompt) == "cdata" then prompt = prompt:tolist() end
  local single = type(prompt[1]) ~= "table"
  local prompts = {}
  for r, row in ipairs(single and { prompt } or prompt) do
    prompts[r] = {}
    caller.typed(row, "table", "generate: a prompt")
    local seen = mask and (single and type(mask[1]) ~= "table" and mask or mask[r])
    if mask and (type(seen) ~= "table" or #seen ~= #row) then
      error(("generate: input_ids has %d ids in row %d, but attention_mask has %d numbers"):format(#row, r,
        type(seen) == "table" and #seen or 0))
    end
    for i, id in ipairs(row) do
      caller.whole(id, "generate: a token id", 0)
      if not mask or seen[i] ~= 0 and seen[i] ~= false then table.insert(prompts[r], id) end
    end
    if #prompts[r] == 0 then error(("generate: prompt %d is empty; it must have at least one token"):format(r)) end
  end
  return prompts, single
end

-- The number of tokens that transformers adds if neither the options nor the files set one.
local DEFAULT = 20

-- Returns the number of tokens to add. If the call does not set this number, computes it from the options, from the
-- settings in the model's files, or from DEFAULT. Some of these settings limit the total length of prompt and
-- continuation. The length of the longest prompt is then subtracted from the limit.
local function count(model, n, options, file, prompts)
  options = options or {}
  local longest, config = 0, model.config or {}
  for _, prompt in ipairs(prompts) do longest = math.max(longest, #prompt) end
  for _, key in ipairs { "max_new_tokens", "max_length" } do
    if n ~= nil and options[key] ~= nil then
      error(("generate: the call requests %s tokens, but %s = %s; pass only one of the two"):format(tostring(n), key,
        tostring(options[key])))
    end
  end
  if n == nil then n = options.max_new_tokens end
  if n == nil and options.max_length then
    if options.max_length <= longest then
      error(("generate: max_length is %d, but a prompt has %d tokens; raise it, or set max_new_tokens"):format(
        options.max_length, longest))
    end
    n = options.max_length - longest
  end
  if n == nil then n = file.max_new_tokens end
  if n == nil and file.max_length then n = math.max(file.max_length - longest, 0) end
  if n == nil then
    local positions = config.max_position_embeddings or config.n_positions
    n = math.max(math.min(DEFAULT, positions and positions - longest or DEFAULT), 0)
  end
  return caller.whole(n, "generate: the number of tokens", 0)
end

--- Continues token sequences, with a cache of keys and values. GPT-2 has a fixed number of positions. When all of them
--- are used, generation continues from the last half of the tokens. Models with rotary embeddings have no largest
--- position. Settings that the call does not set are read from the model's generation_config.json, if this file exists.
---@param model ps.pretrained.Model
---@param prompt integer[]|integer[][]|ps.Tensor|table a list of ids, a list of such lists of any lengths, int [B, T],
--- or a tokenizer's result: { input_ids =, attention_mask = }. Ids that the mask hides are not used
---@param n? integer the largest number of tokens to add. By default it is computed from max_new_tokens or max_length in
--- `options`. If `options` has neither, they are read from generation_config.json. If the file has neither, n is 20, or
--- fewer if the model has fewer free positions. The options may be passed in place of n
---@param options? {temperature?: number, top_k?: integer, top_p?: number, min_p?: number, do_sample?: boolean, seed?:
--- integer, repetition_penalty?: number, no_repeat_ngram_size?: integer, min_new_tokens?: integer, eos_token_id?:
--- integer|integer[]|false, stop_strings?: string|string[], tokenizer?: ps.Tokenizer, num_beams?: integer,
--- length_penalty?: number, early_stopping?: boolean|"never", num_return_sequences?: integer, logits_processor?:
--- (fun(ids: ps.Tensor, logits: ps.Tensor): ps.Tensor), on_token?: (fun(id: integer|integer[], i: integer): boolean?),
--- on_text?: (fun(text: string, row: integer): boolean?), skip_special_tokens?: boolean, kv_cache?: "bf16"|"q8_0"}
--- Temperature 0 or do_sample = false selects the likeliest token. After top_k and top_p, min_p drops each token whose
--- probability is less than this fraction of the likeliest token's probability. A sequence ends after a token of
--- eos_token_id, or after the token in which a stop string ends. logits_processor is called with ids int32 [R, L],
--- padded on the left, and logits fp32 [R, V]. With beams, these logits are log probabilities. on_token is called with
--- -1 for rows that have ended. on_token and on_text stop the generation by returning false. With skip_special_tokens,
--- the text for on_text omits special tokens. kv_cache is the type of the cached keys and values. It needs less memory
--- than the default and changes the logits. By default, keys and values have the dtype of the weights and are not
--- rounded. Without a seed, the engine's random numbers are used.
---@return integer[]|integer[][] ids The prompt and its continuation. The result is a list of lists if the prompt is a
--- list of prompts, or if num_return_sequences > 1.
return function(model, prompt, n, options)
  if options == nil and type(n) == "table" then n, options = nil, n end
  local function read()
    local prompts, single = prompts_of(prompt)
    local chosen, file = generate_settings.of(model, options)
    chosen.followed = chosen.on_token ~= nil or chosen.on_text ~= nil
    return { prompts = prompts, single = single, chosen = chosen, n = count(model, n, options, file, prompts) }
  end
  local request = model.agreed and model.agreed(read, generate_settings.told) or read()
  local prompts, single, chosen = request.prompts, request.single, request.chosen
  n = request.n
  if n == 0 or #prompts == 0 then return single and prompts[1] or prompts end
  chosen.seed = generate_settings.seed(chosen)
  local restore = nn_module.modes(model)
  model:eval()
  local ok, result = pcall(scope.no_grad, scope.scope, run, model, prompts, n, chosen)
  restore()
  if not ok then error(result, 0) end
  return single and #result == 1 and result[1] or result
end
