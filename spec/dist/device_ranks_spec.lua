-- SPDX-License-Identifier: BSD-3-Clause
-- Collectives on memory of devices: over NCCL between emulated GPUs (spec/emulate/nccl.cpp stands in for the library),
-- and on the device sim, whose bytes the host transfers. The sums' bits are those of host memory; a missing library, a
-- failure or a stall is an error on all ranks. Models that are cut into layers' shards or stages train like one rank
-- on the cpu.
local cjson = require "cjson"
local check = require "spec.check_lib"
local lib = require "spec.ranks_lib"
local mesh_lib = require "bench.mesh_lib"

local folder

local START = [[
  local ps = require "ps"
  local group = ps.init_distributed { seed = 3, quiet = true, heartbeat = 4,
    timeout = tonumber(os.getenv "TIMEOUT" or 60),
    rendezvous = "file://%s/rendezvous", backend = os.getenv("BACKEND" .. os.getenv "RANK") or os.getenv "BACKEND",
    local_rank = tonumber(os.getenv "ASK") }
  local rank, size, device = ps.rank(), ps.world_size(), "%s"
]]

local VALUES = [[
  for _, dtype in ipairs { "fp32", "bf16", "fp16", "fp64" } do
    ps.manual_seed(rank + 1)
    for _, n in ipairs { 1, 7, 1003, 300000 } do
      local host = (ps.randn({ n }) * 3):to(dtype)
      local there = host:to(device)
      if n == 1003 then there, host = there:narrow(0, 1, 1000), host:narrow(0, 1, 1000) end  -- not aligned to 16 bytes
      group:all_reduce(host)
      group:all_reduce(there)
      local different = (host:to("fp64") - there:to("cpu"):to("fp64")):abs():sum():item()
      assert(different == 0, dtype .. " " .. n .. ": " .. different)
    end
  end
  local rows = ps.arange(0, size * 5, 1, { dtype = "fp32" }):to(device) * (rank + 1)
  local part, all = ps.empty({ 5 }, { device = device }), ps.empty({ size * 5 }, { device = device })
  group:reduce_scatter(part, rows)
  assert(part:to("cpu"):tolist()[1] == rank * 5 * size * (size + 1) / 2)
  group:all_gather(all, part)
  assert(all:to("cpu"):tolist()[size * 5] == (size * 5 - 1) * size * (size + 1) / 2)
  local large = ps.full({ 700000 }, rank, { device = device, dtype = "int32" })        -- distributed over the ranks
  group:broadcast(large, size - 1)
  assert(large:to("cpu"):to("fp64"):sum():item() == 700000 * (size - 1))
  if rank == 0 and size > 1 then group:send(part, size - 1) end
  if rank > 0 and rank == size - 1 then
    assert(group:recv(part, 0):to("cpu"):tolist()[2] == size * (size + 1) / 2)
  end
  local raw = ps.full({ 4 }, rank + 1, { device = device })
  if group:carrier() == "nccl" then
    ps.check(ps.C.ps_group_raw(group.c, 1, raw, raw))
    assert(raw:to("cpu"):tolist()[1] == size * (size + 1) / 2)
  end
  for _, case in ipairs {
    { "other memory", function() group:all_reduce(ps.ones({ 3 }, { device = rank == 0 and "cpu" or device })) end },
    { "two devices", function() group:all_gather(ps.ones { size * 2 }, ps.ones({ 2 }, { device = device })) end },
    { "cannot sum uint8", function() group:all_reduce(ps.ones({ 3 }, { device = device, dtype = "uint8" })) end },
    { "no bytes", function() group:connect "meta" end },
  } do
    local ok, why = pcall(case[2])
    if size > 1 or case[1] ~= "other memory" then assert(not ok and tostring(why):find(case[1]), tostring(why)) end
  end
  group:barrier()
  local int = ps.full({ 5 }, rank, { device = device, dtype = "int64" })  -- the host sums these, since NCCL does not
  local ok, why = pcall(group.all_reduce, group, int)
  if group:carrier() == "nccl" then
    assert(not ok and tostring(why):find("sums of int64 in a device's memory", 1, true), tostring(why))
    ok, why = pcall(group.all_reduce, group, part, "max")
    assert(not ok and tostring(why):find("max of fp32 in a device's memory", 1, true), tostring(why))
  else assert(int:to("cpu"):tolist()[5] == size * (size - 1) / 2, tostring(why)) end
  group:barrier()
  print("carrier " .. group:carrier())
]]

local function run(size, device, script, env)
  return lib.run(folder, size, START:format(folder, device) .. script, env)
end

local function emulated()
  if lib.emulated() then return lib.emulated() end
  pending(lib.NO_EMULATED)
  return nil
end

describe("collectives on devices", function()
  if lib.no_gloo() then return pending(lib.no_gloo()) end

  setup(function() folder = lib.folder() end)
  teardown(function() lib.remove(folder) end)

  local function good(size, device, carrier, env)
    local all = run(size, device, VALUES, env)
    for rank = 0, size - 1 do
      assert.equal(0, all[rank].code, all[rank].text)
      assert.truthy(all[rank].text:find("carrier " .. carrier, 1, true), all[rank].text)
    end
  end
  it("have the sums of host memory: device sim", function() good(3, "sim", "gloo") end)
  for size = 1, 3 do
    it(("have the sums of host memory: %d emulated GPUs"):format(size), function()
      local env = emulated()
      if env then good(size, "cuda", "nccl", env) end
    end)
  end

  -- Rows and columns of four GPUs. Each has a communicator, whose sums have the same bits as in host memory.
  local CUT = [[
    local mesh = ps.mesh { pp = 2, tp = 2 }
    local row, column = mesh.group "tp", mesh.group "pp"
    ps.manual_seed(rank + 1)
    for turn = 1, 3 do
      for _, g in ipairs { row, column, group, column } do
        local host = ps.randn { 1003 * turn }
        local there = host:to(device)
        g:all_reduce(host)
        g:all_reduce(there)
        assert((host - there:to "cpu"):abs():sum():item() == 0)
      end
      local x = ps.full({ 4 }, rank, { device = device }):requires_grad(true)
      local y = row:sum(x)
      y:sum():backward()
      assert(y:to("cpu"):tolist()[1] == math.floor(rank / 2) * 4 + 1 and x:grad():to("cpu"):tolist()[1] == 2)
    end
    local part = ps.full({ 2 }, rank, { device = device })
    assert(column:all_gather(ps.empty({ 4 }, { device = device }), part):to("cpu"):tolist()[4] == rank % 2 + 2)
    print("carriers", row:carrier(), column:carrier(), group:carrier())
  ]]

  it("also run along the axes of a mesh", function()
    local env = emulated()
    if not env then return end
    local all = run(4, "cuda", CUT, env)
    for rank = 0, 3 do
      assert.equal(0, all[rank].code, all[rank].text)
      assert.truthy(all[rank].text:find("carriers\tnccl\tnccl\tnccl", 1, true), all[rank].text)
    end
    all = run(4, "cuda", [[
      local t, row = ps.ones({ 8 }, { device = device }), ps.mesh { tp = 2 }.group "tp"
      row:all_reduce(t)
      if rank == 3 then                                -- a heartbeat reports its state
        os.execute "sleep 3"
        require("posix.signal").kill(require("posix.unistd").getpid(), 9)
      end
      row:all_reduce(t)
      group:barrier()
    ]], env)
    for rank = 0, 2 do
      assert.equal(1, all[rank].code, all[rank].text)
      assert.truthy(all[rank].text:find("rank 3 .* died.*it was last known after all_reduce of tp %(call "),
        all[rank].text)
    end
  end)

  -- Checks that both ranks fail. Each error must contain one of the words.
  local function both(env, script, ...)
    local all = run(2, "cuda", script, env)
    for rank = 0, 1 do
      assert.equal(1, all[rank].code, all[rank].text)
      local found = false
      for _, word in ipairs { ... } do found = found or all[rank].text:find(word, 1, true) end
      assert.truthy(found, all[rank].text)
    end
    return all
  end
  local SUM = "local t = ps.ones({ 8 }, { device = device }) for _ = 1, 4 do group:all_reduce(t) end"

  -- A sum waits on the device for an exchange that fails. The sum continues when the exchange has ended, after its
  -- output was freed.
  it("that failed do not write to memory that another tensor has by then", function()
    local env = emulated()
    if not env then return end
    local all = run(2, "cuda", [[
      local x, wrong = ps.full({ 300000 }, 3, { device = device }), 0
      assert(not pcall(function() return group:sum(x):to("cpu") end))
      collectgarbage()                                                -- frees the sum's output
      local later = {}
      for i = 1, 6 do later[i] = ps.full({ 300000 }, 7, { device = device }) end
      for _ = 1, 2 do
        for _, t in ipairs(later) do wrong = wrong + t:to("cpu"):ne(7):to("fp32"):sum():item() end
        os.execute "sleep 0.2"
      end
      print(wrong .. " wrong")
    ]], env .. " PS_EMULATE_NCCL=breaks=1 PS_EMULATE_STREAMS=mixed=1")
    for rank = 0, 1 do
      assert.equal("0 wrong\n", all[rank].text)
    end
  end)
  it("fail on all ranks if NCCL fails", function()
    local env = emulated()
    if not env then return end
    both(env .. " PS_EMULATE_NCCL=refuses", SUM,
      "NCCL, connecting the ranks: unhandled system error: no usable network")
    both(env .. " PS_EMULATE_NCCL=breaks=3", SUM, "lost its connection to other ranks' devices in all_reduce (call 4)")
    both(env .. " PS_EMULATE_NCCL=stalls=3 TIMEOUT=3", SUM,
      "did not end within 3 s, though all its ranks came to it: rank ")
    both(env .. " PS_EMULATE_CARDS=1", SUM, "ranks 0 and 1 have the same device, 0000:0001:00.0 of ")
    both(env .. " PS_EMULATE_CARDS=2 ASK=1", SUM, "ranks 0 and 1 have the same device, 0000:0001:01.0 of ")
    both(env .. " PS_EMULATE_NCCL=old", SUM, "libnccl.so.2 is too old (version 21304); 2.14 is needed")
    both(env .. " BACKEND=gloo", SUM, 'backend = "gloo"')
    both(env, "group:send(ps.ones({ 2 }, { device = device }), 1 - rank)", "call group:connect on all ranks first")
  end)
  it("fail even if no call waits for their bytes: at the script's end, and when the group is closed", function()
    local env = emulated()
    if not env then return end
    local lost = "lost its connection to other ranks' devices in all_reduce (call 6)"  -- the error of the last exchange
    both(env .. " PS_EMULATE_NCCL=breaks=8", SUM, lost)
    both(env .. " PS_EMULATE_NCCL=breaks=8", SUM .. " os.exit(0)", lost)
    both(env .. " PS_EMULATE_NCCL=breaks=8", SUM .. [[
      local ok, why = pcall(group.close, group)
      assert(not ok and pcall(group.close, group))
      print(ps.ones({ 2 }, { device = device }):to("cpu"):sum():item() == 2 and tostring(why))
      os.exit(1)]], lost)
  end)

  -- `waits` returns the waits of the script's thread for bytes of calls, from the record, and all waits in the
  -- emulator.
  local ASYNCHRONOUS = [[
    local ffi, events = require "ffi", require "ps.core.events"
    ffi.cdef "void ps_emu_take_counts(int64_t *out, int n);"
    local plugin, seen = ffi.load(os.getenv "PS_CUDA_PLUGIN"), ffi.new("int64_t[1]")
    local function waits(fn)
      plugin.ps_emu_take_counts(seen, 1)
      fn()
      plugin.ps_emu_take_counts(seen, 1)
      local n = tonumber(seen[0])                                     -- a record causes additional waits
      ps.profiler.start()
      fn()
      ps.profiler.stop()
      local list, count = events.read()
      for i = 0, count - 1 do
        if list[i].kind == ps.C.PS_REC_WAIT and list[i].name == ps.C.PS_WAIT_COLLECTIVE then n = n + 1 end
      end
      return n
    end
    local x = ps.full({ 6, 4 }, rank + 1, { device = device }):requires_grad(true)
    local w, half = ps.full({ 4, 4 }, 0.125, { device = device }), ps.full({ 1 }, 0.5, { device = device })
    local all, part = ps.empty({ 12, 4 }, { device = device }), ps.empty({ 3, 4 }, { device = device })
    local function calls()
      local y = group:sum(x)                                          -- an op, and its gradient
      for _ = 1, 3 do y = group:sum(y:matmul(w)) end
      y:sum():backward()
      group:all_reduce(y:detach())
      group:reduce_scatter(part, y:detach())
      group:all_gather(all, y:detach())
      group:broadcast(all, 1)
      for _ = 1, 100 do group:all_reduce(part) part:mul_(half) end    -- more calls than there are moments
      return y
    end
    local first = calls()
    local second
    local n = waits(function() second = calls() end) assert(n == 0, n .. " waits")
    assert(first:to("cpu"):tolist()[6][4] == second:to("cpu"):tolist()[6][4])
    assert(second:to("cpu"):tolist()[1][1] == 6 and part:to("cpu"):tolist()[1][1] == 12)
    assert(waits(function() group:barrier() end) > 0)
    print "never waited"
  ]]
  local STALLED = [[
    local ffi = require "ffi"
    ffi.cdef "void ps_emu_take_counts(int64_t *out, int n);"
    local plugin, seen = ffi.load(os.getenv "PS_CUDA_PLUGIN"), ffi.new("int64_t[1]")
    local t = ps.ones({ 8 }, { device = device })
    group:all_reduce(t)
    plugin.ps_emu_take_counts(seen, 1)
    group:all_reduce(t)                                               -- stalls
    local y, other = t * 2, ps.ones({ 3 }, { device = device })
    for _ = 1, 3 do group:all_reduce(other) end                       -- these run after it
    plugin.ps_emu_take_counts(seen, 1)
    assert(seen[0] == 0, "a call waited")
    local ok, why = pcall(y.to, y, "cpu")
    assert(not ok, "what did not come was read")
    print(tostring(why))
    ok, why = pcall(group.all_reduce, group, t)
    assert(not ok and tostring(why):find("failed before", 1, true), tostring(why))
    group:close()
    assert(ps.ones({ 2 }, { device = device }):to("cpu"):sum():item() == 2)
    os.exit(1)
  ]]
  it("do not wait for bytes, and reading bytes that never arrive is an error", function()
    local env = emulated()
    if not env then return end
    for _, streams in ipairs { "late", "mixed=5" } do
      local all = run(2, "cuda", ASYNCHRONOUS, env .. " PS_EMULATE_STREAMS=" .. streams)
      for rank = 0, 1 do
        assert.equal(0, all[rank].code, all[rank].text)
        assert.truthy(all[rank].text:find("never waited", 1, true), all[rank].text)
      end
    end
    both(env .. " PS_EMULATE_NCCL=stalls=3 TIMEOUT=6", STALLED,
      "all_reduce (call 4) of rank 0", "all_reduce (call 4) of rank 1")
  end)
  -- A storage whose copy to the host fails stays on the device, and the script gets no error.
  it("are an error of the next read, whatever was copied to the host meanwhile", function()
    local env = emulated()
    if not env then return end
    both(env .. " PS_EMULATE_NCCL=breaks=7", [[
      local t, w = ps.ones({ 8 }, { device = device }), ps.randn({ 48, 48 }, { device = device }):requires_grad(true)
      local function block(x) return ps.F.gelu(x:matmul(w)) + x end
      for _ = 1, 4 do group:all_reduce(t) end                         -- the last exchange breaks
      os.execute "sleep 2"
      ps.offload_activations(ps.scope, function()
        local h = ps.randn({ 365, 48 }, { device = device })
        for _ = 1, 6 do h = ps.scope(block, h) end
        return h:square():mean()
      end)
      local ok, why = pcall(t.to, t, "cpu")
      print(tostring(why))
      assert(not ok and t:to("cpu"), "told once")
      os.exit(1)
    ]], "lost its connection to other ranks' devices in all_reduce (call 6)")
  end)
  it("of chunks that stall during the computation are named", function()
    local env = emulated()
    if not env then return end
    both(env .. " PS_EMULATE_NCCL=stalls=9 TIMEOUT=3", [[
      local gpt2 = require "models.gpt2"
      local model, optimizer = ps.initialize { model_func = function() return gpt2.new "tiny" end,
        config = { device = "cuda", zero_optimization = { stage = 3 }, plan_print = false } }
      local x = ps.randint(0, 256, { 2, 8 }, { dtype = "int32" })
      for _ = 1, 10 do
        model:backward(model(x, x))
        optimizer:step()
      end
    ]], "gather of chunks (call ", "reduction of chunks (call ")
  end)
  it("use one card per rank, by the rank's number on the machine", function()
    local env = emulated()
    if env then good(2, "cuda", "nccl", env .. " PS_EMULATE_CARDS=2") end
  end)
  it("name a rank that died", function()
    local env = emulated()
    if not env then return end
    local all = run(2, "cuda", [[
      local t = ps.ones({ 8 }, { device = device })
      group:all_reduce(t)
      if rank == 1 then require("posix.signal").kill(require("posix.unistd").getpid(), 9) end
      group:all_reduce(t)
    ]], env)
    assert.equal(1, all[0].code, all[0].text)
    assert.truthy(all[0].text:find("rank 1", 1, true), all[0].text)
    assert.truthy(all[0].text:find("died", 1, true), all[0].text)
  end)
  it("name a rank that was stopped in an exchange, without waiting for it", function()
    local env = emulated()
    if not env then return end
    -- The rank continues when the other rank has ended, or after five minutes. If it waited for the other rank, it
    -- would be late.
    local all = run(2, "cuda", ("local over = %q"):format(folder .. "/over") .. [[

      local t, large = ps.ones({ 8 }, { device = device }), ps.ones({ 2 ^ 24 }, { device = device })
      group:all_reduce(t)
      if rank == 1 then
        local pid = require("posix.unistd").getpid()
        os.execute(("(sleep 0.05; kill -STOP %d; for i in $(seq 300); do [ -e '%s' ] && break; sleep 1; done; "
          .. "kill -CONT %d) &"):format(pid, over, pid))
      end
      local began = ps.now()
      local ok, why = pcall(function() for _ = 1, 1000 do group:all_reduce(large) end end)
      print(tostring(why))
      group:close()
      print(("%d s"):format(ps.now() - began))
      if rank == 0 then io.open(over, "w"):close() end
    ]], env .. " TIMEOUT=1000")
    assert.truthy(all[0].text:find("rank 1 .* is silent for"), all[0].text)
    assert.truthy(tonumber(all[0].text:match("(%d+) s\n$")) < check.PROMPT_S, all[0].text)
  end)

  it("are not needed for training if NCCL is missing, unless requested", function()
    local env = emulated()
    if not env then return end
    local drivers = folder .. "/drivers"
    os.execute(("mkdir '%s' && cp '%s/libcuda.so.1' '%s' && touch '%s/libnccl.so.2'"):format(drivers,
      env:match("LD_LIBRARY_PATH='([^']*)'"), drivers, drivers))
    env = env:gsub("LD_LIBRARY_PATH='[^']*'", ("LD_LIBRARY_PATH='%s'"):format(drivers))
    local train = [[
      local gpt2 = require "models.gpt2"
      local model, optimizer = ps.initialize { model_func = function() return gpt2.new "tiny" end,
        config = { device = "cuda", zero_optimization = { stage = 3 }, plan_print = false, bf16 = { enabled = true } } }
      local x = ps.randint(0, 256, { 2, 8 }, { dtype = "int32" })
      local loss = model(x, x)
      model:backward(loss)
      optimizer:step()
      print("carrier", group:carrier(), "sum", group:sum(ps.ones { 1 }):item())
      model:close()
    ]]
    local all = run(2, "cuda", train, env)
    for rank = 0, 1 do
      assert.equal(0, all[rank].code, all[rank].text)
      assert.truthy(all[rank].text:find("carrier\tnil\tsum\t2", 1, true), all[rank].text)
    end
    assert.truthy(all[0].text:find("copied from cuda through host memory: ", 1, true)
      and all[0].text:find("NCCL cannot be had", 1, true), all[0].text)
    all = run(2, "cuda", train, env .. " BACKEND=nccl")
    for rank = 0, 1 do
      assert.equal(1, all[rank].code, all[rank].text)
      assert.truthy(all[rank].text:find("NCCL cannot be had", 1, true), all[rank].text)
    end
    all = run(2, "cuda", train, env .. " BACKEND1=gloo")
    for rank = 0, 1 do
      assert.equal(1, all[rank].code, all[rank].text)
      assert.truthy(all[rank].text:find("backend is gloo on rank 1, absent on rank 0", 1, true), all[rank].text)
    end
    all = run(1, "cuda", "print(group:all_reduce(ps.ones({ 2 }, { device = device })):to('cpu'):sum():item())", env)
    assert.equal("2\n", all[0].text)
  end)

  -- Two GPUs with the worst orders of their streams, in cases of bench/mesh_lib.lua, compared with one rank on the cpu.
  local function trains(axis, base, cases)
    local env = emulated()
    if not env then return end
    local function case(name, more)
      local o = { folder = folder, name = axis .. name, steps = 2, options = { dropout = 0.1 } }
      for _, list in ipairs { base, more } do for key, value in pairs(list) do o[key] = value end end
      return o
    end
    mesh_lib.rank(case("one", { pp = 1, tp = 1, config = { device = "cpu" } }))
    local list = {}
    for i, config in ipairs(cases) do
      config.device = "cuda"
      list[i] = case(i, { config = config })
    end
    local all = run(2, "cuda", ("local CASES = [==[%s]==]\n"):format(cjson.encode(list)) .. [[
      local mesh_lib = require "bench.mesh_lib"
      for _, o in ipairs(require("cjson").decode(CASES)) do mesh_lib.rank(o) end
      for _, axis in ipairs { "tp", "pp" } do
        local along = ps.mesh.group(axis)
        if along then print("along " .. axis .. ": " .. tostring(along:carrier())) end
      end
    ]], env .. " PS_EMULATE_STREAMS=mixed=7")
    for rank = 0, 1 do assert.equal(0, all[rank].code, all[rank].text) end
    for _, o in ipairs(list) do
      local r = mesh_lib.compare(folder, o.name, 2, axis .. "one")
      local what = cjson.encode(o.config)
      assert.truthy(r.max_rel_loss_error <= 1e-6, ("%s: loss %g"):format(what, r.max_rel_loss_error))
      assert.truthy(r.max_rel_grad_error <= 1e-5, ("%s: gradient of %s %g"):format(what, r.worst, r.max_rel_grad_error))
      assert.truthy(r.norm_error <= 1e-6, ("%s: norm %g"):format(what, r.norm_error))
      assert.truthy(r.max_rel_param_error <= 1e-4, ("%s: values %g"):format(what, r.max_rel_param_error))
    end
    return all[1].text
  end
  it("train layers that are cut among ranks like one rank", function()
    local said = trains("tp", { tp = 2 }, { { recompute = true }, { tensor_parallel = { sequence_parallel = false } } })
    if said then assert.truthy(said:find("along tp: nccl", 1, true), said) end
  end)
  it("report that rows are not sent in pieces", function()
    local env = emulated()
    if not env then return end
    local all = run(2, "cuda", [[
      local gpt2 = require "models.gpt2"
      local model = ps.initialize { model_func = function() return gpt2.new "tiny" end,
        config = { device = "cuda", plan_print = false, tensor_parallel = { size = 2, tp_overlap_comm = true } } }
      model:close()
    ]], env)
    for rank = 0, 1 do assert.equal(0, all[rank].code, all[rank].text) end
    assert.truthy(all[0].text:find("tp_overlap_comm: on cuda rows are exchanged before and after whole products", 1,
      true),
      all[0].text)
  end)
  it("train with ZeRO like one rank", function()
    trains("dp", {}, { { zero_optimization = { stage = 3 } }, { zero_optimization = { stage = 2 } } })
  end)
  it("train the stages of a pipeline like one rank", function()
    local said = trains("pp", { pp = 2, micros = 2 }, { { pipeline = { schedule = "zb_h1" } },
      { recompute = true, zero_optimization = { stage = 1 } } })
    if said then assert.truthy(said:find("along pp: nccl", 1, true), said) end
  end)

  -- Two stages, whose activations and gradients are sent from device to device. Each action's message is one exchange
  -- of a communicator for these two ranks and one direction.
  local STAGES = [[
    local gpt2, began = require "models.gpt2"
    local model, optimizer = ps.initialize { quiet = true, config = { device = "cuda", gradient_accumulation_steps = 4,
        plan_print = false, pipeline = { stages = 2, schedule = "1f1b" } },
      model_func = function() return gpt2.new("tiny", { n_layer = 4, dropout = 0 }) end }
    local ok, problem = pcall(function()
      for step = 1, 3 do
        local x = ps.randint(0, 250, { 8, 16 }, { dtype = "int32" })
        optimizer:zero_grad()
        began = ps.now()
        for out in model:micro_batches(x, x) do
          if step == 2 and rank == tonumber(os.getenv "VICTIM") then
            require("posix.signal").kill(require("posix.unistd").getpid(), 9)
          end
          model:backward(out.loss)
        end
        optimizer:step()
      end
    end)
    print(ok and "trained" or tostring(problem))
    print(("after %.1f s"):format(ps.now() - began))
    if not ok then os.exit(1) end
  ]]
  -- The host's work in a step of two stages, as counted by the emulator, with 4 micro-batches whose activations and
  -- gradients have 2 x 16 x 48 fp32 numbers each.
  local COUNTED = [[
    local gpt2, ffi = require "models.gpt2", require "ffi"
    ffi.cdef "void ps_emu_take_counts(int64_t *out, int n);"
    local plugin, seen = ffi.load(os.getenv "PS_CUDA_PLUGIN"), ffi.new("int64_t[6]")
    local model, optimizer = ps.initialize { quiet = true, config = { device = "cuda", gradient_accumulation_steps = 4,
        plan_print = false, pipeline = { stages = 2, schedule = "1f1b" },
        -- otherwise the timing determines the host's work
        zero_optimization = { offload_optimizer = { device = "none" } } },
      model_func = function() return gpt2.new("tiny", { n_layer = 2, n_embd = 48, n_head = 4, dropout = 0 }) end }
    for _ = 1, 2 do
      local x = ps.randint(0, 250, { 8, 16 }, { dtype = "int32" })
      optimizer:zero_grad()
      plugin.ps_emu_take_counts(seen, 6)
      for out in model:micro_batches(x, x) do model:backward(out.loss) end
      optimizer:step()
      plugin.ps_emu_take_counts(seen, 6)
    end
    print(("%d waits, %d bytes"):format(tonumber(seen[0]), tonumber(seen[5])))
  ]]
  it("send nothing between stages through the host, which does not wait for it", function()
    local env = emulated()
    if not env then return end
    local waits, nbytes = {}, {}
    for _, backend in ipairs { "nccl", "gloo" } do
      local all = run(2, "cuda", COUNTED, env .. " BACKEND=" .. backend)
      for rank = 0, 1 do
        local of = backend .. rank
        waits[of], nbytes[of] = all[rank].text:match "(%d+) waits, (%d+) bytes"
        assert.truthy(nbytes[of], all[rank].text)
      end
    end
    -- tied: the host sums the embedding's gradients, with copies in both directions
    local message, tied = 2 * 16 * 48 * 4, 2 * 256 * 48 * 4
    for rank = 0, 1 do
      local there = tonumber(nbytes["nccl" .. rank])
      assert.truthy(there - tied < message, there)                 -- token ids, targets and losses
      assert.equal(8 * message, nbytes["gloo" .. rank] - there)    -- if the host transfers them
      assert.equal(4, waits["gloo" .. rank] - waits["nccl" .. rank])
      assert.equal(rank == 0 and 1 or 5, tonumber(waits["nccl" .. rank]))  -- waits for the embedding and the losses
    end
  end)

  it("send messages between stages over NCCL, and name a rank or a connection that fails there", function()
    local env = emulated()
    if not env then return end
    -- Three steps of four micro-batches, so exchange 12 in a direction is the last one.
    local function named(all)                                          -- any call of the step can find the failure
      for rank = 0, 1 do
        local message = "rank %d, recv %%u of micro%%-batch %%d, stage %%d of pp with rank %d: "
        message = message:format(rank, 1 - rank)
        assert.truthy(all[rank].text:find(message), all[rank].text)
      end
    end
    named(both(env .. " PS_EMULATE_NCCL=breaks=12", STAGES, "a link is down"))
    named(both(env .. " PS_EMULATE_NCCL=stalls=5 TIMEOUT=3", STAGES, "took longer than 3 s", "within 3 s"))
    local all = run(2, "cuda", STAGES, env .. " PS_EMULATE_NCCL=breaks=13")
    for rank = 0, 1 do assert.equal(0, all[rank].code, all[rank].text) end
    all = run(2, "cuda", STAGES, env .. " VICTIM=1")
    assert.truthy(all[0].text:find("rank 1 .* died: .* of micro%-batch 0"), all[0].text)
    assert.truthy(tonumber(all[0].text:match "after ([%d.]+) s") < 10, all[0].text)
  end)
end)
