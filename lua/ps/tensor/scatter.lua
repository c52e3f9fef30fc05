-- SPDX-License-Identifier: BSD-3-Clause
-- Methods that read and write elements of tensors. The elements are selected by indices along a dimension or by a mask.
-- Methods that return a new tensor have gradients. Methods whose names end in _ work in place and reject tensors that
-- need a gradient.
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

local function shown(t) return "[" .. table.concat(t:shape(), ", ") .. "]" end

local function given(t, call, name)
  return caller.tensor(t, call, name) or error(("%s: %s is missing"):format(call, name))
end

-- Shortens an index that is the same along all dimensions after d because it was expanded. Drops these dimensions. The
-- shortened index selects whole slices, which is faster than selecting elements.
local function shortened(x, d, idx)
  if idx.ndim ~= x.ndim or d == idx.ndim - 1 then return idx end
  local expanded = false
  for i = d + 1, idx.ndim - 1 do
    if idx.shape_[i] ~= x.shape_[i] then return idx end
    if idx.shape_[i] > 1 then
      if idx.stride_[i] ~= 0 then return idx end
      expanded = true
    end
  end
  for _ = d + 1, expanded and idx.ndim - 1 or d do idx = idx:select(-1, 0) end
  return idx
end

-- Checks d and the index. Returns d as an index counted from 0, and the index.
local function along(x, d, idx, call)
  d = dim_index(x, d)
  if given(idx, call, "the index").ndim ~= x.ndim then
    error(("%s: the index has shape %s, but the tensor has shape %s; they must have the same number of dimensions")
      :format(call, shown(idx), shown(x)))
  end
  return d, shortened(x, d, idx)
end

-- Returns the part of src that an index uses. As in PyTorch, src may be larger than the index. A number becomes a
-- tensor of the index's shape.
local function part_for(x, idx, src, call)
  if type(src) == "number" then
    return create.full(idx:shape(), src, { dtype = x:dtype(), device = x:device() })
  end
  if given(src, call, "the source").ndim ~= idx.ndim then
    error(("%s: the source has shape %s, but the index has shape %s; they must have the same number of dimensions")
      :format(call, shown(src), shown(idx)))
  end
  if src.dtype_ ~= x.dtype_ then
    error(("%s: the source has type %s, but the tensor has type %s; convert the source with :to"):format(call,
      src:dtype(), x:dtype()))
  end
  for d = 0, src.ndim - 1 do
    local n = tonumber(idx.shape_[d])
    if src.shape_[d] < n then
      error(("%s: the source has shape %s, smaller than the index, %s"):format(call, shown(src), shown(idx)))
    end
    if src.shape_[d] > n then src = src:narrow(d, 0, n) end
  end
  return src
end

--- Picks elements along dimension d. For example, for d = 1 and three dimensions, element [i][j][k] of the result is
--- element [i][idx[i][j][k]][k] of x.
---@param d integer
---@param idx ps.Tensor integers, with x's number of dimensions
---@return ps.Tensor of idx's shape
function T:gather(d, idx)
  local at, short = along(self, d, idx, "gather")
  return ops.gather(self, short, at)
end

--- Returns a copy of x in which the elements of src are added to the elements that gather(d, idx) would read. The
--- elements of src are added in row-major order.
---@param d integer
---@param idx ps.Tensor integers
---@param src ps.Tensor|number of idx's shape or larger
---@return ps.Tensor of x's shape
function T:scatter_add(d, idx, src)
  local at, short = along(self, d, idx, "scatter_add")
  return ops.scatter_add(self, short, part_for(self, idx, src, "scatter_add"), at)
end

local SCATTER = { add = "scatter_add", multiply = "prod" }

--- Returns a copy of x in which the elements of src replace the elements that gather(d, idx) would read. If several
--- elements of src have the same target, the last one in row-major order is written, and the gradient of the other
--- elements of src is 0.
---@param d integer
---@param idx ps.Tensor integers
---@param src ps.Tensor|number of idx's shape or larger
---@param reduce? "add"|"multiply" combines src with the elements instead of replacing them; "multiply" has no gradient
---@return ps.Tensor of x's shape
function T:scatter(d, idx, src, reduce)
  if reduce ~= nil then
    local how = caller.one_of(reduce, SCATTER, "scatter: reduce")
    if how == "scatter_add" then return self:scatter_add(d, idx, src) end
    return self:scatter_reduce(d, idx, src, how)
  end
  local at, short = along(self, d, idx, "scatter")
  return ops.scatter(self, short, part_for(self, idx, src, "scatter"), at)
end

-- For each operation: the code of scatter_reduce's attribute, and the operation's neutral element.
local REDUCE = { sum = { nil, 0 }, mean = { nil, 0 }, amax = { 0, -math.huge }, amin = { 1, math.huge },
  prod = { 2, 1 } }

--- Returns a copy of x in which the elements of src are combined with the elements that gather(d, idx) would read. With
--- amax and amin, equal elements share the gradient. prod has no gradient.
---@param d integer
---@param idx ps.Tensor integers
---@param src ps.Tensor|number of idx's shape or larger
---@param reduce "sum"|"mean"|"amax"|"amin"|"prod"
---@param include_self? boolean (default true); with false, elements of src replace an element of x instead of being
--- combined with it, and this element gets no share of the gradient. (PyTorch loses a share if such an element equals
--- the result)
---@return ps.Tensor of x's shape
function T:scatter_reduce(d, idx, src, reduce, include_self)
  local call = "scatter_reduce"
  local how = caller.one_of(reduce, REDUCE, "scatter_reduce: reduce")
  if include_self ~= nil then caller.typed(include_self, "boolean", "scatter_reduce: include_self") end
  local at, short = along(self, d, idx, call)
  local x, part = self, part_for(self, idx, src, call)
  if how[1] == 2 and scope.grad_enabled() and (x:needs_grad() or part:needs_grad()) then
    error("scatter_reduce: a product has no gradient here; call it inside ps.no_grad, or for positive numbers write "
      .. "(x:log()):scatter_add(d, idx, src:log()):exp()")
  end
  if include_self == false then
    local first = how[2]
    if not x:is_float() and math.abs(first) == math.huge then
      error(("%s: include_self = false with %s takes floats, not %s; convert with :double()"):format(call, reduce,
        x:dtype()))
    end
    x = ops.scatter(x, short, create.full(idx:shape(), first, { dtype = x:dtype(), device = x:device() }), at)
  end
  if how[1] then return ops.scatter_reduce(x, short, part, at, how[1]) end
  local sum = ops.scatter_add(x, short, part, at)
  if reduce == "sum" then return sum end
  if not x:is_float() then error(("%s: mean takes floats, not %s; convert with :float()"):format(call, x:dtype())) end
  local count = scope.no_grad(function()
    local like = { dtype = self:dtype(), device = self:device() }
    local own = create.full(self:shape(), include_self == false and 0 or 1, like)
    return ops.scatter_add(own, short, create.full(idx:shape(), 1, like), at):clamp(1)
  end)
  return sum / count
end

-- Returns x as [outer, size, inner], where `size` is the size of dimension d. Also returns the index and the shape that
-- a source must have.
local function rows_along(x, d, idx, call)
  d = dim_index(x, d)
  if given(idx, call, "the index").ndim > 1 then
    error(("%s: the index has shape %s; it must have at most one dimension"):format(call, shown(idx)))
  end
  local shape, outer, inner = x:shape(), 1, 1
  for i = 1, d do outer = outer * shape[i] end
  for i = d + 2, #shape do inner = inner * shape[i] end
  local n, flat = idx:numel(), idx:reshape(-1)
  local whole = { outer, n, inner }
  if outer == 1 then return x:reshape(shape[d + 1], inner), flat, 0, { n, inner }, d end
  return x:reshape(outer, shape[d + 1], inner), flat:reshape(1, -1):expand(outer, n), 1, whole, d
end

-- Returns src as n slices of x along dimension d, in the shape that rows_along returned.
local function part_along(x, d, n, src, shape, call)
  if type(src) == "number" then return create.full(shape, src, { dtype = x:dtype(), device = x:device() }) end
  local want = x:shape()
  want[d + 1] = n
  if given(src, call, "the source").ndim ~= x.ndim or table.concat(src:shape(), ", ") ~= table.concat(want, ", ") then
    error(("%s: the source has shape %s; for %d indices of dimension %d it must be [%s]"):format(call, shown(src), n, d,
      table.concat(want, ", ")))
  end
  if src.dtype_ ~= x.dtype_ then
    error(("%s: the source has type %s, but the tensor has type %s; convert the source with :to"):format(call,
      src:dtype(), x:dtype()))
  end
  return src:reshape(shape)
end

local function put_along(op, x, d, idx, src, call)
  if d == 0 and is_tensor(idx) and is_tensor(src) and idx.ndim == 1 and x.ndim == 2 and src.ndim == 2
    and src.dtype_ == x.dtype_ and src.shape_[0] == idx.shape_[0] and src.shape_[1] == x.shape_[1] then
    return op(x, idx, src, 0)                                 -- rows: faster, with the same result
  end
  if d == 0 and is_tensor(idx) and type(src) == "number" and idx.ndim == 1 and x.ndim == 2 and idx.numel_ > 0 and
    x.shape_[1] > 0 then
    local n, columns = tonumber(idx.shape_[0]), tonumber(x.shape_[1])
    return op(x, idx, create.matrix(x, n, columns, x.dtype_, create.held(src, x.dtype_)), 0)
  end
  local rows, index, at, shape, dim = rows_along(x, d, idx, call)
  return op(rows, index, part_along(x, dim, idx:numel(), src, shape, call), at):reshape(x:shape())
end

local ALPHA = { alpha = "number" }

--- Returns a copy of x to which slices of src are added. For each n in order, alpha times slice n of src is added to
--- the slice at index idx[n] of dimension d.
---@param d integer
---@param idx ps.Tensor integers [N]
---@param src ps.Tensor of x's shape, except that dimension d has the size N
---@param alpha? number|{alpha?: number} default 1
---@return ps.Tensor of x's shape
function T:index_add(d, idx, src, alpha)
  if type(alpha) == "table" then alpha = caller.options(alpha, "index_add", ALPHA).alpha end
  if alpha ~= nil and alpha ~= 1 then src = given(src, "index_add", "the source") * alpha end
  return put_along(ops.scatter_add, self, d, idx, given(src, "index_add", "the source"), "index_add")
end

--- Returns a copy of x in which slice n of src replaces the slice at index idx[n] of dimension d. If several indices
--- are equal, the last slice is used.
---@param d integer
---@param idx ps.Tensor integers [N]
---@param src ps.Tensor of x's shape, except that dimension d has the size N
---@return ps.Tensor of x's shape
function T:index_copy(d, idx, src)
  return put_along(ops.scatter, self, d, idx, given(src, "index_copy", "the source"), "index_copy")
end

--- Returns a copy of x in which a number replaces the slices at the given indices of dimension d.
---@param d integer
---@param idx ps.Tensor integers [N]
---@param value number|ps.Tensor a number, or a tensor without dimensions
---@return ps.Tensor of x's shape
function T:index_fill(d, idx, value)
  if is_tensor(value) then
    if value.ndim > 0 then error(("index_fill: the value has shape %s; it must be one number"):format(shown(value))) end
    local rows, index, at, shape = rows_along(self, d, idx, "index_fill")
    return ops.scatter(rows, index, value:to(self:dtype()):expand(shape), at):reshape(self:shape())
  end
  caller.typed(value, "number", "index_fill: the value")
  return put_along(ops.scatter, self, d, idx, value, "index_fill")
end

--- Returns a copy of x in which a value replaces the elements that x[key] reads. Gradients reach both x and the value.
--- If a key selects an element several times, the last value in row-major order is used.
---@param key number|ps.Tensor|table as in x[key]
---@param value number|ps.Tensor of x's type, and of a shape that broadcasts to the shape of x[key]
---@param accumulate? boolean (default false); with true, all values are added to the elements
---@return ps.Tensor of x's shape
function T:index_put(key, value, accumulate) return indexing.put(self, key, value, accumulate) end

-- -- masks ----------------------------------------------------------------------------------------------------------
local function mask_of(x, mask, call)
  if given(mask, call, "the mask").dtype_ ~= C.PS_BOOL then
    error(("%s: the mask is a tensor of %s; it must be of bool, such as m:ne(0)"):format(call, mask:dtype()))
  end
  local extra = x.ndim - mask.ndim
  for i = 0, mask.ndim - 1 do
    local n = mask:size(i)
    if extra < 0 or n ~= 1 and n ~= x:size(i + extra) then
      error(("%s: a mask of shape %s does not broadcast to %s"):format(call, shown(mask), shown(x)))
    end
  end
  return mask
end

--- Returns a copy in which a number replaces the elements where a mask is true.
---@param mask ps.Tensor bool, of this shape or a shape that broadcasts to it
---@param value number|ps.Tensor a number, or a tensor without dimensions, which can get a gradient
---@return ps.Tensor
function T:masked_fill(mask, value)
  mask_of(self, mask, "masked_fill")
  if is_tensor(value) then
    if value.ndim > 0 then error(("masked_fill: the value has shape %s; it must be one "
      .. "number"):format(shown(value))) end
    return ops.where(mask, value:to(self:dtype()), self)
  end
  caller.typed(value, "number", "masked_fill: the value")
  return ops.where(mask, create.scalar_like(self, value), self)
end

--- Returns a copy in which the elements of src, in row-major order, replace the elements where a mask is true.
---@param mask ps.Tensor bool, of this shape or a shape that broadcasts to it
---@param src ps.Tensor of x's type, with at least as many elements as the mask has true elements
---@return ps.Tensor of x's shape
function T:masked_scatter(mask, src)
  local call = "masked_scatter"
  mask = mask_of(self, mask, call)
  if given(src, call, "the source").dtype_ ~= self.dtype_ then
    error(("%s: the source has type %s, but the tensor has type %s; convert the source with :to"):format(call,
      src:dtype(), self:dtype()))
  end
  if not tensor.same_shape(mask, self) then mask = mask:expand(self:shape()) end
  if native.on_host(self) and not (scope.grad_enabled() and (self:needs_grad() or src:needs_grad())) then
    return ops.masked_scatter(self, mask, src)
  end
  mask = mask:contiguous():reshape(-1)
  if self:numel() == 0 then return self:clone() end
  if src:numel() < self:numel() then                       -- otherwise src has enough elements for any mask
    local count = mask:long():sum():item()
    if count > src:numel() then
      error(("%s: the mask has %d true elements, but the source has only %d"):format(call, count, src:numel()))
    end
    if count == 0 then return self:clone() end
  end
  local place = (mask:long():cumsum(0) - 1):clamp(0)
  local picked = ops.embedding(src:reshape(-1, 1), place):reshape(-1)
  return ops.where(mask, picked, self:reshape(-1)):reshape(self:shape())
end

-- -- in place -------------------------------------------------------------------------------------------------------
local SHOWN = { index_put = "index_put(key, value)", scatter = "scatter(d, index, src)",
  scatter_add = "scatter_add(d, index, src)", index_add = "index_add(d, index, src)",
  index_copy = "index_copy(d, index, src)", index_fill = "index_fill(d, index, value)",
  masked_fill = "masked_fill(mask, value)", masked_scatter = "masked_scatter(mask, src)",
  scatter_reduce = "scatter_reduce(d, index, src, reduce)" }

for name, instead in pairs(SHOWN) do
  --- Performs the method without the trailing _, and writes the result into this tensor. Raises an error if this tensor
  --- or a source requires a gradient.
  ---@param a any
  ---@param b? any
  ---@param c? any
  ---@param d? any
  ---@param e? any
  ---@return ps.Tensor self
  T[name .. "_"] = function(self, a, b, c, d, e)
    create.check_gradients(self, b, name .. "_", instead)
    create.check_gradients(self, c, name .. "_", instead)
    ops.copy_(self, scope.no_grad(tensor.exact[name], self, a, b, c, d, e))
    return self
  end
end

--- Writes a value to the elements that x[key] reads. Does the same as x[key] = value.
---@param key number|ps.Tensor|table
---@param value number|ps.Tensor
---@param accumulate? boolean (default false); with true, the value is added to the elements
---@return ps.Tensor self
function T:index_put_(key, value, accumulate)
  if not accumulate then
    indexing.set(self, key, value)
    return self
  end
  create.check_gradients(self, value, "index_put_", SHOWN.index_put)
  ops.copy_(self, indexing.put(self, key, value, accumulate))
  return self
end

local scatter_in_place = T.scatter_
--- Writes src to the elements that gather(d, idx) would read. If several elements of src have the same target, the last
--- of these elements is written.
---@param d integer
---@param idx ps.Tensor integers
---@param src ps.Tensor|number of idx's shape or larger
---@param reduce? "add"|"multiply" combines src with the elements instead of replacing them
---@return ps.Tensor self
function T:scatter_(d, idx, src, reduce)
  if reduce ~= nil or not self:is_contiguous() then return scatter_in_place(self, d, idx, src, reduce) end
  create.check_gradients(self, src, "scatter_", SHOWN.scatter)
  local at, short = along(self, d, idx, "scatter_")
  ops.scatter_(self, short, part_for(self, idx, src, "scatter_"), at)
  return self
end

return {}
