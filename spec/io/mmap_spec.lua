-- SPDX-License-Identifier: BSD-3-Clause
-- Tensors whose bytes stay in a file (mmap = true of ps.load, ps.safetensors.open and ps.from_pretrained).
local check = require "spec.check_lib"
local ps = require "ps"
local ffi = ps.ffi
local gpt2 = require "models.gpt2"

local function folder()
  local name = os.tmpname()
  os.remove(name)
  assert(require("lfs").mkdir(name))
  return name
end

local made
before_each(function() made = {} end)
after_each(function()
  collectgarbage()
  for _, name in ipairs(made) do os.execute("rm -rf '" .. name .. "'") end
end)
local function place()
  made[#made + 1] = folder()
  return made[#made]
end

local function used()
  collectgarbage()
  collectgarbage()
  return ps.memory("cpu").used
end

local function same(a, b)
  assert.same(a:shape(), b:shape())
  assert.equal(a:dtype(), b:dtype())
  assert.equal(0, (a:to("fp32") - b:to("fp32")):abs():max():item())
end

local function saved(tensors)
  local path = place() .. "/x.safetensors"
  ps.safetensors.save(path, tensors)
  return path
end

describe("ps.load with mmap = true", function()
  it("leaves a tensor's bytes in the file, and has the same values", function()
    local want = ps.randn { 512, 1024 }
    local path = saved { a = want, b = ps.arange(7) }
    local before = used()
    local got = ps.load(path, { mmap = true })
    assert.truthy(used() - before < 4096, used() - before)
    local read = ps.load(path)
    assert.truthy(used() - before >= 2 ^ 21)
    same(want, got.a)
    same(want, read.a)
    assert.same({ 0, 1, 2, 3, 4, 5, 6 }, got.b:tolist())
    same(got.a:narrow(0, 3, 2):t():contiguous(), want:narrow(0, 3, 2):t():contiguous())
  end)

  it("does not change the file when such a tensor is written to, also after its close", function()
    local path = saved { a = ps.ones { 3000 }, b = ps.ones { 5 } }
    local before, file = check.read(path), ps.load(path, { mmap = true, lazy = true })
    local a = file:tensor "a"
    a:add_(2)
    a:narrow(0, 10, 1):fill_(7)
    local b = file:tensor "b"                              -- shares a page with the end of a
    file:close()
    collectgarbage()
    assert.equal(3 * 2999 + 7, a:sum():item())
    assert.equal(5, b:sum():item())
    assert.equal(before, check.read(path))
    assert.equal(3000, ps.load(path).a:sum():item())
  end)

  it("gives each tensor its own bytes, and the file's parts and checksums", function()
    local path = saved { a = ps.ones { 3000 } }
    local file = ps.load(path, { mmap = true, lazy = true })
    local one, other, part = file:tensor "a", file:tensor "a", ps.zeros { 10 }
    one:add_(2)
    file:read_part("a", part, { 5 })
    assert.same({ 9000, 3000, 10 }, { one:sum():item(), other:sum():item(), part:sum():item() })
    assert.equal(3000, file:tensor "a":sum():item())
    local first, second = ps.nn.Linear(3, 2), ps.nn.Linear(3, 2)
    path = saved(first:state_dict())
    file = ps.load(path, { mmap = true, lazy = true })
    first:load_state_dict(file)
    second:load_state_dict(file)
    file:close()
    local before = second.weight:tolist()
    ps.no_grad(function() first.weight:fill_(5) end)
    assert.same(before, second.weight:tolist())
  end)

  it("reads tensors that cannot stay in the file: another type, a part, misaligned elements", function()
    local path = saved { a = ps.arange(6):to("fp32"):reshape(2, 3) }
    local file = ps.load(path, { mmap = true, lazy = true })
    local half, part = ps.zeros({ 2, 3 }, { dtype = "bf16" }), ps.zeros { 4, 3 }
    file:read_into("a", half)
    file:read_into("a", part:narrow(0, 1, 2))
    file:close()
    assert.same({ { 0, 1, 2 }, { 3, 4, 5 } }, half:tolist())
    assert.same({ { 0, 0, 0 }, { 0, 1, 2 }, { 3, 4, 5 }, { 0, 0, 0 } }, part:tolist())
    -- One more byte in the header, so that all numbers begin at odd addresses.
    local text = check.read(path)
    local n = ffi.cast("const uint64_t *", text)[0]
    local head = text:sub(9, 8 + tonumber(n)) .. " "
    local size = ffi.new("uint64_t[1]", #head)
    local odd = place() .. "/odd.safetensors"
    check.write(odd, ffi.string(size, 8) .. head .. text:sub(9 + tonumber(n)))
    assert.same({ { 0, 1, 2 }, { 3, 4, 5 } }, ps.load(odd, { mmap = true, verify = false }).a:tolist())
  end)

  it("is an error at the next use after the file was written or truncated, but not if it was replaced", function()
    local a = ps.randn { 4096 }
    local path = saved { a = a }
    local got = ps.load(path, { mmap = true }).a
    assert(os.rename(saved { a = ps.zeros { 4096 } }, path))                  -- the map keeps the old file
    same(got, a)
    os.execute(("touch -d 2001-02-03 '%s'"):format(path))  -- a clock tick can be longer than this test
    got = ps.load(path, { mmap = true }).a
    local file = assert(io.open(path, "r+b"))
    file:seek("end", -8)
    file:write "\1\2\3\4\1\2\3\4"
    file:close()
    check.fails_saying({ path, "was written to", "load it again" }, function() got:sum() end)
    got = ps.load(path, { mmap = true, verify = false }).a
    assert.equal(0, os.execute(("truncate -s 512 '%s'"):format(path)))
    check.fails_saying({ path, "was truncated from", "to 512 bytes" }, function() got:sum() end)
    ps.load(saved { a = a }, { mmap = true, lazy = true }):read_into("a", got)
    same(got, a)
  end)

  it("is an error when the file is written while such a tensor is copied to another file", function()
    local pieces = require "ps.io.pieces"
    local n = 2 ^ 21
    local path = saved { a = ps.ones { n } }
    os.execute(("touch -d 2001-02-03 '%s'"):format(path))
    local got, count = ps.load(path, { mmap = true }).a, 0
    check.fails_saying({ path, "was written to" }, function()
      pieces.read(got, pieces.buffer(4 * n), function(_, nbytes)
        count = count + nbytes
        if count > nbytes then return end
        local file = assert(io.open(path, "r+b"))
        file:seek("end", -8)
        file:write "\1\2\3\4\1\2\3\4"
        file:close()
      end)
    end)
    assert.truthy(count < 4 * n)
  end)

  it("reads whole rows of a file, with and without its checksums, as it reads all of it", function()
    local want = ps.randn { 700, 301 }
    for _, checksums in ipairs { true, false } do
      local path = place() .. "/x.safetensors"
      ps.safetensors.save(path, { before = ps.ones { 3 }, a = want, none = ps.zeros { 0, 4 } }, nil,
        { checksums = checksums })
      for _, mmap in ipairs { true, false } do
        local file = ps.safetensors.open(path, { mmap = mmap })
        for _, range in ipairs { { 0, 1 }, { 3, 690 }, { 699, 1 }, { 217, 219 } } do
          local part = ps.empty { range[2], 301 }
          file:read_part("a", part, { range[1], 0 })
          same(want:narrow(0, range[1], range[2]), part)
          local around = ps.zeros { range[2] + 2, 301 }
          file:read_part("a", around:narrow(0, 1, range[2]), { range[1], 0 })
          same(want:narrow(0, range[1], range[2]), around:narrow(0, 1, range[2]))
          assert.equal(0, around:narrow(0, 0, 1):abs():max():item())
          assert.equal(0, around:narrow(0, range[2] + 1, 1):abs():max():item())
        end
        file:read_part("none", ps.empty { 0, 4 }, { 0, 0 })
        file:close()
      end
    end
  end)

  it("refuses files of PyTorch's", function()
    local path = place() .. "/x.pt"
    ps.save({ a = ps.ones { 2 } }, path)
    check.fails_saying({ path, "mmap = true needs a safetensors" }, function() ps.load(path, { mmap = true }) end)
  end)
end)

describe("ps.from_pretrained with mmap = true", function()
  local CONFIG = { n_layer = 2, n_head = 2, n_embd = 32, vocab_size = 61, n_positions = 32, embd_pdrop = 0,
    attn_pdrop = 0, resid_pdrop = 0 }
  local function model_in(dtype)
    ps.manual_seed(3)
    local where = place()
    gpt2.new(CONFIG, { dtype = dtype or "fp32" }):save_pretrained(where)
    return where
  end
  local ids = ps.tensor({ { 3, 1, 4, 1, 5, 9, 2, 6 } }, { dtype = "int32" }):keep()
  local function open(where, mmap, dtype)
    return ps.from_pretrained(where, { mmap = mmap, dtype = dtype, quiet = true })
  end

  it("computes and continues with the same results, in the type of the files", function()
    for _, dtype in ipairs { "fp32", "bf16" } do
      local where = model_in(dtype)
      local before = used()
      local mapped = open(where, true)
      assert.truthy(used() - before < 16384, used() - before)
      local read = open(where, nil, dtype)
      assert.equal(dtype, mapped:parameters()[1]:dtype())
      ps.no_grad(function()
        same(mapped { input_ids = ids }.logits, read { input_ids = ids }.logits)
      end)
      assert.same(read:generate(ids, 9, { temperature = 0 }), mapped:generate(ids, 9, { temperature = 0 }))
      mapped:save_pretrained(where)                        -- overwrites the file with the weights
      local again = open(where, nil, dtype)
      ps.no_grad(function()
        same(mapped { input_ids = ids }.logits, again { input_ids = ids }.logits)
      end)
    end
  end)

  it("trains with the same results, by an optimizer and by an engine, and does not change the file", function()
    local where = model_in()
    local before = check.read(where .. "/model.safetensors")
    local function by_optimizer(mmap)
      local model = open(where, mmap)
      local adam = ps.optim.AdamW(model:parameters(), { lr = 1e-2 })
      for _ = 1, 3 do
        local loss = model { input_ids = ids, labels = ids }.loss
        adam:zero_grad()
        loss:backward()
        adam:step()
      end
      return model:state_dict()
    end
    local function by_engine(mmap)
      local engine, optimizer = ps.initialize { model = open(where, mmap), quiet = true,
        config = { optimizer = { type = "AdamW", params = { lr = 1e-2 } }, plan_print = false } }
      local losses = {}
      for i = 1, 3 do
        local loss = engine { input_ids = ids, labels = ids }.loss
        losses[i] = loss:item()
        engine:backward(loss)
        optimizer:step()
        optimizer:zero_grad()
      end
      engine:close()
      return losses
    end
    local mapped, read = by_optimizer(true), by_optimizer(nil)
    for name, t in pairs(read) do same(t, mapped[name]) end
    assert.same(by_engine(nil), by_engine(true))
    assert.equal(before, check.read(where .. "/model.safetensors"))
  end)

  it("refuses files that cannot be mapped, and with \"auto\" reads them", function()
    local where = model_in "bf16"
    check.fails_saying({ "mmap = true", "no weights in fp32", "remove dtype" }, function()
      open(where, true, "fp32")
    end)
    assert.equal("fp32", open(where, "auto", "fp32"):parameters()[1]:dtype())
    check.fails_saying({ 'true, false or "auto", not \'yes\'' }, function() open(where, "yes") end)
    check.fails_saying({ "mmap = true", "device cpu", "sim" }, function()
      ps.from_pretrained(where, { mmap = true, device = "sim", quiet = true })
    end)
    local pt = model_in()
    local state = {}
    for name, t in pairs(ps.load(pt .. "/model.safetensors")) do state[name] = t end
    ps.save(state, pt .. "/pytorch_model.bin")
    os.remove(pt .. "/model.safetensors")
    check.fails_saying({ "pytorch_model.bin is neither a safetensors nor a GGUF file" }, function() open(pt, true) end)
    assert.truthy(open(pt, "auto"))
  end)
end)
