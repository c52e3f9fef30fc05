-- SPDX-License-Identifier: BSD-3-Clause
-- Activations and other functions of one or two tensors. They are functions of ps.functional, such as F.softplus and
-- F.normalize.
local autocast = require "ps.core.autocast"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local tensor = require "ps.tensor"
local ops, caller = native.ops, native.caller
local error = caller.error

local M = {}

local function floats(x, call)
  if caller.tensor(x, call, "x") == nil then error(call .. ": x is missing") end
  if not x:is_float() then error(("%s takes floats, not %s; convert with :float()"):format(call, x:dtype())) end
  return x
end

local function number(value, default, what)
  if value == nil then return default end
  return caller.typed(value, "number", what)
end

--- Returns log(1 + exp(beta * x)) / beta. Where beta * x is above the threshold, returns x itself.
---@param x ps.Tensor floats
---@param beta? number (default 1)
---@param threshold? number (default 20)
---@return ps.Tensor of x's shape
function M.softplus(x, beta, threshold)
  return ops.softplus(floats(x, "F.softplus"), number(beta, 1, "F.softplus: beta"),
    number(threshold, 20, "F.softplus: threshold"))
end

--- Returns x where x is above 0, and slope * x elsewhere.
---@param x ps.Tensor floats
---@param slope? number (default 0.01)
---@return ps.Tensor of x's shape
function M.leaky_relu(x, slope)
  return ops.leaky_relu(floats(x, "F.leaky_relu"), number(slope, 0.01, "F.leaky_relu: the slope"))
end

--- Returns x where x is above 0, and alpha * (exp(x) - 1) elsewhere (Clevert et al. 2016).
---@param x ps.Tensor floats
---@param alpha? number (default 1)
---@return ps.Tensor of x's shape
function M.elu(x, alpha) return ops.elu(floats(x, "F.elu"), number(alpha, 1, "F.elu: alpha")) end

local NO_SIZES = {}

--- Returns x where x is above 0, and elsewhere x times the slope of its channel (He et al. 2015).
---@param x ps.Tensor floats [N, C, ...], or of any shape if there is one slope
---@param w ps.Tensor slopes [C] or [1]
---@return ps.Tensor of x's shape
function M.prelu(x, w)
  floats(x, "F.prelu")
  floats(w, "F.prelu: the slopes")
  local n = w:numel()
  if n == 1 then return ops.prelu(x, ops.reshape(w, 0, NO_SIZES)) end
  if w:dim() ~= 1 or x:dim() < 2 or x:size(1) ~= n then
    error(("F.prelu: %d slopes for x [%s]; dimension 1 of x must have this size"):format(n,
      table.concat(x:shape(), ", ")))
  end
  local shape = {}
  for i = 1, x:dim() do shape[i] = i == 2 and n or 1 end
  return ops.prelu(x, w:reshape(shape))
end

--- Returns x where x is above 0, and alpha * (exp(x / alpha) - 1) elsewhere (Barron 2017).
---@param x ps.Tensor floats
---@param alpha? number (default 1)
---@return ps.Tensor of x's shape
function M.celu(x, alpha)
  alpha = number(alpha, 1, "F.celu: alpha")
  if alpha == 1 then return ops.elu(floats(x, "F.celu"), 1) end
  return ops.elu(floats(x, "F.celu") / alpha, 1) * alpha
end

--- Returns softmax of -x along one dimension.
---@param x ps.Tensor floats
---@param dim? integer (default -1)
---@return ps.Tensor of x's shape
function M.softmin(x, dim) return (-floats(x, "F.softmin")):softmax(dim) end

local SELU_ALPHA, SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946

--- Returns 1.0507 * elu(x, 1.6733). This function preserves mean and variance (Klambauer et al. 2017).
---@param x ps.Tensor floats
---@return ps.Tensor of x's shape
function M.selu(x) return ops.affine(ops.elu(floats(x, "F.selu"), SELU_ALPHA), SELU_SCALE, -0.0) end

-- Returns x limited to [low, high]. Where x is NaN, the gradient passes through, as in PyTorch. The op clamp would stop
-- the gradient where x is NaN.
local function limited(x, low, high)
  if x:is_float() and not (scope.grad_enabled() and x:needs_grad()) then return ops.clamp(x, low, high) end
  return tensor.where(x:le(low), low, tensor.where(x:ge(high), high, x))
end

--- Returns x limited to [low, high]. The gradient is 0 at the bounds and outside of them.
---@param x ps.Tensor
---@param low? number (default -1)
---@param high? number (default 1)
---@return ps.Tensor of x's shape
function M.hardtanh(x, low, high)
  if caller.tensor(x, "F.hardtanh", "x") == nil then error("F.hardtanh: x is missing") end
  low, high = number(low, -1, "F.hardtanh: the lower bound"), number(high, 1, "F.hardtanh: the upper bound")
  if low > high then error(("F.hardtanh: the lower bound, %g, is above the upper one, %g"):format(low, high)) end
  return limited(x, low, high)
end

--- Returns x limited to [0, 6]. The gradient is 0 at the bounds and outside of them.
---@param x ps.Tensor
---@return ps.Tensor of x's shape
function M.relu6(x)
  if caller.tensor(x, "F.relu6", "x") == nil then error("F.relu6: x is missing") end
  return limited(x, 0, 6)
end

--- Returns x * tanh(softplus(x)) (Misra 2019).
---@param x ps.Tensor floats
---@return ps.Tensor of x's shape
function M.mish(x) return ops.mish(floats(x, "F.mish")) end

--- Returns log(sigmoid(x)), computed without overflow.
---@param x ps.Tensor floats
---@return ps.Tensor of x's shape
function M.logsigmoid(x) return ops.logsigmoid(floats(x, "F.logsigmoid")) end

--- Returns (y + 3) / 6, where y is x limited to [-3, 3].
---@param x ps.Tensor floats
---@return ps.Tensor of x's shape
function M.hardsigmoid(x) return ops.hardsigmoid(floats(x, "F.hardsigmoid")) end

--- Returns x * hardsigmoid(x) (Howard et al. 2019).
---@param x ps.Tensor floats
---@return ps.Tensor of x's shape
function M.hardswish(x) return ops.hardswish(floats(x, "F.hardswish")) end

--- Returns x / (1 + |x|).
---@param x ps.Tensor floats
---@return ps.Tensor of x's shape
function M.softsign(x) return floats(x, "F.softsign") / (ops.abs(x) + 1) end

--- Divides x into two halves along a dimension. Returns the first half times the sigmoid of the second half (Dauphin et
--- al. 2017).
---@param x ps.Tensor floats
---@param dim? integer (default -1) the dimension, whose size must be even
---@return ps.Tensor half as large along dim
function M.glu(x, dim)
  local n = floats(x, "F.glu"):size(dim or -1)
  if n % 2 ~= 0 then error(("F.glu: dimension %d has size %d, which is odd"):format(dim or -1, n)) end
  return x:narrow(dim or -1, 0, n / 2) * ops.sigmoid(x:narrow(dim or -1, n / 2, n / 2))
end

local NORMALIZE = { p = "number", dim = "whole", eps = "number" }

--- Returns x divided by its p-norms along the given dimensions. A norm below eps is replaced by eps.
---@param x ps.Tensor floats
---@param p? number|{p?: number, dim?: integer, eps?: number} p (default 2), or a table with p and the following
--- arguments by name
---@param dim? integer|integer[] (default 1)
---@param eps? number default 1e-12
---@return ps.Tensor of x's shape
function M.normalize(x, p, dim, eps)
  if type(p) == "table" then
    if dim ~= nil then error("F.normalize: pass the arguments in one table or separately, not both") end
    local options = caller.options(p, "F.normalize", NORMALIZE)
    p, dim, eps = options.p, options.dim, options.eps
  end
  eps = number(eps, 1e-12, "F.normalize: eps")
  x = autocast.full(floats(x, "F.normalize"))
  return x / x:norm(p or 2, dim or 1, true):clamp(eps)
end

local function limit_of(norm, eps) return norm:clamp(eps) - norm end

-- Expands x to a shape, and returns it divided by its norms along a dimension. A norm below eps is replaced by eps, but
-- the gradient is computed from the norm itself, as in PyTorch.
local function unit(x, shape, dim, eps)
  x = x:expand(shape)
  local norm = x:norm(2, dim, true)
  return x / (norm + scope.no_grad(limit_of, norm, eps))
end

--- Returns the cosines of the angles between the vectors of a and the vectors of b. Vectors are along the dimension
--- `dim`. Norms below eps are replaced by eps.
---@param a ps.Tensor floats
---@param b ps.Tensor of a shape that broadcasts with a's
---@param dim? integer (default 1) a dimension of the shape to which a and b broadcast
---@param eps? number default 1e-8
---@return ps.Tensor without the dimension `dim`
function M.cosine_similarity(a, b, dim, eps)
  floats(a, "F.cosine_similarity")
  floats(b, "F.cosine_similarity")
  eps = number(eps, 1e-8, "F.cosine_similarity: eps")
  a, b = autocast.full(a, b)
  local shape, n = a:shape(), math.max(a:dim(), b:dim())
  if not tensor.same_shape(a, b) then
    tensor.check_broadcast(a, b, "F.cosine_similarity", { "a", "b" })
    local of_a, of_b = shape, b:shape()
    shape = {}
    for i = 1, n do
      local x, y = of_a[i - n + a:dim()] or 1, of_b[i - n + b:dim()] or 1
      shape[i] = x == 1 and y or x
    end
  end
  dim = dim or 1
  return (unit(a, shape, dim, eps) * unit(b, shape, dim, eps)):sum(dim)
end

return M
