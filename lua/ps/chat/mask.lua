-- SPDX-License-Identifier: BSD-3-Clause
-- Finds the bytes of a rendered conversation that the model has to produce. If the template contains generation blocks,
-- the model has to produce the bytes of these blocks. Otherwise the bytes are found by the marks of the rendered text,
-- which say where each byte comes from. A turn of the assistant is the text that the template writes while it processes
-- a message of the assistant. The turn begins with a header. The model does not produce the header, because the
-- template writes the same text as the generation prompt. The model produces the rest of the turn, up to and including
-- the token that ends the turn.
local text = require "ps.chat.text"

local mask = {}

---@class ps.chat.Turn
---@field first integer first byte of the turn
---@field last integer last byte of the turn
---@field from integer first byte that is copied from the message, or nil if no byte is
---@field upto integer last byte that is copied from the message, or 0 if no byte is
---@field parts {[1]: integer, [2]: integer}[] the turn's bytes as ranges; the turns of other messages lie between them
---@field over? boolean true if the turn has ended, because the turn of another message has begun
---@field stranger? integer index of another message whose bytes the template writes in this turn

-- Returns the turns of a rendering by message index. A turn is the text that the template wrote while a loop or a macro
-- processed the message. If no loop and no macro processed the message, its turn consists of the bytes that are copied
-- from the message. A turn ends when the turn of another message begins.
---@return table<integer, ps.chat.Turn>
local function turns_of(rendered)
  local owned, turns, open = {}, {}, {}                    -- open: the turns that have begun and have not ended
  text.each(rendered, function(_, _, mark) if mark and mark.owner then owned[mark.owner] = true end end)
  text.each(rendered, function(first, last, mark)
    local message = mark and (mark.owner or mark.message)
    if not message then return end
    for i, turn in pairs(open) do
      if i ~= message and (mark.owner or not owned[i]) then turn.over, open[i] = true, nil end
    end
    if not mark.owner and owned[message] or turns[message] and turns[message].over then return end
    local turn = turns[message] or { first = first, upto = 0, parts = {} }
    turns[message], open[message], turn.last = turn, turn, last
    turn.parts[#turn.parts + 1] = { first, last }
    if mark.message == message then turn.from, turn.upto = turn.from or first, last
    elseif mark.message then turn.stranger = turn.stranger or mark.message end
  end)
  return turns
end

-- Returns the position of the first byte after all turns, or nil if the text ends with a turn.
local function tail_of(rendered)
  local tail
  text.each(rendered, function(first, _, mark)
    if mark and (mark.owner or mark.message) then tail = nil else tail = tail or first end
  end)
  return tail
end

-- Returns the length of the longest prefix of `prompt` that has at most n bytes and does not end inside a word.
local function whole_words(prompt, n)
  while n > 0 and not prompt:find("^[%s>%]:]", n) do n = n - 1 end
  return n
end

-- Returns the position of the first byte after the header of a turn. The header is the last occurrence of the
-- generation prompt before the bytes that are copied from the message. If the whole prompt does not occur there, the
-- longest prefix of the prompt that occurs is used. The header may begin before the turn. A turn may have no header,
-- for example after the results of a tool. For a turn without a header, returns the position of the first byte that is
-- copied from the message.
local function after_header(s, turn, prompt)
  local stop = (turn.from or turn.last + 1) - 1            -- the header ends here or earlier
  local n = #prompt
  while n > 0 do
    local head = prompt:sub(1, n)
    for at = stop - n + 1, math.max(1, turn.first - n), -1 do
      if s:sub(at, at + n - 1) == head then return math.max(turn.first, at + n) end
    end
    n = whole_words(prompt, n - 1)
  end
  return prompt ~= "" and turn.from or turn.first
end

-- Returns the text of a turn before the first byte that is copied from the message.
local function header_of(s, turn) return s:sub(turn.first, (turn.from or turn.last + 1) - 1) end

-- Returns the text that ends turn i if the template writes it at the beginning of the next turn, or nil if there is no
-- such text. The text lies between turn i and the header of the next turn. The header is found in another turn: one
-- that has the role of the next turn, but follows a turn of another role than turn i.
local function closing(s, turns, roles, i)
  local turn, after = turns[i], nil
  for k, other in pairs(turns) do if other.first == turn.last + 1 then after = k end end
  if not after then return nil end
  local header
  for k, other in pairs(turns) do
    if roles[k] == roles[after] and roles[k - 1] ~= roles[i] then
      local one = header_of(s, other)
      if not header or #one < #header then header = one end
    end
  end
  local all = header_of(s, turns[after])
  local n = header and #all - #header or 0
  return n > 0 and all:sub(n + 1) == header and all:sub(1, n):match "^(.*%S)" or nil
end

-- Returns the position of the last byte of the text that ends a turn. If the template wrote text in the turn after the
-- bytes that are copied from the message, this is the last byte of the turn that is not a space. Otherwise the text
-- that ends the turn follows the turn. It is the first of these that exists:
-- 1. `end_token`, if it follows the turn directly
-- 2. `closed_by`, which begins the next turn
-- 3. the text that follows all turns
local function turn_end(s, turn, end_token, tail, closed_by)
  local last = turn.last
  while last > turn.upto and s:find("^%s", last) do last = last - 1 end
  if last > turn.upto then return last end
  local first = turn.last + 1
  if end_token and end_token ~= "" and s:sub(first, first + #end_token - 1) == end_token then
    return first + #end_token - 1
  end
  if closed_by then return turn.last + #closed_by end
  if tail ~= first then return last end
  last = #s
  while last >= first and s:find("^%s", last) do last = last - 1 end
  return math.max(last, turn.last)
end

-- Appends a range of bytes to the spans. If the range directly follows the last span, extends the last span instead.
local function add(spans, first, last)
  if last < first then return end
  if #spans > 0 and spans[#spans][2] == first - 1 then spans[#spans][2] = last
  else spans[#spans + 1] = { first, last } end
end

--- Returns the bytes to train as a sorted list of ranges {first, last}.
---@param rendered string|ps.chat.Text a rendering with marks
---@param wanted integer[] indices of the messages to train on
---@param prompt string the text that the template writes for add_generation_prompt
---@param end_token? string
---@param roles string[] the roles of all messages
---@return {[1]: integer, [2]: integer}[]? spans nil if a turn contains bytes that are copied from another message
---@return integer? turn only if spans is nil: index of the turn's message
---@return integer? stranger only if spans is nil: index of the other message
function mask.spans(rendered, wanted, prompt, end_token, roles)
  local s, spans, tail = text.flat(rendered), {}, tail_of(rendered)
  local turns = turns_of(rendered)
  for _, i in ipairs(wanted) do
    local turn = turns[i]
    if turn and turn.stranger then return nil, i, turn.stranger end
    if turn then
      local first = after_header(s, turn, prompt)
      local last = turn_end(s, turn, end_token, tail, turn.last == turn.upto and closing(s, turns, roles, i))
      for k, part in ipairs(turn.parts) do
        add(spans, math.max(part[1], first), k == #turn.parts and last or math.min(part[2], last))
      end
    end
  end
  return spans
end

--- Returns the ranges of bytes that generation blocks wrote, or nil if there are no such bytes.
---@param rendered string|ps.chat.Text
---@param wanted? integer[] restricts the result to bytes that the template writes for the messages with these indices
---@return {[1]: integer, [2]: integer}[]?
function mask.generated(rendered, wanted)
  local spans, of = {}, {}
  for _, i in ipairs(wanted or {}) do of[i] = true end
  text.each(rendered, function(first, last, mark)
    if mark and mark.generated and (not wanted or of[mark.owner or mark.message]) then add(spans, first, last) end
  end)
  return spans[1] and spans
end

--- Returns the text that a template writes in a message's turn before the first byte that is copied from the message.
--- Returns "" if this text consists of spaces.
---@param rendered string|ps.chat.Text
---@param i integer index of the message
---@return string
function mask.header(rendered, i)
  local turn = turns_of(rendered)[i]
  local header = turn and header_of(text.flat(rendered), turn) or ""
  return header:find "%S" and header or ""
end

--- Returns the text of a rendering after the turns of all messages.
---@param rendered string|ps.chat.Text
---@return string
function mask.tail(rendered)
  local tail = tail_of(rendered)
  return tail and text.flat(rendered):sub(tail) or ""
end

--- Returns the text that a template appends for add_generation_prompt.
---@param with string the rendering with add_generation_prompt
---@param without string the rendering without add_generation_prompt
---@return string
function mask.prompt(with, without)
  local n = 0
  while n < #without and with:byte(n + 1) == without:byte(n + 1) do n = n + 1 end
  -- Without add_generation_prompt, the template may write another text at the end, such as an end token.
  if n < #without then n = whole_words(with, n) end
  return with:sub(n + 1)
end

return mask
