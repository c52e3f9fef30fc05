-- SPDX-License-Identifier: BSD-3-Clause
-- Reports the cost of one step by module (flops_profiler in the configuration). The costs come from the record of
-- events. As in DeepSpeed, `profile_step` is the number of steps before the reported step.
local native = require "ps.core.ffi"
local profiler = require "ps.profile.profiler"
local json = require("cjson").new()
local copied = require "ps.core.copied"
local report = require "ps.profile.report"
local C = native.C

local flops_profiler = {}

---@class ps.engine.FlopsProfiler
---@field engine ps.Engine
---@field settings ps.config.FlopsProfiler
---@field owns boolean true if this profiler, and not the script, has started the record
local FlopsProfiler = {}
FlopsProfiler.__index = FlopsProfiler

-- Starts to record if the next step is the step to profile. If the script is already recording, uses the record of the
-- script.
local function begin(self)
  if self.engine.steps ~= self.settings.profile_step then return end
  self.owns = C.ps_record_is_on() == 0
  if self.owns then profiler.start() end
end

--- Creates a profiler. Returns nil if the configuration does not enable it, or if its result would be written nowhere.
---@param engine ps.Engine
---@return ps.engine.FlopsProfiler?
function flops_profiler.new(engine)
  local settings = engine.cfg.flops_profiler
  if not settings.enabled or engine.quiet and not settings.output_file then return nil end
  local self = setmetatable({ engine = engine, settings = settings, owns = false }, FlopsProfiler)
  begin(self)
  return self
end

-- Returns the depth of a module in the model. `path` is the path of the module.
local function depth_of(path)
  if path == "" then return 0 end
  return 1 + select(2, path:gsub("%.", ""))
end

-- Returns the last step of the record as a profile. Returns nil if the script has begun or ended a record since
-- begin().
local function last_step()
  local profile = json.decode(require "ps.profile.save"())
  local steps = profile.psluajit.steps
  local last = steps[#steps]
  if not last then return nil end
  local events = {}
  for _, e in ipairs(profile.traceEvents) do
    if e.args.step == last.step then events[#events + 1] = e end
  end
  profile.traceEvents, profile.psluajit.steps = events, { last }
  return profile
end

-- Returns the names of the `n` rows in which rows[i][key] is largest. Each name is followed by this value.
local function most(rows, key, n, factor, unit)
  local sorted, names = copied(rows), {}
  table.sort(sorted, function(a, b)
    if a[key] ~= b[key] then return a[key] > b[key] end
    return a.name < b.name
  end)
  for i = 1, math.min(n, #sorted) do
    local row = sorted[i]
    names[i] = ("%s %.4g %s"):format(row.name == "" and "(the model)" or row.name, row[key] * factor, unit)
  end
  return table.concat(names, ", ")
end

-- Appends one line for each depth of modules: "depth 1: most time h.0 3.1 ms; most operations h.0 2.5 GFLOP".
local function top(rows, settings, lines)
  local levels, deepest = {}, -1
  for _, row in ipairs(rows) do
    if row.name ~= report.OUTSIDE then
      local depth = depth_of(row.name)
      levels[depth] = levels[depth] or {}
      table.insert(levels[depth], row)
      deepest = math.max(deepest, depth)
    end
  end
  for depth = 0, deepest do
    if levels[depth] and settings.top_modules > 0 then
      lines[#lines + 1] = ("depth %d: most time %s; most operations %s"):format(depth,
        most(levels[depth], "seconds", settings.top_modules, 1e3, "ms"),
        most(levels[depth], "flops", settings.top_modules, 1e-9, "GFLOP"))
    end
  end
end

local function text(self, profile)
  local settings = self.settings
  local rows = report.of(profile, "module")
  for i = #rows, 1, -1 do
    local depth = rows[i].name == report.OUTSIDE and 0 or depth_of(rows[i].name)
    if settings.module_depth >= 0 and depth > settings.module_depth then table.remove(rows, i) end
  end
  local lines = { ("flops_profiler: step %d"):format(self.engine.steps) }
  lines[2] = settings.detailed and tostring(rows) or report.summary(rows)
  top(rows, settings, lines)
  return table.concat(lines, "\n") .. "\n"
end

--- Called at the end of each step. Begins to record before the step to profile, and writes the result after that step.
function FlopsProfiler:step_done()
  if self.engine.steps ~= self.settings.profile_step + 1 then return begin(self) end
  if self.owns then profiler.stop() end
  local profile = last_step()
  if not profile then
    return self.engine:note("flops_profiler: the script began or ended a record within the step, so no record of it "
      .. "is complete")
  end
  local content, path = text(self, profile), self.settings.output_file
  if path then                                                -- training continues even if the file cannot be written
    local ok, problem = pcall(native.check, C.ps_file_write_atomic(path, content, #content))
    if not ok then io.stderr:write("psluajit: flops_profiler.output_file: ", problem.msg, "\n") end
    return
  end
  io.stdout:write(content)
  io.stdout:flush()
end

return flops_profiler
