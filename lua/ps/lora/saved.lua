-- SPDX-License-Identifier: BSD-3-Clause
-- Modules that an adapter trains in full (PEFT's modules_to_save), such as a new head. The values of the active adapter
-- are in the module's own parameters, such as "score.weight". Code that reads these parameters therefore needs no
-- change. Child modules hold the values of the base model and of the inactive adapters. For example:
--
--   score.weight                              the values of the active adapter
--   score.original_module.weight              the values of the base model; frozen
--   score.modules_to_save.other.weight        the values of another adapter; frozen
local scope = require "ps.core.scope"
local nn_module = require "ps.nn.module"
local registry = require "ps.nn.registry"
local shard = require "ps.tensor.shard"

local saved = {}

local Aside = nn_module.class("SavedTensors")

-- Returns a module's parameters by their names in the module. Omits the tensors in the child modules for inactive
-- values, and the tensors of adapters of inner layers.
local function own_parameters(module)
  local list = {}
  registry.walk(module, function(name, value, kind, owner, key)
    if kind == "param" and not name:find "^original_module%." and not name:find "^modules_to_save%."
      and not ("." .. name):find "%.lora_" then
      list[#list + 1] = { name = name, tensor = value, owner = owner, key = key }
    end
  end)
  return list
end

local function copy_of(tensor)
  local copy = scope.no_grad(function() return tensor:detach():clone() end)
  nn_module.Parameter(copy)
  shard.move(tensor, copy)
  copy:requires_grad(false)
  return copy
end

-- Returns the child module that holds an inactive adapter's tensors. If `name` is false, returns the child module that
-- holds the base model's tensors.
local function aside(module, name)
  if not name then
    if not registry.kind(module, "original_module") then
      nn_module.register(module, "original_module", "module", Aside())
    end
    return module.original_module
  end
  if not registry.kind(module, "modules_to_save") then
    nn_module.register(module, "modules_to_save", "module", Aside())
  end
  local all = module.modules_to_save
  if not registry.kind(all, name) then nn_module.register(all, name, "module", Aside()) end
  return all[name]
end

-- Returns a tensor's name in the child module of an inactive adapter. Dots are replaced, because dots separate modules.
local function flat(name) return (name:gsub("%.", "_")) end

---@class ps.lora.Saved state of a module that adapters train in full
---@field active string|false the adapter whose values are the module's parameters, or false for the base model
---@field names table<string, boolean> the adapters that have their own values

--- Adds a copy of a module's values for an adapter, initialized from the base model.
---@param module ps.nn.Module
---@param name string the adapter's name
function saved.add(module, name)
  local state = rawget(module, "saved_")
  if not state then
    state = { active = false, names = {} }
    rawset(module, "saved_", state)
  end
  saved.activate(module, false)
  for _, entry in ipairs(own_parameters(module)) do
    aside(module, name):param(flat(entry.name), copy_of(entry.tensor)):requires_grad(false)
  end
  state.names[name] = true
end

--- Makes the values of an adapter the module's parameters. If `name` is false, uses the values of the base model.
---@param module ps.nn.Module
---@param name string|false
function saved.activate(module, name)
  local state = module.saved_
  name = state.names[name] and name or false
  if state.active == name then return end
  local to, from = aside(module, state.active), aside(module, name)
  for _, entry in ipairs(own_parameters(module)) do
    local key = flat(entry.name)
    local taken = from[key]
    registry.put(entry.owner, entry.key, taken)
    if registry.kind(to, key) then registry.put(to, key, entry.tensor)
    else nn_module.register(to, key, "param", entry.tensor) end
    from[key] = nil
  end
  state.active = name
end

--- Returns an adapter's tensors by their names in the module.
---@param module ps.nn.Module
---@param name string
---@return table<string, ps.Tensor>
function saved.tensors(module, name)
  local state, list = module.saved_, {}
  local from = state.active ~= name and aside(module, name)
  for _, entry in ipairs(own_parameters(module)) do
    list[entry.name] = from and from[flat(entry.name)] or entry.tensor
  end
  return list
end

local ASIDE = { "original_module", "modules_to_save" }

--- If tensor parallelism has cut a parameter, cuts the inactive values of this parameter in the same way. Does nothing
--- for parameters outside the module.
---@param entry {name: string, module: ps.nn.Module}
---@param path string the parameter's name in the model
---@param cut fun(holder: ps.nn.Module, key: string) replaces a parameter with this rank's part
function saved.cut(entry, path, cut)
  if path:sub(1, #entry.name + 1) ~= entry.name .. "." then return end
  local key = flat(path:sub(#entry.name + 2))
  local function cut_in(holder)
    if registry.kind(holder, key) == "param" then cut(holder, key) end
  end
  if registry.kind(entry.module, "original_module") then cut_in(entry.module.original_module) end
  if registry.kind(entry.module, "modules_to_save") then
    for _, holder in registry.members(entry.module.modules_to_save) do cut_in(holder) end
  end
end

--- Moves the inactive values of a module to the module that replaces it in the model.
---@param entry {name: string, module: ps.nn.Module}
---@param new ps.nn.Module
function saved.move(entry, new)
  local old = entry.module
  for _, key in ipairs(ASIDE) do
    if registry.kind(old, key) then nn_module.register(new, key, "module", old[key]) end
  end
  rawset(new, "saved_", old.saved_)
  entry.module = new
end

--- Removes one adapter's values. The module then has the base model's values.
---@param module ps.nn.Module
---@param name string
---@return boolean bare whether no adapter has values for the module any more
function saved.discard(module, name)
  local state = rawget(module, "saved_")
  if not state then return true end
  saved.activate(module, false)
  state.names[name] = nil
  if next(state.names) == nil then
    saved.remove(module)
    return true
  end
  if registry.kind(module.modules_to_save, name) then module.modules_to_save[name] = nil end
  return false
end

--- Removes the values of inactive adapters. The module then has the base model's values. With `keep`, it keeps the
--- active values instead.
---@param module ps.nn.Module
---@param keep? boolean
function saved.remove(module, keep)
  if not keep then saved.activate(module, false) end
  for _, key in ipairs(ASIDE) do
    if registry.kind(module, key) then module[key] = nil end
  end
  rawset(module, "saved_", nil)
end

return saved
