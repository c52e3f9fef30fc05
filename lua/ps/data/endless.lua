-- SPDX-License-Identifier: BSD-3-Clause
-- Warns about answers that do not end with an end token. A model that is trained on such answers does not learn to
-- stop.
local formats = require "ps.data.formats"

--- Renders the first conversation of a table with the chat template. If the last answer does not end with a special
--- token, returns a note that says so. Otherwise returns nil.
---@param tokenizer ps.Tokenizer
---@param rows ps.DataTable
---@param form string the form of the rows
---@param how? {train_on?: string, date?: string}
---@return string?
return function(tokenizer, rows, form, how)
  if form == "ids" or form == "text" or form:find "preference" then return nil end
  local messages, tools = formats.conversation(rows, 1, form)
  local ids, mask = formats.of_row(rows, 1, tokenizer.apply_chat_template, tokenizer, messages,
    { train_on = how and how.train_on or "assistant", date = how and how.date, tools = tools })
  local last
  for i, id in ipairs(ids) do if mask[i] == 1 then last = id end end
  if not last or last == tokenizer.eos_token_id or rawget(tokenizer, "special_ids")[last] then return nil end
  return ("the chat template writes no end token after an answer (the last trained token of row 1 is '%s'), so the "
    .. "model does not learn to stop; let the template write %s there"):format(tokenizer:decode { last },
    tokenizer.eos_token and "eos_token, " .. tokenizer.eos_token .. "," or "a special token")
end
