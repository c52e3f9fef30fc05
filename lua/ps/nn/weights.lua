-- SPDX-License-Identifier: BSD-3-Clause
-- nn.init: fills tensors in place with PyTorch's formulas. Weights are [out, in] unless a comment says otherwise.
local create = require "ps.tensor.create"
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

--- Fills a tensor with numbers from a normal distribution.
---@param tensor ps.Tensor
---@param mean? number (default 0)
---@param std? number (default 1)
---@return ps.Tensor tensor
function init.normal_(tensor, mean, std) return fill(tensor, "normal_", mean or 0, std or 1) end

--- Fills a tensor with numbers from a uniform distribution over [low, high).
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

-- The gains of PyTorch's calculate_gain. The gain of leaky_relu depends on its slope.
local GAINS = { linear = 1, conv1d = 1, conv2d = 1, sigmoid = 1, tanh = 5 / 3, relu = math.sqrt(2), selu = 3 / 4,
  leaky_relu = true }

--- Returns the gain of a nonlinearity. The standard deviation of a layer's weights is multiplied by the gain if the
--- nonlinearity follows the layer.
---@param nonlinearity string "linear", "conv1d", "conv2d", "sigmoid", "tanh", "relu", "leaky_relu" or "selu"
---@param a? number the slope of leaky_relu (default 0.01)
---@return number
function init.calculate_gain(nonlinearity, a)
  caller.one_of(nonlinearity, GAINS, "nn.init.calculate_gain: the nonlinearity")
  local slope = number(a, 0.01, "calculate_gain: a")
  return nonlinearity == "leaky_relu" and math.sqrt(2 / (1 + slope ^ 2)) or GAINS[nonlinearity]
end

local KAIMING = { a = "number", mode = "string", nonlinearity = "string" }
local MODES = { fan_in = true, fan_out = true }

-- Returns the numerator and the denominator of the weights' variance (He et al. 2015).
local function kaiming(tensor, a, name)
  local options = type(a) == "table" and caller.options(a, "nn.init." .. name, KAIMING)
    or { a = number(a, 0, name .. ": a") }
  local mode = options.mode or "fan_in"
  caller.one_of(mode, MODES, "nn.init." .. name .. ": mode")
  local fan_in, fan_out = fans(tensor)
  local fan = mode == "fan_in" and fan_in or fan_out
  local of = options.nonlinearity or "leaky_relu"
  if of == "leaky_relu" then return 2, (1 + (options.a or 0) ^ 2) * fan end
  return init.calculate_gain(of) ^ 2, fan
end

--- Fills a tensor with numbers from a uniform distribution between -b and b, where b = gain * sqrt(3 / fan). This is
--- the initialization of He et al. 2015.
---@param tensor ps.Tensor [out, in, ...]
---@param a? number|{a?: number, mode?: "fan_in"|"fan_out", nonlinearity?: string} a: slope of a leaky ReLU (default 0);
--- mode (default "fan_in"); nonlinearity: as in calculate_gain (default "leaky_relu")
---@return ps.Tensor tensor
function init.kaiming_uniform_(tensor, a)
  local above, below = kaiming(tensor, a, "kaiming_uniform_")
  local bound = math.sqrt(3 * above / below)
  return init.uniform_(tensor, -bound, bound)
end

--- Fills a tensor with numbers from a normal distribution with the standard deviation gain / sqrt(fan) (He et al.
--- 2015).
---@param tensor ps.Tensor [out, in, ...]
---@param a? number|{a?: number, mode?: "fan_in"|"fan_out", nonlinearity?: string} as in kaiming_uniform_
---@return ps.Tensor tensor
function init.kaiming_normal_(tensor, a)
  local above, below = kaiming(tensor, a, "kaiming_normal_")
  return init.normal_(tensor, 0, math.sqrt(above / below))
end

--- Fills a tensor with numbers from a uniform distribution between -b and b, where b = gain * sqrt(6 / (fan_in +
--- fan_out)) (Glorot and Bengio 2010).
---@param tensor ps.Tensor [out, in, ...]
---@param gain? number (default 1)
---@return ps.Tensor tensor
function init.xavier_uniform_(tensor, gain)
  local fan_in, fan_out = fans(tensor)
  local bound = number(gain, 1, "xavier_uniform_: gain") * math.sqrt(6 / (fan_in + fan_out))
  return init.uniform_(tensor, -bound, bound)
end

--- Fills a tensor with numbers from a normal distribution with the variance gain^2 * 2 / (fan_in + fan_out) (Glorot and
--- Bengio 2010).
---@param tensor ps.Tensor [out, in, ...]
---@param gain? number (default 1)
---@return ps.Tensor tensor
function init.xavier_normal_(tensor, gain)
  local fan_in, fan_out = fans(tensor)
  return init.normal_(tensor, 0, number(gain, 1, "xavier_normal_: gain") * math.sqrt(2 / (fan_in + fan_out)))
end

--- Fills a matrix with orthogonal rows, multiplied by the gain (Saxe et al. 2013). If the matrix has more rows than
--- columns, its columns are orthogonal instead. Dimensions after the first are merged.
---@param tensor ps.Tensor [out, in, ...]
---@param gain? number (default 1)
---@return ps.Tensor tensor
function init.orthogonal_(tensor, gain)
  gain = number(gain, 1, "orthogonal_: gain")
  fans(tensor)
  scope.no_grad(function()
    local rows, columns = tensor:size(0), tensor:numel() / tensor:size(0)
    local n, width = math.min(rows, columns), math.max(rows, columns)
    local q = create.empty({ n, width }, { dtype = "fp64", device = tensor:device() }):normal_()
    -- Gram-Schmidt orthogonalization. The second pass removes the rounding errors of the first pass.
    for i = 0, n - 1 do
      local row, before = q:narrow(0, i, 1), q:narrow(0, 0, i)
      for _ = 1, i > 0 and 2 or 0 do row:copy_(row - row:matmul(before:t()):matmul(before)) end
      row:copy_(row / row:square():sum():sqrt())
    end
    if rows > columns then q = q:t() end
    tensor:copy_((q * gain):reshape(tensor:shape()))
  end)
  return tensor
end

--- Fills a matrix with the identity: 1 on the diagonal and 0 elsewhere.
---@param tensor ps.Tensor [out, in]
---@return ps.Tensor tensor
function init.eye_(tensor)
  if not scope.is_tensor(tensor) or tensor:dim() ~= 2 then error("nn.init.eye_ takes a matrix") end
  init.zeros_(tensor)
  scope.no_grad(function() tensor:fill_diagonal_(1) end)
  return tensor
end

return setmetatable(init, { __index = function(_, name)
  if type(name) ~= "string" then return nil end
  error(("nn.init.%s does not exist; there are %s"):format(name, table.concat(caller.sorted_names(init), ", ")))
end })
