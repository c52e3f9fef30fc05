-- SPDX-License-Identifier: BSD-3-Clause
-- tools/merge.lua: shards of a checkpoint become one file in little memory, or an error that says why, and no file.
local lfs = require "lfs"
local ps = require "ps"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local tool = require("ps.paths").root .. "/tools/merge.lua"
if tool:sub(1, 1) ~= "/" then tool = lfs.currentdir() .. "/" .. tool end
local folder

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(os.execute("mkdir " .. folder) == 0)
end)
teardown(function() os.execute("rm -rf " .. folder) end)
before_each(function() os.execute(("rm -rf '%s' && mkdir '%s'"):format(folder, folder)) end)

local function path(name) return folder .. "/" .. name end

local function merge(arguments, before)
  return check.shell(("cd '%s' && %s env -u LUA_INIT '%s' '%s' %s"):format(folder,
    before or "", paths.exe, tool, arguments))
end

local function names()
  local list, p = {}, io.popen(("ls -A '%s'"):format(folder))
  for name in p:lines() do list[#list + 1] = name end
  p:close()
  return table.concat(list, " ")
end

local function merges(arguments)
  local out, code = merge(arguments)
  assert.equal(0, code, out)
  return out
end

local function fails(words, arguments, before)
  local there = names()
  local out, code = merge(arguments, before)
  assert.equal(1, code, out)
  for _, word in ipairs(words) do assert.truthy(out:find(word, 1, true), out .. " lacks " .. word) end
  assert.falsy(out:find("traceback", 1, true), out)
  assert.equal(there, names())
end

local function read(name)
  local f = assert(io.open(path(name), "rb"))
  local text = f:read("*a")
  f:close()
  return text
end

local function write(name, text)
  local f = assert(io.open(path(name), "wb"))
  f:write(text)
  f:close()
end

local function write_raw(name, ...) check.write_strided(path(name), ...) end

-- Converts a value for comparison. Tensors become "type [shape] bytes".
local function shown(value)
  if ps.is_tensor(value) then
    return ("%s [%s] %s"):format(value:dtype(), table.concat(value:shape(), ","), check.bytes(value))
  elseif type(value) ~= "table" or value == ps.serialize.none then return value end
  local copy = {}
  for key, item in pairs(value) do copy[key] = shown(item) end
  return copy
end

-- Merges by the definition: tables are updated in rank order.
local function update(into, from)
  for key, value in pairs(from) do
    local both = type(value) == "table" and type(into[key]) == "table" and not ps.is_tensor(value)
    if both then update(into[key], value) else into[key] = value end
  end
  return into
end

local TYPES = { "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8" }

local function random_tensor()
  local shape = {}
  for d = 1, math.random(0, 3) do shape[d] = math.random(0, 5) end
  return (ps.randn(shape) * 50):to(TYPES[math.random(#TYPES)])
end

-- Returns a part of a state as a rank would save it: tensors, lists and tables of tensors, and plain values.
local function part(rank, n)
  local state = { ["layer." .. rank] = { exp_avg = random_tensor(), step = rank }, version = 3, name = "x\255" }
  for i = 1, math.random(0, 6) do state[("h.%d.w%d"):format(i, rank)] = random_tensor() end
  state.state, state.groups = {}, { { lr = 0.125, betas = { 0.5, 0.75 } } }
  for i = rank, 8, n do state.state[i] = { m = random_tensor(), on = true } end
  state.empty = {}
  return state
end

describe("tools/merge.lua", function()
  it("merges .pt shards like tables that are updated in the order of ranks", function()
    for case = 1, 12 do
      math.randomseed(case)
      local n = math.random(1, 5)
      local want = {}
      for rank = 0, n - 1 do
        local state = part(rank, n)
        ps.save(state, path("c-" .. rank .. ".pt"))
        update(want, state)
      end
      local out = merges(("--pattern=c-*.pt --num=%d --strict"):format(n))
      assert.truthy(out:find("^c%-merged%.pt: %d+ tensors, [%d.]+ MB, from " .. n .. " files\n$"), out)
      assert.same(shown(want), shown(ps.load(path "c-merged.pt")))
      os.execute(("rm -f '%s'/*"):format(folder))
    end
  end)

  it("merges flat states between .pt and safetensors, in every combination", function()
    for _, from in ipairs { "pt", "safetensors" } do
      for _, to in ipairs { "pt", "safetensors" } do
        local want = {}
        for rank = 0, 2 do
          local state = { ["w" .. rank] = ps.randn { 3, 4 }, ["b" .. rank] = ps.arange(rank, { dtype = "int64" }) }
          state.shared = ps.ones({ 2 }, { dtype = "bf16" })
          update(want, state)
          local name = path(("m%d.%s"):format(rank, from))
          if from == "pt" then ps.save(state, name)
          else ps.safetensors.save(name, state, { rank = ("%d"):format(rank), a = "b" }) end
        end
        local out = merges(("--pattern='m*.%s' --num 3 --force --out x.%s"):format(from, to))
        assert.truthy(out:find("x." .. to .. ": 7 tensors, 0.0 MB, from 3 files", 1, true), out)
        assert.same(shown(want), shown(ps.load(path("x." .. to))))
        if from == to and to == "safetensors" then
          local file = ps.safetensors.open(path "x.safetensors")
          assert.same({ rank = "2", a = "b", format = "pt" }, file.metadata)
          file:close()
          assert.truthy(out:find("'rank', metadata, differs between m0.safetensors and m1.safetensors", 1, true), out)
        end
      end
    end
    assert.falsy(names():find "tmp")
  end)

  it("gathers strided tensors", function()
    for _, size in ipairs { { 2, 3 }, { 2049, 2051 } } do  -- tensors of one piece and of three
      local rows, columns = size[1], size[2]
      local values = ps.arange(rows * columns, { dtype = "int32" })
      write_raw("c-0.pt", values, { rows, columns }, { 1, rows })
      write_raw("d-0.pt", values, { rows, columns }, { 1, rows })
      ps.save({ w = values:reshape(columns, rows):t():contiguous() }, path "d-1.pt")
      for _, to in ipairs { "pt", "safetensors" } do
        merges("--pattern=c-*.pt --num=1 --out x." .. to)
        assert.equal(check.bytes(values:reshape(columns, rows):t()), check.bytes(ps.load(path("x." .. to)).w))
        os.remove(path("x." .. to))
      end
      merges("--pattern=d-*.pt --num=2 --strict --force")   -- strided and dense tensors are equal
      ps.save({ w = values:reshape(rows, columns) }, path "d-1.pt")
      fails({ "'w', a tensor, differs between" }, "--pattern=d-*.pt --num=2 --strict --out y.pt")
    end
  end)

  it("keeps views whose elements share bytes", function()
    local line = ps.arange(2 ^ 16, { dtype = "int32" })
    write_raw("c-0.pt", line, { 2 ^ 40, 3, 2 }, { 0, 1, 3 })
    write_raw("c-1.pt", line, { 2 ^ 40, 3, 2 }, { 0, 1, 3 })
    assert.truthy(merges("--pattern=c-*.pt --num=2 --strict"):find("1 tensors, 0.0 MB, from 2 files", 1, true))
    local w = ps.load(path "c-merged.pt").w
    assert.same({ 2 ^ 40, 3, 2 }, w:shape())
    assert.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, w:select(0, 7):tolist())
    write_raw("d-0.pt", line, { 2 ^ 15, 2 ^ 15 }, { 1, 1 })
    merges("--pattern=d-*.pt --num=1")
    assert.truthy(#read "d-merged.pt" < 2 ^ 18 + 2000)
    write_raw("e-0.pt", line, { 3, 4 }, { 0, 1 })
    ps.save({ w = line:narrow(0, 0, 4):expand(3, 4):contiguous() }, path "e-1.pt")
    merges("--pattern=e-*.pt --num=2 --strict")             -- compared element by element
    assert.same({ { 0, 1, 2, 3 }, { 0, 1, 2, 3 }, { 0, 1, 2, 3 } }, ps.load(path "e-merged.pt").w:tolist())
    write_raw("e-1.pt", line + 1, { 3, 4 }, { 0, 1 })
    fails({ "'w', a tensor, differs between" }, "--pattern=e-*.pt --num=2 --strict --out y.pt")
    fails({ "x.safetensors: 'w' of c-0.pt is a view", "merge to a .pt file" },
      "--pattern=c-*.pt --num=1 --force --out x.safetensors")
  end)

  it("is fast for tables that occur on very many paths", function()
    for rank = 0, 1 do
      local list, dict = { 1, rank }, { x = ps.ones { 1 }, ["only" .. rank] = ps.zeros { 2 } }
      for _ = 1, 40 do list, dict = { list, list }, { a = dict, b = dict } end
      ps.save({ list = list, dict = dict, mixed = rank == 0 and { dict, dict } or { dict, list = dict } },
        path("l-" .. rank .. ".pt"))
    end
    local out = merges("--pattern=l-*.pt --num=2")
    assert.truthy(out:find("l-merged.pt: 4 tensors, 0.0 MB, from 2 files", 1, true), out)
    assert.equal(1, select(2, out:gsub("differs", "")))     -- the number, once
    local back = ps.load(path "l-merged.pt")
    local list, dict = back.list, back.dict
    for _ = 1, 40 do
      assert.truthy(rawequal(list[1], list[2]) and rawequal(dict.a, dict.b))
      list, dict = list[2], dict.b
    end
    assert.same({ { 1, 1 }, { 1 }, { 0, 0 }, { 0, 0 } },
      { list, dict.x:tolist(), dict.only0:tolist(), dict.only1:tolist() })
    assert.truthy(#read "l-merged.pt" < 6000)
  end)

  it("keeps shared tensors shared", function()
    local w = ps.randn { 4, 6 }
    ps.save({ wte = w, head = w, other = ps.ones { 2 } }, path "c-0.pt")
    ps.save({ b = ps.zeros { 3 } }, path "c-1.pt")
    assert.truthy(merges("--pattern=c-*.pt --num=2"):find "3 tensors")
    local back = ps.load(path "c-merged.pt")
    assert.truthy(back.wte == back.head)
    assert.same(w:tolist(), back.wte:tolist())
  end)

  it("uses the last of different values and prints that, or refuses them with --strict", function()
    ps.save({ w = ps.ones { 2, 2 }, step = 1, same = ps.ones { 3 }, a = { x = 1 } }, path "c-0.pt")
    ps.save({ w = ps.zeros { 2, 2 }, step = 2, same = ps.ones { 3 }, a = { x = 1, y = 2 } }, path "c-1.pt")
    fails({ "'step', a value, differs between c-0.pt and c-1.pt" }, "--pattern=c-*.pt --num=2 --strict --out a.pt")
    local out = merges("--pattern=c-*.pt --num=2")
    assert.truthy(out:find("'w', a tensor, differs between c-0.pt and c-1.pt; the latter is used", 1, true), out)
    assert.truthy(out:find("'step', a value, differs", 1, true), out)
    local _, lines = out:gsub("\n", "")
    assert.equal(3, lines, out)
    local back = ps.load(path "c-merged.pt")
    assert.same({ { 0, 0 }, { 0, 0 } }, back.w:tolist())
    assert.same({ 2, { x = 1, y = 2 } }, { back.step, back.a })
  end)

  it("treats None as absent", function()
    local none = ps.serialize.none
    ps.save({ w = ps.ones {}, l = { none, 2, 3 }, m = {}, n = { [0] = 1 } }, path "c-0.pt")
    ps.save({ l = { 1, none }, m = { 4 }, n = { 5 } }, path "c-1.pt")
    merges("--pattern=c-*.pt --num=2 --strict")
    local back = ps.load(path "c-merged.pt")
    assert.same({ { 1, 2, 3 }, { 4 }, { [0] = 1, 5 } }, { back.l, back.m, back.n })
    local kind = require("ps.io.torch_pt").kind               -- the values that PyTorch reads
    assert.same({ "list", "list", "dict" }, { kind(back.l), kind(back.m), kind(back.n) })
  end)

  it("refuses shards of different states", function()
    ps.save({ h = { w = ps.ones { 2, 3 } }, v = 1 }, path "c-0.pt")
    local h_w = "'h.w' is a tensor fp32 [2, 3] in c-0.pt, but a tensor "
    for _, case in ipairs {
      { { h = { w = ps.ones { 3, 2 } } }, h_w .. "fp32 [3, 2] in c-1.pt: these are not shards of one checkpoint" },
      { { h = { w = ps.ones({ 2, 3 }, { dtype = "bf16" }) } }, h_w .. "bf16 [2, 3] in c-1.pt" },
      { { h = ps.ones {} }, "'h' is a dict in c-0.pt, but a tensor fp32 [] in c-1.pt" },
      { { v = { a = 1 } }, "'v' is a value in c-0.pt, but a dict in c-1.pt" },
      { { ps.ones {} }, "c-1.pt has a list" },
      { 7, "c-1.pt has a value" },
    } do
      ps.save(case[1], path "c-1.pt")
      fails({ case[2] }, "--pattern=c-*.pt --num=2")
    end
    ps.save({ h = { w = ps.ones { 2, 3 } } }, path "c-1.pt")
    fails({ "x.safetensors", "holds only tensors by name", "'h' of c-1.pt is a dict", "merge to a .pt file" },
      "--pattern=c-*.pt --num=2 --out=x.safetensors")
    ps.save({}, path "d-0.pt")
    fails({ "there is no tensor in d-0.pt" }, "--pattern=d-*.pt --num=1")
  end)

  it("refuses missing, foreign and damaged files", function()
    for rank = 0, 2 do
      ps.save({ ["w" .. rank] = ps.randn { 1000 } }, path("c-" .. rank .. ".pt"))
      ps.save({ ["w" .. rank] = ps.randn { 1000 } }, path("s-" .. rank .. ".safetensors"))
    end
    fails({ "2 of 5 shards are missing: c-3.pt, c-4.pt" }, "--pattern=c-*.pt --num=5")
    fails({ "there is a shard c-2.pt, but --num=2" }, "--pattern=c-*.pt --num=2")
    assert.truthy(merges("--pattern=c-*.pt --num=2 --force"):find("c-2.pt, but --num=2: left out", 1, true))
    os.remove(path "c-merged.pt")
    local good = read "c-1.pt"
    local at = good:find("archive/data/0", 1, true) + 1000
    write("c-1.pt", good:sub(1, at) .. string.char((good:byte(at + 1) + 1) % 256) .. good:sub(at + 2))
    fails({ "c-1.pt: tensor 'w1' cannot be read", "damaged" }, "--pattern=c-*.pt --num=3")
    for _, bad in ipairs { good:sub(1, -40), good:sub(1, 100), "", "some text, and no checkpoint", "\128\2}q." } do
      write("c-1.pt", bad)
      fails({ "c-1.pt" }, "--pattern=c-*.pt --num=3")
    end
    write("c-1.pt", read "s-1.safetensors")                -- recognized by its contents
    merges("--pattern=c-*.pt --num=3")
    os.remove(path "c-merged.pt")
    write("s-1.safetensors", read("s-1.safetensors"):sub(1, -2))
    fails({ "s-1.safetensors" }, "--pattern=s-*.safetensors --num=3")
    os.execute(("rm '%s' && mkdir '%s'"):format(path "c-1.pt", path "c-1.pt"))
    fails({ "c-1.pt", "a folder" }, "--pattern=c-*.pt --num=3")
  end)

  it("leaves existing files alone if there is no room, or without --force", function()
    for rank = 0, 1 do ps.save({ ["w" .. rank] = ps.randn { 50000 } }, path("c-" .. rank .. ".pt")) end
    write("c-merged.pt", "older")
    fails({ "c-merged.pt exists already; --force" }, "--pattern=c-*.pt --num=2")
    fails({ "c-merged.pt", "ulimit -f" }, "--pattern=c-*.pt --num=2 --force", "ulimit -f 300;")
    fails({ "x.safetensors", "ulimit -f" }, "--pattern=c-*.pt --num=2 --out x.safetensors", "ulimit -f 300;")
    assert.equal("older", read "c-merged.pt")
    merges("--pattern=c-*.pt --num=2 --force")
    assert.equal(50000, ps.load(path "c-merged.pt").w1:numel())
    fails({ "no/such/x.pt", "No such file" }, "--pattern=c-*.pt --num=2 --out no/such/x.pt")
    fails({ "./c-1.pt is a shard" }, "--pattern=c-*.pt --num=2 --force --out ./c-1.pt")
  end)

  it("explains its options", function()
    ps.save({ w = ps.ones { 1 } }, path "c-0.pt")
    assert.truthy(merges("--help"):find "%-%-pattern")
    fails({ "the name 'c-merged.npz' has no known extension" }, "--pattern=c-*.npz --num=1")
    fails({ "the name 'x' has no known extension" }, "--pattern=c-*.pt --num=1 --out x")
    fails({ "'c-0.pt' has no * for the rank" }, "--pattern=c-0.pt --num=1")
    fails({ "'c-0.pt' is followed by c-1.pt", "quoted" }, "--pattern c-0.pt c-1.pt --num=2")
    fails({ "--num 0: it takes a whole number from 1" }, "--pattern=c-*.pt --num=0", "")
    fails({ "--num" }, "--pattern=c-*.pt")
  end)

  it("needs the memory of a piece, not of a tensor", function()
    local why = check.sanitized()
    if why then return pending(why) end
    local big = ps.ones({ 96 * 2 ^ 20 }, { dtype = "uint8" })   -- 96 MB in one tensor
    for rank = 0, 1 do ps.save({ ["w" .. rank] = big, both = ps.ones { 4 } }, path("c-" .. rank .. ".pt")) end
    local script = ("package.path = '%s;' .. package.path; local ps = require 'ps'\n" ..
      "local merge = require 'ps.checkpoints.merge'\n" ..
      "merge.run({ 'c-0.pt', 'c-1.pt' }, { out = arg[1] }) print(tonumber(ps.C.ps_rss_peak()))"):format(package.path)
    write("peak.lua", script)
    for _, out in ipairs { "m.pt", "m.safetensors" } do
      local p = io.popen(("cd '%s' && env -u LUA_INIT '%s' peak.lua %s 2>&1"):format(folder, paths.exe, out))
      local text = p:read("*a")
      p:close()
      assert.truthy(tonumber(text), text)
      assert.truthy(tonumber(text) < 90e6, text)           -- the program itself uses about 30 MB
    end
  end)
end)
