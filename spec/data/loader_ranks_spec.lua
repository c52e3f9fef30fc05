-- SPDX-License-Identifier: BSD-3-Clause
-- The loader on several ranks: together they return the rows of one process, in its order, from epoch to epoch and
-- when a run continues with another number of ranks.
local ps = require "ps"
local ffi = require "ffi"

local CASES = tonumber(os.getenv("PS_LOADER_CASES")) or 40

local path

setup(function()
  path = os.tmpname()
  local ids = ffi.new("int32_t[?]", 3000)
  for i = 0, 2999 do ids[i] = i end                        -- the first token identifies a row
  ps.data.write_tokens(path, ids, { n = 3000, width = 2 })
end)
teardown(function() os.remove(path) end)

-- Returns one loader per rank.
local function world(size, options)
  local loaders = {}
  for rank = 0, size - 1 do
    local own = { shards = { path }, rank = rank, world_size = size }
    for key, value in pairs(options) do own[key] = value end
    loaders[rank + 1] = ps.data.loader(own)
  end
  return loaders
end

-- Returns the next batch of all ranks as rows of x and y, and the offset of each rank's random numbers for dropout.
local function rows_of(loaders, into)
  for _, loader in ipairs(loaders) do
    local x, y = loader:next()
    local first = tonumber(ps.rng().sample)
    local xs, ys = x:tolist(), y:tolist()
    for i = 1, #xs do
      into[#into + 1] = ("%d: %s | %s"):format(first + i - 1, table.concat(xs[i], ","), table.concat(ys[i], ","))
    end
  end
end

local function rows(loaders, steps)
  local all = {}
  for _ = 1, steps do rows_of(loaders, all) end
  return all
end

local function divisors(n)
  local list = {}
  for d = 1, n do if n % d == 0 then list[#list + 1] = d end end
  return list
end

local function fails(words, fn)
  local ok, problem = pcall(fn)
  assert.falsy(ok)
  for _, word in ipairs(words) do assert.truthy(tostring(problem):find(word, 1, true), tostring(problem)) end
end

describe("the loader on several ranks", function()
  it("gives the rows of one process in order, and continues with any number of ranks", function()
    local seed = tonumber(os.getenv("PS_LOADER_SEED"))
    for case = seed or 1, seed or CASES do
      math.randomseed(case)
      local function draw(n) return math.random(n) end
      local global = ({ 1, 2, 4, 6, 8, 12, 30 })[draw(7)]
      local options = { seq = draw(9), shuffle = draw(2) == 1, seed = draw(1000), ahead = draw(3), vocab = 3000 }
      options.first = draw(200) - 1
      options.last = options.first + global * options.seq * (1 + draw(5)) + options.seq + draw(options.seq)
      local sizes = divisors(global)
      local function loaders(size)
        options.batch = global / size
        return world(size, options)
      end
      local label = ("PS_LOADER_SEED=%d: global batch %d"):format(case, global)
      local one = loaders(1)
      local steps = 2 * one[1].batches + draw(4)           -- ends in the third epoch
      local want = rows(one, steps)
      local n = sizes[draw(#sizes)]
      local many, got, done = loaders(n), {}, 0
      while done < steps do                                -- runs of some steps each, with different world sizes
        local now = math.min(steps - done, draw(steps))
        for _ = 1, now do rows_of(many, got) end
        done = done + now
        local state = many[draw(n)]:state_dict()           -- the state of any rank, since all are equal
        assert.same(state, many[1]:state_dict(), label)
        n = sizes[draw(#sizes)]
        many = loaders(n)
        for _, loader in ipairs(many) do loader:load_state_dict(state) end
      end
      assert.same(want, got, label)
    end
  end)

  it("gives each window once per epoch", function()
    local loaders, seen, count = world(3, { batch = 2, seq = 4, seed = 5, last = 4 * 31 }), {}, 0
    assert.equal(5, loaders[1].batches)
    for _, loader in ipairs(loaders) do
      for x in loader:epoch() do
        for _, row in ipairs(x:tolist()) do
          assert.falsy(seen[row[1]])
          seen[row[1]], count = true, count + 1
        end
      end
    end
    assert.equal(30, count)
  end)

  it("continues with another global batch if that is exact", function()
    local function loader(batch, size, rank)
      return ps.data.loader { shards = { path }, batch = batch, seq = 5, seed = 2, last = 5 * 34, world_size = size,
        rank = rank }
    end
    local eight = loader(2, 4)                             -- 33 windows are 4 batches of 8
    for _ = 1, 3 do eight:next() end
    local state = eight:state_dict()
    local want = loader(1, 1)
    for _ = 1, 24 do want:next() end
    for _, case in ipairs { { 2, 1 }, { 3, 4 }, { 4, 3 }, { 6, 2 }, { 1, 24 } } do
      local here = loader(case[1], case[2])
      here:load_state_dict(state)
      assert.same({ epoch = 0, batch = 24 / (case[1] * case[2]) }, here:position())
    end
    local three = loader(3, 1)
    three:load_state_dict(state)
    local x = three:next():tolist()
    for i = 1, 3 do assert.same(want:next():tolist()[1], x[i]) end
    fails({ "24 samples of epoch 0", "3 batches of 8 rows", "10 rows (5 on each of 2 ranks)", "divides 24",
      "the old 8" }, function() loader(5, 2):load_state_dict(state) end)
    eight:next()                                           -- the epoch has ended, although a 33rd window is left
    local ten, three_again = loader(5, 2, 1), loader(3, 1)
    for _, here in ipairs { ten, three_again } do
      here:load_state_dict(eight:state_dict())
      assert.same({ epoch = 0, batch = here.batches }, here:position())
      here:next()
      assert.same({ epoch = 1, batch = 1 }, here:position())
    end
  end)

  it("reads states of versions without ranks, and refuses invalid ones", function()
    local options = { shards = { path }, batch = 2, seq = 5, seed = 2, world_size = 2 }
    local loader = ps.data.loader(options)
    loader:load_state_dict { position = { epoch = 1, batch = 7 }, batch = 4, seq = 5, shuffle = true, seed = "2",
      first = 0, last = 3000 }
    assert.same({ epoch = 1, batch = 7 }, loader:position())
    fails({ "seq = 6", "this one has 5" }, function()
      loader:load_state_dict { position = { epoch = 1, batch = 7 }, batch = 4, seq = 6 }
    end)
    fails({ "not the state of a loader" }, function()
      loader:load_state_dict { seq = 5, shuffle = true, seed = "2", first = 0, last = 3000 }
    end)
  end)

  it("refuses invalid ranks", function()
    local function loader(rank, size)
      return function() ps.data.loader { shards = { path }, batch = 2, seq = 5, rank = rank, world_size = size } end
    end
    fails({ "rank must be 0 to world_size - 1, not 2 with a world_size of 2" }, loader(2, 2))
    fails({ "not -1" }, loader(-1, 2))
    fails({ "not 0 with a world_size of 0" }, loader(0, 0))
    fails({ "rank is 0.5, not a whole number" }, loader(0.5, 2))
    fails({ "world_size is a string, not a whole number" }, loader(0, "two"))
    fails({ "2 x 5 on each of 1000 ranks needs" }, loader(0, 1000))
  end)
end)

describe("loaders of ranks that train together", function()
  local lib = require "spec.ranks_lib"
  if lib.no_gloo() then return pending(lib.no_gloo()) end
  local folder

  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  -- Two ranks train for a moment, each with its own options. Returns the last output of each.
  local function train(options)
    local all = lib.run(folder, 2, lib.begin(folder) .. ([[
      local gpt2 = require "models.gpt2"
      if rank == 0 then
        for i = 0, 1 do
          local f = assert(io.open(folder .. "/text" .. i, "wb"))
          f:write(("some words to learn "):rep(200), i)
          f:close()
        end
      end
      group:barrier()
      local model, optimizer = ps.initialize { quiet = true, config = { train_micro_batch_size_per_gpu = 2,
        plan_print = false, optimizer = { type = "AdamW", params = { lr = 1e-3 } }, zero_optimization = { stage = 1 } },
        model_func = function() return gpt2.new "tiny" end }
      local options = { file = folder .. "/text0", batch = 2, seq = 16, seed = 1 }
      for key, value in pairs((%s)(rank)) do options[key] = value end
      local loader = ps.data.loader(options)
      local ok, problem = pcall(function()
        for _ = 1, 3 do
          local x, y = loader:next()
          model:backward(model(x, y))
          optimizer:step()
        end
      end)
      print(ok and "trained" or tostring(problem))
    ]]):format(options))
    assert.same({ 0, 0 }, { all[0].code, all[1].code }, all[0].text .. all[1].text)
    return all[0].text, all[1].text
  end

  it("are refused if they read different data, in different orders or sizes", function()
    for options, words in pairs {
      ["function(rank) return { file = folder .. '/text' .. rank } end"] = "4001 tokens in 1 shards (sample ",
      ["function(rank) return { seed = rank } end"] = "shuffled with seed 1; on rank 0 4001 tokens",
      ["function(rank) return { split = { 0, rank == 0 and 1 or 0.5 } } end"] = "0 to 2000 of them in rows of 16",
    } do
      local said = { train(options) }
      for i = 1, 2 do
        assert.matches("the ranks' loaders read different data: on rank 1 ", said[i], 1, true)
        assert.matches(words, said[i], 1, true)
      end
    end
  end)

  it("train if they read the same data, or explicitly different rows", function()
    local apart = "function(rank) return { file = folder .. '/text' .. rank, rank = 0, world_size = 1 } end"
    for _, options in ipairs { "function() return {} end", apart } do
      assert.same({ "trained\n", "trained\n" }, { train(options) })
    end
  end)
end)
