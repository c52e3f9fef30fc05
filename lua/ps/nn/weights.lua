-- SPDX-License-Identifier: BSD-3-Clause
-- nn.init: fills tensors in place, with PyTorch's formulas. Weights are [out, in] unless stated otherwise.
local scope = require "ps.core.scope"
local caller = require "ps.core.caller"
local error = caller.error

local init = {}

local function fill(tensor, method, ...)
  local a, b = ...
  if not scope.is_tensor(tensor) then error("nn.init takes a tensor, not " .. tostring(tensor)) end
  scope.no_grad(function() tensor[method](tensor, a, b) end)
  return tensor
end

local function number(value, default, what)
  if value == nil then return default end
  return caller.typed(value, "number", "nn.init." .. what)
end

local function fans(tensor)
  if not scope.is_tensor(tensor) then error("nn.init takes a tensor, not " .. tostring(tensor)) end
  local shape = tensor:shape()
  if #shape < 2 then error("nn.init: fan in and fan out need a tensor of at least two dimensions") end
  local field = 1
  for i = 3, #shape do field = field * shape[i] end
  return shape[2] * field, shape[1] * field
end

--- Fills a tensor with normally distributed numbers.
---@param tensor ps.Tensor
---@param mean? number (default 0)
---@param std? number (default 1)
---@return ps.Tensor tensor
function init.normal_(tensor, mean, std) return fill(tensor, "normal_", mean or 0, std or 1) end

--- Fills a tensor with uniform numbers in [low, high).
---@param tensor ps.Tensor
---@param low? number (default 0)
---@param high? number (default 1)
---@return ps.Tensor tensor
function init.uniform_(tensor, low, high) return fill(tensor, "uniform_", low or 0, high or 1) end

--- Sets all elements to one number.
---@param tensor ps.Tensor
---@param value number
---@return ps.Tensor tensor
function init.constant_(tensor, value) return fill(tensor, "fill_", value) end
--- Sets all elements to 0.
---@param tensor ps.Tensor
---@return ps.Tensor tensor
function init.zeros_(tensor) return fill(tensor, "fill_", 0) end
--- Sets all elements to 1.
---@param tensor ps.Tensor
---@return ps.Tensor tensor
function init.ones_(tensor) return fill(tensor, "fill_", 1) end

--- Fills a tensor with uniform numbers in +-sqrt(6 / ((1 + a^2) fan_in)), the initialization of He et al. 2015 for
--- leaky ReLUs of slope a.
---@param tensor ps.Tensor [out, in, ...]
---@param a? number (default 0)
---@return ps.Tensor tensor
function init.kaiming_uniform_(tensor, a)
  local bound = math.sqrt(6 / ((1 + number(a, 0, "kaiming_uniform_: a") ^ 2) * fans(tensor)))
  return init.uniform_(tensor, -bound, bound)
end

--- Fills a tensor with normally distributed numbers of variance 2 / ((1 + a^2) fan_in) (He et al. 2015).
---@param tensor ps.Tensor [out, in, ...]
---@param a? number (default 0)
---@return ps.Tensor tensor
function init.kaiming_normal_(tensor, a)
  return init.normal_(tensor, 0, math.sqrt(2 / ((1 + number(a, 0, "kaiming_normal_: a") ^ 2) * fans(tensor))))
end

--- Fills a tensor with uniform numbers in +-gain sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio 2010).
---@param tensor ps.Tensor [out, in, ...]
---@param gain? number (default 1)
---@return ps.Tensor tensor
function init.xavier_uniform_(tensor, gain)
  local fan_in, fan_out = fans(tensor)
  local bound = number(gain, 1, "xavier_uniform_: gain") * math.sqrt(6 / (fan_in + fan_out))
  return init.uniform_(tensor, -bound, bound)
end

--- Fills a tensor with normally distributed numbers of variance gain^2 2 / (fan_in + fan_out) (Glorot and Bengio 2010).
---@param tensor ps.Tensor [out, in, ...]
---@param gain? number (default 1)
---@return ps.Tensor tensor
function init.xavier_normal_(tensor, gain)
  local fan_in, fan_out = fans(tensor)
  return init.normal_(tensor, 0, number(gain, 1, "xavier_normal_: gain") * math.sqrt(2 / (fan_in + fan_out)))
end

return init
