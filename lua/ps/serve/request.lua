-- SPDX-License-Identifier: BSD-3-Clause
-- Checks requests of OpenAI's API: the fields of a completion or of a conversation. If a field is not supported and
-- would change the answer, the request is rejected with an error that contains the field's name.
local json = require("cjson").new()
local caller = require "ps.core.caller"
local utf8 = require "ps.core.utf8"

local request = {}

---@class ps.serve.Problem the error object in a reply
---@field status string the HTTP status
---@field message string
---@field param? string
---@field code? string

--- Raises an error that the server sends to the client as the reply.
---@param status string the HTTP status
---@param message string
---@param param? string
---@param code? string
function request.refuse(status, message, param, code)
  error({ serve = true, status = status, message = message, param = param, code = code }, 0)
end
local refuse = request.refuse

--- Returns the text of an error that was caught, without the position at its beginning. No script called the function
--- that failed, so the position would be a line of lua-http.
---@param problem any
---@return string
function request.reason(problem)
  local reason, position = tostring(problem), caller.where() .. ": "
  return reason:sub(1, #position) == position and reason:sub(#position + 1) or reason
end

-- MOST_CHOICES is OpenAI's limit of n. Here it limits the choices of all prompts together.
local MOST_STOPS, MOST_CHOICES, MOST_LOGPROBS = 16, 128, 20

local function bad(key, text) refuse("400", ("%s %s"):format(key, text), key) end

local function number(low, high)
  return function(value, key)
    if type(value) ~= "number" or not (value >= low and value <= high) then
      bad(key, ("must be a number in [%.10g, %.10g]"):format(low, high))
    end
    return value
  end
end
local function whole(low, high)
  local check = number(low, high)
  return function(value, key)
    if check(value, key) % 1 ~= 0 then bad(key, "must be a whole number") end
    return value
  end
end
local function boolean(value, key)
  if type(value) ~= "boolean" then bad(key, "must be true or false") end
  return value
end
local function text(value, key)
  if type(value) ~= "string" then bad(key, "must be a string") end
  return value
end
local function anything(value) return value end
local function stops(value, key)
  if type(value) == "string" then value = { value } end
  if type(value) ~= "table" or #value > MOST_STOPS or next(value) ~= nil and #value == 0 then
    bad(key, ("must be up to %d strings"):format(MOST_STOPS))
  end
  for _, one in ipairs(value) do
    if type(one) ~= "string" or one == "" then bad(key, "must be strings that are not empty") end
  end
  return value
end
-- Returns a function that raises an error if a field does not have one of the given values.
local function only(...)
  local allowed = { ... }
  return function(value, key)
    for _, one in ipairs(allowed) do if value == one then return nil end end
    if type(value) == "table" and next(value) == nil then return nil end
    bad(key, ("is not supported (only %s)"):format(json.encode(allowed[1])))
  end
end
local function format(value, key)
  if type(value) ~= "table" or value.type ~= "text" then bad(key, "is not supported (only {\"type\": \"text\"})") end
end
local function modalities(value, key)
  if type(value) ~= "table" or #value ~= 1 or value[1] ~= "text" then bad(key, "is not supported (only [\"text\"])") end
end
local function stream_options(value, key)
  if type(value) ~= "table" then bad(key, "must be an object") end
  for name, one in pairs(value) do
    if name ~= "include_usage" then bad(key .. "." .. name, "is not supported") end
    boolean(one, key .. "." .. name)
  end
  return value
end

local COMMON = { model = text, max_tokens = whole(0, 2 ^ 31), temperature = number(0, 100), top_p = number(1e-9, 1),
  top_k = whole(0, 2 ^ 31 - 1), min_p = number(0, 1), seed = whole(-2 ^ 53, 2 ^ 53), stop = stops, stream = boolean,
  stream_options = stream_options, n = whole(1, MOST_CHOICES), user = anything, metadata = anything, store = anything,
  presence_penalty = only(0), frequency_penalty = only(0), logit_bias = only(json.null), service_tier = anything,
  safety_identifier = anything, prompt_cache_key = anything }
local COMPLETION = { prompt = anything, echo = boolean, logprobs = whole(0, MOST_LOGPROBS), best_of = only(1),
  suffix = only("") }
local CHAT = { messages = anything, logprobs = boolean, top_logprobs = whole(0, MOST_LOGPROBS),
  max_completion_tokens = whole(0, 2 ^ 31), response_format = format, tools = only(json.null),
  tool_choice = only("none"), functions = only(json.null), function_call = only("none"),
  reasoning_effort = only("none"), verbosity = only("medium"), modalities = modalities, audio = only(json.null),
  web_search_options = only(json.null), prediction = anything, parallel_tool_calls = anything }

--- Decodes the body of a request, checks its fields, and returns them.
---@param body string
---@param chat boolean true for a chat request, false for a completion request
---@return table
function request.read(body, chat)
  if not utf8.valid(body) then refuse("400", "the body must be JSON in UTF-8") end
  local ok, given = pcall(json.decode, body)
  if not ok or not body:find "^%s*{" then refuse("400", "the body must be a JSON object") end
  local fields, own = {}, chat and CHAT or COMPLETION
  for key, value in pairs(given) do
    local check = COMMON[key] or own[key]
    if not check then refuse("400", ("there is no field '%s'"):format(tostring(key)), tostring(key)) end
    if value ~= json.null then fields[key] = check(value, key) end
  end
  if fields.top_logprobs and not fields.logprobs then bad("top_logprobs", "needs logprobs = true") end
  return fields
end

local function is_ids(value)
  if type(value) ~= "table" or #value == 0 then return false end
  for _, id in ipairs(value) do if type(id) ~= "number" or id % 1 ~= 0 or id < 0 then return false end end
  return true
end

--- Returns the prompts of a completion. Each prompt is a list of ids. A request with too many choices is rejected
--- before any prompt is tokenized.
---@param prompt any a string, a list of ids, or a list of strings and lists of ids
---@param tok ps.Tokenizer
---@param words integer size of the vocabulary
---@param n integer number of choices per prompt
---@return integer[][]
function request.prompts(prompt, tok, words, n)
  if prompt == nil then bad("prompt", "is missing") end
  local list = (type(prompt) == "string" or is_ids(prompt)) and { prompt } or prompt
  if type(list) ~= "table" or #list == 0 then bad("prompt", "must be a string, a list of ids, or a list of these") end
  if #list * n > MOST_CHOICES then
    bad("prompt", ("has %d prompts, which with n = %d asks for %d choices; the limit is %d choices per request")
      :format(#list, n, #list * n, MOST_CHOICES))
  end
  local prompts = {}
  for i, one in ipairs(list) do
    if type(one) == "string" then one = tok:encode(one)
    elseif not is_ids(one) then bad("prompt", "must be a string, a list of ids, or a list of these") end
    for _, id in ipairs(one) do
      if id >= words then bad("prompt", ("has the id %d, but the vocabulary has %d tokens"):format(id, words)) end
    end
    if #one == 0 then bad("prompt", "is empty; it must have at least one token") end
    prompts[i] = one
  end
  return prompts
end

local PARTS = "must be a string, or a list of parts of type text"

-- Returns the text of a message's content, which is a string or a list of parts.
local function content_of(value, key)
  if type(value) == "string" then return value end
  if type(value) ~= "table" then bad(key, PARTS) end
  local pieces = {}
  for i, part in ipairs(value) do
    if type(part) ~= "table" or part.type ~= "text" or type(part.text) ~= "string" then bad(key, PARTS) end
    pieces[i] = part.text
  end
  return table.concat(pieces)
end

--- Renders a conversation with the model's chat template, and returns its ids.
---@param messages any
---@param tok ps.Tokenizer
---@return integer[]
function request.conversation(messages, tok)
  if type(messages) ~= "table" or #messages == 0 then bad("messages", "must be a list of messages") end
  if not tok:has_chat_template() then
    refuse("400", "the model has no chat template; use /v1/completions", "messages")
  end
  local list = {}
  for i, one in ipairs(messages) do
    if type(one) ~= "table" then bad("messages", "must be a list of messages") end
    for key, value in pairs(one) do
      if key ~= "role" and key ~= "content" and key ~= "name" and value ~= json.null then
        bad(("messages[%d].%s"):format(i - 1, key), "is not supported")
      end
    end
    list[i] = { role = text(one.role, ("messages[%d].role"):format(i - 1)),
      content = content_of(one.content, ("messages[%d].content"):format(i - 1)) }
    if one.name ~= nil and one.name ~= json.null then
      list[i].name = text(one.name, ("messages[%d].name"):format(i - 1))
    end
  end
  local ok, ids = pcall(tok.apply_chat_template, tok, list, { add_generation_prompt = true })
  if not ok and caller.is_interrupt(ids) then error(ids, 0) end
  if not ok then refuse("400", "the chat template: " .. request.reason(ids), "messages") end
  return ids
end

return request
