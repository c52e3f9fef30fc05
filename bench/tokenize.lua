-- SPDX-License-Identifier: BSD-3-Clause
-- Converts lines of text to lines of token ids, and back:
--   psluajit bench/tokenize.lua DIR_OR_FILE < text            prints the ids of each line (without its end), separated
--                                                             by blanks
--   psluajit bench/tokenize.lua DIR_OR_FILE --decode < ids    prints the text of each line of ids
-- The ids are those that tok:encode returns. They include the special tokens that the model needs around a text, unless
-- --no-special-tokens is set. --count encodes the whole text at once and prints the number of tokens.
-- bench/tokenize_speed.lua measures the time of --count.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"

local parser = argparse("bench/tokenize.lua", "Converts lines of text to lines of token ids, and back.")
parser:argument("tokenizer", "a Hugging Face folder, or one of its tokenizer files")
parser:flag("--decode", "ids to text")
parser:flag("--no-special-tokens", "no special tokens around texts; with --decode leave out special tokens")
parser:flag("--count", "print the number of tokens of the whole text")
local args = command_line.parse(parser)

local ok, tok = pcall(ps.tokenizer.from_pretrained, args.tokenizer)
if not ok then
  io.stderr:write(tostring(tok), "\n")
  os.exit(1, true)
end
local plain = args.no_special_tokens

local function line_of(text)
  if not args.decode then return tok:encode_line(text, { add_special_tokens = not plain }) end
  local ids = {}
  for word in text:gmatch("%S+") do
    ids[#ids + 1] = tonumber(word) or error(("'%s' is not a token id"):format(word), 0)
  end
  return tok:decode(ids, { skip_special_tokens = plain or false })
end

-- Returns the lines of the input without their line ends. Lines can contain any bytes. io.lines is not used, because it
-- would stop at a zero byte.
local function lines()
  local all, at = io.read "*a", 1
  return function()
    if at > #all then return nil end
    local stop = all:find("\n", at, true) or #all + 1
    local line = all:sub(at, stop - 1)
    at = stop + 1
    return line
  end
end

local function run()
  if args.count then
    local _, n = tok:encode_buffer(io.read("*a"))
    print(n)
    return
  end
  io.stdout:setvbuf("full", 2 ^ 16)
  for line in lines() do io.write(line_of(line), "\n") end
end

local done, why = pcall(run)
if not done then
  io.stdout:flush()
  io.stderr:write(tostring(why), "\n")
  os.exit(1, true)
end
