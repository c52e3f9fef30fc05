-- SPDX-License-Identifier: BSD-3-Clause
-- ps.train.run and evaluate of several ranks: one log, one history, the mean of all ranks' losses, a signal to any
-- rank ends the run on all after the same step, and a fault on one rank is an error on all.
local ranks = require "spec.ranks_lib"
local lib = require "spec.check_lib"

local folder

setup(function()
  folder = ranks.folder()
  local lines = {}
  for i = 1, 400 do lines[i] = ("line %d of a text\n"):format(i * i) end
  lib.write(folder .. "/text", table.concat(lines))
end)
teardown(function() ranks.remove(folder) end)

-- Code that follows ranks_lib's beginning. start(stage) creates the model, the optimizer, and the arguments of
-- train.run.
local BEGIN = [[
  local gpt2, train = require "models.gpt2", ps.train
  local signal, unistd = require "posix.signal", require "posix.unistd"
  local function windows(limit)
    return ps.data.windows { file = folder .. "/text", width = 1, batch = 2, seq = 8, limit = limit or 4 }
  end
  local function start(more)
    ps.manual_seed(7)
    local model, optimizer = ps.initialize { quiet = true, model_func = function() return gpt2.new "tiny" end,
      config = { plan_print = false, chunk_size = 4096, zero_optimization = { stage = more.stage },
        optimizer = { type = "AdamW", params = { lr = 1e-3 } } } }
    local options = { model = model, optimizer = optimizer, steps = 6, quiet = true,
      loader = ps.data.loader { file = folder .. "/text", width = 1, batch = 4 / size, seq = 8, seed = 2, vocab = 256 },
      eval = { every = 3, data = windows } }
    for key, value in pairs(more) do if key ~= "stage" then options[key] = value end end
    return options
  end
  local function told(result)
    local parts = { result.step, tostring(result.interrupted), ("%.17g"):format(result.val_loss or -1) }
    for _, at in ipairs(result.history) do
      parts[#parts + 1] = ("%d:%.9g:%s"):format(at.step, at.loss, at.val_loss and ("%.9g"):format(at.val_loss) or "-")
    end
    return table.concat(parts, " ")
  end
]]

-- Returns the lines that ranks print as "told ...", which must be equal on all ranks.
local function same(size, script)
  local all = ranks.check(folder, size, BEGIN .. script)
  local first = all[0].text:match("told ([^\n]*)")
  for rank = 0, size - 1 do assert.equal(first, all[rank].text:match("told ([^\n]*)")) end
  return first
end

describe("train.run of two ranks", function()
  it("has one log and one history, which are those of one process with all rows", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local RUN = [[
      local options = start { stage = %d, log = folder .. "/log.csv" }
      print("told " .. told(train.run(options)))
      options.model:close()
    ]]
    local alone = same(1, RUN:format(0))
    local log = lib.read(folder .. "/log.csv")
    for _, stage in ipairs { 0, 3 } do
      local both = same(2, RUN:format(stage))
      local mine, theirs = {}, {}
      for loss in alone:gmatch(":([%d.]+)") do mine[#mine + 1] = tonumber(loss) end
      for loss in both:gmatch(":([%d.]+)") do theirs[#theirs + 1] = tonumber(loss) end
      assert.equal(8, #mine)
      for i, loss in ipairs(mine) do assert(math.abs(loss - theirs[i]) < 1e-4, alone .. "\n" .. both) end
      local text, steps = lib.read(folder .. "/log.csv"), {}
      for step in text:gmatch("\n(%d+),") do steps[#steps + 1] = tonumber(step) end
      assert.same({ 1, 2, 3, 4, 5, 6 }, steps)
      assert.equal(select(2, log:gsub("\n", "")), select(2, text:gsub("\n", "")))
    end
  end)

  it("continues from its checkpoint, and all ranks have the history of the log", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local said = same(2, [[
      local path = folder .. "/resumed"
      local whole = start { log = folder .. "/whole.csv" }
      local want = train.run(whole)
      whole.model:close()
      local first = start { log = folder .. "/parts.csv", steps = 4, checkpoint = { folder = path, every = 4 } }
      train.run(first)
      first.model:close()
      local rest = start { log = folder .. "/parts.csv", start = 4 }
      ps.checkpoints.load(path, { model = rest.model, optimizer = rest.optimizer, loader = rest.loader })
      local got = train.run(rest)
      rest.model:close()
      assert(#got.history == 6)
      for i = 5, 6 do assert(got.history[i].loss == want.history[i].loss) end
      print("told " .. told(got))
    ]])
    assert.truthy(said:find("1:[%d.]+:%- 2:"), said)
  end)

  it("ends on both after the same step, with a checkpoint, when signals reach them at different times", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local said = same(2, [[
      local count = 0
      local options = start { steps = 12, log = folder .. "/signals.csv", checkpoint = { folder = folder .. "/run" },
        loss = function(m, ...)
          if m.training then count = count + 1 end
          if m.training and count == (rank == 1 and 2 or 3) then signal.kill(unistd.getpid(), signal.SIGTERM) end
          return m(...)
        end }
      local result = train.run(options)
      assert(result.interrupted and result.saved, told(result))
      assert(ps.checkpoints.info(folder .. "/run").step == result.step)
      options.model:close()
      print("told " .. told(result))
    ]])
    assert.truthy(said:match("^2 true"), said)
  end)

  it("fails on both if the loss of one is not a number, and if their numbers of held-out batches differ", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    same(2, [[
      local options = start { loss = function(m, ...) return rank == 1 and m(...) * (0 / 0) or m(...) end }
      local ok, problem = pcall(train.run, options)
      assert(not ok and tostring(problem):find("the loss is %-?nan at step 1"), problem)
      local before = require("ps.nn.handle").of(options.model).steps
      ok, problem = pcall(train.evaluate, options.model, windows(4 + 4 * rank))
      assert(not ok and tostring(problem):find("1 of 2 ranks have no batch", 1, true), problem)
      assert(require("ps.nn.handle").of(options.model).steps == before)
      options.model:close()
      print("told nothing")
    ]])
  end)

  it("evaluates the mean over the targets of all ranks", function()
    if ranks.no_gloo() then return pending(ranks.no_gloo()) end
    local text = same(2, [[
      local options = start {}
      local model = options.model
      local function batches()
        local n = 0
        return function()
          n = n + 1
          if n > 2 then return nil end
          ps.manual_seed(10 * n + rank)
          local x = ps.randint(0, 256, { 2, 8 }, { dtype = "int32" })
          local y = x:clone()
          y:narrow(1, 0, 2 * n + 3 * rank - 1):fill_(-100)       -- 14, 10 and 8, 4 targets
          return x, y
        end
      end
      local sum, count = 0, 0
      model:eval()
      for x, y in batches() do
        local n = y:ne(-100):sum():item()
        sum, count = sum + ps.no_grad(model, x, y):item() * n, count + n
      end
      local all = group:all_reduce(ps.tensor({ sum, count }, { dtype = "fp64" })):tolist()
      local got = train.evaluate(model, batches())
      assert(math.abs(got - all[1] / all[2]) < 1e-9 and all[2] == 36, got .. " " .. all[1] / all[2] .. " " .. all[2])
      model:close()
      print(("told %.17g"):format(got))
    ]])
    assert(tonumber(text) > 1)
  end)
end)

describe("evaluate", function()
  local ps = require "ps"

  it("weights batches by their targets, and has no loss if all are ignored", function()
    local model = require("models.gpt2").new "tiny"
    local function batches(masks)
      local n = 0
      return function()
        n = n + 1
        if not masks[n] then return nil end
        ps.manual_seed(n)
        local x = ps.randint(0, 256, { 2, 8 }, { dtype = "int32" })
        local y = x:clone()
        if masks[n] > 0 then y:narrow(1, 0, masks[n]):fill_(-100) end
        return x, y
      end
    end
    local sum, count = 0, 0
    model:eval()
    for x, y in batches { 6, 0, 3 } do
      local n = y:ne(-100):sum():item()
      sum, count = sum + ps.no_grad(model, x, y):item() * n, count + n
    end
    assert.equal(30, count)
    assert(math.abs(ps.train.evaluate(model, batches { 6, 0, 3 }) - sum / count) < 1e-9)
    assert(math.abs(ps.train.evaluate(model, batches { 6, 8, 0, 3 }) - sum / count) > 1e-9)
    assert.is_nil(ps.train.evaluate(model, batches { 8, 8 }))
  end)
end)
