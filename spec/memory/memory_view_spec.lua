-- SPDX-License-Identifier: BSD-3-Clause
-- The tables of chunks and memory: their contents and widths, and that they stay lists.
local readable = require "ps.core.readable"
local view = require "ps.memory.view"

local KINDS = { "param", "param_fp32", "exp_avg", "exp_avg_sq", "grad" }

-- Returns `n` chunks of each kind of a GPT-2, on various tiers and in various states.
local function chunks_of(n, kinds)
  local list = {}
  for k = 1, kinds or #KINDS do
    for i = 0, n - 1 do
      local names = {}
      for _, part in ipairs { "ln_1.weight", "attn.c_attn.weight", "attn.c_attn.bias", "mlp.c_proj.bias" } do
        names[#names + 1] = ("transformer.h.%d.%s"):format(i, part)
      end
      if i == 0 then names = { "transformer.wte.weight" } end
      list[#list + 1] = { id = #list, kind = KINDS[k], index = i, nbytes = (k == 1 and 1 or 2) * 24 * 2 ^ 20,
        used_nbytes = (k == 1 and 1 or 2) * 12 * 2 ^ 20, tiers = { host = i < 3, disk = k > 1 },
        state = i == 2 and "COMPUTE" or i < 2 and "HOLD_AFTER_FWD" or "HOLD", pins = i == 2 and 2 or 0,
        tensors = names, last_use = i < 3 and i * 8 or nil, next_use = 1200 - i }
    end
  end
  return list
end

describe("ps.chunks of one chunk or tensor", function()
  local fails = require("spec.check_lib").fails

  it("shows the chunk with all its tensors", function()
    local chunk = view.chunks(chunks_of(3), 4)
    assert.equal(4, chunk.id)
    local text = tostring(chunk)
    for _, name in ipairs(chunk.tensors) do assert.truthy(text:find("\n  " .. name, 1, true), text) end
    fails(function() view.chunks(chunks_of(3), 99) end, "there is no chunk 99 (there are 15: 0 to 14)")
    local some = {}                                          -- chunks of other kinds are between them
    for _, one in ipairs(chunks_of(3)) do
      if one.id < 3 or one.id == 7 or one.id > 12 then some[#some + 1] = one end
    end
    fails(function() view.chunks(some, 99) end, "there is no chunk 99 (there are 6: 0 to 2, 7, 13 to 14)")
    fails(function() view.chunks({}, 0) end, "no engine with chunks is open")
  end)

  it("returns the chunks that hold a tensor, one of each kind", function()
    local name = "transformer.h.1.attn.c_attn.weight"
    local list = view.chunks(chunks_of(3), name)
    assert.equal(5, #list)
    for i, chunk in ipairs(list) do assert.same({ KINDS[i], 1 }, { chunk.kind, chunk.index }) end
    fails(function() view.chunks(chunks_of(3), "transformer.h.1.attn.c_attn.weigth") end, "did you mean '" .. name)
  end)

  it("accepts names as tables show them: without their first parts, and of modules", function()
    local function ids(name)
      local list = {}
      for i, chunk in ipairs(view.chunks(chunks_of(3), name)) do list[i] = chunk.id end
      return list
    end
    local whole = ids "transformer.h.1.attn.c_attn.weight"
    assert.same(whole, ids "h.1.attn.c_attn.weight")
    assert.same(whole, ids "1.attn.c_attn.weight")
    assert.same(whole, ids "h.1.attn")
    assert.same(whole, ids "transformer.h.1")
    fails(function() view.chunks(chunks_of(3), "attn.c_attn.weight") end, "the end of 2 tensors' names, ")
    fails(function() view.chunks(chunks_of(3), "h.1.attn.c_attn.weigth") end, "did you mean 'h.1.attn.c_attn.weight'?")
  end)
end)

local function lines_of(value)
  local lines = {}
  for line in (tostring(value) .. "\n"):gmatch("([^\n]*)\n") do
    assert.truthy(#line <= 100, line)
    lines[#lines + 1] = line
  end
  return lines
end

describe("ps.chunks()", function()
  it("prints a row per chunk and totals, and stays a list", function()
    local v = view.chunks(chunks_of(3, 2))
    local lines = lines_of(v)
    assert.same({
      "id  kind            size   used  tier       state           last  next  tensors",
      " 0  param       24.0 MiB  50.0%  host       HOLD_AFTER_FWD     0  1200  wte.weight",
      " 1  param       24.0 MiB  50.0%  host       HOLD_AFTER_FWD     8  1199  h.1.ln_1 .. mlp.c_proj (4)",
      " 2  param       24.0 MiB  50.0%  host       COMPUTE x2        16  1198  h.2.ln_1 .. mlp.c_proj (4)",
      " 3  param_fp32  48.0 MiB  50.0%  host+disk  HOLD_AFTER_FWD     0  1200  wte.weight",
    }, { unpack(lines, 1, 5) })
    assert.same({
      "6 chunks, 216.0 MiB, 50.0% used",
      "by kind: param 72.0 MiB, param_fp32 144.0 MiB",
      "valid copies: host 216.0 MiB, disk 144.0 MiB",
      "names without their 'transformer.'; x1: pinned once",
    }, { unpack(lines, 8) })
    assert.equal(6, #v)
    assert.equal("param_fp32", v[4].kind)
    assert.equal(48 * 2 ^ 20, v[4].nbytes)
  end)

  it("shortens long lists, unless all rows are requested", function()
    local list = chunks_of(30)
    local lines = lines_of(view.chunks(list))
    assert.truthy(#lines <= 40)
    assert.matches("... 118 more: ps.chunks{all=true}", lines[18], 1, true)
    assert.matches("^134 ", lines[19])
    assert.equal(150 + 5, #lines_of(view.chunks(list, { all = true })))
    assert.equal(40 + 6, #lines_of(view.chunks(chunks_of(8))))
  end)

  it("filters by kind, tier and state", function()
    local list = chunks_of(10)
    assert.equal(10, #view.chunks(list, { kind = "exp_avg" }))
    assert.equal(15, #view.chunks(list, { tier = "host" }))
    assert.equal(3, #view.chunks(list, { kind = "grad", tier = "host" }))
    assert.equal(5, #view.chunks(list, { state = "COMPUTE" }))
    assert.equal("no chunks with kind grad, state FREE", tostring(view.chunks(list, { kind = "grad", state = "FREE" })))
    assert.equal("no chunks", tostring(view.chunks({})))
    local function refused(words, options)
      local ok, err = pcall(view.chunks, list, options)
      assert.is_false(ok)
      assert.matches(words, err, 1, true)
    end
    refused("no chunk is of kind 'params' (there are param, param_fp32, exp_avg, exp_avg_sq, grad)",
      { kind = "params" })
    refused("no tier is called 'ssd' (there are device, host, disk)", { tier = "ssd" })
    refused("no option 'kinds'", { kinds = "param" })
  end)

  it("supports chunks without contents, names or uses, and very long names", function()
    local long = ("very_long_name_without_any_dot_"):rep(8)
    local v = view.chunks { { id = 0, kind = "param", index = 0, nbytes = 0, used_nbytes = 0, tiers = {},
      state = "FREE", pins = 0, tensors = {} }, { id = 123456, kind = "param_fp32", index = 1, nbytes = 2 ^ 40,
      used_nbytes = 2 ^ 40, tiers = { device = true, host = true, disk = true }, state = "HOLD_AFTER_FWD", pins = 12,
      tensors = { long, long .. "2" }, last_use = 1234567, next_use = 12345678 } }
    local text = tostring(v)
    assert.matches("0  param       ", text, 1, true)
    assert.matches("  %-  +FREE", text)
    assert.matches("device+host+disk", text, 1, true)
    for line in text:gmatch("[^\n]+") do assert.truthy(#line <= 125) end
  end)

  it("shows full names if there is room", function()
    local v = view.chunks { { id = 0, kind = "grad", index = 0, nbytes = 4096, used_nbytes = 4096,
      tiers = { host = true }, state = "HOLD", pins = 0, tensors = { "h.0.attn.weight", "x", "h.2.ln_1.bias" } } }
    assert.matches("h.0.attn.weight .. h.2.ln_1.bias (3)", tostring(v), 1, true)
  end)
end)

describe("ps.memory()", function()
  local info = { used = 300 * 2 ^ 20, peak = 2 ^ 30, reserved = 1.5 * 2 ^ 30, limit = 0, device = "cpu" }

  it("keeps the fields of a device", function()
    local m = view.memory(info)
    assert.same({ info.used, info.peak, info.reserved, 0 }, { m.used, m.peak, m.reserved, m.limit })
    assert.same({}, m.tiers)
    assert.equal("cpu: 300.0 MiB in use, 1.00 GiB at most, 1.50 GiB set aside, no limit", tostring(m))
    m = view.memory { used = 0, peak = 0, reserved = 0, limit = 2 ^ 20 }
    assert.equal("memory: 0 B in use, 0 B at most, 0 B set aside, limit 1.0 MiB", tostring(m))
  end)

  it("adds a row a tier", function()
    local m = view.memory(info, {
      { name = "host", budget = 6 * 2 ^ 30, chunks = 4.5 * 2 ^ 30, other = 2 ^ 29, free = 2 ^ 30, peak = 5.5 * 2 ^ 30 },
      { name = "disk", budget = 0, chunks = 20 * 2 ^ 30, other = 0, free = 0, peak = 20 * 2 ^ 30 } })
    assert.same({
      "tier    budget     chunks      other      free       peak",
      "host  6.00 GiB   4.50 GiB  512.0 MiB  1.00 GiB   5.50 GiB  [#################...]",
      "disk      none  20.00 GiB        0 B         -  20.00 GiB",
    }, { unpack(lines_of(m), 1, 3) })
    assert.equal("disk", m.tiers[2].name)
  end)

  it("prints bytes in readable units", function()
    assert.same({ "0 B", "1023 B", "1.0 KiB", "24.0 MiB", "1.00 GiB", "1.00 TiB", "2048.00 TiB" }, {
      readable.bytes(0), readable.bytes(1023), readable.bytes(1024), readable.bytes(24 * 2 ^ 20),
        readable.bytes(2 ^ 30 - 1),
      readable.bytes(2 ^ 40), readable.bytes(2 ^ 51) })
  end)
end)
