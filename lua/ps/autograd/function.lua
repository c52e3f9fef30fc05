-- SPDX-License-Identifier: BSD-3-Clause
-- ps.autograd.Function: functions for which a script defines both forward and backward.
--
--   local Exp = ps.autograd.Function "Exp"
--   function Exp.forward(ctx, x)
--     local y = x:exp()
--     ctx:save_for_backward(y)
--     return y
--   end
--   function Exp.backward(ctx, dy)
--     local y = ctx:saved_tensors()
--     return dy * y
--   end
--   local y = Exp.apply(x)                       -- or Exp(x)
--
-- Ops in forward are not recorded. A backward walk stops at the node of the call in C (src/grad/call.c), and this file
-- runs the call's backward. Saved tensors belong to the node, so their data is freed once the walk has passed the node.
local native = require "ps.core.ffi"
local array = require "ps.core.array"
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local create = require "ps.tensor.create"
local tensor_hooks = require "ps.tensor.hooks"
local unscaled = require "ps.tensor.unscaled"
local ffi, C, ctx, check, own = native.ffi, native.C, native.ctx, native.check, native.own
local is_tensor, error = scope.is_tensor, caller.error

local functions = {}

local id_out, tensor_out = ffi.new("int64_t[1]"), ffi.new("ps_tensor *[1]")
local pointer_array, int_array = array "ps_tensor *", array "int32_t"

local RANDOM = { "seed", "offset", "step", "sample", "op" }              -- fields of the state of random numbers

local function pack(...) return { n = select("#", ...), ... } end

-- -- the context ------------------------------------------------------------------------------------------------------
---@class ps.autograd.Context the values that forward passes to backward; any other field belongs to the script
---@field needs_input_grad boolean[] for each argument of forward, whether it needs a gradient
---@field private _saved any[]? the tensors that forward saved, with their number in `n`
---@field private _n_saved integer
---@field private _open boolean whether backward is running
---@field private _plain table<integer, true> the outputs without a gradient, by address
---@field private _materialize boolean
local Context = {}

--- Keeps tensors for backward. Must be called in forward, at most once. If a tensor is changed in place before
--- backward, backward raises an error.
---@param ... ps.Tensor|nil
function Context:save_for_backward(...)
  if not rawget(self, "_forward") then error "ctx:save_for_backward: call it in forward" end
  local list = pack(...)
  for i = 1, list.n do
    if list[i] ~= nil and not is_tensor(list[i]) then
      error(("ctx:save_for_backward takes tensors, but argument %d is a %s: store it in a field of ctx"):format(i,
        type(list[i])))
    end
  end
  rawset(self, "_saved", list)
end

--- Returns the tensors that forward saved. Must be called in backward.
---@return ps.Tensor ...
function Context:saved_tensors()
  if not rawget(self, "_open") then
    error "ctx:saved_tensors(): call it in backward; the saved tensors are freed afterwards"
  end
  local list = {}
  for i = 1, self._n_saved do
    check(C.ps_call_saved(ctx, i - 1, tensor_out))
    if tensor_out[0] ~= nil then
      C.ps_tensor_retain(tensor_out[0])
      list[i] = own(tensor_out[0])
    end
  end
  return unpack(list, 1, self._n_saved)
end

local function address(t) return tonumber(ffi.cast("uintptr_t", ffi.cast("ps_tensor *", t))) end

--- Marks outputs that have no gradient. Backward receives zeros for these outputs. Must be called in forward.
---@param ... ps.Tensor
function Context:mark_non_differentiable(...)
  if not rawget(self, "_forward") then error "ctx:mark_non_differentiable: call it in forward" end
  for i = 1, select("#", ...) do
    local t = select(i, ...)
    if not is_tensor(t) then
      error(("ctx:mark_non_differentiable takes outputs of forward; argument %d is a %s"):format(i, type(t)))
    end
    self._plain[address(t)] = true
  end
end

--- Sets the value that backward gets for an output without a gradient: zeros (true, the default) or nil (false).
---@param on boolean
function Context:set_materialize_grads(on)
  rawset(self, "_materialize", caller.typed(on, "boolean", "ctx:set_materialize_grads: its argument"))
end

--- Raises an error, because a forward must not change its inputs in place.
function Context.mark_dirty()
  error "ctx:mark_dirty: forward cannot change an input in place here; compute a new tensor"
end

local context_mt = {
  __index = Context,
  -- A tensor in a field outlives scopes. It lives as long as the field.
  __newindex = function(self, key, value)
    if Context[key] then error(("ctx.%s is a method; use another name"):format(tostring(key))) end
    if is_tensor(value) then value:keep() end
    rawset(self, key, value)
  end,
}

local function context(args, records)
  local needs = {}
  for i = 1, args.n do needs[i] = records and is_tensor(args[i]) and args[i]:needs_grad() and args[i]:is_float() end
  return setmetatable({ needs_input_grad = needs, _forward = true, _plain = {}, _n_saved = 0, _materialize = true },
    context_mt)
end

-- -- backward ---------------------------------------------------------------------------------------------------------
-- Returns the gradients of the outputs in the form that a script gets (unscaled.lua).
local function gradients_in(call, factor)
  local list = {}
  for i, out in ipairs(call.outs) do
    check(C.ps_stop_gradient(ctx, i - 1, tensor_out))
    if tensor_out[0] ~= nil then
      C.ps_tensor_retain(tensor_out[0])
      list[i] = unscaled.of(own(tensor_out[0]), factor)
    elseif out.shape and call.ctx._materialize then
      list[i] = create.zeros(out.shape, { dtype = out.dtype, device = out.device })
    end
  end
  return list
end

-- Checks the results of backward. Returns them in arrays for C.
local function gradients_out(call, given, factor)
  local n, name = call.n, call.class.name
  for i = n + 1, given.n do
    if given[i] ~= nil then
      error(("backward of %s returned %d gradients; its forward has %d inputs"):format(name, given.n, n), 0)
    end
  end
  if given.n < n then
    error(("backward of %s returned %d gradients; its forward has %d inputs: return nil where there is none"):format(
      name, given.n, n), 0)
  end
  local out, devices = pointer_array(n), int_array(n)
  for i = 1, n do
    local grad = given[i]
    if grad ~= nil and not is_tensor(grad) then
      error(("backward of %s returned a %s as gradient %d; return tensors or nil"):format(name, type(grad), i), 0)
    elseif grad ~= nil and not call.ins[i] then
      error(("backward of %s returned gradient %d, but input %d is not a tensor: return nil for it"):format(
        name, i, i), 0)
    elseif grad ~= nil and call.ctx.needs_input_grad[i] then
      given[i] = unscaled.back(grad, factor)
      out[i - 1] = given[i]
    end
    devices[i - 1] = call.ins[i] or 0
  end
  return out, devices
end

local function run_backward(call, id, factor)
  local class, context_ = call.class, call.ctx
  if type(class.backward) ~= "function" then error(("%s has no backward"):format(class.name), 0) end
  local grads = gradients_in(call, factor)
  rawset(context_, "_open", true)
  local given = pack(tensor_hooks.without_writing(grads, "backward of " .. class.name, class.backward, context_,
    unpack(grads, 1, #call.outs)))
  rawset(context_, "_open", false)
  local out, devices = gradients_out(call, given, factor)
  check(C.ps_call_done(ctx, call.n, out, devices))
  scope.passed(id)
end

-- Runs the backward of a call. The backward draws the same random numbers as the forward, in any order of backwards.
local function resume(call, id, factor)
  local rng, was = C.ps_rng_get(ctx), {}
  for _, key in ipairs(RANDOM) do was[key], rng[key] = rng[key], call.rng[key] end
  local number = scope.begin()
  if call.module > 0 then C.ps_module_enter(call.module) end                   -- the end of the scope leaves the module
  local ok, problem = xpcall(run_backward, scope.trace, call, id, factor)
  rawset(call.ctx, "_open", false)
  C.ps_scope_end(ctx, number, 0, nil)
  for key, value in pairs(was) do rng[key] = value end
  if not ok then error(problem, 0) end
end

-- -- forward ----------------------------------------------------------------------------------------------------------
-- An output that is also an input, or that already has a history, is replaced by a new header.
local function fresh(results, args)
  local seen = {}
  for i = 1, args.n do if is_tensor(args[i]) then seen[address(args[i])] = true end end
  for i = 1, results.n do
    local t = results[i]
    if is_tensor(t) then
      if seen[address(t)] or t:needs_grad() then results[i] = t:detach() end
      seen[address(results[i])] = true
    end
  end
end

local function check_results(class, results)
  if results.n == 0 then error(("forward of %s returned nothing; it must return tensors"):format(class.name), 0) end
  for i = 1, results.n do
    if not is_tensor(results[i]) then
      error(("forward of %s returned a %s as result %d; it must return tensors"):format(class.name,
        type(results[i]), i), 0)
    end
  end
end

local function run_forward(class, context_, args)
  local results = pack(scope.no_grad(class.forward, context_, unpack(args, 1, args.n)))
  check_results(class, results)
  rawset(context_, "_forward", nil)
  return results
end

-- Creates the node of a call. The node connects the outputs to the inputs, so that a backward walk reaches the inputs.
local function record(class, context_, args, results, rng)
  local plain = {}
  for i = 1, results.n do plain[i] = context_._plain[address(results[i])] or not results[i]:is_float() end
  local saved_list = rawget(context_, "_saved") or { n = 0 }
  -- A saved output must be the same tensor that the caller gets.
  local before = pack(unpack(results, 1, results.n))
  fresh(results, args)
  local call = { resume = resume, class = class, ctx = context_, n = args.n, ins = {}, outs = {}, rng = rng,
    module = C.ps_module_now() }
  local c_in, c_out, c_saved = pointer_array(args.n), pointer_array(results.n), pointer_array(saved_list.n + 1)
  for i = 1, args.n do
    if is_tensor(args[i]) then
      c_in[i - 1], call.ins[i] = args[i], args[i].device_
    end
  end
  local any = false
  for i = 1, results.n do
    local t = results[i]
    call.outs[i] = { shape = t:shape(), dtype = t:dtype(), device = t:device() }
    if not plain[i] then c_out[i - 1], any = t, true end
  end
  for i = 1, saved_list.n do
    if saved_list[i] ~= nil then c_saved[i - 1] = saved_list[i] end
    for k = 1, before.n do
      if saved_list[i] ~= nil and rawequal(saved_list[i], before[k]) and not plain[k] then
        c_saved[i - 1] = results[k]
      end
    end
  end
  rawset(context_, "_saved", nil)
  context_._n_saved = saved_list.n
  if not any then return C.ps_segment_cancel(ctx) end
  local rc = C.ps_call_new(ctx, class.name, args.n, c_in, results.n, c_out, saved_list.n, c_saved, id_out)
  if rc < 0 then
    C.ps_segment_cancel(ctx)
    native.raise(rc)
  end
  call.reads_engine = rc == 1
  scope.waiting[tonumber(id_out[0])] = call
end

local function recorded(class, context_, args)
  local c = C.ps_rng_get(ctx)
  local rng = {}
  for _, key in ipairs(RANDOM) do rng[key] = c[key] end
  C.ps_segment_begin(ctx)
  local ok, results = xpcall(run_forward, scope.trace, class, context_, args)
  if not ok then
    C.ps_segment_cancel(ctx)
    error(results, 0)
  end
  record(class, context_, args, results, rng)
  return unpack(results, 1, results.n)
end

local function plain(class, context_, args)
  local results = run_forward(class, context_, args)
  return unpack(results, 1, results.n)
end

local function apply(class, ...)
  if rawequal((...), class) then
    error(("%s.apply is called with a dot: %s.apply(x), or %s(x)"):format(class.name, class.name, class.name))
  end
  if type(class.forward) ~= "function" then
    error(("%s has no forward: function %s.forward(ctx, ...)"):format(class.name, class.name))
  end
  local args, records = pack(...), false
  for i = 1, args.n do
    records = records or is_tensor(args[i]) and args[i]:needs_grad() and args[i]:is_float()
  end
  records = records and scope.grad_enabled()
  return scope.scope(records and recorded or plain, class, context(args, records), args)
end

local KINDS = { name = "string", forward = "function", backward = "function" }

---@class ps.autograd.Function
---@field name string
---@field forward fun(ctx: ps.autograd.Context, ...): ps.Tensor ...
---@field backward fun(ctx: ps.autograd.Context, ...): ps.Tensor|nil ... returns a gradient for each argument of forward
---@field apply fun(...): ps.Tensor ... runs forward, and records the call for backward

--- Defines a function by its forward and backward. `forward(ctx, ...)` and `backward(ctx, ...)` are fields of the
--- result and are called without self. `Name.apply(...)` and `Name(...)` call the function.
---@param name string|{name: string, forward: function, backward: function} the name for errors, or a table with the
--- name and both functions
---@return ps.autograd.Function
function functions.Function(name)
  local class = {}
  if type(name) == "table" then
    for key, value in pairs(caller.options(name, "ps.autograd.Function", KINDS)) do class[key] = value end
    name = class.name or "a function of ps.autograd"
  end
  class.name = caller.typed(name, "string", "ps.autograd.Function: the name")
  class.apply = function(...) return apply(class, ...) end
  return setmetatable(class, { __call = apply, __tostring = function() return class.name end })
end

functions.Context = Context

return functions
