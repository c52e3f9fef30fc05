-- SPDX-License-Identifier: BSD-3-Clause
-- Lets scripts use an engine's gradients between the last backward of a step and optimizer:step(). Scripts use them by
-- nn.clip_grad_norm, module:zero_grad() and p:grad(). The gradients are in chunks, possibly on other ranks. They are
-- sums over micro-batches and ranks, multiplied by the loss scale. The norm that a script gets does not include the
-- loss scale. Clipping sets a factor by which the next update multiplies the gradients. If backward updates parameters
-- (overlap_optimizer), the gradients no longer exist after backward, and each of these calls raises an error.
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local hooks = require "ps.core.hooks"
local step = require "ps.engine.step"
local types = require "ps.core.types"
local agree = require "ps.dist.agree"
local error = caller.error

local CALL = "nn.clip_grad_norm"

-- -- which engine -----------------------------------------------------------------------------------------------------
-- Returns the parameters of an engine as a table by address. The entry of a trained parameter is {row =, place =}.
-- `place` is the index of the row in built.list. The entry of a frozen parameter is an empty table.
local function places_of(engine)
  local at, built = {}, engine.built
  for place, row in ipairs(built.list) do at[nn_module.address(row.param)] = { row = row, place = place } end
  for _, row in ipairs(built.elsewhere or {}) do at[nn_module.address(row.param)] = { row = row } end
  for _, list in ipairs { built.frozen or {}, built.untrained or {} } do
    for _, row in ipairs(list) do at[nn_module.address(row.param)] = at[nn_module.address(row.param)] or {} end
  end
  return at
end

-- Divides a list of parameters into the engine's parameters and all other parameters.
---@param params ps.Tensor[]
---@param engine ps.Engine
---@return table[] found the entries of places_of for the engine's parameters
---@return ps.Tensor[] rest the other parameters
---@return table<number, table> places the result of places_of
local function divide(params, engine)
  local places, found, rest = places_of(engine), {}, {}
  for _, param in ipairs(params) do
    local at = places[nn_module.address(param)]
    if at then found[#found + 1] = at else rest[#rest + 1] = param end
  end
  return found, rest, places
end

-- Returns an iterator over the engines that have a model.
local function engines()
  local list = {}
  for engine in step.engines() do
    if not engine.closed and rawget(engine, "built") then list[#list + 1] = engine end
  end
  local i = 0
  return function()
    i = i + 1
    return list[i]
  end
end

-- -- nn.clip_grad_norm --------------------------------------------------------------------------------------------
-- Returns the trained parameters among some entries of places_of. They have the order of the optimizer's groups, in
-- which norms are summed.
local function trained(found)
  local list, seen = {}, {}
  for _, at in ipairs(found) do
    if at.row then
      if seen[at] then error(("%s: parameter %s is in the list twice"):format(CALL, at.row.name)) end
      seen[at] = true
      list[#list + 1] = at
    end
  end
  table.sort(list, function(a, b) return a.row.order < b.row.order end)
  return list
end

-- Raises an error if ranks clip different lists of parameters, or use different limits. In both cases, the ranks'
-- copies of parameters would become different.
local function compare(engine, list, max_norm)
  if not engine.ranks then return end
  local orders = {}
  for i, at in ipairs(list) do orders[i] = at.row.order end
  local mine = ("%d parameters (list %.0f) with max_norm %.17g"):format(#list, agree.text_hash(table.concat(orders,
    " ")), max_norm)
  for rank, text in ipairs(agree.texts(engine.ranks.world, mine)) do
    if text ~= mine then
      error(("%s: this rank clips %s, but rank %d clips %s: clip the same parameters by the same max_norm on all ranks")
        :format(CALL, mine, rank - 1, text))
    end
  end
end

-- Raises an error if gradients are clipped more than once in a step.
local function check_once(engine, list, max_norm)
  local opt, factors = engine.optimizer, step.factors(engine)
  if max_norm == math.huge then return end
  if opt.max_norm == math.huge then
    error(CALL .. ": an OptimManager trains this model: call manager:clip_grad_norm(optimizer.param_groups, max_norm)")
  elseif opt.max_norm then
    error(("%s: gradient_clipping = %.14g in the configuration already clips each step: remove one of the two, or pass "
      .. "math.huge, which only measures"):format(CALL, opt.max_norm))
  end
  for _, at in ipairs(list) do
    if factors[at.row] then
      error(("%s: the gradient of %s was already clipped in this step: clip each parameter once per step"):format(
        CALL, at.row.name))
    end
  end
end

-- Returns the norm of the gradients of some parameters. The factors that earlier calls have set are included. If the
-- norm of all gradients is not finite, returns the norm of all gradients instead.
local function norm_of(engine, list)
  local all, factors = step.norm(engine), step.factors(engine)
  if not types.finite(all) then return all end
  local squares, sum = engine.optimizer:squares(list), 0
  for i, at in ipairs(list) do sum = sum + squares[i] * (factors[at.row] or 1) ^ 2 end
  return math.sqrt(sum) * step.unscale(engine)
end

local function clip(engine, found, max_norm)
  step.check_gradients(engine, CALL)
  local list = trained(found)
  compare(engine, list, max_norm)
  check_once(engine, list, max_norm)
  local ok, norm = pcall(norm_of, engine, list)
  if not ok then
    step.give_up(engine)
    error(norm, 0)
  end
  step.remember(engine)
  if max_norm == math.huge then return norm end
  local factor, factors = math.min(1, max_norm / (norm + step.CLIP_EPS)), step.factors(engine)
  for _, at in ipairs(list) do
    factors[at.row] = factor
    if at.place and factor == factor then engine.optimizer:set_factor(at.place, factor) end
  end
  return norm
end

hooks.on("clip", function(params, max_norm)
  for engine in engines() do
    local found, rest = divide(params, engine)
    if #found > 0 then
      if #rest > 0 then
        error(("%s: %d of the %d parameters do not belong to the model of ps.initialize: their gradients have a "
          .. "separate norm, so clip them in a separate call"):format(CALL, #rest, #params))
      end
      return clip(engine, found, max_norm)
    end
  end
end)

-- -- module:zero_grad() and p:grad() ------------------------------------------------------------------------------
hooks.on("zero_grad", function(params)
  local left
  for engine in engines() do
    local found, rest, places = divide(left or params, engine)
    local here, all = 0, 0
    for _, at in ipairs(found) do here = here + (at.row and 1 or 0) end
    for _, at in pairs(places) do all = all + (at.row and 1 or 0) end
    if here > 0 and here == all then
      step.zero_grad(engine, "model:zero_grad()")
      left = rest
    elseif here > 0 and not engine.plain then
      error(("zero_grad was called for a part of the model of ps.initialize, with %d of its %d parameters: "
        .. "use optimizer:zero_grad(), which drops the gradients of all"):format(here, all))
    end
  end
  return left
end)

hooks.on("gradient", function(param)
  for engine in engines() do
    if step.gradients_gone(engine) and places_of(engine)[nn_module.address(param)] then
      error("p:grad(): " .. step.GONE)
    end
  end
end)
