-- SPDX-License-Identifier: BSD-3-Clause
-- ps.data.loader with stream = true: the same batches, positions and cache as without, rows that are read ahead of the
-- batches that need them and not before, and errors at the batch that needs the row.
local lfs = require "lfs"
local ps = require "ps"
local paths = require "ps.paths"
local check = require "spec.check_lib"
local copied = require "ps.core.copied"
local tokens = require "spec.tokenizer_lib"
local fails = check.fails

local TEMPLATE = "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
  .. "[{{ m.role }}]{{ m.content }};{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
local folder, tok, scratch

setup(function()
  folder = tokens.gpt2({ { "a", "b" } }, { ["tokenizer_config.json"] = { chat_template = TEMPLATE } })
  tok = ps.tokenizer.from_pretrained(folder)
  scratch = os.tmpname()
  os.remove(scratch)
  lfs.mkdir(scratch)
end)
teardown(function()
  tokens.remove(folder)
  os.execute("rm -rf " .. scratch)
end)

local function talk(i)
  return { messages = { { role = "user", content = ("a"):rep(1 + i * 7 % 11) },
    { role = "assistant", content = ("b"):rep(1 + i * 5 % 13) } } }
end

local function list_of(n, make)
  local rows = {}
  for i = 1, n do rows[i] = (make or talk)(i) end
  return rows
end

-- Returns a loader, and a function that returns how many rows were read.
local function loader(rows, more)
  local read = 0
  local source = type(rows) == "cdata" and rows or ps.data.table(rows):map(function(row)
    read = read + 1
    return row
  end)
  local options = { table = source, tokenizer = tok, batch = 4, seq = 64, seed = 5, stream = true }
  for key, value in pairs(more or {}) do options[key] = value end
  return ps.data.loader(options), function() return read end
end

-- Rows with an error: of a thread, of the template, and of a loader with too_long = "error".
local UNTRAINED = '{"messages": [{"role": "user", "content": "x"}]}'
local CRITIC = '{"messages": [{"role": "critic", "content": "x"}, {"role": "assistant", "content": "y"}]}'
local LONG = ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "%s"}]}'):format(
  ("y"):rep(90))

-- Returns a table of n conversations in the file `name`. `bad` has other rows by number.
local function lines(n, bad, name)
  local path = scratch .. "/" .. (name or "bad.jsonl")
  local text = {}
  for i = 1, n do text[i] = bad[i] or require("cjson").encode(talk(i)) end
  check.write(path, table.concat(text, "\n") .. "\n")
  return ps.data.table(path)
end

local bytes = check.bytes

local function same_batch(a, b)
  assert.equal(a == nil, b == nil)
  for name, t in pairs(a or {}) do
    assert.same(t:shape(), b[name]:shape())
    assert(bytes(t) == bytes(b[name]), name)
  end
  return a ~= nil
end

local function same_epochs(rows, more, epochs)
  local plain = copied(more)
  plain.stream = false
  local a, b = loader(rows, more), loader(rows, plain)
  for _ = 1, epochs do
    repeat
      assert.same(b:position(), a:position())
      local goes_on = same_batch(b(), a())
    until not goes_on
  end
  assert.equal(tostring(b), tostring(a))
end

describe("a loader that tokenizes while it trains", function()
  it("has the batches of a loader that tokenizes before", function()
    local rows = list_of(101)
    for _, more in ipairs {
      { packing = true, window = 30 }, { group_by_length = true, window = 64, accumulate = 2 }, { too_long = "drop",
        seq = 40 }, { shuffle = false, too_long = "left", seq = 30 }, { loss_weights = "example", accumulate = 3 },
      { drop_last = true, pad_to_multiple_of = 8 }, { rank = 1, world_size = 2, packing = true, window = 20 },
      { packing = true }, { ahead = 5, batch = 7 },
    } do same_epochs(rows, more, 2) end
    local ids = list_of(50, function(i) return { input_ids = { i, i + 1, 3 }, labels = { -100, 7, 3 },
      loss_weights = { 1, 0.5, i } } end)
    same_epochs(ids, { loss_weights = "token", packing = true, window = 9 }, 2)
    local of_script = setmetatable({ apply_chat_template = function(_, ...) return tok:apply_chat_template(...) end },
      { __index = tok })
    same_epochs(list_of(9), { tokenizer = of_script }, 2)
    for _, exhausted in ipairs { "leave", "repeat", "stop" } do
      local few, many = ps.data.table(list_of(12)), ps.data.table(list_of(70))
      local mixed = ps.data.mix({ { few, 0.5 }, { many, 0.5 } }, exhausted ~= "leave" and { exhausted = exhausted }
        or nil)
      same_epochs(mixed, { packing = true, window = 16 }, 2)
    end
  end)

  it("reads rows ahead of the batches that need them, and not before", function()
    local rows = list_of(1000)
    local one, read = loader(rows)
    local before
    for i = 1, 100 do
      one:next()
      local ahead = read() - 4 * i
      assert(ahead <= 4 * 4 + 2 and ahead >= 0, ahead)      -- `ahead` batches, one in use, one being made
      if i > 1 then assert(read() - before <= 8, read()) end
      before = read()
    end
    one, read = loader(rows, { packing = true, window = 100 })
    local steps, largest = 0, 0
    one:next()
    assert(read() < 200, read())                           -- a window, and a part of the next
    repeat
      before = read()
      local goes_on = one() ~= nil
      steps = steps + 1
      if goes_on then largest = math.max(largest, read() - before) end
    until not goes_on
    assert.equal(1001, read())                             -- and one to recognise the form
    assert(steps > 60 and largest < 100, largest)          -- a window's rows are read over several batches
  end)

  it("raises a row's error at the batch that needs the row", function()
    for want, bad in pairs {
      ["none of its"] = UNTRAINED,
      ["no critics"] = CRITIC,
      ["no role 'asistant'"] = '{"messages": [{"role": "user", "content": "x"}, {"role": "asistant", "content": "y"}]}',
      ["tokens, more than seq = 64"] = LONG,
    } do
      local one = loader(lines(60, { [42] = bad }), { shuffle = false, too_long = "error", cache = false })
      for _ = 1, 10 do assert.equal(4, one:next().input_ids:size(0)) end
      for _ = 1, 2 do fails(function() one:next() end, "bad.jsonl:42", want) end
      fails(function() return one.batches end, "bad.jsonl:42", want)
      one = loader(lines(60, { [42] = bad }), { shuffle = false, too_long = "error", cache = false, packing = true,
        window = 20 })
      local given = 0
      fails(function() for batch in one do given = given + batch.input_ids:size(0) end end, "bad.jsonl:42")
      assert(given >= 4 and given < 30, given)
    end
    local one = loader(list_of(3, function(i) return { messages = { { role = "user", content = ("a"):rep(90) },
      { role = "assistant", content = ("b"):rep(i) } } } end), { batch = 1 })
    for _ = 1, 2 do
      fails(function() one:next() end, "0 rows are fewer than a batch of 1", "3 of more than seq = 64")
    end
  end)

  it("raises the error of the first of several bad rows", function()
    for _, case in ipairs {
      { 60, 41, LONG, 42, UNTRAINED }, { 60, 41, UNTRAINED, 42, LONG },
      { 60, 41, UNTRAINED, 43, CRITIC }, { 60, 41, CRITIC, 42, UNTRAINED }, { 60, 41, LONG, 43, CRITIC },
      { 1500, 10, UNTRAINED, 900, UNTRAINED },             -- more rows than a stream queues
    } do
      local rows = lines(case[1], { [case[2]] = case[3], [case[4]] = case[5] })
      local one = loader(rows, { shuffle = false, too_long = "error", cache = false })
      for _ = 1, 2 do fails(function() return one.batches end, ("bad.jsonl:%d"):format(case[2])) end
    end
    local rows = lines(60, { [5] = UNTRAINED, [25] = CRITIC })
    fails(function() loader(rows, { stream = false, cache = false }) end, "bad.jsonl:5: none")
    -- rows that the first epoch leaves out
    local mixed = ps.data.mix({ { lines(12, {}, "few.jsonl"), 0.5 }, { lines(70, { [60] = UNTRAINED, [65] = CRITIC }),
      0.5 } }, { exhausted = "stop" })
    local one = loader(mixed, { shuffle = false, cache = false })
    for _ = 1, 2 do fails(function() return one.batches end, "bad.jsonl:60: none") end
  end)

  it("reads all rows when a script asks for what only all of them tell", function()
    for _, ask in ipairs { function(l) return l.batches end, function(l) return l:size() end, tostring,
      function(l) return l:state_dict() end, function(l) l:seek { epoch = 1, batch = 2 } end } do
      local rows = list_of(200)
      local one, read = loader(rows, { packing = true, window = 32 })
      one:next()
      assert(read() < 100)
      ask(one)
      assert.equal(201, read())
    end
    local one, other = loader(list_of(200), { packing = true, window = 32 }), loader(list_of(200), { packing = true,
      window = 32, stream = false })
    for _ = 1, 3 do one:next() end
    local saved = one:state_dict()
    other:load_state_dict(saved)
    local third = loader(list_of(200), { packing = true, window = 32 })
    third:load_state_dict(saved)
    for _ = 1, 30 do
      local batch = one:next()
      same_batch(batch, other:next())
      same_batch(batch, third:next())
    end
  end)

  it("writes the cache that a loader without it writes", function()
    local rows = lines(100, {}, "chats.jsonl")
    local function run(stream, cache)
      local one = loader(rows, { stream = stream, cache = cache, window = 16, packing = true,
        date = "2026-01-01" })
      local list = {}
      for batch in one do list[#list + 1] = bytes(batch.input_ids) end
      return table.concat(list)
    end
    local function file(cache)
      for name in lfs.dir(cache) do
        if name:find "%.examples$" then return name, check.read(cache .. "/" .. name) end
      end
    end
    local want = run(false, scratch .. "/a")
    assert.equal(want, run(true, scratch .. "/b"))
    local name, bytes_a = file(scratch .. "/a")
    local other, bytes_b = file(scratch .. "/b")
    assert(name == other and bytes_a == bytes_b)
    os.remove(scratch .. "/b/" .. name)                    -- an earlier loader maps the file
    check.write(scratch .. "/b/" .. name, bytes_a:sub(1, 100))     -- an incomplete file is not used
    assert.equal(want, run(true, scratch .. "/b"))
    assert.equal(bytes_a, (select(2, file(scratch .. "/b"))))
    assert.equal(want, run(true, scratch .. "/b"))
  end)

  it("keeps the tokens if the cache cannot be written", function()
    local rows, cache = lines(40, {}, "full.jsonl"), scratch .. "/full"
    local function files()
      local n = -2
      for _ in lfs.dir(cache) do n = n + 1 end
      return n
    end
    local function run(stream)
      local one = loader(rows, { stream = stream, cache = cache, date = "2026-01-01" })
      ps.C.ps_test_fail_file(0, 2 ^ 40, 28)                -- ENOSPC
      local list = {}
      for _ = 1, 2 do for batch in one do list[#list + 1] = bytes(batch.input_ids) end end
      return list
    end
    local want = {}
    local plain = loader(rows, { stream = false, cache = false, date = "2026-01-01" })
    for _ = 1, 2 do for batch in plain do want[#want + 1] = bytes(batch.input_ids) end end
    local ok, got = pcall(run, true)
    ps.C.ps_test_fail_file(-1, 0, 0)
    assert(ok, tostring(got))
    assert.same(want, got)
    assert.equal(0, files())
    ps.C.ps_test_fail_file(0, 2 ^ 40, 28)
    fails(function() loader(rows, { stream = false, cache = cache }) end, "the token cache",
      "No space left", "cache = false")
    ps.C.ps_test_fail_file(-1, 0, 0)
    assert.equal(0, files())                               -- without waiting for the garbage collector
  end)

  it("is for tables only, and ends at any time", function()
    fails(function() ps.data.loader { texts = { "a" }, tokenizer = tok, batch = 1, seq = 8, stream = true } end,
      "stream applies only to conversations")
    for i = 0, 5 do
      local one = loader(list_of(300), { packing = true, window = 40 })
      for _ = 1, i do one:next() end
      one = nil                                            -- luacheck: ignore
      collectgarbage()
      collectgarbage()
    end
  end)

  it("trains ranks and stages alike", function()
    local script = scratch .. "/ranks.lua"
    check.write(script, ([[
      local ps = require "ps"
      ps.init_distributed { quiet = true, seed = 7 }
      local rows = {}
      for i = 1, 64 do rows[i] = { text = ("ab "):rep(1 + i * 7 %% 9) } end
      local config = { plan_print = false, train_micro_batch_size_per_gpu = 2, gradient_accumulation_steps = 2,
        optimizer = { type = "AdamW", params = { lr = 1e-2 } } }
      if arg[1] == "pipeline" then config.pipeline = { stages = 2 }
      else config.zero_optimization = { stage = tonumber(arg[1]) } end
      local model, optimizer = ps.initialize { quiet = true, config = config, model_func = function()
        return require("models.gpt2").new("tiny", { vocab_size = 300, n_positions = 64 })
      end }
      local function made(stream)
        return ps.data.loader { table = ps.data.table(rows), tokenizer = ps.tokenizer.bytes(), batch = 2, seq = 32,
          stream = stream, packing = true, window = 16, accumulate = 2 }
      end
      local loader = made(true)
      for _ = 1, 4 do
        for out in model:micro_batches(loader) do
          ps.print_rank(("%%.17g"):format(out.loss:item()))
          model:backward(out.loss)
        end
        optimizer:step()
      end
      local position = loader:position()
      local here, before = made(true), made(false)
      for _ = 1, 8 do
        local a, b = here:next(), before:next()
        for name, t in pairs(a) do assert(t:equal(b[name]), name) end
      end
      here, before = here:position(), before:position()
      for name, value in pairs(position) do assert(here[name] == value and before[name] == value, name) end
      model:close()
    ]]):format())
    for _, how in ipairs { "3", "pipeline" } do
      local out, code = check.shell(("OMP_NUM_THREADS=1 '%s' '%s/tools/launch.lua' --nproc-per-node 2 '%s' %s"):format(
        paths.exe, paths.root, script, how))
      assert.equal(0, code, out)
      assert.equal(8, select(2, out:gsub("%d%.%d+\n", "")), out)
    end
  end)
end)
