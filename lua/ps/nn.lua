-- SPDX-License-Identifier: BSD-3-Clause
-- ps.nn: modules and initialisations. One file per family; this one only gathers them.
local caller = require "ps.core.caller"
local core = require "ps.nn.module"
local norms = require "ps.nn.norms"
local handle = require "ps.nn.handle"
local hooks = require "ps.core.hooks"
local scope = require "ps.core.scope"
local foreign = require "ps.core.foreign"

---@class ps.nn
local nn = {
  Module = core.Module, class = core.class, Parameter = core.Parameter, is_module = core.is_module,
  init = require "ps.nn.weights", fold = require("ps.nn.parts").fold,
}
for _, family in ipairs { "nn.linear", "nn.embedding", "nn.norm", "nn.activation", "nn.container", "nn.transformer",
                        "parallel.tensor.layers" } do
  for name, class in pairs(require("ps." .. family)) do nn[name] = class end
end

--- Scales the gradients of `params` so that their joint norm is at most max_norm; returns the norm before. math.huge
--- only measures. The option `max_norm` of an optimizer does the same without a second pass over the gradients.
---
--- Of a model that ps.initialize made, the norm is that of the step's mean gradient: over all micro-batches and ranks,
--- without the loss scale. The update that follows multiplies the gradients of `params`, which may be some of the
--- model's. It belongs between the last backward and optimizer:step(); all ranks call it. Where backward updates the
--- parameters itself (overlap_optimizer, the default on the CPU) it is an error: gradient_clipping clips there.
---@param params ps.Tensor[]|ps.nn.Module|ps.Engine
---@param max_norm number
---@return number norm
function nn.clip_grad_norm(params, max_norm)
  local error = caller.error
  if core.is_module(params) or handle.of(params) then params = params:parameters() end
  if type(params) ~= "table" then
    error(("nn.clip_grad_norm takes a module or a list of parameters, not a %s"):format(type(params)))
  end
  for i, p in ipairs(params) do
    if not scope.is_tensor(p) then
      error(("nn.clip_grad_norm: number %d of the parameters is a %s"):format(i, type(p)))
    end
  end
  caller.typed(max_norm, "number", "nn.clip_grad_norm: max_norm")
  local norm = hooks.ask("clip", params, max_norm)
  if norm then return norm end
  local grads = {}
  for _, p in ipairs(params) do grads[#grads + 1] = p:grad() end
  norm = norms.global_norm(grads)
  local factor = max_norm / (norm + 1e-6)
  if factor < 1 then
    scope.no_grad(function() for _, g in ipairs(grads) do g:mul_(factor) end end)
  end
  norms.give_back(grads)
  return norm
end

--- The same as nn.clip_grad_norm, under PyTorch's name.
nn.clip_grad_norm_ = nn.clip_grad_norm

return foreign.stand(nn, "nn")
