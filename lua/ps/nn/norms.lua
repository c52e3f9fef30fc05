-- SPDX-License-Identifier: BSD-3-Clause
-- Computes norms of gradients, clips gradients, and releases gradients after they have been read.
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local devices = require "ps.core.devices"
local handle = require "ps.nn.handle"
local hooks = require "ps.core.hooks"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local error = caller.error

local norms = {}

--- Releases gradients at once after they have been read. zero_grad then frees their memory without waiting for the next
--- collection.
---@param grads ps.Tensor[] the gradients, which must not be used afterwards
function norms.give_back(grads)
  for _, grad in ipairs(grads) do native.give_back(grad) end
end

-- Divides a list into slices that one op can process, calls fn for each slice, and returns all results.
local function by_most(list, fn)
  local out = {}
  for first = 1, #list, 64 do
    local some = {}
    for i = first, math.min(first + 63, #list) do some[#some + 1] = list[i] end
    out[#out + 1] = fn(some)
  end
  return out
end

--- Returns the sum of squares of each tensor. The host waits for the device once per 4096 tensors. The dry run of a
--- script has no values, so in a dry run all sums are 0.
---@param grads ps.Tensor[]
---@return number[]
function norms.squares(grads)
  local squares = {}
  local sums = by_most(grads, native.ops.sq_norms)
  for _, all in ipairs(by_most(sums, function(list) return list[2] and native.ops.concat(list, 0) or list[1] end)) do
    if not devices.computes then break end
    for _, square in ipairs(all:tolist()) do squares[#squares + 1] = square end
  end
  for i = #squares + 1, #grads do squares[i] = 0 end
  return squares
end

--- Returns the norm of all gradients together: the square root of the sum of all squares. The squares are summed for
--- each tensor first. These sums are added in list order. The result is therefore the same, bit for bit, however
--- tensors are stored. The norm is NaN or infinite if a gradient contains NaN or infinity. The host waits for the
--- device once per 4096 gradients. In the dry run of a script the norm is 0, so that a step neither clips nor
--- overflows.
---@param grads ps.Tensor[]
---@return number
function norms.global_norm(grads)
  caller.typed(grads, "table", "optim.global_norm: the list of gradients")
  if nn_module.is_module(grads) or handle.of(grads) then
    error("optim.global_norm takes a list of gradients, not a model; nn.clip_grad_norm(model, math.huge) returns the "
      .. "norm of a model's gradients without clipping")
  end
  for i, grad in ipairs(grads) do
    if not scope.is_tensor(grad) then error(("optim.global_norm: item %d is a %s, not a "
      .. "tensor"):format(i, type(grad))) end
  end
  local total = 0
  for _, square in ipairs(norms.squares(grads)) do total = total + square end
  return math.sqrt(total)
end

--- Scales the gradients of `params` so that their joint norm is at most max_norm. Returns the norm before scaling. If
--- max_norm is math.huge, the gradients are only measured. If the norm is NaN, all these gradients become NaN. If the
--- norm is infinite, infinite elements become NaN and all other elements become 0, as in PyTorch. An optimizer's option
--- `max_norm` also clips and needs no second pass over the gradients, but it raises an error if the norm is not finite.
---
--- For a model of ps.initialize, the norm is the norm of the step's gradient. This gradient is the mean over all
--- micro-batches and ranks, without the loss scale. The next update multiplies the gradients of `params` by the
--- clipping factor. `params` may be some of the model's parameters. All ranks must call the function, between the last
--- backward and optimizer:step(). If backward itself updates the parameters (overlap_optimizer, the default on the
--- CPU), the call is an error. Use gradient_clipping in that case.
---@param params ps.Tensor[]|ps.Tensor|ps.nn.Module|ps.Engine
---@param max_norm number
---@return number norm
function norms.clip_grad_norm(params, max_norm)
  if nn_module.is_module(params) or handle.of(params) then params = params:parameters() end
  if scope.is_tensor(params) then params = { params } end
  if type(params) ~= "table" then
    error(("nn.clip_grad_norm takes a module or a list of parameters, not a %s"):format(type(params)))
  end
  caller.list(params, "nn.clip_grad_norm: the list of parameters")
  for i, p in ipairs(params) do
    if not scope.is_tensor(p) then
      error(("nn.clip_grad_norm: item %d of the parameters is a %s, not a tensor"):format(i, type(p)))
    end
  end
  caller.typed(max_norm, "number", "nn.clip_grad_norm: max_norm")
  if max_norm ~= max_norm then error "nn.clip_grad_norm: max_norm is NaN" end
  local norm = hooks.ask("clip", params, max_norm)
  if norm then return norm end
  local grads = {}
  for _, p in ipairs(params) do grads[#grads + 1] = p:grad() end
  norm = norms.global_norm(grads)
  local factor = max_norm / (norm + 1e-6)
  if (factor < 1 or factor ~= factor) and max_norm < math.huge then
    scope.no_grad(function() for _, g in ipairs(grads) do g:mul_(factor) end end)
  end
  norms.give_back(grads)
  return norm
end

--- Limits each element of the gradients of `params` to [-clip_value, clip_value]. The call is an error for a model of
--- ps.initialize, because the gradients of such a model are scaled and may be shards.
---@param params ps.Tensor[]|ps.Tensor|ps.nn.Module
---@param clip_value number
function norms.clip_grad_value(params, clip_value)
  local call = "nn.clip_grad_value"
  caller.typed(clip_value, "number", call .. ": clip_value")
  if clip_value ~= clip_value then error(call .. ": clip_value is NaN") end
  if nn_module.is_module(params) or handle.of(params) then params = params:parameters() end
  if scope.is_tensor(params) then params = { params } end
  for i, p in ipairs(caller.list(params, call .. ": the list of parameters")) do
    if not scope.is_tensor(p) then
      error(("%s: item %d of the parameters is a %s, not a tensor"):format(call, i, type(p)))
    end
    if p.managed ~= nil then
      error(call .. " cannot change the gradients of a model of ps.initialize; register a hook on the parameters "
        .. "(p:register_hook(function(g) return g:clamp(-1, 1) end)), or use nn.clip_grad_norm")
    end
  end
  scope.no_grad(function()
    for _, p in ipairs(params) do
      local g = p:grad()
      if g then g:clamp_(-clip_value, clip_value) end
    end
  end)
end

return norms
