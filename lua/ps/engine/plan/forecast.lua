-- SPDX-License-Identifier: BSD-3-Clause
-- Forecasts a step before it runs: performs dry runs, and makes the lines of the printed plan.
local native = require "ps.core.ffi"
local caller = require "ps.core.caller"
local collector = require "ps.core.collector"
local batch = require "ps.data.batch"
local readable = require "ps.core.readable"
local random_state = require "ps.dist.random_state"
local step = require "ps.engine.step"
local ffi, C = native.ffi, native.C

local forecasts = {}

-- Returns a key for a step's arguments. If two lists of arguments have equal keys, the model runs the same ops for
-- both. The key contains the names, shapes and types of tensors, and all other values.
---@param engine ps.Engine
---@param args any[]
---@return string
function forecasts.signature(engine, args)
  local parts = { engine.module.training and "train" or "eval", step.batch_text(engine) }
  parts[#parts + 1] = batch.signature(args)
  return table.concat(parts, " ")
end

--- Performs a dry run of a step, and returns the id of its trace. Returns nil if the model's code reads values, because
--- tensors have no values in a dry run. In this case, the first step is traced while it runs.
---@param engine ps.Engine
---@param args any[]
---@param like? integer an earlier trace of this step; gathers from other ranks begin as early as in the earlier trace
---@return integer?
function forecasts.dry_run(engine, args, like)
  local restore = random_state.keep()
  -- Small tensors live until Lua's collector runs. The tensors of an earlier dry run are collected first. Otherwise
  -- they would count in the peak of this dry run. The peak counts all tensors of this dry run as if none of them was
  -- collected. Therefore the peak is valid whenever the collector runs in a real step.
  local ok, id, problem = collector.without(step.dry_run, engine, args, like)
  restore()
  if not ok then error(id, 0) end
  if id then return id end
  if type(problem) == "table" and problem.name == "EDRY" then
    engine:note("the model reads values in its forward or backward, so its step can be planned only after it has run "
      .. "once")
    return nil
  end
  error(problem, 0)
end

---@class ps.engine.Forecast
---@field moments integer
---@field tiers {name: string, is_file: boolean, budget: integer, peak: integer, other: integer}[] sizes in bytes
---@field fetched integer[] for tier i (from 1), the bytes that are fetched into the tier in each step, as soon as steps
---  repeat
---@field evicted integer[] for tier i (from 1), the bytes that are evicted from the tier in each step, as soon as steps
---  repeat
---@field resident integer total size in bytes of the chunks that stay on the first tier, because the last tier has no
---  room for them
---@field gathers integer number of stripes that a step gathers from other processes
---@field gathered integer total size in bytes of the gathered stripes
---@field short? ps.engine.Short the first op whose chunks have room only because the other tensors need less memory at
---  the moment of this op than at their peak

---@class ps.engine.Short
---@field tier string
---@field wanted integer total size in bytes of the chunks that the op needs on the tier at once
---@field left integer bytes that remain for chunks on this tier when the other tensors of the step are at their peak

-- Returns the first op whose chunks have room only because the other tensors need little memory at the moment of
-- this op. Returns nil if there is no such op.
local function short_of(out, info)
  if out.wanted == 0 then return nil end
  native.check(C.ps_engine_tier_get(native.ctx, tonumber(out.short_tier), info))
  return { tier = ffi.string(info.name), wanted = tonumber(out.wanted), left = tonumber(out.left) }
end

--- Returns the forecast of a step that repeats trace `id`. Raises an error if the step does not fit. The fields of the
--- error contain the tier and the sizes in bytes.
---@param id integer
---@return ps.engine.Forecast
function forecasts.of(id)
  local out, info = ffi.new("ps_step_forecast"), ffi.new("ps_tier_info")
  native.check(C.ps_engine_forecast(native.ctx, id, out))
  local forecast = { moments = out.n_moments, tiers = {}, fetched = {}, evicted = {},
    resident = tonumber(out.resident), short = short_of(out, info), gathers = tonumber(out.gathers),
    gathered = tonumber(out.gathered) }
  local count = C.ps_engine_tier_count(native.ctx)
  for t = 0, count - 1 do
    native.check(C.ps_engine_tier_get(native.ctx, t, info))
    forecast.tiers[t + 1] = { name = ffi.string(info.name), is_file = info.device < 0,
      budget = tonumber(info.budget), peak = tonumber(out.peak[t]), other = tonumber(out.other[t]) }
    if t + 1 < count then
      forecast.fetched[t + 1], forecast.evicted[t + 1] = tonumber(out.fetched[t]), tonumber(out.evicted[t])
    end
  end
  return forecast
end

-- Returns the line of the plan that describes gradients. It says how many bytes of gradients this process sends to
-- their owners, and how many bytes it keeps. Returns nil if every process keeps its own gradients.
local function gradients_line(engine)
  local shards, bytes, parts = engine.ranks.shards, 0, false
  if not shards:gradients() then return nil end
  for _, row in ipairs(engine.built.list) do
    if row.owner ~= shards.rank then bytes = bytes + tonumber(C.ps_tensor_nbytes(row.grad or row.param)) end
    parts = parts or row.grad ~= nil
  end
  local times = parts and not shards.once and step.count(engine) or 1
  return ("          it sends %s of gradients to other processes, %s"):format(readable.bytes(times * bytes),
    times > 1 and ("in %d backwards, each %s"):format(times, readable.bytes(bytes))
      or parts and shards.once and "once, and keeps them until the last" or "once")
end

--- Returns the plan as lines of text.
---@param engine ps.Engine
---@param forecast ps.engine.Forecast
---@return string[]
function forecasts.lines(engine, forecast)
  local built, layout = engine.built, engine.built.layout
  local lines = {
    ("plan: %d parameters, %s of state (%.2f bytes per parameter), in chunks of %d elements, %.2f %% waste"):format(
      built.numel, readable.bytes(built.state_bytes), built.state_bytes / built.numel, layout.chunk_size,
      100 * (layout.numel - layout.used) / math.max(1, layout.numel)),
  }
  if engine.zero_stage > 0 then
    local mine, owned = 0, engine.ranks.dp:rank()
    for _, row in ipairs(layout.chunks) do if row.owner == owned then mine = mine + 1 end end
    lines[#lines + 1] = ("  shared  stage %d: %d of %d chunks belong to this process, number %d of %d"):format(
      engine.zero_stage, mine, #layout.chunks, owned, engine.ranks.dp:size())
    lines[#lines + 1] = ("          a step gathers %s of other processes' parameters (%s), which %s"):format(
      readable.bytes(forecast.gathered), caller.counted(forecast.gathers, "time"),
      engine.ranks.shards.stays and "stay until its end"
        or "go after each forward and backward")
    lines[#lines + 1] = gradients_line(engine)
  end
  for i, tier in ipairs(forecast.tiers) do
    local line
    if tier.is_file then
      local unused = i > 1 and forecast.fetched[i - 1] + forecast.evicted[i - 1] == 0
      -- The peak is the size of all chunks, also of those that never leave a higher tier.
      line = ("  %-6s  %s set aside, %s"):format(tier.name, readable.bytes(tier.budget), unused and "not used"
        or ("at most %s used"):format(readable.bytes(tier.peak)))
    else
      line = ("  %-6s  predicted peak %s of %s: %s of chunks, %s of other tensors"):format(tier.name,
        readable.bytes(tier.peak), tier.budget > 0 and readable.bytes(tier.budget) or "no limit",
        readable.bytes(tier.peak - tier.other), readable.bytes(tier.other))
    end
    lines[#lines + 1] = line
    if i == 1 and forecast.resident > 0 then
      lines[#lines + 1] = ("          %s of them live only here: %s has no room for them"):format(
        readable.bytes(forecast.resident), forecast.tiers[#forecast.tiers].name)
    end
    if forecast.short and forecast.short.tier == tier.name then
      lines[#lines + 1] = ("          an op needs %s of chunks at once, more than the peak of other tensors "
        .. "leaves"):format(
        readable.bytes(forecast.short.wanted))
    end
    if forecast.fetched[i] then
      lines[#lines + 1] = forecast.fetched[i] + forecast.evicted[i] == 0 and "          nothing moves: all of it fits"
        or ("          a step fetches %s from %s and evicts %s to it (%s)"):format(readable.bytes(forecast.fetched[i]),
          forecast.tiers[i + 1].name, readable.bytes(forecast.evicted[i]), engine.policy)
    end
  end
  if engine.plan.adam_split then
    for _, line in ipairs(require("ps.engine.plan.hybrid").lines(engine,
      engine.plan.adam_split)) do lines[#lines + 1] = line end
  end
  if engine.plan.tables_on_host and next(engine.plan.tables_on_host) then
    local names = {}
    for _, t in ipairs(built.tables) do if engine.plan.tables_on_host[t] then names[#names + 1] = t.name end end
    lines[#lines + 1] = "  looked up on the host: " .. table.concat(names, ", ")
  end
  return lines
end

return forecasts
