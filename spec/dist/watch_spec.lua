-- SPDX-License-Identifier: BSD-3-Clause
-- The watch over the ranks of a group: whatever ends or stops one of them, all others fail in time with an error that
-- names it. Groups of three processes on this machine; the cases with rank 0 and with rank 1 as the victim run at the
-- same time. Processes that are stopped, or hang, are killed at the end.
local ps = require "ps"
local paths = require "ps.paths"
local check = require "spec.check_lib"

local PROMPT_S, LIMIT_S = check.PROMPT_S, 3 * check.PROMPT_S
local HEARTBEAT_S = 1.5

local no_gloo = require("spec.ranks_lib").no_gloo()

local PREAMBLE = [[
  local ps = require "ps"
  local unistd, signal = require "posix.unistd", require "posix.signal"
  local rank, size, victim, base = tonumber(arg[1]), tonumber(arg[2]), tonumber(arg[3]), arg[4]
  local how, HEARTBEAT, FAR = arg[5], %g, %g
  local f = io.open(base .. ".pid." .. rank, "w")
  f:write(unistd.getpid())
  f:close()
  local function join(more)
    local o = { rank = rank, world_size = size, local_rank = rank, rendezvous = "file://" .. base .. ".meet",
                timeout = FAR, heartbeat = HEARTBEAT, quiet = true, backend = "gloo" }
    for k, v in pairs(more or {}) do o[k] = v end
    return ps.init_distributed(o)
  end
  local function sleep(seconds) os.execute("sleep " .. seconds) end
  local function me(name) signal.kill(unistd.getpid(), signal[name]) end
  local function soon(name, seconds)
    os.execute(("(sleep %%g; kill -%%s %%d) >/dev/null 2>&1 &"):format(seconds, name, unistd.getpid()))
  end
  local until_failed = ("for i in $(seq 4000); do [ -e %%s.failed ] && break; sleep 0.05; done"):format(base)
  -- Wakes this rank when another rank has failed.
  local function go_on_once_failed()
    os.execute(("(%%s; kill -CONT %%d) >/dev/null 2>&1 &"):format(until_failed, unistd.getpid()))
  end
  local function wait_until_failed() os.execute(until_failed) end
  -- Calls fn, prints the seconds until it failed, wakes the ranks that wait for the failure, and fails.
  local function dies(fn, ...)
    local start = ps.now()
    local ok, err = pcall(fn, ...)
    print(("after %%.2f s"):format(ps.now() - start))
    io.open(base .. ".failed", "w"):close()
    if not ok then error(err, 0) end
  end
]]

local function read(path)
  local f = io.open(path, "rb")
  local text = f and f:read("*a") or ""
  if f then f:close() end
  os.remove(path)
  return text
end

--- Starts `body` in groups of `size` ranks, all groups at once. `collect` returns an entry per group with the group's
--- victim, the script's `how`, and the ranks' outputs, exit codes and seconds until they failed.
---@param size integer
---@param victims integer[] the victim of each group
---@param body string
---@param options? table kill: kills the victims when the other ranks have ended. hows: one group per entry. env:
--- additional variables.
---@return function collect Waits for the groups' end and returns the entries.
local function start(size, victims, body, options)
  local o = options or {}
  local script = os.tmpname()
  local f = assert(io.open(script, "wb"))
  f:write(PREAMBLE:format(HEARTBEAT_S, check.FAR_S), body)
  f:close()
  local lines, out = {}, {}
  for _, how in ipairs(o.hows or { "" }) do
    for _, victim in ipairs(victims) do
      local base, pids = script .. "." .. #out, {}
      lines[#lines + 1] = "("
      for rank = 0, size - 1 do
        lines[#lines + 1] = ("(env -u LUA_INIT -u RANK -u WORLD_SIZE OMP_NUM_THREADS=1 %s timeout -k 1 %d '%s' "
          .. "%s %d %d %d %s '%s' >%s.%d 2>&1; echo \"|$?\" >>%s.%d) & p%d=$!"):format(o.env or "", LIMIT_S, paths.exe,
          script, rank, size, victim, base, how, base, rank, base, rank, rank)
        if rank ~= victim then pids[#pids + 1] = "$p" .. rank end
      end
      local last = o.kill and ("kill -9 $(cat %s.pid.%d) 2>/dev/null;"):format(base, victim) or ""
      lines[#lines + 1] = ("wait %s; %s wait) &"):format(table.concat(pids, " "), last)
      out[#out + 1] = { victim = victim, base = base, how = how }
    end
  end
  lines[#lines + 1] = "wait"
  local shell = assert(io.popen(table.concat(lines, "\n")))
  return function()
    shell:read "*a"
    shell:close()
    for _, group in ipairs(out) do
      for rank = 0, size - 1 do
        local text, code = read(group.base .. "." .. rank):match("^(.*)|(%d+)\n$")
        text = text or ""
        group[rank] = { text = text, code = tonumber(code), seconds = tonumber(text:match("after (%S+) s")) }
        os.remove(group.base .. ".pid." .. rank)
      end
      os.remove(group.base .. ".meet")
      os.remove(group.base .. ".failed")
    end
    os.remove(script)
    return out
  end
end

local function groups(...) return start(...)() end

--- Checks that each rank except the victim printed `pattern` within `limit` seconds of waiting, and exited with 1.
--- "RANK" in the pattern stands for the victim's number and host.
local function all_name(out, pattern, limit)
  for _, group in ipairs(out) do
    local victim = group.victim
    for rank = 0, #group do
      local r = group[rank]
      if rank ~= victim then
        local what = ("rank %d, victim %d %s: %s"):format(rank, victim, group.how, r.text)
        assert.is_truthy(r.text:find((pattern:gsub("RANK", "rank " .. victim .. " %%(%%S+%%)"))), what)
        assert.equal(1, r.code, what)
        assert.is_truthy(r.seconds and r.seconds < limit, what)
      end
    end
  end
end

describe("the watch over the ranks", function()
  if no_gloo then return pending(no_gloo) end

  -- These ranks only wait for seconds, so they run at the same time as the others.
  local stopped, all_stopped
  setup(function()
    stopped = start(3, { 0, 1 }, [[
      local g = join()
      g:all_reduce(ps.ones { 100 })
      if rank == victim then
        sleep(0.4)
        go_on_once_failed()
        me "SIGSTOP"
      end
      dies(g.all_reduce, g, ps.ones { 100 })
    ]])
    all_stopped = start(3, { 0 }, [[
      local g = join()
      g:barrier()
      sleep(0.4)
      soon("CONT", HEARTBEAT + 1)
      me "SIGSTOP"
      g:barrier()
      sleep(0.4)
      g:barrier()
    ]])
  end)

  it("names a rank that is killed while the others wait for it", function()
    local out = groups(3, { 0, 1 }, [[
      local g = join()
      g:all_reduce(ps.ones { 100 })
      if rank == victim then
        sleep(0.4)
        me "SIGKILL"
      end
      dies(g.all_reduce, g, ps.ones { 100 })
    ]])
    all_name(out, "all_reduce, call 1 of rank %d: RANK died: its process ended without a word %b(); it was last known "
      .. "after all_reduce %(call 0%)", PROMPT_S)
  end)

  it("names a rank that is killed or stopped while bytes move", function()
    local out = groups(3, { 0, 1 }, [[
      local g = join()
      local t = ps.ones { 2 ^ 20 }
      if rank == victim then soon(how, 0.4) end
      dies(function() while true do g:all_reduce(t) end end)
    ]], { kill = true, hows = { "KILL", "STOP" } })
    for _, group in ipairs(out) do
      local what = group.how == "KILL" and "died" or "is silent"
      all_name({ group }, "all_reduce, call %d+ of rank %d[^:]*: RANK " .. what
        .. ".*it was last known %l+ all_reduce %(call %d+%)", PROMPT_S)
    end
  end)

  it("passes a rank's error to the others, before they wait and while they wait", function()
    local out = groups(3, { 0, 1 }, [[
      local g = join { heartbeat = FAR }
      g:barrier()
      if rank == victim then
        sleep(0.2)
        error("no such thing\nas a second line")
      end
      if rank == 2 then sleep(0.5) end
      dies(g.all_reduce, g, ps.ones { 100 })
    ]])
    all_name(out, "all_reduce, call 1 of rank %d: RANK failed: %S+:%d+: no such thing\n", PROMPT_S)
    for _, group in ipairs(out) do
      assert.equal(1, group[group.victim].code)
      for rank = 0, 2 do
        if rank ~= group.victim then assert.not_matches("second line", group[rank].text, 1, true) end
      end
    end
  end)

  it("reports to the others that a rank called os.exit, or ended while they wait for it", function()
    local out = groups(3, { 0, 1 }, [[
      local g = join()
      g:barrier()
      if rank == victim then
        sleep(0.2)
        if how == "close" then
          g:close()
          sleep(0.5)
        elseif how == "exit 3" then os.exit(3)
        elseif how == "exit 0" then os.exit(0, false)
        end
        return
      end
      dies(g.all_reduce, g, ps.ones { 100 })
    ]], { hows = { "end", "close", "exit 0", "exit 3" },
      env = "ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=report_thread_leaks=0" })      -- "exit 0" frees nothing
    for _, group in ipairs(out) do
      local what = group.how == "exit 3" and "failed: it called os%.exit%(3%)" or "ended after barrier %(call 0%) %b(),"
        .. " and rank %d %(%S+%) waits for it in all_reduce %(call 1%)"
      all_name({ group }, "all_reduce, call 1 of rank %d: RANK " .. what, PROMPT_S)
      assert.equal(group.how == "exit 3" and 3 or 0, group[group.victim].code, group[group.victim].text)
    end
  end)

  it("names the missing ranks, and where the others are", function()
    local out = groups(4, { 2 }, [[
      local g = join { timeout = 1 }
      g:barrier()
      if rank == 1 then g:send(ps.ones { 3 }, 2) elseif rank == 2 then g:recv(ps.ones { 3 }, 1) end
      if rank == 1 or rank == 2 then wait_until_failed() end
      if rank ~= 2 then dies(g.all_reduce, g, ps.ones { 100 }) end
    ]])
    local missing = "rank %d %%(%%S+%%) is alive but has not come to all_reduce %%(call 1%%) within 1 s; it last "
      .. "finished barrier %%(call 0%%)"
    for _, rank in ipairs { 0, 1, 3 } do
      local r = out[1][rank]
      assert.matches("all_reduce, call 1 of rank " .. rank .. ": " .. missing:format(1) .. "; " .. missing:format(2)
        .. "\n", r.text)
      assert.is_truthy(r.code == 1 and r.seconds < PROMPT_S)
    end
  end)

  -- Rank 2 also waits. It is named if rank 0 knows about it by then. c/test_watch.c tests a circle of all ranks.
  it("names ranks that wait for each other in calls of two groups, long before the time-out", function()
    local out = groups(3, { 1 }, [[
      local g = join()
      local pair = g:split(rank == 2 and { 2 } or { 0, 1 }, "tp")
      g:barrier()
      local own = rank == 0 and pair or g
      dies(own.all_reduce, own, ps.ones { 100 })
    ]])
    for rank = 0, 2 do
      local r = out[1][rank]
      assert.matches("ranks wait for each other: rank 0 %(%S+%) is in all_reduce of tp %(call %d+%), to which rank 1 "
        .. "has not come; rank 1 %(%S+%) is in all_reduce %(call %d+%), to which rank 0 has not come", r.text)
      assert.is_truthy(r.code == 1 and r.seconds < PROMPT_S, r.text)
    end
  end)

  it("ends a wait between two ranks when a third dies, and names the rank that does not join", function()
    local out = groups(3, { 1 }, [[
      local g = join()
      if rank == 1 then
        sleep(0.4)
        me "SIGKILL"
      end
      if rank == 2 then wait_until_failed() end
      dies(rank == 2 and g.send or g.recv, g, ps.ones { 3 }, 2 - rank)
    ]])
    all_name(out, "%l+, rank %d with rank %d: RANK died", PROMPT_S)
    out = groups(2, { 1 }, [[
      local g = join { timeout = 0.7 }
      if rank == 1 then wait_until_failed() else dies(g.recv, g, ps.ones { 3 }, 1) end
    ]])
    all_name(out, "recv, rank 0 with rank 1: RANK is alive but has not come to meet rank 0's recv within 0.7 s; it has "
      .. "made no call yet", PROMPT_S)
  end)

  it("gives a third rank the reason why two hung up", function()
    local out = groups(3, { 1 }, [[
      local g = join()
      dies(function()
        if rank == 0 then sleep(0.3) end
        if rank == 1 then g:send(ps.ones { 2 }, 0) else g:barrier() end
      end)
    ]])
    for rank = 0, 2 do
      assert.matches("the ranks disagree: rank ", out[1][rank].text, 1, true)
      assert.equal(1, out[1][rank].code)
      assert.is_truthy(out[1][rank].seconds < PROMPT_S)
    end
  end)

  it("requires the same heartbeat on all ranks", function()
    local out = groups(2, { 1 }, "join { heartbeat = 2 + rank }")
    for rank = 0, 1 do
      assert.matches("heartbeat is 3 s on rank 1 and 2 s on rank 0; give all ranks the same", out[1][rank].text, 1,
        true)
      assert.equal(1, out[1][rank].code)
    end
    assert.error_matches(function() ps.dist.gloo("tcp://127.0.0.1:1", 0, 2, 1, 0) end, "a heartbeat of 0 s", 1, true)
  end)

  it("ends training whose collectives run during the computation", function()
    local out = groups(3, { 0, 1 }, [[
      local gpt2 = require "models.gpt2"
      join { seed = 3 }
      local config = { chunk_size = 8192, bf16 = { enabled = true }, zero_optimization = { stage = 3 },
                       plan_print = false }
      local model, optimizer = ps.initialize { config = config, quiet = true, model_func = function()
        return gpt2.new("tiny", { dropout = 0 })
      end }
      local x = ps.randint(0, 256, { 2, 16 }, { dtype = "int32" })
      if rank == victim and how == "KILL" then soon("KILL", 0.4) end
      local steps = 0
      dies(function()
        while true do
          optimizer:zero_grad()
          local loss = model(x, x)
          steps = steps + 1
          if rank == victim and steps == 4 and how == "error" then error "not this one" end
          model:backward(loss)
          optimizer:step()
        end
      end)
    ]], { hows = { "KILL", "error" } })
    for _, group in ipairs(out) do
      local what = group.how == "KILL" and "died: " or "failed: %S+ not this one\n"
      all_name({ group }, "RANK " .. what, PROMPT_S)
    end
  end)

  it("names a rank that is stopped, and that rank gets the error, too", function()
    local out = stopped()
    all_name(out, "all_reduce, call 1 of rank %d: RANK is silent for %d%.%d s: it was stopped, its machine hangs, or "
      .. "the network to it is cut; it was last known after all_reduce %(call 0%)", PROMPT_S)
    for _, group in ipairs(out) do
      local r = group[group.victim]
      assert.matches("rank " .. group.victim .. " %(%S+%) is silent for %d%.%d s", r.text)
      assert.equal(1, r.code)
    end
  end)

  it("blames nobody when all ranks were stopped at once", function()
    local out = all_stopped()
    for rank = 0, 2 do assert.same({ text = "", code = 0 }, out[1][rank]) end
  end)

  it("costs no time at the end", function()
    local out = groups(3, { 0 }, ([[
      ps.C.ps_test_linger(%d)                   -- waiting for another rank takes this long
      for _ = 1, 8 do
        local g = join()
        g:barrier()
        local start = ps.now()
        g:close()
        assert(ps.now() - start < %d)
      end
    ]]):format(check.FAR_S, PROMPT_S))
    for rank = 0, 2 do assert.same({ text = "", code = 0 }, out[1][rank]) end
  end)
end)
