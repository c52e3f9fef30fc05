-- SPDX-License-Identifier: BSD-3-Clause
-- Plans a script: finds how much memory and time its first step needs on a machine. The numbers are found by dry runs
-- (planning/trial.lua, search.lua). Each dry run is a child process. This process must not load psluajit, because it
-- could then not be forked (planning/child.lua).
local caller = require "ps.core.caller"
local child = require "ps.planning.child"
local course = require "ps.planning.course"
local hardware = require "ps.planning.hardware"
local pages = require "ps.planning.pages"
local search = require "ps.planning.search"
local seconds = require "ps.planning.seconds"
local trial = require "ps.planning.trial"

local planning = {}

---@class ps.planning.Options
---@field script string path of the script
---@field args? string[] arguments of the script
---@field hardware? string name of a machine (planning/hardware.lua), or nil for this machine
---@field host? number size of the machine's host memory in bytes
---@field ranks? integer number of processes (default: the number of GPUs of `hardware`)
---@field find? "budget"|"batch"|"model"|"all"|"nothing" selects the searches, which need further dry runs. "budget":
---  the smallest budgets and remedies. "batch": the largest batch. "model": the largest model (default: all)
---@field limit? number time limit of all searches in seconds, or 0 for no limit (default 60). A search that reaches the
---  limit reports a bound
---@field quiet? boolean whether to discard the engine's notes

-- Measures the speeds of this machine in a child process, with the simulated device `sim` as the GPU. Returns the
-- speeds.
local function rates_here()
  local got = child.run(function(give)
    local r = require("ps.engine.plan.rates").measured("sim")
    give { host_adam = r.host_adam, device_adam = r.device_adam, up = r.up, down = r.down, at_once = r.at_once }
  end, true)
  return not got.error and got or nil
end

-- Returns the tier in which a failed run had too little memory, the tier's budget, and the smallest budget of the tier
-- with which the run fits.
local function shortage(request, result)
  local tier = result.error.tier or "host"
  local had = (result.budgets or {})[tier]
  if not had then return nil end
  local least, bound = search.least_budget(request, tier, had * 2)
  return { tier = tier, budget = had, least_budget = least, least_budget_is_bound = bound }
end

local function find_budgets(plan, request, result)
  if result.fits and plan.tiers then
    for i, tier in ipairs(plan.tiers) do
      if tier.name ~= "disk" and tier.budget > 0 then
        tier.least_budget, tier.least_budget_is_bound = search.least_budget(request, tier.name, tier.peak)
      end
      if i == 1 then plan.least_budget = tier.least_budget end
    end
  elseif not result.fits then
    plan.short = shortage(request, result)
    plan.least_budget = plan.short and plan.short.least_budget
    plan.remedies = search.remedies(request, result)
  end
end

local function look_further(plan, request, result, what)
  local all = what == "all"
  if all or what == "budget" then find_budgets(plan, request, result) end
  if result.plain then return end
  if all or what == "batch" then
    plan.largest_batch, plan.largest_batch_is_bound = search.largest_batch(request, result)
  end
  if not (all or what == "model") then return end
  local blocks, parameters, bound = search.largest_model(request, result)
  if blocks then plan.largest_model = { blocks = blocks, parameters = parameters, is_bound = bound } end
end

-- Returns the size in bytes that a process of a real run would have. The size is the sum of three numbers:
-- 1. the size of all tiers except the disk
-- 2. the size of the dry run's process, which contains the same program and script, but no contents of tensors
-- 3. the other memory of a real process (result.kept), if it is known
-- Returns nil for a GPU, because the driver of the GPU also allocates host memory.
local function process_of(result)
  if result.device == "cuda" or not result.tiers then return nil end
  local sum, besides = 0, result.rss + (result.kept or 0)
  for _, tier in ipairs(result.tiers) do if tier.name ~= "disk" then sum = sum + tier.peak end end
  return { nbytes = sum + besides, besides = besides, kept = result.kept }
end

local OPTIONS = { script = "string", args = "table", hardware = "string", find = "string", quiet = "boolean",
  host = "number", ranks = "whole", limit = "number" }
local LIMIT_S = 60

--- Plans a script. If the script needs too much memory, the plan says so. Any other error is raised with the line of
--- the script, for example if the script fails, reads the value of a tensor, or does not call optimizer:step().
---@param options ps.planning.Options
---@return table plan the data that report.lines and --json print
function planning.plan(options)
  options = caller.options(options, "planning.plan", OPTIONS)
  local there = options.hardware and hardware.find(options.hardware, options.host)
  local ranks = options.ranks or there and math.max(1, there.count) or 1
  local request = { script = options.script, args = options.args or {}, quiet = options.quiet,
    ranks = ranks > 1 and ranks or nil,
    alone = there and not options.ranks and "--hardware " .. there.one or "--ranks 1",
    ranks_a_machine = there and there.count > 0 and math.min(there.count, ranks) or nil,
    machine = there and there.machine or { host_nbytes = options.host or 0, device_nbytes = 0 },
    rates = there and there.rates or rates_here() }
  local began = search.now()
  request.pages = pages.of_files()
  local result = trial.run(request)
  request.pages = nil
  local took = search.now() - began - (result.kept_s or 0)
  if not result.fits and not trial.is_short(result) then error(result.error.message, 0) end
  local plan = { script = options.script, hardware = there and there.text or "this machine", ranks = ranks,
    notes = {} }
  local own = { rss = true, kept = true, kept_s = true, notes = true }
  for key, value in pairs(result) do if not own[key] then plan[key] = value end end
  for _, notes in ipairs { result.notes or {}, there and there.notes or {} } do
    for _, note in ipairs(notes) do table.insert(plan.notes, note) end
  end
  if ranks > 1 and result.fits and (result.world or 1) == 1 and (result.tp or 1) == 1 and not result.cut then
    table.insert(plan.notes, "the script makes no group of ranks (ps.init_distributed): each process trains "
      .. "independently")
  end
  if there and result.fits and result.ops and result.parameters then
    plan.seconds = seconds.of(there, result, request.ranks_a_machine or ranks)
  end
  for _, run in ipairs(plan.runs or {}) do run.ops, run.kept = nil, nil end
  plan.process = process_of(result)
  if result.cut then plan.bubble = plan.seconds and plan.seconds.bubble or { course.bubble(result.cut) } end
  local limit = options.limit or LIMIT_S
  request.clock = limit > 0 and search.clock(limit, took) or nil
  look_further(plan, request, result, options.find or "all")
  plan.limited = request.clock and request.clock.over and limit or nil
  return plan
end

return planning
