-- SPDX-License-Identifier: BSD-3-Clause
-- A file that a run appends to: its log, or the events of a monitor. Bytes that cannot be written stay in memory and
-- are tried again at each later write, since a full disk should not end a run.
local fcntl = require "posix.fcntl"
local unistd = require "posix.unistd"
local EINTR = require("posix.errno").EINTR

local appended = {}

---@class ps.Appended
---@field path string
---@field private what string kind of the file for messages, such as "log"
---@field private fd integer
---@field private unwritten string bytes that are not yet in the file
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

--- Opens a file at its end, and writes its first bytes. Raises an error if the file cannot be written.
---@param path string
---@param what string kind of the file for messages, such as "log"
---@param first? string
---@param create? boolean whether to create a missing file
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

--- Adds lines or bytes.
---@param text string
---@return string? problem the error of the first write that fails; nil on success, and for further consecutive failures
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
---@return string? problem the bytes that were lost, and the reason
function Appended:close()
  if not self.fd then return nil end
  flush(self)
  local closed, why = unistd.close(self.fd)                -- NFS and quotas may report only now that there is no space
  self.fd = nil
  if self.unwritten == "" and closed then return nil end
  local _, lines = self.unwritten:gsub("\n", "")
  local lost = lines > 0 and self.unwritten:find "^[^%z]*$" and ("%d lines"):format(lines)
    or ("%d bytes"):format(#self.unwritten)
  return ("the %s %s lacks its last %s: %s"):format(self.what, self.path, lost, self.problem or why)
end

return appended
