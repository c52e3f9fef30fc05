-- SPDX-License-Identifier: BSD-3-Clause
-- Groups of processes on this machine: the results of every collective, bit for bit, and every fault is an error on
-- every rank, in time. Each rank is a psluajit process under `timeout`.
local ps = require "ps"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local PROMPT_S, LIMIT_S = check.PROMPT_S, 3 * check.PROMPT_S

local function read(path)
  local f = io.open(path, "rb")
  local text = f and f:read("*a") or ""
  if f then f:close() end
  return text
end

--- Runs `body` (with ps, rank, size, meeting, options) as `size` ranks. Returns each rank's output and exit code, and
--- the total seconds.
---@param size integer
---@param body string
local function ranks(size, body)
  local base = os.tmpname()
  local f = assert(io.open(base, "wb"))
  f:write(([[
    local ps = require "ps"
    local rank, size, meeting = tonumber(arg[1]), tonumber(arg[2]), arg[3]
    local function join(more)
      local o = { rank = rank, world_size = size, local_rank = rank, rendezvous = "file://" .. meeting, timeout = %d,
                  quiet = true, backend = "gloo" }
      for k, v in pairs(more or {}) do o[k] = v end
      return ps.init_distributed(o)
    end
    local function failing(fn, ...)
      local ok, err = pcall(fn, ...)
      print(ok and "no error" or tostring(err))
    end
  ]]):format(check.FAR_S) .. body)
  f:close()
  local lines = {}
  for rank = 0, size - 1 do
    lines[#lines + 1] = ("(env -u LUA_INIT -u RANK -u WORLD_SIZE timeout -k 1 %d '%s' %s %d %d %s.meet >%s.%d 2>&1; "
      .. "echo \"|$?\" >>%s.%d) &"):format(LIMIT_S, paths.exe, base, rank, size, base, base, rank, base, rank)
  end
  lines[#lines + 1] = "wait"
  local start = ps.now()
  os.execute(table.concat(lines, "\n"))
  local seconds, out = ps.now() - start, {}
  for rank = 0, size - 1 do
    local path = base .. "." .. rank
    local text, code = read(path):match("^(.*)|(%d+)\n$")
    out[rank] = { text = text or "", code = tonumber(code) }
    os.remove(path)
    os.remove(base .. ".meet." .. rank)
  end
  os.remove(base)
  os.remove(base .. ".meet")
  return out, seconds
end

local function all_say(out, text, code)
  for rank = 0, #out do
    assert.equal(text, out[rank].text)
    assert.equal(code or 0, out[rank].code)
  end
end

local function all_match(out, text)
  for rank = 0, #out do
    if not out[rank].text:find(text, 1, true) then
      error(("rank %d does not say '%s' but: %s"):format(rank, text, out[rank].text), 2)
    end
  end
end

local no_gloo = require("spec.ranks_lib").no_gloo()

describe("a world of one", function()
  it("needs no launcher and moves nothing", function()
    local g = ps.dist.self()
    local t = ps.tensor { 1, 2, 3 }
    assert.equal(t, g:all_reduce(t))
    assert.same({ 1, 2, 3 }, t:tolist())
    assert.same({ 1, 2, 3 }, g:reduce_scatter(ps.zeros { 3 }, t):tolist())
    assert.same({ 1, 2, 3 }, g:all_gather(ps.zeros { 3 }, t):tolist())
    g:broadcast(t)
    g:barrier()
    assert.same({ 0, 1, 0 }, { g:rank(), g:size(), g:bytes_sent() })
    g:close()
    g:close()
    assert.has_error(function() g:barrier() end, "this group is closed")
  end)

  it("names the fault of an argument", function()
    local g = ps.dist.self()
    assert.error_matches(function() g:all_reduce(3) end, "group:all_reduce: t is a number; it takes a tensor", 1, true)
    for _, call in ipairs { "sum", "gathered", "scattered", "copied" } do
      local _, why = pcall(function()
        local x = g[call](g, 3)
        return x
      end)
      assert.truthy(why:find("dist_spec.lua:%d+: group:" .. call .. ": x is a number; it takes a tensor"), why)
    end
    assert.error_matches(function() g:broadcast(ps.ones { 1 }, 0.5) end, "root is 0.5", 1, true)
    assert.error_matches(function() g:all_reduce(ps.ones { 1 }, "mean") end, "no reduction 'mean'", 1, true)
    for text, t in pairs { ["cannot sum uint8"] = ps.tensor({ 1 }, { dtype = "uint8" }),
                           ["not contiguous"] = ps.zeros({ 2, 3 }):transpose(0, 1),
                           ["device meta"] = ps.zeros({ 2 }, { device = "meta" }) } do
      local ok, err = pcall(g.all_reduce, g, t)
      assert.falsy(ok)
      assert.truthy(tostring(err):find(text, 1, true), tostring(err))
    end
    assert.error_matches(function() ps.init_distributed { sed = 1 } end, "no option 'sed'", 1, true)
    assert.error_matches(function() ps.init_distributed { seed = 1.5 } end, "seed takes a whole number, not 1.5", 1,
      true)
    assert.error_matches(function() ps.init_distributed(3) end, "takes a table of options, not a number", 1, true)
    assert.error_matches(function() ps.init_distributed { backend = "mpi" } end, "no backend 'mpi'", 1, true)
    assert.error_matches(function() ps.init_distributed { rank = "0" } end, "rank is a string", 1, true)
    g:close()
  end)
end)

describe("a group of processes", function()
  if no_gloo then return pending(no_gloo) end

  for size = 2, 4, 2 do
    it(("returns the sums of %d ranks in fp32, in the order of ranks, bit for bit"):format(size), function()
      local out = ranks(size, [[
        local g = join { seed = 7 }
        local ffi = ps.ffi
        -- Returns the values of a rank, which every rank can compute. Sums are computed float by float, as in C.
        local function values(r, n, dtype)
          ps.manual_seed(100 + r)
          return ps.randn({ n }, { dtype = dtype })
        end
        local function expected(n, dtype)
          local sum = values(0, n, dtype):to { dtype = "fp32" }
          for r = 1, size - 1 do sum = sum + values(r, n, dtype):to { dtype = "fp32" } end
          return sum:to { dtype = dtype }
        end
        local function same(a, b, what)
          assert(a:dtype() == b:dtype() and a:numel() == b:numel(), what)
          local n = tonumber(ps.C.ps_tensor_nbytes(a))
          local x, y = ffi.new("char[?]", n), ffi.new("char[?]", n)
          ps.check(ps.C.ps_tensor_read(a, x, n))
          ps.check(ps.C.ps_tensor_read(b, y, n))
          assert(ffi.string(x, n) == ffi.string(y, n), what)
        end
        for _, dtype in ipairs { "fp32", "bf16", "fp16" } do
          for _, n in ipairs { 1, 3, size * 1000, size * 1000 + 1, 300007 } do
            local what = dtype .. " " .. n
            same(g:all_reduce(values(rank, n, dtype)), expected(n, dtype), what)
            local gathered = g:all_gather(ps.zeros({ size * n }, { dtype = dtype }), values(rank, n, dtype))
            local all = {}
            for r = 0, size - 1 do all[r + 1] = values(r, n, dtype) end
            same(gathered, ps.cat(all, 0), what)
            same(g:broadcast(values(rank, n, dtype), size - 1), values(size - 1, n, dtype), what)
            local part = g:reduce_scatter(ps.zeros({ n }, { dtype = dtype }), values(rank, size * n, dtype))
            same(part, expected(size * n, dtype)[{ { rank * n, rank * n + n } }]:contiguous(), what)
          end
        end
        print "good"
        g:close()
      ]])
      all_say(out, "good\n")
    end)
  end

  it("transfers every type, works in place, and sends from rank to rank", function()
    local out = ranks(3, [[
      local g = join()
      assert(g:rank() == rank and g:size() == 3 and ps.rank() == rank and ps.world_size() == 3)
      assert(ps.local_rank() == rank)
      for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8" } do
        local whole = g:all_gather(ps.zeros({ 3, 2 }, { dtype = dtype }), ps.full({ 2 }, rank + 1, { dtype = dtype }))
        assert(table.concat(whole:reshape(6):tolist(), " ") == "1 1 2 2 3 3", dtype)
        local t = g:broadcast(ps.full({ 3 }, rank, { dtype = dtype }), 2)
        assert(table.concat(t:tolist(), " ") == "2 2 2", dtype)
        if rank == 0 then g:send(ps.full({ 3 }, 5, { dtype = dtype }), 2)
        elseif rank == 2 then
          assert(table.concat(g:recv(ps.zeros({ 3 }, { dtype = dtype }), 0):tolist(), " ") == "5 5 5", dtype)
        end
      end
      local before = g:bytes_sent()
      g:all_reduce(ps.ones { 3000 })
      assert(g:bytes_sent() - before == 2 * 2 * 4000, g:bytes_sent() - before)  -- twice 2/3 of 12000
      assert(g:all_reduce(ps.ones({ 4 }, { dtype = "fp64" })):tolist()[4] == 3)
      assert(g:all_reduce(ps.zeros { 0 }):numel() == 0)
      -- has the same size on the root and on the other ranks
      local big = ps.full({ 2 ^ 19 + 3 }, rank)
      assert(g:broadcast(big, 1):sum():item() == 2 ^ 19 + 3)
      ps.synchronize()
      ps.print_rank("only here", 1)
      g:close()
      assert(ps.world_size() == 1)
    ]])
    assert.same({ "", "only here\n", "" }, { out[0].text, out[1].text, out[2].text })
    for rank = 0, 2 do assert.equal(0, out[rank].code) end
  end)

  it("prints several values, and refuses a rank that does not exist", function()
    local said, print_was = {}, print
    _G.print = function(...) said[#said + 1] = { n = select("#", ...), ... } end
    finally(function() _G.print = print_was end)
    ps.print_rank("a", "b")
    ps.print_rank("a", nil, 2, "c")
    ps.print_rank("a", 0)
    ps.print_rank("a", 1, { rank = 0 })
    ps.print_rank()
    _G.print = print_was
    assert.same({ { n = 2, "a", "b" }, { n = 4, "a", nil, 2, "c" }, { n = 1, "a" }, { n = 2, "a", 1 }, { n = 0 } },
      said)
    check.fails(function() ps.print_rank("step", 5) end, "ps.print_rank: there is no rank 5, only 0 to 0",
      "{ rank = 0 }")
    check.fails(function() ps.print_rank("loss", 0.5) end, "there is no rank 0.5")
    check.fails(function() ps.print_rank("a", "b", { rank = 1 }) end, "there is no rank 1")
  end)

  it("raises an error on all ranks if they disagree, and continues", function()
    local out, seconds = ranks(3, [[
      local g = join()
      failing(g.all_reduce, g, ps.ones { rank == 1 and 4 or 3 })
      failing(g.all_reduce, g, ps.ones({ 4 }, { dtype = rank == 2 and "bf16" or "fp32" }))
      failing(g.broadcast, g, ps.ones { 4 }, rank == 2 and 1 or 0)
      failing(function() if rank == 1 then g:barrier() else g:all_reduce(ps.ones { 4 }) end end)
      assert(g:all_reduce(ps.ones { 2 }):tolist()[1] == 3)
    ]])
    local function call(i, a, b, what)
      return ("the ranks disagree: rank 0 is in %s, rank %s in %s: %s; all must make the same calls with the same "
        .. "shapes in the same order\n"):format(a:format(i), b:match("^(%d) "), b:sub(3):format(i), what)
    end
    all_say(out, call(0, "all_reduce (call %d, fp32, 12 bytes)", "1 all_reduce (call %d, fp32, 16 bytes)",
      "another size") .. call(1, "all_reduce (call %d, fp32, 16 bytes)", "2 all_reduce (call %d, bf16, 8 bytes)",
      "another type") .. call(2, "broadcast (call %d, fp32, 16 bytes, root 0)",
      "2 broadcast (call %d, fp32, 16 bytes, root 1)", "another root") .. call(3,
      "all_reduce (call %d, fp32, 16 bytes)", "1 barrier (call %d)", "another call"))
    assert.truthy(seconds < PROMPT_S)
  end)

  it("reports a rank that cannot take part on all ranks, and continues", function()
    local out = ranks(2, [[
      local g = join()
      failing(g.all_reduce, g, rank == 1 and ps.zeros({ 2, 2 }):transpose(0, 1) or ps.zeros { 4 })
      failing(g.reduce_scatter, g, ps.zeros { rank == 1 and 3 or 2 }, ps.zeros { 4 })
      assert(g:all_reduce(ps.ones { 2 }):tolist()[1] == 2)
    ]])
    assert.matches("all_reduce, call 0: rank 1 could not take part (EINVAL)", out[0].text, 1, true)
    assert.matches("call 0 of rank 1: a tensor is not contiguous", out[1].text, 1, true)
    assert.matches("reduce_scatter, call 1: rank 1 could not take part", out[0].text, 1, true)
    assert.matches("have 3 and 4 elements; with 2 ranks the larger must have 6", out[1].text, 1, true)
    for rank = 0, 1 do assert.equal(0, out[rank].code) end
  end)

  it("ends where a send meets another call", function()
    local out, seconds = ranks(2, [[
      local g = join()
      failing(function() if rank == 0 then g:send(ps.ones { 2 }, 1) else g:barrier() end end)
      failing(g.barrier, g)
    ]])
    all_match(out, "the ranks disagree: rank ")
    all_match(out, "this group failed before")
    assert.truthy(seconds < PROMPT_S)
  end)

  it("names a rank that was killed, and at once", function()
    local out, seconds = ranks(3, [[
      local g = join()
      g:barrier()
      if rank == 1 then
        os.execute("sleep 0.3")                    -- the others have also left the barrier
        require("posix.signal").kill(require("posix.unistd").getpid(), 9)
      end
      local start = ps.now()
      failing(g.all_reduce, g, ps.ones { 100 })
      print(ps.now() - start < 100 and "in time" or "late")
    ]])
    assert.equal(137, out[1].code)
    for _, rank in ipairs { 0, 2 } do
      assert.matches("in time", out[rank].text, 1, true)
      assert.matches("all_reduce, call 1 of rank " .. rank .. ": rank 1 %(%S+%) died: its process ended without a word "
        .. "%(killed, out of memory, or a crash%); it was last known %l+ barrier %(call 0%)\n", out[rank].text)
    end
    assert.truthy(seconds < PROMPT_S)
  end)

  it("names a rank that does not come in time", function()
    local out, seconds = ranks(3, [[
      local g = join { timeout = 0.5 }
      g:barrier()
      if rank == 1 then                                  -- waits until both other ranks have timed out
        os.execute(("for i in $(seq 4000); do [ -e %s.0 ] && [ -e %s.2 ] && break; sleep 0.05; done"):format(meeting,
          meeting))
      end
      failing(g.all_reduce, g, ps.ones { 100 })
      io.open(meeting .. "." .. rank, "w"):close()
    ]])
    for rank = 0, 2 do
      assert.matches("all_reduce, call 1 of rank " .. rank .. ": rank 1 %(%S+%) is alive but has not come to "
        .. "all_reduce %(call 1%) within 0.5 s; it last finished barrier %(call 0%)\n", out[rank].text)
    end
    assert.truthy(seconds < PROMPT_S)
  end)

  it("cannot be made by ranks that disagree on its size, or by two ranks with the same number", function()
    local out, seconds = ranks(2, "failing(join, { world_size = rank == 1 and 3 or 2 })")
    all_match(out, "a process (rank 1) says that there are 3 ranks, rank 0 says 2")
    assert.truthy(seconds < PROMPT_S)
    out, seconds = ranks(3, "failing(join, { rank = rank == 2 and 1 or rank, local_rank = 0 })")
    all_match(out, "two processes say that they are rank 1 of 3")
    assert.truthy(seconds < PROMPT_S)
  end)

  it("cannot be made without all of its ranks", function()
    local out, seconds = ranks(2, "failing(join, { world_size = 3, timeout = 10 })")
    all_match(out, "rank 2 of 3 did not come")
    assert.truthy(seconds < PROMPT_S)
    -- Rank 0 prints once which ranks are missing, long before its time-out.
    local words = "rank 0 at %S+: waiting 2%.5 s for the other ranks: rank 2 of 3 did not come"
    assert.equal(1, select(2, out[0].text:gsub(words, "")), out[0].text)
    assert.matches("(it gives up after 10 s)", out[0].text, 1, true)
    assert.is_nil(out[1].text:find("gives up", 1, true), out[1].text)
  end)

  it("reports that its port is in use, or that nobody answers there", function()
    local out, seconds = ranks(2, [[
      local where = { rendezvous = "tcp://127.0.0.1:1", timeout = 0.5 }
      if rank == 0 then
        local posix = require "posix.sys.socket"
        local fd, port = assert(require("ps.launch.port").bound())
        assert(posix.listen(fd, 1))
        where.rendezvous = "tcp://127.0.0.1:" .. port
      end
      failing(join, where)
    ]])
    assert.matches("port %d+ of this machine is in use", out[0].text)
    assert.matches("got no answer at 127.0.0.1 port 1 in 0.5 s", out[1].text, 1, true)
    local waits = "rank 1 of 2 waits for rank 0 at 127.0.0.1 port 1, which has not answered for "
    assert.equal(1, select(2, out[1].text:gsub(waits, "")), out[1].text)
    assert.truthy(seconds < PROMPT_S)
  end)

  it("distinguishes a host without an address from one where nobody answers", function()
    local text, ok, problem = check.told(ps.dist.gloo, "tcp://no..host:99", 1, 2, 0.3)
    assert.is_false(ok)
    assert.matches("rank 1 of 2: the host no..host could not be found", problem, 1, true)
    assert.matches("^psluajit: rank 1 of 2: the name of rank 0's host, no%.%.host %(MASTER_ADDR%), does not resolve to "
      .. "an address %(.+%); this rank looks it up again for up to 0%.3 s\n", text)
    text = check.told(ps.dist.gloo, "tcp://127.0.0.1:1", 1, 2, 0.3)
    assert.is_nil(text:find("does not resolve", 1, true), text)
  end)

  it("can be made again after it was closed, and by a file that an earlier run left", function()
    local out = ranks(2, [[
      if rank == 0 then
        local f = io.open(meeting, "wb")
        f:write("127.0.0.1:1\n")
        f:close()
      end
      for _ = 1, 3 do
        local g = join()
        failing(join)
        assert(g:all_reduce(ps.ones { 2 }):tolist()[2] == 2)
        g:close()
      end
    ]])
    for rank = 0, 1 do
      assert.equal(0, out[rank].code, out[rank].text)
      assert.matches("called before", out[rank].text, 1, true)
    end
  end)
end)
