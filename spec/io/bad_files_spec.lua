-- SPDX-License-Identifier: BSD-3-Clause
-- Damaged files, failing training, and a full disk. Each is a Lua error that names the file and says
-- what to do; it is never a crash, and saved data is never lost.
local ffi = require "ffi"
local lfs = require "lfs"
local ps = require "ps"
local gpt2 = require "models.gpt2"
local check_lib = require "spec.check_lib"
local fails, fails_with = check_lib.fails_saying, check_lib.fails_as

local folder

local function write(name, text)
  check_lib.write(folder .. "/" .. name, text)
  return folder .. "/" .. name
end

local function read(path) return assert(check_lib.read(path), path) end

local function files(path)
  local names = {}
  for name in lfs.dir(path or folder) do
    if name ~= "." and name ~= ".." then names[#names + 1] = name end
  end
  table.sort(names)
  return table.concat(names, " ")
end

local function in_folder()
  setup(function()
    folder = os.tmpname()
    os.remove(folder)
    assert(lfs.mkdir(folder))
  end)
  teardown(function() os.execute("rm -r " .. folder) end)
end

describe("invalid safetensors files", function()
  in_folder()

  local function open(name) return function() return ps.safetensors.open(folder .. "/" .. name) end end

  -- Returns a file with this JSON header and data.
  local function file(name, header, data)
    local length = ffi.new("uint64_t[1]", #header)
    return write(name, ffi.string(length, 8) .. header .. (data or ""))
  end

  it("are named, with the fault", function()
    fails_with("EIO", { "none.safetensors", "No such file" }, open "none.safetensors")
    fails_with("EIO", { folder, "a folder" }, open "")
    write("empty.safetensors", "")
    fails_with("EFORMAT", { "empty.safetensors", "truncated" }, open "empty.safetensors")
    write("huge.safetensors", ("\255"):rep(8) .. "{}")
    fails_with("EFORMAT", { "huge.safetensors" }, open "huge.safetensors")
    file("json.safetensors", '{"a":')
    fails_with("EFORMAT", { "json.safetensors" }, open "json.safetensors")
    file("bounds.safetensors", '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "1234")
    fails_with("EFORMAT", { "bounds.safetensors" }, open "bounds.safetensors")
    file("size.safetensors", '{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "12345678")
    fails_with("EFORMAT", { "size.safetensors", "'a'" }, open "size.safetensors")
    file("overlap.safetensors", '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' ..
      '"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}', "123456")
    fails_with("EFORMAT", { "overlap.safetensors" }, open "overlap.safetensors")
    file("overflow.safetensors", '{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}', "")
    fails_with("EFORMAT", { "overflow.safetensors" }, open "overflow.safetensors")
    file("f8.safetensors", '{"a":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]}}', "1234")
    local f = open "f8.safetensors"()
    fails({ "f8.safetensors", "'a'", "F8_E4M3", "not supported" }, function() f:tensor "a" end)
    fails({ "f8.safetensors", "no tensor 'b'" }, function() f:tensor "b" end)
    f:close()
    fails({ "f8.safetensors", "closed" }, function() f:tensor "a" end)
  end)

  it("may have null metadata, and integer types that no tensor here has", function()
    file("null.safetensors", '{"__metadata__":null,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "\0\0\0\0")
    local f = open "null.safetensors"()
    assert.same({ {}, 0 }, { f.metadata, f:tensor("a"):item() })
    f:close()
    file("nul.safetensors", '{"__metadata__":nul,"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "\0\0\0\0")
    fails_with("EFORMAT", { "nul.safetensors", "'{' expected" }, open "nul.safetensors")
    file("small.safetensors", '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
      .. '"i8":{"dtype":"I8","shape":[2],"data_offsets":[4,6]},'
      .. '"i16":{"dtype":"I16","shape":[2,1],"data_offsets":[6,10]},'
      .. '"u16":{"dtype":"U16","shape":[1],"data_offsets":[10,12]},"u32":{"dtype":"U32","shape":[1],'
      .. '"data_offsets":[12,16]}}', "\0\0\128\63\127\128\255\127\0\128\255\255\255\255\255\255")
    local all = ps.load(folder .. "/small.safetensors")
    assert.same({ 1, { 127, -128 }, { { 32767 }, { -32768 } }, { 65535 } }, { all.a:item(), all.i8:tolist(),
      all.i16:tolist(), all.u16:tolist() })
    assert.same({ "int32", "int32", "int32", "int64" }, { all.i8:dtype(), all.i16:dtype(), all.u16:dtype(),
      all.u32:dtype() })
    assert.equal(2 ^ 32 - 1, tonumber(all.u32:item()))
  end)

  it("are detected wherever they end", function()
    local path = folder .. "/whole.safetensors"
    ps.safetensors.save(path, { a = ps.ones { 5 }, b = ps.zeros({ 2, 2 }, { dtype = "int64" }) })
    local whole = read(path)
    for length = 0, #whole - 1 do
      write("cut.safetensors", whole:sub(1, length))
      fails_with("EFORMAT", { "cut.safetensors" }, open "cut.safetensors")
    end
    write("cut.safetensors", whole .. "x")
    fails_with("EFORMAT", { "cut.safetensors" }, open "cut.safetensors")
  end)

  it("leave the model unchanged", function()
    local model = gpt2.new "tiny"
    local weight = model.transformer.wte.weight
    local before, bias = weight:sum():item(), model.transformer.h[0].attn.c_attn.weight:sum():item()
    local path = folder .. "/other.safetensors"
    gpt2.new("tiny", { n_layer = 1 }):save_pretrained(folder)
    fails({ "missing", "transformer.h.1" }, function() model:load_weights(folder .. "/model.safetensors") end)
    gpt2.new("tiny", { vocab_size = 100 }):save_pretrained(folder)
    fails({ "wte.weight is [256, 32] in the model, [100, 32]" }, function()
      model:load_weights(folder .. "/model.safetensors")
    end)
    -- A type that psluajit does not have, in a tensor that follows others.
    ps.safetensors.save(path, gpt2.new("tiny"):state_dict())
    local found
    local text = read(path):gsub('("transformer.ln_f.bias":{"dtype":")F32(")', function(head, tail)
      found = true
      return head .. "U32" .. tail
    end)
    assert.truthy(found)
    write("other.safetensors", text)
    fails({ "transformer.ln_f.bias", "U32", "not supported" }, function()
      model:load_state_dict(ps.safetensors.open(path))
    end)
    assert.equal(before, weight:sum():item())
    assert.equal(bias, model.transformer.h[0].attn.c_attn.weight:sum():item())
    fails({ "no model file", "config.json" }, function() gpt2.from_pretrained(folder .. "/nowhere") end)
  end)

  it("cannot be written to a missing folder", function()
    fails_with("EIO", { "/nowhere/x.safetensors" }, function()
      ps.safetensors.save(folder .. "/nowhere/x.safetensors", { a = ps.ones { 1 } })
    end)
    local nothing = ps.ones({ 1 }, { device = "meta" })
    fails_with("EUNSUP", { "device meta have no data" }, function()
      ps.safetensors.save(folder .. "/x.safetensors", { a = nothing })
    end)
    assert.falsy(files():find("x.safetensors", 1, true))
  end)
end)

describe("invalid token files", function()
  in_folder()

  it("are named, with the fault", function()
    fails({ "cannot open token file", "none.bin" }, function() ps.data.tokens(folder .. "/none.bin") end)
    write("plain.bin", "not a shard")
    local function plain(width)
      return function() ps.data.tokens(folder .. "/plain.bin", { width = width }) end
    end
    fails_with("EFORMAT", { "plain.bin", "no token header", "width" }, plain(nil))
    fails_with("EFORMAT", { "plain.bin", "multiple" }, plain(2))
    fails_with("EINVAL", { "1, 2 or 4" }, plain(3))
    local path = folder .. "/t.bin"
    ps.data.write_tokens(path, { 1, 2, 3, 4 })
    local whole = read(path)
    for _, length in ipairs { 4, 1023, 1024, 1025, #whole - 1 } do
      write("cut.bin", whole:sub(1, length))
      fails_with("EFORMAT", { "cut.bin", "truncated" }, function() ps.data.tokens(folder .. "/cut.bin") end)
    end
    fails_with("ERANGE", { "t.bin" }, function() ps.data.tokens(path):read(2, 3) end)
    local before = read(path)
    fails_with("ERANGE", { "t.bin", "65536" }, function() ps.data.write_tokens(path, { 1, 65536 }) end)
    fails_with("ERANGE", { "-1" }, function() ps.data.write_tokens(path, { 1, -1 }) end)
    assert.equal(before, read(path))
    assert.equal("cut.bin plain.bin t.bin", files())
  end)

  it("are refused for too large ids and too few tokens", function()
    local path = folder .. "/v.bin"
    local ids = {}
    for i = 1, 200 do ids[i] = i == 150 and 99 or i % 50 end
    ps.data.write_tokens(path, ids)
    local loader = ps.data.loader { shards = { path }, batch = 2, seq = 8, vocab = 60, shuffle = false }
    fails_with("ERANGE", { "v.bin", "99", "149", "60" }, function()
      for _ = 1, 100 do loader:next() end
    end)
    loader = nil                                               -- luacheck: ignore 311
    fails_with("EINVAL", { "too few tokens", "smaller batch" }, function()
      ps.data.loader { shards = { path }, batch = 100, seq = 8 }
    end)
    fails({ "batch and seq" }, function() ps.data.loader { file = path } end)
    fails_with("ERANGE", { "[0, 500)", "200" }, function()
      ps.data.loader { file = path, batch = 1, seq = 8, last = 500 }
    end)
  end)

  it("are detected when truncated during use", function()
    local path = folder .. "/shrink.bin"
    local ids = {}
    for i = 1, 20000 do ids[i] = 7 end
    ps.data.write_tokens(path, ids)
    local loader = ps.data.loader { shards = { path }, batch = 2, seq = 100, ahead = 1 }
    loader:next()
    local rest = ps.now() + 0.05                               -- the thread has filled its only slot again
    while ps.now() < rest do end                               -- luacheck: ignore 542
    write("shrink.bin", read(path):sub(1, 5000))
    fails_with("EIO", { "shrink.bin", "was truncated from 41024 to" }, function()
      for _ = 1, 200 do loader:next() end
    end)
  end)
end)

-- -- training ------------------------------------------------------------------------------------------------------

describe("training that fails", function()
  in_folder()
  local threads

  setup(function()
    threads = ps.threads()
    ps.set_threads(1)
    write("text.txt", ("The quick brown fox jumps over the lazy dog. "):rep(100))
  end)
  teardown(function() ps.set_threads(threads) end)

  local function options(more)
    ps.manual_seed(5)
    local model = gpt2.new "tiny"
    local o = { model = model, optimizer = ps.optim.AdamW(model, { lr = 1e-3 }), steps = 6, quiet = true,
      loader = ps.data.loader { file = folder .. "/text.txt", batch = 2, seq = 16, vocab = 256, seed = 1 } }
    for key, value in pairs(more) do o[key] = value end
    return o
  end

  local function is_finite(tensor) return tensor:isfinite():sum():item() == tensor:numel() end

  it("stops at a loss that is not a number and keeps saved files", function()
    local run, n = folder .. "/nan", 0
    fails({ "loss is", "nan", "step 4", "learning rate", "step-00000003.safetensors" }, function()
      ps.train.run(options { max_norm = 1, log = folder .. "/nan.csv", checkpoint = { folder = run, every = 1 },
        loss = function(model, x, y)
          n = n + 1
          return n == 4 and model(x, y) * (0 / 0) or model(x, y)
        end })
    end)
    assert.equal("latest step-00000002.safetensors step-00000003.safetensors", files(run))
    local o = options {}
    assert.equal(3, ps.checkpoints.load(run, { model = o.model, optimizer = o.optimizer, loader = o.loader }).step)
    for _, p in ipairs(o.model:parameters()) do assert.truthy(is_finite(p)) end
    assert.equal(3, select(2, read(folder .. "/nan.csv"):gsub("\n%d+,", "")))
  end)

  it("stops at a token outside the vocabulary", function()
    fails({ "text.txt", "vocabulary" }, function()
      local loader = ps.data.loader { file = folder .. "/text.txt", batch = 2, seq = 16, vocab = 100 }
      ps.train.run(options { loader = loader })
    end)
    local small = gpt2.new("tiny", { vocab_size = 100 })
    fails({ "embedding", "100" }, function()
      ps.train.run(options { model = small, optimizer = ps.optim.AdamW(small, { lr = 1e-3 }) })
    end)
  end)

  it("stops without memory and can continue", function()
    local o = options { checkpoint = { folder = folder .. "/memory", every = 1 } }
    o.steps = 1
    ps.train.run(o)
    collectgarbage()
    ps.set_memory_limit(ps.memory().used + 20000)
    o.steps, o.start = 2, 1
    local ok, problem = pcall(ps.train.run, o)
    ps.set_memory_limit(0)
    assert.falsy(ok)
    assert.equal("ENOMEM", problem.name)
    assert.truthy(problem.msg:find("the limit set is", 1, true) and problem.msg:find("smaller batch", 1, true))
    assert.equal("latest log.jsonl step-00000001.safetensors", files(folder .. "/memory"))
    assert.equal(2, ps.train.run(o).step)
    assert.equal("latest log.jsonl step-00000001.safetensors step-00000002.safetensors", files(folder .. "/memory"))
  end)

  it("refuses to resume from a file that is not a checkpoint, and changes nothing", function()
    local o = options {}
    local parts = { model = o.model, optimizer = o.optimizer, loader = o.loader }
    local before = o.model.transformer.wte.weight:sum():item()
    fails({ "holds no checkpoint", folder }, function() ps.checkpoints.load(folder .. "/nowhere", parts) end)
    o.model:save_pretrained(folder .. "/plain")
    fails({ "plain/model.safetensors", "not a checkpoint" }, function()
      ps.checkpoints.load(folder .. "/plain/model.safetensors", parts)
    end)
    local other = gpt2.new("tiny", { n_layer = 1 })
    local path = ps.checkpoints.save(folder .. "/other.safetensors", { model = other })
    fails({ "other.safetensors", "no optimizer" }, function() ps.checkpoints.load(path, parts) end)
    fails({ "missing", "transformer.h.1" }, function() ps.checkpoints.load(path, { model = o.model }) end)
    write("cut.safetensors", read(path):sub(1, 5000))
    fails_with("EFORMAT", { "cut.safetensors", "truncated" }, function()
      ps.checkpoints.load(folder .. "/cut.safetensors", { model = o.model })
    end)
    assert.equal(before, o.model.transformer.wte.weight:sum():item())
    write("notafolder", "")
    fails({ "notafolder" }, function() ps.checkpoints.save(folder .. "/notafolder/run", parts) end)
  end)
end)

-- -- a full disk -----------------------------------------------------------------------------------------------------

-- Trains to step arg[3], from the checkpoint in arg[1] if there is one, and prints the result.
local SCRIPT = [[
  local ps, gpt2, lfs = require "ps", require "models.gpt2", require "lfs"
  ps.set_threads(1)
  local folder, text, steps = arg[1], arg[2], tonumber(arg[3])
  local model = gpt2.new "tiny"
  local optimizer = ps.optim.AdamW(model, { lr = 1e-3 })
  local loader = ps.data.loader { file = text, batch = 2, seq = 16, seed = 1 }
  local parts, start = { model = model, optimizer = optimizer, loader = loader }, 0
  if ps.checkpoints.find(folder) then start = ps.checkpoints.load(folder, parts).step end
  print("start", start)
  local ok, problem = pcall(ps.train.run, { model = model, optimizer = optimizer, loader = loader, steps = steps,
    start = start, quiet = true, checkpoint = { folder = folder, every = 1 } })
  print("train", ok, type(problem) == "table" and problem.name, ok or tostring(problem))
  ok, problem = pcall(ps.data.encode_file, text, folder .. "/shard.bin", ps.tokenizer.bytes())
  print("shard", ok, type(problem) == "table" and problem.name, ok or tostring(problem))
  local names = {}
  for name in lfs.dir(folder) do names[#names + 1] = name end
  table.sort(names)
  print("files", table.concat(names, " "))
]]

describe("a full disk", function()
  in_folder()

  --- Runs a shell command with $psluajit, $script, $text and $run set. Returns its output, or nil if it failed.
  local function shell(command)
    local paths = require "ps.paths"
    write("script.lua", SCRIPT)
    write("text.txt", ("x"):rep(600000))
    local run = folder .. "/run"
    local set = ("psluajit='%s' script=%s/script.lua text=%s/text.txt run=%s; export psluajit script text run;")
      :format(paths.exe, folder, folder, run)
    local p = assert(io.popen(("%s mkdir -p $run; (%s) 2>&1; echo \"|$?\"; rm -rf $run"):format(set, command)))
    local out, code = p:read("*a"):match("^(.*)|(%d+)\n$")
    p:close()
    return tonumber(code) == 0 and out or nil, out
  end

  local function check(out)
    assert.truthy(out:find("start\t0\ntrain\ttrue", 1, true), out)
    local second = out:match("\nstart\t1\n.*$")
    assert.truthy(second, out)
    assert.truthy(second:find("train\tfalse\tEIO\t", 1, true), second)
    assert.truthy(second:find("step-00000002.safetensors", 1, true), second)
    assert.truthy(second:find("shard\tfalse\tEIO\t", 1, true) and second:find("shard.bin", 1, true), second)
    assert.truthy(second:find("files\t. .. latest log.jsonl step-00000001.safetensors\n", 1, true), second)
  end

  it("by a limit on file sizes leaves the last checkpoint intact", function()
    local out, all = shell [[
      rm -f $run/shard.bin; $psluajit $script $run $text 1 && rm $run/shard.bin &&
      ulimit -f 400 && $psluajit $script $run $text 2]]
    assert.truthy(out, all)
    check(out)
    assert.truthy(out:find("ulimit", 1, true) or out:find("limit", 1, true), out)
  end)

  it("that is really full leaves the last checkpoint intact", function()
    local mounted = shell "unshare -m sh -c 'mount -t tmpfs -o size=64k none $run'"
    if not mounted then
      pending("no tmpfs may be mounted here; the limit on file sizes was tried instead")
      return
    end
    local out, all = shell [[
      unshare -m sh -c 'mount -t tmpfs -o size=2200k none $run && $psluajit $script $run $text 1 &&
        rm $run/shard.bin && head -c 1500000 /dev/zero > $run/fill; $psluajit $script $run $text 2; rm $run/fill']]
    assert.truthy(out, all)
    check((out:gsub(" fill", "")))
    assert.truthy(out:lower():find("no space", 1, true) or out:find("full", 1, true), out)
  end)
end)
