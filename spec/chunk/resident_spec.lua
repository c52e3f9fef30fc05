-- SPDX-License-Identifier: BSD-3-Clause
-- Chunks that live on the first tier alone, because the last one has no room for all (src/chunk/resident.c): device
-- and host, or host and disk, hold the state together. Values are plain memory's, bit for bit; what does not fit is
-- refused before the step.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local ffi = require "ffi"
local gpt2 = require "models.gpt2"
local checkpoints = require "ps.checkpoints"
local lib = require "spec.ranks_lib"
local check = require "spec.check_lib"
local L = dofile(require("ps.paths").root .. "/spec/chunks_lib.lua")
local C, fails, bytes = ps.C, check.fails, check.bytes

local SEEDS = os.getenv("PS_FULL") == "1" and 200 or 32
local KIB, MIB = 1024, 2 ^ 20
local folder

L.scratch({ setup = setup, teardown = teardown }, function(path) folder = path end)

describe("budgets that hold the state only together", function()
  local stayed = 0
  for first = 1, SEEDS, 8 do
    it(("give plain memory's bits: seeds %d to %d"):format(first, first + 7), function()
      for seed = first, first + 7 do
        local case = L.case(seed)
        local plain, setting = L.run(case, { memory = "plain" }), L.scarce(case, L.random(seed + 500), folder)
        local ok, result, refusals = pcall(L.run_fitting, case, setting)
        local problem = not ok and tostring(result) or L.difference(plain, result)
        if problem then
          error(("%s\ncase    %s\nsetting %s"):format(problem, L.text(case), L.text(setting)), 0)
        end
        if result.resident > 0 then stayed = stayed + 1 end
        -- With less memory, the kernels' workspace exceeds what plans reserve for it.
        local roomy = (setting.memory.device or setting.memory.host) >= 512 * KIB
        if roomy and not case.recompute and case.model ~= "asking" and case.model ~= "changing" then
          for _, text in ipairs(refusals) do
            if text:find "^in backward" then
              error(("a planned step was refused: %s\ncase    %s\nsetting %s"):format(text, L.text(case),
                L.text(setting)), 0)
            end
          end
        end
      end
    end)
  end
  it("had resident chunks in many of these runs", function() assert.truthy(stayed > SEEDS / 3, stayed) end)
end)

describe("a model that neither the device nor the host holds", function()
  local layers, width = 8, 96

  local function make()
    return gpt2.new("tiny", { n_layer = layers, n_embd = width, n_head = 4, n_positions = 32, vocab_size = 256 })
  end

  local function open(memory, changes)
    ps.manual_seed(7)
    local config = { optimizer = { type = "AdamW", params = { lr = 1e-2, weight_decay = 0.1 } }, plan_print = false,
      bf16 = { enabled = true }, memory = memory }
    for key, value in pairs(changes or { device = "sim" }) do config[key] = value end
    return ps.initialize { model_func = make, config = config, quiet = true }
  end

  -- Runs steps `first` to `last`. Returns the losses as bytes.
  local function steps(model, optimizer, first, last)
    local losses = {}
    for step = first, last do
      ps.manual_seed(100 + step)
      local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
      optimizer:zero_grad()
      local loss = model(x, x)
      model:backward(loss)
      optimizer:step()
      losses[step] = bytes(loss)
    end
    return losses
  end

  local function values(model)
    local all = {}
    for name, t in pairs(model:state_dict()) do all[name] = bytes(t) end
    return all
  end

  local plain

  setup(function()
    local model, optimizer = open("plain", {})
    plain = { losses = steps(model, optimizer, 1, 6), values = values(model), state = 14 * model:num_parameters() }
    model:close()
    ps.collect()
  end)

  --- Trains six steps. Returns the forecast of a step, and the number of chunks fetched without a plan in the last two
  --- steps.
  local function train(memory, changes)
    local model, optimizer = open(memory, changes)
    local seen = {}
    local ok, problem = pcall(function()
      local losses = steps(model, optimizer, 1, 4)
      local stats = ffi.new("ps_engine_stats")
      ps.check(C.ps_engine_stats_get(ps.ctx, stats))
      local unplanned = tonumber(stats.unplanned)
      for step, loss in pairs(steps(model, optimizer, 5, 6)) do losses[step] = loss end
      ps.check(C.ps_engine_stats_get(ps.ctx, stats))
      seen.unplanned, seen.forecast = tonumber(stats.unplanned) - unplanned, inner(model).plan.forecast
      assert.same(plain.losses, losses)
      assert.same(plain.values, values(model))
      L.check_tiers { memory = memory }
    end)
    model:close()
    if not ok then error(problem, 0) end
    return seen
  end

  for _, shares in ipairs { { 0.75, 0.5 }, { 0.5, 0.75 }, { 0.95, 0.35 } } do
    it(("trains with %g of its state on the device and %g on the host"):format(shares[1], shares[2]), function()
      local s = plain.state
      local seen = train { device = s * shares[1] + MIB, host = s * shares[2] + 512 * KIB }
      assert.truthy(seen.forecast.resident > 0.2 * s)
      if os.getenv "PS_STRESS" ~= "1" then assert.equal(0, seen.unplanned) end
    end)
  end

  it("trains with a part of its state on the host and a part on the disk", function()
    local s = plain.state
    local seen = train({ host = 0.8 * s + MIB, disk = { path = folder, limit = 0.45 * s + MIB } }, { device = "cpu" })
    assert.truthy(seen.forecast.resident > 0.2 * s)
  end)

  it("saves, evaluates and continues from a checkpoint within the same budgets", function()
    local memory = { device = 0.75 * plain.state + MIB, host = 0.5 * plain.state + 512 * KIB }
    local path = folder .. "/saved.safetensors"
    local model, optimizer = open(memory)
    local losses = steps(model, optimizer, 1, 3)
    checkpoints.save(path, { model = model, optimizer = optimizer })
    model:eval()
    local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
    ps.no_grad(model, x, x)
    model:train()
    for step, loss in pairs(steps(model, optimizer, 4, 6)) do losses[step] = loss end
    assert.same(plain.losses, losses)
    assert.same(plain.values, values(model))
    model:close()
    model, optimizer = open(memory)
    checkpoints.load(path, { model = model, optimizer = optimizer })
    for step, loss in pairs(steps(model, optimizer, 4, 6)) do assert(loss == plain.losses[step], "step " .. step) end
    assert.same(plain.values, values(model))
    L.check_tiers { memory = memory }
    model:close()
  end)

  it("is refused before the step if the budgets together are too small, or too few chunks may stay", function()
    local s = plain.state
    local function refused(memory, changes, ...)
      local model, optimizer = open(memory, changes)
      fails(function() steps(model, optimizer, 1, 1) end, ...)
      model:close()
    end
    refused({ device = 0.45 * s + MIB, host = 0.5 * s + 512 * KIB }, nil, "the step does not fit", "memory.device")
    refused({ device = 0.75 * s + MIB, host = 0.5 * s + 512 * KIB },
      { device = "sim", zero_optimization = { stage = 0, offload_optimizer = { device = "cpu", ratio = 1 } } },
      "all chunks have", "tier host has room for", "offload_optimizer.ratio")
  end)
end)

describe("ranks whose budgets hold their part of the state only together", function()
  it("train to the same losses at every stage", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    lib.check(folder, 2, lib.LOSSES .. [[
      local gpt2 = require "models.gpt2"
      local size = { n_layer = 6, n_embd = 96, n_head = 4, n_positions = 32, vocab_size = 256 }
      local want
      for stage = 0, 3 do
        for _, scarce in ipairs(want and { true } or { false, true }) do
          ps.manual_seed(4)
          local memory = not scarce and { device = "64MiB", host = "64MiB" }
            or stage == 0 and { device = "9MiB", host = "6MiB" }
            or { device = "6MiB", host = stage == 3 and "3500KiB" or "4500KiB" }
          local model, optimizer = ps.initialize { quiet = true, model_func = function()
            return gpt2.new("tiny", size)
          end, config = { plan_print = false, bf16 = { enabled = true }, device = "sim", memory = memory,
            zero_optimization = { stage = stage }, optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
          local seen = losses(model, optimizer, 3, 256, { 2, 16 })
          want = want or seen
          assert(seen == want, "stage " .. stage)
          local resident = require("ps.nn.handle").of(model).plan.forecast.resident
          if scarce then assert(resident > 2 ^ 19, ("stage %d: %d"):format(stage, resident)) end
          model:close()
          collectgarbage()
          collectgarbage()
        end
      end
    ]])
  end)
end)
