-- SPDX-License-Identifier: BSD-3-Clause
-- OSLO's order: the model exists, its optimizer was made over its parameters, and then ps.initialize takes both. A
-- pipeline keeps each rank's stages of the model and continues with the optimizer; with tensor parallelism the error
-- names the call that makes the model.
local ranks = require "spec.ranks_lib"

local folder

setup(function() folder = ranks.folder() end)
teardown(function() ranks.remove(folder) end)

-- Prints the losses of three steps of two micro-batches, with two groups of different weight decay. `layout` is the
-- table of a configuration.
local SCRIPT = [[
  local gpt2 = require "models.gpt2"
  local function losses(layout, given)
    ps.manual_seed(4)
    local module = gpt2.new("tiny", { dropout = 0 })
    local decay, none = {}, {}
    for name, p in module:named_parameters() do table.insert(name:find "bias$" and none or decay, p) end
    local optimizer = ps.optim.AdamW({ { params = decay, weight_decay = 0.5 }, { params = none, weight_decay = 0 } },
      { lr = 1e-2 })
    local config = { plan_print = false, train_micro_batch_size_per_gpu = 2, gradient_accumulation_steps = 2 }
    for key, value in pairs(layout) do config[key] = value end
    local model, own = ps.initialize { quiet = true, model = module, optimizer = optimizer, config = config }
    local x, seen = ps.randint(0, 256, { 4, 16 }, { dtype = "int32" }), {}
    for _ = 1, 3 do
      for out in model:micro_batches(x, x) do
        model:backward(out.loss)
        seen[#seen + 1] = ("%.17g"):format(out.loss:item())
      end
      assert(not optimizer:step().skipped)                      -- the script's optimizer continues
    end
    assert(#optimizer.groups == 2 and optimizer.groups[2].weight_decay == 0 and own.lr == 1e-2)
    return table.concat(seen, " "), module, model
  end
]]

describe("an existing model and optimizer", function()
  it("train in a pipeline like in one process", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    ranks.check(folder, 1, SCRIPT .. [[
      local f = assert(io.open(folder .. "/losses", "w"))
      f:write((losses {}))
      f:close()
    ]])
    ranks.check(folder, 2, SCRIPT .. [[
      local got, module, model = losses { pipeline = { stages = 2 } }
      local f = assert(io.open(folder .. "/losses"))
      assert(got == f:read "*a", got)
      f:close()
      local left = 0
      for _, p in module:named_parameters() do if p:device() == "meta" then left = left + 1 end end
      assert(left > 0, "the other stage's parameters have no bytes here")
      model:close()
      -- another optimizer for the model is an error, as in one process
      local twin = gpt2.new("tiny", { dropout = 0 })
      local other = ps.optim.AdamW(twin:parameters(), { lr = 1e-2 })
      model = ps.initialize { quiet = true, model = twin, config = { plan_print = false,
        train_micro_batch_size_per_gpu = 2, pipeline = { stages = 2 } } }
      local ok, why = pcall(other.step, other)
      assert(not ok and tostring(why):find("ps.initialize", 1, true), tostring(why))
      model:close()
    ]])
  end)

  it("are refused with tensor parallelism, and the error has the call that makes the model", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    ranks.check(folder, 2, SCRIPT .. [[
      local ok, why = pcall(losses, { tensor_parallel = { size = 2 } })
      why = tostring(why)
      assert(not ok and why:find("model_func = function() return MODEL_CLASS(...) end", 1, true), why)
      assert(why:find('optimizer = { type = "AdamW", params = { lr = 0.01 } }', 1, true), why)
      local module = gpt2.new "tiny"
      ok, why = pcall(ps.initialize, { quiet = true, model_func = function() return module end,
        config = { tensor_parallel = { size = 2 } } })
      assert(not ok and tostring(why):find("make the model within the function", 1, true), tostring(why))
    ]])
  end)
end)
