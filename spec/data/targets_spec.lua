-- SPDX-License-Identifier: BSD-3-Clause
-- Batches in which some targets, or all, are ignored (-100): losses, the weights of micro-batches, and steps in which
-- all targets are ignored.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local gpt2 = require "models.gpt2"
local lib = require "spec.check_lib"
local ranks = require "spec.ranks_lib"
local nn, F = ps.nn, ps.functional

local function ignored(shape) return ps.full(shape, -100, { dtype = "int64" }) end
local function all_zero(t)
  for _, v in ipairs(t:to("fp32"):reshape(-1):tolist()) do if v ~= 0 then return false end end
  return true
end

describe("the mean loss of no targets", function()
  for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64" } do
    it("is 0, and so is its gradient, in " .. dtype, function()
      for _, shape in ipairs { { 4 }, { 2, 3 }, { 0 } } do
        local x = ps.randn({ shape[1], shape[2] or 5, shape[2] and 5 or nil }):to(dtype):detach():requires_grad(true)
        local w = ps.randn({ 7, 5 }):to(dtype):detach():requires_grad(true)
        for reduction, loss in pairs { mean = F.cross_entropy(x, ignored(shape)), sum = F.cross_entropy(x,
          ignored(shape), { reduction = "sum" }), lm = F.lm_loss(x, w, ignored(shape)) } do
          assert(loss:item() == 0, reduction .. " " .. loss:item())
          loss:backward()
          assert(all_zero(x:grad()), reduction)
        end
        assert(all_zero(w:grad()))
      end
    end)
  end
end)

local model

local function open(class, config)
  local wanted = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
  for key, value in pairs(config) do wanted[key] = value end
  local optimizer
  ps.manual_seed(5)
  model, optimizer = ps.initialize { quiet = not wanted.steps_per_print, model_func = function() return class() end,
    config = wanted }
  return optimizer
end

after_each(function()
  if model then model:close() end
  model = nil
end)

local function tiny() return gpt2.new "tiny" end

-- Returns everything that training changes, as text of all bytes.
local function state(optimizer)
  local parts = {}
  for name, t in pairs(model:state_dict()) do parts[#parts + 1] = name .. " " .. lib.bytes(t) end
  local saved = optimizer:state_dict(model)
  for name, t in pairs(saved.tensors) do parts[#parts + 1] = name .. " " .. lib.bytes(t) end
  table.sort(parts)
  parts[#parts + 1] = saved.values.steps .. " " .. optimizer.groups[1].lr
  if optimizer.scaler then
    for name, value in pairs(optimizer.scaler:state_dict()) do parts[#parts + 1] = name .. " " .. value end
  end
  return table.concat(parts, "\n")
end

-- Returns micro-batch `number` of two rows, with the number of ignored targets in each row.
local function batch(number, masked)
  ps.manual_seed(100 + number)
  local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
  local y = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
  if masked > 0 then y:narrow(1, 0, masked):fill_(-100) end
  return x, y
end

-- Runs one optimizer step over micro-batches from `number` on. `masked` has the number of ignored targets in each.
local function step(optimizer, number, masked)
  local info
  for i, some in ipairs(masked) do
    model:backward(model(batch(number + i, some)))
    info = optimizer:step()
  end
  return info
end

describe("a step in which all targets are ignored", function()
  local SCHEDULE = { type = "WarmupLR", params = { warmup_num_steps = 5 } }
  local settings = { ["fp32, updates in backward"] = { overlap_optimizer = true }, ["fp32"] = {},
    ["bf16, two micro-batches"] = { bf16 = { enabled = true }, gradient_accumulation_steps = 2 },
    ["bf16, clipped"] = { bf16 = { enabled = true }, gradient_clipping = 0.5 },
    ["bf16, updates in backward"] = { bf16 = { enabled = true }, overlap_optimizer = true },
    ["fp16"] = { fp16 = { enabled = true, initial_scale_power = 10, loss_scale_window = 1 },
      gradient_accumulation_steps = 2 } }
  for name, setting in pairs(settings) do
    for _, memory in ipairs { "chunk", "plain" } do
      it("is skipped and changes nothing: " .. name .. ", memory " .. memory, function()
        local config = { memory = memory, scheduler = SCHEDULE }
        for key, value in pairs(setting) do config[key] = value end
        local micros = setting.gradient_accumulation_steps or 1
        local some, none = { 3, 16 }, { 16, 16 }
        some[micros + 1], none[micros + 1] = nil, nil
        local optimizer = open(tiny, config)
        for number = 0, 20, 10 do step(optimizer, number, some) end
        local before, steps, calls = state(optimizer), optimizer.steps, inner(model).steps
        local info = step(optimizer, 500, none)
        assert.is_true(info.skipped)
        assert.is_nil(info.grad_norm)
        assert(state(optimizer) == before)
        assert.same({ steps, calls + 1 }, { optimizer.steps, inner(model).steps })
        assert.is_false(step(optimizer, 30, some).skipped)
        local with = state(optimizer)
        model:close()
        optimizer = open(tiny, config)
        for number = 0, 30, 10 do step(optimizer, number, some) end
        assert(state(optimizer) == with, "the steps behind it are other ones")
      end)
    end
  end

  it("is a step of all ranks, any of which may have no targets", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local folder = ranks.folder()
    local ok, problem = pcall(ranks.check, folder, 2, [[
      local gpt2 = require "models.gpt2"
      for stage = 0, 3, 3 do
        local model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
          config = { plan_print = false, chunk_size = 4096, zero_optimization = { stage = stage },
            fp16 = { enabled = true, loss_scale = 1024 }, optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
        local function sums()
          local lines = {}
          for name, t in pairs(model:state_dict()) do
            local sum = t:to("fp64"):sum():item()
            assert(sum == sum and math.abs(sum) < math.huge, name)
            lines[#lines + 1] = ("%s %.17g"):format(name, sum)
          end
          table.sort(lines)
          return table.concat(lines, "\n")
        end
        local function step(masked)
          local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
          local y = masked and ps.full({ 2, 16 }, -100, { dtype = "int32" }) or x
          model:backward(model(x, y))
          return optimizer:step().skipped
        end
        assert(step(false) == false)
        local before = sums()
        assert(step(rank == 1) == false and ps.any_rank(sums() ~= before))
        before = sums()
        assert(step(true) == true and sums() == before)
        assert(step(false) == false and optimizer.steps == 3)
        model:close()
      end
    ]])
    ranks.remove(folder)
    if not ok then error(problem, 0) end
  end)
end)

describe("a micro-batch without targets", function()
  for _, memory in ipairs { "chunk", "plain" } do
    it("does not affect the step and its reported loss: memory " .. memory, function()
      local function run(micros, masked)
        local optimizer = open(tiny, { memory = memory, gradient_accumulation_steps = micros, steps_per_print = 1000 })
        inner(model).report.every, inner(model).report.writes = 1, false
        step(optimizer, 0, masked)
        local all, line = model:state_dict(), inner(model).report.last
        local weight = all["transformer.h.1.mlp.c_fc.weight"]:clone()
        model:close()
        return weight, line:match("loss (%S+),")
      end
      local alone, loss = run(1, { 4 })
      local among, loss_among = run(3, { 4, 16, 16 })
      assert.equal(loss, loss_among)
      local off = (alone - among):abs():max():item()
      assert(off <= 1e-6, off)
    end)
  end
end)

-- Logits w [8] at every position. With w = 0 and all targets 0, the gradient of the mean loss is 1/8 - 1 at index 0,
-- and 1/8 elsewhere.
local Logits = nn.class "Logits"
function Logits:init() self:param("w", ps.zeros { 8 }) end
function Logits:forward(x, y)
  local rows = self.w:reshape(1, 8):expand(x:numel(), 8)
  return F.cross_entropy(rows, y:reshape(-1))
end

describe("fp16's loss scale", function()
  local SCALE = 1024
  local NORM = math.sqrt(0.875 ^ 2 + 7 * 0.125 ^ 2)
  -- name -> {columns, number of counted targets in the two rows of each micro-batch, their sum divided by the power of
  -- two nearest to the number of all positions}
  local cases = {
    ["one micro-batch"] = { 8, { 16 }, 1 },
    ["four of 2^4 targets"] = { 8, { 16, 16, 16, 16 }, 1 },
    ["four of 12 targets"] = { 6, { 12, 12, 12, 12 }, 48 / 64 },
    ["three, some ignored"] = { 8, { 16, 4, 0 }, 20 / 64 },
    ["the first of them empty"] = { 8, { 0, 16 }, 16 / 32 },
  }
  for name, case in pairs(cases) do
    for _, memory in ipairs { "chunk", "plain" } do
      it(("is that of the step's mean loss: %s, memory %s"):format(name, memory), function()
        local optimizer = open(Logits, { memory = memory, gradient_accumulation_steps = #case[2],
          fp16 = { enabled = true, loss_scale = SCALE } })
        local info
        for i, count in ipairs(case[2]) do
          local y = ps.full({ 2, case[1] }, -100, { dtype = "int64" })
          y:reshape(-1):narrow(0, 0, count):fill_(0)
          model:backward(model(ps.zeros({ 2, case[1] }, { dtype = "int64" }), y))
          if i == #case[2] then
            local grad = model.module.w:grad():to("cpu"):to("fp32"):tolist()
            for j = 1, 8 do
              local want = SCALE * case[3] * (j == 1 and -0.875 or 0.125)
              assert(math.abs(grad[j] - want) <= 2e-3 * math.abs(want), ("%d: %g, not %g"):format(j, grad[j], want))
            end
          end
          info = optimizer:step()
        end
        assert.is_false(info.skipped)
        assert(math.abs(info.grad_norm - NORM) < 2e-3, info.grad_norm)
      end)
    end
  end
end)

describe("the weight of a loss", function()
  it("that a script passes must be a number of at least 0", function()
    for _, memory in ipairs { "chunk", "plain" } do
      local optimizer = open(tiny, { memory = memory, gradient_accumulation_steps = 2 })
      for _, weight in ipairs { -1, 0 / 0, 1 / 0 } do
        lib.fails(function() model:backward(model(batch(1, 0)), { weight = weight }) end, "targets_spec.lua",
          "a number of at least 0")
      end
      lib.fails(function() model:backward(model(batch(1, 0)), { weight = "4" }) end, "weight", "a string")
      optimizer:zero_grad()
      local before = state(optimizer)
      for _ = 1, 2 do
        model:backward(model(batch(1, 0)), { weight = 0 })
      end
      assert.is_true(optimizer:step().skipped)
      assert(state(optimizer) == before)
      model:close()
    end
  end)
end)

describe("train.run", function()
  -- Returns a loader of micro-batches with given numbers of ignored targets. Batches are named if `named` is true.
  local function loader(masked, named)
    local number = 0
    return { global_batch = 2, seq = 16, next = function()
      number = number + 1
      local x, y = batch(number, masked[number])
      if not named then return x, y end
      -- shifted back, so that y has the targets of x
      local labels = ps.full({ 2, 16 }, -100, { dtype = "int32" })
      labels:narrow(1, 1, 15):copy_(y:narrow(1, 0, 15))
      return { input_ids = x, labels = labels }
    end }
  end
  local function run(masked, accumulate, named)
    ps.manual_seed(5)
    model = gpt2.new "tiny"
    local optimizer = ps.optim.AdamW(model, { lr = 1e-2 })
    local result = ps.train.run { model = model, optimizer = optimizer, loader = loader(masked, named), quiet = true,
      steps = #masked / accumulate, accumulate = accumulate }
    local net = model
    model = nil
    return net.transformer.wte.weight, result, optimizer
  end

  it("with ps.optim skips steps without targets", function()
    local with, result, optimizer = run({ 3, 16, 16, 2 }, 1)
    assert.equal(2, optimizer.steps)
    assert.is_nil(result.history[2].loss)
    assert(result.history[4].loss > 1 and result.loss == result.history[4].loss)
    ps.manual_seed(5)
    local net = gpt2.new "tiny"
    local plain = ps.optim.AdamW(net, { lr = 1e-2 })
    for number, masked in ipairs { 3, 16, 16, 2 } do
      if masked < 16 then
        net(batch(number, masked)):backward()
        plain:step()
        plain:zero_grad()
      end
    end
    assert(lib.bytes(with) == lib.bytes(net.transformer.wte.weight))
  end)

  it("with ps.optim weights the batches of a step by their targets", function()
    local together = run({ 4, 12, 16 }, 3)
    ps.manual_seed(5)
    local net = gpt2.new "tiny"
    local plain = ps.optim.AdamW(net, { lr = 1e-2 })
    for number, masked in ipairs { 4, 12 } do
      (net(batch(number, masked)) * ((16 - masked) / 16)):backward()
    end
    plain:step { grad_scale = 1 }                                                 -- 24 and 8 of 32 targets
    local off = (together - net.transformer.wte.weight):abs():max():item()
    assert(off < 1e-5, off)
  end)

  it("accepts named batches", function()
    local named, result = run({ 0, 3, 5, 0 }, 2, true)
    local all = {}
    for number, masked in ipairs { 0, 3, 5, 0 } do all[number] = masked end
    assert.equal(2, #result.history)
    ps.manual_seed(5)
    local net = gpt2.new "tiny"
    local plain = ps.optim.AdamW(net, { lr = 1e-2 })
    for number, masked in ipairs(all) do
      local x, y = batch(number, masked)
      y:narrow(1, 15, 1):fill_(-100)
      local count = y:ne(-100):sum():item();
      (net(x, y) * count):backward()
      if number % 2 == 0 then
        plain:step { grad_scale = 1 / (number == 2 and 54 or 50) }
        plain:zero_grad()
      end
    end
    local off = (named - net.transformer.wte.weight):abs():max():item()
    assert(off < 1e-4, off)
  end)
end)
