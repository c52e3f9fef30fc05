-- SPDX-License-Identifier: BSD-3-Clause
-- ps.Tensor: methods and operators that call ops. A tensor is the header that the C engine creates (cdata ps_tensor *).
-- No Lua object wraps the header. As in PyTorch, dimensions and indices count from 0, -1 is the last dimension or
-- index, and ranges exclude their end.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local create = require "ps.tensor.create"
local arithmetic = require "ps.tensor.math"
local indexing = require "ps.tensor.index"
local exact = require "ps.core.exact"
local ffi, C, check, own, ops, caller = native.ffi, native.C, native.check, native.own, native.ops, native.caller
local error = caller.error
local is_tensor = scope.is_tensor
local bit = require "bit"
local array = require "ps.core.array"
local hooks = require "ps.core.hooks"
local foreign = require "ps.core.foreign"

---@class ps.Tensor
local T = {}
local M = { T = T }                -- T is public so that other files can add methods

-- Loads the files with further methods. `require "ps"` does not load them, to save time.
local load_more = function() end

--- Registers files with further methods. They are loaded when a script first uses a method that this file does not
--- define.
---@param load fun() requires the files, which add their methods to T
function M.later(load)
  load_more = function()
    load_more = function() end
    setmetatable(T, nil)
    for name in pairs(arithmetic.plain) do T[name] = ops[name] end
    load()
  end
  setmetatable(T, { __index = function(_, key)
    if type(key) ~= "string" then return nil end
    if arithmetic.plain[key] then
      T[key] = ops[key]
      return ops[key]
    end
    load_more()
    return T[key]
  end })
end

--- Returns all methods of tensors.
---@return table<string, function>
function M.methods()
  load_more()
  return T
end
for name, fn in pairs(create) do M[name] = fn end
for name, fn in pairs(arithmetic.methods) do T[name] = fn end
M.along_last, M.where = arithmetic.along_last, arithmetic.where

local FLOAT = native.FLOAT
local tensor_out = ffi.new("ps_tensor *[1]")
local double_array = array "double"
local dim_index = create.dim_index

-- -- shape, type, place ---------------------------------------------------------------------------------------------
--- Returns the size of each dimension.
---@return integer[]
function T:shape()
  local n, s = self.ndim, self.shape_
  if n == 1 then return { tonumber(s[0]) } end  -- no loop: LuaJIT compiles no path with a loop of few iterations
  if n == 2 then return { tonumber(s[0]), tonumber(s[1]) } end
  if n == 3 then return { tonumber(s[0]), tonumber(s[1]), tonumber(s[2]) } end
  if n == 4 then return { tonumber(s[0]), tonumber(s[1]), tonumber(s[2]), tonumber(s[3]) } end
  local list = {}
  for i = 0, n - 1 do list[i + 1] = tonumber(s[i]) end
  return list
end

--- Returns the size of dimension d, or the whole shape as a table.
---@param d? integer index from 0, or a negative index from the end; nil for the whole shape
---@return integer|integer[]
function T:size(d)
  if d == nil then return self:shape() end
  local n = tonumber(self.shape_[dim_index(self, d)])
  return n
end
--- Returns the number of dimensions.
---@return integer
function T:dim() return self.ndim end
--- Returns the number of elements.
---@return integer
function T:numel()
  local n = tonumber(self.numel_)
  return n
end
--- Returns the total size of the elements in bytes.
---@return integer
function T:nbytes() return tonumber(C.ps_tensor_nbytes(self)) end
--- Returns the name of the type, such as "fp32".
---@return string
function T:dtype() return native.dtype_name[self.dtype_] end
--- Returns the name of the device, such as "cpu".
---@return string
function T:device() return native.device_name[self.device_] end
--- Returns whether the type is a floating-point type.
---@return boolean
function T:is_float() return FLOAT[self.dtype_] == true end
--- Returns whether the elements are contiguous in memory and in row-major order.
---@return boolean
function T:is_contiguous() return C.ps_tensor_is_contiguous(self) ~= 0 end
--- Returns whether the data still exists. Returns false after a scope has freed it.
---@return boolean
function T:alive() return C.ps_tensor_alive(self) ~= 0 end
--- Returns the stride of dimension d in elements. Without d, returns all strides.
---@param d? integer
---@return integer|integer[]
function T:stride(d)
  if d then return tonumber(self.stride_[dim_index(self, d)]) end
  local s = {}
  for i = 0, self.ndim - 1 do s[i + 1] = tonumber(self.stride_[i]) end
  return s
end

-- -- values ---------------------------------------------------------------------------------------------------------
-- Reads the first n elements as doubles. If a tensor is not on the host, it is copied to the host first, and the tape
-- does not record this copy.
local function read(t, n, buffer)
  if native.follower then native.follower "read" end
  local rc = C.ps_tensor_read_f64(t, 0, n, buffer)
  if rc == C.PS_EUNSUP then
    local was = C.ps_set_grad_enabled(native.ctx, 0)
    local moved = C.ps_tensor_to_device(t, native.device_index("cpu"), tensor_out)
    C.ps_set_grad_enabled(native.ctx, was)
    check(moved)
    local copy = tensor_out[0]
    rc = C.ps_tensor_read_f64(copy, 0, n, buffer)
    C.ps_tensor_release(copy)
  end
  check(rc)
end

local one = ffi.new("double[1]")
--- Returns the value of a tensor with one element. The value of a bool tensor is a boolean, because the number 0 counts
--- as true in Lua.
---@return number|boolean
function T:item()
  local t = self
  if t.numel_ ~= 1 then error(("item() needs a tensor with one element; this one has %d"):format(t:numel())) end
  read(t, 1, one)
  if t.dtype_ == C.PS_BOOL then return one[0] ~= 0 end
  return one[0]
end

--- Returns the values as nested lists. If the tensor has no dimensions, returns a number or a boolean.
---@return number|boolean|table
function T:tolist()
  local n = self:numel()
  local buffer = double_array(math.max(1, n))
  read(self, n, buffer)
  local shape, at, is_bool = self:shape(), 0, self.dtype_ == C.PS_BOOL
  local function build(d)
    if d > #shape then
      at = at + 1
      if is_bool then return buffer[at - 1] ~= 0 end
      return buffer[at - 1]
    end
    local rows = {}
    for i = 1, shape[d] do rows[i] = build(d + 1) end
    return rows
  end
  return build(1)
end

-- -- gradients and lifetime -----------------------------------------------------------------------------------------
-- Checks that a value is a boolean. 0 is rejected, because it counts as true in Lua, but as false in PyTorch.
local function switch(on, name)
  if type(on) ~= "boolean" then caller.error(("%s takes true or false, not a %s"):format(name, type(on))) end
  return on
end

--- Sets whether backward computes a gradient for this leaf. Without an argument, returns whether gradients reach the
--- tensor, like PyTorch's attribute of this name.
---@param on? boolean
---@return ps.Tensor|boolean self; without an argument, whether gradients reach the tensor
function T:requires_grad(on)
  if on == nil then return self:needs_grad() end
  check(C.ps_tensor_require_grad(self, switch(on, "requires_grad") and 1 or 0))
  return self
end
--- Sets whether backward computes a gradient for this leaf.
---@param on? boolean (default true)
---@return ps.Tensor self
function T:requires_grad_(on) return self:requires_grad(on == nil or switch(on, "requires_grad_")) end
--- Returns whether gradients reach the tensor.
---@return boolean
function T:needs_grad() return self.node ~= nil or bit.band(self.flags, C.PS_T_REQUIRES_GRAD) ~= 0 end
--- Sets whether the gradients of this leaf are summed over micro-batches in fp32, whatever the leaf's type is. Without
--- an argument, returns the setting.
---@param on? boolean
---@return ps.Tensor|boolean self; without an argument, the current setting
function T:grad_in_fp32(on)
  if on == nil then return bit.band(self.flags, C.PS_T_GRAD_F32) ~= 0 end
  self.flags = switch(on, "grad_in_fp32") and bit.bor(self.flags, C.PS_T_GRAD_F32)
    or bit.band(self.flags, bit.bnot(C.PS_T_GRAD_F32))
  return self
end
--- Returns the gradient, or nil. In a model of ps.initialize, the gradient is the sum over micro-batches and ranks.
--- Each summand is multiplied by its weight and by the loss scale (docs/zero.md). If backward has already updated the
--- parameters, the call is an error.
---@return ps.Tensor|nil
function T:grad()
  local g = scope.grad_of(self)
  if g == nil and self.managed ~= nil then hooks.tell("gradient", self) end
  return g
end
--- Replaces the gradient. The gradients of a model of ps.initialize cannot be replaced.
---@param g ps.Tensor? of this tensor's shape; nil drops the gradient
---@return ps.Tensor self
function T:set_grad(g)
  caller.tensor(g, "set_grad", "the gradient")
  if self.managed ~= nil then
    error("set_grad cannot replace the gradient of a parameter that ps.initialize manages: optimizer:zero_grad() drops "
      .. "the gradients of the model, and nn.clip_grad_norm scales them")
  end
  check(C.ps_tensor_set_grad(self, g))
  return self
end
T.backward = scope.backward
T.detach = scope.detach
T.register_hook = require("ps.tensor.hooks").register
--- Keeps the data alive after the end of the scope in which the tensor was made. The data is freed when Lua collects
--- the tensor.
---@return ps.Tensor self
function T:keep()
  check(C.ps_tensor_keep(self))
  return self
end
--- Frees the data now instead of when Lua collects the tensor. Data that another tensor shares is not freed. Using this
--- tensor afterwards is an error.
function T:release() C.ps_tensor_drop(self) end

-- -- conversions and views ------------------------------------------------------------------------------------------
--- Returns the same values in row-major order. Returns the tensor itself if it is contiguous, and otherwise a copy.
---@return ps.Tensor
function T:contiguous()
  if C.ps_tensor_is_contiguous(self) ~= 0 then return self end
  return ops.contiguous(self)
end
--- Returns a copy with its own data. Gradients reach the original.
---@return ps.Tensor
function T:clone() return ops.contiguous(self) end

local function to_device(t, name) return create.to_device(t, native.device_index(name)) end

local TO = { dtype = "string", device = "string" }

--- Returns the same values in another type, on another device, or both: t:to("bf16"), t:to("ref"), t:to { dtype = ,
--- device = }. Returns the tensor itself if nothing changes. Gradients are converted back to the type and the device of
--- the original.
---@param what string|{dtype?: string, device?: string} a type, a device, or a table with both
---@param ... any rejected
---@return ps.Tensor
function T:to(what, ...)
  if not is_tensor(self) then caller.no_self "t:to" end
  if what == nil or ... ~= nil then
    error("tensor:to takes a type, a device, or { dtype = , device = }, and no further argument")
  end
  local dtype, device
  if type(what) == "table" then
    caller.options(what, "tensor:to", TO)
    dtype, device = what.dtype, what.device
  elseif type(what) == "string" and pcall(native.dtype_code, what) then dtype = what
  else device = what end
  local t = self
  if dtype and native.dtype_code(dtype) ~= t.dtype_ then t = ops.cast(t, native.dtype_code(dtype)) end
  if device then t = to_device(t, device) end
  return t
end
for method, name in pairs { float = "fp32", double = "fp64", half = "fp16", bfloat16 = "bf16", int = "int32",
                            long = "int64", bool = "bool" } do
  ---@return ps.Tensor
  T[method] = function(self) return self:to(name) end
end
--- Returns a tensor that is true where an element is not 0.
---@return ps.Tensor bool, of this shape
function T:bool() return self.dtype_ == C.PS_BOOL and self or self:ne(0) end

local ALL, COLUMN, SWAP, NO_SIZES = { -1 }, { -1, 1 }, { 1, 0 }, {}    -- shapes and axes

-- Returns a list of the arguments after `n`. `n` is the number of these arguments. LuaJIT would leave its compiled code
-- at each { ... } with three elements or more. Therefore each number of elements has a constructor of its own.
local function list_of(n, a, b, c, d, e, f, g, ...)
  if n == 1 then return { a } end
  if n == 2 then return { a, b } end
  if n == 3 then return { a, b, c } end
  if n == 4 then return { a, b, c, d } end
  if n == 5 then return { a, b, c, d, e } end
  if n == 6 then return { a, b, c, d, e, f } end
  return { a, b, c, d, e, f, g, ... }
end

local function shape_args(call, ...)
  local first, more = ...
  if type(first) ~= "table" then return list_of(select("#", ...), ...) end
  if first[1] == nil and next(first) ~= nil then error(call .. ": " .. caller.IN_ORDER) end
  if more ~= nil then error(call .. ": pass the numbers as one list or as separate arguments, not both") end
  return first
end

--- Returns the same elements, in row-major order, in another shape. The result is a view, or a copy if the strides
--- require it.
---@param ... integer|integer[] the sizes; one size may be -1, which is computed from the other sizes
---@return ps.Tensor
function T:reshape(...)
  local shape = shape_args("reshape", ...)
  local t = self
  if not is_tensor(t) then caller.no_self "t:reshape" end
  if not t:is_contiguous() then
    local ok, view = pcall(ops.reshape, t, #shape, shape)
    if ok then return view end
    t = t:contiguous()
  end
  return ops.reshape(t, #shape, shape)
end
--- Returns a view of the same data in another shape. Raises an error if reshape would have to copy.
---@param ... integer|integer[] the sizes; one size may be -1
---@return ps.Tensor
function T:view(...)
  if not is_tensor(self) then caller.no_self "t:view" end
  local shape = shape_args("view", ...)
  return ops.reshape(self, #shape, shape)
end
--- Merges the dimensions `first` to `last` into one dimension.
---@param first? integer (default 0)
---@param last? integer (default -1)
---@return ps.Tensor
function T:flatten(first, last)
  if first == nil and last == nil and self:is_contiguous() then return ops.reshape(self, 1, ALL) end
  if self.ndim == 0 then return self:reshape(1) end
  first, last = dim_index(self, first or 0), dim_index(self, last or -1)
  if first > last then
    error(("flatten: the first dimension, %d, is after the last, %d"):format(first, last))
  end
  local shape, new, n = self:shape(), {}, 1
  for i = 1, #shape do
    if i - 1 >= first and i - 1 <= last then
      n = n * shape[i]
      if i - 1 == last then new[#new + 1] = n end
    else
      new[#new + 1] = shape[i]
    end
  end
  return self:reshape(new)
end
--- Reorders the dimensions: dimension i of the result is dimension axes[i] of this tensor. The result is a view.
---@param ... integer|integer[] the axes; each dimension must occur once
---@return ps.Tensor
function T:permute(...)
  if not is_tensor(self) then caller.no_self "t:permute" end
  local axes = shape_args("permute", ...)
  if #axes ~= self.ndim then error(("permute: %d axes for %d dimensions"):format(#axes, self.ndim)) end
  return ops.permute(self, axes)
end
--- Exchanges dimensions a and b. The result is a view.
---@param a? integer (default 0)
---@param b? integer (default 1)
---@return ps.Tensor
function T:transpose(a, b)
  a, b = dim_index(self, a or 0), dim_index(self, b or 1)
  if self.ndim == 2 and a ~= b then return ops.permute(self, SWAP) end
  local axes = {}
  for i = 0, self.ndim - 1 do axes[i + 1] = i end
  axes[a + 1], axes[b + 1] = b, a
  return ops.permute(self, axes)
end
--- Returns a matrix transposed, as a view. Returns the tensor itself if it has fewer than 2 dimensions.
---@return ps.Tensor
function T:t() return self.ndim < 2 and self or self:transpose(0, 1) end
--- Inserts a dimension of size 1 before dimension d. The result is a view.
---@param d integer from 0 to the number of dimensions; -1 appends
---@return ps.Tensor
function T:unsqueeze(d)
  local shape = self:shape()
  caller.whole(d, "unsqueeze: the dimension")
  local n = self.ndim
  d = d < 0 and d + n + 1 or d
  if d < 0 or d > n then error("unsqueeze: the dimension is out of range") end
  if n > 3 then table.insert(shape, d + 1, 1)
  else                                                     -- no loop, as in T:shape
    if d <= 2 then shape[4] = shape[3] end
    if d <= 1 then shape[3] = shape[2] end
    if d == 0 then shape[2] = shape[1] end
    shape[d + 1] = 1
  end
  return ops.reshape(self, n + 1, shape)
end
--- Removes dimensions of size 1. The result is a view.
---@param dims? integer|integer[] the dimensions to remove if their size is 1 (default: all dimensions of size 1)
---@return ps.Tensor
function T:squeeze(dims)
  if dims == nil and self.ndim == 1 and self.shape_[0] == 1 then return ops.reshape(self, 0, NO_SIZES) end
  if type(dims) == "number" and self.ndim <= 4 then        -- no loop, as in T:shape
    local d, n, shape = dim_index(self, dims), self.ndim, self:shape()
    if self.shape_[d] ~= 1 then return ops.reshape(self, n, shape) end
    if d == 0 then shape[1] = shape[2] end
    if d <= 1 then shape[2] = shape[3] end
    if d <= 2 then shape[3] = shape[4] end
    shape[n] = nil
    return ops.reshape(self, n - 1, shape)
  end
  local new, named = {}, dims ~= nil and {}
  for _, d in ipairs(named and (type(dims) == "table" and dims or { dims }) or {}) do
    named[dim_index(self, d) + 1] = true
  end
  for i, n in ipairs(self:shape()) do
    if n ~= 1 or (named and not named[i]) then new[#new + 1] = n end
  end
  return ops.reshape(self, #new, new)
end
--- Repeats dimensions of size 1, and adds new leading dimensions, without copying. The result is a view.
---@param ... integer|integer[] the sizes; -1 keeps the current size
---@return ps.Tensor
function T:expand(...)
  if not is_tensor(self) then caller.no_self "t:expand" end
  local shape = shape_args("expand", ...)
  return ops.expand(self, #shape, shape)
end
--- Returns every step-th element of [start, stop) along dimension d. The result is a view.
---@param d integer
---@param start? integer (default 0); a negative index counts from the end
---@param stop? integer (default: the size of d); a negative index counts from the end
---@param step? integer (default 1)
---@return ps.Tensor
function T:slice(d, start, stop, step)
  d = dim_index(self, d)
  local n = tonumber(self.shape_[d])
  start, stop = start or 0, stop or n
  if stop ~= math.huge then caller.whole(stop, "slice: the stop") end
  caller.whole(start, "slice: the start")
  if start < 0 then start = start + n end
  if stop < 0 then stop = stop + n end
  start = math.max(0, math.min(n, start))
  return ops.slice(self, d, start, math.max(start, math.min(n, stop)), step or 1)
end
--- Returns the elements start to start + length - 1 of dimension d. The result is a view.
---@param d integer
---@param start integer a negative index counts from the end
---@param length integer
---@return ps.Tensor
function T:narrow(d, start, length)
  d = dim_index(self, d)
  caller.typed(start, "number", "narrow: the start")
  caller.typed(length, "number", "narrow: the length")
  if start < 0 then start = start + tonumber(self.shape_[d]) end
  return ops.slice(self, d, start, start + length, 1)
end
--- Returns the slice at index i of dimension d, without this dimension. The result is a view.
---@param d integer
---@param i integer a negative index counts from the end
---@return ps.Tensor
function T:select(d, i)
  d = dim_index(self, d)
  local n = tonumber(self.shape_[d])
  local at = caller.whole(i, "select: the index") < 0 and i + n or i
  if at < 0 or at >= n then error(("index %s is out of range for dimension %d with size %d"):format(i, d, n)) end
  local shape = self:shape()
  table.remove(shape, d + 1)
  local part = ops.slice(self, d, at, at + 1, 1)
  return ops.reshape(part, #shape, shape)
end
--- Returns consecutive slices along dimension d, as several results. The results are views.
---@param size integer|integer[] the size of each slice (the last slice may be smaller), or a list of sizes
---@param d? integer (default 0)
---@return ps.Tensor ...
function T:split(size, d)
  d = dim_index(self, d or 0)
  local n, parts, at = tonumber(self.shape_[d]), {}, 0
  if type(size) == "table" then
    for i, s in ipairs(size) do
      caller.whole(s, "split: a size")
      parts[i], at = ops.slice(self, d, at, at + s, 1), at + s
    end
    if at ~= n then error(("split: the sizes add up to %d, but the dimension has %d"):format(at, n)) end
  else
    if type(size) ~= "number" then error("split takes a size or a list of sizes, not " .. tostring(size)) end
    if caller.whole(size, "split: the size") < 1 then error("split: the size must be at least 1, not " .. size) end
    repeat
      parts[#parts + 1], at = ops.slice(self, d, at, math.min(n, at + size), 1), at + size
    until at >= n
  end
  return unpack(parts)
end
--- Returns n consecutive slices along dimension d, as several results. The last slice may be smaller. The results are
--- views.
---@param n integer
---@param d? integer (default 0)
---@return ps.Tensor ...
function T:chunk(n, d)
  d = dim_index(self, d or 0)
  if caller.whole(n, "chunk: the number of parts") < 1 then error(("chunk: the number of parts is %d; it must be " ..
    "at least 1"):format(n)) end
  if self.shape_[d] == 0 then                                -- n empty slices, as in PyTorch
    local parts = {}
    for i = 1, n do parts[i] = ops.slice(self, d, 0, 0, 1) end
    return unpack(parts)
  end
  return self:split(math.max(1, math.ceil(tonumber(self.shape_[d]) / n)), d)
end

-- -- indexing -------------------------------------------------------------------------------------------------------
--- Returns a copy of the slices at the given indices of dimension d.
---@param d integer
---@param idx ps.Tensor integers, of any shape
---@return ps.Tensor of this shape with dimension d replaced by idx's shape
function T:index_select(d, idx)
  d = dim_index(self, d)
  if not is_tensor(idx) then error("index_select: the index is a " .. type(idx) .. "; it takes a tensor") end
  local shape = self:shape()
  local outer, inner, new = 1, 1, {}
  for i = 1, d do outer, new[i] = outer * shape[i], shape[i] end
  for i = d + 2, #shape do inner = inner * shape[i] end
  for _, n in ipairs(idx:shape()) do new[#new + 1] = n end
  for i = d + 2, #shape do new[#new + 1] = shape[i] end
  if d == 0 then return ops.embedding(self:reshape(shape[1], inner), idx):reshape(new) end
  local index = idx:reshape(1, -1):expand(outer, idx:numel())
  return ops.gather(self:reshape(outer, shape[d + 1], inner), index, 1):reshape(new)
end

--- Returns the elements where a mask is true, in row-major order.
---@param mask ps.Tensor bool, of this shape
---@return ps.Tensor [number of true elements]
function T:masked_select(mask)
  if not is_tensor(mask) then error("masked_select: the mask is a " .. type(mask) .. "; it takes a tensor") end
  if not create.same_shape(self, mask) then
    error(("a bool index of shape [%s] for a tensor of shape [%s]: they must be the same"):format(
      table.concat(mask:shape(), ", "), table.concat(self:shape(), ", ")))
  end
  local x, at = self:contiguous(), mask:contiguous()
  if at.ndim ~= 1 then at = ops.reshape(at, 1, ALL) end
  native.retry(C.ps_tensor_nonzero, at, tensor_out)
  at = own(tensor_out[0])
  return ops.reshape(ops.embedding(ops.reshape(x, 2, COLUMN), ops.reshape(at, 1, ALL)), 1, ALL)
end
--- Returns the indices of the elements that are not 0.
---@return ps.Tensor int64 [count, number of dimensions]
function T:nonzero()
  native.retry(C.ps_tensor_nonzero, self, tensor_out)
  return own(tensor_out[0])
end

-- -- several tensors ------------------------------------------------------------------------------------------------
--- Joins tensors along dimension d. The sizes of their other dimensions must be equal.
---@param list ps.Tensor[]
---@param d? integer (default 0)
---@return ps.Tensor
function M.cat(list, d)
  caller.typed(list, "table", "ps.cat: the list of tensors")
  if #list == 0 then error("ps.cat: an empty list") end
  if #list <= 64 then return ops.concat(list, d or 0) end
  local groups, group = {}, {}
  for _, t in ipairs(list) do
    group[#group + 1] = t
    if #group == 64 then groups[#groups + 1], group = ops.concat(group, d or 0), {} end
  end
  if #group > 0 then groups[#groups + 1] = ops.concat(group, d or 0) end
  return M.cat(groups, d)
end

local rows_shape = {}

-- Returns a matrix whose rows are vectors of the same size. Returns nil if the list has other values, or more vectors
-- than one op can join.
local function rows_of(list)
  local first = type(list) == "table" and list[1]
  if not is_tensor(first) or first.ndim ~= 1 or #list > 64 then return nil end
  for i = 2, #list do
    if not is_tensor(list[i]) or not create.same_shape(first, list[i]) then return nil end
  end
  rows_shape[1], rows_shape[2] = #list, tonumber(first.shape_[0])
  return ops.reshape(ops.concat(list, 0), 2, rows_shape)
end

--- Joins tensors of the same shape along a new dimension d.
---@param list ps.Tensor[]
---@param d? integer (default 0)
---@return ps.Tensor
function M.stack(list, d)
  local matrix = (d or 0) == 0 and rows_of(list)
  if matrix then return matrix end
  local rows = {}
  for i, t in ipairs(caller.typed(list, "table", "ps.stack: the list of tensors")) do
    rows[i] = caller.tensor(t, "ps.stack", i):unsqueeze(d or 0)
  end
  return M.cat(rows, d)
end

-- -- the metatype ---------------------------------------------------------------------------------------------------
-- Texts that say what to write instead, for fields of PyTorch's tensors that cannot be set here.
local SET = { requires_grad = "write t:requires_grad_(false)", data = "write ps.no_grad(function() t:copy_(x) end)",
  grad = "write t:set_grad(g), optimizer:zero_grad()" }

local methods = exact.view(T, "t:", true)
foreign.home("t", function(name) return T[name] ~= nil end, function()
  local names = {}
  for name in pairs(M.methods()) do names[#names + 1] = name end
  return names
end)
M.exact = methods

local function no_order()
  error("a tensor is not a number, so < and > do not compare it: t:item() is the number of its only element, and "
    .. "t:lt(x) and t:gt(x) compare its elements")
end

-- Returns whether the function that reads a field has the tensor as its parameter self and is not a method of tensors.
-- In that case a script called a method of a module with a dot instead of a colon.
local DOT = "; a function has the tensor as its self: a method is called with a colon, model:forward(x)"
local function is_self(t)
  local info = debug.getinfo(3, "f")
  local name, value
  if info then name, value = debug.getlocal(3, 1) end
  if name ~= "self" or not is_tensor(value) or value ~= t then return false end
  for _, method in pairs(T) do if method == info.func then return false end end
  return true
end

local mt = {
  __index = function(t, key)
    local method = methods[key]
    if method ~= nil then return method end
    if type(key) == "string" then
      error(("a tensor has no method or field '%s'%s"):format(key, is_self(t) and DOT
        or foreign.advice("t", key) or foreign.instead("t", key)))
    end
    return indexing.get(t, key)
  end,
  __newindex = function(t, key, value)
    if type(key) == "string" then
      error(("a tensor has no field '%s' to set%s"):format(key, SET[key] and ": " .. SET[key] or ""))
    end
    indexing.set(t, key, value)
  end,
  __add = T.add, __sub = T.sub, __mul = T.mul, __div = T.div, __pow = T.pow,
  __unm = T.neg,
  __mod = function(a, b)
    if not is_tensor(a) then error(("%s %% tensor: write the number as a tensor"):format(type(a))) end
    return a:remainder(b)
  end,
  __len = function(t) return t:size(0) end,
  __lt = no_order, __le = no_order,
  __concat = function()
    error("a tensor is not a string, so .. does not join it: t:item() is the number of its only element, and "
      .. "tostring(t) is its text")
  end,
  __tostring = function(t) return require("ps.tensor.pretty").tensor(t) end,
}
ffi.metatype("ps_tensor", mt)

local function given(t, call) return caller.tensor(t, call,
  "its argument") or error(call .. ": no tensor was given") end
--- Returns whether two Lua values refer to the same tensor. Each call that returns a tensor creates a new Lua value.
---@param a ps.Tensor
---@param b ps.Tensor
---@return boolean
function M.same(a, b)
  a, b = given(a, "ps.same"), given(b, "ps.same")
  return ffi.cast("ps_tensor *", a) == ffi.cast("ps_tensor *", b)
end

return M
