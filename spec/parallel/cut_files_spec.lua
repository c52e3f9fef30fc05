-- SPDX-License-Identifier: BSD-3-Clause
-- Files of models whose parameters are cut among ranks along tp: checkpoints from any mesh to any other, whole tensors
-- and shards in state dicts, and the errors of damaged or foreign pieces.
local ps = require "ps"
local bit = require "bit"
local sharded = require "ps.nn.sharded"
local check = require "spec.check_lib"
local cut_lib = require "spec.cut_files_lib"
local encode = require "ps.core.encode"
local json = require "cjson"
local lfs = require "lfs"
local lib = require "spec.ranks_lib"
local rank_files = require "ps.checkpoints.rank_files"
local rectangles = require "ps.core.rectangles"
local checkpoints, C = ps.checkpoints, ps.C
local fails, merge = check.fails_saying, check.merge
local here = cut_lib.here()

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)
after_each(function() os.execute(("rm -rf '%s'/*"):format(folder)) end)

-- Returns the bytes of all tensors of a model and its optimizer, by name.
local function bits(made)
  local all = {}
  for name, t in pairs(made.model:state_dict()) do all[name] = check.bytes(t) end
  for name, t in pairs(made.optimizer:state_dict(made.model).tensors) do all["optimizer." .. name] = check.bytes(t) end
  return all
end

local function trained()
  local made = here.make(0, 1)
  here.train(made, 0, 1)
  return made
end

describe("rectangles", function()
  it("of a tensor follow each other in order, and cover it", function()
    for _, shape in ipairs { { 5 }, { 3, 4 }, { 2, 3, 5 }, { 1, 7, 1 }, { 0, 3 }, {} } do
      local n = rectangles.numel(shape)
      local whole = ps.arange(math.max(1, n)):narrow(0, 0, n):reshape(shape)
      for most = 1, n + 2 do
        local seen = {}
        rectangles.each(shape, most, function(offset, size)
          assert.truthy(rectangles.numel(size) <= most)
          local part = rectangles.view(whole, offset, size):reshape(-1):tolist()
          for _, x in ipairs(part) do seen[#seen + 1] = x end
        end)
        assert.same(whole:reshape(-1):tolist(), seen)
      end
    end
  end)
end)

describe("a checkpoint of cut parameters", function()
  local SCRIPT = cut_lib.MODEL .. [[
    local mesh = ps.mesh { tp = tp }
    local index = mesh.rank "tp"
    local made = make(index, tp)
    local parts = { model = made.model, optimizer = made.optimizer, async = async }
    if from then ps.checkpoints.load(from, parts) else train(made, index, tp) end
    ps.checkpoints.save(to, parts)
    ps.checkpoints.wait()
  ]]
  local function through(size, tp, from, to, async)
    lib.check(folder, size, ("local tp, from, to, async = %d, %s, %q, %s\n"):format(tp, from and ("%q"):format(from)
      or "nil", to, tostring(async or false)) .. SCRIPT)
  end

  it("has the same bits on any mesh, including averages and padded tables", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local one = trained()
    local want = bits(one)
    through(2, 2, nil, folder .. "/a")                       -- trained as several ranks, with the same bits
    local last = "a"
    for i, at in ipairs { { 4, 2 }, { 3, 3 }, { 2, 1 }, { 4, 4 }, { 2, 2 } } do
      through(at[1], at[2], folder .. "/" .. last, folder .. "/b" .. i, i % 2 == 0)
      last = "b" .. i
      local path = folder .. "/" .. last .. "/step-00000002"
      local index = rank_files.index(path)
      assert.same({ at[2] > 1 and 3 or 2, at[2], at[1] / at[2] }, { index.version, index.mesh.tp, index.mesh.dp })
      local entry = index.tensors["optimizer.qkv.exp_avg"]
      assert.same({ 4, 36 }, entry.shape)
      assert.equal(at[2] > 1 and 3 * at[2] or 1, #entry.pieces)
      assert.same({ 7, 4 }, index.tensors.wte.shape)
      assert.equal(1, #index.tensors.norm.pieces)
      local made = here.make(0, 1)
      checkpoints.load(path, { model = made.model, optimizer = made.optimizer })
      assert.same(want, bits(made))
    end
    local made = here.make(0, 1)
    require("ps.checkpoints.merge").folder(folder .. "/" .. last .. "/step-00000002", folder .. "/merged.safetensors")
    checkpoints.load(folder .. "/merged.safetensors", { model = made.model, optimizer = made.optimizer })
    assert.same(want, bits(made))
    checkpoints.save(folder .. "/one.safetensors", { model = one.model, optimizer = one.optimizer })
    local a, b = ps.load(folder .. "/one.safetensors"), ps.load(folder .. "/merged.safetensors")
    for name, t in pairs(a) do assert.equal(check.bytes(t), check.bytes(b[name])) end
  end)
end)

-- -- weights ----------------------------------------------------------------------------------------------------------
local function state_bits(state)
  local all = {}
  for name, t in pairs(state) do all[name] = t:dtype() .. check.bytes(t) end
  return all
end

describe("weights of cut parameters", function()
  local SCRIPT = cut_lib.MODEL .. [[
    local mesh = ps.mesh { tp = tp }
    local made = make(mesh.rank "tp", tp)
    local model = made.model
    ps.no_grad(function() for _, p in ipairs(model:parameters()) do p:set_grad(p * 2) end end)
    for _, row in ipairs(ps.inspect.inspect_model(model)) do
      print(("row %s [%s] %.9g %.9g %.9g %.9g %.9g"):format(row.name, table.concat(row.shape, ","), row.mean, row.std,
        row.min, row.max, row.grad_std))
    end
    ps.no_grad(function() for _, p in ipairs(model:parameters()) do p:set_grad(nil) end end)
    local ok, why = pcall(ps.checkpoints.save, folder .. "/one.safetensors", { model = model })
    assert(not ok and tostring(why):find("only its part of this model", 1, true), why)
    model:save_pretrained(folder .. "/pretrained")
    model:save_pretrained(folder .. "/small", { max_shard_size = 200 })
    model:save_parallelized(folder .. "/parts")
    model:save_parallelized(folder .. "/whole", { merge_checkpoints = true })
    ps.no_grad(function() for _, p in ipairs(model:parameters()) do p:fill_(0) end end)
    local files_of, of = require "ps.pretrained.files", require "ps.pretrained.folder"
    local state = files_of.open(of.files(folder .. "/parts")):state()
    model:load_state_dict(state)
    state.close()
    model:save_pretrained(folder .. "/again")
  ]]

  it("are saved whole and in parts, merged, and loaded on any ranks", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    local model = here.make(0, 1).model
    local want = state_bits(model:state_dict())
    ps.no_grad(function() for _, p in ipairs(model:parameters()) do p:set_grad(p * 2) end end)
    local rows = {}
    for _, row in ipairs(ps.inspect.inspect_model(model)) do rows[row.name] = row end
    for _, at in ipairs { { 2, 2 }, { 4, 2 }, { 3, 3 } } do
      local size, tp = unpack(at)
      local out = lib.check(folder, size, ("local tp = %d\n"):format(tp) .. SCRIPT)
      local count = 0
      for name, shape, numbers in out[size - 1].text:gmatch "row (%S+) %[(%S+)%] ([^\n]*)" do
        local row, values = rows[name], {}
        for x in numbers:gmatch "%S+" do values[#values + 1] = tonumber(x) end
        assert.equal(table.concat(row.shape, ","), shape)
        for i, x in ipairs { row.mean, row.std, row.min, row.max, row.grad_std } do
          assert.truthy(math.abs(x - values[i]) <= 1e-7 * math.max(1, math.abs(x)))
        end
        count = count + 1
      end
      assert.equal(#here.WHOLE, count)
      for _, name in ipairs { "pretrained/model.safetensors", "whole/pytorch_model.bin",
        "again/model.safetensors" } do
        assert.same(want, state_bits(ps.load(folder .. "/" .. name)))
      end
      local together = {}
      for name, file in pairs(json.decode(check.read(folder .. "/small/model.safetensors.index.json")).weight_map) do
        together[name] = ps.load(folder .. "/small/" .. file)[name]
      end
      assert.same(want, state_bits(together))
      local files = {}
      for name in lfs.dir(folder .. "/parts") do if name:match "%.bin$" then files[#files + 1] = name end end
      assert.equal(tp, #files)
      local part = ps.load(folder .. "/parts/pytorch_model_tp_1_pp_0.bin")
      assert.same({ 4, 36 / tp }, part.qkv:shape())
      assert.equal(check.bytes(model.norm), check.bytes(part.norm))             -- whole on all ranks
      assert.equal(0, (merge(folder .. "/parts")))
      assert.equal(0, (merge(folder .. "/parts", "--out", folder .. "/merged.safetensors")))
      for _, name in ipairs { "parts/pytorch_model.bin", "merged.safetensors" } do
        assert.same(want, state_bits(ps.load(folder .. "/" .. name)))
      end
      os.execute(("rm -rf '%s'/*"):format(folder))
    end
  end)

  -- 8.4 MiB, which is more than one piece of a copy: 8 MiB in a merge and 2 MiB elsewhere.
  it("may be larger than the piece in memory", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    lib.check(folder, 2, cut_lib.MODEL .. [[
      WHOLE = { { name = "big", shape = { 1100, 2000 }, dim = 1, blocks = 2 } }
      local model = Net(ps.mesh { tp = 2 }.rank "tp", 2)
      model:save_pretrained(folder .. "/pretrained")
      model:save_parallelized(folder .. "/parts")
      ps.checkpoints.save(folder .. "/saved", { model = model })
    ]])
    ps.manual_seed(11)
    local want = check.bytes(ps.randn { 1100, 2000 })
    assert.truthy(want == check.bytes(ps.load(folder .. "/pretrained/model.safetensors").big))
    assert.equal(0, (merge(folder .. "/parts")))
    assert.truthy(want == check.bytes(ps.load(folder .. "/parts/pytorch_model.bin").big))
    assert.equal(0, (merge(folder .. "/saved", "--out", folder .. "/merged.safetensors")))
    assert.truthy(want == check.bytes(ps.load(folder .. "/merged.safetensors").big))
    local files = rank_files.open(folder .. "/saved/step-00000000")
    assert.truthy(want == check.bytes(files:tensor "big"))
    local turned = ps.empty { 2000, 1100 }
    files:read_into("big", turned:transpose(0, 1))
    assert.truthy(want == check.bytes(turned:transpose(0, 1)))
    files:close()
  end)

  -- Writes a folder of save_parallelized like two ranks, and returns it.
  local function save_parts(path)
    assert(os.execute(("mkdir -p '%s'"):format(path)) == 0)
    local placement = { version = 2, pipeline_parallel_size = 1, tensor_parallel_size = 2, weight_map = {},
      pieces = {} }
    for rank = 0, 1 do
      local model = here.make(rank, 2).model
      local state, cuts, file = model:state_dict(), sharded.of(model), ("pytorch_model_tp_%d_pp_0.bin"):format(rank)
      for name, at in pairs(cuts) do
        state[name] = sharded.own(state[name], at):contiguous()
        placement.pieces[name] = placement.pieces[name] or { dtype = "fp32", shape = at.shape, pieces = {} }
        for _, piece in ipairs(at.pieces) do
          table.insert(placement.pieces[name].pieces, { file = file, offset = piece.offset, shape = piece.shape,
            at = piece.at })
        end
      end
      for name in pairs(state) do placement.weight_map[name] = placement.weight_map[name] or file end
      ps.save(state, path .. "/" .. file)
    end
    check.write(path .. "/config.json", "{}")
    check.write(path .. "/placement.json", encode(placement))
    return placement
  end
  local function open(path)
    local files = require("ps.pretrained.files").open(require("ps.pretrained.folder").files(path))
    local ok, problem = pcall(files.state, files)
    files:close()
    if not ok then error(problem, 0) end
  end

  it("in parts are read by shards, also in deferred models", function()
    local path = folder .. "/parts"
    save_parts(path)
    local whole = here.make(0, 1).model
    local files_of, of = require "ps.pretrained.files", require "ps.pretrained.folder"
    for index = 0, 2 do
      local model = ps.deferred(function()
        local made = ps.nn.class("Whole")()
        for name, t in pairs(whole:state_dict()) do
          t = ps.empty(t:shape(), { dtype = t:dtype() })
          if name == "table" then made:buffer(name, t) else made:param(name, t) end
        end
        local state = files_of.open(of.files(path)):state()
        made:load_state_dict(state)
        state.close()
        return made
      end)
      for _, row in ipairs(here.WHOLE) do
        local desc = here.desc_of(row, index, 3)
        if desc then model[row.name] = require("ps.nn.deferred").cut(model, model[row.name], desc) end
      end
      ps.materialize(model)
      for _, row in ipairs(here.WHOLE) do
        assert.equal(check.bytes((here.own(row, whole[row.name], index, 3))), check.bytes(model[row.name]))
      end
    end
  end)

  it("in parts that are damaged, missing, or of no known layout are refused, by name", function()
    local path = folder .. "/parts"
    local function altered(words, change)
      local placement = save_parts(path)
      change(placement)
      check.write(path .. "/placement.json", encode(placement))
      fails(words, function() open(path) end)
      local code, text = merge(path, "--force")
      assert.equal(1, code, text)
      assert.falsy(lfs.attributes(path .. "/pytorch_model.bin"))
    end
    save_parts(path)
    open(path)
    altered({ "'qkv'", "saved twice" }, function(it) it.pieces.qkv.pieces[2].offset = { 0, 0 } end)
    altered({ "'proj'", "24 of 48" }, function(it) it.pieces.proj.pieces[2] = nil end)
    altered({ "'proj'", "[6, 4]", "from [1, 0] on" }, function(it) it.pieces.proj.pieces[2].at = { 1, 0 } end)
    altered({ "'proj'", "bf16" }, function(it) it.pieces.proj.dtype = "bf16" end)
    altered({ "'proj'", "placement.json" }, function(it) it.pieces.proj.pieces[1].file = "../x" end)
    altered({ "'nothing'" }, function(it) it.pieces.nothing = it.pieces.proj end)
    altered({ "version 3" }, function(it) it.version = 3 end)
    altered({ "placement.json says 1 and 3" }, function(it) it.tensor_parallel_size = 3 end)
    altered({ "tp_1", "without a placement.json" }, function(it) it.pieces = {} end)
    altered({ "pytorch_model_tp_1_pp_0.bin is missing" }, function()
      os.rename(path .. "/pytorch_model_tp_1_pp_0.bin", path .. "/pytorch_model_tp_2_pp_0.bin")
    end)
    os.remove(path .. "/pytorch_model_tp_2_pp_0.bin")
    save_parts(path)
    os.remove(path .. "/placement.json")
    fails({ "tensor parallelism", "placement.json" }, function() open(path) end)
    assert.equal(1, (merge(path)))
    local code, text = merge("--pattern=" .. path .. "/pytorch_model_tp_*_pp_0.bin", "--num=2", "--out=" .. folder
      .. "/x.pt")
    assert.equal(1, code)
    assert.truthy(text:find("tensor parallelism", 1, true))
  end)
end)

-- -- damage -----------------------------------------------------------------------------------------------------------
local function read_index(path) return json.decode(check.read(path .. "/index.json")) end

local function write_index(path, index)
  index.xxh3_64 = nil
  local text = "," .. encode(index):sub(2) .. "\n"
  check.write(path .. "/index.json", ('{"xxh3_64":"%s"'):format(bit.tohex(C.ps_xxh3('"' .. text, #text + 1), 16))
    .. text)
end

-- Writes, in one process, a checkpoint like two ranks along tp. change(rank, pieces) changes the descriptions in their
-- files.
local function save_two(path, change)
  assert(os.execute(("mkdir -p '%s'"):format(path)) == 0)
  for rank = 0, 1 do
    local made, tensors, pieces = here.make(rank, 2), {}, {}
    local cuts = sharded.of(made.model)
    for name, t in pairs(made.model:state_dict()) do
      local at = cuts[name]
      if at then
        tensors[name] = sharded.own(t, at)
        pieces[name] = { shape = at.shape, parts = at.pieces }
      elseif rank == 0 then
        tensors[name] = t
      end
    end
    if change then change(rank, pieces, tensors) end
    ps.safetensors.save(path .. "/" .. rank_files.file_name(rank, 2), tensors, rank_files.metadata { save = "ab",
      step = 3, rank = rank, world_size = 2, pieces = pieces,
      rng = { seed = "1", offset = "1", step = "0", sample = "0", op = "0" } }, { checksums = true })
  end
  rank_files.write_index(path, { save = "ab", run = "cd", step = 3, world_size = 2,
    mesh = { dp = 1, pp = 1, tp = 2 } }, encode { version = 2, step = 3 }, { "wte", "qkv" })
end

describe("pieces", function()
  local path
  before_each(function() path = folder .. "/step-00000003" end)
  local function load()
    local made = here.make(0, 1)
    made.model:apply(function(m) ps.no_grad(function() for _, p in ipairs(m:parameters()) do p:fill_(0) end end) end)
    checkpoints.load(path, { model = made.model })
    return made.model
  end

  it("are put together", function()
    save_two(path)
    local model, whole = load(), here.make(0, 1).model
    for name, t in pairs(whole:state_dict()) do assert.equal(check.bytes(t), check.bytes(model[name])) end
  end)

  it("that are damaged are named, with their file", function()
    save_two(path)
    local name = path .. "/" .. rank_files.file_name(1, 2)
    local text = check.read(name)
    local bytes = check.bytes(here.make(1, 2).model.qkv)
    local at = assert(text:find(bytes, 1, true))
    check.write(name, text:sub(1, at + 9) .. string.char(bit.bxor(text:byte(at + 10), 4)) .. text:sub(at + 11))
    fails({ "qkv", "rank-00001-of-00002", "checksum" }, load)
    check.write(name, text:sub(1, at + 9))
    fails({ "rank-00001-of-00002" }, load)
    os.remove(name)
    fails({ "rank-00001-of-00002.safetensors is missing" }, load)
  end)

  it("that overlap, leave gaps, or belong to another tensor are refused, by name", function()
    fails({ "'qkv'", "saved twice", "rank-00000", "rank-00001" }, function()
      save_two(path, function(rank, pieces) if rank == 1 then pieces.qkv.parts[2].offset[2] = 12 end end)
    end)
    fails({ "'proj'", "24 of 48 elements" }, function()
      save_two(path, function(rank, pieces, tensors)
        if rank == 1 then tensors.proj, pieces.proj = nil, nil end
      end)
    end)
    fails({ "'proj'", "[6, 4]", "at [7, 0]", "[12, 4]" }, function()
      save_two(path, function(rank, pieces) if rank == 1 then pieces.proj.parts[1].offset[1] = 7 end end)
    end)
    fails({ "'qkv'", "rank-00001" }, function()               -- one element of the file's tensor occurs twice
      save_two(path, function(rank, pieces) if rank == 1 then pieces.qkv.parts[2].at[2] = 0 end end)
    end)
    fails({ "'proj'", "[12, 4]", "[14, 4]" }, function()
      save_two(path, function(rank, pieces) if rank == 1 then pieces.proj.shape = { 14, 4 } end end)
    end)
    fails({ "'proj'", "fp32", "bf16" }, function()
      save_two(path, function(rank, _, tensors) if rank == 1 then tensors.proj = tensors.proj:to("bf16") end end)
    end)
  end)

  it("that differ between the index and the files are refused, by name", function()
    local function altered(change, words)
      save_two(path)
      local index = read_index(path)
      change(index.tensors.qkv)
      write_index(path, index)
      fails(words, load)
    end
    altered(function(entry) entry.pieces[2].at = { 0, 0 } end, { "'qkv'", "saved twice" })
    altered(function(entry) entry.pieces[1].shape = { 4, 5 } end, { "'qkv'", "elements" })
    altered(function(entry) entry.pieces[1].offset = { 0, 1 } end, { "'qkv'", "saved twice" })
    altered(function(entry) entry.pieces[1].offset = { "a" } end, { "'qkv'" })
    altered(function(entry) entry.pieces[2].at = nil end, { "'qkv'" })
    altered(function(entry) entry.pieces = {} end, { "qkv" })
    altered(function(entry) entry.dtype = "bf16" end, { "'qkv'", "bf16" })
  end)

  it("are not taken for a tensor of a smaller model", function()
    save_two(path)
    local smaller = ps.nn.class("Smaller")()
    for name, t in pairs(here.make(0, 2).model:state_dict()) do
      t = t:detach():clone()
      if name == "table" then smaller:buffer(name, t) else smaller:param(name, t) end
    end
    fails({ "shapes differ", "proj is [6, 4] in the model, [12, 4] in the state" },
      function() checkpoints.load(path, { model = smaller }) end)
  end)
end)

-- -- state dicts ------------------------------------------------------------------------------------------------------
describe("a cut model", function()
  it("loads its part of whole tensors, from tables and files of any type", function()
    local whole = here.make(0, 1)
    local state = whole.model:state_dict()
    ps.save(state, folder .. "/all.pt")
    ps.save(state, folder .. "/all.safetensors")
    local half = {}
    for name, t in pairs(state) do half[name] = t:is_float() and t:to("bf16") or t end
    ps.save(half, folder .. "/half.safetensors")
    for _, count in ipairs { 2, 4 } do
      for index = 0, count - 1 do
        for _, name in ipairs { "all.pt", "all.safetensors", "half.safetensors", "table" } do
          local model = here.make(index, count).model
          ps.no_grad(function() for _, p in ipairs(model:parameters()) do p:fill_(0) end end)
          local file = name ~= "table" and ps.load(folder .. "/" .. name, { lazy = true })
          model:load_state_dict(file or state)
          for _, row in ipairs(here.WHOLE) do
            local t = here.own(row, name:match "half" and half[row.name] or state[row.name], index, count)
            assert.equal(check.bytes(t:to("fp32")), check.bytes(model[row.name]))
          end
          if file then file:close() end
        end
      end
    end
  end)

  it("loads its own state dict, which is not a whole model's", function()
    local a, b = here.make(1, 2), here.make(1, 2)
    here.train(a, 1, 2)
    b.model:load_state_dict(a.model:state_dict())
    b.optimizer:load_state_dict(a.optimizer:state_dict(a.model), b.model)
    assert.same(bits(a), bits(b))
    local mixed = a.model:state_dict()
    mixed.proj = here.make(0, 1).model.proj
    fails({ "the whole tensor 'proj'", "only a rank's shard" }, function() b.model:load_state_dict(mixed) end)
    mixed.proj = ps.zeros { 5, 4 }
    fails({ "proj is [12, 4] in the model, [5, 4] in the state" }, function() b.model:load_state_dict(mixed) end)
  end)

  it("is not merged from states that ranks saved separately", function()
    for _, ending in ipairs { "pt", "safetensors" } do
      local files = {}
      for rank = 0, 1 do
        files[rank + 1] = ("%s/state-%d.%s"):format(folder, rank, ending)
        local state = here.make(rank, 2).model:state_dict()
        ps.save(ending == "pt" and { model = state } or state, files[rank + 1])
      end
      local code, text = merge("--pattern=" .. folder .. "/state-*." .. ending, "--num=2")
      assert.equal(1, code, text)
      assert.truthy(text:find("tensor parallelism", 1, true) and text:find("state-0." .. ending, 1, true))
      assert.falsy(lfs.attributes(folder .. "/state-merged." .. ending))
      assert.equal(0, (merge("--pattern=" .. folder .. "/state-*." .. ending, "--num=1", "--force")))
      local back = ps.load(files[2])
      assert.equal(check.bytes(here.make(1, 2).model.qkv), check.bytes((back.model or back).qkv))
    end
  end)

  it("loads its part of an optimizer's whole state", function()
    local one = trained()
    local saved = one.optimizer:state_dict(one.model)
    for index = 0, 2 do
      local made, want = here.make(index, 3), here.make(index, 3)
      here.train(want, index, 3)
      made.model:load_state_dict(one.model:state_dict())
      made.optimizer:load_state_dict(saved, made.model)
      assert.same(bits(want), bits(made))
    end
  end)
end)
