-- SPDX-License-Identifier: BSD-3-Clause
-- Training with several processes: the same losses and parameters as one process with all rows, the same bits on every
-- rank, and ranks that disagree end with an error that names the difference.
local lib = require "spec.ranks_lib"

local folder

local function run(size, script) return lib.run(folder, size, script) end

local TRAIN = lib.TRAINING .. [[
  local gpt2 = require "models.gpt2"
  local config = CONFIG
  config.plan_print = false
  local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
    return gpt2.new("tiny", { dropout = 0 })
  end }
  ps.manual_seed(17)
  for step = 1, 4 do train(model, optimizer, step, config.gradient_accumulation_steps or 1) end
  print(table.concat(sums(model), "\n"))
  print(("norm %.17g"):format(optimizer.grad_norm or 0))
  model:close()
]]

local function numbers(text)
  local list = {}
  for name, a, b in text:gmatch("(%S+) (%S+) (%S+)\n") do list[#list + 1] = { name, tonumber(a), tonumber(b) } end
  return list
end

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

describe("several processes", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  local ADAM = "optimizer = { type = 'AdamW', params = { lr = 1e-3, eps = 1e-4, weight_decay = 0.1 } }"
  for name, case in pairs {
    ["fp32"] = { "{ " .. ADAM .. " }", 1e-6 },
    ["fp32, clipped, accumulated, chunks on disk"] = { "{ " .. ADAM .. ", gradient_clipping = 0.1, chunk_size = 4096, "
      .. "gradient_accumulation_steps = 2, memory = { host = '1800KiB', disk = { path = FOLDER, limit = '8MiB' } } }",
      1e-6 },
    ["bf16"] = { "{ " .. ADAM .. ", bf16 = { enabled = true } }", 1e-3 },
  } do
    it("train as one: " .. name, function()
      local script = TRAIN:gsub("CONFIG", function() return (case[1]:gsub("FOLDER", "folder")) end)
      local one = lib.check(folder, 1, script)[0]
      local wanted = numbers(one.text)
      assert.truthy(#wanted > 10, one.text)
      for _, size in ipairs { 2, 4 } do
        local all = lib.check(folder, size, script)
        for rank = 0, size - 1 do assert.equal(all[0].text, all[rank].text) end    -- every rank has the same bits
        local got = numbers(all[0].text)
        assert.equal(#wanted, #got)
        for i, row in ipairs(wanted) do
          assert.equal(row[1], got[i][1])
          assert.near(row[3], got[i][3], case[2] * math.max(math.abs(row[3]), 1e-2), row[1])
        end
      end
    end)
  end

  it("drop out different elements, without a loader that numbers their samples", function()
    local all = run(2, ([[
      local ps = require "ps"
      local nn = ps.nn
      ps.init_distributed { quiet = true, seed = 1, rendezvous = "file://%s/rendezvous" }
      local Drop = nn.class("Drop")
      function Drop:init() self.a = nn.Parameter(ps.ones { 64 }) end
      function Drop:forward(x) return ps.F.dropout(x * self.a, 0.5) end
      local model = ps.initialize { config = { plan_print = false }, quiet = true, model_func = function()
        return Drop()
      end }
      local y = model(ps.ones { 1, 64 })
      print("mask " .. table.concat(y:reshape(-1):tolist(), " "))
      model:backward(y:sum())
    ]]):format(folder))
    local masks = {}
    for rank = 0, 1 do masks[rank] = all[rank].text:match("mask ([%d ]+)") end
    assert.truthy(masks[0] and masks[1], all[0].text)
    assert.not_equal(masks[0], masks[1])
  end)

  for name, case in pairs {
    ["a bit of a parameter"] = { 0, "local m = require('ps.nn.handle').of(model).built.list[2].master; "
      .. "if ps.rank() == 1 then ps.no_grad(function() m[3] = m[3]:item() * 1.0001 end) end",
      "parameter b of rank 1 has different bits" },
    ["random numbers, where each rank has state of its own"] = { 3, "if ps.rank() == 2 then ps.manual_seed(9) end",
      "random numbers differ after step 4: rank 2 has seed 9, step 2, but rank 0 has seed 1, step 4: call "
        .. "ps.manual_seed with the same seed on all ranks" },
    ["a buffer"] = { 2, "if ps.rank() == 0 then ps.no_grad(function() model.count:add_(1) end) end",
      "buffer count of rank 0 has different bits" },
  } do
    it("that drift apart detect it: " .. name, function()
      local all = run(3, ([[
        local ps = require "ps"
        local nn = ps.nn
        ps.init_distributed { quiet = true, seed = 1, rendezvous = "file://%s/rendezvous" }
        local Two = nn.class("Two")
        function Two:init()
          self.a = nn.Parameter(ps.ones { 64 })
          self.b = nn.Parameter(ps.ones { 64 })
          self:buffer("count", ps.zeros { 4 })
        end
        function Two:forward(x) return (x * self.a + self.b):sum() end
        local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, bf16 = { enabled = true },
          compare_ranks_every = 2, overlap_optimizer = false, zero_optimization = { stage = %d } },
          model_func = function() return Two() end }
        for step = 1, 4 do
          model:backward(model(ps.ones { 1, 64 }))
          if step == 3 then %s end
          optimizer:step()
          print("step " .. step)
        end
      ]]):format(folder, case[1], case[2]))
      for rank = 0, 2 do
        assert.equal(1, all[rank].code, all[rank].text)
        assert.truthy(all[rank].text:find("step 3\n", 1, true), all[rank].text)
        assert.truthy(all[rank].text:find(" differ after step 4: ", 1, true), all[rank].text)
        assert.truthy(all[rank].text:find(case[3], 1, true), all[rank].text)
      end
    end)
  end

  it("that disagree on the model all end with an error about the model", function()
    local all = run(2, ([[
      local ps = require "ps"
      local nn = require "ps.nn"
      ps.init_distributed { rendezvous = "file://%s/rendezvous" }
      ps.initialize { config = {}, quiet = true, model_func = function() return nn.Linear(8, 8 + ps.rank()) end }
    ]]):format(folder))
    for rank = 0, 1 do
      assert.equal(1, all[rank].code)
      assert.truthy(all[rank].text:find("rank 1 has a different model from rank 0: parameter 1 is weight fp32 [9,8] on "
        .. "rank 1, weight fp32 [8,8] on rank 0", 1, true), all[rank].text)
    end
  end)

  it("with other options of a module without parameters end with an error that names the module", function()
    local all = run(2, ([[
      local ps = require "ps"
      local nn = require "ps.nn"
      ps.init_distributed { rendezvous = "file://%s/rendezvous" }
      ps.initialize { config = {}, quiet = true, model_func = function()
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(ps.rank() / 2))
      end }
    ]]):format(folder))
    for rank = 0, 1 do
      assert.equal(1, all[rank].code)
      assert.truthy(all[rank].text:find("rank 1 has a different model from rank 0: line 3 of the printed model is (1): "
        .. "Dropout(p=0.5) on rank 1, (1): Dropout(p=0) on rank 0", 1, true), all[rank].text)
    end
  end)

  it("that disagree on the configuration all end with an error that names the key", function()
    local all = run(3, ([[
      local ps = require "ps"
      ps.init_distributed { rendezvous = "file://%s/rendezvous" }
      local rank = ps.rank()
      local function try(config, param_groups)
        local ok, problem = pcall(ps.initialize, { config = config, quiet = true, param_groups = param_groups,
          model_func = function() return ps.nn.Linear(8, 8) end })
        print(ok or problem)
      end
      try { optimizer = { type = "AdamW", params = { lr = rank == 2 and 2e-3 or 1e-3 } } }
      try { optimizer = { type = rank == 2 and "Adam" or "AdamW" } }
      try { gradient_clipping = rank >= 1 and 1 or nil }
      try { train_batch_size = rank == 0 and 12 or 6 }
      try { scheduler = rank == 1 and { type = "constant" } or nil }
      try { seed = rank == 1 and 5 or nil }
      try { bf16 = { enabled = rank == 1 } }
      try { bf16 = { enabled = true, check_grad_overflow = rank == 2 } }
      try { recompute = rank == 1 }
      try({}, { { weight_decay = rank } })
      try { plan_print = rank == 0, memory = { host = rank + 1 .. "GiB" } }        -- these settings can differ
    ]]):format(folder))
    local function wrong(rank, what)
      return ("rank %d has a different configuration from rank 0: %s; every rank must make the same model and read the "
        .. "same configuration\n"):format(rank, what)
    end
    local expected = wrong(2, "optimizer.params.lr is 0.002 on rank 2, 0.001 on rank 0")
      .. wrong(2, "optimizer.params.adam_w_mode is false on rank 2, true on rank 0")
      .. wrong(1, "gradient_clipping is 1 on rank 1, 0 on rank 0")
      .. wrong(1, "train_batch_size is 6 on rank 1, 12 on rank 0")
      .. wrong(1, "it has scheduler.params.warmup, rank 0 has scheduler")
      .. wrong(1, "seed is 5 on rank 1, nil on rank 0")
      .. wrong(1, "precision is bf16 on rank 1, fp32 on rank 0")
      .. wrong(2, "bf16.check_grad_overflow is true on rank 2, false on rank 0")
      .. wrong(1, "recompute is true on rank 1, false on rank 0")
      .. wrong(1, "parameter group 1: weight_decay is 1 on rank 1, 0 on rank 0") .. "true\n"
    for rank = 0, 2 do assert.equal(expected, (all[rank].text:gsub("^psluajit:[^\n]*\n", ""))) end
  end)

  it("that train with different settings of the optimizer end before the step, at every stage", function()
    for stage = 0, 3 do
      local change = stage % 2 == 0 and "optimizer:set_lr(0.5)" or "optimizer.groups[1].weight_decay = 0.5"
      local differ = stage % 2 == 0 and "lr is 0.5 on rank 1, 0.001 on rank 0"
        or "weight_decay is 0.5 on rank 1, 0 on rank 0"
      local all = run(2, ([[
        local ps = require "ps"
        ps.init_distributed { quiet = true, timeout = 20, rendezvous = "file://%s/rendezvous" }
        local model, optimizer = ps.initialize { quiet = true, model_func = function() return ps.nn.Linear(8, 8) end,
          config = { plan_print = false, zero_optimization = { stage = %d } } }
        for step = 1, 3 do
          model:backward(model(ps.ones { 2, 8 }):sum())
          optimizer:step()
          print("step", step)
          if step == 2 and ps.rank() == 1 then %s end
        end
      ]]):format(folder, stage, change))
      for rank = 0, 1 do
        assert.equal(1, all[rank].code)
        assert.truthy(all[rank].text:find("the ranks' optimizers differ: parameter group 1: " .. differ
          .. "; set the same rates and step the schedules on all ranks", 1, true), all[rank].text)
        assert.truthy(all[rank].text:find("step\t2\n", 1, true) and not all[rank].text:find("step\t3", 1, true))
      end
    end
  end)

  it("get an error if a parameter has a gradient only on some of them", function()
    local all = run(2, ([[
      local ps = require "ps"
      local nn = require "ps.nn"
      ps.init_distributed { rendezvous = "file://%s/rendezvous" }
      local Odd = nn.class("Odd")
      function Odd:init() self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8) end
      function Odd:forward(x)
        x = self.a(x)
        if ps.rank() == 1 then x = self.b(x) end
        return x:sum()
      end
      local model, optimizer = ps.initialize { config = {}, quiet = true, model_func = function() return Odd() end }
      model:backward(model(ps.ones { 2, 8 }))
      optimizer:step()
    ]]):format(folder))
    for rank = 0, 1 do
      assert.equal(1, all[rank].code)
      assert.truthy(all[rank].text:find("gradients of other parameters", 1, true), all[rank].text)
    end
    for rank, missing in pairs { [0] = "b.weight, b.bias", "none (all other gradients are reduced)" } do
      local text = "without a gradient on rank " .. rank .. ": " .. missing
      assert.truthy(all[rank].text:find(text, 1, true), all[rank].text)
    end
  end)

  it("get an error, with names, if one of them has no gradient in a whole stripe of chunks", function()
    for stage = 0, 2 do
      local all = run(2, ([[
        local ps = require "ps"
        local nn = require "ps.nn"
        ps.init_distributed { quiet = true, timeout = 20, rendezvous = "file://%s/rendezvous" }
        local Odd = nn.class("Odd")
        function Odd:init()
          self.list = nn.ModuleList()
          for _ = 1, 6 do self.list:append(nn.Linear(64, 64)) end
        end
        function Odd:forward(x)
          for i, layer in self.list:each() do
            if ps.rank() == 1 or i < 3 or i > 4 then x = layer(x) end
          end
          return x:sum()
        end
        local model, optimizer = ps.initialize { quiet = true, model_func = function() return Odd() end,
          config = { plan_print = false, chunk_size = 4096, zero_optimization = { stage = %d } } }
        model:backward(model(ps.ones { 2, 64 }))
        optimizer:step()
      ]]):format(folder, stage))
      for rank = 0, 1 do
        assert.equal(1, all[rank].code)
        assert.truthy(all[rank].text:find("another stripe of chunks", 1, true), all[rank].text)
        assert.truthy(all[rank].text:find("every rank must use the same parameters in a step", 1, true), all[rank].text)
      end
      local where = stage == 0 and "without a gradient on rank 0: " or "stripe %d+ holds "
      assert.truthy(all[0].text:find(where .. "[^\n;]*list%.3%.weight"), all[0].text)
    end
  end)

  it("print a note that names the first op in which their forwards differ, also if parameters are the same", function()
    local all = run(2, ([[
      local ps = require "ps"
      local nn, F = ps.nn, ps.F
      ps.init_distributed { quiet = true, seed = 1, rendezvous = "file://%s/rendezvous" }
      local Odd = nn.class("Odd")
      function Odd:init() self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8) end
      function Odd:forward(x)
        local h, wide = self.a(x), x:size(0) > 2           -- other ops for another shape are no difference
        if self.odd and ps.rank() == 1 then h = F.relu(h) elseif not wide then h = h:tanh() end
        return self.b(h):sum()
      end
      for _, odd in ipairs { false, true } do
        io.stderr:write("odd ", tostring(odd), "\n")
        local model, optimizer = ps.initialize { config = { plan_print = false }, model_func = function()
          local m = Odd()
          m.odd = odd
          return m
        end }
        for step = 1, 3 do
          model:backward(model(ps.ones { step == 1 and ps.rank() == 0 and 4 or 2, 8 } * (ps.rank() + step)))
          optimizer:step()
        end
        model:close()
      end
    ]]):format(folder))
    local text = "the forward of rank 1 runs other ops than that of rank 0 for a batch of the same shapes: op 2 is "
      .. "relu on rank 1 and tanh on rank 0"
    for rank = 0, 1 do
      assert.equal(0, all[rank].code, all[rank].text)
      local alike, odd = all[rank].text:match "^(.*odd false.*)odd true(.*)$"
      assert.is_nil(alike:find("runs other ops", 1, true), all[rank].text)
      local _, n = odd:gsub("runs other ops", "")
      assert.equal(rank == 0 and 1 or 0, n)
      assert.equal(rank == 0, odd:find(text, 1, true) ~= nil, odd)
    end
  end)

  it("without init_distributed are refused", function()
    local all = run(2, [[
      local ps = require "ps"
      ps.initialize { config = {}, quiet = true, model_func = function() return ps.nn.Linear(8, 8) end }
    ]])
    assert.truthy(all[1].text:find("call ps.init_distributed() before ps.initialize", 1, true), all[1].text)
  end)
end)

