-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a small vision transformer (Dosovitskiy et al. 2021) to read drawn digits in noise, and writes a picture:
-- the digits, and below them the digits that the model reads.
--   psluajit vit.lua                                       in chunks (docs/memory.md); --memory plain: without
--   psluajit launch.lua --nproc-per-node 2 vit.lua --zero 3             on two ranks, which share all state out
local ps = require "ps"
local argparse = require "argparse"
local whole = require("ps.command_line").whole
local nn, F = ps.nn, ps.F

local parser = argparse("vit.lua", "Reads drawn digits.")
whole(parser:option("--steps", "training steps", "200"), 1)
whole(parser:option("--batch", "images per step, of all ranks", "64"), 1)
whole(parser:option("--zero", "stage of ZeRO", "0"), 0, 3)
parser:option("--memory", "chunks or plain", "chunks")
parser:option("--picture", "the picture's file", "digits.pgm")
parser:option("--trace", "a file for the first weights and batches, by which another program can do the same")
local args = parser:parse()
local group = os.getenv "WORLD_SIZE" and ps.init_distributed()
local rank, ranks = ps.rank(), ps.world_size()

-- 3 x 5 dots of each digit, row by row.
local DOTS = { "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
  "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111" }
local dots = {}
for i, digit in ipairs(DOTS) do
  dots[i] = {}
  for dot in digit:gmatch "." do table.insert(dots[i], tonumber(dot)) end
end
local glyphs = F.interpolate(ps.tensor(dots):reshape(10, 1, 5, 3), { scale_factor = 2 })         -- [10, 1, 10, 6]

local function drawn(digits, left, top)
  return F.pad(glyphs:index_select(0, digits), { left, 10 - left, top, 6 - top }):contiguous()
end
-- Images [n, 1, 16, 16] at a place of the batch's own, in noise, and their digits [n].
local function batch(n)
  local digits = ps.randint(0, 10, { n }, { dtype = "int64" })
  local image = drawn(digits, ps.randint(0, 11, { 1 }):item(), ps.randint(0, 7, { 1 }):item())
  return image + 0.3 * ps.randn(image:shape()), digits
end

local ViT = nn.class "ViT"
function ViT:init(width, layers, heads)
  self.patches = nn.Conv2d(1, width, 4, { stride = 4 })
  self:param("class", ps.zeros { 1, 1, width })
  self:param("places", 0.02 * ps.randn { 1, 17, width })
  self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, heads, { dim_feedforward = 2 * width,
    dropout = 0, activation = "gelu", batch_first = true, norm_first = true }), layers, { norm = nn.LayerNorm(width) })
  self.head = nn.Linear(width, 10)
end
-- The digits' logits [n, 10]; with targets the cross entropy.
function ViT:forward(image, target)
  local x = self.patches(image):flatten(2):transpose(1, 2)                                        -- [n, 16, width]
  x = ps.cat({ self.class:expand(image:size(0), 1, x:size(2)), x }, 1) + self.places
  local logits = self.head(self.encoder(x):select(1, 0))
  return target and F.cross_entropy(logits, target) or logits
end

ps.manual_seed(1)
local model, optimizer = ps.initialize { quiet = true, model_func = function() return ViT(32, 2, 4) end,
  config = { optimizer = { type = "AdamW", params = { lr = 2e-3, weight_decay = 0.01 } }, plan_print = false,
    zero_optimization = { stage = args.zero }, memory = args.memory == "plain" and "plain" or nil } }

local trace = args.trace and model:state_dict()
for name, t in pairs(trace or {}) do trace[name] = t:clone() end
ps.manual_seed(2)
local own = args.batch / ranks                                               -- rows of this rank
for step = 1, args.steps do
  local image, digits = batch(args.batch)
  if trace then trace[step .. ".image"], trace[step .. ".digits"] = image, digits end
  local loss = model(image:narrow(0, rank * own, own), digits:narrow(0, rank * own, own))
  model:backward(loss)
  optimizer:step()
  if step <= 20 or step % 50 == 0 then
    local mean = ranks > 1 and group:sum(loss:detach()) / ranks or loss
    ps.print_rank(("step %d  loss %.9f"):format(step, mean:item()))
  end
end
if trace and rank == 0 then ps.save(trace, args.trace) end

local image = batch(10)
local read = ps.no_grad(function() return model(image):argmax(-1) end)
if rank == 0 then
  local picture = ps.cat({ image, drawn(read, 5, 3) }, 2):permute(1, 2, 0, 3):reshape(32, 160)
  local lines = { "P2 160 32 255" }
  for i, line in ipairs((picture:clamp(0, 1) * 255):to("uint8"):tolist()) do lines[i + 1] = table.concat(line, " ") end
  local file = assert(io.open(args.picture, "w"))
  file:write(table.concat(lines, "\n"), "\n")
  file:close()
end
