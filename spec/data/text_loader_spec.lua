-- SPDX-License-Identifier: BSD-3-Clause
-- A loader of texts: rows, padding, labels and order compared with batches written out by hand, on one rank and
-- several, and after a resume.
local ps = require "ps"
local gpt2 = require "models.gpt2"
local check = require "spec.check_lib"
local ranks_lib = require "spec.ranks_lib"

local bytes = ps.tokenizer.bytes()

local function ids_of(text) return { text:byte(1, #text) } end

-- Returns texts of 1 to 5 bytes. The first byte identifies a text.
local function texts(n)
  local list = {}
  for i = 1, n do list[i] = string.char(64 + i) .. ("x"):rep((i - 1) % 5) end
  return list
end

-- Returns the first bytes of the texts that a loader returns in `count` batches.
local function given(loader, count)
  local list = {}
  for _ = 1, count do
    for _, row in ipairs(loader:next().input_ids:tolist()) do list[#list + 1] = string.char(row[1]) end
  end
  return list
end

describe("ps.data.loader of texts", function()
  it("pads rows at their ends, and ignores padding in the labels", function()
    local loader = ps.data.loader { texts = { "ab", "abcd", "xyz", "q" }, tokenizer = bytes, batch = 2, seq = 3,
      shuffle = false }
    local first = loader:next()
    assert.same({ { 97, 98, 0 }, { 97, 98, 99 } }, first.input_ids:tolist())
    assert.same({ { 1, 1, 0 }, { 1, 1, 1 } }, first.attention_mask:tolist())
    assert.same({ { 97, 98, -100 }, { 97, 98, 99 } }, first.labels:tolist())
    local second = loader:next()
    assert.same({ ids_of "xyz", { 113, 0, 0 } }, second.input_ids:tolist())
    assert.same({ ids_of "xyz", { 113, -100, -100 } }, second.labels:tolist())
    assert.equal("int32", second.labels:dtype())
    assert.matches("4 texts, 1 of them cut to 3 tokens, batches of 2, 2 per epoch", tostring(loader))
  end)

  it("pads to the longest row of the batch, or to seq", function()
    local function width(padding)
      return ps.data.loader { texts = { "ab", "abc" }, tokenizer = bytes, batch = 2, seq = 8, padding = padding,
        shuffle = false }:next().input_ids:size(1)
    end
    assert.same({ 3, 3, 8 }, { width(), width "longest", width "max_length" })
  end)

  it("gives each text once per epoch, in an order drawn by the seed and the epoch", function()
    local function loader(seed, shuffle)
      return ps.data.loader { texts = texts(24), tokenizer = bytes, batch = 4, seq = 8, seed = seed, shuffle = shuffle }
    end
    local plain, one = given(loader(1, false), 6), loader(1)
    local first, second = given(one, 6), given(one, 6)
    local other = given(loader(2), 6)
    assert.same(first, given(loader(1), 6))
    local orders = {}
    for _, list in ipairs { plain, first, second, other } do
      orders[table.concat(list)] = true
      table.sort(list)
      assert.same(plain, list)
    end
    local count = 0
    for _ in pairs(orders) do count = count + 1 end
    assert.equal(4, count)
  end)

  it("leaves the last texts out, or gives them in a smaller batch", function()
    local function sizes(drop_last)
      local list = {}
      for batch in ps.data.loader { texts = texts(10), tokenizer = bytes, batch = 4, seq = 8, drop_last = drop_last } do
        list[#list + 1] = batch.input_ids:size(0)
      end
      return list
    end
    assert.same({ 4, 4 }, sizes())
    assert.same({ 4, 4, 2 }, sizes(false))
  end)

  it("gives ranks different rows, together those of one process, and continues with any number of ranks", function()
    local function loader(rank, size, drop_last)
      return ps.data.loader { texts = texts(22), tokenizer = bytes, batch = 4 / size, seq = 8, seed = 3, rank = rank,
        world_size = size, drop_last = drop_last }
    end
    for _, drop_last in ipairs { true, false } do
      local want = given(loader(0, 1, drop_last), 12)
      for _, size in ipairs { 1, 2 } do
        local all, got = {}, {}
        for rank = 0, size - 1 do all[rank + 1] = loader(rank, size, drop_last) end
        for batch = 1, 12 do
          for _, one in ipairs(all) do
            for _, text in ipairs(given(one, 1)) do got[#got + 1] = text end
          end
          if batch == 4 then                               -- on one rank instead of two, or two instead of one
            local state = all[1]:state_dict()
            size = 3 - size
            all = {}
            for rank = 0, size - 1 do
              all[rank + 1] = loader(rank, size, drop_last)
              all[rank + 1]:load_state_dict(state)
            end
          end
        end
        assert.same(want, got)
      end
    end
    local state = loader(0, 1):state_dict()
    check.fails_saying({ "the saved loader has texts = " }, function()
      ps.data.loader { texts = texts(23), tokenizer = bytes, batch = 4, seq = 8, seed = 3 }:load_state_dict(state)
    end)
  end)

  it("trains by ps.train.run, and the loss depends only on the targets", function()
    ps.manual_seed(1)
    local model = gpt2.new("tiny", { dropout = 0 })
    local loader = ps.data.loader { texts = { "hello", "hi", "what is it", "so" }, tokenizer = bytes, batch = 4,
      seq = 16, shuffle = false }
    local batch = loader:next()
    local sum, count = 0, 0
    ps.no_grad(function()
      for _, text in ipairs { "hello", "hi", "what is it", "so" } do             -- each text alone, without padding
        local ids = ids_of(text)
        local logits = model(ps.tensor({ ids }, { dtype = "int32" })):squeeze(0)
        for i = 1, #ids - 1 do
          sum = sum - logits[i - 1]:log_softmax(-1)[ids[i + 1]]:item()
          count = count + 1
        end
      end
      assert.near(sum / count, model(batch).loss:item(), 1e-5)
    end)
    loader:seek { epoch = 0, batch = 0 }
    local result = ps.train.run { model = model, optimizer = ps.optim.AdamW(model:parameters(), { lr = 1e-2 }),
      loader = loader, steps = 20, quiet = true }
    assert.truthy(result.loss < sum / count / 2, result.loss)
  end)

  it("refuses invalid options by name", function()
    local function fails(options, ...)
      local all = { texts = { "a", "b" }, tokenizer = bytes, batch = 1, seq = 4 }
      for key, value in pairs(options) do all[key] = value end
      check.fails_saying({ ... }, function() ps.data.loader(all) end)
    end
    fails({ file = "x.bin" }, "file is for token shards, not for texts")
    check.fails_saying({ "padding applies only to texts" }, function()
      ps.data.loader { file = "x.bin", padding = "longest", batch = 1, seq = 4 }
    end)
    check.fails_saying({ "the tokenizer, which texts need" }, function()
      ps.data.loader { texts = { "a" }, batch = 1, seq = 4 }
    end)
    fails({ texts = { "a", 7 } }, "texts[2] is a number, not a string")
    fails({ texts = { "a", "" } }, "texts[2] has no tokens")
    fails({ batch = 3 }, "2 texts are fewer than a batch of 3", "drop_last = false")
    fails({ padding = "longst" }, "did you mean 'longest'?")
    fails({ texts = texts(9), batch = 2, world_size = 2, rank = 0, drop_last = false },
      "has only 1, too few for 2 ranks")
  end)

  it("gets the rows of this rank from ps.init_distributed", function()
    if ranks_lib.no_gloo() then return pending(ranks_lib.no_gloo()) end
    local folder = ranks_lib.folder()
    local all = ranks_lib.check(folder, 2, [[
      local loader = ps.data.loader { texts = { "a", "b", "c", "d" }, tokenizer = ps.tokenizer.bytes(), batch = 1,
        seq = 4, shuffle = false }
      print(("rows %d %d"):format(loader:next().input_ids:item(), loader:next().input_ids:item()))
    ]])
    ranks_lib.remove(folder)
    assert.matches("rows 97 99", all[0].text)
    assert.matches("rows 98 100", all[1].text)
  end)
end)
