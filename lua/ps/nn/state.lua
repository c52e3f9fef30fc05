-- SPDX-License-Identifier: BSD-3-Clause
-- The methods of modules that return and set values by name: state_dict and load_state_dict.
local caller = require "ps.core.caller"
local hooks = require "ps.core.hooks"
local is_tensor = require("ps.core.scope").is_tensor
local load_plan = require "ps.nn.load_plan"
local registry = require "ps.nn.registry"
local sharded = require "ps.nn.sharded"
local tied = require "ps.nn.tied"
local error = caller.error

local STATE = { tied = "boolean" }
local LOADING = { strict = "boolean", check_only = "boolean", elsewhere = "function" }

---@param Module ps.nn.Module the class to which the methods are added
---@param check_owned fun(module: ps.nn.Module) refuses modules and parameters in plain tables
return function(Module, check_owned)
  --- Returns all parameters and persistent buffers by name. The values are references to the tensors, not copies. As in
  --- PyTorch, a tied weight is listed under all of its names.
  ---@param options? {tied?: boolean} tied = false lists a tied weight only under its first name, as in named_parameters
  ---@return table<string, ps.Tensor>
  function Module:state_dict(options)
    options = caller.options(options, "state_dict", STATE)
    check_owned(self)
    local state, seen = {}, {}
    registry.walk(self, function(name, tensor, kind, owner, key)
      if kind == "module" or seen[registry.address(tensor)] or not registry.is_persistent(owner, key) then return end
      seen[registry.address(tensor)], state[name] = true, tensor
    end)
    return options.tied == false and state or tied.add(self, state)
  end

  --- Copies values into the parameters and buffers of the same names, and converts their types. Checks everything
  --- before it writes anything. A tied weight may have any of its names in a state. If a tied weight has several names
  --- in the state, the values under these names must be equal.
  ---@param state table<string, ps.Tensor>|ps.SafeTensors|ps.TorchFile a state dict, or an open file (ps.load with
  --- lazy), which is read one tensor at a time
  ---@param options? {strict?: boolean, check_only?: boolean, elsewhere?: fun(name: string): any} strict: whether
  --- missing and unexpected names are errors (default true); check_only: whether to check without writing; elsewhere:
  --- returns whether another process has a tensor, which then does not count as missing
  ---@return {missing: string[], unexpected: string[]}
  function Module:load_state_dict(state, options)
    if type(state) ~= "table" then
      error(("load_state_dict takes a table of tensors by name, or an open file, not a %s"):format(type(state)))
    end
    options = caller.options(options, "load_state_dict", LOADING)
    local file = state.read_into and state --[[@as ps.SafeTensors]]
    local source = {}
    if file then
      for _, name in ipairs(file:names()) do source[name] = true end
    else
      for name in pairs(state) do source[name] = true end
    end
    local function shape_of(name)
      if file then return file:shape(name) end
      if not is_tensor(state[name]) then
        error(("load_state_dict: '%s' is a %s, not a tensor"):format(name, type(state[name])), 0)
      end
      return state[name]:shape()
    end
    local elsewhere = options.elsewhere
    local entries, missing, unexpected, wrong = load_plan.plan(self, source, shape_of, elsewhere, state)
    if #wrong > 0 then error("load_state_dict: shapes differ: " .. load_plan.some(wrong)) end
    if options.strict ~= false then
      local problems = {}
      if #missing > 0 then problems[1] = ("%d missing: %s"):format(#missing, load_plan.some(missing)) end
      if #unexpected > 0 then
        problems[#problems + 1] = ("%d unexpected: %s"):format(#unexpected, load_plan.some(unexpected))
      end
      if #problems > 0 then error("load_state_dict: " .. table.concat(problems, "; ")) end
    end
    for _, entry in ipairs(file and entries or {}) do
      if entry.from then file:check(entry.from) end
    end
    load_plan.check_tied(entries, state)
    if options.check_only then return { missing = missing, unexpected = unexpected } end
    for _, entry in ipairs(entries) do
      if entry.from then
        local held = hooks.ask("load", entry.tensor, state, entry.from)
        local tensor = held and held.to or entry.tensor
        if held and held.elsewhere then tensor = nil else sharded.read(state, entry.from, tensor, entry.tensor) end
        if held and tensor ~= nil then held:loaded(entry.tensor) end
      end
    end
    hooks.tell("loaded", self)
    return { missing = missing, unexpected = unexpected }
  end
end
