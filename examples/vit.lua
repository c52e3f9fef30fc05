-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a small vision transformer (Dosovitskiy et al. 2021) to recognize digits in noisy images. Writes a picture
-- with the noisy images, and below each image the digit that the model has recognized.
--   psluajit vit.lua --layout chunks                                        also plain
--   psluajit launch.lua --nproc-per-node 2 vit.lua --layout pipeline        also zero, tensor (layout.lua)
local ps = require "ps"
local digits = require "examples.digits"
local layout = require "examples.layout"
local nn, F = ps.nn, ps.F

-- Returns noisy images [n, 1, 16, 16], and the digit of each image, [n].
local function batch(n)
  local of = ps.randint(0, 10, { n }, { dtype = "int64" })
  return { image = digits.drawn(of) + 0.3 * ps.randn { n, 1, 16, 16 }, digits = of }
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

function ViT:parts()
  local list = { { name = "patches", modules = { self.patches }, parameters = { "class", "places" },
    forward = function(_, given)
      local x = self.patches(given.image):flatten(2):transpose(1, 2)  -- shape [n, 16, width]
      return { x = ps.cat({ self.class:expand(x:size(0), 1, x:size(2)), x }, 1) + self.places }
    end } }
  for i, layer in self.encoder.layers:each() do
    list[#list + 1] = { name = "encoder.layers." .. i, modules = { layer }, forward = function(carry)
      return { x = layer(carry.x) }
    end }
  end
  list[#list + 1] = { name = "head", modules = { self.encoder.norm, self.head }, forward = function(carry, given)
    local logits = self.head(self.encoder.norm(carry.x):select(1, 0))                             -- [n, 10]
    return { loss = F.cross_entropy(logits, given.digits), logits = logits }
  end }
  return list
end

function ViT:forward(given) return nn.fold(self:parts(), given) end

local run = layout.open("vit.lua", "Reads drawn digits.", { steps = 2000, batch = 64, lr = 2e-3,
  picture = "digits.pgm" })
ps.manual_seed(1)
run:initialize(function() return ViT(32, 2, 4) end, batch(8))
run:train(batch)

local given = batch(10)
local read = run:output(given, "logits"):argmax(-1)
if ps.rank() == 0 then
  print(("%d of %d digits are read correctly"):format(read:eq(given.digits):sum():item(), given.digits:numel()))
  digits.picture(run.args.picture, ps.cat({ given.image, digits.drawn(read, 5, 3) }, 2):permute(1, 2, 0, 3)
    :reshape(32, 160))
end
