-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/llama_cpp.lua FILE.gguf [--dtype bf16] [--keep-quantized] [--int8-activations] [--json]: compares
-- psluajit with llama.cpp. In each of --rounds rounds, both programs, one after the other, read a prompt of --prompt
-- tokens and generate --tokens tokens. PS_LLAMA is the folder of llama.cpp (tools/oracle.sh llama). PS_TORCH_PYTHON is
-- a Python with numpy. With --peer-file, llama.cpp runs a different file, for example a file with other types. The
-- figures of each program are from its fastest round:
--   prompt_tokens_per_s
--   decode_tokens_per_s         does not count the first token
--   peer_*                      prompt_tokens_per_s and decode_tokens_per_s of llama.cpp
--   prompt_ratio, decode_ratio  psluajit's rate divided by the peer's rate
--   *_cpu                       each of these figures in tokens per second of processor time. Processor time depends
--                               less on other programs, but it includes the time in which the threads of a program wait
--                               for each other.
local ps = require "ps"
local argparse = require "argparse"
local json = require "cjson"
local paths = require "ps.paths"
local process = require "bench.process_lib"
local command_line = require "ps.core.command_line"

local parser = argparse("bench/llama_cpp.lua", "Generates text in turn by psluajit and by llama.cpp.")
parser:argument("model", "a GGUF file, or a folder with --peer-file")
parser:option("--peer-file", "the file that llama.cpp runs (default: MODEL)")
command_line.whole(parser:option("--prompt", "number of tokens of the prompt", "512"), 1)
command_line.whole(parser:option("--tokens", "number of tokens to generate", "64"), 2)
command_line.whole(parser:option("--rounds", "number of rounds", "5"), 1)
parser:option("--dtype", "type of the weights", "fp32")
parser:flag("--keep-quantized", "weights of a GGUF file stay packed")
parser:flag("--int8-activations", "with --keep-quantized: round activations to 8 bits when generating, which is faster")
parser:option("--kv-cache", "type of the cached keys and values: bf16 or q8_0 (default: that of the weights)")
  :choices { "bf16", "q8_0" }
parser:flag("--json", "one JSON object")
local args = command_line.parse(parser)

local KEYS = { "prompt_s", "prompt_cpu_s", "decode_s", "decode_cpu_s" }

-- Returns a table with the generated ids and four times: the seconds and the processor seconds of the prompt, and the
-- seconds and the processor seconds of all tokens except the first.
local function ours(model, ids)
  local result, wall, cpu = {}, ps.now(), os.clock()
  local out = model:generate({ ids }, args.tokens, { do_sample = false, eos_token_id = false, kv_cache = args.kv_cache,
    on_token = function(_, i)
      if i ~= 1 and i ~= args.tokens then return end
      local part = i == 1 and "prompt" or "decode"
      result[part .. "_s"], result[part .. "_cpu_s"] = ps.now() - wall, os.clock() - cpu
      wall, cpu = ps.now(), os.clock()
    end })[1]
  result.ids = { unpack(out, #ids + 1) }
  return result
end

local function keep_fastest(best, round)
  for _, key in ipairs(KEYS) do best[key] = math.min(best[key] or math.huge, round[key]) end
  best.ids = round.ids
end

local function rates(best)
  return { prompt_tokens_per_s = args.prompt / best.prompt_s, prompt_cpu_tokens_per_s = args.prompt / best.prompt_cpu_s,
    decode_tokens_per_s = (args.tokens - 1) / best.decode_s,
    decode_cpu_tokens_per_s = (args.tokens - 1) / best.decode_cpu_s }
end

local function main()
  local model = ps.from_pretrained(args.model, { dtype = args.dtype, quiet = true,
    keep_quantized = args.keep_quantized, int8_activations = args.int8_activations })
  local ids, path = {}, os.tmpname()
  math.randomseed(1)
  for i = 1, args.prompt do ids[i] = math.random(0, model.config.vocab_size - 1) end
  local file = assert(io.open(path, "w"))
  file:write(table.concat(ids, " "))
  file:close()
  local peer = process.start { os.getenv "PS_TORCH_PYTHON" or "python3", paths.root .. "/bench/peers/generate_llama.py",
    args.peer_file or args.model, "--ids", path, "--tokens", args.tokens, "--threads", ps.threads() }
  peer:answer()
  local best, theirs = {}, {}
  for _ = 1, args.rounds do
    keep_fastest(best, ours(model, ids))
    keep_fastest(theirs, peer:ask "generate")
  end
  peer:close()
  os.remove(path)
  local result, same = rates(best), 0
  for key, value in pairs(rates(theirs)) do
    result["peer_" .. key], result[key:gsub("tokens_per_s", "ratio")] = value, result[key] / value
  end
  while same < args.tokens and best.ids[same + 1] == theirs.ids[same + 1] do same = same + 1 end
  result.same_ids = same
  if args.json then return print(json.encode(result)) end
  for _, part in ipairs { "prompt", "prompt_cpu", "decode", "decode_cpu" } do
    print(("%-11s %9.1f tokens/s  llama.cpp %9.1f  ratio %.2f"):format(part, result[part .. "_tokens_per_s"],
      result["peer_" .. part .. "_tokens_per_s"], result[part .. "_ratio"]))
  end
  print(("the first %d of %d ids are the same"):format(same, args.tokens))
end

main()
