-- SPDX-License-Identifier: BSD-3-Clause
-- A model cut into stages: under every schedule the losses, parameters and averages are those of one process that
-- performs the micro-batches in order, bit for bit, dropout included; a collective in the loop's body does not hang.
local lib = require "spec.ranks_lib"

local folder

setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)

-- Runs two steps of six micro-batches, and prints this rank's values, one line per tensor. It runs once for each entry
-- in a list of settings, after a line with the entry's index.
local TRAIN = [[
  local gpt2 = require "models.gpt2"
  -- Makes the third layer look up the tokens again.
  local function look_up_again(net)
    local parts, wte = net.parts, net.transformer.wte
    rawset(net, "parts", function(self)
      local list = parts(self)
      local part = list[4]
      local layer, modules = part.forward, { wte, unpack(part.modules) }
      part.modules = modules
      function part.forward(carry, batch)
        local out = layer(carry, batch)
        out.x = out.x + wte(batch.input_ids)
        return out
      end
      return list
    end)
  end
  for number, settings in ipairs { SETTINGS } do
    print("run " .. number)
    ps.manual_seed(3)
    local config = { gradient_accumulation_steps = 6, plan_print = settings.plan or false,
      gradient_clipping = settings.clip,
      optimizer = { type = "AdamW", params = { lr = 1e-2, eps = 1e-4, weight_decay = 0.1 } },
      bf16 = { enabled = settings.bf16 or false }, pipeline = settings.pipeline, memory = settings.memory,
      recompute = settings.recompute, zero_optimization = settings.zero, chunk_size = 4096,
      overlap_optimizer = settings.overlap }
    local model, optimizer = ps.initialize { config = config, quiet = not settings.plan, model_func = function()
      local net = gpt2.new("tiny", { n_layer = 6, tie_word_embeddings = settings.tied or false, dropout = 0.1 })
      if settings.thrice then look_up_again(net) end
      return net
    end }
    for step = 1, 2 do
      ps.manual_seed(40 + step)
      local x = ps.randint(0, 256, { 17, 12 }, { dtype = "int32" })
      local y = ps.randint(0, 256, { 17, 12 }, { dtype = "int32" })
      for i = 0, 2 * step do y[{ step, i }] = -100 end
      ps.manual_seed(60 + step)
      optimizer:zero_grad()
      local n = 0
      for out in model:micro_batches(x, y) do
        n = n + 1
        print(("loss %d.%d %.17g"):format(step, n, out.loss:item()))
        if settings.collective then ps.any_rank(false) end
        model:backward(out.loss)
      end
      if settings.overlap then                                            -- it is too late to abandon the step
        assert(select(2, pcall(optimizer.zero_grad, optimizer)):find "can no longer be abandoned")
      end
      optimizer:step()
      if settings.clip then print(("norm %d %.17g"):format(step, optimizer.grad_norm)) end
    end
    local function say(state, what)
      for name, t in pairs(state) do
        local t64 = t:to "fp64":reshape(-1)
        local weights = ps.arange(1, t64:numel() + 1, 1, { dtype = "fp64" })
        print(("%s %s %.17g %.17g"):format(what, name, t64:sum():item(), (t64 * weights):sum():item()))
      end
    end
    say(model:state_dict(), "tensor")
    model:close()
  end
]]

local function lines_of(text, into)
  for line in text:gmatch "[^\n]+" do
    local key, value = line:match "^(%a+ %S+) (.*)$"
    if key then
      if into[key] then assert.equal(into[key], value, key) end
      into[key] = value
    end
  end
  return into
end

-- Returns the values of some ranks after each of several settings, and the whole output. `replicas` are ranks that
-- train the same parameters; they have dropout masks for different rows, and therefore different losses.
local function train(size, list, replicas)
  local settings = table.concat(list, ", ")
  local all = lib.check(folder, size, (TRAIN:gsub("SETTINGS", function() return settings end)),
    settings:find("stress", 1, true) and "PS_STRESS=1" or nil)
  local runs = {}
  for rank = 0, size - 1 do
    local text, number = replicas and all[rank].text:gsub("loss [^\n]*", "") or all[rank].text, 0
    for run in (text:gsub("%f[%w]run %d+\n", "\0")):gmatch "%z([^%z]*)" do
      number = number + 1
      runs[number] = lines_of(run, runs[number] or {})
    end
    assert.equal(#list, number)
  end
  return runs, all
end

-- Runs with the same number of ranks share their processes. While the cases are defined, run() records the settings and
-- returns a function that returns the results of the run. The first such function that is called starts the processes.
local lists, left = {}, {}
local function run(size, settings)
  local which = size .. (settings:find("stress", 1, true) and " stress" or "")
  local list = lists[which] or {}
  lists[which] = list
  local number
  for i, other in ipairs(list) do if other == settings then number = i end end
  if not number then
    number = #list + 1
    list[number] = settings
  end
  return function()
    left[which] = left[which] or train(size, list)
    return left[which][number]
  end
end

local function same(wanted, got, what)
  local n = 0
  for key, value in pairs(wanted) do
    assert.equal(value, got[key], what .. ": " .. key)
    n = n + 1
  end
  for key in pairs(got) do assert.truthy(wanted[key], what .. ": " .. key .. " is nowhere else") end
  assert.truthy(n > 12 + 20, ("%s: only %d lines"):format(what, n))
end

-- Compares sums of up to 8192 values that are computed in different orders.
local function near(wanted, got, what)
  for key, value in pairs(wanted) do
    local want, mine = tonumber(value:match "%S+"), tonumber(assert(got[key], key):match "%S+")
    assert.near(want, mine, 32e-6 * math.max(1, math.abs(want)), what .. ": " .. key)
  end
end

describe("a pipeline", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  for _, case in ipairs {
    { "fp32", "" }, { "bf16, clipped", "bf16 = true, clip = 0.5," },
  } do
    local one, cut_ones = run(1, "{ " .. case[2] .. " }"), {}
    for size, cuts in pairs { [2] = { "schedule = 'gpipe'", "schedule = 'interleaved', virtual_stages = 2",
      "schedule = 'looped_bfs', virtual_stages = 3", "schedule = 'zb_h1'", "schedule = 'zb_v'" },
      [3] = { "schedule = '1f1b'" } } do
      for _, cut in ipairs(cuts) do
        cut_ones[cut] = run(size, ("{ %s collective = true, pipeline = { stages = %d, %s } }"):format(case[2], size,
          cut))
      end
    end
    it("has one process's bits under every schedule: " .. case[1], function()
      for cut, got in pairs(cut_ones) do same(one(), got(), cut) end
    end)
  end

  local settings = "{ recompute = true, bf16 = true, stress = true,"
  local whole, halved = run(1, settings .. "}"), run(2, settings .. "pipeline = { stages = 2, schedule = 'zb_h1' } }")
  it("has them with recomputed activations, and with chunks that move at every pin", function()
    same(whole(), halved(), settings)
  end)

  local plain, early = run(1, "{  }"), {}
  for _, schedule in ipairs { "'looped_bfs', virtual_stages = 2", "'zb_h1'" } do
    early[schedule] = run(2, ("{ overlap = true, pipeline = { stages = 2, schedule = %s } }"):format(schedule))
  end
  it("has them if each virtual stage is updated in its last backward", function()
    for schedule, got in pairs(early) do same(plain(), got(), schedule) end
  end)

  it("neither trains nor saves after a step that failed after such updates", function()
    local all = lib.check(folder, 2, [[
      local gpt2 = require "models.gpt2"
      local model, optimizer = ps.initialize { quiet = true, model_func = function()
        return gpt2.new("tiny", { n_layer = 2, dropout = 0, tie_word_embeddings = false })
      end, config = { gradient_accumulation_steps = 2, plan_print = false, overlap_optimizer = true,
        pipeline = { stages = 2 } } }
      local x = ps.randint(0, 256, { 2, 8 }, { dtype = "int32" })
      local function loop() for out in model:micro_batches(x, x) do model:backward(out.loss) end end
      loop()
      optimizer:step()
      local pipe = require("ps.nn.handle").of(model).driver.pipe
      local go_on = pipe.next
      function pipe:next()
        local kind, v, micro = go_on(self)
        if kind == nil then error("it ends badly", 0) end
        return kind, v, micro
      end
      for _, call in ipairs { loop, loop, function() optimizer:step() end, function() model:state_dict() end } do
        print("said: " .. tostring(select(2, pcall(call))))
      end
    ]])
    for rank = 0, 1 do
      local said = {}
      for line in all[rank].text:gmatch "said: ([^\n]*)" do said[#said + 1] = line end
      assert.equal(4, #said)
      assert.matches("it ends badly", said[1])
      for i = 2, 4 do
        assert.matches("step 2 failed in its update %(it ends badly%), after %d+ of %d+ parameters had been updated on "
          .. "this rank: load a checkpoint", said[i])
      end
    end
  end)

  it("shards each stage's state over the ranks that have the stage", function()
    local cut = "pipeline = { stages = 2, schedule = 'zb_h1' }"
    local list = {}
    for i, zero in ipairs { "stage = 1", "stage = 2", "stage = 3", "stage = 2, reshard_after_forward = 'always'" } do
      list[i] = ("{ clip = 0.5, plan = true, zero = { %s }, %s }"):format(zero, cut)
    end
    local got, all = train(4, list, true)
    same(got[1], got[2], "stage 2")
    same(got[1], got[3], "stage 3")
    near(got[1], got[4], "always")                                      -- sums over the ranks first
    local plans = {}
    for plan in all[0].text:gmatch "it sends [^\n]* of gradients to other processes, ([^\n]*)" do
      plans[#plans + 1] = plan:gsub("each .*", "each")
    end
    local once = "once, and keeps them until the last"
    assert.same({ once, once, "in 6 backwards, each" }, plans)
  end)

  -- Settings of 2 stages by name: the description of rank 0's row, and the layers that the rank holds.
  it("follows its configuration", function()
    local said = {}
    local all = lib.check(folder, 2, [[
      local gpt2 = require "models.gpt2"
      for _, case in ipairs { { "plain", {} }, { "gpipe", { schedule = "gpipe" } },
        { "interleaved", { schedule = "interleaved", virtual_stages = 2 } }, { "uniform", { partition = "uniform" } },
        { "layout", { partition = "Et|t*5L" } } } do
        case[2].stages = 2
        local model = ps.initialize { quiet = true, model_func = function()
          return gpt2.new("tiny", { n_layer = 6, dropout = 0 })
        end, config = { gradient_accumulation_steps = 4, plan_print = false, pipeline = case[2] } }
        local layers, row = {}, {}
        for i = 0, 5 do
          layers[i + 1] = model:state_dict()["transformer.h." .. i .. ".ln_1.weight"] and i or "-"
        end
        for i, action in ipairs(require("ps.nn.handle").of(model).driver.pipe:actions(4)) do
          row[i] = action[1] .. "." .. action[2] .. "." .. action[3]
        end
        print(case[1] .. " layers " .. table.concat(layers, " "))
        print(case[1] .. " row " .. table.concat(row, " "))
        model:close()
      end
    ]])
    for name, layers, row in all[0].text:gmatch "(%l+) layers ([^\n]*)\n%l+ row ([^\n]*)" do
      said[name] = { layers = layers, row = row }
    end
    assert.equal("0 - - - - -", said.layout.layers)
    assert.equal("0 1 2 - - -", said.uniform.layers)
    assert.not_equal(said.plain.layers, said.layout.layers)
    assert.not_equal(said.plain.row, said.gpipe.row)                    -- 1f1b is the default
    assert.truthy(said.interleaved.row:find("%.1%."), said.interleaved.row)       -- the row has a second virtual stage
    assert.is_nil(said.plain.row:find("%.1%.", 1))
  end)

  -- With zb_v, one rank has the first and the last virtual stage. With the others, two ranks have them.
  local tied_one, tied = run(1, "{ tied = true, clip = 0.5 }"), {}
  for i, schedule in ipairs { "'1f1b'", "'gpipe'", "'interleaved', virtual_stages = 2",
    "'looped_bfs', virtual_stages = 3", "'zb_h1'", "'zb_v'" } do
    tied[i] = run(2, ("{ tied = true, clip = 0.5, pipeline = { stages = 2, schedule = %s } }"):format(schedule))
  end
  local stressed = run(2, "{ tied = true, clip = 0.5, stress = true, pipeline = { stages = 2, schedule = 'zb_v' } }")
  local of_three = run(3, "{ tied = true, clip = 0.5, pipeline = { stages = 3, schedule = 'gpipe' } }")
  it("has the same bits under every schedule if the first and the last stage share a table", function()
    for i = 2, #tied do same(tied[1](), tied[i](), i) end
    same(tied[1](), stressed(), "chunks move at every pin")
    near(tied_one(), tied[1](), "one process adds the table's gradients in another order")
    same(tied[1](), of_three(), "three stages")
  end)

  -- The parameter is used in the first, the second and the third stage.
  local thrice, once = {}, run(1, "{ tied = true, thrice = true }")
  for i, schedule in ipairs { "gpipe", "zb_h1" } do
    thrice[i] = run(3, ("{ tied = true, thrice = true, pipeline = { stages = 3, schedule = '%s', "
      .. "partition = 'Ett|tt|ttL' } }"):format(schedule))
  end
  it("has them if three virtual stages use one table", function()
    same(thrice[1](), thrice[2](), "zb_h1")
    near(once(), thrice[1](), "one process")
  end)
end)
