-- SPDX-License-Identifier: BSD-3-Clause
-- Windows, diagonals, grids and other shapes, products with an addend, and methods that work in place. They call other
-- ops.
local array = require "ps.core.array"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local create = require "ps.tensor.create"
local indexing = require "ps.tensor.index"
local tensor = require "ps.tensor"
local C, ops, caller = native.C, native.ops, native.caller
local error = caller.error
local is_tensor = scope.is_tensor
local dim_index = create.dim_index

local T = tensor.T
local M = {}

local function given(t, call, name)
  return caller.tensor(t, call, name) or error(("%s: %s is missing"):format(call, name))
end

-- -- dimensions -----------------------------------------------------------------------------------------------------
--- Moves dimensions to other positions. The other dimensions keep their order. The result is a view.
---@param from integer|integer[]
---@param to integer|integer[] the new positions, one for each dimension in `from`
---@return ps.Tensor
function T:movedim(from, to)
  if type(from) == "number" and type(to) == "number" and self.ndim == 2 and
    dim_index(self, from) ~= dim_index(self, to) then return self:transpose(0, 1) end
  from = type(from) == "number" and { from } or caller.list(from, "movedim: the dimensions")
  to = type(to) == "number" and { to } or caller.list(to, "movedim: the places")
  if #from ~= #to then error(("movedim: %d dimensions for %d places"):format(#from, #to)) end
  local axes, moved = {}, {}
  for i = 1, #from do
    local a, b = dim_index(self, from[i]), dim_index(self, to[i])
    if moved[a] or axes[b + 1] then error("movedim: a dimension is named twice") end
    moved[a], axes[b + 1] = true, a
  end
  local at = 1
  for d = 0, self.ndim - 1 do
    if not moved[d] then
      while axes[at] do at = at + 1 end
      axes[at] = d
    end
  end
  return ops.permute(self, axes)
end

T.swapaxes, T.swapdims = T.transpose, T.transpose

--- Returns this tensor in the shape of another tensor, in row-major order.
---@param other ps.Tensor
---@return ps.Tensor
function T:reshape_as(other) return self:reshape(given(other, "reshape_as", "the other tensor"):shape()) end
--- Returns a view of the same data in the shape of another tensor. Raises an error if reshape_as would have to copy.
---@param other ps.Tensor
---@return ps.Tensor
function T:view_as(other) return self:view(given(other, "view_as", "the other tensor"):shape()) end

--- Returns all windows of `size` elements along dimension d. The result is a copy. (PyTorch's result is a view.)
---@param d integer
---@param size integer size of a window
---@param step integer distance from the start of a window to the start of the next window
---@return ps.Tensor with a dimension d whose size is the number of windows, and with an additional last dimension of
--- size `size`
function T:unfold(d, size, step)
  d = dim_index(self, d)
  caller.whole(size, "unfold: the size", 1)
  caller.whole(step, "unfold: the step", 1)
  local n = self:size(d)
  if size > n then error(("unfold: the size is %d, but dimension %d has size %d"):format(size, d, n)) end
  if native.on_host(self) then return ops.unfold(self, d, size, step) end
  local where = { dtype = "int64", device = self:device() }
  local starts = tensor.arange(0, n - size + 1, step, where)
  local index = starts:unsqueeze(1) + tensor.arange(0, size, 1, where)
  return self:index_select(d, index):movedim(d + 1, -1)
end

--- Returns the diagonal of two dimensions as the last dimension. The result is a copy. (PyTorch's result is a view.)
---@param offset? integer 0 is the main diagonal, and positive offsets are above it
---@param dim1? integer (default 0)
---@param dim2? integer (default 1)
---@return ps.Tensor without dim1 and dim2, and with the diagonal as an additional last dimension
function T:diagonal(offset, dim1, dim2)
  local k = caller.whole(offset or 0, "diagonal: the offset")
  local a, b = dim_index(self, dim1 or 0), dim_index(self, dim2 or 1)
  if a == b then error(("diagonal: both dimensions are %d"):format(a)) end
  if self.ndim == 2 and a == 0 and self:is_contiguous() then return self:diag(k) end
  local x = self:movedim({ a, b }, { -2, -1 })
  local rows, columns = x:size(-2), x:size(-1)
  local n = math.max(0, math.min(rows + math.min(k, 0), columns - math.max(k, 0)))
  local flat, first = x:flatten(-2, -1), k >= 0 and k or -k * columns
  if n == 0 then return flat:slice(-1, 0, 0) end
  return flat:slice(-1, first, first + (n - 1) * (columns + 1) + 1, columns + 1)
end

local ALL = { -1 }

--- Sets the elements of the main diagonal to one number, in place.
---@param value number
---@return ps.Tensor self
function T:fill_diagonal_(value)
  caller.typed(value, "number", "fill_diagonal_: the value")
  if self.ndim ~= 2 then
    error(("fill_diagonal_ takes a matrix, not [%s]"):format(table.concat(self:shape(), ", ")))
  end
  create.check_gradients(self, nil, "fill_diagonal_",
    "masked_fill(ps.eye(n, { dtype = \"bool\" }), value)")
  local n, columns = math.min(self:size(0), self:size(1)), self:size(1)
  if n > 0 and self:is_contiguous() then
    T.fill_(ops.slice(ops.reshape(self, 1, ALL), 0, 0, (n - 1) * (columns + 1) + 1, columns + 1), value)
    return self
  end
  local index = tensor.arange(0, n, 1, { dtype = "int64", device = self:device() })
  indexing.set(self, { index, index }, value)
  return self
end

local int64_array, INDICES = array "int64_t", { dtype = "int64", device = "cpu" }

-- In row i, a triangle contains the columns first_of() to last_of() - 1.
local function first_of(i, offset, upper) return upper == 1 and math.max(0, i + offset) or 0 end
local function last_of(i, columns, offset, upper)
  return upper == 1 and columns or math.max(0, math.min(columns, i + offset + 1))
end

-- Returns the coordinates of the elements of a triangle, as a tensor with two rows.
local function triangle_indices(call, rows, columns, offset, upper)
  caller.whole(rows, call .. ": the rows", 0)
  caller.whole(columns, call .. ": the columns", 0)
  offset = caller.whole(offset or 0, call .. ": the offset")
  local n = 0
  if upper == 1 then rows = math.min(rows, math.max(0, columns - offset)) end             -- later rows have no elements
  for i = 0, rows - 1 do n = n + math.max(0, last_of(i, columns, offset, upper) - first_of(i, offset, upper)) end
  local buffer, at = int64_array(math.max(1, 2 * n)), 0
  for i = 0, rows - 1 do
    for j = first_of(i, offset, upper), last_of(i, columns, offset, upper) - 1 do
      buffer[at], buffer[n + at], at = i, j, at + 1
    end
  end
  local y = tensor.empty({ 2, n }, INDICES)
  native.check(C.ps_tensor_write(y, buffer, 16 * n))
  return tensor.to_device(y, create.default_place())
end
--- Returns the row and column indices of the elements on and below a diagonal, in row-major order.
---@param rows integer
---@param columns integer
---@param offset? integer 0 is the main diagonal, positive offsets are above it
---@return ps.Tensor int64 [2, N]
function M.tril_indices(rows, columns, offset) return triangle_indices("ps.tril_indices", rows, columns, offset, 0) end
--- Returns the row and column indices of the elements on and above a diagonal, in row-major order.
---@param rows integer
---@param columns integer
---@param offset? integer 0 is the main diagonal, positive offsets are above it
---@return ps.Tensor int64 [2, N]
function M.triu_indices(rows, columns, offset) return triangle_indices("ps.triu_indices", rows, columns, offset, 1) end

local GRID = { indexing = "string" }
local INDEXING = { ij = true, xy = true }

--- Returns the coordinates of a grid. Result i has the elements of vector i along dimension i, and is constant along
--- all other dimensions. The results are views.
---@param vectors ps.Tensor[] vectors, each of one dimension
---@param options? {indexing?: "ij"|"xy"} "xy" exchanges the first two dimensions of the results (default "ij")
---@return ps.Tensor ... one for each vector
function M.meshgrid(vectors, options)
  local call = "ps.meshgrid"
  if is_tensor(vectors) then error("ps.meshgrid takes a list of vectors: ps.meshgrid({ x, y })") end
  caller.list(vectors, call .. ": the vectors")
  local how = caller.options(options, call, GRID).indexing or "ij"
  caller.one_of(how, INDEXING, call .. ": indexing")
  local shape, results, n = {}, {}, #vectors
  for i, v in ipairs(vectors) do
    if given(v, call, i).ndim > 1 then error(("%s: tensor %d has %d dimensions, not 1"):format(call, i, v.ndim)) end
    shape[i] = v:numel()
  end
  for i, v in ipairs(vectors) do
    local ones = {}
    for k = 1, n do ones[k] = k == i and -1 or 1 end
    local y = v:reshape(ones):expand(shape)
    results[i] = how == "xy" and n > 1 and y:transpose(0, 1) or y
  end
  return unpack(results)
end

-- -- arithmetic -----------------------------------------------------------------------------------------------------
T.clip = T.clamp
--- Returns the maximum of each element and a bound.
---@param low number
---@return ps.Tensor
function T:clamp_min(low) return self:clamp(caller.typed(low, "number", "clamp_min: the bound")) end
--- Returns the minimum of each element and a bound.
---@param high number
---@return ps.Tensor
function T:clamp_max(high) return self:clamp(nil, caller.typed(high, "number", "clamp_max: the bound")) end

local VALUE = { value = "number" }
local function value_of(options, call)
  if type(options) == "number" then return options end
  return caller.options(options, call, VALUE).value or 1
end
local PAIRS = { { "a", "b" }, { "a", "the tensor" }, { "b", "the tensor" } }
local function check_three(t, a, b, call)
  given(a, call, "a")
  given(b, call, "b")
  create.check_broadcast(a, b, call, PAIRS[1])
  create.check_broadcast(a, t, call, PAIRS[2])
  create.check_broadcast(b, t, call, PAIRS[3])
end

--- Returns this tensor + value * a * b.
---@param a ps.Tensor
---@param b ps.Tensor
---@param options? number|{value?: number} default 1
---@return ps.Tensor
function T:addcmul(a, b, options)
  check_three(self, a, b, "addcmul")
  local widened_to, narrow = require("ps.tensor.math").widened_to, a
  a = widened_to(self, widened_to(b, a))
  b = widened_to(self, widened_to(narrow, b))
  return self + a * b * value_of(options, "addcmul")
end
--- Returns this tensor + value * a / b.
---@param a ps.Tensor
---@param b ps.Tensor
---@param options? number|{value?: number} default 1
---@return ps.Tensor
function T:addcdiv(a, b, options)
  check_three(self, a, b, "addcdiv")
  return self + a / b * value_of(options, "addcdiv")
end

local ROW, NO_SIZES = { 1, -1 }, {}
local FACTORS = { alpha = "number", beta = "number" }
for _, name in ipairs { "addmm", "baddbmm", "addmv" } do
  --- Returns beta times this tensor plus alpha times the product of a and b.
  ---@param a ps.Tensor
  ---@param b ps.Tensor
  ---@param options? {alpha?: number, beta?: number} alpha, beta: default 1; if beta is 0, the values of this tensor are
  --- not used
  ---@return ps.Tensor
  T[name] = function(self, a, b, options)
    options = caller.options(options, name, FACTORS)
    local y, alpha, beta = given(a, name, "a"):matmul(given(b, name, "b")), options.alpha or 1, options.beta or 1
    if alpha ~= 1 then y = y * alpha end
    if beta == 0 then return y end
    return y + (beta == 1 and self or self * beta)
  end
end

--- Multiplies the elements of two vectors, and returns the sum of the products.
---@param other ps.Tensor [N]
---@return ps.Tensor of 0 dimensions
function T:dot(other)
  if given(other, "dot", "the other vector").ndim ~= 1 or self.ndim ~= 1 or other:size(0) ~= self:size(0) then
    error(("dot takes two vectors of one length, not [%s] and [%s]"):format(table.concat(self:shape(), ", "),
      table.concat(other:shape(), ", ")))
  end
  if self.dtype_ == other.dtype_ and self:is_float() then                      -- fewer ops, with the same result
    return ops.reshape(ops.linear(self, ops.reshape(other, 2, ROW), nil, nil, 1), 0, NO_SIZES)
  end
  return self:matmul(other)
end
--- Returns the product of this matrix and a vector.
---@param v ps.Tensor [M]
---@return ps.Tensor [N], for a matrix [N, M]
function T:mv(v)
  if self.ndim ~= 2 or given(v, "mv", "the vector").ndim ~= 1 then
    error(("mv takes a matrix and a vector, not [%s] and [%s]"):format(table.concat(self:shape(), ", "),
      table.concat(v:shape(), ", ")))
  end
  if self.dtype_ == v.dtype_ and self:is_float() and self:is_contiguous() then          -- faster, with the same result
    return ops.linear(v, self, nil, nil, 1)
  end
  return self:matmul(v)
end

--- Returns the differences of adjacent elements along a dimension.
---@param n? integer number of times to take the differences (default 1)
---@param d? integer (default -1)
---@return ps.Tensor
function T:diff(n, d)
  d = dim_index(self, d or -1)
  local x = self
  if caller.whole(n or 1, "diff: n", 0) == 0 then return x:clone() end
  for _ = 1, math.min(n or 1, x:size(d)) do
    local size = math.max(0, x:size(d) - 1)
    x = x:narrow(d, x:size(d) - size, size) - x:narrow(d, 0, size)
  end
  return x
end

for name, factor in pairs { log2 = 1 / math.log(2), log10 = 1 / math.log(10) } do
  --- Returns the logarithm of each element. The name of the method contains the base.
  ---@return ps.Tensor
  T[name] = function(self) return ops.affine(ops.log(self), factor, -0.0) end
end

-- -- in place -------------------------------------------------------------------------------------------------------
local SHOWN = { lerp = "lerp(stop, weight)", clamp = "clamp(low, high)", clip = "clip(low, high)",
  clamp_min = "clamp_min(low)", clamp_max = "clamp_max(high)", pow = "pow(b)", addcmul = "addcmul(a, b)",
  addcdiv = "addcdiv(a, b)", addmm = "addmm(a, b)", exp = "exp()", log = "log()", sqrt = "sqrt()", abs = "abs()",
  neg = "neg()", floor = "floor()", ceil = "ceil()", round = "round()", relu = "relu()", sigmoid = "sigmoid()",
  tanh = "tanh()", reciprocal = "reciprocal()", cumsum = "cumsum(d)", tril = "tril(d)", triu = "triu(d)",
  nan_to_num = "nan_to_num()", square = "square()" }

for name, instead in pairs(SHOWN) do
  --- Performs the method without the trailing _, and writes the result into this tensor. Raises an error if this tensor
  --- or an argument requires a gradient, or if the result's type or shape differs from this tensor's.
  ---@param a? any
  ---@param b? any
  ---@param c? any
  ---@return ps.Tensor self
  T[name .. "_"] = function(self, a, b, c)
    create.check_gradients(self, a, name .. "_", instead)
    create.check_gradients(self, b, name .. "_", instead)
    local y = scope.no_grad(tensor.exact[name], self, a, b, c)
    if y.dtype_ ~= self.dtype_ or not tensor.same_shape(y, self) then
      error(("%s_: the result is a tensor of %s [%s], which does not fit the tensor of %s [%s]; write t = t:%s")
        :format(name, y:dtype(), table.concat(y:shape(), ", "), self:dtype(), table.concat(self:shape(), ", "),
        instead))
    end
    ops.copy_(self, y)
    return self
  end
end

return M
