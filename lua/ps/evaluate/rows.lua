-- SPDX-License-Identifier: BSD-3-Clause
-- Reads the rows that are evaluated: questions with choices, and questions with answers. The fields of a row may have
-- any of the names that are common in data sets.
local caller = require "ps.core.caller"
local error = caller.error

local rows = {}

-- Fields that may contain the text before an answer.
local CONTEXT = { "query", "context", "question", "ctx", "prompt", "instruction", "input" }
local CHOICES = { "choices", "endings", "options" }
local GOLD = { "gold", "answer", "label", "answerKey", "target" }
local ANSWERS = { "answers", "answer", "completion", "output", "target" }

-- Returns the value and the name of the first field in the list `names` that the row contains.
local function field(row, names)
  for _, name in ipairs(names) do
    local v = row[name]
    if v ~= nil and type(v) ~= "userdata" then return v, name end
  end
end

--- Returns whether a row is a question with choices.
---@param row table
---@return boolean
function rows.has_choices(row) return field(row, CHOICES) ~= nil end

-- Returns a list of the choices' texts and a list of their labels. In the row, the choices are a list of texts, or a
-- table { text = list of texts, label = list of labels }, as in the data set ARC. Without labels, the second result is
-- nil.
local function choices_of(row, place)
  local list, name = field(row, CHOICES)
  local labels
  if list == nil then
    error(("%s: the row has no choices; give them in the field '%s'"):format(place, table.concat(CHOICES, "' or '")))
  end
  if type(list) == "table" and list.text then list, labels = list.text, list.label end
  if type(list) ~= "table" or #list < 2 then error(("%s: the field '%s' is not a list of two or more choices"):format(
    place, name)) end
  for i, choice in ipairs(list) do
    if type(choice) ~= "string" then error(("%s: %s[%d] is a %s, not a text"):format(place, name, i, type(choice))) end
    if choice == "" then error(("%s: %s[%d] is empty"):format(place, name, i)) end
  end
  return list, labels
end

-- Returns the index of the correct choice, counted from 1. In the row, the correct choice is specified by an index
-- counted from 0, by a letter, by a label, or by its text.
local function gold_of(row, list, labels, place)
  local gold, name = field(row, GOLD)
  if gold == nil then error(("%s: the correct choice is missing; give it in the field '%s'"):format(place,
    table.concat(GOLD, "' or '"))) end
  if type(gold) == "table" then
    error(("%s: the field '%s' is a table; it must be a number of 0 to %d, a letter, a label or a choice"):format(place,
      name, #list - 1))
  end
  for i, label in ipairs(labels or {}) do if tostring(label) == tostring(gold) then return i end end
  for i, choice in ipairs(list) do if choice == gold then return i end end
  local i = tonumber(gold) and tonumber(gold) + 1
    or type(gold) == "string" and gold:find "^%u$" and gold:byte() - 64
  if not i or i % 1 ~= 0 or i < 1 or i > #list then
    error(("%s: %s = %s; it must be a number of 0 to %d, a letter, a label or a choice"):format(place, name,
      tostring(gold), #list - 1))
  end
  return i
end

-- Returns the text before the choices, and the name of the field that contains it. See rows.choices.
local function context_of(row, place)
  if type(row.query) == "string" then return row.query, "query" end
  local context, question = row.context, row.question
  if type(context) == "string" and type(question) == "string" then return context .. "\n\n" .. question, "question" end
  local first, name = field(row, CONTEXT)
  for _, other in ipairs(CONTEXT) do
    local v = row[other]
    if other ~= name and v ~= nil and type(v) ~= "userdata" then
      error(("%s: both '%s' and '%s' could precede the choices; write the whole text as 'query'"):format(place, name,
        other))
    end
  end
  return first, name
end

--- Returns the context of a row, its choices, and the index of the correct choice, counted from 1. The context is the
--- field `query`. If the row has no query, but a context and a question, the context is `context`, an empty line and
--- `question`. Otherwise the row may have only one of the fields context, question, ctx, prompt, instruction and input,
--- and this field is the context.
---@param row table
---@param place string file and line of the row, for errors
---@return string context
---@return string[] choices
---@return integer gold
function rows.choices(row, place)
  local context, name = context_of(row, place)
  if context == nil then context, name = "", "query" end
  if type(context) ~= "string" then error(("%s: the field '%s' is a %s, not a text"):format(place, name,
    type(context))) end
  local list, labels = choices_of(row, place)
  return context, list, gold_of(row, list, labels, place)
end

--- Returns the answers to a question. In the row, the answers are a text, a list of texts, or a table
--- { text = list of texts }, as in SQuAD.
---@param row table
---@param place string file and line of the row, for errors
---@return string[]
function rows.answers(row, place)
  local answers, name = field(row, ANSWERS)
  if type(answers) == "table" and answers.text then answers = answers.text end
  if type(answers) == "string" then answers = { answers } end
  if type(answers) == "table" and row.answers and #answers == 0 and next(answers) == nil then
    answers = { "" }                                       -- SQuAD marks a question without an answer this way
  end
  if type(answers) ~= "table" or #answers == 0 then
    error(("%s: %s"):format(place, name and ("the field '%s' is neither a text nor a list of texts"):format(name)
      or "an answer is missing; give it in the field '" .. table.concat(ANSWERS, "' or '") .. "'"))
  end
  for i, answer in ipairs(answers) do
    if type(answer) ~= "string" then error(("%s: %s[%d] is a %s, not a text"):format(place, name, i, type(answer))) end
  end
  return answers
end

--- Returns the question of a row.
---@param row table
---@param place string file and line of the row, for errors
---@return string
function rows.question(row, place)
  local context, name = field(row, { "question", "query", "prompt", "instruction", "input", "context" })
  if type(context) ~= "string" then
    error(("%s: %s"):format(place, name and ("the field '%s' is a %s, not a text"):format(name, type(context))
      or "a question is missing"))
  end
  return context
end

return rows
