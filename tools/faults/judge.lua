-- SPDX-License-Identifier: BSD-3-Clause
-- Decides from the outside how the lives of a run ended: golden, named, or wrong. The judge uses the output and the
-- exit status of the processes, the log of the job, and the list of faults that happened (tools/faults/run.lua). It
-- compares these with the table of faults in tools/faults/draw.lua.
local draw = require "tools.faults.draw"
local run = require "tools.faults.run"

local judge = {}

-- Considers the faults list[from], list[from + 1], ... of a life. Returns the kinds of these faults that can end the
-- life, by rank, and a list of all these kinds.
local function happened(plan, life, list, from)
  local by_rank, all = {}, {}
  local function add(rank, kind)
    if kind.golden then return end
    by_rank[rank] = by_rank[rank] or {}
    table.insert(by_rank[rank], kind)
    all[#all + 1] = kind
  end
  for i = from, #list do
    local door, action, number = list[i].text:match "^([%l/]+)@%d+=([%w_]+):?(%d*)"
    for _, event in ipairs(plan.events) do
      local its_door, its_action, its_number = (event.text or ""):match "^([%l/]+)@[%d+]+=([%w_]+):?(%d*)"
      if event.life == life and event.rank == list[i].rank and its_door == door and its_action == action
        and (action ~= "signal" and action ~= "stop" or its_number == number) then
        local kind = draw.KINDS[event.kind]
        for rank = kind.everywhere and 0 or event.rank, kind.everywhere and plan.job.ranks - 1 or event.rank do
          add(rank, kind)
        end
        break
      end
    end
  end
  for _, event in ipairs(plan.events) do
    if event.life == life and event.kind == "twice" then add(event.rank, draw.KINDS.twice) end
  end
  return by_rank, all
end

-- Patterns of the words by which an error names the operation that a rank was performing.
local OPERATIONS = { "%l[%l_]+, call %d+ of rank", "stripe %d+, call %d+ of rank", "%l[%l ]+, call %d+:",
  "%(call %d+%)", "%l[%l_]+ %u of micro%-batch", "waiting [%d.]+ s for", "telling the other ranks",
  "joining the other ranks", "connecting to the watch", "connect to the others", "in forward", "in backward",
  "checkpoint", "found no rank 0 by" }

local function has_any(text, patterns)
  for _, pattern in ipairs(patterns) do
    local found = text:match("[^\n]*" .. pattern .. "[^\n]*")
    if found then return found end
  end
end

-- Returns the text that names a cause of one of the kinds, or nil. If the fault of the kind is at a link, the text must
-- also name an operation.
local function fits(text, kinds)
  for _, kind in ipairs(kinds) do
    local found = has_any(text, kind.causes or {})
    if found and (not kind.link or has_any(text, OPERATIONS)) then return found end
  end
end

-- Returns the reason why a process ended: the text of the last line that begins with the program's name.
local function last_words(text)
  local words = text:match "([^\n]+)\n*$" or ""
  for line in text:gmatch "psluajit[%w_]*: ([^\n]+)" do words = line end
  return (words:gsub("^%c*", ""):sub(1, 240))
end

-- Patterns of errors that may depend on the speed of the machine.
local TIMES = { "is silent for", "within [%d.]+ s", "waiting [%d.]+ s", "does not answer", "gave up" }

-- Returns how a process ended. If it succeeded, returns nil. Otherwise returns "named" or "wrong", the reason, and true
-- if the process could have ended in another way on a faster machine.
local function ending(process, by_rank, all)
  local own = by_rank[process.rank] or {}
  local who = ("rank %d%s"):format(process.rank, process.twin and " (its twin)" or "")
  if process.hung then
    return "wrong", ("%s did not end within %.0f s"):format(who, process.seconds), process.hung == "busy"
  end
  if process.orphans then return "wrong", who .. " left a process behind" end
  if process.signal then
    for _, kind in ipairs(own) do
      if kind.dies and kind.dies[process.signal] and (not kind.says or process.text:find(kind.says)) then
        return "named", kind.says and last_words(process.text) or kind.name
      end
    end
    return "wrong", ("%s was ended by signal %d: %s"):format(who, process.signal, last_words(process.text))
  end
  if process.code == 0 then return nil end
  local cause = fits(process.text, own) or fits(process.text, all)
  -- A rank without a fault must name the rank that had the fault, and the operation that it was performing itself.
  if not cause and #all > 0 and has_any(process.text, OPERATIONS) then
    for rank in pairs(by_rank) do
      for _, verb in ipairs(draw.LOST) do cause = cause or has_any(process.text, { "rank " .. rank .. verb }) end
    end
  end
  if cause then return "named", last_words(process.text) end
  return "wrong", ("%s ended with code %s, without a cause: %s"):format(who, tostring(process.code),
    last_words(process.text)), has_any(process.text, TIMES) ~= nil
end

-- Returns the time at which a life failed, or nil if no process failed. It is the latest of three times: the last
-- fault, the last continuation of a stopped rank, and the first end of a process. After this time, all processes must
-- end within a few seconds.
local function failed_at(processes, list)
  local first, last, failed = math.huge, 0, false
  for _, process in ipairs(processes) do
    first = math.min(first, process.over or math.huge)
    failed = failed or process.code ~= 0
    last = math.max(last, process.continued or 0)
  end
  for _, event in ipairs(list) do last = math.max(last, event.at or 0) end
  return failed and first < math.huge and math.max(first, last) or nil
end

-- Checks that parameters have the values of the golden run. The values of all ranks are in one table, because the chunk
-- size determines which rank has which parameters. With tensor parallelism, each rank has its own table, because each
-- rank has its own shard of a parameter.
local function check_step(line, job, golden)
  local want = golden[line.rank .. " " .. line.step]
  if not want then return ("rank %d reports step %d, which does not exist"):format(line.rank, line.step) end
  local values = job.config.tensor_parallel and want.values or golden[line.step]
  for name, hash in line[1]:gmatch "([^=,]+)=(%x+)" do
    if values[name] ~= hash then
      return ("rank %d has other values of %s after step %d"):format(line.rank, name, line.step)
    end
  end
  if line[2] ~= want.rows then return ("rank %d read other rows in step %d"):format(line.rank, line.step) end
end

-- Returns the step of the nth newest checkpoint, or 0 if there is no such checkpoint. Only checkpoints that were
-- reported complete and are kept count.
local function complete(state, nth, keep)
  local steps = {}
  for step in pairs(state.complete) do steps[#steps + 1] = step end
  table.sort(steps, function(a, b) return a > b end)
  return nth <= keep and steps[nth] or 0
end

-- Checks the step at which a life began. If a fault of this life made the newest checkpoints unreadable, these
-- checkpoints may be skipped. The life must begin at the newest remaining checkpoint that was reported complete, or at
-- a later step.
local function check_begin(line, state, unreadable, keep)
  local skipped = tonumber(line[1]) or 0
  if skipped > 0 and not unreadable then return ("%d checkpoints were damaged"):format(skipped) end
  local newest = complete(state, skipped + 1, keep)
  if line.step < newest then
    return ("rank %d continued from step %d and skipped %d checkpoints, but that of step %d was complete"):format(
      line.rank, line.step, skipped, newest)
  end
end

-- Compares the log of a life with the log of the golden run. `state` contains facts about the earlier lives.
local function check_log(log, job, life, golden, state, unreadable)
  local first
  for _, line in ipairs(log) do
    if line.life == life then
      local problem
      if line.what == "step" then
        problem = check_step(line, job, golden)
        state.seen[line.rank .. " " .. line.step] = true
      elseif line.what == "damaged" then
        problem = "the file `latest` was damaged: it has neither its older bytes nor the new ones"
      elseif line.what == "resumed" then
        problem = check_begin(line, state, unreadable, job.keep)
        first = first or line.step
        if line.step ~= first then
          problem = ("rank %d continued from step %d, another rank from step %d"):format(line.rank, line.step, first)
        end
      end
      if problem then return problem end
    end
  end
  state.saves = 0                                          -- number of checkpoints that this life saved
  for _, line in ipairs(log) do
    if line.life == life and line.what == "saved" then
      state.complete[line.step], state.saves = true, state.saves + 1
    end
  end
end

--- Converts the log of the golden run to a table. The key "RANK STEP" has the value { values, rows }. The key STEP has
--- the values of all ranks. `values` maps the names of parameters to values. Checks that the run read each row once per
--- epoch.
---@param log table[]
---@param job table
---@return table
function judge.golden(log, job)
  local golden, seen = {}, {}
  local sharded = (job.config.pipeline or job.config.tensor_parallel) and 1 or job.ranks
  for _, line in ipairs(log) do
    if line.what == "step" then
      local values, together = {}, golden[line.step] or {}
      for name, hash in line[1]:gmatch "([^=,]+)=(%x+)" do values[name], together[name] = hash, hash end
      golden[line.step], golden[line.rank .. " " .. line.step] = together, { values = values, rows = line[2] }
      for row in line[2]:gmatch "%x+" do
        if line.rank < sharded then
          assert(not seen[row], "the golden run read a row twice")
          seen[row] = true
        end
      end
    end
  end
  for rank = 0, job.ranks - 1 do
    for step = 1, job.steps do assert(golden[rank .. " " .. step], "the golden run has no step " .. step) end
  end
  return golden
end

---@class ps.faults.Verdict
---@field outcome "golden"|"named"|"WRONG"
---@field why? string
---@field timed? boolean     true if the outcome is WRONG and could be different on a faster machine

--- Returns the state of the judge before the first life. The judge passes the state from life to life. It has these
--- fields:
---   complete: the steps of the checkpoints that were reported complete
---   seen: "RANK STEP" for each step that was reported
---   faults: the number of faults
---@return {complete: table<integer, true>, seen: table<string, true>, faults: integer}
function judge.state() return { complete = {}, seen = {}, faults = 0 } end

-- Returns a problem if a rank reported success but did not reach the end of its script.
local function check_ends(log, job, life, processes)
  local ended = {}
  for _, line in ipairs(log) do
    if line.life == life and line.what == "end" then ended[line.rank] = line.step end
  end
  local last = job.upto or job.steps
  for _, process in ipairs(processes) do
    if process.code == 0 and ended[process.rank] ~= last then
      return ("rank %d ended with exit code 0, but %s: %s"):format(process.rank, ended[process.rank]
        and ("after step %d of %d"):format(ended[process.rank], last) or "before the end of its script",
        last_words(process.text))
    end
  end
end

--- Judges one life. `resumes` is true if the life had no faults and must therefore succeed. `state` is the table that
--- judge.state returned.
---@param spec table
---@param plan ps.faults.Plan
---@param life integer
---@param processes ps.faults.Process[]
---@param golden table
---@param state table
---@param resumes boolean
---@return ps.faults.Verdict
function judge.life(spec, plan, life, processes, golden, state, resumes)
  local list = run.happened(spec.folder)
  local by_rank, all = happened(plan, life, list, state.faults + 1)
  state.faults = #list
  local outcome, why = "golden", nil
  local from, most = failed_at(processes, list), spec.job.ends_s or math.huge
  for _, process in ipairs(processes) do
    local how, what, timed = ending(process, by_rank, all)
    local after = from and process.over and process.over - from or 0
    state.ended_s = math.max(state.ended_s or 0, after)
    if how ~= "wrong" and after > most then
      how, timed = "wrong", true
      what = ("rank %d ended %.1f s after the last fault and the first end of a rank"):format(
        process.rank, after)
    end
    state.starved_s = math.max(state.starved_s or 0, process.starved_s or 0)
    if how == "wrong" then return { outcome = "WRONG", why = what, timed = timed } end
    if how and outcome == "golden" then outcome, why = "named", what end
  end
  local unreadable = false
  for _, kind in ipairs(all) do unreadable = unreadable or kind.unreadable or false end
  local log = run.log(spec.folder)
  local problem = check_log(log, spec.job, life, golden, state, unreadable)
    or check_ends(log, spec.job, life, processes)
  if problem then return { outcome = "WRONG", why = problem } end
  if resumes and outcome ~= "golden" then return { outcome = "WRONG", why = "the resume ended: " .. why } end
  return { outcome = outcome, why = why }
end

--- Checks for missing steps and leftover files after all lives. Returns a description of the problem, or nil if there
--- is none. A save removes the unfinished files of a save that was killed. Hence unfinished files are allowed if the
--- last life saved nothing. `shm` contains the names that were in /dev/shm before the run.
---@param spec table
---@param state table
---@param shm table<string, boolean>
---@return string?
function judge.left(spec, state, shm)
  local job = spec.job
  for rank = 0, job.ranks - 1 do
    for step = 1, job.steps do
      if not state.seen[rank .. " " .. step] then return ("rank %d never reported step %d"):format(rank, step) end
    end
  end
  for _, name in ipairs(run.names "/dev/shm") do
    if not shm[name] and not name:match "^sem%." then return "/dev/shm has " .. name end
  end
  local outside = run.outside(spec.folder)
  if #outside > 0 then return "left behind: " .. outside[1] end
  for _, name in ipairs(run.names(spec.folder)) do
    if name ~= "run" and name ~= "rendezvous" and name ~= "monitor" then return "left behind: " .. name end
  end
  local kept = 0
  for _, name in ipairs(run.names(spec.folder .. "/run")) do
    local checkpoint = name:match "^step%-%d+$" or name:match "^step%-%d+%.safetensors$"
    local known = name == "latest" or checkpoint
    if checkpoint then kept = kept + 1 end
    local killed = state.saves == 0 and (name:match "^step%-%d+%.tmp%-" or name:match "^step%-%d+%.safetensors%.tmp%-"
      or name:match "^latest%.tmp%-")
    if not known and not killed then
      return "left behind: run/" .. name
    end
  end
  if state.saves > 0 and kept > job.keep then
    return ("run/ has %d checkpoints, but keep is %d"):format(kept, job.keep)
  end
end

return judge
