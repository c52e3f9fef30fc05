-- SPDX-License-Identifier: BSD-3-Clause
local ps = require "ps"
local bmt = require "ps.bmt"
bmt.init_distributed { seed = 0, config = { plan_print = false } }
local Net = ps.nn.class("Net", bmt.DistributedModule)
function Net:init() self.fc = bmt.nn.Linear(4, 4, { dtype = "fp32" }) end
function Net:forward(x) return self.fc(x) end

local net = Net()
bmt.init_parameters(net)
local optimizer = bmt.optim.AdamOffloadOptimizer(net:parameters(), { lr = 1e-2 })
local manager = bmt.optim.OptimManager()
manager:add_optimizer(optimizer)
manager:zero_grad()
local loss = net(ps.ones { 2, 4 }):square():mean()
manager:backward(loss)
manager:step()
assert(bmt.sum_loss(loss):item() >= 0)
