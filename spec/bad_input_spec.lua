-- SPDX-License-Identifier: BSD-3-Clause
-- Wrong shapes, types, files, ids, losses: each is a Lua error that names the op, the shapes or the file and says what
-- to do, never a crash, and nothing saved before is lost.
local ffi = require "ffi"
local lfs = require "lfs"
local ps = require "ps"
local gpt2 = require "models.gpt2"

--- fn must fail with a message that holds all these words.
local function fails(words, fn)
  local ok, problem = pcall(fn)
  assert.falsy(ok, "no error")
  local text = tostring(problem)
  for _, word in ipairs(words) do
    if not text:find(word, 1, true) then error(("'%s' is missing in: %s"):format(word, text), 2) end
  end
  return problem
end

--- As fails, and the error is the engine's, of this code.
local function fails_with(code, words, fn)
  local problem = fails(words, fn)
  if getmetatable(problem) ~= ps.Error then error("not an engine error: " .. tostring(problem), 2) end
  assert.equal(code, problem.name)
end

local folder

local function write(name, text)
  local f = assert(io.open(folder .. "/" .. name, "wb"))
  f:write(text)
  f:close()
  return folder .. "/" .. name
end

local function read(path)
  local f = assert(io.open(path, "rb"))
  local text = f:read("*a")
  f:close()
  return text
end

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

describe("ops given wrong tensors", function()
  local a, b

  setup(function() a, b = ps.ones { 2, 3 }, ps.ones { 4, 5 } end)
  teardown(function() a, b = nil, nil end)

  it("name themselves and the shapes", function()
    fails_with("EINVAL", { "add:", "do not broadcast", "fp32 [2, 3], fp32 [4, 5]" }, function() return a + b end)
    fails_with("EINVAL", { "matmul:", "[2, 3]", "[4, 5]" }, function() return a:matmul(b) end)
    fails_with("EINVAL", { "concat:", "[2, 3]", "[4, 5]" }, function() return ps.cat({ a, b }, 0) end)
    fails_with("EINVAL", { "linear:", "[2, 3]", "[4, 5]" }, function() return ps.F.linear(a, b) end)
    fails_with("EINVAL", { "reshape:", "[7, 2]", "6 elements" }, function() return a:reshape(7, 2) end)
    fails_with("EINVAL", { "reshape:", ":contiguous()" }, function() return a:t():view(6) end)
    fails_with("EINVAL", { "permute:", "twice" }, function() return a:permute(0, 0) end)
    fails_with("EINVAL", { "expand", "[2, 3]" }, function() return a:expand(2, 4) end)
    fails_with("EINVAL", { "layer_norm:", "[2, 3]", "[4, 5]" }, function() return ps.F.layer_norm(a, b) end)
    fails_with("EINVAL", { "attention_packed:", "[2, 3]" }, function() return ps.F.attention_packed(a, 2) end)
    fails_with("EINVAL", { "copy_", "[4, 5]" }, function() a:copy_(b) end)
  end)

  it("name the types and devices", function()
    local i = ps.tensor({ 1, 2 }, "int64")
    fails_with("EINVAL", { "embedding", "int32 or int64" }, function() return ps.F.embedding(a, b) end)
    fails_with("EINVAL", { "cross_entropy:", "fp32 [2, 3]" }, function() return ps.F.cross_entropy(a, a) end)
    fails_with("EINVAL", { "mean", "int64 [2]" }, function() return i:mean() end)
    fails_with("EINVAL", { "different devices", "cpu", "ref", ":to(device)" }, function() return a + a:to "ref" end)
    fails({ "no such type: fp12", "bf16" }, function() ps.zeros({ 1 }, { dtype = "fp12" }) end)
    fails_with("EUNSUP", { "gpu", "cpu" }, function() ps.zeros({ 1 }, { device = "gpu" }) end)
    fails_with("EUNSUP", { "meta" }, function() return ps.zeros({ 3 }, { device = "meta" }):tolist() end)
    fails_with("EINVAL", { "only float tensors", "int64" }, function() i:requires_grad() end)
    fails({ "rows of different lengths" }, function() return ps.tensor { { 1, 2 }, { 3 } } end)
    fails({ "a string among the numbers" }, function() return ps.tensor { "x" } end)
    fails({ "add: b is a table; it takes a tensor" }, function() return ps.ops.add(a, {}) end)
    fails({ "input b is missing" }, function() return ps.ops.add(a, nil) end)
  end)

  it("name indices out of range", function()
    local ids = ps.tensor({ 0, 2 }, "int64")
    fails({ "index 2", "size 2" }, function() return a[2] end)
    fails({ "dimension 5" }, function() return a:size(5) end)
    fails({ "dimension 2" }, function() return a:sum(2) end)
    fails({ "one element", "6" }, function() return a:item() end)
    fails_with("ERANGE", { "embedding", "2" }, function() return ps.F.embedding(ids, a) end)
    fails_with("ERANGE", { "cross_entropy", "3" }, function()
      return ps.F.cross_entropy(a, ps.tensor({ 0, 3 }, "int64"))
    end)
    fails_with("ERANGE", { "lm_loss", "4" }, function()
      return ps.F.lm_loss(ps.ones { 2, 5 }, b, ps.tensor({ 0, 4 }, "int32"))
    end)
    fails_with("ERANGE", { "gather", "-1" }, function()
      return a:gather(1, ps.tensor({ { 0, -1 }, { 0, 0 } }, "int64"))
    end)
    fails({ "8" }, function() return ps.zeros { 1, 1, 1, 1, 1, 1, 1, 1, 1 } end)
    fails({ "at most 8" }, function() return a:reshape(1, 1, 1, 1, 1, 1, 1, 1, 1, 6) end)
    fails({ "list of numbers" }, function() return ps.ops.permute(a) end)
    fails_with("EINVAL", { "negative", "-1" }, function() return ps.zeros { -1 } end)
    fails_with("EINVAL", { "addressed" }, function() return ps.empty { 2 ^ 40, 2 ^ 20 } end)
  end)

  it("say what gradients need", function()
    local w = ps.ones({ 2, 3 }, { requires_grad = true })
    fails_with("EINVAL", { "depends on nothing that requires a gradient" }, function() a:sum():backward() end)
    fails_with("EINVAL", { "backward", "[2, 3]", "needs a gradient" }, function() (w * 2):backward() end)
    fails_with("EINVAL", { "fill_", "ps.no_grad" }, function() ps.ops.fill_(w, 1) end)
    local loss = (w * w):sum()
    loss:backward()
    fails_with("ESTATE", { "second time", "compute the loss again" }, function() loss:backward() end)
    local x = ps.ones { 2, 3 }
    local y = (w * x):sum()
    x:fill_(3)
    fails_with("ESTALE", { "changed in place", "mul" }, function() y:backward() end)
    fails_with("EINVAL", { "gradient" }, function() w:set_grad(b) end)
    w:set_grad(nil)
  end)

  it("say when a scope took the bytes", function()
    local kept
    ps.scope(function() kept = ps.ones { 200, 200 } end)
    fails_with("ESTALE", { "[200, 200]", ":keep()", "ps.scope" }, function() return kept + 1 end)
    fails_with("ESTALE", { "[200, 200]" }, function() return kept:tolist() end)
  end)

  it("take nonsense of any kind", function()
    local tensors = { a, b, ps.zeros {}, ps.zeros { 0 }, ps.zeros { 3, 0 }, ps.ones({ 2, 3 }):t(), ps.ones { 6 },
      ps.randn { 2, 2, 3 }, ps.tensor({ -1, 7, 1 }, "int64"), ps.tensor({ { 0, 1, 1 }, { 1, 0, 9 } }, "int32"),
      ps.tensor({ true, false, true }), ps.ones({ 2, 3 }, { dtype = "bf16" }), ps.ones({ 3 }, { dtype = "fp64" }),
      ps.ones({ 3 }, { dtype = "uint8" }), ps.ones({ 1, 3 }):expand(2, 3), ps.randn { 1, 2, 12 },
      ps.randn { 1, 2, 4, 3 },
      ps.ones({ 2, 3 }, { requires_grad = true }), ps.ones({ 2, 3 }, { device = "ref" }) }
    local numbers = { 0, 1, 2, 3, -1, 4, 8, 100, -100, 1e6, -1e6, 2 ^ 31 - 1, -2 ^ 31, 2 ^ 40, 1e18, -1e18, 0.5, 1e-30,
      1 / 0, 0 / 0 }
    local state = 12345
    local function random(n)
      state = (state * 16807) % 2147483647
      return state % n + 1
    end
    local function number() return numbers[random(random(3) == 1 and #numbers or 6)] end
    local function value()
      local kind = random(8)
      if kind == 1 then return nil end
      if kind == 2 then return { number(), number(), number() } end
      return number()
    end
    ps.set_memory_limit(ps.memory().used + 2 ^ 26)
    local ran, refused = 0, 0
    for _, info in pairs(ps.op_info) do
      local n_in = info.ins:find("*", 1, true) and 1 or select(2, info.ins:gsub("%S+", ""))
      local params = debug.getinfo(ps.ops[info.name], "u").nparams
      for _ = 1, 150 do
        local args = {}
        for i = 1, params do
          if i > n_in then args[i] = value()
          elseif info.ins:find("*", 1, true) then
            args[i] = {}
            for k = 1, random(6) do args[i][k] = tensors[random(#tensors)] end
          elseif random(20) > 1 then args[i] = tensors[random(#tensors)] end
        end
        local ok, problem = pcall(function() return ps.ops[info.name](unpack(args, 1, params)) end)
        if ok then ran = ran + 1 else refused = refused + 1 end
        if not ok and type(problem) == "table" then
          assert.truthy(problem.msg:find(info.name, 1, true) or problem.op == info.name, problem.msg)
        end
      end
    end
    ps.set_memory_limit(0)
    assert.truthy(ran > 500 and refused > 2000, ran .. " ran, " .. refused .. " refused")
  end)
end)

describe("models and optimizers set up wrongly", function()
  it("say what does not fit", function()
    fails({ "no preset 'gpt3'", "gpt2-xl" }, function() gpt2.new "gpt3" end)
    fails({ "n_head = 3", "n_embd = 32" }, function() gpt2.new("tiny", { n_head = 3 }) end)
    fails({ "no setting 'layers'" }, function() gpt2.new("tiny", { layers = 3 }) end)
    local model = gpt2.new "tiny"
    local x = ps.zeros({ 2, 40 }, { dtype = "int32" })
    fails({ "40 positions", "has 32" }, function() model(x, x) end)
    fails({ "[batch, positions]" }, function() model(x[0]) end)
    local small = x:narrow(1, 0, 8)
    fails({ "embedding", "256" }, function() model(small + 256, small) end)
    fails({ "lm_loss", "256" }, function() model(small, small + 256) end)
    fails({ "AdamW", "no option 'rate'" }, function() ps.optim.AdamW(model, { rate = 1 }) end)
    fails({ "no parameters" }, function() ps.optim.SGD({}, { lr = 1 }) end)
    fails({ "listed twice" }, function()
      local p = ps.ones({ 1 }, { requires_grad = true })
      ps.optim.SGD({ p, p }, { lr = 1 })
    end)
  end)

  it("do not step on gradients that are not numbers", function()
    local p = ps.ones({ 4 }, { requires_grad = true })
    local optimizer = ps.optim.AdamW({ p }, { lr = 0.1 })
    p:set_grad(ps.full({ 4 }, 0 / 0))
    fails({ "gradient norm is", "left as they are" }, function() optimizer:step { max_norm = 1 } end)
    assert.same({ 1, 1, 1, 1 }, p:tolist())
  end)
end)

describe("seeds", function()
  it("are whole numbers", function()
    fails({ "bad_input_spec.lua", "takes a whole number, not a string" }, function() ps.manual_seed("x") end)
    fails({ "takes a whole number, not a nil" }, function() ps.manual_seed() end)
    fails({ "takes a whole number, not 0.5" }, function() ps.manual_seed(0.5) end)
  end)
end)

describe("groups of parameters of an engine", function()
  it("say which key, or type, is not one", function()
    local function groups(list)
      return function()
        ps.initialize { config = {}, quiet = true, param_groups = list, model_func = function()
          return ps.nn.Linear(4, 4)
        end }
      end
    end
    fails({ "param_groups is a list of tables" }, groups {})
    fails({ "param_groups is a list of tables" }, groups "bias")
    fails({ "param_groups[2] is a number, not a table" }, groups { {}, 3 })
    fails({ "param_groups[1].match is a string, not a function" }, groups { { match = "bias" }, {} })
    fails({ "param_groups[1] has 'params'; a group has match = function(name, parameter)" },
      groups { { params = { "bias" } } })
    fails({ "param_groups[2].weight_decay is a string" }, groups { {}, { weight_decay = "0" } })
  end)
end)

describe("safetensors files that are no good", function()
  in_folder()

  local function open(name) return function() return ps.safetensors.open(folder .. "/" .. name) end end

  -- A file from its JSON header and data.
  local function file(name, header, data)
    local length = ffi.new("uint64_t[1]", #header)
    return write(name, ffi.string(length, 8) .. header .. (data or ""))
  end

  it("are named, with what is wrong", function()
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

  it("are found out wherever they end", function()
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

  it("leave the model as it was", function()
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
    -- A type we lack, in a tensor that comes after others.
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

  it("cannot be written where there is no place", function()
    fails_with("EIO", { "/nowhere/x.safetensors" }, function()
      ps.safetensors.save(folder .. "/nowhere/x.safetensors", { a = ps.ones { 1 } })
    end)
    local nothing = ps.ones({ 1 }, { device = "meta" })
    fails_with("EUNSUP", { "meta holds no data" }, function()
      ps.safetensors.save(folder .. "/x.safetensors", { a = nothing })
    end)
    assert.falsy(files():find("x.safetensors", 1, true))
  end)
end)

describe("token files that are no good", function()
  in_folder()

  it("are named, with what is wrong", function()
    fails({ "no token file", "none.bin" }, function() ps.data.tokens(folder .. "/none.bin") end)
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

  it("are found to hold too large ids and too few tokens", function()
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

  it("are noticed when cut while in use", function()
    local path = folder .. "/shrink.bin"
    local ids = {}
    for i = 1, 20000 do ids[i] = 7 end
    ps.data.write_tokens(path, ids)
    local loader = ps.data.loader { shards = { path }, batch = 2, seq = 100, ahead = 1 }
    loader:next()
    local rest = ps.now() + 0.05                               -- the thread has filled its one place again
    while ps.now() < rest do end                               -- luacheck: ignore 542
    write("shrink.bin", read(path):sub(1, 5000))
    fails_with("EIO", { "shrink.bin", "was cut from 41024 to" }, function()
      for _ = 1, 200 do loader:next() end
    end)
  end)
end)

-- -- training ------------------------------------------------------------------------------------------------------

describe("training that goes wrong", function()
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

  it("stops at a loss that is no number and keeps what was saved", function()
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

  it("stops where a token is beyond the vocabulary", function()
    fails({ "text.txt", "vocabulary" }, function()
      local loader = ps.data.loader { file = folder .. "/text.txt", batch = 2, seq = 16, vocab = 100 }
      ps.train.run(options { loader = loader })
    end)
    local small = gpt2.new("tiny", { vocab_size = 100 })
    fails({ "embedding", "100" }, function()
      ps.train.run(options { model = small, optimizer = ps.optim.AdamW(small, { lr = 1e-3 }) })
    end)
  end)

  it("stops without memory and can go on", function()
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
    assert.equal("latest step-00000001.safetensors", files(folder .. "/memory"))
    assert.equal(2, ps.train.run(o).step)
    assert.equal("latest step-00000001.safetensors step-00000002.safetensors", files(folder .. "/memory"))
  end)

  it("refuses to resume from what is no checkpoint, and changes nothing", function()
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

-- Trains to step arg[3], from the checkpoint in arg[1] if there is one, and prints what came of it.
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

  --- Runs a shell command with $psluajit, $script, $text and $run set; its output, or nil when it failed.
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
    assert.truthy(second:find("files\t. .. latest step-00000001.safetensors\n", 1, true), second)
  end

  it("by a limit on file sizes leaves the last checkpoint whole", function()
    local out, all = shell [[
      rm -f $run/shard.bin; $psluajit $script $run $text 1 && rm $run/shard.bin &&
      ulimit -f 400 && $psluajit $script $run $text 2]]
    assert.truthy(out, all)
    check(out)
    assert.truthy(out:find("ulimit", 1, true) or out:find("limit", 1, true), out)
  end)

  it("that is really full leaves the last checkpoint whole", function()
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
