-- SPDX-License-Identifier: BSD-3-Clause
-- How fast BERT is fine-tuned to classify lines of natural length:
--   psluajit bench/bert.lua --text corpus.txt --dtype bf16 --batch 32 --rounds 4 [--padded] [--peer] [--compile]
-- A batch is consecutive lines that are not empty, padded to its longest; words and marks stand for tokens, since speed
-- does not depend on which they are. The model has unpad = true; with --padded it computes padding, too. A round is a
-- step on a batch of its own. --peer: transformers takes the same batches in turn (bench/peers/bert_torch.py with the
-- Python of PS_TORCH_PYTHON or python3), compiled by PyTorch where --compile asks for it. The first two rounds warm up.
-- The last line is one JSON object: step_s (median), tokens_per_s (without padding), padded_share, mfu (6 FLOPs a
-- parameter of the layers and token, with --padded those of padding, too, over gemm_peak_gflops of the same run) and
-- peer_step_s, peer_ratio.
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local paths = require "ps.paths"
local process = require "bench.process_lib"
local whole = require("ps.command_line").whole

local parser = argparse("bench/bert.lua", "Measures fine-tuning of BERT on lines of natural length.")
parser:option("--text", "lines", "docs/memory.md")
parser:option("--model", "preset of BERT", "bert-base")
parser:option("--dtype", "fp32, bf16 or fp16", "bf16")
whole(parser:option("--batch", "lines of a step", "32"), 1)
whole(parser:option("--rounds", "steps", "8"), 3)
parser:flag("--padded", "padding is computed, too")
parser:flag("--peer", "transformers in turn with us")
parser:flag("--compile", "the peer is compiled")
parser:flag("--profile", "print where the kernels' time went, by op")
local args = parser:parse()

-- Lists of ids, of as many as the batches need; the text begins again at its end.
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

-- {input_ids, attention_mask: lists of lists, labels: list} of consecutive rows.
local function batches()
  local rows, list = read(args.batch * args.rounds), {}
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
    args.dtype, "--threads", ps.threads() }
  if args.compile then words[#words + 1] = "--compile" end
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
local times, theirs, tokens, places, peak = {}, {}, 0, 0, gemm_peak()
for i, batch in ipairs(list) do
  if args.profile and i == 3 then ps.profiler.start() end
  local began = ps.now()
  optimizer:zero_grad()
  local loss = model({ input_ids = ps.tensor(batch.input_ids, { dtype = "int32" }),
    attention_mask = ps.tensor(batch.attention_mask, { dtype = "int32" }),
    labels = ps.tensor(batch.labels, { dtype = "int32" }) }).loss
  local forward = ps.now()
  loss:backward()
  local backward = ps.now()
  optimizer:step()
  local value, took = loss:item(), ps.now() - began
  local other = peer and peer:ask("step " .. (i - 1)).seconds
  print(("step %d loss %.4f, %d tokens of %d: %.0f ms (forward %.0f, backward %.0f, optimizer %.0f)%s"):format(i, value,
    batch.tokens, batch.places, took * 1e3, (forward - began) * 1e3, (backward - forward) * 1e3,
    (began + took - backward) * 1e3, other and ("; peer %.0f ms"):format(other * 1e3) or ""))
  if i > 2 then
    times[#times + 1], theirs[#theirs + 1] = took, other
    tokens, places = tokens + batch.tokens, places + batch.places
  end
end
if args.profile then ps.profiler.report() end
if peer then peer:close() end
peak = math.max(peak, gemm_peak())
local sum, weights = 0, model:num_parameters() - model:costs().looked_up
for _, t in ipairs(times) do sum = sum + t end
local step, other = median(times), peer and median(theirs) or nil
print(cjson.encode { step_s = step, tokens_per_s = tokens / sum, padded_share = 1 - tokens / places,
  gemm_peak_gflops = peak, mfu = 6 * weights * (args.padded and places or tokens) / sum / (peak * 1e9),
  peer_step_s = other, peer_ratio = other and other / step })
