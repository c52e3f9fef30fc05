-- SPDX-License-Identifier: BSD-3-Clause
-- BMTrain's helpers for training scripts. They print texts and compute running averages.
local devices = require "ps.core.devices"
local views = require "ps.memory.views"
local caller = require "ps.core.caller"
local dist = require "ps.dist"

local utils = {}

local WIDTH = 60                                 -- width of a printed block in columns

--- Prints a line of 60 columns that contains the title between "=" signs. Then prints the text `content`, if
--- it is given.
---@param title string
---@param content? string
function utils.print_block(title, content)
  caller.typed(title, "string", "bmt.print_block: the title")
  local room = math.max(0, WIDTH - #title - 2)
  local left = math.floor(room / 2)
  print(("="):rep(left) .. " " .. title .. " " .. ("="):rep(room - left))
  if content ~= nil then print(content) end
  io.stdout:flush()
end

--- Prints a title. Then prints the entries of a table, sorted by name.
---@param title string
---@param content table<any, any>
function utils.print_dict(title, content)
  caller.typed(content, "table", "bmt.print_dict: its table")
  local rows, widest, lines = {}, 0, {}
  for name, value in pairs(content) do
    rows[#rows + 1] = { tostring(name), tostring(value) }
    widest = math.max(widest, #tostring(name))
  end
  table.sort(rows, function(a, b) return a[1] < b[1] end)
  for i, row in ipairs(rows) do lines[i] = ("%s :%s%s"):format(row[1], (" "):rep(widest - #row[1] + 1), row[2]) end
  utils.print_block(title, table.concat(lines, "\n"))
end

--- On rank 0, prints a message and the memory in use (ps.memory). Resets the peak of the memory in use.
---@param message string
function utils.see_memory(message)
  if dist.rank() == 0 then
    print(tostring(message) .. "\n" .. tostring(views.memory()))
    io.stdout:flush()
  end
  devices.reset_peak()
end

---@class ps.bmt.AverageRecorder
---@field value number the average; before the first record, it is start_value
---@field alpha number the decay factor
local AverageRecorder = {}
local Recorder = { __index = function(self, key)
  if key ~= "value" then return AverageRecorder[key] end
  local sum, steps = rawget(self, "sum"), rawget(self, "steps")
  return steps == 0 and sum or sum / (1 - self.alpha ^ steps)
end }

--- Adds a value v. The sum becomes alpha * sum + (1 - alpha) * v. The average is sum / (1 - alpha^records).
---@param v number
function AverageRecorder:record(v)
  self.sum = self.sum * self.alpha + v * (1 - self.alpha)
  self.steps = self.steps + 1
end

--- Creates a running average in which the weight of a record decays exponentially. Use recorder:record(v) and
--- recorder.value.
---@param alpha? number the decay factor (default 0.9)
---@param start_value? number the initial average (default 0)
---@return ps.bmt.AverageRecorder
function utils.AverageRecorder(alpha, start_value)
  alpha = alpha or 0.9
  if not (type(alpha) == "number" and alpha >= 0 and alpha < 1) then
    caller.error(("bmt.utils.AverageRecorder: alpha is %s; it must be a number from 0 to below 1"):format(
      tostring(alpha)))
  end
  return setmetatable({ alpha = alpha, sum = start_value or 0, steps = 0 }, Recorder)
end

return utils
