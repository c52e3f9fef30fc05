-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit bench/packing.lua FOLDER [--steps N] [--batch N] [--seq N] [--preset NAME] [--loader]: measures packing and
-- the loader of a table. It uses the tokenizer and the chat template of a folder, and random conversations whose
-- lengths are distributed like those of real conversations (log-normal, median about 90 tokens).
-- It trains a model of 110 M parameters alternately on padded batches (grouped by length) and on packed batches. It
-- prints the trained tokens per second, the share of padding, and the ratio packed / padded * (1 - share of padding),
-- which should be at least 0.95.
-- Then it prints the processor time of the loader per step, as a share of the step's processor time. In a first epoch,
-- the loader renders templates, tokenizes and writes the cache. In a second epoch, the loader reads from the cache. The
-- script also prints the part of the loader's time that the script's own thread spends in a first epoch with stream =
-- true. With --loader, only the loader is measured, and --step-seconds is the step's processor time.
-- The last line is one JSON object. It contains tokens_per_s and padding of both kinds of batches, packed_over_padded
-- and of_possible. It also contains first_epoch_s, second_epoch_s, stream_s and stream_own_s, the loader's processor
-- seconds per step, and their shares of step_s.
local ps = require "ps"
local cjson = require "cjson"
local line = require "ps.core.command_line"
local posix = require "posix.time"

local parser = require "argparse" ("bench/packing.lua", "Measures packing and the loader of a table.")
parser:argument("folder", "a folder with a tokenizer and a chat template")
line.whole(parser:option("--steps", "steps of each kind", "3"), 1)
line.whole(parser:option("--batch", "rows per batch", "4"), 1)
line.whole(parser:option("--seq", "most tokens of a row", "512"), 1)
line.whole(parser:option("--conversations", "examples", "4000"), 1)
line.whole(parser:option("--window", "examples that are packed together with stream = true", "1000"), 1)
parser:option("--preset", "of Llama's family", "llama-110m")
parser:flag("--loader", "the loader alone")
line.number(parser:option("--step-seconds", "with --loader: processor time of a step"), 0)
local args = line.parse(parser)

local WORDS, TEXT = {}, [[
  the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
  which one you were all her she there would their we him been has when who will no more if out so up said what its
  about than into them can only other time new some could these two may first then do any like my now over such our man
  me even most made after also did many off before must well back through years where much your way down should because
  long each just state those people too little world good very make year still own see work men day get here between
  both life being under never know same another while last might us great old against since go come right used take
  three]]
for word in TEXT:gmatch "%S+" do WORDS[#WORDS + 1] = word end

local function normal() return math.sqrt(-2 * math.log(1 - math.random())) * math.cos(2 * math.pi * math.random()) end

local function words(n)
  local list = {}
  for i = 1, n do list[i] = WORDS[math.random(#WORDS)] end
  return table.concat(list, " ")
end

local function write(path, n)
  math.randomseed(1)
  local f = assert(io.open(path, "wb"))
  for _ = 1, n do
    local length = math.max(4, math.min(args.seq - 60, math.floor(math.exp(4.2 + 0.8 * normal()))))
    f:write(('{"messages":[{"role":"user","content":"%s"},{"role":"assistant","content":"%s"}]}\n'):format(
      words(math.ceil(length / 3)), words(length - math.ceil(length / 3))))
  end
  f:close()
end

local folder = os.tmpname()
os.remove(folder)
require("lfs").mkdir(folder)
local path = folder .. "/chats.jsonl"
write(path, args.conversations)
local tok = ps.tokenizer.from_pretrained(args.folder)

local function loader(more)
  local options = { table = ps.data.table(path), tokenizer = tok, batch = args.batch, seq = args.seq, seed = 1,
    pad_to_multiple_of = 16, cache = folder .. "/cache", date = "2026-01-01" }
  for key, value in pairs(more) do options[key] = value end
  return ps.data.loader(options)
end

-- Returns the processor time of this thread in seconds.
local function own_clock()
  local t = posix.clock_gettime(posix.CLOCK_THREAD_CPUTIME_ID)
  return t.tv_sec + 1e-9 * t.tv_nsec
end

-- Creates a loader and runs an epoch. Returns processor seconds: `made` to create the loader, `turns` for the epoch,
-- and per batch `per_batch` for both and `own` for the part of this thread. `batches` is the number of batches.
local function epoch(more)
  local from, own = os.clock(), own_clock()
  local one = loader(more)
  local made, batches = os.clock(), 0
  for _ in one do batches = batches + 1 end
  local ended = os.clock()
  return { made = made - from, turns = ended - made, batches = batches, per_batch = (ended - from) / batches,
    own = (own_clock() - own) / batches }
end

-- Prints the costs of the loader, and returns the fields of the result. `step` is the processor time of a step in
-- seconds.
local function loader_cost(step)
  local cache = folder .. "/of-the-loader"                   -- an empty folder, because training has filled the other
                                                             -- cache folder
  local first, second = epoch { packing = true, cache = cache }, epoch { packing = true, cache = cache }
  local stream = epoch { packing = true, cache = cache .. "-stream", stream = true, window = args.window }
  for i, e in ipairs { first, second } do
    print(("loader, %s epoch: %.1f ms of processor time per step (%d steps; %.2f s before the first one)%s"):format(
      i == 1 and "first" or "second", 1000 * e.per_batch, e.batches, e.made,
      step and (": %.3f %% of the step's %.2f s"):format(100 * e.per_batch / step, step) or ""))
  end
  print(("loader, first epoch with stream: %.1f ms of processor time per step, %.1f ms on the script's thread%s")
    :format(1000 * stream.per_batch, 1000 * stream.own, step and (": %.3f %% of the step's %.2f s"):format(
    100 * stream.own / step, step) or ""))
  local result = { step_s = step, first_epoch_s = first.per_batch, second_epoch_s = second.per_batch,
    stream_s = stream.per_batch, stream_own_s = stream.own }
  if step then
    result.first_epoch_share, result.second_epoch_share = first.per_batch / step, second.per_batch / step
    result.stream_own_share = stream.own / step
  end
  return result
end

if args.loader then
  print(cjson.encode(loader_cost(args.step_seconds)))
  os.execute(("rm -r '%s'"):format(folder))
  os.exit(0)
end

local model = require("models.llama").new(args.preset, { vocab_size = tok.vocab_size }):train()
local optimizer = ps.optim.AdamW(model, { lr = 1e-4 })

-- Runs one step. Returns its processor seconds, its number of trained tokens, and its fraction of padding.
local function train(one)
  local batch, clock = one:next(), os.clock()
  local mask = batch.segment_ids or batch.attention_mask
  local used = mask:ne(0):sum():item()
  optimizer:zero_grad()
  model(batch).loss:backward()
  optimizer:step()
  return os.clock() - clock, used, mask:numel()
end

local padded, packed = loader { group_by_length = true }, loader { packing = true }
train(packed)                                              -- a warm-up, which creates plans and kernels
local sums = { padded = { 0, 0, 0 }, packed = { 0, 0, 0 } }
for _ = 1, args.steps do
  for name, one in pairs { padded = padded, packed = packed } do
    local seconds, tokens, places = train(one)
    local sum = sums[name]
    sum[1], sum[2], sum[3] = sum[1] + seconds, sum[2] + tokens, sum[3] + places
  end
end
local function rate(name) return sums[name][2] / sums[name][1] end
local function padding(name) return 1 - sums[name][2] / sums[name][3] end
for _, name in ipairs { "padded", "packed" } do
  print(("%s: %.1f tokens trained per second of processor time, %.1f %% padding"):format(name, rate(name),
    100 * padding(name)))
end
local ratio, possible = rate "packed" / rate "padded", 1 / (1 - padding "padded")
print(("packed over padded: %.3f, of %.3f without padding: %.3f (goal: 0.95)"):format(ratio, possible,
  ratio / possible))
local result = loader_cost(sums.packed[1] / args.steps)
result.padded = { tokens_per_s = rate "padded", padding = padding "padded" }
result.packed = { tokens_per_s = rate "packed", padding = padding "packed" }
result.packed_over_padded, result.of_possible = ratio, ratio / possible
print(cjson.encode(result))
os.execute(("rm -r '%s'"):format(folder))
