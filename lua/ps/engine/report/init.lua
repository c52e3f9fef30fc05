-- SPDX-License-Identifier: BSD-3-Clause
-- Writes a line every `steps_per_print` steps. The line contains the loss, the accuracy, the learning rate, the loss
-- scale, the seconds per step, and the number of bytes moved between tiers. Rank 0 writes the line. Its loss is the
-- mean over all ranks. Accuracy is the fraction of positions in which the target has the largest logit. It is reported
-- if an op of the loss counts hits (docs/monitoring.md). wall_clock_breakdown adds the seconds of forward, backward and
-- step. It also adds PatrickStar's two speeds: operations per second of this process, and samples per second of all
-- processes. memory_breakdown adds lines about memory.
--
-- The numbers of each step are also sent to the monitors (ps.monitor). flops_profiler reports the costs of one step,
-- and comms_logger counts the calls between ranks. An engine without any of these settings has no report.
local loss_weight = require "ps.core.loss_weight"
local native = require "ps.core.ffi"
local views = require "ps.memory.views"
local readable = require "ps.core.readable"
local chunks = require "ps.memory.chunks"
local comms_summary = require "ps.profile.comms_summary"
local flops_profiler = require "ps.engine.report.flops_profiler"
local monitor = require "ps.monitor"
local C = native.C

local report = {}

local EVERY = 10              -- number of steps per line if a breakdown is enabled but steps_per_print is not set
local HELD = 10               -- number of tensors at the peak that memory_breakdown lists
local PARTS = { "forward", "backward", "step" }

---@class ps.engine.Report
---@field every number number of steps per line, or math.huge if no lines are written
---@field monitor? ps.Monitor
---@field breakdown boolean
---@field memory boolean true if lines about memory are written
---@field profiler? ps.engine.FlopsProfiler
---@field writes boolean true if this process writes the lines
---@field calls boolean true if calls between ranks are counted
---@field last? string the last line
local Report = {}
Report.__index = Report

-- Returns two numbers: how many bytes have been fetched and how many have been evicted between all tiers since the
-- engine was opened.
local function moved()
  local up, down = 0, 0
  for _, tier in ipairs(chunks.tiers() or {}) do up, down = up + tier.bytes_up, down + tier.bytes_down end
  return up, down
end

local function restart(self)
  self.steps, self.skipped, self.began = 0, 0, C.ps_now()
  self.up, self.down = moved()
  self.flops = tonumber(C.ps_flops_counted())
  self.seconds, self.told = { forward = 0, backward = 0, step = 0 }, nil
end

--- Creates a report, or returns nil if the configuration requests neither lines nor monitors.
---@param engine ps.Engine
---@return ps.engine.Report?
function report.new(engine)
  local cfg = engine.cfg
  local every = cfg.steps_per_print or (cfg.wall_clock_breakdown or cfg.memory_breakdown) and EVERY or nil
  if every == 0 then every = nil end
  local ranks = engine.ranks                   -- all ranks take part in sums of losses, even if they are quiet
  local first = not ranks or ranks.world:rank() == 0
  local monitors = monitor.new(cfg, first, function(text) io.stderr:write("psluajit: ", text, "\n") end)
  local profiler = first and flops_profiler.new(engine) or nil
  local logged = cfg.comms_logger.enabled
  if not monitors and not profiler and not logged and (not every or engine.quiet and not ranks) then return nil end
  if logged then comms_summary.begin(cfg.comms_logger, first and not engine.quiet) end
  if cfg.wall_clock_breakdown then C.ps_flops_count(1) end
  local scored = every ~= nil or monitors ~= nil
  return setmetatable({ engine = engine, unwatch = scored and loss_weight.watch(true) or nil,
    every = every or math.huge, writes = not engine.quiet and first,
    breakdown = cfg.wall_clock_breakdown, memory = cfg.memory_breakdown, monitor = monitors, profiler = profiler,
    calls = logged, loss = 0, weight = 0, hits = 0, targets = 0 }, Report)
end

local function add(self, part, began, ...)
  self.seconds[part] = self.seconds[part] + C.ps_now() - began
  return ...
end

--- Calls fn(...) and adds the elapsed seconds to the time of a part of the step.
---@param part "forward"|"backward"|"step"
function Report:timed(part, fn, ...)
  if not self.seconds then restart(self) end
  return add(self, part, C.ps_now(), fn(...))
end

--- Adds seconds that C has measured to the time of a part of the step.
---@param part "forward"|"backward"|"step"
---@param seconds number
function Report:took(part, seconds)
  if not self.seconds then restart(self) end
  self.seconds[part] = self.seconds[part] + seconds
end

-- Returns true if a line is written for the step with this number.
local function has_line(self, number) return self.every < math.huge and number % self.every == 0 end

--- Adds the loss of a micro-batch, multiplied by its weight. Reads the value of the loss only if a line or events are
--- written for the step.
---@param loss ps.Tensor
---@param weight number
function Report:take_loss(loss, weight)
  if weight == 0 or not self.monitor and not has_line(self, self.engine.steps + 1) then return end
  self.loss, self.weight = self.loss + loss:item() * weight, self.weight + weight
end

--- Returns true if the accuracy of the current step is written in a line or in events.
---@return boolean
function Report:scores() return self.monitor ~= nil or has_line(self, self.engine.steps + 1) end

--- Adds the targets of a micro-batch. `hits` is the number of targets that have the largest logit.
---@param hits number
---@param targets number
function Report:take_score(hits, targets) self.hits, self.targets = self.hits + hits, self.targets + targets end

local function line(self)
  local engine, n = self.engine, self.steps
  local opt = engine.optimizer
  local parts = { ("step %d:"):format(engine.steps) }
  local function say(format, ...) parts[#parts + 1] = format:format(...) end
  if self.weight > 0 then say("loss %.4f,", self.loss / self.weight) end
  if self.targets > 0 then say("accuracy %.4f,", self.hits / self.targets) end
  say("lr %.4g,", opt.groups[1].lr)
  if opt.grad_norm then say("gradient norm %.4g,", opt.grad_norm) end
  if opt.scaler then say("loss scale %g,", opt.scaler.scale) end
  if self.skipped > 0 then say("%d of %d skipped,", self.skipped, n) end
  local seconds = (C.ps_now() - self.began) / n
  say("%.3g s per step", seconds)
  if self.breakdown then
    local times = {}
    for i, part in ipairs(PARTS) do times[i] = ("%s %.3g"):format(part, self.seconds[part] / n) end
    say("(%s), %.3g TFLOP/s", table.concat(times, ", "),
      (tonumber(C.ps_flops_counted()) - self.flops) / n / seconds * 1e-12)
    if engine.cfg.train_batch_size then say(", %.4g samples/s", engine.cfg.train_batch_size / seconds) end
  end
  local up, down = moved()
  up, down = (up - self.up) / n, (down - self.down) / n
  if up + down > 0 then say("; fetched %s, evicted %s per step", readable.bytes(up), readable.bytes(down)) end
  return (table.concat(parts, " "):gsub(" ([,;])", "%1"))
end

-- Returns the present and the peak bytes of each tier, and the tensors that were alive when the compute device was at
-- its peak.
local function memory(engine)
  local device = engine.device_name
  local held = views.memory { at = "peak", device = device }
  held.shown = HELD
  return ("%s\n%s"):format(views.memory(device), held)
end

-- Writes the events of a step. They have DeepSpeed's names. Times are in milliseconds, and are measured in this step
-- only.
local function write_events(self)
  local engine, list = self.engine, {}
  local opt = engine.optimizer
  if self.weight > 0 then list[1] = { "Train/Samples/train_loss", self.loss / self.weight } end
  if self.targets > 0 then list[#list + 1] = { "Train/Samples/train_accuracy", self.hits / self.targets } end
  list[#list + 1] = { "Train/Samples/lr", opt.groups[1].lr }
  if opt.scaler then list[#list + 1] = { "Train/Samples/loss_scale", opt.scaler.scale } end
  for _, part in ipairs(self.breakdown and PARTS or {}) do
    local before = self.told and self.told[part] or 0
    list[#list + 1] = { "Train/Samples/elapsed_time_ms_" .. part, (self.seconds[part] - before) * 1e3 }
  end
  self.told = { forward = self.seconds.forward, backward = self.seconds.backward, step = self.seconds.step }
  self.monitor:write(engine.steps, list)
end

--- Counts a finished step. Writes its line and its events if they are due. Must be called before the learning-rate
--- schedule advances.
---@param info {skipped: boolean}
function Report:step_done(info)
  self.steps, self.skipped = self.steps + 1, self.skipped + (info.skipped and 1 or 0)
  if self.profiler then self.profiler:step_done() end
  local due = has_line(self, self.engine.steps)
  if not due and not self.monitor then return end
  local ranks = self.engine.ranks
  if ranks then
    self.loss, self.weight, self.hits, self.targets = ranks:sum(self.loss, self.weight, self.hits, self.targets)
  end
  if self.monitor then write_events(self) end
  if due then
    self.last = line(self)
    if self.writes then
      io.stdout:write(self.last, "\n")
      if self.memory then io.stdout:write(memory(self.engine), "\n") end
      io.stdout:flush()
    end
    restart(self)
  end
  self.loss, self.weight, self.hits, self.targets = 0, 0, 0, 0
end

--- Closes the files of the monitors, and stops counting operations and calls between ranks.
function Report:close()
  if self.unwatch then self.unwatch() end
  if self.calls then
    if self.writes then comms_summary.log_summary() end
    comms_summary.stop()
  end
  if self.monitor then self.monitor:close() end
  if self.breakdown then C.ps_flops_count(0) end
end

return report
