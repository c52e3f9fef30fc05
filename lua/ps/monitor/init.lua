-- SPDX-License-Identifier: BSD-3-Clause
-- Monitors of an engine, modelled on DeepSpeed's. The monitor `tensorboard` writes event files, and the monitor
-- `csv_monitor` writes a CSV file for each tag. Both monitors write to the folder output_path/job_name, and their tags
-- have the same names as in DeepSpeed. The x value of an event is the number of samples on which all ranks have
-- trained: steps * train_batch_size. Only rank 0 writes files.
--
-- A resumed run adds rows to the CSV files of the run. For TensorBoard, it begins a new event file, which contains the
-- step at which the resumed run begins.
local appended = require "ps.io.appended"
local folder = require "ps.checkpoints.folder"
local lfs = require "lfs"
local tfevents = require "ps.monitor.tfevents"
local time = require "posix.time"
local unistd = require "posix.unistd"
local utsname = require "posix.sys.utsname"

local monitor = {}

---@class ps.Monitor
---@field private batch integer number of samples per step
---@field private sinks table[] the sinks, each with a method write(seconds, x, list)
---@field private said table<string, boolean> the warnings that were already printed
---@field private warn fun(text: string)
local Monitor = {}
Monitor.__index = Monitor

local function now()
  local t = time.clock_gettime(time.CLOCK_REALTIME)
  return t.tv_sec + t.tv_nsec / 1e9
end

-- Returns the folder of a section of the configuration. Creates the folder if it does not exist.
local function folder_of(section)
  local path = (section.output_path ~= "" and section.output_path:gsub("/*$", "/") or "") .. section.job_name
  folder.make(path)
  return path
end

-- -- event files ------------------------------------------------------------------------------------------------------
local Events = {}
Events.__index = Events

local files = 0  -- number of event files that this process has opened; it is part of a file's name

local function open_events(section)
  local seconds = now()
  local name = ("events.out.tfevents.%010d.%s.%d.%06d"):format(math.floor(seconds), utsname.uname().nodename,
    unistd.getpid(), files)
  files = files + 1
  local file = appended.open(folder_of(section) .. "/" .. name, "event file", tfevents.version(seconds), true)
  return setmetatable({ file = file, begun = false }, Events)
end

function Events:write(seconds, x, list)
  local start = self.begun and "" or tfevents.start(seconds, x)
  self.begun = true
  return self.file:write(start .. tfevents.scalars(seconds, x, list))
end

function Events:close() return self.file:close() end

-- -- CSV files --------------------------------------------------------------------------------------------------------
local Csv = {}
Csv.__index = Csv

local function open_csv(section)
  return setmetatable({ folder = folder_of(section), files = {}, waiting = {} }, Csv)
end

-- Appends text to the file of a tag. If the file cannot be opened, the text is kept, and later calls try again.
function Csv:add(tag, text)
  local path = ("%s/%s.csv"):format(self.folder, (tag:gsub("[/ ]", "_")))          -- DeepSpeed's name for the file
  if not self.files[tag] then
    local ok, file = pcall(appended.open, path, "monitor's file", nil, true)
    if not ok then
      self.waiting[tag] = (self.waiting[tag] or "") .. text
      return file
    end
    self.files[tag] = file
    local header = lfs.attributes(path, "size") == 0 and ("step,%s\n"):format(tag:match "[^/]*$") or ""
    text = header .. (self.waiting[tag] or "") .. text
    self.waiting[tag] = nil
  end
  return self.files[tag]:write(text)
end

function Csv:write(_, x, list)
  local problem
  for _, row in ipairs(list) do
    local other = self:add(row[1], ("%d,%.9g\n"):format(x, row[2]))
    problem = problem or other
  end
  return problem
end

function Csv:close()
  local lost = {}
  for tag in pairs(self.waiting) do lost[#lost + 1] = self:add(tag, "") end
  for _, file in pairs(self.files) do lost[#lost + 1] = file:close() end
  table.sort(lost)
  return lost[1] and table.concat(lost, "; ")
end

-- -- both -------------------------------------------------------------------------------------------------------------
local OPEN = { tensorboard = open_events, csv_monitor = open_csv }

--- Opens the monitors that a configuration enables. Returns nil if it enables none. Raises an error if a file cannot be
--- created, or if the number of samples per step is unknown.
---@param cfg ps.Config
---@param writes boolean whether this process writes the files
---@param warn fun(text: string) called with a warning if writing fails later
---@return ps.Monitor?
function monitor.new(cfg, writes, warn)
  local self = setmetatable({ batch = cfg.train_batch_size, sinks = {}, said = {}, warn = warn }, Monitor)
  local any = false
  for _, name in ipairs { "tensorboard", "csv_monitor" } do
    local section = cfg[name]
    if section.enabled then
      any = true
      if not self.batch then
        error(("%s.enabled needs the number of samples per step: set train_batch_size or "
          .. "train_micro_batch_size_per_gpu"):format(name), 0)
      end
      if writes then self.sinks[#self.sinks + 1] = OPEN[name](section) end
    end
  end
  return any and self or nil
end

--- Writes the events of a step.
---@param steps integer number of completed steps
---@param list {[1]: string, [2]: number}[] pairs of a tag and its value
function Monitor:write(steps, list)
  local seconds = now()
  for _, sink in ipairs(self.sinks) do
    local problem = sink:write(seconds, steps * self.batch, list)
    if problem and not self.said[problem] then
      self.said[problem] = true
      self.warn(problem)
    end
  end
end

--- Closes the files.
function Monitor:close()
  for _, sink in ipairs(self.sinks) do
    local problem = sink:close()
    if problem then self.warn(problem) end
  end
  self.sinks = {}
end

return monitor
