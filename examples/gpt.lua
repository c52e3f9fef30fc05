-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a GPT (Radford et al. 2019) with rotary positions to continue rows of digits. Adjacent digits of a row have a
-- constant difference modulo 10. Writes a picture: each row has three given digits, then the digits of the model.
--   psluajit gpt.lua --layout chunks                                        also plain
--   psluajit launch.lua --nproc-per-node 2 gpt.lua --layout pipeline        also zero, tensor (layout.lua)
local ps = require "ps"
local digits = require "examples.digits"
local layout = require "examples.layout"
local nn, F = ps.nn, ps.F

local LENGTH, GIVEN = 10, 3  -- LENGTH: number of digits in a row. GIVEN: number of digits in the prompt

-- Returns rows of digits [n, LENGTH], which are arithmetic sequences modulo 10, and the next digit of each digit.
local function batch(n)
  local row = ps.randint(0, 10, { n, 1 }) + ps.randint(0, 10, { n, 1 }) * ps.arange(LENGTH + 1)
  row = row - (row:double() / 10):floor():long() * 10
  return { from = row:narrow(1, 0, LENGTH), to = row:narrow(1, 1, LENGTH) }
end

local Block = nn.class "Block"
function Block:init(width, heads)
  self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
  for _, name in ipairs { "q", "k", "v", "out" } do self[name] = nn.Linear(width, width) end
  self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
end

function Block:forward(x, cos, sin)
  local h = self.norm1(x)
  local function heads_of(y) return y:reshape(y:size(0), y:size(1), self.heads, -1):transpose(1, 2) end
  local q, k = F.rope(heads_of(self.q(h)), cos, sin), F.rope(heads_of(self.k(h)), cos, sin)
  local y = F.attention(q, k, heads_of(self.v(h)), { causal = true })
  x = x + self.out(y:transpose(1, 2):flatten(2))
  return x + self.down(F.gelu(self.up(self.norm2(x))))
end

local GPT = nn.class "GPT"
GPT.tensor_parallel = { embed = "vocabulary", blocks = "inside", norm = "inside",
  ["blocks.*"] = { "divide", "heads" }, ["blocks.*.q"] = "column", ["blocks.*.k"] = "column",
  ["blocks.*.v"] = "column", ["blocks.*.out"] = "row", ["blocks.*.up"] = "column", ["blocks.*.down"] = "row" }

function GPT:init(width, layers, heads)
  self.embed, self.blocks, self.norm = nn.Embedding(10, width, { std = 0.1 }), nn.ModuleList(), nn.LayerNorm(width)
  for _ = 1, layers do self.blocks:append(Block(width, heads)) end
  local rates = ps.pow(10000, ps.arange(0, width / heads, 2) / (-width / heads))
  local angles = ps.arange(LENGTH):float():unsqueeze(1) * rates  -- shape [LENGTH, D / 2]
  self:buffer("cos", angles:cos():unsqueeze(0), { persistent = false })
  self:buffer("sin", angles:sin():unsqueeze(0), { persistent = false })
end

function GPT:parts()
  local list = { { name = "embed", modules = { self.embed }, forward = function(_, given)
    return { x = self.embed(given.from) }
  end } }
  for i, block in self.blocks:each() do
    list[#list + 1] = { name = "blocks." .. i, modules = { block }, forward = function(carry)
      return { x = block(carry.x, self.cos, self.sin) }
    end }
  end
  list[#list + 1] = { name = "head", modules = { self.norm }, forward = function(carry, given)
    local logits = F.linear(self.norm(carry.x), self.embed.weight)  -- shape [n, LENGTH, 10]
    return { loss = F.cross_entropy(logits:flatten(0, 1), given.to:flatten()), logits = logits }
  end }
  return list
end

function GPT:forward(given) return nn.fold(self:parts(), given) end

local run = layout.open("gpt.lua", "Continues rows.", { steps = 400, batch = 64, lr = 3e-3, picture = "rows.pgm" })
ps.manual_seed(1)
run:initialize(function() return GPT(32, 2, 4) end, batch(8))
run:train(batch)
local given = batch(6)
for place = GIVEN, LENGTH - 1 do                             -- fills one position after another
  given.from:select(1, place):copy_(run:output(given, "logits"):argmax(-1):select(1, place - 1))
end
if ps.rank() == 0 then
  digits.picture(run.args.picture, digits.drawn(given.from:flatten(), 5, 3):reshape(6, LENGTH, 16, 16)
    :transpose(1, 2):reshape(96, 16 * LENGTH))
end
