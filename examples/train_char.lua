-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a byte-level GPT-2 of 4 layers with a hand-written training loop, on the first nine tenths of a text. At the
-- end, prints the loss on the last tenth.
--
--   psluajit train_char.lua --data tinyshakespeare.txt
local ps = require "ps"
local argparse = require "argparse"
local command_line = require "ps.command_line"
local whole = command_line.whole
local json = require "cjson"
local gpt2 = require "models.gpt2"
local optim, sched = require "ps.optim", require "ps.sched"
local train, progress = require "ps.train", require "ps.progress"

local function try(fn, ...) return command_line.try("train_char.lua", fn, ...) end

local settings = {
  layers = 4, heads = 4, width = 128, seq = 64, batch = 12,
  max_lr = 1e-3, min_lr = 1e-4, warmup = 100,
  betas = { 0.9, 0.99 }, weight_decay = 0.1, max_norm = 1.0,
}

local parser = argparse("psluajit train_char.lua", "Trains a small byte-level GPT-2 and prints the held-out loss.")
parser:option("--data", "The text file."):count(1)
whole(parser:option("--iters", "Steps.", "2000"), 1)
whole(parser:option("--seed", "Random seed; 0 means 1337.", "0"), 0)
parser:option("--device", "Device that computes: cpu or cuda.", "cpu")
parser:option("--dtype", "fp32, bf16, or auto: bf16 on a GPU or a processor that supports it, else fp32.", "auto")
  :choices { "auto", "fp32", "bf16" }
parser:option("--optimizer", "AdamW, AdamW8bit (averages in 8 bits) or AdamWBF16 (averages in bf16).", "AdamW")
  :choices { "AdamW", "AdamW8bit", "AdamWBF16" }
parser:flag("--json", "Print only one JSON line.")
local args = command_line.parse(parser)

if args.dtype == "auto" then args.dtype = try(ps.fast_dtype, args.device) end
local seed = args.seed == 0 and 1337 or args.seed
ps.manual_seed(seed)

local tokens = try(ps.data.tokens, args.data, { width = 1 })
local n = math.floor(0.9 * tokens:count())
local s = settings
local model = gpt2.new({ vocab_size = 256, n_positions = s.seq, n_layer = s.layers, n_head = s.heads,
  n_embd = s.width }, { dtype = args.dtype, device = args.device })
local opt = optim[args.optimizer](model, { lr = s.max_lr, betas = s.betas, weight_decay = s.weight_decay,
  max_norm = s.max_norm })
local schedule = sched.warmup_cosine { optimizer = opt, max_lr = s.max_lr, min_lr = s.min_lr,
  warmup = math.min(s.warmup, args.iters), total = args.iters }
local loader = try(ps.data.loader, { shards = { tokens }, last = n, batch = s.batch, seq = s.seq, seed = seed,
  vocab = 256, device = args.device })

local windows = try(ps.data.windows, { shards = { tokens }, first = n, batch = 64, seq = s.seq, device = args.device })

local display = progress.new { total = args.iters, quiet = args.json }
local began = ps.now()
for step = 1, args.iters do
  local x, y = loader:next()
  local loss = model(x, y)
  loss:backward()
  opt:step()
  opt:zero_grad()
  schedule:step()
  if step % 50 == 0 or step == args.iters then
    display:update(step, { loss = loss:item(), tokens_per_s = step * s.batch * s.seq / (ps.now() - began) })
  end
end
local seconds = ps.now() - began
display:finish()

local val_loss = train.evaluate(model, windows)
if args.json then
  print(json.encode { iters = args.iters, train_s = seconds, val_loss = val_loss, dtype = args.dtype, seed = seed,
    optimizer = args.optimizer, tokens_per_s = args.iters * s.batch * s.seq / seconds })
else
  print(("held-out loss %.4f after %d steps in %.1f s"):format(val_loss, args.iters, seconds))
end
