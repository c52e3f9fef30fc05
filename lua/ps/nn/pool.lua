-- SPDX-License-Identifier: BSD-3-Clause
-- Modules for signals and images that have no parameters: pooling and Upsample.
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local core = require "ps.nn.module"
local F = functional

local pool = {}

local function shown(value)
  if type(value) ~= "table" then return tostring(value) end
  local list = {}
  for i, v in ipairs(value) do list[i] = tostring(v) end
  return "(" .. table.concat(list, ", ") .. ")"
end

local function text_of(self)
  local names, text = {}, "kernel_size=" .. shown(self.kernel_size)
  for name in pairs(self.options) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do text = ("%s, %s=%s"):format(text, name, shown(self.options[name])) end
  return text
end

-- Creates a class whose objects call fn(x, kernel_size, options).
local function windowed(name, fn, kinds)
  local class = core.class(name)
  class.unscoped, class.extra_repr = true, text_of
  --- Stores the size of the windows and the options for the function of the same name in ps.F, which pools windows of
  --- the last dimensions.
  ---@param kernel_size integer|integer[]
  ---@param options? table options of this function
  function class:init(kernel_size, options)
    caller.options(options, "nn." .. name, kinds)
    if type(kernel_size) ~= "table" then caller.whole(kernel_size, "nn." .. name .. ": kernel_size", 1) end
    self.kernel_size, self.options = kernel_size, {}
    for key, value in pairs(options or {}) do self.options[key] = value end
  end
  --- Pools each channel.
  ---@param x ps.Tensor [N, C, ...]
  ---@return ps.Tensor [N, C, ...]
  function class:forward(x) return fn(x, self.kernel_size, self.options) end
  class._like = name:gsub("Pool", "_pool"):lower()
  pool[name] = class
end

local MAX = { stride = "whole|table", padding = "whole|table", dilation = "whole|table", ceil_mode = "boolean",
  return_indices = "boolean" }
local AVG = { stride = "whole|table", padding = "whole|table", ceil_mode = "boolean", count_include_pad = "boolean",
  divisor_override = "whole" }

windowed("MaxPool1d", F.max_pool1d, MAX)
windowed("MaxPool2d", F.max_pool2d, MAX)
windowed("AvgPool1d", F.avg_pool1d, AVG)
windowed("AvgPool2d", F.avg_pool2d, AVG)

-- Creates a class whose objects call fn(x, output_size).
local function adaptive(name, fn)
  local class = core.class(name)
  class.unscoped = true
  --- Stores the size of the output for the function of the same name in ps.F. The windows of this function cover the
  --- last dimensions.
  ---@param output_size integer|integer[] size of the output; false in a list means the size of the input
  function class:init(output_size)
    if type(output_size) ~= "table" then caller.whole(output_size, "nn." .. name .. ": output_size", 1) end
    self.output_size = output_size
  end
  --- Pools each channel.
  ---@param x ps.Tensor [N, C, ...]
  ---@return ps.Tensor [N, C, output_size]
  function class:forward(x) return fn(x, self.output_size) end
  class._like = name:gsub("(%l)(%u)", "%1_%2"):lower()
  function class:extra_repr() return "output_size=" .. shown(self.output_size) end
  pool[name] = class
end

adaptive("AdaptiveAvgPool1d", F.adaptive_avg_pool1d)
adaptive("AdaptiveAvgPool2d", F.adaptive_avg_pool2d)
adaptive("AdaptiveMaxPool1d", F.adaptive_max_pool1d)
adaptive("AdaptiveMaxPool2d", F.adaptive_max_pool2d)

---@class ps.nn.Upsample: ps.nn.Module
local Upsample = core.class("Upsample")
Upsample.unscoped = true
local UPSAMPLE = { size = "whole|table", scale_factor = "number|table", mode = "string", align_corners = "boolean",
  recompute_scale_factor = "boolean" }

--- Stores the options of F.interpolate, with which forward resizes a signal or an image.
---@param options {size?: integer|integer[], scale_factor?: number|number[], mode?: string, align_corners?: boolean,
---  recompute_scale_factor?: boolean}
function Upsample:init(options)
  self.options = {}
  for key, value in pairs(caller.options(options, "nn.Upsample", UPSAMPLE)) do self.options[key] = value end
end
--- Returns the resized input.
---@param x ps.Tensor [N, C, L] or [N, C, H, W]
---@return ps.Tensor [N, C, ...]
function Upsample:forward(x) return F.interpolate(x, self.options) end
function Upsample:extra_repr()
  local of = self.options
  return ("%s=%s, mode=%s"):format(of.size and "size" or "scale_factor", shown(of.size or of.scale_factor),
    of.mode or "nearest")
end
pool.Upsample = Upsample

return pool
