-- SPDX-License-Identifier: BSD-3-Clause
-- Tensors with the shape of another tensor, and random draws: ps.full_like, ps.rand_like, ps.randperm, ps.bernoulli and
-- ps.multinomial. Random draws use Philox counters. They therefore depend only on ps.manual_seed and on earlier draws,
-- and not on the device or the number of threads.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local tensor = require "ps.tensor"
local create = require "ps.tensor.create"
local C, ops, caller = native.C, native.ops, native.caller
local rng = C.ps_rng_get(native.ctx)
local error = caller.error
local is_tensor = scope.is_tensor

local T = tensor.T
local M = {}

local NEW = { dtype = "string", device = "string", requires_grad = "boolean" }

local function like(t, call) return caller.tensor(t, call, "its argument") or error(call .. ": no tensor was given") end

-- Returns the dtype, device and requires_grad of a new tensor that is like t. If the options do not set the dtype or
-- the device, the new tensor has t's dtype or device.
local function place(t, options)
  return { dtype = options.dtype or t:dtype(), device = options.device or t:device(),
    requires_grad = options.requires_grad }
end

local function maker(name)
  --- Returns a new tensor of t's shape. By default it has t's dtype and device.
  ---@param t ps.Tensor
  ---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
  ---@return ps.Tensor
  M[name .. "_like"] = function(t, options)
    local call = "ps." .. name .. "_like"
    t = like(t, call)
    return tensor[name](t:shape(), place(t, caller.options(options, call, NEW)))
  end
end
for _, name in ipairs { "empty", "zeros", "ones", "rand", "randn" } do maker(name) end

--- Returns a tensor of t's shape whose elements all have the same value. By default it has t's dtype and device.
---@param t ps.Tensor
---@param value number the value; if the type is an integer type, the value must be in its range
---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
---@return ps.Tensor
function M.full_like(t, value, options)
  t = like(t, "ps.full_like")
  options = caller.options(options, "ps.full_like", NEW)
  return tensor.full(t:shape(), value, place(t, options))
end

--- Returns a tensor of t's shape with uniformly distributed integers in [low, high). By default it has t's dtype and
--- device. ps.randint_like(t, high) draws from [0, high).
---@param t ps.Tensor
---@param low integer
---@param high? integer
---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
---@return ps.Tensor
function M.randint_like(t, low, high, options)
  local call = "ps.randint_like"
  t = like(t, call)
  if type(high) ~= "number" then low, high, options = 0, low, high or options end
  caller.whole(low, call .. ": low")
  caller.whole(high, call .. ": high")
  local where = place(t, caller.options(options, call, NEW))
  local whole = where.dtype == "int32" and "int32" or "int64"
  local y = tensor.randint(low, high, t:shape(), { dtype = whole, device = where.device }):to(where.dtype)
  return where.requires_grad and y:requires_grad(true) or y
end

for _, name in ipairs { "zeros", "ones", "empty" } do
  --- Returns a new tensor. By default it has this tensor's dtype and device.
  ---@param shape integer[]|integer
  ---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
  ---@return ps.Tensor
  T["new_" .. name] = function(self, shape, options)
    local call = "new_" .. name
    if type(options) == "number" then
      error(("%s takes a shape as one list: t:%s({ %s, %s })"):format(call, call, tostring(shape), options))
    end
    return tensor[name](shape, place(self, caller.options(options, call, NEW)))
  end
end

--- Returns a new tensor whose elements all have the same value. By default it has this tensor's dtype and device.
---@param shape integer[]|integer
---@param value number
---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
---@return ps.Tensor
function T:new_full(shape, value, options)
  return tensor.full(shape, value, place(self, caller.options(options, "new_full", NEW)))
end

-- Returns fp64 numbers in [0, 1) with 48 random bits each. Numbers with 24 bits would often be equal, so they could not
-- order millions of elements.
local function fine(shape, device)
  local where = { dtype = "fp64", device = device }
  return tensor.rand(shape, where) + tensor.rand(shape, where) * 2 ^ -24
end

local ORDER = { dtype = "string", device = "string" }

--- Returns the numbers 0 to n - 1 in a random order.
---@param n integer
---@param options? {dtype?: string, device?: string}
---@return ps.Tensor [n] int64, unless the options set another type
function M.randperm(n, options)
  options = caller.options(options, "ps.randperm", ORDER)
  caller.whole(n, "ps.randperm: n", 0)
  local device = options.device and native.device_index(options.device) or create.default_place()
  if native.device_info(device).is_host ~= 0 then
    local y = create.vector(n, C.PS_I64, device)
    create.alone(y, ops.randperm_(y, rng.seed, create.draw(2 * n)))
    return options.dtype and y:to(options.dtype) or y
  end
  local _, order = fine({ n }, options.device):sort()
  return options.dtype and order:to(options.dtype) or order
end

-- Raises an error if values are not probabilities. The host reads the values.
local function check_probabilities(p, call)
  if p:numel() == 0 then return end
  local low, high = p:amin():item(), p:amax():item()
  if not (low >= 0 and high <= 1) then
    error(("%s: a probability is %g; it must be in [0, 1]"):format(call, low >= 0 and high or low))
  end
end

-- Returns a tensor of x's shape and type. Each element is 1 with probability p, and otherwise 0. Without p, the
-- elements of x are the probabilities.
local function drawn(x, p)
  if p == nil then
    check_probabilities(x, "bernoulli")
    p = x:to("fp64")
  end
  return ops.cast(fine(x:shape(), x:device()):lt(p), x.dtype_)
end

--- Draws 1 or 0 for each element. The element is the probability of 1. If p is passed, p is the probability of 1 for
--- all elements. The host reads the values to check them.
---@param p? number in [0, 1]
---@return ps.Tensor of this shape and type, without a gradient
function T:bernoulli(p)
  if p ~= nil then
    caller.typed(p, "number", "bernoulli: p")
    if not (p >= 0 and p <= 1) then error(("bernoulli: p is %g; it must be in [0, 1]"):format(p)) end
  elseif not self:is_float() then
    error(("bernoulli takes floats, not %s; convert with :float()"):format(self:dtype()))
  end
  if native.on_host(self) then return ops.bernoulli(self, p or -1, rng.seed, create.draw(2 * self.numel_)) end
  return scope.no_grad(drawn, self, p)
end

--- Sets each element to 1 with a probability, and otherwise to 0, in place.
---@param p? number|ps.Tensor probability in [0, 1] (default 0.5); a tensor must have a shape that broadcasts to this
--- tensor's shape
---@return ps.Tensor self
function T:bernoulli_(p)
  create.check_gradients(self, nil, "bernoulli_", "bernoulli(p)")
  if is_tensor(p) then self:copy_(p:detach():expand(self:shape()):bernoulli())
  else self:copy_(tensor.ones(self:shape(), { device = self:device() }):bernoulli(p or 0.5)) end
  return self
end

-- The largest number of elements for which draws are compared with all categories at once.
local AT_ONCE = 2 ^ 22

-- Returns n draws for each row of p [rows, V]. The elements of p are fp64, and each row has a positive sum. A draw is
-- the first category whose running sum exceeds a uniform number.
local function with_replacement(p, n)
  local upto = p:cumsum(-1)
  local total, parts = upto:narrow(-1, p:size(1) - 1, 1), {}
  local u = fine({ p:size(0), n }, p:device()) * total
  local step = math.max(1, math.floor(AT_ONCE / math.max(1, p:numel())))
  for first = 0, n - 1, step do
    local some = u:narrow(1, first, math.min(step, n - first))
    parts[#parts + 1] = upto:unsqueeze(1):le(some:unsqueeze(-1)):long():sum(-1)
  end
  -- Rounding may make u equal to the sum. The draw is then the last category with a positive probability.
  local last = p:gt(0):long() * tensor.arange(0, p:size(1), 1, { dtype = "int64", device = p:device() })
  return ops.minimum(tensor.cat(parts, 1), last:amax(-1, true))
end

--- Draws categories. The elements of a row are the probabilities of the categories. Their sum need not be 1. The host
--- reads the values to check them.
---@param n integer number of draws for each row
---@param replacement? boolean (default false); with false, a row draws no category twice
---@return ps.Tensor int64 [..., n], for a tensor [..., V] of one or two dimensions
function T:multinomial(n, replacement)
  local call = "multinomial"
  caller.whole(n, "multinomial: the number of draws", 1)
  if replacement ~= nil then caller.typed(replacement, "boolean", "multinomial: replacement") end
  if self.ndim < 1 or self.ndim > 2 or not self:is_float() then
    error(("multinomial takes floats of one or two dimensions, not %s [%s]"):format(self:dtype(),
      table.concat(self:shape(), ", ")))
  end
  return scope.no_grad(function()
    local p = self:to("fp64"):reshape(-1, self:size(-1)):contiguous()
    if p:size(1) == 0 then error("multinomial: there are no categories") end
    if p:size(0) == 0 then return tensor.empty({ 0, n }, { dtype = "int64", device = p:device() }) end
    local sums = p:sum(-1)
    if not p:ge(0):all():item() or not sums:isfinite():all():item() then
      error("multinomial: a probability is negative, infinite or NaN")
    end
    if sums:amin():item() <= 0 then error("multinomial: all probabilities of a row are 0") end
    local index, _
    if replacement then index = with_replacement(p, n)
    else
      local least = p:gt(0):long():sum(-1):amin():item()
      if least < n then
        error(("%s: %d draws without replacement, but a row has only %d categories with a probability; write "
          .. "multinomial(n, true) to draw a category more than once"):format(call, n, least))
      end
      -- Divide p by exponentially distributed numbers. The n largest quotients are n draws without replacement
      -- (Efraimidis and Spirakis 2006).
      local wait = (fine(p:shape(), p:device()) * -1 + 1):log() * -1
      _, index = (p / wait:clamp(1e-300)):topk(n)
    end
    return self.ndim == 1 and index:reshape(n) or index
  end)
end

return M
