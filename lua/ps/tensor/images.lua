-- SPDX-License-Identifier: BSD-3-Clause
-- Functions of signals [N, C, L] and images [N, C, H, W], with PyTorch's names and meanings. They are functions of
-- ps.functional, such as F.conv2d. Where a pair of numbers is expected, one number is used for both height and width.
-- The dimension of samples may be missing.
local native = require "ps.core.ffi"
local scope = require "ps.core.scope"
local ops, caller = native.ops, native.caller
local error = caller.error

local F = {}

local PLACES = { "height", "width" }

-- Returns {H, W} for a number or for a list of `n` numbers. For a signal (n = 1), H is `other`.
local function pair(value, n, what, least, other)
  if type(value) ~= "table" then
    caller.whole(value, what, least)
    return n == 1 and { other, value } or { value, value }
  end
  caller.list(value, what)
  if #value ~= n then error(("%s has %d numbers; it takes %d"):format(what, #value, n)) end
  for i = 1, n do caller.whole(value[i], what, least) end
  return n == 1 and { other, value[1] } or { value[1], value[2] }
end

local function dimensions(n) return caller.counted(n, "dimension") end

-- Returns x as [N, C, ...] with n spatial dimensions. Also returns whether its first dimension was missing.
local function batched(x, n, call)
  if caller.tensor(x, call, "the input") == nil then error(call .. ": no input was given") end
  local dims = x:dim()
  if dims ~= n + 1 and dims ~= n + 2 then
    error(("%s takes %s, not a tensor of %s, [%s]"):format(call,
      n == 1 and "[N, C, L] or [C, L]" or "[N, C, H, W] or [C, H, W]", dimensions(dims), table.concat(x:shape(), ", ")))
  end
  if dims == n + 1 then return x:unsqueeze(0), true end
  return x, false
end

-- Reshapes a signal [N, C, L] to an image [N, C, 1, L], and adds a missing dimension N. The second result is true if N
-- was added.
local function image(x, n, call)
  local single
  x, single = batched(x, n, call)
  return n == 1 and x:unsqueeze(2) or x, single
end

-- Removes the dimensions that image() added from a result.
local function back(y, n, single)
  if n == 1 then y = y:squeeze(2) end
  return single and y:squeeze(0) or y
end

-- -- convolution ----------------------------------------------------------------------------------------------------
local CONV = { stride = "whole|table", padding = "whole|table|string", dilation = "whole|table", groups = "whole" }

-- Returns the padding as {before H, before W, after H, after W}.
local function padding_of(value, n, w, stride, dilation, call)
  if type(value) ~= "string" then
    local p = pair(value or 0, n, call .. ": padding", 0, 0)
    return { p[1], p[2], p[1], p[2] }
  end
  if value == "valid" then return { 0, 0, 0, 0 } end
  if value ~= "same" then error(("%s: padding is '%s' (allowed: 'same', 'valid', numbers)"):format(call, value)) end
  local p = { 0, 0, 0, 0 }
  for i = 3 - n, 2 do
    if stride[i] ~= 1 then
      error(("%s: padding = \"same\" takes stride 1; along the %s it is %d"):format(call, PLACES[i], stride[i]))
    end
    local total = dilation[i] * (w:size(i - 3) - 1)
    p[i], p[i + 2] = math.floor(total / 2), math.ceil(total / 2)
  end
  return p
end

local function conv(x, w, b, options, n, call)
  options = caller.options(options, call, CONV)
  local single
  x, single = batched(x, n, call)
  if caller.tensor(w, call, "the weight") == nil then error(call .. ": no weight was given") end
  if w:dim() ~= n + 2 then
    error(("%s: the weight is %s, not a tensor of %s, [%s]"):format(call,
      n == 1 and "[O, C / groups, K]" or "[O, C / groups, KH, KW]", dimensions(w:dim()), table.concat(w:shape(), ", ")))
  end
  local stride = pair(options.stride or 1, n, call .. ": stride", 1, 1)
  local dilation = pair(options.dilation or 1, n, call .. ": dilation", 1, 1)
  local padding = padding_of(options.padding, n, w, stride, dilation, call)
  local y = ops.conv(x, w, b, stride, dilation, padding, options.groups or 1)
  return single and y:squeeze(0) or y
end

--- Returns the cross-correlation of signals with kernels, plus a bias.
---@param x ps.Tensor [N, C, L] or [C, L]
---@param w ps.Tensor [O, C / groups, K]
---@param b? ps.Tensor [O]
---@param options? {stride?: integer, padding?: integer|"same"|"valid", dilation?: integer, groups?: integer} defaults:
--- stride 1, padding 0, dilation 1, groups 1
---@return ps.Tensor [N, O, length] or [O, length]
function F.conv1d(x, w, b, options) return conv(x, w, b, options, 1, "F.conv1d") end

--- Returns the cross-correlation of images with kernels, plus a bias.
---@param x ps.Tensor [N, C, H, W] or [C, H, W]
---@param w ps.Tensor [O, C / groups, KH, KW]
---@param b? ps.Tensor [O]
---@param options? {stride?: integer|integer[], padding?: integer|integer[]|"same"|"valid", dilation?:
--- integer|integer[], groups?: integer} defaults: stride 1, padding 0, dilation 1, groups 1
---@return ps.Tensor [N, O, height, width] or [O, height, width]
function F.conv2d(x, w, b, options) return conv(x, w, b, options, 2, "F.conv2d") end

local TRANSPOSE = { stride = "whole|table", padding = "whole|table", output_padding = "whole|table",
  dilation = "whole|table", groups = "whole" }

local function conv_transpose(x, w, b, options, n, call)
  options = caller.options(options, call, TRANSPOSE)
  local single
  x, single = batched(x, n, call)
  if caller.tensor(w, call, "the weight") == nil then error(call .. ": no weight was given") end
  if w:dim() ~= n + 2 then
    error(("%s: the weight is %s, not a tensor of %s, [%s]"):format(call,
      n == 1 and "[C, O / groups, K]" or "[C, O / groups, KH, KW]", dimensions(w:dim()), table.concat(w:shape(), ", ")))
  end
  local stride = pair(options.stride or 1, n, call .. ": stride", 1, 1)
  local dilation = pair(options.dilation or 1, n, call .. ": dilation", 1, 1)
  local padding = padding_of(options.padding, n, w, stride, dilation, call)
  local more = pair(options.output_padding or 0, n, call .. ": output_padding", 0, 0)
  local size = { 1, 1 }
  for i = 3 - n, 2 do
    if more[i] >= stride[i] then
      error(("%s: output_padding is %d along the %s; it must be less than the stride, %d"):format(call, more[i],
        PLACES[i], stride[i]))
    end
    size[i] = (x:size(i - 3) - 1) * stride[i] + (w:size(i - 3) - 1) * dilation[i] + 1 - 2 * padding[i] + more[i]
    if size[i] < 1 then
      error(("%s: the output would have %d elements along the %s; padding is %d, which is removed from both ends")
        :format(call, size[i], PLACES[i], padding[i]))
    end
  end
  local y = ops.conv_transpose(x, w, b, stride, dilation, padding, options.groups or 1, size)
  return single and y:squeeze(0) or y
end

--- Returns a transposed convolution, plus a bias. It is the transpose of F.conv1d with the same options. The transpose
--- computes the gradient of F.conv1d's input.
---@param x ps.Tensor [N, C, L] or [C, L]
---@param w ps.Tensor [C, O / groups, K]
---@param b? ps.Tensor [O]
---@param options? {stride?: integer, padding?: integer, output_padding?: integer, dilation?: integer, groups?: integer}
--- defaults: stride 1, padding 0, output_padding 0, dilation 1, groups 1. output_padding: number of elements to add at
--- the end, less than the stride
---@return ps.Tensor [N, O, length] or [O, length]
function F.conv_transpose1d(x, w, b, options) return conv_transpose(x, w, b, options, 1, "F.conv_transpose1d") end

--- Returns a transposed convolution, plus a bias. It is the transpose of F.conv2d with the same options. The transpose
--- computes the gradient of F.conv2d's input.
---@param x ps.Tensor [N, C, H, W] or [C, H, W]
---@param w ps.Tensor [C, O / groups, KH, KW]
---@param b? ps.Tensor [O]
---@param options? {stride?: integer|integer[], padding?: integer|integer[], output_padding?: integer|integer[],
--- dilation?: integer|integer[], groups?: integer} defaults: stride 1, padding 0, output_padding 0, dilation 1, groups
--- 1. output_padding: number of elements to add at each end, less than the stride
---@return ps.Tensor [N, O, height, width] or [O, height, width]
function F.conv_transpose2d(x, w, b, options) return conv_transpose(x, w, b, options, 2, "F.conv_transpose2d") end

-- -- pooling --------------------------------------------------------------------------------------------------------
-- Returns the number of windows. With `ceil`, the last window may extend beyond the padding at the end, but it must
-- begin before this padding.
local function windows(in_size, kernel, stride, dilation, padding, ceil, call, place)
  local span = dilation * (kernel - 1) + 1
  local room = in_size + 2 * padding - span
  if 2 * padding > kernel then
    error(("%s: padding is %d along the %s; it must be at most half of the kernel, %d"):format(call,
      padding, place, kernel))
  end
  if room < 0 and not (ceil and room + stride - 1 >= 0) then
    error(("%s: the kernel spans %d elements along the %s, more than the %d of the padded input"):format(call, span,
      place, in_size + 2 * padding))
  end
  local out = (ceil and math.ceil(room / stride) or math.floor(room / stride)) + 1
  if ceil and (out - 1) * stride >= in_size + padding then out = out - 1 end
  return out
end

local MAX_POOL = { stride = "whole|table", padding = "whole|table", dilation = "whole|table", ceil_mode = "boolean",
  return_indices = "boolean" }

-- Returns the kernel's size, stride, dilation, padding, and the size of the result. For a signal, each of these is 1 in
-- dimension H.
local function pooling(x, kernel, options, n, call)
  local k = pair(kernel, n, call .. ": the kernel's size", 1, 1)
  local stride = pair(options.stride or kernel, n, call .. ": stride", 1, 1)
  local dilation = pair(options.dilation or 1, n, call .. ": dilation", 1, 1)
  local padding = pair(options.padding or 0, n, call .. ": padding", 0, 0)
  local size = { 1, 1 }
  for i = 3 - n, 2 do
    size[i] = windows(x:size(i - 3), k[i], stride[i], dilation[i], padding[i], options.ceil_mode, call, PLACES[i])
  end
  return k, stride, dilation, padding, size
end

local function max_pool(x, kernel, options, n, call)
  options = caller.options(options, call, MAX_POOL)
  local single
  x, single = image(x, n, call)
  local k, stride, dilation, padding, size = pooling(x, kernel, options, n, call)
  local y, index = ops.max_pool(x, k, stride, dilation, padding, size, 0)
  if options.return_indices then return back(y, n, single), back(index, n, single) end
  return back(y, n, single)
end

--- Returns the largest element of each window. If the window contains a NaN, returns NaN.
---@param x ps.Tensor floats [N, C, L] or [C, L]
---@param kernel_size integer
---@param options? {stride?: integer, padding?: integer, dilation?: integer, ceil_mode?: boolean, return_indices?:
--- boolean} stride (default: the kernel's size); padding: at most half of the kernel's size (default 0); dilation
--- (default 1); ceil_mode: whether the last window may be incomplete; return_indices: whether to return indices
---@return ps.Tensor [N, C, length] or [C, length]
---@return ps.Tensor? indices int64, the index in [L] of each window's largest element; only with return_indices
function F.max_pool1d(x, kernel_size, options) return max_pool(x, kernel_size, options, 1, "F.max_pool1d") end

--- Returns the largest element of each window. If the window contains a NaN, returns NaN.
---@param x ps.Tensor floats [N, C, H, W] or [C, H, W]
---@param kernel_size integer|integer[]
---@param options? {stride?: integer|integer[], padding?: integer|integer[], dilation?: integer|integer[], ceil_mode?:
--- boolean, return_indices?: boolean} stride (default: the kernel's size); padding: at most half of the kernel's size
--- (default 0); dilation (default 1); ceil_mode: whether the last window may be incomplete; return_indices: whether to
--- return indices
---@return ps.Tensor [N, C, height, width] or [C, height, width]
---@return ps.Tensor? indices int64, the row-major index in [H, W] of each window's largest element; only with
--- return_indices
function F.max_pool2d(x, kernel_size, options) return max_pool(x, kernel_size, options, 2, "F.max_pool2d") end

local AVG_POOL = { stride = "whole|table", padding = "whole|table", ceil_mode = "boolean",
  count_include_pad = "boolean", divisor_override = "whole" }
local KIND = { windows = 0, adaptive = 1, nearest = 2, linear = 3, reflect = 4, replicate = 5, circular = 6 }
local NONE, ONE, ZEROS = { 0, 0 }, { 1, 1 }, { 0, 0, 0, 0 }
local LAST_OF_5 = 2 ^ 4                                       -- the bit of the last of five dimensions

local function avg_pool(x, kernel, options, n, call)
  options = caller.options(options, call, AVG_POOL)
  local single
  x, single = image(x, n, call)
  local k, stride, _, p, size = pooling(x, kernel, options, n, call)
  local divisor = options.divisor_override
  if divisor == 0 then error(call .. ": divisor_override is 0") end
  return back(ops.resample(x, KIND.windows, 0, size, k, stride, { p[1], p[2], p[1], p[2] },
    options.count_include_pad == false and 0 or 1, NONE, divisor or 0), n, single)
end

--- Returns the mean of each window. Padding counts as zeros.
---@param x ps.Tensor floats [N, C, L] or [C, L]
---@param kernel_size integer
---@param options? {stride?: integer, padding?: integer, ceil_mode?: boolean, count_include_pad?: boolean} stride
--- (default: the kernel's size); padding: at most half of the kernel's size (default 0); ceil_mode: whether the last
--- window may be incomplete; count_include_pad = false: sums are divided by the number of elements outside of the
--- padding
---@return ps.Tensor [N, C, length] or [C, length]
function F.avg_pool1d(x, kernel_size, options) return avg_pool(x, kernel_size, options, 1, "F.avg_pool1d") end

--- Returns the mean of each window. Padding counts as zeros.
---@param x ps.Tensor floats [N, C, H, W] or [C, H, W]
---@param kernel_size integer|integer[]
---@param options? {stride?: integer|integer[], padding?: integer|integer[], ceil_mode?: boolean, count_include_pad?:
--- boolean, divisor_override?: integer} stride (default: the kernel's size); padding: at most half of the kernel's size
--- (default 0); ceil_mode: whether the last window may be incomplete; count_include_pad = false: sums are divided by
--- the number of elements outside of the padding; divisor_override: number by which sums are divided
---@return ps.Tensor [N, C, height, width] or [C, height, width]
function F.avg_pool2d(x, kernel_size, options) return avg_pool(x, kernel_size, options, 2, "F.avg_pool2d") end

-- Returns the size of the result. If `size` is nil, or false in a list, the result has the input's size.
local function size_of(x, size, n, call)
  local list = type(size) == "table" and size or { size, n == 2 and size or nil }
  local out = { 1, 1 }
  for i = 1, n do
    local at = 2 - n + i
    out[at] = caller.whole(list[i] or x:size(at - 3), call .. ": the output's size", 1)
  end
  if #list > n then error(("%s: the output's size has %d numbers; it takes %d"):format(call, #list, n)) end
  return out
end

local function adaptive_avg(x, size, n, call)
  local single
  x, single = image(x, n, call)
  local out, H, W = size_of(x, size, n, call), x:size(2), x:size(3)
  if out[1] == 1 and (H == 1 or out[2] == 1) and W % out[2] == 0 and x.numel_ > 0 and x:is_float() then
    -- Windows of equal size, each of which is one range of memory. A mean is faster than the op for all sizes.
    return back(ops.mean(x:reshape(x:size(0), x:size(1), 1, out[2], -1), LAST_OF_5, 0), n, single)
  end
  return back(ops.resample(x, KIND.adaptive, 0, out, ONE, ONE, ZEROS, 0, NONE, 0), n, single)
end

local function adaptive_max(x, size, n, call)
  local single
  x, single = image(x, n, call)
  return back((ops.max_pool(x, ONE, ONE, ONE, NONE, size_of(x, size, n, call), 1)), n, single)
end

--- Divides each signal into `size` windows of nearly equal length, which together cover all elements. Returns the mean
--- of each window.
---@param x ps.Tensor floats [N, C, L] or [C, L]
---@param size integer
---@return ps.Tensor [N, C, size] or [C, size]
function F.adaptive_avg_pool1d(x, size) return adaptive_avg(x, size, 1, "F.adaptive_avg_pool1d") end

--- Divides each image into windows of nearly equal size, which together cover all elements. Returns the mean of each
--- window.
---@param x ps.Tensor floats [N, C, H, W] or [C, H, W]
---@param size integer|integer[] height and width of the result; false in a list means the input's size
---@return ps.Tensor [N, C, height, width] or [C, height, width]
function F.adaptive_avg_pool2d(x, size) return adaptive_avg(x, size, 2, "F.adaptive_avg_pool2d") end

--- Divides each signal into `size` windows of nearly equal length, which together cover all elements. Returns the
--- largest element of each window.
---@param x ps.Tensor floats [N, C, L] or [C, L]
---@param size integer
---@return ps.Tensor [N, C, size] or [C, size]
function F.adaptive_max_pool1d(x, size) return adaptive_max(x, size, 1, "F.adaptive_max_pool1d") end

--- Divides each image into windows of nearly equal size, which together cover all elements. Returns the largest element
--- of each window.
---@param x ps.Tensor floats [N, C, H, W] or [C, H, W]
---@param size integer|integer[] height and width of the result; false in a list means the input's size
---@return ps.Tensor [N, C, height, width] or [C, height, width]
function F.adaptive_max_pool2d(x, size) return adaptive_max(x, size, 2, "F.adaptive_max_pool2d") end

-- -- padding and interpolation --------------------------------------------------------------------------------------
local MODES = { constant = true, reflect = true, replicate = true, circular = true }

local function pad_constant(x, pad, value)
  local before, after, dims = {}, {}, x:dim()
  for d = 1, 8 do before[d], after[d] = 0, 0 end
  for i = 1, #pad, 2 do before[dims - (i - 1) / 2], after[dims - (i - 1) / 2] = pad[i], pad[i + 1] end
  return ops.pad(x, before, after, value)
end

-- Returns a tensor of one or more dimensions in the shape [A, B, H, W]. H is 1 if there is one spatial dimension.
local function as_image(x, n)
  local dims = x:dim()
  local H, W = n == 2 and x:size(-2) or 1, x:size(-1)
  local lead = 1
  for d = 0, dims - n - 1 do lead = lead * x:size(d) end
  return x:reshape(1, lead, H, W), function(y)
    local shape = {}
    for d = 0, dims - n - 1 do shape[d + 1] = x:size(d) end
    if n == 2 then shape[#shape + 1] = y:size(-2) end
    shape[#shape + 1] = y:size(-1)
    return y:reshape(shape)
  end
end

--- Adds elements at both ends of the last dimensions.
---@param x ps.Tensor of any type with "constant", and of a float type with the other modes
---@param pad integer[] number of elements to add before and after the last dimension, then before and after the second
--- to last dimension, and so on; a negative number removes elements (only with "constant")
---@param mode? "constant"|"reflect"|"replicate"|"circular" (default "constant"); the other modes pad one or two
--- dimensions
---@param value? number value of the elements that "constant" adds (default 0)
---@return ps.Tensor
function F.pad(x, pad, mode, value)
  if caller.tensor(x, "F.pad", "the input") == nil then error("F.pad: no input was given") end
  caller.list(pad, "F.pad: the padding")
  mode = mode or "constant"
  caller.one_of(mode, MODES, "F.pad: mode")
  local n = #pad / 2
  for i = 1, #pad do caller.whole(pad[i], "F.pad: the padding", mode ~= "constant" and 0 or nil) end
  if n % 1 ~= 0 or n > x:dim() then
    error(("F.pad: the padding has %d numbers; give two for each of at most %d dimensions"):format(#pad,
      x:dim()))
  end
  if value ~= nil then caller.typed(value, "number", "F.pad: the value") end
  if mode == "constant" then return pad_constant(x, pad, value) end
  if value ~= nil and value ~= 0 then error(("F.pad: mode = \"%s\" takes no value"):format(mode)) end
  if n ~= 1 and n ~= 2 then
    error(("F.pad: mode = \"%s\" pads the last one or two dimensions, not %d; call it once more for further ones")
      :format(mode, n))
  end
  local restored
  x, restored = as_image(x, n)
  local p = n == 2 and { pad[3], pad[1], pad[4], pad[2] } or { 0, pad[1], 0, pad[2] }
  local size = { x:size(2) + p[1] + p[3], x:size(3) + p[2] + p[4] }
  return restored(ops.resample(x, KIND[mode], 0, size, ONE, ONE, p, 0, NONE, 0))
end

local INTERPOLATE = { size = "whole|table", scale_factor = "number|table", mode = "string", align_corners = "boolean",
  recompute_scale_factor = "boolean" }
-- For each mode: its kind, its flag, and the number of spatial dimensions that it supports (nil if it supports both 1
-- and 2).
local INTERPOLATIONS = { nearest = { KIND.nearest, 0 }, ["nearest-exact"] = { KIND.nearest, 1 },
  linear = { KIND.linear, 0, 1 }, bilinear = { KIND.linear, 0, 2 }, area = { KIND.adaptive, 0 } }

--- Returns a signal or an image with a new size.
---@param x ps.Tensor floats [N, C, L] or [N, C, H, W]
---@param options {size?: integer|integer[], scale_factor?: number|number[], mode?: string, align_corners?: boolean,
--- recompute_scale_factor?: boolean} either size or scale_factor is required. mode: "nearest" (default),
--- "nearest-exact", "linear" (for signals), "bilinear" (for images) or "area". align_corners: whether the elements at
--- the corners keep their values in the two linear modes (default false). recompute_scale_factor: whether distances are
--- computed from the sizes instead of scale_factor
---@return ps.Tensor [N, C, length] or [N, C, height, width]
function F.interpolate(x, options)
  options = caller.options(options, "F.interpolate", INTERPOLATE)
  if caller.tensor(x, "F.interpolate", "the input") == nil then error("F.interpolate: no input was given") end
  local n = x:dim() - 2
  if n ~= 1 and n ~= 2 then
    error(("F.interpolate takes [N, C, L] or [N, C, H, W], not a tensor of %s"):format(dimensions(x:dim())))
  end
  local mode = options.mode or "nearest"
  local kind = caller.one_of(mode, INTERPOLATIONS, "F.interpolate: mode")
  if kind[3] and kind[3] ~= n then
    error(("F.interpolate: mode = \"%s\" takes %s; use \"%s\""):format(mode, kind[3] == 1 and "[N, C, L]"
      or "[N, C, H, W]", n == 1 and "linear" or "bilinear"))
  end
  if options.align_corners ~= nil and kind[1] ~= KIND.linear then
    error(("F.interpolate: align_corners is for \"linear\" and \"bilinear\", not for \"%s\""):format(mode))
  end
  if (options.size == nil) == (options.scale_factor == nil) then
    error("F.interpolate takes either size or scale_factor")
  end
  local size, scale, factor = { 1, 1 }, { 0, 0 }, options.scale_factor
  if factor == nil then
    size = pair(options.size, n, "F.interpolate: size", 1, 1)
  else
    local list = type(factor) == "table" and factor or { factor, n == 2 and factor or nil }
    if #list ~= n then error(("F.interpolate: scale_factor has %d numbers; it needs %d"):format(#list, n)) end
    for i = 1, n do
      local by = caller.typed(list[i], "number", "F.interpolate: scale_factor")
      local at = 2 - n + i
      if by <= 0 or by ~= by then error(("F.interpolate: scale_factor is %g; it must be above 0"):format(by)) end
      size[at] = math.floor(x:size(at - 3) * by)
      if size[at] < 1 then
        error(("F.interpolate: scale_factor %g leaves %d of %d elements"):format(by, size[at], x:size(at - 3)))
      end
      if not options.recompute_scale_factor and kind[1] ~= KIND.adaptive then scale[at] = 1 / by end
    end
  end
  local single
  x, single = image(x, n, "F.interpolate")
  return back(ops.resample(x, kind[1], 0, size, ONE, ONE, ZEROS, options.align_corners and 1 or kind[2], scale, 0), n,
    single)
end

-- -- norms over channels --------------------------------------------------------------------------------------------
-- Returns whether the current forward must update the running statistics. It must not if backward is recomputing a
-- segment.
local function counts()
  local at = scope.segment
  while at do
    if at.again then return false end
    at = at.outer
  end
  return true
end

-- Moves the running values [C] towards value * scale. `factor` is the fraction of the distance by which the values
-- move. It is a number or a tensor without dimensions.
local function move(running, value, scale, factor)
  if type(factor) == "number" and type(scale) == "number" then
    ops.scale_(running, 1 - factor)
    ops.axpy_(running, value, factor * scale)
  else
    running:copy_(running + (value * scale - running) * factor)
  end
end

-- Updates the running statistics [C] with the mean [C] and the variance [C] of the elements of each channel. `count` is
-- the number of elements per channel, by which the variance was divided. `momentum` is the weight of the new values.
local function move_statistics(mean, var, count, running_mean, running_var, momentum)
  scope.no_grad(function()
    move(running_mean, mean, 1, momentum)
    move(running_var, var, count / (count - 1), momentum)
  end)
end

-- Normalises x [N, C, ...]. Returns the result, and the mean, variance and count.
local function batch_statistics(x, weight, bias, eps)
  if x:dim() < 2 then
    error(("F.batch_norm takes [N, C, ...], not a tensor of %s"):format(dimensions(x:dim())))
  end
  local count = x:numel() / x:size(1)
  if count == 1 then
    error(("F.batch_norm: training needs more than 1 value per channel; the input is [%s]"):format(
      table.concat(x:shape(), ", ")))
  end
  local y, mean, var = ops.channel_norm(x, weight, bias, nil, nil, eps, 0)
  return y:to(x:dtype()), mean, var, count                -- autocast computed y in fp32
end

--- Moves channels to positions. Each group of r^2 channels becomes one channel with r times the height and r times the
--- width (Shi et al. 2016).
---@param x ps.Tensor [N, C * r^2, H, W]
---@param r integer
---@return ps.Tensor [N, C, H * r, W * r]
function F.pixel_shuffle(x, r)
  local call = "F.pixel_shuffle"
  if caller.tensor(x, call, "x") == nil then error(call .. ": x is missing") end
  caller.whole(r, call .. ": the factor", 1)
  if x:dim() ~= 4 or x:size(1) % (r * r) ~= 0 then
    error(("%s takes [N, C, H, W] with a number of channels that %d divides, not [%s]"):format(call, r * r,
      table.concat(x:shape(), ", ")))
  end
  if r == 1 then return x:clone() end
  local n, c, h, w = unpack(x:shape())
  c = c / (r * r)
  return x:reshape(n, c, r, r, h, w):permute(0, 1, 4, 2, 5, 3):contiguous():reshape(n, c, h * r, w * r)
end

local BATCH_NORM = { training = "boolean", momentum = "number|tensor", eps = "number" }

--- Normalises each channel over the batch and all positions (Ioffe and Szegedy 2015). Multiplies the result by weight
--- and adds bias.
---@param x ps.Tensor floats [N, C, ...]
---@param running_mean? ps.Tensor [C]
---@param running_var? ps.Tensor [C]
---@param weight? ps.Tensor [C]
---@param bias? ps.Tensor [C]
---@param options? {training?: boolean, momentum?: number|ps.Tensor, eps?: number} training (default false): if true,
--- normalises with the mean and variance of the batch. If there are running statistics, also moves them towards the
--- batch's statistics by momentum (default 0.1). The statistics are moved once per forward, even if backward recomputes
--- the forward. If training is false, normalises with the running statistics. eps (default 1e-5)
---@return ps.Tensor of x's shape
function F.batch_norm(x, running_mean, running_var, weight, bias, options)
  options = caller.options(options, "F.batch_norm", BATCH_NORM)
  if caller.tensor(x, "F.batch_norm", "the input") == nil then error("F.batch_norm: no input was given") end
  local eps = options.eps or 1e-5
  if not options.training then
    if running_mean == nil or running_var == nil then
      error("F.batch_norm needs running_mean and running_var, or { training = true }")
    end
    local dtype = x:dtype() == "fp64" and "fp64" or "fp32"
    local y = ops.channel_norm(x, weight, bias, running_mean:to(dtype), running_var:to(dtype), eps, 0)
    return y:to(x:dtype())
  end
  local y, mean, var, count = batch_statistics(x, weight, bias, eps)
  if running_mean ~= nil and running_var ~= nil and counts() then
    move_statistics(mean, var, count, running_mean, running_var, options.momentum or 0.1)
  end
  return y
end

--- Normalises groups of channels of each sample over all positions (Wu and He 2018). Multiplies the result by weight
--- and adds bias.
---@param x ps.Tensor floats [N, C, ...]
---@param num_groups integer number of groups, which must divide C
---@param weight? ps.Tensor [C]
---@param bias? ps.Tensor [C]
---@param eps? number default 1e-5
---@return ps.Tensor of x's shape
function F.group_norm(x, num_groups, weight, bias, eps)
  if caller.tensor(x, "F.group_norm", "the input") == nil then error("F.group_norm: no input was given") end
  caller.whole(num_groups, "F.group_norm: the groups", 1)
  return (ops.channel_norm(x, weight, bias, nil, nil, eps or 1e-5, num_groups))
end

return { functions = F, counts = counts, move_statistics = move_statistics, batch_statistics = batch_statistics }
