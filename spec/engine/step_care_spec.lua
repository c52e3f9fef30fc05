-- SPDX-License-Identifier: BSD-3-Clause
-- The notes of a run that would waste its steps: settings that come too late, a loss scale at which nothing is trained,
-- another optimizer over the same parameters, a script's own loaders, the same rows on all ranks.
local ps = require "ps"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"
local handle = require "ps.nn.handle"
local hooks = require "ps.core.hooks"
local fails, nn = check.fails, ps.nn

local One = nn.class("One")
function One:init() self.w = nn.Parameter(ps.ones { 2 }) end
function One:forward(x) return (self.w * x):sum() end

local model, optimizer
after_each(function() if handle.of(model) then model:close() end end)

local function open(config, made)
  local cfg = { plan_print = false, optimizer = { type = "SGD", params = { lr = 1 } } }
  for key, value in pairs(config) do cfg[key] = value end
  model, optimizer = ps.initialize { quiet = true, model_func = function() return made or One() end, config = cfg }
end

describe("a learning rate that is set between backward and step()", function()
  it("is refused by set_lr if backward has updated parameters, and otherwise is valid from the next step", function()
    open {}
    model:backward(model(ps.ones { 2 }))
    fails(function() optimizer:set_lr(2) end, "set_lr was called between backward and optimizer:step()", "after step()")
    optimizer:step()
    optimizer:set_lr(2)
    model:backward(model(ps.ones { 2 }))
    optimizer:step()
    assert.same({ -2, -2 }, model:state_dict().w:tolist())           -- 1 - 1 - 2
  end)

  it("is valid for this step if backward updates nothing", function()
    open { overlap_optimizer = false }
    model:backward(model(ps.ones { 2 }))
    optimizer:set_lr(2)
    optimizer:step()
    assert.same({ -1, -1 }, model:state_dict().w:tolist())
  end)

  it("is undone at the end of a pause with a message, and the run continues", function()
    open {}
    model:backward(model(ps.ones { 2 }))
    optimizer.groups[1].lr = 5
    local said, stderr = {}, io.stderr
    io.stderr = { write = function(_, ...) said[#said + 1] = table.concat { ... } end } -- luacheck: ignore 122
    local ok, problem = pcall(hooks.tell, "resumes")
    io.stderr = stderr -- luacheck: ignore 122
    assert(ok, tostring(problem))
    assert.truthy(said[1]:find("those from before the pause", 1, true))
    assert.equal(1, optimizer.groups[1].lr)
    assert.is_false(optimizer:step().skipped)
    optimizer.groups[1].lr = 5
    hooks.tell "resumes"                                             -- between steps, all changes are valid
    assert.equal(5, optimizer.groups[1].lr)
  end)
end)

describe("a loss scale", function()
  local function said(scaler, overflows)
    local lines, stderr = {}, io.stderr
    io.stderr = { write = function(_, ...) lines[#lines + 1] = table.concat { ... } end } -- luacheck: ignore 122
    for _, overflow in ipairs(overflows) do scaler:update(overflow) end
    io.stderr = stderr -- luacheck: ignore 122
    return lines
  end
  local T, N = true, false

  it("that is fixed and too high is reported once, with the remedy", function()
    local new = require("ps.optim.loss_scaler").new
    local lines = said(new { loss_scale = 2 ^ 40 }, { T, T, T, T, T, T, T, N, T, T, T, T, T })
    assert.equal(1, #lines)
    for _, part in ipairs { "last 5 steps were all skipped", "1.09951e+12, which is fixed", "loss_scale = 0" } do
      assert.truthy(lines[1]:find(part, 1, true), lines[1])
    end
    assert.equal(0, #said(new { loss_scale = 2 ^ 40 }, { T, T, T, T, N, T, T, T, T, N }))
    assert.equal(0, #said(new { initial_scale_power = 32 }, { T, T, T, T, T, T, T, T }))
    lines = said(new { initial_scale_power = 1, min_loss_scale = 1, hysteresis = 1,
      raise_error_at_min_scale = false }, { T, T, T, T, T, T, T })
    assert.truthy(lines[1]:find("which is the smallest", 1, true))
  end)

  it("is reported by an engine's run", function()
    local out = check.run("", [[local ps = require "ps"
      local model, optimizer = ps.initialize { quiet = true, model_func = function() return ps.nn.Linear(2, 2) end,
        config = { plan_print = false, fp16 = { enabled = true, loss_scale = 2 ^ 40 } } }
      for _ = 1, 7 do
        model:backward(model(ps.ones({ 1, 2 }, { dtype = "fp16" })):sum())
        assert(optimizer:step().skipped)
      end]])
    assert.equal(1, select(2, out:gsub("steps were all skipped", "")), out)
  end)
end)

describe("another optimizer over an engine's parameters", function()
  for _, memory in ipairs { "chunk", "plain" } do
    for _, precision in ipairs { "fp32", "bf16" } do
      it(("refuses to step, in %s memory and %s"):format(memory, precision), function()
        local made = One()
        local before = ps.optim.SGD(made:parameters(), { lr = 10 })
        open({ memory = memory == "plain" and memory or nil, bf16 = precision == "bf16" and { enabled = true } or nil },
          made)
        local after = ps.optim.SGD(model:parameters(), { lr = 10 })
        model:backward(model(ps.ones({ 2 }, { dtype = precision })))
        for _, other in ipairs { before, after } do
          fails(function() other:step() end, "ps.initialize took over the model, with", "its optimizer updates it")
        end
        optimizer:step()
        assert.same({ 0, 0 }, model:state_dict().w:tolist())
        model:close()
        if memory == "plain" and precision == "fp32" then
          assert.is_true(after:step().skipped)                       -- a closed engine does not update anything
        end
      end)
    end
  end
end)

describe("ps.train.run with the script's own loader", function()
  local function source(x)
    return { next = function() return x end }
  end
  local function tokens_of(x, loader)
    local seen = {}
    ps.train.run { model = model, optimizer = optimizer, loader = loader or source(x), steps = 2, quiet = true,
      loss = function(m) return m(ps.ones { 2 }) end,
      callbacks = { step = function(line) seen[#seen + 1] = line.tokens end } }
    return seen
  end

  it("needs only next, and counts tokens or rows", function()
    open {}
    local ids = ps.ones({ 3, 8 }, { dtype = "int64" })
    assert.same({ 24, 48 }, tokens_of(ids))
    assert.same({ 3, 6 }, tokens_of(ps.ones { 3, 8 }))
    assert.same({ 24, 48 }, tokens_of { labels = ps.ones { 3 }, input_ids = ids })
    local loader = source(ids)
    loader.global_batch, loader.seq = 10, 5
    assert.same({ 50, 100 }, tokens_of(nil, loader))
  end)

  it("names a missing method before the first step", function()
    open {}
    local options = { model = model, optimizer = optimizer, steps = 2, quiet = true, loader = {},
      loss = function(m) return m(ps.ones { 2 }) end }
    fails(function() ps.train.run(options) end, "loader.next")
    options.loader, options.checkpoint = source(ps.ones { 2 }), { folder = "/nowhere" }
    fails(function() ps.train.run(options) end, "the loader has no state_dict", "remove checkpoint")
  end)
end)

describe("ranks that train on the same rows", function()
  local SCRIPT = [[
    local gpt2 = require "models.gpt2"
    local cfg = { plan_print = false, gradient_accumulation_steps = 2 }
    if cut == "tp" then cfg.tensor_parallel = { size = 2 } elseif cut == "pp" then cfg.pipeline = { stages = 2 } end
    local model, optimizer = ps.initialize { config = cfg, model_func = function()
      return gpt2.new("tiny", { dropout = 0, n_layer = 2 })
    end }
    for step = 1, 3 do
      ps.manual_seed(step + (same and 0 or 10 * ps.rank()))
      local x = ps.randint(0, 200, { 2, 8 }, { dtype = "int32" })
      ps.manual_seed(step)
      for out in model:micro_batches(x, x) do model:backward(out.loss) end
      optimizer:step()
    end
    model:close()
  ]]

  for _, case in ipairs { { "data-parallel ranks with the same rows are told once", true, "dp", 1 },
    { "data-parallel ranks with rows of their own are not", false, "dp", 0 },
    { "ranks of tensor parallelism are not", true, "tp", 0 }, { "stages are not", true, "pp", 0 } } do
    it(case[1], function()
      if lib.no_gloo() then return pending(lib.no_gloo()) end
      local text = ""
      local folder = os.tmpname()
      os.remove(folder)
      os.execute("mkdir " .. folder)
      local all = lib.run(folder, 2, lib.begin(folder) .. ("local same, cut = %s, %q\n"):format(tostring(case[2]),
        case[3]) .. SCRIPT)
      os.execute("rm -rf " .. folder)
      for rank = 0, 1 do
        assert.equal(0, all[rank].code, all[rank].text)
        text = text .. all[rank].text
      end
      assert.equal(case[4], select(2, text:gsub("train on the same rows", "")), text)
    end)
  end
end)
