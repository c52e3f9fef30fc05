-- SPDX-License-Identifier: BSD-3-Clause
-- ps.initialize { loss = f }. A call without targets, as in an evaluation, returns the model's output, and f is called
-- when the script reads the loss.
local ps = require "ps"
local lib = require "spec.check_lib"
local fails = lib.fails
local nn, F = ps.nn, ps.F

local model, calls

after_each(function()
  if model then model:close() end
  model = nil
end)

local function open(memory, loss)
  calls = 0
  ps.manual_seed(2)
  model = ps.initialize { model_func = function() return nn.Linear(4, 3) end, quiet = true,
    config = { plan_print = false, memory = memory, optimizer = { type = "SGD", params = { lr = 0.1 } } },
    loss = function(out, batch)
      calls = calls + 1
      return loss(out, batch)
    end }
end

local function supervised(out, batch) return F.cross_entropy(out.logits, batch[2]) end
local function of_itself(out, batch) return F.mse_loss(out.logits, batch[1]:narrow(1, 0, 3)) end

local x, y = ps.ones { 2, 4 }, ps.tensor({ 0, 2 }, "int64")

for _, memory in ipairs { "chunks", "plain" } do
  describe("the script's own loss, memory: " .. memory, function()
    local kind = memory == "plain" and "plain" or nil

    it("is not called by an evaluation without targets", function()
      open(kind, supervised)
      model:eval()
      local want = lib.bytes(ps.no_grad(model.module, x))
      local out = ps.no_grad(model, x)
      assert.equal(want, lib.bytes(out.logits))
      assert.equal(want, lib.bytes(out[1]))
      assert.equal(0, calls)
      local turns = {}
      ps.no_grad(function()
        for turn in model:micro_batches(x) do turns[#turns + 1] = lib.bytes(turn.logits) end
      end)
      assert.equal(want, table.concat(turns))
      assert.equal(0, calls)
      fails(function() return out.loss end, "call without targets", "target is missing")
      local with = ps.no_grad(model, x, y)
      assert.equal(ps.no_grad(F.cross_entropy, with.logits, y):item(), with.loss:item())
    end)

    it("that needs no targets is computed when an evaluation reads it", function()
      open(kind, of_itself)
      local out = ps.no_grad(model, x)
      assert.equal(0, calls)
      local want = ps.no_grad(F.mse_loss, out.logits, ps.ones { 2, 3 }):item()
      assert.equal(want, out.loss:item())
      assert.equal(want, out.loss:item())
      assert.equal(1, calls)
      assert.is_false(out.loss:needs_grad())
      local batches = { x }
      assert.equal(want, ps.train.evaluate(model, function() return table.remove(batches) end))
      model:backward(model(x).loss)
    end)
  end)
end
