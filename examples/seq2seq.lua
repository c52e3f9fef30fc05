-- SPDX-License-Identifier: BSD-3-Clause
-- Trains an encoder and a decoder (Vaswani et al. 2017) to sort digits. One embedding is used for the digits of the
-- encoder and of the decoder, and as the weight of the head. Writes a picture with rows of digits. Below each row are
-- the digits that the model generates.
--   psluajit seq2seq.lua --layout chunks                                    also plain
--   psluajit launch.lua --nproc-per-node 2 seq2seq.lua --layout pipeline    also zero, tensor (layout.lua)
local ps = require "ps"
local digits = require "examples.digits"
local layout = require "examples.layout"
local nn, F = ps.nn, ps.F

local LENGTH, BEGIN = 8, 10                                  -- LENGTH: number of digits in a row. BEGIN: id of the
                                                             -- start token

-- Returns digits [n, LENGTH], the sorted digits, and the decoder's input. The decoder's input is the start token,
-- followed by the sorted digits without the last digit.
local function batch(n)
  local from = ps.randint(0, 10, { n, LENGTH }, { dtype = "int64" })
  local to = from:sort(-1)
  local begin = ps.full({ n, 1 }, BEGIN, { dtype = "int64" })
  return { from = from, to = to, into = ps.cat({ begin, to:narrow(1, 0, LENGTH - 1) }, 1) }
end

local Sorter = nn.class "Sorter"
Sorter.tensor_parallel = { embed = "vocabulary" }            -- the layers of ps.nn define themselves how they are split
                                                             -- over ranks

function Sorter:init(width, layers, heads)
  local options = { dim_feedforward = 2 * width, dropout = 0, batch_first = true, norm_first = true }
  self:param("places", 0.1 * ps.randn { LENGTH, width })
  self.embed, self.norm = nn.Embedding(11, width, { std = 0.1 }), nn.LayerNorm(width)
  self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
  for _ = 1, layers do self.encoder:append(nn.TransformerEncoderLayer(width, heads, options)) end
  for _ = 1, layers do self.decoder:append(nn.TransformerDecoderLayer(width, heads, options)) end
end

function Sorter:parts()
  local list = { { name = "embed", modules = { self.embed }, parameters = { "places" }, forward = function(_, given)
    return { memory = self.embed(given.from) + self.places, x = self.embed(given.into) + self.places }
  end } }
  for i, layer in self.encoder:each() do
    list[#list + 1] = { name = "encoder." .. i, modules = { layer }, forward = function(carry)
      return { memory = layer(carry.memory), x = carry.x }
    end }
  end
  for i, layer in self.decoder:each() do
    list[#list + 1] = { name = "decoder." .. i, modules = { layer }, forward = function(carry)
      return { memory = carry.memory, x = layer(carry.x, carry.memory, { tgt_is_causal = true }) }
    end }
  end
  list[#list + 1] = { name = "head", modules = { self.norm }, forward = function(carry, given)
    local logits = F.linear(self.norm(carry.x), self.embed.weight)  -- shape [n, LENGTH, 11]
    return { loss = F.cross_entropy(logits:flatten(0, 1), given.to:flatten()), logits = logits }
  end }
  return list
end

function Sorter:forward(given) return nn.fold(self:parts(), given) end

local run = layout.open("seq2seq.lua", "Sorts digits.", { steps = 400, batch = 64, lr = 2e-3,
  picture = "sorted.pgm" })
ps.manual_seed(1)
run:initialize(function() return Sorter(32, 2, 4) end, batch(8))
run:train(batch)

local given, rows = batch(4), {}
given.into = ps.full({ 4, LENGTH }, BEGIN, { dtype = "int64" })
-- fills each position with the likeliest digit, one position after another
for place = 0, LENGTH - 1 do
  given.to = run:output(given, "logits"):narrow(2, 0, 10):argmax(-1)
  if place < LENGTH - 1 then given.into:select(1, place + 1):copy_(given.to:select(1, place)) end
end
for row = 0, 3 do
  for _, name in ipairs { "from", "to" } do
    rows[#rows + 1] = digits.drawn(given[name][row], 5, 3):permute(1, 2, 0, 3):reshape(16, 16 * LENGTH)
  end
end
if ps.rank() == 0 then digits.picture(run.args.picture, ps.cat(rows, 0)) end
