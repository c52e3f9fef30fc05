-- SPDX-License-Identifier: BSD-3-Clause
-- Measures the speeds of Adam and of copies on this machine, once per process and device (src/engine/rates.c). Plans
-- use the speeds to decide where Adam runs (engine/plan/hybrid.lua) and where embeddings are looked up
-- (engine/layout/embed.lua). ps.device_rates("cuda") returns these speeds.
local devices = require "ps.core.devices"
local native = require "ps.core.ffi"
local ffi, C = native.ffi, native.C

local rates = {}

---@class ps.Rates
---@field host_adam number number of parameters that Adam updates per second on the host, while copies run
---@field device_adam number number of parameters that Adam updates per second on the device
---@field up number bytes per second from the host to the device, with both directions busy
---@field down number bytes per second from the device to the host, with both directions busy
---@field at_once number fraction of the time of an Adam update on the device in which the host has no work
---@field seconds number duration of the measurement, or 0 if nothing was measured
---@field given table<string, boolean> the names of the speeds that the configuration has set

rates.KEYS = { "host_adam", "device_adam", "up", "down", "at_once" }

-- Limits on the number of bytes that a measurement uses, on the host and on the device. If the host holds much state,
-- the bytes of a measurement must exceed the size of the caches: on a server with an H200, Adam was 1.4 times as fast
-- on 56 MiB as on 300 MiB.
local ENOUGH, MOST, HOST_SHARE = 72 * 2 ^ 20, 512 * 2 ^ 20, 256
local out = ffi.new("ps_rates")
local known = {}                              -- results by device: { nbytes =, rates = }

--- Returns speeds as a line of text.
---@param r ps.Rates
---@return string
function rates.text(r)
  local from = r.seconds > 0 and ("measured in %.0f ms"):format(r.seconds * 1e3) or "from the configuration"
  if r.seconds > 0 and next(r.given) then from = "partly from the configuration" end
  return ("%.3g G parameters/s on the host, %.3g on the device, %.3g GB/s up, %.3g down, %.0f %% at once (%s)"):format(
    r.host_adam / 1e9, r.device_adam / 1e9, r.up / 1e9, r.down / 1e9, r.at_once * 100, from)
end

local shown = { __tostring = rates.text }

local supposed

--- Sets the speeds of a simulated machine. They apply to all its devices.
---@param r table<string, number>|nil speeds by the names in rates.KEYS; nil removes the speeds
function rates.suppose(r) supposed = r and setmetatable(r, shown) end

--- Returns the speeds that this process has measured. A measurement uses at most `nbytes` bytes on the host and on the
--- device. Measures again if the last measurement had much less memory.
---@param device string|integer
---@param nbytes? integer
---@return ps.Rates
function rates.measured(device, nbytes)
  if not devices.computes then
    if not supposed then error("a dry run cannot measure speeds: set them in the hardware's table or in the "
      .. "section rates", 0) end
    supposed.seconds, supposed.given = 0, {}
    return supposed
  end
  local index = type(device) == "number" and device or native.device_index(device)
  nbytes = math.min(nbytes or ENOUGH, MOST)
  local had = known[index]
  if had and nbytes < 2 * had.nbytes then return had.rates end
  native.check(C.ps_rates_measure(native.ctx, index, native.device_index "cpu", nbytes, out))
  local r = setmetatable({ seconds = out.seconds, given = {} }, shown)
  for _, key in ipairs(rates.KEYS) do r[key] = out[key] end
  known[index] = { nbytes = nbytes, rates = r }
  return r
end

--- Returns the speeds for the plans of an engine. Speeds that the configuration does not set are measured. Each speed
--- is the minimum over all ranks, so that all ranks make the same plan.
---@param engine ps.Engine
---@param least? fun(value: integer): integer returns the minimum of a value over all ranks; nil if there is only one
---  rank
---@return ps.Rates
function rates.of(engine, least)
  local cfg, r, missing = engine.cfg, setmetatable({ seconds = 0, given = {} }, shown), false
  for _, key in ipairs(rates.KEYS) do
    r[key] = cfg.rates[key]
    r.given[key] = r[key] ~= nil or nil
    missing = missing or r[key] == nil
  end
  if missing then
    local half = math.min(cfg.memory.device or math.huge, cfg.memory.host or math.huge) / 2
    local enough = math.max(ENOUGH, (cfg.memory.host or 0) / HOST_SHARE)
    local m = rates.measured(engine.device, math.floor(math.min(half, enough)))
    for _, key in ipairs(rates.KEYS) do r[key] = r[key] or m[key] end
    r.seconds = m.seconds
  end
  if least then
    for _, key in ipairs(rates.KEYS) do
      local unit = key == "at_once" and 1e6 or 1
      r[key] = math.max(least(math.floor(r[key] * unit)), key == "at_once" and 0 or 1) / unit
    end
  end
  return r
end

return rates
