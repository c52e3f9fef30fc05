-- SPDX-License-Identifier: BSD-3-Clause
-- The logs of ps.train.run: a CSV file if the run has the option `log`, and a JSONL file if the run has the option
-- `log` or a folder of checkpoints. Each step adds one line to both files. When a run resumes after step n, only the
-- lines of steps up to n are kept. They are written to a new file, which replaces the old file when it is complete, so
-- that a crash loses no lines.
local native = require "ps.core.ffi"
local appended = require "ps.io.appended"
local folder = require "ps.checkpoints.folder"
local lfs = require "lfs"
local read_file = require "ps.core.read_file"
local chunks = require "ps.memory.chunks"
local time = require "posix.time"

local train_log = {}

local HEADER = "step,loss,lr,grad_norm,tokens_per_s,val_loss,accuracy,val_accuracy\n"

---@class ps.TrainLog
---@field private csv ps.Appended?
---@field private jsonl ps.Appended?
---@field private map_due integer? time in seconds since 1970 from which the next line contains a chunk map
local Log = {}
Log.__index = Log

---@class ps.TrainLine the numbers of a step in a log
---@field step integer
---@field loss? number mean loss over the targets of all ranks
---@field accuracy? number fraction of the targets of all ranks that have the largest logit; nil if no op of the loss
--- counts correct predictions
---@field lr number learning rate of the step
---@field grad_norm? number
---@field loss_scale? number
---@field tokens integer number of tokens that all ranks have processed since this process began
---@field tokens_per_s number
---@field val_loss? number the held-out loss; nil if there was no evaluation after this step
---@field val_accuracy? number the accuracy on the held-out data
---@field skipped boolean whether the step was skipped because gradients overflowed

-- Returns the lines of a file that belong to steps up to `step`. step_of(line) returns the step of a line. renew(line)
-- converts a line that an older version has written to the current form.
local function lines_until(path, step, step_of, renew)
  local kept = {}
  if step == 0 then return kept end
  local old, why, absent = read_file(path)
  if absent then return kept end
  if not old then error(("cannot continue the log %s"):format(why), 0) end
  for line in old:gmatch "[^\n]*\n" do
    if renew then line = renew(line) end
    local at = tonumber(step_of(line))
    if at and at <= step then kept[#kept + 1] = line end
  end
  return kept
end

-- Opens one of the logs. Keeps the lines of steps up to `step`, and returns these lines.
local function open(path, what, step, header, step_of, renew)
  local kind, kept, first = lfs.attributes(path, "mode"), {}, nil
  if kind == nil or kind == "file" then
    kept = lines_until(path, step, step_of, renew)
    local text = header .. table.concat(kept)
    native.check(native.C.ps_file_write_atomic(path, text, #text))
  else                                                     -- a device or a pipe contains no earlier lines
    first = header
  end
  return appended.open(path, what, first), kept
end

local CSV_LINE = "^(%d+),([^,]*),[^,]*,[^,]*,[^,]*,([^,]*),([^,]*),([^,]*)\n$"
local OLD_LINE = "^%d+,[^,]*,[^,]*,[^,]*,[^,]*,[^,]*\n$"      -- older versions wrote lines without accuracies

local function widened(line) return line:match(OLD_LINE) and (line:gsub("\n$", ",,\n")) or line end

-- Returns the path of the JSONL file. It is in the same folder as the CSV file and has the same name, with the
-- extension .jsonl. If the run has no CSV file, the JSONL file is in the run's folder. Returns nil if the run has no
-- folder.
local function jsonl_path(csv, out)
  if csv then
    local kind = lfs.attributes(csv, "mode")
    if kind == nil or kind == "file" then return (csv:gsub("%.csv$", "")) .. ".jsonl" end
  end
  return out and out .. "/log.jsonl"
end

--- Opens the logs of a run. Raises an error if a log cannot be written.
---@param csv? string path of the CSV file
---@param out? string folder of the run, which is created if it does not exist
---@param step integer number of steps that the run has already completed; 0 for a new run
---@return ps.TrainLog? log nil if the run has neither a CSV file nor a folder
---@return {step: integer, loss: number?, val_loss: number?, accuracy: number?, val_accuracy: number?}[] history the
--- values in the lines of the CSV file
function train_log.open(csv, out, step)
  local self, history = setmetatable({}, Log), {}
  local jsonl = jsonl_path(csv, out)
  if not csv and not jsonl then return nil, history end
  if csv then
    local kept
    self.csv, kept = open(csv, "log", step, HEADER, function(line) return (line:match(CSV_LINE)) end, widened)
    for i, line in ipairs(kept) do
      local at, loss, val, hit, val_hit = line:match(CSV_LINE)
      history[i] = { step = tonumber(at), loss = tonumber(loss), val_loss = tonumber(val), accuracy = tonumber(hit),
        val_accuracy = tonumber(val_hit) }
    end
  end
  local ok, problem = pcall(function()
    if not jsonl then return end
    if out and not csv then folder.make(out) end
    self.jsonl = open(jsonl, "log", step, "", function(line) return line:match '^{"step":(%d+),.*}\n$' end)
  end)
  if not ok then
    self:close()
    error(problem, 0)
  end
  return self, history
end

local function cell(value, format) return value and format:format(value) or "" end

-- Converts a number to JSON. Infinities and NaN become null, because JSON cannot represent them.
local function number(value)
  if not value or value ~= value or math.abs(value) == math.huge then return "null" end
  return ("%.9g"):format(value)
end

-- Returns the field "tiers" of a log line as JSON text: `,"tiers":{"host":{"budget":...,"chunks":...,...}}`. Returns ""
-- if no engine with chunks is open.
local function tiers_text()
  local list = {}
  for i, tier in ipairs(chunks.tiers() or {}) do
    local parts = {}
    for k, key in ipairs { "budget", "chunks", "other", "peak", "bytes_up", "bytes_down" } do
      parts[k] = ('"%s":%.0f'):format(key, tier[key])
    end
    list[i] = ('"%s":{%s}'):format(tier.name, table.concat(parts, ","))
  end
  return list[1] and (',"tiers":{%s}'):format(table.concat(list, ",")) or ""
end

-- Seconds between two lines that contain a chunk map. Making a map of thousands of chunks takes long, so not every line
-- contains a map.
local MAP_S = 5
local LETTERS = { device = "d", host = "h", disk = "k" }

-- Returns the field "map" of a log line as JSON text, such as `,"map":{"param":"2d14h"}`. Returns "" if there are no
-- chunks. For each kind of chunk, the map lists runs of consecutive chunks that have the same fastest tier. A run is
-- written as the number of its chunks and a letter for the tier: d (device), h (host), k (disk), or n (no tier).
local function map_text()
  local kinds, runs = {}, {}
  for _, chunk in ipairs(chunks.chunks()) do
    local letter = "n"
    for _, tier in ipairs { "device", "host", "disk" } do
      if chunk.tiers[tier] then
        letter = LETTERS[tier]
        break
      end
    end
    local list = runs[chunk.kind]
    if not list then
      list = {}
      kinds[#kinds + 1], runs[chunk.kind] = chunk.kind, list
    end
    local last = list[#list]
    if last and last.letter == letter then last.n = last.n + 1 else list[#list + 1] = { letter = letter, n = 1 } end
  end
  local parts = {}
  for i, kind in ipairs(kinds) do
    local words = {}
    for k, run in ipairs(runs[kind]) do words[k] = run.n .. run.letter end
    parts[i] = ('"%s":"%s"'):format(kind, table.concat(words))
  end
  return parts[1] and (',"map":{%s}'):format(table.concat(parts, ",")) or ""
end

local JSON_KEYS = { "loss", "accuracy", "lr", "grad_norm", "loss_scale", "val_loss", "val_accuracy", "tokens",
  "tokens_per_s" }

local function json_line(self, line)
  local now = time.clock_gettime(time.CLOCK_REALTIME)
  local parts = { ('{"step":%d,"time":%.3f'):format(line.step, now.tv_sec + now.tv_nsec / 1e9) }
  for _, key in ipairs(JSON_KEYS) do
    if line[key] then parts[#parts + 1] = (',"%s":%s'):format(key, number(line[key])) end
  end
  local map = ""
  if now.tv_sec >= (self.map_due or 0) then map, self.map_due = map_text(), now.tv_sec + MAP_S end
  return ('%s,"skipped":%s%s%s}\n'):format(table.concat(parts), tostring(line.skipped), tiers_text(), map)
end

--- Appends the line of a step.
---@param line ps.TrainLine
---@return string? problem The error if this write failed and the previous write did not. Otherwise nil.
function Log:write(line)
  local problem, other
  if self.csv then
    problem = self.csv:write(("%d,%s,%.6g,%s,%.0f,%s,%s,%s\n"):format(line.step, cell(line.loss, "%.6f"), line.lr,
      cell(line.grad_norm, "%.5g"), line.tokens_per_s, cell(line.val_loss, "%.6f"), cell(line.accuracy, "%.6f"),
      cell(line.val_accuracy, "%.6f")))
  end
  if self.jsonl then other = self.jsonl:write(json_line(self, line)) end
  return problem or other
end

--- Closes the files.
---@return string? problem A text that says how many lines were lost, and why. nil if no lines were lost.
function Log:close()
  local lost = {}
  for _, name in ipairs { "csv", "jsonl" } do
    lost[#lost + 1] = self[name] and self[name]:close() or nil
  end
  return lost[1] and table.concat(lost, "; ") or nil
end

return train_log
