-- SPDX-License-Identifier: BSD-3-Clause
-- Checkpoints from one mesh of ranks to another: if a model is cut into stages, each rank holds a part of it, and all
-- meshes write the same checkpoint. The format of their index: pieces of tensors, the previous version, and later
-- versions.
local ps = require "ps"
local bit = require "bit"
local check = require "spec.check_lib"
local encode = require "ps.core.encode"
local lib = require "spec.ranks_lib"
local rank_files = require "ps.checkpoints.rank_files"
local checkpoints, nn, C = ps.checkpoints, ps.nn, ps.C
local fails = check.fails_saying

local folder
setup(function() folder = lib.folder() end)
teardown(function() lib.remove(folder) end)
after_each(function() os.execute(("rm -rf '%s'/*"):format(folder)) end)

-- Code for the ranks after lib.begin and for this process. It creates an engine with a small model, and returns its
-- contents with a line for each tensor.
local COMMON = [[
  local gpt2 = require "models.gpt2"
  local ffi, C = ps.ffi, ps.C
  local hash_out = ffi.new("uint64_t[1]")
  local function hash(t)
    ps.check(C.ps_tensor_hash(t, hash_out))
    return tostring(hash_out[0])
  end
  local function engine_of(stage, pp)
    return ps.initialize { quiet = true, config = { plan_print = false, optimizer = { type = "AdamW" },
      pipeline = { stages = pp or 1 },
      bf16 = { enabled = true }, zero_optimization = { stage = stage }, memory = { host = 2 ^ 25 }, chunk_size = 4096 },
      model_func = function()
        local made = gpt2.new { vocab_size = 64, n_positions = 16, n_embd = 32, n_layer = 4, n_head = 2 }
        made.transformer.h[1].ln_2.bias:requires_grad(false)
        return made
      end }
  end
  local function lines_of(model, optimizer)
    local lines = {}
    for i, row in ipairs(require("ps.nn.handle").of(model).built.list) do
      if row.averages then
        lines[#lines + 1] = ("%s %s %s %s %d"):format(row.name, hash(row.values), hash(row.averages[1]),
          hash(row.averages[2]), optimizer:updates(i))
      end
    end
    for _, row in ipairs(require("ps.nn.handle").of(model).built.frozen) do
      local at = row.place or row.param
      if row.owner == nil or row.place ~= nil then lines[#lines + 1] = row.name .. " " .. hash(at) end
    end
    return lines
  end
]]
local engine_of, lines_of = assert(loadstring("local ps = require 'ps'\n" .. COMMON .. "return engine_of, lines_of"))()

-- Code for ranks that load a checkpoint, print their contents, and save them.
local SCRIPT = [[
  local model, optimizer = engine_of(stage, pp)
  local found = ps.checkpoints.load(from, { model = model, optimizer = optimizer })
  for _, line in ipairs(lines_of(model, optimizer)) do print("has " .. line) end
  print("rng " .. tostring(ps.rng().offset))
  ps.checkpoints.save(to, { model = model, optimizer = optimizer, step = found.step })
]]

-- Runs the ranks. Returns the sorted lines of all ranks without duplicates, and whether each rank had some but not all
-- of the lines.
local function through(size, pp, stage, from, to)
  local out = lib.check(folder, size, ("local pp, stage, from, to = %d, %d, %q, %q\n"):format(pp, stage, from, to)
    .. COMMON .. SCRIPT)
  local all, seen, most = {}, {}, 0
  for rank = 0, size - 1 do
    local n = 0
    for line in out[rank].text:gmatch "has ([^\n]*)" do
      n = n + 1
      if not seen[line] then seen[line], all[#all + 1] = true, line end
    end
    assert.truthy(n > 0)
    most = math.max(most, n)
  end
  table.sort(all)
  return all, most
end

describe("a checkpoint of one mesh", function()
  it("has the same bits on any other: parameters, averages, numbers of updates", function()
    if lib.no_gloo() then return pending(lib.no_gloo()) end
    ps.manual_seed(8)
    local model, optimizer = engine_of(0)
    for _ = 1, 2 do
      local x = ps.randint(0, 64, { 2, 8 })
      model:backward(model(x, x))
      optimizer:step()
    end
    local want = lines_of(model, optimizer)
    table.sort(want)
    checkpoints.save(folder .. "/one", { model = model, optimizer = optimizer })
    model:close()
    local last = "one"
    for i, at in ipairs { { 2, 2, 0 }, { 4, 2, 1 }, { 4, 4, 0 }, { 2, 1, 3 } } do
      local size, pp, stage = unpack(at)
      local got, most = through(size, pp, stage, folder .. "/" .. last, folder .. "/mesh" .. i)
      assert.same(want, got)
      if size > 1 then assert.truthy(most < #want) end
      last = "mesh" .. i
      local index = rank_files.index(folder .. "/" .. last .. "/step-00000002")
      assert.same({ version = 2, dp = size / pp, pp = pp, tp = 1 }, { version = index.version, dp = index.mesh.dp,
        pp = index.mesh.pp, tp = index.mesh.tp })
      assert.same({ { 64, 32 }, 1, { 0, 0 } }, { index.tensors["transformer.wte.weight"].shape,
        #index.tensors["transformer.wte.weight"].pieces, index.tensors["transformer.wte.weight"].pieces[1].offset })
    end
    model, optimizer = engine_of(0)
    checkpoints.load(folder .. "/" .. last, { model = model, optimizer = optimizer })
    local got = lines_of(model, optimizer)
    table.sort(got)
    assert.same(want, got)
    model:close()
  end)
end)

-- -- the format -------------------------------------------------------------------------------------------------------
local function write(name, text)
  local f = assert(io.open(name, "wb"))
  f:write(text)
  f:close()
end

local function write_index(path, index)
  local text = "," .. encode(index):sub(2) .. "\n"
  write(path .. "/index.json", ('{"xxh3_64":"%s"'):format(bit.tohex(C.ps_xxh3('"' .. text, #text + 1), 16)) .. text)
end

-- Writes a checkpoint's folder with the tensors of each rank. `about` has additional fields for each file.
local function write_files(path, version, by_rank, about)
  assert(os.execute(("mkdir -p '%s'"):format(path)) == 0)
  for rank, tensors in ipairs(by_rank) do
    local key = { version = version, save = "ab", step = 3, rank = rank - 1, world_size = #by_rank,
      rng = { seed = "1", offset = tostring(rank), step = "0", sample = "0", op = "0" } }
    for name, value in pairs(about and about[rank] or {}) do key[name] = value end
    ps.safetensors.save(path .. "/" .. rank_files.file_name(rank - 1, #by_rank), tensors,
      { format = "pt", psluajit_shard = encode(key) }, { checksums = true })
  end
end

describe("the index of a checkpoint", function()
  it("of version 1 is read", function()
    local model = nn.Linear(4, 3)
    local path = folder .. "/step-00000003"
    write_files(path, 1, { { weight = model.weight }, { bias = model.bias } })
    local names, sums = { weight = rank_files.file_name(0, 2), bias = rank_files.file_name(1, 2) }, {}
    for name, file in pairs(names) do
      local opened = ps.safetensors.open(path .. "/" .. file)
      sums[name] = opened:checksum(name)
      opened:close()
    end
    local function index(changes)
      local all = { version = 1, save = "ab", run = "cd", step = 3, world_size = 2,
        files = { names.weight, names.bias }, weight_map = names, checksums = sums,
        rng = { { seed = "1", offset = "1" }, { seed = "1", offset = "2" } }, updates = {},
        state = { version = 2, step = 3 } }
      for key, value in pairs(changes) do all[key] = value end
      return all
    end
    write_index(path, index {})
    local other = nn.Linear(4, 3)
    assert.equal(3, checkpoints.load(path, { model = other }).step)
    assert.equal(check.bytes(model.weight), check.bytes(other.weight))
    assert.equal(check.bytes(model.bias), check.bytes(other.bias))
    assert.equal(1, tonumber(ps.rng().offset))                   -- with another number of ranks, the state is rank 0's
    write_index(path, index { checksums = { weight = sums.bias, bias = sums.bias } })
    fails({ "weight", "checksum" }, function() checkpoints.load(path, { model = other }) end)
    write_index(path, index { weight_map = { weight = names.weight, bias = names.bias, more = names.bias } })
    fails({ "no tensor 'more'" }, function() checkpoints.load(path, { model = other }) end)
    write_index(path, index { version = 4 })
    fails({ "index.json", "version 4", "versions 1 to 3" }, function() checkpoints.load(path, { model = other }) end)
    write_index(path, index {})
    write_files(path, 4, { { weight = model.weight }, { bias = model.bias } })
    fails({ "rank-00000-of-00002", "version 4", "versions 1 to 3" },
      function() checkpoints.load(path, { model = other }) end)
  end)

  it("has tensors in pieces, which are assembled, and must cover the whole", function()
    local whole = ps.randn { 6, 5 }
    local function cut(row, rows, column, columns)
      return whole:narrow(0, row, rows):narrow(1, column, columns):contiguous()
    end
    local path = folder .. "/step-00000003"
    local function save(pieces)
      local files, about = {}, {}
      for i, at in ipairs(pieces) do
        files[i] = { weight = cut(unpack(at)) }
        about[i] = { pieces = { weight = { offset = { at[1], at[3] }, shape = { 6, 5 } } } }
      end
      files[1].bias = ps.ones { 6 }
      write_files(path, 2, files, about)
      rank_files.write_index(path, { save = "ab", run = "cd", step = 3, world_size = #pieces,
        mesh = { dp = 1, pp = 1, tp = #pieces } }, encode { version = 2, step = 3 }, { "weight", "bias" })
    end
    save { { 0, 4, 0, 2 }, { 0, 4, 2, 3 }, { 4, 2, 0, 5 } }
    for _, dtype in ipairs { "fp32", "bf16" } do
      local model = nn.Linear(5, 6, { dtype = dtype })
      checkpoints.load(path, { model = model })
      assert.equal(check.bytes(whole:to(dtype)), check.bytes(model.weight))
      assert.same({ 1, 1, 1, 1, 1, 1 }, model.bias:tolist())
    end
    local files = rank_files.open(path)
    assert.equal(3, #files:divided().weight.pieces)
    assert.same({ 6, 5 }, files:shape "weight")
    assert.equal(6 * 5 * 4, files:nbytes "weight")
    assert.equal(check.bytes(whole), check.bytes(files:tensor "weight"))
    files:close()
    fails({ "weight is [6, 4] in the model, [6, 5] in the state" },
      function() checkpoints.load(path, { model = nn.Linear(4, 6) }) end)
    require("ps.checkpoints.merge").folder(path, folder .. "/merged.safetensors")
    assert.equal(check.bytes(whole), check.bytes(ps.load(folder .. "/merged.safetensors").weight))
    fails({ "'weight'", "pieces", "index.json" }, function()
      local file = path .. "/" .. rank_files.file_name(0, 3)
      require("ps.checkpoints.merge").run({ file }, { out = folder .. "/merged.safetensors" })
    end)
    fails({ "was saved twice", "rank-00001" }, function() save { { 0, 4, 0, 5 }, { 3, 3, 0, 5 } } end)
    fails({ "20 of 30 elements" }, function() save { { 0, 2, 0, 5 }, { 4, 2, 0, 5 } } end)
    fails({ "[6, 5]", "at [6, 0]" }, function()
      write_files(path, 2, { { weight = cut(0, 6, 0, 5) } }, { { pieces = { weight = { offset = { 6, 0 },
        shape = { 6, 5 } } } } })
      rank_files.write_index(path, { save = "ab", run = "cd", step = 3, world_size = 1 }, "{}", {})
    end)
  end)
end)
