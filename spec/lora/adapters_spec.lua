-- SPDX-License-Identifier: BSD-3-Clause
-- Adapters of every model: each wrapped layer uses its adapter in training, in decoding with a cache, in fused ops and
-- in heads. The reference is the base model with weights that this spec computes from the adapter's tensors in fp64.
local ps = require "ps"
local fails = require("spec.check_lib").fails

local model
after_each(function()
  if model then model:close() end
  model = nil
end)

local function made(family, options)
  ps.manual_seed(11)
  local given = { dropout = 0, pad_token_id = 0, initializer_range = 0.1 }
  for key, value in pairs(options or {}) do given[key] = value end
  return require("models." .. family).new("tiny", given)
end

local function noise(m, size)
  ps.no_grad(function()
    for _, p in m:named_parameters() do
      if p:needs_grad() then p:copy_(p + ps.randn(p:shape()) * (size or 0.05)) end
    end
  end)
  return m
end

local function ids(rows, length) return ps.randint(3, 60, { rows or 2, length or 8 }, { dtype = "int32" }) end

local function output(m, x)
  local out = ps.no_grad(m, { input_ids = x })
  return (out.logits or out.last_hidden_state or out.start_logits):detach():clone():keep()
end

local function far(a, b) return (a:to "fp64" - b:to "fp64"):abs():amax():item() end

-- Returns every layer of a model that can have an adapter, by the layer's path.
local function layers_of(m)
  local list = {}
  for name, module in m:named_modules() do
    local class = module.class_name
    if class == "Linear" or class == "Conv1D" or class == "Embedding" or class == "LMHead" then
      list[#list + 1] = { name = name, module = module }
    end
  end
  return list
end

-- Returns a layer's weight with its adapter, in fp64, by the papers' formulas.
local function reference_weight(layer, how)
  local of_table = layer.class_name == "Embedding"
  local A = (of_table and layer.lora_embedding_A.default or layer.lora_A.default.weight):detach():to "fp64"
  local B = (of_table and layer.lora_embedding_B.default or layer.lora_B.default.weight):detach():to "fp64"
  local scale = how.alpha / (how.use_rslora and math.sqrt(how.r) or how.r)
  local transposed = of_table or layer.class_name == "Conv1D"
  local weight = layer.weight:detach():to "fp64"
  if transposed then weight = weight:transpose(0, 1) end
  weight = weight + B:matmul(A) * scale
  if how.use_dora then
    local magnitude = layer.lora_magnitude_vector.default.weight:detach():to "fp64"
    weight = weight * (magnitude / (weight * weight):sum(1):sqrt()):reshape(-1, 1)
  end
  return (transposed and weight:transpose(0, 1) or weight):to "fp32":contiguous()
end

local FAMILIES = { gpt2 = { "causal_lm", "sequence_classification" }, llama = { "causal_lm", "token_classification" },
  mistral = { "causal_lm" }, qwen2 = { "causal_lm" }, qwen3 = { "causal_lm", "sequence_classification" },
  bert = { "masked_lm", "question_answering" }, roberta = { "masked_lm", "sequence_classification" } }
local KINDS = { { r = 3, alpha = 6 }, { r = 4, alpha = 5, use_rslora = true }, { r = 2, alpha = 8, use_dora = true } }

describe("each layer of a model with an adapter", function()
  for family, tasks in pairs(FAMILIES) do
    for _, task in ipairs(tasks) do
      it(("uses its adapter in every way of being called: %s, %s"):format(family, task), function()
        local whole = { task = task, tie_word_embeddings = false }
        if task == "sequence_classification" or task == "token_classification" or task == "question_answering" then
          whole.tie_word_embeddings = nil
        end
        local x = ids()
        for at, layer in ipairs(layers_of(made(family, whole))) do
          local how = KINDS[at % #KINDS + 1]
          local m, plain = made(family, whole), made(family, whole)
          local options = { targets = { layer.name }, modules_to_save = {} }
          for key, value in pairs(how) do options[key] = value end
          local before = output(m, x)
          ps.lora.wrap(m, options)
          assert(far(before, output(m, x)) < 1e-5, layer.name)
          noise(m, 0.2)
          local wrapped, other
          for name, module in m:named_modules() do if name == layer.name then wrapped = module end end
          for name, module in plain:named_modules() do if name == layer.name then other = module end end
          ps.no_grad(function() other.weight:copy_(reference_weight(wrapped, how)) end)
          local want, got = output(plain, x), output(m, x)
          assert(far(before, want) > 1e-5, layer.name .. " does not matter")
          assert(far(want, got) < 2e-5, ("%s: %.3g"):format(layer.name, far(want, got)))
          if task == "causal_lm" then
            local loss = ps.no_grad(m, { input_ids = x, labels = x }).loss
            assert(far(loss, ps.no_grad(plain, { input_ids = x, labels = x }).loss) < 1e-5, layer.name)
            assert.same(plain:generate({ 5, 6, 7 }, 6, { temperature = 0 }),
              m:generate({ 5, 6, 7 }, 6, { temperature = 0 }), layer.name)
          end
        end
      end)
    end
  end

  it("gets the gradients of the formula, and nothing else gets any", function()
    for _, family in ipairs { "gpt2", "llama", "bert" } do
      for _, how in ipairs(KINDS) do
        local m = made(family, { task = family == "bert" and "masked_lm" or nil })
        local options = { targets = "all-linear" }
        for key, value in pairs(how) do options[key] = value end
        noise(ps.lora.wrap(m, options))
        local x = ids()
        m({ input_ids = x, labels = x }).loss:backward()
        local n = 0
        for name, p in m:named_parameters() do
          n = n + 1
          if p:needs_grad() and n % 3 == 0 then
            assert.truthy(name:find "%.lora_", name)
            local numel, eps = p:numel(), 1e-2
            local flat, at = p:detach():reshape(-1), (7 * n) % numel
            local was = flat:narrow(0, at, 1):item()
            local function loss_at(value)
              ps.no_grad(function() flat:narrow(0, at, 1):fill_(value) end)
              return ps.no_grad(m, { input_ids = x, labels = x }).loss:item()
            end
            -- DoRA's norm is a constant in backward, so only its magnitudes have the whole gradient.
            if not how.use_dora or name:find "magnitude" then
              local want = (loss_at(was + eps) - loss_at(was - eps)) / (2 * eps)
              local got = p:grad():reshape(-1):narrow(0, at, 1):item()
              loss_at(was)
              assert(math.abs(want - got) < 2e-3 * math.max(0.05, math.abs(want)) + 1e-4,
                ("%s: %.6g, not %.6g"):format(name, got, want))
            end
          elseif not p:needs_grad() then
            assert.is_nil(p:grad(), name)
          end
        end
        assert(n > 10, n)
      end
    end
  end)
end)

describe("ps.lora.wrap", function()
  it("keeps the names of the base model, and leaves the head out of all-linear", function()
    for family in pairs(FAMILIES) do
      local task = (family == "bert" or family == "roberta") and "masked_lm" or "causal_lm"
      local m = made(family, { task = task, tie_word_embeddings = false })
      local before = {}
      for name, p in m:named_parameters() do before[name] = p:shape() end
      ps.lora.wrap(m)
      local n = 0
      for name, p in m:named_parameters() do
        if before[name] then
          assert.same(before[name], p:shape())
          assert.is_false(p:needs_grad(), name)
          before[name] = nil
        else
          n = n + 1
          assert.is_true(p:needs_grad(), name)
          assert.is_nil(name:find "^lm_head%.lora" or name:find "decoder%.lora" or name:find "embed", name)
        end
      end
      assert.is_nil((next(before)))
      assert(n >= 8, n)
    end
  end)

  it("trains the head of a classifier as a whole", function()
    local m = ps.lora.wrap(made("llama", { task = "sequence_classification", num_labels = 3 }), { r = 2 })
    assert.is_true(m.score.weight:needs_grad())
    assert.is_false(m.score.original_module.weight:needs_grad())
    local x = ids()
    local before = output(m, x)
    noise(m, 0.3)
    assert(far(before, output(m, x)) > 1e-3)
    m:disable_adapter(function() assert.equal(0, far(before, output(m, x))) end)
    assert(far(before, output(m, x)) > 1e-3)
  end)

  it("has ranks and scales by patterns", function()
    local m = ps.lora.wrap(made "llama", { r = 4, alpha = 8, targets = [[.*\.(q|v)_proj]],
      rank_pattern = { ["layers.1.self_attn.q_proj"] = 2 }, alpha_pattern = { ["v_proj"] = 3 } })
    local layers = m.model.layers
    assert.same({ 4, 32 }, layers[0].self_attn.q_proj.lora_A.default.weight:shape())
    assert.same({ 2, 32 }, layers[1].self_attn.q_proj.lora_A.default.weight:shape())
    assert.equal(3 / 4, layers[0].self_attn.v_proj.lora_.adapters.default.scale)
    assert.equal(4, layers[1].self_attn.q_proj.lora_.adapters.default.scale)
    assert.is_nil(layers[0].self_attn.k_proj.lora_A)
  end)

  it("selects layers by numbers, and leaves out those of exclude_modules", function()
    local m = ps.lora.wrap(made "llama", { targets = { "q_proj", "o_proj" }, layers_to_transform = { 1 },
      exclude_modules = { "o_proj" } })
    assert.is_nil(m.model.layers[0].self_attn.q_proj.lora_A)
    assert.truthy(m.model.layers[1].self_attn.q_proj.lora_A)
    assert.is_nil(m.model.layers[1].self_attn.o_proj.lora_A)
  end)

  it("drops only inputs of the adapter, in training", function()
    local m = noise(ps.lora.wrap(made "gpt2", { dropout = 0.5, alpha = 64 }))
    local x = ids()
    m:train()
    assert(far(output(m, x), output(m, x)) > 0)
    m:disable_adapter(function() assert.equal(0, far(output(m, x), output(m, x))) end)
    m:eval()
    assert.equal(0, far(output(m, x), output(m, x)))
  end)

  it("has adapters in fp32 over a model in bf16", function()
    local m = ps.lora.wrap(made("llama", { dtype = "bf16" }), { use_dora = true })
    for name, p in m:named_parameters() do
      assert.equal(p:needs_grad() and "fp32" or "bf16", p:dtype(), name)
    end
    local x = ids()
    m({ input_ids = x, labels = x }).loss:backward()
    assert.equal("fp32", m.model.layers[0].mlp.up_proj.lora_B.default.weight:grad():dtype())
  end)

  it("refuses by name", function()
    local m = made "llama"
    fails(function() ps.lora.wrap(m, { r = 0 }) end, "r = 0", "at least 1")
    fails(function() ps.lora.wrap(m, { targets = { "q_prj" } }) end, "q_prj", "did you mean q_proj?", "up_proj")
    fails(function() ps.lora.wrap(m, { targets = { "q_proj", "no_such" } }) end, "no_such")
    fails(function() ps.lora.wrap(m, { targets = { "norm" } }) end, "model.norm", "RMSNorm")
    fails(function() ps.lora.wrap(m, { targets = {} }) end, "empty")
    fails(function() ps.lora.wrap(m, { targets = "(q_proj" }) end, "(q_proj", "without its )")
    fails(function() ps.lora.wrap(m, { dropout = 1 }) end, "dropout = 1")
    fails(function() ps.lora.wrap(m, { modules_to_save = { "scor" } }) end, "scor")
    fails(function() ps.lora.wrap(m, { rank_pattern = { q_proj = 0 } }) end, "rank_pattern", "q_proj")
    fails(function() ps.lora.wrap(m, { rank_pattern = { q_prj = 2 } }) end, "rank_pattern['q_prj'] matches none of")
    fails(function() ps.lora.wrap(m, { alpha_pattern = { ["layers.9"] = 2 } }) end, "alpha_pattern['layers.9']")
    fails(function() ps.lora.wrap(m, { alpha_pattern = { q_proj = 0 } }) end, "alpha_pattern['q_proj'] = 0")
    for _, alpha in ipairs { 0 / 0, math.huge, 0 } do
      fails(function() ps.lora.wrap(m, { alpha = alpha }) end, "lora: alpha = ", "finite")
    end
    fails(function() ps.lora.wrap(m, { bias = "some" }) end, "bias")
    for _, name in ipairs { "a.b", "", "training", "_kind", "forward" } do
      fails(function() ps.lora.wrap(m, { name = name }) end, ("'%s' cannot be the name"):format(name))
    end
    fails(function() ps.lora.wrap(m, { targets = "q_proj" }) end, "regular expression", [[{ "q_proj" }]])
    fails(function() ps.lora.wrap(m, { targets = "((.*)*)*x" }) end, "((.*)*)*x", "too long")
    fails(function() ps.lora.wrap(m, { alpa = 3 }) end, "alpa", "alpha")
    local inner = require("ps.lora.targets").find(m, { targets = "all-linear" })
    local largest = 0
    for _, entry in ipairs(inner) do
      largest = math.max(largest, math.max(entry.module.weight:size(0), entry.module.weight:size(1)))
    end
    fails(function() ps.lora.wrap(m, { r = largest + 1 }) end, ("r = %d"):format(largest + 1),
      ("the largest side of the adapted weights is %d ("):format(largest))
    for _, p in ipairs(m:parameters()) do assert.is_true(p:needs_grad()) end
    ps.lora.wrap(made "llama", { r = largest })
    ps.lora.wrap(made "llama", { r = largest + 1, rank_pattern = { q_proj = 2 } })
    ps.lora.wrap(m, {})
    fails(function() ps.lora.wrap(m, {}) end, "an adapter 'default'", "another name")
    fails(function() m:set_adapter "other" end, "other", "default")
    local tied = made("gpt2", { tie_word_embeddings = true })
    fails(function() ps.lora.wrap(tied, { modules_to_save = { "wte" } }) end, "ensure_weight_tying")
    ps.lora.wrap(tied, { targets = { "wte" } })
    fails(function() tied:merge_adapter() end, "wte", "the head's")
  end)
end)

describe("merging", function()
  for family in pairs(FAMILIES) do
    it("changes no output: " .. family, function()
      for _, how in ipairs(KINDS) do
        local m = made(family, { task = (family == "bert" or family == "roberta") and "base" or "causal_lm" })
        local options = { targets = "all-linear" }
        for key, value in pairs(how) do options[key] = value end
        local x = ids()
        local before = output(m, x)
        noise(ps.lora.wrap(m, options), 0.1)
        local want = output(m, x)
        assert(far(before, want) > 1e-4)
        assert(far(want, output(m:merge_adapter(), x)) < 1e-5)
        assert(far(want, output(m:unmerge(), x)) < 1e-5)
        m:disable_adapter(function() assert(far(before, output(m, x)) < 1e-5) end)
        m:merge_adapter():unload_adapter { merge = true }
        assert(far(want, output(m, x)) < 1e-5)
        assert.is_nil(m.merge_adapter)
        for name in m:named_parameters() do assert.is_nil(name:find "lora", name) end
      end
    end)
  end
end)

describe("several adapters", function()
  it("are active one at a time, and train one at a time", function()
    local m = made "qwen3"
    local x = ids()
    local base = output(m, x)
    noise(ps.lora.wrap(m, { r = 2, name = "one" }))
    local one = output(m, x)
    noise(ps.lora.wrap(m, { r = 3, name = "two", targets = { "q_proj" }, use_dora = true }))
    local two = output(m, x)
    assert(far(one, two) > 1e-4)
    assert.equal("two", m:active_adapter())
    assert.equal(0, far(one, output(m:set_adapter "one", x)))
    for name, p in m:named_parameters() do assert.equal(name:find "%.one%." ~= nil, p:needs_grad(), name) end
    assert.equal(0, far(two, output(m:set_adapter "two", x)))
    fails(function() m:disable_adapter(function() error "inside" end) end, "inside")
    assert.equal("two", m:active_adapter())
    m:disable_adapter(function() assert.equal(0, far(base, output(m, x))) end)
    m:unload_adapter()
    assert.equal(0, far(base, output(m, x)))
  end)
end)

describe("an adapter with trained biases", function()
  it("is alone, and is not switched off, because the model has the biases once", function()
    for _, bias in ipairs { "all", "lora_only" } do
      local m = noise(ps.lora.wrap(made "gpt2", { r = 2, bias = bias }))
      fails(function() m:disable_adapter(function() end) end, "bias")
      fails(function() ps.lora.wrap(m, { r = 2, name = "other" }) end, "bias")
      assert.equal("default", m:active_adapter())
      ps.preference.wrap(m)
      local pairs_of = { { prompt = { 5, 6, 7 }, chosen = { 10, 11 }, rejected = { 12 } } }
      fails(function() m(ps.preference.batch(pairs_of)) end, "ps.preference.reference", "bias")
      fails(function() m:unload_adapter() end, "merge = true", "bias")
      local want = output(m, ids())
      m:unload_adapter { merge = true }
      assert(want:numel() > 0 and m.merge_adapter == nil)
      ps.lora.wrap(m, { r = 2 })
      fails(function() ps.lora.wrap(m, { r = 2, name = "other", bias = bias }) end, "bias")
    end
  end)
end)

describe("an engine with an adapter", function()
  local function open(options)
    local optimizer
    model, optimizer = ps.initialize { quiet = true, config = { plan_print = false, memory = options.memory,
      bf16 = { enabled = options.bf16 or false }, optimizer = { type = "AdamW", params = { lr = 1e-2 } } },
      model_func = function()
        return noise(ps.lora.wrap(made(options.family or "gpt2", { recompute = options.recompute }),
          { r = 2, use_dora = options.dora, targets = options.targets }))
      end }
    return optimizer
  end

  local function losses(optimizer, x)
    local list = {}
    for i = 1, 4 do
      local loss = model { input_ids = x, labels = x }.loss
      list[i] = ("%.17g"):format(loss:item())
      model:backward(loss)
      optimizer:step()
    end
    return list
  end

  it("trains like plain memory, changes only the adapter, and recomputes", function()
    local x = ids()
    for _, family in ipairs { "gpt2", "llama" } do
      for _, dora in ipairs { false, true } do
        local want
        for _, how in ipairs { { memory = "plain" }, {}, { recompute = true } } do
          how.family, how.dora = family, dora
          local optimizer = open(how)
          local base = {}
          for name, p in model:named_parameters() do
            if not p:needs_grad() then base[name] = p:to("fp64"):abs():sum():item() end
          end
          local got = losses(optimizer, x)
          want = want or got
          assert.same(want, got)
          assert(tonumber(got[4]) < tonumber(got[1]))
          for name, p in model:named_parameters() do
            if base[name] then assert.equal(base[name], p:to("fp64"):abs():sum():item()) end
          end
          model:close()
        end
      end
    end
    model = nil
  end)

  it("holds no master, gradient and state of frozen weights", function()
    local function nbytes(wraps)
      model = ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" } },
        model_func = function()
          local m = made "llama"
          return wraps and ps.lora.wrap(m, { r = 1, targets = { "q_proj" } }) or m
        end }
      local sum = 0
      for _, row in ipairs(ps.chunks()) do sum = sum + row.nbytes end
      model:close()
      return sum
    end
    local whole, adapted = nbytes(false), nbytes(true)
    model = nil
    assert(adapted < 0.5 * whole, ("%d of %d"):format(adapted, whole))
  end)

  it("leaves its adapter frozen next to a second one, after it was closed", function()
    open {}
    local module = model.module
    model:close()
    model = nil
    ps.lora.wrap(module, { r = 2, name = "other" })
    for name, p in module:named_parameters() do assert.equal(name:find "%.other%." ~= nil, p:needs_grad(), name) end
  end)

  it("trains in bf16 with fp32 masters", function()
    local x = ids()
    local optimizer = open { bf16 = true, dora = true }
    local got = losses(optimizer, x)
    assert(tonumber(got[4]) < tonumber(got[1]))
    local state = model:state_dict()
    local A = "transformer.h.0.attn.c_attn.lora_A.default.weight"
    assert.equal("fp32", state[A]:dtype())
  end)

  it("refuses a model with nothing to train", function()
    fails(function()
      ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" } },
        model_func = function() return made("gpt2"):requires_grad_(false) end }
    end, "train")
  end)

  it("refuses to be wrapped afterwards", function()
    open {}
    fails(function() ps.lora.wrap(model, {}) end, "model_func")
  end)
end)

describe("a frozen weight", function()
  local F = ps.F

  -- Returns the bytes that the tape keeps of fn's tensors after their headers are freed.
  local function kept(fn)
    ps.collect_all()
    local before = ps.memory("cpu").used
    local out = fn()
    ps.collect_all()
    local nbytes = ps.memory("cpu").used - before - out:nbytes()
    out:sum():backward()
    return nbytes
  end

  it("keeps no activations for its gradient", function()
    local N, C = 256, 512
    local first = ps.randn({ C, C }, { requires_grad = true })
    local x = ps.randn { N, C }
    for name, layer in pairs {
      linear = function(h, w) return F.linear(h, w) end,
      matmul = function(h, w) return h:matmul(w) end,
      mul = function(h, w) return h * w:narrow(0, 0, N) end,
    } do
      for _, frozen in ipairs { false, true } do
        local w = ps.randn({ C, C }, { requires_grad = not frozen })
        local nbytes = kept(function() return layer(F.linear(x, first), w) end)
        local want = frozen and 0 or N * C * 4
        assert(math.abs(nbytes - want) < 65536, ("%s, frozen %s: %d, not %d"):format(name, tostring(frozen), nbytes,
          want))
        assert.equal(frozen, w:grad() == nil)
        assert(first:grad():abs():sum():item() > 0)
        first:set_grad(nil)
      end
    end
  end)
end)

describe("ps.recompute", function()
  it("keeps tensors of a table among the arguments until backward", function()
    local w = ps.randn({ 64, 64 }, { requires_grad = true })
    local x = ps.randn { 512, 64 }
    local grads = {}
    for _, again in ipairs { false, true } do
      ps.manual_seed(4)
      local y = ps.scope(function()
        local batch = { cos = ps.randn { 512, 64 } * 2 }
        local function block(t, given) return (t:matmul(w) * given.cos):tanh() end
        return again and ps.recompute(block, x, batch) or block(x, batch)
      end)
      y:sum():backward()
      grads[#grads + 1] = w:grad():clone():keep()
      w:set_grad(nil)
    end
    assert.equal(0, (grads[1] - grads[2]):abs():amax():item())
  end)
end)

describe("freezing by names", function()
  it("takes patterns over whole parts of names, and prints a table", function()
    local m = made "gpt2"
    m:freeze "h.*"
    for name, p in m:named_parameters() do assert.equal(not name:find "%.h%.", p:needs_grad(), name) end
    m:thaw { "h.1", "c_attn.bias" }
    for name, p in m:named_parameters() do
      local wanted = not name:find "%.h%.0" or name:find "c_attn%.bias" ~= nil
      assert.equal(wanted, p:needs_grad(), name)
    end
    fails(function() m:freeze "c_attm" end, "c_attm", "c_attn")
    local rows = ps.lora.wrap(m, { r = 1 }):trainable()
    local text = tostring(rows)
    assert.truthy(text:find("transformer.h.*.attn.c_attn.lora_A.default.weight", 1, true), text)
    assert.equal(m:num_parameters(), rows.parameters)
    local n = 0
    for _, p in ipairs(m:parameters()) do if p:needs_grad() then n = n + p:numel() end end
    assert.equal(n, rows.trained)
    assert.equal(4 * n, rows.trained_nbytes)
  end)
end)

describe("a checkpoint of a model with an adapter", function()
  local path = os.tmpname() .. "d"
  teardown(function() os.execute("rm -rf " .. path) end)

  it("is refused by a model whose adapter has another scale or rank", function()
    local function wrapped(options) return ps.lora.wrap(made "llama", options) end
    local m = noise(wrapped { r = 4, alpha = 16 })
    ps.checkpoints.save(path, { model = m, step = 1 })
    for text, options in pairs { ["has rank 4 and the scale 0.5"] = { r = 4, alpha = 2 },
      ["has rank 4 and the scale 8"] = { r = 4, alpha = 16, use_rslora = true },
      ["has rank 8 and the scale 4"] = { r = 8, alpha = 32 },
      ["has rank 4 and the scale 1 "] = { r = 4, alpha = 16, alpha_pattern = { q_proj = 4 } } } do
      local other = wrapped(options)
      fails(function() ps.checkpoints.load(path, { model = other }) end,
        "saved with an adapter (default) of rank 4 and the scale 4", text, "with the options of the saved run")
    end
    local same = wrapped { r = 4, alpha = 16 }
    ps.checkpoints.load(path, { model = same })
    local x = ids()
    assert.equal(0, far(output(m, x), output(same, x)))
  end)
end)
