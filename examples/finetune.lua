-- SPDX-License-Identifier: BSD-3-Clause
-- Fine-tunes a chat model on conversations, and writes a folder that transformers loads.
--
--   psluajit finetune.lua --model FOLDER --data chats.jsonl --out tuned
--   psluajit finetune.lua --model FOLDER --data chats.jsonl --out tuned --host 6GiB --disk /var/tmp
--   psluajit finetune.lua --model FOLDER --data chats.jsonl --out tuned --packing
--   psluajit finetune.lua --model FOLDER --data chats.jsonl --out tuned --resume
--   psluajit finetune.lua --model FOLDER --data chats.jsonl --out adapter --lora 16       -- only an adapter is trained
--   psluajit finetune.lua --model m.gguf --data chats.jsonl --out adapter --lora 16 --keep-quantized
--   psluajit launch.lua --nproc-per-node 2 finetune.lua --model FOLDER --data chats.jsonl --out tuned
--
-- A line of the data is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or
-- a conversation in another form (docs/data.md). The model's own chat template turns each conversation into tokens.
-- Only the assistant's tokens are targets. `psluajit tools/data.lua show FOLDER chats.jsonl` prints the targets.
--
-- After Ctrl-C the script saves, and --resume continues bit for bit, even on another day, because a checkpoint stores
-- the date that templates print.
local ps = require "ps"
local argparse = require "argparse"
local lfs = require "lfs"
local line = require "ps.command_line"
local endless, left_out = require "ps.data.endless", require "ps.data.left_out"
local resolved = require "ps.core.resolved"
local train, checkpoints, plot = require "ps.train", require "ps.checkpoints", require "ps.train.plot"

local parser = argparse("psluajit finetune.lua", "Fine-tunes a chat model on conversations.")
parser:option("--model", "A folder, a name in Hugging Face's cache, or a GGUF file, with a chat template."):count(1)
parser:option("--data", "Conversations: JSON lines, or a folder or pattern of such files."):count(1)
parser:option("--eval", "Held-out conversations. Default: a twentieth of --data.")
parser:option("--out", "Folder to write the model to; its folder `run` gets checkpoints, log and loss curve."):count(1)
line.whole(parser:option("--epochs", "Passes over the data.", "3"), 1)
line.whole(parser:option("--batch", "Conversations per batch, on each process.", "4"), 1)
line.whole(parser:option("--accumulate", "Batches per step.", "1"), 1)
line.whole(parser:option("--seq", "Most tokens of a conversation; longer ones lose their last tokens. Default: 1024, "
  .. "or fewer if the model has fewer positions."), 1)
parser:flag("--packing", "Fill rows of --seq tokens with several conversations that do not see each other.")
line.number(parser:option("--lr", "Highest learning rate. Default: 2e-5, with --lora 2e-4."), 0)
line.whole(parser:option("--lora", "Train an adapter of this rank over the frozen model, for PEFT (LoRA)."), 1)
line.number(parser:option("--alpha", "Of the adapter. Default: twice the rank."), 0)
line.number(parser:option("--lora-dropout", "Dropout of the adapter's input. Default: 0."), 0, 1)
parser:flag("--dora", "The adapter has trained magnitudes (DoRA).")
parser:flag("--merge", "With --lora: --out gets the model with the adapter in its weights, and its folder adapter.")
parser:flag("--keep-quantized", "With --lora: the weights of a GGUF file, or of a folder in NF4, stay packed (QLoRA).")
parser:option("--dtype", "fp32 or bf16.", "fp32"):choices { "fp32", "bf16" }
parser:option("--date", "YYYY-MM-DD, for templates that print the date. Default: today, or that of the checkpoint.")
parser:option("--device", "Device that computes: cpu or cuda.", "cpu")
parser:option("--host", "Memory budget on the host (memory.host), such as 6GiB.")
parser:option("--disk", "Folder for the disk tier (memory.disk). Default: no disk tier.")
line.whole(parser:option("--zero", "ZeRO stage with several processes: 0 to 3.", "3"), 0, 3)
line.whole(parser:option("--seed", "Random seed. Default: 1."), 0)
parser:flag("--resume", "Continue from the newest checkpoint in --out, with the adapter, --lr and --seed of its run.")
parser:flag("--force", "Start a new run even if --out has a run or a model, which it replaces.")
local args = line.parse(parser)
local run = args.out .. "/run"
local function try(fn, ...) return line.try("finetune.lua", fn, ...) end

-- Options that a checkpoint stores. With --resume, another value is an error, because the run would be a different run.
local FIXED = { "lora", "alpha", "dora", "lora_dropout", "lr", "seed" }

-- Sets the options in FIXED to the values of the run that --resume continues.
local function continued()
  local found, why = checkpoints.find(run)
  if not found then error(why .. "; to start a new run there, remove --resume", 0) end
  local had = (checkpoints.info(run).extra or {}).options
  for _, name in ipairs(had and FIXED or {}) do
    if args[name] ~= nil and args[name] ~= had[name] then
      error(("--%s%s: the run in %s has %s: remove this option to resume, or start a new run with another --out")
        :format(name:gsub("_", "-"), args[name] == true and "" or " " .. args[name], args.out,
        tostring(had[name] == nil and "none" or had[name])), 0)
    end
    args[name] = had[name]
  end
end
-- A checkpoint replaces the random numbers of a resumed run.
ps.init_distributed { seed = args.seed or 1, quiet = true }
ps.catch_interrupts()
if args.resume then try(continued) end
args.lr, args.seed = args.lr or args.lora and 2e-4 or 2e-5, args.seed or 1
args.lora_dropout = args.lora_dropout or 0
local fixed = {}
for _, name in ipairs(FIXED) do fixed[name] = args[name] end
if args.lora then fixed.alpha = args.alpha or 2 * args.lora end

local function leave_if_interrupted()
  if not ps.any_rank(ps.interrupts() > 0) then return end
  ps.print_rank "interrupted; --resume continues if there is a checkpoint"
  line.leave(130)
end

-- Opens a table with at least one conversation. All rows must have the same form as the first row.
local function conversations(path, option)
  local rows = ps.data.table(path)
  if #rows == 0 then error(("%s: %s has no rows"):format(option, path), 0) end
  local form = ps.data.format(rows)
  ps.data.conversation(rows, 1, form)
  return rows
end

local function loader_of(examples, tok, seq, date, training)
  return ps.data.loader { table = examples, tokenizer = tok, batch = args.batch, seq = seq, seed = args.seed,
    date = date, shuffle = training, packing = args.packing and training, pad_to_multiple_of = 16,
    accumulate = args.accumulate }
end

-- Checks the options and the rows, and checks that the rows contain targets. The model is loaded only after these
-- checks.
local function prepared()
  if not args.lora and (args.dora or args.merge or args.alpha or args.lora_dropout > 0 or args.keep_quantized) then
    error("--dora, --merge, --alpha, --keep-quantized and --lora-dropout need --lora and a rank, such as --lora 16", 0)
  end
  local folder = require("ps.pretrained.folder").find(args.model)
  local there = lfs.attributes(args.out)
  if there and there.mode ~= "directory" then
    error(("--out: %s is a %s, not a folder"):format(args.out, there.mode), 0)
  end
  if resolved(args.out) == resolved(folder) then
    error(("--out: %s is the folder of --model, %s, whose files would be replaced; name another one"):format(args.out,
      folder), 0)
  end
  local earlier
  if not args.resume then
    earlier = checkpoints.new_run(run, { resume = true, force = args.force })
    checkpoints.new_run(args.out, { force = args.force })
  end
  local config = require("ps.pretrained.folder").config(folder)
  local most = config.max_position_embeddings or config.n_positions
  if args.seq and most and args.seq > most then
    error(("--seq: %d tokens, but the model has only %d positions: pass --seq %d or less"):format(args.seq,
      most, most), 0)
  end
  local rows, held_out = conversations(args.data, "--data"), args.eval and conversations(args.eval, "--eval")
  if not held_out then
    if #rows == 1 then error("--data: it has one row, and one is held out: add rows, or name a file with --eval", 0) end
    held_out, rows = rows:shuffle(args.seed):split(math.max(0.05, math.min(0.5, 1 / #rows)))
  end
  local per_batch = args.batch * ps.world_size()
  if #rows < per_batch then
    error(("--batch: %d rows to train on%s are fewer than a batch of %d (%d on each of %d processes): pass "
      .. "--batch %d or less")
      :format(#rows, args.eval and "" or (" (%d of --data %s held out)"):format(#held_out,
        #held_out == 1 and "is" or "are"), per_batch, args.batch, ps.world_size(),
        math.max(1, math.floor(#rows / ps.world_size()))), 0)
  end
  local rest = #held_out % per_batch
  if #held_out < ps.world_size() then
    error(("%s: the held-out rows (%d) are fewer than the processes (%d): pass --eval and a file with more rows")
      :format(args.eval and "--eval" or "--data", #held_out, ps.world_size()), 0)
  end
  if rest > 0 and rest < ps.world_size() and #held_out > rest then held_out = held_out:take(#held_out - rest) end
  local date = args.date or args.resume and (checkpoints.info(run).extra or {}).date or os.date "%Y-%m-%d"
  most = most or 1024
  local tok, seq = ps.tokenizer.from_pretrained(folder), args.seq or math.min(1024, most)
  if not tok:has_chat_template() then tok:chat_template() end          -- raises the error for a missing template, which
                                                                       -- names the folder
  local note = endless(tok, rows, ps.data.format(rows), { date = date })
  if note then ps.print_rank("note: " .. note) end
  note = left_out.note(tok, rows, ps.data.format(rows), { date = date })
  if note then ps.print_rank("note: " .. note) end
  local loader, evaluation = loader_of(rows, tok, seq, date, true), loader_of(held_out, tok, seq, date, false)
  checkpoints.make_folder(args.out)
  checkpoints.make_folder(run)
  return folder, tok, held_out, most, date, loader, evaluation, earlier
end
local folder, tok, held_out, most, date, loader, evaluation, earlier = try(prepared)

local model, optimizer = try(ps.initialize, { quiet = ps.rank() > 0,
  model_func = function()
    local made = ps.from_pretrained(folder, { dtype = args.lora and args.dtype or nil,
      keep_quantized = args.keep_quantized,
      mmap = args.lora and args.disk and "auto" or false }):train()     -- frozen weights remain in their files
    return args.lora and ps.lora.wrap(made, { r = args.lora, alpha = args.alpha or 2 * args.lora, use_dora = args.dora,
      dropout = args.lora_dropout }) or made
  end,
  config = { device = args.device, bf16 = { enabled = args.dtype == "bf16" }, gradient_clipping = 1,
    train_micro_batch_size_per_gpu = args.batch, gradient_accumulation_steps = args.accumulate,
    optimizer = { type = "AdamW", params = { lr = args.lr, weight_decay = 0 } },
    zero_optimization = ps.world_size() > 1 and { stage = args.zero } or nil,
    memory = (args.host or args.disk) and { host = args.host, disk = args.disk and { path = args.disk } } or nil } })

-- Computes the number of steps until the last epoch ends. A resumed run can have another number of steps per epoch, for
-- example because --batch or the number of processes has changed. `first` is then the step of the checkpoint, and
-- `done` is the number of epochs before the step `first`.
local per_epoch, first, done = loader.batches / args.accumulate, 0, 0
local saved = args.resume and checkpoints.info(run) or {}
local before = saved.extra or {}
if before.per_epoch then
  first, done = before.first, before.done
  if math.abs(before.per_epoch - per_epoch) > 1e-9 then
    first, done = saved.step, done + (saved.step - first) / before.per_epoch
  end
end
local left = (args.epochs - done) * per_epoch
if first == 0 and left < 1 then
  try(error, ("--accumulate %d: all of --epochs %g has only %d batches: pass --accumulate %d "
    .. "or less, or more epochs"):format(args.accumulate, args.epochs, args.epochs * loader.batches,
    math.max(1, args.epochs * loader.batches)), 0)
end
local steps = math.max(1, first + (first > 0 and math.ceil(left - 1e-6) or math.floor(left)))
local schedule = ps.sched.warmup_cosine { optimizer = optimizer, max_lr = args.lr, min_lr = args.lr / 10,
  warmup = math.ceil(steps / 20), total = steps }
local start, parts = 0, { model = model, optimizer = optimizer, sched = schedule, loader = loader }
if args.resume then start = try(checkpoints.load, run, parts).step end
if start >= steps then
  ps.print_rank(("nothing to do but to write the model: the checkpoint is at step %d of %d"):format(start, steps))
end

local messages, tools = try(ps.data.prompt, held_out, 1)   -- the prompt is read only once, because the file may change
                                                           -- during training

-- Prints the model's own last reply in the first held-out conversation, by greedy decoding. Before training, also
-- prints the conversation before the reply.
local function reply(when)
  local ids = tok:apply_chat_template(messages, { add_generation_prompt = true, date = date, tools = tools })
  local room = math.min(48, most - #ids)
  if room < 1 then return ps.print_rank(when .. ": no sample, since the first held-out prompt is too long") end
  if when == "before" then ps.print_rank((tok:decode(ids):gsub("\n$", ""))) end
  local out = model:generate({ ids }, room, { temperature = 0, tokenizer = tok })[1]
  ps.print_rank(("%s:\n  %s"):format(when, tok:decode({ unpack(out, #ids + 1) }, { skip_special_tokens = true })))
  leave_if_interrupted()
end
ps.print_rank(("%s\n%d held-out row%s; of the first:"):format(tostring(loader), #held_out,
  #held_out == 1 and "" or "s"))
try(reply, "before")
if earlier and ps.rank() == 0 then os.remove(run .. "/latest") end     -- --resume continues the new run
local result = try(train.run, { model = model, optimizer = optimizer, sched = schedule, loader = loader, steps = steps,
  start = start, log = run .. "/log.csv", eval = { every = math.max(1, math.ceil(steps / 8)),
    data = function() return evaluation:epoch() end },
  checkpoint = { folder = run, every = math.max(1, math.ceil(steps / 4)), keep = 2,
    extra = { date = date, per_epoch = per_epoch, first = first, done = done, options = fixed } } })
if result.interrupted then
  ps.print_rank "interrupted; --resume continues"
  line.leave(130)
end
ps.catch_interrupts()                                      -- train.run has switched off the handling of interrupts
try(reply, "after")
try(model.save_pretrained, model, args.merge and args.out .. "/adapter" or args.out)
if ps.rank() == 0 then
  if args.merge then try(ps.lora.merge_folder, folder, args.out .. "/adapter", args.out) end
  try(tok.save_pretrained, tok, args.out)
  local losses, measured = {}, {}
  for _, at in ipairs(result.history) do
    losses[#losses + 1] = at.loss and { at.step, at.loss }
    measured[#measured + 1] = at.val_loss and { at.step, at.val_loss }
  end
  local curves = { { label = "training", points = losses }, { label = "held out", points = measured } }
  print(plot.text(curves))
  try(plot.png, run .. "/loss.png", curves, { title = args.out })
  local function figure(loss) return loss and ("%.4f"):format(loss) or "not measured" end
  print(("%s: loss %s, held-out loss %s after %d steps; talk to it with psluajit chat.lua %s"):format(args.out,
    figure(result.loss), figure(result.val_loss), math.max(start, steps), args.out))
end
model:close()
