-- SPDX-License-Identifier: BSD-3-Clause
-- ps.nn: modules and initialisations. One file per family; this one only gathers them.
local caller = require "ps.caller"
local core = require "ps.nn.module"

---@class ps.nn
local nn = {
  Module = core.Module, class = core.class, Parameter = core.Parameter, is_module = core.is_module,
  init = require "ps.nn.weights", fold = require("ps.nn.parts").fold,
}
for _, family in ipairs { "linear", "embedding", "norm", "activation", "container", "transformer",
                        "parallel" } do
  for name, class in pairs(require("ps.nn." .. family)) do nn[name] = class end
end

--- Scales the gradients of `params` so that their joint norm is at most max_norm; returns the norm before. The option
--- `max_norm` of an optimizer does the same without a second pass over the gradients.
---@param params ps.Tensor[]|ps.nn.Module
---@param max_norm number
---@return number norm
function nn.clip_grad_norm(params, max_norm)
  local optim = require "ps.optim"
  local ps = require "ps"
  local error = caller.error
  if core.is_module(params) then params = params:parameters() end
  if type(params) ~= "table" then
    error(("nn.clip_grad_norm takes a module or a list of parameters, not a %s"):format(type(params)))
  end
  for i, p in ipairs(params) do
    if not ps.is_tensor(p) then
      error(("nn.clip_grad_norm: number %d of the parameters is a %s"):format(i, type(p)))
    end
  end
  caller.typed(max_norm, "number", "nn.clip_grad_norm: max_norm")
  local grads = {}
  for _, p in ipairs(params) do grads[#grads + 1] = p:grad() end
  local norm = optim.global_norm(grads)
  local factor = max_norm / (norm + 1e-6)
  if factor < 1 then
    ps.no_grad(function() for _, g in ipairs(grads) do g:mul_(factor) end end)
  end
  optim.give_back(grads)
  return norm
end

return nn
