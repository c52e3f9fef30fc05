-- SPDX-License-Identifier: BSD-3-Clause
-- Plans bench/planner_case.lua for other machines than this one. bench/planner.lua and bench/mesh.lua use this file.
local cjson = require "cjson"
local C = require "ps.core.declared"
local hardware = require "ps.planning.hardware"
local paths = require "ps.paths"
local trial = require "ps.planning.trial"

local lib = {}

lib.CASE = paths.root .. "/bench/planner_case.lua"

-- GPT-3's sizes: 96 layers, width 12288, 2048 positions.
lib.GPT3 = { layers = 96, width = 12288, heads = 96, positions = 2048, vocab = 50304, rows = 1, precision = "bf16",
  recompute = true, device_nbytes = 125 * 2 ^ 30, host_nbytes = 230 * 2 ^ 30 }

--- Returns a copy of a table with some fields changed.
---@param case table
---@param changes table
---@return table
function lib.with(case, changes)
  local copy = {}
  for key, value in pairs(case) do copy[key] = value end
  for key, value in pairs(changes) do copy[key] = value end
  return copy
end

--- Returns a request to plan a case for a machine. If the machine has several GPUs, the plan has one rank per GPU, all
--- state is sharded over the ranks, and only rank 0 is run.
---@param name string the name of the hardware
---@param host number size of the machine's host memory in bytes
---@param case table
---@return ps.planning.Request
function lib.on_hardware(name, host, case)
  local there = hardware.find(name, host)
  local ranks = there.count > 1 and there.count or nil
  local full = lib.with(case, { device = "cuda", ranks = ranks, stage = ranks and 3 or nil })
  return { script = lib.CASE, args = { cjson.encode(full) }, quiet = true, machine = there.machine,
    rates = there.rates, ranks = ranks, ranks_a_machine = ranks, kinds = ranks and { 0 } or nil }
end

--- Plans GPT-3 for 32 machines with eight H200 each, as dp 4 x pp 8 x tp 8 with 64 micro-batches. Only one rank of each
--- kind is planned.
---@return {seconds: number, mib: number, result: ps.planning.Result} plan seconds: the time of the whole plan. mib: the
--- peak memory of the largest of its processes. The calling process must not have a psluajit context, because plans
--- fork.
function lib.plan_175b()
  local case = lib.with(lib.GPT3, { stages = 8, tp = 8, micros = 64, ranks = 256, stage = 1, device = "cuda" })
  local request = lib.on_hardware("h200x8", 2e12, case)
  request.ranks, request.kinds, request.args = case.ranks, nil, { cjson.encode(case) }
  local began = C.ps_now()
  local result = trial.run(request)
  if result.error then error("the plan of 175 B: " .. result.error.message, 0) end
  return { seconds = C.ps_now() - began, mib = (result.rss or 0) / 2 ^ 20, result = result }
end

return lib
