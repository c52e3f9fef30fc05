-- SPDX-License-Identifier: BSD-3-Clause
-- Generates text with a model and the model's tokenizer:
--   psluajit tools/generate.lua DIR --start "Once upon a time" --num-samples 3
-- DIR is a Hugging Face folder with a causal model and its tokenizer, or a name in its cache. --start FILE:PATH reads
-- the text from a file. With --chat, the text is a user's message, and the folder's chat template renders the
-- conversation. The default temperature is that of the model's generation_config.json, or 1. --temperature 0 selects
-- the most likely tokens. --num-beams N selects the best of N beams. A single sample is printed while it is generated.
-- A model that does not fit into one process can be divided into stages, with one process for each stage:
--   psluajit launch --nproc-per-node 2 generate DIR --pipeline 2 --start "Once upon a time"
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.core.command_line"
local folder = require "ps.pretrained.folder"
local whole, number = command_line.whole, command_line.number

local parser = argparse("psluajit generate", "Continues a text with a model.")
parser:argument("model", "a Hugging Face folder with a causal model and its tokenizer, a name in its cache, "
  .. "or a GGUF file")
parser:option("--start", "the text to continue, or FILE:PATH", "")
parser:flag("--chat", "reply to the text as to a user's message, by the folder's chat template")
parser:option("--system", "with --chat: the system message")
whole(parser:option("--num-samples", "number of continuations", "1"), 1)
whole(parser:option("--max-new", "the most tokens to add", "100"), 1)
number(parser:option("--temperature", "0: the likeliest tokens"), 0)
whole(parser:option("--top-k", "draw only from this number of likeliest tokens"), 1)
number(parser:option("--top-p", "draw only from the likeliest tokens that together have this probability"), 0, 1)
number(parser:option("--min-p", "draw only tokens with at least this fraction of the likeliest token's " ..
  "probability"), 0, 1)
number(parser:option("--repetition-penalty", "above 1: tokens of the text so far become less likely"), 0)
whole(parser:option("--num-beams", "beams"), 1)
parser:option("--stop", "text after which to stop; may be given several times"):count "*"
whole(parser:option("--seed", "seed of the random draws", "1337"), 0)
command_line.dtype(parser:option("--dtype", "type of the weights: fp32, bf16, fp16 or fp64 (default: that of the "
  .. "files)", "auto"):show_default(false))
parser:flag("--special-tokens", "also print special tokens, such as the one that ends a text")
parser:option("--device", "the device of the model")
parser:flag("--keep-quantized", "weights of a GGUF file, or of a folder in NF4, stay packed")
parser:flag("--int8-activations", "with --keep-quantized: round activations to 8 bits when generating, which is faster")
parser:option("--kv-cache", "type of the cached keys and values: bf16 or q8_0 (default: that of the weights)")
  :choices { "bf16", "q8_0" }
parser:option("--adapter", "a folder with a PEFT or psluajit adapter for the model")
whole(parser:option("--pipeline", "number of stages into which the model is cut, each on a process of its own, which "
  .. "the launcher starts: psluajit launch --nproc-per-node=N generate MODEL --pipeline N"), 2)
local args = command_line.parse(parser)

local function start()
  local path = args.start:match("^FILE:(.*)$")
  if not path then return args.start end
  local file, why = io.open(path, "rb")
  if not file then error("--start: " .. why, 0) end
  local text = file:read("*a")
  file:close()
  return text
end

-- Encodes a prompt. If the prompt is empty, returns only the token with which texts begin.
local function ids_of(tok, text)
  local ids = tok:encode(text)
  if #ids > 0 then return ids end
  return { tok.bos_token_id or tok.eos_token_id or error("--start: a text is needed, since the tokenizer has no " ..
    "bos_token", 0) }
end

-- Returns the ids of a conversation in which the user has sent the text, up to and including the header of the model's
-- turn.
local function conversation_of(tok, text)
  local messages = { { role = "user", content = text } }
  if args.system then table.insert(messages, 1, { role = "system", content = args.system }) end
  return tok:apply_chat_template(messages, { add_generation_prompt = true })
end

-- Opens the model, or the stages of the model that belong to this process. No parameter is trained.
local function open(path)
  local function adapted(model)
    return args.adapter and ps.lora.load(model, args.adapter, { trainable = false }) or model
  end
  if not args.pipeline then
    return adapted(ps.from_pretrained(path, { dtype = args.dtype, device = args.device, mmap = "auto",
      keep_quantized = args.keep_quantized, int8_activations = args.int8_activations }))
  end
  if args.keep_quantized then
    error("--pipeline: packed weights cannot be cut into stages; leave out --keep-quantized", 0)
  end
  ps.init_distributed { quiet = true }
  if ps.world_size() % args.pipeline ~= 0 and ps.C.ps_machine_pretended() == 0 then
    error(("--pipeline %d needs %d processes, but %d %s running; start them with the launcher: psluajit launch "
      .. "--nproc-per-node %d generate %s --pipeline %d ..."):format(args.pipeline, args.pipeline, ps.world_size(),
      ps.world_size() == 1 and "is" or "are", args.pipeline, args.model, args.pipeline), 0)
  end
  return (ps.initialize { quiet = true, model_func = function()
    local model = adapted(ps.from_pretrained(path, { dtype = args.dtype }))
    for _, p in ipairs(model:parameters()) do p:requires_grad(false) end
    return model
  end, config = { plan_print = false, device = args.device, pipeline = { stages = args.pipeline } } })
end

-- Prints a text on the first process only, because all processes have the same text.
local function say(text)
  if ps.rank() > 0 then return end
  io.write(text)
  io.flush()
end

local function main()
  local path = folder.find(args.model)
  local tok = ps.tokenizer.from_pretrained(path)
  local model = open(path)
  if not model.generate then error(("%s is not a model that continues text"):format(model.class_name), 0) end
  if args.system and not args.chat then error("--system: needs --chat, since only conversations have a system " ..
    "message", 0) end
  local text = start()
  local prompt = args.chat and conversation_of(tok, text) or ids_of(tok, text)
  local prompts, streams = {}, args.num_samples == 1 and not args.num_beams
  if args.chat then text = "" end                          -- only the reply is printed
  local options = { temperature = args.temperature, top_k = args.top_k, top_p = args.top_p, min_p = args.min_p,
    repetition_penalty = args.repetition_penalty, num_beams = args.num_beams or 1, seed = args.seed, tokenizer = tok,
    skip_special_tokens = not args.special_tokens, stop_strings = #args.stop > 0 and args.stop or nil,
    num_return_sequences = 1, kv_cache = args.kv_cache }
  local beams = args.num_beams and args.num_beams > 1
  if beams then options.num_return_sequences = args.num_samples
  elseif not args.temperature then options.do_sample = true end
  for i = 1, beams and 1 or args.num_samples do prompts[i] = prompt end
  if streams then
    local begun = false
    function options.on_text(piece)                        -- the first piece also prints the prompt
      say(begun and piece or text .. piece)
      begun = true
    end
    model:generate(prompts, args.max_new, options)
    return say(begun and "\n" or text .. "\n")
  end
  for i, row in ipairs(model:generate(prompts, args.max_new, options)) do
    if i > 1 then say "---------------\n" end
    if args.chat then row = { unpack(row, #prompt + 1) } end
    say(tok:decode(row, { skip_special_tokens = not args.special_tokens }) .. "\n")
  end
end

command_line.try("generate", main)
