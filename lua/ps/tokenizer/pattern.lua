-- SPDX-License-Identifier: BSD-3-Clause
-- Translates the regular expressions of tokenizers to the dialect of PCRE2. The expressions in tokenizer.json are in
-- the dialect of Oniguruma. The expressions of tiktoken's encodings are in the dialect of Rust. An expression that
-- cannot be translated without changing its meaning causes an error.
local object = require "ps.tokenizer.object"
local refuse = object.refuse

local pattern = {}

--- The pattern of GPT-2. A word is a contraction, or a run of letters, of digits, of other characters, or of blanks.
--- The last blank of a run belongs to the next word.
pattern.GPT2 = [['(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+]]
pattern.CL100K = [['(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$]]
  .. [[|\s*[\r\n]|\s+(?!\S)|\s]]
pattern.LLAMA3 = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*]]
  .. [[|\s*[\r\n]+|\s+(?!\S)|\s+]]
pattern.QWEN = (pattern.LLAMA3:gsub("{1,3}", ""))
local SHORT = [[(?i:'s|'t|'re|'ve|'m|'ll|'d)?]]
pattern.O200K = [[[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+]] .. SHORT
  .. [[|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*]] .. SHORT
  .. [=[|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+]=]

-- Patterns by which texts can be split at line ends first (see is_of_lines): no match of such a pattern contains a line
-- end that is between two ASCII characters other than blanks.
local LINES = { [pattern.GPT2] = true, [pattern.CL100K] = true, [pattern.LLAMA3] = true, [pattern.QWEN] = true,
  [pattern.O200K] = true, [ [['s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]] ] = true,
  [ [['(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]] ] = true,
  [ [=[\p{N}{1,3}]=] ] = true, [ [=[\p{N}]=] ] = true, [ [=[[0-9]]=] ] = true, [ [=[\d]=] ] = true,
  [ [=[(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*]=]
    .. [=[|\s*[\r\n]+|\s+(?!\S)|\s+]=] ] = true }

--- Returns whether a pattern finds the same words if a text is first split at each line end that is between two ASCII
--- characters other than blanks.
---@param text string
---@return boolean
function pattern.is_of_lines(text) return LINES[text] == true end

-- Escapes such as \w that have another meaning in PCRE2 than in the other dialects, or that match other characters. The
-- values say what the escapes stand for.
local OTHER = { w = "words", W = "words", b = "words' ends", B = "words' ends", h = "hexadecimal digits",
  H = "hexadecimal digits", X = "characters of several code points", K = "what is kept", y = "ends of characters",
  Y = "ends of characters", Q = "quotes", E = "quotes", C = "bytes" }

--- Converts a regular expression to PCRE2's dialect.
---@param path string path of the file, for errors
---@param field string name of the field, for errors
---@param text string
---@param dialect "onig"|"rust"
---@return string
function pattern.of(path, field, text, dialect)
  local function bad(what) refuse(path, field, text, ("'%s' has another meaning in PCRE2"):format(what)) end
  local out, i, in_class, lines = {}, 1, false, false
  while i <= #text do
    local c, one, given = text:sub(i, i), nil, nil
    if c == "\\" then
      one = text:sub(i, i + 1)
      if OTHER[one:sub(2)] and not (in_class and one == "\\b") then bad(one) end
    elseif in_class then
      local posix = text:match("^%[:%^?%a+:%]", i)
      if text:sub(i, i + 1) == "&&" then bad "&&" end
      if c == "[" and not posix then bad "[ within [ ]" end
      if c == "]" then in_class = false end
      one = posix
    elseif c == "[" then
      in_class, one = true, text:match("^%[%^?%]?", i)
    elseif c == "(" and text:match("^%(%?[%-a-zA-Z]*m", i) then bad(text:match("^%(%?[%-a-zA-Z]*", i))
    elseif text:match("^{,%d+}", i) then bad(text:match("^{,%d+}", i))
    elseif dialect == "onig" and text:match("^{[%d,]+}%+", i) then bad(text:match("^{[%d,]+}%+", i))
    elseif dialect == "onig" and text:match("^{%d+}%?", i) then bad(text:match("^{%d+}%?", i))
    elseif c == "$" and dialect == "rust" then given = "\\z"
    elseif c == "^" or c == "$" then lines = true
    end
    one = one or c
    out[#out + 1], i = given or one, i + #one
  end
  return (lines and dialect == "onig" and "(?m)" or "") .. table.concat(out)
end

return pattern
