-- SPDX-License-Identifier: BSD-3-Clause
-- Computes a model's answers to requests of OpenAI's API (ps/serve/request.lua). An answer is a table that is sent as
-- JSON, or a stream of events. Only one answer may be computed at a time.
local json = require("cjson").new()
local copied = require "ps.core.copied"
local request = require "ps.serve.request"
local scope = require "ps.core.scope"
local create = require "ps.tensor.create"
local utf8 = require "ps.core.utf8"
local refuse = request.refuse

local answer = {}

-- A placeholder for an empty array. Debian's version of lua-cjson writes an empty table as an object. Therefore an
-- answer contains this string in place of an empty array, and answer.text replaces the string by "[]".
local EMPTY = ("empty array %d %d"):format(os.time(), math.random(2 ^ 30))
local LEAST = -9999                                        -- log-probability that is reported for impossible tokens

--- Encodes an answer as JSON.
---@param value table
---@return string
function answer.text(value) return (json.encode(value):gsub('"' .. EMPTY .. '"', "[]")) end

local DEFAULT = 16  -- default number of tokens in a completion, as in OpenAI's API

-- -- text -------------------------------------------------------------------------------------------------------------
-- Finds the stop string that occurs first in a text. Returns the positions of its first and last byte, or nil if the
-- text contains no stop string.
local function first_stop(text, stops)
  local at, last
  for _, one in ipairs(stops) do
    local from, to = text:find(one, 1, true)
    if from and (not at or from < at) then at, last = from, to end
  end
  return at, last
end

-- Returns the largest number m <= n for which the first m bytes of a text do not end inside a character.
local function whole_characters(text, n)
  while n > 0 and text:byte(n + 1) and text:byte(n + 1) >= 0x80 and text:byte(n + 1) < 0xc0 do n = n - 1 end
  return n
end

-- Returns the number of characters in a UTF-8 text.
local function characters(text) return select(2, text:gsub("[^\128-\191]", "")) end

-- Returns two functions, add and finish. They pass a text to `put`, up to the first stop string. add(piece) adds a
-- piece of the text. It does not yet pass bytes at the end that may be the beginning of a stop string. It returns false
-- if a stop string was found. finish() passes these last bytes.
local function cutter(stops, put)
  local held, most, ended = "", 0, false
  for _, one in ipairs(stops) do most = math.max(most, #one) end
  return function(piece)
    if ended then return false end
    held = held .. piece
    local at = first_stop(held, stops)
    local n = at and at - 1 or whole_characters(held, math.max(0, #held - math.max(0, most - 1)))
    local go_on = n == 0 or put(held:sub(1, n)) ~= false
    held, ended = at and "" or held:sub(n + 1), at ~= nil
    return go_on and not ended
  end, function()
    if held ~= "" then put(held) end
    return ended
  end
end

-- -- log-probabilities ------------------------------------------------------------------------------------------------
-- Returns a table with an entry for each index of `ids` except 1. An entry contains the log-probability of the id, and
-- a list of the `top` most probable tokens at this position as {id, logprob}.
local function logprobs_of(model, ids, top)
  local rows = {}
  scope.no_grad(scope.scope, function()
    local logits = model({ input_ids = create.tensor({ ids }, "int32") }).logits:to "fp32"
    local all = logits:reshape(#ids, -1):log_softmax(-1)
    local values, indices
    if top > 0 then
      values, indices = all:topk(top)
      values, indices = values:tolist(), indices:tolist()
    end
    local next_ids = {}
    for i = 1, #ids do next_ids[i] = { ids[i + 1] or 0 } end
    local own = all:gather(1, create.tensor(next_ids, "int64")):tolist()
    for i = 1, #ids - 1 do
      if own[i][1] ~= own[i][1] then error(("the model's log-probability of token %d is NaN"):format(i + 1), 0) end
      local row = { logprob = math.max(own[i][1], LEAST), top = {} }
      for k = 1, top do row.top[k] = { id = indices[i][k], logprob = math.max(values[i][k], LEAST) } end
      rows[i + 1] = row
    end
  end)
  return rows
end

-- Returns the bytes of the token `id`. The bytes may depend on the previous token. For example, Llama 2's tokenizer
-- removes the blank of a token at the beginning of a text. `before` is the previous token, or nil at the beginning.
local function bytes_of(tok, before, id)
  local head = before and tok:decode({ before }, { bytes = true }) or ""
  local all = before and tok:decode({ before, id }, { bytes = true })
  return all and all:sub(1, #head) == head and all:sub(#head + 1) or tok:decode({ id }, { bytes = true })
end

-- Returns the name that a token has in OpenAI's API. If the token's bytes are not valid UTF-8, the name is `mark`,
-- followed by the bytes with escapes such as \xe2\x96. This ensures that tokens with different bytes have different
-- names.
local function name_of(bytes, mark)
  if utf8.valid(bytes) then return bytes end
  return mark .. bytes:gsub("[\128-\255]", function(one) return ("\\x%02x"):format(one:byte()) end)
end

-- Returns the object `logprobs` of a completion for ids[first] to ids[#ids]. The log-probability of ids[1] is null.
local function completion_logprobs(model, tok, ids, first, top)
  local rows = logprobs_of(model, ids, math.max(top, 1))
  local out, begun = { tokens = {}, token_logprobs = {}, top_logprobs = {}, text_offset = {} }, 0
  for i = first, #ids do
    local k, bytes = i - first + 1, bytes_of(tok, ids[i - 1], ids[i])
    local piece = name_of(bytes, "bytes:")
    -- text_offset is the offset of the character that contains the first byte of the token.
    out.tokens[k], out.text_offset[k] = piece, begun - (bytes:find "^[\128-\191]" and begun > 0 and 1 or 0)
    begun = begun + characters(bytes)
    local row = rows[i]
    out.token_logprobs[k], out.top_logprobs[k] = json.null, json.null
    if row then
      out.token_logprobs[k] = row.logprob
      local list = {}
      for _, one in ipairs(row.top) do
        local name = name_of(bytes_of(tok, ids[i - 1], one.id), "bytes:")
        list[name] = math.max(list[name] or -math.huge, one.logprob)
      end
      list[piece] = math.max(list[piece] or -math.huge, row.logprob)
      out.top_logprobs[k] = list
    end
  end
  for key, list in pairs(out) do if #list == 0 then out[key] = EMPTY end end
  return out
end

local function chat_logprobs(model, tok, ids, first, top)
  local rows, content = logprobs_of(model, ids, top), {}
  local function entry(i, id, logprob)
    local bytes, list = bytes_of(tok, ids[i - 1], id), {}
    for k = 1, #bytes do list[k] = bytes:byte(k) end
    return { token = name_of(bytes, ""), logprob = logprob, bytes = #list > 0 and list or EMPTY }
  end
  for i = first, #ids do
    local one, list = entry(i, ids[i], rows[i].logprob), {}
    for k, other in ipairs(rows[i].top) do list[k] = entry(i, other.id, other.logprob) end
    one.top_logprobs = #list > 0 and list or EMPTY
    content[#content + 1] = one
  end
  return { content = #content > 0 and content or EMPTY }
end

-- -- generation -------------------------------------------------------------------------------------------------------
-- Generates up to n ids after `ids`. Calls put(text) with pieces of the text before the first stop string, and alive()
-- after each token. If put or alive returns false, the generation ends. Returns the new ids, and "stop" or "length".
local function continue(model, tok, ids, n, fields, seed, put, alive)
  if n == 0 then return {}, "length" end
  local new, finish = {}, "length"
  local add, rest = cutter(fields.stop or {}, put)
  model:generate({ ids }, n, { temperature = fields.temperature or 1, top_p = fields.top_p or 1,
    top_k = fields.top_k or 0, min_p = fields.min_p or 0, seed = seed, tokenizer = tok, skip_special_tokens = true,
    num_beams = 1, num_return_sequences = 1, kv_cache = fields.kv_cache,
    on_token = function(id)
      new[#new + 1] = id
      return alive()
    end,
    on_text = function(text) return add(text) end })
  local eos, ends = {}, (rawget(model, "generation_config") or model.config).eos_token_id   -- as read by generate
  for _, id in ipairs(type(ends) == "table" and ends or { ends }) do eos[id] = true end
  if rest() or #new < n or eos[new[#new]] then finish = "stop" end
  return new, finish
end

local function room(model, prompt, wanted, default)
  local most = model.config.max_position_embeddings or model.config.n_positions
  if #prompt > most or wanted and #prompt + wanted > most then
    refuse("400", ("the model has %d positions, but the request has %d tokens%s"):format(most, #prompt,
      wanted and (" and asks for %d more"):format(wanted) or ""), "max_tokens", "context_length_exceeded")
  end
  return wanted or math.min(default or most, most - #prompt)
end

local count, BEGAN = 0, os.time()

local function base(kind, object, name)
  count = count + 1
  return { id = ("%s-%d-%d"):format(kind, BEGAN, count), object = object, created = os.time(), model = name }
end

local function usage(prompts, completions)
  return { prompt_tokens = prompts, completion_tokens = completions, total_tokens = prompts + completions }
end

-- Generates all choices of a request. Calls these functions:
--   emit(index, text)                with a piece of the text of a choice; returns false if the client has disconnected
--   alive()                          after each token, and between two choices; returns false if the client has
--                                    disconnected
--   done(index, finish, ids, first)  when a choice is complete
local function run(model, tok, prompts, n, fields, default, emit, alive, done)
  local used, gone = { 0, 0 }, false
  local lengths = {}
  for i, prompt in ipairs(prompts) do lengths[i] = room(model, prompt, n, default) end
  for i, prompt in ipairs(prompts) do
    used[1] = used[1] + #prompt
    for k = 1, fields.n or 1 do
      local index = (i - 1) * (fields.n or 1) + k - 1
      if index > 0 and alive and not alive() then return nil end
      local seed = fields.seed and (fields.seed + k - 1) % 2 ^ 53
      local new, finish = continue(model, tok, prompt, lengths[i], fields, seed, function(text)
        if emit(index, text) == false then gone = true end
        return not gone
      end, function()
        if alive and not alive() then gone = true end
        return not gone
      end)
      if gone then return nil end
      used[2] = used[2] + #new
      local all = copied(prompt)
      for _, id in ipairs(new) do all[#all + 1] = id end
      done(index, finish, all, #prompt + 1)
    end
  end
  return usage(used[1], used[2])
end

-- Adds the choices and the usage to a reply and returns it. For a stream, returns nil. If the request asked for the
-- usage, sends it as an event of the stream.
local function finished(reply, choices, used, fields, send)
  reply.choices, reply.usage = choices, used
  if not send then return reply end
  if used and fields.stream_options and fields.stream_options.include_usage then
    reply.choices = EMPTY
    send(reply)
  end
end

--- Answers a completion request.
---@param model ps.pretrained.Model
---@param tok ps.Tokenizer
---@param name string name of the model
---@param fields table
---@param send? fun(event: table): boolean? sends an event of a stream; returns false if the client has disconnected
---@param alive? fun(): boolean called after each token and between two choices; returns false if the client has
--- disconnected
---@return table? reply nil if the reply was streamed
function answer.completion(model, tok, name, fields, send, alive)
  local prompts = request.prompts(fields.prompt, tok, model.config.vocab_size, fields.n or 1)
  local reply, choices, texts = base("cmpl", "text_completion", name), {}, {}
  if send and (fields.echo or fields.logprobs) then
    refuse("400", "echo and logprobs are not supported with stream", "stream")
  end
  local function emit(index, text)
    texts[index] = (texts[index] or "") .. text
    if not send then return true end
    reply.choices = { { index = index, text = text, logprobs = json.null, finish_reason = json.null } }
    return send(reply)
  end
  local n = fields.max_tokens
  local used = run(model, tok, prompts, n, fields, DEFAULT, emit, alive, function(index, finish, ids, first)
    local choice = { index = index, text = texts[index] or "", logprobs = json.null, finish_reason = finish }
    if send then
      choice.text, reply.choices = "", { choice }
      return send(reply)
    end
    if fields.echo then
      local prompt = {}
      for i = 1, first - 1 do prompt[i] = ids[i] end
      choice.text = tok:decode(prompt) .. choice.text
    end
    if fields.logprobs then
      choice.logprobs = completion_logprobs(model, tok, ids, fields.echo and 1 or first, fields.logprobs)
    end
    choices[#choices + 1] = choice
  end)
  return finished(reply, choices, used, fields, send)
end

--- Answers a chat request.
---@param model ps.pretrained.Model
---@param tok ps.Tokenizer
---@param name string name of the model
---@param fields table
---@param send? fun(event: table): boolean? sends an event of a stream; returns false if the client has disconnected
---@param alive? fun(): boolean called after each token and between two choices; returns false if the client has
--- disconnected
---@return table? reply nil if the reply was streamed
function answer.chat(model, tok, name, fields, send, alive)
  local prompts = { request.conversation(fields.messages, tok) }
  local reply, choices, texts = base("chatcmpl", send and "chat.completion.chunk" or "chat.completion", name), {}, {}
  if send and fields.logprobs then refuse("400", "logprobs is not supported with stream", "stream") end
  local begun = {}
  local function emit(index, text)
    texts[index] = (texts[index] or "") .. text
    if not send then return true end
    reply.choices = { { index = index, finish_reason = json.null,
      delta = { role = not begun[index] and "assistant" or nil, content = text } } }
    begun[index] = true
    return send(reply)
  end
  local wanted = fields.max_completion_tokens or fields.max_tokens
  local used = run(model, tok, prompts, wanted, fields, nil, emit, alive, function(index, finish, ids, first)
    local choice = { index = index, finish_reason = finish, logprobs = json.null }
    if send then
      choice.delta, choice.logprobs = begun[index] and {} or { role = "assistant", content = "" }, nil
      reply.choices = { choice }
      return send(reply)
    end
    choice.message = { role = "assistant", content = texts[index] or "" }
    if fields.logprobs then choice.logprobs = chat_logprobs(model, tok, ids, first, fields.top_logprobs or 0) end
    choices[#choices + 1] = choice
  end)
  return finished(reply, choices, used, fields, send)
end

answer.cutter = cutter

return answer
