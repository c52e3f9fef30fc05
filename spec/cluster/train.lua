-- SPDX-License-Identifier: BSD-3-Clause
-- The training that spec/cluster starts under every launcher. It is small, and its batches do not depend on the number
-- of ranks. Rank 0 prints the origin of the ranks' numbers and each step's loss over the whole batch. With
-- PS_CLUSTER_MARKS, a folder, each rank of the first attempt writes its process id there after the second step
-- (MARKS/rank.N), and continues until it is interrupted. PS_CLUSTER_TIMEOUT: of that attempt's group, in seconds.
-- PS_CLUSTER_STAGE: zero_optimization.stage.
local ps = require "ps"
local gpt2 = require "models.gpt2"

local ROWS, SEQ, STEPS, MARKED = 8, 16, 5, 2
local marks = os.getenv "PS_CLUSTER_MARKS"
local source = require("ps.dist.env").read()
local first = source.restart_count == 0
local group = ps.init_distributed { seed = 3, timeout = first and tonumber(os.getenv "PS_CLUSTER_TIMEOUT") or 40 }
local rank, size = ps.rank(), ps.world_size()
ps.print_rank(("source %s, %d ranks"):format(source.source, size))

local config = { zero_optimization = { stage = tonumber(os.getenv "PS_CLUSTER_STAGE") or 0 },
  optimizer = { type = "AdamW", params = { lr = 1e-3, eps = 1e-4, weight_decay = 0.1 } } }
local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
  return gpt2.new("tiny", { dropout = 0 })
end }

local function mark()
  local path = ("%s/rank.%d"):format(marks, rank)
  local f = assert(io.open(path .. ".new", "wb"))
  f:write(require("posix.unistd").getpid(), "\n")
  f:close()
  assert(os.rename(path .. ".new", path))
end

ps.manual_seed(17)
local hurt = marks and first
local from, to = math.floor(rank * ROWS / size), math.floor((rank + 1) * ROWS / size)
for step = 1, hurt and 1e6 or STEPS do
  local x = ps.randint(0, 256, { ROWS, SEQ }, { dtype = "int32" })
  local y = ps.randint(0, 256, { ROWS, SEQ }, { dtype = "int32" })
  for i = 0, step % SEQ do y[{ 0, i }] = -100 end             -- ranks have different numbers of targets
  x, y = x:narrow(0, from, to - from), y:narrow(0, from, to - from)
  optimizer:zero_grad()
  local loss = model(x, y)
  model:backward(loss)
  optimizer:step()
  local targets = (to - from) * SEQ - (from == 0 and step % SEQ + 1 or 0)
  local sums = group:all_reduce(ps.tensor({ loss:item() * targets, targets }, { dtype = "fp64" })):tolist()
  if step <= STEPS then ps.print_rank(("loss %d %.9g"):format(step, sums[1] / sums[2])) end
  if hurt and step == MARKED then mark() end
end
model:close()
