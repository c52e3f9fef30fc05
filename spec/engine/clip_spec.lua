-- SPDX-License-Identifier: BSD-3-Clause
-- Gradients of an engine between backward and optimizer:step(): nn.clip_grad_norm, p:grad(), module:zero_grad(). The
-- numbers are PyTorch's (torch.nn.utils.clip_grad_norm_ and SGD with lr = 1 on the whole batch), whatever the layout.
local lib = require "spec.ranks_lib"

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- Two layers with weights and rows from a formula. Each rank and each micro-batch uses its share of the four rows.
local BEGIN = [[
  local F = ps.F
  local fails = require("spec.check_lib").fails
  local function by(rows, columns, k)
    local t = {}
    for r = 0, rows - 1 do
      t[r + 1] = {}
      for c = 0, columns - 1 do t[r + 1][c + 1] = ((r * columns + c) * k % 7 - 3) / 4 end
    end
    return ps.tensor(t)
  end
  local M = nn.class "M"
  function M:init()
    self.a = nn.Linear(3, 3)
    self.b = nn.Linear(3, 2)
    ps.no_grad(function()
      self.a.weight:copy_(by(3, 3, 3))
      self.a.bias:copy_(ps.tensor { 0.5, -0.25, 0 })
      self.b.weight:copy_(by(2, 3, 5))
      self.b.bias:copy_(ps.tensor { 0.25, -0.5 })
    end)
  end
  function M:forward(x, y) return F.cross_entropy(self.b(self.a(x)):float(), y) end
  local X, Y = {}, ps.tensor({ 0, 1, 1, 0 }, "int64")
  for r = 0, 3 do
    X[r + 1] = {}
    for c = 0, 2 do X[r + 1][c + 1] = ((r * 3 + c) * 5 % 11 - 5) / 4 end
  end
  X = ps.tensor(X)
  local function open(config, more)
    local c = { optimizer = { type = "SGD", params = { lr = 1 } }, plan_print = false, overlap_optimizer = false }
    for key, value in pairs(config) do c[key] = value end
    local request = { quiet = true, config = c, model_func = function() return M() end }
    for key, value in pairs(more or {}) do request[key] = value end
    local model, optimizer = ps.initialize(request)
    return model, optimizer, c
  end
  -- Runs forward and backward of a whole step. Calls between(micro) after every backward except the last.
  local function backward(model, optimizer, config, between)
    local micros = config.gradient_accumulation_steps or 1
    local dtype = config.bf16 and "bf16" or config.fp16 and "fp16" or "fp32"
    local n = 4 / size / micros
    for i = 0, micros - 1 do
      local from = rank * (4 / size) + i * n
      model:backward(model(X:narrow(0, from, n):contiguous():to(dtype), Y:narrow(0, from, n):contiguous()))
      if i < micros - 1 then
        if between then between(i + 1) end
        optimizer:step()
      end
    end
  end
  local function near(want, got, what, off)
    assert(math.abs(want - got) <= (off or 2e-6), ("%s is %.7f, not %.7f"):format(what, got, want))
  end
  -- Sums of the parameters and of their squares, computed with PyTorch.
  local AFTER = {
    all = { 0.3795544, { -0.689728, 0.279237, 0.25, -0.25 }, { 2.282763, 0.317658, 1.666932, 0.257066 } },
    b = { 0.3504478, { -0.521235, 0.360969, 0.25, -0.25 }, { 2.212258, 0.335100, 1.665717, 0.252735 } },
    none = { 0.3795544, { -0.521235, 0.360969, 0.25, -0.25 }, { 2.212258, 0.335100, 1.667640, 0.134345 } },
  }
  local NAMES = { "a.weight", "a.bias", "b.weight", "b.bias" }
  local function check(model, kind, norm, name, off)
    off = off or 2e-6
    near(AFTER[kind][1], norm, name .. ": the norm", off)
    local state = model:state_dict()
    for i, key in ipairs(NAMES) do
      if state[key] ~= nil then                               -- with ZeRO, a rank has only its own parameters
        near(AFTER[kind][2][i], state[key]:double():sum():item(), name .. ": the sum of " .. key, 4 * off)
        near(AFTER[kind][3][i], state[key]:double():square():sum():item(), name .. ": the squares of " .. key, 8 * off)
      end
    end
  end
]]

local LAYOUTS = [[
  local layouts = { chunks = {}, ["two micro-batches"] = { gradient_accumulation_steps = 2 },
    bf16 = { bf16 = { enabled = true }, off = 2e-3 }, ["small chunks"] = { chunk_size = 4 },
    fp16 = { fp16 = { enabled = true, loss_scale = 128 }, off = 1e-3 },
    ["fp16, two micro-batches"] = { fp16 = { enabled = true, loss_scale = 128 }, off = 1e-3,
      gradient_accumulation_steps = 2 },
    ["bf16, two micro-batches in fp32"] = { bf16 = { enabled = true }, off = 2e-3, gradient_accumulation_steps = 2,
      data_types = { grad_accum_dtype = "fp32" } } }
  for stage = 1, 3 do
    layouts["ZeRO " .. stage] = { zero_optimization = { stage = stage }, chunk_size = 4 }
    layouts["ZeRO " .. stage .. ", two micro-batches"] = { zero_optimization = { stage = stage },
      gradient_accumulation_steps = 2 }
  end
  if size == 1 then
    for name, layout in pairs { plain = {}, ["plain, two micro-batches"] = { gradient_accumulation_steps = 2 },
      ["plain fp16"] = { fp16 = { enabled = true, loss_scale = 128 }, off = 1e-3 } } do
      layout.memory = "plain"
      layouts[name] = layout
    end
    layouts["chunks on the disk"] = { chunk_size = 4, memory = { host = "4MiB", disk = { path = folder } } }
  else
    for name, layout in pairs(layouts) do
      if size * (layout.gradient_accumulation_steps or 1) > 4 then layouts[name] = nil end
    end
  end
  local names = {}
  for name in pairs(layouts) do names[#names + 1] = name end
  table.sort(names)
  local function each(fn)
    for _, name in ipairs(names) do
      local config = {}
      for key, value in pairs(layouts[name]) do config[key] = value end
      local off = config.off
      config.off = nil
      fn(name, config, off)
    end
  end
]]

for _, size in ipairs { 1, 2 } do
  describe(("nn.clip_grad_norm of an engine, ranks: %d"):format(size), function()
    if size > 1 and lib.no_gloo() then return pending(lib.no_gloo()) end

    it("equals PyTorch's on every layout: for all parameters, for some, and when it only measures", function()
      lib.check(folder, size, BEGIN .. LAYOUTS .. [[
        local of = { { "all", function(model) return model:parameters(), 0.1 end },
          { "b", function(model) return model.module.b:parameters(), 0.1 end },
          { "none", function(model) return model, math.huge end } }
        each(function(name, config, off)
          for _, at in ipairs(of) do
            local kind, list = at[1], at[2]
            local model, optimizer = open(config)
            optimizer:zero_grad()
            backward(model, optimizer, config, function()
              fails(function() nn.clip_grad_norm(model:parameters(), 1) end, "1 of 2 micro-batches")
              model:zero_grad()                                -- does nothing, like optimizer:zero_grad()
            end)
            local norm = nn.clip_grad_norm(list(model))
            local info = optimizer:step()
            check(model, kind, norm, name .. ", " .. kind, off)
            near(AFTER.all[1], info.grad_norm, "grad_norm of step", off)
            fails(function() nn.clip_grad_norm(model:parameters(), 1) end, "no backward since the last step")
            backward(model, optimizer, config)                 -- factors apply to one step only
            optimizer:step()
            model:close()
          end
        end)
      ]])
    end)

    it("clips each parameter once per step, and measures clipped gradients", function()
      lib.check(folder, size, BEGIN .. LAYOUTS .. [[
        each(function(name, config, off)
          local model, optimizer = open(config)
          backward(model, optimizer, config)
          local a, b = model.module.a, model.module.b
          near(0.3795544, nn.clip_grad_norm(model, math.huge), name, off)
          near(0.1458, nn.clip_grad_norm(a, 0.1), name .. ": a", off or 5e-5)
          near(0.3504, nn.clip_grad_norm(b:parameters(), 0.2), name .. ": b", off or 5e-5)
          near(0.2236, nn.clip_grad_norm(model:parameters(), math.huge), name .. ": clipped", off or 5e-5)
          fails(function() nn.clip_grad_norm({ b.bias }, 1) end, "b.bias", "once per step")
          optimizer:step()
          model:close()
        end)
        local model, optimizer, config = open { gradient_clipping = 0.1 }
        backward(model, optimizer, config)
        fails(function() nn.clip_grad_norm(model:parameters(), 1) end, "gradient_clipping = 0.1", "math.huge")
        local norm = nn.clip_grad_norm(model:parameters(), math.huge)
        near(norm, optimizer:step().grad_norm, "grad_norm", 0)
        check(model, "all", norm, "measured beside gradient_clipping")
        model:close()
      ]])
    end)

    it("clips gradients that the script has written after backward", function()
      lib.check(folder, size, BEGIN .. LAYOUTS .. [[
        each(function(name, config)
          config.gradient_clipping = 0.1
          local model, optimizer = open(config)
          backward(model, optimizer, config)
          ps.no_grad(function()
            for _, p in ipairs(model:parameters()) do
              if p:grad() ~= nil then p:grad():mul_(4) end
            end
          end)
          local norm = optimizer:step().grad_norm
          near(4 * AFTER.all[1], norm, name .. ": the norm", config.bf16 and 4e-2 or 4e-3)
          check(model, "all", AFTER.all[1], name .. ": clipped", config.bf16 and 2e-3 or config.fp16 and 1e-3)
          model:close()
        end)
      ]])
    end)

    it("refuses gradients that are written after their norm, which would be scaled by a factor of others", function()
      lib.check(folder, size, BEGIN .. LAYOUTS .. [[
        local function double(model)
          ps.no_grad(function()
            for _, p in ipairs(model:parameters()) do
              if p:grad() ~= nil then p:grad():mul_(2) end
            end
          end)
        end
        each(function(name, config)
          for _, limit in ipairs { 0.1, math.huge } do
            config.gradient_clipping = limit == math.huge and 0.1 or nil
            local model, optimizer = open(config)
            backward(model, optimizer, config)
            nn.clip_grad_norm(model, limit)
            double(model)
            fails(function() optimizer:step() end, "was written after its norm", "nn.clip_grad_norm(model, math.huge)")
            model:close()
          end
          config.gradient_clipping = nil
          local model, optimizer = open(config)
          backward(model, optimizer, config)
          nn.clip_grad_norm(model, math.huge)
          double(model)
          optimizer:step()                                     -- nothing is clipped, so nothing is wrong
          model:close()
        end)
      ]])
    end)

    it("and p:grad() and zero_grad are errors if backward has updated the parameters", function()
      lib.check(folder, size, BEGIN .. [[
        for _, stage in ipairs { 0, 3 } do
          local model, optimizer, config = open { overlap_optimizer = true, zero_optimization = { stage = stage } }
          backward(model, optimizer, config)
          for _, fn in ipairs { function() return nn.clip_grad_norm(model:parameters(), 1) end,
            function() return nn.clip_grad_norm(model, math.huge) end,
            function() return model.module.a.weight:grad() end } do
            fails(fn, "gradient_clipping", "overlap_optimizer = false")
          end
          fails(function() model:zero_grad() end, "model:zero_grad()", "overlap_optimizer = false")
          fails(function() ps.optim.global_norm(model) end, "nn.clip_grad_norm(model, math.huge)")
          optimizer:step()
          assert(model.module.a.weight:grad() == nil)
          model:zero_grad()
          check(model, "none", AFTER.none[1], "updated in backward")
          model:close()
        end
      ]])
    end)
  end)
end

describe("gradients of an engine", function()
  it("are dropped by model:zero_grad() before step, as by optimizer:zero_grad()", function()
    lib.check(folder, 1, BEGIN .. LAYOUTS .. [[
      each(function(name, config, off)
        local model, optimizer = open(config)
        backward(model, optimizer, config)
        model:zero_grad()
        fails(function() optimizer:step() end, "there was no backward")
        backward(model, optimizer, config)
        model.module:zero_grad()
        backward(model, optimizer, config)
        optimizer:step()
        check(model, "none", AFTER.none[1], name, off)
        backward(model, optimizer, config)
        if config.memory ~= "plain" then
          fails(function() model.module.b:zero_grad() end, "2 of its 4 parameters")
          fails(function() model.module.a.weight:set_grad(nil) end, "optimizer:zero_grad()")
        end
        optimizer:zero_grad()
        model:close()
      end)
    ]])
  end)

  it("are sums over ranks, each times its weight, at their owners, and nil elsewhere", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    lib.check(folder, 2, BEGIN .. [[
      local whole = M()
      whole(X, Y):backward()
      for stage = 0, 3 do
        local model, optimizer = open { zero_optimization = { stage = stage }, chunk_size = 4 }
        local loss = model(X:narrow(0, 2 * rank, 2):contiguous(), Y:narrow(0, 2 * rank, 2):contiguous())
        model:backward(loss, { weight = 2 })
        local own = model:state_dict()
        for name, p in whole:named_parameters() do
          local q = model.module[name:match "^."][name:match "%.(.*)"]
          local grad = q:grad()
          assert((grad ~= nil) == (own[name] ~= nil), name)
          -- each rank's weight is 2, so the sum is 4 times the mean's gradient
          if grad ~= nil then assert((grad / 4 - p:grad()):abs():max():item() < 1e-6, name) end
        end
        nn.clip_grad_norm(model:parameters(), 1)
        optimizer:step()
        model:close()
      end
    ]])
  end)

  it("that are not finite skip a step of fp16, and are an error when they are clipped", function()
    lib.check(folder, 1, BEGIN .. [[
      for _, memory in ipairs { "chunk", "plain" } do
        local bad = X:clone()
        bad[{ 0, 0 }] = math.huge
        local function step(config, max_norm)
          config.memory = memory
          local model, optimizer = open(config)
          model:backward(model(bad:to(config.fp16 and "fp16" or "fp32"), Y))
          local norm = nn.clip_grad_norm(model:parameters(), max_norm)
          assert(norm ~= norm or norm == math.huge)
          local before = model:state_dict()["b.bias"]:tolist()[1]
          local ok, info = pcall(optimizer.step, optimizer)
          local after = model:state_dict()["b.bias"]:tolist()[1]
          model:close()
          return ok, info, before == after
        end
        local ok, info, same = step({ fp16 = { enabled = true, loss_scale = 128 } }, 1)
        assert(ok and info.skipped and same)
        ok, info, same = step({}, 1)
        assert(not ok and tostring(info):find("the gradient norm is", 1, true) and same, info)
        assert(step({}, math.huge))                            -- PyTorch's steps do not check norms either
      end
    ]])
  end)
end)

describe("nn.clip_grad_norm of several processes", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("is refused if ranks clip differently", function()
    lib.check(folder, 2, BEGIN .. [[
      local model, optimizer, config = open {}
      backward(model, optimizer, config)
      fails(function() nn.clip_grad_norm(model:parameters(), 1 + rank) end, "max_norm 1", "max_norm 2", "all ranks")
    ]])
  end)

  -- The whole model in plain memory is the reference. Its own norm is compared with PyTorch's above.
  it("is that of one process in a pipeline, with tensor parallelism and with both", function()
    local SCRIPT = [[
      local gpt2 = require "models.gpt2"
      ps.manual_seed(8)
      local x = ps.randint(0, 256, { 4, 12 }, { dtype = "int32" })
      local y = ps.randint(0, 256, { 4, 12 }, { dtype = "int32" })
      for kind = 1, 2 do
        ps.manual_seed(3)
        local model, optimizer = ps.initialize { quiet = true, model_func = function()
          return gpt2.new("tiny", { dropout = 0 })
        end, config = LAYOUT }
        for step = 1, 2 do
          if LAYOUT.pipeline then
            for out in model:micro_batches(x, y) do
              model:backward(out.loss)
              local ok, why = pcall(nn.clip_grad_norm, model, 1)
              assert(not ok and tostring(why):find("loop over micro-batches", 1, true), why)
            end
          else
            for i = 0, 1 do
              model:backward(model(x:narrow(0, 2 * i, 2):contiguous(), y:narrow(0, 2 * i, 2):contiguous()))
              if i == 0 then optimizer:step() end
            end
          end
          local list = model:parameters()
          if kind == 2 then
            local some = {}
            for name, p in model.module:named_parameters() do
              if name:find "mlp" or name:find "wte" then some[#some + 1] = p end
            end
            list = some
          end
          print(("norm %.6f"):format(nn.clip_grad_norm(list, 0.25)))
          if kind == 2 then print(("norm %.6f"):format(nn.clip_grad_norm(model, math.huge))) end
          optimizer:step()
        end
        ps.no_grad(function()
          local loss
          if LAYOUT.pipeline then
            local sum = 0
            for out in model:micro_batches(x, y) do sum = sum + out.loss:item() / 2 end
            loss = sum
          else loss = model(x, y):item() end
          print(("loss %.5f"):format(loss))
        end)
        model:close()
      end
    ]]
    local function said(size, layout)
      local all = lib.check(folder, size, ([[
        local LAYOUT = { gradient_accumulation_steps = 2, plan_print = false, overlap_optimizer = false,
          optimizer = { type = "SGD", params = { lr = 0.5 } }, %s }
      ]]):format(layout) .. SCRIPT)
      local numbers = {}
      for number in all[0].text:gmatch "%a+ (%d+%.%d+)" do numbers[#numbers + 1] = tonumber(number) end
      return numbers
    end
    local want = said(1, 'memory = "plain"')
    assert.equal(8, #want)
    for layout, size in pairs { ["pipeline = { stages = 2 }"] = 2,
      ["tensor_parallel = { autotp_size = 2 }"] = 2,
      ["pipeline = { stages = 2 }, tensor_parallel = { autotp_size = 2 }"] = 4 } do
      local got = said(size, layout)
      for i = 1, 8 do
        assert(math.abs(got[i] - want[i]) < 2e-5, ("%s: number %d is %.6f, not %.6f"):format(layout, i, got[i],
          want[i]))
      end
    end
  end)
end)
