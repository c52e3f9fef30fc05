-- SPDX-License-Identifier: BSD-3-Clause
-- Small functions of tensors that call other ops: products, comparisons of whole tensors, diagonals.
local autocast = require "ps.core.autocast"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local create = require "ps.tensor.create"
local tensor = require "ps.tensor"
local C, ops, caller = native.C, native.ops, native.caller
local error = caller.error
local is_tensor = scope.is_tensor
local dim_index = create.dim_index

local T = tensor.T

local FLOAT = native.FLOAT

-- Converts a tensor to fp32 or int64 if it has a narrower type, and calls fn. For a half type, the result is converted
-- back to this type. For an integer type, the result stays int64.
local function wide(t, fn, ...)
  if t.dtype_ == C.PS_F32 or t.dtype_ == C.PS_F64 or t.dtype_ == C.PS_I64 then return fn(t, ...) end
  if FLOAT[t.dtype_] then return ops.cast(fn(ops.cast(t, C.PS_F32), ...), t.dtype_) end
  return fn(ops.cast(t, C.PS_I64), ...)
end

-- -- products -------------------------------------------------------------------------------------------------------
-- Returns the product along dimension d. In each step, one half of the elements is multiplied by the other half. The
-- gradient of an element is therefore the product of the other elements, even if some elements are 0. If no gradient is
-- needed, the op `prod` multiplies in the same order. Only devices that use host memory have a kernel for this op.
local function prod_along(x, d, keepdim)
  if native.on_host(x) and not (x:needs_grad() and scope.grad_enabled()) then
    return ops.prod(x, d, keepdim and 1 or 0)
  end
  local n, rest = x:size(d), nil
  while n > 1 do
    local half = math.floor(n / 2)
    if n % 2 == 1 then
      local last = x:narrow(d, n - 1, 1)
      rest = rest and rest * last or last
    end
    x, n = x:narrow(d, 0, half) * x:narrow(d, half, half), half
  end
  local y = n == 0 and x:sum(d, true) + 1 or rest and x * rest or x
  return keepdim and y or y:squeeze(d)
end

local function prod(x, dims, keepdim)
  if dims == nil then
    local y = prod_along(x.ndim == 1 and x or x:reshape(-1), 0)
    if not keepdim then return y end
    local ones = {}
    for i = 1, x.ndim do ones[i] = 1 end
    return y:reshape(ones)
  end
  if #dims == 1 then return prod_along(x, dim_index(x, dims[1]), keepdim) end
  local gone = {}
  for _, d in ipairs(dims) do
    d = dim_index(x, d)
    if gone[d] then error(("dimension %d is named twice"):format(d)) end
    gone[d] = true
    x = prod_along(x, d, true)
  end
  if keepdim then return x end
  local shape = {}
  for d = 0, x.ndim - 1 do if not gone[d] then shape[#shape + 1] = x:size(d) end end
  return x:reshape(shape)
end

--- Returns the product over some dimensions. Integers are multiplied in int64.
---@param dims? integer|integer[] (default: all)
---@param keepdim? boolean whether to keep the dimensions with size 1 (default false)
---@return ps.Tensor
function T:prod(dims, keepdim)
  if keepdim ~= nil then caller.typed(keepdim, "boolean", "prod: keepdim") end
  if type(dims) == "number" then dims = { dims } end
  if dims ~= nil then caller.list(dims, "prod: the dimensions") end
  return wide((autocast.full(self)), prod, dims, keepdim)
end

--- Returns the running product along dimension d. Integers are multiplied in int64.
---@param d integer
---@return ps.Tensor of this shape
function T:cumprod(d)
  if d == nil then
    error("cumprod needs a dimension; for all elements in their order write t:reshape(-1):cumprod(0)")
  end
  return wide((autocast.full(self)), ops.cumprod, dim_index(self, d))
end

--- Returns the outer product: the product of each element of this vector with each element of another vector.
---@param other ps.Tensor [M]
---@return ps.Tensor [N, M], for this vector [N]
function T:outer(other)
  if not is_tensor(other) or self.ndim ~= 1 or other.ndim ~= 1 then
    error(("outer takes two vectors, not [%s] and %s"):format(table.concat(self:shape(), ", "),
      is_tensor(other) and "[" .. table.concat(other:shape(), ", ") .. "]" or tostring(other)))
  end
  return self:unsqueeze(1) * other:unsqueeze(0)
end

-- Returns whether two tensors have equal sizes in all dimensions except the last two.
local function same_batch(a, b)
  for i = 0, a.ndim - 3 do if a.shape_[i] ~= b.shape_[i] then return false end end
  return true
end

--- Returns the distance between each vector of this tensor and each vector of another tensor. Where a distance is 0,
--- its gradient is 0.
---@param b ps.Tensor floats [..., M, D]
---@param p? number of the p-norm (default 2)
---@return ps.Tensor [..., N, M], for this tensor [..., N, D]
function T:cdist(b, p)
  if caller.tensor(b, "cdist", "the other") == nil then error "cdist: the other tensor is missing" end
  if self:dim() < 2 or b:dim() < 2 or self:size(-1) ~= b:size(-1) then
    error(("cdist takes vectors [..., N, D] and [..., M, D], not [%s] and [%s]"):format(
      table.concat(self:shape(), ", "), table.concat(b:shape(), ", ")))
  end
  local x, y = autocast.full(self, b)
  if (p == nil or p == 2) and native.on_host(x) and x.ndim == y.ndim and x.dtype_ == y.dtype_ and
    FLOAT[x.dtype_] and same_batch(x, y) then return ops.cdist(x, y) end
  return (x:unsqueeze(-2) - y:unsqueeze(-3)):norm(p or 2, -1)
end

-- -- elements -------------------------------------------------------------------------------------------------------
--- Returns a tensor that is true where an element is NaN.
---@return ps.Tensor bool
function T:isnan() return ops.ne(self, self) end
--- Returns a tensor that is true where an element is infinite.
---@return ps.Tensor bool
function T:isinf()
  if not FLOAT[self.dtype_] then return tensor.zeros(self:shape(), { dtype = "bool", device = self:device() }) end
  return ops.eq(ops.abs(self), create.scalar_like(self, math.huge))
end

--- Returns each element rounded towards 0. Integers are only copied.
---@return ps.Tensor
function T:trunc()
  if not FLOAT[self.dtype_] then return ops.contiguous(self) end
  return ops.trunc(self)
end

local single = native.ffi.new "float[1]"

-- Returns whether a type can represent a number exactly.
local function holds(dtype, number)
  single[0] = number
  local bits = dtype == C.PS_I64 and 63 or dtype == C.PS_I32 and 31
  return dtype == C.PS_F64 or dtype == C.PS_F32 and single[0] == number
    or bits and number % 1 == 0 and math.abs(number) < 2 ^ bits
end

-- Performs remainder, fmod or floor_divide. If both tensors have the same type, the result is computed in this type.
-- Other operands are converted to fp64, and the result is converted to their common type.
local function divided(a, b, op, call)
  if not is_tensor(b) and type(b) ~= "number" then
    error(("%s takes a tensor or a number, not %s"):format(call, b == nil and "nil" or "a " .. type(b)))
  end
  if a.dtype_ == C.PS_BOOL then error(call .. " of bool: convert with :long()") end
  local is_float = FLOAT[a.dtype_] or is_tensor(b) and FLOAT[b.dtype_] or type(b) == "number" and b % 1 ~= 0
  local zero = is_tensor(b) and not is_float and b:eq(0):any():item() or b == 0 and not is_float
  if zero then error(call .. ": an integer is divided by 0") end
  if is_tensor(b) then
    if a.dtype_ == b.dtype_ or not is_float then return op(a, b) end
  elseif holds(a.dtype_, b) then
    return op(a, create.scalar(a, b, a.dtype_))
  end
  local like = is_tensor(b) and b or FLOAT[a.dtype_] and a or create.scalar(a, 0, is_float and C.PS_F32 or C.PS_I64)
  local dtype = ops.add(a:reshape(-1):narrow(0, 0, 0), like:reshape(-1):narrow(0, 0, 0)):dtype()
  if not is_tensor(b) and not is_float then dtype = a:dtype() end
  return op(a:to "fp64", is_tensor(b) and b:to "fp64" or create.scalar(a, b, C.PS_F64)):to(dtype)
end

--- Returns the exact remainder of a division, a - b * (a / b):floor(). It has the sign of the divisor b.
---@param b ps.Tensor|number the divisor; for integers it must not be 0
---@return ps.Tensor
function T:remainder(b) return divided(self, b, ops.remainder, "remainder") end

--- Returns the exact remainder of a division, a - b * (a / b):trunc(). It has the sign of the dividend a.
---@param b ps.Tensor|number the divisor; for integers it must not be 0
---@return ps.Tensor
function T:fmod(b) return divided(self, b, ops.fmod, "fmod") end

--- Returns the quotient rounded down: (a - a:remainder(b)) / b. Raises an error if a tensor needs a gradient.
---@param b ps.Tensor|number the divisor; for integers it must not be 0
---@return ps.Tensor
function T:floor_divide(b)
  if scope.grad_enabled() and (self:needs_grad() or is_tensor(b) and b:needs_grad()) then
    error("floor_divide has no gradient: call it on x:detach(), or under ps.no_grad")
  end
  return divided(self, b, ops.floor_divide, "floor_divide")
end

--- Returns this tensor plus weight times the difference between another tensor and this tensor.
---@param stop ps.Tensor the other tensor, of a shape that broadcasts with this tensor's shape
---@param weight number|ps.Tensor with 0, the result is this tensor; with 1, it is the other tensor
---@return ps.Tensor
function T:lerp(stop, weight)
  if caller.tensor(stop, "lerp", "the end") == nil then error("lerp: the end is missing") end
  if not FLOAT[self.dtype_] or stop.dtype_ ~= self.dtype_ then
    error(("lerp takes floats of one type, not %s and %s"):format(self:dtype(), stop:dtype()))
  end
  if not is_tensor(weight) then return ops.lerp(self, stop, caller.typed(weight, "number", "lerp: the weight")) end
  -- Starts from the closer of the two tensors, as PyTorch does. The weight 1 then returns the other tensor exactly.
  local way, far = stop - self, weight:abs():ge(0.5)
  return tensor.where(far, stop - way * (1 - weight), self + way * weight)
end

--- Returns the indices that sort the elements along a dimension.
---@param d? integer (default -1)
---@param descending? boolean (default false)
---@return ps.Tensor int64, of this shape
function T:argsort(d, descending)
  local _, order = self:sort(d, descending)
  return order
end

-- -- whole tensors --------------------------------------------------------------------------------------------------
local CLOSE = { rtol = "number", atol = "number", equal_nan = "boolean" }

local function close_elements(a, b, rtol, atol, equal_nan)
  local same = a:eq(b)
  if equal_nan then same = same:logical_or(a:isnan():logical_and(b:isnan())) end
  local x, y = a:to("fp64"), b:to("fp64")
  local distance = (x - y):abs()
  return same:logical_or(distance:le(y:abs() * rtol + atol):logical_and(distance:isfinite()))
end

-- Returns whether |a - b| <= atol + rtol * |b| holds for each element. Infinities of the same sign are close.
local function close(a, b, rtol, atol, equal_nan, call)
  if type(rtol) == "table" then
    local options = caller.options(rtol, call, CLOSE)
    rtol, atol, equal_nan = options.rtol, options.atol, options.equal_nan
  end
  if caller.tensor(b, call, "the other") == nil then error(call .. ": the other tensor is missing") end
  rtol, atol = caller.typed(rtol or 1e-5, "number", call .. ": rtol"),
    caller.typed(atol or 1e-8, "number", call .. ": atol")
  if equal_nan ~= nil then caller.typed(equal_nan, "boolean", call .. ": equal_nan") end
  return scope.no_grad(close_elements, a, b, rtol, atol, equal_nan)
end

--- Returns a tensor that is true where two tensors are nearly equal: |a - b| <= atol + rtol * |b|. Differences are
--- computed in fp64.
---@param other ps.Tensor of a shape that broadcasts with this tensor's shape
---@param rtol? number|{rtol?: number, atol?: number, equal_nan?: boolean} default 1e-5
---@param atol? number default 1e-8
---@param equal_nan? boolean whether NaN equals NaN (default false)
---@return ps.Tensor bool
function T:isclose(other, rtol, atol, equal_nan) return close(self, other, rtol, atol, equal_nan, "isclose") end

--- Returns whether all elements of two tensors are nearly equal. Elements are compared as in isclose.
---@param other ps.Tensor of a shape that broadcasts with this tensor's shape
---@param rtol? number|{rtol?: number, atol?: number, equal_nan?: boolean} default 1e-5
---@param atol? number default 1e-8
---@param equal_nan? boolean whether NaN equals NaN (default false)
---@return boolean
function T:allclose(other, rtol, atol, equal_nan)
  return close(self, other, rtol, atol, equal_nan, "allclose"):all():item()
end

--- Returns whether two tensors have the same shape and equal elements.
---@param other ps.Tensor
---@return boolean
function T:equal(other)
  if caller.tensor(other, "equal", "the other") == nil then error("equal: the other tensor is missing") end
  if not tensor.same_shape(self, other) then return false end
  return self.numel_ == 0 or ops.amin(ops.eq(self, other), 0, 0):item()
end

-- -- shapes ---------------------------------------------------------------------------------------------------------
--- Splits a dimension into several dimensions.
---@param d integer
---@param sizes integer[] sizes of the new dimensions; one size may be -1, which is computed from the other sizes
---@return ps.Tensor
function T:unflatten(d, sizes)
  d = dim_index(self, d)
  local shape = {}
  for i = 0, self.ndim - 1 do
    if i == d then for _, n in ipairs(caller.list(sizes, "unflatten: the sizes")) do shape[#shape + 1] = n end
    else shape[#shape + 1] = self:size(i) end
  end
  local rest, known = nil, 1
  for i, n in ipairs(sizes) do
    if n == -1 and not rest then rest = i else known = known * caller.whole(n, "unflatten: a size", 0) end
  end
  if rest and known > 0 and self:size(d) % known == 0 then shape[d + rest] = self:size(d) / known
  elseif rest or known ~= self:size(d) then
    error(("unflatten: dimension %d has size %d, which is not the product of the sizes %s"):format(d, self:size(d),
      table.concat(sizes, ", ")))
  end
  return self:reshape(shape)
end

--- Expands this tensor to the shape of another tensor.
---@param other ps.Tensor
---@return ps.Tensor a view
function T:expand_as(other)
  if caller.tensor(other, "expand_as", "the other") == nil then error("expand_as: the other tensor is missing") end
  return self:expand(other:shape())
end

--- Repeats each element several times. With a dimension, repeats each slice along this dimension. The copies of an
--- element or slice are adjacent.
---@param repeats integer|ps.Tensor number of copies; a vector of integers contains a number for each slice
---@param d? integer (default: repeats the elements in row-major order)
---@return ps.Tensor
function T:repeat_interleave(repeats, d)
  local x = d == nil and self:reshape(-1) or self
  d = dim_index(x, d or 0)
  if x.ndim == 1 and type(repeats) == "number" and repeats % 1 == 0 and repeats > 0 and
    not (scope.grad_enabled() and x:needs_grad()) then                           -- faster, with the same result
    if repeats == 1 then return x:clone() end
    return x:unsqueeze(1):expand(-1, repeats):reshape(-1)
  end
  local n, list, at = x:size(d), is_tensor(repeats) and repeats:tolist() or nil, {}
  if not list then caller.whole(repeats, "repeat_interleave: the repeats", 0)
  elseif type(list) ~= "table" or #list ~= n or repeats.ndim ~= 1 or FLOAT[repeats.dtype_] then
    error(("repeat_interleave: the repeats are %s [%s]; for dimension %d they must be integers [%d]"):format(
      repeats:dtype(), table.concat(repeats:shape(), ", "), d, n))
  end
  for i = 0, n - 1 do
    for _ = 1, list and list[i + 1] or repeats do at[#at + 1] = i end
  end
  return x:index_select(d, tensor.tensor(at, { dtype = "int64", device = x:device() }))
end

-- -- parts ----------------------------------------------------------------------------------------------------------
--- Returns the slices along dimension d as several results. The slices do not have this dimension. They are views.
---@param d? integer (default 0)
---@return ps.Tensor ...
function T:unbind(d)
  d = dim_index(self, d or 0)
  local parts = {}
  for i = 0, self:size(d) - 1 do parts[i + 1] = self:select(d, i) end
  return unpack(parts)
end

local ALL = { -1 }

--- For a vector, returns a matrix that has the vector on a diagonal. For a matrix, returns its diagonal, which is a
--- view if the matrix is contiguous.
---@param diagonal? integer offset of the diagonal: 0 is the main diagonal, and positive offsets are above it
---@return ps.Tensor
function T:diag(diagonal)
  local k = caller.whole(diagonal or 0, "diag: the diagonal")
  if self.ndim == 1 then
    local n = self:size(0)
    local size = n + math.abs(k)
    local first = k >= 0 and k or -k * size
    if n > 0 and not (scope.grad_enabled() and self:needs_grad()) then           -- faster, with the same result
      local y = create.matrix(self, size, size, self.dtype_, 0)
      ops.copy_(ops.slice(ops.reshape(y, 1, ALL), 0, first, first + (n - 1) * (size + 1) + 1, size + 1), self)
      return y
    end
    local zeros = tensor.zeros({ size * size }, { dtype = self:dtype(), device = self:device() })
    local at = tensor.arange(first, first + n * (size + 1), size + 1, { dtype = "int64", device = self:device() })
    return ops.scatter(zeros, at, self, 0):reshape(size, size)
  end
  if self.ndim ~= 2 then
    error(("diag takes one or two dimensions, not [%s]"):format(table.concat(self:shape(), ", ")))
  end
  local rows, columns = self:size(0), self:size(1)
  local n = math.max(0, math.min(rows + math.min(k, 0), columns - math.max(k, 0)))
  local flat, first = self:reshape(-1), k >= 0 and k or -k * columns
  if n == 0 then return flat:slice(0, 0, 0) end
  return flat:slice(0, first, first + (n - 1) * (columns + 1) + 1, columns + 1)
end

return {}
