-- SPDX-License-Identifier: BSD-3-Clause
-- A process that outlives the launcher by a moment. It holds the reading end of a pipe. When the writing end goes,
-- because the launcher ended in whatever way, it kills every process group that it was told of. Ranks die with the
-- launcher by themselves; the warden is for their children. It leads a session of its own, so that a terminal's signals
-- to the launcher's group do not reach it. If it is killed, ranks' children may outlive the launcher; all else works.
local fcntl = require "posix.fcntl"
local signal = require "posix.signal"
local unistd = require "posix.unistd"
local wait = require "posix.sys.wait"

local warden = {}

local pid, to                       -- the warden's, and the pipe's writing end; nil: there is none

-- In the warden: "+PID" and "-PID" lines until the launcher is gone. Never returns.
local function guard(from)
  unistd.setpid("s")
  local null = fcntl.open("/dev/null", fcntl.O_RDWR)
  for fd = 0, 2 do unistd.dup2(null, fd) end              -- whoever reads the launcher's output does not wait for us
  local groups, text = {}, ""
  while true do
    local data, _, code = unistd.read(from, 4096)
    if data == "" or not data and code ~= 4 then break end                       -- the end; 4: EINTR
    text = text .. (data or "")
    for sign, group in text:gmatch("([+-])(%d+)\n") do groups[tonumber(group)] = sign == "+" or nil end
    text = text:match("[^\n]*$")
  end
  for group in pairs(groups) do signal.killpg(group, signal.SIGKILL) end
end

--- Starts it, before the first rank.
function warden.start()
  local from, why = unistd.pipe()
  if not from then error("no pipe for the launcher's warden: " .. why, 0) end
  to = why
  fcntl.fcntl(to, fcntl.F_SETFD, fcntl.FD_CLOEXEC)        -- ranks do not hold it
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

--- A process group that shall not outlive the launcher.
---@param group integer
function warden.add(group) tell("+", group) end

--- The group is gone; its number may mean others from now on.
---@param group integer
function warden.remove(group) tell("-", group) end

--- The launcher ends: so does it.
function warden.stop()
  if not to then return end
  unistd.close(to)
  to = nil
  wait.wait(pid)
end

return warden
