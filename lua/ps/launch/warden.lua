-- SPDX-License-Identifier: BSD-3-Clause
-- A process that outlives the launcher briefly. The warden has the reading end of a pipe. When the launcher ends, in
-- whatever way, the writing end closes. The warden then kills every process group that it knows. Ranks themselves end
-- with the launcher in any case. The warden is needed for the ranks' children. The warden has its own session, so that
-- signals from a terminal to the launcher's group do not reach it. If the warden is killed, children of ranks may
-- outlive the launcher, but everything else still works.
local fcntl = require "posix.fcntl"
local signal = require "posix.signal"
local unistd = require "posix.unistd"
local wait = require "posix.sys.wait"

local warden = {}

local pid, to                       -- the warden's process id and the writing end of the pipe, or nil

-- Runs in the warden process: reads "+PID" and "-PID" lines until the launcher has ended. Never returns.
local function guard(from)
  unistd.setpid("s")
  local null = fcntl.open("/dev/null", fcntl.O_RDWR)
  for fd = 0, 2 do unistd.dup2(null, fd) end           -- readers of the launcher's output need not wait for the warden
  local groups, text = {}, ""
  while true do
    local data, _, code = unistd.read(from, 4096)
    if data == "" or not data and code ~= 4 then break end                       -- end of input; code 4 is EINTR
    text = text .. (data or "")
    for sign, group in text:gmatch("([+-])(%d+)\n") do groups[tonumber(group)] = sign == "+" or nil end
    text = text:match("[^\n]*$")
  end
  for group in pairs(groups) do signal.killpg(group, signal.SIGKILL) end
end

--- Starts the warden. Called before the first rank is started.
function warden.start()
  local from, why = unistd.pipe()
  if not from then error("cannot create a pipe for the launcher's warden: " .. why, 0) end
  to = why
  fcntl.fcntl(to, fcntl.F_SETFD, fcntl.FD_CLOEXEC)        -- closed in ranks
  pid, why = unistd.fork()
  if pid == 0 then
    unistd.close(to)
    pcall(guard, from)
    unistd._exit(0)
  end
  unistd.close(from)
  if not pid then error("cannot start the launcher's warden: " .. why, 0) end
end

local function tell(sign, group)
  if to then unistd.write(to, ("%s%d\n"):format(sign, group)) end
end

--- Adds a process group that must not outlive the launcher.
---@param group integer
function warden.add(group) tell("+", group) end

--- Removes a process group that has ended, because its id can be reused.
---@param group integer
function warden.remove(group) tell("-", group) end

--- Stops the warden when the launcher ends.
function warden.stop()
  if not to then return end
  unistd.close(to)
  to = nil
  wait.wait(pid)
end

return warden
