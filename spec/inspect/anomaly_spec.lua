-- SPDX-License-Identifier: BSD-3-Clause
-- Anomaly mode names the op that made the first NaN or infinity, its line and module, and stays silent otherwise.
local ps = require "ps"
local nn = ps.nn
local inf = math.huge

-- Returns the error of fn in anomaly mode, which must contain a line of this file.
local function problem(fn)
  local ok, err = pcall(ps.detect_anomaly, fn)
  assert.is_false(ok)
  return tostring(err)
end

local function line() return debug.getinfo(2, "l").currentline end

describe("anomaly mode", function()
  it("names the first op of forward, its line and its module", function()
    local Inner, Outer = nn.class("Inner"), nn.class("Outer")
    local at
    function Inner:forward(x)
      at = line() + 1
      local y = ps.log(x - x)
      return y
    end
    function Outer:init() self.part = Inner() end
    function Outer:forward(x) return self.part(x) + 1 end
    local net = Outer()
    local x = ps.ones { 3 }
    local text = problem(function() return net(x) * 2 end)
    assert.truthy(text:find(("anomaly_spec.lua:%d, in part (Inner); its inputs have none"):format(at), 1, true), text)
    assert.truthy(text:find("^log made an infinity"), text)
    text = problem(function() return ps.log(x * -1) end)
    assert.truthy(text:find("^log made a NaN"), text)
  end)

  it("names the call whose gradient made it, also in a recomputed block", function()
    for _, recompute in ipairs { false, true } do
      local at
      local function root(x)
        at = line() + 1
        local y = ps.sqrt(x)
        return y
      end
      local w = nn.Parameter(ps.tensor { 4, 0 })
      local text = problem(function()
        local y = recompute and ps.recompute(root, w) or root(w)
        y:sum():backward()
      end)
      assert.truthy(text:find("made an infinity in the backward of sqrt, called at ", 1, true), text)
      assert.truthy(text:find(("anomaly_spec.lua:%d;"):format(at), 1, true), text)
    end
  end)

  it("finds NaNs in half types, strided tensors and writes in place", function()
    local big = ps.full({ 2 }, 300, { dtype = "fp16" })
    assert.truthy(problem(function() return big * big end):find("^mul made an infinity"))
    local view = ps.ones({ 4, 4 }):transpose(0, 1)
    assert.truthy(problem(function() view:add_(3e38):add_(3e38) end):find("made an infinity"))
    local x = ps.tensor({ inf }, { dtype = "fp64" })
    assert.truthy(problem(function() return x - x end):find("^sub made a NaN"))
  end)

  it("does not report NaNs in the script's own inputs", function()
    ps.detect_anomaly(function()
      local mask = ps.full({ 2, 3 }, -inf):triu(1)
      local keep = ps.zeros { 2, 3 }:fill_(0 / 0)
      local scores = ps.randn({ 2, 3 }) + mask:where(mask:eq(0), ps.zeros { 2, 3 }):clamp(-1e30, inf)
      assert.equal(2, scores:size(0))
      assert.truthy(keep:sum():item() ~= 0)
      local given = ps.tensor { 1, -inf }
      assert.equal(-inf, (given + 1):amin():item())
      assert.near(1, given:softmax(0):amax():item(), 1e-6)
    end)
  end)

  it("ignores an overflow that the loss scaler handles", function()
    local function train(scale, forward)
      local model, optimizer = ps.initialize { quiet = true, model_func = function()
        return nn.Linear(4, 1, { bias = false })
      end, config = { train_batch_size = 2, fp16 = { enabled = true, loss_scale = 0, initial_scale_power = scale,
        hysteresis = 1 }, plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
      local ok, info = pcall(ps.detect_anomaly, function()
        local out = model(ps.ones({ 2, 4 }, { dtype = "fp16" }))
        model:backward(forward(out))
        return optimizer:step()
      end)
      model:close()
      return ok, info
    end
    local function mean(out) return out:to("fp32"):mean() end
    local ok, info = train(24, mean)
    assert.is_true(ok, tostring(info))
    assert.is_true(info.skipped)                              -- the gradients were too large for fp16
    ok, info = train(4, mean)
    assert.is_true(ok, tostring(info))
    assert.is_false(info.skipped)
    ok, info = train(4, function(out)                         -- 0 * inf is not an overflow of the scale
      local zero = out:to("fp32") * 0
      return (zero / zero):mean()
    end)
    assert.is_false(ok)
    assert.truthy(tostring(info):find("^div made a NaN, called at"), tostring(info))
  end)

  it("is off by default, ends with its function, and changes no bit", function()
    assert.is_false(ps.set_detect_anomaly(false))
    problem(function() error "other" end)
    assert.is_false(ps.set_detect_anomaly(false))
    assert.equal(-inf, ps.log(ps.zeros { 1 }):item())
    local function train()
      ps.manual_seed(3)
      local model, optimizer = ps.initialize { quiet = true, model_func = function()
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
      end, config = { train_batch_size = 4, plan_print = false,
        optimizer = { type = "AdamW", params = { lr = 1e-2 } } } }
      local losses = {}
      for i = 1, 3 do
        local loss = (model(ps.randn { 4, 8 }) ^ 2):mean()
        model:backward(loss)
        optimizer:step()
        losses[i] = loss:item()
      end
      model:close()
      return losses
    end
    assert.same(train(), ps.detect_anomaly(train))
  end)
end)

describe("anomaly mode of several ranks", function()
  local lib = require "spec.ranks_lib"
  if lib.no_gloo() then return pending(lib.no_gloo()) end
  local folder
  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  it("names op, line and module on the rank with the NaN, and the others get an error", function()
    local said = lib.run(folder, 2, lib.begin(folder) .. [[
      local Net = nn.class("Net")
      function Net:init() self.up = nn.Linear(4, 4) end
      function Net:forward(x)
        return (self.up(x) + ps.log(x)):mean()
      end
      local model, optimizer = ps.initialize { quiet = true, model_func = function() return Net() end,
        config = { plan_print = false, zero_optimization = { stage = 2 }, train_batch_size = 4,
          optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
      ps.set_detect_anomaly(true)
      for step = 1, 3 do
        local x = ps.ones { 2, 4 }
        if step == 2 and rank == 1 then x = x * -1 end
        model:backward(model(x))
        optimizer:step()
        print("step " .. step .. " done")
      end]])
    for rank = 0, 1 do
      assert.equal(1, said[rank].code, said[rank].text)
      assert.truthy(said[rank].text:find("step 1 done", 1, true), said[rank].text)
      assert.falsy(said[rank].text:find("step 2 done", 1, true), said[rank].text)
    end
    assert.matches("log made a NaN, called at %S*script.lua:%d+, in [^\n]*Net", said[1].text)
    assert.falsy(said[0].text:find("made a NaN, called at", 1, true) and not said[0].text:find("rank 1", 1, true))
    assert.truthy(said[0].text:find("rank 1", 1, true), said[0].text)
  end)

  it("excuses the product with a loss scale and no other op, on every stage of a pipeline", function()
    lib.check(folder, 2, [[
      local gpt2 = require "models.gpt2"
      ps.set_detect_anomaly(true)
      local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false,
        gradient_accumulation_steps = 2, fp16 = { enabled = true, initial_scale_power = 4 },
        optimizer = { type = "AdamW", params = { lr = 1e-3 } }, pipeline = { stages = 2 } },
        model_func = function() return gpt2.new("tiny", { n_layer = 2, tie_word_embeddings = false }) end }
      local x, zero = ps.randint(0, 256, { 2, 12 }, { dtype = "int32" }), ps.zeros { 1 }
      for out in model:micro_batches(x, x) do
        model:backward(out.loss)
        require("spec.check_lib").fails(function() return zero / zero end, "div made a NaN")
      end
      optimizer:step()
    ]])
  end)
end)
