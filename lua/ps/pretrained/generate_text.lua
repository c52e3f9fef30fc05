-- SPDX-License-Identifier: BSD-3-Clause
-- Converts tokens that arrive one by one to text. Each piece of text consists of whole characters. Also detects
-- completed stop strings.
local copied = require "ps.core.copied"

local text = {}

local BROKEN = "\239\191\189"  -- U+FFFD, which replaces a character whose last bytes are missing
local BEFORE = 8  -- number of the prompt's last tokens that are decoded with the first piece

---@class ps.pretrained.Stream
---@field tokenizer ps.Tokenizer
---@field ids integer[]
---@field first boolean whether no piece has been returned yet
---@field how {skip_special_tokens: boolean} options of the tokenizer's decode
local Stream = {}
Stream.__index = Stream

--- Returns a stream that decodes a sequence piece by piece. Each piece is decoded together with the previous piece,
--- because a token's text can depend on the text before it. For example, Llama 2's blank disappears at the beginning of
--- a text.
---@param tokenizer ps.Tokenizer
---@param prompt? integer[] the ids that the sequence continues
---@param skip? boolean whether the text of special tokens is omitted
---@return ps.pretrained.Stream
function text.stream(tokenizer, prompt, skip)
  local before = {}
  for i = math.max(1, #(prompt or {}) - BEFORE + 1), #(prompt or {}) do before[#before + 1] = prompt[i] end
  return setmetatable({ tokenizer = tokenizer, before = before, ids = {}, first = true,
    how = { skip_special_tokens = skip or false } }, Stream)
end

local function without_broken(shown)
  while shown:sub(-3) == BROKEN do shown = shown:sub(1, -4) end
  return shown
end

local function joined(a, b)
  local all = copied(a)
  for _, id in ipairs(b) do all[#all + 1] = id end
  return all
end

local function give(self, last)
  local shown = self.tokenizer:decode(self.before, self.how)
  if self.first then shown = without_broken(shown) end     -- the prompt can end inside a character
  local all = self.tokenizer:decode(joined(self.before, self.ids), self.how)
  if not last and all:sub(-3) == BROKEN then return nil end
  self.before, self.ids = self.first and joined(self.before, self.ids) or self.ids, {}
  self.first = false
  return all:sub(#shown + 1)
end

--- Adds a token. Returns the text that the token completes, or nil if no character is complete.
---@param id integer
---@return string?
function Stream:add(id)
  self.ids[#self.ids + 1] = id
  local piece = give(self, false)
  return piece ~= "" and piece or nil
end

--- Returns the remaining text, including incomplete characters.
---@return string?
function Stream:finish()
  if #self.ids == 0 then return nil end
  local piece = give(self, true)
  return piece ~= "" and piece or nil
end

--- Returns a function that checks whether one of the strings ends in the last token of a sequence. The function is
--- called with the last tokens of the sequence. Also returns the number of tokens that the function needs.
---@param strings string[]
---@param tokenizer ps.Tokenizer
---@return fun(tail: integer[]): boolean
---@return integer
function text.stops(strings, tokenizer)
  local longest = 0
  for _, s in ipairs(strings) do longest = math.max(longest, #s) end
  return function(tail)
    local last = table.remove(tail)
    local before = without_broken(tokenizer:decode(tail))
    tail[#tail + 1] = last
    local all = tokenizer:decode(tail)
    for _, s in ipairs(strings) do
      local found, stop = all:find(s, math.max(1, #before - #s + 2), true)
      if found and stop > #before then return true end
    end
    return false
  end, longest + 4
end

return text
