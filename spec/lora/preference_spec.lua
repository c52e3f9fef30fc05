-- SPDX-License-Identifier: BSD-3-Clause
-- Training on preferences: losses, log-probabilities and gradients against formulas over whole logits, references from
-- the base model and from a cache, batches of texts and conversations, and examples/dpo.lua.
local ps = require "ps"
local check = require "spec.check_lib"
local paths = require "ps.paths"
local tokens = require "spec.tokenizer_lib"
local fails = check.fails
local F = ps.F

local model
after_each(function()
  if model then model:close() end
  model = nil
end)

local PAIRS = { { prompt = { 5, 6, 7 }, chosen = { 10, 11, 12 }, rejected = { 20 } },
  { prompt = { 8 }, chosen = { 30, 31 }, rejected = { 32, 33, 34, 35, 36 } },
  { prompt = { 9, 9, 9, 9 }, chosen = { 40 }, rejected = { 41, 42 } },
  { prompt = { 3, 4 }, chosen = { 50, 51, 52, 53 }, rejected = { 54, 55, 56 } } }

local function base(family, options)
  ps.manual_seed(3)
  local given = { initializer_range = 0.1, dropout = 0 }
  for key, value in pairs(options or {}) do given[key] = value end
  return require("models." .. family).new("tiny", given)
end

local function adapted(family, how, options)
  local m = ps.lora.wrap(base(family, options), { r = 3 })
  ps.no_grad(function()
    for _, p in m:named_parameters() do if p:needs_grad() then p:copy_(p + ps.randn(p:shape()) * 0.1) end end
  end)
  return ps.preference.wrap(m, how)
end

-- Returns the log-probability of each row's answer, computed from all logits.
local function log_probs_of(m, batch)
  local logits = m({ input_ids = batch.input_ids, attention_mask = batch.attention_mask }).logits
  local T = logits:size(1)
  local logp = F.log_softmax(logits:narrow(1, 0, T - 1), -1)
  local labels = batch.labels:narrow(1, 1, T - 1):to "int64"
  local counts = labels:ne(-100):to "fp32"
  return (logp:gather(-1, labels:clamp(0, 1e9):reshape(labels:size(0), T - 1, 1)):reshape(-1, T - 1) * counts):sum(1),
    counts:sum(1)
end

local function far(a, b) return (a:to "fp64" - b:to "fp64"):abs():amax():item() end

local function loss_of(m, batch, how)
  local policy, counts = log_probs_of(m, batch)
  local reference = ps.no_grad(m.disable_adapter, m, log_probs_of, m, batch)
  local ratio = (policy - reference):reshape(-1, 2)
  local chosen, rejected = ratio:select(1, 0), ratio:select(1, 1)
  if how.loss_type == "ipo" then
    local n = counts:reshape(-1, 2)
    return ((chosen / n:select(1, 0) - rejected / n:select(1, 1) - 1 / (2 * how.beta)) ^ 2):mean()
  end
  local z, smooth = (chosen - rejected) * how.beta, how.label_smoothing or 0
  return (z:sigmoid():log() * (smooth - 1) - (z * -1):sigmoid():log() * smooth):mean()
end

local WAYS = { { beta = 0.3 }, { beta = 0.1, loss_type = "ipo" }, { beta = 0.5, label_smoothing = 0.2 } }

describe("ps.preference", function()
  for _, family in ipairs { "gpt2", "llama", "qwen3" } do
    it("has the losses and gradients of whole logits: " .. family, function()
      for _, how in ipairs(WAYS) do
        for _, tied in ipairs { true, false } do
          local m = adapted(family, how, { tie_word_embeddings = tied })
          local batch = ps.preference.batch(PAIRS)
          local want = loss_of(m, batch, how)
          want:backward()
          local grads = {}
          for name, p in m:named_parameters() do
            if p:needs_grad() then
              grads[name] = p:grad():clone():keep()
              p:set_grad(nil)
            end
          end
          local out = m(batch)
          assert(far(want, out.loss) < 1e-5 * math.max(1, want:item()), far(want, out.loss))
          assert(far(out.log_probs, ps.no_grad(log_probs_of, m, batch)) < 1e-4)
          out.loss:backward()
          local n = 0
          for name, p in m:named_parameters() do
            if grads[name] ~= nil then
              n = n + 1
              local size = grads[name]:abs():amax():item()
              assert(far(grads[name], p:grad()) < 1e-4 * size + 1e-6, name)
            end
          end
          assert(n > 8)
        end
      end
    end)
  end

  it("has the same losses in an engine, by micro-batches, and from a cache", function()
    local path = os.tmpname()
    os.remove(path)
    path = path .. ".safetensors"
    local want
    for _, kind in ipairs { "plain", "chunks", "accumulate", "cache", "cache read" } do
      local optimizer
      model, optimizer = ps.initialize { quiet = true,
        model_func = function() return adapted("llama", { beta = 0.3 }) end,
        config = { plan_print = false, memory = kind == "plain" and "plain" or nil,
          gradient_accumulation_steps = kind == "accumulate" and 2 or 1,
          optimizer = { type = "AdamW", params = { lr = 1e-2, weight_decay = 0 } } } }
      local reference = kind:find "cache" and ps.preference.reference(model, PAIRS, { batch = 3, path = path })
      local batch = ps.preference.batch(PAIRS, { reference = reference or nil })
      local list = {}
      for step = 1, 5 do
        local sum, turns = 0, 0
        if kind == "accumulate" then
          for out in model:micro_batches(batch) do
            sum, turns = sum + out.loss:item(), turns + 1
            out.loss:backward()
          end
        else
          local loss = model(batch).loss
          sum, turns = loss:item(), 1
          model:backward(loss)
        end
        optimizer:step()
        list[step] = sum / turns
      end
      model:close()
      want = want or list
      for step, loss in ipairs(list) do
        assert(math.abs(loss - want[step]) < 1e-5, ("%s, step %d: %.8g, not %.8g"):format(kind, step, loss, want[step]))
      end
      assert(list[5] < list[1])
    end
    model = nil
    local other = adapted("llama")
    fails(function() ps.preference.reference(other, { PAIRS[1] }, { path = path }) end, "other pairs", path)
    os.remove(path)
  end)

  it("computes the reference without dropout, and keeps the modules' modes", function()
    local want = ps.preference.reference(adapted "gpt2", PAIRS)
    local function same(reference)
      for i, row in ipairs(want) do
        for k = 1, 2 do assert(math.abs(reference[i][k] - row[k]) < 1e-4, reference[i][k] - row[k]) end
      end
    end
    for _, kind in ipairs { "module", "plain", "chunks" } do
      local m = adapted("gpt2", { beta = 0.5 }, { dropout = 0.4 }):train()
      m.transformer.h[1]:eval()
      local optimizer
      if kind ~= "module" then
        model, optimizer = ps.initialize { quiet = true, model = m, config = { plan_print = false,
          memory = kind == "plain" and "plain" or nil, optimizer = { type = "AdamW" } } }
      end
      local call = model or m
      same(ps.preference.reference(call, PAIRS))
      for _ = 1, 2 do
        local out, reference = call(ps.preference.batch(PAIRS)), {}
        local log_probs = out.log_probs:tolist()
        local won, lost = out.chosen_rewards:tolist(), out.rejected_rewards:tolist()
        for i = 1, #PAIRS do
          reference[i] = { log_probs[2 * i - 1] - won[i] / 0.5, log_probs[2 * i] - lost[i] / 0.5 }
        end
        same(reference)
        if model then
          model:backward(out.loss)
          optimizer:step()
        end
      end
      for name, module in m:named_modules() do
        assert.equal(name:find "%.h%.1" == nil, module.training, name)
      end
      if model then model:close() end
      model = nil
    end
  end)

  it("does not take a cache of another base model", function()
    local folder = os.tmpname()
    os.remove(folder)
    local path = folder .. "/reference.safetensors"
    base "llama":save_pretrained(folder .. "/one")
    base("llama", { initializer_range = 0.2 }):save_pretrained(folder .. "/two")
    local function load(name) return ps.preference.wrap(ps.from_pretrained(folder .. "/" .. name, { quiet = true })) end
    local one = ps.preference.reference(load "one", PAIRS, { path = path })
    assert.same(one, ps.preference.reference(load "one", PAIRS, { path = path }))
    fails(function() ps.preference.reference(load "two", PAIRS, { path = path }) end, "another model", path)
    os.execute("rm -r " .. folder)
  end)

  it("still generates, and returns logits without labels", function()
    local m = adapted "gpt2"
    local plain = ps.lora.wrap(base "gpt2", { r = 3 })
    ps.lora.set_tensors(plain, ps.lora.tensors(m))
    assert.same(plain:generate({ 5, 6 }, 5, { temperature = 0 }), m:generate({ 5, 6 }, 5, { temperature = 0 }))
    local x = ps.tensor({ { 1, 2, 3 } }, "int32")
    assert.equal(0, far(plain({ input_ids = x }).logits, m({ input_ids = x }).logits))
  end)

  it("refuses by name", function()
    local m = adapted "llama"
    local batch = ps.preference.batch(PAIRS)
    local odd = { input_ids = batch.input_ids:narrow(0, 0, 3), labels = batch.labels:narrow(0, 0, 3) }
    fails(function() m(odd) end, "3 rows do not form pairs")
    fails(function() ps.preference.wrap(base("bert", { task = "masked_lm" }), {}) end, "causal")
    fails(function() ps.preference.wrap(base "llama", { beta = 0 }) end, "beta = 0")
    fails(function() ps.preference.wrap(base "llama", { loss_type = "kto" }) end, "kto", "sigmoid")
    fails(function() ps.preference.wrap(base "llama", { label_smoothing = 0.5 }) end, "label_smoothing")
    local whole = ps.preference.wrap(base "llama")
    fails(function() whole(batch) end, "no reference", "ps.preference.reference")
    local reference = ps.preference.reference(whole, PAIRS)
    local out = whole(ps.preference.batch(PAIRS, { reference = reference }))
    assert(math.abs(out.loss:item() - math.log(2)) < 1e-5)
    fails(function() ps.preference.batch {} end, "empty")
    fails(function() ps.preference.batch { PAIRS[1], { prompt = { 1 }, chosen = { 2 } } } end, "pair 2", "rejected")
    fails(function() ps.preference.batch { { prompt = "a", chosen = "b", rejected = "c" } } end, "pair 1",
      "ps.preference.encode")
    fails(function() ps.preference.batch(PAIRS, { reference = { { 0, 0 } } }) end, "reference", "4 pairs", "1")
    fails(function() ps.preference.batch({ PAIRS[1] }, { reference = { { 0 } } }) end, "reference", "pair 1")
  end)
end)

describe("pairs of texts", function()
  local folder
  setup(function()
    local TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
      .. "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    folder = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template = TEMPLATE,
      eos_token = "<|endoftext|>" } })
    ps.manual_seed(1)
    require("models.gpt2").new("tiny", { vocab_size = 258, n_positions = 64 }):save_pretrained(folder)
  end)
  teardown(function() tokens.remove(folder) end)

  it("become ids of a prompt and of two answers", function()
    local tok = ps.tokenizer.from_pretrained(folder)
    local pair = ps.preference.encode(tok, { prompt = "xy", chosen = "cd", rejected = "e" })
    assert.equal("xy", tok:decode(pair.prompt))
    assert.equal("cd", tok:decode(pair.chosen))
    assert.equal("e", tok:decode(pair.rejected))
    local user = { { role = "user", content = "hi" } }
    local one = ps.preference.encode(tok, { prompt = user, chosen = { { role = "assistant", content = "ok" } },
      rejected = { { role = "assistant", content = "no" } } })
    local two = ps.preference.encode(tok, { chosen = { user[1], { role = "assistant", content = "ok" } },
      rejected = { user[1], { role = "assistant", content = "no" } } })
    assert.same(one, two)
    assert.equal("<|user|>hi<|endoftext|><|assistant|>", tok:decode(one.prompt))
    assert.equal("ok<|endoftext|>", tok:decode(one.chosen))
    assert.is_nil(ps.preference.encode(tok, { prompt = "wxyz", chosen = "cd", rejected = "e" }, { seq = 4 }))
    assert.equal(1, #ps.preference.encode(tok, { prompt = "xyz", chosen = "cd", rejected = "e" }, { seq = 4 }).chosen)
    fails(function() ps.preference.encode(tok, { prompt = "x", chosen = "c" }) end, "chosen and rejected")
    fails(function() ps.preference.encode(tok, { prompt = "x", chosen = user, rejected = user }) end,
      "both must be texts")
    local batch = ps.preference.batch({ pair }, { pad = 1 })
    assert.same({ { -100, -100, pair.chosen[1], pair.chosen[2] }, { -100, -100, pair.rejected[1], -100 } },
      batch.labels:tolist())
    assert.same({ { 1, 1, 1, 1 }, { 1, 1, 1, 0 } }, batch.attention_mask:tolist())
  end)

  it("train an adapter in examples/dpo.lua", function()
    local lines = {}
    for i = 1, 24 do
      local c = string.char(97 + i)
      lines[i] = ('{"prompt": "say %s", "chosen": "%s", "rejected": "no"}\n'):format(c, c:rep(3))
    end
    check.write(folder .. "/pairs.jsonl", table.concat(lines))
    for _, more in ipairs { "", "--force --loss ipo --cache " .. folder .. "/reference.safetensors" } do
      local text, code = check.shell(("'%s' '%s/examples/dpo.lua' --model %s --data %s/pairs.jsonl --out %s/out "
        .. "--lr 1e-2 --epochs 3 --beta 0.5 --lora 4 %s"):format(paths.exe, paths.root, folder, folder, folder, more))
      assert.equal(0, code, text)
      local first, last = text:match "loss ([%d.]+)", text:match ".*loss ([%d.]+)"
      assert(tonumber(last) < 0.95 * tonumber(first), text)
      assert.truthy(text:find "accuracy 1%.00", text)
      assert.truthy(text:find(("\nwrote %s/out; talk to it with psluajit chat.lua %s/out\n"):format(folder, folder), 1,
        true), text)
      ps.from_pretrained(folder .. "/out", { quiet = true })
    end
    -- The first loss of DPO is log 2, because the reference is the model itself. Dropout would change it.
    local made = ps.from_pretrained(folder, { quiet = true })
    made:save_pretrained(folder .. "/dropout")
    ps.tokenizer.from_pretrained(folder):save_pretrained(folder .. "/dropout")
    local fields = require("cjson").decode(check.read(folder .. "/dropout/config.json"))
    fields.attn_pdrop, fields.embd_pdrop, fields.resid_pdrop, fields.attention_dropout = 0.5, 0.5, 0.5, 0.5
    check.write(folder .. "/dropout/config.json", require("cjson").encode(fields))
    check.write(folder .. "/odd.jsonl", table.concat(lines, "", 1, 9)
      .. ('{"prompt": "%s", "chosen": "a", "rejected": "b"}\n'):format(("long "):rep(400))
      .. ('{"prompt": "say", "chosen": "%s", "rejected": "b"}\n'):format(("long "):rep(400)))
    local odd = check.shell(("'%s' '%s/examples/dpo.lua' --model %s/dropout --data %s/odd.jsonl --out %s/odd --seq 32")
      :format(paths.exe, paths.root, folder, folder, folder))
    assert.matches("step 1 of 2: loss 0.6931, ", odd, 1, true)
    assert.matches("dpo.lua: 1 of 11 pairs are left out: their prompt has --seq 32 tokens or more\n", odd, 1, true)
    assert.matches("dpo.lua: 1 of 11 pairs have an answer that is truncated at --seq 32 tokens\n", odd, 1, true)
    assert.matches("dpo.lua: 2 pairs, others in each epoch, are not used: --batch does not divide", odd, 1, true)
    local again, refused = check.shell(("'%s' '%s/examples/dpo.lua' --model %s --data %s/pairs.jsonl --out %s/out")
      :format(paths.exe, paths.root, folder, folder, folder))
    assert.truthy(refused == 1 and again:find("dpo.lua: " .. folder .. "/out has a model, at ", 1, true), again)
    for want, bad in pairs { ["needs chosen and rejected"] = '{"prompt": "a", "chosen": "b"}', ["not JSON"] = "{" } do
      check.write(folder .. "/pairs.jsonl", table.concat(lines, "", 1, 2) .. bad .. "\n")
      local text, code = check.shell(("'%s' '%s/examples/dpo.lua' --model %s --data %s/pairs.jsonl --out %s/bad")
        :format(paths.exe, paths.root, folder, folder, folder))
      assert.equal(1, code)
      assert(text:find("dpo.lua: " .. folder .. "/pairs.jsonl:3: ", 1, true) and text:find(want, 1, true), text)
    end
  end)
end)
