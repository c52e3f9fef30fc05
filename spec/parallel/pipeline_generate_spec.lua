-- SPDX-License-Identifier: BSD-3-Clause
-- generate in a pipeline returns the ids of one process on all ranks, for every cut. If ranks request different
-- settings, errors name these. If ranks begin calls that do not match, this is an error immediately.
local lib = require "spec.ranks_lib"
local check = require "spec.check_lib"
local paths = require "ps.paths"
local ps = require "ps"
local tokens = require "spec.tokenizer_lib"

local folder

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

local BEGIN = [[
  local gpt2, llama = require "models.gpt2", require "models.llama"
  local fails = require("spec.check_lib").fails
  local function open(pipeline, make)
    ps.manual_seed(3)
    return ps.initialize { quiet = true, model_func = make or function()
      return gpt2.new("tiny", { n_layer = 4, n_positions = 16, initializer_range = 0.4, dropout = 0.1,
        tie_word_embeddings = false })
    end, config = { gradient_accumulation_steps = 3, plan_print = false, pipeline = pipeline,
      optimizer = { type = "AdamW", params = { lr = 1e-2, eps = 1e-4 } } } }
  end
  ps.manual_seed(8)
  local x, y = ps.randint(0, 256, { 6, 12 }, { dtype = "int32" }), ps.randint(0, 256, { 6, 12 }, { dtype = "int32" })
  local last = rank == size - 1
]]

-- Prints ids for every way of choosing tokens, one line per way, after one step and before another.
local WAYS = [[
  local function say(what, ids)
    if type(ids[1]) ~= "table" then ids = { ids } end
    for r, row in ipairs(ids) do print(("%s %d: %s"):format(what, r, table.concat(row, " "))) end
  end
  local function ways(model, optimizer)
    for out in model:micro_batches(x, y) do model:backward(out.loss) end
    say("between backward and step", model:generate({ 5, 6 }, 3, { temperature = 0 }))
    optimizer:step()
    say("likeliest", model:generate({ 10, 72, 105 }, 6, { temperature = 0 }))
    assert(model.training)
    say("past all positions", model:generate({ 10, 72, 105 }, 20, { temperature = 0 }))
    say("drawn", model:generate({ { 1, 2, 3, 4 }, { 9 } }, 5, { seed = 7, top_k = 40, repetition_penalty = 1.3 }))
    say("drawn by the engine's numbers", model:generate({ 1, 2, 3, 4 }, 5, { num_return_sequences = 3 }))
    say("beams", model:generate({ { 4, 5 }, { 200, 3, 1 } }, 5, { num_beams = 3, num_return_sequences = 2 }))
    say("by a function", model:generate({ 7, 8 }, 4, { temperature = 0, logits_processor = function(ids, logits)
      return logits * -1
    end }))
    local n = 0
    say("stopped", model:generate({ 7, 8 }, 9, { temperature = 0, on_token = function(_, i)
      n = n + 1
      return i < 3
    end }))
    assert(n == 3)
    for out in model:micro_batches(x, y) do
      print(("loss %.17g"):format(out.loss:item()))
      model:backward(out.loss)
    end
    optimizer:step()
    model:close()
  end
]]

describe("generate in a pipeline", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  -- The gradients of a tied embedding are summed in another order, so losses after the step are not compared.
  local function same(make, tied, cuts)
    local function ids(text) return tied and text:gsub("loss [^\n]*", "loss") or text end
    local one = ids(lib.check(folder, 1, BEGIN .. WAYS .. ("ways(open(nil, %s))"):format(make))[0].text)
    assert.equal(14 + 3 + 1, select(2, one:gsub("\n", "")), one)
    for _, cut in ipairs(cuts) do
      local all = lib.check(folder, cut[1], BEGIN .. WAYS .. ("ways(open({ stages = %d, %s }, %s))"):format(cut[1],
        cut[2], make))
      for rank = 0, cut[1] - 1 do assert.equal(one, ids(all[rank].text), cut[2] .. " rank " .. rank) end
    end
  end

  it("gives the ids of one process on all ranks: GPT-2", function()
    same("nil", false, { { 3, "" }, { 2, "schedule = 'zb_v'" } })
  end)

  it("gives them for Llama's family", function()
    same([[function()
      return llama.new({ vocab_size = 64 * 4, hidden_size = 32, intermediate_size = 48, num_hidden_layers = 4,
        num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 16, initializer_range = 0.4,
        tie_word_embeddings = true })
    end]], true, { { 2, "schedule = 'interleaved', virtual_stages = 2" } })
  end)

  it("is printed by tools/generate.lua, for a model without training", function()
    local vocab = tokens.gpt2({}, { ["generation_config.json"] = { eos_token_id = 5 } })
    ps.manual_seed(2)
    require("models.gpt2").new({ vocab_size = 257, n_positions = 32, n_layer = 3, n_head = 2, n_embd = 16,
      initializer_range = 0.3 }):save_pretrained(vocab)
    local line = "tools/generate.lua %s --start ab --num-samples %d --max-new 5 --seed 7"
    local function program(words)
      return check.shell(("'%s' %s"):format(paths.exe, words))
    end
    for samples = 1, 2 do
      local alone, code = program(paths.root .. "/" .. line:format(vocab, samples))
      assert.equal(0, code, alone)
      local launched = paths.root .. "/tools/launch.lua --nproc-per-node 2 " .. paths.root .. "/"
        .. line:format(vocab, samples) .. " --pipeline 2"
      local cut, failed = program(launched)
      assert.equal(0, failed, cut)
      assert.equal(alone:gsub("\n$", ""), (cut:gsub("%[0%] ", ""):gsub("\n$", "")))
    end
    local text, code = program(paths.root .. "/" .. line:format(vocab, 1) .. " --pipeline 2")
    assert.not_equal(0, code)
    assert.truthy(text:find("psluajit launch --nproc-per-node 2 generate", 1, true), text)
    tokens.remove(vocab)
  end)

  it("names requests that differ between ranks, and continues after an error", function()
    lib.check(folder, 2, BEGIN .. [[
      local model, optimizer = open { stages = 2 }
      local function other(words, ...)
        local given = { ... }
        fails(function() model:generate(unpack(given, 1, 3)) end, words)
      end
      other("generate: the number of prompts is 1 on rank 1, 2 on rank 0", last and { 4 } or { { 4 }, { 5 } }, 3)
      other("generate: the prompt 1 is 4 6 on rank 1, 4 5 on rank 0", { 4, last and 6 or 5 }, 3)
      other("generate: the number of tokens is 3 on rank 1, 4 on rank 0", { 4 }, last and 3 or 4)
      other("generate: the temperature is 0 on rank 1, 0.5 on rank 0", { 4 }, 3, { temperature = last and 0 or 0.5 })
      other("generate: the seed is 8 on rank 1, 7 on rank 0", { 4 }, 3, { seed = last and 8 or 7 })
      other("generate: the logits_processor is \"nil\" on rank 1, a function on rank 0", { 4 }, 3,
        { logits_processor = not last and function(_, logits) return logits end or nil })
      other("rank 0: ", { 4 }, 3, { num_beams = last and 1 or 0 })
      fails(function()
        model:generate({ 4 }, 3, { logits_processor = function(_, logits)
          if last then error("no such luck", 0) end
          return logits
        end })
      end, "rank 1: no such luck")
      fails(function()
        model:generate({ 4 }, 3, { on_token = not last and function() error("not here", 0) end or nil })
      end, "rank 0: not here")
      local seen = 0
      local ids = model:generate({ 4 }, 6, { temperature = 0, on_token = last and function(_, i)
        seen = i
        return i < 2
      end or nil })
      assert(#ids == 3 and seen == (last and 2 or 0))
      for out in model:micro_batches(x, y) do
        out.loss:backward()
      end
      optimizer:step()
      assert(#model:generate({ 4 }, 6) == 7)
      model:close()
    ]])
  end)
end)

describe("a rank of a pipeline", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  local EVALUATES = "ps.no_grad(function() for _ in model:micro_batches(x, y) do end end)"
  local TRAINS = "for out in model:micro_batches(x, y) do model:backward(out.loss) end optimizer:step()"
  local GENERATES = "model:generate({ 4 }, 3)"

  it("that begins another call than the others is named at once, with the call of each", function()
    for _, case in ipairs {
      { TRAINS, EVALUATES, "rank 1 begins an evaluation of 3 micro-batches, but rank 0 begins a step of 3" },
      { GENERATES, TRAINS, "rank 1 begins a step of 3 micro-batches, but rank 0 begins generate" },
      { EVALUATES, "x = x + 1 " .. EVALUATES, "rank 1 has a different batch from rank 0 in an evaluation of 3" },
    } do
      lib.check(folder, 2, BEGIN .. ([[
        local model, optimizer = open { stages = 2 }
        local began = ps.now()
        fails(function() if rank == 0 then %s else %s end end, %q)
        assert(ps.now() - began < 100)
      ]]):format(case[1], case[2], case[3]))
    end
  end)

  it("does not generate within a loop over micro-batches", function()
    lib.check(folder, 2, BEGIN .. [[
      local model = open { stages = 2 }
      fails(function()
        for out in model:micro_batches(x, y) do model:generate({ 4 }, 3) end
      end, "model:generate was called within a loop over micro-batches of this pipeline")
    ]])
  end)
end)
