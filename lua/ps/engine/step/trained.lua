-- SPDX-License-Identifier: BSD-3-Clause
-- An engine trains the parameters that its module had when the engine was made. A parameter that came to the module
-- afterwards would take part in the forward and never be updated, and so would one that was frozen then and is not now:
-- it has no place for a gradient, nor an optimizer state. Which parameters are frozen meanwhile, ranks compare.
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"

local trained = {}

local seen = setmetatable({}, { __mode = "k" })       -- by engine: nn_module.changes when its module was last checked

-- Refuses parameters that were frozen when the engine was made and require a gradient now.
local function check_frozen(engine)
  for _, row in ipairs(engine.built.untrained) do
    if row.param:needs_grad() then
      error(("%s was frozen when ps.initialize took it, and requires a gradient now: it has no optimizer state and "
        .. "would not be trained; to thaw parameters later, freeze them behind ps.initialize, not before"):format(
        row.name), 0)
    end
  end
end

--- Refuses a step of a module with parameters that the engine does not have, or cannot train. It looks for new ones
--- only after some module has changed.
---@param engine ps.Engine
function trained.check(engine)
  check_frozen(engine)
  if seen[engine] == nn_module.changes then return end
  local known, built = {}, engine.built
  for _, row in ipairs(built.list) do known[nn_module.address(row.param)] = true end
  for _, row in ipairs(built.elsewhere or {}) do known[nn_module.address(row.param)] = true end
  for name, param in engine.module:named_parameters() do
    if param:needs_grad() and not known[nn_module.address(param)] then
      error(("%s is not among the parameters that ps.initialize took: it was assigned, or made anew by module:to(...), "
        .. "behind that, and would not be trained; change the module before ps.initialize, or write values into its "
        .. "parameters"):format(name), 0)
    end
  end
  seen[engine] = nn_module.changes
end

--- Which parameters of a model train, in order, as text: "1" one that does, "0" a frozen one. Parameters that lie on
--- other ranks are among them.
---@param module ps.nn.Module
---@return string
function trained.text(module)
  local list = {}
  for i, param in ipairs(module:parameters()) do list[i] = param:needs_grad() and "1" or "0" end
  return table.concat(list)
end

--- engine:to(...): an error.
function trained.to()
  caller.error("the parameters of an engine keep the type and the device of its configuration (bf16, fp16, device); "
    .. "convert what goes in and comes out, or make a module without an engine from its state_dict()")
end

return trained
