-- SPDX-License-Identifier: BSD-3-Clause
-- Converts gradients for scripts, in hooks and in the backward of their own functions: a script gets the gradients of
-- the micro-batch's loss. In an engine's walk, all gradients have a factor: the micro-batch's weight times the loss
-- scale (engine/step/weigh.lua). The walk divides by it before the script's function runs, and multiplies by it
-- afterwards; both are exact only if it is a power of two. fp16 gradients are passed in fp32, since small ones without
-- the loss scale would be zero in fp16.
local scope = require "ps.core.scope"

local unscaled = {}

--- Returns the gradient of the micro-batch's own loss.
---@param grad ps.Tensor
---@param factor? number the factor, or nil if the walk does not belong to an engine
---@return ps.Tensor
function unscaled.of(grad, factor)
  if not factor then return grad end
  if grad:dtype() == "fp16" then grad = grad:to "fp32" end
  if factor == 1 or factor == 0 then return grad end        -- if the weight is 0, all gradients are 0
  return grad * (1 / factor)
end

--- Converts a gradient that the script returned to the scale of the walk.
---@param grad ps.Tensor
---@param factor? number
---@return ps.Tensor
function unscaled.back(grad, factor)
  if not factor or factor == 1 then return grad end
  return grad * factor
end

--- Runs a function of the script in backward, without recording gradients.
---@param fn function
---@param ... any
---@return any ... results of fn
function unscaled.run(fn, ...) return scope.no_grad(fn, ...) end

return unscaled
