-- SPDX-License-Identifier: BSD-3-Clause
-- Layers over packed weights: models of GGUF files whose weights stay packed, ps.quantize, and adapters that train over
-- them. The numbers are compared with those of the same weights unpacked. spec/oracle/rows_packed.py has the ops.
local ps = require "ps"
local check = require "spec.check_lib"
local gguf = require "ps.io.gguf"
local packed = require "ps.nn.packed"

local folder = os.tmpname()
os.remove(folder)
assert(require("lfs").mkdir(folder))
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)
local function at(name) return folder .. "/" .. name end
local function fails(text, fn) check.fails(fn, text) end

local LLAMA = { vocab_size = 96, hidden_size = 256, intermediate_size = 512, num_hidden_layers = 2,
  num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 64, initializer_range = 0.06 }

local function made(family, config)
  ps.manual_seed(3)
  return require("models." .. family).new(config):eval()
end

-- Returns a file of a type with a random model, and the file's model without and with packed weights.
local function both(kind, family, config, options)
  made(family or "llama", config or LLAMA):save_gguf(at "m.gguf", { type = kind, name = "x" })
  local given = { quiet = true, keep_quantized = true }
  for key, value in pairs(options or {}) do given[key] = value end
  local kept = ps.from_pretrained(at "m.gguf", given)
  given.keep_quantized = nil
  return ps.from_pretrained(at "m.gguf", given), kept
end

local ids = ps.randint(0, 90, { 2, 11 }, { dtype = "int32" }):keep()
local function logits(model, rows)
  return ps.no_grad(function() return model({ input_ids = rows or ids }).logits:keep() end)
end
local function far(a, b) return (a:to "fp64" - b:to "fp64"):abs():max():item() end

describe("a model with packed weights", function()
  it("has the numbers of the unpacked model, for every type of file", function()
    for _, kind in ipairs { "q8_0", "q4_0", "q4_k_m", "q6_k" } do
      local plain, kept = both(kind)
      local want = logits(plain)
      assert.truthy(far(want, logits(kept)) < 2e-5, kind)
      local one = ids:narrow(0, 0, 1):narrow(1, 0, 3):contiguous()        -- few rows use the blocks directly
      assert.truthy(far(logits(plain, one), logits(kept, one)) < 2e-5, kind)
      local layer = kept.model.layers[1].self_attn.q_proj
      assert.equal("uint8", layer.weight:dtype())
      assert.truthy(packed.of(layer))
      assert.equal(0, far(plain.model.layers[1].self_attn.q_proj.weight, require("ps.nn.parts").weight(layer)))
    end
  end)

  it("is so for GPT-2, whose layers are transposed, and with a head of its own", function()
    local plain, kept = both("q8_0", "gpt2", { vocab_size = 96, n_positions = 64, n_embd = 64, n_layer = 2,
      n_head = 4 })
    assert.truthy(far(logits(plain), logits(kept)) < 2e-5)
    assert.same({ 192, 68 }, kept.transformer.h[0].attn.c_attn.weight:shape())
    local config = {}
    for key, value in pairs(LLAMA) do config[key] = value end
    config.tie_word_embeddings = true
    plain, kept = both("q4_k_m", "llama", config)
    assert.truthy(packed.of(kept.model.embed_tokens))
    assert.truthy(far(logits(plain), logits(kept)) < 2e-5)
    local labels = { input_ids = ids, labels = ids }
    assert.truthy(math.abs(plain(labels).loss:item() - kept(labels).loss:item()) < 1e-5)
  end)

  it("keeps its bytes in the file with mmap = true, and has the file's size in memory without", function()
    local _, kept = both("q8_0", nil, nil, { mmap = true })
    local plain = ps.from_pretrained(at "m.gguf", { quiet = true })
    assert.truthy(far(logits(plain), logits(kept)) < 2e-5)
    local nbytes, in_file = 0, 0
    for _, b in kept:named_buffers() do if b:dtype() == "uint8" then nbytes = nbytes + b:nbytes() end end
    gguf.with(at "m.gguf", function(file)
      for _, name in ipairs(file:names()) do
        if file:type(name) == "Q8_0" then in_file = in_file + file:nbytes(name) end
      end
    end)
    assert.equal(in_file, nbytes)
  end)

  it("continues texts with the ids of the unpacked model, in batches and by beams, also in bf16", function()
    for _, dtype in ipairs { "fp32", "bf16" } do
      local plain, kept = both("q4_k_m", nil, nil, { dtype = dtype })
      for _, options in ipairs { { do_sample = false }, { do_sample = false, num_beams = 3 } } do
        local prompts = { { 5, 6, 7 }, { 8, 9, 10, 11, 12, 13 } }
        local want, got = plain:generate(prompts, 12, options), kept:generate(prompts, 12, options)
        if dtype == "fp32" then assert.same(want, got) end
        assert.equal(#want[1], #got[1])
      end
    end
  end)

  it("gives a row the same bits in every batch of few rows", function()
    local _, kept = both("q4_k_m")
    local layer = kept.model.layers[0].mlp.down_proj
    local x = ps.randn { 4, 512 }
    local all = layer(x)
    for m = 0, 3 do assert.equal(0, far(all:narrow(0, m, 1), layer(x:narrow(0, m, 1)))) end
  end)

  -- One row of x divides the matrix into one piece per thread. The rows are no multiple of what a thread reads at once.
  it("gives the same bits with every number of threads", function()
    local was = ps.threads()
    for _, kind in ipairs { "none", "q4_0", "q8_0", "q6_k" } do
      for _, int8 in ipairs { false, kind ~= "none" or nil } do
        local holder = ps.nn.Sequential(ps.nn.Linear(512, 1003, { dtype = "bf16" }))
        if kind ~= "none" then ps.quantize(holder, { type = kind, int8_activations = int8 or nil }) end
        local x, want = ps.randn({ 1, 512 }):to "bf16", nil
        for _, threads in ipairs { 1, 2, 3, 7 } do
          ps.set_threads(threads)
          local got = ps.no_grad(function() return holder(x):keep() end)
          want = want or got
          assert.equal(0, far(want, got), ("%s, %d threads"):format(kind, threads))
        end
        ps.set_threads(was)
      end
    end
  end)

  it("rounds activations to 8 bits if asked, only in few rows without gradients", function()
    made("llama", LLAMA):save_gguf(at "m.gguf", { type = "q8_0", name = "x" })
    local given = { quiet = true, keep_quantized = true }
    local exact = ps.from_pretrained(at "m.gguf", given)
    given.int8_activations = true
    local fast = ps.from_pretrained(at "m.gguf", given)
    local one = ids:narrow(0, 0, 1):narrow(1, 0, 3):contiguous()
    local want, got = logits(exact, one), logits(fast, one)
    local off = far(want, got)
    assert.truthy(off > 0 and off < 0.03 * want:abs():max():item(), off)
    assert.equal(0, far(logits(exact), logits(fast)))                      -- 22 rows
    assert.equal(0, far(exact({ input_ids = one }).logits, fast({ input_ids = one }).logits))  -- with gradients
    local layer = fast.model.layers[0].mlp.up_proj
    local x = ps.randn { 4, 256 }
    ps.no_grad(function()
      local all = layer(x)
      for i = 0, 3 do assert.equal(0, far(all:narrow(0, i, 1), layer(x:narrow(0, i, 1):contiguous()))) end
    end)
    fails("keep_quantized", function() ps.from_pretrained(at "m.gguf", { int8_activations = true }) end)
    fails("no effect", function() ps.quantize(made("llama", LLAMA), { int8_activations = true }) end)
    local model = ps.quantize(made("llama", LLAMA), { type = "q4_k", int8_activations = true })
    assert.truthy(far(logits(model, one), logits(ps.quantize(made("llama", LLAMA), { type = "q4_k" }), one)) > 0)
  end)

  it("cannot be written or merged, which says what to do", function()
    local _, kept = both("q8_0")
    fails("keep_quantized", function() kept:save_pretrained(at "x") end)
    fails("keep_quantized", function() kept:save_gguf(at "x.gguf") end)
    ps.lora.wrap(kept, { r = 2 })
    fails("tools/gguf.lua convert", function() kept:merge_adapter() end)
    fails("tools/gguf.lua convert", function() kept:save_gguf(at "x.gguf", { merged = true }) end)
    fails("use_dora", function() ps.lora.wrap(kept, { r = 2, use_dora = true, name = "other" }) end)
    made("llama", LLAMA):save_pretrained(at "folder")
    fails("GGUF", function() ps.from_pretrained(at "folder", { keep_quantized = true }) end)
    made("llama", LLAMA):save_gguf(at "f.gguf", { type = "f32" })
    fails("remove the option", function() ps.from_pretrained(at "f.gguf", { keep_quantized = true }) end)
  end)
end)

describe("an adapter over packed weights", function()
  it("is merged into no weight if one of them is packed", function()
    local model = ps.quantize(made("llama", LLAMA), { type = "q8_0", skip = { "q_proj" } })
    local weight = model.model.layers[0].self_attn.q_proj.weight
    local before = weight:detach():clone():keep()
    ps.lora.wrap(model, { r = 2, init = false })
    fails("packed", function() model:merge_adapter() end)
    fails("packed", function() model:unload_adapter { merge = true } end)
    assert.equal(0, (before - weight):abs():amax():item())
  end)

  local function train(model, steps)
    ps.manual_seed(5)
    ps.lora.wrap(model, { r = 4, alpha = 8, dropout = 0 })
    local optimizer, losses = ps.optim.AdamW(model, { lr = 5e-3 }), {}
    for i = 1, steps do
      optimizer:zero_grad()
      local loss = model({ input_ids = ids, labels = ids }).loss
      losses[i] = loss:item()
      loss:backward()
      optimizer:step()
    end
    return losses
  end

  it("trains as over the unpacked weights, and leaves them alone", function()
    for _, kind in ipairs { "q8_0", "q4_k_m" } do
      local plain, kept = both(kind)
      local before = kept.model.layers[0].mlp.up_proj.weight:clone():keep()
      local want, got = train(plain, 12), train(kept, 12)
      for i = 1, 12 do assert.truthy(math.abs(want[i] - got[i]) < 2e-4 * want[i], kind .. " " .. i) end
      assert.truthy(got[12] < 0.95 * got[1])
      assert.truthy(kept.model.layers[0].mlp.up_proj.weight:equal(before))
    end
  end)

  it("is written, read and removed as over other weights", function()
    local plain, kept = both "q8_0"
    local base = logits(kept)
    train(kept, 4)
    kept:save_pretrained(at "adapter")
    kept:save_gguf(at "adapter.gguf", { adapter = true })
    local want = logits(kept)
    assert.truthy(far(want, base) > 1e-4)
    assert.truthy(far(want, logits(ps.lora.load(plain, at "adapter"))) < 5e-5)
    local again = ps.from_pretrained(at "m.gguf", { quiet = true, keep_quantized = true })
    assert.equal(0, far(want, logits(ps.lora.load(again, at "adapter.gguf"))))
    again:unload_adapter()
    assert.equal(0, far(base, logits(again)))
  end)

  it("trains in an engine", function()
    both "q4_0"
    local function losses(keep)
      ps.manual_seed(7)
      local model, optimizer = ps.initialize { model_func = function()
        return ps.lora.wrap(ps.from_pretrained(at "m.gguf", { quiet = true, keep_quantized = keep }), { r = 4 })
      end, config = { train_batch_size = 2, optimizer = { type = "adamw", params = { lr = 5e-3 } } } }
      local list = {}
      for i = 1, 6 do
        local loss = model({ input_ids = ids, labels = ids }).loss
        list[i] = loss:item()
        model:backward(loss)
        optimizer:step()
      end
      model:close()
      return list
    end
    local want, got = losses(false), losses(true)
    for i = 1, 6 do assert.truthy(math.abs(want[i] - got[i]) < 2e-4 * want[i], i) end
    assert.truthy(got[6] < got[1])
  end)
end)

describe("ps.quantize", function()
  it("packs linear layers as the types of GGUF files and as NF4", function()
    for _, kind in ipairs { "nf4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q6_k" } do
      local plain = made("llama", LLAMA)
      local model, list = ps.quantize(made("llama", LLAMA), { type = kind })
      assert.equal(14, #list)
      local layer, old = model.model.layers[1].mlp.down_proj, plain.model.layers[1].mlp.down_proj.weight
      local off = far(old, require("ps.nn.parts").weight(layer)) / old:abs():max():item()
      assert.truthy(off > 0 and off < (kind == "q8_0" and 0.005 or 0.2), kind .. " " .. off)
      assert.equal("fp32", model.model.embed_tokens.weight:dtype())
      assert.truthy(far(logits(plain), logits(model)) < 1.5)
      ps.lora.wrap(model, { r = 2 })
      model({ input_ids = ids, labels = ids }).loss:backward()
      assert.truthy(model.model.layers[0].self_attn.q_proj.lora_B.default.weight:grad():abs():max():item() > 0)
    end
  end)

  it("frees each weight before it packs the next", function()
    ps.collect()
    local before, list = ps.memory("cpu").used, {}
    for i = 1, 6 do list[i] = ps.nn.Linear(2048, 512, { bias = false }) end          -- 4 MiB each
    local model = ps.quantize(ps.nn.Sequential(unpack(list)))
    local packed_bytes = 6 * 2048 * 512 * 0.5625
    assert.is_true(ps.memory("cpu").used - before < packed_bytes + 2 ^ 20, ps.memory("cpu").used - before)
    assert.equal("uint8", model[0].weight:dtype())
  end)

  it("rounds to the nearest number of NF4", function()
    local layer = ps.nn.Linear(64, 2, { bias = false })
    local values = {}
    for i = 1, 128 do values[i] = ((i * 37) % 128 - 64) / 50 end
    ps.no_grad(function() layer.weight:copy_(ps.tensor(values):reshape(2, 64)) end)
    local model = ps.nn.Sequential(layer)
    local want = layer.weight:clone():keep()
    ps.quantize(model, { type = "nf4" })
    local got = require("ps.nn.parts").weight(layer)
    -- The 16 numbers of NF4, from the formula in the paper's file (spec/oracle/rows_packed.py computes them).
    local numbers = { -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
      -0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
      0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1 }
    local w, g = want:tolist(), got:tolist()
    for r = 1, 2 do
      local most = want:narrow(0, r - 1, 1):abs():max():item()
      for c = 1, 64 do
        local best = math.huge
        for _, n in ipairs(numbers) do best = math.min(best, math.abs(n * most - w[r][c])) end
        assert.truthy(math.abs(math.abs(g[r][c] - w[r][c]) - best) < 1e-6)
      end
    end
  end)

  it("leaves layers out, and refuses what it cannot pack", function()
    local model, list = ps.quantize(made("llama", LLAMA),
      { type = "q8_0", skip = { "down_proj", "layers.0.mlp.up_proj" } })
    assert.equal(11, #list)
    assert.equal("fp32", model.model.layers[1].mlp.down_proj.weight:dtype())
    fails("type", function() ps.quantize(made("llama", LLAMA), { type = "q9" }) end)
    fails("no linear layer", function() ps.quantize(ps.nn.Sequential(ps.nn.Linear(7, 8)), { type = "nf4" }) end)
    local wrapped = ps.lora.wrap(made("llama", LLAMA), { r = 2, targets = { "q_proj" } })
    fails("adapter", function() ps.quantize(wrapped, { type = "q8_0" }) end)
    local engine = ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" } },
      model = made("llama", LLAMA) }
    fails("model_func", function() ps.quantize(engine, { type = "q8_0" }) end)
    fails("model_func", function() ps.quantize(engine.module, { type = "q8_0" }) end)
    engine:close()
    local bad = ps.nn.Linear(64, 2)
    ps.no_grad(function() bad.weight:fill_(1 / 0) end)
    fails("finite", function() ps.quantize(ps.nn.Sequential(bad), { type = "q8_0" }) end)
  end)
end)
