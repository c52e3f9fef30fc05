-- SPDX-License-Identifier: BSD-3-Clause
-- Shows the progress of a run. If the output is a terminal, draws a bar. Otherwise prints lines at regular intervals.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local exact = require "ps.core.exact"
local C = native.C

---@class ps.Progress
local Progress = {}
Progress.__index = Progress

local progress = {}

--- Formats a time: 95 -> "1:35", 3700 -> "1:01:40".
---@param seconds number
---@return string
function progress.clock(seconds)
  if seconds ~= seconds or seconds > 1e7 then return "?" end
  local s = math.floor(seconds + 0.5)
  if s >= 3600 then return ("%d:%02d:%02d"):format(s / 3600, s / 60 % 60, s % 60) end
  return ("%d:%02d"):format(s / 60, s % 60)
end

--- Formats a count: 1234 -> "1,234".
---@param n number
---@return string
function progress.count(n)
  local text = ("%.0f"):format(n)
  local sign, digits = text:match("^(-?)(%d+)$")
  if not digits then return text end
  local first = #digits % 3
  local parts = first > 0 and { digits:sub(1, first) } or {}
  for i = first + 1, #digits, 3 do parts[#parts + 1] = digits:sub(i, i + 2) end
  return sign .. table.concat(parts, ",")
end

local OPTIONS = { total = "number", start = "number", every = "number", quiet = "boolean" }

--- Creates a display of a run's progress.
---@param options {total: integer, start?: integer, every?: number, quiet?: boolean} total: number of steps of the run.
---  start: number of completed steps (default 0). every: seconds between two lines (default 10). quiet = true: shows
---  nothing
---@return ps.Progress
function progress.new(options)
  options = caller.options(options, "ps.progress.new", OPTIONS)
  caller.typed(options.total, "number", "ps.progress.new: total")
  return setmetatable({
    total = options.total, first = options.start or 0, quiet = options.quiet, every = options.every or 10,
    bar = not options.quiet and C.ps_is_terminal(1) ~= 0, began = C.ps_now(), shown = -math.huge, drawn = false,
  }, Progress)
end

local function describe(self, step, values)
  local parts = {}
  if values.loss then parts[#parts + 1] = ("loss %.4f"):format(values.loss) end
  if values.accuracy then parts[#parts + 1] = ("acc %.4f"):format(values.accuracy) end
  if values.val_loss then parts[#parts + 1] = ("val %.4f"):format(values.val_loss) end
  if values.tokens_per_s then parts[#parts + 1] = progress.count(values.tokens_per_s) .. " tok/s" end
  local done = step - self.first
  if done > 0 then
    parts[#parts + 1] = "ETA " .. progress.clock((C.ps_now() - self.began) / done * (self.total - step))
  end
  return table.concat(parts, "  ")
end

local function draw_bar(self, step, values)
  local text = (" %d/%d  %s"):format(step, self.total, describe(self, step, values))
  local room = C.ps_terminal_columns(1) - #text - 4
  local bar = ""
  if room >= 8 then
    local width = math.min(room, 40)
    local full = math.floor(width * step / math.max(1, self.total))
    bar = "[" .. ("#"):rep(full) .. ("."):rep(width - full) .. "]"
  end
  io.stdout:write("\r\27[K", bar, text)
  io.stdout:flush()
  self.drawn = true
end

--- Shows that `step` steps are completed. Draws the bar at most ten times per second. Without a bar, prints a line
--- every `every` seconds.
---@param step integer
---@param values {loss?: number, accuracy?: number, val_loss?: number, tokens_per_s?: number}
function Progress:update(step, values)
  if self.quiet then return end
  local now = C.ps_now()
  local last = step >= self.total
  if self.bar then
    if now - self.shown < 0.1 and not last then return end
    draw_bar(self, step, values)
  else
    if now - self.shown < self.every and not last then return end
    io.stdout:write(("step %d/%d  %s\n"):format(step, self.total, describe(self, step, values)))
    io.stdout:flush()
  end
  self.shown = now
end

--- Prints a line of text, unless the display is quiet. The bar is drawn again below the line.
---@param text string
function Progress:note(text)
  if self.quiet then return end
  io.stdout:write(self.drawn and "\r\27[K" or "", text, "\n")
  io.stdout:flush()
  self.drawn = false
  if self.bar then self.shown = -math.huge end
end

--- Prints a warning to stderr, even if the display is quiet.
---@param text string
function Progress:warn(text)
  self:finish()
  io.stderr:write("psluajit: ", text, "\n")
end

--- Ends the line of the bar, so that later output begins on a new line.
function Progress:finish()
  if self.drawn then io.stdout:write("\n") end
  io.stdout:flush()
  self.drawn = false
end

exact.all(Progress, "display:", true)

return progress
