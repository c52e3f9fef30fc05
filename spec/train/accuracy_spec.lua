-- SPDX-License-Identifier: BSD-3-Clause
-- The accuracy next to the loss: the share of targets whose logit is the first largest of its row. Loss ops count the
-- hits, which are summed over micro-batches, ranks and stages. The specs compare them with argmax of the logits.
local ps = require "ps"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"
local loss_weight = require "ps.core.loss_weight"

local F, ops = ps.F, ps.ops
local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- Returns whole numbers in [-2, 2] as floats of a type, drawn from a seed.
local function whole(seed, shape, dtype)
  ps.manual_seed(seed)
  return ps.randint(-2, 3, shape, { dtype = "int64" }):to(dtype or "fp32")
end

-- Returns targets [N] below `classes`, of which every seventh is `ignore`.
local function targets(seed, N, classes, ignore)
  ps.manual_seed(seed)
  local list = ps.randint(0, classes, { N }, { dtype = "int64" }):tolist()
  for i = 7, N, 7 do list[i] = ignore end
  return ps.tensor(list, "int64")
end

-- Returns {hits, targets} of logits, computed in Lua row by row.
local function expected(logits, target, ignore)
  local hits, count = 0, 0
  for r, row in ipairs(logits:to("fp64"):tolist()) do
    local t, best = target:tolist()[r], 1
    for j = 2, #row do if row[j] > row[best] then best = j end end
    if t ~= ignore then
      count = count + 1
      if best - 1 == t then hits = hits + 1 end
    end
  end
  return { hits, count }
end

describe("the hits that loss ops count", function()
  it("are those of argmax, with ties, in every type and length of a row", function()
    for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64" } do
      for i, V in ipairs { 1, 2, 7, 31, 32, 33, 130, 2047, 2049, 4100 } do
        local N = V > 1000 and 9 or 40
        local logits, target = whole(i, { N, V }, dtype), targets(i, N, math.min(V, 8), -1)
        local _, hits = ops.cross_entropy(logits, target, -1, i % 3, 1)
        assert.same(expected(logits, target, -1), hits:tolist(), dtype .. " " .. V)
      end
      local x, w, bias = whole(1, { 70, 3 }, dtype), whole(2, { 9, 3 }, dtype), whole(3, { 9 }, dtype)
      local target = targets(4, 70, 9, 2)
      for want = 0, 7, 7 do
        local _, hits = ops.lm_loss(x, w, target, bias, 2, 1, want, 1, 1)
        assert.same(expected(F.linear(x, w, bias), target, 2), hits:tolist(), dtype)
      end
    end
  end)

  it("are also those of argmax in panels, and in rows longer than a kernel keeps", function()
    local x, w, target = whole(1, { 1100, 3 }), whole(2, { 20, 3 }), targets(3, 1100, 20, -100)
    local _, hits = ops.lm_loss(x, w, target, nil, -100, 1, 7, 1, 1)
    assert.same(expected(F.linear(x, w), target, -100), hits:tolist())
    local logits = whole(4, { 3, 70000 })
    target = logits:argmax(-1)
    assert.same({ 3, 3 }, select(2, ops.cross_entropy(logits, target, -100, 1, 1)):tolist())
    assert.same({ 0, 3 }, select(2, ops.cross_entropy(logits, target + 69999 - target, -100, 1, 1)):tolist())
  end)

  it("do not change the loss and the gradients", function()
    for _, dtype in ipairs { "fp32", "bf16" } do
      local x, w = whole(1, { 70, 8 }, dtype) * 0.37, whole(2, { 50, 8 }, dtype) * 0.29
      local target = targets(3, 70, 50, -100)
      local function run(want)
        local a, b = x:detach():requires_grad(true), w:detach():requires_grad(true)
        local loss = ops.lm_loss(a, b, target, nil, -100, 1, 0, 0, want)
        local other = ops.cross_entropy(F.linear(a, b), target, -100, 1, want)
        loss = loss + other
        loss:backward()
        return { loss:item(), a:grad():tolist(), b:grad():tolist() }
      end
      assert.same(run(0), run(1))
    end
  end)

  it("are none in a row whose log-sum-exp is NaN, and -inf is an ordinary logit", function()
    local inf, nan = math.huge, 0 / 0
    local rows = { { 1, 3, 3 }, { nan, 3, 1 }, { -inf, -inf, -inf }, { -inf, 2, -inf }, { inf, 1, 1 }, { 3, nan, 1 } }
    for device, at in pairs { ref = "ref", cpu = "cpu" } do
      local logits = ps.tensor(rows, { device = at })
      for t, want in pairs { [0] = 0, [1] = 2, [2] = 0 } do
        local target = ps.full({ 6 }, t, { dtype = "int64", device = at })
        assert.same({ want, 6 }, select(2, ops.cross_entropy(logits, target, -100, 1, 1)):tolist(), device)
      end
    end
    assert.same({ 0, 0 }, select(2, ops.cross_entropy(ps.zeros { 0, 3 }, ps.zeros({ 0 }, { dtype = "int64" }), -100, 1,
      1)):tolist())
    assert.is_nil(select(2, ops.cross_entropy(ps.zeros { 2, 3 }, ps.zeros({ 2 }, { dtype = "int64" }))))
  end)
end)

describe("the score of a loss", function()
  local logits, target = whole(5, { 40, 6 }), targets(6, 40, 6, -100)
  local want = expected(logits, target, -100)
  local off
  before_each(function() off = loss_weight.watch(true) end)
  after_each(function()
    off()
    loss_weight.forget()
  end)

  it("is that of the ops that made it: losses, factors, sums, weights of classes and smoothed labels", function()
    local x = logits:detach():requires_grad(true)
    local weight = ps.tensor { 1, 2, 3, 4, 5, 6 }
    for name, loss in pairs {
      cross_entropy = function() return F.cross_entropy(x, target) end,
      sum = function() return F.cross_entropy(x, target, { reduction = "sum" }) * 0.5 end,
      lm_loss = function() return F.lm_loss(x, ps.eye(6), target) end,
      nll_loss = function() return F.nll_loss(F.log_softmax(x), target) end,
      weighed = function() return F.cross_entropy(x, target, { weight = weight }) end,
      smoothed = function() return F.lm_loss(x, ps.eye(6), target, { label_smoothing = 0.1, weight = weight }) end,
      recomputed = function() return ps.recompute(function(t) return F.cross_entropy(t, target) end, x) end,
      held_out = function() return ps.no_grad(F.cross_entropy, x, target) end,
    } do
      loss_weight.forget()
      assert.same(want, { loss_weight.score(loss()) }, name)
    end
    local two = F.cross_entropy(x, target) + F.cross_entropy(x, target) / 2
    assert.same({ 2 * want[1], 2 * want[2] }, { loss_weight.score(two) })
    local as_one = loss_weight.as(function() return F.cross_entropy(x, target) + F.cross_entropy(x, target) end, 40)
    assert.same({ 2 * want[1], 2 * want[2] }, { loss_weight.score(as_one) })
  end)

  it("counts no target of a class of weight 0, unless labels are smoothed", function()
    local weight = ps.tensor { 1, 0, 1, 1, 1, 1 }
    local without = ps.tensor(target:tolist(), "int64")
    without = ps.where(without:eq(1), -100, without)
    assert.same(expected(logits, without, -100), { loss_weight.score(F.cross_entropy(logits, target,
      { weight = weight })) })
    loss_weight.forget()
    local smoothed = F.cross_entropy(logits, target, { weight = weight, label_smoothing = 0.1 })
    assert.same(want, { loss_weight.score(smoothed) })
  end)

  it("is unknown for losses of other ops, without reduction, and if it is not requested", function()
    assert.is_nil(loss_weight.score((logits ^ 2):mean()))
    assert.is_nil(loss_weight.score(F.cross_entropy(logits, target, { reduction = "none" }):mean()))
    off()
    local still = loss_weight.watch()
    assert.is_nil(loss_weight.score(F.cross_entropy(logits, target)))
    still()
  end)
end)

describe("hits of logits that are cut among ranks", function()
  for size = 2, 3 do
    it(("are those of the whole logits, ranks: %d"):format(size), function()
      if lib.no_gloo() then return pending(lib.no_gloo()) end
      lib.check(folder, size, [[
        local loss_weight, F = require "ps.core.loss_weight", ps.F
        local function whole(seed, shape, dtype)
          ps.manual_seed(seed)
          return ps.randint(-2, 3, shape, { dtype = "int64" }):to(dtype)
        end
        local off = loss_weight.watch(true)
        for _, dtype in ipairs { "fp32", "bf16", "fp64" } do
          for _, words in ipairs { 2, 7, 12, 13 } do
            local N, per = 60, math.ceil(words / size)
            local x, w = whole(1, { N, 2 }, dtype), whole(2, { words, 2 }, dtype)
            local t = whole(3, { N }, "int64"):abs():clamp(0, words - 1)
            t[{ { 0, 3 } }] = words - 1
            local logits = F.linear(x, w)
            local list = {}
            for i = 1, N do list[i] = i % 7 end
            local counts = ps.tensor(list, "int64"):ne(0)
            local first = logits:argmax(-1)
            local want = { first:eq(t):logical_and(counts):sum():item(), counts:sum():item() }
            local wide = dtype == "fp64" and "fp64" or "fp32"
            local mine = ps.zeros({ per, 2 }, { dtype = dtype })
            local n = math.max(0, math.min(per, words - rank * per))
            if n > 0 then mine:narrow(0, 0, n):copy_(w:narrow(0, rank * per, n)) end
            local share = ps.cat({ counts:to(wide):reshape(1, N), counts:to(wide):reshape(1, N), ps.zeros({ 1, N },
              { dtype = wide }) }, 0)
            local loss, hits = group:lm_loss(x, mine, t, share, { words = words, hits = true })
            local plain, none = group:lm_loss(x, mine, t, share, { words = words })
            assert(loss:item() == plain:item() and none == nil)
            local got = hits:tolist()
            local function same(hit, of)
              assert(hit == want[1] and of == want[2], ("%s, %d words: %d of %d, not %d of %d"):format(dtype, words,
                hit, of, want[1], want[2]))
            end
            same(got[1], got[2])
            local cross = nn.ParallelCrossEntropy { group = group, words = words }
            same(loss_weight.score(cross(F.linear(x, mine), ps.where(counts, t, -100))))
          end
        end
        off()
      ]])
    end)
  end
end)

-- A training run and an evaluation with 8 rows in micro-batches, whose targets are ignored unevenly. The learning rate
-- is 0, so the accuracy is that of the initial weights. The script computes it with argmax and a separate model.
local RUN = [[
  local gpt2 = require "models.gpt2"
  local OPTIONS = { n_layer = 2, n_embd = 16, n_head = 2, vocab_size = 12, n_positions = 8, embd_pdrop = 0,
    attn_pdrop = 0, resid_pdrop = 0 }
  local function make()
    ps.manual_seed(4)
    return gpt2.new(OPTIONS)
  end
  ps.manual_seed(2)
  local x, y = ps.randint(0, 12, { 8, 8 }, { dtype = "int64" }), ps.randint(0, 12, { 8, 8 }, { dtype = "int64" })
  local ignored = {}
  for i = 0, 63 do ignored[i + 1] = i % (2 + math.floor(i / 8)) == 0 and 1 or 0 end
  y = ps.where(ps.tensor(ignored, "int64"):reshape(8, 8):eq(1), -100, y)
  local model = make():eval()
  local first = ps.no_grad(model, { input_ids = x }).logits:argmax(-1)
  local hits, count = first:eq(y):sum():item(), y:ne(-100):sum():item()
  assert(hits > 2 and hits < count and count < 60)
  local want, dp = hits / count, DP
  -- Returns this rank's rows in n parts, repeatedly.
  local function parts(n)
    local at, rows, from = 0, 8 / dp / n, dp > 1 and rank * 8 / dp or 0
    return function()
      at = at + 1
      local r = from + (at - 1) % n * rows
      return x:narrow(0, r, rows):contiguous(), y:narrow(0, r, rows):contiguous()
    end
  end
  local function near(got, what)
    assert(got == want, ("%s: %s, not %.17g"):format(what, tostring(got), want))
  end
  local function column(path)
    local f = assert(io.open(path))
    local text = f:read "*a"
    f:close()
    return text
  end
  local engine, optimizer = ENGINE
  local draw = parts(2)
  local result = ps.train.run { model = engine, optimizer = optimizer, steps = 2, quiet = true,
    loader = { next = function() return draw() end, global_batch = 4, seq = 8 }, log = folder .. "/log.csv",
    accumulate = 2, eval = { every = 2, data = function()
      local part, left = parts(2), 2
      return function()
        left = left - 1
        if left >= 0 then return part() end
      end
    end } }
  near(result.accuracy, "accuracy")
  near(result.history[1].accuracy, "accuracy of step 1")
  near(result.val_accuracy, "held-out accuracy")
  assert(result.history[1].val_accuracy == nil)
  near(result.history[2].val_accuracy, "held-out accuracy of step 2")
  if rank == 0 then
    local csv, json = column(folder .. "/log.csv"), column(folder .. "/log.jsonl")
    assert(csv:find(("^step,loss,lr,grad_norm,tokens_per_s,val_loss,accuracy,val_accuracy\n1,[^\n]*,,%.6f,\n2,[^\n]*"
      .. "%%d,%.6f,%.6f\n$"):format(want, want, want)), csv)
    assert(json:find(('"accuracy":%.9g,'):format(want), 1, true)
      and json:find(('"val_accuracy":%.9g,'):format(want), 1, true), json)
    if EVENTS then
      local events = column(folder .. "/csv/run/Train_Samples_train_accuracy.csv")
      local n = 0
      for value in events:gmatch "\n%d+,(%S+)" do
        n = n + 1
        assert(math.abs(tonumber(value) - want) < 1e-6, events)
      end
      assert(n == 2, events)
    end
  end
  print(("wants %.4f"):format(want))
  if EVENTS then engine:close() end
]]

-- Returns the arguments of ps.initialize for a layout.
local function engine_of(config)
  return ([[ps.initialize { model_func = make, config = { plan_print = false, steps_per_print = 1,
    train_micro_batch_size_per_gpu = 8 / DP / 2, gradient_accumulation_steps = 2,
    csv_monitor = { enabled = true, output_path = folder .. "/csv", job_name = "run" },
    optimizer = { type = "SGD", params = { lr = 0 } }, %s } }]]):format(config)
end

local LAYOUTS = {
  { name = "a module", size = 1, made = "make(), nil" },
  { name = "plain memory", size = 1, made = engine_of 'memory = "plain"' },
  { name = "chunks", size = 1, made = engine_of "" },
  { name = "ZeRO 3 on 2 ranks", size = 2, dp = 2, made = engine_of "zero_optimization = { stage = 3 }" },
  { name = "2 stages", size = 2, made = engine_of "pipeline = { stages = 2 }" },
  { name = "tensor parallelism on 2 ranks", size = 2, made = engine_of "tensor_parallel = { size = 2 }" },
  { name = "2 stages of 2 ranks", size = 4,
    made = engine_of "pipeline = { stages = 2 }, tensor_parallel = { size = 2 }" },
}

describe("train.run and evaluate count the accuracy of", function()
  for _, layout in ipairs(LAYOUTS) do
    it(layout.name, function()
      if layout.size > 1 and lib.no_gloo() then return pending(lib.no_gloo()) end
      os.execute(("rm -rf '%s/csv' '%s/log.csv' '%s/log.jsonl'"):format(folder, folder, folder))
      local of_engine = layout.made ~= LAYOUTS[1].made
      local script = RUN:gsub("ENGINE", function() return of_engine and layout.made or
        "make() optimizer = ps.optim.SGD(engine, { lr = 0 })" end):gsub("EVENTS", tostring(of_engine))
        :gsub("DP", tostring(layout.dp or 1))
      if not of_engine then script = script:gsub("local engine, optimizer = ", "local engine, optimizer; engine = ") end
      local said = lib.check(folder, layout.size, script)
      local want = said[0].text:match "wants (%S+)"
      if not of_engine then return end
      for step = 1, 2 do
        assert.matches(("step %d: loss %%S+, accuracy %s, lr"):format(step, want:gsub("%.", "%%.")), said[0].text)
      end
    end)
  end
end)

describe("a log of an older version", function()
  it("continues with lines that have the new columns", function()
    check.write(folder .. "/text", ("a line of text to learn\n"):rep(50))
    local gpt2 = require "models.gpt2"
    local model = gpt2.new "tiny"
    local function run(start, steps)
      return ps.train.run { model = model, optimizer = ps.optim.SGD(model, { lr = 1e-3 }), steps = steps, start = start,
        quiet = true, log = folder .. "/old.csv",
        loader = ps.data.loader { file = folder .. "/text", batch = 2, seq = 8, vocab = 256, seed = 1 } }
    end
    check.write(folder .. "/old.csv", "step,loss,lr,grad_norm,tokens_per_s,val_loss\n1,5.500000,0.1,,12,\n"
      .. "2,5.250000,0.1,1.5,12,5.125000\n3,5,0.1,1.5,12,\n")
    local history = run(2, 3).history
    assert.equal(5.25, history[2].loss)
    assert.equal(5.125, history[2].val_loss)
    assert.is_nil(history[2].accuracy)
    assert.truthy(history[3].accuracy)
    local text = check.read(folder .. "/old.csv")
    assert.matches("^step,[^\n]*,val_accuracy\n1,5%.500000,0%.1,,12,,,\n2,5%.250000,0%.1,1%.5,12,5%.125000,,\n3,[^\n]*,"
      .. ",0%.%d+,\n$", text)
  end)
end)
