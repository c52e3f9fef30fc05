-- SPDX-License-Identifier: BSD-3-Clause
-- Makes reports about a profile (docs/profiling.md). The profile is the current record or a file. A report contains the
-- time, operations, bytes, waits and idle time of each op or module. It can compare the times with the limits of the
-- machine and with another profile.
local json = require("cjson").new()
local caller = require "ps.core.caller"
local readable = require "ps.core.readable"
local read_file = require "ps.core.read_file"
local error = caller.error

local report = { OUTSIDE = "(no module)" }   -- OUTSIDE: name of the row for ops that run outside modules

local VERSION = 1
local UNKNOWN = "?"            -- stands for the dtype of a product if the file does not contain the dtype
local LEAST = 0.001            -- an op with less than this fraction of the total time has no row of its own

-- For each category of events: the numeric fields of the events that reports read.
local FIELDS = { op = { "flops", "bytes", "step" }, wait = { "step" }, module = { "step" } }

-- Optional fields in the arguments of events. If such a field exists, it must be a text.
local TEXTS = { "dtype", "device", "module", "path" }

-- Raises an error if an event or a step in a file does not have the form that docs/profiling.md describes.
local function check_fields(path, profile)
  local function numbers(t, what, names)
    if type(t) ~= "table" then error(("%s is damaged: %s is not an object"):format(path, what)) end
    for _, name in ipairs(names) do
      if type(t[name]) ~= "number" then error(("%s is damaged: %s.%s is not a number"):format(path, what, name)) end
    end
  end
  numbers(profile.psluajit, "psluajit", { "events", "dropped" })
  local steps = profile.psluajit.steps
  if type(steps) ~= "table" then error(path .. " is damaged: psluajit.steps is not a list") end
  for i, step in ipairs(steps) do numbers(step, ("psluajit.steps[%d]"):format(i), { "begin", "end" }) end
  for i, e in ipairs(profile.traceEvents) do
    local what = ("traceEvents[%d]"):format(i)
    numbers(e, what, {})
    local fields = FIELDS[e.cat]
    if fields then
      numbers(e, what, { "ts", "dur" })
      numbers(e.args, what .. ".args", fields)
      if type(e.name) ~= "string" then error(("%s is damaged: %s.name is not a text"):format(path, what)) end
      for _, name in ipairs(TEXTS) do
        if type(e.args[name] or "") ~= "string" then
          error(("%s is damaged: %s.args.%s is not a text"):format(path, what, name))
        end
      end
    end
  end
end

--- Reads a profile from a file and checks it.
---@param path string
---@return table
function report.read(path)
  local content, problem = read_file(path)
  if not content then error("cannot read the profile: " .. problem) end
  local ok, profile = pcall(json.decode, content)
  if not ok then error(("%s is not a profile, or was cut off: %s"):format(path, profile)) end
  local about = type(profile) == "table" and profile.psluajit
  if type(about) ~= "table" or type(profile.traceEvents) ~= "table" then
    error(path .. " is not a profile of ps.profiler.save: it lacks psluajit or traceEvents")
  end
  if about.version ~= VERSION then
    error(("%s is a profile of version %s; this program reads version %d"):format(path, tostring(about.version),
      VERSION))
  end
  check_fields(path, profile)
  return profile
end

---@class ps.profiler.Row
---@field name string the op, or the module's path
---@field calls number number of ops per step
---@field seconds number duration of all ops per step; for a module, this includes the ops of the modules in it
---@field forward number the part of `seconds` in forward
---@field backward number the part of `seconds` in backward
---@field flops number number of operations per step
---@field bytes number number of bytes per step
---@field waits number seconds per step in which the script waits for copies, collectives and messages
---@field idle? number seconds per step of a module's forward in which no op ran and the script did not wait; nil if ops
---  overlapped the script, as on a GPU
---@field limit? number time that the ops need at the limits of the machine, divided by `seconds`; nil if the limit of a
---  dtype is unknown
---@field before? number `seconds` in the profile `against`

-- Returns a list of the path of a module and the paths of all modules that contain the module. For "h.0.attn", the list
-- contains "h.0.attn", "h.0", "h" and "" (the outermost module).
local function around(path)
  local list = { path }
  while path ~= "" do
    path = path:match("^(.*)%.[^.]*$") or ""
    list[#list + 1] = path
  end
  return list
end

local function row_of(rows, name)
  local row = rows[name]
  if not row then
    row = { name = name, calls = 0, seconds = 0, forward = 0, backward = 0, flops = 0, bytes = 0, waits = 0,
      products = {} }
    rows[name] = row
    rows[#rows + 1] = row
  end
  return row
end

-- Returns the total duration of all steps (wall), of all ops in steps, and of all waits in steps, in seconds. If the
-- profile contains no steps, returns the totals of all events.
local function totals(profile)
  local events, steps = profile.traceEvents, profile.psluajit.steps
  local sum = { steps = math.max(1, #steps), wall = 0, ops = 0, waits = 0 }
  local first, last = math.huge, 0
  for _, e in ipairs(events) do
    if e.cat == "op" or e.cat == "wait" then
      local key = e.cat == "op" and "ops" or "waits"
      if #steps == 0 or e.args.step > 0 then sum[key] = sum[key] + e.dur * 1e-6 end
      first, last = math.min(first, e.ts), math.max(last, e.ts + e.dur)
    end
  end
  for _, step in ipairs(steps) do sum.wall = sum.wall + (step["end"] - step.begin) * 1e-6 end
  if #steps == 0 and last > 0 then sum.wall = (last - first) * 1e-6 end
  return sum
end

local function add(row, e, n)
  local seconds = e.dur * 1e-6 / n
  if e.cat == "wait" then
    row.waits = row.waits + seconds
    return
  end
  row.calls, row.seconds = row.calls + 1 / n, row.seconds + seconds
  row.flops, row.bytes = row.flops + e.args.flops / n, row.bytes + e.args.bytes / n
  if e.args.flops > 0 then
    local dtype = e.args.dtype or UNKNOWN
    row.products[dtype] = (row.products[dtype] or 0) + e.args.flops / n
  end
  local phase = e.args.phase
  if phase == "forward" then row.forward = row.forward + seconds end
  if phase == "backward" or phase == "input" or phase == "weight" then row.backward = row.backward + seconds end
end

-- Returns the rows of a profile with n steps. The numbers in a row are divided by n. Rows of ops are sorted by time,
-- longest first. Rows of modules are in the order in which the modules first run.
local function rows_of(profile, by, n)
  local rows, stepped, order = {}, #profile.psluajit.steps > 0, {}
  for _, e in ipairs(profile.traceEvents) do
    local counts = (e.cat == "op" or e.cat == "wait" or e.cat == "module") and (not stepped or e.args.step > 0)
    if counts and by == "op" then
      if e.cat == "op" then add(row_of(rows, e.name), e, n) end
    elseif counts and e.cat == "module" then
      local row = row_of(rows, e.args.path or "")
      row.spent = (row.spent or 0) + e.dur * 1e-6 / n
      for _, path in ipairs(around(row.name)) do order[path] = order[path] or e.ts end
    elseif counts then
      if not e.args.module then add(row_of(rows, report.OUTSIDE), e, n)
      else
        for _, path in ipairs(around(e.args.module)) do
          local row = row_of(rows, path)
          add(row, e, n)
          row.beside = row.beside or e.tid ~= 0 and e.cat == "op"
          if e.args.phase ~= "backward" and e.args.phase ~= "input" and e.args.phase ~= "weight" then
            row.covered = (row.covered or 0) + e.dur * 1e-6 / n
          end
        end
      end
    end
  end
  for _, row in ipairs(rows) do
    if row.spent and not row.beside then row.idle = math.max(0, row.spent - (row.covered or 0)) end
    row.spent, row.covered, row.beside = nil, nil, nil
  end
  if by == "op" then table.sort(rows, function(a, b) return a.seconds > b.seconds end)
  else
    table.sort(rows, function(a, b)
      local x, y = order[a.name] or math.huge, order[b.name] or math.huge
      if x ~= y then return x < y end
      return a.name < b.name
    end)
  end
  return rows
end

local function number(x, format) return x and x > 0 and (format or "%.3f"):format(x) or "-" end

-- Returns the shortest possible time in seconds of the products in a row. `flops` is the rate of the machine, or a
-- table of rates by dtype. Returns nil if the rate of a dtype is unknown.
local function product_seconds(row, flops)
  if type(flops) == "number" then return row.flops / flops end
  local sum = 0
  for dtype, amount in pairs(row.products) do
    if not flops[dtype] then return nil end
    sum = sum + amount / flops[dtype]
  end
  return sum
end

-- Returns a text for the rates in `flops`, such as "300.0 GFLOP/s in products". If `flops` is a table, the text lists a
-- rate for each dtype.
local function rates_text(flops)
  if type(flops) == "number" then return ("%.1f GFLOP/s in products"):format(flops * 1e-9) end
  local list = {}
  for dtype, rate in pairs(flops) do list[#list + 1] = ("%.1f GFLOP/s in products of %s"):format(rate * 1e-9, dtype) end
  table.sort(list)
  return table.concat(list, ", ")
end

-- Returns the lines of a report that describe the whole step.
local function summary(self)
  local lines = { ("per step: %.3f ms; ops %.3f, waits %.3f, idle (neither) %.3f; %.4g GFLOP, %.1f GFLOP/s; %d step%s")
    :format(self.wall * 1e3, self.ops * 1e3, self.waits * 1e3, self.idle * 1e3, self.flops * 1e-9,
    self.flops / math.max(self.wall, 1e-12) * 1e-9, self.steps, self.steps == 1 and "" or "s") }
  if self.limits then
    local rates = rates_text(self.limits.flops)
    lines[#lines + 1] = ("the limit: %s%s%.1f GB/s; an op takes at least the longer of its two times"):format(rates,
      rates ~= "" and ", " or "", self.limits.bytes * 1e-9)
  end
  if self.dropped > 0 then
    lines[#lines + 1] = ("%d older events were overwritten; ps.profiler.start { events = %d } holds all"):format(
      self.dropped, 2 ^ math.ceil(math.log(self.dropped + self.events) / math.log(2)))
  end
  return table.concat(lines, "\n")
end

local function show(self)
  if self.events == 0 then
    return "nothing was recorded: call ps.profiler.start() before the code to be measured"
  end
  local columns = { { title = self.by, left = true }, { title = "calls" }, { title = "ms" }, { title = "share" },
    { title = "forward" }, { title = "backward" }, { title = "GFLOP/s" }, { title = "GB/s" } }
  if self.limits then columns[#columns + 1] = { title = "of limit" } end
  columns[#columns + 1] = { title = "waits" }
  if self.by == "module" then columns[#columns + 1] = { title = "idle" } end
  if self.against then columns[#columns + 1] = { title = "before" } end
  local lines, rest = {}, 0
  for _, row in ipairs(self) do
    if self.by == "op" and row.seconds < LEAST * self.ops then rest = rest + 1
    else
      local cells = { row.name == "" and "(the model)" or row.name, ("%.1f"):format(row.calls),
        ("%.3f"):format(row.seconds * 1e3), ("%.1f%%"):format(100 * row.seconds / math.max(self.ops, 1e-12)),
        number(row.forward * 1e3), number(row.backward * 1e3),
        row.seconds > 0 and number(row.flops / row.seconds * 1e-9, "%.1f") or "-",
        row.seconds > 0 and number(row.bytes / row.seconds * 1e-9, "%.1f") or "-" }
      if self.limits then cells[#cells + 1] = row.limit and ("%.0f%%"):format(100 * row.limit) or "-" end
      cells[#cells + 1] = number(row.waits * 1e3)
      if self.by == "module" then cells[#cells + 1] = number(row.idle and row.idle * 1e3) end
      if self.against then
        cells[#cells + 1] = row.before and ("%.3f (%+.1f%%)"):format(row.before * 1e3,
          100 * (row.seconds / math.max(row.before, 1e-12) - 1)) or "-"
      end
      lines[#lines + 1] = cells
    end
  end
  if rest > 0 then
    lines[#lines + 1] = ("and %d op%s with less than %.1f%% of the time%s"):format(rest, rest == 1 and "" or "s",
      LEAST * 100, rest == 1 and "" or " each")
  end
  lines = readable.lines(columns, lines)
  lines[#lines + 1] = summary(self)
  return table.concat(lines, "\n")
end

local Report = { __tostring = show }

--- Returns the lines below the table of a report. These lines describe the whole step.
---@param rows ps.profiler.Row[] the result of report.of
---@return string
function report.summary(rows) return summary(rows) end

--- Returns the dtypes of the matrix products in a profile, and the device that computed the most operations of
--- products.
---@param profile table
---@return { dtypes: string[], device: string? }
function report.products(profile)
  local dtypes, seen, by, most = {}, {}, {}, nil
  for _, e in ipairs(profile.traceEvents) do
    if e.cat == "op" and e.args.flops > 0 then
      local dtype, device = e.args.dtype, e.args.device
      if dtype and not seen[dtype] then
        seen[dtype] = true
        dtypes[#dtypes + 1] = dtype
      end
      if device then
        by[device] = (by[device] or 0) + e.args.flops
        if not most or by[device] > by[most] then most = device end
      end
    end
  end
  return { dtypes = dtypes, device = most }
end

--- Returns the report about a profile as a list of rows, which prints as a table.
---@param profile table
---@param by "op"|"module"
---@param limits? ps.profiler.Limits peak rates of the machine
---@param against? table another profile, with which the times are compared
---@return ps.profiler.Row[] rows; the list also has these fields: wall, ops, waits and idle (in seconds per step),
---  flops (per step), steps, dropped and events (numbers of the whole profile)
function report.of(profile, by, limits, against)
  local sum = totals(profile)
  local n = sum.steps
  local rows = rows_of(profile, by, n)
  if limits then
    for _, row in ipairs(rows) do
      local products = product_seconds(row, limits.flops)
      if row.seconds > 0 and products then row.limit = math.max(products, row.bytes / limits.bytes) / row.seconds end
    end
  end
  if against then
    local others = rows_of(against, by, totals(against).steps)
    for _, row in ipairs(rows) do row.before = others[row.name] and others[row.name].seconds end
  end
  local list = { by = by, limits = limits, against = against ~= nil, steps = n, wall = sum.wall / n, ops = sum.ops / n,
    waits = sum.waits / n, flops = 0, dropped = profile.psluajit.dropped, events = profile.psluajit.events }
  list.idle = math.max(0, list.wall - list.ops - list.waits)
  for i, row in ipairs(rows) do list[i] = row end
  for _, e in ipairs(profile.traceEvents) do
    if e.cat == "op" and (#profile.psluajit.steps == 0 or e.args.step > 0) then
      list.flops = list.flops + e.args.flops / n
    end
  end
  return setmetatable(list, Report)
end

return report
