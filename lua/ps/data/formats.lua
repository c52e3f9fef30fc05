-- SPDX-License-Identifier: BSD-3-Clause
-- The forms in which files have examples, recognised by their fields, and the conversation that a row is. The names are
-- TRL's; Alpaca's and ShareGPT's forms are those of their data sets.
local caller = require "ps.core.caller"
local json = require "ps.chat.json"
local text = require "ps.chat.text"
local values = require "ps.chat.values"
local null = require("cjson").null
local error = caller.error

local formats = {}

-- Forms with the fields that a row must have; the first that fits counts.
local FORMS = {
  { "messages", "messages" },
  { "sharegpt", "conversations" },
  { "preference", "prompt", "chosen", "rejected" },
  { "preference", "chosen", "rejected" },
  { "unpaired preference", "prompt", "completion", "label" },
  { "prompt and completion", "prompt", "completion" },
  { "alpaca", "instruction", "output" },
  { "ids", "input_ids" },
  { "text", "text" },
}

local NAMES = {}
for _, form in ipairs(FORMS) do NAMES[form[1]] = true end

-- The form of a row by its fields; nil: none.
local function form_of(has)
  for _, form in ipairs(FORMS) do
    local fits = true
    for i = 2, #form do fits = fits and has(form[i]) end
    if fits then return form[1] end
  end
end

-- A row of a table as values that keep the order of keys where the file has one.
local function row_of(rows, i)
  local source = rows:json(i)
  if not source then return nil, rows[i] end
  local ok, row = pcall(json.decode, source)
  if not ok then
    error(("%s: not JSON: %s"):format(rows:place(i), type(row) == "table" and row.json or tostring(row)))
  end
  if getmetatable(row) ~= values.Dict then error(rows:place(i) .. ": each row must be a JSON object") end
  return row
end

local function fields_of(rows, i)
  local row, plain = row_of(rows, i)
  if row then return function(name) local v = values.get(row, name); return v ~= nil and v ~= values.NONE end end
  return function(name) return plain[name] ~= nil and plain[name] ~= null end
end

-- The names of a row's fields, for errors.
local function names_of(rows, i)
  local names = {}
  for name in pairs(rows[i]) do names[#names + 1] = tostring(name) end
  table.sort(names)
  return table.concat(names, ", ")
end

--- The form of a table's rows: "messages", "sharegpt", "preference", "unpaired preference", "prompt and completion",
--- "alpaca", "ids" or "text". All rows must have one form; a row of another is an error with its file and line.
---@param rows ps.DataTable
---@param options? {check?: integer} how many rows are looked at, from the first on; default all
---@return string
function formats.recognise(rows, options)
  options = caller.options(options, "ps.data.format", { check = "whole" })
  if #rows == 0 then error "ps.data.format: the table has no rows" end
  local first
  for i = 1, math.min(#rows, options.check or #rows) do
    local form = form_of(fields_of(rows, i))
    if not form then
      error(("%s: the fields %s are of no known form (messages; conversations; prompt, completion; prompt, chosen, "
        .. "rejected; instruction, output; text; input_ids)"):format(rows:place(i), names_of(rows, i)))
    end
    first = first or form
    if form ~= first then
      error(("%s: a row in the form '%s'; the first row is in the form '%s'"):format(rows:place(i), form, first))
    end
  end
  return first
end

local function as_value(v)
  if v == null then return values.NONE end
  if type(v) ~= "table" or getmetatable(v) then return v end
  local dict = values.dict()
  local keys = {}
  for key in pairs(v) do keys[#keys + 1] = key end
  if #v > 0 or #keys == 0 then
    local list = {}
    for i, item in ipairs(v) do list[i] = as_value(item) end
    return values.list(list)
  end
  table.sort(keys)
  for _, key in ipairs(keys) do values.set(dict, key, as_value(v[key])) end
  return dict
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

local CONVERSATIONS = {}

function CONVERSATIONS.messages(get) return get "messages" end

function CONVERSATIONS.sharegpt(get, place)
  local messages = {}
  for i, turn in ipairs(get "conversations") do
    local from = getmetatable(turn) == values.Dict and values.get(turn, "from")
    local role = from and SHAREGPT[text.flat(from)]
    if not role then
      error(("%s: conversations[%d]: from = '%s'; human, gpt, system and tool are known"):format(place, i,
        from and text.flat(from) or "nothing"))
    end
    messages[i] = message(role, values.get(turn, "value"))
  end
  local system = get("system", true)
  if text.is(system) and text.flat(system) ~= "" then table.insert(messages, 1, message("system", system)) end
  return values.list(messages)
end

-- A prompt and its completion: each a text, or a list of messages.
local function pair(prompt, completion)
  local messages = {}
  for _, part in ipairs { { "user", prompt }, { "assistant", completion } } do
    if text.is(part[2]) then messages[#messages + 1] = message(part[1], part[2])
    else for _, one in ipairs(part[2]) do messages[#messages + 1] = one end end
  end
  return values.list(messages)
end

CONVERSATIONS["prompt and completion"] = function(get) return pair(get "prompt", get "completion") end

function CONVERSATIONS.alpaca(get)
  local input = get "input"
  local asked = get "instruction"
  if input and input ~= "" and input ~= values.NONE then asked = asked .. "\n\n" .. input end
  return values.list { message("user", asked), message("assistant", get "output") }
end

--- The conversation that a row is: messages as tokenizer:apply_chat_template takes them. Rows in the forms "messages",
--- "sharegpt", "prompt and completion" and "alpaca" are conversations. Keys keep the order of the file.
---@param rows ps.DataTable
---@param i integer row, from 1
---@param form? string as ps.data.format gives it; default: that of the row
---@return table messages
---@return table? tools the row's field `tools`
function formats.conversation(rows, i, form)
  if form ~= nil then caller.one_of(form, NAMES, "ps.data.conversation: the form") end
  local row, plain = row_of(rows, i)
  row = row or as_value(plain)
  form = form or form_of(function(name) local v = values.get(row, name); return v ~= nil and v ~= values.NONE end)
  local read = CONVERSATIONS[form or ""]
  if not read then error(("%s: a row in the form '%s' is no conversation"):format(rows:place(i), form or "unknown")) end
  local messages = read(function(name, may_lack)
    local v = values.get(row, name)
    if v == nil and name ~= "input" and not may_lack then
      error(("%s: the field '%s' is missing"):format(rows:place(i), name))
    end
    return v
  end, rows:place(i))
  if getmetatable(messages) ~= values.List or #messages == 0 then
    error(rows:place(i) .. ": the conversation has no message")
  end
  local tools = values.get(row, "tools")
  return messages, tools ~= values.NONE and tools or nil
end

--- The messages of a row before the assistant's last turn: a prompt for the model.
---@param rows ps.DataTable
---@param i integer row, from 1
---@param form? string as ps.data.format gives it; default: that of the row
---@return table messages
---@return table? tools the row's field `tools`
function formats.prompt(rows, i, form)
  local messages, tools = formats.conversation(rows, i, form)
  for k = #messages, 1, -1 do
    local role = values.get(messages[k], "role")
    if role and text.flat(role) == "assistant" then return values.list(values.copied(messages, 1, k - 1)), tools end
  end
  return messages, tools
end

return formats
