-- SPDX-License-Identifier: BSD-3-Clause
-- ps.autograd.grad: computes the gradients of chosen tensors.
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local native = require "ps.core.ffi"
local is_tensor, error = scope.is_tensor, caller.error

local grads = {}

-- Returns a list of tensors. `value` is one tensor or a list of tensors.
local function list_of(value, call, what)
  if is_tensor(value) then return { value } end
  caller.typed(value, "table", ("%s: the %s"):format(call, what))
  if #value == 0 then error(("%s: the list of %s is empty"):format(call, what)) end
  for i = 1, #value do caller.tensor(value[i], call, ("%s %d"):format(what, i)) end
  return value
end

-- Returns the gradients that the script passed for the outputs, by the index of the output.
local function seeds_of(value, outputs, call)
  if value == nil then return {} end
  local list = is_tensor(value) and { value } or caller.typed(value, "table", call .. ": grad_outputs")
  for i, g in pairs(list) do
    if type(i) ~= "number" or i < 1 or i > #outputs then
      error(("%s: grad_outputs has a gradient %s; there are %d outputs"):format(call, tostring(i), #outputs))
    end
    caller.tensor(g, call, ("grad_outputs %d"):format(i))
  end
  return list
end

local KINDS = { grad_outputs = "any", retain_graph = "boolean", create_graph = "boolean", allow_unused = "boolean" }

--- Returns the gradients of the outputs with respect to the inputs, as several results. The stored gradients of the
--- parameters do not change. As in backward, the graph is freed unless retain_graph = true.
---@param outputs ps.Tensor|ps.Tensor[] the outputs; an output must have one element unless grad_outputs contains its
--- gradient
---@param inputs ps.Tensor|ps.Tensor[] leaves, or tensors from which the outputs were computed
---@param options? {grad_outputs?: ps.Tensor|table<integer, ps.Tensor>, retain_graph?: boolean, allow_unused?: boolean}
--- allow_unused: if no output depends on an input, the input's gradient is nil instead of an error
---@return ps.Tensor ... a gradient for each input
function grads.grad(outputs, inputs, options)
  local call = "ps.autograd.grad"
  native.check_running(call)
  options = scope.backward_options(options, call, KINDS)
  outputs, inputs = list_of(outputs, call, "outputs"), list_of(inputs, call, "inputs")
  local found = scope.walk_for(outputs, seeds_of(options.grad_outputs, outputs, call), options.retain_graph or false,
    inputs)
  for i = 1, #inputs do
    if found[i] == nil and not options.allow_unused then
      error(("%s: no output depends on input %d; with allow_unused = true its gradient is nil"):format(call, i))
    end
  end
  return unpack(found, 1, #inputs)
end

return grads
