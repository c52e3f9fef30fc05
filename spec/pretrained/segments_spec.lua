-- SPDX-License-Identifier: BSD-3-Clause
-- Rows of several sequences (segment_ids; positions that restart): the same results as each sequence in a separate
-- batch. On ref the same bits; on cpu losses to 2e-6 and gradients to 1e-5 of the tensor's largest. With windows,
-- grouped heads, dropout, recompute, chunks, stages and divided layers. oracle/packed_oracle.py compares them with
-- transformers'.
local ps = require "ps"
local heads = require "ps.pretrained.heads"
local random = require "ps.core.random"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"

-- Two rows of length 70. Row 1 ends with padding, and row 2 has padding between sequences and a sequence of one token.
local LENGTHS = { { 3, 21, 40, -6 }, { 33, -4, 1, 30, 2 } }
local T = 70

local function segments_of(lengths)
  local rows = {}
  for r, list in ipairs(lengths) do
    local row = {}
    for id, n in ipairs(list) do for _ = 1, math.abs(n) do row[#row + 1] = n > 0 and id or 0 end end
    rows[r] = row
  end
  return ps.tensor(rows, { dtype = "int32" })
end

-- Calls fn(row, first, n) for each sequence.
local function each_sequence(lengths, fn)
  for r, list in ipairs(lengths) do
    local at = 0
    for _, n in ipairs(list) do
      if n > 0 then fn(r - 1, at, n) end
      at = at + math.abs(n)
    end
  end
end

local function tiny(family, device, options)
  ps.manual_seed(4)
  options = options or {}
  for name, value in pairs { initializer_range = 0.2, max_position_embeddings = family:find "bert" and 80 or nil,
    n_positions = family == "gpt2" and 40 or nil, sliding_window = family == "mistral" and 7 or nil } do
    options[name] = options[name] or value
  end
  if family:find "bert" then options.task = "masked_lm" end
  local model = require("models." .. family).new("tiny", options):eval()
  return device == "ref" and model:to("ref") or model
end

local function tokens(device)
  ps.manual_seed(7)
  return ps.randint(3, 256, { 2, T }, { dtype = "int32" }):to(device)
end

local function largest(t) return t:numel() == 0 and 0 or t:abs():max():item() end

local function losses_of(model, batch)
  local logits = model(batch).logits
  local targets = heads.shifted { labels = batch.input_ids, segment_ids = batch.segment_ids }
  local B, n = targets:size(0), targets:size(1)
  return ps.F.cross_entropy(logits:reshape(B * n, -1), targets:reshape(B * n), { reduction = "none" }):reshape(B, n)
end

local function take_grads(model)
  local grads = {}
  for name, p in model:named_parameters() do
    grads[name] = p:grad() and p:grad():to("cpu"):clone():keep()
    if p:grad() then p:grad():zero_() end
  end
  return grads
end

describe("rows of several sequences", function()
  for _, family in ipairs { "llama", "mistral", "qwen2", "qwen3", "gpt2", "bert", "roberta" } do
    it("equal each sequence in a batch of its own: " .. family, function()
      for _, device in ipairs { "ref", "cpu" } do
        local model, ids, segments = tiny(family, device), tokens(device), segments_of(LENGTHS):to(device)
        local packed = losses_of(model, { input_ids = ids, segment_ids = segments })
        packed:sum():backward()
        local got, wanted = take_grads(model), ps.zeros { 2, T }
        each_sequence(LENGTHS, function(row, first, n)
          local own = ids:narrow(0, row, 1):narrow(1, first, n):contiguous()
          local losses = losses_of(model, { input_ids = own })
          losses:sum():backward()
          wanted:narrow(0, row, 1):narrow(1, first, n):copy_(losses:detach():to "cpu")
        end)
        packed = packed:detach():to "cpu"
        if device == "ref" then assert.equal(check.bytes(wanted), check.bytes(packed))
        else
          local off = largest(packed - wanted)
          assert(off <= 2e-6 * math.max(1, largest(wanted)), ("losses are off by %g"):format(off))
        end
        for name, want in pairs(take_grads(model)) do
          local off, most = largest(got[name]:double() - want:double()), largest(want)
          -- Mathematically 0, since the keys' bias shifts all scores of a query equally.
          local bound = name:find "key%.bias$" and 1e-5 or 1e-5 * most
          assert(off <= bound, ("%s on %s: %g of %g"):format(name, device, off, most))
        end
      end
    end)
  end

  for _, family in ipairs { "llama", "mistral", "gpt2", "bert" } do
    it("have the same masks of dropout as each sequence in a batch of its own: " .. family, function()
      for _, device in ipairs { "ref", "cpu" } do
        local model, ids, segments = tiny(family, device, { dropout = 0.3 }), tokens(device), segments_of(LENGTHS)
        ps.lora.wrap(model, { dropout = 0.4, init = false, modules_to_save = {} })
        for _, p in ipairs(model:parameters()) do p:requires_grad(true) end
        model:train()
        segments = segments:to(device)
        local rng = random.state()
        local function losses_as(sample, batch)
          rng.seed, rng.step, rng.op, rng.sample = 3, 5, 0, sample
          return losses_of(model, batch)
        end
        local packed = losses_as(1000, { input_ids = ids, segment_ids = segments })
        packed:sum():backward()
        local got, wanted = take_grads(model), ps.zeros { 2, T }
        each_sequence(LENGTHS, function(row, first, n)
          local own = ids:narrow(0, row, 1):narrow(1, first, n):contiguous()
          local losses = losses_as((1000 + row + first * 0x9E3779B1) % 2 ^ 32, { input_ids = own })
          losses:sum():backward()
          wanted:narrow(0, row, 1):narrow(1, first, n):copy_(losses:detach():to "cpu")
        end)
        packed = packed:detach():to "cpu"
        if device == "ref" then assert.equal(check.bytes(wanted), check.bytes(packed))
        else
          local off = largest(packed - wanted)
          assert(off <= 2e-6 * math.max(1, largest(wanted)), ("losses are off by %g"):format(off))
        end
        for name, want in pairs(take_grads(model)) do
          local off, most = largest(got[name]:double() - want:double()), largest(want)
          local bound = name:find "key%.bias$" and 1e-5 or 1e-5 * most
          assert(off <= bound, ("%s on %s: %g of %g"):format(name, device, off, most))
        end
        local other = losses_as(1001, { input_ids = ids, segment_ids = segments }):detach():to "cpu"
        assert(largest(other - packed) > 0.01)
      end
      random.state().sample = 0
    end)
  end

  it("have the same loss as their sequences, weighted by their targets, and predict nothing across borders", function()
    local model, ids, segments = tiny "llama", tokens "cpu", segments_of(LENGTHS)
    local labels = ids:clone()
    labels[{ 0, 5 }] = -100
    local batch, sum, count = { input_ids = ids, segment_ids = segments, labels = labels }, 0, 0
    each_sequence(LENGTHS, function(row, first, n)
      local function own(t) return t:narrow(0, row, 1):narrow(1, first, n):contiguous() end
      local one = { input_ids = own(ids), labels = own(labels) }
      local targets = model:count_targets(one)
      sum, count = sum + (targets > 0 and model(one).loss:item() * targets or 0), count + targets
    end)
    assert.equal(count, model:count_targets(batch))
    assert.near(sum / count, model(batch).loss:item(), 2e-6)
  end)

  it("have positions that restart in each", function()
    local places = heads.places_of(ps.tensor({ { 1, 1, 1, 2, 2, 0, 0, 0 }, { 0, 3, 3, 0, 4, 4, 4, 4 } }, "int32"))
    assert.same({ { 0, 1, 2, 0, 1, 0, 0, 0 }, { 0, 0, 1, 0, 0, 1, 2, 3 } }, places:tolist())
    for _, family in ipairs { "llama", "gpt2" } do
      local model, ids, segments = tiny(family), tokens "cpu", segments_of(LENGTHS)
      local first = model { input_ids = ids, segment_ids = segments }.logits
      local again = model { input_ids = ids, segment_ids = segments, position_ids = heads.places_of(segments) }.logits
      assert.equal(check.bytes(first), check.bytes(again))
    end
  end)

  it("may have any number, also int64, and runs of one number are one sequence", function()
    local model, ids = tiny "llama", tokens "cpu"
    local first = model { input_ids = ids, segment_ids = segments_of(LENGTHS) }.logits
    local other = segments_of(LENGTHS):to "int64" * -1000000007
    assert.equal(check.bytes(first), check.bytes(model { input_ids = ids, segment_ids = other }.logits))
  end)

  it("can be recomputed, and skip padding, with the same bits", function()
    for _, family in ipairs { "llama", "gpt2", "bert" } do
      local ids, segments = tokens "cpu", segments_of(LENGTHS)
      local function run(options)
        local model = tiny(family, "cpu", options)
        if not family:find "bert" then model:train() end
        ps.manual_seed(11)
        local loss = model { input_ids = ids, segment_ids = segments, labels = ids }.loss
        loss:backward()
        return loss:item(), take_grads(model)
      end
      local loss, grads = run { recompute = false }
      local again, same = run { recompute = true }
      assert.equal(loss, again)
      for name, g in pairs(grads) do assert.equal(check.bytes(g), check.bytes(same[name]), name) end
    end
    local ids, segments = tokens "cpu", segments_of(LENGTHS)
    local labels = ps.where(segments:ne(0), ids, ps.full_like(ids, -100))
    local plain = tiny("bert") { input_ids = ids, segment_ids = segments, labels = labels }.loss:item()
    local without = tiny("bert", "cpu", { unpad = true }) { input_ids = ids, segment_ids = segments,
      labels = labels }.loss:item()
    assert.near(plain, without, 1e-6)
  end)

  it("have dropout of the weights by segment, and like rows of one sequence if there is one", function()
    ps.manual_seed(3)
    local q = ps.randn { 2, 2, T, 8 }
    local function run(device, mask, causal)
      local x = q:to(device)
      return ps.ops.attention(x, x, x, mask:to(device), 0.3, causal, 0.4, 5, 6, 7, 8):to "cpu"
    end
    local one = ps.full({ 2, T }, 5, { dtype = "int32" })
    for causal = 0, 1 do
      local plain = run("cpu", ps.ones({ 2, T }, { dtype = "bool" }), causal)
      assert.equal(check.bytes(plain), check.bytes(run("cpu", one, causal)))
      assert(largest(run("cpu", segments_of(LENGTHS), causal) - run("ref", segments_of(LENGTHS), causal)) < 1e-5)
    end
  end)

  it("are assumed by a model without a cache and a mask if position_ids restart, as in transformers", function()
    for _, family in ipairs { "llama", "qwen3", "gpt2" } do
      local model, ids, segments = tiny(family), tokens "cpu", segments_of { { 40, 30 }, { 33, 37 } }
      local places = heads.places_of(segments)
      local want = model { input_ids = ids, segment_ids = segments }.logits
      local mixed = model { input_ids = ids, position_ids = places }.logits
      assert(largest(mixed - want) > 1e-3)
      model.config.use_cache = false
      assert.equal(check.bytes(want), check.bytes(model { input_ids = ids, position_ids = places }.logits))
      assert.equal(check.bytes(mixed), check.bytes(model { input_ids = ids, position_ids = places,
        attention_mask = ps.ones({ 2, T }, { dtype = "int32" }) }.logits))
      -- One row of positions applies to all rows.
      local first = places:narrow(0, 0, 1)
      local twice = model { input_ids = ids, position_ids = first:expand(2, T):contiguous() }.logits
      assert.equal(check.bytes(twice), check.bytes(model { input_ids = ids, position_ids = first }.logits))
    end
  end)

  it("are refused together with a mask, in other shapes or types, and for one label per row", function()
    local model, ids, segments = tiny "llama", tokens "cpu", segments_of(LENGTHS)
    check.fails(function()
      model { input_ids = ids, segment_ids = segments, attention_mask = ids }
    end, "llama: a batch has both segment_ids and attention_mask; leave attention_mask out")
    check.fails(function() model { input_ids = ids, segment_ids = segments:narrow(1, 0, 5) } end,
      "llama: segment_ids is [2, 5], but input_ids is [2, 70]")
    check.fails(function() model { input_ids = ids, segment_ids = segments:float() } end,
      "segment_ids is fp32; it must be int32 or int64")
    for _, family in ipairs { "llama", "gpt2", "bert", "roberta" } do
      local classifier = require("models." .. family).new("tiny", { task = "sequence_classification" })
      check.fails(function() classifier { input_ids = ids, segment_ids = segments } end, "segment_ids")
    end
    check.fails(function()
      ps.F.attention(ps.zeros { 1, 1, 3, 4 }, ps.zeros { 1, 1, 5, 4 }, ps.zeros { 1, 1, 5, 4 },
        { key_mask = ps.ones({ 1, 5 }, { dtype = "int32" }) })
    end, "segments need as many queries as keys, not 3 and 5")
  end)
end)

describe("rows of several sequences on several ranks", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("train like one process, with stages, divided layers, recompute and chunks", function()
    local folder = lib.folder()
    local script = [[
      local kind = %q
      local lengths = { { 9, 7 }, { 5, 5, 4, -2 }, { 16 }, { 3, -1, 8, 4 } }
      local rows = {}
      for r, list in ipairs(lengths) do
        rows[r] = {}
        for id, n in ipairs(list) do for _ = 1, math.abs(n) do table.insert(rows[r], n > 0 and id or 0) end end
      end
      local config = { train_micro_batch_size_per_gpu = 2, gradient_accumulation_steps = 2, plan_print = false,
        optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
      if kind == "pp" then config.pipeline = { stages = 2 } end
      if kind == "tp" then config.tensor_parallel = { size = 2 } end
      if kind == "chunks" then config.memory = { host = "64MiB" } end
      for _, family in ipairs { "llama", "gpt2", "bert" } do
        local model, optimizer = ps.initialize { quiet = true, config = config, model_func = function()
          ps.manual_seed(4)
          return require("models." .. family).new("tiny", { recompute = kind == "pp",
            task = family == "bert" and "masked_lm" or nil, dropout = 0.2 }):train()
        end }
        ps.manual_seed(6)
        local said = {}
        for _ = 1, 3 do
          local ids = ps.randint(3, 256, { 4, 16 }, { dtype = "int32" })
          local batch = { input_ids = ids, segment_ids = ps.tensor(rows, { dtype = "int32" }), labels = ids }
          local sum = 0
          for out in model:micro_batches(batch) do
            model:backward(out.loss)
            sum = sum + out.loss:item()
          end
          optimizer:step()
          said[#said + 1] = ("%%.9f"):format(sum)
        end
        print("losses", family, table.concat(said, " "))
        model:close()
      end
    ]]
    local function losses(size, kind)
      local all, list = lib.check(folder, size, script:format(kind)), {}
      for family, text in all[0].text:gmatch "losses\t(%S+)\t([^\n]*)" do
        for x in text:gmatch "%S+" do list[#list + 1] = { family, tonumber(x) } end
      end
      assert.equal(9, #list)
      return list
    end
    local want = losses(1, "one")
    for _, kind in ipairs { "chunks", "pp", "tp" } do
      for i, x in ipairs(losses(kind == "chunks" and 1 or 2, kind)) do
        assert(math.abs(x[2] - want[i][2]) <= 2e-5, ("%s, %s: %.9f, not %.9f"):format(kind, x[1], x[2], want[i][2]))
      end
    end
    lib.remove(folder)
  end)
end)
