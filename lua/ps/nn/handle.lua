-- SPDX-License-Identifier: BSD-3-Clause
-- The model that ps.initialize returns. It is a handle that holds the engine under a key that no script can name.
-- Therefore a field that a script sets never changes the engine, and the engine's fields never hide the module's
-- fields. Engine.PUBLIC lists the handle's own names. Any other name is read from the module and written to the module.
-- Within the library, functions pass the engine itself. handle.of returns the engine of a script's model.
local caller = require "ps.core.caller"
local foreign = require "ps.core.foreign"

local handle = {}

local ENGINE = {}                                             -- the key of the engine in a handle
local engines = setmetatable({}, { __mode = "kv" })           -- all live engines; each is a key and its own value
local originals = setmetatable({}, { __mode = "k" })          -- the module's function for each wrapper of a handle

--- Returns the engine of a model.
---@param model any
---@return ps.Engine? engine nil if `model` is neither a model of ps.initialize nor an engine
function handle.of(model)
  if type(model) ~= "table" then return nil end
  return rawget(model, ENGINE) or engines[model]
end

--- Returns the engine of the model on which a method was called.
---@param model any
---@param name string the method's name
---@return ps.Engine
function handle.own(model, name)
  return handle.of(model) or caller.error(("%s is a method of a model that ps.initialize made, not of a %s: write "
    .. "model:%s(...)"):format(name, type(model), name))
end

--- Returns the module of a model, or the argument itself if it is a module.
---@param model ps.nn.Module|ps.Engine
---@return ps.nn.Module
function handle.module(model)
  local engine = handle.of(model)
  return engine and engine.module or model
end

--- Returns the module's function that a handle's wrapper calls. Returns a function that is not a wrapper unchanged.
---@param fn function
---@return function
function handle.original(fn) return originals[fn] or fn end

-- Returns the results of a module's method. If the method returned its module, the model replaces the module.
local function returned(self, first, ...)
  if first ~= nil and rawequal(first, rawget(self, ENGINE).module) then return self, ... end
  return first, ...
end

-- Wraps a function of the module. A call of the wrapper on the handle calls the function on the module.
local function bound(self, fn)
  local engine = rawget(self, ENGINE)
  local wrapper = engine.bound[fn]
  if wrapper then return wrapper end
  wrapper = function(first, ...)
    if not rawequal(first, self) then return fn(first, ...) end
    return returned(self, fn(engine.module, ...))
  end
  engine.bound[fn], originals[wrapper] = wrapper, fn
  return wrapper
end

-- Returns the handle's own value for a name, or nil if the name belongs to the module.
local function own_value(self, methods, key)
  local engine = rawget(self, ENGINE)
  if key == "module" then return engine.module end
  if key == "generate" and engine.module and engine.module.generate == nil then return nil end
  return methods[key]
end

--- Returns the metatable of handles.
---@param methods table<string, function> the handle's own methods by name
---@param call fun(engine: ps.Engine, ...): any performs a call of the model
---@return table
function handle.instance(methods, call)
  return {
    __index = function(self, key)
      local own = own_value(self, methods, key)
      if own ~= nil then return own end
      local module = rawget(self, ENGINE).module
      local value = module and module[key]
      if type(value) == "function" then return bound(self, value) end
      if value == nil then return foreign.find("model", key) end
      return value
    end,
    __newindex = function(self, key, value)
      if own_value(self, methods, key) ~= nil then
        caller.error(("model.%s belongs to the engine; the module's field of this name is model.module.%s"):format(key,
          key))
      end
      rawget(self, ENGINE).module[key] = value
    end,
    ps_module_of = function(self) return rawget(self, ENGINE).module end,       -- ps.core.lists reads it
    __call = function(self, ...) return returned(self, call(rawget(self, ENGINE), ...)) end,
    __names = function(self)
      local names = { module = rawget(self, ENGINE).module }
      for name in pairs(methods) do names[name] = own_value(self, methods, name) end
      return names, names.module
    end,
    __tostring = function(self) return "Engine(" .. tostring(rawget(self, ENGINE).module) .. ")" end,
  }
end

--- Creates the handle of an engine.
---@param engine ps.Engine
---@param instance table from handle.instance
---@return ps.Engine
function handle.new(engine, instance)
  engines[engine] = engine
  return setmetatable({ [ENGINE] = engine }, instance)
end

return handle
