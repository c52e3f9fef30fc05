-- SPDX-License-Identifier: BSD-3-Clause
-- Determines which parameters an engine trains. They are the parameters that the module had when the engine was
-- created. If a parameter was frozen at that time and is thawed later, a gradient and optimizer states are created for
-- it before the next step (engine/layout/thaw.lua). If a parameter is added to the module later, an error is raised,
-- because the parameter would be used in the forward but never be updated. Ranks compare which of their parameters are
-- frozen.
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"

local trained = {}

local seen = setmetatable({}, { __mode = "k" })       -- by engine: the value of nn_module.changes at the last check

--- Returns the rows of the parameters that were frozen when the layout was made and now require a gradient. They have
--- no optimizer state yet. The list is in the order of the model, and includes parameters of other stages.
---@param engine ps.Engine
---@return table[]
function trained.thawed(engine)
  local list = {}
  for _, row in ipairs(engine.built.untrained) do if row.param:needs_grad() then list[#list + 1] = row end end
  if list[1] and list[1].number then table.sort(list, function(a, b) return a.number < b.number end) end
  return list
end

--- Raises an error before a step if the module has parameters that the engine cannot train. Searches for such
--- parameters only if a module has changed since the last check.
---@param engine ps.Engine
function trained.check(engine)
  if seen[engine] == nn_module.changes then return end
  local known, built = {}, engine.built
  for _, list in ipairs { built.list, built.elsewhere or {}, built.untrained } do
    for _, row in ipairs(list) do known[nn_module.address(row.param)] = true end
  end
  for name, param in engine.module:named_parameters() do
    if param:needs_grad() and not known[nn_module.address(param)] then
      error(("%s is not a parameter of the engine and would not be trained; after ps.initialize, the parameter was "
        .. "assigned, or module:to(...) or model:resize_token_embeddings(...) replaced it; change the module before "
        .. "ps.initialize, or write values into its parameters"):format(name), 0)
    end
  end
  seen[engine] = nn_module.changes
end

--- Returns a text that says which parameters of a model train. The text has one character per parameter, in the order
--- of the model. The character is "1" if the parameter trains, and "0" if it is frozen. Parameters of other ranks are
--- included.
---@param module ps.nn.Module
---@return string
function trained.text(module)
  local list = {}
  for i, param in ipairs(module:parameters()) do list[i] = param:needs_grad() and "1" or "0" end
  return table.concat(list)
end

--- Raises an error, because engine:to(...) is not supported.
function trained.to()
  caller.error("the parameters of an engine keep the dtype and the device of its configuration (bf16, fp16, device); "
    .. "convert inputs and outputs, or load its state_dict() into a module without an engine")
end

return trained
