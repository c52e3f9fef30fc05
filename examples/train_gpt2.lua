-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a GPT-2 on text: a file, or the collection in Debian's package `fortunes`. Shows its progress, measures the
-- loss on held-out text, draws the loss curve, and saves checkpoints. At the end, it generates a sample, and writes the
-- model in the format of Hugging Face to the folder out/model. tools/generate.lua and transformers can read this
-- folder.
--
--   psluajit train_gpt2.lua                          a small byte-level model
--   psluajit train_gpt2.lua --data my.txt --steps 2000 --out my_run
--   psluajit train_gpt2.lua --data my.txt --minutes 10          as many steps as fit in ten minutes here
--   psluajit train_gpt2.lua --out my_run --resume               continues with the options of that run
--   psluajit train_gpt2.lua --data tokens.bin --vocab 50257 --model gpt2 --seq 1024 --batch 4 --device cuda
--
-- After Ctrl-C, SIGTERM or SIGHUP the script saves and exits with code 130. --resume continues bit for bit.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.command_line"
local lfs = require "lfs"
local gpt2 = require "models.gpt2"
local optim, sched = require "ps.optim", require "ps.sched"
local train, progress, plot = require "ps.train", require "ps.progress", require "ps.train.plot"
local checkpoints, tokenizer = require "ps.checkpoints", require "ps.tokenizer"
local types = require "ps.core.types"

local settings = {
  fortunes = "/usr/share/games/fortunes",
  held_out = 0.1,              -- fraction of each text file that is held out
  max_lr = 2e-3, min_lr = 1e-4, warmup = 60,
  betas = { 0.9, 0.95 }, weight_decay = 0.1, max_norm = 1.0, dropout = 0.0,
  evals = 8,                   -- number of evaluations per run; fewer if evaluations take too long (eval_every)
  eval_rows = 192,             -- number of held-out rows per evaluation
  saves = 4,                   -- number of checkpoints per run
  sample = { tokens = 400, temperature = 0.8, top_k = 40, prompt = "\n" },
}

local defaults = {
  out = "out", model = "small", steps = 480, batch = 16, accumulate = 1, device = "cpu", dtype = "auto",
  lr = settings.max_lr, dropout = settings.dropout, vocab = 50257, seed = 1,
}

-- Options that a checkpoint stores. If --resume is given with another value of an option in FIXED, the script raises an
-- error, because the run would be a different run. Other values of options in FREE are accepted, and the script prints
-- a note.
local FIXED = { "model", "batch", "seq", "accumulate", "dtype", "lr", "dropout", "vocab", "seed" }
local FREE = { "data", "device", "steps", "recompute", "eval_every", "eval_batches" }

-- Parses the command line without defaults, because --resume must know which options were given.
local function arguments()
  local whole, number = command_line.whole, command_line.number
  local parser = argparse("psluajit train_gpt2.lua", "Trains a GPT-2 on text.")
  local function option(name, text)
    local default = defaults[name:match("%w+$")]
    return parser:option(name, text .. (default and (" Default: %s."):format(default) or ""))
  end
  option("--data", "A text file, or a token shard (.bin). Default: the texts of the Debian package fortunes.")
  option("--out", "Folder for shards, checkpoints, log and loss curve.")
  option("--model", "Preset: small, char, tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl.")
  parser:mutex(
    whole(option("--steps", "Optimizer steps."), 1),
    number(option("--minutes", "Instead of --steps: measure a few steps, then run as many as fit."), 0))
  whole(option("--batch", "Rows per batch."), 1, 2 ^ 31 - 1)
  whole(option("--seq", "Tokens per row. Default: 128, or the model's positions if fewer."), 1, 2 ^ 31 - 1)
  whole(option("--accumulate", "Batches per step."), 1, types.MICRO_BATCHES)
  option("--device", "Device that computes: cpu or cuda.")
  option("--dtype", "fp32, bf16, fp16, or auto: bf16 on a GPU or a processor that supports it, else fp32.")
    :choices { "auto", "fp32", "bf16", "fp16" }
  number(option("--lr", "Highest learning rate."), 0)
  number(option("--dropout", "Dropout probability."), 0, 1)
  whole(option("--vocab", "Vocabulary size of a token shard."), 1, 2 ^ 31 - 1)
  whole(option("--seed", "Random seed."), 0)
  whole(option("--eval-every", "Steps between measurements of the held-out loss; the last step always has one. "
    .. "Default: an eighth of the run, or more if that would take over a tenth of the time."), 1)
  whole(option("--eval-batches", ("Batches per measurement. Default: %d rows in total."):format(settings.eval_rows)), 1)
  parser:flag("--recompute", "Recompute blocks in backward: less memory, more time.")
  parser:flag("--resume", "Continue from the newest checkpoint in --out, with the options of its run.")
  parser:flag("--force", "Start a new run even if --out has one, which it replaces.")
  local args = command_line.parse(parser)
  if args.minutes == 0 then parser:error "--minutes 0: a run takes some time, such as --minutes 2" end
  return args
end

local function flag(name) return "--" .. name:gsub("_", "-") end

-- Returns the options of the run in the folder args.out, with the permitted changes, and the step that this run has
-- reached.
local function resumed(args)
  local found, why = checkpoints.find(args.out)
  if not found then error(why .. "; to start a new run there, remove --resume", 0) end
  local from = checkpoints.info(args.out)
  local run = from.extra and from.extra.options
  if not run then
    print(from.file .. " has no options (an earlier version wrote it): using those of the command line")
    return args, from.step
  end
  for _, name in ipairs(FIXED) do
    local given, had = args[name], run[name]
    if given ~= nil and given ~= had and not (name == "dtype" and given == "auto") then
      error(("%s %s: the run in %s has %s: remove this option to resume, or start a new run with another --out")
        :format(flag(name), given, args.out, tostring(had)), 0)
    end
    args[name] = had
  end
  for _, name in ipairs(FREE) do
    local given, had = args[name], run[name]
    if given ~= nil and had ~= nil and given ~= had then
        print(("%s is %s from here on; it was %s%s"):format(flag(name), tostring(given), tostring(had),
          name == "steps" and "; the learning rate follows the new number" or ""))
    end
    if given == nil then args[name] = had end
  end
  return args, from.step
end

local function read(path)
  local file, why = io.open(path, "rb")
  if not file then error("no text to train on: " .. why, 0) end
  local text, problem = file:read("*a")
  file:close()
  if not text then error(("no text to train on: %s: %s"):format(path, problem), 0) end
  return text
end

-- Returns the plain files of the fortunes package in alphabetical order.
local function fortune_files()
  if lfs.attributes(settings.fortunes, "mode") ~= "directory" then
    error("no text to train on: give --data FILE, or install the package `fortunes` (apt-get install fortunes)", 0)
  end
  local files = {}
  for name in lfs.dir(settings.fortunes) do
    local path = settings.fortunes .. "/" .. name
    if not name:match("%.dat$") and not name:match("%.u8$") and lfs.attributes(path, "mode") == "file" then
      files[#files + 1] = path
    end
  end
  table.sort(files)
  return files
end

-- Splits each text into a training text and a held-out text, at the end of a line if there is one nearby.
local function split_texts(paths)
  local learned, held_out = {}, {}
  for _, path in ipairs(paths) do
    local text = read(path)
    local cut = math.floor(#text * (1 - settings.held_out))
    local line_end = text:find("\n", cut, true)
    if line_end and line_end - cut <= (#text - cut) / 2 then cut = line_end end
    learned[#learned + 1], held_out[#held_out + 1] = text:sub(1, cut), text:sub(cut + 1)
  end
  return table.concat(learned), table.concat(held_out)
end

-- Returns whether an existing shard contains exactly this text, with one byte per token.
local function holds(path, text)
  local tokens, piece = ps.data.tokens(path), 2 ^ 20
  if tokens:count() ~= #text then return false end
  for at = 0, #text - 1, piece do
    local n = math.min(piece, #text - at)
    local ids = tokens:read(at, n)
    for i = 0, n - 1 do
      if ids[i] ~= text:byte(at + i + 1) then return false end
    end
  end
  return true
end

-- Shards that were written but do not have their final names yet. The keys are the final names. The shards of an
-- earlier run in the folder are replaced only when nothing can prevent the new run any more.
local written = {}

local function new_name(path) return (path:gsub("%.bin$", ".new.bin")) end

-- Renames the new shards to their final names.
local function commit_shards()
  for path in pairs(written) do
    local ok, why = os.rename(new_name(path), path)
    if not ok then error(why, 0) end
    written[path] = nil
  end
end

local function remove_new_shards() for path in pairs(written) do os.remove(new_name(path)) end end

-- Writes the shard for a text. A resumed run must keep its data, so it uses the existing shard, which must contain the
-- same text.
local function write_shard(args, name, text, bytes)
  local path = args.out .. "/" .. name
  if args.resume and lfs.attributes(path) then
    if holds(path, text) then return path end
    error(("%s has other tokens than %s produces now, but --resume needs the data with which the run started: pass "
      .. "that data, or start a new run with another --out (no file was changed)"):format(path,
      args.data or settings.fortunes), 0)
  end
  written[path] = true
  ps.data.encode_text(text, new_name(path), bytes)
  return path
end

-- Returns the shards of loader options, under their current names.
local function shards_now(given)
  local list = {}
  for i, shard in ipairs(given.shards) do list[i] = written[shard] and new_name(shard) or shard end
  return list
end

-- Returns the options of the loaders for training and for evaluation, and the tokenizer. The tokenizer is nil for a
-- token shard.
local function prepare(args)
  if args.data and args.data:match("%.bin$") then
    local tokens = ps.data.tokens(args.data)
    return { shards = { tokens }, split = { 0, 1 - settings.held_out }, vocab = args.vocab },
      { shards = { tokens }, split = { 1 - settings.held_out, 1 } }, nil
  end
  local bytes = tokenizer.bytes()
  local learned, held_out = split_texts(args.data and { args.data } or fortune_files())
  if #held_out <= args.seq then
    error(("%s: the text is too short: its held-out tenth has %d bytes, but a row of --seq %d and its targets are %d "
      .. "bytes: use a longer text, or a smaller --seq"):format(args.data or settings.fortunes, #held_out, args.seq,
      args.seq + 1), 0)
  end
  local train_bin = write_shard(args, "train.bin", learned, bytes)
  local held_out_bin = write_shard(args, "held_out.bin", held_out, bytes)
  print(("%s bytes of training text, %s held out"):format(progress.count(#learned), progress.count(#held_out)))
  return { shards = { train_bin }, vocab = bytes.vocab_size }, { shards = { held_out_bin } }, bytes
end

local function merge(a, b)
  local all = {}
  for key, value in pairs(a) do all[key] = value end
  for key, value in pairs(b) do all[key] = value end
  return all
end

-- Sets the defaults of options that were not given.
local function complete(args)
  for name, value in pairs(defaults) do
    if args[name] == nil then args[name] = value end
  end
  if args.dtype == "auto" then args.dtype = ps.fast_dtype(args.device) end
  if not gpt2.presets[args.model] then gpt2.new(args.model) end       -- raises the error for an unknown model before
                                                                      -- any file is written
  args.seq = args.seq or math.min(128, gpt2.presets[args.model].n_positions or 1024)
  args.eval_batches = args.eval_batches or math.ceil(settings.eval_rows / args.batch)
end

local function loader_of(args, learn)
  return ps.data.loader(merge(learn, { shards = shards_now(learn), batch = args.batch, seq = args.seq, seed = args.seed,
    device = args.device }))
end

-- Returns an iterator over the held-out rows.
local function windows_of(windows) return ps.data.windows(merge(windows, { shards = shards_now(windows) })) end

-- Creates the objects that checkpoints save and restore.
local function assemble(args, learn)
  ps.manual_seed(args.seed)
  local dtype = args.dtype
  local model = gpt2.new(args.model, { dtype = dtype, device = args.device, vocab_size = learn.vocab,
    dropout = args.dropout, recompute = args.recompute,
    n_positions = args.seq })                        -- more positions than args.seq would remain untrained and make
                                                     -- samples worse
  local opt = optim.AdamW(optim.groups(model, settings.weight_decay), { lr = args.lr, betas = settings.betas })
  local schedule = sched.warmup_cosine { optimizer = opt, max_lr = args.lr,
    warmup = math.min(settings.warmup, args.steps), min_lr = math.min(args.lr, settings.min_lr), total = args.steps }
  return { model = model, optimizer = opt, sched = schedule, loader = loader_of(args, learn),
    scaler = dtype == "fp16" and optim.GradScaler() or nil }
end

-- Returns two curves of a logged value: one for the training text and one for the held-out text.
local function curves(history, name, held_out_name)
  local learned, held_out = { label = "training", points = {} }, { label = "held out", points = {} }
  for _, at in ipairs(history) do
    if at[name] then learned.points[#learned.points + 1] = { at.step, at[name] } end
    if at[held_out_name] then held_out.points[#held_out.points + 1] = { at.step, at[held_out_name] } end
  end
  return { learned, held_out }
end

local function report(args, result, text, folder)
  local lines, hits = curves(result.history, "loss", "val_loss"), curves(result.history, "accuracy", "val_accuracy")
  io.stdout:write("\n", plot.text(lines), "\n")
  local title = args.model .. " on " .. (args.data or "fortunes")
  local drawn, why = plot.png(args.out .. "/loss.png", lines, { title = title })
  print(drawn and "loss curve: " .. args.out .. "/loss.png" or "no loss.png: " .. why)
  if drawn and #hits[1].points > 0
    and plot.png(args.out .. "/accuracy.png", hits, { title = title, y = "next-token accuracy" }) then
    print("accuracy:   " .. args.out .. "/accuracy.png")
  end
  print("log:        " .. args.out .. "/log.csv")
  print("checkpoint: " .. (result.saved or "none"))
  print(("model:      %s%s"):format(folder, text and (" (psluajit tools/generate.lua %s --start TEXT continues a text)")
    :format(folder) or ""))
  if text then print(("sample:\n%s\n%s\n%s"):format(("-"):rep(72), text, ("-"):rep(72))) end
  print(("done: %d steps, training loss %.4f, held-out loss %s, %s tokens/s, %s of training"):format(result.step,
    result.loss, result.val_loss and ("%.4f (next-token accuracy %.4f)"):format(result.val_loss, result.val_accuracy)
    or "not measured",
    progress.count(result.tokens_per_s), progress.clock(result.seconds)))
end

-- Returns the number of training steps that take ten times as long as one evaluation of the held-out loss. The estimate
-- assumes that a forward takes a third of the time of forward and backward.
local function tenth(args) return 10 * args.eval_batches / (3 * args.accumulate) end

-- Returns the number of steps between evaluations of the held-out loss.
local function eval_every(args) return math.ceil(math.max(1, args.steps / settings.evals, tenth(args))) end

local FEW = 100                                            -- a run with fewer steps is too short to be useful

-- Returns the number of steps that fit into args.minutes on this machine. To measure the time, it runs a few steps and
-- an evaluation, whose results are discarded.
local function measured_steps(args, learn, windows)
  local run, began, warm = assemble(args, learn), ps.now(), 3
  local function go(from, to)
    local result = train.run(merge(run, { start = from, steps = to, accumulate = args.accumulate,
      max_norm = settings.max_norm, quiet = true }))
    if result.interrupted then
      remove_new_shards()
      os.exit(130, true)
    end
    return result.seconds
  end
  local first, evaluating = go(0, warm) / warm, ps.now()              -- the first steps compile kernels and map pages
  train.evaluate(run.model, windows_of(windows))
  evaluating = ps.now() - evaluating
  local count = math.ceil(math.min(20, math.max(2, 2 / first)))
  local step_s = go(warm, warm + count) / count
  local left = 60 * args.minutes - (ps.now() - began)
  -- The run evaluates the held-out loss `evals` times and at its end. If fewer evaluations result from one evaluation
  -- per tenth(args) steps, the run uses this interval instead.
  local steps = math.max(1, math.floor(math.max((left - settings.evals * evaluating) / step_s,
    (left - evaluating) / (step_s + evaluating / tenth(args)))))
  if steps >= 100 then steps = steps - steps % 10 end
  print(("measured %d steps: %.3f s each on this machine, %.1f s for the held-out loss; %s minute%s for %d "
    .. "steps (to change that, use --steps)"):format(count, step_s, evaluating, args.minutes,
    args.minutes == 1 and " has room" or "s have room", steps))
  if steps < FEW then
    print(("%d steps teach a new model little: give more --minutes, or a smaller --model, --batch or --seq"):format(
      steps))
  end
  return steps
end

local function main()
  local args, start = arguments(), 0
  if args.resume then
    if args.minutes then
      error("--minutes is for a new run; remove it to resume, or give --steps", 0)
    end
    args, start = resumed(args)
  end
  complete(args)
  if start >= args.steps then
    print(("nothing to do: the checkpoint is at step %d, --steps is %d"):format(start, args.steps))
    return
  end
  local earlier = not args.resume and checkpoints.new_run(args.out, { resume = true, force = args.force })
  if earlier then
    print(("%s has an earlier run (at %s), which the new one replaces"):format(args.out, earlier))
  end
  checkpoints.make_folder(args.out)
  local learn, held_out, tok = prepare(args)
  local windows = merge(held_out, { batch = args.batch, seq = args.seq, limit = args.eval_batches * args.batch,
    device = args.device })
  windows_of(windows)       -- if there is too little held-out text, raises the error now instead of after an hour
  if args.minutes then args.steps = measured_steps(args, learn, windows) end
  local run = assemble(args, learn)
  print(("%s: %s parameters, %s, %d rows of %d tokens per batch, on %s"):format(args.model,
    progress.count(run.model:num_parameters()), args.dtype, args.batch, args.seq, ps.device(args.device).description))
  if args.resume then print(("resumed from %s"):format(checkpoints.load(args.out, run).file)) end
  local every = args.eval_every or eval_every(args)
  print(("%d steps; held-out loss every %d steps, on %d batches"):format(args.steps, every, args.eval_batches))
  local options = {}
  for _, names in ipairs { FIXED, FREE } do
    for _, name in ipairs(names) do options[name] = args[name] end
  end
  commit_shards()
  run.loader = args.resume and run.loader or loader_of(args, learn)   -- the loader opens the shards again, under their
                                                                      -- final names
  if earlier then os.remove(args.out .. "/latest") end     -- --resume continues the new run
  local result = train.run(merge(run, {
    steps = args.steps, start = start, accumulate = args.accumulate, max_norm = settings.max_norm,
    log = args.out .. "/log.csv",
    eval = { every = every, data = function() return windows_of(windows) end },
    checkpoint = { folder = args.out, every = math.max(1, math.ceil(args.steps / settings.saves)),
      extra = { options = options } },
  }))
  if result.interrupted then
    print(("interrupted at step %d; saved %s; --resume continues"):format(result.step, result.saved or "nothing"))
    os.exit(130, true)
  end
  local text, folder = nil, args.out .. "/model"
  run.model:save_pretrained(folder)
  if tok then
    tok:save_pretrained(folder)
    local s = settings.sample
    local ids = run.model:generate(tok:encode(s.prompt), s.tokens, { temperature = s.temperature, top_k = s.top_k,
      seed = args.seed })
    text = tok:decode(ids):gsub("[^\n\t\32-\126]", "?")
  end
  report(args, result, text, folder)
end

command_line.try("train_gpt2.lua", function()
  local ok, problem = pcall(main)
  remove_new_shards()
  if not ok then error(problem, 0) end
end)
