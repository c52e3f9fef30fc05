-- SPDX-License-Identifier: BSD-3-Clause
-- Describes the parts of conversations that a chat template leaves out: reasoning, tool calls and tools. A model cannot
-- learn these parts.
local formats = require "ps.data.formats"
local values = require "ps.chat.values"

local left_out = {}

-- Numbers of rows that note() reads and renders.
local ROWS, RENDERED = 1000, 50

--- Describes the parts of a conversation that a template left out.
---@param out {reasoning: integer[], tool_calls: integer[], tools: boolean} the field of ps.chat.Rendered
---@return string[] texts such as "the reasoning of message 2"
function left_out.texts(out)
  local list = {}
  if out.reasoning[1] then list[1] = "the reasoning of message " .. table.concat(out.reasoning, ", ") end
  if out.tool_calls[1] then list[#list + 1] = "tool calls of message " .. table.concat(out.tool_calls, ", ") end
  if out.tools then list[#list + 1] = "the tools" end
  return list
end

--- Reads the first rows of a table, and returns a note about the first row of which the chat template leaves out tool
--- calls or tools. Returns nil if there is no such row.
---@param tokenizer ps.Tokenizer
---@param rows ps.DataTable
---@param form string the form of the rows
---@param how? {date?: string}
---@return string?
function left_out.note(tokenizer, rows, form, how)
  if form == "ids" or form == "text" or form:find "preference" then return nil end
  local rendered = 0
  for i = 1, math.min(#rows, ROWS) do
    local messages, tools = formats.conversation(rows, i, form)
    local has_calls = tools ~= nil
    for _, message in ipairs(messages) do
      local calls = values.get(message, "tool_calls")
      has_calls = has_calls or calls ~= nil and calls ~= values.NONE
    end
    if rendered == RENDERED then return nil end
    if has_calls then
      rendered = rendered + 1
      local out = tokenizer:render_chat(messages, { date = how and how.date, tools = tools }).left_out
      out.reasoning = {}
      local texts = left_out.texts(out)
      if texts[1] then
        return ("the chat template leaves out %s of row %d (%s), so the model does not learn to call tools; "
          .. "`psluajit tools/data.lua stats` counts such rows"):format(table.concat(texts, " and "), i, rows:place(i))
      end
    end
  end
end

return left_out
