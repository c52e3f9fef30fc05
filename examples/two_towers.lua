-- SPDX-License-Identifier: BSD-3-Clause
-- Trains two towers (Radford et al. 2021, "CLIP"). One tower maps images of two-digit numbers to vectors. The other
-- tower maps texts of two digits to vectors in the same space. The negatives of a row are the other rows of its
-- micro-batch. Writes a picture with images of numbers, and with the similarity of each image to ten texts.
--   psluajit two_towers.lua --layout chunks                                    also plain
--   psluajit launch.lua --nproc-per-node 2 two_towers.lua --layout pipeline    also zero, tensor (layout.lua)
local ps = require "ps"
local digits = require "examples.digits"
local layout = require "examples.layout"
local nn, F = ps.nn, ps.F

-- Returns noisy images [n, 1, 16, 32] of n different numbers below 100, and the two digits of each number, [n, 2].
local function batch(n)
  local number = ps.randperm(100):narrow(0, 0, n)
  local ten = (number:double() / 10):floor():long()
  local one = number - 10 * ten
  local image = ps.cat({ digits.drawn(ten, 5, 3), digits.drawn(one, 5, 3) }, 3)
  return { image = image + 0.3 * ps.randn(image:shape()), text = ps.stack({ ten, one }, 1) }
end

local Tower = nn.class "Tower"
Tower.tensor_parallel = { up = "column", down = "row" }

function Tower:init(inputs, hidden, width)
  self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, width)
end
function Tower:forward(x) return F.normalize(self.down(F.gelu(self.up(x)))) end

local Towers = nn.class "Towers"

function Towers:init(width)
  self:param("scale", ps.tensor { 2.0 })
  self.image = Tower(16 * 32, 4 * width, width)
  self.table = nn.Embedding(20, width)
  self.text = Tower(2 * width, 4 * width, width)
end

function Towers:parts()
  return {
    { name = "image", modules = { self.image }, forward = function(_, given)
      return { image = self.image(given.image:flatten(1)) }
    end },
    { name = "text", modules = { self.table, self.text }, parameters = { "scale" }, forward = function(carry, given)
      local places = ps.tensor({ { 0, 10 } }, { dtype = "int64", device = given.text:device() })
      local text = self.text(self.table(given.text + places):flatten(1))
      local logits = carry.image:matmul(text:transpose(0, 1)) * self.scale:exp()                  -- [n, n]
      local own = ps.arange(0, logits:size(0), 1, { dtype = "int64", device = logits:device() })
      local loss = (F.cross_entropy(logits, own) + F.cross_entropy(logits:transpose(0, 1), own)) / 2
      return { loss = loss, image = carry.image, text = text }
    end },
  }
end

function Towers:forward(given) return nn.fold(self:parts(), given) end

local run = layout.open("two_towers.lua", "Matches drawn numbers and their digits.", { steps = 300, batch = 64,
  lr = 2e-3, picture = "towers.pgm" })
ps.manual_seed(1)
run:initialize(function() return Towers(32) end, batch(8))
run:train(batch)

local given = batch(10)
local likeness = run:output(given, "image"):matmul(run:output(given, "text"):transpose(0, 1))     -- [10, 10]
if ps.rank() == 0 then
  local cells = likeness:reshape(10, 1, 10, 1):expand(10, 16, 10, 16):reshape(160, 160)
  digits.picture(run.args.picture, ps.cat({ given.image:reshape(160, 32), cells }, 1))
end
