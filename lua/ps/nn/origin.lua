-- SPDX-License-Identifier: BSD-3-Clause
-- Which weights of a model are still those of the files from which the model was loaded. Adapters (ps.lora) and their
-- checkpoints name these files instead of storing the weights.
--
-- A weight is unchanged as long as its version, which each write increments, is the version after loading. An engine
-- moves the bytes of parameters and thereby changes versions. So origin.settle decides which weights are unchanged
-- before that. An engine does not change frozen weights; its load_state_dict calls origin.loaded.
local lfs = require "lfs"
local native = require "ps.core.ffi"
local registry = require "ps.nn.registry"
local address, C = registry.address, native.C

local origin = {}

---@class ps.nn.Origin
---@field versions table<integer, integer> the version of each parameter after loading, by the parameter's address
---@field files table<string, string> the state of each file when the model was loaded, by path
---@field settled? table<integer, true> the addresses of unchanged parameters, if they were determined for all time

-- Returns a text that differs if a file was replaced or written.
local function state_of(path)
  local a = lfs.attributes(path)
  return a and ("%s %s %s %s"):format(a.dev, a.ino, a.size, a.modification) or "missing"
end

--- Records that a model's parameters have the values of files.
---@param model ps.nn.Module
---@param files string[]
function origin.note(model, files)
  local versions, states = {}, {}
  for _, p in model:named_parameters() do versions[address(p)] = C.ps_tensor_version(p) end
  for _, path in ipairs(files) do states[path] = state_of(path) end
  rawset(model, "origin_", { versions = versions, files = states })
end

--- Returns a file that has changed since the model was loaded from it, or nil if there is none.
---@param model ps.nn.Module
---@return string? path
function origin.changed_file(model)
  local own = rawget(model, "origin_")
  for path, state in pairs(own and own.files or {}) do
    if state_of(path) ~= state then return path end
  end
end

local function is_unchanged(own, p)
  local at = address(p)
  if own.settled then return own.settled[at] ~= nil end
  return own.versions[at] == C.ps_tensor_version(p)
end

--- Returns a parameter that the files do not have, or whose value has changed since it was loaded. Returns nil if all
--- parameters for which `among` returns true are unchanged. For a model that was not loaded from files, returns "".
---@param model ps.nn.Module
---@param among fun(name: string, p: ps.Tensor): boolean
---@return string? name
function origin.changed(model, among)
  local own = rawget(model, "origin_")
  if not own then return "" end
  for name, p in model:named_parameters() do
    if among(name, p) and not is_unchanged(own, p) then return name end
  end
end

--- Returns the names of the unchanged parameters, for origin.renew. Returns nil if the model was not loaded from files.
---@param model ps.nn.Module
---@return table<string, true>?
function origin.state(model)
  local own, names = rawget(model, "origin_"), {}
  if not own then return nil end
  for name, p in model:named_parameters() do names[name] = is_unchanged(own, p) or nil end
  return names
end

--- Makes parameters unchanged again, after they were replaced or rewritten without a change of the model that they
--- describe: they were converted to another type, or a merged adapter was subtracted.
---@param model ps.nn.Module
---@param names? table<string, true> from origin.state, before the parameters were rewritten
function origin.renew(model, names)
  local own = rawget(model, "origin_")
  if not (own and names) or own.settled then return end
  for name, p in model:named_parameters() do
    if names[name] then own.versions[address(p)] = C.ps_tensor_version(p) end
  end
end

--- Determines which parameters are unchanged, before an engine takes the model.
---@param model ps.nn.Module
function origin.settle(model)
  local own = rawget(model, "origin_")
  if not own or own.settled then return end
  local settled = {}
  for _, p in model:named_parameters() do settled[address(p)] = is_unchanged(own, p) or nil end
  own.settled = settled
end

--- Records that load_state_dict has loaded values into the parameters of an engine's model.
---@param model ps.nn.Module
---@param missing string[] names that the state did not have
---@param elsewhere? fun(name: string): boolean returns true for names that the state did not have to have
function origin.loaded(model, missing, elsewhere)
  local own, lacks = rawget(model, "origin_"), {}
  if not (own and own.settled) then return end
  for _, name in ipairs(missing) do lacks[name] = true end
  for name, p in model:named_parameters() do
    if not lacks[name] and not (elsewhere and elsewhere(name)) then own.settled[address(p)] = nil end
  end
end

return origin
