-- SPDX-License-Identifier: BSD-3-Clause
-- Tests Llama, Mistral, Qwen2 and Qwen3: frequencies of rotary embedding (transformers' numbers), masks of 2 and 4
-- dimensions, windows, cached keys, parts, chunks, and errors. oracle/models_oracle.py compares the logits, losses and
-- gradients of these models, and their training, with those of transformers.
local ps = require "ps"
local address = require("ps.nn.module").address
local parts = require "ps.nn.parts"
local rope = require "ps.pretrained.rope"
local check = require "spec.check_lib"
local json = require "cjson"

local FAMILIES = { "llama", "mistral", "qwen2", "qwen3" }

local function tiny(family, options)
  ps.manual_seed(4)
  return require("models." .. family).new("tiny", options):eval()
end

local function ids(rows, columns) return ps.randint(1, 256, { rows, columns }, { dtype = "int32" }) end
local function largest(t) return t:abs():max():item() end

-- Returns an additive mask: 0 where bool [T, T] is true, else the lowest fp32 number.
local function added(sees) return ps.where(sees, ps.zeros {}, ps.full({}, -3.4028234e38)) end

local function causal(T, window)
  local i, j = ps.arange(T):reshape(T, 1), ps.arange(T):reshape(1, T)
  return i:ge(j):logical_and(j:gt(i - (window or T)))
end

describe("the gated layer", function()
  it("multiplies the activation's result by the other product in one op, with silu and gelu", function()
    for _, act in ipairs { "silu", "gelu", "gelu_pytorch_tanh" } do
      local model = tiny("llama", { hidden_act = act })
      ps.profiler.start()
      ps.no_grad(function() return model { input_ids = ids(1, 4) } end)
      local calls = {}
      for _, row in ipairs(ps.profiler.stop()) do calls[row.name] = row.calls end
      assert.equal(model.config.num_hidden_layers, calls.act_mul, act)
    end
  end)
end)

describe("rotary embedding", function()
  it("has transformers' frequencies for each kind", function()
    for _, case in ipairs {
      { {}, 8, { 1, 0.100000001, 0.00999999978, 0.00100000005 }, 1 },
      { { rope_type = "linear", rope_theta = 500, factor = 4 }, 8, { 0.25, 0.05286856, 0.0111803403, 0.00236435398 },
        1 },
      { { rope_type = "dynamic", factor = 2 }, 100, { 1, 0.0777822211, 0.00605007401, 0.000470588246 }, 1 },
      { { rope_type = "dynamic", factor = 2 }, 60, { 1, 0.100000001, 0.00999999978, 0.00100000005 }, 1 },
      { { rope_type = "llama3", factor = 8, low_freq_factor = 1, high_freq_factor = 4,
          original_max_position_embeddings = 200 }, 8, { 1, 0.0761737153, 0.00124999997, 0.000125000006 }, 1 },
      { { rope_type = "yarn", factor = json.null, original_max_position_embeddings = 16, beta_fast = 0, beta_slow = 0 },
        8, { 1, 0.025, 0.00249999994, 0.000250000012 }, 1.138629436111989 },
      { { rope_type = "yarn", factor = 4 }, 8, { 1, 0.0625, 0.00249999994, 0.000250000012 }, 1.138629436111989 },
      { { rope_type = "yarn", factor = 5, mscale = 0.7, mscale_all_dim = 1.3, beta_fast = 6, beta_slow = 2,
          truncate = false, original_max_position_embeddings = 300 }, 8,
        { 1, 0.0833652616, 0.00200000009, 0.000199999995 }, 0.9201421400228534 },
      { { rope_type = "yarn", factor = 8, mscale = 0.707, original_max_position_embeddings = 8192,
          truncate = json.null }, 8, { 1, 0.100000001, 0.00773313316, 0.000191975938 }, 1.2079441541679836 },
    } do
      for _, field in ipairs { "rope_parameters", "rope_scaling" } do
        local p = rope.parameters("llama", { [field] = case[1], max_position_embeddings = 64 })
        local got, factor = rope.frequencies(p, 8, 64, case[2])
        for i, want in ipairs(case[3]) do assert.near(want, got[i], 1e-7 * want) end
        assert.near(case[4], factor, 1e-12)
      end
    end
  end)

  it("is refused or an error if its kind is unknown, or lacks a setting that the kind needs", function()
    local llama = require "models.llama"
    for _, case in ipairs {
      { { rope_scaling = { rope_type = "proportional" } },
        "llama: refused: rope_type = proportional: the supported values are" },
      { { rope_scaling = { rope_type = "longrope", factor = 2 } }, "rope_type = longrope need " },
      { { rope_scaling = { type = "longrope", long_factor = { 1, 2 }, short_factor = { 1, 1 }, attention_factor = 1 } },
        "llama: refused: long_factor = {...}: it differs from short_factor" },
      { { rope_scaling = { type = "longrope", long_factor = { 1 }, short_factor = { 1 }, attention_factor = 1 } },
        "short_factor has 1 numbers" },
      { { rope_scaling = { rope_type = "mrope", mrope_section = { 16, 24, 24 } } }, "refused: rope_type = mrope" },
      { { rope_scaling = { rope_type = "default", mrope_section = { 16, 24, 24 } } }, "mrope) is not supported" },
      { { rope_scaling = { type = "linear" } }, "rope_type = linear need factor" },
      { { rope_parameters = { rope_theta = 0 } }, "rope_theta = 0: it must be above 0" },
      { { partial_rotary_factor = 0.5 }, "refused: partial_rotary_factor = 0.5" },
      { { rope_parameters = { rope_type = "linear", factor = 0 } }, "rope_parameters (factor = 0, rope_theta = 10000, "
        .. "rope_type = linear) give a frequency of inf" },
      { { rope_parameters = { full_attention = { rope_theta = 5 } } }, "refused: full_attention = {...}: rotary" },
      { { head_dim = 5 }, "a head has 5 columns; rotary embedding needs an even number" },
      { { num_key_value_heads = 3 }, "num_key_value_heads = 3 does not divide num_attention_heads = 4" },
    } do
      check.fails(function() llama.new("tiny", case[1]) end, "llama_spec.lua", case[2])
    end
  end)
end)

describe("a head for tokens", function()
  it("has no bias if config.json sets it to null", function()
    local rules = require("models.llama_config").llama
    local config = rules:from_file { token_classification_bias = json.null }
    assert.is_false(config.token_classification_bias)
    config.head_dim, config.vocab_size, config.num_hidden_layers, config.hidden_size = 4, 16, 1, 16
    local model = require("models.llama").new(config, { task = "token_classification", num_attention_heads = 2 })
    assert.is_nil(model.score.bias)
  end)
end)

describe("a script's settings of rotary embedding", function()
  local folder
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
  end)
  teardown(function() os.execute("rm -rf " .. folder) end)

  local LINEAR = { rope_type = "linear", factor = 3 }

  it("override the file's, in both forms", function()
    local x = ids(2, 9)
    local model = tiny("llama", { rope_parameters = { rope_theta = 50 } })
    model:save_pretrained(folder)
    local fields = json.decode(check.read(folder .. "/config.json"))
    -- Returns the resulting rope_theta and kind for a file with fields and a script's options.
    local function found(changed, options)
      local all = {}
      for key, value in pairs(fields) do if key ~= "rope_parameters" then all[key] = value end end
      for key, value in pairs(changed) do all[key] = value end
      check.write(folder .. "/config.json", json.encode(all))
      options.quiet = true
      local loaded = require("models.llama").from_pretrained(folder, options):eval()
      loaded:save_pretrained(folder .. "/again")
      local again = require("models.llama").from_pretrained(folder .. "/again"):eval()
      assert.equal(check.bytes(loaded(x)), check.bytes(again(x)))
      local p = loaded.model.rope.parameters
      return { p.rope_theta, p.rope_type, p.factor }, again.config
    end
    local new = { rope_parameters = { rope_type = "default", rope_theta = 50 } }
    local old = { rope_theta = 50, rope_scaling = { type = "dynamic", factor = 2 } }
    for _, file in ipairs { new, old, { rope_theta = 50 } } do
      assert.same({ 50, "linear", 3 }, found(file, { rope_scaling = LINEAR }))
      assert.same({ 50, "linear", 3 }, found(file, { rope_parameters = LINEAR }))
      assert.same({ 70, "linear", 3 }, found(file, { rope_parameters = LINEAR, rope_theta = 70 }))
      assert.same({ 70, "linear", 3 }, found(file, { rope_scaling = { type = "linear", factor = 3, rope_theta = 70 } }))
    end
    assert.same({ 70, "default" }, found(new, { rope_theta = 70 }))
    local got, config = found(old, { rope_theta = 70 })
    assert.same({ 70, "dynamic", 2 }, got)
    assert.same({ 70, "dynamic" }, { config.rope_theta, config.rope_scaling.type })    -- as in older versions
    check.fails_saying({ "llama: rope_scaling and rope_parameters are two names of one setting" }, function()
      found(new, { rope_scaling = LINEAR, rope_parameters = LINEAR })
    end)
    check.fails_saying({ "llama: rope_theta = 8, but 7 in the table of rotary settings" }, function()
      found(new, { rope_scaling = { rope_type = "linear", factor = 3, rope_theta = 7 }, rope_theta = 8 })
    end)
  end)

  it("override a preset's", function()
    local model = require("models.llama").new("llama-3-8b", { vocab_size = 256, hidden_size = 32, intermediate_size = 8,
      num_hidden_layers = 1, head_dim = 4, rope_theta = 70 })
    assert.equal(70, model.model.rope.parameters.rope_theta)
  end)
end)

describe("a causal model's positions", function()
  -- As in transformers' create_causal_mask, without a mask and a cache they separate the sequences of a row.
  it("that restart within a row are several sequences if use_cache is false", function()
    local x, anew = ids(2, 5), ps.tensor({ { 0, 1, 2, 0, 1 } }, "int64")
    for _, family in ipairs { "gpt2", "llama", "qwen3" } do
      local model = tiny(family)
      local same = model { input_ids = x, position_ids = anew }.logits
      model.config.use_cache = false
      local apart = model { input_ids = x, position_ids = anew }.logits
      assert.equal(0, largest(apart:narrow(1, 0, 3) - same:narrow(1, 0, 3)))
      assert(largest(apart:narrow(1, 3, 2) - same:narrow(1, 3, 2)) > 1e-3)
      assert.equal(0, largest(model { input_ids = x, position_ids = anew,
        attention_mask = ps.ones({ 2, 5 }, { dtype = "int32" }) }.logits - same))
      local first = model { input_ids = x, position_ids = ps.arange(5) }.logits
      assert.equal(0, largest(first - model { input_ids = x }.logits))
      check.fails(function() model { input_ids = x, position_ids = ps.ones { 2, 5 } } end,
        family .. ": position_ids is fp32; it must be int32 or int64")
    end
  end)
end)

describe("Llama's family", function()
  it("accepts a mask of 4 dimensions, bool or additive, with the results of causal and key masks", function()
    for _, family in ipairs(FAMILIES) do
      local window = family == "mistral" and 3 or nil
      local model, x, T = tiny(family, { sliding_window = window }), ids(3, 9), 9
      local keys = ps.ones({ 3, T }, { dtype = "int64" })
      keys[{ 0, { 0, 4 } }], keys[{ 1, { 7, 9 } }] = 0, 0
      local want = model { input_ids = x, attention_mask = keys }.logits
      local sees = causal(T, window):reshape(1, 1, T, T):logical_and(keys:ne(0):reshape(3, 1, 1, T))
      assert.near(0, largest(model { input_ids = x, attention_mask = sees }.logits - want), 1e-5)
      assert.near(0, largest(model { input_ids = x, attention_mask = added(sees) }.logits - want), 1e-5)
    end
    check.fails(function()
      tiny "llama" { input_ids = ids(1, 4), attention_mask = ps.ones({ 1, 1, 4, 4 }, { dtype = "int64" }) }
    end, "refused: attention_mask = int64: with 4 dimensions it must be bool, or floats to add")
  end)

  it("sees only the keys of a window, in the layers that have one", function()
    local x = ids(1, 12)
    local y = x:clone()
    y[{ 0, 0 }] = (x[{ 0, 0 }] + 1):item() % 256
    local function changed(model)
      local d = (model(x) - model(y)):abs():sum(-1):tolist()[1]
      local first
      for i = 1, 12 do if d[i] > 0 then first = i end end
      return first
    end
    -- two layers see 2 positions back each
    assert.equal(5, changed(tiny("mistral", { sliding_window = 3 })))
    assert.equal(12, changed(tiny("mistral", { sliding_window = 12 })))
    local both = { use_sliding_window = true, sliding_window = 3, max_window_layers = 0 }
    for _, family in ipairs { "qwen2", "qwen3" } do
      assert.equal(5, changed(tiny(family, both)))
      assert.equal(12, changed(tiny(family, { use_sliding_window = true, sliding_window = 3, max_window_layers = 1 })))
      assert.equal(12, changed(tiny(family, { sliding_window = 3 })))
      both.layer_types = { "sliding_attention", "sliding_attention" }
      assert.equal(5, changed(tiny(family, both)))
      both.layer_types = nil
    end
    check.fails(function() tiny("qwen3", { layer_types = { "chunked_attention", "full_attention" } }) end,
      "refused: layer_types = chunked_attention")
    check.fails(function() tiny("qwen3", { layer_types = { "full_attention" } }) end,
      "layer_types has 1 entries, num_hidden_layers is 2")
  end)

  it("continues sequences by cached keys with the results of recomputing all positions", function()
    for _, family in ipairs(FAMILIES) do
      local model = tiny(family, { sliding_window = family == "mistral" and 4 or nil,
        max_position_embeddings = family ~= "llama" and 7 or nil })           -- rotary embeddings go past it
      local got = model:generate({ { 5, 6, 7 }, { 9, 8, 1, 4, 2 } }, 8, { temperature = 0 })
      for _, row in ipairs(got) do
        for n = #row - 7, #row do
          local logits = model(ps.tensor({ { unpack(row, 1, n - 1) } }, { dtype = "int32" }))
          assert.equal(row[n], logits[{ 0, n - 2 }]:argmax(-1):item(), family)
        end
      end
    end
  end)

  it("has parts that use each parameter, with the bits of the model", function()
    for _, family in ipairs(FAMILIES) do
      for _, task in ipairs { "causal_lm", "base", "sequence_classification", "token_classification" } do
        local model = tiny(family, { task = task, pad_token_id = 0, tie_word_embeddings = true })
        local given, uses, list = { input_ids = ids(2, 7) }, {}, model:parts()
        assert.same({ "embed_tokens", "layers.0", "layers.1", task == "base" and "norm" or "head" },
          { list[1].name, list[2].name, list[3].name, list[4].name })
        for _, part in ipairs(list) do
          for _, module in ipairs(part.modules) do
            for _, p in module:named_parameters() do uses[address(p)] = (uses[address(p)] or 0) + 1 end
          end
        end
        for name, p in model:named_parameters() do
          assert.equal(task == "causal_lm" and name == "model.embed_tokens.weight" and 2 or 1, uses[address(p)], name)
        end
        local whole, cut = model(given), parts.run(list, 1, 4, {}, model:batch_of(given))
        for key, t in pairs(whole) do assert.equal(check.bytes(t), check.bytes(cut[key]), key) end
      end
    end
  end)

  it("trains in chunks, with recomputation and from a saved folder like in plain memory", function()
    local x = ids(4, 9)
    local folder = os.tmpname()
    os.remove(folder)
    local function trained(memory, recompute)
      local model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, memory = memory,
        optimizer = { type = "AdamW", params = { lr = 1e-2 } } }, model_func = function()
          return tiny("qwen3", { recompute = recompute }):train()
        end }
      local losses = {}
      for i = 1, 3 do
        local loss = model { input_ids = x, labels = x }.loss
        losses[i] = loss:item()
        model:backward(loss)
        optimizer:step()
        optimizer:zero_grad()
      end
      local bytes = {}
      for name, t in pairs(model:state_dict()) do bytes[name] = check.bytes(t) end
      os.execute("rm -rf " .. folder)
      model:save_pretrained(folder)
      model:close()
      return losses, bytes
    end
    local losses, plain = trained "plain"
    assert.truthy(losses[3] < losses[1])
    assert.same({ losses, plain }, { trained { host = "8MiB" } })
    assert.same({ losses, plain }, { trained({ host = "8MiB" }, true) })
    local back = ps.from_pretrained(folder, { quiet = true })
    for name, t in pairs(back:state_dict()) do assert.equal(plain[name], check.bytes(t), name) end
    assert.equal("Qwen3ForCausalLM", back.class_name)
    os.execute("rm -rf " .. folder)
  end)

  it("counts the operations of a token", function()
    local model = tiny("llama", { tie_word_embeddings = false })
    local table_of = 256 * 32
    assert.equal(6 * (model:num_parameters() - table_of) + 12 * 2 * 32 * 10, model:flops_per_token(10))
    model = tiny("llama", { tie_word_embeddings = true })
    assert.equal(6 * model:num_parameters() + 12 * 2 * 32 * 10, model:flops_per_token(10))
  end)
end)
