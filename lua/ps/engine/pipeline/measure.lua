-- SPDX-License-Identifier: BSD-3-Clause
-- Measures how many seconds the parts of a model (ps.nn.parts) take on a device. One part of each kind runs forward and
-- backward a few times. Its tensors contain zeros, because the time of a product does not depend on the values. Only
-- the tensors of one part are in memory at a time.
local create = require "ps.tensor.create"
local scope = require "ps.core.scope"
local count = require "ps.engine.pipeline.count"
local parts = require "ps.nn.parts"
local random_state = require "ps.dist.random_state"
local native = require "ps.core.ffi"
local process = require "ps.core.process"

local measure = {}

local TIMES = 3                           -- number of runs per part; the fastest run is the result

-- Waits until the device has finished all its work.
local function wait(t)
  if not native.on_host(t) then t:detach():reshape(-1):narrow(0, 0, 1):item() end
end

local function zeros(like, device)
  local t = create.zeros(like.shape, { dtype = like.dtype, device = device })
  if like.needs_grad then t:requires_grad(true) end
  return t
end

-- Returns the times in seconds of a part's forward and of its backward. `from` describes the tensors that the part
-- receives (ps.engine.Carry[]).
local function run(part, from, batch, device)
  local carry = {}
  for _, like in ipairs(from) do carry[like.name] = zeros(like, device) end
  local begin = process.now()
  local out = part.forward(carry, batch)
  for _, t in pairs(out) do wait(t) end
  local middle = process.now()
  for _, t in pairs(out) do
    if t:needs_grad() then
      scope.backward(t, create.zeros(t:shape(), { dtype = t:dtype(), device = device }))
      wait(t)
    end
  end
  return middle - begin, process.now() - middle
end

-- Returns the key of a part's kind. Parts with equal counted costs are of the same kind. Only one part of each kind is
-- measured.
local function kind_of(cost)
  return ("%.17g %.17g %.17g %d"):format(cost.forward, cost.input, cost.weight, cost.numel)
end

local function on_device(value, device)
  if scope.is_tensor(value) then return create.zeros(value:shape(), { dtype = value:dtype(), device = device }) end
  if type(value) ~= "table" then return value end
  local copy = {}
  for key, item in pairs(value) do copy[key] = on_device(item, device) end
  return copy
end

local function measured(module, costs, args, device, precision)
  local list, known, all = parts.of(module), {}, {}
  local put_back = count.stand_in(count.places_of(module), "meta", precision)
  local ok, batch = pcall(function() return parts.batch(module, on_device(args, device)) end)
  put_back()
  if not ok then error(batch, 0) end
  for i, part in ipairs(list) do
    local cost, kind = costs[i], kind_of(costs[i])
    local from = i > 1 and costs[i - 1].carry or {}
    if not known[kind] then
      local best = { math.huge, math.huge }
      local back = count.stand_in(count.places_of(module, part, cost.uses), device, precision)
      local fine, why = pcall(function()
        for _ = 1, TIMES do
          local forward, backward = scope.scope(run, part, from, batch, device)
          best = { math.min(best[1], forward), math.min(best[2], backward) }
        end
      end)
      back()
      scope.collect()
      if not fine then error(why, 0) end
      known[kind] = best
    end
    local forward, backward = unpack(known[kind])
    local input = cost.input + cost.weight > 0 and cost.input / (cost.input + cost.weight) or 0
    all[i] = { name = part.name, forward = forward, input = backward * input, weight = backward * (1 - input) }
  end
  return all
end

--- Measures how many seconds the parts of a model take. The model may be without data. The time of a backward is
--- divided between `input` and `weight`, in proportion to the counted operations of `input` and `weight`.
---@param module ps.nn.Module
---@param costs ps.engine.PartCost[] the result of count.parts for these arguments
---@param args any[] the model's arguments; only the shapes of the tensors matter
---@param device string
---@param precision? string
---@return {name: string, forward: number, input: number, weight: number}[] seconds
function measure.parts(module, costs, args, device, precision)
  local restore = random_state.keep()
  local ok, result = pcall(scope.enable_grad, measured, module, costs, args, device, precision)
  restore()
  if not ok then error(result, 0) end
  return result
end

return measure
