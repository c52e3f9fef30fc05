-- SPDX-License-Identifier: BSD-3-Clause
-- Normalisation over the last dimensions: LayerNorm and RMSNorm.
local create = require "ps.tensor.create"
local functional = require "ps.tensor.functional"
local caller = require "ps.core.caller"
local nn_module = require "ps.nn.module"
local F = functional

---@class ps.nn.LayerNorm: ps.nn.Module
---@field weight ps.Tensor [width]
---@field bias? ps.Tensor [width]
local LayerNorm = nn_module.class("LayerNorm")
LayerNorm.unscoped = true

local LAYER_NORM = { eps = "number", bias = "boolean", elementwise_affine = "boolean", dtype = "string",
  device = "string" }

--- Creates a layer that computes (x - mean) / sqrt(variance + eps) * weight + bias. Mean and variance are taken over
--- the last dimension, or over several last dimensions together. The initial weight is 1 and the initial bias is 0.
---@param width integer|integer[] the size of the last dimension, or the sizes of the last dimensions
---@param options? {eps?: number, bias?: boolean, elementwise_affine?: boolean, dtype?: string, device?: string} eps
--- (default 1e-5); bias (default true); elementwise_affine = false: neither weight nor bias
function LayerNorm:init(width, options)
  options = caller.options(options, "nn.LayerNorm", LAYER_NORM)
  local shape = type(width) == "table" and caller.list(width, "nn.LayerNorm: the sizes") or { width }
  if #shape == 0 then caller.error("nn.LayerNorm: the list of sizes is empty") end
  local all = {}
  for i, n in ipairs(shape) do all[i] = caller.whole(n, "nn.LayerNorm: the width") end
  self.width, self.eps, self.sizes = #all == 1 and all[1] or all, options.eps or 1e-5, table.concat(all, ", ")
  self.dims = #all
  if options.elementwise_affine == false then return end
  local where = { dtype = options.dtype, device = options.device }
  self:param("weight", create.ones(all, where))
  if options.bias ~= false then self:param("bias", create.zeros(all, where)) end
end

--- Normalises over the last dimension or dimensions.
---@param x ps.Tensor [..., width]
---@return ps.Tensor [..., width]
function LayerNorm:forward(x) return F.layer_norm(x, self.weight, self.bias, self.eps, self.dims) end

function LayerNorm:extra_repr() return ("%s, eps=%g"):format(self.sizes, self.eps) end

---@class ps.nn.RMSNorm: ps.nn.Module
---@field weight ps.Tensor [width]
local RMSNorm = nn_module.class("RMSNorm")
RMSNorm.unscoped = true

local RMS_NORM = { eps = "number", dtype = "string", device = "string" }

--- Creates a layer that computes x / sqrt(mean(x^2) + eps) * weight. The mean is taken over the last dimension. The
--- initial weight is 1.
---@param width integer
---@param options? {eps?: number, dtype?: string, device?: string} eps (default 1e-6)
function RMSNorm:init(width, options)
  options = caller.options(options, "nn.RMSNorm", RMS_NORM)
  caller.whole(width, "nn.RMSNorm: the width")
  self.width, self.eps = width, options.eps or 1e-6
  self:param("weight", create.ones({ width }, { dtype = options.dtype, device = options.device }))
end

--- Normalises over the last dimension.
---@param x ps.Tensor [..., width]
---@return ps.Tensor [..., width]
function RMSNorm:forward(x) return F.rms_norm(x, self.weight, self.eps) end

function RMSNorm:extra_repr() return ("%d, eps=%g"):format(self.width, self.eps) end

return { LayerNorm = LayerNorm, RMSNorm = RMSNorm }
