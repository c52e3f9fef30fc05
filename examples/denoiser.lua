-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a small convolutional network to remove noise from drawn digits, and writes a picture: noisy, denoised, clean.
--   psluajit denoiser.lua                                  in chunks (docs/memory.md); --memory plain: without
--   psluajit launch.lua --nproc-per-node 2 denoiser.lua --zero 3        on two ranks, which share all state out
local ps = require "ps"
local argparse = require "argparse"
local whole = require("ps.command_line").whole
local nn, F = ps.nn, ps.F

local parser = argparse("denoiser.lua", "Removes noise from drawn digits.")
whole(parser:option("--steps", "training steps", "300"), 1)
whole(parser:option("--batch", "images per step, of all ranks", "64"), 1)
whole(parser:option("--zero", "stage of ZeRO", "0"), 0, 3)
parser:option("--memory", "chunks or plain", "chunks")
parser:option("--picture", "the picture's file", "denoised.pgm")
parser:option("--trace", "a file for the first weights and batches, by which another program can do the same")
local args = parser:parse()
local group = os.getenv "WORLD_SIZE" and ps.init_distributed()
local rank, ranks = ps.rank(), ps.world_size()

-- -- digits -----------------------------------------------------------------------------------------------------------
-- 3 x 5 dots of each digit, row by row.
local DOTS = { "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
  "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111" }
local dots = {}
for i, digit in ipairs(DOTS) do
  dots[i] = {}
  for dot in digit:gmatch "." do table.insert(dots[i], tonumber(dot)) end
end
local glyphs = F.interpolate(ps.tensor(dots):reshape(10, 1, 5, 3), { scale_factor = 2 })         -- [10, 1, 10, 6]

-- Clean images [n, 1, 16, 16] at a place of the batch's own, levels of noise [n, 1, 1, 1], and noisy images.
local function batch(n)
  local top, left = ps.randint(0, 7, { 1 }):item(), ps.randint(0, 11, { 1 }):item()
  local clean = glyphs:index_select(0, ps.randint(0, 10, { n }, { dtype = "int64" }))
  clean = F.pad(clean, { left, 10 - left, top, 6 - top }):contiguous()
  local level = ps.rand { n, 1, 1, 1 }
  return clean, level, clean + level * ps.randn { n, 1, 16, 16 }
end

-- -- the network ------------------------------------------------------------------------------------------------------
local Denoiser = nn.class "Denoiser"
function Denoiser:init(width)
  self.first = nn.Conv2d(2, width, 3, { padding = 1 })
  self.norm1, self.down = nn.GroupNorm(4, width), nn.Conv2d(width, 2 * width, 3, { stride = 2, padding = 1 })
  self.norm2, self.middle = nn.GroupNorm(4, 2 * width), nn.Conv2d(2 * width, width, 3, { padding = 1 })
  self.up, self.last = nn.Upsample { scale_factor = 2 }, nn.Conv2d(2 * width, 1, 3, { padding = 1 })
end
-- The denoised images; with clean ones the mean squared distance to them.
function Denoiser:forward(noisy, level, clean)
  local x = F.silu(self.norm1(self.first(ps.cat({ noisy, level:expand(noisy:shape()) }, 1))))
  local y = F.silu(self.norm2(self.down(x)))
  y = self.last(ps.cat({ x, self.up(F.silu(self.middle(y))) }, 1))
  return clean and F.mse_loss(y, clean) or y
end

ps.manual_seed(1)
local model, optimizer = ps.initialize { quiet = true, model_func = function() return Denoiser(16) end,
  config = { optimizer = { type = "AdamW", params = { lr = 2e-3, weight_decay = 0.01 } }, plan_print = false,
    zero_optimization = { stage = args.zero }, memory = args.memory == "plain" and "plain" or nil } }

-- -- training ---------------------------------------------------------------------------------------------------------
local trace = args.trace and model:state_dict()
for name, t in pairs(trace or {}) do trace[name] = t:clone() end
ps.manual_seed(2)
local own = args.batch / ranks                                               -- rows of this rank
for step = 1, args.steps do
  local clean, level, noisy = batch(args.batch)
  if trace then trace[step .. ".clean"], trace[step .. ".level"], trace[step .. ".noisy"] = clean, level, noisy end
  local function rows(t) return t:narrow(0, rank * own, own) end
  local loss = model(rows(noisy), rows(level), rows(clean))
  model:backward(loss)
  optimizer:step()
  if step <= 20 or step % 50 == 0 then
    local mean = ranks > 1 and group:sum(loss:detach()) / ranks or loss
    ps.print_rank(("step %d  loss %.9f"):format(step, mean:item()))
  end
end
if trace and rank == 0 then ps.save(trace, args.trace) end

-- -- the picture ------------------------------------------------------------------------------------------------------
local clean, level, noisy = batch(10)
local denoised = ps.no_grad(function() return model(noisy, level) end)
if rank == 0 then
  local picture = ps.cat({ noisy, denoised, clean }, 2):permute(1, 2, 0, 3):reshape(48, 160)
  local lines = { "P2 160 48 255" }
  for i, line in ipairs((picture:clamp(0, 1) * 255):to("uint8"):tolist()) do lines[i + 1] = table.concat(line, " ") end
  local file = assert(io.open(args.picture, "w"))
  file:write(table.concat(lines, "\n"), "\n")
  file:close()
end
