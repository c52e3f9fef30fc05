-- SPDX-License-Identifier: BSD-3-Clause
-- Converts gradients for scripts. A script gets the gradients of the micro-batch's loss, in hooks and in the backward
-- of its own functions. In an engine's walk, however, all gradients have a factor: the weight of the micro-batch times
-- the loss scale (engine/step/weigh.lua). The walk divides gradients by this factor before it runs the script's
-- function, and multiplies the function's results by the factor afterwards. Both operations are exact only if the
-- factor is a power of two. fp16 gradients are passed in fp32, because without the loss scale small gradients would be
-- zero in fp16.
local scope = require "ps.core.scope"

local unscaled = {}

--- Returns the gradient of the micro-batch's own loss.
---@param grad ps.Tensor
---@param factor? number factor of the walk's gradients; nil if the walk belongs to no engine
---@return ps.Tensor
function unscaled.of(grad, factor)
  if not factor then return grad end
  if grad:dtype() == "fp16" then grad = grad:to "fp32" end
  if factor == 1 or factor == 0 then return grad end        -- if the weight is 0, all gradients are 0
  return grad * (1 / factor)
end

--- Multiplies a gradient that the script returned by the factor of the walk.
---@param grad ps.Tensor
---@param factor? number
---@return ps.Tensor
function unscaled.back(grad, factor)
  if not factor or factor == 1 then return grad end
  return grad * factor
end

--- Runs a function of the script in backward. Gradients are not recorded.
---@param fn function
---@param ... any
---@return any ... results of fn
function unscaled.run(fn, ...) return scope.no_grad(fn, ...) end

return unscaled
