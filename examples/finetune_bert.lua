-- SPDX-License-Identifier: BSD-3-Clause
-- Fine-tunes an encoder (BERT, RoBERTa) to classify sequences, prints its accuracy on held-out ones, and writes a
-- folder that transformers loads.
--
--   psluajit finetune_bert.lua --model FOLDER --data train.jsonl --held-out dev.jsonl --out FOLDER
--
-- A line of the data is {"text": "a fine film", "label": 1}, or {"input_ids": [101, 7592, 102], "label": 1}. Texts need
-- the tokenizer in the model's folder. Classes count from 0. Without --data the script generates sequences of two
-- classes: whether token 7 comes before token 9. Without --model it starts from a small BERT with random weights, which
-- needs a higher learning rate and more epochs than a pretrained one: --lr and --epochs have other defaults then.
local ps = require "ps"
local argparse = require "argparse"
local json = require "cjson"
local line = require "ps.command_line"
local bert = require "models.bert"
local progress = require "ps.progress"
local without_bom = require "ps.core.bom"

local settings = { warmup_share = 0.1, weight_decay = 0.01, max_norm = 1,
  pretrained = { lr = 5e-5, epochs = 3 },                   -- values from BERT's paper
  untrained = { lr = 2e-3, epochs = 5 },                    -- values for a small model with random weights
}

local parser = argparse("psluajit finetune_bert.lua", "Fine-tunes an encoder to classify texts.")
parser:option("--model", "A folder, or a name in Hugging Face's cache. Default: a small BERT with random weights.")
parser:option("--data", "Training lines, {\"text\": \"...\", \"label\": 0}. Default: generated ones.")
parser:option("--held-out", "Held-out lines. Default: the last tenth of --data.")
parser:option("--out", "Folder to write the model to.")
local function default(key)
  return (" Default: %g with --model, else %g."):format(settings.pretrained[key], settings.untrained[key])
end
line.whole(parser:option("--epochs", "Passes over the data." .. default "epochs"), 1)
line.whole(parser:option("--batch", "Lines per step.", "32"), 1)
line.number(parser:option("--lr", "Highest learning rate." .. default "lr"), 0)
line.whole(parser:option("--seed", "Random seed.", "1"), 0)
parser:option("--device", "Device that computes: cpu or cuda.", "cpu")
parser:flag("--force", "Replace a model in --out.")
parser:flag("--json", "Print only one JSON line.")
local args = line.parse(parser)
for key, value in pairs(args.model and settings.pretrained or settings.untrained) do
  if args[key] == nil then args[key] = value end
end
ps.manual_seed(args.seed)

-- Returns a list of {ids or text, label}, and the number of classes.
local function read(path)
  local rows, classes, file = {}, 0, assert(io.open(path))
  for text in file:lines() do
    local ok, row = pcall(json.decode, without_bom(text))
    if not ok or type(row) ~= "table" or type(row.input_ids) ~= "table" and type(row.text) ~= "string"
      or type(row.label) ~= "number" then
      error(("%s:%d: not a line {\"text\": \"...\", \"label\": 0}"):format(path, #rows + 1), 0)
    end
    rows[#rows + 1] = { ids = row.input_ids, text = row.text, label = row.label }
    classes = math.max(classes, row.label + 1)
  end
  file:close()
  if #rows == 0 then error(path .. " has no rows", 0) end
  return rows, classes
end

-- Returns n sequences of 4 to 12 tokens that contain a 7 and a 9. In class 1, the 7 comes first.
local function draw(n)
  local rows = {}
  local numbers = ps.randint(10, 100, { n, 16 }, { dtype = "int32" }):tolist()
  for i, row in ipairs(numbers) do
    local ids, length = { 1 }, 4 + row[13] % 9
    for k = 1, length do ids[k + 1] = row[k] end
    local a, b = 2 + row[14] % length, 2 + row[15] % (length - 1)
    if b >= a then b = b + 1 end
    ids[a], ids[b], ids[length + 2] = 7, 9, 2
    rows[i] = { ids = ids, label = a < b and 1 or 0 }
  end
  return rows, 2
end

local function try(fn, ...) return line.try("finetune_bert.lua", fn, ...) end
if args.out then try(ps.checkpoints.new_run, args.out, { force = args.force }) end

local rows, classes, held_out
if args.data then rows, classes = try(read, args.data) else rows, classes = draw(2000) end
if args.held_out then held_out = try(read, args.held_out)
else
  held_out = {}
  for _ = 1, math.ceil(#rows / 10) do held_out[#held_out + 1] = table.remove(rows) end
end

local model
if args.model then
  model = try(ps.from_pretrained, args.model, { task = "sequence_classification", num_labels = classes,
    device = args.device })
else
  model = bert.new("tiny", { task = "sequence_classification", num_labels = classes, device = args.device })
end
local pad = model.config.pad_token_id or 0

-- Texts become ids, truncated to the model's number of positions.
local tokenizer
for _, list in ipairs { rows, held_out } do
  for _, row in ipairs(list) do
    if not row.ids then
      if not model.source then error("data with texts needs --model: a folder with a tokenizer", 0) end
      tokenizer = tokenizer or ps.tokenizer.from_pretrained(model.source)
      local longest = model.config.max_position_embeddings - (model.config.model_type == "roberta" and pad + 1 or 0)
      row.ids = tokenizer(row.text, { truncation = true, max_length = longest }).input_ids:tolist()[1]
    end
  end
end

-- Returns lines first to last of a list as a batch, padded at the end to the longest line.
local function batch_of(list, first, last)
  local longest, ids, mask, labels = 0, {}, {}, {}
  for i = first, last do longest = math.max(longest, #list[i].ids) end
  for i = first, last do
    local row, seen = {}, {}
    for k = 1, longest do row[k], seen[k] = list[i].ids[k] or pad, list[i].ids[k] and 1 or 0 end
    ids[#ids + 1], mask[#mask + 1], labels[#labels + 1] = row, seen, list[i].label
  end
  local where = { dtype = "int32", device = args.device }
  return { input_ids = ps.tensor(ids, where), attention_mask = ps.tensor(mask, where),
    labels = ps.tensor(labels, where) }
end

-- Returns the fraction of held-out lines that the model classifies correctly.
local function accuracy()
  local right = 0
  model:eval()
  for first = 1, #held_out, args.batch do
    local batch = batch_of(held_out, first, math.min(#held_out, first + args.batch - 1))
    right = right + ps.no_grad(function()
      return model(batch).logits:argmax(-1):eq(batch.labels:to("int64")):sum():item()
    end)
  end
  model:train()
  return right / #held_out
end

-- Returns the batches of an epoch in random order. The lines in a batch have similar lengths.
local function epoch()
  local drawn, batches = ps.rand({ 2 * #rows }):tolist(), {}
  local order = {}
  for i = 1, #rows do order[i] = { row = rows[i], at = math.floor(#rows[i].ids / 4) + drawn[i] } end
  table.sort(order, function(a, b) return a.at < b.at end)
  local sorted = {}
  for i, entry in ipairs(order) do sorted[i] = entry.row end
  for first = 1, #sorted, args.batch do batches[#batches + 1] = first end
  for i = #batches, 2, -1 do                                -- Fisher-Yates shuffle
    local k = math.floor(drawn[#rows + i] * i) + 1
    batches[i], batches[k] = batches[k], batches[i]
  end
  return sorted, batches
end

local steps = args.epochs * math.ceil(#rows / args.batch)
local optimizer = ps.optim.AdamW(ps.optim.groups(model, settings.weight_decay), { lr = args.lr,
  max_norm = settings.max_norm })
local schedule = ps.sched.warmup_linear { optimizer = optimizer, max_lr = args.lr,
  warmup = math.ceil(settings.warmup_share * steps), total = steps }
local display, began, step = progress.new { total = steps, quiet = args.json }, ps.now(), 0
local before = accuracy()
for _ = 1, args.epochs do
  local sorted, batches = epoch()
  for _, first in ipairs(batches) do
    local loss = model(batch_of(sorted, first, math.min(#sorted, first + args.batch - 1))).loss
    loss:backward()
    optimizer:step()
    optimizer:zero_grad()
    schedule:step()
    step = step + 1
    if step % 20 == 0 or step == steps then display:update(step, { loss = loss:item() }) end
  end
end
display:finish()

local after = accuracy()
if args.out then model:save_pretrained(args.out) end
if args.json then
  print(json.encode { accuracy_before = before, accuracy = after, steps = steps, train_s = ps.now() - began,
    held_out = #held_out, classes = classes })
else
  print(("accuracy %.1f %% of %d held-out lines (%.1f %% before) after %d steps in %.1f s"):format(100 * after,
    #held_out, 100 * before, steps, ps.now() - began))
  if args.out then print(("wrote %s; docs/encoder.md shows how to classify a text with it"):format(args.out)) end
end
