-- SPDX-License-Identifier: BSD-3-Clause
-- Failures of the CUDA runtime and of cuBLASLt: the device fails at any call, memory is refused, the library fails. The
-- emulator fails the calls that the test selects (ps_emu_fail_calls), one after the other, each in a fork of one
-- process. Every failure must be an error that names its cause. Later calls report the same error, values that can
-- still be read are right, and the process ends normally. PS_FULL=1 tries every call instead of a sample.
local lib = require "spec.cuda_lib"

-- For scripts: walk(kind, count, work, look) forks once for each N = 0, 1, 2, ... In fork N, calls N to N + count - 1
-- of a kind fail. The fork calls work() with failures enabled, and then look(ok, error) without them. walk returns the
-- number of calls.
local WALK = ([[
  local ffi, unistd, wait = require "ffi", require "posix.unistd", require "posix.sys.wait"
  ffi.cdef "int64_t ps_emu_fail_calls(int kind, int64_t first, int64_t count);"
  local DEVICE, MEMORY, LIBRARY = 0, 1, 2             -- luacheck: ignore
  local FULL, plugin = %s, ffi.load(%q)
  io.stdout:setvbuf("no")                             -- otherwise a fork would write the buffer again
  ps.set_threads(1)                                   -- a fork has only the forking thread

  local function forked(kind, nth, count, work, look)
    local reader, writer = unistd.pipe()
    local pid = unistd.fork()
    if pid == 0 then
      unistd.close(reader)
      unistd.dup2(writer, 1)
      unistd.dup2(writer, 2)
      plugin.ps_emu_fail_calls(kind, nth, count)
      local ok, why = pcall(work)
      local calls = tonumber(plugin.ps_emu_fail_calls(kind, -1, 0))
      local fine, wrong = pcall(look, ok, tostring(why))
      print(fine and "calls " .. calls or "WRONG: " .. tostring(wrong) .. " AFTER: " .. tostring(why))
      os.exit(0, true)                                -- includes all work of closing
    end
    unistd.close(writer)
    local text = {}
    repeat
      text[#text + 1] = unistd.read(reader, 65536)
    until not text[#text] or text[#text] == ""
    unistd.close(reader)
    local _, how, code = wait.wait(pid)
    text = table.concat(text)
    local calls = text:match("^calls (%%d+)\n$")
    if not calls or how ~= "exited" or code ~= 0 then
      error(("call %%d: %%s %%d: %%s"):format(nth, how, code, text), 0)
    end
    return tonumber(calls)
  end

  local function walk(kind, count, sample, work, look)
    local calls = forked(kind, -1, 0, work, function(ok, why) assert(ok, why) end)
    local every = FULL and 1 or math.max(1, math.floor(calls / sample))
    for nth = 0, calls - 1, every do forked(kind, nth, count, work, look) end
    return calls
  end
]]):format(tostring(lib.FULL), lib.PLUGIN)

-- For scripts: an engine whose chunks move between the host and the device, and whose updates run on both.
local ENGINE = [[
  local gpt2, bytes = require "models.gpt2", require("spec.check_lib").bytes
  local function engine()
    ps.manual_seed(11)
    return ps.initialize { quiet = true,
      config = { device = "cuda", bf16 = { enabled = true }, chunk_size = 4096, gradient_clipping = 1,
        plan_print = false, memory = { device = "560KiB", host = "64MiB" },
        rates = { host_adam = 1e6, device_adam = 1e9, up = 1e10, down = 1e10 } },
      model_func = function()
        return gpt2.new { vocab_size = 64, n_positions = 16, n_embd = 48, n_layer = 3, n_head = 2 }
      end }
  end
  local model, optimizer
  local function step()
    local x = ps.randint(0, 64, { 2, 16 }, { dtype = "int32", device = "cpu" })
    local loss = model(x, x)
    model:backward(loss)
    optimizer:step()
    return loss:item()
  end
  local function add() return (ps.ones({ 4 }, { device = "cuda" }) + 1):sum():item() end
  local GONE = "device cuda cannot be used any more in this process: "
]]

local function comes_to_its_end(script)
  if lib.REAL then return pending("a real GPU cannot be made to fail") end
  if lib.lacks_kernels() then return pending(lib.lacks_kernels()) end
  local out, code = lib.child(WALK .. ENGINE .. script .. "\nprint 'fine'")
  assert.truthy(code == 0 and out:find("fine\n", 1, true), ("exit code %d: %s"):format(code, out))
end

-- Checks the state after the device was abandoned. Every error must contain `cause`.
local GIVEN_UP = [[
  -- The values that the parameters have after each step of `work`.
  local known, file = {}, os.tmpname()
  local function remember(f, at)
    for name, t in pairs(model:state_dict()) do
      local pair = name .. bytes(t)
      f:write(at, " ", #pair, "\n", pair)
    end
  end
  local function learn(steps)
    forked(DEVICE, -1, 0, function()
      local f = assert(io.open(file, "wb"))
      remember(f, 0)
      for at = 1, steps do
        step()
        remember(f, at)
      end
      f:close()
    end, function(ok, why) assert(ok, why) end)
    local f = assert(io.open(file, "rb"))
    for line in function() return f:read("*l") end do
      local at, size = line:match("(%d+) (%d+)")
      known[f:read(tonumber(size))] = tonumber(at)
    end
    f:close()
    os.remove(file)
  end
  local function given_up(cause)
    return function(ok, why)
      assert(not ok, "no error")
      assert(why:find(GONE, 1, true) and why:find(cause, 1, true) and why:find("the last op begun was ", 1, true), why)
      for _, use in ipairs { add, step } do
        local good, problem = pcall(use)
        assert(not good and tostring(problem):find(GONE, 1, true), tostring(problem))
      end
      -- During an update, no values can be read. Otherwise, all values that can be read are from one step.
      local whole, state = pcall(model.state_dict, model)
      assert(whole or tostring(state):find("step %d failed in its update %("), tostring(state))
      local of
      for name, t in pairs(whole and state or {}) do
        local good, read = pcall(bytes, t)
        assert(good or tostring(read):find(GONE, 1, true), read)
        local at = good and known[name .. read] or of
        assert(not good or (at and (not of or at == of)), name .. " has a value that it never had, or not then")
        of = at
      end
      assert((ps.ones({ 4 }) + 1):sum():item() == 8)                 -- the host still works
      model:close()
    end
  end
]]

describe("when CUDA fails,", function()
  it("opening the device reports it, and may be repeated if only memory was missing", function()
    comes_to_its_end [[
      local function open() return ps.device("cuda") end
      local function refused(again)
        return function(ok, why)
          assert(not ok and why:find("no device cuda: ", 1, true) and not why:find(GONE, 1, true), why)
          ok, why = pcall(add)
          assert(ok == again and (ok or why.msg:find("no device cuda: ", 1, true)), tostring(why))
        end
      end
      assert(walk(DEVICE, 1, 1e9, open, refused(false)) > 5)
      assert(walk(MEMORY, 1, 1e9, open, refused(true)) > 2)
      assert(walk(LIBRARY, 1, 1e9, open, refused(true)) > 0)
    ]]
  end)

  it("a step that moves chunks fails with the cause, and no wrong value is used", function()
    comes_to_its_end(GIVEN_UP .. [[
      model, optimizer = engine()
      for _ = 1, 2 do step() end
      learn(2)
      local function work() for _ = 1, 2 do step() end end
      assert(walk(DEVICE, 1, 12, work, given_up "cudaErrorIllegalAddress") > 500)
      assert(walk(LIBRARY, 1, 8, work, given_up "cuBLASLt gave ") > 50)
    ]])
  end)

  it("memory that the device refuses is an error after which a step can be repeated to the same bits", function()
    comes_to_its_end [[
      ps.device("cuda")
      local x = ps.randint(0, 64, { 2, 16 }, { dtype = "int32", device = "cpu" }):keep()
      local stage, losses
      local function one()
        stage = "gradients"
        local loss = model(x, x)
        model:backward(loss)
        stage = "update"
        optimizer:step()
        stage = "done"
        losses[#losses + 1] = ("%.17g"):format(loss:item())
      end
      local function both()
        stage, losses = "making", {}
        model, optimizer = engine()
        for _ = 1, 2 do one() end
      end
      both()
      local want = table.concat(losses, " ")
      model:close()
      for _, count in ipairs { 1, 2, 1e9 } do
        assert(walk(MEMORY, count, 5, both, function(ok, why)
          assert(ok or why:find("cuda has no [%d.]+ MiB of memory in one piece, [%d.]+ MiB are free"), why)
          if stage == "update" then return model:close() end         -- it is unknown which parameters were updated
          if stage == "making" then both() end
          if stage == "gradients" then optimizer:zero_grad() end
          while #losses < 2 do one() end
          assert(table.concat(losses, " ") == want, "other losses")
          model:close()
        end) > 20)
      end
    ]]
  end)
end)

describe("when CUDA fails on one of two ranks that train together,", function()
  local check, ranks = require "spec.check_lib", require "spec.ranks_lib"
  local folder
  setup(function() folder = ranks.folder() end)
  teardown(function() ranks.remove(folder) end)

  it("both get the cause, or the error about the ended rank, at once", function()
    if lib.REAL then return pending("a real GPU cannot be made to fail") end
    if ranks.no_gloo() or not ranks.emulated() then return pending(ranks.no_gloo() or ranks.NO_EMULATED) end
    local counts = lib.FULL and 40 or 2
    for case = 1, 2 * counts do
      local kind, share = case % 2 * 2, 0.95 * case / (2 * counts + 1)  -- `counts` is the number of calls in two steps
      local began = os.time()
      local all = ranks.check(folder, 2, WALK .. ENGINE:gsub("memory = %b{},", "zero_optimization = { stage = 3 },")
        .. ([[
        model, optimizer = engine()
        step()
        plugin.ps_emu_fail_calls(%d, -1, 0)
        step()
        local calls = tonumber(plugin.ps_emu_fail_calls(%d, -1, 0))
        if rank == 1 then plugin.ps_emu_fail_calls(%d, math.floor(2 * calls * %g), 1) end
        local function settle() ps.check(ps.C.ps_groups_settle()) end  -- waits for bytes that calls did not wait for
        -- More steps than were counted, since the timing determines how often a thread checks an exchange.
        local ok, why = pcall(function() for _ = 1, 20 do step() end settle() end)
        why = tostring(why)
        assert(not ok, "no error")
        local function told(text)
          local cause = text:find("cudaErrorIllegalAddress", 1, true) or text:find("cuBLASLt gave ", 1, true)
          assert(cause or (rank == 0 and text:find("rank 1 %%(%%S+%%) ended")), text)
        end
        told(why)
        ok, why = pcall(settle)                                      -- this also ends the work in progress
        if not ok then told(tostring(why)) end
      ]]):format(kind, kind, kind, share), ranks.emulated())
      assert.truthy(os.time() - began < check.PROMPT_S, all[0].text)
    end
  end)
end)
