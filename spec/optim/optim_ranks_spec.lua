-- SPDX-License-Identifier: BSD-3-Clause
-- ps.optim in a group of several ranks. It is refused, or each rank updates on its own if the script declares that it
-- has summed the gradients. The result then equals that of one process with all rows.
local ranks = require "spec.ranks_lib"

local folder

setup(function() folder = ranks.folder() end)
teardown(function() ranks.remove(folder) end)

describe("ps.optim in a group of two ranks", function()
  it("steps only if the script sums gradients and sets per_rank", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    ranks.check(folder, 2, [[
      local function model()
        ps.manual_seed(4)
        return nn.Linear(6, 3)
      end
      local x = ps.randn { 8, 6 }
      local function loss(net, rows) return net(rows):square():mean() end
      local whole, mine = model(), model()
      local refused = ps.optim.AdamW(mine, { lr = 0.1 })
      loss(mine, x:narrow(0, 4 * rank, 4)):backward()
      local ok, why = pcall(refused.step, refused)
      assert(not ok and tostring(why):find("2 ranks", 1, true) and tostring(why):find("per_rank = true", 1, true)
        and tostring(why):find("ps.initialize", 1, true), why)
      local all = ps.optim.SGD(whole, { lr = 0.1, per_rank = true })
      local own = ps.optim.SGD(mine, { lr = 0.1, per_rank = true })
      own:zero_grad()
      for step = 1, 3 do
        loss(whole, x):backward()
        all:step()
        all:zero_grad()
        loss(mine, x:narrow(0, 4 * rank, 4)):backward()
        for _, p in ipairs(mine:parameters()) do group:all_reduce(p:grad()) end
        own:step { grad_scale = 1 / size }
        own:zero_grad()
      end
      local off = (whole.weight - mine.weight):abs():max():item()
      assert(off < 1e-6, off)
    ]])
  end)
end)
