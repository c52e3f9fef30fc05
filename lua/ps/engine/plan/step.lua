-- SPDX-License-Identifier: BSD-3-Clause
-- Makes the plan of one step. First decides on which devices embeddings are looked up and updates run. Then performs a
-- dry run of the step. Rejects a plan that moves chunks although the configuration forbids moves. Prints a plan if it
-- differs from all plans that were printed before.
local mesh = require "ps.dist.mesh"
local embed = require "ps.engine.layout.embed"
local forecasts = require "ps.engine.plan.forecast"
local hybrid = require "ps.engine.plan.hybrid"
local readable = require "ps.core.readable"

local HIGHER = 1.25               -- a plan is printed if its peak is more than this number of times the printed peak

-- Rejects a plan that moves chunks although offload_optimizer.device is "none".
local function check_stays(engine, forecast)
  local moved = (forecast.fetched[1] or 0) + (forecast.evicted[1] or 0)
  if not engine.cfg.zero_optimization.offload_optimizer.stays or moved == 0 then return end
  local first, second = forecast.tiers[1], forecast.tiers[2]
  error(('zero_optimization.offload_optimizer.device is "none", but the optimizer\'s state does not fit next to the '
    .. "model: a step would move %s between %s and %s; raise memory.%s (%s), set device = \"cpu\", or remove the "
    .. "key"):format(
    readable.bytes(moved), first.name, second.name, first.name, readable.bytes(first.budget)), 0)
end

---@class ps.engine.PlanState
---@field adam_split ps.engine.Split|false the updates that run on the device (engine/plan/hybrid.lua)
---@field forecast ps.engine.Forecast|false forecast of the last plan
---@field no_finer boolean true if a rank has no room to move the model into smaller chunks
---@field printed table|false facts about the plans that were printed, for is_news()
---@field tables_on_host table<ps.engine.Table, boolean>|false embedding matrices that are on the host

-- Returns true if a plan must be printed. A plan is printed if it has a new layout, or a clearly higher peak than the
-- printed plans. It is also printed if it is the first plan that moves chunks, or the first plan in which an op lacks
-- room. Plans for batches of other sizes usually differ less, and are not printed.
local function is_news(engine, forecast)
  local layout, printed = engine.built.layout, engine.plan.printed
  local moves = false
  for _, bytes in ipairs(forecast.fetched) do moves = moves or bytes > 0 end
  for _, bytes in ipairs(forecast.evicted) do moves = moves or bytes > 0 end
  if not printed or printed.layout ~= layout or moves and not printed.moves or forecast.short and not printed.short then
    engine.plan.printed = { layout = layout, moves = moves, short = forecast.short ~= nil, peaks = {} }
    for i, tier in ipairs(forecast.tiers) do engine.plan.printed.peaks[i] = tier.peak end
    return true
  end
  local news = false
  for i, tier in ipairs(forecast.tiers) do
    if tier.peak > printed.peaks[i] * HIGHER then news = true end
  end
  if news then
    for i, tier in ipairs(forecast.tiers) do printed.peaks[i] = math.max(printed.peaks[i], tier.peak) end
  end
  return news
end

--- Makes the plan of a step with these arguments. Returns the trace of the step, or nil if the step must run once
--- before it can be planned. `look` is called with the forecast before the forecast is printed, and may raise an error.
---@param engine ps.Engine
---@param args any[]
---@param look fun(forecast: ps.engine.Forecast)
---@return integer?
return function(engine, args, look)
  local function dry_run(like)
    local id = forecasts.dry_run(engine, args, like)
    -- In the second dry run, chunks are also gathered before they are needed.
    if id and not like and engine.zero_stage > 0 then id = forecasts.dry_run(engine, args, id) end
    return id
  end
  local function split() return hybrid.place(engine, dry_run) end
  local plan = engine.plan
  if engine.lookups and not plan.tables_on_host then
    plan.tables_on_host = embed.choose(engine, dry_run, split)
  end
  local id
  if engine.device ~= engine.host and not plan.adam_split then
    plan.adam_split = split()
    id = plan.adam_split and plan.adam_split.id
  else
    id = dry_run()
  end
  if id == nil then return nil end
  local forecast = forecasts.of(id)
  look(forecast)
  plan.forecast = forecast
  check_stays(engine, forecast)
  local prints, world = engine.cfg.plan_print, mesh.group "world"
  local here = prints and (prints == "all" or not world or world:rank() == 0) and not engine.quiet
  if here and is_news(engine, forecast) then
    for _, line in ipairs(forecasts.lines(engine, forecast)) do io.stdout:write(line, "\n") end
    io.stdout:flush()
  end
  return id
end
