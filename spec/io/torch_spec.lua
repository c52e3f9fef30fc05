-- SPDX-License-Identifier: BSD-3-Clause
-- ps.save and ps.load: round trips, refusals, streaming; and both directions against PyTorch itself, if a Python with
-- torch is found (PS_TORCH_PYTHON names one; else python3).
local ps = require "ps"
local ffi = require "ffi"
local nn = ps.nn
local none = ps.serialize.none
local check = require "spec.check_lib"

local folder

local function path(name) return folder .. "/" .. name end

local function capture(command)
  return check.shell(command)
end

local function write_file(name, text)
  local f = assert(io.open(path(name), "wb"))
  f:write(text)
  f:close()
  return path(name)
end

local function read_file(name)
  local f = assert(io.open(path(name), "rb"))
  local text = f:read("*a")
  f:close()
  return text
end

local function fails(words, fn, ...)
  local ok, problem = pcall(fn, ...)
  assert.falsy(ok)
  problem = tostring(problem)
  for _, word in ipairs(type(words) == "table" and words or { words }) do
    if not problem:find(word, 1, true) then error(("'%s' lacks '%s'"):format(problem, word), 2) end
  end
end

local function write_raw(name, values, shape, stride)
  check.write_strided(path(name), values, shape, stride)
  return path(name)
end

setup(function()
  folder = os.tmpname()
  os.remove(folder)
  assert(os.execute("mkdir " .. folder) == 0)
end)
teardown(function() os.execute("rm -rf " .. folder) end)

describe("ps.save and ps.load", function()
  it("restore any nesting of values", function()
    local value = {
      model = { a = ps.arange(6, { dtype = "fp32" }):reshape(2, 3), b = ps.ones({}, { dtype = "bf16" }) },
      [0] = "zero", [7] = { 1, 2.5, -3, "x", true, false, {}, none, { none } },
      big = 1e300, small = 5e-324, inf = math.huge, minus = -math.huge, exact = 2 ^ 53, wide = 2 ^ 53 + 2,
      text = "h\195\169\n\0", bytes = "\255\0\128", empty = ps.serialize.list {}, step = 10, yes = true,
      int = 9007199254740993LL, unsigned = 5ULL,
    }
    ps.save(value, path "v.pt")
    local back = ps.load(path "v.pt")
    assert.same({ { 0, 1, 2 }, { 3, 4, 5 } }, back.model.a:tolist())
    assert.equal("bf16", back.model.b:dtype())
    assert.same({}, back.model.b:shape())
    assert.same({ 1, 2.5, -3, "x", true, false, {}, none, { none } }, back[7])
    assert.same({}, back.empty)
    assert.equal(9007199254740993LL, back.int)
    assert.equal(5, back.unsigned)
    for _, key in ipairs { 0, "big", "small", "inf", "minus", "exact", "wide", "text", "bytes", "step", "yes" } do
      assert.equal(value[key], back[key])
    end
    assert.equal("list", require("ps.io.torch_pt").kind(back.empty))
    ps.save(back, path "w.pt")                             -- and the file is the same if nothing has changed
    ps.save(ps.load(path "w.pt"), path "v.pt")
    assert.truthy(read_file "v.pt" == read_file "w.pt")
  end)

  it("also accept single numbers, strings and tensors", function()
    for _, value in ipairs { 12, -0.5, "text", true, false } do
      ps.save(value, path "x.pt")
      assert.equal(value, ps.load(path "x.pt"))
    end
    ps.save(-0.0, path "x.pt")
    assert.equal(-math.huge, 1 / ps.load(path "x.pt"))
    ps.save(ps.ones { 2 }, path "x.pth")
    assert.same({ 1, 1 }, ps.load(path "x.pth"):tolist())
    ps.save(none, path "x.bin")
    assert.equal(nil, ps.load(path "x.bin"))
  end)

  it("keep every type, empty tensors and strided views", function()
    local state = { none = ps.empty { 0, 3 } }
    for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8" } do
      state[dtype] = ps.arange(24, { dtype = dtype }):reshape(2, 3, 4)
    end
    state.bool = ps.arange(6):gt(2)
    state.turned, state.part = state.fp32:permute(2, 0, 1), state.fp64:slice(2, 1, 4, 2)
    ps.save(state, path "t.pt")
    local back = ps.load(path "t.pt")
    for name, tensor in pairs(state) do
      assert.equal(tensor:dtype(), back[name]:dtype())
      assert.same(tensor:shape(), back[name]:shape())
      assert.same(tensor:tolist(), back[name]:tolist())
    end
  end)

  it("write a tensor that occurs twice once, and tie it again", function()
    local tensor = ps.randn { 64, 64 }
    ps.save({ tensor }, path "one.pt")
    ps.save({ a = tensor, b = { tensor, tensor:detach() } }, path "three.pt")
    assert.truthy(#read_file "three.pt" - #read_file "one.pt" < 1000)
    local back = ps.load(path "three.pt")
    assert.truthy(ps.same(back.a, back.b[1]) and ps.same(back.a, back.b[2]))
  end)

  it("keep the order of keys of a file", function()
    ps.save({ z = 1, a = 2 }, path "o.pt")
    local back = ps.load(path "o.pt")
    assert.same({ "a", "z" }, ps.serialize.keys(back))
    back.m, back.a = 3, nil
    ps.save(back, path "o.pt")
    assert.same({ "z", "m" }, ps.serialize.keys(ps.load(path "o.pt")))
  end)

  it("keep the same table the same, and refuse one that contains itself", function()
    local shared = { 1 }
    ps.save({ shared, shared }, path "s.pt")
    local back = ps.load(path "s.pt")
    assert.same({ { 1 }, { 1 } }, back)
    assert.equal(back[1], back[2])
    local level = { x = ps.ones { 1 } }                     -- 2^40 paths to one tensor
    for i = 1, 40 do level = i % 2 == 0 and { level, level } or { a = level, b = level } end
    ps.save(level, path "s.pt")
    assert.truthy(#read_file "s.pt" < 3000)
    back = ps.load(path "s.pt")
    for i = 40, 1, -1 do back = i % 2 == 0 and back[2] or back.b end
    assert.same({ 1 }, back.x:tolist())
    local deep = {}
    for _ = 1, 120 do deep = { deep } end
    local below = deep
    for _ = 1, 78 do below = { below } end
    ps.save({ deep, below }, path "s.pt")
    ps.load(path "s.pt")
    fails("nested more than 200 deep", ps.save, { deep, { below } }, path "s.pt")
    shared[2] = { deep = shared }
    fails({ "'[2].deep'", "contains itself" }, ps.save, shared, path "s.pt")
  end)

  it("refuse values that files cannot hold, and name the place", function()
    fails({ "'a.b[2]'", "function" }, ps.save, { a = { b = { 1, print } } }, path "r.pt")
    fails({ "'m'", "state_dict()" }, ps.save, { m = nn.Linear(2, 2) }, path "r.pt")
    fails({ "key true" }, ps.save, { [true] = 1 }, path "r.pt")
    fails({ "key 1.5" }, ps.save, { [1.5] = 1 }, path "r.pt")
    fails({ "a nil" }, ps.save, nil, path "r.pt")
    fails({ "'x'", "ULL" }, ps.save, { x = 2ULL ^ 63 }, path "r.pt")
    fails({ "'x'", "scope" }, ps.save, { x = (function()
      local kept
      ps.scope(function() kept = ps.ones { 2 ^ 18 } end)
      return kept
    end)() }, path "r.pt")
    fails({ ".pt (PyTorch)" }, ps.save, {}, path "r.dat")
    fails({ "option 'lasy'", "lazy" }, ps.load, path "r.pt", { lasy = true })
    fails({ "No such file" }, ps.load, path "r.pt")
    local listed = capture("ls " .. folder)
    assert.falsy(listed:find("tmp", 1, true) or listed:find("r.pt", 1, true))
  end)

  it("write and read safetensors: flat tables of tensors only", function()
    ps.save({ a = ps.ones { 2 }, ["b.c"] = ps.zeros { 1 } }, path "f.safetensors")
    assert.same({ 1, 1 }, ps.load(path "f.safetensors").a:tolist())
    os.rename(path "f.safetensors", path "f.pt")           -- the contents determine the format, not the name
    assert.same({ 0 }, ps.load(path "f.pt")["b.c"]:tolist())
    fails({ "'model'", "table" }, ps.save, { model = {} }, path "f.safetensors")
    fails({ "tensors by name" }, ps.save, { ps.ones { 1 } }, path "f.safetensors")
  end)

  it("distinguish files by their contents, whatever the length of a header", function()
    for _, length in ipairs { 128, 384, 640, 896, 0x4B50, 0x7B80 } do      -- begins like a pickle and like an archive
      local header = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
      local text = string.char(length % 256, math.floor(length / 256), 0, 0, 0, 0, 0, 0) .. header
        .. (" "):rep(length - #header) .. "\0\0\128\63"
      for _, name in ipairs { "h.safetensors", "h.pt", "h" } do
        write_file(name, text)
        assert.same({ 1 }, ps.load(path(name)).a:tolist())
        assert.same({ "a" }, ps.load(path(name), { lazy = true }):names())
      end
    end
    ps.save({ a = ps.ones { 2 } }, path "zip.pt")
    write_file("zip.safetensors", read_file "zip.pt")
    assert.same({ 1, 1 }, ps.load(path "zip.safetensors").a:tolist())
  end)

  -- Returns the additional bytes that Lua's collector holds after fn.
  local function held(fn)
    collectgarbage()
    collectgarbage()
    collectgarbage "stop"
    local before = collectgarbage "count"
    local ok, problem = pcall(fn)
    local more = (collectgarbage "count" - before) * 1024
    collectgarbage "restart"
    if not ok then error(problem, 0) end
    return more
  end

  it("copy in pieces, dense or strided", function()
    local wide = ps.arange(3001 * 1009, { dtype = "int32" }):reshape(3001, 1009)           -- 12 MB
    assert.truthy(held(function() ps.save({ w = wide, turned = wide:t() }, path "big.pt") end) < 4e6)
    local file = write_raw("strided.pt", wide, { 1009, 3001 }, { 1, 1009 })
    local back
    assert.truthy(held(function() back = ps.load(file) end) < 4e6)
    assert.same({ 1009, 3001 }, back.w:shape())
    assert.equal(check.bytes(wide:t()), check.bytes(back.w))
    local into = ps.zeros({ 1009, 3001 }, { dtype = "int32" })
    ps.load(file, { lazy = true }):read_into("w", into)
    assert.equal(check.bytes(wide:t()), check.bytes(into))
    back = ps.load(path "big.pt")
    assert.truthy(check.bytes(wide) == check.bytes(back.w) and check.bytes(wide:t()) == check.bytes(back.turned))
  end)

  it("keep tensors that repeat their elements small", function()
    local row = ps.arange(3, { dtype = "fp32" })
    local state = { a = row:expand(2 ^ 20, 3), b = row:reshape(3, 1):expand(4, 3, 5), c = row }
    ps.save(state, path "e.pt")
    assert.truthy(#read_file "e.pt" < 2000)
    ps.scope(function()
      local before = ps.memory().used
      state = ps.load(path "e.pt")
      assert.truthy(ps.memory().used - before < 1e6)
    end)
    assert.same({ 2 ^ 20, 3 }, state.a:shape())
    assert.same({ 0, 1, 2 }, state.a:select(0, 77):tolist())
    assert.equal(check.bytes(row:reshape(3, 1):expand(4, 3, 5)), check.bytes(state.b))
    local into, file = ps.zeros { 4, 3, 5 }, ps.load(path "e.pt", { lazy = true })
    file:read_into("b", into)
    assert.equal(check.bytes(state.b), check.bytes(into))
    into = ps.zeros({ 4, 3, 5 }, { dtype = "fp64" })
    file:read_into("b", into)
    assert.equal(check.bytes(state.b:double()), check.bytes(into))
    -- one byte, and a shape of more than 4 GiB
    local many = ps.load(write_raw("bomb.pt", ps.full({ 1 }, 65, { dtype = "uint8" }), { 2 ^ 32 + 64 }, { 0 })).w
    assert.same({ 2 ^ 32 + 64 }, many:shape())
    assert.same({ 65, 65 }, many:narrow(0, 2 ^ 32, 2):tolist())
    -- overlaps in another way, and is read unchanged if it is small
    local line = ps.arange(2 ^ 15 * 2, { dtype = "int32" })
    local back = ps.load(write_raw("hankel.pt", line, { 3, 4 }, { 1, 1 }))
    assert.same({ { 0, 1, 2, 3 }, { 1, 2, 3, 4 }, { 2, 3, 4, 5 } }, back.w:tolist())
    fails({ "tensor 'w' is a view whose elements overlap", "262140 bytes", "4294967296", ".contiguous()" }, ps.load,
      write_raw("hankel.pt", line, { 2 ^ 15, 2 ^ 15 }, { 1, 1 }))
  end)

  it("make no array longer than LuaJIT counts", function()
    local array = require "ps.core.array"
    assert.equal(8, ffi.sizeof(array "uint8_t" (8)))
    for _, n in ipairs { 2 ^ 31, 2 ^ 32 + 64, 4294967296LL + 64, -1, 0 / 0 } do
      fails("in pieces", array "uint8_t", n)
    end
    fails("2147483648 elements of 8 bytes", array "double", 2 ^ 31)
    fails("in pieces", ps.zeros({ 1 }):expand(2 ^ 29).tolist, ps.zeros({ 1 }):expand(2 ^ 29))
  end)

  it("support tensors of 2 GiB and more", function()
    if not os.getenv "PS_FULL" then return end
    local n = 2 ^ 31 + 5
    local large = ps.empty({ n }, { dtype = "uint8" })
    large:narrow(0, n - 5, 5):fill_(7)
    ps.save({ w = large }, path "large.pt")
    large = nil                                            -- luacheck: ignore 311
    collectgarbage()
    local back = ps.load(path "large.pt").w
    assert.same({ { n }, { 7, 7, 7, 7, 7 } }, { back:shape(), back:narrow(0, n - 5, 5):tolist() })
    os.remove(path "large.pt")
  end)

  it("leave the old file when writing fails", function()
    ps.save({ 1 }, path "old.pt")
    fails("scope", function()
      local gone
      ps.scope(function() gone = ps.ones { 2 ^ 18 } end)
      ps.save({ gone }, path "old.pt")
    end)
    fails("ulimit", function()
      local limit = ffi.new("uint64_t[2]")
      ffi.cdef "int getrlimit(int, uint64_t *); int setrlimit(int, const uint64_t *);"
      ffi.C.getrlimit(1, limit)
      local most = limit[0]
      limit[0] = 4000
      ffi.C.setrlimit(1, limit)
      local ok, problem = pcall(ps.save, { ps.ones { 4096 } }, path "old.pt")
      limit[0] = most
      ffi.C.setrlimit(1, limit)
      if not ok then error(problem, 0) end
    end)
    assert.same({ 1 }, ps.load(path "old.pt"))
  end)

  it("find damage by checksums unless told not to", function()
    ps.save({ x = ps.full({ 64 }, 3) }, path "d.pt")
    local bytes = read_file "d.pt"
    local at = bytes:find(("\0\0\64\64"):rep(8), 1, true)
    write_file("d.pt", bytes:sub(1, at + 1) .. "\1" .. bytes:sub(at + 3))
    fails({ "archive/data/0", "verify = false" }, ps.load, path "d.pt")
    assert.equal(64, ps.load(path "d.pt", { verify = false }).x:numel())
  end)
end)

describe("a file opened lazily", function()
  local Net = nn.class "Net"
  function Net:init()
    self.wide = nn.Linear(300, 200)
    self.narrow = nn.Linear(200, 10)
  end

  it("gives names, shapes, types and tensors one at a time", function()
    local state = { b = ps.arange(6):reshape(2, 3):t(), a = ps.ones({ 4 }, { dtype = "bf16" }), n = 1, inner = {} }
    ps.save(state, path "l.pt")
    local file = ps.load(path "l.pt", { lazy = true })
    assert.same({ "a", "b" }, file:names())
    assert.same({ "a", "b", "inner", "n" }, file:keys())
    assert.same({ 3, 2 }, file:shape "b")
    assert.equal("bf16", file:dtype "a")
    assert.truthy(file:has "a" and not file:has "n" and not file:has "x")
    assert.truthy(file:holds "n" and not file:holds "x")
    assert.equal(1, file:get "n")
    assert.equal(nil, file:get "x")
    assert.same({ 1, 1, 1, 1 }, file:get "a":tolist())
    assert.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, file:tensor "b":tolist())
    local into = ps.zeros { 4 }
    file:read_into("a", into)                              -- another type
    assert.same({ 1, 1, 1, 1 }, into:tolist())
    local turned = ps.zeros({ 2, 3 }, { dtype = "int64" }):t()
    file:read_into("b", turned)                            -- strides
    assert.same({ { 0, 3 }, { 1, 4 }, { 2, 5 } }, turned:tolist())
    fails({ "'b'", "[3, 2]", "[5]" }, file.read_into, file, "b", ps.zeros({ 5 }, { dtype = "int64" }))
    fails("no tensor 'x'", file.check, file, "x")
    fails("no dict 'n'", file.at, file, "n")
    ps.save({ a = ps.ones { 2 } }, path "l.safetensors")
    for _, one in ipairs { file, ps.load(path "l.safetensors", { lazy = true }) } do
      fails({ "torch_spec.lua", "with a colon" }, function() one.names() end)
      fails({ "torch_spec.lua", "with a colon" }, function() one.close() end)
      fails({ "torch_spec.lua", "read_into takes a tensor", "not a nil" }, function() one:read_into("a") end)
      fails({ "torch_spec.lua", "no tensor 'x'" }, function() one:tensor("x") end)
      one:close()
      fails("was closed", one.names, one)
    end
  end)

  it("streams into load_state_dict, nested dicts by :at", function()
    local from, to = Net(), Net()
    ps.save({ model = from:state_dict(), step = 3 }, path "m.pt")
    local file = ps.load(path "m.pt", { lazy = true })
    fails({ ":at(\"model\")" }, to.load_state_dict, to, file)
    to:load_state_dict(file:at "model")
    for name, tensor in pairs(from:state_dict()) do
      assert.same(tensor:tolist(), to:state_dict()[name]:tolist())
    end
    local eager = ps.load(path "m.pt")
    Net():load_state_dict(eager.model)
    fails("not a tensor", to.load_state_dict, to, { ["wide.weight"] = 1 })
  end)

  it("needs no memory in addition to the model's", function()
    local from, to = Net(), Net()
    ps.save(from:state_dict(), path "m.pt")
    from = nil                                             -- luacheck: ignore 311
    collectgarbage()
    collectgarbage()
    local before = ps.memory().limit
    ps.set_memory_limit(ps.memory().used + 65536)          -- less than one of the weights
    local ok, problem = pcall(function() to:load_state_dict(ps.load(path "m.pt", { lazy = true })) end)
    local eager = pcall(ps.load, path "m.pt")
    ps.set_memory_limit(before)
    assert(ok, tostring(problem))
    assert.falsy(eager)
  end)
end)

describe("PyTorch", function()
  local python

  local function run_python(script, ...)
    local name = write_file("script.py", "import sys, torch\nfrom torch import nn\n" .. script)
    local out, code = capture(table.concat({ python, name, ... }, " "))
    if code ~= 0 then error(out, 2) end
    return out
  end

  setup(function()
    for _, candidate in ipairs { os.getenv "PS_TORCH_PYTHON" or "python3", "python3", "/usr/bin/python3" } do
      if not python and select(2, capture(candidate .. " -c 'import torch'")) == 0 then python = candidate end
    end
  end)

  local function with_torch(name, fn)
    it(name, function()
      if not python then
        pending("no Python with torch (PS_TORCH_PYTHON names one)")
        return
      end
      fn()
    end)
  end

  with_torch("reads what ps.save writes, with weights_only=True", function()
    local state = { empty = ps.empty { 0, 3 }, scalar = ps.full({}, 7), turned = ps.arange(6):reshape(2, 3):t() }
    for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8" } do
      state[dtype] = ps.arange(24, { dtype = dtype }):reshape(2, 3, 4)
    end
    state.bool = ps.arange(6):gt(2)
    state.tied = state.fp32
    state.wide = ps.arange(3):reshape(3, 1):expand(2 ^ 10, 3, 2 ^ 20)
    ps.save(state, path "ours.pt")
    local list = { 1 }
    ps.save({ model = state, step = 10, list = { 1, "h\195\169", true, none, {} }, [3] = { [0] = 1.5, [1] = 2 ^ 40 },
              bytes = "\255\0", one = { list, list, { list } } }, path "values.pt")
    run_python([=[
state = torch.load(sys.argv[1], weights_only=True)
names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
for name in ["fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8"]:
    t = state[name]
    assert t.dtype == getattr(torch, names.get(name, name)), name
    assert torch.equal(t, torch.arange(24).reshape(2, 3, 4).to(t.dtype)), name
assert state["bool"].tolist() == [False] * 3 + [True] * 3
assert tuple(state["empty"].shape) == (0, 3) and state["scalar"].item() == 7 and state["scalar"].dim() == 0
assert state["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
assert state["tied"].data_ptr() == state["fp32"].data_ptr()
assert not state["fp32"].requires_grad
wide = state["wide"]
assert wide.shape == (2 ** 10, 3, 2 ** 20) and wide.stride() == (0, 1, 0) and wide[7, :, 9].tolist() == [0, 1, 2]
v = torch.load(sys.argv[2])
assert v["step"] == 10 and type(v["step"]) is int and v["list"] == [1, "h\u00e9", True, None, {}]
assert v[3] == {0: 1.5, 1: 2 ** 40} and type(v[3][0]) is float and v["bytes"] == b"\xff\x00"
assert v["one"] == [[1], [1], [[1]]] and v["one"][0] is v["one"][1] and v["one"][0] is v["one"][2][0]
torch.save(v, sys.argv[3])
]=], path "ours.pt", path "values.pt", path "again.pt")
    local back = ps.load(path "again.pt")
    assert.equal(10, back.step)
    assert.truthy(ps.same(back.model.tied, back.model.fp32))
    assert.same({ [0] = 1.5, [1] = 2 ^ 40 }, back[3])
  end)

  with_torch("writes what ps.load reads: types, views, values", function()
    run_python([=[
import collections
x = torch.arange(24.).reshape(2, 3, 4)
types = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8]
linear = nn.Linear(2, 2)
values = {"types": [x.to(t) for t in types], "bool": x > 11, "turned": x.permute(2, 0, 1), "part": x[1, 1:, ::2],
          "flat": x.view(-1)[3:], "expanded": torch.ones(1, 3).expand(4, 3), "broad": x.expand(2 ** 32, 2, 3, 4),
          "windows": x.view(-1).unfold(0, 3, 1), "scalar": torch.tensor(5),
          "empty": torch.zeros(0, 3), "tied": [linear.weight, linear.weight], "shape": x.shape, "dtype": torch.bfloat16,
          "tuple": (1, (2.5, "x")), "none": None, "nones": [None, 1], "huge": 2 ** 70, "wide": 2 ** 53 + 1,
          "negative": -2 ** 40, "nan": float("nan"), "set": {3}, "device": torch.device("cpu"),
          "ordered": collections.OrderedDict([("z", 1), ("a", 2)]), 5: {0: "zero", 1: "one"}, True: "true"}
torch.save(values, sys.argv[1])
torch.save({"x": x.to(torch.int8)}, sys.argv[2])
torch.save(values, sys.argv[3], _use_new_zipfile_serialization=False)
if hasattr(torch.serialization, "set_crc32_options"):
    torch.serialization.set_crc32_options(False)
torch.save({"x": x}, sys.argv[4])
]=], path "theirs.pt", path "int8.pt", path "old.pt", path "no-crc.pt")
    assert.equal(check.bytes(ps.arange(24, { dtype = "fp32" })), check.bytes(ps.load(path "no-crc.pt").x))
    local v = ps.load(path "theirs.pt")
    for i, dtype in ipairs { "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8" } do
      assert.equal(dtype, v.types[i]:dtype())
      assert.same(ps.arange(24):reshape(2, 3, 4):tolist(), v.types[i]:tolist())
    end
    local x = ps.arange(24):reshape(2, 3, 4)
    assert.same(x:gt(11):tolist(), v.bool:tolist())
    assert.same(x:permute(2, 0, 1):tolist(), v.turned:tolist())
    assert.same({ { 16, 18 }, { 20, 22 } }, v.part:tolist())
    assert.same(x:reshape(-1):slice(0, 3):tolist(), v.flat:tolist())
    assert.same(ps.ones { 4, 3 }:tolist(), v.expanded:tolist())
    assert.same({ 2 ^ 32, 2, 3, 4 }, v.broad:shape())
    assert.same(x:tolist(), v.broad:select(0, 12345):tolist())
    assert.same({ 22, 3 }, v.windows:shape())
    assert.same({ 21, 22, 23 }, v.windows:select(0, 21):tolist())
    assert.same({ {}, 5, { 0, 3 } }, { v.scalar:shape(), v.scalar:item(), v.empty:shape() })
    assert.truthy(ps.same(v.tied[1], v.tied[2]))
    assert.same({ { 2, 3, 4 }, "torch.bfloat16", { 1, { 2.5, "x" } } }, { v.shape, v.dtype, v.tuple })
    assert.same({ none, 1 }, v.nones)
    assert.equal(nil, v.none)
    assert.same({ 2 ^ 70, -2 ^ 40, { 3 }, "cpu" }, { v.huge, v.negative, v.set, v.device })
    assert.equal(9007199254740993LL, v.wide)
    assert.truthy(v.nan ~= v.nan)
    assert.same({ "z", "a" }, ps.serialize.keys(v.ordered))
    assert.same({ [0] = "zero", [1] = "one" }, v[5])
    assert.equal("true", v[true])
    fails({ "'x'", "torch.int8" }, ps.load, path "int8.pt")
    assert.same({ 2, 3, 4 }, ps.load(path "int8.pt", { lazy = true }):shape "x")
    fails({ "before 1.6", "torch.save(torch.load(" }, ps.load, path "old.pt")
  end)

  with_torch("models give the same outputs here, AdamW's state comes along", function()
    run_python([=[
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.99), weight_decay=0.5)
x = torch.randn(8, 16)
for i in range(3):
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
torch.save({"x": x, "y": model(x).detach(), "model": model.state_dict(), "optimizer": optimizer.state_dict()},
           sys.argv[2])
]=], path "model.pt", path "run.pt")
    local model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4, { bias = false }))
    local names = {}
    for name in model:named_parameters() do names[#names + 1] = name end
    local file = ps.load(path "model.pt", { lazy = true })
    assert.same(names, file:names())
    model:load_state_dict(file)
    local run = ps.load(path "run.pt")
    local difference = (model(run.x) - run.y):abs():amax():item()
    assert.truthy(difference < 1e-5, difference)
    local state, group = run.optimizer.state, run.optimizer.param_groups[1]
    for i, p in ipairs(model:parameters()) do
      assert.same(p:shape(), state[i - 1].exp_avg:shape())
      assert.same(p:shape(), state[i - 1].exp_avg_sq:shape())
    end
    assert.same({ 0.01, { 0.8, 0.99 }, 0.5, { 0, 1, 2, 3, 4 } },
      { group.lr, group.betas, group.weight_decay, group.params })
    ps.save(run, path "back.pt")                           -- and PyTorch continues from the file
    run_python([=[
run = torch.load(sys.argv[1])
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4, bias=False))
optimizer = torch.optim.AdamW(model.parameters())
model.load_state_dict(run["model"])
optimizer.load_state_dict(run["optimizer"])
assert torch.equal(model(run["x"]), run["y"])
model(run["x"]).square().mean().backward(); optimizer.step()
assert optimizer.param_groups[0]["lr"] == 1e-2
]=], path "back.pt")
  end)

  with_torch("files that would run something are refused, and nothing runs", function()
    run_python([=[
import os
class Evil:
    def __reduce__(self): return os.system, ("touch " + sys.argv[2],)
torch.save({"w": torch.ones(2), "evil": Evil()}, sys.argv[1])
torch.save(nn.Linear(2, 2), sys.argv[3])
]=], path "evil.pt", path "touched", path "module.pt")
    fails({ "'posix.system'", "nothing was executed" }, ps.load, path "evil.pt")
    fails("'posix.system'", ps.load, path "evil.pt", { lazy = true })
    fails("torch.nn.modules.linear.Linear", ps.load, path "module.pt")
    assert.falsy(io.open(path "touched"))
  end)

  with_torch("files cut or changed at any byte are read or refused", function()
    run_python([=[
torch.save({"a": torch.arange(4.), "b": [1, "x"]}, sys.argv[1])
]=], path "small.pt")
    local bytes, refused = read_file "small.pt", 0
    for i = 0, #bytes - 1 do
      write_file("cut.pt", bytes:sub(1, i))
      fails("", ps.load, path "cut.pt")
      write_file("bad.pt", bytes:sub(1, i) .. string.char((bytes:byte(i + 1) + 1) % 256) .. bytes:sub(i + 2))
      local ok, value = pcall(ps.load, path "bad.pt")
      if not ok then refused = refused + 1 else assert.equal(4, value.a:numel()) end
    end
    assert.truthy(refused > 200)
  end)
end)
