-- SPDX-License-Identifier: BSD-3-Clause
-- Training and evaluation mode: eval() changes only layers, ps.no_grad stops gradients.
local ps = require "ps"
local lib = require "spec.check_lib"
local fails = lib.fails
local handle = require "ps.nn.handle"
local gpt2 = require "models.gpt2"

local model, optimizer
after_each(function()
  if handle.of(model) then model:close() end
  model = nil
end)

local SIZE = { n_layer = 2, n_head = 2, n_embd = 32, n_positions = 16, vocab_size = 64 }
local function tiny(dropout, recompute)
  local made = {}
  for key, value in pairs(SIZE) do made[key] = value end
  made.dropout, made.recompute = dropout, recompute
  return gpt2.new("tiny", made)
end

local function open(options)
  ps.manual_seed(3)
  local cfg = { plan_print = false, memory = options.memory, optimizer = { type = "AdamW", params = { lr = 1e-2 } },
    gradient_accumulation_steps = options.accumulate }
  model, optimizer = ps.initialize { quiet = true, config = cfg, model_func = options.model_func or function()
    return tiny(options.dropout or 0, options.recompute)
  end }
end

local function batch(number, rows)
  local list = {}
  for i = 1, rows or 2 do
    list[i] = {}
    for t = 1, 8 do list[i][t] = (7 * number + 5 * i + t * (3 + number)) % 64 end
  end
  return ps.tensor(list, "int32")
end

-- Returns the losses and the parameters of three steps. `before` is called before each forward.
local function trained(before)
  local seen = {}
  for number = 1, 3 do
    if before then before(number) end
    local x = batch(number)
    local loss = model(x, x)
    seen[#seen + 1] = ("%.17g"):format(loss:item())
    model:backward(loss)
    optimizer:step()
    optimizer:zero_grad()
  end
  for _, t in pairs(model:state_dict()) do seen[#seen + 1] = ("%.17g"):format(t:to("fp64"):abs():sum():item()) end
  table.sort(seen)
  return table.concat(seen, " ")
end

describe("a step in evaluation mode", function()
  for _, memory in ipairs { "chunk", "plain" } do
    local where = memory == "plain" and "plain" or nil
    it("has the bits of training mode if nothing is dropped, in " .. memory .. " memory", function()
      open { memory = where }
      local want = trained()
      model:close()
      open { memory = where }
      model:eval()
      assert.equal(want, trained())
    end)

    it("is not begun by a forward alone, in " .. memory .. " memory", function()
      open { memory = where, dropout = 0.2 }
      local want = trained()
      model:close()
      open { memory = where, dropout = 0.2 }
      assert.equal(want, trained(function(number)
        model:eval()
        for rows = 1, 3 do model(batch(number, rows), batch(number, rows)) end
        if not where then assert.is_false(ps.engine().in_step) end
        fails(function() optimizer:step() end, "no backward since the last step")
        model:state_dict()
        model:train()
      end))
      assert.equal(3, optimizer.steps)
    end)
  end

  it("is planned, and recomputes", function()
    for _, mode in ipairs { "train", "eval" } do
      open { recompute = true }
      model[mode](model)
      local calls = 0
      local block = model.module.transformer.h[0]
      local forward = block.forward
      rawset(block, "forward", function(...)
        calls = calls + 1
        return forward(...)
      end)
      local x = batch(1)
      local loss = model(x, x)
      assert.truthy(next(handle.of(model).traces))
      local planned = calls
      model:backward(loss)
      assert.equal(planned + 1, calls, mode)
      optimizer:step()
      model:close()
    end
  end)

  it("may have a loss of several forwards", function()
    local grads = {}
    for _, mode in ipairs { "train", "eval" } do
      open {}
      model[mode](model)
      local loss = model(batch(1), batch(1)) + model(batch(2, 3), batch(2, 3)) * 2
      grads[mode] = ("%.17g"):format(loss:item())
      model:backward(loss)
      optimizer:step()
      for _, t in pairs(model:state_dict()) do
        grads[mode .. "sum"] = (grads[mode .. "sum"] or 0) + t:to("fp64"):abs():sum():item()
      end
      model:close()
    end
    assert.equal(grads.train, grads.eval)
    assert(math.abs(grads.trainsum - grads.evalsum) < 1e-6)
  end)

  it("may be a loop over micro-batches, too, in which each iteration needs a backward", function()
    open { accumulate = 2 }
    model:eval()
    for out in model:micro_batches(batch(1, 4), batch(1, 4)) do out.loss:backward() end
    assert.is_false(optimizer:step().skipped)
    local turns = 0
    local function forwards() for _ in model:micro_batches(batch(1, 4), batch(1, 4)) do turns = turns + 1 end end
    fails(forwards, "has had no backward", "in ps.no_grad")
    turns = 0
    ps.no_grad(forwards)
    assert.equal(2, turns)
    fails(function()
      for out in model:micro_batches(batch(1, 4), batch(1, 4)) do
        out.loss:backward()
        model:train()
      end
    end, "the model was set to training mode within a loop")
  end)

  it("is refused by name out of turn", function()
    open {}
    model:eval()
    model:backward(model(batch(1), batch(1)))
    fails(function() model(batch(1), batch(1)) end, "use ps.no_grad for an evaluation")
    assert.truthy(ps.no_grad(model, batch(1), batch(1)):item() > 0)
    optimizer:step()
    fails(function() model:backward(ps.no_grad(model, batch(1), batch(1))) end, "requires a gradient", "ps.no_grad")
  end)
end)

local folder = os.tmpname()
os.remove(folder)
teardown(function() os.execute("rm -rf " .. folder) end)

describe("modes", function()
  it("are evaluation for from_pretrained and training for a new model, and are kept by ps.initialize", function()
    local made = tiny(0.1)
    assert.is_true(made.training)
    made:save_pretrained(folder)
    local loaded = ps.from_pretrained(folder, { quiet = true })
    for _, module in loaded:named_modules() do assert.is_false(module.training) end
    local x = batch(1)
    assert.equal(0, ps.no_grad(function()
      return (loaded { input_ids = x }.logits - loaded { input_ids = x }.logits):abs():amax():item()
    end))
    for _, memory in ipairs { "chunk", "plain" } do
      open { memory = memory == "plain" and memory or nil,
        model_func = function() return ps.from_pretrained(folder, { quiet = true }) end }
      assert.is_false(model.training)
      for _, module in model:named_modules() do assert.is_false(module.training) end
      model:close()
      open { memory = memory == "plain" and memory or nil, model_func = function()
        local new = tiny(0.1)
        new.transformer.h[1]:eval()
        return new
      end }
      assert.same({ true, false, true }, { model.training, model.transformer.h[1].training,
        model.transformer.h[0].training })
      model:close()
    end
  end)

  it("of each module are unchanged after generate and evaluate", function()
    for _, of in ipairs { "module", "engine" } do
      if of == "engine" then open { dropout = 0.1 } end
      local m = of == "engine" and model or tiny(0.1)
      m.transformer.h[1]:eval()
      local function facts()
        local list = {}
        for _, module in m:named_modules() do list[#list + 1] = module.training end
        return list
      end
      local before = facts()
      m:generate({ 1, 2 }, 3)
      assert.same(before, facts())
      local left = 2
      ps.train.evaluate(m, function()
        left = left - 1
        if left >= 0 then return batch(1), batch(1) end
      end)
      assert.same(before, facts())
      pcall(ps.train.evaluate, m, function() error "no data" end)
      assert.same(before, facts())
    end
  end)

  it("do not change dropout = 0 of from_pretrained in any family and head", function()
    local x = ps.randint(3, 60, { 2, 8 }, { dtype = "int32" })
    for _, case in ipairs { { "gpt2", "token_classification" }, { "gpt2", "sequence_classification" },
      { "llama", "token_classification" }, { "qwen2", "token_classification" }, { "qwen3", "token_classification" },
      { "mistral", "sequence_classification" }, { "bert", "sequence_classification" },
      { "bert", "token_classification" }, { "roberta", "sequence_classification" },
      { "roberta", "token_classification" }, { "bert", "sequence_classification", 0.3 },
      { "gpt2", "token_classification", 0.3 } } do
      local options = { task = case[2], num_labels = 3, pad_token_id = 0, classifier_dropout = case[3] }
      require("models." .. case[1]).new("tiny", options):save_pretrained(folder)
      for _, dropout in ipairs { 0, 0.5 } do
        local m = ps.from_pretrained(folder, { dropout = dropout, quiet = true }):train()
        local differs = (m { input_ids = x }.logits - m { input_ids = x }.logits):abs():amax():item()
        assert.equal(dropout > 0, differs > 0, case[1] .. " " .. case[2] .. " " .. dropout)
      end
    end
  end)
end)

describe("the first backward without dropout by mode", function()
  -- Runs a script in a separate process, since the note is printed once per process.
  local function said(script)
    local text = lib.run("", [[local ps, gpt2 = require "ps", require "models.gpt2"
      local x = ps.randint(0, 64, { 2, 8 }, { dtype = "int32" })
      local function make(dropout) return gpt2.new("tiny", { dropout = dropout }) end
      local function engine(made)
        return ps.initialize { model_func = function() return made end, config = { plan_print = false } }
      end
    ]] .. script)
    return select(2, text:gsub("dropout is off in this backward: Dropout is in evaluation mode", "")), text
  end

  local CASES = {
    ["of a module"] = { 1, [[local m = make(0.1):eval() for _ = 1, 3 do m(x, x):backward() end]] },
    ["of an engine"] = { 1, [[local m, o = engine(make(0.1):eval())
      for _ = 1, 3 do m:backward(m(x, x)) o:step() end]] },
    ["of a step in training mode, after evaluations"] = { 0, [[local m, o = engine(make(0.1):eval())
      m(x, x) ps.no_grad(m, x, x) m:generate({ 1 }, 2) m:train() m:backward(m(x, x)) o:step()]] },
    ["of a model without dropout"] = { 0, [[local m = make(0):eval() m(x, x):backward()]] },
    ["of attention without dropout"] = { 0, [[local m = ps.nn.MultiheadSelfAttention(8, 2):eval()
      m(ps.ones { 1, 2, 8 }):sum():backward()]] },
  }
  for name, case in pairs(CASES) do
    it("says so " .. (case[1] == 1 and "once: " or "not: ") .. name, function()
      local count, text = said(case[2])
      assert.equal(case[1], count, text)
    end)
  end
end)
