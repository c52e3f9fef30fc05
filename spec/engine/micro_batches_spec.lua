-- SPDX-License-Identifier: BSD-3-Clause
-- Loops over micro-batches: their bits are those of a loop written by hand, their gradient is that of the whole batch
-- (compared with values computed by hand), their dropout that of the whole batch; and errors in loops.
local ps = require "ps"
local inner = require("ps.nn.handle").of
local gpt2 = require "models.gpt2"
local lib = require "spec.check_lib"
local ranks = require "spec.ranks_lib"
local fails = lib.fails
local nn, F = ps.nn, ps.functional

local model

after_each(function()
  if model then model:close() end
  model = nil
end)

local function open(make, config, more)
  local wanted = { plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
  for key, value in pairs(config or {}) do wanted[key] = value end
  local request = { quiet = true, config = wanted, model_func = function() return make() end }
  for key, value in pairs(more or {}) do request[key] = value end
  local optimizer
  ps.manual_seed(5)
  model, optimizer = ps.initialize(request)
  return optimizer
end

local function tiny() return gpt2.new "tiny" end
local function dropping() return gpt2.new("tiny", { dropout = 0.2 }) end

-- Returns everything that training changes, as text of all bytes.
local function state(optimizer)
  local parts = {}
  for name, t in pairs(model:state_dict()) do parts[#parts + 1] = name .. " " .. lib.bytes(t:to("cpu")) end
  local saved = optimizer:state_dict(model)
  for name, t in pairs(saved.tensors) do parts[#parts + 1] = name .. " " .. lib.bytes(t:to("cpu")) end
  table.sort(parts)
  return table.concat(parts, "\n")
end

-- Returns x and y, int32 [rows, 16]. Row r has masked[r] ignored targets.
local function batch(number, rows, masked)
  ps.manual_seed(100 + number)
  local x = ps.randint(0, 256, { rows, 16 }, { dtype = "int32" })
  local y = ps.randint(0, 256, { rows, 16 }, { dtype = "int32" })
  for r, n in pairs(masked or {}) do if n > 0 then y:narrow(0, r - 1, 1):narrow(1, 0, n):fill_(-100) end end
  return x, y
end

-- Returns the first row and the number of rows of each of `count` micro-batches, as in torch.tensor_split.
local function parts_of(rows, count)
  local list, first = {}, 0
  for i = 1, count do
    local n = math.floor(rows / count) + (i <= rows % count and 1 or 0)
    list[i], first = { first, n }, first + n
  end
  return list
end

-- Logits w [4] for every row. With w = 0, every class has probability 1/4, so the gradient of the mean loss over
-- targets t_1 ... t_n is 1/4 - (fraction of the targets that are class j).
local Logits = nn.class "Logits"
function Logits:init() self:param("w", ps.zeros { 4 }) end
function Logits:forward(x, y)
  return F.cross_entropy(self.w:reshape(1, 4):expand(x:numel(), 4), y:reshape(-1))
end

local function classes(list) return ps.tensor(list, { dtype = "int64" }) end

describe("a loop over micro-batches", function()
  local cases = {
    ["fp32"] = { { gradient_accumulation_steps = 3 } },
    ["fp32, clipped, in plain memory"] = { { gradient_accumulation_steps = 3, gradient_clipping = 0.1,
      memory = "plain" } },
    ["bf16"] = { { gradient_accumulation_steps = 2, bf16 = { enabled = true } } },
    ["fp16, clipped"] = { { gradient_accumulation_steps = 3, fp16 = { enabled = true, initial_scale_power = 8 },
      gradient_clipping = 0.1 } },
    ["bf16, over a small tier"] = { { gradient_accumulation_steps = 3, bf16 = { enabled = true }, device = "sim",
      chunk_size = 4096, memory = { device = "1MiB" } } },
    ["recomputed"] = { { gradient_accumulation_steps = 4, recompute = true } },
    ["one micro-batch"] = { { gradient_accumulation_steps = 1, bf16 = { enabled = true } } },
  }
  for name, case in pairs(cases) do
    it("has the bits of the loop written by hand: " .. name, function()
      local count = case[1].gradient_accumulation_steps
      local function run(by_hand)
        local optimizer = open(tiny, case[1])
        for step = 1, 2 do
          local x, y = batch(step, 7, { [2] = 5, [6] = 16 })
          if by_hand then
            for _, part in ipairs(parts_of(7, count)) do
              model:backward(model(x:narrow(0, part[1], part[2]), y:narrow(0, part[1], part[2])))
            end
          else
            for out in model:micro_batches(x, y) do model:backward(out.loss) end
          end
          assert.is_false(optimizer:step().skipped)
          optimizer:zero_grad()
        end
        local all = state(optimizer)
        model:close()
        return all
      end
      assert(run(true) == run(false))
    end)
  end

  it("drawn from a loader has the bits of the loop written by hand, dropout and all", function()
    local path = os.tmpname()
    local f = assert(io.open(path, "wb"))
    for i = 1, 4096 do f:write(string.char(i * i % 251)) end
    f:close()
    local function run(by_hand)
      local optimizer = open(dropping, { gradient_accumulation_steps = 3 })
      local loader = ps.data.loader { file = path, width = 1, batch = 2, seq = 16, seed = 4 }
      for _ = 1, 3 do
        if by_hand then
          for _ = 1, 3 do model:backward(model(loader:next())) end
        else
          for out in model:micro_batches(loader, { gather = true }) do out.loss:backward() end
        end
        optimizer:step()
      end
      local all = state(optimizer)
      model:close()
      return all
    end
    local same = run(true) == run(false)
    os.remove(path)
    assert(same)
  end)

  for _, memory in ipairs { "chunk", "plain" } do
    it("has the gradient of the whole batch's mean loss, worked out by hand: memory " .. memory, function()
      for _, count in ipairs { 1, 2, 3, 4, 5, 9 } do
        open(Logits, { memory = memory, gradient_accumulation_steps = count, overlap_optimizer = false })
        -- 7 targets count in 5 rows of 3: class 0 (4 times), 1 (twice) and 3 (once)
        local y = classes { { 0, -100, -100 }, { 0, 0, 1 }, { -100, -100, -100 }, { 3, 0, -100 }, { 1, -100, -100 } }
        local weights, sum, turns = { 1, 3, 0, 2, 1 }, 0, 0
        for out in model:micro_batches(ps.zeros({ 5, 3 }, { dtype = "int64" }), y) do
          turns = turns + 1
          local part = parts_of(5, math.min(count, 5))[turns]
          local n = 0
          for r = part[1] + 1, part[1] + part[2] do n = n + weights[r] end
          assert(math.abs(out.loss:item() - (n > 0 and math.log(4) or 0)) < 1e-6)
          sum = sum + n
          if turns % 2 == 0 then model:backward(out.loss) else out.loss:backward() end
        end
        assert.same({ math.min(count, 5), 7 }, { turns, sum })
        local factor = count == 1 and 1 or 7              -- the update divides by the sum of the weights
        local grad, want = model.module.w:grad():tolist(), { 1 / 4 - 4 / 7, 1 / 4 - 2 / 7, 1 / 4, 1 / 4 - 1 / 7 }
        for j = 1, 4 do assert(math.abs(grad[j] / factor - want[j]) < 1e-6, count) end
        model:close()
      end
    end)
  end

  it("iterates over rows if the configuration has no count, and over fewer if a batch is short", function()
    local function turns(config, rows)
      local optimizer = open(tiny, config)
      local n = 0
      for out in model:micro_batches(batch(1, rows)) do
        n = n + 1
        model:backward(out.loss)
      end
      assert.is_false(optimizer:step().skipped)
      model:close()
      return n
    end
    assert.equal(5, turns({}, 5))
    assert.equal(3, turns({ train_micro_batch_size_per_gpu = 2 }, 5))
    assert.equal(4, turns({ gradient_accumulation_steps = 4 }, 6))
    assert.equal(3, turns({ gradient_accumulation_steps = 4 }, 3))
    assert.equal(2, turns({ train_batch_size = 6, train_micro_batch_size_per_gpu = 3 }, 5))
    assert.equal(1, turns({ gradient_accumulation_steps = 1, bf16 = { enabled = true } }, 5))
    fails(function() turns({ bf16 = { enabled = true } }, 5) end, "micro_batches_spec.lua", "5 micro-batches in bf16",
      "gradient_accumulation_steps")
    model:close()
    fails(function() turns({ train_batch_size = 6, train_micro_batch_size_per_gpu = 3 }, 7) end, "7 rows", "3 x 2")
    model:close()
    fails(function() turns({ gradient_accumulation_steps = 2 }, 0) end, "without rows")
  end)

  it("cuts a batch by names along the inputs that the model's table names", function()
    local x = batch(1, 4)
    local function run(given, count)
      local optimizer, sum = open(tiny, { gradient_accumulation_steps = count }), 0
      for out in model:micro_batches(given) do
        sum = sum + out.loss:item()
        out.loss:backward()
      end
      optimizer:step()
      local w = model:state_dict()["transformer.wpe.weight"]:clone()
      model:close()
      return sum / count, w
    end
    local places = ps.arange(0, 16, 1, { dtype = "int64" })
    local given = { input_ids = x, labels = x, attention_mask = ps.ones({ 4, 16 }, { dtype = "int32" }) }
    local loss, w = run(given, 1)
    for _, position_ids in ipairs { places, places:reshape(1, 16), places:reshape(1, 16):expand(4, 16) } do
      given.position_ids = position_ids
      local cut_loss, cut_w = run(given, 2)
      assert(math.abs(loss - cut_loss) < 1e-6)
      assert((w - cut_w):abs():max():item() < 1e-4)              -- Adam with eps 1e-8 amplifies rounding errors
    end
    open(tiny, { gradient_accumulation_steps = 2 })
    fails(function() model:micro_batches { input_ids = x, labels = x:narrow(0, 0, 3) } end, "labels",
      "input_ids has 4 rows", "split_inputs")
    fails(function() model:micro_batches(x, x:narrow(0, 0, 3)) end, "argument 2 has shape [3, 16]", "split_inputs")
    fails(function() model:micro_batches { position_ids = places } end, "cannot be split")
    fails(function() model:micro_batches(4) end, "a batch (x, y, or a table with names) or a loader")
    fails(function() model:micro_batches(x, x, { gathr = true }) end, "did you mean 'gather'?")
  end)

  it("weights a loss that was made from out.loss like its micro-batch", function()
    for _, memory in ipairs { "chunk", "plain" } do
      open(Logits, { memory = memory, gradient_accumulation_steps = 2 })
      local x, y = ps.zeros({ 2, 3 }, { dtype = "int64" }), classes { { 0, -100, -100 }, { 1, 1, 1 } }
      for out in model:micro_batches(x, y) do
        ps.no_grad(model, x, classes { { 0, 0, 0 }, { 0, 0, 0 } })    -- another batch in between has no weight
        local loss = out.loss * 3 + 1
        if memory == "plain" then loss:backward() else model:backward(loss) end
      end
      local grad = model.module.w:grad():tolist()
      for j, want in ipairs { 0, 1 / 4 - 3 / 4, 1 / 4, 1 / 4 } do
        assert(math.abs(grad[j] - 4 * 3 * want) < 1e-5, ("%d: %g"):format(j, grad[j]))
      end
      model:close()
    end
  end)

  it("accepts a loss computed from the model's output and the batch", function()
    local Net = nn.class "Net"
    function Net:init() self.layer = nn.Linear(4, 3) end
    function Net:forward(x, y)
      assert(y == nil)
      return self.layer(x)
    end
    local seen = 0
    local function loss(out, given)
      seen = seen + 1
      return F.mse_loss(out.logits, given[2])
    end
    ps.manual_seed(2)
    local x, y = ps.randn { 6, 4 }, ps.randn { 6, 3 }
    local optimizer = open(Net, { gradient_accumulation_steps = 3 }, { loss = loss })
    local weight, bias = model.module.layer.weight:clone(), model.module.layer.bias:clone()
    local sum = 0
    for out in model:micro_batches(x, y) do
      sum = sum + out.loss:item()
      assert.same({ 2, 3 }, out.logits:shape())
      out.loss:backward()
    end
    local want = (x:matmul(weight:t()) + bias - y):square():mean():item()
    assert(math.abs(sum / 3 - want) < 1e-5)
    optimizer:step()
    model:eval()
    assert(ps.no_grad(function() return model(x, y).loss:item() end) > 0)
    assert(seen >= 4)
    model:close()
    open(Net, {}, { loss = function(out) return out.logits end })
    fails(function() model(x, y) end, "loss(out, batch) must return a tensor of one element")
  end)

  it("has only forwards without gradients, in any mode", function()
    local optimizer = open(tiny, { gradient_accumulation_steps = 3 })
    local before = state(optimizer)
    local x, y = batch(1, 6)
    local want = ps.no_grad(function() return model(x, y):item() end)
    local function mean()
      local sum = 0
      for out in model:micro_batches(x, y) do sum = sum + out.loss:item() end
      return sum / 3
    end
    for _, mode in ipairs { "eval", "train" } do
      model[mode](model)
      assert(math.abs(ps.no_grad(mean) - want) < 1e-6)
      fails(mean, "micro-batch 1 of 3 has had no backward", "in ps.no_grad")
    end
    assert(state(optimizer) == before)
    assert.equal(0, inner(model).micro)
    for out in model:micro_batches(x, y) do                    -- also within a loop of a step
      assert(math.abs(ps.no_grad(mean) - want) < 1e-6)
      out.loss:backward()
    end
    assert.is_false(optimizer:step().skipped)
  end)

  it("has one iteration for the result of model(batch) with a named batch", function()
    local function run(way)
      local optimizer = open(tiny, { gradient_accumulation_steps = 2 })
      for step = 1, 4 do
        local x = batch(step, 2)
        local given = { input_ids = x, labels = x }
        if way == "hand" then model:backward(model(given).loss)
        else for out in model(given) do out.loss:backward() end end
        optimizer:step()
      end
      local all = state(optimizer)
      model:close()
      return all
    end
    assert(run "hand" == run "loop")
  end)
end)

describe("dropout in micro-batches", function()
  local Drop = nn.class "Drop"
  function Drop:init() self.drop, self.scale = nn.Dropout(0.5), nn.Linear(1, 1) end
  function Drop:forward(x) return { mask = self.drop(self.drop(x)), loss = self.scale(x:narrow(1, 0, 1)):mean() } end

  it("is that of the whole batch", function()
    local function run(count, rows)
      local optimizer = open(Drop, { gradient_accumulation_steps = count })
      local seen = {}
      for _ = 1, 2 do                                           -- two batches of the same step
        ps.rng().sample = 40
        for out in model:micro_batches(ps.ones { rows, 8 }) do
          seen[#seen + 1] = table.concat(out.mask:reshape(-1):tolist(), " ")
          out.loss:backward()
        end
        assert.equal(40, tonumber(ps.rng().sample))
        optimizer:step()
      end
      model:close()
      return table.concat(seen, " ")
    end
    local whole = run(1, 7)
    assert(whole:find "0" and whole:find "4")
    for _, count in ipairs { 2, 3, 7 } do assert.equal(whole, run(count, 7)) end
  end)

  it("of a model does not change its loss and gradients, for any division", function()
    local function run(count)
      local optimizer, sum = open(dropping, { gradient_accumulation_steps = count, optimizer = { type = "AdamW",
        params = { lr = 1e-2, eps = 1e-2 } } }), 0
      local x, y = batch(1, 6)
      for out in model:micro_batches(x, y) do
        sum = sum + out.loss:item()
        out.loss:backward()
      end
      optimizer:step()
      local w = model:state_dict()["transformer.h.1.mlp.c_fc.weight"]:clone()
      model:close()
      return sum / count, w
    end
    local loss, w = run(1)
    for _, count in ipairs { 2, 6 } do
      local cut, cut_w = run(count)
      assert(math.abs(loss - cut) < 2e-6, cut - loss)
      assert((w - cut_w):abs():max():item() < 1e-6)
    end
  end)
end)

describe("a faulty loop over micro-batches", function()
  local optimizer, x, y

  before_each(function()
    optimizer = open(tiny, { gradient_accumulation_steps = 3 })
    x, y = batch(1, 6)
  end)

  -- Checks that a step of a loop after the failed one equals that of a loop alone.
  local function goes_on()
    local function step()
      optimizer:zero_grad()
      for out in model:micro_batches(x, y) do out.loss:backward() end
      assert.is_false(optimizer:step().skipped)
      return state(optimizer)
    end
    local after = step()
    model:close()
    optimizer = open(tiny, { gradient_accumulation_steps = 3 })
    assert(step() == after)
  end

  for name, call in pairs {
    ["optimizer:step()"] = function() optimizer:step() end,
    ["optimizer:zero_grad()"] = function() optimizer:zero_grad() end,
    ["model(...)"] = function() model(x, y) end,
    ["model:micro_batches(...)"] = function() model:micro_batches(x, y)() end,
  } do
    it("and was left early is named by " .. name .. ", which gives the step up", function()
      model:micro_batches(x, y)().loss:backward()
      fails(call, "micro_batches_spec.lua", name, "at micro-batch 1 of 3", "left early")
      goes_on()
    end)
  end

  it("since a micro-batch had no backward", function()
    fails(function()
      for out in model:micro_batches(x, y) do if out.loss:item() < 0 then out.loss:backward() end end
    end, "micro_batches_spec.lua", "micro-batch 1 of 3 has had no backward")
    goes_on()
  end)

  it("since backward was of another loss, or twice", function()
    local old
    for out in model:micro_batches(x, y) do
      if old ~= nil then
        fails(function() model:backward(old) end, "at micro-batch", "of the loss of micro-batch")
        fails(function() old:backward() end, "of the loss of micro-batch")
      end
      fails(function() model:backward(ps.ones({ 1 }):requires_grad(true):sum()) end, "not made from its output")
      out.loss:backward()
      old = out.loss
      fails(function() out.loss:backward() end, "a second time")
      fails(function() model:backward(out.loss * 2) end, "a second time")
    end
    fails(function() model:backward(old) end, "a loop over micro-batches that has ended")
    assert.is_false(optimizer:step().skipped)
    for out in model:micro_batches(x, y) do
      fails(function() model:backward(old) end, "from another loop")
      out.loss:backward()
    end
    optimizer:step()
  end)

  it("since the model's mode changed", function()
    fails(function()
      for out in model:micro_batches(x, y) do
        out.loss:backward()
        model:eval()
      end
    end, "micro_batches_spec.lua", "the model was set to evaluation mode within a loop")
    model:train()
    goes_on()
  end)

  it("may be called after its end, and be left when the model is closed", function()
    local turns = model:micro_batches(x, y)
    for out in turns do out.loss:backward() end
    assert.is_nil(turns())
    optimizer:step()
    local left = model:micro_batches(x, y)
    left()
    model:close()
    fails(left, "abandoned")
    assert.is_nil(turns())
  end)

  it("since a step of another kind was under way", function()
    model:backward(model(x, y))
    fails(function() model:micro_batches(x, y)() end, "1 of 3 micro-batches", "a whole step")
  end)

  it("since the model's forward failed", function()
    local wrong = ps.full({ 6, 16 }, 300, { dtype = "int32" })
    local turns = model:micro_batches(wrong, y)
    fails(turns, "300")
    fails(turns, "abandoned")
    goes_on()
  end)

  it("does not affect a loss that is not the model's", function()
    local other = ps.ones({ 3 }):requires_grad(true)
    for out in model:micro_batches(x, y) do
      other:square():sum():backward()
      out.loss:backward()
    end
    assert.same({ 6, 6, 6 }, other:grad():tolist())
    optimizer:step()
  end)
end)

describe("loops of several ranks", function()
  it("have the same number of micro-batches on each, and the gradient of all rows", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local folder = ranks.folder()
    local ok, problem = pcall(ranks.check, folder, 2, [[
      local Logits = nn.class "Logits"
      function Logits:init() self:param("w", ps.zeros { 4 }) end
      function Logits:forward(x, y)
        return ps.F.cross_entropy(self.w:reshape(1, 4):expand(x:numel(), 4), y:reshape(-1))
      end
      for stage = 0, 3 do
        local model, optimizer = ps.initialize { quiet = true, model_func = function() return Logits() end,
          config = { plan_print = false, gradient_accumulation_steps = 3, zero_optimization = { stage = stage },
            optimizer = { type = "Adam", params = { lr = 0.5, eps = 1 } } } }
        -- rank 0 has 2 rows, and rank 1 has 5, with the targets 0 (4 times), 1 (twice) and 3 (once) in total
        local y = rank == 0 and { { 0, -100 }, { 0, 1 } } or { { 0, -100 }, { 3, -100 }, { 0, 1 }, { -100, -100 },
          { -100, -100 } }
        y = ps.tensor(y, { dtype = "int64" })
        local turns = 0
        for out in model:micro_batches(ps.zeros(y:shape(), { dtype = "int64" }), y) do
          turns = turns + 1
          out.loss:backward()
        end
        assert(turns == 2)
        optimizer:step()
        local w
        for _, t in pairs(model:state_dict()) do w = t:tolist() end
        -- Adam's first step: -lr * g / (|g| + eps)
        for j, g in ipairs { 1 / 4 - 4 / 7, 1 / 4 - 2 / 7, 1 / 4, 1 / 4 - 1 / 7 } do
          if w then
            local want = -0.5 * g / (math.abs(g) + 1)
            assert(math.abs(w[j] - want) < 1e-6, ("%g, not %g"):format(w[j], want))
          end
        end
        assert(ps.any_rank(w ~= nil))
        model:close()
      end
    ]])
    ranks.remove(folder)
    if not ok then error(problem, 0) end
  end)

  it("name the rank that left its loop early, and none hangs", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local folder = ranks.folder()
    local all = ranks.run(folder, 2, ranks.begin(folder) .. [[
      local model, optimizer = ps.initialize { quiet = true, model_func = function() return nn.Linear(4, 4) end,
        config = { plan_print = false, gradient_accumulation_steps = 2, zero_optimization = { stage = 2 } } }
      for out in model:micro_batches(ps.ones { 2, 4 }, ps.ones { 2, 4 }) do
        out.logits:sum():backward()
        if rank == 1 then break end
      end
      optimizer:step()
    ]])
    ranks.remove(folder)
    assert(all[1].code ~= 0 and all[0].code ~= 0)
    assert(all[1].text:find("optimizer:step() was called before the end of a loop over micro-batches, at "
      .. "micro-batch 1 of 2", 1, true), all[1].text)
    assert(all[0].text:find("rank 1", 1, true), all[0].text)
  end)
end)
