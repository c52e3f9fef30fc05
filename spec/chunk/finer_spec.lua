-- SPDX-License-Identifier: BSD-3-Clause
-- Smaller chunks for steps that do not fit: cutting a layout (layout/split.lua), and an engine that lays out its model
-- again between two steps. Losses, parameters and averages are those of plain memory, bit for bit.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local pack = require "ps.engine.layout.pack"
local split = require "ps.engine.layout.split"
local rechunk = require "ps.engine.layout.rechunk"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"
local L = dofile(require("ps.paths").root .. "/spec/chunks_lib.lua")

local folder

L.scratch({ setup = setup, teardown = teardown }, function(path) folder = path end)

describe("chunk_split.cut", function()
  it("keeps every tensor, in order, with its owner, and chunks that are small enough", function()
    local r = L.random(3)
    for _ = 1, 60 do
      local entries, numel = {}, {}
      for i = 1, r.int(1, 40) do
        numel[i] = r.int(1, 30000)
        entries[i] = { numel = numel[i], dtype = r.pick { "bf16", "fp32" }, trains = r.chance(0.8) }
      end
      local made = pack.pack(entries, r.pick { 8192, 40000, 200000 })
      for i, chunk in ipairs(made.chunks) do chunk.owner = i % 3 end
      local owner = {}
      for _, chunk in ipairs(made.chunks) do
        for _, at in ipairs(chunk.tensors) do owner[at.index] = chunk.owner end
      end
      for _ = 1, 30 do
        local size = split.next_size(made, r.pick { 0.2, 0.6, 1 })
        if not size then break end
        local new, last, seen, numbers = split.chunks(made, numel, size), {}, 0, {}
        assert.truthy(size < made.chunk_size or size < math.max(unpack(numel)) + 2048)
        for _, chunk in ipairs(new.chunks) do
          assert.truthy(#chunk.tensors == 1 or chunk.numel <= size)
          local number = chunk.group .. " " .. chunk.index
          assert.falsy(numbers[number], "two chunks of one number")
          numbers[number] = true
          local fill = 0
          for _, at in ipairs(chunk.tensors) do
            assert.equal(owner[at.index], chunk.owner)
            assert.truthy(at.offset >= fill and at.offset % pack.ALIGN == 0)
            fill, seen = at.offset + numel[at.index], seen + 1
            last[at.index] = chunk
          end
          assert.truthy(fill <= chunk.numel)
        end
        assert.equal(#entries, seen)
        for _, chunk in ipairs(made.chunks) do
          if #chunk.tensors == 1 or chunk.numel <= size then assert.equal(chunk, last[chunk.tensors[1].index]) end
        end
        made = new
      end
      assert.is_nil(split.next_size(made, 1))
    end
  end)
end)

describe("a step that does not fit", function()
  local KIB = 1024

  -- Runs a case under a budget. Returns the run, and the chunk sizes at the beginning and at the end.
  local function run(case, setting)
    local sizes, was = {}, ps.initialize
    ps.initialize = function(...)
      local model, optimizer = was(...)
      sizes[1] = inner(model).built.layout.chunk_size
      local step = optimizer.step
      function optimizer:step()
        sizes[2] = inner(model).built.layout.chunk_size
        return step(self)
      end
      return model, optimizer
    end
    local ok, result = pcall(L.run, case, setting)
    ps.initialize = was
    if not ok then error(("%s; setting %s"):format(tostring(result), L.text(setting)), 0) end
    return result, sizes
  end

  -- Returns the smallest budgets in which the case trains: with the chunk size that the search chooses in large
  -- budgets, and with smaller chunks if larger ones do not fit. The engine can compensate for the difference.
  local function least(case, setting)
    local _, sizes = run(case, setting)
    local function fit(chunk_size)
      local memory = {}
      for key, value in pairs(setting.memory) do memory[key] = value end
      local tight = { device = setting.device, hybrid = setting.hybrid, chunk_size = chunk_size, memory = memory }
      memory[tight.device and "device" or "host"] = 100 * KIB
      L.fit(tight, function() L.run(case, tight) end)
      return memory
    end
    return fit(), fit(sizes[1])
  end

  for name, at in pairs {
    ["bf16, disk"] = { { precision = "bf16" }, {} },
    ["fp32, clipped, disk"] = { { precision = "fp32", clip = 0.5 }, {} },
    ["bf16, accumulated, another shape later, disk"] = { { precision = "bf16", accumulate = 2, sum_dtype = "fp32",
      rows = { 10, 60 } }, {} },
    ["bf16, an accelerator"] = { { precision = "bf16" }, { device = "sim" } },
    ["fp16, an accelerator, disk"] = { { precision = "fp16", loss_scale = 0, scale_power = 8 }, { device = "sim",
      host = 400 } },
  } do
    it("is carried out in smaller chunks: " .. name, function()
      local case = { seed = 5, model = "deep", steps = 4, accumulate = 1, optimizer = "AdamW", weight_decay = 0.1,
        groups = "norms", dropout = 0.2, look = "between", rows = { 60 } }
      for key, value in pairs(at[1]) do case[key] = value end
      local setting = { device = at[2].device, hybrid = true, memory = { device = at[2].device and 8192 * KIB,
        host = (at[2].host or 8192) * KIB,
        disk = (at[2].host or not at[2].device) and { path = folder, limit = 8192 * KIB } or nil } }
      local plain, cut = L.run(case, { memory = "plain" }), 0
      local small, large = least(case, setting)
      for _, part in ipairs { 0, 0.3, 0.6 } do
        for tier in pairs { device = 1, host = 1 } do
          local low, high = small[tier], large[tier]
          setting.memory[tier] = low and math.ceil((low + part * math.max(0, high - low)) / KIB) * KIB
        end
        L.used()
        local result, sizes = run(case, setting)
        assert.is_nil(L.difference(plain, result))
        if sizes[2] < sizes[1] then cut = cut + 1 end
      end
      assert.truthy(cut > 1)
    end)
  end

  it("continues from loaded averages", function()
    local function train(memory, from, first, last)
      L.used()
      local model, optimizer = ps.initialize { quiet = true, model_func = L.model_func { model = "deep" },
        config = { plan_print = false, bf16 = { enabled = true }, memory = memory } }
      if from then ps.checkpoints.load(from, { model = model, optimizer = optimizer }) end
      local losses, was = {}, not inner(model).plain and inner(model).built.layout.chunk_size
      for step = first, last do
        ps.manual_seed(step)
        local loss = model(ps.randn { 60, 16 }, ps.randint(0, 8, { 60 }, { dtype = "int32" }))
        losses[#losses + 1] = ("%.17g"):format(loss:item())
        model:backward(loss)
        optimizer:step()
      end
      if not from then ps.checkpoints.save(folder .. "/run", { model = model, optimizer = optimizer }) end
      local now = not inner(model).plain and inner(model).built.layout.chunk_size
      model:close()
      collectgarbage()
      return table.concat(losses, " "), was and now < was
    end
    train("plain", nil, 1, 3)
    local want = train("plain", folder .. "/run", 4, 6)
    local got, cut = train({ host = 450 * KIB, disk = { path = folder, limit = 8192 * KIB } }, folder .. "/run", 4, 6)
    assert.truthy(cut)
    assert.equal(want, got)
  end)

  it("is refused if smaller chunks do not help or are excluded", function()
    local function step(config)
      L.used()
      local rows = config.rows or 60
      local model = ps.initialize { quiet = true, model_func = L.model_func { model = config.model or "deep" },
        config = { plan_print = false, bf16 = { enabled = true }, chunk_size = config.chunk_size,
          memory = { host = config.host * KIB, disk = { path = folder, limit = 8192 * KIB } } } }
      local ok, problem = pcall(model, ps.randn { rows, 16 }, ps.randint(0, 8, { rows }, { dtype = "int32" }))
      local size = inner(model).built.layout.chunk_size
      model:close()
      collectgarbage()
      assert.falsy(ok)
      assert.equal("ENOMEM", problem.name)
      return problem.msg, size, problem
    end
    local text, size = step { chunk_size = 20480, host = 450 }
    assert.truthy(text:find("the step does not fit", 1, true) and text:find("a smaller chunk_size", 1, true), text)
    assert.equal(20480, size)
    text, size = step { host = 300, rows = 90 }
    assert.truthy(text:find("smaller chunks do not help: there is room for no chunk at all", 1, true), text)
    assert.equal(20480, size)
    -- There is room next to other tensors for some chunks, but not for the 126 KiB of the largest parameter's set.
    local large = { host = 400, rows = 110, model = "large" }
    local _, _, short = step(large)
    assert.same({ "OP_CHUNKS", "host" }, { short.sub, short.tier })
    large.host = large.host + math.ceil((63 * KIB - short.left) / KIB)
    text = step(large)
    assert.truthy(text:find("with its optimizer state needs 126.0 KiB", 1, true), text)
  end)

  -- The engine survives one failure, since it collects garbage and retries. Two failures in a row are errors.
  it("continues, or is refused and the engine closed, if memory runs out while chunks are made again", function()
    local closed, went_on, was = 0, 0, rechunk.split
    for n = 0, 600, os.getenv "PS_FULL" and 1 or 75 do
      local model = ps.initialize { quiet = true, model_func = L.model_func { model = "deep" },
        config = { plan_print = false, bf16 = { enabled = true },
          memory = { host = 450 * KIB, disk = { path = folder, limit = 8192 * KIB } } } }
      function rechunk.split(...)
        ps.C.ps_test_fail_alloc(n, n % 2 + 1)
        local ok, problem = pcall(was, ...)
        ps.C.ps_test_fail_alloc(-1, 0)
        if not ok then error(problem, 0) end
      end
      local ok, problem = pcall(model, ps.randn { 60, 16 }, ps.randint(0, 8, { 60 }, { dtype = "int32" }))
      rechunk.split = was
      if ok then went_on = went_on + 1
      else
        closed = closed + 1
        local text = tostring(problem)
        assert.truthy(text:find("the new layout of the model failed", 1, true) and text:find("closed", 1, true), text)
        assert.truthy(inner(model).closed)
      end
      model:close()
      L.used()
    end
    assert.truthy(closed > 0 and went_on > 0, closed .. " closed, " .. went_on .. " went on")
  end)

  if check.lower_set then return end

  it("on one of several ranks is cut on all of them, at every stage", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    lib.check(folder, 2, ("local L = dofile(%q)\n"):format(L.path) .. [[
      local Deep = nn.class("Deep")
      function Deep:init()
        self.list = nn.ModuleList()
        for _ = 1, 40 do self.list:append(nn.Linear(48, 48)) end
        self.frozen = nn.Linear(48, 48)
        for _, p in ipairs(self.frozen:parameters()) do p:requires_grad(false) end
      end
      function Deep:forward(x)
        for _, layer in self.list:each() do x = ps.F.gelu(layer(x)) + x end
        return self.frozen(x):to("fp32"):pow(2):mean()
      end
      local KIB, refused = 1024, 0
      for _, device in ipairs { "cpu", "sim" } do
        -- least: first an initial budget, then the previous stage's budget
        local want, least = nil, 700 * KIB
        for stage = 0, 3 do
          for _, tight in ipairs(want and { true } or { false, true }) do
            local short = tight and rank == stage % 2
            local first = short and least or 8192 * KIB
            local memory = device == "sim" and { device = first, host = 8192 * KIB }
              or { host = first, disk = { path = folder, limit = 8192 * KIB } }
            local inner = require("ps.nn.handle").of
            local seen, was, now
            local function train(model, optimizer)
              seen, was = {}, inner(model).built.layout.chunk_size
              for step = 1, 3 do
                ps.manual_seed(9 + rank + 2 * step)
                local x = ps.randn({ step == 1 and 10 or 60, 48 }, { dtype = "bf16" }):to(device)
                local loss = model(x)
                seen[#seen + 1] = ("%.17g"):format(loss:item())
                model:backward(loss)
                optimizer:step()
              end
              for _, row in ipairs(inner(model).built.list) do
                local sum = ps.no_grad(function() return row.param:to("fp32"):pow(2):sum():item() end)
                seen[#seen + 1] = ("%.17g"):format(sum)
              end
              now = inner(model).built.layout.chunk_size
            end
            refused = refused + L.fit({ memory = memory }, function()
              collectgarbage()
              collectgarbage()
              ps.manual_seed(4)
              local model, optimizer = ps.initialize { quiet = true, model_func = function() return Deep() end,
                config = { plan_print = false, bf16 = { enabled = true }, device = device, memory = memory,
                  gradient_clipping = 1, zero_optimization = { stage = stage } } }
              local ok, problem = pcall(train, model, optimizer)
              model:close()
              if not ok then error(problem, 0) end
            end, ps.any_rank)
            if tight then
              local took = ps.tensor({ short and (memory.device or memory.host) or 0 }, { dtype = "fp32" })
              least = group:all_reduce(took):item()
            end
            seen = table.concat(seen, " ")
            want = want or seen
            assert(seen == want, ("%s, stage %d"):format(device, stage))
            if tight then assert(now < was, ("%s, stage %d: %d"):format(device, stage, now)) end
          end
        end
      end
      assert(refused > 0)
    ]])
  end)

  it("is cut on several ranks as often as necessary, at every stage", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    lib.check(folder, 2, lib.LOSSES .. [[
      local finer, split = require "ps.engine.layout.rechunk", require "ps.engine.layout.split"
      local gpt2 = require "models.gpt2"
      local size = { n_layer = 4, n_embd = 64, n_head = 2, n_positions = 16, vocab_size = 64 }
      for _, accumulate in ipairs { 1, 2 } do
        local want
        for stage = 0, accumulate == 1 and 3 or 1 do
          for _, cuts in ipairs { want and { 0.3, 0.5 } or {}, { 0.08, 0.5, 0.5 } } do
            ps.manual_seed(4)
            local model, optimizer = ps.initialize { quiet = true, model_func = function()
              return gpt2.new("tiny", size)
            end, config = { plan_print = false, bf16 = { enabled = true }, device = "cpu", memory = { host = "8MiB" },
              gradient_accumulation_steps = accumulate, zero_optimization = { stage = stage },
              optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
            for _, part in ipairs(cuts) do
              local engine = require("ps.nn.handle").of(model)
              if split.next_size(engine.built.layout, part) then finer.split(engine, part) end
            end
            local seen = losses(model, optimizer, 2 * accumulate, 64, { 2, 8 })
            want = want or seen
            assert(seen == want, ("%d micro-batches, stage %d, %d cuts"):format(accumulate, stage, #cuts))
            model:close()
            collectgarbage()
            collectgarbage()
          end
        end
      end
    ]])
  end)
end)
