-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a chat model on preferences by DPO (or IPO). An adapter learns to prefer the chosen answers.
--
--   psluajit dpo.lua --model FOLDER --data pairs.jsonl --out adapter
--
-- A line of the data is {"prompt": ..., "chosen": ..., "rejected": ...}. Each of the three is a text or a list of
-- messages. A line without "prompt" is allowed, too: "chosen" and "rejected" are then conversations with the same
-- beginning. The reference is the model without its adapter. With --cache FILE, the log-probabilities of the reference
-- are computed only once. tools/chat.lua FOLDER --adapter OUT starts a conversation with the result.
local ps = require "ps"
local line = require "ps.command_line"

local parser = require "argparse" ("psluajit dpo.lua", "Trains a chat model on preferences.")
parser:option("--model", "A folder, or a name in Hugging Face's cache."):count(1)
parser:option("--data", "Pairs of answers: JSON lines, or a folder or pattern of such files."):count(1)
parser:option("--out", "Folder to write the adapter to."):count(1)
parser:option("--loss", "sigmoid (DPO) or ipo.", "sigmoid"):choices { "sigmoid", "ipo" }
line.number(parser:option("--beta", "How strongly the loss keeps the model close to the reference.", "0.1"), 0)
line.whole(parser:option("--lora", "Rank of the adapter.", "16"), 1)
line.whole(parser:option("--epochs", "Passes over the data.", "1"), 1)
line.whole(parser:option("--batch", "Pairs per step.", "4"), 1)
line.whole(parser:option("--seq", "Most tokens of a prompt with its answer. Default: 1024, or fewer if the model has "
  .. "fewer positions."), 2)
line.number(parser:option("--lr", "Highest learning rate.", "5e-5"), 0)
parser:option("--dtype", "fp32 or bf16.", "fp32"):choices { "fp32", "bf16" }
line.file(parser:option("--cache", "File for the reference's log-probabilities (.pt or .safetensors)."), ".pt", ".pth",
  ".bin", ".ckpt", ".safetensors")
parser:option("--host", "Memory budget on the host (memory.host), such as 6GiB.")
parser:option("--disk", "Folder for the disk tier (memory.disk).")
line.whole(parser:option("--seed", "Random seed.", "1"), 0)
parser:flag("--force", "Replace a model or an adapter in --out.")
local args = line.parse(parser)
local function try(fn, ...) return line.try("dpo.lua", fn, ...) end
try(ps.checkpoints.new_run, args.out, { force = args.force })

ps.manual_seed(args.seed)
local folder = try(require("ps.pretrained.folder").find, args.model)
local tok, rows = try(ps.tokenizer.from_pretrained, folder), try(ps.data.table, args.data)
local config = try(require("ps.pretrained.folder").config, folder)
local most = config.max_position_embeddings or config.n_positions or math.huge
local seq = args.seq or math.min(1024, most)
if seq > most then
  try(error, ("--seq %d: the model has only %d positions; pass --seq %d or less"):format(seq, most, most), 0)
end
local pairs_of, truncated = {}, 0
for i = 1, #rows do
  local row = try(function() return rows[i] end)
  local pair = line.try("dpo.lua: " .. rows:place(i), ps.preference.encode, tok, row, { seq = seq })
  pairs_of[#pairs_of + 1] = pair
  truncated = truncated + (pair and pair.truncated and 1 or 0)
end
if #pairs_of < args.batch then
  try(error, ("--batch %d: %s has %d pairs whose prompt has fewer than %d tokens"):format(args.batch, args.data,
    #pairs_of, seq), 0)
end
local function say(n, text) if n > 0 then io.stderr:write("dpo.lua: ", text:format(n, #rows, seq), "\n") end end
say(#rows - #pairs_of, "%d of %d pairs are left out: their prompt has --seq %d tokens or more")
say(truncated, "%d of %d pairs have an answer that is truncated at --seq %d tokens")
say(#pairs_of % args.batch, "%d pairs, others in each epoch, are not used: --batch does not divide the number of pairs")

local model, optimizer = try(ps.initialize, { model_func = function()
  local made = ps.from_pretrained(folder)          -- in evaluation mode: TRL's DPOTrainer disables dropout, too
  return ps.preference.wrap(ps.lora.wrap(made, { r = args.lora, alpha = 2 * args.lora }),
    { beta = args.beta, loss_type = args.loss })
end, config = { bf16 = { enabled = args.dtype == "bf16" }, gradient_clipping = 1, plan_print = false,
  optimizer = { type = "AdamW", params = { lr = args.lr, weight_decay = 0 } },
  memory = (args.host or args.disk) and { host = args.host, disk = args.disk and { path = args.disk } } or nil } })
local pad = tok.pad_token_id or tok.eos_token_id or 0
local reference = args.cache and try(ps.preference.reference, model, pairs_of, { path = args.cache, pad = pad })
local per_epoch = math.floor(#pairs_of / args.batch)
local steps = args.epochs * per_epoch
local schedule = ps.sched.warmup_cosine { optimizer = optimizer, max_lr = args.lr, min_lr = args.lr / 10,
  warmup = math.ceil(steps / 20), total = steps }
local order
local function train()
  for step = 1, steps do
    if (step - 1) % per_epoch == 0 then order = ps.randperm(#pairs_of):tolist() end
    local chosen, values = {}, reference and {}
    for k = 1, args.batch do
      local at = order[(step - 1) % per_epoch * args.batch + k] + 1
      chosen[k] = pairs_of[at]
      if reference then values[k] = reference[at] end
    end
    local out = model(ps.preference.batch(chosen, { pad = pad, reference = values or nil }))
    print(("step %d of %d: loss %.4f, chosen %.3f, rejected %.3f, accuracy %.2f"):format(step, steps, out.loss:item(),
      out.chosen_rewards:mean():item(), out.rejected_rewards:mean():item(), out.accuracy:item()))
    model:backward(out.loss)
    optimizer:step()
    schedule:step()
  end
end
try(train)
try(model.save_pretrained, model, args.out)
try(tok.save_pretrained, tok, args.out)
print(("wrote %s; talk to it with psluajit chat.lua %s"):format(args.out, args.out))
model:close()
