-- SPDX-License-Identifier: BSD-3-Clause
-- Sharding: with any stage, ranks, budgets and settings the parameters are those of stage 0, bit for bit; where
-- micro-batches are added up in another order, nearly. What each rank holds, saves and loads; what it refuses.
local lib = require "spec.ranks_lib"

local folder

local function run(size, script, settings)
  local all = lib.run(folder, size, script, settings)
  for rank = 0, size - 1 do assert.equal(0, all[rank].code, all[rank].text) end
  return all
end

-- Trains a small GPT-2 with each stage in turn and prints sums of what this rank owns: before, and after the steps.
local TRAIN = [[
  local ps = require "ps"
  local gpt2 = require "models.gpt2"
  local group = ps.init_distributed { seed = 3, quiet = true, rendezvous = "file://FOLDER/rendezvous" }
  local rank, size = ps.rank(), ps.world_size()
  local function show(tag, model)
    for name, t in pairs(model:state_dict()) do
      local t64 = t:to("fp64")
      print(("%s %s %.17g %.17g"):format(tag, name, t64:sum():item(), (t64 * t64):sum():item()))
    end
  end
  local config = CONFIG
  local settings = SETTINGS
  local micros = config.gradient_accumulation_steps or 1
  for stage = 0, 3 do
    config.zero_optimization, config.plan_print = { stage = stage }, false
    ps.manual_seed(5)
    local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
      local made = gpt2.new("tiny", { dropout = settings.dropout or 0 })
      if settings.frozen then
        for name, p in made:named_parameters() do if name:find("h%.0%.mlp") then p:requires_grad(false) end end
      end
      return made
    end }
    if settings.before then show(stage .. ":before", model) end
    ps.manual_seed(17)
    for step = 1, 3 do
      optimizer:zero_grad()
      for micro = 1, micros do
        local x = ps.randint(0, 256, { 6, 16 }, { dtype = "int32" })
        local y = ps.randint(0, 256, { 6, 16 }, { dtype = "int32" })
        for i = 0, step do y[{ 0, i }] = -100 end
        local from, to = math.floor(rank * 6 / size), math.floor((rank + 1) * 6 / size)
        model:backward(model(x:narrow(0, from, to - from), y:narrow(0, from, to - from)))
        optimizer:step()
      end
      if settings.eval and step == 2 then
        model:eval()
        local x = ps.arange(0, 32, 1, { dtype = "int32" }):reshape { 2, 16 }
        print(("%d:eval - %.17g 0"):format(stage, ps.no_grad(function() return model(x, x):item() end)))
        model:train()
      end
    end
    show(stage .. ":after", model)
    model:close()
  end
]]

-- {stage = {name = {sum, sum of squares}}} of all ranks together; every tensor is owned once above stage 0.
local function sums(all, size)
  local stages = {}
  for rank = 0, size - 1 do
    for stage, tag, name, a, b in all[rank].text:gmatch("(%d):(%a+) (%S+) (%S+) (%S+)\n") do
      local at = stages[stage] or {}
      stages[stage] = at
      local key = tag .. " " .. name
      assert.truthy(stage == "0" or not at[key] or tag == "eval", "two ranks own " .. key)
      if at[key] then assert.same({ a, b }, at[key]) end
      at[key] = { a, b }
    end
  end
  return stages
end

local function compare(size, config, settings, tolerance)
  local values = { FOLDER = folder, CONFIG = config:gsub("FOLDER", folder), SETTINGS = settings or "{}" }
  local script = TRAIN:gsub("%u%u%u%u%u%u+", values)
  local stages = sums(run(size, script, settings and settings:match("stress") and "PS_STRESS=1" or nil), size)
  for stage = 1, 3 do
    local got, count = stages[tostring(stage)], 0
    for key, want in pairs(stages["0"]) do
      local here = ("stage %d, %s: "):format(stage, key)
      assert.truthy(got[key], here .. "no rank has it")
      count = count + 1
      if stage == 1 or not tolerance then assert.same(want, got[key], here)
      else
        local square = tonumber(want[2])
        assert.near(square, tonumber(got[key][2]), tolerance * math.max(square, 1e-2), here)
      end
    end
    assert.truthy(count > 20)
  end
end

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

describe("sharding", function()
  if not lib.has_gloo() then
    pending("needs a build with Gloo (libgloo-dev)")
    return
  end

  local BF16 = "chunk_size = 8192, bf16 = { enabled = true }, "
  for name, case in pairs {
    ["fp32, one chunk"] = { 2, "{}", "{ before = true, eval = true }" },
    ["fp32, small chunks, clipped, dropout"] = { 3, "{ chunk_size = 4096, gradient_clipping = 0.5 }",
      "{ dropout = 0.1, eval = true }" },
    ["bf16, four ranks"] = { 4, "{ " .. BF16 .. "}", "{ before = true }" },
    ["bf16, clipped, on the disk, moving at every pin"] = { 2, "{ " .. BF16 .. "gradient_clipping = 0.5, memory = { "
      .. "host = '3MiB', disk = { path = 'FOLDER', limit = '64MiB' } } }", "{ stress = true }" },
    ["bf16, frozen parameters, recompute, no overlap"] = { 2, "{ " .. BF16 .. "recompute = true, overlap_optimizer = "
      .. "false }", "{ frozen = true, eval = true }" },
    ["fp16 with overflows"] = { 3, "{ chunk_size = 8192, fp16 = { enabled = true, initial_scale_power = 24 } }" },
    ["bf16 on a device apart"] = { 2, "{ " .. BF16 .. "device = 'sim', memory = { device = '2MiB', host = '64MiB' } "
      .. "}" },
    ["accumulated"] = { 3, "{ chunk_size = 8192, gradient_accumulation_steps = 3, gradient_clipping = 0.5 }", nil,
      1e-6 },
    ["accumulated on a device apart, by lru"] = { 2, "{ chunk_size = 8192, gradient_accumulation_steps = 2, device = "
      .. "'sim', eviction = 'lru', memory = { device = '2MiB', host = '64MiB' } }", nil, 1e-6 },
  } do
    it("gives stage 0's values: " .. name, function() compare(unpack(case, 1, 4)) end)
  end
end)
