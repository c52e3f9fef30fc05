-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a small convolutional network to remove noise from images of digits. Writes a picture with the noisy, the
-- denoised and the clean images.
--   psluajit denoiser.lua --layout chunks                                   also plain
--   psluajit launch.lua --nproc-per-node 2 denoiser.lua --layout pipeline   also zero, tensor (layout.lua)
local ps = require "ps"
local digits = require "examples.digits"
local layout = require "examples.layout"
local nn, F = ps.nn, ps.F

-- Returns clean images [n, 1, 16, 16], a noise level [n, 1, 1, 1] for each image, and the noisy images.
local function batch(n)
  local clean, level = digits.drawn(ps.randint(0, 10, { n }, { dtype = "int64" })), ps.rand { n, 1, 1, 1 }
  return { clean = clean, level = level, noisy = clean + level * ps.randn { n, 1, 16, 16 } }
end

local Denoiser = nn.class "Denoiser"
-- The channels of the first and of the middle layer are split over ranks.
Denoiser.tensor_parallel = { first = "column", norm1 = "channels", down = "row", middle = "column",
  last = { "row", blocks = 2 } }

function Denoiser:init(width)
  self.first = nn.Conv2d(2, width, 3, { padding = 1 })
  self.norm1, self.down = nn.GroupNorm(4, width), nn.Conv2d(width, 2 * width, 3, { stride = 2, padding = 1 })
  self.norm2, self.middle = nn.GroupNorm(4, 2 * width), nn.Conv2d(2 * width, width, 3, { padding = 1 })
  self.up, self.last = nn.Upsample { scale_factor = 2 }, nn.Conv2d(2 * width, 1, 3, { padding = 1 })
end

function Denoiser:parts()
  return {
    { name = "down", modules = { self.first, self.norm1, self.down }, forward = function(_, given)
      local level = given.level:expand(given.noisy:shape())
      local x = F.silu(self.norm1(self.first(ps.cat({ given.noisy, level }, 1))))
      return { x = x, y = self.down(x) }
    end },
    { name = "up", modules = { self.norm2, self.middle, self.up, self.last }, forward = function(carry, given)
      local y = self.up(F.silu(self.middle(F.silu(self.norm2(carry.y)))))
      y = self.last(ps.cat({ carry.x, y }, 1))
      return { loss = F.mse_loss(y, given.clean), denoised = y }
    end },
  }
end

function Denoiser:forward(given) return nn.fold(self:parts(), given) end

local run = layout.open("denoiser.lua", "Removes noise from drawn digits.", { steps = 300, batch = 64, lr = 2e-3,
  picture = "denoised.pgm" })
ps.manual_seed(1)
run:initialize(function() return Denoiser(16) end, batch(8))
run:train(batch)

local given = batch(10)
local denoised = run:output(given, "denoised")
if ps.rank() == 0 then
  digits.picture(run.args.picture, ps.cat({ given.noisy, denoised, given.clean }, 2):permute(1, 2, 0, 3)
    :reshape(48, 160))
end
