-- Trains a small GPT-2 on data.txt, byte by byte.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local config = require "config"

-- Calls a function that reads input: its error becomes one line, without a traceback.
local function try(fn, ...) return require("ps.command_line").try("train.lua", fn, ...) end

ps.manual_seed(config.seed)
local tokens = try(ps.data.tokens, "data.txt", { width = 1 })      -- one token per byte
local train = math.floor(0.9 * tokens:count())                     -- the rest measures the model

local loader = try(ps.data.loader, { shards = { tokens }, last = train, batch = config.batch, seq = config.seq,
  vocab = 256, seed = config.seed })

-- The held-out text.
local function windows()
  return ps.data.windows { shards = { tokens }, first = train, batch = 16, seq = config.seq }
end
try(windows)                           -- too short a text ends the script now, not at the first measurement

local model, optimizer = ps.initialize {
  config = config.engine,
  model_func = function() return gpt2.new(config.model) end,
}

-- The mean loss of the held-out text.
local function held_out() return (ps.train.evaluate(model, windows())) end

for step = 1, config.steps do
  local x, y = loader:next()
  optimizer:zero_grad()
  local loss = model(x, y)
  model:backward(loss)
  optimizer:step()
  if step % 100 == 0 then
    print(("step %d: loss %.3f, held out %.3f"):format(step, loss:item(), held_out()))
  end
end

ps.save(model:state_dict(), "model.safetensors")
print "wrote model.safetensors"
