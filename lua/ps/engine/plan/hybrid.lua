-- SPDX-License-Identifier: BSD-3-Clause
-- Decides for each unit whether the host or the device updates it (hybrid Adam). The device's margin is the part of its
-- memory that is used for optimizer state. If the state of a unit fits into the margin, the state stays on the device,
-- and the device updates the unit. Any other unit is updated in one of two ways:
--   on the host     the gradient is copied to the host, the host updates the unit, and the parameters are copied back
--   on the device   the state is fetched to the device for the update, and evicted after it
--
-- The host and the link work at the same time, so in the fastest split of the units, the host and the link end at the
-- same time. The search for this split uses the bytes that dry runs count and the speeds of rates.lua. Units that the
-- host updates and units that the device updates alternate, so that copies run during the updates of the host. The
-- updated values are the same on the host and on the device. Ranks exchange only gradients and parameters, so each rank
-- can choose a split of its own units.
local native = require "ps.core.ffi"
local optimizers = require "ps.optimizers"
local C = native.C

local hybrid = {}

local TRIES = 4  -- number of dry runs of the search, in addition to the dry runs of the two extreme splits
local NEARLY = 0.98         -- one split is better than another if its time is less than this fraction of the other's
local APART = 0.3  -- fraction of the shorter phase (copies or updates) that does not overlap the longer one, since
                            -- nothing is updated while the first states are fetched and while the last states are
                            -- evicted (bench/hybrid_adam.lua compares predictions with measurements)

---@class ps.engine.Split
---@field on boolean[] by unit from 1, true if the device updates the unit
---@field count integer number of units that the device updates
---@field share number fraction of the parameters for which this split was made
---@field resident integer number of units whose state stays in the device's margin; at most `count`
---@field id integer the trace of a step with this split
---@field seconds? number predicted seconds per step without forward and backward, computed from `link`, `host` and
---  `device`; nil if there was nothing to decide
---@field link? number predicted seconds of copies per step
---@field host? number predicted seconds per step in which the host is busy with updates
---@field device? number predicted seconds of updates on the device per step
---@field forecast? ps.engine.Forecast
---@field all_host? ps.engine.Split the split in which the host updates all units, or as many units as have room on the
---  host

-- Returns true if the device has kernels for all optimizers of the engine.
local function has_kernels(engine)
  local names = { [engine.cfg.optimizer.type] = true }
  for _, group in ipairs(engine.param_groups or {}) do if group.optimizer then names[group.optimizer] = true end end
  for name in pairs(names) do
    local code = C["PS_OP_" .. optimizers.of(optimizers.find(name)).op]
    if C.ps_op_kernel_device(native.ctx, engine.device, code) ~= engine.device then return false end
  end
  return true
end

--- Returns true if some updates of this engine may run on the device.
---@param engine ps.Engine
---@return boolean
function hybrid.wanted(engine)
  local cfg = engine.cfg
  local offload = cfg.zero_optimization.offload_optimizer
  return engine.device ~= engine.host and has_kernels(engine)
    and (offload.stays or cfg.optimizer.params.use_hybrid_adam
    and cfg.client.mem_tracer.margin_use_ratio > 0 and (offload.device == "none" or offload.ratio < 1))
end

-- Returns three results: the units that the device may update, the number of parameters in these units, and the maximum
-- number of parameters that the device may update. Embeddings that are looked up on the host are excluded.
local function candidates(engine)
  local built, offload = engine.built, engine.cfg.zero_optimization.offload_optimizer
  local on_host, list, numel, all = {}, {}, 0, 0
  for _, row in ipairs(built.list) do if row.param.device_ == engine.host then on_host[row.unit + 1] = true end end
  local able = has_kernels(engine)
  for unit = 1, built.units do
    all = all + built.unit_numel[unit]
    if able and built.unit_numel[unit] > 0 and not on_host[unit] then
      list[#list + 1], numel = unit, numel + built.unit_numel[unit]
    end
  end
  return list, numel, math.min(numel, offload.device == "none" and numel or all * (1 - offload.ratio))
end

-- Returns the margin in a step's forecast. The margin is the number of bytes that the device has for optimizer state,
-- in addition to the parameters.
local function margin_of(engine, forecast)
  local tier, params = forecast.tiers[1], 0
  if tier.budget == 0 then return math.huge end
  for _, row in ipairs(engine.built.layout.chunks) do
    local group = engine.built.layout.groups[row.group]
    params = params + row.numel * (group.dtype == "fp32" and 4 or 2)
  end
  return (tier.budget - tier.other - params) * engine.cfg.client.mem_tracer.margin_use_ratio
end

-- Selects units in order. Skips each unit whose state does not fit into the rest of the margin. The selected units
-- together have at most `most` parameters. Returns the selected units and their number.
local function within_margin(engine, units, most, margin)
  local on, count, built = {}, 0, engine.built
  for _, unit in ipairs(units) do
    local bytes, numel = built.unit_bytes[unit], built.unit_numel[unit]
    if bytes <= margin and numel <= most then
      margin, most, count = margin - bytes, most - numel, count + 1
      on[unit] = true
    end
  end
  return on, count
end

-- Returns units that are spread evenly over the model. They have about the fraction `share` of the parameters.
local function spread(engine, units, share)
  local on, due = {}, 0
  for _, unit in ipairs(units) do
    local numel = engine.built.unit_numel[unit]
    due = due + share * numel
    if due >= numel / 2 then
      due = due - numel
      on[unit] = true
    end
  end
  return on
end

-- Returns (speed of this optimizer's update) / (speed of Adam's update). Only Adam's speed is measured. The speed is
-- inversely proportional to the number of bytes that an update moves per parameter. These are 2 bytes to read the
-- gradient, 2 bytes to write the parameter, 8 bytes for the master, and twice the bytes of the states.
local function speed(engine)
  local bytes, numel = 0, 0
  for unit, states in ipairs(engine.built.unit_states) do
    bytes, numel = bytes + states, numel + engine.built.unit_numel[unit]
  end
  return 28 / (12 + 2 * bytes / math.max(numel, 1))
end

local function apply(engine, on)
  for unit = 1, engine.built.units do native.check(C.ps_engine_set_on_device(native.ctx, unit - 1,
    on[unit] and 1 or 0)) end
end

--- Predicts the time of a step with the split `on`, without forward and backward.
---@param engine ps.Engine
---@param on boolean[]
---@param forecast ps.engine.Forecast
---@return ps.engine.Split
local function predict(engine, on, forecast)
  local r, here, there, count = engine.adam_rates, 0, 0, 0
  for unit = 1, engine.built.units do
    local numel = engine.built.unit_numel[unit]
    if on[unit] then there, count = there + numel, count + 1 else here = here + numel end
  end
  local faster = speed(engine)
  local device = there / r.device_adam / faster
  local split = { on = on, count = count, device = device,
    host = here / r.host_adam / faster + (1 - r.at_once) * device,
    link = math.max(forecast.fetched[1] / r.up, forecast.evicted[1] / r.down) }
  local busy = math.max(split.device, split.host)
  split.seconds = math.max(busy, split.link) + APART * math.min(busy, split.link)
  split.moved = forecast.fetched[1] + forecast.evicted[1]
  split.disk = (forecast.fetched[2] or 0) + (forecast.evicted[2] or 0)
  return split
end

-- Returns the share at which the copies take as long as the updates on the host. Interpolates linearly between the
-- splits `low` and `high`. If `high` is nil, assumes that each further unit adds the copies of its state to the link's
-- time, and removes its update from the host's time.
local function balance(engine, units, numel, low, high)
  local gap = low.host - low.link
  if high then return low.share + (high.share - low.share) * gap / math.max(gap + high.link - high.host, 1e-9) end
  local r, bytes = engine.adam_rates, 0
  for _, unit in ipairs(units) do bytes = bytes + engine.built.unit_bytes[unit] end
  return low.share + gap / (bytes / math.min(r.up, r.down) + numel / r.host_adam / speed(engine))
end

local function same(a, b, units)
  for unit = 1, units do if a.on[unit] ~= b.on[unit] then return false end end
  return true
end

-- Returns true if split a is better than split b. A split that moves more bytes to or from the disk is never better,
-- because the disk is slower than the links.
local function better(a, b)
  if a.disk * NEARLY > b.disk then return false end
  if a.seconds < NEARLY * b.seconds then return true end
  return a.seconds <= b.seconds and a.moved < b.moved
end

-- Returns the split with the fewest updates on the device among all splits that fit. This split is needed if the last
-- tier cannot hold all state, so that some state must stay on the device. Raises the error of the plan if no split
-- fits.
local function least(engine, units, numel, most, try, problem)
  if problem.sub ~= "HOMELESS" or not hybrid.wanted(engine) or numel == 0 then error(problem, 0) end
  local bytes, share = 0, 0
  for _, unit in ipairs(units) do bytes = bytes + engine.built.unit_bytes[unit] end
  bytes = bytes + 2 * numel                             -- the parameters of these units stay on the device, too
  while true do
    share = math.max(share + 1 / #units, share + problem.lacking / bytes)
    if share > most / numel and share - 1 / #units >= most / numel then error(problem, 0) end
    share = math.min(share, most / numel)
    local split, why = try(spread(engine, units, share), share)
    if split then return split end
    if why.sub ~= "HOMELESS" then error(why, 0) end
    problem = why
  end
end

-- Searches for the best split between two extreme splits. In the split `low`, the updates on the host take longer than
-- the copies. In the other extreme split, the device updates every unit that it may update.
local function search(engine, units, numel, low, most, try)
  local best, high = low, nil
  local function look(share)
    local split = try(spread(engine, units, share), share)
    if split and better(split, best) then best = split end
    return split
  end
  for _ = 1, TRIES do
    local share = balance(engine, units, numel, low, high)
    local next_ = { on = spread(engine, units, math.min(share, most)) }
    if share >= most or same(next_, low, engine.built.units) or high and same(next_, high, engine.built.units) then
      break
    end
    local split = look(share)
    if not split then return best end                   -- there is no room for this share, nor for a larger share
    if split.host > split.link then low = split else high = split end
  end
  look(most)
  return best
end

--- Decides where each unit is updated.
---@param engine ps.Engine
---@param dry_run fun(like?: integer): integer? performs a dry run of the step and returns its trace. In the dry run,
---  gathers begin as early as in the trace `like`. Returns nil if the step cannot be run dry
---@return ps.engine.Split? split the best split; nil if no step can be run dry, so that the host updates all units
function hybrid.place(engine, dry_run)
  local forecast = require("ps.engine.plan.forecast").of
  apply(engine, {})
  local id = dry_run()
  if not id then return nil end
  if not engine.adam_rates then return { on = {}, count = 0, resident = 0, id = id } end
  local units, numel, most = candidates(engine)
  local base
  local function try(on, share)
    apply(engine, on)
    local like = share == 0 and id or dry_run(id)
    local ok, seen = pcall(forecast, like)
    if not ok then
      if type(seen) == "table" and seen.name == "ENOMEM" then return nil, seen end
      error(seen, 0)
    end
    if base and seen.short and not base.forecast.short then return nil, seen end  -- making room would cost time
    local split = predict(engine, on, seen)
    split.id, split.all_host, split.share, split.forecast = like, base or split, share, seen
    return split
  end
  local why
  if engine.cfg.zero_optimization.offload_optimizer.stays then
    local all
    all, why = try(spread(engine, units, 1), 1)
    if not all then error(why, 0) end
    all.resident = all.count
    return all
  end
  base, why = try({}, 0)
  if not base then base = least(engine, units, numel, most, try, why) end
  base.resident = 0
  if not hybrid.wanted(engine) then return base end
  local on, resident = within_margin(engine, units, most, margin_of(engine, base.forecast))
  local kept = 0
  for unit in pairs(on) do kept = kept + engine.built.unit_numel[unit] end
  local best = resident > 0 and try(on, kept / numel) or base        -- the margin is always used
  if best.host > best.link and kept < most then
    best = search(engine, units, numel, best, most / numel, try)
  end
  best.resident = math.min(resident, best.count)
  apply(engine, best.on)
  return best
end

local function ms(seconds) return ("%.3g ms"):format(seconds * 1e3) end

--- Returns the lines of the plan that describe a split.
---@param engine ps.Engine
---@param split ps.engine.Split
---@return string[]
function hybrid.lines(engine, split)
  local lines = { ("  %-4s    on the device for %d of %d chunks, on the host for the others"):format(
    engine.optimizer.kind == "AdamW" and "Adam" or engine.optimizer.kind, split.count, engine.built.units) }
  if not engine.adam_rates then return lines end
  local slowest = split.link >= math.max(split.host, split.device) and "copies"
    or split.host >= split.device and "the host" or "the device"
  local base = split.all_host
  local more = split.count > base.count and (" (%s on the host: %s, %s)"):format(base.count > 0 and "as many as "
    .. "possible"
    or "all", ms(base.link), ms(base.host)) or ""
  lines[2] = ("          copies take %s per step, updates take %s of the host%s: %s set%s the pace"):format(
    ms(split.link),
    ms(split.host), more, slowest, slowest == "copies" and "" or "s")
  lines[3] = "          at " .. require("ps.engine.plan.rates").text(engine.adam_rates)
  return lines
end

return hybrid
