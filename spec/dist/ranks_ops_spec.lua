-- SPDX-License-Identifier: BSD-3-Clause
-- Collectives as ops over 3 ranks: values, and gradients against finite differences of the sum of all ranks' losses;
-- on the cpu, on a device whose bytes the host transfers, and on emulated GPUs.
local lib = require "spec.ranks_lib"

local folder

-- Each rank's loss is sum(w * f(op(x))) with a nonlinear f. The gradient is that of the sum over all ranks. Moving one
-- element on one rank changes the losses of all ranks, which an all-reduce in fp64 sums.
local SCRIPT = [[
  local ps = require "ps"
  local group = ps.init_distributed { seed = 3, quiet = true, rendezvous = "file://%s/rendezvous" }
  local rank, size = ps.rank(), ps.world_size()
  ps.manual_seed(40 + rank)
  ps.set_default_device "DEVICE"
  local ops = {
    sum = { { 4, 3 }, function(x) return group:sum(x) end },
    gathered = { { 2, 3 }, function(x) return group:gathered(x) end },
    gathered_again = { { 2, 3 }, function(x) return group:gathered_again(x) end },
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

-- Layers that ranks share. All ranks have the same x and the same loss. `own` differs between ranks. Moving one element
-- of x on all ranks changes each rank's loss equally, which gives the gradient.
local PARTS = [[
  local ps = require "ps"
  local group = ps.init_distributed { seed = 3, quiet = true, rendezvous = "file://%s/rendezvous" }
  local rank, size = ps.rank(), ps.world_size()
  ps.set_default_device "DEVICE"
  local function near(a, b, what)
    local off = (a:to("cpu"):double() - b:to("cpu"):double()):abs():max():item()
    assert(off < 1e-8, what .. ": " .. off)
  end
  ps.manual_seed(70 + rank)
  local own = ps.randn({ 4, 3 * size }, { dtype = "fp64" })
  ps.manual_seed(50)
  local w = ps.randn({ 4, 3 * size }, { dtype = "fp64" })
  local function dims(d) return function(x) return group:gather_from(ps.F.tanh(group:scatter_to(x, d)) ^ 2, d) end end
  local compositions = {
    reduced = function(x) return group:reduce_from(ps.F.tanh(group:copy_to(x) * own)) end,
    last = dims(-1), first = dims(0), middle = function(x)
      return dims(1)(x:reshape(2, size, 6)):reshape(4, 3 * size)
    end,
    -- rows divided among ranks, products with a shard of the outputs, then of the inputs: a layer with sequence
    -- parallelism
    rows = function(x)
      local rows = group:scatter_to(x:t(), 0)                                          -- [3, 4]
      local y = group:scattered(ps.F.tanh(group:gathered_again(rows) * own:t()))
      return group:gather_from(rows * y, 0):t()
    end,
  }
  for _, name in ipairs { "reduced", "last", "first", "middle", "rows" } do
    local fn = compositions[name]
    ps.manual_seed(60)
    local x = ps.randn({ 4, 3 * size }, { dtype = "fp64" })
    if name == "first" then x, w = x:reshape(size, 12), w:reshape(size, 12) end
    local function loss(at) return (w * fn(at)):sum() end
    local leaf = x:clone():requires_grad(true)
    local value = loss(leaf)
    value:backward()
    near(group:broadcast(value:detach():clone(), 0), value, name .. " on rank 0")
    local grad = leaf:grad()
    near(group:broadcast(grad:clone(), 0), grad, name .. "'s gradient on rank 0")
    for i = 0, x:numel() - 1, 5 do
      local function moved(by)
        local y = x:to("cpu"):clone()
        y:reshape(-1)[i] = y:reshape(-1)[i]:item() + by
        return ps.no_grad(function() return loss(y:to("DEVICE")) end):item()
      end
      local slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
      local got = grad:reshape(-1)[i]:item()
      assert(math.abs(slope - got) < 1e-7, ("%%s: %%.10g, by differences %%.10g"):format(name, got, slope))
    end
    w = w:reshape(4, 3 * size)
  end
  -- values
  local x = ps.arange(0, 2 * size, 1, { dtype = "fp32" })
  assert(table.concat(group:scatter_to(x):tolist(), " ") == 2 * rank .. " " .. 2 * rank + 1)
  assert(table.concat(group:gather_from(group:scatter_to(x)):tolist(), " ") == table.concat(x:tolist(), " "))
  local cut = group:gather_from(ps.full({ 2, 1 }, rank))
  assert(cut:size(1) == size and cut[1][size - 1]:item() == size - 1)
  assert(group:reduce_from(ps.full({ 2 }, rank + 1)):tolist()[1] == size * (size + 1) / 2)
  local once = ps.ones({ 3 }):requires_grad(true)
  ;(group:counted_once(once) * 5):sum():backward()
  assert(once:grad():tolist()[3] == (rank == 0 and 5 or 0))
  for _, case in ipairs {
    { "cannot be cut", function() group:scatter_to(ps.ones { size + 1 }, 0) end },
    { "cannot be cut", function() group:scatter_to(ps.ones { 2, size + 1 }) end },
    { "2 dimensions", function() group:gather_from(ps.ones { 2, 2 }, 2) end },
    { "tensor", function() group:copy_to(3) end },
  } do
    local ok, why = pcall(case[2])
    assert(not ok and tostring(why):find(case[1]), tostring(why))
  end
  -- Returns the bytes sent, and the tensors that backward keeps. For tensors of 1 MiB and more these are only the
  -- shards, which are gathered again for dw.
  local function sent(gather)
    local rows = ps.full({ 400, 400 }, rank + 1):requires_grad(true)
    local weight = ps.ones({ 4, 400 }):requires_grad(true)
    local before = group:bytes_sent()
    ps.collect()
    local kept = ps.memory("DEVICE").used
    local y = ps.scope(function() return ps.F.linear(group[gather](group, rows), weight):sum() end)
    kept = ps.memory("DEVICE").used - kept
    y:backward()
    assert(weight:grad():tolist()[2][1] == 400 * size * (size + 1) / 2)
    assert(rows:grad():tolist()[1][1] == 4 * size)
    return (group:bytes_sent() - before) / rows:nbytes(), kept / rows:nbytes()
  end
  local again, kept_again = sent "gathered_again"
  local plain, kept = sent "gathered"
  assert(again == 3 * (size - 1) and plain == 2 * (size - 1), again .. " " .. plain)
  assert(kept_again < 0.1 and kept > size - 0.1, kept_again .. " " .. kept)
  print "done"
]]

describe("collectives as ops", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  for _, device in ipairs { "cpu", "sim", "cuda" } do
    it("have the right values and gradients on " .. device, function()
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

    it("have the values and gradients of whole layers in layers divided among ranks on " .. device, function()
      local env = device == "cuda" and lib.emulated() or nil
      if device == "cuda" and not env then return pending(lib.NO_EMULATED) end
      for _, size in ipairs(device == "cpu" and { 2, 3 } or { 2 }) do
        local all = lib.run(folder, size, PARTS:format(folder):gsub("DEVICE", device), env)
        for rank = 0, size - 1 do
          assert(all[rank].code == 0 and all[rank].text:find("done", 1, true), all[rank].text)
        end
      end
    end)
  end
end)
