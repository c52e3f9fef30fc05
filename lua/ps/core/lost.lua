-- SPDX-License-Identifier: BSD-3-Clause
-- Notes about characters that a vocabulary cannot spell. The vocabulary has neither a token for such a character nor an
-- unknown token, so the ids leave the character out (src/data/tok_bpe.c). The package `tokenizers` also leaves out such
-- characters, but silently.
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"

local lost = {}

local function code_point(found) return ("U+%04X"):format(tonumber(found.first)) end

--- Returns a line that says how many characters the vocabulary could not spell in data that was tokenized.
---@param path string the vocabulary's file or folder
---@param found ffi.cdata*|table ps_tok_lost, or a table with its fields; `characters` is not 0
---@param place string location of the first such character, such as "rows[2]"
---@return string
function lost.total(path, found, place)
  local characters, places = tonumber(found.characters), tonumber(found.places)
  return ("%s: %s at %s cannot be spelled by this vocabulary and %s left out (first: %s in %s)\n"):format(path,
    caller.counted(characters, "character"), caller.counted(places, "place"), characters == 1 and "was" or "were",
    code_point(found), place)
end

--- Prints a note if the last text of a tokenizer contained characters that the vocabulary cannot spell. Callers call
--- this function until it has printed a note, so each tokenizer gets at most one note.
---@param tokenizer ps.TextTokenizer
---@param place string where the text is from, such as "a conversation"
function lost.tell(tokenizer, place)
  local found = rawget(tokenizer, "lost")
  native.check(native.C.ps_tok_take_lost(tokenizer.handle, found))
  if found.characters == 0 then return end
  rawset(tokenizer, "told_lost", true)
  io.stderr:write(("%s: the vocabulary cannot spell %s, which occurs in %s; the ids leave such characters out, and "
    .. "this is said once\n"):format(rawget(tokenizer, "name"), code_point(found), place))
end

return lost
