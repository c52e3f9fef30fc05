-- SPDX-License-Identifier: BSD-3-Clause
-- nn.SyncBatchNorm on two ranks, with every stage of ZeRO, against nn.BatchNorm2d in one process with all rows.
local ranks_lib = require "spec.ranks_lib"

local SCRIPT = [[
local F = ps.F
local Net = nn.class("Net")
function Net:init()
  self.conv, self.norm = nn.Conv2d(2, 6, 3, { padding = 1 }), nn.BatchNorm2d(6, { momentum = %s })
  self.down, self.second = nn.Conv2d(6, 4, 3, { stride = 2 }), nn.BatchNorm2d(4)
  self.head = nn.Linear(36, 3)
end
function Net:forward(x, target)
  x = F.relu(self.norm(self.conv(x)))
  return F.mse_loss(self.head(F.silu(self.second(self.down(x))):flatten(1)), target)
end
ps.manual_seed(3)
local model, optimizer = ps.initialize { quiet = true, model_func = function()
  local net = Net()
  if size > 1 then net = nn.SyncBatchNorm.convert_sync_batchnorm(net) end
  return net
end, config = { plan_print = false, zero_optimization = { stage = %d },
  optimizer = { type = "SGD", params = { lr = 0.1 } } } }
ps.manual_seed(4)
local losses = {}
for step = 1, 5 do
  local x, y = ps.randn { 8, 2, 8, 8 }, ps.randn { 8, 3 }
  local n = 8 / size
  local loss = model(x:narrow(0, rank * n, n):contiguous(), y:narrow(0, rank * n, n):contiguous())
  losses[step] = size > 1 and group:sum(loss:detach()):item() / size or loss:item()
  model:backward(loss)
  optimizer:step()
end
local state = model:state_dict()
local function sums(name)
  local t = state[name]:double()
  return ("%%.9g %%.9g"):format(t:sum():item(), t:square():sum():item())
end
print("losses " .. table.concat(losses, " "))
if rank == 0 then print("statistics " .. sums "norm.running_mean" .. " " .. sums "second.running_var" .. " "
  .. tostring(tonumber(state["norm.num_batches_tracked"]:item()))) end  -- other norms have no buffers in their state
model:close()
]]

local function numbers(text, name)
  local list = {}
  for n in (text:match(name .. " ([^\n]*)") or ""):gmatch("%S+") do list[#list + 1] = tonumber(n) end
  return list
end

describe("nn.SyncBatchNorm", function()
  local folder = ranks_lib.folder()
  teardown(function() ranks_lib.remove(folder) end)

  for _, case in ipairs { { 0, "0.1" }, { 3, "0.1" }, { 2, "false" } } do
    it(("trains two ranks like one process with all rows: stage %d, momentum %s"):format(case[1], case[2]), function()
      if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
      local one = ranks_lib.run(folder, 1, ranks_lib.begin(folder) .. SCRIPT:format(case[2], 0))[0]
      local two = ranks_lib.run(folder, 2, ranks_lib.begin(folder) .. SCRIPT:format(case[2], case[1]))
      assert.equal(0, one.code, one.text)
      assert.equal(0, two[0].code, two[0].text .. two[1].text)
      assert.equal(0, two[1].code, two[0].text .. two[1].text)
      for _, name in ipairs { "losses", "statistics" } do
        local want = numbers(one.text, name)
        assert.equal(5, #want, one.text)
        for rank = 0, name == "losses" and 1 or 0 do
          local got = numbers(two[rank].text, name)
          assert.equal(5, #got, two[rank].text)
          for i = 1, 5 do
            assert(math.abs(got[i] - want[i]) <= 2e-5 * math.max(1, math.abs(want[i])), two[rank].text)
          end
        end
      end
    end)
  end
end)
