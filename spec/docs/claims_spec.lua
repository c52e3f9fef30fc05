-- SPDX-License-Identifier: BSD-3-Clause
-- Statements of docs/reliability.md, docs/memory.md, docs/config.md and docs/zero.md that no other spec checks:
-- figures that follow from a formula, and effects of settings.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local nn = require "ps.nn"
local gpt2 = require "models.gpt2"
local chunks = require "ps.memory.chunks"
local ranks_lib = require "spec.ranks_lib"
local check = require "spec.check_lib"
local bytes = check.bytes
local F = ps.F

local DISK = os.getenv "TMPDIR" or "/tmp"

-- Calls fn(model, optimizer) with an engine for a model of `make` and these settings. The engine is closed even if fn
-- fails.
local function with_engine(settings, make, fn)
  ps.manual_seed(5)
  local cfg = { plan_print = false }
  for key, value in pairs(settings) do cfg[key] = value end
  local model, optimizer = ps.initialize { model_func = make, config = cfg, quiet = true }
  local ok, result = pcall(fn, model, optimizer)
  model:close()
  if not ok then error(result, 0) end
  return result
end

local function step(model, optimizer, x)
  optimizer:zero_grad()
  local loss = model(x, x)
  model:backward(loss)
  optimizer:step()
  return loss:item()
end

local function tokens(rows, columns) return ps.randint(0, 256, { rows, columns }, { dtype = "int32" }) end
local function char() return gpt2.new "char" end

before_each(function() ps.manual_seed(1) end)

describe("docs/memory.md, bytes of state per parameter:", function()
  -- Creates tensors of multiples of 4,096 numbers, so that chunks have no waste.
  local function square()
    return nn.Sequential(nn.Linear(64, 64, { bias = false }), nn.Linear(64, 128, { bias = false }))
  end
  local TWO = { gradient_accumulation_steps = 2 }

  local function used(settings, make)
    return with_engine(settings, make or square, function(model)
      local sum = 0
      for _, chunk in ipairs(chunks.chunks()) do sum = sum + chunk.used_nbytes end
      return sum / inner(model).built.numel
    end)
  end
  local function of(name, settings, want)
    it(("%g in %s"):format(want, name), function() assert.equal(want, used(settings)) end)
  end

  of("bf16", { bf16 = { enabled = true } }, 14)
  of("fp16", { fp16 = { enabled = true } }, 14)
  of("bf16 with micro-batches", { bf16 = { enabled = true }, gradient_accumulation_steps = 2 }, 18)
  of("bf16 with micro-batches added up in bf16", { bf16 = { enabled = true }, gradient_accumulation_steps = 2,
    data_types = { grad_accum_dtype = "bf16" } }, 16)
  of("fp32", {}, 16)
  of("fp32 with micro-batches", TWO, 16)

  it("only its own bytes in a frozen one", function()
    assert.equal((2 * 4096 + 14 * 8192) / 12288, used({ bf16 = { enabled = true } }, function()
      local model = square()
      model[0].weight:requires_grad(false)
      return model
    end))
  end)
end)

describe("docs/memory.md, policies", function()
  it("fetch fewer bytes the more they know: plan, belady; lru, fifo", function()
    local fetched = {}
    for _, policy in ipairs { "plan", "belady", "lru", "fifo" } do
      fetched[policy] = with_engine({ bf16 = { enabled = true }, chunk_size = 65536, eviction = policy,
        memory = { host = "6MiB", disk = { path = DISK } } }, char, function(model, optimizer)
        step(model, optimizer, tokens(2, 32))
        local before = chunks.tiers()[2].bytes_up
        for _ = 1, 3 do step(model, optimizer, tokens(2, 32)) end
        return chunks.tiers()[2].bytes_up - before
      end)
    end
    assert.truthy(fetched.plan > 0 and fetched.plan <= fetched.belady)
    assert.truthy(fetched.belady < fetched.lru and fetched.lru <= 1.05 * fetched.fifo)
  end)
end)

describe("docs/memory.md, a forward that reads values", function()
  local Asks = nn.class("Asks")
  function Asks:init() self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64) end
  function Asks:forward(x)
    local h = self.a(x)
    if h:sum():item() > 1e30 then return h:sum() end
    return self.b(h):sum()
  end

  it("runs unplanned once, with a message, and planned from then on, with plain memory's bits", function()
    local function run(settings)
      return with_engine(settings, function() return Asks() end, function(model, optimizer)
        local traces = {}
        for i = 1, 3 do
          optimizer:zero_grad()
          model:backward(model(ps.ones { 2, 64 } * i))
          optimizer:step()
          traces[i] = next(inner(model).traces or {}) ~= nil
        end
        local said = table.concat((function()
          local list = {}
          for text in pairs(inner(model).said) do list[#list + 1] = text end
          return list
        end)(), "\n")
        return { traces = traces, said = said, values = bytes(model:state_dict()["a.weight"]) }
      end)
    end
    local chunked = run { chunk_size = 4096, memory = { host = "2MiB", disk = { path = DISK } } }
    assert.truthy(chunked.said:find("reads values in its forward or backward, so its step can be planned only after", 1,
      true))
    assert.same({ true, true, true }, chunked.traces)
    assert.equal(run({ memory = "plain" }).values, chunked.values)
  end)
end)

describe("docs/memory.md, the disk's file", function()
  it("has room for the model's state and for its construction if no limit is set", function()
    local size = with_engine({ memory = { host = "64MiB", disk = { path = DISK } } }, char, function()
      return chunks.tiers()[2].budget
    end)
    local numel = char():num_parameters()
    assert.truthy(size >= 26 * numel and size <= 26 * numel + 257 * 2 ^ 20, size)
  end)
end)

describe("documents that messages name", function()
  it("exist, also in an installed tree", function()
    local root = require("ps.paths").root
    local p = assert(io.popen(("cd '%s' && grep -rhoE 'docs/[a-z]+\\.md' lua src models examples tools | sort -u")
      :format(root)))
    local n = 0
    for path in p:lines() do
      n = n + 1
      assert.truthy(check.read(root .. "/" .. path), path)
    end
    p:close()
    assert.truthy(n > 3, n)
    local cmake = check.read(root .. "/cmake/install.cmake")            -- an installed tree has no CMake files
    if cmake then assert.truthy(cmake:find("install(DIRECTORY lua models examples tools templates docs ", 1, true)) end
  end)
end)

describe("quiet beside config", function()
  it("suppresses the plan, lines and notes", function()
    local function run(quiet)
      return check.run("X=1", ([[
        local ps = require "ps"
        local model, optimizer = ps.initialize { quiet = %s, model_func = function() return ps.nn.Linear(4, 4) end,
          config = { steps_per_print = 1, dump_state = true } }
        model:backward(model(ps.ones { 2, 4 }):sum())
        optimizer:step()
        model:close()
      ]]):format(quiet))
    end
    assert.equal("", run "true")
    local said = run "false"
    for _, part in ipairs { "plan: ", "step 1:", "dump_state: ignored" } do
      assert.truthy(said:find(part, 1, true), said)
    end
  end)
end)

describe("docs/config.md, differences from DeepSpeed", function()
  local function layer() return nn.Linear(8, 8) end
  local function after(settings)
    return with_engine(settings, layer, function(model, optimizer)
      for i = 1, 3 do
        model:backward(model(ps.ones { 2, 8 } * i):sum())
        optimizer:step()
        optimizer:zero_grad()
      end
      return bytes(model:state_dict().weight)
    end)
  end

  it("an absent optimizer is Adam at 1e-3, absent clipping is off", function()
    local explicit = { optimizer = { type = "Adam", params = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8 } },
      gradient_clipping = 0 }
    assert.equal(after(explicit), after {})
    assert.equal(after(explicit), after { gradient_clipping = -1 })
    assert.not_equal(after(explicit), after { gradient_clipping = 1 })
  end)

  it("a step that is skipped does not count for the schedule", function()
    with_engine({ fp16 = { enabled = true, initial_scale_power = 4, hysteresis = 1 },
      scheduler = { type = "warmup_linear", params = { max_lr = 1, total = 10 } } }, layer, function(model, optimizer)
      local rates = {}
      for i = 1, 4 do
        rates[i] = optimizer.groups[1].lr
        local loss = model(ps.ones({ 2, 8 }, { dtype = "fp16" })):sum()
        model:backward(i == 2 and loss * math.huge or loss)
        assert.equal(i == 2, optimizer:step().skipped)
        optimizer:zero_grad()
      end
      assert.same({ 1, 0.9, 0.9, 0.8 }, rates)
      assert.equal(3, optimizer.steps)
    end)
  end)
end)

describe("docs/reliability.md, all logits are never in memory", function()
  it("with lm_loss, which needs only a panel of them", function()
    local N, V = 4096, 16384
    local x, w = ps.randn({ N, 8 }, { requires_grad = true }), ps.randn({ V, 8 }, { requires_grad = true })
    local y = ps.randint(0, V, { N })
    ps.collect()
    ps.reset_peak_memory()
    local before = ps.memory().used
    F.lm_loss(x, w, y):backward()
    local took, logits = ps.memory().peak - before, N * V * 4
    assert.truthy(took < logits / 3, took .. " bytes; all logits are " .. logits)
  end)
end)

describe("docs/zero.md", function()
  local folder
  setup(function() folder = ranks_lib.folder() end)
  teardown(function() ranks_lib.remove(folder) end)

  it("has the bytes that a step sends and the owner of gradients", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local all = ranks_lib.run(folder, 2, ranks_lib.begin(folder) .. [[
      for stage = 0, 3 do
        local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, bf16 = { enabled = true },
          chunk_size = 65536, compare_ranks_every = 0, overlap_optimizer = false,
          zero_optimization = { stage = stage } }, model_func = function()
            local list = {}
            for i = 1, 8 do list[i] = nn.Linear(256, 256) end
            return nn.Sequential(unpack(list))
          end }
        local P, sent, owners = require("ps.nn.handle").of(model).built.numel, nil, 0
        for i = 1, 3 do
          if i == 3 then sent = group:bytes_sent() end
          model:backward(model(ps.ones({ 2, 256 }, { dtype = "bf16" })):sum())
          if i == 2 then
            for _, p in ipairs(model:parameters()) do owners = owners + (p:grad() ~= nil and 1 or 0) end
          end
          optimizer:step()
          optimizer:zero_grad()
        end
        local formula = (stage == 3 and 3 or 2) * 2 * P * (size - 1) / size
        print(("stage %d: %.2f, %d of %d"):format(stage, (group:bytes_sent() - sent) / formula, owners,
          #model:parameters()))
        model:close()
      end
    ]])
    local owned = 0
    for rank = 0, 1 do
      local n = 0
      for stage, ratio, grads, of in all[rank].text:gmatch("stage (%d): ([%d.]+), (%d+) of (%d+)") do
        n = n + 1
        assert.truthy(tonumber(ratio) > 0.8 and tonumber(ratio) < 1.06, all[rank].text)
        if stage == "0" then assert.equal(of, grads, all[rank].text) end
        if stage == "3" then owned = owned + tonumber(grads) end
      end
      assert.equal(4, n, all[rank].text)
    end
    assert.equal(16, owned, all[0].text .. all[1].text)
  end)
end)
