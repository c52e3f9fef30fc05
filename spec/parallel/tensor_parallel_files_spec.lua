-- SPDX-License-Identifier: BSD-3-Clause
-- Checkpoints and weights of engines whose layers ranks share (tensor_parallel.size), together with pipelines and ZeRO:
-- the same bits on every mesh, including averages, masters, and tables that are tied and padded.
local ps = require "ps"
local check = require "spec.check_lib"
local gpt2 = require "models.gpt2"
local lib = require "spec.ranks_lib"
local lfs = require "lfs"
local rank_files = require "ps.checkpoints.rank_files"

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- A vocabulary that is not a multiple of any number of ranks, and dropout.
local SCRIPT = [[
  local gpt2 = require "models.gpt2"
  local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, optimizer = optimizer_config,
    pipeline = { stages = pp }, tensor_parallel = { size = tp }, bf16 = { enabled = true },
    zero_optimization = { stage = stage }, memory = { host = 2 ^ 25 }, chunk_size = 4096 },
    model_func = function()
      if weights == "made" then return ps.from_pretrained(folder .. "/parts", { quiet = true }) end
      local made = gpt2.new { vocab_size = 61, n_positions = 16, n_embd = 16, n_layer = 2, n_head = 4 }
      made.transformer.h[1].ln_2.bias:requires_grad(false)
      return made
    end }
  local parts = { model = model, optimizer = optimizer }
  local function steps(n)
    for _ = 1, n do
      ps.manual_seed(5)
      local x = ps.randint(0, 61, { 2, 8 })
      optimizer:zero_grad()
      model:backward(model(x, x))
      optimizer:step()
    end
  end
  if from then ps.checkpoints.load(folder .. "/" .. from, parts) elseif weights ~= "made" then steps(2) end
  ps.checkpoints.save(folder .. "/" .. to, parts)
  if weights == "save" then
    model:save_pretrained(folder .. "/pretrained")
    model:save_parallelized(folder .. "/parts")
  elseif weights == "load" then
    model:from_parallelized(folder .. "/parts")
    model:save_parallelized(folder .. "/whole", { merge_checkpoints = true })
  elseif weights == "made" then
    model:save_pretrained(folder .. "/made")
    model:load_state_dict(model:state_dict())                   -- the rank's own state
    model:save_parallelized(folder .. "/own", { merge_checkpoints = true })
  elseif weights == "step" then
    steps(1)
    ps.checkpoints.save(folder .. "/" .. to, parts)
  end
]]

-- Loads and saves a checkpoint with another layout. `at` has the numbers of ranks, stages and ranks along tp, and the
-- ZeRO stage. `optimizer` is its configuration as text (default AdamW).
local function through(at, from, to, weights, optimizer)
  local size, pp, tp, stage = unpack(at)
  lib.check(folder, size, ("local pp, tp, stage, from, to, weights = %d, %d, %d, %s, %q, %q\n"):format(pp, tp, stage,
    from and ("%q"):format(from) or "nil", to, weights or "") .. ("local optimizer_config = %s\n"):format(optimizer
    or '{ type = "AdamW" }') .. SCRIPT)
end

-- Returns the contents of a checkpoint.
local function contents(name, step)
  local files, index = rank_files.open(("%s/%s/step-%08d"):format(folder, name, step))
  local all = { updates = index.updates, optimizer = index.state.optimizer }
  for _, tensor in ipairs(files:names()) do all[tensor] = files:dtype(tensor) .. check.bytes(files:tensor(tensor)) end
  files:close()
  return all, index
end

describe("an engine whose layers are cut among ranks", function()
  it("has the same checkpoint on every mesh, and continues from it bit for bit", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    through({ 2, 1, 2, 0 }, nil, "a", "step")
    local want, index = contents("a", 2)
    local later = contents("a", 3)
    assert.same({ 3, 2 }, { index.version, index.mesh.tp })
    assert.same({ 61, 16 }, index.tensors["optimizer.transformer.wte.weight.exp_avg"].shape)
    assert.equal(6, #index.tensors["optimizer.transformer.h.0.attn.c_attn.weight.exp_avg_sq"].pieces)
    os.remove(folder .. "/a/latest")
    local last = "a/step-00000002"
    for i, at in ipairs { { 8, 2, 2, 1, "save" }, { 4, 1, 4, 0, "load" }, { 2, 1, 1, 3 }, { 4, 1, 2, 2 },
      { 2, 1, 2, 0, "step" } } do
      through(at, last, "b" .. i, at[5])
      last = "b" .. i .. "/step-00000002"
      assert.same(want, (contents("b" .. i, 2)))
    end
    assert.same(later, (contents("b5", 3)))

    through({ 4, 2, 2, 0 }, nil, "made_state", "made")
    local function is_wanted(name, t)
      local dtype = name:match "h%.1%.ln_2%.bias" and "bf16" or "fp32"                  -- the frozen parameter is bf16
      return want[name] == dtype .. check.bytes(t:to(dtype))
    end
    local state = {}                                            -- weights as whole tensors
    for name, t in pairs(gpt2.new({ vocab_size = 61, n_positions = 16, n_embd = 16, n_layer = 2, n_head = 4 })
      :state_dict()) do state[name] = t:shape() end
    for _, path in ipairs { "/pretrained/model.safetensors", "/whole/pytorch_model.bin",
      "/made/model.safetensors", "/own/pytorch_model.bin" } do
      local all = ps.load(folder .. path)
      for name, t in pairs(all) do
        assert.same(state[name], t:shape())
        assert.truthy(is_wanted(name, t), name)
      end
      for name in pairs(state) do assert.truthy(all[name] ~= nil, name) end
    end
    local files = 0
    for name in lfs.dir(folder .. "/parts") do if name:match "%.bin$" then files = files + 1 end end
    assert.equal(4, files)
    local model = ps.from_pretrained(folder .. "/parts")
    for name, t in pairs(model:state_dict()) do assert.truthy(is_wanted(name, t), name) end
  end)

  it("also moves SGD's momentum between meshes, and continues from it bit for bit", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local SGD = '{ type = "SGD", params = { lr = 0.1, momentum = 0.9 } }'
    through({ 2, 1, 2, 0 }, nil, "s", "step", SGD)
    local want, index = contents("s", 2)
    assert.same({ 61, 16 }, index.tensors["optimizer.transformer.wte.weight.momentum_buffer"].shape)
    assert.is_nil(index.tensors["optimizer.transformer.wte.weight.exp_avg"])
    os.remove(folder .. "/s/latest")
    local last = "s/step-00000002"
    for i, at in ipairs { { 4, 2, 2, 0 }, { 2, 1, 1, 3 }, { 2, 1, 2, 0, "step" } } do
      through(at, last, "t" .. i, at[5], SGD)
      last = "t" .. i .. "/step-00000002"
      assert.same(want, (contents("t" .. i, 2)))
    end
    assert.same((contents("s", 3)), (contents("t3", 3)))
  end)
end)
