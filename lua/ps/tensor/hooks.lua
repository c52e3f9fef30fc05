-- SPDX-License-Identifier: BSD-3-Clause
-- t:register_hook: functions that get a tensor's gradient and may replace it. A backward walk stops when the gradient
-- is complete (src/grad/hook.c).
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local unscaled = require "ps.tensor.unscaled"
local ffi, C, ctx, check, own, caller = native.ffi, native.C, native.ctx, native.check, native.own, native.caller

local hooks = {}

local id_out, place_out = ffi.new("int64_t[1]"), ffi.new("int[1]")
local tensor_out = ffi.new("ps_tensor *[1]")

---@class ps.HookHandle
---@field private list function[] the list that contains this hook
---@field private fn function
local Handle = {}
Handle.__index = Handle

--- Removes the hook. A second call does nothing.
function Handle:remove()
  for i = #self.list, 1, -1 do
    if self.list[i] == self.fn then table.remove(self.list, i) end
  end
end

--- Adds a function to a list of hooks. Returns a handle that removes the function from the list.
---@param list function[]
---@param fn function
---@return ps.HookHandle
function hooks.add(list, fn)
  local own_fn = function(...) return fn(...) end           -- a new function, because the list may contain fn twice
  list[#list + 1] = own_fn
  return setmetatable({ list = list, fn = own_fn }, Handle)
end

local function text(t) return ("%s, shape [%s], on %s"):format(t:dtype(), table.concat(t:shape(), ", "), t:device()) end

--- Raises an error if a value cannot replace a gradient.
---@param value any
---@param grad ps.Tensor
---@param whose string names the hook in the error
local function check_like(value, grad, whose)
  if not scope.is_tensor(value) then
    error(("%s returned a %s; it must return nil, or a tensor like the gradient (%s)"):format(whose, type(value),
      text(grad)), 0)
  end
  if text(value) ~= text(grad) then
    error(("%s returned a tensor of %s; the gradient is of %s"):format(whose, text(value), text(grad)), 0)
  end
end
hooks.check_like = check_like

--- Calls fn(...). Raises an error if fn changes a gradient in place, because other tensors may share the gradient.
---@param grads table<any, ps.Tensor>
---@param whose string
---@param fn function
---@param ... any
---@return any ... results of fn
function hooks.without_writing(grads, whose, fn, ...)
  local versions = {}
  for k, g in pairs(grads) do versions[k] = C.ps_tensor_version(g) end
  local function checked(...)
    for k, version in pairs(versions) do
      if C.ps_tensor_version(grads[k]) ~= version then
        error(whose .. " changed its gradient in place; return a new tensor instead", 0)
      end
    end
    return ...
  end
  return checked(unscaled.run(fn, ...))
end

-- Runs the hooks of one output of the node at which the backward walk has stopped.
local function run_list(list, place, factor)
  check(C.ps_stop_gradient(ctx, place, tensor_out))
  if tensor_out[0] == nil then return end
  C.ps_tensor_retain(tensor_out[0])
  local grad = own(tensor_out[0])
  local given, changed = unscaled.of(grad, factor), false
  local whose = ("a hook of a tensor of shape [%s]"):format(table.concat(grad:shape(), ", "))
  for _, fn in ipairs { unpack(list) } do
    local result = hooks.without_writing({ given }, whose, fn, given)
    if result ~= nil then
      check_like(result, given, whose)
      given, changed = result, true
    end
  end
  if not changed then return end
  given = unscaled.back(given, factor):to(grad:dtype())
  check(C.ps_hook_replace(ctx, place, given))
end

local function run_all(entry, factor)
  local places = {}
  for place in pairs(entry.lists) do places[#places + 1] = place end
  table.sort(places)
  for _, place in ipairs(places) do run_list(entry.lists[place], place, factor) end
end

local function resume(entry, _, factor)
  scope.scope(run_all, entry, factor)
  check(C.ps_hooks_done(ctx))
end

--- In each backward, calls fn(gradient) when the tensor's gradient is complete. fn returns nil, or a tensor that
--- replaces the gradient. The tensor must have the gradient's shape, type and device. The hooks of a tensor run in the
--- order in which they were registered. In a model of ps.initialize, fn gets the gradient of the micro-batch's own
--- loss, before gradients are summed over ranks. The first run of a recomputed function has no gradients and registers
--- no hooks.
---@param t ps.Tensor that requires a gradient
---@param fn fun(gradient: ps.Tensor): ps.Tensor?
---@return ps.HookHandle handle handle:remove() removes the hook
function hooks.register(t, fn)
  caller.callable(fn, "t:register_hook")
  local segment = scope.segment
  if segment and not segment.again and not scope.grad_enabled() then return hooks.add({}, fn) end
  local rc = C.ps_tensor_hook(t, id_out, place_out)
  check(rc)
  local id, place = tonumber(id_out[0]), place_out[0]
  local entry = scope.waiting[id]
  if not entry then
    entry = { resume = resume, lists = {}, leaf = t.node == nil and ffi.cast("ps_tensor *", t) or nil }
    scope.waiting[id] = entry
  end
  entry.lists[place] = entry.lists[place] or {}
  return hooks.add(entry.lists[place], fn)
end

--- Moves the hooks of a leaf to the tensor that replaces it.
---@param from ps.Tensor
---@param to ps.Tensor
function hooks.move(from, to)
  if from.hook == nil then return end
  check(C.ps_tensor_hook(from, id_out, place_out))
  local entry = scope.waiting[tonumber(id_out[0])]
  if not entry then return end
  check(C.ps_tensor_hook(to, id_out, place_out))
  scope.waiting[tonumber(id_out[0])] = { resume = resume, lists = entry.lists, leaf = ffi.cast("ps_tensor *", to) }
end

return hooks
