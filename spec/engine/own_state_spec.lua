-- SPDX-License-Identifier: BSD-3-Clause
-- States of a single rank. The result of state_dict on a rank can be loaded by load_state_dict on that rank: also on a
-- rank that owns no chunk, where the state is empty, and if only rank 0 has the buffers.
local ranks = require "spec.ranks_lib"

local folder

setup(function() folder = ranks.folder() end)
teardown(function() ranks.remove(folder) end)

-- A model that has a buffer, and whose parameters fit into one chunk. With ZeRO, rank 0 owns this chunk.
local MODEL = [[
  local F = ps.F
  local Net = nn.class "net"
  function Net:init()
    self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
    self:buffer("seen", ps.full({ 2 }, 5))
  end
  function Net:forward(x) return self.b(F.relu(self.a(x))) end
  local function make(config)
    config.train_micro_batch_size_per_gpu = 2
    config.optimizer = { type = "AdamW", params = { lr = 0.01 } }
    return ps.initialize { model_func = function() return Net() end, config = config, quiet = true }
  end
  local x, y = ps.randn { 2, 4 } + rank, ps.tensor({ 0, 1 }, { dtype = "int64" })
  local function step(model, optimizer)
    model:backward(F.cross_entropy(model(x:to(model:parameters()[1]:dtype())):to "fp32", y))
    optimizer:step()
  end
  -- Returns the values of the whole model, which any rank can read.
  local function values(model)
    local list = {}
    for _, p in ipairs(model:parameters()) do list[#list + 1] = p:to("fp32"):reshape(-1):tolist() end
    list[#list + 1] = model.seen:tolist()
    for i, row in ipairs(list) do
      for j, v in ipairs(row) do row[j] = ("%.9g"):format(v) end
      list[i] = table.concat(row, " ")
    end
    return table.concat(list, "\n")
  end
  local function change(model)
    ps.no_grad(function()
      for _, p in ipairs(model:parameters()) do p:fill_(7) end
      model.seen:fill_(rank + 20)
    end)
  end
  local function copied(state)
    local copy = {}
    for name, t in pairs(state) do copy[name] = t:clone():keep() end
    return copy
  end
]]

describe("the state of a rank", function()
  for _, size in ipairs { 2, 3 } do
    for _, case in ipairs { { 3, false }, { 3, true }, { 2, true }, { 1, false } } do
      local stage, bf16 = case[1], case[2]
      it(("is loaded on its own rank: ZeRO %d, %s, %d ranks, one of which owns all"):format(stage,
        bf16 and "bf16" or "fp32", size), function()
        if ranks.no_gloo() then return pending(ranks.no_gloo()) end
        ranks.check(folder, size, MODEL .. ([[
          local model, optimizer = make { zero_optimization = { stage = %d }, bf16 = { enabled = %s } }
          step(model, optimizer)
          local state, before = copied(model:state_dict()), values(model)
          local count = 0
          for _ in pairs(state) do count = count + 1 end
          assert(count == (rank == 0 and 5 or 0), count)
          model:load_state_dict(model:state_dict())
          assert(values(model) == before)
          local way = {
            function() model:load_state_dict(state) end,
            function() model.module:load_state_dict(state, { strict = rank == 0 }) end,
            function()
              local file = ("%%s/%%d.pt"):format(folder, rank)
              ps.save(state, file)
              model:load_state_dict(ps.load(file))
            end,
            function()
              local file = ("%%s/%%d.pt"):format(folder, rank)
              model:load_state_dict(ps.load(file, { lazy = true }))
            end,
          }
          for i, load in ipairs(way) do
            change(model)
            assert(values(model) ~= before)
            load()
            if i == 2 then model.seen:copy_(ps.full({ 2 }, 5)) end      -- the module must not send buffers
            assert(values(model) == before, i .. "\n" .. values(model) .. "\n" .. before)
          end
          -- the owner's missing values are an error
          local wrong = copied(state)
          wrong["a.weight"] = nil
          local ok, why = pcall(model.load_state_dict, model, wrong)
          if rank == 0 then
            assert(not ok and tostring(why):find("1 missing: a.weight", 1, true), tostring(why))
          else
            assert(not ok and tostring(why):find("rank 0: ", 1, true) and tostring(why):find("a.weight", 1, true), why)
          end
          model:close()
        ]]):format(stage, tostring(bf16)))
      end)
    end

    it(("is loaded by the optimizer, printed and named on each of %d ranks"):format(size), function()
      if ranks.no_gloo() then return pending(ranks.no_gloo()) end
      ranks.check(folder, size, MODEL .. [[
        local model, optimizer = make { zero_optimization = { stage = 3 } }
        step(model, optimizer)
        step(model, optimizer)
        local before = values(model)
        local own = optimizer:state_dict()
        optimizer:load_state_dict(own)
        optimizer:load_state_dict(optimizer:state_dict(model), model)
        assert(values(model) == before)
        ps.checkpoints.save(folder .. "/checkpoint", { model = model, optimizer = optimizer, step = 2 })
        change(model)
        ps.checkpoints.load(folder .. "/checkpoint", { model = model, optimizer = optimizer })
        assert(values(model) == before)
        if rank == 0 then
          assert(#ps.chunks() > 0 and #ps.chunks("a.weight") > 0)
        else
          assert(#ps.chunks() == 0)
          local ok, why = pcall(ps.chunks, 1)
          assert(not ok and tostring(why):find("this rank owns no chunk", 1, true), why)
          ok, why = pcall(ps.chunks, "a.weight")
          assert(not ok and tostring(why):find("this rank owns no chunk", 1, true), why)
          assert(tostring(ps.chunks()):find("this rank owns no chunk", 1, true), tostring(ps.chunks()))
        end
        model:close()
      ]])
    end)
  end

  it("has no buffers on the later ranks of a pipeline, and is loaded there", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    ranks.check(folder, 2, [[
      local gpt2 = require "models.gpt2"
      local model, optimizer = ps.initialize { quiet = true, model_func = function()
        local module = gpt2.new("tiny", { dropout = 0 })
        module:buffer("seen", ps.full({ 2 }, 5))
        return module
      end, config = { train_micro_batch_size_per_gpu = 1, gradient_accumulation_steps = 2,
        pipeline = { stages = 2 }, optimizer = { type = "SGD", params = { lr = 0.01 } } } }
      local state = {}
      for name, t in pairs(model:state_dict()) do state[name] = t:clone():keep() end
      assert((state.seen ~= nil) == (rank == 0))
      model.seen:fill_(rank + 20)
      model:load_state_dict(state)
      assert(model.seen:tolist()[1] == 5, model.seen:tolist()[1])
      model:load_state_dict(model:state_dict())
      model:close()
    ]])
  end)
end)

describe("ps.save of a rank's own state", function()
  local GPT2 = [[
    local gpt2 = require "models.gpt2"
    local function open(layout)
      local config = { plan_print = false, chunk_size = 1024, optimizer = { type = "SGD", params = { lr = 0 } } }
      for key, value in pairs(layout) do config[key] = value end
      return ps.initialize { config = config, model_func = function()
        return gpt2.new { n_layer = 2, n_embd = 16, n_head = 2, vocab_size = 32, n_positions = 8 }
      end }
    end
  ]]

  for name, layout in pairs { ["ZeRO 3"] = "zero_optimization = { stage = 3 }",
    ["a pipeline"] = "pipeline = { stages = 2 }" } do
    it("reports that only rank 0 writes a part: " .. name, function()
      if ranks.no_gloo() then return pending(ranks.no_gloo()) end
      for _, saved in ipairs { "model:state_dict()", "{ step = 3, model = model:state_dict() }" } do
        local said = ranks.check(folder, 2, GPT2 .. ([[
          local model = open { %s }
          local count = 0
          if rank == 0 then
            local state = model:state_dict()
            for _ in pairs(state) do count = count + 1 end
            ps.save(%s, folder .. "/model.pt")
            ps.save(%s, folder .. "/model.pt")
          end
          print("has " .. count)
          model:close()
        ]]):format(layout, saved, saved))
        local have, all = said[0].text:match "model%.pt' contains only rank 0's (%d+) of the model's (%d+) tensors"
        assert.equal(said[0].text:match "has (%d+)", have)
        assert.truthy(tonumber(have) < tonumber(all), said[0].text)
        assert.equal(1, select(2, said[0].text:gsub("ps%.save: ", "")))
        assert.is_nil(said[1].text:find("ps.save: ", 1, true))
      end
    end)
  end

  it("prints nothing for whole states, or if each rank has a file with its number", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local said = ranks.check(folder, 2, GPT2 .. [[
      local model = open { zero_optimization = { stage = 3 } }
      ps.save(model:state_dict(), folder .. "/part-" .. rank .. ".pt")
      model:close()
      model = open {}
      if rank == 0 then ps.save(model:state_dict(), folder .. "/whole.pt") end
      model:close()
    ]])
    assert.is_nil((said[0].text .. said[1].text):find("ps.save: ", 1, true))
  end)
end)
