-- SPDX-License-Identifier: BSD-3-Clause
-- Collectives as ops over 3 ranks: values, and gradients against finite differences of the sum of all ranks' losses; on
-- the cpu, on a device whose bytes the host carries, and on emulated GPUs.
local lib = require "spec.ranks_lib"

local folder

-- Each rank's loss is sum(w * f(op(x))), f not linear; the gradient is that of the sum of all. Moving one element on
-- one rank moves all ranks' losses, which an all-reduce in fp64 adds up.
local SCRIPT = [[
  local ps = require "ps"
  local group = ps.init_distributed { seed = 3, quiet = true, rendezvous = "file://%s/rendezvous" }
  local rank, size = ps.rank(), ps.world_size()
  ps.manual_seed(40 + rank)
  ps.set_default_device "DEVICE"
  local ops = {
    sum = { { 4, 3 }, function(x) return group:sum(x) end },
    gathered = { { 2, 3 }, function(x) return group:gathered(x) end },
    scattered = { { 3 * size, 2 }, function(x) return group:scattered(x) end },
    copied = { { 5 }, function(x) return group:copied(x, 1) end },
  }
  local names = {}
  for name in pairs(ops) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local shape, fn = ops[name][1], ops[name][2]
    local x = ps.randn(shape, { dtype = "fp64" })
    local w = ps.randn(ps.no_grad(function() return fn(x) end):shape(), { dtype = "fp64" })
    local function loss(at) return (w * ps.F.tanh(fn(at))):sum() end
    local leaf = x:clone():requires_grad(true)
    loss(leaf):backward()
    local got = leaf:grad():reshape(-1):tolist()
    for r = 0, size - 1 do
      for i = 1, x:numel() do
        local step = 1e-5
        local function moved(by)
          local y = x:to("cpu"):clone()
          if r == rank then y:reshape(-1)[i - 1] = y:reshape(-1)[i - 1]:item() + by end
          y = y:to("DEVICE")
          local total = ps.no_grad(function() return loss(y) end):reshape(1)
          group:all_reduce(total)
          return total:item()
        end
        local slope = (moved(step) - moved(-step)) / (2 * step)
        local off = r == rank and math.abs(slope - got[i]) or 0
        assert(off < 1e-8, name .. ": " .. off)
      end
    end
    print(name, true)
  end
  -- values
  local x = ps.full({ 2 }, rank + 1)
  local values = { group:sum(x):tolist()[1], table.concat(group:gathered(x):tolist(), " "),
    group:scattered(ps.arange(0, 2 * size, 1, { dtype = "fp32" })):tolist()[1], group:copied(x, 2):tolist()[1] }
  print("values", unpack(values))
  for _, case in ipairs {
    { "cut", function() group:scattered(ps.ones { size + 1 }) end },
    { "tensor", function() group:sum(3) end },
    { "dimension", function() group:gathered(ps.ones {}) end },
  } do
    local ok, why = pcall(case[2])
    assert(not ok and tostring(why):find(case[1]), tostring(why))
  end
  local other = ps.dist.self()
  local y = other:sum(x:requires_grad(true)):sum()
  other:close()
  local ok, why = pcall(y.backward, y)
  assert(not ok and tostring(why):find("closed"), tostring(why))
  print "done"
]]

describe("collectives as ops", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  for _, device in ipairs { "cpu", "sim", "cuda" } do
    it("have the values and gradients of what they compute on " .. device, function()
      local env = device == "cuda" and lib.emulated() or nil
      if device == "cuda" and not env then return pending(lib.NO_EMULATED) end
      local all = lib.run(folder, 3, SCRIPT:format(folder):gsub("DEVICE", device), env)
      for rank = 0, 2 do
        assert.equal(0, all[rank].code, all[rank].text)
        assert.truthy(all[rank].text:find("done", 1, true))
        local sum, gathered, scattered, copied = all[rank].text:match("values\t(%S+)\t([%d ]+)\t(%S+)\t(%S+)")
        assert.same({ "6", "1 1 2 2 3 3", tostring(2 * rank * 3), "3" }, { sum, gathered, scattered, copied })
      end
    end)
  end
end)
