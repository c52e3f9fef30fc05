-- SPDX-License-Identifier: BSD-3-Clause
-- GGUF files (ps/io/gguf.lua, src/io/gguf*.c): the contents of a file are read exactly, and a damaged file is an error
-- that names it. The values of blocks are compared with the package gguf by spec/oracle/gguf_oracle.py.
-- PS_MUTATE_SEED=n draws other damage, PS_FULL=1 fifty times as much.
local ps = require "ps"
local gguf = require "ps.io.gguf"
local lib = require "spec.gguf_lib"
local check = require "spec.check_lib"

local folder = os.tmpname()
os.remove(folder)
assert(require("lfs").mkdir(folder))
teardown(function() os.execute("rm -rf '" .. folder .. "'") end)
local function write(bytes, name) return lib.write(folder .. "/" .. (name or "x.gguf"), bytes) end
local function error_with(text, fn, ...)
  local arguments = { ... }
  return check.fails(function() fn(unpack(arguments)) end, text)
end
local function refused(text, bytes) error_with(text, gguf.open, write(bytes)) end

local META = { { "general.architecture", "string", "llama" }, { "a.u8", "uint8", 200 }, { "a.i8", "int8", -5 },
  { "a.u16", "uint16", 60000 }, { "a.i16", "int16", -3 }, { "a.u32", "uint32", 4e9 }, { "a.i32", "int32", -7 },
  { "a.f32", "float32", 0.5 }, { "a.yes", "bool", true }, { "a.no", "bool", false }, { "a.u64", "uint64", 2 ^ 40 },
  { "a.i64", "int64", -2 ^ 40 }, { "a.f64", "float64", 0.1 }, { "a.list", "int32", { 1, -2, 3 } },
  { "a.words", "string", { "", "a", "b\0c" } }, { "a.empty", "float32", {} } }

describe("gguf.open", function()
  it("reads metadata of each type, of versions 2 and 3", function()
    for version = 2, 3 do
      local file = gguf.open(write(lib.file(META, {}, { version = version })))
      for i, one in ipairs(META) do
        local value, kind, is_array = file:meta(one[1])
        assert.same(one[3], value)
        assert.equal(one[2], kind)
        assert.equal(type(one[3]) == "table", is_array)
        assert.equal(one[1], file:keys()[i])
      end
      assert.equal(nil, (file:meta "a.none"))
      assert.equal(3, file:meta_length "a.list")
      file:close()
    end
  end)

  it("keeps whole numbers above 2^53 exact", function()
    local file = gguf.open(write(lib.file({ { "n", "uint64", 18446744073709551615ULL } }, {})))
    assert.equal(18446744073709551615ULL, (file:meta "n"))
  end)

  it("reads tensors of plain types with names and shapes in order", function()
    local list = {}
    for i = 1, 24 do list[i] = i - 7.5 end
    local file = gguf.open(write(lib.file({ { "general.alignment", "uint32", 64 } }, { { "b", 0, { 2, 3, 4 },
      lib.floats(list) }, { "a", 0, {}, lib.floats { 3 } } }, { alignment = 64 })))
    assert.same({ "b", "a" }, file:names())
    assert.same({ 2, 3, 4 }, file:shape "b")
    assert.equal("F32", file:type "b")
    assert.same(list, file:tensor("b"):reshape(-1):tolist())
    assert.equal(3, file:tensor("a"):item())
    local part = ps.empty({ 1, 2, 2 }, { dtype = "fp64" })
    file:read_part("b", part, { 1, 1, 2 })
    assert.same({ list[19], list[20], list[23], list[24] }, part:reshape(-1):tolist())
    error_with("holds no tensor 'c'", file.shape, file, "c")
  end)

  it("unpacks blocks, whole and in part", function()
    local q8, q4, want8, want4 = {}, {}, {}, {}
    for k = 1, 32 do
      q8[k], want8[k] = string.char((k * 7) % 256), ((k * 7 + 128) % 256 - 128) * 0.5
    end
    for k = 1, 16 do
      local low, high = k % 16, (k * 5) % 16
      q4[k], want4[k], want4[16 + k] = string.char(low + 16 * high), (low - 8) * -2, (high - 8) * -2
    end
    local file = gguf.open(write(lib.file({}, {
      { "eight", 8, { 1, 32 }, lib.f16(0.5) .. table.concat(q8) },
      { "four", 2, { 2, 32 }, (lib.f16(-2) .. table.concat(q4)):rep(2) } })))
    assert.same(want8, file:tensor("eight"):reshape(-1):tolist())
    assert.equal("fp32", file:dtype "four")
    local part = ps.empty { 1, 3 }
    file:read_part("four", part, { 1, 15 })
    assert.same({ want4[16], want4[17], want4[18] }, part:reshape(-1):tolist())
  end)

  it("reads rows of heads and swapped matrices in Hugging Face's order", function()
    local list = {}
    for i = 1, 8 * 3 do list[i] = i end
    local path = write(lib.file({}, { { "q", 0, { 8, 3 }, lib.floats(list) },
      { "bias", 0, { 8 }, lib.floats { 1, 2, 3, 4, 5, 6, 7, 8 } }, { "w", 0, { 8, 3 }, lib.floats(list) } }))
    local file = gguf.open(path)
    file:present("q", "q_proj", { heads = 2 })
    file:present("bias", "q_bias", { heads = 2 })
    file:present("w", "conv", { transposed = true })
    local q = file:tensor "q_proj"
    for j, row in ipairs { 0, 2, 1, 3, 4, 6, 5, 7 } do assert.equal(row * 3 + 1, q:narrow(0, j - 1, 1):min():item()) end
    assert.same({ 1, 3, 2, 4, 5, 7, 6, 8 }, file:tensor("q_bias"):tolist())
    assert.same({ 3, 8 }, file:shape "conv")
    local whole = ps.tensor(list, "fp32"):reshape(8, 3):t():contiguous():reshape(-1):tolist()
    assert.same(whole, file:tensor("conv"):reshape(-1):tolist())
    local part = ps.empty { 2, 3 }
    file:read_part("conv", part, { 1, 4 })
    assert.same({ whole[13], whole[14], whole[15], whole[21], whole[22], whole[23] }, part:reshape(-1):tolist())
    local other = gguf.open(path)
    error_with("8 rows, which are not 3 heads", other.present, other, "q", "x", { heads = 3 })
    local blocks = gguf.open(write(lib.file({}, { { "v", 8, { 64 }, ("\0"):rep(68) } })))
    error_with("a vector in blocks (Q8_0)", blocks.present, blocks, "v", "x", { heads = 2 })
  end)

  it("opens a file in parts by any of them, and refuses parts that do not belong together", function()
    local function part(no, count, total, name)
      return lib.file({ { "split.no", "uint16", no }, { "split.count", "uint16", count },
        { "split.tensors.count", "int32", total } }, { { name, 0, { 1 }, lib.floats { no } } })
    end
    local one, two = "p-00001-of-00002.gguf", "p-00002-of-00002.gguf"
    write(part(0, 2, 2, "a"), one)
    write(part(1, 2, 2, "b"), two)
    for _, name in ipairs { one, two } do
      local file = gguf.open(folder .. "/" .. name)
      assert.same({ "a", "b" }, file:names())
      assert.equal(1, file:tensor("b"):item())
    end
    error_with("it is one of 2 parts", gguf.open, write(part(0, 2, 2, "a")))
    write(part(1, 2, 2, "a"), two)
    error_with("in two of its parts", gguf.open, folder .. "/" .. one)
    write(part(0, 2, 2, "b"), two)
    error_with("split.no is 0", gguf.open, folder .. "/" .. one)
    write(part(1, 2, 3, "b"), two)
    write(part(0, 2, 3, "a"), one)
    error_with("split.tensors.count says 3", gguf.open, folder .. "/" .. one)
    os.remove(folder .. "/" .. two)
    error_with("p-00002-of-00002", gguf.open, folder .. "/" .. one)
  end)

  it("lends the bytes of plain tensors with mmap = true", function()
    local path = write(lib.file({}, { { "a", 0, { 4 }, lib.floats { 1, 2, 3, 4 } } }))
    local file = gguf.open(path, { mmap = true })
    local t = file:tensor "a"
    file:close()
    assert.same({ 1, 2, 3, 4 }, t:tolist())
    error_with("was closed", file.names, file)
  end)
end)

describe("a GGUF writer", function()
  local native = require "ps.core.ffi"
  local writing = require "ps.io.gguf_write"
  local ffi = require "ffi"
  local path = folder .. "/packed.gguf"

  -- Returns eight rows of 256 values: random values of several sizes, zeros, and rows of one sign.
  local function values()
    local x = ffi.new("float[2048]")
    for i = 0, 2047 do
      local row, v = math.floor(i / 256), ((i * 7919 + i * i * 31) % 1009 - 504) / 256
      v = v * (1 + row % 3)
      if row == 3 then v = 0 elseif row == 4 then v = math.abs(v) elseif row == 5 then v = -math.abs(v) end
      x[i] = v
      if row == 6 then x[i] = x[i] * tonumber(ffi.cast("float", 1e-3)) end
    end
    return x
  end

  -- Returns the checksum of a tensor's bytes in the file.
  local function sum_of(bytes)
    local text = tostring(native.C.ps_xxh3(bytes, #bytes))
    return (text:gsub("ULL$", ""))
  end

  it("packs blocks with the bytes of ggml's quantisers", function()
    -- Checksums of the results of quantize_q4_0, ... of ggml 0.25.3 for the same values.
    for kind, want in pairs { Q4_0 = "4295791031962508025", Q4_1 = "14945496727398206273",
      Q5_0 = "14772164322006174543", Q5_1 = "3013266148302084225", Q8_0 = "17970514311260802651",
      Q4_K = "8468285223250939621", Q6_K = "13883682567463987681" } do
      local writer = writing.open(path, {}, { { name = "a", type = kind, shape = { 8, 256 } } })
      writer:append("a", "fp32", values(), 2048)
      writer:commit()
      writer:close()
      local file = gguf.open(path)
      local nbytes = file:nbytes "a"
      file:close()
      local padded = math.ceil(nbytes / 32) * 32
      assert.equal(want, sum_of(check.read(path):sub(-padded):sub(1, nbytes)), kind)
    end
  end)

  it("writes rows of heads and swapped matrices in llama.cpp's order, for any pieces", function()
    local function written(shape, how, pieces)
      local n, done = 1, 0
      for _, size in ipairs(shape) do n = n * size end
      local all = ffi.new("float[?]", n)
      for i = 0, n - 1 do all[i] = i end
      local writer = writing.open(path, {}, { { name = "a", type = "F32", shape = shape, heads = how.heads,
        transposed = how.transposed } })
      while done < n do
        local step = math.min(pieces, n - done)
        writer:append("a", "fp32", all + done, step)
        done = done + step
      end
      writer:commit()
      writer:close()
      local file = gguf.open(path)
      local stored = file:tensor("a"):reshape(-1):tolist()
      file:present("a", "b", how)
      local back = file:tensor("b"):reshape(-1):tolist()
      for i = 1, n do assert.equal(i - 1, back[i]) end
      return stored
    end
    for _, pieces in ipairs { 1, 5, 1000 } do
      assert.same({ 0, 1, 4, 5, 2, 3, 6, 7 }, written({ 4, 2 }, { heads = 1 }, pieces))
      assert.same({ 0, 2, 1, 3, 4, 6, 5, 7 }, written({ 8 }, { heads = 2 }, pieces))
      assert.same({ 0, 3, 1, 4, 2, 5 }, written({ 2, 3 }, { transposed = true }, pieces))
    end
  end)

  it("writes tensors of several million values as their rows one by one", function()
    local rows, row = 1120, 2016                             -- more than two runs; no run ends with a row
    local all = ffi.new("float[?]", rows * row)
    for i = 0, rows * row - 1 do all[i] = (i * 7919 % 100003 - 50001) / 256 end
    local function data(kind, pieces, how)
      local writer = writing.open(path, {}, { { name = "a", type = kind, shape = how.transposed and { row, rows }
        or { rows, row }, heads = how.heads, transposed = how.transposed } })
      for done = 0, rows * row - 1, pieces do
        writer:append("a", "fp32", all + done, math.min(pieces, rows * row - done))
      end
      writer:commit()
      writer:close()
      return check.read(path)
    end
    for kind, block in pairs { Q8_0 = 32, F16 = 1, F32 = 1, BF16 = 1 } do
      for _, how in ipairs { {}, { heads = 8 } } do
        assert.equal(data(kind, 2 * row, how), data(kind, rows * row, how), kind)
        assert.equal(data(kind, 32 * 1000 + (block == 1 and 7 or 0), how), data(kind, rows * row, how), kind)
      end
      local stored = data(kind, rows * row, { transposed = true })
      local swapped = ffi.new("float[?]", rows * row)
      for r = 0, rows - 1 do for c = 0, row - 1 do swapped[r * row + c] = all[c * rows + r] end end
      all, swapped = swapped, all
      assert.equal(data(kind, rows * row, {}), stored, kind)
      all = swapped
    end
    for i, at in ipairs { 1500000, 70000, 69999, 65536 } do                -- the first of several bad values is named
      all[at] = i % 2 == 0 and 1e30 or -1e30
      for kind, name in pairs { Q8_0 = "Q8_0", F16 = "F16" } do
        error_with(("(row %d, column %d), which %s cannot hold"):format(math.floor(at / row), at % row, name), data,
          kind, rows * row, {})
      end
    end
  end)

  it("writes the whole file or none when memory or the disk ends, also in the threads that write", function()
    local C, place = native.C, folder .. "/faults"
    local lfs = require "lfs"
    assert(lfs.mkdir(place))
    local n = 5 * 2 ^ 20                                   -- five pieces
    local all = ffi.new("float[?]", n)
    for i = 0, n - 1 do all[i] = (i * 7919 % 100003 - 50001) / 256 end
    local function save()
      local writer = writing.open(place .. "/a.gguf", {}, { { name = "a", type = "Q8_0", shape = { n / 2048, 2048 } } })
      local ok, why = pcall(function()
        for at = 0, n - 1, 2 ^ 20 do writer:append("a", "fp32", all + at, 2 ^ 20) end
        writer:commit()
      end)
      writer:close()
      if not ok then error(why, 0) end
    end
    save()
    local whole = check.read(place .. "/a.gguf")
    local function walk(fail, left, ...)
      local failures, nth = 0, 0
      repeat
        os.remove(place .. "/a.gguf")
        fail(nth, ...)
        local ok, why = pcall(save)
        local met = left() < 0
        fail(-1, 0, 0)
        if not ok then failures = failures + 1 end
        assert.truthy(met or ok, why)
        for name in lfs.dir(place) do
          assert.truthy(name:match "^%.+$" or name == "a.gguf" and (ok or met), name)
        end
        if ok then assert.truthy(check.read(place .. "/a.gguf") == whole) end
        nth = nth + 1
      until not met
      return failures
    end
    assert.truthy(walk(function(nth, count) C.ps_test_fail_alloc(nth, count) end, C.ps_test_fail_alloc_left, 1) >= 8)
    assert.truthy(walk(C.ps_test_fail_file, C.ps_test_fail_file_left, 1, 28) >= 7)
  end)

  it("rounds halves of Q8_0 away from zero", function()
    local x = ffi.new("float[32]", { 127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 0.49999997, -0.49999997, 63.5 })
    local writer = writing.open(path, {}, { { name = "a", type = "Q8_0", shape = { 32 } } })
    writer:append("a", "fp32", x, 32)
    writer:commit()
    writer:close()
    local file = gguf.open(path)
    local got = file:tensor("a"):tolist()
    file:close()
    assert.same({ 127, 1, 2, 3, -1, -2, -127, 0, 0, 64 }, { unpack(got, 1, 10) })
  end)

  it("refuses calls out of order and leaves no file", function()
    os.remove(path)
    local writer = writing.open(path, {}, { { name = "a", type = "Q8_0", shape = { 2, 32 } } })
    local x = values()
    error_with("was not declared", writer.append, writer, "b", "fp32", x, 32)
    error_with("whole blocks", writer.append, writer, "a", "fp32", x, 31)
    writer:append("a", "fp32", x, 32)
    error_with("only 32 of its 64 values", writer.commit, writer)
    error_with("needs 32 more values", writer.append, writer, "a", "fp32", x, 64)
    writer:close()
    assert.equal(nil, require("lfs").attributes(path))
    error_with("blocks of 32", writing.open, path, {}, { { name = "a", type = "Q8_0", shape = { 2, 33 } } })
    error_with("cannot be written", writing.open, path, {}, { { name = "a", type = "IQ4_XS", shape = { 2, 256 } } })
    error_with("declared twice", writing.open, path, {}, { { name = "a", type = "F32", shape = { 1 } },
      { name = "a", type = "F32", shape = { 1 } } })
    error_with("has k twice", writing.open, path, { { "k", "bool", true }, { "k", "bool", true } }, {})
  end)
end)

describe("a damaged GGUF file", function()
  local function tensor(name, kind, shape, bytes) return { name, kind, shape, bytes or ("\0"):rep(128) } end

  it("is refused with its fault", function()
    refused("not a GGUF file", "GGML" .. ("\0"):rep(40))
    refused("version 1", lib.file({}, {}, { version = 1 }))
    refused("big-endian", lib.file({}, {}, { version = 0x03000000 }))
    refused("tensors, but the file has only", "GGUF" .. lib.u32(3) .. lib.u64(2 ^ 40) .. lib.u64(0))
    refused("metadata entries, but", "GGUF" .. lib.u32(3) .. lib.u64(0) .. lib.u64(2 ^ 60))
    refused("'a' twice", lib.file({ { "a", "bool", true }, { "a", "bool", true } }, {}))
    refused("two tensors 'a'", lib.file({}, { tensor("a", 0, { 1 }), tensor("a", 0, { 1 }) }))
    refused("no type 13 of values", "GGUF" .. lib.u32(3) .. lib.u64(0) .. lib.u64(1) .. lib.str "k" .. lib.u32(13)
      .. lib.u64(0))
    refused("an array of type 9", "GGUF" .. lib.u32(3) .. lib.u64(0) .. lib.u64(1) .. lib.str "k" .. lib.u32(9)
      .. lib.u32(9) .. lib.u64(0))
    refused("a string of", "GGUF" .. lib.u32(3) .. lib.u64(0) .. lib.u64(1) .. lib.u64(2 ^ 62) .. ("x"):rep(30))
    refused("no type 77 of tensors", lib.file({}, { tensor("a", 77, { 1 }) }))
    refused("rows of 33 elements, but Q4_0", lib.file({}, { tensor("a", 2, { 33 }) }))
    refused("2^63 elements", lib.file({}, { tensor("a", 0, { 2 ^ 40, 2 ^ 40, 1 }) }))
    refused("but the file has only", lib.file({}, { tensor("a", 0, { 1000 }) }))
    refused("general.alignment is", lib.file({ { "general.alignment", "uint32", 48 } }, {}))
    refused("overlap", lib.file({}, { tensor("a", 0, { 64 }, ("\0"):rep(32)),
      tensor("b", 0, { 64 }, ("\0"):rep(256)) }))
    refused("a boolean is 2", (lib.file({ { "a", "bool", true } }, {}):gsub("\7%z%z%z\1", "\7\0\0\0\2")))
    refused("not UTF-8", lib.file({ { "\255", "bool", true } }, {}))
    local file = gguf.open(write(lib.file({}, { tensor("a", 16, { 256 }) })))
    error_with("IQ2_XXS, which is not supported", file.tensor, file, "a")
  end)

  local SEED, DRAWN = tonumber(os.getenv "PS_MUTATE_SEED" or "") or 1, os.getenv "PS_FULL" == "1" and 100000 or 1000
  local whole = lib.file(META, { tensor("a", 0, { 2, 4 }), tensor("b", 2, { 1, 64 }), tensor("c", 12, { 256 },
    ("\1"):rep(144)) })

  -- Opens a file and reads all of it. The result must be an error of ps, or values.
  local function read(bytes)
    local ok, problem = pcall(function()
      local file = gguf.open(write(bytes))
      for _, key in ipairs(file:keys()) do file:meta(key) end
      for _, name in ipairs(file:names()) do
        if file:dtype(name) and file:nbytes(name) < 1e5 then file:tensor(name) end
      end
      file:close()
    end)
    if not ok then assert.truthy(tostring(problem):find("x.gguf", 1, true), tostring(problem)) end
    return ok
  end

  it("is an error wherever it is truncated", function()
    for n = 0, #whole - 113, 3 do assert.falsy(read(whole:sub(1, n)), n) end
    assert.truthy(read(whole))
  end)

  it("is an error or has values if some bytes change", function()
    math.randomseed(SEED)
    local opened = 0
    for _ = 1, DRAWN do
      local bytes = whole
      for _ = 1, math.random(3) do
        local at = math.random(#bytes)
        local with = string.char(math.random(0, 255))
        if math.random(4) == 1 then with = ("\255"):rep(8) end
        bytes = bytes:sub(1, at - 1) .. with .. bytes:sub(at + #with)
      end
      if read(bytes) then opened = opened + 1 end
    end
    assert.truthy(opened > 0 and opened < DRAWN)
  end)
end)
