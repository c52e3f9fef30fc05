-- SPDX-License-Identifier: BSD-3-Clause
-- Generation: a model whose logits are a table in this file, so that the ids are known; GPT-2 with and without its
-- caches; attention with caches against the ops that it runs; chunks that move, ranks, programs.
-- oracle/generate_oracle.py compares ids with transformers'.
local ps = require "ps"
local nn = ps.nn
local gpt2 = require "models.gpt2"
local generate = require "ps.pretrained.generate"
local json = require "cjson"
local paths = require "ps.paths"
local check = require "spec.check_lib"
local ranks = require "spec.ranks_lib"
local text = require "ps.pretrained.generate_text"
local tokens = require "spec.tokenizer_lib"
local fails = check.fails_saying
local heads = require "ps.pretrained.heads"

-- A model whose next token depends only on the last one. logits[a][b] is for b after a, with rows counted from 0.
local Chain = nn.class("Chain")
function Chain:init(logits, config)
  self.table = nn.Embedding(#logits, #logits)
  ps.no_grad(function() self.table.weight:copy_(ps.tensor(logits, { dtype = "fp32" })) end)
  self.config = config or { vocab_size = #logits }
end
function Chain:positions() return 1000 end
function Chain:new_caches() return {} end -- luacheck: ignore 212
function Chain:next_logits(ids) return self.table(ids:narrow(1, ids:size(1) - 1, 1):reshape(-1)) end

local function drawn(words, seed, spread)
  math.randomseed(seed)
  local rows = {}
  for a = 1, words do
    rows[a] = {}
    for b = 1, words do rows[a][b] = math.random() * (spread or 4) end
  end
  return rows
end

local function log_softmax(row)
  local sum, out = 0, {}
  for _, x in ipairs(row) do sum = sum + math.exp(x) end
  for i, x in ipairs(row) do out[i] = x - math.log(sum) end
  return out
end

describe("tokens of a known chain", function()
  it("are the likeliest, and end at an end token", function()
    local model = Chain { { 0, 1, 0, 0 }, { 0, 0, 2, 1 }, { 0, 0, 0, 1 }, { 5, 0, 0, 0 } }
    assert.same({ 0, 1, 2, 3, 0, 1 }, generate(model, { 0 }, 5, { temperature = 0 }))
    assert.same({ 0, 1, 2 }, generate(model, { 0 }, 5, { do_sample = false, eos_token_id = 2 }))
    assert.same({ 0, 1, 2 }, generate(model, { 0 }, 5, { temperature = 0, eos_token_id = { 3, 2 } }))
    assert.same({ { 0, 1, 2 }, { 3, 0, 1, 2 } }, generate(model, { { 0 }, { 3 } }, 9, { temperature = 0,
      eos_token_id = 2 }))
    -- the end token is not allowed at first, so 3, the second best, follows 1
    assert.same({ 0, 1, 3, 0, 1, 2 }, generate(model, { 0 }, 9, { temperature = 0, eos_token_id = 2,
      min_new_tokens = 4 }))
  end)

  it("follow a prompt with more ids than a call can have arguments", function()
    local model, prompt = Chain({ { 0, 1 }, { 1, 0 } }), {}
    function model:positions() return 20000 end -- luacheck: no self
    for i = 1, 9000 do prompt[i] = i % 2 end
    for _, options in ipairs { { temperature = 0 }, { num_beams = 2 } } do
      local ids = generate(model, prompt, 2, options)
      assert.equal(9002, #ids)
      assert.same({ 0, 1, 0 }, { ids[9000], ids[9001], ids[9002] })
    end
  end)

  it("repeat less: positive logits of seen tokens are divided, negative ones multiplied", function()
    local model = Chain { { -1, 2, 1.5, -1.1 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 } }
    assert.same({ 1, 0, 1 }, generate(model, { 1, 0 }, 1, { temperature = 0, repetition_penalty = 1.3 }))
    assert.same({ 1, 0, 2 }, generate(model, { 1, 0 }, 1, { temperature = 0, repetition_penalty = 1.4 }))
    local low = Chain { { -1, -1.2, -1.5, -9 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 } }
    assert.same({ 0, 1 }, generate(low, { 0 }, 1, { temperature = 0, repetition_penalty = 1.3 }))
    -- a token that pads a shorter prompt counts as not seen
    local near = Chain { { 0, 1, 0, 0 }, { 0, 0, 0, 0 }, { 0, 0, 0, 0 }, { 1, 0.9, 0, 0 } }
    assert.same({ { 2, 1, 0, 1 }, { 3, 0 } }, generate(near, { { 2, 1, 0 }, { 3 } }, 1, { temperature = 0,
      repetition_penalty = 1.3 }))
  end)

  it("do not repeat an n-gram", function()
    local model = Chain { { 3, 2, 1 }, { 3, 2, 1 }, { 3, 2, 1 } }
    assert.same({ 0, 1, 2 }, generate(model, { 0 }, 2, { temperature = 0, no_repeat_ngram_size = 1 }))
    assert.same({ 0, 0, 1, 0, 2, 0 }, generate(model, { 0 }, 5, { temperature = 0, no_repeat_ngram_size = 2 }))
    assert.same({ 0, 0, 0, 1, 0, 0, 2 }, generate(model, { 0 }, 6, { temperature = 0, no_repeat_ngram_size = 3 }))
    local list = generate(model, { { 1, 0, 0 }, { 0 } }, 3, { temperature = 0, no_repeat_ngram_size = 2 })
    assert.same(generate(model, { 0 }, 3, { temperature = 0, no_repeat_ngram_size = 2 }), list[2])
    fails({ "largest logit of row 0 is -inf" }, function()
      generate(model, { 0 }, 3, { temperature = 0, no_repeat_ngram_size = 1 })
    end)
  end)

  it("are passed through a script's function, with ids padded left", function()
    local model = Chain(drawn(5, 1))
    local shapes = {}
    local out = generate(model, { { 1, 2, 3 }, { 4 } }, 2, { temperature = 0, logits_processor = function(ids, logits)
      shapes[#shapes + 1] = ids:tolist()
      return logits * 0 + ps.tensor({ 0, 0, 1, 0, 0 }, { dtype = "fp32" })
    end })
    assert.same({ { 1, 2, 3, 2, 2 }, { 4, 2, 2 } }, out)
    assert.same({ { { 1, 2, 3 }, { 0, 0, 4 } }, { { 1, 2, 3, 2 }, { 0, 0, 4, 2 } } }, shapes)
    fails({ "logits_processor must return logits [1, 5]" }, function()
      generate(model, { 1 }, 1, { logits_processor = function() return ps.zeros { 1, 4 } end })
    end)
  end)

  it("are drawn with the frequencies that top_k, top_p and min_p leave", function()
    local logits = { 2, 1.5, 1, 0, -1, -3 }
    local model = Chain { logits, logits, logits, logits, logits, logits }
    local N = 4000
    local function counts(options)
      options.num_return_sequences, options.seed = N, 5
      local got = {}
      for i = 1, 6 do got[i] = 0 end
      for _, row in ipairs(generate(model, { 0 }, 1, options)) do got[row[2] + 1] = got[row[2] + 1] + 1 end
      return got
    end
    -- Checks that `left` of the likeliest tokens remain, counted by hand from the softmax.
    local function holds(options, left, temperature)
      local weights, sum = {}, 0
      for i = 1, 6 do
        weights[i] = i <= left and math.exp(logits[i] / (temperature or 1)) or 0
        sum = sum + weights[i]
      end
      for i, count in ipairs(counts(options)) do
        local p = weights[i] / sum
        assert(math.abs(count - N * p) <= 5 * math.sqrt(N * p * (1 - p)) + (p > 0 and 1 or 0),
          ("token %d: %d of %d, not %.0f"):format(i - 1, count, N, N * p))
      end
    end
    holds({ temperature = 1 }, 6)
    holds({ temperature = 0.5 }, 6, 0.5)
    holds({ top_k = 3 }, 3)
    holds({ top_p = 0.7 }, 2)                       -- 0.456, 0.732
    holds({ min_p = 0.2 }, 3)                       -- e^-1 = 0.37, e^-2 = 0.14
    holds({ min_p = 0.2, temperature = 2 }, 5, 2)   -- e^-1.5 = 0.22, e^-2.5 = 0.08
    holds({ min_p = 0.5, top_p = 0.9 }, 2)          -- e^-0.5 = 0.61
    assert.same(generate(model, { 0 }, 9, { seed = 8 }), generate(model, { 0 }, 9, { seed = 8 }))
  end)
end)

describe("beams", function()
  -- Returns the best sequences of n tokens after `first`, found by trying all sequences.
  local function best(model_rows, first, n, count)
    local all = { { score = 0, first } }
    for _ = 1, n do
      local longer = {}
      for _, one in ipairs(all) do
        for b, logp in ipairs(log_softmax(model_rows[one[#one] + 1])) do
          local more = { unpack(one) }
          more[#more + 1], more.score = b - 1, one.score + logp
          longer[#longer + 1] = more
        end
      end
      all = longer
    end
    table.sort(all, function(a, b) return a.score > b.score end)
    local list = {}
    for i = 1, count do list[i] = all[i].score end
    return list
  end
  local function score_of(rows, ids, from)
    local score = 0
    for i = from, #ids - 1 do score = score + log_softmax(rows[ids[i] + 1])[ids[i + 1] + 1] end
    return score
  end

  it("in the number of all sequences find the best ones", function()
    for seed = 1, 5 do
      local rows = drawn(4, seed)
      local got = generate(Chain(rows), { 2 }, 3, { num_beams = 16, num_return_sequences = 5 })
      local seen = {}
      for i, score in ipairs(best(rows, 2, 3, 5)) do                     -- some have the same transitions
        assert(math.abs(score - score_of(rows, got[i], 1)) < 1e-5)
        local name = table.concat(got[i], " ")
        assert(not seen[name], name)
        seen[name] = true
      end
    end
  end)

  it("of one prompt do not depend on the others, nor do their bits on the number of prompts", function()
    local rows = drawn(7, 3)
    local model = Chain(rows)
    local options = { num_beams = 3, num_return_sequences = 2, eos_token_id = 5, length_penalty = 0.5 }
    local all = generate(model, { { 1, 2 }, { 3 }, { 0, 5, 6 } }, 6, options)
    local alone = {}
    for _, prompt in ipairs { { 1, 2 }, { 3 }, { 0, 5, 6 } } do
      for _, row in ipairs(generate(model, prompt, 6, options)) do alone[#alone + 1] = row end
    end
    assert.same(alone, all)
  end)
end)

describe("GPT-2's caches", function()
  local model
  setup(function()
    ps.manual_seed(11)
    model = gpt2.new({ vocab_size = 61, n_positions = 24, n_layer = 2, n_head = 2, n_embd = 16,
      initializer_range = 0.3 })
  end)

  -- Generates without caches: for each token, the model reads the whole row, or the columns within the window.
  local function plain(prompt, n, window)
    local row, base = { unpack(prompt) }, math.max(0, #prompt - window)
    model:eval()
    for _ = 1, n do
      if #row - base > window then base = #row - math.ceil(window / 2) end
      local seen = { unpack(row, base + 1) }
      local logits = ps.no_grad(model, ps.tensor({ seen }, { dtype = "int32" }))
      row[#row + 1] = logits:select(1, #seen - 1):argmax(-1):tolist()[1]
    end
    model:train()
    return row
  end

  it("equal those of whole sequences, for prompts of any lengths together, and past the last position", function()
    local prompts = { { 1, 2, 3, 4, 5 }, { 60 }, { 7, 7, 8 } }
    local together = model:generate(prompts, 50, { temperature = 0 })
    for i, prompt in ipairs(prompts) do
      assert.same(plain(prompt, 18, 24), model:generate(prompt, 18, { temperature = 0 }))
      assert.same(plain(prompt, 18, 24), { unpack(together[i], 1, #prompt + 18) })
    end
    assert.same(plain(prompts[1], 50, 24), together[1])
    local long = {}
    for i = 1, 40 do long[i] = i end
    assert.same(plain(long, 20, 24), model:generate(long, 20, { temperature = 0 }))
  end)

  it("can have another type, for batches, beams and restarts, and change the logits by little", function()
    ps.manual_seed(12)
    local wide = gpt2.new({ vocab_size = 61, n_positions = 24, n_layer = 2, n_head = 2, n_embd = 64,
      initializer_range = 0.2 })
    local function logits(kind)                            -- of the last of 6 tokens, which follow the same ids
      local last
      wide:generate({ 5, 6, 7 }, 6, { temperature = 0, kv_cache = kind, logits_processor = function(seen, scores)
        last = scores:clone():keep()
        return ps.zeros(scores:shape()) + ps.arange(61, { dtype = "fp32" }):eq(seen:size(1)):to("fp32")
      end })
      return last
    end
    local want, prompts = logits(), { { 1, 2, 3, 4, 5 }, { 60 }, { 7, 7, 8 } }
    for kind, limits in pairs { bf16 = { 1e-4, 0.05 }, q8_0 = { 1e-4, 0.1 } } do
      local far = (logits(kind) - want):abs():max():item() / want:std():item()
      assert(far > limits[1] and far < limits[2], ("%s: %g"):format(kind, far))
      local options = { temperature = 0, kv_cache = kind }
      local together = wide:generate(prompts, 15, options)
      for i, prompt in ipairs(prompts) do assert.same(wide:generate(prompt, 15, options), together[i]) end
      assert.equal(40, #wide:generate({ 1 }, 39, options))                    -- reading restarts
      options.num_beams = 3
      assert.equal(9, #wide:generate({ 1, 2, 3 }, 6, options))
    end
  end)

  it("of another type are refused where they do not fit", function()
    fails({ "kv_cache is 'q4'", "bf16, q8_0" }, function() model:generate({ 1 }, 2, { kv_cache = "q4" }) end)
    fails({ 'kv_cache = "q8_0" needs heads of a multiple of 32 columns', "have 8", '"bf16"' }, function()
      model:generate({ 1 }, 2, { kv_cache = "q8_0" })
    end)
    fails({ 'kv_cache = "bf16" has no effect on this model' }, function()
      local chain = Chain { { 0, 1 }, { 1, 0 } }
      function chain.new_caches() return { [0] = { k = ps.zeros { 1, 1, 3, 4 } } } end
      generate(chain, { 0 }, 2, { kv_cache = "bf16" })
    end)
  end)

  it("use an MLP in one call, with the bits of its ops", function()
    for _, dtype in ipairs { "fp32", "bf16" } do
      ps.manual_seed(5)
      local wide = gpt2.new({ vocab_size = 61, n_positions = 24, n_layer = 1, n_head = 2, n_embd = 160,
        initializer_range = 0.3 }, { dtype = dtype }):eval()
      local mlp = wide.transformer.h[0].mlp
      for _, rows in ipairs { 1, 3, 9 } do
        local h, x = ps.randn({ 1, rows, 160 }, { dtype = dtype }), ps.randn({ 1, rows, 160 }, { dtype = dtype })
        local function same()
          local apart = mlp(h, x):tolist()
          assert.same(apart, mlp(h, x, true):tolist())
          return apart
        end
        local before, ours = ps.no_grad(same), mlp.c_fc
        local Twice = nn.class("Twice", nn.Conv1D)
        function Twice:forward(...) return nn.Conv1D.forward(self, ...) * 2 end
        mlp.c_fc = Twice(160, 640, { dtype = dtype })
        mlp.c_fc.weight, mlp.c_fc.bias = ours.weight, ours.bias
        assert.is_not.same(before, ps.no_grad(same))                     -- a script's own layer runs in both
        mlp.c_fc = ours
      end
    end
  end)

  it("use parts that a run lists once", function()
    local calls, parts = 0, model.parts
    rawset(model, "parts", function(self)
      calls = calls + 1
      return parts(self)
    end)
    model:generate({ 1, 2, 3 }, 5, { temperature = 0 })
    assert.equal(1, calls)
    model:generate({ 1, 2, 3 }, 5, { num_beams = 2 })
    assert.equal(2, calls)
    rawset(model, "parts", nil)
  end)

  it("accept a tokenizer's result, without its padding", function()
    local batch = { input_ids = ps.tensor({ { 1, 2, 0 }, { 0, 0, 9 } }, { dtype = "int32" }),
      attention_mask = ps.tensor({ { 1, 1, 0 }, { 0, 0, 1 } }, { dtype = "int32" }) }
    assert.same(model:generate({ { 1, 2 }, { 9 } }, 4, { temperature = 0 }), model:generate(batch, 4,
      { temperature = 0 }))
    for ids, mask in pairs { [{ { 1, 2, 0 } }] = { { 1, 1 } }, [{ { 1, 2 }, { 3, 4 } }] = { { 1, 1 } } } do
      fails({ "input_ids has ", "attention_mask " }, function()
        model:generate({ input_ids = ids, attention_mask = mask }, 2)
      end)
    end
    assert.same(model:generate({ 1, 2 }, 3, { temperature = 0 }),
      model:generate({ input_ids = { 1, 2, 5 }, attention_mask = { 1, 1, 0 } }, 3, { temperature = 0 }))
  end)

  it("are the same with chunks that move, with beams and prompts of several lengths", function()
    local disk, host = tokens.folder {}, 1400 * 1024
    local wide = { vocab_size = 61, n_positions = 24, n_layer = 6, n_head = 2, n_embd = 48, initializer_range = 0.3 }
    ps.manual_seed(4)
    local made = gpt2.new(wide)
    ps.manual_seed(4)
    local engine = ps.initialize { model_func = function() return gpt2.new(wide) end, quiet = true,
      config = { chunk_size = 2048, optimizer = { type = "AdamW", params = { lr = 1e-3 } },
        memory = { host = host, disk = { path = disk, limit = 2 ^ 26 } } } }
    assert(engine:num_parameters() * 16 > 1.5 * host)
    for _, options in ipairs { { temperature = 0 }, { num_beams = 3, num_return_sequences = 2 }, { seed = 3 } } do
      local prompts = { { 1, 2, 3 }, { 5 } }
      assert.same(made:generate(prompts, 30, options), engine:generate(prompts, 30, options))
    end
    engine:close()
    local told = { "generate_spec.lua:", "this engine was closed; ps.initialize makes another" }
    fails(told, function() engine:generate({ 1, 2 }, 3) end)
    fails(told, function() engine(ps.tensor({ { 1, 2 } }, { dtype = "int32" })) end)
    fails(told, function() ps.inspect.inspect_model(engine) end)
    tokens.remove(disk)
  end)

  it("are the same on ranks that share the model", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local folder = ranks.folder()
    local out = ranks.run(folder, 2, ranks.begin(folder) .. [[
      local gpt2 = require "models.gpt2"
      local function make()
        ps.manual_seed(4)
        return gpt2.new("tiny", { initializer_range = 0.3 })
      end
      local lists = {}
      for stage = 0, 3, 3 do
        local model = ps.initialize { model_func = make, quiet = true, config = { plan_print = false,
          zero_optimization = { stage = stage }, optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
        for _, options in ipairs { { temperature = 0 }, { num_beams = 2 }, { seed = 3 } } do
          lists[#lists + 1] = require("cjson").encode(model:generate({ { 1, 2, 3 }, { 5 } }, 6, options))
        end
        model:close()
      end
      print("ids " .. table.concat(lists, " "))
    ]])
    ranks.remove(folder)
    ps.manual_seed(4)
    local alone, want = gpt2.new("tiny", { initializer_range = 0.3 }), {}
    for _, options in ipairs { { temperature = 0 }, { num_beams = 2 }, { seed = 3 } } do
      want[#want + 1] = json.encode(alone:generate({ { 1, 2, 3 }, { 5 } }, 6, options))
    end
    local line = table.concat(want, " ")
    for rank = 0, 1 do assert.equal(line .. " " .. line, out[rank].text:match("ids (%C*)"), out[rank].text) end
  end)
end)

-- Compares a step of attention with separate calls for each view and each op.
describe("attention with caches", function()
  local B, H, G, S, D, at = 2, 4, 2, 9, 8, 5
  local F, where

  -- views [B, T, n D] as [B, n, T, D]
  local function split(y, n) return y:reshape(B, y:size(1), n, D):permute(0, 2, 1, 3) end

  local function apart(q, k, v, caches, options, cos, sin)
    local T = q:size(2)
    if cos then q, k = F.rope(q, cos, sin), F.rope(k, cos, sin) end
    caches.k:narrow(2, at, T):copy_(k)
    caches.v:narrow(2, at, T):copy_(v)
    local y = F.attention(q, caches.k:narrow(2, 0, at + T), caches.v:narrow(2, 0, at + T), options)
    return y:permute(0, 2, 1, 3):reshape(B, T, H * D)
  end

  local function same(a, b) assert.same(a:tolist(), b:tolist()) end
  local function rand(...) return ps.randn({ ... }, where) end

  -- Calls fn(T, mask) for steps of one and of several positions, with and without hidden positions, on two devices, in
  -- two types.
  local function each(fn)
    F = ps.functional
    for _, device in ipairs { "cpu", "ref" } do
      for _, dtype in ipairs { "fp32", "bf16" } do
        where = { dtype = dtype, device = device }
        for _, T in ipairs { 1, 3 } do
          local shown = {}
          for b = 1, B do
            shown[b] = {}
            for i = 1, at + T do shown[b][i] = i > b end
          end
          ps.no_grad(fn, T, nil)
          ps.no_grad(fn, T, ps.tensor(shown, { dtype = "bool", device = device }))
        end
      end
    end
  end

  it("of adjacent queries, keys and values has the bits of the separate ops", function()
    ps.manual_seed(3)
    each(function(T, mask)
      local qkv, kv = rand(B, T, 3 * H * D), rand(B, 2 * H, S, D)
      local other = kv:clone()
      local q, k, v = qkv:narrow(2, 0, H * D), qkv:narrow(2, H * D, H * D), qkv:narrow(2, 2 * H * D, H * D)
      local halves = { k = other:narrow(1, 0, H), v = other:narrow(1, H, H) }
      local want = apart(split(q, H), split(k, H), split(v, H), halves, { causal = true, key_mask = mask, scale = 0.3 })
      same(want, heads.attend_cached({ heads = H, scale = 0.3 }, { kv = kv }, at, mask, qkv))
      same(other, kv)
      local turned = qkv:permute(1, 0, 2):contiguous():permute(1, 0, 2)
      same(want, heads.attend_cached({ heads = H, scale = 0.3 }, { kv = kv }, at, mask, turned))
    end)
  end)

  it("of separate queries, keys and values, rotated or not, has the bits of the separate ops", function()
    ps.manual_seed(4)
    each(function(T, mask)
      local angles = ps.randn({ 1, T, D / 2 }, { device = where.device })
      local q, k, v, caches = rand(B, T, H * D), rand(B, T, G * D), rand(B, T, G * D),
        { k = rand(B, G, S, D), v = rand(B, G, S, D) }
      for _, turned in ipairs { false, true } do
        local cos, sin = turned and angles:cos() or nil, turned and angles:sin() or nil
        local others = { k = caches.k:clone(), v = caches.v:clone() }
        local want = apart(split(q, H), split(k, G), split(v, G), others,
          { causal = true, key_mask = mask, window = 4 }, cos, sin)
        local attention = { heads = H, groups = G, window = 4 }
        same(want, heads.attend_cached(attention, caches, at, mask, q:reshape(B, T, H, D), k, v, cos, sin))
        same(others.k, caches.k)
        same(others.v, caches.v)
      end
    end)
  end)

  -- The 8 bits are those of x / d with d = the largest magnitude of 32 values / 127, and are read as multiples of d
  -- in fp16. The other error is that of fp16.
  it("of another type rounds only the keys and values, bf16 to nearest, q8_0 by blocks", function()
    ps.manual_seed(5)
    local wide = 64
    local function heads_of(y, n) return y:reshape(B, y:size(1), n, wide):permute(0, 2, 1, 3) end
    local rounded = { bf16 = function(x) return x:to("bf16"):to("fp32") end, q8_0 = function(x)
      local blocks = x:contiguous():reshape(-1, 32)
      local most = blocks:abs():max(1, true)
      local q = (blocks / (most / 127)):round()
      return (q * (most / 127):to("fp16"):to("fp32")):reshape(unpack(x:shape()))
    end }
    for _, device in ipairs { "cpu", "ref" } do
      for kind, round in pairs(rounded) do
        for _, T in ipairs { 1, 5 } do
          ps.no_grad(function()
            local function random(n) return ps.randn({ B, T, n * wide }, { device = device }) end
            local q, k, v, seen = random(H), random(G), random(G), {}
            local layers = ps.nn.ModuleList { ps.nn.LayerNorm(4, { device = device }) }
            local caches = heads.caches({ "k", "v" }, { B, G, S, wide }, layers, function(one) return one.weight end,
              kind)[0]
            assert.equal(kind == "bf16" and B * G * S * wide * 2 or B * G * S * wide / 32 * 34, caches.k:nbytes())
            for at_now = 0, S - T, T do
              local x = heads.attend_cached({ heads = H, groups = G }, caches, at_now, nil, q, k, v)
              seen[#seen + 1] = { heads_of(k, G), heads_of(v, G) }
              local keys, values = {}, {}
              for i, pair in ipairs(seen) do keys[i], values[i] = round(pair[1]), round(pair[2]) end
              local y = ps.functional.attention(heads_of(q, H), ps.cat(keys, 2), ps.cat(values, 2), { causal = true })
              local far = (y:permute(0, 2, 1, 3):reshape(B, T, H * wide) - x):abs():max():item()
              assert(far < 2e-6, ("%s on %s differs by %g"):format(kind, device, far))
              q, k, v = random(H), random(G), random(G)
            end
          end)
        end
      end
    end
  end)

  it("is refused with a gradient, without room, and with operands that do not fit", function()
    F, where = ps.functional, {}
    local qkv, kv, k = rand(B, 1, 3 * H * D), rand(B, 2 * H, S, D), rand(B, 1, H * D)
    local function says(words, ...)
      local args = { n = select("#", ...), ... }
      check.fails_as("EINVAL", words, function()
        ps.no_grad(heads.attend_cached, { heads = H }, unpack(args, 1, args.n))
      end)
    end
    says({ "a cache is [2, 8, 9, 8]; it must be [2, 8, 10 or more, 8]" }, { kv = kv }, 9, nil, qkv)
    says({ "a cache is [2, 8, 9, 8]" }, { kv = kv }, -1, nil, qkv)
    says({ "a cache is [2, 8, 9, 8]; it must be [2, 4, 6 or more, 8]" }, { k = kv, v = kv }, at, nil, k, k, k)
    says({ "expected 2 rows of 1 positions with 12 heads of size 8, not [2, 1, 32]" }, { kv = kv }, at, nil, k)
    says({ "the mask has 4 dimensions; it must be bool [2, 6]" }, { kv = kv }, at,
      ps.ones({ 1, 1, 1, 6 }, { dtype = "bool" }), qkv)
    says({ "the mask must be bool [2, 6]" }, { kv = kv }, at, ps.ones({ 2, 5 }, { dtype = "bool" }), qkv)
    says({ "q, k, v and two caches" }, { kv = kv }, at, nil, qkv, k, k)
    says({ "q, k, v and two caches" }, { k = kv }, at, nil, k, k, k)
    says({ "q, k, v and two caches" }, { kv = kv }, at, nil, qkv, nil, nil, ps.ones { 1, 1, 4 }, ps.ones { 1, 1, 4 })
    qkv:requires_grad(true)
    fails({ "has no gradient; call it inside ps.no_grad()" }, function()
      heads.attend_cached({ heads = H }, { kv = kv }, at, nil, qkv)
    end)
  end)
end)

describe("text", function()
  local folder, tok
  setup(function()
    folder = tokens.gpt2 { { "a", "b" } }
    tok = ps.tokenizer.from_pretrained(folder)
  end)
  teardown(function() tokens.remove(folder) end)

  it("is passed in pieces of whole characters", function()
    local ids = tok:encode("na\195\175ve \226\130\172!")
    local pieces, stream = {}, text.stream(tok)
    for _, id in ipairs(ids) do pieces[#pieces + 1] = stream:add(id) end
    assert.same({ "n", "a", "\195\175", "v", "e", " ", "\226\130\172", "!" }, pieces)
    assert.equal(nil, stream:finish())
    stream:add(tok:encode("\195\175")[1])
    assert.equal("\239\191\189", stream:finish())
  end)

  it("of a first token keeps the blank after the prompt", function()
    local blank = "\u{2581}"
    local llama = tokens.folder { ["tokenizer.json"] = { model = { type = "BPE", merges = {}, byte_fallback = true,
        vocab = { [blank .. "a"] = 0, [blank .. "b"] = 1, ["<0xC3>"] = 2, ["<0xA9>"] = 3 } },
      decoder = { type = "Sequence", decoders = { { type = "Replace", pattern = { String = blank }, content = " " },
        { type = "ByteFallback" }, { type = "Fuse" }, { type = "Strip", content = " ", start = 1, stop = 0 } } } } }
    local words, shown = ps.tokenizer.from_pretrained(llama), {}
    tokens.remove(llama)
    local model = Chain { { 0, 1, 0, 0 }, { 1, 0, 0, 0 }, { 0, 0, 0, 1 }, { 1, 0, 0, 0 } }
    local function stream(prompt)
      shown = {}
      return words:decode(generate(model, prompt, 3, { temperature = 0, tokenizer = words, on_text = function(piece)
        shown[#shown + 1] = piece
      end }))
    end
    assert.equal("a b a b", stream { 0 })
    assert.same({ " b", " a", " b" }, shown)
    stream { 0, 2 }                                        -- a prompt that ends within a character
    assert.same({ "\u{e9}", " a", " b" }, shown)
  end)

  it("ends with a stop string, which may begin in the prompt, and not with one that the prompt has", function()
    -- repeats the letters of "one two "
    local order = { o = "n", n = "e", e = " ", [" "] = "o" }
    local logits = {}
    for a = 0, 256 do
      logits[a + 1] = {}
      for b = 0, 256 do
        logits[a + 1][b + 1] = order[string.char(a % 256)] == string.char(b % 256) and b < 256 and 9 or 0
      end
    end
    local model = Chain(logits)
    local function go(prompt, stops, n, options)
      options = options or { temperature = 0 }
      options.stop_strings, options.tokenizer = stops, tok
      return tok:decode(generate(model, tok:encode(prompt), n or 20, options))
    end
    assert.equal("one on", go("o", "e on"))
    assert.equal("one o", go("one", { "zzz", "ne o" }))
    assert.equal("onone ", go("ono", "e ", 20))
    assert.equal("one one one", go("one one", "one"))
    assert.equal("one on", go("o", "e on", 20, { num_beams = 2 }))
    local shown = {}
    local ids = generate(model, tok:encode("o"), 20, { temperature = 0, stop_strings = " o", tokenizer = tok,
      on_text = function(piece, row) shown[#shown + 1] = row .. piece end })
    assert.equal("one o", tok:decode(ids))
    assert.same({ "1n", "1e", "1 ", "1o" }, shown)
    fails({ "stop_strings need the tokenizer" }, function() generate(model, { 1 }, 2, { stop_strings = "x" }) end)
  end)

  it("is reported token by token, with -1 for rows that have ended", function()
    local model = Chain { { 0, 1, 0 }, { 0, 0, 1 }, { 1, 0, 0 } }
    local seen = {}
    generate(model, { { 0 }, { 1 } }, 5, { temperature = 0, eos_token_id = 2, on_token = function(ids, i)
      seen[i] = { unpack(ids) }
    end })
    assert.same({ { 1, 2 }, { 2, -1 } }, seen)
    assert.same({ 0, 1, 2 }, generate(model, { 0 }, 9, { temperature = 0, on_token = function(id, i)
      assert.equal(i, id)
      return i < 2
    end }))
  end)
end)

describe("a folder's settings of generation", function()
  local folder
  setup(function()
    folder = tokens.folder {}
    ps.manual_seed(2)
    gpt2.new("tiny", { initializer_range = 0.3 }):save_pretrained(folder)
  end)
  teardown(function() tokens.remove(folder) end)

  local function with(fields)
    check.write(folder .. "/generation_config.json", json.encode(fields))
    return ps.from_pretrained(folder, { quiet = true })
  end

  it("are followed if a script sets nothing", function()
    local model = with { transformers_version = "5.0", max_new_tokens = 3, bos_token_id = 1 }
    local greedy = model:generate({ 1, 2 }, 6, { temperature = 0 })
    assert.same(greedy, model:generate({ 1, 2 }, 6))
    assert.equal(5, #model:generate { 1, 2 })
    assert.equal(4, #with({ max_length = 4 }):generate { 1, 2 })
    assert.same({ 1, 2, greedy[3] }, with({ eos_token_id = { greedy[3], 9 } }):generate({ 1, 2 }, 6))
    assert.same(greedy, with({ eos_token_id = greedy[3] }):generate({ 1, 2 }, 6, { eos_token_id = false }))
    assert.same(model:generate({ 1, 2 }, 6, { temperature = 0.5, top_k = 50, seed = 4 }),
      with({ do_sample = true, temperature = 0.5 }):generate({ 1, 2 }, 6, { seed = 4 }))
    assert.same(model:generate({ 1, 2 }, 6, { num_beams = 3 }), with({ num_beams = 3 }):generate({ 1, 2 }, 6))
    assert.same(model:generate({ 1, 2 }, 6, { repetition_penalty = 2, temperature = 0 }),
      with({ repetition_penalty = 2 }):generate({ 1, 2 }, 6))
  end)

  it("are searched in config.json if there is no generation_config.json", function()
    local greedy = with({ repetition_penalty = 2, eos_token_id = { 9 } }):generate({ 1, 2 }, 6)
    os.remove(folder .. "/generation_config.json")
    local fields = json.decode(check.read(folder .. "/config.json"))
    local function by(more)
      for key, value in pairs(more) do fields[key] = value end
      check.write(folder .. "/config.json", json.encode(fields))
      return ps.from_pretrained(folder, { quiet = true })
    end
    assert.same(greedy, by({ repetition_penalty = 2, do_sample = false, eos_token_id = { 9 } }):generate({ 1, 2 }, 6))
    fails({ "/config.json: refused: bad_words_ids = " }, function()
      by({ bad_words_ids = { { 5 } } }):generate({ 1 }, 2)
    end)
    by { bad_words_ids = json.null, repetition_penalty = json.null, do_sample = json.null, eos_token_id = json.null }
  end)

  it("are refused by name if they are not supported", function()
    for _, case in ipairs { { "typical_p", 0.9 }, { "bad_words_ids", { { 1 } } }, { "guidance_scale", 1.5 },
      { "suppress_tokens", { 3 } }, { "num_beam_groups", 2 }, { "renormalize_logits", true },
      { "cache_implementation", "quantized" } } do
      fails({ "refused: " .. case[1] .. " = " }, function()
        with({ [case[1]] = case[2] }):generate({ 1 }, 2)
      end)
    end
    with({ typical_p = 1, guidance_scale = json.null, bad_words_ids = json.null, cache_implementation = "static" })
      :generate({ 1 }, 2)
    for words, fields in pairs { ["temperature is a string"] = { temperature = "x" },
      ["stop_strings is a number; it must be a table"] = { stop_strings = 5 },
      ["early_stopping is a number; it must be a boolean"] = { early_stopping = 1 },
      ["top_p is 2; it must be above 0 and at most 1"] = { top_p = 2 } } do
      fails({ words }, function() with(fields):generate({ 1 }, 2) end)
    end
    fails({ "refused: num_beams = 2", "temperature = 0" }, function()
      with({}):generate({ 1 }, 2, { num_beams = 2, temperature = 1 })
    end)
    for words, options in pairs { ["eos_token_id is 256"] = { eos_token_id = 256 }, ["top_p is 0"] = { top_p = 0 },
      ["temperature is -1"] = { temperature = -1 }, ["num_beams is 0"] = { num_beams = 0 },
      ["num_return_sequences is 3, but there are 2 beams"] = { num_beams = 2, num_return_sequences = 3 },
      ["length_penalty is nan"] = { num_beams = 2, length_penalty = 0 / 0 },
      ["on_token and on_text"] = { num_beams = 2, on_token = print }, ["min_p is 2"] = { min_p = 2 },
      ["but do_sample is false"] = { do_sample = false, temperature = 1 } } do
      fails({ words }, function() with({}):generate({ 1 }, 2, options) end)
    end
  end)

  it("also apply to the programs", function()
    local vocab = tokens.gpt2({}, { ["generation_config.json"] = { eos_token_id = 5 } })
    ps.manual_seed(2)
    local model = gpt2.new({ vocab_size = 257, n_positions = 32, n_layer = 1, n_head = 2, n_embd = 16,
      initializer_range = 0.3 })
    model:save_pretrained(vocab)
    local function run(line)
      return check.shell(("'%s' '%s'/%s"):format(paths.exe, paths.root, line))
    end
    local want = ps.from_pretrained(vocab):generate({ 1, 2, 3 }, 8, { do_sample = false })
    local out = run(("bench/generate.lua %s --ids '1 2 3' --max-new 8"):format(vocab))
    assert.equal(table.concat(want, " "), out:match("^[^\n]*"))
    assert.truthy(out:find("tokens/s", 1, true), out)
    want = ps.from_pretrained(vocab):generate({ { 1, 2, 3 }, { 9 } }, 8, { num_beams = 3 })
    local object = json.decode((run(("bench/generate.lua %s --ids '1 2 3' --ids 9 --max-new 8 --num-beams 3 --json")
      :format(vocab))))
    assert.same(want, object.ids)
    assert.truthy(object.tokens_per_s > 0)
    local _, code = run(("bench/generate.lua %s --ids 'x' --max-new 8"):format(vocab))
    assert.equal(1, code)

    check.write(vocab .. "/start.txt", "ab")
    local given
    out, code = run(("tools/generate.lua %s --start FILE:%s/start.txt --num-samples 2 --max-new 5 --seed 7")
      :format(vocab, vocab))
    assert.equal(0, code, out)
    local tok = ps.tokenizer.from_pretrained(vocab)
    given = ps.from_pretrained(vocab):generate({ tok:encode("ab"), tok:encode("ab") }, 5, { temperature = 1, seed = 7 })
    for _, row in ipairs(given) do assert.truthy(out:find(tok:decode(row), 1, true), out) end

    out, code = run(("tools/generate.lua %s --start ab --repetition-penalty 0"):format(vocab))
    assert.same({ "generate: repetition_penalty is 0; it must be above 0\n", 1 }, { out, code })
    local plain = run(("tools/generate.lua %s --start ab --max-new 4"):format(vocab))
    -- A special token has no text unless it is requested, both for one sample that is printed as it is generated and
    -- for several samples.
    local config = json.decode(check.read(vocab .. "/tokenizer_config.json") or "{}")
    local last = tok:encode("ab")[2]
    config.added_tokens_decoder = { [tostring(last)] = { content = tok:decode { last }, special = true } }
    check.write(vocab .. "/tokenizer_config.json", json.encode(config))
    local special, pieces = ps.tokenizer.from_pretrained(vocab), {}
    assert.equal("a", special:decode(tok:encode("ab"), { skip_special_tokens = true }))
    ps.from_pretrained(vocab):generate({ tok:encode("ab") }, 2, { eos_token_id = false, tokenizer = special,
      skip_special_tokens = true, on_text = function(piece) pieces[#pieces + 1] = piece end,
      logits_processor = function(ids, logits)               -- the special token, then an "a"
        local next_one = ids:size(1) == 2 and last or tok:encode("a")[1]
        local row = {}
        for i = 1, logits:size(1) do row[i] = i - 1 == next_one and 1e9 or 0 end
        return logits + ps.tensor { row }
      end })
    assert.same({ "a" }, pieces)
    check.write(vocab .. "/generation_config.json", '{"num_beams": 3}')      -- beams are used only if requested
    assert.same({ plain, 0 }, { run(("tools/generate.lua %s --start ab --max-new 4"):format(vocab)) })
    out, code = run(("tools/generate.lua %s/config.json --start ab"):format(vocab))
    assert.same({ ("generate: from_pretrained: %s/config.json is a file; pass its folder, which needs a "
      .. "config.json, or a file NAME.gguf\n"):format(vocab), 1 }, { out, code })
    tokens.remove(vocab)
  end)
end)
