-- SPDX-License-Identifier: BSD-3-Clause
-- Starts a script several times, as the ranks of one run, with the options and environment variables of torchrun.
--   psluajit tools/launch.lua --nproc-per-node 4 script.lua [arguments]
-- Each printed line begins with [rank]. If a rank fails, the launcher names it, ends all other ranks, and starts all
-- ranks again, at most --max-restarts times. If --nproc-per-node is MIN:MAX, each restart has one rank fewer. The exit
-- code is the exit code of the first rank that failed (128 + n if signal n ended it). docs/distributed.md is the guide.
-- --help shows the options.
local paths = require "ps.paths"
local nodes = require "ps.launch.nodes"
local options = require "ps.launch.options"
local port = require "ps.launch.port"
local ranks = require "ps.launch.supervisor"
local scripts = require "ps.prompt.scripts"
local secret = require "ps.dist.secret"
local warden = require "ps.launch.warden"
local stat = require "posix.sys.stat"

local SHOWN = 500             -- maximum number of bytes in a line of a failure report

local function fail(message)
  io.stderr:write("launch: " .. message .. "\n")
  os.exit(1)
end

local function say(text, ...)
  io.stdout:flush()
  io.stderr:write("launch: " .. text:format(...) .. "\n")
  io.stderr:flush()
end

-- -- what to start ----------------------------------------------------------------------------------------------------

-- Finds the script before any rank starts, so that a missing script is reported only once.
local function find_script(name)
  local path, why = scripts.find(name)
  return path or fail(why)
end

-- Lua code that makes output line-buffered. Ranks write to pipes. The C library would buffer output to a pipe, and the
-- buffer would be lost if the process died. The code restores `arg`, so that the script sees its usual arguments.
local BY_LINE = "io.stdout:setvbuf('line') arg[-1],arg[-2],arg[-3]=arg[-3],nil,nil"

local function command_of(o, script, local_rank)
  local exe = paths.exe or arg[-1]
  local command = o.no_python and { o.script } or { exe, "-e", BY_LINE, script }
  if o.pass_local_rank then command[#command + 1] = ("--local_rank=%d"):format(local_rank) end
  for _, a in ipairs(o.args) do command[#command + 1] = a end
  command[0] = command[1]
  for i = 1, #command do command[i - 1] = command[i] end
  command[#command] = nil
  return command
end

local function free_port()
  local number, why = port.free()
  return number or fail("there is no free port: " .. why .. "; give --master-port")
end

local own_id = secret.random():sub(1, 16)      -- the id of this launcher

-- Returns the name and the secret of this attempt. Name and secret distinguish the attempt's ranks from the ranks of
-- other runs. With several nodes, name and secret are read from the environment, because the launchers of the nodes
-- cannot agree on them.
local function identity(o, attempt)
  if o.nnodes > 1 then return { id = os.getenv("PS_RUN_ID") } end
  local id = os.getenv("PS_RUN_ID") or o.run_id ~= "none" and o.run_id or own_id
  return { id = ("%s.%d"):format(id, attempt), secret = secret.of_attempt(os.getenv) }
end

local function environment(o, nproc, local_rank, attempt, master_port, run)
  local rank = o.node_rank * nproc + local_rank
  local function text(n) return ("%d"):format(n) end
  return {
    RANK = text(rank), LOCAL_RANK = text(local_rank), WORLD_SIZE = text(o.nnodes * nproc),
    LOCAL_WORLD_SIZE = text(nproc), GROUP_RANK = text(o.node_rank), GROUP_WORLD_SIZE = text(o.nnodes),
    ROLE_RANK = text(rank), ROLE_WORLD_SIZE = text(o.nnodes * nproc), MASTER_ADDR = o.master_addr,
    MASTER_PORT = text(master_port), TORCHELASTIC_RESTART_COUNT = text(attempt),
    TORCHELASTIC_MAX_RESTARTS = text(o.max_restarts), TORCHELASTIC_RUN_ID = o.run_id,
    PS_RUN_ID = run.id, PS_SECRET = run.secret,
    -- Set to false, because no process listens on MASTER_PORT yet, but an outer launcher might have set the variable to
    -- true.
    TORCHELASTIC_USE_AGENT_STORE = false,
    OMP_NUM_THREADS = os.getenv("OMP_NUM_THREADS")
      or text(math.max(1, math.floor(options.cores() / nproc))),
  }
end

-- -- logs -------------------------------------------------------------------------------------------------------------

local function make_folder(path)
  local at = path:sub(1, 1) == "/" and "/" or ""
  for part in path:gmatch("[^/]+") do
    at = at .. part .. "/"
    if not stat.stat(at) then
      local ok, why = stat.mkdir(at)
      if not ok then fail(("--log-dir: cannot make %s: %s"):format(at, why)) end
    end
  end
end

local function open_log(folder, rank)
  local path = ("%s/rank_%d.log"):format(folder, rank)
  local f, why = io.open(path, "ab")
  return f or fail("--log-dir: cannot write " .. why)
end

-- -- running ----------------------------------------------------------------------------------------------------------

local function on_failure(r)
  local how = r.how == "killed" and ("killed by signal %d (%s)"):format(r.code, ranks.signal_name(r.code))
    or ("exit code %d"):format(r.code)
  local lines = {}
  for i, line in ipairs(r.shown and {} or r.tail) do
    lines[i] = "\n  | " .. line:sub(1, SHOWN):gsub("\n$", "") .. (#line > SHOWN and "..." or "")
  end
  say("rank %d (local rank %d, pid %d) failed first, after %.1f s, at %s: %s%s", r.rank, r.local_rank, r.pid, r.seconds,
    os.date("%Y-%m-%d %H:%M:%S"), how, #lines > 0 and "; its last lines:" .. table.concat(lines)
    or r.shown and "; its error is above" or "; it wrote nothing")
end

local function on_log_failure(r, why)
  say("the log of rank %d (--log-dir) cannot be written and is incomplete: %s", r.rank, why)
end

local function on_signal(name, again)
  say(again and "%s again: killing the ranks" or "%s: passed on to the ranks", name)
end

local function run_attempt(o, script, attempt, nproc)
  local master_port, specs = o.master_port or free_port(), {}
  local folder = o.log_dir and ("%s/attempt_%d"):format(o.log_dir, attempt)
  if folder then make_folder(folder) end
  local run = identity(o, attempt)
  for i = 0, nproc - 1 do
    local rank = o.node_rank * nproc + i
    specs[i + 1] = { rank = rank, local_rank = i, env = environment(o, nproc, i, attempt, master_port, run),
      command = command_of(o, script, i), log = folder and open_log(folder, rank) }
  end
  local result = ranks.run(specs, { grace = o.grace, prefix = o.prefix, on_failure = on_failure,
    on_signal = on_signal, on_log_failure = on_log_failure })
  for _, spec in ipairs(specs) do
    if spec.log then spec.log:close() end
  end
  if result.mute then say("%s; all ranks were ended", result.mute) end
  if result.killed and result.again then
    say("%d of the ranks were killed", result.killed)
  elseif result.killed then
    say("%d of the ranks did not end within %g s after the signal and were killed", result.killed, o.grace)
  end
  return result
end

local function exit_code(result)
  if result.signal then return result.all_well and 0 or 128 + result.signal end
  if result.failure then
    return result.failure.how == "killed" and 128 + result.failure.code or result.failure.code
  end
  return result.mute and 1 or 0
end

local function main()
  local ok, o = pcall(options.read, arg)
  if not ok then fail(o) end
  if o.help then
    io.stdout:write(options.usage)
    return 0
  end
  local script = o.no_python and o.script or find_script(o.script)
  if not o.node_rank then
    o.node_rank = nodes.number(o)
    say("node %d of %d", o.node_rank, o.nnodes)
  end
  ranks.take_signals()
  warden.start()
  local nproc = o.nproc
  for attempt = 0, o.max_restarts do
    local result = run_attempt(o, script, attempt, nproc)
    local last = attempt == o.max_restarts
    if result.signal or result.mute or not result.failure or last then return exit_code(result) end
    nproc = math.max(nproc - 1, o.min_nproc)
    say("restart %d of %d%s", attempt + 1, o.max_restarts, o.min_nproc < o.nproc
      and (", with %d of %d ranks"):format(nproc, o.nproc) or "")
  end
end

local ok, code = pcall(main)
warden.stop()
if not ok then fail(tostring(code)) end
os.exit(code, true)
