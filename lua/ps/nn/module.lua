-- SPDX-License-Identifier: BSD-3-Clause
-- Classes and nn.Module: a named tree of parameters, buffers and modules.
--
--   local Net = nn.class("Net")                  -- derived from nn.Module; nn.class("B", Net) derives further
--   function Net:init(width)
--     self.fc = nn.Linear(width, width)          -- assigning a module registers it under that name
--     self:param("scale", ps.ones { width })     -- so do :param, :buffer and self.x = nn.Parameter(tensor)
--   end
--   function Net:forward(x) return self.fc(x) * self.scale end
--   local net = Net(64); local y = net(x)
--
-- Calling a module runs :forward in a scope. The end of the scope frees temporaries that neither the result nor the
-- tape needs. `Class.unscoped = true` omits the scope, for a class whose forward makes no temporaries. The names and
-- the order of parameters are the same as in PyTorch's named_parameters ("h.0.attn.weight"; see ps.nn.registry): a
-- module's own tensors come before the tensors of its modules. A tied tensor is listed once, under its first name, but
-- state_dict has all of its names. Modules keep no activations.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local collector = require "ps.core.collector"
local exact = require "ps.core.exact"
local summary = require "ps.nn.summary"
local hooks = require "ps.core.hooks"
local module_hooks = require "ps.nn.hooks"
local rectangles = require "ps.core.rectangles"
local foreign = require "ps.core.foreign"
local origin = require "ps.nn.origin"
local registry = require "ps.nn.registry"
local shard = require "ps.tensor.shard"
local tensor_hooks = require "ps.tensor.hooks"
local error = caller.error
local C = native.C

-- The fields for other files:
--   changes: number of registrations and replacements of parameters and modules so far
--   assigned: number of assignments to modules outside of the modules' calls
--   optimizers: the live optimizers of ps.optim. The table `trained` of an optimizer maps a parameter's address to true
--   updated: maps the address of a parameter that an engine updates to {engine, name}, which the engine keeps alive
local exports = { changes = 0, assigned = 0, optimizers = setmetatable({}, { __mode = "k" }),
  updated = setmetatable({}, { __mode = "v" }) }

--- Returns the open engine that updates a parameter, and the name of the parameter in this engine.
---@param param ps.Tensor
---@return {engine: ps.Engine, name: string}? by nil if no engine updates the parameter
function exports.updated_by(param)
  local by = exports.updated[registry.address(param)]
  return by and not by.engine.closed and by or nil
end

local made_by_parameter = setmetatable({}, { __mode = "k" })

---@class ps.nn.Module
---@field training boolean
---@field recomputes boolean? whether backward recomputes the module's calls
---@field package _names any[] registered names, in order
---@field package _kind table<any, string> "module", "param" or "buffer"
---@field package _fields table<any, any> all assigned values, registered or not; the object itself is empty, so that
--- each assignment calls __newindex
local Module = foreign.stand({ class_name = "Module" }, "module")

local is_tensor, walk, address = scope.is_tensor, registry.walk, registry.address

--- Returns whether a value is a module.
---@param value any
---@return boolean
local function is_module(value)
  local meta = type(value) == "table" and getmetatable(value)
  return meta and meta.ps_module or false
end

-- Registers a value. `level` is the stack level of the function whose assignment registers the value, or nil for a
-- method.
local function register(self, name, kind, value, level)
  registry.add(self, name, kind, value, level and level + 1)
  exports.changes = exports.changes + 1
end

local note_gone                                    -- function(old, name) that reports a member that will be replaced

-- Makes the tensors of a field outlive scopes. The field is a tensor, or a plain table of tensors that a forward
-- assigns. A tensor whose data has been freed is skipped.
local FIELD_DEPTH = 3
local function outlives_scopes(value, depth)
  if is_tensor(value) then
    if value:alive() then value:keep() end
  elseif type(value) == "table" and depth > 0 and getmetatable(value) == nil and C.ps_module_now() ~= 0 then
    for _, v in pairs(value) do outlives_scopes(v, depth - 1) end
  end
end

-- Performs self.name = value with PyTorch's rules. A module or parameter is registered. nil removes the name. A
-- registered name accepts only values of its kind.
local function assign(self, name, value)
  if C.ps_module_now() == 0 then exports.assigned = exports.assigned + 1 end
  local kind = self._kind[name]
  local old = kind and self._fields[name]
  if old and (kind == "module" or kind == "param") and not rawequal(old, value) and next(exports.optimizers) then
    note_gone(old, name)
  end
  if rawequal(value, nil) then
    if kind then registry.remove(self, name) end
  elseif is_module(value) then
    register(self, name, "module", value, 2)
  elseif is_tensor(value) and made_by_parameter[value] then
    register(self, name, "param", value, 2)
  elseif kind == "param" then
    error(("%s.%s is a parameter, and a %s in its place would not be trained: write into it with "
      .. "ps.no_grad(function() module.%s:copy_(value) end), or assign ps.nn.Parameter(tensor), or nil to remove it")
      :format(self.class_name, tostring(name), is_tensor(value) and "tensor" or type(value), tostring(name)))
  elseif kind == "module" then
    error(("%s.%s is a module; assign another module, or nil, not a %s"):format(self.class_name, tostring(name),
      is_tensor(value) and "tensor" or type(value)))
  elseif kind == "buffer" then
    if not is_tensor(value) then
      error(("%s.%s is a buffer; assign a tensor, or nil, not a %s"):format(self.class_name, tostring(name),
        type(value)))
    end
    value:keep()
  else
    outlives_scopes(value, FIELD_DEPTH)
  end
  self._fields[name] = value
end

-- The modules that have been called, by their index in the record of events (C.ps_module_enter).
local called, last_number, called_at = setmetatable({}, { __mode = "v" }), 0, {}
exports.called = called
exports.called_at = called_at                      -- the script's line of each module's first call, by index

local function number(self)
  last_number = last_number + 1
  rawset(self, "_number", last_number)
  called[last_number], called_at[last_number] = self, caller.where()
  return last_number
end

local function body(self, ...)
  if self.recomputes and scope.grad_enabled() then return scope.recompute(self.forward, self, ...) end
  if self.unscoped then return self:forward(...) end
  return scope.scope(self.forward, self, ...)
end

local function forward(self, ...)
  if rawget(self, "_hooks") then return module_hooks.run(self, body, ...) end
  return body(self, ...)
end

local function leave(depth, ...)
  C.ps_module_leave(depth)
  return ...
end

local function entered(self, ...)
  return leave(C.ps_module_enter(rawget(self, "_number") or number(self)), forward(self, ...))
end

-- Runs the outermost call of a module in a scope. After an error, the code that marks modules as left does not run. In
-- this case the end of the scope marks the modules as left.
local function alone(self, ...) return scope.scope(entered, self, ...) end

-- Returns the name of a module's call, and a hint for the error about a surplus argument.
local function input_names(self)
  local names = {}
  for name in pairs(self.split_inputs or {}) do names[#names + 1] = name .. " =" end
  table.sort(names)
  return self.class_name, names[1] and ("; other inputs go by name: model { %s }"):format(table.concat(names, ", "))
end

-- Calls a module. If the module's class has a function outermost(self, run, ...), each call that is not inside the call
-- of another module calls outermost() instead. run(self, ...) performs the actual call.
local function call(self, ...)
  if self.forward == Module.forward then self:forward() end
  exact.arguments(self.forward, input_names, self, ...)
  if C.ps_module_now() ~= 0 then return entered(self, ...) end
  local outermost = self.outermost
  if outermost then return outermost(self, alone, ...) end
  return alone(self, ...)
end

local function class_name(class) return class.class_name end

local function construct(class, ...)
  if type(class) ~= "table" or not rawget(class, "instance") then
    error("new is a method of a class: call Class:new(...) or Class(...), not new of a " .. type(class))
  end
  exact.arguments(class.init, class_name, class, ...)
  local object = setmetatable({ _names = {}, _kind = {}, _fields = {}, training = true }, class.instance)
  registry.made(object)
  object:init(...)
  local made = class.instance.ps_made                         -- optional function that is called for each new object
  if made then made(object) end
  return object
end

local function show(self, indent)
  local lines, extra = {}, self:extra_repr()
  for name, child, kind in registry.members(self) do
    if kind == "module" then
      lines[#lines + 1] = ("%s  (%s): %s"):format(indent, name, show(child, indent .. "  "))
    end
  end
  if #lines == 0 then return ("%s(%s)"):format(self.class_name, extra) end
  return ("%s(%s\n%s\n%s)"):format(self.class_name, extra, table.concat(lines, "\n"), indent)
end

local adapters = {}                                -- functions that change the metatable of a class's objects, by class

function exports.adapt(made, adapter)
  adapters[made] = adapter
  adapter(made)
end

--- Creates a class. `Class(...)` and `Class:new(...)` create an object and call `Class:init(...)` on it.
---@param name string
---@param base? table (default nn.Module)
---@return table
local function class(name, base)
  caller.typed(name, "string", "nn.class: the name")
  if base ~= nil and (type(base) ~= "table" or base ~= Module and not rawget(base, "instance")) then
    error("nn.class: the base class is a " .. type(base) .. ", not a class")
  end
  local self = setmetatable({ class_name = name }, { __index = base or Module, __call = construct })
  local function index(object, key)
    local value = rawget(object, "_fields")[key]
    if value ~= nil then return value end
    return self[key]
  end
  self.instance = {
    __index = index, __newindex = assign, __call = call, ps_module = true, ps_class = self,
    __names = function(object) return rawget(object, "_fields"), self end,
    __tostring = function(object) return show(object, "") end,
  }
  self.new = construct
  local adapt = adapters[base]
  if adapt then exports.adapt(self, adapt) end
  return self
end

for _, name in ipairs { "register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook" } do
  Module[name] = module_hooks[name]
end

--- Returns whether the module is an object of a class or of one of the class's descendants, like Python's isinstance.
---@param of table a class, such as nn.Linear
---@return boolean
function Module:is_a(of)
  if type(of) ~= "table" or of ~= Module and not rawget(of, "instance") then
    error(("module:is_a takes a class, not %s"):format(of == nil and "nil" or "a " .. type(of)))
  end
  local own = getmetatable(self).ps_class
  while own and not rawequal(own, of) do own = own ~= Module and getmetatable(own).__index end
  return own and true or false
end

function Module:init() end
Module.extra_repr = function() return "" end
--- Computes the module's result. Each class must define its own forward. The forward of nn.Module raises an error.
function Module:forward()
  error(("%s has no forward method: define function %s:forward(...)"):format(self.class_name, self.class_name))
end

--- Marks a tensor as a parameter. A parameter requires a gradient and outlives scopes. It is registered when a script
--- assigns it to a field of a module.
---@param tensor ps.Tensor
---@return ps.Tensor
local function Parameter(tensor)
  if not is_tensor(tensor) then
    error(("nn.Parameter takes a tensor, not %s"):format(tensor == nil and "nil" or "a " .. type(tensor)))
  end
  if not tensor:is_float() then error("nn.Parameter takes a float tensor, not one of " .. tensor:dtype()) end
  tensor:requires_grad(true)
  tensor:keep()
  made_by_parameter[tensor] = true
  registry.made(tensor)
  hooks.tell("parameter", tensor)
  return tensor
end

local function named(name, method)
  if type(name) ~= "string" and type(name) ~= "number" then
    error(("module:%s: the name is %s; it must be a string"):format(method,
      name == nil and "nil" or "a " .. type(name)))
  end
end

--- Registers `tensor` as the parameter `name`, and returns it. The tensor may replace an older parameter of this name.
---@param name string
---@param tensor ps.Tensor
---@return ps.Tensor
function Module:param(name, tensor)
  named(name, "param")
  if not is_tensor(tensor) then error(("module:param: '%s' is a %s, not a tensor"):format(name, type(tensor))) end
  register(self, name, "param", Parameter(tensor))
  return tensor
end

local BUFFER = { persistent = "boolean", keep_dtype = "boolean" }

--- Registers `tensor` as a buffer. A buffer is saved and moved together with the module, but it is never trained.
---@param name string
---@param tensor ps.Tensor
---@param options? {persistent?: boolean, keep_dtype?: boolean} persistent = false: the buffer is in no state_dict and
--- no file, as in PyTorch. keep_dtype: module:to and its aliases do not change the buffer's type
---@return ps.Tensor
function Module:buffer(name, tensor, options)
  options = caller.options(options, "module:buffer", BUFFER)
  named(name, "buffer")
  if not is_tensor(tensor) then error(("module:buffer: '%s' is a %s, not a tensor"):format(name, type(tensor))) end
  tensor:keep()
  register(self, name, "buffer", tensor)
  registry.set_persistent(self, name, options.persistent ~= false)
  registry.set_keeps_dtype(self, name, options.keep_dtype == true)
  return tensor
end

-- Raises an error if a plain table contains modules or parameters. Checks only if something was registered since the
-- last check.
local function check_owned(self)
  if rawget(self, "_checked") == exports.changes then return end
  local function check(module, path)
    local key, place, found = registry.unowned(module)
    if key ~= nil then
      local field = (path == "" and "" or path .. ".") .. tostring(key)
      error(("%s.%s%s is a %s in a plain Lua table, where it is neither trained nor saved. Assign ps.nn.ModuleList "
        .. "{ ... }, or one field each (module:param for a parameter); rawset(module, \"%s\", table) excludes it on "
        .. "purpose"):format(self.class_name, field, place, is_module(found) and found.class_name or "parameter",
        tostring(key)))
    end
  end
  check(self, "")
  walk(self, function(name, value, kind) if kind == "module" then check(value, name) end end)
  rawset(self, "_checked", exports.changes)
end

-- Returns the tensors of one kind as a list of {name =, tensor =}. Without a kind, returns the tensors of both kinds. A
-- tied tensor occurs once.
local function tensors_of(self, kind)
  check_owned(self)
  local list, seen = {}, {}
  walk(self, function(name, value, what)
    if what ~= "module" and (not kind or what == kind) and not seen[address(value)] then
      seen[address(value)] = name
      list[#list + 1] = { name = name, tensor = value }
    end
  end)
  return list, seen
end

local function iterate(list)
  local i = 0
  return function()
    i = i + 1
    if list[i] then return list[i].name, list[i].tensor end
  end
end

--- Returns an iterator for `for name, tensor in model:named_parameters() do`. It produces each parameter once. The
--- order is PyTorch's: a module's own parameters come before the parameters of its modules, and both are in the order
--- of their registration.
---@return fun(): string?, ps.Tensor?
function Module:named_parameters() return iterate(tensors_of(self, "param")) end
--- Returns an iterator for `for name, tensor in model:named_buffers() do`. It produces each buffer once, in the order
--- of registration.
---@return fun(): string?, ps.Tensor?
function Module:named_buffers() return iterate(tensors_of(self, "buffer")) end

--- Returns all parameters in the order of named_parameters. Each parameter occurs once.
---@return ps.Tensor[]
function Module:parameters()
  local list = {}
  for i, entry in ipairs(tensors_of(self, "param")) do list[i] = entry.tensor end
  return list
end

--- Returns the total number of elements of all parameters. If a rank holds only a shard of a parameter, all elements of
--- the whole parameter are counted.
---@return integer
function Module:num_parameters()
  local n = 0
  for _, p in ipairs(self:parameters()) do n = n + shard.whole_numel(p) end
  return n
end

--- Returns a list of the modules inside this module, with their numbers of parameters. The list prints as a table
--- (ps.inspect.summary).
---@return table[] rows
function Module:summary() return summary(self) end

--- Returns an iterator for `for name, module in model:named_modules() do`. It produces the module itself, with the name
--- "", and all modules in it.
---@return fun(): string?, ps.nn.Module?
function Module:named_modules()
  local list = { { name = "", tensor = self } }
  walk(self, function(name, value, kind)
    if kind == "module" then list[#list + 1] = { name = name, tensor = value } end
  end)
  return iterate(list)
end

--- Returns an iterator for `for name, module in model:named_children() do`. It produces the direct child modules and
--- their names in this module.
---@return fun(): string?, ps.nn.Module?
function Module:named_children()
  local list = {}
  for _, key in ipairs(self._names) do
    if self._kind[key] == "module" then list[#list + 1] = { name = tostring(key), tensor = self._fields[key] } end
  end
  return iterate(list)
end

require "ps.nn.aliases"(Module)
require "ps.nn.freeze"(Module)

--- Calls fn for every module inside this module, and then for this module. Children are called before their parents. A
--- child with two names in one module is called once.
---@param fn fun(module: ps.nn.Module)
---@return ps.nn.Module self
function Module:apply(fn)
  local done = {}
  for _, child, kind in registry.members(self) do
    if kind == "module" and not done[child] then
      done[child] = true
      child:apply(fn)
    end
  end
  fn(self)
  return self
end

--- Switches the module and all modules in it to training mode (the default) or to evaluation mode.
---@param mode? boolean
---@return ps.nn.Module self
function Module:train(mode)
  return self:apply(function(m) rawset(m, "training", mode ~= false) end)
end

--- Switches the module and all modules in it to evaluation mode. In this mode dropout does nothing. Ops are still
--- recorded for gradients, as in training mode. ps.no_grad disables the recording.
---@return ps.nn.Module self
function Module:eval() return self:train(false) end

--- Makes blocks recompute their activations in backward (ps.recompute). Only the inputs of the blocks are then kept. A
--- block is an element of an nn.ModuleList, or an element of an nn.Sequential that contains modules. A module inside a
--- block is not a block of its own. A block must return only tensors.
---@param on? boolean (default true)
---@return integer count number of blocks
function Module:recompute_blocks(on)
  local count = 0
  for _, child, kind in registry.members(self) do
    if kind == "module" then
      if self.holds_blocks and child.forward ~= Module.forward and self:holds_blocks(child) then
        rawset(child, "recomputes", on ~= false or nil)
        count = count + 1
      else
        count = count + child:recompute_blocks(on)
      end
    end
  end
  return count
end

--- Drops all gradients. For a model of ps.initialize, does the same as optimizer:zero_grad().
---@param set_to_none? boolean as in PyTorch; only true, the default, is allowed
function Module:zero_grad(set_to_none)
  exact.set_to_none(set_to_none, "module:zero_grad")
  local params = self:parameters()
  for _, p in ipairs(hooks.ask("zero_grad", params) or params) do p:set_grad(nil) end
end

local TO = { dtype = "string", device = "string" }
local floating = { fp32 = true, bf16 = true, fp16 = true, fp64 = true }

-- Records that another tensor has replaced a parameter. `by` is the call that replaced the parameter.
local function made_anew(tensor, name, by)
  exports.changes = exports.changes + 1
  for optimizer in pairs(exports.optimizers) do
    if optimizer.trained[address(tensor)] and not optimizer.lost then
      optimizer.lost = ("%s replaced %s"):format(by, name)
    end
  end
end

-- Reports to the optimizers that a member was replaced. The parameters of an optimizer may then no longer belong to the
-- model (Optimizer:step).
function note_gone(old, name)
  local function gone(tensor, full)
    for optimizer in pairs(exports.optimizers) do
      if optimizer.trained[address(tensor)] then
        optimizer.gone = optimizer.gone or {}
        table.insert(optimizer.gone, { tensor = tensor, name = full })
      end
    end
  end
  if is_tensor(old) then return gone(old, name) end
  walk(old, function(inner, tensor, kind)
    if kind == "param" then gone(tensor, name .. "." .. inner) end
  end)
end

-- Converts the tensors of a module, or moves them to another device.
local function convert(self, target)
  local moved, dtype, device = {}, target.dtype and native.dtype_code(target.dtype), target.device
  device = device and native.device_index(device)
  walk(self, function(name, tensor, kind, owner, key)
    if kind == "module" then return end
    local converts = floating[tensor:dtype()] and not registry.keeps_dtype(owner, key)
    local stays = not dtype or tensor.dtype_ == dtype or not converts
    if stays and (not device or tensor.device_ == device) then return end
    local at = address(tensor)
    if not moved[at] then
      local spec = { device = target.device, dtype = converts and target.dtype or nil }
      local copy = scope.no_grad(function() return tensor:detach():to(spec) end)
      if kind == "param" then
        made_anew(tensor, name, "module:to(...)")
        Parameter(copy)
        shard.move(tensor, copy)
        tensor_hooks.move(tensor, copy)
        if not tensor:needs_grad() then copy:requires_grad(false) end
      end
      copy:keep()
      moved[at] = copy
      moved[-at] = tensor -- keeps the old tensor alive, so that its address is not reused before the loop ends
    end
    owner._fields[key] = moved[at]
  end)
end

--- Converts parameters and floating-point buffers to a type, to a device, or to both. Tensors that change are replaced.
--- Create the optimizer after this call, because an optimizer that was created before the call refuses to step.
---@param target string|{dtype?: string, device?: string} a type ("bf16"), a device ("cuda"), or a table of both
---@param ... any rejected
---@return ps.nn.Module self
function Module:to(target, ...)
  if type(self) ~= "table" or getmetatable(self) == nil then caller.no_self "module:to" end
  if ... ~= nil then error("module:to takes a type, a device, or { dtype = , device = }, and no further argument") end
  if type(target) == "string" then
    target = pcall(native.dtype_code, target) and { dtype = target } or { device = target }
  end
  caller.typed(target, "table", "module:to: what to convert to")
  caller.options(target, "module:to", TO)
  check_owned(self)
  local unchanged = origin.state(self)
  convert(self, target)
  origin.renew(self, unchanged)
  collector.thoroughly()
  return self
end

require "ps.nn.state"(Module, check_owned)

-- init and forward have no check here. Their arguments are checked when the class or the module is called.
local init, no_forward = Module.init, Module.forward
exact.all(Module, "module:", true)
Module.init, Module.forward = init, no_forward
--- Stores the modes (training or evaluation) of a module and of all modules in it.
---@param module ps.nn.Module
---@return fun() restore sets the stored modes again
local function modes(module)
  local list = {}
  module:apply(function(m) list[#list + 1] = { m, m.training } end)
  return function() for _, entry in ipairs(list) do rawset(entry[1], "training", entry[2]) end end
end

-- -- dropout that is off ----------------------------------------------------------------------------------------------
local off, told = setmetatable({}, { __mode = "v" }), false

--- Records that a layer drops nothing because the layer is in evaluation mode. The next backward prints a message.
---@param module ps.nn.Module
local function dropout_is_off(module)
  if not told and scope.grad_enabled() then off[1] = module end
end

hooks.on("backwards", function(note)
  local module = off[1]
  off[1] = nil
  if told or module == nil or module.training then return end
  told = true
  local group = require("ps.dist.mesh").group "world"
  if group and group:rank() > 0 then return end
  note(("dropout is off in this backward: %s is in evaluation mode, in which ps.from_pretrained returns models; "
    .. "model:train() switches dropout on"):format(module.class_name))
end)

for name, value in pairs { Module = Module, class = class, Parameter = Parameter, is_module = is_module,
                           is_tensor = is_tensor, address = address, register = register, same_shape = rectangles.same,
                           replaced = made_anew, modes = modes,
                           dropout_is_off = dropout_is_off } do
  exports[name] = value
end
return exports
