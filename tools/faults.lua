-- SPDX-License-Identifier: BSD-3-Clause
-- Runs small jobs under faults that a seed draws, and then resumes the jobs without faults. Checks from the outside how
-- each job ended. A job must have the results of a run without faults, or end with an error that names the cause.
--   psluajit tools/faults.lua --seeds 1:100 [--ranks 2] [--steps 6] [--jobs 1] [--hours H] [--json] [--keep]
--   psluajit tools/faults.lua --plans FILE      runs the plans of a file; each line is a plan as --json prints it
--   psluajit tools/faults.lua --replay SEED    with the same --ranks and --steps as the run that printed the seed
--   psluajit tools/faults.lua --seeds 1:100 --dry      only prints what these seeds draw
-- --help shows the options. docs/reliability.md has the table of faults. The tool needs the program psluajit_faults
-- next to psluajit:
--   cmake --build build --target psluajit_faults
local argparse = require "argparse"
local json = require "cjson"
local lfs = require "lfs"
local signal = require "posix.signal"
local time = require "posix.time"
local caller = require "ps.core.caller"
local command_line = require "ps.core.command_line"
local draw = require "tools.faults.draw"
local run = require "tools.faults.run"
local trial = require "tools.faults.trial"

local parser = argparse("psluajit faults", "Runs a small training job for each seed, under faults that the seed "
  .. "draws, then resumes it without faults. Prints a line per seed: golden (the results of a run without faults), "
  .. "named: CAUSE, or WRONG: WHY. The exit status is 1 if any is WRONG.")
local whole, number = command_line.whole, command_line.number
parser:option("--seeds", "A:B: the seeds from A to B"):convert(function(text)
  local first, last = text:match "^(%d+):(%d+)$"
  first, last = tonumber(first), tonumber(last)
  if not first or first > last or last >= 2 ^ 53 then
    return nil, ("--seeds %s: it takes A:B, two whole numbers below 2^53, A at most B"):format(text)
  end
  return { first, last }
end)
parser:option("--plans", "a file of plans: on each line an object of JSON as --json prints")
whole(parser:option("--replay", "one seed, with a log of every fault and everything that processes printed"), 0)
whole(parser:option("--ranks", "a job has at most this number of ranks", "2"), 1, 64)
whole(parser:option("--steps", "steps of a job", "6"), 1, 100)
whole(parser:option("--jobs", "jobs that run at once", "1"), 1, 64)
number(parser:option("--hours", "go on with the seeds after B until this number of hours is over"), 0, 1e6)
number(parser:option("--patience", "timeouts are at least this factor longer", "1"), 1, 1000)
parser:option("--plan", "with --replay: these events instead of the drawn ones, each LIFE/RANK:DOOR@NTH=ACTION")
whole(parser:option("--stop-at", "end after this number of WRONG seeds"), 1)
parser:flag("--keep", "keep the folders of jobs that are WRONG")
parser:flag("--dry", "print the plans of --seeds, and run only the jobs without faults that drawing a plan needs")
parser:flag("--json", "print each line as an object of JSON")
local options = command_line.parse(parser)
if not (options.seeds or options.replay or options.plans) or options.replay and (options.seeds or options.plans) then
  parser:error "give --seeds A:B, --plans FILE or --replay SEED"
end

if options.dry and not options.seeds then parser:error "--dry needs --seeds A:B" end
if options.plan and not options.replay then parser:error "--plan needs --replay SEED" end
if options.json and options.replay then parser:error "--json needs --seeds A:B or --plans FILE" end

local trials

-- Ends all processes and the program. Removes the files of all trials, unless `kept` is set.
local function finish(code, kept)
  run.stop()
  if trials and not kept then run.remove(trials.root) end
  os.exit(code)
end

local function fail(text, ...)
  io.stderr:write("faults: " .. text:format(...) .. "\n")
  finish(2)
end

local exe, no_program = run.program()
if not exe then fail("%s", no_program) end
local problem
trials, problem = trial.new(exe, options.patience)
if not trials then fail("%s", problem) end

-- -- output ---------------------------------------------------------------------------------------------------------
local counts = { golden = 0, named = 0, WRONG = 0, faults = 0 }

-- Returns the drawn settings of a job, for the JSON line of its plan.
local function settings_of(job)
  local settings = {}
  for name, value in pairs(job) do
    if not name:match "_s$" and name ~= "text" then settings[name] = value end
  end
  return settings
end

-- Returns the settings and the events of a plan in one line.
local function line_of(plan)
  return ("%d  %s%s  [%s]"):format(plan.seed, draw.describe(plan.job),
    plan.begins == "saved" and ", from a checkpoint" or "", draw.events(plan))
end

local function report(plan, verdict, shrunk, kept)
  counts[verdict.outcome] = counts[verdict.outcome] + 1
  counts.faults = counts.faults + verdict.faults
  if options.json then
    print(json.encode { seed = plan.seed, job = draw.describe(plan.job), settings = settings_of(plan.job),
      begins = plan.begins, events = draw.events(plan), off = plan.off, outcome = verdict.outcome, why = verdict.why,
      faults = verdict.faults, happened = verdict.happened, patience = plan.job.patience_s,
      ended_s = verdict.ended_s and math.floor(verdict.ended_s * 100 + 0.5) / 100,
      shrunk = shrunk and draw.events(shrunk), kept = kept })
  else
    print(("%s  %d happened  %s%s"):format(line_of(plan), verdict.faults, verdict.outcome,
      verdict.why and ": " .. verdict.why or ""))
    if shrunk then print("    the shortest plan that fails: " .. draw.events(shrunk)) end
    if kept then print("    kept: " .. kept) end
  end
  io.stdout:flush()
end

-- Prints a plan without running it.
local function list(plan)
  print(options.json and json.encode { seed = plan.seed, job = draw.describe(plan.job),
    settings = settings_of(plan.job), begins = plan.begins, events = draw.events(plan), off = plan.off }
    or line_of(plan))
end

-- Runs the plan that make() returns, and reports the verdict. If the job fails even without faults, the outcome is
-- WRONG.
local function one(seed, name, make)
  local plan, verdict, spec
  local ok, why = pcall(function()
    plan = make()
    local _
    verdict, _, spec = trials:perform(plan, name)
  end)
  if not ok then
    local alone = type(why) == "table" and why.alone
    if not alone then error(why, 0) end
    plan = plan or { seed = seed, job = draw.job(seed, options), begins = "new", events = {}, off = {}, lives = 0 }
    return report(plan, { outcome = "WRONG", why = alone, faults = 0 })
  end
  local kept = verdict.outcome == "WRONG" and options.keep
  if not kept then run.clean(spec.folder) end
  report(plan, verdict, verdict.outcome == "WRONG" and not options.stop_at and trials:shrink(plan, name .. "s") or nil,
    kept and spec.folder or nil)
end

-- The name of the signal that ends the program, or nil before the signal has arrived.
local ended_by
for _, name in ipairs { "SIGTERM", "SIGHUP" } do
  local before = signal.signal(signal[name], function() ended_by = ended_by or name end)
  -- Under nohup, SIGHUP is ignored, and it must stay ignored.
  if before == "SIG_IGN" then signal.signal(signal[name], signal.SIG_IGN) end
end

-- Runs functions as coroutines, `jobs` at a time. next_one() returns the next function, or nil.
local function schedule(jobs, next_one)
  local running, more = {}, true
  repeat
    while more and #running < jobs do
      local fn = next_one()
      more = fn ~= nil
      if fn then running[#running + 1] = coroutine.create(fn) end
    end
    for i = #running, 1, -1 do
      local ok, why = coroutine.resume(running[i])
      if not ok then error(type(why) == "string" and why or debug.traceback(running[i]), 0) end
      if coroutine.status(running[i]) == "dead" then table.remove(running, i) end
    end
    if ended_by then error(ended_by, 0) end
    if #running > 0 then time.nanosleep { tv_sec = 0, tv_nsec = 4000000 } end
  until #running == 0 and not more
end

-- -- plans that somebody wrote --------------------------------------------------------------------------------------
local function with_events(plan, text)
  plan.events, plan.lives = {}, 1
  if text == draw.NO_EVENTS then return plan end
  for word in text:gmatch "%S+" do
    local life, rank, event = word:match "^(%d+)/(%d+):(.+)$"
    local kind = event and draw.kind_of(event)
    if not kind then fail("the plan has '%s'; an event is LIFE/RANK:DOOR@NTH=ACTION", word) end
    plan.events[#plan.events + 1] = { life = tonumber(life), rank = tonumber(rank), kind = kind,
      text = event:find("@", 1, true) and event or nil, seconds = 0.5 }
    plan.lives = math.max(plan.lives, tonumber(life))
  end
  return plan
end

local function read_plans(path)
  if lfs.attributes(path, "mode") == "directory" then fail("cannot read %s: it is a folder", path) end
  local plans, f, why = {}, io.open(path, "rb")
  if not f then fail("cannot open %s", why) end
  for line in f:lines() do
    local ok, row = pcall(json.decode, line)
    if not ok or type(row) ~= "table" or not (row.settings and row.events) then
      fail("%s, line %d: it is not an object of JSON with settings and events, as --json prints", path, #plans + 1)
    end
    plans[#plans + 1] = with_events({ seed = row.seed or 0, job = row.settings, begins = row.begins or "new",
      off = {} }, row.events)
  end
  f:close()
  return plans
end

-- -- one seed, with all its output ------------------------------------------------------------------------------------
local function replay(seed)
  local plan = options.plan and with_events({ seed = seed, job = draw.job(seed, options), begins = "new", off = {} },
    options.plan) or trials:plan(seed, options)
  local verdict, lives, spec = trials:perform(plan, "seed" .. seed)
  print("settings: " .. json.encode(settings_of(plan.job)))
  print("begins: " .. plan.begins)
  print("switched off: " .. table.concat(plan.off, " "))
  for life, processes in ipairs(lives) do
    print(("life %d: %s"):format(life, life > plan.lives and "no faults" or draw.text(plan, life)))
    for _, p in ipairs(processes) do
      print(("  rank %d%s, %.2f s, %s"):format(p.rank, p.twin and " (twin)" or "", p.seconds,
        p.hung and "killed at the limit" or p.signal and "signal " .. p.signal or "exit code " .. tostring(p.code)))
      for line in p.text:gmatch "[^\n]+" do print("    | " .. line) end
    end
  end
  for _, event in ipairs(run.happened(spec.folder)) do print(("fault: rank %d %s"):format(event.rank, event.text)) end
  for line in run.read(spec.folder .. ".log"):gmatch "[^\n]+" do print("log: " .. line) end
  if not options.keep then run.clean(spec.folder) end
  report(plan, verdict)
end

-- -- the list of all plans --------------------------------------------------------------------------------------------
local began = run.now()
local plans, at = options.plans and read_plans(options.plans) or {}, 0
local seed = options.seeds and options.seeds[1] - 1

local function next_one()
  if options.stop_at and counts.WRONG >= options.stop_at then return nil end
  if options.replay then
    at = at + 1
    return at == 1 and function() replay(options.replay) end or nil
  end
  if at < #plans then
    at = at + 1
    local plan, name = plans[at], "plan" .. at
    return function() one(plan.seed, name, function() return plan end) end
  end
  if not seed then return nil end
  seed = seed + 1
  local late = options.hours and run.now() - began < options.hours * 3600
  if seed > options.seeds[2] and not late then return nil end
  local this = seed
  if options.dry then return function() list(trials:plan(this, options)) end end
  return function() one(this, "seed" .. this, function() return trials:plan(this, options) end) end
end

local ok, why = pcall(schedule, options.replay and 1 or options.jobs, next_one)
if not ok then
  if not (ended_by or caller.is_interrupt(why)) then fail("%s", why) end
  io.stderr:write(("faults: ended by %s; %d golden, %d named, %d WRONG so far\n"):format(ended_by or "Ctrl-C",
    counts.golden, counts.named, counts.WRONG))
  finish(128 + signal[ended_by or "SIGINT"])
end
if not options.json and not options.replay and not options.dry then
  print(("%d %s in %.0f s: %d golden, %d named, %d WRONG; %d faults happened"):format(
    counts.golden + counts.named + counts.WRONG, options.plans and "plans" or "seeds", run.now() - began, counts.golden,
    counts.named, counts.WRONG, counts.faults))
  if trials.repeated > 0 then print(trials.repeated .. " were repeated with more patience: the machine was busy") end
end
finish(counts.WRONG > 0 and 1 or 0, options.keep and counts.WRONG > 0)
