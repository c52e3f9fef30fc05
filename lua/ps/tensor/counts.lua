-- SPDX-License-Identifier: BSD-3-Clause
-- Counts, order statistics and search: bincount, unique, median, quantile, searchsorted and bucketize. These methods
-- call other ops.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local create = require "ps.tensor.create"
local tensor = require "ps.tensor"
local C, ops, caller = native.C, native.ops, native.caller
local error = caller.error
local is_tensor = scope.is_tensor
local dim_index = create.dim_index

local T = tensor.T
local M = {}

local function shown(t) return ("%s [%s]"):format(t:dtype(), table.concat(t:shape(), ", ")) end

local function floats(t, call)
  if not t:is_float() then error(("%s takes floats, not %s; convert with :float()"):format(call, t:dtype())) end
  return t
end

-- -- counts ---------------------------------------------------------------------------------------------------------
local BINCOUNT = { weights = "tensor", minlength = "whole" }

-- Returns a vector of n equal numbers on the device of x. `dtype` is the code of the vector's type.
local function filled(n, dtype, x, value)
  local y = create.vector(n, dtype, x.device_)
  return create.alone(y, ops.fill_(y, value))
end

local function bincount(x, weights, least)
  local dtype = not weights and C.PS_I64 or weights.dtype_ == C.PS_F32 and C.PS_F32 or C.PS_F64
  local n = x:size(0)
  if n == 0 then return filled(least, dtype, x, 0) end
  local low, high = x:amin():item(), x:amax():item()
  if low < 0 then error(("bincount: a value is %d; it must not be negative"):format(low)) end
  local ones = weights and ops.cast(weights, dtype) or filled(n, dtype, x, 1)
  return ops.scatter_add(filled(math.max(least, high + 1), dtype, x, 0), x, ones, 0)
end

--- Counts how often each integer from 0 to the largest value occurs. The host waits for the largest value.
---@param options? {weights?: ps.Tensor, minlength?: integer} weights [N]: numbers to add instead of 1 for each element;
--- minlength: least length of the result (default 0)
---@return ps.Tensor [max(minlength, largest value + 1)] int64. With weights, the type is fp32 if the weights are fp32,
--- and otherwise fp64. The result has no gradient
function T:bincount(options)
  options = caller.options(options, "bincount", BINCOUNT)
  local weights, least = options.weights, caller.whole(options.minlength or 0, "bincount: minlength", 0)
  if self.ndim ~= 1 or self:is_float() or self.dtype_ == C.PS_BOOL then
    error(("bincount takes a vector of integers, not %s"):format(shown(self)))
  end
  if weights and (weights.ndim ~= 1 or weights:size(0) ~= self:size(0)) then
    error(("bincount: the weights are %s, but there are %d values"):format(shown(weights), self:size(0)))
  end
  return scope.no_grad(bincount, self, weights, least)
end

--- Counts the elements that are not 0.
---@param dims? integer|integer[] (default: all)
---@return ps.Tensor int64
function T:count_nonzero(dims)
  if self.dtype_ == C.PS_BOOL then return self:sum(dims) end
  return ops.cast(self, C.PS_BOOL):sum(dims)
end

local UNIQUE = { return_inverse = "boolean", return_counts = "boolean" }

--- Returns the distinct elements in ascending order.
---@param options? {return_inverse?: boolean, return_counts?: boolean}
---@return ps.Tensor values [K]
---@return ps.Tensor? inverse with return_inverse: int64 of this shape, the index of each element in `values`
---@return ps.Tensor? counts with return_counts: int64 [K], the number of times that each value occurs. Without
--- return_inverse, this is the second result
function T:unique(options)
  options = caller.options(options, "unique", UNIQUE)
  return scope.no_grad(function()
    local flat = self:reshape(-1)
    local sorted, order = flat:sort()
    local n, where = flat:size(0), { dtype = "bool", device = self:device() }
    local first = n == 0 and tensor.zeros({ 0 }, where)
      or tensor.cat { tensor.ones({ 1 }, where), sorted:narrow(0, 1, n - 1):ne(sorted:narrow(0, 0, n - 1)) }
    local values, inverse, counts = sorted:masked_select(first), nil, nil
    if options.return_inverse or options.return_counts then
      local rank = n == 0 and tensor.zeros({ 0 }, { dtype = "int64", device = self:device() })
        or first:long():cumsum(0) - 1
      if options.return_inverse then
        inverse = ops.scatter(rank, order, rank, 0):reshape(self:shape())
      end
      if options.return_counts then counts = rank:bincount { minlength = values:size(0) } end
    end
    if inverse then return values, inverse, counts end
    return values, counts
  end)
end

-- -- order statistics -----------------------------------------------------------------------------------------------
local NO_SIZES = {}

-- Returns the median of a vector, without a gradient. If the vector contains a NaN, topk returns the NaN first.
local function lower_median(x)
  if native.on_host(x) then return ops.median(x) end
  local n = tonumber(x.numel_)
  local sorted = ops.topk(x, n)
  local at = n - 1 - math.floor((n - 1) / 2)
  local first, middle = ops.slice(sorted, 0, 0, 1, 1), ops.slice(sorted, 0, at, at + 1, 1)
  return ops.reshape(ops.where(ops.eq(first, first), middle, first), 0, NO_SIZES)
end

-- Returns a mask of the elements of a vector that equal its median.
local function equal_to_median(x)
  local found = lower_median(x)
  return x:eq(found):logical_or(x:isnan():logical_and(found:isnan()))
end

-- Returns the index of the median along dimension d, whose size is n. If there are NaNs, returns the index of the first
-- NaN.
local function median_index(x, d, n)
  local _, order = x:detach():sort(d)
  local middle = order:narrow(d, math.floor((n - 1) / 2), 1)
  local bad = x:isnan()
  return ops.where(bad:any(d, true), bad:long():argmax(d, true), middle)
end

--- Returns the median. If the number of elements is even, the median is the lower of the two middle elements. With d,
--- returns the medians along dimension d, and their indices. If there is a NaN, the median is NaN. Without d, all
--- elements that equal the median share the gradient.
---@param d? integer
---@param keepdim? boolean (default false)
---@return ps.Tensor values
---@return ps.Tensor? indices int64; only with d
function T:median(d, keepdim)
  if keepdim ~= nil then caller.typed(keepdim, "boolean", "median: keepdim") end
  if d == nil then
    if keepdim ~= nil then error("median: keepdim needs a dimension") end
    local x = floats(self, "median"):reshape(-1)
    if x.numel_ == 0 then error("median: the tensor has no elements") end
    if not (scope.grad_enabled() and x:needs_grad()) then return lower_median(x) end
    local same = scope.no_grad(equal_to_median, x)
    return ops.where(same, x, create.scalar_like(x, -math.huge)):amax()
  end
  floats(self, "median")
  d = dim_index(self, d)
  local n = self:size(d)
  if n == 0 then error(("median: dimension %d has size 0"):format(d)) end
  local index = scope.no_grad(median_index, self, d, n)
  local values = self:gather(d, index)
  if keepdim then return values, index end
  return values:squeeze(d), index:squeeze(d)
end

local QUANTILE = { dim = "whole", keepdim = "boolean", interpolation = "string" }
local BETWEEN = { linear = true, lower = true, higher = true, nearest = true, midpoint = true }

-- Returns the weight of the upper neighbour of a fractional index. `at` is the index, and `how` is the interpolation.
local function upper_share(at, how)
  local low = math.floor(at)
  if how == "linear" then return at - low end
  if how == "midpoint" then return at > low and 0.5 or 0 end
  if how == "lower" then return 0 end
  if how == "higher" then return at > low and 1 or 0 end
  local rest = at - low
  return rest > 0.5 and 1 or rest < 0.5 and 0 or low % 2                     -- a tie selects the even index
end

--- Returns the q-quantiles along a dimension. If there is a NaN, the quantile is NaN.
---@param q number|number[]|ps.Tensor numbers in [0, 1]; several numbers add a first dimension to the result
---@param options? integer|{dim?: integer, keepdim?: boolean, interpolation?: string} dim (default: all elements);
---  interpolation: "linear" (default), "lower", "higher", "nearest" or "midpoint"
---@return ps.Tensor
function T:quantile(q, options)
  local call = "quantile"
  if type(options) == "number" then options = { dim = options } end
  options = caller.options(options, call, QUANTILE)
  local how = options.interpolation or "linear"
  caller.one_of(how, BETWEEN, "quantile: interpolation")
  local list = is_tensor(q) and q:tolist() or q
  local one = type(list) == "number"
  list = one and { list } or caller.list(list, "quantile: q")
  local x, d = floats(self, call), options.dim
  if d == nil then x, d = self:reshape(-1), 0 else d = dim_index(self, d) end
  local n = x:size(d)
  if n == 0 then error(("quantile: dimension %d has size 0"):format(d)) end
  local sorted, bad, results = x:sort(d), x:detach():isnan():any(d, true), {}
  for i, value in ipairs(list) do
    if not (type(value) == "number" and value >= 0 and value <= 1) then
      error(("quantile: q is %s; it must be a number in [0, 1]"):format(tostring(value)))
    end
    local at = value * (n - 1)
    local low, share = math.floor(at), upper_share(at, how)
    local y = sorted:narrow(d, low, 1)
    if share > 0 then y = y:lerp(sorted:narrow(d, low + 1, 1), share) end
    y = ops.where(bad, create.scalar_like(y, 0 / 0), y)
    if options.dim == nil and options.keepdim then
      local ones = {}
      for k = 1, self.ndim do ones[k] = 1 end
      y = y:reshape(ones)
    elseif not options.keepdim then y = y:squeeze(d) end
    results[i] = y
  end
  return one and results[1] or tensor.stack(results)
end

-- -- search ---------------------------------------------------------------------------------------------------------
local SEARCH = { right = "boolean" }

--- Returns the index at which each value would be inserted into this tensor, which must be sorted. As in PyTorch,
--- comparisons with NaN are false, so the search continues after a NaN.
---@param values ps.Tensor|number of any shape if this tensor has one dimension; otherwise the leading sizes must equal
--- the leading sizes of this tensor
---@param options? {right?: boolean} right: whether to insert after equal elements instead of before them (default
--- false)
---@return ps.Tensor int64 of the shape of values
function T:searchsorted(values, options)
  options = caller.options(options, "searchsorted", SEARCH)
  if type(values) == "number" then values = create.scalar_like(self, values) end
  if caller.tensor(values, "searchsorted", "the values") == nil then error("searchsorted: the values are missing") end
  return ops.searchsorted(self, values, options.right and 1 or 0)
end

--- Returns the index of the bucket of each element. An element x is in bucket i if boundaries[i - 1] < x <=
--- boundaries[i]. With `right`, the element is in bucket i if boundaries[i - 1] <= x < boundaries[i].
---@param boundaries ps.Tensor ascending [N]
---@param options? {right?: boolean} (default false)
---@return ps.Tensor int64 of this shape
function T:bucketize(boundaries, options)
  options = caller.options(options, "bucketize", SEARCH)
  if caller.tensor(boundaries, "bucketize", "the boundaries") == nil or boundaries.ndim ~= 1 then
    error("bucketize takes a vector of boundaries")
  end
  return boundaries:searchsorted(self, options)
end

-- -- values ---------------------------------------------------------------------------------------------------------
local LARGEST = { [C.PS_F32] = 3.4028234663852886e38, [C.PS_F64] = 1.7976931348623157e308,
  [C.PS_BF16] = 3.3895313892515355e38, [C.PS_F16] = 65504 }

local function number(value, default, name)
  return value == nil and default or caller.typed(value, "number", "nan_to_num: " .. name)
end

--- Replaces NaN and infinities. Integers are copied.
---@param nan? number (default 0)
---@param posinf? number (default: the largest number of the type)
---@param neginf? number (default: the smallest number of the type)
---@return ps.Tensor of this shape
function T:nan_to_num(nan, posinf, neginf)
  if not self:is_float() then return ops.contiguous(self) end
  local high = LARGEST[self.dtype_]
  return ops.nan_to_num(self, number(nan, 0, "nan"), number(posinf, high, "posinf"), number(neginf, -high, "neginf"))
end

return M
