-- SPDX-License-Identifier: BSD-3-Clause
-- The weights of losses in averages over micro-batches, ranks and evaluation batches: the weights of their targets,
-- from the ops of the losses. Norms and losses equal PyTorch's for the whole batch.
local lib = require "spec.ranks_lib"

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

local BEGIN = [[
  local F = ps.F
  local fails = require("spec.check_lib").fails
  local function by(rows, k, m, zero)
    local t = {}
    for r = 0, rows - 1 do
      t[r + 1] = {}
      for c = 0, 3 do t[r + 1][c + 1] = ((r * 4 + c) * k % m - zero) / 4 end
    end
    return ps.tensor(t)
  end
  local X, W, CLASSES = by(12, 5, 11, 5), by(3, 3, 7, 3), ps.tensor { 1, 2, 30 }
  local function labels(skip) return ps.tensor({ 0, 1, 2, skip, skip, skip, 1, 0, 2, skip, 1, 0 }, "int64") end
  local ALL = ps.tensor({ 0, 1, 2, 2, 2, 2, 1, 0, 2, 0, 1, 0 }, "int64")
  local M = nn.class "M"
  function M:init()
    self.a = nn.Linear(4, 3, { bias = false })
    ps.no_grad(function() self.a.weight:copy_(W) end)
  end
  -- name -> {loss(model, x, y), targets, the loss and its gradient's norm}
  local CASES = {
    ["cross_entropy"] = { function(m, x, y) return F.cross_entropy(m.a(x), y) end, labels(-100), 1.188262, 0.500553 },
    ["ignore_index -1"] = { function(m, x, y) return F.cross_entropy(m.a(x), y, { ignore_index = -1 }) end, labels(-1),
      1.188262, 0.500553 },
    ["lm_loss"] = { function(m, x, y) return F.lm_loss(x, m.a.weight, y, { ignore_index = -1 }) end, labels(-1),
      1.188262, 0.500553 },
    ["nll_loss"] = { function(m, x, y) return F.nll_loss(F.log_softmax(m.a(x)), y, { ignore_index = -1 }) end,
      labels(-1), 1.188262, 0.500553 },
    ["targets that the model makes"] = { function(m, x, y)
      return F.cross_entropy(m.a(x), y:to("int64") + 0, { ignore_index = -1 })
    end, labels(-1), 1.188262, 0.500553 },
    ["a loss within a recomputed function"] = { function(m, x, y)
      return ps.recompute(function(z) return F.cross_entropy(m.a(z), y, { ignore_index = -1 }) end, x)
    end, labels(-1), 1.188262, 0.500553 },
    ["inner losses that are collected"] = { function(m, x, y)
      local loss = F.cross_entropy(m.a(x), y, { ignore_index = -1 }) * 2 / 2
      collectgarbage()
      collectgarbage()
      return loss
    end, labels(-1), 1.188262, 0.500553 },
    ["a term of other ops"] = { function(m, x, y)
      return F.cross_entropy(m.a(x), y, { ignore_index = -1 }) + (m.a.weight * 0):sum()
    end, labels(-1), 1.188262, 0.500553 },
    ["padding 0"] = { function(m, x, y) return F.cross_entropy(m.a(x), y, { ignore_index = 0 }) end, labels(0),
      1.461379, 0.623468 },
    ["class weights"] = { function(m, x, y)
      return F.cross_entropy(m.a(x), y, { weight = CLASSES:to(x:device()) })
    end, ALL, 1.100179, 0.383305 },
    ["class weights of lm_loss"] = { function(m, x, y)
      return F.lm_loss(x, m.a.weight, y, { weight = CLASSES:to(x:device()) })
    end, ALL, 1.100179, 0.383305 },
    ["class weights of nll_loss"] = { function(m, x, y)
      return F.nll_loss(F.log_softmax(m.a(x)), y, { weight = CLASSES:to(x:device()) })
    end, ALL, 1.100179, 0.383305 },
    ["smoothed labels"] = { function(m, x, y)
      return F.cross_entropy(m.a(x), y, { weight = CLASSES:to(x:device()), label_smoothing = 0.1 })
    end, ALL, 1.123549, 0.366204 },
    ["a factor, and a sum of two"] = { function(m, x, y)
      local loss = F.cross_entropy(m.a(x), y, { ignore_index = -1 })
      return (loss + loss * 2) / 3
    end, labels(-1), 1.188262, 0.500553 },
  }
  local NAMES = {}
  for name in pairs(CASES) do NAMES[#NAMES + 1] = name end
  table.sort(NAMES)
  local function open(micros, loss, more)
    function M:forward(x, y)
      if type(x) == "table" then x, y = x.x, x.labels end
      return loss(self, x, y)
    end
    local config = { optimizer = { type = "SGD", params = { lr = 1 } }, gradient_accumulation_steps = micros,
      gradient_clipping = 1e9, plan_print = false }
    for key, value in pairs(more or {}) do config[key] = value end
    return ps.initialize { quiet = true, model_func = function() return M() end, config = config }
  end
  -- Returns the norm of a step with this number of micro-batches per rank. The batch is x, y or named.
  local function norm(micros, loss, y, how, options, more)
    local model, optimizer = open(micros, loss, more)
    local n = 12 / size / micros
    if how == "loop" then
      for out in model:micro_batches(X:narrow(0, rank * 12 / size, 12 / size):contiguous(),
        y:narrow(0, rank * 12 / size, 12 / size):contiguous()) do model:backward(out.loss) end
    else
      for i = 0, micros - 1 do
        local from = rank * 12 / size + i * n
        local a, b = X:narrow(0, from, n):contiguous(), y:narrow(0, from, n):contiguous()
        local out = how == "names" and model { x = a, labels = b } or model(a, b)
        model:backward(out, options and options(b))
        if i < micros - 1 then optimizer:step() end
      end
    end
    local result = optimizer:step().grad_norm
    model:close()
    return result
  end
  local function near(want, got, what, off)
    assert(math.abs(want - got) <= (off or 2e-6), ("%s: %.6f, not %.6f"):format(what, got, want))
  end
]]

for _, size in ipairs { 1, 2 } do
  describe(("the weights of losses, ranks: %d"):format(size), function()
    if size > 1 and lib.no_gloo() then return pending(lib.no_gloo()) end

    it("are the sums of the targets' weights, with ignored targets and weights of classes", function()
      lib.check(folder, size, BEGIN .. [[
        for _, name in ipairs(NAMES) do
          local case = CASES[name]
          for _, micros in ipairs { 1, 3 } do
            for _, how in ipairs(size == 1 and { "calls", "names", "loop" } or { "calls", "loop" }) do
              near(case[4], norm(micros, case[1], case[2], how), ("%s, %d micro-batches, %s"):format(name, micros,
                how))
            end
          end
          if size == 1 then
            near(case[4], norm(3, case[1], case[2], "calls", nil, { memory = "plain" }), name .. ", memory plain")
            near(case[4], norm(3, case[1], case[2], "calls", nil, { zero_optimization = { stage = 2 } }), name)
          end
        end
      ]])
    end)

    it("are 1 for sums and for other ops; a given weight takes precedence, and different ones are refused", function()
      lib.check(folder, size, BEGIN .. [[
        local function sum(m, x, y) return F.cross_entropy(m.a(x), y, { reduction = "sum" }) end
        local function plain(m, x) return (m.a(x) ^ 2):mean() end
        local whole = { 3.752218, 1.876109, 1.250739 }
        for micros, want in ipairs(size == 1 and whole or { whole[2] }) do
          near(want, norm(micros, sum, ALL), "sum")          -- the mean over micro-batches and ranks
          near(1.257596, norm(micros, plain, ALL), "a plain mean")
        end
        local case = CASES["ignore_index -1"]
        local counted = function(y) return { weight = y:ne(-1):sum():item() } end
        near(case[4], norm(3, case[1], case[2], "calls", counted), "a given weight")
        local function halved(m, x, y) return case[1](m, x, y) / 3 end
        near(case[4] / 3, norm(3, halved, case[2]), "a loss that the script divided")
        local function unlike(m, x, y) return case[1](m, x, y) + F.cross_entropy(m.a(x), y:clamp(0, 2)) end
        local model = open(3, unlike)
        local loss = model(X:narrow(0, 3, 2):contiguous(), ps.tensor({ 0, -1 }, "int64"))
        fails(function() model:backward(loss) end, "different targets", "1 and 2", "weight")
        model:close()
        function M.count_targets(_, _, y) return y:ne(-1):sum():item() end
        norm(3, unlike, case[2])
        M.count_targets = nil
      ]])
    end)
  end)
end

-- A model of two parts, the second of which computes the loss.
local STAGES = [[
  local P, chosen = nn.class "P", nil
  function P:init()
    self.first, self.a = nn.Linear(4, 4, { bias = false }), nn.Linear(4, 3, { bias = false })
    ps.no_grad(function()
      self.first.weight:copy_(ps.eye(4))
      self.a.weight:copy_(W)
    end)
  end
  function P.example(_, rows)
    return ps.zeros({ rows, 4 }), ps.zeros({ rows }, { dtype = "int64" })
  end
  function P.batch_of(_, x, y) return { x = x, y = y } end
  function P:parts()
    return {
      { name = "first", modules = { self.first }, forward = function(_, given) return { x = self.first(given.x) } end },
      { name = "a", modules = { self.a }, forward = function(carry, given)
        return { loss = chosen(self, carry.x, given.y) }
      end },
    }
  end
  local function run(loss, y, held)
    chosen = loss
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return P() end, config = {
      optimizer = { type = "SGD", params = { lr = 1 } }, gradient_accumulation_steps = 3, gradient_clipping = 1e9,
      plan_print = false, pipeline = { stages = 2 } } }
    local value
    if held then
      local at = 0
      value = ps.train.evaluate(model, function()
        at = at + 1
        if at == 1 then return X:narrow(0, 0, 7):contiguous(), y:narrow(0, 0, 7):contiguous() end
        if at == 2 then return X:narrow(0, 7, 5):contiguous(), y:narrow(0, 7, 5):contiguous() end
      end)
    else
      for out in model:micro_batches(X, y) do model:backward(out.loss) end
      optimizer:step()
      local moved = model.module.a and model.module.a.weight
      value = moved and rank == 1 and (moved:to("fp32") - W:to("fp32")):square():sum():sqrt():item() or false
    end
    model:close()
    return value
  end
]]

describe("the weights of losses of a model in stages", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("are sent to all ranks by the last stage", function()
    lib.check(folder, 2, BEGIN .. STAGES .. [[
      for _, name in ipairs { "ignore_index -1", "class weights", "a factor, and a sum of two" } do
        local case = CASES[name]
        local got = run(case[1], case[2])
        if got then near(case[4], got, name) end
        near(case[3], run(case[1], case[2], true), name .. ", held out")
      end
    ]])
  end)
end)

describe("the weights of losses of vocabularies that are cut among ranks", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  it("are those of one rank, also with weights of classes and label smoothing", function()
    lib.check(folder, 2, BEGIN .. [[
      local T = nn.class "T"
      T.tensor_parallel = { a = "head" }
      function T:init()
        self.a = nn.Linear(4, 3, { bias = false })
        ps.no_grad(function() self.a.weight:copy_(W) end)
      end
      for number, case in ipairs {
        { { ignore_index = -1 }, labels(-1), 1.188262, 0.500553 },
        { { weight = CLASSES }, ALL, 1.100179, 0.383305 },
        { { weight = CLASSES, label_smoothing = 0.1 }, ALL, 1.123549, 0.366204 },
      } do
        local name = "case " .. number
        function T:loss_of(x, y)
          assert(self.a.class_name == "ParallelLMHead")
          return self.a:loss(x, y, case[1])
        end
        function T:forward(x, y) return self:loss_of(x, y) end
        function T.batch_of(_, x, y) return { input_ids = x, y = y } end
        function T:parts()
          return { { name = "a", modules = { self.a }, forward = function(_, given)
            return { loss = self:loss_of(given.input_ids, given.y) }
          end } }
        end
        for _, micros in ipairs { 1, 3 } do
          local model, optimizer = ps.initialize { quiet = true, model_func = function() return T() end, config = {
            optimizer = { type = "SGD", params = { lr = 1 } }, gradient_accumulation_steps = micros,
            gradient_clipping = 1e9, plan_print = false, tensor_parallel = { size = 2, sequence_parallel = false } } }
          local sum, weights = 0, 0
          for i = 0, micros - 1 do
            local n = 12 / micros
            local y = case[2]:narrow(0, i * n, n):contiguous()
            local loss = model(X:narrow(0, i * n, n):contiguous(), y)
            local weight = 0
            for _, t in ipairs(y:tolist()) do
              if t ~= -1 then weight = weight + (case[1].weight and case[1].weight:tolist()[t + 1] or 1) end
            end
            sum, weights = sum + loss:item() * weight, weights + weight
            model:backward(loss)
            if i < micros - 1 then optimizer:step() end
          end
          near(case[3], sum / weights, name .. ", the loss")
          near(case[4], optimizer:step().grad_norm, ("%s, %d micro-batches"):format(name, micros))
          local at = 0
          near(case[3], ps.train.evaluate(model, function()
            at = at + 1
            if at == 1 then return X:narrow(0, 0, 7):contiguous(), case[2]:narrow(0, 0, 7):contiguous() end
            if at == 2 then return X:narrow(0, 7, 5):contiguous(), case[2]:narrow(0, 7, 5):contiguous() end
          end), name .. ", held out after a step", 10)
          model:close()
        end
      end
    ]])
  end)
end)

describe("the weights of labels that a model packs", function()
  it("are counted on the host if the script has the labels there", function()
    local ps = require "ps"
    local devices = require "ps.core.devices"
    local bert = require "models.bert"
    local mask = ps.tensor { { 1, 1, 1, 1, 0, 0 }, { 1, 1, 0, 0, 0, 0 }, { 1, 1, 1, 1, 1, 1 }, { 1, 0, 0, 0, 0, 0 } }
    local labels = ps.full({ 4, 6 }, -100, { dtype = "int64" })
    labels[{ 0, 1 }], labels[{ 0, 2 }], labels[{ 2, 4 }], labels[{ 1, 5 }] = 3, 4, 5, 6      -- the last one is padding
    local function run(unpad)
      ps.manual_seed(1)
      local model, optimizer = ps.initialize { quiet = true, model_func = function()
        return bert.new("tiny", { task = "masked_lm", unpad = unpad, dropout = 0 })
      end, config = { device = "sim", plan_print = false, gradient_accumulation_steps = 2, gradient_clipping = 1e9,
        optimizer = { type = "SGD", params = { lr = 0 } } } }
      local known, places, norm = devices.known, {}, nil
      devices.known = function(fn, t, ...)
        if type(t) == "cdata" and fn == t.item then places[#places + 1] = t:device() end
        return known(fn, t, ...)
      end
      local ok, problem = pcall(function()
        for i = 0, 1 do
          local ids = ps.full({ 2, 6 }, 7, { dtype = "int64" })
          local loss = model { input_ids = ids, attention_mask = mask:narrow(0, 2 * i, 2):contiguous():to "int64",
            labels = labels:narrow(0, 2 * i, 2):contiguous() }.loss
          model:backward(loss)
          norm = optimizer:step().grad_norm
        end
      end)
      devices.known = known
      model:close()
      assert(ok, problem)
      return norm, places
    end
    local norm, places = run(true)
    assert.same({ "cpu", "cpu" }, places)
    assert.truthy(math.abs(run(false) - norm) < 1e-5 * norm)
  end)
end)

describe("ps.train.evaluate", function()
  it("returns the mean over all targets, however the rows are divided into batches", function()
    lib.check(folder, 1, BEGIN .. [[
      local function batches(y, sizes, named)
        local i, at = 0, 0
        return function()
          i = i + 1
          local n = sizes[i]
          if not n then return end
          local a, b = X:narrow(0, at, n), y:narrow(0, at, n)
          at = at + n
          if named then return { x = a, labels = b } end
          return a, b
        end
      end
      for _, name in ipairs(NAMES) do
        local case = CASES[name]
        for _, sizes in ipairs { { 12 }, { 6, 5, 1 } } do
          do
            for _, named in ipairs { false, true } do
              for _, micros in ipairs(name:find "^padding" and { 0, 1, 2 } or { 0 }) do
                local model
                if micros > 0 then model = open(micros, case[1])
                else
                  open(1, case[1]):close()
                  model = M()
                end
                near(case[3], ps.train.evaluate(model, batches(case[2], sizes, named)), name)
                if micros > 0 then model:close() end
              end
            end
            local model = M()
            near(case[3], ps.train.evaluate(model, batches(case[2], sizes), { loss = function(m, x, y)
              return case[1](m, x, y)
            end }), name .. ", a loss of its own")
          end
        end
      end
    ]])
  end)

  it("and ps.train.run weight losses equally", function()
    lib.check(folder, 1, BEGIN .. [[
      local case = CASES["ignore_index -1"]
      open(1, case[1]):close()
      local at = 0
      local loader = { global_batch = 4, seq = 1, next = function()
        at = at + 4
        return X:narrow(0, at - 4, 4):contiguous(), case[2]:narrow(0, at - 4, 4):contiguous()
      end }
      local model = M()
      local norms = {}
      ps.train.run { model = model, optimizer = ps.optim.SGD(model, { lr = 1 }), loader = loader, steps = 1,
        accumulate = 3, max_norm = 1e9, quiet = true,
        callbacks = { step = function(line) norms[1] = line.grad_norm end } }
      near(case[4], norms[1], "ps.train.run")
    ]])
  end)
end)
