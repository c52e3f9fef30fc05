-- SPDX-License-Identifier: BSD-3-Clause
-- Generation steps that repeat recorded ops (ps/pretrained/generate_replay.lua): the logits have the bits of the
-- model's own code, for all families and caches, and a model whose steps differ runs its own code.
local ps = require "ps"
local nn = require "ps.nn"
local replay = require "ps.pretrained.generate_replay"

local SIZES = { vocab_size = 61, hidden_size = 64, intermediate_size = 96, num_hidden_layers = 2,
  num_attention_heads = 4, num_key_value_heads = 2, head_dim = 32, max_position_embeddings = 64,
  initializer_range = 0.2 }
local GPT2 = { vocab_size = 61, n_embd = 64, n_layer = 2, n_head = 2, n_positions = 16, initializer_range = 0.2 }
local FAMILIES = { "llama", "mistral", "qwen2", "qwen3", "gpt2" }

local function made(family, dtype, more)
  ps.manual_seed(3)
  local config = {}
  for key, value in pairs(family == "gpt2" and GPT2 or SIZES) do config[key] = value end
  for key, value in pairs(more or {}) do config[key] = value end
  return require("models." .. family).new(config, { dtype = dtype }):eval()
end

-- Generates with or without repeated steps. Returns the logits of all steps and the ids, as a text, and the number of
-- repeated steps.
local function run(on, model, prompts, n, options)
  local steps = {}
  local given = { do_sample = false, eos_token_id = false, logits_processor = function(_, logits)
    steps[#steps + 1] = table.concat(logits:reshape(-1):tolist(), " ")
    return logits
  end }
  for key, value in pairs(options or {}) do given[key] = value end
  local before = replay.count
  replay.on = on
  local ok, ids = pcall(model.generate, model, prompts, n, given)
  replay.on = true
  assert(ok, ids)
  for _, row in ipairs(ids) do steps[#steps + 1] = table.concat(row, " ") end
  return table.concat(steps, "\n"), replay.count - before
end

-- Asserts that repeated steps have the same bits, and returns their number.
local function same(model, prompts, n, options, what)
  local want, none = run(false, model, prompts, n, options)
  local got, count = run(true, model, prompts, n, options)
  assert.equal(0, none)
  assert.truthy(want == got, what)
  return count
end

local ONE, ROWS = { { 5, 9, 2, 40 } }, { { 5, 9, 2, 40 }, { 7, 1 }, { 30, 31, 32 } }

describe("a generation step that repeats recorded ops", function()
  it("has the same bits in all families, with all types of weights and caches", function()
    for _, family in ipairs(FAMILIES) do
      for _, case in ipairs { { "fp32" }, { "fp32", "q8_0" }, { "bf16" }, { "bf16", "q8_0" }, { "fp32", "bf16" } } do
        local model, what = made(family, case[1]), family .. " " .. table.concat(case, " ")
        -- the first step reads the prompt, and two steps are recorded
        assert.equal(7, same(model, ONE, 10, { kv_cache = case[2] }, what), what)
      end
    end
  end)

  it("has the same bits with rows of different lengths, beams, several sequences per prompt, and other rotary angles",
    function()
    for _, family in ipairs { "llama", "gpt2" } do
      local model = made(family)
      assert.equal(5, same(model, ROWS, 8, nil, family))
      assert.truthy(same(model, ROWS, 8, { num_beams = 3 }, family) > 0)
      assert.truthy(same(model, { { 8, 3 } }, 8, { num_return_sequences = 2, do_sample = true, temperature = 1,
        seed = 4 }, family) > 0)
    end
    local yarn = { rope_type = "yarn", factor = 4, original_max_position_embeddings = 8, rope_theta = 500 }
    assert.truthy(same(made("llama", nil, { rope_parameters = yarn }), ONE, 20) > 0)
  end)

  it("has the same bits after GPT-2 has used all positions and continues from the last half of them", function()
    assert.truthy(same(made "gpt2", ONE, 40) > 20)
    assert.truthy(same(made "gpt2", ROWS, 40) > 20)                     -- the padding is then no longer in the caches
  end)

  it("has the same bits over packed weights with rounded activations", function()
    local model = ps.quantize(made "llama", { type = "q4_0", int8_activations = true })
    assert.equal(7, same(model, ONE, 10))
  end)

  it("calls the functions of the script, which can stop it", function()
    local model, texts = made "llama", {}
    local seen = {}
    run(true, model, ONE, 9, { on_token = function(id, i) seen[i] = id; return i < 6 end })
    assert.equal(6, #seen)
    for i = 1, 2 do
      local out = model:generate(ONE, 12, { do_sample = false, eos_token_id = seen[6] })
      texts[i] = table.concat(out[1], " ")
      replay.on = i == 2
    end
    replay.on = true
    assert.equal(texts[1], texts[2])
  end)
end)

describe("a generation step runs the model's code", function()
  it("with hooks, also from the step on after which one was added", function()
    local model = made "llama"
    local calls, layer = 0, model.model.layers[1].mlp
    local function hook() calls = calls + 1 end
    local handle = layer:register_forward_hook(hook)
    assert.equal(0, same(model, ONE, 10))
    assert.equal(20, calls)
    handle:remove()
    calls = 0
    local _, count = run(true, model, ONE, 10, { on_token = function(_, i)
      if i == 6 then handle = layer:register_forward_hook(hook) end
    end })
    assert.equal(3, count)
    assert.equal(4, calls)
    handle:remove()
    for _, family in ipairs { "gpt2", "llama" } do            -- a head whose weight is the token table
      model, calls = made(family, nil, { tie_word_embeddings = true }), 0
      handle = model:head():register_forward_hook(hook)
      assert.equal(0, same(model, ONE, 10))
      assert.equal(20, calls)
      handle:remove()
    end
  end)

  it("with adapters", function()
    local model = made "llama"
    ps.lora.wrap(model, { r = 2 })
    assert.equal(0, same(model:eval(), ONE, 10))
  end)

  it("after an assignment to a module", function()
    -- Doubles the head's weight after the fifth token.
    local function changed(on)
      local model = made("llama", nil, { tie_word_embeddings = false })
      return run(on, model, ONE, 10, { on_token = function(_, i)
        local head = model:head()
        if i == 5 then head.weight = nn.Parameter(ps.no_grad(function() return head.weight * 2 end)) end
      end })
    end
    local got, count = changed(true)
    assert.truthy(changed(false) == got)
    assert.equal(2 + 3, count)                                         -- before the assignment, and from step 8 on
  end)

  it("if it depends on the position in another way", function()
    local model = made "llama"
    local layer = model.model.layers[0]
    local forward = layer.forward
    layer.forward = function(self, x, seen, cache, at) return forward(self, x, seen, cache, at) * (at + 0.5) end
    assert.equal(0, same(model, ONE, 10))
    layer.forward = function(self, x, seen, cache, at)
      local y = forward(self, x, seen, cache, at)
      return y:max():item() > 1e3 and y * 2 or y
    end
    assert.equal(0, same(model, ONE, 10))
    layer.forward = function(self, x, seen, cache, at)        -- constant in the first steps
      return forward(self, x, seen, cache, at) * (1 + math.floor((at or 0) / 8))
    end
    assert.equal(0, same(model, ONE, 10))
    -- the ops are the same, but one reads a tensor that the step made without an op
    layer.forward = function(self, x, seen, cache, at)
      return forward(self, x, seen, cache, at) + ps.tensor({ at or 0 }, { dtype = "fp32" })
    end
    assert.equal(0, same(model, ONE, 10))
  end)

  it("if the model belongs to an engine", function()
    local engine = ps.initialize { model = made "llama", config = { train_batch_size = 1, optimizer = { type = "SGD",
      params = { lr = 0.1 } } }, quiet = true }
    assert.equal(0, same(engine, ONE, 10))
    engine:close()
  end)

  it("while ops are recorded by the profiler", function()
    local model = made "llama"
    ps.profiler.start()
    local ok, count = pcall(same, model, ONE, 10)
    ps.profiler.stop()
    assert(ok, count)
    assert.equal(0, count)
  end)
end)
