-- SPDX-License-Identifier: BSD-3-Clause
-- Fine-tunes an encoder (BERT, RoBERTa) to classify sequences. Prints the accuracy on held-out sequences, and writes a
-- folder that transformers loads.
--
--   psluajit finetune_bert.lua --model FOLDER --data train.jsonl --held-out dev.jsonl --out FOLDER
--
-- A row of the data is {"text": "a fine film", "label": "good"}, or {"input_ids": [101, 7592, 102], "label": 1}. The
-- file can be .jsonl, .json, .csv or .tsv (ps.data.table). Texts need the tokenizer in the model's folder. Labels are
-- names or whole numbers. Each different label in --data is a class, and the names of the classes are written to
-- config.json. If the labels are the numbers 0, 1, 2, ..., a label is the index of its class.
--
-- Without --data, the script generates sequences of two classes. A sequence is in class 1 if token 7 occurs before
-- token 9. Without --model, the script starts from a small BERT with random weights. Such a model needs a higher
-- learning rate and more epochs than a pretrained model, so the defaults of --lr and --epochs are higher without
-- --model.
local ps = require "ps"
local argparse = require "argparse"
local json = require "cjson"
local line = require "ps.command_line"
local bert = require "models.bert"
local progress = require "ps.progress"

local settings = { warmup_share = 0.1, weight_decay = 0.01, max_norm = 1,
  pretrained = { lr = 5e-5, epochs = 3 },                   -- values from BERT's paper
  untrained = { lr = 2e-3, epochs = 5 },                    -- values for a small model with random weights
}

local parser = argparse("psluajit finetune_bert.lua", "Fine-tunes an encoder to classify texts.")
parser:option("--model", "A folder, or a name in Hugging Face's cache. Default: a small BERT with random weights.")
parser:option("--data", "Training rows with the fields text and label (.jsonl, .csv, .tsv). Default: generated ones.")
parser:option("--held-out", "Held-out rows. Default: the last tenth of --data.")
parser:option("--out", "Folder to write the model to.")
local function default(key)
  return (" Default: %g with --model, else %g."):format(settings.pretrained[key], settings.untrained[key])
end
line.whole(parser:option("--epochs", "Passes over the data." .. default "epochs"), 1)
line.whole(parser:option("--batch", "Rows per step.", "32"), 1)
line.number(parser:option("--lr", "Highest learning rate." .. default "lr"), 0)
line.whole(parser:option("--seed", "Random seed.", "1"), 0)
parser:option("--device", "Device that computes: cpu or cuda.", "cpu")
parser:flag("--force", "Replace a model in --out.")
parser:flag("--json", "Print only one JSON line.")
local args = line.parse(parser)
if args.held_out and not args.data then parser:error "--held-out needs --data" end
for key, value in pairs(args.model and settings.pretrained or settings.untrained) do
  if args[key] == nil then args[key] = value end
end
ps.manual_seed(args.seed)

-- Returns a list of rows {ids or text, label, place}. A label is a whole number or a text.
local function read(path)
  local list, rows = {}, ps.data.table(path)
  for i, row in ipairs(rows) do
    local label = row.label
    if type(row.input_ids) ~= "table" and type(row.text) ~= "string" or type(label) ~= "string"
      and not (type(label) == "number" and label % 1 == 0) then
      error(("%s: a row needs a field text (or input_ids) and a field label, which is a text or a whole number"):format(
        rows:place(i)), 0)
    end
    if row.text and not row.input_ids and not args.model then
      error(("%s: texts need a model with a tokenizer: pass --model FOLDER"):format(rows:place(i)), 0)
    end
    list[i] = { ids = row.input_ids, text = row.text, label = label, place = rows:place(i) }
  end
  if #list == 0 then error(path .. " has no rows", 0) end
  return list
end

-- Returns the different labels of the rows as a sorted list. If all labels are whole numbers, they are sorted as
-- numbers, even if some are written as texts.
local function labels_of(rows)
  local seen, labels, numbers = {}, {}, true
  for _, row in ipairs(rows) do
    local label = tostring(row.label)
    numbers = numbers and label:find "^%-?%d+$" ~= nil
    if not seen[label] then seen[label], labels[#labels + 1] = true, label end
  end
  table.sort(labels, function(a, b)
    if numbers then return tonumber(a) < tonumber(b) end
    return a < b
  end)
  if #labels < 2 then
    error(("%s: all rows have the label %s; a classifier needs two or more"):format(args.data, labels[1]), 0)
  end
  return labels
end

-- Replaces the labels of rows by the indices of their classes, counted from 0.
local function number_labels(rows, labels)
  local class = {}
  for i, label in ipairs(labels) do class[label] = i - 1 end
  for _, row in ipairs(rows) do
    local label = tostring(row.label)
    row.label = class[label] or error(("%s: no row of --data has the label %s (there are %s)"):format(row.place, label,
      table.concat(labels, ", ", 1, math.min(#labels, 10)) .. (#labels > 10 and ", ..." or "")), 0)
  end
end

-- Returns n sequences of 4 to 12 tokens. Each sequence contains token 7 and token 9. In class 1, token 7 is before
-- token 9.
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
  return rows
end

local function try(fn, ...) return line.try("finetune_bert.lua", fn, ...) end
if args.out then try(ps.checkpoints.new_run, args.out, { force = args.force }) end

local rows, held_out, labels
if args.data then
  rows, held_out = try(read, args.data), args.held_out and try(read, args.held_out)
  labels = try(labels_of, rows)
  for _, list in ipairs { rows, held_out } do try(number_labels, list, labels) end
else rows = draw(2000) end
if not held_out then
  held_out = {}
  for _ = 1, math.ceil(#rows / 10) do held_out[#held_out + 1] = table.remove(rows) end
end

-- If the labels are the numbers 0, 1, 2, ..., the classes need no names.
local counted = true
for i, label in ipairs(labels or {}) do counted = counted and label == tostring(i - 1) end
local classes = labels and #labels or 2
local settings_of_model = { task = "sequence_classification", num_labels = classes, device = args.device,
  id2label = not counted and labels or nil }
local model
local function open()
  local folder = require "ps.pretrained.folder"
  local kind = folder.config(folder.find(args.model)).model_type
  if kind ~= "bert" and kind ~= "roberta" then
    error(("--model: %s is a model of the type %s; this program trains encoders: bert and roberta"):format(args.model,
      tostring(kind)), 0)
  end
  return ps.from_pretrained(args.model, settings_of_model)
end
if args.model then model = try(open)
else model = bert.new("tiny", settings_of_model) end
local pad = model.config.pad_token_id or 0

-- Turns texts into ids. Truncates the ids of a text to the model's number of positions. Prints how many texts were
-- truncated, and how many tokens are not in the vocabulary.
local function encode()
  local tokenizer, cut, unknown, tokens, all = nil, 0, 0, 0, #rows + #held_out
  local most = model.config.max_position_embeddings - (model.config.model_type == "roberta" and pad + 1 or 0)
  for _, list in ipairs { rows, held_out } do
    for _, row in ipairs(list) do
      if not row.ids then
        tokenizer = tokenizer or ps.tokenizer.from_pretrained(model.source)
        row.ids = tokenizer:encode(row.text)
        tokens = tokens + #row.ids
        for _, id in ipairs(row.ids) do unknown = unknown + (id == tokenizer.unk_token_id and 1 or 0) end
        if #row.ids > most then
          cut = cut + 1
          row.ids = tokenizer(row.text, { truncation = true, max_length = most }).input_ids:tolist()[1]
        end
      elseif #row.ids > most then
        error(("%s: %d input_ids, but the model has %d positions"):format(row.place, #row.ids, most), 0)
      end
    end
  end
  if unknown > tokens / 10 then
    io.stderr:write(("finetune_bert.lua: %d of %d tokens are %s: the vocabulary of %s lacks many words of the texts\n")
      :format(unknown, tokens, tokenizer.unk_token, args.model))
  end
  if cut > 0 then
    io.stderr:write(("finetune_bert.lua: %d of %d texts are longer than the model's %d positions: their ends are cut "
      .. "off\n"):format(cut, all, most))
  end
end
try(encode)

-- Returns the rows `first` to `last` of a list as a batch. Rows are padded at the end to the length of the batch's
-- longest row.
local function batch_of(list, first, last)
  local longest, ids, mask, targets = 0, {}, {}, {}
  for i = first, last do longest = math.max(longest, #list[i].ids) end
  for i = first, last do
    local row, seen = {}, {}
    for k = 1, longest do row[k], seen[k] = list[i].ids[k] or pad, list[i].ids[k] and 1 or 0 end
    ids[#ids + 1], mask[#mask + 1], targets[#targets + 1] = row, seen, list[i].label
  end
  local where = { dtype = "int32", device = args.device }
  return { input_ids = ps.tensor(ids, where), attention_mask = ps.tensor(mask, where),
    labels = ps.tensor(targets, where) }
end

-- Returns the fraction of held-out rows that the model classifies correctly.
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

-- Returns the batches of an epoch in random order. The rows in a batch have similar lengths.
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

local function train()
  for _ = 1, args.epochs do
    local sorted, batches = epoch()
    for _, first in ipairs(batches) do
      local loss = model(batch_of(sorted, first, math.min(#sorted, first + args.batch - 1))).loss
      local value = loss:item()
      if value ~= value or math.abs(value) == math.huge then
        error(("the loss is %s at step %d: pass a lower --lr than %g"):format(value, step + 1, args.lr), 0)
      end
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      schedule:step()
      step = step + 1
      if step % 20 == 0 or step == steps then display:update(step, { loss = value }) end
    end
  end
end
try(train)
display:finish()

local after = accuracy()
if args.out then try(model.save_pretrained, model, args.out) end
if args.json then
  print(json.encode { accuracy_before = before, accuracy = after, steps = steps, train_s = ps.now() - began,
    held_out = #held_out, classes = classes })
else
  if not counted then print("classes: " .. table.concat(labels, ", ")) end
  print(("accuracy %.1f %% of %d held-out rows (%.1f %% before) after %d steps in %.1f s"):format(100 * after,
    #held_out, 100 * before, steps, ps.now() - began))
  if args.out then print(("wrote %s; docs/encoder.md shows how to classify a text with it"):format(args.out)) end
end
