-- SPDX-License-Identifier: BSD-3-Clause
-- Scripts that do more than the usual loop (spec/mix_lib.lua), drawn by seed, over plain memory and over chunks, with
-- the same numbers; and a test for each defect that was found in this way. PS_MIX_SEED=n runs only one
-- seed.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local nn = require "ps.nn"
local forecasts = require "ps.engine.plan.forecast"
local ranks_lib = require "spec.ranks_lib"
local M = dofile(require("ps.paths").root .. "/spec/mix_lib.lua")
local L = M.L

local ONLY = tonumber(os.getenv "PS_MIX_SEED" or "")
local SEEDS = os.getenv "PS_FULL" == "1" and 300 or 12
local KIB = 1024
local folder

L.scratch({ setup = setup, teardown = teardown }, function(path) folder = path end)

describe("scripts that do more than the usual loop", function()
  local stayed = 0
  local function same(seed)
    local case, drawn, settings = M.draw(seed, folder)
    local cpu, sim = L.used()
    local function compare()
      local ok, result = pcall(M.run_fitting, case, drawn, settings, folder .. "/chunks")
      if not ok then return tostring(result) end
      stayed = stayed + (result.resident > 0 and 1 or 0)
      return L.difference(M.run_plain(case, drawn, settings, folder .. "/plain"), result)
    end
    local problem = compare()
    local here = ("\nseed %d\ncase %s\nplan %s\nsettings %s"):format(seed, L.text(case), L.text(drawn),
      L.text(settings))
    if problem then error(problem .. here, 0) end
    local cpu_after, sim_after = L.used()
    if cpu_after > cpu + 4 * KIB or sim_after > sim then
      error(("%d bytes of cpu and %d of sim are still in use"):format(cpu_after - cpu, sim_after - sim) .. here, 0)
    end
    assert.equal(0, L.entries(folder))
  end
  if ONLY then
    it("have plain memory's numbers: seed " .. ONLY, function() same(ONLY) end)
    return
  end
  for first = 1, SEEDS, 6 do
    it(("have plain memory's numbers: seeds %d to %d"):format(first, first + 5), function()
      for seed = first, first + 5 do same(seed) end
    end)
  end
  it("had resident chunks in some of these runs", function() assert.truthy(stayed > 0) end)
end)

describe("a step", function()
  local x, y
  local PLAIN, CHUNKS = { memory = "plain" }, { memory = {}, overlap = false }

  setup(function() x, y = ps.randn { 4, 16 }, ps.randint(0, 8, { 4 }, { dtype = "int32" }) end)
  teardown(function() x, y = nil, nil end)
  after_each(L.close_engine)

  -- Calls `script` twice. Returns its output, and the model's and optimizer's values after the second call.
  local function run(case, setting, script)
    ps.manual_seed(case.seed)
    local model, optimizer = ps.initialize(L.request(case, setting))
    local result = { out = {} }
    script(model, optimizer, result.out)
    script(model, optimizer, result.out)
    result.state = L.state(model, optimizer)
    model:close()
    return result
  end

  local function same(case, script, other)
    local want = run(case, PLAIN, other or script)
    for _, setting in ipairs { PLAIN, CHUNKS, { memory = {}, overlap = false, device = "sim" } } do
      assert.is_nil(L.difference(want, run(case, setting, script)))
    end
    return want
  end

  -- Returns y with few targets that are not ignored.
  local function few() return ps.cat({ y:narrow(0, 0, 1), ps.full({ 3 }, -100, { dtype = "int32" }) }, 0) end

  local function tokens(count)
    local ids = ps.randint(0, 65, { 2, 12 }, { dtype = "int32" })
    local targets = ids:clone()
    for i = count, 23 do targets[{ math.floor(i / 12), i % 12 }] = -100 end
    return ids, targets
  end

  local GPT = { model = "gpt2", accumulate = 2, dropout = 0, n_layer = 1, n_embd = 16, vocab = 65 }

  it("weights a micro-batch by its own targets, in any mode and with evaluations in between", function()
    local function script(evaluates, trains)
      return function(model, optimizer, out)
        for micro = 1, 2 do
          ps.manual_seed(micro)
          local ids, targets = tokens(micro == 1 and 24 or 3)
          model:train(trains)
          local loss = model(ids, targets)
          if evaluates then
            model:eval()
            ps.no_grad(model, tokens(10))
            model(tokens(7))                                 -- a forward that keeps a graph
          end
          model:train()
          out[#out + 1] = ("%.17g"):format(loss:item())
          model:backward(loss)
          optimizer:step()
          ps.manual_seed(9)
        end
      end
    end
    local case = L.small(GPT)
    local want = same(case, script(false, true))
    assert.is_nil(L.difference(want, same(case, script(true, true))))
    assert.is_nil(L.difference(want, same(case, script(false, false))))
  end)

  it("in evaluation mode trains from values written before it, and its state can be read after backward", function()
    local function script(model, optimizer, out)
      ps.no_grad(function() model.module.first.weight:mul_(0.5) end)
      model:eval()
      local loss = model(x, y)
      model:train()
      model:backward(loss)
      out[#out + 1] = L.bytes(model:state_dict()["first.weight"])
      optimizer:step()
    end
    same(L.small(), script)
  end)

  it("uses no random numbers for a forward that failed or was not used", function()
    local function usual(model, optimizer)
      model:backward(model(x, y))
      optimizer:step()
    end
    local function failing(model, optimizer)
      model(x, y)
      optimizer:zero_grad()
      local last = model.module.last
      rawset(last, "forward", function() error("no", 0) end)
      assert(not pcall(model, x, y))
      rawset(last, "forward", nil)
      model:backward(model(x, y))
      optimizer:zero_grad()
      usual(model, optimizer)
    end
    same(L.small { dropout = 0.5 }, failing, usual)
  end)

  it("may run backward through tensors recorded before it was planned", function()
    same(L.small { dropout = 0 }, function(model, optimizer)
      local device = inner(model).device_name
      local loss = model.module(x:to(device), y:to(device))
      model:backward(loss + model(x, y))
      optimizer:step()
    end)
  end)

  it("counts the same micro-batches, the first of them in evaluation mode", function()
    same(L.small { accumulate = 2, dropout = 0 }, function(model, optimizer)
      for micro = 1, 2 do
        model:train(micro == 2)
        model:backward(model(x, few()))
        optimizer:step()
      end
    end)
  end)

  it("can repeat dry runs more often than traces are kept", function()
    local model = ps.initialize(L.request(L.small(), CHUNKS))
    local first = assert(forecasts.dry_run(inner(model), { x, y, n = 2 }))
    for _ = 1, 40 do assert.truthy(forecasts.dry_run(inner(model), { x, y, n = 2 }, first) ~= first) end
    model:close()
  end)
end)

describe("state on a device", function()
  after_each(L.close_engine)

  it("accepts tensors of the host: buffers, frozen parameters, averages, a model without an engine", function()
    for _, memory in ipairs { "plain", { device = 400 * KIB, host = 400 * KIB } } do
      for _, precision in ipairs { "fp32", "bf16" } do
        ps.manual_seed(3)
        local case = L.small { model = "frozen", precision = precision }
        local model, optimizer = ps.initialize(L.request(case, { memory = memory, device = "sim" }))
        local x, y = ps.randn { 4, 16 }, ps.randint(0, 8, { 4 }, { dtype = "int32" })
        model:backward(model(x, y))
        optimizer:step()
        local want = L.state(model, optimizer)
        ps.save(model:state_dict(), folder .. "/model.pt")
        ps.save(optimizer:state_dict(), folder .. "/optimizer.pt")
        model:backward(model(x, y))
        optimizer:step()
        model:load_state_dict(ps.load(folder .. "/model.pt"))
        optimizer:load_state_dict(ps.load(folder .. "/optimizer.pt"))
        local now = L.state(model, optimizer)
        want.rng, now.rng = nil, nil
        assert.is_nil(L.difference({ out = {}, state = want }, { out = {}, state = now }))
        model:close()
      end
    end
    local there = nn.Linear(4, 4, { device = "sim" })
    there:load_state_dict { weight = ps.ones { 4, 4 }, bias = ps.ones { 4 } }
    assert.equal(16, there.weight:to("cpu"):sum():item())
    for _, name in ipairs { "model", "optimizer" } do os.remove(folder .. "/" .. name .. ".pt") end
  end)
end)

describe("ranks", function()
  if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end

  it("reduce in the same order, whatever garbage each has", function()
    ranks_lib.check(folder, 2, [[
      local gpt2 = require "models.gpt2"
      collectgarbage "stop"
      for stage = 0, 3 do
        local model, optimizer = ps.initialize { quiet = true, model_func = function()
          return gpt2.new("tiny", { dropout = 0, recompute = stage % 2 == 1 })
        end, config = { plan_print = false, chunk_size = 4096, bf16 = { enabled = true }, overlap_optimizer = true,
          zero_optimization = { stage = stage } } }
        for step = 1, 3 do
          local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
          for _, p in ipairs(model:parameters()) do (p * p):to("fp64"):sum():item() end      -- recorded and dropped
          model(x, x)
          local loss = model(x, x)
          if rank == 0 then
            collectgarbage()
            collectgarbage()
          end
          model:backward(loss)
          optimizer:step()
        end
        model:close()
      end
    ]])
  end)

  it("may use parameters more often in a step than in the previous one", function()
    ranks_lib.check(folder, 2, [[
      local Two = nn.class("Two")
      function Two:init()
        self.trunk, self.out = nn.Linear(48, 48), nn.Linear(48, 48)
        self.heads = nn.ModuleList { nn.Linear(48, 48), nn.Linear(48, 48) }
      end
      function Two:forward(x, head)
        return self.out(ps.F.tanh(self.heads[head](self.trunk(x)))):to("fp32"):pow(2):mean()
      end
      local want
      for stage = 0, 3 do
        ps.manual_seed(4)
        local model, optimizer = ps.initialize { quiet = true, model_func = function() return Two() end,
          config = { plan_print = false, chunk_size = 20000, bf16 = { enabled = true },
            zero_optimization = { stage = stage } } }
        ps.manual_seed(9 + rank)
        local seen = {}
        for step = 1, 6 do
          local x = ps.randn({ 4, 48 }, { dtype = "bf16" })
          local loss = model(x, step % 2)
          if step ~= 4 then loss = loss + model(x, 1) end
          seen[step] = ("%.17g"):format(loss:item())
          model:backward(loss)
          optimizer:step()
        end
        want = want or table.concat(seen, " ")
        assert(table.concat(seen, " ") == want, ("stage %d: %s, not %s"):format(stage, table.concat(seen, " "), want))
        model:close()
      end
    ]])
  end)
end)
