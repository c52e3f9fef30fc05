-- SPDX-License-Identifier: BSD-3-Clause
-- States of optimizers that are loaded over a run: a state without updates starts again like a new run; a state of
-- another algorithm is refused by name. For ps.optim and engines in both kinds of memory.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local lib = require "spec.check_lib"
local fails = lib.fails

local model

after_each(function()
  if model and inner(model) then model:close() end
  model = nil
end)

local function linear()
  ps.manual_seed(1)
  return ps.nn.Linear(8, 8)
end

local MAKERS = {
  ["ps.optim.AdamW"] = function()
    model = linear()
    return ps.optim.AdamW(model, { lr = 1e-2 })
  end,
  ["ps.optim.SGD"] = function()
    model = linear()
    return ps.optim.SGD(model, { lr = 1e-2, momentum = 0.9 })
  end,
}
for name, config in pairs { ["an engine in chunks"] = {}, ["an engine in plain memory"] = { memory = "plain" },
  ["an engine in bf16"] = { bf16 = { enabled = true } }, ["an engine over a disk"] = { chunk_size = 1024,
    memory = { host = "1MiB", disk = { path = "/tmp", limit = "8MiB" } } } } do
  MAKERS[name] = function()
    local all = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
    for key, value in pairs(config) do all[key] = value end
    local optimizer
    model, optimizer = ps.initialize { quiet = true, model_func = linear, config = all }
    return optimizer
  end
end

local function step(optimizer, seed)
  ps.manual_seed(seed)
  local dtype = model:parameters()[1]:dtype()
  local loss = model(ps.randn({ 4, 8 }):to(dtype)):square():mean()
  if inner(model) then model:backward(loss) else loss:backward() end
  optimizer:step()
  optimizer:zero_grad()
end

local function values()
  local parts = {}
  for name, t in pairs(model:state_dict()) do parts[#parts + 1] = name .. lib.bytes(t) end
  table.sort(parts)
  return table.concat(parts)
end

describe("a run that returns to step 0", function()
  for name, make in pairs(MAKERS) do
    it("continues like a new one: " .. name, function()
      local file = os.tmpname() .. ".safetensors"
      local optimizer = make()
      local parts = { model = model, optimizer = optimizer, step = 0, quiet = true }
      ps.checkpoints.save(file, parts)
      for i = 1, 3 do step(optimizer, i) end
      local fresh = values()
      for i = 4, 8 do step(optimizer, i) end
      ps.checkpoints.load(file, parts)
      for i = 1, 3 do step(optimizer, i) end
      assert(values() == fresh)
      os.remove(file)
    end)
  end

  for name, make in pairs(MAKERS) do
    if name:find "engine" then
      it("also does so by a state in PyTorch's form without an entry for one parameter: " .. name, function()
        local optimizer = make()
        local bias                                             -- the bias's index in PyTorch's form
        for i = 1, optimizer:count() do if optimizer:slot(i).name == "bias" then bias = i - 1 end end
        for i = 1, 3 do step(optimizer, i) end
        local saved = optimizer:state_dict()
        saved.state[bias] = nil
        optimizer:load_state_dict(saved)
        for i = 1, optimizer:count() do
          local slot = optimizer:slot(i)
          local largest = slot.averages[1]:abs():max():item() + slot.averages[2]:abs():max():item()
          assert.equal(i - 1 == bias and 0 or 3, optimizer:updates(i))
          assert.equal(i - 1 == bias, largest == 0)
        end
      end)
    end
  end
end)

describe("a state in PyTorch's form", function()
  -- Returns the groups that torch.optim.AdamW and Adam of PyTorch 2.15 write.
  local function group(more)
    local all = { lr = 0.001, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0.01, amsgrad = false,
      maximize = false, capturable = false, differentiable = false, decoupled_weight_decay = true, params = { 0, 1 } }
    for key, value in pairs(more) do all[key] = value end
    return { state = {}, param_groups = { all } }
  end

  for _, name in ipairs { "an engine in chunks", "an engine in plain memory" } do
    it("of another algorithm is refused before anything changes: " .. name, function()
      local optimizer = MAKERS[name]()
      step(optimizer, 1)
      local before = values()
      fails(function() optimizer:load_state_dict(group { amsgrad = true }) end, "param_groups[1]", "amsgrad = True",
        "AdamW")
      fails(function() optimizer:load_state_dict(group { maximize = true }) end, "maximize = True")
      fails(function() optimizer:load_state_dict(group { decoupled_weight_decay = false }) end, "is Adam's (",
        "this one is AdamW")
      fails(function()
        optimizer:load_state_dict { state = {}, param_groups = { { lr = 0.1, momentum = 0.9, params = { 0, 1 } } } }
      end, "momentum and no betas")
      assert(values() == before and optimizer.steps == 1 and optimizer.groups[1].lr == 1e-2)
      optimizer:load_state_dict(group { decoupled_weight_decay = false, weight_decay = 0 })    -- the same without decay
      optimizer:load_state_dict(group { lr = ps.tensor(0.25) })                       -- as with PyTorch's capturable
      assert.equal(0.25, optimizer.groups[1].lr)
      assert.equal(0, optimizer.steps)
    end)
  end
end)
