-- SPDX-License-Identifier: BSD-3-Clause
-- Hooks of modules: functions of a script that run before or after a module's forward, or in backward when the
-- gradients of the module's inputs are complete. If a module has a backward hook, its inputs pass through a function of
-- ps.autograd, and its outputs pass through another function of ps.autograd, as in PyTorch's BackwardHook.
local caller = require "ps.core.caller"
local scope = require "ps.core.scope"
local tensor_hooks = require "ps.tensor.hooks"
local Function = require("ps.autograd.function").Function
local is_tensor = scope.is_tensor

local hooks = {}

local function pack(...) return { n = select("#", ...), ... } end

---@class ps.nn.Hooks lists of a module's hooks
---@field before function[] called before forward
---@field after function[] called after forward
---@field back function[] called in backward

local function add(module, kind, fn, call)
  caller.callable(fn, "module:" .. call)
  local lists = rawget(module, "_hooks")
  if not lists then
    lists = { before = {}, after = {}, back = {} }
    rawset(module, "_hooks", lists)
  end
  return tensor_hooks.add(lists[kind], fn)
end

--- Calls fn(module, args) before each forward of the module. `args` is the list of arguments, with their number in `n`.
--- fn returns nil or new arguments. New arguments are a list or a single tensor. Each new argument must have the kind
--- of the argument that it replaces: a tensor replaces a tensor, and a table replaces a table.
---@param self ps.nn.Module
---@param fn fun(module: ps.nn.Module, args: any[]): any
---@return ps.HookHandle handle handle:remove() removes the hook
function hooks.register_forward_pre_hook(self, fn) return add(self, "before", fn, "register_forward_pre_hook") end

--- Calls fn(module, args, output) after each forward of the module. `output` is the value that forward returned, or a
--- list if forward returned several values. fn returns nil or a new output. The new output must have the kind of the
--- old output: a tensor replaces a tensor, and a list of the same length replaces a list.
---@param self ps.nn.Module
---@param fn fun(module: ps.nn.Module, args: any[], output: any): any
---@return ps.HookHandle handle handle:remove() removes the hook
function hooks.register_forward_hook(self, fn) return add(self, "after", fn, "register_forward_hook") end

--- Calls fn(module, grad_input, grad_output) in backward when the gradients of the module's inputs are complete.
--- grad_input is a list with the gradients of the tensors among the arguments, in order. grad_output is a list with the
--- gradients of the tensors among the outputs, in order. Both lists have their length in `n`. A gradient in a list may
--- be nil. If an output is a table, its tensors are in alphabetical order of their fields. fn returns nil, or a list
--- that replaces grad_input. If the returned list has its length in `n`, a nil in the list drops a gradient. Gradients
--- are scaled as in tensor hooks (t:register_hook).
---@param self ps.nn.Module
---@param fn fun(module: ps.nn.Module, grad_input: table<integer, ps.Tensor>, grad_output: table<integer, ps.Tensor>):
--- table?
---@return ps.HookHandle handle handle:remove() removes the hook
function hooks.register_full_backward_hook(self, fn) return add(self, "back", fn, "register_full_backward_hook") end

--- Returns whether a module currently has hooks.
---@param module ps.nn.Module
---@return boolean
function hooks.has(module)
  local lists = rawget(module, "_hooks")
  return lists and (lists.before[1] or lists.after[1] or lists.back[1]) ~= nil or false
end

--- Moves the hooks of a module to another module that replaces it.
---@param from ps.nn.Module
---@param to ps.nn.Module
function hooks.move(from, to) rawset(to, "_hooks", rawget(from, "_hooks")) end

-- -- backward ---------------------------------------------------------------------------------------------------------
-- Runs the backward hooks of one call of a module. `call` is { module, list, n_in, grad_output }.
local function run_back(call, grad_input)
  local whose = "a backward hook of " .. call.module.class_name
  for _, fn in ipairs { unpack(call.list) } do
    local given = { n = grad_input.n, unpack(grad_input, 1, grad_input.n) }
    local result = fn(call.module, given, call.grad_output)
    if is_tensor(result) then result = { result } end
    if result ~= nil and type(result) ~= "table" then
      error(("%s returned a %s; it must return nil, or a list of gradients like grad_input"):format(whose,
        type(result)), 0)
    end
    if result and result.n and result.n ~= grad_input.n then
      error(("%s returned a list of %s gradients, and grad_input has %d"):format(whose, tostring(result.n),
        grad_input.n), 0)
    end
    for i = 1, result and not result.n and grad_input.n or 0 do
      if grad_input[i] ~= nil and result[i] == nil then
        error(("%s returned no gradient %d, and grad_input has one; return all of them, or set n of the list to %d to "
          .. "drop this gradient"):format(whose, i, grad_input.n), 0)
      end
    end
    for i, g in pairs(result or {}) do
      if i ~= "n" then
        local old = grad_input[i]
        if old == nil then
          error(("%s returned gradient %s, but grad_input has none there"):format(whose, tostring(i)), 0)
        end
        tensor_hooks.check_like(g, old, whose)
      end
    end
    if result ~= nil then
      for i = 1, grad_input.n do grad_input[i] = result[i] end
    end
  end
  return grad_input
end

local function views(...) return ... end

local Inputs = Function "the inputs of a module with a backward hook"
function Inputs.forward(ctx, call, ...)
  ctx:set_materialize_grads(false)
  ctx.call = call
  return views(...)
end
function Inputs.backward(ctx, ...)
  local grads = run_back(ctx.call, pack(...))
  return nil, unpack(grads, 1, grads.n)
end

local Outputs = Function "the outputs of a module with a backward hook"
function Outputs.forward(ctx, call, ...)
  ctx:set_materialize_grads(false)
  ctx.call = call
  return views(...)
end
function Outputs.backward(ctx, ...)
  local call = ctx.call
  call.grad_output = pack(...)
  if not call.wants then run_back(call, { n = call.n_in }) end      -- no input needs a gradient, so the hook runs now
  return nil, ...
end

-- Finds the tensors in a list of values and in the tables of this list. Returns their places as a list of {list, key}.
local function places_of(values)
  local places = {}
  for i = 1, values.n do
    local value = values[i]
    if is_tensor(value) then
      places[#places + 1] = { values, i }
    elseif type(value) == "table" and not getmetatable(value) then
      local copy, names = {}, {}
      for k, v in pairs(value) do
        copy[k] = v
        if is_tensor(v) then names[#names + 1] = k end
      end
      table.sort(names, function(a, b) return tostring(a) < tostring(b) end)
      values[i] = copy
      for _, k in ipairs(names) do places[#places + 1] = { copy, k } end
    end
  end
  return places
end

-- Passes the tensors at the given places (places_of) through a function.
local function wrap(fn, call, places)
  if #places == 0 then return end
  local list = {}
  for i, place in ipairs(places) do list[i] = place[1][place[2]] end
  list = { fn(call, unpack(list)) }
  for i, place in ipairs(places) do place[1][place[2]] = list[i] end
end

local function begin_back(module, list, args)
  local places = {}
  for i = 1, args.n do if is_tensor(args[i]) then places[#places + 1] = { args, i } end end
  local call = { module = module, list = list, n_in = #places, grad_output = { n = 0 }, wants = false }
  for _, place in ipairs(places) do
    local t = place[1][place[2]]
    call.wants = call.wants or t:needs_grad() and t:is_float()
  end
  if call.wants then wrap(Inputs, call, places) end
  return call
end

-- -- results of forward hooks -----------------------------------------------------------------------------------------
local function kind_of(value) return is_tensor(value) and "tensor" or type(value) end

-- Raises an error if the value that a hook returned differs in kind from the value that it replaces. Any kind may
-- replace nil.
local function check_kind(value, old, whose, place)
  if old == nil or kind_of(value) == kind_of(old) then return end
  error(("%s returned a %s for %s, which was a %s; a hook returns nil, or values of the same kinds"):format(whose,
    kind_of(value), place, kind_of(old)), 0)
end

-- Returns a copy of a list. The copy has its length in `n`. The list itself may have no `n`.
local function listed(result) return { n = result.n or #result, unpack(result, 1, result.n or #result) } end

-- Returns the arguments for a module's forward after a pre-hook returned `result`.
local function new_args(module, args, result)
  local whose = "a forward pre-hook of " .. module.class_name
  if is_tensor(result) then result = { result } end
  if type(result) ~= "table" or getmetatable(result) then
    error(("%s returned a %s; it must return nil, a tensor, or a list of arguments"):format(whose, type(result)), 0)
  end
  for key in pairs(result) do
    if type(key) ~= "number" and key ~= "n" then
      error(("%s returned a table with the field %s, not a list of arguments; to pass a table as an argument, "
        .. "return { that_table }"):format(whose, tostring(key)), 0)
    end
  end
  local new = listed(result)
  for i = 1, math.min(new.n, args.n) do
    if new[i] ~= nil then check_kind(new[i], args[i], whose, "argument " .. i) end
  end
  return new
end

-- Returns the output of a module's forward after a hook returned `result`.
local function new_output(module, out, result)
  local whose = "a forward hook of " .. module.class_name
  if out.n <= 1 then
    check_kind(result, out[1], whose, "the output")
    if kind_of(out[1]) == "table" then
      for key, value in pairs(result) do check_kind(value, out[1][key], whose, "field " .. tostring(key)) end
    end
    return { n = 1, result }
  end
  caller.typed(result, "table", ("%s, which returns %d values: its result"):format(whose, out.n))
  local new = listed(result)
  for i = 1, out.n do check_kind(new[i], out[i], whose, "output " .. i) end
  if new.n > out.n then
    error(("%s returned a list of %d values; the module returned %d"):format(whose, new.n, out.n), 0)
  end
  new.n = out.n
  return new
end

-- -- calls ------------------------------------------------------------------------------------------------------------
--- Calls a module that has hooks. `body` runs the module's forward.
---@param module ps.nn.Module
---@param body fun(module: ps.nn.Module, ...): any
---@param ... any
---@return any ...
function hooks.run(module, body, ...)
  local lists, args = rawget(module, "_hooks"), pack(...)
  for _, fn in ipairs { unpack(lists.before) } do
    local result = fn(module, args)
    if result ~= nil then args = new_args(module, args, result) end
  end
  local call = lists.back[1] and scope.grad_enabled() and begin_back(module, lists.back, args)
  local out = pack(body(module, unpack(args, 1, args.n)))
  for _, fn in ipairs { unpack(lists.after) } do
    local output = out
    if out.n <= 1 then output = out[1] end
    local result = fn(module, args, output)
    if result ~= nil then out = new_output(module, out, result) end
  end
  if call then wrap(Outputs, call, places_of(out)) end
  return unpack(out, 1, out.n)
end

return hooks
