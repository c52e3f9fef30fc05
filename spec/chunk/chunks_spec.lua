-- SPDX-License-Identifier: BSD-3-Clause
-- The engine is exact: cases drawn by seed, each trained over plain memory once and then over chunks under settings
-- drawn for it, with the same losses, norms, texts, parameters and optimizer state, bit for bit. A failure prints case
-- and setting; PS_CHUNKS_SEED=n runs that one alone. PS_CHUNKS_CASES=n runs the seeds 1 to n (default: 48).
local ps = require "ps"
local inner = require("ps.nn.handle").of
local gpt2 = require "models.gpt2"
local check_lib = require "spec.check_lib"
local L = dofile((arg[0]:match("^(.*)/[^/]*$") or ".") .. "/chunks_lib.lua")

local CASES = tonumber(os.getenv("PS_CHUNKS_CASES") or "") or check_lib.lower_set and 16 or 48
local PER_CASE = 3
-- Several micro-batches per step in budgets that they barely fit: {seed, settings}. These planned steps used to fail
-- halfway.
local TIGHT = { { 1008, 4 }, { 1096, 2 }, { 1289, 1 }, { 1376, 6 } }
local ONLY = tonumber(os.getenv("PS_CHUNKS_SEED") or "")

local folder

-- If its first step was planned, a step must not fail halfway. (With recompute, many small tensors live during backward
-- until Lua's collector runs. Their pages of 4 KiB need more memory than a plan of 600 KiB leaves.)
local function check_refusals(case, refusals)
  if case.recompute or case.model == "asking" or case.model == "changing" then return end
  for _, text in ipairs(refusals) do
    if text:find("^in backward") then error("a planned step was refused: " .. text .. "\ncase " .. L.text(case), 0) end
  end
end

local function compare(case, plain, setting)
  local ok, result, refusals = pcall(L.run_fitting, case, setting)
  local problem = not ok and tostring(result) or L.difference(plain, result)
  if problem then
    error(("%s\ncase    %s\nsetting %s"):format(problem, L.text(case), L.text(setting)), 0)
  end
  check_refusals(case, refusals)
  return result
end

local function same_under_settings(seed, count)
  local case = L.case(seed)
  local cpu, sim = L.used()
  local plain = L.run(case, { memory = "plain" })
  local r, moved = L.random(seed + 1000), 0
  for _ = 1, count do
    local result = compare(case, plain, L.setting(case, r, folder))
    if result.moved > 0 then moved = moved + 1 end
  end
  local cpu_after, sim_after = L.used()
  if cpu_after > cpu or sim_after > sim then
    error(("%d bytes of cpu and %d of sim are still in use after case %s"):format(cpu_after - cpu, sim_after - sim,
      L.text(case)), 0)
  end
  return moved
end

describe("chunks", function()
  L.scratch({ setup = setup, teardown = teardown }, function(path) folder = path end)
  after_each(function() assert.equal(0, L.entries(folder)) end)

  if ONLY then
    it("give plain memory's bits: seed " .. ONLY, function() same_under_settings(ONLY, 8) end)
    return
  end

  local moved = 0
  for first = 1, CASES, 8 do
    it(("give plain memory's bits: seeds %d to %d"):format(first, first + 7), function()
      for seed = first, first + 7 do moved = moved + same_under_settings(seed, PER_CASE) end
    end)
  end
  for _, tight in ipairs(TIGHT) do
    it("are refused before a step or not at all: seed " .. tight[1], function() same_under_settings(unpack(tight)) end)
  end
  -- Budgets that grow from far too small. The first accepted budget must be the smallest one that a plan accepts.
  it("are refused before a step or not at all, in the smallest budgets that a plan allows", function()
    local refused = 0
    for seed = 401, 408 do
      local case = L.case(seed)
      local plain, setting = L.run(case, { memory = "plain" }), L.setting(case, L.random(seed), folder)
      for _, tier in ipairs { "device", "host" } do
        local budget = setting.memory[tier]
        if budget then setting.memory[tier] = math.floor(budget * 0.3 / 1024) * 1024 end
      end
      local _, refusals = L.run_fitting(case, { memory = setting.memory, device = setting.device })
      refused = refused + #refusals
      compare(case, plain, setting)
      check_refusals(case, refusals)
    end
    assert.truthy(refused > 8, refused)
  end)

  it("moved in a good share of these runs", function() assert.truthy(moved > CASES * PER_CASE / 3, moved) end)

  it("give the same bits if every pin moves chunks and the memory that they leave is overwritten", function()
    local first, last = 101, check_lib.lower_set and 108 or 124
    local out, code = L.child(([[
      local bad, moved = 0, 0
      for seed = %d, %d do
        local case = L.case(seed)
        local plain = L.run(case, { memory = "plain" })
        local setting = L.setting(case, L.random(seed), %q)
        local ok, result = pcall(L.run_fitting, case, setting)
        local problem = not ok and tostring(result) or L.difference(plain, result)
        if problem then
          bad = bad + 1
          print(problem, L.text(case), L.text(setting))
        else
          moved = moved + (result.moved > 0 and 1 or 0)
        end
      end
      print(bad .. " bad", moved > %d)
    ]]):format(first, last, folder, (last - first) / 3), "PS_STRESS=1 OMP_NUM_THREADS=1")
    assert.equal(0, code, out)
    assert.equal("0 bad\ttrue\n", out)
  end)

  it("give the same bits on a device with little memory, and with plain threads for the disk", function()
    local out, code = L.child(([[
      for seed = 201, 208 do
        local case = L.case(seed)
        local plain = L.run(case, { memory = "plain" })
        local setting = L.setting(case, L.random(seed), %q)
        setting.device, setting.memory.device = "sim", nil
        local result = L.run_fitting(case, setting)
        local problem = L.difference(plain, result)
        if problem then print(problem, L.text(case), L.text(setting)) end
      end
      print "done"
    ]]):format(folder), "PS_SIM_MEMORY=6MiB PS_SIM_LATENCY=50 PS_SIM_BANDWIDTH=1 PS_DISK_THREADS=2 OMP_NUM_THREADS=1")
    assert.equal(0, code, out)
    assert.equal("done\n", out)
  end)

  local function named(name, changes)
    local case = { seed = 7, model = name, steps = 4, precision = "bf16", accumulate = 1, optimizer = "AdamW",
      weight_decay = 0.1, groups = "none", dropout = 0.1, look = "never", rows = { 4 }, lengths = { 12 }, n_layer = 2,
      n_embd = 32, vocab = 130 }
    for key, value in pairs(changes or {}) do case[key] = value end
    return case
  end

  it("hold a parameter that is larger than a chunk, under every policy", function()
    local case = named("large", { clip = 1 })
    local plain = L.run(case, { memory = "plain" })
    for _, eviction in ipairs(require "ps.config.policies") do
      for _, device in ipairs { "cpu", "sim" } do
        compare(case, plain, { eviction = eviction, device = device, chunk_size = 1024, overlap = false,
          memory = { device = device == "sim" and 300 * 1024 or nil, host = 400 * 1024,
            disk = { path = folder, limit = 2 ^ 21 } } })
      end
    end
  end)

  -- Most of the other tensors are activations. They are freed before Adam runs, which needs the most chunks at once.
  it("get the room that other tensors leave at an op's moment if they need it, under every policy", function()
    local case = named("large", { rows = { 64 }, clip = 1 })
    local plain = L.run(case, { memory = "plain" })
    local setting = { chunk_size = 1024, overlap = false,
      memory = { host = 100 * 1024, disk = { path = folder, limit = 2 ^ 21 } } }
    L.fit(setting, function() L.run(case, setting) end)
    while pcall(L.run, case, setting) do setting.memory.host = setting.memory.host - 4096 end
    setting.memory.host = setting.memory.host + 4096
    for _, eviction in ipairs(require "ps.config.policies") do
      setting.eviction = eviction
      local forecast = compare(case, plain, setting).forecast
      assert.equal("host", forecast.short.tier)
      assert.truthy(setting.memory.host < forecast.short.wanted + forecast.tiers[1].other, setting.memory.host)
    end
  end)

  local function page_faults()
    local f = assert(io.open("/proc/self/stat"))
    local fields = f:read("*a"):match("%) (.*)$")
    f:close()
    local n, faults = 0, nil
    for word in fields:gmatch("%S+") do
      n = n + 1
      if n == 8 then faults = tonumber(word) end
    end
    return faults
  end

  it("leave other tensors their memory if taking it would not make room", function()
    local why = check_lib.sanitized()
    if why then return pending(why) end
    local model, optimizer = ps.initialize { quiet = true, model_func = function()
      return gpt2.new("tiny", { n_layer = 4, n_embd = 128, n_head = 4, n_positions = 64, vocab_size = 256 })
    end, config = { plan_print = false, bf16 = { enabled = true },
      memory = { host = "8MiB", disk = { path = folder } } } }
    local x, before = ps.randint(0, 256, { 4, 64 }, { dtype = "int32" }), nil
    for step = 1, 7 do
      if step == 4 then before = page_faults() end
      optimizer:zero_grad()
      model:backward(model(x, x))
      optimizer:step()
    end
    local a_step, pages = (page_faults() - before) / 4, inner(model).plan.forecast.tiers[1].other / 4096
    model:close()
    assert.truthy(a_step < pages, ("%.0f faults a step, %.0f pages of other tensors"):format(a_step, pages))
  end)

  it("skip steps that overflow, without any change", function()
    for _, device in ipairs { "cpu", "sim" } do
      local case = named("gpt2", { precision = "fp16", loss_scale = 0, scale_power = 40, steps = 1 })
      ps.manual_seed(case.seed)
      local model, optimizer = ps.initialize(L.request(case, { device = device, memory = {}, eviction = "plan" }))
      local before = L.state(model, optimizer)
      local scale = optimizer.scaler.scale
      for step = 1, 3 do
        local x = ps.randint(0, case.vocab, { 2, 8 }, { dtype = "int32" })
        optimizer:zero_grad()
        model:backward(model(x, x))
        assert.same({ true, 0 }, { optimizer:step().skipped, optimizer.steps })
        assert.equal(scale / 2 ^ step, optimizer.scaler.scale)
      end
      local after = L.state(model, optimizer)
      for name, value in pairs(before) do
        if name ~= "rng" and name ~= "scale" and after[name] ~= value then
          error(device .. ": " .. name .. " changed")
        end
      end
      model:close()
    end
  end)

  -- Compares two micro-batches with one batch of both. Ignored targets are distributed unevenly.
  it("weigh micro-batches by their targets", function()
    local function train(accumulate, memory)
      ps.manual_seed(3)
      local model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
        config = { optimizer = { type = "AdamW", params = { lr = 1e-2 } }, gradient_accumulation_steps = accumulate,
          memory = memory, plan_print = false, gradient_clipping = 1 } }
      local norms = {}
      for step = 1, 3 do
        ps.manual_seed(10 + step)
        local x = ps.randint(0, 256, { 4, 16 }, { dtype = "int32" })
        local y = ps.randint(0, 256, { 4, 16 }, { dtype = "int32" })
        y:narrow(0, 0, 1):copy_(ps.full({ 1, 16 }, -100, { dtype = "int32" }))
        for i = 2, 13 do y[{ 1, i }] = -100 end
        optimizer:zero_grad()
        local info
        for micro = 1, accumulate do
          local rows = 4 / accumulate
          local from = (micro - 1) * rows
          model:backward(model(x:narrow(0, from, rows):contiguous(), y:narrow(0, from, rows):contiguous()))
          info = optimizer:step()
        end
        norms[step] = info.grad_norm
      end
      local weights = model:state_dict()["transformer.wte.weight"]:flatten():tolist()
      model:close()
      return norms, weights
    end
    local norms, weights = train(1, "plain")
    for _, memory in ipairs { "plain", "chunk" } do
      local again, close = train(2, memory)
      for i, norm in ipairs(norms) do assert.near(norm, again[i], 1e-4 * norm) end
      local worst = 0
      for i, w in ipairs(weights) do worst = check_lib.larger(worst, math.abs(w - close[i])) end
      assert.truthy(worst < 2e-4, worst)
    end
  end)

  it("serve more shapes than the engine keeps traces for", function()
    local case = named("gpt2", { precision = "fp32", steps = 24, rows = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 } })
    local plain = L.run(case, { memory = "plain" })
    compare(case, plain, { eviction = "plan", chunk_size = 4096,
      memory = { host = 3 * 2 ^ 20, disk = { path = folder, limit = 2 ^ 22 } } })
  end)
end)
