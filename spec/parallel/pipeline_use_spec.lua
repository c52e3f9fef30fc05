-- SPDX-License-Identifier: BSD-3-Clause
-- A model that is cut into stages, as a script uses it: outputs, calls of the model, loaders, numbers of micro-batches,
-- train.run and train.evaluate. Each works as it does without a pipeline.
local lib = require "spec.ranks_lib"

local folder

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

local BEGIN = [[
  local gpt2 = require "models.gpt2"
  local fails = require("spec.check_lib").fails
  local function open(config, more)
    config.plan_print, config.optimizer = false, { type = "AdamW", params = { lr = 1e-2, eps = 1e-4 } }
    local request = { config = config, quiet = true, model_func = function()
      return gpt2.new("tiny", { n_layer = 4, tie_word_embeddings = false, dropout = 0.1 })
    end }
    for key, value in pairs(more or {}) do request[key] = value end
    ps.manual_seed(3)
    return ps.initialize(request)
  end
  -- Runs a step, and prints its losses.
  local function train(model, optimizer, ...)
    for out in model:micro_batches(...) do
      print(("loss %.17g"):format(out.loss:item()))
      model:backward(out.loss)
    end
    optimizer:step()
  end
  ps.manual_seed(8)
  local x, y = ps.randint(0, 256, { 6, 12 }, { dtype = "int32" }), ps.randint(0, 256, { 6, 12 }, { dtype = "int32" })
  local last = rank == size - 1
]]

-- Returns each rank's output of a script that runs on one rank and on two stages.
local function both(script)
  local one = lib.check(folder, 1, BEGIN .. "local PIPE = nil\n" .. script)
  local two = lib.check(folder, 2, BEGIN .. "local PIPE = { stages = 2 }\n" .. script)
  return one[0].text, two[0].text, two[1].text
end

describe("a pipeline", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("returns tensors on the last stage, with gather on all ranks, and losses everywhere", function()
    lib.check(folder, 2, BEGIN .. [[
      local logits = {}
      local function loss_of(out, given)
        return ps.F.cross_entropy(out.logits:reshape(-1, 256), given[2]:reshape(-1))
      end
      local model, optimizer = open({ gradient_accumulation_steps = 3, pipeline = { stages = 2 } }, { loss = loss_of })
      local seen = {}
      for out in model:micro_batches(x, y) do
        if last then assert(out.logits:size(0) == 2)
        else fails(function() return out.logits end, "out.logits", "{ gather = true }") end
        seen[#seen + 1] = ("%.17g"):format(out.loss:item())
        local loss = out.loss * 2                               -- the loss of this micro-batch, on all ranks
        loss:backward()
        fails(function() out.loss:backward() end, "a second time")
      end
      optimizer:step()
      model:eval()
      ps.no_grad(function()
        for out in model:micro_batches(x, y, { gather = true }) do
          local own = loss_of(out, { 0, y:narrow(0, 2 * (#logits), 2) })
          assert(own:item() == out.loss:item(), own:item() .. " " .. out.loss:item())
          logits[#logits + 1] = out.logits
        end
      end)
      assert(#logits == 3 and #seen == 3)
      fails(function() model(x, y) end, "cut into 2 stages", "model:micro_batches(x, y)")
      model:close()
    ]])
  end)

  it("returns to Lua only for forwards, recompute segments and yields", function()
    lib.check(folder, 2, BEGIN .. [[
      local C, setup, losses = ps.C, require "ps.engine.setup", {}
      local KINDS = { F = C.PS_ACT_FORWARD, SEGMENT = C.PS_ACT_SEGMENT, YIELD = C.PS_ACT_YIELD }
      for _, schedule in ipairs { "1f1b", "zb_h1" } do
        for _, recompute in ipairs { false, true } do
          local model, optimizer = open { gradient_accumulation_steps = 3, recompute = recompute,
            pipeline = { stages = 2, schedule = schedule, partition = "uniform" } }
          local pipe, came, all = setup.current().driver.pipe, {}, 0
          local next = pipe.next
          function pipe:next()
            local kind, v, micro = next(self)
            if kind then came[tonumber(kind)], all = (came[tonumber(kind)] or 0) + 1, all + 1 end
            return kind, v, micro
          end
          for step = 1, 2 do                                    -- the first step begins with a dry run
            if step == 2 then came, all = {}, 0 end
            optimizer:zero_grad()
            for out in model:micro_batches(x, y) do
              losses[#losses + 1] = ("%.17g"):format(out.loss:item())
              model:backward(out.loss)
            end
            optimizer:step()
          end
          local function of(name) return came[tonumber(KINDS[name])] or 0 end
          local blocks = 0
          for name in model:named_parameters() do blocks = blocks + (name:find "%.ln_1%.weight$" and 1 or 0) end
          assert(blocks == 4 and of "F" == 3 and of "YIELD" == 3)
          assert(of "SEGMENT" == (recompute and 3 * 2 or 0), of "SEGMENT")      -- two blocks per stage
          assert(all == of "F" + of "YIELD" + of "SEGMENT", all)
          model:close()
        end
      end
      for i, loss in ipairs(losses) do assert(loss == losses[(i - 1) % 6 + 1], i .. ": " .. loss) end
    ]])
  end)

  it("accepts OSLO's loop, a loader, and rows if no number of micro-batches is given", function()
    local one, first, second = both [[
      local model, optimizer = open { gradient_accumulation_steps = PIPE and 3 or 1, pipeline = PIPE }
      local given, sum, n = { input_ids = x, labels = x }, 0, 0
      for out in model(given) do
        sum, n = sum + out.loss:item(), n + 1
        out.loss:backward()
      end
      optimizer:step()
      assert(n == (PIPE and 3 or 1))
      model:close()
      model, optimizer = open { pipeline = PIPE }
      n = 0
      for out in model:micro_batches(x, y) do
        n = n + 1
        print(("row %d %.17g"):format(n, out.loss:item()))
        out.loss:backward()
      end
      optimizer:step()
      model:close()
      local path = folder .. "/text" .. rank
      local f = io.open(path, "wb")
      for i = 1, 60000 do f:write(string.char(i * i % 251)) end
      f:close()
      model, optimizer = open { gradient_accumulation_steps = 3, pipeline = PIPE }
      local loader = ps.data.loader { file = path, width = 1, batch = 300, seq = 12, seed = 4 }
      for _ = 1, 2 do
        for out in model:micro_batches(loader) do
          print(("loader %.17g"):format(out.loss:item()))
          out.loss:backward()
        end
        optimizer:step()
      end
      local loss = ps.train.evaluate(model, ps.data.windows { file = path, width = 1, batch = 50, seq = 12,
        limit = 70 })
      print(("evaluated %.6f"):format(loss))
      local result = ps.train.run { model = model, optimizer = optimizer, loader = loader, steps = 3, quiet = true }
      print(("trained %.17g"):format(result.loss))
      model:close()
    ]]
    assert.equal(one, first)
    assert.equal(one, second)
    assert.truthy(select(2, one:gsub("row %d", "")) == 6 and one:find "evaluated" and one:find "trained")
  end)

  it("names on all ranks the rank that left its loop, and its progress", function()
    for who = 0, 1 do
      local all = lib.run(folder, 2, lib.begin(folder) .. BEGIN .. ([[
        local model, optimizer = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }
        for out in model:micro_batches(x, y) do
          out.loss:backward()
          if rank == %d then break end
        end
        optimizer:step()
      ]]):format(who))
      for rank = 0, 1 do
        assert(all[rank].code ~= 0)
        assert.truthy(all[rank].text:find("optimizer:step() was called before the end of a loop over micro-batches, at "
          .. "micro-batch 1 of 3", 1, true), all[rank].text)
      end
      assert.truthy(all[1 - who].text:find("rank " .. who, 1, true), all[1 - who].text)
    end
  end)

  it("refuses an evaluation within a step's loop, and a loop after an unfinished loop of forwards", function()
    for _, script in ipairs { [[
      for out in model:micro_batches(x, y) do
        out.loss:backward()
        ps.no_grad(function() for _ in model:micro_batches(x, y) do end end)
      end]], [[
      ps.no_grad(function() model:micro_batches(x, y)() end)
      for out in model:micro_batches(x, y) do out.loss:backward() end]] } do
      local all = lib.run(folder, 2, lib.begin(folder) .. BEGIN
        .. "local model = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }\n" .. script)
      for rank = 0, 1 do
        assert(all[rank].code ~= 0)
        assert.truthy(all[rank].text:find("began within another loop of this pipeline", 1, true), all[rank].text)
      end
    end
  end)

  -- The embedding is tied, so its sums use a separate group, in which a rank that steps would wait for a rank that does
  -- not.
  it("reports on all ranks at once that one rank ends the step and another one evaluates", function()
    local all = lib.check(folder, 2, BEGIN .. [[
      local model, optimizer = open({ gradient_accumulation_steps = 3, pipeline = { stages = 2 } }, {
        model_func = function() return gpt2.new("tiny", { n_layer = 2, dropout = 0 }) end })
      for out in model:micro_batches(x, y) do out.loss:backward() end
      local began = ps.now()
      fails(function()
        if rank == 0 then return optimizer:step() end
        ps.no_grad(function() for _ in model:micro_batches(x, y) do end end)
      end, "rank 1 begins an evaluation of 3 micro-batches, but rank 0 begins optimizer:step()")
      print(("after %.1f s"):format(ps.now() - began))
    ]])
    for rank = 0, 1 do assert.truthy(tonumber(all[rank].text:match "after ([%d.]+) s") < 100, all[rank].text) end
  end)

  it("refuses ranks if one gathers and another one does not", function()
    lib.check(folder, 2, BEGIN .. [[
      local model = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }
      for _, mode in ipairs { "enable_grad", "no_grad" } do
        fails(function()
          ps[mode](function()
            for out in model:micro_batches(x, y, { gather = rank == 0 }) do
              if mode == "enable_grad" then out.loss:backward() end
            end
          end)
        end, "of 3 micro-batches with gather = true", "all ranks of a pipeline must run the same script")
      end
    ]])
  end)

  it("refuses ranks whose schedules, cuts or models differ, and names the difference", function()
    lib.check(folder, 2, BEGIN .. [[
      local me = rank == 1
      local function differ(pipeline, layers, trains, ...)
        local words = { ... }
        fails(function()
          ps.initialize { quiet = true, config = { gradient_accumulation_steps = 4, plan_print = false,
            pipeline = pipeline }, model_func = function()
            local model = gpt2.new("tiny", { n_layer = layers, tie_word_embeddings = false })
            if not trains then model.transformer.wte.weight:requires_grad(false) end
            return model
          end }
        end, unpack(words))
      end
      differ({ stages = 2, schedule = me and "gpipe" or "1f1b" }, 4, true, "pipeline.schedule is gpipe on rank 1")
      differ({ stages = 2, partition = me and "Ettt|tL" or "Et|tttL" }, 4, true,
        "pipeline.partition is Ettt|tL on rank 1")
      differ({ stages = 2 }, me and 6 or 4, true, "rank 1 has a different model", "transformer.h.4.ln_1.weight")
      differ({ stages = 2 }, 4, not me, "rank 1 has a different model", "transformer.wte.weight", "frozen")
    ]])
  end)

  it("ends with the script's own error in a loop's body, whatever is under way", function()
    for _ = 1, 3 do                                       -- the order in which objects are closed at the end is random
      local all = lib.run(folder, 2, lib.begin(folder) .. BEGIN .. [[
        local model = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }
        for _ in model:micro_batches(x, y) do error "no such luck" end
      ]])
      for rank = 0, 1 do
        assert.equal(1, all[rank].code, all[rank].text)
        assert.truthy(all[rank].text:find("no such luck", 1, true), all[rank].text)
      end
    end
  end)

  it("reports the cost of few micro-batches", function()
    local all = lib.check(folder, 2, BEGIN .. [[
      local model, optimizer = open({ gradient_accumulation_steps = 1, pipeline = { stages = 2 } }, { quiet = false })
      for out in model:micro_batches(x, y) do out.loss:backward() end
      optimizer:step()
      fails(function()
        ps.train.evaluate(model, function() return x, y end, { loss = function(m, ...) return m(...) end })
      end, "ps.initialize { loss = function(out, batch)")
      model:close()
    ]])
    local words = "pipeline: with 1 micro-batches in 2 stages the ranks are idle for 50 % of the time"
    assert.truthy(all[0].text:find(words, 1, true), all[0].text)
  end)

  it("refuses stages with other batches, weights or settings", function()
    for _, case in ipairs {
      { "if rank == 1 then x = ps.randint(0, 256, { 6, 12 }, { dtype = 'int32' }) end", "", "",
        "rank 1 has a different batch, or different weights of losses, from rank 0" },
      { "", "", "ps.manual_seed(3 + rank)", "rank 1 continues with another step count, learning rate" },
      { "", "", "if rank == 1 then optimizer.groups[1].weight_decay = 1 end", "or other setting of the optimizer" },
      { "", "", "if rank == 1 then model:parameters()[3]:requires_grad(false) end", "or other frozen parameters" },
      { "", ", { weight = rank == 0 and 1 or 5 }", "",
        "the stages of a pipeline weight the step's losses differently" },
    } do
      local all = lib.run(folder, 2, lib.begin(folder) .. BEGIN .. ([[
        %s
        local model, optimizer = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }
        %s
        for out in model:micro_batches(x, y) do model:backward(out.loss%s) end
        optimizer:step()
      ]]):format(case[1], case[3], case[2]))
      for rank = 0, 1 do
        assert.equal(1, all[rank].code, all[rank].text)
        assert.truthy(all[rank].text:find(case[4], 1, true), all[rank].text)
      end
    end
  end)

  it("continues training like one process if parameters are frozen between two steps", function()
    local one, first, second = both [[
      for _, schedule in ipairs { "1f1b", "zb_h1", "zb_v" } do
        local v = schedule == "zb_v" and 2 or 1
        local pipeline = PIPE and { stages = 2, schedule = schedule, virtual_stages = v,
          partition = v == 2 and "Et|t|t|tL" or "Ett|ttL" }
        local model, optimizer = open { gradient_accumulation_steps = 3, pipeline = pipeline }
        for step = 1, 3 do
          if step == 2 then
            for name, p in model:named_parameters() do
              if name:find "wte" or name:find "wpe" or name:find "h%.[01]%." then p:requires_grad(false) end
            end
          end
          train(model, optimizer, x, y)
        end
        model:close()
      end
    ]]
    assert.equal(one, first)
    assert.equal(one, second)
    assert.truthy(select(2, one:gsub("loss", "")) == 27, one)
  end)

  -- Stages run other micro-batches than that of the iteration, so each schedule would have different numbers.
  it("refuses changes of settings within a loop, on all ranks", function()
    for change, words in pairs {
      ["model.transformer.h[1].ln_1.bias:requires_grad(false)"] = "transformer.h.1.ln_1.bias was frozen within",
      ["model:eval()"] = "the model was set to evaluation mode within",
      ["ps.manual_seed(77)"] = "ps.manual_seed was called within",
    } do
      for _, turn in ipairs { 1, 3 } do
        local all = lib.run(folder, 2, lib.begin(folder) .. BEGIN .. ([[
          local model = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }
          local turn = 0
          for out in model:micro_batches(x, y) do
            out.loss:backward()
            turn = turn + 1
            if turn == %d then %s end
          end
        ]]):format(turn, change))
        for rank = 0, 1 do
          assert.equal(1, all[rank].code, all[rank].text)
          assert.truthy(all[rank].text:find(words, 1, true), all[rank].text)
        end
      end
    end
  end)

  it("names the missing ranks if ranks wait in calls of different groups", function()
    local begin = lib.begin(folder):gsub("quiet = true", "quiet = true, timeout = 2")
    for _, call in ipairs { "ps.any_rank(true)",
      "ps.checkpoints.save(folder .. '/out', { model = model, step = 1 })" } do
      local all = lib.run(folder, 2, begin .. BEGIN .. ([[
        local model, optimizer = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }
        train(model, optimizer, x, y)
        if rank == 1 then %s end
        train(model, optimizer, x, y)
      ]]):format(call))
      for rank = 0, 1 do
        assert.equal(1, all[rank].code, all[rank].text)
        assert.truthy(all[rank].text:find "is alive but has not come to all_[^;]* within 2 s; it is in all_",
          all[rank].text)
      end
    end
  end)

  it("refuses by name a backward outside of a loop or in an evaluation, and forwards that cannot be counted", function()
    lib.check(folder, 2, BEGIN .. [[
      local model, optimizer = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }
      fails(function() model:backward(ps.ones({}, { dtype = "fp32" })) end, "inside a loop that runs with gradients")
      ps.no_grad(function()
        for out in model:micro_batches(x, y) do
          fails(function() out.loss:backward() end, "depends on nothing that requires a gradient", "ps.no_grad")
          fails(function() model:backward(out.loss) end, "not in ps.no_grad")
        end
      end)
      model:eval()
      for out in model:micro_batches(x, y) do out.loss:backward() end
      assert(not optimizer:step().skipped)
      model:close()
      local Reads = nn.class "Reads"
      function Reads:init() self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4) end
      function Reads:parts()
        local function part(name, layer)
          return { name = name, modules = { layer }, forward = function(carry, batch)
            local z = layer(carry.z or batch.z)
            return { z = z * z:sum():item() }
          end }
        end
        return { part("l.0", self.a), part("l.1", self.b) }
      end
      function Reads:batch_of(z) return { z = z } end
      function Reads:forward(...) return nn.fold(self:parts(), self:batch_of(...)) end
      function Reads:example() return ps.ones { 1, 4 } end
      fails(function()
        ps.initialize { quiet = true, model_func = function() return Reads() end,
          config = { plan_print = false, pipeline = { stages = 2 } } }
      end, "the model's parts cannot be counted", "must not read values in its forward")
      local dtype = "fp32"
      local Turns = nn.class("Turns", Reads)
      function Turns:parts()
        return { { name = "l.0", modules = { self.a }, forward = function(_, batch)
          return { z = self.a(batch.z):to(dtype) }
        end }, { name = "l.1", modules = { self.b }, forward = function(carry)
          return { loss = self.b(carry.z):sum() }
        end } }
      end
      model, optimizer = ps.initialize { quiet = true, model_func = function() return Turns() end,
        config = { plan_print = false, gradient_accumulation_steps = 2, pipeline = { stages = 2 } } }
      local z = ps.ones { 4, 4 }
      fails(function()
        for _ = 1, 2 do
          for out in model:micro_batches(z) do out.loss:backward() end
          optimizer:step()
          dtype = "bf16"
        end
      end, "the parts of virtual stage 0 returned z bf16 2 4, but z fp32 2 4 when they were counted")
    ]])
  end)

  it("reports on all ranks that a batch lacks targets", function()
    lib.check(folder, 2, BEGIN .. [[
      for i, batch in ipairs { x, { input_ids = x } } do
        local model = open { gradient_accumulation_steps = 3, pipeline = { stages = 2 } }
        fails(function()
          local function run() for out in model:micro_batches(batch) do assert(out.loss) end end
          if i == 1 then run() else ps.no_grad(run) end
        end, "every batch needs targets", "model:generate")
        pcall(model.close, model)
      end
    ]])
  end)

  it("trains Llama's family", function()
    local one, first, second = both [[
      local llama = require "models.llama"
      ps.manual_seed(3)
      local model, optimizer = ps.initialize { quiet = true, model_func = function()
        return llama.new { vocab_size = 64, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 4,
          num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 32 }
      end, config = { plan_print = false, gradient_accumulation_steps = 3, pipeline = PIPE, optimizer = {
        type = "AdamW", params = { lr = 1e-2, eps = 1e-4 } } } }
      local ids = ps.randint(0, 64, { 6, 12 }, { dtype = "int32" })
      for _ = 1, 2 do train(model, optimizer, { input_ids = ids, labels = ids }) end
      model:close()
    ]]
    assert.equal(one, first)
    assert.equal(one, second)
    assert.truthy(select(2, one:gsub("loss", "")) == 6, one)
  end)

  it("loads states of one process and its own, and one process loads those of all stages", function()
    local SCRIPT = [[
      local function sizes(state)
        local n = 0
        for key in pairs(state) do if type(key) == "number" then n = n + 1 end end
        return n
      end
      local function go_on(load)
        local model, optimizer = open({ gradient_accumulation_steps = 3, pipeline = PIPE }, { param_groups = {
          { match = function(name) return name:match "bias$" ~= nil end, weight_decay = 0 }, {} } })
        load(model, optimizer)
        ps.manual_seed(21)
        for _ = 1, 2 do train(model, optimizer, x, y) end
        return model, optimizer
      end
    ]]
    local function run(n, load)
      local all = lib.check(folder, n, BEGIN .. (n > 1 and "local PIPE = { stages = 2 }\n" or "local PIPE = nil\n")
        .. SCRIPT .. load)
      if n > 1 then assert.equal(all[0].text, all[1].text) end
      return all[0].text
    end
    local one = run(1, [[
      go_on(function(model, optimizer)
        for out in model:micro_batches(x, y) do model:backward(out.loss) end
        optimizer:step()
        ps.save({ model = model:state_dict(), optimizer = optimizer:state_dict() }, folder .. "/whole.pt")
      end)
    ]])
    assert.equal(one, run(2, [[
      ps.manual_seed(77)
      go_on(function(model, optimizer)
        local file = ps.load(folder .. "/whole.pt", { lazy = true })
        model:load_state_dict(file:at "model")
        optimizer:load_state_dict(file:at "optimizer")
        local whole, own = ps.load(folder .. "/whole.pt"), optimizer:state_dict()
        for g, group in ipairs(own.param_groups) do
          assert(#group.params == #whole.optimizer.param_groups[g].params)
        end
        assert(sizes(own.state) > 0 and sizes(own.state) < sizes(whole.optimizer.state))
        whole.model["transformer.h.3.ln_1.weight"] = nil                -- rank 0 reads it from the other rank
        fails(function() model:load_state_dict(whole.model) end, "1 missing: transformer.h.3.ln_1.weight")
        ps.save({ model = model:state_dict(), optimizer = own }, folder .. "/stage-" .. rank .. ".pt")
      end)
    ]]))
    assert.equal(one, run(2, [[
      go_on(function(model, optimizer)
        local own = ps.load(folder .. "/stage-" .. rank .. ".pt")
        model:load_state_dict(own.model)
        optimizer:load_state_dict(own.optimizer)
      end)
    ]]))
    assert.equal(one, run(1, [[
      go_on(function(model, optimizer)
        local all, more = ps.load(folder .. "/stage-0.pt"), ps.load(folder .. "/stage-1.pt")
        for _, part in ipairs { { all.model, more.model }, { all.optimizer.state, more.optimizer.state } } do
          for key, value in pairs(part[2]) do part[1][key] = value end
        end
        model:load_state_dict(all.model)
        optimizer:load_state_dict(all.optimizer)
      end)
    ]]))
  end)

  it("trains a parameter that was frozen at first, whichever rank has it", function()
    lib.check(folder, 2, BEGIN .. [[
      local model, optimizer = open({ gradient_accumulation_steps = 3, pipeline = { stages = 2 } }, {
        model_func = function()
          local made = gpt2.new("tiny", { n_layer = 4, tie_word_embeddings = false })
          made.transformer.h[0].ln_1.weight:requires_grad(false)
          return made
        end })
      local function step()
        for out in model:micro_batches(x, y) do model:backward(out.loss) end
        optimizer:step()
      end
      step()
      local weight = model.transformer.h[0].ln_1.weight
      local function sum() return rank == 0 and weight:sum():item() or 0 end
      local before = sum()
      step()
      assert(sum() == before)
      weight:requires_grad(true)
      step()
      assert(rank > 0 or sum() ~= before)
      model:close()
    ]])
  end)
end)
