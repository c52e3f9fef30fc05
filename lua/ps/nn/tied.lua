-- SPDX-License-Identifier: BSD-3-Clause
-- Finds the further names of tied weights. A weight is tied if two modules have it as a parameter, or if a head was
-- created with `tied` (nn.LMHead). In PyTorch's state_dict, a tied weight has all of its names. If the settings of a
-- pretrained model tie its head to an embedding, the model has no module for the head. When values are loaded, the
-- head's name is still accepted.
local registry = require "ps.nn.registry"

local tied = {}

-- Adds the name of a head's weight if the head reads the weight of an embedding.
local function head_name(self, prefix, first_of, names)
  local head = rawget(self, "tied")
  local first = head and head.weight and first_of[registry.address(head.weight)]
  if first and first ~= prefix .. "weight" then names[prefix .. "weight"] = first end
end

-- Adds the names of weights that the settings of a pretrained model tie.
local function declared(self, prefix, first_of, names)
  local config = rawget(self, "config") or rawget(self, "_fields") and self._fields.config
  if not (self.ties and type(config) == "table" and config.tie_word_embeddings) then return end
  for other, name in pairs(self.ties) do
    local known = first_of[prefix .. name] or names[prefix .. name]
    if known and not first_of[prefix .. other] then names[prefix .. other] = known end
  end
end

--- Returns the further names of tied parameters and persistent buffers.
---@param module ps.nn.Module
---@param loads? boolean whether to include names that are accepted only when values are loaded (default false)
---@return table<string, string> names the keys are the further names, and the values are the first names of the same
--- tensors, as in named_parameters
function tied.names(module, loads)
  local first_of, names, modules = {}, {}, { { module, "" } }
  registry.walk(module, function(name, value, kind, owner, key)
    if kind == "module" then
      modules[#modules + 1] = { value, name .. "." }
    elseif registry.is_persistent(owner, key) then
      local at = registry.address(value)
      if first_of[at] then names[name] = first_of[at]
      else first_of[at], first_of[name] = name, name end
    end
  end)
  for _, entry in ipairs(modules) do
    head_name(entry[1], entry[2], first_of, names)
    if loads then declared(entry[1], entry[2], first_of, names) end
  end
  return names
end

--- Adds the further names of tied weights to a state.
---@param module ps.nn.Module
---@param state table<string, ps.Tensor>
---@return table<string, ps.Tensor> state
function tied.add(module, state)
  for name, first in pairs(tied.names(module)) do state[name] = state[name] or state[first] end
  return state
end

return tied
