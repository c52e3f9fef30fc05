-- SPDX-License-Identifier: BSD-3-Clause
-- psluajit on a terminal: a program whose input and output are a pseudo-terminal, which is also its controlling
-- terminal, so that Ctrl-C works as on a real terminal.
local paths = require "ps.paths"
local fcntl, poll = require "posix.fcntl", require "posix.poll"
local signal, stdlib = require "posix.signal", require "posix.stdlib"
local unistd, wait = require "posix.unistd", require "posix.sys.wait"

local lib = {}

---@class spec.Terminal
---@field pid integer
---@field fd integer the descriptor of the terminal's other end
---@field text string everything that the program has printed so far, with line ends as "\n" and without escape
--- sequences
---@field seen integer length of the text up to the last match of `expect`
local Terminal = {}
Terminal.__index = Terminal

--- Starts psluajit on a terminal with these arguments.
---@param args string[]
---@param env? table<string, string>
---@return spec.Terminal
function lib.start(args, env)
  local fd = assert(stdlib.openpt(fcntl.O_RDWR + fcntl.O_NOCTTY))
  assert(stdlib.grantpt(fd))
  assert(stdlib.unlockpt(fd))
  local name = assert(stdlib.ptsname(fd))
  local pid = assert(unistd.fork())
  if pid == 0 then
    unistd.close(fd)
    unistd.setpid("s")
    local slave = fcntl.open(name, fcntl.O_RDWR)            -- becomes the controlling terminal of the new session
    for i = 0, 2 do unistd.dup2(slave, i) end
    if slave > 2 then unistd.close(slave) end
    stdlib.setenv("LUA_INIT", nil)
    stdlib.setenv("TERM", "dumb")
    stdlib.setenv("XDG_STATE_HOME", "/nonexistent")
    stdlib.setenv("OMP_NUM_THREADS", "1")
    for key, value in pairs(env or {}) do stdlib.setenv(key, value) end
    unistd.exec(paths.exe, args)
    unistd._exit(127)
  end
  return setmetatable({ pid = pid, fd = fd, text = "", seen = 0 }, Terminal)
end

--- Waits for more output. Returns false if there was none in time, or if the program has ended.
---@param seconds number
---@return boolean
function Terminal:read(seconds)
  if poll.rpoll(self.fd, math.max(0, math.floor(seconds * 1000))) ~= 1 then return false end
  local bytes = unistd.read(self.fd, 65536)
  if not bytes or bytes == "" then return false end
  self.text = self.text .. bytes:gsub("\27%[[%d;?]*%a", ""):gsub("\r", "")
  return true
end

--- Waits until the program has printed a plain text after the previously expected text. Returns the output before it.
---@param what string
---@param seconds? number the time limit (default 30)
---@return string before
function Terminal:expect(what, seconds)
  local ends = os.time() + (seconds or 30)
  while true do
    local first, last = self.text:find(what, self.seen + 1, true)
    if first then
      local before = self.text:sub(self.seen + 1, first - 1)
      self.seen = last
      return before
    end
    if not self:read(1) and (os.time() >= ends or self:ended()) then
      error(("'%s' did not come behind '%s'"):format(what, self.text:sub(self.seen + 1)), 2)
    end
  end
end

---@param text string
function Terminal:type(text) unistd.write(self.fd, text) end

--- Types Ctrl-C.
function Terminal:interrupt() self:type "\3" end

--- Types a statement that prints something at the prompt. Returns its output.
---@param statement string
---@return string
function Terminal:ask(statement)
  self:type(statement .. "\n")
  self:expect(statement)
  repeat                                                    -- the terminal also echoes input that precedes the prompt
    local said = self:expect "\n> ":gsub("^%s+", "")
    if said:sub(1, #statement + 1) == statement .. "\n" then said = said:sub(#statement + 2) end
    if said ~= "" then return said end
  until false
end

--- Types a statement that prints nothing at the prompt.
---@param statement string
function Terminal:run(statement)
  local said = self:ask(statement .. " print 'ran'")
  if said ~= "ran" then error(said, 2) end
end

--- Reads output for a given time.
---@param seconds number
function Terminal:wait(seconds)
  local clock = require "ps".now
  local ends = clock() + seconds
  while clock() < ends do self:read(ends - clock()) end
end

--- Returns whether the program has ended.
function Terminal:ended()
  if self.status == nil then
    local pid, how, status = wait.wait(self.pid, wait.WNOHANG)
    if pid == self.pid then self.how, self.status = how, status end
  end
  return self.status ~= nil
end

--- Waits for the program's end. Returns its whole output and its status. A program that takes too long is killed.
---@param seconds? number the time limit (default 60)
---@return string text, integer status, string how "exited" or "killed"
function Terminal:finish(seconds)
  local ends = os.time() + (seconds or 60)
  while not self:ended() and os.time() < ends do self:read(0.1) end
  if not self:ended() then
    signal.kill(self.pid, signal.SIGKILL)
    local _, how, status = wait.wait(self.pid)
    self.how, self.status = how, status
  end
  while self:read(0.1) do end
  unistd.close(self.fd)
  return self.text, self.status, self.how
end

return lib
