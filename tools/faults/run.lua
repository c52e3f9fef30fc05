-- SPDX-License-Identifier: BSD-3-Clause
-- Runs the lives of a job: starts, stops, continues and ends its ranks, and returns what can be observed from the
-- outside. A function that waits yields, so that several jobs can run at the same time.
local ffi = require "ffi"
local json = require "cjson"
local lfs = require "lfs"
local fcntl = require "posix.fcntl"
local signal = require "posix.signal"
local stdlib = require "posix.stdlib"
local time = require "posix.time"
local unistd = require "posix.unistd"
local wait = require "posix.sys.wait"
local paths = require "ps.paths"

local run = {}

local SHORT_S = 3                                          -- a stop of at most this duration ends before the heartbeat
                                                           -- timeout
local CONTINUED_S = 0.3                                    -- duration of a stop if the log does not contain the
                                                           -- duration

ffi.cdef "int prctl(int option, ...);"
local PR_SET_PDEATHSIG = 1

---@return number seconds
function run.now()
  local t = time.clock_gettime(time.CLOCK_MONOTONIC)
  return t.tv_sec + t.tv_nsec * 1e-9
end

local function read(path)
  local f = io.open(path, "rb")
  local text = f and f:read("*a") or ""
  if f then f:close() end
  return text
end
run.read = read

local function write(path, text)
  local f, why = io.open(path, "wb")
  if not f then error(why, 0) end
  local ok
  ok, why = f:write(text)
  local closed, later = f:close()
  if not (ok and closed) then error(("%s: %s"):format(path, why or later), 0) end
end
run.write = write

local OLDER_S = 300                                        -- the longest time that a build takes

--- Returns the path of psluajit_faults. This program must be in the folder of psluajit and from the same build. If
--- there is no such program, returns nil and the reason.
---@return string?
---@return string? why
function run.program()
  local exe = paths.exe:gsub("/[^/]*$", "") .. "/psluajit_faults"
  local build = "cmake --build BUILD --target psluajit_faults"
  local time_of, usual = lfs.attributes(exe, "modification"), lfs.attributes(paths.exe, "modification")
  if not time_of then return nil, ("needs the program psluajit_faults (%s)"):format(build) end
  if time_of < usual - OLDER_S then
    return nil, ("needs a program psluajit_faults that is not older than psluajit (%s)"):format(build)
  end
  return exe
end

---@class ps.faults.Process
---@field rank integer
---@field twin boolean        true if it is the second process of a rank
---@field pid integer
---@field out string          path of the process's output
---@field code? integer       exit code, or nil
---@field signal? integer     the signal that ended it, or nil
---@field hung? string        set if it had to be killed: "busy" if the machine was busy, otherwise "calm"
---@field over? number        time at which it ended, by run.now
---@field continued? number   time at which it was last continued after a stop, by run.now
---@field starves? boolean    true if it recently lacked a processor
---@field starved_s number     for how many seconds it lacked a processor

local running = {}                                         -- ids of the processes of all lives that are running

-- Starts one rank.
local function start(spec, life, rank, twin)
  local job = spec.job
  local out = ("%s.out%d.%d%s"):format(spec.folder, life, rank, twin and "t" or "")
  local env = { RANK = rank, LOCAL_RANK = rank, WORLD_SIZE = job.ranks, LOCAL_WORLD_SIZE = job.ranks,
    MASTER_ADDR = "127.0.0.1", MASTER_PORT = 1, OMP_NUM_THREADS = 1, OMP_WAIT_POLICY = "passive",
    PS_FAULT_FOLDER = spec.folder, PS_FAULT_PLAN = spec.plan or "", PS_FAULT_LOG = spec.folder .. ".faults",
    CUDA_VISIBLE_DEVICES = "" }
  if (job.disk_threads or 0) > 0 then env.PS_DISK_THREADS = job.disk_threads end
  local command = { [0] = spec.exe, spec.script, spec.folder .. ".json", spec.folder, spec.folder .. ".log",
    tostring(life) }
  local parent = unistd.getpid()
  local pid = assert(unistd.fork())
  if pid > 0 then
    unistd.setpid("p", pid, pid)
    running[pid] = true
    return { rank = rank, twin = twin, pid = pid, out = out, looked = run.now(), starved_s = 0,
      sample = { ran = 0, waited = 0, ready = true } }
  end
  unistd.setpid("p", 0, 0)
  ffi.C.prctl(PR_SET_PDEATHSIG, ffi.cast("unsigned long", signal.SIGKILL))
  if unistd.getppid() ~= parent then unistd._exit(1) end
  local null = fcntl.open("/dev/null", fcntl.O_RDONLY)
  local to = fcntl.open(out, fcntl.O_WRONLY + fcntl.O_CREAT + fcntl.O_TRUNC, 420)
  unistd.dup2(null, 0)
  unistd.dup2(to, 1)
  unistd.dup2(to, 2)
  for name, value in pairs(env) do stdlib.setenv(name, tostring(value)) end
  unistd.execp(command[0], command)
  unistd._exit(127)
end

--- Returns for how many seconds the event stop:SECONDS stops a rank. The duration of a short stop is the same on every
--- machine. A long stop is lengthened by the job's patience, so that it is longer than the heartbeat timeout.
---@param seconds number
---@param job table
---@return number
function run.stopped(seconds, job)
  return seconds > SHORT_S and seconds * (job.patience_s or 1) or seconds
end

-- Returns the seconds for which a rank that has just stopped itself must stay stopped.
local function stop_seconds(spec, rank)
  local seconds = CONTINUED_S
  local pattern = ("\n?%d [%%d.]+ event [^ ]*=stop:([%%d.]+) "):format(rank)
  for text in read(spec.folder .. ".faults"):gmatch(pattern) do
    seconds = run.stopped(tonumber(text), spec.job)
  end
  return seconds
end

local LOOKS_S = 0.25
local BUSY = 10                                            -- if a process of a life starves, the life's time limit is
                                                           -- longer by this factor

-- A sample of the threads of a process:
--   ran: seconds of processor time
--   waited: seconds in which threads were ready to run and had no processor; the system counts these seconds when a
--   thread gets a processor
--   ready: true if a thread is ready to run or waits for a disk
---@alias ps.faults.Sample {ran: number, waited: number, ready: boolean}

local function sample(pid)
  local s, tasks = { ran = 0, waited = 0, ready = false }, ("/proc/%d/task"):format(pid)
  for _, tid in ipairs(run.names(tasks)) do
    local ran, waited = read(("%s/%s/schedstat"):format(tasks, tid)):match "^(%d+) (%d+)"
    local state = read(("%s/%s/stat"):format(tasks, tid)):match "%) (%a)"
    s.ran, s.waited = s.ran + (tonumber(ran) or 0) * 1e-9, s.waited + (tonumber(waited) or 0) * 1e-9
    s.ready = s.ready or state == "R" or state == "D"
  end
  return s
end

--- Returns true if a process lacked a processor between two samples.
---@param before ps.faults.Sample
---@param after ps.faults.Sample
---@param seconds number time between the samples
---@return boolean
function run.starved(before, after, seconds)
  return after.waited - before.waited > 0.1 * seconds
    or before.ready and after.ready and after.ran - before.ran < 0.5 * seconds
end

-- Updates the fields of a process: whether it starves, has stopped or has ended. Continues it when its stop is over.
local function look(process, spec)
  local now = run.now()
  if now >= process.looked + LOOKS_S then
    local seconds, after = now - process.looked, sample(process.pid)
    process.starves = run.starved(process.sample, after, seconds)
    process.starved_s = process.starved_s + (process.starves and seconds or 0)
    process.sample, process.looked = after, now
  end
  local pid, how, number = wait.wait(process.pid, wait.WNOHANG + wait.WUNTRACED)
  if not pid or pid == 0 then
    if process.continues and run.now() >= process.continues then
      process.continues, process.continued = nil, run.now()
      signal.kill(process.pid, signal.SIGCONT)
    end
  elseif how == "stopped" then
    process.continues = run.now() + stop_seconds(spec, process.rank)
  else
    process.over = run.now()
    if how == "exited" then process.code = number else process.signal = number end
  end
end

--- Runs one life to its end. `spec` has the fields exe, script, job, folder and plan (the text of PS_FAULT_PLAN).
---@param spec table
---@param life integer
---@param events ps.faults.Event[] the events of this life
---@return ps.faults.Process[]
function run.life(spec, life, events)
  local job, began = spec.job, run.now()
  local starts, processes = {}, {}
  local calm_s, looked = 0, began                          -- calm_s: for how many seconds no process has starved
  for rank = 0, job.ranks - 1 do starts[#starts + 1] = { rank = rank, at = began } end
  for _, event in ipairs(events) do
    if event.kind == "late" then starts[event.rank + 1].at = began + event.seconds end
    if event.kind == "twice" then starts[#starts + 1] = { rank = event.rank, at = began, twin = true } end
  end
  os.remove(spec.folder .. "/rendezvous")
  os.remove(spec.folder .. ".faults.power")                -- the previous life's record of its loss of power
                                                           -- (src/faults/plan.c)
  repeat
    local left = 0
    for _, s in ipairs(starts) do
      if not s.done and run.now() >= s.at then
        s.done = true
        processes[#processes + 1] = start(spec, life, s.rank, s.twin)
      end
      if not s.done then left = left + 1 end
    end
    local stopped, starves = 0, false
    for _, process in ipairs(processes) do
      if not process.over then look(process, spec) end
      if not process.over then
        left = left + 1
        stopped = stopped + (process.continues and 1 or 0)
        starves = starves or process.starves
        local calm = calm_s > job.limit_s
        if not process.hung and (calm or looked - began > BUSY * job.limit_s) then
          process.hung = calm and "calm" or "busy"
          signal.kill(-process.pid, signal.SIGKILL)
        end
      end
    end
    local now = run.now()
    calm_s, looked = calm_s + (starves and 0 or now - looked), now
    if left > 0 and left == stopped and #processes > left then
      -- All processes that have not ended are stopped, so they are continued at once.
      for _, process in ipairs(processes) do process.continues = process.continues and 0 end
    end
    if left > 0 then coroutine.yield() end
  until left == 0
  for _, process in ipairs(processes) do
    process.text = read(process.out)
    process.seconds = process.over - began
    if signal.kill(-process.pid, 0) == 0 then              -- a child process is still running although the process
                                                           -- itself has ended
      process.orphans = true
      signal.kill(-process.pid, signal.SIGKILL)
    end
    running[process.pid] = nil
  end
  return processes
end

--- Ends the processes of all lives that run.
function run.stop()
  for pid in pairs(running) do
    signal.kill(-pid, signal.SIGKILL)
    wait.wait(pid)
    running[pid] = nil
  end
end

--- Returns the lines of the job's log, each as { rank, life, what, step, ... }.
---@param folder string
---@return table[]
function run.log(folder)
  local list = {}
  for line in read(folder .. ".log"):gmatch "[^\n]*\n" do
    local words = {}
    for word in line:gmatch "%S+" do words[#words + 1] = word end
    list[#list + 1] = { rank = tonumber(words[1]), life = tonumber(words[2]), what = words[3],
      step = tonumber(words[4]), words[5], words[6] }
  end
  return list
end

--- Returns the faults that have happened in all lives.
---@param folder string
---@return {rank: integer, at: number, text: string}[] at: time of the fault, by run.now
function run.happened(folder)
  local list = {}
  for rank, at, text in read(folder .. ".faults"):gmatch "(%d+) ([%d.]+) event ([^\n]*)\n" do
    list[#list + 1] = { rank = tonumber(rank), at = tonumber(at), text = text }
  end
  return list
end

--- Returns the paths that ranks created outside the job's folder and did not remove, except the log of the job.
---@param folder string
---@return string[]
function run.outside(folder)
  local list = {}
  for path in read(folder .. ".faults"):gmatch "%d+ [%d.]+ outside ([^\n]*)\n" do
    if path ~= folder .. ".log" and lfs.symlinkattributes(path, "mode") then list[#list + 1] = path end
  end
  return list
end

--- Returns the numbers of calls in the last life. The last life must have succeeded.
---@param folder string
---@return ps.faults.Calls
function run.calls(folder)
  local all = {}
  for rank, text in read(folder .. ".faults"):gmatch "(%d+) [%d.]+ calls ([^\n]*)\n" do
    local calls = {}
    for name, n in text:gmatch "([%l/]+)=(%d+)" do calls[name] = tonumber(n) end
    all[tonumber(rank)] = calls
  end
  return all
end

-- Runs the command `text`, in which each %s is replaced by a path. os.execute is not used, because it would ignore
-- Ctrl-C until the command ends.
local function shell(text, ...)
  local words = { ... }
  for i, word in ipairs(words) do words[i] = "'" .. word:gsub("'", "'\\''") .. "'" end
  io.popen(text:format(unpack(words))):close()
end

--- Removes a folder and everything in it.
---@param path string
function run.remove(path) shell("rm -rf %s", path) end

--- Creates the folder of a job, and writes the job's settings. The logs are next to the folder and not in it, so that
--- faults do not affect the logs.
---@param spec table
function run.prepare(spec)
  run.clean(spec.folder)
  assert(lfs.mkdir(spec.folder))
  run.settings(spec)
end

--- Writes the settings of a job. The next life of the job reads them.
---@param spec table
function run.settings(spec) write(spec.folder .. ".json", json.encode(spec.job)) end

--- Copies the checkpoints of a job to the folder of another job.
---@param from string folder of the first job
---@param to string folder of the second job
function run.copy(from, to)
  if lfs.attributes(from .. "/run", "mode") then shell("cp -a %s/run %s/run", from, to) end
end

---@param folder string
function run.clean(folder) shell("rm -rf %s %s.*", folder, folder) end

--- Returns the names in a folder, without . and ..
---@param path string
---@return string[]
function run.names(path)
  local names = {}
  if lfs.attributes(path, "mode") ~= "directory" then return names end
  for name in lfs.dir(path) do if name ~= "." and name ~= ".." then names[#names + 1] = name end end
  table.sort(names)
  return names
end

return run
