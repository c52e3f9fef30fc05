-- SPDX-License-Identifier: BSD-3-Clause
-- Runs small jobs under faults that a seed draws, resumes them without faults, and checks from the outside that each
-- ended with the results of a run without faults, or with an error that names the cause.
--   psluajit tools/faults.lua --seeds 1:100 [--ranks 2] [--steps 6] [--jobs 1] [--hours H] [--json] [--keep]
--   psluajit tools/faults.lua --replay SEED
-- --help shows the options, docs/reliability.md the table. It needs the program psluajit_faults next to psluajit:
-- cmake --build build --target psluajit_faults.
local argparse = require "argparse"
local json = require "cjson"
local lfs = require "lfs"
local time = require "posix.time"
local command_line = require "ps.core.command_line"
local paths = require "ps.paths"
local draw = require "tools.faults.draw"
local judge = require "tools.faults.judge"
local run = require "tools.faults.run"

local HEARTBEAT_S, TIMEOUT_S, LIMIT_S = 4, 12, 30
local TEXT_BYTES = 6000                                    -- of the training text

local parser = argparse("tools/faults.lua", "Runs a small training job for each seed, under faults that the seed "
  .. "draws, then resumes it without faults. Prints a line per seed: golden (the results of a run without faults), "
  .. "named: CAUSE, or WRONG: WHY. The exit status is 1 if any is WRONG.")
local whole, number = command_line.whole, command_line.number
parser:option("--seeds", "A:B: the seeds from A to B"):convert(function(text)
  local first, last = text:match "^(%d+):(%d+)$"
  first, last = tonumber(first), tonumber(last)
  if not first or first > last then
    return nil, ("--seeds %s: it takes A:B, two whole numbers, A at most B"):format(text)
  end
  return { first, last }
end)
whole(parser:option("--replay", "one seed, with a log of every fault and everything that processes printed"), 0)
whole(parser:option("--ranks", "a job has at most this number of ranks", "2"), 1, 64)
whole(parser:option("--steps", "steps of a job", "6"), 1, 100)
whole(parser:option("--jobs", "jobs that run at once", "1"), 1, 64)
number(parser:option("--hours", "go on with the seeds after B until this number of hours is over"), 0, 1e6)
parser:option("--plan", "with --replay: these events instead of the drawn ones, each LIFE/RANK:DOOR@NTH=ACTION")
parser:flag("--keep", "keep the folders of jobs that are WRONG")
parser:flag("--json", "print each line as an object of JSON")
local options = parser:parse()
if (options.seeds == nil) == (options.replay == nil) then parser:error "give --seeds A:B or --replay SEED" end

local function fail(text, ...)
  io.stderr:write("faults: " .. text:format(...) .. "\n")
  os.exit(2)
end

local exe, no_program = run.program()
if not exe then fail("%s", no_program) end

-- -- one folder for all ---------------------------------------------------------------------------------------------
local root = os.tmpname()
os.remove(root)
assert(lfs.mkdir(root))
do
  local text, state = {}, 1
  for i = 1, TEXT_BYTES do
    state = state * 48271 % 2147483647
    text[i] = string.char(32 + state % 95)
  end
  local f = assert(io.open(root .. "/text", "wb"))
  f:write(table.concat(text))
  f:close()
end

local shm = {}
for _, name in ipairs(run.names "/dev/shm") do shm[name] = true end

local function spec_of(job, name, program)
  job.text, job.limit_s, job.timeout_s, job.heartbeat_s = root .. "/text", LIMIT_S, TIMEOUT_S, HEARTBEAT_S
  return { exe = program, script = paths.root .. "/tools/faults/job.lua", job = job, folder = root .. "/" .. name }
end

-- -- golden runs ----------------------------------------------------------------------------------------------------
local goldens, n_goldens = {}, 0

-- Returns the golden run of a job; other jobs that need it wait.
local function golden_of(job)
  local key, settings = draw.golden(job)
  while goldens[key] == "running" do coroutine.yield() end
  if goldens[key] then return goldens[key] end
  goldens[key], n_goldens = "running", n_goldens + 1
  local spec = spec_of(settings, "golden" .. n_goldens, paths.exe)
  settings.limit_s = 4 * LIMIT_S                           -- nothing is judged by its time
  run.prepare(spec)
  for _, p in ipairs(run.life(spec, 1, {})) do
    if p.code ~= 0 then
      fail("the job '%s' fails without faults: rank %d ended with %s after %.0f s:\n%s", key, p.rank,
        p.signal and "signal " .. p.signal or "code " .. tostring(p.code), p.seconds, p.text)
    end
  end
  goldens[key] = judge.golden(run.log(spec.folder), settings)
  run.clean(spec.folder)
  return goldens[key]
end

-- -- a plan ---------------------------------------------------------------------------------------------------------
-- Runs a plan: the verdict, and the processes of its lives.
local function perform(plan, name)
  local golden, all = golden_of(plan.job), {}
  local spec = spec_of(plan.job, name, exe)
  run.prepare(spec)
  local state, verdict, named = { saved = 0, seen = {}, faults = 0 }, nil, nil
  for life = 1, plan.lives + 1 do
    local events, resumes = {}, life > plan.lives
    for _, event in ipairs(plan.events) do if event.life == life then events[#events + 1] = event end end
    spec.plan = draw.text(plan, life)
    local processes = run.life(spec, life, events)
    all[life] = processes
    verdict = judge.life(spec, plan, life, processes, golden, state, resumes)
    if verdict.outcome == "WRONG" then break end
    if verdict.outcome == "named" then named = verdict end
  end
  if verdict.outcome ~= "WRONG" then
    local problem = judge.left(spec, state, shm)
    verdict = problem and { outcome = "WRONG", why = problem } or named or verdict
  end
  verdict.faults = state.faults
  return verdict, all, spec
end

-- Returns the shortest plan that is still WRONG: leaves out one event after the other.
local function shrink(plan, name)
  local i = 1
  while i <= #plan.events do
    local fewer = {}
    for key, value in pairs(plan) do fewer[key] = value end
    fewer.events = {}
    for k, event in ipairs(plan.events) do if k ~= i then fewer.events[#fewer.events + 1] = event end end
    local verdict, _, spec = perform(fewer, name)
    run.clean(spec.folder)
    if verdict.outcome == "WRONG" then plan = fewer else i = i + 1 end
  end
  return plan
end

-- -- output ---------------------------------------------------------------------------------------------------------
local counts = { golden = 0, named = 0, WRONG = 0, faults = 0 }

local function report(plan, verdict, shrunk)
  counts[verdict.outcome] = counts[verdict.outcome] + 1
  counts.faults = counts.faults + verdict.faults
  if options.json then
    print(json.encode { seed = plan.seed, job = draw.describe(plan.job), events = draw.events(plan),
      off = plan.off, outcome = verdict.outcome, why = verdict.why, faults = verdict.faults,
      shrunk = shrunk and draw.events(shrunk) })
  else
    print(("%d  %s  [%s]  %d happened  %s%s"):format(plan.seed, draw.describe(plan.job), draw.events(plan),
      verdict.faults, verdict.outcome, verdict.why and ": " .. verdict.why or ""))
    if shrunk then print("    the shortest plan that fails: " .. draw.events(shrunk)) end
  end
  io.stdout:flush()
end

local function one(seed)
  local plan, name = draw.plan(seed, options), "seed" .. seed
  local verdict, _, spec = perform(plan, name)
  local kept = verdict.outcome == "WRONG" and options.keep
  if not kept then run.clean(spec.folder) end
  report(plan, verdict, verdict.outcome == "WRONG" and shrink(plan, name .. "s") or nil)
  if kept then print("    kept: " .. spec.folder) end
end

-- Runs functions as coroutines, `jobs` at a time; next() gives the next one, or nil.
local function schedule(jobs, next_one)
  local running, more = {}, true
  repeat
    while more and #running < jobs do
      local fn = next_one()
      more = fn ~= nil
      if fn then running[#running + 1] = coroutine.create(fn) end
    end
    for i = #running, 1, -1 do
      local ok, problem = coroutine.resume(running[i])
      if not ok then error(debug.traceback(running[i], tostring(problem)), 0) end
      if coroutine.status(running[i]) == "dead" then table.remove(running, i) end
    end
    if #running > 0 then time.nanosleep { tv_sec = 0, tv_nsec = 4000000 } end
  until #running == 0 and not more
end

-- -- one seed, with everything it said ------------------------------------------------------------------------------
local function with_events(plan, text)
  plan.events, plan.lives = {}, 1
  for word in text:gmatch "%S+" do
    local life, rank, event = word:match "^(%d+)/(%d+):(.+)$"
    local kind = event and draw.kind_of(event)
    if not kind then fail("--plan has '%s'; an event is LIFE/RANK:DOOR@NTH=ACTION", word) end
    plan.events[#plan.events + 1] = { life = tonumber(life), rank = tonumber(rank), kind = kind,
      text = event:find("@", 1, true) and event or nil, seconds = 0.5 }
    plan.lives = math.max(plan.lives, tonumber(life))
  end
end

local function replay(seed)
  local plan = draw.plan(seed, options)
  if options.plan then with_events(plan, options.plan) end
  local verdict, lives, spec = perform(plan, "seed" .. seed)
  print("settings: " .. json.encode(plan.job))
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

local began = run.now()
if options.replay then
  schedule(1, (function()
    local done
    return function()
      if done then return nil end
      done = true
      return function() replay(options.replay) end
    end
  end)())
else
  local seed = options.seeds[1] - 1
  schedule(options.jobs, function()
    seed = seed + 1
    local late = options.hours and run.now() - began < options.hours * 3600
    if seed > options.seeds[2] and not late then return nil end
    local this = seed
    return function() one(this) end
  end)
  if not options.json then
    print(("%d seeds in %.0f s: %d golden, %d named, %d WRONG; %d faults happened"):format(
      counts.golden + counts.named + counts.WRONG, run.now() - began, counts.golden, counts.named, counts.WRONG,
      counts.faults))
  end
end
if not (options.keep and counts.WRONG > 0) then os.execute(("rm -rf '%s'"):format(root)) end
os.exit(counts.WRONG > 0 and 1 or 0)
