-- SPDX-License-Identifier: BSD-3-Clause
-- Fine-tunes a chat model on conversations and writes a folder that transformers loads.
--
--   psluajit finetune.lua --model FOLDER --data chats.jsonl --out tuned
--   psluajit finetune.lua --model FOLDER --data chats.jsonl --out tuned --host 6GiB --disk /var/tmp
--   psluajit finetune.lua --model FOLDER --data chats.jsonl --out tuned --resume
--   psluajit launch.lua --nproc-per-node 2 finetune.lua --model FOLDER --data chats.jsonl --out tuned
--
-- A line of the data is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or
-- another form of conversations (docs/data.md). The model's own chat template turns it into tokens; those of the
-- assistant are trained. `psluajit tools/data.lua show FOLDER chats.jsonl` prints them. After Ctrl-C the script saves,
-- and --resume continues bit for bit.
local ps = require "ps"
local argparse = require "argparse"
local line = require "ps.command_line"
local train, checkpoints, plot = require "ps.train", require "ps.checkpoints", require "ps.train.plot"

local parser = argparse("finetune.lua", "Fine-tunes a chat model on conversations.")
parser:option("--model", "A folder, or a name in Hugging Face's cache, with a chat template."):count(1)
parser:option("--data", "Conversations: JSON lines, or a folder or pattern of such files."):count(1)
parser:option("--eval", "Held-out conversations. Default: a twentieth of --data.")
parser:option("--out", "Folder to write the model to; its folder `run` gets checkpoints, log and loss curve."):count(1)
line.whole(parser:option("--epochs", "Passes over the data.", "3"), 1)
line.whole(parser:option("--batch", "Conversations per batch, on each process.", "4"), 1)
line.whole(parser:option("--accumulate", "Batches per step.", "1"), 1)
line.whole(parser:option("--seq", "Most tokens of a conversation; longer ones lose their last tokens.", "1024"), 1)
line.number(parser:option("--lr", "Highest learning rate.", "2e-5"), 0)
parser:option("--dtype", "fp32 or bf16.", "fp32"):choices { "fp32", "bf16" }
parser:option("--date", "YYYY-MM-DD, for templates that print the date. Default: today.")
parser:option("--device", "Device that computes: cpu or cuda.", "cpu")
parser:option("--host", "Memory budget on the host, such as 6GiB.")
parser:option("--disk", "Folder for the disk tier. Default: no disk tier.")
line.whole(parser:option("--zero", "ZeRO stage with several processes: 0 to 3.", "3"), 0, 3)
line.whole(parser:option("--seed", "Random seed.", "1"), 0)
parser:flag("--resume", "Continue from the newest checkpoint in --out.")
local args = parser:parse()
local function try(fn, ...) return line.try("finetune.lua", fn, ...) end

ps.init_distributed { seed = args.seed, quiet = true }
local folder = try(require("ps.pretrained.folder").find, args.model)
local tok = try(ps.tokenizer.from_pretrained, folder)
local rows = try(ps.data.table, args.data)
try(ps.data.conversation, rows, 1)                         -- fails before the model is loaded
local held_out
if args.eval then held_out = try(ps.data.table, args.eval)
else held_out, rows = rows:shuffle(args.seed):split(math.max(0.05, math.min(0.5, 1 / #rows))) end

local model, optimizer = try(ps.initialize, { quiet = ps.rank() > 0,
  model_func = function() return ps.from_pretrained(folder):train() end,
  config = { device = args.device, bf16 = { enabled = args.dtype == "bf16" }, gradient_clipping = 1,
    train_micro_batch_size_per_gpu = args.batch, gradient_accumulation_steps = args.accumulate,
    optimizer = { type = "AdamW", params = { lr = args.lr, weight_decay = 0 } },
    zero_optimization = ps.world_size() > 1 and { stage = args.zero } or nil,
    memory = (args.host or args.disk) and { host = args.host, disk = args.disk and { path = args.disk } } or nil } })

local function loader_of(examples, more)
  return try(ps.data.loader, { table = examples, tokenizer = tok, batch = args.batch, seq = args.seq, seed = args.seed,
    date = args.date, shuffle = more == nil, drop_last = more == nil })
end
local loader, evaluation = loader_of(rows), loader_of(held_out, true)
local steps = math.max(1, math.floor(args.epochs * loader.batches / args.accumulate))
local schedule = ps.sched.warmup_cosine { optimizer = optimizer, max_lr = args.lr, min_lr = args.lr / 10,
  warmup = math.ceil(steps / 20), total = steps }
local run, start = args.out .. "/run", 0
local parts = { model = model, optimizer = optimizer, sched = schedule, loader = loader }
if args.resume then start = try(checkpoints.load, run, parts).step end
if start >= steps then
  ps.print_rank(("nothing to do: the checkpoint is at step %d of %d"):format(start, steps))
  os.exit(0, true)
end

-- Prints the model's own last reply in the first held-out conversation, by greedy decoding.
local function reply()
  local messages, tools = ps.data.prompt(held_out, 1)
  local ids = tok:apply_chat_template(messages, { add_generation_prompt = true, date = args.date, tools = tools })
  local out = model:generate({ ids }, 48, { temperature = 0, tokenizer = tok })[1]
  ps.print_rank("  " .. tok:decode({ unpack(out, #ids + 1) }, { skip_special_tokens = true }))
end
ps.print_rank(tostring(loader))
ps.print_rank "before:"
reply()
checkpoints.make_folder(args.out)
checkpoints.make_folder(run)
local result = try(train.run, { model = model, optimizer = optimizer, sched = schedule, loader = loader, steps = steps,
  start = start, log = run .. "/log.csv", eval = { every = math.max(1, math.ceil(steps / 8)),
    data = function() return evaluation:epoch() end },
  checkpoint = { folder = run, every = math.max(1, math.ceil(steps / 4)), keep = 2 } })
if result.interrupted then
  ps.print_rank "interrupted; --resume continues"
  os.exit(130, true)
end
ps.print_rank "after:"
reply()
model:save_pretrained(args.out)
if ps.rank() == 0 then
  tok:save_pretrained(args.out)
  local losses, measured = {}, {}
  for _, at in ipairs(result.history) do
    losses[#losses + 1] = at.loss and { at.step, at.loss }
    measured[#measured + 1] = at.val_loss and { at.step, at.val_loss }
  end
  local curves = { { label = "training", points = losses }, { label = "held out", points = measured } }
  print(plot.text(curves))
  plot.png(run .. "/loss.png", curves, { title = args.out })
  print(("%s: loss %.4f, held-out loss %s after %d steps; talk to it with tools/chat.lua %s"):format(args.out,
    result.loss or 0 / 0, result.val_loss and ("%.4f"):format(result.val_loss) or "not measured", steps, args.out))
end
model:close()
