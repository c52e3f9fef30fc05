-- SPDX-License-Identifier: BSD-3-Clause
-- Packing tensors into chunks (properties over random lists), the search of the chunk size, and the tool that shows it.
local cjson = require "cjson"
local gpt2 = require "models.gpt2"
local pack = require "ps.engine.layout.pack"
local paths = require "ps.paths"

local MI, GIB = 1024 * 1024, 1024 ^ 3

-- Returns a random generator with separate state, so that a failure can be repeated. It returns whole numbers in [low,
-- high].
local function generator(seed)
  local state = seed * 7919 + 1
  return function(low, high)
    state = (state * 16807) % 2147483647
    return low + state % (high - low + 1)
  end
end

local function random_entries(random)
  local entries, dtypes = {}, { "bf16", "bf16", "fp32", "fp16" }
  for i = 1, random(1, 80) do
    local numel = ({ 1, 64, 128, 4800, 70000 })[random(1, 5)] * random(1, 9) - random(0, 1)
    entries[i] = { name = ("h.%d.t%d"):format(math.floor(i / 6), i % 6), numel = numel, dtype = dtypes[random(1, 4)],
      trains = random(0, 4) > 0 }
  end
  return entries
end

local function model_entries(preset, dtype)
  local list = {}
  for name, p in gpt2.new(preset, { dtype = dtype or "bf16", device = "meta" }):named_parameters() do
    list[#list + 1] = { name = name, numel = p:numel(), dtype = p:dtype(), trains = p:needs_grad() }
  end
  return list
end

-- Checks all properties of a layout of `entries`.
local function check(entries, made, options)
  local seen, numel, used, by_group = {}, 0, 0, {}
  for _, chunk in ipairs(made.chunks) do
    local group, at, last, inside = made.groups[chunk.group], 0, 0, 0
    by_group[chunk.group] = (by_group[chunk.group] or 0) + 1
    assert.equal(by_group[chunk.group] - 1, chunk.index)
    assert.equal(0, chunk.numel % pack.UNIT)
    assert.truthy(#chunk.tensors > 0)
    for _, tensor in ipairs(chunk.tensors) do
      local entry = entries[tensor.index]
      assert.is_nil(seen[tensor.index])
      seen[tensor.index] = chunk
      assert.equal(group.dtype .. tostring(group.trains), entry.dtype .. tostring(entry.trains))
      assert.equal(0, tensor.offset % pack.ALIGN)
      assert.truthy(tensor.offset >= at, "tensors overlap")
      assert.truthy(tensor.index > last, "order within a chunk")
      at, last, inside = tensor.offset + entry.numel, tensor.index, inside + entry.numel
    end
    assert.truthy(at <= chunk.numel)
    assert.equal(inside, chunk.used)
    if chunk.alone then
      assert.equal(1, #chunk.tensors)
      assert.truthy(chunk.numel > made.chunk_size)
    else
      assert.truthy(chunk.numel <= made.chunk_size)
    end
    if chunk.alone or not options.uniform then assert.truthy(chunk.numel - at < pack.UNIT + pack.ALIGN) end
    numel, used = numel + chunk.numel, used + inside
  end
  for i in ipairs(entries) do assert.truthy(seen[i], "a tensor is in no chunk") end
  assert.equal(numel, made.numel)
  assert.equal(used, made.used)
  assert.equal(numel - used, made.waste)
  assert.equal(used > 0 and (numel - used) / used or 0, made.waste_share)
  return seen
end

describe("packing", function()
  it("loses nothing, overlaps nothing, aligns everything and counts its waste, on random lists", function()
    for seed = 1, 60 do
      local random = generator(seed)
      local entries = random_entries(random)
      local options = { uniform = random(0, 1) == 1, lookback = ({ nil, 0, 2 })[random(1, 3)] }
      local made = pack.pack(entries, random(1024, 200000), options)
      local home = check(entries, made, options)
      if not options.uniform then                       -- next fit keeps tensors that share a chunk in order
        local newest = {}
        for i in ipairs(entries) do
          local chunk = home[i]
          if not chunk.alone and (options.lookback or 0) == 0 then
            assert.truthy(chunk.index >= (newest[chunk.group] or 0))
            newest[chunk.group] = chunk.index
          end
        end
      end
    end
  end)

  it("gives all chunks except the last one size if requested", function()
    local entries = {}
    for i = 1, 10 do entries[i] = { numel = 3000, dtype = "fp32", trains = true } end
    local made = pack.pack(entries, 8192, { uniform = true })
    local sizes = {}
    for i, chunk in ipairs(made.chunks) do sizes[i] = chunk.numel end
    assert.same({ 8192, 8192, 8192, 8192, 6144 }, sizes)
  end)

  it("gives a large tensor its own chunk and continues with the open one", function()
    local function entry(numel) return { numel = numel, dtype = "bf16", trains = true } end
    local made = pack.pack({ entry(100), entry(5000), entry(100), entry(9000), entry(0) }, 1024)
    assert.equal(2048, made.chunk_size)
    assert.equal(3, #made.chunks)
    assert.same({ { index = 1, offset = 0 }, { index = 3, offset = 128 }, { index = 5, offset = 256 } },
      made.chunks[1].tensors)
    assert.equal(6144, made.chunks[2].numel)
    assert.truthy(made.chunks[3].alone)
  end)

  it("fills gaps of earlier chunks only as far back as it may", function()
    local function entry(numel) return { numel = numel, dtype = "bf16", trains = true } end
    local entries = { entry(3000), entry(4000), entry(1000) }
    assert.equal(3, #pack.pack(entries, 4096).chunks)
    assert.equal(2, #pack.pack(entries, 4096, { lookback = 1 }).chunks)
    assert.equal(2, #pack.pack(entries, 4096, { uniform = true }).chunks)
  end)

  it("takes an empty list", function()
    local made = pack.pack({}, 1024)
    assert.same({ 0, 0, 0, 0 }, { made.numel, made.waste, made.waste_share, #made.chunks })
    assert.equal(0, #pack.search({}).chosen.layout.chunks)
  end)

  it("names the invalid argument", function()
    local function refused(words, ...)
      local ok, err = pcall(...)
      assert.is_false(ok)
      assert.matches(words, err, 1, true)
    end
    local good = { numel = 5, dtype = "bf16", trains = true, name = "w" }
    refused("chunk_size = 12: expected a whole number of elements", pack.pack, { good }, 12)
    refused("chunk_size = nil", pack.pack, { good })
    refused("expected a list of tensors", pack.pack, 5, 1024)
    refused("entry 2 (w): dtype is int32, expected bf16, fp16 or fp32", pack.pack,
      { good, { numel = 5, dtype = "int32", trains = true, name = "w" } }, 1024)
    refused("numel is -1", pack.pack, { { numel = -1, dtype = "bf16", trains = true } }, 1024)
    refused("trains is nil", pack.pack, { { numel = 1, dtype = "bf16" } }, 1024)
    refused("no option 'capacty'", pack.search, { good }, { capacty = 5 })
    refused("capacity = 0: expected a number of bytes above 0", pack.search, { good }, { capacity = 0 })
  end)
end)

describe("the search of the chunk size", function()
  it("keeps GPT-2's state at 14.1 bytes per parameter or less, whatever the limit", function()
    for _, preset in ipairs { "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl" } do
      local entries = model_entries(preset)
      for _, capacity in ipairs { 0, 1.25 * GIB, 6 * GIB } do
        local chosen = pack.search(entries, { capacity = capacity > 0 and capacity or nil }).chosen
        check(entries, chosen.layout, {})
        assert.truthy(chosen.feasible, chosen.why)
        assert.truthy(chosen.bytes_per_param <= 14.1, preset .. " " .. chosen.bytes_per_param)
        assert.truthy(chosen.size >= 4 * MI, "8 MiB of bf16")
      end
      assert.truthy(pack.search(entries, { uniform = true }).chosen.bytes_per_param <= 14.4)
    end
  end)

  it("is deterministic", function()
    local entries = model_entries("gpt2")
    local first = pack.search(entries, { capacity = GIB })
    for _ = 1, 3 do
      local again = pack.search(model_entries("gpt2"), { capacity = GIB })
      assert.same(first.chosen, again.chosen)
      assert.equal(#first.rows, #again.rows)
    end
  end)

  it("leaves room to read ahead", function()
    for _, preset in ipairs { "gpt2", "gpt2-xl" } do
      local entries = model_entries(preset)
      for _, capacity in ipairs { 1.25 * GIB, 2 * GIB, 6 * GIB } do
        local chosen = pack.search(entries, { capacity = capacity }).chosen
        assert.truthy(chosen.bytes <= capacity or pack.SETS * chosen.set_bytes <= capacity)
      end
    end
  end)

  it("reports why no size is feasible", function()
    local chosen = pack.search(model_entries("gpt2-xl"), { capacity = GIB }).chosen
    assert.is_false(chosen.feasible)
    assert.matches("transformer.wte.weight with its state needs 1.05 GiB, more than the budget of 1.00 GiB", chosen.why,
      1, true)
    chosen = pack.search(model_entries("gpt2-xl"), { capacity = 2 * GIB, chunk_size = 64 * MI }).chosen
    assert.is_false(chosen.feasible)
    assert.matches("6 chunks with their state need", chosen.why, 1, true)
  end)

  it("honours a size that is set, and the range", function()
    local entries = model_entries("gpt2")
    local found = pack.search(entries, { chunk_size = 1024 })
    assert.equal(1, #found.rows)
    assert.equal(2048, found.chosen.size)
    check(entries, found.chosen.layout, {})
    found = pack.search(entries, { min = 2 * MI, max = 3 * MI })
    for _, row in ipairs(found.rows) do assert.truthy(row.size >= 2 * MI and row.size <= 3 * MI) end
  end)

  it("begins with smaller sizes for small budgets", function()
    local entries = model_entries("small")
    local state = pack.search(entries).chosen.bytes
    local chosen = pack.search(entries, { capacity = state / 2 }).chosen
    assert.truthy(chosen.feasible, chosen.why)
    assert.truthy(chosen.size < MI)
  end)

  it("counts the state of each group", function()
    local entries = { { numel = 4096, dtype = "fp32", trains = true }, { numel = 4096, dtype = "bf16", trains = false },
      { numel = 4096, dtype = "bf16", trains = true } }
    assert.equal(4096 * (16 + 2 + 14), pack.search(entries).chosen.bytes)
    assert.equal(4096 * (18 + 2 + 18), pack.search(entries, { state_bytes = 18 }).chosen.bytes)
  end)
end)

describe("tools/chunk_size.lua", function()
  local scratch

  local function run(arguments)
    local p = assert(io.popen(("cd '%s' && '%s' '%s/tools/chunk_size.lua' %s 2>&1; echo \"|$?\""):format(scratch,
      paths.exe, paths.root, arguments)))
    local out, code = p:read("*a"):match("^(.*)|(%d+)\n$")
    p:close()
    return out, tonumber(code)
  end

  local function write(name, text)
    local f = assert(io.open(scratch .. "/" .. name, "wb"))
    f:write(text)
    f:close()
  end

  setup(function()
    scratch = os.tmpname()
    os.remove(scratch)
    assert(os.execute("mkdir " .. scratch) == 0)
  end)

  teardown(function() os.execute("rm -rf " .. scratch) end)

  it("prints a table of at most 80 columns and the size to set", function()
    local out, code = run "--model gpt2-xl --host 6GiB"
    assert.equal(0, code)
    for line in out:gmatch("[^\n]+") do assert.truthy(#line <= 80, line) end
    local size = pack.search(model_entries("gpt2-xl"), { capacity = 6 * GIB }).chosen.size
    assert.matches(("\ndefault_chunk_size = %d\n"):format(size), out, 1, true)
    assert.matches(("\n%%*  +%d "):format(size), out)
    assert.matches("group 1: bf16, trained: 1557.6 M, 14 bytes", out, 1, true)
  end)

  it("prints JSON, and exit code 1 when nothing is feasible", function()
    local out, code = run "--model gpt2-xl --host 1GiB --sizes 4Mi 16777216 --json"
    assert.equal(1, code)
    local result = cjson.decode(out)
    assert.equal(2, #result.rows)
    assert.equal(16 * MI, result.rows[2].size)
    assert.is_false(result.feasible)
    assert.is_nil(result.default_chunk_size)
    assert.matches("wte.weight with its state", result.why, 1, true)
    out = cjson.decode((run "--model tiny --dtype fp32 --json"))
    assert.equal("fp32", out.rows[1].groups[1].dtype)
    assert.is_true(out.feasible)
  end)

  it("takes a model from a file and settings from a configuration", function()
    write("m.lua", [[
local nn = require "ps.nn"
local Net = nn.class("Net")
function Net:init(o) self.a = nn.Linear(64, 4096, o) self.b = nn.Linear(4096, 64, o) end
return { build = function(options) assert(options.device == "meta") return Net(options) end, wrong = 5 }]])
    write("c.lua", [[return { bf16 = { enabled = true }, gradient_accumulation_steps = 2,
      train_micro_batch_size_per_gpu = 1, memory = { host = "64MiB" }, default_chunk_size = 300000 }]])
    local out, code = run "--model m.lua:build --config c.lua"
    assert.equal(0, code, out)
    assert.matches("default_chunk_size = 301056", out, 1, true)
    assert.matches("18 bytes of chunks", out, 1, true)
    out, code = run "--model m.lua:wrong"
    assert.equal(1, code)
    assert.matches("m.lua:wrong yields a number; expected a module", out, 1, true)
    assert.matches("m.lua returns no field 'no'", (run "--model m.lua:no"), 1, true)
    assert.matches("by name: m.lua:NAME", (run "--model m.lua"), 1, true)
  end)

  it("refuses what it does not understand", function()
    local out, code = run "--host 6x"
    assert.matches("'6x' is not a number of bytes", out, 1, true)
    assert.is_true(code ~= 0)
    out, code = run "--model gpt5"
    assert.matches("no preset 'gpt5' (the presets are char, gpt2,", out, 1, true)
    assert.equal(1, code)
    assert.matches("cannot open nothing.lua", (run "--model nothing.lua"), 1, true)
    assert.matches("at least 1024", (run "--sizes 100"), 1, true)
    assert.matches("no memory for chunks", (run "--host 1GiB --other 2GiB"), 1, true)
  end)
end)
