-- SPDX-License-Identifier: BSD-3-Clause
-- Measures how fast BERT is fine-tuned to classify lines of natural length:
--   psluajit bench/bert.lua --text corpus.txt --dtype bf16 --batch 32 --rounds 8 [--grouped] [--padded]
--     [--peer bf16|amp|fp32 [--compile] [--packed]]
-- A batch consists of consecutive non-empty lines, which are padded to the longest line. With --grouped, the lines of a
-- batch have similar lengths. Each word or punctuation mark is one token, because speed does not depend on the ids. The
-- model has unpad = true. With --padded, the model also computes padding. Each round is a step on a different batch.
-- Before the rounds, each batch has a warm-up step, because both programs create kernels for each size.
--   --peer      steps of transformers on the same batches alternate with psluajit's steps (bench/peers/bert_torch.py
--               with the Python of PS_TORCH_PYTHON or python3). With bf16, weights and Adam's state are bf16. With amp,
--               weights and Adam's state are fp32, and the computation is in bf16, as in the Trainer of transformers
--               with bf16. With fp32, everything is fp32.
--   --compile   PyTorch compiles the peer
--   --packed    the peer computes no padding. Each of its rows contains several lines, and a mask hides the lines from
--               each other.
-- The last line is one JSON object with these figures:
--   seconds         seconds of all rounds
--   step_s          median seconds of a step
--   tokens_per_s    tokens per second; padding is not counted
--   padded_share
--   mfu             6 FLOPs per token and parameter of the layers, divided by gemm_peak_gflops of the same run. With
--                   --padded, padding tokens are counted as well.
--   peer_seconds, peer_step_s
--   peer_ratio      the peer's seconds divided by psluajit's seconds, over all rounds
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local paths = require "ps.paths"
local process = require "bench.process_lib"
local command_line = require "ps.core.command_line"
local whole = command_line.whole

local parser = argparse("bench/bert.lua", "Measures fine-tuning of BERT on lines of natural length.")
parser:option("--text", "lines", "docs/memory.md")
parser:option("--model", "preset of BERT", "bert-base")
parser:option("--dtype", "fp32, bf16 or fp16", "bf16")
whole(parser:option("--batch", "lines of a step", "32"), 1)
whole(parser:option("--rounds", "steps", "8"), 1)
parser:flag("--grouped", "batches have lines of similar length")
parser:flag("--padded", "also compute padding")
parser:option("--peer", "run transformers alternately with psluajit"):choices { "bf16", "amp", "fp32" }
parser:flag("--compile", "compile the peer's model")
parser:flag("--packed", "give the peer several lines per row")
parser:flag("--profile", "print the time of the kernels by op")
local args = command_line.parse(parser)
if (args.compile or args.packed) and not args.peer then
  parser:error("--compile and --packed apply to the peer; they need --peer")
end

-- Returns lists of ids for all batches. At the end of the text, reading starts again at the beginning of the text.
local function read(n)
  local rows, lines = {}, {}
  for line in io.lines(args.text) do
    local ids = { 1 }
    for _ in line:gmatch("%w+") do ids[#ids + 1] = (#lines * 7919 + #ids * 104729) % 250 end
    for _ in line:gmatch("%p") do ids[#ids + 1] = 251 end
    if #ids > 1 then
      while #ids > 127 do ids[#ids] = nil end
      ids[#ids + 1] = 2
      lines[#lines + 1] = ids
    end
  end
  for i = 1, n do rows[i] = lines[(i - 1) % #lines + 1] end
  return rows
end

-- Returns batches {input_ids, attention_mask: lists of lists, labels: list}. The rows of a batch are consecutive lines.
-- With --grouped, they are lines of similar length.
local function batches()
  local rows, list = read(args.batch * args.rounds), {}
  if args.grouped then table.sort(rows, function(a, b) return #a < #b end) end
  for b = 1, args.rounds do
    local batch, longest = { input_ids = {}, attention_mask = {}, labels = {} }, 0
    for i = 1, args.batch do longest = math.max(longest, #rows[(b - 1) * args.batch + i]) end
    for i = 1, args.batch do
      local row, ids, seen = rows[(b - 1) * args.batch + i], {}, {}
      for k = 1, longest do ids[k], seen[k] = row[k] or 0, row[k] and 1 or 0 end
      batch.input_ids[i], batch.attention_mask[i], batch.labels[i] = ids, seen, i % 2
      batch.tokens = (batch.tokens or 0) + #row
    end
    batch.places = longest * args.batch
    list[b] = batch
  end
  return list
end

local function gemm_peak()
  local n, best = 2048, 0
  local a, b = ps.randn({ n, n }, { dtype = args.dtype }), ps.randn({ n, n }, { dtype = args.dtype })
  for _ = 1, 4 do
    local t = ps.now()
    a:matmul(b):release()
    best = math.max(best, 2 * n ^ 3 / (ps.now() - t) / 1e9)
  end
  return best
end

local function median(list)
  table.sort(list)
  return list[math.floor(#list / 2) + 1]
end

local function start_peer(list)
  local file = os.tmpname()
  local out = assert(io.open(file, "wb"))
  out:write(cjson.encode(list))
  out:close()
  local words = { os.getenv "PS_TORCH_PYTHON" or "python3", paths.root .. "/bench/peers/bert_torch.py", file, "--dtype",
    args.peer, "--threads", ps.threads() }
  for _, flag in ipairs { "compile", "packed" } do if args[flag] then words[#words + 1] = "--" .. flag end end
  local peer = process.start(words)
  peer:answer()
  os.remove(file)
  return peer
end

ps.manual_seed(0)
local list = batches()
local model = require("models.bert").new(args.model, { task = "sequence_classification", dtype = args.dtype,
  unpad = not args.padded })
local optimizer = ps.optim.AdamW(model, { lr = 2e-5 })
local peer = args.peer and start_peer(list)

for _, batch in ipairs(list) do
  batch.given = {}
  for _, name in ipairs { "input_ids", "attention_mask", "labels" } do
    batch.given[name] = ps.tensor(batch[name], { dtype = "int32" }):keep()
  end
end

-- Runs a step. Returns the seconds of forward, of backward and of the optimizer, and the loss.
local function step(batch)
  local began = ps.now()
  optimizer:zero_grad()
  local loss = model(batch.given).loss
  local forward = ps.now()
  loss:backward()
  local backward = ps.now()
  optimizer:step()
  local value = loss:item()
  return { forward - began, backward - forward, ps.now() - backward }, value
end
local function step_of_peer(i) return peer and peer:ask("step " .. (i - 1)).seconds end

for i, batch in ipairs(list) do
  step(batch)
  step_of_peer(i)
end
local times, theirs, tokens, places, peak = {}, {}, 0, 0, gemm_peak()
if args.profile then ps.profiler.start() end
for i, batch in ipairs(list) do
  local other = i % 2 == 0 and step_of_peer(i)             -- in every second round, the peer runs first
  local took, loss = step(batch)
  other = other or step_of_peer(i)
  times[i], theirs[i] = took[1] + took[2] + took[3], other
  tokens, places = tokens + batch.tokens, places + batch.places
  print(("step %d loss %.4f, %d tokens of %d: %.0f ms (forward %.0f, backward %.0f, optimizer %.0f)%s"):format(i, loss,
    batch.tokens, batch.places, times[i] * 1e3, took[1] * 1e3, took[2] * 1e3, took[3] * 1e3,
    other and ("; peer %.0f ms"):format(other * 1e3) or ""))
end
if args.profile then ps.profiler.report() end
if peer then peer:close() end
peak = math.max(peak, gemm_peak())

local function sum(numbers)
  local total = 0
  for _, x in ipairs(numbers) do total = total + x end
  return total
end
local ours, other, weights = sum(times), peer and sum(theirs) or nil, model:num_parameters() - model:costs().looked_up
print(cjson.encode { seconds = ours, step_s = median(times), tokens_per_s = tokens / ours,
  padded_share = 1 - tokens / places, gemm_peak_gflops = peak,
  mfu = 6 * weights * (args.padded and places or tokens) / ours / (peak * 1e9), peer_seconds = other,
  peer_step_s = peer and median(theirs) or nil, peer_ratio = other and other / ours })
