-- SPDX-License-Identifier: BSD-3-Clause
-- Runs the cases of tokens_oracle.py: tokens_cases.lua TOKENIZER IN OUT. IN contains texts. A line with the length in
-- bytes precedes each text. For each text, OUT gets a line of ids, a line of offsets, and the text of the ids, preceded
-- by its length. If a text fails, OUT gets the text of the error. With the last argument "decode", IN is JSON, a list
-- of lists of ids. OUT is then JSON, too. It has two texts for each list: one with special tokens, and one without
-- them.
local ps = require "ps"
local json = require "cjson"

local tok = ps.tokenizer.from_pretrained(arg[1])
local input, output = assert(io.open(arg[2], "rb")), assert(io.open(arg[3], "wb"))
if arg[4] == "decode" then
  local texts = {}
  for i, ids in ipairs(json.decode(input:read "*a")) do
    texts[i] = { tok:decode(ids), tok:decode(ids, { skip_special_tokens = true }) }
  end
  output:write(json.encode(texts))
end
while arg[4] ~= "decode" do
  local length = input:read("*l")
  if not length then break end
  local text = length == "0" and "" or input:read(tonumber(length))
  local ok, ids = pcall(tok.encode, tok, text)
  if not ok then
    output:write("error ", (tostring(ids):gsub("\n", " ")), "\n\n0\n")
  else
    local offsets = {}
    if ids[1] then offsets = tok(text, { offsets = true }).offsets:reshape(-1):tolist() end
    local back = tok:decode(ids)
    output:write(table.concat(ids, " "), "\n", table.concat(offsets, " "), "\n", #back, "\n", back)
  end
end
output:close()
