-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/generate.lua DIR --ids "1 2 3" --max-new 20 [--num-beams 3] [--json]: continues prompts. The model
-- is a folder in Hugging Face's format. The search is greedy, or a beam search. Prints the ids of each sequence (prompt
-- and continuation) and the tokens per second. --ids can be given several times, with prompts of different lengths.
--   --json             prints one object with ids, tokens_per_s and seconds
--   --rounds N         uses the fastest of N runs
--   --keep-quantized   the weights of a GGUF file stay packed, and products use the packed weights
-- If the folder is not supported, the first line of stderr is `refused: FIELD = VALUE: why`, and the exit status is 2.
--
-- With --peer, another process runs after each run of psluajit. This process continues the same prompts with
-- transformers, and measures the rate of reading memory (bench/peers/generate_torch.py, with the Python of
-- PS_TORCH_PYTHON or python3). --peer adds these figures, each from the fastest run:
--   peer_tokens_per_s
--   peer_ratio            psluajit's rate divided by the peer's rate
--   sum_bytes_per_s       the rate at which PyTorch sums 512 MiB (one stream per thread), measured for as long as
--                         psluajit's run took
--   streams_bytes_per_s   the rate at which the engine reads 512 MiB with four streams per thread
--                         (ps_probe_bandwidth)
--   memory_bytes_per_s    the larger of sum_bytes_per_s and streams_bytes_per_s
--   memory_share          the bytes of weights that psluajit reads per second for one row, divided by
--                         memory_bytes_per_s
--   same_ids              true if both programs produced the same ids
local ps = require "ps"
local argparse = require "argparse"
local ffi = require "ffi"
local json = require "cjson"
local paths = require "ps.paths"
local process = require "bench.process_lib"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/generate.lua", "Continues ids with the model of a folder.")
parser:argument("folder", "a Hugging Face folder with a causal model, or a GGUF file")
parser:option("--ids", "a prompt: ids separated by blanks"):count "+"
whole(parser:option("--max-new", "the most tokens to add", "20"), 1)
whole(parser:option("--num-beams", "beams; 1: greedy", "1"), 1)
whole(parser:option("--rounds", "number of runs, of which the fastest is reported", "1"), 1)
parser:option("--dtype", "type of the weights", "fp32")
parser:flag("--keep-quantized", "weights of a GGUF file, or of a folder in NF4, stay packed")
parser:flag("--int8-activations", "with --keep-quantized: round activations to 8 bits when generating, which is faster")
parser:option("--kv-cache", "type of the cached keys and values: bf16 or q8_0 (default: that of the weights)")
  :choices { "bf16", "q8_0" }
parser:flag("--json", "one JSON object")
parser:flag("--peer", "run transformers alternately with psluajit")
local args = command_line.parse(parser)

local function prompts()
  local rows = {}
  for i, line in ipairs(args.ids) do
    rows[i] = {}
    for word in line:gmatch("%S+") do
      rows[i][#rows[i] + 1] = tonumber(word) or error(("--ids: '%s' is not an id"):format(word), 0)
    end
  end
  return rows
end

-- Starts transformers with the same folder, prompts and settings.
local function start_peer()
  local words = { os.getenv "PS_TORCH_PYTHON" or "python3", paths.root .. "/bench/peers/generate_torch.py", args.folder,
    "--max-new", args.max_new, "--num-beams", args.num_beams, "--dtype", args.dtype, "--threads", ps.threads() }
  for _, line in ipairs(args.ids) do
    table.insert(words, "--ids")
    table.insert(words, line)
  end
  local peer = process.start(words)
  peer:answer()
  return peer
end

-- Returns the number of tokens that were added to the prompts.
local function added(out, rows)
  local n = 0
  for r, row in ipairs(out) do n = n + #row - #rows[r] end
  return n
end

local function same(a, b)
  for r, row in ipairs(a) do
    if table.concat(row, " ") ~= table.concat(b[r], " ") then return false end
  end
  return true
end

-- Returns the rate in bytes per second at which the engine reads `nbytes` bytes with four streams per thread.
local function streams(nbytes)
  local out = ffi.new "double[1]"
  ps.check(ps.C.ps_probe_bandwidth(nbytes, 4, 0, 0, 5, out))
  return out[0]
end

-- Adds the figures of the peer to the figures of psluajit.
local function compare(result, model, theirs, rows)
  local item = ps.empty({ 1 }, { dtype = args.dtype }):nbytes()
  local weights = (model:num_parameters() - model:costs().looked_up) * item
  result.peer_tokens_per_s = added(theirs.ids, rows) / theirs.seconds
  result.peer_ratio = result.tokens_per_s / result.peer_tokens_per_s
  result.memory_bytes_per_s = math.max(result.sum_bytes_per_s, result.streams_bytes_per_s)
  result.memory_share = result.tokens_per_s / #rows * weights / result.memory_bytes_per_s
  result.same_ids = same(result.ids, theirs.ids)
end

local function run()
  local rows, model = prompts(), ps.from_pretrained(args.folder, { dtype = args.dtype, quiet = true,
    keep_quantized = args.keep_quantized, int8_activations = args.int8_activations })
  local peer = args.peer and start_peer()
  local best, theirs, out, summed, walked = math.huge, { seconds = math.huge }, nil, 0, 0
  for _ = 1, args.rounds do
    local began = ps.now()
    out = model:generate(rows, args.max_new, { do_sample = false, num_beams = args.num_beams,
      kv_cache = args.kv_cache })
    local seconds = ps.now() - began
    best = math.min(best, seconds)
    if peer then
      local answer = peer:ask "generate"
      if answer.seconds < theirs.seconds then theirs = answer end
      summed = math.max(summed, peer:ask("read " .. seconds).bytes_per_s)
      walked = math.max(walked, streams(2 ^ 29))
    end
  end
  local n = added(out, rows)
  local result = { ids = out, seconds = best, tokens_per_s = n / best }
  if peer then
    result.sum_bytes_per_s, result.streams_bytes_per_s = summed, walked
    compare(result, model, theirs, rows)
    peer:close()
  end
  if args.json then return print(json.encode(result)) end
  for _, row in ipairs(out) do print(table.concat(row, " ")) end
  print(("%d tokens in %.3f s, %.1f tokens/s"):format(n, best, result.tokens_per_s))
  if not peer then return end
  print(("transformers %.1f tokens/s, ours is %.2f times as fast; the ids are %s"):format(result.peer_tokens_per_s,
    result.peer_ratio, result.same_ids and "the same" or "others"))
  print(("memory is read at %.1f GB/s; our weights at %.2f of that"):format(result.memory_bytes_per_s / 1e9,
    result.memory_share))
end

local ok, problem = pcall(run)
if not ok then
  local refused = type(problem) == "table" and problem.refused
  io.stderr:write(refused and "refused: " .. refused or tostring(problem), "\n")
  os.exit(refused and 2 or 1)
end
