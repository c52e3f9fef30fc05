-- SPDX-License-Identifier: BSD-3-Clause
-- Faults in the engine: budgets that are too small, disks that are full, failing or interrupted, memory that cannot be
-- allocated. Each is an error that names what and where, nothing leaks, no file stays, and training that was
-- interrupted before an update continues with the same bits. Errors of scripts: engine_misuse_spec.lua.
local ps = require "ps"
local paths = require "ps.paths"
local gpt2 = require "models.gpt2"
local L = dofile((arg[0]:match("^(.*)/[^/]*$") or ".") .. "/chunks_lib.lua")
local check = require "spec.check_lib"
local fails = check.fails_saying
local C, ctx = ps.C, ps.ctx

local KIB, MIB = 2 ^ 10, 2 ^ 20
local EIO = 5
local folder
local small = L.small

local function disk(limit) return { path = folder, limit = limit or 2 * MIB } end

-- Returns a setting in which a small case moves chunks all the time.
local function tight(changes)
  local setting = { eviction = "plan", chunk_size = 1024, overlap = false, prefetch = true,
    memory = { host = 120 * KIB, disk = disk() } }
  for key, value in pairs(changes or {}) do setting[key] = value end
  return setting
end

-- Returns approximately the smallest host budget under which the case trains, and the number of smaller budgets that
-- were rejected.
local function fit(case, setting)
  local refused = L.fit(setting, function() L.run(case, setting) end)
  setting.memory.host = setting.memory.host + 8 * KIB      -- a repeated step can use one or two more pages
  return refused
end

L.scratch({ setup = setup, teardown = teardown }, function(path) folder = path end)
after_each(function()
  C.ps_test_fail_alloc(-1, 0)
  C.ps_test_fail_io(-1, 0, 0)
  L.close_engine()
  assert.equal(0, L.entries(folder))
end)

describe("budgets that are too small", function()
  local function gpt(memory, changes)
    local config = { memory = memory, plan_print = false, chunk_size = 4096 }
    for key, value in pairs(changes or {}) do config[key] = value end
    local model, optimizer = ps.initialize { model_func = function() return gpt2.new "tiny" end, config = config,
      quiet = true }
    local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
    local ok, problem = pcall(function()
      optimizer:zero_grad()
      model:backward(model(x, x))
      optimizer:step()
    end)
    model:close()
    if not ok then error(problem, 0) end
  end

  it("are refused with tensor or chunk, tier, bytes and setting", function()
    local problem = fails({ "wanted on tier host", "budget of 8.0 KiB", "raise memory.host" }, function()
      gpt({ host = 8 * KIB, disk = disk() })
    end)
    assert.equal("ENOMEM", problem.name)
    problem = fails({ "the step does not fit", "tier host", "of chunks at once", "raise memory.host", "chunk_size" },
      function() gpt({ host = 200 * KIB, disk = disk() }) end)
    assert.equal("ENOMEM", problem.name)
    fails({ "wanted on tier host", "there is no tier below", "set memory.disk" }, function()
      gpt({ host = 60 * KIB })
    end)
    fails({ "the step does not fit", "all chunks have", "raise memory.host, set memory.disk" }, function()
      gpt({ host = 700 * KIB })
    end)
    fails({ "device", "raise memory.device" }, function() gpt({ device = 8 * KIB }, { device = "sim" }) end)
    fails({ "tier device", "raise memory.device" }, function() gpt({ device = 150 * KIB }, { device = "sim" }) end)
  end)

  it("are refused before an infeasible plan is printed", function()
    local p = assert(io.popen(("'%s' - 2>&1 <<'END'\n%s\nEND\n"):format(paths.exe, [[
      local ps = require "ps"
      local model = ps.initialize { model_func = function() return require("models.gpt2").new "tiny" end,
        config = { memory = { host = "700KiB" }, chunk_size = 4096 } }
      local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
      model:backward(model(x, x))
    ]])))
    local said = p:read "*a"
    p:close()
    assert.truthy(said:find("the step does not fit: all chunks have", 1, true), said)
    assert.is_nil(said:find("plan:", 1, true), said)
  end)

  it("are refused before the step changes anything, and a larger budget then works", function()
    local case = small()
    local setting = tight()
    assert.truthy(fit(case, setting) > 0)
    local plain = L.run(case, { memory = "plain" })
    assert.is_nil(L.difference(plain, (L.run_fitting(case, setting))))
  end)

  it("of the disk are refused with folder, bytes and setting", function()
    local problem = fails({ "tier disk below has", "free of 64.0 KiB", "memory.disk.limit" }, function()
      gpt({ host = 200 * KIB, disk = disk(64 * KIB) })
    end)
    assert.equal("ENOMEM", problem.name)
    fails({ "/nonexistent/folder" }, function() gpt({ host = MIB, disk = { path = "/nonexistent/folder" } }) end)
    fails({ "memory.disk" }, function() gpt({ host = MIB, disk = { path = folder, limit = 2 ^ 55 } }) end)
  end)

  it("never leave a run that cannot be closed and restarted", function()
    local case = small()
    local plain = L.run(case, { memory = "plain" })
    local refused = 0
    for host = 8, 240, 8 do
      local setting = tight()
      setting.memory.host = host * KIB
      local ok, result = pcall(L.run, case, setting)
      if not ok then
        refused = refused + 1
        assert.equal(ps.Error, getmetatable(result), tostring(result))
        assert.equal("ENOMEM", result.name)
        assert.truthy(result.msg:find("memory.host", 1, true), result.msg)
      else
        assert.is_nil(L.difference(plain, result))
      end
      assert.equal(0, C.ps_engine_is_open(ctx))
      assert.equal(0, L.entries(folder))
    end
    assert.truthy(refused > 3 and refused < 30, refused)
  end)
end)

-- Runs one step of a case from initialize on, interrupted by the fault that `arm` sets up. `data` are the batches.
local function interrupted(case, setting, arm)
  local run = { stage = "initialize" }
  ps.manual_seed(case.seed)
  local x = ps.randn { 4, 16 }
  local y = ps.randint(0, 8, { 4 }, { dtype = "int32" })
  function run.step()
    run.stage = "forward"
    run.optimizer:zero_grad()
    local loss = run.model(x, y)
    run.stage = "backward"
    run.model:backward(loss)
    run.stage = "step"
    run.optimizer:step()
    run.stage = "done"
  end
  if arm then arm() end
  run.ok, run.problem = pcall(function()
    run.model, run.optimizer = ps.initialize(L.request(case, setting))
    run.step()
  end)
  C.ps_test_fail_alloc(-1, 0)
  C.ps_test_fail_io(-1, 0, 0)
  return run
end

local function state_after(run)
  local state = L.state(run.model, run.optimizer)
  run.model:close()
  return { out = {}, state = state }
end

-- Tries a fault at each point n with `arm(n)` until a point is not reached. After an error before the update, the step
-- must be repeatable with the same bits. `again` is how often an earlier error can still be reported.
local function walk(case, setting, arm, reached, names, options)
  local want = state_after(interrupted(case, setting))
  local counts = { survived = 0, initialize = 0, forward = 0, backward = 0, step = 0 }
  local cpu, sim = L.used()
  local nth = 0
  while nth < 30000 do
    local run = interrupted(case, setting, function() arm(nth) end)
    if not reached(run) then
      assert(run.ok, tostring(run.problem))
      assert.is_nil(L.difference(want, state_after(run)))
      break
    end
    local where = ("fault %d in %s: "):format(nth, run.stage)
    if run.ok then
      counts.survived = counts.survived + 1
      local problem = L.difference(want, state_after(run))
      if problem then error(where .. problem) end
    else
      local problem = run.problem
      counts[run.stage] = counts[run.stage] + 1
      if getmetatable(problem) ~= ps.Error or not names[problem.name] or #problem.msg == 0 then
        error(where .. "not a clean error: " .. tostring(problem))
      end
      if options.says and not problem.msg:find(options.says) then error(where .. problem.msg) end
      if run.stage == "initialize" then
        assert.equal(0, C.ps_engine_is_open(ctx))
      elseif run.stage == "step" then
        run.model:close()
      else
        local ok, again
        for _ = 1, options.again or 1 do
          ok, again = pcall(run.step)
          if ok then break end
        end
        if not ok then error(where .. "and again in " .. run.stage .. ": " .. tostring(again)) end
        local difference = L.difference(want, state_after(run))
        if difference then error(where .. difference) end
      end
      assert.equal(0, L.entries(folder))
    end
    run = nil                                              -- luacheck: ignore 311
    nth = nth + (options.stride and options.stride(nth) or 1)
  end
  local cpu_after, sim_after = L.used()
  assert.truthy(cpu_after <= cpu and sim_after <= sim, cpu_after - cpu)
  return counts
end

describe("a failing disk", function()
  local setting

  setup(function()
    setting = tight()
    fit(small(), setting)
  end)

  local function walk_io(changes, code, says, stride)
    local hit = false
    local chosen = {}
    for key, value in pairs(setting) do chosen[key] = value end
    for key, value in pairs(changes) do chosen[key] = value end
    -- The error names a failed transfer. An interrupted transfer is continued and has no effect.
    local last = 0
    return walk(small(), chosen, function(nth)
      last = nth
      C.ps_test_fail_io(nth, 1, code)
    end, function(run)
      hit = not run.ok
      return hit or (code == 0 and last < 40)
    end, { EIO = true, ENOSPC = true }, { says = says, again = 4, stride = stride })
  end

  it("is an error that names chunk and folder, and the step can be repeated", function()
    local counts = walk_io({}, EIO, "disk tier in " .. folder:gsub("%p", "%%%0"))
    assert.truthy(counts.initialize + counts.forward + counts.backward > 3, L.text(counts))
  end)
  it("is also an error with plain threads, and without read-ahead", function()
    walk_io({ prefetch = false }, EIO)
    local out, code = L.child(([[
      local ps = require "ps"
      local case, setting = L.small(), %s
      local failed = 0
      for nth = 0, 40 do
        ps.C.ps_test_fail_io(nth, 2, 5)
        local ok, problem = pcall(L.run, case, setting)
        if not ok then
          failed = failed + 1
          if problem.name ~= "EIO" then print(problem) end
        end
        ps.C.ps_test_fail_io(-1, 0, 0)
      end
      print(failed > 5)
    ]]):format(L.text(setting)), "PS_DISK_THREADS=2 OMP_NUM_THREADS=1")
    assert.equal(0, code, out)
    assert.equal("true\n", out)
  end)
  it("that interrupts transfers gives the same bits", function()
    local counts = walk_io({}, 0)
    assert.equal(0, counts.forward + counts.backward + counts.step)
    assert.truthy(counts.survived >= 40)
  end)
  it("that is slow gives the same bits", function()
    local plain = L.run(small(), { memory = "plain" })
    C.ps_test_slow_io(0.001)
    local ok, result = pcall(L.run_fitting, small(), setting)
    C.ps_test_slow_io(0)
    assert(ok, tostring(result))
    assert.is_nil(L.difference(plain, result))
  end)
end)

describe("memory that cannot be allocated", function()
  local function reached() return C.ps_test_fail_alloc_left() < 0 end

  -- Returns the walk over requests. reached() must be called before failures are disabled.
  local function walk_alloc(case, setting, count, stride)
    local hit
    local off = C.ps_test_fail_alloc
    local proxy = setmetatable({}, { __index = C })
    proxy.ps_test_fail_alloc = function(nth, n)
      if nth < 0 then hit = reached() end
      off(nth, n)
    end
    local was = C
    C = proxy
    local ok, counts = pcall(walk, case, setting, function(nth) off(nth, count) end, function() return hit end,
      { ENOMEM = true }, { stride = stride })
    C = was
    if not ok then error(counts, 0) end
    return counts
  end

  -- There are thousands of requests. A fraction of them is tested, or all with PS_FULL=1.
  local r = L.random(4)
  local function sparse() return os.getenv("PS_FULL") and 1 or r.int(1, 40) end

  local counts_of = { ["from some point on"] = 2 ^ 50 }
  if not check.lower_set then counts_of["once"], counts_of["twice in a row"] = 1, 2 end
  for name, count in pairs(counts_of) do
    it("is a clean error: " .. name, function()
      local setting = tight()
      fit(small(), setting)
      local counts = walk_alloc(small(), setting, count, sparse)
      if count > 2 then
        assert.truthy(counts.initialize > 5 and counts.forward > 3 and counts.backward > 3,
          L.text(counts))
      end
    end)
  end

  it("is a clean error on a device that is not the host", function()
    local case = small { precision = "fp32", dropout = 0 }
    local setting = tight { device = "sim", overlap = true }
    setting.memory = { device = 200 * KIB, host = 300 * KIB, disk = disk() }
    fit(case, setting)
    setting.overlap = false
    walk_alloc(case, setting, 2, sparse)
  end)
end)

describe("the disk's file", function()
  local setting

  setup(function()
    setting = tight()
    fit(small(), setting)
  end)

  local script = [[
    local ps = require "ps"
    local model, optimizer = ps.initialize(L.request(L.small(), %s))
    local x, y = ps.randn { 4, 16 }, ps.randint(0, 8, { 4 }, { dtype = "int32" })
    local function step()
      optimizer:zero_grad()
      model:backward(model(x, y))
      optimizer:step()
    end
    step()
    %s
  ]]

  for name, ending in pairs {
    ["at the end of a script"] = { "", 0 }, ["after os.exit"] = { "os.exit(3)", 3 },
    ["after os.exit that closes the state"] = { "os.exit(4, true)", 4 }, ["after an error"] = { "error 'over'", 1 },
    ["after kill -9 between steps"] = { "os.execute('kill -9 ' .. require('posix.unistd').getpid())", 137 },
    ["after kill -9 in a step"] = { [[
      ps.C.ps_test_slow_io(0.02)
      os.execute(("(sleep 0.2; kill -9 %d) >/dev/null 2>&1 &"):format(require("posix.unistd").getpid()))
      for _ = 1, 10000 do step() end]], 137 },
  } do
    it("goes " .. name, function()
      local said, code = L.child(script:format(L.text(setting), ending[1]), "OMP_NUM_THREADS=1")
      assert.equal(ending[2], code, said)
      assert.equal(0, L.entries(folder))
    end)
  end
end)
