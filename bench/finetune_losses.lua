-- SPDX-License-Identifier: BSD-3-Clause
-- Fine-tunes a chat model. Compares the loss of each step with the loss of transformers on the same ids and masks:
--   PS_TORCH_PYTHON=PYTHON psluajit bench/finetune_losses.lua MODEL --data chats.jsonl [--steps 200]
-- A step has one batch of conversations, in the order of the file. No conversation is used twice. Without --data, the
-- conversations are made from sentences of psluajit's Markdown documents. The user writes the beginning of a sentence,
-- and the assistant writes the rest. Training uses AdamW without weight decay, a constant rate and fp32.
-- tokenizer:apply_chat_template makes the ids and masks, and bench/peers/finetune_torch.py trains with the same ids and
-- masks. The last line is one JSON object:
--   steps, first_loss, last_loss
--   largest                    largest relative difference between the losses of a step
--   at                         the step with the largest difference
--   seconds, peer_seconds
-- The exit status is 1 if `largest` is above --within.
local ps = require "ps"
local argparse = require "argparse"
local cjson = require "cjson"
local command_line = require "ps.core.command_line"
local paths = require "ps.paths"
local losses_lib = require "bench.losses_lib"
local process = require "bench.process_lib"
local whole, number = command_line.whole, command_line.number

local parser = argparse("bench/finetune_losses.lua", "Compares the losses of fine-tuning with transformers'.")
parser:argument("model", "a Hugging Face folder with a chat template")
parser:option("--data", "conversations; default: sentences of the documents")
whole(parser:option("--steps", "steps", "200"), 1)
whole(parser:option("--batch", "conversations of a step", "1"), 1)
whole(parser:option("--most", "the most tokens of a conversation", "128"), 2)
number(parser:option("--lr", "learning rate", "1e-5"), 0)
number(parser:option("--within", "relative difference that is allowed", "1e-4"), 0)
local args = command_line.parse(parser)

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

-- Creates conversations from sentences. The user writes the first half of a sentence, and the assistant writes the
-- second half.
local function sentences()
  local rows, seen = {}, {}
  local files = io.popen(("ls '%s'/docs/*.md '%s'/*.md"):format(paths.root, paths.root))
  for path in files:lines() do
    for sentence in read(path):gsub("```.-```", ""):gsub("%s+", " "):gmatch "[A-Z][%w ,'()%-]+%. " do
      local words = {}
      for word in sentence:gmatch "%S+" do words[#words + 1] = word end
      local half = math.floor(#words / 2)
      if #words >= 8 and #words <= 30 and not seen[sentence] then
        seen[sentence] = true
        rows[#rows + 1] = { messages = { { role = "user", content = table.concat(words, " ", 1, half) },
          { role = "assistant", content = table.concat(words, " ", half + 1) } } }
      end
    end
  end
  files:close()
  return rows
end

-- Returns the ids and labels of each step. Each conversation is padded to the length of the longest conversation of its
-- step.
local function batches_of(tok, rows)
  local pad, steps = tok.pad_token_id or tok.eos_token_id or 0, {}
  local n = args.steps * args.batch
  if #rows < n then
    error(("%d conversations are fewer than %d steps of %d"):format(#rows, args.steps, args.batch), 0)
  end
  for step = 1, args.steps do
    local ids, labels, longest = {}, {}, 0
    for r = 1, args.batch do
      local row, mask = tok:apply_chat_template((ps.data.conversation(rows, (step - 1) * args.batch + r)),
        { train_on = "assistant", date = "2026-01-01" })
      ids[r], labels[r] = {}, {}
      local trained = 0
      for k = 1, math.min(#row, args.most) do
        ids[r][k], labels[r][k] = row[k], mask[k] == 1 and row[k] or -100
        trained = trained + (k > 1 and mask[k] or 0)
      end
      if trained == 0 then
        error(("--most %d: none of the first %d tokens of conversation %d is trained, of %d tokens: raise it"):format(
          args.most, args.most, (step - 1) * args.batch + r, #row), 0)
      end
      longest = math.max(longest, #ids[r])
    end
    local attention = {}
    for r = 1, args.batch do
      attention[r] = {}
      for k = 1, longest do
        attention[r][k] = ids[r][k] and 1 or 0
        ids[r][k], labels[r][k] = ids[r][k] or pad, labels[r][k] or -100
      end
    end
    steps[step] = { input_ids = ids, labels = labels, attention_mask = attention }
  end
  return steps
end

-- Trains with psluajit. Returns the loss of each step.
local function trained(steps)
  local model = ps.from_pretrained(args.model, { dtype = "fp32", quiet = true }):train()
  return losses_lib.train(model, #steps, args.lr, function(i)
    local batch = {}
    for name, list in pairs(steps[i]) do batch[name] = ps.tensor(list, { dtype = "int32" }) end
    return model(batch).loss
  end)
end

local function peer(steps)
  local path = os.tmpname()
  local file = assert(io.open(path, "wb"))
  file:write(cjson.encode { steps = steps, lr = args.lr })
  file:close()
  local answer = process.last_json(("'%s' '%s/bench/peers/finetune_torch.py' '%s' '%s'"):format(
    os.getenv "PS_TORCH_PYTHON" or "python3", paths.root, args.model, path))
  os.remove(path)
  return answer or error("bench/peers/finetune_torch.py printed no result", 0)
end

local function main()
  local tok = ps.tokenizer.from_pretrained(args.model)
  local steps = batches_of(tok, ps.data.table(args.data or sentences()))
  local began = ps.now()
  local losses = trained(steps)
  local seconds = ps.now() - began
  local other = peer(steps)
  local largest, at = losses_lib.largest(losses, other.losses)
  print(cjson.encode { steps = #losses, first_loss = losses[1], last_loss = losses[#losses], largest = largest, at = at,
    seconds = seconds, peer_seconds = other.seconds })
  if largest > args.within or largest ~= largest then os.exit(1, true) end
end

command_line.try("finetune_losses", main)
