-- SPDX-License-Identifier: BSD-3-Clause
-- Attention of the device cuda by warpgroup products (PS_CUDA_ATTENTION=wgmma): against ref and against the kernels of
-- mma.sync, over sizes that are not multiples of tiles. On the emulator (spec/emulate/wgmma.cpp), or with
-- PS_CUDA_REAL=1 on a GPU of compute capability 9.0.
local cuda = require "spec.cuda_lib"

--- Runs a script with the given PS_CUDA_ATTENTION. The script must print "fine" at its end. Returns the output before
--- that word.
local function runs(attention, script)
  local out, code = cuda.child(script .. "\nprint 'fine'", { PS_CUDA_ATTENTION = attention })
  assert.truthy(code == 0 and out:find("fine\n", 1, true), out)
  return (out:gsub("fine\n$", ""))
end

local function lacks()
  local why = cuda.lacks_kernels()
  if not why and cuda.REAL then
    local out = cuda.child "print(ps.device('cuda').description)"
    if not out:find("compute capability 9.0", 1, true) then why = "this GPU is not one of compute capability 9.0" end
  end
  if why then pending(why) end
  return why ~= nil
end

-- Sizes D, T, S and whether attention is causal. Tiles have 128 or 192 queries and 64 or 128 keys.
local SIZES = [[
  local sizes = { { 64, 193, 193, 1 }, { 64, 130, 300, 1 }, { 64, 300, 70, 1 }, { 64, 66, 257, 0 }, { 64, 1, 640, 1 },
    { 128, 129, 129, 1 }, { 128, 70, 385, 1 }, { 128, 260, 131, 1 }, { 128, 128, 256, 0 }, { 128, 1, 1, 1 } }
]]

-- run(dtype, D, T, S, causal, device) returns outputs and gradients. The inputs are the same on every device.
local RUN = [[
  local function run(dtype, D, T, S, causal, device, p, mask, heads)
    ps.manual_seed(D + T + S)
    local function make(n, heads) return ps.randn({ 1, heads or 2, n, D }, { dtype = dtype, device = "ref" }) end
    local q, k, v, dy = make(T, heads), make(S), make(S), make(T, heads)
    local function leaf(t) return t:to(device):clone():detach():requires_grad(true) end
    q, k, v = leaf(q), leaf(k), leaf(v)
    mask = mask and mask:to(device)
    local y = ps.ops.attention(q, k, v, mask, D ^ -0.5, causal, p or 0, 5, 6, 7, 8)
    ;(y * dy:to(device)):sum():backward()
    return { y = y, dq = q:grad(), dk = k:grad(), dv = v:grad() }
  end
  -- Returns the largest difference, in units of the root mean square.
  local function off(got, want)
    got, want = got:to("cpu"):double(), want:to("cpu"):double()
    local most, size = (got - want):abs():max():item(), want:square():mean():sqrt():item()
    return most / math.max(size, 0.05)                          -- with a single key, the gradients are 0
  end
]]

-- Returns the number of products that the emulator has computed since the last call, or 1 on a GPU.
local COUNT = cuda.REAL and "local function count() return nil end\n" or ([[
  local ffi = require "ffi"
  ffi.cdef "int64_t ps_emu_take_products(void);"
  ps.device("cuda")
  local plugin = ffi.load(%q)
  local function count()
    ps.ones({ 1 }, { device = "cuda" }):item()                         -- waits until the queued work has ended
    return tonumber(plugin.ps_emu_take_products())
  end
]]):format(cuda.PLUGIN)

describe("attention by warpgroup products", function()
  it("agrees with ref", function()
    if lacks() then return end
    runs("wgmma", COUNT .. SIZES .. RUN .. [[
      local wrong = {}
      for i, size in ipairs(sizes) do
        for _, dtype in ipairs(i % 3 == 0 and { "bf16", "fp16" } or { "bf16" }) do
          local D, T, S, causal = unpack(size)
          count()
          local got = run(dtype, D, T, S, causal, "cuda")
          assert(count() ~= 0, ("other kernels ran: D %d, T %d, S %d"):format(D, T, S))
          local want = run(dtype, D, T, S, causal, "ref")
          for what, t in pairs(want) do
            local o = off(got[what], t)
            if not (o < (dtype == "bf16" and 0.12 or 0.02)) then
              wrong[#wrong + 1] = ("%s of D %d, T %d, S %d in %s is off by %g"):format(what, D, T, S, dtype, o)
            end
          end
        end
      end
      assert(#wrong == 0, table.concat(wrong, "\n"))
    ]])
  end)

  it("shares keys and values among heads, as ref does", function()
    if lacks() then return end
    runs("wgmma", COUNT .. RUN .. [[
      for _, size in ipairs { { 64, 130, 200, 1 }, { 128, 150, 90, 0 } } do
        local D, T, S, causal = unpack(size)
        count()
        local got = run("bf16", D, T, S, causal, "cuda", 0, nil, 6)
        assert(count() ~= 0, "other kernels ran")
        for what, t in pairs(run("bf16", D, T, S, causal, "ref", 0, nil, 6)) do
          local o = off(got[what], t)
          assert(o < 0.12, ("%s of heads of %d is off by %g"):format(what, D, o))
        end
      end
    ]])
  end)

  it("is used where it is faster, unless the environment says otherwise", function()
    if lacks() then return end
    if cuda.REAL then return pending("the emulator counts products; a GPU does not") end
    runs(false, COUNT .. RUN .. [[
      for D, forward in pairs { [64] = false, [128] = true } do
        local q = ps.randn({ 1, 2, 70, D }, { dtype = "bf16", device = "cuda" }):requires_grad(true)
        count()
        local y = ps.ops.attention(q, q, q, nil, 0.1, 1)
        assert((count() ~= 0) == forward, "forward of heads of " .. D)
        y:sum():backward()
        assert(count() ~= 0, "backward of heads of " .. D)
      end
    ]])
  end)

  it("agrees with the kernels of mma.sync", function()
    if lacks() then return end
    local name = os.tmpname()
    local script = SIZES .. RUN .. ([[
      local ffi, name = require "ffi", %q
      local lib = require "spec.check_lib"
      local f = assert(io.open(name, os.getenv("PS_CUDA_ATTENTION") == "mma" and "wb" or "rb"))
      for i = 1, #sizes, 3 do
        local D, T, S, causal = unpack(sizes[i])
        local got = run("fp16", D, T, S, causal, "cuda")
        for _, what in ipairs { "y", "dq", "dk", "dv" } do
          local t = got[what]:to("cpu"):float()
          local bytes = lib.bytes(t)
          if os.getenv("PS_CUDA_ATTENTION") == "mma" then
            f:write(bytes)
          else
            local other = assert(f:read(#bytes))
            local x, y = ffi.new("float[?]", #bytes / 4), ffi.new("float[?]", #bytes / 4)
            ffi.copy(x, bytes, #bytes)
            ffi.copy(y, other, #bytes)
            local most, sum = 0, 0
            for i = 0, #bytes / 4 - 1 do
              most, sum = lib.larger(most, math.abs(x[i] - y[i])), sum + y[i] * y[i]
            end
            assert(sum == sum and most <= 0.01 * math.max(math.sqrt(sum / (#bytes / 4)), 0.05),
                   ("%%s of D %%d, T %%d, S %%d is off by %%g"):format(what, D, T, S, most))
          end
        end
      end
      f:close()
    ]]):format(name)
    runs("mma", script)
    runs("wgmma", script)
    os.remove(name)
  end)

  it("leaves masks, dropout, other widths of heads and unaligned rows to other kernels", function()
    if lacks() then return end
    runs("wgmma", COUNT .. RUN .. [[
      local mask = ps.ones({ 1, 70 }, { device = "ref" }):gt(0)
      for what, left in pairs { mask = { 64, 0, mask }, dropout = { 64, 0.1 }, head = { 96, 0 }, none = { 64, 0 } } do
        count()
        run("bf16", left[1], 70, 70, 1, "cuda", left[2], left[3])
        local n = count()
        assert(not n or (n ~= 0) == (what == "none"), what .. ": " .. tostring(n))
      end
      local q = ps.randn({ 1, 2, 70, 64 }, { dtype = "bf16", device = "cuda" })
      ps.no_grad(function() ps.ops.attention(q, q, q, nil, 0.1, 1) end)
      local forward = count()
      run("bf16", 64, 70, 70, 1, "cuda")
      local both = count()
      assert(not both or both > 2 * forward, "backward ran other kernels")
      local x = ps.randn({ 1, 1, 64, 65 }, { dtype = "bf16", device = "cuda" }):slice(3, 1, 65)
      count()
      ps.ops.attention(x, x, x, nil, 0.1, 1)
      local n = count()
      assert(not n or n == 0)
    ]])
  end)

  it("gives the same bits each time", function()
    if lacks() then return end
    runs("wgmma", RUN .. [[
      local lib = require "spec.check_lib"
      local once, again = run("bf16", 64, 200, 200, 1, "cuda"), run("bf16", 64, 200, 200, 1, "cuda")
      for what, t in pairs(once) do assert(lib.bytes(t) == lib.bytes(again[what]), what) end
    ]])
  end)

  it("is selected by name, on the GPUs that support it", function()
    if cuda.REAL then return pending("this test needs a missing part, and nothing is missing") end
    if lacks() then return end
    for setting, words in pairs { hopper = "PS_CUDA_ATTENTION is 'hopper'; it must be mma or wgmma",
                                  wgmma = "is for compute capability 9.0, this device has 10.0; unset it" } do
      local out, code = cuda.child("local ok, err = pcall(ps.device, 'cuda') assert(not ok) print(tostring(err))",
                                   { PS_CUDA_ATTENTION = setting, PS_EMULATE_CAPABILITY = setting == "wgmma" and "10" })
      assert.truthy(code == 0 and out:find(words, 1, true), out)
    end
  end)
end)
