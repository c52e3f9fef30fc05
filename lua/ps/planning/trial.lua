-- SPDX-License-Identifier: BSD-3-Clause
-- Runs dry runs of a script (planning/dry_run.lua), each in a child process. If a script has several ranks, only some
-- ranks are run. They are chosen so that every other rank is like one of them.
local child = require "ps.planning.child"
local course = require "ps.planning.course"
local dry_run = require "ps.planning.dry_run"
local outside = require "ps.planning.outside"

local trial = {}

local AT_ONCE = 4                          -- number of dry runs that run at the same time

---@class ps.planning.Request
---@field script string path of the script
---@field args string[] arguments of the script
---@field machine {host_nbytes: integer, device_nbytes: integer} sizes of the machine's memory in bytes. A host_nbytes
---  of 0 means the memory of this machine, and a device_nbytes of 0 means that there is no GPU
---@field rates? table speeds of the machine (ps.Rates), indexed by KEYS
---@field budgets? table<string, integer> budgets in bytes by tier ("device", "host", "disk"). They replace the budgets
---  in the configuration
---@field rank? integer number of the rank to run, or nil for one process. All other ranks are simulated
---@field ranks? integer number of ranks
---@field alone? string command-line option, for errors, that plans a single process
---@field kinds? integer[] the ranks to run; if nil, trial.run chooses the ranks
---@field ranks_a_machine? integer number of ranks on one machine
---@field recompute? boolean true: backward recomputes the model's blocks
---@field disk? boolean true: there is a disk tier with unlimited space
---@field rows? integer number of rows of each micro-batch (default: the script's number)
---@field blocks? integer number of blocks in the model's longest ModuleList (default: the script's number)
---@field seeks_owner? boolean true: the run of a pipeline ends before its first step if another rank along dp owns more
---  parameters
---@field known? table facts from the dry run of another rank of the same mesh (planning/known.lua)
---@field pages? ps.planning.Pages[] pages of files in the memory of the parent process (planning/pages.lua). If `pages`
---  is set, the run also measures `kept`, for which it computes matrix products
---@field quiet? boolean true: the engine's notes are discarded

---@class ps.planning.Result
---@field fits boolean
---@field error? {message: string, name?: string, sub?: string, tier?: string, wanted?: number, left?: number}
---@field tiers? {name: string, budget: number, peak: number, other: number, when: string}[]
---@field links? {upper: string, lower: string, up: number, down: number}[] bytes that are moved between two tiers per
---  step, after the first step
---@field parameters? number
---@field model_parameters? number total number of parameters of all stages, if the model is cut
---@field state_bytes? number total size of all chunks in bytes
---@field chunk_size? number number of elements of a chunk
---@field budgets? table<string, number> after a failed run: budgets in bytes by tier
---@field rows? number number of rows of a micro-batch
---@field blocks? number number of blocks in the model's longest ModuleList
---@field ops? {name: string, flops: number, bytes: number}[] costs of the step's ops
---@field rss? number peak resident size of the dry run's process in bytes
---@field kept? number size in bytes of the memory of a real process that neither `rss` nor the tiers contain, or nil if
---  it is unknown
---@field kept_s? number duration of the measurement of `kept` in seconds
---@field plain? table<string, number> for a model that is not in chunks: peak size of memory in bytes, by device
---@field owned? number[] number of parameters that each rank along dp owns, or nil if parameters are not sharded
---@field owner? integer index along dp, counted from 0, of the rank that owns the most parameters
---@field ended? boolean whether the run ended before its first step (seeks_owner)
---@field cut? ps.planning.Pipeline the cut of the model into stages
---@field axes? {dp?: number, pp?: number, tp?: number} number of bytes that a rank sends along each axis in a step. If
---  several ranks were run, this is the largest number
---@field pieces? {count: integer, nbytes: number} rows that are exchanged along tp during products. nbytes: size of the
---  rows in bytes. count: number of pieces in which the rows are exchanged
---@field tp? integer number of ranks that share the same layers
---@field known? table facts that hold for all ranks of the mesh (planning/known.lua)
---@field kinds? integer[] the ranks that were run
---@field runs? ps.planning.Run[] the results of the ranks in `kinds`
---@field notes? string[] texts that describe how the dry run differs from a real run

---@class ps.planning.Pipeline
---@field stages integer
---@field stage integer stage of the rank that was run, counted from 0
---@field schedule string
---@field virtual_stages integer number of virtual stages per stage
---@field micro_batches integer
---@field performed? integer number of micro-batches that the engine's dry run performed, or nil if no dry run has ended
---@field vstages {stage: integer, parts: integer, numel: number, forward: number, input: number, weight: number, held:
---  number, up: number, down: number}[] forward, input, weight: number of operations of a micro-batch. held: bytes that
---  the forward of a micro-batch keeps for backward. up: bytes that are sent to the next virtual stage. down: bytes of
---  gradients that are sent back
---@field sent number bytes that this stage sends to other stages in a step

---@class ps.planning.Run
---@field rank integer
---@field stage? integer pipeline stage, counted from 0
---@field kind? "first"|"middle"|"before last"|"last"
---@field stands_for? integer[] the stages that this run represents; none of them needs more memory than `stage`
---@field tiers table[]
---@field links table[]
---@field axes table<string, number>
---@field ops? table[]
---@field parameters number
---@field rss number

--- Starts a dry run. trial.finish returns its result.
---@param request ps.planning.Request
---@return table running
function trial.begin(request)
  return child.begin(function(give) dry_run.perform(request, give) end, request.quiet or false)
end

--- Waits until a dry run has ended, and returns its result.
---@param running table
---@return ps.planning.Result
function trial.finish(running)
  local result = child.finish(running)
  outside.remove(running.pid)
  result.fits = result.fits or false
  return result
end

-- Returns a copy of a request in which the fields in `changes` are replaced.
local function with(request, changes)
  local copy = {}
  for key, value in pairs(request) do copy[key] = value end
  for key, value in pairs(changes) do copy[key] = value end
  return copy
end

local function of_rank(request, rank) return with(request, { rank = request.ranks and rank or nil }) end

-- -- ranks that represent all ranks -----------------------------------------------------------------------------------
-- Returns a text that is equal for two stages if they have the same state and compute the same operations.
local function likeness(cut, stage)
  local parts = {}
  for _, row in ipairs(cut.vstages) do
    if row.stage == stage then
      parts[#parts + 1] = ("%d %.17g %.17g %.17g %.17g %.17g"):format(row.numel, row.forward, row.input, row.held,
        row.up, row.down)
    end
  end
  return table.concat(parts, " ")
end

local function kind_of(stage, stages)
  return stage == 0 and "first" or stage == stages - 1 and "last" or stage == stages - 2 and "before last" or "middle"
end

-- Returns a list of the stages to run. The first, the second to last and the last stage are run. The other stages are
-- divided into groups of stages with the same likeness(). Of each group, the stage with the most activations is run.
local function stages_of(cut)
  local held, list, middle = course.held(cut), {}, {}
  for stage = 0, cut.stages - 1 do
    local run = { stage = stage, kind = kind_of(stage, cut.stages), stands_for = { stage } }
    local like = run.kind == "middle" and likeness(cut, stage)
    local known = like and middle[like]
    if known then
      table.insert(known.stands_for, stage)
      if held[stage + 1] > held[known.stage + 1] then known.stage = stage end
    else
      list[#list + 1] = run
      if like then middle[like] = run end
    end
  end
  return list
end

-- Returns the ranks that represent all ranks of a run without a pipeline. Ranks along dp that own the same number of
-- parameters are alike, and the first of them is run. Ranks along tp are alike, because their parts of the layers have
-- the same sizes, and the first of them is run.
local function owners(result)
  local list, seen = {}, {}
  for rank, numel in ipairs(result.owned or { 0 }) do
    if not seen[numel] then
      seen[numel] = true
      list[#list + 1] = (rank - 1) * (result.tp or 1)
    end
  end
  return list
end

-- -- several ranks ----------------------------------------------------------------------------------------------------
local KEPT = { "tiers", "links", "axes", "pieces", "ops", "parameters", "rss", "kept" }

local function note(runs, rank, result, about)
  local run = { rank = rank }
  for key, value in pairs(about or {}) do run[key] = value end
  for _, key in ipairs(KEPT) do run[key] = result[key] end
  runs[#runs + 1] = run
end

-- Merges the results of several ranks. The result contains the highest peak of each tier, and the largest number of
-- bytes over each link and along each axis.
local function joined(first, runs)
  local out, kept = {}, 0
  for key, value in pairs(first) do if key ~= "known" then out[key] = value end end
  out.tiers, out.links, out.axes, out.runs, out.kinds = {}, {}, {}, runs, {}
  for number, run in ipairs(runs) do
    out.kinds[number] = run.rank
    for i, tier in ipairs(run.tiers or {}) do
      if not out.tiers[i] or tier.peak > out.tiers[i].peak then out.tiers[i] = tier end
    end
    for i, link in ipairs(run.links or {}) do
      local most = out.links[i]
      if not most or link.up + link.down > most.up + most.down then out.links[i] = link end
    end
    for axis, nbytes in pairs(run.axes or {}) do
      if axis == "tp" and nbytes > (out.axes.tp or -1) then out.pieces = run.pieces end
      out.axes[axis] = math.max(out.axes[axis] or 0, nbytes)
    end
    out.rss = math.max(out.rss or 0, run.rss or 0)
    kept = kept and run.kept and math.max(kept, run.kept)
  end
  out.kept = kept
  if first.plain then out.tiers, out.links, out.axes = nil, nil, nil end
  return out
end

-- Runs the ranks in the list `ranks`, AT_ONCE at the same time. Stores their results by rank in `done`, and returns
-- `done`. A rank that already has a result in `done` is not run again.
local function run_ranks(request, ranks, done)
  local running, first = {}, 1
  local function finish_one()
    done[ranks[first]] = running[first] and trial.finish(running[first]) or done[ranks[first]]
    first = first + 1
  end
  for i, rank in ipairs(ranks) do
    if i - first >= AT_ONCE then finish_one() end
    running[i] = not done[rank] and trial.begin(of_rank(request, rank))
  end
  while first <= #ranks do finish_one() end
  return done
end

-- Merges the results of several ranks. If a run has failed, returns the result of the first failed run.
local function one_of(ranks, done, about)
  local runs = {}
  for i, rank in ipairs(ranks) do
    if not done[rank].fits then return done[rank] end
    note(runs, rank, done[rank], about and about[i])
  end
  return joined(done[ranks[1]], runs)
end

-- Runs the ranks of a pipeline that represent all ranks, and merges their results. In each stage of stages_of(), the
-- rank that owns the most parameters must be run. This rank is known only after some rank of the stage has been run. So
-- the function first runs the rank that has the same index along dp as the owner of the first stage. If another rank
-- owns more parameters, this run ends early, and the other rank is run.
local function run_stages(request, first)
  local copies, list, ranks, done = request.ranks / first.cut.stages, stages_of(first.cut), {}, {}
  if not first.ended then done[0] = first end
  request = with(request, { known = first.known })
  local seeking = with(request, { seeks_owner = true })
  local function number(stage, owner) return stage * copies + owner * first.tp end     -- ranks are numbered along tp
                                                                                       -- first
  for i, about in ipairs(list) do ranks[i] = number(about.stage, first.owner) end
  run_ranks(seeking, ranks, done)
  for i, rank in ipairs(ranks) do
    if not done[rank].fits then return done[rank] end
    ranks[i] = number(list[i].stage, done[rank].owner)
  end
  local result = one_of(ranks, run_ranks(request, ranks, done), list)
  result.notes = first.notes                                -- later runs use the cut of the first run
  return result
end

--- Performs the dry runs of a script. If the request has several ranks, only ranks that represent all ranks are run:
---
--- Without a pipeline, ranks along dp that own the same number of parameters are alike, and the first of them is run.
--- In a pipeline, the rank that owns the most parameters is run in each of these stages: the first, the second to last
--- and the last stage, and one stage of each group of equal middle stages (the stage with the most activations).
---
--- The script fits only if all these runs fit. The field `kinds` of the request overrides the choice of ranks.
---@param request ps.planning.Request
---@return ps.planning.Result
function trial.run(request)
  if request.kinds then return one_of(request.kinds, run_ranks(request, request.kinds, {})) end
  local first = trial.finish(trial.begin(with(of_rank(request, 0), { seeks_owner = true })))
  if not request.ranks or not first.fits then return first end
  if first.cut then return run_stages(request, first) end
  local ranks = owners(first)
  return one_of(ranks, run_ranks(request, ranks, { [0] = first }))
end

--- Returns whether a run has failed for lack of memory. In this case, the script may fit with other budgets, fewer rows
--- or fewer blocks.
---@param result ps.planning.Result
---@return boolean
function trial.is_short(result)
  local e = result.error
  return e ~= nil and (e.name == "ENOMEM" or e.name == "ENOSPC")
end

return trial
