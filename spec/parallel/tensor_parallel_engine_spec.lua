-- SPDX-License-Identifier: BSD-3-Clause
-- The engine with ranks that share layers: gradients, the norm, and the checks between ranks, for a model whose
-- parameters describe by themselves how ranks share them.
local lib = require "spec.ranks_lib"

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- The model is created with its shards, in place of one that is sharded by a table. A rank's gradient is x for `whole`
-- and `piece`, and (1 + its tp rank) times x for `part`.
local MODEL = [[
  local mesh, shard, nn = ps.mesh { tp = 2 }, require "ps.tensor.shard", ps.nn
  local tp, dp = mesh.rank "tp", mesh.rank "dp"
  local Three = nn.class("Three")
  function Three:init()
    self.whole = nn.Parameter(ps.ones { 64 })
    self.piece = shard.set(nn.Parameter(ps.full({ 64 }, 1 + tp)), shard.new { dim = 0, index = tp, count = 2,
      full_shape = { 128 } })
    self.part = shard.set_partial(nn.Parameter(ps.ones { 64 }))
  end
  local without, exchange = false, function(x) return x end
  function Three:forward(x)
    x = exchange(x)
    local loss = (x * self.whole + x * self.piece):sum()
    if without then return loss end
    return loss + (x * self.part * (1 + tp)):sum()
  end
  local cut, hooks = require "ps.parallel.tensor.cut", require "ps.core.hooks"
  function cut.make(model_func, _, where)
    local off = hooks.on("parameter", where.stage)
    local model = model_func()
    off()
    return model, nn.Region.new(mesh.group "tp", false, false)
  end
  local function start(more)
    local config = { plan_print = false, overlap_optimizer = false, gradient_clipping = 1e9,
      optimizer = { type = "AdamW", params = { lr = 1, eps = 1, weight_decay = 0 } } }
    for key, value in pairs(more) do config[key] = value end
    return ps.initialize { quiet = true, config = config, model_func = function() return Three() end }
  end
]]

local function run(size, body) return lib.check(folder, size, MODEL .. body) end

-- Checks that each rank printed these words. If `last` is given, they must be after that line and before `beyond`.
local function all_say(all, words, last, beyond)
  for rank = 0, #all do
    local text = all[rank].text
    assert.truthy(text:find(words, 1, true), text)
    if last then assert.truthy(text:find(last .. "\n", 1, true) and not text:find(beyond, 1, true), text) end
  end
end

describe("an engine on ranks with parts of the same layers", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("sums partial gradients, and counts each parameter once, at all stages of ZeRO", function()
    local all = run(4, [[
      for stage = 0, 3 do
        for _, bf16 in ipairs { false, true } do
          local model, optimizer = start { zero_optimization = { stage = stage }, bf16 = { enabled = bf16 } }
          model:backward(model(ps.full({ 64 }, 1 + 2 * dp)))
          local info = optimizer:step()
          -- Gradients are means over dp. x is 2 on average, and addends are 1 and 2 times x.
          local want = math.sqrt(64 * 2 ^ 2 + 128 * 2 ^ 2 + 64 * 6 ^ 2)
          assert(math.abs(info.grad_norm / want - 1) < 1e-12, info.grad_norm .. " " .. want)
          -- The first update is g / (|g| + eps).
          for name, t in pairs(model:state_dict()) do
            local value = ({ whole = 1 - 2 / 3, piece = 1 + tp - 2 / 3, part = 1 - 6 / 7 })[name]
            assert((t - value):abs():max():item() < 1e-6, name .. " " .. t:max():item())
          end
          model:close()
        end
      end
      print "done: "
    ]])
    all_say(all, "done")
  end)

  it("begins with the values of the first rank", function()
    local all = run(2, [[
      local model = start {}
      model:close()
      function Three:init()
        self.whole = nn.Parameter(ps.full({ 64 }, 5 + tp))
        self.piece = shard.set(nn.Parameter(ps.full({ 64 }, 7 + tp)), shard.new { dim = 0, index = tp, count = 2,
          full_shape = { 128 } })
        self.part = shard.set_partial(nn.Parameter(ps.full({ 64 }, 9 + tp)))
      end
      local state = start {}:state_dict()
      print(("values: %d %d %d"):format(state.whole:max():item(), state.piece:max():item(), state.part:max():item()))
    ]])
    assert.truthy(all[0].text:find("values: 5 7 9", 1, true), all[0].text)
    assert.truthy(all[1].text:find("values: 5 8 9", 1, true), all[1].text)
  end)

  it("detects that a rank got another batch, in any micro-batch", function()
    local all = run(4, [[
      local model, optimizer = start { gradient_accumulation_steps = 2 }
      local ok, problem = pcall(function()
        for i = 0, 7 do
          model:backward(model(ps.full({ 64 }, rank == 3 and i == 5 and 8 or dp)))
          if i % 2 == 1 then optimizer:step() end
          print("micro-batch " .. i)
        end
      end)
      print("problem: " .. tostring(not ok and problem))
    ]])
    all_say(all, "rank 3 has a different batch, or different weights of losses, from rank 2, but both have parts of "
      .. "one model", "micro-batch 5", "micro-batch 6")
  end)

  it("detects at the next step that a rank weighted a loss differently", function()
    local all = run(4, [[
      local model, optimizer = start { gradient_accumulation_steps = 2 }
      local ok, problem = pcall(function()
        for i = 0, 7 do
          model:backward(model(ps.full({ 64 }, dp)), { weight = rank == 1 and i == 3 and 2 or 1 })
          if i % 2 == 1 then optimizer:step() end
          print("micro-batch " .. i)
        end
      end)
      print("problem: " .. tostring(not ok and problem))
    ]])
    all_say(all, "rank 1 has a different batch, or different weights of losses, from rank 0", "micro-batch 3",
      "micro-batch 4")
  end)

  it("detects that a rank froze a parameter of which all have a copy", function()
    local all = run(2, [[
      local model, optimizer = start {}
      local ok, problem = pcall(function()
        for i = 0, 3 do
          model:backward(model(ps.ones { 64 }))
          optimizer:step()
          print("step " .. i)
          if rank == 1 and i == 1 then model.whole:requires_grad(false) end
        end
      end)
      print("problem: " .. tostring(not ok and problem))
    ]])
    all_say(all, "other frozen parameters, than rank 0", "step 1", "step 2")
  end)

  it("detects that a rank has no gradient of a parameter", function()
    local all = run(2, [[
      local model = start {}
      without = rank == 1
      local ok, problem = pcall(function() model:backward(model(ps.ones { 64 })) end)
      print("problem: " .. tostring(not ok and problem))
    ]])
    for rank = 0, 1 do
      local text = all[rank].text
      assert.truthy(text:find("1 of the 2 tensor-parallel ranks have a gradient of parameter 2", 1, true), text)
      assert.truthy(text:find("without a gradient on rank " .. rank .. ": " .. (rank == 1 and "part" or "none"), 1,
        true), text)
    end
  end)

  it("makes the calls of a step as its dry run planned them, and others in addition", function()
    local all = run(4, [[
      local group, calls, own = mesh.group "tp", 0, false
      function exchange(x)
        x = group:reduce_from(x)
        if own then calls = calls + group:all_reduce(ps.ones { 1 }):item() end
        return group:reduce_from(group:gathered(x):narrow(0, 0, 64))
      end
      local function train(micros)
        local model, optimizer = start { gradient_accumulation_steps = micros }
        for step = 1, 2 do
          local before = tonumber(ps.C.ps_group_planned(group.c))
          for i = 1, micros do model:backward(model(ps.full({ 64 }, 1 + dp))) end
          own = step == 1                           -- the second step has no dry run, and its own calls
          optimizer:step()
          -- three calls per forward; addends and squares
          assert(tonumber(ps.C.ps_group_planned(group.c)) - before == 3 * micros + 2, "calls by plan")
        end
        local values = model:state_dict().whole:tolist()
        own = false
        model:close()
        return values
      end
      local plain = train(2)
      assert(calls == 4, calls)
      print("value " .. plain[1])
    ]])
    for rank = 1, 3 do assert.equals(all[0].text:match "value %S+", all[rank].text:match "value %S+") end
  end)

  it("names ranks that plan other calls, before the step's first forward", function()
    local all = run(4, [[
      local group = mesh.group "tp"
      function exchange(x)
        x = group:reduce_from(x)
        return rank == 3 and group:reduce_from(x * 0.5) or group:gathered(x):narrow(0, 0, 64)
      end
      local model = start {}
      local ok, problem = pcall(function() return model(ps.ones { 64 }) end)
      print("problem: " .. tostring(not ok and problem))
    ]])
    all_say(all, "the ranks of tp plan different calls: the first difference is call 2 of the step: rank 2 plans "
      .. "all_gather (call 1, fp32, 256 bytes), rank 3 all_reduce (call 1, fp32, 256 bytes)")
  end)

  it("names ranks that deviate from their plan", function()
    local all = run(2, [[
      local group, real = mesh.group "tp", false
      function exchange(x)
        if real and rank == 1 then return group:gathered(x):narrow(0, 0, 64) end
        return group:reduce_from(x)
      end
      local model, optimizer = start {}
      model:backward(model(ps.ones { 64 }))
      optimizer:step()
      real = true
      local ok, problem = pcall(function() return model(ps.ones { 64 }) end)
      print("problem: " .. tostring(not ok and problem))
    ]])
    all_say(all, "the ranks of tp disagree: rank 0 is in all_reduce")
    all_say(all, "rank 1 in all_gather")
  end)

  for _, stage in ipairs { 0, 3 } do
    it("detects that a copy of a parameter drifted, at stage " .. stage, function()
      local all = run(4, ([[
        local stage = %d
        local model, optimizer = start { compare_ranks_every = 2, zero_optimization = { stage = stage } }
        local ok, problem = pcall(function()
          for step = 1, 4 do
            model:backward(model(ps.ones { 64 }))
            optimizer:step()
            local own = model:state_dict().whole
            if step == 3 and tp == 1 and (dp == 1 or stage == 3) and own then
              ps.no_grad(function() own:narrow(0, 7, 1):add_(1) end)
            end
            print("step " .. step)
          end
        end)
        print("problem: " .. tostring(not ok and problem))
      ]]):format(stage))
      all_say(all, "states differ after step 4: parameter whole of rank", "step 3", "step 4\n")
    end)
  end
end)
