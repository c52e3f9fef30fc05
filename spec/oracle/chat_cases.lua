-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit spec/oracle/chat_cases.lua CASES.json RESULTS.json: renders conversations by chat templates. A case has the
-- conversation as JSON, options and the date, and a template's path, or a folder whose tokenizer then gives ids and a
-- mask. A result is {text}, {ids, mask} or {error}; `pieces` asks for the trained parts of the text, too.
local cjson = require "cjson"
local chat = require "ps.chat"
local ps = require "ps"

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

local function answer(case)
  local options = case.options
  options.date = case.date
  if case.folder then
    local tok = ps.tokenizer.from_pretrained(case.folder)
    options.tokens = nil
    local ids, mask = tok:apply_chat_template(case.messages, options)
    return { ids = ids, mask = mask }
  end
  local template = chat.template(read(case.template), "template")
  if not case.pieces then return { text = template:render(case.messages, options) } end
  local rendered, pieces = template:trained(case.messages, options), {}
  for i, span in ipairs(rendered.spans) do pieces[i] = rendered.text:sub(span[1], span[2]) end
  return { text = rendered.text, pieces = pieces, dropped = rendered.dropped }
end

local results = {}
for i, case in ipairs(cjson.decode(read(arg[1]))) do
  local ok, result = pcall(answer, case)
  results[i] = ok and result or { error = tostring(result) }
end
local file = assert(io.open(arg[2], "wb"))
file:write(cjson.encode(results))
file:close()
