-- SPDX-License-Identifier: BSD-3-Clause
-- Thawing parameters of an engine between steps: the losses, values and numbers of updates of plain memory in every
-- layout of chunks, with two ranks in every division of the model, checkpoints that continue, and errors.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local lib = require "spec.ranks_lib"
local check = require "spec.check_lib"
local gpt2 = require "models.gpt2"

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- The script of a run, which the ranks run, too. Before step 4 it thaws a block, before step 6 it freezes a layer that
-- trained, before step 7 it thaws everything. `at.save` and `at.load` are steps with a checkpoint.
local RUN = [[
  local gpt2 = require "models.gpt2"
  local function states(opt)
    local lines = {}
    for i = 1, opt:count() do lines[i] = ("%s=%d"):format(opt:slot(i).name, opt:updates(i)) end
    table.sort(lines)
    return table.concat(lines, " ")
  end
  local function train(config, at)
    ps.manual_seed(3)
    local function make()
      local m = gpt2.new("tiny", { dropout = 0, initializer_range = 0.1 })
      return m:freeze { "wte", "wpe", "h.0", "h.1.attn" }
    end
    config.plan_print, config.gradient_clipping = false, config.gradient_clipping or 1
    config.optimizer = { type = "AdamW", params = { lr = 1e-2, weight_decay = 0.1 } }
    local model, opt = ps.initialize { model_func = make, config = config, quiet = true }
    local losses, first = {}, 1
    if at.load then
      model:thaw "h.0"
      first = ps.checkpoints.load(at.path, { model = model, optimizer = opt }).step + 1
    end
    for step = first, 9 do
      if step == 4 then model:thaw "h.0" end
      if at.save and step == at.save then ps.checkpoints.save(at.path, { model = model, optimizer = opt }) end
      if step == 6 then model:freeze "h.1.mlp" end
      if step == 7 then model:requires_grad_(true) end
      local list, sum, n = {}, 0, 0
      for i = 1, 4 do
        list[i] = {}
        for t = 1, 8 do list[i][t] = (7 * i + t * t * 3 + 11 * step) % 60 end
      end
      local x = ps.tensor(list, "int32")
      for turn in model:micro_batches { input_ids = x, labels = x } do
        sum, n = sum + turn.loss:item(), n + 1
        turn.loss:backward()
      end
      opt:step()
      losses[#losses + 1] = ("%.9g"):format(sum / n)
    end
    return table.concat(losses, " "), model, opt
  end
]]
local train, states = assert(loadstring('local ps = require "ps" ' .. RUN .. " return train, states"))()

local function numbers(text)
  local list = {}
  for word in text:gmatch "%S+" do list[#list + 1] = tonumber(word) end
  return list
end

local function squares(model)
  local sums = {}
  for name, t in pairs(model:state_dict { tied = false }) do
    local t64 = t:to "fp64"
    sums[name] = ("%.17g"):format((t64 * t64):sum():item())
  end
  return sums
end

local function all(config, at)
  local losses, model, opt = train(config, at or {})
  local result = { losses = losses, squares = squares(model), states = states(opt) }
  model:close()
  return result
end

local TWO = "gradient_accumulation_steps = 2, train_micro_batch_size_per_gpu = 2"

describe("thawing in an engine", function()
  local want, of_two
  setup(function()
    want = all { memory = "plain" }
    of_two = all { memory = "plain", gradient_accumulation_steps = 2, train_micro_batch_size_per_gpu = 2 }
  end)

  it("trains thawed parameters from a fresh state, and keeps the states of the others", function()
    assert.truthy(want.states:find("transformer.ln_f.weight=9", 1, true), want.states)
    assert.truthy(want.states:find("h.0.mlp.c_fc.weight=6", 1, true), want.states)
    assert.truthy(want.states:find("h.1.mlp.c_fc.weight=8", 1, true), want.states)
    assert.truthy(want.states:find("transformer.wte.weight=3", 1, true), want.states)
    ps.manual_seed(3)
    local at = squares(gpt2.new("tiny", { dropout = 0, initializer_range = 0.1 }))
    for name, sum in pairs(want.squares) do
      if not name:find "%.bias$" then assert.not_equal(at[name], sum, name) end
    end
  end)

  it("has the bits of plain memory in chunks of all sizes, in half precision and within budgets", function()
    assert.same(want, all {})
    assert.same(want, all { chunk_size = 2048 })
    assert.same(want, all { chunk_size = 3000,
      memory = { host = 2.5e6, disk = { path = folder, limit = 64e6 } } })
    assert.same(of_two, all { chunk_size = 20000, gradient_accumulation_steps = 2, train_micro_batch_size_per_gpu = 2 })
    local function half(config)
      config.bf16, config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu = { enabled = true }, 2, 2
      return all(config)
    end
    assert.same(half { memory = "plain" }, half { chunk_size = 9000 })
  end)

  it("continues from a checkpoint that was saved after it", function()
    local path = folder .. "/checkpoint"
    for _, memory in ipairs { "plain", false } do
      local function config() return { memory = memory or nil, chunk_size = not memory and 6000 or nil } end
      assert.same(want, all(config(), { save = 5, path = path }))
      local got = all(config(), { load = true, path = path })
      assert.equal(want.losses:match("^" .. ("%S+ "):rep(4) .. "(.*)$"), got.losses)
      assert.same(want.squares, got.squares)
      assert.equal(want.states, got.states)
    end
  end)

  it("notes saved state of parameters that are frozen when it is loaded", function()
    for _, memory in ipairs { "plain", { kind = "chunk" } } do
      local path, x = folder .. "/noted", ps.tensor({ { 1, 2, 3, 4 } }, "int32")
      local function open()
        return ps.initialize { quiet = true, model_func = function()
          return gpt2.new("tiny", { dropout = 0 }):freeze "wte"
        end, config = { plan_print = false, memory = memory, optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
      end
      local function loaded(thawed)
        local model, opt = open()
        if thawed then model:thaw "wte" end
        ps.checkpoints.load(path, { model = model, optimizer = opt })
        local said = {}
        for text in pairs(inner(model).said) do said[#said + 1] = text end
        model:close()
        return table.concat(said, "\n")
      end
      local model, opt = open()
      model:thaw "wte"
      model:backward(model(x, x))
      opt:step()
      ps.checkpoints.save(path, { model = model, optimizer = opt })
      model:close()
      assert.truthy(loaded(false):find("frozen here (1, the first is", 1, true))
      assert.falsy(loaded(true):find("frozen here", 1, true))
    end
  end)

  it("names what the budgets lack, and trains on when the parameters are frozen again", function()
    local model, opt = ps.initialize { quiet = true, model_func = function()
      return gpt2.new("tiny", { dropout = 0 }):freeze { "wte", "wpe", "h.0", "h.1.attn" }
    end, config = { plan_print = false, chunk_size = 3000, optimizer = { type = "AdamW", params = { lr = 1e-2 } },
      memory = { host = 6e5, disk = { path = folder, limit = 1e5 } } } }
    local x = ps.tensor({ { 1, 2, 3, 4 } }, "int32")
    model:backward(model(x, x))
    opt:step()
    model:requires_grad_(true)
    check.fails(function() model(x, x) end, "the thawed parameters need", "more for their masters")
    assert.falsy(inner(model).closed)
    model:freeze { "wte", "wpe", "h.0", "h.1.attn" }
    model:backward(model(x, x))
    opt:step()
    model:close()
  end)

  it("refuses parameters that an adopted optimizer does not have", function()
    for _, memory in ipairs { "plain", false } do
      local m = gpt2.new("tiny", { dropout = 0 }):freeze "h.0"
      local list = {}
      for _, p in ipairs(m:parameters()) do if p:needs_grad() then list[#list + 1] = p end end
      local model = ps.initialize { model = m, quiet = true, optimizer = ps.optim.AdamW(list, { lr = 1e-3 }),
        config = { plan_print = false, memory = memory or nil } }
      local x = ps.tensor({ { 1, 2, 3, 4 } }, "int32")
      model:thaw "h.0.ln_1"
      check.fails(function() model(x, x) end, "h.0.ln_1.weight was thawed, but the optimizer")
      model:close()
    end
  end)

  local LAYOUTS = {
    { "ZeRO 1", "{ zero_optimization = { stage = 1 }, chunk_size = 9000 }" },
    { "ZeRO 3", "{ zero_optimization = { stage = 3 }, chunk_size = 9000 }" },
    { "a pipeline", "{ pipeline = { stages = 2 }, " .. TWO .. " }" },
    { "tensor parallelism", "{ tensor_parallel = { size = 2 }, " .. TWO .. " }" },
  }
  it("has one rank's losses with ZeRO, a pipeline and tensor parallelism", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local function script(number)
      return ([[
        for _, at in ipairs { { save = 5 }, { load = true } } do
          at.path = "%s/of%d"
          local losses, model = train(%s, at)
          print((at.save and "saved" or "loaded") .. "%d " .. losses)
          model:close()
        end
      ]]):format(folder, number, LAYOUTS[number][2], number)
    end
    local said, list = {}, numbers(of_two.losses)
    -- A process has one mesh.
    for _, text in ipairs { RUN .. script(1) .. script(2) .. script(3), RUN .. script(4) } do
      for rank, out in pairs(lib.check(folder, 2, text)) do said[rank] = (said[rank] or "") .. out.text end
    end
    for number, layout in ipairs(LAYOUTS) do
      for rank = 0, 1 do
        local function losses(what) return said[rank]:match(what .. number .. " ([^\n]*)") end
        local saved, loaded = losses "saved", losses "loaded"
        local got = numbers(saved)
        assert.equal(9, #got)
        for step, loss in ipairs(got) do
          assert(math.abs(loss - list[step]) < 2e-5 * list[step], ("%s, step %d: %.9g, not %.9g"):format(
            layout[1], step, loss, list[step]))
        end
        assert.equal(saved:match("^" .. ("%S+ "):rep(4) .. "(.*)$"), loaded)
      end
    end
  end)

  it("is refused on all ranks if they thaw different parameters", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local said = lib.check(folder, 2, [[
      local gpt2 = require "models.gpt2"
      local model, opt = ps.initialize { quiet = true, model_func = function()
        return gpt2.new("tiny", { dropout = 0 }):freeze "h.0"
      end, config = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
      local x = ps.tensor({ { 1, 2, 3, 4 } }, "int32")
      if rank == 1 then model:thaw "h.0.ln_1" end
      print(select(2, pcall(model, x, x)))
      if rank == 0 then model:thaw "h.0.ln_1" end
      model:backward(model(x, x))
      opt:step()
      model:close()
    ]])
    for rank = 0, 1 do
      assert.truthy(said[rank].text:find("rank 1 thawed transformer.h.0.ln_1.weight, transformer.h.0.ln_1.bias, but "
        .. "rank 0 thawed no parameter: freeze and thaw the same parameters on all ranks", 1, true), said[rank].text)
    end
  end)
end)
