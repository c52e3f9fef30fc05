-- SPDX-License-Identifier: BSD-3-Clause
-- The log of ps.train.run: a CSV file with a line for each step. A resumed run keeps the lines up to its start. The
-- shorter file replaces the old one only when it is complete, so that a crash loses no line. A line that the disk does
-- not take stays in memory and is tried again with each later one, since no run should end for its log.
local ps = require "ps"
local fcntl = require "posix.fcntl"
local lfs = require "lfs"
local unistd = require "posix.unistd"
local EINTR = require("posix.errno").EINTR

local train_log = {}

local HEADER = "step,loss,lr,grad_norm,tokens_per_s,val_loss\n"

---@class ps.TrainLog
---@field path string
---@field private fd integer
---@field private unwritten string text that the file has not taken yet
---@field private problem string? why not
local Log = {}
Log.__index = Log

-- The whole lines of steps up to `step`, and their values.
local function lines_until(path, step)
  local kept, history = {}, {}
  local old = step > 0 and io.open(path, "rb")
  if not old then return kept, history end
  for line in old:read("*a"):gmatch "[^\n]*\n" do
    local at, loss, val = line:match("^(%d+),([^,]*),[^,]*,[^,]*,[^,]*,([^,]*)\n$")
    if at and tonumber(at) <= step then
      kept[#kept + 1] = line
      history[#history + 1] = { step = tonumber(at), loss = tonumber(loss), val_loss = tonumber(val) }
    end
  end
  old:close()
  return kept, history
end

-- Hands the unwritten text to the file.
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

--- Opens the log of a run that goes on after `step` (0: a new one). An error where it cannot be written.
---@param path string
---@param step integer
---@return ps.TrainLog
---@return {step: integer, loss: number?, val_loss: number?}[] history the values of the file's lines
function train_log.open(path, step)
  local self = setmetatable({ path = path, unwritten = "" }, Log)
  local kind = lfs.attributes(path, "mode")
  local history = {}
  if kind == nil or kind == "file" then
    local kept
    kept, history = lines_until(path, step)
    local text = HEADER .. table.concat(kept)
    ps.check(ps.C.ps_file_write_atomic(path, text, #text))
  else                                                     -- a device or pipe has no lines to keep
    self.unwritten = HEADER
  end
  local why
  self.fd, why = fcntl.open(path, fcntl.O_WRONLY + fcntl.O_APPEND + fcntl.O_CLOEXEC)
  if self.fd then flush(self) end
  if not self.fd or self.problem then
    local problem = self.problem or why
    if self.fd then unistd.close(self.fd) end
    error(("cannot write the log %s: %s"):format(path, (problem:gsub("^.*: ", ""))), 0)
  end
  return self, history
end

--- Adds a line.
---@param line string with its end
---@return string? problem when the file stops to take lines; nil while it takes them, and while it still does not
function Log:write(line)
  local failed = self.problem ~= nil
  self.unwritten = self.unwritten .. line
  flush(self)
  if self.problem and not failed then
    return ("cannot write the log %s: %s; its lines are kept and tried again after each step"):format(self.path,
      self.problem)
  end
end

--- Closes the file.
---@return string? problem that lines were lost, and why
function Log:close()
  flush(self)
  local closed, why = unistd.close(self.fd)                -- NFS and quotas may say only now that there is no room
  if self.unwritten == "" and closed then return nil end
  local _, lines = self.unwritten:gsub("\n", "")
  return ("the log %s lacks its last %d lines: %s"):format(self.path, lines, self.problem or why)
end

return train_log
