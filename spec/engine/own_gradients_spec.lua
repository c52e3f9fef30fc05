-- SPDX-License-Identifier: BSD-3-Clause
-- Functions whose backward the script defines, and hooks, in engines of every layout (own_gradients_lib.lua): losses
-- are those of ops in one process, and hooks get the gradient of each micro-batch's own loss.
local ps = require "ps"
local own = require "spec.own_gradients_lib"
local lib = require "spec.ranks_lib"
local fails = require("spec.check_lib").fails
local nn = ps.nn

local BOTH = { double = true, hook = true }
local function with(more)
  local options = {}
  for key, value in pairs(BOTH) do options[key] = value end
  for key, value in pairs(more) do options[key] = value end
  return options
end

describe("functions and hooks in one process", function()
  it("have the same bits in plain memory, in chunks, and recomputed", function()
    local plain, ran = own.run({ memory = "plain" }, BOTH)
    assert.equal(4, ran)                                     -- two hooks and two micro-batches
    assert.equal(plain, (own.run({}, BOTH)))
    assert.equal(plain, (own.run({ chunk_size = 512 }, BOTH)))
    assert.equal(plain, (own.run({ chunk_size = 512 }, with { recompute = true })))
  end)

  it("work in half types, without the loss scale", function()
    own.run({ bf16 = { enabled = true } }, with { bound = 0.03 })
    own.run({ fp16 = { enabled = true, initial_scale_power = 10 } }, with { bound = 0.01 })
  end)

  it("may read values: the step is planned after it has run, and the engine prints that", function()
    own.run({}, with { reads = true })
    local Reads = ps.autograd.Function { name = "Reads", forward = function(_, x) return x * 1 end,
      backward = function(_, dy) return dy * (dy:sum():item() > -1e9 and 1 or 0) end }
    local Net = nn.class "Net"
    function Net:init() self.fc = nn.Linear(4, 4) end
    function Net:forward(x) return Reads(self.fc(x)):sum() end
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return Net() end,
      config = { optimizer = { type = "SGD" }, plan_print = false } }
    for _ = 1, 2 do
      model:backward(model(ps.ones { 2, 4 }))
      optimizer:step()
    end
    local said = {}
    for text in pairs(require("ps.nn.handle").of(model).said) do said[#said + 1] = text end
    model:close()
    assert.truthy(table.concat(said, "\n"):find("reads values in its forward or backward, so its step can be "
      .. "planned only after", 1, true))
  end)
end)

describe("functions and hooks on ranks:", function()
  local folder
  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  local function run(ranks, config, options)
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local out = lib.run(folder, ranks, lib.begin(folder) .. ([[
      print("right: " .. select(2, require("spec.own_gradients_lib").run(%s, %s)))]]):format(config, options))
    local ran = 0
    for rank = 0, ranks - 1 do
      assert(out[rank].code == 0, out[rank].text)
      ran = ran + assert(tonumber(out[rank].text:match "right: (%d+)"), out[rank].text)
    end
    return ran
  end

  for _, stage in ipairs { 1, 2, 3 } do
    it("ZeRO " .. stage, function()
      local ran = run(2, ("{ zero_optimization = { stage = %d } }"):format(stage),
        "{ data = true, double = true, hook = true }")
      assert.equal(8, ran)                                   -- two hooks, two micro-batches and two ranks
    end)
  end

  for schedule, more in pairs { gpipe = "", ["1f1b"] = "", interleaved = ", virtual_stages = 2", zb_h1 = "",
    zb_v = "" } do
    for _, extra in ipairs { "", "recompute = true, reads = true, " } do
      it(("a pipeline by %s%s"):format(schedule, extra == "" and "" or ", recomputed, with values read"), function()
        local ran = run(2, ("{ pipeline = { stages = 2, schedule = %q%s } }"):format(schedule, more),
          ("{ stages = true, %sdouble = true, hook = true }"):format(extra))
        assert.equal(4, ran)                                 -- each hook runs on the rank that has its layer
      end)
    end
  end

  it("tensor parallelism: also in layers that are cut among ranks", function()
    assert.equal(8, run(2, "{ tensor_parallel = { size = 2 } }", "{ shares = true, double = true, hook = true }"))
  end)

  it("a function that fails on one rank of a pipeline ends the step on all, and is named", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local out = lib.run(folder, 2, lib.begin(folder) .. [[
      local gpt2 = require "models.gpt2"
      local Bad = ps.autograd.Function { name = "Bad", forward = function(_, x) return x * 1 end,
        backward = function(_, dy) return dy:narrow(0, 0, 1) end }
      local ok, problem = pcall(function()
        local model = ps.initialize { quiet = true, config = { pipeline = { stages = 2 }, plan_print = false,
          gradient_accumulation_steps = 2, optimizer = { type = "SGD" } }, model_func = function()
          local m = gpt2.new { n_layer = 2, n_embd = 16, n_head = 2, vocab_size = 32, n_positions = 8 }
          m.transformer.h[0]:register_forward_hook(function(_, _, x) return Bad(x) end)
          return m
        end }
        local x = ps.zeros({ 4, 8 }, { dtype = "int64" })
        for out in model:micro_batches(x, x) do model:backward(out.loss) end
      end)
      print(ok, tostring(problem))]])
    for rank = 0, 1 do
      assert.truthy(out[rank].text:find("false", 1, true), out[rank].text)
      assert.truthy(out[rank].text:find("backward of Bad returned gradient 1 of shape [1, 8, 16] for an input of shape "
        .. "[2, 8, 16]", 1, true), out[rank].text)
    end
  end)
end)

describe("an engine", function()
  local Net = nn.class "Net"
  function Net:init() self.fc, self.out = nn.Linear(64, 64), nn.Linear(64, 1) end
  function Net:forward(x)
    local h = self.fc(x)
    if self.fn then h = self.fn(h) end
    return { loss = self.out(h):mean() }
  end

  local function make(config)
    local all = { optimizer = { type = "AdamW", params = { lr = 1e-3 } }, plan_print = false }
    for key, value in pairs(config or {}) do all[key] = value end
    ps.manual_seed(1)
    return ps.initialize { quiet = true, model_func = function() return Net() end, config = all }
  end
  local x = ps.ones { 8, 64 }
  local Twice = ps.autograd.Function { name = "Twice", forward = function(ctx, h)
    ctx:save_for_backward(h)
    return h * 1
  end, backward = function(ctx, dh) return dh * 2 + ctx:saved_tensors() * 0 end }

  it("continues after a function or a hook that fails", function()
    for _, config in ipairs { {}, { memory = "plain" } } do
      local want
      for _, fault in ipairs { false, "function", "hook" } do
        local model, optimizer = make(config)
        local function step()
          model:backward(model(x).loss)
          return optimizer:step()
        end
        model.module.fn = Twice
        step()
        if fault == "function" then
          model.module.fn = ps.autograd.Function { name = "Bad", forward = function(_, h) return h * 1 end,
            backward = function() return 3 end }
          fails(step, "backward of Bad returned a number as gradient 1")
        elseif fault == "hook" then
          local handle = model.module.fc.weight:register_hook(function() error "no" end)
          fails(step, "no")
          handle:remove()
        end
        model.module.fn = Twice
        step()
        local value = model(x).loss:item()
        model:close()
        want = want or value
        assert.equal(want, value)
      end
    end
  end)

  it("refuses retain_graph by name, and allows ps.autograd.grad during a step", function()
    local model, optimizer = make()
    local want
    for look = 0, 1 do
      if look == 1 then model, optimizer = make() end
      for _ = 1, 2 do
        for out in model:micro_batches(x) do
          fails(function() out.loss:backward { retain_graph = true } end, "retain_graph = true: its backward updates")
          fails(function() model:backward(out.loss, { retain_graph = true }) end, "retain_graph = true: its backward")
          if look == 1 then
            local g = ps.autograd.grad(out.loss, model.module.out.weight, { retain_graph = true })
            assert.same({ 1, 64 }, g:shape())
            assert.truthy(g:abs():sum():item() > 0)
          end
          out.loss:backward()
        end
        optimizer:step()
      end
      local value = model(x).loss:item()
      want = want or value
      assert.equal(want, value)
      model:close()
    end
  end)

  it("leaks nothing in 1,000 steps", function()
    local model, optimizer = make()
    model.module.fn = Twice
    model.module.fc.weight:register_hook(function(g) return g * 1 end)
    model.module.out:register_full_backward_hook(function() end)
    local function steps(n)
      for _ = 1, n do
        model:backward(model(x).loss)
        optimizer:step()
      end
      ps.collect_all()
      return ps.memory("cpu").used, collectgarbage "count"
    end
    local bytes, lua = steps(100)
    local waiting = require("ps.core.scope").waiting
    local entries = 0
    for _ in pairs(waiting) do entries = entries + 1 end
    local more_bytes, more_lua = steps(1000)
    for _ in pairs(waiting) do entries = entries - 1 end
    assert.same({ bytes, 0 }, { more_bytes, entries })
    assert.truthy(more_lua - lua < 64, more_lua - lua)       -- KiB
    model:close()
    assert.is_nil(next(waiting))
  end)

  it("keeps hooks and functions apart from the hooks of a module that was replaced", function()
    local seen = {}
    local model, optimizer = make()
    model:register_forward_hook(function(_, args, out) seen[#seen + 1] = { args.n, out.loss ~= nil } end)
    model:backward(model(x).loss)
    optimizer:step()
    assert.same({ 1, true }, seen[#seen])
    model:close()
  end)
end)
