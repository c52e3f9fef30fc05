-- SPDX-License-Identifier: BSD-3-Clause
-- Runs a loss function of the script, ps.initialize { loss = function(out, batch) ... end }. The loss function runs
-- after the model. The model gets no targets. `out` is the model's output, by names. If the model was called with a
-- table of names, `batch` is this table. Otherwise `batch` is a list of the arguments.
local scope = require "ps.core.scope"
local batch = require "ps.data.batch"

local own_loss = {}

--- Returns the arguments without the targets. In a table of names, the targets are the field `labels`. Otherwise, if
--- there are several arguments, the targets are the last argument.
---@param given any[] the arguments, and their number `n`
---@return any[] the remaining arguments, and their number `n`
function own_loss.inputs(given)
  if batch.is_named(given) then
    local rest = {}
    for name, value in pairs(given[1]) do if name ~= "labels" then rest[name] = value end end
    return { n = 1, rest }
  end
  return { n = math.max(given.n - 1, math.min(given.n, 1)), unpack(given, 1, given.n) }
end

local NO_TARGETS = "ps.initialize: loss(out, batch) failed in a call without targets, which has no labels and no "
  .. "second argument: %s"

local function value_of(loss, out, given)
  local args = batch.is_named(given) and given[1] or given
  local value
  if batch.has_targets(given) then value = loss(out, args)
  else
    local ok, result = pcall(loss, out, args)
    if not ok then error(NO_TARGETS:format(tostring(result)), 0) end
    value = result
  end
  if not scope.is_tensor(value) or value:numel() ~= 1 then
    error("ps.initialize: loss(out, batch) must return a tensor of one element, not "
      .. (scope.is_tensor(value) and ("%d"):format(value:numel()) or "a " .. type(value)))
  end
  return value
end

--- Returns the model's output together with the script's loss. If gradients are disabled and there are no targets, the
--- loss is computed only if the script reads out.loss, because an evaluation may need only the logits.
---@param loss fun(out: table, batch: table): ps.Tensor
---@param result any the model's result
---@param given any[] the model's arguments with targets, and their number `n`
---@return table out
function own_loss.of(loss, result, given)
  local out = batch.output(result)
  if not (scope.grad_enabled() or batch.has_targets(given)) then
    return batch.later(out, function() return value_of(loss, out, given) end)
  end
  out.loss = value_of(loss, out, given)
  return out
end

return own_loss
