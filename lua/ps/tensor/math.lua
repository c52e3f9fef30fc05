-- SPDX-License-Identifier: BSD-3-Clause
-- The arithmetic of ps.Tensor: operators, elementwise functions, products, reductions, and methods that work in place.
local autocast = require "ps.core.autocast"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local create = require "ps.tensor.create"
local ffi, C, ops, caller = native.ffi, native.C, native.ops, native.caller
local error = caller.error
local is_tensor = scope.is_tensor
local scalar, scalar_like, dim_index, draw = create.scalar, create.scalar_like, create.dim_index, create.draw
local alone = create.alone
local bit = require "bit"
local floor = math.floor
local rng = C.ps_rng_get(native.ctx)
local FLOAT = native.FLOAT

local T = {}
local M = { methods = T }

-- An addend of the op affine that changes nothing: x + -0 is x for every x, including +0 and -0.
local NOTHING = -0.0

-- Returns t, or a tensor of integers as floats: as fp64 if this is the default type, otherwise as fp32.
local function as_float(t)
  if FLOAT[t.dtype_] then return t end
  return ops.cast(t, create.default_code() == C.PS_F64 and C.PS_F64 or C.PS_F32)
end

local function affine(t, alpha, beta)
  if t.dtype_ == C.PS_BOOL then t = t:to("int64") end
  if alpha ~= floor(alpha) or beta ~= floor(beta) then t = as_float(t) end
  return ops.affine(t, alpha, beta)
end

-- Multiplies b by the argument alpha of add and sub, which is a number or { alpha = number }. The product is not
-- rounded to a half type.
local ALPHA = { alpha = "number" }
local function scaled(a, b, alpha, call)
  if type(alpha) == "table" then alpha = caller.options(alpha, call, ALPHA).alpha or 1 end
  caller.typed(alpha, "number", call .. ": alpha")
  if type(b) == "number" then return b * alpha end
  if caller.tensor(b, call, "b") == nil then error(call .. ": b is missing") end
  if alpha % 1 ~= 0 and not FLOAT[b.dtype_] and not (is_tensor(a) and FLOAT[a.dtype_]) then
    error(("%s: alpha is %.14g; for tensors of integers it must be a whole number"):format(call, alpha))
  end
  if b.dtype_ == C.PS_BF16 or b.dtype_ == C.PS_F16 then b = b:to("fp32") end
  return affine(b, alpha, NOTHING)
end

-- The order of the integer types and the float types. Neither half type is before the other.
local RANK = { [C.PS_BOOL] = 0, [C.PS_U8] = 1, [C.PS_I32] = 2, [C.PS_I64] = 3, [C.PS_F16] = 4, [C.PS_BF16] = 4,
  [C.PS_F32] = 5, [C.PS_F64] = 6 }

-- Converts b to a's type if an op of a and b has a result of a's type. Without the conversion, multiples of b could
-- overflow b's narrower type. A tensor without dimensions does not determine the type of the result if the other tensor
-- is of the same kind (integer or float).
local function widened_to(a, b)
  if not (is_tensor(a) and is_tensor(b)) or RANK[b.dtype_] >= RANK[a.dtype_] then return b end
  local same_kind = FLOAT[a.dtype_] == FLOAT[b.dtype_] and b.dtype_ ~= C.PS_BOOL
  if a.ndim == 0 and b.ndim > 0 and same_kind then return b end
  return ops.cast(b, a.dtype_)
end
M.widened_to = widened_to

local function with_alpha(op, a, b, alpha, call)
  b = widened_to(a, b)
  local y = op(a, scaled(a, b, alpha, call))
  local half = is_tensor(b) and (b.dtype_ == C.PS_BF16 or b.dtype_ == C.PS_F16)
  return half and (not is_tensor(a) or a.dtype_ == b.dtype_ or not FLOAT[a.dtype_]) and ops.cast(y, b.dtype_) or y
end

--- Returns a + alpha * b, elementwise. Shapes broadcast.
---@param a ps.Tensor|number
---@param b ps.Tensor|number
---@param alpha? number|{alpha?: number} default 1
---@return ps.Tensor
local function add(a, b, alpha)
  if alpha ~= nil then return with_alpha(add, a, b, alpha, "add") end
  if type(b) == "number" then return affine(a, 1, b) end
  if type(a) == "number" then return affine(b, 1, a) end
  return ops.add(a, b)
end
--- Returns a - alpha * b, elementwise. Shapes broadcast.
---@param a ps.Tensor|number
---@param b ps.Tensor|number
---@param alpha? number|{alpha?: number} default 1
---@return ps.Tensor
local function sub(a, b, alpha)
  if alpha ~= nil then return with_alpha(sub, a, b, alpha, "sub") end
  if type(b) == "number" then return affine(a, 1, -b) end
  if type(a) == "number" then return affine(b, -1, a) end
  return ops.sub(a, b)
end
--- Returns a * b, elementwise. Shapes broadcast.
---@param a ps.Tensor|number
---@param b ps.Tensor|number
---@return ps.Tensor
local function mul(a, b)
  if type(b) == "number" then return affine(a, b, NOTHING) end
  if type(a) == "number" then return affine(b, a, NOTHING) end
  return ops.mul(a, b)
end

-- Returns op(a, b) for a number and a tensor. An integer tensor is converted to fp32, or to fp64 if this is the default
-- type. The number is not rounded to a half type.
local function with_number(op, a, b)
  if is_tensor(a) then a = as_float(a) else b = as_float(b) end
  local t = type(a) == "number" and b or a
  local narrow = t.dtype_ == C.PS_BF16 or t.dtype_ == C.PS_F16
  local dtype = t.dtype_ == C.PS_F64 and C.PS_F64 or C.PS_F32
  local x, constant = narrow and t:to("fp32") or t, type(a) == "number" and a or b
  local y
  if t == a then y = op(x, scalar(t, constant, dtype)) else y = op(scalar(t, constant, dtype), x) end
  return narrow and ops.cast(y, t.dtype_) or y
end

-- Returns whether a number is a power of 2 or the negative of a power of 2. This is the case if all bits of its
-- fraction are 0. math.frexp is not used, because LuaJIT does not compile it.
local bits = ffi.new "union { double number; struct { uint32_t low, high; } half; }"
local function is_power_of_2(x)
  bits.number = x
  return bits.half.low == 0 and bit.band(bits.half.high, 0xfffff) == 0
end

-- Returns a, which is converted to floats if both a and b have integers. The op then converts b.
local function first_as_float(a, b)
  if is_tensor(a) and is_tensor(b) and not FLOAT[b.dtype_] then return as_float(a) end
  return a
end

--- Returns a / b, elementwise. Shapes broadcast. Integers are converted to fp32 first, or to fp64 if this is the
--- default type.
---@param a ps.Tensor|number
---@param b ps.Tensor|number
---@param rounding? nil PyTorch's rounding_mode, which is rejected
---@return ps.Tensor
local function div(a, b, rounding)
  if rounding ~= nil then
    error("div has no rounding_mode; write (a / b):floor(), of integers (a:double() / b):floor():long()")
  end
  if type(b) == "number" then
    -- Multiplying by 1 / b replaces the division if 1 / b is exact, or if the quotient is rounded to a half type in any
    -- case.
    local narrow = a.dtype_ == C.PS_BF16 or a.dtype_ == C.PS_F16
    local size = math.abs(b)
    local exact = FLOAT[a.dtype_] and is_power_of_2(b)
    if (narrow or exact) and size >= 2 ^ -126 and size < 2 ^ 125 then return ops.affine(a, 1 / b, NOTHING) end
    return with_number(ops.div, a, b)
  end
  if type(a) == "number" then return with_number(ops.div, a, (autocast.full(b))) end
  return ops.div(first_as_float(a, b), b)
end

-- Returns a tensor of integers to the power n >= 0, by repeated squaring. Products wrap around, as in PyTorch.
local function integer_power(t, n)
  if n == 0 then return create.full(t:shape(), 1, { dtype = t:dtype(), device = t:device() }) end
  if n == 1 then return ops.contiguous(t) end
  local y = integer_power(ops.mul(t, t), floor(n / 2))
  return n % 2 == 1 and ops.mul(y, t) or y
end

--- Returns a to the power b, elementwise. Shapes broadcast. If a has integers and b is a whole number from 0 to 2^53,
--- the result has a's type. Other integers are converted to fp32 first, or to fp64 if this is the default type.
---@param a ps.Tensor|number
---@param b ps.Tensor|number
---@return ps.Tensor
local function pow(a, b)
  if type(b) == "number" then
    if FLOAT[a.dtype_] then return ops.pow_scalar(a, b) end
    if a.dtype_ ~= C.PS_BOOL and b >= 0 and b <= 2 ^ 53 and b % 1 == 0 then return integer_power(a, b) end
    return ops.pow_scalar(as_float(a), b)
  end
  if type(a) == "number" then return with_number(ops.pow, a, (autocast.full(b))) end
  return ops.pow(first_as_float(a, b), b)
end
T.add, T.sub, T.mul, T.div, T.pow = add, sub, mul, div, pow
--- Returns -t. Raises an error if t is a tensor of bool, as PyTorch does.
---@return ps.Tensor
function T:neg()
  if self.dtype_ == C.PS_BOOL then error("a tensor of bool has no negative; write t:logical_not(), or -t:long()") end
  return affine(self, -1, NOTHING)
end
local int_range = { [C.PS_BOOL] = { 0, 1 }, [C.PS_U8] = { 0, 255 }, [C.PS_I32] = { -2 ^ 31, 2 ^ 31 - 1 } }
local INT64_END = 2 ^ 63
for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "logical_and", "logical_or" } do
  ---@param a ps.Tensor
  ---@param b ps.Tensor|number
  ---@return ps.Tensor
  T[name] = function(a, b)
    if type(b) ~= "number" or not is_tensor(a) then return ops[name](a, b) end
    local range = int_range[a.dtype_]
    if range and not (b >= range[1] and b <= range[2]) then a = a:to("int64") end
    if not FLOAT[a.dtype_] and (b >= INT64_END or b < -INT64_END) then
      a, b = a:to("fp64"), b < 0 and -math.huge or math.huge      -- b is outside of int64's range
    end
    return ops[name](a, scalar_like(a, b))
  end
end
--- The methods that call the op of the same name. All these methods are added when a script first uses one of them.
M.plain = {}
for _, name in ipairs { "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "sign", "sin", "cos", "erf", "tanh",
                        "sigmoid", "silu", "isfinite", "logical_not", "log1p", "expm1" } do
  M.plain[name] = true
end
-- Rounding functions. Integers are copied, because they need no rounding.
for _, name in ipairs { "floor", "ceil", "round" } do
  ---@param decimals? nil PyTorch's `decimals`, which is rejected
  ---@return ps.Tensor
  T[name] = function(t, decimals)
    if decimals ~= nil then
      error(("%s takes no argument; for n decimals write (t * 10 ^ n):%s() / 10 ^ n"):format(name, name))
    end
    if is_tensor(t) and not FLOAT[t.dtype_] then return ops.contiguous(t) end
    return ops[name](t)
  end
end
--- Returns max(x, 0). Where x is NaN, the result is NaN and the gradient passes through.
---@param self ps.Tensor
---@return ps.Tensor
function T:relu()
  if is_tensor(self) and not FLOAT[self.dtype_] then return ops.clamp(self, 0, math.huge) end
  return ops.relu(self)
end
--- Returns x times the probability that a standard normal variable is at most x. "tanh" approximates the probability.
---@param approximate? "none"|"tanh" (default "none")
---@return ps.Tensor
function T:gelu(approximate) return ops.gelu(self, approximate == "tanh" and 1 or 0) end
local function counted(t) return t.dtype_ == C.PS_BOOL and t:to("int64") or t end
--- Returns x * x.
---@return ps.Tensor
function T:square()
  local x = autocast.full(counted(self))
  return ops.mul(x, x)
end
-- Raises an error for a bound of clamp that is outside of the range of an integer type.
local function check_bound(t, bound)
  if bound == nil or bound == math.huge or bound == -math.huge then return end
  local range = int_range[t.dtype_] or { -INT64_END, INT64_END - 1024 }
  if bound >= range[1] and bound <= range[2] then return end
  error(("clamp: the bound %.14g is outside the range of %s; convert the tensor, as with :long() or :float()"):format(
    bound, t:dtype()))
end

--- Returns x limited to [low, high]. The gradient is 0 at the bounds. If x has an integer type and a bound is a
--- fraction, the result is fp32.
---@param low? number (default: no bound)
---@param high? number (default: no bound)
---@return ps.Tensor
function T:clamp(low, high)
  if low == nil and high == nil then error("clamp: neither a lower nor an upper bound was given") end
  caller.check_named(low)
  if type(low) == "cdata" or type(high) == "cdata" then
    error("clamp takes numbers as bounds: of bounds that are tensors, write x:maximum(low):minimum(high)")
  end
  local x = counted(self)
  if low ~= low or high ~= high then return (FLOAT[x.dtype_] and x or x:to("fp32")) * (0 / 0) end
  if not FLOAT[x.dtype_] then
    if (low or 0) % 1 ~= 0 and math.abs(low) < math.huge or (high or 0) % 1 ~= 0 and math.abs(high) < math.huge then
      x = x:to("fp32")
    else
      check_bound(x, low)
      check_bound(x, high)
    end
  end
  return ops.clamp(x, low or -math.huge, high or math.huge)
end
-- Returns a number as an operand of `where`, on the device of `on`. `like` is the other operand, or nil if the other
-- operand is a number too.
local function beside(like, value, on)
  if not like then return scalar(on, value, C.PS_F32) end
  if like.dtype_ == C.PS_BOOL and value % 1 == 0 then return scalar(on, value, C.PS_I64) end
  return scalar_like(like, value)
end
local function condition(c, call)
  if caller.tensor(c, call, "the condition") == nil then error(call .. ": the condition is missing") end
  if c.dtype_ ~= C.PS_BOOL then
    error(("%s: the condition is a tensor of %s; it must be of bool, such as c:ne(0)"):format(call, c:dtype()))
  end
end
--- Returns a where the condition is true, and b elsewhere. Shapes broadcast.
---@param c ps.Tensor bool
---@param a ps.Tensor|number
---@param b ps.Tensor|number
---@return ps.Tensor
function M.where(c, a, b)
  condition(c, "ps.where")
  if type(a) == "number" then a = beside(is_tensor(b) and b or nil, a, c) end
  if type(b) == "number" and is_tensor(a) then b = beside(a, b, c) end
  return ops.where(c, a, b)
end
--- Returns the elements of this tensor where the condition is true, and the elements of `other` elsewhere. Shapes
--- broadcast.
---@param c ps.Tensor bool
---@param other ps.Tensor|number
---@return ps.Tensor
function T:where(c, other)
  if not is_tensor(c) then
    error(("t:where(condition, other): the condition is %s, not a tensor of bool; to choose between two values write "
      .. "ps.where(condition, a, b)"):format(c == nil and "nil" or "a " .. type(c)))
  end
  condition(c, "t:where(condition, other)")
  if type(other) == "number" then other = beside(self, other, c) end
  return ops.where(c, self, other)
end

local ALL, ROW, COLUMN, NO_SIZES = { -1 }, { 1, -1 }, { -1, 1 }, {}

--- Returns the matrix product: [..., M, K] times [..., K, N] is [..., M, N]. Leading dimensions broadcast. As in
--- PyTorch, a vector is used as a row on the left and as a column on the right. The dimension that this adds is removed
--- from the result.
---@param b ps.Tensor
---@return ps.Tensor
function T:matmul(b)
  local a = self
  if not (is_tensor(a) and is_tensor(b)) then
    error(("matmul takes two tensors, not %s"):format(tostring(is_tensor(a) and b or a)))
  end
  if a.ndim == 0 or b.ndim == 0 then error("matmul: a tensor without dimensions") end
  local row, column = a.ndim == 1, b.ndim == 1
  if row then a = ops.reshape(a, 2, ROW) end
  if column then b = ops.reshape(b, 2, COLUMN) end
  local y = ops.matmul(a, b, 0)
  if row and column then return ops.reshape(y, 0, NO_SIZES) end
  if not (row or column) then return y end
  if y.ndim == 2 then return ops.reshape(y, 1, ALL) end    -- faster than squeeze
  return y:squeeze(row and -2 or -1)
end
T.mm, T.bmm = T.matmul, T.matmul

-- -- reductions -----------------------------------------------------------------------------------------------------
local function dim_bits(t, dims)
  if dims == nil then return 0 end
  if type(dims) == "number" then
    local set = bit.lshift(1, dim_index(t, dims))
    return set
  end
  local set = 0
  if type(dims) ~= "table" then error("dimensions must be a number or a list of numbers, not " .. tostring(dims)) end
  for _, d in ipairs(caller.list(dims, "dimensions: the list", caller.IN_ORDER)) do
    local one = bit.lshift(1, dim_index(t, d))
    if bit.band(set, one) ~= 0 then error(("dimension %d is named twice"):format(dim_index(t, d))) end
    set = bit.bor(set, one)
  end
  return set
end

-- Checks that a flag is a boolean. A number is rejected, because any number, even 0, would count as true in Lua.
local function flag(value, name)
  if value ~= nil then caller.typed(value, "boolean", name) end
  return value
end
local function kept(keepdim) return flag(keepdim, "keepdim") and 1 or 0 end

--- Returns the sum over some dimensions. Floats are summed in fp32 or fp64, and integers in int64.
---@param dims? integer|integer[] (default: all)
---@param keepdim? boolean whether to keep the dimensions with size 1 (default false)
---@return ps.Tensor
function T:sum(dims, keepdim) return ops.sum(self, dim_bits(self, dims), kept(keepdim), 0) end
--- Returns the mean over some dimensions. The elements must be floats.
---@param dims? integer|integer[] (default: all)
---@param keepdim? boolean
---@return ps.Tensor
function T:mean(dims, keepdim) return ops.mean(self, dim_bits(self, dims), kept(keepdim)) end
--- Returns the largest element over some dimensions. Equal largest elements share the gradient.
---@param dims? integer|integer[] (default: all)
---@param keepdim? boolean
---@return ps.Tensor
function T:amax(dims, keepdim) return ops.amax(self, dim_bits(self, dims), kept(keepdim)) end
--- Returns the smallest element over some dimensions. Equal smallest elements share the gradient.
---@param dims? integer|integer[] (default: all)
---@param keepdim? boolean
---@return ps.Tensor
function T:amin(dims, keepdim) return ops.amin(self, dim_bits(self, dims), kept(keepdim)) end
-- Returns the largest or smallest elements along dimension d, and their indices. Only the elements at these indices get
-- a gradient.
local function selected(x, d, keepdim, extreme, arg)
  if not (x:needs_grad() and scope.grad_enabled()) or x.ndim == 0 then
    return extreme(x, dim_bits(x, d), kept(keepdim)), arg(x, d, kept(keepdim))
  end
  local at = arg(x, d, 1)
  local values = ops.gather(x, at, d)
  if kept(keepdim) == 1 then return values, at end
  return values:squeeze(d), at:squeeze(d)
end

--- Returns the largest element. If several elements are the largest, they share the gradient. With d, returns the
--- largest elements along dimension d and their indices. In that case only the elements at these indices get a
--- gradient.
---@param d? integer|ps.Tensor a dimension, or another tensor: t:max(u) is t:maximum(u)
---@param keepdim? boolean
---@return ps.Tensor values
---@return ps.Tensor? indices int64; only with d
function T:max(d, keepdim)
  if is_tensor(d) and keepdim == nil then return T.maximum(self, d) end
  if d == nil then
    if keepdim ~= nil then error("max: keepdim needs a dimension; t:amax(nil, true) keeps all dimensions") end
    return self:amax()
  end
  return selected(self, d, keepdim, ops.amax, ops.argmax)
end
--- Returns the smallest element. If several elements are the smallest, they share the gradient. With d, returns the
--- smallest elements along dimension d and their indices. In that case only the elements at these indices get a
--- gradient.
---@param d? integer|ps.Tensor a dimension, or another tensor: t:min(u) is t:minimum(u)
---@param keepdim? boolean
---@return ps.Tensor values
---@return ps.Tensor? indices int64; only with d
function T:min(d, keepdim)
  if is_tensor(d) and keepdim == nil then return T.minimum(self, d) end
  if d == nil then
    if keepdim ~= nil then error("min: keepdim needs a dimension; t:amin(nil, true) keeps all dimensions") end
    return self:amin()
  end
  return selected(self, d, keepdim, ops.amin, ops.argmin)
end
local function all_kept(y, t, keepdim)
  if kept(keepdim) == 0 then return y end
  local ones = {}
  for i = 1, t.ndim do ones[i] = 1 end
  return y:reshape(ones)
end
--- Returns the index of the first largest element along dimension d.
---@param d? integer (default: over all elements, in row-major order)
---@param keepdim? boolean
---@return ps.Tensor int64
function T:argmax(d, keepdim)
  if d == nil then return all_kept(ops.argmax(self:reshape(-1), 0, 0), self, keepdim) end
  return ops.argmax(self, d, kept(keepdim))
end
--- Returns the index of the first smallest element along dimension d.
---@param d? integer (default: over all elements, in row-major order)
---@param keepdim? boolean
---@return ps.Tensor int64
function T:argmin(d, keepdim)
  if d == nil then return all_kept(ops.argmin(self:reshape(-1), 0, 0), self, keepdim) end
  return ops.argmin(self, d, kept(keepdim))
end
--- Returns the running sum along dimension d. Integers are summed in int64.
---@param d integer
---@return ps.Tensor of this shape
function T:cumsum(d)
  if d == nil then error("cumsum needs a dimension; for all elements in order write t:reshape(-1):cumsum(0)") end
  return ops.cumsum(self, d, 0)
end
local TOPK = { dim = "whole", largest = "boolean", sorted = "boolean" }

--- Returns the k largest elements along a dimension in descending order, or the k smallest in ascending order.
---@param k integer
---@param d? integer|{dim?: integer, largest?: boolean, sorted?: boolean} the dimension (default -1), or a table with
--- all further arguments by name
---@param largest? boolean (default true)
---@param sorted? boolean (default true); with false, the results are sorted, too
---@return ps.Tensor values of this shape, with k in dimension d
---@return ps.Tensor indices int64, of values' shape
function T:topk(k, d, largest, sorted)
  if type(d) == "table" then
    local options = caller.options(d, "topk", TOPK)
    d, largest, sorted = options.dim, options.largest, options.sorted
  end
  caller.whole(k, "topk: k", 0)
  flag(sorted, "topk: sorted")
  d = d == nil and self.ndim - 1 or dim_index(self, d)
  local values, indices
  if flag(largest, "topk: largest") == false then
    if k > self:size(d) then
      error(("topk: k is %d, but dimension %d has %s"):format(k, d, caller.counted(self:size(d), "element")))
    end
    values, indices = self:sort(d)
    return values:narrow(d, 0, k), indices:narrow(d, 0, k)
  end
  if d >= self.ndim - 1 then return ops.topk(self, k) end
  values, indices = ops.topk(self:transpose(d, -1):contiguous(), k)
  return values:transpose(d, -1), indices:transpose(d, -1)
end
-- Converts t for sums. Half types are summed in fp32, as in PyTorch, because squares of fp16 numbers of 256 or more
-- overflow. Integers are also summed in fp32.
local function widened(t)
  local wide = t.dtype_ == C.PS_F32 or t.dtype_ == C.PS_F64
  return wide and t or t:to("fp32"), FLOAT[t.dtype_] and t.dtype_ or C.PS_F32
end
local function narrowed(t, dtype) return t.dtype_ == dtype and t or ops.cast(t, dtype) end

-- Returns the square root. Where the root is 0, the gradient is 0, which is a subgradient of a norm at its minimum.
local function root(t)
  if not (t:needs_grad() and scope.grad_enabled()) then return ops.sqrt(t) end
  local zero = t:eq(0)
  return t:masked_fill(zero, 1):sqrt():masked_fill(zero, 0)
end

local function rest_of_mean(x, mean, dims) return (x - mean):mean(dims, true) end

-- Returns the variance over all dimensions or over the last dimension, computed by one op. If root_of is 1, returns the
-- square root of the variance. Returns nil if a gradient is needed, if `dims` selects other dimensions, or if the
-- device does not use host memory, because the op cannot be used in these cases.
local function host_variance(x, dims, unbiased, keepdim, root_of)
  if not (is_tensor(x) and FLOAT[x.dtype_] and native.on_host(x)) or x:needs_grad() and scope.grad_enabled() then
    return nil
  end
  if dims == nil and not keepdim then x = ops.reshape(x:is_contiguous() and x or ops.contiguous(x), 1, ALL)
  elseif dims ~= -1 and dims ~= x.ndim - 1 or x.ndim == 0 then return nil end
  return ops.var(x, flag(unbiased, "unbiased") == false and 0 or 1, root_of, kept(keepdim))
end

-- Returns the variance in fp32 or fp64.
local function variance(self, dims, unbiased, keepdim)
  if not FLOAT[self.dtype_] then error("var and std take a float tensor; convert with :float()") end
  local x = widened(self)
  -- `rest` is the rounding error of the mean. If all elements are equal, they differ from the mean only by this error.
  local mean = x:mean(dims, true)
  local rest = scope.no_grad(rest_of_mean, x, mean, dims)
  local total = (x - (mean + rest)):square():sum(dims, keepdim)
  local n = self:numel() / math.max(1, total:numel())
  return div(total, flag(unbiased, "unbiased") == false and n or math.max(0, n - 1))
end
--- Returns the variance over some dimensions. The elements must be floats.
---@param dims? integer|integer[] (default: all)
---@param unbiased? boolean whether to divide by n - 1 (the default) instead of n
---@param keepdim? boolean
---@return ps.Tensor
function T:var(dims, unbiased, keepdim)
  return host_variance(self, dims, unbiased, keepdim, 0) or
    narrowed(variance(self, dims, unbiased, keepdim), self.dtype_)
end
--- Returns the standard deviation over some dimensions. The elements must be floats. If all elements are equal, the
--- gradient is 0.
---@param dims? integer|integer[] (default: all)
---@param unbiased? boolean whether to divide by n - 1 (the default) instead of n
---@param keepdim? boolean
---@return ps.Tensor
function T:std(dims, unbiased, keepdim)
  return host_variance(self, dims, unbiased, keepdim, 1) or
    narrowed(root(variance(self, dims, unbiased, keepdim)), self.dtype_)
end
--- Returns whether any element along some dimensions is not 0.
---@param dims? integer|integer[] (default: all)
---@param keepdim? boolean
---@return ps.Tensor bool
function T:any(dims, keepdim)
  if self.numel_ == 0 then return self:ne(0):long():sum(dims, keepdim):gt(0) end
  if self.dtype_ == C.PS_BOOL then return ops.amax(self, dim_bits(self, dims), kept(keepdim)) end
  return ops.logical_not(ops.amin(ops.logical_not(self), dim_bits(self, dims), kept(keepdim)))
end
--- Returns whether no element along some dimensions is 0.
---@param dims? integer|integer[] (default: all)
---@param keepdim? boolean
---@return ps.Tensor bool
function T:all(dims, keepdim)
  if self.numel_ == 0 then return self:eq(0):long():sum(dims, keepdim):eq(0) end
  if self.dtype_ == C.PS_BOOL then return ops.amin(self, dim_bits(self, dims), kept(keepdim)) end
  return ops.logical_not(ops.amax(ops.logical_not(self), dim_bits(self, dims), kept(keepdim)))
end
--- Returns exp(x) divided by the sum of exp(x) along dimension d.
---@param d? integer (default -1)
---@return ps.Tensor of this shape
function T:softmax(d) return M.along_last(ops.softmax, self, d) end
--- Returns the logarithm of softmax along dimension d.
---@param d? integer (default -1)
---@return ps.Tensor of this shape
function T:log_softmax(d) return M.along_last(ops.log_softmax, self, d) end
--- Applies an op along dimension d. The op itself works along the last dimension.
function M.along_last(op, t, d)
  d = dim_index(t, d or -1)
  if d == t.ndim - 1 then return op(t) end
  return op(t:transpose(d, -1):contiguous()):transpose(d, -1)
end

-- -- in place -------------------------------------------------------------------------------------------------------
--- Sets every element to a number, in place.
---@param v number the number; if this tensor has an integer type, the number must be in its range
---@return ps.Tensor self
function T:fill_(v)
  if v == nil then error("fill_ needs a number") end
  ops.fill_(self, type(v) == "number" and create.held(v, self.dtype_) or v)
  return self
end
--- Sets every element to 0, in place.
---@return ps.Tensor self
function T:zero_()
  create.check_gradients(self, nil, "zero_", "mul(0)")
  ops.fill_(self, 0)
  return self
end
--- Replaces the values, in place.
---@param src ps.Tensor of a shape that broadcasts to this tensor's shape; its type and device may differ
---@param non_blocking? boolean accepted for scripts written for PyTorch; has no effect on the values
---@return ps.Tensor self
function T:copy_(src, non_blocking)
  flag(non_blocking, "copy_: non_blocking")
  if is_tensor(src) and src.device_ ~= self.device_ then src = src:to(self:device()) end
  ops.copy_(self, src)
  return self
end
-- Raises the error about a write in place that would change the type. Integer tensors cannot hold fractions or
-- quotients.
local function refuse_in_place(t, what, call)
  error(("%s: %s with a tensor of %s, which cannot hold the result; write t = t:float(), or t = an expression of t")
    :format(call, what, t:dtype()))
end
local function keeps_type(t, x, call)
  if t:is_float() or not (type(x) == "number" and x % 1 ~= 0 or is_tensor(x) and x:is_float()) then return end
  refuse_in_place(t, is_tensor(x) and "a tensor of " .. x:dtype() or "a fraction", call)
end

local NAMES = { "x", "the tensor" }

-- Checks a write in place. The write must not need a gradient. The result combines t with x, so x must fit t's type and
-- shape.
local function check_in_place(t, x, call)
  if type(x) ~= "number" and caller.tensor(x, call, "x") == nil then error(call .. ": x is missing") end
  keeps_type(t, x, call)
  create.check_gradients(t, x, call, call:sub(1, -2) .. "(x)")
  if is_tensor(x) then create.check_broadcast(x, t, call, NAMES, true) end
end

--- Adds alpha times x, in place. An integer tensor accepts only whole numbers.
---@param x ps.Tensor|number
---@param alpha? number (default 1)
---@return ps.Tensor self
function T:add_(x, alpha)
  check_in_place(self, x, "add_")
  if alpha ~= nil then caller.typed(alpha, "number", "add_: alpha") end
  keeps_type(self, alpha, "add_")
  if type(x) == "number" then ops.copy_(self, affine(self, 1, x * (alpha or 1)))
  elseif x.dtype_ == self.dtype_ and self:is_float() and self.numel_ == x.numel_ and self.ndim == x.ndim and
         self:is_contiguous() then
    ops.axpy_(self, x, alpha or 1)
  else
    if alpha and alpha ~= 1 and x:is_float() and x.dtype_ ~= C.PS_F64 then       -- prevents rounding of the product
      x = x:to(self.dtype_ == C.PS_F64 and "fp64" or "fp32")
    end
    ops.copy_(self, self + widened_to(self, x) * (alpha or 1))
  end
  return self
end
--- Subtracts alpha times x, in place. An integer tensor accepts only whole numbers.
---@param x ps.Tensor|number
---@param alpha? number (default 1)
---@return ps.Tensor self
function T:sub_(x, alpha)
  check_in_place(self, x, "sub_")
  if alpha ~= nil then return self:add_(x, -caller.typed(alpha, "number", "sub_: alpha")) end
  if type(x) == "number" then return self:add_(-x) end
  if self:is_float() then return self:add_(x, -1) end
  ops.copy_(self, self - x)
  return self
end
--- Multiplies by x, in place. An integer tensor accepts only whole numbers.
---@param x ps.Tensor|number
---@return ps.Tensor self
function T:mul_(x)
  check_in_place(self, x, "mul_")
  if type(x) == "number" and self:is_float() and self:is_contiguous() then ops.scale_(self, x)
  else ops.copy_(self, self * x) end
  return self
end
--- Divides by x, in place. Raises an error for an integer tensor.
---@param x ps.Tensor|number
---@return ps.Tensor self
function T:div_(x)
  if not self:is_float() then refuse_in_place(self, "a quotient", "div_") end
  check_in_place(self, x, "div_")
  ops.copy_(self, self / x)
  return self
end
--- Sets the elements to normally distributed numbers, in place. The Box-Muller method computes the numbers from Philox
--- counters (ps.manual_seed).
---@param mean? number (default 0)
---@param std? number at least 0 (default 1)
---@return ps.Tensor self
function T:normal_(mean, std)
  if type(std) == "number" and (std < 0 or std ~= std) then
    error("normal_: std is " .. std .. "; it must be at least 0")
  end
  return alone(self, ops.normal_(self, mean or 0, std or 1, rng.seed, draw(self.numel_)))
end
--- Sets the elements to uniformly distributed numbers in [low, high), in place. The numbers are computed from Philox
--- counters (ps.manual_seed).
---@param low? number (default 0)
---@param high? number at least low (default 1)
---@return ps.Tensor self
function T:uniform_(low, high)
  local from, to = low or 0, high or 1
  if type(from) == "number" and type(to) == "number" and (from > to or from ~= from or to ~= to) then
    error(("uniform_: the range [%g, %g) is empty: low must be at most high"):format(from, to))
  end
  return alone(self, ops.uniform_(self, low or 0, high or 1, rng.seed, draw(self.numel_)))
end

return M
