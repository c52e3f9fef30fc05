-- SPDX-License-Identifier: BSD-3-Clause
-- Convolutions of signals [N, C, L] and images [N, C, H, W], and transposed convolutions. Weights have PyTorch's
-- layouts.
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local core = require "ps.nn.module"
local init = require "ps.nn.weights"
local error = caller.error
local F = functional

local conv = {}

local MODES = { zeros = "zeros", reflect = "reflect", replicate = "replicate", circular = "circular" }
local CONV = { stride = "whole|table", padding = "whole|table|string", dilation = "whole|table", groups = "whole",
  bias = "boolean", padding_mode = "string", dtype = "string", device = "string" }
local TRANSPOSE = { stride = "whole|table", padding = "whole|table", output_padding = "whole|table", groups = "whole",
  bias = "boolean", dilation = "whole|table", dtype = "string", device = "string" }

-- Returns a list of n numbers, one per dimension. `value` is one number for all dimensions, or a list.
local function each(value, n, what, least)
  local list = type(value) == "table" and caller.list(value, what) or {}
  for i = 1, n do list[i] = type(value) == "table" and value[i] or value end
  if #list ~= n then error(("%s has %d numbers; it takes %d"):format(what, #list, n)) end
  for i = 1, n do caller.whole(list[i], what, least) end
  return list
end

local function divides(self, name, channels, what)
  if channels % self.groups ~= 0 then
    error(("%s: %d %s channels cannot be divided into %d groups"):format(name, channels, what, self.groups))
  end
end

-- Creates the weight [first, second / groups, ...] and the bias. Both are uniform in [-b, b], as in PyTorch, where b =
-- 1 / sqrt(fan in).
local function make(self, options, first, second)
  local shape, where = { first, second / self.groups }, { dtype = options.dtype, device = options.device }
  local fan_in = second / self.groups
  for i, k in ipairs(self.kernel_size) do shape[2 + i], fan_in = k, fan_in * k end
  self:param("weight", init.kaiming_uniform_(create.empty(shape, where), math.sqrt(5)))
  if options.bias == false then return end
  local bound = 1 / math.sqrt(fan_in)
  self:param("bias", init.uniform_(create.empty({ self.out_channels }, where), -bound, bound))
end

local function sizes(self, name, n, in_channels, out_channels, kernel_size, options)
  self.in_channels = caller.whole(in_channels, name .. ": in_channels", 1)
  self.out_channels = caller.whole(out_channels, name .. ": out_channels", 1)
  self.kernel_size = each(kernel_size, n, name .. ": kernel_size", 1)
  self.stride = each(options.stride or 1, n, name .. ": stride", 1)
  self.dilation = each(options.dilation or 1, n, name .. ": dilation", 1)
  self.groups = caller.whole(options.groups or 1, name .. ": groups", 1)
  divides(self, name, in_channels, "input")
  divides(self, name, out_channels, "output")
end

local function init_conv(self, name, n, in_channels, out_channels, kernel_size, options)
  options = caller.options(options, name, CONV)
  sizes(self, name, n, in_channels, out_channels, kernel_size, options)
  self.padding_mode = caller.one_of(options.padding_mode or "zeros", MODES, name .. ": padding_mode")
  self.padding = options.padding or 0
  if type(self.padding) ~= "string" then self.padding = each(self.padding, n, name .. ": padding", 0) end
  if type(self.padding) == "string" and self.padding ~= "same" and self.padding ~= "valid" then
    error(("%s: padding is '%s' (allowed: 'same', 'valid', numbers)"):format(name, self.padding))
  end
  for i = 1, n do
    if self.padding == "same" and self.stride[i] ~= 1 then
      error(("%s: padding = \"same\" takes stride 1, not %d"):format(name, self.stride[i]))
    end
  end
  self.use = { stride = self.stride, padding = self.padding, dilation = self.dilation, groups = self.groups }
  if self.padding_mode ~= "zeros" then                            -- F.pad's list begins with the last dimension
    local around = {}
    for i = n, 1, -1 do
      local total = self.padding == "same" and self.dilation[i] * (self.kernel_size[i] - 1) or 0
      local p = type(self.padding) == "table" and self.padding[i]
      around[#around + 1], around[#around + 2] = p or math.floor(total / 2), p or math.ceil(total / 2)
    end
    self.around, self.use.padding = around, 0
  end
  make(self, options, out_channels, in_channels)
end

local function forward(self, x, fn)
  if not self.around then return fn(x, self.weight, self.bias, self.use) end
  return fn(F.pad(x, self.around, self.padding_mode), self.weight, self.bias, self.use)
end

local function extra_repr(self)
  local text = ("%d, %d, kernel_size=(%s), stride=(%s)"):format(self.in_channels, self.out_channels,
    table.concat(self.kernel_size, ", "), table.concat(self.stride, ", "))
  if type(self.padding) == "string" then text = text .. ", padding=" .. self.padding end
  for _, name in ipairs { "padding", "output_padding", "dilation" } do
    local list = self[name]
    local plain = name == "dilation" and 1 or 0
    if type(list) == "table" and (list[1] ~= plain or list[#list] ~= plain) then
      text = ("%s, %s=(%s)"):format(text, name, table.concat(list, ", "))
    end
  end
  if self.groups ~= 1 then text = ("%s, groups=%d"):format(text, self.groups) end
  if self.bias == nil then text = text .. ", bias=False" end
  if self.padding_mode and self.padding_mode ~= "zeros" then text = text .. ", padding_mode=" .. self.padding_mode end
  return text
end

---@class ps.nn.Conv1d: ps.nn.Module
---@field weight ps.Tensor [out_channels, in_channels / groups, kernel_size]
---@field bias? ps.Tensor [out_channels]
local Conv1d = core.class("Conv1d")
Conv1d.unscoped, Conv1d.extra_repr = true, extra_repr

--- Creates a cross-correlation of signals. Weight and bias are uniform in [-b, b], as in PyTorch, where b = 1 /
--- sqrt(in_channels / groups * kernel_size). nn.Conv1D is a different layer: it is the product with a weight in Hugging
--- Face's GPT-2.
---@param in_channels integer
---@param out_channels integer
---@param kernel_size integer
---@param options? {stride?: integer, padding?: integer|"same"|"valid", dilation?: integer, groups?: integer, bias?:
--- boolean, padding_mode?: "zeros"|"reflect"|"replicate"|"circular", dtype?: string, device?: string} defaults: stride
--- 1, padding 0, dilation 1, groups 1, bias true, padding_mode "zeros"
function Conv1d:init(in_channels, out_channels, kernel_size, options)
  init_conv(self, "nn.Conv1d", 1, in_channels, out_channels, kernel_size, options)
end
--- Returns the cross-correlation of x with the weight, plus the bias.
---@param x ps.Tensor [N, in_channels, L] or [in_channels, L]
---@return ps.Tensor [N, out_channels, length] or [out_channels, length]
function Conv1d:forward(x) return forward(self, x, F.conv1d) end
conv.Conv1d = Conv1d

---@class ps.nn.Conv2d: ps.nn.Module
---@field weight ps.Tensor [out_channels, in_channels / groups, height, width of the kernel]
---@field bias? ps.Tensor [out_channels]
local Conv2d = core.class("Conv2d")
Conv2d.unscoped, Conv2d.extra_repr = true, extra_repr

--- Creates a cross-correlation of images. Weight and bias are uniform in [-b, b], as in PyTorch, where b = 1 / sqrt(fan
--- in). The fan in is in_channels / groups times the number of elements of a kernel.
---@param in_channels integer
---@param out_channels integer
---@param kernel_size integer|integer[]
---@param options? {stride?: integer|integer[], padding?: integer|integer[]|"same"|"valid", dilation?:
--- integer|integer[], groups?: integer, bias?: boolean, padding_mode?: "zeros"|"reflect"|"replicate"|"circular",
--- dtype?: string, device?: string} defaults: stride 1, padding 0, dilation 1, groups 1, bias true, and padding_mode
--- "zeros"
function Conv2d:init(in_channels, out_channels, kernel_size, options)
  init_conv(self, "nn.Conv2d", 2, in_channels, out_channels, kernel_size, options)
end
--- Returns the cross-correlation of x with the weight, plus the bias.
---@param x ps.Tensor [N, in_channels, H, W] or [in_channels, H, W]
---@return ps.Tensor [N, out_channels, height, width] or [out_channels, height, width]
function Conv2d:forward(x) return forward(self, x, F.conv2d) end
conv.Conv2d = Conv2d

local function init_transpose(self, name, n, in_channels, out_channels, kernel_size, options)
  options = caller.options(options, name, TRANSPOSE)
  sizes(self, name, n, in_channels, out_channels, kernel_size, options)
  self.padding = each(options.padding or 0, n, name .. ": padding", 0)
  self.output_padding = each(options.output_padding or 0, n, name .. ": output_padding", 0)
  self.use = { stride = self.stride, padding = self.padding, output_padding = self.output_padding,
    dilation = self.dilation, groups = self.groups }
  make(self, options, in_channels, out_channels)
end

---@class ps.nn.ConvTranspose1d: ps.nn.Module
---@field weight ps.Tensor [in_channels, out_channels / groups, kernel_size]
---@field bias? ps.Tensor [out_channels]
local ConvTranspose1d = core.class("ConvTranspose1d")
ConvTranspose1d.unscoped, ConvTranspose1d.extra_repr = true, extra_repr

--- Creates a transposed convolution of signals. It is the transpose of nn.Conv1d and makes signals longer. Weight and
--- bias are uniform in [-b, b], as in PyTorch, where b = 1 / sqrt(out_channels / groups * kernel_size).
---@param in_channels integer
---@param out_channels integer
---@param kernel_size integer
---@param options? {stride?: integer, padding?: integer, output_padding?: integer, groups?: integer, bias?: boolean,
--- dilation?: integer, dtype?: string, device?: string} defaults: stride 1, padding 0, output_padding 0, groups 1, bias
--- true, dilation 1
function ConvTranspose1d:init(in_channels, out_channels, kernel_size, options)
  init_transpose(self, "nn.ConvTranspose1d", 1, in_channels, out_channels, kernel_size, options)
end
--- Returns the transposed convolution of x with the weight, plus the bias.
---@param x ps.Tensor [N, in_channels, L] or [in_channels, L]
---@return ps.Tensor [N, out_channels, length] or [out_channels, length]
function ConvTranspose1d:forward(x) return F.conv_transpose1d(x, self.weight, self.bias, self.use) end
conv.ConvTranspose1d = ConvTranspose1d

---@class ps.nn.ConvTranspose2d: ps.nn.Module
---@field weight ps.Tensor [in_channels, out_channels / groups, height, width of the kernel]
---@field bias? ps.Tensor [out_channels]
local ConvTranspose2d = core.class("ConvTranspose2d")
ConvTranspose2d.unscoped, ConvTranspose2d.extra_repr = true, extra_repr

--- Creates a transposed convolution of images. It is the transpose of nn.Conv2d and enlarges images. Weight and bias
--- are uniform in [-b, b], as in PyTorch, where b = 1 / sqrt(n). n is out_channels / groups times the number of
--- elements of a kernel.
---@param in_channels integer
---@param out_channels integer
---@param kernel_size integer|integer[]
---@param options? {stride?: integer|integer[], padding?: integer|integer[], output_padding?: integer|integer[],
--- groups?: integer, bias?: boolean, dilation?: integer|integer[], dtype?: string, device?: string} defaults: stride 1,
--- padding 0, output_padding 0, groups 1, bias true, dilation 1
function ConvTranspose2d:init(in_channels, out_channels, kernel_size, options)
  init_transpose(self, "nn.ConvTranspose2d", 2, in_channels, out_channels, kernel_size, options)
end
--- Returns the transposed convolution of x with the weight, plus the bias.
---@param x ps.Tensor [N, in_channels, H, W] or [in_channels, H, W]
---@return ps.Tensor [N, out_channels, height, width] or [out_channels, height, width]
function ConvTranspose2d:forward(x) return F.conv_transpose2d(x, self.weight, self.bias, self.use) end
conv.ConvTranspose2d = ConvTranspose2d

return conv
