-- SPDX-License-Identifier: BSD-3-Clause
-- Recognises the form of examples by their fields, and converts rows to conversations. Most forms have the same names
-- as in TRL. The forms "alpaca" and "sharegpt" are named after the data sets Alpaca and ShareGPT, which introduced
-- them.
local caller = require "ps.core.caller"
local convert = require "ps.chat.convert"
local json = require "ps.chat.json"
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local tables = require "ps.data.table"
local null = require("cjson").null
local error = caller.error

local formats = {}

local IGNORED = require("ps.data.batch").IGNORED

-- The forms of rows. Each item lists the name of a form and the fields that a row of this form must have. If several
-- forms fit a row, the first one is used.
local FORMS = {
  { "messages", "messages" },
  { "sharegpt", "conversations" },
  { "preference", "prompt", "chosen", "rejected" },
  { "preference", "chosen", "rejected" },
  { "unpaired preference", "prompt", "completion", "label" },
  { "prompt and completion", "prompt", "completion" },
  { "alpaca", "instruction", "output" },
  { "squad", "context", "question", "answers" },
  { "ids", "input_ids" },
  { "text", "text" },
}

local NAMES = {}
for _, form in ipairs(FORMS) do NAMES[form[1]] = true end

-- Returns the form of a row, or nil if no form fits. has(name) says whether the row has a field.
local function form_of(has)
  for _, form in ipairs(FORMS) do
    local fits = true
    for i = 2, #form do fits = fits and has(form[i]) end
    if fits then return form[1] end
  end
end

local function checked(rows, call)
  if not tables.is(rows) then
    error(("%s: the first argument is a %s; pass the result of ps.data.table"):format(call, type(rows)))
  end
  return rows
end

-- Returns row i of a table as a template value. If the row is from a JSON file, its keys have the order of the file.
-- `read` is the row as a Lua table if it was already read.
local function row_of(rows, i, read)
  local source = rows:json(i)
  if not source then return convert.value(read or rows[i], rows:place(i)) end
  local ok, row = pcall(json.decode, source)
  if not ok then
    local known = type(row) == "table"
    local one_line = known and row.in_line and not source:find("\n", 1, true)     -- the place already contains the line
    error(("%s: not JSON: %s"):format(rows:place(i), one_line and row.in_line or known and row.json or tostring(row)))
  end
  if getmetatable(row) ~= values.Dict then error(rows:place(i) .. ": each row must be a JSON object") end
  return row
end

--- Raises an error if row i is a JSON object in which one of the given keys occurs twice. To save time, the row is
--- decoded only if one of the keys occurs twice in its text.
---@param rows ps.DataTable
---@param i integer
---@param keys string[]
function formats.check_keys(rows, i, keys)
  local source = rows:json(i)
  for _, key in ipairs(source and keys or {}) do
    local quoted = '"' .. key .. '"'
    local _, last = source:find(quoted, 1, true)
    if last and source:find(quoted, last + 1, true) then
      row_of(rows, i)
      return
    end
  end
end

-- Returns the names of the fields of a row, for errors.
local function names_of(row)
  local names = {}
  for name, value in pairs(row) do names[#names + 1] = tostring(name) .. (value == null and " (null)" or "") end
  table.sort(names)
  return table.concat(names, ", ")
end

--- Returns row i and its form. Raises an error if the row has no known form.
---@param rows ps.DataTable
---@param i integer
---@param first? string form of the first row; row i must have the same form
---@return table row
---@return string form
function formats.check(rows, i, first)
  local row = rows[i]
  local form = form_of(function(name) return row[name] ~= nil and row[name] ~= null end)
  if not form and next(row) == nil then error(rows:place(i) .. ": the row has no fields") end
  if not form then
    error(("%s: the fields %s match no known form (messages; conversations; prompt, completion; prompt, chosen, "
      .. "rejected; instruction, output; context, question, answers; text; input_ids); questions with "
      .. "answers are for evaluations, with task = 'answers'"):format(rows:place(i),
      names_of(row)))
  end
  if first and form ~= first then
    error(("%s: this row has the form '%s', but the first row has the form '%s'"):format(rows:place(i), form, first))
  end
  return row, form
end

--- Returns the form of the rows of a table: "messages", "sharegpt", "preference", "unpaired preference", "prompt and
--- completion", "alpaca", "squad", "ids" or "text". All rows must have the same form. If a row has another form, raises
--- an error with the row's file and line.
---@param rows ps.DataTable
---@param options? {check?: integer} check: number of rows to check, starting at the first row (default: all rows)
---@return string
function formats.recognise(rows, options)
  checked(rows, "ps.data.format")
  options = caller.options(options, "ps.data.format", { check = "whole" })
  if options.check then caller.whole(options.check, "ps.data.format: check", 1) end
  if #rows == 0 then error(("ps.data.format: the table has no rows: %s"):format(tostring(rows))) end
  local first
  for i = 1, math.min(#rows, options.check or #rows) do
    local _, form = formats.check(rows, i, first)
    first = form
  end
  return first
end

local function message(role, content)
  local dict = values.dict()
  values.set(dict, "role", role)
  values.set(dict, "content", content)
  return dict
end

local SHAREGPT = { system = "system", human = "user", user = "user", gpt = "assistant", assistant = "assistant",
  chatgpt = "assistant", bing = "assistant", bard = "assistant", tool = "tool", observation = "tool",
  function_call = "assistant" }

-- Functions that convert a row to a conversation, by form. Such a function calls get(name, kinds) to read a field of
-- the row. `get` raises an error if the value of the field is not of one of the given kinds.
local CONVERSATIONS = {}

function CONVERSATIONS.messages(get) return get("messages", "list") end

function CONVERSATIONS.sharegpt(get, fail)
  local messages = {}
  for i, turn in ipairs(get("conversations", "list")) do
    local from = getmetatable(turn) == values.Dict and values.get(turn, "from")
    local role = text.is(from) and SHAREGPT[text.flat(from)]
    if not role then
      fail("conversations[%d]: from is '%s'; it must be human, gpt, system or tool", i,
        from and text.flat(values.repr(from)):gsub("^'(.*)'$", "%1") or "nothing")
    end
    local value = values.get(turn, "value")
    if value == nil then fail("conversations[%d]: the field 'value' is missing", i) end
    messages[i] = message(role, value)
  end
  local system = get("system", "str NoneType", true)
  if text.is(system) and system ~= "" then table.insert(messages, 1, message("system", system)) end
  return values.list(messages)
end

-- Appends to a list of messages. `part` is a list of messages, or the text of one message with the given role.
local function append(messages, role, part)
  if text.is(part) then messages[#messages + 1] = message(role, part)
  else for _, one in ipairs(part) do messages[#messages + 1] = one end end
end

CONVERSATIONS["prompt and completion"] = function(get)
  local messages = {}
  append(messages, "user", get("prompt", "str list"))
  append(messages, "assistant", get("completion", "str list"))
  return values.list(messages)
end

function CONVERSATIONS.alpaca(get)
  local asked, input = get("instruction", "str"), get("input", "str NoneType", true)
  if text.is(input) and input ~= "" then asked = asked .. "\n\n" .. input end
  return values.list { message("user", asked), message("assistant", get("output", "str")) }
end

-- Converts a SQuAD row to two messages. The user's message consists of the paragraph and the question. The assistant's
-- message is the first of the correct answers.
function CONVERSATIONS.squad(get, fail)
  local answers = get("answers", "dict list")
  if getmetatable(answers) == values.Dict then answers = values.get(answers, "text") or values.list {} end
  local answer = getmetatable(answers) == values.List and answers[1]
  if not text.is(answer) then fail "the question has no answer: leave it out (rows:filter)" end
  return values.list { message("user", get("context", "str") .. "\n\n" .. get("question", "str")),
    message("assistant", answer) }
end

-- Raises an error if a message is not an object with a role.
local function check_messages(messages, fail)
  if #messages == 0 then fail "the conversation has no message" end
  for i, one in ipairs(messages) do
    if getmetatable(one) ~= values.Dict then
      fail("message %d has type %s; it must be an object with role and content", i, values.kind(one))
    end
    local role = values.get(one, "role")
    if not text.is(role) then
      fail("message %d: its role is %s", i, role == nil and "missing" or text.flat(values.repr(role)))
    end
  end
end

-- Takes the results of a pcall. If the call succeeded, returns its results. Otherwise raises its error, with the file
-- and line of row i added.
local function at_place(rows, i, ok, ...)
  if ok then return ... end
  local problem, where = tostring((...)), caller.position()
  if where ~= "" and problem:sub(1, #where) == where then problem = problem:sub(#where + 1) end
  error(("%s: %s"):format(rows:place(i), problem))
end

--- Calls fn(...) for row i and returns its results. If fn fails, the error contains the row's file and line.
---@param rows ps.DataTable
---@param i integer
---@param fn function
---@return any ... the results of fn
function formats.of_row(rows, i, fn, ...) return at_place(rows, i, pcall(fn, ...)) end

--- Returns a row as a conversation: a list of messages for tokenizer:apply_chat_template. The row must have one of the
--- forms "messages", "sharegpt", "prompt and completion", "alpaca" and "squad". The keys of objects have the order of
--- the file.
---@param rows ps.DataTable
---@param i integer number of the row, counted from 1
---@param form? string form of the row, as returned by ps.data.format (default: determined by the row's fields)
---@return table messages
---@return table? tools the field `tools` of the row
function formats.conversation(rows, i, form)
  checked(rows, "ps.data.conversation")
  if form ~= nil then caller.one_of(form, NAMES, "ps.data.conversation: the form") end
  return formats.conversation_of(rows, i, form)
end

--- Like formats.conversation, but for a row that was already read. Not reading the row again ensures that the functions
--- of table:map are called only once for each row.
---@param rows ps.DataTable
---@param i integer
---@param form? string
---@param read? table the row, as returned by rows[i]
---@return table messages
---@return table? tools
function formats.conversation_of(rows, i, form, read)
  local row = row_of(rows, i, read)
  local function fail(why, ...) error(("%s: " .. why):format(rows:place(i), ...)) end
  form = form or form_of(function(name) local v = values.get(row, name); return v ~= nil and v ~= values.NONE end)
  local convert_row = CONVERSATIONS[form or ""]
  if not convert_row then
    fail("a row in the form '%s' is not a conversation, which has fields such as 'messages', or 'prompt' and "
      .. "'completion' (docs/data.md lists the forms)", form or "unknown")
  end
  local kwargs = values.get(row, "chat_template_kwargs")
  if getmetatable(kwargs) == values.Dict and #kwargs.keys > 0 then
    fail "the field 'chat_template_kwargs' is not applied: remove it (rows:map)"
  end
  local messages = convert_row(function(name, kinds, may_lack)
    local v = values.get(row, name)
    if v == nil and may_lack then return nil end
    if v == nil then fail("the field '%s' is missing", name) end
    local kind = values.kind(v)
    if not (" " .. kinds .. " "):find(" " .. kind .. " ", 1, true) then
      fail("the field '%s' has type %s; it must have type %s", name, kind,
        (kinds:gsub(" NoneType", ""):gsub(" ", " or ")))
    end
    return v
  end, fail)
  check_messages(messages, fail)
  local tools = values.get(row, "tools")
  if tools == values.NONE then tools = nil end
  if tools ~= nil and getmetatable(tools) ~= values.List and not text.is(tools) then
    fail("the field 'tools' has type %s; it must be a list, or a list in JSON", values.kind(tools))
  end
  return messages, tools
end

-- Returns a field of a row. Raises an error if the field is not a list of whole numbers. Returns nil if the row does
-- not have the field.
local function whole_numbers(row, name, fail)
  local list = row[name]
  if list == nil or list == null then return nil end
  if type(list) ~= "table" or #list == 0 and next(list) ~= nil then
    fail("the field '%s' is not a list of token ids", name)
  end
  for k, id in ipairs(list) do
    if type(id) ~= "number" or id % 1 ~= 0 then fail("%s[%d] is %s, not a token id", name, k, tostring(id)) end
  end
  return list
end

--- Returns the ids and the labels of a row of the form "ids". Each id has a label: a token id, or -100 if the id is not
--- trained.
---@param rows ps.DataTable
---@param i integer number of the row, counted from 1
---@param vocab_size? integer size of the vocabulary; all ids must be less than vocab_size
---@return integer[] input_ids
---@return integer[]? labels one label per id; nil if the row has no labels
function formats.ids(rows, i, vocab_size)
  return formats.ids_of(rows, i, checked(rows, "ps.data.ids")[i], vocab_size)
end

--- Like formats.ids, but for a row that was already read.
---@param rows ps.DataTable
---@param i integer
---@param row table
---@param vocab_size? integer
---@return integer[] input_ids
---@return integer[]? labels
function formats.ids_of(rows, i, row, vocab_size)
  local function fail(why, ...) error(("%s: " .. why):format(rows:place(i), ...)) end
  local ids, labels = whole_numbers(row, "input_ids", fail), whole_numbers(row, "labels", fail)
  if not ids or #ids == 0 then fail "the field 'input_ids' has no token id" end
  if labels and #labels ~= #ids then
    fail("there are %d labels for %d input_ids; give one label per id", #labels, #ids)
  end
  local most = vocab_size or 2 ^ 31
  for k, id in ipairs(ids) do
    if id < 0 or id >= most then
      fail("input_ids[%d] is %d; the vocabulary has the ids 0 to %.0f", k, id, most - 1)
    end
    local label = labels and labels[k]
    if label and label ~= IGNORED and (label < 0 or label >= most) then
      fail("labels[%d] is %d; it must be -100 or an id of 0 to %.0f", k, label, most - 1)
    end
  end
  return ids, labels
end

--- Returns the messages of a row up to, but without, the assistant's last turn. These messages can be used as a prompt.
---@param rows ps.DataTable
---@param i integer number of the row, counted from 1
---@param form? string form of the row, as returned by ps.data.format (default: determined by the row's fields)
---@return table messages
---@return table? tools the field `tools` of the row
function formats.prompt(rows, i, form)
  local messages, tools = formats.conversation(rows, i, form)
  for k = #messages, 1, -1 do
    local role = values.get(messages[k], "role")
    if text.flat(role) == "assistant" then return values.list(values.copied(messages, 1, k - 1)), tools end
  end
  return messages, tools
end

return formats
