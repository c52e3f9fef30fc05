-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a GPT-2 whose parameters, gradients and optimizer states are in chunks, within given memory budgets. The
-- configuration is a DeepSpeed JSON file (ds_config.json next to this script). Options on the command line set the
-- budgets.
--
--   psluajit train_chunked.lua --data my.txt
--   psluajit train_chunked.lua --data my.txt --model gpt2-xl --vocab 50257 --host 6GiB --disk /var/tmp
--   psluajit train_chunked.lua --data my.txt --resume --host 3GiB          other budgets give the same numbers
--   psluajit launch.lua --nproc-per-node 2 train_chunked.lua --data my.txt          several processes
--
-- The script prints the memory plan before the first step. After Ctrl-C, SIGTERM or SIGHUP it finishes the step, saves
-- and exits with code 0. --resume continues bit for bit. If a launcher restarts the ranks (--max-restarts), they resume
-- automatically.
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.command_line"
local whole = command_line.whole
local gpt2 = require "models.gpt2"
local source = require "ps.config.source"
local train, checkpoints = require "ps.train", require "ps.checkpoints"

local here = arg[0]:match("^(.*/)") or "./"
local parser = argparse("psluajit train_chunked.lua", "Trains a GPT-2 in chunks on text, within memory budgets.")
parser:option("--data", "A text file (read as bytes), or a token shard (.bin)."):count(1)
parser:option("--config", "Configuration: DeepSpeed JSON or .lua.", here .. "ds_config.json")
parser:option("--model", "Preset: small, char, tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl.", "small")
whole(parser:option("--vocab", "Vocabulary size of a token shard.", "256"), 1, 2 ^ 31 - 1)
whole(parser:option("--seq", "Tokens per row.", "128"), 1, 2 ^ 31 - 1)
whole(parser:option("--steps", "Optimizer steps.", "400"), 1)
parser:option("--device", "Device that computes: cpu, cuda, auto (cuda if there is a GPU) or sim.", "cpu")
parser:option("--device-memory", "Memory budget on the device (memory.device), such as 2GiB.")
parser:option("--host", "Memory budget on the host (memory.host), such as 6GiB or 50%.")
parser:option("--disk", "Folder for the disk tier (memory.disk). Default: no disk tier.")
parser:option("--out", "Folder for checkpoints.", "out_chunked")
whole(parser:option("--save", "Steps between checkpoints.", "100"), 1)
parser:flag("--async", "Save in the background, from a copy in host memory.")
whole(parser:option("--seed", "Random seed.", "1"), 0)
whole(parser:option("--local_rank --local-rank", "Number of this process on its machine (some launchers pass it)."), 0)
whole(parser:option("--pipeline", "Pipeline stages, each on its own processes."), 1)
parser:flag("--recompute", "Recompute blocks in backward: less memory, more time.")
parser:flag("--resume", "Continue from the newest checkpoint in --out.")
parser:flag("--force", "Start a new run even if --out has one. --resume then ignores the old run; its files stay.")
local args = command_line.parse(parser)

local function try(fn, ...) return command_line.try("train_chunked.lua", fn, ...) end
local config = try(source.read, args.config)
config.device = args.device
if args.device_memory or args.host or args.disk then
  config.memory = { device = args.device_memory, host = args.host, disk = args.disk and { path = args.disk } or nil }
end
if args.pipeline then
  config.pipeline = config.pipeline or {}
  config.pipeline.stages = args.pipeline
end
if not (config.gradient_accumulation_steps or config.train_batch_size) then config.gradient_accumulation_steps = 1 end

local tokens = try(ps.data.tokens, args.data, { width = not args.data:match("%.bin$") and 1 or nil })

-- A script that a launcher restarts resumes from the last checkpoint of its own run. Unless --resume is given, it never
-- resumes from a checkpoint that an earlier run left in the folder. Some launchers give their runs names. The file
-- `begun` then contains the name of the run that last started or resumed in the folder.
local env, begun = require("ps.dist.env").read(), args.out .. "/begun"
local launch = (env.run or ""):gsub("%.%d+$", "")              -- the run's name without the number of the restart
local function began_here()
  local f = io.open(begun)
  local name = f and f:read("*l")
  if f then f:close() end
  return name == launch
end
local restarted = env.restart_count > 0 and (launch == "" or began_here())
local earlier = not args.resume and not restarted
  and try(checkpoints.new_run, args.out, { resume = true, force = args.force })
-- If the launcher does not name its runs, the earlier run remains the latest in the folder until the new run begins.
local function forget() if earlier then os.remove(args.out .. "/latest") end end
if launch ~= "" then forget() end

ps.init_distributed { seed = args.seed, local_rank = args.local_rank }
if env.rank == 0 and launch ~= "" then                         -- `begun` is written only now, because all ranks have
                                                               -- read it before init_distributed
  checkpoints.make_folder(args.out)
  local f = assert(io.open(begun, "wb"))
  f:write(launch, "\n")
  f:close()
end
local print = function(text) ps.print_rank(tostring(text)) end
local model, optimizer = try(ps.initialize, { config = config, quiet = ps.rank() > 0, model_func = function()
  return gpt2.new(args.model, { vocab_size = args.vocab, n_positions = args.seq, recompute = args.recompute })
end })

local engine = ps.engine()                                   -- nil if memory is "plain"
local batch_size = (engine and engine.config or config).train_micro_batch_size_per_gpu or 8
local loader = try(ps.data.loader, { shards = { tokens }, split = { 0, 0.9 }, batch = batch_size, seq = args.seq,
  seed = args.seed, vocab = args.vocab })
local windows = try(ps.data.windows, { shards = { tokens }, split = { 0.9, 1 }, batch = batch_size, seq = args.seq,
  limit = 128 })

local done = 0                                               -- number of optimizer steps so far
local parts = { model = model, optimizer = optimizer, loader = loader, async = args.async }
if args.resume or restarted and checkpoints.find(args.out) then
  local from = try(checkpoints.load, args.out, parts)
  done = from.step
  print(("resumed from %s, step %d"):format(from.file, done))
end
local function save()
  parts.step = done
  print((args.async and "saving " or "saved ") .. checkpoints.save(args.out, parts))
end

if launch == "" and ps.rank() == 0 then forget() end
ps.catch_interrupts()
local told = false
local stop = false                                           -- becomes true on all ranks after the same step
local function interrupted()
  stop = stop or ps.any_rank(ps.interrupts() > 0)
  return stop
end

local function run()
  while done < args.steps and not interrupted() do
    optimizer:zero_grad()
    local micro = 0
    for out in model:micro_batches(loader) do
      model:backward(out.loss)
      micro = micro + 1
      if ps.interrupts() > 0 and not model:at_boundary() and not told then
        io.stderr:write(("interrupted after micro-batch %d: finishing the step; the next Ctrl-C or SIGTERM ends at "
          .. "once\n")
          :format(micro))
        told = true
      end
    end
    optimizer:step()
    done = done + 1
    if done % args.save == 0 then save() end
  end
end
try(run)

if interrupted() then
  if done % args.save ~= 0 then save() end
  checkpoints.wait()
  print("interrupted; --resume continues")
  os.exit(0, true)
end
if args.steps % args.save ~= 0 then save() end
checkpoints.wait()
print(("held-out loss %.4f after %d steps"):format(train.evaluate(model, windows), done))
print(ps.memory())
model:close()
