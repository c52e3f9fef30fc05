-- SPDX-License-Identifier: BSD-3-Clause
-- The processes of tools/launch.lua. This file starts the ranks of one attempt and forwards their output line by line.
-- It ends all ranks if one of them fails or a signal arrives. Invariants:
-- * Signals are blocked and read from a file descriptor, so that no handler interrupts this file.
-- * Each rank leads a process group, which contains its children. The whole group dies with the launcher, even after
--   kill -9.
-- * A rank's output is read to its end before its failure is reported.
-- * The error that ends a rank of psluajit has a mark before each line (src/main.c). The launcher shows this error
--   once: in the report of the rank that failed first, or after all ranks have ended. If ranks repeat another rank's
--   error, their errors are not shown. If a rank does not end, its error is shown after HELD_S.
-- * A rank may end because the group's watch notified it that another rank failed. The notified rank may be reaped
--   before the failed rank. The supervisor then waits for the end of the failed rank, and reports the failed rank.
local bit = require "bit"
local ffi = require "ffi"
local fcntl = require "posix.fcntl"
local poll = require "posix.poll"
local stat = require "posix.sys.stat"
local signal = require "posix.signal"
local stdlib = require "posix.stdlib"
local time = require "posix.time"
local unistd = require "posix.unistd"
local wait = require "posix.sys.wait"
local warden = require "ps.launch.warden"

ffi.cdef [[
typedef struct { unsigned long word[16]; } ps_signal_set;
int sigemptyset(ps_signal_set *set);
int sigaddset(ps_signal_set *set, int sig);
int sigprocmask(int how, const ps_signal_set *set, ps_signal_set *old);
int signalfd(int fd, const ps_signal_set *set, int flags);
int prctl(int option, ...);
]]

local ranks = {}

local SIG_BLOCK, SIG_SETMASK = 0, 2
local SFD_FLAGS = 0x80000 + 0x800            -- SFD_CLOEXEC and SFD_NONBLOCK
local PR_SET_PDEATHSIG = 1
local SIGNAL_RECORD = 128                    -- size of struct signalfd_siginfo in bytes; its first word is the signal
local READ = 65536
local LONGEST_LINE = 1048576                 -- in bytes; longer lines are split at this length
local KEPT_LINES = 24                 -- number of a failed rank's last lines in the report: a message and its traceback
local GATHER_NS = 1000000             -- time between two polls of output, because reading many lines at once is cheaper
-- Seconds to wait for the end of a rank that other ranks blame: ENDS_S, or STAYS_S if the rank is silent. A silent rank
-- might not end by itself.
local ENDS_S, STAYS_S = 10, 0.3
local MARK = 30                              -- byte that precedes each line of the error that ends a rank
local HELD_S = 2                             -- the error of a rank that does not end is shown after this time
local DRAIN_S = 2                            -- seconds to wait for output from a dead rank's remaining processes

local ENDING = { SIGINT = true, SIGTERM = true, SIGHUP = true, SIGQUIT = true }
local PASSED = { SIGUSR1 = true, SIGUSR2 = true }
local NAMES = {}
for name, n in pairs(signal) do
  if type(n) == "number" and name:match("^SIG%u") then NAMES[n] = name end
end

---@param n integer
---@return string
function ranks.signal_name(n) return NAMES[n] or ("signal %d"):format(n) end

---@return number seconds
local function now()
  local t = time.clock_gettime(time.CLOCK_MONOTONIC)
  return t.tv_sec + t.tv_nsec * 1e-9
end
ranks.now = now

-- -- signals ----------------------------------------------------------------------------------------------------------

local before, signal_fd                     -- the signal mask that ranks restore; the signalfd

-- Returns the signals that were ignored when the launcher started (by nohup or in the background) and stay ignored.
local function ignored()
  local f = io.open("/proc/self/status", "rb")
  local text = f and f:read("*a") or ""
  if f then f:close() end
  local set, bits = {}, text:match("SigIgn:%s*(%x+)") or ""
  for i = 1, #bits do
    local digit = tonumber(bits:sub(-i, -i), 16)
    for b = 0, 3 do
      if digit % 2 ^ (b + 1) >= 2 ^ b then set[4 * (i - 1) + b + 1] = true end
    end
  end
  return set
end

--- Redirects signals to a descriptor. Called once, before the first rank is started.
function ranks.take_signals()
  local set, skip = ffi.new("ps_signal_set"), ignored()
  ffi.C.sigemptyset(set)
  ffi.C.sigaddset(set, signal.SIGCHLD)
  for _, names in ipairs { ENDING, PASSED } do
    for name in pairs(names) do
      if not skip[signal[name]] then ffi.C.sigaddset(set, signal[name]) end
    end
  end
  before = ffi.new("ps_signal_set")
  if ffi.C.sigprocmask(SIG_BLOCK, set, before) ~= 0 then error("sigprocmask failed", 0) end
  signal_fd = ffi.C.signalfd(-1, set, SFD_FLAGS)
  if signal_fd < 0 then error("signalfd failed: error " .. ffi.errno(), 0) end
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)  -- if SIGCHLD were ignored, the kernel would discard exit codes
  signal.signal(signal.SIGPIPE, signal.SIG_IGN)           -- makes a write to a closed terminal return an error
end

-- -- one rank ---------------------------------------------------------------------------------------------------------

local function pipe()
  local r, w = unistd.pipe()
  if not r then error("no pipe for a rank's output: " .. w, 0) end
  fcntl.fcntl(r, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
  fcntl.fcntl(w, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
  return r, w
end

-- Returns a pipe through which a rank's watch names the ranks that it blames (src/rendezvous/watch.c). Each line in the
-- pipe is "RANK CODE". Returns both ends of the pipe, and the path that the rank opens. Neither end blocks.
local function blame_pipe()
  local r, w = pipe()
  for _, fd in ipairs { r, w } do
    fcntl.fcntl(fd, fcntl.F_SETFL, bit.bor(fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.O_NONBLOCK))
  end
  return r, w, ("%d:%.0f"):format(w, stat.stat("/proc/self/fd/" .. w).st_ino)
end

-- Runs the rank's program in the child process. Never returns.
local function become(spec, out, err, blames, blames_name, launcher)
  unistd.setpid("p", 0, 0)
  ffi.C.prctl(PR_SET_PDEATHSIG, ffi.cast("unsigned long", signal.SIGKILL))
  if unistd.getppid() ~= launcher then unistd._exit(1) end
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  local null = fcntl.open("/dev/null", fcntl.O_RDONLY)
  if null then unistd.dup2(null, 0) end
  unistd.dup2(out, 1)
  unistd.dup2(err, 2)
  for name, value in pairs(spec.env) do stdlib.setenv(name, value or nil) end
  fcntl.fcntl(blames, fcntl.F_SETFD, 0)
  stdlib.setenv("PS_LAUNCHER_PIPE", blames_name)
  stdlib.setenv("PS_LAUNCHER_STDERR", ("%.0f"):format(stat.stat("/proc/self/fd/2").st_ino))
  ffi.C.sigprocmask(SIG_SETMASK, before, nil)
  local _, why = unistd.execp(spec.command[0], spec.command)
  unistd.write(2, ("cannot start %s: %s\n"):format(spec.command[0], tostring(why)))
  unistd._exit(127)
end

local function stream(fd, to) return { fd = fd, to = to, pending = "" } end

-- Starts the rank that `spec` describes: { rank, local_rank, env, command, log }. command[0] is the program. If a value
-- in env is false, the variable is removed.
local function start(spec)
  io.stdout:flush()
  io.stderr:flush()
  local out_r, out_w = pipe()
  local err_r, err_w = pipe()
  local blames_r, blames_w, blames_name = blame_pipe()
  local launcher = unistd.getpid()
  local pid, why = unistd.fork()
  if pid == 0 then
    pcall(become, spec, out_w, err_w, blames_w, blames_name, launcher)
    unistd._exit(127)
  end
  unistd.close(out_w)
  unistd.close(err_w)
  unistd.close(blames_w)
  if not pid then
    unistd.close(out_r)
    unistd.close(err_r)
    unistd.close(blames_r)
    error(("cannot start rank %d: %s"):format(spec.rank, why), 0)
  end
  unistd.setpid("p", pid, pid)                            -- both processes call it, because either one can run first
  warden.add(pid)
  return { rank = spec.rank, local_rank = spec.local_rank, pid = pid, log = spec.log, began = now(), tail = {},
    blames = blames_r, streams = { stream(out_r, io.stdout), stream(err_r, io.stderr) } }
end

-- -- output -----------------------------------------------------------------------------------------------------------

local function keep(tail, line)
  tail[#tail + 1] = line
  if #tail > KEPT_LINES then table.remove(tail, 1) end
end

local function show(self, r, to, line)
  if self.mute then return end
  if to == io.stderr then io.stdout:flush() end
  local ok = to:write(self.prefix and ("[%d] "):format(r.rank) or "", line)
  if not ok then self.mute = "cannot write output" end
end

-- Checks the result of a write to a rank's log. If the write failed, reports it once, and writes no more to the log: a
-- later write could succeed, and the log would lack lines in its middle.
local function check_log(self, r, ok, why)
  if ok then return end
  r.log = nil
  self.on_log_failure(r, why)
end

local function put(self, r, s, line)
  local marked = s.to == io.stderr and line:byte(1) == MARK
  if marked then
    line = line:sub(2)
    r.error, r.error_at = (r.error or "") .. line, now()
  end
  if r.log then check_log(self, r, r.log:write(line)) end
  keep(r.tail, line)
  if not marked then show(self, r, s.to, line) end
end

-- Shows the error of a rank that was not shown yet.
local function show_error(self, r)
  for line in r.error:gmatch "[^\n]*\n" do show(self, r, io.stderr, line) end
  r.error, r.shown = nil, true
end

-- Shows the errors of ranks that have not ended in time.
local function show_held(self)
  for _, r in ipairs(self.list) do
    if r.error and not r.how and now() - r.error_at >= HELD_S then show_error(self, r) end
  end
end

-- Returns the text of an error without the addresses in its traceback.
local function words(text) return (text:gsub("0x%x+", "")) end

-- Shows each error that is in no report. Shows equal errors once. Skips the error of a rank that blames another rank.
-- Called after all ranks have ended.
local function show_rest(self)
  local known, cause = {}, self.failure
  if cause and cause.error then known[words(cause.error)] = true end
  for _, r in ipairs(self.list) do
    local text = r ~= cause and r.error and words(r.error)
    if text and not next(r.others or {}) and not known[text] then
      known[text] = true
      show_error(self, r)
    end
  end
end

-- Reads the available bytes of a stream. At the end of the stream, shows the last line, even if the line has no
-- newline, and returns false.
local function take(self, r, s)
  local data, _, code = unistd.read(s.fd, READ)
  if data == nil and code == 4 then return true end        -- EINTR
  if data == nil or data == "" then
    if s.pending ~= "" then put(self, r, s, s.pending .. "\n") end
    s.pending = ""
    unistd.close(s.fd)
    s.fd = nil
    return false
  end
  local at, stop = 1, data:find("\n", 1, true)
  while stop do                                            -- a plain search, because patterns are slow on long lines
    put(self, r, s, s.pending .. data:sub(at, stop))
    s.pending, at = "", stop + 1
    stop = data:find("\n", at, true)
  end
  s.pending = s.pending .. data:sub(at)
  if #s.pending > LONGEST_LINE then
    put(self, r, s, s.pending .. "\n")
    s.pending = ""
  end
  return true
end

local function flush(self)
  if not io.stdout:flush() or not io.stderr:flush() then self.mute = self.mute or "cannot write output" end
  for _, r in ipairs(self.list) do
    if r.log then check_log(self, r, r.log:flush()) end
  end
end

-- Waits for output, at most timeout_s seconds. If `signals` is true, also waits for a signal. Returns true if a signal
-- has arrived.
local function poll_once(self, list, timeout_s, signals)
  local fds, owner = {}, {}
  if signals then fds[signal_fd] = { events = { IN = true } } end
  for _, r in ipairs(list) do
    for _, s in ipairs(r.streams) do
      if s.fd then
        fds[s.fd] = { events = { IN = true } }
        owner[#owner + 1] = { r, s, s.fd }
      end
    end
  end
  if poll.poll(fds, math.ceil(timeout_s * 1000)) == 0 then return false end
  for _, o in ipairs(owner) do
    local got = fds[o[3]].revents
    if got and (got.IN or got.HUP or got.ERR or got.NVAL) then take(self, o[1], o[2]) end
  end
  flush(self)
  local got = signals and fds[signal_fd].revents
  return got and got.IN or false
end

-- Reads the remaining output of a dead rank from its pipes.
local function drain(self, r)
  local deadline = now() + DRAIN_S
  while (r.streams[1].fd or r.streams[2].fd) and now() < deadline do
    poll_once(self, { r }, math.max(deadline - now(), 0), false)
  end
  for _, s in ipairs(r.streams) do
    if s.fd then  -- a process outside the rank's process group still has the pipe open
      if s.pending ~= "" then put(self, r, s, s.pending .. "\n") end
      unistd.close(s.fd)
      s.fd = nil
    end
  end
end

-- -- ends -------------------------------------------------------------------------------------------------------------

local function kill_all(self, sig)
  for _, r in ipairs(self.list) do
    if not r.how then
      signal.killpg(r.pid, sig)
      if sig ~= signal.SIGKILL then signal.killpg(r.pid, signal.SIGCONT) end  -- a stopped process must also receive it
    end
  end
end

-- Returns the ranks that the watch of a dead rank blamed, as a table from each blamed rank to the seconds to wait for
-- its end.
local function blamed_by(r)
  local others, text = {}, unistd.read(r.blames, READ) or ""
  unistd.close(r.blames)
  for who, code in text:gmatch("(%d+) (%u+)\n") do others[tonumber(who)] = code == "ETIME" and STAYS_S or ENDS_S end
  others[r.rank] = nil
  return others
end

-- Weights of failed ranks. The larger the weight, the more likely the rank is the cause of the failure. The most likely
-- cause is a rank that was ended by a signal, then a rank that failed by itself, then a rank that was notified of
-- another rank's failure.
local TOLD, ITSELF, KILLED = 1, 2, 3
local function weight_of(r)
  if r.how == "killed" then return KILLED end
  return next(r.others) and TOLD or ITSELF
end

-- Returns the time until which to wait for blamed ranks of this launcher that have not ended.
local function cause_until(self)
  local at = 0
  for _, told in ipairs(self.list) do
    for _, r in ipairs(self.list) do
      local seconds = told.weight and told.others[r.rank]
      if seconds and not r.how then at = math.max(at, told.ended + math.min(seconds, self.grace)) end
    end
  end
  return at
end

-- Reaps the ranks that have ended. Keeps the first failure. If several ranks end at once, keeps the most likely cause.
-- Returns true if the other ranks must be stopped because of the failure.
local function reap(self)
  for _, r in ipairs(self.list) do
    if not r.how then
      local pid, how, code = wait.wait(r.pid, wait.WNOHANG)
      if pid == r.pid and (how == "exited" or how == "killed") then
        signal.killpg(r.pid, signal.SIGKILL)              -- ends the rank's children
        warden.remove(r.pid)
        r.how, r.code, r.seconds = how, code, now() - r.began
        self.alive = self.alive - 1
        drain(self, r)
        r.others, r.ended = blamed_by(r), now()
        local bad = how == "killed" or code ~= 0
        if bad and not self.stopping then
          r.weight = weight_of(r)
          if not self.suspect or r.weight > self.suspect.weight then self.suspect = r end
        end
        self.all_well = self.all_well and not bad
      end
    end
  end
  local suspect = self.suspect
  if not suspect then return false end
  self.decide_at = suspect.weight == TOLD and not self.stopping and cause_until(self) or 0
  if now() < self.decide_at then return false end
  self.suspect, self.failure = nil, suspect
  if suspect.weight == TOLD and suspect.error then show_error(self, suspect) end   -- the cause is on another launcher
  self.on_failure(suspect)
  return not self.stopping
end

local function stop(self, sig)
  self.stopping, self.deadline = true, now() + self.grace
  kill_all(self, sig)
end

-- Handles all signals that are pending in the signal descriptor.
local function on_signals(self)
  while true do
    local record = unistd.read(signal_fd, SIGNAL_RECORD)
    if not record or #record < SIGNAL_RECORD then return end
    local sig = record:byte(1)
    local name = NAMES[sig]
    if ENDING[name] then
      self.on_signal(name, self.signal ~= nil)
      if self.signal then
        self.deadline, self.again = 0, true               -- the user requested the end twice
      else
        self.signal = sig
        if self.stopping then kill_all(self, sig) else stop(self, sig) end
      end
    elseif PASSED[name] then
      kill_all(self, sig)
    end
  end
end

local function watch(self)
  while self.alive > 0 do
    local timeout = 1
    if self.deadline and not self.killed then timeout = math.min(timeout, math.max(self.deadline - now(), 0)) end
    if self.suspect then timeout = math.min(timeout, math.max(self.decide_at - now(), 0)) end
    if poll_once(self, self.list, timeout, true) then
      on_signals(self)
    else
      time.nanosleep { tv_sec = 0, tv_nsec = GATHER_NS }
    end
    show_held(self)
    if self.mute and not self.stopping then stop(self, signal.SIGTERM) end
    if reap(self) then stop(self, signal.SIGTERM) end
    if self.deadline and not self.killed and self.alive > 0 and now() >= self.deadline then
      self.killed = self.alive
      kill_all(self, signal.SIGKILL)
    end
  end
  show_rest(self)
end

--- Runs one attempt until all its processes have ended, by themselves or because of a failure or signal.
---@param specs { rank: integer, local_rank: integer, env: table, command: string[], log: file*? }[]
---@param o { grace: number, prefix: boolean, on_failure: fun(r: table), on_signal: fun(name: string, again: boolean),
---  on_log_failure: fun(r: table, why: string) }
---@return { failure: table?, signal: integer?, again: boolean?, killed: integer?, mute: string?, all_well: boolean }
function ranks.run(specs, o)
  local self = { list = {}, alive = 0, grace = o.grace, prefix = o.prefix, on_failure = o.on_failure,
    on_signal = o.on_signal, on_log_failure = o.on_log_failure, all_well = true }
  local ok, why = pcall(function()
    for _, spec in ipairs(specs) do
      self.list[#self.list + 1] = start(spec)
      self.alive = self.alive + 1
    end
    watch(self)
  end)
  if not ok then                                          -- the system is out of processes or memory; ends all ranks
    kill_all(self, signal.SIGKILL)
    for _, r in ipairs(self.list) do
      if not r.how then wait.wait(r.pid) end
    end
    error(why, 0)
  end
  return self
end

return ranks
