-- SPDX-License-Identifier: BSD-3-Clause
-- The methods of a tokenizer for conversations. They return the chat template in the tokenizer's folder, the text of a
-- conversation, its token ids, and a mask that marks the ids that the model has to produce.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local chat = require "ps.chat"
local folder = require "ps.pretrained.folder"
local lfs = require "lfs"
local lost = require "ps.core.lost"
local read_file = require "ps.core.read_file"
local error = caller.error
local C, check = native.C, native.check

local conversations = {}

local NAMES = { "bos", "eos", "unk", "sep", "pad", "cls", "mask" }

local function read(path)
  local text, why = read_file(path)
  if not text then error("no chat template: " .. why) end
  return text
end

-- Selects a template from a list of named templates. Selects "tool_use" if there are tools and the list contains a
-- template of this name. Otherwise selects "default".
local function chosen(list, path, with_tools)
  local named = {}
  for _, one in ipairs(list) do
    if type(one) ~= "table" or type(one.name) ~= "string" or type(one.template) ~= "string" then
      error(path .. ": chat_template must be a list of objects with the fields 'name' and 'template'")
    end
    named[one.name] = one.template
  end
  return with_tools and named.tool_use or named.default
    or error(path .. ": chat_template: there is no template named 'default'")
end

-- Returns the path of the file that contains the folder's chat template, and the template. The template is a text, a
-- list of named templates, or nil if the folder has no template.
local function found(self)
  local source = rawget(self, "source")
  local own = rawget(self, "template")                     -- a GGUF file contains its own template
  if own then return source, own end
  local home = lfs.attributes(source, "mode") == "directory" and source or source:match "^(.*)/[^/]*$" or "."
  local path = home .. "/chat_template.jinja"
  if lfs.attributes(path, "mode") == "file" then return path, read(path) end
  path = home .. "/tokenizer_config.json"
  local template = lfs.attributes(path, "mode") == "file" and folder.read_json(path).chat_template
  if type(template) == "table" or type(template) == "string" then return path, template end
  return home
end

--- Returns whether the tokenizer's folder has a chat template.
---@return boolean
function conversations:has_chat_template() return select(2, found(self)) ~= nil end

-- Returns the text of the folder's chat template, and the path of the file that contains the template.
local function source_of(self, with_tools)
  local path, template = found(self)
  if type(template) == "table" then return chosen(template, path, with_tools), path end
  if template then return template, path end
  return error(("%s has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json; "
    .. "write one of them (in Lua, apply_chat_template also takes the option chat_template)"):format(path))
end

--- Returns the chat template of the tokenizer's folder. The template is read from chat_template.jinja, or from the
--- field chat_template of tokenizer_config.json.
---@param options? {tools?: boolean} tools = true: selects the template for tools if there are several templates
---@return ps.chat.Template
function conversations:chat_template(options)
  options = caller.options(options, "tokenizer:chat_template", { tools = "boolean" })
  return chat.template(source_of(self, options.tools == true))
end

--- Returns the special tokens by their names: { bos_token = "<s>", ... }.
---@return table<string, string>
function conversations:special_tokens()
  local tokens = {}
  for _, name in ipairs(NAMES) do tokens[name .. "_token"] = self[name .. "_token"] end
  return tokens
end

-- Encodes bytes `first` to `last` of a text. Appends the ids to `ids`. For each id, appends the positions of the
-- token's first and last byte in the text to `bytes`.
local function append(self, text, first, last, flags, ids, bytes)
  local part = text:sub(first, last)
  if part == "" then return end
  local out = rawget(self, "out")
  check(C.ps_tok_encode(self.handle, part, #part, C.PS_TOK_OFFSETS + flags, out))
  if not self.told_lost then lost.tell(self, "a conversation") end
  for i = 0, tonumber(out.n) - 1 do
    ids[#ids + 1] = out.ids[i]
    bytes[#bytes + 1] = { first + out.offsets[2 * i], first + out.offsets[2 * i + 1] - 1 }
  end
end

-- Returns the positions of the first and the last byte of a special token in the text. `place` may also contain space
-- before or after the token, because a token with lstrip or rstrip includes adjacent space. The returned range contains
-- only the token.
local function own_bytes(text, token, place)
  local at = text:sub(place[1], place[2]):find(token, 1, true)
  if not at then return place end
  return { place[1] + at - 1, place[1] + at + #token - 2 }
end

-- Returns a function (first, last) that returns the part in `parts` that overlaps bytes first to last of the text, or
-- nil if there is no such part. `parts` must be in the order of the text. The function must be called with ranges in
-- the order of the text.
local function overlaps(parts)
  local k = 1
  return function(first, last)
    while parts[k] and parts[k][2] < first do k = k + 1 end
    return parts[k] and parts[k][1] <= last and parts[k] or nil
  end
end

-- Determines which special tokens in a rendered conversation were written by the template. Returns a table from the
-- token's index to true or false, and whether the template wrote all special tokens. The template wrote a token if no
-- byte of the token is from a message, a tool or a document. A role inside a token is allowed if templates know the
-- role, as in '<|' + role + '|>'.
local function written(rendered, ids, places, special)
  local message, role, own, all = overlaps(rendered.message), overlaps(rendered.roles), {}, true
  for i, id in ipairs(ids) do
    if special[id] then
      local first, last = places[i][1], places[i][2]
      local part = role(first, last)
      own[i] = not message(first, last) and not (part and not (part.known and part[1] > first and part[2] < last))
      all = all and own[i]
    end
  end
  return own, all
end

-- Encodes a rendered conversation. A special token that the template wrote is encoded as its id. If a message, a tool,
-- a document or a role contains the text of a special token, this text is encoded as ordinary text.
local function ids_of(self, rendered)
  local text, special = rendered.text, rawget(self, "special_ids")
  local whole, raw, places = {}, {}, {}
  append(self, text, 1, #text, 0, whole, raw)
  for i, id in ipairs(whole) do places[i] = special[id] and own_bytes(text, special[id], raw[i]) or raw[i] end
  local own, all = written(rendered, whole, places, special)
  if all then return whole, places end
  local ids, bytes, at = {}, {}, 1
  for i, id in ipairs(whole) do
    if own[i] then
      local before = places[i - 1]
      if before and before[2] < raw[i - 1][2] and special[whole[i - 1]] and not own[i - 1] then
        -- The previous token is encoded as ordinary text, so the space after it no longer belongs to the token.
        local alone, part = {}, {}
        append(self, text, before[2] + 1, raw[i][2], 0, alone, part)
        if alone[#alone] == id then raw[i] = part[#part] end
      end
      append(self, text, at, raw[i][1] - 1, C.PS_TOK_PLAIN, ids, bytes)
      ids[#ids + 1], bytes[#bytes + 1], at = id, places[i], raw[i][2] + 1
    end
  end
  append(self, text, at, #text, C.PS_TOK_PLAIN, ids, bytes)
  return ids, bytes
end

-- Returns a list with one number per id: 1 if the model has to produce the id, and 0 otherwise. The model has to
-- produce a token if the token's last byte is in a span.
local function mask_of(bytes, spans)
  local mask, at = {}, 1
  for i, place in ipairs(bytes) do
    while spans[at] and spans[at][2] < place[2] do at = at + 1 end
    mask[i] = spans[at] and place[2] >= spans[at][1] and 1 or 0
  end
  return mask
end

local RENDER = { train_on = "string|function", date = "string", tools = "table|string" }

--- Renders a conversation with the folder's chat template. In addition to the text, the result contains two lists of
--- byte ranges: `message` lists the ranges that messages wrote, and `spans` lists the ranges that the model has to
--- produce.
---@param messages table|string the messages (see apply_chat_template)
---@param options? {train_on?: string|fun(i: integer, role: string): boolean, date?: string, tools?: table|string}
---@return ps.chat.Rendered
function conversations:render_chat(messages, options)
  options = caller.options(options, "tokenizer:render_chat", RENDER)
  return self:chat_template { tools = options.tools ~= nil }:trained(messages, { tools = options.tools,
    date = options.date, tokens = self:special_tokens() }, options.train_on or "assistant")
end

local APPLY = { tokenize = "boolean", add_generation_prompt = "boolean", continue_final_message = "boolean",
  tools = "table|string", documents = "table|string", date = "string", variables = "table", chat_template = "string",
  train_on = "string|function" }

--- Renders a conversation with the folder's chat template and encodes the result, like transformers. Only the template
--- writes special tokens: encoding adds none, and if a message contains the text of a special token, this text is
--- encoded as ordinary text.
---@param messages table|string a list of messages {role =, content =, ...}, or a JSON text, whose order of keys is kept
---@param options? {tokenize?: boolean, add_generation_prompt?: boolean, continue_final_message?: boolean, tools?:
--- table|string, documents?: table|string, date?: string, variables?: table<string, any>, chat_template?: string,
--- train_on?: string|fun(i: integer, role: string): boolean} tokenize = false: returns the text (default true).
--- add_generation_prompt = true: the text ends with the header of the model's next turn. continue_final_message = true:
--- the text ends inside the last message, so that the model continues this message. tools: JSON schemas of functions.
--- date: "YYYY-MM-DD", for templates that print the date. variables: additional variables for the template, such as
--- enable_thinking. chat_template: the text of a Jinja template that is used instead of the folder's template.
--- train_on: "assistant", "last", "all", or a function that is called with a message's index and role. If train_on is
--- given, a mask is also returned.
---@return integer[]|string the ids; the text if tokenize = false
---@return integer[]? mask only with train_on: 1 for each id that the model has to produce, and 0 for each other id
function conversations:apply_chat_template(messages, options)
  options = caller.options(options, "tokenizer:apply_chat_template", APPLY)
  if type(messages) ~= "string" then caller.typed(messages, "table", "apply_chat_template: the messages") end
  local template = options.chat_template and chat.template(options.chat_template)
    or self:chat_template { tools = options.tools ~= nil }
  local given = { add_generation_prompt = options.add_generation_prompt, tools = options.tools, date = options.date,
    continue_final_message = options.continue_final_message, documents = options.documents,
    variables = options.variables, tokens = self:special_tokens() }
  if options.tokenize == false then
    if options.train_on then
      error "apply_chat_template: train_on returns a mask of ids, but with tokenize = false there are no ids"
    end
    return template:render(messages, given)
  end
  if options.continue_final_message then
    if options.train_on then error "apply_chat_template: train_on and continue_final_message cannot be combined" end
    local ids = ids_of(self, { text = template:render(messages, given), message = {}, roles = {} })
    given.continue_final_message = nil
    local whole = template:trained(messages, given, "all")
    for _, parts in ipairs { whole.message, whole.roles } do   -- where these parts are in the shortened text is unknown
      for _, part in ipairs(parts) do
        for _, id in ipairs(self:encode(whole.text:sub(part[1], part[2]), { add_special_tokens = false })) do
          if rawget(self, "special_ids")[id] then
            error "apply_chat_template: with continue_final_message no message may spell a special token: remove it"
          end
        end
      end
    end
    return ids
  end
  local rendered = template:trained(messages, given, options.train_on or "all")
  local ids, bytes = ids_of(self, rendered)
  if not options.train_on then return ids end
  return ids, mask_of(bytes, rendered.spans)
end

return conversations
