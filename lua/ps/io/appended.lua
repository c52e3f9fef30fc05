-- SPDX-License-Identifier: BSD-3-Clause
-- A file to which a run appends, such as the run's log or the events of a monitor. A full disk should not end a run.
-- Therefore bytes that cannot be written stay in memory, and each later call of write tries to write these bytes again.
local fcntl = require "posix.fcntl"
local unistd = require "posix.unistd"
local EINTR = require("posix.errno").EINTR

local appended = {}

---@class ps.Appended
---@field path string
---@field private what string kind of the file for error messages, such as "log"
---@field private fd integer
---@field private unwritten string the bytes that are not in the file yet
---@field private problem string? the error of the last write, if it failed
local Appended = {}
Appended.__index = Appended

-- Writes the pending bytes to the file.
local function flush(self)
  self.problem = nil
  while self.unwritten ~= "" do
    local n, why, code = unistd.write(self.fd, self.unwritten)
    if n then
      self.unwritten = self.unwritten:sub(n + 1)
    elseif code ~= EINTR then
      self.problem = why
      return
    end
  end
end

--- Opens a file at its end and writes `first` to it. Raises an error if the file cannot be written.
---@param path string
---@param what string kind of the file for error messages, such as "log"
---@param first? string bytes that are written at once
---@param create? boolean true: creates the file if it does not exist
---@return ps.Appended
function appended.open(path, what, first, create)
  local self = setmetatable({ path = path, what = what, unwritten = first or "" }, Appended)
  local why
  self.fd, why = fcntl.open(path, fcntl.O_WRONLY + fcntl.O_APPEND + fcntl.O_CLOEXEC + (create and fcntl.O_CREAT or 0),
    420)                                                   -- mode 0644
  if self.fd then flush(self) end
  if not self.fd or self.problem then
    local problem = self.problem or why
    if self.fd then unistd.close(self.fd) end
    error(("cannot write the %s %s: %s"):format(what, path, (problem:gsub("^.*: ", ""))), 0)
  end
  return self
end

--- Appends text to the file. If a write fails, the text is kept for the next write.
---@param text string
---@return string? problem the error if this write failed; nil if the previous write failed too, because its error was
--- already returned
function Appended:write(text)
  local failed = self.problem ~= nil
  self.unwritten = self.unwritten .. text
  flush(self)
  if self.problem and not failed then
    return ("cannot write the %s %s: %s; the missing part is kept and tried again after each step"):format(self.what,
      self.path, self.problem)
  end
end

--- Closes the file. A second call does nothing.
---@return string? problem a text that says how many lines or bytes were lost, and why; nil if the file is complete
function Appended:close()
  if not self.fd then return nil end
  flush(self)
  local closed, why = unistd.close(self.fd)                -- NFS and quotas may report a full disk only now
  self.fd = nil
  if self.unwritten == "" and closed then return nil end
  local _, lines = self.unwritten:gsub("\n", "")
  local lost = lines > 0 and self.unwritten:find "^[^%z]*$" and ("%d lines"):format(lines)
    or ("%d bytes"):format(#self.unwritten)
  return ("the %s %s lacks its last %s: %s"):format(self.what, self.path, lost, self.problem or why)
end

return appended
