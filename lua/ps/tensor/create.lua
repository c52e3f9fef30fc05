-- SPDX-License-Identifier: BSD-3-Clause
-- Creates tensors: uninitialized, filled with a number, counted, random, or from tables. The module ps.tensor also has
-- these functions.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local array = require "ps.core.array"
local ffi, C, ctx, check, own, ops, caller = native.ffi, native.C, native.ctx, native.check, native.own, native.ops,
  native.caller
local error = caller.error
local is_tensor = scope.is_tensor
local floor = math.floor

local M = {}

local FLOAT = native.FLOAT
local shape8 = ffi.new("int64_t[8]")
local tensor_out = ffi.new("ps_tensor *[1]")
local double_array = array "double"

local default_dtype, default_device = C.PS_F32, 0

--- Sets the type that new float tensors have.
---@param name string "fp32", "bf16", "fp16" or "fp64"
---@return string was the name of the previous type
function M.set_default_dtype(name)
  local was, code = native.dtype_name[default_dtype], native.dtype_code(name)
  if not FLOAT[code] then error(("ps.set_default_dtype: %s is not a floating-point type"):format(name)) end
  default_dtype = code
  return was
end
--- Sets the device on which new tensors are created.
---@param name string
---@return string was the name of the previous device
function M.set_default_device(name)
  local was = native.device_name[default_device]
  default_device = native.device_index(name)
  return was
end

--- Returns the code of the type that new float tensors have.
---@return integer
function M.default_code() return default_dtype end
--- Returns the index of the device on which new tensors are created.
---@return integer
function M.default_place() return default_device end

local MAKER = { dtype = "string", device = "string", requires_grad = "boolean" }

-- Raises an error for unknown options. Also raises an error if a shape is passed as separate numbers, as in PyTorch's
-- zeros(2, 3). In that case `...` contains the sizes after the second size.
local function check_options(options, call, shape, ...)
  if options == nil and ... == nil then return end
  if type(options) == "number" and type(shape) == "number" then
    local sizes = { shape, options }
    for _, size in ipairs { ... } do if type(size) == "number" then sizes[#sizes + 1] = size end end
    error(("%s takes a shape as one list: %s({ %s })"):format(call, call, table.concat(sizes, ", ")))
  end
  caller.options(options, call, MAKER)
  if ... ~= nil then caller.more(call, "shape, options", (...)) end
end

-- Returns the options for a tensor that the next op fills. requires_grad is left out, because it is set after the fill.
local function bare(options, dtype)
  if options == nil then return { dtype = dtype } end
  return { dtype = options.dtype or dtype, device = options.device }
end

local function dtype_of(options, fallback)
  if options and options.dtype then return native.dtype_code(options.dtype) end
  return fallback or default_dtype
end
local function device_of(options)
  if options and options.device then return native.device_index(options.device) end
  return default_device
end

local function new_tensor(ndim, dtype, device)
  local rc = C.ps_tensor_new(ctx, dtype, device, ndim, shape8, tensor_out)
  if rc < 0 then native.retry(C.ps_tensor_new, ctx, dtype, device, ndim, shape8, tensor_out) end
  native.collect_if_due()
  local t = own(tensor_out[0])
  native.note_line(t)
  if native.recorder then native.recorder:empty(t) end
  return t
end

-- Returns the text of a value for an error. A string is in quotation marks.
local function quoted(value) return type(value) == "string" and ("'%s'"):format(value) or tostring(value) end

-- Creates a tensor like M.empty. Does not check the options. `call` is the function's name in errors.
local function empty(call, shape, options)
  if type(shape) == "number" then shape = { shape } end
  if type(shape) ~= "table" then error(("a shape must be a list of sizes, not %s"):format(quoted(shape))) end
  caller.list(shape, call .. ": the shape")
  if #shape > 8 then error(("a shape with %d dimensions; the limit is 8"):format(#shape)) end
  for i = 1, #shape do
    local n = tonumber(shape[i])
    if not n or n % 1 ~= 0 then
      error(("a size in a shape must be a whole number, not %s"):format(quoted(shape[i])))
    end
    shape8[i - 1] = n
  end
  local t = new_tensor(#shape, dtype_of(options), device_of(options))
  if options and options.requires_grad then t:requires_grad(true) end
  return t
end

-- The ranges of integer types. bool accepts any number: 0 becomes false, and any other number becomes true.
local RANGE = { [C.PS_U8] = { 0, 255 }, [C.PS_I32] = { -2 ^ 31, 2 ^ 31 - 1 }, [C.PS_I64] = { -2 ^ 63, 2 ^ 63 - 1 } }

--- Checks a number that will become an element of a type. A number outside of an integer type's range is an error.
--- Fractions are truncated later.
---@param value number
---@param dtype integer the type's code
---@return number value
function M.held(value, dtype)
  local range = RANGE[dtype]
  -- 2^63 - 1 as a double is 2^63, which does not fit into int64.
  if range and not (value >= range[1] and value <= range[2] and value < 2 ^ 63) then
    local low, high = ("%.0f"):format(range[1]), dtype == C.PS_I64 and "2^63 - 1" or ("%.0f"):format(range[2])
    error(("%s does not fit %s (%s to %s)"):format(("%.17g"):format(value), native.dtype_name[dtype], low, high))
  end
  return value
end

--- Returns a tensor with uninitialized contents.
---@param shape integer[] at most 8 sizes; a number n means { n }
---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
---@param ... any rejected, because the shape must be one list
---@return ps.Tensor
function M.empty(shape, options, ...)
  check_options(options, "ps.empty", shape, ...)
  return empty("ps.empty", shape, options)
end

-- Returns t after an op has filled t in place. Drops the op's result, which is a second reference to t. With two
-- references, release() would not free the memory.
local function alone(t, given)
  native.give_back(given)
  return t
end
M.alone = alone

local function filled(call, value)
  ---@param shape integer[] at most 8 sizes; a number n means { n }
  ---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
  ---@param ... any rejected, because the shape must be one list
  ---@return ps.Tensor
  return function(shape, options, ...)
    check_options(options, call, shape, ...)
    local t = empty(call, shape, bare(options))
    alone(t, ops.fill_(t, M.held(value, t.dtype_)))
    if options and options.requires_grad then t:requires_grad(true) end
    return t
  end
end
M.zeros, M.ones = filled("ps.zeros", 0), filled("ps.ones", 1)
--- Returns a tensor whose elements all have the same value.
---@param shape integer[] at most 8 sizes; a number n means { n }
---@param value number the value; if the type is an integer type, the value must be in its range
---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
---@return ps.Tensor
function M.full(shape, value, options)
  caller.typed(value, "number", "ps.full: the value")
  if type(options) == "number" then
    error(("ps.full takes a shape as one list: ps.full({ %s, %s }, %s)"):format(tostring(shape), value, options))
  end
  return filled("ps.full", value)(shape, options)
end

--- Returns the numbers start, start + step, and so on, before stop. arange(stop) begins at 0. If all three arguments
--- are whole, the type is int64 unless the options set another type.
---@param start number
---@param stop? number
---@param step? number not 0 (default 1)
---@param options? {dtype?: string, device?: string}
---@return ps.Tensor [ceil((stop - start) / step)]
function M.arange(start, stop, step, options)
  if type(stop) ~= "number" then start, stop, step, options = 0, start, 1, stop end
  if type(step) == "table" then step, options = 1, step end
  step = step or 1
  for _, value in ipairs { start, stop, step } do caller.typed(value, "number", "ps.arange: a bound or step") end
  if type(stop) ~= "number" then error("ps.arange(stop) or ps.arange(start, stop, step): stop is missing") end
  if step == 0 then error("ps.arange: the step must not be 0") end
  local n = math.ceil((stop - start) / step)
  if n < 0 or n == 0 and (stop - start) * step < 0 then
    error(("ps.arange: from %g to %g the step %g has the wrong sign"):format(start, stop, step))
  end
  if n ~= n or n >= 2 ^ 53 then
    error(("ps.arange: from %g to %g by %g the number of elements is undefined or at least "
      .. "2^53"):format(start, stop, step))
  end
  local whole = start == floor(start) and step == floor(step) and (stop == floor(stop) or math.abs(stop) == math.huge)
  check_options(options, "ps.arange")
  local t = empty("ps.arange", { n }, bare(options, whole and "int64" or nil))
  return alone(t, ops.arange_(t, start, step))
end

local rng = C.ps_rng_get(ctx)
--- Reserves the counters for `numel` random numbers. Returns the first counter.
local function draw(numel)
  local offset = rng.offset
  rng.offset = offset + ffi.cast("uint64_t", numel)
  return offset
end

local function random(call, fill)
  ---@param shape integer[] at most 8 sizes; a number n means { n }
  ---@param options? {dtype?: string, device?: string, requires_grad?: boolean}
  ---@param ... any rejected, because the shape must be one list
  ---@return ps.Tensor
  return function(shape, options, ...)
    check_options(options, call, shape, ...)
    local t = empty(call, shape, bare(options))
    fill(t)
    if options and options.requires_grad then t:requires_grad(true) end
    return t
  end
end
M.randn = random("ps.randn", function(t) return t:normal_() end)
M.rand = random("ps.rand", function(t) return t:uniform_() end)
--- Returns uniformly distributed integers in [low, high). Their type is int64 unless the options set another type.
---@param low integer
---@param high integer
---@param shape integer[]
---@param options? {dtype?: string, device?: string}
---@return ps.Tensor
function M.randint(low, high, shape, options)
  check_options(options, "ps.randint")
  local t = empty("ps.randint", shape, bare(options, "int64"))
  return alone(t, ops.randint_(t, low, high, rng.seed, draw(t.numel_)))
end

--- Returns t on the device with the given index. If t is on this device, returns t itself.
---@param t ps.Tensor
---@param device integer
---@return ps.Tensor
function M.to_device(t, device)
  if device == t.device_ then return t end
  native.retry(C.ps_tensor_to_device, t, device, tensor_out)
  local moved = own(tensor_out[0])
  if native.recorder then native.recorder:copied(t, moved) end
  return moved
end

local function measure(value, shape, depth)
  if type(value) ~= "table" then return end
  local n = #caller.list(value, "ps.tensor: a list")
  if shape[depth] == nil then shape[depth] = n
  elseif shape[depth] ~= n then error("ps.tensor: rows of different lengths") end
  for i = 1, n do measure(value[i], shape, depth + 1) end
end

--- Returns a tensor with the value of a number or a boolean, or with the values of a list. Lists may be nested. A list
--- of only booleans becomes a tensor of type bool. In a list that also contains numbers, true counts as 1. A tensor is
--- copied.
---@param value number|boolean|table|ps.Tensor
---@param options? {dtype?: string, device?: string, requires_grad?: boolean}|string options, or the dtype as a string
---@return ps.Tensor
function M.tensor(value, options)
  if type(options) == "string" then options = { dtype = options } end
  check_options(options, "ps.tensor")
  if is_tensor(value) then
    local t = value:detach():clone()
    if options and (options.dtype or options.device) then
      t = t:to { dtype = options.dtype, device = options.device }
    end
    return options and options.requires_grad and t:requires_grad(true) or t
  end
  local shape, flat, booleans = {}, {}, 0
  measure(value, shape, 1)
  local function flatten(v, depth)
    if type(v) == "table" then
      if depth > #shape then error("ps.tensor: rows of different depth") end
      for i = 1, #v do flatten(v[i], depth + 1) end
    else
      if depth ~= #shape + 1 then error("ps.tensor: rows of different depth") end
      if type(v) == "boolean" then
        v = v and 1 or 0
        booleans = booleans + 1
      elseif type(v) ~= "number" then
        error("ps.tensor: a " .. type(v) .. " among the numbers")
      end
      flat[#flat + 1] = v
    end
  end
  flatten(value, 1)
  local device = device_of(options)
  local all_booleans = booleans > 0 and booleans == #flat
  local dtype = options and options.dtype or all_booleans and "bool" or nil
  local t = empty("ps.tensor", shape, { dtype = dtype, device = "cpu" })
  local buffer = double_array(math.max(1, #flat))
  for i = 1, #flat do buffer[i - 1] = M.held(flat[i], t.dtype_) end
  check(C.ps_tensor_write_f64(t, 0, #flat, buffer))
  t = M.to_device(t, device)
  if options and options.requires_grad then t:requires_grad(true) end
  return t
end

--- Returns a matrix whose elements all have the same value, on the device of `like`. `dtype` is the code of the
--- matrix's type.
function M.matrix(like, rows, columns, dtype, value)
  shape8[0], shape8[1] = rows, columns
  local t = new_tensor(2, dtype, like.device_)
  return alone(t, ops.fill_(t, value))
end

--- Returns a vector with uninitialized contents. `dtype` is the code of the vector's type. `device` is the index of the
--- vector's device.
function M.vector(n, dtype, device)
  shape8[0] = n
  return new_tensor(1, dtype, device)
end

--- Returns a constant without dimensions, on the device of `like`. `dtype` is the code of the constant's type.
function M.scalar(like, value, dtype)
  return ops.fill_(new_tensor(0, dtype, like.device_), M.held(value, dtype))
end

--- Returns a constant without dimensions, for an op with `like`. The constant has the type of `like`. If this type is
--- an integer type and the value is a fraction or not finite, the constant is fp32.
function M.scalar_like(like, value)
  local dtype = like.dtype_
  if not FLOAT[dtype] and value % 1 ~= 0 then dtype = C.PS_F32 end
  return M.scalar(like, value, dtype)
end

function M.dim_index(t, d)
  if not is_tensor(t) then error("expected a tensor, not " .. tostring(t)) end
  if type(d) ~= "number" then
    caller.check_named(d)
    error("a dimension must be a number, not " .. (type(d) == "table"
      and "a table: " .. caller.IN_ORDER .. ", as in t:softmax(1)" or tostring(d)))
  end
  caller.whole(d, "a dimension")
  local i = d < 0 and d + t.ndim or d
  if i < 0 or i >= t.ndim then
    error(("there is no dimension %d: the tensor has %s"):format(d, caller.counted(t.ndim, "dimension")))
  end
  return i
end

--- Returns whether two tensors have the same shape.
---@param a ps.Tensor
---@param b ps.Tensor
---@return boolean
function M.same_shape(a, b)
  if a.ndim ~= b.ndim then return false end
  if a.ndim == 1 then return a.shape_[0] == b.shape_[0] end
  if a.ndim == 2 then return a.shape_[0] == b.shape_[0] and a.shape_[1] == b.shape_[1] end
  for i = 0, a.ndim - 1 do if a.shape_[i] ~= b.shape_[i] then return false end end
  return true
end

--- Raises an error for a write in place if the write would need a gradient. Such a write is not recorded, so gradients
--- would be computed from the old values.
function M.check_gradients(t, value, call, instead)
  if not scope.grad_enabled() then return end
  local of = t:needs_grad() and "the tensor" or scope.is_tensor(value) and value:needs_grad() and "the value"
  if of then
    error(("%s writes in place, but %s needs a gradient; use y = t:%s, which makes a new tensor and has gradients, "
      .. "or write in place inside ps.no_grad"):format(call, of, instead))
  end
end

--- Returns whether two tensors broadcast to a common shape.
---@param a ps.Tensor
---@param b ps.Tensor
---@param into? boolean whether the common shape must be b's shape
---@return boolean
function M.broadcasts(a, b, into)
  if into and a.ndim > b.ndim then return false end
  for i = 1, math.min(a.ndim, b.ndim) do
    local m, n = a.shape_[a.ndim - i], b.shape_[b.ndim - i]
    if m ~= n and m ~= 1 and (into or n ~= 1) then return false end
  end
  return true
end

--- Raises an error unless two tensors broadcast to a common shape.
---@param a ps.Tensor
---@param b ps.Tensor
---@param call string name of the call in the error
---@param names string[] names of a and b in the error
---@param into? boolean whether the common shape must be b's shape
function M.check_broadcast(a, b, call, names, into)
  if M.broadcasts(a, b, into) then return end
  error(("%s: %s has shape [%s], which does not broadcast %s [%s], the shape of %s"):format(call, names[1],
    table.concat(a:shape(), ", "), into and "to" or "with", table.concat(b:shape(), ", "), names[2]))
end

M.draw = draw

return M
