-- SPDX-License-Identifier: BSD-3-Clause
-- A conversation with a model, line by line:
--   psluajit tools/chat.lua DIR
-- DIR is a folder of Hugging Face's with a causal model and its tokenizer, or a name in its cache. No chat template is
-- used: the model continues the text of the conversation, in which each line follows --user and each reply --model.
-- A reply ends before text for the user, or with the model's end token. An empty input ends the conversation.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local folder = require "ps.pretrained.folder"
local whole, number = command_line.whole, command_line.number

local parser = argparse("tools/chat.lua", "Talks with a model, without a chat template.")
parser:argument("folder", "a folder of Hugging Face's with a causal model and its tokenizer, or a name in its cache")
parser:option("--user", "what stands before a line", "User: ")
parser:option("--model", "what stands before a reply", "Assistant:")
parser:option("--system", "text before the conversation", "")
whole(parser:option("--max-new", "tokens of a reply at most", "200"), 1)
number(parser:option("--temperature", "0: the likeliest tokens", "0.7"), 0)
whole(parser:option("--top-k", "only so many of the likeliest tokens"), 1)
number(parser:option("--top-p", "only the likeliest tokens that have this probability together"), 0, 1)
whole(parser:option("--seed", "of what is drawn", "1337"), 0)
parser:option("--dtype", "type of the weights (default: that of the files)", "auto")
parser:flag("--special-tokens", "print special tokens, such as the one that ends a reply, too")
parser:option("--device", "where the model is")
local args = parser:parse()

-- Writes a reply as it comes, but for the text `stop` at its end, of which a part may have come already.
local function writer(stop)
  local held, all = "", {}
  local function put(text)
    io.write(text)
    io.flush()
    all[#all + 1] = text
  end
  local function add(piece)
    held = held .. piece
    local at = held:find(stop, 1, true)
    local sure = at and at - 1 or math.max(0, #held - #stop + 1)
    put(held:sub(1, sure))
    held = at and "" or held:sub(sure + 1)
    return not at
  end
  return add, function()
    put(held)
    return table.concat(all)
  end
end

local function main()
  local path = folder.find(args.folder)
  local tok = ps.tokenizer.from_pretrained(path)
  local model = ps.from_pretrained(path, { dtype = args.dtype, device = args.device, mmap = "auto" })
  if not model.generate then error(("%s is no model that continues text"):format(model.class_name), 0) end
  local text, seed, stop = args.system, args.seed, "\n" .. args.user
  while true do
    io.write(args.user)
    io.flush()
    local line = io.read "*l"
    if not line or line == "" then return io.write("\n") end
    text = text .. args.user .. line .. "\n" .. args.model
    io.write(args.model)
    local add, rest = writer(stop)
    model:generate({ tok:encode(text) }, args.max_new, { temperature = args.temperature, top_k = args.top_k,
      top_p = args.top_p, num_beams = 1, seed = seed, tokenizer = tok, on_text = add,
      skip_special_tokens = not args.special_tokens })
    text, seed = text .. rest() .. "\n", seed + 1
    io.write("\n")
  end
end

command_line.try("chat", main)
