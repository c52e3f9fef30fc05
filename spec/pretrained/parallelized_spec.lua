-- SPDX-License-Identifier: BSD-3-Clause
-- save_parallelized, from_parallelized and their merging: folders of models that several ranks hold, in OSLO's form.
local ps = require "ps"
local check = require "spec.check_lib"
local gpt2 = require "models.gpt2"
local json = require "cjson"
local lfs = require "lfs"
local lib = require "spec.ranks_lib"
local fails, merge = check.fails_saying, check.merge

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)
after_each(function() os.execute(("rm -rf '%s'/*"):format(folder)) end)
local function path(name) return folder .. "/" .. name end

local CONFIG = { vocab_size = 64, n_positions = 16, n_embd = 32, n_layer = 4, n_head = 2 }

local function bits(state)
  local all = {}
  for name, t in pairs(state) do all[#all + 1] = name .. " " .. t:dtype() .. " " .. check.bytes(t:contiguous()) end
  table.sort(all)
  return table.concat(all, "\n")
end

local function names_in(at)
  local all = {}
  for name in lfs.dir(at) do if name ~= "." and name ~= ".." then all[#all + 1] = name end end
  table.sort(all)
  return all
end

describe("a model in one process", function()
  it("is saved, loaded and merged", function()
    ps.manual_seed(3)
    local model = gpt2.new(CONFIG)
    model:save_parallelized(path "out")
    assert.same({ "config.json", "placement.json", "pytorch_model_tp_0_pp_0.bin" }, names_in(path "out"))
    assert.equal(bits(model:state_dict()), bits(ps.load(path "out/pytorch_model_tp_0_pp_0.bin")))
    assert.equal(bits(model:state_dict()), bits(gpt2.new(CONFIG):from_parallelized(path "out"):state_dict()))
    assert.equal(bits(model:state_dict()), bits(ps.from_pretrained(path "out"):state_dict()))
    assert.equal(0, (merge(path "out")))
    assert.equal(bits(model:state_dict()), bits(ps.load(path "out/pytorch_model.bin")))
    model:save_parallelized(path "out", { merge_checkpoints = true })
    assert.same({ "config.json", "pytorch_model.bin" }, names_in(path "out"))
    assert.equal(bits(model:state_dict()), bits(ps.load(path "out/pytorch_model.bin")))
    fails({ "merge_checkpoint" }, function() model:save_parallelized(path "out", { merge_checkpoint = true }) end)
  end)

  it("replaces its own folder, and no foreign folder", function()
    local model = gpt2.new(CONFIG)
    model:save_parallelized(path "out")
    check.write(path "out/pytorch_model_tp_0_pp_1.bin", "of a larger layout")
    fails({ "2 stages", "placement.json says 1" }, function() ps.from_pretrained(path "out") end)
    model:save_parallelized(path "out")
    assert.same({ "config.json", "placement.json", "pytorch_model_tp_0_pp_0.bin" }, names_in(path "out"))
    check.write(path "out/notes.txt", "mine")
    fails({ "notes.txt" }, function() model:save_parallelized(path "out") end)
    assert.equal("mine", check.read(path "out/notes.txt"))
    assert.same({ "out" }, names_in(folder))
  end)

  it("reads OSLO's folders of stages, whose files share tied tensors; refuses parts of layers", function()
    ps.manual_seed(3)
    local model = gpt2.new(CONFIG)
    model:save_parallelized(path "out")
    os.remove(path "out/placement.json")
    os.remove(path "out/pytorch_model_tp_0_pp_0.bin")
    local first, last = {}, {}
    for name, t in pairs(model:state_dict()) do
      local layer = name:match "%.h%.(%d)"
      if layer and tonumber(layer) > 1 or name:match "ln_f" then last[name] = t else first[name] = t end
    end
    last["lm_head.weight"] = model.transformer.wte.weight
    for layer = 0, 3 do
      local mask = ("transformer.h.%d.attn.bias"):format(layer)
      if layer > 1 then last[mask] = ps.ones { 1, 1, 4, 4 } else first[mask] = ps.ones { 1, 1, 4, 4 } end
    end
    ps.save(first, path "out/pytorch_model_tp_0_pp_0.bin")
    ps.save(last, path "out/pytorch_model_tp_0_pp_1.bin")
    assert.equal(bits(model:state_dict()), bits(gpt2.new(CONFIG):from_parallelized(path "out"):state_dict()))
    local code, text = merge(path "out", "--out", path "merged.bin")
    assert.equal(0, code, text)
    os.rename(path "merged.bin", path "out/pytorch_model.bin")
    assert.equal(bits(model:state_dict()), bits(ps.from_pretrained(path "out"):state_dict()))
    os.remove(path "out/pytorch_model.bin")
    last["transformer.wte.weight"] = ps.zeros { 64, 32 }                 -- not the first stage's values
    ps.save(last, path "out/pytorch_model_tp_0_pp_1.bin")
    code, text = merge(path "out")
    assert.equal(1, code)
    assert.truthy(text:find("transformer.wte.weight", 1, true))
    os.remove(path "out/pytorch_model_tp_0_pp_0.bin")
    fails({ "pytorch_model_tp_0_pp_0.bin is missing" }, function() gpt2.new(CONFIG):from_parallelized(path "out") end)
    check.write(path "out/pytorch_model_tp_1_pp_0.bin", "x")
    fails({ "tensor parallelism" }, function() gpt2.new(CONFIG):from_parallelized(path "out") end)
    assert.equal(1, (merge(path "out")))
  end)

  it("can be saved between backward and step, which continues with its gradients", function()
    local function run(saves)
      ps.manual_seed(5)
      local model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new(CONFIG) end,
        config = { plan_print = false, gradient_accumulation_steps = 2, bf16 = { enabled = true },
          optimizer = { type = "AdamW" }, memory = { host = 2 ^ 25 } } }
      local x = ps.randint(0, 64, { 2, 8 })
      for step = 1, 2 do
        optimizer:zero_grad()
        for _ = 1, 2 do
          model:backward(model(x, x))
          if saves and step == 2 then model:save_parallelized(path "mid") end
          optimizer:step()
        end
      end
      local state = bits(model:state_dict())
      model:close()
      return state
    end
    local want = run(false)
    assert.equal(want, run(true))
    assert.is_not_equal(want, bits(ps.load(path "mid/pytorch_model_tp_0_pp_0.bin")))  -- previous step's values
  end)
end)

describe("a model that ranks have in stages", function()

  local SCRIPT = [[
    local gpt2 = require "models.gpt2"
    local model = ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" },
      bf16 = { enabled = true }, zero_optimization = { stage = stage }, memory = { host = 2 ^ 25 }, chunk_size = 4096,
      pipeline = { stages = pp } },
      model_func = function()
        return gpt2.new { vocab_size = 64, n_positions = 16, n_embd = 32, n_layer = 4, n_head = 2 }
      end }
    model:from_parallelized(folder .. "/one")
    model:save_parallelized(folder .. "/stages")
    model:save_parallelized(folder .. "/whole", { merge_checkpoints = true })
    model:save_pretrained(folder .. "/pretrained")
  ]]

  it("is saved in stages, merged and in Hugging Face's form, and loaded on other ranks", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    ps.manual_seed(3)
    local model = gpt2.new(CONFIG)
    local want = bits(model:state_dict())
    model:save_parallelized(path "one")
    for _, at in ipairs { { 2, 2, 0 }, { 4, 2, 1 } } do
      local size, pp, stage = unpack(at)
      lib.check(folder, size, ("local pp, stage = %d, %d\n"):format(pp, stage) .. SCRIPT)
      assert.same({ "config.json", "placement.json", "pytorch_model_tp_0_pp_0.bin", "pytorch_model_tp_0_pp_1.bin" },
        names_in(path "stages"))
      local placement, count = json.decode(check.read(path "stages/placement.json")), 0
      for i = 0, 1 do
        local file = ("pytorch_model_tp_0_pp_%d.bin"):format(i)
        for name in pairs(ps.load(path("stages/" .. file))) do
          assert.equal(file, placement.weight_map[name])
          count = count + 1
        end
      end
      assert.equal(4 * 12 + 4, count)                                        -- the tied embedding counts once
      assert.equal(want, bits(gpt2.new(CONFIG):from_parallelized(path "stages"):state_dict()))
      assert.equal(want, bits(ps.load(path "whole/pytorch_model.bin")))
      assert.equal(want, bits(ps.load(path "pretrained/model.safetensors")))
      assert.equal(0, (merge(path "stages", "--out", path "merged.safetensors")))
      assert.equal(want, bits(ps.load(path "merged.safetensors")))
      os.execute(("rm -rf '%s' '%s' '%s' '%s'"):format(path "stages", path "whole", path "pretrained",
        path "merged.safetensors"))
    end
  end)
end)
