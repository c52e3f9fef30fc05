-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local nn = ps.nn
local Net = nn.class "Net"
function Net:init(width)
  self.first = nn.Linear(width, 4 * width)
  self.last = nn.Linear(4 * width, width)
end
function Net:forward(x) return x + self.last(ps.F.gelu(self.first(x))) end

local net = Net(8)
assert(net(ps.zeros { 2, 8 }):size(1) == 8)
assert(net.first.weight:size(0) == 32)
