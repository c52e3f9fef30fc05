-- Trains a small GPT-2 on data.txt. Every rank runs this script.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local config = require "config"

-- Calls a function that reads input: its error becomes one line, without a traceback.
local function try(fn, ...) return require("ps.command_line").try("train.lua", fn, ...) end

ps.init_distributed { seed = config.seed }
local tokens = try(ps.data.tokens, "data.txt", { width = 1 })
local model, optimizer = ps.initialize {
  config = config.engine,
  model_func = function() return gpt2.new(config.model) end,
}
-- The loader gives each rank its own rows of every batch.
local loader = try(ps.data.loader, { shards = { tokens }, batch = config.batch, seq = config.seq, vocab = 256,
  seed = config.seed })

for step = 1, config.steps do
  local x, y = loader:next()
  optimizer:zero_grad()
  local loss = model(x, y)
  model:backward(loss)
  optimizer:step()
  if step % 20 == 0 then ps.print_rank(("step %d: loss of rank 0 %.3f"):format(step, loss:item())) end
end

ps.print_rank(("each of %d ranks keeps %.0f KiB of parameters and optimizer state"):format(ps.world_size(),
  ps.memory().used / 1024))
ps.checkpoints.save("checkpoint", { model = model, optimizer = optimizer, loader = loader, step = config.steps })
ps.print_rank "wrote the folder checkpoint"
