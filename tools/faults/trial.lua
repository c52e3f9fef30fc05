-- SPDX-License-Identifier: BSD-3-Clause
-- Runs plans. To run a plan, this file first runs the plan's job without faults, for the golden run and the job's
-- profile. Then it runs the lives with faults and a last life without faults, and judges them. A function that waits
-- yields.
local json = require "cjson"
local stdlib = require "posix.stdlib"
local copied = require "ps.core.copied"
local resolved = require "ps.core.resolved"
local paths = require "ps.paths"
local draw = require "tools.faults.draw"
local judge = require "tools.faults.judge"
local run = require "tools.faults.run"

-- A rank sends a heartbeat every 0.6 s. After 3 s of silence, a rank counts as lost. Other ranks wait at most 5 s for a
-- rank. Hence all processes of a failed life end within 10 s.
local HEARTBEAT_S, TIMEOUT_S, ENDS_S, LIMIT_S = 3, 5, 10, 30
local CALM = 10                                            -- minimum patience for runs without faults
-- A verdict that depends on time counts only if no process lacked a processor for longer than STARVED_S. Otherwise the
-- plan is repeated with more patience.
local STARVED_S, REPEATS, MORE, MOST = 0.5, 3, 3, 60
local TEXT_BYTES = 6000                                    -- size of the training text in bytes

local trial = {}

local Trials = {}
Trials.__index = Trials

---@class ps.faults.Trials
---@field root string         the folder of all files of the trials
---@field patience number     the factor of all time limits; at least the patience that the caller passed
---@field repeated integer    the number of plans that were repeated with more patience
---@field exe string          the path of psluajit_faults

--- Creates the folder of all trials, and the text on which jobs train.
---@param exe string path of the program psluajit_faults
---@param patience number the factor of all time limits; 1 is for a machine on which no other programs run
---@return ps.faults.Trials?
---@return string? why the reason why the folder or its text cannot be written
function trial.new(exe, patience)
  local above = resolved(os.getenv "TMPDIR" or "/tmp")     -- faults.h compares absolute paths
  local root, why = stdlib.mkdtemp(above .. "/psluajit-faults-XXXXXX")
  if not root then return nil, ("cannot make a folder in %s (TMPDIR): %s"):format(above, why) end
  local text, state = {}, 1
  for i = 1, TEXT_BYTES do
    state = state * 48271 % 2147483647
    text[i] = string.char(32 + state % 95)
  end
  local ok, problem = pcall(run.write, root .. "/text", table.concat(text))
  if not ok then
    run.remove(root)
    return nil, ("cannot write %d bytes: %s"):format(TEXT_BYTES, problem)
  end
  local shm = {}
  for _, name in ipairs(run.names "/dev/shm") do shm[name] = true end
  return setmetatable({ root = root, exe = exe, shm = shm, patience = patience, least = patience, repeated = 0,
    goldens = {}, profiles = {}, made = 0 }, Trials)
end

-- Returns the table `spec` for run.life. For runs without faults, patience is nil, because their time is not judged.
function Trials:spec(job, name, exe, patience)
  patience = patience or math.max(self.patience, CALM)
  job.text, job.limit_s = self.root .. "/text", math.ceil(LIMIT_S * (job.ranks > 1 and patience or self.least))
  job.timeout_s, job.heartbeat_s = TIMEOUT_S * patience, HEARTBEAT_S * patience
  job.ends_s, job.patience_s = ENDS_S * patience, patience
  return { exe = exe, script = paths.root .. "/tools/faults/job.lua", job = job, folder = self.root .. "/" .. name }
end

-- The error for a job that fails without faults. Its field `alone` contains the text.
local Failed = { __tostring = function(e) return e.alone end }
local function fails_alone(text, ...) error(setmetatable({ alone = text:format(...) }, Failed), 0) end

-- Returns list[key]. If there is no value yet, calls fn() once to create it. While fn() runs, other callers that need
-- the value wait.
local function once(list, key, fn)
  while list[key] == "made" do coroutine.yield() end
  if not list[key] then
    list[key] = "made"
    local ok, value = pcall(fn)
    list[key] = ok and value or nil
    if not ok then error(value, 0) end
  end
  return list[key]
end

--- Returns the golden run of a job (judge.golden).
---@param job table
---@return table
function Trials:golden(job)
  local key, settings = draw.golden(job)
  return once(self.goldens, key, function()
    self.made = self.made + 1
    local spec = self:spec(settings, "golden" .. self.made, paths.exe)
    run.prepare(spec)
    for _, p in ipairs(run.life(spec, 1, {})) do
      if p.code ~= 0 then
        fails_alone("the job '%s' fails without faults: rank %d ended with %s after %.0f s:\n%s", key, p.rank,
          p.signal and "signal " .. p.signal or "code " .. tostring(p.code), p.seconds, p.text)
      end
    end
    local golden = judge.golden(run.log(spec.folder), settings)
    run.clean(spec.folder)
    return golden
  end)
end

--- Returns the profile of a job, from two lives without faults. The first life has half of the steps. The second life
--- continues from the first life's checkpoint. Both lives must have the results of the golden run. `new` and `saved`
--- are the numbers of calls in the first and in the second life. `folder` contains the checkpoints of the first life.
--- `complete` is the set of the steps of these checkpoints, and `step` is the highest of these steps.
---@param job table
---@return ps.faults.Profile
function Trials:profile(job)
  return once(self.profiles, json.encode { draw.golden(job), job.config, job.every, job.keep, job.async, job.shards,
    job.disk_threads }, function()
    local golden, settings = self:golden(job), json.decode(json.encode(job))
    self.made = self.made + 1
    local spec = self:spec(settings, "profile" .. self.made, self.exe)
    local profile = { folder = spec.folder .. "s" }
    run.prepare { folder = profile.folder, job = settings }
    run.prepare(spec)
    local state = judge.state()
    for life, begins in ipairs { "new", "saved" } do
      settings.upto = life == 1 and math.ceil(settings.steps / 2) or nil
      run.settings(spec)
      local processes = run.life(spec, life, {})
      local verdict = judge.life(spec, { job = settings, events = {} }, life, processes, golden, state, true)
      if verdict.outcome ~= "golden" then
        fails_alone("the job '%s' fails without faults: %s", draw.describe(job), verdict.why)
      end
      profile[begins] = run.calls(spec.folder)
      if life == 1 then
        run.copy(spec.folder, profile.folder)
        profile.complete, profile.step = copied(state.complete), 0
        for step in pairs(state.complete) do profile.step = math.max(profile.step, step) end
      end
    end
    run.clean(spec.folder)
    return profile
  end)
end

--- Returns the plan of a seed.
---@param seed integer
---@param options {ranks: integer, steps: integer}
---@return ps.faults.Plan
function Trials:plan(seed, options)
  local job = draw.job(seed, options)
  return draw.plan(seed, job, self:profile(job))
end

-- Prepares the folder of a plan, with the checkpoints from which life 1 begins. Returns the state of the judge.
function Trials:begin(plan, spec)
  run.prepare(spec)
  local state = judge.state()
  if plan.begins ~= "saved" then return state end
  local profile = self:profile(plan.job)
  run.copy(profile.folder, spec.folder)
  state.complete = copied(profile.complete)
  for rank = 0, plan.job.ranks - 1 do
    for step = 1, profile.step do state.seen[rank .. " " .. step] = true end
  end
  return state
end

-- Runs a plan in a folder `name`. The folder is not removed.
---@param plan ps.faults.Plan
---@param name string
---@param patience number
---@return ps.faults.Verdict verdict also has `faults`, the number of faults that happened, `ended_s`, the longest time
-- between a failure and the end of all processes, and `starved_s`, the longest time that a process lacked a processor
---@return ps.faults.Process[][] processes the processes of each life
---@return table spec the table for run.life
function Trials:attempt(plan, name, patience)
  local golden, all = self:golden(plan.job), {}
  local spec = self:spec(plan.job, name, self.exe, patience)
  local state, verdict, named = self:begin(plan, spec), nil, nil
  for life = 1, plan.lives + 1 do
    local events, resumes = {}, life > plan.lives
    for _, event in ipairs(plan.events) do if event.life == life then events[#events + 1] = event end end
    spec.plan = draw.text(plan, life)
    spec.job.checks = resumes or nil
    run.settings(spec)
    local processes = run.life(spec, life, events)
    all[life] = processes
    verdict = judge.life(spec, plan, life, processes, golden, state, resumes)
    if verdict.outcome == "WRONG" then break end
    if verdict.outcome == "named" then named = verdict end
  end
  if verdict.outcome ~= "WRONG" then
    local problem = judge.left(spec, state, self.shm)
    verdict = problem and { outcome = "WRONG", why = problem } or named or verdict
  end
  verdict.happened = {}
  for i, event in ipairs(run.happened(spec.folder)) do
    verdict.happened[i] = event.rank .. ":" .. (event.text:match "^[^ ]+" or "")
  end
  verdict.faults, verdict.ended_s, verdict.starved_s = state.faults, state.ended_s, state.starved_s or 0
  return verdict, all, spec
end

--- Runs a plan in a folder `name`. The folder is not removed. If the machine was too busy for a verdict, the plan is
--- repeated with more patience.
---@param plan ps.faults.Plan
---@param name string
---@return ps.faults.Verdict verdict
---@return ps.faults.Process[][] processes the processes of each life
---@return table spec the table for run.life
function Trials:perform(plan, name)
  for i = 0, REPEATS do
    local patience = self.patience
    local verdict, lives, spec = self:attempt(plan, name, patience)
    local busy = verdict.starved_s > STARVED_S
    if not (verdict.timed and busy) or i == REPEATS then
      if not busy then self.patience = math.max(self.least, self.patience / MORE) end
      return verdict, lives, spec
    end
    self.repeated, self.patience = self.repeated + 1, math.min(math.max(self.patience, patience * MORE), MOST)
  end
end

--- Removes events from the plan, one at a time, as long as the plan stays WRONG. Returns the shortened plan.
---@param plan ps.faults.Plan
---@param name string
---@return ps.faults.Plan
function Trials:shrink(plan, name)
  local i = 1
  while i <= #plan.events do
    local fewer = {}
    for key, value in pairs(plan) do fewer[key] = value end
    fewer.events = {}
    for k, event in ipairs(plan.events) do if k ~= i then fewer.events[#fewer.events + 1] = event end end
    local verdict, _, spec = self:perform(fewer, name)
    run.clean(spec.folder)
    if verdict.outcome == "WRONG" then plan = fewer else i = i + 1 end
  end
  return plan
end

return trial
