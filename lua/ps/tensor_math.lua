-- SPDX-License-Identifier: BSD-3-Clause
-- The arithmetic of ps.Tensor: operators, elementwise functions, products, reductions, in-place forms.
local F = require "ps.ffi"
local scope = require "ps.scope"
local create = require "ps.create"
local C, ops, caller = F.C, F.ops, F.caller
local error = caller.error
local is_tensor = scope.is_tensor
local scalar_like, dim_index, draw = create.scalar_like, create.dim_index, create.draw
local bit = require "bit"
local floor = math.floor
local rng = C.ps_rng_get(F.ctx)
local FLOAT = { [C.PS_F32] = true, [C.PS_BF16] = true, [C.PS_F16] = true, [C.PS_F64] = true }

local T = {}
local M = { methods = T }

local function affine(t, alpha, beta)
  if t.dtype_ == C.PS_BOOL then t = t:to("int64") end
  if not FLOAT[t.dtype_] and (alpha ~= floor(alpha) or beta ~= floor(beta)) then t = t:to("fp32") end
  return ops.affine(t, alpha, beta)
end

local function add(a, b)
  if type(b) == "number" then return affine(a, 1, b) end
  if type(a) == "number" then return affine(b, 1, a) end
  return ops.add(a, b)
end
local function sub(a, b)
  if type(b) == "number" then return affine(a, 1, -b) end
  if type(a) == "number" then return affine(b, -1, a) end
  return ops.sub(a, b)
end
local function mul(a, b)
  if type(b) == "number" then return affine(a, b, 0) end
  if type(a) == "number" then return affine(b, a, 0) end
  return ops.mul(a, b)
end
local function div(a, b)
  if type(b) == "number" then
    local _, e = math.frexp(b)
    local narrow = a.dtype_ == C.PS_BF16 or a.dtype_ == C.PS_F16          -- b must not be rounded to their few bits
    local exact = FLOAT[a.dtype_] and math.abs(b) == math.ldexp(0.5, e)
    if b ~= 0 and (narrow or exact) then return ops.affine(a, 1 / b, 0) end
    return ops.div(a, scalar_like(a, b))
  end
  if type(a) == "number" then return ops.div(scalar_like(b, a), b) end
  return ops.div(a, b)
end
local function pow(a, b)
  if type(b) == "number" then return ops.pow_scalar(a, b) end
  if type(a) == "number" then return ops.pow(scalar_like(b, a), b) end
  return ops.pow(a, b)
end
T.add, T.sub, T.mul, T.div, T.pow = add, sub, mul, div, pow
function T:neg() return affine(self, -1, 0) end
local int_range = { [C.PS_BOOL] = { 0, 1 }, [C.PS_U8] = { 0, 255 }, [C.PS_I32] = { -2 ^ 31, 2 ^ 31 - 1 } }
for _, name in ipairs { "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "logical_and", "logical_or" } do
  local op = ops[name]
  T[name] = function(a, b)
    if type(b) ~= "number" or not is_tensor(a) then return op(a, b) end
    local range = int_range[a.dtype_]
    if range and not (b >= range[1] and b <= range[2]) then a = a:to("int64") end
    return op(a, scalar_like(a, b))
  end
end
for _, name in ipairs { "exp", "log", "sqrt", "rsqrt", "reciprocal", "abs", "sign", "floor", "ceil", "round", "sin",
                        "cos", "erf", "tanh", "sigmoid", "relu", "silu", "isfinite", "logical_not" } do
  T[name] = ops[name]
end
--- Only the first argument of the op: gelu("tanh") or gelu().
function T:gelu(approximate) return ops.gelu(self, approximate == "tanh" and 1 or 0) end
function T:square() return ops.mul(self, self) end
function T:clamp(low, high) return ops.clamp(self, low or -math.huge, high or math.huge) end
--- a where self (bool) is true, else b.
function T:where(a, b)
  if not is_tensor(self) then return ops.where(self, a, b) end          -- which says what it is
  if type(a) == "number" then a = scalar_like(is_tensor(b) and b or self:float(), a) end
  if type(b) == "number" and is_tensor(a) then b = scalar_like(a, b) end
  return ops.where(self, a, b)
end

--- Matrix product with PyTorch's rules for 1 and more than 2 dimensions.
function T:matmul(b)
  local a, drop_row, drop_col = self, false, false
  if not (is_tensor(a) and is_tensor(b)) then
    error(("matmul takes two tensors, not %s"):format(tostring(is_tensor(a) and b or a)))
  end
  if a.ndim == 0 or b.ndim == 0 then error("matmul: a tensor without dimensions") end
  if a.ndim == 1 then a, drop_row = a:unsqueeze(0), true end
  if b.ndim == 1 then b, drop_col = b:unsqueeze(1), true end
  local y = ops.matmul(a, b, 0)
  if drop_row then y = y:squeeze(-2) end
  if drop_col then y = y:squeeze(-1) end
  return y
end
T.mm, T.bmm = T.matmul, T.matmul

-- -- reductions -----------------------------------------------------------------------------------------------------
local function dim_bits(t, dims)
  if dims == nil then return 0 end
  if type(dims) == "number" then return bit.lshift(1, dim_index(t, dims)) end
  local set = 0
  if type(dims) ~= "table" then error("dimensions are a number or a list of numbers, not " .. tostring(dims)) end
  for _, d in ipairs(dims) do set = bit.bor(set, bit.lshift(1, dim_index(t, d))) end
  return set
end
function T:sum(dims, keepdim) return ops.sum(self, dim_bits(self, dims), keepdim and 1 or 0, 0) end
function T:mean(dims, keepdim) return ops.mean(self, dim_bits(self, dims), keepdim and 1 or 0) end
function T:amax(dims, keepdim) return ops.amax(self, dim_bits(self, dims), keepdim and 1 or 0) end
function T:amin(dims, keepdim) return ops.amin(self, dim_bits(self, dims), keepdim and 1 or 0) end
--- Largest value; with a dimension, values and indices.
function T:max(d, keepdim)
  if d == nil then return self:amax() end
  return self:amax(d, keepdim), ops.argmax(self, d, keepdim and 1 or 0)
end
function T:min(d, keepdim)
  if d == nil then return self:amin() end
  return self:amin(d, keepdim), ops.argmin(self, d, keepdim and 1 or 0)
end
function T:argmax(d, keepdim)
  if d == nil then return ops.argmax(self:reshape(-1), 0, 0) end
  return ops.argmax(self, d, keepdim and 1 or 0)
end
function T:argmin(d, keepdim)
  if d == nil then return ops.argmin(self:reshape(-1), 0, 0) end
  return ops.argmin(self, d, keepdim and 1 or 0)
end
function T:cumsum(d) return ops.cumsum(self, d, 0) end
function T:topk(k) return ops.topk(self, k) end
--- Variance over dims (nil: all), divided by n - 1 unless unbiased is false.
function T:var(dims, unbiased, keepdim)
  local mean = self:mean(dims, true)
  if dims == nil then mean = mean:reshape(self.ndim == 0 and {} or (function()
    local ones = {}
    for i = 1, self.ndim do ones[i] = 1 end
    return ones
  end)()) end
  local squares = (self - mean):square()
  local total = squares:sum(dims, keepdim)
  local n = self:numel() / math.max(1, total:numel())
  return div(total, unbiased == false and n or n - 1)
end
function T:std(dims, unbiased, keepdim) return self:var(dims, unbiased, keepdim):sqrt() end
--- Euclidean norm of all elements.
function T:norm()
  return self:square():sum():sqrt()
end
--- Are any / all elements not 0? bool tensors.
function T:any() return self:ne(0):long():sum():gt(0) end
function T:all() return self:eq(0):long():sum():eq(0) end
function T:softmax(d) return M.along_last(ops.softmax, self, d) end
function T:log_softmax(d) return M.along_last(ops.log_softmax, self, d) end
--- Applies an op of the last dimension along d.
function M.along_last(op, t, d)
  d = dim_index(t, d or -1)
  if d == t.ndim - 1 then return op(t) end
  return op(t:transpose(d, -1):contiguous()):transpose(d, -1)
end

-- -- in place -------------------------------------------------------------------------------------------------------
function T:fill_(v) ops.fill_(self, v) return self end
function T:zero_() ops.fill_(self, 0) return self end
--- Overwrites the values with those of src, which may be of another type and lie on another device.
function T:copy_(src)
  if is_tensor(src) and src.device_ ~= self.device_ then src = src:to(self:device()) end
  ops.copy_(self, src)
  return self
end
function T:add_(x, alpha)
  if type(x) == "number" then ops.copy_(self, affine(self, 1, x))
  elseif caller.tensor(x, "add_", "x") == nil then error("add_: x is missing")
  elseif x.dtype_ == self.dtype_ and self:is_float() and self.numel_ == x.numel_ and self.ndim == x.ndim and
         self:is_contiguous() then
    ops.axpy_(self, x, alpha or 1)
  else ops.copy_(self, self + x * (alpha or 1)) end
  return self
end
function T:sub_(x) return self:add_(type(x) == "number" and -x or x, -1) end
function T:mul_(x)
  if type(x) == "number" and self:is_float() and self:is_contiguous() then ops.scale_(self, x)
  else ops.copy_(self, self * x) end
  return self
end
function T:div_(x) ops.copy_(self, self / x) return self end
function T:normal_(mean, std) ops.normal_(self, mean or 0, std or 1, rng.seed, draw(self.numel_)) return self end
function T:uniform_(low, high) ops.uniform_(self, low or 0, high or 1, rng.seed, draw(self.numel_)) return self end

return M
