-- SPDX-License-Identifier: BSD-3-Clause
-- Searches for the smallest budget, the largest batch and the largest model with which a script's first step fits. All
-- results are verified by dry runs: a dry run with the reported value fits, and a dry run with the next value does not.
-- The total time of all searches of a request is limited (search.clock). If a search reaches the limit, its result is a
-- bound: the best value that has fitted so far.
local time = require "posix.time"
local trial = require "ps.planning.trial"

local search = {}

local NEAR = 1.005             -- the search for a smallest budget ends when its bounds differ by at most this factor
local BELOW = 0.97             -- the search also checks that a run with this fraction of the smallest budget fails
local PAGE = 4096
local MOST_BYTES = 2 ^ 50
local MOST_ROWS = 2 ^ 20
local MOST_BLOCKS = 2 ^ 12
local GROWTH = 3               -- assumed maximum: a run with twice the rows or blocks takes 3 times as long

-- Returns a copy of a request in which the fields in `changes` are replaced. The dry runs of a search do not print
-- notes, so `quiet` is true in the copy.
local function with(request, changes)
  local copy = { quiet = true }
  for key, value in pairs(request) do copy[key] = value end
  copy.quiet = true
  for key, value in pairs(changes) do copy[key] = value end
  return copy
end

--- Returns the current time of a monotonic clock in seconds.
---@return number
function search.now()
  local t = time.clock_gettime(time.CLOCK_MONOTONIC)
  return t.tv_sec + t.tv_nsec * 1e-9
end
local now = search.now

---@class ps.planning.Clock
---@field ends number time at which searches must end
---@field longest number duration of the longest dry run so far, in seconds
---@field over boolean whether a search ended because the time was used up

--- Creates the clock (request.clock) that limits the total time of all searches of one request.
---@param seconds number
---@param took number duration of the dry run of the unchanged script, in seconds
---@return ps.planning.Clock
function search.clock(seconds, took) return { ends = now() + seconds, longest = took, over = false } end

-- Returns whether enough time is left for a run that takes clock.longest * times seconds, where clock.longest is the
-- duration of the longest run so far. Returns true if the time is not limited.
local function in_time(request, times)
  local clock = request.clock
  if not clock or now() + clock.longest * times <= clock.ends then return true end
  clock.over = true
  return false
end

-- Returns whether a run with these changes fits, and the result of the run. If the run fails for any reason other than
-- a shortage of memory, raises its error.
local function fits(request, changes)
  local began = now()
  local result = trial.run(with(request, changes))
  if request.clock then request.clock.longest = math.max(request.clock.longest, now() - began) end
  if result.fits then return true, result end
  if trial.is_short(result) then return false, result end
  error(result.error.message, 0)
end

local function up_to_page(n) return math.ceil(n / PAGE) * PAGE end

-- Returns a copy of the budgets of a request in which the budget of `tier` is nbytes.
local function budgets_with(request, tier, nbytes)
  local budgets = {}
  for name, value in pairs(request.budgets or {}) do budgets[name] = value end
  budgets[tier] = nbytes
  return budgets
end

--- Returns the smallest budget of a tier with which the script fits. The budgets of the other tiers are not changed.
---@param request ps.planning.Request
---@param tier string "device" or "host"
---@param from integer the budget in bytes at which the search begins: the current budget or a peak
---@return integer? bytes nil if the script does not fit with any budget
---@return boolean? bound true if the time was used up; the smallest budget is then at most the returned value
function search.least_budget(request, tier, from)
  local function ok(nbytes) return (fits(request, { budgets = budgets_with(request, tier, nbytes) })) end
  local high = up_to_page(math.max(from, PAGE))
  while not ok(high) do
    high = high * 2
    if high > MOST_BYTES then return nil end
  end
  local low = 0
  while true do
    while high > PAGE and high / math.max(low, 1) > NEAR do
      local middle = up_to_page(low > 0 and math.sqrt(low * high) or high / 2)
      if middle >= high then break end
      if not in_time(request, 1) then return high, true end
      if ok(middle) then high = middle else low = middle end
    end
    local below = math.floor(high * BELOW / PAGE) * PAGE
    if below < PAGE then return high end
    if not in_time(request, 1) then return high, true end
    if not ok(below) then return high end
    -- The script fits with a smaller budget again, because a larger budget does not always provide more space. Continue
    -- the search below this budget.
    low, high = 0, below
  end
end

-- Returns the largest integer n <= most for which fn(n) is true, or 0 if fn(1) is false. There must be a number such
-- that fn is true up to this number and false above it. `known` is a number for which the result of fn is already
-- known, and `holds` is this result. The second return value is true if the search ended early: because it reached
-- `most`, or because the time was used up.
local function largest(request, fn, known, holds, most)
  local low, high = 0, known
  if holds then
    low, high = known, known * 2
    while high <= most do
      if not in_time(request, GROWTH) then return low, true end
      if not fn(high) then break end
      low, high = high, high * 2
    end
    if high > most then return low, true end
  end
  while high - low > 1 do
    if not in_time(request, 1) then return low, true end
    local middle = math.floor((low + high) / 2)
    if fn(middle) then low = middle else high = middle end
  end
  return low
end

--- Returns the largest number of rows per micro-batch with which the script fits. Returns nil if the rows of the
--- script's batch cannot be counted.
---@param request ps.planning.Request
---@param result ps.planning.Result result of the unchanged script
---@return integer?
---@return boolean? bound true if the returned value is only a lower bound
function search.largest_batch(request, result)
  if not result.rows then return nil end
  return largest(request, function(rows) return (fits(request, { rows = rows })) end, result.rows, result.fits,
    MOST_ROWS)
end

--- Changes the number of blocks in the longest ModuleList of the script's model. Returns the largest number of blocks
--- with which the script fits, and the number of parameters of this model. Returns nil if the model has no ModuleList,
--- or if the script's own model does not fit.
---@param request ps.planning.Request
---@param result ps.planning.Result result of the unchanged script
---@return integer? blocks
---@return integer? parameters
---@return boolean? bound true if the returned numbers are only lower bounds
function search.largest_model(request, result)
  if not result.blocks or not result.fits then return nil end
  local parameters = { [result.blocks] = result.parameters }
  local blocks, bound = largest(request, function(n)
    local ok, run = fits(request, { blocks = n })
    if ok then parameters[n] = run.parameters end
    return ok
  end, result.blocks, true, MOST_BLOCKS)
  return blocks, parameters[blocks], bound
end

-- Changes that may make a script fit. Each entry contains a description and the changed fields of the request.
local CHANGES = {
  { "recompute = true in the configuration", { recompute = true } },
  { "a disk tier, memory.disk = { path = FOLDER }", { disk = true } },
  { "a disk tier and recompute = true", { disk = true, recompute = true } },
}

--- Returns the changes that make a script fit, as a list of texts. Each change is tested by a dry run.
---@param request ps.planning.Request
---@param result ps.planning.Result
---@return string[]
function search.remedies(request, result)
  local list = {}
  if result.fits then return list end
  local has_disk = false
  for _, tier in ipairs(result.tiers or {}) do has_disk = has_disk or tier.name == "disk" end
  for _, change in ipairs(CHANGES) do
    if not (has_disk and change[2].disk) and fits(request, change[2]) then list[#list + 1] = change[1] end
  end
  return list
end

return search
