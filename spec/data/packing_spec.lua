-- SPDX-License-Identifier: BSD-3-Clause
-- ps.data.loader of tables: rows that are packed or grouped by length, shortened rows, weights, mixtures, positions
-- that continue with other numbers of ranks and other batches, and the cache of examples.
local ps = require "ps"
local check = require "spec.check_lib"
local tokens = require "spec.tokenizer_lib"
local lfs = require "lfs"
local random = require "ps.core.random"
local fails = check.fails

local bytes = setmetatable({ vocab_size = 2000 }, { __index = ps.tokenizer.bytes() })

-- Returns rows of ids: example i begins with token i, and has `length(i)` tokens.
local function rows_of(n, length, more)
  local list = {}
  for i = 1, n do
    local ids = { i }
    for k = 2, length(i) do ids[k] = 1000 + k end
    list[i] = { input_ids = ids }
    for key, value in pairs(more and more(i, #ids) or {}) do list[i][key] = value end
  end
  return list
end

local function lengths(i) return 2 + i * 37 % 29 end

local function loader(rows, more)
  local options = { table = type(rows) == "table" and ps.data.table(rows) or rows, tokenizer = bytes, batch = 2,
    seq = 40, seed = 5 }
  for key, value in pairs(more or {}) do options[key] = value end
  return ps.data.loader(options)
end

-- Returns the examples in a batch, which are tokens below 1000 with a weight.
local function examples_of(batch, list)
  local ids, labels = batch.input_ids:tolist(), batch.labels:tolist()
  for r, row in ipairs(ids) do
    local counts = false
    for k = 1, #row do counts = counts or labels[r][k] ~= -100 end
    for _, id in ipairs(counts and row or {}) do if id > 0 and id < 1000 then list[#list + 1] = id end end
  end
  return list
end

local function epoch_of(one)
  local list = {}
  for batch in one do examples_of(batch, list) end
  return list
end

local function sorted(list)
  local copy = { unpack(list) }
  table.sort(copy)
  return copy
end

local function upto(n)
  local list = {}
  for i = 1, n do list[i] = i end
  return list
end

describe("packing", function()
  it("fills rows with whole examples, whose positions and segments begin again", function()
    local one = loader(rows_of(200, lengths), { packing = true })
    local list, used, places = {}, 0, 0
    for batch in one do
      local ids, labels = batch.input_ids:tolist(), batch.labels:tolist()
      local segments, positions = batch.segment_ids:tolist(), batch.position_ids:tolist()
      assert.equal(40, batch.input_ids:size(1))
      for r, row in ipairs(ids) do
        if #examples_of({ input_ids = batch.input_ids:narrow(0, r - 1, 1), labels = batch.labels:narrow(0, r - 1, 1) },
          {}) == 0 then break end                          -- rows of weight 0
        local segment, example, place = 0, nil, nil
        local function ended() return example == nil or lengths(example) == place end
        for k, id in ipairs(row) do
          if segments[r][k] == 0 then
            assert.same({ 0, 0, -100 }, { id, positions[r][k], labels[r][k] })
            assert.is_true(ended())
          elseif positions[r][k] == 0 then                 -- the beginning of an example, which no position predicts
            assert.is_true(ended())
            segment, example, place = segment + 1, id, 1
            assert.same({ segment, -100 }, { segments[r][k], labels[r][k] })
          else
            assert.equal(1000 + positions[r][k] + 1, id)
            assert.same({ segment, id }, { segments[r][k], labels[r][k] })
            place = place + 1
          end
          used, places = used + (segments[r][k] > 0 and 1 or 0), places + 1
        end
      end
      examples_of(batch, list)
    end
    assert.same(upto(200), sorted(list))
    assert(used / places > 0.93, used / places)
    assert.is_nil(one:next().attention_mask)
  end)

  it("has each example once per epoch, in different orders", function()
    local one = loader(rows_of(50, lengths), { packing = true, window = 16, batch = 3 })
    local first, second = epoch_of(one), epoch_of(one)
    assert.same(upto(50), sorted(first))
    assert.same(upto(50), sorted(second))
    assert.are_not.same(first, second)
    assert.same(first, epoch_of(loader(rows_of(50, lengths), { packing = true, window = 16, batch = 3 })))
    -- Examples stay within windows of the order.
    local plain = epoch_of(loader(rows_of(48, lengths), { batch = 1 }))
    local packed = epoch_of(loader(rows_of(48, lengths), { packing = true, window = 16, batch = 1 }))
    for w = 0, 2 do
      local a, b = {}, {}
      for i = 1, 16 do a[i], b[i] = plain[16 * w + i], packed[16 * w + i] end
      assert.same(sorted(a), sorted(b))
    end
  end)

  it("gives the same rows for any number of ranks and any batch", function()
    for _, more in ipairs { { packing = true, window = 20 }, { group_by_length = true, window = 30 }, {} } do
      local function make(rank, size, batch)
        local options = { rank = rank, world_size = size, batch = batch }
        for key, value in pairs(more) do options[key] = value end
        return loader(rows_of(83, lengths), options)
      end
      local want = epoch_of(make(0, 1, 1))
      assert.same(upto(83), sorted(want))
      math.randomseed(3)
      for _ = 1, 6 do
        local got, state = {}, nil
        repeat                                             -- some batches, then another number of ranks
          local size, batch, all = math.random(1, 3), math.random(1, 4), {}
          for rank = 0, size - 1 do
            all[rank] = make(rank, size, batch)
            if state then all[rank]:load_state_dict(state) end
          end
          for _ = 1, math.random(1, 5) do
            local ended = false
            for rank = 0, size - 1 do
              local given = all[rank]()
              if given == nil then ended = true else examples_of(given, got) end
            end
            if ended then state = "end" break end
          end
          if state ~= "end" then state = all[0]:state_dict() end
        until state == "end"
        assert.same(want, got)
      end
    end
  end)

  it("makes batches in a thread, which changes none of them and ends with the loader", function()
    local function threads()
      local n = 0
      for task in lfs.dir "/proc/self/task" do
        local file = io.open("/proc/self/task/" .. task .. "/comm")
        if file then
          if file:read "*l" == "ps-batches" then n = n + 1 end
          file:close()
        end
      end
      return n
    end
    local function compare(before)
      local one = loader(rows_of(83, lengths), { packing = true, ahead = 1 })
      local many, states = loader(rows_of(83, lengths), { packing = true, ahead = 7 }), {}
      assert.equal(before, threads())
      for i = 1, 3 * one.batches + 3 do                    -- across epochs, whose ends are nil
        states[i] = many:state_dict()
        assert.same(one:state_dict(), states[i])
        local a, b = one(), many()
        assert.equal(a == nil, b == nil)
        for name, t in pairs(a or {}) do assert.equal(check.bytes(t), check.bytes(b[name])) end
      end
      assert.equal(before + 2, threads())
      for _, i in ipairs { #states, 2, 9, 1 } do           -- a thread that is ahead goes back
        many:load_state_dict(states[i])
        local fresh = loader(rows_of(83, lengths), { packing = true })
        fresh:load_state_dict(states[i])
        for _ = 1, 3 do
          local a, b = fresh:next(), many:next()
          for name, t in pairs(a) do assert.equal(check.bytes(t), check.bytes(b[name])) end
        end
      end
    end
    collectgarbage()
    collectgarbage()
    local before = threads()
    compare(before)
    collectgarbage()
    collectgarbage()
    assert.equal(before, threads())
    fails(function() loader(rows_of(9, lengths), { ahead = 0 }) end, "ahead is 0")
  end)

  it("refuses positions of other data and settings", function()
    local state = loader(rows_of(30, lengths), { packing = true }):state_dict()
    for _, case in ipairs { { rows_of(31, lengths), {}, "texts" }, { rows_of(30, lengths), { window = 8 }, "window" },
      { rows_of(30, lengths), { packing = false }, "packing" }, { rows_of(30, lengths), { seed = 6 }, "seed" } } do
      local more = { packing = true }
      for key, value in pairs(case[2]) do more[key] = value end
      fails(function() loader(case[1], more):load_state_dict(state) end, "the saved loader has " .. case[3])
    end
    loader(rows_of(30, lengths), { packing = true, batch = 5 }):load_state_dict(state)
    fails(function() loader(rows_of(30, lengths)):seek { epoch = 0, window = 5, row = 0 } end, "there is no window 5")
  end)

  it("has the same losses and gradients as its examples one by one", function()
    local model = require("models.llama").new("tiny", { vocab_size = 1100 }):eval()
    local one = loader(rows_of(20, lengths), { packing = true, batch = 100 })
    local batch = one:next()
    local loss, n = model(batch).loss, model:count_targets(batch)
    local sum, count = 0, 0
    for _, row in ipairs(rows_of(20, lengths)) do
      local ids = ps.tensor({ row.input_ids }, { dtype = "int32" })
      sum, count = sum + model { input_ids = ids, labels = ids }.loss:item() * (#row.input_ids - 1),
        count + #row.input_ids - 1
    end
    assert.equal(count, n)
    assert.near(sum / count, loss:item(), 3e-6)
  end)
end)

describe("dropout of packed rows", function()
  -- Runs a batch with the masks of dropout of its rows. Returns the sum of the losses, and gradients by name.
  local function run(model, batch)
    local rng = random.state()
    rng.sample, rng.op = 40, 0
    model:zero_grad()
    local loss = model(batch).loss * model:count_targets(batch)
    loss:backward()
    local grads = {}
    for name, p in model:named_parameters() do if p:grad() ~= nil then grads[name] = p:grad():clone() end end
    return loss:item(), grads
  end

  it("does not depend on the other examples of a row", function()
    local function gpt2() return require("models.gpt2").new("tiny", { vocab_size = 1100, dropout = 0.3 }) end
    local function llama()
      local model = require("models.llama").new("tiny", { vocab_size = 1100, attention_dropout = 0.3 })
      return ps.lora.wrap(model, { r = 2, dropout = 0.3, modules_to_save = { "norm" } })
    end
    for family, made in pairs { gpt2 = gpt2, llama = llama } do
      local model = made():train()
      local batch = loader(rows_of(9, lengths), { packing = true, batch = 3 }):next()
      local sum, want = run(model, batch)
      assert.are_not.equal(sum, (run(model:eval(), batch)))
      model:train()
      local segments, seen, all, grads = batch.segment_ids:tolist(), {}, 0, {}
      for r, row in ipairs(segments) do
        for _, segment in ipairs(row) do
          if segment > 0 and not seen[100 * r + segment] then
            seen[100 * r + segment] = true
            local alone = {}                               -- this example at its place, and padding
            for name, t in pairs(batch) do
              local list = t:tolist()
              for q, values in ipairs(list) do
                for k in ipairs(values) do
                  if q ~= r or segments[q][k] ~= segment then values[k] = name == "labels" and -100 or 0 end
                end
              end
              alone[name] = ps.tensor(list, { dtype = "int32" })
            end
            local loss, own = run(model, alone)
            all = all + loss
            for name, g in pairs(own) do grads[name] = grads[name] and grads[name] + g or g end
          end
        end
      end
      local count = 0
      for _ in pairs(seen) do count = count + 1 end
      assert(count >= 6, count)
      assert(math.abs(all - sum) < 2e-6 * sum, ("%s: %.9g, not %.9g"):format(family, all, sum))
      for name, g in pairs(want) do
        local off = (g - grads[name]):abs():max():item()
        assert(off <= 1e-5 * g:abs():max():item(), ("%s: %s is %g off"):format(family, name, off))
      end
    end
  end)
end)

describe("a loader of a table", function()
  it("groups rows of similar length, and pads all batches of a step to one length that repeats", function()
    local function padding(more)
      local one, padded, all, shapes = loader(rows_of(400, function(i) return 2 + i * 37 % 199 end), more), 0, 0, {}
      for batch in one do
        local n = batch.input_ids:numel()
        all, padded = all + n, padded + n - batch.attention_mask:sum():item()
        shapes[batch.input_ids:size(1)] = true
      end
      local count = 0
      for _ in pairs(shapes) do count = count + 1 end
      return padded / all, count
    end
    local plain = padding { seq = 256, batch = 8 }
    local grouped = padding { seq = 256, batch = 8, group_by_length = true }
    assert(grouped < 0.5 * plain, grouped .. " of " .. plain)
    local share, kinds = padding { seq = 256, batch = 8, group_by_length = true, pad_to_multiple_of = 16 }
    assert(share < plain and kinds <= 13, share .. " " .. kinds)
    local one = loader(rows_of(64, lengths), { accumulate = 4, batch = 2, world_size = 2, rank = 1 })
    local other = loader(rows_of(64, lengths), { accumulate = 4, batch = 2, world_size = 2, rank = 0 })
    for _ = 1, 4 do
      local length
      for _ = 1, 4 do
        for _, each in ipairs { one, other } do
          local n = each:next().input_ids:size(1)
          assert.equal(length or n, n)
          length = n
        end
      end
    end
  end)

  it("fills the last batch with rows of weight 0, on each rank", function()
    local model = require("models.gpt2").new("tiny", { vocab_size = 1100, dropout = 0 })
    local shapes, sum, count = {}, 0, 0
    for rank = 0, 2 do
      for batch in loader(rows_of(13, lengths), { batch = 2, world_size = 3, rank = rank }) do
        shapes[#shapes + 1] = batch.input_ids:size(0)
        local n = model:count_targets(batch)
        sum, count = sum + model(batch).loss:item() * n, count + n
      end
    end
    assert.same({ 2, 2, 2, 2, 2, 2, 2, 2, 2 }, shapes)
    local want = 0
    for i = 1, 13 do want = want + lengths(i) - 1 end
    assert.equal(want, count)
    assert.equal(2, loader(rows_of(13, lengths), { batch = 2, world_size = 3, rank = 0, drop_last = true }).batches)
  end)

  it("cuts long examples at either end, drops or refuses them, and counts them", function()
    local rows = rows_of(6, function(i) return i == 3 and 60 or 10 end)
    local function row_of(rule)
      local one = loader(rows, { too_long = rule, shuffle = false, batch = 6 })
      return one:next(), tostring(one)
    end
    local right, said = row_of "right"
    assert.matches("1 of them cut to 40 tokens", said)
    assert.same({ 3, 1002 }, { right.input_ids:tolist()[3][1], right.input_ids:tolist()[3][2] })
    local left = row_of "left".input_ids:tolist()[3]
    assert.same({ 1021, 1060 }, { left[1], left[40] })
    assert.same({ 5, 40 }, { #epoch_of(loader(rows, { too_long = "drop" })),
      #row_of("left").input_ids:tolist()[1] })
    fails(function() loader(rows, { too_long = "error" }) end, "rows[3] has 60 tokens, more than seq = 40")
    fails(function() loader(rows, { too_long = "middle" }) end, "too_long")
    fails(function() loader(rows, { packing = true, group_by_length = true }) end, "give only one of them")
  end)

  it("weighs losses by example, by a field and by token", function()
    local model = require("models.llama").new("tiny", { vocab_size = 1100 }):eval()
    local function weighted(i, n)
      local list = {}
      for k = 1, n do list[k] = (k + i) % 3 / 2 end
      return { share = i % 4, loss_weights = list }
    end
    local function mean(by)                                -- by hand
      local sum, all = 0, 0
      for i, row in ipairs(rows_of(9, lengths, weighted)) do
        local ids = ps.tensor({ row.input_ids }, { dtype = "int32" })
        local logits = model { input_ids = ids }.logits:squeeze(0):log_softmax(-1)
        local n = #row.input_ids
        for k = 2, n do
          local w = by == "example" and row.loss_weights[k] / (n - 1) or row.loss_weights[k]
          if by == "share" then w = w * (i % 4) end
          sum, all = sum - w * logits[k - 2][row.input_ids[k]]:item(), all + w
        end
      end
      return sum / all, all
    end
    for _, by in ipairs { "token", "example", "share" } do
      for _, packing in ipairs { true, false } do
        local batch = loader(rows_of(9, lengths, weighted), { loss_weights = by, packing = packing, batch = 9 }):next()
        local want, all = mean(by)
        assert.near(all, model:count_targets(batch), 1e-4)
        assert.near(want, model(batch).loss:item(), 1e-5)
      end
    end
    fails(function() loader(rows_of(3, lengths), { loss_weights = "absent" }) end,
      "rows[1]: the field 'absent' is missing; a weight must be 0, or a number of 1e-12 to 1e12")
    for _, w in ipairs { -1, 0 / 0, 1e300, 1e39, 1e-44, "1" } do    -- fp32 sums of these, or their inverses, overflow
      fails(function() loader({ { text = "ab", w = w } }, { loss_weights = "w" }) end, "rows[1]: the field 'w' is ")
      fails(function() loader({ { input_ids = { 1, 2 }, loss_weights = { 1, w } } }, { loss_weights = "token" }) end,
        "rows[1]: loss_weights[2] is ")
    end
    fails(function() model { input_ids = ps.ones({ 1, 3 }, { dtype = "int32" }), loss_weights = ps.ones { 1, 3 } } end,
      "the batch has no labels")
  end)
end)

describe("ps.data.mix", function()
  local function two(exhausted, more)
    local mix = ps.data.mix({ { ps.data.table(rows_of(60, lengths)), 0.75 },
      { ps.data.table(rows_of(40, lengths, function(i) return { input_ids = { 500 + i, 1002 } } end)), 0.25 } },
      { exhausted = exhausted })
    local options = { batch = 1 }
    for key, value in pairs(more or {}) do options[key] = value end
    return loader(mix, options)
  end

  it("chooses tables by their weights in every part of an epoch, and each row once", function()
    for _, more in ipairs { { shuffle = true }, { shuffle = false } } do
      local list, first = epoch_of(two(nil, more)), 0
      assert.equal(100, #list)
      for i, id in ipairs(list) do
        if id < 500 then first = first + 1 end
        if i <= 80 then assert(math.abs(first - 0.75 * i) <= 1, ("%d of %d"):format(first, i)) end
      end
      local all = upto(60)
      for i = 1, 40 do all[60 + i] = 500 + i end
      assert.same(all, sorted(list))
    end
    local once = two()
    assert.are_not.same(epoch_of(once), epoch_of(once))
  end)

  it("repeats exhausted tables, or ends with the first of them", function()
    local repeated, counts = epoch_of(two "repeat"), {}
    for _, id in ipairs(repeated) do counts[id] = (counts[id] or 0) + 1 end
    assert(#repeated >= 158 and #repeated <= 161, #repeated)
    for i = 1, 40 do assert.equal(1, counts[500 + i]) end
    for i = 1, 60 do assert(counts[i] >= 2 or i == 60 or counts[i] >= 1) end
    local stopped = epoch_of(two "stop")
    assert(#stopped >= 79 and #stopped <= 81, #stopped)
  end)

  it("packs, and refuses positions of other weights, views and wrong entries", function()
    local packed = epoch_of(two(nil, { packing = true, window = 20 }))
    assert.equal(100, #packed)
    local state = two():state_dict()
    two():load_state_dict(state)
    fails(function() two "repeat":load_state_dict(state) end, "the saved loader has mixture")
    local table_of = ps.data.table(rows_of(3, lengths))
    local mix = ps.data.mix { { table_of, 1 }, { table_of, 2 } }
    assert.equal(6, #mix)
    fails(function() mix:shuffle(1) end,
      "table:shuffle cannot be called on a mixture; call it on the tables before they are mixed")
    fails(function() ps.data.mix { { table_of, 0 } } end, "entry 1 has the weight 0")
    fails(function() ps.data.mix({ { table_of, 1 }, { table_of, 1e-9 } }, { exhausted = "repeat" }) end,
      "an epoch would have about 3e+09 rows, over 1000 times the 6 rows of the tables, since entry 2 has the weight "
      .. "1e-09 of 1")
    assert.equal(6, #ps.data.mix({ { table_of, 1 }, { table_of, 1e-9 } }, { exhausted = "stop" }))
    fails(function() ps.data.mix { { {}, 1 } } end, "entry 1 has a table, not a table of examples")
    fails(function() ps.data.mix { { table_of, 1 }, { mix, 1 } } end, "entry 2 is itself a mixture")
  end)
end)

describe("the cache of examples", function()
  local TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
  local folder, tok, file
  setup(function()
    folder = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template = TEMPLATE } })
    tok = ps.tokenizer.from_pretrained(folder)
    file = folder .. "/chats.jsonl"
  end)
  teardown(function() tokens.remove(folder) end)

  local function write(n)
    local f = assert(io.open(file, "wb"))
    for i = 1, n do
      f:write(('{"messages":[{"role":"user","content":"%s"},{"role":"assistant","content":"%s"}]}\n'):format(
        ("a"):rep(i % 7), ("b"):rep(1 + i % 5)))
    end
    f:close()
  end
  local function open(more)
    local options = { table = ps.data.table(file), tokenizer = tok, batch = 2, seq = 64, cache = folder .. "/cache",
      date = "2026-01-01" }
    for key, value in pairs(more or {}) do options[key] = value end
    return ps.data.loader(options)
  end
  local function cached(one) return one.rows.examples.cached end
  local function files()
    local n = 0
    for name in lfs.dir(folder .. "/cache") do if name:find "%.examples$" then n = n + 1 end end
    return n
  end

  it("is mapped by the next loader of the same file, tokenizer and options, and by no other", function()
    write(40)
    local first = open()
    assert.is_false(cached(first))
    local again = open()
    assert.is_true(cached(again))
    assert.equal(first.texts, again.texts)
    for batch in first do assert.equal(check.bytes(batch.labels), check.bytes(again:next().labels)) end
    assert.is_true(cached(open { seq = 32, packing = true, seed = 9 }))      -- rows are built from the same examples
    assert.is_true(cached(open { date = "2026-01-02" }))   -- the template does not use the date
    for _, more in ipairs { { train_on = "all" }, { table = ps.data.table(file):take(30) } } do
      local one = open(more)
      assert.is_false(cached(one))
      assert.is_true(cached(open(more)))
    end
    assert.is_false(cached(open { table = ps.data.table(file):map(function(row) return row end) }))
    assert.is_false(cached(open { cache = false }))
    assert.equal(3, files())
    write(41)
    assert.is_false(cached(open()))
    assert.equal(41, open().rows.count)
  end)

  it("is another one on another day if the template asks for the date", function()
    local dated = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = {
      chat_template = "{{ strftime_now('%d') }}" .. TEMPLATE } })
    local own = ps.tokenizer.from_pretrained(dated)
    write(5)
    local first = open { tokenizer = own }
    assert.is_true(cached(open { tokenizer = own }))
    local other = open { tokenizer = own, date = "2026-01-02" }
    assert.is_false(cached(other))
    assert.not_equal(first.texts, other.texts)
    tokens.remove(dated)
  end)

  it("is made again if the file is not complete", function()
    write(40)
    assert.is_true(open().rows.count == 40)
    for name in lfs.dir(folder .. "/cache") do
      if name:find "%.examples$" then
        local f = assert(io.open(folder .. "/cache/" .. name, "r+b"))
        f:seek("set", 24)
        f:write "xxxxxxxx"
        f:close()
      end
    end
    assert.is_false(cached(open()))
    assert.is_true(cached(open()))
  end)

  it("is made again if any of its bytes changed", function()
    write(40)
    os.execute(("rm -rf '%s/cache'"):format(folder))
    local first, path = open(), nil
    for name in lfs.dir(folder .. "/cache") do
      if name:find "%.examples$" then path = folder .. "/cache/" .. name end
    end
    local whole = check.read(path)
    for at = 1, #whole, 61 do
      check.write(path, whole:sub(1, at - 1) .. string.char(255 - whole:byte(at)) .. whole:sub(at + 1))
      local again = open()
      assert.is_false(cached(again), at)
      assert.equal(first.texts, again.texts)
    end
    assert.is_true(cached(open()))
  end)

  it("is that of the rows that were read, if the file was replaced after the table was opened", function()
    write(1)
    for _, name in ipairs { "a.jsonl", "a.json", "a.csv", "a.txt" } do
      local path, text = folder .. "/" .. name, name:find "txt" and "file" or nil
      local function replace(word)
        local content = ({ jsonl = '{"text": "%s"}\n', json = '[{"text": "%s"}]', csv = "text\n%s\n", txt = "%s" })[
          name:match "%.(%a+)$"]
        check.write(path .. ".new", content:format(word))
        assert(os.rename(path .. ".new", path))
      end
      local function ids(rows) return open({ table = rows, batch = 1 }):next().input_ids:tolist()[1] end
      replace "old"
      local rows = ps.data.table(path, { text = text })
      replace "new"
      assert.same(tok:encode "old", ids(rows), name)
      assert.same(tok:encode "new", ids(ps.data.table(path, { text = text })), name)
    end
  end)

  it("holds the ids and labels of apply_chat_template, whatever messages, roles and space spell", function()
    local ADDED = { ["258"] = { content = "<|im_start|>", special = true },
      ["259"] = { content = "<|im_end|>", special = true }, ["260"] = { content = "<|user|>", special = true } }
    local swallow = { ["258"] = ADDED["258"], ["259"] = { content = "<|im_end|>", special = true, rstrip = true },
      ["260"] = { content = "<|user|>", special = true, lstrip = true, rstrip = true } }
    local CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    local PIPES = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }} <|im_end|>\n{% endfor %}"
    local STRADDLES = "{% for m in messages %}<|im_start|>{{ m.role }}\n<|im_{{ m.content }}|><|im_end|>{% endfor %}"
    local CONTENTS = { "Hi", "end", " x ", "<|im_end|>", "a<|user|>b", "<|im_end", "|>", "<|im_end|> <|im_end|>" }
    for _, added in ipairs { ADDED, swallow } do
      for _, template in ipairs { CHATML, PIPES, STRADDLES } do
        local home = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template = template,
          eos_token = "<|im_end|>", added_tokens_decoder = added } })
        local own, rows = ps.tokenizer.from_pretrained(home), {}
        for _, content in ipairs(CONTENTS) do
          for _, role in ipairs { "user", "im_end", "<|user|>" } do
            rows[#rows + 1] = { messages = { { role = role, content = content },
              { role = "assistant", content = content .. "y" } } }
          end
        end
        local one = ps.data.loader { table = ps.data.table(rows), tokenizer = own, batch = 1, seq = 256,
          shuffle = false, date = "2026-01-01" }
        local forged = false
        for _, row in ipairs(rows) do
          local ids, mask = own:apply_chat_template(row.messages, { train_on = "assistant", date = "2026-01-01" })
          local batch, labels = one:next(), {}
          local got, want = batch.input_ids:tolist()[1], batch.labels:tolist()[1]
          for k, id in ipairs(ids) do labels[k] = mask[k] == 1 and id or -100 end
          assert.same(ids, { unpack(got, 1, #ids) }, template .. row.messages[1].role .. row.messages[1].content)
          assert.same(labels, { unpack(want, 1, #ids) }, template .. row.messages[1].content)
          forged = forged or own:decode(ids) ~= nil and #own:encode(own:decode(ids)) < #ids
        end
        assert.is_true(forged)                             -- some texts contain special tokens, which must stay text
        tokens.remove(home)
      end
    end
  end)

  it("has the same bytes for one thread and several, with text of users that spells special tokens", function()
    local rows = {}
    for i = 1, 60 do
      rows[i] = { messages = { { role = "user", content = ("a"):rep(i) .. "<|endoftext|>" },
        { role = "assistant", content = ("b"):rep(1 + i % 3) } } }
    end
    local one = ps.data.loader { table = ps.data.table(rows), tokenizer = tok, batch = 1, seq = 128, shuffle = false }
    for i = 1, 60 do
      local ids, mask = tok:apply_chat_template(rows[i].messages, { train_on = "assistant" })
      local batch = one:next()
      assert.same(ids, batch.input_ids:tolist()[1])
      local labels = {}
      for k, id in ipairs(ids) do labels[k] = mask[k] == 1 and id or -100 end
      assert.same(labels, batch.labels:tolist()[1])
    end
  end)

  it("names the file that does not fit on a full disk, and leaves nothing of it", function()
    write(3000)
    local script = os.tmpname()
    local f = assert(io.open(script, "wb"))
    f:write(([[
      local ps = require "ps"
      print(pcall(ps.data.loader, { table = ps.data.table(%q), tokenizer = ps.tokenizer.from_pretrained(%q), batch = 2,
        seq = 64, cache = %q }))
    ]]):format(file, folder, folder .. "/full"))
    f:close()
    local p = assert(io.popen(("cd / && ulimit -f 100; '%s' %s 2>&1"):format(require("ps.paths").exe, script)))
    local out = p:read "*a"
    p:close()
    os.remove(script)
    for _, words in ipairs { "false", "the token cache: cannot write " .. folder .. "/full/", "cache = false" } do
      assert.truthy(out:find(words, 1, true), out)
    end
    for name in lfs.dir(folder .. "/full") do assert.truthy(name == "." or name == "..", name) end
  end)

  it("names the folder that cannot be written to", function()
    write(3)
    fails(function() open { cache = "/proc/nothing" } end, "the cache folder cannot be written to", "/proc/nothing")
  end)
end)
