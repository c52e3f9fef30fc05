-- SPDX-License-Identifier: BSD-3-Clause
-- Runs a function in a child process and returns its result. The function can neither change nor end the calling
-- process, and all memory of the function is freed when the child process ends.
local cjson = require "cjson"
local fcntl = require "posix.fcntl"
local lfs = require "lfs"
local unistd = require "posix.unistd"
local wait = require "posix.sys.wait"

local child = {}

local PIECE = 65536

-- Redirects the standard output of this process to /dev/null. With `quiet`, also redirects the standard error.
local function silence(quiet)
  local null = fcntl.open("/dev/null", fcntl.O_RDWR)
  unistd.dup2(null, 0)
  unistd.dup2(null, 1)
  if quiet then unistd.dup2(null, 2) end
end

local function write_all(fd, text)
  local at = 1
  while at <= #text do
    local n = unistd.write(fd, text:sub(at, at + PIECE - 1))
    if not n then return end                              -- the process that reads the pipe no longer exists
    at = at + n
  end
end

-- Raises an error if this process contains something that a fork cannot copy: threads, or a loaded psluajit.
local function check_alone()
  local cause
  if package.loaded["ps.core.ffi"] then cause = 'has loaded psluajit (require "ps")' end
  local tasks = 0
  if not cause and lfs.attributes("/proc/self/task", "mode") == "directory" then
    for name in lfs.dir "/proc/self/task" do if name:match "^%d+$" then tasks = tasks + 1 end end
  end
  if tasks > 1 then cause = ("has %d threads"):format(tasks) end
  if not cause then return end
  error(("a plan runs the script in forks of this process, but this process %s, which a fork cannot copy"
    .. ": start psluajit tools/plan.lua SCRIPT (or psluajit --dry-run) as a program of its own, or plan before "
    .. 'require "ps"'):format(cause), 0)
end

--- Starts fn(give) in a child process. give(value) passes a JSON value to the parent process and ends the child
--- process. The standard output of the child process is discarded. Raises an error if this process has loaded "ps" or
--- has threads.
---@param fn fun(give: fun(value: table))
---@param quiet boolean true: the standard error of the child process is discarded too
---@return {pid: integer, fd: integer} running
function child.begin(fn, quiet)
  check_alone()
  io.stdout:flush()
  io.stderr:flush()
  local from, to = unistd.pipe()
  if not from then error("no pipe can be made: " .. to, 0) end
  local pid, why = unistd.fork()
  if not pid then error("no process can be started: " .. why, 0) end
  if pid > 0 then
    unistd.close(to)
    return { pid = pid, fd = from }
  end
  unistd.close(from)
  silence(quiet)
  local function give(value)
    write_all(to, cjson.encode(value))
    unistd._exit(0)
  end
  local ok, problem = pcall(fn, give)
  give { error = { message = ok and "it returned no result" or tostring(problem) } }
end

--- Waits for a child process that child.begin started. Returns the value that the process passed to `give`. If the
--- process ended without a value, for example because it was killed, the result contains an error.
---@param running {pid: integer, fd: integer}
---@return table value
function child.finish(running)
  local parts = {}
  while true do
    local text = unistd.read(running.fd, PIECE)
    if not text or text == "" then break end
    parts[#parts + 1] = text
  end
  unistd.close(running.fd)
  local _, how, status = wait.wait(running.pid)
  local text = table.concat(parts)
  if text == "" then
    return { error = { message = ("a dry run ended without a result (%s %s)"):format(tostring(how),
      tostring(status)) } }
  end
  return cjson.decode(text)
end

--- Runs fn(give) in a child process. Returns the value that fn passes to `give`.
---@param fn fun(give: fun(value: table))
---@param quiet boolean
---@return table value
function child.run(fn, quiet) return child.finish(child.begin(fn, quiet)) end

return child
