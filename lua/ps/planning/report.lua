-- SPDX-License-Identifier: BSD-3-Clause
-- Formats a plan as lines of text, for tools/plan.lua. This module does not compute the numbers of a plan.
local readable = require "ps.core.readable"

local report = {}

local function count(n)
  local units, i = { "", " thousand", " M", " G", " T" }, 1
  while n >= 1000 and i < #units do n, i = n / 1000, i + 1 end
  return (i == 1 and "%d%s" or "%.3g%s"):format(n, units[i])
end

local function tiers(lines, plan)
  local rows = {}
  for i, tier in ipairs(plan.tiers) do
    rows[i] = { tier.name, tier.budget > 0 and readable.bytes(tier.budget) or "no limit", readable.bytes(tier.peak),
      tier.least_budget and (tier.least_budget_is_bound and "<= " or "") .. readable.at_least(tier.least_budget) or "-",
      tier.when or "-" }
  end
  local columns = { { title = "tier", left = true }, { title = "budget" }, { title = "peak" },
    { title = "least budget" }, { title = "when the peak is", left = true } }
  for _, line in ipairs(readable.lines(columns, rows)) do lines[#lines + 1] = line end
end

local function links(lines, plan)
  local rows = {}
  for i, link in ipairs(plan.links) do
    rows[i] = { link.upper .. " - " .. link.lower, readable.bytes(link.up), readable.bytes(link.down) }
  end
  if #rows == 0 then return end
  local columns = { { title = "link", left = true }, { title = "up a step" }, { title = "down a step" } }
  for _, line in ipairs(readable.lines(columns, rows)) do lines[#lines + 1] = line end
end

local AXES = { dp = "gathers of parameters, sums of gradients", pp = "activations and their gradients",
  tp = "activations within layers, and their gradients" }

local function axes(lines, plan)
  for _, axis in ipairs { "dp", "pp", "tp" } do
    local nbytes = plan.axes and plan.axes[axis]
    if nbytes then
      local beside = axis == "tp" and plan.pieces and (", %s during products in %d pieces"):format(
        readable.bytes(plan.pieces.nbytes), plan.pieces.count) or ""
      lines[#lines + 1] = ("axis %s: a rank sends up to %s per step (%s)%s"):format(axis, readable.bytes(nbytes),
        AXES[axis],
        beside)
    end
  end
end

-- Returns a text for a list of stages, such as "3", "1 to 6" or "1, 4".
local function stages_text(list)
  local first, last = list[1], list[#list]
  if #list > 2 and last - first + 1 == #list then return ("%d to %d"):format(first, last) end
  return table.concat(list, ", ")
end

local function percent(range)
  local low, high = ("%.1f"):format(100 * range[1]), ("%.1f"):format(100 * (range[2] or range[1]))
  return low == high and low .. " %" or ("%s to %s %%"):format(low, high)
end

-- Adds lines about a pipeline: a line about the cut, and a line for each kind of stage.
local function stages(lines, plan)
  local cut, rows = plan.cut, {}
  lines[#lines + 1] = ("%s parameters in %d stages, %s, %d virtual stage%s each, %d micro-batches; bubble %s by the "
    .. "simulated course"):format(count(plan.model_parameters), cut.stages, cut.schedule, cut.virtual_stages,
    cut.virtual_stages > 1 and "s" or "", cut.micro_batches, percent(plan.bubble))
  for _, run in ipairs(plan.runs) do
    for _, tier in ipairs(run.tiers) do
      rows[#rows + 1] = { run.kind, stages_text(run.stands_for), tostring(run.rank), count(run.parameters), tier.name,
        tier.budget > 0 and readable.bytes(tier.budget) or "no limit", readable.bytes(tier.peak), tier.when or "-" }
    end
  end
  local columns = { { title = "stage", left = true }, { title = "number" }, { title = "rank run" },
    { title = "parameters" }, { title = "tier", left = true }, { title = "budget" }, { title = "peak" },
    { title = "when", left = true } }
  for _, line in ipairs(readable.lines(columns, rows)) do lines[#lines + 1] = line end
end

local function verdict(plan)
  if plan.fits then
    if plan.plain then return "fits: yes, in plain memory" end
    local first = plan.tiers[1]
    if first.budget > 0 then
      return ("fits: yes; %s of %s are left on tier %s at the peak"):format(readable.bytes(first.budget - first.peak),
        readable.bytes(first.budget), first.name)
    end
    return "fits: yes"
  end
  local short = plan.short
  if short and short.least_budget then
    local most = short.least_budget_is_bound and "at most " or ""
    return ("fits: no; tier %s lacks %s%s: its least budget is %s%s, but it has %s"):format(short.tier, most,
      readable.at_least(short.least_budget - short.budget), most, readable.at_least(short.least_budget),
      readable.bytes(short.budget))
  end
  return "fits: no"
end

--- Returns the lines of a plan.
---@param plan table the result of ps.planning.plan
---@return string[]
function report.lines(plan)
  local lines = { ("plan of %s on %s"):format(plan.script, plan.hardware), verdict(plan) }
  local function say(format, ...) lines[#lines + 1] = format:format(...) end
  if plan.ranks > 1 then
    local list = plan.kinds or { 0 }
    say("%d ranks, simulated one by one: rank%s %s%s", plan.ranks, #list > 1 and "s" or "",
      table.concat(list, ", "), plan.cut and ", one for each kind of stage" or plan.owned
      and ", one for each number of parameters that ranks own" or "")
  end
  if plan.ranks > 1 and plan.tp and plan.tp > 1 then
    say("mesh: dp %d x pp %d x tp %d; one rank of tp represents all, since their parts have the same sizes", plan.world,
      plan.cut and plan.cut.stages or 1, plan.tp)
  end
  if plan.cut then stages(lines, plan) end
  if plan.parameters then
    local rank = plan.cut and ("rank %d: "):format(plan.kinds[1]) or ""
    say("%s%s parameters, %s of state in chunks of %d elements, computed on %s in %s", rank, count(plan.parameters),
      readable.bytes(plan.state_bytes), plan.chunk_size, plan.device, plan.precision)
    if plan.resident > 0 then
      say("%s of them live only on tier %s: the last tier has no room", readable.bytes(plan.resident),
        plan.tiers[1].name)
    end
    tiers(lines, plan)
    if plan.process then
      local process = plan.process
      say("process: %s of memory, of which %s are the program, Lua%s", readable.bytes(process.nbytes),
        readable.bytes(process.besides), process.kept and ", libraries and what oneDNN keeps"
        or " and libraries; oneDNN's code and buffers are not counted")
    end
    links(lines, plan)
    axes(lines, plan)
  end
  for device, nbytes in pairs(plan.plain or {}) do say("%s: %s at most", device, readable.bytes(nbytes)) end
  if plan.seconds then
    for _, line in ipairs(plan.seconds.lines) do lines[#lines + 1] = line end
  end
  if plan.largest_batch then
    local is_bound = plan.largest_batch_is_bound
    local rows = is_bound and plan.largest_batch == 0 and "not found in time"
      or ("%s%d rows"):format(is_bound and "at least " or "", plan.largest_batch)
    say("largest micro-batch: %s%s", rows, plan.rows and (" (the script has %d)"):format(plan.rows) or "")
  end
  if plan.largest_model then
    say("largest model: %s%d blocks, %s parameters (the script has %d blocks)", plan.largest_model.is_bound
      and "at least " or "", plan.largest_model.blocks, count(plan.largest_model.parameters), plan.blocks)
  end
  if plan.limited then say("the search ended after %g s; --limit N allows N seconds, 0 any time", plan.limited) end
  if plan.error then say("why: %s", plan.error.message) end
  for i, text in ipairs(plan.remedies or {}) do say("%s %s", i == 1 and "it fits with" or "or with", text) end
  for _, note in ipairs(plan.notes) do say("note: %s", note) end
  return lines
end

return report
