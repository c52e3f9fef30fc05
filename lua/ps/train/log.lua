-- SPDX-License-Identifier: BSD-3-Clause
-- The logs of ps.train.run: a CSV file if the run has the option `log`, and a JSONL file for every run that has a
-- folder. Both get one line per step. A resumed run keeps only the lines up to its start. The shortened file replaces
-- the old file after it is complete, so that a crash loses no lines.
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
---@field private map_due integer? time at which the next chunk map is due, in seconds since 1970
local Log = {}
Log.__index = Log

---@class ps.TrainLine the numbers of a step in a log
---@field step integer
---@field loss? number mean loss over the targets of all ranks
---@field accuracy? number fraction of all ranks' targets that have the largest logit; absent if no op of the loss
--- counts them
---@field lr number learning rate of the step
---@field grad_norm? number
---@field loss_scale? number
---@field tokens integer number of tokens on all ranks since the start of this process
---@field tokens_per_s number
---@field val_loss? number the held-out loss, if the step had an evaluation
---@field val_accuracy? number the accuracy of the evaluation
---@field skipped boolean whether the step was skipped because gradients overflowed

-- Returns the lines of a file up to `step`. `step_of` returns the step of a line. `renew` converts a line of an older
-- version to the current form.
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

-- Opens one of the logs and keeps its lines up to `step`. Returns these lines.
local function open(path, what, step, header, step_of, renew)
  local kind, kept, first = lfs.attributes(path, "mode"), {}, nil
  if kind == nil or kind == "file" then
    kept = lines_until(path, step, step_of, renew)
    local text = header .. table.concat(kept)
    native.check(native.C.ps_file_write_atomic(path, text, #text))
  else                                                     -- devices and pipes have no earlier lines
    first = header
  end
  return appended.open(path, what, first), kept
end

local CSV_LINE = "^(%d+),([^,]*),[^,]*,[^,]*,[^,]*,([^,]*),([^,]*),([^,]*)\n$"
local OLD_LINE = "^%d+,[^,]*,[^,]*,[^,]*,[^,]*,[^,]*\n$"      -- a line of an older version, which did not log
                                                              -- accuracies

local function widened(line) return line:match(OLD_LINE) and (line:gsub("\n$", ",,\n")) or line end

-- Returns the path of the JSONL file. The file is next to the CSV file and has the same name. Without a CSV file, it is
-- in the folder of the checkpoints. Returns nil if the run has no folder.
local function jsonl_path(csv, out)
  if csv then
    local kind = lfs.attributes(csv, "mode")
    if kind == nil or kind == "file" then return (csv:gsub("%.csv$", "")) .. ".jsonl" end
  end
  return out and out .. "/log.jsonl"
end

--- Opens the logs of a run that continues after `step`, which is 0 for a new run. Raises an error if a log cannot be
--- written.
---@param csv? string path of the CSV file
---@param out? string the run's folder, which is created if it is missing
---@param step integer
---@return ps.TrainLog? log nil if the run has neither
---@return {step: integer, loss: number?, val_loss: number?, accuracy: number?, val_accuracy: number?}[] history the
--- values of the CSV file's lines
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

-- Converts a number to JSON. Infinity and NaN, which JSON lacks, become null.
local function number(value)
  if not value or value ~= value or math.abs(value) == math.huge then return "null" end
  return ("%.9g"):format(value)
end

-- Returns `"tiers":{"host":{"budget":...,"chunks":...,...}}` for the open engine's chunks, or "" if there are none.
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

-- Seconds between two chunk maps in a log. A map of thousands of chunks takes a long time, so not every line has one.
local MAP_S = 5
local LETTERS = { device = "d", host = "h", disk = "k" }

-- Returns a text such as `"map":{"param":"2d14h"}`, or "" if there are no chunks. For each kind of chunk, the text has
-- runs of consecutive chunks, with the number of chunks and a letter. The letter is the fastest tier of these chunks:
-- device (d), host (h), disk (k), or no tier (n).
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
---@return string? problem The reason, if writing fails for the first time. nil if writing works, and for later
---  failures.
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
---@return string? problem The number of lines that were lost, and the reason.
function Log:close()
  local lost = {}
  for _, name in ipairs { "csv", "jsonl" } do
    lost[#lost + 1] = self[name] and self[name]:close() or nil
  end
  return lost[1] and table.concat(lost, "; ") or nil
end

return train_log
