-- SPDX-License-Identifier: BSD-3-Clause
-- Measures how well a language model predicts texts and answers questions:
--   psluajit tools/evaluate.lua MODEL --data FILE
--   psluajit tools/evaluate.lua MODEL --data FILE --json
--   psluajit tools/launch.lua --nproc-per-node 2 tools/evaluate.lua MODEL --data FILE     -- divides the rows
-- MODEL is a Hugging Face folder with a causal model and its tokenizer, or a name in its cache. ps.data.table reads
-- FILE. The perplexity is computed for rows with `text` and for conversations. The accuracy is computed for
-- multiple-choice rows with `query`, `choices` and `gold`. With --task answers, the model answers rows with `question`
-- and `answers` (docs/evaluation.md).
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local convert = require "ps.chat.convert"
local json = require "ps.chat.json"
local command_line = require "ps.core.command_line"
local folder = require "ps.pretrained.folder"
local rows_of = require "ps.evaluate.rows"
local write_file = require "ps.core.write_file"
local whole = command_line.whole

local parser = argparse("psluajit evaluate", "Evaluates a language model on a file.")
parser:argument("model", "a Hugging Face folder with a causal model and its tokenizer, or a name in its cache")
parser:option("--data", "JSON lines, text, or a folder or pattern of such files"):count(1)
parser:option("--task", "perplexity, choices or answers (default: choices if rows have them, else perplexity)")
  :choices { "perplexity", "choices", "answers" }
parser:option("--text", "whether a row of a .txt file is a line or the file", "file"):choices { "line", "file" }
whole(parser:option("--max-length", "tokens of a window (default: the model's positions, at most 2048)"), 1)
whole(parser:option("--stride", "tokens that a window predicts (default: all, so that windows do not overlap)"), 1)
whole(parser:option("--batch", "windows or choices that are computed together", "8"), 1)
whole(parser:option("--limit", "only the first rows"), 1)
parser:option("--train-on", "the turns of a conversation that are evaluated: assistant, last or all",
  "assistant"):choices {
  "assistant", "last", "all" }
parser:option("--date", "YYYY-MM-DD, for templates that print the date (default: today)")
whole(parser:option("--max-new", "the most tokens of an answer", "32"), 1)
parser:flag("--plain", "pass a question as plain text, without the chat template")
command_line.dtype(parser:option("--dtype", "type of the weights: fp32, bf16, fp16 or fp64 (default: that of the "
  .. "files)", "auto"):show_default(false))
parser:option("--device", "the device of the model")
parser:option("--adapter", "a folder with a PEFT or psluajit adapter for the model")
parser:flag("--json", "print the result as JSON")
command_line.file(parser:option("--samples", "write the result of each row to this file, as JSON lines"))
local args = command_line.parse(parser)

-- The names of results, in the order in which they are printed.
local NAMES = { "rows", "tokens", "unpredicted", "words", "bytes", "token_perplexity", "word_perplexity",
  "byte_perplexity", "bits_per_byte", "accuracy", "acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "exact_match",
  "exact_match_stderr", "f1" }

local function write_samples(samples)
  local lines = {}
  for i, sample in ipairs(samples) do lines[i] = cjson.encode(sample) .. "\n" end
  local done, why = write_file(args.samples, table.concat(lines))
  if not done then error("--samples: " .. why, 0) end
end

local function main()
  ps.init_distributed { quiet = true }
  local first = ps.rank() == 0
  local rows = ps.data.table(args.data, { text = args.text })
  local task = args.task or #rows > 0 and not rows_of.has_choices(rows[1]) and "perplexity"
  if args.samples and task == "perplexity" then
    error("--samples: perplexity has no results by row; leave out --samples, or use rows for --task choices or answers",
      0)
  end
  local path = folder.find(args.model)
  local tok = ps.tokenizer.from_pretrained(path)
  local model = ps.from_pretrained(path, { dtype = args.dtype, device = args.device, quiet = true, mmap = "auto" })
  if args.adapter then ps.lora.load(model, args.adapter, { trainable = false }) end
  if not model.generate then error(("%s is not a model that continues text"):format(model.class_name), 0) end
  local bar, chat
  if args.plain then chat = false end
  local result = ps.evaluate.run(model, tok, { data = rows, task = args.task, max_length = args.max_length,
    stride = args.stride, batch = args.batch, limit = args.limit, train_on = args.train_on, date = args.date,
    max_new = args.max_new, chat = chat, device = args.device, divide = true,
    progress = function(done, total)
      if args.json or not first then return end
      bar = bar or ps.progress.new { total = total }
      bar:update(done, {})
    end })
  if bar then bar:finish() end
  local samples = result.samples
  if first then
    result.samples, result.model, result.data = nil, args.model, args.data
    if args.json then print(json.encode(convert.value(result, "the result"), { sort_keys = true })) end
    for _, name in ipairs(args.json and {} or NAMES) do
      local v = result[name]
      if v then print(("%-20s %s"):format(name, v % 1 == 0 and ("%d"):format(v) or ("%.6g"):format(v))) end
    end
    if result.unpredicted and not args.json then
      print "The first token of each text is not predicted: the tokenizer has neither bos_token nor eos_token."
    end
  end
  if args.samples and first then write_samples(samples) end          -- written last, so that the result is already
                                                                     -- printed if writing fails
end

command_line.try("evaluate", main)
