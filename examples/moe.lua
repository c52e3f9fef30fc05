-- SPDX-License-Identifier: BSD-3-Clause
-- Trains a mixture of experts to draw waves from coordinates. A router sends each point to one expert, which has slots
-- for a limited number of points. A second loss keeps the experts equally busy (Fedus et al. 2021, "Switch
-- Transformers"). Writes a picture: the true value of each point, the model's value, and the point's expert.
--   psluajit moe.lua --layout chunks                                    also plain
--   psluajit launch.lua --nproc-per-node 2 moe.lua --layout pipeline    also zero, tensor (layout.lua)
local ps = require "ps"
local digits = require "examples.digits"
local layout = require "examples.layout"
local nn, F = ps.nn, ps.F
-- Returns the values at points [n, 2] in the square from -1 to 1. Each quarter of the square has its own wavelength.
local function value(at)
  local x, y = at:narrow(1, 0, 1), at:narrow(1, 1, 1)
  return ps.where(x:gt(0), (9 * x):sin() * (3 * y):cos(), (3 * x + 9 * F.relu(y)):sin())
end
local function points(at) return { at = at, value = value(at) } end
local function batch(n) return points(2 * ps.rand { n, 2 } - 1) end

local Expert = nn.class "Expert"
Expert.tensor_parallel = { up = "column", down = "row" }
function Expert:init(width) self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width) end
function Expert:forward(x) return self.down(F.gelu(self.up(x))) end
local Mixture = nn.class "Mixture"
function Mixture:init(width, experts)
  self.norm, self.router, self.experts = nn.LayerNorm(width), nn.Linear(width, experts), nn.ModuleList()
  for _ = 1, experts do self.experts:append(Expert(width)) end
end
-- Returns x [n, width] plus the results of the experts, the load-balancing loss, and the expert of each row.
function Mixture:forward(x)
  local h, n, E = self.norm(x), x:size(0), self.experts.length
  local room = math.ceil(1.25 * n / E)
  local gates = F.softmax(self.router(h), -1)                                                     -- [n, E]
  local gate, expert = gates:max(-1)
  local chosen = ps.one_hot(expert, E):to "fp32"
  -- position of each row among the rows of the same expert
  local place = (chosen:cumsum(0) * chosen):sum(-1):long() - 1
  local slots = ps.one_hot(place:clamp(0, room), room + 1):narrow(1, 0, room):to "fp32"            -- others get none
  local y = 0
  for e, one in self.experts:each() do
    local send = chosen:narrow(1, e, 1) * slots                                                   -- [n, room]
    y = y + send:matmul(one(send:transpose(0, 1):matmul(h)))
  end
  return x + gate:unsqueeze(1) * y, E * (chosen:mean(0) * gates:mean(0)):sum(), expert
end
local Net = nn.class "Net"
function Net:init(width, experts)
  self.first, self.last = nn.Linear(2, width), nn.Linear(width, 1)
  self.layers = nn.ModuleList { Mixture(width, experts), Mixture(width, experts) }
end
function Net:parts()
  local list = { { name = "first", modules = { self.first }, forward = function(_, given)
    return { x = (3 * self.first(given.at)):sin(), aux = ps.zeros({}, { device = given.at:device() }) }
  end } }
  for i, layer in self.layers:each() do
    list[#list + 1] = { name = "layers." .. i, modules = { layer }, forward = function(carry)
      local x, aux, expert = layer(carry.x)
      return { x = x, aux = carry.aux + aux, expert = expert }
    end }
  end
  list[#list + 1] = { name = "last", modules = { self.last }, forward = function(carry, given)
    local y = self.last(carry.x)
    return { loss = F.mse_loss(y, given.value) + 0.01 * carry.aux, drawn = y, expert = carry.expert }
  end }
  return list
end
function Net:forward(given) return nn.fold(self:parts(), given) end

local run = layout.open("moe.lua", "Draws waves.", { steps = 600, batch = 256, lr = 3e-3, picture = "experts.pgm" })
ps.manual_seed(1)
run:initialize(function() return Net(32, 4) end, batch(64))
run:train(batch)
local line = ps.arange(0, 48) / 24 - 1
local at = ps.stack({ line:reshape(1, 48):expand(48, 48), line:reshape(48, 1):expand(48, 48) }, 2):reshape(-1, 2)
local given = points(at)
local drawn, expert = run:output(given, "drawn"), run:output(given, "expert")
if ps.rank() == 0 then
  local squares = ps.stack { (given.value + 1) / 2, (drawn + 1) / 2, expert:reshape(-1, 1):float() / 3 }
  digits.picture(run.args.picture, squares:reshape(3, 48, 48):transpose(0, 1):reshape(48, 144))
end
