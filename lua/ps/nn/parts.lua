-- SPDX-License-Identifier: BSD-3-Clause
-- Models as lists of parts. A pipeline can cut a model between parts. A model has a method parts(), which returns the
-- list, and its forward runs the parts one after the other:
--
--   function Net:parts()
--     local list = { { name = "embed", modules = { self.embed }, parameters = { "places" },
--       forward = function(carry, batch) ... end } }
--     ...
--   end
--   function Net:forward(batch) return parts.fold(self:parts(), batch) end
--
-- A part uses only the parameters of its modules and the model's own parameters that are listed in the part's field
-- `parameters`. The carry is everything that a part gets from the part before it. It is a table of tensors, and {} for
-- the first part. The batch is the same for all parts. It contains ids, masks and targets, and never values that parts
-- computed. The model's method batch_of(...) makes the batch from the arguments of a call. Without batch_of, the batch
-- is the call's only table argument, or otherwise the list of all arguments.
local nearest = require "ps.core.nearest"
local registry = require "ps.nn.registry"
local nn_module = require "ps.nn.module"
local scope = require "ps.core.scope"

---@class ps.nn.Part
---@field name string name of the part. If the part has one module, the name is the prefix of the module's parameter
--- names, such as "h.0"
---@field modules? ps.nn.Module[] modules of the part; a tied embedding belongs to every part that uses it
---@field parameters? string[] names of the model's own parameters and buffers that the part uses, such as "class"
---@field forward fun(carry: table<string, ps.Tensor>, batch: table<string, any>): table<string, ps.Tensor>

---@class ps.nn.PartTensor a tensor that a part uses
---@field owner ps.nn.Module
---@field key any the field of `owner` that holds the tensor
---@field tensor ps.Tensor
---@field kind string? "param" or "buffer", or nil for a plain field

local parts = {}

local KEYS = { name = true, modules = true, parameters = true, forward = true }

-- Finds a parameter or buffer by a name such as "stem.scale". Returns the module and the field that hold the parameter
-- or buffer. Returns nil if the model has no such parameter or buffer.
local function find(model, name)
  local owner, key = model, nil
  for word in name:gmatch "[^.]+" do
    if key ~= nil then owner = owner[key] end
    if not nn_module.is_module(owner) then return nil end
    key = registry.kind(owner, word) and word or tonumber(word) or word
  end
  local kind = key ~= nil and registry.kind(owner, key)
  if kind == "param" or kind == "buffer" then return owner, key, kind end
end

local function names_of(model)
  local names = {}
  for name in model:named_parameters() do names[#names + 1] = name end
  for name in model:named_buffers() do names[#names + 1] = name end
  return names
end

-- Raises an error if a part is invalid. `i` is the index of the part, counted from 1.
local function check(model, i, part, seen)
  local function refuse(text, ...)
    local name = type(part) == "table" and type(part.name) == "string" and (" (%s)"):format(part.name) or ""
    error(("part %d%s of %s "):format(i, name, model.class_name) .. text:format(...), 0)
  end
  if type(part) ~= "table" then refuse("is a %s; it must be a table { name, modules, forward }", type(part)) end
  for key in pairs(part) do
    if not KEYS[key] then
      local near = type(key) == "string" and nearest.find(key, { "name", "modules", "parameters", "forward" })
      refuse("has an unknown key '%s'%s", tostring(key), near and (": did you mean " .. near .. "?")
        or "; a part has name, modules, parameters and forward")
    end
  end
  if type(part.name) ~= "string" then refuse "has no name" end
  if seen[part.name] then refuse("has the name of part %d; give each part a name of its own", seen[part.name]) end
  seen[part.name] = i
  if type(part.forward) ~= "function" then refuse "has no forward, a function of the carry and the batch" end
  if part.modules ~= nil and type(part.modules) ~= "table" then refuse "has modules that are not a list" end
  for k, module in pairs(part.modules or {}) do
    if not nn_module.is_module(module) then refuse("has modules[%s] = a %s", tostring(k), type(module)) end
    if rawequal(module, model) then
      refuse("has the whole model in `modules`, so its stage would hold all parameters: list the modules that the "
        .. "part uses, and name the model's own parameters in `parameters`")
    end
  end
  if part.parameters ~= nil and type(part.parameters) ~= "table" then refuse "has parameters that are not a list" end
  for _, name in pairs(part.parameters or {}) do
    if type(name) ~= "string" then
      refuse("has a %s in `parameters`, which takes names such as \"class\" or \"stem.scale\"",
        scope.is_tensor(name) and "tensor" or type(name))
    end
    if not find(model, name) then
      local near = nearest.find(name, names_of(model))
      refuse("names a parameter '%s', which the model does not have%s", name,
        near and (": did you mean " .. near .. "?") or "")
    end
  end
end

--- Checks and returns the parts of a model. An error names the invalid part.
---@param model ps.nn.Module
---@return ps.nn.Part[]
function parts.of(model)
  local list, seen = model:parts(), {}
  if type(list) ~= "table" or #list == 0 then
    error(("%s: parts() returned %s; it must return a list of parts { name, modules, forward }"):format(
      model.class_name, type(list) == "table" and "an empty table" or "a " .. type(list)), 0)
  end
  for i, part in ipairs(list) do check(model, i, part, seen) end
  return list
end

--- Makes the batch for the parts from the arguments of a call.
---@param model ps.nn.Module
---@param args any[] arguments, with their number in `n`
---@return table<string, any>
function parts.batch(model, args)
  local n = args.n or #args
  if type(model.batch_of) == "function" then return model:batch_of(unpack(args, 1, n)) end
  local first = args[1]
  if n == 1 and type(first) == "table" and not nn_module.is_module(first) then return first end
  return args
end

--- Calls fn for each tensor that a part declares. These are the tensors of its modules, including tensors in plain
--- fields, and the model's own tensors that the part lists.
---@param model ps.nn.Module
---@param part ps.nn.Part
---@param fn fun(at: ps.nn.PartTensor)
---@param more? string[] names of further parameters of the model
function parts.each_tensor(model, part, fn, more)
  for _, module in ipairs(part.modules or {}) do
    for _, owner in module:named_modules() do
      for key, tensor, kind in registry.tensors(owner) do
        fn { owner = owner, key = key, tensor = tensor, kind = kind }
      end
    end
  end
  for _, names in ipairs { part.parameters or {}, more or {} } do
    for _, name in ipairs(names) do
      local owner, key, kind = find(model, name)
      if owner and owner[key] ~= nil then fn { owner = owner, key = key, tensor = owner[key], kind = kind } end
    end
  end
end

--- Runs the parts with the indices `first` to `last`.
---@param list ps.nn.Part[]
---@param first integer counted from 1
---@param last integer
---@param carry table<string, ps.Tensor>
---@param batch table<string, any>
---@return table<string, ps.Tensor> carry
function parts.run(list, first, last, carry, batch)
  for i = first, last do carry = list[i].forward(carry, batch) end
  return carry
end

local function run_all(list, batch)
  local n = #list
  return list[n].forward(scope.scope(parts.run, list, 1, n - 1, {}, batch), batch)
end

--- Runs all parts. All parts except the last part run in one scope. The end of this scope frees their tensors, except
--- the carry for the last part. If the list has a function `replay`, this function runs the parts instead
--- (ps/pretrained/generate_replay.lua).
---@param list ps.nn.Part[]
---@param batch table<string, any>
---@return table<string, ps.Tensor> carry result of the last part: { loss = }, { logits = }, ...
function parts.fold(list, batch)
  if list.replay then return list.replay(list, batch, run_all) end
  return run_all(list, batch)
end

-- -- weights that are read without calling their layers ---------------------------------------------------------------
-- The functions below are for code that reads a layer's weight instead of calling the layer, such as fused ops and tied
-- heads. Adapters (ps.lora) replace a layer's forward. For such code, they also set the layer's weight_now.

--- Returns whether a layer is an object of a class and the script has not replaced its forward.
---@param layer ps.nn.Module
---@param class table
---@return boolean
function parts.is_plain(layer, class)
  return getmetatable(layer) == class.instance and rawget(layer, "forward") == nil
end

--- Returns the weight that a layer computes with. Layers with adapters or packed weights have a function weight_now,
--- which returns this weight. For other layers the weight is the layer's parameter.
---@param layer ps.nn.Module
---@return ps.Tensor
function parts.weight(layer)
  local now = rawget(layer, "weight_now")
  return now and now(layer) or layer.weight
end

return parts
