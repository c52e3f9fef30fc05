-- SPDX-License-Identifier: BSD-3-Clause
-- Chat templates. A model's folder contains a Jinja template that turns a conversation into text. `render` applies the
-- template, like transformers' apply_chat_template. `trained` also returns which bytes of the text the model has to
-- produce.
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local json = require "ps.chat.json"
local convert = require "ps.chat.convert"
local parser = require "ps.chat.parser"
local evaluate = require "ps.chat.evaluate"
local format = require "ps.chat.format"
local mask = require "ps.chat.mask"
local utf8 = require "ps.core.utf8"
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local refuse = require "ps.core.refusal"
local nearest = require "ps.core.nearest"
local error = caller.error

local chat = {}

---@class ps.chat.Template
---@field source string
---@field run fun(variables: table<string, any>, track: boolean): string|ps.chat.Text
local Template = {}
Template.__index = Template

---@class ps.chat.RenderOptions
---@field add_generation_prompt? boolean true: the text ends with the header of the model's next turn
---@field continue_final_message? boolean true: the text ends inside the last message, so that the model continues it
---@field tools? table|string JSON schemas of the functions that the model can call, as a list of tables or as JSON
---@field documents? table|string documents for templates that use retrieval, as a list of tables or as JSON
---@field date? string "YYYY-MM-DD", for templates that print the date (default: today)
---@field tokens? table<string, string> the special tokens: bos_token, eos_token and so on
---@field variables? table<string, any> additional variables for the template, such as enable_thinking

local RENDER = { add_generation_prompt = "boolean", continue_final_message = "boolean", tools = "table|string",
  documents = "table|string", date = "string", tokens = "table", variables = "table" }

local function checked_options(options, call) return caller.options(options, call, RENDER) end

-- The fields of a message that may contain reasoning. reasoning_content is the standard field.
local REASONING = { "reasoning_content", "thinking", "reasoning" }
local REASONS = { reasoning_content = true, thinking = true, reasoning = true }

-- Converts Lua tables or JSON to a template value.
local function value_of(v, where)
  if type(v) ~= "string" then return convert.value(v, where) end
  local ok, value = pcall(json.decode, v)
  if ok then return value end
  return error(("%s: not JSON: %s"):format(where, type(value) == "table" and value.json or tostring(value)))
end

-- Roles that templates know. A template may make a special token from the name of a known role, as in
-- '<|' + role + '|>'.
local ROLES = { system = true, developer = true, user = true, assistant = true, tool = true, ["function"] = true,
  model = true, ipython = true, observation = true, environment = true, tool_response = true, ipynb = true }
local ROLE_NAMES = caller.sorted_names(ROLES)

-- Returns a copy of a value in which all strings have the given mark.
local function marked(v, mark)
  if type(v) == "string" then return text.marked(v, mark) end
  local class = getmetatable(v)
  if class == values.List then
    local list = {}
    for i, item in ipairs(v) do list[i] = marked(item, mark) end
    return values.list(list)
  elseif class == values.Dict then
    local dict = values.dict()
    for _, key in ipairs(v.keys) do values.set(dict, marked(key, mark), marked(values.get(v, key), mark)) end
    return dict
  end
  return v
end

-- Returns a copy of a list of tool calls in which all strings have the given mark and the number of their call.
local function marked_calls(v, mark)
  if getmetatable(v) ~= values.List then return marked(v, mark) end
  local list = {}
  for i, call in ipairs(v) do list[i] = marked(call, text.mark(mark, "call", i)) end
  return values.list(list)
end

-- Raises an error if `messages` is not a list of objects.
local function check_messages(messages)
  if getmetatable(messages) ~= values.List then error "messages: it must be a list of messages" end
  if #messages == 0 then error "messages: the conversation has no message" end
  for i, message in ipairs(messages) do
    if getmetatable(message) ~= values.Dict then
      error(("messages[%d]: it is a %s; it must be an object with role and content"):format(i, values.kind(message)))
    end
  end
end

-- Returns the messages as they are passed to a template. Fields that are null are removed. If a message contains
-- reasoning under any of the names in REASONING, the result contains it as `thinking` and `reasoning_content`. If
-- `track` is true, each string is marked with the index of its message.
local function messages_of(messages, track)
  check_messages(messages)
  local all = {}
  for i, message in ipairs(messages) do
    local reasoning
    for _, name in ipairs(REASONING) do
      local v = values.get(message, name)
      if reasoning == nil and v ~= nil and v ~= values.NONE then reasoning = v end
    end
    local dict, nulls = values.dict(), {}
    local function set(key, v)
      local name = text.flat(key)
      if track and name == "role" then
        v = marked(v, { role = text.is(v) and ROLES[text.flat(v)] and "known" or "unknown" })
      elseif track then
        local mark = { message = i, reasoning = REASONS[name] }
        key, v = marked(key, mark), name == "tool_calls" and marked_calls(v, mark) or marked(v, mark)
      end
      values.set(dict, key, v)
    end
    if reasoning ~= nil then set("thinking", reasoning) end
    for _, key in ipairs(message.keys) do
      local v = values.get(message, key)
      if v ~= values.NONE then set(key, v) else nulls[text.flat(key)] = true end
    end
    if reasoning ~= nil then set("reasoning_content", reasoning) end
    dict.nulls = nulls
    dict.message = i
    all[i] = dict
  end
  return values.list(all)
end

--- Returns noon of the given day in seconds since 1970. Without a date, returns the current time. Raises an error if
--- `date` does not have the form YYYY-MM-DD, or if there is no such day.
---@param date? string the day as YYYY-MM-DD
---@return integer
function chat.moment(date)
  if date == nil then return os.time() end
  caller.typed(date, "string", "date")
  local year, month, day = date:match "^(%d%d%d%d)-(%d%d)-(%d%d)$"
  local when = year and os.time { year = year, month = month, day = day, hour = 12 }
  if not when then error(("date = '%s': it must be YYYY-MM-DD"):format(date)) end
  if os.date("%Y-%m-%d", when) ~= date then error(("date = '%s': there is no such day"):format(date)) end
  return when
end

local LARGEST_RANGE = 100000

local function range(args)
  for i, v in ipairs(args) do
    if type(v) ~= "number" then
      values.raise("range: '%s' object cannot be interpreted as an integer", values.kind(values.defined(args[i])))
    end
  end
  if #args < 1 or #args > 3 then values.raise("range expected 1 to 3 arguments, got %d", #args) end
  local first, last, step = args[1], args[2], args[3] or 1
  if not last then first, last = 0, args[1] end
  if step == 0 then values.raise "range() arg 3 must not be zero" end
  local n = math.max(0, math.ceil((last - first) / step))
  if n > LARGEST_RANGE then values.raise("range too big: %d, the limit is %d", n, LARGEST_RANGE) end
  local items = {}
  for i = 1, n do items[i] = first + (i - 1) * step end
  return values.list(items)
end

-- Returns a dict of the arguments of a call, like Python's dict(...).
local function pairs_of(args, named)
  local dict = values.dict()
  if args[1] ~= nil then
    if getmetatable(args[1]) == values.Dict then
      for _, key in ipairs(args[1].keys) do values.set(dict, key, values.get(args[1], key)) end
    else
      for _, pair in ipairs(values.items(values.defined(args[1]))) do
        local items = values.items(pair)
        if #items ~= 2 then values.raise("dictionary update sequence element has length %d; 2 is required", #items) end
        values.set(dict, items[1], items[2])
      end
    end
  end
  local names = {}
  for name in pairs(named) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do values.set(dict, name, named[name]) end
  return dict
end

-- Returns the functions that all templates can call.
local function globals(when)
  return {
    range = values.callable("range", range),
    dict = values.callable("dict", pairs_of),
    namespace = values.callable("namespace", function(args, named)
      local space = values.namespace()
      local dict = pairs_of(args, named)
      for _, key in ipairs(dict.keys) do
        local name = text.flat(key)
        if name:sub(1, 1) == "_" then values.raise("a namespace cannot have the attribute '%s'", name) end
        space.map[name] = values.get(dict, key)
      end
      return space
    end),
    raise_exception = values.callable("raise_exception", function(args)
      return values.raise("%s", text.flat(values.str(args[1] == nil and "" or args[1])))
    end),
    strftime_now = values.callable("strftime_now", function(args)
      if args[1] == nil then values.raise "strftime_now needs a format" end
      if not text.is(args[1]) then
        values.raise("strftime() argument 1 must be str, not %s", values.kind(values.defined(args[1])))
      end
      return format.date(text.flat(args[1]), when)
    end),
  }
end

-- Returns the variables that a template can read: the global functions, the special tokens, the messages, the tools and
-- documents, and options.variables. If `track` is true, strings from messages, tools and documents are marked.
local function variables_of(messages, options, track)
  local vars = globals(chat.moment(options.date))
  for name, token in pairs(options.tokens or {}) do vars[name] = token end
  vars.messages = messages_of(messages, track)
  for _, name in ipairs { "tools", "documents" } do
    local v = options[name] ~= nil and value_of(options[name], name) or values.NONE
    vars[name] = track and marked(v, { data = name }) or v
  end
  vars.add_generation_prompt = options.add_generation_prompt == true
  for name, v in pairs(options.variables or {}) do vars[name] = convert.value(v, "variables." .. name) end
  return vars
end

-- Raises a ps.Error for an error in a template. The text of the ps.Error is "FILE:LINE: NAME: MESSAGE", where FILE:LINE
-- is the place in the user's script. The field `raised` is the template's message alone.
local function raise(name, message)
  local _, said = pcall(error, ("%s: %s"):format(name, message))
  _G.error(setmetatable({ code = native.C.PS_EINVAL, name = "EINVAL", msg = said, where = "", raised = message },
    native.Error), 0)
end

-- Renders a template. Converts errors of the template to errors of psluajit.
local function render(template, vars, track)
  local ok, result = pcall(template.run, vars, track)
  if ok then return result end
  if type(result) == "table" and result.chat_template then
    return raise(template.name, result.chat_template)
  end
  if type(result) == "table" and result.unsupported then
    return refuse(template.name, result.unsupported .. " is not supported in a chat template")
  end
  return error(("%s: %s"):format(template.name, tostring(result)))
end

local TAG = "CONTINUE_FINAL_MESSAGE_TAG "

-- Appends a tag to the content of the last message, for continue_final_message: the caller renders the messages and
-- then cuts the text off at the tag. Returns the content without the tag.
local function tagged(messages)
  local last = messages[#messages]
  local content = values.get(last, "content")
  if text.is(content) then
    values.set(last, "content", content .. TAG)
    return content
  end
  for i = content and getmetatable(content) == values.List and #content or 0, 1, -1 do
    local part = content[i]
    local words = getmetatable(part) == values.Dict and values.get(part, "text")
    if words then
      values.set(part, "text", words .. TAG)
      return words
    end
  end
  return error "continue_final_message: the last message has no text to continue"
end

--- Renders a conversation as text, like apply_chat_template of transformers.
---@param messages table|string a list of messages {role =, content =, ...}, or a JSON text, whose order of keys is kept
---@param options? ps.chat.RenderOptions
---@return string
function Template:render(messages, options)
  options = checked_options(options, "template:render")
  messages = value_of(messages, "messages")
  if not options.continue_final_message then
    return text.flat(render(self, variables_of(messages, options, false), false))
  end
  if options.add_generation_prompt then
    error "continue_final_message and add_generation_prompt: pass only one of them, since both decide how the text ends"
  end
  messages = messages_of(messages, false)
  local words = tagged(messages)
  local all = text.flat(render(self, variables_of(messages, options, false), false))
  local tag = text.flat(text.strip(TAG, nil, true, true))
  local at
  for first in all:gmatch("()" .. tag) do at = first end
  if not at or not all:find(text.flat(text.strip(words, nil, true, true)), 1, true) then
    error "continue_final_message: the template does not print the last message as it is"
  end
  if all:sub(at, at + #TAG - 1) == TAG then return all:sub(1, at - 1) end
  return text.flat(text.strip(all:sub(1, at - 1), nil, false, true))
end

--- Returns whether the template uses the date. In this case its text may change from day to day.
---@return boolean
function Template:reads_date() return self.source:find("strftime_now", 1, true) ~= nil end

-- Returns the header that begins a turn of the assistant, or "" if the template writes no header. Returns the first of
-- these texts that is not empty:
-- 1. the text that the template adds after the user's last message if add_generation_prompt is true
-- 2. the text that the template always writes after the user's last message
-- 3. the text that the template writes before the content of an answer
local function generation_prompt(self, messages, options)
  local upto
  for i = #messages, 1, -1 do
    local role = values.get(messages[i], "role")
    if role and text.flat(role) == "user" then upto = i; break end
  end
  local function said(role)
    local dict = values.dict()
    values.set(dict, "role", role)
    values.set(dict, "content", "x")
    return dict
  end
  local shown = values.list(upto and values.copied(messages, 1, upto)
    or { said "user" })                                    -- the header does not depend on the text of the message
  local function text_of(prompt)
    local vars = variables_of(shown, options, false)
    vars.add_generation_prompt = prompt
    return text.flat(render(self, vars, false))
  end
  local ok, with = pcall(text_of, true)
  local plain, without = pcall(text_of, false)
  if not (ok and plain) then return "" end
  local prompt = mask.prompt(with, without)
  if prompt ~= "" then return prompt end
  local tail = mask.tail(render(self, variables_of(shown, options, true), true))
  if tail ~= "" then return tail end
  shown[#shown + 1] = said "assistant"
  local answered, rendered = pcall(function() return render(self, variables_of(shown, options, true), true) end)
  return answered and mask.header(rendered, #shown) or ""
end

--- The strings that are allowed as `train_on`.
chat.TRAIN_ON = { assistant = true, last = true, all = true }

-- Returns the roles of the messages.
local function roles_of(messages)
  check_messages(messages)
  local roles = {}
  for i, message in ipairs(messages) do
    local role = values.get(message, "role")
    roles[i] = role and text.flat(values.str(role)) or ""
  end
  return roles
end

-- Raises an error if a role is probably misspelt: it is not in ROLES and does not occur in the template, but its name
-- is similar to a name in ROLES. Without this error, the template would print the misspelt role, and the message would
-- not be trained.
local function check_roles(self, roles)
  for i, role in ipairs(roles) do
    local meant = not ROLES[role] and not self.source:find(role, 1, true) and nearest.find(role, ROLE_NAMES)
    if meant then
      error(("messages[%d]: the chat template has no role '%s'; did you mean '%s'?"):format(i, role, meant))
    end
  end
end

-- Returns a table in which the index of each message with weight = 0 is a key with the value true. Returns nil if there
-- is no such message. `weight` is a field in OpenAI's files for fine-tuning.
local function unweighted(messages)
  local list
  for i, message in ipairs(messages) do
    local weight = values.get(message, "weight")
    if weight ~= nil and weight ~= values.NONE then
      local number = values.number(weight)
      if number ~= 0 and number ~= 1 then error(("messages[%d]: weight must be 0 or 1"):format(i)) end
      if number == 0 then
        list = list or {}
        list[i] = true
      end
    end
  end
  return list
end

-- Returns the indices of the messages that are trained. `roles` lists the roles of all messages. `without` is a table
-- from unweighted(): messages in this table are not trained.
local function wanted_of(roles, train_on, without)
  local wanted = {}
  for i, role in ipairs(roles) do
    local yes
    if type(train_on) == "function" then yes = train_on(i, role) else yes = role == "assistant" end
    if yes and not (without and without[i]) then wanted[#wanted + 1] = i end
  end
  if train_on == "last" then return { wanted[#wanted] } end
  return wanted
end

-- Returns the field left_out of a rendered conversation.
local function left_out(messages, tools, written)
  local out = { reasoning = {}, tool_calls = {} }
  local function has_items(v) return getmetatable(v) == values.List and #v > 0 end
  for i, message in ipairs(messages) do
    local reasons = false
    for _, name in ipairs(REASONING) do
      local v = values.get(message, name)
      reasons = reasons or v and v ~= values.NONE and text.flat(values.str(v)):find "%S" ~= nil
    end
    if reasons and not written.reasoning[i] then table.insert(out.reasoning, i) end
    local calls = values.get(message, "tool_calls")
    local seen = written.calls[i] or {}
    for call = 1, has_items(calls) and #calls or 0 do
      if not seen[call] then
        table.insert(out.tool_calls, i)
        break
      end
    end
  end
  out.tools = has_items(tools) and not written.tools
  return out
end

---@class ps.chat.Rendered
---@field text string
---@field spans {[1]: integer, [2]: integer}[] first and last byte of each piece that the model has to produce
---@field message {[1]: integer, [2]: integer}[] first and last byte of each piece that was copied from a message, a
--- tool or a document
---@field roles {[1]: integer, [2]: integer, known: boolean}[] first and last byte of each role; known is true if the
--- role is in ROLES
---@field left_out {reasoning: integer[], tool_calls: integer[], tools: boolean} the parts that are not in the text:
--- the reasoning of these messages, some or all tool calls of these messages, and the tools

--- Renders a conversation. Returns the text, and the ranges of bytes that the model has to produce. In each turn of the
--- assistant, the model has to produce all bytes after the header, up to and including the token that ends the turn:
--- reasoning, channels, calls and content.
---@param messages table|string the messages, as for render
---@param options? ps.chat.RenderOptions
---@param train_on? "assistant"|"last"|"all"|fun(i: integer, role: string): boolean selects the messages to train on
--- (default "assistant"). A message with weight = 0 is trained only if train_on is "all".
---@return ps.chat.Rendered
function Template:trained(messages, options, train_on)
  options, train_on = checked_options(options, "template:trained"), train_on or "assistant"
  if type(train_on) ~= "function" then caller.one_of(train_on, chat.TRAIN_ON, "train_on") end
  messages = value_of(messages, "messages")
  local given = roles_of(messages)
  check_roles(self, given)
  local without = unweighted(messages)
  local variables = variables_of(messages, options, true)
  local rendered = render(self, variables, true)
  local s = text.flat(rendered)
  local spans = mask.generated(rendered)
  if train_on == "all" then spans = { { 1, #s } }
  elseif spans and (train_on ~= "assistant" or without) then
    spans = mask.generated(rendered, wanted_of(given, train_on, without)) or {}
  elseif not spans then
    local prompt = generation_prompt(self, messages, options)
    local turn, stranger
    spans, turn, stranger = mask.spans(rendered, wanted_of(given, train_on, without), prompt,
      options.tokens and options.tokens.eos_token, given)
    if not spans then
      refuse(self.name, ("the template writes messages[%d] within the turn of messages[%d], so the text that the "
        .. "model has to produce is unknown: give the template {%% generation %%} blocks"):format(stranger, turn))
    end
  end
  local parts, roles, written = {}, {}, { reasoning = {}, calls = {} }
  text.each(rendered, function(first, last, mark)
    if not mark then return end
    if mark.message or mark.data then parts[#parts + 1] = { first, last } end
    if mark.role then roles[#roles + 1] = { first, last, known = mark.role == "known" } end
    if mark.reasoning then written.reasoning[mark.message] = true end
    if mark.call then
      written.calls[mark.message] = written.calls[mark.message] or {}
      written.calls[mark.message][mark.call] = true
    end
    if mark.data then written[mark.data] = true end
  end)
  return { text = s, spans = spans, message = parts, roles = roles,
    left_out = left_out(messages, variables.tools, written) }
end

local compiled = setmetatable({}, { __mode = "v" })

--- Compiles a Jinja text to a template. If the text uses a construct that is not supported, raises an error with the
--- construct and its line.
---@param source string
---@param name? string name of the template's file, for errors
---@return ps.chat.Template
function chat.template(source, name)
  caller.typed(source, "string", "the chat template")
  name = name or "chat template"
  local key = name .. "\0" .. source
  if compiled[key] then return compiled[key] end
  if not utf8.valid(source) then error(name .. ": it is not valid UTF-8") end
  local ok, run = pcall(function() return evaluate.compile(parser.parse(source)) end)
  if not ok then
    if type(run) == "table" then refuse(name, run.template or run.chat_template or run.unsupported) end
    error(("%s: %s"):format(name, tostring(run)))
  end
  local template = setmetatable({ source = source, name = name, run = run }, Template)
  compiled[key] = template
  return template
end

return chat
