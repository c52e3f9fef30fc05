-- SPDX-License-Identifier: BSD-3-Clause
-- Saving and loading the state of an engine: checkpoints that continue bit for bit in any other memory, both forms of
-- the optimizer's state, PyTorch's files in both directions (if a Python with torch is found: PS_TORCH_PYTHON, else
-- python3), values written to parameters from outside, and budgets that always hold.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local lfs = require "lfs"
local gpt2 = require "models.gpt2"
local chunks = require "ps.memory.chunks"
local check = require "spec.check_lib"
local C, ffi, optim, checkpoints = ps.C, ps.ffi, ps.optim, ps.checkpoints
local L = dofile(require("ps.paths").root .. "/spec/chunks_lib.lua")

local folder
local function path(name) return folder .. "/" .. name end

local function empty(dir)
  for name in lfs.dir(dir) do
    local at = dir .. "/" .. name
    if name ~= "." and name ~= ".." then
      if lfs.attributes(at, "mode") == "directory" then
        empty(at)
        lfs.rmdir(at)
      else
        os.remove(at)
      end
    end
  end
end

local function merged(...)
  local all = {}
  for i = 1, select("#", ...) do
    for key, value in pairs((select(i, ...))) do all[key] = value end
  end
  return all
end

local open                                               -- the engine to close if a test fails

local BASE = { optimizer = { type = "AdamW", params = { lr = 1e-3, weight_decay = 0.1 } }, plan_print = false,
  scheduler = { type = "WarmupLR", params = { warmup_num_steps = 5 } }, gradient_clipping = 1 }

local function engine(config, options)
  options = options or {}
  for i = #open, 1, -1 do
    if inner(open[i]).closed then table.remove(open, i) end
  end
  collectgarbage()
  collectgarbage()
  ps.manual_seed(7)
  local model, optimizer = ps.initialize { config = merged(BASE, config), quiet = true,
    model_func = options.model_func or function() return gpt2.new("tiny", { dropout = 0.1 }) end,
    param_groups = options.param_groups }
  open[#open + 1] = model
  return model, optimizer
end

local function step(model, optimizer, number)
  local x = ps.tensor({ { 1, 2, 3, 4, number, 6, 7, 8 }, { 9, 8, 7, 6, 5, 4, 3, number } }, "int32")
  optimizer:zero_grad()
  local loss = model(x, x)
  local value = loss:item()
  model:backward(loss)
  optimizer:step()
  return value
end

local function steps(model, optimizer, from, to)
  local losses = {}
  for number = from, to do losses[#losses + 1] = step(model, optimizer, number) end
  return losses
end

-- Returns a number that (most likely) changes if one bit of a tensor changes. Makes no tensor of the tensor's size, so
-- that budgets do not have to hold one, and Lua's collector does not decide whether they do.
local hash_out = ffi.new "uint64_t[1]"
local function digest(t, dtype)
  return ps.no_grad(function()
    ps.check(C.ps_tensor_hash((dtype and t:to(dtype) or t:detach()):to("cpu"):contiguous(), hash_out))
    return ("%016x"):format(hash_out[0])
  end)
end

local function digests(tensors)
  local all = {}
  for name, t in pairs(tensors) do all[name] = digest(t) end
  return all
end

local function end_state(model, optimizer)
  return { model = digests(model:state_dict()), optimizer = digests(optimizer:state_dict(model).tensors) }
end

local fails = check.fails

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(lfs.mkdir(folder))
end)
teardown(function()
  empty(folder)
  lfs.rmdir(folder)
end)
before_each(function() open = {} end)
after_each(function()
  for _, model in ipairs(open) do model:close() end
  open = {}
  empty(folder)
end)

local MEMORY = {
  { memory = "plain" },
  {},
  { chunk_size = 4096, eviction = "lru", memory = { host = 0, disk = { path = "/tmp", limit = 2 ^ 26 } } },
  { device = "sim", chunk_size = 8192, memory = { device = "4MiB" } },
}

-- Returns the settings with approximately the smallest host memory, in addition to a disk tier, in which steps run and
-- state can be read.
local function tight(settings, options)
  local memory = { host = 100 * 1024, disk = MEMORY[3].memory.disk }
  settings = merged(settings, { memory = memory })
  L.fit(settings, function()
    L.used()
    local ok, problem = pcall(function()
      local model, optimizer = engine(settings, options)
      steps(model, optimizer, 1, 2)
      end_state(model, optimizer)
    end)
    if open[#open] and not inner(open[#open]).closed then open[#open]:close() end
    if not ok then error(problem, 0) end
  end)
  return settings
end

-- Returns a precision's settings with MEMORY[i]. With `room`, there are also bytes for the test's own tensors, which
-- count against the budget.
local least = {}
local function in_memory(precision, i, room)
  local settings = merged(precision, MEMORY[i])
  if i ~= 3 then return settings end
  least[precision] = least[precision] or tight(settings).memory.host
  return merged(settings, { memory = merged(MEMORY[3].memory, { host = least[precision] + (room or 0) }) })
end
local ROOM = 2 ^ 19
local TYPES = {
  fp32 = {},
  bf16 = { bf16 = { enabled = true } },
  fp16 = { fp16 = { enabled = true, initial_scale_power = 18, loss_scale_window = 2, hysteresis = 1 } },
}

describe("a checkpoint of an engine", function()
  for name, precision in pairs(TYPES) do
    it("continues bit for bit in any other memory: " .. name, function()
      local function whole()
        local model, optimizer = engine(in_memory(precision, 1))
        local losses = steps(model, optimizer, 1, 8)
        local state = end_state(model, optimizer)
        model:close()
        return losses, state, optimizer.scaler and optimizer.scaler:state_dict(), optimizer.steps
      end
      local losses, state, scale, updates = whole()
      if name == "fp16" then assert.truthy(updates < 8, "no step was skipped") end
      for i in ipairs(MEMORY) do
        local function first()
          local model, optimizer = engine(in_memory(precision, i))
          steps(model, optimizer, 1, 4)
          checkpoints.save(path "at4.safetensors", { model = model, optimizer = optimizer })
          model:close()
        end
        local function second(j)
          local model, optimizer = engine(in_memory(precision, j))
          steps(model, optimizer, 20, 20)                      -- the earlier values do not matter
          checkpoints.load(path "at4.safetensors", { model = model, optimizer = optimizer })
          local rest = steps(model, optimizer, 5, 8)
          for k = 1, 4 do assert.equal(losses[4 + k], rest[k]) end
          assert.same(state, end_state(model, optimizer))
          assert.equal(updates, optimizer.steps)
          assert.equal(8, inner(model).steps)
          if scale then assert.same(scale, optimizer.scaler:state_dict()) end
          assert.equal(updates, inner(model).scheduler.count)
          model:close()
        end
        first()
        second(i % #MEMORY + 1)
        second((i + 1) % #MEMORY + 1)
      end
    end)
  end

  it("continues with ps.optim, and loads states of ps.optim", function()
    local config = { bf16 = { enabled = true }, gradient_clipping = 0 }
    local function by_hand()
      collectgarbage()
      ps.manual_seed(7)
      local model = gpt2.new("tiny", { dropout = 0.1, dtype = "bf16" })
      return model, optim.AdamW(model, { lr = 1e-3, weight_decay = 0.1 })
    end
    local function hand_steps(model, optimizer, from, to)
      local losses = {}
      for number = from, to do
        local x = ps.tensor({ { 1, 2, 3, 4, number, 6, 7, 8 } }, "int32")
        local loss = model(x, x)
        losses[#losses + 1] = loss:item()
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
      end
      return losses
    end
    local function engine_steps(model, optimizer, from, to)
      local losses = {}
      for number = from, to do
        local x = ps.tensor({ { 1, 2, 3, 4, number, 6, 7, 8 } }, "int32")
        local loss = model(x, x)
        losses[#losses + 1] = loss:item()
        model:backward(loss)
        optimizer:step()
      end
      return losses
    end
    config.scheduler = { type = "constant" }
    local hand, hand_opt = by_hand()
    hand_steps(hand, hand_opt, 1, 3)
    checkpoints.save(path "hand.safetensors", { model = hand, optimizer = hand_opt })
    local want = hand_steps(hand, hand_opt, 4, 6)
    local model, optimizer = engine(config)
    local parts = { model = model, optimizer = optimizer }
    assert.matches("saved without a schedule", check.printed(checkpoints.load, path "hand.safetensors", parts), 1, true)
    assert.equal(3, ps.engine().scheduler.count)
    model:close()
    config.scheduler = nil
    local saved = BASE.scheduler
    BASE.scheduler = nil
    model, optimizer = engine(config)
    BASE.scheduler = saved
    checkpoints.load(path "hand.safetensors", { model = model, optimizer = optimizer })
    checkpoints.save(path "engine.safetensors", { model = model, optimizer = optimizer })
    assert.same(want, engine_steps(model, optimizer, 4, 6))
    model:close()
    hand, hand_opt = by_hand()
    checkpoints.load(path "engine.safetensors", { model = hand, optimizer = hand_opt })
    assert.same(want, hand_steps(hand, hand_opt, 4, 6))
  end)

  it("contains the data position", function()
    local out = assert(io.open(path "text.txt", "wb"))
    for i = 1, 400 do out:write(("line %d of a text\n"):format(i * i)) end
    out:close()
    local function loader()
      return ps.data.loader { file = path "text.txt", width = 1, batch = 2, seq = 8, seed = 3, vocab = 256 }
    end
    local function train(model, optimizer, data, n)
      local losses = {}
      for batch in data do
        optimizer:zero_grad()
        local loss = model(batch)
        losses[#losses + 1] = loss:item()
        model:backward(loss)
        optimizer:step()
        if #losses == n then break end
      end
      return losses
    end
    local model, optimizer = engine({})
    local data = loader()
    train(model, optimizer, data, 3)
    checkpoints.save(path "out", { model = model, optimizer = optimizer, loader = data })
    local want = train(model, optimizer, data, 3)
    model:close()
    model, optimizer = engine({ chunk_size = 4096 })
    data = loader()
    assert.equal(3, checkpoints.load(path "out", { model = model, optimizer = optimizer, loader = data }).step)
    assert.same(want, train(model, optimizer, data, 3))
  end)

  it("is saved only between steps", function()
    for i = 1, 2 do
      local model, optimizer = engine(in_memory(TYPES.bf16, i))
      step(model, optimizer, 1)
      local before = end_state(model, optimizer)
      checkpoints.save(path "a.safetensors", { model = model, optimizer = optimizer })
      local x = ps.tensor({ { 1, 2, 3 } }, "int32")
      model:backward(model(x, x))
      fails(function() checkpoints.save(path "b.safetensors", { model = model, optimizer = optimizer }) end,
        "between steps")
      checkpoints.load(path "a.safetensors", { model = model, optimizer = optimizer })     -- abandons the step
      assert.same(before, end_state(model, optimizer))
      step(model, optimizer, 2)
      model:close()
    end
  end)
end)

describe("the optimizer's state", function()
  local GROUPS = { { match = function(name) return name:find("bias") ~= nil end, weight_decay = 0 },
    { lr = 5e-4 } }

  for i in ipairs(MEMORY) do
    it("can be saved to .pt files and loaded, whole and lazily, in both forms, memory " .. i, function()
      local config = in_memory(TYPES.bf16, i, ROOM)
      local model, optimizer = engine(config, { param_groups = GROUPS })
      steps(model, optimizer, 1, 2)
      ps.save(model:state_dict(), path "model.pt")
      ps.save(model:state_dict(), path "model.safetensors")
      ps.save(optimizer:state_dict(), path "torch.pt")
      ps.save(optimizer:state_dict(model), path "named.pt")
      ps.save({ model = model:state_dict(), optimizer = optimizer:state_dict() }, path "both.pt")
      local before, groups = end_state(model, optimizer), optimizer.groups
      local want = step(model, optimizer, 3)
      local rng = ps.rng()
      for _, load in ipairs {
        function(m, o) m:load_state_dict(ps.load(path "model.pt")); o:load_state_dict(ps.load(path "torch.pt")) end,
        function(m, o)
          m:load_state_dict(ps.load(path "model.safetensors", { lazy = true }))
          o:load_state_dict(ps.load(path "torch.pt", { lazy = true }))
        end,
        function(m, o)
          m:load_state_dict(ps.load(path "model.pt", { lazy = true }))
          o:load_state_dict(ps.load(path "named.pt", { lazy = true }))
        end,
        function(m, o)
          local both = ps.load(path "both.pt", { lazy = true })
          m:load_state_dict(both:at "model")
          o:load_state_dict(both:at "optimizer")
        end,
      } do
        load(model, optimizer)
        assert.same(before, end_state(model, optimizer))
        assert.equal(2, optimizer.steps)
        rng.step = 2
        assert.equal(want, step(model, optimizer, 3))
      end
      assert.equal(2, #groups)
      assert.equal(0, groups[1].weight_decay)
    end)
  end

  it("is refused if it does not fit, and then nothing has changed", function()
    local model, optimizer = engine({})
    steps(model, optimizer, 1, 2)
    local before = end_state(model, optimizer)
    local good = optimizer:state_dict()
    local bad = { state = merged(good.state), param_groups = good.param_groups }
    bad.state[3] = { step = 1, exp_avg = ps.zeros { 3 }, exp_avg_sq = ps.zeros { 3 } }
    fails(function() optimizer:load_state_dict(bad) end, "exp_avg of parameter", "is [3], but the parameter is [")
    bad.state[3] = { step = 1.5, exp_avg = good.state[3].exp_avg, exp_avg_sq = good.state[3].exp_avg_sq }
    fails(function() optimizer:load_state_dict(bad) end, "step of parameter", "1.5, not a whole number")
    fails(function() optimizer:load_state_dict({ state = {}, param_groups = {} }) end, "0 groups, but this one has 1")
    fails(function() optimizer:load_state_dict({}) end, "no param_groups")
    fails(function() optimizer:load_state_dict(3) end, "not a number")
    local named = optimizer:state_dict(model)
    named.tensors["transformer.wpe.weight.exp_avg"] = nil
    fails(function() optimizer:load_state_dict(named) end, "no transformer.wpe.weight.exp_avg")
    ps.save(model:state_dict(), path "m.safetensors")
    fails(function() optimizer:load_state_dict(ps.load(path "m.safetensors", { lazy = true })) end, "has only tensors")
    assert.same(before, end_state(model, optimizer))
  end)
end)

describe("values from outside", function()
  local function weights()
    ps.manual_seed(11)
    return gpt2.new("tiny", {})
  end

  for i in ipairs(MEMORY) do
    it("are loaded exactly into masters and rounded into parameters, memory " .. i, function()
      local source = weights()
      local want = digests(source:state_dict())
      source:save_pretrained(path "hf")
      ps.save(source:state_dict(), path "w.pt")
      local loads = {
        function(model) model:load_weights(path "hf/model.safetensors") end,
        function(model) model:load_state_dict(ps.load(path "w.pt", { lazy = true })) end,
        function(model) model.module:load_state_dict(source:state_dict()) end,
        function(model)
          local part = {}
          for name, t in pairs(source:state_dict()) do part[name:match("^transformer%.(.*)$")] = t end
          model.transformer:load_state_dict(part)
        end,
      }
      for _, load in ipairs(loads) do
        local model, optimizer = engine(in_memory(TYPES.bf16, i, ROOM))
        step(model, optimizer, 1)
        load(model)
        assert.same(want, digests(model:state_dict()))
        for name, p in model:named_parameters() do
          assert.equal(digest(source:state_dict()[name], "bf16"), digest(p))
        end
        optimizer:set_lr(0)
        for _, group in ipairs(optimizer.groups) do group.weight_decay = 0 end
        local was = inner(model).scheduler
        inner(model).scheduler = nil
        step(model, optimizer, 2)
        inner(model).scheduler = was
        assert.same(want, digests(model:state_dict()))
        model:close()
      end
      local model = engine(in_memory(TYPES.bf16, i, ROOM), { model_func = function()
        return gpt2.from_pretrained(path "hf")
      end })
      assert.same(want, digests(model:state_dict()))
    end)

    it("written in place become the masters' values, memory " .. i, function()
      local model, optimizer = engine(in_memory(TYPES.bf16, i, ROOM))
      step(model, optimizer, 1)
      local p = model.module.transformer.wpe.weight
      ps.no_grad(function() p:fill_(0.5) end)
      assert.equal(0.5, model:state_dict()["transformer.wpe.weight"]:to("cpu"):amin():item())
      local other = model.module.transformer.h[0].ln_1.weight
      ps.nn.init.constant_(other, 2)
      optimizer:set_lr(0)
      for _, group in ipairs(optimizer.groups) do group.weight_decay = 0 end
      step(model, optimizer, 2)
      assert.equal(0.5, p:to("cpu"):to("fp32"):amax():item())
      assert.equal(2, other:to("cpu"):to("fp32"):amin():item())
    end)
  end
end)

describe("budgets", function()
  it("hold while state is saved and loaded", function()
    local options = { model_func = function()
      return gpt2.new("tiny", { n_embd = 64, n_layer = 4, n_positions = 16 })
    end }
    local config, half_bytes = tight({ bf16 = { enabled = true }, chunk_size = 16384 }, options), 0
    for _, p in ipairs(options.model_func():parameters()) do half_bytes = half_bytes + p:numel() * 2 end
    config.memory.host = config.memory.host + half_bytes    -- `half`, below
    local model, optimizer = engine(config, options)
    steps(model, optimizer, 1, 2)
    local state = inner(model).built.state_bytes
    assert.truthy(state > 2 * 2 ^ 20, state)
    local half = {}
    for name, t in pairs(model:state_dict()) do half[name] = ps.no_grad(function() return t:to("fp16") end) end
    ps.save(half, path "half.safetensors")
    local before = end_state(model, optimizer)
    half = nil -- luacheck: ignore 311
    collectgarbage()
    collectgarbage()
    collectgarbage("stop")                                  -- the result must not depend on Lua's collector
    checkpoints.save(path "run.safetensors", { model = model, optimizer = optimizer })
    ps.save(optimizer:state_dict(), path "o.pt")
    checkpoints.load(path "run.safetensors", { model = model, optimizer = optimizer })
    optimizer:load_state_dict(ps.load(path "o.pt", { lazy = true }))
    local host = chunks.tiers()[1]
    model:load_state_dict(ps.load(path "half.safetensors", { lazy = true }))
    checkpoints.load(path "run.safetensors", { model = model, optimizer = optimizer })
    local after = chunks.tiers()[1]
    collectgarbage("restart")
    assert.truthy(after.peak <= after.budget, after.peak)
    assert.truthy(after.other <= host.other + 2 ^ 20, after.other)
    assert.same(before, end_state(model, optimizer))
  end)
end)

describe("PyTorch", function()
  if check.lower_set then return end
  local python

  local function capture(command)
    return check.shell(command)
  end

  setup(function()
    for _, candidate in ipairs { os.getenv "PS_TORCH_PYTHON" or "python3", "python3", "/usr/bin/python3" } do
      if not python and select(2, capture(candidate .. " -c 'import torch'")) == 0 then python = candidate end
    end
  end)

  local SCRIPT = [=[
import sys, torch
torch.set_num_threads(1)
model = torch.load(sys.argv[1], weights_only=True)
saved = torch.load(sys.argv[2])                     # weights_only of PyTorch 1.13 takes no floats
names = open(sys.argv[4]).read().split()
decay = [torch.nn.Parameter(model[n].clone()) for n in names if "bias" not in n]
plain = [torch.nn.Parameter(model[n].clone()) for n in names if "bias" in n]
assert all(p.dtype == torch.float32 for p in decay + plain)
opt = torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decay}], lr=0.1)
opt.load_state_dict(saved)
assert opt.param_groups[0]["weight_decay"] == 0 and opt.param_groups[1]["weight_decay"] == 0.1
assert abs(opt.param_groups[1]["lr"] - 1e-3) < 1e-12
for i, p in enumerate(plain + decay):
    assert torch.equal(opt.state[p]["exp_avg"], saved["state"][i]["exp_avg"])
    assert float(opt.state[p]["step"]) == 2
    p.grad = torch.full_like(p, 0.25)
opt.step()
by_name = dict(zip([n for n in names if "bias" in n] + [n for n in names if "bias" not in n], plain + decay))
torch.save({n: p.detach() for n, p in by_name.items()}, sys.argv[3] + "/model.pt")
torch.save(opt.state_dict(), sys.argv[3] + "/opt.pt")
]=]

  it("loads a model and an optimizer, and saves them", function()
    if not python then
      pending("no Python with torch (PS_TORCH_PYTHON names one)")
      return
    end
    local groups = { { match = function(name) return name:find("bias") ~= nil end, weight_decay = 0 }, {} }
    for i = 3, 4 do
      local config = merged(in_memory(TYPES.bf16, i, ROOM), { scheduler = { type = "constant" } })
      local model, optimizer = engine(config, { param_groups = groups })
      steps(model, optimizer, 1, 2)
      ps.save(model:state_dict(), path "m.pt")
      ps.save(optimizer:state_dict(), path "o.pt")
      local names, file = {}, assert(io.open(path "names", "wb"))
      for name in model:named_parameters() do names[#names + 1] = name end
      file:write(table.concat(names, "\n"))
      file:close()
      file = assert(io.open(path "s.py", "wb"))
      file:write(SCRIPT)
      file:close()
      lfs.mkdir(path "theirs")
      local out, code = capture(table.concat({ python, path "s.py", path "m.pt", path "o.pt", path "theirs",
        path "names" }, " "))
      if code ~= 0 then error(out) end
      local theirs = ps.load(path "theirs/opt.pt")
      model:load_state_dict(ps.load(path "theirs/model.pt", { lazy = true }))
      optimizer:load_state_dict(ps.load(path "theirs/opt.pt", { lazy = true }))
      assert.equal(3, optimizer.steps)
      local at = 0
      for _, biased in ipairs { true, false } do
        for _, name in ipairs(names) do
          if (name:find("bias") ~= nil) == biased then
            local m = optimizer:state_dict(model).tensors[name .. ".exp_avg"]
            assert.equal(digest(theirs.state[at].exp_avg), digest(m))
            at = at + 1
          end
        end
      end
      step(model, optimizer, 3)
      model:close()
    end
  end)
end)
