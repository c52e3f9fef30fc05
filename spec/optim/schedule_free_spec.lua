-- SPDX-License-Identifier: BSD-3-Clause
-- AdamWScheduleFree trains at y and evaluates at x: optimizer:eval() and train(), and the calls that use x by
-- themselves (ps.train.run, ps.train.evaluate, save_pretrained, generate, checkpoints without an optimizer).
local ps = require "ps"
local gpt2 = require "models.gpt2"
local nn = ps.nn

local BETA = 0.8
local WAYS = { { memory = "plain" }, { memory = "plain", half = true }, {}, { half = true },
  { half = true, memory = { master = "remainder" } } }

local function config(way)
  return { plan_print = false, chunk_size = 2048, memory = way.memory, bf16 = way.half and { enabled = true } or nil,
    optimizer = { type = "schedule_free_adamw", params = { lr = 1e-2, betas = { BETA, 0.99 }, warmup_steps = 2 } } }
end

local function model_func() return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 3)) end

local function made(way)
  ps.manual_seed(3)
  return ps.initialize { quiet = true, model_func = model_func, config = config(way) }
end

local function step(model, opt, way)
  local x = ps.randn { 6, 24 }
  model:backward((model(way.half and x:to "bf16" or x):to "fp32"):pow(2):mean())
  opt:step()
end

-- Returns copies of the fp32 values.
local function values(model)
  local out = {}
  for name, t in pairs(model:state_dict()) do out[name] = t:detach():clone():keep() end
  return out
end

local function distance(a, b)
  local most = 0
  for name, t in pairs(a) do most = math.max(most, (t - b[name]):abs():max():item()) end
  return most
end

local function close()
  local state = ps.engine()
  if state then state.model:close() end
end

describe("AdamWScheduleFree", function()
  local folder = os.tmpname() .. "d"
  setup(function() os.execute("mkdir -p " .. folder) end)
  after_each(close)
  teardown(function() os.execute("rm -rf " .. folder) end)

  it("moves the parameters to x = y + (1 - 1 / beta1) (z - y) and back, and refuses steps at x", function()
    for _, way in ipairs(WAYS) do
      local model, opt = made(way)
      for _ = 1, 4 do step(model, opt, way) end
      local y, z = values(model), opt:state_dict(model).tensors
      local want = {}
      for name, t in pairs(y) do want[name] = t + (z[name .. ".z"] - t) * (1 - 1 / BETA) end
      opt:eval()
      opt:eval()                                                         -- a second call changes nothing
      local x = values(model)
      assert.True(distance(x, y) > 1e-3)
      assert.near(0, distance(x, want), 1e-6)
      for name, p in model.module:named_parameters() do                  -- the model computes with these values
        assert.near(0, (p:to "fp32" - x[name]):abs():max():item(), way.half and 4e-3 or 0)
      end
      local ok, why = pcall(step, model, opt, way)
      assert.False(ok)
      assert.matches("AdamWScheduleFree, group 1: the parameters hold the averages", tostring(why), 1, true)
      assert.equal(4, opt.steps)
      opt:zero_grad()
      opt:train()
      assert.near(0, distance(values(model), y), 1e-6)
      step(model, opt, way)
      assert.equal(5, opt.groups[1].k)
      model:close()
    end
  end)

  it("evaluates and saves x without a call of eval(), and is unchanged by this in other optimizers", function()
    for _, way in ipairs { { memory = "plain" }, { half = true } } do
      ps.manual_seed(3)
      local model, opt = ps.initialize { quiet = true, config = config(way), model_func = function()
        return gpt2.new "tiny"
      end }
      local ids = ps.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 } }, { dtype = "int64" })
      local function loss() return ps.no_grad(function() return model(ids, ids):item() end) end
      for _ = 1, 5 do
        model:backward(model(ids, ids))
        opt:step()
      end
      local function batches()
        local done = false
        return function()
          if done then return nil end
          done = true
          return ids, ids
        end
      end
      model:eval()
      local at_y, y = loss(), values(model)
      local found = ps.train.evaluate(model, batches())
      model:save_pretrained(folder .. "/saved")
      assert.True(opt.groups[1].train_mode)
      assert.near(0, distance(values(model), y), 1e-6)
      opt:eval()
      local at_x, x = loss(), values(model)
      assert.True(math.abs(at_x - at_y) > 1e-3, ("%g and %g"):format(at_x, at_y))
      assert.near(at_x, found, way.half and 1e-2 or 1e-5)
      local saved = ps.safetensors.open(folder .. "/saved/model.safetensors")
      local most = 0
      for _, name in ipairs(saved:names()) do
        local own = x[name] or x["transformer." .. name]
        if own then most = math.max(most, (saved:tensor(name):to "fp32" - own):abs():max():item()) end
      end
      saved:close()
      assert.near(0, most, way.half and 4e-3 or 1e-6)
      opt:train()
      model:backward(model(ids, ids))
      local ok, why = pcall(model.save_pretrained, model, folder .. "/no")
      assert.False(ok)
      assert.matches("save_pretrained: a step has begun", tostring(why), 1, true)
      model:close()
    end
  end)

  it("is at x after ps.train.run, whose held-out losses are those of x", function()
    for _, way in ipairs { { plain = true }, { half = true } } do
      ps.manual_seed(3)
      local model, opt
      if way.plain then
        model = model_func()
        opt = ps.optim.AdamWScheduleFree(model, { lr = 1e-2, betas = { BETA, 0.99 } })
      else
        model, opt = made(way)
      end
      local x = ps.randn { 6, 24 }:keep()
      local function loss(m) return (m(way.half and x:to "bf16" or x):to "fp32"):pow(2):mean() end
      local function data()
        local done = false
        return function()
          if done then return nil end
          done = true
          return x
        end
      end
      local function run(steps, start)
        return ps.train.run { model = model, optimizer = opt, steps = steps, start = start, quiet = true, loss = loss,
          loader = { next = function() return x end, seq = 1, global_batch = 6 }, eval = { every = 4, data = data } }
      end
      local result = run(4)
      assert.False(opt.groups[1].train_mode)
      assert.near(result.val_loss, ps.no_grad(function() return loss(model):item() end), way.half and 1e-2 or 1e-6)
      assert.True(math.abs(result.val_loss - result.loss) > 1e-4)
      run(6, 4)
      assert.equal(6, opt.groups[1].k)
    end
  end)

  it("resumes from a checkpoint bit for bit, which a model without an optimizer loads as x", function()
    for number, way in ipairs(WAYS) do
      local model, opt = made(way)
      for _ = 1, 3 do step(model, opt, way) end
      local path = folder .. "/" .. number
      ps.checkpoints.save(path, { model = model, optimizer = opt, step = 3 })
      ps.manual_seed(4)
      step(model, opt, way)
      local next_y = values(model)
      model:close()
      model, opt = made(way)
      ps.checkpoints.load(path, { model = model, optimizer = opt })
      ps.manual_seed(4)
      step(model, opt, way)
      assert.equal(0, distance(values(model), next_y))
      assert.equal(4, opt.groups[1].k)
      ps.checkpoints.load(path, { model = model, optimizer = opt })
      opt:eval()
      local x = values(model)
      model:close()
      local other = model_func()
      ps.checkpoints.load(path, { model = other })
      for name, p in other:named_parameters() do
        assert.near(0, (p - x[name]):abs():max():item(), 1e-7, name)
      end
    end
  end)

  it("needs a beta1 above 0", function()
    local ok, why = pcall(ps.optim.AdamWScheduleFree, model_func(), { betas = { 0, 0.9 } })
    assert.False(ok)
    assert.matches("betas[1] is 0", tostring(why), 1, true)
  end)
end)
