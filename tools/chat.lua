-- SPDX-License-Identifier: BSD-3-Clause
-- A conversation with a model, line by line:
--   psluajit tools/chat.lua DIR
-- DIR is a Hugging Face folder with a causal model and its tokenizer, or a name in its cache. The folder's chat
-- template renders the conversation, and a reply ends with the model's end token.
-- If the folder has no template, or if --plain is set, the model continues a text in which each line of the user
-- follows the text of --user, and each reply follows the text of --model. In this case a reply also ends where the
-- model writes the text of --user. Ctrl-D or the line /quit ends the conversation. Empty lines are ignored.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local folder = require "ps.pretrained.folder"
local unistd = require "posix.unistd"
local utf8 = require "ps.core.utf8"
local whole, number = command_line.whole, command_line.number

local QUIT = "/quit"               -- a line that ends the conversation

local parser = argparse("psluajit chat", "Talks with a model, by its chat template.")
  :epilog("Ctrl-D or the line " .. QUIT .. " ends the conversation. Empty lines are ignored.")
parser:argument("folder", "a Hugging Face folder with a causal model and its tokenizer, a name in its cache, "
  .. "or a GGUF file")
parser:flag("--plain", "use --user and --model instead of a chat template")
parser:option("--user", "without a template: the text before a line of the user", "User: ")
parser:option("--model", "without a template: the text before a reply", "Assistant:")
parser:option("--system", "the system message; without a template, text before the conversation", "")
parser:option("--date", "YYYY-MM-DD, for templates that print the date (default: today)")
whole(parser:option("--max-new", "the most tokens of a reply", "200"), 1)
number(parser:option("--temperature", "0: the likeliest tokens", "0.7"), 0)
whole(parser:option("--top-k", "draw only from this number of likeliest tokens"), 1)
number(parser:option("--top-p", "draw only from the likeliest tokens that together have this probability"), 0, 1)
whole(parser:option("--seed", "seed of the random draws", "1337"), 0)
command_line.dtype(parser:option("--dtype", "type of the weights: fp32, bf16, fp16 or fp64 (default: that of the "
  .. "files)", "auto"):show_default(false))
parser:flag("--special-tokens", "also print special tokens, such as the one that ends a reply")
parser:option("--device", "the device of the model")
parser:flag("--keep-quantized", "weights of a GGUF file, or of a folder in NF4, stay packed")
parser:flag("--int8-activations", "with --keep-quantized: round activations to 8 bits when generating, which is faster")
parser:option("--kv-cache", "type of the cached keys and values: bf16 or q8_0 (default: that of the weights)")
  :choices { "bf16", "q8_0" }
parser:option("--adapter", "a folder with a PEFT or psluajit adapter for the model")
local args = command_line.parse(parser)

-- Returns two functions that print a reply while it is generated. The first function prints the next piece, and returns
-- false if the reply contains the text `stop`. It prints nothing from `stop` on, and holds back the latest characters,
-- because they can be the beginning of `stop`. The second function prints these characters at the end, and returns the
-- whole reply.
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

-- Reads a line from the user. Returns nil if the user ends the conversation.
local function ask(prompt)
  io.write(prompt)
  io.flush()
  local line = io.read "*l"
  if line == "" then return ask(prompt) end
  if line and line ~= QUIT then
    if utf8.valid(line) then return line end
    io.write "this line is not valid UTF-8; please write it again\n"
    return ask(prompt)
  end
  if not line then io.write("\n") end
end

-- Generates, prints and returns the reply to the prompt `ids`. If `stop` is not nil, the reply ends before this text.
local function reply(model, tok, ids, seed, stop)
  local add, rest
  if stop then add, rest = writer(stop)
  else
    local pieces = {}
    function add(piece)
      io.write(piece)
      io.flush()
      pieces[#pieces + 1] = piece
      return true
    end
    function rest() return table.concat(pieces) end
  end
  model:generate({ ids }, args.max_new, { temperature = args.temperature, top_k = args.top_k, top_p = args.top_p,
    num_beams = 1, num_return_sequences = 1, seed = seed, tokenizer = tok, on_text = add,
    skip_special_tokens = not args.special_tokens, kv_cache = args.kv_cache })
  local text = rest()
  io.write("\n")
  return text
end

local function talk(model, tok)
  local messages, seed = {}, args.seed
  if args.system ~= "" then messages[1] = { role = "system", content = args.system } end
  for line in ask, "> " do
    messages[#messages + 1] = { role = "user", content = line }
    local ids = tok:apply_chat_template(messages, { add_generation_prompt = true, date = args.date })
    messages[#messages + 1] = { role = "assistant", content = reply(model, tok, ids, seed) }
    seed = seed + 1
  end
end

local function talk_plainly(model, tok)
  local text, seed = args.system, args.seed
  for line in ask, args.user do
    text = text .. args.user .. line .. "\n" .. args.model
    io.write(args.model)
    text, seed = text .. reply(model, tok, tok:encode(text), seed, "\n" .. args.user) .. "\n", seed + 1
  end
end

local function main()
  local path = folder.find(args.folder)
  local tok = ps.tokenizer.from_pretrained(path)
  local model = ps.from_pretrained(path, { dtype = args.dtype, device = args.device, mmap = "auto",
    keep_quantized = args.keep_quantized, int8_activations = args.int8_activations })
  if args.adapter then ps.lora.load(model, args.adapter, { trainable = false }) end
  if not model.generate then error(("%s is not a model that continues text"):format(model.class_name), 0) end
  if unistd.isatty(unistd.STDIN_FILENO) == 1 then print("Ctrl-D or " .. QUIT .. " ends the conversation.") end
  if args.plain or not tok:has_chat_template() then return talk_plainly(model, tok) end
  talk(model, tok)
end

command_line.try("chat", main)
