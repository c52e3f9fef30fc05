-- SPDX-License-Identifier: BSD-3-Clause
-- train.run with an engine, the lines that it prints about its steps, and loops over a loader: the numbers of a loop
-- written by hand, a checkpoint that survives an error, and contradictory settings, which are refused.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local lfs = require "lfs"
local gpt2 = require "models.gpt2"
local check = require "spec.check_lib"
local ranks_lib = require "spec.ranks_lib"
local train, checkpoints = ps.train, ps.checkpoints
local L = dofile(require("ps.paths").root .. "/spec/chunks_lib.lua")

local folder, model

local function path(name) return folder .. "/" .. name end

local function loader(options)
  local all = { file = path "text.txt", width = 1, batch = 2, seq = 8, seed = 3, vocab = 256 }
  for key, value in pairs(options or {}) do all[key] = value end
  return ps.data.loader(all)
end

local function initialize(config)
  if model then model:close() end
  collectgarbage()
  collectgarbage()
  ps.manual_seed(7)
  local all = { optimizer = { type = "AdamW", params = { lr = 1e-3 } }, plan_print = false,
    scheduler = { type = "WarmupLR", params = { warmup_num_steps = 4 } } }
  for key, value in pairs(config or {}) do all[key] = value end
  local optimizer
  model, optimizer = ps.initialize { config = all,
    model_func = function() return gpt2.new("tiny", { dropout = 0.1 }) end }
  return optimizer
end

-- Returns the settings with approximately the smallest host memory under which train.run performs a step, and with a
-- disk tier in `disk`.
local function tight(settings, disk)
  settings.memory = { host = 100 * 1024, disk = { path = disk, limit = 2 ^ 26 } }
  L.fit(settings, function()
    L.used()
    local ok, problem = pcall(function()
      local optimizer = initialize(settings)
      train.run { model = model, optimizer = optimizer, loader = loader(), steps = 1, quiet = true }
    end)
    if model then model:close() end
    model = nil
    if not ok then error(problem, 0) end
  end)
  return settings
end

-- Calls fn, and returns its standard output.
local function output_of(fn)
  local real, lines = io.stdout, {}
  io.stdout = { write = function(_, ...) lines[#lines + 1] = table.concat({ ... }) end,      -- luacheck: ignore
    flush = function() end }
  local ok, problem = pcall(fn)
  io.stdout = real -- luacheck: ignore
  if not ok then error(problem, 0) end
  return table.concat(lines)
end

local fails = require("spec.check_lib").fails

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(lfs.mkdir(folder))
  local out = assert(io.open(path "text.txt", "wb"))
  for i = 1, 400 do out:write(("line %d of a text\n"):format(i * i)) end
  out:close()
end)
after_each(function()
  if model then model:close() end
  model = nil
end)
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)

describe("a loader", function()
  it("returns an epoch's batches as tables that an engine accepts", function()
    local data = loader { last = 100, shuffle = false }
    local plain, n = {}, 0
    for x, y in data:epoch() do plain[#plain + 1] = { x:tolist(), y:tolist() } end
    local optimizer = initialize()
    for batch in data do
      n = n + 1
      assert.same(plain[n], { batch[1]:tolist(), batch[2]:tolist() })
      optimizer:zero_grad()
      local loss = model(batch)
      model:backward(loss)
      optimizer:step()
    end
    assert.equal(#plain, n)
    assert.equal(n, optimizer.steps)
    data:seek { epoch = 0, batch = 0 }
    model:eval()
    local batch, none = data()                             -- PyTorch's `for x, y in loader`: y is nil
    assert.is_nil(none)
    assert.equal(model(batch):item(), model(batch, none):item())
  end)

  it("prints at the prompt what it reads, and its position", function()
    local data = loader { last = 100, shuffle = false }
    data:next()
    local text = tostring(data)
    assert.truthy(text:find(("batches of %d x %d, %d per epoch; next: batch 1 of epoch 0)"):format(data.batch, data.seq,
      data.batches), 1, true), text)
    assert.truthy(tostring(data.shards[1]):find("Tokens(", 1, true))
  end)
end)

describe("train.run", function()
  for name, config in pairs {
    chunks = { chunk_size = 4096 },
    plain = { memory = "plain" },
    ["micro-batches, clipping, bf16"] = { gradient_accumulation_steps = 2, gradient_clipping = 0.5,
      bf16 = { enabled = true } },
    fp16 = { fp16 = { enabled = true, initial_scale_power = 19, hysteresis = 1 } },
  } do
    it("trains an engine like a loop written by hand: " .. name, function()
      local optimizer, want = initialize(config), {}
      local data = loader()
      for i = 1, 4 do
        local sum = 0
        for _ = 1, inner(model).accumulate do
          local x, y = data:next()
          local loss = model(x, y)
          sum = sum + loss:item()
          model:backward(loss)
          optimizer:step()
        end
        want[i] = sum / inner(model).accumulate
      end
      optimizer = initialize(config)
      local result = train.run { model = model, optimizer = optimizer, loader = loader(), steps = 4, quiet = true,
        eval = { every = 2, data = function()
          return ps.data.windows { file = path "text.txt", width = 1, batch = 2, seq = 8, limit = 4 }
        end } }
      for i = 1, 4 do assert.equal(want[i], result.history[i].loss) end
      assert.truthy(result.val_loss)
      assert.equal(optimizer.steps, inner(model).scheduler.count)
    end)
  end

  it("resumes bit for bit under another budget", function()
    local function run(config, steps, start, from)
      local optimizer, data = initialize(config), loader()
      if from then checkpoints.load(from, { model = model, optimizer = optimizer, loader = data }) end
      return train.run { model = model, optimizer = optimizer, loader = data, steps = steps, start = start,
        quiet = true, checkpoint = { folder = path "run", every = 3 } }
    end
    local whole = run({}, 6)
    run({}, 3)
    local rest = run(tight({ chunk_size = 4096 }, "/tmp"), 6, 3, path "run")
    for i = 1, 3 do assert.equal(whole.history[3 + i].loss, rest.history[i].loss) end
  end)

  for name, with in pairs { engine = "with", plain = "without" } do
    it("continues at the loaded step without `start`, " .. with .. " an engine, and prints that", function()
      local again, trained = path("again " .. name), nil
      local function objects()
        if name == "engine" then
          local optimizer = initialize {}
          trained = model
          return optimizer, loader()
        end
        ps.manual_seed(3)
        trained = gpt2.new("tiny", { dropout = 0.1 })
        return ps.optim.AdamW(trained, { lr = 1e-3 }), loader()
      end
      local function run(optimizer, data, steps, start, quiet)
        return train.run { model = trained, optimizer = optimizer, loader = data, steps = steps, start = start,
          quiet = quiet ~= false, checkpoint = { folder = again, every = 3 } }
      end
      local optimizer, data = objects()
      local whole = run(optimizer, data, 6)
      optimizer, data = objects()
      assert.equal(3, run(optimizer, data, 3).step)
      optimizer, data = objects()
      checkpoints.load(again, { model = trained, optimizer = optimizer, loader = data })
      local text, _, rest = check.told(run, optimizer, data, 6, nil, false)
      assert.truthy(text:find("psluajit: ps.train.run continues after step 3, with which the optimizer was loaded; "
        .. "pass start = 0 to count from step 1\n", 1, true), text)
      assert.equal(6, rest.step)
      for i = 1, 3 do assert.equal(whole.history[3 + i].loss, rest.history[#rest.history - 3 + i].loss) end
      assert.equal(8, run(optimizer, data, 8, 6).step)
      assert.equal(2, run(optimizer, data, 2).step)        -- a second run counts from 1, as without a checkpoint
      optimizer, data = objects()
      checkpoints.load(again .. "/step-00000006.safetensors", { model = trained, optimizer = optimizer, loader = data })
      assert.equal(1, run(optimizer, data, 1, 0).step)
      optimizer, data = objects()
      checkpoints.load(again, { model = trained })          -- only its weights
      assert.equal(1, run(optimizer, data, 1).step)
    end)
  end

  it("leaves the last checkpoint, and no temporary file, when it ends in an error", function()
    local disk = path "tier"
    lfs.mkdir(disk)
    local config = tight({ chunk_size = 4096 }, disk)
    local optimizer, data = initialize(config), loader()
    local calls = 0
    local function run(loss)
      return train.run { model = model, optimizer = optimizer, loader = data, steps = 9, quiet = true, loss = loss,
        checkpoint = { folder = path "err", every = 2 } }
    end
    fails(function()
      run(function(m, x, y)
        calls = calls + 1
        if calls == 6 then error("the data ended") end
        return m(x, y)
      end)
    end, "the data ended")
    local losses = {}
    optimizer, data = initialize(config), loader()
    local from = checkpoints.load(path "err", { model = model, optimizer = optimizer, loader = data })
    assert.equal(4, from.step)
    for i = 1, 2 do
      local x, y = data:next()
      optimizer:zero_grad()
      local loss = model(x, y)
      losses[i] = loss:item()
      model:backward(loss)
      optimizer:step()
    end
    optimizer, data = initialize({}), loader()
    local whole = train.run { model = model, optimizer = optimizer, loader = data, steps = 6, quiet = true }
    assert.same({ whole.history[5].loss, whole.history[6].loss }, losses)
    model:close()
    model = nil
    for name in lfs.dir(disk) do assert.truthy(name == "." or name == "..", name) end
  end)

  it("refuses settings that belong to the engine's configuration", function()
    local optimizer = initialize()
    local function with(options)
      options.model, options.optimizer, options.loader = model, optimizer, loader()
      options.steps, options.quiet = 1, true
      return function() train.run(options) end
    end
    fails(with { accumulate = 2 }, "accumulate", "gradient_accumulation_steps")
    fails(with { max_norm = 1 }, "max_norm", "gradient_clipping")
    fails(with { scaler = {} }, "scaler", "fp16")
    fails(with { sched = {} }, "already has a schedule")
  end)
end)

describe("an engine's lines", function()
  local function run(config)
    local optimizer, data = initialize(config), loader()
    return output_of(function()
      for _ = 1, 4 do
        for _ = 1, inner(model).accumulate do
          local x, y = data:next()
          optimizer:zero_grad()
          model:backward(model(x, y))
          optimizer:step()
        end
      end
    end)
  end

  it("are printed every steps_per_print steps, and not at all without it", function()
    for _, config in ipairs { {}, { steps_per_print = 0 }, { steps_per_print = 0, wall_clock_breakdown = true } } do
      assert.equal("", run(config))
      assert.is_nil(inner(model).report)
    end
    for _, memory in ipairs { "plain", "chunk" } do
      local text = run { steps_per_print = 2, memory = memory }
      local first = "^step 2: loss %d%.%d+, accuracy %d%.%d+, lr [%d.e-]+, [%d.e-]+ s per step\n"
      assert.truthy(text:match(first .. "step 4: [^\n]*\n$"), text)
    end
  end)

  it("have rate, norm, loss scale, skipped steps, times and bytes moved", function()
    local text = run { steps_per_print = 4, wall_clock_breakdown = true, gradient_clipping = 1,
      gradient_accumulation_steps = 2, fp16 = { enabled = true, initial_scale_power = 19, hysteresis = 1 } }
    assert.truthy(text:find("gradient norm", 1, true), text)
    assert.truthy(text:match("loss scale %d+, [1-3] of 4 skipped, "), text)
    assert.truthy(text:match("%(forward [%d.e-]+, backward [%d.e-]+, step [%d.e-]+%)"), text)
    text = run(tight({ steps_per_print = 4, chunk_size = 4096, eviction = "lru" }, "/tmp"))
    assert.truthy(text:match("; fetched %S+ %S+, evicted %S+ %S+ per step\n"), text)
    assert.equal("", run { wall_clock_breakdown = true })
    assert.equal(10, inner(model).report.every)
  end)

  it("do not change the numbers", function()
    local function losses(config)
      local optimizer = initialize(config)
      local all
      output_of(function()
        all = train.run { model = model, optimizer = optimizer, loader = loader(), steps = 4, quiet = true }.history
      end)
      return all
    end
    assert.same(losses {}, losses { steps_per_print = 1, wall_clock_breakdown = true })
  end)
end)

describe("a plan", function()
  it("is printed again only if it has something new", function()
    local out = check.run("", [[
      local ps = require "ps"
      local model, optimizer = ps.initialize { model_func = function()
          return require("models.gpt2").new("tiny", { n_positions = 64 })
        end,
        config = { optimizer = { type = "AdamW" } } }
      for _, n in ipairs { 60, 61, 64, 50, 7, 64, 55 } do              -- number of tokens in a row without padding
        local x = ps.randint(0, 256, { 2, n }, { dtype = "int32" })
        model:backward(model(x, x))
        optimizer:step()
      end
      local x = ps.randint(0, 256, { 64, 64 }, { dtype = "int32" })     -- takes clearly longer
      model:backward(model(x, x))
      optimizer:step()
    ]])
    assert.equal(2, select(2, out:gsub("plan: %d+ parameters", "")), out)
  end)
end)

describe("notes on a configuration", function()
  local SCRIPT = [[
    local config = { dump_state = true, plan_print = false, optimizer = { type = "AdamW" } }
    for _ = 1, 2 do
      ps.initialize { model_func = function() return ps.nn.Linear(4, 4) end, config = config }:close()
    end
  ]]
  it("are printed once, however many engines read it", function()
    local out = check.run("", 'local ps = require "ps"\n' .. SCRIPT)
    assert.equal(1, select(2, out:gsub("dump_state: ignored", "")), out)
  end)

  it("are printed only by the first rank", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local place = ranks_lib.folder()
    local all = ranks_lib.check(place, 2, SCRIPT)
    ranks_lib.remove(place)
    assert.equal(1, select(2, all[0].text:gsub("dump_state: ignored", "")), all[0].text)
    assert.is_nil(all[1].text:find("ignored", 1, true), all[1].text)
  end)
end)
