-- SPDX-License-Identifier: BSD-3-Clause
-- Methods and functions of tensors that call other ops and have no kernels of their own. autograd differentiates the
-- other ops. Names and meanings are PyTorch's.
local autocast = require "ps.core.autocast"
local bit = require "bit"
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local create = require "ps.tensor.create"
local tensor = require "ps.tensor"
local C, ops, caller = native.C, native.ops, native.caller
local error = caller.error
local dim_index = create.dim_index

local T = tensor.T
local M = {}

local FLOAT = native.FLOAT

local function list_of(value) return type(value) == "number" and { value } or value end

-- Converts a tensor of a half type to fp32, calls fn, and converts the result back to the tensor's type. fp32 and fp64
-- tensors are passed to fn unchanged.
local function wide(t, what, fn, ...)
  if not FLOAT[t.dtype_] then error(("%s takes a float tensor; convert with :float()"):format(what)) end
  if t.dtype_ == C.PS_F32 or t.dtype_ == C.PS_F64 then return fn(t, ...) end
  return ops.cast(fn(t:to("fp32"), ...), t.dtype_)
end

-- -- order ----------------------------------------------------------------------------------------------------------
--- Returns a copy with the elements in reverse order along some dimensions.
---@param dims integer|integer[]
---@return ps.Tensor of this shape
function T:flip(dims)
  local bits, two = 0, nil
  for _, d in ipairs(caller.list(list_of(dims), "flip: the dimensions")) do
    local one = bit.lshift(1, dim_index(self, d))
    two, bits = two or bit.band(bits, one) ~= 0, bit.bor(bits, one)
  end
  if two then error("flip: a dimension is named twice") end
  return ops.flip(self, bits)
end

--- Returns the elements, shifted by `shifts` along dimensions. Elements that are shifted past the end reappear at the
--- beginning.
---@param shifts integer|integer[]
---@param dims? integer|integer[] a dimension for each shift (by default, all elements are shifted in row-major order)
---@return ps.Tensor of this shape
function T:roll(shifts, dims)
  if type(shifts) == "number" and type(dims) == "number" then         -- faster, with the same result
    local d = dim_index(self, dims)
    local n = tonumber(self.shape_[d])
    local shift = n > 0 and caller.whole(shifts, "roll: the shift") % n or 0
    if shift == 0 then return self:clone() end
    return ops.concat({ ops.slice(self, d, n - shift, n, 1), ops.slice(self, d, 0, n - shift, 1) }, d)
  end
  if dims == nil then
    return self:reshape(-1):roll(caller.whole(shifts, "roll: the shift"), 0):reshape(self:shape())
  end
  shifts, dims = list_of(shifts), list_of(dims)
  if #shifts ~= #dims then error(("roll: %d shifts for %d dimensions; give one for each"):format(#shifts, #dims)) end
  local y = self
  for i, d in ipairs(dims) do
    d = dim_index(self, d)
    local n = self:size(d)
    local shift = n > 0 and caller.whole(shifts[i], "roll: the shift") % n or 0
    if shift > 0 then y = tensor.cat({ y:narrow(d, n - shift, shift), y:narrow(d, 0, n - shift) }, d) end
  end
  return rawequal(y, self) and self:clone() or y
end

--- Returns the tensor repeated along each dimension. This is PyTorch's repeat, whose name is a reserved word in Lua.
--- `...` are the numbers of repetitions, from the first dimension to the last.
---@param ... integer a number for each dimension; additional numbers at the beginning add leading dimensions
---@return ps.Tensor
function T:tile(...)
  if not scope.is_tensor(self) then caller.no_self "t:tile" end
  local times = type((...)) == "table" and (...) or { ... }
  if rawequal(times, (...)) and select(2, ...) ~= nil then
    error("tile: pass the numbers as one list or as separate arguments, not both")
  end
  local shape, spread, full, result = self:shape(), {}, {}, {}
  if #times < #shape then error(("tile: %d numbers for %d dimensions; give one for each"):format(#times, #shape)) end
  for i, n in ipairs(times) do
    local size = shape[i - #times + #shape] or 1
    caller.whole(n, "tile: a number of repetitions", 0)
    if n ~= 1 then spread[#spread + 1], full[#full + 1] = 1, n end
    spread[#spread + 1], full[#full + 1], result[i] = size, size, n * size
  end
  if #full > 8 then
    error(("tile: %d dimensions, with one more for each repeated dimension; the limit is 8"):format(#full))
  end
  if #full == #result then return self:reshape(result):clone() end        -- nothing is repeated
  return self:reshape(spread):expand(full):reshape(result)
end

--- Returns the elements sorted along a dimension.
---@param d? integer (default -1)
---@param descending? boolean (default false)
---@return ps.Tensor values of this shape
---@return ps.Tensor indices int64, of this shape
function T:sort(d, descending)
  d = dim_index(self, d or -1)
  if descending ~= nil then caller.typed(descending, "boolean", "sort: descending") end
  if self.numel_ == 0 then
    return self:clone(), tensor.zeros(self:shape(), { dtype = "int64", device = self:device() })
  end
  local last = self.ndim - 1
  local moved = d == last and self or self:transpose(d, -1):contiguous()
  local values, indices = ops.topk(moved, tonumber(moved.shape_[last]))
  if not descending then
    local bits = bit.lshift(1, last)
    values, indices = ops.flip(values, bits), ops.flip(indices, bits)
  end
  if d == last then return values, indices end
  return values:transpose(d, -1), indices:transpose(d, -1)
end

-- -- triangles ------------------------------------------------------------------------------------------------------
local function triangle(t, diagonal, upper, what)
  if t.ndim < 2 then error(("%s takes a tensor of 2 dimensions or more"):format(what)) end
  return ops.triangle(t, caller.whole(diagonal or 0, what .. ": the diagonal"), upper)
end

--- Keeps the elements on and below a diagonal of the last two dimensions, and sets all other elements to 0.
---@param diagonal? integer offset of the diagonal: 0 is the main diagonal, positive offsets are above it
---@return ps.Tensor of this shape
function T:tril(diagonal)
  return triangle(self, diagonal, 0, "tril")
end
--- Keeps the elements on and above a diagonal of the last two dimensions, and sets all other elements to 0.
---@param diagonal? integer offset of the diagonal: 0 is the main diagonal, positive offsets are above it
---@return ps.Tensor of this shape
function T:triu(diagonal)
  return triangle(self, diagonal, 1, "triu")
end

-- -- reductions -----------------------------------------------------------------------------------------------------
-- Returns the number that logsumexp subtracts from all elements. This is the largest element. If the largest element is
-- infinite, the result is 0, because the difference of infinities would be NaN.
local function shift_of(x, dims)
  return ops.nan_to_num(x:amax(dims, true), 0, 0, 0)
end

local function without(t, dims, keepdim, like)
  if keepdim then return t end
  local shape, gone = {}, {}
  for _, d in ipairs(list_of(dims)) do gone[dim_index(like, d)] = true end
  for d = 0, like.ndim - 1 do if not gone[d] then shape[#shape + 1] = like:size(d) end end
  return t:reshape(shape)
end

local function logsumexp(x, dims, keepdim)
  local shift = scope.no_grad(shift_of, x, dims)
  return without((x - shift):exp():sum(dims, true):log() + shift, dims, keepdim, x)
end
--- Returns log(sum(exp(x))) over some dimensions, computed without overflow. The elements must be floats.
---@param dims integer|integer[]
---@param keepdim? boolean
---@return ps.Tensor
function T:logsumexp(dims, keepdim)
  if dims == nil then error("logsumexp needs a dimension, or a list of dimensions") end
  return wide((autocast.full(self)), "logsumexp", logsumexp, dims, keepdim)
end

-- Returns x to the power 1 / p. Where x is 0, the gradient is 0, which is a subgradient of the norm at its minimum.
local function root(x, p)
  if not (x:needs_grad() and scope.grad_enabled()) then return p == 2 and x:sqrt() or x ^ (1 / p) end
  local zero = x:eq(0)
  local y = x:masked_fill(zero, 1)
  if p == 2 then y = y:sqrt() else y = y ^ (1 / p) end
  return y:masked_fill(zero, 0)
end

local function norm(x, p, dims, keepdim)
  if p == 2 then return root(x:square():sum(dims, keepdim), 2) end
  if p == 0 then return x:ne(0):to(x:dtype()):sum(dims, keepdim) end
  if p == math.huge then return x:abs():amax(dims, keepdim) end
  if p == -math.huge then return x:abs():amin(dims, keepdim) end
  if p == 1 then return x:abs():sum(dims, keepdim) end
  if p > 1 or not (x:needs_grad() and scope.grad_enabled()) then
    return root((x:abs() ^ p):sum(dims, keepdim), p)
  end
  local zero = x:eq(0)            -- the derivative is infinite where x is 0; like PyTorch, we use 0
  return root((x:abs():masked_fill(zero, 1) ^ p):masked_fill(zero, 0 ^ p):sum(dims, keepdim), p)
end
--- Returns the p-norm over some dimensions. The elements must be floats. p can be any number, including infinities.
--- With p = 0 the elements that are not 0 are counted. The gradient is 0 where the norm is 0 and where an element is 0.
---@param p? number (default 2)
---@param dims? integer|integer[] (default: all)
---@param keepdim? boolean
---@return ps.Tensor
function T:norm(p, dims, keepdim)
  if (p == nil or p == 2) and dims == nil and not keepdim and (self.dtype_ == C.PS_F32 or self.dtype_ == C.PS_F64)
    and not (self:needs_grad() and scope.grad_enabled()) and not native.cast then
    return ops.sqrt(ops.sum(ops.mul(self, self), 0, 0, 0))            -- faster, with the same result
  end
  p = caller.typed(p or 2, "number", "norm: p")
  if not FLOAT[self.dtype_] then return norm(self:to("fp32"), p, dims, keepdim) end
  return wide((autocast.full(self)), "norm", norm, p, dims, keepdim)
end

local ALL = { -1 }

-- -- new tensors ----------------------------------------------------------------------------------------------------
local NEW = { dtype = "string", device = "string", requires_grad = "boolean" }

local function with_gradient(t, yes) return yes and t:requires_grad(true) or t end

--- Returns a matrix with ones on the main diagonal and zeros elsewhere.
---@param n integer number of rows
---@param m? integer number of columns (default n)
---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
---@return ps.Tensor [n, m]
function M.eye(n, m, options)
  if type(m) == "table" then m, options = nil, m end
  options = caller.options(options, "ps.eye", NEW)
  caller.whole(n, "ps.eye: the rows", 0)
  m = m and caller.whole(m, "ps.eye: the columns", 0) or n
  local t = tensor.zeros({ n, m }, { dtype = options.dtype, device = options.device })
  local diagonal = math.min(n, m)
  if diagonal > 0 then
    ops.fill_(ops.slice(ops.reshape(t, 1, ALL), 0, 0, (diagonal - 1) * (m + 1) + 1, m + 1), 1)
  end
  return with_gradient(t, options.requires_grad)
end

--- Returns `steps` equally spaced numbers from `first` to `last`.
---@param first number
---@param last number
---@param steps integer
---@param options? {dtype?: string, device?: string, requires_grad?: boolean} the dtype must be a float type
---@return ps.Tensor [steps]
function M.linspace(first, last, steps, options)
  options = caller.options(options, "ps.linspace", NEW)
  caller.typed(first, "number", "ps.linspace: the first number")
  caller.typed(last, "number", "ps.linspace: the last number")
  caller.whole(steps, "ps.linspace: the steps", 0)
  local device = options.device and native.device_index(options.device) or create.default_place()
  local step = steps > 1 and (last - first) / (steps - 1) or 0
  local dtype = options.dtype and native.dtype_code(options.dtype) or create.default_code()
  -- The second half is computed backwards from `last`, so that the last number is exact.
  local half = math.floor(steps / 2)
  local y = create.vector(steps - half, C.PS_F64, device)
  create.alone(y, ops.arange_(y, first, step))
  if half > 0 then
    local rest = create.vector(half, C.PS_F64, device)
    create.alone(rest, ops.arange_(rest, half - 1, -1))
    y = ops.concat({ y, ops.affine(rest, -step, last) }, 0)
  end
  if y.dtype_ ~= dtype then y = ops.cast(y, dtype) end
  return with_gradient(y, options.requires_grad)
end

--- Returns a one-hot vector of type int64 for each class. The vector is 1 at the index of the class and 0 elsewhere.
---@param index ps.Tensor integers [...], the classes, from 0
---@param classes? integer number of classes (default: the largest class + 1)
---@return ps.Tensor
function M.one_hot(index, classes)
  if caller.tensor(index, "one_hot", "the classes") == nil then error("one_hot: no tensor was given") end
  if classes == nil or classes == -1 then classes = index:amax():item() + 1 end
  caller.whole(classes, "one_hot: the number of classes", 1)
  local n, at = tonumber(index.numel_), index:contiguous()
  if at.dtype_ ~= C.PS_I64 then at = ops.cast(at, C.PS_I64) end
  local y = create.matrix(index, n, classes, C.PS_I64, 0)
  local ones = create.matrix(index, n, 1, C.PS_I64, 1)
  create.alone(y, ops.scatter_(y, ops.reshape(at, 2, { n, 1 }), ones, 1))
  if index.ndim == 1 then return y end
  local shape = index:shape()
  shape[#shape + 1] = classes
  return ops.reshape(y, #shape, shape)
end

-- -- einsum ---------------------------------------------------------------------------------------------------------
local function letters(text, what)
  local list, seen = {}, {}
  for c in text:gmatch "." do
    if not c:match "%a" then error(("einsum: '%s' in '%s'; dimensions must be letters"):format(c, what)) end
    if seen[c] then error(("einsum: '%s' occurs twice in '%s'; diagonals are not supported"):format(c, text)) end
    list[#list + 1], seen[c] = c, #list
  end
  return list, seen
end

-- Permutes t, whose dimensions have the letters `from`, so that its dimensions have the order `to`. `from` must contain
-- all letters of `to`.
local function arranged(t, from, to)
  local place, axes = {}, {}
  for i, c in ipairs(from) do place[c] = i - 1 end
  for i, c in ipairs(to) do axes[i] = place[c] end
  return #axes > 1 and t:permute(axes) or t
end

local function product(sizes, list)
  local n = 1
  for _, c in ipairs(list) do n = n * sizes[c] end
  return n
end

local function has(list, c)
  for _, other in ipairs(list) do if other == c then return true end end
  return false
end

local function joined(...)
  local all = {}
  for i = 1, select("#", ...) do for _, c in ipairs((select(i, ...))) do all[#all + 1] = c end end
  return all
end

-- Sums t over each dimension whose letter does not occur in another operand or in the result.
local function drop(t, list, keep)
  local rest, gone = {}, {}
  for i, c in ipairs(list) do
    if keep(c) then rest[#rest + 1] = c else gone[#gone + 1] = i - 1 end
  end
  if #gone == 0 then return t, list end
  return t:sum(gone), rest
end

-- Multiplies two tensors with one matrix product. The product sums over the dimensions that occur only in these two
-- tensors.
local function contract(a, in_a, b, in_b, keep, sizes)
  a, in_a = drop(a, in_a, function(c) return keep(c) or has(in_b, c) end)
  b, in_b = drop(b, in_b, function(c) return keep(c) or has(in_a, c) end)
  local batch, summed, left, right = {}, {}, {}, {}
  for _, c in ipairs(in_a) do
    if not has(in_b, c) then left[#left + 1] = c
    elseif keep(c) then batch[#batch + 1] = c
    else summed[#summed + 1] = c end
  end
  for _, c in ipairs(in_b) do if not has(in_a, c) then right[#right + 1] = c end end
  local B, L, K, R = product(sizes, batch), product(sizes, left), product(sizes, summed), product(sizes, right)
  local x = arranged(a, in_a, joined(batch, left, summed)):reshape(B, L, K)
  local y = arranged(b, in_b, joined(batch, summed, right)):reshape(B, K, R)
  local shape, list = {}, joined(batch, left, right)
  for i, c in ipairs(list) do shape[i] = sizes[c] end
  return (#summed == 0 and x * y or x:matmul(y)):reshape(shape), list        -- without summed dimensions, x * y
end

--- Computes sums of products in Einstein's notation, such as "bij,bjk->bik". Without "->", the result has the letters
--- that occur once, in alphabetical order. Tensors are multiplied two at a time, from left to right.
---@param text string a letter for each dimension; "..." is not supported, and a letter must not occur twice in one
--- tensor
---@param ... ps.Tensor floats
---@return ps.Tensor
function M.einsum(text, ...)
  caller.typed(text, "string", "einsum: the notation")
  local inputs, count, sizes, uses = {}, select("#", ...), {}, {}
  local left, right = text:gsub("%s", ""):match "^(.-)%->(.*)$"
  left = left or text:gsub("%s", "")
  for part in (left .. ","):gmatch "([^,]*)," do inputs[#inputs + 1] = letters(part, text) end
  if #inputs ~= count then error(("einsum: '%s' is for %d tensors, but %d were given"):format(text, #inputs, count)) end
  local list = { ... }
  for i, names in ipairs(inputs) do
    local t = list[i]
    if caller.tensor(t, "einsum", i) == nil then error(("einsum: tensor %d is missing"):format(i)) end
    if t.ndim ~= #names then
      error(("einsum: tensor %d has %d dimensions, but '%s' has %d for it"):format(i, t.ndim, text, #names))
    end
    for d, c in ipairs(names) do
      local size = t:size(d - 1)
      if sizes[c] and sizes[c] ~= size then
        error(("einsum: dimension '%s' has sizes %d and %d in '%s'; they must be "
          .. "equal"):format(c, sizes[c], size, text))
      end
      sizes[c], uses[c] = size, (uses[c] or 0) + 1
    end
  end
  local out = right and letters(right, text)
  if not out then
    out = {}
    for c, n in pairs(uses) do if n == 1 then out[#out + 1] = c end end
    table.sort(out)
  end
  for _, c in ipairs(out) do
    if not sizes[c] then error(("einsum: no tensor has the dimension '%s' of '%s'"):format(c, text)) end
  end
  local t, names = list[1], inputs[1]
  for i = 2, count do
    t, names = contract(t, names, list[i], inputs[i], function(c)
      if has(out, c) then return true end
      for k = i + 1, count do if has(inputs[k], c) then return true end end
      return false
    end, sizes)
  end
  t, names = drop(t, names, function(c) return has(out, c) end)
  return arranged(t, names, out)
end

return M
