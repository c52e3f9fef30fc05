-- SPDX-License-Identifier: BSD-3-Clause
-- Compute threads: their number in a process, their waiting, and the freed memory that they keep.
local ps = require "ps"
local paths = require "ps.paths"
local check = require "spec.check_lib"

-- Returns the output (both streams) of a psluajit process with this environment, and its exit code.
local function child(environment, arguments)
  local command = "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT -u GLIBC_TUNABLES %s timeout 300 '%s' %s 2>&1; echo \"|$?\""
  local p = assert(io.popen(command:format(environment, paths.exe, arguments)))
  local said, code = p:read("*a"):match("^(.*)|(%d+)\n$")
  p:close()
  return said, tonumber(code)
end

local COMPUTES = [[-e 'local ps = require "ps"
  local a = ps.ones { 256, 256 }
  print(a:matmul(a):sum():item(), ps.threads())']]

-- Returns the number of threads. A build with ThreadSanitizer computes on one thread, whatever is requested.
local function taken(n)
  local was = ps.threads()
  ps.set_threads(2)
  local many = ps.threads() == 2
  ps.set_threads(was)
  return many and n or 1
end

describe("OMP_NUM_THREADS", function()
  it("above the limit becomes the largest possible number, with a message", function()
    local most = ps.C.ps_threads_most()
    for _, n in ipairs { "1000000", "99999999999", "4294967297", "1" .. ("0"):rep(40), "100000,2" } do
      local said, code = child("OMP_NUM_THREADS=" .. n, COMPUTES)
      assert.equal(0, code, said)
      assert.truthy(said:find(("OMP_NUM_THREADS is %s; %d threads are the most"):format(n, most), 1, true), said)
      assert.truthy(said:find("\n16777216\t" .. taken(most) .. "\n", 1, true), said)
    end
  end)
  it("that is not a number is reported once and ignored", function()
    local without = child("env -u OMP_NUM_THREADS", COMPUTES)
    for _, words in ipairs { "abc", "0", "", "' -3'", "-3", "2,x", "2x", "2.5" } do
      for _, policy in ipairs { "", "OMP_WAIT_POLICY=passive" } do
        local said, code = child(("%s OMP_NUM_THREADS=%s"):format(policy, words), COMPUTES)
        assert.equal(0, code, said)
        local want = "psluajit: OMP_NUM_THREADS is '%s', not a number of threads; it is ignored\n%s"
        assert.truthy(said:find(want:format(words:gsub("'", ""), without), 1, true), said)
        assert.truthy(select(2, said:gsub("libgomp:", "")) <= 1, said)
      end
    end
  end)
  it("within the limit is used", function()
    for _, n in ipairs { 1, 2, 7, 64 } do
      local said, code = child("OMP_NUM_THREADS=" .. n, COMPUTES)
      assert.equal(0, code, said)
      assert.equal("16777216\t" .. taken(n) .. "\n", said)
    end
  end)
end)

describe("ps.set_threads", function()
  -- With AVX-512 oneDNN keeps the bits, but not with AVX2, and in bf16 not with AMX: how it divides sums into blocks
  -- depends on the number of threads.
  local wide = ps.device("cpu").description:find("oneDNN.*AVX%-512") ~= nil
  local has_amx = ps.device("cpu").description:find "oneDNN.*AMX" ~= nil
  local function of_several(a, b, what)
    local was, one = ps.threads(), nil
    for _, n in ipairs { 1, 2, 3, 7 } do
      ps.set_threads(n)
      local y = a:matmul(b)
      one = one or y
      local far = (y - one):abs():max():item()
      ps.set_threads(was)
      assert.truthy(far == 0, ("%s: %g on %d threads from one"):format(what, far, n))
    end
  end
  it("does not change the bits of a product with a transposed operand, if oneDNN has wide vectors", function()
    if not wide then return end
    for _, rows in ipairs { 100, 352, 1024 } do
      for _, inner in ipairs { 257, 512, 768, 1000, 1024, 2048, 3072 } do
        for _, columns in ipairs { 512, 768, 2304 } do
          ps.scope(function()
            local a, b = ps.randn { rows, inner }, ps.randn { columns, inner }
            of_several(a, b:t(), ("[%d, %d] x [%d, %d]^T"):format(rows, inner, columns, inner))
          end)
        end
      end
    end
  end)
  it("does not change the bits of a tall weight gradient of a short sum, if oneDNN has wide vectors", function()
    if not wide then return end
    for _, rows in ipairs { 256, 512 } do
      for _, sizes in ipairs { { 2048, 768 }, { 1400, 1000 }, { 8192, 256 } } do
        ps.scope(function()
          local a, b = ps.randn { rows, sizes[1] }, ps.randn { rows, sizes[2] }
          of_several(a:t(), b, ("[%d, %d]^T x [%d, %d]"):format(rows, sizes[1], rows, sizes[2]))
        end)
      end
    end
  end)
  it("does not change the bits of a small weight gradient of a long sum, if oneDNN has wide vectors", function()
    if not wide then return end
    for _, dtype in ipairs(has_amx and { "fp32", "fp16" } or { "fp32", "bf16", "fp16" }) do
      for _, rows in ipairs { 2048, 3000, 16384 } do
        for _, sizes in ipairs { { 32, 64 }, { 48, 128 }, { 512, 64 }, { 768, 100 }, { 1000, 128 } } do
          ps.scope(function()
            local a, b = ps.randn({ rows, sizes[1] }):to(dtype), ps.randn({ rows, sizes[2] }):to(dtype)
            of_several(a:t(), b, ("%s [%d, %d]^T x [%d, %d]"):format(dtype, rows, sizes[1], rows, sizes[2]))
          end)
        end
      end
    end
  end)
  it("refuses more than the limit", function()
    for _, n in ipairs { 1000000, 2 ^ 31, 2 ^ 40 } do
      local text = "ps.set_threads takes at most " .. ps.C.ps_threads_most()
      check.fails_saying({ text }, function() ps.set_threads(n) end)
    end
  end)
end)

describe("a waiting thread", function()
  local SAYS = [[-e 'print(os.getenv "GOMP_SPINCOUNT", os.getenv "OMP_WAIT_POLICY")']]

  it("sleeps soon, unless the environment sets how long it spins", function()
    -- Rounds of some nanoseconds each, 50 microseconds in total.
    local turns = tonumber((child("", SAYS):match "^(%d+)\tnil\n$"))
    assert.truthy(turns and turns >= 100 and turns <= 100000, turns)
    assert.equal("7\tnil\n", (child("GOMP_SPINCOUNT=7", SAYS)))
    assert.equal("nil\tactive\n", (child("OMP_WAIT_POLICY=active", SAYS)))
  end)
  it("preserves the program's arguments, input and exit code", function()
    local name = os.tmpname()
    check.write(name, "a text")
    local said, code = child("", "-e 'print(io.read \"*a\") os.exit(5)' <" .. name)
    os.remove(name)
    assert.equal("a text\n5", said .. code)
    said, code = child("", ([['%s/spec/run.lua' --list tensor]]):format(paths.root))
    assert.equal(0, code)
    assert.equal(paths.root .. "/spec/tensor/tensor_spec.lua\n", said)
  end)

  -- With libgomp's default of 300,000 rounds, steps took 8 to 20 times as long as on one thread if other programs ran,
  -- too, since a waiting thread kept its processor from the thread for which it waited. The test counts processor time,
  -- which does not depend on the load of other programs.
  it("releases its processor soon after its own work", function()
    local WORKS_ALONE = [[-e 'local ffi, ps = require "ffi", require "ps"
      ffi.cdef "typedef struct { long s, ns; } instant; int clock_gettime(int clock, instant *at);"
      local function used(clock)
        local at = ffi.new "instant"
        ffi.C.clock_gettime(clock, at)
        return tonumber(at.s) + 1e-9 * tonumber(at.ns)
      end
      local PROCESS, THREAD = 2, 3
      local a = ps.ones { 128, 128 }
      local function turns(n)
        local all, own = used(PROCESS), used(THREAD)
        for _ = 1, n do
          ps.scope(function() a:matmul(a) end)
          local until_ = used(THREAD) + 0.005
          while used(THREAD) < until_ do end
        end
        own = used(THREAD) - own
        return (used(PROCESS) - all - own) / own
      end
      turns(5)
      print(ps.threads(), turns(40))']]
    local threads, share = child("OMP_NUM_THREADS=2", WORKS_ALONE):match "^(%d+)\t(%S+)\n$"
    if threads == "1" then return pending "this build computes on only one thread" end
    assert.truthy(tonumber(share) < 0.15, ("%s of the working thread's time"):format(share))
  end)
end)

describe("a thread", function()
  -- Prints the bytes of freed blocks that count as in use because a thread keeps them, and the GLIBC_TUNABLES that
  -- child processes get.
  local KEEPS = [[-e 'local ffi = require "ffi"
    ffi.cdef "struct counts { size_t n[10]; }; struct counts mallinfo2(void); void *malloc(size_t n);"
    ffi.cdef "void free(void *p);"
    local function in_use() return tonumber(ffi.C.mallinfo2().n[7]) end
    local before, blocks = in_use(), {}
    for i = 1, 7 do blocks[i] = ffi.C.malloc(600) end
    if in_use() == before then print "another allocator" return end
    for i = 1, 7 do ffi.C.free(blocks[i]) end
    print(in_use() - before, os.getenv "GLIBC_TUNABLES")']]

  it("keeps no freed blocks, so that neighbours can be merged, unless the environment says so", function()
    if child("", KEEPS):find "another" then return pending("this build does not use the C library's malloc") end
    assert.equal("0\tnil\n", (child("", KEEPS)))
    assert.equal("0\tnil\n", (child("OMP_WAIT_POLICY=passive", KEEPS)))
    local name = "glibc.malloc.tcache_count="
    assert.equal(("%d\t%s7\n"):format(7 * 608, name), (child("GLIBC_TUNABLES=" .. name .. 7, KEEPS)))
    assert.equal("0\tglibc.malloc.perturb=1\n", (child("GLIBC_TUNABLES=glibc.malloc.perturb=1", KEEPS)))
    assert.equal("0\tnil\n", (child("GLIBC_TUNABLES=" .. name .. 0, KEEPS)))
    assert.equal(("0\t%s0:glibc.malloc.perturb=1\n"):format(name),
      (child(("GLIBC_TUNABLES=%s0:glibc.malloc.perturb=1"):format(name), KEEPS)))
  end)
end)
